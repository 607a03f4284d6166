"""The trials of early-fragile and heads-compete on planted models.

In models whose layers amplify the coordinates that the embeddings avoid, noise in an early layer is amplified by all
later ones; in models whose layers damp them, early noise is repaired. Blocks are linear: an MLP in the linear range of
its activation, and attention that writes nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.trials import failures, interval, named, set_constants
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.claims.experiments.early_fragile import _change_point
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Region, Ruling

S, R = Ruling.SUPPORTED, Ruling.REFUTED
COUNT, DIM, TOKENS, LAYERS, LINEAR = 48, 32, 8, 8, 30.0
ROWS = [[(first + i * (1 + first % 5)) % COUNT for i in range(TOKENS)] for first in range(40)]


def layers_that_scale(rate: float) -> GPT2LMHeadModel:
    """Layers that add ``rate`` times the last half of the coordinates, in which embeddings have nothing."""
    sizes = {"vocab_size": COUNT, "n_embd": DIM, "n_layer": LAYERS, "n_head": 1, "n_positions": TOKENS, "n_inner": DIM}
    torch.manual_seed(0)
    options = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()
    free = torch.diag((torch.arange(DIM) >= DIM // 2).float())
    with torch.no_grad():
        embeddings = torch.randn(COUNT, DIM) @ (torch.eye(DIM) - free)
        embeddings[:, : DIM // 2] -= embeddings[:, : DIM // 2].mean(-1, keepdim=True)
        model.transformer.wte.weight.copy_(embeddings)
        model.transformer.wpe.weight.zero_()
        model.lm_head.weight.normal_(std=0.5)
        for block in model.transformer.h:
            block.attn.c_proj.weight.mul_(1e-2)
            block.mlp.c_fc.weight.copy_(torch.eye(DIM))
            block.mlp.c_fc.bias.fill_(LINEAR)
            block.mlp.c_proj.weight.copy_(rate * free)
            block.mlp.c_proj.bias.copy_(-LINEAR * (rate * free).sum(0))
    return model


@pytest.mark.parametrize(("rate", "ruling"), [(0.4, S), (-0.4, R)])
def test_early_and_late_fragile_layers_get_the_right_rulings(monkeypatch, rate, ruling):
    set_constants(monkeypatch, "early-fragile", tokens=TOKENS)
    with Subject(layers_that_scale(rate), ROWS) as subject:
        verdict = run_trial("early-fragile", quick=True, subject=subject).verdict
    assert verdict.ruling is ruling
    assert failures(verdict) <= {"matched correlation"}  # all controls hold
    assert named(verdict, "blocks that write nothing").ruling is Ruling.IMPOSSIBLE
    repaired = interval(verdict, "share of the change that later layers repair, noise")
    assert repaired.high < -1 if rate > 0 else repaired.low > 0.1


def test_few_layers_have_no_correlation(monkeypatch):
    set_constants(monkeypatch, "early-fragile", tokens=TOKENS, least_layers=8)
    with Subject(layers_that_scale(0.4), ROWS) as subject:
        verdict = run_trial("early-fragile", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
    assert "the replicates are layers, of which it needs 8, and has 7" in verdict.sentence.lower()


def test_a_change_in_one_step_is_told_from_a_trend():
    depth = np.arange(1.0, 12.0)
    noise = np.random.default_rng(0).normal(size=11)
    step = np.where(depth < 5, 2.0, 0.5) * np.exp(0.05 * noise)
    trend = np.exp(-depth / 3 + 0.05 * noise)
    described = Region(text="Described only.")
    assert _change_point(step, depth).weigh(described).interval.estimate < 1
    assert _change_point(trend, depth).weigh(described).interval.low > 10
    assert "fits the damage without error" in _change_point(0 * depth + 1, depth).reason


HEADS, PER_HEAD, BLOCKS, RADIUS, WRITE, SLOPE = 6, 12, 4, 20.0, 3.0, 40.0
WIDTH = HEADS * PER_HEAD


def heads_that_write(kind: str) -> GPT2LMHeadModel:
    """Every head writes one constant direction. Heads "alone" have a direction each, which the output layer reads. The
    heads of a layer that write "together" share one that nothing reads but a neuron of the layer, which is on only if
    all of them write: without a second head it is off already.
    """
    sizes = {"vocab_size": COUNT, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS, "n_positions": TOKENS}
    torch.manual_seed(0)
    options = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "n_inner": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()
    raw = torch.randn(WIDTH, WIDTH - 1)
    basis = torch.linalg.qr(raw - raw.mean(0)).Q.T  # orthonormal, of mean 0, as a LayerNorm keeps them
    count = BLOCKS * HEADS
    own, shared, rest = basis[:count].view(BLOCKS, HEADS, WIDTH), basis[count : count + BLOCKS], basis[count + BLOCKS :]
    directions = torch.randn(COUNT, count)
    orthogonal = torch.linalg.qr(directions - directions.mean(0)).Q  # with nearly equal odds, damages of heads add up
    with torch.no_grad():
        embeddings = torch.randn(COUNT, len(rest)) @ rest
        model.transformer.wte.weight.copy_(RADIUS * embeddings / embeddings.norm(dim=-1, keepdim=True))
        model.transformer.wpe.weight.zero_()
        model.lm_head.weight.copy_(orthogonal @ own.flatten(0, 1))
        for layer, block in enumerate(model.transformer.h):
            for parameter in block.mlp.parameters():
                parameter.zero_()
            block.attn.c_attn.bias[2 * WIDTH :: PER_HEAD] = 1.0
            block.attn.c_proj.weight.mul_(1e-2)
            block.attn.c_proj.weight[::PER_HEAD] = own[layer] if kind == "alone" else shared[layer]
            if kind == "together":
                length = (RADIUS**2 + (layer + 1) * HEADS**2 + layer * WRITE**2) ** 0.5  # before the MLP
                block.mlp.c_fc.weight[:, 0] = SLOPE * length / WIDTH**0.5 * shared[layer]
                block.mlp.c_fc.bias[0] = -SLOPE * (HEADS - 0.5)
                block.mlp.c_proj.weight[0] = WRITE * own[layer, 0] / (0.5 * SLOPE)
    return model


@pytest.mark.parametrize(("kind", "ruling"), [("together", S), ("alone", R)])
def test_heads_that_interact_in_their_layer_and_heads_that_do_not_get_the_right_rulings(monkeypatch, kind, ruling):
    set_constants(monkeypatch, "heads-compete", tokens=TOKENS, tolerance=1.0)
    with Subject(heads_that_write(kind), ROWS) as subject:
        verdict = run_trial("heads-compete", quick=True, subject=subject).verdict
    assert verdict.ruling is ruling
    assert failures(verdict) <= {"interaction"}  # all controls hold
    ratio = interval(verdict, "joint over summed damage, one layer")
    assert ratio.high < 0.6 if kind == "together" else ratio.low > 0.9


def test_where_too_few_heads_match_nothing_is_decided(monkeypatch):
    set_constants(monkeypatch, "heads-compete", tokens=TOKENS, least_pairs=30)
    with Subject(heads_that_write("alone"), ROWS) as subject:
        verdict = run_trial("heads-compete", quick=True, subject=subject).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert "needs 30 matched pairs" in named(verdict, "interaction").basis
