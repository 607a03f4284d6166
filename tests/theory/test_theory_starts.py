"""Random starts: moments and distributions against closed forms and SciPy, seeds, dtypes and bad input."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, stats

from helmscope.theory.starts import Orthonormal, Start, Uniform, VonMisesFisher
from helmscope.types import HelmscopeError

STARTS = [
    Uniform(n=4, dim=5),
    VonMisesFisher(n=4, dim=5, kappa=3.0),
    Orthonormal(n=4, dim=5),
]


def standard_errors(values: torch.Tensor, expected: torch.Tensor | float) -> float:
    """The largest deviation of a column mean from ``expected``, in standard errors."""
    stderr = values.std(0) / math.sqrt(len(values))
    return ((values.mean(0) - expected) / stderr).abs().max().item()


@pytest.mark.parametrize("start", STARTS)
def test_shapes_norms_and_protocol(start):
    assert isinstance(start, Start)
    assert start.sample().shape == (4, 5)
    assert start.sample(batch=3).shape == (3, 4, 5)
    assert torch.equal(start.sample(batch=1, seed=7)[0], start.sample(seed=7))
    x = start.sample(batch=50, seed=1)
    assert (x.dtype, x.device.type) == (torch.float64, "cpu")
    assert (torch.linalg.vector_norm(x, dim=-1) - 1).abs().max() < 1e-15


@pytest.mark.parametrize("start", STARTS)
def test_a_seed_determines_the_tokens_and_float32_tokens_are_rounded_float64_tokens(start):
    x = start.sample(batch=2, seed=3)
    state = torch.get_rng_state()
    assert torch.equal(start.sample(batch=2, seed=3), x)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not used
    assert torch.equal(start.draw(torch.Generator().manual_seed(3), 2), x)
    assert torch.equal(start.sample(batch=2, seed=3, dtype=torch.float32), x.float())
    samples = [start.sample(seed=seed) for seed in (0, 1, 2, 2**32 - 1)]
    assert all(not torch.isclose(a, b).any() for i, a in enumerate(samples) for b in samples[:i])
    assert not torch.isclose(x[0], x[1]).any()


def coordinate_distribution(dim: int) -> stats.rv_continuous:
    """Distribution of one coordinate of a uniform point: density ~ (1 - t^2)^((d-3)/2) on [-1, 1]."""
    return stats.beta((dim - 1) / 2, (dim - 1) / 2, loc=-1, scale=2)


@pytest.mark.parametrize("dim", [2, 3, 17])
def test_uniform_moments_and_distribution(dim):
    x = Uniform(n=50, dim=dim).sample(batch=400, seed=0).reshape(-1, dim)
    assert standard_errors(x, 0.0) < 4
    second = x.unsqueeze(-1) * x.unsqueeze(-2)
    assert standard_errors(second.flatten(1), torch.eye(dim).flatten() / dim) < 4
    axis = torch.ones(dim, dtype=torch.float64) / math.sqrt(dim)
    assert stats.kstest((x @ axis).numpy(), coordinate_distribution(dim).cdf).pvalue > 1e-3


def mean_cosine(dim: int, kappa: float) -> mpmath.mpf:
    """A_d(kappa) = I_{d/2}(kappa) / I_{d/2-1}(kappa)."""
    if kappa == 0:
        return mpmath.mpf(0)
    with mpmath.workdps(40):
        return mpmath.besseli(mpmath.mpf(dim) / 2, kappa) / mpmath.besseli(mpmath.mpf(dim) / 2 - 1, kappa)


def chord_cdf(dim: int, kappa: float, chord: np.ndarray) -> np.ndarray:
    """Distribution function of |x - mean|: density e^{-kappa c^2/2} sin(a)^(d-2) da, c = 2 sin(a/2), by Simpson."""
    widest = min(math.pi, (10 + 2 * math.sqrt(dim)) / math.sqrt(max(kappa, 1e-9)))
    angle = np.linspace(0, widest, 20_001)
    density = np.exp(-2 * kappa * np.sin(angle / 2) ** 2) * (np.sin(angle) / math.sin(min(widest, 1.5))) ** (dim - 2)
    mass = integrate.cumulative_simpson(density, x=angle, initial=0)
    return np.interp(2 * np.arcsin(chord / 2), angle, mass / mass[-1])


@pytest.mark.parametrize("dim", [2, 3, 4, 64])
@pytest.mark.parametrize("kappa", [0.0, 0.5, 5.0, 100.0, 1e6])
def test_von_mises_fisher_cosine(dim, kappa):
    mean = torch.linspace(-1, 2, dim, dtype=torch.float64)
    start = VonMisesFisher(n=100, dim=dim, kappa=kappa, mean=mean)
    x = start.sample(batch=100, seed=5).reshape(-1, dim)
    chord = torch.linalg.vector_norm(x - start.direction, dim=-1)  # 1 - cosine = chord^2/2, without cancellation
    assert standard_errors(chord.square() / 2, float(1 - mean_cosine(dim, kappa))) < 4
    assert stats.kstest(chord.numpy(), lambda c: chord_cdf(dim, kappa, c)).pvalue > 1e-3
    tangential = x - (x @ start.direction).unsqueeze(-1) * start.direction
    assert standard_errors(tangential, 0.0) < 4


def test_von_mises_fisher_against_scipy_sampler():
    mean = torch.tensor([1.0, -2.0, 0.5])
    start = VonMisesFisher(n=5000, dim=3, kappa=4.0, mean=mean)
    reference = stats.vonmises_fisher(start.direction.numpy(), 4.0).rvs(5000, random_state=0)
    x = start.sample(seed=0).numpy()
    for axis in np.eye(3):
        assert stats.ks_2samp(x @ axis, reference @ axis).pvalue > 1e-3


def test_von_mises_fisher_at_kappa_zero_is_uniform_token_by_token():
    flat = VonMisesFisher(n=100, dim=6, kappa=0.0, mean=torch.arange(6.0)).sample(batch=5, seed=2)
    assert (flat - Uniform(n=100, dim=6).sample(batch=5, seed=2)).abs().max() < 1e-15


@pytest.mark.parametrize("dim", [2, 512])
def test_von_mises_fisher_is_accurate_at_huge_kappa(dim):
    # kappa |x - mean|^2 is chi-squared with d - 1 degrees of freedom up to O(1/kappa)
    x = VonMisesFisher(n=4000, dim=dim, kappa=1e12, mean=torch.eye(dim)[-1]).sample(seed=0)
    squared = 1e12 * (x - torch.eye(dim, dtype=torch.float64)[-1]).square().sum(-1)
    assert stats.kstest(squared.numpy(), stats.chi2(dim - 1).cdf).pvalue > 1e-3
    largest_kappa = VonMisesFisher(n=10, dim=dim, kappa=1.7e308).sample(seed=0)
    assert torch.equal(largest_kappa, torch.eye(dim, dtype=torch.float64)[0].expand(10, dim))


@pytest.mark.parametrize(("n", "dim"), [(1, 2), (3, 3), (32, 512), (64, 64)])
def test_orthonormal_frames(n, dim):
    x = Orthonormal(n=n, dim=dim).sample(batch=4, seed=0)
    assert (x @ x.mT - torch.eye(n, dtype=torch.float64)).abs().max() < 1e-14
    if n == dim:
        assert (torch.linalg.det(x) - 1).abs().max() < 1e-12


def test_orthonormal_frames_are_haar_distributed():
    x = Orthonormal(n=3, dim=3).sample(batch=10_000, seed=1)
    assert standard_errors(x.flatten(1), 0.0) < 4
    for row in range(3):
        assert stats.kstest(x[:, row, 1].numpy(), coordinate_distribution(3).cdf).pvalue > 1e-3
    # the angle of a Haar-distributed rotation of R^3 has the density (1 - cos a)/pi, also after a fixed rotation
    fixed = Orthonormal(n=3, dim=3).sample(seed=99)
    for rotations in (x, x @ fixed, fixed @ x):
        trace = rotations.diagonal(dim1=-2, dim2=-1).sum(-1)
        angle = torch.arccos(((trace - 1) / 2).clamp(-1, 1)).numpy()
        assert stats.kstest(angle, lambda a: (a - np.sin(a)) / math.pi).pvalue > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(n=0, dim=3), "n is 0"),
        (lambda: Uniform(n=2.5, dim=3), "n is 2.5"),
        (lambda: Uniform(n=2, dim=1), "dim is 1"),
        (lambda: VonMisesFisher(n=2, dim=3, kappa=-1.0), "kappa is -1.0"),
        (lambda: VonMisesFisher(n=2, dim=3, kappa=math.inf), "kappa is inf"),
        (lambda: VonMisesFisher(n=2, dim=3, kappa=1.0, mean=[1, 0, 0]), "mean is a list"),
        (lambda: VonMisesFisher(n=2, dim=3, kappa=1.0, mean=torch.ones(2)), r"mean is of shape \(2,\)"),
        (lambda: VonMisesFisher(n=2, dim=2, kappa=1.0, mean=torch.zeros(2)), r"mean is \[0.0, 0.0\]"),
        (lambda: VonMisesFisher(n=2, dim=2, kappa=1.0, mean=torch.tensor([1.0, math.nan])), "mean is .*nan"),
        (lambda: Orthonormal(n=4, dim=3), "n is 4.*dim = 3"),
        (lambda: Uniform(n=10**400, dim=3), r"n is 10{70}.*, but .* below 2\^63"),
        (lambda: VonMisesFisher(n=2, dim=10**5000, kappa=1.0), r"dim is a whole number of .* bits, but .* below 2\^63"),
        (
            lambda: Uniform(n=2, dim=3).sample(batch=10**400),
            r"batch is 10{70}.*, but .* below 2\^63",
        ),
        (lambda: Uniform(n=2, dim=3).sample(batch=10**12), r"batch is 10{12}, n is 2 and dim is 3, but that makes"),
        (lambda: Orthonormal(n=10**7, dim=10**7).sample(), r"n is 10{7} and dim is 10{7}, but that makes 8e\+05 GB"),
        (
            lambda: Uniform(n=10**7, dim=10**8).sample_in_span(),
            r"n is 10{7} and dim is 10{8}, but that makes 8e\+05 GB",
        ),
        (lambda: Uniform(n=2, dim=3).sample(batch=0), "batch is 0"),
        (lambda: Uniform(n=2, dim=3).sample(seed=-1), "seed is -1"),
        (lambda: Uniform(n=2, dim=3).sample(seed=0.5), "seed is 0.5"),
        (lambda: Uniform(n=2, dim=3).sample(seed=2**32), "seed is 4294967296"),
        (lambda: Uniform(n=2, dim=3).sample(dtype=torch.float16), "dtype is torch.float16"),
        (lambda: Uniform(n=2, dim=3).sample(device="nowhere"), "device is 'nowhere'"),
    ],
)
def test_bad_input_raises_one_sentence(make, message):
    with pytest.raises(HelmscopeError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
