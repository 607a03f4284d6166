"""The error of the logarithmic form: estimated against finer runs, and no run finishes with a larger one than asked."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise, MatrixNoise, Stratonovich
from helmscope.meanfield import CircleGrid, Density, DensityPath, SphereGrid, ZonalGrid, evolve
from helmscope.meanfield.log_truncation import LogTruncation
from helmscope.types import Status
from support.planting import Plant, outcome

F64 = torch.float64


def toward_first_axis(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype)[0].expand_as(x)


def l1_error(path: DensityPath, exact: DensityPath, k: int = -1) -> float:
    """int |rho - exact| dm at the points of the finer grid."""
    grid = exact.grid
    found = path[k](grid.points) * math.exp(grid.log_area)
    return float(grid.mean_of((found - exact[k].values).abs()))


def test_a_run_whose_logarithm_needs_more_harmonics_does_not_finish() -> None:
    """e1, kappa = 5, nu = 0.08, degree 24: the plain form is right to 1e-8, and the logarithm was wrong by 1e-4."""
    noise, times = IsotropicNoise(0.08), [1.0, 5.0]
    start, finer = (Density.von_mises_fisher(CircleGrid(degree), kappa=5.0) for degree in (24, 72))
    exact = evolve(toward_first_axis, finer, times=times, noise=noise, tol=1e-12)
    plain = evolve(toward_first_axis, start, times=times, noise=noise)
    assert plain.outcome.ok
    assert l1_error(plain, exact) < 1e-8
    assert plain.truncation_error == plain.mass_error == 0
    positive = evolve(toward_first_axis, start, times=times, noise=noise, positive=True)
    assert positive.outcome.statuses == (Status.UNRESOLVED,)
    assert 1 < positive.outcome.times[0] < 2
    assert "raise degree" in str(positive.outcome)
    assert "positive" not in str(positive.outcome)
    assert l1_error(positive, exact, 0) < 1e-8
    loose = evolve(toward_first_axis, start, times=times, noise=noise, positive=True, tol=1e-6)
    assert loose.outcome.ok
    assert 1e-4 < l1_error(loose, exact) < 2e-4
    assert 0.6 < loose.truncation_error / l1_error(loose, exact) < 1.4
    enough = evolve(toward_first_axis, Density.von_mises_fisher(CircleGrid(40), kappa=5.0), times=times, noise=noise,
                    positive=True)  # fmt: skip
    assert enough.outcome.ok
    assert 3e-7 < l1_error(enough, exact) < enough.truncation_error < 1e-6  # the largest over time


TILTED = MatrixNoise(torch.diag(torch.tensor([0.12, 0.2], dtype=F64)), process=Stratonovich())
CASES = {
    "attention on the circle": (CircleGrid, 16, hs.SA(beta=2.0), IsotropicNoise(0.1), 3.0, 2.0),
    "force on the circle": (CircleGrid, 18, toward_first_axis, IsotropicNoise(0.12), 3.0, 2.0),
    "anisotropic noise": (CircleGrid, 18, toward_first_axis, TILTED, 3.0, 2.0),
    "force on S^2": (SphereGrid, 14, toward_first_axis, IsotropicNoise(0.15), 3.0, 2.0),
    "zonal": (lambda degree: ZonalGrid(dim=4, degree=degree), 14, toward_first_axis, IsotropicNoise(0.12), 2.0, 1.5),
}


def ratio(name: str) -> float:
    make, degree, field, noise, kappa, end = CASES[name]
    start, finer = (Density.von_mises_fisher(make(each), kappa=kappa) for each in (degree, 3 * degree))
    path = evolve(field, start, times=[end], noise=noise, positive=True, tol=1e-7)
    exact = evolve(field, finer, times=[end], noise=noise, tol=1e-10)
    return path.truncation_error / l1_error(path, exact) if len(path) else math.inf


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_the_error(name: str) -> None:
    assert 0.5 < ratio(name) < 1.6


FAULTS = {
    "the residual of the logarithm, not of the density": lambda right, self, u, t: 30 * right(self, u, t),
    "time is not advanced": lambda right, self, u, t: right(self, u, self.time),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_estimate_are_noticed(fault: str) -> None:
    plant = Plant(FAULTS[fault], (LogTruncation, ["advance"]))
    assert outcome(plant, lambda: 0.5 < ratio("force on the circle") < 1.6) in ("seen", "refused")


def test_corrections_of_the_mass_are_summed() -> None:
    noise, start = IsotropicNoise(0.3), Density.von_mises_fisher(CircleGrid(24), kappa=5.0)
    short, long = (evolve(toward_first_axis, start, times=[end], noise=noise, positive=True) for end in (0.5, 2.0))
    assert 0 < short.mass_error < long.mass_error < 1e-8
