"""Mode C, the covariance of increments over contexts, against loops over contexts with d x d matrices."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

import helmscope as hs
from helmscope.models.bundled_models import BUNDLED_FOLDER, held_out_texts, validation_contexts
from helmscope.models.load import load
from helmscope.models.record import record
from helmscope.observe.context_noise import (
    FIRST_POSITION,
    _choose,
    context_group_noise,
    context_groups,
    context_noise,
    context_unsupported,
)
from helmscope.observe.context_statistics import covariance_regression, kolmogorov_distance
from helmscope.observe.head_moments import HEADS_NEED
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
CONTEXTS = torch.randint(5, 8, (30, 9), generator=torch.Generator().manual_seed(0))


class Seen(hs.Instrument):
    """Keeps the tensors of every layer."""

    name = "seen"
    needs = HEADS_NEED

    def __init__(self):
        self.layers = []

    def attention(self, context, tensors):
        self.layers.append((context, tensors))
        self.keep(context, {"length": tensors.radius.mean(-1)})


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_groups_agree_with_loops(family):
    model = tiny_model(family, dtype=F64)
    recording = record(model, inputs_of(family, batch=1, n=5))
    groups = context_groups(recording, CONTEXTS, groups=3, min_contexts=6, first_position=4)
    measured = context_group_noise(groups)
    seen = Seen()
    record(model, CONTEXTS, batch_size=100).replay(seen)
    context, tensors = seen.layers[0]
    kernel, value, output = (t.numpy() for t in (tensors.kernel, tensors.head_values, tensors.output_matrix))
    d = output.shape[1]
    for k, group in enumerate(groups):
        members = [c for c in range(30) if int(CONTEXTS[c, group.position]) == group.token]
        assert len(members) == measured.context_count.values[k] >= 6
        i = group.position
        x, y = tensors.direction[members[0], i].numpy(), float(tensors.radius[members[0], i])
        t = np.eye(d) - np.outer(x, x) - (np.ones((d, d)) / d if context.centered else 0)
        dim = d - (2 if context.centered else 1)
        moved = np.array([t @ tensors.write[c, i].numpy() / y for c in members])
        sigma = np.cov(moved.T) / 2
        np.testing.assert_allclose(group.sigma_of(group.outputs).numpy(), sigma, atol=1e-12)
        sampling, random = [], []
        keys = np.zeros((len(members), kernel.shape[-1], d))
        heads = np.zeros((kernel.shape[1], len(members), d))
        for row, c in enumerate(members):
            total, total_b = np.zeros((d, d)), 0.0
            for h in range(kernel.shape[1]):
                vectors = [t @ output[h] @ v / y for v in value[c, h]]
                weights = kernel[c, h, i]
                mean = sum(p * v for p, v in zip(weights, vectors, strict=True))
                total += sum(p * np.outer(v - mean, v - mean) for p, v in zip(weights, vectors, strict=True)) / 2
                total_b += sum(p * p * (v - mean) @ (v - mean) for p, v in zip(weights, vectors, strict=True)) / 2
                heads[h, row] = mean
                for j, (p, v) in enumerate(zip(weights, vectors, strict=True)):
                    keys[row, j] += p * v
            sampling.append(total)
            random.append(total_b)
        trace = np.trace(sigma)
        assert measured.nu_context.values[k] == pytest.approx(trace / dim, rel=1e-9)
        halves = [np.mean(sampling[half::2], 0) for half in (0, 1)]
        assert measured.total_nu_token_sampling.values[k] == pytest.approx(
            sum(np.trace(each) for each in halves) / 2 / dim, rel=1e-6
        )
        assert measured.total_nu_random_values.values[k] == pytest.approx(np.mean(random) / dim, rel=1e-6)
        between = 1 - sum(np.trace(np.cov(each.T)) / 2 for each in heads) / trace
        assert measured.cross_head_share.values[k] == pytest.approx(between, rel=1e-6)
        between = 1 - sum(np.trace(np.cov(keys[:, j].T)) / 2 for j in range(keys.shape[1])) / trace
        assert measured.cross_key_share.values[k] == pytest.approx(between, rel=1e-6)
        parts = [np.cov(moved[half::2].T) / 2 for half in (0, 1)]
        slopes = [(parts[1 - half] * halves[half]).sum() / (halves[half] ** 2).sum() for half in (0, 1)]
        assert measured.slope.values[k] == pytest.approx(np.mean(slopes), rel=1e-6)
        fitted = [(parts[half] * halves[half]).sum() / (halves[half] ** 2).sum() for half in (0, 1)]
        r_squared = [
            1 - ((parts[1 - half] - fitted[half] * halves[half]) ** 2).sum() / parts[1 - half].var() / d**2
            for half in (0, 1)
        ]
        assert measured.r_squared.values[k] == pytest.approx(np.mean(r_squared), rel=1e-6)
        n_eff = np.mean([1 / (kernel[c, :, i] ** 2).sum(-1) for c in members])
        assert measured.effective_keys.values[k] == pytest.approx(n_eff, rel=1e-6)


def test_a_fit_with_known_answers():
    generator = torch.Generator().manual_seed(0)
    sigma = torch.randn(5, 5, generator=generator, dtype=F64)
    sigma = sigma @ sigma.mT
    assert covariance_regression((0.3 * sigma, sigma), 0.3 * sigma) == pytest.approx((0.3, 1.0, 1.0))
    slope, r_squared, _ = covariance_regression((-0.3 * sigma, sigma), 0.3 * sigma)
    assert (slope, r_squared < 0) == (pytest.approx(0.3), True)
    assert np.isnan(covariance_regression((sigma, 0 * sigma), sigma)).all()


def test_the_number_of_contexts_is_corrected_for():
    """Normal increments with Sigma_A as their covariance: the slope is 1, R^2 is not, the corrected one is near 1."""
    source = np.random.default_rng(0)
    sigma = np.diag([4.0, 2.0, 1.0, 0.5])
    fits = []
    for _ in range(400):
        halves = [np.cov(source.multivariate_normal(np.zeros(4), 2 * sigma, 8).T) / 2 for _ in range(2)]
        fits.append(covariance_regression((torch.tensor(halves[0]), torch.tensor(sigma)), torch.tensor(halves[1])))
    slope, r_squared, _ = np.mean(fits, 0)
    assert slope == pytest.approx(1, abs=0.06)
    assert r_squared < 0.7
    assert np.median([fit[2] for fit in fits]) == pytest.approx(1, abs=0.15)


def test_distance_from_normal_is_that_of_scipy():
    samples = np.random.default_rng(1).exponential(size=(20, 3))
    expected = [stats.kstest((column - column.mean()) / column.std(ddof=1), "norm").statistic for column in samples.T]
    assert kolmogorov_distance(samples) == pytest.approx(np.mean(expected), rel=1e-12)
    assert np.isnan(kolmogorov_distance(np.ones((4, 2))))


def test_contexts_hold_no_held_out_text():
    contexts = validation_contexts()
    encode = load("A").tokenizer
    lines = [" ".join(map(str, row)) + " " for row in contexts.tolist()]
    for text in held_out_texts()[:8]:
        piece = " ".join(map(str, encode(text)["input_ids"][20:50])) + " "
        assert not any(piece in line for line in lines)


def test_how_many_groups_the_validation_windows_have():
    """975 groups of a word at a position in 16 of the 1,024 contexts; 862 without held-out texts, 809 of them from the
    position on from which groups are drawn.
    """
    windows = np.load(BUNDLED_FOLDER / "validation.npy")
    whole = np.concatenate([windows[:, :128], windows[:, 128:256]])

    def count(contexts, first):
        words = [(position, int(word)) for row in contexts for position, word in enumerate(row) if position >= first]
        return sum(number >= 16 for number in Counter(words).values())

    kept = validation_contexts()
    assert (len(whole), count(whole, 0)) == (1024, 975)
    assert (len(kept), count(kept, 0), count(kept, FIRST_POSITION)) == (768, 862, 809)
    assert len(_choose(kept, None, 10_000, 16, FIRST_POSITION, 0)) == 809


def test_refusals():
    recording = record(tiny_model("gpt2", dtype=F64), inputs_of("gpt2", batch=1, n=5))
    with pytest.raises(HelmscopeError, match="no word at the same position in 31"):
        context_groups(recording, CONTEXTS, min_contexts=31)
    with pytest.raises(HelmscopeError, match="min_contexts is 3"):
        context_groups(recording, CONTEXTS, min_contexts=3)
    with pytest.raises(HelmscopeError, match="must be a Recording"):
        context_groups(None, CONTEXTS)
    for contexts in (["Once upon a time"] * 20, [[1, 2], [3]], torch.rand(4, 4)):
        with pytest.raises(
            HelmscopeError, match=r"contexts is a .*, but it must be token ids of shape \(contexts, n\)"
        ):
            context_groups(recording, contexts)


def test_a_model_that_is_not_bundled_is_measured_on_its_own_texts():
    model = tiny_model("gpt2", dtype=F64)
    rows = torch.tensor([[5 + (k + i) % 2 for i in range(9)] for k in range(40)])
    recording = record(model, rows)
    same = context_noise(recording, rows)
    assert hs.measure(recording, only=["context_noise"])["context_noise"].identical(
        same.assign_attrs(model=recording.origin.title)
    )
    few = record(model, rows[:15])
    assert "no word at the same position in 16 of them" in (context_unsupported(few) or "")
    assert "context_noise" not in hs.measure(few, quick=True)
