"""Hardmax attention: every token attends only to the keys with the largest logit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Softmax
from helmscope.types import check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# above the rounding error of an inner product of unit vectors, far below meaningful differences
TIE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True, eq=False)
class Hardmax(Softmax):
    """Hardmax attention: x_i' = P_{x_i} V sum_{j in A_i} m_j x_j / sum_{j in A_i} m_j,  A_i = {j : l_ij >= max_k l_ik -
    tau}, l_ij = x_i^T B x_j + bias_ij: the limit of SA [Geshkovski et al. 2023] as beta tends to infinity.

    ``SA(beta, bias=beta * bias)`` converges to it at the rate e^{-beta gap}, where gap is the difference between the
    largest and the second largest logit. Keys within tau = ``tie_tolerance`` >= 0 of the largest logit are averaged by
    their weights; the default is 1e-12 in float64 and 1e-5 in float32, about rounding error for logits of order 1.

    With B = I every token attends to itself, since <x_i, x_j> <= 1, and does not move: motion needs another B or a
    bias. The velocity jumps where the largest key changes, and tokens slide along such discontinuities, where an
    adaptive stepper would not terminate: ``integrate`` uses fixed steps. Derivatives are computed with A_i held fixed.
    Raises ``HelmscopeError`` for a negative ``tie_tolerance``; other parameters as in ``SA``.

    >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    >>> Hardmax(query_key=-torch.eye(2))(x)  # the farthest token attracts
    tensor([[ 0.0000,  0.8000],
            [ 0.6400, -0.4800]])
    >>> Hardmax()(x)
    tensor([[0., 0.],
            [0., 0.]])
    """

    tie_tolerance: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.tie_tolerance is not None:
            object.__setattr__(self, "tie_tolerance", check_real("tie_tolerance", self.tie_tolerance, at_least=0))
        super().__post_init__()

    @property
    def continuous(self) -> bool:
        """False: the velocity jumps where the key with the largest logit changes."""
        return False

    @property
    def logit_factor(self) -> float:
        """1: there is no temperature."""
        return 1.0

    def transform_logits(
        self, pairs: Float[Tensor, "*batch n n"], weights: Tensor | None
    ) -> Float[Tensor, "*batch n n"]:
        """0 at the keys with the largest logit, -inf at the others."""
        tol = TIE_TOLERANCE[pairs.dtype] if self.tie_tolerance is None else self.tie_tolerance
        logits = pairs.detach()
        largest = (logits >= logits.amax(-1, keepdim=True) - tol) & (logits > -torch.inf)
        return torch.where(largest, 0.0, -torch.inf).to(pairs.dtype)
