"""sinks-are-anchors on stories15M, a trained Llama: its sink is the mark at the start of every text.

All texts begin with that mark, so that the value of the sink is the same in all of them by construction; without the
mark no head has a sink, and the premise of the claim is impossible.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.trials import interval

import helmscope as hs
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.observe import attention_sinks, sink_constancy, sink_damage
from helmscope.types import Ruling
from support.stories15m import save_stories15m

pytestmark = pytest.mark.slow
TEXTS, TOKENS = 32, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stories15m(tmp_path_factory.mktemp("stories15m"))


@pytest.fixture(scope="module")
def rows(folder: Path) -> torch.Tensor:
    with Subject(str(folder)) as subject:
        long = [list(ids[:TOKENS]) for ids in subject.token_ids if len(ids) >= TOKENS]
    return torch.tensor(long[:TEXTS])


def test_the_mark_at_the_start_is_a_sink_and_nothing_else_is(folder: Path, rows: torch.Tensor) -> None:
    assert set(rows[:, 0].tolist()) == {1}  # <s>
    recording = hs.record(str(folder), rows)
    mass = attention_sinks(recording).first_token_mass.mean("prompt")
    assert float(mass.max()) == pytest.approx(0.465, abs=0.02)
    assert 0.19 < float(mass.max("head").min()) < 0.21  # of every layer, the head with the largest
    without = attention_sinks(hs.record(str(folder), rows[:, 1:]), first_position=10)
    assert float(without.first_token_mass.mean("prompt").max()) < 0.13


def test_a_mark_that_all_texts_share_is_constant_by_construction(folder: Path, rows: torch.Tensor) -> None:
    constancy = sink_constancy(hs.record(str(folder), rows))
    assert constancy.attrs["distinct_first_tokens"] == 1
    for name in ("raw_cosine", "cosine", "explained_share", "write_cosine", "write_explained_share"):
        assert float(abs(constancy[name] - 1).max()) < 1e-6, name
    different = sink_constancy(hs.record(str(folder), rows[:, 1:]))
    assert different.attrs["distinct_first_tokens"] > 8
    assert float(different.cosine.max()) < 0.7


def test_replacing_the_sink_by_its_mean_does_nothing_and_masking_it_does(folder: Path, rows: torch.Tensor) -> None:
    damage = sink_damage(hs.record(str(folder), rows))
    assert damage.attrs["sinks"] == ["L4H1", "L4H2", "L5H1"]
    by_mean, by_zero, masked = (damage.kl.sel(edit=edit) for edit in ("mean", "zero", "masked"))
    assert float(by_mean.max()) < 1e-10
    assert float(by_zero.mean()) == pytest.approx(0.003, abs=0.001)
    assert float(masked.mean()) == pytest.approx(0.107, abs=0.01)
    assert bool((masked > by_zero).all())


def test_the_trial_has_no_premise_without_the_mark(folder: Path) -> None:
    with Subject(str(folder)) as subject:
        verdict = run_trial("sinks-are-anchors", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert "has no attention sink: the largest mean weight of a head on the first token is 0.0" in verdict.sentence
    assert "without the first token, which all share" in verdict.setting
    shared = "with the first tokens that all prompts share"
    assert interval(verdict, f"weight on the first token of the head with the largest, {shared}").low > 0.3
    assert interval(verdict, f"cosine, {shared}: 1 by construction").low > 1 - 1e-6
