"""Transport and landscapes run where their tensors lie, in both dtypes, and give there what float64 on the CPU gives.

A machine with a GPU runs each case on it too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import helmscope as hs
from helmscope import transport as ot

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PLACES = [(device, dtype) for device in DEVICES for dtype in (torch.float32, torch.float64)]
BOUND = {torch.float64: 1e-9, torch.float32: 3e-4}
X, Y = hs.Uniform(n=24, dim=3).sample(seed=1), hs.VonMisesFisher(n=24, dim=3, kappa=4.0).sample(seed=2)
CIRCLE_X, CIRCLE_Y = hs.Uniform(n=24, dim=2).sample(seed=1), hs.VonMisesFisher(n=20, dim=2, kappa=4.0).sample(seed=2)
GRAM = X.mT @ X


def quadratic(x: torch.Tensor) -> torch.Tensor:
    return (x[..., 0] ** 2 + 2 * x[..., 1] ** 2 + 4 * x[..., 2] ** 2) / 2


def divergence_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(ot.sinkhorn_divergence(x, y, epsilon=0.3, cost=ot.Chordal()).value, x)[0]


CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "w2": hs.w2,
    "interpolation": lambda x, y: ot.interpolate(ot.exact_plan(x, y), 0.5)[0].sort(0).values,
    "sinkhorn": lambda x, y: ot.sinkhorn(x, y, epsilon=0.2, cost=ot.Chordal()).value,
    "geodesic sinkhorn": lambda x, y: ot.sinkhorn(x, y, epsilon=0.2, cost=hs.Geodesic()).value,
    "images": lambda x, y: ot.sinkhorn(x, y, epsilon=0.2, cost=ot.Chordal()).barycentric_projection,
    "unbalanced": lambda x, y: ot.sinkhorn(x, y, epsilon=0.2, cost=ot.Chordal(), reach=0.5).objective,
    "divergence gradient": divergence_gradient,
    "bridge control": lambda x, y: ot.bridge_clouds(x, y, nu=0.5).control(x, 0.3),
    "bridge potential": lambda x, y: ot.bridge_clouds(x, y, nu=0.5).log_potential(x, 0.3),
    "curvatures": lambda x, y: hs.geometry.hessian.energy_curvatures(quadratic, x),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_transport_on_the_sphere(case: str, device: str, dtype: torch.dtype) -> None:
    if case == "interpolation":
        pytest.importorskip("ot", reason="exact plans need POT")
    wanted = CASES[case](X, Y)
    got = CASES[case](X.to(device, dtype), Y.to(device, dtype))
    assert got.device.type == device
    assert got.dtype == dtype
    assert (got.cpu().double() - wanted.double()).abs().max() <= BOUND[dtype]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_transport_on_the_circle(device: str, dtype: torch.dtype) -> None:
    got = hs.w2(CIRCLE_X.to(device, dtype), CIRCLE_Y.to(device, dtype))
    assert (got.device.type, got.dtype) == (device, dtype)
    assert abs(float(got) - float(hs.w2(CIRCLE_X, CIRCLE_Y))) <= BOUND[dtype]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_gaussians(device: str, dtype: torch.dtype) -> None:
    zero = torch.zeros(3, device=device, dtype=dtype)
    got = ot.gaussian_w2(zero, GRAM.to(device, dtype), zero + 1, torch.eye(3, device=device, dtype=dtype))
    wanted = ot.gaussian_w2(torch.zeros(3), GRAM, torch.ones(3), torch.eye(3, dtype=torch.float64))
    assert (got.device.type, got.dtype) == (device, dtype)
    assert abs(float(got) - float(wanted)) <= 10 * BOUND[dtype]
