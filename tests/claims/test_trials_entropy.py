"""The trials of entropy-identity, free-energy-descends and diffuse-then-compress on small models whose weights are set
by hand."""

from __future__ import annotations

import functools
import importlib

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

import helmscope as hs
from helmscope.claims.experiments import diffuse_then_compress, entropy_identity
from helmscope.claims.trial import Trial, run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling, Trajectory
from support.planted_entropy import LAYERS, D, gradients, pulled, shifted

S, R, UNDECIDED, P = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE, Ruling.IMPOSSIBLE
ROWS = [[(7 * k + 3 * i * (k + 1)) % 60 for i in range(12)] for k in range(40)]


def plain() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 64, "n_embd": D, "n_layer": LAYERS, "n_head": 2, "n_positions": 32}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)).eval()


# --- entropy-identity


@functools.cache
def tried(claim: str, kind: str) -> Trial:
    make = {"entropy-identity": gradients, "free-energy-descends": pulled, "diffuse-then-compress": shifted}[claim]
    with Subject(make(kind)[0], ROWS) as subject:
        return run_trial(claim, quick=True, subject=subject)


@pytest.mark.parametrize(("kind", "ruling"), [("small", S), ("large", R), ("silent", P)])
def test_small_steps_follow_the_identity_and_large_ones_do_not(kind: str, ruling: Ruling) -> None:
    verdict = tried("entropy-identity", kind).verdict
    assert verdict.ruling is ruling, verdict.sentence
    if kind == "silent":
        assert "write nothing" in verdict.sentence
        return
    assert verdict.interval.n == 32
    assert all(control.as_expected for control in verdict.controls)
    assert [control.ruling for control in verdict.controls] == [R, P]
    assert "Premise: small-steps" in verdict.sentence
    data = tried("entropy-identity", kind).data
    assert dict(data.sizes) == {"prompt": 32, "layer": 4, "change": 2}


def test_a_determinant_that_forgets_the_normal_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the factor |y| for each tangent direction the change is no longer that of directions."""
    module = importlib.import_module("helmscope.observe.mlp_entropy_change")
    original = module.tangent_log_det

    def flat(matrix, x, y, *, centered):
        return original(matrix, x, y, centered=centered) + (D - 2) * y.norm(dim=-1).log()

    monkeypatch.setattr(module, "tangent_log_det", flat)
    with Subject(gradients("small")[0], ROWS) as subject:
        assert run_trial("entropy-identity", quick=True, subject=subject).verdict.ruling is not S


def test_slopes_are_those_of_least_squares() -> None:
    draw = np.random.default_rng(0)
    exact, predicted = draw.normal(size=(3, 7)), draw.normal(size=(3, 7))
    expected = [np.polyfit(exact[k], predicted[k], 1)[0] for k in range(3)]
    assert entropy_identity.slopes(predicted, exact) == pytest.approx(expected, rel=1e-12)


# --- free-energy-descends


@pytest.mark.parametrize(("kind", "ruling"), [("uphill", S), ("against", R), ("silent", UNDECIDED)])
def test_tokens_that_climb_the_potential_lose_free_energy(kind: str, ruling: Ruling) -> None:
    verdict = tried("free-energy-descends", kind).verdict
    assert verdict.ruling is ruling, verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    assert "Premise: small-steps" in verdict.sentence
    if kind != "silent":
        assert verdict.interval.n == 32
        printed = verdict.printed
        assert printed.measured.value == "false"  # with + int U the same tokens gain it
        assert set(tried("free-energy-descends", kind).data.data_vars) == {
            "free_energy",
            "gaussian_entropy",
            "free_energy_as_printed",
        }
    if kind == "against":
        assert "(attention)" in verdict.sentence


# --- diffuse-then-compress


@pytest.mark.parametrize(
    ("kind", "ruling"),
    [("spread, then gathered", S), ("gathered, then spread", R), ("gathered", UNDECIDED), ("silent", P)],
)
def test_a_cloud_that_spreads_and_gathers_is_found(kind: str, ruling: Ruling) -> None:
    verdict = tried("diffuse-then-compress", kind).verdict
    assert verdict.ruling is ruling, verdict.sentence
    if kind == "silent":
        assert "No token moves" in verdict.sentence
        return
    assert all(control.as_expected for control in verdict.controls)
    if ruling is S:
        assert "largest at depth 4 of 8" in verdict.sentence
        assert all(condition.interval.n == 16 for condition in verdict.conditions)
        assert "90 % interval" in verdict.sentence


def test_the_differences_are_tested_one_sided_at_the_level() -> None:
    """Rise and fall of entropies whose pseudo-values are known, against SciPy's one-sided t-test."""
    from scipy import stats

    from helmscope.claims.evidence import Replicates
    from helmscope.types import Region

    draw = np.random.default_rng(3)
    for mean in (0.1, 0.4, 0.6, 1.0):
        values = draw.normal(mean, 1.0, size=16)
        p = stats.ttest_1samp(values, 0, alternative="greater").pvalue
        ruling = Replicates(values, "prompts", confidence=0.9).weigh(Region(text="above 0", above=0.0)).ruling
        assert (ruling is S) == (p < 0.05)


