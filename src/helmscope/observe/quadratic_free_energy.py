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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

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
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, ReplayPlan, System


@dataclass(frozen=True, eq=False)
class QuadraticFreeEnergy(ConciseRepr):
    """Free energy with a quadratic potential: F = nu Ent + int V with V(x) = <slope, x - at> + <x - at, stiffness (x -
    at)> / 2, in float64, and what each prompt contributed to it, if that is known.

    >>> one = torch.ones(1, 1).double()
    >>> QuadraticFreeEnergy(one, one[0], one[0], 0.4).slope_at(2 * one[0])
    tensor([2.], dtype=torch.float64)
    """

    stiffness: Float[Tensor, "d d"]
    slope: Float[Tensor, " d"]
    at: Float[Tensor, " d"]
    nu: float
    parts: EnergyParts | None = field(repr=False, default=None)

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

    def with_noise_of(self, other: QuadraticFreeEnergy | None) -> QuadraticFreeEnergy:
        """This potential with the nu of another energy of the same prompts, or with nu = 0 if it is None.

        >>> one = torch.ones(1, 1).double()
        >>> QuadraticFreeEnergy(one, one[0], one[0], 0.4).with_noise_of(None).nu
        0.0
        """
        parts = self.parts
        if parts is not None:
            theirs = None if other is None else other.parts
            parts = replace(parts, nu=torch.zeros_like(parts.nu) if theirs is None else theirs.nu)
        return replace(self, nu=0.0 if other is None else other.nu, parts=parts)


class EnergyChanges(NamedTuple):
    """Changes of an energy, (prompt, ...) each.

    >>> zero = torch.zeros(3, 2).double()
    >>> changes = EnergyChanges(zero[:, :, None] * zero[:, None], zero, zero, zero[:, 0])
    >>> changes.along(torch.eye(2).double()[:, :1]).slope
    tensor([[0.],
            [0.],
            [0.]], dtype=torch.float64)
    """

    stiffness: Float[Tensor, "prompt d d"]
    slope: Float[Tensor, "prompt d"]
    at: Float[Tensor, "prompt d"]
    nu: Float[Tensor, " prompt"]

    @full_precision
    def along(self, axes: Float[Tensor, "d k"]) -> EnergyChanges:
        """The same on the span of orthonormal axes, in their coordinates."""
        turned = axes.to(self.stiffness)
        return EnergyChanges(turned.mT @ self.stiffness @ turned, self.slope @ axes, self.at @ axes, self.nu)

    def applied(self, energy: QuadraticFreeEnergy) -> Iterator[QuadraticFreeEnergy]:
        """An energy after each of the changes."""
        for stiffness, slope, at, nu in zip(*self, strict=True):
            changed = energy.stiffness + stiffness.double()
            yield QuadraticFreeEnergy(
                (changed + changed.mT) / 2, energy.slope + slope, energy.at + at, max(0.0, energy.nu + float(nu))
            )


@dataclass(frozen=True, eq=False)
class EnergyParts:
    """The energy of each of the prompts over which a ``QuadraticFreeEnergy`` is a mean, with their ``mass`` (number of
    tokens); nu, the mean over prompts, is NaN where a prompt has none.

    >>> one = torch.ones(2, 1, 1).double()
    >>> parts = EnergyParts(torch.tensor([1.0, 3.0]).double(), one, one[0], one[0], torch.tensor([0.0, 2.0]).double())
    >>> parts.changes(QuadraticFreeEnergy(one[0], one[0, 0], one[0, 0], 1.0)).nu  # without the first nu is 2
    tensor([ 1., -1.], dtype=torch.float64)
    """

    mass: Float[Tensor, " prompt"]
    stiffness: Float[Tensor, "prompt d d"]
    slope: Float[Tensor, "prompt d"]
    at: Float[Tensor, "prompt d"]
    nu: Float[Tensor, " prompt"]

    def changes(self, energy: QuadraticFreeEnergy) -> EnergyChanges:
        """The changes of their mean without each prompt in turn."""
        share = self.mass / (self.mass.sum() - self.mass)
        known = torch.isfinite(self.nu)
        noise = torch.where(known, (energy.nu - self.nu) / max(int(known.sum()) - 1, 1), 0.0)
        stiffness = share.to(self.stiffness)[:, None, None] * (energy.stiffness.to(self.stiffness) - self.stiffness)
        return EnergyChanges(
            stiffness, share[:, None] * (energy.slope - self.slope), share[:, None] * (energy.at - self.at), noise
        )


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
        self._sums: dict[int, _Sums] = {}
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
        m = weights[rows].double()
        x = torch.where(m.unsqueeze(-1) > 0, points[rows].double(), 0.0)
        length = torch.where(m > 0, radius[rows].double(), 1.0)
        kept = self._sums.setdefault(context.layer, _Sums())
        kept.add(force_sums(tensors.force, x, m, length, centered=context.centered))

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
        """The energy of every layer, with what each of the selected prompts contributed to it."""
        return {layer: sums.energy(self._nu[layer]) for layer, sums in self._sums.items()}


