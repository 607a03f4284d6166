"""Leading eigenvalues of an operator that is known only by its products, by ARPACK with deflation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigs, eigsh

Product = Callable[[np.ndarray], np.ndarray]


def leading_eigenvalues(product: Product, size: int, kind: np.dtype, count: int, *, symmetric: bool) -> np.ndarray:
    """The ``count`` eigenvalues of largest real part.

    A Krylov space contains one vector of each eigenspace, so copies of a multiple eigenvalue can be missed. Therefore
    the eigenvalues found are shifted below the others (deflation), and the search is repeated until it finds no larger
    one.
    """
    solve, which = (eigsh, "LA") if symmetric else (eigs, "LR")
    generator = np.random.default_rng(0)  # a fixed seed, so that equal calls return equal values
    values, basis, floor = np.zeros(0, complex), np.zeros((size, 0), kind), 0.0
    wanted = count
    while basis.shape[1] + wanted <= size - 2:
        operator = LinearOperator((size, size), partial(_deflated, product, basis, floor), dtype=kind)
        v0 = generator.standard_normal(size).astype(kind)
        found, vectors = solve(operator, wanted, which=which, v0=v0, rng=generator)
        scale = np.abs(values).max(initial=0.0)
        if len(values) and found.real.max() <= values[:count].real.min() + np.finfo(kind).eps ** (2 / 3) * scale:
            break
        # one of a complex pair suffices: the real and imaginary parts of its vector span the invariant plane of both
        kept = np.array([value.imag >= 0 or value.conj() not in found for value in found])
        paired = kept & (found.imag != 0)
        values = sorted_descending(np.concatenate([values, found[kept], found[paired].conj()]))
        basis = np.linalg.qr(np.hstack([basis, vectors[:, kept].real, vectors[:, paired].imag]))[0]
        floor, wanted = values.real.min() - np.abs(values).max(), 1
    return values[:count]


def _deflated(product: Product, basis: np.ndarray, floor: float, w: np.ndarray) -> np.ndarray:
    """The operator applied to w, with the eigenvalues on the invariant space of ``basis`` replaced by ``floor``."""
    coordinates = basis.T @ w.ravel()
    image = product(w.ravel() - basis @ coordinates)
    deflated: np.ndarray = image + basis @ (floor * coordinates - basis.T @ image)
    return deflated


def sorted_descending(values: np.ndarray) -> np.ndarray:
    """Values by decreasing real part, and in a complex pair the one with positive imaginary part first.

    >>> sorted_descending(np.array([1.0, 3.0]))
    array([3., 1.])
    """
    return values[np.lexsort((-values.imag, -values.real))].copy()
