"""The trials of attention as a diffusion: planted effects are found, nulls are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from helmscope.claims.attention_trials import AttentionTrial, every_layer
from helmscope.claims.evidence import PremiseImpossible
from helmscope.claims.experiments.clt_sharp import RowShares, causal_uniform, lindeberg_share
from helmscope.claims.experiments.scalar_diffusion import random_shares
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling
from support.trials import interval, named, rulings, set_constants

S, R, IMPOSSIBLE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.IMPOSSIBLE
DIM, VOCABULARY, TOKENS = 8, 64, 48


def rows_of(count=32, tokens=TOKENS, seed=0):
    ids = torch.randint(2, VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = torch.arange(count) % (VOCABULARY - 2) + 2  # different first tokens
    return [tuple(row) for row in ids.tolist()]


def planted(kind):
    """A causal model of two layers and two heads that mix all coordinates evenly by the causal-uniform kernel, or by a
    sharp one, or write a single direction.
    """
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=DIM, n_head=2, n_layer=2, n_inner=DIM,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.randn(VOCABULARY, DIM, generator=torch.Generator().manual_seed(1)))
        model.transformer.ln_f.weight.fill_(1)
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1)
            block.ln_2.weight.fill_(1)
            eye = torch.eye(DIM)
            if kind == "sharp":
                block.attn.c_attn.weight[:, : 2 * DIM] = 8 * torch.cat([eye, eye], -1)
            block.attn.c_attn.weight[:, 2 * DIM :] = eye
            block.attn.c_proj.weight.copy_(0.1 * eye)
            if kind == "one direction":
                block.attn.c_proj.weight[:, 1:] = 0
    return model


def planted_encoder(kind):
    """Full attention with the uniform kernel. "no drift": every word w has an opposite one, and texts hold both."""
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=DIM, num_hidden_layers=2, num_attention_heads=2, intermediate_size=DIM,
        max_position_embeddings=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    words = torch.randn(VOCABULARY, DIM, generator=torch.Generator().manual_seed(1))
    if kind == "no drift":
        words[1::2] = -words[::2]
    else:
        words = words + 3 * torch.tensor([1.0, -1.0] * (DIM // 2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "LayerNorm.weight" in name else 0.0)
        model.embeddings.word_embeddings.weight.copy_(words)
        for layer in model.encoder.layer:
            layer.attention.self.value.weight.copy_(torch.eye(DIM))
            layer.attention.output.dense.weight.copy_(0.1 * torch.eye(DIM))
    return model


def balanced_rows(count=32):
    """Texts that hold each of their words with its opposite, and begin with different words."""
    rows, number = [], VOCABULARY // 2 - 1
    for k in range(count):
        others = torch.randperm(number - 1, generator=torch.Generator().manual_seed(k))[:11] + 1
        pairs = (torch.cat([torch.zeros(1, dtype=torch.long), others]) + k // 2) % number + 1
        words = [2 * pairs, 2 * pairs + 1] if k % 2 else [2 * pairs + 1, 2 * pairs]
        rows.append(tuple(torch.stack(words, -1).flatten().tolist()))
    return rows


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("even", {"elliptic": S, "scalar-diffusion": S, "clt-sharp": S}),
        ("one direction", {"elliptic": R, "scalar-diffusion": R, "clt-sharp": S}),
        ("sharp", {"clt-sharp": R}),
    ],
)
def test_planted_diffusions_get_the_right_ruling(kind, expected):
    with Subject(planted(kind), rows_of()) as subject:
        for claim, ruling in expected.items():
            verdict = run_trial(claim, quick=True, subject=subject).verdict
            assert verdict.ruling is ruling, verdict.sentence
            assert all(control.as_expected for control in verdict.controls), rulings(verdict)


def test_causal_attention_cannot_be_doubly_stochastic():
    with Subject(planted("even"), rows_of()) as subject:
        verdict = run_trial("no-mean-drift", quick=True, subject=subject).verdict
    assert verdict.ruling is IMPOSSIBLE
    assert "causal" in verdict.sentence
    own, uniform = (
        interval(verdict, name).estimate for name in ("column sums", "column sums of the causal-uniform kernel")
    )
    assert own == pytest.approx(uniform, rel=1e-4)  # it is the causal-uniform kernel


def test_drift_of_bistochastic_kernels():
    """The uniform kernel is bistochastic: without drift only where the mean value is 0."""
    with Subject(planted_encoder("drift"), rows_of()) as subject:
        verdict = run_trial("no-mean-drift", quick=True, subject=subject).verdict
    assert verdict.ruling is R
    assert all(control.as_expected for control in verdict.controls)
    assert interval(verdict, "column sums").estimate < 1e-5
    assert interval(verdict, "divergence from the balanced kernel").estimate < 1e-6
    with Subject(planted_encoder("no drift"), balanced_rows()) as subject:
        verdict = run_trial("no-mean-drift", quick=True, subject=subject).verdict
    assert named(verdict, "drift ratio").ruling is S
    assert not named(verdict, "uniform kernel").as_expected  # it is the same kernel: the control sees it


@pytest.mark.parametrize("claim", ["elliptic", "scalar-diffusion", "clt-sharp", "no-mean-drift"])
def test_too_few_texts(claim):
    with Subject(planted("even"), rows_of(8)) as subject:
        verdict = run_trial(claim, quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "needs 32 different texts" in verdict.sentence


def context_rows():
    """Texts of few words, so that many contexts have the same word at the same position."""
    return rows_of(160, 24, seed=3), torch.randint(2, 6, (160, 24), generator=torch.Generator().manual_seed(4))


def test_increments_over_contexts(monkeypatch):
    """Over contexts the mean of many independent values varies far less than one sampled value."""
    _, ids = context_rows()
    set_constants(monkeypatch, "attention-diffuses", twins=2)
    with Subject(planted("even"), [tuple(row) for row in ids.tolist()]) as subject:
        verdict = run_trial("attention-diffuses", quick=True, subject=subject).verdict
    assert named(verdict, "slope").ruling is R
    assert interval(verdict, "slope").estimate < 0.2
    assert all(control.as_expected for control in verdict.controls), rulings(verdict)
    assert interval(verdict, "one sampled token").estimate == pytest.approx(1, abs=0.15)


def test_no_groups_no_trial():
    with Subject(planted("even"), rows_of()) as subject:
        verdict = run_trial("attention-diffuses", quick=True, subject=subject).verdict
    assert verdict.ruling is IMPOSSIBLE
    assert "no word at the same position" in verdict.sentence


def test_rows_of_known_kernels():
    rows = RowShares(largest_weight=0.1, first_row=10)
    assert rows.of_kernels([causal_uniform(128)]).tolist() == [1.0]
    assert rows.of_kernels([causal_uniform(128)], first_row=1)[0] == pytest.approx(119 / 128)
    assert rows.of_kernels([torch.eye(20)]).tolist() == [0.0]


def test_lindeberg_share_against_loops():
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(2 * torch.randn(5, 5, generator=generator, dtype=torch.float64), -1)
    value = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    for i in range(5):
        mean = sum(p[i, j] * value[j] for j in range(5))
        terms = [float(p[i, j] ** 2 * ((value[j] - mean) ** 2).sum()) for j in range(5)]
        large = sum(term for term in terms if term > 0.25 * sum(terms))
        assert float(lindeberg_share(p, value, 0.5)[i]) == pytest.approx(large / sum(terms), rel=1e-10)


def test_random_shares_follow_the_wishart_law():
    """One head of full rank: E tr(S^2) / E(tr S)^2 = (1 + d/n) / d, hence a share of about 1 / (1 + d/r + d/n)."""
    case = registered_case("scalar-diffusion", subject=Subject("A"))
    share = random_shares(case, dim=60, heads=1, rank=60, tokens=600).mean()
    assert share == pytest.approx(1 / (1 + 60 / 60 + 60 / 600), abs=0.03)


def test_layers_without_values_are_left_out():
    import xarray as xr

    values = xr.DataArray([[np.nan, np.nan], [1.0, 2.0]], dims=("layer", "prompt"))
    assert every_layer(values).names == ["layer 1"]
    assert isinstance(every_layer(values[:1]), PremiseImpossible)


def test_the_setting_names_the_sphere():
    with Subject(planted_encoder("drift"), rows_of()) as subject:
        trial = AttentionTrial.of(registered_case("elliptic", subject=subject, quick=True))
        assert "gain and bias included" in trial.setting
        assert f"tangent dimension {DIM - 2}" in trial.setting
