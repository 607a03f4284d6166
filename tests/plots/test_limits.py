"""Axes that a few outlying points do not flatten, predictions over what is measured, slopes and probes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.observe.probe_curves import along_axes
from helmscope.observe.probes import ProbeBank
from helmscope.plots.limits import DrawnCurve, cut_outlying, usual_range
from helmscope.plots.measurements import measurements_figure
from helmscope.plots.style import new_figure
from helmscope.plots.variable_panel import draw_variable

LAYERS = np.arange(12.0)
SHARES = np.array([-86.0, *np.linspace(0.7, 0.85, 11)])


def marks(panel) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.xy for text in panel.texts}


def test_a_first_block_far_from_the_others_is_an_arrow_with_its_value() -> None:
    data = xr.Dataset({"share": (("layer", "prompt"), SHARES[:, None] + [[0.0, 0.01, -0.01]])}, {"layer": LAYERS})
    panels = [hs.plot(data).axes[0], measurements_figure({"generator_test": data}).axes[0], new_figure(1, 1)[1][0]]
    draw_variable(panels[2], data, "share")
    for panel in panels:
        low, high = panel.get_ylim()
        assert 0.6 < low < 0.7
        assert 0.85 < high < 0.9
        assert marks(panel) == {"-86": (0.0, low)}


def test_curves_without_outlying_points_keep_their_axis() -> None:
    for values in (np.linspace(0, 1, 12), np.geomspace(1, 4, 12), np.ones(12), np.array([1.0, 100.0]), SHARES * np.nan):
        _, (panel,) = new_figure(1, 1)
        before = panel.plot(values)[0].axes.get_ylim()
        cut_outlying(panel, [DrawnCurve(np.arange(len(values)), values, "black")])
        assert panel.get_ylim() == before
        assert not panel.texts
    assert usual_range(np.r_[np.zeros(20), 5.0]) is None  # no scale but the point itself


def test_a_prediction_that_runs_away_leaves_the_measured_curve_legible() -> None:
    """Of neighboring points beyond the edge the farthest is named."""
    _, (panel,) = new_figure(1, 1)
    measured, predicted = np.linspace(0, 10, 25), np.linspace(0, -2000, 25)
    curves = [DrawnCurve(np.arange(25.0), each, "black") for each in (measured, predicted)]
    cut_outlying(panel, curves, leading=curves[0])
    low, high = panel.get_ylim()
    assert -9 < low < 0
    assert 10 < high < 18
    assert marks(panel) == {"-2e+03": (24.0, low)}


def covered(panel, values) -> list[tuple[str, float]]:
    """The values of outlying points that cover a point of the curve that is not one of them."""
    figure = panel.figure
    figure.draw_without_rendering()
    low, high = panel.get_ylim()
    points = [(x, y) for x, y in enumerate(values) if low <= y <= high]
    places = panel.transData.transform(points)
    boxes = [(text.get_text(), text.get_window_extent()) for text in panel.texts]
    return [
        (name, x)
        for name, box in boxes
        for (x, _), (px, py) in zip(points, places, strict=True)
        if box.contains(px, py)
    ]


@pytest.mark.parametrize(
    ("first", "named"), [([27.6], "27.6"), ([27.6, 17.0], "27.6, 17"), ([27.6, 17.0, 12.0], "27.6, 17, 12")]
)
def test_every_outlying_point_is_an_arrow_and_no_value_covers_a_point(first: list[float], named: str) -> None:
    values = np.array([*first, *np.geomspace(2.6, 0.3, 22)])
    for sign in (1, -1):
        data = xr.Dataset({"kl": ("depth", sign * values), "kl_stderr": ("depth", 0 * values)}, attrs={"n": 8})
        panel = hs.plot(data).axes[0]
        arrows = [line.get_xdata().tolist() for line in panel.lines if line.get_label() == "_outlying"]
        assert arrows == [[*range(len(first))]]
        assert [text.get_text().replace("-", "") for text in panel.texts] == [named]
        assert covered(panel, sign * values) == []


def test_values_of_several_curves_stand_side_by_side_or_in_lines() -> None:
    curves = [np.array([*first, *np.linspace(0.3, 0.5, 22)]) for first in ([27.0, 17.0], [0.4, 30.0], [0.5, 0.4])]
    data = {
        f"model {k}": xr.Dataset({"kl": ("depth", curve), "kl_stderr": ("depth", 0 * curve)}, attrs={"n": 8})
        for k, curve in enumerate(curves)
    }
    figure = hs.plot(data)
    panel = figure.axes[0]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in panel.texts]
    assert [text.get_text() for text in panel.texts] == ["27, 17", "30"]
    assert not boxes[0].overlaps(boxes[1])
    assert not any(covered(panel, curve) for curve in curves)


def test_a_curve_of_which_much_is_far_out_and_bands_stay_in_view() -> None:
    rising, constant = np.r_[np.linspace(73, 118, 10), np.full(15, 124.0)], np.full(25, 128.0)
    _, (panel,) = new_figure(1, 1)
    cut_outlying(panel, [DrawnCurve(np.arange(25.0), each, "black") for each in (rising, constant, constant)])
    assert not panel.texts
    values, size = np.array([9.0, *np.linspace(0.7, 0.8, 11)]), 0.06
    cut_outlying(panel, [DrawnCurve(np.arange(12.0), values, "black", values - size, values + size)])
    low, high = panel.get_ylim()
    assert low <= 0.64
    assert 0.86 <= high < 1.0


def test_predictions_are_laid_over_what_is_measured_with_their_misfit() -> None:
    names = ("free_energy", "predicted_free_energy", "gaussian_predicted_free_energy", "nu")
    values = {name: (("depth", "prompt"), np.random.default_rng(k).normal(size=(5, 4))) for k, name in enumerate(names)}
    data = xr.Dataset(values, {"depth": np.arange(5.0)}, {"predicted_free_energy_misfit": 7.25})
    figure = measurements_figure({"free_energy_along_depth": data})
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "free energy along depth: free energy",
        "free energy along depth: nu",
    ]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["predicted (misfit 7.2)", "predicted, Gaussian"]


def test_slopes_of_a_generator_test_are_drawn_on_log_axes() -> None:
    step = hs.integrate(hs.SA(1.0), hs.Uniform(8, 3).sample(4, seed=0), times=[0.0, 1.0], stepper=hs.Layer())
    measured = hs.observe.generator_test(step)
    panel = hs.plot({"generator_test": measured}).axes[-1]
    kinds = list(measured.kind.values)
    assert [text.get_text() for text in panel.get_legend().get_texts()] == kinds
    expected = measured.remainder.isel(time=0, kind=0).median("system").values
    assert panel.lines[0].get_ydata() == pytest.approx(expected)
    slopes = [line for line in panel.lines if line.get_label() == "_slope"]
    assert [np.polyfit(np.log(line.get_xdata()), np.log(line.get_ydata()), 1)[0] for line in slopes] == pytest.approx(
        [2, 3]
    )


def test_probes_are_drawn_over_the_angle_from_their_axes() -> None:
    bank = ProbeBank.around(torch.eye(5, dtype=torch.float64), seed=0)
    figure = hs.plot(bank, title="A")
    assert figure.get_suptitle() == "A\n32 probes, each along a half circle from its axis"
    assert [len(panel.lines) for panel in figure.axes] == [8] * 4
    angles = torch.linspace(0, torch.pi, 7, dtype=torch.float64)
    pole = 1 / (1.25 - angles.cos())
    assert along_axes(bank.kinds[1], angles)[0].numpy() == pytest.approx(
        ((pole - pole.min()) / (pole.max() - pole.min())).numpy(), abs=1e-12
    )
    with pytest.raises(hs.HelmscopeError, match="must be a ProbeBank"):
        hs.plots.probe_bank_figure(3)
