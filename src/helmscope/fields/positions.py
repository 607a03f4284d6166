"""Positions of tokens in attention: they act on queries and keys, and so only on the logits.

    additive   l_ij = beta (x_i + p_i)^T B (x_j + p_j)         one vector p_i per position
    rotary     l_ij = beta (R_i q_i)^T (R_j k_j),  q^T k = x^T B y     R_i rotates pairs of coordinates by i theta_k

Rotary logits depend on the positions only through i - j (Su et al. 2021, arXiv:2104.09864).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.parameters import shape_or_type
from helmscope.types import ConciseRepr, HelmscopeError, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Positions(ConciseRepr, ABC):
    """Base class of positions: how they act on queries and keys."""

    def transform_tokens(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The tokens from which queries and keys are computed.

        >>> AdditivePositions(torch.tensor([[0.5, 0.0]])).transform_tokens(torch.tensor([[0.0, 1.0]]))
        tensor([[0.5000, 1.0000]])
        """
        return x

    def transform_queries(self, q: Float[Tensor, "*batch n r"]) -> Float[Tensor, "*batch n r"]:
        """Queries or keys (*batch, n, r), transformed by their positions.

        >>> Rotary().transform_queries(torch.tensor([[1.0, 0.0]]))
        tensor([[1., 0.]])
        """
        return q

    @abstractmethod
    def check_size(self, x: Float[Tensor, "*batch n d"], rank: int) -> None:
        """Raise ``HelmscopeError`` unless the tokens, and queries of dimension ``rank``, fit.

        >>> Rotary().check_size(torch.ones(2, 3), rank=3)
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: queries have dimension 3, but for rotary positions, ... it must be even
        """


@dataclass(frozen=True, eq=False)
class AdditivePositions(Positions):
    """Additive positions: row i of ``table`` (n, d) is added to token i before queries and keys are computed.

    Raises ``HelmscopeError`` unless ``table`` is a float matrix, and when used for more than n tokens.

    >>> AdditivePositions(torch.zeros(4, 3)).transform_tokens(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    table: Float[Tensor, "n d"]

    def __post_init__(self) -> None:
        if not isinstance(self.table, torch.Tensor) or self.table.ndim != 2 or not self.table.is_floating_point():
            raise HelmscopeError(f"table is {shape_or_type(self.table)}, but it must be a float tensor of shape (n, d)")

    def transform_tokens(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """x_i + p_i."""
        return x + self.table[: x.shape[-2]].to(x)

    def check_size(self, x: Float[Tensor, "*batch n d"], rank: int) -> None:
        """Raise ``HelmscopeError`` for more tokens than positions, or another dimension."""
        n, d = x.shape[-2:]
        if self.table.shape[0] < n or self.table.shape[1] != d:
            given = tuple(self.table.shape)
            raise HelmscopeError(f"table has shape {given}, but tokens of shape {tuple(x.shape)} need ({n}, {d})")


@dataclass(frozen=True)
class Rotary(Positions):
    """Rotary positions: R_i rotates coordinates (k, k + r/2) of a query or key of even dimension r by the angle
    i base^(-2 k / r), as in Llama. Raises ``HelmscopeError`` unless ``base`` > 0, and when used for odd r.

    >>> Rotary().transform_queries(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_real("base", self.base, above=0)

    def transform_queries(self, q: Float[Tensor, "*batch n r"]) -> Float[Tensor, "*batch n r"]:
        """R_i q_i."""
        n, r = q.shape[-2:]
        rate = self.base ** (-torch.arange(0, r, 2, dtype=torch.float64, device=q.device) / r)
        angle = torch.arange(n, dtype=torch.float64, device=q.device).unsqueeze(-1) * rate
        cos, sin = angle.cos().to(q), angle.sin().to(q)
        left, right = q[..., : r // 2], q[..., r // 2 :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def check_size(self, x: Float[Tensor, "*batch n d"], rank: int) -> None:
        """Raise ``HelmscopeError`` if the dimension of the queries is odd."""
        if rank % 2:
            raise HelmscopeError(
                f"queries have dimension {rank}, but for rotary positions, which rotate pairs, it must be even"
            )
