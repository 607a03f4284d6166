"""Attention sinks against plain loops, closed forms and what a causal mask implies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.attention import SA
from helmscope.models.record import record
from helmscope.observe.sinks import AttentionSinks, attention_sinks, sink_constancy, sink_decomposition
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError, Needs
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
SAME = torch.tensor([[5, 6, 7, 8], [5, 9, 3, 4], [5, 7, 7, 20]])
DIFFERENT = torch.tensor([[5, 6, 7, 8], [11, 9, 3, 4], [30, 7, 7, 20]])
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [3, 4, 5, 6, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
}


class Seen(hs.Instrument):
    """Keeps the tensors of every layer."""

    name = "seen"
    needs = Needs.KERNEL | Needs.QKV

    def __init__(self) -> None:
        self.layers = []

    def attention(self, context, tensors):
        self.layers.append((tensors.kernel.numpy().copy(), tensors.value.numpy().copy()))
        self.keep(context, {"length": tensors.radius.mean(-1)})


def of_head(kernel, value, first_position):
    """All quantities of one head of one prompt, by loops over queries and keys; checks the identity on the way."""
    n, lambdas, masses, ratios = len(kernel), [], [], []
    for t in range(first_position, n):
        weight = kernel[t, 0]
        lambdas.append(weight)
        masses.append(sum(kernel[t, j] for j in range(n)))
        if weight == 1:
            continue
        context = sum((kernel[t, j] * value[j] for j in range(1, n)), np.zeros(value.shape[1])) / (1 - weight)
        whole = sum(kernel[t, j] * value[j] for j in range(n))
        np.testing.assert_allclose((1 - weight) * context + weight * value[0], whole, rtol=0, atol=1e-12)
        if context.any():  # 0 for the first query of a model with a learned sink, which sees no other token
            ratios.append(np.sqrt((value[0] ** 2).sum()) / np.sqrt((context**2).sum()))
    mean = sum(lambdas) / len(lambdas)
    mass = sum(masses) / len(masses)
    return {
        "first_token_mass": mean,
        "sink_share": sum(weight > 0.3 for weight in lambdas) / len(lambdas),
        "sink": float(mean > 0.3),
        "row_mass": mass,
        "missing_mass": 1 - mass,
        "sink_value_norm_ratio": sum(ratios) / len(ratios),
    }


@pytest.mark.parametrize("first_position", [0, 1, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_oss"])
def test_models_agree_with_loops(family, first_position):
    """Biased values, values shared by two query heads each, and rows that sum to less than 1."""
    seen = Seen()
    recording = record(tiny_model(family, dtype=F64), inputs_of(family, batch=2, n=6))
    measured = recording.replay(seen, AttentionSinks(first_position=first_position))["attention_sinks"]
    for layer, (kernel, value) in enumerate(seen.layers):
        per_value = kernel.shape[1] // value.shape[1]
        for prompt, head in np.ndindex(kernel.shape[:2]):
            expected = of_head(kernel[prompt, head], value[prompt, head // per_value], first_position)
            actual = measured.isel(layer=layer, prompt=prompt, head=head)
            assert set(expected) == set(actual.data_vars)
            for name, number in expected.items():
                np.testing.assert_allclose(actual[name].item(), number, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_the_decomposition_at_the_sink_is_an_identity(family):
    """With rows that sum to 1 and to less, against loops, and at any position."""
    seen = Seen()
    record(tiny_model(family, dtype=F64), inputs_of(family, batch=2, n=6)).replay(seen)
    for kernel, value in seen.layers:
        values = value.repeat(kernel.shape[1] // value.shape[1], 1)
        for sink in (0, 3):
            split = sink_decomposition(torch.from_numpy(kernel), torch.from_numpy(values), sink_position=sink)
            weight, context = split.sink_weight.unsqueeze(-1), split.context_value
            whole = weight * split.sink_value.unsqueeze(-2) + (1 - weight) * context
            expected = torch.from_numpy(kernel) @ torch.from_numpy(values)
            defined = (weight != 1).expand(expected.shape)
            assert float((whole - expected)[defined].abs().max()) < 1e-13
            assert bool(context[~defined].isnan().all())
            p, h, t = 1, 2, 5
            others = [kernel[p, h, t, j] * values[p, h, j] for j in range(6) if j != sink]
            np.testing.assert_allclose(context[p, h, t], sum(others) / (1 - kernel[p, h, t, sink]), rtol=1e-12)
    # under a causal mask the first query sees nothing but the sink
    if family == "gpt2":
        assert bool(sink_decomposition(torch.eye(2), torch.ones(2, 1)).context_value[0].isnan().all())


def test_writes_from_the_sink_do_not_depend_on_the_basis_inside_the_heads():
    """An invertible matrix moved from the values to the output projection changes cosines of values only."""
    model, generator = tiny_model("gpt2", dtype=F64), torch.Generator().manual_seed(0)
    before = sink_constancy(record(model, DIFFERENT))
    basis = torch.eye(8, dtype=F64) + 0.5 * torch.randn(8, 8, dtype=F64, generator=generator)
    with torch.no_grad():
        for block in model.transformer.h:
            for head in range(4):
                rows = slice(8 * head, 8 * head + 8)
                values = slice(64 + 8 * head, 64 + 8 * head + 8)
                block.attn.c_attn.weight[:, values] = block.attn.c_attn.weight[:, values] @ basis.T
                block.attn.c_attn.bias[values] = basis @ block.attn.c_attn.bias[values]
                block.attn.c_proj.weight[rows] = torch.linalg.inv(basis).T @ block.attn.c_proj.weight[rows]
    after = sink_constancy(record(model, DIFFERENT))
    for name in ("write_cosine", "write_explained_share"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-9, atol=1e-11)
    assert float(abs(after.cosine - before.cosine).max()) > 0.01


def test_writes_from_the_sink_by_loops():
    model, seen = tiny_model("gpt2", dtype=F64), Seen()
    recording = record(model, DIFFERENT)
    recording.replay(seen)
    measured = sink_constancy(recording)
    for layer, (_, value) in enumerate(seen.layers):
        matrix = model.transformer.h[layer].attn.c_proj.weight.detach().numpy()
        for head in range(4):
            tokens = value[:, head].reshape(-1, 8)
            written = [(value[p, head, 0] - tokens.mean(0)) @ matrix[8 * head : 8 * head + 8] for p in range(3)]
            units = [each / np.sqrt((each**2).sum()) for each in written]
            cosine = sum(units[a] @ units[b] for a, b in ((0, 1), (0, 2), (1, 2))) / 3
            center = sum(written) / 3
            left = sum(((each - center) ** 2).sum() for each in written) / sum((each**2).sum() for each in written)
            assert measured.write_cosine[layer, head].item() == pytest.approx(cosine, abs=1e-12)
            assert measured.write_explained_share[layer, head].item() == pytest.approx(1 - left, abs=1e-12)


def test_a_learned_sink_outside_the_tokens_is_missing_mass():
    missing = {
        family: attention_sinks(record(tiny_model(family, dtype=F64), inputs_of(family))).missing_mass
        for family in ("gpt_oss", "llama")
    }
    assert float(missing["gpt_oss"].min()) > 0.01
    assert float(abs(missing["llama"]).max()) < 1e-6


def test_a_planted_sink():
    """Weights (.7, .1, .1, .1) of every query: lambda = .7, and V_ctx is the mean of three orthogonal unit vectors."""
    bias = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=F64).log().expand(4, 4)
    measured = attention_sinks(integrate(SA(beta=0.0, bias=bias), torch.eye(4, dtype=F64), [0.0]))
    assert measured.first_token_mass.dims == ("time", "system")
    assert measured.first_token_mass.item() == pytest.approx(0.7, abs=1e-14)
    assert (measured.sink_share.item(), measured.sink.item()) == (1.0, 1.0)
    assert measured.sink_value_norm_ratio.item() == pytest.approx(3**0.5, abs=1e-13)


def test_the_context_is_undefined_where_the_sink_has_all_weight():
    recording = record(tiny_model("gpt2", dtype=F64), torch.tensor([[5], [6]]))
    alone = attention_sinks(recording, first_position=0)
    assert (alone.first_token_mass == 1).all()
    assert alone.sink_value_norm_ratio.isnull().all()
    assert all(values.isnull().all() for values in attention_sinks(recording).data_vars.values())  # no query is left


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_padding_changes_nothing(family):
    model = tiny_model(family, dtype=F64)
    together = attention_sinks(record(model, PADDED))
    for prompt, length in enumerate((3, 5, 4)):
        alone = attention_sinks(record(model, PADDED["input_ids"][prompt : prompt + 1, :length]))
        for name in together.data_vars:
            np.testing.assert_allclose(together[name][:, prompt], alone[name][:, 0], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_shared_first_token_is_constant_by_construction(family):
    model = tiny_model(family, dtype=F64)
    same, different = (sink_constancy(record(model, ids)) for ids in (SAME, DIFFERENT))
    assert (same.attrs["distinct_first_tokens"], different.attrs["distinct_first_tokens"]) == (1, 3)
    for name in ("raw_cosine", "cosine", "explained_share"):
        assert float(abs(same[name] - 1).max()) < 1e-6
        assert float(different[name].max()) < 1 - 1e-3  # raw cosines of up to 0.998 come from the bias of the values
    assert float(different.cosine.max()) < 0.9


def test_constancy_agrees_with_loops():
    seen, recording = Seen(), record(tiny_model("llama", dtype=F64), PADDED)
    recording.replay(seen)
    measured = sink_constancy(recording)

    def cosine(a, b):
        return (a @ b) / np.sqrt((a @ a) * (b @ b))

    for layer, (kernel, value) in enumerate(seen.layers):
        for head in range(kernel.shape[1]):
            values = value[:, head // (kernel.shape[1] // value.shape[1])]
            tokens = [values[p, j] for p, length in enumerate((3, 5, 4)) for j in range(length)]
            raw = [values[p, 0] for p in range(3)]
            about = [v - sum(tokens) / 12 for v in raw]
            center = sum(about) / 3
            left = sum(((u - center) ** 2).sum() for u in about) / sum((u**2).sum() for u in about)
            pairs = [(0, 1), (0, 2), (1, 2)]
            expected = {
                "raw_cosine": sum(cosine(raw[p], raw[q]) for p, q in pairs) / 3,
                "cosine": sum(cosine(about[p], about[q]) for p, q in pairs) / 3,
                "explained_share": 1 - left,
            }
            for name, number in expected.items():
                assert measured[name][layer, head].item() == pytest.approx(number, abs=1e-12), name


def test_a_value_bias_makes_only_the_raw_cosine_large():
    model = tiny_model("gpt2", dtype=F64)
    before = sink_constancy(record(model, DIFFERENT)).isel(layer=0)
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.bias[-32:] += 30.0  # the bias of the values
    after = sink_constancy(record(model, DIFFERENT)).isel(layer=0)
    assert float(before.raw_cosine.max()) < 0.9
    assert float(after.raw_cosine.min()) > 0.999
    np.testing.assert_allclose(after.cosine, before.cosine, atol=1e-10)
    np.testing.assert_allclose(after.explained_share, before.explained_share, atol=1e-10)


def test_bad_input():
    recording = record(tiny_model("gpt2"), SAME[:1])
    with pytest.raises(HelmscopeError, match="first_position is -1, but it must be a whole number >= 0"):
        attention_sinks(recording, first_position=-1)
    with pytest.raises(HelmscopeError, match=r"first_position is 1\.5, but"):
        AttentionSinks(first_position=1.5)
    with pytest.raises(HelmscopeError, match="system has 1 prompt, but constancy over them needs at least 2"):
        sink_constancy(recording)
    with pytest.raises(HelmscopeError, match="sink_position is 4, but the kernel has positions 0 to 3"):
        sink_decomposition(torch.eye(4), torch.ones(4, 2), sink_position=4)
    with pytest.raises(HelmscopeError, match=r"values is a tensor \(3, 2\), but it must be a tensor of shape \(4,\)"):
        sink_decomposition(torch.eye(4), torch.ones(3, 2))
    with pytest.raises(HelmscopeError, match="system is an int, but it must be a System"):
        attention_sinks(3)
