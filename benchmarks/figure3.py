"""Figure 3 of arXiv:2312.10794, six panels: the probability that two of 32 tokens have met, over beta and time.

On a GPU, panel by panel in one run:

    fast     the fused kernel: RK4, one step an interval of 0.15, float32-accurate, starts carried in R^min(d, n)
    plain    the published algorithm in batched torch: float64, Euler steps of 0.1 without tangent projection, then
             renormalised; all betas at once in as large parts as memory allows; the full dimension d
    exact    float64 RK4 of half the fast step in R^min(d, n), from the very starts of the fast run

The fast probability must lie within max(0.25 standard errors, 2 / samples) of the exact one in every cell. On a CPU,
``phase_diagram`` with 64 samples and 9 of the betas: the panel d = 1024 beside the panel d = 32, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from common import Record, free_memory, parser, record, say, seconds, timing, unit_vectors
from torch import Tensor

from helmscope.theory.starts import Uniform

N, DELTA, END, TIMES = 32, 1e-3, 30.0, 200
PAIRS = N * (N - 1) // 2
EULER_STEP = 0.1
PUBLISHED = {"samples": 1_024, "betas_count": 90, "dims": [2, 8, 32, 128, 512, 1_024]}
PANELS_APART = (32, 1_024)  # on a CPU the second must cost what the first costs
ON_CPU = {"samples": 64, "betas_count": 9, "dims": list(PANELS_APART)}


def grid(count: int) -> tuple[Tensor, Tensor]:
    """The betas and the times."""
    return torch.linspace(0.1, 9.0, count, dtype=torch.float64), torch.linspace(0.0, END, TIMES, dtype=torch.float64)


def attention(x: Tensor, beta: Tensor) -> Tensor:
    """sum_j softmax_j(beta <x_i, x_j>) x_j."""
    return torch.softmax(beta * (x @ x.mT), -1) @ x


def fraction_met(x: Tensor) -> Tensor:
    """The share of pairs of each system with <x_i, x_j> >= 1 - delta."""
    return ((x @ x.mT >= 1 - DELTA).sum((-1, -2)) - N).double() / (2 * PAIRS)


def in_parts(x0: Tensor, betas: Tensor, copies: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The systems (beta, sample, n, d) of some betas at a time, as many as leave room for this many copies."""
    one_beta = copies * max(x0.numel(), len(x0) * N * N) * x0.element_size()
    room = torch.cuda.mem_get_info(x0.device)[0] if x0.is_cuda else 2**30
    for part in betas.split(max(1, int(0.8 * room / one_beta))):
        yield x0.expand(len(part), *x0.shape).contiguous(), part.to(x0).reshape(-1, 1, 1, 1)


def plain(x0: Tensor, betas: Tensor, times: Tensor) -> Tensor:
    """The published algorithm: the mean share of met pairs (beta, time), each read after the step nearest to it."""
    wanted = (times / EULER_STEP).round().int().tolist()
    columns = []
    for x, beta in in_parts(x0, betas, copies=5):
        seen = {}
        for step in range(wanted[-1] + 1):
            if step in wanted:
                seen[step] = fraction_met(x).mean(-1)
            x = torch.nn.functional.normalize(x + EULER_STEP * attention(x, beta), dim=-1)
        columns.append(torch.stack([seen[step] for step in wanted], -1))
    return torch.cat(columns)


def exact(x0: Tensor, betas: Tensor, times: Tensor, substeps: int = 2) -> Tensor:
    """Classical RK4 of x' = P_x attention(x), float64: the share of met pairs (beta, sample, time)."""

    def velocity(x: Tensor, beta: Tensor) -> Tensor:
        pull = attention(x, beta)
        return pull - (pull * x).sum(-1, keepdim=True) * x

    rows = []
    for x, beta in in_parts(x0, betas, copies=10):
        seen = [fraction_met(x)]
        for interval in times.diff().tolist():
            h = interval / substeps
            for _ in range(substeps):
                k1 = velocity(x, beta)
                k2 = velocity(x + h / 2 * k1, beta)
                k3 = velocity(x + h / 2 * k2, beta)
                k4 = velocity(x + h * k3, beta)
                x = torch.nn.functional.normalize(x + h / 6 * (k1 + 2 * (k2 + k3) + k4), dim=-1)
            seen.append(fraction_met(x))
        rows.append(torch.stack(seen, -1))
    return torch.cat(rows)


def worst_cell(fast: Tensor, true: Tensor) -> tuple[float, float]:
    """Over all cells, the greatest |P_fast - P_float64|, and that in units of what is allowed."""
    samples = true.shape[1]
    error = (fast.mean(1) - true.mean(1)).abs()
    stderr = true.std(1) / samples**0.5
    allowed = torch.clamp(0.25 * stderr, min=2 / samples)
    return float(error.max()), float((error / allowed).max())


def seconds_of_plain(d: int, samples: int, betas: Tensor, times: Tensor, device: torch.device) -> float:
    """Once: it takes long, and its starts lie in the full dimension."""
    start = unit_vectors(samples, N, d, device=device, dtype=torch.float64, seed=d)
    plain(start, betas[:1], times[:2])  # loads what torch loads once
    free_memory(device)
    return seconds(lambda: plain(start, betas, times), device)


