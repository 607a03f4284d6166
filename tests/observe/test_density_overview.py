"""The observables of a density over time, against closed forms and differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA, USA
from helmscope.fields.noise import IsotropicNoise, MatrixNoise
from helmscope.meanfield import CircleGrid, Density, SphereGrid, ZonalGrid, evolve
from helmscope.observe.density_overview import density_overview
from helmscope.types import HelmscopeError

GRIDS = [CircleGrid(degree=24), SphereGrid(degree=16), ZonalGrid(dim=8, degree=24)]
NOISE = IsotropicNoise(0.1)


def path_of(field, grid, noise=NOISE, count=11):
    return evolve(field, Density.von_mises_fisher(grid, kappa=0.5), times=np.linspace(0, 0.5, count), noise=noise)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("field", [None, USA(beta=1.0)], ids=str)
def test_the_rate_of_the_free_energy_is_its_derivative(grid, field):
    measured = density_overview(path_of(field, grid))
    energy, rate = measured.free_energy.values[:, 0], measured.free_energy_rate.values[:, 0]
    h = 0.05
    derivative = (energy[:-4] - 8 * energy[1:-3] + 8 * energy[3:-1] - energy[4:]) / (12 * h)  # of order 4
    assert derivative == pytest.approx(rate[2:-2], abs=5e-6)
    assert (rate < 0).all()


def test_diffusion_on_the_sphere_has_the_closed_forms():
    grid = SphereGrid(degree=16)
    measured = density_overview(path_of(None, grid))
    order = measured.order_parameter.values[:, 0]
    assert order == pytest.approx(order[0] * np.exp(-2 * 0.1 * measured.time.values), rel=1e-9)
    assert order[0] == pytest.approx(1 / np.tanh(0.5) - 2)
    assert measured.mass.values == pytest.approx(1, abs=1e-13)
    assert (measured.relative_entropy + measured.entropy).values == pytest.approx(np.log(4 * np.pi))
    assert measured.free_energy.values == pytest.approx(-0.1 * measured.entropy.values)
    assert (measured.negative_mass.values == 0).all()
    assert measured.minimum.values[0, 0] == pytest.approx(0.5 * np.exp(-0.5) / np.sinh(0.5), rel=1e-2)


def test_the_energy_is_that_of_a_double_sum_and_sa_has_no_free_energy():
    path = path_of(SA(beta=2.0), GRIDS[0], count=2)
    measured = density_overview(path)
    for k, density in enumerate(path):
        x, weights = density.cloud()
        total = 0.0
        for i in range(len(x)):
            total += float(weights[i] * (weights * (2 * (x @ x[i])).exp()).sum())
        assert measured.interaction_energy.values[k, 0] == pytest.approx(total / 4, rel=1e-12)
    assert not {"free_energy", "free_energy_rate"} & set(measured)


def test_what_a_path_does_not_have_is_left_out():
    anisotropic = MatrixNoise(torch.diag(torch.tensor([0.1, 0.2], dtype=torch.float64)))
    assert "free_energy" not in density_overview(path_of(None, GRIDS[0], anisotropic, count=2))
    assert "interaction_energy" not in density_overview(path_of(USA(beta=0.0), GRIDS[0], count=2))
    assert "interaction_energy" not in density_overview(path_of(lambda x: -x, GRIDS[0], count=2))
    assert path_of(None, GRIDS[0], count=2).field is None
    without_noise = density_overview(path_of(USA(beta=1.0), GRIDS[0], None, count=2))
    assert without_noise.free_energy.values == pytest.approx(-without_noise.interaction_energy.values)


def test_anything_else_is_refused():
    with pytest.raises(HelmscopeError, match="path is a Density, but it must be a DensityPath, the result of evolve"):
        density_overview(Density.uniform(GRIDS[0]))
