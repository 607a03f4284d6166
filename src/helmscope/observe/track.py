"""From functions of tokens to Measurements over time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.fields.field import check_weights
from helmscope.types import HelmscopeError, Progress, System, Trajectory, check_measurement, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import ArrayLike
    from torch import Tensor


def track(
    trajectory: Trajectory | System, *, progress: Progress | None = None, **quantities: Callable[..., Tensor]
) -> xr.Dataset:
    """Mean and standard error over the systems, at each time, of functions f(x, weights=...) of tokens (time, batch, n,
    d) with a value (time, batch).

    The weights of the trajectory, in which padding has weight 0, are passed to every function; one that takes none is
    refused where there are any, so that no call counts padding by accident. The systems are the replicates: n is their
    number. With one system there is no standard error (NaN). Where a system stopped early its states are NaN, which
    observables refuse: cut the trajectory first. ``progress`` is called with the share of the functions done.

    >>> from helmscope.observe.order import order_parameter
    >>> seen = track(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)), order=order_parameter)
    >>> round(float(seen.order[0]), 4), float(seen.order_stderr[0]), seen.attrs["n"]
    (0.7071, 0.0, 3)
    """
    path, tell, values = trajectory_of(trajectory), check_progress(progress), {}
    for name, function in quantities.items():
        values[name] = _value(name, function, path)
        tell(len(values) / len(quantities))
    return mean_and_stderr(values, state_axis(path))


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


def mean_and_stderr(values: Mapping[str, Tensor], axes: Mapping[str, ArrayLike]) -> xr.Dataset:
    """The Measurement of per-system values, whose axes are the first of ``axes``, the systems, then the rest of
    ``axes``, which gives each axis its name and coordinates.

    >>> seen = mean_and_stderr({"mass": torch.tensor([[1.0, 3.0]])}, {"layer": [0]})
    >>> float(seen.mass[0]), float(seen.mass_stderr[0]), seen.attrs["n"]
    (2.0, 1.0, 2)
    """
    sizes = [len(np.asarray(axis)) for axis in axes.values()]
    count, data = 0, {}
    for name, value in values.items():
        shape = tuple(value.shape)
        count = shape[1] if len(shape) > 1 else 0
        if shape != (sizes[0], count, *sizes[1:]):
            first, *others = axes
            wanted = ", ".join((first, "system", *others))
            raise HelmscopeError(f"{name} has shape {shape}, but it must have the axes ({wanted}) of sizes {sizes}")
        if not count:
            raise HelmscopeError("trajectory has a batch of 0 systems, but a mean over systems needs at least one")
        value = value.detach().to(torch.float64).cpu()
        spread = value.std(1, correction=1) if count > 1 else torch.full_like(value[:, 0], torch.nan)
        data[name] = (tuple(axes), value.mean(1).numpy())
        data[f"{name}_stderr"] = (tuple(axes), (spread / count**0.5).numpy())
    return check_measurement(xr.Dataset(data, {name: np.asarray(axis) for name, axis in axes.items()}, {"n": count}))


def state_axis(path: Trajectory) -> dict[str, np.ndarray]:
    """The name and the coordinates of a trajectory's first axis.

    >>> state_axis(Trajectory(torch.tensor([0.5]), torch.eye(2).expand(1, 1, 2, 2)))
    {'time': array([0.5], dtype=float32)}
    """
    return {path.axis: path.times.cpu().numpy()}


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
