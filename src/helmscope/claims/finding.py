"""What an experiment hands to the judge: the evidence, the null and what the source prints, and numbers to draw.

Each kind of evidence knows its own rule, one of those in ``stats``; an experiment measures and does not rule.
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

LEAST_INPUTS = 1_000  # an identity is checked on so many random inputs


@dataclass(frozen=True)
class Weighed:
    """Evidence against a region: the interval, the ruling, how that came about, and for an inconclusive one the number
    of replicates that would decide, None where no number is known to.

    >>> Weighed(Interval(0.5, 0.4, 0.7, n=32), Ruling.SUPPORTED, "from 32 starts").enough is None
    True
    """

    interval: Interval | None
    ruling: Ruling
    how: str
    enough: int | None = None


@runtime_checkable
class Evidence(Protocol):
    """Measured numbers, and the rule that weighs them against a region."""

    def weigh(self, region: Region) -> Weighed:
        """The interval and what it says of the region."""


@dataclass(frozen=True, eq=False)
class Replicates:
    """One number a replicate (``of``: seeds, starts, prompts; never tokens of one prompt), averaged on ``scale``:
    Student's interval, or bootstrap-t where ``skewed``.

    >>> Replicates([1.1, 0.9, 1.0], of="starts").weigh(Region(text="above 0", low=0.0)).ruling.value
    'supported'
    """

    values: ArrayLike
    of: str = "seeds"
    scale: Scale = PLAIN
    skewed: bool = False

    def weigh(self, region: Region) -> Weighed:
        """Supported where the whole interval lies in the region, refuted where the whole lies outside."""
        interval = (bootstrap_t if self.skewed else mean_interval)(self.values, scale=self.scale)
        enough = sample_size(interval, region, scale=self.scale)
        return Weighed(interval, rule(interval, region), f"from {interval.n:,} {self.of}", enough)


@dataclass(frozen=True)
class Count:
    """Successes among n replicates, with Clopper and Pearson's interval. Where failures have an innocent reason, as a
    run that was too short has, ``refutes`` is False and the claim can be supported or stay open only.

    >>> Count(0, 32, of="starts", refutes=False).weigh(Region(text="at least .9", low=0.9)).ruling.value
    'inconclusive'
    """

    successes: int
    n: int
    of: str = "seeds"
    refutes: bool = True

    def weigh(self, region: Region) -> Weighed:
        """As for replicates; a refutation that does not count is inconclusive."""
        interval = proportion_interval(self.successes, self.n)
        ruling, enough = rule(interval, region), sample_size(interval, region)
        if ruling is Ruling.REFUTED and not self.refutes:
            ruling, enough = Ruling.INCONCLUSIVE, None
        return Weighed(interval, ruling, f"from {self.successes:,} of {self.n:,} {self.of}", enough)


@dataclass(frozen=True, eq=False)
class Identity:
    """The error of an identity at 1,000 random inputs or more, one number an input; the statistic is the largest.

    The interval is the range of the errors, not a confidence interval, and one input beyond the bound refutes. ``what``
    names the number where it is no error. Fewer inputs, and errors that are not finite or below 0, are refused.

    >>> Identity([1e-16] * 1000).weigh(Region(text="within 1e-12", high=1e-12)).ruling.value
    'true by construction'
    """

    errors: ArrayLike
    what: str = "error"

    def weigh(self, region: Region) -> Weighed:
        """True by construction where no error leaves the region, refuted by one that does."""
        errors = numbers("errors", self.errors).ravel()
        if errors.size < LEAST_INPUTS:
            raise HelmscopeError(f"errors holds {errors.size} inputs, but an identity needs at least {LEAST_INPUTS:,}")
        bad = ~(np.isfinite(errors) & (errors >= 0))
        if bool(bad.any()):
            at = int(bad.argmax())
            raise HelmscopeError(f"errors[{at}] is {errors[at]:g}, but it must be a finite number >= 0")
        if region.high is None or region.low is not None:
            raise HelmscopeError(f"region is '{region.text}', but an identity needs one bound, high, for its error")
        largest, outside = float(errors.max()), int((errors > region.high).sum())
        held = Ruling.BY_CONSTRUCTION if outside == 0 else Ruling.REFUTED
        how = f"the largest {self.what} at {errors.size:,} random inputs, {outside:,} of them beyond the bound"
        return Weighed(Interval(largest, float(errors.min()), largest, errors.size), held, how)


@dataclass(frozen=True, eq=False)
class Paired:
    """Paired differences, one a replicate, for a claim that something differs: the region has no bounds.

    >>> Paired([1.0, 1.2, 0.9, 1.1, 1.3, 0.8, 1.0]).weigh(Region(text="not 0")).ruling.value
    'supported'
    """

    differences: ArrayLike
    of: str = "seeds"

    def weigh(self, region: Region) -> Weighed:
        """Supported where Student's interval leaves out 0 and exact sign flips agree at 5 %, else inconclusive."""
        if region.bounded:
            raise HelmscopeError(f"region is '{region.text}' with bounds, but paired differences are held against 0")
        interval, p = mean_interval(self.differences), sign_flip(self.differences).two_sided
        differs = p <= 0.05 and not interval.low <= 0 <= interval.high
        side = Region(text="", low=0.0) if interval.estimate > 0 else Region(text="", high=0.0)
        enough = None if interval.estimate == 0 else sample_size(interval, side)
        how = f"from {interval.n:,} pairs of {self.of}, sign flips p = {p:.2g}"
        return Weighed(interval, Ruling.SUPPORTED if differs else Ruling.INCONCLUSIVE, how, enough)


