"""The picture of a trial draws the verdict and the Measurement it was given, readably, and the same every time."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg

from helmscope.claims.trial import Trial
from helmscope.plots.draw import plot
from helmscope.plots.style import new_figure, png, svg
from helmscope.plots.trial import NARROW, LinearAxis, LogAxis, SymmetricLogAxis, choose_axis, trial_figure
from helmscope.plots.variable_panel import draw_variable, heading
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import (
    Control,
    HelmscopeError,
    Interval,
    JudgedCondition,
    Judgment,
    PrintedStatement,
    Region,
    Ruling,
    Verdict,
)

INF, NAN = math.inf, math.nan
NOTHING = xr.Dataset(attrs={"n": 32})


def between(low: float, high: float) -> Region:
    return Region(text="", low=low if math.isfinite(low) else None, high=high if math.isfinite(high) else None)


def interval(low: float, high: float, estimate: float | None = None) -> Interval:
    return Interval((low + high) / 2 if estimate is None else estimate, low, high, 32)


def control(what: str, low: float, high: float, region=(0.9, 1.1), estimate: float | None = None) -> Control:
    return Control(what, between(*region), interval(low, high, estimate), Ruling.REFUTED)


def verdict(low: float, high: float, region=(0.9, 1.1), estimate: float | None = None, also=(), **more) -> Verdict:
    rate = JudgedCondition("rate", between(*region), interval(low, high, estimate), Ruling.SUPPORTED)
    return Verdict(claim="my-claim", ruling=Ruling.SUPPORTED, conditions=(rate, *also), **more)


def printed(text: str, low: float, high: float, region=(0.9, 1.1), estimate: float | None = None) -> PrintedStatement:
    measured = interval(low, high, estimate)
    return PrintedStatement(text, "slide 9", Judgment.FALSE, "", Judgment.FALSE, measured, between(*region))


def drawn_intervals(panel):
    """(left, right) of every row's line, by its label."""
    lines = [line for line in panel.lines if not line.get_label().startswith("_")]
    return {line.get_label(): tuple(line.get_xdata()) for line in lines}


def dots(panel, marker="o"):
    return [
        line.get_xdata()[0] for line in panel.lines if line.get_label() == "_marker" and line.get_marker() == marker
    ]


def words(figure):
    return [text.get_text() for panel in figure.axes for text in panel.texts]


def panel_of(data: xr.Dataset, name: str):
    _, (panel,) = new_figure(1, 1)
    draw_variable(panel, data, name)
    return panel


def test_rows_are_the_statistic_and_the_controls_of_the_same_region():
    seen = verdict(
        *(0.98, 1.02),
        controls=(control("no field", 0.0, 0.2), control("order", 1.9, 2.1, (1.9, 2.1))),
        printed=printed("2 beta", 1.9, 2.1),
        also=(control("USA", 1.0, 1.05),),
    )
    figure = trial_figure(seen, NOTHING)
    (panel,) = figure.axes
    conditions = {"condition: rate": (0.98, 1.02), "condition: USA": (1.0, 1.05)}
    others = {"control: no field": (0.0, 0.2), "as printed: 2 beta": (1.9, 2.1)}
    assert drawn_intervals(panel) == {**conditions, **others}
    assert dots(panel) == [1.0, 1.025, 0.1, 2.0]
    (shaded,) = panel.patches
    assert (shaded.get_x(), shaded.get_x() + shaded.get_width()) == pytest.approx((0.9, 1.1), abs=1e-15)
    assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "_region"] == [0.9, 1.1]
    assert words(figure) == [
        *("condition: rate", "1 [0.98, 1.02], n = 32", "condition: USA", "1.025 [1, 1.05], n = 32"),
        *("control: no field", "0.1 [0, 0.2], n = 32", "as printed: 2 beta", "2 [1.9, 2.1], n = 32"),
    ]
    title = panel.get_title(loc="left")
    assert title == "the statistic and its region (shaded: 0.9 to 1.1; 1 interval with another region not shown)"
    assert figure.get_suptitle() == "my-claim: supported"


