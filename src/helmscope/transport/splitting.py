"""One step of a reference process dX = b dt + sqrt(2 Sigma) dW, of any length s, by Strang splitting.

With the flow Phi of b and the density p_s of the diffusion (``diffusion``), the potential phi of a bridge satisfies

    phi_t(x) = int p_s(z, w) phi_(t+s)(Phi_(s/2)(w)) dw,    z = Phi_(s/2)(x):

flow for s/2, diffusion for s, flow for s/2. The error is of the order s^3, and 0 without drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry import surface
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import project, retract

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.diffusion import Diffusion

_BLOCK = 2**20  # pairs of points that are computed at a time
_CANCELLED = 1e-9  # a sum below this share of the sum of its absolute values is lost


@dataclass(frozen=True, eq=False)
class Drift:
    """The flow Phi of a drift b(x, t) of single points, by steps of the classical Runge-Kutta method of at most
    ``max_step``. ``velocity`` is None for b = 0.
    """

    velocity: Callable[[Tensor, float], Tensor] | None
    on_sphere: bool
    max_step: float

    def flow(self, x: Float[Tensor, "n d"], start: float, end: float) -> Float[Tensor, "n d"]:
        """Phi from time ``start`` to time ``end``, which may be earlier; differentiable."""
        if self.velocity is None or start == end:
            return x
        steps = max(1, math.ceil(abs(end - start) / self.max_step - 1e-9))
        h = (end - start) / steps
        for k in range(steps):
            x = self._runge_kutta(self.velocity, x, start + k * h, h)
        return x

    def _runge_kutta(self, f: Callable[[Tensor, float], Tensor], x: Tensor, t: float, h: float) -> Tensor:
        first = f(x, t)
        second = f(self._onto(x + h / 2 * first), t + h / 2)
        third = f(self._onto(x + h / 2 * second), t + h / 2)
        fourth = f(self._onto(x + h * third), t + h)
        return self._onto(x + h / 6 * (first + 2 * second + 2 * third + fourth))

    def _onto(self, x: Tensor) -> Tensor:
        return retract(x) if self.on_sphere else x

    def pull_back(self, x: Tensor, start: float, end: float, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """DPhi(x)^T gradient(Phi(x)), the gradient of a function of Phi(x) with respect to x."""
        if self.velocity is None or start == end:
            return gradient(x)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            moved = self.flow(leaf, start, end)
            (result,) = torch.autograd.grad(moved, leaf, gradient(moved.detach()))
        return project(x, result) if self.on_sphere else result

    def divergence(self, x: Float[Tensor, "n d"], t: float) -> Float[Tensor, " n"]:
        """div b at points, on the sphere the surface divergence."""
        velocity = self.velocity
        if velocity is None:
            return torch.zeros_like(x[:, 0])
        if self.on_sphere:
            return surface.divergence(lambda points: velocity(points, t), x)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = velocity(leaf, t)
            if not value.requires_grad:
                return torch.zeros_like(x[:, 0])
            rows = [torch.autograd.grad(value[:, k].sum(), leaf, retain_graph=True)[0] for k in range(x.shape[1])]
        return torch.stack([row[:, k] for k, row in enumerate(rows)]).sum(0)


@dataclass(frozen=True, eq=False)
class Stage:
    """A cloud from which phi is evaluated at earlier times: phi_t(x) = sum_l c_l e^{log_scale_l} p_(s+r)(z, w_l), where
    s = ``time`` - t, r = ``spread``, and both flows, from x to z and back to w_l, end at ``time`` - ``depth``.

    If ``divergence`` is given, that of b at the points, which are then at ``time``, the flows end halfway instead. If
    ``contraction`` is given, a rate c, the diffusion lasts for (1 - e^{-2 c s}) / (2 c) in place of s: then it spreads
    as much as it does during s in a flow that contracts at the rate c.
    """

    time: float
    points: Float[Tensor, "m d"]
    depth: float
    spread: float
    coefficients: Float[Tensor, " m"]
    log_scale: Float[Tensor, " m"]
    divergence: Float[Tensor, " m"] | None = None
    contraction: float = 0.0

    def duration(self, t: float) -> float:
        """The time of the diffusion from t to the cloud."""
        s = self.time - t
        return s if self.contraction == 0 else -math.expm1(-2 * self.contraction * s) / (2 * self.contraction)

    def target(self, drift: Drift, t: float) -> tuple[float, Tensor, Tensor | float]:
        """The time at which both flows end, the points w there, and the logarithm of the change of their volumes."""
        if self.divergence is None:
            return self.time - self.depth, self.points, 0.0
        half = (self.time - t) / 2
        return self.time - half, drift.flow(self.points, self.time, self.time - half), -half * self.divergence

    @full_precision
    def evaluate(self, diffusion: Diffusion, drift: Drift, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """log phi_t and its gradient at points x (n, d); NaN where its terms cancel."""
        meeting, w, change = self.target(drift, t)
        s = self.duration(t) + self.spread
        values = []

        def gradient(z: Tensor) -> Tensor:
            blocks = [self._sum(diffusion, part, w, change, s) for part in torch.split(z, max(1, _BLOCK // len(w)))]
            values.append(torch.cat([block[0] for block in blocks]))
            return torch.cat([block[1] for block in blocks])

        pulled = drift.pull_back(x, t, meeting, gradient)
        return values[0], pulled

    @full_precision
    def _sum(
        self, diffusion: Diffusion, z: Tensor, w: Tensor, change: Tensor | float, s: float
    ) -> tuple[Tensor, Tensor]:
        log_p, factor = diffusion.pairs(z, w, s)
        log_terms = log_p + (self.log_scale + change)
        top = log_terms.amax(1, keepdim=True)
        terms = torch.exp(log_terms - top) * self.coefficients
        total = terms.sum(1, keepdim=True)
        total = torch.where(total > _CANCELLED * terms.abs().sum(1, keepdim=True), total, torch.nan)
        shares = terms / total
        value = (top + torch.log(total)).squeeze(1)
        return value, diffusion.gradient(z, w, shares if factor is None else shares * factor, s)

    def log_terms(self, diffusion: Diffusion, drift: Drift, x: Tensor, t: float) -> Tensor:
        """log(e^{log_scale_l} p_(s+r)(z, w_l)), (n, m): for the target, minus log phi_t(x), the logarithms of the
        probabilities with which the bridge goes from x at time t to its points.
        """
        meeting, w, change = self.target(drift, t)
        log_p = diffusion.pairs(drift.flow(x, t, meeting), w, self.duration(t) + self.spread)[0]
        return log_p + (self.log_scale + change)
