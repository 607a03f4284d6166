"""Depth as time: how far tokens have moved on the sphere, and when a simulated flow has moved them as far.

The arc length of a prompt at depth k is sum_{l <= k} mean_i angle(x_i(l - 1), x_i(l)), in radians: the mean over tokens
of the length of the polygon through the stored states. It does not depend on the parametrization of time, so that the
layers of a model and the time of a flow can be compared by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.sphere import angle, retract
from helmscope.observe.labels import label_attributes
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.track import AT_LEAST_0, SHARE, token_mean, with_bounds, with_cumulative, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, System, Trajectory, check_progress, sub_progress

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

ARC_LENGTH = "cumulative mean angle moved (radians)"
MATCHED = {
    "flow_time": "time of the flow with the same arc length",
    "reached": "whether the flow reaches the arc length",
    "arc_length": ARC_LENGTH,
}
SAME_START = 1e-3  # radians by which the first states of model and flow may differ


@shows_progress("arc length")
def arc_length(
    system: Trajectory | System, *, include_first_token: bool = False, progress: ProgressOption = None
) -> xr.Dataset:
    """Arc length by depth (or time) of each prompt: the cumulated mean angle that its tokens have moved, in radians.

    ``arc_length`` is 0 at the first depth. A Recording is measured on the unit sphere (``on_sphere``). Tokens
    count by their weights; the first token, the usual attention sink, is left out unless ``include_first_token``. The
    times of a simulation must be dense enough for the polygon through its states to follow the flow. ``progress`` is
    called with the share of the depths done.

    >>> quarter_turns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]).reshape(3, 1, 1, 2)
    >>> turned = arc_length(Trajectory(torch.arange(3.0), quarter_turns), include_first_token=True)
    >>> (turned.arc_length.values.ravel() / np.pi).tolist()
    [0.0, 0.5, 1.0]
    """
    path = sphere_and_ids(system, None)[0]
    path = path if include_first_token else without_first_token(path)
    lengths = _arc_lengths(path, check_progress(progress))
    measurement = with_replicates({"arc_length": lengths}, path)
    measurement.arc_length.attrs |= label_attributes(ARC_LENGTH)
    return with_cumulative(with_bounds(measurement, {"arc_length": AT_LEAST_0}), path.axis, {"arc_length"})


@shows_progress("matching times")
def matched_flow_times(
    model: Trajectory | System,
    flow: Trajectory | System,
    *,
    include_first_token: bool = False,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The time at which a flow from the same first states has the same arc length as a model at each depth.

    ``flow_time`` (depth, prompt) is interpolated linearly between the stored times of the flow, the first time if
    several have this arc length, and NaN where the whole arc of the flow is shorter; ``reached`` is 1 or 0 accordingly.
    ``arc_length`` is that of the model. The systems of the flow are the prompts of the model, in the same order: raises
    HelmscopeError if sizes or first states differ. ``progress`` is called with the share of the work done.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> start = torch.eye(3, dtype=torch.float64)[None]
    >>> slow = integrate(SA(beta=1.0), start, times=torch.linspace(0, 2, 5).tolist())
    >>> fast = integrate(SA(beta=1.0), start, times=torch.linspace(0, 9, 500).tolist())
    >>> matched_flow_times(slow, fast).flow_time.values.ravel().round(2).tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    model_path, flow_path = (sphere_and_ids(system, None)[0] for system in (model, flow))
    _check_same_start(model_path, flow_path)
    report = check_progress(progress)
    lengths, flow_lengths = (
        arc_length(path, include_first_token=include_first_token, progress=part).arc_length.values
        for path, part in (
            (model_path, sub_progress(report, 0.0, 0.5)),
            (flow_path, sub_progress(report, 0.5, 1.0)),
        )
    )
    times = flow_path.times.double().cpu().numpy()
    found = np.stack([_times_of(*row, times) for row in zip(lengths.T, flow_lengths.T, strict=True)], 1)
    values = {"flow_time": found, "reached": np.isfinite(found).astype(float), "arc_length": lengths}
    tensors = {name: torch.as_tensor(value, device="cpu") for name, value in values.items()}
    measurement = with_replicates(tensors, model_path)
    for name, text in MATCHED.items():
        measurement[name].attrs |= label_attributes(text)
    return with_bounds(measurement, {"reached": SHARE, "arc_length": AT_LEAST_0})


def _arc_lengths(path: Trajectory, report: Progress) -> Float[Tensor, "time batch"]:
    states, steps = path.states, []
    weights = torch.ones_like(states[:1, ..., 0]) if path.weights is None else path.weights
    for k in range(1, len(states)):
        now = weights[k if len(weights) > 1 else 0].double()
        moved = angle(retract(states[k - 1].double()), retract(states[k].double()))
        steps.append(token_mean(moved, now))
        report((k + 1) / len(states))
    start = torch.zeros(states.shape[1], dtype=torch.float64, device=states.device)
    return torch.stack([start, *steps]).cumsum(0)


def _times_of(lengths: np.ndarray, flow_lengths: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The times of one flow at some arc lengths; NaN beyond its whole length."""
    grows = np.concatenate([[True], np.diff(flow_lengths) > 0])  # the first time of each length
    found: np.ndarray = np.interp(lengths, flow_lengths[grows], times[grows])
    return np.where(lengths <= flow_lengths[-1], found, np.nan)


def _check_same_start(model: Trajectory, flow: Trajectory) -> None:
    if model.states.shape[1:] != flow.states.shape[1:]:
        raise HelmscopeError(
            f"flow has states {tuple(flow.states.shape[1:])}, but the model has {tuple(model.states.shape[1:])}: one "
            "system per prompt, with the same tokens"
        )
    apart = angle(retract(model.states[0].double()), retract(flow.states[0].double().to(model.states.device)))
    counts = model.weights is None or model.weights[0] > 0
    worst = float(torch.where(torch.as_tensor(counts, device=apart.device), apart, 0.0).max())
    if not worst <= SAME_START:
        raise HelmscopeError(
            f"flow starts up to {worst:.3g} radians from the first states of the model, but it must start from them"
        )
