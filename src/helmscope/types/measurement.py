"""The rules of a Measurement: an xarray Dataset, with its replicates or reduced over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.arguments import known_name, whole_number
from helmscope.types.errors import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr

_OF_REDUCED = ("_stderr", "_low", "_high")
COMPANIONS = (*_OF_REDUCED, "_null")
REPLICATES = ("prompt", "system", "seed", "group")  # what a replicate can be; a layer is one where these are absent


def replicate_axis(dataset: xr.Dataset, over: str | None = None) -> str:
    """The replicate axis of a Dataset: ``over``, which must be one of its axes, or by its name ``prompt``, ``system``,
    ``seed`` or ``group``. ``layer`` is the replicate axis where there is none of those, and else an axis like others.

    Refuses a Dataset without a replicate axis, and one with several where ``over`` does not choose.

    >>> import xarray as xr
    >>> replicate_axis(xr.Dataset({"rank": (("layer", "prompt"), [[3.0, 4.0]])}))
    'prompt'
    """
    if not hasattr(dataset, "data_vars"):
        raise HelmscopeError(f"dataset is a {type(dataset).__name__}, but a Measurement is an xarray Dataset")
    axes = [str(axis) for axis in dataset.dims]
    if over is not None:
        return known_name("axis of the measurement", str(over), axes)
    found = [axis for axis in REPLICATES if axis in axes] or [axis for axis in axes if axis == "layer"]
    if not found:
        allowed = ", ".join((*REPLICATES, "layer"))
        raise HelmscopeError(f"measurement has the axes {axes}, but its replicate axis must be one of {allowed}")
    if len(found) > 1:
        raise HelmscopeError(f"measurement has the replicate axes {found}, but it must have one: choose it with over=")
    return found[0]


def check_replicates(dataset: xr.Dataset, over: str | None = None) -> xr.Dataset:
    """The rule of a Measurement that keeps its replicates, before ``stats.reduce`` makes intervals of them: every NAME
    has the replicate axis, and its one companion is NAME_null, with or without that axis.

    Returns the Dataset unchanged, so that it can close a function; refuses a Dataset that breaks the rule.

    >>> import xarray as xr
    >>> check_replicates(xr.Dataset({"rank": ("prompt", [3.0, 4.0]), "rank_null": 5.0})).sizes["prompt"]
    2
    """
    axis = replicate_axis(dataset, over)
    names = [str(name) for name in dataset.data_vars]
    for name in names:
        end = next((end for end in COMPANIONS if name.endswith(end)), None)
        if end is not None and name.removesuffix(end) not in names:
            raise HelmscopeError(f"measurement has '{name}' but no '{name.removesuffix(end)}' that it belongs to")
        if end not in (None, "_null"):
            raise HelmscopeError(f"measurement has '{name}', but with its replicates it must hold the values alone")
        if end is None and axis not in dataset[name].dims:
            raise HelmscopeError(f"'{name}' has axes {dataset[name].dims}, but its replicate axis must be '{axis}'")
    return dataset


def keeps_replicates(dataset: xr.Dataset) -> bool:
    """Whether a Measurement still holds its replicates: it has a replicate axis and no standard errors or intervals.

    >>> import xarray as xr
    >>> keeps_replicates(xr.Dataset({"rank": ("prompt", [3.0, 4.0])}))
    True
    >>> keeps_replicates(xr.Dataset({"rank": 3.5, "rank_stderr": 0.5}, attrs={"n": 2}))
    False
    """
    if not hasattr(dataset, "data_vars"):
        raise HelmscopeError(f"dataset is a {type(dataset).__name__}, but a Measurement is an xarray Dataset")
    is_reduced = any(str(name).endswith(_OF_REDUCED) for name in dataset.data_vars)
    return not is_reduced and any(axis in dataset.dims for axis in (*REPLICATES, "layer"))


def check_measurement(dataset: xr.Dataset) -> xr.Dataset:
    """The Measurement rule, for a Dataset in either form: ``check_replicates`` where it keeps its replicates, else
    ``check_reduced``.

    Returns the Dataset unchanged, so that it can close a function; refuses a Dataset that breaks the rule.

    >>> import xarray as xr
    >>> check_measurement(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16})).attrs["n"]
    16
    >>> check_measurement(xr.Dataset({"order": ("system", [0.4, 0.6])})).sizes["system"]
    2
    """
    return check_replicates(dataset) if keeps_replicates(dataset) else check_reduced(dataset)


def check_reduced(dataset: xr.Dataset) -> xr.Dataset:
    """The rule of a Measurement that was reduced over its replicates: every NAME has NAME_stderr, or NAME_low and
    NAME_high; NAME_null where there is one; and the attribute n says how many replicates are behind it (on the
    variable, else on the Dataset). It is 0 only where NAME has no value at all.

    Returns the Dataset unchanged, so that it can close a function; refuses a Dataset that breaks the rule.

    >>> import xarray as xr
    >>> check_reduced(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16})).attrs["n"]
    16
    """
    if not hasattr(dataset, "data_vars"):
        raise HelmscopeError(f"dataset is a {type(dataset).__name__}, but a Measurement is an xarray Dataset")
    names = [str(name) for name in dataset.data_vars]
    for name in names:
        base = next((name.removesuffix(end) for end in COMPANIONS if name.endswith(end)), None)
        if base is not None:
            if base not in names:
                raise HelmscopeError(f"measurement has '{name}' but no '{base}' that it belongs to")
            continue
        has_stderr = f"{name}_stderr" in names
        has_interval = f"{name}_low" in names and f"{name}_high" in names
        if not (has_stderr or has_interval):
            raise HelmscopeError(f"measurement '{name}' has neither '{name}_stderr' nor '{name}_low' and '{name}_high'")
        n = dataset[name].attrs.get("n", dataset.attrs.get("n"))
        if n is None:
            raise HelmscopeError(f"measurement '{name}' has no attribute n, the number of replicates")
        whole_number(f"attribute n of measurement '{name}'", n, at_least=int(bool(dataset[name].notnull().any())))
        _check_companions(dataset, name)
    return dataset


def _check_companions(dataset: xr.Dataset, name: str) -> None:
    for end in _OF_REDUCED:
        other = dataset.get(f"{name}{end}")
        if other is not None and set(other.dims) != set(dataset[name].dims):
            raise HelmscopeError(f"'{name}{end}' has axes {other.dims}, but '{name}' has {dataset[name].dims}")
    if f"{name}_stderr" in dataset and bool((dataset[f"{name}_stderr"] < 0).any()):
        raise HelmscopeError(f"'{name}_stderr' holds a negative value, but a standard error is >= 0")
    if f"{name}_low" in dataset and f"{name}_high" in dataset:
        # a NaN compares as False, so an undefined estimate does not read as crossed
        crossed = (dataset[f"{name}_low"] > dataset[name]) | (dataset[name] > dataset[f"{name}_high"])
        if bool(crossed.any()):
            raise HelmscopeError(f"'{name}' leaves its own interval '{name}_low'..'{name}_high'")
