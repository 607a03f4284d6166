"""Several lists of edits in one forward pass give what each gives alone."""

import pytest
import torch

from helmscope.intervene import (
    BatchedEdits,
    CenteredKeyNoise,
    Edit,
    GaugeTransform,
    MaskKeys,
    MatchedQueryNoise,
    Perturb,
)
from helmscope.models import record
from helmscope.models.sites import Site
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model


def padded():
    ids = inputs_of("gpt2")
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return record(tiny_model("gpt2", dtype=torch.float64), {"input_ids": ids, "attention_mask": mask})


def test_each_list_acts_on_its_own_copy():
    recording = padded()
    hidden = torch.zeros(recording.batch.inputs["input_ids"].shape, dtype=torch.bool)
    hidden[:, 2] = True
    lists = [
        [],
        [Perturb(site=Site.KEY, sigma=0.5, seed=1)],
        [GaugeTransform(factor=3), Perturb([1], site=Site.QUERY, relative_sigma=0.5, seed=2)],
        [CenteredKeyNoise(relative_sigma=0.5, seed=1)],
        [MatchedQueryNoise.of(recording, relative_sigma=0.5, seed=1)],
        [Edit(Site.MLP, [0], lambda write: 2 * write)],
        [MaskKeys(keys=hidden)],
    ]
    for rows in (slice(0, 3), slice(1, 3)):
        count = rows.stop - rows.start
        together = BatchedEdits.runner(recording.runner, rows, lists).outputs().split(count)
        for edits, part in zip(lists, together, strict=True):
            alone = recording.runner.under(*edits).outputs(rows=rows)
            assert (part - alone)[:, :8].abs().max() < 1e-12, edits
    assert (together[1] - together[3]).abs().max() > 1e-4


def test_edits_of_the_runner_come_first():
    recording = padded().under(GaugeTransform(factor=2))
    noise = [Perturb(site=Site.KEY, sigma=0.5, seed=1)]
    found = BatchedEdits.runner(recording.runner, slice(0, 3), [noise]).outputs()
    assert (found - recording.runner.under(*noise).outputs()).abs().max() < 1e-12


def test_refusals():
    runner = padded().runner
    with pytest.raises(HelmscopeError, match="lists is empty, but it must hold at least one list of edits"):
        BatchedEdits.runner(runner, slice(0, 1), [])
    with pytest.raises(HelmscopeError, match="layers holds 7, but the model has layers 0 to 2"):
        BatchedEdits.runner(runner, slice(0, 1), [[], [GaugeTransform([7], factor=2)]])
