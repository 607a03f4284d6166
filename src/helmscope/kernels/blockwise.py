"""Attention sums block by block: no n x n matrix is ever stored, and every block fits in the cache.

With a shift c_i >= l_ij known in advance, one product [q_i, -c_i] [k_j, 1]^T yields l_ij - c_i, and a second one,
e^{l_ij - c_i} [m_j v_j, m_j], the sum and its mass Z_i. Blocks are stored with a row for each key, because the second
product, of few columns, is up to three times faster so. By the Cauchy-Schwarz inequality c_i = |q_i| max_j |k_j| is
such a shift; it is used where e^{-2 c_i} does not underflow. Elsewhere a first pass computes max_j l_ij.

torch's scaled_dot_product_attention stores no n x n matrix either, but it does not return Z and cannot omit a token's
own term, which absorbs the digits of the others. It is not faster: 0.8 to 1.2 times the speed of these blocks on one
core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.request import AttentionSum, Request, transformed
from helmscope.types import HelmscopeError, check_integer
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# (queries, keys); a block on a CPU is 1 MB of float64 numbers, which fits in a cache
DEFAULT_BLOCK = {"cpu": (256, 512), "cuda": (2_048, 2_048)}
MAX_EXPONENT = {torch.float64: 600.0, torch.float32: 60.0}  # e^-exponent is still far above underflow
HIDDEN_LOGIT = -1e30  # its exponential is 0; finite, because -inf would turn into NaN in a matrix product


@dataclass(frozen=True)
class Blockwise(ConciseRepr):
    """Method that sums block by block, on every device, with every mask, bias and derivative.

    A gradient costs one more pass, because blocks are recomputed in the backward pass. ``block`` is (queries, keys) per
    block; None chooses a fast size for the device. The rounding of a sum depends on ``block``, but not on the batch.

    >>> x = torch.eye(2)
    >>> Blockwise().sum(Request(0.0 * x, x, x)).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.block is None:
            return
        if not isinstance(self.block, tuple) or len(self.block) != 2:
            raise HelmscopeError(f"block is {self.block!r}, but it must be two whole numbers (queries, keys) or None")
        for size in self.block:
            check_integer("block", size, at_least=1)

    def unsupported_reason(self, request: Request) -> str | None:
        """Why it does not support a request; None if it does.

        >>> x = torch.eye(2)
        >>> Blockwise().unsupported_reason(Request(x, x, x)) is None
        True
        """
        return (
            None
            if request.transform_logits is None
            else "it never stores the whole matrix of logits, which this field needs"
        )

    def sum(self, request: Request) -> AttentionSum:
        """Compute the sums; the request is not checked.

        >>> x = torch.eye(2)
        >>> Blockwise(block=(1, 2)).sum(Request(x, x, x)).mean
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
        """
        batch, n = request.query.shape[:-2], request.query.shape[-2]
        # system by system: the rounding of a batched product would depend on the size of the batch
        sums = [self._sum_one(request.system(batch, k)) for k in range(batch.numel())]
        parts = zip(*((s.total, s.shift, s.mass, s.mass_shift) for s in sums), strict=True)
        return AttentionSum(*(torch.stack(part).reshape(*batch, n, part[0].shape[-1]) for part in parts))

    def _sum_one(self, request: Request) -> AttentionSum:
        """The sums of one system: a request without batch axes, with ``skip_self`` as a bool."""
        device = request.query.device.type
        block = DEFAULT_BLOCK.get(device, DEFAULT_BLOCK["cpu"]) if self.block is None else self.block
        ones = torch.ones_like(request.key[:, :1])
        weights = ones if request.weights is None else request.weights.unsqueeze(-1)
        hidden = torch.where(weights == 0, HIDDEN_LOGIT, 0.0).to(ones)
        own = (
            _self_logit(request) + hidden if request.skip_self else torch.full_like(request.query[:, :1], HIDDEN_LOGIT)
        )
        shift = _shift(request, own.detach(), hidden, block)
        query = torch.cat([request.query, -shift, torch.ones_like(shift)], -1).mT.contiguous()
        key = torch.cat([request.key, ones, hidden], -1)
        value = (weights * torch.cat([request.value, ones], -1)).mT.contiguous()
        recompute = request.needs_gradient and not transformed()
        blocks = []
        for rows in _blocks(len(request.query), block[0]):
            arguments = (query, key, value, request, rows, block[1])
            blocks.append(
                checkpoint(_block_sums, *arguments, use_reentrant=False) if recompute else _block_sums(*arguments)
            )
        sums = torch.cat(blocks, -1).mT.contiguous()
        total, mass = sums[:, :-1], sums[:, -1:]
        if not request.skip_self:
            return AttentionSum(total, shift, mass, shift)
        mass_shift = torch.maximum(shift, own.detach())
        mass = mass * torch.exp(shift - mass_shift) + weights * torch.exp(own - mass_shift)
        return AttentionSum(total, shift, mass, mass_shift)


