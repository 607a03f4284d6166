"""Committors on a cloud: convergence to the zonal closed form, deeptime on the same chain, any density, faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from deeptime.markov.tools.analysis import committor

import helmscope as hs
from helmscope.meanfield import Cap, chain_committor, zonal_committor
from helmscope.meanfield.committor_cloud import cloud_committor, kernel_transition_matrix
from helmscope.meanfield.sphere_sets import SphereSet

UP = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
SOUTH, NORTH = Cap(-UP, min_cosine=0.8), Cap(UP, min_cosine=0.8)


def lattice(n):
    """The Fibonacci lattice on S^2."""
    k = torch.arange(n, dtype=torch.float64) + 0.5
    z, turn = 1 - 2 * k / n, k * math.pi * (1 + math.sqrt(5))
    return torch.stack([(1 - z * z).sqrt() * turn.cos(), (1 - z * z).sqrt() * turn.sin(), z], -1)


def upward(x):
    return UP.expand_as(x)


def upward_with_swirl(x):
    """grad U + R with R a rotation about the axis, which leaves a zonal committor as it is."""
    return upward(x) + 2 * torch.linalg.cross(UP.expand_as(x), x)


def errors(field, x, *, nu=0.5, duration=0.01, potential=None):
    q = cloud_committor(field, x, a=SOUTH, b=NORTH, nu=nu, duration=duration)
    s = x[:, 2]
    inside = s.abs() < 0.7
    return (q - zonal_committor(s, dim=3, nu=0.5, low=-0.8, high=0.8, potential=potential))[inside]


def rms(values):
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize(
    ("field", "potential"),
    [(torch.zeros_like, None), (upward, lambda s: s), (upward_with_swirl, lambda s: s)],
    ids=["no drift", "gradient", "gradient and swirl"],
)
def test_it_converges_to_the_zonal_closed_form(field, potential) -> None:
    coarse = rms(errors(field, lattice(400), duration=0.02, potential=potential))
    fine = rms(errors(field, lattice(1200), duration=0.007, potential=potential))
    assert coarse < 0.007  # 0.0033, 0.0046, 0.0045 at 500 points
    assert fine < 0.003
    assert fine < 0.6 * coarse


def test_the_density_of_the_points_does_not_matter() -> None:
    """Points that gather in the north: without the division by the density they would act as a drift towards it."""
    x = hs.VonMisesFisher(n=1500, dim=3, kappa=1.5, mean=torch.tensor([0.5, 0.0, 1.0])).sample(seed=0)
    values = errors(torch.zeros_like, x, duration=0.02)
    assert rms(values) < 0.045  # 0.031
    assert abs(float(values.mean())) < 0.035  # 0.025
    raw = torch.exp(-(torch.cdist(x, x) ** 2) / 0.04)
    margin = 0.58 * math.sqrt(0.02)
    sets = [cap.contains(x, margin=margin) for cap in (SOUTH, NORTH)]
    biased = chain_committor(raw / raw.sum(1, keepdim=True), *sets)
    expected = zonal_committor(x[:, 2], dim=3, nu=0.5, low=-0.8, high=0.8)
    assert float((biased - expected)[x[:, 2].abs() < 0.7].mean()) > 0.1


def test_deeptime_agrees_on_the_same_chain() -> None:
    x = lattice(300)
    chain = kernel_transition_matrix(upward_with_swirl, x, nu=0.5, duration=0.02)
    a, b = (cap.contains(x) for cap in (SOUTH, NORTH))
    theirs = committor(chain.toarray(), a.nonzero()[:, 0].tolist(), b.nonzero()[:, 0].tolist())
    assert float((chain_committor(chain, a, b) - torch.from_numpy(theirs)).abs().max()) < 1e-12


def test_the_chain_has_the_generator_of_the_process() -> None:
    """(P - I) phi / h = b . grad phi + nu Lap_S phi, with phi = x_3: Lap_S phi = -2 x_3 on S^2."""
    x, nu, h = lattice(4000), 0.5, 0.005
    chain = kernel_transition_matrix(upward, x, nu=nu, duration=h)
    rows = np.asarray(chain.sum(axis=1)).ravel()
    assert np.abs(rows - 1).max() < 1e-13
    s = x[:, 2].numpy()
    rate = (chain @ s - s) / h
    expected = (1 - s * s) - 2 * nu * s
    assert np.abs(rate - expected).max() < 0.03
    assert np.abs(rate + expected).max() > 0.5  # a wrong sign of U
    assert np.abs(rate - ((1 - s * s) - 4 * nu * s)).max() > 0.5  # a factor 2 in nu


FAULTS = {
    "sign of U": {"field": lambda x: -upward(x)},
    "twice nu": {"nu": 1.0},
    "half of nu": {"nu": 0.25},
    "axis": {"field": lambda x: upward(x).roll(1, -1)},
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str) -> None:
    arguments = {"field": upward, "nu": 0.5, **FAULTS[name]}
    values = errors(arguments["field"], lattice(400), nu=arguments["nu"], duration=0.02, potential=lambda s: s)
    assert rms(values) > 0.03


class Band(SphereSet):
    def signed_distance(self, x):
        return 0.1 - torch.asin(x[..., 2].clamp(-1, 1)).abs()


def test_regions_of_ones_own() -> None:
    """From the north cap to the band around the equator: by symmetry of rows only the order matters."""
    q = cloud_committor(torch.zeros_like, lattice(600), a=Band(), b=NORTH, nu=0.5, duration=0.01)
    s = lattice(600)[:, 2]
    middle = (s > 0.2) & (s < 0.7)
    expected = zonal_committor(s[middle], dim=3, nu=1.0, low=math.sin(0.1), high=0.8)
    assert rms(q[middle] - expected) < 0.03
    assert (q[s < -0.2] == 0).sum() == 0 or float(q[s < -0.2].max()) < 1e-12  # below the band b is never reached


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nu": 0.0}, "nu is 0.0, but it must be a finite number > 0"),
        ({"duration": 0.0}, "duration is 0.0, but it must be a finite number > 0"),
        ({"duration": 1e-6}, "duration is 1e-06, but 200 of the 200 points of x have no neighbor"),
        ({"duration": 3.0}, "a and b cannot be told apart: use a shorter one"),
        ({"field": hs.SA(beta=1.0)}, "field is SA, whose tokens attend to each other, but a committor is that of one"),
        ({"field": lambda x, t: t * x}, "which depends on time, but a committor needs one that does not"),
        ({"field": lambda x: x / 0}, "field has a velocity that is not finite at x"),
        ({"x": torch.eye(3)[None]}, r"x has shape \(1, 3, 3\), but it must be \(n, d\)"),
        ({"x": 2 * torch.eye(3)}, "x holds a token of norm 2"),
        ({"a": 3}, "a is 3, but it must be a region such as Cap"),
        ({"a": Cap(UP, min_cosine=0.9)}, "b overlaps with a by"),
        ({"a": Cap(torch.ones(2), min_cosine=0.9)}, "a has a center of dimension 2, but x has dimension 3"),
        ({"a": Cap(-UP, min_cosine=0.99999), "duration": 1e-2, "nu": 0.4}, "a contains none of the 200 points"),
    ],
)
def test_bad_input_is_refused(options: dict, message: str) -> None:
    arguments = {"field": upward, "x": lattice(200), "a": SOUTH, "b": NORTH, "nu": 0.5, "duration": 0.02, **options}
    with pytest.raises(hs.HelmscopeError, match=message):
        cloud_committor(arguments.pop("field"), arguments.pop("x"), **arguments)


def test_a_drift_away_from_the_cloud_is_refused() -> None:
    south = lattice(2000)[-400:]
    with pytest.raises(hs.HelmscopeError, match=r"the drift leads \d+ of the 400 points of x away from all others"):
        kernel_transition_matrix(lambda x: 70 * upward(x), south, nu=0.5, duration=0.02)


@pytest.mark.parametrize(
    ("center", "min_cosine", "message"),
    [
        (torch.zeros(3), 0.5, "center is tensor.*, but it must be a nonzero float tensor"),
        (torch.ones(1), 0.5, "center is tensor"),
        ([1.0, 0.0], 0.5, "center is .1.0, 0.0., but"),
        (torch.ones(3), 1.0, "min_cosine is 1, but it must be between -1 and 1"),
    ],
)
def test_bad_caps_are_refused(center, min_cosine: float, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        Cap(center, min_cosine=min_cosine)
