"""Differences of two Measurements, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
import xarray as xr
from tokenizers import Tokenizer, models, pre_tokenizers

import helmscope as hs
from helmscope.stats.intervals import mean_interval
from helmscope.stats.paired import paired_difference
from helmscope.stats.reduce import reduce_replicates
from support.refusal import refused

RNG = np.random.default_rng(0)
LEVEL = RNG.normal(0.0, 1.0, (3, 16))  # of each prompt in each layer, which both models share


def model(shift: float, **more: float) -> xr.Dataset:
    noise = 0.1 * RNG.normal(size=LEVEL.shape)
    dims = ("layer", "prompt")
    coords = {"layer": [0, 1, 2], "prompt": np.arange(16)}
    return xr.Dataset({"width": (dims, LEVEL + noise + shift, {"long_name": "width", **more})}, coords, {"beta": 1.0})


ONE, TWO = model(0.3), model(0.0)


def test_each_entry_is_the_interval_of_the_differences_of_its_pairs():
    kept = paired_difference(ONE, TWO)
    assert np.array_equal(kept.width.values, ONE.width.values - TWO.width.values)
    seen = reduce_replicates(kept)
    for layer in range(3):
        one = mean_interval(ONE.width.values[layer] - TWO.width.values[layer])
        ours = [float(seen[f"width{end}"][layer]) for end in ("", "_low", "_high")]
        assert ours == pytest.approx([one.estimate, one.low, one.high], rel=1e-12)
    assert seen.width.attrs["long_name"] == "width"
    assert (seen.attrs["beta"], seen.attrs["n"]) == (1.0, 16)


def test_pairs_see_what_separate_means_do_not():
    first, second = reduce_replicates(ONE), reduce_replicates(TWO)
    assert (first.width_low < second.width_high).all()  # the separate intervals overlap
    assert (reduce_replicates(paired_difference(ONE, TWO)).width_low > 0).all()


def test_the_difference_of_two_shares_is_between_minus_1_and_1():
    shares = xr.Dataset({"share": ("prompt", [0.0, 0.1, 1.0], {"valid_min": 0.0, "valid_max": 1.0})})
    others = xr.Dataset({"share": ("prompt", [0.9, 0.0, 0.2], {"valid_min": 0.0, "valid_max": 1.0})})
    kept = paired_difference(shares, others)
    assert kept.share.attrs == {"valid_min": -1.0, "valid_max": 1.0, "difference": "difference"}
    seen = reduce_replicates(kept)
    assert -1.0 == float(seen.share_low) < float(seen.share) < float(seen.share_high) <= 1.0
    above = paired_difference(model(0.0, valid_min=-9.0), model(0.0))
    assert "valid_min" not in above.width.attrs


def test_a_null_is_left_out():
    kept = paired_difference(ONE.assign(width_null=0.0), TWO.assign(width_null=("prompt", np.zeros(16))))
    assert set(kept.data_vars) == {"width"}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (TWO.isel(prompt=slice(8)), "second has sizes {'layer': 3, 'prompt': 8}, but pairs need the coordinates of"),
        (TWO.assign_coords(layer=[0, 1, 3]), "but pairs need the coordinates of first"),
        (TWO.rename(prompt="seed"), "second has replicates along 'seed', but those of first are along 'prompt'"),
        (TWO.rename(width="order"), "second holds ['order'], but pairs need the quantities of first, ['width']"),
        (reduce_replicates(TWO), "is already reduced: it has"),
    ],
)
def test_measurements_that_do_not_match_raise(second, said):
    refused(lambda: paired_difference(ONE, second), said)


def test_a_trained_model_and_its_untrained_twin_prompt_by_prompt():
    texts = [" ".join(text.split()[:6]) for text in hs.models.story_texts()[:4]]
    trained = hs.load("A")
    pair = [hs.record(model, texts) for model in (trained, hs.models.untrained_twin(trained, seed=1))]
    tracked = [hs.track(recording, order=hs.order_parameter) for recording in pair]
    kept = paired_difference(*tracked)
    assert kept.order.dims == ("depth", "prompt")
    seen = reduce_replicates(kept)
    values = [
        [
            [float((cloud * w[:, None]).sum(0).norm() / w.sum()) for cloud, w in zip(clouds, weights, strict=True)]
            for clouds in path.states.double()
        ]
        for path, weights in ((each.trajectory, each.trajectory.weights[0].double()) for each in pair)
    ]
    difference = np.subtract(*values)  # (depth, prompt)
    assert kept.order.values == pytest.approx(difference, abs=1e-6)
    mean, error = difference.mean(1), difference.std(1, ddof=1) / 4**0.5
    assert seen.order.values == pytest.approx(mean, abs=1e-6)
    assert seen.order_stderr.values == pytest.approx(error, abs=1e-6)
    assert seen.order_low.values == pytest.approx(
        mean - 3.182446305284263 * error, abs=1e-5
    )  # t with 3 degrees of freedom
    assert ((seen.order_low > 0) | (seen.order_high < 0)).any()


TEXTS = ["a b c d", "c a b", "d d a"]


def tokenizer(letters: str) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of letters, whose ids follow their order."""
    made = Tokenizer(models.WordLevel({"<unk>": 0} | {letter: k + 1 for k, letter in enumerate(letters)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def recording(texts: object, *, seed: int = 0, letters: str = "abcd") -> hs.Recording:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=8, eos_token_id=8))
    return hs.record(model, texts, tokenizer=tokenizer(letters))


def order(texts: object, **options: Any) -> xr.Dataset:
    return hs.track(recording(texts, **options), order=hs.order_parameter)


def test_models_on_different_texts_are_not_paired():
    first, other = order(TEXTS), order([TEXTS[0], "b b", TEXTS[2]], seed=1)
    refused(lambda: paired_difference(first, other), "prompt 1 of second has another text than prompt 1 of first")
    refused(lambda: paired_difference(first, order(TEXTS[::-1])), "prompt 0 of second has another text")
    on_purpose = paired_difference(first, other, different_texts=True)
    assert np.array_equal(on_purpose.order.values, first.order.values - other.order.values)
    assert "text" not in on_purpose.coords


def test_texts_are_compared_for_every_kind_of_measurement_also_after_reading_it_from_a_file(tmp_path):
    pair = [recording(texts) for texts in (TEXTS[:2], TEXTS[1:])]
    measurements = [
        [
            hs.next_token_loss(each),
            hs.token_logits(each, [3]),
            hs.logit_lens_kl(each),
            hs.measure(each)["kernel_statistics"],
            hs.observe.inner_product_histogram(each, bins=3),
        ]
        for each in pair
    ]
    run = hs.store.RunFolder.new(tmp_path, "run")
    for k, (first, second) in enumerate(zip(*measurements, strict=True)):
        run.write_results(f"m{k}", first)
        read = run.read_results(f"m{k}")
        assert read.text.values.tolist() == list(pair[0].batch.identities)
        assert len(paired_difference(first, read).data_vars) > 0
        refused(lambda read=read, second=second: paired_difference(read, second), "prompt 0 of second has another text")


def test_two_tokenizers_on_the_same_texts_are_paired():
    first, second = order(TEXTS), order(TEXTS, letters="dcba")
    assert bool((paired_difference(first, second).order != 0).any())
    assert paired_difference(first, second).text.values.tolist() == first.text.values.tolist()
    assert paired_difference(first, second).depth.attrs == {"units": "half-layers"}


def test_token_ids_are_identified_without_their_padding():
    ids = torch.tensor([[5, 6, 7, 8]])
    inputs = {"input_ids": torch.tensor([[0, 5, 6, 7, 8]]), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    plain, padded, flipped = (recording(given).batch.identities for given in (ids, inputs, ids.flip(-1)))
    assert plain == padded != flipped
    refused(lambda: paired_difference(order(TEXTS[:1]), order(ids)), "form (both as strings or both as token ids)")


def test_simulations_are_paired_by_number_unless_both_name_their_starts():
    x0 = hs.Uniform(n=4, dim=3).sample(batch=3, seed=0)
    one, two = (
        hs.track(hs.integrate(field, x0, times=[0.0, 1.0]), order=hs.order_parameter) for field in (hs.SA(1), hs.USA(1))
    )
    assert paired_difference(one, two).sizes["system"] == 3
    named = one.assign_coords(start=("system", ["a", "b", "c"]))
    assert paired_difference(named, two).sizes["system"] == 3
    others = two.assign_coords(start=("system", ["a", "b", "d"]))
    refused(lambda: paired_difference(named, others), "system 2 of second has another start than system 2 of first")
