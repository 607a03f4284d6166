"""Reduction of a Measurement over its replicates to means with confidence intervals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from helmscope.stats.intervals import tail
from helmscope.stats.replicates import check_scale, first_value, moments, numbers
from helmscope.stats.scales import PLAIN, BoundedScale, FisherZScale, LogScale, RemainderScale, Scale
from helmscope.types import (
    HelmscopeError,
    check_name,
    check_reduced,
    check_replicates,
    keeps_replicates,
    replicate_axis,
)

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

MEAN, RANGE = "mean", "range"
AVERAGED_AS: dict[str, Scale] = {"log(x)": LogScale(), "artanh(x)": FisherZScale(), "log(1 - x)": RemainderScale()}


def reduce_replicates(
    measurement: xr.Dataset, *, over: str | None = None, scale: Scale | None = None, confidence: float = 0.95
) -> xr.Dataset:
    """Reduce a Measurement over its replicates: NAME becomes the mean on the scale, NAME_low and NAME_high are its
    Student interval, NAME_stderr its standard error, and NAME_null, if present, the mean of the null.

    The replicate axis is ``over`` or, by default, found by name (``types.replicate_axis``). Each entry is computed as
    by ``mean_interval``; NAME_stderr is in units of NAME, to first order if the scale is
    not linear. NaN replicates are left out. If only one value remains, NAME_stderr, NAME_low and NAME_high are NaN.
    Attribute n of the Dataset is the number of replicates and ``replicate`` the name of their axis; attribute n of NAME
    is the smallest number of values of any entry that has one, and 0 if none has. Attribute band of NAME describes
    NAME_low and NAME_high in words. Other attributes, and coordinates without the replicate axis, are kept. Raises
    ``HelmscopeError`` for values outside the scale's domain.

    Attributes of NAME control its reduction. ``valid_min`` and ``valid_max``, as for a share, are bounds that hold by
    definition: unless ``scale`` is given, its scale is ``BoundedScale``. ``averaged_as`` names another scale, log(x),
    artanh(x) or log(1 - x), for replicates that are far from normal on their own. ``summary`` is "range" for quantities
    that vary over orders of magnitude and may be 0, for which a mean is not informative: NAME is then the median of the
    replicates, NAME_low their minimum, NAME_high their maximum, and there is no NAME_stderr.

    Equal values have an interval of width 0, also at a bound: that the replicates agree does not show that others
    would, and tables print "all equal" instead of an interval. An exact binomial interval would not help, since a share
    within a system is not one trial: it would jump from [0, 0.02] to [0, 0.6] (n = 4) between a time at which few pairs
    have met and one at which none has. The exact interval for events, 0 or 1 per replicate, is
    ``stats.proportion_interval``.

    >>> import xarray as xr
    >>> mass = xr.DataArray([[1.0, 5.0], [2.0, 5.0], [3.0, np.nan]], dims=("prompt", "layer"))
    >>> means = reduce_replicates(xr.Dataset({"mass": mass}))
    >>> means.mass.values.tolist(), means.mass_stderr.values.round(4).tolist()
    ([2.0, 5.0], [0.5774, 0.0])
    >>> means.attrs["n"], means.mass.attrs["n"]
    (3, 2)
    """
    import xarray as xr

    axis = replicate_axis(check_replicates(measurement, over), over)
    if scale is not None:
        check_scale(scale)
    alpha, size, data = tail(confidence), measurement.sizes[axis], {}
    if size < 1:
        raise HelmscopeError(f"measurement has 0 replicates along '{axis}', but a mean needs at least one")
    for name, value in measurement.data_vars.items():
        if axis not in value.dims:  # a null that all replicates share
            data[name] = value.variable
            continue
        dims = tuple(dim for dim in value.dims if dim != axis)
        used = _default_scale(value) if scale is None else scale
        x = numbers(str(name), value.transpose(axis, ...).values)
        is_range = check_name(f"summary of '{name}'", value.attrs.get("summary", MEAN), (MEAN, RANGE)) == RANGE
        if not is_range:
            _check_domain(str(name), x, (axis, *dims), used)
        statistics = _range(x) if is_range else _student(x, used, alpha)
        if str(name).endswith("_null"):
            data[name] = xr.Variable(dims, statistics[""], value.attrs)
            continue
        data |= {f"{name}{suffix}": xr.Variable(dims, entry) for suffix, entry in statistics.items()}
        band = "range about the median" if is_range else f"{100 * confidence:g} % interval"
        data[name].attrs = {**value.attrs, "n": _smallest_count(x), "band": band}
    coords = {name: coord for name, coord in measurement.coords.items() if axis not in coord.dims}
    return check_reduced(xr.Dataset(data, coords, {**measurement.attrs, "n": size, "replicate": axis}))


def reduced(measurement: xr.Dataset) -> xr.Dataset:
    """``reduce_replicates`` of a Measurement with replicates; one that is already reduced is returned unchanged. Raises
    ``HelmscopeError`` unless it is a Measurement.

    >>> import xarray as xr
    >>> means = reduced(xr.Dataset({"order": ("system", [0.2, 0.4])}))
    >>> round(float(means.order), 12), reduced(means) is means
    (0.3, True)
    """
    return reduce_replicates(measurement) if keeps_replicates(measurement) else check_reduced(measurement)


def band(measurement: xr.Dataset, name: str) -> tuple[xr.DataArray, xr.DataArray]:
    """The lower and upper edge of the error band of NAME in a reduced Measurement: NAME_low and NAME_high if present,
    otherwise two standard errors on either side.

    >>> import xarray as xr
    >>> [float(edge) for edge in band(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}), "order")]
    [0.3, 0.7]
    """
    value = measurement[name]
    if f"{name}_low" in measurement and f"{name}_high" in measurement:
        low, high = (measurement[f"{name}{end}"].transpose(*value.dims) for end in ("_low", "_high"))
        return low, high
    error = measurement[f"{name}_stderr"].transpose(*value.dims)
    return value - 2 * error, value + 2 * error


def band_text(measurement: xr.Dataset, name: str) -> str:
    """A description of the error band that ``band`` returns.

    >>> import xarray as xr
    >>> band_text(xr.Dataset({"order": 0.5, "order_stderr": 0.1}, attrs={"n": 16}), "order")
    'two standard errors'
    """
    if f"{name}_low" in measurement and f"{name}_high" in measurement:
        return str(measurement[name].attrs.get("band", "low to high"))
    return "two standard errors"


def _default_scale(value: xr.DataArray) -> Scale:
    """The scale that the variable's attributes name, ``BoundedScale`` if they have bounds, otherwise linear."""
    if "averaged_as" in value.attrs:
        return AVERAGED_AS[check_name(f"averaged_as of '{value.name}'", value.attrs["averaged_as"], AVERAGED_AS)]
    low, high = float(value.attrs.get("valid_min", -math.inf)), float(value.attrs.get("valid_max", math.inf))
    return BoundedScale((low, high)) if math.isfinite(low) or math.isfinite(high) else PLAIN


