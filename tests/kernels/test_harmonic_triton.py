"""Harmonic sums in three launches, compiled on a GPU or run by Triton's interpreter if there is none, against dense
float64 sums of the same float32 numbers."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.kernels.choose import token_sum, using_summation
from helmscope.kernels.dense import Dense
from helmscope.kernels.harmonic import Harmonic, harmonic_degree
from helmscope.kernels.harmonic_gpu import LaunchConfig, gpu_sums
from helmscope.kernels.request import Request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = math.nan


def cloud(n: int, d: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, n, d, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1).float()


def over_scale(x: torch.Tensor, beta: float, mass: torch.Tensor | None = None, **options) -> torch.Tensor:
    """Mass and sum divided by e^beta, (system, n, 1 + d), by the kernels."""
    degree = harmonic_degree(beta, dim=x.shape[-1], tol=1e-7)
    weights = None if mass is None else mass.to(DEVICE)
    total, z, _ = gpu_sums(x.to(DEVICE), weights, beta, degree, **options)
    return torch.cat([z, total], -1).cpu()


def exact(x: torch.Tensor, beta: float, mass: torch.Tensor | None = None, *, skip_self: bool = False) -> torch.Tensor:
    x, mass = x.double(), None if mass is None else mass.double()
    sums = Dense().sum(Request(beta * x, x, x, weights=mass, skip_self=skip_self))
    scales = torch.exp(sums.mass_shift - beta), torch.exp(sums.shift - beta)
    return torch.cat([sums.mass * scales[0], sums.total * scales[1]], -1)


@pytest.fixture
def by_gpu_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``Harmonic`` use these kernels on a CPU too."""
    monkeypatch.setattr("helmscope.kernels.harmonic.fits", lambda x, degree: True)


