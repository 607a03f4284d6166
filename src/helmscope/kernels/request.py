"""The interface of summation methods: a ``Summation`` takes a ``Request`` and returns an ``AttentionSum``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

MAX_DENSE_TOKENS = 2_048  # the largest n for which an n x n matrix is stored by choice


@dataclass(frozen=True, eq=False)
class AttentionSum:
    """Attention sums with their exponential scales factored out, so that e^beta never overflows:

        sum_j m_j e^{l_ij} v_j = e^{shift_i} total_i,        Z_i = sum_j m_j e^{l_ij} = e^{mass_shift_i} mass_i.

    ``mean`` is the ratio of the two; a query that attends to no key has total 0, mass 0 and mean 0.
    """

    total: Float[Tensor, "*batch n d"]
    shift: Float[Tensor, "*batch n 1"]
    mass: Float[Tensor, "*batch n 1"]
    mass_shift: Float[Tensor, "*batch n 1"]

    @property
    def mean(self) -> Float[Tensor, "*batch n d"]:
        """Softmax average sum_j p_ij v_j."""
        mass = self.mass.clamp(min=torch.finfo(self.mass.dtype).tiny)  # avoids 0 / 0 for a query without visible keys
        ratio = self.total / mass
        return ratio if self.shift is self.mass_shift else ratio * torch.exp(self.shift - self.mass_shift)

    @property
    def log_mass(self) -> Float[Tensor, "*batch n 1"]:
        """log Z_i, -inf where token i attends to no key."""
        return self.mass_shift + torch.log(self.mass)


@dataclass(frozen=True, eq=False)
class Request:
    """The input of an attention sum: sum_j m_j e^{l_ij} v_j and Z_i = sum_j m_j e^{l_ij} with

        l_ij = <query_i, key_j> + bias_ij,   over all j of weight m_j > 0, with ``causal`` over those with j <= i.

    ``skip_self`` omits j = i from the first sum, never from Z. It is meant for callers that project the sum onto the
    tangent space at x_i and for which v_i is parallel to x_i: the term would vanish in exact arithmetic, but is
    e^{beta (1 - <x_i, x_j>)} times larger than the others and would absorb their digits. It may differ between heads.
    ``beta`` is set if query = beta key and value = key; methods for unit vectors check the norms themselves.
    ``transform_logits`` changes the whole matrix of logits before it is summed; few methods support that.
    Queries may belong to another cloud, n tokens that attend to m others: then no token is its own key, and ``causal``,
    ``skip_self`` and ``beta`` keep their defaults.
    """

    query: Float[Tensor, "*batch n r"]
    key: Float[Tensor, "*batch m r"]
    value: Float[Tensor, "*batch m d"]
    weights: Float[Tensor, "*batch m"] | None = None
    bias: Float[Tensor, "*heads n m"] | None = None
    causal: bool = False
    skip_self: bool | Bool[Tensor, "*heads 1 1"] = False
    beta: float | None = None
    transform_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All input tensors that are not None."""
        candidates = (self.query, self.key, self.value, self.weights, self.bias)
        return [tensor for tensor in candidates if tensor is not None]

    @property
    def tokens(self) -> int:
        """The number of tokens, of the larger cloud if there are two."""
        return max(self.query.shape[-2], self.key.shape[-2])

    def system(self, batch: torch.Size, k: int) -> Request:
        """System ``k`` of a flattened batch as a request without batch axes, with ``skip_self`` as a bool."""
        n, m = self.query.shape[-2], self.key.shape[-2]
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(k, device="cpu"), batch)) if batch else ()
        skip = self.skip_self
        return replace(
            self,
            query=self.query[index],
            key=self.key[index],
            value=self.value[index],
            weights=None if self.weights is None else self.weights.expand(*batch, m)[index],
            bias=None if self.bias is None else self.bias.expand(*batch, n, m)[index],
            skip_self=skip if isinstance(skip, bool) else bool(skip.expand(*batch, 1, 1)[index]),
        )

    @property
    def needs_gradient(self) -> bool:
        """Whether the sum may be differentiated: in backward mode, in forward mode or by a functorch transform."""
        if transformed():
            return True
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            return True
        forward_ad = torch.autograd.forward_ad
        if forward_ad._current_level < 0:  # no dual tensors exist: unpacking each takes longer than a small sum
            return False
        tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in self.tensors]  # type: ignore[no-untyped-call]
        return any(tangent is not None for tangent in tangents)


def has_visible_key(request: Request) -> Bool[Tensor, "*batch n 1"]:
    """Whether the sum of token i has at least one term: a j of positive weight that neither the causal mask nor the
    bias hides, other than i itself if ``skip_self``.

    >>> x = torch.eye(2)
    >>> has_visible_key(Request(x, x, x, causal=True, skip_self=True)).squeeze(-1)
    tensor([False,  True])
    """
    n, device = request.query.shape[-2], request.query.device
    weights = torch.ones(n, device=device) if request.weights is None else request.weights
    visible = weights > 0
    if request.bias is None:
        count = visible.cumsum(-1) if request.causal else visible.sum(-1, keepdim=True)
        count = count.unsqueeze(-1) - (visible.unsqueeze(-1) & torch.as_tensor(request.skip_self, device=device)).int()
        return (count > 0).expand(*request.query.shape[:-1], 1)
    diagonal = torch.eye(n, dtype=torch.bool, device=device)
    summed = (request.bias > -torch.inf) & visible.unsqueeze(-2)
    summed = summed & ~(diagonal & torch.as_tensor(request.skip_self, device=device))
    if request.causal:
        summed = summed & torch.ones(n, n, dtype=torch.bool, device=device).tril()
    return summed.any(-1, keepdim=True).expand(*request.query.shape[:-1], 1)


def transformed() -> bool:
    """Whether the call runs under a functorch transform such as ``vmap`` or ``jacfwd``, where control flow must not
    depend on values.

    >>> transformed()
    False
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def may_be_differentiated(x: Tensor) -> bool:
    """Whether results computed from x may be differentiated: in backward mode, in forward mode or by a transform.

    >>> may_be_differentiated(torch.ones(2)), may_be_differentiated(torch.ones(2, requires_grad=True))
    (False, True)
    """
    return x.requires_grad or transformed() or torch.autograd.forward_ad._current_level >= 0


@runtime_checkable
class Summation(Protocol):
    """An algorithm that computes the sums of a ``Request``."""

    def unsupported_reason(self, request: Request) -> str | None:
        """Why this method does not support a request, as the end of a sentence; None if it does."""

    def sum(self, request: Request) -> AttentionSum:
        """Compute the sums; the request is not checked."""
