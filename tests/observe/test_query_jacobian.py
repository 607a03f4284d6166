"""Derivatives of queries in packed rows: against automatic differentiation of the family, padding, edits, and rows."""

from __future__ import annotations

import pytest
import torch
from torch.func import jacfwd
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import helmscope as hs
from helmscope.observe import query_jacobian
from helmscope.observe.query_jacobian import packed_rows, query_jacobians

SIZES = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=8, n_head=2, n_layer=2, **SIZES)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, **SIZES,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model.requires_grad_(False)


IDS = torch.randint(1, 32, (5, 9), generator=torch.Generator().manual_seed(1))
CHOSEN = torch.tensor([[1, 4], [4, 8], [2, 3], [5, 6], [4, 7]])
COUNTS = torch.ones(5, 2, dtype=torch.bool)


def no_rotation(query: torch.Tensor, position: int) -> torch.Tensor:
    return query


def rotation(query: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary positions of heads of two coordinates: one angle, the position."""
    turn = torch.tensor(float(position), dtype=torch.float32).double()
    swapped = torch.stack([-query[:, 1], query[:, 0]], -1)
    return query * turn.cos() + swapped * turn.sin()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_rows_have_the_derivatives_of_the_family(family: str) -> None:
    model = gpt2() if family == "gpt2" else llama()
    recording = hs.record(model, IDS)
    found = query_jacobians(recording, slice(0, 5), CHOSEN, COUNTS)
    for layer in (0, 1):
        stream = recording.residual_stream(depth=2 * layer)
        for row in range(5):
            for k in range(2):
                position = int(CHOSEN[row, k])

                def query(y: torch.Tensor, layer: int = layer, position: int = position) -> torch.Tensor:
                    if family == "gpt2":
                        block = model.transformer.h[layer]
                        return block.attn.c_attn(block.ln_1(y))[:8].reshape(2, 4)
                    block = model.model.layers[layer]
                    plain = block.self_attn.q_proj(block.input_layernorm(y)).reshape(4, 2)
                    return rotation(plain, position)

                expected = jacfwd(query)(stream[row, position])
                assert found[layer][row, :, k].numpy() == pytest.approx(expected.numpy(), abs=2e-6)


def test_tokens_of_one_position_have_rows_of_their_own() -> None:
    rows = packed_rows(CHOSEN, COUNTS)
    places = {(int(row), int(position)) for row, position in zip(rows.flatten(), CHOSEN.flatten(), strict=True)}
    assert len(places) == CHOSEN.numel()
    assert int(rows.amax()) == 2  # three tokens at position 4


def differentiated(recording: hs.Recording, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[int]]:
    """The derivatives in the last layer, and how many rows each differentiated pass had."""
    rows, run = [], query_jacobian._Jacobians.run

    def counted(self, chunk, states):  # type: ignore[no-untyped-def]
        rows.append(chunk.stop - chunk.start)
        run(self, chunk, states)

    monkeypatch.setattr(query_jacobian._Jacobians, "run", counted)
    found = query_jacobians(recording, slice(0, 5), CHOSEN, COUNTS)[1]
    monkeypatch.undo()
    return found, rows


def test_queries_that_depend_on_their_row_are_differentiated_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit that scales the queries of each prompt by a number of its own."""
    recording = hs.record(gpt2(), IDS)
    plain, rows = differentiated(recording, monkeypatch)
    assert rows == [3]

    def scaled(value: torch.Tensor, context: object) -> torch.Tensor:
        number = torch.arange(context.rows.start, context.rows.stop, dtype=value.dtype) + 1  # type: ignore[attr-defined]
        return value * number[:, None, None, None]

    edited = recording.under(hs.intervene.Edit(hs.Site.QUERY, [1], scaled))
    found, rows = differentiated(edited, monkeypatch)
    assert rows == [3, 5]
    expected = plain * torch.arange(1.0, 6.0, dtype=torch.float64)[:, None, None, None, None]
    assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-9)


def test_chunks_and_tokens_that_do_not_count_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, small = (
        query_jacobians(hs.record(llama(), IDS, batch_size=size), slice(0, 5), CHOSEN, COUNTS) for size in (5, 2)
    )
    assert torch.allclose(whole[1], small[1], atol=1e-12)
    counts = COUNTS.clone()
    counts[1, 0] = False
    fewer = query_jacobians(hs.record(llama(), IDS), slice(0, 5), CHOSEN, counts)[1]
    assert not fewer[1, :, 0].any()
    assert torch.allclose(fewer[counts.unsqueeze(1).expand(5, 4, 2)], whole[1][counts.unsqueeze(1).expand(5, 4, 2)])


def test_memory_bounds_the_prompts_that_are_differentiated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from helmscope.observe import query_slopes

    whole = hs.observe.mobility_test(hs.record(gpt2(), IDS), sampled_tokens=2)
    monkeypatch.setattr(query_slopes, "MEMORY", 1)
    parts = hs.observe.mobility_test(hs.record(gpt2(), IDS), sampled_tokens=2)
    assert whole.antisymmetric_share.values == pytest.approx(parts.antisymmetric_share.values, rel=1e-6)
