"""The kinds of evidence that an experiment returns: measured values with the rule that compares them with a region.

Each kind applies one of the decision rules in ``stats``; the experiment itself only measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from helmscope.stats.intervals import bootstrap_t, mean_interval, proportion_interval
from helmscope.stats.replicates import numbers
from helmscope.stats.ruling import Layers, rule, rule_every, rule_some, sample_size
from helmscope.stats.scales import PLAIN, Scale
from helmscope.stats.sign_flip import sign_flip
from helmscope.types import HelmscopeError, Interval, Region, Ruling, check_integer, interval_text, pluralized
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MIN_INPUTS = 1_000  # random inputs on which an identity is checked


@dataclass(frozen=True)
class Assessment:
    """Evidence compared with a region: the interval of the statistic, the ruling, and its ``basis`` in words, such as
    "from 32 starts".

    ``replicates_needed`` is about how many replicates would decide the claim, None where that is not known. ``exact``
    says that the interval holds whatever the distribution of the replicates, as that of a count does.

    >>> Assessment(Interval(0.5, 0.4, 0.7, n=32), Ruling.SUPPORTED, "from 32 starts").replicates_needed is None
    True
    """

    interval: Interval | None
    ruling: Ruling
    basis: str
    replicates_needed: int | None = None
    exact: bool = False


@runtime_checkable
class Evidence(Protocol):
    """Measured values and the rule that compares them with a region.

    >>> isinstance(Count(1, 2), Evidence)
    True
    """

    def weigh(self, region: Region) -> Assessment:
        """Compute the interval of the statistic and rule on the region.

        >>> Replicates([1.0, 1.1, 0.9, 1.0]).weigh(Region(low=0.5, text="at least 1/2")).ruling.value
        'supported'
        """


@dataclass(frozen=True, eq=False)
class Replicates(ConciseRepr):
    """One value per replicate, with the confidence interval of their mean: Student's, or bootstrap-t if ``skewed``.

    ``of`` names what the replicates are: seeds, starts or prompts, never the tokens of one prompt. The mean is taken on
    ``scale``. A region with one bound that is tested one-sided at a level takes the ``confidence`` 1 - 2 level.

    >>> Replicates([1.1, 0.9, 1.0], of="starts").weigh(Region(text="above 0", above=0.0)).ruling.value
    'supported'
    """

    values: ArrayLike
    of: str = "seeds"
    scale: Scale = PLAIN
    skewed: bool = False
    confidence: float = 0.95

    def weigh(self, region: Region) -> Assessment:
        """Supported if the whole interval is inside the region, refuted if all of it is outside, else inconclusive; a
        region without bounds gets the ruling *described*.
        """
        interval = (bootstrap_t if self.skewed else mean_interval)(
            self.values, scale=self.scale, confidence=self.confidence
        )
        level = "" if self.confidence == 0.95 else f", {100 * self.confidence:g} % interval"
        return assess(interval, region, f"from {interval.n:,} {self.of}{level}", self.scale)


@dataclass(frozen=True)
class Count:
    """The number of successes among n replicates, with the Clopper-Pearson interval of the success rate.

    Set ``refutes`` to False if a failure may have another cause, such as a run that was too short: the ruling is then
    supported or inconclusive, never refuted. Raises HelmscopeError unless 0 <= successes <= n and n >= 1.

    >>> Count(0, 32, of="starts", refutes=False).weigh(Region(text="at least .9", low=0.9)).ruling.value
    'inconclusive'
    """

    successes: int
    n: int
    of: str = "seeds"
    refutes: bool = True

    def __post_init__(self) -> None:
        n = check_integer("n", self.n, at_least=1)
        if check_integer("successes", self.successes, at_least=0) > n:
            raise HelmscopeError(f"successes is {self.successes}, but it must be at most n, which is {n}")

    def weigh(self, region: Region) -> Assessment:
        """Rule as for ``Replicates``; with ``refutes=False``, inconclusive instead of refuted."""
        interval = proportion_interval(self.successes, self.n)
        assessment = assess(interval, region, f"from {self.successes:,} of {self.n:,} {self.of}")
        assessment = replace(assessment, exact=True)
        if assessment.ruling is Ruling.REFUTED and not self.refutes:
            return replace(assessment, ruling=Ruling.INCONCLUSIVE, replicates_needed=None)
        return assessment


@dataclass(frozen=True, eq=False)
class IdentityErrors(ConciseRepr):
    """The errors of an identity, one per random input, at 1,000 inputs or more; the statistic is the largest error.

    The interval is the range of the errors, not a confidence interval; a single input beyond the bound refutes.
    ``what`` names the quantity if it is not an error. ``weigh`` raises HelmscopeError for fewer inputs, and for errors
    that are negative or not finite.

    >>> IdentityErrors([1e-16] * 1000).weigh(Region(text="within 1e-12", high=1e-12)).ruling.value
    'true by construction'
    """

    errors: ArrayLike
    what: str = "error"

    def weigh(self, region: Region) -> Assessment:
        """True by construction if every error is within the bound, refuted otherwise."""
        errors = numbers("errors", self.errors).ravel()
        if errors.size < MIN_INPUTS:
            raise HelmscopeError(f"errors holds {errors.size} inputs, but an identity needs at least {MIN_INPUTS:,}")
        invalid = ~(np.isfinite(errors) & (errors >= 0))
        if bool(invalid.any()):
            k = int(invalid.argmax())
            raise HelmscopeError(f"errors[{k}] is {errors[k]:g}, but it must be a finite number >= 0")
        if region.high is None or region.low is not None:
            raise HelmscopeError(f"region is '{region.text}', but an identity needs one bound, high, for its error")
        largest, outside = float(errors.max()), int((errors > region.high).sum())
        ruling = Ruling.BY_CONSTRUCTION if outside == 0 else Ruling.REFUTED
        basis = f"the largest {self.what} at {errors.size:,} random inputs, {outside:,} of them beyond the bound"
        return Assessment(Interval(largest, float(errors.min()), largest, errors.size), ruling, basis, exact=True)


@dataclass(frozen=True, eq=False)
class AbsoluteDifference(ConciseRepr):
    """Signed differences, one per replicate, for a claim that two quantities differ by at least some amount; the
    statistic is |mean difference|, so that the claim can be refuted.

    Its interval is the image of Student's interval under the absolute value: from 0 if that interval contains 0.

    >>> at_least = Region(text="differs by .1 or more", low=0.1)
    >>> AbsoluteDifference([-1.0, -1.2, -0.9]).weigh(at_least).ruling.value
    'supported'
    >>> AbsoluteDifference([0.01, -0.02, 0.01]).weigh(at_least).ruling.value
    'refuted'
    """

    differences: ArrayLike
    of: str = "seeds"

    def weigh(self, region: Region) -> Assessment:
        """Rule as for ``Replicates``; the basis gives the signed mean and the p-value of exact sign flips."""
        signed, p = mean_interval(self.differences), sign_flip(self.differences).two_sided
        basis = f"the magnitude of {interval_text(signed)}, from {signed.n:,} {self.of}, sign flips p = {p:.2g}"
        return assess(_magnitude(signed), region, basis)


def _magnitude(signed: Interval) -> Interval:
    """The image of an interval under the absolute value."""
    ends = sorted((abs(signed.low), abs(signed.high)))
    low = 0.0 if signed.low <= 0 <= signed.high else ends[0]
    return Interval(abs(signed.estimate), low, ends[1], signed.n)


@dataclass(frozen=True, eq=False)
class PairedDifferences(ConciseRepr):
    """Differences of two arms on the same replicates, one per replicate, with Student's interval of their mean.

    >>> at_most = Region(text="at most -.05", high=-0.05)
    >>> PairedDifferences([-0.4, -0.5, -0.6], of="prompts").weigh(at_most).basis
    'from 3 prompts, paired, sign flips p = 0.25'
    """

    differences: ArrayLike
    of: str = "seeds"

    def weigh(self, region: Region) -> Assessment:
        """Rule as for ``Replicates``; the basis gives the p-value of sign flips, exact for 40 replicates or fewer."""
        interval, p = mean_interval(self.differences), sign_flip(self.differences).two_sided
        return assess(interval, region, f"from {interval.n:,} {self.of}, paired, sign flips p = {p:.2g}")


@dataclass(frozen=True, eq=False)
class AbsoluteDifferenceInEveryCase(ConciseRepr):
    """Signed differences in several cases, all of which must differ by at least some amount, whatever their sign; the
    case nearest to failing is reported.

    >>> at_least = Region(text="differs by .1 or more", low=0.1)
    >>> AbsoluteDifferenceInEveryCase([[-1.0, -1.2, -0.9], [0.01, -0.02, 0.01]]).weigh(at_least).ruling.value
    'refuted'
    """

    differences: Sequence[ArrayLike]
    of: str = "seeds"
    names: Sequence[str] = ()

    def weigh(self, region: Region) -> Assessment:
        """Supported if every 95 % interval is inside the region, refuted if one is outside under Holm's correction for
        the number of cases, otherwise inconclusive.
        """
        if not len(self.differences):
            raise HelmscopeError("differences is empty, but it must hold one vector of differences per case")
        assessed = [AbsoluteDifference(values, self.of).weigh(region) for values in self.differences]
        # Holm's procedure rejects something exactly if the smallest p-value is at most 0.05 over the number of cases
        confidence = 1 - 0.05 / len(assessed)
        for k, values in enumerate(self.differences):
            corrected = _magnitude(mean_interval(values, confidence=confidence))
            if assessed[k].ruling is Ruling.REFUTED and rule(corrected, region) is not Ruling.REFUTED:
                assessed[k] = replace(assessed[k], ruling=Ruling.INCONCLUSIVE)
        rulings = [each.ruling for each in assessed]
        order = (Ruling.REFUTED, Ruling.INCONCLUSIVE, Ruling.DESCRIBED, Ruling.SUPPORTED)
        decisive = next(ruling for ruling in order if ruling in rulings)
        worst = min((k for k in range(len(rulings)) if rulings[k] is decisive), key=lambda k: _estimate(assessed[k]))
        names = self.names or [f"case {k}" for k in range(len(assessed))]
        basis = f"the worst of {pluralized(len(assessed), 'case')}, {names[worst]}, {assessed[worst].basis}"
        return replace(assessed[worst], basis=basis)


def _estimate(assessment: Assessment) -> float:
    return 0.0 if assessment.interval is None else assessment.interval.estimate


@dataclass(frozen=True, eq=False)
class ReplicatesInEveryCase(ConciseRepr):
    """One vector of replicates per case (a layer, a beta), for a claim that must hold in every case; reports the case
    nearest to failing. ``names`` labels the cases.

    >>> above = Region(text="above 0", above=0.0)
    >>> ReplicatesInEveryCase([[1.0, 1.1, 0.9], [2.0, 2.1, 1.9]]).weigh(above).interval.estimate
    1.0
    """

    samples: Sequence[ArrayLike]
    of: str = "seeds"
    names: Sequence[str] = ()
    scale: Scale = PLAIN

    def weigh(self, region: Region) -> Assessment:
        """``rule_every``: supported if every interval is inside, refuted if a Holm-adjusted interval is outside."""
        return _assess_layers(rule_every(self.samples, region, scale=self.scale), region, self, worst=True)


@dataclass(frozen=True, eq=False)
class ReplicatesInSomeCase(ConciseRepr):
    """One vector of replicates per case, for a claim that must hold in at least one case; reports the case that
    satisfies it best.

    >>> above = Region(text="above 0", above=0.0)
    >>> ReplicatesInSomeCase([[-1.0, -1.1, -0.9], [2.0, 2.1, 1.9]]).weigh(above).ruling.value
    'supported'
    """

    samples: Sequence[ArrayLike]
    of: str = "seeds"
    names: Sequence[str] = ()
    scale: Scale = PLAIN

    def weigh(self, region: Region) -> Assessment:
        """``rule_some``: supported if a Holm-adjusted interval is inside, refuted if every interval is outside."""
        return _assess_layers(rule_some(self.samples, region, scale=self.scale), region, self, worst=False)


@dataclass(frozen=True)
class PremiseImpossible(ConciseRepr):
    """The statement that a claim's premise cannot hold for this subject, and the reason.

    >>> PremiseImpossible("only the identity is causal and bistochastic").weigh(Region(text="below .1", high=0.1)).basis
    'only the identity is causal and bistochastic'
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise HelmscopeError(f"reason is {self.reason!r}, but it must be a text that explains why")

    def weigh(self, region: Region) -> Assessment:
        """Rule "premise impossible here", whatever the region."""
        return Assessment(None, Ruling.IMPOSSIBLE, self.reason)


