"""One figure for all pictures: it saves itself as PNG, SVG and PDF, the same bytes every time."""

from __future__ import annotations

import os
import sys

import matplotlib.figure
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.plots.depth import depth_figure
from helmscope.plots.figure import Figure
from helmscope.plots.style import new_figure
from helmscope.types import Plottable
from support.children import run_python
from support.refusal import refused

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}
SIM = hs.integrate(hs.SA(2.0), hs.Uniform(6, 3).sample(3, seed=0), [0.0, 1.0])
DATA = xr.Dataset({"slope": ("beta", [1.0, 1.2]), "slope_stderr": ("beta", [0.1, 0.1])}, attrs={"n": 20})
REGION = hs.types.Region(text="within .1", low=0.9, high=1.1)
RATE = hs.types.JudgedCondition("rate", REGION, hs.Interval(1.0, 0.99, 1.01, n=20), hs.types.Ruling.SUPPORTED)
VERDICT = hs.Verdict(claim="rate", ruling=hs.types.Ruling.SUPPORTED, conditions=(RATE,))
DIAGRAM = hs.phase_diagram(hs.SA, betas=[1, 4], times=[0, 4, 9], start=hs.Uniform(4, 8), samples=3)
DEEP = hs.Trajectory(torch.arange(3.0), torch.eye(4).expand(3, 2, 4, 4), axis="depth", replicate="prompt")
PICTURES = {
    "simulation": SIM.plot,
    "depth": lambda: depth_figure(DEEP),
    "overview": lambda: hs.plots.overview_figure(hs.overview(SIM, beta=2.0)),
    "phase": DIAGRAM.plot,
    "trial": hs.claims.Trial(VERDICT, DATA).plot,
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_our_figure_and_saves_itself(name, tmp_path):
    figure = PICTURES[name]()
    assert isinstance(figure, Figure)
    assert isinstance(figure, matplotlib.figure.Figure)
    for ending, magic in MAGIC.items():
        figure.save(tmp_path / f"a.{ending}")
        assert (tmp_path / f"a.{ending}").read_bytes().startswith(magic)
    assert sorted(os.listdir(tmp_path)) == ["a.pdf", "a.png", "a.svg"]


def test_a_trial_is_drawn_by_hs_plot_too():
    assert hs.plot(hs.claims.Trial(VERDICT, DATA)).get_suptitle() == "rate: supported"


def test_a_type_without_a_picture_is_refused():
    class Odd(Plottable):
        pass

    refused(Odd().plot, "object to plot is an Odd")


def test_equal_pictures_are_equal_files_without_a_date(tmp_path):
    one, other = SIM.plot(panels=1), SIM.plot(panels=1)
    for ending in MAGIC:
        one.save(tmp_path / f"a.{ending}")
        one.save(str(tmp_path / f"b.{ending.upper()}"))
        other.save(tmp_path / f"c.{ending}")
        first, *others = (
            (tmp_path / each).read_bytes() for each in (f"a.{ending}", f"b.{ending.upper()}", f"c.{ending}")
        )
        assert others == [first, first]
        assert b"CreationDate" not in first
        assert b"dc:date" not in first
    one.save(tmp_path / "d.png")
    assert (tmp_path / "d.png").read_bytes() == (tmp_path / "a.png").read_bytes()  # the vector files changed nothing
    SIM.plot(panels=1, system=1).save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "c.svg").read_bytes()


@pytest.mark.parametrize("name", ["x.jpg", "x", "x.pdf.gz", "png"])
def test_another_ending_is_refused_and_writes_nothing(name, tmp_path):
    refused(lambda: new_figure(1, 1)[0].save(tmp_path / name), name, ".png, .svg, .pdf")
    assert os.listdir(tmp_path) == []


def test_a_path_that_is_none_and_a_missing_folder_are_refused(tmp_path):
    refused(lambda: new_figure(1, 1)[0].save(None), "path is a NoneType")
    refused(lambda: new_figure(1, 1)[0].save(tmp_path / "no" / "x.png"), "but there is no folder", "create it first")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "x.png"
    target.write_bytes(b"old")

    def fail(figure):
        raise RuntimeError("no memory")

    monkeypatch.setattr("helmscope.plots.style.png", fail)
    with pytest.raises(RuntimeError):
        SIM.plot().save(target)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.png"]


def test_a_figure_shows_itself_as_png_and_belongs_to_no_pyplot():
    figure = SIM.plot()
    assert figure._repr_png_().startswith(MAGIC["png"])
    assert getattr(figure, "_repr_html_", lambda: None)() is None
    assert figure.canvas.manager is None


def test_without_matplotlib_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in PICTURES.values():
        assert "pip install 'helmscope[report]'" in refused(draw, "matplotlib is not installed")


def test_without_matplotlib_objects_still_show_themselves():
    code = (
        "import sys\nfor name in ('matplotlib', 'matplotlib.figure'): sys.modules[name] = None\n"
        "import helmscope as hs, torch\nsim = hs.integrate(hs.SA(1.0), torch.eye(2), [1.0])\n"
        "repr(sim), sim._repr_html_()\n"
        "try: sim.plot()\nexcept hs.HelmscopeError as error: print(error)\n"
    )
    assert "pip install 'helmscope[report]'" in run_python(code, check=True).stdout
