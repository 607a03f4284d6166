"""Ground distances between points. The cost of moving a unit of mass is a power of the distance, chosen by the problem:
W_p(mu, nu)^p = min over plans pi of sum_ij pi_ij dist(x_i, y_j)^p.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import check_points, full_precision
from helmscope.geometry.sphere import angle, check_tokens
from helmscope.types import ConciseRepr, HelmscopeError, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Cost(ConciseRepr, ABC):
    """Base class of ground distances.

    >>> Geodesic().on_sphere, Euclidean().on_sphere
    (True, False)
    """

    @property
    def on_sphere(self) -> bool:
        """Whether points must be unit vectors."""
        return True

    @abstractmethod
    def distance(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The distance of corresponding points; broadcasts, unchecked and differentiable.

        >>> Geodesic().distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(1.5708)
        """

    @full_precision
    def matrix(self, x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        """All distances between two clouds.

        >>> Chordal().matrix(torch.eye(2), torch.eye(2))
        tensor([[0.0000, 1.4142],
                [1.4142, 0.0000]])
        """
        return self.distance(x.unsqueeze(-2), y.unsqueeze(-3))

    def check(self, points: object, name: str) -> Float[Tensor, "*batch n d"]:
        """The points, if they are a valid cloud for this distance; raises ``HelmscopeError`` otherwise.

        >>> Euclidean().check(torch.zeros(2, 1), "x").shape
        torch.Size([2, 1])
        """
        if not self.on_sphere:
            return check_points(points, name)
        try:
            return check_tokens(points, name=name)
        except HelmscopeError as error:
            check_points(points, name)  # raises for anything but points of R^d
            raise HelmscopeError(f"{error}; for points of R^d pass cost=Euclidean()") from None


@dataclass(frozen=True)
class Euclidean(Cost):
    """Euclidean distance |x - y| between points of R^d.

    >>> Euclidean().distance(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]))
    tensor(5.)
    """

    @property
    def on_sphere(self) -> bool:
        """False: any points of R^d."""
        return False

    def distance(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """|x - y|."""
        length: Tensor = torch.linalg.vector_norm(x - y, dim=-1)
        return length


@dataclass(frozen=True)
class Chordal(Cost):
    """Chordal distance |x - y| between unit vectors: the length of the chord, in [0, 2].

    >>> Chordal().distance(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]))
    tensor(2.)
    """

    def distance(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """|x - y|."""
        length: Tensor = torch.linalg.vector_norm(x - y, dim=-1)
        return length


@dataclass(frozen=True)
class Geodesic(Cost):
    """The angle between unit vectors: the length of the shortest path on the sphere, in [0, pi].

    Antipodal points have distance pi and no unique geodesic: distances and plans are defined, paths are not.

    >>> Geodesic().distance(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]))
    tensor(3.1416)
    """

    def distance(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The angle in [0, pi]."""
        return angle(x, y)


GEODESIC = Geodesic()  # the default wherever a cost is an argument


def check_cost(cost: object) -> Cost:
    """The ground distance, if it is one; raises ``HelmscopeError`` otherwise.

    >>> check_cost(Geodesic)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: cost is <class ...>, but it must be Geodesic(), Chordal(), Euclidean() or ...
    """
    if not isinstance(cost, Cost):
        raise HelmscopeError(f"cost is {cost!r}, but it must be Geodesic(), Chordal(), Euclidean() or another Cost")
    return cost


def check_power(p: object) -> float:
    """The power p of W_p, if it is a finite number >= 1; raises ``HelmscopeError`` otherwise.

    >>> check_power(0.5)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: p is 0.5, but it must be a finite number >= 1
    """
    return check_real("p", p, at_least=1.0)


def power(distance: Float[Tensor, "*batch"], p: float) -> Float[Tensor, "*batch"]:
    """distance^p, p >= 1, with gradient 0 where the distance is 0.

    It does not use torch.pow, whose last bit depends on the position of an element in its tensor.

    >>> power(torch.tensor([0.0, 2.0]), 3.0)
    tensor([0., 8.])
    """
    if p == 1:
        return distance
    if p == 2:
        return distance * distance
    positive = distance > 0
    logarithm = torch.log(torch.where(positive, distance, torch.ones_like(distance)))
    return torch.where(positive, torch.exp(p * logarithm), torch.zeros_like(distance))


def root(value: Float[Tensor, "*batch"], p: float) -> Float[Tensor, "*batch"]:
    """value^(1/p), with gradient 0 at 0.

    >>> root(torch.tensor([0.0, 8.0]), 3.0)
    tensor([0., 2.])
    """
    if p == 1:
        return value
    positive = value > 0
    safe = torch.where(positive, value, torch.ones_like(value))
    result = safe.sqrt() if p == 2 else torch.exp(torch.log(safe) / p)
    return torch.where(positive, result, torch.zeros_like(value))
