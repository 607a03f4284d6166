"""The trial of breathing on planted clouds and a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.experiments import breathing as module
from helmscope.claims.experiments.breathing import Changes
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Half, Region, Ruling

ABOVE, BELOW = Region(text="a rise", above=0.0), Region(text="a fall", below=0.0)
SIZES = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}


def dimension(path: list[float], spread: float = 0.05, prompts: int = 32) -> xr.DataArray:
    """A dimension over depth, equal in all prompts up to noise."""
    values = np.array(path)[:, None] + spread * np.random.default_rng(0).normal(size=(len(path), prompts))
    halves = ["", *[("attention", "mlp")[k % 2] for k in range(len(path) - 1)]]
    return xr.DataArray(values, {"half": ("depth", halves)}, ("depth", "prompt"))


@pytest.mark.parametrize(
    ("path", "attention", "mlp", "chain"),
    [
        ([5, 6, 5.5, 7, 6], Ruling.SUPPORTED, Ruling.SUPPORTED, Ruling.REFUTED),
        ([5, 6, 4.5, 7, 4], Ruling.SUPPORTED, Ruling.SUPPORTED, Ruling.SUPPORTED),
        ([5, 6, 5.5, 5, 4], Ruling.REFUTED, Ruling.SUPPORTED, Ruling.REFUTED),
        ([5, 6, 6.5, 7, 6], Ruling.SUPPORTED, Ruling.REFUTED, Ruling.REFUTED),
        ([5, 6, 5.5, 5.5, 5], Ruling.INCONCLUSIVE, Ruling.SUPPORTED, Ruling.REFUTED),
    ],
)
def test_planted_curves_get_the_right_rulings(path: list[float], attention: Ruling, mlp: Ruling, chain: Ruling) -> None:
    changes = Changes.of(dimension(path))
    assert changes.evidence(Half.ATTENTION).weigh(ABOVE).ruling is attention
    assert changes.evidence(Half.MLP).weigh(BELOW).ruling is mlp
    assert changes.chain.weigh(ABOVE).ruling is chain


def tiny_subject() -> Subject:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0)).double().eval()
    ids = torch.randint(1, 40, (34, 128), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 1 + torch.arange(34)
    return Subject(model, ids)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return tiny_subject()


def test_a_tiny_model_is_tried_with_all_controls(subject: Subject) -> None:
    trial = run_trial("breathing", subject=subject, quick=True)
    rulings = {control.name: control.ruling for control in trial.verdict.controls}
    assert rulings == {
        "blocks that write nothing": Ruling.IMPOSSIBLE,
        "planted rise": Ruling.SUPPORTED,
        "planted fall": Ruling.SUPPORTED,
    }
    assert trial.verdict.printed.interval is not None
    assert {condition.name for condition in trial.verdict.conditions} == {"attention", "MLP", "k-th token"}
    assert trial.verdict.ruling in (Ruling.REFUTED, Ruling.INCONCLUSIVE)  # random weights do not breathe


def test_a_fault_in_the_dimension_fails_the_controls(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """With depths reversed the planted rise is a fall, and the claim cannot be decided."""
    right = module.token_dimension

    def reversed_depth(*args: object, **options: object) -> xr.Dataset:
        measured = right(*args, **options)  # type: ignore[arg-type]
        measured["two_nn"].values[:] = measured.two_nn.values[::-1].copy()
        return measured

    monkeypatch.setattr(module, "token_dimension", reversed_depth)
    trial = run_trial("breathing", subject=subject, quick=True)
    rulings = {control.name: control.ruling for control in trial.verdict.controls}
    assert rulings["planted rise"] is Ruling.REFUTED
    assert trial.verdict.ruling is Ruling.INCONCLUSIVE
