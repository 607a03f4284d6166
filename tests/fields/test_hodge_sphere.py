"""The Hodge split on the sphere against closed forms, mpmath, Gegenbauer series, harmonics and quadrature. Bounds are a
few times what was measured.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

from helmscope.fields import activations
from helmscope.fields.activations import Activation
from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.hodge_gaussian import gaussian_hodge_split
from helmscope.fields.hodge_sphere import sphere_hodge_split
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry import surface
from helmscope.geometry.harmonics import gegenbauer_c, spherical_harmonics, zonal_quadrature
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError

F64 = torch.float64


def one_neuron(activation, dim, length=1.0, offset=0.0, out=1) -> MLP:
    """v along the first axis, w along axis ``out``."""
    axes = torch.eye(dim, dtype=F64)
    bias = torch.tensor([offset], dtype=F64)
    return MLP(w_in=length * axes[:1], w_out=axes[:, out : out + 1], b_in=bias, activation=activation)


def random_mlp(hidden, dim, activation, *, seed=0, length=2.0) -> MLP:
    g = torch.Generator().manual_seed(seed)
    sizes = ((hidden, dim), (dim, hidden), (hidden,), (dim,))
    v, w, c, b = (torch.randn(*size, dtype=F64, generator=g) for size in sizes)
    return MLP(w_in=length * v, w_out=w, b_in=c, b_out=b, activation=activation)


def unit_points(*shape, seed=1) -> torch.Tensor:
    return retract(torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)))


def profile(mlp, t):
    """h and dh/dt at t = e.x; the table's variable is sqrt d t."""
    split = sphere_hodge_split(mlp)
    z = split.radius * torch.as_tensor(t, dtype=F64)
    value, slope = split.profiles(z, torch.zeros_like(z, dtype=torch.long))
    return value, split.radius * slope


@pytest.mark.parametrize("dim", [2, 3, 4, 17, 512])
def test_share_of_a_linear_neuron(dim):
    assert sphere_hodge_split(one_neuron(activations.Identity(), dim)).share() == pytest.approx(
        (dim + 2) / (2 * (dim + 1)), abs=1e-15
    )


@pytest.mark.parametrize(("dim", "share"), [(3, 25 / 64), (4, 2 / 5), (5, 77 / 192)])
@pytest.mark.parametrize("length", [1e-6, 1.0, 1e4])
def test_share_of_a_relu_neuron(dim, share, length):
    assert sphere_hodge_split(one_neuron(activations.ReLU(), dim, length)).share() == pytest.approx(share, abs=1e-15)


def relu_share(dim, degrees):
    """By degrees: sum_n c_n^2 n (n + d - 2) (d - 2) / ((d - 1)(n + 1)(n + d - 3)) over E|P f|^2, with exact c_n by
    Rodrigues' formula, and for the rest of the c_n^2, which sum to E phi^2, the limit (d - 2)/(d - 1) of that factor.
    """
    with mpmath.workdps(30):
        d = mpmath.mpf(dim)
        norm = mpmath.beta(mpmath.mpf(1) / 2, (d - 1) / 2)
        square, total = 1 / (2 * d), (1 - 1 / (d - 1)) / (2 * d) + 3 / (2 * d * (d + 2) * (d - 1))
        swirl = 1 / (4 * d) / 2  # n = 1: c^2 = d (1/(2d))^2, factor 1/2
        left = square - 1 / (4 * d) - (1 / (d - 1) / norm) ** 2
        for n in range(2, degrees, 2):
            j, a = (n - 2) // 2, n + (d - 3) / 2
            mean = mpmath.binomial(a, j) * mpmath.factorial(2 * j) / norm
            mean *= mpmath.gamma((d - 1) / 2) / (mpmath.mpf(2) ** n * mpmath.gamma(n + (d - 1) / 2))
            c2 = mean**2 * (mpmath.binomial(n + d - 1, n) - mpmath.binomial(n + d - 3, n - 2))
            left -= c2
            swirl += c2 * n * (n + d - 2) * (d - 2) / ((d - 1) * (n + 1) * (n + d - 3))
        return float((swirl + left * (d - 2) / (d - 1)) / total)


