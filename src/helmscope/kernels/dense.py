"""Attention sums with the n x n matrix of weights stored: the reference, and the fastest for small systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.kernel import MOST_STORED, AttentionSum, Request

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """Every pair stored: for up to n = 2,048 tokens, and for fields that need the whole matrix of logits.

    >>> x = torch.eye(2)
    >>> Dense().sum(Request(0.0 * x, x, x)).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    def refuses(self, request: Request) -> str | None:
        """It stores n x n pairs."""
        n = request.tokens
        if n > MOST_STORED and request.settle is None:
            return f"n is {n}, and it stores the n x n pairs of at most {MOST_STORED} tokens: take Streaming()"
        return None

    def sum(self, request: Request) -> AttentionSum:
        """The sums, unchecked. Any derivative, any transform."""
        pairs = settled_logits(request)
        return attention_sum(pairs, request.value, weights=request.weights, skip_self=request.skip_self)


def settled_logits(request: Request) -> Float[Tensor, "*batch n n"]:
    """The matrix of logits, -inf where token i does not see token j, after what the field makes of it.

    >>> settled_logits(Request(torch.eye(2), torch.eye(2), torch.eye(2), settle=lambda pairs, weights: -pairs))
    tensor([[-1., -0.],
            [-0., -1.]])
    """
    pairs = raw_logits(request)
    return pairs if request.settle is None else request.settle(pairs, request.weights)


def raw_logits(request: Request) -> Float[Tensor, "*batch n n"]:
    """The matrix of logits before a field settles it.

    >>> raw_logits(Request(torch.eye(2), torch.eye(2), torch.eye(2), causal=True))
    tensor([[1., -inf],
            [0., 1.]])
    """
    given = request
    return logits(given.query, given.key, bias=given.bias, causal=given.causal, weights=given.weights)


@full_precision
def logits(
    query: Float[Tensor, "*batch n d"],
    key: Float[Tensor, "*batch m d"],
    *,
    bias: Float[Tensor, "n m"] | None = None,
    causal: bool = False,
    weights: Float[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch n m"]:
    """l_ij = <query_i, key_j> + bias_ij, and -inf where token i does not see token j: later tokens under a causal
    mask, tokens of weight 0.

    >>> logits(torch.eye(2), torch.eye(2), causal=True)
    tensor([[1., -inf],
            [0., 1.]])
    """
    pairs = query @ key.mT
    if bias is not None:
        pairs = pairs + bias
    if causal:
        pairs = pairs.masked_fill(_later(pairs.shape[-1], pairs.device), -torch.inf)
    if weights is not None:
        pairs = pairs.masked_fill((weights == 0).unsqueeze(-2), -torch.inf)
    return pairs


def matrix_product(x: Float[Tensor, "*batch n d"], matrix: Float[Tensor, "*heads d k"]) -> Float[Tensor, "*batch n k"]:
    """x @ matrix, system by system: torch would fold the batch into one product, whose bits depend on its size.

    ``matrix`` is one for all, or one for each entry of the last axes of the batch.

    >>> matrix_product(torch.ones(2, 1, 2), torch.eye(2)).shape
    torch.Size([2, 1, 2])
    """
    return _product(x, matrix.expand(*x.shape[:-2], *matrix.shape[-2:]))


@full_precision
def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; as a plain sum where b has one column, as the last bit of such a product depends on the batch."""
    return (a * b.mT).sum(-1, keepdim=True) if b.shape[-1] == 1 else a @ b


def _later(n: int, device: torch.device) -> Bool[Tensor, "n n"]:
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def attention_sum(
    pairs: Float[Tensor, "*batch n m"],
    value: Float[Tensor, "*batch m d"],
    *,
    weights: Float[Tensor, "*batch m"] | None = None,
    skip_self: bool | Bool[Tensor, "*heads 1 1"] = False,
) -> AttentionSum:
    """Sum m_j e^{l_ij} v_j over the keys j, and m_j e^{l_ij}, for logits ``pairs`` and weights m (1 where None).

    ``skip_self`` leaves j = i out of the first sum, never out of the mass. A caller who will project the sum on the
    tangent space at x_i uses it where v_i is parallel to x_i: the term would vanish in exact arithmetic, but it is
    e^{beta (1 - <x_i, x_j>)} times larger than the others and would swallow their digits. It may differ among heads.

    >>> attention_sum(torch.zeros(2, 2), torch.tensor([[1.0], [3.0]])).mean
    tensor([[2.],
            [2.]])
    """
    if skip_self is False:
        terms, shift = _terms(pairs, weights, 0.0)
        return AttentionSum(_product(terms, value), shift, terms.sum(-1, keepdim=True), shift)
    own = pairs.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    own_level = own.detach()
    itself = torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device)
    floor = torch.where(own_level > -torch.inf, own_level, 0.0)
    terms, shift = _terms(pairs.masked_fill(itself & skip_self, -torch.inf), weights, floor)
    mass_shift = torch.maximum(shift, own_level)
    own_mass = torch.exp(own - mass_shift) * skip_self
    if weights is not None:
        own_mass = own_mass * weights.unsqueeze(-1)
    mass = terms.sum(-1, keepdim=True) * torch.exp(shift - mass_shift) + own_mass
    return AttentionSum(_product(terms, value), shift, mass, mass_shift)


def _terms(pairs: Tensor, weights: Tensor | None, floor: Tensor | float) -> tuple[Tensor, Tensor]:
    """m_j e^{l_ij - shift_i} and the shift, the highest logit, or ``floor`` where a query sees no key."""
    # the scales are constants to autograd: they cancel, so the gradient is exact without them
    highest = pairs.detach().amax(-1, keepdim=True)
    shift = torch.where(highest > -torch.inf, highest, floor)
    terms = torch.exp(pairs - shift)
    return terms if weights is None else terms * weights.unsqueeze(-2), shift
