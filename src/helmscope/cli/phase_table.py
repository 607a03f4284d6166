"""A phase diagram on standard output: a table, or as JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from helmscope.cli.results import as_plain
from helmscope.types import counted

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.jobs import PhaseResult


def show_phase(result: PhaseResult, as_json: bool) -> None:
    """Prints the diagram, and on standard error how many samples were lost."""
    from helmscope.runs.progress import print_status

    places = {"picture": result.picture, "page": result.page, "folder": result.folder.path}
    report = {key: str(path) for key, path in places.items() if path is not None}
    if as_json:
        told = {"ok": result.ok, "lost": result.lost, **report}
        print(json.dumps(told | _listed(result.diagram, result.half_time), indent=2))
    else:
        _print_table(result.diagram, result.half_time)
        print(*(f"{key}: {path}" for key, path in report.items()), sep="\n")
    if result.lost:
        are = "is" if result.lost == 1 else "are"
        print_status(
            f"{counted(result.lost, 'sample')} could not be carried to the end and {are} left out: see the log, lower "
            "beta or the times"
        )


def _listed(data: xr.Dataset, half: xr.Dataset) -> dict[str, Any]:
    """All numbers as plain lists."""
    axes = {f"{name}s": data[name].values.tolist() for name in ("dim", "beta", "time")}
    parts = [each for part in (data, half) for each in part.data_vars.items()]
    numbers = {str(name): as_plain(each.values.tolist()) for name, each in parts}
    attrs = {key: data.attrs[key] for key in ("delta", "tokens", "flow", "seed", "dtype", "stepper", "kernel")}
    curve = {"curve": as_plain(data.curve.values.tolist()), "censored": half.censored.values.tolist()}
    return attrs | {"samples": data.attrs["n"]} | axes | numbers | curve


def _print_table(data: xr.Dataset, half: xr.Dataset) -> None:
    last = float(data.time[-1])
    print(f"{'dim':>8} {'beta':>7} {'t*':>9}   {f'P at t = {last:g}':<22}  time of P = 1/2")
    for dim in data.dim.values:
        for beta in data.beta.values:
            row, found = data.sel(dim=dim, beta=beta), half.sel(dim=dim, beta=beta)
            end = row.isel(time=-1)
            if not bool(found.censored):
                reached = _half_time_text(found, data.attrs["n"])
            elif end.probability.isnull():
                reached = "all samples lost"
            else:
                late = float(end.probability) < 0.5
                reached = f"not by t = {last:g}" if late else f"before t = {float(data.time[0]):g}"
            error = float(end.probability_stderr)
            p = f"{float(end.probability):.4f}" + (f" +- {error:.2g}" if math.isfinite(error) else " of one sample")
            curve = "none" if row.curve.isnull() else f"{float(row.curve):.4g}"
            print(f"{dim:>8} {beta:>7.4g} {curve:>9}   {p:<22}  {reached}")


def _half_time_text(found: xr.Dataset, n: int) -> str:
    from helmscope.types import Interval, interval_text

    estimate, low, high = (float(found[f"half_time{side}"]) for side in ("", "_low", "_high"))
    known = not (math.isnan(low) or math.isnan(high))  # one sample has no standard error, and so no interval
    return interval_text(Interval(estimate, low, high, n)) if known else f"{estimate:.3g}, no interval"
