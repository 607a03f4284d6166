"""Figure 3 of arXiv:2312.10794, six panels: the probability that two of 32 tokens have met, over beta and time.

On a GPU, panel by panel in one run:

    fast     the fused kernel: RK4, one step per interval of 0.15, float32 accuracy, tokens represented in R^min(d, n)
    plain    the published algorithm in batched torch: float64, Euler steps of 0.1 without tangent projection, then
             renormalized; as many betas at a time as memory allows; the full dimension d
    exact    float64 RK4 with half the step of fast in R^min(d, n), from the same starts

The fast probability must be within max(0.25 standard errors, 2 / samples) of the exact one in every cell. On a CPU,
``phase_diagram`` with 64 samples and 9 of the betas: the panels d = 1024 and d = 32, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from common import Results, free_memory, new_results, parser, say, seconds, timing, unit_vectors
from torch import Tensor

from helmscope.theory.starts import Uniform

N, DELTA, END, TIMES = 32, 1e-3, 30.0, 200
PAIRS = N * (N - 1) // 2
EULER_STEP = 0.1
PUBLISHED = {"samples": 1_024, "betas_count": 90, "dims": [2, 8, 32, 128, 512, 1_024]}
COMPARED_PANELS = (32, 1_024)  # on a CPU both must take about the same time
ON_CPU = {"samples": 64, "betas_count": 9, "dims": list(COMPARED_PANELS)}


def grid(count: int) -> tuple[Tensor, Tensor]:
    """The grid of betas and times."""
    return torch.linspace(0.1, 9.0, count, dtype=torch.float64), torch.linspace(0.0, END, TIMES, dtype=torch.float64)


def attention(x: Tensor, beta: Tensor) -> Tensor:
    """sum_j softmax_j(beta <x_i, x_j>) x_j."""
    return torch.softmax(beta * (x @ x.mT), -1) @ x


def fraction_met(x: Tensor) -> Tensor:
    """The fraction of pairs of each system with <x_i, x_j> >= 1 - delta."""
    return ((x @ x.mT >= 1 - DELTA).sum((-1, -2)) - N).double() / (2 * PAIRS)


def chunks(x0: Tensor, betas: Tensor, copies: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The systems (beta, sample, n, d) for as many betas at a time as leave memory for this many copies."""
    bytes_per_beta = copies * max(x0.numel(), len(x0) * N * N) * x0.element_size()
    free_bytes = torch.cuda.mem_get_info(x0.device)[0] if x0.is_cuda else 2**30
    for chunk in betas.split(max(1, int(0.8 * free_bytes / bytes_per_beta))):
        yield x0.expand(len(chunk), *x0.shape).contiguous(), chunk.to(x0).reshape(-1, 1, 1, 1)


def plain(x0: Tensor, betas: Tensor, times: Tensor) -> Tensor:
    """The published algorithm: the mean fraction of met pairs (beta, time), each at the step nearest to its time."""
    stored_steps = (times / EULER_STEP).round().int().tolist()
    rows = []
    for x, beta in chunks(x0, betas, copies=5):
        fractions = {}
        for step in range(stored_steps[-1] + 1):
            if step in stored_steps:
                fractions[step] = fraction_met(x).mean(-1)
            x = torch.nn.functional.normalize(x + EULER_STEP * attention(x, beta), dim=-1)
        rows.append(torch.stack([fractions[step] for step in stored_steps], -1))
    return torch.cat(rows)


def exact(x0: Tensor, betas: Tensor, times: Tensor, substeps: int = 2) -> Tensor:
    """Classical RK4 for x' = P_x attention(x) in float64: the fraction of met pairs (beta, sample, time)."""

    def velocity(x: Tensor, beta: Tensor) -> Tensor:
        mean = attention(x, beta)
        return mean - (mean * x).sum(-1, keepdim=True) * x

    rows = []
    for x, beta in chunks(x0, betas, copies=10):
        fractions = [fraction_met(x)]
        for interval in times.diff().tolist():
            h = interval / substeps
            for _ in range(substeps):
                k1 = velocity(x, beta)
                k2 = velocity(x + h / 2 * k1, beta)
                k3 = velocity(x + h / 2 * k2, beta)
                k4 = velocity(x + h * k3, beta)
                x = torch.nn.functional.normalize(x + h / 6 * (k1 + 2 * (k2 + k3) + k4), dim=-1)
            fractions.append(fraction_met(x))
        rows.append(torch.stack(fractions, -1))
    return torch.cat(rows)


def worst_cell(fast: Tensor, true: Tensor) -> tuple[float, float]:
    """The largest |P_fast - P_float64| over all cells, absolute and relative to the allowed error."""
    samples = true.shape[1]
    error = (fast.mean(1) - true.mean(1)).abs()
    stderr = true.std(1) / samples**0.5
    allowed = torch.clamp(0.25 * stderr, min=2 / samples)
    return float(error.max()), float((error / allowed).max())


def seconds_of_plain(d: int, samples: int, betas: Tensor, times: Tensor, device: torch.device) -> float:
    """The time of one run, because it takes long; its starts have the full dimension."""
    start = unit_vectors(samples, N, d, device=device, dtype=torch.float64, seed=d)
    plain(start, betas[:1], times[:2])  # warm-up
    free_memory(device)
    return seconds(lambda: plain(start, betas, times), device)


