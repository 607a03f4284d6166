"""The gradient of a potential that fits the force of an MLP best at weighted points: least squares in a stated basis.

The best gradient U = argmin E|f - grad U|^2 over a law of points is unique [Helmholtz Transformer, no. 3]. Here U is

    ungated   sum_j a_j psi(z_j) + b_j (r_j.x) h_j(z_j),   z = v.x + c, r the part of w across v
    gated     sum_j a_j psi(z_j) t_j + b_j Psi(z_j),       z = g.x + c, t = u.x + e

plus any quadratic potential with its linear part, which contains the quadratics along v_j. h is the profile that solves
h'' - z h' - h = -s for Gaussian points of the same size (``gaussian_hodge_split``); where it is not defined, h = s. The
symmetric matrix S of the quadratic part solves the Lyapunov equation S C + C S = E[g x^T] + E[x g^T], with centered x
and g, for whatever g the other potentials leave, so that it is eliminated; the equation for a and b that remains is
solved by conjugate gradients. Inner products of fields are entrywise products (S_a^T S_b) o (U_a U_b^T), O(T h^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from helmscope.fields.gradient_basis import Family, GradientBasis
from helmscope.fields.mlp import MLP, GatedMLP, linear
from helmscope.geometry.arithmetic import full_precision
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, type_with_article
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

ITERATIONS = 60  # of conjugate gradients


@dataclass(frozen=True, eq=False)
class Moments:
    """What a fit needs to know of weighted points, the sum over them; moments of disjoint sets are added.

    >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)
    >>> basis = GradientBasis.of(mlp, 1.0)
    >>> float(Moments.of(basis.families(x), x, mlp.ambient(x), torch.ones(2)).mass)
    2.0
    """

    mass: Tensor
    x: Float[Tensor, " d"]
    xx: Float[Tensor, "d d"]
    f: Float[Tensor, " d"]
    fx: Float[Tensor, "d d"]
    gram: Float[Tensor, "k k"]
    inner: Float[Tensor, " k"]
    sums: Float[Tensor, " atoms"]
    firsts: Float[Tensor, "atoms d"]
    vectors: Float[Tensor, "rows d"]
    row: Tensor  # the vector of each atom
    owner: Tensor  # the field to which each atom belongs

    @staticmethod
    @full_precision
    def of(families: list[Family], x: Tensor, f: Tensor, weights: Tensor) -> Moments:
        """The moments of points x with forces f, in float64; the vectors keep the dtype of the points, in which the
        products of a fit are taken.

        >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)
        >>> Moments.of(GradientBasis.of(mlp, 1.0).families(x), x, mlp.ambient(x), torch.ones(2)).gram.shape
        torch.Size([4, 4])
        """
        weighted = weights[:, None] * x
        inner = torch.cat([family.inner(f, weights) for family in families]).double()
        sums, firsts, row, owner, start = [], [], [], [], 0
        vectors: dict[int, tuple[int, Tensor]] = {}
        for family in families:
            for numbers, rows in family.atoms:
                sums.append((weights[:, None] * numbers).sum(0).double())
                firsts.append((numbers.mT @ weighted).double())
                first = sum(len(each) for _, each in vectors.values())
                first = vectors.setdefault(id(rows), (first, rows))[0]  # the same vectors once
                row.append(torch.arange(first, first + len(rows), device=x.device))
                owner.append(torch.arange(start, start + len(rows), device=x.device))
            start += len(rows)
        return Moments(
            weights.double().sum(),
            weighted.sum(0).double(),
            (weighted.mT @ x).double(),
            (weights[:, None] * f).sum(0).double(),
            (f.mT @ weighted).double(),
            _gram(families, weights),
            inner,
            torch.cat(sums),
            torch.cat(firsts),
            torch.cat([rows for _, rows in vectors.values()]),
            torch.cat(row),
            torch.cat(owner),
        )

    def plus(self, other: Moments) -> Moments:
        """The moments of both sets of points.

        >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)
        >>> one = Moments.of(GradientBasis.of(mlp, 1.0).families(x), x, mlp.ambient(x), torch.ones(2))
        >>> float(one.plus(one).mass)
        4.0
        """
        names = ("mass", "x", "xx", "f", "fx", "gram", "inner", "sums", "firsts")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        mean = self.x / self.mass
        value, axes = torch.linalg.eigh(self.xx - self.mass * mean * mean[:, None])
        return value, axes

    @property
    def axes(self) -> Float[Tensor, "d d"]:
        """The axes of the covariance of the points, in columns. In them the Lyapunov equation is solved entry by entry:
        ``quadratic``, ``field_moments`` and ``with_affine`` take and return matrices and vectors in these axes.

        >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> one = Moments.of(GradientBasis.of(mlp, 1.0).families(x), x, mlp.ambient(x), torch.ones(2))
        >>> one.axes.abs()
        tensor([[0., 1.],
                [1., 0.]], dtype=torch.float64)
        """
        return self._spectrum[1]

    @cached_property
    def _inverse_sums(self) -> Float[Tensor, "d d"]:
        """1 / (c_i + c_j) for the eigenvalues of the covariance; 0 in directions in which points do not differ."""
        value = self._spectrum[0]
        sums = value + value[:, None]
        known = sums > 1e-10 * value[-1]
        return torch.where(known, 1 / torch.where(known, sums, 1.0), 0.0)

    @cached_property
    @full_precision
    def _turned(self) -> tuple[Tensor, Tensor]:
        """The vectors, and the first moments of the numbers of the atoms about the mean, in the axes; in the dtype of
        the points, whose rounding the moments have anyway.
        """
        centered = (self.firsts - self.sums[:, None] * (self.x / self.mass)) @ self.axes
        return self.vectors @ self.axes.to(self.vectors), centered.to(self.vectors)

    def quadratic(self, moment: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
        """The symmetric S that fits a field best, given its centered moment sum g (x - m)^T; 0 in directions in which
        points do not differ.

        >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> one = Moments.of(GradientBasis.of(mlp, 1.0).families(x), x, mlp.ambient(x), torch.ones(2))
        >>> one.quadratic(torch.diag(torch.tensor([0.0, 2.0], dtype=torch.float64)))[1]  # the axis of the points
        tensor([0., 1.], dtype=torch.float64)
        """
        return (moment + moment.mT) * self._inverse_sums

    @full_precision
    def field_moments(self, coefficients: Float[Tensor, " k"]) -> tuple[Tensor, Tensor]:
        """The centered moment and the sum of the field with these coefficients.

        >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)
        >>> one = Moments.of(GradientBasis.of(mlp, 1.0).families(x), x, mlp.ambient(x), torch.ones(2))
        >>> one.field_moments(torch.zeros(4, dtype=torch.float64))[1]
        tensor([0., 0.], dtype=torch.float64)
        """
        (vectors, centered), scale = self._turned, coefficients[self.owner].to(self.vectors)
        numbers = torch.zeros_like(vectors).index_add(0, self.row, scale[:, None] * centered)
        sums = torch.zeros_like(vectors[:, 0]).index_add(0, self.row, scale * self.sums.to(scale))
        return (vectors.mT @ numbers).double(), (vectors.mT @ sums).double()

    @full_precision
    def with_affine(self, symmetric: Float[Tensor, "d d"], constant: Float[Tensor, " d"]) -> Float[Tensor, " k"]:
        """The inner products of the fields with S (x - m) + b.

        >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)
        >>> one = Moments.of(GradientBasis.of(mlp, 1.0).families(x), x, mlp.ambient(x), torch.ones(2))
        >>> one.with_affine(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
        tensor([0., 0., 0., 0.], dtype=torch.float64)
        """
        vectors, centered = self._turned
        symmetric, constant = symmetric.to(vectors), constant.to(vectors)
        atoms = ((vectors @ symmetric)[self.row] * centered).sum(-1).double()
        atoms = atoms + self.sums * (vectors @ constant)[self.row].double()
        return torch.zeros_like(self.inner).index_add(0, self.owner, atoms)


@full_precision
def _gram(families: list[Family], weights: Float[Tensor, " tokens"]) -> Float[Tensor, "k k"]:
    """The inner products of all fields, in float64."""
    blocks = {
        (a, b): families[a].gram(families[b], weights) for a in range(len(families)) for b in range(a, len(families))
    }
    places = range(len(families))
    rows = [torch.cat([blocks[a, b] if a <= b else blocks[b, a].mT for b in places], 1) for a in places]
    return torch.cat(rows).double()


@dataclass(frozen=True, eq=False)
class FittedGradient(ConciseRepr):
    """grad U = S (x - m) + b + the fields of the basis by their coefficients; made by ``fit_gradient``.

    >>> still = MLP(w_in=torch.eye(2), w_out=torch.eye(2))
    >>> fit_gradient(still, torch.eye(2)).at(torch.eye(2)).shape
    torch.Size([2, 2])
    """

    basis: GradientBasis
    coefficients: Float[Tensor, " k"]
    symmetric: Float[Tensor, "d d"]
    mean: Float[Tensor, " d"]
    constant: Float[Tensor, " d"]

    def at(self, x: Float[Tensor, "points d"], families: list[Family] | None = None) -> Float[Tensor, "points d"]:
        """grad U at points; ``families`` are those of the basis there, if they are known.

        >>> still, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)
        >>> bool((fit_gradient(still, x).at(x) - still(x)).abs().max() < 1e-5)
        True
        """
        families = self.basis.families(x) if families is None else families
        total = linear(x - self.mean.to(x), self.symmetric.to(x)) + self.constant.to(x)
        if not bool(self.coefficients.any()):
            return total
        pieces = torch.split(self.coefficients.to(x), len(self.coefficients) // len(families))
        for family, coefficients in zip(families, pieces, strict=True):
            total = total + family.combined(coefficients)
        return total


@shows_progress("fitting a gradient")
def fit_gradient(
    mlp: MLP | GatedMLP,
    x: Float[Tensor, "points d"],
    weights: Float[Tensor, " points"] | None = None,
    *,
    ridge: float = 1e-8,
    progress: ProgressOption = None,
) -> FittedGradient:
    """The gradient of the basis above that fits the force of an MLP best at weighted points x.

    ``ridge`` is added to the Gram matrix of the neurons' fields, each scaled to unit length. Raises HelmscopeError for
    anything but an MLP or a GatedMLP. ``progress`` is called with the share of the work done.

    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> bool(fit_gradient(turn, x).at(x).norm() < turn(x).norm())
    True
    """
    if not isinstance(mlp, MLP | GatedMLP):
        raise HelmscopeError(f"mlp is {type_with_article(mlp)}, but it must be an MLP or a GatedMLP")
    mass = torch.ones_like(x[:, 0]) if weights is None else weights.to(x)
    basis = GradientBasis.of(mlp, root_mean_square(x, mass))
    moments, report = Moments.of(basis.families(x), x, mlp.ambient(x), mass), check_progress(progress)
    report(0.5)
    fitted = fit_moments(basis, moments, ridge)
    report(1.0)
    return fitted


def gradient_residual_share(
    mlp: MLP | GatedMLP,
    x: Float[Tensor, "points d"],
    weights: Float[Tensor, " points"] | None = None,
    *,
    progress: ProgressOption = None,
) -> float:
    """The share of E|f|^2 that the basis leaves unexplained at the points on which it is fitted: for points that
    represent a law, such as the nodes of a quadrature, an upper bound on its swirl share. ``progress`` is called with
    the share of the work done.

    >>> draw = torch.Generator().manual_seed(0)
    >>> x = torch.randn(2000, 2, generator=draw, dtype=torch.float64)
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[1.0, -3.0], [3.0, 1.0]]))
    >>> 0.5 < gradient_residual_share(turn, x) < 0.9
    True
    """
    mass = torch.ones_like(x[:, 0]) if weights is None else weights.to(x)
    f = mlp.ambient(x)
    rest = f - fit_gradient(mlp, x, mass, ridge=1e-13, progress=progress).at(x)
    return float((mass * rest.square().sum(-1)).sum() / (mass * f.square().sum(-1)).sum())


@full_precision
def fit_moments(
    basis: GradientBasis,
    moments: Moments,
    ridge: float | None,
    *,
    tol: float = 1e-13,
    iterations: int = ITERATIONS,
) -> FittedGradient:
    """The best gradient given the moments; with a ridge of None, the best quadratic potential alone. Conjugate
    gradients stop at a relative residual of ``tol``, or after ``iterations``.

    >>> mlp, x = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)
    >>> basis = GradientBasis.of(mlp, 1.0)
    >>> fit_moments(basis, Moments.of(basis.families(x), x, mlp.ambient(x), torch.ones(2)), None).coefficients
    tensor([0., 0., 0., 0.], dtype=torch.float64)
    """
    mean, axes = moments.x / moments.mass, moments.axes
    moment, total = axes.mT @ (moments.fx - moments.f[:, None] * mean) @ axes, axes.mT @ moments.f
    coefficients = torch.zeros_like(moments.inner)
    if ridge is not None:
        length = moments.gram.diagonal().clamp(min=0).sqrt()
        length = torch.where(length > 0, length, 1.0)
        scaled = moments.gram / length / length[:, None]
        scaled.diagonal().add_(ridge)
        factor = torch.linalg.cholesky_ex(scaled)[0]

        def explained(first: Tensor, whole: Tensor) -> Tensor:
            return moments.with_affine(moments.quadratic(first), whole / moments.mass)

        def apply(c: Tensor) -> Tensor:
            return scaled @ c - explained(*moments.field_moments(c / length)) / length

        right = (moments.inner - explained(moment, total)) / length
        coefficients = _conjugate_gradients(apply, right, factor, tol, iterations) / length
        first, whole = moments.field_moments(coefficients)
        moment, total = moment - first, total - whole
    symmetric = axes @ moments.quadratic(moment) @ axes.mT
    return FittedGradient(basis, coefficients, symmetric, mean, axes @ total / moments.mass)


def root_mean_square(x: Float[Tensor, "points d"], weights: Float[Tensor, " points"]) -> float:
    """The root mean square of the coordinates of weighted points; 1 if they are all 0.

    >>> root_mean_square(2 * torch.ones(3, 2), torch.ones(3))
    2.0
    """
    size = math.sqrt(float((weights * x.square().mean(-1)).sum() / weights.sum()))
    return size if size > 0 else 1.0


def _conjugate_gradients(apply: Any, right: Tensor, factor: Tensor, tol: float, iterations: int) -> Tensor:
    """Solve apply(c) = right, preconditioned by the Cholesky factor of the part without elimination."""
    solution, rest = torch.zeros_like(right), right
    size = float(torch.linalg.vector_norm(right))
    preconditioned = torch.cholesky_solve(rest[:, None], factor)[:, 0]
    direction, product = preconditioned, float((rest * preconditioned).sum())
    for _ in range(iterations):
        if not product > 0 or float(torch.linalg.vector_norm(rest)) <= tol * size:
            break
        image = apply(direction)
        curvature = float((direction * image).sum())
        if not curvature > 0:  # singular to rounding: fields that the quadratic part replaces
            break
        step = product / curvature
        solution, rest = solution + step * direction, rest - step * image
        preconditioned = torch.cholesky_solve(rest[:, None], factor)[:, 0]
        following = float((rest * preconditioned).sum())
        direction, product = preconditioned + following / product * direction, following
    return solution
