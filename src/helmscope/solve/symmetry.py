"""Dimension reduction for flows that commute with rotations.

If B and V are multiples of I the flow commutes with rotations, so tokens stay in the span of their initial states. With
X = L Q, where L (n x n) is lower triangular and the rows of Q (n x d) are orthonormal, the flow of X is that of L
rotated by Q: n tokens in R^d cost as much as in R^n, and the result is exact. (In exact arithmetic the Gram matrix
would suffice, but near antipodal tokens rounding makes it indefinite.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.request import may_be_differentiated
from helmscope.solve.events import ClusterMerge, HittingTime

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.problem import Problem


@dataclass(frozen=True, eq=False)
class Span:
    """A problem in the span of its initial states, and the orthonormal frame Q of that span."""

    problem: Problem
    frame: Float[Tensor, "systems n d"]

    @full_precision
    def lift(self, states: Float[Tensor, "time systems n n"]) -> Float[Tensor, "time systems n d"]:
        """Map states of the reduced problem to R^d: L(t) Q."""
        return torch.stack([state @ self.frame for state in states])


def in_span(problem: Problem) -> Span | None:
    """The problem reduced to R^n, if it has 1 < n < d tokens, a flow that commutes with rotations, no noise and no
    gradient, and if its events depend on inner products only; otherwise None.
    """
    start = problem.start
    n, d = start.shape[-2:]
    invariant_events = all(isinstance(event, HittingTime | ClusterMerge) for event in problem.events)
    if not 1 < n < d or problem.noise is not None or may_be_differentiated(start) or not invariant_events:
        return None
    field = problem.field.restricted(n)
    if field is None:
        return None
    q, r = torch.linalg.qr(start.mT)
    return Span(replace(problem, field=field, start=_restore_equal_tokens(start, r.mT.contiguous())), q.mT.contiguous())


def _restore_equal_tokens(x: Float[Tensor, "systems n d"], small: Float[Tensor, "systems n n"]) -> Tensor:
    """Restore the equality of tokens that were equal: if they repel each other, rounding would separate them."""
    near = torch.cdist(small, small, compute_mode="donot_use_mm_for_euclid_dist") < 1e-6
    for system, i, j in near.tril(-1).nonzero().tolist():
        if torch.equal(x[system, i], x[system, j]):
            small[system, i] = small[system, j]
    return small
