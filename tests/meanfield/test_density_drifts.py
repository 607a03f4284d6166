"""Which drift a field gives to a density: attention at any beta is never taken for a force, and is resolved."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.lowrank import LowRank
from helmscope.fields.noise import DivergenceForm, Ito, LayerNormChain, MatrixNoise, Stratonovich
from helmscope.meanfield import CircleGrid, Density, SphereGrid, ZonalGrid, evolve
from helmscope.meanfield.drift import CloudDrift, ForceDrift, drift_of
from helmscope.meanfield.forward_equation import ForwardEquation
from support.refusal import refused

F64 = torch.float64
SQUEEZE = torch.diag(torch.tensor([1.0, 0.5], dtype=F64))


def mlp(dim: int = 2) -> hs.MLP:
    return hs.MLP(w_in=torch.ones(4, dim, dtype=F64) / 4, w_out=torch.ones(dim, 4, dtype=F64) / 4)


def naive_velocity(beta: float, t: float, count: int = 4096) -> float:
    """The component along (-sin t, cos t) of the mean of y under weights ~ e^{beta x^T B y}, y on the circle."""
    terms, pull = 0.0, 0.0
    peak = beta * math.hypot(math.cos(t), math.sin(t) / 2)
    for k in range(count):
        s = 2 * math.pi * k / count
        weight = math.exp(beta * (math.cos(t) * math.cos(s) + math.sin(t) * math.sin(s) / 2) - peak)
        terms += weight
        pull += weight * (-math.sin(t) * math.cos(s) + math.cos(t) * math.sin(s))
    return pull / terms


def test_attention_with_matrices_at_large_beta_against_quadrature() -> None:
    """At beta = 300 distant tokens attend to themselves only, as under a force; the density still moves."""
    grid = CircleGrid(128)
    drift = drift_of(hs.SA(beta=300.0, query_key=SQUEEZE), grid)
    assert isinstance(drift, CloudDrift)
    found = drift.components(Density.uniform(grid).modes, 0.0)[:, 0]
    for k in range(0, len(grid.points), 37):
        t = 2 * math.pi * k / len(grid.points)
        assert abs(float(found[k]) - naive_velocity(300.0, t)) < 1e-10
    assert abs(float(found.abs().max()) - 0.3325) < 1e-4


@pytest.mark.parametrize(
    "field",
    [
        hs.SA(beta=300.0, query_key=LowRank(SQUEEZE, torch.eye(2, dtype=F64))),
        hs.Block(hs.SA(beta=300.0, query_key=SQUEEZE), mlp()),
        hs.MultiHead([hs.SA(beta=300.0, query_key=SQUEEZE), hs.SA(beta=300.0, query_key=SQUEEZE)]),
        hs.fields.LayerwiseField([mlp(), hs.SA(beta=300.0, query_key=SQUEEZE)]),
    ],
    ids=["low rank", "block", "heads", "layers"],
)
def test_fields_that_contain_attention_are_clouds_of_tokens(field) -> None:
    assert isinstance(drift_of(field, CircleGrid(128)), CloudDrift)


def test_fields_without_attention_are_forces_unless_points_act_on_each_other() -> None:
    grid = CircleGrid(16)
    assert isinstance(drift_of(mlp(), grid), ForceDrift)
    assert isinstance(drift_of(hs.fields.LayerwiseField([mlp(), mlp()]), grid), ForceDrift)
    hardmax = hs.fields.Hardmax(query_key=-torch.eye(2, dtype=F64))
    assert isinstance(drift_of(hardmax, grid), CloudDrift)


@pytest.mark.parametrize("beta", [10.0, 60.0])
def test_a_degree_that_is_too_small_for_a_kernel_with_matrices(beta: float) -> None:
    turned = torch.tensor([[0.0, -1.0], [0.5, 0.0]], dtype=F64)  # of norm 1
    head = hs.SA(beta=beta, query_key=turned)
    for field in (head, hs.Block(head, mlp()), hs.MultiHead([hs.SA(beta=0.5), head])):
        message = refused(lambda field=field: drift_of(field, CircleGrid(12)), "degree is 12", f"= {beta:g}", "degree=")
        needed = int(message.split("degree=")[1].split()[0])
        assert isinstance(drift_of(field, CircleGrid(needed)), CloudDrift)
    refused(lambda: drift_of(hs.SA(beta=beta, value=turned), CircleGrid(12)), f"= {beta:g}", "degree=")


def test_what_is_not_zonal_says_what_is_possible() -> None:
    wrong = {3: "use SphereGrid", 8: "simulate particles"}
    for dim, remedy in wrong.items():
        grid = ZonalGrid(dim=dim, degree=8)
        noise = MatrixNoise(torch.diag(torch.arange(1.0, dim + 1, dtype=F64)))
        refused(lambda g=grid, n=noise: ForwardEquation.of(None, g, n), "noise is", "M = a I + b e e^T", remedy)
        head = hs.SA(beta=1.0, query_key=torch.diag(torch.arange(1.0, dim + 1, dtype=F64)))
        refused(lambda g=grid, h=head: ForwardEquation.of(h, g), "multiples of I", remedy)
        second = torch.eye(dim, dtype=F64)[1]
        refused(lambda g=grid, e=second: ForwardEquation.of(lambda x: e.expand_as(x), g), "meridians", remedy)


@pytest.mark.parametrize("process", [LayerNormChain(), Stratonovich(), Ito(), DivergenceForm()], ids=repr)
@pytest.mark.parametrize("grid", [CircleGrid(40), SphereGrid(24), ZonalGrid(dim=4, degree=32)], ids=repr)
def test_plain_and_positive_densities_agree_under_anisotropic_noise(grid, process) -> None:
    """Both forms contain the drift of the process; without it the mean differs by 1e-2."""
    matrix = torch.full((grid.dim,), 0.2, dtype=F64)
    matrix[0] = 0.45
    noise = MatrixNoise(torch.diag(matrix), process=process)
    start = Density.von_mises_fisher(grid, kappa=1.0)
    pull = lambda x: 0.3 * torch.eye(grid.dim, dtype=F64)[0].expand_as(x)  # noqa: E731
    plain, positive = (
        evolve(pull, start, times=[0.5], noise=noise, positive=each, tol=1e-10) for each in (False, True)
    )
    assert plain.outcome.ok
    assert positive.outcome.ok
    assert float((plain.modes - positive.modes).abs().max()) < 1e-8
