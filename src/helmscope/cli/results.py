"""Results on standard output: in words, or as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.jobs import ReportResult, Result, SimulationResult, TrialsResult


def show(result: Result, *, as_json: bool) -> None:
    """Prints a result. One that did not come to its end leaves with exit code 1, failed experiments with 2."""
    from helmscope.cli.phase_table import show_phase
    from helmscope.jobs import PhaseResult, ReportResult, SimulationResult, TrialsResult

    if isinstance(result, SimulationResult):
        _show_simulation(result, as_json)
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


def as_plain(values: Any) -> Any:
    """Numbers, at any depth of lists, as JSON holds them: an infinite one is the string "inf" or "-inf", as in
    verdicts.json, and what is not a number is null.

    >>> as_plain([[1.5, float("inf")], [float("-inf"), float("nan")]])
    [[1.5, 'inf'], ['-inf', None]]
    """
    if isinstance(values, list):
        return [as_plain(each) for each in values]
    if math.isinf(values):
        return str(float(values))
    return None if math.isnan(values) else values


def block(text: str) -> str:
    """A paragraph, indented; text from files is made printable."""
    from helmscope.store.printable import printable

    shown = printable(" ".join(text.split()))
    return textwrap.fill(shown, width=100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


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
    for name, rows in report.get("measured", {}).items():
        last, error = rows["value"][-1], rows["stderr"][-1]
        value = "undefined" if last is None else f"{float(last):.6g}"
        print(f"{name:>20} at the end: {value}" + ("" if error is None else f" +- {float(error):.2g}"))
    for key in ("picture", "folder"):
        if key in report:
            print(f"{key}: {report[key]}")


def _curves(measured: xr.Dataset) -> dict[str, Any]:
    """Curves over time, reduced over the systems, as plain lists."""
    from helmscope.stats.reduce import reduced

    measured = reduced(measured)
    curves = [str(name) for name in measured.data_vars if measured[name].dims == ("time",)]
    rows = {
        name: {
            key: as_plain(measured[of].values.tolist()) for key, of in (("value", name), ("stderr", f"{name}_stderr"))
        }
        for name in curves
        if f"{name}_stderr" in curves
    }
    return {"systems": measured.attrs["n"], "times": measured.time.values.tolist(), "measured": rows}


def _show_trials(result: TrialsResult, as_json: bool) -> None:
    from helmscope.runs.progress import print_status
    from helmscope.store.printable import printable

    if as_json:  # nothing in it depends on time or place: the same seed gives the same bytes
        print(json.dumps({**_asked(result), "verdicts": _verdicts(result)}, indent=2))
    else:
        for verdict in result.verdicts:
            print(f"{printable(verdict.claim)}: {verdict.ruling.value}\n{block(verdict.sentence)}")
            print(block(f"subject: {verdict.subject}"))
    print_status(f"folder: {result.folder.path}")


def _show_report(result: ReportResult, as_json: bool) -> None:
    counts = Counter(verdict.ruling.value for verdict in result.verdicts)
    if as_json:
        told = {"report": str(result.page), "folder": str(result.folder.path), **_asked(result), "rulings": counts}
        print(json.dumps({**told, "verdicts": _verdicts(result)}, indent=2))
    else:
        print(", ".join(f"{count} {ruling}" for ruling, count in sorted(counts.items())))
        print(f"report: {result.page}")


def _asked(result: Result) -> dict[str, Any]:
    return {name: result.spec.fields[name] for name in ("seed", "quick")}


def _verdicts(result: TrialsResult) -> object:
    from helmscope.store.verdicts import encode_verdicts

    return json.loads(encode_verdicts(result.verdicts))
