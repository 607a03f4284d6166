"""The trials of whitening, mobility and jko-step on models: planted layers get the right ruling."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling
from support.trials import interval, named, rulings, set_constants

S, R, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
VOCABULARY, TOKENS, LINEAR = 64, 32, 40.0


def rows_of(count: int = 32) -> list[tuple[int, ...]]:
    ids = torch.randint(2, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = torch.arange(count) % (VOCABULARY - 2) + 2  # different first tokens
    return [tuple(row) for row in ids.tolist()]


def even_rows() -> list[tuple[int, ...]]:
    """Texts that hold each of 46 words once in each half, and begin with different words."""
    rows = []
    for k in range(32):
        first, second = (torch.randperm(46, generator=torch.Generator().manual_seed(2 * k + half)) for half in (0, 1))
        rest = [int(word) for word in first if word != k]
        rows.append((k, *rest, *second.tolist()))
    return rows


def planted(kind: str, dim: int = 8, tokens: int = TOKENS) -> GPT2LMHeadModel:
    """Two layers of even attention that writes W z, or nothing, and of an MLP in its linear range that writes M z.

    "gradient": M = -H; "carried": M = -W W^T H, a drift with the mobility of attention's noise, and in both the words
    are the eigenvectors of W and their opposites. "descends" and "turns": attention writes nothing, and M is -H with
    H > 0, or antisymmetric; "random": all weights are.
    """
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=tokens, n_embd=dim, n_head=1, n_layer=2, n_inner=dim,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    if kind == "random":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return model
    noise = torch.randn(dim, dim, generator=torch.Generator().manual_seed(3))
    basis = torch.linalg.qr(torch.cat([torch.ones(dim, 1), noise[:, 1:]], 1)).Q[:, 1:]  # orthogonal to (1, ..., 1)
    inner = basis.mT @ noise @ basis
    hessian = basis @ (inner + inner.mT) @ basis.mT
    write = basis @ torch.diag(torch.linspace(0.3, 2.0, dim - 1)) @ basis.mT
    matrix = {
        "gradient": -hessian,
        "carried": -write @ write @ hessian,
        "descends": -(basis @ torch.diag(torch.linspace(0.2, 2.0, dim - 1)) @ basis.mT),
        "turns": basis @ (inner - inner.mT) @ basis.mT,
    }[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.randn(VOCABULARY, dim, generator=torch.Generator().manual_seed(1)))
        if kind in ("gradient", "carried"):
            model.transformer.wte.weight[: 2 * dim - 2] = dim**0.5 * torch.cat([basis, -basis], 1).mT
        model.transformer.ln_f.weight.fill_(1)
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1)
            block.ln_2.weight.fill_(1)
            if kind in ("gradient", "carried"):
                block.attn.c_attn.weight[:, 2 * dim :] = torch.eye(dim)
                block.attn.c_proj.weight.copy_(0.01 * write.mT)
            block.mlp.c_fc.weight.copy_(torch.eye(dim))
            block.mlp.c_fc.bias.fill_(LINEAR)
            size = 0.05 if kind in ("descends", "turns") else 0.002
            block.mlp.c_proj.weight.copy_(size * matrix.mT)
            block.mlp.c_proj.bias.copy_(-LINEAR * size * matrix.sum(1))
    return model


@pytest.mark.parametrize(("kind", "expected"), [("carried", S), ("gradient", R)])
def test_whitening_helps_exactly_the_drift_that_carries_the_mobility(
    kind: str, expected: Ruling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With words of which every text holds all, so that Sigma is nearly constant, and W W^T in the directions that
    are tangent to a word.
    """
    set_constants(monkeypatch, "whitening", tokens_quick=8)
    with Subject(planted(kind, 24, 92), even_rows()) as subject:
        verdict = run_trial("whitening", quick=True, subject=subject).verdict
    assert verdict.ruling is expected, verdict.sentence
    assert all(control.as_expected for control in verdict.controls), rulings(verdict)
    assert "Premise: small-steps" in verdict.sentence
    if kind == "gradient":
        assert interval(verdict, "share before, mean over layers").high < 1e-6


@pytest.mark.parametrize(("kind", "expected"), [("descends", S), ("turns", R)])
def test_a_layer_that_descends_is_a_step_and_one_that_turns_is_not(
    kind: str, expected: Ruling, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, "jko-step", twins=2)
    with Subject(planted(kind), rows_of()) as subject:
        verdict = run_trial("jko-step", quick=True, subject=subject).verdict
    assert named(verdict, "share of the gap closed").ruling is expected, verdict.sentence
    assert named(verdict, "blocks that write nothing").as_expected
    assert "Premise: small-steps" in verdict.sentence


def test_the_potential_of_another_layer_is_noticed_where_layers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer climbs what the first one descends: its potential is not approached by the first."""
    set_constants(monkeypatch, "jko-step", twins=2)
    model = planted("descends")
    with torch.no_grad():
        block = model.transformer.h[1].mlp.c_proj
        block.weight.neg_()
        block.bias.neg_()
    with Subject(model, rows_of()) as subject:
        verdict = run_trial("jko-step", quick=True, subject=subject).verdict
    assert verdict.ruling is S, verdict.sentence
    assert named(verdict, "potential of another layer").ruling is R


def test_random_weights_have_no_mobility(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "mobility", twins=2)
    with Subject(planted("random"), rows_of()) as subject:
        verdict = run_trial("mobility", quick=True, subject=subject).verdict
    assert verdict.ruling is R, verdict.sentence
    assert all(control.as_expected for control in verdict.controls), rulings(verdict)
    assert 0.35 < interval(verdict, "random field").estimate < 0.5  # (k - 1) / (2 k) for k = 6 directions


@pytest.mark.parametrize("claim", ["whitening", "mobility", "jko-step"])
def test_too_few_texts(claim: str) -> None:
    with Subject(planted("random"), rows_of(8)) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is INCONCLUSIVE
    assert "needs 32 different texts" in verdict.sentence
