"""One right-hand side, the softmax mean sum_j p_ij x_j of n tokens on S^(d-1): the dispatcher against alternatives.

    naive    softmax(beta X X^T) X with the full matrix
    sdpa     torch's scaled_dot_product_attention
    keops    KeOps, if it is installed
    ours     the kernel that the dispatcher chooses
    pinned   on a CPU, the kernel that a target names

float32 on a GPU, float64 on a CPU. A candidate that would take too long or too much memory is timed on a subset of the
rows, and its time is extrapolated; the table says to how many rows. Errors are measured on 256 random rows against
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from common import (
    CHECKED_ROWS,
    Results,
    Timing,
    free_memory,
    interleaved,
    new_results,
    parser,
    relative_error,
    say,
    seconds,
    timing,
    unit_vectors,
)
from torch import Tensor

from helmscope.kernels.blockwise import Blockwise
from helmscope.kernels.choose import choose, token_sum
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.request import Request, Summation

CASES = {
    "cpu": [(n, d) for n in (4_096, 16_384, 65_536) for d in (2, 3, 16, 64, 128)] + [(8_192, 16)],
    "cuda": [(n, d) for n in (4_096, 16_384, 65_536, 262_144, 1_048_576) for d in (2, 3, 16, 64, 128)],
}
# the most pairs of tokens in one timed call
MAX_PAIRS = {"cpu": {"naive": 2**24, "sdpa": 2**26}, "cuda": {"naive": 2**31, "sdpa": 2**35}}
MAX_STORED = 2**32  # the same where SDPA stores the matrix: on a GPU, in dimensions that its kernels do not support
# the targets for a CPU core name a kernel; the series has an error of 1e-9 per pair relative to e^beta
PINNED: dict[tuple[int, int], Summation] = {
    (4_096, 2): Harmonic(tol=1e-9),
    (4_096, 3): Harmonic(tol=1e-9),
    (65_536, 3): Harmonic(tol=1e-9),
    (8_192, 16): Blockwise(),
}
LARGE = 10_000_000


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to compute the mean: of the first ``rows`` of the random order, or if None of all rows in their order."""

    call: Callable[[], Tensor]
    rows: int | None = None


def naive(query: Tensor, x: Tensor, beta: float) -> Tensor:
    """The formula as written in public simulators."""
    return torch.softmax(beta * query @ x.mT, -1) @ x


def sdpa(query: Tensor, x: Tensor, beta: float) -> Tensor:
    """torch's fused attention, which does not store the matrix."""
    q, k = query[None, None], x[None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, k, scale=beta)[0, 0]


def keops(query: Tensor, x: Tensor, beta: float) -> Tensor:
    """KeOps' symbolic matrix, reduced by a compiled loop."""
    from pykeops.torch import LazyTensor

    x_i, x_j = LazyTensor((beta * query)[:, None, :]), LazyTensor(x[None, :, :])
    return (x_i | x_j).sumsoftmaxweight(x_j, axis=1)


