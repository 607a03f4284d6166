"""Streaming Sinkhorn on a GPU: the kernel against float64, its tilings, and 10^6 points against 10^6 on S^2.

Run ``python benchmarks/sinkhorn_gpu.py``; it needs torch, triton, numpy and scipy only.

The large problem is uniform points against points concentrated around two poles, chordal cost, epsilon = 0.1, marginal
error 1e-3, float32. The time is that of the whole call: checks, samples, iterations and the final evaluation.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from common import Results, free_memory, interleaved, new_results, parser, say, seconds, timing, unit_vectors
from torch import Tensor

from helmscope.transport.cost import Chordal, Euclidean
from helmscope.transport.sinkhorn_plan import sinkhorn
from helmscope.transport.streaming import PairwiseCost
from helmscope.transport.streaming_triton import LaunchConfig, log2_sum_exp2

EPSILON, TOLERANCE = 0.1, 1e-3
TILINGS = [
    LaunchConfig(queries, keys, warps)
    for queries, keys in (
        (32, 64),
        (32, 128),
        (64, 32),
        (64, 64),
        (64, 128),
        (128, 32),
        (128, 64),
        (128, 128),
        (16, 256),
    )
    for warps in (4, 8)
]


def clouds(n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Uniform points on S^2, and points around two poles."""
    x = unit_vectors(n, 3, device=device, dtype=torch.float64, seed=0)
    y = unit_vectors(n, 3, device=device, dtype=torch.float64, seed=1)
    pole = torch.tensor([[0.0, 0.0, 1.5], [1.0, 0.0, 0.0]], dtype=torch.float64, device=device)
    y = torch.nn.functional.normalize(y + pole[torch.arange(n, device=device) % 2], dim=-1)
    return x.to(dtype), y.to(dtype)


def check_kernel(results: Results) -> None:
    """Compare the kernel with float64 sums: plain, with a guess, and with means."""
    generator = torch.Generator(results.device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=results.device)
    rows = []
    for d in (1, 2, 3, 4, 5, 16, 33, 64, 128):
        n, m = 1_000 + d, 3_001
        query, key, bias = 8 * normal(n, d) / math.sqrt(d), normal(m, d), normal(m)
        bias[::7] = -1e30
        squares = key.square().sum(-1)
        products = query.double() @ key.double().mT
        logits = (products + bias.double()) * math.log(2)
        exact, weights = torch.logsumexp(logits, -1) / math.log(2), torch.softmax(logits, -1)
        exact_mean = (weights * (products - squares.double())).sum(-1)
        plain, _ = log2_sum_exp2(query, key, bias, None)
        guessed, _ = log2_sum_exp2(query, key, bias, (exact + 5).float())
        with_mean, mean = log2_sum_exp2(query, key, bias, None, squares)
        errors = {
            "maximum": float((plain - exact).abs().max()),
            "guess": float((guessed - exact).abs().max()),
            "with mean": float((with_mean - exact).abs().max()),
            "mean": float((mean - exact_mean).abs().max()),
        }
        rows.append({"d": d, **errors})
        assert max(errors.values()) < 1e-3, (d, errors)
    results.tables["Kernel, error against float64"] = rows


def check_plan(results: Results) -> None:
    """Compare float32 plans on the GPU with float64 ones on a stored matrix."""
    rows = []
    for d, cost in ((3, Chordal()), (3, Euclidean()), (48, Chordal())):
        x, y = (unit_vectors(n, d, device=results.device, dtype=torch.float32, seed=n) for n in (3_000, 4_000))
        x = torch.nn.functional.normalize(x + 0.5 * torch.eye(d, device=x.device)[0], dim=-1)
        if isinstance(cost, Euclidean):
            x, y = x + 10, y + 10
        plan = sinkhorn(x, y, epsilon=EPSILON, cost=cost, tol=1e-5)
        matrix = (x.double()[:, None] - y.double()).square().sum(-1)
        f, g = torch.zeros(len(x)).to(matrix), torch.zeros(len(y)).to(matrix)
        for _ in range(400):
            f = -EPSILON * torch.logsumexp((g - matrix) / EPSILON - math.log(len(y)), -1)
            g = -EPSILON * torch.logsumexp((f[:, None] - matrix) / EPSILON - math.log(len(x)), 0)
        exact = torch.exp((f[:, None] + g - matrix) / EPSILON) / matrix.numel()
        value, dual = float((exact * matrix).sum()), float(f.mean() + g.mean())
        values = torch.randn(len(y), 5, generator=torch.Generator().manual_seed(0)).to(y)
        coupled = float((plan.couple(values) - exact @ values.double()).abs().sum())
        row = {
            "d": d,
            "cost": repr(cost),
            "outcome": plan.outcome,
            "value error": abs(float(plan.value) - value),
            "dual error": abs(float(plan.dual) - dual),
            "couple error": coupled,
        }
        rows.append(row)
        say(str(row))
        assert plan.ok
        assert max(row["value error"], row["dual error"]) < 1e-4
        assert coupled < 1e-3
    results.tables["Plans of 3,000 x 4,000 points, error against float64"] = rows