def test_the_axis_has_the_names_of_the_conditions_on_it():
    (panel,) = trial_figure(verdict(0.98, 1.02), NOTHING).axes
    assert panel.get_xlabel() == "rate"
    (panel,) = trial_figure(verdict(0.98, 1.02, also=(control("USA", 1.0, 1.05),)), NOTHING).axes
    assert panel.get_xlabel() == "rate and USA"
    (panel,) = trial_figure(verdict(0.98, 1.02, also=(control("USA" * 30, 1.0, 1.05),)), NOTHING).axes
    assert panel.get_xlabel() == "value"
    (panel,) = trial_figure(Verdict(claim="my-claim", ruling=Ruling.IMPOSSIBLE), NOTHING).axes
    assert panel.get_xlabel() == "value"


def test_variables_can_be_chosen_by_name():
    data = xr.Dataset({name: ("system", [1.0, 2.0]) for name in ("order", "energy", "rank")})
    trial = Trial(verdict(0.98, 1.02), data)
    assert len(trial.plot().axes) == 4
    for figure in (trial.plot("energy"), plot(trial, variables="energy")):
        assert len(figure.axes) == 2
        assert figure.get_suptitle() == "my-claim: supported   (2 variables not shown)"
    with pytest.raises(HelmscopeError, match="unknown variable of the trial 'ordr': did you mean 'order'"):
        trial.plot("ordr")
    with pytest.raises(HelmscopeError, match=r"unknown option of plot 'titel'.*llowed: variables, width"):
        trial.plot(titel="x")
    with pytest.raises(HelmscopeError, match=r"variables is \['order'\], but the experiment returned no data"):
        Trial(verdict(0.98, 1.02), NOTHING).plot("order")


def test_without_bounds_nothing_is_shaded():
    (panel,) = trial_figure(verdict(0.98, 1.02, (-INF, INF)), NOTHING).axes
    assert len(panel.patches) == 0
    assert panel.get_title(loc="left") == "the statistic and its region (no bounds)"


def test_a_control_of_another_region_is_not_on_this_axis():
    seen = verdict(0.98, 1.02, controls=(control("an error", 1e-9, 1e-3, (-INF, 1e-12)),))
    (panel,) = trial_figure(seen, NOTHING).axes
    assert list(drawn_intervals(panel)) == ["the claim"]


def test_a_printed_form_that_is_not_measured_is_not_counted_as_omitted():
    by_theory = PrintedStatement("R = O(e^-beta)", "slide 9", Judgment.NOT_SHARP, "R is 1")
    (panel,) = trial_figure(verdict(0.98, 1.02, printed=by_theory), NOTHING).axes
    assert panel.get_title(loc="left") == "the statistic and its region (shaded: 0.9 to 1.1)"


def test_an_error_below_a_bound_has_a_log_axis_and_zeros_lie_on_its_stated_floor():
    region = (-INF, 1e-12)
    seen = verdict(0.0, 4e-16, region, estimate=4e-16, controls=(control("wrong", 1e-5, 0.3, region),))
    (panel,) = trial_figure(seen, NOTHING).axes
    assert panel.get_xscale() == "log"
    assert drawn_intervals(panel)["the claim"] == (1e-17, 4e-16)
    assert drawn_intervals(panel)["control: wrong"] == (1e-5, 0.3)
    assert panel.get_xlabel() == "rate (log axis; values below 1e-17 are plotted at 1e-17)"
    left, right = panel.get_xlim()
    (shaded,) = panel.patches
    assert left < 1e-17 < 0.3 < right
    assert (shaded.get_x(), shaded.get_x() + shaded.get_width()) == pytest.approx((left, 1e-12))
    unclipped = trial_figure(verdict(1e-15, 1e-14, region), NOTHING).axes[0]
    assert unclipped.get_xlabel() == "rate (log axis)"


