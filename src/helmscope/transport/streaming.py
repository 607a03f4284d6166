"""Log-sum-exps and sums over all pairs of two clouds, without a matrix of all pairs.

    lse_i = log sum_j e^{h_j - c_ij / epsilon},        c_ij = dist(x_i, y_j)^p.

For the squared Euclidean or chordal distance the exponent is an attention logit with one more coordinate,

    h_j - |x_i - y_j|^2 / epsilon = <(2 x_i / epsilon, 1), (y_j, h_j - |y_j|^2 / epsilon)> - |x_i|^2 / epsilon,

so that a block of pairs is one matrix product. With a guess s_i of lse_i, such as its value in the previous iteration
of Sinkhorn, it is sum_j 2^{(l_ij - s_i) log2 e} up to a factor that neither overflows nor underflows: the guess is
another coordinate of the product, and no maximum is needed. Rows where the guess was too far off are summed again with
a running maximum. Exponentials are powers of 2, which torch computes about three times faster than powers of e.

The attention kernels of ``helmscope.kernels`` compute a weighted mean together with its normalization, a second matrix
product that Sinkhorn does not need, and take no guess; so the sum has its own loop here. Up to ``MAX_STORED`` pairs the
matrix of costs is stored, which saves recomputing it in every iteration.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.transport.cost import Chordal, Euclidean

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.cost import Cost

MAX_STORED = 2**22  # pairs
LOG2_E = math.log2(math.e)
HIDDEN = -1e30  # the logarithm of weight 0: finite, because -inf minus -inf is NaN
BLOCK = {"cpu": (256, 512), "cuda": (4_096, 8_192)}  # rows and columns; on a CPU they fit in the L2 cache
MAX_COORDINATES = 2**22  # of differences x_i - y_j in one block, for costs that are not computed by a product
LARGEST_SUM = {torch.float32: 2.0**100, torch.float64: 2.0**900}  # beyond it, or below its inverse, a guess has failed


def log_weights(weights: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The logarithm of weights, ``HIDDEN`` for weight 0.

    >>> log_weights(torch.tensor([1.0, 0.0]))
    tensor([ 0.0000e+00, -1.0000e+30])
    """
    return torch.where(weights > 0, weights, 1.0).log().masked_fill(weights <= 0, HIDDEN)


