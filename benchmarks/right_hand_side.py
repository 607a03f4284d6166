"""One right-hand side, the softmax mean sum_j p_ij x_j of n tokens on S^(d-1), by the dispatcher against others.

    naive    softmax(beta X X^T) X with the matrix stored
    sdpa     torch's scaled_dot_product_attention
    keops    KeOps, where it is installed
    ours     whatever kernel the dispatcher takes
    pinned   on a CPU, the kernel that a target names

float32 on a GPU, float64 on a CPU. What would take too long or too much memory is timed on some of the rows, and its
time multiplied by the share: the table says on how many. Errors are those of 256 random rows against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from common import (
    CHECKED_ROWS,
    Record,
    Timing,
    free_memory,
    interleaved,
    parser,
    record,
    relative_error,
    say,
    seconds,
    timing,
    unit_vectors,
)
from torch import Tensor

from helmscope.kernels.choose import choose, token_sum
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.kernel import Kernel, Request
from helmscope.kernels.streaming import Streaming

CASES = {
    "cpu": [(n, d) for n in (4_096, 16_384, 65_536) for d in (2, 3, 16, 64, 128)] + [(8_192, 16)],
    "cuda": [(n, d) for n in (4_096, 16_384, 65_536, 262_144, 1_048_576) for d in (2, 3, 16, 64, 128)],
}
# pairs of tokens that one timed call may go through
MOST_PAIRS = {"cpu": {"naive": 2**24, "sdpa": 2**26}, "cuda": {"naive": 2**31, "sdpa": 2**35}}
MOST_STORED = 2**32  # where SDPA may store its matrix: on a GPU in a dimension that its kernels cannot load
# on a CPU core the targets name a kernel, and the series at an error of 1e-9 a pair relative to e^beta
PINNED: dict[tuple[int, int], Kernel] = {
    (4_096, 2): Harmonic(tol=1e-9),
    (4_096, 3): Harmonic(tol=1e-9),
    (65_536, 3): Harmonic(tol=1e-9),
    (8_192, 16): Streaming(),
}
LARGE = 10_000_000


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to the mean; ``rows`` of the order of rows, or all of them in their own order where None."""

    call: Callable[[], Tensor]
    rows: int | None = None


def naive(query: Tensor, x: Tensor, beta: float) -> Tensor:
    """As the public simulators write it."""
    return torch.softmax(beta * query @ x.mT, -1) @ x


def sdpa(query: Tensor, x: Tensor, beta: float) -> Tensor:
    """torch's own, which stores no matrix."""
    q, k = query[None, None], x[None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, k, scale=beta)[0, 0]


def keops(query: Tensor, x: Tensor, beta: float) -> Tensor:
    """KeOps' symbolic matrix, reduced by a compiled loop."""
    from pykeops.torch import LazyTensor

    x_i, x_j = LazyTensor((beta * query)[:, None, :]), LazyTensor(x[None, :, :])
    return (x_i | x_j).sumsoftmaxweight(x_j, axis=1)


