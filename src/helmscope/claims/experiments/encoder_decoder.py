"""encoder-decoder: a causal mask changes the speed and the shape of clustering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.entry import Region
from helmscope.claims.evidence import Log
from helmscope.claims.finding import Check, Finding, Paired, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.inner_products import inner_product_histogram, mean_inner_product
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.types import Ruling, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, DIM, BETA, LEVEL, BINS, TOL = 16, 16, 1.0, 0.9, 40, 1e-6
TIMES = tuple(k / 4 for k in range(41))
MASKS = ("full", "causal")
WIDER = Region(text="The spread is larger by a tenth or more.", low=1.1)


@experiment("encoder-decoder", seconds=7)
def encoder_decoder(case: Case) -> Finding:
    """x_i' = P sum_{j <= i} e^(beta <x_i, x_j>) x_j / Z_i against the sum over all j, from the same uniform starts.

    Speed: log of the causal over the full time until the mean of <x_i, x_j>, i != j, is 0.9, paired by start; a start
    that takes longer than 10 counts with 10. Shape: the standard deviation of the inner products at that mean, read off
    between the two neighbouring times. The null exchanges the masks in every other pair, a flip of signs; a bias of 0
    in place of the mask hides nothing and must give the full times again.
    """
    x = retract(case.normal(case.count(96, quick=32), TOKENS, DIM, stream=0))
    full, causal = _Run.of(SA(beta=BETA), x), _Run.of(SA(beta=BETA, causal=True), x)
    nothing = _Run.of(SA(beta=BETA, bias=torch.zeros(TOKENS, TOKENS, dtype=x.dtype)), x)
    slower = (causal.time / full.time).log()
    flipped = slower * torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(len(x) // 2)
    others = {
        beta: (_Run.of(SA(beta=beta, causal=True), x).time / _Run.of(SA(beta=beta), x).time).log()
        for beta in (0.0, 2.0)
    }
    wider = causal.spread / full.spread
    means = torch.stack([full.means, causal.means], -1).transpose(0, 1)
    return Finding(
        evidence=Paired(slower, "starts"),
        null=Check("masks exchanged in every other pair", Paired(flipped, "starts"), Ruling.INCONCLUSIVE),
        data=xr.merge(
            [
                curve("mean", means, {"time": TIMES, "mask": MASKS}, label="mean inner product"),
                _histograms(full, causal),
            ],
            combine_attrs="drop_conflicts",
        ),
        also=(
            Check(
                "a bias of 0 instead of the mask",
                Paired((nothing.time / full.time).log(), "starts"),
                Ruling.INCONCLUSIVE,
            ),
            *(Check(f"speed at beta = {b:g}", Paired(each, "starts"), Ruling.SUPPORTED) for b, each in others.items()),
            Check("shape: causal over full spread", Replicates(wider, "starts", scale=Log()), Ruling.SUPPORTED, WIDER),
        ),
        remark=(
            f"The mean inner product reaches {LEVEL:g} at {float(full.time.mean()):.3g} with the full and at "
            f"{float(causal.time.mean()):.3g} with the causal mask; the spread of the inner products there is "
            f"{float(full.spread.mean()):.2g} and {float(causal.spread.mean()):.2g}."
        ),
    )


@dataclass(frozen=True)
class _Reaches:
    """The mean inner product is 0.9."""

    def signal(self, x: Tensor) -> Tensor:
        return mean_inner_product(x) - LEVEL


class _Run(NamedTuple):
    """When each start gets to 0.9, its mean inner product over time (time, start), and there the spread and states."""

    time: Tensor
    means: Tensor
    spread: Tensor
    states: Tensor

    @classmethod
    def of(cls, field: SA, x: Tensor) -> _Run:
        run = integrate(field, x, TIMES, events=[_Reaches()], stepper=DormandPrince(TOL))
        time = run.event_times[0].nan_to_num(TIMES[-1])
        means = mean_inner_product(run.states)
        after = (means < LEVEL).sum(0).clamp(1, len(TIMES) - 1)
        rows = torch.arange(len(x))
        low, high = (run.states[index, rows] for index in (after - 1, after))
        share = (LEVEL - means[after - 1, rows]) / (means[after, rows] - means[after - 1, rows])
        return cls(time, means, torch.lerp(_spread(low), _spread(high), share), high)


def _spread(x: Tensor) -> Tensor:
    """The standard deviation of <x_i, x_j>, i != j."""
    first, second = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    return (x @ x.mT)[..., first, second].std(-1)


def _histograms(full: _Run, causal: _Run) -> xr.Dataset:
    """Histograms of the inner products where their mean has come to 0.9: (inner product, mask)."""
    seen = [
        inner_product_histogram(Trajectory(torch.zeros(1), run.states[None]), bins=BINS).isel(time=0, drop=True)
        for run in (full, causal)
    ]
    both = xr.concat(seen, xr.DataArray(list(MASKS), dims="mask", name="mask")).transpose("inner_product", "mask")
    both.share.attrs = {"long_name": f"share of pairs, at the mean {LEVEL:g}", "n": seen[0].attrs["n"]}
    return both
