"""The arms of the factorial against a forward pass written out in plain PyTorch, and on models of every topology."""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.intervene import Arm, AttentionMode, Edit, FreezeRadius, NegateValues, only_one_mlp, without_one_mlp
from helmscope.intervene.arms import ARMS
from helmscope.models.load import load
from helmscope.models.record import record
from helmscope.models.sites import Site
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

TEXTS = ["Once upon a time there was a little dog", "The cat sat on"]


@pytest.fixture(scope="module")
def model_a():
    """Model A in float64, in a recording of two texts of unequal length."""
    loaded = load("A")
    loaded.model.double()
    return record(loaded, TEXTS)


def layer_norm(y, norm):
    centered = y - y.mean(-1, keepdim=True)
    core = centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return core * norm.weight + norm.bias


def attention_write(y, block, mode):
    """What attention of a GPT-2 block writes for one text (n, d), from its weights, head by head."""
    n, d = y.shape
    attention = block.attn
    read, size = layer_norm(y, block.ln_1), attention.head_dim
    weight, bias = attention.c_attn.weight, attention.c_attn.bias
    out = torch.zeros_like(y)
    for head in range(d // size):
        columns = [slice(part * d + head * size, part * d + (head + 1) * size) for part in range(3)]
        query, key, value = (read @ weight[:, c] + bias[c] for c in columns)
        if mode is AttentionMode.NEGATED:
            constant = block.ln_1.bias @ weight[:, columns[2]] + bias[columns[2]]
            value = -(value - constant) + constant
        logits = query @ key.T / math.sqrt(size)
        logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        weights = torch.eye(n).to(y) if mode is AttentionMode.NO_MIXING else logits.softmax(-1)
        out = out + weights @ value @ attention.c_proj.weight[head * size : (head + 1) * size]
    return out + attention.c_proj.bias


def mlp_write(y, block):
    hidden = layer_norm(y, block.ln_2) @ block.mlp.c_fc.weight + block.mlp.c_fc.bias
    hidden = block.mlp.act(hidden)
    return hidden @ block.mlp.c_proj.weight + block.mlp.c_proj.bias


def states_by_hand(recording, arm, row, *, radius=None):
    """All states of one text, (depth, n, d), under an arm."""
    blocks = recording.anatomy.model.transformer.h
    y = recording.residual_stream(depth=0)[row]
    states = [y]

    def rescaled(y):
        if radius is None:
            return y
        mean = y.mean(-1, keepdim=True)
        centered = y - mean
        return mean + centered / centered.norm(dim=-1, keepdim=True) * radius[len(states)].unsqueeze(-1)

    for number, block in enumerate(blocks):
        if arm.attention is not AttentionMode.OFF:
            y = y + attention_write(y, block, arm.attention)
        y = rescaled(y)
        states.append(y)
        if arm.mlp is True or (arm.mlp is not False and number in arm.mlp):
            y = y + mlp_write(y, block)
        y = rescaled(y)
        states.append(y)
    return torch.stack(states)


def lengths(recording):
    return [len(ids) for ids in recording.batch.visible_ids]


@pytest.mark.parametrize("arm", [*ARMS[1:], Arm(mlp={0, 5}), Arm(AttentionMode.OFF, {3})], ids=lambda arm: arm.label)
def test_arms_of_a_agree_with_plain_torch(model_a, arm):
    found = model_a.under(*arm.edits(model_a))
    with torch.no_grad():
        for row, n in enumerate(lengths(model_a)):
            expected = states_by_hand(model_a, arm, row)[:, :n]
            states = torch.stack([found.residual_stream(depth=k)[row, :n] for k in range(len(expected))])
            assert ((states - expected).abs().amax() / expected.abs().amax()) < 1e-10


def test_attention_alone_at_the_radius_of_the_whole_model(model_a):
    arm = Arm(mlp=False, radius_of_whole_model=True)
    found = model_a.under(*arm.edits(model_a))
    n = lengths(model_a)[0]
    radius = model_a.trajectory.radius[:, 0]
    with torch.no_grad():
        expected = states_by_hand(model_a, arm, 0, radius=radius)[:, :n]
    states = torch.stack([found.residual_stream(depth=k)[0, :n] for k in range(len(expected))])
    assert ((states - expected).abs().amax() / expected.abs().amax()) < 1e-10
    assert torch.allclose(found.trajectory.radius, model_a.trajectory.radius, rtol=1e-12)
    plain = model_a.under(*Arm(mlp=False).edits(model_a))
    assert (found.trajectory.states[-1] - plain.trajectory.states[-1]).abs().max() > 1e-2


def test_the_whole_model_at_its_own_radius_is_the_whole_model(model_a):
    found = model_a.under(*Arm(radius_of_whole_model=True).edits(model_a))
    assert torch.allclose(found.trajectory.states, model_a.trajectory.states, atol=1e-12)


def test_eight_arms_in_a_fixed_order():
    assert [arm.label for arm in ARMS] == [
        "whole model",
        "attention alone",
        "MLP alone",
        "no writes",
        "no mixing (P = I)",
        "no mixing (P = I), MLP off",
        "values negated",
        "values negated, MLP off",
    ]
    assert len(set(ARMS)) == 8
    assert Arm(mlp=[2, 0, 2]) == Arm(mlp={0, 2})
    assert Arm(mlp=()) == Arm(mlp=False)


PRE_NORM = ("gpt2", "llama", "gpt_neox", "falcon", "cohere", "gemma2", "granite", "olmo2", "mixtral")


@pytest.mark.parametrize("family", PRE_NORM)
def test_without_writes_no_state_moves(family):
    recording = record(tiny_model(family), inputs_of(family))
    still = recording.under(*ARMS[3].edits(recording)).residual
    for depth in range(1, len(still.radius)):
        assert torch.equal(still.direction[depth], still.direction[0])
        assert torch.equal(still.radius[depth], still.radius[0])


def test_without_writes_the_norms_of_a_post_norm_model_still_act():
    recording = record(tiny_model("bert", dtype=torch.float64), inputs_of("bert"))
    still = recording.under(*ARMS[3].edits(recording))
    y = recording.residual_stream(depth=0)
    for number, block in enumerate(recording.anatomy.model.bert.encoder.layer):
        for half, norm in enumerate((block.attention.output.LayerNorm, block.output.LayerNorm), 1):
            with torch.no_grad():
                y = norm(y)
            assert torch.allclose(still.residual_stream(depth=2 * number + half), y, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "bert", "albert", "qwen2", "olmo2"])
