"""Self-attention on the sphere [Geshkovski et al. 2023]: the softmax flow SA, the unnormalized flow USA, and their
common base classes with the other attention fields.

    logits   l_ij = beta x_i^T B x_j + bias_ij          B = query_key, I where None
    SA       x_i' = P_{x_i} sum_j  m_j e^{l_ij} V x_j / Z_i,    Z_i = sum_j m_j e^{l_ij}
    USA      x_i' = P_{x_i} sum_j  m_j e^{l_ij} V x_j / M,      M = sum_j m_j  (1/n where all weights are 1)

Sums run over the keys that token i attends to: those of positive weight, and under a causal mask only those with
j <= i. M counts all tokens of the system, masked or not, so that under a causal USA flow the first token is not faster
than the last.

The other softmax fields differ from SA only in how they transform the logits: ``Hardmax`` keeps the largest,
``SinkhornAttention`` adds potentials, ``MultiHead`` adds an axis of heads.
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
from helmscope.fields.parameters import is_moving, number_or_tensor, over_tokens, parameter_text, shape_or_type
from helmscope.fields.positions import Positions
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.arithmetic import check_dense_values, every
from helmscope.geometry.sphere import project
from helmscope.kernels.choose import token_sum
from helmscope.kernels.dense import attention_sum, matrix_product, transformed_logits
from helmscope.kernels.request import AttentionSum, Request
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from typing import Self

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True, eq=False)
class Attention(Field):
    """Base class of attention fields with one head: the parameters of the logits and the values."""

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
            if not isinstance(getattr(self, name), LowRank):  # which checks its factors itself
                check_matrix(name, getattr(self, name), floor=False)
        check_matrix("bias", self.bias, floor=True)
        if self.positions is not None and not isinstance(self.positions, Positions):
            raise HelmscopeError(
                f"positions is {self.positions!r:.60}, but it must be Rotary() or AdditivePositions(table)"
            )
        _ = self.batch  # raises if batch axes do not broadcast

    @property
    @abstractmethod
    def logit_factor(self) -> float | Tensor:
        """The factor of x_i^T B x_j in the logits."""

    @property
    def attends(self) -> bool:
        """True: the field has a kernel."""
        return True

    @cached_property
    def value_scale(self) -> float | None:
        """c if V = c I exactly (1 if ``value`` is None), else None.

        >>> SA(beta=1.0, value=-torch.eye(2)).value_scale
        -1.0
        """
        return _identity_multiple(self.value)

    @cached_property
    def logit_scale(self) -> float | None:
        """c if B = c I exactly (1 if ``query_key`` is None), else None."""
        return _identity_multiple(self.query_key)

    @property
    def exchangeable(self) -> bool:
        """Whether the flow commutes with permutations of the tokens: no causal mask, no bias, no positions."""
        return not self.causal and self.bias is None and self.positions is None

    @property
    def isotropic(self) -> bool:
        """Whether the flow is that of Q = K = V = I with full attention, which has closed forms (``theory``)."""
        return self.exchangeable and self.value_scale == 1 and self.logit_scale == 1

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the shape of the tokens fits the matrices of this field."""
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
        """Transform the logits before the softmax; the identity unless a subclass overrides it."""
        return pairs

    def restricted(self, dim: int) -> Self | None:
        """The same flow on R^dim if it commutes with rotations, as it does if B and V are multiples of I; else None."""
        b, v = self.logit_scale, self.value_scale
        if b is None or v is None or self.positions is not None:
            return None
        eye = torch.eye(dim, dtype=torch.float64, device="cpu")
        return replace(self, query_key=None if b == 1 else b * eye, value=None if v == 1 else v * eye)

    def request(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, tangent: bool) -> Request:
        """The request for the attention sum; ``tangent`` if the result will be projected to the tangent space."""
        query, key = self._query_and_key(x)
        low_rank = isinstance(self.value, LowRank)
        return Request(
            over_tokens(self.logit_factor, x) * query,
            key,
            matrix_product(x, self.value.right.to(x)) if isinstance(self.value, LowRank) else x,
            weights=weights,
            bias=None if self.bias is None else self.bias.to(x),
            causal=self.causal,
            skip_self=tangent and self.value_scale is not None,  # then V x_i is parallel to x_i
            beta=None if low_rank else self.unit_beta,
            transform_logits=self.logit_transform,
        )

    def _query_and_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.positions is None:
            return query_and_key(x, self.query_key)
        query, key = query_and_key(self.positions.transform_tokens(x), self.query_key)
        return self.positions.transform_queries(query), self.positions.transform_queries(key)

    @property
    def unit_beta(self) -> float | None:
        """c if the logits are c <x_i, x_j> with a plain number c, else None.

        >>> SA(beta=4.0, query_key=0.5 * torch.eye(2)).unit_beta
        2.0
        """
        factor, scale = self.logit_factor, self.logit_scale
        if scale is None or self.positions is not None or isinstance(factor, torch.Tensor):
            return None
        return factor * scale

    @property
    def logit_transform(self) -> Callable[[Tensor, Tensor | None], Tensor] | None:
        """``transform_logits`` if this class overrides it, else None."""
        return None if type(self).transform_logits is Attention.transform_logits else self.transform_logits

    def _sum(self, x: Tensor, weights: Tensor | None, *, tangent: bool) -> AttentionSum:
        return token_sum(self.request(x, weights, tangent=tangent))

    def _logits(self, x: Tensor, weights: Tensor | None) -> Tensor:
        return transformed_logits(self.request(x, weights, tangent=False))

    def _apply_value(self, total: Tensor) -> Tensor:
        """V sum_j w_j x_j, given the sum. For a low-rank V = L R^T the sum is over R^T x_j, and L is applied."""
        if self.value_scale is not None:
            return self.value_scale * total
        if isinstance(self.value, LowRank):
            return matrix_product(total, self.value.left.to(total).mT)
        assert self.value is not None
        return matrix_product(total, self.value.to(total).mT)

    def overflow_message(self, x: Tensor, weights: Tensor | None) -> str:
        return f"the velocity overflows {x.dtype}: use a smaller value or smaller weights"


