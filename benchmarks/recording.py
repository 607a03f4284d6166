"""The cost of recording compared with a plain eager forward of the same texts: time and memory.

    time      a GPT-2 with 12 layers of width 192; ``record`` with its certificate, and the recorded forward alone
    memory    the same, and a full-size GPT-2 on one text of 1,024 tokens; the peak resident memory beyond that of a
              plain forward, each measured in a separate process

On a CPU, with random weights, whose values do not affect the cost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import interleaved, new_results, parser, timing

import helmscope as hs
from helmscope.models.recorder import Recorder

SMALL = {"vocab_size": 4_096, "n_embd": 192, "n_layer": 12, "n_head": 6, "n_positions": 256}
FULL = {"vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1_024}
CASES = {"small": (SMALL, 64, 256), "full": (FULL, 1, 1_024)}
PART = 16  # texts per batch


def model_and_ids(case: str) -> tuple[Any, torch.Tensor]:
    """The model of a case, and its token ids."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes, texts, tokens = CASES[case]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, activation_function="gelu", bos_token_id=0, eos_token_id=0)).eval()
    model.set_attn_implementation("eager")
    return model, torch.randint(sizes["vocab_size"], (texts, tokens))


def plain(model: Any, ids: torch.Tensor) -> None:
    """The model's plain forward, batch by batch."""
    with torch.no_grad():
        for first in range(0, len(ids), PART):
            model(input_ids=ids[first : first + PART], use_cache=False)


def peak(case: str, what: str) -> dict[str, float]:
    """The peak memory of a process that does one of the two, and the size of the trajectory, in bytes."""
    command = [sys.executable, __file__, "--case", case, "--what", what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return printed


def one_process(case: str, what: str) -> None:
    """Run the plain or the recorded forward in this process, and print the peak memory."""
    model, ids = model_and_ids(case)
    plain(model, ids[:1, :8])
    size = 0
    _reset_peak()
    if what == "plain":
        plain(model, ids)
    else:
        path = hs.record(model, ids, batch_size=PART).trajectory
        assert path.radius is not None
        size = sum(part.numel() * part.element_size() for part in (path.states, path.radius))
    print(json.dumps({"peak": _peak(), "trajectory": size}))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1_024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def main() -> None:
    """Measure time in turns, and memory in separate processes."""
    arguments = parser(__doc__)
    arguments.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    arguments.add_argument("--what", choices=["plain", "record"], help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.case:
        one_process(options.case, options.what)
        return
    options.device = "cpu"
    results = new_results("recording", options)
    model, ids = model_and_ids("small")
    recording = hs.record(model, ids, batch_size=PART)
    runs, _ = interleaved(
        {
            "plain eager forward": partial(plain, model, ids),
            "record, with its certificate": partial(hs.record, model, ids, batch_size=PART),
            "recorded forward alone": lambda: recording.runner.forward(Recorder(recording.anatomy, len(ids))),
        },
        results.device,
        budget_s=30,
    )
    base = timing(runs["plain eager forward"]).median
    rows = results.tables.setdefault("Time: 12 layers of width 192, 64 texts of 256 tokens", [])
    for name, times in runs.items():
        one = timing(times)
        rows.append({"what": name, "median s": one.median, "of plain": one.median / base, "runs": one.runs})
        results.keep({"what": name}, one)
    results.measures["record / plain"] = timing(runs["record, with its certificate"]).median / base
    table = results.tables.setdefault("Memory at the peak", [])
    for case, (_, texts, tokens) in CASES.items():
        ours, theirs = peak(case, "record"), peak(case, "plain")
        more = ours["peak"] - theirs["peak"]
        table.append(
            {
                "case": f"{case}, {texts} x {tokens}",
                "plain MB": theirs["peak"] / 1e6,
                "record MB": ours["peak"] / 1e6,
                "more MB": more / 1e6,
                "trajectory MB": ours["trajectory"] / 1e6,
            }
        )
        results.measures[f"more bytes, {case}"] = more
        results.measures[f"more bytes / trajectory, {case}"] = more / ours["trajectory"]
    results.finish()


if __name__ == "__main__":
    main()