@pytest.mark.parametrize(("dim", "degrees", "bound"), [(6, 400, 1e-12), (32, 600, 1e-11), (512, 4000, 5e-13)])
def test_share_of_a_relu_neuron_by_its_degrees(dim, degrees, bound):
    """The bounds are what the series leaves. d = 512: 0.375485898917774, where [Helmholtz Transformer, no. 3] has
    0.375496."""
    assert relu_share(3, 200) == pytest.approx(25 / 64, abs=1e-15)
    share = sphere_hodge_split(one_neuron(activations.ReLU(), dim)).share()
    assert share == pytest.approx(relu_share(dim, degrees), abs=bound)
    if dim == 512:
        assert share == pytest.approx(0.375485898917774, abs=1e-14)


def test_the_silu_example_in_six_dimensions():
    """[Helmholtz Transformer, no. 3]: Lap_S u = div_S(P f) at each point, and the share .5565691525 is that of |v| = 1,
    c = 0."""
    mlp = one_neuron(activations.SiLU(), 6)
    split, x = sphere_hodge_split(mlp), unit_points(20, 6)
    assert split.share() == pytest.approx(0.5565691525, abs=5e-11)
    assert (surface.laplacian(split.potential, x) - surface.divergence(mlp.ambient, x)).abs().max() < 1e-12


ACTIVATIONS = {
    activations.ReLU(): (lambda y: max(y, mpmath.mpf(0)), lambda y: max(y, mpmath.mpf(0)) ** 2 / 2),
    activations.Tanh(): (mpmath.tanh, lambda y: mpmath.log(mpmath.cosh(y))),
}


def mp_profile(activation, length, offset, dim, t):
    """h = (1 - t^2)^(-(d-1)/2) int_t^1 (G - E G) (1 - s^2)^((d-3)/2) ds, G = s phi + (d - 2) int phi, or int_-1^t."""
    s, psi = ACTIVATIONS[activation]
    with mpmath.workdps(25):
        d, length, offset, t = (mpmath.mpf(a) for a in (dim, length, offset, t))
        cuts = sorted({mpmath.mpf(-1), mpmath.mpf(1), max(min(-offset / length, 1), -1), mpmath.mpf(0), t})
        density = lambda u: (1 - u * u) ** ((d - 3) / 2)  # noqa: E731
        g = lambda u: u * s(length * u + offset) + (d - 2) * psi(length * u + offset) / length  # noqa: E731
        mean = mpmath.quad(lambda u: g(u) * density(u), cuts) / mpmath.quad(density, cuts)
        side = [u for u in cuts if u >= t] if t >= 0 else [u for u in cuts if u <= t]
        h = mpmath.quad(lambda u: (g(u) - mean) * density(u), side) * (1 if t >= 0 else -1)
        h /= (1 - t * t) ** ((d - 1) / 2)
        return float(h), float(((d - 1) * t * h - g(t) + mean) / (1 - t * t))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("length", "offset", "dim", "t"),
    [(1.0, 0.0, 3, 0.3), (3.0, 1.5, 5, -0.4), (20.0, 4.0, 4, 0.8), (2.0, 3.0, 16, -0.1), (5.0, -4.0, 7, 0.9)],
)
def test_profiles_against_mpmath(activation, length, offset, dim, t):
    h, h_slope = mp_profile(activation, length, offset, dim, t)
    value, slope = profile(one_neuron(activation, dim, length, offset), [t])
    assert value.item() == pytest.approx(h, abs=3e-15 * (length + abs(offset)))
    assert slope.item() == pytest.approx(h_slope, abs=2e-14 * (length + abs(offset)))


