"""encoder-decoder: a causal mask changes the speed and the shape of clustering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import AbsoluteDifference, AbsoluteDifferenceInEveryCase, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.observe.inner_products import inner_product_histogram, mean_inner_product
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

BINS, TOL = 40, 1e-6
TIMES = tuple(k / 4 for k in range(41))
MASKS = ("full", "causal")


@experiment("encoder-decoder", seconds=3)
def encoder_decoder(case: TrialCase) -> Finding:
    """x_i' = P sum_{j <= i} e^(beta <x_i, x_j>) x_j / Z_i against the sum over all j, from the same uniform starts.

    Speed: the log of the causal over the full time until the mean of <x_i, x_j>, i != j, is 0.9, paired by start. There
    are at most 40 starts, so that all sign flips are enumerated; a start that does not reach 0.9 before the horizon
    (t = 10, or 40 at beta = 2) is assigned the horizon. Shape: the standard deviation of the inner products at the time
    when each start has that mean. Two independent sets of starts, both with the full mask, must not differ by 0.1; a
    bias of 0 instead of the mask hides nothing and must reproduce the full times.
    """
    n, dim, level, shape_beta = (case.constant(name) for name in ("tokens", "dim", "level", "beta_of_shape"))
    horizons = dict(zip(case.constant("betas"), case.constant("horizons"), strict=True))  # the time allowed at a beta
    count = case.count(40, quick=32)
    x, y = (retract(case.normal(count, n, dim, index=k)) for k in range(2))
    runs = {
        (beta, mask): _Run.of(SA(beta=beta, causal=mask), x, level, end)
        for beta, end in horizons.items()
        for mask in (False, True)
    }
    full, causal = runs[shape_beta, False], runs[shape_beta, True]
    paths = [_Path.of(SA(beta=shape_beta, causal=mask), x, runs[shape_beta, mask].time) for mask in (False, True)]
    spreads = [_spread(path.states) for path in paths]
    other = _Run.of(SA(beta=shape_beta), y, level, horizons[shape_beta])
    no_bias = torch.zeros(n, n, dtype=x.dtype)
    unmasked = _Run.of(SA(beta=shape_beta, bias=no_bias), x, level, horizons[shape_beta])
    slower = {beta: (runs[beta, True].time / runs[beta, False].time).log() for beta in horizons}
    censored = [
        f"{sum(runs[b, mask].censored for mask in (False, True))} at beta = {b:g} (t = {end:g})"
        for b, end in horizons.items()
    ]
    return Finding(
        evidence={
            "speed": AbsoluteDifferenceInEveryCase(
                [slower[beta] for beta in horizons], "starts", [f"beta = {b:g}" for b in horizons]
            ),
            "shape": AbsoluteDifference((spreads[1] / spreads[0]).log(), "starts"),
        },
        controls={
            "two sets of starts, both full": Replicates((other.time / full.time).log(), "starts"),
            "a bias of 0 instead of the mask": AbsoluteDifference((unmasked.time / full.time).log(), "starts"),
        },
        data=_curves(level, *paths),
        remark=(
            f"The mean inner product reaches {level:g} at {float(full.time.mean()):.3g} with the full and at "
            f"{float(causal.time.mean()):.3g} with the causal mask; the spread of the inner products there is "
            f"{float(spreads[0].mean()):.2g} and {float(spreads[1].mean()):.2g}. Of the "
            f"{2 * count} runs at each beta the horizon cut off {', '.join(censored)}."
        ),
        setting=(
            f"simulation on the unit sphere: n = {n}, d = {dim}, beta = {shape_beta:g}, until the mean inner product "
            f"is {level:g}, Dormand-Prince"
        ),
    )


@dataclass(frozen=True)
class _MeanReached:
    """Event: the mean inner product reaches ``level``."""

    level: float

    def signal(self, x: Tensor) -> Tensor:
        signal: Tensor = mean_inner_product(x) - self.level
        return signal


class _Run(NamedTuple):
    """The time at which the mean of each start reaches a level, and how many do not before the time ``end``."""

    time: Tensor
    censored: int

    @classmethod
    def of(cls, field: SA, x: Tensor, level: float, end: float) -> _Run:
        times = integrate(field, x, [end], events=[_MeanReached(level)], stepper=DormandPrince(TOL)).event_times[0]
        return cls(times.nan_to_num(end), int(times.isnan().sum()))


class _Path(NamedTuple):
    """The mean inner product over time (time, start), and the state of each start when its mean reaches the level."""

    means: Tensor
    states: Tensor

    @classmethod
    def of(cls, field: SA, x: Tensor, reached: Tensor) -> _Path:
        times = sorted({*TIMES, *reached.tolist()})
        states = integrate(field, x, times, stepper=DormandPrince(TOL)).states
        on_grid, at_reached = ([times.index(t) for t in chosen] for chosen in (TIMES, reached.tolist()))
        return cls(mean_inner_product(states[on_grid]), states[at_reached, range(len(x))])


def _spread(x: Tensor) -> Tensor:
    """The standard deviation of <x_i, x_j>, i != j."""
    first, second = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    return (x @ x.mT)[..., first, second].std(-1)


def _curves(level: float, full: _Path, causal: _Path) -> xr.Dataset:
    """The mean over time, and histograms of the inner products when it reaches the level: (inner product, mask)."""
    means = torch.stack([full.means, causal.means], -1).transpose(0, 1)
    histograms = [
        inner_product_histogram(Trajectory(torch.zeros(1), run.states[None]), bins=BINS).isel(time=0, drop=True)
        for run in (full, causal)
    ]
    masks = xr.DataArray(list(MASKS), dims="mask", name="mask")
    both = xr.concat(histograms, masks).transpose(..., "inner_product", "mask")
    both.inner_product_histogram.attrs |= {"long_name": f"share of pairs, at the mean {level:g}"}
    mean = curve("mean", means, {"time": TIMES, "mask": MASKS}, label="mean inner product")
    return xr.merge([mean, both], join="outer")