def panel(record: Record, d: int, samples: int, betas: Tensor, times: Tensor) -> dict[str, float]:
    """One panel on a GPU: fast, plain, fast, fast, and then the check."""
    from helmscope.kernels.fused import Clustering, fused_clustering

    device = record.device
    start = Uniform(n=N, dim=d).sample_in_span(samples, seed=d, dtype=torch.float32, device=device)
    on_device = betas.to(start)
    steps = torch.ones(len(betas), dtype=torch.int32, device=device)
    found: list[Clustering] = []

    def fast() -> None:
        found[:] = [fused_clustering(start, times.tolist(), betas=on_device, steps=steps, order=4, delta=DELTA)]

    fast()  # compiles
    free_memory(device)
    lasted = [seconds(fast, device)]
    slow = seconds_of_plain(d, samples, betas, times, device)
    free_memory(device)
    lasted += [seconds(fast, device) for _ in range(2)]
    ours = timing(lasted)
    say(f"d = {d}: fast {ours.median:.3f} s, plain {slow:.1f} s")
    share = found[0].met.double() / found[0].pairs
    true = exact(torch.nn.functional.normalize(start.double(), dim=-1), betas, times)
    error, over_allowed = worst_cell(share, true)
    lost = int((found[0].lost < len(times)).sum())
    record.keep({"d": d, "candidate": "fast"}, ours)
    record.keep({"d": d, "candidate": "plain"}, timing([slow]))
    row = {"d": d, "fast s": ours.median, "low s": ours.low, "high s": ours.high, "plain s": slow}
    row |= {"plain / fast": slow / ours.median, "P - P64": error, "of allowed": over_allowed, "lost": lost}
    record.tables.setdefault(f"Figure 3, {samples:,} samples, {len(betas)} betas", []).append(row)
    return row


def by_library(record: Record, dims: list[int], samples: int, betas: Tensor, times: Tensor) -> None:
    """The same panels by ``phase_diagram``, by the clock: drawing the starts and all that Python does included."""
    from helmscope.fields.attention import SA
    from helmscope.observe.phase import phase_diagram

    def figure() -> None:
        for d in dims:
            chosen = {"betas": betas.tolist(), "times": times.tolist(), "start": Uniform(n=N, dim=d), "delta": DELTA}
            phase_diagram(SA, samples=samples, seed=0, device=str(record.device), **chosen)

    figure()
    lasted = []
    for _ in range(3):
        began = time.perf_counter()
        figure()  # ends on the CPU
        lasted.append(time.perf_counter() - began)
    found = timing(lasted)
    record.keep({"d": "all", "candidate": "phase_diagram"}, found)
    record.tables["The figure by phase_diagram, from seeds to probabilities, by the clock"] = [found.columns]


def on_gpu(record: Record, dims: list[int], samples: int, betas: Tensor, times: Tensor) -> None:
    """All panels, and their sum."""
    rows = []
    for d in dims:
        rows.append(panel(record, d, samples, betas, times))
        record.save()
    fast, slow = (sum(row[name] for row in rows) for name in ("fast s", "plain s"))
    total = {"d": "all", "fast s": fast, "plain s": slow, "plain / fast": slow / fast}
    total |= {name: max(row[name] for row in rows) for name in ("P - P64", "of allowed")}
    total["lost"] = sum(row["lost"] for row in rows)
    next(iter(record.tables.values())).append(total)
    if {"samples": samples, "betas_count": len(betas), "dims": dims} == PUBLISHED:
        record.measures["seconds of the figure"] = fast
        record.measures["plain / fast"] = slow / fast
        record.measures["error of the worst cell, of what is allowed"] = total["of allowed"]
    by_library(record, dims, samples, betas, times)


def on_cpu(record: Record, dims: list[int], samples: int, betas: Tensor, times: Tensor, repeats: int) -> None:
    """Panels by the library, in turns."""
    from helmscope.fields.attention import SA
    from helmscope.observe.phase import phase_diagram

    def run(d: int) -> Callable[[], object]:
        start = Uniform(n=N, dim=d)
        chosen = {"betas": betas.tolist(), "times": times.tolist(), "start": start, "delta": DELTA}
        return lambda: phase_diagram(SA, samples=samples, seed=0, device="cpu", **chosen)

    lasted: dict[int, list[float]] = {d: [] for d in dims}
    for turn in range(repeats):
        for d in dims:
            lasted[d].append(seconds(run(d), record.device))
            say(f"turn {turn + 1}, d = {d}: {lasted[d][-1]:.1f} s")
    found = {d: timing(runs) for d, runs in lasted.items()}
    for d, one in found.items():
        record.keep({"d": d, "candidate": "phase_diagram"}, one)
    record.tables[f"Figure 3 by phase_diagram, {samples:,} samples, {len(betas)} betas"] = [
        {"d": d, **one.columns} for d, one in found.items()
    ]
    if found.keys() >= set(PANELS_APART):
        narrow, wide = (found[d].median for d in PANELS_APART)
        record.measures["panel d=1024 / panel d=32"] = wide / narrow


def main() -> None:
    """The whole figure on a GPU, two panels on a CPU, or what is asked for."""
    options = parser(__doc__)
    options.add_argument("--samples", type=int, default=None)
    options.add_argument("--betas-count", type=int, default=None)
    options.add_argument("--dims", type=int, nargs="+", default=None)
    options.add_argument("--repeats", type=int, default=3, help="turns on a CPU")
    given = options.parse_args()
    for name, value in (PUBLISHED if given.device.startswith("cuda") else ON_CPU).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    found = record("figure3", given)
    betas, times = grid(given.betas_count)
    if found.device.type == "cuda":
        on_gpu(found, given.dims, given.samples, betas, times)
    else:
        on_cpu(found, given.dims, given.samples, betas, times, given.repeats)
    found.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
