"""From functions of tokens to Measurements over time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.fields.weights import check_weights
from helmscope.types import HelmscopeError, Progress, System, Trajectory, check_progress, check_replicates

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import ArrayLike
    from torch import Tensor

SHARE, AT_LEAST_0, AT_LEAST_1 = (0.0, 1.0), (0.0, math.inf), (1.0, math.inf)  # bounds of quantities


def track(
    trajectory: Trajectory | System, *, progress: Progress | None = None, **quantities: Callable[..., Tensor]
) -> xr.Dataset:
    """The Measurement of functions f(x, weights=...) of tokens (time, batch, n, d) with a value (time, batch): every
    system at every time, with the axes (time, system), or (depth, prompt) for a recording.

    The weights of the trajectory, in which padding has weight 0, are passed to every function; one that takes none is
    refused where there are any, so that no call counts padding by accident. The systems are the replicates:
    ``reduce_replicates`` gives means with intervals, and ``paired_difference`` compares two models prompt by prompt.
    Where a system stopped early its states are NaN, which observables refuse: cut the trajectory first. ``progress`` is
    called with the share of the functions done.

    >>> from helmscope.observe.order import order_parameter
    >>> seen = track(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)), order=order_parameter)
    >>> seen.order.dims, seen.order.values.round(4).tolist()
    (('time', 'system'), [[0.7071, 0.7071, 0.7071]])
    """
    path, tell, values = trajectory_of(trajectory), check_progress(progress), {}
    for name, function in quantities.items():
        values[name] = _value(name, function, path)
        tell(len(values) / len(quantities))
    return with_replicates(values, state_axes(path))


def _value(name: str, function: Callable[..., Tensor], path: Trajectory) -> Tensor:
    """A function at all states, with the weights where it takes them."""
    if path.weights is None:
        return function(path.states)
    try:
        inspect.signature(function).bind(path.states, weights=path.weights)
    except (TypeError, ValueError):  # the latter for built-in functions without a signature
        raise HelmscopeError(
            f"{name} is a function that takes no weights, but the tokens of this trajectory have them (padding has "
            "weight 0): give a function f(x, weights=...)"
        ) from None
    return function(path.states, weights=path.weights)


def trajectory_of(seen: object) -> Trajectory:
    """The trajectory itself, or that of a System; anything else is refused.

    >>> trajectory_of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))).times
    tensor([0.])
    """
    path = getattr(seen, "trajectory", seen)
    if not isinstance(path, Trajectory):
        raise HelmscopeError(
            f"trajectory is a {type(seen).__name__}, but it must be a Trajectory or a System such as a Simulation"
        )
    return path


def with_replicates(values: Mapping[str, Tensor], axes: Mapping[str, ArrayLike]) -> xr.Dataset:
    """The Measurement, in float64, of values whose axes have the names and coordinates ``axes``, the replicates among
    them.

    >>> with_replicates({"mass": torch.tensor([[0.1, 0.3]])}, {"layer": [0], "prompt": [0, 1]}).mass.dims
    ('layer', 'prompt')
    """
    coords = {name: np.asarray(axis) for name, axis in axes.items()}
    sizes, data = tuple(len(axis) for axis in coords.values()), {}
    for name, value in values.items():
        if tuple(value.shape) != sizes:
            wanted = ", ".join(axes)
            raise HelmscopeError(
                f"{name} has shape {tuple(value.shape)}, but it must have the axes ({wanted}) of sizes {sizes}"
            )
        data[name] = (tuple(axes), value.detach().to("cpu", torch.float64).numpy())
    return check_replicates(xr.Dataset(data, coords))


def with_bounds(measurement: xr.Dataset, bounds: Mapping[str, tuple[float, float]]) -> xr.Dataset:
    """The Measurement with the bounds between which its quantities lie by definition as attributes ``valid_min`` and
    ``valid_max``: intervals that ``reduce_replicates`` makes do not leave them. Names that it lacks are passed over.

    >>> seen = xr.Dataset({"mass": ("prompt", [0.1, 0.3])})
    >>> with_bounds(seen, {"mass": SHARE, "rank": AT_LEAST_1}).mass.attrs
    {'valid_min': 0.0, 'valid_max': 1.0}
    """
    told = {
        name: {end: at for end, at in zip(("valid_min", "valid_max"), ends, strict=True) if math.isfinite(at)}
        for name, ends in bounds.items()
    }
    return measurement.assign(
        {name: measurement[name].assign_attrs(told[name]) for name in told if name in measurement}
    )


def state_axes(path: Trajectory) -> dict[str, np.ndarray]:
    """The names and the coordinates of a trajectory's first two axes: time or depth, and the replicates.

    >>> state_axes(Trajectory(torch.tensor([0.5]), torch.eye(2).expand(1, 3, 2, 2)))
    {'time': array([0.5], dtype=float32), 'system': array([0, 1, 2])}
    """
    count = path.states.shape[1]
    if not count:
        raise HelmscopeError(f"trajectory has a batch of 0 {path.replicate}s, but a Measurement needs at least one")
    return {path.axis: path.times.cpu().numpy(), path.replicate: np.arange(count)}


def token_weights(
    x: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"] | None
) -> Float[Tensor, "*batch n"]:
    """The weights of tokens x, checked; 1 for every token where None.

    >>> token_weights(torch.eye(2), None)
    tensor([1., 1.])
    """
    given = check_weights(x, weights)
    return torch.ones_like(x[..., 0]) if given is None else given


def token_mean(value: Float[Tensor, "*batch n"], weights: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """The mean over tokens by their weights; a token of weight 0 may be NaN.

    >>> token_mean(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([1.0, 3.0, 0.0]))
    tensor(2.5000)
    """
    return torch.where(weights > 0, weights * value, 0.0).sum(-1) / weights.sum(-1)


def check_system(system: object) -> System:
    """A System, which knows its mechanism; a bare Trajectory and anything else is refused.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> len(check_system(integrate(SA(beta=0.0), torch.eye(3), times=[1.0])).trajectory.times)
    1
    """
    if isinstance(system, type) or not isinstance(system, System):
        shown = system.__name__ if isinstance(system, type) else type(system).__name__
        raise HelmscopeError(f"system is {shown}, but the mechanism is known to a System only, such as a Simulation")
    return system
