"""Differences of two Measurements, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

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
    assert kept.share.attrs == {"valid_min": -1.0, "valid_max": 1.0}
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
        (reduce_replicates(TWO), "must hold values only"),
    ],
)
def test_measurements_that_do_not_match_raise(second, said):
    refused(lambda: paired_difference(ONE, second), said)


def test_a_trained_model_and_its_untrained_twin_prompt_by_prompt():
    texts = [" ".join(text.split()[:6]) for text in hs.models.box_texts()[:4]]
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