@pytest.mark.parametrize("dim", [3, 6, 20])
def test_profiles_against_the_gegenbauer_series(dim):
    """h = sum_n g_n / ((n + 1)(n + d - 1)) C_n^(d/2), g_n the coefficients of t phi' + (d - 1) phi, by quadrature."""
    activation, length, offset, degree = activations.GELU(), 1.5, 0.5, 40
    node, mass = zonal_quadrature(120, dim=dim + 2)
    y = length * node + offset
    source = node * length * activation.slope(y) + (dim - 1) * activation(y)
    basis = gegenbauer_c(node, degree, order=dim / 2)
    coefficients = (mass * source) @ basis / (mass @ basis.square())
    n = torch.arange(degree + 1, dtype=F64)
    t = torch.linspace(-0.9, 0.9, 7, dtype=F64)
    series = gegenbauer_c(t, degree, order=dim / 2) @ (coefficients / ((n + 1) * (n + dim - 1)))
    value, _ = profile(one_neuron(activation, dim, length, offset), t)
    assert (value - series).abs().max() < 1e-13


@pytest.mark.parametrize(
    "activation", [activations.ReLU(), activations.SquaredReLU(), activations.GELU(), activations.GELUTanh()]
)
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_parts_are_tangent_add_up_and_have_their_defining_properties(activation, dim):
    mlp = random_mlp(7, dim, activation)
    split, x = sphere_hodge_split(mlp), unit_points(30, dim)
    gradient, rest = split.gradient(x), split.swirl(x) + split.harmonic(x)
    scale = mlp(x).abs().max().item()
    assert (gradient + rest - mlp.velocity(x)).abs().max() < 3e-15 * scale
    assert (x * gradient).sum(-1).abs().max() < 2e-15 * scale
    assert (surface.gradient(split.potential, x) - gradient).abs().max() < 1e-12 * scale
    whole = lambda y: split.swirl(y) + split.harmonic(y)  # noqa: E731
    assert surface.divergence(whole, x).abs().max() < 1e-11 * scale
    # the swirl of the algebraic split is not free of it [Helmholtz Transformer, no. 3]
    assert surface.divergence(helmholtz(mlp).swirl, x).abs().max() > 1e-2 * scale


def sphere_rule(points):
    """Product rule on S^2: exact for polynomials of degree 2 points - 1."""
    height, weight = np.polynomial.legendre.leggauss(points)
    angle = 2 * np.pi * np.arange(2 * points) / (2 * points)
    ring = np.sqrt(1 - height**2)
    x = np.stack(
        [
            np.multiply.outer(ring, np.cos(angle)),
            np.multiply.outer(ring, np.sin(angle)),
            np.repeat(height[:, None], 2 * points, 1),
        ],
        -1,
    )
    return torch.from_numpy(x).flatten(0, 1), torch.from_numpy(np.repeat(weight / (4 * points), 2 * points))


