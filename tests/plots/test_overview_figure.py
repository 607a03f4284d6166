"""The overview's picture shows the measurement, to the bit, and is the same file every time."""

from __future__ import annotations

import struct
import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.plots.style import STYLE, new_figure, png, styled
from helmscope.types import MissingExtra

TIMES = [0.0, 0.5, 1.0, 2.0]
START = hs.Uniform(6, 3).sample(4, seed=0)
TRAJECTORY = hs.integrate(hs.SA(2.0), START, TIMES).trajectory
KEPT = hs.overview(TRAJECTORY, beta=2.0, delta=0.01, max_angle=0.2)
SEEN = hs.reduce_replicates(KEPT)
PANELS = {0: ["close_pair_share", "order_parameter"], 1: ["cluster_count", "effective_rank"], 2: ["interaction_energy"]}


@pytest.mark.parametrize("given", [KEPT, SEEN], ids=["with replicates", "reduced"])
def test_curves_are_the_measurement(given):
    axes = hs.plots.overview_figure(given).axes
    for panel, names in PANELS.items():
        assert len(axes[panel].lines) == len(axes[panel].collections) == len(names)
        for line, band, name in zip(axes[panel].lines, axes[panel].collections, names, strict=True):
            assert np.array_equal(line.get_xdata(), TIMES)
            assert np.array_equal(line.get_ydata(), SEEN[name].values)
            corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
            for end in ("_low", "_high"):
                assert set(zip(TIMES, SEEN[f"{name}{end}"].values, strict=True)) <= corners
    assert axes[3].get_xlim() == (0.0, 2.0)
    (mesh,) = axes[3].collections
    assert np.array_equal(mesh.get_array(), np.sqrt(SEEN.inner_product_histogram.values.T))


def test_words_on_the_picture():
    figure = hs.plots.overview_figure(KEPT, title="SA")
    assert figure.get_suptitle() == "SA   (4 systems; bands: 95 % interval)"
    assert hs.plots.overview_figure(SEEN, title="SA").get_suptitle() == "SA   (4 systems; bands: 95 % interval)"
    errors = SEEN.drop_vars([name for name in SEEN.data_vars if name.endswith(("_low", "_high"))])
    told = hs.plots.overview_figure(errors, title="SA").get_suptitle()
    assert told == "SA   (4 systems; bands: two standard errors)"
    legends = [text.get_text() for panel in figure.axes[:3] for text in panel.get_legend().get_texts()]
    assert legends == [
        *("close pairs, <x,y> >= 0.99", "order parameter |mean x|"),
        *("clusters within an angle of 0.2", "effective rank (entropy)"),
        "interaction energy, beta = 2",
    ]
    assert [panel.get_xlabel() for panel in figure.axes[:4]] == ["time"] * 4
    assert hs.plots.overview_figure(SEEN).get_suptitle() == "4 systems; bands: 95 % interval"
    unnamed = SEEN.copy()
    del unnamed.attrs["replicate"]
    assert hs.plots.overview_figure(unnamed).get_suptitle() == "4 replicates; bands: 95 % interval"


