"""The bundled models: certified, told apart, looped, with the cards, texts and history that belong to them."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

import helmscope as hs
from helmscope.models.bundled_models import BUNDLED_FOLDER, FIRST, MODELS
from helmscope.observe.kernel import row_entropy
from helmscope.types import HelmscopeError

FEW = hs.models.story_texts()[:4]
LAYERS = {"A": 12, "B": 12, "tied": 24}
# how far what is shipped (bfloat16, recorded in float32) is from the last step of training (float32 weights, whose
# products a GPU took in TF32), on all 128 texts: relative in the radius, absolute in the rest; measured in that order
# 3.1e-4 5.0e-4 1.4e-5 1.9e-3 for A, 3.4e-4 2.1e-4 9.6e-6 2.7e-3 for B, 4.8e-4 1.2e-3 7.2e-5 1.2e-2 for tied
CAUSAL = {"radius": 6e-4, "mean_inner_product": 1e-3, "aligned_pair_share": 3e-5, "row_entropy": 4e-3}
LOOPED = {"radius": 1e-3, "mean_inner_product": 2e-3, "aligned_pair_share": 1.5e-4, "row_entropy": 2e-2}


@pytest.fixture(scope="module")
def recorded():
    """Every model on a few texts."""
    return {name: hs.record(name, FEW) for name in MODELS}


@pytest.fixture(scope="module")
def whole():
    """The recording by ``hs.record()`` without arguments."""
    return hs.record()


class Entropy(hs.Instrument):
    """Entropy of the attention rows, mean over tokens."""

    name, needs = "entropy", hs.types.Needs.KERNEL

    def attention(self, context, tensors):
        self.keep(context, {"entropy": row_entropy(tensors.kernel.double()).mean(-1)})


def streams(recording):
    """Radius, mean inner product and share of pairs above .9, at the ends of all layers."""
    path = recording.trajectory
    states, n = path.states[::2], path.states.shape[2]
    above = [((each @ each.mT) > 0.9).double().sum((-1, -2)).mean() for each in states]  # with the n pairs i = i
    return {
        "radius": path.radius[::2].double().mean((1, 2)).numpy(),
        "mean_inner_product": np.array([float(hs.mean_inner_product(each).mean()) for each in states]),
        "aligned_pair_share": (np.array(above) - n) / (n * (n - 1)),
    }


def check_history(name, found):
    """Near the last step, and at least ten times nearer to it than to the one before."""
    history = hs.models.training_history(name)
    for key, value in found.items():
        last, before = history[key].values[-1].astype(float), history[key].values[-2].astype(float)
        scale = last if key == "radius" else 1.0
        off, other = np.abs((value - last) / scale).max(), np.abs((value - before) / scale).max()
        assert off <= (LOOPED if name == "tied" else CAUSAL)[key], (key, off)
        assert other >= 10 * off, (key, off, other)


@pytest.mark.parametrize("name", MODELS)
def test_the_certificate_is_ok(recorded, name):
    recording = recorded[name]
    assert recording.certificate.ok
    assert len(recording.layers) == LAYERS[name]
    unasked = {line.name for line in recording.certificate.lines if line.ok is None}
    assert unasked == ({"causality"} if name == "tied" else set())
    assert str(recording.anatomy) == (
        "post-norm; 24 layers of 1 tied block, width 192"
        if name == "tied"
        else "sequential pre-norm; 12 layers, width 192"
    )
    assert recording.origin.name == name
    assert recording.origin.dtype == "float32"
    assert recording.batch.counted.all()
    assert recording.forces[0].folded().activation == hs.activations.GELU()


def test_the_tied_block_can_be_called_48_times(recorded):
    """Compared with transformers configured for 48 layers, and with the first 24."""
    deep = hs.record("tied", FEW, loops=48)
    assert deep.certificate.ok
    assert str(deep.anatomy) == "post-norm; 48 layers of 1 tied block, width 192"
    assert deep.trajectory.states.shape == (97, 4, 128, 192)
    assert torch.equal(deep.trajectory.states[:49], recorded["tied"].trajectory.states)
    assert (deep.residual_stream(depth=96) - deep.residual_stream(depth=94)).abs().max() > 1e-3
    model = tf.AutoModelForMaskedLM.from_pretrained(
        hs.models.bundled_folder("tied"), num_hidden_layers=48, dtype=torch.float32
    )
    with torch.no_grad():
        states = model(**deep.batch.inputs, output_hidden_states=True).hidden_states
    assert len(states) == 49
    for depth, state in enumerate(states):
        assert (deep.residual_stream(depth=2 * depth) - state).abs().max() < 1e-4 * state.abs().max(), depth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "A", "loops": 3}, "loops is 3, but only a model of one tied block, such as 'tied', can be looped"),
        ({"model": "tied", "loops": 0}, "loops is 0, but it must be a whole number >= 1"),
        ({"model": "tied", "loops": 2.5}, "loops is 2.5, but it must be a whole number >= 1"),
        ({"model": "A", "revision": "main"}, "revision is 'main', but 'A' is a folder"),
        (
            {"model": "C", "offline": True},
            "model is 'C', but it is neither a folder nor a bundled model (A, B, tied)",
        ),
    ],
)
def test_load_rejects_invalid_options(options, message):
    with pytest.raises(HelmscopeError, match=re.escape(message)):
        hs.load(**options)


def test_unknown_names_raise():
    for function in (hs.models.bundled_folder, hs.models.training_history):
        with pytest.raises(HelmscopeError, match="unknown model 'Tied': did you mean 'tied'"):
            function("Tied")
        with pytest.raises(HelmscopeError, match="allowed: A, B, tied"):
            function("../A")


def test_record_without_arguments_takes_the_first_model_and_the_texts_in_the_box(whole):
    assert inspect.signature(hs.record).parameters["model"].default == FIRST == "A"
    assert whole.certificate.ok
    assert whole.origin.name == "A"
    assert whole.trajectory.states.shape == (25, 128, 128, 192)
    assert whole.batch.counted.all()
    words = tf.AutoTokenizer.from_pretrained(hs.models.bundled_folder("A"))
    assert words.batch_decode(whole.batch.inputs["input_ids"]) == hs.models.story_texts()


def test_the_recording_matches_the_last_training_step(whole):
    check_history("A", streams(whole))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_attention_matches_the_last_training_step(name):
    recording = hs.record(name)
    entropy = recording.replay(Entropy())["entropy"].entropy.mean("prompt").values
    check_history(name, {**streams(recording), "row_entropy": entropy})


@pytest.mark.parametrize("name", MODELS)
def test_the_history_of_training(name):
    history, layers = hs.models.training_history(name), LAYERS[name]
    steps = history.step.values
    assert len(steps) == 12
    assert steps[0] == 0
    assert steps[-1] == history.evaluation_step.values[-1] == (6000 if name == "tied" else 8000)
    assert np.abs(np.diff(np.log(steps[5:])) - np.log(steps[-1]) / 10).max() < 0.02
    assert history.coherence_max.dims == ("step", "block" if name == "tied" else "layer")
    assert {key: value.attrs["units"] for key, value in history.data_vars.items() if "units" in value.attrs} == (
        dict.fromkeys(("row_entropy", "training_loss", "validation_loss"), "nats")
    )
    sizes = {"step": 12, **({"block": 1} if name == "tied" else {}), "layer": layers, "depth": layers + 1, "head": 6}
    assert {key: history.sizes[key] for key in sizes} == sizes
    assert all(np.isfinite(value).all() for value in history.data_vars.values())
    assert all(value.attrs["long_name"] for value in history.data_vars.values())
    assert history.validation_loss.values[-1] == history.validation_loss.values.min()
    at_first, keys = history.row_entropy.values[0], np.arange(1, 129)
    even = np.log(128) if name == "tied" else np.log(keys).mean()  # an untrained model looks at all it sees alike
    assert np.abs(at_first - even).max() < 0.01


def test_the_history_of_the_sibling():
    """Its arms coincide where they must, and its last step is near A, which was trained by the same recipe."""
    history = hs.models.ablated_training_history()
    sizes = {"step": 16, "arm": 4, "depth": 25, "level": 3, "prompt": 64, "layer": 12}
    assert dict(history.sizes) == sizes
    assert history.step.values[[0, -1]].tolist() == [0, 8000]
    assert all(np.isfinite(value).all() and value.attrs["long_name"] for value in history.data_vars.values())
    clouds = history[
        [
            "aligned_pair_share",
            "mean_inner_product",
            "participation_ratio",
            "effective_rank",
            "collapse_residual_frobenius",
        ]
    ]
    for name, value in clouds.items():
        after_attention, after_mlp = value.isel(depth=slice(1, None, 2)), value.isel(depth=slice(2, None, 2))
        before, first = value.isel(depth=slice(0, -1, 2)), value.isel(depth=0)
        alone = {"arm": "attention alone"}
        assert np.array_equal(after_attention.sel(alone), after_mlp.sel(alone)), name
        assert np.array_equal(before.sel(arm="MLP alone"), after_attention.sel(arm="MLP alone")), name
        assert (value.sel(arm="neither") == first.sel(arm="whole model")).all(), name
        assert (first == first.sel(arm="neither")).all(), name
    assert (history.aligned_pair_share.diff("level") <= 0).all()
    loss = history.validation_loss
    assert (loss.sel(arm="whole model").diff("step") < 0).all()
    assert abs(float(loss.sel(arm="whole model")[-1]) - 1.5357) < 0.01  # the loss of A
    assert history.attrs["final_validation_loss"] == float(loss.sel(arm="whole model")[-1])
    assert np.abs(history.aligned_pair_share.sel(step=0)).max() == 0  # an untrained model does not gather
    last = hs.models.training_history("A").isel(step=-1)
    assert np.abs(history.neuron_alignment_mean[-1].values - last.neuron_alignment_mean.values).max() < 0.1
    assert np.abs(history.gate_sparsity[-1].mean("prompt").values - last.gate_sparsity.values).max() < 0.1


def test_a_and_b_predict_differently(recorded):
    """The mean KL divergence of their next-token distributions was measured as 0.145 and 0.149 nats."""
    says = {name: torch.log_softmax(recorded[name].logits().double(), -1) for name in ("A", "B")}
    for one, other in (("A", "B"), ("B", "A")):
        apart = (says[one].exp() * (says[one] - says[other])).sum(-1)
        assert apart.min() > -1e-12
        assert apart.mean() > 0.01


def test_all_models_share_one_tokenizer():
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(hs.models.bundled_folder(name) / file).read_bytes() for name in MODELS}) == 1
    words = tf.AutoTokenizer.from_pretrained(hs.models.bundled_folder("B"))
    assert len(words) == 4096
    assert (words.bos_token_id, words.eos_token_id, words.pad_token_id, words.mask_token_id) == (0, 0, 1, 2)


def test_every_string_survives_a_round_trip():
    """10,000 of all planes of Unicode, controls, emoji, spaces and the special tokens' own text; surrogates, which are
    no characters, have no bytes in UTF-8."""
    rng = random.Random(0)
    kinds = [
        *(range(32), range(32, 127), range(127, 0x300), range(0x300, 0xD800), range(0xE000, 0x10000)),
        *(range(0x10000, 0x110000), range(0x1F300, 0x1FB00), (0x200B, 0x200D, 0xFE0F, 0xFEFF), (9, 10, 13, 32, 32)),
    ]
    special = ["<|endoftext|>", "<pad>", "<mask>", " n't", " ."]
    strings = [
        "".join(
            rng.choice(special) if kind == len(kinds) else chr(rng.choice(kinds[kind]))
            for kind in rng.choices(range(len(kinds) + 1), k=rng.randrange(1, 40))
        )
        for _ in range(10_000)
    ]
    words = tf.AutoTokenizer.from_pretrained(hs.models.bundled_folder("A"))
    codes = words(strings)["input_ids"]
    assert words.batch_decode(codes) == strings
    # the three special tokens and the 256 bytes come first; 13 bytes stand in no UTF-8
    assert len(set(range(259)) - {code for row in codes for code in row}) == 13


def test_the_texts_in_the_box():
    texts = hs.models.story_texts()
    words = tf.AutoTokenizer.from_pretrained(hs.models.bundled_folder("A"))
    codes = words(texts)["input_ids"]
    assert len(texts) == len(set(texts)) == 128
    assert {len(row) for row in codes} == {128}
    firsts = [row[0] for row in codes]
    assert len(set(firsts)) >= 32
    assert max(firsts.count(first) for first in firsts) <= 4
    assert not {0, 1, 2} & {code for row in codes for code in row}
    assert all(re.match(r'["A-Z]', text) for text in texts)


def test_the_held_out_texts_have_32_first_tokens_in_each_half():
    """The texts for development have 30 in the first 64."""
    subject = hs.Subject("A").held_out()
    codes = tf.AutoTokenizer.from_pretrained(hs.models.bundled_folder("A"))
    assert len(subject.texts) == len({*subject.texts} - {*hs.models.story_texts()}) == 128
    for half in (subject.selection, subject.test):
        assert len(half) == 64
        assert len({codes(text)["input_ids"][0] for text in half}) >= 32
    assert not {*subject.selection} & {*subject.test}


@pytest.mark.parametrize("name", MODELS)
def test_the_card_is_of_these_weights(name):
    folder = hs.models.bundled_folder(name)
    card = (folder / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert f"| model.safetensors | sha256 {digest} |" in card
    assert re.findall(r"^(\d+)\. .{20,}", card, re.M) == [str(k) for k in range(1, 21)]
    model = tf.AutoModel.from_config(tf.AutoConfig.from_pretrained(folder))
    assert model.config.dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "AlbertForMaskedLM" if name == "tied" else "GPT2LMHeadModel"
    ]
    assert "TinyStories" in card
    assert "MIT" in card


def test_the_box_is_small():
    assert sum(path.stat().st_size for path in BUNDLED_FOLDER.rglob("*") if path.is_file()) < 30e6


def test_a_folder_of_the_same_name_is_loaded_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hs.models.bundled_folder("B"), tmp_path / "A")
    wanted = hashlib.sha256((hs.models.bundled_folder("B") / "model.safetensors").read_bytes()).hexdigest()
    for source, same in (("./A", True), (Path("./A"), True), ("A", False)):
        assert (hs.load(source).origin.hashes["model.safetensors"] == wanted) is same
