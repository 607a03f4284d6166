"""Summaries of ``query_key_noise``, queries compared with keys: their ratio, the slope in sigma, effects at equal
damage, and table 1 of [Additive transport].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from helmscope.observe.query_key_noise import NoiseKind, query_key_noise
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_replicates, type_with_article

if TYPE_CHECKING:
    from helmscope.models.recording import Recording
    from helmscope.types.progress import ProgressOption

# table 1 of [Additive transport], measured there on GPT-2: sigma, KL of noise on queries, KL of noise on keys, ratio
PRINTED = {0.01: (0.0007, 0.0013, 1.86), 0.05: (0.0342, 0.0296, 0.86), 0.10: (0.1237, 0.1581, 1.28)}
EFFECTS = ("prediction_entropy_change", "top_token_agreement", "top_key_agreement")
LEVEL = {"long_name": "divergence at which the effects are compared", "units": "nats", "valid_min": 0.0}
SLOPE = {"long_name": "slope of log KL in log sigma"}
RATIO = {"long_name": "KL of noise on keys over KL of noise on queries", "averaged_as": "log(x)"}


def query_key_noise_ratio(measurement: xr.Dataset, *, over: str = "draw") -> xr.DataArray:
    """KL of noise on keys over KL of noise on queries, each averaged over the axis ``over``: over the draws, one ratio
    per prompt, or over the prompts (over="prompt"), one ratio per draw. NaN where noise on queries does no damage.

    ``measurement`` is what ``query_key_noise`` returns. The null is 1 for noise of the kind MATCHED, at second order.

    >>> kl = ("site", "draw", "prompt"), [[[1.0, 2.0]], [[3.0, 2.0]]]
    >>> measurement = xr.Dataset({"kl": kl}, {"site": ["query", "key"]})
    >>> query_key_noise_ratio(measurement).values.tolist()
    [3.0, 1.0]
    """
    kl = _checked(measurement).kl.mean(over)
    query, key = kl.sel(site="query", drop=True), kl.sel(site="key", drop=True)
    ratio: xr.DataArray = key / query.where(query > 0)
    return _described(ratio, RATIO)


def query_key_noise_slope(measurement: xr.Dataset) -> xr.DataArray:
    """The slope of log KL in log sigma, by least squares over the sizes > 0, of the mean over draws: 2 where damage is
    quadratic. NaN where some noise does no damage. Raises HelmscopeError for fewer than two sizes > 0.

    >>> sigma = np.array([0.1, 0.2, 0.4])
    >>> measurement = xr.Dataset({"kl": (("sigma", "draw", "prompt"), 3 * sigma[:, None, None] ** 2)}, {"sigma": sigma})
    >>> query_key_noise_slope(measurement).round(6).values.tolist()
    [2.0]
    """
    kl = _checked(measurement).kl.mean("draw")
    kl = kl.sel(sigma=kl.sigma[kl.sigma > 0])
    if kl.sizes["sigma"] < 2:
        raise HelmscopeError(f"measurement has {kl.sizes['sigma']} sizes > 0, but a slope needs at least 2")
    x = np.log(kl.sigma) - np.log(kl.sigma).mean()
    slope: xr.DataArray = (x * np.log(kl.where(kl > 0))).sum("sigma", skipna=False) / (x**2).sum()
    return _described(slope, SLOPE)


def query_key_noise_at_equal_kl(measurement: xr.Dataset) -> xr.Dataset:
    """What noise on queries and noise on keys do at equal KL: ``prediction_entropy_change``, ``top_token_agreement``
    and ``top_key_agreement`` of both, along ``site``, at one KL per prompt, ``equal_kl``.

    KL and effects are averaged over draws and interpolated along sigma, linearly in log KL. ``equal_kl`` is the
    geometric middle of the range of KL that both reach in the prompt; where there is none, all are NaN.

    >>> from helmscope import record
    >>> measurement = query_key_noise(record("A", ["Once upon a time", "The cat sat"]), draws=2)
    >>> query_key_noise_at_equal_kl(measurement).top_key_agreement.dims
    ('kind', 'site', 'prompt')
    """
    mean = _checked(measurement)[["kl", *EFFECTS]].mean("draw").sel(site=["query", "key"])
    logs = np.log(mean.kl.where(mean.kl > 0))
    low, high = logs.min("sigma", skipna=False).max("site"), logs.max("sigma", skipna=False).min("site")
    level = ((low + high) / 2).where(low <= high)
    values = {
        effect: xr.apply_ufunc(
            _interpolated,
            level,
            logs,
            mean[effect],
            input_core_dims=[[], ["sigma"], ["sigma"]],
            vectorize=True,
        )
        for effect in EFFECTS
    }
    data = {
        name: _described(
            value.transpose(..., "prompt"),
            {**measurement[name].attrs, "long_name": f"{measurement[name].attrs.get('long_name', name)}, at equal KL"},
        )
        for name, value in values.items()
    }
    return check_replicates(xr.Dataset(data | {"equal_kl": _described(np.exp(level).transpose(..., "prompt"), LEVEL)}))


def _described(values: xr.DataArray, attributes: Mapping[str, Any]) -> xr.DataArray:
    """Values with these attributes and no others: arithmetic may keep those of the divergence."""
    found = values.copy()
    found.attrs = dict(attributes)
    return found


@shows_progress("table 1 of the source on additive transport")
def noise_table_as_printed(
    recording: Recording, *, draws: int = 20, seed: int = 0, progress: ProgressOption = None
) -> xr.Dataset:
    """Table 1 of [Additive transport], section 9.1, in both interpretations, noise on the activations and on the
    weights: ``kl_query``, ``kl_key`` and their ``ratio``, along (kind, sigma, prompt), each the mean over the draws.

    The coordinates ``printed_query``, ``printed_key`` and ``printed_ratio`` hold what is printed, measured there on
    GPT-2 without error bars. ``reduce_replicates`` gives means over prompts with intervals. The ratio depends on the
    gauge q -> c q, k -> k / c, and so is no property of what the model computes.

    >>> from helmscope import record
    >>> table = noise_table_as_printed(record("A", ["Once upon a time", "The cat sat"]), draws=1)
    >>> dict(table.ratio.sizes), table.printed_ratio.values.tolist()
    ({'kind': 2, 'sigma': 3, 'prompt': 2}, [1.86, 0.86, 1.28])
    """
    kinds = (NoiseKind.ACTIVATIONS, NoiseKind.WEIGHTS)
    measurement = query_key_noise(
        recording, kinds=kinds, sigmas=list(PRINTED), draws=draws, seed=seed, progress=progress
    )
    return query_key_noise_table(measurement)


def query_key_noise_table(measurement: xr.Dataset) -> xr.Dataset:
    """The table of ``noise_table_as_printed`` from noise that was measured at the printed sizes.

    >>> kl = ("sigma", "site", "draw", "prompt"), np.ones((3, 2, 1, 4))
    >>> table = query_key_noise_table(xr.Dataset({"kl": kl}, {"sigma": list(PRINTED), "site": ["query", "key"]}))
    >>> table.ratio.isel(prompt=0).values.tolist()
    [1.0, 1.0, 1.0]
    """
    kl = _checked(measurement).kl.sel(sigma=list(PRINTED)).mean("draw", keep_attrs=True)
    printed = dict(zip(("query", "key", "ratio"), zip(*PRINTED.values(), strict=True), strict=True))
    columns = {f"kl_{site}": kl.sel(site=site, drop=True) for site in ("query", "key")}
    table = xr.Dataset(
        columns | {"ratio": query_key_noise_ratio(measurement).sel(sigma=list(PRINTED))}, attrs=measurement.attrs
    )
    return check_replicates(
        table.assign_coords({f"printed_{name}": ("sigma", list(column)) for name, column in printed.items()})
    )


def query_key_noise_summary(measurement: xr.Dataset) -> xr.Dataset:
    """Noise on queries, keys and values in one Measurement: ``kl``, ``prediction_entropy_change``,
    ``top_token_agreement`` and ``top_key_agreement`` as means over the draws, and ``kl_by_draw``; ``ratio``
    (``query_key_noise_ratio``), whose null is 1 in the kind MATCHED at second order; ``slope`` of log KL in log sigma,
    with null 2 (``query_key_noise_slope``); and what ``query_key_noise_at_equal_kl`` returns, ``equal_kl`` and each
    effect as KIND_at_equal_kl.

    The coordinates ``printed_query``, ``printed_key`` and ``printed_ratio`` along ``sigma`` hold table 1 of [Additive
    transport], NaN at other sizes.

    >>> from helmscope import record
    >>> measurement = query_key_noise(record("A", ["Once upon a time", "The cat sat"]), draws=2)
    >>> summary = query_key_noise_summary(measurement)
    >>> summary.ratio.dims, summary.printed_ratio.values.tolist()
    (('kind', 'sigma', 'prompt'), [1.86, 0.86, 1.28])
    """
    effects = {name: _checked(measurement)[name].mean("draw", keep_attrs=True) for name in ("kl", *EFFECTS)}
    nulls = {name: measurement[name] for name in map(str, measurement.data_vars) if name.endswith("_null")}
    equal = query_key_noise_at_equal_kl(measurement)
    at_equal = {f"{effect}_at_equal_kl": equal[effect].reindex(site=measurement.site) for effect in EFFECTS}
    derived = {
        "kl_by_draw": measurement.kl.assign_attrs(long_name=f"{measurement.kl.attrs.get('long_name', 'KL')}, by draw"),
        "ratio": query_key_noise_ratio(measurement),
        "slope": query_key_noise_slope(measurement),
    }
    if "kind" in measurement.dims:
        derived["ratio_null"] = xr.ones_like(measurement.kind, float).where(measurement.kind == NoiseKind.MATCHED.value)
    table = xr.Dataset(
        effects | nulls | derived | at_equal | {"equal_kl": equal.equal_kl, "slope_null": 2.0}, attrs=measurement.attrs
    )
    printed = np.array([PRINTED.get(sigma, (np.nan,) * 3) for sigma in measurement.sigma.values.tolist()])
    names = ("printed_query", "printed_key", "printed_ratio")
    return check_replicates(
        table.assign_coords({name: ("sigma", column) for name, column in zip(names, printed.T, strict=True)})
    )


def _checked(measurement: xr.Dataset) -> xr.Dataset:
    if not isinstance(measurement, xr.Dataset) or "kl" not in measurement or "draw" not in measurement.dims:
        raise HelmscopeError(
            f"measurement is {type_with_article(measurement)}, but it must be what query_key_noise returns"
        )
    return measurement


def _interpolated(level: float, logs: Sequence[float], values: Sequence[float]) -> float:
    """The value at which log KL reaches the level, linearly between sizes."""
    order = np.argsort(logs)
    return float(np.interp(level, np.asarray(logs)[order], np.asarray(values)[order])) if np.isfinite(level) else np.nan
