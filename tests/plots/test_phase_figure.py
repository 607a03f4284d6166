"""Pictures of phase diagrams show the numbers, to the bit, and are the same file every time."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import xarray as xr

import helmscope as hs
from helmscope.observe.half_times import half_time
from helmscope.observe.hitting_curve import closed_form_curve
from helmscope.observe.phase import phase_diagram, published_scheme_probability
from helmscope.plots.phase import phase_figure, phase_page
from helmscope.plots.style import png

CASE = {"betas": [0.5, 2.0, 4.0], "times": [0.0, 2.0, 3.0, 5.0], "samples": 4, "delta": 0.05}


def diagram(dim: int) -> xr.Dataset:
    start = hs.Uniform(6, dim)
    ours = phase_diagram(hs.SA, start=start, **CASE)
    return ours.assign(published_scheme_probability(hs.SA, start=start, **CASE).data_vars).expand_dims({"dim": [dim]})


HOW = {"data_vars": "all", "coords": ["lost_samples"], "compat": "equals", "join": "exact", "combine_attrs": "override"}
BOTH = xr.concat([diagram(3), diagram(40)], dim="dim", **HOW)
OURS = BOTH.drop_vars(["probability_published", "probability_published_stderr"])
ONE = OURS.sel(dim=40)


def meshes(figure):
    return [panel for panel in figure.axes if panel.get_xlabel() == "time"]


def test_a_panel_holds_the_probabilities_and_the_lines():
    (panel,) = meshes(phase_figure(ONE))
    (mesh,) = panel.collections
    assert np.array_equal(mesh.get_array(), ONE.probability.values)
    assert mesh.get_clim() == (0, 1)
    edges = mesh.get_coordinates()
    assert edges[0, :, 0].tolist() == [-1.0, 1.0, 2.5, 4.0, 6.0]
    assert edges[:, 0, 1].tolist() == [-0.25, 1.25, 3.0, 5.0]
    lines = {line.get_label(): line for line in panel.lines}
    assert set(lines) == {"P = 1/2", "t*(beta), closed form for orthogonal tokens"}
    half = lines["P = 1/2"]
    assert np.array_equal(half.get_xdata(), half_time(ONE).half_time.values, equal_nan=True)
    assert np.array_equal(half.get_ydata(), CASE["betas"])
    assert (half.get_marker(), half.get_linestyle()) == ("o", ":")
    assert (panel.get_xlim(), panel.get_ylim()) == ((0.0, 5.0), (0.5, 4.0))
    error = float(ONE.probability_stderr.max())
    assert panel.get_title() == f"d = 40\nstandard error <= {error:.2g}"


@pytest.mark.parametrize("field", [hs.SA, hs.USA])
def test_the_closed_form_is_evaluated_between_the_betas(field):
    """A curve through three betas would be two chords."""
    data = phase_diagram(field, start=hs.Uniform(6, 3), **CASE)
    (panel,) = meshes(data.plot())
    (curve,) = [line for line in panel.lines if line.get_label() == "t*(beta), closed form for orthogonal tokens"]
    assert set(CASE["betas"]) < set(curve.get_ydata())
    assert len(curve.get_ydata()) > 200
    exact = [hs.hitting_time(field(beta), n=6, delta=0.05) for beta in curve.get_ydata()[::50]]
    assert curve.get_xdata()[::50].tolist() == exact
    assert phase_page(data).count("Plotly.newPlot") == 1


def test_an_unknown_closed_form_is_marked_at_the_betas_only():
    """The field's inverse temperature is twice the beta of the diagram, which the diagram does not record."""
    data = phase_diagram(lambda beta: hs.SA(2 * beta), start=hs.Uniform(6, 3), **CASE)
    assert closed_form_curve(data) is None
    (panel,) = meshes(data.plot())
    (curve,) = [line for line in panel.lines if line.get_label() == "t*(beta), closed form for orthogonal tokens"]
    assert np.array_equal(curve.get_xdata(), data.hitting_time.values)
    assert (curve.get_marker(), curve.get_linestyle()) == ("o", "None")


