"""Transforms and right-hand sides of the equations of densities, in float64 on one core.

    transform         SphereGrid.synthesize and .analyze in turn, compared with their own matrix products and FFT alone
    right-hand side   SA and USA with noise on S^2, compared with transforms; SA also with anisotropic noise, and for
                      the logarithm of the density
    growth            the exponents in the degree with intervals, for S^2, the circle and zonal densities

The matrix products are those of the transform, one 2 x (degree + 1) by (degree + 1) x latitudes product per order in
one batched call, and the FFT is that of all latitudes in one call. Eight transforms are timed as one call, so that all
calls take about as long and other work on the machine affects them alike. On a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import mean, median, stdev

import torch
from common import Results, free_memory, interleaved, new_results, parser, power_law, say, timing

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise, MatrixNoise, Noise
from helmscope.meanfield import CircleGrid, Density, Grid, SphereGrid, ZonalGrid
from helmscope.meanfield.forward_equation import ForwardEquation

BETA = 4.0
ANISOTROPIC = MatrixNoise(torch.diag(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)))
TURNS, T_95 = 15, 2.145  # turns of an exponent, and the quantile of Student's t for their interval


def own_work(grid: SphereGrid) -> tuple[Callable[[], object], Callable[[], object]]:
    """The matrix products and FFTs of one synthesis and of one analysis, on arrays that are ready for them."""
    size, rows = grid.degree + 1, grid.latitudes
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(size, 2, size, generator=generator, dtype=torch.float64)
    orders = torch.randn(size, 2, rows, generator=generator, dtype=torch.float64)
    spectrum = torch.randn(rows, size, generator=generator, dtype=torch.complex128)
    values = torch.randn(rows, grid.longitudes, generator=generator, dtype=torch.float64)

    def synthesis() -> None:
        parts @ grid.legendre.mT
        torch.fft.irfft(spectrum, n=grid.longitudes, norm="forward")

    def analysis() -> None:
        torch.fft.rfft(values, norm="forward")
        orders @ grid.legendre

    return synthesis, analysis


def right_hand_side(
    grid: Grid, field: object, noise: Noise | None = None, *, positive: bool = False
) -> Callable[[], object]:
    """One evaluation of the forward equation with noise, for the density or its logarithm."""
    density = Density.von_mises_fisher(grid, kappa=1.0)
    equation = ForwardEquation.of(field, grid, noise or IsotropicNoise(0.1))
    if positive:
        log_modes = density.log_modes
        assert log_modes is not None
        return lambda: equation.log_rate(log_modes, 0.0)
    return lambda: equation.rate(density.modes, 0.0)


def medians(results: Results, labels: dict[str, object], calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median times of all calls, taken in turns."""
    free_memory(results.device)
    runs, failed = interleaved(calls, results.device)
    if failed:
        raise SystemExit(f"{labels} failed: {failed}")
    timings = {name: timing(times) for name, times in runs.items()}
    for name, measured in timings.items():
        results.keep({**labels, "candidate": name}, measured)
    return {name: measured.median for name, measured in timings.items()}


