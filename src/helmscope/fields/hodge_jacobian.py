"""The symmetric and antisymmetric part of the Jacobian of a force, which show whether it is locally conservative
[Helmholtz Transformer, no. 3].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field
from helmscope.geometry.arithmetic import full_precision
from helmscope.runs.bar import progress_reporting
from helmscope.types import ConciseRepr, HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class JacobianSplit(ConciseRepr):
    """The split Df = S + A of a Jacobian at each point; returned by ``jacobian_split``.

    >>> JacobianSplit(torch.eye(2), torch.zeros(2, 2)).antisymmetric_share
    tensor(0.)
    """

    symmetric: Float[Tensor, "*batch d d"]
    antisymmetric: Float[Tensor, "*batch d d"]

    @property
    def antisymmetric_share(self) -> Float[Tensor, "*batch"]:
        """|A|^2 / |Df|^2 in Frobenius norms, in [0, 1]: 0 if f is conservative to first order around the point, 1 if it
        is a pure rotation. NaN if Df = 0.

        >>> shear = torch.tensor([1.0, 0.0])
        >>> jacobian_split(lambda x: x.flip(-1) * shear, torch.zeros(2)).antisymmetric_share
        tensor(0.5000)
        """
        scale = torch.maximum(self.symmetric.abs(), self.antisymmetric.abs()).amax((-2, -1), keepdim=True).detach()
        symmetric, antisymmetric = (
            (part / scale).square().sum((-2, -1)) for part in (self.symmetric, self.antisymmetric)
        )
        return antisymmetric / (symmetric + antisymmetric)


@progress_reporting(None, "Jacobian split")
@full_precision
def jacobian_split(
    force: Callable[[Float[Tensor, "*batch d"]], Float[Tensor, "*batch d"]], x: Float[Tensor, "*batch d"]
) -> JacobianSplit:
    """Symmetric and antisymmetric parts of a Jacobian: S = (Df + Df^T)/2 and A = (Df - Df^T)/2, Df_ij = d f_i / d x_j,
    of a force at each point of x.

    f is a gradient on a ball iff A = 0 on it; a divergence-free f has tr S = 0, but not always S = 0. ``force`` acts on
    the last axis and must not mix points: it may be an MLP, but not attention. It is evaluated once, and the d rows
    of Df are computed by reverse-mode differentiation, d^2 numbers per point. Raises ``HelmscopeError`` for attention,
    for a force that is not callable or returns another shape, and if x is not a float tensor.

    >>> split = jacobian_split(lambda x: torch.stack([x[..., 0] - x[..., 1], x[..., 0]], -1), torch.zeros(5, 2))
    >>> split.antisymmetric[0]
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    >>> split.antisymmetric_share.shape
    torch.Size([5])
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.ndim < 1:
        given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type_with_article(x)
        raise HelmscopeError(f"x is {given}, but it must be a float tensor of points (..., d)")
    if isinstance(force, type) or not callable(force):
        raise HelmscopeError(
            f"force is {type_with_article(force)}, but it must be a callable (..., d) -> (..., d), such as an MLP"
        )
    owner = getattr(force, "__self__", force)  # also for bound methods such as attention.velocity
    if isinstance(owner, Field) and owner.attends:
        raise HelmscopeError(
            f"force is {type_with_article(owner)}, which mixes points, but it must act on each point separately"
        )

    def checked_force(y: Tensor) -> Tensor:
        value = force(y)
        if not isinstance(value, torch.Tensor) or value.shape != x.shape:
            given = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type_with_article(value)
            raise HelmscopeError(
                f"force returns {given} at points of shape {tuple(x.shape)}, but it must return one vector per point"
            )
        return value

    value, pull_back = torch.func.vjp(checked_force, x)[:2]
    axes = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    chunk_size = max(1, 2**22 // max(1, x.numel()))  # small, because a force has more intermediate values than x
    (rows,) = torch.func.vmap(lambda axis: pull_back(axis.expand_as(value)), chunk_size=chunk_size)(axes)
    jacobian = rows.movedim(0, -2)
    return JacobianSplit((jacobian + jacobian.mT) / 2, (jacobian - jacobian.mT) / 2)
