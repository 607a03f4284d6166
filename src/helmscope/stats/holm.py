"""Holm's correction for multiple tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Numbers = NDArray[np.float64]


def holm(p_values: ArrayLike) -> Numbers:
    """Holm's (1979) adjusted p-values: in increasing order, the running maximum of (m - i + 1) p_(i), at most 1.

    Rejecting the hypotheses with adjusted p-values <= alpha makes any false rejection with probability at most alpha,
    whatever the dependence between the tests. Raises ``HelmscopeError`` unless there is at least one p-value and all
    are in [0, 1].

    >>> holm([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or p.size < 1 or not bool(((p >= 0) & (p <= 1)).all()):
        raise HelmscopeError(f"p_values is {p.tolist()}, but it must hold at least one number, each in [0, 1]")
    order = np.argsort(p, kind="stable")
    adjusted = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return adjusted[np.argsort(order)]
