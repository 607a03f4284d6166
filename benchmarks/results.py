"""Print the tables of RESULTS.md from the JSON files of benchmarks: ``python benchmarks/results.py [FOLDER ...]``."""

from __future__ import annotations

import json
import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, cell_text, markdown

HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Target:
    """A bound that a measure of a benchmark must satisfy."""

    what: str
    script: str
    device: str
    measure: str
    sense: str
    bound: float

    def row(self, benchmark: dict[str, Any] | None) -> dict[str, object]:
        """The row of the table: the target and the measured value."""
        value = None if benchmark is None else benchmark["measures"].get(self.measure)
        verdict = "not measured" if value is None else "met" if HOLDS[self.sense](value, self.bound) else "**not met**"
        return {"target": self.what, "asked": f"{self.sense} {cell_text(self.bound)}", "measured": value, "": verdict}


def _gpu_sums() -> list[Target]:
    """Targets for one right-hand side at n = 65,536 in float32: speed relative to SDPA, and error."""
    times = [
        Target(f"n=65,536, d={d}: times SDPA", "right_hand_side", "cuda", f"sdpa / ours, n=65536, d={d}", ">=", ratio)
        for d, ratio in ((3, 100.0), (16, 4.0), (64, 2.5), (128, 2.0))
    ]
    errors = [
        Target(
            f"n=65,536, d={d}: relative error", "right_hand_side", "cuda", f"error of ours, n=65536, d={d}", "<=", 1e-5
        )
        for d in (3, 16, 64, 128)
    ]
    return times + errors


def _cpu_sums() -> list[Target]:
    """Targets for the pinned kernels on one core in float64: speed relative to naive, and error."""
    cases = (
        ("harmonic on S^2", 4_096, 3, 10.0),
        ("harmonic on S^2", 65_536, 3, 250.0),
        ("harmonic on S^1", 4_096, 2, 80.0),
        ("blockwise", 8_192, 16, 4.0),
    )
    targets = []
    for kernel, n, d, ratio in cases:
        size, what = f"n={n}, d={d}", f"{kernel}, n={n:,}, d={d}"
        targets.append(Target(f"{what}: times naive", "right_hand_side", "cpu", f"naive / pinned, {size}", ">=", ratio))
        targets.append(
            Target(f"{what}: error of e^beta", "right_hand_side", "cpu", f"error of pinned, {size}", "<=", 1e-9)
        )
    return targets


TARGETS = [
    Target("figure 3: seconds of device time", "figure3", "cuda", "seconds of the figure", "<", 2.0),
    Target("figure 3: times the plain torch version", "figure3", "cuda", "plain / fast", ">=", 20.0),
    Target(
        "figure 3: worst cell, in units of max(0.25 standard errors, 2/samples)",
        "figure3",
        "cuda",
        "error of the worst cell, of what is allowed",
        "<=",
        1.0,
    ),
    *_gpu_sums(),
    Target("n=10^7 on S^2: seconds per step", "right_hand_side", "cuda", "seconds per step, n=10^7, d=3", "<", 0.1),
    Target(
        "memory beyond n=2,048, in units of n x n",
        "right_hand_side",
        "cuda",
        "most memory of ours, of that of n x n",
        "<",
        1.0,
    ),
    *(
        Target(f"harmonic, d={d}: exponent in n", "growth", device, f"exponent of harmonic in n, d={d}", "<=", 1.1)
        for device in ("cuda", "cpu")
        for d in (2, 3)
    ),
    *_cpu_sums(),
    Target("figure 3: panel d=1024 over panel d=32", "figure3", "cpu", "panel d=1024 / panel d=32", "<=", 1.2),
    *(
        Target(f"{call}: all threads over one", "threads", "cpu", f"all threads / one thread, {call}", "<=", 1.3)
        for call in ("first call", "phase diagram")
    ),
    Target(
        "Sinkhorn, n=m=20,000, d=64: times SDPA", "sinkhorn", "cpu", "10 iterations / 20 sdpa, n=20000, d=64", "<=", 1.1
    ),
    Target(
        "Sinkhorn, n=m=20,000: memory of a half-step, in units of n x n",
        "sinkhorn",
        "cpu",
        "extra memory of a half-step, in units of n x n",
        "<=",
        0.01,
    ),
    Target("Sinkhorn, n=m=10^6 on S^2: seconds", "sinkhorn_gpu", "cuda", "seconds, n=m=10^6 on S^2", "<=", 60.0),
    Target("recording, 12 x 192: times an eager forward", "recording", "cpu", "record / plain", "<=", 1.5),
    Target(
        "recording, 12 x 192: memory beyond a forward, of the trajectory",
        "recording",
        "cpu",
        "more bytes / trajectory, small",
        "<=",
        1.1,
    ),
    *(
        Target(
            f"W2 on the circle, 10^6 points, {case}: times POT",
            "circle_transport",
            "cpu",
            f"POT / ours, {case}",
            ">=",
            ratio,
        )
        for case, ratio in (("equal weights", 20.0), ("random weights", 10.0))
    ),
    Target(
        "density on S^2, degree 64: transform over its own products and FFT",
        "density",
        "cpu",
        "transform / own work, degree 64",
        "<=",
        3.0,
    ),
    Target(
        "density on S^2, degree 64: right-hand side of SA, in transforms",
        "density",
        "cpu",
        "right-hand side / transform, degree 64",
        "<=",
        8.0,
    ),
    Target("recording, GPT-2, 1,024 tokens: bytes beyond a forward", "recording", "cpu", "more bytes, full", "<=", 3e8),
]


def environment(benchmark: dict[str, Any]) -> str:
    """The hardware, versions, commit and date of a benchmark, in one line."""
    facts = benchmark["machine"]
    where = facts["gpu"] or f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "triton", "pykeops") if facts[name])
    return f"{where}; {versions}; commit {facts['commit']}; {facts['date']}"


def render(files: list[Path]) -> str:
    """All tables in Markdown: first the targets, then the tables of every benchmark with its machine."""
    benchmarks = [json.loads(path.read_text()) for path in files]
    for path, benchmark in zip(files, benchmarks, strict=True):
        if "with changes" in benchmark["machine"]["commit"]:
            raise SystemExit(f"{path} was measured on a tree with uncommitted changes: commit, and measure again")
        if not benchmark.get("finished", True):
            raise SystemExit(f"{path} is from an interrupted benchmark: run it again to its end")
    by_name = {(benchmark["script"], benchmark["device"]): benchmark for benchmark in benchmarks}
    device_names = {"cuda": "GPU", "cpu": "CPU"}
    rows = [{"on": device_names[t.device], **t.row(by_name.get((t.script, t.device)))} for t in TARGETS]
    parts = ["## Targets", markdown(rows)]
    for benchmark in benchmarks:
        parts.append(f"## {benchmark['script']}, {device_names[benchmark['device']]}")
        parts.append(f"{environment(benchmark)}.")
        for title, table in benchmark["tables"].items():
            parts += [f"### {title}", markdown(table)]
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables of all JSON files in the given folders, by default benchmarks/out."""
    folders = [Path(word) for word in sys.argv[1:]] or [HERE / "out"]
    files = sorted(path for folder in folders for path in folder.glob("*.json"))
    print(render(files) if files else f"no JSON file in {', '.join(map(str, folders))}: run make bench first")


if __name__ == "__main__":
    main()
