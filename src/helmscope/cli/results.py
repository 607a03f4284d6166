"""Results on standard output, as text or as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.jobs import DensityResult, ReportResult, Result, SimulationResult, TrialsResult


def show(result: Result, *, as_json: bool) -> None:
    """Print a result. The exit code is 1 if it is incomplete, and 2 if experiments failed."""
    from helmscope.cli.measure_table import show_measurements
    from helmscope.cli.phase_table import show_phase
    from helmscope.jobs import (
        DensityResult,
        MeasurementResult,
        PhaseResult,
        ReportResult,
        SimulationResult,
        TrialsResult,
    )

    if isinstance(result, SimulationResult):
        _show_simulation(result, as_json)
    elif isinstance(result, DensityResult):
        _show_density(result, as_json)
    elif isinstance(result, MeasurementResult):
        show_measurements(result, as_json)
    elif isinstance(result, PhaseResult):
        show_phase(result, as_json)
    elif isinstance(result, ReportResult):
        _show_report(result, as_json)
    elif isinstance(result, TrialsResult):
        _show_trials(result, as_json)
    if isinstance(result, TrialsResult) and result.failed is not None:
        raise result.failed
    if not result.ok:
        raise typer.Exit(1)


def json_numbers(values: Any) -> Any:
    """Nested lists of numbers in a form that JSON can encode: infinities become the strings "inf" and "-inf", as in
    verdicts.json, and NaN becomes null.

    >>> json_numbers([[1.5, float("inf")], [float("-inf"), float("nan")]])
    [[1.5, 'inf'], ['-inf', None]]
    """
    if isinstance(values, list):
        return [json_numbers(value) for value in values]
    if math.isinf(values):
        return str(float(values))
    return None if math.isnan(values) else values


def indented(text: str) -> str:
    """Wrap and indent a paragraph, with non-printable characters escaped."""
    from helmscope.store.printable import printable

    escaped = printable(" ".join(text.split()))
    return textwrap.fill(escaped, width=100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def _show_simulation(result: SimulationResult, as_json: bool) -> None:
    seed = result.spec.fields["seed"]
    report = {"folder": str(result.folder.path), "ok": result.ok, "outcome": str(result.outcome), "seed": seed}
    if result.overview is not None:
        report |= _curves(result.overview)
    if result.picture is not None:
        report["picture"] = str(result.picture)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(report["outcome"])
    if "measured" in report:
        print(f"means over the systems at the end, with 95 % confidence intervals, n = {report['systems']}:")
    for name, rows in report.get("measured", {}).items():
        print(f"{name:>22}: {estimate_text(*(rows[part][-1] for part in ('value', 'low', 'high')))}")
    for key in ("picture", "folder"):
        if key in report:
            print(f"{key}: {report[key]}")


def _show_density(result: DensityResult, as_json: bool) -> None:
    path, (status,), (ended,) = result.path, result.outcome.statuses, result.outcome.times
    report: dict[str, Any] = {"folder": str(result.folder.path), "ok": result.ok}
    report |= {"outcome": status.value.format(time=ended), "steps": path.steps, "mass_error": path.mass_error}
    report["truncation_error"] = path.truncation_error
    report |= {"times": path.times.tolist(), "measured": {}}
    if result.overview is not None:
        measured = result.overview.isel(system=0)
        report["measured"] = {str(name): json_numbers(measured[name].values.tolist()) for name in measured.data_vars}
    if result.picture is not None:
        report["picture"] = str(result.picture)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(report["outcome"])
    if report["times"]:
        print(f"at t={report['times'][-1]:.6g}:")
    for name, values in report["measured"].items():
        print(f"{name:>22}: {values[-1]:.6g}")
    for key in ("picture", "folder"):
        if key in report:
            print(f"{key}: {report[key]}")


def estimate_text(value: object, low: object, high: object) -> str:
    """An estimate with its interval, from numbers in the form of ``json_numbers``. An interval of width 0 reads "all
    equal": that the replicates agree does not show that others would.

    >>> estimate_text(0.123456, 0.1, 0.15), estimate_text(0.5, None, None), estimate_text(None, None, None)
    ('0.123 [0.1, 0.15]', '0.5, no interval', 'undefined')
    >>> estimate_text(1.0, 1.0, 1.0)
    '1, all equal'
    """
    from helmscope.types import Interval, interval_text

    if value is None:
        return "undefined"
    if low is None or high is None:
        return f"{float(str(value)):.6g}, no interval"
    if low == high:
        return f"{float(str(value)):.6g}, all equal"
    return interval_text(Interval(float(str(value)), float(str(low)), float(str(high)), 2))


def _curves(measured: xr.Dataset) -> dict[str, Any]:
    """The curves over time, as means over the systems, as plain lists."""
    from helmscope.stats.reduce import reduced

    measured = reduced(measured)
    curves = [str(name) for name in measured.data_vars if measured[name].dims == ("time",)]
    values = {name: json_numbers(measured[name].values.tolist()) for name in curves}
    rows = {
        name: {"value": values[name], **{part: values[f"{name}_{part}"] for part in ("stderr", "low", "high")}}
        for name in curves
        if f"{name}_stderr" in curves
    }
    return {"systems": measured.attrs["n"], "times": measured.time.values.tolist(), "measured": rows}


def _show_trials(result: TrialsResult, as_json: bool) -> None:
    from helmscope.runs.progress import print_status
    from helmscope.store.printable import printable

    if as_json:  # without dates and paths, so that the same seed gives the same bytes
        print(json.dumps({**_settings(result), "verdicts": _verdict_data(result)}, indent=2))
    else:
        for verdict in result.verdicts:
            print(f"{printable(verdict.claim)}: {verdict.ruling.value}\n{indented(verdict.sentence)}")
            print(indented(f"subject: {verdict.subject}"))
        _show_arms(result)
    print_status(f"folder: {result.folder.path}")


def _show_report(result: ReportResult, as_json: bool) -> None:
    counts = Counter(verdict.ruling.value for verdict in result.verdicts)
    if as_json:
        summary = {
            "report": str(result.page),
            "folder": str(result.folder.path),
            **_settings(result),
            "rulings": counts,
        }
        print(json.dumps({**summary, "verdicts": _verdict_data(result)}, indent=2))
    else:
        print(", ".join(f"{count} {ruling}" for ruling, count in sorted(counts.items())))
        _show_arms(result)
        print(f"report: {result.page}")


def _show_arms(result: TrialsResult) -> None:
    from helmscope.claims.arm_table import arm_table
    from helmscope.store.printable import printable

    table = arm_table(result.verdicts)
    if table:
        print(
            "share of inner products above 0.9 at the last depth, with 95 % intervals over the prompts, and over twins "
            "where untrained:"
        )
        for line in table.splitlines():
            print(f"    {printable(line)}")


def _settings(result: Result) -> dict[str, Any]:
    return {name: result.spec.fields[name] for name in ("seed", "quick")}


def _verdict_data(result: TrialsResult) -> object:
    from helmscope.store.verdicts import encode_verdicts

    return json.loads(encode_verdicts(result.verdicts))
