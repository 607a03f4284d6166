"""The tangent Hessian: closed forms, second differences along geodesics, Lanczos against the matrix, bad input."""

from __future__ import annotations

import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import GELU, ReLU, SiLU, Tanh
from helmscope.geometry import sphere, surface
from helmscope.geometry.hessian import energy_curvatures, hessian_eigenvalues, hessian_product, tangent_hessian
from helmscope.geometry.potential import Potential, as_potential
from support.planting import Plant, outcome

EYE = torch.eye(3, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quadratic(x):
    return (x.square() * torch.tensor([1.0, 2.0, 4.0], dtype=x.dtype)).sum(-1) / 2


def random_mlp(kind, d=5, hidden=9, activation=None):
    if kind == "ungated":
        return hs.MLP(
            w_in=normal(hidden, d), w_out=normal(d, hidden, seed=1), b_in=normal(hidden, seed=2), activation=activation
        )
    gate = normal(hidden, d, seed=3)
    gate[-2:] = 0.0  # linear neurons, which have another formula
    return hs.GatedMLP(
        w_gate=gate,
        w_up=normal(hidden, d, seed=4),
        w_out=normal(d, hidden, seed=5),
        b_gate=normal(hidden, seed=6),
        b_up=normal(hidden, seed=7),
        activation=activation,
    )


# Closed forms ---------------------------------------------------------------------------------------------------------


def eigenvalues_of_the_quadratic() -> bool:
    expected = torch.tensor([[1.0, 3.0], [-1.0, 2.0], [-3.0, -2.0]], dtype=torch.float64)
    return torch.allclose(hessian_eigenvalues(quadratic, EYE), expected, atol=1e-14)


def test_eigenvalues_of_a_quadratic_at_the_axes() -> None:
    assert eigenvalues_of_the_quadratic()
    expected = torch.tensor([[-3.0, -1.0], [-2.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    assert torch.allclose(energy_curvatures(quadratic, EYE), expected, atol=1e-14)
    assert energy_curvatures(quadratic, EYE, count=1)[:, 0].tolist() == [-3.0, -2.0, 2.0]


@pytest.mark.parametrize("d", [2, 3, 8])
def test_a_linear_potential_has_one_eigenvalue(d: int) -> None:
    x = sphere.retract(normal(4, d))
    values = hessian_eigenvalues(lambda y: y[..., 0], x)
    assert torch.allclose(values, -x[:, :1].expand(4, d - 1), atol=1e-15)


def test_the_ambient_hessian_has_these_eigenvalues_and_a_spurious_zero() -> None:
    x = sphere.retract(normal(6, 4))
    f = lambda y: torch.sin(y @ normal(4, seed=9)) + y[..., 0] * y[..., 1] ** 2  # noqa: E731
    ambient = torch.linalg.eigvalsh(surface.hessian(f, x))
    with_zero = torch.cat([hessian_eigenvalues(f, x), torch.zeros(6, 1, dtype=x.dtype)], -1).sort(-1).values
    assert torch.allclose(ambient, with_zero, atol=1e-14)


# Against second differences along geodesics ---------------------------------------------------------------------------


def second_difference(f, x, v):
    """d^2/dt^2 f(exp(x, t v)) at 0, by differences of fourth order."""
    h = 2e-3
    values = {k: f(sphere.exp(x, k * h * v)) for k in (-2, -1, 0, 1, 2)}
    return (-values[2] + 16 * values[1] - 30 * values[0] + 16 * values[-1] - values[-2]) / (12 * h * h)


@pytest.mark.parametrize("kind", ["ungated", "gated"])
def test_second_differences_along_geodesics(kind: str) -> None:
    split = hs.helmholtz(random_mlp(kind, activation=Tanh()))
    x = sphere.retract(normal(20, 5, seed=11))
    v = sphere.retract(sphere.project(x, normal(20, 5, seed=12)))
    measured = second_difference(split.potential, x, v)
    scale = float(measured.abs().max())
    assert float(((v * hessian_product(split, x, v)).sum(-1) - measured).abs().max()) < 1e-8 * scale
    w = (sphere.tangent_basis(x).mT @ v[..., None])[..., 0]
    form = (w[..., None, :] @ tangent_hessian(split, x) @ w[..., None])[..., 0, 0]
    assert float((form - measured).abs().max()) < 1e-8 * scale
    euclidean = (v * split.hessian_product(x, v)).sum(-1)  # the fault that this test is about
    assert float((euclidean - measured).abs().max()) > 0.1 * scale


# The closed form for MLPs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [Tanh(), SiLU(), GELU()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("kind", ["ungated", "gated"])
@pytest.mark.parametrize("split", [hs.helmholtz, hs.fields.helmholtz_as_printed])
def test_the_hessian_of_an_mlp_is_that_of_its_potential(split, kind: str, activation) -> None:
    parts = split(random_mlp(kind, activation=activation))
    x, v = normal(4, 5, seed=8), normal(4, 5, seed=9)
    expected = torch.stack([torch.autograd.functional.hessian(parts.potential, point) for point in x])
    scale = float(expected.abs().max())
    assert float((parts.hessian(x) - expected).abs().max()) < 4e-15 * scale
    assert float((parts.hessian_product(x, v) - (expected @ v[..., None])[..., 0]).abs().max()) < 2e-14 * scale


def test_the_hessian_of_relu_neurons_with_a_dead_one() -> None:
    w_in = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    split = hs.helmholtz(hs.MLP(w_in=w_in, w_out=torch.ones(2, 2, dtype=torch.float64), activation=ReLU()))
    # U = (1/2) relu(2 x)^2 / 2, since a = w.v / |v|^2 = 1/2; U'' = 2
    expected = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(split.hessian(torch.tensor([0.5, 1.0], dtype=torch.float64)), expected)
    assert not split.hessian(torch.tensor([-0.5, 1.0], dtype=torch.float64)).any()


# Without the matrix ---------------------------------------------------------------------------------------------------


def test_lanczos_agrees_with_the_matrix() -> None:
    split = hs.helmholtz(random_mlp("ungated", d=120, hidden=150, activation=Tanh()))
    x = sphere.retract(normal(2, 120, seed=13))
    for function in (hessian_eigenvalues, energy_curvatures):
        values = function(split, x)
        assert float((function(split, x, count=2) - values[:, :2]).abs().max()) < 1e-14 * float(values.abs().max())


@pytest.mark.parametrize("f", [lambda y: y[..., 0], lambda y: 0 * y[..., 0]], ids=["multiple", "zero"])
def test_lanczos_finds_every_copy_of_an_eigenvalue(f) -> None:
    x = sphere.retract(normal(100))
    assert torch.allclose(hessian_eigenvalues(f, x, count=3), hessian_eigenvalues(f, x)[:3], atol=1e-15)


def test_few_eigenvalues_store_no_matrix() -> None:
    class Forbidding(Potential):
        def potential(self, x):
            return x[..., 0] ** 3

        def hessian(self, x):
            raise AssertionError("the matrix was computed")

    x = sphere.retract(normal(3000))
    # Hess_S of x_1^3: P (6 x_1 e e^T) P - 3 x_1^3 P
    lowest = -3 * x[0] ** 3
    value = 6 * x[0] * (1 - x[0] ** 2) + lowest
    expected = torch.minimum(value, lowest)
    assert abs(float(hessian_eigenvalues(Forbidding(), x, count=1) - expected)) < 1e-15


def test_a_batch_changes_no_point() -> None:
    split = hs.helmholtz(random_mlp("gated", activation=SiLU()))
    x = sphere.retract(normal(5, 5))
    together = tangent_hessian(split, x)
    assert torch.allclose(torch.stack([tangent_hessian(split, point) for point in x]), together, atol=1e-14)


# Bad input and faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hessian_eigenvalues(quadratic, EYE, count=3), "count is 3, but the tangent space has only 2"),
        (lambda: hessian_eigenvalues(quadratic, EYE, count=0), "count is 0, but it must be a whole number >= 1"),
        (lambda: tangent_hessian(quadratic, 2 * EYE), "token of norm 2"),
        (lambda: tangent_hessian(quadratic, torch.ones(1)), "dimension d=1, but a sphere needs d >= 2"),
        (lambda: tangent_hessian(3.0, EYE), "potential is 3.0, but it must be a Potential"),
        (lambda: tangent_hessian(lambda x: x, EYE), "must return one number per point"),
        (lambda: tangent_hessian(lambda x: 1.0, EYE), "f returns a float for points"),
        (
            lambda: hessian_eigenvalues(lambda x: torch.log(x[..., 1] - x[..., 1]), torch.eye(100)[0], count=1),
            "a Hessian that is not finite at x",
        ),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()


def test_a_bound_potential_is_its_owner() -> None:
    split = hs.helmholtz(random_mlp("ungated", activation=Tanh()))
    assert as_potential(split.potential) is split


FAULTS = {
    "Euclidean": lambda right, u, x: (
        right(u, x) + (x * as_potential(u).gradient(x)).sum(-1)[..., None, None] * torch.eye(2).to(x)
    ),
    "sign": lambda right, u, x: -right(u, x),
    "radial axis": lambda right, u, x: right(u, x.roll(1, -1)),
    "factor": lambda right, u, x: right(u, x) / 2,
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str) -> None:
    assert outcome(Plant(FAULTS[name], tangent_hessian), eigenvalues_of_the_quadratic) == "seen"
