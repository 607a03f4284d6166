"""From a Measurement with its replicates to one with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from helmscope.stats.intervals import tail
from helmscope.stats.replicates import check_scale, first_value, moments, numbers, outside
from helmscope.stats.scales import PLAIN, Scale
from helmscope.types import HelmscopeError, check_measurement, check_replicates, replicate_axis

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


def reduce_replicates(
    measurement: xr.Dataset, *, over: str | None = None, scale: Scale = PLAIN, confidence: float = 0.95
) -> xr.Dataset:
    """The Measurement over the replicates of another: NAME, the mean on the scale, NAME_low and NAME_high, Student's
    interval of it, NAME_stderr, and NAME_null, the mean of the null, where there is one.

    The replicate axis is ``over``, or found by its name as ``types.replicate_axis`` says. Each entry is what
    ``mean_interval`` gives of its replicates; NAME_stderr is in units of NAME, to first order where the scale is not
    plain. A replicate that is NaN has no value there and is left out. Where one value remains there is no spread:
    NAME_stderr, NAME_low and NAME_high are NaN. Attribute n of the Dataset is the number of replicates, attribute n of
    NAME the smallest number of values behind any of its entries that have one. Other attributes, and coordinates
    without the replicate axis, are kept. Refuses numbers outside the scale's domain, and a NAME without any value.

    >>> import xarray as xr
    >>> mass = xr.DataArray([[1.0, 5.0], [2.0, 5.0], [3.0, np.nan]], dims=("prompt", "layer"))
    >>> seen = reduce_replicates(xr.Dataset({"mass": mass}))
    >>> seen.mass.values.tolist(), seen.mass_stderr.values.round(4).tolist()
    ([2.0, 5.0], [0.5774, 0.0])
    >>> seen.attrs["n"], seen.mass.attrs["n"]
    (3, 2)
    """
    import xarray as xr

    axis = replicate_axis(check_replicates(measurement, over), over)
    check_scale(scale)
    size, data = measurement.sizes[axis], {}
    if size < 1:
        raise HelmscopeError(f"measurement has 0 replicates along '{axis}', but a mean needs at least one")
    for name, value in measurement.data_vars.items():
        if axis not in value.dims:  # a null that is one number for all replicates
            data[name] = value.variable
            continue
        x = _values(str(name), value.transpose(axis, ...), scale)
        dims = tuple(dim for dim in value.dims if dim != axis)
        parts = _student(x, scale, tail(confidence))
        if str(name).endswith("_null"):
            data[name] = xr.Variable(dims, parts[""], value.attrs)
            continue
        n = _fewest(str(name), x)
        data |= {f"{name}{end}": xr.Variable(dims, part) for end, part in parts.items()}
        data[name].attrs = {**value.attrs, "n": n}
    coords = {name: coord for name, coord in measurement.coords.items() if axis not in coord.dims}
    return check_measurement(xr.Dataset(data, coords, {**measurement.attrs, "n": size}))


def _values(name: str, value: xr.DataArray, scale: Scale) -> Numbers:
    """The numbers of a variable, whose first axis is that of the replicates."""
    x = numbers(name, value.values)
    bad = outside(x, scale)
    if bool(bad.any()):
        at = tuple(int(k) for k in np.argwhere(bad)[0])
        where = ", ".join(f"{dim} {k}" for dim, k in zip(value.dims, at, strict=True))
        low, high = scale.domain
        raise HelmscopeError(
            f"'{name}' is {x[at]:g} at {where}, but it must be a finite number in ({low:g}, {high:g}), or NaN where "
            "there is no value"
        )
    return x


def _student(x: Numbers, scale: Scale, beyond: float) -> dict[str, Numbers]:
    """Mean, Student's interval and standard error over the first axis, by the ends of their names."""
    mean, error = moments(x, scale)
    n, entry = np.unique((~np.isnan(x)).sum(0), return_inverse=True)  # a quantile takes long, and few are different
    reach = -special.stdtrit(n - 1, beyond)[entry.reshape(error.shape)] * error  # NaN for one value, as its error is
    # what has no width comes back as it went in, without the rounding of the two maps
    estimate = np.where(error > 0, scale.back_all(mean), first_value(x))
    low = np.where(error == 0, estimate, np.minimum(estimate, scale.back_all(mean - reach)))
    high = np.where(error == 0, estimate, np.maximum(estimate, scale.back_all(mean + reach)))
    return {"": estimate, "_low": low, "_high": high, "_stderr": error * scale.slope(estimate)}


def _fewest(name: str, x: Numbers) -> int:
    """The smallest number of values behind an entry that has one."""
    n = (~np.isnan(x)).sum(0)
    if n.size and not n.any():
        raise HelmscopeError(f"'{name}' is NaN for every replicate, but a mean needs at least one value")
    return int(n[n > 0].min()) if n.size else len(x)
