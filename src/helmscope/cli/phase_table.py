"""A phase diagram on standard output, as a table or as JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from helmscope.cli.results import estimate_text, json_numbers
from helmscope.types import pluralized

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.jobs import PhaseResult


def show_phase(result: PhaseResult, as_json: bool) -> None:
    """Print the diagram, and on standard error the number of lost samples."""
    from helmscope.runs.progress import print_status

    paths = {"picture": result.picture, "page": result.page, "folder": result.folder.path}
    files = {key: str(path) for key, path in paths.items() if path is not None}
    if as_json:
        summary = {"ok": result.ok, "lost_samples": result.lost_samples, **files}
        print(json.dumps(summary | _as_data(result.diagram, result.half_time), indent=2))
    else:
        _print_table(result.diagram, result.half_time)
        print(*(f"{key}: {path}" for key, path in files.items()), sep="\n")
    if result.lost_samples:
        are = "is" if result.lost_samples == 1 else "are"
        print_status(
            f"{pluralized(result.lost_samples, 'sample')} could not be integrated to the last time and {are} left out: "
            "see the log, or lower beta or the times"
        )


def _as_data(data: xr.Dataset, half: xr.Dataset) -> dict[str, Any]:
    """All values as plain lists."""
    axes = {f"{name}s": data[name].values.tolist() for name in ("dim", "beta", "time")}
    variables = [*data.data_vars.items(), *half.data_vars.items()]
    numbers = {str(name): json_numbers(variable.values.tolist()) for name, variable in variables}
    attrs = {key: data.attrs[key] for key in ("delta", "tokens", "flow", "seed", "dtype", "stepper", "summation")}
    curve = {"hitting_time": json_numbers(data.hitting_time.values.tolist()), "censored": half.censored.values.tolist()}
    return attrs | {"samples": data.attrs["n"]} | axes | numbers | curve


def _print_table(data: xr.Dataset, half: xr.Dataset) -> None:
    last = float(data.time[-1])
    print(f"[low, high] are 95 % confidence intervals, n = {data.attrs['n']}")
    print(f"{'dim':>8} {'beta':>7} {'t*':>9}   {f'P at t = {last:g}':<22}  time of P = 1/2")
    for dim in data.dim.values:
        for beta in data.beta.values:
            row, half_time = data.sel(dim=dim, beta=beta), half.sel(dim=dim, beta=beta)
            end = row.isel(time=-1)
            if not bool(half_time.censored):
                reached = _half_time_text(half_time, data.attrs["n"])
            elif end.probability.isnull():
                reached = "all samples lost"
            else:
                too_late = float(end.probability) < 0.5
                reached = f"not by t = {last:g}" if too_late else f"before t = {float(data.time[0]):g}"
            p = _probability_text(float(end.probability), float(end.probability_stderr), data.attrs["n"])
            curve = "none" if row.hitting_time.isnull() else f"{float(row.hitting_time):.4g}"
            print(f"{dim:>8} {beta:>7.4g} {curve:>9}   {p:<22}  {reached}")


def _probability_text(probability: float, stderr: float, samples: int) -> str:
    """A probability with its 95 % interval by Student's t, within 0 and 1.

    >>> _probability_text(0.25, 0.1, 8), _probability_text(1.0, float("nan"), 1)
    ('0.25 [0.0135, 0.486]', '1, no interval')
    """
    from scipy.stats import t

    margin = t.ppf(0.975, samples - 1) * stderr if math.isfinite(stderr) else math.nan
    bounds = [max(0.0, probability - margin), min(1.0, probability + margin)] if math.isfinite(margin) else [margin] * 2
    return estimate_text(*json_numbers([probability, *map(float, bounds)]))


def _half_time_text(half_time: xr.Dataset, n: int) -> str:
    from helmscope.types import Interval, interval_text

    estimate, low, high = (float(half_time[f"half_time{side}"]) for side in ("", "_low", "_high"))
    known = not (math.isnan(low) or math.isnan(high))  # a single sample has no interval
    return interval_text(Interval(estimate, low, high, n)) if known else f"{estimate:.3g}, no interval"
