"""The Hodge split under N(0, I) against closed forms, mpmath, SciPy and least squares. Bounds: a few times what was
measured.
"""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.special
import torch

from helmscope.fields import activations
from helmscope.fields.activations import Activation
from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.hodge_gaussian import gaussian_hodge_split, linear_hodge_split
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.types import HelmscopeError

F64 = torch.float64
ALL = [
    *(activations.Identity(), activations.ReLU(), activations.SquaredReLU(), activations.Tanh(), activations.Sigmoid()),
    *(activations.SiLU(), activations.GELU(), activations.GELUTanh(), activations.QuickGELU()),
]


class Square(Activation):
    def __call__(self, z):
        return z * z


class Sine(Activation):
    def __call__(self, z):
        return torch.sin(z)


class HardTanh(Activation):
    def __call__(self, z):
        return z.clamp(-1, 1)


def one_neuron(activation, length=1.0, offset=0.0, out=(0.0, 1.0, 0.0)) -> MLP:
    """v along the first axis of R^3."""
    return MLP(
        w_in=torch.tensor([[length, 0.0, 0.0]], dtype=F64),
        w_out=torch.tensor(out, dtype=F64)[:, None],
        b_in=torch.tensor([offset], dtype=F64),
        activation=activation,
    )


def random_mlp(hidden, dim, activation, *, seed=0, length=1.0, bias=True) -> MLP:
    g = torch.Generator().manual_seed(seed)
    v, w, c, b = (
        torch.randn(*size, dtype=F64, generator=g) for size in ((hidden, dim), (dim, hidden), (hidden,), (dim,))
    )
    return MLP(w_in=length * v, w_out=w, b_in=c if bias else None, b_out=b if bias else None, activation=activation)


def normal_points(*shape, seed=1) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


SHARES = [
    (activations.Identity(), 1 / 2),
    (activations.ReLU(), 3 / 8),
    (Square(), 4 / 9),
    (activations.Tanh(), 0.518716457384691),
    (activations.SiLU(), 0.470147639803493),
    (activations.GELU(), 0.445976301172781),
    (activations.GELUTanh(), 0.446006411275565),
]


@pytest.mark.parametrize(("activation", "share"), SHARES)
def test_swirl_share_of_a_neuron_that_is_all_swirl_by_weights(activation, share):
    mlp = one_neuron(activation)
    assert gaussian_hodge_split(mlp).share() == pytest.approx(
        share, abs=2e-14
    )  # 1.4e-14 for tanh, whose oracle ends there
    if not isinstance(activation, Square):
        x = normal_points(4, 3)
        assert torch.equal(helmholtz(mlp).swirl(x), mlp(x))


def exact_relu_share(corner):
    """Of phi = (z - a)_+: 1 - E[phi h] / E[phi^2], E[phi h] = Var psi by parts."""
    with mpmath.workdps(30):
        a = mpmath.mpf(corner)
        ends = [a, a + 1, a + 3, a + 10, a + 30]
        moment = lambda n: mpmath.quad(lambda t: (t - a) ** n * mpmath.npdf(t), ends)  # noqa: E731
        return float(1 - (moment(4) / 4 - (moment(2) / 2) ** 2) / moment(2))


@pytest.mark.parametrize("corner", [-3.0, 0.5, 4.0, 10.0])
def test_relu_share_keeps_its_digits_where_the_neuron_hardly_fires(corner):
    exact = exact_relu_share(corner)
    for length in (1e-7, 1.0, 1e5):
        share = gaussian_hodge_split(one_neuron(activations.ReLU(), length, -corner * length)).share()
        assert share == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("dim", [2, 5])
