"""Helpers of all benchmarks: fair timing, the description of the machine, tables and JSON."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
TURNS, BUDGET_S = 5, 2.0  # per candidate: this many turns, or until it has used this much time
TURN_S, TURN_RUNS = 0.02, 50  # a short call is repeated within its turn, up to this much time or this many runs
CHECKED_ROWS = 256

Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of ``runs`` runs, the fastest and the slowest."""

    median: float
    low: float
    high: float
    runs: int

    @property
    def columns(self) -> Row:
        """The values as columns of a table."""
        return {"median_s": self.median, "low_s": self.low, "high_s": self.high, "runs": self.runs}


def timing(seconds: Iterable[float], *, scale: float = 1.0) -> Timing:
    """Summarize the times of some runs, multiplied by ``scale`` for a call that did only part of the work."""
    scaled = [scale * value for value in seconds]
    return Timing(median(scaled), min(scaled), max(scaled), len(scaled))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call: between two CUDA events on a GPU, wall-clock time elsewhere."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    budget_s: float = BUDGET_S,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each candidate, run in turns A B C A B C so that drift of the machine affects all of them equally, and
    the errors of those that failed.

    The first turn is a warm-up, in which kernels are compiled; it is not counted.
    """
    runs: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, call in candidates.items():
        try:
            seconds(call, device)
        except Exception as error:  # a broken candidate must not prevent timing the others; the table names it
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            say(f"  {name} failed: {failed[name]}")
        else:
            runs[name] = []
    for _ in range(TURNS):
        for name, times in runs.items():
            if sum(times) < budget_s:
                times += _turn(candidates[name], device)
    return runs, failed


def _turn(call: Callable[[], object], device: torch.device) -> list[float]:
    """The times of one run, or of several if the call is short."""
    times = [seconds(call, device)]
    while sum(times) < TURN_S and len(times) < TURN_RUNS:
        times.append(seconds(call, device))
    return times


def power_law(sizes: Iterable[float], times: Iterable[float]) -> tuple[float, float]:
    """The exponent p in time ~ size^p, by least squares on the logarithms, and its standard error."""
    x, y = ([math.log(value) for value in values] for values in (sizes, times))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / (len(x) - 2) / spread) if len(x) > 2 else math.nan


def unit_vectors(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Uniform random points on the sphere, sampled on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    gaussian = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    return torch.nn.functional.normalize(gaussian, dim=-1).to(dtype)


def relative_error(computed: Tensor, exact: Tensor) -> float:
    """|computed - exact| / |exact| over all entries; infinite if any entry is not finite."""
    error = float(torch.linalg.vector_norm(computed.double() - exact) / torch.linalg.vector_norm(exact))
    return error if math.isfinite(error) else math.inf


@dataclass(eq=False)
class Results:
    """The results of one benchmark: tables, ``measures`` to compare with the targets, and every single timing."""

    script: str
    device: torch.device
    out: Path
    machine: Row
    settings: Row
    tables: dict[str, list[Row]] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    runs: list[Row] = field(default_factory=list)
    finished: bool = False

    def keep(self, name: Row, measured: Timing, **more: object) -> None:
        """Store one timing, with its labels."""
        self.runs.append({**name, **measured.columns, **more})

    def save(self) -> None:
        """Write the JSON file; called after every part, so that an interrupted benchmark keeps its results."""
        self.out.mkdir(parents=True, exist_ok=True)
        content = {
            "script": self.script,
            "device": self.device.type,
            "machine": self.machine,
            "settings": self.settings,
            "finished": self.finished,
            "measures": self.measures,
            "tables": self.tables,
            "runs": self.runs,
        }
        path = self.out / f"{self.script}-{self.device.type}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")

    def finish(self) -> None:
        """Save, and print the tables."""
        self.finished = True
        self.save()
        for title, rows in self.tables.items():
            print(f"\n{title}\n\n{markdown(rows)}", flush=True)


def parser(about: str) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", type=Path, default=HERE / "out", help="folder for the JSON files")
    options.add_argument("--commit", default=None, help="the commit to record if git is not available")
    return options


def new_results(script: str, options: argparse.Namespace) -> Results:
    """Empty results for this machine and these options."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = known_device(options.device)
    settings = {k: v for k, v in vars(options).items() if k not in ("device", "out", "commit")}
    return Results(script, device, options.out, machine(device, options.commit), settings)


def known_device(name: str) -> torch.device:
    """The named device; exits with one sentence if it is not available."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(f"--device is {name!r}, but it must be cpu, or cuda where there is a GPU") from error
    return device


def machine(device: torch.device, commit: str | None) -> Row:
    """Hardware, versions and commit."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": None if gpu is None else f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "pykeops": _version("pykeops"),
    }


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def markdown(rows: list[Row]) -> str:
    """A Markdown table with aligned columns; the columns are the keys of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([cell_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ["| " + " | ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def cell_text(value: object) -> str:
    """A value as text: floats to three digits, None as an empty string."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return (
        f"{value:.3g}" if 1e-3 <= abs(value) < 1e3 else f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.1e}"
    )


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def free_memory(device: torch.device) -> None:
    """Free the memory of earlier candidates, so that the next one starts with an empty device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