def test_a_narrow_region_shows_tiny_deviations_and_factors_of_a_thousand():
    region = (0.999999, 1.000001)
    far, tiny = control("far", 999.0, 1001.0, region), 1e-9
    (panel,) = trial_figure(verdict(1 - tiny, 1 + tiny, region, controls=(far,)), NOTHING).axes
    assert panel.get_xscale() == "symlog"
    assert panel.get_xlabel().startswith("deviation of rate from 1 ")
    assert drawn_intervals(panel)["the claim"] == pytest.approx((-tiny, tiny), rel=1e-6)
    assert drawn_intervals(panel)["control: far"] == (998.0, 1000.0)
    # on the paper: the deviation, the region's end and the null stand well apart
    places = panel.transAxes.inverted().transform(panel.transData.transform([(x, 0) for x in (0, 1e-9, 1e-6, 999)]))
    gaps = np.diff(places[:, 0])
    assert gaps.min() > 0.04
    ticks = [float(tick.get_text()) for tick in panel.get_xticklabels()]
    assert ticks == sorted(ticks)
    assert 0 in ticks
    assert any(0 < each < 1e-6 for each in ticks)
    assert any(each > 1 for each in ticks)


@pytest.mark.parametrize(
    ("low", "high", "intervals", "kind"),
    [
        (-INF, INF, [(1e-9, 1e9)], LinearAxis),
        (0.9, 1.1, [(0.95, 1.0), (2.0, 2.2)], LinearAxis),
        (0.9, 1.1, [(0.95, 1.0), (20.0, 22.0)], SymmetricLogAxis),
        (1.0, 1.0, [(0.95, 1.0)], SymmetricLogAxis),
        (0.0, INF, [(0.1, 0.2), (-0.3, -0.1)], LinearAxis),
        (0.0, INF, [(0.1, 0.2), (-1e-6, 1e-6), (50.0, 60.0)], SymmetricLogAxis),
        (-INF, 0.0, [(-1e-5, 0.0), (3.0, 4.0)], SymmetricLogAxis),
        (0.9, INF, [(0.95, 1.0), (0.0, 0.1)], LinearAxis),
        (2.0, INF, [(1.0, 1.0), (1e5, 1e6)], LogAxis),
        (0.9, INF, [(0.95, 1.0), (-1e6, -1e5)], SymmetricLogAxis),
        (-INF, 0.1, [(3.0, 5.0)], LogAxis),
        (-INF, 0.1, [(-0.2, 0.05)], LinearAxis),
        (-INF, 0.1, [], LinearAxis),
        (-INF, 1.0, [(0.2, 0.6), (0.7, 1.0)], LinearAxis),
        (-INF, 1.0, [(0.01, 0.02)], LogAxis),
    ],
)
def test_the_axis_follows_from_region_and_numbers(low, high, intervals, kind):
    seen = [control("", *each, (low, high)) for each in intervals]
    assert type(choose_axis(between(low, high), [each.interval for each in seen])) is kind
    measured = seen[0].interval if seen else None
    conditions = (JudgedCondition("rate", between(low, high), measured, Ruling.SUPPORTED),)
    figure = trial_figure(replace(verdict(0.0, 1.0), conditions=conditions, controls=tuple(seen[1:])), NOTHING)
    left, right = figure.axes[0].get_xlim()
    assert math.isfinite(left)
    assert left < right
    assert svg(figure)[:5] == b"<?xml"


def test_infinite_ends_are_arrows_at_the_edge_and_what_was_not_measured_is_not_drawn():
    seen = verdict(
        *(-INF, INF),
        estimate=1.0,
        controls=(replace(control("nothing to measure", 0.0, 1.0), interval=None),),
        printed=printed("far", 1.5, INF, estimate=1.8),
    )
    figure = trial_figure(seen, NOTHING)
    (panel,) = figure.axes
    edges = panel.get_xlim()
    assert drawn_intervals(panel) == {"the claim": edges, "as printed: far": (1.5, edges[1])}
    assert dots(panel, "<") == [edges[0]]
    assert dots(panel, ">") == [edges[1]] * 2
    assert dots(panel) == [1.0, 1.8]
    assert words(figure)[2:4] == ["control: nothing to measure", "no interval"]
    impossible = Verdict(claim="my-claim", ruling=Ruling.IMPOSSIBLE)
    assert words(trial_figure(impossible, NOTHING)) == ["the claim", "no interval"]


