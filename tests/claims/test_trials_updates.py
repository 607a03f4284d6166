"""The trials of sharp-unstable and mlp-projects on planted models.

sharp-unstable. A token is two codes, of its position and of its id. One head attends to the token itself and one to the
token before it, by the codes of the positions; written with opposite signs, they make the difference between neighbors,
which amplifies high frequencies. Without these codes both heads nearly average over all tokens before, which removes
them.

mlp-projects. Tokens lie close to a linear subspace; a GELU far in its linear range makes the MLP linear. It moves
tokens by a share of the way to the subspace, or away from it.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.trials import failures, interval, named, rulings, set_constants
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Judgment, Ruling

S, R = Ruling.SUPPORTED, Ruling.REFUTED
COUNT, DIM, TOKENS, CODE, GAIN, LOGIT = 48, 80, 12, 32, 8.0, 20.0
LINEAR, INSIDE = 30.0, 9
DRAW = torch.Generator().manual_seed(0)
ROWS = [
    [k % COUNT, *torch.randint(COUNT, (TOKENS - 1,), generator=DRAW).tolist()] for k in range(40)
]  # with different first tokens


def silent_model(dim: int, heads: int) -> GPT2LMHeadModel:
    """One block whose attention and MLP write nothing."""
    sizes = {"vocab_size": COUNT, "n_embd": dim, "n_layer": 1, "n_head": heads, "n_positions": TOKENS, "n_inner": dim}
    torch.manual_seed(0)
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for part in (*model.transformer.h[0].attn.parameters(), *model.transformer.h[0].mlp.parameters()):
            part.zero_()
        model.lm_head.weight.normal_()
    return model


def neighbors_model(kind: str) -> GPT2LMHeadModel:
    """Attention that writes the difference of neighbors, or the average of all tokens so far."""
    model = silent_model(DIM, heads=2)
    spread = torch.randn(DIM, TOKENS + 1 + CODE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    codes = torch.linalg.qr(spread - spread.mean(0)).Q.T
    places, ids = codes[: TOKENS + 1], codes[TOKENS + 1 :]
    size = DIM // 2  # of a head
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(places[:TOKENS])
        model.transformer.wte.weight.copy_(
            torch.nn.functional.normalize(torch.randn(COUNT, CODE, dtype=torch.float64), dim=-1) @ ids
        )
        attention, scale = model.transformer.h[0].attn, (LOGIT * size**0.5 * 2 / DIM) ** 0.5
        query, key, value = attention.c_attn.weight.split(DIM, dim=1)
        for head, shift in enumerate((0, 1)):
            own = slice(head * size, head * size + TOKENS + 1)
            query += 0.01 * torch.randn(query.shape)
            key += 0.01 * torch.randn(key.shape)
            if kind == "difference":
                query[:, own] = scale * places.T
                key[:, own] = scale * places.roll(shift, 0).T  # the key of place j is the query of place j + shift
            reads = slice(head * size, head * size + CODE)
            value[:, reads] = ids.T
            sign = -1.0 if kind == "difference" and head == 1 else 1.0
            attention.c_proj.weight[reads] = sign * GAIN * ids
    return model


def subspace_model(share: float) -> GPT2LMHeadModel:
    """Tokens near a subspace of ``INSIDE`` dimensions, and an MLP that moves them by a share of the way to it."""
    dim = 32
    model = silent_model(dim, heads=1)
    draw = torch.Generator().manual_seed(2)
    spread = torch.randn(dim, INSIDE, dtype=torch.float64, generator=draw)
    inside = torch.linalg.qr(spread - spread.mean(0)).Q
    off = torch.eye(dim) - 1 / dim - inside @ inside.T
    with torch.no_grad():
        for table, size in ((model.transformer.wte.weight, 1.0), (model.transformer.wpe.weight, 0.05)):
            points = (
                torch.nn.functional.normalize(
                    torch.randn(len(table), INSIDE, dtype=torch.float64, generator=draw), dim=-1
                )
                @ inside.T
            )
            table.copy_(
                size * (points + 0.002 * torch.randn(len(table), dim, dtype=torch.float64, generator=draw) @ off)
            )
        mlp = model.transformer.h[0].mlp
        mlp.c_fc.weight.copy_(torch.eye(dim))
        mlp.c_fc.bias.fill_(LINEAR)  # GELU(c + 30) = c + 30
        mlp.c_proj.weight.copy_(-share * off / dim**0.5)
        mlp.c_proj.bias.copy_(share * LINEAR * off.sum(0) / dim**0.5)
    return model


@pytest.mark.parametrize(("kind", "ruling"), [("difference", S), ("average", R)])
def test_planted_attention_is_unstable_at_the_frequencies_that_it_keeps(monkeypatch, kind, ruling):
    set_constants(monkeypatch, "sharp-unstable", tokens=TOKENS, twins=2)
    with Subject(neighbors_model(kind), ROWS) as subject:
        verdict = run_trial("sharp-unstable", quick=True, subject=subject).verdict
    assert verdict.ruling is ruling, verdict.sentence
    assert failures(verdict) <= {"damage ratio"}  # all controls hold
    assert rulings(verdict)["temperature"] is Ruling.DESCRIBED
    ratio = interval(verdict, "damage ratio")
    # the difference of neighbors has the squared gain 4 sin^2(pi f / 2), 10 times as large in the high band
    assert ratio.low > 4 if kind == "difference" else ratio.high < 0.6
    low = interval(verdict, "blocks that write nothing")
    assert low.low < 1 < low.high


@pytest.mark.parametrize(("share", "ruling", "printed"), [(0.95, S, Judgment.TRUE), (-0.5, R, Judgment.FALSE)])
def test_a_planted_projection_is_found_and_an_expansion_is_not(monkeypatch, share, ruling, printed):
    set_constants(monkeypatch, "mlp-projects", tokens=TOKENS, twins=2)
    with Subject(subspace_model(share), ROWS) as subject:
        verdict = run_trial("mlp-projects", quick=True, subject=subject).verdict
    assert verdict.ruling is ruling, verdict.sentence
    assert failures(verdict) <= {"growth ratio"}
    assert verdict.printed.measured is printed
    assert interval(verdict, "growth ratio").estimate == pytest.approx(1 - share, abs=0.1)
    assert interval(verdict, "idempotence defect").estimate == pytest.approx(abs(1 - share), abs=0.1)
    assert interval(verdict, "planted projection").estimate == pytest.approx(0.5, abs=0.02)
    assert named(verdict, "random directions").ruling is Ruling.INCONCLUSIVE


def test_models_without_the_premise_are_not_decided():
    with Subject(silent_model(16, heads=1), ROWS) as subject:
        verdict = run_trial("mlp-projects", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE  # texts of 12 tokens
    assert "The claim needs 32 different texts of at least 64 tokens" in verdict.sentence


def test_mlps_that_write_nothing_have_no_premise(monkeypatch):
    set_constants(monkeypatch, "mlp-projects", tokens=TOKENS, twins=2)
    with Subject(silent_model(32, heads=1), ROWS) as subject:
        verdict = run_trial("mlp-projects", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
