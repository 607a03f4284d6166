"""Kinds of evidence: each applies its decision rule, and raises for input that it cannot assess."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helmscope.claims.evidence import (
    AbsoluteDifference,
    AbsoluteDifferenceInEveryCase,
    Count,
    IdentityErrors,
    PremiseImpossible,
    Replicates,
    ReplicatesInEveryCase,
    ReplicatesInSomeCase,
)
from helmscope.claims.finding import Finding
from helmscope.stats.intervals import bootstrap_t, mean_interval
from helmscope.stats.scales import LogScale
from helmscope.types import HelmscopeError, Region, Ruling

ABOVE = Region(text="above 0", above=0.0)
BOUND = Region(text="within 1e-12", high=1e-12)
UNBOUNDED = Region(text="described")
MATTERS = Region(text="differs by .1 or more", low=0.1)


def around(center: float, n: int = 32, spread: float = 1.0) -> np.ndarray:
    """Replicates with exactly this mean and standard deviation."""
    x = np.linspace(-1, 1, n)
    return center + spread * x / x.std(ddof=1)


@pytest.mark.parametrize(
    ("center", "ruling"), [(1.0, Ruling.SUPPORTED), (-1.0, Ruling.REFUTED), (0.1, Ruling.INCONCLUSIVE)]
)
def test_replicates(center: float, ruling: Ruling) -> None:
    assessment = Replicates(around(center), of="starts").weigh(ABOVE)
    assert assessment.ruling is ruling
    assert assessment.interval == mean_interval(around(center))
    assert assessment.basis == "from 32 starts"
    # the half-width is 2.0395 / sqrt 32 and the distance .1: n (width / distance)^2
    assert assessment.replicates_needed == (416 if ruling is Ruling.INCONCLUSIVE else 32)


def test_replicates_on_a_scale_and_skewed() -> None:
    x = np.exp(around(1.0))
    assert Replicates(x, scale=LogScale()).weigh(ABOVE).interval == mean_interval(x, scale=LogScale())
    assert Replicates(x, skewed=True).weigh(ABOVE).interval == bootstrap_t(x)


def test_a_count_with_refutes_false_is_never_refuted() -> None:
    region = Region(text="at least .9", low=0.9)
    assert Count(64, 64).weigh(region).ruling is Ruling.SUPPORTED
    assert Count(0, 64).weigh(region).ruling is Ruling.REFUTED
    assessment = Count(0, 64, refutes=False).weigh(region)
    assert (assessment.ruling, assessment.replicates_needed) == (Ruling.INCONCLUSIVE, None)
    assert Count(64, 64, refutes=False).weigh(region).ruling is Ruling.SUPPORTED
    assert Count(60, 64, of="starts").weigh(region).basis == "from 60 of 64 starts"


def test_one_error_beyond_the_bound_refutes_an_identity() -> None:
    errors = np.full(1_000, 1e-15)
    assessment = IdentityErrors(errors).weigh(BOUND)
    assert assessment.ruling is Ruling.BY_CONSTRUCTION
    assert (assessment.interval.estimate, assessment.interval.n) == (1e-15, 1_000)
    errors[17] = 1e-11
    assessment = IdentityErrors(errors).weigh(BOUND)
    assert assessment.ruling is Ruling.REFUTED
    assert assessment.interval.high == assessment.interval.estimate == 1e-11
    assert "1 of them beyond" in assessment.basis


@pytest.mark.parametrize(
    ("errors", "region", "sentence"),
    [
        (np.zeros(999), BOUND, "errors holds 999 inputs, but an identity needs at least 1,000"),
        (np.full(1_000, np.nan), BOUND, "errors[0] is nan, but it must be a finite number >= 0"),
        (-np.ones(1_000), BOUND, "errors[0] is -1, but it must be a finite number >= 0"),
        (np.zeros(1_000), ABOVE, "region is 'above 0', but an identity needs one bound, high, for its error"),
    ],
)
def test_invalid_identities_raise(errors: np.ndarray, region: Region, sentence: str) -> None:
    with pytest.raises(HelmscopeError) as raised:
        IdentityErrors(errors).weigh(region)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("center", "spread", "ruling"),
    [
        (1.0, 1.0, Ruling.SUPPORTED),
        (-1.0, 1.0, Ruling.SUPPORTED),
        (0.0, 0.1, Ruling.REFUTED),
        (0.05, 0.05, Ruling.REFUTED),
        (0.1, 1.0, Ruling.INCONCLUSIVE),
        (-0.1, 0.1, Ruling.INCONCLUSIVE),
    ],
)
def test_a_difference_that_matters_can_be_supported_and_refuted(center: float, spread: float, ruling: Ruling) -> None:
    differences = around(center, spread=spread)
    assessment = AbsoluteDifference(differences, of="starts").weigh(MATTERS)
    signed = mean_interval(differences)
    assert assessment.ruling is ruling
    assert assessment.interval.estimate == abs(signed.estimate)
    assert assessment.interval.high == max(abs(signed.low), abs(signed.high))
    inside = signed.low <= 0 <= signed.high
    assert assessment.interval.low == (0.0 if inside else min(abs(signed.low), abs(signed.high)))
    assert "sign flips p = " in assessment.basis


def test_every_layer_reports_the_layer_nearest_to_failing() -> None:
    good = ReplicatesInEveryCase([around(3.0), around(1.0), around(2.0)]).weigh(ABOVE)
    assert (good.ruling, good.basis) == (Ruling.SUPPORTED, "the worst of 3 cases, layer 1, from 32 seeds each")
    bad = ReplicatesInEveryCase([around(3.0), around(1.0), around(-2.0)]).weigh(ABOVE)
    assert (bad.ruling, bad.interval.estimate) == (Ruling.REFUTED, pytest.approx(-2.0, abs=1e-12))
    open_ = ReplicatesInEveryCase([around(3.0), around(0.1)]).weigh(ABOVE)
    assert (open_.ruling, open_.replicates_needed) == (Ruling.INCONCLUSIVE, 416)


def test_the_layer_reported_is_the_one_that_decided() -> None:
    """A layer with a wide interval does not decide, even if its estimate is farther out or deeper inside."""
    refuted = ReplicatesInEveryCase([around(-5.0, spread=50), around(-1.0, spread=0.1)]).weigh(ABOVE)
    assert (refuted.ruling, refuted.interval.estimate) == (Ruling.REFUTED, pytest.approx(-1.0, abs=1e-12))
    supported = ReplicatesInSomeCase([around(5.0, spread=50), around(1.0, spread=0.1)]).weigh(ABOVE)
    assert (supported.ruling, supported.interval.estimate) == (Ruling.SUPPORTED, pytest.approx(1.0, abs=1e-12))
    blocked = ReplicatesInEveryCase([around(0.1, spread=0.01), around(0.2, spread=2.0)]).weigh(ABOVE)
    assert (blocked.ruling, blocked.interval.estimate) == (Ruling.INCONCLUSIVE, pytest.approx(0.2, abs=1e-12))


def test_the_sample_size_of_layers_uses_their_scale() -> None:
    x, region = np.exp(around(-0.5)), Region(text="at least .5", low=0.5)
    layers, alone = (
        kind.weigh(region) for kind in (ReplicatesInEveryCase([x], scale=LogScale()), Replicates(x, scale=LogScale()))
    )
    assert layers.replicates_needed == alone.replicates_needed


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Finding(evidence=[1.0], data=None), "evidence is a list, but it must be evidence such as Count"),
        (lambda: Finding(evidence=Count, data=None), "evidence is the class Count, but it must be evidence"),
        (lambda: Finding(evidence={"x": 3}, data=None), "evidence['x'] is an int, but it must be evidence, such as"),
        (lambda: Finding(evidence={3: Count(1, 2)}, data=None), "evidence has the key 3, but its keys must be names"),
        (lambda: Finding(evidence=Count(1, 2), data=None, controls=Count(1, 2)), "controls is a Count, but it must be"),
        (
            lambda: Finding(evidence=Count(1, 2), data=None, controls={"x": None}),
            "controls['x'] is a NoneType, but it must",
        ),
        (
            lambda: Finding(evidence=Count(1, 2), data=None, attachments=(3,)),
            "attachments holds an int, but it must hold",
        ),
        (lambda: Finding(evidence=Count(1, 2), data=None, remark=3), "remark is an int, but it must be a str"),
        (lambda: PremiseImpossible(""), "reason is '', but it must be a text that explains why"),
        (lambda: Replicates("abc").weigh(ABOVE), "values is a str, but it must hold real numbers only"),
        (lambda: Replicates([1j, 2j]).weigh(ABOVE), "values is a list, but it must hold real numbers only"),
        (
            lambda: Replicates([1.0, 2.0], scale="log").weigh(ABOVE),
            "scale is 'log', but it must be LinearScale(), LogScale(), FisherZScale()",
        ),
        (
            lambda: ReplicatesInEveryCase(None).weigh(ABOVE),
            "samples is None, but it must hold one vector of replicates per",
        ),
    ],
)
def test_invalid_input_raises_one_sentence(make, sentence: str) -> None:
    with pytest.raises(HelmscopeError) as raised:
        make()
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_tensors_that_require_grad_are_accepted() -> None:
    x = torch.tensor([1.0, 1.1, 0.9], requires_grad=True)
    assert Replicates(x).weigh(ABOVE).ruling is Ruling.SUPPORTED


def test_layers_may_have_names() -> None:
    named = ReplicatesInEveryCase([around(3.0), around(1.0)], "starts", ("SA", "USA")).weigh(ABOVE)
    assert named.basis == "the worst of 2 cases, USA, from 32 starts each"
    with pytest.raises(HelmscopeError, match="must hold one name for each of 2 layers"):
        ReplicatesInSomeCase([around(3.0), around(1.0)], names=("SA",)).weigh(ABOVE)


def test_some_layer_reports_the_layer_deepest_in_the_region() -> None:
    assessment = ReplicatesInSomeCase([around(-3.0), around(1.0), around(-2.0)]).weigh(ABOVE)
    assert (assessment.ruling, assessment.interval.estimate) == (Ruling.SUPPORTED, pytest.approx(1.0, abs=1e-12))
    assert ReplicatesInSomeCase([around(-3.0), around(-1.0)]).weigh(ABOVE).ruling is Ruling.REFUTED


@pytest.mark.parametrize("evidence", [Replicates(around(5.0)), Count(3, 32), AbsoluteDifference(around(5.0))])
def test_without_bounds_a_quantity_is_described(evidence) -> None:
    assessment = evidence.weigh(UNBOUNDED)
    assert (assessment.ruling, assessment.replicates_needed) == (Ruling.DESCRIBED, None)
    assert assessment.interval is not None


def test_one_of_many_magnitudes_refutes_only_under_holm() -> None:
    """One of twenty cases is barely outside at 95 %, as can happen by chance: that refutes nothing."""
    x = np.linspace(-1, 1, 32)
    width = float(mean_interval(x).high)
    barely, clearly = 1 - 1.05 * width, 1 - 3 * width
    assert AbsoluteDifference(barely + x).weigh(Region(text="at least 1", low=1.0)).ruling is Ruling.REFUTED
    for one, ruling in ((barely, Ruling.INCONCLUSIVE), (clearly, Ruling.REFUTED), (2.0, Ruling.SUPPORTED)):
        cases = [one + x, *[2 + x] * 19]
        assert AbsoluteDifferenceInEveryCase(cases).weigh(Region(text="at least 1", low=1.0)).ruling is ruling


def test_values_that_never_vary_support_nothing_on_the_bound() -> None:
    """Tokens that never move have growth 0 in every prompt: not above 0, and no evidence for "at least 0" either."""
    still = np.zeros(64)
    for region in (ABOVE, Region(text="at least 0", low=0.0), Region(text="at most 0", high=0.0)):
        assert Replicates(still).weigh(region).ruling is Ruling.INCONCLUSIVE
        assert ReplicatesInEveryCase([still, still]).weigh(region).ruling is Ruling.INCONCLUSIVE
        assert ReplicatesInSomeCase([still, around(5.0)]).weigh(ABOVE).ruling is Ruling.SUPPORTED


def test_an_impossible_premise_has_no_interval() -> None:
    assessment = PremiseImpossible("only the identity is causal and bistochastic").weigh(ABOVE)
    assert (assessment.ruling, assessment.interval) == (Ruling.IMPOSSIBLE, None)


@pytest.mark.parametrize(
    ("successes", "n", "said"),
    [
        (5, 3, "successes is 5, but it must be at most n, which is 3"),
        (-1, 3, "successes is -1, but it must be a whole number >= 0"),
        (0, 0, "n is 0, but it must be a whole number >= 1"),
        (1.5, 3, "successes is 1.5, but it must be a whole number"),
    ],
)
def test_an_impossible_count_is_refused_where_it_is_made(successes: float, n: int, said: str) -> None:
    with pytest.raises(HelmscopeError, match=said):
        Count(successes, n)  # type: ignore[arg-type]
