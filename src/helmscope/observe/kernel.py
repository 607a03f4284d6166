"""Statistics of attention kernels: entropy of the rows, mass received by each token, deviation from symmetry.

A kernel K has rows of weights K_ij >= 0 for query i and key j: (*batch, n, n), with heads (*batch, heads, n, n). Rows
of SA sum to 1; rows of USA do not, nor do those of a model with an attention sink outside the tokens. Therefore shares
are computed from the normalized rows P_ij = K_ij / sum_k K_ik, and the row mass is reported separately. For a query
that attends to no key, such as padding in ``recording.kernel(layer=...)``, the shares are NaN. ``visible`` is False for
padding, tokens that are neither queries nor keys; by default, those are the tokens whose row and column are 0. Which
queries enter a mean is determined separately, by the weights of the trajectory: ``kernel_statistics`` returns such
means for a system. How sums over tokens are computed is the subject of ``hs.kernels``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.labels import label_attributes
from helmscope.observe.track import (
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    replayed,
    row_blocks,
    token_mean,
    token_weights,
    with_bounds,
)
from helmscope.types import HelmscopeError, Instrument, Needs, pluralized, type_with_article
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

__all__ = [
    "KernelStatistics",
    "attention_distributions",
    "bistochastic_defect",
    "check_kernel",
    "column_sum_deviation_rms",
    "effective_keys",
    "first_token_mass",
    "future_mass",
    "kernel_statistics",
    "largest_weight",
    "normalized_rows",
    "received_mass",
    "row_entropy",
    "row_mass",
    "symmetry_defect",
    "used_tokens",
    "visible_tokens",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__, "row_entropy")


def check_kernel(kernel: object) -> Float[Tensor, "*batch n n"]:
    """Returns the kernel; raises HelmscopeError unless it is a float tensor (..., n, n) of finite weights >= 0, n >= 1.

    >>> check_kernel(torch.eye(2)).shape
    torch.Size([2, 2])
    """
    if not isinstance(kernel, torch.Tensor):
        hint = ": for a system use hs.kernel_statistics(system)" if hasattr(kernel, "trajectory") else ""
        raise HelmscopeError(
            f"kernel is {type_with_article(kernel)}, but it must be a torch tensor of shape (..., n, n){hint}"
        )
    shape = tuple(kernel.shape)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 1:
        raise HelmscopeError(f"kernel has shape {shape}, but it must be (..., n, n) with n >= 1 tokens")
    if kernel.dtype not in (torch.float64, torch.float32):
        raise HelmscopeError(f"kernel has dtype {kernel.dtype}, but it must be torch.float64 or torch.float32")
    least, largest = (float(end) for end in torch.aminmax(kernel.detach()))  # both NaN if any weight is
    if not (least >= 0 and math.isfinite(largest)):
        good = torch.isfinite(kernel) & (kernel >= 0)
        raise HelmscopeError(
            f"kernel holds the weight {kernel[~good][0].item():g}, but every weight must be finite and >= 0"
        )
    return kernel


def row_mass(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Row sums sum_j K_ij: 1 for a softmax (1 minus the share of a sink outside the tokens), Z_i / M for USA.

    >>> row_mass(torch.tensor([[0.5, 0.25], [0.0, 1.0]]))
    tensor([0.7500, 1.0000])
    """
    return check_kernel(kernel).sum(-1)


def normalized_rows(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Normalized rows P_ij = K_ij / sum_k K_ik; a row of mass 0 stays 0.

    >>> normalized_rows(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.0000, 0.0000]])
    """
    mass = row_mass(kernel).unsqueeze(-1)
    return kernel / torch.where(mass > 0, mass, 1.0)


# a float64 model may compute its softmax in float32, so that its rows sum to 1 only within 3e-7
ROW_SUM_TOLERANCE = 1e-4


def attention_distributions(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Rows as probability distributions over keys: normalized where they sum to 1 up to single precision, 0 where they
    are 0 (a query that attends to no key). Raises HelmscopeError for any other row.

    >>> attention_distributions(torch.tensor([[0.50001, 0.5], [0.0, 0.0]])).sum(-1)
    tensor([1., 0.])
    """
    mass = row_mass(kernel).detach()
    invalid = ((mass - 1).abs() > ROW_SUM_TOLERANCE) & (mass != 0)
    if bool(invalid.any()):
        raise HelmscopeError(
            f"kernel has a row of mass {mass[invalid][0].item():.6g}, but to sample keys every row must have mass 1 "
            "(or 0): call normalized_rows(kernel) first"
        )
    return normalized_rows(kernel)


