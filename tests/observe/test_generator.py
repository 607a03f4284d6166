"""Generators against derivatives along great circles in 30 digits, layers, and digits of [Helmholtz Transformer, no. 5
and 8]."""

from __future__ import annotations

import math
from itertools import product

import mpmath
import numpy as np
import pytest
import torch

import helmscope as hs
import support.mechanism_oracles as oracles
import support.oracles as attention_oracles
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.fields.noise import (
    DivergenceForm,
    IsotropicNoise,
    Ito,
    LayerNormChain,
    MatrixNoise,
    Stratonovich,
)
from helmscope.fields.placement import PreNorm
from helmscope.geometry import surface
from helmscope.observe.generator import (
    ambient_generator,
    check_points,
    discrete_generator,
    sphere_generator,
    tangent_velocity,
)

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
X = hs.Uniform(4, 3).sample(2, seed=0)
ROOT = torch.randn(3, 3, dtype=F64, generator=DRAW)
M = ROOT @ ROOT.T
# -c P M x is the drift of each process for constant noise
PROCESSES = {LayerNormChain(): 2, Stratonovich(): 1, Ito(): 0, DivergenceForm(): 3}


def still(x):
    return torch.zeros_like(x)


def probe(x):
    return x[..., 0] * x[..., 1] + torch.sin(x[..., 2])


def probe_of_digits(x):
    return x[0] * x[1] + mpmath.sin(x[2])


def wavy(x):
    return torch.sin(2 * x[..., 0] - x[..., 1]) * torch.exp(x[..., 2]) + x[..., 1] ** 4


def wavy_of_digits(x):
    return mpmath.sin(2 * x[0] - x[1]) * mpmath.exp(x[2]) + x[1] ** 4


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
def test_generator_is_the_derivative_along_great_circles(process):
    ours = sphere_generator(hs.SA(2.0), wavy, X, noise=MatrixNoise(M, process=process))
    for s, i in product(range(2), range(4)):
        x = X[s, i]
        pull = (M @ x) - (x @ M @ x) * x
        velocity = torch.tensor(attention_oracles.sa_velocity(X[s].tolist(), 2.0)[i], dtype=F64)
        drift = (velocity - PROCESSES[process] * pull).tolist()
        exact = oracles.sphere_generator(wavy_of_digits, x.tolist(), drift, M.tolist())
        assert ours[s, i].item() == pytest.approx(exact, rel=0, abs=5e-14)


def test_without_noise_it_is_the_rate_along_the_flow():
    for field in (hs.SA(2.0), hs.USA(1.0, causal=True)):
        rate = sphere_generator(field, wavy, X)
        h = 1e-3
        ahead, behind = (X + t * field(X) for t in (h, -h))
        centered = (wavy(hs.sphere.retract(ahead)) - wavy(hs.sphere.retract(behind))) / (2 * h)
        assert (rate - centered).abs().max() < 1e-5
    weights = torch.tensor([1.0, 2.0, 0.0, 0.5], dtype=F64)
    weighted = sphere_generator(hs.SA(2.0), wavy, X, weights=weights)
    velocity = hs.SA(2.0)(X, weights=weights)
    assert torch.equal(weighted, (velocity * surface.gradient(wavy, X)).sum(-1))
    # a plain callable is projected
    ambient = sphere_generator(lambda x: x + velocity, wavy, X)
    assert (ambient - weighted).abs().max() < 1e-15
    assert (tangent_velocity(lambda x: x + velocity, X)(X) - velocity).abs().max() < 1e-15


DIGITS = {LayerNormChain(): -2, Stratonovich(): -3, Ito(): -4, DivergenceForm(): -1}


@pytest.mark.parametrize("process", DIGITS, ids=lambda p: type(p).__name__)
def test_digits_of_the_four_processes(process):
    """[Helmholtz Transformer, no. 5]: M = diag(1, 2, 3) at (1, 1, 1)/sqrt 3, phi = x_1."""
    x = torch.ones(1, 3, dtype=F64) / math.sqrt(3)
    noise = MatrixNoise(torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=F64)), process=process)
    value = sphere_generator(still, lambda x: x[..., 0], x, noise=noise).item()
    assert value == pytest.approx(DIGITS[process] / math.sqrt(3), rel=1e-15)


