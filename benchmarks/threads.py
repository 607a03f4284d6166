"""The time of small systems with all threads of the machine compared with one thread.

    first call       SA at beta = 4, 16 systems of 32 tokens in R^3, to t = 10
    phase diagram    SA at beta = 1 and 4, 64 samples of 32 tokens in R^32, to t = 8

The library integrates small systems on one thread whatever the caller has set, so both ratios should be 1. They are
meaningful only on an idle machine with two or more cores. ``OMP_NUM_THREADS`` has no effect, because the number of
threads is set here. On a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from common import interleaved, new_results, parser, timing

import helmscope as hs

ALL = os.cpu_count() or 1


def first_call(x0: torch.Tensor) -> None:
    """The first integration of the README."""
    hs.integrate(hs.SA(beta=4.0), x0, times=[1, 5, 10])


def diagram() -> None:
    """A small phase diagram."""
    hs.phase_diagram(hs.SA, betas=[1, 4], times=[2, 4, 6, 8], start=hs.Uniform(n=32, dim=32), samples=64)


def with_threads(threads: int, call: Callable[[], None]) -> None:
    """Run the call with this number of threads."""
    torch.set_num_threads(threads)
    call()


def main() -> None:
    """Time both calls, with all threads and with one, in turns."""
    options = parser(__doc__).parse_args()
    options.device = "cpu"
    torch.set_num_threads(ALL)
    results = new_results("threads", options)
    calls = {"first call": partial(first_call, hs.Uniform(n=32, dim=3).sample(batch=16)), "phase diagram": diagram}
    for name, call in calls.items():
        counts = dict.fromkeys((1, ALL))
        runs, _ = interleaved(
            {str(count): partial(with_threads, count, call) for count in counts}, results.device, budget_s=60
        )
        timings = {int(count): timing(times) for count, times in runs.items()}
        ratio = timings[ALL].median / timings[1].median
        row = {
            "call": name,
            "one thread, s": timings[1].median,
            f"{ALL} threads, s": timings[ALL].median,
            "ratio": ratio,
        }
        results.tables.setdefault("Small systems: all threads compared with one", []).append(row)
        results.measures[f"all threads / one thread, {name}"] = ratio
        for count, measured in timings.items():
            results.keep({"call": name, "threads": count}, measured)
        results.save()
    results.finish()


if __name__ == "__main__":
    main()
