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
    caption = figure.get_suptitle().replace("\n", " ")
    assert caption.startswith("A Means over 3 prompts")
    assert "bands are 95 % intervals. The main variables are shown; " in caption
    drawn = {title.partition(": ")[0] for title in titles if title}
    missing = caption[caption.index("Not shown: ") :].removeprefix("Not shown: ").rstrip(".").split(", ")
    assert {name.replace("_", " ").lower() for name in measured} - {name.lower() for name in drawn} == {
        name.lower() for name in missing
    }
    assert len(drawn) <= len([title for title in titles if title]) <= 40
    width, height = figure.get_size_inches()
    assert 1.2 < height / width < 1.5  # a sheet
    assert not any(panel.texts for panel in figure.axes if panel.get_xlabel() == "head")
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


def test_the_main_variables_exist() -> None:
    """Names of variables on the page are those that the measurements have."""
    from helmscope.plots.measurements import FIRST, PAGE

    ids = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(0))
    measured = hs.measure(hs.record(tiny_model("gpt2"), ids), only=sorted(PAGE))
    for name, each in measured.items():
        assert set(PAGE[name]) <= set(each.data_vars), name
        assert set(FIRST.get(name, ())) <= set(each.data_vars), name


def test_a_measurement_with_replicates_of_its_own_is_named() -> None:
    by_prompt = xr.Dataset({"angle": (("depth", "prompt"), np.ones((3, 4)))})
    by_group = xr.Dataset({"noise": (("layer", "group"), np.ones((3, 2)))})
    measured = {"depth_steps": by_prompt, "mlp_force": by_prompt, "context_noise": by_group}
    assert measurements_figure(measured).get_suptitle() == (
        "Means over 4 prompts, over 2 groups for context noise; bands are 95 % intervals."
    )


def test_what_cannot_be_drawn():
    with pytest.raises(hs.HelmscopeError, match="must be a Measurement"):
        measurements_figure({"depth_steps": 3})
    with pytest.raises(hs.HelmscopeError, match="no variable over depth"):
        measurements_figure({"rank": xr.Dataset({"rank": ("prompt", np.ones(3))})})
