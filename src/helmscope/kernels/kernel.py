"""What a field asks of a kernel, what it gets back, and what a kernel is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

MOST_STORED = 2_048  # tokens of which a kernel may store the n x n pairs


@dataclass(frozen=True, eq=False)
class AttentionSum:
    """Sums of exponentials with their scale kept apart, so that e^beta never leaves the dtype:

        sum_j m_j e^{l_ij} v_j = e^{shift_i} total_i,        Z_i = sum_j m_j e^{l_ij} = e^{mass_shift_i} mass_i.

    ``mean`` is their ratio; a query that sees no key has total 0, mass 0 and mean 0.
    """

    total: Float[Tensor, "*batch n d"]
    shift: Float[Tensor, "*batch n 1"]
    mass: Float[Tensor, "*batch n 1"]
    mass_shift: Float[Tensor, "*batch n 1"]

    @property
    def mean(self) -> Float[Tensor, "*batch n d"]:
        """The softmax average sum_j p_ij v_j."""
        mass = self.mass.clamp(min=torch.finfo(self.mass.dtype).tiny)  # 0 / 0 where nobody is seen
        ratio = self.total / mass
        return ratio if self.shift is self.mass_shift else ratio * torch.exp(self.shift - self.mass_shift)

    @property
    def log_mass(self) -> Float[Tensor, "*batch n 1"]:
        """log Z_i, -inf where token i sees no key."""
        return self.mass_shift + torch.log(self.mass)


@dataclass(frozen=True, eq=False)
class Request:
    """A sum over tokens: sum_j m_j e^{l_ij} v_j and Z_i = sum_j m_j e^{l_ij} with

        l_ij = <query_i, key_j> + bias_ij,   over all j of weight m_j > 0, with ``causal`` over those with j <= i.

    ``skip_self`` leaves j = i out of the first sum, never out of Z: a caller who will project the sum on the tangent
    space at x_i uses it where v_i is parallel to x_i, because the term would vanish in exact arithmetic, but is
    e^{beta (1 - <x_i, x_j>)} times larger than the others and would swallow their digits. It may differ among heads.
    ``beta`` is given where query = beta key and value = key; kernels that need unit vectors look.
    ``settle`` is what a field makes of the whole matrix of logits before it is summed; few kernels can.
    Queries may be those of another cloud, n tokens that see m others: then no token is its own key, and ``causal``,
    ``skip_self`` and ``beta`` are left as they are.
    """

    query: Float[Tensor, "*batch n r"]
    key: Float[Tensor, "*batch m r"]
    value: Float[Tensor, "*batch m d"]
    weights: Float[Tensor, "*batch m"] | None = None
    bias: Float[Tensor, "*heads n m"] | None = None
    causal: bool = False
    skip_self: bool | Bool[Tensor, "*heads 1 1"] = False
    beta: float | None = None
    settle: Callable[[Tensor, Tensor | None], Tensor] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All numbers that come in."""
        given = (self.query, self.key, self.value, self.weights, self.bias)
        return [part for part in given if part is not None]

    @property
    def tokens(self) -> int:
        """How many there are, of the larger cloud where there are two."""
        return max(self.query.shape[-2], self.key.shape[-2])

    def system(self, batch: torch.Size, k: int) -> Request:
        """System number ``k`` of a batch alone, without batch axes, and ``skip_self`` a bool."""
        n, m = self.query.shape[-2], self.key.shape[-2]
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(k, device="cpu"), batch)) if batch else ()
        skip = self.skip_self
        return replace(
            self,
            query=self.query[at],
            key=self.key[at],
            value=self.value[at],
            weights=None if self.weights is None else self.weights.expand(*batch, m)[at],
            bias=None if self.bias is None else self.bias.expand(*batch, n, m)[at],
            skip_self=skip if isinstance(skip, bool) else bool(skip.expand(*batch, 1, 1)[at]),
        )

    @property
    def needs_gradient(self) -> bool:
        """Whether a derivative of the sum will be asked for: backward, forward or by a transform."""
        if transformed():
            return True
        if torch.is_grad_enabled() and any(part.requires_grad for part in self.tensors):
            return True
        forward = torch.autograd.forward_ad
        if forward._current_level < 0:  # no dual number exists: asking each tensor takes longer than a small sum
            return False
        return any(forward.unpack_dual(part).tangent is not None for part in self.tensors)  # type: ignore[no-untyped-call]


def sees_somebody(request: Request) -> Bool[Tensor, "*batch n 1"]:
    """Whether token i sums anybody: some j of positive weight that neither mask nor bias hides, and not only itself
    where ``skip_self`` holds.

    >>> x = torch.eye(2)
    >>> sees_somebody(Request(x, x, x, causal=True, skip_self=True)).squeeze(-1)
    tensor([False,  True])
    """
    n, device = request.query.shape[-2], request.query.device
    weights = torch.ones(n, device=device) if request.weights is None else request.weights
    visible = weights > 0
    if request.bias is None:
        count = visible.cumsum(-1) if request.causal else visible.sum(-1, keepdim=True)
        count = count.unsqueeze(-1) - (visible.unsqueeze(-1) & torch.as_tensor(request.skip_self, device=device)).int()
        return (count > 0).expand(*request.query.shape[:-1], 1)
    seen = (request.bias > -torch.inf) & visible.unsqueeze(-2)
    later = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
    itself = torch.eye(n, dtype=torch.bool, device=device) & torch.as_tensor(request.skip_self, device=device)
    seen = seen & ~itself
    return (seen & ~later if request.causal else seen).any(-1, keepdim=True).expand(*request.query.shape[:-1], 1)


def transformed() -> bool:
    """Whether a transform such as ``vmap`` or ``jacfwd`` is at work: then no number may decide what is done.

    >>> transformed()
    False
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def differentiated(x: Tensor) -> bool:
    """Whether a derivative of what is made of x may be asked for: backward, forward or by a transform.

    >>> differentiated(torch.ones(2)), differentiated(torch.ones(2, requires_grad=True))
    (False, True)
    """
    return x.requires_grad or transformed() or torch.autograd.forward_ad._current_level >= 0


@runtime_checkable
class Kernel(Protocol):
    """A way to compute a ``Request``."""

    def refuses(self, request: Request) -> str | None:
        """Why this kernel cannot serve a request, as the end of a sentence; None where it can."""

    def sum(self, request: Request) -> AttentionSum:
        """The sums, unchecked."""
