"""Matrices of a head: a d x d tensor, or a low-rank product of two factors, as in real heads.

A head of dimension r has x^T Q^T K y = (Q x).(K y) with Q, K of shape (r, d): its d x d matrix has rank r and need not
be computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.parameters import Change, copy_with, shape_or_type
from helmscope.geometry.arithmetic import check_dense_values, every, full_precision
from helmscope.kernels.dense import matrix_product
from helmscope.types import ConciseRepr, HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank(ConciseRepr):
    """The d x d matrix left @ right^T, ``left`` and ``right`` of shape (d, r): x^T M y = (left^T x).(right^T y).

    Can be passed as ``query_key`` or ``value`` of any attention field; with batch axes before d it is one matrix per
    system. A head with query and key weights Q, K (r, d) has ``query_key = LowRank(Q.mT, K.mT)``; one with value and
    output weights V (r, d), O (d, r) has ``value = LowRank(O, V.mT)``. Logits then cost O(n d r + n^2 r) instead of
    O(n d^2 + n^2 d). Raises ``HelmscopeError`` for factors of different shapes, r < 1, and entries that are not finite.

    >>> LowRank(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])).dense()
    tensor([[3., 4.],
            [6., 8.]])
    """

    left: Float[Tensor, "*batch d r"]
    right: Float[Tensor, "*batch d r"]

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            _check_factor(name, getattr(self, name))
        if self.left.shape != self.right.shape:
            shapes = f"left has shape {tuple(self.left.shape)} and right {tuple(self.right.shape)}"
            raise HelmscopeError(f"{shapes}, but both must have the same shape (d, r)")

    @property
    def shape(self) -> torch.Size:
        """(d, d), the shape of the matrix.

        >>> matrix = LowRank(torch.ones(3, 1), torch.ones(3, 1))
        >>> matrix.shape
        torch.Size([3, 3])
        """
        return torch.Size((self.left.shape[-2], self.left.shape[-2]))

    @property
    def rank(self) -> int:
        """The number r of columns, which bounds the rank of the matrix.

        >>> matrix = LowRank(torch.ones(3, 1), torch.ones(3, 1))
        >>> matrix.rank
        1
        """
        return self.left.shape[-1]

    def with_parameters(self, change: Change) -> LowRank:
        """This matrix with ``change`` applied to its factors if they have batch axes; unchecked.

        >>> many = LowRank(torch.ones(5, 3, 1), torch.ones(5, 3, 1))
        >>> many.with_parameters(lambda factor, axes: factor[:2]).left.shape
        torch.Size([2, 3, 1])
        """
        if self.left.ndim == 2:
            return self
        return copy_with(self, {"left": change(self.left, 2), "right": change(self.right, 2)})

    @full_precision
    def dense(self) -> Float[Tensor, "d d"]:
        """The product left @ right^T.

        >>> LowRank(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])).dense()
        tensor([[3., 4.],
                [6., 8.]])
        """
        return self.left @ self.right.to(self.left).mT


def query_and_key(x: Float[Tensor, "*batch n d"], matrix: Tensor | LowRank | None) -> tuple[Tensor, Tensor]:
    """Queries q_i and keys k_j with <q_i, k_j> = x_i^T B x_j, of dimension r if B is ``LowRank``; B = I if None.

    >>> query_and_key(torch.eye(2), LowRank(torch.ones(2, 1), torch.ones(2, 1)))[0]
    tensor([[1.],
            [1.]])
    """
    if matrix is None:
        return x, x
    if isinstance(matrix, LowRank):
        return matrix_product(x, matrix.left.to(x)), matrix_product(x, matrix.right.to(x))
    return matrix_product(x, matrix.to(x)), x


def as_dense(matrix: Tensor | LowRank | None, like: Float[Tensor, "*batch n d"]) -> Float[Tensor, "d d"]:
    """The dense matrix with the dtype and device of ``like``; I if None.

    >>> as_dense(None, torch.ones(1, 2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    if matrix is None:
        return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return (matrix.dense() if isinstance(matrix, LowRank) else matrix).to(like)


def _check_factor(name: str, factor: object) -> None:
    if not isinstance(factor, torch.Tensor) or factor.ndim < 2 or 0 in factor.shape:
        raise HelmscopeError(
            f"{name} is {shape_or_type(factor)}, but it must be a torch tensor of shape (d, r) with r >= 1"
        )
    if not factor.dtype.is_floating_point:
        raise HelmscopeError(f"{name} has dtype {factor.dtype}, but it must hold floating-point numbers")
    check_dense_values(name, factor)
    entries = factor.detach()
    good = torch.isfinite(entries)
    if not every(good):
        raise HelmscopeError(f"{name} holds the entry {entries[~good][0].item()}, but every entry must be finite")
