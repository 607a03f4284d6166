"""Attention fields of all kinds, and what to hold them against."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from helmscope.fields.attention import SA, USA
from helmscope.fields.weights import check_weights
from helmscope.geometry.sphere import retract
from support import oracles

F32, F64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan
BOTH = pytest.mark.parametrize("kind", [SA, USA])
FEATURES = ("query_key", "value", "minus", "causal", "bias", "hidden", "weights", "mask")
COMBINATIONS = [
    *([], *([name] for name in FEATURES)),
    *(["query_key", "value"], ["weights", "mask"], ["causal", "weights"], ["causal", "hidden", "mask"]),
    *(["minus", "query_key", "weights", "mask"], ["query_key", "value", "causal", "hidden", "weights", "mask"]),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return retract(normal(*shape, seed=seed))


def circle(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotation(d: int, seed: int = 5) -> torch.Tensor:
    return torch.linalg.qr(normal(d, d, seed=seed)).Q


def parameters(names, n, d, seed=0):
    """Keyword arguments of a field with the named features."""
    given = {}
    if "query_key" in names:
        given["query_key"] = normal(d, d, seed=seed + 1) / math.sqrt(d)
    if "value" in names:
        given["value"] = normal(d, d, seed=seed + 2)
    if "minus" in names:
        given["value"] = -torch.eye(d, dtype=F64)
    if "causal" in names:
        given["causal"] = True
    if {"bias", "hidden"} & set(names):
        given["bias"] = normal(n, n, seed=seed + 3)
    if "hidden" in names:  # among them a row that sees nobody
        given["bias"][normal(n, n, seed=seed + 4) > 0.5] = -INF
        given["bias"][n - 1] = -INF
    return given


def measure(names, *shape, seed=0):
    """Keyword arguments of a call with the named features; token 0 always counts."""
    given = {}
    if "weights" in names:
        given["weights"] = normal(*shape, seed=seed + 6).clamp(min=0)
        given["weights"][..., 0] = 1.5
    if "mask" in names:
        given["mask"] = normal(*shape, seed=seed + 7) > -0.5
        given["mask"][..., 0] = True
    return given


def listed(given):
    return {name: part.tolist() if isinstance(part, torch.Tensor) else part for name, part in given.items()}


def oracle(field, quantity, x, given):
    """``quantity`` of one system by loops; every tensor goes in as lists."""
    options = {name: getattr(field, name) for name in ("query_key", "bias", "causal")}
    if quantity != "kernel":
        options["value"] = field.value
    loop = getattr(oracles, f"{type(field).__name__.lower()}_{quantity}")
    return torch.tensor(loop(x.tolist(), field.beta, **listed(options), **listed(given)), dtype=F64)


def assert_oracle(field, x, given):
    """1e-12 of the greatest value before projection, which is where the digits of the oracle end, or of 1."""
    combined = check_weights(x, given.get("weights"), given.get("mask"))
    ambient = oracle(field, "ambient", x, given)
    bound = 1e-12 * ambient.abs().max().clamp(min=1)
    assert (field.ambient(x, combined) - ambient).abs().max() <= bound
    assert (field(x, **given) - oracle(field, "velocity", x, given)).abs().max() <= bound
    kernel = oracle(field, "kernel", x, given)
    assert (field.kernel(x, combined) - kernel).abs().max() <= 1e-12 * kernel.abs().max().clamp(min=1)


def exact_velocity(kind, beta, x, weights=None):
    """The velocity for V = B = I at the unit vectors nearest to x, n lists of d mpf.

    With 500 digits, as the oracle keeps the own term, up to e^{2 beta} times larger than the rest.
    """
    n, d = len(x), len(x[0])
    with mpmath.workdps(500):
        rows = [[mpmath.mpf(a) for a in row] for row in x.tolist()]
        rows = [[a / mpmath.sqrt(mpmath.fsum(b * b for b in row)) for a in row] for row in rows]
        m = [mpmath.mpf(1)] * n if weights is None else [mpmath.mpf(w) for w in weights.tolist()]
        result = []
        for i in range(n):
            dots = [mpmath.fsum(rows[i][a] * rows[j][a] for a in range(d)) for j in range(n)]
            terms = [m[j] * mpmath.exp(mpmath.mpf(beta) * dots[j]) for j in range(n)]
            norm = mpmath.fsum(terms) if kind is SA else mpmath.fsum(m)
            tangents = [[rows[j][a] - dots[j] * rows[i][a] for a in range(d)] for j in range(n)]
            result.append([mpmath.fsum(terms[j] * tangents[j][a] for j in range(n)) / norm for a in range(d)])
        return result


def relative_errors(velocity, exact, log_scale=None):
    """|v_i - exact_i| / |exact_i| for each token, v_i taken times e^{log_scale_i}."""
    with mpmath.workdps(500):
        errors = []
        for i, row in enumerate(velocity.tolist()):
            scale = 1 if log_scale is None else mpmath.exp(log_scale.expand(len(exact), 1)[i].item())
            gap = mpmath.norm([scale * a - b for a, b in zip(row, exact[i], strict=True)])
            errors.append(float(gap / mpmath.norm(exact[i])))
        return errors
