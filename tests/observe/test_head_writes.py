"""Models of what heads write, direct logit attribution, composition of heads and spectra of weights, each against
loops, dense matrices and the model's own forward.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg

from helmscope.intervene import AblateHead
from helmscope.models.record import record
from helmscope.observe import (
    composition_score,
    direct_logit_attribution,
    head_composition,
    head_write_models,
    head_write_r_squared,
    matrix_spectrum,
)
from helmscope.observe.direct_logit_attribution import attribution_unsupported
from helmscope.observe.head_composition import composition_unsupported
from helmscope.observe.weight_spectrum import gaussian_matrix_spectrum, weight_spectrum
from helmscope.stats import random_halves
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64


def causal_kernel(*shape: int, seed: int) -> torch.Tensor:
    logits = torch.randn(*shape, shape[-1], dtype=F64, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(torch.ones(shape[-1], shape[-1], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def values_of(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def r_squared_by_hand(kernel: np.ndarray, values: np.ndarray, fitted: list[int], tested: list[int]) -> list[float]:
    """R^2 of mixing, retrieval and transport of one head, by loops over prompts, queries and keys."""
    n = kernel.shape[-1]
    mixing = sum(kernel[p] for p in fitted) / len(fitted)
    rest = np.zeros((n, n))
    for t in range(1, n):
        open_prompts = [p for p in fitted if 1 - kernel[p, t, 0] > 1e-6]
        for p in open_prompts:
            rest[t, 1:] += kernel[p, t, 1:] / (1 - kernel[p, t, 0]) / len(open_prompts)
    places = list(itertools.product(fitted, range(1, n)))
    mean = sum(kernel[p, t] @ values[p] for p, t in places) / len(places)
    top, bottom = np.zeros(values.shape[-1]), 0.0
    for p, t in places:
        gate = kernel[p, t, 0]
        top += gate * (kernel[p, t] @ values[p] - (1 - gate) * rest[t] @ values[p])
        bottom += gate**2
    bias, errors = top / bottom, np.zeros(4)
    for p, t in itertools.product(tested, range(1, n)):
        write, gate = kernel[p, t] @ values[p], kernel[p, t, 0]
        guesses = (
            mixing[t] @ values[p],
            values[p, int(np.argmax(kernel[p, t]))],
            (1 - gate) * rest[t] @ values[p] + gate * bias,
            mean,
        )
        errors += [((write - guess) ** 2).sum() for guess in guesses]
    return list(1 - errors[:3] / errors[3])


def test_r_squared_against_loops() -> None:
    kernel, values = causal_kernel(6, 3, 5, seed=0), values_of(6, 3, 5, 4, seed=1)
    found = head_write_r_squared(kernel, values, fitted=[0, 2, 5], tested=[1, 3, 4]).mean(0)
    for head in range(3):
        expected = r_squared_by_hand(kernel[:, head].numpy(), values[:, head].numpy(), [0, 2, 5], [1, 3, 4])
        assert found[head].tolist() == pytest.approx(expected, rel=1e-10)


def toy(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight prompts of a head that mixes, one that retrieves and one that transports."""
    values, constant = values_of(8, 1, 9, 5, seed=2), causal_kernel(1, 1, 9, seed=3)
    if kind == "mixing":
        return constant.expand(8, 1, 9, 9), values
    if kind == "retrieval":
        return torch.eye(9, dtype=F64)[causal_kernel(8, 1, 9, seed=4).argmax(-1)], values
    values[:, :, 0] = values[0, :, 0]
    gate = values_of(8, 1, 9, 1, seed=5).sigmoid()
    gate[:, :, 0] = 1
    rest = constant.clone()
    rest[..., 1:, 0] = 0
    rest = rest / rest.sum(-1, keepdim=True)
    kernel = (1 - gate) * rest
    kernel[..., 0] += gate[..., 0]
    return kernel, values


