"""Decoding of token ids by the nearest class mean, against plain loops."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from helmscope.geometry.sphere import retract
from helmscope.models.record import record
from helmscope.models.subject import Subject
from helmscope.observe import token_decoding_accuracy
from helmscope.types import HelmscopeError, Trajectory

F64 = torch.float64


def sample(seed, *, batch=4, n=12, noise=0.6):
    """Tokens near one of seven directions each, at two depths, with some padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (batch, n), generator=generator) + (seed == 1)  # id 0 and id 7 occur in one half only
    centers = torch.eye(8, dtype=F64) + 0.5
    states = retract(centers[ids] + noise * torch.randn(2, batch, n, 8, generator=generator, dtype=F64))
    weights = torch.ones(1, batch, n, dtype=F64)
    weights[:, 0, -3:] = 0
    return Trajectory(torch.arange(2.0), states, weights, axis="depth", replicate="prompt"), ids


def centered(path, depth, prompt):
    """The unit vectors of the counted tokens but the first, with the mean of their cloud removed."""
    kept = [i for i in range(1, path.states.shape[2]) if path.weights[0, prompt, i] > 0]
    cloud = path.states[depth, prompt][kept].numpy()
    cloud = cloud - cloud.mean(0)
    return dict(zip(kept, cloud / np.linalg.norm(cloud, axis=1, keepdims=True), strict=True))


def by_loops(reference, reference_ids, test, test_ids, depth):
    """Accuracy and chance of each test prompt."""
    known = [
        (int(reference_ids[p, i]), x)
        for p in range(len(reference_ids))
        for i, x in centered(reference, depth, p).items()
    ]
    asked = [[(int(test_ids[p, i]), x) for i, x in centered(test, depth, p).items()] for p in range(len(test_ids))]
    classes = {name for name, _ in known} & {name for row in asked for name, _ in row}
    means = {}
    for name in sorted(classes):
        mean = np.mean([x for other, x in known if other == name], 0)
        means[name] = mean / np.linalg.norm(mean)
    frequent = Counter(name for name, _ in known if name in classes).most_common(1)[0][0]
    accuracy, chance = [], []
    for row in asked:
        tested = [(name, x) for name, x in row if name in classes]
        right = [max(means, key=lambda other: float(x @ means[other])) == name for name, x in tested]
        accuracy.append(np.mean(right))
        chance.append(np.mean([name == frequent for name, _ in tested]))
    return accuracy, chance, len(classes)


def test_accuracy_agrees_with_loops():
    (reference, reference_ids), (test, test_ids) = sample(0), sample(1)
    found = token_decoding_accuracy(reference, test, reference_ids=reference_ids, test_ids=test_ids)
    for depth in range(2):
        accuracy, chance, classes = by_loops(reference, reference_ids, test, test_ids, depth)
        assert found.accuracy.values[depth] == pytest.approx(accuracy, abs=1e-12)
        assert found.accuracy_null.values == pytest.approx(chance, abs=1e-12)
        assert found.attrs["classes"] == classes
    assert 0.3 < float(found.accuracy.mean()) < 0.99  # neither trivial nor hopeless


def test_separate_tokens_are_all_decoded_and_random_ones_are_not():
    (reference, reference_ids), (test, test_ids) = sample(0, noise=0.01), sample(1, noise=0.01)
    found = token_decoding_accuracy(reference, test, reference_ids=reference_ids, test_ids=test_ids)
    assert (found.accuracy == 1).all()
    (reference, reference_ids), (test, test_ids) = sample(0, noise=1e3), sample(1, noise=1e3)
    found = token_decoding_accuracy(reference, test, reference_ids=reference_ids, test_ids=test_ids)
    assert float(found.accuracy.mean()) < 0.35


def test_the_first_states_of_a_model_name_their_tokens():
    subject = Subject("A")
    halves = ([text[:160] for text in half] for half in (subject.selection[:12], subject.test[:4]))
    found = token_decoding_accuracy(*(record(subject.loaded, half) for half in halves))
    assert float(found.accuracy[0].mean()) > 0.95
    assert float(found.accuracy_null.mean()) < 0.2


def test_bad_arguments():
    path, ids = sample(0)
    with pytest.raises(HelmscopeError, match="reference_ids is None"):
        token_decoding_accuracy(path, path)
    with pytest.raises(HelmscopeError, match="no token id in common"):
        token_decoding_accuracy(path, path, reference_ids=ids, test_ids=ids + 100)
    short = Trajectory(path.times[:1], path.states[:1], path.weights, axis="depth", replicate="prompt")
    with pytest.raises(HelmscopeError, match="test has 1 depths"):
        token_decoding_accuracy(path, short, reference_ids=ids, test_ids=ids)
