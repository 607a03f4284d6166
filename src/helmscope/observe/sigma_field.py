"""The field Sigma^-1 b near one token: its Jacobian, by which a drift with the mobility Sigma is recognized.

At a direction x on the sphere, with T the projector to its tangent space, let keys j of all heads have weights P_j and
deviations d_j = W_O (v_j - m) of their values from the mean of their head, and let R_j = D_x P_j be the derivatives of
the weights by the query at fixed keys and values. Then (the derivative of m drops out, since sum_j P_j d_j = 0)

    Sigma = (1/2) sum_j P_j d_j d_j^T,    D Sigma[v] z = (1/2) sum_j d_j <d_j, z> <R_j, v> =: M_z v,
    D (T Sigma T)[v] z = T M_z v - <x, Sigma z> v - T Sigma x <z, v>                              for tangent z and v,
    D (T b)[v] = T Db v - <x, b> v,

up to multiples of x. With S = T Sigma T, its pseudo-inverse S+ (eigenvalues up to a tolerance of the largest count as
0) and n = T b - S S+ T b, the part of the drift outside the range of S, the Jacobian of S+ b on that range is

    J[v] = S+ D(T b)[v] - S+ DS[v] S+ b + S+ S+ DS[v] n.

b = Sigma grad V near x if and only if n = 0 and J is symmetric [Helmholtz Transformer, no. 7]. J is computed in the
coordinates of the eigenvectors of S, in which T is the identity, from the coordinates of d_j and R_j: one product of
(r, k) and (k, r) for k keys and rank r, and another one where n is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.mlp_jacobian import on_tangent_space, tangent_projectors

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class SigmaField:
    """Sigma near the direction ``x`` of one token: ``weights`` P (k,), ``deviations`` d (k, d) and ``slopes`` R (k, d)
    of the keys of all heads, in units of the token's radius; ``centered`` after a LayerNorm.

    >>> x, eye = torch.tensor([1.0, 0.0]).double(), torch.eye(2).double()
    >>> field = SigmaField(x, torch.full((2,), 0.5).double(), torch.stack([eye[1], -eye[1]]), 0 * eye)
    >>> field.tangent
    tensor([[0.0000, 0.0000],
            [0.0000, 0.5000]], dtype=torch.float64)
    """

    x: Float[Tensor, " d"]
    weights: Float[Tensor, " k"]
    deviations: Float[Tensor, "k d"]
    slopes: Float[Tensor, "k d"]
    centered: bool = False

    @cached_property
    def onto(self) -> Float[Tensor, "d d"]:
        """T."""
        return tangent_projectors(self.x, centered=self.centered)

    @cached_property
    @full_precision
    def ambient(self) -> Float[Tensor, "d d"]:
        """Sigma without the projection."""
        return (self.weights.unsqueeze(-1) * self.deviations).mT @ self.deviations / 2

    @cached_property
    @full_precision
    def tangent(self) -> Float[Tensor, "d d"]:
        """S = T Sigma T."""
        return on_tangent_space(self.ambient, self.x, centered=self.centered)

    @cached_property
    @full_precision
    def drift_slopes(self) -> Float[Tensor, "d d"]:
        """D_x of what attention writes, sum_j W_O v_j R_j^T = sum_j d_j R_j^T."""
        return self.deviations.mT @ self.slopes

    @full_precision
    def derivative(self, z: Float[Tensor, " d"]) -> Float[Tensor, "d d"]:
        """The matrix of v -> D(T Sigma T)[v] z on the tangent space, for a tangent z.

        >>> x, eye = torch.tensor([1.0, 0.0]).double(), torch.eye(2).double()
        >>> still = SigmaField(x, torch.ones(1).double(), torch.ones(1, 2).double(), torch.zeros(1, 2).double())
        >>> still.derivative(eye[1])  # Sigma = (1/2) 1 1^T does not change, but T does
        tensor([[ 0.,  0.],
                [ 0., -1.]], dtype=torch.float64)
        """
        onto, sigma = self.onto, self.ambient
        moved = (self.deviations * (self.deviations @ z).unsqueeze(-1)).mT @ self.slopes / 2
        along = self.x @ sigma @ z
        return onto @ (moved - torch.outer(sigma @ self.x, z)) @ onto - along * onto

    @full_precision
    def solved(
        self, drifts: list[tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]], tol: float
    ) -> list[SolvedDrift] | None:
        """Sigma^-1 b for drifts b, each with its derivative D_x b in R^d at fixed radius; None where Sigma is 0.

        >>> x, eye = torch.tensor([1.0, 0.0]).double(), torch.eye(2).double()
        >>> field = SigmaField(x, torch.full((2,), 0.5).double(), torch.stack([eye[1], -eye[1]]), 0 * eye)
        >>> field.solved([(eye[1], 0 * eye)], 1e-6)[0].jacobian
        tensor([[0.]], dtype=torch.float64)
        """
        values, vectors = torch.linalg.eigh(self.tangent)
        if not float(values[-1]) > 0:
            return None
        kept = values > tol * values[-1]
        size, axes = values[kept], vectors[:, kept]
        eye = torch.eye(len(size), dtype=axes.dtype, device=axes.device)
        spread, turned, pull = self.deviations @ axes, self.slopes @ axes, (self.ambient @ self.x) @ axes
        found = []
        for drift, slopes in drifts:
            b = drift - (self.x @ drift) * self.x
            b = b - b.mean() if self.centered else b
            along = axes.mT @ b
            outside = b - axes @ along
            # DS[v] n / size - DS[v] S+ b, of which the first term is 0 where S has all directions
            solved = axes @ (along / size)
            left = spread / size * (self.deviations @ outside).unsqueeze(-1)
            moved = (left - spread * (self.deviations @ solved).unsqueeze(-1)).mT @ turned / 2
            moved = moved + torch.outer(pull, along / size) + (self.x @ self.ambient @ solved) * eye
            moved = moved - (self.x @ self.ambient @ outside / size).unsqueeze(-1) * eye
            jacobian = (axes.mT @ slopes @ axes - (self.x @ drift) * eye + moved) / size.unsqueeze(-1)
            whole = b.square().sum()
            share = outside.square().sum() / torch.where(whole > 0, whole, torch.nan)
            found.append(SolvedDrift(jacobian, float(share)))
        return found


@dataclass(frozen=True, eq=False)
class SolvedDrift:
    """The ``jacobian`` of Sigma^-1 b on the range of Sigma, and the share ``outside`` of |T b|^2 outside that range.

    >>> SolvedDrift(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), 0.0).share
    0.5
    """

    jacobian: Float[Tensor, "r r"]
    outside: float

    @property
    def share(self) -> float:
        """The antisymmetric share |A|^2 / |J|^2; NaN where J = 0."""
        return antisymmetric_share_of(self.jacobian)


def antisymmetric_share_of(matrix: Float[Tensor, "r r"]) -> float:
    """|A|^2 / |M|^2, with A the antisymmetric part of a matrix; NaN where M = 0.

    >>> antisymmetric_share_of(torch.tensor([[3.0, -4.0], [4.0, 3.0]]))
    0.64...
    """
    total = float(matrix.square().sum())
    return float((matrix - matrix.mT).square().sum()) / 4 / total if total > 0 else float("nan")
