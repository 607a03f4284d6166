"""The loss of the next token: against transformers, against a plain loop, with padding, and under edits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.models.record import record
from helmscope.models.runner import Runner
from helmscope.observe import scoring as module
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, letters, pair_inputs, tiny_model

IDS = inputs_of("gpt2")
LENGTHS = (13, 4, 9)
CAUSAL = ("gpt2", "gpt_neox", "gemma2", "granite", "mixtral", "bloom")


def padded(side: str) -> dict[str, torch.Tensor]:
    """The texts of three lengths, padded with zeros on one side."""
    ids, mask = torch.zeros_like(IDS), torch.zeros_like(IDS)
    for k, length in enumerate(LENGTHS):
        place = slice(0, length) if side == "right" else slice(IDS.shape[1] - length, None)
        ids[k, place], mask[k, place] = IDS[k, :length], 1
    return {"input_ids": ids, "attention_mask": mask}


def losses_of_transformers(model: torch.nn.Module) -> np.ndarray:
    """The mean loss of each text by itself: what the model reports, which is float32 in any model, and from its logits
    as they are.
    """
    found = []
    for k, length in enumerate(LENGTHS):
        ids = IDS[k : k + 1, :length]
        with torch.no_grad():
            out = model(ids, labels=ids)
            exact = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
        found.append([float(out.loss), float(exact)])
    return np.array(found).T


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["single", "double"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_that_of_transformers(dtype, bound, side):
    model = tiny_model("gpt2", dtype=dtype)
    seen = hs.next_token_loss(record(model, padded(side)))
    reported, exact = losses_of_transformers(model)
    assert np.abs(seen.loss.values - reported).max() < 1e-6
    assert np.abs(seen.loss.values - exact).max() < bound
    assert seen.loss.dims == ("prompt",)
    assert seen.predicted.values.tolist() == [length - 1 for length in LENGTHS]
    assert float(seen.loss_null) == math.log(96)
    assert hs.reduce_replicates(seen).loss_stderr.shape == ()


def loop_over_tokens(logits: list, ids: list, counted: list, visible: list) -> list[list[float]]:
    """-log softmax, token by token, in plain Python."""
    losses = []
    for rows, row_ids, row_counted, row_visible in zip(logits, ids, counted, visible, strict=True):
        losses.append([math.nan])
        for t in range(1, len(row_ids)):
            top = max(rows[t - 1])
            total = math.fsum(math.exp(score - top) for score in rows[t - 1])
            value = math.log(total) + top - rows[t - 1][row_ids[t]]
            losses[-1].append(value if row_counted[t] and row_visible[t - 1] else math.nan)
    return losses


def test_tokens_against_a_plain_loop():
    """A hidden token inside a text is neither predicted, nor is anything predicted at its place."""
    model = tiny_model("llama", dtype=torch.float64)
    mask = torch.ones_like(IDS)
    mask[0, 5], mask[1, 8:] = 0, 0
    recording = record(model, {"input_ids": IDS, "attention_mask": mask}, batch_size=2)
    found = hs.observe.token_loss(recording)
    wanted = loop_over_tokens(recording.logits().tolist(), IDS.tolist(), mask.tolist(), mask.tolist())
    assert found.dims == ("prompt", "token")
    assert np.isnan(found.values[0, 4:8]).tolist() == [False, True, True, False]
    np.testing.assert_allclose(found.values, wanted, rtol=0, atol=1e-12)
    seen = hs.next_token_loss(recording)
    np.testing.assert_allclose(seen.loss.values, np.nanmean(wanted, axis=1), rtol=0, atol=1e-12)
    assert seen.predicted.values.tolist() == [10.0, 7.0, 12.0]


def test_special_tokens_are_read_but_not_scored():
    model, words = tiny_model("gpt2", dtype=torch.float64), letters(framed=True)
    recording = record(model, ["a b c", "d e f g", "h"], tokenizer=words)
    found = hs.observe.token_loss(recording)
    assert found.label.values[0, :5].tolist() == ["[CLS]", "a", "b", "c", "[SEP]"]
    assert found.notnull().values.tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
    ids = recording.batch.inputs["input_ids"]
    labels = torch.where(recording.batch.counted, ids, -100)
    for k, mean in enumerate(hs.next_token_loss(recording).loss.values):
        one = slice(k, k + 1)
        with torch.no_grad():
            inputs = {name: value[one] for name, value in recording.batch.inputs.items()}
            logits = model(**inputs).logits
        own = torch.nn.functional.cross_entropy(logits[0, :-1], labels[k, 1:], ignore_index=-100)
        assert abs(mean - float(own)) < 1e-12


def test_a_text_without_a_prediction_is_nan_and_all_of_them_are_refused():
    model, words = tiny_model("gpt2"), letters(framed=False)
    with pytest.warns(UserWarning, match=r"losses are undefined \(NaN\) for texts\[0\], .*: means leave it out"):
        seen = hs.next_token_loss(record(model, ["a", "b c"], tokenizer=words))
    assert np.isnan(seen.loss.values).tolist() == [True, False]
    assert hs.reduce_replicates(seen).loss.attrs["n"] == 1
    with pytest.raises(
        HelmscopeError, match="needs a text with two or more tokens that count, but texts contains none"
    ):
        hs.next_token_loss(record(model, ["a", "b"], tokenizer=words))


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("bert", "the loss of the next token needs attention that is causal, but that of BertForMaskedLM is bidir"),
        ("albert", "needs attention that is causal, but that of AlbertForMaskedLM is bidirectional"),
        ("vit", "needs a language model, but ViTModel reads no token ids"),
    ],
)
def test_models_that_do_not_predict_the_next_token_are_refused(family, says):
    recording = record(tiny_model(family), inputs_of(family))
    for refused in (hs.next_token_loss, hs.observe.token_loss, hs.observe.head_ablation_loss):
        with pytest.raises(HelmscopeError, match=says):
            refused(recording)


def test_a_model_without_its_head_and_what_is_no_recording_are_refused():
    trunk = record(tiny_model("gpt2").transformer, IDS)
    with pytest.raises(HelmscopeError, match="needs a head over a vocabulary, but GPT2Model does not have it"):
        hs.next_token_loss(trunk)
    with pytest.raises(HelmscopeError, match="recording is a GPT2LMHeadModel, but it must be a Recording"):
        hs.next_token_loss(tiny_model("gpt2"))


def test_logits_pass_a_few_at_a_time(monkeypatch):
    recording = record(tiny_model("gpt2"), IDS)
    whole, asked, outputs = hs.observe.token_loss(recording), [], Runner.outputs

    def spied(self, *observers, rows=slice(None), **options):
        asked.append(rows)
        return outputs(self, *observers, rows=rows, **options)

    monkeypatch.setattr(Runner, "outputs", spied)
    monkeypatch.setattr(module, "LOGITS_PER_FORWARD", 2 * 13 * 96)
    monkeypatch.setattr(module, "LOGITS_PER_SUM", 5 * 96)
    shares = []
    found = hs.observe.token_loss(recording, progress=shares.append)
    assert asked == [slice(0, 2), slice(2, 3)]
    assert shares == [2 / 3, 1.0]
    assert np.nanmax(np.abs(found.values - whole.values)) < 1e-6


def heads_off_by_hand(model, layer: int, head: int):
    """A hook of GPT-2 that makes what one head of four reads 0."""

    def zero(module, args):
        read = args[0].clone()
        read[..., 8 * head : 8 * head + 8] = 0
        return (read,)

    return model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(zero)


def test_the_loss_without_each_head_by_hand():
    model = tiny_model("gpt2", dtype=torch.float64)
    recording = record(model, padded("right"), batch_size=2)
    shares = []
    seen = hs.observe.head_ablation_loss(recording, progress=shares.append)
    assert seen.loss.dims == ("layer", "head", "prompt")
    plain = losses_of_transformers(model)[1]
    for layer in range(3):
        for head in range(4):
            handle = heads_off_by_hand(model, layer, head)
            wanted = losses_of_transformers(model)[1]
            handle.remove()
            one = seen.sel(**hs.models.parse_head(f"L{layer}H{head}"))
            np.testing.assert_allclose(one.loss.values, wanted, rtol=0, atol=1e-12)
            np.testing.assert_allclose(one.loss_increase.values, wanted - plain, rtol=0, atol=1e-12)
    assert np.abs(seen.loss_increase.values).min() > 1e-6
    np.testing.assert_allclose(seen.baseline_loss.values, plain, rtol=0, atol=1e-12)
    assert {seen[name].units for name in ("loss", "loss_null", "loss_increase", "baseline_loss")} == {"nats"}
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert hs.observe.head_ablation_loss(recording, layers=["transformer.h.2"]).equals(seen.sel(layer=[2]))
    assert hs.observe.head_ablation_loss(recording, layers="L2").equals(seen.sel(layer=[2]))
    assert hs.observe.head_ablation_loss(recording, heads="L1H3").equals(seen.sel(layer=[1], head=[3]))
    some = hs.observe.head_ablation_loss(recording, heads=["2.1", "L0H3", "l0h1"])
    assert (some["layer"].values.tolist(), some["head"].values.tolist()) == ([0, 2], [1, 3])
    for name in ("L2H1", "L0H3", "L0H1"):
        one = hs.models.parse_head(name)
        assert some.sel(**one).equals(seen.sel(**one))
    assert np.isnan(some.loss.sel(layer=2, head=3)).all()
    assert np.isfinite(hs.reduce_replicates(some).loss_increase_low.sel(layer=0, head=3))
    assert hs.plot(some).axes
    heading = hs.plot(seen).get_suptitle().splitlines()[0]
    assert heading == f"{recording.origin.title}: loss with one head ablated at a time"


@pytest.mark.parametrize("family", CAUSAL)
def test_a_sweep_gives_the_bits_of_single_runs(family):
    """In families whose layers can be left out, and in others; parallel blocks, experts, norms behind the halves."""
    recording = record(tiny_model(family), IDS, batch_size=2)
    edits = {
        "write": hs.intervene.Ablate([2], site=hs.Site.ATTENTION),
        "input": hs.Edit(hs.Site.INPUT, [1], lambda state: state.roll(1, -1)),
        "both": [hs.intervene.Ablate([1]), hs.Edit(hs.Site.OUTPUT, [2], lambda state: 1.5 * state)],
        "none": hs.Edit(hs.Site.MLP, [1], torch.clone),
    }
    if recording.anatomy.tapped:
        edits["head"] = hs.intervene.AblateHead(layer=2, head=3)
    seen = hs.observe.loss_under_edits(recording, edits)
    assert seen.edit.values.tolist() == list(edits)
    for name, edit in edits.items():
        alone = hs.next_token_loss(recording.under(*(edit if isinstance(edit, list) else [edit])))
        assert seen.loss.sel(edit=name).values.tolist() == alone.loss.values.tolist(), name
    assert seen.loss_increase.sel(edit="none").values.tolist() == [0.0] * 3
    plain = hs.next_token_loss(recording)
    assert (seen.loss - seen.loss_increase - plain.loss).values == pytest.approx(0.0, abs=1e-12)
    assert np.abs(seen.loss_increase.sel(edit=["write", "input", "both"]).values).min() > 1e-7


def test_a_sweep_under_edits_of_the_recording_itself():
    """What is put in is what those edits left."""
    recording = record(tiny_model("gpt2"), IDS, batch_size=2)
    base = recording.under(
        hs.Edit(hs.Site.INPUT, None, lambda state: 1.1 * state), hs.intervene.Perturb([0], relative_sigma=0.1)
    )
    cut = hs.intervene.AblateHead(layer=1, head=0)
    seen = hs.observe.loss_under_edits(base, {"cut": cut})
    assert seen.loss.values[0].tolist() == hs.next_token_loss(base.under(cut)).loss.values.tolist()
    later = base.resume(depth=3, states=base.trajectory.states[3].flip(0))
    assert hs.observe.loss_under_edits(later, {"cut": cut}).loss_increase.values.tolist() == [[0.0] * 3]
    assert hs.observe.head_ablation_loss(later).layer.values.tolist() == [1, 2]


def test_layers_before_the_first_edited_one_run_once():
    model = tiny_model("gpt2")
    recording = record(model, IDS)
    ran = []
    for number, block in enumerate(model.transformer.h):
        block.mlp.register_forward_pre_hook(lambda module, args, number=number: ran.append(number))
    hs.observe.loss_under_edits(
        recording, {"a": hs.intervene.AblateHead(layer=2, head=0), "b": hs.intervene.Ablate([1])}
    )
    assert ran == [0, 1, 2, 2, 1, 2]


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({}, "edits is {}, but it must be a mapping of names to edits, with at least one"),
        ([hs.intervene.Ablate()], "edits is .*, but it must be a mapping of names"),
        ({"a": 3}, "an edit is an int"),
        ({"a": hs.intervene.AblateHead(layer=1, head=9)}, "heads holds 9, but layer 1 has heads 0 to 3"),
    ],
)
def test_edits_that_cannot_be_made_are_refused_before_anything_runs(edits, says, monkeypatch):
    recording = record(tiny_model("gpt2"), IDS)
    monkeypatch.setattr(Runner, "outputs", None)
    with pytest.raises(HelmscopeError, match=says):
        hs.observe.loss_under_edits(recording, edits)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "layers is empty"),
        ([3], "layer is 3, but this recording has layers 0 to 2"),
        (["transformer.h.7"], r"layer is 'transformer\.h\.7', but the layers are 'transformer\.h\.0' to"),
    ],
)
def test_layers_that_are_not_there_are_refused(layers, says):
    with pytest.raises(HelmscopeError, match=says):
        hs.observe.head_ablation_loss(record(tiny_model("gpt2"), IDS), layers=layers)


def test_heads_that_cannot_be_seen_are_refused():
    recording = record(tiny_model("gpt2"), IDS)
    layers = tuple(replace(layer, heads=None) for layer in recording.anatomy.layers)
    runner = replace(recording.runner, anatomy=replace(recording.anatomy, layers=layers))
    with pytest.raises(HelmscopeError, match="layer 0 hides its heads"):
        hs.observe.head_ablation_loss(replace(recording, runner=runner))


PAIRS = ("t5-relu", "bart", "marian")


def record_pair(family: str) -> tuple[torch.nn.Module, hs.models.Recording, dict[str, torch.Tensor]]:
    """An encoder-decoder model recorded on texts and targets of several lengths, and these inputs."""
    model, inputs = tiny_model(family, dtype=torch.float64), pair_inputs()
    sides = [{name: inputs[f"{side}{name}"] for name in ("input_ids", "attention_mask")} for side in ("", "decoder_")]
    return model, record(model, sides[0], targets=sides[1], batch_size=2), inputs


@pytest.mark.parametrize("family", PAIRS)
def test_the_loss_of_targets_is_the_models_own(family):
    """Text by text without padding, as the model computes it from ``labels``, which it shifts itself."""
    model, recording, inputs = record_pair(family)
    losses = hs.observe.token_loss(recording)
    measured = hs.next_token_loss(recording)
    for k in range(3):
        source = inputs["input_ids"][k : k + 1, : int(inputs["attention_mask"][k].sum())]
        labels = inputs["decoder_input_ids"][k : k + 1, : int(inputs["decoder_attention_mask"][k].sum())]
        with torch.no_grad():
            out = model(input_ids=source, labels=labels)
        exact = torch.nn.functional.cross_entropy(out.logits[0], labels[0], reduction="none").numpy()
        n = len(exact)
        assert float(measured.predicted[k]) == n
        assert np.abs(losses.values[k, :n] - exact).max() < 1e-12
        assert np.isnan(losses.values[k, n:]).all()
        assert abs(float(measured.loss[k]) - float(out.loss)) < 1e-6  # in float32
        assert losses.label.values[k, :n].tolist() == [str(token) for token in labels[0].tolist()]
    assert float(measured.loss_null) == math.log(96)


@pytest.mark.parametrize("family", PAIRS)
def test_the_loss_of_targets_under_ablations(family):
    _, recording, _ = record_pair(family)
    recording = recording.under(encoder=hs.intervene.AblateHead(layer=0, head=1))
    off = hs.observe.head_ablation_loss(recording, layers=1)
    for head in range(off.sizes["head"]):
        again = hs.next_token_loss(recording.under(hs.intervene.AblateHead(layer=1, head=head)))
        assert np.array_equal(off.loss.sel(layer=1, head=head), again.loss)
    cross = hs.intervene.AblateHead([0], heads=[2], site=hs.Site.CROSS_HEADS)
    seen = hs.observe.loss_under_edits(recording, {"cross": cross})
    assert np.array_equal(seen.loss.sel(edit="cross"), hs.next_token_loss(recording.under(cross)).loss)
    assert (seen.loss_increase != 0).all()


def test_decoder_inputs_are_scored_from_the_second_on():
    """Their last target is not known, and the first token is not predicted."""
    model, inputs = tiny_model("t5-relu", dtype=torch.float64), pair_inputs()
    losses = hs.observe.token_loss(record(model, inputs)).values
    with torch.no_grad():
        logits = model(**inputs).logits
    wanted = torch.nn.functional.cross_entropy(logits[1, :-1], inputs["decoder_input_ids"][1, 1:], reduction="none")
    assert np.isnan(losses[:, 0]).all()
    assert np.abs(losses[1, 1:] - wanted.numpy()).max() < 1e-12


def test_special_tokens_among_targets_are_not_scored():
    words = letters(framed=True)
    recording = record(tiny_model("bart"), ["a b c", "d e"], targets=["f g", "h i j"], tokenizer=words)
    losses = hs.observe.token_loss(recording)
    assert losses.label.values[1].tolist() == ["[CLS]", "h", "i", "j", "[SEP]"]
    assert losses.notnull().values.tolist() == [[False, True, True, False, False], [False, True, True, True, False]]
    assert hs.next_token_loss(recording).predicted.values.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("layers", [1, "h.1", [1], ["transformer.h.1"]])
def test_a_layer_alone_and_by_name(layers):
    recording = record(tiny_model("gpt2"), IDS)
    seen = hs.observe.head_ablation_loss(recording, layers=layers)
    assert seen.layer.values.tolist() == [1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"heads": "L1"}, "name is 'L1', but a head is named by layer and head, such as 'L3H5' or '3.5'"),
        ({"heads": [0, 1]}, "name is 0, but a head is named by layer and head"),
        ({"heads": []}, r"heads is \[\], but it must be the name of a head, or a list of names"),
        ({"heads": 3}, "heads is 3, but it must be the name of a head, or a list of names"),
        ({"heads": "L3H0"}, "layer is 3, but this recording has layers 0 to 2"),
        ({"heads": ["L0H0", "L1H4"]}, "heads holds 'L1H4', but layer 1 has heads 0 to 3"),
        ({"heads": ["L0H0", "0.0"]}, "heads holds L0H0 twice, but all heads must be different"),
        ({"heads": "L0H0", "layers": 1}, "layers is 1 and heads is 'L0H0', but only one of them may be given"),
    ],
)
def test_what_names_no_heads_is_refused(arguments, says):
    with pytest.raises(HelmscopeError, match=says):
        hs.observe.head_ablation_loss(record(tiny_model("gpt2"), IDS), **arguments)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (1.5, "layers is 1.5, but it must be a layer, a list of layers, or None for all"),
        (3, "layer is 3, but this recording has layers 0 to 2"),
        ([0, 0], "layers holds layer 0 twice"),
        ("h.7", "layer is 'h.7', but the layers are 'transformer.h.0' to 'transformer.h.2'"),
    ],
)
def test_what_names_no_layers_is_refused(layers, says):
    with pytest.raises(HelmscopeError, match=says):
        hs.observe.head_ablation_loss(record(tiny_model("gpt2"), IDS), layers=layers)


def test_a_loss_is_never_negative_and_knows_its_unit_and_its_model():
    """Two prompts of very different loss: the plain interval of their mean would begin below 0."""
    recording = record(tiny_model("gpt2"), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    for measured in (hs.next_token_loss(recording), hs.observe.head_ablation_loss(recording)):
        assert (measured.loss.attrs["units"], measured.attrs["model"]) == ("nats", recording.origin.title)
        apart = measured.assign(loss=measured.loss * xr.DataArray([0.01, 1.0], dims="prompt"))
        apart.loss.attrs = measured.loss.attrs
        assert bool((hs.reduce_replicates(apart).loss_low == 0).all())
    assert hs.observe.head_ablation_loss(recording).loss_increase.attrs["units"] == "nats"