def tune(results: Results) -> None:
    """Time one pass for each tiling, with and without a guess."""
    for d, n in ((3, 200_000), (64, 50_000)):
        x = unit_vectors(n, d, device=results.device, dtype=torch.float32)
        query, bias = 2 * math.log2(math.e) / EPSILON * x, torch.zeros_like(x[:, 0])
        guess, _ = log2_sum_exp2(query, x, bias, None)
        rows = []
        for tiling in TILINGS:
            if d > 4 and tiling.queries * tiling.keys > 2**13:
                continue
            calls = {
                "guess": partial(log2_sum_exp2, query, x, bias, guess, tiling=tiling),
                "maximum": partial(log2_sum_exp2, query, x, bias, None, tiling=tiling),
            }
            runs, failed = interleaved(calls, results.device, budget_s=0.5)
            times = {name: timing(run).median * 1e3 for name, run in runs.items()}
            rows.append({"queries": tiling.queries, "keys": tiling.keys, "warps": tiling.warps, **times, **failed})
            say(f"d = {d}: {rows[-1]}")
        if d == 64:
            tokens = x[None, None]
            call = partial(torch.nn.functional.scaled_dot_product_attention, tokens, tokens, tokens, scale=20.0)
            runs, failed = interleaved({"sdpa": call}, results.device)
            rows.append({**{name: timing(run).median * 1e3 for name, run in runs.items()}, **failed})
        results.tables[f"One pass, n = m = {n:,}, d = {d}, milliseconds"] = rows
        results.save()


def million(results: Results, n: int) -> None:
    """Time the whole call on n x n points."""
    x, y = clouds(n, results.device)
    warm = sinkhorn(*clouds(20_000, results.device), epsilon=EPSILON, cost=Chordal(), tol=TOLERANCE)
    say(f"warm-up: {warm!r}")
    free_memory(results.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plans = []
    elapsed = seconds(
        lambda: plans.append(sinkhorn(x, y, epsilon=EPSILON, cost=Chordal(), tol=TOLERANCE)), results.device
    )
    plan, peak = plans[0], (torch.cuda.max_memory_allocated() - before) / 2**20
    say(f"{plan!r} in {elapsed:.2f} s, {peak:.0f} MiB, errors {plan.marginal_errors}, gap {plan.duality_gap:.2g}")
    sample = torch.randperm(n, generator=torch.Generator().manual_seed(2))[:512].to(x.device)
    costs = PairwiseCost.of(x[sample].double(), y.double(), Chordal(), stored=False)
    g = plan.potentials[1].double()
    lse = costs.log_sum_exp(g / EPSILON - math.log(n), epsilon=EPSILON)
    ratio = torch.exp(plan.potentials[0][sample].double() / EPSILON + lse)
    row = {
        "n": n,
        "seconds": elapsed,
        "iterations": plan.iterations,
        "marginal error": max(plan.marginal_errors),
        "in float64, on 512 rows": float((ratio - 1).abs().mean()),
        "gap": plan.duality_gap,
        "value": float(plan.value),
        "MiB": peak,
    }
    results.keep({"n": n, "d": 3}, timing([elapsed]))
    results.tables["S^2, chordal cost, epsilon = 0.1, marginal error 1e-3"] = [row]
    results.measures["seconds, n=m=10^6 on S^2"] = elapsed
    results.measures["marginal error, n=m=10^6 on S^2"] = max(plan.marginal_errors)
    assert plan.ok


def main() -> None:
    """Check, tune and time."""
    options = parser(__doc__)
    options.add_argument("--n", type=int, default=1_000_000, help="points of the large problem")
    options.add_argument("--skip-tuning", action="store_true")
    arguments = options.parse_args()
    results = new_results("sinkhorn_gpu", arguments)
    check_kernel(results)
    check_plan(results)
    results.save()
    million(results, arguments.n)
    results.save()
    if not arguments.skip_tuning:
        tune(results)
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
