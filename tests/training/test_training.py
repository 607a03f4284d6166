"""The folder ``training/`` on tiny models and hand-made stories."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from scipy.stats import chisquare
from tokenizers import Tokenizer, models

import helmscope as hs

SIZES = {
    "A": {"n_embd": 8, "n_head": 2},
    "tied": {"embedding_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2},
}
START, CUT, MASK = 0, 1, 2
WORDS = ["<unk>", "<s>", "</s>", "\ufffd", *"abcdefghijklmnopqrstuvwxyz"]


def tokens_of(count, seed=0):
    """Random tokens, about every eighth of them special."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 4096, count)
    return np.where(rng.random(count) < 0.12, rng.integers(0, 2, count), tokens).astype(np.int16)


def small(training, name, **changes):
    return replace(training.recipe.RECIPES[name], **{"layers": 2, "steps": 4, "batch": 2, "warmup": 2, **changes})


def trainer_of(training, name, folder, **changes):
    return training.train.Trainer(small(training, name, **changes), tokens_of(5000), folder, "cpu", **SIZES[name])


def teacher():
    return Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<unk>"))


def test_stories_are_cut_out_of_rows(training):
    word = {text: k for k, text in enumerate(WORDS)}
    long, longer, short = [word["a"]] * 16, [word["b"]] * 20, [word["c"]] * 15
    rows = [
        [1, *long, 2, *short, 1, *longer],  # the second is too short, the third has no end
        [1, *longer, 1, *long, 1],  # nothing is cut off
        [1, *short, word["\ufffd"], 1, *short, *long],  # the first contains an invalid character
    ]
    width = max(map(len, rows))
    rows = [np.array(row + [1] * (width - len(row)) if row[-1] == 1 else row) for row in rows]
    found = [training.tokenizer.stories(row[None], teacher()) for row in rows]
    a, b, c = (" ".join(letter * count) for letter, count in (("a", 16), ("b", 20), ("c", 15)))
    assert found == [[(a, False), (b, True)], [(b, False), (a, False)], [(f"{c} {a}", True)]]


def test_concatenated_stories_have_marks_at_starts_and_cuts(training):
    tokenizer = training.tokenizer.train_tokenizer(["low lower lowest"] * 3, size=270)
    assert [tokenizer.token_to_id(token) for token in training.recipe.SPECIAL] == [START, CUT, MASK]
    one, other = (tokenizer.encode(text).ids for text in ("low", "a lower é"))
    found = training.tokenizer.concatenate([("low", False), ("a lower é", True), ("low", False)], tokenizer)
    assert found.tolist() == [START, *one, START, *other, CUT, START, *one]
    assert found.dtype == np.int16
    assert tokenizer.decode(other) == "a lower é"


def test_crops_begin_at_sentences(training):
    names = [f"{first}{last}" for first in "BCDFGKLM" for last in ("ab", "ed", "im", "ol", "un")]
    story = "{0} runs to lake {1}. {0} sees a dog! {0} has no dog. {0} asks why? "
    texts = [(12 * story.format(names[k % 40], 1000 + k), False) for k in range(300)]
    tokenizer = training.tokenizer.train_tokenizer([*(text for text, _ in texts), *50 * names], size=600)
    found = training.tokenizer.crops(texts, tokenizer)
    assert len(found) == len(set(found)) == 128
    codes = [tokenizer.encode(text).ids for text in found]
    assert {len(row) for row in codes} == {128}
    firsts = [row[0] for row in codes]
    assert len(set(firsts)) >= 32
    assert max(map(firsts.count, firsts)) <= 4
    sources = [next(text for text, _ in texts if crop in text) for crop in found]
    assert len(set(sources)) == 128
    befores = [story[: story.rindex(crop)][-2:] for story, crop in zip(sources, found, strict=True)]
    assert set(befores) == {". ", "! ", "? "}
    assert found == training.tokenizer.crops(texts, tokenizer)
    assert found != training.tokenizer.crops(texts, tokenizer, seed=1)
    with pytest.raises(AssertionError, match="texts are long enough, 128 are needed"):
        training.tokenizer.crops(texts[:40], tokenizer)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 1.0}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads)).eval()


def test_samples_of_the_teacher(training, llama):
    found = training.data.sample_rows(llama, 3, seed=5)
    assert found.shape == (3, 256)
    assert (found[:, 0] == 1).all()
    assert torch.equal(found, training.data.sample_rows(llama, 3, seed=5))
    assert not torch.equal(found, training.data.sample_rows(llama, 3, seed=6))


def test_the_distribution_of_the_samples(training, llama, monkeypatch):
    """The joint distribution of the second and third token, against the softmax of the teacher without a cache."""
    monkeypatch.setattr(training.data, "TEACHER_CONTEXT", 3)
    found = training.data.sample_rows(llama, 20_000, seed=0)
    with torch.no_grad():
        pairs = torch.tensor([[1, second] for second in range(7)])
        laws = torch.softmax(llama(input_ids=pairs).logits.double(), -1)
    joint = (laws[0, 0, :, None] * laws[:, 1]).flatten().numpy()
    counts = np.bincount((7 * found[:, 1] + found[:, 2]).numpy(), minlength=49)
    frequent = joint * 20_000 >= 5
    assert frequent.sum() > 20
    counts = [*counts[frequent], counts[~frequent].sum()]
    assert chisquare(counts, [*(20_000 * joint[frequent]), 20_000 * joint[~frequent].sum()]).pvalue > 0.01
    assert chisquare(counts, np.full(len(counts), 20_000 / len(counts))).pvalue < 1e-12


