"""Fewer dimensions where rotations change nothing.

A flow with B and V multiples of I commutes with rotations, so tokens stay in the span of their start. With X = L Q,
L (n x n) lower triangular and the rows of Q (n x d) orthonormal, the flow of X is that of L, turned by Q: n tokens in
R^d cost what they cost in R^n, exactly. (The Gram matrix alone would do in exact arithmetic, but rounding drives it out
of the cone of Gram matrices near antipodal tokens.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.kernel import may_be_differentiated
from helmscope.solve.events import ClusterMerge, HittingTime

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.problem import Problem


@dataclass(frozen=True, eq=False)
class Span:
    """A problem in the span of its start, and the frame that leads back."""

    problem: Problem
    frame: Float[Tensor, "systems n d"]

    @full_precision
    def lift(self, states: Float[Tensor, "time systems n n"]) -> Float[Tensor, "time systems n d"]:
        """L(t) Q."""
        return torch.stack([state @ self.frame for state in states])


def in_span(problem: Problem) -> Span | None:
    """The problem in R^n where it is one of 1 < n < d tokens whose flow commutes with rotations, without noise, without
    gradient, and whose events are read off inner products; else None.
    """
    start = problem.start
    n, d = start.shape[-2:]
    known = all(isinstance(event, HittingTime | ClusterMerge) for event in problem.events)
    if not 1 < n < d or problem.noise is not None or may_be_differentiated(start) or not known:
        return None
    field = problem.field.restricted(n)
    if field is None:
        return None
    q, r = torch.linalg.qr(start.mT)
    return Span(replace(problem, field=field, start=_equal_again(start, r.mT.contiguous())), q.mT.contiguous())


def _equal_again(x: Float[Tensor, "systems n d"], small: Float[Tensor, "systems n n"]) -> Tensor:
    """Tokens that are equal to the bit stay so: where they repel, a difference in the last bit would part them."""
    near = torch.cdist(small, small, compute_mode="donot_use_mm_for_euclid_dist") < 1e-6
    for system, i, j in near.tril(-1).nonzero().tolist():
        if torch.equal(x[system, i], x[system, j]):
            small[system, i] = small[system, j]
    return small
