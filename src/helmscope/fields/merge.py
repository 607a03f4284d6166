"""Merge tokens that have met into one weighted token.

Two tokens at the same point stay together forever in an exchangeable field, and one token of weight m_1 + m_2 there has
the same effect on the others. So a cluster can be represented by one token with its total weight. This is exact at
distance 0, has an error of the order of the radius if nearby tokens attract each other (V = +I), and is wrong if
they repel each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.weights import check_weights
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.linkage import components, pairwise_angles
from helmscope.geometry.sphere import check_tokens, retract
from helmscope.types import ConciseRepr, HelmscopeError, check_real

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class MergedTokens(ConciseRepr):
    """Clouds in which close tokens have been merged, in their original shape: token i has the state of token
    ``leader[i]``, and weight 0 unless it is the leader, which has the weight of the whole cluster.

    >>> merge_tokens(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), 1e-6).weights
    tensor([2., 0.])
    """

    states: Float[Tensor, "*batch n d"]
    weights: Float[Tensor, "*batch n"]
    leader: Int[Tensor, "*batch n"]

    def distinct(self) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
        """The k distinct tokens of a single cloud and their weights. Raises ``HelmscopeError`` for several clouds.

        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> merge_tokens(x, 1e-6).distinct()[1]
        tensor([2., 1.])
        """
        if self.leader.ndim != 1:
            raise HelmscopeError(
                f"states has shape {tuple(self.states.shape)}, but distinct() needs a single cloud (n, d), because the "
                "clouds of a batch have different numbers of distinct tokens"
            )
        is_leader = self.leader == torch.arange(len(self.leader), device=self.leader.device)
        return self.states[is_leader], self.weights[is_leader]


def merge_tokens(
    x: Float[Tensor, "*batch n d"], max_angle: float, *, weights: Float[Tensor, "*batch n"] | None = None
) -> MergedTokens:
    """Merge tokens that are linked by steps of at most ``max_angle`` radians into one at their weighted mean direction.

    Tokens of weight 0 are not merged. Raises ``HelmscopeError`` for a negative radius, and if a cluster extends
    around the sphere so that it has no mean direction.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> merge_tokens(x, 1e-6).distinct()
    (tensor([[1., 0.],
            [0., 1.]]), tensor([2., 1.]))
    """
    max_angle = check_real("max_angle", max_angle, at_least=0)
    checked = check_weights(check_tokens(x), weights, None)
    masses = torch.ones_like(x[..., 0]) if checked is None else checked
    return merge_close(x, masses, max_angle, close_pairs(x, masses, max_angle))


def close_pairs(x: Tensor, weights: Tensor, max_angle: float) -> Bool[Tensor, "*batch n n"]:
    """Which tokens of positive weight are at most ``max_angle`` radians apart; each of them is close to itself.

    >>> close_pairs(torch.eye(2), torch.tensor([1.0, 0.0]), 0.1)
    tensor([[ True, False],
            [False, False]])
    """
    weighted = weights > 0
    return (pairwise_angles(x.detach()) <= max_angle) & weighted.unsqueeze(-1) & weighted.unsqueeze(-2)


@full_precision
def merge_close(x: Tensor, weights: Tensor, max_angle: float, close: Tensor) -> MergedTokens:
    """``merge_tokens`` for known ``close_pairs``, unchecked."""
    leader = components(close)
    member = (leader.unsqueeze(-2) == torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)).to(x)
    mass = member @ weights.unsqueeze(-1)
    total = member @ (weights.unsqueeze(-1) * x)
    alone = member.sum(-1, keepdim=True) <= 1  # a token that is not merged keeps its state exactly
    undirected = torch.linalg.vector_norm(total.detach(), dim=-1, keepdim=True) < 1e-6 * mass
    if bool((undirected & ~alone).any()):
        raise HelmscopeError(
            f"max_angle is {max_angle:g}, but it links tokens all around the sphere, which have no mean direction"
        )
    states = torch.where(alone, x, retract(torch.where(alone, x, total)))
    index = leader.unsqueeze(-1).expand_as(x)
    return MergedTokens(states.gather(-2, index), mass.squeeze(-1), leader)
