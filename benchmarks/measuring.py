"""The cost of ``measure``: the replay of the streaming instruments compared with a plain eager forward of model A, and
the memory of every measurement of a model of the size of GPT-2.

    time      a plain eager forward without recording, the recorded forward, a replay that measures nothing, one with
              each streaming instrument and one with all four, in turns; processor time, since the ratios of wall-clock
              times depend on what else runs
    memory    with ``--memory``: peak resident memory and processor time of each measurement of 8 texts of 256 tokens,
              in a separate process each, the recording included

On a CPU. The model of the second part has random weights, whose values do not affect the cost.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import new_results, parser, say

import helmscope as hs
from helmscope.models.recorder import Recorder
from helmscope.observe.head_moments import HEADS_NEED
from helmscope.observe.measure import measurement_names, streaming_instruments
from helmscope.types import Instrument, Needs

PLAIN = "plain eager forward"


class Nothing(Instrument):
    """Receives all that the streaming instruments receive, and keeps one number."""

    name = "nothing"
    needs = HEADS_NEED | Needs.FORCE

    def mlp(self, context: Any, tensors: Any) -> None:
        """Keeps a number, since a Measurement must not be empty."""
        self.keep(context, {"number": tensors.state[:, 0, 0]})


def candidates(recording: Any) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    found: dict[str, Callable[[], Any]] = {
        PLAIN: recording.runner.forward,
        "recorded forward": lambda: recording.runner.forward(Recorder(recording.anatomy, len(recording.batch))),
        "replay of nothing": lambda: recording.replay(Nothing()),
    }
    for place, instrument in enumerate(streaming_instruments()):
        found[instrument.name] = lambda place=place: recording.replay(streaming_instruments()[place])
    found["all four"] = lambda: recording.replay(*streaming_instruments())
    return found


def ratios(texts: int, turns: int) -> list[dict[str, object]]:
    """Processor seconds in turns after one turn of warm-up, and their medians over that of a plain forward."""
    recording = hs.record("A", hs.models.story_texts()[:texts])
    runs = candidates(recording)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    return [
        {
            "what": name,
            "median s": statistics.median(seconds),
            "of plain": statistics.median(s / p for s, p in zip(seconds, times[PLAIN], strict=True)),
            "turns": turns,
        }
        for name, seconds in times.items()
    ]


def one_process(name: str) -> None:
    """Record and measure in this process, and print the peak memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0)).eval()
    recording = hs.record(model, torch.randint(50_257, (8, 256)))
    start = time.process_time()
    if name != "recording":
        hs.measure(recording, only=[name])
    seconds = time.process_time() - start
    peak = 1_024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"what": name, "peak GB": peak / 1e9, "s": seconds}))


def main() -> None:
    """Measure time in turns, and memory in separate processes."""
    arguments = parser(__doc__)
    arguments.add_argument("--texts", type=int, default=64)
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--memory", action="store_true", help="also the memory of every measurement, which is slow")
    arguments.add_argument("--what", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.what:
        one_process(options.what)
        return
    options.device = "cpu"
    results = new_results("measuring", options)
    rows = ratios(options.texts, options.turns)
    results.tables[f"Time: model A, {options.texts} texts of 128 tokens"] = rows
    results.measures["streaming replay / plain"] = float(str(rows[-1]["of plain"]))
    if options.memory:
        table = results.tables.setdefault("Memory at the peak: GPT-2, 8 texts of 256 tokens", [])
        for name in ("recording", *measurement_names()):
            command = [sys.executable, __file__, "--what", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            table.append(json.loads(done.stdout.splitlines()[-1]))
            say(f"{name}: {table[-1]['peak GB']:.2f} GB")
            results.save()
    results.finish()


if __name__ == "__main__":
    main()
