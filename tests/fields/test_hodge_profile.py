"""The profiles h of Gauss space, and the laws, against closed forms, mpmath and SciPy. Bounds are a few times what was
measured.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import scipy.integrate
import torch

from helmscope.fields import activations
from helmscope.fields.hodge_profile import Law, Neurons, Profiles
from helmscope.fields.mlp import MLP

F64 = torch.float64
ALL = [
    *(activations.Identity(), activations.ReLU(), activations.SquaredReLU(), activations.Tanh(), activations.Sigmoid()),
    *(activations.SiLU(), activations.GELU(), activations.GELUTanh(), activations.QuickGELU()),
]


def profile(activation, z, length=1.0, offset=0.0):
    """h and h' of one neuron."""
    row, bias = torch.tensor([[length, 0.0]], dtype=F64), torch.tensor([offset], dtype=F64)
    neurons = Neurons.from_mlp(MLP(w_in=row, w_out=row.mT, b_in=bias, activation=activation), radius=1.0)
    z = torch.as_tensor(z, dtype=F64)
    return Profiles.solve(Law(0.0), neurons)(z, torch.zeros_like(z, dtype=torch.long))


@pytest.mark.parametrize("dim", [2, 3, 4, 9, 100, math.inf])
def test_moments_and_orthogonal_polynomials_of_the_laws(dim):
    """E z^2 = 1, E z^4 = 3 d/(d + 2); orthonormal polynomials, of Hermite in the limit."""
    law = Law(1 / dim)
    edges = torch.linspace(-min(law.reach, 12.0), min(law.reach, 12.0), 25, dtype=F64)[None]
    z, mass = law.quadrature(edges, 12)
    assert (mass * z**2).sum().item() == pytest.approx(1, abs=3e-15)
    assert (mass * z**4).sum().item() == pytest.approx(3 / (1 + 2 / dim), abs=1e-13)
    last, polynomial, table = torch.zeros_like(z), torch.ones_like(z), []
    for n in range(9):
        table.append(polynomial)
        last, polynomial = polynomial, (z * polynomial - law.jacobi(n) * last) / law.jacobi(n + 1)
    rows = torch.stack(table).squeeze(1)
    assert ((mass * rows) @ rows.mT - torch.eye(9, dtype=F64)).abs().max() < 3e-13


def test_relu_profile():
    value, slope = profile(activations.ReLU(), [-1.0, 0.0, 1.0])
    oracle = torch.tensor([0.1639198856047, 0.313328534328875, 0.6639198856047], dtype=F64)
    assert (value - oracle).abs().max() < 2e-15
    assert slope[1].item() == pytest.approx(0.25, abs=1e-15)  # E psi = 1/4


def mp_profile(phi, corner, z):
    """h and h' by Green's function of h'' - z h' - h, which is sqrt(2 pi) e^(z^2/2) N(min(z, t)) Q(max(z, t))."""
    with mpmath.workdps(25):
        z = mpmath.mpf(z)
        nodes = sorted({mpmath.mpf(-14), mpmath.mpf(corner), mpmath.mpf(14), mpmath.mpf(0), z})
        upper = lambda t: mpmath.erfc(t / mpmath.sqrt(2)) / 2  # noqa: E731
        below = mpmath.quad(lambda t: phi(t) * upper(-t), [t for t in nodes if t <= z])
        above = mpmath.quad(lambda t: phi(t) * upper(t), [t for t in nodes if t >= z])
        h = mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(z * z / 2) * (upper(z) * below + upper(-z) * above)
        return float(h), float(z * h - below + above)


MP = {
    activations.ReLU(): lambda y: max(y, mpmath.mpf(0)),
    activations.Tanh(): mpmath.tanh,
    activations.SiLU(): lambda y: y / (1 + mpmath.exp(-y)),
}


