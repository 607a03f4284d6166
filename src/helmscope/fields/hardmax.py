"""Hardmax attention: every token follows the keys it likes best, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Softmax
from helmscope.types import real_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# above the rounding of an inner product of unit vectors, far below a difference that means something
TIE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True, eq=False)
class Hardmax(Softmax):
    """x_i' = P_{x_i} V sum_{j in A_i} m_j x_j / sum_{j in A_i} m_j,  A_i = {j : l_ij >= max_k l_ik - tie},
    l_ij = x_i^T B x_j + bias_ij: what source 001's SA becomes as beta goes to infinity.

    The limit of ``SA(beta, bias=beta * bias)`` at the rate e^{-beta gap}, gap the distance of the greatest logit from
    the next. Keys within ``tie`` >= 0 of the greatest count as equally good and are averaged by their weights; without
    a value it is 1e-12 in float64 and 1e-5 in float32, which is rounding for logits of order 1.

    With B = I a token sees none above itself, <x_i, x_j> <= 1, so it attends to itself and rests: the flow moves only
    under another B or a bias. The velocity jumps where the best key changes, and tokens slide along such jumps, where
    an adaptive stepper never ends: ``integrate`` takes fixed steps. The derivative is that with A_i held fixed.

    >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    >>> Hardmax(query_key=-torch.eye(2))(x)  # the farthest token attracts
    tensor([[ 0.0000,  0.8000],
            [ 0.6400, -0.4800]])
    >>> Hardmax()(x)
    tensor([[0., 0.],
            [0., 0.]])
    """

    tie: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.tie is not None:
            object.__setattr__(self, "tie", real_number("tie", self.tie, at_least=0))
        super().__post_init__()

    @property
    def continuous(self) -> bool:
        """The velocity jumps where the best key changes."""
        return False

    @property
    def factor(self) -> float:
        """1: there is no temperature."""
        return 1.0

    def transform_logits(
        self, pairs: Float[Tensor, "*batch n n"], weights: Tensor | None
    ) -> Float[Tensor, "*batch n n"]:
        """0 at the keys of greatest logit, -inf at the others."""
        tie = TIE[pairs.dtype] if self.tie is None else self.tie
        best = pairs.detach()
        chosen = (best >= best.amax(-1, keepdim=True) - tie) & (best > -torch.inf)
        return torch.where(chosen, 0.0, -torch.inf).to(pairs.dtype)
