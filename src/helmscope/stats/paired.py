"""Differences of two Measurements on the same replicates, such as two models on the same prompts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError, check_replicates, replicate_axis
from helmscope.types.measurement import IDENTITY

if TYPE_CHECKING:
    import xarray as xr


def paired_difference(first: xr.Dataset, second: xr.Dataset, *, different_texts: bool = False) -> xr.Dataset:
    """The Measurement first - second, replicate by replicate.

    ``reduce_replicates`` of the result gives a paired interval, which is narrower than for two separate means if the
    replicates are positively correlated. The attribute ``difference`` of every variable names the two, such as "A - B"
    if both Measurements have an attribute ``model``, otherwise it is "difference"; figures show it. Both must have the
    same variables and the same coordinates along every axis, including the replicate axis. NAME_null is dropped.
    Attributes are those of ``first``, with the bounds of a difference: that of two shares is in [-1, 1]. (A plain
    ``first - second`` would keep the bounds of ``first``, and silently drop replicates that are missing in ``second``.)
    Raises ``HelmscopeError`` if the two do not match.

    Prompts are matched by their number, and their texts must be equal: the coordinate ``text``, which recordings
    provide, holds a hash of each source text (of its token ids, if ids were recorded), so that models with different
    tokenizers can be compared. Pass ``different_texts=True`` for pairs that differ on purpose, such as a clean and a
    corrupted prompt. Systems of simulations are matched by their number alone, unless both have the coordinate
    ``start``, which a ``Trajectory`` with ``identities`` provides.

    >>> import xarray as xr
    >>> one, two = (xr.Dataset({"width": ("prompt", values)}) for values in ([3.0, 5.0], [2.0, 4.5]))
    >>> paired_difference(one, two).width.values.tolist()
    [1.0, 0.5]
    >>> one, two = one.assign_coords(text=("prompt", ["a", "b"])), two.assign_coords(text=("prompt", ["a", "c"]))
    >>> paired_difference(one, two)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: prompt 1 of second has another text than prompt 1 of first, but pairs need the ...
    """
    import xarray as xr

    axes = [replicate_axis(check_replicates(dataset)) for dataset in (first, second)]
    if axes[0] != axes[1]:
        raise HelmscopeError(f"second has replicates along '{axes[1]}', but those of first are along '{axes[0]}'")
    names, others = (
        [str(name) for name in dataset.data_vars if not str(name).endswith("_null")] for dataset in (first, second)
    )
    if set(names) != set(others):
        raise HelmscopeError(f"second holds {sorted(others)}, but pairs need the quantities of first, {sorted(names)}")
    try:
        first, second = xr.align(first[names], second[names], join="exact")
    except ValueError:
        raise HelmscopeError(
            f"second has sizes {dict(second.sizes)}, but pairs need the coordinates of first, of sizes "
            f"{dict(first.sizes)}, along every axis"
        ) from None
    if not different_texts:
        _check_identities(first, second, axes[0])
    models = [dataset.attrs.get("model") for dataset in (first, second)]
    label = "difference" if None in models else " - ".join(map(str, models))
    data = {
        name: (first[name] - second[name])
        .drop_attrs()
        .assign_attrs(_attributes(first[name], second[name]), difference=label)
        for name in names
    }
    kept_attributes = {key: value for key, value in first.attrs.items() if key != "model" or models[0] == models[1]}
    difference = xr.Dataset(data, attrs=kept_attributes)
    # arithmetic drops the attributes of coordinates, such as units
    kept = {name: first.coords[name].variable for name in difference.coords if name in first.coords}
    return check_replicates(difference.assign_coords(kept))


def _check_identities(first: xr.Dataset, second: xr.Dataset, axis: str) -> None:
    """Raise HelmscopeError if a replicate of both was measured on different texts or started differently."""
    name = IDENTITY.get(axis)
    if name is None or name not in first.coords or name not in second.coords:
        return
    for number, one, two in zip(first[axis].values, first[name].values, second[name].values, strict=True):
        if str(one) != str(two):
            raise HelmscopeError(
                f"{axis} {number} of second has another {name} than {axis} {number} of first, but pairs need the same "
                f"{name}s in the same order and form (both as strings or both as token ids), or different_texts=True"
            )


def _attributes(first: xr.DataArray, second: xr.DataArray) -> dict[str, object]:
    """The attributes of the first, with the bounds of a difference."""
    ends = (("valid_min", -math.inf), ("valid_max", math.inf))
    (low, high), (other_low, other_high) = ([variable.attrs.get(*end) for end in ends] for variable in (first, second))
    bounds = {"valid_min": low - other_high, "valid_max": high - other_low}
    kept = {name: value for name, value in first.attrs.items() if name not in bounds}
    return kept | {name: float(end) for name, end in bounds.items() if math.isfinite(end)}
