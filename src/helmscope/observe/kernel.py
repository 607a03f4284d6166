"""What an attention kernel says: how far a token looks, how much mass arrives where, how far from symmetric it is.

A kernel K has rows of weights K_ij >= 0, query i and key j: (*batch, n, n), with heads (*batch, heads, n, n). Rows of
SA sum to 1; those of USA do not, nor those of a model whose sink takes mass away. So shares are read off the normalized
rows P_ij = K_ij / sum_k K_ik, and the row mass is reported apart. A query that sees no key has no shares: NaN. Padded
tokens (``mask`` False) are no queries: whatever sums over queries leaves them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.observe.track import mean_and_stderr, real_tokens, trajectory_of
from helmscope.types import HelmscopeError, System

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def check_kernel(kernel: object) -> Float[Tensor, "*batch n n"]:
    """A kernel as it may enter: a float tensor (..., n, n), n >= 1, of finite weights >= 0; else a ``HelmscopeError``.

    >>> check_kernel(torch.eye(2)).shape
    torch.Size([2, 2])
    """
    if not isinstance(kernel, torch.Tensor):
        raise HelmscopeError(f"kernel is a {type(kernel).__name__}, but it must be a torch tensor of shape (..., n, n)")
    shape = tuple(kernel.shape)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 1:
        raise HelmscopeError(f"kernel has shape {shape}, but it must be (..., n, n) with n >= 1 tokens")
    if kernel.dtype not in (torch.float64, torch.float32):
        raise HelmscopeError(f"kernel has dtype {kernel.dtype}, but it must be torch.float64 or torch.float32")
    good = torch.isfinite(kernel) & (kernel >= 0)
    if not bool(good.all()):
        raise HelmscopeError(
            f"kernel holds the weight {kernel[~good][0].item():g}, but every weight must be finite and >= 0"
        )
    return kernel


def row_mass(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """sum_j K_ij: 1 for a softmax, 1 minus what a sink outside the tokens takes, Z_i / M for USA.

    >>> row_mass(torch.tensor([[0.5, 0.25], [0.0, 1.0]]))
    tensor([0.7500, 1.0000])
    """
    return check_kernel(kernel).sum(-1)


def normalized_rows(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """P_ij = K_ij / sum_k K_ik; a row of mass 0 stays 0.

    >>> normalized_rows(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.0000, 0.0000]])
    """
    mass = row_mass(kernel).unsqueeze(-1)
    return kernel / torch.where(mass > 0, mass, 1.0)


def row_entropy(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """-sum_j P_ij log P_ij in nats: 0 for one key, log n for equal weights.

    >>> row_entropy(torch.ones(2, 2))  # log 2
    tensor([0.6931, 0.6931])
    """
    p = normalized_rows(kernel)
    # p log p is 0 at p = 0, where its slope is infinite: the gradient there is set to 0
    return _of_sighted(kernel, -(p * torch.log(torch.where(p > 0, p, 1.0))).sum(-1))


def effective_keys(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """n_eff = 1 / sum_j P_ij^2 (source 000-2), between 1 and n: so many independent terms has a weighted mean, whose
    covariance is Cov / n_eff.

    >>> effective_keys(torch.ones(2, 2))
    tensor([2., 2.])
    """
    p = normalized_rows(kernel)
    power = (p * p).sum(-1)
    return _of_sighted(kernel, 1 / torch.where(power > 0, power, 1.0))


def largest_weight(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """max_j P_ij. A central limit theorem for the sum over keys needs it to vanish (source 000-2): sinks forbid that.

    >>> largest_weight(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 0.5000])
    """
    return _of_sighted(kernel, normalized_rows(kernel).amax(-1))


def first_token_mass(
    kernel: Float[Tensor, "*batch n n"], *, mask: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """P_i1, what each query gives to the first real token, the usual sink. Under a causal mask the first token gives
    itself 1, whatever the model does.

    >>> first_token_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.2500, 0.5000])
    """
    p = normalized_rows(kernel)
    first = real_tokens(p, mask).to(torch.int8).argmax(-1)
    column = first[..., None, None].expand(*p.shape[:-1], 1)
    return _of_sighted(kernel, p.gather(-1, column).squeeze(-1))


def future_mass(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """sum_{j > i} P_ij, what query i gives to later tokens: 0 for a causal kernel.

    >>> future_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 0.0000])
    """
    return _of_sighted(kernel, normalized_rows(kernel).triu(1).sum(-1))


def received_mass(
    kernel: Float[Tensor, "*batch n n"], *, mask: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """sum_i P_ij over the real queries i: the column sums. Where every query sees a real key their mean is 1, so only
    their spread says something: see ``bistochastic_defect``.

    >>> received_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 1.2500])
    """
    p = normalized_rows(kernel)
    return (p * real_tokens(p, mask).unsqueeze(-1)).sum(-2)


def bistochastic_defect(
    kernel: Float[Tensor, "*batch n n"], *, mask: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """max_j |sum_i P_ij - 1| over real tokens: 0 where the normalized kernel is doubly stochastic, n - 1 where all look
    at one token. A causal kernel reaches 0 only as the identity (source 000-11). Tokens count alike: a kernel of tokens
    with weights, bistochastic for their measure, is not so here.

    >>> bistochastic_defect(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor(0.2500)
    """
    off = (received_mass(kernel, mask=mask) - 1).abs()
    return (off * real_tokens(kernel, mask)).amax(-1)


def symmetry_defect(
    kernel: Float[Tensor, "*batch n n"], *, mask: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """|K - K^T|_F / (2 |K|_F), the share of the antisymmetric part among real tokens: 0 for a symmetric kernel, at most
    1 / sqrt 2 for weights >= 0; NaN for a kernel of zeros.

    Of the kernel as it is, not of its normalized rows: USA with B = B^T is symmetric, SA is not.

    >>> symmetry_defect(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    tensor(0.7071)
    """
    real = real_tokens(check_kernel(kernel), mask).to(kernel.dtype)
    block = real.unsqueeze(-1) * kernel * real.unsqueeze(-2)
    skew, whole = (torch.linalg.vector_norm(part, dim=(-1, -2)) for part in (block - block.mT, block))
    share: Tensor = skew / (2 * whole)
    return share


def kernel_statistics(system: System) -> xr.Dataset:
    """The quantities above over time, and over heads where there are several: ``row_mass``, ``entropy``,
    ``effective_keys``, ``largest_weight``, ``first_token_mass``, ``future_mass``, ``bistochastic_defect`` and
    ``symmetry_defect``.

    Quantities of a query are averaged over the real tokens of a system that see a key; mean and standard error are
    those of the systems. A system without attention is refused.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> seen = kernel_statistics(integrate(SA(beta=0.0), torch.eye(3), times=[0.0, 1.0]))
    >>> seen.effective_keys.values.round(6).tolist(), seen.attrs["n"]
    ([3.0, 3.0], 1)
    """
    path = trajectory_of(check_system(system))
    batch, n = path.states.shape[1:3]
    rows = []
    for step in range(len(path.times)):
        kernel = check_kernel(system.kernel(step).detach())
        if kernel.ndim not in (3, 4) or (kernel.shape[0], kernel.shape[-1]) != (batch, n):
            raise HelmscopeError(
                f"kernel({step}) has shape {tuple(kernel.shape)}, but {batch} systems of {n} tokens need "
                f"({batch}, {n}, {n}) or ({batch}, heads, {n}, {n})"
            )
        rows.append(_statistics(kernel, path.mask))
    values = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    heads = values["entropy"].shape[2:]
    return mean_and_stderr(path, values, extra={"head": np.arange(heads[0])} if heads else None)


def check_system(system: object) -> System:
    """A System, which knows its mechanism; a bare Trajectory and anything else is refused.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> len(check_system(integrate(SA(beta=0.0), torch.eye(3), times=[1.0])).trajectory.times)
    1
    """
    if isinstance(system, type) or not isinstance(system, System):
        shown = system.__name__ if isinstance(system, type) else type(system).__name__
        raise HelmscopeError(f"system is {shown}, but the mechanism is known to a System only, such as a Simulation")
    return system


def _statistics(kernel: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """One value a system, and a head where there are heads."""
    if mask is not None and kernel.ndim == 4:
        mask = mask.unsqueeze(1).expand(kernel.shape[:-1])
    a_query = {
        "row_mass": row_mass(kernel),
        "entropy": row_entropy(kernel),
        "effective_keys": effective_keys(kernel),
        "largest_weight": largest_weight(kernel),
        "first_token_mass": first_token_mass(kernel, mask=mask),
        "future_mass": future_mass(kernel),
    }
    real = real_tokens(kernel, mask)
    sighted = real & (kernel.sum(-1) > 0)
    means = {name: _mean(value, real if name == "row_mass" else sighted) for name, value in a_query.items()}
    return {
        **means,
        "bistochastic_defect": bistochastic_defect(kernel, mask=mask),
        "symmetry_defect": symmetry_defect(kernel, mask=mask),
    }


def _mean(value: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, value, 0.0).sum(-1) / counted.sum(-1)


def _of_sighted(kernel: Tensor, value: Tensor) -> Tensor:
    return torch.where(kernel.sum(-1) > 0, value, torch.nan)
