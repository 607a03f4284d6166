"""The bundled models against ``training/``: their cards, and its plain measures against recordings."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers as tf

import helmscope as hs

WINDOWS = 12
LOSSES = {"A": 1.442327, "B": 1.422710, "tied": 1.236702}  # of the first windows


def card(name):
    return (hs.models.bundled_folder(name) / "README.md").read_text(encoding="utf-8")


def loss_and_model(training, name, count):
    model, words = training.evaluate.load(hs.models.bundled_folder(name))
    windows = np.load(training.recipe.BUNDLED_FOLDER / "validation.npy")
    assert windows.shape == (512, 257)
    return training.evaluate.validation_loss(model, windows[:count]), model, words


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_the_first_windows(training, name):
    assert loss_and_model(training, name, WINDOWS)[0] == pytest.approx(LOSSES[name], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_the_samples_of_the_card(training, name):
    loss, model, words = loss_and_model(training, name, None)
    loss_on_card = float(re.search(r"^\| validation loss \| ([\d.]+) nats", card(name), re.M).group(1))
    assert loss == pytest.approx(loss_on_card, abs=1e-4)
    texts = training.evaluate.samples(name, model, words, training.recipe.BUNDLED_FOLDER, 20)
    assert [" ".join(text.split()) for text in texts] == re.findall(r"^\d+\. (.*)$", card(name), re.M)


@pytest.mark.parametrize("name", ["A", "tied"])
def test_plain_measures_and_observables_agree(training, name):
    """The same quantities in float32 from hooks on the modules and from a recording. Measured: they differ by at most
    2e-7, and the shares are equal; rounding may move one pair of tokens or a dozen neurons across the threshold."""
    words = tf.AutoTokenizer.from_pretrained(hs.models.bundled_folder(name))
    ids = torch.tensor(words(hs.models.story_texts()[:4])["input_ids"])
    model = training.evaluate.load(hs.models.bundled_folder(name))[0]
    wanted = {key: value.double() for key, value in training.measures.measure(model, ids).items()}
    recording = hs.record(model, ids, keep=hs.models.KeptTensors.KERNELS)
    path, layers = recording.trajectory, recording.layers
    states = path.states[::2]
    found = {
        "radius": path.radius[::2].mean((1, 2)),
        "mean_inner_product": hs.mean_inner_product(states).mean(-1),
        "aligned_pair_share": hs.observe.close_pair_share(states, delta=0.1).mean(-1),
        "row_entropy": torch.stack(
            [hs.observe.row_entropy(recording.kernel(layer=layer)).mean((0, 2)) for layer in layers]
        ),
        "gate_sparsity": torch.stack([negative_share(recording, layer) for layer in layers]),
    }
    for key, value in found.items():
        off = ((value - wanted[key]).abs() / wanted[key].clamp(min=1.0)).max()
        assert off < (3.2e-5 if key in ("aligned_pair_share", "gate_sparsity") else 1e-6), (key, off)


def negative_share(recording, layer):
    """The share of pre-activations below 0, from the MLP as a field."""
    force = recording.force(layer=layer)
    return (recording.force_points(layer=layer) @ force.w_in.mT + force.b_in < 0).double().mean()


def test_the_arms_agree_with_ablated_recordings(training):
    """Every arm in float32 from hooks on the modules of A, and from recordings in which sites are ablated. Measured:
    inner products differ by at most 1.2e-7 and the shares are equal; rounding may move one pair across a level."""
    model, words = training.evaluate.load(hs.models.bundled_folder("A"))
    ids = torch.tensor(words(hs.models.story_texts()[:2])["input_ids"])[:, :48]
    wanted = training.arms.measure_arms(model, ids, np.load(training.recipe.BUNDLED_FOLDER / "validation.npy")[:1])
    recording = hs.record(model, ids)
    sites = {"attn": hs.models.Site.ATTENTION, "mlp": hs.models.Site.MLP}
    n = ids.shape[1]
    pairs = (torch.ones(n, n).triu(16).bool() & (ids[:, :, None] != ids[:, None]))[:, 1:, 1:]
    for arm, silent in enumerate(training.arms.ARMS.values()):
        edits = [hs.intervene.Ablate(site=sites[name]) for name in silent]
        x = (recording.under(*edits) if edits else recording).on_sphere.states[:, :, 1:].double()
        inner = [cloud[where] for depth in x for cloud, where in zip(depth @ depth.mT, pairs, strict=True)]
        means = torch.stack([values.mean() for values in inner]).reshape(25, 2)
        shares = torch.stack([(values > 0.9).double().mean() for values in inner]).reshape(25, 2)
        assert (wanted["mean_inner_product"][arm] - means).abs().max() < 1e-5, arm
        assert (wanted["aligned_pair_share"][arm, :, 1] - shares).abs().max() < 1.5 / pairs[0].sum(), arm
        some = x[::6]
        for name, observable in (
            ("participation_ratio", hs.observe.participation_ratio),
            ("effective_rank", hs.observe.effective_rank),
            ("collapse_residual_frobenius", lambda cloud: hs.observe.collapse_residual_frobenius(cloud, relative=True)),
        ):
            found = observable(some)
            assert ((wanted[name][arm, ::6] - found).abs() / found).max() < 1e-5, (name, arm)
    force, points = recording.force(layer=5), recording.force_points(layer=5)
    index = hs.fields.jacobian_split(force.ambient, points[0, 1:]).antisymmetric_share.mean()
    assert float(wanted["antisymmetric_share"][5, 0]) == pytest.approx(float(index), abs=1e-5)