def test_curves_and_bands_are_the_measurement():
    value, error = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, NAN]]), np.full((3, 2), 0.25)
    data = xr.Dataset(
        {"energy": (("time", "flow"), value), "energy_stderr": (("flow", "time"), error.T)},
        {"time": [0.0, 1.0, 2.0], "flow": ["SA", "USA"]},
        {"n": 32},
    )
    data.energy.attrs["long_name"] = "energy E"
    panel = panel_of(data, "energy")
    for index, (line, band) in enumerate(zip(panel.lines, panel.collections, strict=True)):
        assert np.array_equal(line.get_xdata(), [0, 1, 2])
        assert np.array_equal(line.get_ydata(), value[:, index], equal_nan=True)
        corners = {tuple(corner) for path in band.get_paths() for corner in path.vertices}
        for sign in (-2, 2):
            ends = zip((0.0, 1.0, 2.0), value[:, index] + sign * 0.25, strict=True)
            assert {end for end in ends if math.isfinite(end[1])} <= corners
    legend = panel.get_legend()
    assert legend.get_title().get_text() == "energy E\nn = 32; band: two standard errors"
    assert [text.get_text() for text in legend.get_texts()] == ["SA", "USA"]
    assert panel.get_xlabel() == "time"
    assert (panel.get_xscale(), panel.get_yscale()) == ("linear", "linear")


def test_a_range_a_null_and_log_axes():
    low, value, high = [1e-9, 1e-5], [1e-8, 1e-4], [1e-7, 1e-3]
    names = {"gap": value, "gap_low": low, "gap_high": high, "gap_null": [0.5, 0.5]}
    data = xr.Dataset({name: ("beta", numbers) for name, numbers in names.items()}, {"beta": [1e-3, 1.0]}, {"n": 3})
    data.gap.attrs["scale"] = "log"
    data.beta.attrs["long_name"] = "inverse temperature"
    panel = panel_of(data, "gap")
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    corners = {tuple(corner) for corner in panel.collections[0].get_paths()[0].vertices}
    assert {(1e-3, 1e-9), (1.0, 1e-5), (1e-3, 1e-7), (1.0, 1e-3)} <= corners
    assert np.array_equal(panel.lines[1].get_ydata(), [0.5, 0.5])
    assert panel.get_title(loc="left") == "gap\nn = 3; band: low to high; dotted: null"
    assert panel.get_xlabel() == "inverse temperature"
    data.gap[:], data.gap_low[:] = 0.0, 0.0
    assert panel_of(data, "gap").get_yscale() == "linear"


def test_curves_with_fewer_replicates_than_others_give_the_least_number():
    share = np.ones((4, 2, 2))
    share[1:, :, 1] = np.nan
    share[1, :, 1] = 0.5
    data = xr.Dataset({"share": (("prompt", "depth", "arm"), share)}, {"depth": [0, 1], "arm": ["whole", "untrained"]})
    assert heading(reduce_replicates(data), "share")[1] == "n >= 2; band: 95 % interval"


def test_values_within_a_factor_of_thirty_have_a_linear_axis():
    """Also where the experiment allows a log axis: from 0.2 to 1 it would have no labelled tick."""
    names = {"gap": [0.3, 0.9], "gap_low": [0.2, 0.8], "gap_high": [0.4, 1.0]}
    data = xr.Dataset({name: ("beta", numbers) for name, numbers in names.items()}, {"beta": [1.0, 2.0]}, {"n": 3})
    data.gap.attrs["scale"] = "log"
    assert panel_of(data, "gap").get_yscale() == "linear"
    assert panel_of(data.assign(gap_low=("beta", [0.01, 0.8])), "gap").get_yscale() == "log"
    wide = data.expand_dims(layer=2, model=2).transpose("beta", "layer", "model")
    grid = trial_figure(verdict(0.98, 1.02), wide)
    assert {panel.get_yscale() for panel in grid.axes} == {"linear"}


def test_words_are_categories_and_a_single_number_is_a_point_with_its_bar():
    data = xr.Dataset(
        {"share": ("model", [0.1, INF]), "share_low": ("model", [0.0, 0.2]), "share_high": ("model", [0.3, INF])},
        {"model": ["costs $1, $2", "b"]},
        {"n": 5},
    )
    panel = panel_of(data.assign(one=7.0, one_stderr=0.5), "share")
    assert [tick.get_text() for tick in panel.get_xticklabels()] == [r"costs \$1, \$2", "b"]
    points, first, second = panel.lines
    assert np.array_equal(points.get_ydata(), [0.1, NAN], equal_nan=True)
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([0, 0], [0.0, 0.3])
    assert np.array_equal(second.get_ydata(), [0.2, NAN], equal_nan=True)
    panel = panel_of(data.assign(one=7.0, one_stderr=0.5), "one")
    assert list(panel.lines[0].get_ydata()) == [7.0]
    assert list(panel.lines[1].get_ydata()) == [6.0, 8.0]
    assert panel.get_title(loc="left") == "one\nn = 5; bar: two standard errors"


