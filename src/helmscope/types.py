"""The types that every room of the house shares, and the errors. Imports nothing of ours and no torch.

``Trajectory`` is where theory and model meet: a simulation and a recorded transformer both give one, so every
observable runs on both. ``System`` is a trajectory with the mechanism that made it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor


class HelmscopeError(ValueError):
    """Every refusal of bad input: one sentence that names the argument, the value and what is allowed.

    >>> issubclass(HelmscopeError, ValueError)
    True
    """


class MissingExtra(HelmscopeError):
    """An optional dependency is not installed; the sentence holds the pip line that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed, and this needs it: pip install 'helmscope[{extra}]'")


def real_number(name: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf) -> float:
    """``value`` as a finite float within its bound, or a ``HelmscopeError`` that names the argument.

    >>> real_number("beta", 4)
    4.0
    """
    bound = f" >= {at_least:g}" if at_least > -math.inf else f" > {above:g}" if above > -math.inf else ""
    try:
        number = math.nan if _is_no_number(value) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < at_least or number <= above:
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a finite number{bound}")
    return number


def whole_number(name: str, value: object, *, at_least: int, below: int = 2**63) -> int:
    """``value`` as an int of at least ``at_least`` and below a power of 2, or a ``HelmscopeError`` that names the
    argument; 2^63 is where the sizes of tensors end.

    >>> whole_number("n", 32, at_least=1)
    32
    """
    try:
        number = int(value)  # type: ignore[call-overload]
        exact = not _is_no_number(value) and bool(number == value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number, exact = 0, False
    if not exact or number < at_least:
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a whole number >= {at_least}")
    if number >= below:
        power = below.bit_length() - 1
        raise HelmscopeError(f"{name} is {shown(value)}, but it must be a whole number below 2^{power} = {below}")
    return int(number)


def seed_number(value: object) -> int:
    """``value`` as a seed, 0 .. 2^32 - 1, or a ``HelmscopeError``.

    >>> seed_number(7)
    7
    """
    return whole_number("seed", value, at_least=0, below=2**32)


def fits_memory(given: str, numbers: int) -> None:
    """Refuse to make so many numbers of 8 bytes if this machine cannot hold them; ``given`` begins the sentence.

    >>> fits_memory("n is 10^9 and dim is 10^9", 10**18)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: n is 10^9 and dim is 10^9, but that makes 8e+09 GB, and this machine has ... GB
    """
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 8 * numbers > most:
        needed, there = (f"{size / 1e9:.3g} GB" for size in (8 * numbers, most))
        raise HelmscopeError(f"{given}, but that makes {needed}, and this machine has {there}")


def _is_no_number(value: object) -> bool:
    """True and False, of Python, NumPy or torch, and text: float() takes them, a reader would not."""
    return isinstance(value, bool | str | bytes) or "bool" in str(getattr(value, "dtype", ""))


def increasing_times(times: object) -> list[float]:
    """``times`` as floats: at least one, finite, not negative, strictly increasing; else a ``HelmscopeError``.

    >>> increasing_times([1, 5, 10])
    [1.0, 5.0, 10.0]
    """
    values = times.tolist() if hasattr(times, "tolist") else times
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise HelmscopeError(
            f"times is {shown(times)}, but it must be a sequence of at least one time, such as [1, 5, 10]"
        )
    checked = [real_number(f"times[{i}]", t, at_least=0) for i, t in enumerate(values)]
    for i in range(1, len(checked)):
        if checked[i] <= checked[i - 1]:
            raise HelmscopeError(f"times[{i}] is {checked[i]:g} after {checked[i - 1]:g}, but times must increase")
    return checked


def known_name(what: str, name: str, allowed: Iterable[str]) -> str:
    """``name`` if it is allowed, or a ``HelmscopeError`` that offers the nearest one.

    >>> known_name("field", "sa", ["sa", "usa"])
    'sa'
    """
    names = sorted(allowed)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else "there is no such name."
    raise HelmscopeError(f"unknown {what} '{name}': {hint} Allowed: {', '.join(names)}")


def shown(value: object) -> str:
    """A value as it stands in a sentence: on one line, at most 80 characters.

    >>> shown([1.0] * 100)[-9:], shown(10**5000)
    ('1.0, 1...', 'a whole number of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 14_000:  # Python writes out no int of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


class Status(Enum):
    """How the integration of one system ended; the value is the message, with its remedy.

    >>> Status.FINISHED.value.format(time=10.0)
    'finished at t=10'
    """

    FINISHED = "finished at t={time:.6g}"
    AT_REST = "the state has stopped moving at t={time:.6g}, and is held to the last time"
    STEP_LIMIT = (
        "step limit reached at t={time:.6g}: raise max_steps, loosen tol, lower beta, pass merge= to integrate, or "
        "take a stepper of fixed size"
    )
    STEP_TOO_SMALL = "step size fell below rounding at t={time:.6g}: use float64, loosen tol, lower beta or pass merge="
    NO_RADIUS = (
        "radius of a residual stream fell to 0 at t={time:.6g}, where its direction is lost: start with a larger "
        "radius, or take layers, stepper=Layer()"
    )
    NOT_FINITE = "velocity is not finite at t={time:.6g}: lower beta or use float64"

    @property
    def ok(self) -> bool:
        """Whether the states at all asked times are known."""
        return self in (Status.FINISHED, Status.AT_REST)


@dataclass(frozen=True)
class Outcome:
    """How every system of a batch ended: one status and one last time a system.

    >>> str(Outcome((Status.FINISHED, Status.STEP_LIMIT), (10.0, 3.2)))
    'system 1 of 2: step limit reached at t=3.2: raise max_steps, loosen tol, lower beta, ...'
    """

    statuses: tuple[Status, ...]
    times: tuple[float, ...]

    @property
    def ok(self) -> bool:
        """Whether the states of every system at all asked times are known."""
        return all(status.ok for status in self.statuses)

    def __str__(self) -> str:
        failed = [i for i, status in enumerate(self.statuses) if not status.ok]
        shown = failed[0] if failed else 0
        text = self.statuses[shown].value.format(time=self.times[shown]) if self.statuses else "no systems"
        if not failed:
            return text
        others = len(failed) - 1
        more = f" (and {others} more system{'s' if others > 1 else ''})" if others else ""
        return f"system {shown} of {len(self.statuses)}: {text}{more}"


@dataclass(frozen=True, eq=False)
class Trajectory:
    """States on the sphere over time: (time, batch, token, dim), each state a unit vector.

    For a simulation, time is the flow's time and the batch holds independent systems. For a model, time is depth in
    half-steps (after attention, after MLP), the batch holds prompts, and ``radius`` is the norm that was divided out.
    ``mask`` is True at real tokens and False at padding; ``tokens`` holds a label for each token where there is one.

    >>> import torch
    >>> Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3)).states.shape
    torch.Size([1, 2, 3, 3])
    """

    times: Float[Tensor, " time"]
    states: Float[Tensor, "time batch token dim"]
    mask: Bool[Tensor, "batch token"] | None = None
    radius: Float[Tensor, "time batch token"] | None = None
    tokens: Sequence[Sequence[str]] | None = None
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        for name in ("times", "states"):
            if not hasattr(getattr(self, name), "shape"):
                raise HelmscopeError(f"{name} is {shown(getattr(self, name))}, but it must be a tensor")
        shape = tuple(self.states.shape)
        if len(shape) != 4:
            raise HelmscopeError(f"states has shape {shape}, but it must be (time, batch, token, dim)")
        expected = {"times": shape[:1], "mask": shape[1:3], "radius": shape[:3]}
        for name, wanted in expected.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != wanted:
                raise HelmscopeError(f"{name} has shape {tuple(value.shape)}, but states asks for {wanted}")
        if self.tokens is not None and [len(row) for row in self.tokens] != [shape[2]] * shape[1]:
            raise HelmscopeError(f"tokens must hold {shape[2]} labels for each of {shape[1]} systems")


@runtime_checkable
class System(Protocol):
    """A trajectory with the mechanism that made it. Simulations and recordings are Systems; nobody asks which."""

    @property
    def trajectory(self) -> Trajectory:
        """What the tokens did."""

    def kernel(self, step: int) -> Tensor:
        """The attention kernel at time index ``step``: row i holds the weights of the keys that token i attends to."""

    def force(self, step: int) -> object | None:
        """The MLP as a field at time index ``step``, or None where there is none."""

    def resume(self, step: int, states: Tensor, generator: torch.Generator | None = None) -> System:
        """Continue from time index ``step`` with changed states, (batch, token, dim)."""


@runtime_checkable
class Reducer(Protocol):
    """Sees query, key, value and weights of one layer as they pass, and keeps a small result."""

    def update(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> None:
        """Take in one layer; the tensors are not kept."""

    def result(self) -> xr.Dataset:
        """The Measurement gathered so far."""


COMPANIONS = ("_stderr", "_low", "_high", "_null")


def check_measurement(dataset: xr.Dataset) -> xr.Dataset:
    """The Measurement rule: every NAME has NAME_stderr, or NAME_low and NAME_high; NAME_null where there is one; and
    the attribute n says how many replicates stand behind it (on the variable, else on the Dataset).

    Returns the Dataset unchanged, so that it can close a function; refuses a Dataset that breaks the rule.

    >>> import xarray as xr
    >>> check_measurement(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16})).attrs["n"]
    16
    """
    if not hasattr(dataset, "data_vars"):
        raise HelmscopeError(f"dataset is a {type(dataset).__name__}, but a Measurement is an xarray Dataset")
    names = [str(name) for name in dataset.data_vars]
    for name in names:
        base = next((name.removesuffix(end) for end in COMPANIONS if name.endswith(end)), None)
        if base is not None:
            if base not in names:
                raise HelmscopeError(f"measurement has '{name}' but no '{base}' that it belongs to")
            continue
        has_stderr = f"{name}_stderr" in names
        has_interval = f"{name}_low" in names and f"{name}_high" in names
        if not (has_stderr or has_interval):
            raise HelmscopeError(f"measurement '{name}' has neither '{name}_stderr' nor '{name}_low' and '{name}_high'")
        n = dataset[name].attrs.get("n", dataset.attrs.get("n"))
        if n is None:
            raise HelmscopeError(f"measurement '{name}' has no attribute n, the number of replicates")
        whole_number(f"attribute n of measurement '{name}'", n, at_least=1)
        _check_companions(dataset, name)
    return dataset


def _check_companions(dataset: xr.Dataset, name: str) -> None:
    for end in ("_stderr", "_low", "_high"):
        other = dataset.get(f"{name}{end}")
        if other is not None and set(other.dims) != set(dataset[name].dims):
            raise HelmscopeError(f"'{name}{end}' has axes {other.dims}, but '{name}' has {dataset[name].dims}")
    if f"{name}_stderr" in dataset and bool((dataset[f"{name}_stderr"] < 0).any()):
        raise HelmscopeError(f"'{name}_stderr' holds a negative value, but a standard error is >= 0")
    if f"{name}_low" in dataset and f"{name}_high" in dataset:
        # a NaN compares as False, so an undefined estimate does not read as crossed
        crossed = (dataset[f"{name}_low"] > dataset[name]) | (dataset[name] > dataset[f"{name}_high"])
        if bool(crossed.any()):
            raise HelmscopeError(f"'{name}' leaves its own interval '{name}_low'..'{name}_high'")


def interval_text(estimate: float, low: float, high: float) -> str:
    """A number with its interval, with enough digits to tell the ends apart, three at least; words where there is
    none.

    >>> interval_text(1.00000012, 1.0000001, 1.00000014)
    '1.00000012 [1.0000001, 1.00000014]'
    >>> interval_text(math.nan, math.nan, math.nan)
    'no number'
    """
    if math.isnan(estimate):
        return "no number"
    size, apart = max(abs(low), abs(high)), high - low
    digits = 3 if not (apart > 0 and math.isfinite(size)) else min(12, max(3, 2 + math.ceil(math.log10(size / apart))))
    return f"{estimate:.{digits}g} [{low:.{digits}g}, {high:.{digits}g}]"


class Ruling(Enum):
    """What a trial can say of a claim.

    >>> Ruling("refuted").name
    'REFUTED'
    """

    SUPPORTED = "supported"
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"
    BY_CONSTRUCTION = "true by construction"
    IMPOSSIBLE = "premise impossible here"


@dataclass(frozen=True)
class Control:
    """A statistic where the answer is known: the null of a claim, or what its source prints where that is wrong.

    ``what`` says what was tried and ``expected`` how it must come out; a trial whose control comes out otherwise
    proves nothing. ``region`` is the interval [region_low, region_high] in words.

    >>> Control("V = -I", Ruling.REFUTED, Ruling.REFUTED, 0.0, 0.0, 0.1, 32, "at least .9", 0.9).as_expected
    True
    """

    what: str
    ruling: Ruling
    expected: Ruling
    statistic: float
    low: float
    high: float
    n: int
    region: str
    region_low: float = -math.inf
    region_high: float = math.inf

    @property
    def as_expected(self) -> bool:
        """Whether the trial could tell this case from the claim."""
        return self.ruling is self.expected


@dataclass(frozen=True)
class Exhibit:
    """Something that a trial rests on, word for word, such as the checks that its subject has passed.

    >>> Exhibit("the model", "rows sum to 1").title
    'the model'
    """

    title: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """A ruling on one claim: the statistic with its interval and sample size, the region frozen before the run, the
    hash of the catalogue entry, and the sentence a reader needs; then where the claim was tried (the coordinates), the
    region's interval, the null, what the source prints where that is wrong, further parts of the claim, and exhibits.

    >>> Verdict("rate", Ruling.SUPPORTED, 1.0, 0.99, 1.01, 20, "[0.9, 1.1]", "c0ffee", "SA has rate 1.").ruling.value
    'supported'
    """

    claim: str
    ruling: Ruling
    statistic: float
    low: float
    high: float
    n: int
    region: str
    entry_hash: str
    sentence: str
    where: str = ""
    region_low: float = -math.inf
    region_high: float = math.inf
    null: Control | None = None
    printed: Control | None = None
    also: tuple[Control, ...] = ()
    exhibits: tuple[Exhibit, ...] = ()
