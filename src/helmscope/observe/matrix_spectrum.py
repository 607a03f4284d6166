"""The spectrum of a matrix whose rows are tokens: effective ranks, condition, roughness along the tokens, distance from
a single point.

X is T x c with rows x_i, singular values s_1 >= s_2 >= ..., and mean row xbar. Every public definition of an effective
rank has a name of its own:

    effective_rank             exp(-sum p log p), p = s / sum s           Roy & Vetterli 2007
    effective_rank_of_squares  the same with p = s^2 / sum s^2            the entropy of the principal variances
    participation_ratio        (sum s^2)^2 / sum s^4
    stable_rank                sum s^2 / s_1^2                            Rudelson & Vershynin 2007
    nuclear_rank               sum s / s_1
    dirichlet_energy           sum_i |x_{i+1} - x_i|^2 / sum_i |x_i|^2    of the path along the tokens, 0 to 4
    collapse_residual_frobenius          |X - 1 xbar^T|_F / |X|_F                   0 for a single point, 1 for mean 0
    log_condition_number              log(s_1 / s_r), r the largest possible rank

The Dirichlet energy of the complete graph on the tokens is T times the square of the numerator of the collapse
residual, so that it says nothing more. How it fails. A condition number beyond rounding is not measured: see
``condition_number_of``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.rank import spectral_ranks
from helmscope.types import HelmscopeError, check_integer, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

MATRIX_NAMES = {
    "effective_rank": "effective rank, entropy of s",
    "effective_rank_of_squares": "effective rank, entropy of s^2",
    "participation_ratio": "participation ratio",
    "stable_rank": "stable rank",
    "nuclear_rank": "nuclear rank",
    "nuclear_norm": "nuclear norm",
    "log_condition_number": "log of the condition number, at most log of 1 / rounding",
    "numerically_singular": "whether the smallest singular value is 0 up to rounding",
    "dirichlet_energy": "squared differences of neighboring tokens over squared lengths",
    "collapse_residual_frobenius": "distance to the mean token over the length, Frobenius norm",
}


@full_precision
def matrix_spectrum(x: Float[Tensor, "*batch t c"], *, rank: int | None = None) -> dict[str, Float[Tensor, "*batch"]]:
    """The quantities of ``MATRIX_NAMES`` of each matrix, in float64.

    ``rank`` is the largest rank that the matrices can have, min(t, c) by default: less where a mean was removed.
    Ranks, energies and residuals of a matrix of zeros are NaN. Raises HelmscopeError for another shape, for entries
    that are not finite, and for a rank out of range.

    >>> found = matrix_spectrum(torch.eye(3))
    >>> names = "stable_rank", "dirichlet_energy", "collapse_residual_frobenius"
    >>> {name: round(float(found[name]), 4) for name in names}
    {'stable_rank': 3.0, 'dirichlet_energy': 1.3333, 'collapse_residual_frobenius': 0.8165}
    """
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or not x.is_floating_point() or not x.shape[-1] * x.shape[-2]:
        shown = tuple(x.shape) if isinstance(x, torch.Tensor) else type_with_article(x)
        raise HelmscopeError(f"x is {shown}, but it must be a float tensor of shape (..., t, c)")
    x = x.double()
    if not bool(torch.isfinite(x).all()):
        raise HelmscopeError("x holds NaN or infinite entries, but every entry must be finite")
    most = min(x.shape[-2:])
    largest = most if rank is None else check_integer("rank", rank, at_least=1)
    if largest > most:
        raise HelmscopeError(f"rank is {largest}, but a matrix of shape {tuple(x.shape[-2:])} has at most {most}")
    s = torch.linalg.svdvals(x)
    size, mean = x.square().sum((-1, -2)), x.mean(-2, keepdim=True)
    found = ranks_of(s) | condition_number_of(s[..., :largest]) | {"nuclear_norm": s.sum(-1)}
    found["dirichlet_energy"] = x.diff(dim=-2).square().sum((-1, -2)) / size
    found["collapse_residual_frobenius"] = ((x - mean).square().sum((-1, -2)) / size).sqrt()
    return {name: found[name] for name in MATRIX_NAMES}


def condition_number_of(s: Float[Tensor, "*batch r"]) -> dict[str, Float[Tensor, "*batch"]]:
    """``log_condition_number`` = log(s_1 / s_r), ``inverse_condition_number`` = s_r / s_1 and ``numerically_singular``,
    from singular values in falling order.

    Where s_r is below r eps s_1 it is rounding, and the matrix is singular as far as one can tell:
    ``numerically_singular`` is 1, the inverse 0, and the logarithm that of 1 / (r eps), which the true one exceeds.

    >>> condition_number_of(torch.tensor([2.0, 1.0]).double())["inverse_condition_number"]
    tensor(0.5000, dtype=torch.float64)
    """
    rounding = s.shape[-1] * torch.finfo(s.dtype).eps
    inverse = s[..., -1] / torch.where(s[..., 0] > 0, s[..., 0], 1.0)
    singular = inverse <= rounding
    return {
        "log_condition_number": inverse.clamp(min=rounding).log().abs(),
        "inverse_condition_number": torch.where(singular, 0.0, inverse),
        "numerically_singular": singular.to(s),
    }


def ranks_of(s: Float[Tensor, "*batch r"]) -> dict[str, Float[Tensor, "*batch"]]:
    """The five effective ranks from singular values: those of ``spectral_ranks`` and ``effective_rank_of_squares``.

    >>> round(float(ranks_of(torch.tensor([2.0, 1.0]))["effective_rank_of_squares"]), 4)
    1.6494
    """
    return spectral_ranks(s) | {"effective_rank_of_squares": spectral_ranks(s.square())["effective_rank"]}