class _Sums:
    """Sums over the tokens of each prompt of a layer, and the Jacobian summed over all of them in full precision."""

    def __init__(self) -> None:
        self.jacobian: Tensor | None = None
        self.each: dict[str, list[Tensor]] = {"mass": [], "point": [], "force": [], "stiffness": []}

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add the sums of a chunk of prompts, (prompt, ...) each."""
        jacobian = sums["jacobian"]
        total = jacobian.sum(0).cpu()
        self.jacobian = total if self.jacobian is None else self.jacobian + total
        # in single precision, since these are only for intervals and take d^2 numbers for each prompt and layer
        sums = sums | {"stiffness": (-(jacobian + jacobian.mT) / 2).float()}
        for name, kept in self.each.items():
            kept.append(sums[name].cpu())

    def energy(self, nus: list[float]) -> QuadraticFreeEnergy:
        """The energy of all prompts, given the nu of each."""
        each = {name: torch.cat(parts) for name, parts in self.each.items()}
        mass, point, force, stiffness = (each[name] for name in ("mass", "point", "force", "stiffness"))
        assert self.jacobian is not None
        total, share = mass.sum(), mass.unsqueeze(-1)
        nu = torch.tensor(nus, dtype=torch.float64, device="cpu")
        return QuadraticFreeEnergy(
            -((self.jacobian + self.jacobian.mT) / 2) / total,
            -force.sum(0) / total,
            point.sum(0) / total,
            float(np.nanmean(nus)),
            EnergyParts(mass, stiffness / share.unsqueeze(-1).to(stiffness), -force / share, point / share, nu),
        )


@full_precision
def force_sums(
    force: MLP | GatedMLP,
    x: Float[Tensor, "*batch k d"],
    m: Float[Tensor, "*batch k"],
    radius: Float[Tensor, "*batch k"],
    *,
    centered: bool,
) -> dict[str, Tensor]:
    """Sums over the k tokens x of mass m: of the mass, of m x, of m T f / |y| and of m (T Df T - <x, f> T) / |y|,
    without a d x d matrix for each token.

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
    jacobian = algebra.matrices((scale.unsqueeze(-1) * slopes).sum(-2))
    jacobian = (
        jacobian - weighted.mT @ backward - forward.mT @ weighted + ((radial + along).unsqueeze(-1) * weighted).mT @ x
    )
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    jacobian = jacobian - (scale * along).sum(-1)[..., None, None] * eye
    tangential = (scale.unsqueeze(-1) * (value - along.unsqueeze(-1) * x)).sum(-2)
    if centered:
        jacobian = jacobian - jacobian.mean(-1, keepdim=True)
        jacobian = jacobian - jacobian.mean(-2, keepdim=True)
        tangential = tangential - tangential.mean(-1, keepdim=True)
    return {"mass": m.sum(-1), "point": (m.unsqueeze(-1) * x).sum(-2), "force": tangential, "jacobian": jacobian}