def test_parts_add_up_and_have_their_defining_properties(activation, dim):
    mlp = random_mlp(7, dim, activation, length=2.0)
    split, x = gaussian_hodge_split(mlp), normal_points(50, dim).requires_grad_(True)
    gradient, swirl = split.gradient(x), split.swirl(x)
    scale = mlp(x).abs().max().item()
    assert (gradient + swirl + split.harmonic(x) - mlp(x)).abs().max() < 2e-15 * scale
    (numeric,) = torch.autograd.grad(split.potential(x).sum(), x)
    assert (numeric - gradient).abs().max() < 1e-12 * scale  # 2e-13
    divergence = torch.stack(
        [torch.autograd.grad(swirl[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(dim)]
    ).sum(0)
    # div(rho R) / rho = div R - x.R
    assert (divergence - (x * swirl).sum(-1)).abs().max() < 1e-11 * scale  # 2e-12


def polar_rule(directions):
    """Points and weights for N(0, I_2), exact to rounding for what is smooth apart from lines e.x = 0."""
    turns = torch.atan2(directions[:, 0], -directions[:, 1])
    cuts = torch.cat([turns, turns + math.pi]).remainder(2 * math.pi).sort().values.numpy()
    node, weight = np.polynomial.legendre.leggauss(24)
    ends = np.append(cuts, cuts[0] + 2 * math.pi)
    angle = ((ends[1:] + ends[:-1])[:, None] / 2 + (ends[1:] - ends[:-1])[:, None] / 2 * node).ravel()
    angle_weight = ((ends[1:] - ends[:-1])[:, None] / 2 * weight).ravel() / (2 * math.pi)
    radius = (np.arange(12)[:, None] + (node + 1) / 2).ravel()
    radius_weight = (weight / 2 * np.ones((12, 1))).ravel() * radius * np.exp(-(radius**2) / 2)
    x = torch.from_numpy(
        np.stack([np.multiply.outer(radius, np.cos(angle)), np.multiply.outer(radius, np.sin(angle))], -1)
    )
    return x.flatten(0, 1), torch.from_numpy(np.multiply.outer(radius_weight, angle_weight).ravel())


def test_many_relu_neurons_are_orthogonal_to_every_gradient_by_quadrature():
    mlp = random_mlp(6, 2, activations.ReLU(), bias=False)
    split = gaussian_hodge_split(mlp)
    x, mass = polar_rule(split.neurons.direction)
    assert mass.sum().item() == pytest.approx(1, abs=1e-14)
    gradient, swirl, force = split.gradient(x), split.swirl(x), mlp(x)
    assert abs((mass * (gradient * swirl).sum(-1)).sum().item()) < 1e-13
    for i in range(6):
        for j in range(6 - i):
            slopes = i * x[:, 0] ** max(i - 1, 0) * x[:, 1] ** j, j * x[:, 0] ** i * x[:, 1] ** max(j - 1, 0)
            assert abs((mass * (torch.stack(slopes, -1) * swirl).sum(-1)).sum().item()) < 2e-12
    share = ((mass * swirl.square().sum(-1)).sum() / (mass * force.square().sum(-1)).sum()).item()
    assert split.share() == pytest.approx(share, abs=1e-6)  # the tolerance
    assert split.share(tol=3e-7) == pytest.approx(share, abs=3e-7)


def test_share_and_gradient_are_the_least_squares_fit():
    """min E|f - grad p|^2 over polynomials p of degree 30 in the plane, by Gauss-Hermite quadrature."""
    mlp = random_mlp(7, 2, activations.Tanh(), length=0.2)
    mlp.w_in[5:] = torch.stack([-1.3 * mlp.w_in[0], 0.8 * mlp.w_in[1]])  # opposite, and parallel
    node, weight = scipy.special.roots_hermitenorm(64)
    keep = weight > 1e-30
    node, weight = node[keep], weight[keep] / weight.sum()
    x = np.stack(np.meshgrid(node, node, indexing="ij"), -1).reshape(-1, 2)
    root = np.sqrt(np.multiply.outer(weight, weight).ravel())[:, None]
    degree = 30
    value = np.stack(
        [scipy.special.eval_hermitenorm(k, node) / math.sqrt(math.factorial(k)) for k in range(degree + 1)]
    )
    slope = np.concatenate([np.zeros((1, len(node))), value[:-1] * np.sqrt(np.arange(1, degree + 1))[:, None]])
    pairs = [(i, j) for i in range(degree + 1) for j in range(degree + 1 - i) if i + j]
    columns = [
        np.stack([np.multiply.outer(slope[i], value[j]), np.multiply.outer(value[i], slope[j])], -1).reshape(-1, 2)
        for i, j in pairs
    ]
    matrix = np.stack([(root * column).ravel() for column in columns], -1)
    points = torch.from_numpy(x)
    force = (root * mlp(points).numpy()).ravel()
    solution, *_ = np.linalg.lstsq(matrix, force, rcond=None)
    left = force - matrix @ solution
    split = gaussian_hodge_split(mlp)
    assert split.share(tol=1e-11) == pytest.approx(left @ left / (force @ force), abs=1e-11)
    ours = (root * split.swirl(points).numpy()).ravel()
    assert np.linalg.norm(ours - left) < 1e-7 * np.linalg.norm(force)  # what degree 30 leaves


@pytest.mark.parametrize("activation", [activations.ReLU(), activations.GELU()])
def test_share_by_monte_carlo_in_three_dimensions(activation):
    mlp = random_mlp(20, 3, activation, length=2.0, seed=4)
    split, x = gaussian_hodge_split(mlp), normal_points(60_000, 3)
    gradient, swirl, force = split.gradient(x), split.swirl(x), mlp(x)
    swirls, forces, mixed = swirl.square().sum(-1), force.square().sum(-1), (gradient * swirl).sum(-1)
    share = split.share()
    for sample in (mixed, swirls - share * forces):  # both have mean 0
        assert abs(sample.mean().item()) < 4 * sample.std().item() / math.sqrt(len(x))


def test_parallel_rows_are_summed_without_a_series():
    """[Helmholtz Transformer, no. 3]: f(x) = (x_2, x_1) by ReLU pairs along its eigenvectors or along the axes is one
    function."""
    axes = torch.eye(2, dtype=F64)
    eigen = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64) / math.sqrt(2)
    x = normal_points(9, 2)
    sign = torch.tensor([[1.0], [-1.0]], dtype=F64)
    for rows, out in ((axes, axes.flip(0)), (eigen, sign * eigen)):
        mlp = MLP(w_in=torch.cat([rows, -rows]), w_out=torch.cat([out, -out]).mT, activation=activations.ReLU())
        split = gaussian_hodge_split(mlp)
        assert split.share() < 1e-14
        assert (split.gradient(x) - x.flip(-1)).abs().max() < 5e-15
    both = MLP(  # the difference of the two
        w_in=torch.cat([axes, -axes, eigen, -eigen]),
        w_out=torch.cat([axes.flip(0), -axes.flip(0), -sign * eigen, sign * eigen]).mT,
        activation=activations.ReLU(),
    )
    assert gaussian_hodge_split(both).swirl(x).abs().max() < 5e-15
    with pytest.raises(HelmscopeError, match="0 to rounding, but a share needs a force"):
        gaussian_hodge_split(both).share()


def test_share_of_opposite_neurons_with_biases():
    """Two neurons on one line are one with phi = relu(z + 1/2) + 2 relu(1/3 - z), and E[phi h] = Var psi."""
    mlp = MLP(
        w_in=torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=F64),
        w_out=torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=F64),
        b_in=torch.tensor([1 / 2, 1 / 3], dtype=F64),
        activation=activations.ReLU(),
    )
    psi = lambda t: max(t + 0.5, 0.0) ** 2 / 2 - max(1 / 3 - t, 0.0) ** 2  # noqa: E731
    phi = lambda t: max(t + 0.5, 0.0) + 2 * max(1 / 3 - t, 0.0)  # noqa: E731

    def mean(f):
        cuts = [-12.0, -0.5, 1 / 3, 12.0]
        return sum(
            scipy.integrate.quad(lambda t: f(t) * math.exp(-t * t / 2) / math.sqrt(2 * math.pi), a, b, epsabs=1e-14)[0]
            for a, b in itertools.pairwise(cuts)
        )

    explained = mean(lambda t: psi(t) ** 2) - mean(psi) ** 2
    assert gaussian_hodge_split(mlp).share() == pytest.approx(1 - explained / mean(lambda t: phi(t) ** 2), abs=1e-12)


