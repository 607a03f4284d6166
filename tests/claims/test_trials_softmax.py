"""The trial of stable-softmax: its verdict, its statistic against closed forms and loops, and faults it must detect."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from helmscope.claims.experiments import stable_softmax as module
from helmscope.claims.registry import TrialCase
from helmscope.claims.trial import Trial, run_trial
from helmscope.types import Ruling

F64 = torch.float64
SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE


@functools.cache
def quick() -> Trial:
    return run_trial("stable-softmax", quick=True)


def test_the_claim_is_supported_and_every_control_comes_out_as_expected() -> None:
    verdict = quick().verdict
    assert verdict.ruling is SUPPORTED, verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    with_factor, without = (condition.interval for condition in verdict.conditions)
    assert abs(with_factor.estimate) < 0.005
    assert without.estimate == pytest.approx(-0.5, abs=0.05)
    slopes = {control.name: control.interval.estimate for control in verdict.controls}
    assert slopes["two keys without the factor"] == pytest.approx(-0.5, abs=0.02)
    assert abs(slopes["unit vectors without the factor"]) < 0.005
    assert verdict.printed.judgment.value == "true"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_rules_alike(seed: int) -> None:
    assert run_trial("stable-softmax", seed=seed).verdict.ruling is SUPPORTED


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert run_trial("stable-softmax", quick=True).data.identical(quick().data)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_the_norm_is_that_of_the_jacobian_by_autograd(scale: float) -> None:
    logits = scale * torch.randn(8, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    norms = module.jacobian_norm(logits)
    for row, norm in zip(logits, norms.tolist(), strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), row)
        assert norm == pytest.approx(float(torch.linalg.matrix_norm(jacobian)), rel=1e-9, abs=1e-15)


def test_the_norm_of_two_keys_is_known_and_keeps_its_digits_where_the_softmax_saturates() -> None:
    gap = torch.tensor([0.0, 1.0, 50.0, 300.0], dtype=F64)
    exact = [2 * math.exp(-g) / (1 + math.exp(-g)) ** 2 for g in gap.tolist()]
    norms = module.jacobian_norm(torch.stack([gap, torch.zeros_like(gap)], -1))
    assert norms.tolist() == pytest.approx(exact, rel=1e-12, abs=0)


def test_dot_products_have_the_distribution_of_those_of_vectors() -> None:
    """|<q, k>| and the norm of the Jacobian, by vectors of R^64 and by the chi-squared length."""
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(4_000, 1, 64, generator=generator, dtype=F64),
        torch.randn(4_000, 8, 64, generator=generator, dtype=F64),
    )
    vectors = (q * k).sum(-1)
    fast = module.dot_products(TrialCase(), 1, 4_000, 8, 64, index=0)[0]
    for statistic in (lambda s: s[:, 0].abs(), lambda s: s.square().mean(-1), lambda s: module.jacobian_norm(s / 8)):
        assert stats.ks_2samp(statistic(vectors).numpy(), statistic(fast).numpy()).pvalue > 1e-3


def test_the_slope_is_that_of_least_squares() -> None:
    dims = (2, 8, 64)
    values = torch.tensor([[1.0, 0.5, 0.125], [3.0, 1.0, 2.0]], dtype=F64)
    expected = [np.polyfit(np.log(dims), row.log().numpy(), 1)[0] for row in values]
    assert module.log_slope(dims, values).tolist() == pytest.approx(expected, rel=1e-12)
    power = torch.tensor([dims], dtype=F64) ** -0.7
    assert module.log_slope(dims, power).item() == pytest.approx(-0.7, rel=1e-12)


def test_a_softmax_that_does_not_saturate_refutes_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits clipped to [-1, 1] keep their gradients without the factor."""
    original = module.jacobian_norm
    monkeypatch.setattr(module, "jacobian_norm", lambda logits: original(logits.clamp(-1, 1)))
    verdict = run_trial("stable-softmax", quick=True).verdict
    assert verdict.conditions[1].ruling is REFUTED
    assert verdict.ruling is INCONCLUSIVE  # the control with two keys fails as well


def test_a_factor_that_is_too_weak_refutes_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors whose length grows like d are not tamed by 1/sqrt(d)."""
    original = module.dot_products

    def longer(case, seeds, queries, keys, dim, *, index):
        return dim**0.5 * original(case, seeds, queries, keys, dim, index=index)

    monkeypatch.setattr(module, "dot_products", longer)
    assert run_trial("stable-softmax", quick=True).verdict.conditions[0].ruling is REFUTED
