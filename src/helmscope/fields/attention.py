"""Self-attention on the sphere (source 001): the softmax flow SA and the unnormalised flow USA, and what they share
with the other attention fields.

    logits   l_ij = beta x_i^T B x_j + bias_ij          B = query_key, I where None
    SA       x_i' = P_{x_i} sum_j  m_j e^{l_ij} V x_j / Z_i,    Z_i = sum_j m_j e^{l_ij}
    USA      x_i' = P_{x_i} sum_j  m_j e^{l_ij} V x_j / M,      M = sum_j m_j  (1/n where all weights are 1)

Sums run over the keys that token i sees: all of weight > 0, or those with j <= i under a causal mask. M counts all
tokens of the system, seen or not, so a causal USA flow of the first token is not faster than that of the last.

A field of the softmax kind differs from SA in what it makes of the logits alone: ``Hardmax`` keeps the greatest,
``SinkhornAttention`` adds potentials, ``MultiHead`` gives them an axis of heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from helmscope.fields.field import Field
from helmscope.fields.lowrank import LowRank, query_and_key
from helmscope.fields.parameters import is_moving, number_or_tensor, over_tokens, shown
from helmscope.fields.positions import Positions
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.arithmetic import check_dense_values, every
from helmscope.geometry.sphere import project
from helmscope.kernels.choose import token_sum
from helmscope.kernels.dense import attention_sum, matrix_product, transformed_logits
from helmscope.kernels.kernel import AttentionSum, Request
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from typing import Self

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True, eq=False)
class Attention(Field):
    """What all fields of one head share: the parameters of the logits and the values."""

    parameters: ClassVar[Mapping[str, int]] = {"query_key": 2, "value": 2}
    normalized: ClassVar[bool]

    query_key: Float[Tensor, "*batch d d"] | LowRank | None = field(default=None, kw_only=True)
    value: Float[Tensor, "*batch d d"] | LowRank | None = field(default=None, kw_only=True)
    causal: bool = field(default=False, kw_only=True)
    bias: Float[Tensor, "n n"] | None = field(default=None, kw_only=True)
    positions: Positions | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise HelmscopeError(f"causal is {self.causal!r}, but it must be True or False")
        for name in ("query_key", "value"):
            if not isinstance(getattr(self, name), LowRank):  # it has checked itself
                check_matrix(name, getattr(self, name), floor=False)
        check_matrix("bias", self.bias, floor=True)
        if self.positions is not None and not isinstance(self.positions, Positions):
            raise HelmscopeError(f"positions is {self.positions!r:.60}, but it must be Rotary() or Additive(table)")
        _ = self.batch  # refused where batch axes do not fit together

    @property
    @abstractmethod
    def factor(self) -> float | Tensor:
        """What multiplies x_i^T B x_j in the logits."""

    @property
    def attends(self) -> bool:
        """Whether the field has a kernel."""
        return True

    @cached_property
    def value_scale(self) -> float | None:
        """c where V = c I exactly (1 where no value is given), else None."""
        return _scale_of(self.value)

    @cached_property
    def logit_scale(self) -> float | None:
        """c where B = c I exactly (1 where no query_key is given), else None."""
        return _scale_of(self.query_key)

    @property
    def exchangeable(self) -> bool:
        """Whether tokens can be relabelled, and so merged: no causal mask, no bias, no positions."""
        return not self.causal and self.bias is None and self.positions is None

    @property
    def isotropic(self) -> bool:
        """Whether the flow is that of Q = K = V = I with full attention, for which theory has closed forms."""
        return self.exchangeable and self.value_scale == 1 and self.logit_scale == 1

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse tokens that do not fit the matrices of this field."""
        n, d = x.shape[-2:]
        for name, size in (("query_key", d), ("value", d), ("bias", n)):
            matrix = getattr(self, name)
            if matrix is not None and matrix.shape[-1] != size:
                given, wanted = tuple(matrix.shape), (size, size)
                raise HelmscopeError(f"{name} has shape {given}, but tokens of shape {tuple(x.shape)} need {wanted}")
        if self.positions is not None:
            self.positions.check_size(x, self.query_key.rank if isinstance(self.query_key, LowRank) else d)
        super().check_size(x)

    def transform_logits(
        self, pairs: Float[Tensor, "*batch n n"], weights: Tensor | None
    ) -> Float[Tensor, "*batch n n"]:
        """What this field makes of raw logits before they are summed: nothing, unless it says so."""
        return pairs

    def restricted(self, dim: int) -> Self | None:
        """The same flow on R^dim, where it commutes with rotations because B and V are multiples of I; else None."""
        b, v = self.logit_scale, self.value_scale
        if b is None or v is None or self.positions is not None:
            return None
        eye = torch.eye(dim, dtype=torch.float64, device="cpu")
        return replace(self, query_key=None if b == 1 else b * eye, value=None if v == 1 else v * eye)

    def request(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, tangent: bool) -> Request:
        """The sum that makes the velocity; ``tangent`` where it will be projected."""
        query, key = self._query_and_key(x)
        thin = isinstance(self.value, LowRank)
        return Request(
            over_tokens(self.factor, x) * query,
            key,
            matrix_product(x, self.value.right.to(x)) if isinstance(self.value, LowRank) else x,
            weights=weights,
            bias=None if self.bias is None else self.bias.to(x),
            causal=self.causal,
            skip_self=tangent and self.value_scale is not None,  # then V x_i is parallel to x_i
            beta=None if thin else self.unit_beta,
            transform_logits=self.logit_transform,
        )

    def _query_and_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.positions is None:
            return query_and_key(x, self.query_key)
        query, key = query_and_key(self.positions.tokens(x), self.query_key)
        return self.positions.turned(query), self.positions.turned(key)

    @property
    def unit_beta(self) -> float | None:
        """c where the logits are c <x_i, x_j> with a number c, else None."""
        factor, scale = self.factor, self.logit_scale
        if scale is None or self.positions is not None or isinstance(factor, torch.Tensor):
            return None
        return factor * scale

    @property
    def logit_transform(self) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        """``transform_logits``, where this field has one of its own."""
        return None if type(self).transform_logits is Attention.transform_logits else self.transform_logits

    def _sum(self, x: Tensor, weights: Tensor | None, *, tangent: bool) -> AttentionSum:
        return token_sum(self.request(x, weights, tangent=tangent))

    def _logits(self, x: Tensor, weights: Tensor | None) -> Tensor:
        return transformed_logits(self.request(x, weights, tangent=False))

    def _valued(self, total: Tensor) -> Tensor:
        """V applied to a sum of tokens: V sum_j w_j x_j = sum_j w_j V x_j. A V of low rank was applied by half."""
        if self.value_scale is not None:
            return self.value_scale * total
        if isinstance(self.value, LowRank):
            return matrix_product(total, self.value.left.to(total).mT)
        assert self.value is not None
        return matrix_product(total, self.value.to(total).mT)

    def complaint(self, x: Tensor, weights: Tensor | None) -> str:
        return f"the velocity leaves {x.dtype}: take smaller value or weights"