def test_the_file_is_a_png_and_the_same_for_the_same_measurement():
    data = png(hs.plots.overview_figure(SEEN, title="SA"))
    assert data == png(hs.plots.overview_figure(SEEN, title="SA"))
    assert data != png(hs.plots.overview_figure(SEEN, title="USA"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (990, 660)  # 9 x 6 inches at 110 dots an inch


def test_one_figure_written_twice_gives_one_file():
    figure = hs.plots.overview_figure(SEEN)
    assert png(figure) == png(figure)


def test_without_energy_that_panel_is_empty():
    figure = hs.plots.overview_figure(hs.overview(TRAJECTORY, beta=0.0))
    assert len(figure.axes[2].lines) == 0
    assert figure.axes[2].get_legend() is None
    assert png(figure)[:4] == b"\x89PNG"


def test_one_system_has_curves_without_bands():
    one = hs.overview(hs.Trajectory(TRAJECTORY.times, TRAJECTORY.states[:, :1]), beta=2.0)
    figure = hs.plots.overview_figure(one)
    assert np.array_equal(figure.axes[1].lines[0].get_ydata(), one.cluster_count.values[:, 0])
    assert png(figure)[:4] == b"\x89PNG"


def test_two_systems_are_drawn_instead_of_bands():
    two = hs.overview(hs.Trajectory(TRAJECTORY.times, TRAJECTORY.states[:, :2]), beta=2.0)
    figure = hs.plots.overview_figure(two, title="SA")
    assert figure.get_suptitle() == "SA   (2 systems; thin: each system)"
    energy = figure.axes[2]
    assert not energy.collections
    assert [line.get_ydata().tolist() for line in energy.lines[1:]] == two.interaction_energy.values.T.tolist()


def test_one_time_has_a_histogram_with_its_own_axes():
    seen = hs.overview(hs.Trajectory(TRAJECTORY.times[:1], TRAJECTORY.states[:1]), beta=2.0)
    panel = hs.plots.overview_figure(seen).axes[3]
    (line,) = panel.lines
    assert np.array_equal(line.get_xdata(), seen.inner_product.values)
    assert np.array_equal(line.get_ydata(), hs.reduce_replicates(seen).inner_product_histogram.values[0])
    assert panel.get_xlabel() == "<x_i, x_j>"
    assert "share" in panel.get_ylabel()


def test_one_token_has_no_pairs_and_still_a_picture():
    seen = hs.overview(hs.Trajectory(TRAJECTORY.times, TRAJECTORY.states[:, :, :1]), beta=2.0)
    assert png(hs.plots.overview_figure(seen))[:4] == b"\x89PNG"


def test_the_style_is_ours_inside_and_the_user_s_outside():
    before = dict(mpl.rcParams)
    figure = hs.plots.overview_figure(SEEN)
    assert not figure.axes[0].spines["top"].get_visible()
    assert figure.axes[0].lines[0].get_linewidth() == STYLE["lines.linewidth"]
    with mpl.rc_context({"lines.linewidth": 9.0, "axes.spines.top": True}):
        assert png(hs.plots.overview_figure(SEEN)) == png(figure)
    assert dict(mpl.rcParams) == before
    assert len(new_figure(2, 3)[1]) == 6


def test_without_matplotlib_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (lambda: hs.plots.overview_figure(SEEN), lambda: new_figure(1, 1), lambda: styled().__enter__()):
        with pytest.raises(hs.HelmscopeError) as caught:
            call()
        assert str(caught.value) == str(MissingExtra("matplotlib", "report"))


def test_another_measurement_is_refused_with_one_sentence():
    other = hs.track(TRAJECTORY, order=hs.order_parameter)
    with pytest.raises(hs.HelmscopeError, match=r"measurement .*overview") as caught:
        hs.plots.overview_figure(other)
    assert "\n" not in str(caught.value)


def test_what_is_no_measurement_is_refused_with_one_sentence():
    for given in (hs.integrate(hs.SA(2.0), START, TIMES), TRAJECTORY, None, 3.0):
        with pytest.raises(hs.HelmscopeError, match=rf"^measurement is a {type(given).__name__}, but it must be"):
            hs.plots.overview_figure(given)


def test_the_picture_of_a_model_is_over_depth():
    path = hs.Trajectory(torch.arange(3.0), TRAJECTORY.states[:3], axis="depth", replicate="prompt")
    figure = hs.plots.overview_figure(hs.overview(path, beta=2.0), title="A")
    axes = figure.axes
    assert "(4 prompts;" in figure.get_suptitle()
    assert {panel.get_xlabel() for panel in axes[:4]} == {"depth"}
    legend = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert legend == ["aligned pairs, <x,y> >= 0.9", "order parameter |mean x|"]
    assert axes[0].lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]


def test_a_figure_of_single_precision_states():
    single = hs.integrate(hs.SA(2.0), START.to(torch.float32), TIMES).trajectory
    line = hs.plots.overview_figure(hs.overview(single, beta=2.0)).axes[0].lines[1]
    assert np.abs(line.get_ydata() - SEEN.order_parameter.values).max() < 1e-4
