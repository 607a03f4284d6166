"""Whitening of linear drifts with constant noise, and when it makes a gradient flow [Helmholtz Transformer, no. 7].

dX = -S X dt + sqrt(2 Sigma) dW is, for y = Sigma^{-1/2} x, a process with noise I and the drift -S' y, S' =
Sigma^{-1/2} S Sigma^{1/2}. It is a gradient flow iff S' is symmetric, that is iff

    S Sigma = Sigma S^T,

which also says that the drift carries the mobility, -S x = -Sigma grad Phi with a potential Phi, and that the
stationary law has no current. For a gradient drift, S = S^T, it says that S and Sigma commute; otherwise whitening
turns a gradient drift into one with a swirl. The stationary law is N(0, C) with

    S C + C S^T = 2 Sigma,     current  J(x) = -(S C - Sigma) C^{-1} x rho(x),     S C - Sigma antisymmetric.

If Sigma is singular, whitening is possible on its range only, and the process stays there only if S maps the range into
itself. On the sphere there is no whitening at all: Sigma^{-1/2} maps it to an ellipsoid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.noise import IsotropicNoise, Noise
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.density import Density
from helmscope.meanfield.evolve import evolve
from helmscope.meanfield.gaussian_flow import stationary_gaussian
from helmscope.types import HelmscopeError, check_real, one_line_repr, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SINGULAR = 1e-12  # of the largest eigenvalue of Sigma


@dataclass(frozen=True, eq=False, repr=False)
class Whitening:
    """What whitening does to a linear drift.

    ``stiffness`` is S' in the coordinates y = <axes, x> / sqrt(Sigma), r of them if Sigma has rank r. The shares are
    those of the antisymmetric part, |A|^2 / |S|^2 in the Frobenius norm, before and after. ``commutator`` is |S Sigma -
    Sigma S| / (|S| |Sigma|), and ``asymmetry`` |S Sigma - Sigma S^T| / (|S| |Sigma|). ``leak`` is the part of S that
    leads out of the range of Sigma, 0 if Sigma is regular.

    >>> S, Sigma = torch.tensor([[1.0, 0.5], [0.5, 2.0]]), torch.diag(torch.tensor([1.0, 4.0]))
    >>> whiten(S, Sigma)
    <Whitening: antisymmetric share 0 before, 0.0464 after; no gradient flow>
    """

    stiffness: Float[Tensor, "r r"]
    axes: Float[Tensor, "d r"]
    antisymmetric_share_before: float
    antisymmetric_share_after: float
    commutator: float
    asymmetry: float
    leak: float
    gives_gradient_flow: bool

    def __repr__(self) -> str:
        verdict = "a gradient flow" if self.gives_gradient_flow else "no gradient flow"
        return one_line_repr(
            f"Whitening: antisymmetric share {self.antisymmetric_share_before:.3g} before, "
            f"{self.antisymmetric_share_after:.3g} after; {verdict}"
        )


@full_precision
def whiten(stiffness: Float[Tensor, "d d"], diffusion: Float[Tensor, "d d"], *, tol: float = 1e-10) -> Whitening:
    """Whiten the drift -S x with S = ``stiffness`` by a constant, symmetric Sigma = ``diffusion`` >= 0, in float64.

    The coordinates are x = Sigma^{1/2} y if Sigma is regular, else those of its range. ``gives_gradient_flow`` says
    whether S' is symmetric, |A| <= ``tol`` |S'|, and, for a singular Sigma, whether S maps its range into itself,
    ``leak`` <= ``tol``. Raises ``HelmscopeError`` for matrices of other shapes, and for a Sigma that is not symmetric,
    negative or 0.

    >>> S, Sigma = torch.tensor([[1.0, 0.5], [0.5, 2.0]]), torch.diag(torch.tensor([1.0, 4.0]))
    >>> whiten(S, Sigma).stiffness
    tensor([[1.0000, 1.0000],
            [0.2500, 2.0000]], dtype=torch.float64)
    >>> whiten(Sigma @ S, Sigma).gives_gradient_flow  # the drift carries the mobility
    True
    """
    s, covariance, values, vectors = _check_matrices(stiffness, diffusion)
    tol = check_real("tol", tol, at_least=0)
    kept = values > SINGULAR * values[-1]
    axes, roots = vectors[:, kept], values[kept].sqrt()
    white = (axes.mT @ s @ axes) / roots[:, None] * roots
    if bool(kept.all()):  # back to the original axes, so that y = Sigma^(-1/2) x
        white, axes = axes @ white @ axes.mT, torch.eye(len(s), dtype=s.dtype, device="cpu")
    size = float(s.norm() * covariance.norm()) or 1.0
    outside = torch.eye(len(s), dtype=s.dtype, device="cpu") - vectors[:, kept] @ vectors[:, kept].mT
    leak = float((outside @ s @ vectors[:, kept]).norm()) / (float(s.norm()) or 1.0)
    after = _antisymmetric_share(white)
    return Whitening(
        white,
        axes,
        _antisymmetric_share(s),
        after,
        float((s @ covariance - covariance @ s).norm()) / size,
        float((s @ covariance - covariance @ s.mT).norm()) / size,
        leak,
        max(math.sqrt(after), leak) <= tol,
    )


def is_gradient_flow(stiffness: Float[Tensor, "d d"], diffusion: Float[Tensor, "d d"], *, tol: float = 1e-10) -> bool:
    """Whether the drift -S x carries the mobility Sigma, -S x = -Sigma grad Phi(x): whether S Sigma is symmetric, and S
    maps the range of Sigma into itself. Then, and only then, the law of the process descends F = Ent + int Phi in the
    Wasserstein metric with mobility Sigma.

    >>> S, Sigma = torch.tensor([[1.0, 0.5], [0.5, 2.0]]), torch.diag(torch.tensor([1.0, 4.0]))
    >>> is_gradient_flow(S, Sigma), is_gradient_flow(Sigma @ S, Sigma), is_gradient_flow(S, torch.eye(2))
    (False, True, True)
    """
    return whiten(stiffness, diffusion, tol=tol).gives_gradient_flow


@full_precision
def stationary_current(stiffness: Float[Tensor, "d d"], diffusion: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The matrix S C - Sigma of the stationary current, antisymmetric: the stationary probability current is -(S C -
    Sigma) C^{-1} x rho(x). It is 0 iff the process is reversible, which is iff ``is_gradient_flow``. C is the
    covariance of ``stationary_gaussian(drift=-S, diffusion=Sigma)``.

    Raises ``HelmscopeError`` unless all eigenvalues of S have positive real parts.

    >>> S, Sigma = torch.tensor([[1.0, 0.5], [0.5, 2.0]]), torch.diag(torch.tensor([1.0, 4.0]))
    >>> stationary_current(S, Sigma)
    tensor([[ 0.0000,  0.5000],
            [-0.5000,  0.0000]], dtype=torch.float64)
    """
    s, covariance, _, _ = _check_matrices(stiffness, diffusion)
    slowest = float(torch.linalg.eigvals(s).real.min())
    if not slowest > 0:
        raise HelmscopeError(
            f"stiffness has an eigenvalue with real part {slowest:.3g}, but a stationary law needs all of them positive"
        )
    flux = s @ stationary_gaussian(drift=-s, diffusion=covariance).covariance - covariance
    return (flux - flux.mT) / 2


