"""The Hodge split of an MLP on the sphere with uniform measure, which is unique and orthogonal [Helmholtz Transformer,
no. 3].

The tangential part P f of a force on S^(d-1) is grad_S u + R with div_S R = 0: u solves Lap_S u = div_S(P f), which
determines it up to a constant, and E<grad_S u, R> = 0. For a neuron w s(v.x + c) = w phi(t), t = e.x, e = v/|v|, with
w = alpha e + r and r perpendicular to e:

    u = alpha int phi + (r.x) h(t),    (1 - t^2) h'' - (d + 1) t h' - (d - 1) h = -(t phi' + (d - 1) phi)
    grad_S u = P [alpha e phi + r h + e (r.x) h'],    R = P [r (phi - h) - e (r.x) h']

As a series, h = sum_n g_n C_n^(d/2)(t) / ((n + 1)(n + d - 1)) with the Gegenbauer coefficients g_n of
t phi' + (d - 1) phi. If phi has a corner, the series converges slowly, so h is computed from its equation, to rounding
(``hodge_profile``). In the variable sqrt d t the split tends to that of Gauss space as d grows.

A field that is divergence-free in R^d need not be so on the sphere, and conversely [Helmholtz Transformer, no. 3]: R is
not the projected swirl of ``helmholtz``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helmscope.fields.hodge_gaussian import HodgeSplit
from helmscope.fields.hodge_profile import Law, Neurons, Profiles, check_ungated
from helmscope.geometry.sphere import project, retract
from helmscope.runs.bar import progress_reporting
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.mlp import MLP


@progress_reporting(None, "Hodge split")
def sphere_hodge_split(mlp: MLP) -> SphereHodgeSplit:
    """The orthogonal split P f = grad_S u + R, div_S R = 0, of an ungated MLP on S^(d-1), d >= 2. For a
    neuron w s(v.x + c) = w phi(t), t = e.x, e = v/|v|, w = alpha e + r with r perpendicular to e:

        u = alpha int phi + (r.x) h(t),   (1 - t^2) h'' - (d + 1) t h' - (d - 1) h = -(t phi' + (d - 1) phi).

    Constants (b_out, and neurons with v = 0) are gradients: P b = grad_S(b.x). For d >= 3 no nonzero field is both a
    gradient and divergence-free. On the circle R is a rotation c (-x_2, x_1), which is locally a gradient: there it is
    the ``harmonic`` part, and ``swirl`` is 0. Profiles are accurate to about 1e-14. Parameters are read once, without
    their gradients. Raises ``HelmscopeError`` for a gated MLP, for d < 2, and for an activation that oscillates or is
    not smooth apart from a corner at 0.

    >>> import torch
    >>> from helmscope.fields.activations import ReLU
    >>> from helmscope.fields.mlp import MLP
    >>> one, two = torch.eye(3)[:1], torch.eye(3)[1:2]
    >>> split = sphere_hodge_split(MLP(w_in=one, w_out=two.mT, activation=ReLU()))
    >>> round(split.share(), 12)  # 25/64
    0.390625
    >>> x = torch.tensor([0.6, 0.0, 0.8])
    >>> split.gradient(x) + split.swirl(x)  # P f
    tensor([0.0000, 0.6000, 0.0000])
    """
    radius = math.sqrt(check_ungated(mlp).dim)
    if mlp.dim < 2:
        raise HelmscopeError(f"mlp has dimension d={mlp.dim}, but a sphere needs d >= 2")
    neurons = Neurons.from_mlp(mlp, radius=radius)
    return SphereHodgeSplit(mlp, radius, neurons, Profiles.solve(Law(1 / mlp.dim), neurons))


@dataclass(frozen=True, eq=False)
class SphereHodgeSplit(HodgeSplit):
    """The orthogonal tangent fields P f = gradient + swirl + harmonic; returned by ``sphere_hodge_split``.

    Methods depend only on the direction x/|x|; at the zero vector, which has none, they return NaN.

    ``share`` is E|R|^2 / E|P f|^2; on the circle R is the harmonic part. For rows that are not parallel the remainder
    of the sum over degrees is estimated: zonal polynomials of higher degrees are taken to be at most the last two.

    >>> import torch
    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.fields.mlp import MLP
    >>> shear = MLP(w_in=torch.eye(2)[:1], w_out=torch.eye(2)[:, 1:], activation=Identity())  # f(x) = (0, x_1)
    >>> split, x = sphere_hodge_split(shear), torch.tensor([1.0, 0.0])
    >>> split.gradient(x), split.swirl(x), split.harmonic(x), round(split.share(), 12)
    (tensor([0.0000, 0.5000]), tensor([0., 0.]), tensor([0.0000, 0.5000]), 0.666666666667)
    """

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """R(x), tangent and without surface divergence; 0 on the circle."""
        return super().harmonic(x) if self.mlp.dim == 2 else super().swirl(x)

    def harmonic(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The rotation c (-x_2, x_1) on the circle, 0 for d >= 3."""
        return super().swirl(x) if self.mlp.dim == 2 else super().harmonic(x)

    def _coordinates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The coordinates of the direction of x."""
        self.mlp.check_points(x)
        return super()._coordinates(retract(x.double()))

    def _gradient_and_swirl(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """grad_S u and R."""
        gradient, swirl = super()._gradient_and_swirl(x)
        direction = retract(x.double())
        return project(direction, gradient), project(direction, swirl)
