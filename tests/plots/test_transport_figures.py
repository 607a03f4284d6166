"""Figures of plans, barycenters and bridges: where points are drawn, which lines, and what the titles say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection

from helmscope.plots.canvas import Canvas
from helmscope.plots.draw import plot
from helmscope.plots.transport import plan_figure
from helmscope.theory.starts import Uniform, VonMisesFisher
from helmscope.transport.barycenter import free_support_barycenter
from helmscope.transport.circle import circle_plan
from helmscope.transport.cloud_bridge import bridge_clouds
from helmscope.transport.cost import Chordal, Euclidean
from helmscope.transport.exact import exact_plan
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
        assert radius[8] == pytest.approx(1 - 0.25 * 0.5)  # bent inwards
        unit = segment / radius[:, None]
        swept = np.arccos(np.clip((unit[:-1] * unit[1:]).sum(-1), -1, 1)).sum()
        assert swept == pytest.approx(0.5, abs=1e-6)
    assert figure._suptitle.get_text().startswith("three points\n3 lines with 100% of the mass")


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
