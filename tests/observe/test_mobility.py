"""The Jacobian of Sigma^-1 b: against automatic differentiation of the field itself, on planted fields and models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import jacfwd
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5Model

import helmscope as hs
from helmscope.fields.activations import Tanh
from helmscope.observe.attention_surface_divergence import attention_surface_divergence
from helmscope.observe.mobility_test import _Mobility, mobility_test, mobility_unsupported
from helmscope.observe.query_slopes import RecordedSlopes
from helmscope.observe.sigma_field import SigmaField

F64 = torch.float64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


class Head:
    """Weights softmax(<k_j, x>) of values v_j, as functions of a unit vector x."""

    def __init__(self, keys: int, dim: int) -> None:
        self.key, self.value = random(keys, dim, seed=1), random(keys, dim, seed=2)

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        return (self.key @ x).softmax(-1)

    def sigma(self, x: torch.Tensor) -> torch.Tensor:
        p = self.weights(x)
        spread = self.value - p @ self.value
        onto = torch.eye(len(x), dtype=F64) - torch.outer(x, x)
        return onto @ (p[:, None] * spread).mT @ spread @ onto / 2

    def field(self, x: torch.Tensor) -> SigmaField:
        p = self.weights(x)
        return SigmaField(x, p, self.value - p @ self.value, jacfwd(self.weights)(x))


def share_of(field: object, sigma: torch.Tensor, x: torch.Tensor, tol: float = 1e-6) -> float:
    """The antisymmetric share of the Jacobian of a tangent field, on the range of Sigma."""
    jacobian = jacfwd(lambda z: field(z / z.norm()))(x)  # type: ignore[operator]
    onto = sigma @ torch.linalg.pinv(sigma, rtol=tol, hermitian=True)
    inner = onto @ jacobian @ onto
    return float((inner - inner.mT).square().sum() / 4 / inner.square().sum())


A, B = random(6, 6, seed=5), random(6, 6, seed=6)


def drift(x: torch.Tensor) -> torch.Tensor:
    return A @ x + (B @ x).sin()


@pytest.mark.parametrize("keys", [4, 12])
def test_the_jacobian_is_that_of_automatic_differentiation(keys: int) -> None:
    """With 4 keys Sigma has rank 3 of 5, and part of the drift is outside its range."""
    head, x = Head(keys, 6), random(6) / random(6).norm()
    (solved,) = head.field(x).solved([(drift(x), jacfwd(drift)(x))], 1e-6)

    def whole(z: torch.Tensor) -> torch.Tensor:
        force = drift(z) - (z @ drift(z)) * z
        return torch.linalg.pinv(head.sigma(z), rtol=1e-6, hermitian=True) @ force

    assert len(solved.jacobian) == min(keys - 1, 5)
    assert solved.share == pytest.approx(share_of(whole, head.sigma(x), x), rel=1e-9)
    assert 0.01 < solved.share < 0.99
    if keys == 12:
        assert solved.outside == pytest.approx(0, abs=1e-20)
    else:
        assert solved.outside > 0.01


@pytest.mark.parametrize("keys", [4, 12])
def test_a_drift_with_the_mobility_sigma_has_no_antisymmetric_share(keys: int) -> None:
    """b = Sigma grad V, with V = sin <a, x> + exp <c, x>; another potential per component has one."""
    head, x, (a, c) = Head(keys, 6), random(6) / random(6).norm(), random(2, 6, seed=3)

    def carried(z: torch.Tensor) -> torch.Tensor:
        return head.sigma(z / z.norm()) @ (a * (a @ z).cos() + c * (c @ z).exp())

    def turned(z: torch.Tensor) -> torch.Tensor:
        return carried(z) + head.sigma(z / z.norm()) @ (a * (c @ z))

    found = head.field(x).solved([(each(x), jacfwd(each)(x)) for each in (carried, turned)], 1e-6)
    assert found[0].share < 1e-18
    assert found[0].outside < 1e-20
    assert found[1].share > 1e-3


def test_no_noise_has_no_inverse() -> None:
    x = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    field = SigmaField(x, torch.ones(1, dtype=F64), torch.zeros(1, 3, dtype=F64), torch.zeros(1, 3, dtype=F64))
    assert field.solved([(x, torch.eye(3, dtype=F64))], 1e-6) is None


def small_gpt2(layers: int = 2) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=8, n_head=2, n_layer=layers, bos_token_id=0, eos_token_id=0,
        layer_norm_epsilon=1e-14,  # forces read unit vectors
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.requires_grad_(False)


IDS = torch.randint(1, 32, (2, 9), generator=torch.Generator().manual_seed(1))


def share_of_block(block: torch.nn.Module, states: torch.Tensor, token: int) -> float:
    """The share of a block of GPT-2, written out as a function of the direction of one token, with fixed keys and
    values.
    """
    y = states[token]
    mean, radius = y.mean(), (y - y.mean()).norm()
    read = block.attn.c_attn(block.ln_1(states))
    key, value = read[: token + 1, 8:16], read[: token + 1, 16:]

    def heads(z: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        query = block.attn.c_attn(block.ln_1(mean + radius * z))[:8]
        found = []
        for part in (slice(0, 4), slice(4, 8)):
            p = (key[:, part] @ query[part] / 2).softmax(-1)
            found.append((p, value[:, part] @ block.attn.c_proj.weight[part]))
        return found

    def tangent(z: torch.Tensor) -> torch.Tensor:
        return torch.eye(8, dtype=F64) - torch.outer(z, z) - 1 / 8

    def sigma(z: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(8, 8, dtype=F64)
        for p, written in heads(z):
            spread = (written - p @ written) / radius
            total = total + (p[:, None] * spread).mT @ spread / 2
        return tangent(z) @ total @ tangent(z)

    def solved(z: torch.Tensor) -> torch.Tensor:
        write = sum(p @ written for p, written in heads(z)) + block.attn.c_proj.bias
        total = write + block.mlp(block.ln_2(mean + radius * z + write))
        return torch.linalg.pinv(sigma(z), rtol=1e-6, hermitian=True) @ tangent(z) @ total / radius

    x = (y - mean) / radius
    return share_of(solved, sigma(x), x)


def test_a_small_model_agrees_with_its_block_written_out() -> None:
    model = small_gpt2()
    recording = hs.record(model, IDS)
    measured = mobility_test(recording, sampled_tokens=20)
    for layer in (0, 1):
        block, states = model.transformer.h[layer], recording.residual_stream(depth=2 * layer)[0]
        single = [share_of_block(block, states, token) for token in range(1, 9)]
        assert float(measured.antisymmetric_share[layer, 0]) == pytest.approx(np.mean(single), rel=1e-8)


def test_slopes_of_rotary_grouped_heads_give_the_divergence() -> None:
    """tr(T D b) - d_t <x, b> / |y| by the slopes of the weights, against ``attention_surface_divergence`` with all
    probes.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    recording = hs.record(model, IDS)
    exact = attention_surface_divergence(recording, random_signs=2, per_token=True)
    found = {}

    class Divergences(_Mobility):
        def mlp(self, context, tensors) -> None:  # type: ignore[no-untyped-def]
            for row, line in enumerate(self._halves["attention"].fields):
                for k, field in enumerate(line):
                    found[context.layer, row, k + 1] = float((field.onto @ field.drift_slopes).trace())
            self._halves = {}

    instrument = Divergences(recording, sampled_tokens=8, seed=0, tol=1e-6)
    instrument.slopes = RecordedSlopes(recording, instrument.sampled)
    instrument.slopes.feed(instrument, None)
    for (layer, row, token), trace in found.items():
        y = recording.residual_stream(depth=2 * layer)[row, token]
        kernel, x = recording.kernel(layer=layer)[row, :, token], y / y.norm()
        attention = model.model.layers[layer].self_attn
        read = model.model.layers[layer].input_layernorm(recording.residual_stream(depth=2 * layer)[row])
        value = attention.v_proj(read).reshape(9, 2, 2).repeat_interleave(2, 1)
        written = attention.o_proj(torch.einsum("hj,jhs->hs", kernel, value).reshape(-1)).detach()
        expected = float(exact.token_surface_divergence[layer, row, :, token].sum()) + 7 * float(x @ written / y.norm())
        assert trace == pytest.approx(expected, rel=1e-4, abs=1e-6)  # the family's softmax is in float32
    assert len(found) == 32


