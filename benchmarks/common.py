"""What every benchmark shares: fair timing, the facts of the machine, tables and JSON."""

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
TURNS, BUDGET_S = 5, 2.0  # of one candidate: this often, or until it has used this time
TURN_S, TURN_RUNS = 0.02, 50  # a short call is run again within its turn, until it has used this time
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
        """As the columns of a table."""
        return {"median_s": self.median, "low_s": self.low, "high_s": self.high, "runs": self.runs}


def timing(seconds: Iterable[float], *, scale: float = 1.0) -> Timing:
    """The summary of some runs; ``scale`` is for a call that did only a part of the work."""
    all_of_them = [scale * value for value in seconds]
    return Timing(median(all_of_them), min(all_of_them), max(all_of_them), len(all_of_them))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call: between two CUDA events on a GPU, by the clock elsewhere."""
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
    """Seconds of each candidate, run in turns A B C A B C so that a drift of the machine meets all alike, and what
    went wrong with those that failed.

    The first turn warms up, compiles, and is not counted.
    """
    runs: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, call in candidates.items():
        try:
            seconds(call, device)
        except Exception as error:  # one broken candidate must not cost the numbers of the others; the table names it
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            say(f"  {name} failed: {failed[name]}")
        else:
            runs[name] = []
    for _ in range(TURNS):
        for name, lasted in runs.items():
            if sum(lasted) < budget_s:
                lasted += _turn(candidates[name], device)
    return runs, failed


def _turn(call: Callable[[], object], device: torch.device) -> list[float]:
    """One run, or some of a short call."""
    lasted = [seconds(call, device)]
    while sum(lasted) < TURN_S and len(lasted) < TURN_RUNS:
        lasted.append(seconds(call, device))
    return lasted


def power_law(sizes: Iterable[float], times: Iterable[float]) -> tuple[float, float]:
    """The exponent p of time ~ size^p by least squares on the logarithms, and its standard error."""
    x, y = ([math.log(value) for value in values] for values in (sizes, times))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / (len(x) - 2) / spread) if len(x) > 2 else math.nan


def unit_vectors(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Uniform points on the sphere, drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    return torch.nn.functional.normalize(drawn, dim=-1).to(dtype)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| over all entries; infinite where anything is not finite."""
    error = float(torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact))
    return error if math.isfinite(error) else math.inf


@dataclass(eq=False)
class Record:
    """What one benchmark found: tables to read, ``measures`` to hold against the targets, every single run."""

    script: str
    device: torch.device
    out: Path
    machine: Row
    settings: Row
    tables: dict[str, list[Row]] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    runs: list[Row] = field(default_factory=list)
    finished: bool = False

    def keep(self, name: Row, found: Timing, **more: object) -> None:
        """One timing with all that belongs to it."""
        self.runs.append({**name, **found.columns, **more})

    def save(self) -> None:
        """Write the JSON file, after every part, so that a stopped run keeps what it had."""
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
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--out", type=Path, default=HERE / "out", help="folder of the JSON files")
    made.add_argument("--commit", default=None, help="what is measured, where git cannot say")
    return made


def record(script: str, options: argparse.Namespace) -> Record:
    """An empty record for the machine and the options at hand."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = known_device(options.device)
    settings = {k: v for k, v in vars(options).items() if k not in ("device", "out", "commit")}
    return Record(script, device, options.out, machine(device, options.commit), settings)


def known_device(name: str) -> torch.device:
    """A device that is there, or one sentence."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(f"--device is {name!r}, but it must be cpu, or cuda where there is a GPU") from error
    return device


def machine(device: torch.device, commit: str | None) -> Row:
    """The facts without which a number means nothing."""
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
    """A table in columns, for a terminal and for a page alike; the columns are the keys of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ["| " + " | ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def shown(value: object) -> str:
    """A number to three digits; nothing for None."""
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
    """A line of progress."""
    print(line, flush=True)


def free_memory(device: torch.device) -> None:
    """Give back what earlier candidates held, so that the next one meets an empty machine."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
