"""Statistics of pairs of tokens against loops in plain Python and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.geometry.sphere import retract
from helmscope.models.record import record
from helmscope.observe import cloud_statistics, effective_rank, nuclear_rank, participation_ratio, stable_rank
from helmscope.observe import pairs as pairs_module
from helmscope.observe.rank import collapse_residual_composite, collapse_residual_frobenius
from helmscope.types import HelmscopeError, Trajectory
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
LEVELS = (-0.2, 0.3)


def sample(depths=2, batch=3, n=9, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = retract(torch.randn(depths, batch, n, dim, generator=generator, dtype=F64))
    weights = torch.rand(1, batch, n, generator=generator, dtype=F64) + 0.1
    weights[:, :, -2:] = 0
    ids = torch.randint(0, 4, (batch, n), generator=generator)
    radius = torch.rand(depths, batch, n, generator=generator, dtype=F64)
    times = torch.arange(depths, dtype=F64)
    return Trajectory(times, states, weights, radius, axis="depth", replicate="prompt"), ids


def by_loops(cloud, weights, ids, gap):
    """Mean inner product and shares of one cloud for the three sets of pairs, without the first token."""
    n, found = len(cloud), {}
    for name in ("distant", "all", "as printed"):
        total, mean, above = 0.0, 0.0, [0.0] * len(LEVELS)
        for i in range(1, n):
            for j in range(1, n):
                if name != "as printed" and i == j:
                    continue
                if name == "distant" and (abs(i - j) < gap or ids[i] == ids[j]):
                    continue
                product = math.fsum(a * b for a, b in zip(cloud[i], cloud[j], strict=True))
                weight = weights[i] * weights[j]
                total += weight
                mean += weight * product
                above = [part + weight * (product > level) for part, level in zip(above, LEVELS, strict=True)]
        found[name] = [mean / total, *(part / total for part in above)]
    return found


def test_pairs_agree_with_loops():
    path, ids = sample()
    measured = cloud_statistics(path, ids=ids, levels=LEVELS, gap=3)
    for depth in range(2):
        for prompt in range(3):
            cloud = path.states[depth, prompt].tolist()
            expected = by_loops(cloud, path.weights[0, prompt].tolist(), ids[prompt].tolist(), 3)
            for name, (mean, *shares) in expected.items():
                at = measured.isel(depth=depth, prompt=prompt).sel(pairs=name)
                assert float(at.mean_inner_product) == pytest.approx(mean, abs=1e-13)
                assert at.aligned_pair_share.values == pytest.approx(shares, abs=1e-13)


def test_ranks_residuals_and_radius_are_those_of_the_cloud_without_its_first_token():
    path, _ = sample()
    measured = cloud_statistics(path, gap=1)
    x, m = path.states[:, :, 1:], path.weights[:, :, 1:].expand(2, -1, -1)
    for name, function in (
        ("effective_rank", effective_rank),
        ("participation_ratio", participation_ratio),
        ("stable_rank", stable_rank),
        ("nuclear_rank", nuclear_rank),
    ):
        assert measured[name].values == pytest.approx(function(x, weights=m).numpy(), abs=1e-6), name
    for name, function in (
        ("collapse_residual_frobenius", collapse_residual_frobenius),
        ("collapse_residual_composite", collapse_residual_composite),
    ):
        expected = function(x, relative=True, weights=m)
        assert measured[name].values == pytest.approx(expected.numpy(), abs=1e-12), name
    radius = (path.radius[:, :, 1:] * m).sum(-1) / m.sum(-1)
    assert measured.radius.values == pytest.approx(radius.numpy(), abs=1e-13)


def closed_form(states, **options):
    path = Trajectory(torch.zeros(1, dtype=F64), states[None, None])
    return cloud_statistics(path, gap=1, levels=[0.9], include_first_token=True, **options).isel(time=0, system=0)


def test_orthogonal_tokens():
    n = 6
    found = closed_form(torch.eye(n, dtype=F64))
    assert found.mean_inner_product.values == pytest.approx([0, 0, 1 / n], abs=1e-15)
    assert found.aligned_pair_share.values[:, 0] == pytest.approx([0, 0, 1 / n], abs=1e-15)
    for name in ("effective_rank", "participation_ratio", "stable_rank", "nuclear_rank"):
        assert float(found[name]) == pytest.approx(n, abs=1e-12)
    assert float(found.collapse_residual_frobenius) == pytest.approx(math.sqrt(1 - 1 / n), abs=1e-14)


def test_coincident_tokens():
    found = closed_form(torch.eye(6, dtype=F64)[:1].expand(5, 6))
    assert found.mean_inner_product.values == pytest.approx([1, 1, 1], abs=1e-15)
    assert found.aligned_pair_share.values[:, 0] == pytest.approx([1, 1, 1], abs=1e-15)
    for name in ("effective_rank", "participation_ratio", "stable_rank", "nuclear_rank"):
        assert float(found[name]) == pytest.approx(1, abs=1e-6)
    assert float(found.collapse_residual_frobenius) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("gamma", [0.3, 0.95])
def test_equiangular_tokens(gamma):
    n = 7
    gram = gamma + (1 - gamma) * torch.eye(n, dtype=F64)
    found = closed_form(torch.linalg.cholesky(gram))
    above = float(gamma > 0.9)
    assert found.mean_inner_product.values == pytest.approx([gamma, gamma, gamma + (1 - gamma) / n], abs=1e-14)
    assert found.aligned_pair_share.values[:, 0] == pytest.approx([above, above, above + (1 - above) / n], abs=1e-14)
    largest = 1 + (n - 1) * gamma
    assert float(found.stable_rank) == pytest.approx(n / largest, abs=1e-12)
    power = largest**2 + (n - 1) * (1 - gamma) ** 2
    assert float(found.participation_ratio) == pytest.approx(n**2 / power, abs=1e-12)


def test_the_chunk_size_changes_nothing(monkeypatch):
    path, ids = sample(batch=5)
    whole = cloud_statistics(path, ids=ids, gap=2)
    monkeypatch.setattr(pairs_module, "CHUNK", 1)
    assert all((cloud_statistics(path, ids=ids, gap=2)[name].values == whole[name].values).all() for name in whole)


def test_without_any_pair_there_is_no_number():
    path, ids = sample()
    measured = cloud_statistics(path, ids=torch.zeros_like(ids), gap=2)
    assert np.isnan(measured.aligned_pair_share.sel(pairs="distant")).all()
    assert measured.aligned_pair_share.sel(pairs="all").notnull().all()


def test_a_recording_brings_ids_weights_and_the_sphere_of_the_theory():
    recording = record(tiny_model("bert", dtype=F64), inputs_of("bert", n=20))
    measured = cloud_statistics(recording, gap=4)
    ids = inputs_of("bert", n=20)
    path = recording.on_sphere
    expected = cloud_statistics(path, ids=ids, gap=4)
    assert measured.aligned_pair_share.dims == ("depth", "prompt", "pairs", "level")
    assert measured.aligned_pair_share.equals(expected.aligned_pair_share)
    assert measured.attrs["gap"] == 4
    last = by_loops(path.states[-1, 0].tolist(), [1.0] * 20, ids[0].tolist(), 4)
    assert float(measured.mean_inner_product.sel(pairs="distant")[-1, 0]) == pytest.approx(
        last["distant"][0], abs=1e-12
    )


def test_padding_does_not_count():
    path, ids = sample()
    moved = path.states.clone()
    moved[:, :, -2:] = -moved[:, :, -2:]
    other = Trajectory(path.times, moved, path.weights, path.radius, axis="depth", replicate="prompt")
    assert cloud_statistics(path, ids=ids, gap=2).identical(cloud_statistics(other, ids=ids, gap=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"levels": []}, "levels is"),
        ({"levels": [1.5]}, "levels is"),
        ({"gap": 0}, "gap is 0"),
        ({"ids": torch.zeros(3, 9)}, "ids is torch.float32"),
        ({"ids": torch.zeros(3, 8, dtype=torch.long)}, "ids is torch.int64 \\(3, 8\\)"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(HelmscopeError, match=words):
        cloud_statistics(sample()[0], **options)