def test_a_simulated_block_agrees_with_automatic_differentiation() -> None:
    x = torch.nn.functional.normalize(random(1, 7, 4), dim=-1)
    mlp = hs.MLP(w_in=random(5, 4, seed=1), w_out=random(4, 5, seed=2), b_in=random(5, seed=3), activation=Tanh())
    value = random(4, 4, seed=4)
    run = hs.integrate(hs.Block(hs.SA(beta=2.0, value=value), mlp), x, times=[0.0])
    single = []
    for i in range(1, 7):

        def parts(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            p = (2 * x[0] @ z).softmax(-1)
            spread = x[0] @ value.mT - p @ x[0] @ value.mT
            onto = torch.eye(4, dtype=F64) - torch.outer(z, z)
            sigma = onto @ (p[:, None] * spread).mT @ spread @ onto / 2
            return sigma, onto @ (p @ x[0] @ value.mT + mlp(z[None])[0])

        def solved(z: torch.Tensor) -> torch.Tensor:
            sigma, force = parts(z)
            return torch.linalg.pinv(sigma, rtol=1e-6, hermitian=True) @ force

        single.append(share_of(solved, parts(x[0, i])[0], x[0, i]))
    measured = mobility_test(run, sampled_tokens=10)
    assert float(measured.antisymmetric_share[0, 0]) == pytest.approx(np.mean(single), rel=1e-9)


def test_values_do_not_depend_on_chunks_and_single_keys_have_none() -> None:
    model = small_gpt2()
    whole, parts = (mobility_test(hs.record(model, IDS, batch_size=size), sampled_tokens=2, seed=3) for size in (2, 1))
    for name in ("antisymmetric_share", "antisymmetric_share_null", "outside_range"):
        assert whole[name].values == pytest.approx(parts[name].values, rel=1e-6)
    alone = mobility_test(hs.record(model, IDS[:, :1]))
    assert np.isnan(alone.antisymmetric_share.values).all()


def test_refusals_are_sentences() -> None:
    sizes = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    ids = torch.tensor([[1, 2, 3, 4]])
    decoder = hs.record(T5Model(T5Config(**sizes, decoder_start_token_id=0)).eval(), ids, targets=ids)
    assert mobility_unsupported(decoder) == (
        "system is a decoder that reads an encoder, but mobility_test needs blocks of attention and MLP"
    )
    run = hs.integrate(hs.Hardmax(), torch.eye(3).expand(1, 3, 3), times=[0.0])
    with pytest.raises(hs.HelmscopeError, match="Hardmax"):
        mobility_test(run)
    with pytest.raises(hs.HelmscopeError, match="field is MLP, but mobility_test needs"):
        mobility_test(hs.integrate(hs.MLP(w_in=torch.eye(3), w_out=torch.eye(3)), torch.eye(3), times=[0.0]))
