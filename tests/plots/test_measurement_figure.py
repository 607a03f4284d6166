"""The picture of Measurements: the curves and maps are the means and intervals of ``reduce_replicates``."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.collections import PolyCollection, QuadMesh

import helmscope as hs
from helmscope.plots.style import svg
from support.model_families import inputs_of, tiny_model
from support.refusal import refused

RNG = np.random.default_rng(0)
DEPTHS = ("depth", np.arange(5.0), {"units": "half-layers"})


def over_depth(shift: float = 0.0, prompts: int = 4) -> xr.Dataset:
    """Two variables over depth and prompt."""
    numbers = RNG.random((5, prompts)) + shift
    data = {"order": (("depth", "prompt"), numbers), "inner_product": (("depth", "prompt"), -numbers)}
    return xr.Dataset(data, {"depth": DEPTHS, "prompt": np.arange(prompts)})


def over_heads(shift: float = 0.0) -> xr.Dataset:
    return xr.Dataset({"entropy": (("layer", "prompt", "head"), RNG.random((3, 4, 2)) + shift)})


ONE, TWO = over_depth(), over_depth(1.0)


@cache
def simulation() -> hs.Simulation:
    return hs.integrate(hs.SA(beta=1.0), hs.Uniform(n=6, dim=3).sample(batch=5, seed=0), times=[0.0, 1.0, 2.0])


def corners(panel) -> list[set[tuple[float, float]]]:
    bands = [band for band in panel.collections if isinstance(band, PolyCollection)]
    return [{tuple(corner) for path in band.get_paths() for corner in path.vertices} for band in bands]


def test_curves_and_bands_are_means_and_intervals():
    figure, means = hs.plot(ONE, title="A"), hs.reduce_replicates(ONE)
    assert figure.get_suptitle() == "A\nmean over 4 prompts; band: 95 % interval"
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["order", "inner product"]
    for panel, name in zip(figure.axes, ("order", "inner_product"), strict=True):
        (line,), (band,) = panel.lines, corners(panel)
        assert panel.get_xlabel() == "depth (half-layers)"
        assert np.array_equal(line.get_xdata(), np.arange(5.0))
        assert np.array_equal(line.get_ydata(), means[name].values)
        for end in ("low", "high"):
            assert set(zip(np.arange(5.0), means[f"{name}_{end}"].values, strict=True)) <= band
    assert svg(hs.plot(means)) == svg(hs.plot(means))
    assert np.array_equal(hs.plot(means).axes[0].lines[0].get_ydata(), means.order.values)
    assert hs.plot(means).get_suptitle() == "mean over 4 prompts; band: 95 % interval"


def test_several_measurements_are_curves_of_different_color_with_a_legend():
    figure = hs.plot({"A": ONE, "untrained twin": TWO})
    for panel in figure.axes:
        assert len(panel.lines) == len(corners(panel)) == 2
        assert len({line.get_color() for line in panel.lines}) == 2
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "untrained twin"]
    assert np.array_equal(figure.axes[0].lines[1].get_ydata(), hs.reduce_replicates(TWO).order.values)
    (panel,) = hs.plot({"A": ONE, "twin": TWO}, variables="order").axes
    assert panel.get_title(loc="left") == "order"
    fewer = hs.plot({"A": ONE, "twin": over_depth(prompts=3)}, variables=["order"])
    assert fewer.get_suptitle().startswith("mean over 3 to 4 prompts")


def test_heads_are_a_map_on_a_common_color_scale():
    one, two = over_heads(), over_heads(5.0)
    figure = hs.plot({"A": one, "twin": two})
    maps = [panel for panel in figure.axes if any(isinstance(each, QuadMesh) for each in panel.collections)]
    titled = [panel for panel in maps if panel.get_title(loc="left")]
    assert [panel.get_title(loc="left") for panel in titled] == ["A: entropy", "twin: entropy"]
    meshes = [panel.collections[0] for panel in titled]
    means = [hs.reduce_replicates(data).entropy.values for data in (one, two)]
    for mesh, mean in zip(meshes, means, strict=True):
        assert np.array_equal(mesh.get_array(), mean)
        assert mesh.get_clim() == (means[0].min(), means[1].max())
    assert {(panel.get_xlabel(), panel.get_ylabel()) for panel in titled} == {("head", "layer")}
    assert all(panel.yaxis_inverted() for panel in titled)  # like a table, with layer 0 at the top
    assert not figure.legends
    assert hs.plot(one).get_suptitle() == "mean over 4 prompts"


def test_a_map_of_signed_numbers_is_centered_at_0_with_numbers_in_its_cells():
    increase = np.array([[0.31, -0.02], [0.0, 0.1]])
    attributes = {"long_name": "increase of the loss", "units": "nats"}
    values = np.stack([increase, increase], -1)
    data = xr.Dataset({"increase": (("layer", "head", "prompt"), values, attributes)}, attrs={"model": "B"})
    figure = hs.plot(data)
    panel, bar = figure.axes
    assert figure.get_suptitle() == "B\nmean over 2 prompts"
    assert panel.get_title(loc="left") == "increase of the loss (nats)"
    assert bar.get_ylabel() == "nats"
    (mesh,) = panel.collections
    assert (mesh.get_clim(), mesh.get_cmap().name) == ((-0.31, 0.31), "RdBu_r")
    assert [text.get_text() for text in panel.texts] == ["0.31", "-0.02", "0.00", "0.10"]
    close = hs.plot(data + 2.3)
    assert [text.get_text() for text in close.axes[0].texts] == ["2.61", "2.28", "2.30", "2.40"]
    many = xr.Dataset({"mass": (("layer", "head", "prompt"), RNG.random((11, 10, 3)))})
    panel = hs.plot(many).axes[0]
    assert not panel.texts
    assert panel.collections[0].get_cmap().name == "viridis"


def test_two_replicates_are_drawn_instead_of_a_band():
    two = over_depth(prompts=2)
    figure = hs.plot(two, variables="order")
    (panel,) = figure.axes
    assert figure.get_suptitle() == "mean over 2 prompts; thin lines or dots: each prompt"
    singles = [line.get_ydata().tolist() for line in panel.lines if line.get_label() == "_single"]
    assert singles == two.order.values.T.tolist()
    assert not any(corners(panel))
    loss = xr.Dataset({"loss": ("prompt", [1.0, 2.0])})
    (panel,) = hs.plot(loss).axes
    assert [line.get_ydata()[0] for line in panel.lines if line.get_label() == "_single"] == [1.0, 2.0]


def test_a_difference_is_named_and_has_a_line_at_0():
    named = [ONE.assign_attrs(model="A"), TWO.assign_attrs(model="twin 1")]
    panel = hs.plot(hs.paired_difference(*named)).axes[0]
    assert panel.get_title(loc="left") == "order: A - twin 1"
    assert [line.get_ydata()[0] for line in panel.lines if line.get_label() == "_zero"] == [0.0]
    panel = hs.plot(hs.reduce_replicates(hs.paired_difference(ONE, TWO))).axes[0]
    assert panel.get_title(loc="left") == "order: difference"
    assert not [line for line in hs.plot(ONE).axes[0].lines if line.get_label() == "_zero"]
    panel = hs.plot(hs.paired_difference(over_heads(), over_heads(9.0))).axes[0]
    assert panel.collections[0].get_clim()[0] == -panel.collections[0].get_clim()[1]


def test_measurements_of_a_simulation_over_time():
    tracked = hs.track(simulation(), order=hs.order_parameter)
    (panel,) = hs.plot(tracked).axes
    assert (panel.get_xlabel(), panel.get_yscale()) == ("time", "linear")
    assert hs.plot(tracked).get_suptitle() == "SA(beta=1)\nmean over 5 systems; band: 95 % interval"
    measured = hs.overview(simulation(), beta=1.0)
    figure = hs.plot(measured, variables=["close_pair_share", "inner_product_histogram", "interaction_energy"])
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert {"share of pairs that have met", "share of pairs", "interaction energy"} <= set(titles)
    (share,) = [panel for panel in figure.axes if panel.get_title("left") == "share of pairs"]
    assert share.get_xlim() == (0.0, 2.0)
    (panel,) = hs.plot(tracked.order).axes
    assert panel.get_title(loc="left") == "order parameter"
    alone = hs.track(hs.integrate(hs.SA(beta=1.0), torch.eye(3), times=[0.0, 1.0]), order=hs.order_parameter)
    assert hs.plot(alone).get_suptitle() == "SA(beta=1)\n1 system: no interval"
    statistics = hs.measure(simulation())["kernel_statistics"]
    assert len(hs.plot(statistics, variables=["row_entropy", "row_mass"]).axes) == 2


def test_an_overview_has_the_figure_that_simulate_writes():
    measured = hs.overview(simulation(), beta=1.0)
    assert svg(hs.plot(measured)) == svg(hs.plots.overview_figure(measured))
    titles = [panel.get_title(loc="left") for panel in hs.plot(measured).axes]
    assert titles[0] == "share of pairs that have met"
    assert hs.plot(measured).get_suptitle().startswith("SA(beta=1)\nmean over 5 systems; band: 95 % interval")


def test_losses_with_and_without_edits_have_different_titles():
    model = tiny_model("gpt2")
    losses = hs.observe.loss_under_edits(hs.record(model, inputs_of("gpt2")), {"no MLP": hs.intervene.Ablate([1])})
    titles = [panel.get_title(loc="left").replace("\n", " ") for panel in hs.plot(losses).axes]
    assert len(set(titles)) == 3
    assert "next-token loss without edits (nats)" in titles


def test_points_categories_families_and_nulls():
    loss = xr.Dataset({"loss": ("prompt", [1.0, 2.0, 3.0]), "loss_null": 8.0})
    figure = hs.plot({"A": loss, "B": loss + 1})
    (panel,) = figure.axes
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["A", "B"]
    assert figure.get_suptitle().endswith("dotted: null")
    assert not figure.legends
    dotted = [line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == ":"]
    assert dotted == [8.0, 9.0]
    edits = xr.Dataset({"loss": (("edit", "prompt"), RNG.random((2, 3)))}, {"edit": ["no MLP", "no head"]})
    (panel,) = hs.plot({"A": edits, "B": edits}).axes
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["no MLP", "no head"]
    points = [line.get_xdata()[0] for line in panel.lines if line.get_marker() == "o"]
    assert points[0] < 0 < points[1]
    words = xr.Dataset({"logit": (("depth", "prompt", "token"), RNG.random((5, 3, 2)))}, {"token": ["she", "he"]})
    (panel,) = hs.plot(words).axes
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["she", "he"]


def test_a_log_axis_needs_decades_or_a_request():
    dims = ("depth", "prompt")
    narrow = xr.Dataset({"gap": (dims, [[0.2, 0.3], [0.9, 1.0]], {"scale": "log", "summary": "range"})})
    wide = narrow * [[1.0], [1e3]]
    wide.gap.attrs = narrow.gap.attrs
    assert hs.plot(narrow).axes[0].get_yscale() == "linear"
    assert hs.plot(wide).axes[0].get_yscale() == "log"
    assert hs.plot(wide.drop_attrs()).axes[0].get_yscale() == "linear"
    assert hs.plot(narrow, log="gap").axes[0].get_yscale() == "log"
    assert hs.plot(narrow).get_suptitle() == "median over 2 prompts; band: range about the median"


def test_variables_beyond_twelve_are_named():
    many = xr.Dataset({f"x{k}": ("prompt", [1.0, 2.0]) for k in range(14)})
    figure = hs.plot(many)
    assert len(figure.axes) == 12
    assert figure.get_suptitle().endswith("not shown: x12, x13")


DEEP = xr.Dataset({"x": (("layer", "head", "bin", "prompt"), np.zeros((2, 2, 2, 2)))})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hs.plot({}), "measurements is empty"),
        (lambda: hs.plot({"A": ONE, "B": 3}), "measurements['B'] is an int, but it must be a Measurement"),
        (lambda: hs.plot({"A": object()}), "such as hs.track(recording, order=hs.order_parameter)"),
        (lambda: hs.plot(ONE, variables="ordr"), "unknown variable of the measurements 'ordr': did you mean 'order'?"),
        (lambda: hs.plot(ONE, log=["ordr"]), "did you mean 'order'?"),
        (lambda: hs.plot(ONE, variables=[]), "variables is empty"),
        (lambda: hs.plot(ONE, varibles="order"), "unknown option of plot 'varibles': did you mean 'variables'?"),
        (lambda: hs.plot({"A": ONE, "B": over_heads()}), "must have a variable in common"),
        (lambda: hs.plot(DEEP), "'x' has the axes ('layer', 'head', 'bin') besides replicates"),
        (lambda: hs.plot({"A": ONE, "B": ONE.rename(depth="layer")}), "need the same axes"),
        (lambda: hs.plot(ONE * np.nan), "'order' holds no number"),
        (lambda: hs.plot(hs.reduce_replicates(ONE).drop_attrs()), "no attribute n"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_one_sentence(call, words):
    refused(call, words)


def test_the_room_exports_its_figures():
    names = {"plot", "tokens_figure", "depth_figure", "measurement_figure", "overview_figure", "phase_figure"}
    assert names <= set(hs.plots.__all__)
    assert hs.plots.measurement_figure(ONE).axes


def test_the_numbers_of_a_map_have_one_format_and_none_reads_0_that_is_not_0():
    nu = np.array([[3.1e-4, 0.27], [0.0, 4.2e-6]])
    assert numbers_of(nu) == ["3.1e-4", "2.7e-1", "0", "4.2e-6"]  # most are too small for decimals
    loss = np.array([[0.35, 0.02, -0.01], [-0.06, 0.03, 7e-5], [-0.02, 0.01, 0.0]])
    assert numbers_of(loss) == ["0.35", "0.02", "-0.01", "-0.06", "0.03", "≈0", "-0.02", "0.01", "0.00"]


def test_numbers_are_in_cells_that_can_hold_them():
    """Six heads fit with four letters each, not with six; twelve with neither, and four layers but not a hundred."""
    assert len(numbers_of(np.linspace(0.1, 0.4, 24).reshape(4, 6))) == 24
    assert numbers_of(np.linspace(1.1e-7, 4.1e-7, 24).reshape(4, 6)) == []
    assert numbers_of(np.linspace(0.1, 0.4, 48).reshape(4, 12)) == []
    wide = xr.Dataset({f"x{k}": (("layer", "head", "prompt"), RNG.random((4, 6, 3))) for k in range(3)})
    figure = hs.plot(wide)
    figure.draw_without_rendering()
    for panel in figure.axes[:3]:
        cell = panel.get_window_extent().width / 6
        assert panel.texts
        assert max(text.get_window_extent().width for text in panel.texts) < cell


def numbers_of(values: np.ndarray) -> list[str]:
    """The texts in the cells of the second of three maps."""
    data = xr.Dataset({name: (("layer", "head", "prompt"), np.stack([values, values], -1)) for name in "abc"})
    return [text.get_text() for text in hs.plot(data).axes[1].texts]


def clouds() -> xr.Dataset:
    """A variable of three sets of pairs, as ``cloud_statistics`` has it."""
    values = RNG.random((5, 4, 3))
    axes = {"pairs": ["distant", "all", "as printed"], "depth": DEPTHS}
    return xr.Dataset({"mean": (("depth", "prompt", "pairs"), values)}, axes)


def test_colors_are_measurements_and_line_styles_their_entries_with_legends_beside_the_data():
    figure = hs.plot({name: clouds() for name in ("A", "twin 1", "twin 2")})
    (panel,) = figure.axes
    lines = [panel.lines[3 * k : 3 * k + 3] for k in range(3)]
    assert [len({line.get_color() for line in group}) for group in lines] == [1, 1, 1]
    assert len({group[0].get_color() for group in lines}) == 3
    assert len({line.get_linestyle() for line in lines[0]}) == 3
    styles = [[line.get_linestyle() for line in group] for group in lines]
    assert styles[0] == styles[1] == styles[2]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["distant", "all", "as printed"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A", "twin 1", "twin 2"]
    assert [line.get_color() for line in figure.legends[0].get_lines()] == [group[0].get_color() for group in lines]
    figure.draw_without_rendering()
    assert panel.get_legend().get_window_extent().y0 >= panel.get_window_extent().y1
    assert panel.get_legend().get_window_extent().y1 <= panel._left_title.get_window_extent().y0
    (alone,) = hs.plot(clouds()).axes
    assert len({line.get_color() for line in alone.lines}) == 3


def test_rounding_is_not_magnified_and_axes_have_no_offset():
    dims, noise = ("depth", "prompt"), np.linspace(0, 1, 20).reshape(5, 4)
    data = xr.Dataset(
        {"radius": (dims, 2 + 2e-7 * noise), "real": (dims, 2 + 2e-3 * noise), "small": (dims, 3e-7 * noise)}
    )
    figure = hs.plot(data)
    figure.draw_without_rendering()
    rounding, real, small = figure.axes
    assert rounding.get_ylim() == pytest.approx((1.9, 2.1), abs=1e-3)
    assert np.ptp(real.get_ylim()) < 3e-3
    for panel in figure.axes:
        assert panel.yaxis.get_offset_text().get_text() == ""
    for panel in (real, small):
        values = [float(text.get_text().replace("−", "-")) for text in panel.get_yticklabels()]
        assert values == pytest.approx(panel.get_yticks(), abs=1e-12)


def test_chosen_heads_are_named_points_and_chosen_layers_leave_no_gap():
    values = np.full((3, 2, 2), np.nan)
    values[:, 0, 0], values[:, 1, 1] = [0.1, 0.2, 0.3], [1.0, 2.0, 3.0]
    axes = ("prompt", "layer", "head")
    few = hs.plot(xr.Dataset({"x": (axes, values)}, {"layer": [0, 7], "head": [2, 4]})).axes[0]
    assert [text.get_text() for text in few.get_xticklabels()] == ["L0H2", "L7H4"]
    points = np.concatenate([line.get_xydata() for line in few.lines if len(line.get_xdata()) == 2])
    assert {(0.0, 0.2), (1.0, 2.0)} <= {(round(x, 9), round(y, 9)) for x, y in points.tolist()}
    one = hs.plot(xr.Dataset({"x": (axes, values[:, :1, :1])}, {"layer": [0], "head": [2]})).axes[0]
    assert [text.get_text() for text in one.get_xticklabels()] == ["L0H2"]
    table = np.arange(3 * 2 * 7.0).reshape(3, 2, 7)
    panel = hs.plot(xr.Dataset({"x": (axes, table)}, {"layer": [0, 11], "head": range(7)})).axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["0", "11"]
    assert panel.get_ylim() == (1.5, -0.5)
    assert panel.get_xlim() == (-0.5, 6.5)
