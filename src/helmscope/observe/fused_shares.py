"""Shares of pairs that have met, for many small systems at once: phase diagrams by the fused kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from helmscope.fields.attention import SA, USA
from helmscope.kernels.fused import fused_clustering, fused_refuses

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.fields.field import Field
    from helmscope.types import Progress

# measured: RK4 with step 0.16 changes P by at most 3e-5 for SA up to beta = 9; for USA, whose rates grow as e^beta,
# steps of 0.3 e^-beta change nothing up to beta = 4, while steps of 0.6 e^-beta do
STEP_SA, SLOW_BETA, STEP_USA = 0.16, 10.0, 0.25
MAX_STEPS = 100_000  # per interval; beyond this an adaptive stepper is cheaper
MAX_CELLS = 2**25  # (beta, sample, time) counted at once


@dataclass(frozen=True, eq=False, kw_only=True)
class FusedShares:
    """Flows x_i' = V P sum_j e^{beta <x_i, x_j>} x_j, divided by Z_i or by n, all from the same starts ``x0``."""

    x0: Float[Tensor, "sample n d"]
    times: Sequence[float]
    delta: float
    betas: Float[Tensor, " beta"]
    values: Float[Tensor, " beta"]
    normalized: bool
    causal: bool

    @classmethod
    def of(cls, flows: Sequence[Field], x0: Tensor, times: Sequence[float], delta: float) -> FusedShares | None:
        """The shares of these flows from these starts, or None where the kernel does not support them.

        >>> FusedShares.of([SA(1.0)], torch.eye(2, dtype=torch.float64)[None], [1.0], 1e-3) is None
        True
        """
        if fused_refuses(x0, delta=delta) is not None or delta >= 1:
            return None
        parameters = [_kernel_parameters(flow) for flow in flows]
        supported = [row for row in parameters if row is not None]
        if len(supported) < len(parameters) or len({row[2:] for row in supported}) > 1:
            return None
        betas, values = (torch.tensor([row[k] for row in supported], dtype=torch.float64, device="cpu") for k in (0, 1))
        _, _, normalized, causal = supported[0]
        shares = cls(x0=x0, times=times, delta=delta, betas=betas, values=values, normalized=normalized, causal=causal)
        return shares if int(shares.steps.max()) <= MAX_STEPS else None

    @property
    def steps(self) -> Int[Tensor, " beta"]:
        """Number of RK4 steps per interval, for each beta."""
        span = float(torch.diff(torch.tensor([0.0, *self.times], dtype=torch.float64, device="cpu")).max())
        rate = (self.betas / SLOW_BETA).clamp(min=1) / STEP_SA if self.normalized else self.betas.exp() / STEP_USA
        count = torch.ceil(span * rate * self.values.abs() - 1e-9)
        return count.clamp(1, 2**31 - 1).long()

    def shares(self, progress: Progress) -> Iterator[Float[Tensor, "beta sample time"]]:
        """Share of pairs that have met in each sample, a chunk of betas at a time; NaN where a sample was lost."""
        size = max(1, MAX_CELLS // (len(self.x0) * len(self.times)))
        for first in range(0, len(self.betas), size):
            chunk = slice(first, first + size)
            counts = fused_clustering(
                self.x0,
                self.times,
                betas=self.betas[chunk],
                values=self.values[chunk],
                steps=self.steps[chunk],
                normalized=self.normalized,
                causal=self.causal,
                delta=self.delta,
            )
            lost = counts.lost < len(self.times)
            progress(min(first + size, len(self.betas)) / len(self.betas))
            yield (counts.met.to(torch.float64) / counts.pairs).masked_fill(lost.unsqueeze(-1), torch.nan)

    @property
    def method_attributes(self) -> dict[str, Any]:
        """Attributes of a Measurement that describe this method."""
        steps = self.steps
        return {
            "integration_dim": self.x0.shape[-1],
            "dtype": "float32",
            "stepper": f"RK4, {int(steps.min())} to {int(steps.max())} steps between times",
            "summation": "Fused",
        }


def _kernel_parameters(flow: Field) -> tuple[float, float, bool, bool] | None:
    """(beta, V, normalized, causal) of a flow that is exactly SA or USA with multiples of I, else None."""
    if not isinstance(flow, SA | USA) or type(flow) not in (SA, USA) or flow.bias is not None:
        return None
    logit, value = flow.logit_scale, flow.value_scale
    if logit is None or value is None or logit < 0 or isinstance(flow.beta, torch.Tensor):
        return None
    return flow.beta * logit, value, flow.normalized, flow.causal