@full_precision
def scalar_diffusion_error(
    field: object, start: Density, noise: Noise, *, times: Sequence[float]
) -> Float[Tensor, " time"]:
    """How wrong it is to replace a noise by its scalar nu = E tr(P M P) / (d - 1), the mean over the sphere: half of
    int |rho - rho_scalar| at each time, both densities by ``evolve``. It is 0 for isotropic noise, and at most 1.

    Raises ``HelmscopeError`` as ``evolve`` does, and if one of the runs ends early.

    >>> from helmscope.fields.noise import MatrixNoise
    >>> from helmscope.meanfield import CircleGrid
    >>> noise = MatrixNoise(torch.diag(torch.tensor([1.0, 0.5], dtype=torch.float64)))
    >>> start = Density.von_mises_fisher(CircleGrid(degree=16), kappa=1.0)
    >>> bool(scalar_diffusion_error(None, start, noise, times=[1.0]) > 0.01)
    True
    """
    if not isinstance(start, Density):
        raise HelmscopeError(f"start is {short_repr(start)}, but it must be a Density")
    if not isinstance(noise, Noise):
        raise HelmscopeError(f"noise is {short_repr(noise)}, but it must be a noise such as MatrixNoise(matrix)")
    grid = start.grid
    points = grid.points[:, None]
    noise.check_size(points)
    matrix = noise.diffusion_matrix(points)[:, 0].expand(len(points), grid.dim, grid.dim)
    normal = torch.einsum("md,mde,me->m", grid.points, matrix, grid.points)
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    scalar = IsotropicNoise(float(grid.mean_of(trace - normal)) / (grid.dim - 1))
    paths = [evolve(field, start, times=times, noise=each) for each in (noise, scalar)]
    for path in paths:
        if len(path) < len(times):
            raise HelmscopeError(f"times is {short_repr(times)}, but a run ended early: {path.outcome.summary}")
    difference = grid.synthesize(paths[0].modes - paths[1].modes)
    return grid.mean_of(difference.abs()) / 2


def _antisymmetric_share(matrix: Tensor) -> float:
    return (float(((matrix - matrix.mT) / 2).norm()) / (float(matrix.norm()) or 1.0)) ** 2


def _check_matrices(stiffness: object, diffusion: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S, Sigma, and the eigenvalues and eigenvectors of Sigma, in float64."""
    checked = []
    for name, matrix in (("stiffness", stiffness), ("diffusion", diffusion)):
        if (
            not isinstance(matrix, torch.Tensor)
            or matrix.ndim != 2
            or matrix.shape[0] != matrix.shape[1]
            or not bool(torch.isfinite(matrix).all())
        ):
            raise HelmscopeError(f"{name} is {short_repr(matrix)}, but it must be a finite square matrix")
        checked.append(matrix.detach().cpu().double())
    s, covariance = checked
    if s.shape != covariance.shape:
        raise HelmscopeError(
            f"diffusion has shape {tuple(covariance.shape)}, but it must have that of stiffness, {tuple(s.shape)}"
        )
    if not bool((covariance - covariance.mT).abs().max() <= 1e-12 * covariance.abs().max()):
        raise HelmscopeError("diffusion is not symmetric, but a diffusion matrix must be")
    values, vectors = torch.linalg.eigh(covariance)
    if not (float(values[0]) >= -SINGULAR * float(values[-1]) and float(values[-1]) > 0):
        raise HelmscopeError(
            f"diffusion has the eigenvalues {float(values[0]):.3g} to {float(values[-1]):.3g}, but they must be >= 0, "
            "and not all 0"
        )
    return s, covariance, values, vectors