@dataclass(frozen=True, eq=False)
class PairwiseCost:
    """The costs c_ij = dist(x_i, y_j)^p of all pairs of two clouds, as an operator; a constant to autograd.

    ``stored`` is the matrix of costs, or None to compute it block by block. ``PairwiseCost.of`` chooses.

    >>> from helmscope.transport.cost import Euclidean
    >>> costs = PairwiseCost.of(torch.zeros(1, 1), torch.tensor([[0.0], [2.0]]), Euclidean())
    >>> costs.log_sum_exp(torch.zeros(2), epsilon=4.0).exp()
    tensor([1.3679])
    """

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "m d"]
    cost: Cost
    p: float = 2.0
    stored: Float[Tensor, "n m"] | None = None

    @classmethod
    def of(
        cls, x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], cost: Cost, p: float = 2.0, *, stored: bool | None = None
    ) -> PairwiseCost:
        """The costs between two clouds, stored if there are at most ``MAX_STORED`` pairs or as ``stored`` says."""
        x, y = x.detach(), y.detach()
        costs = cls(x, y, cost, p)
        if costs.is_squared:  # products of long vectors lose digits, and differences do not depend on the origin
            center = torch.zeros_like(y[0]) if cost.on_sphere else y.mean(0)
            costs = cls(x - center, y - center, cost, p)
        if not (len(x) * len(y) <= MAX_STORED if stored is None else stored):
            return costs
        matrix = x.new_empty(len(x), len(y))
        for rows, columns in costs._difference_blocks():
            matrix[rows, columns] = costs.power(cost.matrix(x[rows], y[columns]))
        return cls(costs.x, costs.y, cost, p, matrix)

    @property
    def is_squared(self) -> bool:
        """Whether c_ij = |x_i - y_j|^2, which is a matrix product."""
        return self.p == 2 and isinstance(self.cost, Euclidean | Chordal)

    @cached_property
    def transposed(self) -> PairwiseCost:
        """The costs c_ji with the clouds exchanged."""
        stored = None if self.stored is None else self.stored.mT.contiguous()
        return PairwiseCost(self.y, self.x, self.cost, self.p, stored)

    def power(self, distance: Tensor) -> Tensor:
        """dist^p."""
        return distance.square() if self.p == 2 else distance if self.p == 1 else distance**self.p

    def subset(self, rows: Tensor, columns: Tensor) -> PairwiseCost:
        """The costs between some points of x and some of y."""
        return PairwiseCost.of(self.x[rows], self.y[columns], self.cost, self.p)

    # Sums over y for each point of x ----------------------------------------------------------------------------------

    def log_sum_exp(
        self, h: Float[Tensor, " m"], *, epsilon: float, guess: Float[Tensor, " n"] | None = None
    ) -> Float[Tensor, " n"]:
        """log sum_j e^{h_j - c_ij / epsilon}; a ``guess`` of the result makes it faster."""
        if self.stored is not None:
            return torch.logsumexp(torch.add(h, self.stored, alpha=-1 / epsilon), -1)
        if not self.is_squared:
            return self._blockwise_log_sum_exp(h, epsilon)
        scale = LOG2_E / epsilon
        query, own = 2 * scale * self.x, scale * self.x.square().sum(-1)
        bias = LOG2_E * h - scale * self.y.square().sum(-1)
        start = None if guess is None else LOG2_E * guess + own
        return (_log2_sum_exp2(query, self.y, bias, start) - own) / LOG2_E

    def mean_cost(
        self, h: Float[Tensor, " m"], *, epsilon: float, guess: Float[Tensor, " n"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The log-sum-exp, and the mean of c_ij under the weights e^{h_j - c_ij / epsilon}, for each i."""
        if self.stored is None and self.is_squared and _uses_triton(self.x):
            from helmscope.transport.streaming_triton import log2_sum_exp2

            scale = LOG2_E / epsilon
            squares, own = scale * self.y.square().sum(-1), scale * self.x.square().sum(-1)
            result, mean = log2_sum_exp2(2 * scale * self.x, self.y, LOG2_E * h - squares, None, squares)
            assert mean is not None
            return (result - own) / LOG2_E, (own - mean) / scale
        lse = self.log_sum_exp(h, epsilon=epsilon, guess=guess)
        mean = torch.zeros_like(lse)
        for rows, columns, block in self._blocks():
            terms = _terms(h[columns], -lse[rows], block, epsilon)
            mean[rows] += terms.mul_(block).sum(-1)
        return lse, mean

    @full_precision
    def couple(
        self, h: Float[Tensor, " m"], shift: Float[Tensor, " n"], values: Float[Tensor, "m k"], *, epsilon: float
    ) -> Float[Tensor, "n k"]:
        """sum_j e^{h_j + shift_i - c_ij / epsilon} values_j."""
        total = values.new_zeros(len(self.x), values.shape[-1])
        for rows, columns, block in self._blocks():
            total[rows] += _terms(h[columns], shift[rows], block, epsilon) @ values[columns]
        return total

    def gradient(self, h: Float[Tensor, " m"], shift: Float[Tensor, " n"], *, epsilon: float) -> Float[Tensor, "n d"]:
        """d/dx_i of sum_j pi_ij c(x_i, y_j) with pi_ij = e^{h_j + shift_i - c_ij / epsilon} held constant."""
        if self.is_squared:
            sums = self.couple(h, shift, torch.cat([self.y, torch.ones_like(self.y[:, :1])], -1), epsilon=epsilon)
            return 2 * (sums[:, -1:] * self.x - sums[:, :-1])
        gradient = torch.zeros_like(self.x)
        for rows, columns in self._difference_blocks():
            with torch.enable_grad():
                x = self.x[rows].detach().requires_grad_()
                block = self.power(self.cost.matrix(x, self.y[columns]))
                terms = torch.exp(h[columns] + shift[rows, None] - block.detach() / epsilon)
                gradient[rows] += torch.autograd.grad((terms * block).sum(), x)[0]
        return gradient

    def _blockwise_log_sum_exp(self, h: Tensor, epsilon: float) -> Tensor:
        highest, total = torch.full_like(self.x[:, 0], -torch.inf), torch.zeros_like(self.x[:, 0])
        for rows, columns, block in self._blocks():
            logits = torch.add(h[columns], block, alpha=-1 / epsilon)
            higher = torch.maximum(highest[rows], logits.amax(-1))
            sums = torch.exp(logits - higher[:, None]).sum(-1)
            total[rows] = total[rows] * torch.exp(highest[rows] - higher) + sums
            highest[rows] = higher
        return highest + total.log()

    def _blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """All blocks of the matrix of costs."""
        if self.stored is not None:
            yield slice(0, len(self.x)), slice(0, len(self.y)), self.stored
        elif self.is_squared:
            row_size, column_size = BLOCK[self.x.device.type]
            for rows in _slices(len(self.x), row_size):
                for columns in _slices(len(self.y), column_size):
                    yield rows, columns, _squared_distances(self.x[rows], self.y[columns])
        else:
            for rows, columns in self._difference_blocks():
                yield rows, columns, self.power(self.cost.matrix(self.x[rows], self.y[columns]))

    def _difference_blocks(self) -> Iterator[tuple[slice, slice]]:
        """Blocks with at most ``MAX_COORDINATES`` coordinates of differences."""
        size = max(1, math.isqrt(MAX_COORDINATES // self.x.shape[-1]))
        for rows in _slices(len(self.x), size):
            for columns in _slices(len(self.y), size):
                yield rows, columns


@full_precision
def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    squares = x.square().sum(-1, keepdim=True) + y.square().sum(-1)
    return squares.addmm_(x, y.mT, alpha=-2).clamp_(min=0)


def _terms(h: Tensor, shift: Tensor, costs: Tensor, epsilon: float) -> Tensor:
    """e^{h_j + shift_i - c_ij / epsilon} of a block."""
    logits = torch.add(LOG2_E * h, costs, alpha=-LOG2_E / epsilon)
    return logits.add_(LOG2_E * shift[:, None]).exp2_()


def _slices(n: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]


def _uses_triton(x: Tensor) -> bool:
    """Whether the GPU kernel applies: float32 on a CUDA device, with triton installed."""
    return x.is_cuda and x.dtype == torch.float32 and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _log2_sum_exp2(query: Tensor, key: Tensor, bias: Tensor, guess: Tensor | None) -> Float[Tensor, " n"]:
    """log2 sum_j 2^{<query_i, key_j> + bias_j}, with the guess where it is close enough."""
    sums: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = _blockwise_log2_sum_exp2
    if _uses_triton(query):
        from helmscope.transport.streaming_triton import log2_sum_exp2

        def sums(query: Tensor, key: Tensor, bias: Tensor, guess: Tensor | None) -> Tensor:
            return log2_sum_exp2(query, key, bias, guess)[0]

    if guess is None:
        return sums(query, key, bias, None)
    result = sums(query, key, bias, guess)
    # NaN compares as false, so that sums that overflowed are repeated as well
    missed = ~((result - guess).abs() <= math.log2(LARGEST_SUM[query.dtype]))
    if bool(missed.any()):
        result[missed] = sums(query[missed], key, bias, None)
    return result


@full_precision
def _blockwise_log2_sum_exp2(query: Tensor, key: Tensor, bias: Tensor, guess: Tensor | None) -> Float[Tensor, " n"]:
    """The same on any device: relative to the guess, or if it is None to the running maximum."""
    rows, columns = BLOCK[query.device.type]
    shift = torch.zeros_like(query[:, :1]) if guess is None else -guess[:, None]
    query = torch.cat([query, torch.ones_like(shift), shift], -1)
    key = torch.cat([key, bias[:, None], torch.ones_like(bias[:, None])], -1)
    blocks = [key[part].mT.contiguous() for part in _slices(len(key), columns)]
    buffer = query.new_empty(min(rows, len(query)) * min(columns, len(key)))
    results = []
    for part in [query[part] for part in _slices(len(query), rows)]:
        highest, total = torch.full_like(part[:, 0], -torch.inf), torch.zeros_like(part[:, 0])
        for block in blocks:
            size = (len(part), block.shape[-1])
            logits = torch.mm(part, block, out=buffer[: math.prod(size)].view(size))
            if guess is None:
                higher = torch.maximum(highest, logits.amax(-1))
                total *= torch.exp2(highest - higher)
                logits -= higher[:, None]
                highest = higher
            total += logits.exp2_().sum(-1)
        results.append(total.log2() + (highest if guess is None else -part[:, -1]))
    return torch.cat(results)
