"""Sinkhorn attention: softmax over keys and over queries at once, so that the kernel is bistochastic ([Helmholtz
Transformer, no. 2 and 11]; Sander, Ablin, Blondel & Peyre 2022, arXiv:2110.11773).

    p_ij = m_j e^{l_ij + f_i + g_j},     sum_j p_ij = 1,     sum_i m_i p_ij = m_j.

Given g, the row sums determine f: p is the softmax of l_ij + g_j. So Sinkhorn attention is SA with an additional bias
on each key, and only g is unknown. It minimizes a convex function, the dual

    phi(g) = sum_i m_i log sum_j m_j e^{l_ij + g_j} - sum_j m_j g_j,     d phi / d g_j = sum_i m_i p_ij - m_j.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from helmscope.fields.attention import Softmax, softmax_kernel
from helmscope.fields.parameters import number_or_tensor
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.dense import untransformed_logits
from helmscope.types import HelmscopeError, check_integer, check_real

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class SinkhornAttention(Softmax):
    """Attention with doubly stochastic weights: x_i' = P_{x_i} sum_j p_ij V x_j with the bistochastic scaling p of
    e^{l_ij}, l_ij = beta x_i^T B x_j + bias_ij: rows sum to 1, and columns weighted by m reproduce m [Helmholtz
    Transformer, no. 2], so that m_i p_ij couples the measure with itself.

    Tokens of weight 0 attend but are not attended to. The scaling is computed in the log domain by alternating one
    Sinkhorn sweep and one damped Newton step on the dual, at most ``max_iterations`` times, until the marginal error
    sum_j |sum_i m_i p_ij - m_j| / sum_j m_j is at most ``tol`` or 16 units of rounding and the step at most 0.1. One
    more Newton step, with its matrix held constant, reduces the error to rounding and makes first derivatives exact, by
    the implicit function theorem; second derivatives are not exact. A step solves n equations, O(n^3); with B = I about
    5 to 10 iterations suffice at any beta, with a general B about 50 at beta = 100. The accuracy of p is absolute: an
    entry of 1e-13 has no relative accuracy.

    Raises ``HelmscopeError`` for ``causal=True``, because the only lower-triangular kernel with rows and columns of sum
    1 is the identity. Calling the field raises ``HelmscopeError`` if the iteration does not converge (``velocity`` is
    NaN then), or if entries -inf of the bias leave a visible pair that is on no cycle of visible pairs: its weight
    would have to be 0.

    At equal angles, and so for two tokens, it equals SA: ``equiangular`` and ``metastable_time`` apply to it.

    >>> x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    >>> SinkhornAttention(beta=2.0).kernel(x).sum(-2).round(decimals=6)
    tensor([1., 1., 1.])
    >>> SinkhornAttention(beta=0.0)(x[::2])
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """

    parameters: ClassVar[Mapping[str, int]] = {"beta": 0, **Softmax.parameters}

    beta: float | Float[Tensor, "*batch"]
    tol: float = field(default=1e-13, kw_only=True)
    max_iterations: int = field(default=1000, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", number_or_tensor("beta", self.beta, at_least=0))
        object.__setattr__(self, "tol", check_real("tol", self.tol, above=0))
        object.__setattr__(self, "max_iterations", check_integer("max_iterations", self.max_iterations, at_least=1))
        super().__post_init__()
        if self.causal:
            raise HelmscopeError(
                "causal is True, but the only causal bistochastic kernel is the identity, where no token moves: use SA"
            )

    @property
    def logit_factor(self) -> float | Tensor:
        """beta."""
        return self.beta

    def transform_logits(
        self, pairs: Float[Tensor, "*batch n n"], weights: Tensor | None
    ) -> Float[Tensor, "*batch n n"]:
        """l_ij + g_j, whose softmax is the scaled kernel; NaN in systems where the iteration did not converge."""
        m = _normalized_weights(pairs, weights)
        dual = self.solve(pairs, weights)
        # one Newton step from a constant: its value is the root, its derivative that of the implicit function
        kernel = softmax_kernel(pairs + dual.potential.unsqueeze(-2), weights)
        excess = (m.unsqueeze(-2) * kernel.mT.contiguous()).sum(-1) - m
        potential = dual.potential - (dual.response * excess.unsqueeze(-2)).sum(-1)
        return (pairs + potential.unsqueeze(-2)).masked_fill(~dual.converged[..., None, None], torch.nan)

    def solve(self, pairs: Float[Tensor, "*batch n n"], weights: Tensor | None) -> Dual:
        """The dual potential of each system for its logits; a constant to autograd.

        >>> SinkhornAttention(beta=1.0).solve(torch.eye(2)[None], None).converged
        tensor([True])
        """
        arguments = (pairs.detach(), _normalized_weights(pairs, weights).detach(), self.tol, self.max_iterations)
        return Dual(*_Solver.apply(*arguments))  # type: ignore[no-untyped-call]

    def overflow_message(self, x: Tensor, weights: Tensor | None) -> str:
        dual = self.solve(untransformed_logits(self.request(x, weights, tangent=False)), weights)
        if bool(dual.converged.all()):
            return super().overflow_message(x, weights)
        error = float(dual.error[~dual.converged][0])
        if math.isinf(error):
            return (
                "bias holds entries -inf such that no kernel with rows and columns of sum 1 has positive weight at all "
                "visible pairs: each must be on a cycle of visible pairs, and each token must attend to at least one"
            )
        return (
            f"max_iterations is {self.max_iterations}, but the scaling has not converged by then, with a marginal "
            f"error of {error:.3g}: raise max_iterations or tol, lower beta, or mask fewer pairs by bias"
        )


class Dual(NamedTuple):
    """The solution of the dual problem of each system, with its error and whether the iteration converged."""

    potential: Float[Tensor, "*batch n"]
    response: Float[Tensor, "*batch n n"]  # inverse of the regularized Hessian of phi
    error: Float[Tensor, "*batch"]  # of the marginal; infinite if the pattern of -inf admits no scaling
    converged: Bool[Tensor, "*batch"]


class _Solver(torch.autograd.Function):
    """The whole iteration as one non-differentiable function; under ``vmap`` it has one more axis of systems."""

    @staticmethod
    def forward(pairs: Tensor, m: Tensor, tol: float, max_iterations: int) -> Dual:
        return _solve(pairs, m, tol, max_iterations)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, pairs: Tensor, m: Tensor, tol: float, max_iterations: int) -> Any:
        batched = [
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in ((pairs, in_dims[0]), (m, in_dims[1]))
        ]
        return _Solver.apply(*batched, tol, max_iterations), (0, 0, 0, 0)  # type: ignore[no-untyped-call]


def _solve(pairs: Tensor, m: Tensor, tol: float, max_iterations: int) -> Dual:
    """Alternate a sweep and a damped Newton step. Both decrease phi, so they converge if a scaling exists. The sweep is
    fast far from the minimum, Newton near it, also where sweeps are slow (large beta: clusters that hardly interact).
    """
    scaling = _Scaling(pairs, m)
    done = ~scaling.possible  # nothing to solve there
    g = torch.zeros_like(m)
    for _ in range(max_iterations):
        swept = scaling.columns(scaling.rows(g))
        g = torch.where(done.unsqueeze(-1), g, swept)
        misfit, hessian, error = scaling.evaluate(g)
        step = -scaling.per_root * lu.solve_ex(hessian, misfit.unsqueeze(-1)).result.squeeze(-1)
        width = step.amax(-1) - step.amin(-1)
        done = done | ((error <= (16 * _rounding_error(g)).clamp(min=tol)) & (width <= 0.1))
        if bool((done | ~torch.isfinite(error)).all()):  # systems that are not finite stay so
            break
        # along a step of width w the Hessian of phi grows at most like e^w: a length of log(1 + w) still decreases phi
        damping = torch.where(width > 0, torch.log1p(width) / width, 1.0)
        g = torch.where(done.unsqueeze(-1), g, g + damping.unsqueeze(-1) * step)
    _, hessian, error = scaling.evaluate(g)
    inverse = lu.inv_ex(hessian).inverse
    response = scaling.per_root.unsqueeze(-1) * inverse * scaling.per_root.unsqueeze(-2)
    return Dual(g, response, torch.where(scaling.possible, error, torch.inf), done & scaling.possible)


def _rounding_error(g: Tensor) -> Tensor:
    """The rounding error of the marginal, which grows with the potential."""
    return torch.finfo(g.dtype).eps * (1 + g.abs().amax(-1))


class _Scaling:
    """a_ij = sqrt(m_i / m_j) p_ij = e^{level_ij + f_i + g_j} among the tokens of positive weight. In this form rows and
    columns are alike, and the size of the weights does not affect the condition number. Sums over queries run along
    the last axis of a transposed copy, because the rounding of a strided sum depends on the batch.
    """

    def __init__(self, pairs: Tensor, m: Tensor) -> None:
        self.real = m > 0
        self.half_log = torch.where(self.real, m, 1.0).log() / 2
        self.root = m.sqrt()
        self.per_root = 1 / torch.where(self.real, self.root, 1.0)
        visible = pairs.masked_fill(~(self.real.unsqueeze(-1) & self.real.unsqueeze(-2)), -torch.inf)
        self.possible = _scaling_exists(visible > -torch.inf, self.real)
        top = visible.amax(-1, keepdim=True)  # absorbed by f, so that large logits do not lose digits
        self.level = visible - torch.where(top > -torch.inf, top, 0.0)
        self.level = self.level + self.half_log.unsqueeze(-1) + self.half_log.unsqueeze(-2)
        self.level_transposed = self.level.mT.contiguous()

    def rows(self, g: Tensor) -> Tensor:
        """The f for which rows of p sum to 1, given g."""
        return self._balancing_potential(self.level, g)

    def columns(self, f: Tensor) -> Tensor:
        """The g for which weighted columns of p sum to m, given f."""
        return self._balancing_potential(self.level_transposed, f)

    def _balancing_potential(self, level: Tensor, potential: Tensor) -> Tensor:
        total = torch.logsumexp(level + (potential + self.half_log).unsqueeze(-2), -1)
        return torch.where(self.real, self.half_log - total, 0.0)

    @full_precision
    def evaluate(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sum_i m_i p_ij - m_j) / sqrt(m_j), the regularized Hessian of phi in the coordinates sqrt(m_j) g_j, and the
        marginal error.
        """
        a = torch.exp(self.level_transposed + self.rows(g).unsqueeze(-2) + g.unsqueeze(-1))
        column = (self.root.unsqueeze(-2) * a).sum(-1)
        misfit = column - self.root
        ratio = torch.where(self.real, column * self.per_root, 1.0)
        # phi does not change if a constant is added to g, and hardly if a different one is added to each of several
        # clusters that hardly interact: without regularization rounding would determine these constants
        constant = self.root.unsqueeze(-1) * self.root.unsqueeze(-2)
        hessian = torch.diag_embed(ratio + 1000 * _rounding_error(g).unsqueeze(-1)) - a @ a.mT + constant
        return misfit, hessian, (self.root * misfit).abs().sum(-1)


def _normalized_weights(pairs: Tensor, weights: Tensor | None) -> Tensor:
    """Weights normalized to sum 1. A weight of 0 has no derivative, since that token is not attended to."""
    m = torch.ones_like(pairs[..., 0]) if weights is None else weights.expand(pairs.shape[:-1])
    return torch.where(m > 0, m / m.sum(-1, keepdim=True), 0.0)


@full_precision
def _scaling_exists(visible: Tensor, real: Tensor) -> Tensor:
    """Whether a bistochastic kernel with positive weight at every visible pair exists. Mass that flows from i to j must
    flow back, because rows and columns have equal sums: every pair must be on a cycle, and every row must be nonempty.
    """
    if bool((visible | ~(real.unsqueeze(-1) & real.unsqueeze(-2))).all()):
        return real.any(-1)
    n = visible.shape[-1]
    reachable = visible | torch.eye(n, dtype=torch.bool, device=visible.device)
    for _ in range(max(1, math.ceil(math.log2(n)))):
        reachable = (reachable.float() @ reachable.float()) > 0
    one_way = (visible & ~reachable.mT).any(-1).any(-1)
    empty_row = (real & ~visible.any(-1)).any(-1)
    return ~(one_way | empty_row)
