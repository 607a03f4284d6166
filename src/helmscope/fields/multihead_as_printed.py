"""Multi-head attention with an MLP inside the projection of each head, as the [Mean-field notes] print it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from helmscope.fields.field import Field
from helmscope.fields.multihead import MultiHead, check_heads, type_names
from helmscope.geometry.sphere import project
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.attention import Attention
    from helmscope.fields.field import Time


class PointwiseForce(Protocol):
    """A force on R^d that acts on each token separately, such as ``MLP``."""

    def ambient(self, x: Tensor, /) -> Tensor:
        """The force at every point, unchecked."""

    def check_size(self, x: Tensor, /) -> None:
        """Raise ``HelmscopeError`` for points of another dimension."""


@dataclass(frozen=True, eq=False)
class MultiHeadAsPrinted(Field):
    """Multi-head attention as printed: x_i' = (1/K) sum_h P_{x_i} MLP_h(V_h sum_j p^h_ij x_j), as the [Mean-field
    notes] print it: the MLP inside the projection.

    A transformer instead adds the MLP to the residual stream after attention (``Block``). The flow as printed is not a
    gradient flow, even for USA heads with symmetric V_h = B_h. ``heads`` as in ``MultiHead``; ``mlps``, one per head.
    Raises ``HelmscopeError`` for invalid heads, and unless there is one force per head.

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
        object.__setattr__(self, "heads", check_heads(self.heads))
        if not isinstance(self.mlps, Sequence) or not all(hasattr(mlp, "ambient") for mlp in self.mlps):
            raise HelmscopeError(
                f"mlps is {type_names(self.mlps)}, but it must be a sequence of forces such as MLP(...)"
            )
        object.__setattr__(self, "mlps", tuple(self.mlps))
        if len(self.mlps) != len(self.heads):
            raise HelmscopeError(
                f"mlps has {len(self.mlps)} entries for {len(self.heads)} heads, but there must be one per head"
            )

    @property
    def attends(self) -> bool:
        """True: the field has a kernel."""
        return True

    @cached_property
    def attention(self) -> MultiHead:
        """The heads without their MLPs."""
        return MultiHead(self.heads)

    @property
    def exchangeable(self) -> bool:
        """Whether the flow commutes with permutations of the tokens: no causal mask, no bias, no positions."""
        return self.attention.exchangeable

    @property
    def continuous(self) -> bool:
        """Whether the velocity is continuous, as it is for all heads but ``Hardmax``."""
        return self.attention.continuous

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the shape of the tokens fits the heads and the MLPs."""
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
        for mlp, output in zip(self.mlps, outputs, strict=True):  # a loop, because their hidden sizes may differ
            total = total + mlp.ambient(output)
        return total / len(self.mlps)

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch heads n n"]:
        """The attention weight of key j for query i in each head."""
        return self.attention.kernel(x, weights=weights)

    def overflow_message(self, x: Tensor, weights: Tensor | None) -> str:
        if not bool(torch.isfinite(self.attention.outputs(x, weights=weights).detach()).all()):
            return self.attention.overflow_message(x, weights)
        return f"mlps hold such large entries that the velocity overflows {x.dtype}: use smaller ones"
