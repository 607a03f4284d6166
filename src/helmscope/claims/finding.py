"""The result of an experiment: the evidence for its claim, the controls, and the data to plot.

Each kind of evidence applies one of the decision rules in ``stats``; the experiment itself only measures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from helmscope.stats.intervals import bootstrap_t, mean_interval, proportion_interval
from helmscope.stats.replicates import numbers
from helmscope.stats.ruling import Layers, rule, rule_every, rule_some, sample_size
from helmscope.stats.scales import PLAIN, Scale
from helmscope.stats.sign_flip import sign_flip
from helmscope.types import Exhibit, HelmscopeError, Interval, Region, Ruling, counted

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import ArrayLike

MIN_INPUTS = 1_000  # random inputs on which an identity is checked


@dataclass(frozen=True)
class Assessment:
    """Evidence compared with a region: the interval of the statistic, the ruling, and its ``basis`` in words, such as
    "from 32 starts".

    ``replicates_needed`` is about how many replicates would decide the claim, None where that is not known.

    >>> Assessment(Interval(0.5, 0.4, 0.7, n=32), Ruling.SUPPORTED, "from 32 starts").replicates_needed is None
    True
    """

    interval: Interval | None
    ruling: Ruling
    basis: str
    replicates_needed: int | None = None


@runtime_checkable
class Evidence(Protocol):
    """Measured values and the rule that compares them with a region."""

    def weigh(self, region: Region) -> Assessment:
        """Compute the interval of the statistic and rule on the region."""


@dataclass(frozen=True, eq=False)
class Replicates:
    """One value per replicate, with the confidence interval of their mean: Student's, or bootstrap-t if ``skewed``.

    ``of`` names what the replicates are: seeds, starts or prompts, never the tokens of one prompt. The mean is taken on
    ``scale``.

    >>> Replicates([1.1, 0.9, 1.0], of="starts").weigh(Region(text="above 0", low=0.0)).ruling.value
    'supported'
    """

    values: ArrayLike
    of: str = "seeds"
    scale: Scale = PLAIN
    skewed: bool = False

    def weigh(self, region: Region) -> Assessment:
        """Supported if the whole interval is inside the region, refuted if all of it is outside, else inconclusive."""
        interval = (bootstrap_t if self.skewed else mean_interval)(self.values, scale=self.scale)
        needed = sample_size(interval, region, scale=self.scale)
        return Assessment(interval, rule(interval, region), f"from {interval.n:,} {self.of}", needed)


@dataclass(frozen=True)
class Count:
    """The number of successes among n replicates, with the Clopper-Pearson interval of the success rate.

    Set ``refutes`` to False if a failure may have another cause, such as a run that was too short: the ruling is then
    supported or inconclusive, never refuted.

    >>> Count(0, 32, of="starts", refutes=False).weigh(Region(text="at least .9", low=0.9)).ruling.value
    'inconclusive'
    """

    successes: int
    n: int
    of: str = "seeds"
    refutes: bool = True

    def weigh(self, region: Region) -> Assessment:
        """Rule as for ``Replicates``; with ``refutes=False``, inconclusive instead of refuted."""
        interval = proportion_interval(self.successes, self.n)
        ruling, needed = rule(interval, region), sample_size(interval, region)
        if ruling is Ruling.REFUTED and not self.refutes:
            ruling, needed = Ruling.INCONCLUSIVE, None
        return Assessment(interval, ruling, f"from {self.successes:,} of {self.n:,} {self.of}", needed)


@dataclass(frozen=True, eq=False)
class Identity:
    """The errors of an identity, one per random input, at 1,000 inputs or more; the statistic is the largest error.

    The interval is the range of the errors, not a confidence interval; a single input beyond the bound refutes.
    ``what`` names the quantity if it is not an error. ``weigh`` raises HelmscopeError for fewer inputs, and for errors
    that are negative or not finite.

    >>> Identity([1e-16] * 1000).weigh(Region(text="within 1e-12", high=1e-12)).ruling.value
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
        return Assessment(Interval(largest, float(errors.min()), largest, errors.size), ruling, basis)


