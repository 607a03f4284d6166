"""The picture of a simulation: its tokens where they are, at the times it says, and the curves of all systems."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.plots import tokens
from helmscope.plots.curves import complete, measured, single, spread_and_size
from helmscope.plots.projection import orthographic
from helmscope.plots.style import png
from helmscope.plots.tokens import tokens_figure
from support.refusal import refused


@cache
def run(dim: int, *, systems: int = 4, n: int = 10, times: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)):
    return hs.integrate(hs.SA(beta=2.0), hs.Uniform(n, dim).sample(systems, seed=0), list(times))


def panels(figure):
    return [panel for panel in figure.axes if panel.get_title().startswith(("t =", "depth"))]


def curves(figure):
    return [panel for panel in figure.axes if panel.get_xlabel()]


def marks(panel):
    """(near, far): where the filled and the hollow tokens are drawn."""
    by_name = {each.get_gid(): each.get_offsets().data for each in panel.collections}
    return by_name["near"], by_name["far"]


def test_on_the_circle_tokens_are_where_they_are():
    sim = run(2)
    figure = sim.plot(system=3)
    assert [panel.get_title() for panel in panels(figure)] == ["t = 0", "t = 0.5", "t = 1", "t = 2"]
    for panel, states in zip(panels(figure), sim.states[:, 3], strict=True):
        near, far = marks(panel)
        assert np.array_equal(near, states.numpy())
        assert len(far) == 0
        assert panel.get_xlim() == panel.get_ylim() == (-1.12, 1.12)
        assert panel.get_aspect() == 1
        (circle,) = panel.lines
        assert np.allclose(np.hypot(*circle.get_data()), 1)
    words = figure.axes[0].figure.get_suptitle()
    assert words == "SA(beta=2)\nsystem 3 (of 0 to 3), 10 tokens\non the unit circle"


def test_on_the_globe_the_far_side_is_hollow():
    sim = run(3)
    figure = sim.plot(view=(30.0, 10.0))
    for panel, states in zip(panels(figure), sim.states[:, 0].numpy(), strict=True):
        place, front = orthographic(states, azimuth=30.0, elevation=10.0)
        near, far = marks(panel)
        assert np.array_equal(near, place[front])
        assert np.array_equal(far, place[~front])
        assert len(panel.lines) == 1 + 2 * 11  # the rim, and each of 11 circles in front and behind
    assert len(far) + len(near) == 10
    assert "azimuth 30°, elevation 10°; hollow: far side" in figure.axes[0].figure.get_suptitle()


def test_the_north_pole_is_drawn_on_top():
    states = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]).expand(1, 1, 2, 3)
    (panel,) = panels(hs.Trajectory(torch.zeros(1), states).plot(view=(0, 0)))
    assert marks(panel)[0].tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_without_a_view_the_last_cluster_is_in_front():
    states = torch.tensor([[-0.6, 0.0, -0.8]]).expand(2, 1, 5, 3)
    for panel in panels(hs.Trajectory(torch.arange(2.0), states).plot()):
        near, far = marks(panel)
        assert (len(near), len(far)) == (5, 0)


def test_more_dimensions_are_projected_and_the_title_says_so():
    sim = run(6)
    figure = sim.plot()
    cloud = sim.states[:, 0].reshape(-1, 6).numpy()
    _, s, rows = np.linalg.svd(cloud)
    share = (s[:2] ** 2).sum() / (s**2).sum()
    assert f"projected on 2 principal directions of 6: {share:.0%} of the squared length" in (
        figure.axes[0].figure.get_suptitle()
    )
    for panel, states in zip(panels(figure), sim.states[:, 0].numpy(), strict=True):
        near, _ = marks(panel)
        assert np.allclose(np.abs(near), np.abs(states @ rows[:2].T), atol=1e-12)
        assert np.linalg.norm(near, axis=-1).max() <= 1 + 1e-12


@pytest.mark.parametrize(("stored", "drawn"), [(1, 1), (2, 2), (6, 6), (7, 6), (100, 6)])
def test_at_most_six_times_with_the_first_and_the_last(stored, drawn):
    states = torch.eye(2).expand(stored, 1, 2, 2)
    titles = [panel.get_title() for panel in panels(hs.Trajectory(torch.arange(float(stored)), states).plot())]
    assert len(titles) == drawn
    assert (titles[0], titles[-1]) == ("t = 0", f"t = {stored - 1}")
    assert len(set(titles)) == drawn
    assert len(panels(hs.Trajectory(torch.arange(float(stored)), states).plot(panels=3))) == min(3, stored)


def test_tokens_of_weight_0_are_not_drawn_and_heavy_ones_are_large():
    weights = torch.ones(1, 1, 10, dtype=torch.float64)
    weights[..., :3] = 0
    weights[..., 9] = 3
    path = hs.Trajectory(run(2).times, run(2).trajectory.states[:, :1], weights=weights)
    figure = path.plot()
    for panel in panels(figure):
        near, _ = marks(panel)
        assert len(near) == 7
        sizes = panel.collections[-1].get_sizes()
        assert sizes[-1] / sizes[0] == pytest.approx(3)
    assert "7 tokens of positive weight, of 10" in figure.axes[0].figure.get_suptitle()


def test_a_token_that_loses_its_weight_is_drawn_before():
    weights = torch.ones(4, 1, 10, dtype=torch.float64)
    weights[2:, :, 0] = 0
    path = hs.Trajectory(run(2).times, run(2).trajectory.states[:, :1], weights=weights)
    assert [len(marks(panel)[0]) for panel in panels(path.plot())] == [10, 10, 9, 9]


def test_many_tokens_are_thinned_and_the_title_says_so():
    states = hs.Uniform(100_000, 2).sample(seed=0).reshape(1, 1, 100_000, 2)
    figure = hs.Trajectory(torch.zeros(1), states).plot()
    near, _ = marks(panels(figure)[0])
    assert np.array_equal(near, states[0, 0, ::50].numpy())
    assert figure.axes[0].figure.get_suptitle().startswith("2,000 tokens (1 in 50 of 100,000)\n")


def test_colors_are_the_numbers_of_the_tokens():
    near = panels(run(2).plot())[0].collections[-1]
    colors = near.get_facecolors()
    assert len({tuple(color) for color in colors}) == 10
    assert colors[0, 2] > colors[0, 1]  # from dark blue
    assert colors[-1, 1] > colors[-1, 2]  # to green


def test_curves_are_the_measurement_of_all_systems():
    sim = run(3)
    seen = hs.reduce_replicates(measured(sim.trajectory, [tokens.CLUSTERING]))
    (panel,) = curves(sim.plot(system=1))
    assert panel.get_xlabel() == "time"
    lines = {line.get_label(): line for line in panel.lines}
    for name, label in tokens.CLUSTERING.labels.items():
        assert np.array_equal(lines[label].get_xdata(), sim.times.numpy())
        assert np.array_equal(lines[label].get_ydata(), seen[name].values)
    dashed = [line.get_ydata() for line in panel.lines if line.get_linestyle() == "--"]
    assert np.allclose(dashed[1], hs.order_parameter(sim.states[:, 1]).numpy())
    assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "_mark"] == sim.times.tolist()


def test_clustering_has_a_linear_axis_however_small_it_starts():
    states = torch.eye(30, dtype=torch.float64)[:3].repeat(2, 2, 1, 1)
    states[0] = torch.nn.functional.normalize(states[0] + 1e-3, dim=-1)
    states[1] = states[1, :, :1]
    (panel,) = curves(hs.Trajectory(torch.arange(2.0), states).plot())
    assert panel.get_yscale() == "linear"


def test_a_residual_stream_shows_its_radius_too():
    block = hs.Block(hs.SA(1.0), hs.MLP(w_in=torch.eye(3), w_out=torch.eye(3)), placement=hs.fields.PreNorm())
    deep = hs.integrate(block, 3 * hs.Uniform(6, 3).sample(2, seed=0), [0.0, 1.0])
    figure = deep.plot()
    clustering, radius = curves(figure)
    assert radius.get_title(loc="left") == "mean radius |x|"
    assert radius.lines[-2].get_ydata()[0] == pytest.approx(3.0)
    assert np.linalg.norm(np.concatenate(marks(panels(figure)[0])), axis=-1).max() <= 1 + 1e-9
    assert clustering.get_legend() is not None


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_points_of_flat_space_share_their_axes(dim):
    states = torch.randn(3, 2, 8, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    figure = hs.Trajectory(torch.arange(3.0), states).plot()
    first, *others = panels(figure)
    for panel in others:
        assert (panel.get_xlim(), panel.get_ylim()) == (first.get_xlim(), first.get_ylim())
    drawn = np.concatenate([marks(panel)[0] for panel in panels(figure)])
    low, high = np.array([first.get_xlim(), first.get_ylim()]).T
    assert ((drawn > low) & (drawn < high)).all()
    if dim == 2:
        assert np.array_equal(marks(first)[0], states[0, 0].numpy())
    far, size = spread_and_size(states)
    (panel,) = curves(figure)
    lines = {line.get_label(): line.get_ydata() for line in panel.lines}
    assert np.allclose(lines["rms distance from the mean"], far.mean(1).numpy())
    assert np.allclose(lines["rms length"], size.mean(1).numpy())


def test_a_flat_simulation_is_drawn():
    block = hs.Block(hs.SA(1.0), hs.MLP(w_in=torch.eye(3), w_out=-torch.eye(3)), placement=hs.fields.NoNorm())
    flat = hs.integrate(block, 2 * hs.Uniform(6, 3).sample(2, seed=0), [0.0, 0.5])
    assert "of the variance" in flat.plot().axes[0].figure.get_suptitle()


def test_spread_and_size_of_known_points():
    x = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    weights = torch.tensor([1.0, 1.0, 0.0])
    far, size = spread_and_size(x, weights)
    assert (float(far), float(size)) == (0.0, 5.0)
    assert float(spread_and_size(x[1:])[0]) == pytest.approx(2.5)


def test_systems_that_stopped_early_are_told():
    states = run(2).trajectory.states.clone()
    states[2:, 1] = torch.nan
    path = hs.Trajectory(run(2).times, states)
    assert complete(path).states.shape[1] == 3
    assert single(path, 1).times.tolist() == [0.0, 0.5]
    figure = path.plot(system=1)
    assert [panel.get_title() for panel in panels(figure)] == ["t = 0", "t = 0.5"]
    assert "1 system stopped early and left out" in curves(figure)[0].figure.get_suptitle()
    assert png(figure)[:4] == b"\x89PNG"
    alone = hs.Trajectory(run(2).times, states[:, 1:2]).plot()
    assert [line.get_linestyle() for line in curves(alone)[0].lines if line.get_label() != "_mark"] == ["--", "--"]


def test_one_token_and_one_time_are_drawn():
    figure = hs.Trajectory(torch.tensor([2.0]), torch.eye(2)[:1].expand(1, 1, 1, 2)).plot()
    assert len(marks(panels(figure)[0])[0]) == 1
    assert [line.get_label() for line in curves(figure)[0].lines][1:] == ["order parameter |mean x|"]
    assert png(figure)[:4] == b"\x89PNG"


def test_a_trajectory_over_depth_says_so():
    path = hs.Trajectory(torch.arange(3.0), torch.eye(4).expand(3, 2, 4, 4), axis="depth", replicate="prompt")
    figure = path.plot()
    assert [panel.get_title() for panel in panels(figure)] == ["depth 0", "depth 1", "depth 2"]
    assert curves(figure)[0].get_xlabel() == "depth"
    assert figure.axes[0].figure.get_suptitle().startswith("prompt 0 (of 0 to 1), 4 tokens")


def test_single_precision_and_gradients_are_drawn():
    start = hs.Uniform(4, 2).sample(2, seed=0).to(torch.float32).requires_grad_()
    sim = hs.integrate(hs.SA(1.0), start, [0.0, 1.0], stepper=hs.RK4(0.5))
    assert np.allclose(marks(panels(sim.plot())[0])[0], start[0].detach().numpy())


def test_what_cannot_be_drawn_is_refused():
    path = run(2).trajectory
    refused(lambda: path.plot(system=4), "system is 4", "0 to 3")
    refused(lambda: path.plot(system=-1), "system is -1")
    refused(lambda: path.plot(panels=0), "panels is 0")
    refused(lambda: run(3).plot(view=3.0), "view is 3.0", "azimuth")
    refused(lambda: run(3).plot(view=(0, "up")), "view[1] is 'up'")
    refused(lambda: path.plot(view=(0, 30)), "view is (0, 30)", "d = 3")
    refused(lambda: tokens_figure(run(2)), "trajectory is a Simulation")
    lost = hs.Trajectory(torch.zeros(1), torch.full((1, 1, 3, 2), torch.nan))
    refused(lost.plot, "system 0 has no token")
    refused(hs.Trajectory(torch.zeros(1), torch.zeros(1, 0, 3, 2)).plot, "states has shape (1, 0, 3, 2)")
    refused(lambda: hs.plot(3), "object to plot is an int", "Simulation")


def test_a_misspelt_option_is_named_with_the_nearest_one():
    refused(lambda: run(2).plot(sytem=1), "unknown option of plot 'sytem': did you mean 'system'?")
    refused(lambda: run(2).trajectory.plot(titel="x"), "did you mean 'title'?")


def test_stored_times_are_marked_on_the_curves():
    """Between unevenly stored times, such as 10 and 60, a line alone would look like data."""
    times = torch.tensor([*range(11), 60.0])
    figure = hs.Trajectory(times, torch.eye(2).expand(12, 3, 2, 2)).plot()
    panel = figure.axes[-1]
    (curve,) = [line for line in panel.lines if line.get_label() == "mean inner product"]
    assert (curve.get_marker(), curve.get_xdata().tolist()) == ("o", times.tolist())
    assert panel.get_xlabel() == "time"


def test_two_systems_are_drawn_instead_of_a_band():
    """Of two values the interval is 13 times as wide as their distance."""
    states = hs.Uniform(5, 2).sample(2, seed=0).expand(3, 2, 5, 2)
    figure = hs.Trajectory(torch.arange(3.0), states).plot()
    panel = figure.axes[-1]
    singles = [line for line in panel.lines if line.get_label() == "_single"]
    assert len(singles) == 4  # two systems, two quantities
    assert singles[0].get_ydata()[0] == pytest.approx(float(hs.mean_inner_product(states)[0, 0]))
    assert not panel.collections
    assert "thin: each system" in panel.figure.get_suptitle()
