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
How it fails. With fewer tokens than dimensions C has rank n - 1 (``covariance_rank_limit``): it does not see the other
directions; identical tokens have C = 0 and no weighted share (NaN). J = 0 has no share (NaN at such tokens, which the
mean leaves out).
Cost. One replay, O(h^2) per token for the plain and tangent shares, and O(h^2 n) per prompt for C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from helmscope.fields.jacobian_algebra import JacobianInvariants, jacobian_algebra, slopes_of
from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.drift import DriftAndSwirl, unit_points
from helmscope.observe.mlp_mixture import DENSE_ENTRIES, PreparedMixture, prepare
from helmscope.observe.mlp_parts import is_centered
from helmscope.observe.track import SHARE, check_system, token_weights, with_bounds
from helmscope.types import Instrument, Needs

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import MlpTensors, ReplayContext, System

LABELS = {
    "antisymmetric_share": "antisymmetric share of the MLP's Jacobian in R^d",
    "antisymmetric_share_tangent": "antisymmetric share of the MLP's Jacobian on the tangent space",
    "antisymmetric_share_weighted": "antisymmetric share of the MLP's Jacobian, weighted by token covariance",
    "positive_trace_share": "share of tokens at which the MLP's Jacobian has a trace above 0",
    "weighted_trace": "tr(J C), C the covariance of the tokens",
    "covariance_rank_limit": "largest possible rank of C: tokens minus one, or the dimension",
}


class MlpJacobian(Instrument):
    """Instrument: the antisymmetric share |A|^2 / |J|^2 of the Jacobian J of each MLP, with A its antisymmetric part:
    of J itself, of P J P on the tangent space, and of C^{1/2} J C^{1/2}, weighted by the covariance C of the tokens of
    each system. A mixture of experts is taken as routed, its weights frozen.

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

    def refusal(self, system: System) -> str | None:
        """Why a system cannot be measured, as for ``DriftAndSwirl``."""
        reason = DriftAndSwirl().refusal(system)
        return reason and reason.replace("drift_and_swirl", self.name)

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the shares at the inputs of the MLP."""
        weights = token_weights(tensors.state, context.weights)
        x = unit_points(self, context, tensors.point, weights)
        centered = is_centered(tensors.norm)
        prepared = prepare(tensors.force, like=x)
        if isinstance(prepared, PreparedMixture):
            rows = [_routed(prepared, cloud, w, centered) for cloud, w in zip(x, weights, strict=True)]
        else:
            algebra, slopes = prepared.algebra, slopes_of(prepared.mlp, x)
            plain = algebra.invariants(slopes)
            inner = jacobian_algebra(prepared.mlp, like=x, centered=True) if centered else algebra
            tangent = inner.tangent_invariants(slopes, x)
            rows = [
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
            ]
        self.keep(context, {name: torch.stack([row[name] for row in rows]) for name in LABELS})

    def result(self) -> xr.Dataset:
        """The shares of every layer and replicate."""
        measured = super().result()
        for name, value in measured.data_vars.items():
            value.attrs["long_name"] = LABELS[str(name)]
        measured.attrs["frame"] = "unit sphere: the norm's gain and bias folded into the weights"
        return with_bounds(measured, dict.fromkeys([n for n in LABELS if "share" in n or "swirl" in n], SHARE))


def mlp_jacobian(system: System) -> xr.Dataset:
    """Antisymmetric shares of the Jacobians of a system's MLPs, with replicates: ``MlpJacobian`` by one replay.

    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.solve.integrate import integrate
    >>> turn = MLP(w_in=torch.eye(3), w_out=torch.eye(3))
    >>> mlp_jacobian(integrate(turn, torch.eye(3), times=[0.0])).antisymmetric_share_weighted.item()
    0.0
    """
    instrument = MlpJacobian()
    return check_system(system).replay(instrument)[instrument.name]


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
    return prepared.jacobian(x, _routing(prepared, x))


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
    onto = tangent_projectors(x, centered=centered)
    along = (x * value).sum(-1)[:, None, None]
    return (onto @ value.unsqueeze(-1)).squeeze(-1), onto @ jacobian @ onto - along * onto


def tangent_projectors(x: Float[Tensor, "*k d"], *, centered: bool) -> Float[Tensor, "*k d d"]:
    """T = I - x x^T, which also removes the mean over coordinates if ``centered``, for unit vectors x (of mean 0).

    >>> tangent_projectors(torch.tensor([1.0, 0.0]), centered=False)
    tensor([[0., 0.],
            [0., 1.]])
    """
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    onto = eye - x.unsqueeze(-1) * x.unsqueeze(-2)
    return onto - 1 / x.shape[-1] if centered else onto


def _routing(mixture: PreparedMixture, x: Tensor) -> dict[int, Tensor]:
    """The routing weight of every selected expert at points x (k, d)."""
    shares, indices = mixture.mixture.select(x)
    return {e: torch.where(indices == e, shares.to(x), 0.0).sum(-1) for e in sorted(set(indices.flatten().tolist()))}


def _factor(x: Tensor, weights: Tensor) -> Tensor:
    """Y with Y^T Y = C, the weighted covariance of the tokens; 0 if they are identical up to rounding."""
    share = (weights / weights.sum()).unsqueeze(-1)
    factor: Tensor = share.sqrt() * (x - (share * x).sum(0))
    rounding = 64 * torch.finfo(x.dtype).eps
    return torch.where(factor.square().sum() > rounding**2, factor, 0.0)


def _row(values: JacobianInvariants, k: int) -> JacobianInvariants:
    return JacobianInvariants(values.trace[k], values.trace_of_square[k], values.squared_norm[k])


@full_precision
def _routed(mixture: PreparedMixture, x: Tensor, weights: Tensor, centered: bool) -> dict[str, Tensor]:
    """The quantities of one system under a mixture of experts, from its Jacobians."""
    routed, factor, found = _routing(mixture, x), _factor(x, weights), []
    step = max(1, DENSE_ENTRIES // x.shape[-1] ** 2)
    for i in range(0, len(x), step):
        points = x[i : i + step]
        jacobian = mixture.jacobian(points, {e: weight[i : i + step] for e, weight in routed.items()})
        onto = tangent_projectors(points, centered=centered)
        matrices = (jacobian, onto @ jacobian @ onto, factor @ jacobian @ factor.mT)
        found.append([JacobianInvariants.of_matrices(each) for each in matrices])
    joined = [
        JacobianInvariants(
            torch.cat([piece[k].trace for piece in found]),
            torch.cat([piece[k].trace_of_square for piece in found]),
            torch.cat([piece[k].squared_norm for piece in found]),
        )
        for k in range(3)
    ]
    return _summary((joined[0], joined[1], joined[2]), weights, factor)


def _summary(
    kinds: tuple[JacobianInvariants, JacobianInvariants, JacobianInvariants], weights: Tensor, factor: Tensor
) -> dict[str, Tensor]:
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
        "covariance_rank_limit": weights.new_tensor(float(min(counted - 1, factor.shape[-1]))),
    }


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over tokens at which the value exists; NaN if it exists at none."""
    weights = torch.where(values.isnan(), 0.0, weights)
    return torch.where(weights > 0, weights * values, 0.0).sum() / weights.sum()