def candidates(x: Tensor, order: Tensor, beta: float, *, with_keops: bool) -> dict[str, Candidate]:
    """All that can be asked of these tokens."""
    n, d = x.shape
    request = Request(beta * x, x, x, beta=beta)
    most = MOST_PAIRS[x.device.type]
    others = {"naive": naive, "sdpa": sdpa} | ({"keops": keops} if with_keops else {})
    found = {}
    for name, function in others.items():
        pairs = most.get(name, most["sdpa"])
        if name == "sdpa" and d % 4:
            pairs = min(pairs, MOST_STORED)
        rows = min(n, max(CHECKED_ROWS, pairs // n))
        query = x[order[:rows]]
        found[name] = Candidate(lambda f=function, q=query: f(q, x, beta), rows)
    found["ours"] = Candidate(lambda: token_sum(request).mean)
    if x.device.type == "cpu" and (pinned := PINNED.get((n, d))):
        found["pinned"] = Candidate(lambda: pinned.sum(request).mean)
    return found


def one_case(record: Record, n: int, d: int, beta: float, *, with_keops: bool) -> None:
    """All candidates on n tokens in dimension d, in turns."""
    device = record.device
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    x = unit_vectors(n, d, device=device, dtype=dtype, seed=n + d)
    order = torch.randperm(n, generator=torch.Generator(device).manual_seed(0), device=device)
    checked = order[:CHECKED_ROWS]
    exact = naive(x[checked].double(), x.double(), beta)
    all_of_them = candidates(x, order, beta, with_keops=with_keops)
    kernel = type(choose(Request(beta * x, x, x, beta=beta))).__name__
    say(f"n = {n:,}, d = {d}: {kernel}")
    free_memory(device)
    outputs: dict[str, Tensor] = {}
    peaks: dict[str, float | None] = {}

    def run(name: str) -> None:
        if name in outputs:
            all_of_them[name].call()
        else:  # the first turn, which warms up
            outputs[name], peaks[name] = with_peak(all_of_them[name].call, device)

    runs, failed = interleaved({name: partial(run, name) for name in all_of_them}, device)
    row = {"n": n, "d": d, "kernel": kernel}
    found: dict[str, Timing] = {}
    errors: dict[str, float] = {}
    for name, lasted in runs.items():
        part = all_of_them[name]
        output = outputs[name]
        errors[name] = relative_error(output[:CHECKED_ROWS] if part.rows else output[checked], exact)
        found[name] = timing(lasted, scale=n / (part.rows or n))
        record.keep({"n": n, "d": d, "candidate": name}, found[name], rows=part.rows or n, error=errors[name])
        row[f"{name} ms"] = found[name].median * 1e3
    row |= {f"{name} ms": "failed" for name in failed}
    if "ours" in found:
        others = [name for name in ("naive", "sdpa", "keops") if name in found]
        row |= {f"{name} / ours": found[name].median / found["ours"].median for name in others}
        row |= {"spread": _spread(found["ours"]), "error": errors["ours"]}
        row["sdpa error"] = errors.get("sdpa")
        row["MiB"] = peaks["ours"]
        if peaks["ours"] is not None:
            share = peaks["ours"] * 2**20 / (n * n * x.element_size())
            most = "most memory of ours, of that of n x n"
            record.measures[most] = max(share, record.measures.get(most, 0.0))
    row["on rows"] = ", ".join(f"{name} {c.rows:,}" for name, c in all_of_them.items() if c.rows and c.rows < n)
    record.tables.setdefault(f"One right-hand side, beta = {beta:g}", []).append(row)
    if beta == 4:
        measure(record, n, d, found, errors)
    if "pinned" in found:
        record.measures[f"error of pinned, n={n}, d={d}"] = error_of_sums(PINNED[n, d], x, checked, beta)


def measure(record: Record, n: int, d: int, found: dict[str, Timing], errors: dict[str, float]) -> None:
    """The ratios that have targets."""

    def ratio(slow: str, fast: str) -> float:
        return found[slow].median / found[fast].median

    kept = record.measures
    if record.device.type == "cuda" and n == 65_536 and {"ours", "sdpa"} <= found.keys():
        kept[f"sdpa / ours, n=65536, d={d}"] = ratio("sdpa", "ours")
        kept[f"error of ours, n=65536, d={d}"] = errors["ours"]
    if {"naive", "pinned"} <= found.keys():
        kept[f"naive / pinned, n={n}, d={d}"] = ratio("naive", "pinned")


def error_of_sums(kernel: Kernel, x: Tensor, rows: Tensor, beta: float) -> float:
    """The greatest error of sum_j e^{beta <x_i, x_j>} (x_j, 1) on some rows, a pair and relative to e^beta."""
    found = kernel.sum(Request(beta * x, x, x, beta=beta))
    total, mass = found.total * torch.exp(found.shift - beta), found.mass * torch.exp(found.mass_shift - beta)
    exact = torch.exp(beta * (x[rows] @ x.mT - 1)) @ torch.cat([x, torch.ones_like(mass)], -1)
    return float((torch.cat([total, mass], -1)[rows] - exact).abs().max()) / len(x)


def _spread(found: Timing) -> str:
    """How far the runs lie from their median."""
    if found.runs == 1:
        return "one run"
    return f"{(found.low / found.median - 1):+.0%} {(found.high / found.median - 1):+.0%}"


def with_peak(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float | None]:
    """What a call gives, and the MiB of the GPU that it took beyond what was taken before."""
    if device.type != "cuda":
        return call(), None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return call(), (torch.cuda.max_memory_allocated() - before) / 2**20


def ten_million(record: Record, beta: float) -> None:
    """One projected Euler step of ten million tokens on S^2."""
    device = record.device
    x = unit_vectors(LARGE, 3, device=device, dtype=torch.float32)

    def step() -> Tensor:
        mean = token_sum(Request(beta * x, x, x, beta=beta)).mean
        tangent = mean - (mean * x).sum(-1, keepdim=True) * x
        return torch.nn.functional.normalize(x + 0.1 * tangent, dim=-1)

    say(f"n = {LARGE:,} on S^2")
    free_memory(device)
    _, peak = with_peak(step, device)
    found = timing([seconds(step, device) for _ in range(5)])
    checked = torch.randint(LARGE, (CHECKED_ROWS // 4,), generator=torch.Generator().manual_seed(0)).to(device)
    mean = token_sum(Request(beta * x, x, x, beta=beta)).mean
    error = relative_error(
        mean[checked], torch.cat([naive(q, x.double(), beta) for q in x[checked].double().split(16)])
    )
    del mean
    record.keep({"n": LARGE, "d": 3, "candidate": "step"}, found, error=error)
    row = {"n": LARGE, **found.columns, "error": error, "MiB": peak}
    record.tables["Ten million tokens on S^2, one projected Euler step"] = [row]
    record.measures["seconds a step, n=10^7, d=3"] = found.median


def main() -> None:
    """All sizes of the machine at hand, or those asked for."""
    options = parser(__doc__)
    options.add_argument("--beta", type=float, default=4.0)
    options.add_argument("--sizes", type=int, nargs="+", default=None, help="numbers of tokens")
    options.add_argument("--dims", type=int, nargs="+", default=None)
    given = options.parse_args()
    found = record("right_hand_side", given)
    device = found.device
    with_keops = found.machine["pykeops"] is not None
    cases = CASES[device.type]
    if given.sizes or given.dims:
        sizes, dims = (given.sizes or sorted({n for n, _ in cases})), (given.dims or sorted({d for _, d in cases}))
        cases = [(n, d) for n in sizes for d in dims]
    for n, d in sorted(cases):
        one_case(found, n, d, given.beta, with_keops=with_keops)
        found.save()
    if device.type == "cuda" and not given.sizes:
        ten_million(found, given.beta)
    found.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
