"""The tables of RESULTS.md from the JSON files of the benchmarks: ``python benchmarks/results.py [FOLDER ...]``."""

from __future__ import annotations

import json
import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, markdown, shown

HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Target:
    """What a measure of a benchmark must reach."""

    what: str
    script: str
    device: str
    measure: str
    sense: str
    bound: float

    def row(self, found: dict[str, Any] | None) -> dict[str, object]:
        """The target beside what was measured."""
        value = None if found is None else found["measures"].get(self.measure)
        verdict = "not measured" if value is None else "met" if HOLDS[self.sense](value, self.bound) else "**not met**"
        return {"target": self.what, "asked": f"{self.sense} {shown(self.bound)}", "measured": value, "": verdict}


def _gpu_sums() -> list[Target]:
    """One right-hand side at n = 65,536 against SDPA in float32, and its error."""
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
    """One core, float64: the pinned kernel against naive, and its error."""
    asked = (
        ("harmonic on S^2", 4_096, 3, 10.0),
        ("harmonic on S^2", 65_536, 3, 250.0),
        ("harmonic on S^1", 4_096, 2, 80.0),
        ("streaming", 8_192, 16, 4.0),
    )
    found = []
    for kernel, n, d, ratio in asked:
        place, what = f"n={n}, d={d}", f"{kernel}, n={n:,}, d={d}"
        found.append(Target(f"{what}: times naive", "right_hand_side", "cpu", f"naive / pinned, {place}", ">=", ratio))
        found.append(
            Target(f"{what}: error of e^beta", "right_hand_side", "cpu", f"error of pinned, {place}", "<=", 1e-9)
        )
    return found


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
    Target("n=10^7 on S^2: seconds a step", "right_hand_side", "cuda", "seconds a step, n=10^7, d=3", "<", 0.1),
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
    Target("recording, 12 x 192: times an eager forward", "recording", "cpu", "record / plain", "<=", 1.5),
    Target(
        "recording, 12 x 192: memory beyond a forward, of the trajectory",
        "recording",
        "cpu",
        "more bytes / trajectory, small",
        "<=",
        1.1,
    ),
    Target("recording, GPT-2, 1,024 tokens: bytes beyond a forward", "recording", "cpu", "more bytes, full", "<=", 3e8),
]


def place(found: dict[str, Any]) -> str:
    """Where and on what a benchmark ran, in one line."""
    facts = found["machine"]
    where = facts["gpu"] or f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "triton", "pykeops") if facts[name])
    return f"{where}; {versions}; commit {facts['commit']}; {facts['date']}"


def render(files: list[Path]) -> str:
    """The page's tables: the targets first, then every table with its machine."""
    everything = [json.loads(path.read_text()) for path in files]
    for path, found in zip(files, everything, strict=True):
        if "with changes" in found["machine"]["commit"]:
            raise SystemExit(f"{path} was measured on a tree with uncommitted changes: commit, and measure again")
        if not found.get("finished", True):
            raise SystemExit(f"{path} is what an interrupted benchmark left: let it run to its end")
    by_name = {(found["script"], found["device"]): found for found in everything}
    device_names = {"cuda": "GPU", "cpu": "CPU"}
    rows = [{"on": device_names[t.device], **t.row(by_name.get((t.script, t.device)))} for t in TARGETS]
    parts = ["## Targets", markdown(rows)]
    for found in everything:
        parts.append(f"## {found['script']}, {device_names[found['device']]}")
        parts.append(f"{place(found)}.")
        for title, table in found["tables"].items():
            parts += [f"### {title}", markdown(table)]
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables of all JSON files in the folders given, by default benchmarks/out."""
    folders = [Path(word) for word in sys.argv[1:]] or [HERE / "out"]
    files = sorted(path for folder in folders for path in folder.glob("*.json"))
    print(render(files) if files else f"no JSON file in {', '.join(map(str, folders))}: run make bench first")


if __name__ == "__main__":
    main()
