"""The table of ``helmscope measure``: one line per quantity."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from helmscope.jobs import MeasurementResult

MEAN = "mean"
REASONS = {"not_tried": "without", "undetermined": "undefined because"}  # attributes that say what is missing, and why


def show_measurements(result: MeasurementResult, as_json: bool) -> None:
    """Print the mean over depth and heads of every quantity, or its value at the last depth if it is cumulative, with
    its interval over prompts.
    """
    from helmscope.cli.results import estimate_text, json_numbers
    from helmscope.store.printable import printable

    report: dict[str, Any] = {"folder": str(result.folder.path), "ok": result.ok, "measured": {}}
    for name, each in result.measured.items():
        rows = {}
        for variable, summary in quantities(each).items():
            numbers = (summary[key] for key in ("value", "low", "high"))
            rows[variable] = dict(zip(("value", "low", "high"), map(json_numbers, numbers), strict=True))
            rows[variable] |= {"n": summary["n"], "of": summary["of"]}
        report["measured"][name] = rows
    report["skipped"] = dict(result.skipped)
    for reason in REASONS:
        texts = {name: each.attrs.get(reason) for name, each in result.measured.items()}
        report[reason] = {name: text for name, text in texts.items() if text}
    report["tables"] = {name: str(path) for name, path in result.tables.items()}
    if result.picture is not None:
        report["picture"] = str(result.picture)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print("means over depth, tokens and heads, with 95 % confidence intervals over prompts;")
    print("quantities that count from the first state: their values at the last depth, marked so:")
    for name, rows in report["measured"].items():
        print(printable(name))
        for variable, row in rows.items():
            where = "" if row["of"] == MEAN else f", at the {row['of']}"
            print(f"{printable(variable):>32}: {estimate_text(row['value'], row['low'], row['high'])}{where}")
        for reason, label in REASONS.items():
            if name in report[reason]:
                print(f"{label:>32}: {printable(report[reason][name])}")
        if name in report["tables"]:
            print(f"{'table':>32}: {printable(report['tables'][name])}")
    for key in ("picture", "folder"):
        if key in report:
            print(f"{key}: {report[key]}")


def quantities(measurement: xr.Dataset) -> dict[str, dict[str, Any]]:
    """The mean of each variable over all axes but its replicates, with its interval over them; NaN where there is
    none. A variable with the attribute ``cumulative``, the name of an axis, is taken at the end of that axis; ``of``
    says which.

    >>> import xarray as xr
    >>> rank = xr.Dataset({"rank": (("layer", "prompt"), [[1.0, 2.0], [3.0, 4.0]])})
    >>> quantities(rank)["rank"]["value"]
    2.5
    """
    from helmscope.stats.reduce import reduced
    from helmscope.types import keeps_replicates, replicate_axis

    if keeps_replicates(measurement):
        over = replicate_axis(measurement)
        names = [str(name) for name in measurement.data_vars]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mean of quantities that are NaN everywhere
            ends = {name: _at_end(measurement[name], measurement[name].attrs) for name in names}
            whole = {name: end.mean([d for d in end.dims if d != over], keep_attrs=True) for name, end in ends.items()}
        data = reduced(measurement.assign(whole)[names])
    else:
        data = reduced(measurement)
    found = {}
    for name in (str(each) for each in data.data_vars if f"{each}_low" in data):
        attrs = data[name].attrs
        value, low, high = (_mean(_at_end(data[f"{name}{end}"], attrs).values) for end in ("", "_low", "_high"))
        found[name] = {
            "value": value,
            "low": low,
            "high": high,
            "n": int(attrs.get("n", data.attrs.get("n", 0))),
            "of": f"last {attrs['cumulative']}" if "cumulative" in attrs else MEAN,
        }
    return found


def _at_end(values: xr.DataArray, attrs: Mapping[str, Any]) -> xr.DataArray:
    """The values at the end of the axis over which the attributes say that they are cumulative; all if none."""
    axis = attrs.get("cumulative")
    return values.isel({axis: -1}, drop=True) if axis in values.dims else values


def _mean(values: np.ndarray) -> float:
    """The mean of the entries that are numbers; NaN if none is."""
    import numpy as np

    numbers = values[np.isfinite(values)]
    return float(numbers.mean()) if numbers.size else float("nan")
