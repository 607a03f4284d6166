"""The gradient fields of the neurons of an MLP: the basis in which ``gradient_fit`` looks for the best potential."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.fields.hodge_gaussian import gaussian_hodge_split
from helmscope.fields.mlp import MLP, GatedMLP, affine, linear
from helmscope.geometry.arithmetic import full_precision
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Family:
    """One gradient field per neuron, each the sum over atoms of a number at each token times a fixed vector.

    >>> Family([(torch.ones(1, 2), torch.eye(2))]).combined(torch.tensor([1.0, 2.0]))
    tensor([[1., 2.]])
    """

    atoms: Sequence[tuple[Float[Tensor, "tokens k"], Float[Tensor, "k d"]]]

    def combined(self, coefficients: Float[Tensor, " k"]) -> Float[Tensor, "tokens d"]:
        """The sum of the fields by coefficients, at each token.

        >>> Family([(torch.ones(1, 2), 2 * torch.eye(2))]).combined(torch.ones(2))
        tensor([[2., 2.]])
        """
        parts = [linear(numbers * coefficients, vectors) for numbers, vectors in self.atoms]
        return torch.stack(parts).sum(0)

    @full_precision
    def gram(self, other: Family, weights: Float[Tensor, " tokens"]) -> Float[Tensor, "k l"]:
        """The inner products of the fields with those of another family, over the weighted tokens.

        >>> one = Family([(torch.ones(3, 2), torch.eye(2))])
        >>> one.gram(one, torch.ones(3))
        tensor([[3., 0.],
                [0., 3.]])
        """
        return torch.stack(
            [
                ((weights[:, None] * numbers).mT @ others) * (vectors @ partners.mT)
                for numbers, vectors in self.atoms
                for others, partners in other.atoms
            ]
        ).sum(0)

    def inner(self, f: Float[Tensor, "tokens d"], weights: Float[Tensor, " tokens"]) -> Float[Tensor, " k"]:
        """The inner products of the fields with f.

        >>> Family([(torch.ones(3, 2), torch.eye(2))]).inner(torch.ones(3, 2), torch.ones(3))
        tensor([3., 3.])
        """
        parts = [(weights[:, None] * numbers * linear(f, vectors.mT)).sum(0) for numbers, vectors in self.atoms]
        return torch.stack(parts).sum(0)


@dataclass(frozen=True, eq=False)
class GradientBasis:
    """The potentials of the neurons of an MLP (see ``gradient_fit``), for tokens of root mean square ``size`` per
    coordinate.

    >>> GradientBasis.of(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), size=1.0).profile
    'Gaussian profile'
    """

    mlp: MLP | GatedMLP
    size: float
    split: Any
    profile: str

    @classmethod
    def of(cls, mlp: MLP | GatedMLP, size: float) -> GradientBasis:
        """The basis of an MLP.

        >>> GradientBasis.of(GatedMLP(w_gate=torch.eye(2), w_up=torch.eye(2), w_out=torch.eye(2)), 1.0).profile
        'none'
        """
        if isinstance(mlp, GatedMLP):
            return cls(mlp, size, None, "none")
        live = mlp.w_in.any(-1)
        if not bool(live.any()):  # a constant force: quadratic potentials suffice, and the neuron here writes nothing
            axis = torch.eye(mlp.dim, dtype=mlp.w_in.dtype, device=mlp.w_in.device)[:1]
            return cls(MLP(w_in=axis, w_out=0 * axis.mT, activation=mlp.activation), size, None, "none")
        mlp = replace(
            mlp, w_in=mlp.w_in[live], w_out=mlp.w_out[:, live], b_in=None if mlp.b_in is None else mlp.b_in[live]
        )
        try:
            return cls(mlp, size, gaussian_hodge_split(replace(mlp, w_in=size * mlp.w_in)), "Gaussian profile")
        except HelmscopeError:
            return cls(mlp, size, None, "the activation itself")

    def families(self, x: Float[Tensor, "tokens d"]) -> list[Family]:
        """The gradient fields at tokens.

        >>> basis = GradientBasis.of(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), size=1.0)
        >>> [len(family.atoms) for family in basis.families(torch.ones(1, 2))]
        [1, 2]
        """
        mlp = self.mlp
        if isinstance(mlp, GatedMLP):
            gate, up = mlp.w_gate.to(x), mlp.w_up.to(x)
            z, t = affine(x, gate, mlp.b_gate), affine(x, up, mlp.b_up)
            psi = mlp.activation.potential(z)
            return [Family([(mlp.activation(z) * t, gate), (psi, up)]), Family([(psi, gate)])]
        rows = mlp.w_in.to(x)
        z = affine(x, rows, mlp.b_in)
        s, squared = mlp.activation(z), rows.square().sum(-1, keepdim=True)
        written = mlp.w_out.to(x).mT
        across = written - (written * rows).sum(-1, keepdim=True) / squared * rows
        height = linear(x, across.mT)
        if self.split is None:
            return [Family([(s, rows)]), Family([(s, across), (height * mlp.activation.slope(z), rows)])]
        length = squared.sqrt()
        directions = rows / length
        y = (x / self.size).double()
        along = linear(y, directions.double().mT)
        index = torch.arange(len(rows), device=x.device).expand_as(along)
        value, slope = (each.to(x) for each in self.split.profiles(along, index))
        return [
            Family([(s * length.mT, directions)]),
            Family([(value, across), (height / self.size * slope, directions)]),
        ]
