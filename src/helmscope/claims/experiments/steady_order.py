"""steady-order: does the mean inner product approach 1 at a steady exponential pace, near the cluster and on the whole
path?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA, USA
from helmscope.geometry import sphere
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.stats.scales import LogScale
from helmscope.theory.equiangular import equiangular, equiangular_rate, hitting_time
from helmscope.theory.starts import Orthonormal

if TYPE_CHECKING:
    from torch import Tensor

KINDS: tuple[type[SA] | type[USA], ...] = (SA, USA)
SPREAD = 1e-5  # up to beta = 9 the next order is below 1e-8 of the rate, and rounding far below that
WINDOWS, WINDOW, STEP = 4, 0.5, 0.05  # in units of the time 1 (SA) or e^-beta (USA)
TOLERANCE = 1e-7
FRACTIONS = tuple(k / 10 for k in range(11))  # of the time from the orthogonal start to the end of the path
PLOTTED_BETA, PLOTTED = 4.0, 4
PACE = "pace over 2 (SA), 2 e^beta (USA)"


@experiment("steady-order", seconds=3)
def steady_order(case: TrialCase) -> Finding:
    """The pace is -d/dt log(1 - m), m the mean of <x_i, x_j> over pairs. Near the cluster it is 2 under SA and 2 e^beta
    under USA, but from orthogonal tokens it starts at 2 / (e^beta + n - 1) and 2 / n.
    """
    tail, path = _tail(case), _whole_path(case)
    return Finding(
        evidence={**tail.evidence, **path.evidence},
        controls={**tail.controls, **path.controls},
        described=path.described,
        data=xr.merge((tail.data, path.data), join="outer"),
        remark=f"{tail.remark} {path.remark}",
        setting=f"simulation on the unit sphere: {tail.setting}; {path.setting}",
    )


@dataclass(frozen=True, eq=False)
class _Part:
    """The evidence for one condition, with its controls and data."""

    evidence: Mapping[str, ReplicatesInEveryCase | Replicates]
    controls: Mapping[str, ReplicatesInEveryCase | Replicates]
    data: xr.Dataset
    remark: str
    setting: str
    described: Mapping[str, ReplicatesInEveryCase | Replicates] = field(default_factory=dict)


def _tail(case: TrialCase) -> _Part:
    """Clusters of size 1e-5, where 1 - m is the mean of |x_i - x_j|^2 / 2, over four windows of half a unit of time.

    The statistic of a start is its pace over the corrected pace, in the window where the ratio is farthest from 1.
    """
    betas, n, dim, excess = (case.constant(name) for name in ("betas", "tokens", "dim", "faster"))
    noise = case.normal(case.count(128, quick=32), n, dim, index=0)
    x = sphere.retract(torch.eye(1, dim, dtype=torch.float64) + SPREAD * noise)
    clock = WINDOW * torch.arange(WINDOWS + 1, dtype=torch.float64)
    cells = [(kind, beta) for kind in KINDS for beta in betas]
    names = [f"{kind.__name__}, beta = {beta:g}" for kind, beta in cells]
    gaps = [disorder(kind(beta=beta), x, clock) for kind, beta in cells]
    ratios = [tail_pace(gap) for gap in gaps]
    middles = (clock[1:] + clock[:-1]) / 2
    # the correct pace in the second window, so that no single window can distinguish it
    growing = tail_pace(gaps[0][:1] * (-clock.square() / middles[1]).exp()[:, None])
    faster = disorder(SA(beta=1.0, value=(1 + excess) * torch.eye(dim, dtype=torch.float64)), x, clock)
    plotted = [cells.index((kind, betas[-1])) for kind in KINDS]
    return _Part(
        evidence={"tail": ReplicatesInEveryCase([farthest(ratio) for ratio in ratios], "starts", names, LogScale())},
        controls={
            "planted pace that grows with time": Replicates(farthest(growing), "starts", LogScale()),
            "SA made faster by 1e-5": Replicates(farthest(tail_pace(faster)), "starts", LogScale()),
        },
        data=curve(
            "tail",
            torch.stack([*(ratios[k] for k in plotted), growing], -1).transpose(0, 1),
            {"window": middles.tolist(), "tail_of": (*(names[k] for k in plotted), "a planted pace that grows")},
            label=f"near the cluster: {PACE}",
        ),
        remark=(
            f"Near the cluster, over {len(cells)} combinations of flow and beta, no ratio is farther from 1 than "
            f"{max(float((ratio - 1).abs().max()) for ratio in ratios):.1e}."
        ),
        setting=f"clusters of size {SPREAD:g}, n = {n}, d = {dim}, beta = {', '.join(f'{beta:g}' for beta in betas)}, "
        f"t <= {WINDOWS * WINDOW:g} (USA: in e^-beta), RK4 step {STEP:g}",
    )


def _whole_path(case: TrialCase) -> _Part:
    """Orthonormal frames, each with its own beta, followed until 1 - m = 1e-3; the statistic is the largest pace over
    the smallest. The equiangular ODE predicts every pace independently.
    """
    n, largest, end = (case.constant(name) for name in ("path_tokens", "largest_beta", "path_end"))
    x = Orthonormal(n=n, dim=n).sample(case.count(128, quick=32), seed=case.seed_for(1))
    beta = largest * torch.special.ndtr(case.normal(len(x), index=2))
    fixed = torch.full((PLOTTED,), PLOTTED_BETA, dtype=torch.float64)
    paces = [path_pace(kind, beta, x, end) for kind in KINDS]
    predicted = [torch.stack([_predicted_pace(kind(beta=float(b)), n, end) for b in beta], -1) for kind in KINDS]
    steady = _pace_over_unit_time(lambda tokens: -math.log(end) / 2 * unit_decay(tokens), x)
    units = [2.0 if kind.normalized else 2 * math.exp(PLOTTED_BETA) for kind in KINDS]
    shown = [path_pace(kind, fixed, x[:PLOTTED], end) / unit for kind, unit in zip(KINDS, units, strict=True)]
    names = tuple(kind.__name__ for kind in KINDS)
    ratios = [unsteadiness(pace) for pace in paces]
    frames = "frames (one beta per frame)"
    return _Part(
        evidence={"whole path": ReplicatesInEveryCase(ratios, frames, names, LogScale())},
        controls={
            "planted steady pace": Replicates(unsteadiness(steady), "frames", LogScale()),
            "pace of the equiangular ODE": ReplicatesInEveryCase(
                [largest_factor(pace, theory) for pace, theory in zip(paces, predicted, strict=True)],
                frames,
                names,
                LogScale(),
            ),
        },
        described={
            f"largest over smallest pace, {name}": Replicates(ratio, frames, LogScale())
            for name, ratio in zip(names, ratios, strict=True)
        },
        data=curve(
            "path",
            torch.stack(shown, -1).transpose(0, 1),
            {"share_of_time": FRACTIONS, "path_of": tuple(f"{name}, beta = {PLOTTED_BETA:g}" for name in names)},
            label=f"from orthogonal tokens: {PACE}",
            log=True,
        ),
        remark=(
            f"From {n} orthogonal tokens at beta = {PLOTTED_BETA:g} the pace of SA rises from {2 * shown[0][0, 0]:.3g} "
            f"to {2 * shown[0][-1, 0]:.3g}: it is steady near the cluster only."
        ),
        setting=f"{n} orthonormal tokens, beta uniform in [0, {largest:g}], until 1 - m = {end:g}, Dormand-Prince",
    )


def disorder(flow: SA | USA, x: Tensor, clock: Tensor) -> Tensor:
    """1 - mean inner product (time, start), at times in units of 1 (SA) or e^-beta (USA)."""
    unit = 1.0 if flow.normalized else math.exp(-flow.beta)
    return _gap(integrate(flow, x, (clock * unit).tolist(), stepper=RK4(STEP * unit)).states)


def _gap(states: Tensor) -> Tensor:
    """1 - mean inner product: sum_i |x_i - mean|^2 / (n - 1), which equals the mean of |x_i - x_j|^2 / 2 over pairs."""
    deviations = states - states.mean(-2, keepdim=True)
    return deviations.square().sum((-1, -2)) / (states.shape[-2] - 1)


def tail_pace(gap: Tensor) -> Tensor:
    """The slope of the log over each window, over -2: (window, start). Time in units of 1 (SA) or e^-beta (USA)."""
    return gap.log().diff(dim=0) / (-2 * WINDOW)


def path_pace(kind: type[SA] | type[USA], beta: Tensor, x: Tensor, end: float) -> Tensor:
    """-d/dt log(1 - m) (time, start) at ``FRACTIONS`` of the time at which 1 - m is ``end``, one beta per start."""
    n, dim = x.shape[-2:]
    duration = torch.tensor([hitting_time(kind(beta=b), n=n, delta=end) for b in beta.tolist()], dtype=torch.float64)
    scaled = kind(beta=beta, value=duration[:, None, None] * torch.eye(dim, dtype=torch.float64))
    return _pace_over_unit_time(scaled, x) / duration


def _pace_over_unit_time(flow: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """-d/dt log(1 - m) (time, start) at ``FRACTIONS`` of the time 1, from the velocity at each state."""
    states = integrate(flow, x, FRACTIONS, stepper=DormandPrince(TOLERANCE)).states
    n = x.shape[-2]
    velocities = torch.stack([flow(state) for state in states])
    rise = 2 * (states.sum(-2) * velocities.sum(-2)).sum(-1) / (n * (n - 1))  # m = (|sum_i x_i|^2 - n) / (n (n - 1))
    return rise / _gap(states)


def _predicted_pace(flow: SA | USA, n: int, end: float) -> Tensor:
    """-d/dt log(1 - gamma) of the equiangular ODE at ``FRACTIONS`` of the time at which 1 - gamma is ``end``."""
    duration = hitting_time(flow, n=n, delta=end)
    gamma = equiangular(flow, n=n, times=[duration * fraction for fraction in FRACTIONS])
    return equiangular_rate(flow, gamma, n=n) / (1 - gamma)


def unit_decay(x: Tensor) -> Tensor:
    """P_{x_i} c / <x_i, c>, c the direction of the mean. From orthonormal tokens the angle to c obeys
    theta' = -tan theta, so that 1 - m ~ sin^2 theta is exactly e^-2t.
    """
    center = sphere.retract(x.mean(-2, keepdim=True)).expand_as(x)
    return sphere.project(x, center) / (x * center).sum(-1, keepdim=True)


def unsteadiness(pace: Tensor) -> Tensor:
    """The largest pace along each path (time, start) over the smallest."""
    return pace.amax(0) / pace.amin(0)


def largest_factor(pace: Tensor, theory: Tensor) -> Tensor:
    """The largest factor, 1 or more, by which a pace along each path (time, start) differs from the theory's."""
    return (pace / theory).log().abs().amax(0).exp()


def farthest(ratios: Tensor) -> Tensor:
    """The ratio of each start that is farthest from 1."""
    return ratios.gather(0, (ratios - 1).abs().argmax(0, keepdim=True)).squeeze(0)