def _check_domain(name: str, x: Numbers, dims: Sequence[Hashable], scale: Scale) -> None:
    bad = scale.excludes(x)
    if bool(bad.any()):
        at = tuple(int(k) for k in np.argwhere(bad)[0])
        where = ", ".join(f"{dim} {k}" for dim, k in zip(dims, at, strict=True))
        raise HelmscopeError(
            f"'{name}' is {x[at]:g} at {where}, but it must be a finite number in {scale.domain_text}, or NaN where "
            "there is no value"
        )


def _student(x: Numbers, scale: Scale, alpha: float) -> dict[str, Numbers]:
    """Mean, Student's interval and standard error over the first axis, by name suffix."""
    mean, error = moments(x, scale)
    n, entry = np.unique((~np.isnan(x)).sum(0), return_inverse=True)  # quantiles are slow, and few differ
    margin = -special.stdtrit(n - 1, alpha)[entry.reshape(error.shape)] * error  # NaN if there is only one value
    # equal replicates are returned exactly, without the rounding of the two maps
    estimate = np.where(error > 0, scale.inverse_array(mean), first_value(x))
    low = np.where(error == 0, estimate, np.minimum(estimate, scale.clip(scale.inverse_array(mean - margin))))
    high = np.where(error == 0, estimate, np.maximum(estimate, scale.clip(scale.inverse_array(mean + margin))))
    return {"": estimate, "_low": low, "_high": high, "_stderr": error * scale.slope(estimate)}


def _range(x: Numbers) -> dict[str, Numbers]:
    """Median, minimum and maximum over the first axis, by name suffix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns if all values of an entry are NaN
        return {"": np.nanmedian(x, 0), "_low": np.nanmin(x, 0), "_high": np.nanmax(x, 0)}


def _smallest_count(x: Numbers) -> int:
    """The smallest number of values of any entry that has one; 0 if none has."""
    n = (~np.isnan(x)).sum(0)
    return int(n[n > 0].min(initial=len(x))) if n.any() or not n.size else 0