class Softmax(Attention):
    """Base class of attention fields with normalized weights: x_i' = P_{x_i} sum_j m_j e^{l_ij} V x_j / Z_i."""

    normalized: ClassVar[bool] = True

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: for inner loops and autograd transforms."""
        return project(x, self._apply_value(self._sum(x, weights, tangent=True).mean))

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The softmax average of V x_j before projection, which is what a layer adds to the residual stream."""
        return self._apply_value(self._sum(x, weights, tangent=False).mean)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """Attention weights p_ij; rows sum to 1 (to 0 for a query without a visible key)."""
        return softmax_kernel(self._logits(x, weights), weights)


@dataclass(frozen=True, eq=False)
class SA(Softmax):
    """Softmax self-attention [Geshkovski et al. 2023]: x_i' = P_{x_i} sum_j m_j e^{l_ij} V x_j / Z_i with the logits
    l_ij = beta x_i^T B x_j + bias_ij, Z_i = sum_j m_j e^{l_ij}, and the weights m_j of the tokens, 1 by default.

    ``beta`` >= 0 is the inverse temperature; beta, B and V may be tensors with a gradient, and may have batch axes, one
    value per system. ``value=-torch.eye(d)`` is the repulsive flow. For symmetric V = +-B it is the gradient flow of
    the interaction energy in the metric weighted by Z, but not in the flat metric. ``query_key`` and ``value`` may be
    ``LowRank``; ``bias=alibi_bias(n, slope)`` favors nearby tokens, and ``positions``, which is ``Rotary()`` or
    ``AdditivePositions(table)``, acts on queries and keys. Raises ``HelmscopeError`` for parameters that are not
    finite, not square or do not fit each other.

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
    def logit_factor(self) -> float | Tensor:
        """beta."""
        return self.beta

    def overflow_message(self, x: Tensor, weights: Tensor | None) -> str:
        return f"beta is {parameter_text(self.beta)}, and {super().overflow_message(x, weights)}"


@dataclass(frozen=True, eq=False)
class USA(Attention):
    """Unnormalized self-attention [Geshkovski et al. 2023]: x_i' = P_{x_i} (1/M) sum_j m_j e^{l_ij} V x_j with the
    logits l_ij = beta x_i^T B x_j + bias_ij, M = sum_j m_j, and the weights m_j of the tokens, 1 by default.

    The Wasserstein gradient flow of the interaction energy for V = B = I. Parameters as in ``SA``. Velocities grow like
    e^beta; where that overflows, calling the field raises ``HelmscopeError``, while ``scaled_velocity`` returns the
    velocity with a log scale.

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
    def logit_factor(self) -> float | Tensor:
        """beta."""
        return self.beta

    def scaled_velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> ScaledVelocity:
        """The velocity as e^{log_scale} times a direction of moderate size, for any beta.

        >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> USA(beta=1000.0).scaled_velocity(x).log_scale
        tensor([[600.],
                [600.]])
        """
        sums = self._sum(x, weights, tangent=True)
        total = project(x, self._apply_value(sums.total) / total_weight(x, weights))
        return ScaledVelocity(total, finite_log_scale(sums.total, sums.shift))

    @property
    def may_overflow(self) -> bool:
        """True: e^beta may overflow."""
        return True

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: infinite or NaN where it overflows."""
        scaled = self.scaled_velocity(x, weights=weights)
        return torch.exp(scaled.log_scale) * scaled.direction

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The sum before projection, which is what a layer adds to the residual stream."""
        sums = self._sum(x, weights, tangent=False)
        return self._apply_value(torch.exp(sums.shift) * sums.total) / total_weight(x, weights)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """Unnormalized weights m_j e^{l_ij} / M."""
        return sum_kernel(self._logits(x, weights), weights)

    def overflow_message(self, x: Tensor, weights: Tensor | None) -> str:
        return f"beta is {parameter_text(self.beta)}, and the velocity overflows {x.dtype}: call .scaled_velocity(x)"


