"""The damage to sinks by a second route: values edited where they are computed, and keys that are masked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helmscope.intervene.attention import MaskKeys
from helmscope.intervene.edit import Edit
from helmscope.models.keep import KeptTensors
from helmscope.models.record import record
from helmscope.models.sites import Chunk, Site
from helmscope.observe.damage import damage_under_edits
from helmscope.observe.sink_damage import SinkEdits, sink_damage
from helmscope.stats.replicates import random_halves
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
WRITES = KeptTensors.WRITES | KeptTensors.VALUES | KeptTensors.KERNELS


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_oss"])
def test_all_heads_of_a_layer_agree_with_edited_values_and_masked_keys(family):
    """If all heads are sinks, the value can be replaced where it is computed, and the write of the first token, which
    sees only itself, be put back."""
    recording = record(tiny_model(family, dtype=F64), inputs_of(family, batch=6, n=5), keep=WRITES)
    layer = len(recording.layers) - 1
    heads = recording.anatomy.layers[layer].heads
    names = [f"L{layer}H{head}" for head in range(heads)]
    damage = sink_damage(recording, heads=names, seed=2)
    values = recording.kept["value"][layer]
    constants = torch.empty_like(values[:, :, 0])
    parts = random_halves(6, seed=2)
    for part, other in (parts, parts[::-1]):
        constants[part] = values[other][:, :, 0].mean(0)
    write = recording.kept["attention write"][layer]

    def replaced(by):
        def function(value, context):
            changed = value.clone()
            changed[:, :, 0] = by[context.rows]
            return changed

        return function

    def put_back(value, context):
        changed = value.clone()
        changed[:, 0] = write[context.rows, 0]
        return changed

    restored = Edit(Site.ATTENTION, [layer], put_back)
    first = torch.zeros(6, 5, dtype=torch.bool)
    first[:, 0] = True
    expected = damage_under_edits(
        recording,
        {
            "mean": [Edit(Site.VALUE, [layer], replaced(constants)), restored],
            "zero": [Edit(Site.VALUE, [layer], replaced(0 * constants)), restored],
            "masked": [MaskKeys([layer], keys=first)],
        },
    )
    assert damage.edit.values.tolist() == expected.edit.values.tolist()
    for name in ("kl", "loss_increase"):
        # transformers computes the rows of llama and gpt_oss in float32
        np.testing.assert_allclose(damage[name], expected[name], rtol=1e-9 if family == "gpt2" else 1e-4, atol=1e-10)
    assert float(damage.kl.min()) > 0


def test_only_the_sinks_change_and_the_first_token_keeps_its_output():
    torch.manual_seed(0)
    weights = torch.rand(2, 3, 4, 4, dtype=F64).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    values = torch.randn(2, 3, 4, 5, dtype=F64)
    constants = {1: torch.randn(2, 3, 5, dtype=F64)}
    chunk = Chunk.whole(2)
    edits = SinkEdits([(1, 2)], constants=constants).edits
    without = edits[0].new(weights, chunk.at(Site.KERNEL, layer=1))
    outputs = edits[1].new((without @ values).transpose(1, 2), chunk.at(Site.HEADS, layer=1)).transpose(1, 2)
    for text, head, t in np.ndindex(2, 3, 4):
        expected = sum(weights[text, head, t, j] * values[text, head, j] for j in range(4))
        if head == 2 and t > 0:
            expected = expected + weights[text, head, t, 0] * (constants[1][text, head] - values[text, head, 0])
        torch.testing.assert_close(outputs[text, head, t], expected, rtol=1e-12, atol=1e-12)
    (masked,) = SinkEdits([(1, 2)], renormalized=True).edits
    changed = masked.new(weights, chunk.at(Site.KERNEL, layer=1))
    torch.testing.assert_close(changed.sum(-1), weights.sum(-1), rtol=1e-12, atol=1e-12)
    assert torch.equal(changed[:, :2], weights[:, :2])
    assert bool((changed[:, 2, 1:, 0] == 0).all())
    alone = torch.eye(2, dtype=F64).index_fill(1, torch.tensor([1]), 0.0).index_fill(1, torch.tensor([0]), 1.0)
    kept = masked.new(alone.expand(1, 3, 2, 2), Chunk.whole(1).at(Site.KERNEL, layer=1))
    assert torch.equal(kept, alone.expand(1, 3, 2, 2))  # a query that sees only the sink keeps it


def test_padding_does_not_matter():
    """The sink is the first visible token, also behind padding on the left."""
    weights = torch.tensor([[[[1.0, 0, 0], [0, 1, 0], [0, 0.5, 0.5]]]])
    visible = torch.tensor([[False, True, True]])
    (edit,) = SinkEdits([(0, 0)]).edits
    changed = edit.new(weights, Chunk(rows=slice(0, 1), texts=1, visible=visible).at(Site.KERNEL, layer=0))
    assert changed[0, 0].tolist() == [[1.0, 0, 0], [0, 1, 0], [0, 0, 0.5]]


def test_wrong_arguments_are_refused():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2", batch=4))
    with pytest.raises(HelmscopeError, match=r"threshold is 2, but no head has a mean weight .* above 0\.\d+$"):
        sink_damage(recording, threshold=2.0)
    with pytest.raises(HelmscopeError, match="layer"):
        sink_damage(recording, heads="L99H0")
    with pytest.raises(HelmscopeError, match="recording has 2 prompts, but the mean over other prompts"):
        sink_damage(record(tiny_model("gpt2"), inputs_of("gpt2", batch=2)), heads="L0H0")
