"""Entropy of a cloud from distances to nearest neighbors, after a projection to a few principal axes.

For N points in R^p, r_i the distance from point i to its k-th nearest neighbor and V_p = pi^(p/2) / Gamma(p/2 + 1),

    H = psi(N) - psi(k) + log V_p + (p / N) sum_i log r_i

in nats, psi the digamma function (L. F. Kozachenko and N. N. Leonenko, *Sample estimate of the entropy of a random
vector*, Problems of Information Transmission 23, 1987, 95-101). Its bias grows fast with p: at p = 191 and N = 8,192 it
reads a normal law 40 nats too high. So the cloud is first projected to its first p <= 8 principal axes, and the result
is the entropy of that projection, which says nothing about the other axes. Copies of a point have distance 0 and
entropy -infinity: all but one are removed before, and counted.

Intervals. The jackknife over groups of points (prompts) is exact for a fixed projection: without a group only those
distances change whose first k neighbors contain a point of it. But the entropy is no smooth function of the points: the
jackknife's correction of the bias adds more variance than it removes bias, and its variance is up to 2.5 times that of
H. So ``replicates`` are H + s l_j, with the jackknife's influences l_j = (n - 1) (mean of H_(-i) - H_(-j)) of the n
groups, and s from random halves A and B of them, in each of which H is computed from its own points alone,

    s^2 = sum (H_A - H_B)^2 / sum (mean of l over A - mean of l over B)^2,

1 for a mean over groups: halves are independent, and Var(H_A - H_B) = 4 Var(H) where Var(H) falls as 1 / N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.nearest import distinct_points
from helmscope.observe.observable import observable
from helmscope.observe.track import token_weights
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_integer, check_progress

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

DIMENSIONS, NEIGHBORS = 4, 4
MAX_DIMENSIONS = 8
COPY = 1e-6  # of the root mean squared distance to the mean: points that are closer are copies
SPARE = 28  # further neighbors that are kept for the jackknife and for halves
HALVES = 16  # random pairs of halves
BLOCK = 512  # rows of distances in memory


@observable
@shows_progress("entropies from neighbors")
def neighbor_entropy(
    x: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"] | None = None,
    *,
    principal_axes: int = DIMENSIONS,
    neighbors: int = NEIGHBORS,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """Kozachenko-Leonenko entropy of each cloud, projected to its first ``principal_axes`` principal axes, in nats,
    from the distances to the ``neighbors``-th nearest neighbor.

    Points of weight 0 do not count; the other weights must be equal. Copies of a point count once. Raises
    HelmscopeError for more than 8 dimensions (or than x has), for unequal weights and for too few distinct points.
    ``progress`` is called with the share of the clouds done.

    >>> x = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> abs(neighbor_entropy(x, principal_axes=2).item()) < 0.05  # uniform on the unit square: 0
    True
    """
    principal_axes, neighbors = (
        check_dimensions(principal_axes, x.shape[-1]),
        check_integer("neighbors", neighbors, at_least=1),
    )
    counts = token_weights(x, weights)
    clouds = finite_points(x, counts).reshape(-1, *x.shape[-2:])
    report, found = check_progress(progress), []
    for cloud, m in zip(clouds, counts.reshape(len(clouds), -1), strict=True):
        points = principal_projection(cloud[equal_weights(m)].double(), principal_axes)
        found.append(NeighborDistances.of(points[distinct(points)], neighbors).entropy)
        report(len(found) / len(clouds))
    return torch.stack(found).reshape(x.shape[:-2])


def check_dimensions(principal_axes: int, most: int) -> int:
    """The number of principal axes; raises HelmscopeError unless it is from 1 to 8, and at most that of the points.

    >>> check_dimensions(4, 192)
    4
    """
    principal_axes = check_integer("principal_axes", principal_axes, at_least=1)
    if principal_axes > MAX_DIMENSIONS:
        raise HelmscopeError(
            f"principal_axes is {principal_axes}, but nearest-neighbor entropy needs at most {MAX_DIMENSIONS}: its "
            "bias grows with the dimension"
        )
    if principal_axes > most:
        raise HelmscopeError(f"principal_axes is {principal_axes}, but the points have only {most} dimensions")
    return principal_axes


def finite_points(x: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n d"]:
    """The points x, if all that count are finite; raises HelmscopeError if not.

    >>> finite_points(torch.tensor([[1.0], [torch.nan]]), torch.tensor([1.0, 0.0])).shape
    torch.Size([2, 1])
    """
    if not bool((torch.isfinite(x).all(-1) | (weights == 0)).all()):
        raise HelmscopeError("x holds NaN or infinite entries, but every token that counts must be finite")
    return x


def equal_weights(weights: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Which points count; raises HelmscopeError unless the weights of those that do are equal.

    >>> equal_weights(torch.tensor([2.0, 0.0, 2.0]))
    tensor([ True, False,  True])
    """
    counted = weights > 0
    values = weights[counted]
    if len(values) and bool((values != values[0]).any()):
        raise HelmscopeError(
            f"weights are {float(values.min()):g} to {float(values.max()):g}, but nearest neighbors need equal ones, "
            "or 0"
        )
    return counted


