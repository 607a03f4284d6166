"""Entropies of clouds of tokens, and how the entropy of all tokens changes along depth [Helmholtz Transformer, no. 6].

With mean m, covariance C and second moment S = C + m m^T of a cloud in R^D:

    Gaussian entropy          (1/2) log det(2 pi e C), the largest of all laws with this covariance
    Fisher information        tr C^-1, that of the Gaussian score -C^-1 (x - m)
    surface Fisher inf.       -E Lap_S log g = tr C^-1 - D^2 - m^T C^-1 m, g the normal density of the same C and m: the
                              rate at which the Gaussian entropy grows if unit vectors diffuse on the sphere with nu = 1
    matrix entropy            -tr(R log R), R = S / tr S; centered: R = C / tr C
    nearest-neighbor entropy  after a projection to at most 8 principal axes (``neighbor_entropy``)

all in nats. On a sphere the Gaussian entropy is that of the covariance in R^D, a surrogate: the law itself has no
density there. It is 0.5 D log(2 pi e / D) for uniform unit vectors, where the surface Fisher information is 0 while
tr C^-1 = D^2: the flat one ignores that a sphere is compact.

How to read it. Gaussian entropy counts every direction equally, however little tokens differ in it; the matrix entropy
counts directions by the variance that they carry, and is at most log D.
How it fails. Fewer tokens than dimensions have a singular covariance. The bias of the Gaussian entropy is about
-D (D + 1) / (4 N) for N independent tokens; the jackknife over prompts removes its first order.
Cost of ``entropy_along_depth``. No forward pass; two eigendecompositions of D x D matrices for each prompt and depth,
and O(N^2) distances of N tokens for each depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import retract
from helmscope.observe.depth_steps import check_finite, sphere_text, token_weights_at, with_halves
from helmscope.observe.labels import label_attributes
from helmscope.observe.neighbor_entropy import (
    DIMENSIONS,
    NEIGHBORS,
    NeighborDistances,
    check_dimensions,
    distinct,
    equal_weights,
    principal_projection,
)
from helmscope.observe.observable import in_parts, observable
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.pooled import RANK_TOLERANCE, CloudMoments, PooledMoments
from helmscope.observe.track import AT_LEAST_0, token_weights, with_bounds, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_integer, check_progress, pluralized
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import System, Trajectory
    from helmscope.types.progress import ProgressOption

LABELS = {
    "gaussian_entropy": "Gaussian entropy of the cloud of all prompts (nats)",
    "fisher_information": "Fisher information tr C^-1 of the Gaussian score",
    "surface_fisher_information": "Fisher information of the Gaussian score on the sphere",
    "matrix_entropy": "matrix entropy of the second moment (nats)",
    "centered_matrix_entropy": "matrix entropy of the covariance (nats)",
    "neighbor_entropy": "nearest-neighbor entropy along the first principal axes (nats)",
    "copy_count": "tokens left out of the nearest-neighbor entropy as copies of another",
}


def moments_of(x: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"] | None = None) -> CloudMoments:
    """Mean, covariance and mass of each cloud, in float64; tokens of weight 0 do not count.

    >>> moments_of(torch.tensor([[1.0], [-1.0]])).covariance
    tensor([[1.]], dtype=torch.float64)
    """
    m = token_weights(x, weights).double()
    points = torch.where(m.unsqueeze(-1) > 0, x.double(), 0.0)
    share = (m / m.sum(-1, keepdim=True)).unsqueeze(-1)
    mean = (share * points).sum(-2)
    moved = points - mean.unsqueeze(-2)
    return CloudMoments(mean, _product(share * moved, moved), m.sum(-1))


@full_precision
def _product(x: Tensor, y: Tensor) -> Tensor:
    product: Tensor = x.mT @ y
    return product


@observable
@shows_progress("Gaussian entropy")
def gaussian_entropy(
    x: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"] | None = None,
    *,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """Gaussian entropy (1/2) log det(2 pi e C) of each cloud, C its covariance; minus infinity where C is singular, as
    for n <= d. ``progress`` is called with the share of the clouds done.

    >>> gaussian_entropy(torch.tensor([[1.0], [-1.0]])).item()  # (1/2) log(2 pi e)
    1.4189385332046727
    """
    return in_parts(lambda x, m: moments_of(x, m).gaussian_entropy, x, token_weights(x, weights), progress)


@observable
@shows_progress("Fisher information")
def gaussian_fisher_information(
    x: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"] | None = None,
    *,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """Gaussian Fisher information tr C^-1 of each cloud: E|score|^2 with the score -C^-1 (x - m) of the normal law of
    the same moments, in flat space; infinite where C is singular. ``progress`` is called with the share of the clouds
    done.

    >>> gaussian_fisher_information(torch.tensor([[2.0], [-2.0]])).item()
    0.25
    """
    m = token_weights(x, weights)
    return in_parts(lambda x, m: moments_of(x, m).gaussian_fisher_information, x, m, progress)


def surface_fisher_information(moments: CloudMoments) -> Float[Tensor, "*batch"]:
    """tr C^-1 - D^2 - m^T C^-1 m of unit vectors in R^D with mean m and covariance C: the growth of their Gaussian
    entropy over that of time, if they diffuse with nu = 1 on the sphere, where dC/dt = 2 (I - D C - m m^T). NaN where C
    is singular.

    >>> surface_fisher_information(CloudMoments(torch.zeros(3), torch.eye(3) / 3, torch.tensor(1.0))).item()
    0.0
    """
    c = moments.covariance
    d, values = c.shape[-1], moments.eigenvalues
    regular = (values > 0).all(-1)
    safe = torch.where(regular[..., None, None], c, torch.eye(d, dtype=c.dtype, device=c.device))
    pulled = lu.solve(safe, moments.mean.unsqueeze(-1)).squeeze(-1)
    found = (1 / values).sum(-1) - d**2 - (moments.mean * pulled).sum(-1)
    return torch.where(regular, found, torch.nan)


@observable
@shows_progress("matrix entropy")
def matrix_entropy(
    x: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"] | None = None,
    *,
    centered: bool = False,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """Matrix entropy -tr(R log R) of each cloud, in nats, R = S / tr S with S the second moment about 0 or, if
    ``centered``, about the mean (the covariance); from 0, all tokens along one line, to log d. NaN where all tokens are
    equal and ``centered``. ``progress`` is called with the share of the clouds done.

    >>> matrix_entropy(torch.eye(4)).exp().item()  # four directions
    4.0
    """
    m = token_weights(x, weights)
    return in_parts(lambda x, m: _matrix_entropy(moments_of(x, m), centered=centered), x, m, progress)


def _second_moment(moments: CloudMoments) -> Tensor:
    return moments.covariance + moments.mean.unsqueeze(-1) * moments.mean.unsqueeze(-2)


def _matrix_entropy(moments: CloudMoments, *, centered: bool) -> Tensor:
    values = moments.eigenvalues if centered else torch.linalg.eigvalsh(_second_moment(moments)).clamp(min=0)
    shares = values / values.sum(-1, keepdim=True)
    found: Tensor = -torch.special.xlogy(shares, shares).sum(-1)
    return found


@dataclass(frozen=True, eq=False)
class PooledClouds(ConciseRepr):
    """The cloud of all tokens of all prompts at every depth, in coordinates of the linear space that they all span.

    ``basis`` (d, D) is orthonormal; D is below d where norms remove the mean, or tokens are few. ``undefined`` are the
    numbers of the depths at which the covariance, or that without one prompt, has a rank below D: there the Gaussian
    entropy is not that of a density on this space.

    >>> from helmscope.types import Trajectory
    >>> states = torch.eye(3)[[0, 1, 0, 1]] * torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None]
    >>> PooledClouds.of(Trajectory(torch.zeros(1), states.expand(1, 4, 4, 3))).basis.shape
    torch.Size([3, 2])
    """

    path: Trajectory
    basis: Float[Tensor, "d D"]
    moments: tuple[PooledMoments, ...]
    undefined: tuple[int, ...]

    @classmethod
    @full_precision
    def of(cls, path: Trajectory) -> PooledClouds:
        """The pooled cloud of a trajectory of unit vectors; raises HelmscopeError for fewer than two prompts.

        >>> from helmscope.types import Trajectory
        >>> PooledClouds.of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 2, 2, 2))).undefined  # on a line
        (0,)
        """
        depths = range(len(path.states))
        clouds = ((each.flatten(0, 1) for each in _cloud(path, k)) for k in depths)
        second = torch.stack([_second_moment(moments_of(*cloud)) for cloud in clouds]).sum(0)
        values, vectors = torch.linalg.eigh(second)
        basis = vectors[:, values > RANK_TOLERANCE * values[-1]]
        moments = tuple(_along(basis, *_cloud(path, k)) for k in depths)
        undefined = tuple(
            k
            for k, each in enumerate(moments)
            if not bool((each.whole.eigenvalues > 0).all() & (each.without_one.eigenvalues > 0).all())
        )
        return cls(path, basis, moments, undefined)

    @property
    def rank(self) -> int:
        """The dimension D of the space that all tokens span."""
        return self.basis.shape[1]

    def ranks(self) -> list[int]:
        """The rank of the covariance at every depth.

        >>> from helmscope.types import Trajectory
        >>> PooledClouds.of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 2, 2, 2))).ranks()
        [1]
        """
        return [int((each.whole.eigenvalues > 0).sum()) for each in self.moments]

    def pseudo_values(self, k: int, statistic: Callable[[CloudMoments], Tensor]) -> Float[Tensor, " prompt"]:
        """The jackknife pseudo-values of a statistic at the depth number k; NaN where the rank changes.

        >>> from helmscope.types import Trajectory
        >>> common = PooledClouds.of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 2, 2, 2)))
        >>> common.pseudo_values(0, lambda moments: moments.gaussian_entropy)
        tensor([nan, nan], dtype=torch.float64)
        """
        if k in self.undefined:
            return torch.full_like(self.moments[k].mass, torch.nan)
        return self.moments[k].pseudo_values(statistic)

    @property
    def undefined_text(self) -> str:
        """Where and why the Gaussian entropy is undefined, in a sentence; "none" if nowhere.

        >>> from helmscope.types import Trajectory
        >>> PooledClouds.of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 2, 2, 2))).undefined_text[:14]
        'NaN at time 0:'
        """
        if not self.undefined:
            return "none"
        depths = ", ".join(f"{float(self.path.times[k]):g}" for k in self.undefined)
        return (
            f"NaN at {self.path.axis} {depths}: there the covariance of the tokens, or of those without one "
            f"{self.path.replicate}, has a rank below the {self.rank} dimensions that they span over all of it"
        )


def _cloud(path: Trajectory, k: int) -> tuple[Tensor, Tensor]:
    """The unit vectors at the depth number k, with their weights."""
    return retract(path.states[k].double()), token_weights_at(path, k)


@full_precision
@full_precision
def _along(basis: Tensor, x: Tensor, weights: Tensor) -> PooledMoments:
    """The moments of unit vectors in the coordinates of a basis: projecting the tokens is cheaper than the moments."""
    return PooledMoments.of(x @ basis, weights)


@shows_progress("entropy along depth")
def entropy_along_depth(
    system: Trajectory | System,
    *,
    include_first_token: bool = False,
    principal_axes: int | None = None,
    neighbors: int = NEIGHBORS,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Entropies and Fisher informations of the cloud of all tokens of all prompts, over (depth, prompt).

    The values are jackknife pseudo-values: their mean over prompts is the statistic of all tokens, corrected for its
    bias of order 1/N, and their interval is that of the jackknife (``PooledMoments``). ``gaussian_entropy``,
    ``fisher_information`` (tr C^-1), ``surface_fisher_information``, ``matrix_entropy`` (second moment about 0) and
    ``centered_matrix_entropy`` (covariance). ``neighbor_entropy`` is that of the ``principal_axes`` first principal
    axes of all tokens at that depth (4, or on a sphere of fewer dimensions as many as it has), from the distance to the
    ``neighbors``-th neighbor, with the projection fixed in the jackknife; ``copy_count`` are tokens that it leaves out.

    The Gaussian quantities are taken in the space that the tokens of all depths span, of dimension ``rank`` (an
    attribute; the rank of the covariance at each depth is a coordinate): NaN at depths where the covariance has a lower
    rank, or would have without one of the prompts, as the attribute ``undefined`` says. Unit vectors of a Recording are
    those of ``on_sphere``. The first token is left out unless ``include_first_token``. Nearest neighbors need equal
    weights, or 0: otherwise NaN. Raises HelmscopeError for fewer than two prompts, for states that are not finite, and
    for more than 8 principal axes.

    >>> from helmscope import record
    >>> measured = entropy_along_depth(record("A", ["Once upon a time there was a cat", "The dog ran home to eat"]))
    >>> measured.matrix_entropy.dims, measured.attrs["rank"], bool(measured.gaussian_entropy.isnull().all())
    (('depth', 'prompt'), 191, True)
    """
    path = sphere_and_ids(system, None)[0]
    path = check_finite(path if include_first_token else without_first_token(path))
    d = path.states.shape[-1]
    principal_axes = max(1, min(DIMENSIONS, d - 1)) if principal_axes is None else check_dimensions(principal_axes, d)
    neighbors, report = check_integer("neighbors", neighbors, at_least=1), check_progress(progress)
    common, columns = PooledClouds.of(path), []
    for k in range(len(path.states)):
        columns.append(_at_depth(common, k) | _by_neighbors(path, k, principal_axes, neighbors))
        report((k + 1) / len(path.states))
    values = {name: torch.stack([column[name] for column in columns]) for name in LABELS}
    measurement = with_bounds(with_replicates(values, path), {"copy_count": AT_LEAST_0})
    for name, text in LABELS.items():
        measurement[name].attrs |= label_attributes(text)
    return with_halves(measurement.assign_coords(rank=(path.axis, common.ranks())), system).assign_attrs(
        sphere=sphere_text(system),
        dimension=path.states.shape[-1],
        rank=common.rank,
        undefined=common.undefined_text,
        replicates=f"jackknife pseudo-values, one per {path.replicate} left out",
        principal_axes=principal_axes,
        neighbors=neighbors,
        include_first_token=int(include_first_token),
    )


