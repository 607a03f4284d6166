"""Heads with an MLP inside the projection of each, as source 002 prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from helmscope.fields.field import Field
from helmscope.fields.multihead import MultiHead, checked_heads, kinds
from helmscope.geometry.sphere import project
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.attention import Attention
    from helmscope.fields.field import Time


class PointwiseForce(Protocol):
    """A force on R^d that acts on each token alone, such as ``MLP``."""

    def ambient(self, x: Tensor, /) -> Tensor:
        """The force at every point, unchecked."""

    def check_size(self, x: Tensor, /) -> None:
        """Refuse points of another dimension."""


@dataclass(frozen=True, eq=False)
class MultiHeadAsPrinted(Field):
    """x_i' = (1/K) sum_h P_{x_i} MLP_h(V_h sum_j p^h_ij x_j), as source 002 prints it: the MLP inside the projection.

    A transformer adds the MLP to the stream after attention (``Block``). Printed so, the flow is no gradient flow, not
    even for heads of USA with V_h = B_h symmetric. ``heads`` as in ``MultiHead``, ``mlps`` one for each of them.

    >>> from helmscope.fields.activations import ReLU
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.fields.mlp import MLP
    >>> mlp = MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2), activation=ReLU())
    >>> MultiHeadAsPrinted([SA(beta=0.0)], [mlp])(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[0., 1.],
            [1., 0.]])
    """

    parts: ClassVar[tuple[str, ...]] = ("heads", "mlps")

    heads: Sequence[Attention]
    mlps: Sequence[PointwiseForce]

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", checked_heads(self.heads))
        if not isinstance(self.mlps, Sequence) or not all(hasattr(mlp, "ambient") for mlp in self.mlps):
            raise HelmscopeError(f"mlps is {kinds(self.mlps)}, but it must be a sequence of forces such as MLP(...)")
        object.__setattr__(self, "mlps", tuple(self.mlps))
        if len(self.mlps) != len(self.heads):
            raise HelmscopeError(
                f"mlps holds {len(self.mlps)} of them for {len(self.heads)} heads, but each head needs one"
            )

    @property
    def attends(self) -> bool:
        """Whether the field has a kernel."""
        return True

    @cached_property
    def attention(self) -> MultiHead:
        """The heads without their MLPs."""
        return MultiHead(self.heads)

    @property
    def exchangeable(self) -> bool:
        """Whether tokens can be relabelled, and so merged: no causal mask, no bias."""
        return self.attention.exchangeable

    @property
    def continuous(self) -> bool:
        """Whether the velocity is continuous, as that of all heads but hardmax is."""
        return self.attention.continuous

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse tokens that do not fit the heads or the MLPs."""
        self.attention.check_size(x)
        for mlp in self.mlps:
            mlp.check_size(x)

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The tangent velocity, unchecked: for inner loops and autograd transforms."""
        return project(x, self.ambient(x, weights=weights))

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The mean of the MLPs' forces before projection."""
        outputs = self.attention.outputs(x, weights=weights).unbind(-3)
        total = torch.zeros_like(x)
        for mlp, output in zip(self.mlps, outputs, strict=True):  # they may differ in size
            total = total + mlp.ambient(output)
        return total / len(self.mlps)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch heads n n"]:
        """The weight of key j for query i in each head."""
        return self.attention.kernel(x, weights=weights)

    def complaint(self, x: Tensor, weights: Tensor | None) -> str:
        if not bool(torch.isfinite(self.attention.outputs(x, weights=weights).detach()).all()):
            return self.attention.complaint(x, weights)
        return f"mlps hold such large entries that the velocity leaves {x.dtype}: take smaller ones"
