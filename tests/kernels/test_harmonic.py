"""Harmonic sums against dense sums, plain loops and closed forms; their degree; bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from mpmath import mp
from scipy import special

import helmscope as hs
from helmscope.fields.attention import SA, USA
from helmscope.geometry import harmonics
from helmscope.geometry.sphere import project, retract
from helmscope.kernels import harmonic_series
from helmscope.kernels.dense import Dense, attention_sum, logits
from helmscope.kernels.harmonic import CHUNK, Harmonic, harmonic_degree, harmonic_sum
from helmscope.kernels.harmonic_matrix import matrix_sums
from helmscope.kernels.harmonic_series import circle_series
from helmscope.kernels.request import Request
from helmscope.theory.energy import min_energy
from helmscope.types import HelmscopeError
from support.summation_cases import random_request

BETAS = (0.0, 1e-3, 0.5, 1.0, 4.0, 9.0, 50.0)


def cloud(n: int, d: int, *, batch: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return retract(torch.randn(batch, n, d, generator=generator, dtype=torch.float64))


def over_scale(sums, beta: float) -> torch.Tensor:
    """Mass and sum divided by e^beta."""
    mass = sums.mass * torch.exp(sums.mass_shift - beta)
    return torch.cat([mass, sums.total * torch.exp(sums.shift - beta)], -1)


@pytest.mark.parametrize("skip_self", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 257])
@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("beta", BETAS)
def test_they_agree_with_dense_sums(beta: float, d: int, n: int, skip_self: bool) -> None:
    """Within 2e-13 of e^beta times the total weight: truncation error 1e-13, plus rounding."""
    x, weights = cloud(n, d), torch.rand(2, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights[:, 0] = 0.0 if n > 2 else 1.0
    for mass in (None, weights):
        dense = attention_sum(logits(beta * x, x, weights=mass), x, weights=mass, skip_self=skip_self)
        got = harmonic_sum(x, beta=beta, weights=mass, skip_self=skip_self, tol=1e-13)
        assert torch.equal(got.shift, torch.full_like(got.shift, beta))
        scale = float(n if mass is None else mass.sum(-1).max())
        assert float((over_scale(got, beta) - over_scale(dense, beta)).abs().max()) <= 2e-13 * scale


@pytest.mark.parametrize("d", [2, 3])
def test_they_agree_with_a_plain_loop_at_special_points(d: int) -> None:
    """Poles, antipodes, equal tokens and tokens very close to a pole, with 30 digits."""
    rows = [[0.0] * (d - 1) + [1.0], [0.0] * (d - 1) + [-1.0], [1.0] + [0.0] * (d - 1), [-1.0] + [0.0] * (d - 1)]
    x = retract(torch.tensor([*rows, rows[0], [1e-9] * (d - 1) + [1.0], [0.6, -0.8][:d] + [0.0] * (d - 2)]).double())
    got = over_scale(harmonic_sum(x, beta=4.0, tol=1e-14), 4.0)
    with mp.workdps(30):
        for i, a in enumerate(x.tolist()):
            terms = [mp.exp(4 * (mp.fdot(a, b) - 1)) for b in x.tolist()]
            expected = [mp.fsum(terms), *(mp.fdot(terms, x[:, k].tolist()) for k in range(d))]
            assert max(abs(float(e) - v) for e, v in zip(expected, got[i].tolist(), strict=True)) < 2e-14


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("tol", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("beta", [0.5, 4.0, 30.0])
def test_the_degree_is_the_smallest_within_the_tolerance(beta: float, tol: float, d: int) -> None:
    """The tail of the series at <x, y> = 1, with 30 digits."""
    degree = harmonic_degree(beta, dim=d, tol=tol)
    with mp.workdps(30):

        def tail(first: int) -> float:
            def term(k: int) -> object:
                half = mp.sqrt(mp.pi / (2 * beta)) * mp.besseli(k + mp.mpf(1) / 2, beta)
                return 2 * mp.besseli(k, beta) if d == 2 else (2 * k + 1) * half

            return float(mp.fsum(term(k) for k in range(first, first + 120)) * mp.exp(-beta))

        assert tail(degree + 1) <= tol * (1 + 1e-12)
        assert tail(degree) > tol


def test_coefficients_and_degree_are_those_of_the_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted in the coefficients of ``geometry`` changes the sums: there is no second implementation."""
    degree = harmonic_degree(2.0, dim=2)
    moments = torch.ones(1, degree + 2, dtype=torch.complex128)
    correct = circle_series(moments, 2.0, degree)[0, :, 0].real
    bessel = torch.from_numpy(special.ive(range(degree + 1), 2.0)) * torch.tensor([1.0] + [2.0] * degree)
    assert ((correct / bessel).abs() - 1).abs().max() < 1e-13  # measured 2e-15
    original = harmonics._scaled_exponential_coefficients
    monkeypatch.setattr(harmonics, "_scaled_exponential_coefficients", lambda *args: 2 * original(*args))
    harmonic_series._circle_coefficients.cache_clear()
    faulty = circle_series(moments, 2.0, degree)[0, :, 0].real
    harmonic_series._circle_coefficients.cache_clear()
    assert torch.equal(faulty, 2 * correct)
    assert harmonic_degree(2.0, dim=3, tol=0.8) == harmonics.exponential_degree(2.0, dim=3, tol=0.8) > 0


