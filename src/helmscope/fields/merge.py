"""Tokens that have met, as one weighted token.

Two tokens at one point move together for ever in an exchangeable field, and m_1 + m_2 at that point acts on the others
as the two did. So a cluster can be carried as one token of its weight. That is exact at distance 0, an error of the
order of the tolerance where near tokens attract (V = +I), and wrong where they repel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.weights import check_weights
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.linkage import components, pairwise_angles
from helmscope.geometry.sphere import check_tokens, retract
from helmscope.types import HelmscopeError, real_number

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Merged:
    """Clouds in which close tokens were merged, in their old shape: token i stands where token ``leader[i]`` stands,
    and its weight is 0 unless it is the leader, which carries the weight of the whole cluster.

    >>> merge_tokens(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 1e-6).weights
    tensor([2., 0.])
    """

    states: Float[Tensor, "*batch n d"]
    weights: Float[Tensor, "*batch n"]
    leader: Int[Tensor, "*batch n"]

    def distinct(self) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
        """The k distinct tokens of one cloud and their weights."""
        if self.leader.ndim != 1:
            raise HelmscopeError(
                f"states has shape {tuple(self.states.shape)}, but distinct() needs one cloud (n, d), as clouds of a "
                "batch keep different numbers of tokens"
            )
        kept = self.leader == torch.arange(len(self.leader), device=self.leader.device)
        return self.states[kept], self.weights[kept]


def merge_tokens(
    x: Float[Tensor, "*batch n d"], tolerance: float, *, weights: Float[Tensor, "*batch n"] | None = None
) -> Merged:
    """Merge tokens joined by steps of at most ``tolerance`` radians into one at their weighted mean direction.

    Tokens of weight 0 are left alone.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> merge_tokens(x, 1e-6).distinct()
    (tensor([[1., 0.],
            [0., 1.]]), tensor([2., 1.]))
    """
    tolerance = real_number("tolerance", tolerance, at_least=0)
    given = check_weights(check_tokens(x), weights, None)
    return merge_close(x, torch.ones_like(x[..., 0]) if given is None else given, tolerance)


@full_precision
def merge_close(x: Tensor, weights: Tensor, tolerance: float) -> Merged:
    """``merge_tokens``, unchecked."""
    heavy = weights > 0
    close = (pairwise_angles(x.detach()) <= tolerance) & heavy.unsqueeze(-1) & heavy.unsqueeze(-2)
    leader = components(close)
    member = (leader.unsqueeze(-2) == torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)).to(x)
    mass = member @ weights.unsqueeze(-1)
    total = member @ (weights.unsqueeze(-1) * x)
    alone = member.sum(-1, keepdim=True) <= 1  # a token alone keeps its very bits
    spread = torch.linalg.vector_norm(total.detach(), dim=-1, keepdim=True) < 1e-6 * mass
    if bool((spread & ~alone).any()):
        raise HelmscopeError(
            f"tolerance is {tolerance:g}, but it chains tokens right around the sphere: they have no mean direction"
        )
    states = torch.where(alone, x, retract(torch.where(alone, x, total)))
    index = leader.unsqueeze(-1).expand_as(x)
    return Merged(states.gather(-2, index), mass.squeeze(-1), leader)