@dataclass(frozen=True, eq=False)
class Paired:
    """Paired differences, one per replicate, for a claim that two quantities differ; the region has no bounds.

    >>> Paired([1.0, 1.2, 0.9, 1.1, 1.3, 0.8, 1.0]).weigh(Region(text="not 0")).ruling.value
    'supported'
    """

    differences: ArrayLike
    of: str = "seeds"

    def weigh(self, region: Region) -> Assessment:
        """Supported if Student's interval excludes 0 and the sign-flip test has p <= 0.05, else inconclusive."""
        if region.bounded:
            raise HelmscopeError(f"region is '{region.text}' with bounds, but paired differences are compared with 0")
        interval, p = mean_interval(self.differences), sign_flip(self.differences).two_sided
        differs = p <= 0.05 and not interval.low <= 0 <= interval.high
        side = Region(text="", low=0.0) if interval.estimate > 0 else Region(text="", high=0.0)
        needed = None if interval.estimate == 0 else sample_size(interval, side)
        basis = f"from {interval.n:,} pairs of {self.of}, sign flips p = {p:.2g}"
        return Assessment(interval, Ruling.SUPPORTED if differs else Ruling.INCONCLUSIVE, basis, needed)


@dataclass(frozen=True, eq=False)
class EveryLayer:
    """One vector of replicates per layer, for a claim about every layer; reports the layer nearest to failing.

    The layers may be any set of cases that must all hold; ``names`` labels them.

    >>> EveryLayer([[1.0, 1.1, 0.9], [2.0, 2.1, 1.9]]).weigh(Region(text="above 0", low=0.0)).interval.estimate
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
class SomeLayer:
    """One vector of replicates per layer, for a claim about at least one layer; reports the one deepest in the region.

    >>> SomeLayer([[-1.0, -1.1, -0.9], [2.0, 2.1, 1.9]]).weigh(Region(text="above 0", low=0.0)).ruling.value
    'supported'
    """

    samples: Sequence[ArrayLike]
    of: str = "seeds"
    names: Sequence[str] = ()
    scale: Scale = PLAIN

    def weigh(self, region: Region) -> Assessment:
        """``rule_some``: supported if a Holm-adjusted interval is inside, refuted if every interval is outside."""
        return _assess_layers(rule_some(self.samples, region, scale=self.scale), region, self, worst=False)


@dataclass(frozen=True, eq=False)
class Described:
    """Replicates of a quantity that is reported with its interval but not ruled on, since its region has no bounds.

    >>> Described([3.0, 4.0, 5.0]).weigh(Region(text="descriptive")).ruling.value
    'inconclusive'
    """

    values: ArrayLike
    of: str = "seeds"
    scale: Scale = PLAIN

    def weigh(self, region: Region) -> Assessment:
        """Inconclusive, whatever the values; a region with bounds raises HelmscopeError, since it requires a ruling."""
        if region.bounded:
            raise HelmscopeError(f"region is '{region.text}' with bounds, but a description is not ruled on")
        interval = mean_interval(self.values, scale=self.scale)
        return Assessment(interval, Ruling.INCONCLUSIVE, f"from {interval.n:,} {self.of}, described and not ruled on")


@dataclass(frozen=True)
class Impossible:
    """The statement that a claim's premise cannot hold for this subject, and the reason.

    >>> Impossible("only the identity is causal and bistochastic").weigh(Region(text="below .1", high=0.1)).basis
    'only the identity is causal and bistochastic'
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise HelmscopeError(f"reason is {self.reason!r}, but it must be a text that explains why")

    def weigh(self, region: Region) -> Assessment:
        """Rule "premise impossible here", whatever the region."""
        return Assessment(None, Ruling.IMPOSSIBLE, self.reason)


