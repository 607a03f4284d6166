"""stability: flows of self-attention that start from close measures stay close for a given time."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import project, retract
from helmscope.solve.integrate import integrate
from helmscope.theory.stability import w2_growth_bound
from helmscope.transport.cost import Euclidean, Geodesic
from helmscope.transport.distance import w2

if TYPE_CHECKING:
    from torch import Tensor


@experiment("stability", seconds=5)
def stability(case: TrialCase) -> Finding:
    """W2(mu_t, nu_t) <= e^(L t) W2(mu_0, nu_0) for pairs of clouds that differ by a small tangential perturbation,
    under V = I and V = -I, on S^1, where W2 is exact in O(n log n), and on S^2, where it is an exact assignment.

    The controls are linear flows of R^d, x -> e^(rate t) x, for which W2 grows by exactly e^(rate t), and a flow of
    attention that starts near the worst case: with beta = 0, V = diag(-1, 1, ..., 1) and all tokens at e_1, a common
    displacement grows at the rate -<x, V m> + 1 = 2, which is L. It must stay within the bound, and exceed one with L
    halved.
    """
    betas, dims, times = case.constant("betas"), case.constant("dims"), case.constant("times")
    cells = list(product(betas, dims, (1.0, -1.0)))
    pairs = -(-case.count(4 * case.constant("inputs"), quick=case.constant("inputs")) // len(cells))
    t = torch.tensor(times, dtype=torch.float64)
    growths, excesses = [], []
    linear: dict[str, list[Tensor]] = {"1.1 L": [], "L": []}
    for k, (beta, dim, sign) in enumerate(cells):
        rate = w2_growth_bound(beta=beta)
        x, y = _close_clouds(case, 2 * k, pairs, dim)
        field = SA(beta=beta, value=sign * torch.eye(dim, dtype=x.dtype))
        growths.append(_log_growth(field, x, y, times))
        excesses.append(_excess(growths[-1], rate * t))
        for name, factor in (("1.1 L", case.constant("faster")), ("L", 1.0)):
            linear[name].append(_excess(_linear_log_growth(x, y, factor * rate, times), rate * t))
    sharpness = [
        (g / (w2_growth_bound(beta=beta) * t)).amax(-1) for g, (beta, _, _) in zip(growths, cells, strict=True)
    ]
    largest = torch.stack(sharpness).reshape(len(betas), -1).amax(-1).tolist()
    rate = w2_growth_bound(beta=0.0)
    each = pairs * len(cells) // len(dims)
    worst = torch.cat([_worst_case_log_growth(case, 2 * (len(cells) + k), each, dim) for k, dim in enumerate(dims)])
    by_beta = torch.stack(growths).reshape(len(betas), -1, len(times)).movedim(1, 0)
    return Finding(
        evidence={
            "excess over the bound": IdentityErrors(torch.cat(excesses), "excess"),
            "sharpness": Replicates(torch.cat(sharpness), "pairs of starts"),
        },
        controls={
            f"planted expansion at rate {name}": IdentityErrors(torch.cat(excess), "excess")
            for name, excess in linear.items()
        }
        | {
            "attention near the worst case": IdentityErrors(_excess(worst, rate * t), "excess"),
            "attention near the worst case, L halved": IdentityErrors(_excess(worst, rate / 2 * t), "excess"),
        },
        data=curve(
            "log_growth", by_beta, {"beta": betas, "time": times}, label="log of W2(t) / W2(0)"
        ),
        remark=f"W2 grew by at most a factor of {float(torch.cat(growths).max().exp()):.3g}; L = "
        + ", ".join(f"{w2_growth_bound(beta=beta):.3g} at beta = {beta:g}" for beta in betas)
        + ". The largest sharpness was "
        + ", ".join(f"{value:.3g} at beta = {beta:g}" for value, beta in zip(largest, betas, strict=True))
        + f"; near the worst case at beta = 0 it was {float((worst / (rate * t)).max()):.4g}.",
        setting=f"simulation: SA with V = I and -I, {case.constant('tokens')} tokens on S^1 and S^2, beta = "
        f"{betas[0]:g} to {betas[-1]:g}",
    )  # fmt: skip


def _close_clouds(case: TrialCase, index: int, pairs: int, dim: int) -> tuple[Tensor, Tensor]:
    """Uniform clouds, and the same moved by a tangential perturbation: (pair, token, dim) each."""
    x = retract(case.normal(pairs, case.constant("tokens"), dim, index=index))
    noise = case.normal(pairs, case.constant("tokens"), dim, index=index + 1)
    return x, retract(x + case.constant("perturbation") * project(x, noise))


def _log_growth(field: SA, x: Tensor, y: Tensor, times: list[float]) -> Tensor:
    """log of W2(t) / W2(0): (pair, time)."""
    after_x, after_y = (integrate(field, start, times).states for start in (x, y))
    return (w2(after_x, after_y, cost=Geodesic()) / w2(x, y, cost=Geodesic())).log().mT


def _worst_case_log_growth(case: TrialCase, index: int, pairs: int, dim: int) -> Tensor:
    """log of W2(t) / W2(0) for SA with beta = 0 and V = diag(-1, 1, ..., 1), from tokens close to e_1, and the same
    displaced in a common direction: (pair, time).
    """
    times, small = case.constant("times"), case.constant("perturbation")
    value = torch.eye(dim, dtype=torch.float64)
    value[0, 0] = -1
    pole = torch.eye(dim, dtype=torch.float64)[0]
    spread, common = (project(pole, case.normal(pairs, n, dim, index=index + k))
                      for k, n in enumerate((case.constant("tokens"), 1)))  # fmt: skip
    x = retract(pole + small * spread)
    return _log_growth(SA(beta=0.0, value=value), x, retract(pole + small * (spread + retract(common))), times)


def _linear_log_growth(x: Tensor, y: Tensor, rate: float, times: list[float]) -> Tensor:
    """The same under x' = rate x in R^d. The time is shortened where e^(rate t) would overflow."""
    growth = torch.tensor([min(rate * t, 200.0) for t in times], dtype=x.dtype)
    factor = growth.exp()[:, None, None, None]
    distance = w2(factor * x, factor * y, cost=Euclidean())
    return (distance / w2(x, y, cost=Euclidean())).log().mT


def _excess(log_growth: Tensor, log_bound: Tensor) -> Tensor:
    """The largest relative excess of W2 over the bound over time, 0 where there is none: (pair,)."""
    return torch.expm1(log_growth - log_bound).clamp(min=0).amax(-1)
