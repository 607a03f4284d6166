"""Sums over all pairs, streamed and stored, against naive loops and float64; the GPU kernel under Triton's
interpreter."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helmscope.transport.cost import Chordal, Euclidean, Geodesic
from helmscope.transport.streaming import BLOCK, HIDDEN, PairwiseCost, log_weights

COSTS = [(Euclidean(), 2.0), (Chordal(), 2.0), (Geodesic(), 2.0), (Euclidean(), 1.0), (Geodesic(), 3.0)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1)


def naive(costs: PairwiseCost, h: torch.Tensor, epsilon: float) -> list[list[float]]:
    """h_j - c_ij / epsilon by loops over pairs."""
    rows = []
    for x in costs.x:
        distances = [float(costs.cost.distance(x, y)) for y in costs.y]
        rows.append([float(b) - r**costs.p / epsilon for b, r in zip(h, distances, strict=True)])
    return rows


@pytest.mark.parametrize(("cost", "p"), COSTS)
@pytest.mark.parametrize("stored", [True, False])
def test_sums_are_those_of_loops(cost, p, stored):
    x, y, h, values = unit(7, 3), unit(9, 3, seed=1), normal(9, seed=2), normal(9, 2, seed=3)
    h[4] = HIDDEN
    costs = PairwiseCost.of(x, y, cost, p, stored=stored)
    logits = torch.tensor(naive(costs, h, 0.3), dtype=torch.float64)
    lse, mean = costs.mean_cost(h, epsilon=0.3)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    torch.testing.assert_close(costs.log_sum_exp(h, epsilon=0.3), logits.logsumexp(-1))
    kept = torch.arange(9) != 4
    matrix = -0.3 * (logits - h)[:, kept]
    torch.testing.assert_close(mean, (logits.softmax(-1)[:, kept] * matrix).sum(-1))
    shift = normal(7, seed=4)
    torch.testing.assert_close(costs.couple(h, shift, values, epsilon=0.3), torch.exp(logits + shift[:, None]) @ values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("offset", [None, 0.0, 7.0, -1e4, 1e4, math.nan])
def test_any_guess_gives_the_same_sum(dtype, offset):
    """Guesses that overflow or underflow are noticed; several blocks of rows and columns."""
    x, y, h = normal(300, 3), normal(1100, 3, seed=1), normal(1100, seed=2)
    exact = PairwiseCost.of(x, y, Euclidean(), stored=True).log_sum_exp(h, epsilon=0.2)
    costs = PairwiseCost.of(x.to(dtype), y.to(dtype), Euclidean(), stored=False)
    guess = None if offset is None else (exact + offset).to(dtype)
    result = costs.log_sum_exp(h.to(dtype), epsilon=0.2, guess=guess)
    assert float((result - exact).abs().max()) <= (1e-11 if dtype == torch.float64 else 1e-4)


def test_clouds_far_from_the_origin_keep_their_digits():
    """Products of vectors of length 1000 in float32 would have an error of 0.1 in |x - y|^2."""
    x, y = normal(40, 2).float() + 1000, normal(50, 2, seed=1).float() + 1000
    result = PairwiseCost.of(x, y, Euclidean(), stored=False).log_sum_exp(torch.zeros(50), epsilon=0.5)
    exact = torch.logsumexp(-(x.double()[:, None] - y.double()).square().sum(-1) / 0.5, -1)
    assert float((result - exact).abs().max()) < 1e-4


@pytest.mark.parametrize(("cost", "p"), COSTS)
def test_gradient_is_that_of_autograd(cost, p):
    x, y, h, shift = unit(6, 3), unit(8, 3, seed=1), normal(8, seed=2), normal(6, seed=3)
    plan = torch.exp(torch.tensor(naive(PairwiseCost.of(x, y, cost, p), h, 0.5)).double() + shift[:, None])
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((plan * cost.matrix(leaf, y) ** p).sum(), leaf)
    for stored in (True, False):
        costs = PairwiseCost.of(x, y, cost, p, stored=stored)
        torch.testing.assert_close(costs.gradient(h, shift, epsilon=0.5), wanted)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of entries of any tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.largest = max([self.largest, *(part.numel() for part in tensors if isinstance(part, torch.Tensor))])
        return result


@pytest.mark.parametrize("guessed", [True, False])
def test_no_matrix_of_all_pairs_is_formed(guessed):
    x, y, h = normal(3000, 4).float(), normal(2500, 4, seed=1).float(), torch.zeros(2500)
    costs = PairwiseCost.of(x, y, Euclidean())
    guess = costs.log_sum_exp(h, epsilon=1.0) if guessed else None
    with LargestTensor() as record:
        costs.log_sum_exp(h, epsilon=1.0, guess=guess)
        costs.mean_cost(h, epsilon=1.0)
        costs.couple(h, torch.zeros(3000), y, epsilon=1.0)
    assert record.largest <= max(math.prod(BLOCK["cpu"]), 3000 * 6)


def test_weight_zero_has_no_influence():
    assert log_weights(torch.tensor([0.0, 1.0]))[0] == HIDDEN
    x, y = normal(5, 2), normal(6, 2, seed=1)
    h = log_weights(torch.tensor([1.0, 0, 1, 1, 0, 1]).double())
    kept = [0, 2, 3, 5]
    for stored in (True, False):
        all_of_them = PairwiseCost.of(x, y, Euclidean(), stored=stored).log_sum_exp(h, epsilon=0.1)
        some = PairwiseCost.of(x, y[kept], Euclidean(), stored=stored).log_sum_exp(h[kept], epsilon=0.1)
        torch.testing.assert_close(all_of_them, some)


@pytest.fixture
def kernel(monkeypatch):
    """The GPU kernel; the interpreter of Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses."""
    module = importlib.import_module("helmscope.transport.streaming_triton")
    if module.INTERPRETED:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        bounds = lambda *given: range(*(b.handle.data.item() if hasattr(b, "handle") else b for b in given))  # noqa: E731
        monkeypatch.setattr(interpreter, "range", bounds, raising=False)
    return module.log2_sum_exp2


@pytest.mark.filterwarnings("ignore:divide by zero")  # NumPy's, at the guess that underflows
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 20])
def test_gpu_kernel_against_float64(kernel, d):
    query, key, bias = (normal(*shape, seed=d, dtype=torch.float32) for shape in ((70, d), (150, d), (150,)))
    bias[3], squares = HIDDEN, key.square().sum(-1)
    products = query.double() @ key.double().mT
    logits = (products + bias.double()) * math.log(2)
    exact = logits.logsumexp(-1) / math.log(2)
    mean = (logits.softmax(-1) * (products - squares.double())).sum(-1)
    query, key, bias, squares = (part.to(DEVICE) for part in (query, key, bias, squares))
    for guess in (None, (exact + 3).float().to(DEVICE)):
        result, none = kernel(query, key, bias, guess)
        assert none is None
        assert float((result.cpu() - exact).abs().max()) < 1e-5
    result, means = kernel(query, key, bias, None, squares)
    assert float((result.cpu() - exact).abs().max()) < 1e-5
    assert float((means.cpu() - mean).abs().max()) < 1e-4
    far, _ = kernel(query, key, bias, (exact + 500).float().to(DEVICE))
    assert not bool(torch.isfinite(far).any())  # so that the caller notices a guess that was too far off
