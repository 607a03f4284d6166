"""Shares of pairs that have met, for many small systems at once: a phase diagram by the fused kernel."""

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

# RK4 of step 0.16 moves P by 3e-5 at most for SA up to beta = 9; steps of 0.3 e^-beta move nothing for USA, whose rates
# are e^beta, up to beta = 4, and those of 0.6 e^-beta do
STEP_SA, SLOW_BETA, STEP_USA = 0.16, 10.0, 0.25
MOST_STEPS = 100_000  # in one interval; an adaptive stepper does with fewer
MOST_CELLS = 2**25  # (beta, sample, time) counted at once


@dataclass(frozen=True, eq=False, kw_only=True)
class FusedShares:
    """Flows of one kind, x_i' = V P sum_j e^{beta <x_i, x_j>} x_j, over Z_i or n, from the same starts ``x0``."""

    x0: Float[Tensor, "sample n d"]
    times: Sequence[float]
    delta: float
    betas: Float[Tensor, " beta"]
    values: Float[Tensor, " beta"]
    normalized: bool
    causal: bool

    @classmethod
    def of(cls, flows: Sequence[Field], x0: Tensor, times: Sequence[float], delta: float) -> FusedShares | None:
        """These flows from these starts, or None where the kernel does not serve them.

        >>> FusedShares.of([SA(1.0)], torch.eye(2, dtype=torch.float64)[None], [1.0], 1e-3) is None
        True
        """
        if fused_refuses(x0, delta=delta) is not None or delta >= 1:
            return None
        parts = [_numbers(flow) for flow in flows]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len({part[2:] for part in known}) > 1:
            return None
        betas, values = (torch.tensor([part[k] for part in known], dtype=torch.float64, device="cpu") for k in (0, 1))
        _, _, normalized, causal = known[0]
        made = cls(x0=x0, times=times, delta=delta, betas=betas, values=values, normalized=normalized, causal=causal)
        return made if int(made.steps.max()) <= MOST_STEPS else None

    @property
    def steps(self) -> Int[Tensor, " beta"]:
        """How many steps of RK4 each interval takes, for each beta."""
        span = float(torch.diff(torch.tensor([0.0, *self.times], dtype=torch.float64, device="cpu")).max())
        rate = (self.betas / SLOW_BETA).clamp(min=1) / STEP_SA if self.normalized else self.betas.exp() / STEP_USA
        count = torch.ceil(span * rate * self.values.abs() - 1e-9)
        return count.clamp(1, 2**31 - 1).long()

    def shares(self, progress: Progress | None) -> Iterator[Float[Tensor, "beta sample time"]]:
        """Share of pairs that have met in each sample, for some betas after others; NaN where a sample was lost."""
        size = max(1, MOST_CELLS // (len(self.x0) * len(self.times)))
        for first in range(0, len(self.betas), size):
            some = slice(first, first + size)
            found = fused_clustering(
                self.x0,
                self.times,
                betas=self.betas[some],
                values=self.values[some],
                steps=self.steps[some],
                normalized=self.normalized,
                causal=self.causal,
                delta=self.delta,
            )
            lost = found.lost < len(self.times)
            if progress is not None:
                progress(min(first + size, len(self.betas)) / len(self.betas))
            yield (found.met.to(torch.float64) / found.pairs).masked_fill(lost.unsqueeze(-1), torch.nan)

    @property
    def told(self) -> dict[str, Any]:
        """How it is done, for the attributes of a Measurement."""
        steps = self.steps
        return {
            "carried_in": self.x0.shape[-1],
            "dtype": "float32",
            "stepper": f"RK4, {int(steps.min())} to {int(steps.max())} steps between times",
            "kernel": "Fused",
        }


def _numbers(flow: Field) -> tuple[float, float, bool, bool] | None:
    """beta, V, normalized and causal of a flow that is exactly SA or USA with multiples of I; else None."""
    if not isinstance(flow, SA | USA) or type(flow) not in (SA, USA) or flow.bias is not None:
        return None
    logit, value = flow.logit_scale, flow.value_scale
    if logit is None or value is None or logit < 0 or isinstance(flow.beta, torch.Tensor):
        return None
    return flow.beta * logit, value, flow.normalized, flow.causal
