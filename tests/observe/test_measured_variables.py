"""Every variable of every measurement says what it is, and is named on a page of the documents."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch

import helmscope as hs
from support.model_families import inputs_of, tiny_model

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("instruments*.md"))
NAMED = {name for page in PAGES for name in re.findall(r"`(\w+)`", page.read_text(encoding="utf8"))}


def simulated() -> hs.System:
    draw = torch.Generator().manual_seed(0)
    w_in, w_out = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((4, 3), (3, 4)))
    block = hs.Block(hs.SA(2.0), hs.MLP(w_in=w_in, w_out=w_out, activation=hs.activations.Tanh()))
    return hs.integrate(block, hs.Uniform(5, 3).sample(4, seed=0), times=[0.0, 0.5])


def recorded(family: str) -> hs.System:
    return hs.record(tiny_model(family), inputs_of(family, batch=8, n=20))


def unnamed(name: str) -> bool:
    """Pages name ``expert_NAME`` and ``NAME_with_router`` by their patterns."""
    return name not in NAMED and name.removeprefix("expert_").removesuffix("_with_router") not in NAMED


@pytest.mark.parametrize("of", ["simulation", "llama", "mixtral", "bert"])
def test_every_variable_has_a_long_name_and_is_named_on_a_page(of: str) -> None:
    system = simulated() if of == "simulation" else recorded(of)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny samples
        measured = hs.measure(system, quick=True)
    assert len(measured) > 10
    variables = {(name, str(each)): data[each].attrs for name, data in measured.items() for each in data.data_vars}
    assert not [key for key, attributes in variables.items() if not attributes.get("long_name")]
    assert not [key for key, attributes in variables.items() if attributes["long_name"] == key[1]]
    assert not [key for key in variables if unnamed(key[1])]


def test_the_variables_of_context_noise_are_named() -> None:
    names = importlib.import_module("helmscope.observe.context_noise").NAMES  # hs.observe has the function
    assert not [name for name in names if unnamed(name)]


def test_a_variable_that_no_page_names_is_found() -> None:
    assert unnamed("expert_color")
    assert not unnamed("expert_force")
