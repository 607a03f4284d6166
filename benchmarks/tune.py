"""Which cut of the work is fastest on this GPU: the blocks, warps and stages of the streaming kernel for every width of
vectors, and sums or products and warps of the fused kernel for every size.

The streaming kernel takes one mean at beta = 4, beside which stand the errors against float64 of the mean and of its
tangent part, on some rows. The fused kernel takes a panel, 90 betas by RK4 in 199 steps; its candidates must agree
on the clustering probability, whose largest difference from the choice stands beside.

    python benchmarks/tune.py [--widths 16 64] [--sizes 32x2 32x64]

"*" marks what the package chooses: ``_PLANS`` in kernels/flash.py, ``tuning`` in kernels/fused.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from common import CHECKED_ROWS, Record, Row, interleaved, parser, record, relative_error, say, timing, unit_vectors
from torch import Tensor

from helmscope.kernels import fused
from helmscope.kernels.flash import _PLANS, Flash, Plan
from helmscope.kernels.kernel import Request

Way = TypeVar("Way", Plan, fused.Tuning)

BETA = 4.0
BETAS, TIMES, DELTA = torch.linspace(0.1, 9, 90, dtype=torch.float64), torch.linspace(0, 30, 200).tolist(), 1e-3


def tune_flash(found: Record, d: int, n: int) -> list[Row]:
    """Blocks of 64 and 128 queries around the choice for one width."""
    x = unit_vectors(n, d, device=found.device, dtype=torch.float32)
    request = Request(BETA * x, x, x, skip_self=True, beta=BETA)
    rows = torch.linspace(0, n - 1, CHECKED_ROWS, device=found.device).long()
    tokens = x.double()
    shares = torch.softmax(BETA * tokens[rows] @ tokens.T, -1).scatter(1, rows[:, None], 0.0)
    exact = shares @ tokens

    def tangent(v: Tensor) -> Tensor:
        at = tokens[rows]
        return v - (at * v).sum(-1, keepdim=True) / (at * at).sum(-1, keepdim=True) * at

    chosen = _PLANS[d]
    plans = [chosen] + [
        Plan(queries=queries, keys=keys, warps=queries // 16, stages=stages, compensated=chosen.compensated)
        for queries, keys, stages in product((64, 128), (chosen.keys // 2, chosen.keys, 2 * chosen.keys), range(2, 5))
    ]
    calls = {plan: partial(Flash(plan).sum, request) for plan in plans}

    def columns(plan: Plan) -> Row:
        mean = calls[plan]().mean[rows].double()
        return {
            **vars(plan),
            "mean": relative_error(mean, exact),
            "tangent": relative_error(tangent(mean), tangent(exact)),
        }

    return compare(found, chosen, calls, columns, {"n": n, "d": d})


def tune_fused(found: Record, n: int, d: int, samples: int) -> list[Row]:
    """Sums where there are few coordinates, products, and some warps."""
    x0 = unit_vectors(samples, n, d, device=found.device, dtype=torch.float32)
    flows = fused._flows(n, TIMES, BETAS, torch.ones(len(BETAS), dtype=torch.int64), None, True)
    task = fused.Task(flows, 4, normalized=True, causal=False, near=1 - DELTA, stop=True, keep_states=False)
    chosen = fused.tuning(n, d)
    ways = [fused.Tuning(*way) for way in product((False, True) if d <= 8 else (True,), (1, 2, 4, 8))]
    calls = {way: partial(fused.launch, x0, task, way) for way in (chosen, *ways)}

    def probability(way: fused.Tuning) -> Tensor:
        counted = calls[way]()
        return counted.met.double().mean(1) / counted.pairs

    wanted = probability(chosen)

    def columns(way: fused.Tuning) -> Row:
        return {**vars(way), "apart": float((probability(way) - wanted).abs().max())}

    return compare(found, chosen, calls, columns, {"n": n, "d": d, "samples": samples})


def compare(
    found: Record, chosen: Way, calls: dict[Way, Callable[[], object]], columns: Callable[[Way], Row], size: Row
) -> list[Row]:
    """The candidates that this device can run, fastest first."""
    named = {str(way): way for way in calls}
    runs, _ = interleaved({name: calls[way] for name, way in named.items()}, found.device)
    table = []
    for name, lasted in sorted(runs.items(), key=lambda run: timing(run[1]).median):
        found.keep({"way": name, **size}, timing(lasted))
        mark = "*" if named[name] == chosen else ""
        table.append({**size, "": mark, "ms": 1e3 * timing(lasted).median, **columns(named[name])})
    return table


def main() -> None:
    """Two tables."""
    options = parser(__doc__)
    options.add_argument("--widths", type=int, nargs="*", default=list(_PLANS), help="of vectors: " + str(list(_PLANS)))
    options.add_argument("--tokens", type=int, default=65_536, help="of the streaming kernel")
    options.add_argument("--sizes", nargs="*", default=["32x2", "32x8", "32x16", "32x32", "32x64"], help="n x d")
    options.add_argument("--samples", type=int, default=1_024, help="of the fused kernel")
    given = options.parse_args()
    found = record("tune", given)
    for d in given.widths:
        say(f"streaming, d = {d}")
        found.tables.setdefault("Streaming", []).extend(tune_flash(found, d, given.tokens))
        found.save()
    for size in given.sizes:
        say(f"fused, {size}")
        n, d = (int(part) for part in size.split("x"))
        found.tables.setdefault("Fused", []).extend(tune_fused(found, n, d, given.samples))
        found.save()
    found.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
