"""Equilibria of attention: all but consensus are unstable; rates against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.attention import SA, USA
from helmscope.observe.equilibria import find_equilibria
from helmscope.observe.jacobian import jacobian_spectrum


def polygon(n, d=2):
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    x = torch.zeros(n, d, dtype=torch.float64)
    x[:, 0], x[:, 1] = angles.cos(), angles.sin()
    return x


def polygon_rate(n, beta, *, normalized):
    """The largest growth rate of a regular polygon on the circle, from its Fourier modes: theta_i' is the mean (times
    n / Z) of g(theta_j - theta_i), g = e^{beta cos} sin, and mode k grows with sum_j g'(theta_j) (cos k theta_j - 1).
    """
    angles = [2 * math.pi * j / n for j in range(n)]
    weights = [math.exp(beta * math.cos(a)) for a in angles]
    slopes = [w * (math.cos(a) - beta * math.sin(a) ** 2) for w, a in zip(weights, angles, strict=True)]
    modes = [sum(s * (math.cos(k * a) - 1) for s, a in zip(slopes, angles, strict=True)) for k in range(n)]
    return max(modes) / (sum(weights) if normalized else n)


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0, 9.0])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_regular_polygons_are_unstable(n: int, beta: float) -> None:
    for field, normalized in ((SA(beta=beta), True), (USA(beta=beta), False)):
        found = find_equilibria(field, polygon(n)[None])
        rate = polygon_rate(n, beta, normalized=normalized)
        assert rate > 0
        assert math.isclose(float(found.growth_rates[0]), rate, rel_tol=1e-9, abs_tol=1e-14)
        assert found.unstable.tolist() == [True]
        assert found.consensus.tolist() == [False]


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
def test_antipodal_tokens_separate_at_a_known_rate(beta: float) -> None:
    x = torch.zeros(1, 2, 5, dtype=torch.float64)
    x[0, 0, 3], x[0, 1, 3] = 1.0, -1.0
    found = find_equilibria(SA(beta=beta), x)
    assert math.isclose(float(found.growth_rates[0]), 2 / (math.exp(2 * beta) + 1), rel_tol=1e-12)


def test_symmetric_clouds_in_space_are_unstable() -> None:
    signs = [[a, b, c] for a in (-1.0, 1.0) for b in (-1.0, 1.0) for c in (-1.0, 1.0)]
    cube = torch.tensor(signs, dtype=torch.float64) / math.sqrt(3)
    octahedron = torch.cat([torch.eye(3, dtype=torch.float64), -torch.eye(3, dtype=torch.float64)])
    clusters = (
        torch.eye(3, dtype=torch.float64)[:2].repeat_interleave(2, 0) * torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None]
    )
    clusters[1] = -clusters[0]
    clusters[3] = -clusters[2]  # two antipodal pairs on orthogonal axes
    for x in (cube, octahedron, cube[[0, 3, 5, 6]], clusters, polygon(5, d=3)):
        for beta in (0.0, 1.0, 4.0):
            found = find_equilibria(SA(beta=beta), x[None])
            assert torch.allclose(found.states[0], x, atol=1e-12)  # it is an equilibrium
            assert found.unstable.tolist() == [True]


@pytest.mark.parametrize(("n", "d", "beta"), [(3, 2, 1.0), (4, 3, 0.0), (4, 3, 1.0), (5, 3, 4.0)])
def test_only_consensus_is_stable_among_equilibria_found_at_random(n: int, d: int, beta: float) -> None:
    """The Jacobian's eigenvalues are those of an independent computation, and positive except at consensus."""
    starts = hs.Uniform(n=n, dim=d).sample(batch=24, seed=1)
    starts[0] = starts[0, :1] + 0.05 * starts[0]  # near consensus
    starts = torch.nn.functional.normalize(starts, dim=-1)
    found = find_equilibria(SA(beta=beta), starts)
    assert len(found.states) >= 20
    assert found.consensus.any()
    assert torch.equal(found.unstable, ~found.consensus)
    assert float(found.growth_rates[found.consensus].abs().max()) < 1e-12
    spectrum = jacobian_spectrum(SA(beta=beta), found.states).eigenvalues
    assert torch.allclose(spectrum.real[:, 0], found.growth_rates, atol=1e-10)
    assert float(SA(beta=beta)(found.states).abs().max()) < 1e-11


def test_a_perturbation_of_an_unstable_equilibrium_reaches_consensus() -> None:
    x = torch.nn.functional.normalize(polygon(3, d=3) + 1e-3 * hs.Uniform(n=3, dim=3).sample(seed=0), dim=-1)
    final = hs.integrate(SA(beta=1.0), x, times=[60.0]).states[-1]
    assert float((final @ final.T).min()) > 1 - 1e-9


def test_repulsion_reverses_the_roles() -> None:
    antipodes, together = polygon(2)[None], polygon(2)[:1].expand(2, 2)[None]
    field = SA(beta=1.0, value=-torch.eye(2, dtype=torch.float64))
    assert find_equilibria(field, antipodes).unstable.tolist() == [False]
    assert find_equilibria(field, together).unstable.tolist() == [True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_equilibria(SA(beta=1.0), torch.eye(2)), r"starts has shape \(2, 2\), but it must be \(m, n, d\)"),
        (lambda: find_equilibria(SA(beta=1.0), 2 * torch.eye(2)[None]), "starts holds a token of norm 2"),
        (lambda: find_equilibria(lambda x, t: t * x, torch.eye(2)[None]), "which depends on time"),
        (lambda: find_equilibria(SA(beta=1.0), torch.eye(2)[None], max_iterations=0), "max_iterations is 0, but"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(hs.HelmscopeError, match=message):
        call()
