"""The trial of sinks-are-anchors on planted models: a sink with a constant value, one whose value is that of its token,
and no sink.

The first position is marked by its position embedding. The MLP of the first layer turns the mark into a large component
along u, and the second layer attends to it. Values there read u, or everything but u.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.trials import failures, interval, named, set_constants
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.trial import try_claim
from helmscope.models.subject import Subject
from helmscope.types import Ruling

S, R, IMPOSSIBLE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.IMPOSSIBLE
COUNT, DIM, TOKENS = 48, 32, 14
ROWS = [[(first + i * (1 + first % 5)) % COUNT for i in range(TOKENS)] for first in range(40)]
MARK, LARGE = 8.0, 30.0


def planted(kind: str) -> GPT2LMHeadModel:
    """Two layers of one head, of which the first writes the sink's state and the second attends to it."""
    sizes = {"vocab_size": COUNT, "n_embd": DIM, "n_layer": 2, "n_head": 1, "n_positions": TOKENS, "n_inner": 4}
    torch.manual_seed(0)
    options = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()
    raw = torch.randn(DIM, DIM - 1)
    basis = torch.linalg.qr(raw - raw.mean(0)).Q.T  # orthonormal, of mean 0, as a LayerNorm keeps them
    mark, u, rest = basis[0], basis[1], basis[2:]
    first, second = model.transformer.h
    key, value = slice(DIM, 2 * DIM), slice(2 * DIM, 3 * DIM)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.randn(COUNT, DIM - 3) @ rest)
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[0] = MARK * mark
        for parameter in (*first.mlp.parameters(), *second.mlp.parameters()):
            parameter.zero_()
        first.attn.c_proj.weight.mul_(1e-2)
        first.mlp.c_fc.weight[:, 0] = 10 * mark
        first.mlp.c_fc.bias[0] = -20.0
        first.mlp.c_proj.weight[0] = LARGE * u / 20 if kind != "none" else 0 * u
        second.attn.c_attn.bias[:DIM] = 8.0 * basis[2]
        second.attn.c_attn.weight[:, key] = torch.outer(u, basis[2])
        if kind == "its token":
            # the norm divides by the length of the sink's state; other tokens are longer by that factor
            second.attn.c_attn.weight[:, value] = rest.T @ rest
        second.attn.c_proj.weight.normal_(std=0.3)
        model.lm_head.weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize(("kind", "ruling"), [("constant", S), ("its token", R), ("none", IMPOSSIBLE)])
def test_planted_sinks_get_the_right_rulings(monkeypatch, kind, ruling):
    set_constants(monkeypatch, "sinks-are-anchors", tokens=TOKENS, other_position=6, first_query=2, twins=2)
    with Subject(planted(kind), ROWS) as subject:
        verdict = try_claim("sinks-are-anchors", quick=True, subject=subject).verdict
    assert verdict.ruling is ruling
