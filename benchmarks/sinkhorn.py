"""Streaming Sinkhorn on one CPU core against torch's attention: n = m = 20,000 points on S^63 in float32.

    iteration    two half-steps, each a log-sum-exp over all pairs; ten of them, from 0
    sdpa         one pass of scaled_dot_product_attention of the same size, two for every iteration
    call         with --call, sinkhorn to a marginal error of 1e-5: samples, iterations and final evaluation

Iterations and attention alternate, so that drift of the machine affects both alike. Memory is what a half-step adds to
the largest resident size of the process.
"""

from __future__ import annotations

import resource
import time
from functools import partial
from statistics import median

import torch
from common import new_results, parser, say, timing, unit_vectors

from helmscope.transport.cost import Chordal
from helmscope.transport.sinkhorn_iteration import Entropic, iterate
from helmscope.transport.sinkhorn_plan import sinkhorn
from helmscope.transport.streaming import PairwiseCost

EPSILON, ITERATIONS = 0.1, 10


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Time both, in turns."""
    options = parser(__doc__)
    options.add_argument("--n", type=int, default=20_000)
    options.add_argument("--d", type=int, default=64)
    options.add_argument("--call", action="store_true", help="also time a whole call")
    arguments = options.parse_args()
    arguments.device = "cpu"
    results = new_results("sinkhorn", arguments)
    n, d = arguments.n, arguments.d
    x, y = (unit_vectors(n, d, device=results.device, dtype=torch.float32, seed=k) for k in range(2))
    y = torch.nn.functional.normalize(y + 0.7 * torch.eye(d)[0], dim=-1)
    masses = torch.full((n,), 1 / n)
    problem = Entropic(PairwiseCost.of(x, y, Chordal()), masses, masses)
    f = problem.softmin(torch.zeros(n), EPSILON, None)
    g = problem.transposed.softmin(f, EPSILON, None)
    before = peak_bytes()
    problem.softmin(g, EPSILON, f)
    extra = peak_bytes() - before
    tokens = x[None, None], y[None, None], y[None, None]
    attention = partial(torch.nn.functional.scaled_dot_product_attention, *tokens, scale=2 / EPSILON)
    iterations, passes = [], []
    f, g = None, torch.zeros(n)
    for turn in range(-1, ITERATIONS):  # the turn -1 warms up
        begin = time.perf_counter()
        after = iterate(problem, g, f=f, epsilon=EPSILON, tol=0.0, max_iterations=1)
        middle = time.perf_counter()
        attention(), attention()
        if turn >= 0:
            f, g = after.f, after.g
            iterations.append(middle - begin)
            passes.append((time.perf_counter() - middle) / 2)
    ratio = sum(iterations) / (2 * sum(passes))
    ratios = [ours / (2 * theirs) for ours, theirs in zip(iterations, passes, strict=True)]
    row = {"n": n, "d": d, "iteration s": median(iterations), "sdpa s": median(passes)}
    row |= {"10 iterations / 20 sdpa": ratio, "lowest": min(ratios), "highest": max(ratios), "extra MiB": extra / 2**20}
    results.measures["10 iterations / 20 sdpa, n=20000, d=64"] = ratio
    results.measures["extra memory of a half-step, in units of n x n"] = extra / (n * n * 4)
    for name, runs in (("iteration", iterations), ("sdpa", passes)):
        results.keep({"n": n, "d": d, "candidate": name}, timing(runs))
    if arguments.call:
        begin = time.perf_counter()
        plan = sinkhorn(x, y, epsilon=EPSILON, cost=Chordal(), tol=1e-5)
        row |= {"call s": time.perf_counter() - begin, "iterations of the call": plan.iterations}
        say(repr(plan))
    results.tables["Ten iterations of Sinkhorn against attention, one core, float32"] = [row]
    results.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        main()