def test_isotropic_noise_is_the_laplacian():
    for process in PROCESSES:
        ours = sphere_generator(still, wavy, X, noise=IsotropicNoise(0.7, process=process))
        assert (ours - 0.7 * surface.laplacian(wavy, X)).abs().max() < 5e-15
    zonal = sphere_generator(
        still, lambda x: 3 * x[..., 0] ** 2 - 1, X, noise=IsotropicNoise(0.7)
    )  # degree 2: -k (k + d - 2)
    assert (zonal + 0.7 * 6 * (3 * X[..., 0] ** 2 - 1)).abs().max() < 1e-14


def one_axis_at_a_time():
    """Six jumps of covariance I, equally likely."""
    axes = math.sqrt(3) * torch.eye(3, dtype=F64)
    return torch.cat([axes, -axes]), torch.full((6,), 1 / 6, dtype=F64)


def gaussian():
    """Gauss-Hermite nodes and weights."""
    nodes, mass = np.polynomial.hermite_e.hermegauss(20)
    chances = [math.prod(m) for m in product(mass / mass.sum(), repeat=3)]
    return torch.tensor(list(product(nodes, repeat=3)), dtype=F64), torch.tensor(chances, dtype=F64)


def test_the_noisy_layer_has_the_generator_of_the_chain():
    """E[phi(N(x + sqrt(eps) xi)) - phi(x)] / eps, E xi xi^T = 2 M, tends to -2/sqrt 3; the digits of [Helmholtz
    Transformer, no. 5]."""
    scale = torch.tensor([2.0, 4.0, 6.0], dtype=F64).sqrt()
    x = torch.ones(3, dtype=F64) / math.sqrt(3)

    def chain(eps, law):
        jumps, chance = law()
        moved = discrete_generator(
            lambda y: hs.sphere.retract(y + math.sqrt(eps) * jumps * scale),
            lambda y: y[..., 0],
            x.expand(len(jumps), 3),
            epsilon=eps,
        )
        return float(chance @ moved)

    for eps, digits in ((1e-2, -1.4492), (1e-3, -1.18746), (1e-4, -1.15801)):
        assert chain(eps, one_axis_at_a_time) == pytest.approx(digits, rel=0, abs=3e-5)
    for law in (one_axis_at_a_time, gaussian):
        h = 4e-4
        limit = (chain(h, law) - 6 * chain(h / 2, law) + 8 * chain(h / 4, law)) / 3
        assert limit == pytest.approx(-2 / math.sqrt(3), rel=0, abs=2e-6)


def test_deterministic_layer():
    """[Helmholtz Transformer, no. 8]: the layer misses L phi by eps [1/2 Hess_S phi(Pf, Pf) - <x, f> <grad phi,
    Pf>]."""
    x, f = torch.tensor([[1.0, 2.0, 2.0]], dtype=F64) / 3, torch.tensor([0.3, -0.5, 0.7], dtype=F64)

    def error(eps):
        layer = discrete_generator(lambda y: hs.sphere.retract(y + eps * f), probe, x, epsilon=eps)
        return ((layer - sphere_generator(lambda y: f.expand_as(y), probe, x)) / eps).item()

    h = 2.0**-9
    limit = (error(h) - 6 * error(h / 2) + 8 * error(h / 4)) / 3
    assert limit == pytest.approx(-0.6962566498755095, rel=0, abs=1e-7)
    pf = hs.sphere.project(x, f)
    curvature = (pf @ surface.hessian(probe, x)[0] @ pf.T).item() / 2
    closed = curvature - (x @ f).item() * (surface.gradient(probe, x) * pf).sum().item()
    assert closed == pytest.approx(-0.6962566498755095, rel=1e-14)


def test_ambient_generator_is_the_partial_derivatives():
    points = 2 * torch.randn(2, 3, 3, dtype=F64, generator=DRAW)
    drift = torch.randn(2, 3, 3, dtype=F64, generator=DRAW)
    root = torch.randn(2, 3, 3, 3, dtype=F64, generator=DRAW)
    sigma = root @ root.mT
    ours = ambient_generator(drift, sigma, wavy, points)
    for s, i in product(range(2), range(3)):
        args = (points[s, i], drift[s, i], sigma[s, i])
        exact = oracles.ambient_generator(wavy_of_digits, *(a.tolist() for a in args))
        assert ours[s, i].item() == pytest.approx(exact, rel=1e-13)
    one = ambient_generator(drift[0, 0], sigma[0, 0], wavy, points)
    assert one[1, 2].item() == pytest.approx(ambient_generator(drift[0, 0], sigma[0, 0], wavy, points[1, 2]).item())
    # linear and constant probes have no second order
    assert (ambient_generator(drift, sigma, lambda x: x[..., 0], points) - drift[..., 0]).abs().max() == 0
    assert ambient_generator(drift, sigma, lambda x: 0 * x[..., 0] + 1, points).abs().max() == 0


