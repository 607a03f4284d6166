"""Brenier's potential of a map that is known at finitely many points.

A map x_i -> y_i of n points of equal mass is an optimal transport plan for the squared Euclidean distance exactly if
there is a convex function phi with y_i in its subdifferential at x_i (Brenier; Rockafellar for finitely many points):

    phi_j - phi_i >= w_ij = <y_i, x_j - x_i>   for all i and j.

Such a phi exists if no cycle of the graph with the weights w has a positive sum (cyclical monotonicity). With L_ij the
largest sum of a path from i to j, every potential that is 0 at point 0 satisfies L_0j <= phi_j <= -L_j0, both ends are
potentials, and so is their mean, since the inequalities are convex.

How to read it. The width of that bracket says how far the data determine the potential: points that are far apart
against their displacements leave it wide, and then optimality says little about the map.
How it fails. NaN where the map is not optimal; ``excess_cost`` says by how much. Cost: O(n^3) per map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment

from helmscope.geometry.arithmetic import full_precision
from helmscope.types import HelmscopeError
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

ROUNDING = 1e-12  # of the mean squared length of x and y: a cost that is lower by less is rounding


@dataclass(frozen=True, eq=False)
class BrenierPotential(ConciseRepr):
    """The least and the greatest potential that is 0 at the first point, (*batch, n), NaN where the map is not optimal;
    and ``excess_cost``, (*batch,), the mean squared displacement minus that of the optimal assignment: 0 where the map
    is optimal.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]]).double()
    >>> potential = brenier_potential(x, 2 * x)  # of phi = x^2
    >>> potential.lower.tolist(), potential.upper.tolist()
    ([0.0, 0.0, 4.0], [0.0, 2.0, 14.0])
    """

    lower: Float[Tensor, "*batch n"]
    upper: Float[Tensor, "*batch n"]
    excess_cost: Float[Tensor, "*batch"]

    @property
    def middle(self) -> Float[Tensor, "*batch n"]:
        """The mean of the two, a potential itself.

        >>> x = torch.tensor([[0.0], [1.0], [3.0]]).double()
        >>> brenier_potential(x, 2 * x).middle.tolist()
        [0.0, 1.0, 9.0]
        """
        return (self.lower + self.upper) / 2

    @property
    def indeterminacy(self) -> Float[Tensor, "*batch"]:
        """The mean width of the bracket over the range of the middle potential: near 0, the data determine it.

        >>> x = torch.linspace(-1, 1, 101).double()[:, None]
        >>> round(float(brenier_potential(x, x).indeterminacy), 3)  # of phi = x^2 / 2
        0.04
        """
        width = (self.upper - self.lower).mean(-1)
        return width / (self.middle.amax(-1) - self.middle.amin(-1))


@full_precision
def brenier_potential(x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch n d"]) -> BrenierPotential:
    """The convex potentials phi with y_i in the subdifferential of phi at x_i, or how far the map is from optimal.

    The optimal assignment says whether there are any; the largest path sums are found by the algorithm of Floyd and
    Warshall, in float64. Raises HelmscopeError for points of
    different shapes, fewer than two points, and coordinates that are not finite.

    >>> swapped = brenier_potential(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [0.0]]))
    >>> swapped.excess_cost.item(), swapped.lower.tolist()
    (1.0, [nan, nan])
    """
    if x.shape != y.shape or x.ndim < 2 or x.shape[-2] < 2:
        raise HelmscopeError(
            f"y has the shape {tuple(y.shape)}, but it must be that of x, (*batch, n >= 2, d), here {tuple(x.shape)}"
        )
    for name, points in (("x", x), ("y", y)):
        if not bool(points.isfinite().all()):
            raise HelmscopeError(f"{name} has coordinates that are not finite, but they must be numbers")
    x, y = x.double(), y.double()
    products = y @ x.mT
    own = products.diagonal(dim1=-2, dim2=-1)
    best = torch.stack([_largest_sum(each) for each in products.reshape(-1, *products.shape[-2:])])
    saved = 2 * (best.reshape(own.shape[:-1]).to(own) - own.sum(-1)) / x.shape[-2]
    suboptimal = saved > ROUNDING * (x.square() + y.square()).sum(-1).mean(-1)
    longest = products - own.unsqueeze(-1)
    for k in range(x.shape[-2]):
        longest = torch.maximum(longest, longest[..., :, k : k + 1] + longest[..., k : k + 1, :])
    lower, upper = longest[..., 0, :], 0.0 - longest[..., :, 0]
    lower, upper = (torch.where(suboptimal[..., None], torch.nan, each) for each in (lower, upper))
    return BrenierPotential(lower, upper, torch.where(suboptimal, saved, 0.0))


def _largest_sum(products: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """The largest sum of entries over all assignments of rows to columns."""
    rows, columns = linear_sum_assignment(products.cpu().numpy(), maximize=True)
    return products[rows, columns].sum()
