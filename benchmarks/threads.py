"""What a small system costs with all threads of the machine beside one thread.

    first call       SA at beta = 4, 16 systems of 32 tokens in R^3, to t = 10
    phase diagram    SA at beta = 1 and 4, 64 samples of 32 tokens in R^32, to t = 8

The library carries small systems on one thread whatever the caller has set, so both ratios should be 1. They mean
something on an idle machine with two cores or more. ``OMP_NUM_THREADS`` does not matter: the numbers of threads are set
here. On a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from common import interleaved, parser, record, timing

import helmscope as hs

ALL = os.cpu_count() or 1


def first_call(x0: torch.Tensor) -> None:
    """The first integration of the README."""
    hs.integrate(hs.SA(beta=4.0), x0, times=[1, 5, 10])


def diagram() -> None:
    """A small phase diagram."""
    hs.phase_diagram(hs.SA, betas=[1, 4], times=[2, 4, 6, 8], start=hs.Uniform(n=32, dim=32), samples=64)


def on(threads: int, call: Callable[[], None]) -> None:
    """The call from a caller with so many threads."""
    torch.set_num_threads(threads)
    call()


def main() -> None:
    """Both calls, with all threads and with one, in turns."""
    options = parser(__doc__).parse_args()
    options.device = "cpu"
    torch.set_num_threads(ALL)
    found = record("threads", options)
    calls = {"first call": partial(first_call, hs.Uniform(n=32, dim=3).sample(batch=16)), "phase diagram": diagram}
    for name, call in calls.items():
        counts = dict.fromkeys((1, ALL))
        runs, _ = interleaved({str(count): partial(on, count, call) for count in counts}, found.device, budget_s=60)
        times = {int(count): timing(lasted) for count, lasted in runs.items()}
        ratio = times[ALL].median / times[1].median
        row = {"call": name, "one thread, s": times[1].median, f"{ALL} threads, s": times[ALL].median, "ratio": ratio}
        found.tables.setdefault("Small systems with all threads beside one", []).append(row)
        found.measures[f"all threads / one thread, {name}"] = ratio
        for count, one in times.items():
            found.keep({"call": name, "threads": count}, one)
        found.save()
    found.finish()


if __name__ == "__main__":
    main()