def test_gradients():
    x = X[:1].clone().requires_grad_()
    noise = MatrixNoise(M)
    assert torch.autograd.gradcheck(
        lambda y: sphere_generator(hs.SA(2.0), wavy, hs.sphere.retract(y), noise=noise), x, atol=1e-5
    )
    assert torch.autograd.gradcheck(lambda y: ambient_generator(y, M, wavy, y), x)
    assert not sphere_generator(hs.SA(2.0), wavy, X, noise=noise).requires_grad


MLP_TURN = MLP(w_in=torch.eye(3), w_out=torch.eye(3))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sphere_generator(hs.SA, wavy, X), "field is .*SA.*must be a field"),
        (lambda: sphere_generator(3.0, wavy, X), "field is 3.0"),
        (lambda: sphere_generator(hs.SA(1.0), wavy, 2 * X), "norm 2"),
        (lambda: sphere_generator(hs.SA(1.0), wavy, X, noise=0.1), "noise is 0.1.*IsotropicNoise"),
        (
            lambda: sphere_generator(hs.SA(1.0), wavy, X, noise=MatrixNoise(torch.eye(2))),
            r"diffusion has shape \(2, 2\)",
        ),
        (lambda: sphere_generator(hs.SA(1.0, value=torch.ones(2, 2)), wavy, X), r"value has shape \(2, 2\)"),
        (lambda: sphere_generator(still, wavy, X, weights=torch.ones(4)), "weights is given.*function"),
        (lambda: sphere_generator(hs.SA(1.0), wavy, X, weights=torch.ones(3)), r"weights is \(3,\)"),
        (lambda: sphere_generator(hs.SA(1.0), lambda x: x, X), r"^probe returns shape \(2, 4, 3\)"),
        (
            lambda: sphere_generator(hs.SA(1.0), lambda x: x, X, noise=MatrixNoise(M)),
            r"^probe returns shape \(2, 4, 3\)",
        ),
        (lambda: sphere_generator(hs.SA(1.0), lambda x: 3.0, X), "^probe returns a float at points.*one number"),
        (lambda: sphere_generator(hs.SA(1.0), 3, X), "^probe is an int, but it must be a callable"),
        (lambda: sphere_generator(hs.SA(1.0), X, X), "^probe is a Tensor, but it must be a callable"),
        (lambda: ambient_generator(X, M, 3, X), "^probe is an int, but it must be a callable"),
        (lambda: ambient_generator(X, M, lambda x: 3.0, X), "^probe returns a float"),
        (lambda: ambient_generator(X, M, lambda x: x[..., 0] > 0, X), "^probe returns torch.bool"),
        (lambda: discrete_generator(still, 3, X, epsilon=0.1), "^probe is an int, but it must be a callable"),
        (
            lambda: discrete_generator(still, torch.Tensor, X, epsilon=0.1),
            r"^probe is a \w+, but it must be a callable",
        ),
        (lambda: discrete_generator(3, wavy, X, epsilon=0.1), "^layer is an int, but it must be a callable"),
        (
            lambda: sphere_generator(Block(hs.SA(1.0), MLP_TURN, placement=PreNorm()), wavy, X),
            "residual stream.*sphere",
        ),
        (lambda: tangent_velocity(lambda x: x[..., :2], X)(X), "returns .*2, 4, 2"),
        (lambda: ambient_generator(X, M, lambda x: x, X), r"probe returns shape \(2, 4, 3\).*one number"),
        (lambda: ambient_generator(X, M[:2], wavy, X), r"diffusion has shape \(2, 3\)"),
        (lambda: ambient_generator(X[:, :2], M, wavy, X), r"drift has shape \(2, 2, 3\)"),
        (lambda: ambient_generator(X.float(), M, wavy, X), "drift .*float32"),
        (lambda: ambient_generator(X, M * math.inf, wavy, X), "diffusion holds NaN or infinite"),
        (lambda: check_points(torch.tensor(1.0)), r"x has shape \(\)"),
        (lambda: check_points(torch.ones(2, dtype=torch.int64)), "x has dtype torch.int64"),
        (lambda: discrete_generator(still, wavy, X, epsilon=0.0), "epsilon is 0.0.*> 0"),
        (lambda: discrete_generator(lambda x: x[0], wavy, X, epsilon=0.1), r"layer returns \(4, 3\)"),
        (lambda: discrete_generator(still, lambda x: 1.0, X, epsilon=0.1), "probe returns a float"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
