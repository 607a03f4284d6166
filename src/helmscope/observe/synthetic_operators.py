"""The three idealized operators of [Additive transport], Section 9.3 and Table 2, with stated constructions.

    mixing       A = softmax(G) by rows, G_ij ~ N(0, 1)             retrieval    rows are unit vectors at random
    permutation  rows of I in random order                          rotation     orthogonal, by Haar measure

The source gives neither the constructions, nor the number of tokens T, the signal X or the number of applications. With
X = I each has a closed form or a limit for large T (``hs.theory.softmax_retention`` and others); the last two are
transport, rho = kappa = 1 for k = 1, 2, ... Seeds are the replicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.observe.labels import label_attributes
from helmscope.observe.operator_spectrum import LONG_NAMES, operator_spectrum
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_integer, check_progress, check_replicates, check_seed, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

APPLICATIONS = (1, 2, 4, 8, 16)
SIGNAL_STREAM = 1_000_003  # of random numbers, apart from those of the operators


class SyntheticOperator(Enum):
    """The constructions of ``synthetic_operators``; the values are the coordinates of its axis ``operator``.

    >>> SyntheticOperator.RETRIEVAL.draw(3, seed=0).sum(-1)
    tensor([1., 1., 1.], dtype=torch.float64)
    """

    MIXING = "mixing"
    RETRIEVAL = "retrieval"
    PERMUTATION = "transport: permutation"
    ROTATION = "transport: rotation"

    def draw(self, tokens: int, *, seed: int) -> Float[Tensor, "tokens tokens"]:
        """One operator on a number of tokens, in float64.

        >>> rotation = SyntheticOperator.ROTATION.draw(5, seed=1)
        >>> bool(((rotation @ rotation.mT - torch.eye(5)).abs() < 1e-14).all())
        True
        """
        tokens = check_integer("tokens", tokens, at_least=1)
        rng = np.random.default_rng([check_seed(seed), list(SyntheticOperator).index(self), tokens])
        one = torch.eye(tokens, dtype=torch.float64, device="cpu")
        if self is SyntheticOperator.RETRIEVAL:
            return one[torch.from_numpy(rng.integers(tokens, size=tokens))]
        if self is SyntheticOperator.PERMUTATION:
            return one[torch.from_numpy(rng.permutation(tokens))]
        normal = torch.from_numpy(rng.standard_normal((tokens, tokens)))
        if self is SyntheticOperator.MIXING:
            return normal.softmax(-1)
        q, r = torch.linalg.qr(normal)
        rotation: Tensor = q * r.diagonal().sign()  # without the signs the law of Q is not Haar's
        return rotation


@shows_progress("synthetic operators")
def synthetic_operators(
    *,
    tokens: Sequence[int] = (128, 512),
    applications: Sequence[int] = APPLICATIONS,
    operators: Sequence[SyntheticOperator] = tuple(SyntheticOperator),
    signal_dim: int | None = None,
    seeds: int = 32,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The quantities of ``operator_spectrum`` along (operator, tokens, applications, seed), for random draws.

    X is the identity, or with ``signal_dim`` c a T x c matrix of independent standard normal values, drawn apart for
    each seed. Raises HelmscopeError for an operator that is no ``SyntheticOperator``, and for an empty list.

    >>> found = synthetic_operators(tokens=[16], applications=[1, 3], seeds=4)
    >>> found.nuclear_retention.dims, round(float(found.nuclear_retention.sel(operator="transport: rotation").max()), 9)
    (('operator', 'tokens', 'applications', 'seed'), 1.0)
    """
    report, first = check_progress(progress), check_seed(seed)
    sizes = [check_integer("tokens", count, at_least=1) for count in tokens]
    steps, count = list(applications), check_integer("seeds", seeds, at_least=1)
    chosen = list(operators)
    for each in chosen:
        if not isinstance(each, SyntheticOperator):
            raise HelmscopeError(f"operators holds {short_repr(each)}, but each must be a SyntheticOperator")
    if not sizes or not chosen:
        raise HelmscopeError(f"{'operators' if sizes else 'tokens'} is empty, but it must hold at least one")
    shape = (len(chosen), len(sizes), len(steps), count)
    found = {name: np.empty(shape) for name in LONG_NAMES}
    for done, (i, j, k) in enumerate(np.ndindex(shape[0], shape[1], count), 1):
        signal = None if signal_dim is None else _normal(sizes[j], signal_dim, first + k)
        spectrum = operator_spectrum(chosen[i].draw(sizes[j], seed=first + k), signal=signal, applications=steps)
        for name, values in spectrum.items():
            found[name][i, j, :, k] = values.numpy()
        report(done / (shape[0] * shape[1] * count))
    axes = ("operator", "tokens", "applications", "seed")
    data = {
        name: (axes, values, {**label_attributes(LONG_NAMES[name]), "valid_min": 0.0}) for name, values in found.items()
    }
    coords = {
        "operator": [each.value for each in chosen],
        "tokens": sizes,
        "applications": steps,
        "seed": [first + k for k in range(count)],
    }
    signal_text = "identity" if signal_dim is None else f"normal, {signal_dim} dimensions"
    return check_replicates(xr.Dataset(data, coords, {"title": "synthetic operators", "signal": signal_text}))


def _normal(tokens: int, dim: int, seed: int) -> Tensor:
    rng = np.random.default_rng([seed, SIGNAL_STREAM, tokens])
    return torch.from_numpy(rng.standard_normal((tokens, check_integer("signal_dim", dim, at_least=1))))