def test_constants_are_gradients():
    alive = random_mlp(4, 3, activations.GELU())
    dead = MLP(
        w_in=torch.cat([alive.w_in, torch.zeros(1, 3, dtype=F64)]),
        w_out=torch.cat([alive.w_out, torch.ones(3, 1, dtype=F64)], -1),
        b_in=torch.cat([alive.b_in, torch.tensor([2.0], dtype=F64)]),
        b_out=alive.b_out,
        activation=activations.GELU(),
    )
    same = MLP(
        w_in=alive.w_in,
        w_out=alive.w_out,
        b_in=alive.b_in,
        b_out=alive.b_out + activations.GELU()(torch.tensor(2.0, dtype=F64)),
        activation=activations.GELU(),
    )
    x = normal_points(5, 3)
    one, two = gaussian_hodge_split(dead), gaussian_hodge_split(same)
    assert (one.gradient(x) - two.gradient(x)).abs().max() < 1e-14
    assert (one.swirl(x) - two.swirl(x)).abs().max() < 1e-14
    assert one.share() == pytest.approx(two.share(), abs=1e-14)
    assert torch.equal(one.harmonic(x), torch.zeros_like(x))
    # a relu neuron has E phi = 1/sqrt(2 pi), E phi^2 = 1/2, E|R|^2 = 3/16
    shifted = one_neuron(activations.ReLU())
    shifted = MLP(
        w_in=shifted.w_in,
        w_out=shifted.w_out,
        b_out=torch.tensor([0.0, 3.0, 4.0], dtype=F64),
        activation=activations.ReLU(),
    )
    assert gaussian_hodge_split(shifted).share() == pytest.approx(
        3 / 16 / (0.5 + 6 / math.sqrt(2 * math.pi) + 25), abs=1e-15
    )
    only = MLP(
        w_in=torch.zeros(2, 3),
        w_out=torch.ones(3, 2),
        b_out=torch.tensor([1.0, 2.0, 3.0]),
        activation=activations.ReLU(),
    )
    assert gaussian_hodge_split(only).share() == 0
    assert torch.equal(gaussian_hodge_split(only).gradient(x), torch.tensor([1.0, 2.0, 3.0], dtype=F64).expand(5, 3))


