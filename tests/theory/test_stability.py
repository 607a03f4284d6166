"""The bound on how fast two flows separate, against its parts by autograd and against grids."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.geometry.sphere import project, retract, tangent_basis
from helmscope.theory.stability import w2_growth_bound
from helmscope.types import HelmscopeError


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0, 4.0])
def test_the_rate_is_its_formula_on_a_grid(beta: float) -> None:
    r = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    along = float((beta * (1 - r**2) + r).max())
    assert w2_growth_bound(beta=beta) == pytest.approx(along + (1 + beta) * math.exp(beta), rel=1e-9)
    assert w2_growth_bound(beta=beta, value_norm=3.0) == pytest.approx(3 * w2_growth_bound(beta=beta), rel=1e-14)


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
def test_no_cloud_separates_faster(beta: float) -> None:
    """The distance of two infinitely close clouds grows at most at the largest eigenvalue of the symmetric part of the
    Jacobian of the flow of all tokens.
    """
    generator = torch.Generator().manual_seed(0)
    clouds = [
        retract(torch.randn(6, 3, generator=generator, dtype=torch.float64) + scale)
        for scale in (0.0, 0.3, 3.0)  # spread over the sphere to near one point
        for _ in range(10)
    ]
    largest = max(_separation(SA(beta=beta), x) for x in clouds)
    assert 0.1 < largest <= w2_growth_bound(beta=beta)


def _separation(field: SA, x: torch.Tensor) -> float:
    basis = tangent_basis(x)
    jacobian = torch.autograd.functional.jacobian(lambda y: project(y, field.velocity(y[None])[0]), x)
    inner = torch.einsum("iap,iajb,jbq->ipjq", basis, jacobian, basis).reshape(2 * len(x), -1)
    return float(torch.linalg.eigvalsh((inner + inner.mT) / 2).max())


def test_a_negative_beta_is_refused() -> None:
    with pytest.raises(HelmscopeError, match=r"beta is -1\.0, but it must be a finite number >= 0"):
        w2_growth_bound(beta=-1.0)