def candidates(x: Tensor, order: Tensor, beta: float, *, with_keops: bool) -> dict[str, Candidate]:
    """The candidates for these tokens."""
    n, d = x.shape
    request = Request(beta * x, x, x, beta=beta)
    most = MAX_PAIRS[x.device.type]
    others = {"naive": naive, "sdpa": sdpa} | ({"keops": keops} if with_keops else {})
    by_name = {}
    for name, function in others.items():
        pairs = most.get(name, most["sdpa"])
        if name == "sdpa" and d % 4:
            pairs = min(pairs, MAX_STORED)
        rows = min(n, max(CHECKED_ROWS, pairs // n))
        query = x[order[:rows]]
        by_name[name] = Candidate(lambda f=function, q=query: f(q, x, beta), rows)
    by_name["ours"] = Candidate(lambda: token_sum(request).mean)
    if x.device.type == "cpu" and (pinned := PINNED.get((n, d))):
        by_name["pinned"] = Candidate(lambda: pinned.sum(request).mean)
    return by_name


def one_case(results: Results, n: int, d: int, beta: float, *, with_keops: bool) -> None:
    """Time all candidates on n tokens in dimension d, in turns."""
    device = results.device
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    x = unit_vectors(n, d, device=device, dtype=dtype, seed=n + d)
    order = torch.randperm(n, generator=torch.Generator(device).manual_seed(0), device=device)
    checked = order[:CHECKED_ROWS]
    exact = naive(x[checked].double(), x.double(), beta)
    compared = candidates(x, order, beta, with_keops=with_keops)
    kernel = type(choose(Request(beta * x, x, x, beta=beta))).__name__
    say(f"n = {n:,}, d = {d}: {kernel}")
    free_memory(device)
    outputs: dict[str, Tensor] = {}
    peaks: dict[str, float | None] = {}

    def run(name: str) -> None:
        if name in outputs:
            compared[name].call()
        else:  # the first turn, which warms up
            outputs[name], peaks[name] = with_peak(compared[name].call, device)

    runs, failed = interleaved({name: partial(run, name) for name in compared}, device)
    row = {"n": n, "d": d, "kernel": kernel}
    timings: dict[str, Timing] = {}
    errors: dict[str, float] = {}
    for name, times in runs.items():
        part = compared[name]
        output = outputs[name]
        errors[name] = relative_error(output[:CHECKED_ROWS] if part.rows else output[checked], exact)
        timings[name] = timing(times, scale=n / (part.rows or n))
        results.keep({"n": n, "d": d, "candidate": name}, timings[name], rows=part.rows or n, error=errors[name])
        row[f"{name} ms"] = timings[name].median * 1e3
    row |= {f"{name} ms": "failed" for name in failed}
    if "ours" in timings:
        others = [name for name in ("naive", "sdpa", "keops") if name in timings]
        row |= {f"{name} / ours": timings[name].median / timings["ours"].median for name in others}
        row |= {"spread": _spread(timings["ours"]), "error": errors["ours"]}
        row["sdpa error"] = errors.get("sdpa")
        row["MiB"] = peaks["ours"]
        if peaks["ours"] is not None:
            share = peaks["ours"] * 2**20 / (n * n * x.element_size())
            most = "most memory of ours, of that of n x n"
            results.measures[most] = max(share, results.measures.get(most, 0.0))
    row["on rows"] = ", ".join(f"{name} {c.rows:,}" for name, c in compared.items() if c.rows and c.rows < n)
    results.tables.setdefault(f"One right-hand side, beta = {beta:g}", []).append(row)
    if beta == 4:
        measure(results, n, d, timings, errors)
    if "pinned" in timings:
        results.measures[f"error of pinned, n={n}, d={d}"] = error_of_sums(PINNED[n, d], x, checked, beta)


def measure(results: Results, n: int, d: int, timings: dict[str, Timing], errors: dict[str, float]) -> None:
    """Store the ratios that have targets."""

    def ratio(slow: str, fast: str) -> float:
        return timings[slow].median / timings[fast].median

    kept = results.measures
    if results.device.type == "cuda" and n == 65_536 and {"ours", "sdpa"} <= timings.keys():
        kept[f"sdpa / ours, n=65536, d={d}"] = ratio("sdpa", "ours")
        kept[f"error of ours, n=65536, d={d}"] = errors["ours"]
    if {"naive", "pinned"} <= timings.keys():
        kept[f"naive / pinned, n={n}, d={d}"] = ratio("naive", "pinned")


def error_of_sums(kernel: Summation, x: Tensor, rows: Tensor, beta: float) -> float:
    """The largest error of sum_j e^{beta <x_i, x_j>} (x_j, 1) over some rows, per pair and relative to e^beta."""
    sums = kernel.sum(Request(beta * x, x, x, beta=beta))
    total, mass = sums.total * torch.exp(sums.shift - beta), sums.mass * torch.exp(sums.mass_shift - beta)
    exact = torch.exp(beta * (x[rows] @ x.mT - 1)) @ torch.cat([x, torch.ones_like(mass)], -1)
    return float((torch.cat([total, mass], -1)[rows] - exact).abs().max()) / len(x)


def _spread(measured: Timing) -> str:
    """The range of the runs relative to their median."""
    if measured.runs == 1:
        return "one run"
    return f"{(measured.low / measured.median - 1):+.0%} {(measured.high / measured.median - 1):+.0%}"


def with_peak(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float | None]:
    """The result of a call, and its peak GPU memory in MiB beyond what was allocated before."""
    if device.type != "cuda":
        return call(), None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return call(), (torch.cuda.max_memory_allocated() - before) / 2**20


def ten_million(results: Results, beta: float) -> None:
    """Time one projected Euler step of ten million tokens on S^2."""
    device = results.device
    x = unit_vectors(LARGE, 3, device=device, dtype=torch.float32)

    def step() -> Tensor:
        mean = token_sum(Request(beta * x, x, x, beta=beta)).mean
        tangent = mean - (mean * x).sum(-1, keepdim=True) * x
        return torch.nn.functional.normalize(x + 0.1 * tangent, dim=-1)

    say(f"n = {LARGE:,} on S^2")
    free_memory(device)
    _, peak = with_peak(step, device)
    measured = timing([seconds(step, device) for _ in range(5)])
    checked = torch.randint(LARGE, (CHECKED_ROWS // 4,), generator=torch.Generator().manual_seed(0)).to(device)
    mean = token_sum(Request(beta * x, x, x, beta=beta)).mean
    error = relative_error(
        mean[checked], torch.cat([naive(q, x.double(), beta) for q in x[checked].double().split(16)])
    )
    del mean
    results.keep({"n": LARGE, "d": 3, "candidate": "step"}, measured, error=error)
    row = {"n": LARGE, **measured.columns, "error": error, "MiB": peak}
    results.tables["Ten million tokens on S^2, one projected Euler step"] = [row]
    results.measures["seconds per step, n=10^7, d=3"] = measured.median


def main() -> None:
    """Time all sizes for this device, or those given."""
    options = parser(__doc__)
    options.add_argument("--beta", type=float, default=4.0)
    options.add_argument("--sizes", type=int, nargs="+", default=None, help="numbers of tokens")
    options.add_argument("--dims", type=int, nargs="+", default=None)
    arguments = options.parse_args()
    results = new_results("right_hand_side", arguments)
    device = results.device
    with_keops = results.machine["pykeops"] is not None
    cases = CASES[device.type]
    if arguments.sizes or arguments.dims:
        sizes = arguments.sizes or sorted({n for n, _ in cases})
        dims = arguments.dims or sorted({d for _, d in cases})
        cases = [(n, d) for n in sizes for d in dims]
    for n, d in sorted(cases):
        one_case(results, n, d, arguments.beta, with_keops=with_keops)
        results.save()
    if device.type == "cuda" and not arguments.sizes:
        ten_million(results, arguments.beta)
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
