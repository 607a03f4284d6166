"""Traces and norms of the Jacobian of an MLP, exactly and without a d x d matrix per point [Helmholtz Transformer, no.
3].

The Jacobian of an MLP is J = W diag(c) V: the columns of W are what the neurons write, the rows of V what they read,
and c their slopes at x. A gated neuron has two rows and counts twice, with the slopes s'(g) t along its gate row and
s(g) along its up row, and the same column. With M = V W

    tr J = sum_j c_j M_jj,    tr J^2 = c^T (M o M^T) c,    |J|_F^2 = c^T ((V V^T) o (W^T W)) c

(o is the entrywise product). With S and A the symmetric and antisymmetric parts of J, tr J^2 = |S|^2 - |A|^2, hence

    antisymmetric share  |A|^2 / |J|^2 = (1 - tr J^2 / |J|^2) / 2 in [0, 1]:  0 for a gradient, 1 for a rotation.

For P J P with P = I - x x^T two products J x and J^T x suffice:

    tr (P J P)^2 = tr J^2 - 2 (J^T x).(J x) + (x^T J x)^2,    |P J P|^2 = |J|^2 - |J x|^2 - |J^T x|^2 + (x^T J x)^2.

Weighted by a covariance C = Y^T Y, the share is that of C^(1/2) J C^(1/2): V C W replaces V W, and V C V^T and W^T C W
replace V V^T and W^T W. Time: O(h^2) per point, and O(h^2 d) once for each set of weights (or each C).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from helmscope.fields.mlp import Force, linear
from helmscope.geometry.arithmetic import full_precision
from helmscope.types import ConciseRepr, HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

BLOCK = 64  # neurons per block of a symmetric form, of which only one triangle is stored and multiplied


@dataclass(frozen=True, eq=False)
class JacobianInvariants(ConciseRepr):
    """Invariants of a matrix J at each point: tr J, tr J^2 and |J|_F^2.

    >>> shear = JacobianInvariants(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(1.0))  # [[0, 1], [0, 0]]
    >>> shear.antisymmetric_share
    tensor(0.5000)
    """

    trace: Float[Tensor, "*batch"]
    trace_of_square: Float[Tensor, "*batch"]
    squared_norm: Float[Tensor, "*batch"]

    @property
    def antisymmetric_share(self) -> Float[Tensor, "*batch"]:
        """|A|^2 / |J|^2 = (1 - tr J^2 / |J|^2) / 2, in [0, 1] up to rounding, which is clipped; NaN where J = 0.

        >>> JacobianInvariants(torch.tensor(0.0), torch.tensor(-2.0), torch.tensor(2.0)).antisymmetric_share  # rotation
        tensor(1.)
        """
        exists = self.squared_norm > 0
        ratio = self.trace_of_square / torch.where(exists, self.squared_norm, 1.0)
        return torch.where(exists, ((1 - ratio) / 2).clamp(0, 1), torch.nan)

    @staticmethod
    def of_matrices(jacobian: Float[Tensor, "*batch d d"]) -> JacobianInvariants:
        """The invariants of matrices that are at hand.

        >>> JacobianInvariants.of_matrices(torch.tensor([[3.0, -4.0], [4.0, 3.0]])).antisymmetric_share
        tensor(0.6400)
        """
        trace = jacobian.diagonal(dim1=-2, dim2=-1).sum(-1)
        return JacobianInvariants(trace, (jacobian * jacobian.mT).sum((-2, -1)), jacobian.square().sum((-2, -1)))


@dataclass(frozen=True, eq=False)
class JacobianAlgebra(ConciseRepr):
    """The matrices V (``rows``) and W (``columns``) of J = W diag(c) V, with the forms that give its invariants; made
    by ``jacobian_algebra``. Slopes c have the last axis of ``rows``' first; all methods take c or (c, x).

    >>> from helmscope.fields.mlp import MLP
    >>> algebra = jacobian_algebra(MLP(w_in=torch.eye(2), w_out=torch.tensor([[3.0, -4.0], [4.0, 3.0]])))
    >>> algebra.invariants(torch.ones(2))
    JacobianInvariants(trace=6.0, trace_of_square=-14.0, squared_norm=50.0)
    """

    rows: Float[Tensor, "neurons d"]
    columns: Float[Tensor, "d neurons"]

    @cached_property
    def diagonal(self) -> Float[Tensor, " neurons"]:
        """The diagonal of M = V W, whose products with the slopes add up to tr J."""
        return (self.rows * self.columns.mT).sum(-1)

    @cached_property
    @full_precision
    def _forms(self) -> list[Float[Tensor, "start twice_block"]]:
        return _upper_blocks(
            lambda rows, columns: (
                (self.rows[rows] @ self.columns[:, columns]) * (self.columns[:, rows].mT @ self.rows[columns].mT)
            ),
            lambda rows, columns: (
                (self.rows[rows] @ self.rows[columns].mT) * (self.columns[:, rows].mT @ self.columns[:, columns])
            ),
            len(self.rows),
        )

    def invariants(self, slopes: Float[Tensor, "*batch neurons"]) -> JacobianInvariants:
        """tr J, tr J^2 and |J|^2 at each point, in R^d.

        >>> from helmscope.fields.mlp import MLP
        >>> jacobian_algebra(MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2))).invariants(torch.ones(2)).trace
        tensor(4.)
        """
        return _invariants(slopes, self.diagonal, self._forms)

    def tangent_invariants(
        self, slopes: Float[Tensor, "*batch neurons"], x: Float[Tensor, "*batch d"]
    ) -> JacobianInvariants:
        """The same for P J P, P = I - x x^T, at unit vectors x: the derivative of P f along the sphere without the part
        -<x, f> P that the curvature adds, which is symmetric.

        >>> from helmscope.fields.mlp import MLP
        >>> algebra = jacobian_algebra(MLP(w_in=torch.eye(2), w_out=torch.tensor([[3.0, -4.0], [4.0, 3.0]])))
        >>> algebra.tangent_invariants(torch.ones(2), torch.tensor([1.0, 0.0]))
        JacobianInvariants(trace=3.0, trace_of_square=9.0, squared_norm=9.0)
        """
        flat = self.invariants(slopes)
        read, written = linear(x, self.rows.mT), linear(x, self.columns)
        forward, backward = linear(slopes * read, self.columns.mT), linear(slopes * written, self.rows)
        radial = (slopes * read * written).sum(-1)
        return JacobianInvariants(
            flat.trace - radial,
            flat.trace_of_square - 2 * (forward * backward).sum(-1) + radial.square(),
            # below rounding of |J|^2 the difference is 0
            (flat.squared_norm - forward.square().sum(-1) - backward.square().sum(-1) + radial.square()).clamp(min=0),
        )

    @full_precision
    def weighted_invariants(
        self, slopes: Float[Tensor, "*batch neurons"], factor: Float[Tensor, "k d"]
    ) -> JacobianInvariants:
        """The same for C^(1/2) J C^(1/2) with C = Y^T Y, given the ``factor`` Y: such as centered tokens / sqrt(n).

        >>> from helmscope.fields.mlp import MLP
        >>> algebra = jacobian_algebra(MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, 1.0], [0.0, 0.0]])))
        >>> algebra.weighted_invariants(torch.ones(2), torch.diag(torch.tensor([1.0, 2.0])))
        JacobianInvariants(trace=0.0, trace_of_square=0.0, squared_norm=4.0)
        """
        read, written = self.rows @ factor.mT, self.columns.mT @ factor.mT
        forms = _upper_blocks(
            lambda rows, columns: (read[rows] @ written[columns].mT) * (written[rows] @ read[columns].mT),
            lambda rows, columns: (read[rows] @ read[columns].mT) * (written[rows] @ written[columns].mT),
            len(read),
        )
        return _invariants(slopes, (read * written).sum(-1), forms)

    def radial(self, slopes: Float[Tensor, "*batch neurons"], x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """x^T J x.

        >>> from helmscope.fields.mlp import MLP
        >>> algebra = jacobian_algebra(MLP(w_in=torch.eye(2), w_out=torch.tensor([[3.0, -4.0], [4.0, 3.0]])))
        >>> algebra.radial(torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor(3.)
        """
        return (slopes * linear(x, self.rows.mT) * linear(x, self.columns)).sum(-1)

    def matrices(self, slopes: Float[Tensor, "*batch neurons"]) -> Float[Tensor, "*batch d d"]:
        """J itself, d^2 numbers per point.

        >>> from helmscope.fields.mlp import MLP
        >>> jacobian_algebra(MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2))).matrices(torch.ones(2))
        tensor([[2., 0.],
                [0., 2.]])
        """
        return linear(self.columns * slopes.unsqueeze(-2), self.rows)


def jacobian_algebra(
    force: Force, *, like: Float[Tensor, ...] | None = None, centered: bool = False
) -> JacobianAlgebra:
    """The algebra of the Jacobians J = W_out diag(s') W_in of an MLP, gated or not, in the dtype and on the device of
    ``like``.

    With ``centered`` J is replaced by Q J Q, where Q removes the mean over coordinates: that is the Jacobian on the
    space in which tokens after a LayerNorm lie. Raises ``HelmscopeError`` for anything but a force without batch axes.

    >>> from helmscope.fields.mlp import MLP
    >>> jacobian_algebra(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), centered=True).rows
    tensor([[ 0.5000, -0.5000],
            [-0.5000,  0.5000]])
    """
    if not isinstance(force, Force):
        raise HelmscopeError(f"force is {type_with_article(force)}, but it must be an MLP or a GatedMLP")
    if any(rows.ndim > 2 for rows in force.input_rows) or force.w_out.ndim > 2:
        raise HelmscopeError("force has batch axes, but only one MLP at a time is supported")
    like = force.w_out if like is None else like
    rows = torch.cat([each.to(like) for each in force.input_rows])
    columns = torch.cat([force.w_out.to(like)] * len(force.input_rows), 1)
    if centered:
        rows, columns = rows - rows.mean(-1, keepdim=True), columns - columns.mean(0, keepdim=True)
    return JacobianAlgebra(rows, columns)


def slopes_of(force: Force, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch neurons"]:
    """The slopes c of a force at points x, in the order of the rows of ``jacobian_algebra``.

    >>> from helmscope.fields.activations import ReLU
    >>> from helmscope.fields.mlp import MLP
    >>> slopes_of(MLP(w_in=torch.eye(2), w_out=torch.eye(2), activation=ReLU()), torch.tensor([3.0, -1.0]))
    tensor([1., 0.])
    """
    slopes = force.neuron_slopes(x)
    return slopes[0] if len(slopes) == 1 else torch.cat(slopes, -1)


Entries = Callable[[slice, slice], "Tensor"]


def _upper_blocks(square: Entries, norm: Entries, size: int) -> list[Tensor]:
    """The forms of tr J^2 and |J|^2, of which only the block upper triangle is computed: for each block of columns its
    rows up to the diagonal, with those above the block doubled, which leaves c^T form c unchanged; both side by side.
    """
    blocks = []
    for start in range(0, size, BLOCK):
        columns = slice(start, min(start + BLOCK, size))
        rows = slice(0, columns.stop)
        block = torch.cat([square(rows, columns), norm(rows, columns)], 1)
        block[:start] *= 2
        blocks.append(block)
    return blocks


def _invariants(
    slopes: Float[Tensor, "*batch neurons"], diagonal: Float[Tensor, " neurons"], forms: list[Tensor]
) -> JacobianInvariants:
    """tr J, tr J^2 and |J|^2, given ``_upper_blocks``."""
    total = slopes.new_zeros(*slopes.shape[:-1], 2)
    for block in forms:
        stop, width = len(block), block.shape[1] // 2
        own = slopes[..., stop - width : stop].unsqueeze(-2)
        product = linear(slopes[..., :stop], block).reshape(*slopes.shape[:-1], 2, width)
        total = total + (product * own).sum(-1)
    return JacobianInvariants((slopes * diagonal).sum(-1), total[..., 0], total[..., 1].clamp(min=0))
