"""The heat kernel of the sphere against mpmath, image sums, quadrature and eigenvalues."""

import math
from collections.abc import Callable

import mpmath
import pytest
import torch

from helmscope.geometry.harmonics import gegenbauer, zonal_quadrature
from helmscope.geometry.heat_kernel import (
    HeatKernelTable,
    heat_kernel_series,
    heat_kernel_table,
    log_heat_kernel,
    log_heat_kernel_slope,
)
from helmscope.types import HelmscopeError

COSINES = torch.tensor([1.0, 0.99, 0.5, -0.3, -0.9, -0.999, -1.0], dtype=torch.float64)


def reference(s: float, dim: int, tau: float) -> tuple[float, float]:
    """log p and d/ds log p from the series, with as many digits as its terms cancel."""
    digits = int(math.acos(s) ** 2 / (4 * tau) / 2.3) + dim + 30
    with mpmath.workdps(digits):
        x, area = mpmath.mpf(s), 2 * mpmath.pi ** (mpmath.mpf(dim) / 2) / mpmath.gamma(mpmath.mpf(dim) / 2)
        total, slope, largest, k = mpmath.mpf(0), mpmath.mpf(0), mpmath.mpf(0), 0
        p, p_next, q, q_next = mpmath.mpf(1), x, mpmath.mpf(0), mpmath.mpf(1)  # P_k, P_k+1 and their derivatives
        while True:
            count = math.comb(k + dim - 1, k) - (math.comb(k + dim - 3, k - 2) if k > 1 else 0)
            term = count * mpmath.exp(-k * (k + dim - 2) * mpmath.mpf(tau))
            total, slope, largest = total + term * p, slope + term * q, max(largest, term)
            if k > 3 and term * (k + 1) ** 2 < largest * mpmath.mpf(10) ** -digits:
                return float(mpmath.log(total / area)), float(slope / total)
            k += 1
            a, b = 2 * k + dim - 2, k + dim - 2
            p, p_next, q, q_next = p_next, (a * x * p_next - k * p) / b, q_next, (a * (p_next + x * q_next) - k * q) / b


@pytest.mark.parametrize("dim", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("tau", [0.02, 0.2, 1.5, 20.0])
def test_kernel_and_slope_agree_with_series_in_high_precision(dim: int, tau: float) -> None:
    exact = torch.tensor([reference(s, dim, tau) for s in COSINES.tolist()], dtype=torch.float64)
    value, slope = log_heat_kernel(COSINES, dim=dim, tau=tau), log_heat_kernel_slope(COSINES, dim=dim, tau=tau)
    assert (value - exact[:, 0]).abs().max() < 2e-12
    torch.testing.assert_close(slope, exact[:, 1], rtol=2e-12, atol=1e-300)


def images(theta: float, tau: float, term: Callable[[float], float]) -> float:
    """log of the sum over images theta + 2 pi k of term e^{-.^2 / 4 tau}."""
    with mpmath.workdps(60):
        places = [mpmath.mpf(theta) + 2 * mpmath.pi * k for k in range(-3, 4)]
        return float(mpmath.log(sum(term(x) * mpmath.exp(-(x**2) / (4 * mpmath.mpf(tau))) for x in places)))


@pytest.mark.parametrize("tau", [1e-6, 1e-4, 0.003, 0.3])
def test_circle_and_three_sphere_are_sums_over_images(tau: float) -> None:
    s = torch.tensor([0.999, 0.2, -0.99, -0.999999], dtype=torch.float64)
    for k, cosine in enumerate(s.tolist()):
        theta = math.acos(cosine)
        circle = images(theta, tau, lambda x: 1) - math.log(4 * math.pi * tau) / 2
        assert log_heat_kernel(s, dim=2, tau=tau)[k] == pytest.approx(circle, rel=2e-13, abs=1e-11)
        three = (
            images(theta, tau, lambda x, theta=theta: x / mpmath.sin(theta)) + tau - math.log(4 * math.pi * tau) * 1.5
        )
        assert log_heat_kernel(s, dim=4, tau=tau)[k] == pytest.approx(three, rel=2e-13, abs=1e-11)


@pytest.mark.parametrize("dim", [2, 3, 5, 8])
def test_mass_is_one_and_harmonics_decay_with_their_eigenvalues(dim: int) -> None:
    tau = 0.05
    s, w = zonal_quadrature(200, dim=dim)
    area = 2 * math.pi ** (dim / 2) / math.gamma(dim / 2)
    moments = (w * area * torch.exp(log_heat_kernel(s, dim=dim, tau=tau))) @ gegenbauer(s, 6, dim=dim)
    k = torch.arange(7, dtype=torch.float64)
    torch.testing.assert_close(moments, torch.exp(-k * (k + dim - 2) * tau), rtol=1e-12, atol=1e-13)
    # a factor 2 in the time would be seen: the rate is nu k (k + d - 2), not half of it
    assert not torch.allclose(moments, torch.exp(-k * (k + dim - 2) * tau / 2), rtol=1e-2)


def test_series_agrees_where_it_does_not_cancel() -> None:
    for dim in (2, 3, 8):
        series, exact = heat_kernel_series(COSINES, dim=dim, tau=0.4), log_heat_kernel(COSINES, dim=dim, tau=0.4)
        torch.testing.assert_close(torch.log(series), exact, rtol=0, atol=1e-11)
    lost = heat_kernel_series(COSINES[-1:], dim=3, tau=0.01)  # p(-1) is about 1e-105
    assert abs(float(lost)) > 1e-20


@pytest.mark.parametrize("dim", [2, 3, 8])
@pytest.mark.parametrize("tau", [1e-4, 0.01, 1.0])
def test_table_interpolates_value_and_slope(dim: int, tau: float) -> None:
    theta = torch.cat([torch.linspace(0, math.pi, 301), math.pi - tau * torch.linspace(0, 5, 50)]).double()
    s = torch.cos(theta.clamp(0, math.pi))
    value, slope = HeatKernelTable(dim, tau)(s)
    assert (value - log_heat_kernel(s, dim=dim, tau=tau)).abs().max() < 2e-6
    assert (slope / log_heat_kernel_slope(s, dim=dim, tau=tau) - 1).abs().max() < 2e-6
    assert heat_kernel_table(dim, tau) is heat_kernel_table(dim, tau)


def test_slope_is_the_derivative() -> None:
    s = torch.tensor([0.8, -0.5], dtype=torch.float64)
    step = 1e-5
    rise = log_heat_kernel(s + step, dim=3, tau=0.1) - log_heat_kernel(s - step, dim=3, tau=0.1)
    torch.testing.assert_close(rise / (2 * step), log_heat_kernel_slope(s, dim=3, tau=0.1), rtol=1e-8, atol=0)


def test_dtype_is_kept_and_bad_arguments_are_named() -> None:
    assert log_heat_kernel(torch.ones(1), dim=3, tau=0.1).dtype == torch.float32
    with pytest.raises(HelmscopeError, match="dim is 1, but it must be a whole number >= 2"):
        log_heat_kernel(COSINES, dim=1, tau=0.1)
    with pytest.raises(HelmscopeError, match="tau is 0, but it must be a finite number > 0"):
        log_heat_kernel(COSINES, dim=3, tau=0)
    with pytest.raises(HelmscopeError, match=r"s has dtype torch\.int64, but it must be a float tensor"):
        log_heat_kernel(torch.ones(1, dtype=torch.int64), dim=3, tau=0.1)
