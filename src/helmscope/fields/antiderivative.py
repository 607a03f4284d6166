"""First and second antiderivatives of a density on [0, inf), to rounding, and functions with a given derivative.

    m(u) = u^p g(u),    P(a) = int_0^a m = a^(p+1) h(a),    Q(a) = int_0^a P = a^(p+2) k(a)
    h(a) = int_0^1 v^p g(a v) dv,    k(a) = int_0^1 v^p (1 - v) g(a v) dv

g is smooth and positive, hence so are h and k, and their quadrature has no cancellation: P and Q keep their relative
accuracy down to a = 0. h and k are tabulated as Chebyshev series on panels of equal width up to a cut-off, beyond which
m equals its limit. In float32 a series ends with its cubic term: the next one is below 9e-8 of the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import forward_ad

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

PANELS_PER_UNIT = 8  # a power of two, so that the position within a panel has no rounding error
BLOCK = 2**14  # numbers evaluated per pass
TERMS = 10  # if poles are at least pi from the real axis, as for tanh(z / 2), the first omitted term is below 1e-17
SINGLE_TERMS = 4  # in float32
PIECES, NODES = 16, 24  # the quadrature on [0, 1]: panels, and nodes per panel

Elementwise = Callable[["Tensor"], "Tensor"]


def with_derivative(z: Float[Tensor, "*shape"], value: Elementwise, derivative: Elementwise) -> Float[Tensor, "*shape"]:
    """value(z), elementwise, with exactly derivative(z) as its derivative under autograd and torch.func.

    ``value`` need not be differentiable. ``derivative`` is only called for derivatives and may itself use
    ``with_derivative``, so that higher derivatives work too. Raises ``HelmscopeError`` unless ``z`` is a float tensor.

    >>> cube = lambda z: with_derivative(z, lambda u: u * u * u, lambda u: 3 * u * u)
    >>> torch.func.vmap(torch.func.grad(cube))(torch.tensor([1.0, 2.0]))
    tensor([ 3., 12.])
    """
    if not isinstance(z, torch.Tensor) or not z.is_floating_point():
        kind = z.dtype if isinstance(z, torch.Tensor) else type(z).__name__
        raise HelmscopeError(f"z is of type {kind}, but it must be a torch tensor of real floating-point numbers")
    result: Tensor = _WithDerivative.apply(z, value, derivative)  # type: ignore[no-untyped-call]
    return result


class _WithDerivative(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor, value: Elementwise, derivative: Elementwise) -> Tensor:
        return value(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Elementwise, Elementwise], output: Tensor) -> None:
        z, _, ctx.derivative = inputs
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.derivative(*ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        # torch disables forward mode here at all levels, so that a nested jvp would be 0 (pytorch issue 197867)
        with forward_ad._set_fwd_grad_enabled(True):
            z = forward_ad.unpack_dual(*ctx.saved_tensors).primal  # type: ignore[no-untyped-call]
            change: Tensor = tangent * ctx.derivative(z)
        return change

    @staticmethod
    def vmap(
        info: object, in_dims: tuple[int, None, None], z: Tensor, value: Elementwise, derivative: Elementwise
    ) -> tuple[Tensor, int]:
        return with_derivative(z, value, derivative), in_dims[0]


@dataclass(frozen=True, eq=False)
class Antiderivatives:
    """The antiderivatives P and Q of a density m that equals ``limit`` beyond ``cut``.

    They take and return float64, or float32 at a sixth of the time, accurate to a few units of relative rounding error;
    NaN for NaN.

    >>> exponential = tabulate(lambda u: torch.exp(-u), power=0, cut=40.0, limit=0.0)
    >>> exponential.once(torch.tensor([0.0, 1.0, torch.inf], dtype=torch.float64))
    tensor([0.0000, 0.6321, 1.0000], dtype=torch.float64)
    """

    h: Float[Tensor, "terms panels"]
    k: Float[Tensor, "terms panels"]
    power: int
    cut: float
    limit: float
    edge: float  # P(cut)

    def once(self, a: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """P(a) for a >= 0: from the table up to the cut-off, and a straight line of slope ``limit`` beyond it."""
        within = a.clamp(max=self.cut)
        table = math.prod([within] * (self.power + 1), start=clenshaw(self.h, within))
        return table + self.limit * (a - within) if self.limit else table

    def twice(self, a: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Q(a) for a >= 0: from the table up to the cut-off, and the integral of that line beyond it."""
        within = a.clamp(max=self.cut)
        table = math.prod([within] * (self.power + 2), start=clenshaw(self.k, within))
        beyond = a - within
        # a limit of 0 is skipped, because 0 times an infinite a would be NaN
        return table + beyond * (self.edge + self.limit / 2 * beyond if self.limit else self.edge)


