"""Measurements over time from functions of tokens."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.fields.weights import check_weights
from helmscope.geometry.arithmetic import is_vmapped
from helmscope.geometry.linkage import collapse_padding
from helmscope.geometry.sphere import check_tokens
from helmscope.observe.labels import label_attributes
from helmscope.runs.bar import progress_reporting, shows_progress
from helmscope.types import (
    HelmscopeError,
    Instrument,
    System,
    Trajectory,
    as_measurement,
    check_progress,
    check_replicates,
    identity_coordinates,
    record_first,
    short_repr,
    type_with_article,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import ArrayLike
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

SHARE, AT_LEAST_0, AT_LEAST_1 = (0.0, 1.0), (0.0, math.inf), (1.0, math.inf)  # bounds of quantities


@shows_progress("tracking")
def track(
    system: Trajectory | System,
    *unnamed: object,
    progress: ProgressOption = None,
    **quantities: Callable[..., Tensor],
) -> xr.Dataset:
    """Evaluates functions of tokens along a trajectory: a Measurement over (time, system), or (depth, prompt).

    A function f(x, weights=...) maps tokens (time, batch, n, d) to values (time, batch). The weights of the trajectory,
    which are 0 for padding, are passed to every function. If there are any, a function without the argument ``weights``
    raises HelmscopeError, so that padding is never counted by accident. The systems are the replicates:
    ``reduce_replicates`` returns means with intervals, and ``paired_difference`` compares two models prompt by prompt.
    The attribute ``model`` names the model of a recording. The states of a system that stopped early are NaN, for which
    observables raise HelmscopeError: cut the trajectory first. ``progress`` is called with the share of the functions
    done.

    >>> from helmscope.observe.order import order_parameter
    >>> measured = track(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2)), order=order_parameter)
    >>> measured.order.dims, measured.order.values.round(4).tolist()
    (('time', 'system'), [[0.7071, 0.7071, 0.7071]])
    """
    path, report, values = trajectory_of(system), check_progress(progress), {}
    if unnamed or not quantities:
        first = [getattr(each, "__name__", short_repr(each)) for each in unnamed[:1]]
        given = f"is given {first[0]} without a name" if first else "is empty"
        raise HelmscopeError(
            f"quantities {given}, but track needs at least one function of tokens by its name, such as "
            "order=hs.order_parameter"
        )
    for name, function in quantities.items():
        values[name] = _evaluate(name, function, path)
        report(len(values) / len(quantities))
    measurement = with_replicates(values, path)
    for name, function in quantities.items():
        if long_name := _long_name(function):
            measurement[name].attrs |= label_attributes(long_name)
    return measurement.assign_attrs(origin_attributes(system))


def origin_attributes(system: object) -> dict[str, str]:
    """What a Measurement says of where its numbers come from: the ``model`` of a recording, the ``system`` (field and
    noise) of a simulation, nothing for bare states.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> origin_attributes(integrate(SA(beta=4.0), torch.eye(2), times=[0.1]))
    {'system': 'SA(beta=4)'}
    """
    origin = getattr(system, "origin", None)  # of a Recording
    if origin is not None:
        return {"model": str(origin.title)}
    title = getattr(system, "title", None)  # of a Simulation
    return {} if title is None else {"system": str(title)}


def _long_name(function: Callable[..., Tensor]) -> str:
    """The name of an observable of this package in words; empty for others, which are labeled by their keyword."""
    inner = function.func if isinstance(function, partial) else function
    known = str(getattr(inner, "__module__", "")).startswith("helmscope.")
    return str(getattr(inner, "__name__", "")).replace("_", " ") if known else ""


def _evaluate(name: str, function: Callable[..., Tensor], path: Trajectory) -> Tensor:
    """Evaluates a function at all states, with the weights of the tokens if there are any."""
    if not callable(function):
        raise HelmscopeError(
            f"{name} is {short_repr(function)}, but it must be a function of tokens f(x, weights=...) such as "
            "hs.order_parameter"
        )
    if path.weights is None:
        return function(path.states)
    try:
        inspect.signature(function).bind(path.states, weights=path.weights)
    except (TypeError, ValueError):  # the latter for built-in functions without a signature
        raise HelmscopeError(
            f"{name} is a function that takes no weights, but the tokens of this trajectory have them (padding has "
            "weight 0): pass a function f(x, weights=...)"
        ) from None
    return function(path.states, weights=path.weights)


def trajectory_of(system: object) -> Trajectory:
    """Returns the trajectory itself, or that of a System; raises HelmscopeError for anything else.

    >>> trajectory_of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))).times
    tensor([0.])
    """
    path = getattr(system, "trajectory", system)
    if not isinstance(path, Trajectory):
        raise HelmscopeError(
            f"system is {type_with_article(system)}, but it must be a Trajectory or a System such as a Simulation"
            f"{record_first(system)}"
        )
    return path


def with_replicates(
    values: Mapping[str, Tensor], path: Trajectory, further_axes: Mapping[str, ArrayLike] | None = None
) -> xr.Dataset:
    """Builds a Measurement in float64 from values along the states and systems of a trajectory, then along
    ``further_axes``, given by name and coordinates. The unit of the times and the identities of the systems become part
    of the coordinates. Raises HelmscopeError for a value of another shape.

    >>> path = Trajectory(torch.zeros(1), torch.eye(2).expand(1, 3, 2, 2))
    >>> with_replicates({"mass": torch.rand(1, 3, 5)}, path, {"bin": range(5)}).mass.dims
    ('time', 'system', 'bin')
    """
    axes = {**_state_axes(path), **(further_axes or {})}
    coords: dict[str, Any] = {name: np.asarray(axis) for name, axis in axes.items()}
    sizes, data = tuple(len(axis) for axis in coords.values()), {}
    coords[path.axis] = (path.axis, coords[path.axis], {"units": path.unit} if path.unit else {})
    for name, value in values.items():
        if tuple(value.shape) != sizes:
            raise HelmscopeError(
                f"{name} has shape {tuple(value.shape)}, but it must have the axes ({', '.join(axes)}) of sizes {sizes}"
            )
        data[name] = (tuple(axes), value.detach().to("cpu", torch.float64).numpy())
    return check_replicates(xr.Dataset(data, coords | identity_coordinates(path.replicate, path.identities)))


def warn_of_short_texts(quantity: str, short: Sequence[bool]) -> None:
    """Warns that a quantity is undefined for the texts that are marked as too short.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn_of_short_texts("pairs", [False, True])
    >>> str(caught[0].message)
    'pairs are undefined (NaN) for texts[1], of which too few tokens count: means leave it out'
    """
    places = [i for i, is_short in enumerate(short) if is_short]
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        warnings.warn(
            f"{quantity} are undefined (NaN) for texts[{places[0]}]{more}, of which too few tokens count: means leave "
            f"{'them' if more else 'it'} out",
            stacklevel=4,
        )


def with_bounds(measurement: xr.Dataset, bounds: Mapping[str, tuple[float, float]]) -> xr.Dataset:
    """Adds the bounds that quantities have by definition, as attributes ``valid_min`` and ``valid_max``.

    ``reduce_replicates`` clips its intervals to them. Names that the Measurement does not contain are ignored.

    >>> measured = xr.Dataset({"mass": ("prompt", [0.1, 0.3])})
    >>> with_bounds(measured, {"mass": SHARE, "rank": AT_LEAST_1}).mass.attrs
    {'valid_min': 0.0, 'valid_max': 1.0}
    """
    attributes = {
        name: {key: bound for key, bound in zip(("valid_min", "valid_max"), ends, strict=True) if math.isfinite(bound)}
        for name, ends in bounds.items()
    }
    bounded = as_measurement(measurement).copy()  # shallow; ``assign`` would align all variables again
    for name in attributes.keys() & bounded.keys():
        bounded[name].attrs |= attributes[name]
    return bounded


def with_cumulative(measurement: xr.Dataset, axis: str, names: Collection[str]) -> xr.Dataset:
    """Marks quantities that count from the first state, by the attribute ``cumulative`` with the name of their axis: a
    summary shows their values at its end, since a mean over it says little. Names that the Measurement does not contain
    are ignored.

    >>> measured = xr.Dataset({"arc": (("depth", "prompt"), [[0.0], [0.2]])})
    >>> with_cumulative(measured, "depth", {"arc"}).arc.attrs
    {'cumulative': 'depth'}
    """
    marked = measurement.copy()
    for name in marked.data_vars:
        if name in names:
            marked[name].attrs["cumulative"] = axis
    return marked


def _state_axes(path: Trajectory) -> dict[str, np.ndarray]:
    """Names and coordinates of the first two axes of a trajectory: time or depth, and replicates."""
    count = path.states.shape[1]
    if not count:
        raise HelmscopeError(f"trajectory has a batch of 0 {path.replicate}s, but a Measurement needs at least one")
    return {path.axis: path.times.cpu().numpy(), path.replicate: np.arange(count)}


def token_weights(
    x: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"] | None
) -> Float[Tensor, "*batch n"]:
    """The weights of tokens x, checked; 1 for every token if None.

    >>> token_weights(torch.eye(2), None)
    tensor([1., 1.])
    """
    checked = check_weights(x, weights)
    return torch.ones_like(x[..., 0]) if checked is None else checked


def counted_tokens(
    x: Float[Tensor, "*batch n d"], weights: Float[Tensor, "*batch n"] | None
) -> Float[Tensor, "*batch n d"]:
    """The tokens x, checked to be unit vectors; those of weight 0 may be anything, such as the zero vectors at the
    padding of a recording, and are replaced by the first token that counts.

    >>> counted_tokens(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 2.0]))
    tensor([[0., 1.],
            [0., 1.]])
    """
    if weights is None or not isinstance(x, torch.Tensor) or x.ndim < 2:
        return check_tokens(x)
    counts = token_weights(x, weights) > 0
    all_count = not is_vmapped(counts) and bool(counts.all())
    return check_tokens(x if all_count else collapse_padding(x, counts))


def token_mean(value: Float[Tensor, "*batch n"], weights: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Weighted mean over tokens; values of tokens of weight 0 may be NaN.

    >>> token_mean(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([1.0, 3.0, 0.0]))
    tensor(2.5000)
    """
    return torch.where(weights > 0, weights * value, 0.0).sum(-1) / weights.sum(-1)


