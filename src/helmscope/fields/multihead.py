"""Multi-head attention [Mean-field notes]: each head has its own temperature, matrices and bias, and velocities add up.

    x_i' = scale sum_h P_{x_i} V_h sum_j p^h_ij x_j,     scale = 1/K for K heads [Mean-field notes], 1 in a real layer.

P_x is linear, so the mean of the projections is the projection of the mean. For symmetric V_h = B_h, USA heads are the
gradient flow of sum_h E_h; SA heads are not, because each has its own Z and hence its own metric. Heads are an axis of
the tensors, not a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import pad

from helmscope.fields.attention import (
    SA,
    Attention,
    finite_log_scale,
    softmax_kernel,
    sum_kernel,
    total_weight,
)
from helmscope.fields.field import Field
from helmscope.fields.lowrank import LowRank, as_dense
from helmscope.fields.parameters import shape_or_type
from helmscope.fields.positions import Rotary
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import project
from helmscope.kernels.choose import token_sum
from helmscope.kernels.dense import matrix_product, transformed_logits
from helmscope.kernels.request import Request, has_visible_key
from helmscope.types import HelmscopeError, check_real, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time

PER_HEAD = ("beta", "query_key", "value", "bias")  # the attributes in which heads may differ


@dataclass(frozen=True, eq=False)
class MultiHead(Field):
    """Multi-head attention: x_i' = scale sum_h P_{x_i} V_h sum_j p^h_ij x_j [Mean-field notes]; ``scale`` defaults to 1
    / number of heads.

    ``heads`` are fields of one class, SA, USA, Hardmax or SinkhornAttention; they may differ in beta, matrices and
    bias, and must agree in everything else. Ranks of ``LowRank`` matrices may differ. ``scale=1.0`` is the sum that a
    real layer adds; ``MultiHead.from_weights`` builds one from its weights. Raises ``HelmscopeError`` for an empty
    sequence, heads of different classes, and heads that do not fit the same tokens.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> MultiHead([SA(beta=0.0), SA(beta=0.0, value=3 * torch.eye(2))])(x)
    tensor([[0., 1.],
            [1., 0.]])
    """

    parts: ClassVar[tuple[str, ...]] = ("heads",)

    heads: Sequence[Attention]
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", check_heads(self.heads))
        scale = 1 / len(self.heads) if self.scale is None else check_real("scale", self.scale)
        object.__setattr__(self, "scale", scale)

    @classmethod
    def from_weights(
        cls,
        query: Float[Tensor, "heads dh d"],
        key: Float[Tensor, "kv dh d"],
        value: Float[Tensor, "kv dv d"],
        out: Float[Tensor, "heads d dv"],
        *,
        beta: float,
        causal: bool = False,
        scale: float = 1.0,
    ) -> MultiHead:
        """SA heads with the weights of a real layer, of low rank: B_h = query_h^T key_g, V_h = out_h value_g.

        ``beta`` multiplies (query_h x_i).(key_g x_j); most models have 1/sqrt(dh) on tokens of norm sqrt(d), hence
        d/sqrt(dh) on unit vectors. With grouped keys and values, ``kv`` of them, head h uses g = h // (heads / kv).
        Raises ``HelmscopeError`` for shapes that do not fit, and if the number of heads is not a multiple of ``kv``.

        >>> one = torch.tensor([[[1.0, 0.0]]])
        >>> MultiHead.from_weights(one, one, one, one.mT, beta=0.0)(torch.tensor([[0.6, 0.8], [1.0, 0.0]]))
        tensor([[ 0.5120, -0.3840],
                [ 0.0000,  0.0000]])
        """
        group_size = _check_head_weights(query, key, value, out)
        return cls(
            [
                SA(
                    beta,
                    query_key=LowRank(query[h].mT, key[h // group_size].mT),
                    value=LowRank(out[h], value[h // group_size].mT),
                    causal=causal,
                )
                for h in range(len(query))
            ],
            scale=scale,
        )

    @property
    def attends(self) -> bool:
        """True: the field has a kernel."""
        return True

    @property
    def normalized(self) -> bool:
        """Whether the weights of each head sum to 1."""
        return self.heads[0].normalized

    @property
    def exchangeable(self) -> bool:
        """Whether the flow commutes with permutations of the tokens: no causal mask, no bias, no positions."""
        return all(head.exchangeable for head in self.heads)

    @property
    def continuous(self) -> bool:
        """Whether the velocity is continuous, as it is for all heads but ``Hardmax``."""
        return all(head.continuous for head in self.heads)

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the shape of the tokens fits the matrices of the heads."""
        for head in self.heads:
            head.check_size(x)
        super().check_size(x)

    def scaled_velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> ScaledVelocity:
        """The velocity as e^{log_scale} times a direction of moderate size; log_scale is 0 if weights are normalized.

        >>> from helmscope.fields.attention import USA
        >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> MultiHead([USA(beta=1000.0), USA(beta=10.0)]).scaled_velocity(x).log_scale
        tensor([[600.],
                [600.]])
        """
        sums, shift = self._head_sums(x, weights, tangent=True)
        total = self._combine_heads(sums)
        return ScaledVelocity(project(x, total), finite_log_scale(total, shift))

    @property
    def may_overflow(self) -> bool:
        """Whether e^beta may overflow, which it cannot if weights are normalized."""
        return not self.normalized

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: for inner loops and autograd transforms."""
        scaled = self.scaled_velocity(x, weights=weights)
        return scaled.direction if self.normalized else torch.exp(scaled.log_scale) * scaled.direction

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The sum over heads before projection, which is what a layer adds to the residual stream."""
        sums, shift = self._head_sums(x, weights, tangent=False)
        total = self._combine_heads(sums)
        return total if self.normalized else torch.exp(finite_log_scale(total, shift)) * total

    def outputs(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch heads n d"]:
        """The output of each head before projection and ``scale``: V_h sum_j p^h_ij x_j, (*batch, heads, n, d).

        >>> from helmscope.fields.attention import SA
        >>> MultiHead([SA(beta=0.0), SA(beta=1.0)]).outputs(torch.eye(2)).shape
        torch.Size([2, 2, 2])
        """
        sums, shift = self._head_sums(x, weights, tangent=False)
        if not self.normalized:
            sums = torch.exp(shift.unsqueeze(-3)) * sums
        left, _ = _stack_factors([head.value for head in self.heads], x)
        return sums if left is None else matrix_product(sums, left.mT.contiguous())

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch heads n n"]:
        """The attention weight of key j for query i in each head: outputs_hi = sum_j kernel_hij V_h x_j."""
        request = self.request(x, weights, tangent=False)
        return (softmax_kernel if self.normalized else sum_kernel)(transformed_logits(request), request.weights)

    def restricted(self, dim: int) -> MultiHead | None:
        """The same flow on R^dim if all heads commute with rotations, else None."""
        heads = [restricted for head in self.heads if (restricted := head.restricted(dim)) is not None]
        return replace(self, heads=heads) if len(heads) == len(self.heads) else None

    def _head_sums(self, x: Tensor, weights: Tensor | None, *, tangent: bool) -> tuple[Tensor, Tensor]:
        """The sums to which V_h (or its left factor) is applied, (*batch, heads, n, r), divided by e^{shift}; and the
        shift, (*batch, n, 1).
        """
        request = self.request(x, weights, tangent=tangent)
        sums = token_sum(request)
        if self.normalized:
            return sums.mean, torch.zeros_like(x[..., :1])
        # a head without a visible key must not determine the scale of the others
        shift = torch.where(has_visible_key(request), sums.shift, -torch.inf)
        top = shift.amax(-3)
        top = torch.where(top > -torch.inf, top, 0.0)
        relative_scale = torch.exp(shift - top.unsqueeze(-3))
        return relative_scale * sums.total / total_weight(request.value, request.weights), top

    def request(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, tangent: bool) -> Request:
        """The request for the sums of all heads, an axis before the tokens; ``tangent`` if they will be projected.

        >>> from helmscope.fields.attention import SA
        >>> MultiHead([SA(1.0), SA(2.0)]).request(torch.eye(3), tangent=False).query.shape
        torch.Size([2, 3, 3])
        """
        left, right = _stack_factors([head.query_key for head in self.heads], x)
        positions = self.heads[0].positions
        placed = x if positions is None else positions.transform_tokens(x)
        query, key = self._apply_factors(placed, left), self._apply_factors(placed, right)
        if positions is not None:
            query, key = positions.transform_queries(query), positions.transform_queries(key)
        factor = self._per_head([head.logit_factor for head in self.heads], x)
        _, inner = _stack_factors([head.value for head in self.heads], x)
        first = self.heads[0]
        return Request(
            factor * query,
            key,
            self._apply_factors(x, inner),
            weights=None if weights is None else weights.unsqueeze(-2),
            bias=self._bias(x),
            causal=first.causal,
            skip_self=self._skip_self(x) if tangent else False,
            transform_logits=first.logit_transform,
        )

    @staticmethod
    def _per_head(factors: Sequence[float | Tensor], x: Tensor) -> Tensor:
        """One value per head, or per system and head, shaped as a factor of (*batch, heads, n, r)."""
        if not any(isinstance(factor, torch.Tensor) for factor in factors):
            return torch.tensor(factors, dtype=x.dtype, device=x.device)[:, None, None]
        tensors = [torch.as_tensor(factor, dtype=x.dtype, device=x.device) for factor in factors]
        return torch.stack(torch.broadcast_tensors(*tensors), -1)[..., None, None]  # type: ignore[no-untyped-call]

    def _skip_self(self, x: Tensor) -> bool | Tensor:
        """Whether the term j = i can be omitted, for each head: whether V_h x_i is parallel to x_i."""
        parallel = [head.value_scale is not None for head in self.heads]
        return parallel[0] if len(set(parallel)) == 1 else torch.tensor(parallel, device=x.device)[:, None, None]

    def _bias(self, x: Tensor) -> Tensor | None:
        if all(head.bias is None for head in self.heads):
            return None
        zero = torch.zeros(x.shape[-2], x.shape[-2], dtype=x.dtype, device=x.device)
        return torch.stack([zero if head.bias is None else head.bias.to(x) for head in self.heads])

    def _apply_factors(self, x: Tensor, factors: Tensor | None) -> Tensor:
        """factors_h^T x_i for every head, (*batch, heads, n, r), as one matrix product; x_i if ``factors`` is None.

        The result is contiguous, because the rounding of later products differs between copies and views.
        """
        if factors is None:
            return x.unsqueeze(-3).expand(*x.shape[:-2], len(self.heads), *x.shape[-2:]).contiguous()
        heads, d, r = factors.shape[-3:]
        rows = matrix_product(x, factors.transpose(-3, -2).reshape(*factors.shape[:-3], d, heads * r))
        return rows.reshape(*x.shape[:-1], heads, r).transpose(-3, -2).contiguous()

    @cached_property
    def _value_scales(self) -> list[float] | None:
        """The numbers c_h if every V_h = c_h I, else None."""
        scales = [head.value_scale for head in self.heads if head.value_scale is not None]
        return scales if len(scales) == len(self.heads) else None

    @full_precision
    def _combine_heads(self, sums: Tensor) -> Tensor:
        """scale sum_h V_h sums_h, as one matrix product: the rounding of a sum over an axis depends on the batch."""
        assert self.scale is not None
        heads, n, r = sums.shape[-3:]
        if self._value_scales is not None:
            scales = torch.tensor([self._value_scales], dtype=sums.dtype, device=sums.device)
            flat = scales.expand(*sums.shape[:-3], 1, heads) @ sums.reshape(*sums.shape[:-3], heads, n * r)
            return self.scale * flat.reshape(*sums.shape[:-3], n, r)
        left, _ = _stack_factors([head.value for head in self.heads], sums)
        assert left is not None
        rows = sums.transpose(-3, -2).reshape(*sums.shape[:-3], n, heads * r)
        return self.scale * matrix_product(rows, left.mT.reshape(*left.shape[:-3], heads * r, left.shape[-2]))

    def overflow_message(self, x: Tensor, weights: Tensor | None) -> str:
        for h, head in enumerate(self.heads):
            if not bool(torch.isfinite(head.velocity(x, weights=weights).detach()).all()):
                return f"in heads[{h}] {head.overflow_message(x, weights)}"
        return f"scale is {self.scale:g}, and the velocity overflows {x.dtype}: use a smaller one"


def _stack_factors(matrices: Sequence[Tensor | LowRank | None], x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(L, R) with M_h = L_h R_h^T, each (*batch, heads, d, r); None for I.

    Lower ranks are padded with zero columns. If any matrix is dense, all are converted to dense ones.
    """
    if all(matrix is None for matrix in matrices):
        return None, None
    low_rank = [matrix for matrix in matrices if isinstance(matrix, LowRank)]
    if len(low_rank) < len(matrices):
        return _stack_heads([as_dense(matrix, x) for matrix in matrices]), None
    rank = max(matrix.rank for matrix in low_rank)
    left = [pad(matrix.left.to(x), (0, rank - matrix.rank)) for matrix in low_rank]
    right = [pad(matrix.right.to(x), (0, rank - matrix.rank)) for matrix in low_rank]
    return _stack_heads(left), _stack_heads(right)


def _stack_heads(matrices: Sequence[Tensor]) -> Float[Tensor, "*batch heads d r"]:
    """One matrix per head, stacked along an axis after those of the batch."""
    return torch.stack(torch.broadcast_tensors(*matrices), -3)  # type: ignore[no-untyped-call]


def check_heads(heads: object) -> tuple[Attention, ...]:
    """The heads as a tuple. Raises ``HelmscopeError`` unless they are of one class, fit the same tokens and agree in
    everything but beta, matrices and bias.

    >>> len(check_heads([SA(beta=1.0), SA(beta=2.0)]))
    2
    """
    if not isinstance(heads, Sequence) or not heads or not all(isinstance(head, Attention) for head in heads):
        raise HelmscopeError(f"heads is {type_names(heads)}, but it must be a sequence of fields such as SA(beta=4.0)")
    first = heads[0]
    sizes: dict[str, tuple[int, str]] = {}
    for h, head in enumerate(heads):
        if type(head) is not type(first):
            classes = f"{type(head).__name__} and heads[0] is {type(first).__name__}"
            raise HelmscopeError(f"heads[{h}] is {classes}, but all heads must be of one class")
        for name in (part.name for part in fields(first) if part.name not in PER_HEAD):
            if getattr(head, name) != getattr(first, name):
                values = f"{name}={getattr(head, name)!r} and heads[0] {name}={getattr(first, name)!r}"
                raise HelmscopeError(f"heads[{h}] has {values}, but all heads must have the same {name}")
        for name, axis in (("query_key", "d"), ("value", "d"), ("bias", "n")):
            matrix = getattr(head, name)
            if matrix is None:
                continue
            size, reference = sizes.setdefault(axis, (matrix.shape[-1], f"{name} of heads[{h}]"))
            if matrix.shape[-1] != size:
                shapes = f"{name} of heads[{h}] has shape {tuple(matrix.shape)} and {reference} {(size, size)}"
                raise HelmscopeError(f"{shapes}, but all heads must fit the same tokens")
    ranks = {head.query_key.rank for head in heads if isinstance(head.query_key, LowRank)}
    if isinstance(first.positions, Rotary) and len(ranks) > 1:
        raise HelmscopeError(
            f"heads have queries of dimension {sorted(ranks)}, but rotary positions need the same for all"
        )
    return tuple(heads)


def type_names(value: object) -> str:
    """The type of a value, or of each item of a sequence, for error messages: a repr would show whole matrices."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return type_with_article(value)
    return f"[{', '.join(type(item).__name__ for item in value)}]"


def _check_head_weights(query: object, key: object, value: object, out: object) -> int:
    """The number of heads that share one key and value. Raises ``HelmscopeError`` for shapes that do not fit."""
    arguments = {"query": query, "key": key, "value": value, "out": out}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in arguments.items():
        if not isinstance(part, torch.Tensor) or part.ndim != 3 or 0 in part.shape:
            raise HelmscopeError(
                f"{name} is {shape_or_type(part)}, but it must be a torch tensor with axes (heads, ., .)"
            )
        shapes[name] = tuple(part.shape)
    (heads, dh, d), (kv, dv, _) = shapes["query"], shapes["value"]
    if heads % kv:
        raise HelmscopeError(f"query has {heads} heads and value {kv}, but the first must be a multiple of the second")
    wanted = {"key": (kv, dh, d), "value": (kv, dv, d), "out": (heads, d, dv)}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            required = f"query of shape {shapes['query']} and value of shape {shapes['value']} require {shape}"
            raise HelmscopeError(f"{name} has shape {shapes[name]}, but {required}")
    return heads // kv
