"""The free energy nu Ent + int V of a layer near the cloud of its tokens, with V quadratic.

V = -U is the quadratic energy whose gradient is that of the MLP's force on average over the tokens of some prompts.
With f the folded force at the direction u that the MLP reads, T the projector to the tangent space there and |y| the
radius,

    slope  E grad V = -E T f / |y|,    stiffness  E Hess V = -E sym(T Df T - <u, f> T) / |y|,    at  E u,

that is V(x) = <slope, x - at> + <x - at, stiffness (x - at)> / 2: the symmetric part of the mean Jacobian, whatever the
weights of the MLP are, and no algebraic split. nu is the diffusivity of Sigma_A (mode A, summed over heads, over
|y|^2), as in ``attention_diffusion``. Attention counts in nu only [Helmholtz Transformer, no. 10].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.fields.jacobian_algebra import jacobian_algebra, slopes_of
from helmscope.fields.mlp import MLP, GatedMLP, linear
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.jko_gaussian import QuadraticSteps
from helmscope.observe.head_moments import HEADS_NEED, HeadMoments
from helmscope.observe.mlp_force import unit_points
from helmscope.observe.track import token_mean, token_weights
from helmscope.types import Instrument, Needs, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, ReplayPlan, System


@dataclass(frozen=True, eq=False)
class QuadraticFreeEnergy:
    """Free energy with a quadratic potential: F = nu Ent + int V with V(x) = <slope, x - at> + <x - at, stiffness (x -
    at)> / 2, in float64.

    >>> one = torch.ones(1, 1).double()
    >>> QuadraticFreeEnergy(one, one[0], one[0], 0.4).slope_at(2 * one[0])
    tensor([2.], dtype=torch.float64)
    """

    stiffness: Float[Tensor, "d d"]
    slope: Float[Tensor, " d"]
    at: Float[Tensor, " d"]
    nu: float

    @cached_property
    def steps(self) -> QuadraticSteps:
        """JKO steps of any size for this energy; kept, since all sizes share the eigenvectors of the stiffness."""
        return QuadraticSteps.of(self.stiffness, self.nu)

    @full_precision
    def slope_at(self, x: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """grad V at x.

        >>> one = torch.ones(1, 1).double()
        >>> QuadraticFreeEnergy(2 * one, 0 * one[0], one[0], 0.4).slope_at(one[0])
        tensor([0.], dtype=torch.float64)
        """
        return self.slope + self.stiffness @ (x - self.at)

    @full_precision
    def along(self, axes: Float[Tensor, "d k"]) -> QuadraticFreeEnergy:
        """The same on the span of orthonormal axes, in their coordinates.

        >>> eye = torch.eye(2).double()
        >>> QuadraticFreeEnergy(eye, eye[0], eye[1], 0.4).along(eye[:, :1]).slope
        tensor([1.], dtype=torch.float64)
        """
        stiffness = axes.mT @ self.stiffness @ axes
        return QuadraticFreeEnergy((stiffness + stiffness.mT) / 2, axes.mT @ self.slope, axes.mT @ self.at, self.nu)


class QuadraticFreeEnergies(Instrument):
    """Instrument: the ``energies`` of every layer, averaged over the tokens of the replicates ``selected``, without
    the first token of each; ``nu`` is kept for every replicate.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.fields.block import Block
    >>> from helmscope.solve.integrate import integrate
    >>> block = Block(SA(beta=0.0), MLP(w_in=torch.eye(3), w_out=torch.eye(3)))
    >>> run = integrate(block, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), times=[0.0])
    >>> found = QuadraticFreeEnergies([0])
    >>> _ = run.replay(found)
    >>> found.energies[0].slope.shape
    torch.Size([3])
    """

    name = "jko_step_test"  # of the measurement that needs them, for error messages
    needs = HEADS_NEED | Needs.FORCE

    def __init__(self, selected: list[int] | np.ndarray) -> None:
        self.selected = {int(k) for k in selected}
        self._sums: dict[int, dict[str, Tensor]] = {}
        self._nu: dict[int, list[float]] = {}

    def unsupported_reason(self, system: System) -> str | None:
        """Why a system cannot be measured: its forces must be MLPs."""
        for layer in system.layers:
            force = system.force(layer=layer)
            if not isinstance(force, MLP | GatedMLP):
                return f"system has {type_with_article(force)} as force(layer={layer}), but {self.name} needs an MLP"
        return None

    def start(self, plan: ReplayPlan) -> None:
        """Start a new replay."""
        super().start(plan)
        self._sums, self._nu = {}, {}

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records nu of a layer."""
        moments = HeadMoments.of(context, tensors)
        nu = token_mean(moments.sampling.sum(1) / (2 * moments.spaces.dim), self._weights(context, tensors.state))
        self.keep(context, {"nu": nu})
        rows = self._rows(context)
        self._nu.setdefault(context.layer, []).extend(nu[rows].double().tolist())

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Adds up the energy of a layer."""
        rows = self._rows(context)
        if not rows:
            return
        weights = self._weights(context, tensors.state)
        points = unit_points(self, context, tensors.point, token_weights(tensors.state, context.weights))
        radius = (tensors.state * tensors.direction).sum(-1)
        counts = weights[rows] > 0
        x, m, length = (each[rows][counts].double() for each in (points, weights, radius))
        sums = self._sums.setdefault(context.layer, {})
        for name, value in force_sums(tensors.force, x, m, length, centered=context.centered).items():
            sums[name] = sums[name] + value if name in sums else value

    def _rows(self, context: ReplayContext) -> list[int]:
        start = context.rows.start
        return [k - start for k in range(start, context.rows.stop) if k in self.selected]

    def _weights(self, context: ReplayContext, state: Tensor) -> Tensor:
        """The weights of tokens without the first one, unless it is the only one."""
        weights = token_weights(state, context.weights).clone()
        if weights.shape[1] > 1:
            weights[:, 0] = torch.where(weights[:, 1:].sum(-1) > 0, 0.0, weights[:, 0])
        return weights

    @property
    def energies(self) -> Mapping[int, QuadraticFreeEnergy]:
        """The energy of every layer."""
        found = {}
        for layer, sums in self._sums.items():
            mass = sums["mass"]
            jacobian = sums["jacobian"] / mass
            found[layer] = QuadraticFreeEnergy(
                -((jacobian + jacobian.mT) / 2).cpu(),
                -(sums["force"] / mass).cpu(),
                (sums["point"] / mass).cpu(),
                float(np.nanmean(self._nu[layer])),
            )
        return found


@full_precision
def force_sums(
    force: MLP | GatedMLP,
    x: Float[Tensor, "k d"],
    m: Float[Tensor, " k"],
    radius: Float[Tensor, " k"],
    *,
    centered: bool,
) -> dict[str, Tensor]:
    """Sums over tokens x of mass m: of the mass, of m x, of m T f / |y| and of m (T Df T - <x, f> T) / |y|, without a
    d x d matrix for each token.

    >>> from helmscope.fields.activations import Identity
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]), activation=Identity())
    >>> x, one = torch.eye(2)[:1].double(), torch.ones(1).double()
    >>> force_sums(turn, x, one, one, centered=False)["force"]
    tensor([0., 1.], dtype=torch.float64)
    """
    algebra, slopes, value = jacobian_algebra(force, like=x), slopes_of(force, x), force.ambient(x)
    scale = m / radius
    along = (x * value).sum(-1)
    read, written = linear(x, algebra.rows.mT), linear(x, algebra.columns)
    forward = linear(slopes * read, algebra.columns.mT)  # J x
    backward = linear(slopes * written, algebra.rows)  # J^T x
    radial = (slopes * read * written).sum(-1)
    weighted = scale.unsqueeze(-1) * x
    jacobian = algebra.matrices((scale.unsqueeze(-1) * slopes).sum(0))
    jacobian = (
        jacobian - weighted.mT @ backward - forward.mT @ weighted + ((radial + along).unsqueeze(-1) * weighted).mT @ x
    )
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    jacobian = jacobian - (scale * along).sum() * eye
    tangential = (scale.unsqueeze(-1) * (value - along.unsqueeze(-1) * x)).sum(0)
    if centered:
        without = eye - 1 / x.shape[-1]
        jacobian, tangential = without @ jacobian @ without, without @ tangential
    return {"mass": m.sum(), "point": (m.unsqueeze(-1) * x).sum(0), "force": tangential, "jacobian": jacobian}
