"""Replicates: checked, averaged on a scale, split into halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.stats.scales import Scale
from helmscope.types import HelmscopeError, type_with_article, whole_number

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Numbers = NDArray[np.float64]


def numbers(name: str, values: ArrayLike) -> Numbers:
    """``values``, of Python, NumPy or torch, as float64; anything but real numbers is refused by name.

    >>> numbers("values", [1, 2])
    array([1., 2.])
    """
    try:
        raw = np.asarray(getattr(values, "detach", lambda: values)())
        if raw.dtype.kind not in "iuf":
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise HelmscopeError(f"{name} is {type_with_article(values)}, but it must hold real numbers alone") from None
    return raw.astype(np.float64)


def replicate_vector(name: str, values: ArrayLike, scale: Scale) -> Numbers:
    """``values`` as a vector of at least two finite numbers in the scale's domain; anything else is refused by name.

    >>> from helmscope.stats.scales import PLAIN
    >>> replicate_vector("values", [1, 2], PLAIN)
    array([1., 2.])
    """
    check_scale(scale)
    x = numbers(name, values)
    if x.ndim != 1 or x.size < 2:
        raise HelmscopeError(f"{name} has shape {x.shape}, but it must be a vector of at least 2 replicates")
    bad = ~np.isfinite(x) | scale.excludes(x)
    if bool(bad.any()):
        at = int(bad.argmax())
        raise HelmscopeError(f"{name}[{at}] is {x[at]:g}, but it must be a finite number in {scale.domain_text}")
    return x


def check_scale(scale: Scale) -> None:
    """Refuse what is not a scale.

    >>> from helmscope.stats.scales import PLAIN
    >>> check_scale(PLAIN)
    """
    if not isinstance(scale, Scale):
        raise HelmscopeError(
            f"scale is {scale!r}, but it must be LinearScale(), LogScale(), FisherZScale() or Bounded((0, 1))"
        )


def moments(x: Numbers, scale: Scale) -> tuple[Numbers, Numbers]:
    """The mean over the first axis, on the scale, and its standard error, which rounding neither lifts from 0 nor lets
    underflow to it. NaN is left out; without values the mean is NaN, with fewer than two the standard error is.

    >>> from helmscope.stats.scales import PLAIN
    >>> moments(np.array([[1.0, 5.0], [3.0, np.nan]]), PLAIN)
    (array([2., 5.]), array([ 1., nan]))
    """
    y, there = scale.forward(x), ~np.isnan(x)
    n = there.sum(0)
    first = first_value(y)
    with np.errstate(over="ignore"):
        spread = np.fmax.reduce(y) - np.fmin.reduce(y)
    if bool(np.isinf(spread).any()):
        low, high = np.nanmin(x), np.nanmax(x)
        raise HelmscopeError(f"replicates lie between {low:g} and {high:g}, but their range must not overflow")
    unit = np.where(there, (y - first) / np.where(spread > 0, spread, 1.0), 0.0)
    mean = unit.sum(0) / np.maximum(n, 1)
    with np.errstate(invalid="ignore", divide="ignore"):  # one value has no spread: 0 / 0
        deviation = np.sqrt(np.where(there, (unit - mean) ** 2, 0.0).sum(0) / np.maximum(n - 1, 0))
        return first + spread * mean, spread * deviation / np.sqrt(n)


def first_value(x: Numbers) -> Numbers:
    """The first value along the first axis that is not NaN, and NaN where there is none.

    >>> first_value(np.array([[np.nan, 5.0], [3.0, 7.0]]))
    array([3., 5.])
    """
    first: Numbers = np.take_along_axis(x, (~np.isnan(x)).argmax(0)[None], 0)[0]
    return first


def halves(n: int, *, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two random disjoint halves of range(n), sorted: choose on the first, test on the second, which is the larger
    where n is odd. n < 4 is refused, for a test needs two replicates.

    >>> sorted(np.concatenate(halves(6)).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    n = whole_number("n", n, at_least=4)
    order = np.random.default_rng(whole_number("seed", seed, at_least=0)).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])
