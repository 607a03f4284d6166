"""W2 on the circle compared with POT's ``wasserstein_circle``, at n = m = 10^6 points in float64 on one core.

    equal weights     n = m, no weights
    random weights    a weight for every point of both clouds

Ours begins with unit vectors and computes their angles; POT is given angles already. POT returns the square on a circle
of circumference 1, so 2 pi times its root is compared; its bisection ends at 1e-7 of a turn. On a CPU.
"""

from __future__ import annotations

import math
from functools import partial

import ot
import torch
from common import Results, free_memory, interleaved, new_results, parser, say, timing
from torch import Tensor

import helmscope as hs


def clouds(n: int) -> tuple[Tensor, Tensor]:
    """Angles in turns: uniform, and von Mises with concentration 1."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(n, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    peaked = torch.distributions.VonMises(torch.tensor(0.5).double(), torch.tensor(1.0).double()).sample((n,))
    return uniform, (peaked / (2 * math.pi)) % 1


def unit_vectors(turns: Tensor) -> Tensor:
    """Points of the circle."""
    return torch.stack([torch.cos(2 * math.pi * turns), torch.sin(2 * math.pi * turns)], -1)


def compare(results: Results, name: str, turns: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor] | None) -> None:
    """Time both and compare their values."""
    n = len(turns[0])
    say(f"{name}, n = {n:,}")
    free_memory(results.device)
    points = [unit_vectors(part) for part in turns]
    ours = partial(hs.w2, *points, *(weights or ()))
    masses = [part.numpy() for part in weights] if weights else [None, None]
    theirs = partial(ot.wasserstein_circle, *(part.numpy() for part in turns), *masses, p=2)
    runs, failed = interleaved({"ours": ours, "POT": theirs}, results.device, budget_s=10.0)
    if failed:
        raise SystemExit(f"{name} failed: {failed}")
    timings = {who: timing(times) for who, times in runs.items()}
    for who, measured in timings.items():
        results.keep({"case": name, "n": n, "candidate": who}, measured)
    value, other = float(ours()), 2 * math.pi * math.sqrt(float(theirs()[0]))
    ratio = timings["POT"].median / timings["ours"].median
    row = {
        "case": name,
        "n": n,
        "ours, s": timings["ours"].median,
        "POT, s": timings["POT"].median,
        "ratio": ratio,
        "W2": value,
        "relative difference": abs(value - other) / value,
    }
    results.tables.setdefault("W2 on the circle", []).append(row)
    results.measures[f"POT / ours, {name}"] = ratio
    results.measures[f"relative difference, {name}"] = row["relative difference"]


def main() -> None:
    """Time both cases."""
    options = parser(__doc__)
    options.add_argument("--n", type=int, default=1_000_000)
    arguments = options.parse_args()
    arguments.device = "cpu"
    torch.set_num_threads(1)
    results = new_results("circle_transport", arguments)
    turns = clouds(arguments.n)
    generator = torch.Generator().manual_seed(2)
    raw = [torch.rand(arguments.n, generator=generator, dtype=torch.float64) for _ in range(2)]
    weights = (raw[0] / raw[0].sum(), raw[1] / raw[1].sum())
    compare(results, "equal weights", turns, None)
    results.save()
    compare(results, "random weights", turns, weights)
    results.finish()


if __name__ == "__main__":
    with torch.no_grad():
        main()