@pytest.mark.parametrize(("activation", "phi"), MP.items())
@pytest.mark.parametrize(
    ("length", "offset", "z"), [(1.0, 0.0, -0.6), (3.0, 1.5, 1.7), (0.2, -1.0, 5.0), (20.0, 4.0, -0.21)]
)
def test_profiles_against_mpmath(activation, phi, length, offset, z):
    h, h_slope = mp_profile(lambda t: phi(length * t + offset), -offset / length, z)
    value, slope = profile(activation, [z], length, offset)
    assert value.item() == pytest.approx(h, abs=3e-15 * length)  # measured: 2e-15 relative to phi at 1
    assert slope.item() == pytest.approx(h_slope, abs=6e-15 * length)


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize(("length", "offset"), [(0.7, 0.4), (6.0, -2.0)])
def test_profiles_against_scipy(activation, length, offset):
    """By h(z) = int_0^inf D(z + t) e^(-z t - t^2/2) dt for z >= 0, D = int phi - E[int phi], with psi of the table."""
    corner, end = -offset / length, 12.0

    def psi(z):
        y = torch.as_tensor(length * np.asarray(z) + offset, dtype=F64)
        return activation.potential(y).numpy() / length

    def integral(f, a, b):
        middle = [corner] if a < corner < b else []
        return sum(
            scipy.integrate.quad(f, lo, hi, epsabs=1e-13, epsrel=1e-12, limit=200)[0]
            for lo, hi in zip([a, *middle], [*middle, b], strict=True)
        )

    mean = integral(lambda t: psi(t) * math.exp(-t * t / 2) / math.sqrt(2 * math.pi), -end, end)
    for z in (0.0, 0.8, 3.1):
        h = integral(lambda t, z=z: (psi(t) - mean) * math.exp((z * z - t * t) / 2), z, end)
        value, slope = profile(activation, [z], length, offset)
        assert value.item() == pytest.approx(h, rel=1e-12, abs=1e-13)
        assert slope.item() == pytest.approx(z * h - float(psi(z)) + mean, rel=1e-11, abs=2e-13)


def test_profiles_far_out():
    """Of z_+: h = z/2 + m(z)/4 for z > 0 and m(-z)/4 for z < 0, with Mills' ratio m. NaN beyond 1024."""
    value, slope = profile(activations.ReLU(), [1000.0, -1000.0, 1025.0, -1025.0])
    with mpmath.workdps(30):
        mills = mpmath.sqrt(mpmath.pi / 2) * mpmath.erfc(1000 / mpmath.sqrt(2)) * mpmath.exp(mpmath.mpf(1000) ** 2 / 2)
        mills_slope = 1000 * mills - 1
    assert value[0].item() == pytest.approx(float(500 + mills / 4), rel=1e-15)
    assert value[1].item() == pytest.approx(float(mills / 4), rel=1e-14)
    assert slope[0].item() == pytest.approx(float(1 / 2 + mills_slope / 4), rel=1e-14)
    assert slope[1].item() == pytest.approx(float(-mills_slope / 4), rel=1e-8)  # 1e-15 of the slope on the other side
    assert value[2:].isnan().all()
    assert slope[2:].isnan().all()


@pytest.mark.parametrize("corner", [20.0, 511.0, 1023.5, 1024.5, 1300.0, 2047.0, 2049.0, 1e9])
@pytest.mark.parametrize("length", [1e-3, 1.0, -1.0])
def test_profiles_with_a_corner_far_out(corner, length):
    """(z - a)_+ is nothing before the corner a, and (a - z)_+ the line a - z with h = a - z/2."""
    z = torch.tensor([0.3, 5.0, 15.0], dtype=F64) * math.copysign(1, length)
    value, slope = profile(activations.ReLU(), z, abs(length), -corner * length)
    expected = (corner - z.abs() / 2) if length < 0 else torch.zeros_like(z)
    assert (value - expected).abs().max() < 1e-14 * corner * abs(length)
    assert (slope - (0.5 if length < 0 else 0.0)).abs().max() < 1e-14 * corner * abs(length)
