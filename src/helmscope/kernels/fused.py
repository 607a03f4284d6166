"""Many small systems at once: all steps of one system inside one GPU program, its statistics counted on the way.

    SA    x_i' = V P_{x_i} sum_j e^{beta <x_i, x_j>} x_j / Z_i,    Z_i = sum_j e^{beta <x_i, x_j>}        (source 001)
    USA   x_i' = V P_{x_i} sum_j e^{beta <x_i, x_j>} x_j / n

with a number V for each beta, by projected RK4 or Heun in equal steps. The tokens stay in registers from the start to
the last time; what leaves is the number of pairs that have met at every asked time. In float32, with products and sums
of float32 precision. Every exponential is taken of beta (<x_i, x_j> - 1) <= 0, and e^beta / n of USA joins the step
size, so nothing overflows.

Repeats field, stepper and statistic of ``fields``, ``solve`` and ``observe``, to which it is held by its tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.sphere import NORM_TOLERANCE
from helmscope.types import HelmscopeError, increasing_times, real_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

MOST_TOKENS, MOST_DIMENSIONS = 64, 128  # what the registers of one program hold
LEAST_DELTA = 1e-4  # an inner product in float32 is known to about 1e-7
MOST_DISPLACEMENT = 1e15  # whose square, summed over tokens, float32 still holds


@dataclass(frozen=True, eq=False)
class Clustering:
    """How many of the ``pairs`` i < j of a system have met, <x_i, x_j> >= 1 - delta, at every asked time.

    ``lost`` is the index of the first time at which the states of a system are not finite, the number of times where
    all is well; a lost system counts no pair from there on. ``states`` are those at the last time, or where a system
    stopped because all of its pairs had met; None unless asked for.

    >>> Clustering(torch.tensor([[[0, 1], [0, 0]]]), 1, torch.tensor([[2, 1]])).complaint
    'system 1 of beta 0 is not finite from time 1 on: take more steps, or smaller values'
    """

    met: Int[Tensor, "beta sample time"]
    pairs: int
    lost: Int[Tensor, "beta sample"]
    states: Float[Tensor, "beta sample n d"] | None = None

    @property
    def complaint(self) -> str | None:
        """Which systems are lost, by index, in one sentence; None where none is."""
        beta, sample = (index.tolist() for index in (self.lost < self.met.shape[-1]).nonzero(as_tuple=True))
        if not beta:
            return None
        others = len(beta) - 1
        more = f" (and {others} more system{'s' if others > 1 else ''})" if others else ""
        first = f"system {sample[0]} of beta {beta[0]} is not finite from time {int(self.lost[beta[0], sample[0]])} on"
        return f"{first}{more}: take more steps, or smaller values"


@dataclass(frozen=True)
class Tuning:
    """How the kernel is compiled for one size: with matrix ``products``, padded to 16 coordinates, or with sums over
    coordinates, for small d; and the warps of one program.

    >>> tuning(32, 2)
    Tuning(products=False, warps=1)
    """

    products: bool
    warps: int


def tuning(n: int, d: int) -> Tuning:
    """The choice for n tokens in R^d: the fastest on an H200 for n = 32 and d = 2, 8, 16, 32, 64.

    >>> tuning(32, 64)
    Tuning(products=True, warps=2)
    """
    tokens, width = _padded(n, 16), _padded(d, 2)
    warps = min(8, max(1, tokens * max(tokens, width) // 1024))  # a warp holds 1024 pairs or coordinates
    return Tuning(products=width > 8, warps=warps)


def fused_refuses(x0: Float[Tensor, "sample n d"], *, delta: float = 1e-3) -> str | None:
    """Why this kernel does not serve these starts, as the end of a sentence; None where it does.

    On a CPU it serves under Triton's interpreter alone (TRITON_INTERPRET=1), which is for tests.

    >>> fused_refuses(torch.eye(2, dtype=torch.float64)[None])
    'x0 has dtype torch.float64, and it computes in torch.float32'
    """
    n, d = x0.shape[-2:]
    if x0.dtype != torch.float32:
        return f"x0 has dtype {x0.dtype}, and it computes in torch.float32"
    if torch.is_grad_enabled() and x0.requires_grad:
        return "x0 asks for a gradient, and it gives none"
    if n > MOST_TOKENS or d > MOST_DIMENSIONS:
        return f"x0 has n={n} tokens in d={d}, and it takes n <= {MOST_TOKENS} and d <= {MOST_DIMENSIONS}"
    if delta < LEAST_DELTA:
        return f"delta is {delta:g}, and its inner products tell no less than {LEAST_DELTA:g} from 0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (x0.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"x0 is on {x0.device}, and it runs on a CUDA device"
    return None


def fused_clustering(
    x0: Float[Tensor, "sample n d"],
    times: Sequence[float],
    *,
    betas: Float[Tensor, " beta"],
    steps: Int[Tensor, " beta"],
    values: Float[Tensor, " beta"] | None = None,
    order: int = 4,
    normalized: bool = True,
    causal: bool = False,
    delta: float = 1e-3,
    stop: bool = True,
    keep_states: bool = False,
) -> Clustering:
    """Pairs that have met at each of ``times`` in the flows of all ``betas`` from the same starts ``x0``.

    An interval between asked times takes ``steps`` equal steps of RK4 (``order`` 4) or Heun (``order`` 2), for each
    beta its number; USA has rates of e^beta and needs as many. ``values`` are V (1 where None; -1 repels), ``causal``
    lets token i see j <= i. With ``stop`` and V > 0 a system is finished once all of its pairs have met: tokens within
    a right angle of each other draw together for ever (so delta < 1), and all later counts are ``pairs``.

    Bad input is a ``HelmscopeError``, and so is what ``fused_refuses``. A system that leaves the finite numbers touches
    no other and is found in ``lost``.

    >>> one = torch.ones(1)
    >>> fused_clustering(torch.eye(2, dtype=torch.float64)[None], [1.0], betas=one, steps=one.int())
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: the fused kernel does not serve: x0 has dtype torch.float64, and it computes in ...
    """
    delta = real_number("delta", delta, above=0)
    if delta >= 1:
        raise HelmscopeError(f"delta is {delta:g}, but it must be below 1")
    if order not in (2, 4):
        raise HelmscopeError(f"order is {order!r}, but it must be 2 (Heun) or 4 (RK4)")
    _check_starts(x0)
    reason = fused_refuses(x0, delta=delta)
    if reason is not None:
        raise HelmscopeError(f"the fused kernel does not serve: {reason}")
    flows = _flows(x0.shape[1], times, betas, steps, values, normalized)
    task = Task(flows, order, normalized, causal, near=1 - delta, stop=stop, keep_states=keep_states)
    return launch(x0, task, tuning(*x0.shape[1:]))


@dataclass(frozen=True, eq=False)
class Flows:
    """What differs from beta to beta and from interval to interval, checked: in float64 on the CPU."""

    betas: Float[Tensor, " beta"]
    steps: Int[Tensor, " beta"]
    values: Float[Tensor, " beta"]
    scales: Float[Tensor, " beta"]  # what multiplies the sums in one step, over the length of the interval
    spans: Float[Tensor, " time"]


@dataclass(frozen=True, eq=False)
class Task:
    """What is asked of the kernel, checked."""

    flows: Flows
    order: int
    normalized: bool
    causal: bool
    near: float  # the inner product from which on a pair has met
    stop: bool
    keep_states: bool


def launch(x0: Float[Tensor, "sample n d"], task: Task, chosen: Tuning) -> Clustering:
    """``fused_clustering``, unchecked and with a tuning of one's own."""
    fused_kernel = importlib.import_module("helmscope.kernels.fused_triton").fused_kernel
    flows, (samples, n, d), place = task.flows, x0.shape, x0.device
    size, count, pairs = len(flows.betas), len(flows.spans), n * (n - 1) // 2
    # most work first, so that no long system starts last: at a higher beta tokens meet later
    queue = torch.argsort(flows.steps * (1 + flows.betas), descending=True)
    met = torch.full((size, samples, count), pairs, dtype=torch.int32, device=place)
    lost = torch.full((size, samples), count, dtype=torch.int32, device=place)
    ends = torch.empty((size, samples, n, d) if task.keep_states else 1, device=place)
    real = (flows.spans, flows.betas / math.log(2), flows.scales)
    whole = (queue, flows.steps, (flows.values > 0) & task.stop)
    with torch.cuda.device_of(x0):  # type: ignore[no-untyped-call]
        fused_kernel[(size * samples,)](
            x0.detach().contiguous(),
            *(part.to(place, torch.float32) for part in real),
            *(part.to(place, torch.int32) for part in whole),
            *(met, lost, ends, samples, count, task.near, n, d),
            N=_padded(n, 16),
            D=_padded(d, 16 if chosen.products else 2),
            ORDER=task.order,
            NORMALIZED=task.normalized,
            CAUSAL=task.causal,
            KEEP=task.keep_states,
            PRODUCTS=chosen.products,
            num_warps=chosen.warps,
            num_stages=1,
        )
    return Clustering(met, pairs, lost, ends if task.keep_states else None)


