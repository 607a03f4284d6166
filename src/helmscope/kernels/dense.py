"""Attention sums that store the n x n matrix of logits: the reference implementation, and the fastest for small n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.request import MAX_DENSE_TOKENS, AttentionSum, Request

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """Method that stores all pairs: for up to n = 2,048 tokens, and for fields that need the whole matrix of logits.

    >>> x = torch.eye(2)
    >>> Dense().sum(Request(0.0 * x, x, x)).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    def unsupported_reason(self, request: Request) -> str | None:
        """Why it does not support a request; None if it does.

        >>> x = torch.zeros(3000, 2)
        >>> Dense().unsupported_reason(Request(x, x, x))
        'n is 3000, and it stores n x n pairs for at most 2048 tokens: use Blockwise()'
        """
        n = request.tokens
        if n > MAX_DENSE_TOKENS and request.transform_logits is None:
            return f"n is {n}, and it stores n x n pairs for at most {MAX_DENSE_TOKENS} tokens: use Blockwise()"
        return None

    def sum(self, request: Request) -> AttentionSum:
        """Compute the sums; the request is not checked. Supports all derivatives and functorch transforms.

        >>> x = torch.eye(2)
        >>> Dense().sum(Request(x, x, x)).mean
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
        """
        pairs = transformed_logits(request)
        return attention_sum(pairs, request.value, weights=request.weights, skip_self=request.skip_self)


def transformed_logits(request: Request) -> Float[Tensor, "*batch n n"]:
    """Matrix of logits, -inf where token i does not attend to token j, after ``request.transform_logits``.

    >>> eye = torch.eye(2)
    >>> transformed_logits(Request(eye, eye, eye, transform_logits=lambda pairs, weights: -pairs))
    tensor([[-1., -0.],
            [-0., -1.]])
    """
    pairs = untransformed_logits(request)
    return pairs if request.transform_logits is None else request.transform_logits(pairs, request.weights)


def untransformed_logits(request: Request) -> Float[Tensor, "*batch n n"]:
    """Matrix of logits before ``request.transform_logits``.

    >>> untransformed_logits(Request(torch.eye(2), torch.eye(2), torch.eye(2), causal=True))
    tensor([[1., -inf],
            [0., 1.]])
    """
    return logits(request.query, request.key, bias=request.bias, causal=request.causal, weights=request.weights)


@full_precision
def logits(
    query: Float[Tensor, "*batch n d"],
    key: Float[Tensor, "*batch m d"],
    *,
    bias: Float[Tensor, "n m"] | None = None,
    causal: bool = False,
    weights: Float[Tensor, "*batch m"] | None = None,
) -> Float[Tensor, "*batch n m"]:
    """Logits l_ij = <query_i, key_j> + bias_ij, and -inf where token i does not attend to token j: for later tokens
    under a causal mask and for tokens of weight 0.

    >>> logits(torch.eye(2), torch.eye(2), causal=True)
    tensor([[1., -inf],
            [0., 1.]])
    """
    pairs = query @ key.mT
    if bias is not None:
        pairs = pairs + bias
    if causal:
        pairs = pairs.masked_fill(_causal_mask(pairs.shape[-1], pairs.device), -torch.inf)
    if weights is not None:
        pairs = pairs.masked_fill((weights == 0).unsqueeze(-2), -torch.inf)
    return pairs


def matrix_product(x: Float[Tensor, "*batch n d"], matrix: Float[Tensor, "*heads d k"]) -> Float[Tensor, "*batch n k"]:
    """x @ matrix, computed system by system, so that a system's result does not depend on its batch: torch would fold
    the batch into one product, whose rounding depends on its size.

    ``matrix`` is shared by all systems, or there is one for each entry of the last batch axes.

    >>> matrix_product(torch.ones(2, 1, 2), torch.eye(2)).shape
    torch.Size([2, 1, 2])
    """
    return _product(x, matrix.expand(*x.shape[:-2], *matrix.shape[-2:]))


@full_precision
def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; as a plain sum if b has one column, because the rounding of such a product depends on the batch."""
    return (a * b.mT).sum(-1, keepdim=True) if b.shape[-1] == 1 else a @ b


def _causal_mask(n: int, device: torch.device) -> Bool[Tensor, "n n"]:
    """True for the pairs j > i that a causal mask hides."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def attention_sum(
    pairs: Float[Tensor, "*batch n m"],
    value: Float[Tensor, "*batch m d"],
    *,
    weights: Float[Tensor, "*batch m"] | None = None,
    skip_self: bool | Bool[Tensor, "*heads 1 1"] = False,
) -> AttentionSum:
    """Sums of m_j e^{l_ij} v_j and of m_j e^{l_ij} over the keys j, for logits ``pairs`` and weights m (all 1 if None).

    ``skip_self`` omits j = i from the first sum, never from the mass. It is meant for callers that project the sum onto
    the tangent space at x_i and for which v_i is parallel to x_i: the term would vanish in exact arithmetic, but is
    e^{beta (1 - <x_i, x_j>)} times larger than the others and would absorb their digits. It may differ between heads.

    >>> attention_sum(torch.zeros(2, 2), torch.tensor([[1.0], [3.0]])).mean
    tensor([[2.],
            [2.]])
    """
    if skip_self is False:
        terms, shift = _terms(pairs, weights, 0.0)
        return AttentionSum(_product(terms, value), shift, terms.sum(-1, keepdim=True), shift)
    self_logit = pairs.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    self_shift = self_logit.detach()
    diagonal = torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device)
    fallback = torch.where(self_shift > -torch.inf, self_shift, 0.0)
    terms, shift = _terms(pairs.masked_fill(diagonal & skip_self, -torch.inf), weights, fallback)
    mass_shift = torch.maximum(shift, self_shift)
    self_mass = torch.exp(self_logit - mass_shift) * skip_self
    if weights is not None:
        self_mass = self_mass * weights.unsqueeze(-1)
    mass = terms.sum(-1, keepdim=True) * torch.exp(shift - mass_shift) + self_mass
    return AttentionSum(_product(terms, value), shift, mass, mass_shift)


def _terms(pairs: Tensor, weights: Tensor | None, fallback: Tensor | float) -> tuple[Tensor, Tensor]:
    """m_j e^{l_ij - shift_i} and the shift: the highest logit, or ``fallback`` for a query with no visible key."""
    # the shifts are detached: they cancel, so the gradient is exact without them
    highest = pairs.detach().amax(-1, keepdim=True)
    shift = torch.where(highest > -torch.inf, highest, fallback)
    terms = torch.exp(pairs - shift)
    return terms if weights is None else terms * weights.unsqueeze(-2), shift
