"""Simulation of many small systems in one GPU launch: one program integrates one system and counts clustered pairs.

    SA    x_i' = V P_{x_i} sum_j e^{beta <x_i, x_j>} x_j / Z_i,    Z_i = sum_j e^{beta <x_i, x_j>}
    USA   x_i' = V P_{x_i} sum_j e^{beta <x_i, x_j>} x_j / n

[Geshkovski et al. 2023], with a scalar V for each beta, by projected RK4 or Heun with equal steps. The tokens stay in
registers from the start to the last time; the output is the number of pairs that have met at each requested time.
Everything is computed in float32. Every exponent is beta (<x_i, x_j> - 1) <= 0, and the factor e^beta / n of USA is
part of the step size, so nothing overflows.

This duplicates the field, the stepper and the statistic of ``fields``, ``solve`` and ``observe``; tests check that the
results agree.
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
from helmscope.types import HelmscopeError, check_real, check_times, type_with_article

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int
    from torch import Tensor

MAX_TOKENS, MAX_DIMENSIONS = 64, 128  # the most that fits in the registers of one program
MIN_DELTA = 1e-4  # inner products in float32 are accurate to about 1e-7
MAX_DISPLACEMENT = 1e15  # its square, summed over tokens, does not overflow in float32


@dataclass(frozen=True, eq=False)
class Clustering:
    """Number of the ``pairs`` i < j of each system that have met, <x_i, x_j> >= 1 - delta, at each requested time.

    ``lost`` is the index of the first time at which the state of a system is not finite, or the number of times if it
    always is; from that time on ``met`` is 0. ``states`` are the final states, at the last time or at the time when all
    pairs had met and the system was stopped; None unless requested.

    >>> Clustering(torch.tensor([[[0, 1], [0, 0]]]), 1, torch.tensor([[2, 1]])).complaint
    'system 1 of beta 0 is not finite from time 1 on: use more steps or smaller values'
    """

    met: Int[Tensor, "beta sample time"]
    pairs: int
    lost: Int[Tensor, "beta sample"]
    states: Float[Tensor, "beta sample n d"] | None = None

    @property
    def complaint(self) -> str | None:
        """One sentence that names the first lost system by its indices; None if no system is lost."""
        beta, sample = (index.tolist() for index in (self.lost < self.met.shape[-1]).nonzero(as_tuple=True))
        if not beta:
            return None
        others = len(beta) - 1
        more = f" (and {others} more system{'s' if others > 1 else ''})" if others else ""
        first = f"system {sample[0]} of beta {beta[0]} is not finite from time {int(self.lost[beta[0], sample[0]])} on"
        return f"{first}{more}: use more steps or smaller values"


@dataclass(frozen=True)
class LaunchConfig:
    """Compile options for one system size: whether to use matrix ``products``, padded to 16 coordinates, or, for small
    d, sums over coordinates; and the number of warps per program.

    >>> tuning(32, 2)
    LaunchConfig(products=False, warps=1)
    """

    products: bool
    warps: int


def tuning(n: int, d: int) -> LaunchConfig:
    """The tuning for n tokens in R^d: the fastest on an H200 for n = 32 and d = 2, 8, 16, 32, 64.

    >>> tuning(32, 64)
    LaunchConfig(products=True, warps=2)
    """
    tokens, width = _next_power_of_two(n, 16), _next_power_of_two(d, 2)
    warps = min(8, max(1, tokens * max(tokens, width) // 1024))  # a warp holds 1024 pairs or coordinates
    return LaunchConfig(products=width > 8, warps=warps)


def fused_refuses(x0: Float[Tensor, "sample n d"], *, delta: float = 1e-3) -> str | None:
    """Why the fused kernel does not support these starts, as the end of a sentence; None if it does.

    On a CPU it runs only under Triton's interpreter (TRITON_INTERPRET=1), for tests.

    >>> fused_refuses(torch.eye(2, dtype=torch.float64)[None])
    'x0 has dtype torch.float64, and it computes in torch.float32'
    """
    n, d = x0.shape[-2:]
    if x0.dtype != torch.float32:
        return f"x0 has dtype {x0.dtype}, and it computes in torch.float32"
    if torch.is_grad_enabled() and x0.requires_grad:
        return "x0 requires a gradient, and it computes none"
    if n > MAX_TOKENS or d > MAX_DIMENSIONS:
        return f"x0 has n={n} tokens in d={d}, and it takes n <= {MAX_TOKENS} and d <= {MAX_DIMENSIONS}"
    if delta < MIN_DELTA:
        return f"delta is {delta:g}, and its inner products resolve no delta below {MIN_DELTA:g}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (x0.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"x0 is on {x0.device}, and it needs a CUDA device"
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
    """Count the pairs that have met at each of ``times``, for the flows of all ``betas`` from the same starts ``x0``.

    Each interval between requested times takes ``steps`` equal steps of RK4 (``order`` 4) or Heun (``order`` 2), with
    one number of steps per beta; the rates of USA are of order e^beta and need proportionally many. ``values`` are the
    scalars V (1 if None; -1 repels). With ``causal``, token i attends to j <= i. With ``stop`` and V > 0 a system is
    stopped once all of its pairs have met, and all later counts are ``pairs``: tokens within a right angle of each
    other keep converging (so delta < 1).

    Raises ``HelmscopeError`` for bad input and for starts that ``fused_refuses``. A system whose state becomes
    non-finite does not affect others and is reported in ``lost``.

    >>> one = torch.ones(1)
    >>> fused_clustering(torch.eye(2, dtype=torch.float64)[None], [1.0], betas=one, steps=one.int())
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: the fused kernel is not applicable: x0 has dtype torch.float64, and it computes ...
    """
    delta = check_real("delta", delta, above=0)
    if delta >= 1:
        raise HelmscopeError(f"delta is {delta:g}, but it must be below 1")
    if order not in (2, 4):
        raise HelmscopeError(f"order is {order!r}, but it must be 2 (Heun) or 4 (RK4)")
    _check_starts(x0)
    reason = fused_refuses(x0, delta=delta)
    if reason is not None:
        raise HelmscopeError(f"the fused kernel is not applicable: {reason}")
    flows = _checked_flows(x0.shape[1], times, betas, steps, values, normalized)
    task = Task(flows, order, normalized, causal, near=1 - delta, stop=stop, keep_states=keep_states)
    return launch(x0, task, tuning(*x0.shape[1:]))


@dataclass(frozen=True, eq=False)
class Flows:
    """Checked parameters of each beta and of each interval, in float64 on the CPU."""

    betas: Float[Tensor, " beta"]
    steps: Int[Tensor, " beta"]
    values: Float[Tensor, " beta"]
    scales: Float[Tensor, " beta"]  # the factor of the sums in one step, divided by the length of the interval
    spans: Float[Tensor, " time"]  # lengths of the intervals


@dataclass(frozen=True, eq=False)
class Task:
    """Checked arguments of one launch."""

    flows: Flows
    order: int
    normalized: bool
    causal: bool
    near: float  # a pair has met if its inner product is at least this
    stop: bool
    keep_states: bool


def launch(x0: Float[Tensor, "sample n d"], task: Task, options: LaunchConfig) -> Clustering:
    """``fused_clustering`` without checks and with an explicit tuning."""
    fused_kernel = importlib.import_module("helmscope.kernels.fused_triton").fused_kernel
    flows, (samples, n, d), device = task.flows, x0.shape, x0.device
    size, count, pairs = len(flows.betas), len(flows.spans), n * (n - 1) // 2
    # longest jobs first, so that none starts last: at higher beta tokens meet later
    queue = torch.argsort(flows.steps * (1 + flows.betas), descending=True)
    met = torch.full((size, samples, count), pairs, dtype=torch.int32, device=device)
    lost = torch.full((size, samples), count, dtype=torch.int32, device=device)
    final_states = torch.empty((size, samples, n, d) if task.keep_states else 1, device=device)
    floats = (flows.spans, flows.betas / math.log(2), flows.scales)
    integers = (queue, flows.steps, (flows.values > 0) & task.stop)
    with torch.cuda.device_of(x0):  # type: ignore[no-untyped-call]
        fused_kernel[(size * samples,)](
            x0.detach().contiguous(),
            *(vector.to(device, torch.float32) for vector in floats),
            *(vector.to(device, torch.int32) for vector in integers),
            *(met, lost, final_states, samples, count, task.near, n, d),
            N=_next_power_of_two(n, 16),
            D=_next_power_of_two(d, 16 if options.products else 2),
            ORDER=task.order,
            NORMALIZED=task.normalized,
            CAUSAL=task.causal,
            KEEP=task.keep_states,
            PRODUCTS=options.products,
            num_warps=options.warps,
            num_stages=1,
        )
    return Clustering(met, pairs, lost, final_states if task.keep_states else None)


def _next_power_of_two(size: int, minimum: int) -> int:
    """The smallest power of two that is at least ``size`` and at least ``minimum``, itself a power of two."""
    return max(minimum, 1 << (size - 1).bit_length())


def _check_starts(x0: object) -> None:
    """Check for a tensor (sample, n, d) of unit vectors; a non-finite token passes, its system is lost at once."""
    if not isinstance(x0, torch.Tensor) or x0.ndim != 3 or 0 in x0.shape or x0.shape[-1] < 2:
        shown = f"of shape {tuple(x0.shape)}" if isinstance(x0, torch.Tensor) else type_with_article(x0)
        raise HelmscopeError(f"x0 is {shown}, but it must be a tensor of shape (sample, n, d) with d >= 2")
    norm = torch.linalg.vector_norm(x0.detach(), dim=-1)
    off = torch.isfinite(norm) & ((norm - 1).abs() > NORM_TOLERANCE[torch.float32])
    if bool(off.any()):
        raise HelmscopeError(
            f"x0 holds a token of norm {float(norm[off][0]):.9g}, but tokens must be on the unit sphere"
        )


def _checked_flows(
    n: int, times: Sequence[float], betas: Tensor, steps: Tensor, values: Tensor | None, normalized: bool
) -> Flows:
    """Check the parameters of the flows; raises ``HelmscopeError`` if a step could overflow in float32."""
    spans = torch.diff(torch.tensor([0.0, *check_times(times)], dtype=torch.float64, device="cpu"))
    betas = _checked_vector("betas", betas, None)
    steps = _checked_vector("steps", steps, len(betas))
    values = torch.ones_like(betas) if values is None else _checked_vector("values", values, len(betas))
    if bool((betas < 0).any()):
        raise HelmscopeError(f"betas holds {float(betas.min()):g}, but every beta must be >= 0")
    if bool(((steps < 1) | (steps != steps.round()) | (steps >= 2**31)).any()):
        raise HelmscopeError(f"steps is {steps.tolist()}, but it must hold whole numbers from 1 to 2^31 - 1")
    scales = values / steps if normalized else values / steps * torch.exp(betas) / n
    displacement = float(scales.abs().max() * spans.max())
    if not displacement <= MAX_DISPLACEMENT:
        raise HelmscopeError(
            f"steps allow tokens to move by {displacement:.0e} in one step, but at most {MAX_DISPLACEMENT:.0e} is "
            "allowed: use more steps"
        )
    return Flows(betas, steps.long(), values, scales, spans)


def _checked_vector(name: str, value: object, size: int | None) -> Tensor:
    """Check for a vector of finite numbers and return it in float64 on the CPU."""
    if not isinstance(value, torch.Tensor) or value.ndim != 1 or len(value) not in (size or len(value), 0):
        shown = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type_with_article(value)
        required = f"a tensor of shape ({size},)" if size else "a one-dimensional tensor"
        raise HelmscopeError(f"{name} is {shown}, but it must be {required}")
    vector = value.detach().to("cpu", torch.float64)
    if not len(vector) or not bool(torch.isfinite(vector).all()):
        raise HelmscopeError(f"{name} is {vector.tolist()}, but it must hold at least one number, all finite")
    return vector
