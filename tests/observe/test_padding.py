"""No measurement reads the states of padding, which are zero vectors in a recording."""

import warnings

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.models.recorder import ResidualStream
from helmscope.observe.measure import measurement_names, unsupported_measurements
from support.model_families import tiny_model

IDS = torch.randint(3, 96, (12, 14), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([14, 9, 12, 6, 14, 10, 13, 14, 8, 14, 11, 14])
MASK = (torch.arange(14) < LENGTHS[:, None]).long()
OTHERS = {
    "overview": lambda run: hs.overview(run, beta=1.0),
    "cloud_statistics": lambda run: hs.observe.cloud_statistics(run, gap=2),
    "token_dimension": lambda run: hs.observe.token_dimension(run, neighbors=(1,)),
    "token_decoding": lambda run: hs.observe.token_decoding_accuracy(run, run),
    "logit_lens": hs.logit_lens_kl,
    "histogram": hs.observe.inner_product_histogram,
    "attention_sinks": hs.observe.attention_sinks,
    "ablation": lambda run: hs.observe.layer_ablation_damage(run, layers=[1]),
    "flow_times": lambda run: hs.observe.matched_flow_times(run, run),
}


@pytest.fixture(scope="module", params=["gpt2", "bert"])
def recordings(request):
    """The same model on the same texts, with the states of padding and with zero vectors instead."""
    model, inputs = tiny_model(request.param), {"input_ids": IDS * MASK, "attention_mask": MASK}
    zero = hs.record(model, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResidualStream, "hide", lambda self, visible: None)
        plain = hs.record(model, inputs)
    assert (plain.trajectory.states[:, MASK == 0].norm(dim=-1) > 0.5).all()
    assert (zero.trajectory.states[:, MASK == 0] == 0).all()
    return plain, zero


def value_of(measure, run):
    """The measurement, or the sentence with which it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return measure(run)
        except hs.HelmscopeError as error:
            return str(error)


@pytest.mark.parametrize("name", [*measurement_names(), *OTHERS])
def test_it_reads_no_padding(recordings, name):
    measure = OTHERS.get(name, lambda run: hs.measure(run, only=[name], quick=True)[name])
    plain, zero = (value_of(measure, run) for run in recordings)
    if isinstance(plain, str):
        assert zero == plain
        return
    assert set(zero.data_vars) == set(plain.data_vars)
    for variable in plain.data_vars:
        np.testing.assert_array_equal(zero[variable].values, plain[variable].values, err_msg=str(variable))


def test_most_of_them_are_taken(recordings):
    refused = {name for name, reason in unsupported_measurements(recordings[1]).items() if reason is not None}
    assert len(set(measurement_names()) - refused) >= 12