def tabulate(
    density: Elementwise, *, power: int, cut: float, limit: float, device: torch.device | None = None
) -> Antiderivatives:
    """Tabulate the antiderivatives of m(u) = u^power density(u) on [0, cut]; beyond it m equals ``limit`` to rounding.

    ``density`` maps float64 tensors on the CPU elementwise, and must be positive, and analytic near the real line.
    ``cut`` must be an integer.

    >>> tabulate(torch.ones_like, power=0, cut=1.0, limit=1.0).twice(torch.tensor([2.0, 4.0], dtype=torch.float64))
    tensor([2., 8.], dtype=torch.float64)
    """
    panels = round(cut * PANELS_PER_UNIT)
    points, _ = _chebyshev(NODES)
    v = (np.arange(PIECES)[:, None] + points) / PIECES
    nodes = (np.arange(panels)[:, None] + _chebyshev(TERMS)[0]) / PANELS_PER_UNIT
    integrand = density(torch.from_numpy(nodes[..., None, None] * v)).numpy() * v**power * _fejer(NODES) / PIECES
    # NumPy sums, not matrix products, whose rounding would depend on the number of threads
    h, k = (_chebyshev_series(values.sum((-2, -1))).to(device) for values in (integrand, integrand * (1 - v)))
    edge = cut ** (power + 1) * float(h[:, -1].sum())
    return Antiderivatives(h, k, power, cut, limit, edge)


def _chebyshev(n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The n Chebyshev points on [0, 1], and the matrix that maps values there to the coefficients of T_k."""
    angles = np.pi * (np.arange(n) + 0.5) / n
    order = np.arange(n)[:, None]
    return (np.cos(angles) + 1) / 2, np.cos(order * angles) * np.where(order, 2, 1) / n


def _fejer(n: int) -> NDArray[np.float64]:
    """Quadrature weights on [0, 1] at the Chebyshev points: the integral of T_k is 1 / (1 - k^2) for even k, else 0.

    NumPy's Gauss-Legendre rule would need half as many nodes, but its weights have errors of 1e-15.
    """
    even = np.arange(0, n, 2)
    weights: NDArray[np.float64] = (_chebyshev(n)[1][even] / (1 - even**2)[:, None]).sum(0)
    return weights


def _chebyshev_series(values: NDArray[np.float64]) -> Float[Tensor, "terms panels"]:
    """Chebyshev coefficients of every panel from its row of values at the Chebyshev points."""
    base = values[:, 0]  # subtracted so that the rounding of the cosines affects only the variation
    coefficients = (_chebyshev(TERMS)[1][:, None] * (values - base[:, None])).sum(-1)
    coefficients[0] += base
    return torch.from_numpy(coefficients)


def clenshaw(coefficients: Float[Tensor, "terms panels"], a: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Evaluate sum_k c_k T_k(t) with the coefficients of the panel that contains a >= 0, t in [-1, 1] within the panel.

    The panels are [0, 1/8], [1/8, 1/4] and so on; values beyond the last one are not allowed and not checked. If a is
    float32 and the coefficients are not, only the terms up to the cubic one are used.

    >>> clenshaw(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0.0, 1 / 16, 1 / 8]))
    tensor([ 2., -2.,  6.])
    """
    blocks = torch.split(a.reshape(-1), BLOCK)  # small enough to stay in the cache during a dozen passes
    if a.dtype == torch.float32 and coefficients.dtype == torch.float64:
        coefficients = coefficients[:SINGLE_TERMS].float()
    return torch.cat([_clenshaw_block(coefficients, block) for block in blocks]).reshape(a.shape)


def _clenshaw_block(coefficients: Tensor, a: Float[Tensor, " block"]) -> Float[Tensor, " block"]:
    position = a * PANELS_PER_UNIT
    panel = position.long().clamp(0, coefficients.shape[1] - 1)  # any panel will do for NaN, where t is NaN
    t = 2 * (position - panel) - 1
    twice = 2 * t
    *lower, last = coefficients.unbind()
    current, previous = last.index_select(0, panel), torch.zeros_like(t)
    for row in lower[:0:-1]:
        current, previous = row.index_select(0, panel) + (twice * current - previous), current
    return lower[0].index_select(0, panel) + (t * current - previous)