def test_many_neurons_against_spherical_harmonics():
    """E|grad_S u|^2 = sum_lm l (l + 1) u_lm^2 / 4 pi with -l (l + 1) u_lm = int Y_lm div_S(P f); all by quadrature."""
    mlp = random_mlp(9, 3, activations.GELU(), length=1.0)
    mlp.w_in[7:] = torch.stack([-1.3 * mlp.w_in[0], 0.8 * mlp.w_in[1]])  # opposite, and parallel
    split, (x, mass) = sphere_hodge_split(mlp), sphere_rule(48)
    force, gradient, swirl = mlp.velocity(x), split.gradient(x), split.swirl(x)
    total = (mass * force.square().sum(-1)).sum().item()
    assert abs((mass * (gradient * swirl).sum(-1)).sum().item()) < 1e-13 * total
    degree = 30
    harmonics = spherical_harmonics(x, degree)
    degrees = torch.cat([torch.full((2 * k + 1,), float(k), dtype=F64) for k in range(degree + 1)])[1:]
    source = 4 * math.pi * (mass * surface.divergence(mlp.ambient, x)) @ harmonics[:, 1:]
    explained = (source.square() / (degrees * (degrees + 1))).sum().item() / (4 * math.pi)
    share = split.share(tol=1e-12)
    assert share == pytest.approx(1 - explained / total, abs=1e-11)
    assert share == pytest.approx((mass * swirl.square().sum(-1)).sum().item() / total, abs=1e-12)
    assert split.share() == pytest.approx(share, abs=1e-6)
    potential = split.potential(x)
    mean = (mass * potential).sum()
    ours = 4 * math.pi * (mass * (potential - mean)) @ harmonics[:, 1:]
    assert (ours + source / (degrees * (degrees + 1))).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("activation", "dim"), [(activations.ReLU(), 3), (activations.ReLU(), 4), (activations.Tanh(), 9)]
)
def test_share_by_monte_carlo(activation, dim):
    mlp = random_mlp(20, dim, activation, seed=4)
    split, x = sphere_hodge_split(mlp), unit_points(40_000, dim)
    gradient, swirl, force = split.gradient(x), split.swirl(x), mlp.velocity(x)
    share = split.share()
    for sample in ((gradient * swirl).sum(-1), swirl.square().sum(-1) - share * force.square().sum(-1)):
        assert abs(sample.mean().item()) < 4 * sample.std().item() / math.sqrt(len(x))


def test_on_the_circle_the_rest_is_a_rotation():
    mlp = random_mlp(5, 2, activations.ReLU())
    angle = 2 * math.pi * torch.arange(200_000, dtype=F64) / 200_000
    x = torch.stack([angle.cos(), angle.sin()], -1)
    turn = torch.stack([-x[:, 1], x[:, 0]], -1)
    along = (mlp(x) * turn).sum(-1)
    split, few = sphere_hodge_split(mlp), x[::9973]
    rotation = along.mean()
    assert (split.harmonic(few) - rotation * turn[::9973]).abs().max() < 1e-9  # 2e-10: the mean over corners
    assert (split.gradient(few) - (along - rotation)[::9973, None] * turn[::9973]).abs().max() < 1e-9
    assert torch.equal(split.swirl(few), torch.zeros_like(few))
    assert split.share() == pytest.approx((rotation.square() / along.square().mean()).item(), abs=1e-6)
    assert split.share(tol=1e-9) == pytest.approx((rotation.square() / along.square().mean()).item(), abs=1e-9)


def test_constants_are_gradients():
    b = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    dead = MLP(
        w_in=torch.zeros(1, 3, dtype=F64), w_out=b[:, None], b_in=torch.tensor([3.0]), activation=activations.ReLU()
    )
    split, x = sphere_hodge_split(dead), unit_points(6, 3)
    assert (split.gradient(x) - project(retract(x), 3 * b)).abs().max() < 1e-15
    assert split.swirl(x).abs().max() == 0
    assert split.share() == 0
    # one linear neuron x_1 e_2 and a constant: E|P f|^2 = 4/15 + 2/3 |b|^2, E[P f_1] = 0, E|R|^2 = 1/6
    linear = one_neuron(activations.Identity(), 3)
    shifted = MLP(w_in=linear.w_in, w_out=linear.w_out, b_out=b, activation=activations.Identity())
    assert sphere_hodge_split(shifted).share() == pytest.approx(1 / 6 / (4 / 15 + 2 / 3 * 5.25), abs=1e-15)
    # and of a relu neuron E[P f_1] = r E[phi (1 - (1 - t^2)/2)] = r (1/8 + 1/16)
    relu = MLP(w_in=linear.w_in, w_out=linear.w_out, b_out=b, activation=activations.ReLU())
    energy = 2 / 15  # half of the linear one
    assert sphere_hodge_split(relu).share() == pytest.approx(
        25 / 64 * energy / (energy + 2 * -2 * 3 / 16 + 2 / 3 * 5.25), abs=1e-15
    )


