"""A mixture of experts at given tokens, as routed and by expert: its force, algebraic split and Jacobian.

It is treated with the routing weights p frozen (their derivative is not included, and the selection of experts has
none): f = sum p_k f_k, J = sum p_k J_k, U = sum p_k U_k, R = sum p_k R_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.fields.jacobian_algebra import JacobianInvariants, slopes_of
from helmscope.fields.norms import UnitNorm
from helmscope.models.experts import MixtureOfExperts
from helmscope.observe.mlp_parts import Parts, PreparedMLP, Split, map_parts, prepare_mlp

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.norms import Norm

DENSE_ENTRIES = 2**24  # of Jacobians that are stored at once


@dataclass(frozen=True, eq=False)
class PreparedMixture:
    """A mixture of experts, each prepared; made by ``prepare``. Jacobians are stored, d^2 numbers per token.

    >>> from helmscope.fields.mlp import GatedMLP
    >>> one = GatedMLP(w_gate=torch.eye(2), w_up=torch.eye(2), w_out=torch.eye(2))
    >>> always = lambda x: (torch.full((len(x), 1), 0.5), torch.zeros(len(x), 1, dtype=torch.long))
    >>> prepare(MixtureOfExperts((one,), always)).at(torch.zeros(1, 3, 2)).experts[0][0]
    tensor([[0.5000, 0.5000, 0.5000]])
    """

    mixture: MixtureOfExperts
    experts: tuple[PreparedMLP, ...]

    def at(self, x: Float[Tensor, "*batch d"]) -> Parts:
        """All parts at unit vectors x, as routed, and by expert: its weight at each token, and its own parts, which are
            NaN at the tokens that it does not read.

        >>> from helmscope.fields.mlp import GatedMLP
        >>> one = GatedMLP(w_gate=torch.eye(2), w_up=torch.eye(2), w_out=torch.eye(2))
            >>> always = lambda x: (torch.full((len(x), 1), 0.5), torch.zeros(len(x), 1, dtype=torch.long))
            >>> prepare(MixtureOfExperts((one,), always)).at(torch.zeros(1, 3, 2)).force.shape
            torch.Size([1, 3, 2])
        """
        flat = x.reshape(-1, x.shape[-1])
        weights = self.mixture.routing_weights(flat)
        own = {
            expert: _scattered(self.experts[expert].at(flat[weight != 0]), weight != 0)
            for expert, weight in weights.items()
        }
        parts = _summed(flat, weights, own, self._invariants(flat, weights))
        shape = x.shape[:-1]
        by_expert = {e: (weights[e].reshape(shape), _reshaped(own[e], shape)) for e in weights}
        return replace(_reshaped(parts, shape), experts=by_expert)

    def _invariants(self, x: Float[Tensor, "tokens d"], weights: Mapping[int, Tensor]) -> JacobianInvariants:
        """Those of the routed Jacobian, from the matrices themselves."""
        step = max(1, DENSE_ENTRIES // x.shape[-1] ** 2)
        found = [
            JacobianInvariants.of_matrices(
                self.jacobian(x[i : i + step], {e: weight[i : i + step] for e, weight in weights.items()})
            )
            for i in range(0, len(x), step)
        ]
        return JacobianInvariants(
            *(
                torch.cat([getattr(each, name) for each in found])
                for name in ("trace", "trace_of_square", "squared_norm")
            )
        )

    def jacobian(self, x: Float[Tensor, "tokens d"], weights: Mapping[int, Tensor]) -> Float[Tensor, "tokens d d"]:
        """sum_k p_k J_k with the routing weights frozen.

        >>> from helmscope.fields.mlp import GatedMLP
        >>> one = GatedMLP(w_gate=torch.eye(2), w_up=torch.eye(2), w_out=torch.eye(2))
            >>> mixture = prepare(MixtureOfExperts((one,), lambda x: (torch.ones(1, 1), torch.zeros(1, 1).long())))
            >>> mixture.jacobian(torch.zeros(1, 2), {0: torch.ones(1)})
            tensor([[[0., 0.],
                     [0., 0.]]])
        """
        total = x.new_zeros(*x.shape, x.shape[-1])
        for expert, weight in weights.items():
            active, prepared = weight != 0, self.experts[expert]
            if bool(active.any()):
                matrices = prepared.algebra.matrices(slopes_of(prepared.mlp, x[active]))
                total[active] += weight[active, None, None] * matrices
        return total


def prepare(
    force: Any, *, like: Tensor | None = None, unfolded: Any = None, norm: Norm | None = None
) -> PreparedMLP | PreparedMixture:
    """What the weights of an MLP or a mixture of experts give once for all tokens; arguments as for ``prepare_mlp``.

    >>> from helmscope.fields.mlp import MLP
    >>> prepare(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).harmonic
    tensor([0., 0.])
    """
    if not isinstance(force, MixtureOfExperts):
        return prepare_mlp(force, like=like, unfolded=unfolded, norm=norm)
    own = force if unfolded is None or norm is None or isinstance(norm, UnitNorm) else unfolded
    pairs = zip(force.experts, own.experts, strict=True)
    return PreparedMixture(force, tuple(prepare_mlp(e, like=like, unfolded=u, norm=norm) for e, u in pairs))


def joined(rows: list[Parts]) -> Parts:
    """The parts of several systems, (batch, n), from those of each, (1, n): a mixture of experts is evaluated system by
    system, so that its results do not depend on the batch.

    >>> from helmscope.fields.mlp import MLP
    >>> mlp, x = prepare(MLP(w_in=torch.eye(2), w_out=torch.eye(2))), torch.zeros(1, 3, 2)
    >>> joined([mlp.at(x), mlp.at(x)]).force.shape
    torch.Size([2, 3, 2])
    """
    first, weight = rows[0], torch.zeros_like(rows[0].radial_slope)
    names = sorted({expert for row in rows for expert in row.experts})
    absent = map_parts(next(iter(first.experts.values()))[1] if first.experts else first, _not_a_number)
    experts = {
        expert: (
            torch.cat([row.experts[expert][0] if expert in row.experts else weight for row in rows]),
            _zipped([row.experts[expert][1] if expert in row.experts else absent for row in rows]),
        )
        for expert in names
    }
    return replace(_zipped(rows), experts=experts)


def _not_a_number(value: Tensor) -> Tensor:
    return torch.full_like(value, torch.nan)


def _zipped(rows: list[Parts]) -> Parts:
    """The parts of the rows, joined along their first axis."""
    columns = zip(*(_tensors(row) for row in rows), strict=True)
    return map_parts(rows[0], lambda _: torch.cat(next(columns)))


def _tensors(parts: Parts) -> list[Tensor]:
    """All tensors of the parts, in the order in which ``map_parts`` visits them."""
    seen: list[Tensor] = []

    def remember(value: Tensor) -> Tensor:
        seen.append(value)
        return value

    map_parts(parts, remember)
    return seen


def _reshaped(parts: Parts, shape: torch.Size) -> Parts:
    return map_parts(parts, lambda value: value.reshape(*shape, *value.shape[1:]))


def _scattered(parts: Parts, active: Tensor) -> Parts:
    """The parts of some tokens as parts of all, NaN elsewhere."""

    def change(value: Tensor) -> Tensor:
        whole = value.new_full((len(active), *value.shape[1:]), torch.nan)
        whole[active] = value
        return whole

    return map_parts(parts, change)


def _summed(x: Tensor, weights: Mapping[int, Tensor], own: Mapping[int, Parts], jacobian: JacobianInvariants) -> Parts:
    """The sum of the parts of experts by their weights."""

    def total(pick: Any, zero: Tensor) -> Tensor:
        for expert, weight in weights.items():
            value = pick(own[expert])
            weight = weight if value.ndim == 1 else weight.unsqueeze(-1)
            zero = zero + torch.where(weight != 0, weight * value, 0.0)
        return zero

    number, vector = torch.zeros_like(x[..., 0]), torch.zeros_like(x)
    names = list(next(iter(own.values())).splits)
    splits = {
        name: Split(
            total(lambda p, n=name: p.splits[n].potential, number),
            total(lambda p, n=name: p.splits[n].gradient, vector),
            total(lambda p, n=name: p.splits[n].swirl, vector),
        )
        for name in names
    }
    return Parts(
        total(lambda p: p.force, vector),
        total(lambda p: p.harmonic, vector),
        splits,
        jacobian,
        total(lambda p: p.radial_slope, number),
        total(lambda p: p.mean_slope, number),
    )
