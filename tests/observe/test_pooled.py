"""Moments of the cloud of all prompts and their jackknife, against NumPy and SciPy."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import digamma

import helmscope as hs
from helmscope.observe.pooled import PooledMoments


def cloud(prompts: int = 6, n: int = 9, d: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(prompts, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_moments_are_those_of_numpy_with_and_without_each_prompt() -> None:
    x, weights = cloud() + 1e3, torch.rand(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights[2, 4:] = 0.0
    x[2, 4:] = torch.nan
    pooled = PooledMoments.of(x, weights)

    def by_numpy(rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        points, masses = x[rows].reshape(-1, 3).numpy(), weights[rows].reshape(-1).numpy()
        kept = masses > 0
        return (
            np.average(points[kept], axis=0, weights=masses[kept]),
            np.cov(points[kept].T, aweights=masses[kept], ddof=0),
        )

    mean, covariance = by_numpy(list(range(6)))
    assert pooled.whole.mean.numpy() == pytest.approx(mean, rel=1e-13)
    assert pooled.whole.covariance.numpy() == pytest.approx(covariance, abs=1e-11)
    for k in range(6):
        mean, covariance = by_numpy([row for row in range(6) if row != k])
        assert pooled.without_one.mean[k].numpy() == pytest.approx(mean, rel=1e-13)
        assert pooled.without_one.covariance[k].numpy() == pytest.approx(covariance, abs=1e-11)


def test_entropy_and_information_are_those_of_a_normal_law() -> None:
    x = cloud(4, 500)
    moments = PooledMoments.of(x).whole
    law = stats.multivariate_normal(np.zeros(3), moments.covariance.numpy())
    assert float(moments.gaussian_entropy) == pytest.approx(law.entropy(), rel=1e-12)
    expected = np.trace(np.linalg.inv(moments.covariance.numpy()))
    assert float(moments.gaussian_fisher_information) == pytest.approx(expected, rel=1e-12)


def test_a_cloud_in_a_plane_has_no_entropy_in_space() -> None:
    x = cloud()
    x[..., 2] = x[..., 0] - x[..., 1]
    moments = PooledMoments.of(x).whole
    assert moments.gaussian_entropy == -torch.inf
    assert moments.gaussian_fisher_information == torch.inf
    assert int((moments.eigenvalues > 0).sum()) == 2


def test_the_jackknife_removes_the_bias_of_a_log_determinant() -> None:
    """64 prompts of 8 normal tokens in 20 dimensions: the bias of the plain log det is known by digamma functions, and
    that of the mean of the pseudo-values is within noise of 0."""
    d, prompts, n = 20, 64, 8
    exact = 0.5 * d * np.log(2 * np.pi * np.e)
    plain, corrected = [], []
    for seed in range(40):
        pooled = PooledMoments.of(cloud(prompts, n, d, seed))
        plain.append(float(pooled.whole.gaussian_entropy) - exact)
        corrected.append(float(pooled.pseudo_values(lambda m: m.gaussian_entropy).mean()) - exact)
    total = prompts * n
    expected = 0.5 * (sum(digamma((total - 1 - i) / 2) for i in range(d)) + d * np.log(2 / total))
    assert np.mean(plain) == pytest.approx(expected, abs=4 * np.std(plain) / 40**0.5)
    assert abs(expected) > 0.2
    assert abs(np.mean(corrected)) < 4 * np.std(corrected) / 40**0.5 + 0.01


def test_bad_input() -> None:
    with pytest.raises(hs.HelmscopeError, match="x has 1 prompt"):
        PooledMoments.of(cloud(1))
    with pytest.raises(hs.HelmscopeError, match="without any token of positive weight"):
        PooledMoments.of(cloud(2), torch.tensor([[1.0] * 9, [0.0] * 9]))