def test_one_beta_has_one_tick_and_markers():
    case = {**CASE, "betas": [2.0], "samples": 1}
    figure = phase_diagram(hs.SA, start=hs.Uniform(6, 40), **case).plot()
    (panel,) = meshes(figure)
    assert panel.get_yticks().tolist() == [2.0]
    assert {line.get_marker() for line in panel.lines} == {"o"}
    assert figure.get_suptitle().endswith("6 tokens, met: <x, y> >= 1 - 0.05, 1 sample, seed 0")
    early = phase_diagram(hs.SA, start=hs.Uniform(6, 40), **(case | {"times": [0.0, 0.1]})).plot()
    assert (meshes(early)[0].lines[:], early.legends) == ([], [])  # both times are later than the last one


def test_the_published_scheme_stands_beside_ours_with_the_difference():
    panels = meshes(phase_figure(BOTH))
    assert len(panels) == 6
    assert panels[0].lines[0].get_label() == "P = 1/2 (DormandPrince)"
    (legend,) = panels[0].get_figure().legends
    keys = dict(zip([text.get_text() for text in legend.get_texts()], legend.get_lines(), strict=True))
    assert keys["P = 1/2 (DormandPrince)"].get_color() == panels[0].lines[0].get_color() == "#ffffff"
    for row, dim in enumerate((3, 40)):
        here = BOTH.sel(dim=dim)
        difference = here.probability_published - here.probability
        expected = [here.probability, here.probability_published, difference]
        for panel, numbers in zip(panels[3 * row : 3 * row + 3], expected, strict=True):
            assert np.array_equal(panel.collections[0].get_array(), numbers.values)
            assert panel.get_title().startswith(f"d = {dim}: ")
    titles = [panel.get_title().splitlines()[0] for panel in panels[:3]]
    assert titles[:2] == ["d = 3: DormandPrince", "d = 3: published scheme (Euler, h = 0.1)"]
    assert titles[2] == "d = 3: published minus DormandPrince"
    extent = float(abs(BOTH.probability_published - BOTH.probability).max())
    assert panels[2].collections[0].get_clim() == panels[5].collections[0].get_clim() == (-extent, extent)


def test_words_on_the_picture():
    figure = phase_figure(OURS, title="$SA$")
    assert figure.get_suptitle() == "\\$SA\\$\n6 tokens, met: <x, y> >= 1 - 0.05, 4 samples, seed 0"
    assert [panel.get_ylabel() for panel in meshes(figure)] == ["beta", "beta"]
    assert phase_figure(OURS).get_suptitle().startswith("SA: probability P that two tokens have met\n")


def test_the_file_is_the_same_every_time():
    data = png(phase_figure(BOTH))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data == png(phase_figure(BOTH))
    assert data != png(phase_figure(OURS))


def test_one_cell_no_curve_and_nothing_known_are_drawn():
    bare = OURS.isel(beta=[0], time=[0], dim=0).drop_vars("hitting_time")
    bare = bare.assign({name: bare[name] * np.nan for name in bare.data_vars})
    (panel,) = meshes(phase_figure(bare))
    assert panel.get_title() == "d = 3\nno standard error"
    assert len(panel.lines) == 0
    assert png(phase_figure(bare))[:4] == b"\x89PNG"
    assert "no closed form" in phase_page(bare)


def test_the_page_is_one_file_that_loads_nothing():
    page = phase_page(BOTH, title="<script>alert(1)</script> & more")
    assert page == phase_page(BOTH, title="<script>alert(1)</script> & more")
    assert "<script>alert(1)" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; more") == 2  # the title and the heading
    assert re.search(r"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'", page)
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=", page.split("plotly.js v")[0])
    tail = page[page.rindex("Plotly.newPlot(") :]
    assert not re.search(r"<(script|link|img|iframe)", tail)
    for word in ("t = %{x:.4g}, beta = %{y:.4g}", "t* = %{customdata[1]}", "published minus DormandPrince", "#440154"):
        assert word in tail.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u002f", "/"), word
    assert f"+- {float(BOTH.probability_stderr.max()):.2g}" in tail


def test_a_hostile_name_of_a_flow_is_only_text():
    page = phase_page(ONE.assign_attrs(flow="<img src=x onerror=alert(1)>"))
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_missing_extras_say_how_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(hs.HelmscopeError, match=r"plotly is not installed.*helmscope\[report\]"):
        phase_page(ONE)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(hs.HelmscopeError, match=r"matplotlib is not installed.*helmscope\[report\]"):
        phase_figure(ONE)


def test_what_is_no_diagram_is_refused():
    for draw in (phase_figure, phase_page):
        with pytest.raises(hs.HelmscopeError, match="diagram has no 'probability' over beta and time"):
            draw(ONE.isel(time=0, drop=True))
