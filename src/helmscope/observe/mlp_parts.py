"""An MLP at given tokens: its force, its algebraic split in two coordinates, and the invariants of its Jacobian, with
everything that they share computed once.

With x the unit vector that the folded force f reads, and z = sqrt(d) G x + b the output of the norm, which the module
reads, f(x) = F(z). Both have the same neurons, but different rows (v = sqrt(d) G v_z), hence different splits: grad U
and R of ``unit_sphere`` are those of f in x, those of ``norm_output`` are those of F in z. They are vectors of the same
space; U has the unit of f times that of x or z. b_out and constant neurons, the harmonic part, are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.fields.jacobian_algebra import JacobianAlgebra, JacobianInvariants, jacobian_algebra, slopes_of
from helmscope.fields.mlp import MLP, GatedMLP, affine, linear
from helmscope.fields.norms import LayerNorm, UnitNorm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.mlp import Force
    from helmscope.fields.norms import Norm

UNIT_SPHERE, NORM_OUTPUT = "unit_sphere", "norm_output"


@dataclass(frozen=True, eq=False)
class Split:
    """U, grad U and R at each token, in one of the two coordinates.

    >>> Split(torch.zeros(1), torch.zeros(1, 2), torch.ones(1, 2)).swirl.norm(dim=-1)
    tensor([1.4142])
    """

    potential: Float[Tensor, "*batch"]
    gradient: Float[Tensor, "*batch d"]
    swirl: Float[Tensor, "*batch d"]


@dataclass(frozen=True, eq=False)
class Parts:
    """What an MLP does at each token: ``force``, ``harmonic`` (a part of it), ``splits`` by coordinates (empty if the
    neurons have no potential), the invariants of its ``jacobian`` in the unit-sphere coordinates, x^T J x
    (``radial_slope``) and, where ``centered``, the trace of the part of J that acts along (1, ..., 1).

    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> prepare_mlp(turn).at(torch.eye(2)).splits["unit_sphere"].potential
    tensor([0., 0.])
    """

    force: Float[Tensor, "*batch d"]
    harmonic: Float[Tensor, "*batch d"]
    splits: Mapping[str, Split]
    jacobian: JacobianInvariants
    radial_slope: Float[Tensor, "*batch"]
    mean_slope: Float[Tensor, "*batch"]
    experts: Mapping[int, tuple[Tensor, Parts]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SplitWeights:
    """The coefficients of the algebraic split of an MLP in one of the coordinates: with v the rows (g, if gated)

        ungated  U = sum_j a psi(z),  grad U = sum_j a s(z) v,  a = w.v / |v|^2
        gated    U = sum_j alpha psi(z) t + kappa Psi(z) + lin s(z) t^2 / 2
                 grad U = sum_j s(z) t (alpha g + lin u) + psi(z) (alpha u + kappa g)

    lin = w.u / |u|^2 for neurons with g = 0, which are linear, and 0 for the others (``helmholtz``). Rows shorter than
    1e-150 (1e-19 in float32) count as 0.

    >>> SplitWeights.of(MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2)), torch.ones(1)).first
    tensor([0.5000, 0.5000])
    """

    rows: Float[Tensor, "hidden d"]
    partners: Float[Tensor, "hidden d"] | None
    first: Float[Tensor, " hidden"]
    second: Float[Tensor, " hidden"]
    linear: Float[Tensor, " hidden"]

    @staticmethod
    def of(mlp: MLP | GatedMLP, like: Tensor) -> SplitWeights:
        """The coefficients of an MLP, in the dtype and on the device of ``like``.

        >>> SplitWeights.of(MLP(w_in=torch.zeros(1, 2), w_out=torch.ones(2, 1)), torch.ones(1)).first  # constant
        tensor([0.])
        """
        rows, written = mlp.input_rows[0].to(like), mlp.w_out.to(like).mT
        first = _quotient((written * rows).sum(-1), rows.square().sum(-1))
        if isinstance(mlp, MLP):
            return SplitWeights(rows, None, first, torch.zeros_like(first), torch.zeros_like(first))
        up = mlp.w_up.to(like)
        second = _quotient((written * up).sum(-1) - 2 * first * (rows * up).sum(-1), rows.square().sum(-1))
        straight = _quotient((written * up).sum(-1), up.square().sum(-1))
        return SplitWeights(rows, up, first, second, torch.where(rows.any(-1), 0.0, straight))

    def potential(self, values: Neurons) -> Float[Tensor, "*batch"]:
        """U at each token.

        >>> mlp = MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2))
        >>> SplitWeights.of(mlp, torch.ones(1)).potential(Neurons.of(mlp, torch.zeros(1, 2)))
        tensor([0.])
        """
        if self.partners is None:
            return (values.psi * self.first).sum(-1)
        assert values.t is not None
        assert values.double_psi is not None
        straight = self.linear * values.written * values.t / 2
        return (self.first * values.psi * values.t + self.second * values.double_psi + straight).sum(-1)

    def gradient(self, values: Neurons) -> Float[Tensor, "*batch d"]:
        """grad U at each token.

        >>> mlp = MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2))
        >>> SplitWeights.of(mlp, torch.ones(1)).gradient(Neurons.of(mlp, torch.zeros(1, 2)))
        tensor([[0., 0.]])
        """
        along = self.first[:, None] * self.rows
        if self.partners is None:
            return linear(values.written, along)
        along = along + self.linear[:, None] * self.partners
        across = self.first[:, None] * self.partners + self.second[:, None] * self.rows
        return linear(values.written, along) + linear(values.psi, across)


@dataclass(frozen=True, eq=False)
class Neurons:
    """The values of the neurons at tokens: ``written``, which w_out multiplies, psi(z) and, if gated, Psi(z) and t.
    They do not depend on the coordinates.

    >>> Neurons.of(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.zeros(1, 2)).written
    tensor([[0., 0.]])
    """

    written: Float[Tensor, "*batch hidden"]
    psi: Float[Tensor, "*batch hidden"]
    double_psi: Float[Tensor, "*batch hidden"] | None = None
    t: Float[Tensor, "*batch hidden"] | None = None

    @staticmethod
    def of(mlp: MLP | GatedMLP, x: Float[Tensor, "*batch d"]) -> Neurons:
        """The values at tokens x. Raises HelmscopeError if the activation has no psi (gated: or Psi).

        >>> Neurons.of(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.zeros(1, 2)).psi
        tensor([[0., 0.]])
        """
        if isinstance(mlp, MLP):
            z = affine(x, mlp.w_in, mlp.b_in)
            return Neurons(mlp.activation(z), mlp.activation.potential(z))
        z, t = affine(x, mlp.w_gate, mlp.b_gate), affine(x, mlp.w_up, mlp.b_up)
        psi, double_psi = mlp.activation.potential(z), mlp.activation.double_potential(z)
        return Neurons(mlp.activation(z) * t, psi, double_psi, t)


@dataclass(frozen=True, eq=False)
class PreparedMLP:
    """A single MLP with what its weights give once for all tokens; made by ``prepare_mlp``.

    >>> prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).at(torch.zeros(1, 2)).force
    tensor([[0., 0.]])
    """

    mlp: Force
    weights: Mapping[str, SplitWeights]
    algebra: JacobianAlgebra
    harmonic: Float[Tensor, " d"]

    def at(self, x: Float[Tensor, "*batch d"]) -> Parts:
        """All parts at unit vectors x.

        >>> prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).at(torch.zeros(1, 2)).harmonic
        tensor([[0., 0.]])
        """
        slopes = slopes_of(self.mlp, x)
        values = Neurons.of(self.mlp, x) if isinstance(self.mlp, MLP | GatedMLP) else None
        written = self.mlp.neurons(x) if values is None else values.written
        force = affine(written, self.mlp.w_out, self.mlp.b_out)
        splits = {}
        for name, weights in self.weights.items():
            assert values is not None
            gradient = weights.gradient(values)
            splits[name] = Split(weights.potential(values), gradient, force - gradient - self.harmonic)
        ones = self.algebra.rows.sum(-1) * self.algebra.columns.sum(0) / x.shape[-1]
        return Parts(
            force,
            self.harmonic.expand_as(force),
            splits,
            self.algebra.invariants(slopes),
            self.algebra.radial(slopes, x),
            (slopes * ones).sum(-1),
        )


def prepare_mlp(
    force: Force, *, like: Tensor | None = None, unfolded: Force | None = None, norm: Norm | None = None
) -> PreparedMLP:
    """What the weights of an MLP give once for all tokens. ``force`` reads unit vectors; ``unfolded`` is the same MLP
    as a function of the output of ``norm``. Without a norm, or with y / |y|, both coordinates are the same.

    >>> prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).harmonic
    tensor([0., 0.])
    """
    unfolded = force if unfolded is None or norm is None or isinstance(norm, UnitNorm) else unfolded
    like = force.w_out if like is None else like
    zero = torch.zeros_like(force.w_out[:, 0].to(like))
    if not isinstance(force, MLP | GatedMLP):
        harmonic = zero if force.b_out is None else force.b_out.to(like)
        return PreparedMLP(force, {}, jacobian_algebra(force, like=like), harmonic)
    assert isinstance(unfolded, MLP | GatedMLP)
    own = SplitWeights.of(force, like)
    weights = {UNIT_SPHERE: own, NORM_OUTPUT: own if unfolded is force else SplitWeights.of(unfolded, like)}
    live = torch.stack([rows.to(like).any(-1) for rows in force.input_rows]).any(0)
    harmonic = affine(torch.where(live, 0.0, force.neurons(zero)), force.w_out, force.b_out)
    return PreparedMLP(force, weights, jacobian_algebra(force, like=like), harmonic)


def is_centered(norm: Norm | None) -> bool:
    """Whether tokens after this norm have mean 0 over their coordinates, and lie on S^(d-2).

    >>> is_centered(LayerNorm()), is_centered(None)
    (True, False)
    """
    return isinstance(norm, LayerNorm)


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """above / below, and 0 where below is 0."""
    return torch.where(below > 0, above / torch.where(below > 0, below, 1.0), 0.0)


def map_parts(parts: Parts, change: Callable[[Tensor], Tensor]) -> Parts:
    """The parts with a function applied to every tensor, always in the same order; without those of experts.

    >>> parts = prepare_mlp(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).at(torch.zeros(1, 2))
    >>> map_parts(parts, torch.ones_like).force
    tensor([[1., 1.]])
    """
    splits = {name: Split(change(s.potential), change(s.gradient), change(s.swirl)) for name, s in parts.splits.items()}
    j = parts.jacobian
    invariants = JacobianInvariants(change(j.trace), change(j.trace_of_square), change(j.squared_norm))
    return Parts(
        change(parts.force),
        change(parts.harmonic),
        splits,
        invariants,
        change(parts.radial_slope),
        change(parts.mean_slope),
    )