def test_many_curves_have_a_color_scale_and_further_axes_become_curves():
    heads = np.logspace(-3, 3, 9)
    values = np.arange(36.0).reshape(4, 9)
    data = xr.Dataset(
        {"share": (("layer", "head"), values), "share_stderr": (("layer", "head"), 0 * values)},
        {"head": heads},
        {"n": 5},
    )
    panel = panel_of(data, "share")
    assert panel.get_legend() is None
    assert len(panel.lines) == 9
    assert panel.figure.axes[1].get_ylabel() == "head"
    assert panel.figure.axes[1].get_yscale() == "log"
    assert (
        len(
            {line.get_color() if isinstance(line.get_color(), str) else tuple(line.get_color()) for line in panel.lines}
        )
        == 9
    )
    deep = xr.Dataset(
        {name: (("layer", "half", "head"), values.reshape(4, 3, 3)) for name in ("share", "share_low", "share_high")},
        {"half": ["in", "mid", "out"]},
        {"n": 5},
    )
    panel = panel_of(deep, "share")
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels[:4] == ["in, head = 0", "in, head = 1", "in, head = 2", "mid, head = 0"]
    assert np.array_equal(panel.lines[5].get_ydata(), values[:, 5])
    crowd = xr.Dataset({name: (("layer", "word"), np.ones((2, 30))) for name in ("share", "share_low", "share_high")})
    crowd = crowd.assign_coords(word=[f"w{index}" for index in range(30)]).assign_attrs(n=2)
    bar = panel_of(crowd, "share").figure.axes[1]
    assert [tick.get_text() for tick in bar.get_yticklabels()] == [f"w{index}" for index in range(0, 30, 3)]


def test_five_variables_at_most_are_drawn_and_the_rest_is_said():
    names = "abcdef"
    data = xr.Dataset({f"{name}{end}": 1.0 for name in names for end in ("", "_stderr")}, attrs={"n": 8})
    figure = trial_figure(verdict(0.9, 1.0), data)
    assert [panel.get_title(loc="left").split("\n")[0] for panel in figure.axes[1:]] == ["a", "b", "c", "d", "e"]
    assert figure.get_suptitle() == "my-claim: supported   (1 variable not shown)"


def test_the_same_input_gives_the_same_bytes_and_another_gives_others():
    data = xr.Dataset({"slope": ("beta", [1.0, 2.0]), "slope_stderr": ("beta", [0.1, 0.2])}, attrs={"n": 8})
    for encode in (png, svg):
        figure = trial_figure(verdict(0.98, 1.02), data)
        assert encode(figure) == encode(figure) == encode(trial_figure(verdict(0.98, 1.02), data))
        assert encode(figure) != encode(trial_figure(verdict(0.98, 1.03), data))
    assert b"<dc:date>" not in svg(figure)
    assert b"<text" not in svg(figure)  # letters are shapes: no font of the reader's is asked for


def test_dollars_are_dollars_and_long_words_are_cut():
    seen = verdict(0.98, 1.02, controls=(control(r"$\nosuch{ $" + " word" * 40, 0.0, 0.2),))
    figure = trial_figure(replace(seen, claim="a $x^{ claim$"), NOTHING)
    assert words(figure)[2].endswith("word ...")
    assert len(words(figure)[2]) < 80
    assert svg(figure)[:5] == b"<?xml"