def test_negated_values_of_every_topology(family):
    """In layer 0, where weights are those of the model, the mean of a head's output and that with -V is u."""
    model = tiny_model(family, dtype=torch.float64)
    recording = record(model, inputs_of(family))
    plain, negated = (_first_write(recording, edits) for edits in ((), ARMS[6].edits(recording)))
    constants = NegateValues.of(recording).constants
    per_head = constants[0].squeeze(1).repeat_interleave(plain.shape[2] // len(constants[0]), 0)
    assert torch.allclose((plain + negated) / 2, per_head.expand_as(plain), atol=1e-12)
    assert (plain - negated).abs().max() > 1e-3


def _first_write(recording, edits):
    """The outputs of the heads of layer 0, before the output matrix."""
    heads = []
    edit = Edit(Site.HEADS, [0], lambda value: heads.append(value.clone()))
    recording.under(*edits, edit)
    return torch.cat(heads)


def test_constants_of_a_post_norm_model_contain_the_bias_of_its_norm():
    recording = record(tiny_model("bert", dtype=torch.float64), inputs_of("bert"))
    constants = NegateValues.of(recording).constants
    layers = recording.anatomy.model.bert.encoder.layer
    with torch.no_grad():
        expected = layers[1].attention.self.value(layers[0].output.LayerNorm.bias)
    assert torch.allclose(constants[1].flatten(), expected, atol=1e-14)


def test_all_arms_of_a_tied_model():
    recording = record(tiny_model("albert", dtype=torch.float64), inputs_of("albert"))
    last = [recording.under(*arm.edits(recording)).residual_stream(depth=recording.anatomy.depths.last) for arm in ARMS]
    for k, one in enumerate(last):
        assert torch.isfinite(one).all()
        assert all((one - other).abs().max() > 1e-6 for other in last[:k])


def test_mlps_left_in_and_out():
    assert [arm.mlp for arm in only_one_mlp(range(3))] == [(0,), (1,), (2,)]
    assert [arm.mlp for arm in without_one_mlp(range(3), attention=AttentionMode.OFF)] == [(1, 2), (0, 2), (0, 1)]
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    for arm in only_one_mlp(recording.layers):
        found = recording.under(*arm.edits(recording))
        moved = [
            not torch.equal(found.residual_stream(depth=2 * k + 1), found.residual_stream(depth=2 * k + 2))
            for k in range(3)
        ]
        assert [k for k in range(3) if moved[k]] == list(arm.mlp)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Arm("off"), "attention is 'off'"),
        (lambda: Arm(mlp="on"), "mlp is 'on'"),
        (lambda: Arm(mlp=3.5), "mlp is 3.5"),
        (lambda: Arm(mlp=[-1]), "mlp is"),
        (lambda: Arm(radius_of_whole_model=1), "radius_of_whole_model is 1"),
        (lambda: Arm(mlp=False).edits("A"), "recording is a str"),
        (lambda: without_one_mlp([0]), "layers holds 1 layer"),
        (lambda: only_one_mlp([]), "layers is"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(HelmscopeError, match=words):
        make()


def test_what_a_model_does_not_have():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2"))
    with pytest.raises(HelmscopeError, match="mlp holds 3, but the model has layers 0 to 2"):
        Arm(mlp=[3]).edits(recording)
    bert = record(tiny_model("bert"), inputs_of("bert"))
    with pytest.raises(HelmscopeError, match="post-norm"):
        bert.under(FreezeRadius(bert))
    bloom = record(tiny_model("bloom"), inputs_of("bloom"))
    with pytest.raises(HelmscopeError, match="registry"):
        ARMS[6].edits(bloom)
    other = record(tiny_model("gpt2"), inputs_of("gpt2", batch=2))
    with pytest.raises(HelmscopeError, match="source has"):
        recording.under(FreezeRadius(other))
