"""The drift that a field gives to a density: the velocity of one more token in the cloud that the density describes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import SA, USA, Attention
from helmscope.fields.field import Field, StateSpace
from helmscope.fields.lowrank import LowRank
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.attention_sums import attention_sums
from helmscope.meanfield.density import zonal_cloud_points
from helmscope.meanfield.grid import Grid
from helmscope.meanfield.zonal_grid import ZonalGrid
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

NOT_ZONAL = 1e-9  # of the largest component
LOST = 1e-13  # values of Z below this, relative to the largest, have no correct digits in its series
INACCURATE = 1e-8  # ... have fewer than 8, too few where the density itself is known to more


class Drift(ABC):
    """Base class of drifts b[rho](x, t): components at the points of a grid, from the coefficients of rho."""

    @abstractmethod
    def components(
        self, modes: Float[Tensor, " modes"], t: float, values: Float[Tensor, " m"] | None = None
    ) -> Float[Tensor, "m c"]:
        """The components of b at the points. ``values`` are those of rho at the points, where they are known to more
        digits than ``modes`` give.
        """


@dataclass(frozen=True, eq=False)
class AttentionDrift(Drift):
    """SA or USA whose matrices are multiples of I. With Z = int e^{beta <x, y>} rho(dy) and V = c I

        USA   b = c grad_S G,   G = Z / beta           SA   b = c grad_S G / Z = (c / beta) grad_S log Z,

    where Z and G are convolutions, diagonal in the harmonics. For beta = 0, G = <x, mean> and Z = 1. Where the rounding
    errors of the largest values of Z leave no digits of it, as at the antipode of a narrow cluster if beta > 15, SA
    uses ``attention_sums`` instead.
    """

    grid: Grid
    scale: float  # c, times e^|beta| for USA
    potential: Float[Tensor, " modes"]  # multipliers of G without its constant, divided by e^|beta|
    beta: float
    constant: float | None  # of Z / e^|beta| = beta G + constant; None for USA

    @classmethod
    def of(cls, field: SA | USA, grid: Grid) -> AttentionDrift:
        """The drift of a field whose matrices are multiples of I."""
        beta, value = field.unit_beta, field.value_scale
        assert beta is not None
        assert value is not None
        partition = grid.exponential_multipliers(beta)
        if beta == 0:
            potential = (grid.degrees == 1).double() / grid.dim
        else:
            potential = partition / beta
            potential[0] = 0
        if isinstance(field, SA):
            return cls(grid, value, potential, beta, float(partition[0]))
        if abs(beta) > 700:
            raise HelmscopeError(f"beta is {beta:g}, but for USA it must be in [-700, 700]: e^beta overflows, use SA")
        return cls(grid, value * math.exp(abs(beta)), potential, beta, None)

    def components(
        self, modes: Float[Tensor, " modes"], t: float, values: Float[Tensor, " m"] | None = None
    ) -> Float[Tensor, "m c"]:
        """c grad G, divided by Z for SA."""
        if self.constant is None:
            return self.scale * self.grid.gradient(self.potential * modes)
        value, gradient = self.grid.value_and_gradient(self.potential * modes)
        z = self.beta * value + self.constant * modes[:1]
        components = gradient / z[:, None]
        lost = _lost_points(z, values)
        if len(lost):
            values = self.grid.synthesize(modes) if values is None else values
            components[lost] = attention_sums(self.grid, self.beta, values, lost)[1]
        return self.scale * components

    def log_partition_function(
        self, modes: Float[Tensor, " modes"], values: Float[Tensor, " m"] | None = None
    ) -> Float[Tensor, " m"]:
        """log Z of SA at the points, without the constant |beta|."""
        z = self.partition_function(modes)
        log_z, lost = z.log(), _lost_points(z, values)
        if len(lost):
            values = self.grid.synthesize(modes) if values is None else values
            log_z[lost] = attention_sums(self.grid, self.beta, values, lost)[0] - abs(self.beta)
        return log_z

    def partition_function(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m"]:
        """The series of Z / e^|beta| = beta G + constant of SA at the points; linear in the density."""
        assert self.constant is not None
        return self.beta * self.grid.synthesize(self.potential * modes) + self.constant * modes[..., :1]


def _lost_points(z: Tensor, values: Tensor | None) -> Int[Tensor, " n"]:
    """The indices of the points where the series of Z has too few digits."""
    return (z <= (LOST if values is None else INACCURATE) * z.max()).nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class ForceDrift(Drift):
    """A field that acts on each point alone: an MLP, or a plain function. On a ``ZonalGrid`` it must point along the
    meridians, with a size that depends on the first coordinate only.
    """

    grid: Grid
    field: Field

    def __post_init__(self) -> None:
        if isinstance(self.grid, ZonalGrid):
            self._components_at(0.0)

    def components(
        self, modes: Float[Tensor, " modes"], t: float, values: Float[Tensor, " m"] | None = None
    ) -> Float[Tensor, "m c"]:
        """The components of the velocity."""
        return self._constant if self.field.autonomous else self._components_at(t)

    @cached_property
    def _constant(self) -> Float[Tensor, "m c"]:
        return self._components_at(0.0)

    @full_precision
    def _components_at(self, t: float) -> Float[Tensor, "m c"]:
        def velocity(x: Tensor) -> Tensor:
            return self.field.velocity(x[:, None], t=t)[:, 0]

        if isinstance(self.grid, ZonalGrid):
            check_zonal_vectors(self.grid, velocity, f"the field {self.field.name}")
        return self.grid.components(velocity(self.grid.points))


@dataclass(frozen=True, eq=False)
class CloudDrift(Drift):
    """Any other field: its velocity at the points of the grid, as tokens weighted by the density (negative weights are
    clipped). Raises ``HelmscopeError`` if the degree of the grid is too small for the kernel of one of its heads, of
    which e^{beta ||B|| <x, y>} is the narrowest possible.
    """

    grid: Grid
    field: Field

    def __post_init__(self) -> None:
        for head in _heads(self.field):
            size = _sharpness(head)
            self.grid.check_kernel(size, f"the kernel of {head.name} with beta ||query_key|| = {size:g}")

    @full_precision
    def components(
        self, modes: Float[Tensor, " modes"], t: float, values: Float[Tensor, " m"] | None = None
    ) -> Float[Tensor, "m c"]:
        """The components of the velocity of the weighted cloud."""
        values = self.grid.synthesize(modes) if values is None else values
        weights = (self.grid.weights * values).clamp(min=0)
        return self.grid.components(self.field.velocity(self.grid.points[None], weights[None], t=t)[0])


def drift_of(field: Field, grid: Grid) -> Drift:
    """The drift of a field on a grid.

    Raises ``HelmscopeError`` for fields that do not define a flow of measures on the sphere.

    >>> from helmscope.meanfield import CircleGrid
    >>> type(drift_of(SA(beta=1.0), CircleGrid(degree=16))).__name__
    'AttentionDrift'
    """
    if field.space is not StateSpace.SPHERE or field.discrete_only:
        raise HelmscopeError(f"field is {field.name}, but the equation of a density needs a flow of unit vectors")
    if field.batch:
        raise HelmscopeError(
            f"field has parameters with the batch axes {tuple(field.batch)}, but a density has one system only"
        )
    heads = _heads(field)
    if (field.attends or heads) and not field.exchangeable:
        raise HelmscopeError(
            f"field is {field}, but the equation of a density needs tokens without an order: no causal mask, bias or "
            "positions"
        )
    if isinstance(field, SA | USA) and field.unit_beta is not None and field.value_scale is not None:
        return AttentionDrift.of(field, grid)
    field.check_size(grid.points[None])
    if not field.attends and not heads and _acts_on_single_points(field, grid.points):
        return ForceDrift(grid, field)
    if isinstance(grid, ZonalGrid):
        raise HelmscopeError(
            f"field is {field}, but on a ZonalGrid attention must be SA or USA with multiples of I for query_key and "
            f"value: {instead_of_zonal(grid)}"
        )
    if not field.takes_weights:
        raise HelmscopeError(f"field is {field.name}, which takes no weights, but a density is a weighted cloud")
    return CloudDrift(grid, field)


def _heads(field: Field) -> list[Attention]:
    """The heads of attention that a field contains, at any depth."""
    if isinstance(field, Attention):
        return [field]
    parts = [getattr(field, name) for name in field.parts]
    inner = [each for part in parts for each in ([part] if isinstance(part, Field) else part)]
    return [head for each in inner if isinstance(each, Field) for head in _heads(each)]


@full_precision
def _sharpness(head: Attention) -> float:
    """|beta| ||B||, the largest size of a logit between unit vectors; 0 for ``Hardmax``, which has no kernel."""
    if not head.continuous:
        return 0.0
    factor, matrix = abs(float(head.logit_factor)), head.query_key
    if matrix is None:
        return factor
    dense = matrix.dense() if isinstance(matrix, LowRank) else matrix
    return factor * float(torch.linalg.matrix_norm(dense.detach().double(), 2).max())


def instead_of_zonal(grid: ZonalGrid) -> str:
    """What can be done where a density does not stay zonal, in words.

    >>> instead_of_zonal(ZonalGrid(dim=3, degree=2)), instead_of_zonal(ZonalGrid(dim=8, degree=2))
    ('use SphereGrid', 'simulate particles with hs.integrate, since no grid has all densities on S^7')
    """
    if grid.dim <= 3:
        return "use CircleGrid" if grid.dim == 2 else "use SphereGrid"
    return f"simulate particles with hs.integrate, since no grid has all densities on S^{grid.dim - 1}"


@full_precision
def _acts_on_single_points(field: Field, points: Tensor) -> bool:
    """Whether the velocities of a few points, some of them neighbors, are the same when they come one at a time."""
    sample = torch.cat([points[:: max(1, len(points) // 5)][:5], points[1:3]])
    together = field.velocity(sample[None])[0]
    alone = field.velocity(sample[:, None])[:, 0]
    return bool(((together - alone).abs() <= 1e-12 * (1 + together.abs().max())).all())


def check_zonal_vectors(grid: ZonalGrid, vectors_at: Callable[[Tensor], Tensor], name: str) -> None:
    """Raise ``HelmscopeError`` unless a vector field points along the meridians, with the same component at all points
    of a parallel.

    >>> check_zonal_vectors(ZonalGrid(dim=3, degree=2), lambda x: torch.ones_like(x) * x[:, :1], "the field")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: the field does not point along the meridians ...
    """
    expected = grid.components(vectors_at(grid.points))[:, 0]
    size = 1e-300 + float(expected.abs().max())
    points = zonal_cloud_points(grid)
    copies = len(points) // len(grid.points)
    first = torch.eye(grid.dim, dtype=torch.float64, device="cpu")[0]
    sine = grid.points[:, 1].repeat_interleave(copies)[:, None]
    toward = (first - points[:, :1] * points) / sine
    wanted = expected.repeat_interleave(copies)[:, None] * toward
    vectors = vectors_at(points)
    tangential = vectors - (vectors * points).sum(-1, keepdim=True) * points
    if not float((tangential - wanted).abs().max()) <= NOT_ZONAL * max(size, float(tangential.abs().max())):
        raise HelmscopeError(
            f"{name} does not point along the meridians with a size that depends on the first coordinate only, but on "
            f"a ZonalGrid it must: {instead_of_zonal(grid)}"
        )
