"""Replicates: checks, means on a scale, and random halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from helmscope.stats.scales import Scale
from helmscope.types import HelmscopeError, check_integer, type_with_article

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Numbers = NDArray[np.float64]

Array = TypeVar("Array")  # of NumPy or torch


def numbers(name: str, values: ArrayLike) -> Numbers:
    """``values``, from Python, NumPy or torch, as a float64 array; raises ``HelmscopeError`` unless all are real
    numbers.

    >>> numbers("values", [1, 2])
    array([1., 2.])
    """
    try:
        raw = np.asarray(getattr(values, "detach", lambda: values)())
        if raw.dtype.kind not in "iuf":
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise HelmscopeError(f"{name} is {type_with_article(values)}, but it must hold real numbers only") from None
    return raw.astype(np.float64)


def replicate_vector(name: str, values: ArrayLike, scale: Scale) -> Numbers:
    """``values`` as a float64 vector; raises ``HelmscopeError`` unless it has at least two entries, all finite and in
    the scale's domain.

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
    """Raise ``HelmscopeError`` unless ``scale`` is a scale.

    >>> from helmscope.stats.scales import PLAIN
    >>> check_scale(PLAIN)
    """
    if not isinstance(scale, Scale):
        raise HelmscopeError(
            f"scale is {scale!r}, but it must be LinearScale(), LogScale(), FisherZScale(), RemainderScale() or "
            "BoundedScale((0, 1))"
        )


def moments(x: Numbers, scale: Scale) -> tuple[Numbers, Numbers]:
    """The mean over the first axis, on the scale, and its standard error, which is 0 exactly if all values are equal.

    NaN is left out; the mean of no values is NaN, and so is the standard error of fewer than two. Raises
    ``HelmscopeError`` if the range of the values overflows.

    >>> from helmscope.stats.scales import PLAIN
    >>> moments(np.array([[1.0, 5.0], [3.0, np.nan]]), PLAIN)
    (array([2., 5.]), array([ 1., nan]))
    """
    y, present = scale.forward(x), ~np.isnan(x)
    n = present.sum(0)
    first = first_value(y)
    with np.errstate(over="ignore"):
        spread = np.fmax.reduce(y) - np.fmin.reduce(y)
    if bool(np.isinf(spread).any()):
        low, high = np.nanmin(x), np.nanmax(x)
        raise HelmscopeError(f"replicates are between {low:g} and {high:g}, but their range must not overflow")
    unit = np.where(present, (y - first) / np.where(spread > 0, spread, 1.0), 0.0)
    mean = unit.sum(0) / np.maximum(n, 1)
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 for a single value
        deviation = np.sqrt(np.where(present, (unit - mean) ** 2, 0.0).sum(0) / np.maximum(n - 1, 0))
        return first + spread * mean, spread * deviation / np.sqrt(n)


def first_value(x: Numbers) -> Numbers:
    """The first value along the first axis that is not NaN; NaN if there is none.

    >>> first_value(np.array([[np.nan, 5.0], [3.0, 7.0]]))
    array([3., 5.])
    """
    first: Numbers = np.take_along_axis(x, (~np.isnan(x)).argmax(0)[None], 0)[0]
    return first


def random_halves(n: int, *, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two random disjoint halves of range(n), each sorted: one to choose a hypothesis on, one to test it on, which is
    the larger if n is odd. Raises ``HelmscopeError`` if n < 4, because a test needs two replicates.

    >>> sorted(np.concatenate(random_halves(6)).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    n = check_integer("n", n, at_least=4)
    order = np.random.default_rng(check_integer("seed", seed, at_least=0)).permutation(n)
    return np.sort(order[: n // 2]), np.sort(order[n // 2 :])


def pseudo_values(whole: Any, without_one: Array, n: int) -> Array:
    """The jackknife pseudo-values N theta - (N - 1) theta_(-k) of a statistic of all N replicates, given its values
    without each of them (Tukey 1958): their mean is theta corrected for its bias of order 1/N, and the Student interval
    of it is the delete-one jackknife interval. Arrays of NumPy or torch are combined entry by entry.

    >>> values = np.array([1.0, 2.0, 6.0])
    >>> pseudo_values(values.mean(), (values.sum() - values) / 2, n=3)  # of a mean: the values
    array([1., 2., 6.])
    """
    values: Array = whole + (n - 1) * (whole - without_one)  # the same, with less rounding
    return values
