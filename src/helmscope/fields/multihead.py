"""Several heads at once (source 002): each has its own temperature, matrices and bias, and their velocities add up.

    x_i' = scale sum_h P_{x_i} V_h sum_j p^h_ij x_j,     scale = 1/K for K heads (source 002), 1 in a real layer.

P_x is linear, so the mean of the projections is the projection of the mean. With V_h = B_h symmetric, heads of USA are
the gradient flow of sum_h E_h; heads of SA are not, as each has its own Z and so its own metric. Heads are one more
axis of the tensors, never a loop.
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
from helmscope.fields.positions import Rotary
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import project
from helmscope.kernels.choose import token_sum
from helmscope.kernels.dense import matrix_product, transformed_logits
from helmscope.kernels.kernel import Request, has_visible_key
from helmscope.types import HelmscopeError, real_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time

OWN = ("beta", "query_key", "value", "bias")  # in these, heads may differ


@dataclass(frozen=True, eq=False)
class MultiHead(Field):
    """x_i' = scale sum_h P_{x_i} V_h sum_j p^h_ij x_j (source 002), ``scale`` = 1 / number of heads unless given.

    ``heads`` are fields of one kind, SA, USA, Hardmax or SinkhornAttention; they may differ in beta, matrices and bias,
    and share everything else. Ranks of ``LowRank`` matrices may differ. ``scale=1.0`` is the sum that a real layer
    adds; ``MultiHead.from_weights`` makes one of its weights. Refuses no heads, heads of two kinds, and heads that do
    not fit the same tokens.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> MultiHead([SA(beta=0.0), SA(beta=0.0, value=3 * torch.eye(2))])(x)
    tensor([[0., 1.],
            [1., 0.]])
    """

    parts: ClassVar[tuple[str, ...]] = ("heads",)

    heads: Sequence[Attention]
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", checked_heads(self.heads))
        scale = 1 / len(self.heads) if self.scale is None else real_number("scale", self.scale)
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
        """The heads of SA that these weights are, of low rank: B_h = query_h^T key_g, V_h = out_h value_g.

        ``beta`` multiplies (query_h x_i).(key_g x_j), 1/sqrt(dh) in most models on tokens of norm sqrt(d), so
        d/sqrt(dh) on unit vectors. Heads may share keys and values in groups: with ``kv`` of them head h takes
        g = h // (heads / kv). Refuses shapes that do not fit, and a number of heads that is no multiple of ``kv``.

        >>> one = torch.tensor([[[1.0, 0.0]]])
        >>> MultiHead.from_weights(one, one, one, one.mT, beta=0.0)(torch.tensor([[0.6, 0.8], [1.0, 0.0]]))
        tensor([[ 0.5120, -0.3840],
                [ 0.0000,  0.0000]])
        """
        shared = _check_weights(query, key, value, out)
        return cls(
            [
                SA(
                    beta,
                    query_key=LowRank(query[h].mT, key[h // shared].mT),
                    value=LowRank(out[h], value[h // shared].mT),
                    causal=causal,
                )
                for h in range(len(query))
            ],
            scale=scale,
        )

    @property
    def attends(self) -> bool:
        """Whether the field has a kernel."""
        return True

    @property
    def normalized(self) -> bool:
        """Whether the weights of each head sum to 1."""
        return self.heads[0].normalized

    @property
    def exchangeable(self) -> bool:
        """Whether tokens can be relabelled, and so merged: no causal mask, no bias."""
        return all(head.exchangeable for head in self.heads)

    @property
    def continuous(self) -> bool:
        """Whether the velocity is continuous, as that of all heads but hardmax is."""
        return all(head.continuous for head in self.heads)

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse tokens that do not fit the matrices of the heads."""
        for head in self.heads:
            head.check_size(x)
        super().check_size(x)

    def scaled(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0) -> ScaledVelocity:
        """The velocity as e^{log_scale} times a direction of ordinary size; log_scale is 0 where weights sum to 1.

        >>> from helmscope.fields.attention import USA
        >>> MultiHead([USA(beta=1000.0), USA(beta=10.0)]).scaled(torch.tensor([[1.0, 0.0], [0.6, 0.8]])).log_scale
        tensor([[600.],
                [600.]])
        """
        parts, shift = self._parts(x, weights, tangent=True)
        total = self._together(parts)
        return ScaledVelocity(project(x, total), finite_log_scale(total, shift))

    @property
    def overflows(self) -> bool:
        """Whether e^beta may leave the dtype: it does not where weights sum to 1."""
        return not self.normalized

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: for inner loops and autograd transforms."""
        scaled = self.scaled(x, weights=weights)
        return scaled.direction if self.normalized else torch.exp(scaled.log_scale) * scaled.direction

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The sum over heads before projection: what a layer adds to the residual stream."""
        parts, shift = self._parts(x, weights, tangent=False)
        total = self._together(parts)
        return total if self.normalized else torch.exp(finite_log_scale(total, shift)) * total

    def outputs(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch heads n d"]:
        """What each head gives before projection and ``scale``: V_h sum_j p^h_ij x_j."""
        parts, shift = self._parts(x, weights, tangent=False)
        if not self.normalized:
            parts = torch.exp(shift.unsqueeze(-3)) * parts
        left, _ = _factors([head.value for head in self.heads], x)
        return parts if left is None else matrix_product(parts, left.mT.contiguous())

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch heads n n"]:
        """The weight of key j for query i in each head: outputs_hi = sum_j kernel_hij V_h x_j."""
        request = self.request(x, weights, tangent=False)
        return (softmax_kernel if self.normalized else sum_kernel)(transformed_logits(request), request.weights)

    def restricted(self, dim: int) -> MultiHead | None:
        """The same flow on R^dim, where all heads commute with rotations; else None."""
        heads = [each for head in self.heads if (each := head.restricted(dim)) is not None]
        return replace(self, heads=heads) if len(heads) == len(self.heads) else None

    def _parts(self, x: Tensor, weights: Tensor | None, *, tangent: bool) -> tuple[Tensor, Tensor]:
        """What V_h (or its left factor) is applied to, (*batch, heads, n, r), over e^{shift}, (*batch, n, 1)."""
        request = self.request(x, weights, tangent=tangent)
        sums = token_sum(request)
        if self.normalized:
            return sums.mean, torch.zeros_like(x[..., :1])
        # a head that sees nobody must not set the scale of the others
        shift = torch.where(has_visible_key(request), sums.shift, -torch.inf)
        top = shift.amax(-3)
        top = torch.where(top > -torch.inf, top, 0.0)
        parts = torch.exp(shift - top.unsqueeze(-3)) * sums.total / total_weight(request.value, request.weights)
        return parts, top

    def request(self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, tangent: bool) -> Request:
        """The sums of all heads, along an axis before the tokens; ``tangent`` where they will be projected."""
        left, right = _factors([head.query_key for head in self.heads], x)
        positions = self.heads[0].positions
        seen = x if positions is None else positions.tokens(x)
        query, key = self._through(seen, left), self._through(seen, right)
        if positions is not None:
            query, key = positions.turned(query), positions.turned(key)
        factor = self._per_head([head.factor for head in self.heads], x)
        _, inner = _factors([head.value for head in self.heads], x)
        first = self.heads[0]
        return Request(
            factor * query,
            key,
            self._through(x, inner),
            weights=None if weights is None else weights.unsqueeze(-2),
            bias=self._bias(x),
            causal=first.causal,
            skip_self=self._skip_self(x) if tangent else False,
            transform_logits=first.logit_transform,
        )

    @staticmethod
    def _per_head(factors: Sequence[float | Tensor], x: Tensor) -> Tensor:
        """A number for each head, or for each system and head, as a factor of (*batch, heads, n, r)."""
        if not any(isinstance(factor, torch.Tensor) for factor in factors):
            return torch.tensor(factors, dtype=x.dtype, device=x.device)[:, None, None]
        given = [torch.as_tensor(factor, dtype=x.dtype, device=x.device) for factor in factors]
        return torch.stack(torch.broadcast_tensors(*given), -1)[..., None, None]  # type: ignore[no-untyped-call]

    def _skip_self(self, x: Tensor) -> bool | Tensor:
        """In which heads V_h x_i is parallel to x_i."""
        parallel = [head.value_scale is not None for head in self.heads]
        return parallel[0] if len(set(parallel)) == 1 else torch.tensor(parallel, device=x.device)[:, None, None]

    def _bias(self, x: Tensor) -> Tensor | None:
        if all(head.bias is None for head in self.heads):
            return None
        none = torch.zeros(x.shape[-2], x.shape[-2], dtype=x.dtype, device=x.device)
        return torch.stack([none if head.bias is None else head.bias.to(x) for head in self.heads])

    def _through(self, x: Tensor, factors: Tensor | None) -> Tensor:
        """factors_h^T x_i of every head, (*batch, heads, n, r), as one product; x_i where None.

        Laid out anew: the last bit of later products depends on whether they meet copies or views.
        """
        if factors is None:
            return x.unsqueeze(-3).expand(*x.shape[:-2], len(self.heads), *x.shape[-2:]).contiguous()
        heads, d, r = factors.shape[-3:]
        rows = matrix_product(x, factors.transpose(-3, -2).reshape(*factors.shape[:-3], d, heads * r))
        return rows.reshape(*x.shape[:-1], heads, r).transpose(-3, -2).contiguous()

    @cached_property
    def _value_scales(self) -> list[float] | None:
        """c_h where every V_h = c_h I, else None."""
        scales = [head.value_scale for head in self.heads if head.value_scale is not None]
        return scales if len(scales) == len(self.heads) else None

    @full_precision
    def _together(self, parts: Tensor) -> Tensor:
        """scale sum_h V_h parts_h, as one matrix product: the last bit of a sum over an axis depends on the batch."""
        assert self.scale is not None
        heads, n, r = parts.shape[-3:]
        if self._value_scales is not None:
            scales = torch.tensor([self._value_scales], dtype=parts.dtype, device=parts.device)
            flat = scales.expand(*parts.shape[:-3], 1, heads) @ parts.reshape(*parts.shape[:-3], heads, n * r)
            return self.scale * flat.reshape(*parts.shape[:-3], n, r)
        left, _ = _factors([head.value for head in self.heads], parts)
        assert left is not None
        rows = parts.transpose(-3, -2).reshape(*parts.shape[:-3], n, heads * r)
        return self.scale * matrix_product(rows, left.mT.reshape(*left.shape[:-3], heads * r, left.shape[-2]))

    def complaint(self, x: Tensor, weights: Tensor | None) -> str:
        for h, head in enumerate(self.heads):
            if not bool(torch.isfinite(head.velocity(x, weights=weights).detach()).all()):
                return f"in heads[{h}] {head.complaint(x, weights)}"
        return f"scale is {self.scale:g}, and the velocity leaves {x.dtype}: take it smaller"


def _factors(matrices: Sequence[Tensor | LowRank | None], x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(L, R) with M_h = L_h R_h^T, (*batch, heads, d, r) each, None for I. Lower ranks are filled up with columns of 0,
    and beside a dense matrix all are dense.
    """
    if all(matrix is None for matrix in matrices):
        return None, None
    thin = [matrix for matrix in matrices if isinstance(matrix, LowRank)]
    if len(thin) < len(matrices):
        return _stacked([as_dense(matrix, x) for matrix in matrices]), None
    rank = max(matrix.rank for matrix in thin)
    left = [pad(matrix.left.to(x), (0, rank - matrix.rank)) for matrix in thin]
    right = [pad(matrix.right.to(x), (0, rank - matrix.rank)) for matrix in thin]
    return _stacked(left), _stacked(right)


def _stacked(matrices: Sequence[Tensor]) -> Float[Tensor, "*batch heads d r"]:
    """One matrix per head, along an axis behind those of the batch."""
    return torch.stack(torch.broadcast_tensors(*matrices), -3)  # type: ignore[no-untyped-call]


def checked_heads(heads: object) -> tuple[Attention, ...]:
    """Heads of one kind that fit the same tokens and share all but beta, matrices and bias; else a ``HelmscopeError``.

    >>> len(checked_heads([SA(beta=1.0), SA(beta=2.0)]))
    2
    """
    if not isinstance(heads, Sequence) or not heads or not all(isinstance(head, Attention) for head in heads):
        raise HelmscopeError(f"heads is {kinds(heads)}, but it must be a sequence of fields such as SA(beta=4.0)")
    first = heads[0]
    sizes: dict[str, tuple[int, str]] = {}
    for h, head in enumerate(heads):
        if type(head) is not type(first):
            names = f"{type(head).__name__} and heads[0] {type(first).__name__}"
            raise HelmscopeError(f"heads[{h}] is {names}, but all heads must be of one kind")
        for name in (part.name for part in fields(first) if part.name not in OWN):
            if getattr(head, name) != getattr(first, name):
                given = f"{name}={getattr(head, name)!r} and heads[0] {name}={getattr(first, name)!r}"
                raise HelmscopeError(f"heads[{h}] has {given}, but all heads must share it")
        for name, axis in (("query_key", "d"), ("value", "d"), ("bias", "n")):
            matrix = getattr(head, name)
            if matrix is None:
                continue
            size, whose = sizes.setdefault(axis, (matrix.shape[-1], f"{name} of heads[{h}]"))
            if matrix.shape[-1] != size:
                given = f"{name} of heads[{h}] has shape {tuple(matrix.shape)} and {whose} {(size, size)}"
                raise HelmscopeError(f"{given}, but all heads must fit the same tokens")
    ranks = {head.query_key.rank for head in heads if isinstance(head.query_key, LowRank)}
    if isinstance(first.positions, Rotary) and len(ranks) > 1:
        raise HelmscopeError(f"heads have queries of dimension {sorted(ranks)}, but rotary positions need one for all")
    return tuple(heads)


def kinds(given: object) -> str:
    """What was given, by the names of types: printed, a field holds whole matrices."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return type(given).__name__
    return f"[{', '.join(type(part).__name__ for part in given)}]"


def _check_weights(query: object, key: object, value: object, out: object) -> int:
    """How many heads share a key and a value; refuses weights that do not fit together."""
    named = {"query": query, "key": key, "value": value, "out": out}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in named.items():
        if not isinstance(part, torch.Tensor) or part.ndim != 3 or 0 in part.shape:
            given = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            raise HelmscopeError(f"{name} is {given}, but it must be a torch tensor with axes (heads, ., .)")
        shapes[name] = tuple(part.shape)
    (heads, dh, d), (kv, dv, _) = shapes["query"], shapes["value"]
    if heads % kv:
        raise HelmscopeError(
            f"query has {heads} heads and value {kv}, but the number of query heads must be a multiple of the other"
        )
    wanted = {"key": (kv, dh, d), "value": (kv, dv, d), "out": (heads, d, dv)}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            asked = f"query of shape {shapes['query']} and value of shape {shapes['value']} ask for {shape}"
            raise HelmscopeError(f"{name} has shape {shapes[name]}, but {asked}")
    return heads // kv
