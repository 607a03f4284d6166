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
PANELS = ["close_pair_share", "order_parameter", "cluster_count", "effective_rank", "interaction_energy"]
CAPTION = "clusters within an angle of 0.2; close pairs: inner product >= 1 - 0.01; energy at beta = 2"


def titles(figure) -> list[str]:
    return [panel.get_title(loc="left") for panel in figure.axes if panel.get_title(loc="left")]


def one_line(text: str) -> str:
    return text.replace("\n", " ")


@pytest.mark.parametrize("given", [KEPT, SEEN], ids=["with replicates", "reduced"])
def test_curves_are_the_measurement(given):
    axes = hs.plots.overview_figure(given).axes
    for panel, name in zip(axes, PANELS, strict=False):
        (line,), (band,) = panel.lines, panel.collections
        assert np.array_equal(line.get_xdata(), TIMES)
        assert np.array_equal(line.get_ydata(), SEEN[name].values)
        corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
        for end in ("_low", "_high"):
            assert set(zip(TIMES, SEEN[f"{name}{end}"].values, strict=True)) <= corners
    assert axes[5].get_xlim() == (0.0, 2.0)
    (mesh,) = axes[5].collections
    assert np.array_equal(mesh.get_array(), SEEN.inner_product_histogram.values.T)


def test_several_overviews_have_the_panels_the_colors_and_the_transforms_of_one():
    other = hs.overview(hs.integrate(hs.USA(2.0), START, TIMES), delta=0.01, max_angle=0.2)
    one, both = hs.plot(KEPT), hs.plot({"SA": KEPT, "USA": other})
    assert titles(both)[:5] == titles(one)[:5]
    assert titles(both)[5:] == ["SA: share of pairs", "USA: share of pairs"]
    for single, compared in zip(one.axes[:5], both.axes[:5], strict=True):
        assert single.lines[0].get_color() == compared.lines[0].get_color()
        assert compared.lines[0].get_color() != compared.lines[1].get_color()
        assert np.array_equal(single.lines[0].get_ydata(), compared.lines[0].get_ydata())
        assert single.get_yscale() == compared.get_yscale()
    maps = [
        panel.collections[0] for panel in (*one.axes, *both.axes) if "share of pairs" in panel.get_title("left")[-14:]
    ]
    maps = [mesh for mesh in maps if mesh.get_array() is not None and mesh.get_array().ndim == 2]
    assert len(maps) == 3
    for mesh in maps:
        low, high = mesh.get_clim()
        assert mesh.norm((low + high) / 2) == pytest.approx(0.5**0.5, abs=0.02)  # the root of the share, in all of them
    assert maps[1].get_clim() == maps[2].get_clim()
    assert [text.get_text() for text in both.legends[0].get_texts()] == ["SA", "USA"]
    assert CAPTION in one_line(both.get_suptitle())


def test_quantiles_of_a_recording_have_one_color_and_a_solid_median():
    path = hs.Trajectory(torch.arange(3.0), TRAJECTORY.states[:3], axis="depth", replicate="prompt")
    seen = hs.overview(path)
    for figure in (hs.plot(seen), hs.plot({"A": seen, "B": seen})):
        panel = figure.axes[0]
        assert panel.get_title(loc="left") == "quantiles of inner products"
        lines = panel.lines[:3]
        assert len({line.get_color() for line in lines}) == 1
        assert [line.get_linestyle() == "-" for line in lines] == [False, True, False]
        assert len({line.get_linestyle() for line in lines}) == 3
        expected = hs.reduce_replicates(seen).inner_product_quantile.values
        assert np.array_equal(np.stack([line.get_ydata() for line in lines], -1), expected)
        assert [text.get_text() for text in panel.get_legend().get_texts()] == ["5 %", "50 %", "95 %"]


def test_words_on_the_picture():
    figure = hs.plots.overview_figure(KEPT, title="SA")
    assert figure.get_suptitle() == f"SA\nmean over 4 systems; band: 95 % interval; {CAPTION}"
    assert hs.plots.overview_figure(SEEN, title="SA").get_suptitle() == figure.get_suptitle()
    errors = SEEN.drop_vars([name for name in SEEN.data_vars if name.endswith(("_low", "_high"))])
    assert "mean over 4 systems; band: two standard errors" in hs.plots.overview_figure(errors).get_suptitle()
    assert list(map(one_line, titles(figure))) == [
        "share of pairs with an inner product >= 0.99",
        "order parameter |mean x|",
        "number of clusters",
        "effective rank (entropy)",
        "interaction energy",
        "share of pairs",
    ]
    assert [panel.get_xlabel() for panel in figure.axes[:6]] == ["time"] * 6
    unnamed = SEEN.copy()
    del unnamed.attrs["replicate"]
    assert hs.plots.overview_figure(unnamed).get_suptitle().startswith("mean over 4 replicates; band: 95 % interval")