@pytest.mark.parametrize("name", SIZES)
def test_a_run_that_is_stopped_after_every_step_ends_the_same(training, name, tmp_path):
    valid, texts = tokens_of(2 * 257, seed=1).reshape(2, 257), torch.arange(3, 35).reshape(2, 16)
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    whole = trainer_of(training, name, through)
    assert training.train.train(whole, valid, texts, minutes=1e9)
    ends = []
    for _ in range(whole.recipe.steps):
        torch.manual_seed(len(ends))  # nothing may depend on the global generator
        last = trainer_of(training, name, stopped)
        ends.append(training.train.train(last, valid, texts, minutes=0))
    assert ends == [False, False, False, True]
    assert [row[0] for row in last.curve] == [1, 2, 3, 4]
    for (key, one), other in zip(whole.model.state_dict().items(), last.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    first = whole.recipe.model(**SIZES[name]).state_dict()
    assert max(float((first[key] - value).abs().max()) for key, value in whole.model.state_dict().items()) > 1e-4
    snapshots = [path.name for path in sorted(through.glob("snapshot-*"))]
    assert snapshots == [f"snapshot-{step:06d}.safetensors" for step in range(5)]
    assert all((through / name).read_bytes() == (stopped / name).read_bytes() for name in snapshots)
    check_what_is_written(training, whole)


def check_what_is_written(training, trainer):
    """The weights are rounded to bfloat16, and the history has what the package ships."""
    values = {key: value.clone() for key, value in trainer.model.named_parameters()}
    training.train.finish(trainer)
    again = type(trainer.model).from_pretrained(trainer.folder / "final")
    for key, value in again.named_parameters():
        assert torch.equal(value, values[key].to(torch.bfloat16)), key
    history = training.gather.history(trainer.folder)
    assert history.step.values.tolist() == [0, 1, 2, 3, 4]
    assert set(training.gather.DIMS) < set(history.data_vars)
    assert history.validation_loss.values.tolist() == [row[2] for row in trainer.curve]


def test_the_learning_rate(training, tmp_path):
    trainer = trainer_of(training, "A", tmp_path, steps=110, warmup=10, peak=2.0)
    rates = []
    for trainer.step in (0, 4, 9, 10, 60, 109, 110):
        rates.append(trainer.rate())
    end = 1 + math.cos(math.pi * 0.99)
    assert rates == pytest.approx([0.2, 1.0, 2.0, 2.0, 1.0, end, 0.0], abs=1e-12)


def test_snapshots_are_evenly_spaced_in_the_logarithm(training):
    for name, recipe in training.recipe.RECIPES.items():
        assert training.train.snapshot_steps(recipe.steps) == hs.models.training_history(name).step.values.tolist()


def test_targets_of_the_causal_model_are_next_tokens(training, tmp_path):
    trainer, calls = trainer_of(training, "A", tmp_path), []
    loss = trainer.loss
    trainer.loss = lambda *arguments: calls.append(arguments) or loss(*arguments)
    trainer.advance()
    ((inputs, targets),) = calls
    assert inputs.shape == targets.shape == (2, 256)
    stream = tokens_of(5000)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        begin = next(k for k in range(len(stream)) if stream[k : k + 256].tolist() == row)
        following = stream[begin + 1 : begin + 257].tolist()
        assert wanted == [-100 if token == CUT else token for token in following]
        assert CUT in following
        assert START in wanted


def test_targets_of_the_tied_model_are_a_fifth(training, tmp_path):
    """80 % of them masked, 10 % replaced, 10 % unchanged, within four standard errors."""
    trainer = trainer_of(training, "tied", tmp_path)
    tokens = torch.from_numpy(tokens_of(100 * 256)).long().reshape(100, 256)
    inputs, targets = trainer._mask_tokens(tokens)
    wanted, allowed = targets != -100, (tokens != START) & (tokens != CUT)
    assert torch.equal(targets[wanted], tokens[wanted])
    assert not (wanted & ~allowed).any()
    assert torch.equal(inputs[~wanted], tokens[~wanted])
    count = int(wanted.sum())
    masked, kept = (inputs == MASK)[wanted].sum() / count, (inputs == tokens)[wanted].sum() / count
    for share, law, size in ((count / allowed.sum(), 0.2, allowed.sum()), (masked, 0.8, count), (kept, 0.1, count)):
        assert abs(share - law) < 4 * math.sqrt(law * (1 - law) / size)


def test_the_same_tokens_are_hidden_every_time(training):
    windows = tokens_of(40 * 256).reshape(40, 256)
    hidden = training.evaluate.hidden(windows)
    assert np.array_equal(hidden, training.evaluate.hidden(windows.copy()))
    assert np.array_equal(hidden[:7], training.evaluate.hidden(windows[:7]))
    assert not np.array_equal(hidden, training.evaluate.hidden(windows, seed=1))
    assert windows[hidden].min() > CUT
    allowed = windows > CUT
    assert abs(hidden.sum() / allowed.sum() - 0.2) < 4 * 0.4 / math.sqrt(allowed.sum())


@pytest.mark.parametrize("name", SIZES)
def test_the_validation_loss_is_a_plain_mean(training, name, monkeypatch):
    monkeypatch.setattr(training.evaluate, "ROWS", 2)
    model = small(training, name).model(**SIZES[name]).double()
    windows = tokens_of(5 * 257, seed=2).reshape(5, 257)
    gaps, losses = training.evaluate.hidden(windows[:, :-1]), []
    for window, gap in zip(windows.astype(int), gaps, strict=True):
        inputs = np.where(gap, MASK, window[:-1]) if name == "tied" else window[:-1]
        with torch.no_grad():
            scores = model(input_ids=torch.from_numpy(inputs)[None]).logits[0].numpy()
        for k in range(256):
            target = window[k] if name == "tied" else window[k + 1]
            if gap[k] if name == "tied" else target != CUT:
                losses.append(np.log(np.exp(scores[k] - scores[k].max()).sum()) + scores[k].max() - scores[k, target])
    assert training.evaluate.validation_loss(model, windows) == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_measures_against_loops(training, name):
    model = small(training, name).model(**SIZES[name]).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel())))
    ids = torch.tensor([[5, 6, 7, 5, 9], [3, 3, 4, 8, 2]])
    found = {key: value.double().numpy() for key, value in training.measures.measure(model, ids).items()}
    model.set_attn_implementation("eager")
    if name == "A":  # the final norm is applied to the last hidden state
        model.transformer.ln_f = torch.nn.Identity()
    with torch.no_grad():
        out = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
    for depth, states in enumerate(out.hidden_states):
        lengths, inner = cloud(states.double().numpy())
        assert found["radius"][depth] == pytest.approx(np.mean(lengths), rel=1e-6)
        assert found["mean_inner_product"][depth] == pytest.approx(np.mean(inner), abs=1e-6)
        assert found["aligned_pair_share"][depth] == pytest.approx(np.mean([each > 0.9 for each in inner]), abs=1e-6)
    for layer, weights in enumerate(out.attentions):
        for head in range(2):
            rows = weights[:, head].double().reshape(10, 5).tolist()
            entropy = np.mean([-sum(p * math.log(p) for p in row if p > 0) for row in rows])
            assert found["row_entropy"][layer, head] == pytest.approx(entropy, abs=1e-6)
    for block, (reads, writes) in enumerate(neurons(model, name)):
        inner = [abs(cosine(one, other)) for i, one in enumerate(reads) for j, other in enumerate(reads) if i != j]
        assert found["coherence_max"][block] == pytest.approx(max(inner), abs=1e-6)
        assert found["coherence_mean"][block] == pytest.approx(np.mean(inner), abs=1e-6)
        assert found["neuron_alignment_mean"][block] == pytest.approx(
            np.mean(list(map(cosine, reads, writes))), abs=1e-6
        )