class Softmax(Attention):
    """Fields whose weights sum to 1 over the keys: x_i' = P_{x_i} sum_j m_j e^{l_ij} V x_j / Z_i."""

    normalized: ClassVar[bool] = True

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: for inner loops and autograd transforms."""
        return project(x, self._valued(self._sum(x, weights, tangent=True).mean))

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The softmax average of V x_j before projection: what a layer adds to the residual stream."""
        return self._valued(self._sum(x, weights, tangent=False).mean)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """Attention weights p_ij; rows sum to 1 (to 0 for a query that sees no key)."""
        return softmax_kernel(self._logits(x, weights), weights)


@dataclass(frozen=True, eq=False)
class SA(Softmax):
    """Softmax self-attention, x_i' = P_{x_i} sum_j m_j e^{l_ij} V x_j / Z_i (source 001; logits as above).

    ``beta`` >= 0 is the inverse temperature; beta, B and V may be tensors with a gradient, and may have batch axes, a
    value per system. ``value=-torch.eye(d)`` gives the repulsive flow. For V = +-B symmetric it
    is the gradient flow of the interaction energy in the metric weighted by Z, and only there; not in the flat metric.
    ``query_key`` and ``value`` may be ``LowRank``; ``bias=alibi(n, slope)`` prefers near tokens, and ``positions``,
    ``Rotary()`` or ``Additive(table)``, enter queries and keys.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> SA(beta=0.0)(x)
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """

    parameters: ClassVar[Mapping[str, int]] = {"beta": 0, **Attention.parameters}

    beta: float | Float[Tensor, "*batch"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", number_or_tensor("beta", self.beta, at_least=0))
        super().__post_init__()

    @property
    def factor(self) -> float | Tensor:
        """beta."""
        return self.beta

    def complaint(self, x: Tensor, weights: Tensor | None) -> str:
        return f"beta is {shown(self.beta)}, and {super().complaint(x, weights)}"


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

    parameters: ClassVar[Mapping[str, int]] = {"beta": 0, **Attention.parameters}

    beta: float | Float[Tensor, "*batch"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", number_or_tensor("beta", self.beta, at_least=0))
        super().__post_init__()

    @property
    def factor(self) -> float | Tensor:
        """beta."""
        return self.beta

    def scaled(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0) -> ScaledVelocity:
        """The velocity as e^{log_scale} times a direction of ordinary size, for any beta.

        >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> USA(beta=1000.0).scaled(x).log_scale
        tensor([[600.],
                [600.]])
        """
        sums = self._sum(x, weights, tangent=True)
        total = project(x, self._valued(sums.total) / total_weight(x, weights))
        return ScaledVelocity(total, finite_log_scale(sums.total, sums.shift))

    @property
    def overflows(self) -> bool:
        """e^beta may leave the dtype."""
        return True

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: infinite or NaN where it leaves the dtype."""
        scaled = self.scaled(x, weights=weights)
        return torch.exp(scaled.log_scale) * scaled.direction

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The sum before projection: what a layer adds to the residual stream."""
        sums = self._sum(x, weights, tangent=False)
        return self._valued(torch.exp(sums.shift) * sums.total) / total_weight(x, weights)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """Unnormalised weights m_j e^{l_ij} / M."""
        return sum_kernel(self._logits(x, weights), weights)

    def complaint(self, x: Tensor, weights: Tensor | None) -> str:
        return f"beta is {shown(self.beta)}, and the velocity leaves {x.dtype}: call .scaled(x) for it with a log scale"


def softmax_kernel(pairs: Float[Tensor, "*batch n m"], weights: Tensor | None) -> Float[Tensor, "*batch n m"]:
    """p_ij = m_j e^{l_ij} / Z_i of logits; rows sum to 1, to 0 where all logits are -inf.

    >>> softmax_kernel(torch.zeros(2, 2), torch.tensor([1.0, 3.0]))
    tensor([[0.2500, 0.7500],
            [0.2500, 0.7500]])
    """
    keys = pairs.shape[-1]
    one_hot = torch.eye(keys, dtype=pairs.dtype, device=pairs.device).expand(*pairs.shape[:-2], keys, keys)
    return attention_sum(pairs, one_hot, weights=weights).mean


def sum_kernel(pairs: Float[Tensor, "*batch n n"], weights: Tensor | None) -> Float[Tensor, "*batch n n"]:
    """m_j e^{l_ij} / M of logits.

    >>> sum_kernel(torch.zeros(2, 2), None)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    terms = torch.exp(pairs)
    if weights is not None:
        terms = terms * weights.unsqueeze(-2)
    return terms / total_weight(pairs, weights)


def finite_log_scale(total: Float[Tensor, "*batch n d"], shift: Float[Tensor, "*batch n 1"]) -> Tensor:
    """A log scale that the dtype holds where the total is 0: there e^shift 0 would be NaN. Its own where it is small,
    as the total may be 0 by cancellation and have a derivative.

    >>> finite_log_scale(torch.tensor([[0.0], [0.5]]), torch.tensor([[900.0], [900.0]]))
    tensor([[ 80.],
            [900.]])
    """
    nothing = (total.detach() == 0).all(-1, keepdim=True)
    return torch.where(nothing, shift.clamp(max=80.0), shift)


def total_weight(x: Float[Tensor, "*batch n d"], weights: Tensor | None) -> Tensor | float:
    """M = sum_j m_j of each system, n where weights is None.

    >>> total_weight(torch.eye(2), None)
    2.0
    """
    return float(x.shape[-2]) if weights is None else weights.sum(-1)[..., None, None]


def _scale_of(matrix: Tensor | LowRank | None) -> float | None:
    """c where the matrix is c I exactly; a matrix that is differentiated or vectorized is never taken for a number."""
    if matrix is None:
        return 1.0
    if isinstance(matrix, LowRank):
        return None
    if matrix.ndim > 2:
        return None
    scale = matrix[0, 0]
    eye = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    return None if is_moving(matrix) or not torch.equal(matrix, scale * eye) else float(scale)


def check_matrix(name: str, matrix: object, *, floor: bool) -> None:
    """A square matrix of finite floats, or one per system; ``floor`` allows -inf entries, which hide a key, and no
    batch axes.
    """
    if matrix is None:
        return
    plain = isinstance(matrix, torch.Tensor) and (matrix.ndim == 2 or (matrix.ndim > 2 and not floor))
    if not plain or not isinstance(matrix, torch.Tensor) or not matrix.shape[-1] == matrix.shape[-2] > 0:
        given = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise HelmscopeError(f"{name} is {given}, but it must be a square matrix as a torch tensor")
    if not matrix.dtype.is_floating_point:
        raise HelmscopeError(f"{name} has dtype {matrix.dtype}, but it must hold floating-point numbers")
    check_dense_values(name, matrix)
    entries = matrix.detach()
    good = (entries < torch.inf) & ~entries.isnan() if floor else torch.isfinite(entries)
    if not every(good):
        allowed = "finite or -inf" if floor else "finite"
        raise HelmscopeError(f"{name} holds the entry {entries[~good][0].item()}, but every entry must be {allowed}")
