"""The algebraic Helmholtz split of an MLP [Helmholtz Transformer, no. 3], neuron by neuron: f = grad U + R + harmonic,
div R = 0.

Ungated, with z = v.x + c and n = v/|v|:

    U = sum_j a psi(z),  a = w.v / |v|^2,     grad U = sum_j (w.n) s(z) n,     R = sum_j (w - (w.n) n) s(z)

Gated, with z = g.x + c, t = u.x + e, n = g/|g|, alpha = w.g / |g|^2, kappa = (w.u - 2 alpha g.u) / |g|^2:

    U = sum_j alpha psi(z) t + kappa Psi(z),     grad U = sum_j alpha s(z) t g + (alpha u + kappa g) psi(z),
    R = sum_j w s(z) t - grad U

psi(z) = int_0^z s and Psi(z) = int_0^z psi. That both vanish at 0 is part of the definition in the gated case: another
constant would move a constant vector from R to grad U. The split depends on the weights and not only on the function:
two MLPs with the same f may have different R, and grad U and R are not orthogonal. R is divergence-free in R^d; on the
sphere P R has a divergence in general (``geometry.surface.divergence``).

The Hessian of U, ungated sum_j a s'(z) v v^T, gated

    sum_j (alpha s'(z) t + kappa s(z)) g g^T + alpha s(z) (g u^T + u g^T).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.mlp import MLP, GatedMLP, affine, linear
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.potential import Potential
from helmscope.types import ConciseRepr, HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


def helmholtz(mlp: MLP | GatedMLP) -> HelmholtzSplit:
    """The exact split f = grad U + R + harmonic with div R = 0 [Helmholtz Transformer, no. 3], neuron by neuron.
    Ungated, for neurons w s(z), z = v.x + c:

        U = sum_j (w.v / |v|^2) psi(z),   R = sum_j (w - (w.v / |v|^2) v) s(z),   psi(z) = int_0^z s.

    Gated, for neurons w s(z) t, z = g.x + c, t = u.x + e, with alpha = w.g / |g|^2 and Psi(z) = int_0^z psi:

        U = sum_j alpha psi(z) t + kappa Psi(z),   kappa = (w.u - 2 alpha g.u) / |g|^2,   R = sum_j w s(z) t - grad U.

    ``split.constant_neurons`` lists the neurons that are constant (v = 0; gated: g = u = 0); they belong to the
    harmonic part, together with b_out. A gated neuron with g = 0 but u != 0 is s(c) times a linear neuron with row u
    and is split like one. Raises ``HelmscopeError`` if ``mlp`` is not an MLP, has batch axes, or has an activation
    without psi (gated: or Psi).

    If a row is tiny compared with its bias, U is of order psi(c)/|v|; in the gated case so are grad U and R, with
    opposite signs, and their sum loses digits. For |g| below 1e-150 (1e-19 in float32) use ``gradient`` instead of
    differentiating ``potential``, which divides by |g|^2.

    >>> from helmscope.fields.activations import ReLU
    >>> split = helmholtz(MLP(w_in=torch.eye(2), w_out=torch.eye(2).flip(0), activation=ReLU()))
    >>> split.swirl(torch.tensor([3.0, -1.0]))
    tensor([0., 3.])
    """
    _check_mlp(mlp)
    origin = torch.zeros(1, dtype=torch.float64, device="cpu")
    mlp.activation.potential(origin)
    if isinstance(mlp, MLP):
        return _UngatedSplit(mlp)
    mlp.activation.double_potential(origin)
    return _GatedSplit(mlp)


def helmholtz_as_printed(mlp: MLP | GatedMLP) -> HelmholtzSplit:
    """The split as the [Helmholtz Transformer] prints it, for comparison; it is wrong, as follows. ``swirl`` = f -
    gradient - harmonic.

    Ungated: a = w.v without |v|^2, so that div R != 0 unless every |v| = 1. Gated: U = sum_j a psi(z) t and
    "grad U" = sum_j a s(z) t g with a = w.g / |g|^2, which is not a gradient, and div R != 0; a = 0 where g = 0.

    >>> from helmscope.fields.activations import Identity
    >>> double = MLP(w_in=2 * torch.eye(2), w_out=torch.eye(2), activation=Identity())  # f(x) = 2 x, all gradient
    >>> x = torch.tensor([1.0, 0.0])
    >>> helmholtz(double).swirl(x), helmholtz_as_printed(double).swirl(x)
    (tensor([0., 0.]), tensor([-6.,  0.]))
    """
    _check_mlp(mlp)
    mlp.activation.potential(torch.zeros(1, dtype=torch.float64, device="cpu"))
    return _SplitAsPrinted(mlp)


def _check_mlp(mlp: object) -> None:
    if not isinstance(mlp, MLP | GatedMLP):
        raise HelmscopeError(f"mlp is {type_with_article(mlp)}, but it must be an MLP or a GatedMLP")
    if mlp.batch:
        raise HelmscopeError(f"mlp has the batch axes {tuple(mlp.batch)}, but only one MLP can be split at a time")


@dataclass(frozen=True, eq=False)
class HelmholtzSplit(ConciseRepr, Potential):
    """The three parts of an MLP, f = gradient + swirl + harmonic to rounding; returned by ``helmholtz``.

    Methods take points (..., d) of float64 or float32 and raise ``HelmscopeError`` for others. They do not depend on
    values, so they work under ``torch.func``, and return NaN where x is NaN. Memory is linear in points times neurons.

    >>> from helmscope.fields.activations import Identity
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[1.0, -3.0], [3.0, 1.0]]), activation=Identity())
    >>> split, x = helmholtz(turn), torch.tensor([1.0, 2.0])
    >>> split.potential(x), split.gradient(x), split.swirl(x), split.harmonic(x)
    (tensor(2.5000), tensor([1., 2.]), tensor([-6.,  3.]), tensor([0., 0.]))
    """

    mlp: MLP | GatedMLP

    def __repr__(self) -> str:
        return f"HelmholtzSplit(mlp={self.mlp!r})"

    @property
    def constant_neurons(self) -> Int[Tensor, " constant"]:
        """Indices of the neurons that are constant: v = 0, or g = u = 0 if gated.

        >>> mlp = MLP(w_in=torch.tensor([[1.0, 0.0], [0.0, 0.0]]), w_out=torch.eye(2))
        >>> helmholtz(mlp).constant_neurons
        tensor([1])
        """
        return self._is_dead(torch.zeros((), dtype=torch.float64, device="cpu")).nonzero().squeeze(-1)

    @abstractmethod
    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """U(x). The force points uphill, so the energy is V = -U.

        >>> from helmscope.fields.activations import Identity
        >>> w_out = torch.tensor([[1.0, -3.0], [3.0, 1.0]])
        >>> mlp = MLP(w_in=torch.eye(2), w_out=w_out, activation=Identity())
        >>> helmholtz(mlp).potential(torch.tensor([1.0, 2.0]))
        tensor(2.5000)
        """

    @abstractmethod
    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """grad U(x), in closed form.

        >>> from helmscope.fields.activations import Identity
        >>> w_out = torch.tensor([[1.0, -3.0], [3.0, 1.0]])
        >>> mlp = MLP(w_in=torch.eye(2), w_out=w_out, activation=Identity())
        >>> helmholtz(mlp).gradient(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        """

    @abstractmethod
    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """R(x), which is divergence-free in R^d.

        >>> from helmscope.fields.activations import Identity
        >>> w_out = torch.tensor([[1.0, -3.0], [3.0, 1.0]])
        >>> mlp = MLP(w_in=torch.eye(2), w_out=w_out, activation=Identity())
        >>> helmholtz(mlp).swirl(torch.tensor([1.0, 2.0]))
        tensor([-6.,  3.])
        """

    def hessian_product(self, x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """(Hess U)(x) v, in closed form and without the matrix.

        >>> from helmscope.fields.activations import Identity
        >>> w_out = torch.tensor([[1.0, -3.0], [3.0, 1.0]])
        >>> mlp = MLP(w_in=torch.eye(2), w_out=w_out, activation=Identity())
        >>> helmholtz(mlp).hessian_product(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
        tensor([0., 1.])
        """
        self.mlp.check_points(x)
        bend = self._curvature(x)
        along, across = linear(v, bend.rows.mT), linear(v, bend.partners.mT)
        return linear(bend.own * along + bend.mixed * across, bend.rows) + linear(bend.mixed * along, bend.partners)

    @full_precision
    def hessian(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d"]:
        """(Hess U)(x), in closed form.

        >>> from helmscope.fields.activations import Identity
        >>> w_out = torch.tensor([[1.0, -3.0], [3.0, 1.0]])
        >>> mlp = MLP(w_in=torch.eye(2), w_out=w_out, activation=Identity())
        >>> helmholtz(mlp).hessian(torch.tensor([1.0, 2.0]))
        tensor([[1., 0.],
                [0., 1.]])
        """
        self.mlp.check_points(x)
        bend = self._curvature(x)
        half = (bend.own[..., None] * bend.rows / 2 + bend.mixed[..., None] * bend.partners).mT @ bend.rows
        return half + half.mT

    @abstractmethod
    def _curvature(self, x: Float[Tensor, "*batch d"]) -> _Curvature:
        """The terms of Hess U."""

    def harmonic(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """b_out and the dead neurons: a constant, which is both a gradient and divergence-free.

        >>> mlp = MLP(w_in=torch.eye(2), w_out=torch.eye(2), b_out=torch.tensor([0.5, 0.0]))
        >>> helmholtz(mlp).harmonic(torch.tensor([1.0, 2.0]))
        tensor([0.5000, 0.0000])
        """
        self.mlp.check_points(x)
        at_origin = self.mlp.neurons(x.new_zeros(self.mlp.dim))
        constants = torch.where(self._is_dead(x), at_origin, 0.0)
        return affine(constants, self.mlp.w_out, self.mlp.b_out).expand_as(x)

    def _is_dead(self, like: Tensor) -> Bool[Tensor, " hidden"]:
        """Which neurons are constant, in the dtype of ``like``: a row may underflow to 0 in the cast."""
        if isinstance(self.mlp, GatedMLP):
            return ~(self.mlp.w_gate.to(like).any(-1) | self.mlp.w_up.to(like).any(-1))
        return ~self.mlp.w_in.to(like).any(-1)


@dataclass(frozen=True, eq=False)
class _Curvature:
    """Hess U = sum_j own_j n_j n_j^T + mixed_j (n_j u_j^T + u_j n_j^T), n_j in ``rows``, u_j in ``partners``."""

    rows: Float[Tensor, "hidden d"]
    partners: Float[Tensor, "hidden d"]
    own: Float[Tensor, "*batch hidden"]
    mixed: Float[Tensor, "*batch hidden"]


@dataclass(frozen=True, eq=False)
class _UngatedSplit(HelmholtzSplit):
    mlp: MLP

    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        self.mlp.check_points(x)
        direction, length = _polar(self.mlp.w_in.to(x))
        z = affine(x, self.mlp.w_in, self.mlp.b_in)
        return _weighted_sum(self.mlp.activation.potential(z) / length, _along(self.mlp, direction))

    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        direction, _ = _polar(self.mlp.w_in.to(x))
        return linear(self.mlp.neurons(x), _parallel_part(self.mlp, direction))

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        direction, _ = _polar(self.mlp.w_in.to(x))
        return linear(self.mlp.neurons(x), _perpendicular_part(self.mlp, direction))

    def _curvature(self, x: Float[Tensor, "*batch d"]) -> _Curvature:
        direction, length = _polar(self.mlp.w_in.to(x))
        return _ungated_curvature(self.mlp, x, direction, _along(self.mlp, direction) * length)


@dataclass(frozen=True, eq=False)
class _GatedSplit(HelmholtzSplit):
    mlp: GatedMLP

    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        self.mlp.check_points(x)
        act, z, t = self.mlp.activation, *self._gate_and_up(x)
        rows = _GatedRows.from_mlp(self.mlp, x)
        # a neuron with g = 0 is s(c) times a linear one, whose potential is (w.n) t^2 / (2 |u|)
        first = torch.where(rows.gated, act.potential(z) / rows.length, act(z) * t / (2 * rows.up_length))
        second = act.double_potential(z) / rows.length / rows.length  # |g|^2 may overflow where the quotient does not
        return _weighted_sum(first * t, rows.along) + _weighted_sum(second, rows.bend)

    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        neurons, rows, transfer = self._neurons_rows_transfer(x)
        return linear(neurons, _parallel_part(self.mlp, rows.direction)) + transfer

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        neurons, rows, transfer = self._neurons_rows_transfer(x)
        return linear(neurons, _perpendicular_part(self.mlp, rows.direction)) - transfer

    def _curvature(self, x: Float[Tensor, "*batch d"]) -> _Curvature:
        z, t = self._gate_and_up(x)
        s, slope, rows = self.mlp.activation(z), self.mlp.activation.slope(z), _GatedRows.from_mlp(self.mlp, x)
        own = rows.along * rows.length * slope * t + rows.bend * s
        # a neuron with g = 0 is s(c) times a linear one, with row u
        own = torch.where(rows.gated, own, s * rows.along * rows.up_length)
        mixed = torch.where(rows.gated, rows.along * s, 0.0)
        return _Curvature(rows.direction, self.mlp.w_up.to(x), own, mixed)

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = g.x + c and t = u.x + e of every neuron."""
        return affine(x, self.mlp.w_gate, self.mlp.b_gate), affine(x, self.mlp.w_up, self.mlp.b_up)

    def _neurons_rows_transfer(self, x: Tensor) -> tuple[Tensor, _GatedRows, Tensor]:
        """s(z) t; the rows; and sum_j (alpha u + kappa g) psi(z), which is moved from R to grad U."""
        z, t = self._gate_and_up(x)
        rows = _GatedRows.from_mlp(self.mlp, x)
        weight = torch.where(
            rows.gated[:, None], rows.along[:, None] * self.mlp.w_up.to(x) + rows.bend[:, None] * rows.direction, 0.0
        )
        return self.mlp.activation(z) * t, rows, linear(self.mlp.activation.potential(z) / rows.length, weight)


@dataclass(frozen=True, eq=False)
class _GatedRows:
    """The direction of g, or of u where g = 0, of each neuron, and the lengths |g| and |u|.

    alpha = along / |g| and kappa = bend / |g|^2 are not computed: they may overflow where their products do not.
    """

    gated: Bool[Tensor, " hidden"]
    direction: Float[Tensor, "hidden d"]
    length: Float[Tensor, " hidden"]
    up_length: Float[Tensor, " hidden"]
    along: Float[Tensor, " hidden"]
    bend: Float[Tensor, " hidden"]

    @staticmethod
    def from_mlp(mlp: GatedMLP, x: Tensor) -> _GatedRows:
        up, gated = mlp.w_up.to(x), mlp.w_gate.to(x).any(-1)
        (gate_direction, length), (up_direction, up_length) = _polar(mlp.w_gate.to(x)), _polar(up)
        direction = torch.where(gated[:, None], gate_direction, up_direction)
        along = _along(mlp, direction)
        bend = torch.where(gated, _along(mlp, up) - 2 * along * (direction * up).sum(-1), 0.0)
        return _GatedRows(gated, direction, length, up_length, along, bend)


@dataclass(frozen=True, eq=False)
class _SplitAsPrinted(HelmholtzSplit):
    def __repr__(self) -> str:
        return f"HelmholtzSplitAsPrinted(mlp={self.mlp!r})"

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
        return linear(mlp.neurons(x), _parallel_part(mlp, rows))

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        self.mlp.check_points(x)
        return self.mlp.ambient(x) - self.gradient(x) - self.harmonic(x)

    def _curvature(self, x: Float[Tensor, "*batch d"]) -> _Curvature:
        """That of the printed potential, whose gradient the printed one is not."""
        mlp = self.mlp
        if isinstance(mlp, MLP):
            direction, length = _polar(mlp.w_in.to(x))
            return _ungated_curvature(mlp, x, direction, _along(mlp, direction) * length**3)
        direction, length = _polar(mlp.w_gate.to(x))
        z, t = affine(x, mlp.w_gate, mlp.b_gate), affine(x, mlp.w_up, mlp.b_up)
        along = _along(mlp, direction)
        own = along * length * mlp.activation.slope(z) * t
        return _Curvature(direction, mlp.w_up.to(x), own, along * mlp.activation(z))


def _ungated_curvature(mlp: MLP, x: Tensor, direction: Tensor, weight: Tensor) -> _Curvature:
    """sum_j weight_j s'(z_j) n_j n_j^T."""
    own = weight * mlp.activation.slope(affine(x, mlp.w_in, mlp.b_in))
    return _Curvature(direction, torch.zeros_like(direction), own, torch.zeros_like(own))


def _polar(rows: Float[Tensor, "hidden d"]) -> tuple[Float[Tensor, "hidden d"], Float[Tensor, " hidden"]]:
    """Directions and lengths of rows; a zero row has direction 0 and length 1. Rows are first divided by a scale,
    because the square of 1e-160 is 0.
    """
    scale = rows.detach().abs().amax(-1)
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = rows / scale[:, None]
    norm = torch.linalg.vector_norm(scaled, dim=-1)
    norm = torch.where(norm > 0, norm, 1.0)
    return scaled / norm[:, None], norm * scale


def _along(mlp: MLP | GatedMLP, rows: Float[Tensor, "hidden d"]) -> Float[Tensor, " hidden"]:
    """The inner products w_j.row_j."""
    return (mlp.w_out.to(rows).mT * rows).sum(-1)


def _parallel_part(mlp: MLP | GatedMLP, rows: Float[Tensor, "hidden d"]) -> Float[Tensor, "hidden d"]:
    """(w.row) row; for a unit row, the component of w along it."""
    return _along(mlp, rows)[:, None] * rows


def _perpendicular_part(mlp: MLP | GatedMLP, direction: Float[Tensor, "hidden d"]) -> Float[Tensor, "hidden d"]:
    """r = w - (w.n) n; 0 for a constant neuron, which has no direction."""
    perpendicular = mlp.w_out.to(direction).mT - _parallel_part(mlp, direction)
    return torch.where(direction.any(-1, keepdim=True), perpendicular, 0.0)


def _weighted_sum(values: Float[Tensor, "*batch hidden"], weights: Float[Tensor, " hidden"]) -> Float[Tensor, "*batch"]:
    """sum_j weights_j values_j, not as a product with one column, whose rounding depends on the batch."""
    return (values * weights).sum(-1)
