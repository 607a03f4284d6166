"""The algebraic Helmholtz split of an MLP (source 000-3), neuron by neuron: f = grad U + R + harmonic, div R = 0.

Ungated, with z = v.x + c and n = v/|v|:

    U = sum_j a psi(z),  a = w.v / |v|^2,     grad U = sum_j (w.n) s(z) n,     R = sum_j (w - (w.n) n) s(z)

Gated, with z = g.x + c, t = u.x + e, n = g/|g|, alpha = w.g / |g|^2, kappa = (w.u - 2 alpha g.u) / |g|^2:

    U = sum_j alpha psi(z) t + kappa Psi(z),     grad U = sum_j alpha s(z) t g + (alpha u + kappa g) psi(z),
    R = sum_j w s(z) t - grad U

psi(z) = int_0^z s and Psi(z) = int_0^z psi. That both vanish at 0 is part of the gated split: another constant would
move a constant vector from R to grad U. The split belongs to the weights and not to the function: two MLPs with the
same f may have different R, and grad U and R are not orthogonal. Without divergence means in R^d: on the sphere, P R
has one (``geometry.surface.divergence``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.mlp import MLP, GatedMLP, affine, linear
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


def helmholtz(mlp: MLP | GatedMLP) -> HelmholtzSplit:
    """The exact split f = grad U + R + harmonic with div R = 0 (source 000-3 (a), (b); formulas above).

    ``split.dead`` lists the neurons that are constants (v = 0; gated: g = u = 0); they stand in the harmonic part with
    b_out. A gated neuron with g = 0 but u != 0 is s(c) times a linear neuron with row u and is split as one. An
    activation without psi (gated: or Psi) is refused here, not later.

    Where a row is tiny beside its bias, U is of the order psi(c)/|v|, and gated also grad U and R, of opposite signs:
    such is the split, but their sum loses digits. Below |g| = 1e-150 (1e-19 in float32) take ``gradient`` and not
    autograd of ``potential``, which passes through 1/|g|^2.

    >>> from helmscope.fields.activations import ReLU
    >>> split = helmholtz(MLP(w_in=torch.eye(2), w_out=torch.eye(2).flip(0), activation=ReLU()))
    >>> split.swirl(torch.tensor([3.0, -1.0]))
    tensor([0., 3.])
    """
    _check_mlp(mlp)
    origin = torch.zeros(1, dtype=torch.float64, device="cpu")
    mlp.activation.potential(origin)
    if isinstance(mlp, MLP):
        return _Ungated(mlp)
    mlp.activation.double_potential(origin)
    return _Gated(mlp)


def helmholtz_as_printed(mlp: MLP | GatedMLP) -> HelmholtzSplit:
    """The split as source 000 prints it, for comparison; wrong as below. ``swirl`` = f - gradient - harmonic.

    Ungated: a = w.v without |v|^2, so that div R != 0 unless every |v| = 1. Gated: U = sum_j a psi(z) t and
    "grad U" = sum_j a s(z) t g with a = w.g / |g|^2, which is no gradient, and div R != 0; a = 0 where g = 0.

    >>> from helmscope.fields.activations import Identity
    >>> double = MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2), activation=Identity())  # f(x) = 2 x, all gradient
    >>> x = torch.tensor([1.0, 0.0])
    >>> helmholtz(double).swirl(x), helmholtz_as_printed(double).swirl(x)
    (tensor([0., 0.]), tensor([-6.,  0.]))
    """
    _check_mlp(mlp)
    mlp.activation.potential(torch.zeros(1, dtype=torch.float64, device="cpu"))
    return _AsPrinted(mlp)


def _check_mlp(mlp: object) -> None:
    if not isinstance(mlp, MLP | GatedMLP):
        raise HelmscopeError(f"mlp is a {type(mlp).__name__}, but it must be an MLP or a GatedMLP")
    if mlp.batch:
        raise HelmscopeError(f"mlp has the batch axes {tuple(mlp.batch)}, but one MLP is split at a time")


@dataclass(frozen=True, eq=False)
class HelmholtzSplit(ABC):
    """An MLP in three parts, f = gradient + swirl + harmonic to rounding; made by ``helmholtz``.

    Methods take points (..., d) of float64 or float32 and refuse others. They do not read values: they serve within
    ``torch.func``, and are NaN where x is. Memory is linear in points times neurons.

    >>> from helmscope.fields.activations import Identity
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[1.0, -3.0], [3.0, 1.0]]), activation=Identity())
    >>> split, x = helmholtz(turn), torch.tensor([1.0, 2.0])
    >>> split.potential(x), split.gradient(x), split.swirl(x), split.harmonic(x)
    (tensor(2.5000), tensor([1., 2.]), tensor([-6.,  3.]), tensor([0., 0.]))
    """

    mlp: MLP | GatedMLP

    @property
    def dead(self) -> Int[Tensor, " dead"]:
        """Indices of the neurons that are constants: v = 0, or g = u = 0 where gated."""
        return self._is_dead(torch.zeros((), dtype=torch.float64, device="cpu")).nonzero().squeeze(-1)

    @abstractmethod
    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """U(x); the force climbs it, so the energy is V = -U."""

    @abstractmethod
    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """grad U(x), in closed form."""

    @abstractmethod
    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """R(x), without divergence in R^d."""

    def harmonic(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """b_out and the dead neurons: a constant, both gradient and without divergence, so neither's."""
        self.mlp.check_points(x)
        at_origin = self.mlp.neurons(x.new_zeros(self.mlp.dim))
        constants = torch.where(self._is_dead(x), at_origin, 0.0)
        return affine(constants, self.mlp.w_out, self.mlp.b_out).expand_as(x)

    def _is_dead(self, like: Tensor) -> Bool[Tensor, " hidden"]:
        """In the dtype of ``like``, as a row may vanish in the cast."""
        if isinstance(self.mlp, GatedMLP):
            return ~(self.mlp.w_gate.to(like).any(-1) | self.mlp.w_up.to(like).any(-1))
        return ~self.mlp.w_in.to(like).any(-1)


