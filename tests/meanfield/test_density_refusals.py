"""What has no equation of a density is refused in one sentence that says why."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import DivergenceForm, IsotropicNoise, Ito, MatrixNoise, StateNoise, Stratonovich
from helmscope.meanfield import CircleGrid, Density, SphereGrid, ZonalGrid, evolve
from helmscope.meanfield.forward_equation import ForwardEquation
from support.refusal import refused

F64 = torch.float64
CIRCLE, SPHERE, ZONAL = CircleGrid(degree=16), SphereGrid(degree=10), ZonalGrid(dim=3, degree=16)
START = Density.von_mises_fisher(CIRCLE, kappa=1.0)


def assert_no_equation(field: object, grid=CIRCLE, noise=None, *words: str) -> None:
    refused(lambda: ForwardEquation.of(field, grid, noise), *words)


def test_fields_that_move_no_measure() -> None:
    assert_no_equation(hs.SA(beta=1.0, causal=True), CIRCLE, None, "causal", "without an order")
    assert_no_equation(hs.SA(beta=torch.tensor([1.0, 2.0])), CIRCLE, None, "batch axes (2,)", "one system")
    assert_no_equation("attention", CIRCLE, None, "field is 'attention'")
    assert_no_equation(hs.SA(beta=1.0, value=torch.eye(3)[:, [1, 0, 2]]), CIRCLE, None, "value has shape (3, 3)")
    mlp = hs.MLP(w_in=torch.ones(4, 2), w_out=torch.ones(2, 4))
    assert_no_equation(hs.Block(hs.SA(beta=1.0), mlp, placement=hs.fields.PreNorm()), CIRCLE, None, "unit vectors")


def test_degrees_that_are_too_small_for_beta() -> None:
    assert_no_equation(hs.SA(beta=40.0), CIRCLE, None, "degree is 16", "beta=40", "degree=")
    assert_no_equation(hs.USA(beta=800.0), CircleGrid(256), None, "beta is 800", "use SA")


def test_what_is_not_zonal() -> None:
    e = torch.eye(3, dtype=F64)
    assert_no_equation(hs.SA(beta=1.0, value=torch.diag(e[0] + 1)), ZONAL, None, "ZonalGrid", "multiples of I")
    swirl = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]], dtype=F64)
    assert_no_equation(lambda x: x @ swirl, ZONAL, None, "meridians", "ZonalGrid")  # R != 0, about the axis
    assert_no_equation(lambda x: e[1].expand_as(x), ZONAL, None, "meridians", "SphereGrid")
    for process in (Stratonovich(), Ito(), DivergenceForm()):
        noise = MatrixNoise(torch.diag(torch.tensor([0.1, 0.2, 0.3], dtype=F64)), process=process)
        assert_no_equation(None, ZONAL, noise, "M = a I + b e e^T", "use SphereGrid")
        tilted = MatrixNoise(0.1 * e + 0.1 * torch.outer(e[0], e[1]) + 0.1 * torch.outer(e[1], e[0]), process=process)
        assert_no_equation(None, ZONAL, tilted, "M = a I + b e e^T", "use SphereGrid")
    ForwardEquation.of(lambda x: e[0] * x[..., :1] ** 2, ZONAL, MatrixNoise(torch.diag(torch.tensor([0.3, 0.1, 0.1]))))


def test_noise_without_a_forward_equation() -> None:
    assert_no_equation(None, CIRCLE, IsotropicNoise(0.1, common=True), "common to all tokens", "independent")
    assert_no_equation(None, CIRCLE, 0.1, "noise is 0.1")
    assert_no_equation(None, CIRCLE, MatrixNoise(torch.eye(3)), "diffusion has shape (3, 3)")
    refused(lambda: IsotropicNoise(-0.1), "nu is -0.1", ">= 0")
    refused(lambda: MatrixNoise(torch.diag(torch.tensor([1.0, -1.0]))), "eigenvalue -1", "positive semi-definite")
    refused(lambda: MatrixNoise(torch.tensor([[1.0, 0.5], [0.0, 1.0]])), "symmetric")


def test_noise_that_depends_on_the_state_is_allowed() -> None:
    """sigma(x) = s(x) I, Ito: d_t rho = Lap(s^2 rho / 2), so rho ~ 1 / s^2 is stationary."""
    scale = lambda x: 1 + 0.3 * x[..., :1]  # noqa: E731
    noise = StateNoise(lambda x: scale(x)[..., None] * torch.eye(2, dtype=x.dtype), process=Ito())
    grid = CircleGrid(32)
    equation = ForwardEquation.of(None, grid, noise)
    values = scale(grid.points)[:, 0] ** -2
    modes = grid.analyze(values / grid.mean_of(values))
    assert float((equation.rate(modes, 0.0) - equation.decay * modes).abs().max()) < 1e-10


@pytest.mark.parametrize("times", [[], [1, 0.5], [-1.0], [math.nan], [0.5, 0.5], 3, "soon", [math.inf]], ids=repr)
def test_times(times: object) -> None:
    refused(lambda: evolve(None, START, times=times), "times is")


def test_other_arguments() -> None:
    refused(lambda: evolve(None, torch.ones(3), times=[1]), "start is", "Density")
    refused(lambda: evolve(None, START, times=[1], tol=0.0), "tol is 0")
    refused(lambda: evolve(None, START, times=[1], max_steps=0), "max_steps is 0")
    zero = Density.from_function(CIRCLE, lambda x: (1 + x[..., 0]) / (2 * math.pi))
    refused(lambda: evolve(None, zero, times=[1], positive=True), "positive=True", "uniform density")
    assert torch.equal(evolve(None, START, times=[0.0]).modes[0], START.modes)