def _at_depth(common: PooledClouds, k: int) -> dict[str, Tensor]:
    """The pseudo-values of the statistics of moments at the depth number k."""
    moments = common.moments[k]
    return {
        "gaussian_entropy": common.pseudo_values(k, lambda each: each.gaussian_entropy),
        "fisher_information": common.pseudo_values(k, lambda each: each.gaussian_fisher_information),
        "surface_fisher_information": common.pseudo_values(k, surface_fisher_information),
        "matrix_entropy": moments.pseudo_values(lambda each: _matrix_entropy(each, centered=False)),
        "centered_matrix_entropy": moments.pseudo_values(lambda each: _matrix_entropy(each, centered=True)),
    }


def _by_neighbors(path: Trajectory, k: int, principal_axes: int, neighbors: int) -> dict[str, Tensor]:
    """The pseudo-values of the nearest-neighbor entropy at the depth number k, NaN for too few tokens and for
    weights that differ.
    """
    x, weights = _cloud(path, k)
    prompts, counted = len(x), weights.flatten() > 0
    group = torch.arange(prompts, device=x.device).repeat_interleave(x.shape[1])[counted]
    points = principal_projection(x.flatten(0, 1)[counted], principal_axes)
    kept = distinct(points)
    copies = torch.zeros(prompts, dtype=points.dtype, device=x.device).index_add(0, group, (~kept).to(points))
    try:
        equal_weights(weights.flatten())
        found = NeighborDistances.of(points[kept], neighbors).replicates(group[kept], prompts)
    except HelmscopeError:  # too few distinct tokens, or masses that differ
        found = torch.full_like(copies, torch.nan)
    return {"neighbor_entropy": found, "copy_count": copies}


def entropy_unsupported(system: System) -> str | None:
    """Why a system has no entropy of all its prompts, in one sentence; None if it has one.

    >>> from helmscope import record
    >>> entropy_unsupported(record("A", ["Once upon a time"]))
    'system has 1 prompt, but entropy_along_depth needs at least 2: it is that of all their tokens'
    """
    count = system.trajectory.states.shape[1]
    if count < 2:
        what = pluralized(count, system.replicate)
        return f"system has {what}, but entropy_along_depth needs at least 2: it is that of all their tokens"
    counted = without_first_token(system.trajectory).weights
    assert counted is not None
    empty = (counted > 0).sum(-1).amin(0) == 0
    if bool(empty.any()):
        number = int(empty.nonzero()[0])
        return (
            f"{system.replicate} {number} has no token that counts besides the first, but entropy_along_depth needs one"
        )
    return None