def curve_of(factors) -> diffuse_then_compress.EntropyCurve:
    x = hs.Uniform(9, 4).sample(8, seed=0)
    path = Trajectory(torch.zeros(1), x[None], replicate="prompt", axis="depth")
    return diffuse_then_compress.EntropyCurve.of(diffuse_then_compress.planted(path, factors), seed=0)


def test_planted_clouds_shrink_and_grow() -> None:
    for factors, sign in ((diffuse_then_compress.SHRINKING, -1), (diffuse_then_compress.GROWING, 1)):
        assert (sign * np.diff(curve_of(factors).test.mean(1)) > 0).all()


def test_a_cloud_that_falls_below_its_start_does_not_first_rise() -> None:
    """It is highest at the end, which is all that the rise asks for."""
    jumped, grown = (curve_of(each) for each in (diffuse_then_compress.JUMPING, diffuse_then_compress.GROWING))
    assert jumped.chosen == grown.chosen == 5
    assert (jumped.rise > 0).all()
    assert (jumped.trend < 0).all()
    assert (jumped.above_start < 0).all()
    assert (grown.trend > 0).all()
    assert (grown.above_start > 0).all()


def test_trend_and_level_on_the_way_are_those_of_the_curve() -> None:
    values = np.random.default_rng(0).normal(size=(6, 3))
    curve = diffuse_then_compress.EntropyCurve(np.array([0.0, 1.0, 2.0, 5.0, 4.0, 3.0]), values, "")
    assert curve.trend == pytest.approx(np.polyfit(np.arange(4), values[:4], 1)[0], rel=1e-12)
    assert curve.above_start == pytest.approx(values[1:4].mean(0) - values[0], rel=1e-12)
    first = diffuse_then_compress.EntropyCurve(np.array([1.0, 0.0]), values[:2], "")
    assert not first.trend.any()
    assert not first.above_start.any()


# --- all of them


@pytest.mark.parametrize("claim", ["entropy-identity", "free-energy-descends", "diffuse-then-compress"])
def test_too_few_texts_decide_nothing(claim: str) -> None:
    with Subject(plain(), ROWS[:31]) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is UNDECIDED
    assert "needs 32 different texts" in verdict.sentence


@pytest.mark.parametrize("claim", ["entropy-identity", "free-energy-descends"])
def test_parallel_blocks_have_no_half_steps(claim: str) -> None:
    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    config = GPTNeoXConfig(vocab_size=64, bos_token_id=0, eos_token_id=0, max_position_embeddings=16, **sizes)
    with Subject(GPTNeoXForCausalLM(config).eval(), ROWS) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is P
    assert "parallel blocks" in verdict.sentence


@pytest.mark.parametrize("claim", ["free-energy-descends", "diffuse-then-compress"])
def test_fewer_tokens_than_dimensions_have_no_entropy(claim: str) -> None:
    """32 prompts of 3 tokens are 64 without the first, and 32 in each half: fewer than the 96 dimensions."""
    sizes = {"vocab_size": 64, "n_embd": 96, "n_layer": 3, "n_head": 2, "n_positions": 8}
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)).eval()
    rows = [[k, (7 * k + 1) % 60, (11 * k + 5) % 60] for k in range(40)]
    with Subject(net, rows) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is UNDECIDED
    assert "has a rank below the 95 dimensions" in verdict.sentence
