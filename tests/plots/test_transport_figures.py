"""Figures of plans, barycenters and bridges: where points are drawn, which lines, and what the titles say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.patches import Wedge

from helmscope.plots.canvas import Canvas
from helmscope.plots.draw import plot
from helmscope.plots.transport import plan_figure
from helmscope.theory.starts import Uniform, VonMisesFisher
from helmscope.transport.barycenter import free_support_barycenter
from helmscope.transport.circle import circle_plan
from helmscope.transport.cloud_bridge import bridge_clouds
from helmscope.transport.cost import Chordal, Euclidean
from helmscope.transport.discrete_bridge import bridge_chain
from helmscope.transport.exact import exact_plan
from helmscope.transport.gaussian_bridge import GaussianBridge
from helmscope.transport.line import line_plan
from helmscope.transport.sinkhorn_plan import sinkhorn
from helmscope.types import HelmscopeError


def lines_of(figure):
    return [each for each in figure.axes[0].collections if isinstance(each, LineCollection)]


def marks_of(panel):
    return [each for each in panel.collections if isinstance(each, PathCollection)]


def test_a_plan_on_the_circle_has_its_points_and_one_arc_per_entry():
    angles = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], -1)
    y = torch.stack([(angles + 0.5).cos(), (angles + 0.5).sin()], -1)
    figure = circle_plan(x, y).plot(title="three points")
    drawn = np.concatenate([mark.get_offsets() for mark in marks_of(figure.axes[0])])
    assert sorted(map(tuple, drawn.round(9))) == sorted(map(tuple, torch.cat([x, y]).numpy().round(9)))
    segments = [segment for each in lines_of(figure) for segment in each.get_segments()]
    assert len(segments) == 3
    for segment in segments:
        radius = np.linalg.norm(segment, axis=-1)
        assert np.allclose(radius[[0, -1]], 1)
        assert radius.min() == pytest.approx(1 / np.cos(0.25) - np.tan(0.25))  # an arc that meets the circle
        step = segment[1] - segment[0]
        assert abs(step @ segment[0]) > 0.98 * np.linalg.norm(step)  # at right angles
        unit = segment / radius[:, None]
        swept = np.arccos(np.clip((unit[:-1] * unit[1:]).sum(-1), -1, 1)).sum()
        assert swept == pytest.approx(0.5, abs=1e-6)
        turns = np.diff(np.unwrap(np.arctan2(*np.diff(segment, axis=0).T[::-1])))
        assert np.ptp(turns) < 1e-6  # without corners: all turns are equal
    assert figure._suptitle.get_text().startswith("three points\n3 lines with 100% of the mass")


def test_titles_name_the_distance_of_an_exact_plan_and_the_cost_of_an_entropic_one():
    x = torch.eye(2, dtype=torch.float64)
    assert circle_plan(x, -x).plot()._suptitle.get_text().startswith("optimal plan: W_2 = 1.571\n")
    assert circle_plan(x, -x, p=1).plot()._suptitle.get_text().startswith("optimal plan: W_1 = 1.571\n")
    entropic = sinkhorn(x, -x, epsilon=0.2)
    cost = f"entropic plan, epsilon = 0.2: transport cost {float(entropic.value):.4g} (dist^2)"
    assert entropic.plot()._suptitle.get_text().startswith(cost)


def test_antipodal_points_of_the_circle_are_joined_by_a_diameter():
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    (segment,) = [segment for each in lines_of(circle_plan(x, -x).plot()) for segment in each.get_segments()]
    assert np.allclose(segment[:, 1], 0)
    assert np.allclose(segment[[0, -1], 0], [1, -1])


def test_marginals_on_the_circle_and_on_the_line_are_histograms():
    start = VonMisesFisher(n=50, dim=2, kappa=5.0).sample(seed=0)
    figure = plot(bridge_clouds(start, -start, nu=0.3), n=500, panels=3)
    for panel in figure.axes:
        wedges = [each for each in panel.patches if isinstance(each, Wedge)]
        assert max(each.width for each in wedges) == pytest.approx(0.75)
        assert not marks_of(panel)
    one = torch.ones(1, 1, dtype=torch.float64)
    line = plot(GaussianBridge(torch.zeros(1), one, torch.ones(1), one / 4, nu=0.3), n=500, panels=3)
    for panel in line.axes:
        edges, counts = panel.patches[0].get_data().edges, panel.patches[0].get_data().values
        assert float((np.diff(edges) * counts).sum()) == pytest.approx(1)
        assert panel.get_ylim() == line.axes[0].get_ylim()


def test_the_bridge_of_a_chain_is_a_map_of_its_probabilities():
    lazy = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9]], dtype=torch.float64)
    bridge = bridge_chain([lazy] * 4, torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.2, 0.3, 0.5]))
    figure = bridge.plot(title="a chain")
    assert np.allclose(figure.axes[0].images[0].get_array(), bridge.marginals.numpy().T)
    assert figure._suptitle.get_text() == "a chain"


def test_lines_are_the_heaviest_entries():
    x, y = Uniform(n=20, dim=3).sample(seed=0), VonMisesFisher(n=30, dim=3, kappa=5.0).sample(seed=1)
    plan = sinkhorn(x, y, epsilon=0.2, cost=Chordal())
    figure = plan_figure(plan, lines=7)
    assert sum(len(each.get_segments()) for each in lines_of(figure)) == 7
    share = plan.matrix.flatten().sort(descending=True).values[:7].sum() / plan.matrix.sum()
    assert f"7 lines with {float(share):.0%} of the mass" in figure._suptitle.get_text()
    assert "on the unit sphere" in figure._suptitle.get_text()


def test_a_plan_too_large_to_store_is_drawn_by_its_images(monkeypatch):
    monkeypatch.setattr("helmscope.plots.transport.STORED_PAIRS", 100)
    x, y = Uniform(n=20, dim=8).sample(seed=0), Uniform(n=20, dim=8).sample(seed=1)
    figure = plan_figure(sinkhorn(x, y, epsilon=0.5, cost=Chordal()), lines=5)
    assert sum(len(each.get_segments()) for each in lines_of(figure)) == 5
    assert "mean image of a point" in figure._suptitle.get_text()
    assert "2 principal directions of 8" in figure._suptitle.get_text()


def test_a_plan_in_the_plane_has_straight_lines():
    x = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    figure = plot(exact_plan(x, x + torch.tensor([0.0, 1.0]), cost=Euclidean()))
    ends = sorted(tuple(segment[[0, -1]].flatten()) for each in lines_of(figure) for segment in each.get_segments())
    assert np.allclose(ends, [(0, 0, 0, 1), (4, 0, 4, 1)])


def test_a_plan_on_the_line_has_its_clouds_on_two_levels():
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]])
    figure = plot(line_plan(x, y))
    ends = sorted(tuple(segment[[0, -1]].flatten()) for each in lines_of(figure) for segment in each.get_segments())
    assert np.allclose(ends, [(0, 1.5, 2, 0), (1, 1.5, 3, 0)])
    assert "in R^1" in figure._suptitle.get_text()


def test_a_barycenter_is_drawn_with_its_clouds():
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    figure = plot(free_support_barycenter(x, [x, x + 2], cost=Euclidean()))
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["cloud 0: 2 points", "cloud 1: 2 points", "barycenter: 2 points"]
    middle = np.concatenate([mark.get_offsets() for mark in marks_of(figure.axes[0])])[-2:]
    assert np.allclose(sorted(map(tuple, middle)), [(1, 1), (2, 1)], atol=1e-6)


def test_a_bridge_is_drawn_at_times_up_to_its_horizon():
    start = VonMisesFisher(n=50, dim=3, kappa=30.0).sample(seed=0)
    figure = plot(bridge_clouds(start, -start, nu=0.3, horizon=2.0), n=30, panels=3)
    assert [panel.get_title() for panel in figure.axes] == ["t = 0", "t = 1", "t = 2"]
    for panel in figure.axes:
        assert sum(len(mark.get_offsets()) for mark in marks_of(panel)) == 30
    with pytest.raises(HelmscopeError, match="unknown option of plot 'panel': did you mean 'panels'"):
        plot(bridge_clouds(start, -start, nu=0.3), panel=2)


def test_the_far_side_of_a_globe_is_known():
    canvas = Canvas.of(np.eye(3), on_sphere=True, view=(0.0, 0.0))
    places, front = canvas.place(np.array([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    assert front.tolist() == [True, False, True]
    assert np.allclose(places, [[0, 0], [0, 0], [1, 0]])