@full_precision
def principal_projection(points: Float[Tensor, "n d"], principal_axes: int) -> Float[Tensor, "n p"]:
    """The coordinates of points along their first principal axes, about their mean.

    >>> principal_projection(torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0]]).double(), 1).abs().round(decimals=2)
    tensor([[3.],
            [3.],
            [0.]], dtype=torch.float64)
    """
    moved = points - points.mean(0)
    axes: Tensor = torch.linalg.eigh(moved.mT @ moved)[1][:, -principal_axes:].flip(-1)
    return moved @ axes


def distinct(points: Float[Tensor, "n p"]) -> Bool[Tensor, " n"]:
    """Which points are not copies of an earlier one: closer than 1e-6 of the root mean squared distance to the mean.

    >>> distinct(torch.tensor([[0.0], [1.0], [0.0]]))
    tensor([ True,  True, False])
    """
    spread = (points - points.mean(0)).square().sum(-1)
    return distinct_points(points, COPY * float((spread.sum() / max(1, len(points))).sqrt()))


@dataclass(frozen=True, eq=False)
class NeighborDistances:
    """The distances (n, k + 28) of each point to its nearest neighbors, ascending, and their indices.

    >>> NeighborDistances.of(torch.tensor([[0.0], [1.0], [3.0]]), 1).distances[:, 0]
    tensor([1., 1., 2.])
    """

    points: Float[Tensor, "n p"]
    distances: Float[Tensor, "n m"]
    indices: Int[Tensor, "n m"]
    neighbors: int

    @classmethod
    def of(cls, points: Float[Tensor, "n p"], neighbors: int) -> NeighborDistances:
        """The nearest neighbors of distinct points; raises HelmscopeError for too few of them.

        >>> NeighborDistances.of(torch.eye(3), 1).indices.shape
        torch.Size([3, 2])
        """
        if len(points) <= neighbors:
            raise HelmscopeError(
                f"x has {len(points)} distinct points, but the neighbor number {neighbors} needs at least "
                f"{neighbors + 1}"
            )
        kept = min(neighbors + SPARE, len(points) - 1)
        place = torch.arange(len(points), device=points.device)
        values, indices = [], []
        for i in range(0, len(points), BLOCK):
            rows = _distances(points[i : i + BLOCK], points)
            rows.masked_fill_(place == place[i : i + BLOCK].unsqueeze(-1), torch.inf)
            nearest = rows.topk(kept, largest=False)
            values.append(nearest.values)
            indices.append(nearest.indices)
        return cls(points, torch.cat(values), torch.cat(indices), neighbors)

    @property
    def entropy(self) -> Float[Tensor, ""]:
        """The estimate from all points.

        >>> NeighborDistances.of(torch.tensor([[0.0], [1.0], [3.0]]).double(), 1).entropy.round(decimals=4)
        tensor(2.4242, dtype=torch.float64)
        """
        logs = self.distances[:, self.neighbors - 1].log()
        return self._estimate(logs.sum(), torch.tensor(float(len(logs)), dtype=logs.dtype, device=logs.device))

    def _estimate(self, total: Tensor, n: Tensor) -> Tensor:
        p = self.points.shape[-1]
        volume = p / 2 * math.log(math.pi) - math.lgamma(p / 2 + 1)
        k = torch.tensor(float(self.neighbors), dtype=n.dtype, device=n.device)
        found: Tensor = torch.special.digamma(n) - torch.special.digamma(k) + volume + p * total / n
        return found

    def replicates(self, group: Int[Tensor, " n"], groups: int, *, halves: int = HALVES) -> Float[Tensor, " groups"]:
        """One replicate for each of ``groups`` groups of points, given the group of each point, from ``halves`` random
        pairs of halves, which are always the same; NaN for a group without points. Their mean is the estimate from all
        points, and their Student interval that of the module's docstring. The projection is not made again. Raises
        HelmscopeError where too few points are in a half, or left without a group.

        >>> points = torch.tensor([[0.0], [1.0], [3.0], [3.5], [7.0], [8.0]]).double()
        >>> found = NeighborDistances.of(points, 1)
        >>> values = found.replicates(torch.arange(6) % 3, 3)
        >>> torch.allclose(values.mean(), found.entropy)
        True
        """
        present, group = torch.unique(group, return_inverse=True)
        n = len(present)
        influence = self.without_groups(group, n)
        influence = (n - 1) * (influence.mean() - influence)
        source = np.random.default_rng(0)
        actual, linear = [], []
        for _ in range(halves):
            chosen = torch.zeros(n, dtype=torch.bool, device=group.device)
            chosen[torch.from_numpy(source.permutation(n)[: n // 2]).to(group.device)] = True
            actual.append(self._difference(chosen[group]))
            linear.append(influence[chosen].mean() - influence[~chosen].mean())
        wanted, given = (torch.stack(each).square().sum() for each in (actual, linear))
        scale = torch.where(given > 0, (wanted / torch.where(given > 0, given, 1.0)).sqrt(), 0.0)
        found = torch.full((groups,), torch.nan, dtype=influence.dtype, device=influence.device)
        found[present] = self.entropy + scale * influence
        return found

    def _difference(self, first: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
        """The estimate from the points of one half minus that from the others."""
        same = first[self.indices] == first.unsqueeze(-1)
        logs = self._kept_distance(torch.arange(len(first), device=first.device), same, first).log()
        parts = []
        for half in (first, ~first):
            if int(half.sum()) <= self.neighbors:
                raise HelmscopeError(
                    f"a half of the groups has {int(half.sum())} points, but neighbor number {self.neighbors} needs "
                    f"at least {self.neighbors + 1}"
                )
            parts.append(self._estimate(logs[half].sum(), half.sum().to(logs)))
        return parts[0] - parts[1]

    def without_groups(self, group: Int[Tensor, " n"], groups: int) -> Float[Tensor, " groups"]:
        """The estimates without each of ``groups`` groups of points in turn, given the group of each point. Raises
        HelmscopeError where too few points are left.

        >>> points = torch.tensor([[0.0], [1.0], [3.0], [3.5], [7.0]]).double()
        >>> left = NeighborDistances.of(points, 1).without_groups(torch.arange(5), 5)
        >>> torch.equal(left[0], NeighborDistances.of(points[1:], 1).entropy)
        True
        """
        k = self.neighbors
        logs = self.distances[:, k - 1].log()
        size = torch.zeros(groups, dtype=logs.dtype, device=logs.device).index_add(0, group, torch.ones_like(logs))
        left = len(logs) - size
        if bool((left <= k).any()):
            raise HelmscopeError(
                f"group {int((left <= k).nonzero()[0])} leaves {int(left.min())} points, but the neighbor number {k} "
                f"needs at least {k + 1}"
            )
        total = logs.sum() - torch.zeros_like(size).index_add(0, group, logs)
        of_neighbor = group[self.indices]
        for j in range(k):
            gone = of_neighbor[:, j]
            first = (of_neighbor[:, :j] != gone.unsqueeze(-1)).all(-1)  # each group once
            changed = (first & (gone != group)).nonzero()[:, 0]
            new = self._distance_without(changed, gone[changed], group)
            total.index_add_(0, gone[changed], new.log() - logs[changed])
        return self._estimate(total, left)

    def _distance_without(self, rows: Tensor, gone: Tensor, group: Tensor) -> Tensor:
        """The distance of some points to their k-th neighbor outside of a group, one for each point."""
        return self._kept_distance(rows, group[self.indices[rows]] != gone.unsqueeze(-1), group, gone)

    def _kept_distance(self, rows: Tensor, stays: Tensor, label: Tensor, gone: Tensor | None = None) -> Tensor:
        """The distance of some points to the k-th of their neighbors that stay: those with a label other than ``gone``,
        or, if that is None, with their own. ``stays`` says which of the neighbors that are kept these are; where fewer
        than k of them stay, all points are searched.
        """
        k = self.neighbors
        count = stays.cumsum(-1)
        place = (count == k).to(torch.int8).argmax(-1, keepdim=True)
        found = self.distances[rows].gather(-1, place).squeeze(-1)
        for few in torch.split((count[:, -1] < k).nonzero()[:, 0], BLOCK):
            row = rows[few]
            far = _distances(self.points[row], self.points)
            out = label == gone[few].unsqueeze(-1) if gone is not None else label != label[row].unsqueeze(-1)
            far = far.masked_fill(out, torch.inf)
            far[torch.arange(len(row), device=row.device), row] = torch.inf
            found[few] = far.kthvalue(k).values if len(row) else found[few]
        return found


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """All distances, from differences: inner products would lose the digits of small ones."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