@dataclass(frozen=True, eq=False)
class EveryLayer:
    """One vector of replicates a layer, for a claim about every layer; shown is the layer nearest to failing. Layers
    may be any cases that must all hold, and have ``names``.

    >>> EveryLayer([[1.0, 1.1, 0.9], [2.0, 2.1, 1.9]]).weigh(Region(text="above 0", low=0.0)).interval.estimate
    1.0
    """

    samples: Sequence[ArrayLike]
    of: str = "seeds"
    names: Sequence[str] = ()
    scale: Scale = PLAIN

    def weigh(self, region: Region) -> Weighed:
        """``rule_every``: each interval in the region, or one Holm-adjusted interval outside."""
        return _over_layers(rule_every(self.samples, region, scale=self.scale), region, self, worst=True)


@dataclass(frozen=True, eq=False)
class SomeLayer:
    """One vector of replicates a layer, for a claim about some layer; shown is the layer deepest in the region.

    >>> SomeLayer([[-1.0, -1.1, -0.9], [2.0, 2.1, 1.9]]).weigh(Region(text="above 0", low=0.0)).ruling.value
    'supported'
    """

    samples: Sequence[ArrayLike]
    of: str = "seeds"
    names: Sequence[str] = ()
    scale: Scale = PLAIN

    def weigh(self, region: Region) -> Weighed:
        """``rule_some``: one Holm-adjusted interval in the region, or each interval outside."""
        return _over_layers(rule_some(self.samples, region, scale=self.scale), region, self, worst=False)


@dataclass(frozen=True, eq=False)
class Described:
    """Replicates of a quantity that no region judges: the interval is shown, and nothing is ruled.

    >>> Described([3.0, 4.0, 5.0]).weigh(Region(text="descriptive")).ruling.value
    'inconclusive'
    """

    values: ArrayLike
    of: str = "seeds"
    scale: Scale = PLAIN

    def weigh(self, region: Region) -> Weighed:
        """Inconclusive, whatever the numbers; a region with bounds is refused, for it asks for a ruling."""
        if region.bounded:
            raise HelmscopeError(f"region is '{region.text}' with bounds, but a description is not ruled on")
        interval = mean_interval(self.values, scale=self.scale)
        return Weighed(interval, Ruling.INCONCLUSIVE, f"from {interval.n:,} {self.of}, described and not ruled on")


