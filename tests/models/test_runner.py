"""Observers of a runner: what they receive, that they change nothing, and which texts run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import helmscope as hs
from helmscope.models.record import record
from helmscope.models.sites import Observer, Site
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


class Log(Observer):
    """Records all calls, and tries to change values by what it returns."""

    sites = frozenset({Site.INPUT, Site.MLP})
    sees_attention = True

    def __init__(self):
        self.told, self.weights, self.keys, self.writes = [], [], [], []

    def begin(self, chunk):
        super().begin(chunk)
        self.told.append(("begin", chunk.rows, chunk.texts))

    def state(self, site, layer, value):
        self.told.append((site, layer, self.rows))
        if site is Site.MLP and layer == 1:
            self.writes.append(value.clone())
        return torch.zeros_like(value)

    def before(self, layer, call):
        self.told.append(("before", layer, self.rows))
        return replace(call, query=torch.zeros_like(call.query))

    def after(self, layer, call, result):
        self.told.append(("after", layer, self.rows))
        if layer == 1:
            self.keys.append(call.key.clone())
            self.weights.append(result.weights.clone())
        return replace(result, output=torch.zeros_like(result.output))


@pytest.fixture(scope="module")
def recording():
    return record(
        tiny_model("gpt2"),
        inputs_of("gpt2"),
        batch_size=2,
        keep=hs.models.KeptTensors.KEYS | hs.models.KeptTensors.WRITES,
    )


def test_an_observer_receives_the_rows_of_each_chunk(recording):
    log = Log()
    recording.runner.forward(log)
    expected = []
    for rows in (slice(0, 2), slice(2, 3)):
        expected.append(("begin", rows, 3))
        for layer in range(3):
            expected += [(what, layer, rows) for what in (Site.INPUT, "before", "after", Site.MLP)]
    assert log.told == expected


def test_observers_see_what_edits_leave_and_change_nothing(recording):
    edits = [
        hs.Edit(Site.KEY, [1], lambda key: 2 * key),
        hs.Edit(Site.KERNEL, [1], lambda weights: weights.roll(1, 1)),
        hs.Edit(Site.MLP, [1], lambda write: 3 * write),
    ]
    plain = recording.runner.outputs()
    log = Log()
    assert torch.equal(recording.runner.outputs(log), plain)
    changed = Log()
    wanted = recording.runner.under(*edits).outputs()
    assert torch.equal(recording.runner.under(*edits).outputs(changed), wanted)
    assert not torch.equal(wanted, plain)
    assert torch.equal(torch.cat(changed.keys), 2 * torch.cat(log.keys))
    kernel = recording.under(edits[0]).kernel(layer=1)
    assert torch.equal(torch.cat(changed.weights), kernel.roll(1, 1))
    alone = recording.under(*edits[:2], keep=hs.models.KeptTensors.WRITES).kept["mlp write"][1]
    assert torch.equal(torch.cat(changed.writes), 3 * alone)


def test_a_chunk_knows_what_counts_and_what_is_seen():
    ids = inputs_of("gpt2")
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    runner = record(tiny_model("gpt2"), {"input_ids": ids, "attention_mask": mask}, batch_size=2).runner
    chunks = []

    class Chunks(Observer):
        def begin(self, chunk):
            chunks.append(chunk)

    runner.forward(Chunks())
    assert torch.equal(torch.cat([chunk.visible for chunk in chunks]), mask.bool())
    assert torch.equal(torch.cat([chunk.weights for chunk in chunks]), mask.float())
    chunks.clear()
    whole = record(tiny_model("gpt2"), ids).runner
    whole.forward(Chunks())
    assert [(chunk.rows, chunk.weights, chunk.visible) for chunk in chunks] == [(slice(0, 3), None, None)]


def test_some_texts_and_their_progress(recording):
    heard = []
    recording.runner.forward(progress=heard.append)
    assert heard == [2 / 3, 1.0]
    heard.clear()
    recording.runner.forward(rows=slice(2, 3), progress=heard.append)
    assert heard == [1.0]
    with pytest.raises(HelmscopeError, match="progress is 3, but it must be a callable"):
        record(tiny_model("gpt2"), inputs_of("gpt2"), progress=3)
    some = recording.runner.outputs(rows=slice(1, 3))
    assert (some - recording.runner.outputs()[1:]).abs().max() < 1e-6
    log = Log()
    recording.runner.forward(log, rows=slice(2, None))
    assert [each for each in log.told if each[0] == "begin"] == [("begin", slice(2, 3), 3)]


def test_gradients_reach_what_observers_see(recording):
    seen = []

    class Last(Observer):
        sites = frozenset({Site.OUTPUT})

        def state(self, site, layer, value):
            seen.append(value)

    vector = torch.zeros(32, requires_grad=True)
    runner = recording.runner.under(hs.intervene.Add([0], value=vector))
    runner.forward(Last())
    assert not any(value.requires_grad for value in seen)
    seen.clear()
    runner.forward(Last(), gradients=True)
    (gradient,) = torch.autograd.grad(sum(value.sin().sum() for value in seen), vector)
    assert gradient.abs().max() > 0


def test_a_model_in_training_mode_is_refused():
    runner = record(tiny_model("gpt2"), inputs_of("gpt2")).runner
    runner.model.train()
    with pytest.raises(HelmscopeError, match="training mode"):
        runner.forward()
