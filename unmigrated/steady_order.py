"""steady-order: near a cluster the mean inner product approaches 1 at a constant exponential rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, EveryLayer, Finding, Replicates, SomeLayer
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry import sphere
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.stats.scales import LogScale
from helmscope.types import Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

BETAS, PLOTTED_BETA, TOKENS, DIM = (0.0, 1.0, 4.0, 9.0), 4.0, 16, 8
SPREAD = 1e-5  # up to beta = 9 the next order is below 1e-8 of the rate, and rounding far below that
WINDOWS, WINDOW, STEP = 4, 0.5, 0.05  # in units of the time 1 (SA) or e^-beta (USA)
FASTER = 1e-5
IN_TIME = Region(text="The pace is proportional to time: the ratio is 1 within 1e-6.", low=0.999999, high=1.000001)
STEADY = Region(text="The pace is constant: the ratio is 1 within 1e-6.", low=0.999999, high=1.000001)
LEFT = "1 - mean inner product, over its start"
PACE = "pace over 2 (SA), 2 e^beta (USA)"


@experiment("steady-order", seconds=1.4)
def steady_order(case: Case) -> Finding:
    """log(1 - m), m the mean of <x_i, x_j> over pairs, has the slope -2 under SA and -2 e^beta under USA near the
    cluster. The printed d/dt ln log M = Theta(t) uses an undefined M, so it is not computed; one interpretation of it,
    a pace proportional to time, -d/dt log(1 - m) = c t, is tested as a further check.

    Clusters of size 1e-5, where 1 - m is the mean of |x_i - x_j|^2 / 2, over four windows of half a unit of time. The
    statistic of a start is the slope over a window, over the corrected slope, in the window where it is farthest from
    1.
    """
    starts = case.count(128, quick=32)
    noise = case.normal(starts, TOKENS, DIM, stream=0)
    x = sphere.retract(torch.eye(1, DIM, dtype=torch.float64) + SPREAD * noise)
    clock = WINDOW * torch.arange(WINDOWS + 1, dtype=torch.float64)
    cells = [(kind, beta) for kind in (SA, USA) for beta in BETAS]
    names = [f"{kind.__name__}, beta = {beta:g}" for kind, beta in cells]
    paths = [disorder(kind(beta=beta), x, clock) for kind, beta in cells]
    ratios = [pace(path) for path in paths]
    middles = (clock[1:] + clock[:-1]) / 2
    # the correct pace in the second window, so that no single window can distinguish it
    growing = paths[0][:1] * (-clock.square() / middles[1]).exp()[:, None]
    growth = [(ratio[-1] / ratio[0]) / (middles[-1] / middles[0]) for ratio in ratios]
    faster = disorder(SA(beta=1.0, value=(1 + FASTER) * torch.eye(DIM, dtype=torch.float64)), x, clock)
    plotted = (cells.index((SA, PLOTTED_BETA)), cells.index((USA, PLOTTED_BETA)))
    return Finding(
        evidence=EveryLayer([farthest(ratio) for ratio in ratios], "starts", names, LogScale()),
        null=Check(
            "slope over -2 of a planted pace that grows with time",
            Replicates(farthest(pace(growing)), "starts", LogScale()),
        ),
        also=(
            Check(
                "one interpretation, a pace proportional to time: growth of the pace over that of time",
                SomeLayer(growth, "starts", scale=LogScale()),
                region=IN_TIME,
            ),
            Check(
                "pace of the last window over that of the first",
                EveryLayer([ratio[-1] / ratio[0] for ratio in ratios], "starts", scale=LogScale()),
                Ruling.SUPPORTED,
                STEADY,
            ),
            Check(
                f"slope over -2 of SA made faster by {FASTER:g}",
                Replicates(farthest(pace(faster)), "starts", LogScale()),
            ),
        ),
        data=_curves(torch.stack([*(paths[k] for k in plotted), growing], -1), clock, middles),
        remark=(
            f"Over {len(cells)} combinations of flow and beta, {WINDOWS} windows each, no ratio is farther from 1 than "
            f"{max(float((ratio - 1).abs().max()) for ratio in ratios):.1e}. The printed law uses an undefined M and "
            "is not computed."
        ),
        where=f"simulation on the unit sphere: clusters of size {SPREAD:g}, n = {TOKENS}, d = {DIM}, "
        f"beta = {', '.join(f'{beta:g}' for beta in BETAS)}, t <= {WINDOWS * WINDOW:g} (USA: in e^-beta), "
        f"RK4 step {STEP:g}",
    )


def _curves(gaps: Tensor, clock: Tensor, middles: Tensor) -> xr.Dataset:
    """1 - m relative to its initial value, and its pace, from gaps (time, start, flow)."""
    names = (f"SA, beta = {PLOTTED_BETA:g}", f"USA, beta = {PLOTTED_BETA:g}", "a planted pace that grows")
    remaining, paces = (gaps / gaps[:1]).transpose(0, 1), pace(gaps).transpose(0, 1)
    curves = (
        curve("left", remaining, {"time": clock.tolist(), "flow": names}, label=LEFT, log=True),
        curve("pace", paces, {"window": middles.tolist(), "flow": names}, label=PACE),
    )
    return xr.merge(curves, join="outer")


def disorder(field: SA | USA, x: Tensor, clock: Tensor) -> Tensor:
    """1 - mean inner product (time, start): sum_i |x_i - mean|^2 / (n - 1), which equals the mean over pairs."""
    unit = 1.0 if field.normalized else math.exp(-field.beta)
    states = integrate(field, x, (clock * unit).tolist(), stepper=RK4(STEP * unit)).states
    deviations = states - states.mean(-2, keepdim=True)
    return deviations.square().sum((-1, -2)) / (states.shape[-2] - 1)


def pace(gap: Tensor) -> Tensor:
    """The slope of the log over each window, over -2: (window, start). Time in units of 1 (SA) or e^-beta (USA)."""
    return gap.log().diff(dim=0) / (-2 * WINDOW)


def farthest(ratios: Tensor) -> Tensor:
    """The ratio of each start that is farthest from 1."""
    return ratios.gather(0, (ratios - 1).abs().argmax(0, keepdim=True)).squeeze(0)
