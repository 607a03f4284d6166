"""The spectrum of an operator on tokens: how much of the nuclear norm of a signal it keeps, and how ill-conditioned it
is ([Additive transport], Section 9.3).

    retention  rho = |A^k X|_* / |X|_*,        condition  kappa = s_1 / s_r,

with A (T x T) applied k times to a signal X (T x c), |.|_* the sum of the singular values, and s_1 >= ... >= s_r those
of A^k X, r = min(T, c). The source leaves X open, and rho depends on it: X = I here unless a signal is given.

How to read it. A rho of 1 is no isometry: diag(1.5, 0.5) has it, with kappa = 3. Orthogonal maps have rho = 1 for any
X. How it fails. The kappa of a random matrix has no mean: its logarithm has quantiles, over heads, prompts or seeds.
Where s_r is below r eps s_1 it is rounding (``condition_number_of``). Cost: one singular value decomposition,
O(T^2 c), for each k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.matrix_spectrum import condition_number_of
from helmscope.types import HelmscopeError, check_integer, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LONG_NAMES = {
    "nuclear_retention": "nuclear norm of A^k X over that of X",
    "log_condition_number": "log of the condition number, at most log of 1 / rounding",
    "inverse_condition_number": "smallest over largest singular value",
    "numerically_singular": "whether the smallest singular value is 0 up to rounding",
    "rank_share": "numerical rank over the number of tokens",
}


@full_precision
def operator_spectrum(
    operator: Float[Tensor, "*batch t t"],
    *,
    signal: Float[Tensor, "*batch t c"] | None = None,
    applications: Sequence[int] = (1,),
) -> dict[str, Float[Tensor, "*batch applications"]]:
    """``nuclear_retention``, ``log_condition_number``, ``inverse_condition_number``, ``numerically_singular`` and
    ``rank_share`` of A^k X for each k of ``applications``, in float64; X is the identity by default. Ranks count
    singular values above r eps s_1.

    Raises HelmscopeError for an operator that is not square, a signal of other tokens or of norm 0, and numbers that
    are not finite.

    >>> found = operator_spectrum(torch.diag(torch.tensor([1.5, 0.5])), applications=[1, 2])
    >>> found["nuclear_retention"], found["log_condition_number"].exp()
    (tensor([1.0000, 1.2500], dtype=torch.float64), tensor([3.0000, 9.0000], dtype=torch.float64))
    """
    matrix = _checked(operator)
    steps = [check_integer("applications", k, at_least=1) for k in applications]
    if not steps:
        raise HelmscopeError("applications is empty, but it must hold at least one number such as 1")
    tokens = matrix.shape[-1]
    x = torch.eye(tokens, dtype=torch.float64, device=matrix.device) if signal is None else _signal(signal, tokens)
    size = torch.linalg.svdvals(x).sum(-1)
    if not bool((size > 0).all()):
        raise HelmscopeError("signal is 0, but retention divides by its nuclear norm")
    found, y, done = [], x, 0
    for k in sorted(set(steps)):
        for _ in range(k - done):
            y = matrix @ y
        done = k
        values = torch.linalg.svdvals(y)
        kept = {"nuclear_retention": values.sum(-1) / size, "rank_share": _rank(values) / tokens}
        found.append(condition_number_of(values) | kept)
    places = [sorted(set(steps)).index(k) for k in steps]
    return {name: torch.stack([found[place][name] for place in places], -1) for name in LONG_NAMES}


def _rank(s: Tensor) -> Tensor:
    rounding = s.shape[-1] * torch.finfo(s.dtype).eps
    return (s > rounding * s[..., :1]).sum(-1).to(s)


def _checked(operator: object) -> Tensor:
    if not isinstance(operator, torch.Tensor) or operator.ndim < 2 or operator.shape[-1] != operator.shape[-2]:
        shown = tuple(operator.shape) if isinstance(operator, torch.Tensor) else type_with_article(operator)
        raise HelmscopeError(f"operator is {shown}, but it must be a tensor of shape (..., t, t)")
    matrix = operator.double()
    if not bool(torch.isfinite(matrix).all()):
        raise HelmscopeError("operator holds NaN or infinite entries, but every entry must be finite")
    return matrix


def _signal(signal: object, tokens: int) -> Tensor:
    if not isinstance(signal, torch.Tensor) or signal.ndim < 2 or signal.shape[-2] != tokens:
        shown = tuple(signal.shape) if isinstance(signal, torch.Tensor) else type_with_article(signal)
        raise HelmscopeError(f"signal is {shown}, but it must be a tensor of shape (..., {tokens}, c)")
    x = signal.double()
    if not bool(torch.isfinite(x).all()):
        raise HelmscopeError("signal holds NaN or infinite entries, but every entry must be finite")
    return x
