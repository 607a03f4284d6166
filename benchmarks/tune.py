"""Tune the GPU kernels: blocks, warps and stages of the streaming kernel for every vector width; sums or products, and
warps, of the fused kernel for every size.

The streaming kernel computes one mean at beta = 4; the table has the errors against float64 of the mean and of its
tangent part, on some rows. The fused kernel computes a panel, 90 betas by RK4 in 199 steps; its candidates must agree
on the close-pair probability, and the table has the largest difference from the current choice.

    python benchmarks/tune.py [--widths 16 64] [--sizes 32x2 32x64]

"*" marks what the package chooses: ``_CONFIGS`` in kernels/flash.py, ``tuning`` in kernels/fused.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from common import (
    CHECKED_ROWS,
    Results,
    Row,
    interleaved,
    new_results,
    parser,
    relative_error,
    say,
    timing,
    unit_vectors,
)
from torch import Tensor

from helmscope.kernels import fused
from helmscope.kernels.flash import _CONFIGS, Flash, LaunchConfig
from helmscope.kernels.request import Request

Way = TypeVar("Way", LaunchConfig, fused.LaunchConfig)

BETA = 4.0
BETAS, TIMES, DELTA = torch.linspace(0.1, 9, 90, dtype=torch.float64), torch.linspace(0, 30, 200).tolist(), 1e-3


def tune_flash(results: Results, d: int, n: int) -> list[Row]:
    """Time blocks of 64 and 128 queries, with variations around the current choice for one width."""
    x = unit_vectors(n, d, device=results.device, dtype=torch.float32)
    request = Request(BETA * x, x, x, skip_self=True, beta=BETA)
    rows = torch.linspace(0, n - 1, CHECKED_ROWS, device=results.device).long()
    tokens = x.double()
    shares = torch.softmax(BETA * tokens[rows] @ tokens.T, -1).scatter(1, rows[:, None], 0.0)
    exact = shares @ tokens

    def tangent(v: Tensor) -> Tensor:
        at = tokens[rows]
        return v - (at * v).sum(-1, keepdim=True) / (at * at).sum(-1, keepdim=True) * at

    chosen = _CONFIGS[d]
    plans = [chosen] + [
        LaunchConfig(queries=queries, keys=keys, warps=queries // 16, stages=stages, compensated=chosen.compensated)
        for queries, keys, stages in product((64, 128), (chosen.keys // 2, chosen.keys, 2 * chosen.keys), range(2, 5))
    ]
    calls = {plan: partial(Flash(plan).sum, request) for plan in plans}

    def columns(plan: LaunchConfig) -> Row:
        mean = calls[plan]().mean[rows].double()
        return {
            **vars(plan),
            "mean": relative_error(mean, exact),
            "tangent": relative_error(tangent(mean), tangent(exact)),
        }

    return compare(results, chosen, calls, columns, {"n": n, "d": d})


def tune_fused(results: Results, n: int, d: int, samples: int) -> list[Row]:
    """Time sums (in low dimensions) and products, with several numbers of warps."""
    x0 = unit_vectors(samples, n, d, device=results.device, dtype=torch.float32)
    flows = fused._flows(n, TIMES, BETAS, torch.ones(len(BETAS), dtype=torch.int64), None, True)
    task = fused.Task(flows, 4, normalized=True, causal=False, near=1 - DELTA, stop=True, keep_states=False)
    chosen = fused.tuning(n, d)
    ways = [fused.LaunchConfig(*way) for way in product((False, True) if d <= 8 else (True,), (1, 2, 4, 8))]
    calls = {way: partial(fused.launch, x0, task, way) for way in (chosen, *ways)}

    def probability(way: fused.LaunchConfig) -> Tensor:
        counted = calls[way]()
        return counted.met.double().mean(1) / counted.pairs

    wanted = probability(chosen)

    def columns(way: fused.LaunchConfig) -> Row:
        return {**vars(way), "apart": float((probability(way) - wanted).abs().max())}

    return compare(results, chosen, calls, columns, {"n": n, "d": d, "samples": samples})


def compare(
    results: Results, chosen: Way, calls: dict[Way, Callable[[], object]], columns: Callable[[Way], Row], size: Row
) -> list[Row]:
    """A table of the candidates that this device can run, fastest first."""
    named = {str(way): way for way in calls}
    runs, _ = interleaved({name: calls[way] for name, way in named.items()}, results.device)
    table = []
    for name, times in sorted(runs.items(), key=lambda run: timing(run[1]).median):
        results.keep({"way": name, **size}, timing(times))
        mark = "*" if named[name] == chosen else ""
        table.append({**size, "": mark, "ms": 1e3 * timing(times).median, **columns(named[name])})
    return table


def main() -> None:
    """Tune both kernels."""
    options = parser(__doc__)
    options.add_argument(
        "--widths", type=int, nargs="*", default=list(_CONFIGS), help="of vectors: " + str(list(_CONFIGS))
    )
    options.add_argument("--tokens", type=int, default=65_536, help="of the streaming kernel")
    options.add_argument("--sizes", nargs="*", default=["32x2", "32x8", "32x16", "32x32", "32x64"], help="n x d")
    options.add_argument("--samples", type=int, default=1_024, help="of the fused kernel")
    arguments = options.parse_args()
    results = new_results("tune", arguments)
    for d in arguments.widths:
        say(f"streaming, d = {d}")
        results.tables.setdefault("Blockwise", []).extend(tune_flash(results, d, arguments.tokens))
        results.save()
    for size in arguments.sizes:
        say(f"fused, {size}")
        n, d = (int(part) for part in size.split("x"))
        results.tables.setdefault("Fused", []).extend(tune_fused(results, n, d, arguments.samples))
        results.save()
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