def repeated(*calls: Callable[[], object], total: int = 8) -> Callable[[], object]:
    """The calls in turn, ``total`` in all."""

    def run() -> None:
        for _ in range(total // len(calls)):
            for call in calls:
                call()

    return run


def transforms(results: Results, degree: int) -> None:
    """The transforms and right-hand sides of one degree on S^2."""
    say(f"S^2, degree {degree}")
    grid = SphereGrid(degree)
    modes = Density.von_mises_fisher(grid, kappa=1.0).modes
    values = grid.synthesize(modes)
    calls = {
        "8 times products and FFT": repeated(*own_work(grid)),
        "8 transforms": repeated(lambda: grid.synthesize(modes), lambda: grid.analyze(values)),
        "SA": right_hand_side(grid, hs.SA(beta=BETA)),
        "USA": right_hand_side(grid, hs.USA(beta=BETA)),
        "SA, M": right_hand_side(grid, hs.SA(beta=BETA), ANISOTROPIC),
        "SA, log": right_hand_side(grid, hs.SA(beta=BETA), positive=True),
        "SA, M, log": right_hand_side(grid, hs.SA(beta=BETA), ANISOTROPIC, positive=True),
    }
    times = medians(results, {"grid": "S^2", "degree": degree}, calls)
    row = {"degree": degree, **{f"{name}, ms": 1e3 * value for name, value in times.items()}}
    row["transform / own work"] = times["8 transforms"] / times["8 times products and FFT"]
    for name in list(calls)[2:]:
        row[f"{name}, in transforms"] = 8 * times[name] / times["8 transforms"]
    results.tables.setdefault("Transforms and right-hand sides on S^2", []).append(row)
    results.measures[f"transform / own work, degree {degree}"] = row["transform / own work"]
    for name in ("SA", "SA, M", "SA, log", "SA, M, log"):
        label = "right-hand side" if name == "SA" else f"right-hand side of {name}"
        results.measures[f"{label} / transform, degree {degree}"] = row[f"{name}, in transforms"]
    results.save()


def exponents(results: Results, name: str, calls: dict[int, Callable[[], object]]) -> None:
    """How the CPU time of a call grows with the degree, over all degrees and over the last doubling.

    All degrees take turns, every turn gives an exponent, and the interval is that of their mean (Student's t). It is
    that of the measurement: it does not say that the growth is a power of the degree.
    """
    say(name)
    degrees = sorted(calls)
    for call in calls.values():
        call()
    turns = [[cpu_seconds(calls[degree]) for degree in degrees] for _ in range(TURNS)]
    last = [degrees.index(degrees[-1] // 2), len(degrees) - 1]
    row: dict[str, object] = {"call": name, "degrees": f"{degrees[0]} to {degrees[-1]}"}
    for label, place in (("first", 0), ("last", -1)):
        row[f"{label}, ms"] = 1e3 * median(turn[place] for turn in turns)
    for label, places in (("exponent", range(len(degrees))), ("of the last doubling", last)):
        slopes = [power_law([degrees[i] for i in places], [turn[i] for i in places])[0] for turn in turns]
        center, half = mean(slopes), T_95 * stdev(slopes) / math.sqrt(TURNS)
        row |= {label: center, f"95 % interval, {label}": f"{center - half:.2f} to {center + half:.2f}"}
        results.measures[f"{label} in the degree, {name}"] = center
    results.tables.setdefault("Growth with the degree, in CPU time", []).append(row)
    results.save()


def cpu_seconds(call: Callable[[], object]) -> float:
    """The median CPU time of a few calls in a row: other processes on the machine affect it little."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.05 and len(times) < 50):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return median(times)


def transform(grid: SphereGrid) -> Callable[[], object]:
    """One synthesis and one analysis."""
    modes = Density.von_mises_fisher(grid, kappa=1.0).modes
    return lambda: grid.analyze(grid.synthesize(modes))


def main() -> None:
    """Time all cases."""
    options = parser(__doc__)
    arguments = options.parse_args()
    arguments.device = "cpu"
    torch.set_num_threads(1)
    results = new_results("density", arguments)
    for degree in (32, 64, 128):
        transforms(results, degree)
    spheres = {degree: SphereGrid(degree) for degree in (32, 48, 64, 96, 128, 192, 256)}
    exponents(results, "S^2, two transforms", {degree: transform(grid) for degree, grid in spheres.items()})
    cases: dict[str, dict[int, Grid]] = {
        "S^2": dict(spheres),
        "circle": {degree: CircleGrid(degree) for degree in (1024, 4096, 16384, 32768, 65536)},
        "zonal, d=8": {degree: ZonalGrid(dim=8, degree=degree) for degree in (256, 512, 1024)},
    }
    for name, grids in cases.items():
        sides = {degree: right_hand_side(grid, hs.SA(beta=BETA)) for degree, grid in grids.items()}
        exponents(results, f"{name}, right-hand side of SA", sides)
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