@pytest.mark.parametrize(("kind", "best"), [("mixing", 0), ("retrieval", 1), ("transport", 2)])
def test_planted_heads_are_what_they_are(kind: str, best: int) -> None:
    kernel, values = toy(kind)
    found = head_write_r_squared(kernel, values, fitted=range(4), tested=range(4, 8)).mean(0)[0]
    assert float(found[best]) == pytest.approx(1, abs=1e-12)
    assert all(float(found[k]) < 0.95 for k in range(3) if k != best)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_against_its_own_weights(family: str) -> None:
    """Lengths are those of writes: values of the model's own forward times its output matrix."""
    model, ids = tiny_model(family).double(), inputs_of(family, batch=6, n=7)
    found = head_write_models(record(model, ids), seed=3)
    fitted, tested = (half.tolist() for half in random_halves(6, seed=3))
    assert found.prompt.values.tolist() == tested
    kernels, values = kernels_and_values(model, ids)
    for layer, (kernel, value) in enumerate(zip(kernels, values, strict=True)):
        for head in range(4):
            expected = r_squared_by_hand(kernel[:, head], value[:, head], fitted, tested)
            measured = found.r_squared.isel(layer=layer, head=head).mean("prompt").values
            assert measured == pytest.approx(expected, rel=1e-4)


