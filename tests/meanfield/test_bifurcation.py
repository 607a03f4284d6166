"""The bifurcation diagram: closed form at beta = 0, independent Newton, hysteresis seen by evolution, faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import ive

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield import Density, ZonalGrid, bifurcation_diagram, clustered_branch, evolve, stationary_density


@pytest.mark.parametrize("dim", [2, 3, 16])
def test_closed_form_without_temperature(dim: int) -> None:
    """At beta = 0 the stationary densities are von Mises-Fisher: m = A_d(m / nu), and nu_c = 1 / d."""
    nus = [0.4 / dim, 0.8 / dim, 1.2 / dim]
    diagram = bifurcation_diagram(hs.SA, betas=[0.0], nus=nus, dim=dim)
    for index, nu in enumerate(nus[:2]):
        gap = lambda m: ive(dim / 2, m / nu) / ive(dim / 2 - 1, m / nu) - m  # noqa: B023, E731
        assert float(diagram.order_parameter[0, index]) == pytest.approx(brentq(gap, 0.05, 1.0, xtol=1e-14), abs=1e-10)
    assert float(diagram.order_parameter[0, 2]) == 0
    assert float(diagram.critical_nu[0]) == pytest.approx(1 / dim, rel=1e-14)
    assert bool(diagram.continuous[0])


def test_orders_against_newton_from_another_start() -> None:
    diagram = bifurcation_diagram(hs.SA, betas=[1.0, 4.0], nus=[0.12, 0.18, 0.25], dim=3)
    grid = ZonalGrid(dim=3, degree=44)
    for beta in (1.0, 4.0):
        for nu in (0.12, 0.18, 0.25):
            found = stationary_density(hs.SA(beta=beta), grid, IsotropicNoise(nu))
            order = float(diagram.order_parameter.sel(beta=beta, nu=nu))
            assert found.stable
            assert order == pytest.approx(float(found.mean.norm()), abs=1e-9)
            assert (float(diagram.growth_rate.sel(beta=beta, nu=nu)) > 0) == (order > 0)
    assert bool(diagram.continuous.all())
    assert not bool(diagram.bistable.any())


def test_order_vanishes_like_a_square_root() -> None:
    critical = hs.meanfield.critical_nu(hs.SA(beta=4.0), dim=2)
    nus = [critical * (1 - gap) for gap in (4e-5, 1e-5)]
    order = bifurcation_diagram(hs.SA, betas=[4.0], nus=nus, dim=2).order_parameter.values[0]
    assert order[0] / order[1] == pytest.approx(2, rel=1e-3)


def test_usa_at_low_temperature_has_hysteresis() -> None:
    """Between nu_c and the fold clusters persist and a nearly uniform density stays so; beyond, clusters dissolve."""
    diagram = bifurcation_diagram(hs.USA, betas=[0.5, 3.0], nus=[0.7, 0.8, 0.9], dim=3)
    assert diagram.continuous.values.tolist() == [True, False]
    critical, fold = float(diagram.critical_nu[1]), float(diagram.fold_nu[1])
    assert critical < 0.8 < fold < 0.9
    assert diagram.bistable.values.tolist() == [[False, False, False], [False, True, False]]
    grid, field, noise = ZonalGrid(dim=3, degree=40), hs.USA(beta=3.0), IsotropicNoise(0.8)
    clustered = stationary_density(field, grid, noise)
    uniform = stationary_density(field, grid, noise, start=Density.uniform(grid))
    assert clustered.stable
    assert uniform.stable
    assert float(clustered.mean[0]) == pytest.approx(float(diagram.order_parameter[1, 1]), abs=1e-7)
    low, high = (Density.von_mises_fisher(grid, kappa=kappa) for kappa in (0.05, 12.0))
    orders = [float(evolve(field, start, times=[25.0], noise=noise, tol=1e-6)[0].mean[0]) for start in (low, high)]
    assert orders[0] < 0.01
    assert orders[1] == pytest.approx(float(diagram.order_parameter[1, 1]), abs=1e-3)


def test_the_fold_separates_clusters_from_none() -> None:
    field, grid = hs.USA(beta=3.0), ZonalGrid(dim=3, degree=40)
    fold = clustered_branch(field, grid, min_nu=0.8).fold_nu
    below = stationary_density(field, grid, IsotropicNoise(fold * (1 - 1e-5)))
    above = stationary_density(field, grid, IsotropicNoise(fold * (1 + 1e-3)))
    assert below.stable
    assert float(below.mean.norm()) > 0.5
    assert below.growth_rate > -0.1
    assert float(above.mean.norm()) < 1e-10


def test_every_point_of_the_branch_is_stationary() -> None:
    grid = ZonalGrid(dim=4, degree=36)
    branch = clustered_branch(hs.USA(beta=2.0), grid, min_nu=0.3)
    assert bool((np.diff(branch.order_parameter) > 0).all())
    for k in (5, len(branch.nu) // 2, -1):
        found = stationary_density(
            hs.USA(beta=2.0), grid, IsotropicNoise(branch.nu[k]), start=Density(grid, branch.modes[k])
        )
        assert float(found.mean[0]) == pytest.approx(branch.order_parameter[k], abs=1e-9)


def test_repulsive_attention_never_clusters() -> None:
    diagram = bifurcation_diagram(lambda b: hs.SA(b, value=-torch.eye(3)), betas=[1.0], nus=[0.1, 0.2], dim=3)
    assert diagram.order_parameter.values.tolist() == [[0.0, 0.0]]
    assert float(diagram.critical_nu[0]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": hs.SA(beta=1.0)}, "field is SA.*, but it must be a callable beta -> field"),
        ({"field": lambda b: torch.zeros_like}, "but it must be SA or USA"),
        ({"field": lambda b: hs.SA(b, query_key=-torch.eye(3), value=-torch.eye(3))}, "first unstable in degree 2"),
        ({"nus": [0.0, 0.1]}, r"nus\[0\] is 0.0, but it must be a finite number > 0"),
        ({"nus": [0.2, 0.1]}, r"nus\[1\] is 0.1 after 0.2, but nus must increase"),
        ({"betas": []}, "betas is .*, but it must be a sequence of at least one number"),
        ({"dim": 1}, "dim is 1, but it must be a whole number >= 2"),
        ({"degree": 16, "nus": [0.01]}, "degree is 16, but the clustered states of SA.*: raise degree"),
        ({"nus": [1e-6]}, "nus starts at 1e-06, but there"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    given = {"field": hs.SA, "betas": [4.0], "nus": [0.1], "dim": 3} | options
    with pytest.raises(hs.HelmscopeError, match=message):
        bifurcation_diagram(given.pop("field"), **given)  # type: ignore[arg-type]


def test_the_state_at_the_fold_is_the_end_of_a_square_root() -> None:
    """The order parameter exceeds that at the fold in proportion to sqrt(fold - nu)."""
    fold = float(bifurcation_diagram(hs.USA, betas=[3.0], nus=[0.8], dim=3).fold_nu[0])
    diagram = bifurcation_diagram(hs.USA, betas=[3.0], nus=[fold - 4e-4, fold - 1e-4], dim=3)
    far, near = (diagram.order_parameter.values[0] - float(diagram.fold_order_parameter[0])).tolist()
    assert far / near == pytest.approx(2, rel=0.05)
    assert float(bifurcation_diagram(hs.SA, betas=[4.0], nus=[0.1], dim=3).fold_order_parameter[0]) == 0


def test_the_unstable_branch_has_stationary_unstable_densities() -> None:
    """Newton's method from a density near a point of the branch finds that density, and it is unstable."""
    diagram = bifurcation_diagram(hs.USA, betas=[1.0, 3.0], nus=[0.8], dim=3)
    assert np.isnan(diagram.unstable_nu.values[0]).all()  # continuous at beta = 1
    order, nu = (
        each[np.isfinite(each)] for each in (diagram.unstable_order_parameter.values[1], diagram.unstable_nu.values[1])
    )
    grid = ZonalGrid(dim=3, degree=40)
    for k in (len(nu) // 3, len(nu) // 2, len(nu) - 4):
        kappa = brentq(lambda kappa, m=order[k]: 1 / math.tanh(kappa) - 1 / kappa - m, 1e-3, 100)
        start = Density.von_mises_fisher(grid, kappa=kappa)
        found = stationary_density(hs.USA(beta=3.0), grid, IsotropicNoise(float(nu[k])), start=start)
        assert float(found.mean.norm()) == pytest.approx(order[k], abs=1e-9)
        assert found.growth_rate > 0
