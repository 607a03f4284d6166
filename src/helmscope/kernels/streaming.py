"""Attention sums block by block: no n x n is ever stored, and every block stays in the cache.

With a shift c_i >= l_ij that is known beforehand, one product [q_i, -c_i] [k_j, 1]^T gives l_ij - c_i, and one more,
e^{l_ij - c_i} [m_j v_j, m_j], the sum and its mass Z_i. By Cauchy and Schwarz c_i = |q_i| max_j |k_j| serves where
2 c_i is far from the range of the dtype; elsewhere a first pass finds max_j l_ij.

torch's scaled_dot_product_attention stores no n x n either. It is not used: it gives no Z and cannot leave out the own
term of a token, which swallows the digits of the others; its speed is that of these blocks, 0.8 to 1.2 times on a core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.kernel import AttentionSum, Request, transformed
from helmscope.types import HelmscopeError, whole_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

BLOCK = {"cpu": (256, 512), "cuda": (2_048, 2_048)}  # queries, keys; on a CPU 1 MB of float64, which a cache holds
RANGE = {torch.float64: 600.0, torch.float32: 60.0}  # down to e^-range a sum keeps all its digits
NOTHING = -1e30  # a logit whose exponential is 0


@dataclass(frozen=True)
class Streaming:
    """Blocks of queries against blocks of keys, on every device, with every mask, bias and derivative.

    A gradient costs one more pass: blocks are computed again on the way back. ``block`` is (queries, keys) of a block;
    where None, what is fast on the device. The bits depend on it and not on the batch.

    >>> x = torch.eye(2)
    >>> Streaming().sum(Request(0.0 * x, x, x)).mean
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
            whole_number("block", size, at_least=1)

    def refuses(self, request: Request) -> str | None:
        """It has no matrix of logits to show."""
        return None if request.settle is None else "it never has the whole matrix of logits, which this field needs"

    def sum(self, request: Request) -> AttentionSum:
        """The sums, unchecked."""
        batch, n = request.query.shape[:-2], request.query.shape[-2]
        # one after the other: a product of many systems would have bits that depend on their number
        sums = [self._one(request.system(batch, k)) for k in range(batch.numel())]
        parts = zip(*((s.total, s.shift, s.mass, s.mass_shift) for s in sums), strict=True)
        return AttentionSum(*(torch.stack(part).reshape(*batch, n, part[0].shape[-1]) for part in parts))

    def _one(self, given: Request) -> AttentionSum:
        """One system: no batch axes, and ``skip_self`` a bool."""
        block = BLOCK.get(given.query.device.type, BLOCK["cpu"]) if self.block is None else self.block
        ones = torch.ones_like(given.key[:, :1])
        mass = ones if given.weights is None else given.weights.unsqueeze(-1)
        hidden = torch.where(mass == 0, NOTHING, 0.0).to(ones)
        own = _own(given) + hidden if given.skip_self else torch.full_like(given.query[:, :1], NOTHING)
        shift = _shift(given, own.detach(), hidden, block)
        query = torch.cat([given.query, -shift, torch.ones_like(shift)], -1)
        key = torch.cat([given.key, ones, hidden], -1).mT.contiguous()
        value = mass * torch.cat([given.value, ones], -1)
        again = given.needs_gradient and not transformed()
        out = []
        for rows in _parts(len(query), block[0]):
            parts = (query[rows], key, value, given, rows, block[1])
            out.append(checkpoint(_sums, *parts, use_reentrant=False) if again else _sums(*parts))
        found = torch.cat(out)
        total, others = found[:, :-1], found[:, -1:]
        if not given.skip_self:
            return AttentionSum(total, shift, others, shift)
        mass_shift = torch.maximum(shift, own.detach())
        seen = others * torch.exp(shift - mass_shift) + mass * torch.exp(own - mass_shift)
        return AttentionSum(total, shift, seen, mass_shift)


def _own(given: Request) -> Float[Tensor, "n 1"]:
    """l_ii, the logit of every token for itself."""
    own = (given.query * given.key).sum(-1, keepdim=True)
    return own if given.bias is None else own + given.bias.diagonal().unsqueeze(-1)


def _shift(given: Request, own: Tensor, hidden: Tensor, block: tuple[int, int]) -> Float[Tensor, "n 1"]:
    """At least every logit that token i sums, and near enough to the greatest; a constant to autograd."""
    given = replace(given, bias=None if given.bias is None else given.bias.detach())
    query, key = given.query.detach(), given.key.detach()
    if given.bias is None and not transformed():
        longest = torch.linalg.vector_norm(key, dim=-1).amax()
        bound: Tensor = torch.linalg.vector_norm(query, dim=-1, keepdim=True) * longest
        if bool(2 * bound.amax() <= RANGE[query.dtype]):
            return bound
    query = torch.cat([query, torch.ones_like(query[:, :1])], -1)
    key = torch.cat([key, hidden], -1).mT.contiguous()
    tops = []
    for rows in _parts(len(query), block[0]):
        top = torch.full_like(own[rows], -torch.inf)
        for columns in _columns(given, rows, block[1]):
            top = torch.maximum(top, _levels(query[rows], key, given, rows, columns).amax(-1, keepdim=True))
        tops.append(top)
    highest = torch.cat(tops)
    floor = torch.where(own > NOTHING / 2, own, 0.0)  # of a token that sees nobody else
    return torch.where(highest < NOTHING / 2, floor, highest)  # NaN stays


@full_precision
def _sums(query: Tensor, key: Tensor, value: Tensor, given: Request, rows: slice, size: int) -> Tensor:
    """sum_j e^{levels_ij} value_j of a block of queries."""
    out = torch.zeros(len(query), value.shape[-1], dtype=value.dtype, device=value.device)
    for columns in _columns(given, rows, size):
        out = torch.addmm(out, _levels(query, key, given, rows, columns).exp_(), value[columns])
    return out


@full_precision
def _levels(query: Tensor, key: Tensor, given: Request, rows: slice, columns: slice) -> Tensor:
    """query @ key + bias of a block, -inf where token i does not sum token j."""
    levels = query @ key[:, columns]
    if given.bias is not None:
        levels = levels + given.bias[rows, columns]
    if not (given.causal or given.skip_self) or columns.start >= rows.stop or rows.start >= columns.stop:
        return levels
    i = torch.arange(rows.start, rows.stop, device=levels.device)[:, None]
    j = torch.arange(columns.start, columns.stop, device=levels.device)
    unseen = i == j if given.skip_self else torch.zeros_like(i == j)
    return levels.masked_fill_(unseen | (j > i) if given.causal else unseen, -torch.inf)


def _parts(n: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]


def _columns(given: Request, rows: slice, size: int) -> list[slice]:
    """The blocks of keys that a block of queries sees."""
    return _parts(rows.stop if given.causal else len(given.key), size)