def test_high_dimensions_converge_to_gauss_space():
    """|v| = sqrt d on the unit sphere, as |v| = 1 on that of radius sqrt d; the difference falls like 1/d."""
    limit = gaussian_hodge_split(one_neuron(activations.GELU(), 3, offset=0.4)).share()
    gaps = [
        abs(sphere_hodge_split(one_neuron(activations.GELU(), d, math.sqrt(d), 0.4)).share() - limit) * d
        for d in (500, 1000, 2000)
    ]
    assert gaps == pytest.approx([gaps[-1]] * 3, rel=0.01)
    assert 0.01 < gaps[-1] < 10


def test_poles_shapes_dtypes_and_batches():
    mlp = random_mlp(6, 4, activations.SiLU())
    split, x = sphere_hodge_split(mlp), unit_points(3, 5, 4)
    for method in (split.potential, split.gradient, split.swirl):
        assert torch.equal(method(x)[1], method(x[1:2])[0])
        single = method(x.float())
        assert single.dtype == torch.float32
        assert (single - method(x)).abs().max() < 2e-5
    poles = torch.cat([split.neurons.direction, -split.neurons.direction])
    assert torch.isfinite(split.gradient(poles)).all()
    assert (surface.gradient(split.potential, poles) - split.gradient(poles)).abs().max() < 1e-12
    assert surface.divergence(split.swirl, 0.999999 * poles + 1e-4 * x.flatten(0, 1)[:12]).isfinite().all()
    by_func = torch.func.vmap(torch.func.grad(split.potential))(x[0])
    assert (project(x[0], by_func) - split.gradient(x[0])).abs().max() < 1e-12


@pytest.mark.parametrize("dim", [2, 5])
def test_parts_are_those_of_the_direction(dim):
    """Measured: equal to the bit at twice the length, within 6e-15 at the others."""
    split, x = sphere_hodge_split(random_mlp(6, dim, activations.GELU())), unit_points(20, dim)
    for method in (split.potential, split.gradient, split.swirl, split.harmonic):
        for length in (2.0, 0.3, 1e-200, 1e200):
            assert (method(length * x) - method(x)).abs().max() < 1e-14
    off = 3 * x
    assert ((split.gradient(off) + split.swirl(off) + split.harmonic(off)) - split.mlp.velocity(x)).abs().max() < 2e-14
    assert split.gradient(torch.zeros(dim, dtype=F64)).isnan().all()


def test_refusals():
    class HardTanh(Activation):
        def __call__(self, z):
            return z.clamp(-1, 1)

    class Step(Activation):
        def __call__(self, z):
            return (z > 0).to(z) + 0 * z

    gated = GatedMLP(w_gate=torch.eye(3), w_up=torch.eye(3), w_out=torch.eye(3))
    with pytest.raises(HelmscopeError, match="mlp is a GatedMLP, but it must be an MLP"):
        sphere_hodge_split(gated)
    with pytest.raises(HelmscopeError, match=r"^mlp is an int, but it must be an MLP$"):
        sphere_hodge_split(3)
    with pytest.raises(HelmscopeError, match="dimension d=1, but a sphere needs d >= 2"):
        sphere_hodge_split(MLP(w_in=torch.ones(2, 1), w_out=torch.ones(1, 2)))
    for activation in (HardTanh(), Step()):
        with pytest.raises(HelmscopeError, match="smooth apart from a corner at 0"):
            sphere_hodge_split(one_neuron(activation, 3, 2.0, 0.3))
    with pytest.raises(HelmscopeError, match="0 to rounding"):
        sphere_hodge_split(one_neuron(activations.ReLU(), 3, 1.0, -2.0)).share()
    for method in ("potential", "gradient", "swirl", "harmonic"):
        with pytest.raises(HelmscopeError, match="x is a list"):
            getattr(sphere_hodge_split(one_neuron(activations.ReLU(), 3)), method)([1.0, 0.0, 0.0])
    with pytest.raises(HelmscopeError, match="tol is -1"):
        sphere_hodge_split(one_neuron(activations.ReLU(), 3)).share(tol=-1.0)
