"""The Hodge split of an MLP for normally distributed inputs, which is unique and orthogonal [Helmholtz Transformer, no.
3].

For rho = N(0, I) the best gradient U = argmin E|f - grad U|^2 leaves R = f - grad U with div(rho R) = 0, and
E|f|^2 = E|grad U|^2 + E|R|^2. For a neuron w s(v.x + c) = w phi(z), z = e.x, e = v/|v|, w = alpha e + r with r
perpendicular to e, the part along e is a gradient. The part along r, all of which ``helmholtz`` counts as swirl, is
partly a gradient too:

    U = alpha int phi + (r.x) h(z),    grad U = alpha e phi + r h + e (r.x) h',    h'' - z h' - h = -phi

N(0, I) is the limit k -> 0 of the sphere of radius sqrt d and curvature k = 1/d, where grad U is projected and the rest
is the same (``hodge_profile``); the following holds for both. Energies are sums over pairs of neurons and degrees n:
c_jn are the coefficients of phi_j in the orthonormal polynomials of z (Hermite polynomials for k = 0), F_jn and H_jn
those of int phi_j and int h_j, and P_n, with P_n(1) = 1, the zonal polynomials (q^n for k = 0) at q = e_j.e_k. With
m = n (1 + (n - 2) k)

    E|grad U|^2 = sum m (alpha_j F_jn + H_jn r_j.d/de_j) (alpha_k F_kn + H_kn r_k.d/de_k) P_n(q)
    E|R|^2 = sum c_jn c_kn [(r_j.r_k) (m P_n - k q P_n') - (r_j.e_k)(r_k.e_j) (k q P_n'' + (1 - 2k) P_n')] / (m+1-3k)

(k = 0: sum c_jn c_kn n/(n + 1) q^(n-1) [(w_j.w_k) q - (w_j.e_k)(w_k.e_j)], a form in the two-vectors w_j ^ e_j).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.hodge_profile import Law, Neurons, Profiles, check_ungated
from helmscope.fields.mlp import MLP, linear
from helmscope.geometry.arithmetic import full_precision
from helmscope.runs.bar import progress_reporting
from helmscope.types import ConciseRepr, HelmscopeError, check_real, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

PARALLEL = 1e-13  # rows with 1 - |q| below this are treated as parallel: for them the sum over n may not converge


@progress_reporting(None, "Hodge split")
def gaussian_hodge_split(mlp: MLP) -> HodgeSplit:
    """The orthogonal split f = grad U + R of an ungated MLP under x ~ N(0, I), with div(rho R) = 0. For a
    neuron w s(v.x + c) = w phi(z), z = e.x, e = v/|v|, w = alpha e + r with r perpendicular to e:

        U = alpha int phi + (r.x) h(z),   h'' - z h' - h = -phi,   grad U = alpha e phi + r h + e (r.x) h'.

    Constants (b_out, and neurons with v = 0) are gradients and belong to ``gradient``; for this measure no nonzero
    field is both a gradient and divergence-free, and ``harmonic`` is 0. Profiles are accurate to about 1e-14 for
    |e.x| <= 1024 and NaN beyond. Parameters are read once, without their gradients. Raises ``HelmscopeError`` for a
    gated MLP, and for an activation that oscillates or is not smooth apart from a corner at 0.

    >>> from helmscope.fields.activations import ReLU
    >>> mlp = MLP(w_in=torch.tensor([[1.0, 0.0]]), w_out=torch.tensor([[0.0], [1.0]]), activation=ReLU())
    >>> split = gaussian_hodge_split(mlp)
    >>> round(split.share(), 12)
    0.375
    >>> split.gradient(torch.tensor([0.0, 1.0]))  # e h'(0) + r h(0)
    tensor([0.2500, 0.3133])
    """
    neurons = Neurons.from_mlp(check_ungated(mlp), radius=1.0)
    return HodgeSplit(mlp, 1.0, neurons, Profiles.solve(Law(0.0), neurons))


@dataclass(frozen=True, eq=False)
class HodgeSplit(ConciseRepr):
    """The orthogonal parts of a force, f = gradient + swirl + harmonic to rounding, from ``gaussian_hodge_split``.

    Methods take points (..., d) of float64 or float32, compute in float64 and return the dtype of x. They do not depend
    on values, so they work under ``torch.func``, and can be differentiated. Memory: points times neurons, and about
    25 kB per neuron.

    >>> from helmscope.fields.activations import Identity
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[1.0, -3.0], [3.0, 1.0]]), activation=Identity())
    >>> split, x = gaussian_hodge_split(turn), torch.tensor([1.0, 2.0])
    >>> split.potential(x), split.gradient(x), split.swirl(x), round(split.share(), 12)
    (tensor(2.5000), tensor([1., 2.]), tensor([-6.,  3.]), 0.9)
    """

    mlp: MLP
    radius: float
    neurons: Neurons
    profiles: Profiles

    def potential(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """U(x), up to a constant. Raises ``HelmscopeError`` if the activation does not define its ``potential``."""
        point, z, height = self._coordinates(x)
        n = self.neurons.to(z)
        value, _ = self.profiles(z, _neuron_indices(z))
        terms = n.along * (n.activation.potential(n.length * z + n.offset) / n.length) + height * value
        return ((terms.sum(-1) + (point * n.constant).sum(-1)) / self.radius).to(x)

    def gradient(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """grad U(x), including the constants."""
        return self._gradient_and_swirl(x)[0].to(x)

    def swirl(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """R(x), with div(rho R) = 0 for the density rho of the measure."""
        return self._gradient_and_swirl(x)[1].to(x)

    def harmonic(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The part that is both a gradient and divergence-free: 0."""
        self.mlp.check_points(x)
        return torch.zeros_like(x)

    @full_precision
    def share(self, *, tol: float = 1e-6) -> float:
        """E|R|^2 / E|f|^2, the share of f that no potential explains, in [0, 1]; f includes its constants.

        Exact to rounding for one neuron and for parallel rows. Otherwise the sum over n is truncated when the
        Cauchy-Schwarz inequality bounds the remainder by ``tol``; for smooth activations the error is much
        smaller. Raises ``HelmscopeError`` if 4096 degrees do not suffice (corners and nearly parallel rows) and if
        f = 0. Time and memory grow like hidden^2.
        """
        tol = check_real("tol", tol, above=0)
        cosine = self.neurons.direction @ self.neurons.direction.mT
        parallel = cosine.abs() > 1 - PARALLEL
        exact = self._parallel_energies(cosine, *parallel.nonzero(as_tuple=True))
        for degrees in (64, 512, 4096):  # from scratch each time, because the quadrature depends on the degree
            (total, swirl, size), remainder = exact, 0.0
            for total_term, swirl_term, remainder in self._energy_terms(cosine, ~parallel, degrees):
                total, swirl = total + total_term, swirl + swirl_term
                if remainder <= tol * total:
                    break
            if remainder <= tol * total:
                break
        if not total > 1e-12 * size:
            raise HelmscopeError(f"mlp has E|f|^2 = {total:.1e}, which is 0 to rounding, but a share needs a force")
        if remainder > tol * total:
            smallest = remainder / total
            raise HelmscopeError(f"tol is {tol:g}, but for this mlp it must be at least {smallest:.1e}")
        return min(max(swirl / total, 0.0), 1.0)

    def _coordinates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The point radius x in float64, and for each neuron z = e.point and r.point."""
        self.mlp.check_points(x)
        point = self.radius * x.double()
        n = self.neurons.to(point)
        reach = self.profiles.law.reach  # which a unit vector exceeds only by rounding
        z = linear(point, n.direction.mT)
        return point, z.clamp(-reach, reach) if self.profiles.law.curvature else z, linear(point, n.across.mT)

    def _gradient_and_swirl(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """grad U and R, before projection."""
        _, z, height = self._coordinates(x)
        n = self.neurons.to(z)
        value, slope = self.profiles(z, _neuron_indices(z))
        phi, bend = n.activation(n.length * z + n.offset), height * slope
        gradient = linear(n.along * phi + bend, n.direction) + linear(value, n.across) + n.constant
        return gradient, linear(phi - value, n.across) - linear(bend, n.direction)

    @full_precision
    def _parallel_energies(self, cosine: Tensor, first: Tensor, second: Tensor) -> tuple[float, float, float]:
        """E<f_i, f_j> and E<R_i, R_j> summed over pairs of parallel neurons, with the constants; and the sum of the
        E|f_i|^2, to which rounding errors are relative.
        """
        n, law, k = self.neurons, self.profiles.law, self.profiles.law.curvature
        line = self.profiles.line
        total = (1 - k) * float(n.constant @ n.constant)
        # profiles of neurons that are almost never active, on average 1e-15 of their argument, have few correct digits
        size = total + 1e-18 * float(((n.length + n.offset.abs())[:, None] * n.out).square().sum())
        swirl = 0.0
        for i, j in zip(torch.split(first, 256), torch.split(second, 256), strict=True):
            sign, diagonal = cosine[i, j].sign(), i == j
            z, mass = law.quadrature(torch.cat([line[i], sign[:, None] * line[j]], -1).sort(-1).values)
            signed = sign[:, None] * z
            phi_i, phi_j = mass * n.phi(z, i), n.phi(signed, j)  # the first with the weights of the quadrature
            value, slope = self.profiles(signed, j[:, None].expand_as(z))
            p = 1 - k * z * z
            moment = k * p / (1 - k)  # E[(r.x)^2 | z] / (|r|^2 radius^2)
            along, across = sign * n.along[i] * n.along[j], (n.across[i] * n.across[j]).sum(-1)
            energy = along * (phi_i * p * phi_j).sum(-1) + across * (phi_i * (1 - moment) * phi_j).sum(-1)
            swirl_energy = across * (phi_i * ((1 - moment) * (phi_j - value) + moment * signed * slope)).sum(-1)
            mean = (n.along[i] * (phi_i * p).sum(-1))[:, None] * n.direction[i]
            mean = mean + (phi_i * (1 - moment)).sum(-1)[:, None] * n.across[i]  # E[P f_i]
            total += float(energy.sum() + 2 * (mean[diagonal] @ n.constant).sum())
            size, swirl = size + float(energy[diagonal].sum()), swirl + float(swirl_energy.sum())
        return total, swirl, size

    def _energy_terms(
        self, cosine: Tensor, pairs: Bool[Tensor, "hidden hidden"], degrees: int
    ) -> Iterator[tuple[float, float, float]]:
        """The terms n = 1..degrees of E|f|^2 and E|R|^2, summed over ``pairs``, each with a bound on the remainder."""
        if not bool(pairs.any()):
            return
        n, law, k = self.neurons, self.profiles.law, self.profiles.law.curvature
        size = torch.linalg.vector_norm(n.out, dim=-1)
        cross, across = n.direction @ n.across.mT * pairs, n.across @ n.across.mT * pairs
        cross_product = cross * cross.mT
        zero, one = torch.zeros_like(cosine), torch.ones_like(cosine)
        previous, zonal = torch.stack([one, zero, zero]), torch.stack([cosine, one, zero])  # P_n, P_n', P_n''
        coefficients = n.coefficients(law, self.profiles.line, degrees + 1)
        (below, rest), (c, rest_next) = next(coefficients), next(coefficients)
        for degree, (above, rest_above) in enumerate(coefficients, 1):
            growth = 1 + (degree - 2) * k
            m, lift, drop = degree * growth, law.jacobi(degree) / degree, law.jacobi(degree + 1) * k / growth
            f, h = n.along * (lift * below - drop * above), lift / degree * below + drop * k / growth * above
            slopes = across * zonal[1] + cross_product * zonal[2]
            gradient = m * float(f @ (pairs * zonal[0]) @ f + 2 * f @ (cross * zonal[1]) @ h + h @ slopes @ h)
            turn = across * (m * zonal[0] - k * cosine * zonal[1])
            turn = turn - cross_product * (k * cosine * zonal[2] + (1 - 2 * k) * zonal[1])
            turn = turn / (m + 1 - 3 * k) if degree > 1 else (across * cosine - cross_product) / 2  # 0/0 on the circle
            swirl, tail = float(c @ turn @ c), size * rest
            # |w_j||w_k| bounds a term of E|f|^2, 5/4 of that a term of E|R|^2, each times |P_n|, which decreases with n
            yield (
                gradient + swirl,
                swirl,
                9 / 4 * float(tail @ (pairs * torch.maximum(zonal[0].abs(), previous[0].abs())) @ tail),
            )
            shifted = torch.stack([zero, zonal[0], 2 * zonal[1]])
            following = ((1 + (2 * degree - 2) * k) * (cosine * zonal + shifted) - degree * k * previous) / growth
            (below, rest), (c, rest_next), (previous, zonal) = (c, rest_next), (above, rest_above), (zonal, following)


def _neuron_indices(z: Float[Tensor, "*batch hidden"]) -> Int[Tensor, "*batch hidden"]:
    """0 to hidden - 1 along the last axis, expanded to the shape of z."""
    return torch.arange(z.shape[-1], device=z.device).expand_as(z)


@dataclass(frozen=True, eq=False)
class LinearHodgeSplit(ConciseRepr):
    """The split M = S + (M - S) of a linear force into its gradient part S x and its swirl, with the share of the swirl
    in the energy; returned by ``linear_hodge_split``.

    >>> linear_hodge_split(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.eye(2)).swirl
    tensor([[ 0.,  1.],
            [-1.,  0.]])
    """

    symmetric: Float[Tensor, "d d"]
    swirl: Float[Tensor, "d d"]
    share: float


@full_precision
def linear_hodge_split(matrix: Float[Tensor, "d d"], covariance: Float[Tensor, "d d"]) -> LinearHodgeSplit:
    """The orthogonal split of the linear force M x under x ~ N(0, C): S symmetric, with [Helmholtz Transformer, no. 3]

        S C + C S = M C + C M^T,    share = tr((M - S) C (M - S)^T) / tr(M C M^T) in [0, 1], NaN for M = 0.

    Equivalently div(rho (M - S) x) = 0, or C^-1 (M - S) is antisymmetric. It is solved in the eigenbasis of C. Raises
    ``HelmscopeError`` unless M and C are finite square matrices of the same size and C is symmetric positive definite.

    >>> split = linear_hodge_split(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.diag(torch.tensor([1.0, 4.0])))
    >>> split.symmetric, round(split.share, 6)
    (tensor([[0.0000, 0.8000],
            [0.8000, 0.0000]]), 0.2)
    """
    for name, value in (("matrix", matrix), ("covariance", covariance)):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim != 2:
            raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a square float tensor")
        if value.shape != (matrix.shape[0], matrix.shape[0]) or not bool(torch.isfinite(value).all()):
            raise HelmscopeError(
                f"{name} has shape {tuple(value.shape)}, but both must be finite and square, of the same size"
            )
    m, c = matrix.double(), covariance.double()
    eigenvalue, basis = torch.linalg.eigh((c + c.mT) / 2)
    smallest, largest = float(eigenvalue[0]), float(eigenvalue[-1])
    asymmetry = (c - c.mT).abs()
    if float(asymmetry.max()) > 1e-6 * float(eigenvalue.abs().max()):
        i, j = divmod(int(asymmetry.argmax()), len(c))
        raise HelmscopeError(
            f"covariance is asymmetric, by {float(asymmetry.max()):g} at ({i}, {j}), but it must be symmetric and "
            "positive definite"
        )
    if not smallest > 1e-14 * largest:
        raise HelmscopeError(f"covariance has smallest eigenvalue {smallest:g}, but it must be positive definite")
    rotated = basis.mT @ m @ basis * eigenvalue
    symmetric = basis @ ((rotated + rotated.mT) / (eigenvalue + eigenvalue[:, None])) @ basis.mT
    swirl = m - symmetric
    share = (swirl @ c * swirl).sum() / (m @ c * m).sum()
    return LinearHodgeSplit(symmetric.to(matrix), swirl.to(matrix), float(share))
