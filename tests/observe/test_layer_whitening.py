"""Whitening of layers: the counterexample of the theory, NumPy oracles and the attention and MLP of a small model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.meanfield.whitening import whiten
from helmscope.observe.layer_whitening import LayerWhitening, layer_whitening, whitening_of

F64 = torch.float64
HESSIAN, SIGMA = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=F64), torch.diag(torch.tensor([1.0, 4.0], dtype=F64))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def whitened(jacobian: torch.Tensor, sigma: torch.Tensor, tol: float = 1e-6) -> dict[str, float]:
    return whitening_of(jacobian, sigma, tol, np.random.default_rng(0))


def test_the_counterexample_of_the_theory() -> None:
    """[[1, 1], [1/4, 2]] after whitening, with the antisymmetric entry 0.375; the commutator of S and Sigma is [[0,
    3/2], [-3/2, 0]]."""
    found = whitened(-HESSIAN[None], SIGMA[None])
    assert found["antisymmetric_share_before"] == 0
    assert found["antisymmetric_share_after"] == pytest.approx(2 * 0.375**2 / (1 + 1 + 1 / 16 + 4), rel=1e-13)
    assert found["commutator"] == pytest.approx(1.5 * math.sqrt(2) / math.sqrt(5.5 * 17), rel=1e-13)
    assert found["sigma_rank"] == 2


def test_a_drift_that_carries_the_mobility_becomes_a_gradient() -> None:
    root, hessian = random(6, 6), random(6, 6, seed=1)
    sigma, hessian = root @ root.mT, hessian + hessian.mT
    found = whitened(-(sigma @ hessian)[None], sigma[None])
    assert found["antisymmetric_share_after"] < 1e-20
    assert found["antisymmetric_share_before"] > 0.01
    assert found["antisymmetric_share_after_null"] > 0.01


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_shares_on_the_range_are_those_of_whiten(rank: int) -> None:
    root, jacobian = random(5, rank), random(3, 5, 5, seed=1)
    sigma = root @ root.mT
    found = whitened(jacobian, sigma.expand(3, 5, 5))
    after = [whiten(-each, sigma).antisymmetric_share_after for each in jacobian]
    assert found["sigma_rank"] == rank
    assert found["antisymmetric_share_after"] == pytest.approx(np.mean(after), rel=1e-9)
    basis = np.linalg.svd(root.numpy())[0][:, :rank]
    inner = np.einsum("ik,tij,jl->tkl", basis, jacobian.numpy(), basis)
    odd = (inner - inner.transpose(0, 2, 1)) / 2
    before = (odd**2).sum((1, 2)) / (inner**2).sum((1, 2))
    assert found["antisymmetric_share_before"] == pytest.approx(before.mean(), rel=1e-12)


def test_variation_is_that_of_the_entries() -> None:
    roots = random(4, 5, 5)
    sigma = roots @ roots.mT
    entries = sigma.reshape(4, -1).numpy()
    expected = entries.var(0, ddof=1).sum() / (entries.mean(0) ** 2).sum()
    assert whitened(random(4, 5, 5), sigma)["sigma_variation"] == pytest.approx(expected, rel=1e-12)
    assert whitened(random(4, 5, 5), sigma[:1].expand(4, 5, 5))["sigma_variation"] == pytest.approx(0, abs=1e-28)
    assert math.isnan(whitened(random(1, 5, 5), sigma[:1])["sigma_variation"])


def test_random_eigenvectors_keep_the_eigenvalues() -> None:
    """For a multiple of the identity any eigenvectors are as good as its own."""
    found = whitened(random(2, 5, 5), 3 * torch.eye(5, dtype=F64).expand(2, 5, 5))
    assert found["antisymmetric_share_after"] == pytest.approx(found["antisymmetric_share_before"], rel=1e-12)
    assert found["antisymmetric_share_after_null"] == pytest.approx(found["antisymmetric_share_before"], rel=1e-12)
    assert found["commutator"] == pytest.approx(0, abs=1e-14)


def test_without_noise_there_is_nothing_to_whiten_by() -> None:
    found = whitened(random(2, 3, 3), torch.zeros(2, 3, 3, dtype=F64))
    assert found["sigma_rank"] == 0
    assert math.isnan(found["antisymmetric_share_change"])
    assert math.isnan(whitened(random(0, 3, 3), random(0, 3, 3))["antisymmetric_share_after"])


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_head=2, n_layer=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tangential_slopes(force: hs.MLP, x: torch.Tensor) -> np.ndarray:
    """The derivative of the tangential force in R^d, by autograd."""

    def tangential(z: torch.Tensor) -> torch.Tensor:
        value = force.ambient(z / z.norm())
        return value - value.mean() - (z @ value) * z / z.norm() ** 2

    slopes: np.ndarray = torch.autograd.functional.jacobian(tangential, x).numpy()
    return slopes


def test_a_small_model_agrees_with_loops_over_keys_and_with_autograd() -> None:
    model, ids = small_model(), torch.randint(1, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    recording = hs.record(model, ids)
    measured = layer_whitening(recording, sampled_tokens=20)  # all tokens but the first
    for layer in (0, 1):
        kernel, state = recording.kernel(layer=layer).numpy(), recording.residual_stream(depth=2 * layer).numpy()
        block = model.transformer.h[layer]
        read = block.ln_1(recording.residual_stream(depth=2 * layer)).detach()
        value = block.attn.c_attn(read)[..., 16:].detach().numpy()
        written = block.attn.c_proj.weight.detach().numpy()
        force, points = recording.force(layer=layer), recording.force_points(layer=layer)
        for prompt in (0, 1):
            sigmas, jacobians = [], []
            for i in range(1, 9):
                y = state[prompt, i] - state[prompt, i].mean()
                radius = np.linalg.norm(y)
                onto = np.eye(8) - np.outer(y, y) / radius**2 - 1 / 8
                total = np.zeros((8, 8))
                for head in (0, 1):
                    part = slice(4 * head, 4 * head + 4)
                    mean = sum(kernel[prompt, head, i, j] * value[prompt, j, part] for j in range(9))
                    for j in range(9):
                        step = (value[prompt, j, part] - mean) @ written[part] / radius
                        total += kernel[prompt, head, i, j] * np.outer(step, step) / 2
                sigmas.append(onto @ total @ onto)
                x = points[prompt, i]
                slopes = tangential_slopes(force, x)
                u = x.numpy()
                there = np.eye(8) - np.outer(u, u) - 1 / 8
                jacobians.append(there @ slopes @ there)
            expected = whitened(torch.tensor(np.stack(jacobians)), torch.tensor(np.stack(sigmas)))
            for name in (
                "antisymmetric_share_before",
                "antisymmetric_share_after",
                "sigma_variation",
                "commutator",
                "sigma_rank",
            ):
                got = float(measured[name][layer, prompt])
                assert got == pytest.approx(expected[name], rel=1e-6), name


def test_tokens_are_the_same_for_every_chunk_size() -> None:
    model, ids = small_model(), torch.randint(1, 32, (5, 9), generator=torch.Generator().manual_seed(1))
    whole, parts = (
        layer_whitening(hs.record(model, ids, batch_size=size), sampled_tokens=2, seed=3) for size in (5, 2)
    )
    assert whole.antisymmetric_share_change.values == pytest.approx(parts.antisymmetric_share_change.values, rel=1e-9)
    assert not np.allclose(
        whole.antisymmetric_share_change,
        layer_whitening(hs.record(model, ids), sampled_tokens=2, seed=4).antisymmetric_share_change,
    )


def test_a_text_of_one_token_has_no_values_and_refusals_are_sentences() -> None:
    measured = layer_whitening(hs.record(small_model(), torch.tensor([[1]])))
    assert np.isnan(measured.antisymmetric_share_change.values).all()
    assert (measured["sigma_rank"].values == 0).all()
    run = hs.integrate(hs.SA(beta=1.0), torch.eye(3).expand(1, 3, 3), times=[0.0])
    with pytest.raises(hs.HelmscopeError, match="system has no MLP"):
        layer_whitening(run)
    with pytest.raises(hs.HelmscopeError, match="sampled_tokens is 0"):
        LayerWhitening(sampled_tokens=0)
