"""Critical points of a potential U on the sphere with their Morse index.

The energy is V = -U, so the index of a critical point, the number of directions in which V descends (negative
eigenvalues of Hess_S V), is 0 for a basin (a maximum of U), 1 for a saddle that joins basins, and d - 1 for a minimum
of U. If no critical point is degenerate, Morse's theorem gives a check of completeness,

    sum over critical points of (-1)^index = chi(S^(d-1)) = 2 for odd d, 0 for even d.

It is necessary, not sufficient: missing points whose signs cancel are not noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.hessian import tangent_hessian
from helmscope.geometry.potential import Potential, as_potential
from helmscope.geometry.sphere import angle, check_tokens, exp, retract, tangent_basis
from helmscope.geometry.zeros import find_zeros
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_progress,
    check_real,
    one_line_repr,
    pluralized,
    sub_progress,
)
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

__all__ = ["CriticalPoints", "find_critical_points"]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the gradient, relative to the size of U's derivatives
FOLLOWING_STEPS, FOLLOWING_LENGTH = 60, 0.2
DEGENERATE = {torch.float64: 1e-6, torch.float32: 1e-3}  # an eigenvalue below this share of the largest counts as 0


@dataclass(frozen=True, eq=False, repr=False)
class CriticalPoints:
    """The k distinct critical points found from ``starts`` starts, by index and then by decreasing U.

    ``values`` are U; ``curvatures`` are the eigenvalues of Hess_S V, ascending; ``gradient_norms`` are |grad_S U|;
    ``hits`` counts the starts that ended at each point; ``stalled`` counts those that ended at none.

    >>> quadratic = lambda x: (x.square() * torch.tensor([1.0, 2.0, 4.0], dtype=x.dtype)).sum(-1) / 2
    >>> starts = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2, 0.1], [0.1, 1.0, 0.2], [0.1, -0.2, 1.0]]))
    >>> found = find_critical_points(quadratic, starts.double())
    >>> found
    <CriticalPoints: 3 critical points from 3 starts: sum of (-1)^index is 1, but ... is 2: use more starts>
    >>> found.index.tolist(), found.values.tolist(), found.basins.tolist(), found.saddles.tolist()
    ([0, 1, 2], [2.0, 1.0, 0.5], [0], [1])
    """

    points: Float[Tensor, "k d"]
    values: Float[Tensor, " k"]
    curvatures: Float[Tensor, "k d_minus_1"]
    gradient_norms: Float[Tensor, " k"]
    hits: Int[Tensor, " k"]
    starts: int
    stalled: int
    scale: float

    @property
    def index(self) -> Int[Tensor, " k"]:
        """The Morse index of each point: the number of directions in which V descends."""
        return (self.curvatures < -self._threshold).sum(-1)

    @property
    def degenerate(self) -> Bool[Tensor, " k"]:
        """Whether Hess_S V has an eigenvalue 0 up to rounding: such a point has no Morse index."""
        return (self.curvatures.abs() <= self._threshold).any(-1)

    @property
    def basins(self) -> Int[Tensor, " basins"]:
        """Numbers of the nondegenerate points of index 0: minima of V, maxima of U."""
        return ((self.index == 0) & ~self.degenerate).nonzero()[:, 0]

    @property
    def saddles(self) -> Int[Tensor, " saddles"]:
        """Numbers of the nondegenerate points of index 1."""
        return ((self.index == 1) & ~self.degenerate).nonzero()[:, 0]

    @property
    def euler_sum(self) -> int | None:
        """The sum of (-1)^index; None if a point is degenerate or none was found."""
        if not len(self.points) or bool(self.degenerate.any()):
            return None
        return int((1 - 2 * (self.index % 2)).sum())

    @property
    def euler_characteristic(self) -> int:
        """chi(S^(d-1)), which ``euler_sum`` must equal if all critical points were found."""
        return 2 if self.points.shape[-1] % 2 else 0

    @property
    def consistent(self) -> bool:
        """Whether the sum of (-1)^index is the Euler characteristic, which a complete list requires."""
        return self.euler_sum == self.euler_characteristic

    @property
    def outcome(self) -> str:
        """How the search ended, in one sentence, with a remedy where the list is known to be incomplete."""
        found = f"{pluralized(len(self.points), 'critical point')} from {pluralized(self.starts, 'start')}"
        found += f", {self.stalled} of which stalled" if self.stalled else ""
        sphere = f"chi(S^{self.points.shape[-1] - 1})"
        if not len(self.points):
            return f"{found}: use more starts"
        if self.euler_sum is None:
            return f"{found}: {int(self.degenerate.sum())} degenerate, so the sum of (-1)^index is not defined"
        if not self.consistent:
            return (
                f"{found}: sum of (-1)^index is {self.euler_sum}, but {sphere} is {self.euler_characteristic}: "
                "use more starts"
            )
        return f"{found}: sum of (-1)^index is {self.euler_sum} = {sphere}"

    @property
    def _threshold(self) -> float:
        return DEGENERATE[self.points.dtype] * self.scale

    def __repr__(self) -> str:
        return one_line_repr(f"CriticalPoints: {self.outcome}")


@full_precision
@shows_progress("searching critical points")
def find_critical_points(
    potential: Potential | Callable[[Tensor], Tensor],
    starts: Float[Tensor, "n d"],
    *,
    separation: float = 1e-3,
    max_iterations: int = 200,
    progress: ProgressOption = None,
) -> CriticalPoints:
    """Critical points grad_S U = 0 near many starts, such as ``Uniform(n=256, dim=3).sample(seed=0)``.

    From each start the Levenberg-Marquardt method minimizes |grad_S U|, so that saddles are found like maxima. Starts
    that end at a minimum of |grad_S U| that is not 0 are first moved towards points of index 0, 1, 2, ..., and tried
    again; those that still find nothing are counted in ``stalled``. A point counts if |grad_S U| is at most 1e-12 (1e-5
    in float32) of the size of U's derivatives, and points within ``separation`` radians of each other count as one. A
    degenerate critical point is reached slowly and located to fewer digits; a whole curve of them gives many points,
    all flagged. Where U is constant every start is one. Each iteration takes the (d - 1) x (d - 1) Hessian of each
    start. Raises ``HelmscopeError`` unless starts are unit vectors.

    >>> starts = torch.tensor([[0.6, 0.0, 0.8], [0.8, 0.0, -0.6]], dtype=torch.float64)
    >>> find_critical_points(lambda x: x[..., 2], starts).outcome
    '2 critical points from 2 starts: sum of (-1)^index is 2 = chi(S^2)'
    """
    u = as_potential(potential)
    check_tokens(starts, name="starts")
    if starts.ndim != 2:
        raise HelmscopeError(f"starts has shape {tuple(starts.shape)}, but it must be (n, d)")
    separation = check_real("separation", separation, above=0)
    report = check_progress(progress)
    search = functools.partial(
        find_zeros,
        lambda x: _linearize(u, x),
        tol=TOLERANCE[starts.dtype],
        max_iterations=check_integer("max_iterations", max_iterations, at_least=1),
    )
    zeros = search(starts.detach()[:, None], progress=sub_progress(report, 0.0, 0.5))
    points, residual = zeros.states[zeros.converged, 0], zeros.residual[zeros.converged]
    if not bool(zeros.converged.all()):
        led = _follow_eigenvectors(u, starts.detach()[~zeros.converged])
        again = search(led[:, None], progress=sub_progress(report, 0.5, 1.0), scale=zeros.scale)
        points = torch.cat([points, again.states[again.converged, 0]])
        residual = torch.cat([residual, again.residual[again.converged]])
    report(1.0)
    kept, hits = _distinct(points, residual, separation)
    points, residual = points[kept], residual[kept]
    values = u.potential(points).detach()
    curvatures = torch.linalg.eigvalsh(-tangent_hessian(u, points)).detach() if len(points) else points[:, 1:]
    stalled = len(starts) - int(hits.sum())
    unsorted = CriticalPoints(points, values, curvatures, residual, hits, len(starts), stalled, zeros.scale)
    order = sorted(range(len(points)), key=lambda k: (int(unsorted.index[k]), -float(values[k])))
    return replace(
        unsorted,
        points=points[order],
        values=values[order],
        curvatures=curvatures[order],
        gradient_norms=residual[order],
        hits=hits[order],
    )


@full_precision
def _linearize(u: Potential, x: Float[Tensor, "m 1 d"]) -> tuple[Tensor, Tensor]:
    """grad_S U and Hess_S U in tangent coordinates."""
    points = x[:, 0]
    gradient = (tangent_basis(points).mT @ u.gradient(points)[..., None])[..., 0]
    return gradient.detach(), tangent_hessian(u, points).detach()


@full_precision
def _follow_eigenvectors(u: Potential, x: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """Move each start towards a critical point of index k, k = 0, 1, ..., d - 1, 0, ... for one start after another:
    Newton steps that descend U along the k eigenvectors with the largest eigenvalues, and ascend it along the others.

    In high dimension |grad_S U| has many minima that are not 0, to which the other search is attracted. A start stays
    where it is if a step would lead it to a derivative that is not finite.
    """
    size = x.shape[-1] - 1
    index = torch.arange(len(x), device=x.device) % (size + 1)
    ascends = torch.arange(size, device=x.device) < (size - index)[:, None]
    gradient, hessian = _linearize(u, x[:, None])
    for _ in range(FOLLOWING_STEPS):
        values, vectors = torch.linalg.eigh(hessian)
        along = (vectors.mT @ gradient[..., None])[..., 0]
        divisor = values.abs() + along.abs() / FOLLOWING_LENGTH  # so that no component of a step is longer than that
        step = along / divisor.clamp(min=torch.finfo(x.dtype).tiny)
        tangent = (tangent_basis(x) @ vectors @ torch.where(ascends, step, -step)[..., None])[..., 0]
        length = torch.linalg.vector_norm(tangent, dim=-1, keepdim=True)
        trial = retract(exp(x, tangent * (FOLLOWING_LENGTH / length.clamp(min=FOLLOWING_LENGTH))))
        trial_gradient, trial_hessian = _linearize(u, trial[:, None])
        finite = torch.isfinite(trial_gradient).all(-1) & torch.isfinite(trial_hessian).all(-1).all(-1)
        x = torch.where(finite[:, None], trial, x)
        gradient = torch.where(finite[:, None], trial_gradient, gradient)
        hessian = torch.where(finite[:, None, None], trial_hessian, hessian)
    return x


def _distinct(
    points: Float[Tensor, "n d"], residual: Float[Tensor, " n"], separation: float
) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"]]:
    """Numbers of the distinct points, the most accurate of each group, and the size of each group."""
    remaining = residual.argsort()
    kept, hits = [], []
    while len(remaining):
        near = angle(points[remaining[0]], points[remaining]) <= separation
        near[0] = True
        kept.append(remaining[0])
        hits.append(near.sum())
        remaining = remaining[~near]
    if not kept:
        empty = torch.zeros(0, dtype=torch.int64, device=points.device)
        return empty, empty
    return torch.stack(kept), torch.stack(hits)
