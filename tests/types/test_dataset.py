"""Measurements are xarray Datasets in every way, and draw themselves; several are a dict with a short display."""

from __future__ import annotations

import copy
import pickle

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

import helmscope as hs
from helmscope.types.dataset import Measurement, Measurements

mpl.use("agg")
X0 = hs.Uniform(n=6, dim=3).sample(batch=4, seed=0)
RUN = hs.integrate(hs.SA(beta=1.0), X0, times=[0.0, 1.0, 2.0])
TRACKED = hs.track(RUN, order=hs.order_parameter, inner=hs.mean_inner_product)
MEASURED = hs.measure(RUN, only=["depth_steps", "kernel_statistics"])


def test_it_is_a_dataset_and_stays_a_measurement() -> None:
    assert isinstance(TRACKED, xr.Dataset)
    again = [
        TRACKED.sel(time=1.0),
        TRACKED.isel(system=[0, 2]),
        TRACKED.mean("system"),
        TRACKED.median("time"),
        TRACKED.where(TRACKED.order > 0.1),
        TRACKED.fillna(0.0),
        TRACKED[["order"]],
        TRACKED.assign(other=TRACKED.order),
        TRACKED.drop_vars("inner"),
        TRACKED.rename(order="length"),
        TRACKED.assign_attrs(seed=3),
        TRACKED.map(np.abs),
        TRACKED.squeeze(),
        copy.deepcopy(TRACKED),
        pickle.loads(pickle.dumps(TRACKED)),
        xr.concat([TRACKED.isel(time=[0]), TRACKED.isel(time=[1, 2])], "time"),
    ]
    assert {type(each) for each in again} == {Measurement}
    assert type(TRACKED.order) is xr.DataArray
    assert xr.concat([TRACKED.isel(time=[0]), TRACKED.isel(time=[1, 2])], "time").identical(TRACKED)
    np.testing.assert_array_equal(
        TRACKED.where(TRACKED.order > 0.1).order, xr.Dataset.where(TRACKED, TRACKED.order > 0.1).order
    )
    with pytest.raises(AttributeError):
        TRACKED.anything = 3


def test_its_picture_is_that_of_plot_and_those_of_xarray_stay() -> None:
    figure = TRACKED.plot(title="mine", variables="order")
    assert figure.get_suptitle().startswith("mine")
    assert len(figure.axes) == 1
    assert len(TRACKED.plot().axes) == len(hs.plot(TRACKED).axes) == 2
    assert TRACKED.plot.scatter(x="order", y="inner").get_offsets().shape == (12, 2)
    assert TRACKED.order.plot() is not None  # a variable alone is a DataArray of xarray
    means = hs.reduce_replicates(TRACKED)
    assert type(means) is Measurement
    assert means.plot().axes[0].lines


def test_every_function_returns_one(tmp_path) -> None:
    recording = hs.record("A", ["Once upon a time there was a cat who liked the sun", "The dog ran home to eat"])
    other = hs.record("B", ["Once upon a time there was a cat who liked the sun", "The dog ran home to eat"])
    order = {"order": hs.order_parameter}
    found = {
        "track": TRACKED,
        "overview": hs.overview(recording, beta=1.0),
        "paired": hs.paired_difference(hs.track(recording, **order), hs.track(other, **order)),
        "loss": hs.next_token_loss(recording),
        "lens": hs.logit_lens_kl(recording),
        "logits": hs.token_logits(recording, [" She"]),
        "cloud": hs.observe.cloud_statistics(recording, gap=2),
        "shares": hs.close_pair_shares(recording),
        "histogram": hs.observe.inner_product_histogram(recording),
        "edits": hs.observe.loss_under_edits(recording, {"no MLP": hs.intervene.Ablate([3])}),
        "damage": hs.observe.damage_under_edits(recording, {"no MLP": hs.intervene.Ablate([3])}),
        "heads": hs.observe.head_ablation_loss(recording, layers=0),
        "sinks": hs.observe.attention_sinks(recording),
        "constancy": hs.observe.sink_constancy(recording),
        "metric": hs.observe.query_key_metric(recording),
        "arc": hs.observe.arc_length(recording),
        "flow times": hs.observe.matched_flow_times(recording, recording),
        "decoding": hs.observe.token_decoding_accuracy(recording, recording),
        "arms": hs.observe.attention_mlp_factorial(recording, arms=[hs.intervene.Arm()], gap=2),
        "history": hs.models.training_history("A"),
        "half time": hs.observe.half_time(
            hs.phase_diagram(hs.SA, betas=[1], times=[0, 4, 9], start=hs.Uniform(4, 8), samples=3)
        ),
        **hs.measure(recording, only=["arc_length", "depth_steps", "effective_beta", "transport_ratio", "mlp_weights"]),
        **hs.measure(recording, hs.observe.KernelStatistics(), hs.observe.AttentionDrift()),
    }
    assert {name for name, each in found.items() if not isinstance(each, Measurement)} == set()
    folder = hs.store.RunFolder.new(tmp_path, "lens")
    folder.write_results("lens", found["lens"])
    assert folder.read_results("lens").equals(found["lens"])


def test_several_are_a_dict_with_a_short_display() -> None:
    assert isinstance(MEASURED, dict)
    assert repr(MEASURED) == "<Measurements: 2 of SA(beta=1) over 4 systems: kernel_statistics, depth_steps>"
    page = MEASURED._repr_html_()
    assert "kernel_statistics" in page
    assert "update_cosine" in page
    assert "_null" not in page
    assert [panel.get_title(loc="left")[:6] for panel in MEASURED.plot().axes[:1]] == ["kernel"]
    assert type(pickle.loads(pickle.dumps(MEASURED))) is Measurements
    assert type(RUN.replay(hs.observe.KernelStatistics())) is Measurements
    assert repr(Measurements({"<b>": TRACKED})) == "<Measurements: 1 of SA(beta=1) over 4 systems: <b>>"
    assert "<b>" not in Measurements({"<b>": TRACKED})._repr_html_()
    reduced = Measurements({name: hs.reduce_replicates(each) for name, each in MEASURED.items()})
    assert repr(reduced) == "<Measurements: 2 of SA(beta=1): kernel_statistics, depth_steps>"


def test_all_of_a_model_are_one_line() -> None:
    recording = hs.record("A", ["Once upon a time there was a cat", "The dog ran home to eat"])
    whole = Measurements({"order": hs.track(recording, order=hs.order_parameter)})
    assert repr(whole) == "<Measurements: 1 of A (gpt2) over 2 prompts: order>"
    measured = hs.measure(recording, only=["arc_length", "depth_steps"])
    assert repr(measured) == "<Measurements: 2 of A (gpt2) over 2 prompts: arc_length, depth_steps>"
