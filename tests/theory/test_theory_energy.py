"""The extreme energies against tables, Bessel functions, quadrature and double sums."""

from __future__ import annotations

import math

import mpmath as mp
import pytest
import torch

from helmscope.theory.energy import equiangular_energy, max_energy, min_energy
from helmscope.types import HelmscopeError

MINIMUM = {  # beta = 1, 4, 9
    2: (0.633032938876004, 1.41274024401704, 60.7549085839653),
    3: (0.587600596821901, 0.852809912410242, 25.0095179140913),
    512: (0.500488518817608, 0.126968403270515, 0.0601278371775291),
}


@pytest.mark.parametrize("dim", MINIMUM)
def test_minimal_energy_table(dim):
    assert [min_energy(beta=b, dim=dim) for b in (1, 4, 9)] == pytest.approx(MINIMUM[dim], rel=5e-15)


def test_maximal_energy_table():
    expected = (1.35914091422952, 6.82476875414303, 450.171329309744)
    assert [max_energy(beta=b) for b in (1, 4, 9)] == pytest.approx(expected, rel=5e-15)


@pytest.mark.parametrize("dim", [2, 3, 7, 512, 100_000])
@pytest.mark.parametrize("beta", [1e-300, 1e-8, 0.1, 9.0, 60.0, 300.0, 690.0])
def test_minimal_energy_is_the_bessel_function(dim, beta):
    with mp.workdps(40):
        b, order = mp.mpf(beta), mp.mpf(dim) / 2 - 1
        exact = mp.gamma(order + 1) * (2 / b) ** order * mp.besseli(order, b) / (2 * b)
    assert min_energy(beta=beta, dim=dim) == pytest.approx(float(exact), rel=3e-15)


def test_minimal_energy_is_the_mean_over_the_sphere():
    # <x, y> of two uniform points has the density ~ (1 - t^2)^((d-3)/2)
    for dim, beta in ((4, 3.0), (9, 20.0), (512, 50.0)):
        power = mp.mpf(dim - 3) / 2
        weight = lambda t, power=power: (1 - t * t) ** power  # noqa: E731
        breaks = mp.linspace(-1, 1, 9)
        mean = mp.quad(lambda t, b=beta, w=weight: w(t) * mp.exp(b * t), breaks) / mp.quad(weight, breaks)
        assert min_energy(beta=beta, dim=dim) == pytest.approx(float(mean / (2 * beta)), rel=1e-13)


def test_minimal_energy_is_finite_where_the_maximal_energy_overflows():
    assert min_energy(beta=1000.0, dim=10**6) == pytest.approx(float(mp.hyp0f1(5 * 10**5, 250_000) / 2000), rel=1e-14)


@pytest.mark.parametrize(("n", "gamma"), [(2, -1.0), (3, -0.5), (5, 0.3), (8, 1.0)])
@pytest.mark.parametrize("beta", [1e-3, 1.0, 9.0])
def test_equiangular_energy_is_the_double_sum(n, gamma, beta):
    grams = [1.0 if i == j else gamma for i in range(n) for j in range(n)]
    expected = math.fsum(math.exp(beta * g) for g in grams) / (2 * beta * n * n)
    assert equiangular_energy(gamma, beta=beta, n=n).item() == pytest.approx(expected, rel=1e-15)


def test_energy_of_the_equilateral_triangle():
    assert equiangular_energy(-0.5, beta=1.0, n=3).item() == pytest.approx(0.6552238579807187, rel=1e-15)


def test_energies_are_ordered():
    gamma = torch.linspace(-1 / 31, 1, 20, dtype=torch.float64)
    energy = equiangular_energy(gamma, beta=4.0, n=32)
    assert (energy.diff() > 0).all()
    assert min_energy(beta=4.0, dim=32) < energy[0] < energy[-1]
    assert energy[-1].item() == max_energy(beta=4.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: min_energy(beta=0.0, dim=3), "beta is 0.0"),
        (lambda: min_energy(beta=1.0, dim=1), "dim is 1"),
        (lambda: min_energy(beta=800.0, dim=3), "beta is 800"),
        (lambda: min_energy(beta=1e300, dim=3), r"beta is 1e\+300"),
        (lambda: min_energy(beta=1e-310, dim=3), "beta is 1e-310"),
        (lambda: max_energy(beta=-1.0), "beta is -1.0"),
        (lambda: max_energy(beta=1e4), "beta is 10000"),
        (lambda: equiangular_energy(0.0, beta=0.0, n=3), "beta is 0.0"),
        (lambda: equiangular_energy(0.0, beta=1.0, n=1), "n is 1"),
        (lambda: equiangular_energy(-0.6, beta=1.0, n=3), "gamma is -0.6"),
    ],
)
def test_bad_input_raises_one_sentence(call, message):
    with pytest.raises(HelmscopeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
