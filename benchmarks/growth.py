"""How the run time of every kernel scales with n and d: time ~ n^p and time ~ d^q.

The exponents are least-squares fits to the logarithms of the medians, with standard errors; all sizes of one series are
timed in turns. float32 on a GPU, float64 on a CPU, beta = 4. The fused kernel integrates many systems of 32 tokens over
20 time intervals; its series over ``systems`` varies their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from common import (
    Results,
    cell_text,
    free_memory,
    interleaved,
    new_results,
    parser,
    power_law,
    say,
    timing,
    unit_vectors,
)

from helmscope.kernels.blockwise import Blockwise
from helmscope.kernels.dense import Dense
from helmscope.kernels.flash import Flash
from helmscope.kernels.fused import fused_clustering
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.request import Request, Summation

BETA = 4.0
Prepare = Callable[[int, torch.device], Callable[[], object]]  # a size and a device -> the call to be timed


@dataclass(frozen=True, eq=False)
class Line:
    """A series of timings of one kernel over one size."""

    kernel: str
    along: str
    sizes: tuple[int, ...]
    prepare: Prepare
    measure: str | None = None  # the name of the exponent in the targets


def powers(first: int, last: int) -> tuple[int, ...]:
    """2^first .. 2^last."""
    return tuple(2**k for k in range(first, last + 1))


def over_n(kernel: Summation, sizes: tuple[int, ...], d: int) -> Line:
    """The time of one right-hand side over n."""
    measure = f"exponent of harmonic in n, d={d}" if isinstance(kernel, Harmonic) else None
    name = f"{type(kernel).__name__}, d = {d}"
    return Line(name, "n", sizes, lambda n, device: _sum(kernel, n, d, device), measure)


def over_d(kernel: Summation, n: int, sizes: tuple[int, ...]) -> Line:
    """The time of one right-hand side over d."""
    name = f"{type(kernel).__name__}, n = {n:,}"
    return Line(name, "d", sizes, lambda d, device: _sum(kernel, n, d, device))


def _sum(kernel: Summation, n: int, d: int, device: torch.device) -> Callable[[], object]:
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    x = unit_vectors(n, d, device=device, dtype=dtype, seed=n + d)
    return partial(kernel.sum, Request(BETA * x, x, x, beta=BETA))


def _fused(systems: int, d: int, device: torch.device) -> Callable[[], object]:
    """A call of the fused kernel; ``stop=False``, so that all systems cost the same."""
    x = unit_vectors(systems, 32, d, device=device, dtype=torch.float32)
    beta, steps = torch.tensor([BETA], device=device), torch.ones(1, dtype=torch.int32, device=device)
    times = torch.linspace(0, 3, 21, dtype=torch.float64).tolist()
    return lambda: fused_clustering(x, times, betas=beta, steps=steps, stop=False)


WIDTHS = powers(4, 8)
LINES = {
    "cpu": (
        over_n(Dense(), powers(8, 11), 16),
        over_d(Dense(), 1_024, WIDTHS),
        over_n(Blockwise(), powers(10, 13), 16),
        over_d(Blockwise(), 4_096, WIDTHS),
        over_n(Harmonic(), powers(12, 18), 2),
        over_n(Harmonic(), powers(12, 17), 3),
    ),
    "cuda": (
        over_n(Dense(), powers(8, 11), 16),
        over_d(Dense(), 2_048, WIDTHS),
        over_n(Blockwise(), powers(13, 16), 16),
        over_d(Blockwise(), 32_768, WIDTHS),
        over_n(Flash(), powers(14, 17), 16),
        over_n(Flash(), powers(14, 17), 128),
        over_d(Flash(), 65_536, WIDTHS),
        over_n(Harmonic(), powers(20, 24), 2),
        over_n(Harmonic(), powers(20, 24), 3),
        Line("Fused, d = 32", "systems", powers(12, 17), lambda systems, device: _fused(systems, 32, device)),
        Line("Fused, 16,384 systems", "d", powers(4, 7), lambda d, device: _fused(16_384, d, device)),
    ),
}


def follow(results: Results, line: Line) -> None:
    """Time one series and fit its exponent."""
    say(f"{line.kernel}: {line.along} = {', '.join(f'{size:,}' for size in line.sizes)}")
    free_memory(results.device)
    calls = {str(size): line.prepare(size, results.device) for size in line.sizes}
    runs, failed = interleaved(calls, results.device)
    timings = {int(size): timing(times) for size, times in runs.items()}
    for size, measured in timings.items():
        results.keep({"line": line.kernel, line.along: size}, measured)
    medians = [measured.median for measured in timings.values()]
    exponent, error = power_law(timings, medians) if len(medians) > 1 else (None, None)
    row = {
        "kernel": line.kernel,
        "against": line.along,
        "sizes": f"{line.sizes[0]:,} .. {line.sizes[-1]:,}",
        "ms": " ".join(cell_text(measured.median * 1e3) for measured in timings.values()),
        "exponent": exponent,
        "standard error": error,
        "failed": ", ".join(failed),
    }
    results.tables.setdefault(f"Growth of the time, beta = {BETA:g}", []).append(row)
    if line.measure is not None and exponent is not None and not failed:
        results.measures[line.measure] = exponent


def main() -> None:
    """Time all series for this device."""
    results = new_results("growth", parser(__doc__).parse_args())
    for line in LINES[results.device.type]:
        follow(results, line)
        results.save()
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