def test_a_narrow_figure_has_short_lines_and_all_of_its_text_inside():
    digits = control("a control with a long name that does not fit", 0.999999973538, 0.99999997382)
    seen = verdict(0.98, 1.02, controls=(digits, control("other", 1e-9, 1e-3, (-INF, 1e-12))))
    curves = xr.DataArray(np.ones((3, 4)), {"arm": [f"curve number {k}" for k in range(4)]}, ("time", "arm"))
    curves.attrs["long_name"] = "a quantity with a long name, which would be cut at the edge of a narrow figure"
    data = xr.Dataset({"share": curves, "share_stderr": 0.1 * curves}, attrs={"n": 8})
    figure = trial_figure(seen, data, width=NARROW)
    assert figure.get_figwidth() == NARROW
    svg(figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    top, below = figure.axes
    label, numbers = top.texts[2:4]
    legend = [below.get_legend().get_title(), *below.get_legend().get_texts()]
    for text in (*figure.texts, top.xaxis.label, top._left_title, *top.texts, *legend):
        box = text.get_window_extent(renderer)
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
    assert label.get_window_extent(renderer).y0 >= numbers.get_window_extent(renderer).y1 - 1
    with pytest.raises(HelmscopeError, match=r"^width is 1"):
        trial_figure(seen, data, width=1)


def test_empty_axes_give_empty_panels():
    data = xr.Dataset({name: ("time", np.zeros(0)) for name in ("energy", "energy_low", "energy_high")}, attrs={"n": 1})
    assert svg(trial_figure(verdict(0.98, 1.02), data))[:5] == b"<?xml"


def test_what_is_no_verdict_or_no_measurement_is_refused_with_one_sentence(monkeypatch):
    complex_numbers = xr.Dataset({"root": 1j, "root_stderr": 0.1}, attrs={"n": 2})
    bare = xr.Dataset({"energy": 1.0}, attrs={"n": 2})
    for seen, data, message in (
        (None, NOTHING, r"^verdict is a NoneType, but it must be a Verdict$"),
        (verdict(0, 1), None, "measurement is a NoneType"),
        (verdict(0, 1), bare, "'energy' has neither"),
        (
            verdict(0, 1),
            complex_numbers,
            "^measurement 'root' holds complex128, but only real numbers can be plotted$",
        ),
    ):
        with pytest.raises(HelmscopeError, match=message) as caught:
            trial_figure(seen, data)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HelmscopeError, match=r"helmscope\[report\]"):
        trial_figure(verdict(0, 1), NOTHING)


def test_three_axes_are_a_grid_of_small_panels():
    shape = (4, 3, 2)
    numbers = np.arange(24.0).reshape(shape)
    share = xr.DataArray(numbers, {"x": range(4), "layer": [0, 6, 12], "what": ["a", "b"]}, ("x", "layer", "what"))
    data = xr.Dataset({"share": share, "share_stderr": 0.1 + 0 * share}, attrs={"n": 8})
    figure = trial_figure(verdict(0.9, 1.0), data)
    panels = figure.axes[1:]
    assert len(panels) == 6
    assert [panel.get_title() for panel in panels[:3]] == ["layer = 0", "layer = 6", "layer = 12"]
    assert [panels[0].get_ylabel(), panels[3].get_ylabel()] == ["a", "b"]
    filled, band = panels[5].collections
    assert filled.get_datalim(panels[5].transData).y1 == numbers[:, 2, 1].max()
    assert band.get_datalim(panels[5].transData).y1 == pytest.approx(numbers[:, 2, 1].max() + 0.2)


def test_the_band_is_the_interval_where_there_is_one_and_replicates_are_reduced_first():
    kept = xr.Dataset({"share": (("system", "time"), np.array([[0.1, 0.2], [0.2, 0.6], [0.6, 0.9]]))}, {"time": [0, 1]})
    seen = reduce_replicates(kept)
    for given in (kept, seen):
        panel = panel_of(given, "share")
        assert np.array_equal(panel.lines[0].get_ydata(), seen.share.values)
        corners = {tuple(corner) for corner in panel.collections[0].get_paths()[0].vertices}
        for end in ("_low", "_high"):
            assert set(zip([0.0, 1.0], seen[f"share{end}"].values, strict=True)) <= corners
        assert "n = 3; band: 95 % interval" in panel.get_title(loc="left")
    errors = panel_of(seen.drop_vars(["share_low", "share_high"]), "share")
    assert "band: two standard errors" in errors.get_title(loc="left")
    curves = len(trial_figure(verdict(0.9, 1.0), kept).axes)
    assert curves == len(trial_figure(verdict(0.9, 1.0), seen).axes) == 2
