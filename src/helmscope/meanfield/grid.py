"""Functions on the sphere S^(d-1) as sums of harmonics, and their values at quadrature points.

All functions are relative to the uniform probability measure m of the sphere: the basis Y_i is orthonormal,
int Y_i Y_j dm = delta_ij, the quadrature weights sum to 1, and the uniform density is the constant 1. (Densities with
respect to surface area would leave the range of floats in high dimension.) In such a basis -Lap_S is diagonal, with
eigenvalue k (k + d - 2) at degree k, and so is every kernel that depends on <x, y> only.

Vector fields are given by their components in an orthonormal frame of the tangent space at each point.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import exponential_coefficients, exponential_degree, harmonic_dimension
from helmscope.types import ConciseRepr, HelmscopeError, check_real

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

RESOLVED = 1e-8  # the largest share of e^(beta (s - 1)) that may lie beyond the degree of a grid


class Grid(ConciseRepr, ABC):
    """Base class of grids: quadrature points of S^(dim-1), and transforms between values there and harmonics.

    >>> from helmscope.meanfield import CircleGrid
    >>> grid = CircleGrid(degree=8)
    >>> grid.analyze(torch.ones(len(grid.points), dtype=torch.float64))[:2]
    tensor([1., 0.], dtype=torch.float64)
    """

    dim: int
    degree: int
    points: Float[Tensor, "m d"]  # unit vectors
    weights: Float[Tensor, " m"]  # of the quadrature; they sum to 1
    frame: Float[Tensor, "m c d"]  # orthonormal tangent vectors at each point
    degrees: Int[Tensor, " modes"]  # of the basis functions; the first is the constant 1

    @abstractmethod
    def synthesize(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m"]:
        """The values at the points of sum_i modes_i Y_i.

        >>> from helmscope.meanfield import ZonalGrid
        >>> grid = ZonalGrid(dim=3, degree=1)  # 1 and sqrt(3) s
        >>> torch.allclose(grid.synthesize(torch.eye(2).double())[1], 3**0.5 * grid.cosines)
        True
        """

    @abstractmethod
    def gradient(self, modes: Float[Tensor, "*batch modes"]) -> Float[Tensor, "*batch m c"]:
        """The components of the surface gradient of sum_i modes_i Y_i at the points.

        >>> from helmscope.meanfield import SphereGrid
        >>> SphereGrid(degree=2).gradient(torch.eye(9).double()).shape  # of each of the 9 basis functions
        torch.Size([9, 32, 2])
        """

    def value_and_gradient(
        self, modes: Float[Tensor, "*batch modes"]
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch m c"]]:
        """``synthesize`` and ``gradient`` of the same coefficients.

        >>> from helmscope.meanfield import CircleGrid
        >>> value, gradient = CircleGrid(degree=2).value_and_gradient(torch.eye(5).double()[0])  # of the constant 1
        >>> value[0].item(), gradient[0].abs().item()
        (1.0, 0.0)
        """
        return self.synthesize(modes), self.gradient(modes)

    @abstractmethod
    def analyze(self, values: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients int f Y_i dm of a function, from its values at the points: the inverse of ``synthesize``.

        >>> from helmscope.meanfield import CircleGrid
        >>> grid = CircleGrid(degree=1)
        >>> grid.analyze(grid.points[:, 1]).round(decimals=4) + 0.0  # sin t = sqrt(2) sin t / sqrt(2)
        tensor([0.0000, 0.0000, 0.7071], dtype=torch.float64)
        """

    @abstractmethod
    def divergence(self, components: Float[Tensor, "*batch m c"]) -> Float[Tensor, "*batch modes"]:
        """The coefficients of div_S F in weak form, -int <F, grad_S Y_i> dm. The first is 0: no mass is lost.

        >>> from helmscope.meanfield import ZonalGrid
        >>> grid = ZonalGrid(dim=4, degree=3)
        >>> grid.divergence(grid.gradient(torch.eye(4).double())).diagonal().round()  # -k (k + d - 2)
        tensor([  0.,  -3.,  -8., -15.], dtype=torch.float64)
        """

    def analyze_with_divergence(
        self, values: Float[Tensor, "*batch m"], components: Float[Tensor, "*batch m c"]
    ) -> Float[Tensor, "*batch modes"]:
        """The coefficients of f + div_S F: ``analyze`` of the one and ``divergence`` of the other.

        >>> from helmscope.meanfield import CircleGrid
        >>> grid = CircleGrid(degree=1)
        >>> sine = grid.points[:, 1]  # sin t + d/dt sin t
        >>> grid.analyze_with_divergence(sine, sine[:, None]).round(decimals=4) + 0.0
        tensor([0.0000, 0.7071, 0.7071], dtype=torch.float64)
        """
        return self.analyze(values) + self.divergence(components)

    @abstractmethod
    def evaluate(self, modes: Float[Tensor, "*batch modes"], x: Float[Tensor, "n d"]) -> Float[Tensor, "*batch n"]:
        """The values of sum_i modes_i Y_i at unit vectors x.

        >>> from helmscope.meanfield import CircleGrid
        >>> CircleGrid(degree=1).evaluate(torch.eye(3).double(), torch.tensor([[1.0, 0.0]]))  # 1, 2^.5 cos, 2^.5 sin
        tensor([[1.0000],
                [1.4142],
                [0.0000]], dtype=torch.float64)
        """

    @property
    def eigenvalues(self) -> Float[Tensor, " modes"]:
        """The eigenvalues k (k + d - 2) of -Lap_S.

        >>> from helmscope.meanfield import ZonalGrid
        >>> ZonalGrid(dim=3, degree=3).eigenvalues
        tensor([ 0.,  2.,  6., 12.], dtype=torch.float64)
        """
        k = self.degrees.double()
        return k * (k + self.dim - 2)

    @property
    def log_area(self) -> float:
        """log |S^(d-1)|, the entropy of the uniform distribution with respect to surface area.

        >>> from helmscope.meanfield import CircleGrid
        >>> CircleGrid(degree=1).log_area  # log 2 pi
        1.8378...
        """
        return math.log(2) + self.dim / 2 * math.log(math.pi) - math.lgamma(self.dim / 2)

    @full_precision
    def components(self, vectors: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch m c"]:
        """The components of the tangential part of vectors of R^d at the points.

        >>> from helmscope.meanfield import CircleGrid
        >>> grid = CircleGrid(degree=1)
        >>> grid.components(3 * grid.points).abs().max().item() < 1e-15  # normal vectors
        True
        """
        return torch.einsum("...md,mcd->...mc", vectors, self.frame)

    @full_precision
    def mean_of(self, values: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch"]:
        """int f dm, from the values at the points.

        >>> from helmscope.meanfield import CircleGrid
        >>> grid = CircleGrid(degree=1)
        >>> round(grid.mean_of(grid.points[:, 0] ** 2).item(), 12)  # of cos^2
        0.5
        """
        return values @ self.weights

    def check_kernel(self, beta: float, name: str) -> None:
        """Raise ``HelmscopeError`` if the degree of the grid is too small to resolve e^{beta <x, y>}; the sentence has
        the ``name`` of what is to be resolved and a degree that would do.

        >>> from helmscope.meanfield import CircleGrid
        >>> CircleGrid(degree=8).check_kernel(8.0, "a kernel with beta=8")
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: degree is 8, but a kernel with beta=8 needs a grid with degree=... or more
        """
        needed = exponential_degree(abs(beta), dim=self.dim, tol=RESOLVED)
        if needed > self.degree:
            raise HelmscopeError(f"degree is {self.degree}, but {name} needs a grid with degree={needed} or more")

    def exponential_multipliers(self, beta: float) -> Float[Tensor, " modes"]:
        """The factors by which convolution with the kernel e^{beta <x, y> - |beta|} multiplies the coefficients.

        For beta < 0 they alternate in sign. Raises ``HelmscopeError`` if the degree of the grid is too small to resolve
        the kernel, and names one that would do.

        >>> from helmscope.meanfield import CircleGrid
        >>> CircleGrid(degree=12).exponential_multipliers(1.0)[1].item()  # e^-1 I_1(1)
        0.2079...
        """
        beta = check_real("beta", beta)
        self.check_kernel(beta, f"the kernel e^(beta <x, y>) with beta={beta:g}")
        per_degree = exponential_coefficients(abs(beta), self.degree, dim=self.dim)
        per_degree /= per_degree.new_tensor([harmonic_dimension(k, dim=self.dim) for k in range(self.degree + 1)])
        if beta < 0:
            per_degree[1::2] *= -1
        return per_degree[self.degrees]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(degree={self.degree})"
