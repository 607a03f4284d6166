"""Nearest neighbors of many points in many dimensions: exact, block by block, never an N x N matrix.

The search compares |y|^2 - 2 <x, y> for a block of points x and all points y, by one product of matrices in float32.
The k + SPARE best candidates of each point get their distances again, from differences in float64, so that small ones
keep their digits. The other points are at least as far as the next value of the search, less its rounding error; a
point whose k-th distance exceeds that bound is searched again in float64, and if it still does, compared with all
points by differences. So the result does not depend on the search.

The smallest values of a row are found by groups of columns: the k smallest lie in the k groups with the smallest
minima, so that a single pass over the block suffices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.types import HelmscopeError, check_integer, check_progress
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

SPARE = 6  # candidates beyond the k wanted ones
GROUP = 64  # columns that are compared by their minimum first
NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 31}  # of a block of products in memory


@dataclass(frozen=True, eq=False)
class NearestNeighbors(ConciseRepr):
    """Distances (n, k), in float64 and ascending, of each point to its k nearest other points, and their indices.

    >>> NearestNeighbors.of(torch.tensor([[0.0], [1.0], [3.0]]), 2).distances
    tensor([[1., 3.],
            [1., 2.],
            [2., 3.]], dtype=torch.float64)
    """

    distances: Float[Tensor, "n k"]
    indices: Int[Tensor, "n k"]

    @classmethod
    @full_precision
    def of(cls, points: Float[Tensor, "n d"], k: int, progress: ProgressOption = None) -> NearestNeighbors:
        """The k nearest neighbors of each point among the others. Raises HelmscopeError unless there are more than k
        points, all finite. ``progress`` is called with the share of the points searched.

        >>> NearestNeighbors.of(torch.eye(3), 1).distances.flatten().round(decimals=4)
        tensor([1.4142, 1.4142, 1.4142], dtype=torch.float64)
        """
        k = check_integer("k", k, at_least=1)
        if points.ndim != 2 or len(points) <= k:
            raise HelmscopeError(
                f"points have shape {tuple(points.shape)}, but {k} nearest neighbors need at least {k + 1} points, "
                "(n, d)"
            )
        if not bool(points.isfinite().all()):
            raise HelmscopeError("points hold a number that is not finite, but all must be finite")
        report, unsure = check_progress(progress), torch.arange(len(points), device=points.device)
        distances = torch.empty(len(points), k, dtype=torch.float64, device=points.device)
        indices = torch.empty(len(points), k, dtype=torch.long, device=points.device)
        searched = 0
        for dtype in _dtypes():
            search, left = _Search.of(points, dtype), []
            for rows in torch.split(unsure, search.rows_at_once):
                candidates, bound = search.candidates(rows, min(k + SPARE, len(points) - 1))
                found = _distances(points[rows], candidates, points)
                order = found.argsort(stable=True)[:, :k]
                distances[rows], indices[rows] = found.gather(-1, order), candidates.gather(-1, order)
                left.append(rows[distances[rows, -1].square() > bound])
                searched += len(rows)
                report(min(1.0, searched / len(points)))
            unsure = torch.cat(left)
            if not len(unsure):
                break
        for i in unsure.tolist():
            others = torch.arange(len(points), device=points.device)
            others = others[others != i]
            all_distances = _distances(points[i : i + 1], others[None], points)[0]
            nearest = all_distances.argsort(stable=True)[:k]
            distances[i], indices[i] = all_distances[nearest], others[nearest]
        return cls(distances, indices)


@dataclass(frozen=True, eq=False)
class _Search:
    """Points about their mean, of length at most 1: as rows -2 x, 1 and columns y, (1 - 2 e) |y|^2, whose products
    |y|^2 - 2 <x, y> are lowered by more than their rounding error e (|x|^2 + 2 |y|^2)."""

    rows: Float[Tensor, "n c"]
    columns: Float[Tensor, "m c"]
    squares: Float[Tensor, " n"]
    scale: Float[Tensor, ""]
    error: float

    @classmethod
    def of(cls, points: Float[Tensor, "n d"], dtype: torch.dtype) -> _Search:
        moved = points.double() - points.double().mean(0)
        scale = torch.linalg.vector_norm(moved, dim=-1).max()
        x = (moved / torch.where(scale > 0, scale, 1.0)).to(dtype)
        squares, error = x.double().square().sum(-1), (x.shape[-1] + 4) * torch.finfo(dtype).eps
        lowered = ((1 - 2 * error) * squares).to(dtype).unsqueeze(-1)
        columns = torch.cat([x, lowered], -1)
        empty = columns.new_zeros(-len(x) % min(GROUP, len(x)), columns.shape[-1])
        empty[:, -1] = torch.inf
        rows = torch.cat([-2 * x, torch.ones_like(lowered)], -1)
        return cls(rows, torch.cat([columns, empty]), squares, scale, error)

    @property
    def rows_at_once(self) -> int:
        return max(1, NUMBERS[self.rows.device.type] // len(self.columns))

    @full_precision
    def candidates(
        self, block: Int[Tensor, " rows"], count: int
    ) -> tuple[Int[Tensor, "rows count"], Float[Tensor, " rows"]]:
        """The indices of the ``count`` smallest values of some rows, and a lower bound of the squared distances to all
        other points, infinite if there are none."""
        values = self.rows[block] @ self.columns.mT
        values[torch.arange(len(values), device=values.device), block] = torch.inf
        groups = values.shape[1] // min(GROUP, len(self.rows))
        minima = values.view(len(values), -1, groups).amin(1)
        best = minima.topk(min(count + 1, groups), largest=False).indices
        members = torch.arange(0, values.shape[1], groups, device=values.device)
        indices = (members[:, None] + best[:, None, :]).flatten(1)
        smallest, order = values.gather(1, indices).topk(min(count + 1, indices.shape[1]), largest=False)
        found = indices.gather(1, order[:, :count])
        squares = self.squares[block]
        lower = smallest[:, count].double() + (1 - self.error) * squares
        return found, lower * self.scale.double().square()


def distinct_points(points: Float[Tensor, "n d"], tol: float = 0.0) -> Bool[Tensor, " n"]:
    """Which points are farther than ``tol`` from all earlier ones of these: one of several equal points.

    >>> distinct_points(torch.tensor([[0.0], [1.0], [0.0]]))
    tensor([ True,  True, False])
    """
    kept = torch.ones(len(points), dtype=torch.bool, device=points.device)
    if len(points) < 2:
        return kept
    close = (NearestNeighbors.of(points, 1).distances[:, 0] <= tol).nonzero()[:, 0]
    # only points with a close one need to be compared
    group = points[close].double()
    for i in range(1, len(close)):
        earlier = group[:i][kept[close[:i]]]
        kept[close[i]] = bool((torch.linalg.vector_norm(earlier - group[i], dim=-1) > tol).all())
    return kept


def _dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes of the searches, the next one for the points that the one before leaves unsure. Other settings than
    "highest" let products of float32 matrices round to fewer digits.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    return (torch.float32, torch.float64) if exact else (torch.float64,)


def _distances(
    points: Float[Tensor, "n d"], indices: Int[Tensor, "n m"], others: Float[Tensor, "p d"]
) -> Float[Tensor, "n m"]:
    """The distances from points to others with the given indices, from differences."""
    distances = torch.empty(indices.shape, dtype=torch.float64, device=points.device)
    step = max(1, NUMBERS[points.device.type] // (indices.shape[1] * points.shape[1]))
    for start in range(0, len(points), step):
        rows = slice(start, start + step)
        differences = others[indices[rows]].double() - points[rows].double().unsqueeze(1)
        distances[rows] = torch.linalg.vector_norm(differences, dim=-1)
    return distances