def test_sums_are_within_a_coarse_tolerance() -> None:
    x = cloud(200, 3)
    dense = over_scale(attention_sum(logits(9.0 * x, x), x), 9.0)
    for tol in (1e-3, 1e-6, 1e-9):
        error = float((over_scale(harmonic_sum(x, beta=9.0, tol=tol), 9.0) - dense).abs().max())
        assert tol / 1e6 < error <= tol * 200


@pytest.mark.parametrize("d", [2, 3])
def test_velocities_of_sa_and_usa(d: int) -> None:
    x = cloud(300, d)
    sums = harmonic_sum(x, beta=4.0, skip_self=True)
    assert torch.allclose(project(x, sums.mean), SA(beta=4.0)(x), rtol=0, atol=1e-12)
    assert torch.allclose(project(x, sums.total) * math.exp(4.0) / 300, USA(beta=4.0)(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("d", "beta"), [(2, 9.0), (3, 1.0), (3, 9.0)])
def test_a_quadrature_of_the_uniform_measure_has_the_minimal_energy(d: int, beta: float) -> None:
    """The mass of a regular polygon or of a product rule equals the closed form 2 beta E_min at every token."""
    count = 64
    angle = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    x, weights = torch.stack([angle.cos(), angle.sin()], -1), torch.full((count,), 1 / count, dtype=torch.float64)
    if d == 3:
        nodes, w = (torch.from_numpy(part) for part in special.roots_legendre(32))
        ring = (1 - nodes**2).sqrt()[:, None, None] * x
        x = torch.cat([ring, nodes[:, None, None].expand(32, count, 1)], -1).flatten(0, 1)
        weights = (w[:, None] * weights / 2).flatten()
    mass = harmonic_sum(retract(x), beta=beta, weights=weights).mass * math.exp(beta)
    assert torch.allclose(mass, torch.full_like(mass, 2 * beta * min_energy(beta=beta, dim=d)), rtol=1e-11, atol=0)


def test_sums_do_not_depend_on_batch_or_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    x = cloud(300, 3, batch=5)
    batched = over_scale(harmonic_sum(x, beta=4.0), 4.0)
    alone = torch.stack([over_scale(harmonic_sum(system, beta=4.0), 4.0) for system in x])
    assert torch.allclose(batched, alone, rtol=0, atol=1e-12)
    monkeypatch.setitem(CHUNK, "cpu", 7)
    assert torch.allclose(over_scale(harmonic_sum(x, beta=4.0), 4.0), batched, rtol=0, atol=1e-11)


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_300_random_shapes(start: int) -> None:
    """Within 1e-12 of e^beta per unit of weight; beta = 500 only on the circle, as the table of S^2 would be large."""
    for seed in range(start, start + 100):
        request = replace(random_request(seed, plain=True, dims=(2, 3)), causal=False)
        if request.beta == 500 and request.key.shape[-1] == 3:
            request = replace(request, query=request.query / 10, beta=50.0)
        assert Harmonic().unsupported_reason(request) is None
        got, expected = (over_scale(kernel.sum(request), request.beta) for kernel in (Harmonic(), Dense()))
        weight = request.key.shape[-2] if request.weights is None else float(request.weights.sum(-1).max())
        assert float((got - expected).abs().max()) <= 1e-12 * max(1.0, weight), seed


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0, 9.0])
def test_matrix_products_agree(beta: float, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version for GPUs, also in chunks, with a token at each pole."""
    x = cloud(300, d, batch=2)
    x[:, 0], x[:, 1] = 0.0, 0.0
    x[:, 0, -1], x[:, 1, -1] = 1.0, -1.0
    weights = torch.rand(2, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = over_scale(harmonic_sum(x, beta=beta, weights=weights), beta)
    degree = harmonic_degree(beta, dim=d)
    for chunk in (2**20, 77):
        monkeypatch.setattr("helmscope.kernels.harmonic_matrix.CHUNK", chunk)
        got = matrix_sums(x, weights, beta, degree)
        assert float((got - expected).abs().max()) < 3e-14 * float(weights.sum(-1).max())
    got = matrix_sums(x.float(), weights.float(), beta, degree)
    assert float((got - expected).abs().max()) < 1e-6 * float(weights.sum(-1).max())


def test_float32_accuracy() -> None:
    x = cloud(500, 3)
    got = harmonic_sum(x.float(), beta=4.0, tol=1e-7)
    assert got.mass.dtype == torch.float32
    assert float((got.mean.double() - harmonic_sum(x, beta=4.0).mean).abs().max()) < 2e-6


def test_many_tokens_need_no_n_x_n_matrix() -> None:
    """200,000 tokens, whose n x n matrix would take 320 GB; 40 rows against direct sums over all tokens."""
    x = cloud(200_000, 3, batch=1)[0]
    got = over_scale(harmonic_sum(x, beta=4.0, tol=1e-9), 4.0)[:40]
    kernel = torch.exp(4.0 * (x[:40] @ x.mT) - 4.0)
    assert torch.allclose(got, torch.cat([kernel.sum(-1, keepdim=True), kernel @ x], -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: harmonic_sum(cloud(3, 4), beta=1.0), "dim is 4, but it must be 2 .the circle. or 3 .S"),
        (lambda: harmonic_sum(cloud(3, 3), beta=-1.0), "beta is -1.0, but it must be a finite number >= 0"),
        (lambda: harmonic_sum(cloud(3, 3), beta=4.0, tol=0.0), "tol is 0.0, but it must be a finite number > 0"),
        (lambda: harmonic_sum(cloud(3, 3), beta=1e4), "beta is 10000, but its series has degree"),
        (lambda: harmonic_sum(cloud(3, 3).requires_grad_(), beta=1.0), "x requires a gradient, but harmonic sums"),
    ],
)
def test_bad_input_raises(call, message: str) -> None:
    with pytest.raises(HelmscopeError, match=message):
        call()


@pytest.mark.parametrize("dim", [2, 3])
def test_a_huge_beta_falls_back_to_pairs(dim):
    """The degree of its series, which would take 8 TB to compute, is not computed."""
    x = hs.Uniform(2100, dim).sample()
    with hs.kernels.using_summation() as used:
        velocity = hs.SA(beta=1e12)(x)
    assert used == {"Blockwise"}
    assert float(velocity.abs().max()) < 1e-3  # every token attends to itself only
    with hs.kernels.using_summation(Harmonic()), pytest.raises(hs.HelmscopeError, match="degree above 256"):
        hs.SA(beta=1e12)(x)


@pytest.mark.parametrize(("dim", "beta"), [(2, 57_000.0), (2, 60_000.0), (3, 32_000.0), (3, 35_000.0)])
def test_only_series_of_too_high_degree_are_rejected_without_computing_it(dim, beta):
    x = hs.Uniform(2, dim).sample()
    request = Request(beta * x, x, x, beta=beta)
    assert Harmonic()._is_too_sharp(request) == (beta in (60_000.0, 35_000.0))
    assert Harmonic().degree(request) > 256