@dataclass(frozen=True)
class Impossible:
    """The claim's premise cannot hold here; ``reason`` says why.

    >>> Impossible("only the identity is causal and bistochastic").weigh(Region(text="below .1", high=0.1)).how
    'only the identity is causal and bistochastic'
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise HelmscopeError(f"reason is {self.reason!r}, but it must be a text that says why")

    def weigh(self, region: Region) -> Weighed:
        """Premise impossible here, whatever the region."""
        return Weighed(None, Ruling.IMPOSSIBLE, self.reason)


@dataclass(frozen=True, eq=False)
class Check:
    """Evidence that must come out as ``expected`` against ``region``, the entry's own where None: a case whose answer
    is known, or another part of the claim.

    >>> Check("V = -I", Count(0, 32)).expected.value
    'refuted'
    """

    what: str
    evidence: Evidence
    expected: Ruling = Ruling.REFUTED
    region: Region | None = None

    def __post_init__(self) -> None:
        _of_type(self, what=str, evidence=Evidence, expected=Ruling, region=Region | None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Finding:
    """What one experiment found: the evidence for its claim, the null, what the source prints where that is wrong and
    can be computed, and ``also`` further parts of the claim. ``remark`` is a sentence of further measured numbers.
    ``data`` is a Measurement to draw, such as ``claims.curves.curve`` gives. ``where`` says in which coordinates, and
    what was simulated or recorded. ``exhibits`` are shown word for word. What is of another type is refused.

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
        """The finding of an experiment whose subject cannot meet the claim's premise; ``reason`` says why.

        >>> Finding.impossible("only the identity is causal and bistochastic").evidence.reason
        'only the identity is causal and bistochastic'
        """
        import xarray as xr

        evidence = Impossible(reason)
        null = Check("the premise", evidence, Ruling.IMPOSSIBLE)
        return cls(evidence=evidence, null=null, data=xr.Dataset(attrs={"n": 0}), where=where)

    def __post_init__(self) -> None:
        _of_type(self, evidence=Evidence, null=Check, printed=Check | None, also=tuple, remark=str, where=str)
        _of_type(self, exhibits=tuple)
        _all_of("also", self.also, Check)
        _all_of("exhibits", self.exhibits, Exhibit)


def _all_of(name: str, values: tuple[object, ...], kind: type) -> None:
    """Refuse what is no ``kind``."""
    for value in values:
        if not isinstance(value, kind):
            raise HelmscopeError(f"{name} holds a {type(value).__name__}, but it must hold {kind.__name__}s alone")


def _of_type(holder: object, **allowed: Any) -> None:
    """Refuse a field of another type by its name."""
    for name, kind in allowed.items():
        value = getattr(holder, name)
        if isinstance(value, type) or not isinstance(value, kind):
            shown = getattr(kind, "__name__", re.sub(r"\w+\.", "", str(kind)))  # a union, without its modules
            given = value.__name__ if isinstance(value, type) else type(value).__name__
            article = "an" if shown[0] in "AEIOU" else "a"
            raise HelmscopeError(f"{name} is a {given}, but it must be {article} {shown}")


def _over_layers(layers: Layers, region: Region, evidence: EveryLayer | SomeLayer, *, worst: bool) -> Weighed:
    """What is shown is the layer that decided, or for an inconclusive ruling one that did not let it be decided."""
    count = len(layers.intervals)
    names = evidence.names or [f"layer {k}" for k in range(count)]
    if isinstance(names, str) or len(names) != count:
        raise HelmscopeError(f"names is {names!r}, but it must hold one name for each of {counted(count, 'layer')}")
    single = [rule(each, region) for each in layers.intervals]
    decisive = [k for k in range(count) if single[k] is layers.ruling]
    candidates = [k for k in layers.named if k in decisive] or decisive or list(range(count))
    points = np.array([*region.ends, *(each.estimate for each in layers.intervals)])
    low, high, *estimates = evidence.scale.forward(points).tolist()
    inside = {k: min(estimates[k] - low, high - estimates[k]) for k in candidates}
    shown = (min if worst else max)(candidates, key=lambda k: inside[k])
    interval = layers.intervals[shown]
    undecided = [k for k in range(count) if single[k] is Ruling.INCONCLUSIVE]
    sizes = [sample_size(layers.intervals[k], region, scale=evidence.scale) for k in undecided]
    known = [size for size in sizes if size is not None]
    enough = max(known) if known and len(known) == len(sizes) else None
    which = f"the {'worst' if worst else 'best'} of {counted(count, 'case')}, {names[shown]}"
    how = f"{which}, from {interval.n:,} {evidence.of} each"
    return Weighed(interval, layers.ruling, how, enough)
