"""Twofold antiderivatives of a density on [0, inf), to rounding, and functions that know their own derivative.

    m(u) = u^p g(u),    P(a) = int_0^a m = a^(p+1) h(a),    Q(a) = int_0^a P = a^(p+2) k(a)
    h(a) = int_0^1 v^p g(a v) dv,    k(a) = int_0^1 v^p (1 - v) g(a v) dv

g is smooth and positive, so h and k are, and their quadrature cancels nothing: P and Q keep their relative accuracy
down to a = 0. Chebyshev series of h and k stand on panels of equal width up to a cut-off, where m is at its limit.
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

PANELS_PER_UNIT = 8  # a power of two: the place within a panel is then free of rounding
BLOCK = 2**14  # numbers of one pass
TERMS = 10  # for poles no nearer than pi to the real axis, as of tanh(z / 2): the first left out is below 1e-17
PIECES, NODES = 16, 24  # of the quadrature on [0, 1]

Elementwise = Callable[["Tensor"], "Tensor"]


def with_derivative(z: Float[Tensor, "*shape"], value: Elementwise, derivative: Elementwise) -> Float[Tensor, "*shape"]:
    """value(z), elementwise, whose derivative is derivative(z) to the bit, under autograd and torch.func alike.

    ``value`` need not be differentiable; ``derivative`` is asked only for derivatives, and may be made the same way, so
    that a function and its derivatives form a chain. ``z`` that is no float tensor is a ``HelmscopeError``.

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
        # torch switches forward mode off here, outer levels too, and a nested jvp would be 0 (pytorch issue 197867)
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
    """P and Q of one density m, which equals ``limit`` beyond ``cut``; float64, a few roundings relative, NaN for NaN.

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
        """P(a), a >= 0: from the table up to the cut-off, a straight line of slope ``limit`` from there."""
        within = a.clamp(max=self.cut)
        table = math.prod([within] * (self.power + 1), start=clenshaw(self.h, within))
        return table + self.limit * (a - within) if self.limit else table

    def twice(self, a: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Q(a), a >= 0: from the table up to the cut-off, the integral of that line from there."""
        within = a.clamp(max=self.cut)
        table = math.prod([within] * (self.power + 2), start=clenshaw(self.k, within))
        beyond = a - within
        # without the limit's term where it is 0: times an infinite a it would be NaN
        return table + beyond * (self.edge + self.limit / 2 * beyond if self.limit else self.edge)


def tabulate(
    density: Elementwise, *, power: int, cut: float, limit: float, device: torch.device | None = None
) -> Antiderivatives:
    """The antiderivatives of m(u) = u^power density(u), tabulated on [0, cut]; m is ``limit`` beyond to rounding.

    ``density`` maps float64 tensors on the CPU, positive there and analytic near the real line. ``cut`` is whole.

    >>> tabulate(torch.ones_like, power=0, cut=1.0, limit=1.0).twice(torch.tensor([2.0, 4.0], dtype=torch.float64))
    tensor([2., 8.], dtype=torch.float64)
    """
    panels = round(cut * PANELS_PER_UNIT)
    points, _ = _chebyshev(NODES)
    v = (np.arange(PIECES)[:, None] + points) / PIECES
    places = (np.arange(panels)[:, None] + _chebyshev(TERMS)[0]) / PANELS_PER_UNIT
    integrand = density(torch.from_numpy(places[..., None, None] * v)).numpy() * v**power * _fejer(NODES) / PIECES
    # sums of NumPy, not matrix products: their bits do not depend on the number of threads
    h, k = (_series(part.sum((-2, -1))).to(device) for part in (integrand, integrand * (1 - v)))
    edge = cut ** (power + 1) * float(h[:, -1].sum())
    return Antiderivatives(h, k, power, cut, limit, edge)


def _chebyshev(n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The n Chebyshev points, moved to [0, 1], and the matrix that takes values there to the coefficients of T_k."""
    angles = np.pi * (np.arange(n) + 0.5) / n
    order = np.arange(n)[:, None]
    return (np.cos(angles) + 1) / 2, np.cos(order * angles) * np.where(order, 2, 1) / n


def _fejer(n: int) -> NDArray[np.float64]:
    """Weights of the integral over [0, 1] at the Chebyshev points: that of T_k is 1 / (1 - k^2) for even k, else 0.

    NumPy's Gauss-Legendre rule would need half as many nodes, but its weights are off by 1e-15.
    """
    even = np.arange(0, n, 2)
    weights: NDArray[np.float64] = (_chebyshev(n)[1][even] / (1 - even**2)[:, None]).sum(0)
    return weights


def _series(values: NDArray[np.float64]) -> Float[Tensor, "terms panels"]:
    """Chebyshev coefficients of every panel from its row of values at the points."""
    base = values[:, 0]  # the cosines are rounded: what they multiply should be the variation alone
    coefficients = (_chebyshev(TERMS)[1][:, None] * (values - base[:, None])).sum(-1)
    coefficients[0] += base
    return torch.from_numpy(coefficients)


def clenshaw(coefficients: Float[Tensor, "terms panels"], a: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """sum_k c_k T_k(t) with the coefficients of the panel that holds a >= 0 and t in [-1, 1] the place within it.

    The first panel is [0, 1/8], the second [1/8, 1/4] and so on; a value past the last is the caller's mistake.

    >>> clenshaw(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0.0, 1 / 16, 1 / 8]))
    tensor([ 2., -2.,  6.])
    """
    blocks = torch.split(a.reshape(-1), BLOCK)  # a dozen passes over each, and they stay in the cache
    return torch.cat([_clenshaw(coefficients, block) for block in blocks]).reshape(a.shape)


def _clenshaw(coefficients: Tensor, a: Float[Tensor, " block"]) -> Float[Tensor, " block"]:
    place = a * PANELS_PER_UNIT
    panel = place.long().clamp(0, coefficients.shape[1] - 1)  # NaN has no panel: any will do, t is NaN
    t = 2 * (place - panel) - 1
    twice = 2 * t
    *lower, last = coefficients.unbind()
    now, before = last.index_select(0, panel), torch.zeros_like(t)
    for row in lower[:0:-1]:
        now, before = row.index_select(0, panel) + (twice * now - before), now
    return lower[0].index_select(0, panel) + (t * now - before)