BLOCK_NUMBERS = 2**18  # of one tensor that an instrument works on at a time


def row_blocks(rows: int, numbers: int) -> list[slice]:
    """Slices of consecutive systems of a chunk, with tensors of about ``BLOCK_NUMBERS`` entries if a system has
    ``numbers``, so that the working memory of an instrument does not grow with the chunk.

    >>> row_blocks(5, 2**17)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, BLOCK_NUMBERS // max(1, numbers))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def check_system(system: object) -> System:
    """Returns the System; raises HelmscopeError for a Trajectory, which has no mechanism, and for anything else.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> len(check_system(integrate(SA(beta=0.0), torch.eye(3), times=[1.0])).trajectory.times)
    1
    """
    if isinstance(system, type) or not isinstance(system, System):
        shown = f"the class {system.__name__}" if isinstance(system, type) else type_with_article(system)
        raise HelmscopeError(
            f"system is {shown}, but it must be a System with a mechanism, such as a Simulation{record_first(system)}"
        )
    return system


def replayed(system: object, instrument: Instrument, progress: ProgressOption) -> xr.Dataset:
    """The Measurement of one instrument from a replay of its own, whose bar has the instrument's name; what every
    measurement by one replay does. Raises HelmscopeError for what ``check_system`` refuses.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.observe.kernel import KernelStatistics
    >>> from helmscope.solve.integrate import integrate
    >>> replayed(integrate(SA(beta=0.0), torch.eye(3), times=[1.0]), KernelStatistics(), print).row_mass.item()
    1.0
    1.0
    """
    with progress_reporting(progress, instrument.name.replace("_", " ")) as report:
        return check_system(system).replay(instrument, progress=report)[instrument.name]