def _self_logit(request: Request) -> Float[Tensor, "n 1"]:
    """The logit l_ii of every token for itself."""
    logit = (request.query * request.key).sum(-1, keepdim=True)
    return logit if request.bias is None else logit + request.bias.diagonal().unsqueeze(-1)


def _shift(request: Request, self_logit: Tensor, hidden: Tensor, block: tuple[int, int]) -> Float[Tensor, "n 1"]:
    """A detached upper bound on the logits that token i sums, close enough to the largest to avoid underflow."""
    request = replace(request, bias=None if request.bias is None else request.bias.detach())
    query, key = request.query.detach(), request.key.detach()
    if request.bias is None and not transformed():
        longest = torch.linalg.vector_norm(key, dim=-1).amax()
        bound: Tensor = torch.linalg.vector_norm(query, dim=-1, keepdim=True) * longest
        if bool(2 * bound.amax() <= MAX_EXPONENT[query.dtype]):
            return bound
    query = torch.cat([query, torch.ones_like(query[:, :1])], -1).mT.contiguous()
    key = torch.cat([key, hidden], -1)
    row_maxima = []
    for rows in _blocks(len(self_logit), block[0]):
        highest = torch.full_like(self_logit[rows], -torch.inf)
        for columns in _key_blocks(request, rows, block[1]):
            logits = _masked_logits(query, key, request, rows, columns)
            highest = torch.maximum(highest, logits.amax(0).unsqueeze(-1))
        row_maxima.append(highest)
    maximum = torch.cat(row_maxima)
    fallback = torch.where(self_logit > HIDDEN_LOGIT / 2, self_logit, 0.0)  # if no other key is visible
    return torch.where(maximum < HIDDEN_LOGIT / 2, fallback, maximum)  # NaN is kept


@full_precision
def _block_sums(query: Tensor, key: Tensor, value: Tensor, request: Request, rows: slice, size: int) -> Tensor:
    """sum_j e^{l_ij} value_j for a block of queries, one column for each, with l as in ``_masked_logits``."""
    out = torch.zeros(len(value), rows.stop - rows.start, dtype=value.dtype, device=value.device)
    for columns in _key_blocks(request, rows, size):
        out = torch.addmm(out, value[:, columns], _masked_logits(query, key, request, rows, columns).exp_())
    return out


@full_precision
def _masked_logits(query: Tensor, key: Tensor, request: Request, rows: slice, columns: slice) -> Tensor:
    """(key @ query + bias^T) of a block, with a row for each key j and a column for each query i; -inf where the sum of
    token i omits token j.
    """
    logits = key[columns] @ query[:, rows]
    if request.bias is not None:
        logits = logits + request.bias[rows, columns].mT
    if not (request.causal or request.skip_self) or columns.start >= rows.stop or rows.start >= columns.stop:
        return logits
    i = torch.arange(rows.start, rows.stop, device=logits.device)
    j = torch.arange(columns.start, columns.stop, device=logits.device)[:, None]
    omitted = i == j if request.skip_self else torch.zeros_like(i == j)
    return logits.masked_fill_(omitted | (j > i) if request.causal else omitted, -torch.inf)


def _blocks(n: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]


def _key_blocks(request: Request, rows: slice, size: int) -> list[slice]:
    """The blocks of keys that are visible to a block of queries."""
    return _blocks(rows.stop if request.causal else len(request.key), size)