@pytest.mark.parametrize(
    ("d", "beta", "n", "weighted", "skip_self"),
    [
        *((2, 0.0, 300, False, False), (2, 1.0, 17, True, True), (2, 4.0, 1, False, True), (2, 4.0, 2, True, False)),
        *((2, 12.0, 300, True, True), (2, 100.0, 3, True, False), (3, 0.0, 17, True, False), (3, 1.0, 300, True, True)),
        *((3, 4.0, 1, False, False), (3, 4.0, 2, False, True), (3, 4.0, 3, True, True), (3, 4.0, 300, False, False)),
        (3, 12.0, 150, True, True),
    ],
)  # fmt: skip
def test_they_agree_with_dense_sums(d: int, beta: float, n: int, weighted: bool, skip_self: bool) -> None:
    """Within (2 + beta) 2^-23 of e^beta times the weight: a norm of 1 + 2^-25 alone costs beta 2^-24."""
    x, mass = cloud(n, d, seed=n), None
    if weighted:
        mass = torch.rand(1, n, generator=torch.Generator().manual_seed(1))
        mass[:, : n // 3] = 0.0
    got, expected = over_scale(x, beta, mass, skip_self=skip_self), exact(x, beta, mass, skip_self=skip_self)
    assert got.dtype == torch.float32
    weight = float(n if mass is None else mass.sum())
    assert float((got - expected).abs().max()) <= (2 + beta) * 2**-23 * weight


def test_means_are_accurate_at_and_near_special_points() -> None:
    """Poles, also with signed zeros, antipodes, a point very close to a pole, equal tokens, and a narrow cluster."""
    rows = [[0.0, 0.0, 1.0], [-0.0, 0.0, 1.0], [0.0, -0.0, -1.0], [-1.0, -0.0, 0.0], [1.0, 0.0, -0.0], [0.0, -1.0, 0.0]]
    chosen = torch.tensor([*rows, rows[0], [1e-30, -1e-30, 1.0], [1e-4, 0.0, 1.0], [0.6, -0.8, 0.0]])
    near = torch.nn.functional.normalize(torch.tensor([0.3, 0.5, -0.8]) + 1e-3 * cloud(60, 3)[0], dim=-1)
    circle = torch.nn.functional.normalize(chosen[chosen[:, 1:].any(-1), 1:], dim=-1)
    for x in (chosen, near, near[:1].expand(90, 3), circle, circle[-1:].expand(90, 2)):
        got, expected = (f(x[None], 4.0) for f in (over_scale, exact))
        mean, expected_mean = (sums[..., 1:] / sums[..., :1] for sums in (got.double(), expected))
        assert float((mean - expected_mean).norm() / expected_mean.norm()) < 3e-7


@pytest.mark.parametrize("d", [2, 3])
def test_a_system_does_not_depend_on_its_batch_and_a_nan_affects_only_its_system(d: int) -> None:
    x, mass = cloud(70, d, batch=2), torch.rand(2, 70, generator=torch.Generator().manual_seed(2))
    x[0, 5, d - 1] = NAN
    # several parts with several steps each, some of them beyond the last token
    partitions = (LaunchConfig(16, 3, 4), LaunchConfig(16, 3, 4))
    with_nan, clean = over_scale(x, 0.5, mass, partitions=partitions)
    assert bool(with_nan.isnan().all())
    assert torch.equal(clean, over_scale(x[1:], 0.5, mass[1:], partitions=partitions)[0])
    assert float((clean - exact(x[1], 0.5, mass[1])).abs().max()) < 70 * 2e-7


@pytest.mark.parametrize(
    ("n", "partition"),
    [
        (1, LaunchConfig(16, 4, 4)),
        (64, LaunchConfig(16, 4, 4)),
        (65, LaunchConfig(16, 4, 4)),
        (10**7, LaunchConfig(32, 512, 4)),
    ],
)
def test_a_partition_covers_every_token_without_idle_programs(n: int, partition: LaunchConfig) -> None:
    parts, steps = partition.programs_and_steps(n)
    assert 1 <= parts <= partition.programs
    assert (parts - 1) * steps * partition.tokens < n <= parts * steps * partition.tokens


@pytest.mark.usefixtures("by_gpu_sums")
@pytest.mark.parametrize(("d", "weighted"), [(2, True), (3, False)])
def test_inaccurate_systems_are_the_same_as_without_the_gpu_diagnostics(d: int, weighted: bool) -> None:
    """Five systems: accurate, with a token off the sphere, with an isolated token, with a zero vector, with a NaN."""
    x = cloud(60, d, batch=5)
    x[1, 7] *= 1 + 1e-5
    x[2] = torch.nn.functional.normalize(x[2] * 0.01 + torch.eye(d)[0], dim=-1)
    x[2, 3] = -torch.eye(d)[0]
    x[3, 0] = 0.0
    x[4, 0, 0], x[4, 1] = NAN, 2.0
    weights = torch.linspace(0, 1, 60) if weighted else None
    request = Request(*(part.to(DEVICE) for part in (4 * x, x, x)), beta=4.0, skip_self=True,
                      weights=None if weights is None else weights.to(DEVICE))  # fmt: skip
    sums, inaccurate = Harmonic().checked_sum(request)
    assert inaccurate.tolist() == [False, True, True, True, False]
    assert inaccurate.tolist() == Harmonic().inaccurate_systems(request, sums).tolist()


@pytest.mark.usefixtures("by_gpu_sums")
def test_the_dispatcher_falls_back_to_pairwise_sums_for_inaccurate_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helmscope.kernels.choose.MAX_DENSE_TOKENS", 16)
    x = cloud(200, 2, batch=2)
    for isolated, names in ((False, {"Harmonic"}), (True, {"Harmonic", "Flash" if DEVICE == "cuda" else "Blockwise"})):
        if isolated:
            x[1] = torch.nn.functional.normalize(x[1] * 0.01 + torch.eye(2)[0], dim=-1)
            x[1, 3] = -torch.eye(2)[0]
        y = x.to(DEVICE)
        with using_summation() as used:
            sums = token_sum(Request(4 * y, y, y, beta=4.0, skip_self=True))
        assert used == names
        expected = Dense().sum(Request(*(4 * x.double(), x.double(), x.double()), beta=4.0, skip_self=True)).mean
        assert sums.shift.shape == (2, 200, 1)
        error = (sums.mean.cpu() - expected).abs().amax((1, 2))
        assert float(error[0]) < 5e-7
        assert float(error[1]) < 2e-6  # Blockwise in float32 has 1e-6
