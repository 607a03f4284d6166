"""The rules for a Measurement: an xarray Dataset, with its replicates or reduced over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from helmscope.types.arguments import check_integer, check_name, type_with_article
from helmscope.types.errors import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.types.dataset import Measurement

_REDUCED = ("_stderr", "_low", "_high")
COMPANIONS = (*_REDUCED, "_null")  # suffixes of the variables that accompany a variable NAME
REPLICATES = ("prompt", "system", "seed", "group")  # replicate axes; without one of these, layers are the replicates
IDENTITY = {"prompt": "text", "system": "start"}  # coordinate along a replicate axis: what each one was measured on


def replicate_axis(dataset: xr.Dataset, over: str | None = None) -> str:
    """The name of the replicate axis of a Dataset.

    This is ``over`` if given, which must be one of its axes; otherwise the axis named ``prompt``, ``system``, ``seed``
    or ``group``, or ``layer`` if it has none of these. Raises ``HelmscopeError`` if there is no replicate axis, or if
    there are several and ``over`` is None.

    >>> import xarray as xr
    >>> replicate_axis(xr.Dataset({"rank": (("layer", "prompt"), [[3.0, 4.0]])}))
    'prompt'
    """
    _check_dataset(dataset)
    axes = [str(axis) for axis in dataset.dims]
    if over is not None:
        return check_name("axis of the measurement", str(over), axes)
    candidates = [axis for axis in REPLICATES if axis in axes] or [axis for axis in axes if axis == "layer"]
    if not candidates:
        allowed = ", ".join((*REPLICATES, "layer"))
        raise HelmscopeError(f"measurement has the axes {axes}, but its replicate axis must be one of {allowed}")
    if len(candidates) > 1:
        raise HelmscopeError(
            f"measurement has the replicate axes {candidates}, but it must have one: choose it with over="
        )
    return candidates[0]


def _check_dataset(dataset: object) -> None:
    if not hasattr(dataset, "data_vars"):
        remedy = ": take one of its values" if isinstance(dataset, Mapping) else ""
        raise HelmscopeError(
            f"measurement is {type_with_article(dataset)}, but a Measurement is an xarray Dataset{remedy}"
        )


def identity_coordinates(replicate: str, identities: Sequence[str] | None) -> dict[str, tuple[str, list[str]]]:
    """The coordinate that identifies what each replicate was measured on, ``text`` along ``prompt`` or ``start`` along
    ``system``; none if the identities are unknown or the replicates have another name.

    >>> identity_coordinates("prompt", ["text 1f0a", "text 99c2"])
    {'text': ('prompt', ['text 1f0a', 'text 99c2'])}
    >>> identity_coordinates("prompt", None)
    {}
    """
    if identities is None or replicate not in IDENTITY:
        return {}
    return {IDENTITY[replicate]: (replicate, list(identities))}


def check_replicates(dataset: xr.Dataset, over: str | None = None) -> Measurement:
    """Check a Measurement that keeps its replicates, as it is before ``reduce_replicates``: every NAME has the
    replicate axis, and its only companion is NAME_null, with or without that axis.

    Returns the same data as a ``Measurement``, which can be plotted; raises ``HelmscopeError`` if they break this rule.

    >>> import xarray as xr
    >>> check_replicates(xr.Dataset({"rank": ("prompt", [3.0, 4.0]), "rank_null": 5.0})).sizes["prompt"]
    2
    """
    _check_dataset(dataset)
    names = [str(name) for name in dataset.data_vars]
    for name in names:
        end = next((end for end in COMPANIONS if name.endswith(end)), None)
        if end is not None and name.removesuffix(end) not in names:
            raise HelmscopeError(f"measurement has '{name}' but no '{name.removesuffix(end)}' that it belongs to")
        if end not in (None, "_null"):
            raise HelmscopeError(
                f"measurement is already reduced: it has '{name}', but a Measurement with replicates holds values only"
            )
    axis = replicate_axis(dataset, over)
    for name in names:
        if not name.endswith(COMPANIONS) and axis not in dataset[name].dims:
            raise HelmscopeError(f"'{name}' has axes {dataset[name].dims}, but its replicate axis must be '{axis}'")
    return as_measurement(dataset)


def keeps_replicates(dataset: xr.Dataset) -> bool:
    """Whether a Measurement keeps its replicates: it has a replicate axis and no standard errors or intervals. Raises
    ``HelmscopeError`` unless it is an xarray Dataset.

    >>> import xarray as xr
    >>> keeps_replicates(xr.Dataset({"rank": ("prompt", [3.0, 4.0])}))
    True
    >>> keeps_replicates(xr.Dataset({"rank": 3.5, "rank_stderr": 0.5}, attrs={"n": 2}))
    False
    """
    _check_dataset(dataset)
    is_reduced = any(str(name).endswith(_REDUCED) for name in dataset.data_vars)
    return not is_reduced and any(axis in dataset.dims for axis in (*REPLICATES, "layer"))


def check_measurement(dataset: xr.Dataset) -> Measurement:
    """Check a Measurement in either form: by ``check_replicates`` if it keeps its replicates, otherwise by
    ``check_reduced``.

    Returns the same data as a ``Measurement``; raises ``HelmscopeError`` if they break the rules.

    >>> import xarray as xr
    >>> check_measurement(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16})).attrs["n"]
    16
    >>> check_measurement(xr.Dataset({"order": ("system", [0.4, 0.6])})).sizes["system"]
    2
    """
    return check_replicates(dataset) if keeps_replicates(dataset) else check_reduced(dataset)


def check_reduced(dataset: xr.Dataset) -> Measurement:
    """Check a Measurement that was reduced over its replicates: every NAME has NAME_stderr, or NAME_low and NAME_high,
    optionally NAME_null, and an attribute n, the number of replicates (on the variable or on the Dataset), which is 0
    only if all values of NAME are NaN.

    Returns the same data as a ``Measurement``; raises ``HelmscopeError`` if they break this rule.

    >>> import xarray as xr
    >>> check_reduced(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16})).attrs["n"]
    16
    """
    _check_dataset(dataset)
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
        check_integer(f"attribute n of measurement '{name}'", n, at_least=int(bool(dataset[name].notnull().any())))
        _check_companions(dataset, name)
    return as_measurement(dataset)


def as_measurement(dataset: xr.Dataset) -> Measurement:
    """The same data as a ``Measurement``, unchecked; unchanged if they are one.

    >>> import xarray as xr
    >>> type(as_measurement(xr.Dataset({"rank": 3.0}))).__name__
    'Measurement'
    """
    from helmscope.types.dataset import Measurement  # it imports xarray, which takes long

    return Measurement.of(dataset)


def _check_companions(dataset: xr.Dataset, name: str) -> None:
    for end in _REDUCED:
        other = dataset.get(f"{name}{end}")
        if other is not None and set(other.dims) != set(dataset[name].dims):
            raise HelmscopeError(f"'{name}{end}' has axes {other.dims}, but '{name}' has {dataset[name].dims}")
    if f"{name}_stderr" in dataset and bool((dataset[f"{name}_stderr"] < 0).any()):
        raise HelmscopeError(f"'{name}_stderr' holds a negative value, but a standard error is >= 0")
    if f"{name}_low" in dataset and f"{name}_high" in dataset:
        # comparisons with NaN are False, so an undefined estimate passes
        outside = (dataset[f"{name}_low"] > dataset[name]) | (dataset[name] > dataset[f"{name}_high"])
        if bool(outside.any()):
            raise HelmscopeError(
                f"'{name}' is outside its interval, but it must be between '{name}_low' and '{name}_high'"
            )