def softmax_kernel(pairs: Float[Tensor, "*batch n m"], weights: Tensor | None) -> Float[Tensor, "*batch n m"]:
    """Attention weights p_ij = m_j e^{l_ij} / Z_i from logits l; rows sum to 1, or to 0 if all their logits are -inf.

    >>> softmax_kernel(torch.zeros(2, 2), torch.tensor([1.0, 3.0]))
    tensor([[0.2500, 0.7500],
            [0.2500, 0.7500]])
    """
    keys = pairs.shape[-1]
    one_hot = torch.eye(keys, dtype=pairs.dtype, device=pairs.device).expand(*pairs.shape[:-2], keys, keys)
    return attention_sum(pairs, one_hot, weights=weights).mean


def sum_kernel(pairs: Float[Tensor, "*batch n n"], weights: Tensor | None) -> Float[Tensor, "*batch n n"]:
    """Unnormalized attention weights m_j e^{l_ij} / M from logits l.

    >>> sum_kernel(torch.zeros(2, 2), None)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    terms = torch.exp(pairs)
    if weights is not None:
        terms = terms * weights.unsqueeze(-2)
    return terms / total_weight(pairs, weights)


def finite_log_scale(total: Float[Tensor, "*batch n d"], shift: Float[Tensor, "*batch n 1"]) -> Tensor:
    """The log scale ``shift``, clamped to 80 where the total is 0, so that e^shift times 0 is 0 and not NaN.

    A smaller shift is kept even there: the total may be 0 by cancellation and still have a derivative.

    >>> finite_log_scale(torch.tensor([[0.0], [0.5]]), torch.tensor([[900.0], [900.0]]))
    tensor([[ 80.],
            [900.]])
    """
    vanishes = (total.detach() == 0).all(-1, keepdim=True)
    return torch.where(vanishes, shift.clamp(max=80.0), shift)


def total_weight(x: Float[Tensor, "*batch n d"], weights: Tensor | None) -> Tensor | float:
    """The total weight M = sum_j m_j of each system; n if ``weights`` is None.

    >>> total_weight(torch.eye(2), None)
    2.0
    """
    return float(x.shape[-2]) if weights is None else weights.sum(-1)[..., None, None]


def _identity_multiple(matrix: Tensor | LowRank | None) -> float | None:
    """c if the matrix is c I exactly, else None; always None for a matrix that is differentiated or vectorized."""
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
    """Raise ``HelmscopeError`` unless the argument is None or a square matrix of finite floats, or one per system.

    ``floor`` allows entries -inf, which mask a key, but no batch axes.
    """
    if matrix is None:
        return
    right_ndim = isinstance(matrix, torch.Tensor) and (matrix.ndim == 2 or (matrix.ndim > 2 and not floor))
    if not right_ndim or not isinstance(matrix, torch.Tensor) or not matrix.shape[-1] == matrix.shape[-2] > 0:
        raise HelmscopeError(f"{name} is {shape_or_type(matrix)}, but it must be a square matrix as a torch tensor")
    if not matrix.dtype.is_floating_point:
        raise HelmscopeError(f"{name} has dtype {matrix.dtype}, but it must hold floating-point numbers")
    check_dense_values(name, matrix)
    entries = matrix.detach()
    good = (entries < torch.inf) & ~entries.isnan() if floor else torch.isfinite(entries)
    if not every(good):
        allowed = "finite or -inf" if floor else "finite"
        raise HelmscopeError(f"{name} holds the entry {entries[~good][0].item()}, but every entry must be {allowed}")