@pytest.mark.parametrize("length", [1e-160, 1e-9, 1e-3])
def test_tiny_rows_are_nearly_constants(length):
    mlp = one_neuron(activations.SiLU(), length, 1.5, out=(1.0, 2.0, 3.0))
    x = normal_points(6, 3)
    split = gaussian_hodge_split(mlp)
    assert split.swirl(x).abs().max() < 10 * length + 1e-14
    assert (split.gradient(x) + split.swirl(x) - mlp(x)).abs().max() < 5e-15


def test_shapes_dtypes_batches_and_transforms():
    mlp = random_mlp(6, 3, activations.GELU())
    split, x = gaussian_hodge_split(mlp), normal_points(4, 5, 3)
    assert split.potential(x).shape == (4, 5)
    assert split.gradient(x).shape == split.swirl(x).shape == (4, 5, 3)
    for method in (split.potential, split.gradient, split.swirl):
        assert torch.equal(method(x)[1], method(x[1:2])[0])
        single = method(x.float())
        assert single.dtype == torch.float32
        assert (single - method(x.float().double())).abs().max() < 1e-6
        assert (method(x[2, 3]) - method(x)[2, 3]).abs().max() < 4e-15
    by_func = torch.func.vmap(torch.func.grad(split.potential))(x[0])
    assert (by_func - split.gradient(x[0])).abs().max() < 1e-13
    assert torch.autograd.gradcheck(split.swirl, (x[0].clone().requires_grad_(True),))
    # at the very edge of two panels the derivative is still there
    origin = torch.zeros(3, dtype=F64)
    unbiased = gaussian_hodge_split(random_mlp(6, 3, activations.GELU(), bias=False))
    assert (torch.func.grad(unbiased.potential)(origin) - unbiased.gradient(origin)).abs().max() < 1e-13
    assert split.gradient(torch.full((3,), torch.nan, dtype=F64)).isnan().all()


def test_a_custom_activation():
    class Leaky(Activation):
        def __call__(self, z):
            return torch.where(z > 0, z, z / 10)

    # E[phi h] = Var psi
    split = gaussian_hodge_split(one_neuron(Leaky(), 2.0))
    psi2, mean, square = 3 / 8 * (1 + 1 / 100), (1 + 1 / 10) / 4, (1 + 1 / 100) / 2  # psi = z^2/2 above, z^2/20 below
    assert split.share() == pytest.approx(1 - (psi2 - mean**2) / square, abs=1e-14)
    with pytest.raises(HelmscopeError, match="no table of its potential"):
        split.potential(torch.zeros(3, dtype=F64))