def row_entropy(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Entropy -sum_j P_ij log P_ij of each row in nats: 0 for a single key, log n for equal weights.

    >>> row_entropy(torch.ones(2, 2))  # log 2
    tensor([0.6931, 0.6931])
    """
    p = normalized_rows(kernel)
    # p log p is 0 at p = 0, where its slope is infinite: the gradient there is set to 0
    return _nan_without_keys(kernel, -(p * torch.log(torch.where(p > 0, p, 1.0))).sum(-1))


def effective_keys(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Effective number of keys n_eff = 1 / sum_j P_ij^2 of each query, between 1 and n [Helmholtz Transformer, no. 2]:
    the weighted mean of independent values has covariance Cov / n_eff.

    >>> effective_keys(torch.ones(2, 2))
    tensor([2., 2.])
    """
    p = normalized_rows(kernel)
    power = (p * p).sum(-1)
    return _nan_without_keys(kernel, 1 / torch.where(power > 0, power, 1.0))


def largest_weight(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Largest weight max_j P_ij of each row. A central limit theorem for the sum over keys requires it to vanish
    [Helmholtz Transformer, no. 2], which attention sinks rule out.

    >>> largest_weight(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 0.5000])
    """
    return _nan_without_keys(kernel, normalized_rows(kernel).amax(-1))


def first_token_mass(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """Weight P_i1 of the first visible token, the usual attention sink, for each query. Under a causal mask the first
    token always attends to itself with weight 1.

    >>> first_token_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.2500, 0.5000])
    """
    p = normalized_rows(kernel)
    first = used_tokens(p, visible).to(torch.int8).argmax(-1)
    column = first[..., None, None].expand(*p.shape[:-1], 1)
    return _nan_without_keys(kernel, p.gather(-1, column).squeeze(-1))


def future_mass(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Weight sum_{j > i} P_ij of later tokens, for each query i: 0 for a causal kernel.

    >>> future_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 0.0000])
    """
    return _nan_without_keys(kernel, normalized_rows(kernel).triu(1).sum(-1))


