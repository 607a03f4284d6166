"""The figure of all measurements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.plots.measurements import measurements_figure
from support.model_families import tiny_model


def test_all_measurements_of_a_model_on_one_page():
    ids = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))
    measured = hs.measure(hs.record(tiny_model("gpt2"), ids))
    figure = hs.plot(measured, title="A")
    titles = [panel.get_title(loc="left").replace("\n", " ") for panel in figure.axes]
    assert "depth steps: median angle moved in a step (radians)" in titles
    assert any(title.startswith("kernel statistics: ") for title in titles)
    assert figure.get_suptitle().startswith("A\n")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["attention half-step", "MLP half-step"]
    panel = figure.axes[titles.index("depth steps: median angle moved in a step (radians)")]
    line, attention, mlp, *_ = panel.lines
    expected = measured["depth_steps"].median_angle.mean("prompt").values
    assert line.get_ydata() == pytest.approx(expected, nan_ok=True)
    assert attention.get_ydata() == pytest.approx(expected[1::2])
    assert mlp.get_ydata() == pytest.approx(expected[2::2])


@pytest.mark.filterwarnings("error")
def test_blocks_that_write_nothing_are_drawn_without_a_warning():
    """No step has a remainder, so that there is nothing to put a line of slope 2 below."""
    model = tiny_model("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                projection.weight.zero_()
                projection.bias.zero_()
    measured = hs.measure(hs.record(model, torch.randint(20, (4, 6))), only=["generator_test"], quick=True)
    assert np.isnan(measured["generator_test"].remainder.values).all()
    assert hs.plot(measured).axes


def test_a_simulation_has_no_halves_and_single_variables_are_curves():
    run = hs.integrate(hs.SA(1.0), hs.Uniform(5, 3).sample(4, seed=0), times=[0.0, 0.5, 1.0])
    measured = hs.measure(run)
    figure = hs.plot(measured)
    assert not figure.legends
    single = hs.plot({"depth_steps": measured["depth_steps"]}, variables=["angle"])
    assert len(single.axes) == 1


def test_what_cannot_be_drawn():
    with pytest.raises(hs.HelmscopeError, match="must be a Measurement"):
        measurements_figure({"depth_steps": 3})
    with pytest.raises(hs.HelmscopeError, match="no variable over depth"):
        measurements_figure({"rank": xr.Dataset({"rank": ("prompt", np.ones(3))})})