def test_refusals():
    gated = GatedMLP(w_gate=torch.eye(3), w_up=torch.eye(3), w_out=torch.eye(3))
    with pytest.raises(HelmscopeError, match="mlp is a GatedMLP, but it must be an MLP: a gated neuron is quadratic"):
        gaussian_hodge_split(gated)
    with pytest.raises(HelmscopeError, match=r"^mlp is a NoneType, but it must be an MLP$"):
        gaussian_hodge_split(None)
    with pytest.raises(
        HelmscopeError, match=r"^activation is Sine, .* smooth apart from a corner at 0 and not oscillate: the profile"
    ):
        gaussian_hodge_split(one_neuron(Sine()))
    with pytest.raises(HelmscopeError, match="smooth apart from a corner"):
        gaussian_hodge_split(one_neuron(HardTanh(), offset=0.3))
    with pytest.raises(HelmscopeError, match=r"E\|f\|\^2 = 0.0e\+00"):
        gaussian_hodge_split(one_neuron(activations.ReLU(), out=(0.0, 0.0, 0.0))).share()
    with pytest.raises(HelmscopeError, match="0 to rounding"):
        gaussian_hodge_split(one_neuron(activations.GELU(), 1.0, -40.0)).share()
    split = gaussian_hodge_split(random_mlp(8, 2, activations.ReLU()))
    for tol in (0.0, -1.0, "x"):
        with pytest.raises(HelmscopeError, match="tol is"):
            split.share(tol=tol)
    with pytest.raises(HelmscopeError, match="x has shape"):
        split.gradient(torch.zeros(4, 3))
    near = MLP(
        w_in=torch.tensor([[1.0, 0.0], [1.0, 1e-5]], dtype=F64),
        w_out=torch.eye(2, dtype=F64),
        activation=activations.ReLU(),
    )
    with pytest.raises(HelmscopeError, match="tol is 1e-12, but for this mlp it must be at least"):
        gaussian_hodge_split(near).share(tol=1e-12)
    assert 0 < gaussian_hodge_split(near).share() < 1


def test_linear_force_under_any_normal_law():
    split = linear_hodge_split(
        torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64), torch.diag(torch.tensor([1.0, 4.0], dtype=F64))
    )
    assert (split.symmetric - torch.tensor([[0.0, 0.8], [0.8, 0.0]], dtype=F64)).abs().max() < 1e-16
    assert split.share == pytest.approx(0.2, abs=1e-16)
    for seed, dim in ((0, 1), (1, 3), (2, 6)):
        m, root = normal_points(dim, dim, seed=seed), normal_points(dim, dim, seed=seed + 9)
        c = root @ root.mT + 0.1 * torch.eye(dim, dtype=F64)
        split = linear_hodge_split(m, c)
        s = scipy.linalg.solve_sylvester(c.numpy(), c.numpy(), (m @ c + c @ m.mT).numpy())
        assert np.abs(split.symmetric.numpy() - s).max() < 1e-12
        assert (split.symmetric + split.swirl - m).abs().max() < 1e-15
        assert abs(torch.trace(split.symmetric @ c @ split.swirl.mT).item()) < 1e-12  # orthogonal
        assert (split.swirl @ c + (split.swirl @ c).mT).abs().max() < 1e-12  # div(rho R) = 0
    m = normal_points(3, 3)
    linear = linear_hodge_split(m, torch.eye(3, dtype=F64))
    mlp = MLP(w_in=torch.eye(3, dtype=F64), w_out=m, activation=activations.Identity())
    split, x = gaussian_hodge_split(mlp), normal_points(4, 3)
    assert split.share() == pytest.approx(linear.share, abs=1e-14)
    assert (split.gradient(x) - x @ linear.symmetric).abs().max() < 1e-14
    assert math.isnan(linear_hodge_split(torch.zeros(2, 2), torch.eye(2)).share)


@pytest.mark.parametrize(
    ("matrix", "covariance", "words"),
    [
        ([[1.0]], torch.eye(1), "matrix is a list"),
        (torch.zeros(2, 3), torch.eye(2), "matrix has shape \\(2, 3\\)"),
        (torch.zeros(2, 2), torch.eye(3), "covariance has shape \\(3, 3\\)"),
        (torch.zeros(2, 2), torch.zeros(2, 2), "covariance has smallest eigenvalue 0"),
        (torch.zeros(2, 2), torch.diag(torch.tensor([1.0, -1.0])), "covariance has smallest eigenvalue -1"),
        (torch.zeros(2, 2), torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "asymmetric, by 0.5 at \\(0, 1\\)"),
        (torch.zeros(2, 2), -torch.eye(2), "covariance has smallest eigenvalue -1"),
        (torch.zeros(2, 2), torch.full((2, 2), torch.nan), "finite"),
    ],
)
def test_linear_refusals(matrix, covariance, words):
    with pytest.raises(HelmscopeError, match=words):
        linear_hodge_split(matrix, covariance)
