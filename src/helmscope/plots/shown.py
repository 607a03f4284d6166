"""Reduced Measurements as figures show them: with labels, bands, nulls and single replicates."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from helmscope.plots.style import COLORS
from helmscope.plots.variable_panel import single_replicates
from helmscope.stats.reduce import band, reduced
from helmscope.types import HelmscopeError, keeps_replicates, replicate_axis, type_with_article

MAX_NAMED_HEADS = 12  # heads that are drawn side by side with their intervals, instead of as the cells of a map
STATE_AXES = ("depth", "layer", "time")  # the horizontal axis, if a variable has one of these


@dataclass(frozen=True, eq=False)
class Shown:
    """A reduced Measurement, its label, the name of the replicates that it is the mean of, and the replicates
    themselves if they are too few for a band.

    >>> import xarray as xr
    >>> reduced_by_label(xr.Dataset({"x": ("prompt", [1.0, 2.0])}))[0].replicate
    'prompt'
    """

    label: str
    data: xr.Dataset
    replicate: str
    singles: Sequence[xr.Dataset] = ()

    def has_band(self, name: str) -> bool:
        """Whether a band is drawn, rather than single replicates; a range needs no minimum number of replicates."""
        return not self.singles or self.data[name].attrs.get("summary") == "range"

    def single_values(self, name: str) -> list[xr.DataArray]:
        """The replicates of a variable, with the axes of ``value(name)``, if they are drawn instead of a band."""
        dims = self.value(name).dims
        return [] if self.has_band(name) else [_with_axes(single[name], dims) for single in self.singles]

    def count(self, name: str) -> int:
        """The number of replicates of a variable."""
        return int(self.data[name].attrs["n"] if "n" in self.data[name].attrs else self.data.attrs["n"])

    def value(self, name: str) -> xr.DataArray:
        """A variable with depth, layer or time as its first axis, and without axes of a single entry after it. A single
        depth, layer or time is left out of a variable that is a function of a further numeric axis.
        """
        value = self.data[name]
        first = next((axis for axis in STATE_AXES if axis in value.dims), next(iter(value.dims), None))
        if first is None:
            return value
        value = value.transpose(first, ...)
        value = value.squeeze([dim for dim in value.dims[1:] if value.sizes[dim] == 1], drop=True)
        is_function = value.ndim == 2 and value.shape[1] > len(COLORS) and value[value.dims[1]].dtype.kind in "fiu"
        return value.squeeze(first, drop=True) if is_function and value.shape[0] == 1 else value

    def band(self, name: str) -> Iterator[xr.DataArray]:
        """The edges of the band of a variable, with the axes of ``value(name)``."""
        dims, hidden = self.value(name).dims, not self.has_band(name)
        for edge in band(self.data, name):
            yield _with_axes(edge * np.nan if hidden else edge, dims)

    def null(self, name: str) -> xr.DataArray | None:
        """The null of a variable; None if it has none, or one with other axes."""
        null = self.data.get(f"{name}_null")
        return null if null is not None and set(null.dims) <= set(self.value(name).dims) else None


def reduced_by_label(measurements: Any) -> list[Shown]:
    """The Measurements, reduced; raises HelmscopeError for anything else.

    >>> import xarray as xr
    >>> [each.label for each in reduced_by_label({"A": xr.Dataset({"x": ("prompt", [1.0, 2.0])})})]
    ['A']
    """
    by_label = measurements if isinstance(measurements, Mapping) and not _is_dataset(measurements) else None
    if by_label is not None and not by_label:
        raise HelmscopeError("measurements is empty, but it must hold at least one Measurement")
    shown = []
    for label, data in ({"": measurements} if by_label is None else by_label).items():
        if not _is_dataset(data):
            name = "measurements" if by_label is None else f"measurements['{label}']"
            raise HelmscopeError(
                f"{name} is {type_with_article(data)}, but it must be a Measurement (xarray Dataset), such as "
                "hs.track(recording, order=hs.order_parameter)"
            )
        data = _with_named_heads(data)
        replicate = replicate_axis(data) if keeps_replicates(data) else str(data.attrs.get("replicate", "replicate"))
        shown.append(Shown(str(label), reduced(data), replicate, single_replicates(data)))
    return shown


def _with_named_heads(data: xr.Dataset) -> xr.Dataset:
    """The Measurement with one axis of names such as L0H4 if it holds only a few heads, chosen from several layers or
    from one: a map of layers and heads would be all but empty.

    >>> import numpy as np
    >>> import xarray as xr
    >>> values = [[np.nan, 0.1], [0.2, np.nan]]
    >>> x = _with_named_heads(xr.Dataset({"x": (("layer", "head"), values)}, {"layer": [0, 7], "head": [2, 4]})).x
    >>> x["head"].values.tolist(), x.values.tolist()
    (['L0H4', 'L7H2'], [0.1, 0.2])
    """
    pair = {"layer", "head"}
    by_head = [value for value in data.data_vars.values() if pair <= set(value.dims)]
    others = [value for name, value in data.variables.items() if name not in pair]
    if not by_head or any(len(pair & set(value.dims)) == 1 for value in others):
        return data
    known = [value.notnull().any([dim for dim in value.dims if dim not in pair]) for value in by_head]
    present = np.any([each.transpose("layer", "head").values for each in known], axis=0)
    if not 0 < present.sum() <= MAX_NAMED_HEADS or (present.all() and min(present.shape) > 1):
        return data
    layers, heads = np.nonzero(present)
    numbers = (data["layer"].values[layers], data["head"].values[heads])
    names = [f"L{layer}H{head}" for layer, head in zip(*numbers, strict=True)]
    places = {axis: xr.DataArray(each, dims="head") for axis, each in (("layer", layers), ("head", heads))}
    return data.isel(places).drop_vars("layer").assign_coords(head=names)


def _is_dataset(value: object) -> bool:
    return hasattr(value, "data_vars")


def _with_axes(value: xr.DataArray, dims: Sequence[Hashable]) -> xr.DataArray:
    """The variable without its axes of a single entry that are not among ``dims``, and with these in order."""
    return value.squeeze([dim for dim in value.dims if dim not in dims], drop=True).transpose(*dims)