@dataclass(frozen=True, eq=False)
class Check:
    """Evidence with an expected ruling: a control whose answer is known, or a further part of the claim.

    ``region`` defaults to that of the catalogue entry. A field of the wrong type raises HelmscopeError.

    >>> Check("V = -I", Count(0, 32)).expected.value
    'refuted'
    """

    what: str
    evidence: Evidence
    expected: Ruling = Ruling.REFUTED
    region: Region | None = None

    def __post_init__(self) -> None:
        _check_field_types(self, what=str, evidence=Evidence, expected=Ruling, region=Region | None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Finding:
    """The result of one experiment: the evidence for its claim, the null, and the data to plot.

    ``data`` is a Measurement, such as ``claims.curves.curve`` returns. ``printed`` tests what the source prints where
    that is wrong and can be computed, ``also`` further parts of the claim. ``remark`` is a sentence with further
    measured values; ``where`` describes what was simulated or recorded, and in which coordinates. ``exhibits`` are
    reported verbatim. A field of the wrong type raises HelmscopeError.

    >>> import xarray as xr
    >>> Finding(evidence=Count(32, 32), null=Check("V = -I", Count(0, 32)), data=xr.Dataset(attrs={"n": 32})).also
    ()
    """

    evidence: Evidence
    null: Check
    data: xr.Dataset
    printed: Check | None = None
    also: tuple[Check, ...] = ()
    remark: str = ""
    where: str = ""
    exhibits: tuple[Exhibit, ...] = ()

    @classmethod
    def impossible(cls, reason: str, *, where: str = "") -> Finding:
        """The finding that the claim's premise cannot hold for this subject, for the given ``reason``.

        >>> Finding.impossible("only the identity is causal and bistochastic").evidence.reason
        'only the identity is causal and bistochastic'
        """
        import xarray as xr

        evidence = Impossible(reason)
        null = Check("the premise", evidence, Ruling.IMPOSSIBLE)
        return cls(evidence=evidence, null=null, data=xr.Dataset(attrs={"n": 0}), where=where)

    def __post_init__(self) -> None:
        _check_field_types(self, evidence=Evidence, null=Check, printed=Check | None, also=tuple, remark=str)
        _check_field_types(self, where=str, exhibits=tuple)
        _check_element_types("also", self.also, Check)
        _check_element_types("exhibits", self.exhibits, Exhibit)


def _check_element_types(name: str, values: tuple[object, ...], kind: type) -> None:
    """Raise HelmscopeError unless every element is a ``kind``."""
    for value in values:
        if not isinstance(value, kind):
            raise HelmscopeError(f"{name} holds a {type(value).__name__}, but it must hold only {kind.__name__}s")


def _check_field_types(instance: object, **allowed: Any) -> None:
    """Raise HelmscopeError unless each named field has the allowed type."""
    for name, kind in allowed.items():
        value = getattr(instance, name)
        if isinstance(value, type) or not isinstance(value, kind):
            expected = getattr(kind, "__name__", re.sub(r"\w+\.", "", str(kind)))  # a union, without its modules
            actual = value.__name__ if isinstance(value, type) else type(value).__name__
            article = "an" if expected[0] in "AEIOU" else "a"
            raise HelmscopeError(f"{name} is a {actual}, but it must be {article} {expected}")


def _assess_layers(layers: Layers, region: Region, evidence: EveryLayer | SomeLayer, *, worst: bool) -> Assessment:
    """Report the layer that decided the ruling or, if it is inconclusive, an inconclusive layer."""
    count = len(layers.intervals)
    names = evidence.names or [f"layer {k}" for k in range(count)]
    if isinstance(names, str) or len(names) != count:
        raise HelmscopeError(f"names is {names!r}, but it must hold one name for each of {counted(count, 'layer')}")
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
    rank = f"the {'worst' if worst else 'best'} of {counted(count, 'case')}, {names[reported]}"
    basis = f"{rank}, from {interval.n:,} {evidence.of} each"
    return Assessment(interval, layers.ruling, basis, needed)
