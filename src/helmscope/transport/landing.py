"""Simulation of a bridge whose target is a cloud of points, so that its control grows like 1/(horizon - t)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.solve.integrate import integrate
from helmscope.solve.stepper import NoisyStepper
from helmscope.transport.time_grid import LAST, STEP, graded_times
from helmscope.types import HelmscopeError, check_times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from helmscope.solve.simulation import Simulation
    from helmscope.transport.bridge import Bridge

    SampleEnds = Callable[[Tensor, float, np.random.Generator], Tensor]


def simulate_landing(
    bridge: Bridge,
    x0: Tensor,
    times: Sequence[float],
    sample_ends: SampleEnds,
    y: Tensor,
    *,
    seed: int,
    as_printed: bool,
    options: dict[str, object],
) -> Simulation:
    """Integrate a bridge in graded steps; after (1 - LAST) horizon each particle is at one of the points y, whose
    indices ``sample_ends(points, t, source)`` samples, unless ``as_printed``.
    """
    requested = check_times(times)
    horizon = bridge.horizon
    if requested[-1] > horizon:
        raise HelmscopeError(f"times holds {requested[-1]:g}, but it must not exceed the horizon {horizon:g}")
    last = horizon * (1 - LAST)
    grid = sorted({*graded_times(horizon, requested[-1]), *requested})
    inner = grid if as_printed or requested[-1] <= last else [t for t in grid if t <= last]
    options.setdefault("stepper", EulerMaruyama(horizon))
    field = bridge.field(as_printed=as_printed)
    run = integrate(field, x0, inner, noise=bridge.noise, seed=seed, **options)  # type: ignore[arg-type]
    states = run.trajectory.states
    if len(inner) < len(grid):
        systems = states[-1].reshape(-1, *states.shape[-2:])
        ended = torch.stack([_land(x, sample_ends, inner[-1], y, seed, k) for k, x in enumerate(systems)]).reshape(
            states[-1].shape
        )
        states = torch.cat([states, ended[None].expand(len(grid) - len(inner), *ended.shape)])
    clock = torch.tensor(requested, dtype=torch.float64, device=states.device)
    outcome = run.outcome
    if outcome.ok:
        outcome = replace(outcome, times=tuple(requested[-1] for _ in outcome.times))
    states = states[[grid.index(t) for t in requested]]
    trajectory = replace(run.trajectory, times=clock, states=states, outcome=outcome)
    method = run.problem.stepper
    assert isinstance(method, NoisyStepper)  # integrate has checked it
    method = replace(method, h=min(method.h, STEP * horizon))  # for resume, which does not know the grid
    return replace(run, trajectory=trajectory, problem=replace(run.problem, times=clock, stepper=method))


def sample_columns(log_weights: Tensor, source: np.random.Generator) -> Tensor:
    """One column per row, sampled with probabilities proportional to e^log_weights: (n,)."""
    cumulative = torch.softmax(log_weights, 1).cumsum(1)
    level = torch.from_numpy(source.random(len(cumulative))).to(cumulative) * cumulative[:, -1]
    return (cumulative <= level[:, None]).sum(1).clamp(max=cumulative.shape[1] - 1)


def _land(x: Tensor, sample_ends: SampleEnds, t: float, y: Tensor, seed: int, system: int) -> Tensor:
    """The points at which the particles of one system end; depends only on the seed and the system's number."""
    # a key of two words, because the streams of systems have one: no stream is used twice
    source = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(system, 2)))
    finite = torch.isfinite(x)
    ends = sample_ends(torch.where(finite, x, torch.zeros_like(x)).to(y), t, source)
    return torch.where(finite, y[ends].to(x), x)
