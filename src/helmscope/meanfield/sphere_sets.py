"""Sets of the sphere that a process may reach."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.sphere import angle, retract
from helmscope.types import ConciseRepr, HelmscopeError, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

# The boundary of a set that is checked at the steps of a random walk only acts as if it were this many standard
# deviations of a step farther away: -zeta(1/2) / sqrt(2 pi) (Broadie, Glasserman and Kou, Mathematical Finance, 1997).
OVERSHOOT = 0.5825971579390107


class SphereSet(ConciseRepr, ABC):
    """Base class of closed sets of the sphere, described by a signed distance.

    >>> Cap(torch.tensor([0.0, 1.0]), min_cosine=0.5).contains(torch.eye(2)).tolist()
    [False, True]
    """

    @abstractmethod
    def signed_distance(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The geodesic distance to the boundary: positive inside, negative outside.

        >>> half = Cap(torch.tensor([0.0, 1.0]), min_cosine=0.0)
        >>> (half.signed_distance(torch.eye(2)) > 0.1).tolist()
        [False, True]
        """

    def contains(self, x: Float[Tensor, "*batch d"], *, margin: float = 0.0) -> Bool[Tensor, "*batch"]:
        """Which points are inside, or at most ``margin`` radians outside.

        >>> Cap(torch.tensor([0.0, 1.0]), min_cosine=0.5).contains(torch.eye(2), margin=0.6).tolist()
        [True, True]
        """
        return self.signed_distance(x) >= -margin


@dataclass(frozen=True, eq=False)
class Cap(SphereSet):
    """The cap {x: <x, center> >= min_cosine}, -1 < min_cosine < 1.

    Raises ``HelmscopeError`` unless ``center`` is a nonzero vector (d,), d >= 2, which is normalized.

    >>> Cap(torch.tensor([0.0, 2.0]), min_cosine=0.0).signed_distance(torch.tensor([1.0, 0.0])).abs().item() < 1e-6
    True
    """

    center: Float[Tensor, " d"]
    min_cosine: float

    def __post_init__(self) -> None:
        center = self.center
        if (
            not isinstance(center, torch.Tensor)
            or center.dtype not in (torch.float64, torch.float32)
            or center.ndim != 1
            or len(center) < 2
            or not bool(torch.isfinite(center).all() & center.any())
        ):
            raise HelmscopeError(
                f"center is {short_repr(center)}, but it must be a nonzero float tensor (d,) with d >= 2"
            )
        object.__setattr__(self, "center", retract(center.detach()))
        if not -1 < check_real("min_cosine", self.min_cosine) < 1:
            raise HelmscopeError(f"min_cosine is {self.min_cosine:g}, but it must be between -1 and 1")

    def signed_distance(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """The angle of the cap minus the angle from its center."""
        return math.acos(self.min_cosine) - angle(x, self.center.to(x))


def gap_between(a: Cap, b: Cap) -> float:
    """The angle between the boundaries of two caps, negative if they overlap.

    >>> gap_between(*(Cap(torch.tensor([0.0, sign], dtype=torch.float64), min_cosine=0.5) for sign in (1.0, -1.0)))
    1.0471...
    """
    centers = (cap.center.cpu().double() for cap in (a, b))
    return float(angle(*centers)) - math.acos(a.min_cosine) - math.acos(b.min_cosine)


def check_regions(a: object, b: object, x: Float[Tensor, "n d"]) -> None:
    """Raise ``HelmscopeError`` unless a and b are regions in the dimension of x that share none of its points.

    >>> north, south = (Cap(torch.tensor([0.0, sign]), min_cosine=0.5) for sign in (1.0, -1.0))
    >>> check_regions(north, south, torch.eye(2))
    """
    for name, region in (("a", a), ("b", b)):
        if not isinstance(region, SphereSet):
            raise HelmscopeError(
                f"{name} is {short_repr(region)}, but it must be a region such as Cap(center, min_cosine=0.8)"
            )
        if isinstance(region, Cap) and len(region.center) != x.shape[-1]:
            raise HelmscopeError(
                f"{name} has a center of dimension {len(region.center)}, but x has dimension {x.shape[-1]}"
            )
    assert isinstance(a, SphereSet)
    assert isinstance(b, SphereSet)
    if isinstance(a, Cap) and isinstance(b, Cap):
        gap = gap_between(a, b)
        if gap < 0:
            raise HelmscopeError(f"b overlaps with a by {-gap:.3g} radians, but the two regions must be disjoint")
    elif bool((a.contains(x) & b.contains(x)).any()):
        raise HelmscopeError("b has points in common with a, but the two regions must be disjoint")
