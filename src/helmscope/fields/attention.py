"""Self-attention on the sphere (source 001): the softmax flow SA and the unnormalised flow USA.

    logits   l_ij = beta x_i^T B x_j + bias_ij          B = query_key, I where None
    SA       x_i' = P_{x_i} sum_j  m_j e^{l_ij} V x_j / Z_i,    Z_i = sum_j m_j e^{l_ij}
    USA      x_i' = P_{x_i} sum_j  m_j e^{l_ij} V x_j / M,      M = sum_j m_j  (1/n where all weights are 1)

Sums run over the keys that token i sees: all of weight > 0, or those with j <= i under a causal mask. M counts all
tokens of the system, seen or not, so a causal USA flow of the first token is not faster than that of the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields.field import ScaledVelocity, check_weights
from helmscope.geometry.sphere import check_tokens, project
from helmscope.kernels.dense import AttentionSum, attention_sum, logits, matrix_product
from helmscope.types import HelmscopeError, real_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Attention(ABC):
    """What SA and USA share: the parameters of the logits and the values."""

    normalized: ClassVar[bool]

    beta: float
    query_key: Float[Tensor, "d d"] | None = field(default=None, kw_only=True)
    value: Float[Tensor, "d d"] | None = field(default=None, kw_only=True)
    causal: bool = field(default=False, kw_only=True)
    bias: Float[Tensor, "n n"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise HelmscopeError(f"causal is {self.causal!r}, but it must be True or False")
        object.__setattr__(self, "beta", real_number("beta", self.beta, at_least=0))
        for name in ("query_key", "value"):
            _check_matrix(name, getattr(self, name), floor=False)
        _check_matrix("bias", self.bias, floor=True)

    @cached_property
    def value_scale(self) -> float | None:
        """c where V = c I exactly (1 where no value is given), else None."""
        return _scale_of(self.value)

    @property
    def exchangeable(self) -> bool:
        """Whether tokens can be relabelled, and so merged: no causal mask, no bias."""
        return not self.causal and self.bias is None

    @property
    def is_isotropic(self) -> bool:
        """Whether the flow is that of Q = K = V = I with full attention, for which theory has closed forms."""
        return self.exchangeable and self.value_scale == 1 and _scale_of(self.query_key) == 1

    def __call__(
        self,
        x: Float[Tensor, "*batch n d"],
        *,
        weights: Float[Tensor, "*batch n"] | None = None,
        mask: Bool[Tensor, "*batch n"] | None = None,
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity of every token. ``weights`` m_j >= 0 make the cloud a measure; ``mask`` is False at
        padding, which nobody attends to. Bad input is a ``HelmscopeError``.
        """
        self.check_size(check_tokens(x))
        velocity = self.velocity(x, check_weights(x, weights, mask))
        if not bool(torch.isfinite(velocity.detach()).all()):
            remedy = "take smaller value or weights" if self.normalized else "call .scaled(x) for it with a log scale"
            raise HelmscopeError(f"beta is {self.beta:g}, and the velocity leaves {x.dtype}: {remedy}")
        return velocity

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse tokens that do not fit the matrices of this field."""
        n, d = x.shape[-2:]
        for name, size in (("query_key", d), ("value", d), ("bias", n)):
            matrix = getattr(self, name)
            if matrix is not None and matrix.shape[0] != size:
                given, wanted = tuple(matrix.shape), (size, size)
                raise HelmscopeError(f"{name} has shape {given}, but tokens of shape {tuple(x.shape)} need {wanted}")

    @abstractmethod
    def velocity(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: for inner loops and autograd transforms."""

    @abstractmethod
    def ambient(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n d"]:
        """The velocity before projection: what a layer adds to the residual stream."""

    @abstractmethod
    def kernel(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n n"]:
        """The weight of key j for query i: ambient_i = sum_j kernel_ij V x_j."""

    def _sum(self, x: Tensor, weights: Tensor | None, *, tangent: bool) -> AttentionSum:
        skip_self = tangent and self.value_scale is not None  # then V x_i is parallel to x_i
        return attention_sum(self._logits(x, weights), x, weights=weights, skip_self=skip_self)

    def _logits(self, x: Tensor, weights: Tensor | None) -> Tensor:
        query = self.beta * (x if self.query_key is None else matrix_product(x, self.query_key.to(x)))
        bias = None if self.bias is None else self.bias.to(x)
        return logits(query, x, bias=bias, causal=self.causal, weights=weights)

    def _valued(self, total: Tensor) -> Tensor:
        """V applied to a sum of tokens: V sum_j w_j x_j = sum_j w_j V x_j."""
        if self.value_scale is not None:
            return self.value_scale * total
        assert self.value is not None
        return matrix_product(total, self.value.to(total).mT)


@dataclass(frozen=True, eq=False)
class SA(Attention):
    """Softmax self-attention, x_i' = P_{x_i} sum_j m_j e^{l_ij} V x_j / Z_i (source 001; logits as above).

    ``beta`` >= 0 is the inverse temperature. ``value=-torch.eye(d)`` gives the repulsive flow. For V = +-B symmetric it
    is the gradient flow of the interaction energy in the metric weighted by Z, and only there; not in the flat metric.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> SA(beta=0.0)(x)
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """

    normalized: ClassVar[bool] = True

    def velocity(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: for inner loops and autograd transforms."""
        return project(x, self._valued(self._sum(x, weights, tangent=True).mean))

    def ambient(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n d"]:
        """The softmax average of V x_j before projection: what a layer adds to the residual stream."""
        return self._valued(self._sum(x, weights, tangent=False).mean)

    def kernel(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n n"]:
        """Attention weights p_ij; rows sum to 1 (to 0 for a query that sees no key)."""
        pairs = self._logits(x, weights)
        one_hot = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand_as(pairs)
        return attention_sum(pairs, one_hot, weights=weights).mean


@dataclass(frozen=True, eq=False)
class USA(Attention):
    """Unnormalised self-attention, x_i' = P_{x_i} (1/M) sum_j m_j e^{l_ij} V x_j (source 001; logits as above).

    The Wasserstein gradient flow of the interaction energy for V = B = I. Rates grow like e^beta; where that leaves
    the dtype, calling it is refused and ``scaled`` gives the velocity with a log scale.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> USA(beta=1.0)(x)
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """

    normalized: ClassVar[bool] = False

    def scaled(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> ScaledVelocity:
        """The velocity as e^{log_scale} times a direction of ordinary size, for any beta.

        >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> USA(beta=1000.0).scaled(x).log_scale
        tensor([[600.],
                [600.]])
        """
        sums = self._sum(x, weights, tangent=True)
        nobody = (sums.total.detach() == 0).all(-1, keepdim=True)  # any scale serves, and e^0 is in the dtype
        total = self._valued(sums.total) / _total_weight(x, weights)
        return ScaledVelocity(project(x, total), torch.where(nobody, 0.0, sums.shift))

    def velocity(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: infinite or NaN where it leaves the dtype."""
        scaled = self.scaled(x, weights)
        return torch.exp(scaled.log_scale) * scaled.direction

    def ambient(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n d"]:
        """The sum before projection: what a layer adds to the residual stream."""
        sums = self._sum(x, weights, tangent=False)
        return self._valued(torch.exp(sums.shift) * sums.total) / _total_weight(x, weights)

    def kernel(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None) -> Float[Tensor, "*batch n n"]:
        """Unnormalised weights m_j e^{l_ij} / M."""
        terms = torch.exp(self._logits(x, weights))
        if weights is not None:
            terms = terms * weights.unsqueeze(-2)
        return terms / _total_weight(x, weights)


def _total_weight(x: Tensor, weights: Tensor | None) -> Tensor | float:
    return float(x.shape[-2]) if weights is None else weights.sum(-1)[..., None, None]


def _scale_of(matrix: Tensor | None) -> float | None:
    """c where the matrix is c I exactly; a matrix under differentiation is never taken for a number."""
    if matrix is None:
        return 1.0
    scale = matrix[0, 0]
    eye = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    tangent = torch.autograd.forward_ad.unpack_dual(matrix).tangent  # type: ignore[no-untyped-call]
    moving = matrix.requires_grad or tangent is not None
    return None if moving or not torch.equal(matrix, scale * eye) else float(scale)


def _check_matrix(name: str, matrix: object, *, floor: bool) -> None:
    """A square matrix of finite floats; ``floor`` allows -inf entries, which hide a key."""
    if matrix is None:
        return
    if not isinstance(matrix, torch.Tensor) or matrix.ndim != 2 or not matrix.shape[0] == matrix.shape[1] > 0:
        given = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise HelmscopeError(f"{name} is {given}, but it must be a square matrix as a torch tensor")
    if not matrix.dtype.is_floating_point:
        raise HelmscopeError(f"{name} has dtype {matrix.dtype}, but it must hold floating-point numbers")
    entries = matrix.detach()
    good = (entries < torch.inf) & ~entries.isnan() if floor else torch.isfinite(entries)
    if not bool(good.all()):
        allowed = "finite or -inf" if floor else "finite"
        raise HelmscopeError(f"{name} holds the entry {entries[~good][0].item()}, but every entry must be {allowed}")
