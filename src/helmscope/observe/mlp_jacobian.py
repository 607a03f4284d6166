"""The antisymmetric share of the MLP's Jacobian: in all of R^d, on the tangent space, and weighted by the tokens.

With J = Df at the unit vectors x that the folded force f reads, and S and A its symmetric and antisymmetric parts
[Helmholtz Transformer, no. 3]:

    antisymmetric_share           |A|^2 / |J|^2
    antisymmetric_share_tangent   the same for P J P, P the projection onto the tangent space (after a LayerNorm P also
                                  removes the mean over coordinates; the sphere is then S^(d-2))
    antisymmetric_share_weighted  the same for C^(1/2) J C^(1/2), C the covariance of the tokens of the prompt:
                                  directions count as much as tokens differ in them

each in [0, 1], the mean over the tokens of a prompt; 0 for the gradient of a potential, 1 for a rotation.

How to read it. Independent random weights give 1/2 for each. A low weighted share with a high plain one: f is nearly a
gradient within the cloud. ``positive_trace_share`` is the share of tokens with tr J > 0, and ``weighted_trace`` is
tr(J C): below 0 the force pulls the tokens of the prompt together.
In a mixture of experts J is that of the routed force with the routing weights p frozen, sum p_k J_k; NAME_with_router
is the share with their derivative, sum p_k J_k + f_k (grad p_k)^T, while the selection of experts has none.
``expert_NAME`` is the same for each expert alone, at the tokens that select it and by its routing weights, with C that
of the prompt.
How it fails. With fewer tokens than dimensions C has rank n - 1 (``covariance_rank_bound``): it does not see the other
directions; identical tokens have C = 0 and no weighted share (NaN). J = 0 has no share (NaN at such tokens, which the
mean leaves out).
Cost. One replay, O(h^2) per token for the plain and tangent shares, and O(h^2 n) per prompt for C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from helmscope.fields.jacobian_algebra import JacobianInvariants, jacobian_algebra, slopes_of
from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_force import MlpForce, unit_points
from helmscope.observe.mlp_mixture import DENSE_ENTRIES, PreparedMixture, prepare
from helmscope.observe.mlp_parts import is_centered
from helmscope.observe.track import SHARE, replayed, token_weights, with_bounds
from helmscope.types import Instrument, Needs

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import MlpTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

LABELS = {
    "antisymmetric_share": "antisymmetric share of the MLP's Jacobian in R^d",
    "antisymmetric_share_tangent": "antisymmetric share of the MLP's Jacobian on the tangent space",
    "antisymmetric_share_weighted": "antisymmetric share of the MLP's Jacobian, weighted by token covariance",
    "positive_trace_share": "share of tokens at which the MLP's Jacobian has a trace above 0",
    "weighted_trace": "tr(J C), C the covariance of the tokens",
    "covariance_rank_bound": "largest possible rank of C: tokens minus one, or the dimension",
}
SHARES = tuple(name for name in LABELS if name.startswith("antisymmetric_share"))
LABELS |= {f"{name}_with_router": f"{LABELS[name]}, with the derivative of the routing weights" for name in SHARES}
EXPERT = tuple(name for name in LABELS if name != "covariance_rank_bound" and not name.endswith("_with_router"))
LABELS |= {f"expert_{name}": f"{LABELS[name]}, by expert" for name in EXPERT}
LABELS |= {"expert_weight": "mean routing weight of an expert"}


class MlpJacobian(Instrument):
    """Instrument: the antisymmetric share |A|^2 / |J|^2 of the Jacobian J of each MLP, with A its antisymmetric part:
    of J itself, of P J P on the tangent space, and of C^{1/2} J C^{1/2}, weighted by the covariance C of the tokens of
    each system. A mixture of experts is taken as routed, its weights frozen; NAME_with_router includes their
    derivative, and ``expert_NAME`` has the axis ``expert``: NaN for an expert that no token of a system selects.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.solve.integrate import integrate
    >>> shear = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, 1.0], [0.0, 0.0]]), activation=Identity())
    >>> seen = integrate(shear, torch.eye(2), times=[0.0]).replay(MlpJacobian())["mlp_jacobian"]
    >>> seen.antisymmetric_share.item(), seen.antisymmetric_share_tangent.item()
    (0.5, nan)
    """

    name = "mlp_jacobian"
    needs = Needs.FORCE

    def unsupported_reason(self, system: System) -> str | None:
        """Why a system cannot be measured, as for ``MlpForce``."""
        reason = MlpForce().unsupported_reason(system)
        return reason and reason.replace("mlp_force", self.name)

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the shares at the inputs of the MLP."""
        weights = token_weights(tensors.state, context.weights)
        x = unit_points(self, context, tensors.point, weights)
        centered = is_centered(tensors.norm)
        prepared = prepare(tensors.force, like=x)
        if isinstance(prepared, PreparedMixture):
            rows, experts = zip(
                *(_routed(prepared, *each, centered) for each in zip(x, weights, strict=True)), strict=True
            )
            self.keep(
                context, {name: torch.stack([row[name] for row in experts]) for name in experts[0]}, axes=("expert",)
            )
        else:
            algebra, slopes = prepared.algebra, slopes_of(prepared.mlp, x)
            plain = algebra.invariants(slopes)
            inner = jacobian_algebra(prepared.mlp, like=x, centered=True) if centered else algebra
            tangent = inner.tangent_invariants(slopes, x)
            rows = tuple(
                _summary(
                    (
                        _row(plain, k),
                        _row(tangent, k),
                        algebra.weighted_invariants(slopes[k], _factor(x[k], weights[k])),
                    ),
                    weights[k],
                    _factor(x[k], weights[k]),
                )
                for k in range(len(x))
            )
        self.keep(context, {name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    def result(self) -> xr.Dataset:
        """The shares of every layer and replicate."""
        measured = super().result()
        for name, value in measured.data_vars.items():
            value.attrs |= label_attributes(LABELS[str(name)])
        if "expert_weight" in measured:
            measured.attrs["routing_weights"] = "frozen, except in variables whose names end in _with_router"
        measured.attrs["frame"] = "unit sphere: the norm's gain and bias folded into the weights"
        return with_bounds(measured, dict.fromkeys([n for n in LABELS if "share" in n or "swirl" in n], SHARE))


def mlp_jacobian(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """Antisymmetric shares of the Jacobians of a system's MLPs, with replicates: ``MlpJacobian`` by one replay.

    ``progress`` is called with the share of the work done.

    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.solve.integrate import integrate
    >>> turn = MLP(w_in=torch.eye(3), w_out=torch.eye(3))
    >>> mlp_jacobian(integrate(turn, torch.eye(3), times=[0.0])).antisymmetric_share_weighted.item()
    0.0
    """
    instrument = MlpJacobian()
    return replayed(system, instrument, progress)


def antisymmetric_share(force: Any, x: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n"]:
    """|A|^2 / |J|^2 of the Jacobian of an MLP, or of a mixture of experts as routed, at points x; NaN where J = 0.

    >>> from helmscope.fields.mlp import MLP
    >>> antisymmetric_share(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)[None])
    tensor([[0., 0.]])
    """
    prepared = prepare(force, like=x)
    if isinstance(prepared, PreparedMixture):
        return torch.cat([prepared.at(cloud[None]).jacobian.antisymmetric_share for cloud in x])
    return prepared.algebra.invariants(slopes_of(prepared.mlp, x)).antisymmetric_share


@full_precision
def force_jacobians(force: Any, x: Float[Tensor, "k d"]) -> Float[Tensor, "k d d"]:
    """The Jacobians Df of an MLP, or of a mixture of experts as routed, at a few points x: d^2 numbers each.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.fields.mlp import MLP
    >>> force_jacobians(MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2), activation=Identity()), torch.eye(2)[:1])
    tensor([[[2., 0.],
             [0., 2.]]])
    """
    prepared = prepare(force, like=x)
    if not isinstance(prepared, PreparedMixture):
        return prepared.algebra.matrices(slopes_of(prepared.mlp, x))
    return prepared.jacobian(x, prepared.mixture.routing_weights(x))


@full_precision
def tangent_jacobians(
    force: Any, x: Float[Tensor, "k d"], *, centered: bool
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k d d"]]:
    """The tangential force T f and its covariant derivative T Df T - <x, f> T on the sphere, at a few unit vectors x;
    T also removes the mean over coordinates if ``centered``. On the sphere of radius |y| both are divided by |y|.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.fields.mlp import MLP
    >>> turn = MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2), activation=Identity())
    >>> tangent_jacobians(turn, torch.eye(2)[:1], centered=False)[1]  # 2 - 2 along the second axis
    tensor([[[0., 0.],
             [0., 0.]]])
    """
    value, jacobian = force.ambient(x), force_jacobians(force, x)
    along = (x * value).sum(-1, keepdim=True)
    tangential = value - along * x
    tangential = tangential - tangential.mean(-1, keepdim=True) if centered else tangential
    onto = tangent_projectors(x, centered=centered)
    return tangential, on_tangent_space(jacobian, x, centered=centered) - along.unsqueeze(-1) * onto


@full_precision
def on_tangent_space(
    matrices: Float[Tensor, "*k d d"], x: Float[Tensor, "*k d"], *, centered: bool
) -> Float[Tensor, "*k d d"]:
    """T M T with the ``tangent_projectors`` T at unit vectors x, without a product of two matrices.

    >>> on_tangent_space(torch.ones(2, 2), torch.tensor([1.0, 0.0]), centered=False)
    tensor([[0., 0.],
            [0., 1.]])
    """
    column = x.unsqueeze(-1)
    rest = matrices - column * (column.mT @ matrices)
    rest = rest - (rest @ column) * column.mT
    if centered:
        rest = rest - rest.mean(-1, keepdim=True)
        rest = rest - rest.mean(-2, keepdim=True)
    return rest


def tangent_projectors(x: Float[Tensor, "*k d"], *, centered: bool) -> Float[Tensor, "*k d d"]:
    """T = I - x x^T, which also removes the mean over coordinates if ``centered``, for unit vectors x (of mean 0).

    >>> tangent_projectors(torch.tensor([1.0, 0.0]), centered=False)
    tensor([[0., 0.],
            [0., 1.]])
    """
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    onto = eye - x.unsqueeze(-1) * x.unsqueeze(-2)
    return onto - 1 / x.shape[-1] if centered else onto


def _factor(x: Tensor, weights: Tensor) -> Tensor:
    """Y with Y^T Y = C, the weighted covariance of the tokens; 0 if they are identical up to rounding."""
    share = (weights / weights.sum()).unsqueeze(-1)
    factor: Tensor = share.sqrt() * (x - (share * x).sum(0))
    rounding = 64 * torch.finfo(x.dtype).eps
    return torch.where(factor.square().sum() > rounding**2, factor, 0.0)


def _row(values: JacobianInvariants, k: int) -> JacobianInvariants:
    return JacobianInvariants(values.trace[k], values.trace_of_square[k], values.squared_norm[k])


@full_precision
def _routed(
    mixture: PreparedMixture, x: Tensor, weights: Tensor, centered: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The quantities of one system under a mixture of experts, as routed and by expert, from its Jacobians."""
    routed, factor = mixture.mixture.routing_weights(x), _factor(x, weights)
    step = max(1, DENSE_ENTRIES // x.shape[-1] ** 2)
    blocks = [slice(i, i + step) for i in range(0, len(x), step)]
    found, whole = [], []
    for block in blocks:
        jacobian = mixture.jacobian(x[block], {e: weight[block] for e, weight in routed.items()})
        found.append(_kinds(jacobian, x[block], factor, centered))
        whole.append(_kinds(jacobian + _router_part(mixture, x[block]), x[block], factor, centered))
    result = _summary(_joined(found), weights, factor)
    with_router = _summary(_joined(whole), weights, factor)
    result |= {f"{name}_with_router": with_router[name] for name in SHARES}
    experts = {f"expert_{name}": x.new_full((len(mixture.experts),), torch.nan) for name in EXPERT}
    experts["expert_weight"] = x.new_zeros(len(mixture.experts))
    for expert, weight in routed.items():
        experts["expert_weight"][expert] = (weights * weight).sum() / weights.sum()
        active, prepared = (weight != 0) & (weights > 0), mixture.experts[expert]
        if not bool(active.any()):
            continue
        points = x[active]
        own = [
            _kinds(prepared.algebra.matrices(slopes_of(prepared.mlp, points[block])), points[block], factor, centered)
            for block in blocks
            if block.start < len(points)
        ]
        for name, value in _summary(_joined(own), (weights * weight)[active], factor).items():
            if name in EXPERT:
                experts[f"expert_{name}"][expert] = value
    return result, experts


def _router_part(mixture: PreparedMixture, x: Tensor) -> Tensor:
    """sum_k f_k (grad p_k)^T, what the derivative of the routing weights adds to the Jacobian."""
    _, indices, gradients = mixture.mixture.select_with_gradients(x)
    total = x.new_zeros(*x.shape, x.shape[-1])
    for place in range(indices.shape[-1]):
        for expert in sorted(set(indices[:, place].tolist())):
            chosen = indices[:, place] == expert
            force = mixture.experts[expert].mlp.ambient(x[chosen])
            total[chosen] += force.unsqueeze(-1) * gradients[chosen, place].to(x).unsqueeze(-2)
    return total


Kinds = tuple[JacobianInvariants, JacobianInvariants, JacobianInvariants]


@full_precision
def _kinds(jacobian: Tensor, x: Tensor, factor: Tensor, centered: bool) -> Kinds:
    """The invariants of J, P J P and C^(1/2) J C^(1/2) at points x."""
    onto, of = tangent_projectors(x, centered=centered), JacobianInvariants.of_matrices
    return of(jacobian), of(onto @ jacobian @ onto), of(factor @ jacobian @ factor.mT)


def _joined(pieces: list[Kinds]) -> Kinds:
    first, second, third = (
        JacobianInvariants(
            torch.cat([piece[k].trace for piece in pieces]),
            torch.cat([piece[k].trace_of_square for piece in pieces]),
            torch.cat([piece[k].squared_norm for piece in pieces]),
        )
        for k in range(3)
    )
    return first, second, third


def _summary(kinds: Kinds, weights: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """The means over the tokens of one system."""
    plain, tangent, weighted = kinds
    counted = int((weights > 0).sum())
    positive = (plain.trace > 0).to(weights)
    return {
        "antisymmetric_share": _mean(plain.antisymmetric_share, weights),
        "antisymmetric_share_tangent": _mean(tangent.antisymmetric_share, weights),
        "antisymmetric_share_weighted": _mean(weighted.antisymmetric_share, weights),
        "positive_trace_share": _mean(positive, weights),
        "weighted_trace": _mean(weighted.trace, weights),
        "covariance_rank_bound": weights.new_tensor(float(min(counted - 1, factor.shape[-1]))),
    }


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over tokens at which the value exists; NaN if it exists at none."""
    weights = torch.where(values.isnan(), 0.0, weights)
    return torch.where(weights > 0, weights * values, 0.0).sum() / weights.sum()
