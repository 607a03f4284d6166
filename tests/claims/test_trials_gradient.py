"""The trial of gradient-shaped on planted models: writes that go down the loss, up it, or the same way for all.

Texts count upwards, so that the next token is known from the present one. One neuron per token v reads the embedding of
v and writes that of v + 1, which the head reads as the next token: a step down the loss. Attention writes next to
nothing, in random directions, so that the mean over the two half-steps is half of the cosine of the MLP.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.trials import failures, interval, named, set_constants
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling

S, R, N = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
COUNT, DIM, TOKENS = 48, 64, 12
ROWS = [[(first + i) % COUNT for i in range(TOKENS)] for first in range(40)]
CONDITIONS = ("cosine", "above permuted writes", "above the twins")
WRITES = {"down": 1.0, "up": -1.0, "the same everywhere": 0.0}


def planted(kind: str) -> GPT2LMHeadModel:
    """One block, with unit embeddings that are orthogonal and have mean 0."""
    sizes = {"vocab_size": COUNT, "n_embd": DIM, "n_layer": 1, "n_head": 1, "n_positions": TOKENS, "n_inner": COUNT}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    spread = torch.randn(DIM, COUNT)
    embeddings = torch.linalg.qr(spread - spread.mean(0)).Q.T
    block = model.transformer.h[0]
    with torch.no_grad():
        for parameter in (*model.transformer.wpe.parameters(), *block.mlp.parameters()):
            parameter.zero_()
        block.attn.c_proj.weight.mul_(1e-2)
        model.transformer.wte.weight.copy_(embeddings)
        block.mlp.c_fc.weight.copy_(4 * embeddings.T)
        block.mlp.c_fc.bias.fill_(-4 * DIM**0.5 / 2)
        block.mlp.c_proj.weight.copy_(WRITES[kind] * embeddings.roll(-1, 0))
        if kind == "the same everywhere":
            block.mlp.c_proj.bias.copy_(embeddings.sum(0))
    return model


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [("down", [{S}, {S}, {S}]), ("up", [{R}, {R}, {R}]), ("the same everywhere", [{R, N, S}, {R, N}, {R, N, S}])],
)
def test_planted_writes_get_the_right_rulings(monkeypatch, kind, allowed):
    set_constants(monkeypatch, "gradient-shaped", tokens=TOKENS, twins=2)
    with Subject(planted(kind), ROWS) as subject:
        verdict = run_trial("gradient-shaped", quick=True, subject=subject).verdict
    found = [named(verdict, name) for name in CONDITIONS]
    assert all(each.ruling in those for each, those in zip(found, allowed, strict=True)), found
    assert failures(verdict) <= set(CONDITIONS)  # all controls hold
    if kind == "down":  # the gradient is W^T (e_next - p), of which W^T e_next is the largest part
        assert interval(verdict, "cosine").low > 0.45
    if kind == "the same everywhere":
        assert verdict.ruling is not S