def cosine(one, other):
    return float(np.dot(one, other) / math.sqrt(np.dot(one, one) * np.dot(other, other)))


def cloud(states):
    """Norms of the centered tokens, and the cosines of all pairs within a text."""
    lengths, inner = [], []
    for text in states:
        tokens = [token - sum(token) / len(token) for token in text]
        lengths += [math.sqrt(np.dot(token, token)) for token in tokens]
        inner += [cosine(a, b) for i, a in enumerate(tokens) for j, b in enumerate(tokens) if i != j]
    return lengths, inner


def neurons(model, name):
    """What each neuron reads and writes, block by block."""
    weights = {key: value.detach().double().numpy() for key, value in model.named_parameters()}
    if name == "A":
        stems = [f"transformer.h.{k}.mlp" for k in range(2)]
        return [(weights[f"{stem}.c_fc.weight"].T, weights[f"{stem}.c_proj.weight"]) for stem in stems]
    stem = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    return [(weights[f"{stem}.ffn.weight"], weights[f"{stem}.ffn_output.weight"].T)]


def test_nothing_of_helmscope_is_used(training):
    """Otherwise its measures would not be an independent check."""
    for name, module in vars(training).items():
        assert not re.search(r"^\s*(from|import) helmscope", Path(module.__file__).read_text(), re.M), name


def test_the_tokenizer_is_shipped_as_it_is_written(training, tmp_path):
    source = hs.models.bundled_folder("A") / "tokenizer.json"
    training.gather.write_tokenizer(source, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (hs.models.bundled_folder("A") / file).read_bytes()
    (tmp_path / "texts.json").write_text(json.dumps(hs.models.story_texts()[:3]))
    assert training.train.bundled_text_ids(tmp_path).shape == (3, 128)