def _padded(size: int, least: int) -> int:
    """The power of two from ``least`` on that holds a size."""
    return max(least, 1 << (size - 1).bit_length())


def _check_starts(x0: object) -> None:
    """A tensor (sample, n, d) of unit vectors; what is not finite may pass, its system is lost at the first time."""
    if not isinstance(x0, torch.Tensor) or x0.ndim != 3 or 0 in x0.shape or x0.shape[-1] < 2:
        given = tuple(x0.shape) if isinstance(x0, torch.Tensor) else type(x0).__name__
        raise HelmscopeError(f"x0 is {given}, but it must be a tensor of shape (sample, n, d) with d >= 2")
    norm = torch.linalg.vector_norm(x0.detach(), dim=-1)
    off = torch.isfinite(norm) & ((norm - 1).abs() > NORM_TOLERANCE[torch.float32])
    if bool(off.any()):
        raise HelmscopeError(f"x0 holds a token of norm {float(norm[off][0]):.9g}, but tokens lie on the unit sphere")


def _flows(
    n: int, times: Sequence[float], betas: Tensor, steps: Tensor, values: Tensor | None, normalized: bool
) -> Flows:
    """The flows with their step factors; refuses what float32 does not hold."""
    spans = torch.diff(torch.tensor([0.0, *increasing_times(times)], dtype=torch.float64, device="cpu"))
    betas = _vector("betas", betas, None)
    steps = _vector("steps", steps, len(betas))
    values = torch.ones_like(betas) if values is None else _vector("values", values, len(betas))
    if bool((betas < 0).any()):
        raise HelmscopeError(f"betas holds {float(betas.min()):g}, but every beta must be >= 0")
    if bool(((steps < 1) | (steps != steps.round()) | (steps >= 2**31)).any()):
        raise HelmscopeError(f"steps is {steps.tolist()}, but it must hold whole numbers from 1 to 2^31 - 1")
    scales = values / steps if normalized else values / steps * torch.exp(betas) / n
    farthest = float(scales.abs().max() * spans.max())
    if not farthest <= MOST_DISPLACEMENT:
        raise HelmscopeError(
            f"steps let tokens move by {farthest:.0e} in one step, but it must be at most {MOST_DISPLACEMENT:.0e}"
        )
    return Flows(betas, steps.long(), values, scales, spans)


def _vector(name: str, given: object, size: int | None) -> Tensor:
    """A vector of finite numbers, in float64 on the CPU."""
    if not isinstance(given, torch.Tensor) or given.ndim != 1 or len(given) not in (size or len(given), 0):
        shown = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise HelmscopeError(f"{name} is {shown}, but it must be a vector{f' of {size} numbers' if size else ''}")
    vector = given.detach().to("cpu", torch.float64)
    if not len(vector) or not bool(torch.isfinite(vector).all()):
        raise HelmscopeError(f"{name} is {vector.tolist()}, but it must hold at least one number, all finite")
    return vector
