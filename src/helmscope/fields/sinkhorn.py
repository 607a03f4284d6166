"""Sinkhorn attention: softmax over keys and over queries at once, so that attention moves no mass (source 000-2,
000-11; Sander, Ablin, Blondel & Peyre 2022, arXiv:2110.11773).

    p_ij = m_j e^{l_ij + f_i + g_j},     sum_j p_ij = 1,     sum_i m_i p_ij = m_j.

Given g, the rows fix f: p is the softmax of l_ij + g_j. So Sinkhorn attention is SA with one more bias on each key, and
g alone has to be found. It minimizes a convex function, the dual

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
from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.dense import untransformed_logits
from helmscope.types import HelmscopeError, real_number, whole_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class SinkhornAttention(Softmax):
    """x_i' = P_{x_i} sum_j p_ij V x_j with the bistochastic scaling p of e^{l_ij}, l_ij = beta x_i^T B x_j + bias_ij:
    rows sum to 1, and columns weighted by m reproduce m (source 000-2), so that m_i p_ij couples the measure with
    itself.

    Tokens of weight 0 attend and are not attended to. The scaling is found in the log domain by rounds of one Sinkhorn
    sweep and one damped Newton step on the dual, at most ``max_sweeps`` of them, until the marginal error sum_j |sum_i
    m_i p_ij - m_j| / sum_j m_j is at most ``tol`` or 16 units of rounding and the step at most 0.1. One more Newton
    step, its matrix held constant, brings it to rounding and makes first derivatives exact, those of the implicit
    function; second derivatives are not. A step solves n equations, O(n^3); with B = I about 5 to 10 rounds serve at
    any beta, with a general B about 50 at beta = 100. Where no scaling is found the velocity is NaN, and calling the
    field is refused. Digits are those of p beside 1: an entry of 1e-13 has no relative accuracy.

    ``causal=True`` is refused: the only lower-triangular kernel with rows and columns of sum 1 is the identity. So is,
    at the call, a bias with entries -inf that leaves a pair visible which lies on no cycle of visible pairs, because
    such a pair must carry no mass.

    At equal angles, and so for two tokens, it is SA: ``equiangular`` and ``metastable_time`` hold for it.

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
    max_sweeps: int = field(default=1000, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", number_or_tensor("beta", self.beta, at_least=0))
        object.__setattr__(self, "tol", real_number("tol", self.tol, above=0))
        object.__setattr__(self, "max_sweeps", whole_number("max_sweeps", self.max_sweeps, at_least=1))
        super().__post_init__()
        if self.causal:
            raise HelmscopeError(
                "causal is True, but the only causal bistochastic kernel is the identity, where nobody moves: take SA"
            )

    @property
    def factor(self) -> float | Tensor:
        """beta."""
        return self.beta

    def transform_logits(
        self, pairs: Float[Tensor, "*batch n n"], weights: Tensor | None
    ) -> Float[Tensor, "*batch n n"]:
        """l_ij + g_j, whose softmax is the scaled kernel; NaN in systems where g was not found."""
        m = _measure(pairs, weights)
        dual = self.solve(pairs, weights)
        # one Newton step from a constant: its value is the root, its derivative the implicit one
        kernel = softmax_kernel(pairs + dual.potential.unsqueeze(-2), weights)
        excess = (m.unsqueeze(-2) * kernel.mT.contiguous()).sum(-1) - m
        potential = dual.potential - (dual.response * excess.unsqueeze(-2)).sum(-1)
        return (pairs + potential.unsqueeze(-2)).masked_fill(~dual.found[..., None, None], torch.nan)

    def solve(self, pairs: Float[Tensor, "*batch n n"], weights: Tensor | None) -> Dual:
        """The potential of each system for its logits, a constant to autograd."""
        parts = (pairs.detach(), _measure(pairs, weights).detach(), self.tol, self.max_sweeps)
        return Dual(*_Solver.apply(*parts))  # type: ignore[no-untyped-call]

    def complaint(self, x: Tensor, weights: Tensor | None) -> str:
        dual = self.solve(untransformed_logits(self.request(x, weights, tangent=False)), weights)
        if bool(dual.found.all()):
            return super().complaint(x, weights)
        error = float(dual.error[~dual.found][0])
        if math.isinf(error):
            return (
                "bias holds entries -inf such that no kernel with rows and columns of sum 1 gives weight to every pair "
                "it leaves visible: each must lie on a cycle of visible pairs, and each token see one"
            )
        return (
            f"max_sweeps is {self.max_sweeps}, but the scaling is not found by then, with a marginal error of "
            f"{error:.3g}: raise max_sweeps or tol, lower beta, or let bias hide fewer pairs"
        )


class Dual(NamedTuple):
    """The dual problem of each system, solved or given up."""

    potential: Float[Tensor, "*batch n"]
    response: Float[Tensor, "*batch n n"]  # inverse of the curvature of phi, made regular
    error: Float[Tensor, "*batch"]  # of the marginal; infinite where the pattern of -inf allows no scaling
    found: Bool[Tensor, "*batch"]


class _Solver(torch.autograd.Function):
    """The rounds as one step, closed to autograd; for ``vmap`` they have one more axis of systems."""

    @staticmethod
    def forward(pairs: Tensor, m: Tensor, tol: float, max_sweeps: int) -> Dual:
        return _solve(pairs, m, tol, max_sweeps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, pairs: Tensor, m: Tensor, tol: float, max_sweeps: int) -> Any:
        many = [
            part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            for part, dim in ((pairs, in_dims[0]), (m, in_dims[1]))
        ]
        return _Solver.apply(*many, tol, max_sweeps), (0, 0, 0, 0)  # type: ignore[no-untyped-call]


def _solve(pairs: Tensor, m: Tensor, tol: float, max_sweeps: int) -> Dual:
    """Rounds of a sweep and a damped Newton step. Both lower phi, so they converge where a scaling exists; the sweep is
    quick far from the minimum, Newton near it, also where a sweep crawls (large beta: clusters that hardly talk).
    """
    scaling = _Scaling(pairs, m)
    found = ~scaling.possible  # as good as found: nothing to do
    g = torch.zeros_like(m)
    for _ in range(max_sweeps):
        swept = scaling.columns(scaling.rows(g))
        g = torch.where(found.unsqueeze(-1), g, swept)
        misfit, curvature, error = scaling.look(g)
        step = -scaling.per_root * torch.linalg.solve_ex(curvature, misfit.unsqueeze(-1)).result.squeeze(-1)
        width = step.amax(-1) - step.amin(-1)
        found = found | ((error <= (16 * _rounding(g)).clamp(min=tol)) & (width <= 0.1))
        if bool((found | ~torch.isfinite(error)).all()):  # what is not finite stays so
            break
        # along a step of width w the curvature of phi grows at most like e^w: log(1 + w) of it still goes down
        share = torch.where(width > 0, torch.log1p(width) / width, 1.0)
        g = torch.where(found.unsqueeze(-1), g, g + share.unsqueeze(-1) * step)
    _, curvature, error = scaling.look(g)
    inverse = torch.linalg.inv_ex(curvature).inverse
    response = scaling.per_root.unsqueeze(-1) * inverse * scaling.per_root.unsqueeze(-2)
    return Dual(g, response, torch.where(scaling.possible, error, torch.inf), found & scaling.possible)


def _rounding(g: Tensor) -> Tensor:
    """Of the marginal: beside a large potential it is larger."""
    return torch.finfo(g.dtype).eps * (1 + g.abs().amax(-1))


class _Scaling:
    """a_ij = sqrt(m_i / m_j) p_ij = e^{level_ij + f_i + g_j} among the tokens of positive weight: in this form rows and
    columns look the same, and weights of any size have no part in the condition of the equations. Sums over queries run
    along the last axis of a transposed copy: the last bit of a sum along strides depends on the batch.
    """

    def __init__(self, pairs: Tensor, m: Tensor) -> None:
        self.real = m > 0
        self.half = torch.where(self.real, m, 1.0).log() / 2
        self.root = m.sqrt()
        self.per_root = 1 / torch.where(self.real, self.root, 1.0)
        seen = pairs.masked_fill(~(self.real.unsqueeze(-1) & self.real.unsqueeze(-2)), -torch.inf)
        self.possible = _possible(seen > -torch.inf, self.real)
        top = seen.amax(-1, keepdim=True)  # f takes it up, and large logits keep their digits
        self.level = seen - torch.where(top > -torch.inf, top, 0.0) + self.half.unsqueeze(-1) + self.half.unsqueeze(-2)
        self.across = self.level.mT.contiguous()

    def rows(self, g: Tensor) -> Tensor:
        """f, such that rows of p sum to 1."""
        return self._other(self.level, g)

    def columns(self, f: Tensor) -> Tensor:
        """g, such that columns of p reproduce m."""
        return self._other(self.across, f)

    def _other(self, level: Tensor, potential: Tensor) -> Tensor:
        total = torch.logsumexp(level + (potential + self.half).unsqueeze(-2), -1)
        return torch.where(self.real, self.half - total, 0.0)

    @full_precision
    def look(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sum_i m_i p_ij - m_j) / sqrt(m_j), the curvature of phi in the coordinates sqrt(m_j) g_j, made regular, and
        the marginal error.
        """
        a = torch.exp(self.across + self.rows(g).unsqueeze(-2) + g.unsqueeze(-1))
        column = (self.root.unsqueeze(-2) * a).sum(-1)
        misfit = column - self.root
        share = torch.where(self.real, column * self.per_root, 1.0)
        # a constant added to g changes nothing, and one for each of clusters that hardly talk next to nothing: rounding
        # must not decide on them
        constant = self.root.unsqueeze(-1) * self.root.unsqueeze(-2)
        curvature = torch.diag_embed(share + 1000 * _rounding(g).unsqueeze(-1)) - a @ a.mT + constant
        return misfit, curvature, (self.root * misfit).abs().sum(-1)


def _measure(pairs: Tensor, weights: Tensor | None) -> Tensor:
    """Weights as shares of 1. A weight of 0 has no derivative: nobody sees that token."""
    m = torch.ones_like(pairs[..., 0]) if weights is None else weights.expand(pairs.shape[:-1])
    return torch.where(m > 0, m / m.sum(-1, keepdim=True), 0.0)


@full_precision
def _possible(seen: Tensor, real: Tensor) -> Tensor:
    """Whether every visible pair may carry mass. What flows from i to j must flow back, as every token gives as much as
    it gets: the pair lies on a cycle. And every token gives something.
    """
    if bool((seen | ~(real.unsqueeze(-1) & real.unsqueeze(-2))).all()):
        return real.any(-1)
    n = seen.shape[-1]
    reach = seen | torch.eye(n, dtype=torch.bool, device=seen.device)
    for _ in range(max(1, math.ceil(math.log2(n)))):
        reach = (reach.float() @ reach.float()) > 0
    one_way = (seen & ~reach.mT).any(-1).any(-1)
    silent = (real & ~seen.any(-1)).any(-1)
    return ~(one_way | silent)