def panel(results: Results, d: int, samples: int, betas: Tensor, times: Tensor) -> dict[str, float]:
    """Time one panel on a GPU, in the order fast, plain, fast, fast, and then check its accuracy."""
    from helmscope.kernels.fused import Clustering, fused_clustering

    device = results.device
    start = Uniform(n=N, dim=d).sample_in_span(samples, seed=d, dtype=torch.float32, device=device)
    on_device = betas.to(start)
    steps = torch.ones(len(betas), dtype=torch.int32, device=device)
    clusterings: list[Clustering] = []

    def fast() -> None:
        clusterings[:] = [fused_clustering(start, times.tolist(), betas=on_device, steps=steps, order=4, delta=DELTA)]

    fast()  # compiles
    free_memory(device)
    fast_seconds = [seconds(fast, device)]
    slow = seconds_of_plain(d, samples, betas, times, device)
    free_memory(device)
    fast_seconds += [seconds(fast, device) for _ in range(2)]
    ours = timing(fast_seconds)
    say(f"d = {d}: fast {ours.median:.3f} s, plain {slow:.1f} s")
    share = clusterings[0].met.double() / clusterings[0].pairs
    true = exact(torch.nn.functional.normalize(start.double(), dim=-1), betas, times)
    error, over_allowed = worst_cell(share, true)
    lost = int((clusterings[0].lost < len(times)).sum())
    results.keep({"d": d, "candidate": "fast"}, ours)
    results.keep({"d": d, "candidate": "plain"}, timing([slow]))
    row = {"d": d, "fast s": ours.median, "low s": ours.low, "high s": ours.high, "plain s": slow}
    row |= {"plain / fast": slow / ours.median, "P - P64": error, "of allowed": over_allowed, "lost": lost}
    results.tables.setdefault(f"Figure 3, {samples:,} samples, {len(betas)} betas", []).append(row)
    return row


def by_library(results: Results, dims: list[int], samples: int, betas: Tensor, times: Tensor) -> None:
    """The wall-clock time of the same panels by ``phase_diagram``, including sampling and Python."""
    from helmscope.fields.attention import SA
    from helmscope.observe.phase import phase_diagram

    def figure() -> None:
        for d in dims:
            chosen = {"betas": betas.tolist(), "times": times.tolist(), "start": Uniform(n=N, dim=d), "delta": DELTA}
            phase_diagram(SA, samples=samples, seed=0, device=str(results.device), **chosen)

    figure()
    wall_seconds = []
    for _ in range(3):
        started = time.perf_counter()
        figure()  # returns CPU data, so the GPU has finished
        wall_seconds.append(time.perf_counter() - started)
    clock_time = timing(wall_seconds)
    results.keep({"d": "all", "candidate": "phase_diagram"}, clock_time)
    results.tables["The figure by phase_diagram, from seeds to probabilities, wall-clock time"] = [clock_time.columns]


def on_gpu(results: Results, dims: list[int], samples: int, betas: Tensor, times: Tensor) -> None:
    """Time all panels, and their sum."""
    rows = []
    for d in dims:
        rows.append(panel(results, d, samples, betas, times))
        results.save()
    fast, slow = (sum(row[name] for row in rows) for name in ("fast s", "plain s"))
    total = {"d": "all", "fast s": fast, "plain s": slow, "plain / fast": slow / fast}
    total |= {name: max(row[name] for row in rows) for name in ("P - P64", "of allowed")}
    total["lost"] = sum(row["lost"] for row in rows)
    next(iter(results.tables.values())).append(total)
    if {"samples": samples, "betas_count": len(betas), "dims": dims} == PUBLISHED:
        results.measures["seconds of the figure"] = fast
        results.measures["plain / fast"] = slow / fast
        results.measures["error of the worst cell, of what is allowed"] = total["of allowed"]
    by_library(results, dims, samples, betas, times)


def on_cpu(results: Results, dims: list[int], samples: int, betas: Tensor, times: Tensor, repeats: int) -> None:
    """Time the panels by ``phase_diagram``, in turns."""
    from helmscope.fields.attention import SA
    from helmscope.observe.phase import phase_diagram

    def run(d: int) -> Callable[[], object]:
        start = Uniform(n=N, dim=d)
        chosen = {"betas": betas.tolist(), "times": times.tolist(), "start": start, "delta": DELTA}
        return lambda: phase_diagram(SA, samples=samples, seed=0, device="cpu", **chosen)

    runs: dict[int, list[float]] = {d: [] for d in dims}
    for turn in range(repeats):
        for d in dims:
            runs[d].append(seconds(run(d), results.device))
            say(f"turn {turn + 1}, d = {d}: {runs[d][-1]:.1f} s")
    timings = {d: timing(times_of_d) for d, times_of_d in runs.items()}
    for d, measured in timings.items():
        results.keep({"d": d, "candidate": "phase_diagram"}, measured)
    results.tables[f"Figure 3 by phase_diagram, {samples:,} samples, {len(betas)} betas"] = [
        {"d": d, **measured.columns} for d, measured in timings.items()
    ]
    if timings.keys() >= set(COMPARED_PANELS):
        narrow, wide = (timings[d].median for d in COMPARED_PANELS)
        results.measures["panel d=1024 / panel d=32"] = wide / narrow


def main() -> None:
    """By default, the whole figure on a GPU, or two panels on a CPU."""
    options = parser(__doc__)
    options.add_argument("--samples", type=int, default=None)
    options.add_argument("--betas-count", type=int, default=None)
    options.add_argument("--dims", type=int, nargs="+", default=None)
    options.add_argument("--repeats", type=int, default=3, help="turns on a CPU")
    arguments = options.parse_args()
    for name, value in (PUBLISHED if arguments.device.startswith("cuda") else ON_CPU).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    results = new_results("figure3", arguments)
    betas, times = grid(arguments.betas_count)
    if results.device.type == "cuda":
        on_gpu(results, arguments.dims, arguments.samples, betas, times)
    else:
        on_cpu(results, arguments.dims, arguments.samples, betas, times, arguments.repeats)
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