def kernels_and_values(model: Any, ids: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights, and W_O V (text, head, token, d), of each layer, by the model's own modules."""
    inputs: list[torch.Tensor] = []
    model.set_attn_implementation("eager")
    gpt = hasattr(model, "transformer")
    blocks = model.transformer.h if gpt else model.model.layers
    modules = [block.attn.c_attn if gpt else block.self_attn.v_proj for block in blocks]
    hooks = [each.register_forward_hook(lambda module, args, out: inputs.append(out.detach())) for each in modules]
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    written = []
    for block, out in zip(blocks, inputs, strict=True):
        value = (out.chunk(3, -1)[2] if gpt else out).unflatten(-1, (4 if gpt else 2, -1)).transpose(1, 2)
        value = value.repeat_interleave(4 // value.shape[1], 1)
        matrix = block.attn.c_proj.weight.detach() if gpt else block.self_attn.o_proj.weight.detach().T
        written.append(torch.einsum("bhns,hsd->bhnd", value, matrix.unflatten(0, (4, -1))).numpy())
    return [each.double().numpy() for each in weights], written


def test_the_chunk_size_changes_no_model_of_writes() -> None:
    model, ids = tiny_model("gpt2").double(), inputs_of("gpt2", batch=7, n=6)
    whole, single = (head_write_models(record(model, ids, batch_size=size)).r_squared for size in (7, 2))
    np.testing.assert_allclose(single, whole, rtol=1e-9, atol=1e-10)


def test_attributions_sum_to_the_logits() -> None:
    """Exactly up to the epsilon of the final norm, which is made small here."""
    model, ids = tiny_model("gpt2").double(), inputs_of("gpt2", batch=3, n=9)
    model.transformer.ln_f.eps = 1e-14
    found = direct_logit_attribution(record(model, ids))
    writes = (found.attention_attribution + found.mlp_attribution).sum("layer")
    parts = writes + found.embedding_attribution + found.bias_attribution
    with torch.no_grad():
        logits = model(ids).logits
    relative = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1) - logits[:, :-1].mean(-1)
    np.testing.assert_allclose(parts, found.centered_next_token_logit, rtol=0, atol=1e-12)
    np.testing.assert_allclose(parts, relative.mean(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_attribution_of_a_head_is_what_the_logit_loses_without_its_write(family: str) -> None:
    """In the last layer without an MLP, at a fixed scale of the final norm, a head acts on the logits alone."""
    model, ids = tiny_model(family).double(), inputs_of(family, batch=2, n=8)
    last = model.transformer.h[-1] if family == "gpt2" else model.model.layers[-1]
    with torch.no_grad():
        for parameter in last.mlp.parameters():
            parameter.zero_()
    recording = record(model, ids)
    found = direct_logit_attribution(recording)
    final = model.transformer.ln_f if family == "gpt2" else model.model.norm
    for head in range(4):
        edited = recording.under(AblateHead(layer=2, head=head))
        states = [each.residual_stream(depth=6) for each in (recording, edited)]
        if family == "gpt2":
            states = [each - each.mean(-1, keepdim=True) for each in states]
        scale = (states[0].square().mean(-1, keepdim=True)).sqrt()
        change = model.lm_head(final.weight * (states[0] - states[1]) / scale).detach()
        lost = change[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1) - change[:, :-1].mean(-1)
        np.testing.assert_allclose(found.head_attribution.isel(layer=2, head=head), lost.mean(-1), rtol=1e-4, atol=1e-9)


def test_the_shares_of_the_norm_against_the_writes() -> None:
    model, ids = tiny_model("gpt2").double(), inputs_of("gpt2", batch=2, n=8)
    found = direct_logit_attribution(record(model, ids))
    kernels, values = kernels_and_values(model, ids)
    for layer in range(3):
        writes = np.einsum("bhtj,bhjd->bhtd", kernels[layer], values[layer])
        writes = writes - writes.mean(-1, keepdims=True)
        squares = (writes**2).sum((-1, -2))
        share = squares / squares.sum(1, keepdims=True)
        np.testing.assert_allclose(found.head_squared_length_share.isel(layer=layer), share, rtol=1e-6)
    assert found.head_squared_length_share.sum("head").values == pytest.approx(np.ones((3, 2)))
    assert (found.head_relative_length > 0).all()


def test_the_composition_score_against_dense_matrices() -> None:
    reads, output, value = values_of(3, 8, seed=6), values_of(8, 2, seed=7), values_of(2, 8, seed=8)
    written = output.numpy() @ value.numpy()
    expected = np.linalg.norm(reads.numpy() @ written) / np.linalg.norm(reads.numpy()) / np.linalg.norm(written)
    assert float(composition_score(reads, output, value)) == pytest.approx(expected, rel=1e-12)
    basis = torch.eye(4, dtype=F64)
    assert float(composition_score(basis[:1], basis[:, :1], value[:1, :4])) == pytest.approx(1)
    assert float(composition_score(basis[1:2], basis[:, :1], value[:1, :4])) == 0
    assert math.isnan(float(composition_score(0 * basis, basis, basis)))


def test_the_null_of_composition_is_that_of_normal_matrices() -> None:
    output, value = values_of(16, 4, seed=9), values_of(4, 16, seed=10)
    scores = composition_score(values_of(4000, 4, 16, seed=11), output.expand(4000, 16, 4), value.expand(4000, 4, 16))
    assert float(scores.square().mean().sqrt()) == pytest.approx(1 / 4, rel=0.02)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_composition_of_a_model_against_its_matrices(family: str) -> None:
    model = tiny_model(family).double()
    found = head_composition(record(model, inputs_of(family, batch=2, n=6)))
    dense = [matrices_of(model, layer) for layer in range(3)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        for head, later in itertools.product(range(4), range(4)):
            written = dense[a]["output"][head] @ dense[a]["value"][head]
            for read in ("query", "key", "value"):
                reads = dense[b][read][later]
                score = np.linalg.norm(reads @ written) / np.linalg.norm(reads) / np.linalg.norm(written)
                measured = found.composition.isel(layer=a, head=head, later_layer=b, later_head=later).sel(read=read)
                assert float(measured) == pytest.approx(score, rel=1e-9)
    assert found.composition.isel(layer=1, later_layer=[0, 1]).isnull().all()
    mean = found.composition.isel(layer=1).sel(read="key").mean(("later_layer", "later_head"))
    np.testing.assert_allclose(found.composition_mean.isel(layer=1).sel(read="key"), mean)
    assert found.composition_mean.isel(layer=2).isnull().all()
    assert float(found.composition_null) == pytest.approx((31 if family == "gpt2" else 32) ** -0.5)


def matrices_of(model: Any, layer: int) -> dict[str, np.ndarray]:
    """W_Q, W_K, W_V with the gain of the norm, and W_O, (head, rows, columns), without what LayerNorm removes."""
    if hasattr(model, "transformer"):
        block = model.transformer.h[layer]
        parts = [each.T.unflatten(0, (4, -1)) for each in block.attn.c_attn.weight.detach().chunk(3, -1)]
        gain, centered = block.ln_1.weight.detach(), True
        output = block.attn.c_proj.weight.detach().T.unflatten(1, (4, -1)).transpose(0, 1)
    else:
        block = model.model.layers[layer]
        attention = block.self_attn
        parts = [attention.q_proj.weight.detach().unflatten(0, (4, -1))]
        parts += [
            each.weight.detach().unflatten(0, (2, -1)).repeat_interleave(2, 0)
            for each in (attention.k_proj, attention.v_proj)
        ]
        gain, centered = block.input_layernorm.weight.detach(), False
        output = attention.o_proj.weight.detach().unflatten(1, (4, -1)).transpose(0, 1)
    parts = [each * gain for each in parts]
    if centered:
        parts = [each - each.mean(-1, keepdim=True) for each in parts]
        output = output - output.mean(-2, keepdim=True)
    return {
        name: each.numpy() for name, each in zip(("query", "key", "value", "output"), (*parts, output), strict=True)
    }


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_spectra_of_weights_against_the_modules(family: str) -> None:
    model = tiny_model(family).double()
    found = weight_spectrum(record(model, inputs_of(family, batch=2, n=6)))
    for layer in range(3):
        heads = matrices_of(model, layer)
        query = heads["query"].reshape(-1, 32)
        s = linalg.svdvals(query)
        assert float(found.stable_rank.sel(matrix="W_Q", layer=layer)) == pytest.approx(
            (s**2).sum() / s[0] ** 2, rel=1e-9
        )
        rank = 31 if family == "gpt2" else 32
        log_condition_number = float(found.log_condition_number.sel(matrix="W_Q", layer=layer))
        assert log_condition_number == pytest.approx(math.log(s[0] / s[rank - 1]), rel=1e-6)
        block = model.transformer.h[layer] if family == "gpt2" else model.model.layers[layer]
        written = block.attn.c_proj.weight.detach().T if family == "gpt2" else block.self_attn.o_proj.weight.detach()
        expected = float(matrix_spectrum(written)["effective_rank"])
        assert float(found.effective_rank.sel(matrix="W_O", layer=layer)) == pytest.approx(expected, rel=1e-9)
    names = ["W_in"] if family == "gpt2" else ["W_gate", "W_up"]
    assert found["matrix"].values.tolist() == ["W_Q", "W_K", "W_V", "W_O", *names, "W_out"]


def test_the_nulls_of_weights_are_those_of_normal_matrices() -> None:
    rng = np.random.default_rng(0)
    s = linalg.svdvals(rng.standard_normal((1600, 400)))
    stable, condition = gaussian_matrix_spectrum(1600, 400)
    assert (s**2).sum() / s[0] ** 2 == pytest.approx(stable, rel=0.03)
    assert math.log(s[0] / s[-1]) == pytest.approx(condition, rel=0.03)
    square = [linalg.svdvals(rng.standard_normal((40, 40))) for _ in range(300)]
    below = np.mean([math.log(each[0] / each[-1]) <= gaussian_matrix_spectrum(40, 40)[1] for each in square])
    assert below == pytest.approx(0.5, abs=0.1)


def test_bad_input_is_refused() -> None:
    gpt2 = record(tiny_model("gpt2"), inputs_of("gpt2", batch=3, n=5))
    with pytest.raises(HelmscopeError, match="recording has 3 prompts, but fitting on one half"):
        head_write_models(gpt2)
    padded = {"input_ids": torch.tensor([[5, 6, 7, 0]] * 3 + [[8, 9, 10, 11]])}
    padded["attention_mask"] = (padded["input_ids"] > 0).long()
    with pytest.raises(HelmscopeError, match="texts of different lengths"):
        head_write_models(record(tiny_model("gpt2"), padded))
    with pytest.raises(HelmscopeError, match="share none"):
        head_write_r_squared(causal_kernel(2, 1, 3, seed=0), values_of(2, 1, 3, 2, seed=0), fitted=[0], tested=[0])
    with pytest.raises(HelmscopeError, match=r"they must be \(prompts, heads, n, n\)"):
        head_write_r_squared(causal_kernel(2, 1, 3, seed=0), values_of(2, 1, 4, 2, seed=0), fitted=[0], tested=[1])
    bert = record(tiny_model("bert"), inputs_of("bert", batch=4, n=5))
    with pytest.raises(HelmscopeError, match="causal"):
        direct_logit_attribution(bert)
    assert attribution_unsupported(gpt2) is None
    assert composition_unsupported(gpt2) is None
    assert "Recording" in str(composition_unsupported("A"))
    scaled = record(tiny_model("cohere"), inputs_of("cohere", batch=4, n=5))
    assert "no linear map" in str(attribution_unsupported(scaled))
    with pytest.raises(HelmscopeError, match="query"):
        head_composition(record(tiny_model("qwen3"), inputs_of("qwen3", batch=4, n=5)))
    with pytest.raises(HelmscopeError, match="MixtureOfExperts"):
        weight_spectrum(record(tiny_model("mixtral"), inputs_of("mixtral", batch=4, n=5)))