@dataclass(frozen=True, eq=False)
class _Ungated(HelmholtzSplit):
    mlp: MLP

    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        self.mlp.check_points(x)
        direction, length = _polar(self.mlp.w_in.to(x))
        z = affine(x, self.mlp.w_in, self.mlp.b_in)
        return _weighted_sum(self.mlp.activation.potential(z) / length, _along(self.mlp, direction))

    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        direction, _ = _polar(self.mlp.w_in.to(x))
        return linear(self.mlp.neurons(x), _lengthwise(self.mlp, direction))

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        direction, _ = _polar(self.mlp.w_in.to(x))
        return linear(self.mlp.neurons(x), _crosswise(self.mlp, direction))


@dataclass(frozen=True, eq=False)
class _Gated(HelmholtzSplit):
    mlp: GatedMLP

    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        self.mlp.check_points(x)
        act, z, t = self.mlp.activation, *self._affine(x)
        rows = _GatedRows.of(self.mlp, x)
        # a neuron without gate is s(c) times a linear one, whose potential is (w.n) t^2 / (2 |u|)
        first = torch.where(rows.gated, act.potential(z) / rows.length, act(z) * t / (2 * rows.up_length))
        second = act.double_potential(z) / rows.length / rows.length  # |g|^2 may leave the dtype, the quotient not
        return _weighted_sum(first * t, rows.along) + _weighted_sum(second, rows.bend)

    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        neurons, rows, tilted = self._parts(x)
        return linear(neurons, _lengthwise(self.mlp, rows.direction)) + tilted

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        neurons, rows, tilted = self._parts(x)
        return linear(neurons, _crosswise(self.mlp, rows.direction)) - tilted

    def _affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z and t."""
        return affine(x, self.mlp.w_gate, self.mlp.b_gate), affine(x, self.mlp.w_up, self.mlp.b_up)

    def _parts(self, x: Tensor) -> tuple[Tensor, _GatedRows, Tensor]:
        """s(z) t; the rows; and sum_j (alpha u + kappa g) psi(z), which goes from R to grad U."""
        z, t = self._affine(x)
        rows = _GatedRows.of(self.mlp, x)
        tilt = torch.where(
            rows.gated[:, None], rows.along[:, None] * self.mlp.w_up.to(x) + rows.bend[:, None] * rows.direction, 0.0
        )
        return self.mlp.activation(z) * t, rows, linear(self.mlp.activation.potential(z) / rows.length, tilt)


@dataclass(frozen=True, eq=False)
class _GatedRows:
    """Each neuron by the row that steers it: the direction of g, or of u where g = 0; and the lengths |g| and |u|.

    alpha = along / |g| and kappa = bend / |g|^2 are not formed: they may overflow where their use does not.
    """

    gated: Bool[Tensor, " hidden"]
    direction: Float[Tensor, "hidden d"]
    length: Float[Tensor, " hidden"]
    up_length: Float[Tensor, " hidden"]
    along: Float[Tensor, " hidden"]
    bend: Float[Tensor, " hidden"]

    @staticmethod
    def of(mlp: GatedMLP, x: Tensor) -> _GatedRows:
        up, gated = mlp.w_up.to(x), mlp.w_gate.to(x).any(-1)
        (gate_direction, length), (up_direction, up_length) = _polar(mlp.w_gate.to(x)), _polar(up)
        direction = torch.where(gated[:, None], gate_direction, up_direction)
        along = _along(mlp, direction)
        bend = torch.where(gated, _along(mlp, up) - 2 * along * (direction * up).sum(-1), 0.0)
        return _GatedRows(gated, direction, length, up_length, along, bend)


@dataclass(frozen=True, eq=False)
class _AsPrinted(HelmholtzSplit):
    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        mlp = self.mlp
        mlp.check_points(x)
        if isinstance(mlp, MLP):
            return _weighted_sum(mlp.activation.potential(affine(x, mlp.w_in, mlp.b_in)), _along(mlp, mlp.w_in.to(x)))
        direction, length = _polar(mlp.w_gate.to(x))
        psi = mlp.activation.potential(affine(x, mlp.w_gate, mlp.b_gate))
        return _weighted_sum(psi / length * affine(x, mlp.w_up, mlp.b_up), _along(mlp, direction))

    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        mlp = self.mlp
        mlp.check_points(x)
        rows = mlp.w_in.to(x) if isinstance(mlp, MLP) else _polar(mlp.w_gate.to(x))[0]
        return linear(mlp.neurons(x), _lengthwise(mlp, rows))

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        return self.mlp.ambient(x) - self.gradient(x) - self.harmonic(x)


def _polar(rows: Float[Tensor, "hidden d"]) -> tuple[Float[Tensor, "hidden d"], Float[Tensor, " hidden"]]:
    """Directions and lengths; a zero row has direction 0 and length 1. A scale is divided out first, as the square of
    1e-160 is 0.
    """
    scale = rows.detach().abs().amax(-1)
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = rows / scale[:, None]
    norm = torch.linalg.vector_norm(scaled, dim=-1)
    norm = torch.where(norm > 0, norm, 1.0)
    return scaled / norm[:, None], norm * scale


def _along(mlp: MLP | GatedMLP, rows: Float[Tensor, "hidden d"]) -> Float[Tensor, " hidden"]:
    """w_j.row_j"""
    return (mlp.w_out.to(rows).mT * rows).sum(-1)


def _lengthwise(mlp: MLP | GatedMLP, rows: Float[Tensor, "hidden d"]) -> Float[Tensor, "hidden d"]:
    """(w.row) row: for a unit row, the part of w along it."""
    return _along(mlp, rows)[:, None] * rows


def _crosswise(mlp: MLP | GatedMLP, direction: Float[Tensor, "hidden d"]) -> Float[Tensor, "hidden d"]:
    """r = w - (w.n) n, and 0 where the neuron is dead and has no direction."""
    rest = mlp.w_out.to(direction).mT - _lengthwise(mlp, direction)
    return torch.where(direction.any(-1, keepdim=True), rest, 0.0)


def _weighted_sum(values: Float[Tensor, "*batch hidden"], weights: Float[Tensor, " hidden"]) -> Float[Tensor, "*batch"]:
    """Not as a product with one column, whose bits depend on the batch."""
    return (values * weights).sum(-1)
