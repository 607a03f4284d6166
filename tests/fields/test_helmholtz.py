"""The Helmholtz split of MLPs: exact for random weights, against 30-digit loops, and what it is not [Helmholtz
Transformer, no. 3]."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch.func import jacrev, vmap

import support.mlp_oracles as oracles
from helmscope.fields import activations
from helmscope.fields.activations import GELU, Identity, ReLU, Sigmoid, SiLU
from helmscope.fields.helmholtz import HelmholtzSplit, helmholtz, helmholtz_as_printed
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry import surface
from helmscope.geometry.sphere import retract

F64 = torch.float64
NAMES = pytest.mark.parametrize("name", oracles.ACTIVATIONS)
GATED = pytest.mark.parametrize("gated", [False, True])
PARTS = ("potential", "gradient", "swirl", "harmonic")


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def tensors(hidden, dim, gated, seed=0, **options):
    given = oracles.parameters(hidden, dim, gated=gated, seed=seed, **options)
    return {name: torch.tensor(part, dtype=F64) for name, part in given.items()}


def build(given, activation=None):
    return (GatedMLP if "w_gate" in given else MLP)(**given, activation=activation or SiLU())


def neuron(activation, *pairs):
    """The ungated MLP of neurons (v, w)."""
    v, w = (torch.tensor(part, dtype=F64) for part in zip(*pairs, strict=True))
    return MLP(w_in=v, w_out=w.mT, activation=activation)


def jacobian(field, x):
    return vmap(jacrev(field))(x)


def divergence(field, x):
    return jacobian(field, x).diagonal(dim1=-2, dim2=-1).sum(-1)


def gradient_of(potential, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(potential(x).sum(), x)
    return slope


def size(values):
    return float(values.detach().abs().max())


def total(split, x):
    return split.gradient(x) + split.swirl(x) + split.harmonic(x)


def random_mlp(seed):
    """One of 200 over all activations, gated and not, dims 2..16, hidden 1..64, with biases; and two points."""
    rng = random.Random(seed)
    dim, hidden, gated = rng.randint(2, 16), rng.randint(1, 64), bool(seed % 2)
    activation = getattr(activations, list(oracles.ACTIVATIONS)[seed // 2 % 9])()
    return build(tensors(hidden, dim, gated, seed), activation), normal(2, dim, seed=seed)


# ---- the exact split


@pytest.mark.parametrize("block", range(4))
def test_two_hundred_random_mlps(block):
    """Measured over all 200: gradient 1.4e-13, divergence 3.4e-13, sum 2.3e-13, curl of the gradient 1.1e-13."""
    for seed in range(50 * block, 50 * block + 50):
        mlp, x = random_mlp(seed)
        split = helmholtz(mlp)
        assert isinstance(split, HelmholtzSplit)
        assert size(split.gradient(x) - gradient_of(split.potential, x)) < 1e-12
        assert size(divergence(split.swirl, x)) < 1e-12
        assert size(mlp(x) - total(split, x)) < 1e-12
        curl = jacobian(split.gradient, x)
        assert size(curl - curl.mT) < 1e-12
        assert split.constant_neurons.numel() == 0
        assert torch.equal(split.harmonic(x), mlp.b_out.expand_as(x))


@NAMES
@GATED
def test_loop_oracle(name, gated):
    """Relative to the value or 1; measured 8e-16."""
    for seed, (hidden, dim) in enumerate([(1, 2), (4, 3), (6, 2)]):
        given, x = oracles.parameters(hidden, dim, gated=gated, seed=seed), normal(2, dim, seed=seed)
        split = helmholtz(build(tensors(hidden, dim, gated, seed), getattr(activations, name)()))
        for part in ("potential", "gradient", "swirl"):
            exact = [getattr(oracles, part)(given, name, x_i) for x_i in x.tolist()]
            exact = torch.tensor(np.array(exact, dtype=float), dtype=F64)
            assert size(getattr(split, part)(x) - exact) <= 1e-12 * max(1, size(exact)), part


@NAMES
@GATED
def test_divergence_by_finite_differences(name, gated):
    """Of the loops in 30 digits, which the split equals; and of the split itself, as far as float64 allows."""
    given, x = oracles.parameters(3, 3, gated=gated, seed=5), normal(3, seed=5)
    assert abs(oracles.divergence(lambda y: oracles.swirl(given, name, y), x.tolist())) < 1e-15
    mlp = build(tensors(3, 3, gated, seed=5), getattr(activations, name)())
    split, h = helmholtz(mlp), 2.0**-12
    shift = h * torch.eye(3, dtype=F64)
    slopes = [(split.swirl(x + k * shift) - split.swirl(x - k * shift)) / (2 * k * h) for k in (1, 2)]
    rate = ((4 * slopes[0] - slopes[1]) / 3).trace()
    assert abs(rate) < 1e-9
    slopes = [(split.potential(x + k * shift) - split.potential(x - k * shift)) / (2 * k * h) for k in (1, 2)]
    assert size((4 * slopes[0] - slopes[1]) / 3 - split.gradient(x)) < 1e-9


def test_gated_reduces_to_ungated():
    given, x = tensors(7, 4, gated=False), normal(5, 4)
    gated = build({
        "w_gate": given["w_in"], "b_gate": given["b_in"], "w_up": torch.zeros(7, 4), "b_up": torch.ones(7),
        "w_out": given["w_out"], "b_out": given["b_out"],
    })  # fmt: skip
    one, other = helmholtz(gated), helmholtz(build(given))
    for part in PARTS:
        assert size(getattr(one, part)(x) - getattr(other, part)(x)) < 1e-14, part


def test_constants_of_psi_matter_where_gated():
    """psi(0) = 0: at z = 0 only alpha s(0) t g is left of grad U."""
    given, x = tensors(1, 3, gated=True, biases=False), torch.zeros(3, dtype=F64)
    for activation in (Sigmoid(), SiLU()):
        assert torch.equal(helmholtz(build(given, activation)).gradient(x), x)  # t = 0 there


# ---- dead neurons, flat gates, tiny rows


def test_constant_neurons_are_harmonic():
    given, x = tensors(6, 3, gated=False), normal(4, 3)
    given["w_in"][[1, 4]] = 0
    mlp = build(given)
    split = helmholtz(mlp)
    assert split.constant_neurons.tolist() == [1, 4]
    constant = given["b_out"] + given["w_out"][:, [1, 4]] @ SiLU()(given["b_in"][[1, 4]])
    assert size(split.harmonic(x) - constant) < 1e-15
    kept = [0, 2, 3, 5]
    others = helmholtz(MLP(w_in=given["w_in"][kept], w_out=given["w_out"][:, kept], b_in=given["b_in"][kept]))
    live = helmholtz(build(given, GELU()))
    for part in ("potential", "gradient", "swirl"):
        assert size(getattr(live, part)(x) - getattr(others, part)(x)) < 1e-14
    assert size(mlp(x) - total(split, x)) < 1e-14
    assert helmholtz_as_printed(mlp).constant_neurons.tolist() == [1, 4]


def test_gated_neurons_without_gate_are_linear():
    given, x = tensors(5, 3, gated=True), normal(4, 3)
    given["w_gate"][[0, 2, 3]] = 0
    given["w_up"][[2, 4]] = 0  # neuron 2 is constant; neuron 4 is an ungated one, times e
    mlp = build(given)
    split = helmholtz(mlp)
    assert split.constant_neurons.tolist() == [2]
    constant = given["b_out"] + given["w_out"][:, 2] * SiLU()(given["b_gate"][2]) * given["b_up"][2]
    assert size(split.harmonic(x) - constant) < 1e-15
    flat = [0, 3]
    linear = MLP(
        w_in=given["w_up"][flat], b_in=given["b_up"][flat], activation=Identity(),
        w_out=given["w_out"][:, flat] * SiLU()(given["b_gate"][flat]),
    )  # fmt: skip
    del given["b_out"]
    gated = {name: part[:, [1, 4]] if name == "w_out" else part[[1, 4]] for name, part in given.items()}
    parts = [helmholtz(linear), helmholtz(build(gated))]
    for part in ("potential", "gradient", "swirl"):
        assert size(getattr(split, part)(x) - sum(getattr(one, part)(x) for one in parts)) < 1e-14, part
    assert size(mlp(x) - total(split, x)) < 1e-14
    assert size(divergence(split.swirl, x)) < 1e-14
    assert size(split.gradient(x) - gradient_of(split.potential, x)) < 1e-14


@GATED
def test_only_constants(gated):
    given, x = tensors(2, 3, gated), normal(4, 3)
    for name in ("w_in", "w_gate", "w_up"):
        if name in given:
            given[name][:] = 0
    mlp = build(given)
    for split in (helmholtz(mlp), helmholtz_as_printed(mlp)):
        assert split.constant_neurons.tolist() == [0, 1]
        assert size(split.potential(x)) == size(split.gradient(x)) == 0
        assert size(split.swirl(x)) < 1e-15
        assert size(split.harmonic(x) - mlp(x)) < 1e-15


@pytest.mark.parametrize("tiny", [1e-20, 1e-160, 1e-200])
@pytest.mark.parametrize("name", ["Sigmoid", "SiLU", "ReLU"])
@GATED
def test_tiny_rows(name, gated, tiny):
    """A row of length 1e-160, whose square is 0, beside ordinary ones. Gate biases are 0: see ``helmholtz``."""
    given = oracles.parameters(4, 3, gated=gated, seed=2)
    row = "w_gate" if gated else "w_in"
    given[row][1] = [tiny * a for a in given[row][1]]
    if gated:
        given["b_gate"] = [0.0] * 4
    x = normal(2, 3, seed=2)
    mlp = build({part: torch.tensor(value, dtype=F64) for part, value in given.items()}, getattr(activations, name)())
    split = helmholtz(mlp)
    assert split.constant_neurons.numel() == 0
    assert size(mlp(x) - total(split, x)) < 1e-14
    for part in ("gradient", "swirl"):
        exact = [getattr(oracles, part)(given, name, x_i) for x_i in x.tolist()]
        assert size(getattr(split, part)(x) - torch.tensor(np.array(exact, dtype=float), dtype=F64)) < 1e-13, part
    assert size(divergence(split.swirl, x)) < 1e-13
    if not gated or tiny == 1e-20:
        exact = [float(oracles.potential(given, name, x_i)) for x_i in x.tolist()]
        exact = torch.tensor(exact, dtype=F64)
        assert size(split.potential(x) / exact - 1) < 1e-13
        assert size(split.gradient(x) - gradient_of(split.potential, x)) < 1e-13
    assert bool(torch.isfinite(split.potential(x)).all())
    assert size(helmholtz_as_printed(mlp).swirl(x)) < 1e3


@GATED
def test_a_row_that_vanishes_in_the_cast_is_a_constant_there(gated):
    given, x = tensors(3, 2, gated), normal(4, 2).float()
    for name in ("w_in", "w_gate", "w_up"):
        if name in given:
            given[name][0] = 1e-60
    mlp = build(given)
    split = helmholtz(mlp)
    assert split.constant_neurons.numel() == 0
    assert size(mlp(x) - total(split, x)) < 1e-6
    assert bool(torch.isfinite(split.potential(x)).all())


# ---- what is printed


def test_as_printed_agrees_where_rows_are_unit_vectors():
    given, x = tensors(8, 4, gated=False), normal(5, 4)
    given["w_in"] = retract(given["w_in"])
    right, printed = helmholtz(build(given)), helmholtz_as_printed(build(given))
    for part in PARTS:
        assert size(getattr(right, part)(x) - getattr(printed, part)(x)) < 1e-14, part


@NAMES
def test_as_printed_fails_for_other_rows(name):
    given, x = tensors(8, 4, gated=False), normal(5, 4)
    activation = getattr(activations, name)()
    mlp = build(given, activation)
    printed = helmholtz_as_printed(mlp)
    assert size(mlp(x) - total(printed, x)) < 1e-13
    inner = (given["w_in"] * given["w_out"].mT).sum(-1)
    excess = inner * (1 - given["w_in"].square().sum(-1))  # w.v - (w.v) |v|^2 of each neuron
    expected = activation.slope(x @ given["w_in"].mT + given["b_in"]) @ excess
    assert size(divergence(printed.swirl, x) - expected) < 1e-12
    assert expected.abs().min() > 0.1
    assert size(printed.gradient(x) - gradient_of(printed.potential, x)) < 1e-13  # a gradient still


@NAMES
def test_as_printed_fails_where_gated(name):
    given, activation, x = tensors(8, 4, gated=True), getattr(activations, name)(), normal(5, 4)
    mlp = build(given, activation)
    printed, right = helmholtz_as_printed(mlp), helmholtz(mlp)
    g, w = given["w_gate"], given["w_out"].mT
    a, z, t = (w * g).sum(-1) / g.square().sum(-1), x @ g.mT + given["b_gate"], x @ given["w_up"].mT + given["b_up"]
    assert size(printed.potential(x) - (a * activation.potential(z) * t).sum(-1)) < 1e-13
    assert size(printed.gradient(x) - (activation(z) * t * a) @ g) < 1e-13
    assert size(mlp(x) - total(printed, x)) < 1e-12
    curl = jacobian(printed.gradient, x)
    assert size(curl - curl.mT) > 0.5  # "gradient" is none
    assert size(printed.gradient(x) - gradient_of(printed.potential, x)) > 0.1  # and not that of its potential
    assert size(divergence(printed.swirl, x)) > 0.1
    right_curl = jacobian(right.gradient, x)
    assert size(right_curl - right_curl.mT) < 1e-13


# ---- not unique, not orthogonal, not rotational [Helmholtz Transformer, no. 3]


DIAGONAL = [(math.sqrt(0.5), math.sqrt(0.5)), (math.sqrt(0.5), -math.sqrt(0.5))]


def swap(kind):
    """f(x) = (x2, x1) by pairs of ReLU neurons, z = z_+ - (-z)_+."""
    (a, b), (c, d) = DIAGONAL
    eigen = [((a, b), (a, b)), ((c, d), (-c, -d))]
    axes = [((1.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (1.0, 0.0))]
    pairs = eigen if kind == "eigen" else axes
    return [pair for v, w in pairs for pair in ((v, w), (tuple(-e for e in v), tuple(-e for e in w)))]


def test_the_split_depends_on_the_weights():
    x = normal(20, 2)
    eigen, axes = (helmholtz(neuron(ReLU(), *swap(kind))) for kind in ("eigen", "axes"))
    for split in (eigen, axes):
        assert size(split.mlp(x) - x.flip(-1)) < 2e-15
    assert size(eigen.swirl(x)) < 2e-15  # swirl 0
    assert size(axes.gradient(x)) == size(axes.potential(x)) == 0  # swirl 1
    assert torch.equal(axes.swirl(x), x.flip(-1))
    minus = [(v, tuple(-a for a in w)) for v, w in swap("eigen")]
    nothing = neuron(ReLU(), *swap("axes"), *minus)
    assert size(nothing(x)) < 2e-15  # f = 0, R != 0
    assert size(helmholtz(nothing).swirl(x) - x.flip(-1)) < 2e-15


def gaussian_mean(*fields):
    """E <f, g> under N(0, I_2) for fields homogeneous of degree 1: E r^2 = 2 times the mean over the angle, by
    Gauss-Legendre between the corners of the two ReLUs, at pi/2 from the directions 0 and 1.
    """
    corners = sorted((base + math.pi / 2 * side) % (2 * math.pi) for base in (0, 1) for side in (-1, 1))
    nodes, weights = np.polynomial.legendre.leggauss(40)
    mean = 0.0
    for start, end in zip(corners, [*corners[1:], corners[0] + 2 * math.pi], strict=True):
        angle = torch.tensor(start + (end - start) * (nodes + 1) / 2, dtype=F64)
        f, g = (field(torch.stack([angle.cos(), angle.sin()], -1)) for field in fields)
        mean += float((f * g).sum(-1) @ torch.tensor(weights)) * (end - start) / 2
    return 2 * mean / (2 * math.pi)


@pytest.mark.parametrize(
    ("amplitude", "rho", "fraction"),
    [(1.0, 1.0, 1.0760007345934175), (2 * 0.26765815118661035, 1.0, 1.4016665268650967), (0.7, 1.9, None)],
)
def test_swirl_fractions_above_one(amplitude, rho, fraction):
    """Measured 4e-15."""
    cross = 0.26765815118661035
    assert math.sin(1) * (math.sin(1) + (math.pi - 1) * math.cos(1)) / (2 * math.pi) == pytest.approx(cross, rel=1e-15)
    mlp = neuron(
        ReLU(),
        ((1.0, 0.0), (amplitude, 0.0)),
        ((math.cos(1), math.sin(1)), (-rho * math.sin(1), rho * math.cos(1))),
    )
    split = helmholtz(mlp)
    assert abs(gaussian_mean(split.gradient, split.gradient) - amplitude**2 / 2) < 1e-14
    assert abs(gaussian_mean(split.swirl, split.swirl) - rho**2 / 2) < 1e-14
    assert abs(gaussian_mean(split.gradient, split.swirl) + amplitude * rho * cross) < 1e-14
    whole = gaussian_mean(mlp, mlp)
    assert abs(whole - (amplitude**2 / 2 + rho**2 / 2 - 2 * amplitude * rho * cross)) < 1e-14
    if fraction is not None:
        assert abs(gaussian_mean(split.swirl, split.swirl) / whole - fraction) < 1e-14
        assert 1 - 4 * cross**2 == pytest.approx(1 / 1.4016665268650967, rel=1e-15)


@NAMES
def test_swirl_is_as_symmetric_as_it_is_rotational(name):
    """DR_j = r v^T s'(z), r.v = 0: half of its square is symmetric. Norms agree to 5e-16."""
    activation = getattr(activations, name)()
    given, x = tensors(1, 5, gated=False), normal(4, 5)
    slope = jacobian(helmholtz(build(given, activation)).swirl, x)
    symmetric, rotational = (((slope + sign * slope.mT) / 2).square().sum((-2, -1)).sqrt() for sign in (1, -1))
    assert size(symmetric - rotational) < 1e-15 * max(1, size(symmetric))
    v, w = given["w_in"][0], given["w_out"][:, 0]
    r = w - (w @ v) / (v @ v) * v
    expected = activation.slope(x @ v + given["b_in"])[:, None, None] * torch.outer(r, v)
    assert size(slope - expected) < 1e-14
    assert size(slope) > 0.1


# ---- on the sphere [Helmholtz Transformer, no. 3]


@NAMES
@pytest.mark.parametrize("d", [2, 3, 6])
def test_surface_divergence(name, d):
    activation = getattr(activations, name)()
    given, x = tensors(7, d, gated=False, biases=False), retract(normal(5, d))
    split = helmholtz(build(given, activation))
    v, w = given["w_in"], given["w_out"].mT
    a = (w * v).sum(-1) / v.square().sum(-1)
    z, rx = x @ v.mT, x @ (w - a[:, None] * v).mT
    s, slope = activation(z), activation.slope(z)
    expected = -(rx * (z * slope + (d - 1) * s)).sum(-1)
    assert size(surface.divergence(split.swirl, x) - expected) < 1e-13
    assert size(expected) > 0.1  # "divergence-free on the sphere" is wrong
    bent = ((w * v).sum(-1) * slope - a * z * z * slope - (d - 1) * a * z * s).sum(-1)
    assert size(surface.laplacian(split.potential, x) - bent) < 1e-13
    assert size(surface.divergence(split.gradient, x) - bent) < 1e-13