@dataclass(frozen=True)
class Inconclusive(ConciseRepr):
    """The statement that a subject has too little for a ruling, such as too few prompts, and what is missing.

    >>> Inconclusive("the claim needs 32 different texts").weigh(Region(text="below .1", high=0.1)).ruling.value
    'inconclusive'
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise HelmscopeError(f"reason is {self.reason!r}, but it must be a text that explains why")

    def weigh(self, region: Region) -> Assessment:
        """Rule "inconclusive", whatever the region."""
        return Assessment(None, Ruling.INCONCLUSIVE, self.reason)


def assess(interval: Interval, region: Region, basis: str, scale: Scale = PLAIN) -> Assessment:
    """Compare an interval with a region; without bounds there is nothing to rule on.

    >>> assess(Interval(0.5, 0.4, 0.7, n=32), Region(text="above 0", above=0.0), "from 32 starts").ruling.value
    'supported'
    """
    if not region.bounded:
        return Assessment(interval, Ruling.DESCRIBED, basis)
    return Assessment(interval, rule(interval, region), basis, sample_size(interval, region, scale=scale))


def _assess_layers(
    layers: Layers, region: Region, evidence: ReplicatesInEveryCase | ReplicatesInSomeCase, *, worst: bool
) -> Assessment:
    """Report the layer that decided the ruling or, if it is inconclusive, an inconclusive layer."""
    count = len(layers.intervals)
    names = evidence.names or [f"layer {k}" for k in range(count)]
    if isinstance(names, str) or len(names) != count:
        raise HelmscopeError(f"names is {names!r}, but it must hold one name for each of {pluralized(count, 'layer')}")
    rulings = [rule(interval, region) for interval in layers.intervals]
    decisive = [k for k in range(count) if rulings[k] is layers.ruling]
    candidates = [k for k in layers.named if k in decisive] or decisive or list(range(count))
    points = np.array([*region.ends, *(interval.estimate for interval in layers.intervals)])
    low, high, *estimates = evidence.scale.forward(points).tolist()
    depth_inside = {k: min(estimates[k] - low, high - estimates[k]) for k in candidates}
    reported = (min if worst else max)(candidates, key=lambda k: depth_inside[k])
    interval = layers.intervals[reported]
    undecided = [k for k in range(count) if rulings[k] is Ruling.INCONCLUSIVE]
    sizes = [sample_size(layers.intervals[k], region, scale=evidence.scale) for k in undecided]
    known_sizes = [size for size in sizes if size is not None]
    needed = max(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else None
    rank = f"the {'worst' if worst else 'best'} of {pluralized(count, 'case')}, {names[reported]}"
    basis = f"{rank}, from {interval.n:,} {evidence.of} each"
    return Assessment(interval, layers.ruling, basis, needed)