def received_mass(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """Column sums sum_i P_ij over the visible queries i: the attention that each token receives. Where every query has
    a visible key their mean is 1, so only their spread is informative: see ``bistochastic_defect``.

    >>> received_mass(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor([0.7500, 1.2500])
    """
    p = normalized_rows(kernel)
    return (p * visible_tokens(p, visible).unsqueeze(-1)).sum(-2)


def bistochastic_defect(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Deviation from a doubly stochastic kernel, max_j |sum_i P_ij - 1| over visible tokens.

    It is 0 where the normalized kernel is doubly stochastic and n - 1 where all queries attend to one token. A causal
    kernel reaches 0 only as the identity [Helmholtz Transformer, no. 11]. All tokens count equally: a kernel that is
    doubly stochastic with respect to unequal token weights may have a positive defect.

    >>> bistochastic_defect(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor(0.2500)
    """
    off = (received_mass(kernel, visible=visible) - 1).abs()
    return (off * used_tokens(kernel, visible)).amax(-1)


def column_sum_deviation_rms(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Root mean square deviation from 1 of the column sums of the normalized rows, over visible tokens; the largest
    deviation is ``bistochastic_defect``.

    >>> column_sum_deviation_rms(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    tensor(0.2500)
    """
    mask = used_tokens(kernel, visible)
    return _rms(received_mass(kernel, visible=visible) - 1, mask)


def _rms(deviation: Tensor, mask: Tensor) -> Tensor:
    """Root mean square over the tokens of a mask."""
    square = torch.where(mask, deviation * deviation, 0.0)
    return (square.sum(-1) / mask.sum(-1)).sqrt()


def symmetry_defect(
    kernel: Float[Tensor, "*batch n n"], *, visible: Bool[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Relative size |K - K^T|_F / (2 |K|_F) of the antisymmetric part among visible tokens: 0 for a symmetric kernel,
    at most 1 / sqrt 2 for weights >= 0; NaN for a kernel of zeros.

    It uses the kernel itself, not its normalized rows: USA with B = B^T is symmetric, SA is not.

    >>> symmetry_defect(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    tensor(0.7071)
    """
    return _symmetry_defect(check_kernel(kernel), visible)


def _symmetry_defect(kernel: Tensor, visible: Tensor | None, *, causal: bool = False) -> Tensor:
    """The size of the antisymmetric part; that of a ``causal`` kernel is twice that of what lies below the diagonal,
    which takes half the time.
    """
    mask = visible_tokens(kernel, visible).to(kernel.dtype)
    block = kernel if visible is None else mask.unsqueeze(-1) * kernel * mask.unsqueeze(-2)
    part = math.sqrt(2) * block.tril(-1) if causal else block - block.mT
    skew, whole = (torch.linalg.vector_norm(each, dim=(-1, -2)) for each in (part, block))
    share: Tensor = skew / (2 * whole)
    return share


def visible_tokens(
    kernel: Float[Tensor, "*batch n n"], visible: Bool[Tensor, "*batch n"] | None
) -> Bool[Tensor, "*batch n"]:
    """Mask of the tokens that take part in attention, checked; all tokens if None.

    >>> visible_tokens(torch.eye(2), None)
    tensor([True, True])
    """
    if visible is None:
        return torch.ones(kernel.shape[:-1], dtype=torch.bool, device=kernel.device)
    if not isinstance(visible, torch.Tensor):
        raise HelmscopeError(f"visible is {type_with_article(visible)}, but it must be a tensor of torch.bool")
    if visible.dtype != torch.bool or visible.shape != kernel.shape[-1 - visible.ndim : -1]:
        raise HelmscopeError(
            f"visible has dtype {visible.dtype} and shape {tuple(visible.shape)}, but a kernel of shape "
            f"{tuple(kernel.shape)} needs torch.bool and {tuple(kernel.shape[:-1])}"
        )
    if not bool(visible.any(-1).all()):
        raise HelmscopeError("visible leaves a system without any token, but every system needs at least one")
    return visible.expand(kernel.shape[:-1])


def used_tokens(
    kernel: Float[Tensor, "*batch n n"], visible: Bool[Tensor, "*batch n"] | None
) -> Bool[Tensor, "*batch n"]:
    """The visible tokens, checked; if None, those that attend to a token or are attended to, or all of a kernel of
    zeros. The rows of padding in the kernel of a recording are 0.

    >>> used_tokens(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), None)
    tensor([ True, False])
    """
    if visible is not None:
        return visible_tokens(kernel, visible)
    used = (kernel > 0).any(-1) | (kernel > 0).any(-2)
    return used | ~used.any(-1, keepdim=True)


NAMES = {
    "row_mass": "mean sum of a row of the kernel",
    "row_entropy": "mean entropy of the attention rows (nats)",
    "effective_keys": "mean effective number of keys of a row, 1 / sum_j P_ij^2",
    "largest_weight": "mean largest weight of a row",
    "first_token_mass": "mean weight of the first token in a row",
    "future_mass": "mean weight of later tokens in a row",
    "row_sum_deviation_max": "largest deviation of a row sum from 1",
    "row_sum_deviation_rms": "RMS deviation of the row sums from 1",
    "bistochastic_defect": "largest deviation of a column sum of the normalized rows from 1",
    "column_sum_deviation_rms": "RMS deviation of the column sums of the normalized rows from 1",
    "symmetry_defect": "size of the antisymmetric part of the kernel, |K - K^T| / (2 |K|)",
}
BOUNDS = {
    **dict.fromkeys(("row_mass", "row_entropy", "bistochastic_defect", "column_sum_deviation_rms"), AT_LEAST_0),
    **dict.fromkeys(("row_sum_deviation_max", "row_sum_deviation_rms"), AT_LEAST_0),
    **dict.fromkeys(("largest_weight", "first_token_mass", "future_mass", "symmetry_defect"), SHARE),
    "effective_keys": AT_LEAST_1,
}


class KernelStatistics(Instrument):
    """Instrument: statistics of the attention kernel in every layer (at every time of a simulation), for every head.

    The quantities are ``row_mass``, ``row_entropy``, ``effective_keys``, ``largest_weight``, ``first_token_mass``,
    ``future_mass``; the deviations from 1 of the row sums, ``row_sum_deviation_max`` and ``row_sum_deviation_rms``, and
    of the column sums of the normalized rows, ``bistochastic_defect`` (the largest) and ``column_sum_deviation_rms``;
    and ``symmetry_defect``. The result has an axis ``head`` where there are several heads. Quantities per query are
    averaged over the queries that attend to at least one key, by the weights of the trajectory: special tokens of a
    model are excluded as queries but not as keys, so the first of them may be the attention sink. Deviations and
    defects use all visible tokens. Raises HelmscopeError for a system without attention.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(3).expand(2, 3, 3), times=[0.0, 1.0])
    >>> statistics = run.replay(KernelStatistics())["kernel_statistics"]
    >>> statistics.effective_keys.dims, statistics.effective_keys.values.round(6).tolist()
    (('time', 'system'), [[3.0, 3.0], [3.0, 3.0]])
    """

    name = "kernel_statistics"
    needs = Needs.KERNEL

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the statistics of the kernel of a layer."""
        kernel, (rows, n) = check_kernel(tensors.kernel), tensors.state.shape[:2]
        if kernel.ndim not in (3, 4) or (kernel.shape[0], kernel.shape[-1]) != (rows, n):
            raise HelmscopeError(
                f"kernel of layer {context.layer} has shape {tuple(kernel.shape)}, but for {pluralized(rows, 'system')}"
                f" of {pluralized(n, 'token')} it must be ({rows}, {n}, {n}) or ({rows}, heads, {n}, {n})"
            )
        weights = token_weights(tensors.state, context.weights)
        self.keep(context, _statistics(kernel, weights.to(kernel), context.visible), axes=("head",))

    def result(self) -> xr.Dataset:
        """The statistics of every head (if there are several), layer and replicate."""
        measured = super().result()
        for name, value in measured.data_vars.items():
            value.attrs |= label_attributes(NAMES[str(name)])
        return with_bounds(measured, BOUNDS)


def kernel_statistics(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """Statistics of the attention kernel of a system, with replicates: ``KernelStatistics`` by one replay.

    Raises HelmscopeError for a system without attention. ``progress`` is called with the share of the work done.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> statistics = kernel_statistics(integrate(SA(beta=0.0), torch.eye(3), times=[0.0, 1.0]))
    >>> statistics.effective_keys.values.round(6).tolist()
    [[3.0], [3.0]]
    """
    instrument = KernelStatistics()
    return replayed(system, instrument, progress)


def _statistics(kernel: Tensor, weights: Tensor, visible: Tensor | None) -> dict[str, Tensor]:
    """One value per system, and per head where there are heads, of a kernel that has been checked."""
    if kernel.ndim == 4:
        weights = weights.unsqueeze(1).expand(kernel.shape[:-1])
        visible = None if visible is None else visible.unsqueeze(1).expand(kernel.shape[:-1])
    mask, blocks = visible_tokens(kernel, visible), row_blocks(len(kernel), kernel[0].numel())
    hidden = None if bool(mask.all()) else mask
    parts = [_reductions(kernel[b], mask[b], None if hidden is None else hidden[b]) for b in blocks]
    sums = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    mass, columns = sums["row_mass"], sums["columns"]
    has_keys = mass > 0
    per_mass, log_mass = 1 / torch.where(has_keys, mass, 1.0), torch.where(has_keys, mass, 1.0).log()
    per_query = {
        "row_entropy": log_mass - sums["logs"] * per_mass,
        "effective_keys": torch.where(has_keys, mass / torch.where(has_keys, sums["length"], 1.0), 1.0) ** 2,
        "largest_weight": sums["largest"] * per_mass,
        "first_token_mass": sums["first"] * per_mass,
        "future_mass": sums["later"] * per_mass,
    }
    means = token_mean(torch.stack(list(per_query.values())), weights * has_keys)
    return {
        "row_mass": token_mean(mass, weights),
        **dict(zip(per_query, means, strict=True)),
        "row_sum_deviation_max": ((mass - 1).abs() * mask).amax(-1),
        "row_sum_deviation_rms": _rms(mass - 1, mask),
        "bistochastic_defect": (columns.abs() * mask).amax(-1),
        "column_sum_deviation_rms": _rms(columns, mask),
        "symmetry_defect": sums["symmetry_defect"],
    }


@full_precision
def _reductions(kernel: Tensor, mask: Tensor, visible: Tensor | None) -> dict[str, Tensor]:
    """The sums over pairs of the kernel of some systems. Rows are normalized afterwards, by their sums, except in the
    deviations of column sums from 1, ``columns``.
    """
    mass, later = kernel.sum(-1), kernel.triu(1).sum(-1)
    share = mask / torch.where(mass > 0, mass, 1.0)
    first = mask.to(torch.int8).argmax(-1)[..., None, None].expand(*kernel.shape[:-1], 1)
    return {
        "row_mass": mass,
        # K log K is 0 at K = 0; torch.special.xlogy takes twice the time
        "logs": kernel.clamp(min=torch.finfo(kernel.dtype).tiny).log_().mul_(kernel).sum(-1),
        "length": torch.linalg.vector_norm(kernel, dim=-1),
        "largest": kernel.amax(-1),
        "first": kernel.gather(-1, first).squeeze(-1),
        "later": later,
        "columns": (share.unsqueeze(-2) @ kernel).squeeze(-2) - 1,
        "symmetry_defect": _symmetry_defect(kernel, visible, causal=not bool(later.any())),
    }


def _nan_without_keys(kernel: Tensor, value: Tensor) -> Tensor:
    return torch.where(kernel.sum(-1) > 0, value, torch.nan)