def test_the_file_is_a_png_and_the_same_for_the_same_measurement():
    data = png(hs.plots.overview_figure(SEEN, title="SA"))
    assert data == png(hs.plots.overview_figure(SEEN, title="SA"))
    assert data != png(hs.plots.overview_figure(SEEN, title="USA"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1089, 660)  # 9.9 x 6 inches at 110 dots an inch


def test_one_figure_written_twice_gives_one_file():
    figure = hs.plots.overview_figure(SEEN)
    assert png(figure) == png(figure)


def test_without_beta_the_caption_says_how_to_get_the_energy():
    endings = {None: "beta=... adds the energy", 0.0: "no energy, which is infinite at beta = 0"}
    for beta, words in endings.items():
        figure = hs.plots.overview_figure(hs.overview(TRAJECTORY, beta=beta))
        assert "interaction energy" not in titles(figure)
        assert one_line(figure.get_suptitle()).endswith(f">= 1 - 0.001; {words}")
        assert png(figure)[:4] == b"\x89PNG"


def test_one_system_has_curves_without_bands():
    one = hs.overview(hs.Trajectory(TRAJECTORY.times, TRAJECTORY.states[:, :1]), beta=2.0)
    figure = hs.plots.overview_figure(one)
    assert np.array_equal(figure.axes[2].lines[0].get_ydata(), one.cluster_count.values[:, 0])
    assert png(figure)[:4] == b"\x89PNG"


def test_two_systems_are_drawn_instead_of_bands():
    two = hs.overview(hs.Trajectory(TRAJECTORY.times, TRAJECTORY.states[:, :2]), beta=2.0)
    figure = hs.plots.overview_figure(two, title="SA")
    assert figure.get_suptitle().startswith("SA\nmean over 2 systems; thin lines or dots: each system")
    energy = figure.axes[4]
    singles = [line.get_ydata().tolist() for line in energy.lines if line.get_label() == "_single"]
    assert singles == two.interaction_energy.values.T.tolist()


def test_one_time_has_a_histogram_with_its_own_axes():
    seen = hs.overview(hs.Trajectory(TRAJECTORY.times[:1], TRAJECTORY.states[:1]), beta=2.0)
    panel = hs.plots.overview_figure(seen).axes[5]
    (line,) = panel.lines
    assert np.array_equal(line.get_xdata(), seen.inner_product.values)
    assert np.array_equal(line.get_ydata(), hs.reduce_replicates(seen).inner_product_histogram.values[0])
    assert panel.get_xlabel() == "inner product"
    assert panel.get_title(loc="left") == "share of pairs"


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
    with pytest.raises(hs.HelmscopeError, match=r"measurements is a Dataset of \['order'\].*overview") as caught:
        hs.plots.overview_figure(other)
    assert "\n" not in str(caught.value)


def test_what_is_no_measurement_is_refused_with_one_sentence():
    for given in (hs.integrate(hs.SA(2.0), START, TIMES), TRAJECTORY, None, 3.0):
        with pytest.raises(hs.HelmscopeError, match=rf"^measurements is a {type(given).__name__}, but it must be"):
            hs.plots.overview_figure(given)


def test_the_picture_of_a_model_is_over_depth():
    path = hs.Trajectory(torch.arange(3.0), TRAJECTORY.states[:3], axis="depth", replicate="prompt")
    figure = hs.plots.overview_figure(hs.overview(path, beta=2.0), title="A")
    axes = figure.axes
    assert figure.get_suptitle().startswith("A\nmean over 4 prompts;")
    assert {panel.get_xlabel() for panel in axes[:6]} == {"depth"}
    assert titles(figure)[:3] == ["quantiles of inner products", "order parameter |mean x|", "clusters per token"]
    assert axes[0].lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]


def test_a_figure_of_single_precision_states():
    single = hs.integrate(hs.SA(2.0), START.to(torch.float32), TIMES).trajectory
    line = hs.plots.overview_figure(hs.overview(single, beta=2.0)).axes[1].lines[0]
    assert np.abs(line.get_ydata() - SEEN.order_parameter.values).max() < 1e-4
