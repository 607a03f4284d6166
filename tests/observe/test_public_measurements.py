"""Whatever measures a system or a cloud takes ``progress=``, reports to it, and says what its variables are."""

from __future__ import annotations

import inspect
import io
import sys
import warnings
from types import FunctionType

import numpy as np
import pytest
import torch
import xarray as xr

import helmscope as hs
from helmscope.observe.measure import standalone_measurements, streaming_instruments
from helmscope.runs import bar
from support.model_families import inputs_of, tiny_model

SYSTEMS = ("System", "Recording", "HasLogits")
# what answers a question about a system, or takes it apart, at no cost
FREE = {"head_matrices", "query_key_edits", "unsupported_measurements"}


def public_functions() -> dict[str, FunctionType]:
    """The functions of the rooms whose work can be long, by name."""
    rooms = (hs, hs.observe, hs.transport, hs.meanfield, hs.fields)
    named = [(name, getattr(room, name)) for room in rooms for name in dir(room)]
    return {name: thing for name, thing in named if isinstance(thing, FunctionType)}


PUBLIC = public_functions()
OF_SYSTEMS = [
    name
    for name, function in PUBLIC.items()
    for first in list(inspect.signature(function).parameters.values())[:1]
    if first.name != "x" and any(kind in str(first.annotation) for kind in SYSTEMS) and name not in FREE
]

MODEL = tiny_model("gpt2")
RECORDING = hs.record(MODEL, inputs_of("gpt2", batch=12), batch_size=4)
CUT = {"cut": hs.intervene.Ablate([1])}
CONTEXTS = np.tile(inputs_of("gpt2", batch=1).numpy(), (16, 1))
CONTEXTS[:, :6] = inputs_of("gpt2", batch=16, seed=2).numpy()[:, :6]
CLOUD = hs.Uniform(n=40, dim=6).sample(3, seed=0)
POINTS = CLOUD[0]
MLP = hs.MLP(w_in=torch.eye(6), w_out=torch.eye(6).roll(1, 0))

SMALL = {  # the arguments of those that need some, or would take long
    "attention_mlp_factorial": {"gap": 1},
    "context_groups": {"contexts": CONTEXTS, "groups": 2},
    "context_noise": {"contexts": CONTEXTS, "groups": 2},
    "damage_under_edits": {"edits": CUT},
    "head_interaction": {"pairs": 2},
    "loss_gradient": {"layer": 1},
    "loss_under_edits": {"edits": CUT},
    "matched_flow_times": {"flow": RECORDING},
    "measure": {"only": ["arc_length", "kernel_statistics"]},
    "mobility_test": {"sampled_tokens": 2},
    "noise_table_as_printed": {"draws": 2},
    "overview": {"beta": 1.0},
    "query_key_noise": {"draws": 1},
    "query_key_noise_by_layer": {"draws": 1},
    "sink_damage": {"threshold": 0.1},
    "token_decoding_accuracy": {"test": RECORDING},
    "token_logits": {"tokens": [3]},
    "track": {"order": hs.order_parameter},
}
CLOUDS = {  # the functions of clouds and densities that may take more than two seconds
    "cluster_count": lambda progress: hs.cluster_count(CLOUD, max_angle=0.3, progress=progress),
    "dimension_by_scale": lambda progress: hs.observe.dimension_by_scale(POINTS, neighbors=[1, 2], progress=progress),
    "dimension_by_size": lambda progress: hs.observe.dimension_by_size(POINTS, halvings=1, progress=progress),
    "exact_plan": lambda progress: hs.transport.exact_plan(CLOUD[0], CLOUD[1], progress=progress),
    "fit_gradient": lambda progress: hs.fields.fit_gradient(MLP, POINTS, progress=progress),
    "gaussian_energy_as_printed": lambda progress: hs.observe.gaussian_energy_as_printed(
        CLOUD, beta=1.0, progress=progress
    ),
    "gaussian_entropy": lambda progress: hs.observe.gaussian_entropy(CLOUD, progress=progress),
    "gaussian_fisher_information": lambda progress: hs.observe.gaussian_fisher_information(CLOUD, progress=progress),
    "gradient_residual_share": lambda progress: hs.fields.gradient_residual_share(MLP, POINTS, progress=progress),
    "gride": lambda progress: hs.observe.gride(POINTS, progress=progress),
    "interaction_energy_rate": lambda progress: hs.observe.interaction_energy_rate(
        CLOUD, hs.SA(beta=1.0), progress=progress
    ),
    "matrix_entropy": lambda progress: hs.observe.matrix_entropy(CLOUD, progress=progress),
    "neighbor_entropy": lambda progress: hs.observe.neighbor_entropy(CLOUD, progress=progress),
    "stationary_density": lambda progress: hs.meanfield.stationary_density(
        hs.SA(beta=4.0), hs.meanfield.CircleGrid(degree=16), hs.noise.IsotropicNoise(0.3), progress=progress
    ),
    "two_nn": lambda progress: hs.two_nn(POINTS, progress=progress),
    "two_nn_fit": lambda progress: hs.observe.two_nn_fit(POINTS, progress=progress),
    "two_nn_mle": lambda progress: hs.observe.two_nn_mle(POINTS, progress=progress),
}


def call(name: str, progress: object) -> object:
    """The measurement of a name, of the tiny model."""
    if name in CLOUDS:
        return CLOUDS[name](progress)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of texts that are too short for some statistics
        return PUBLIC[name](RECORDING, **SMALL.get(name, {}), progress=progress)


ALL = [*OF_SYSTEMS, *CLOUDS]


def test_the_lists_are_complete() -> None:
    """Every measurement of ``measure`` is a public function that is called here, and none is called by a stale name."""
    measurements = {each.name for each in (*streaming_instruments(), *standalone_measurements())}
    assert measurements <= set(OF_SYSTEMS)
    assert set(SMALL) <= set(OF_SYSTEMS)
    assert set(PUBLIC) >= FREE
    assert len(OF_SYSTEMS) > 50


@pytest.mark.parametrize("name", ALL)
def test_shares_rise_to_one(name: str) -> None:
    shares: list[float] = []
    call(name, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert min(shares) > 0.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", ALL)
def test_a_bar_is_drawn_unless_progress_is_false(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every call were a long one."""
    monkeypatch.setattr(bar, "PATIENCE_S", 0.0)
    for progress, lines in ((None, 1), (False, 0)):
        monkeypatch.setattr(sys, "stderr", Terminal())
        call(name, progress)
        assert sys.stderr.getvalue().count("\n") == lines


@pytest.mark.parametrize("name", OF_SYSTEMS)
def test_every_variable_has_a_long_name(name: str) -> None:
    """A picture shows it as its title. NAME_null is drawn with NAME."""
    measured = call(name, False)
    if isinstance(measured, xr.Dataset) and name != "track":  # whose variables are named by the user
        variables = [name for name in map(str, measured.data_vars) if not name.endswith("_null")]
        assert variables
        assert [each for each in variables if measured[each].attrs.get("long_name", each) == each] == []


def test_what_is_reported_in_parts_is_what_is_computed_at_once() -> None:
    """The clouds of a batch are independent: their values are bitwise those of each alone."""
    functions = {
        "cluster_count": lambda x: hs.cluster_count(x, max_angle=0.5),
        "gaussian_energy_as_printed": lambda x: hs.observe.gaussian_energy_as_printed(x, beta=1.0),
        "gaussian_entropy": hs.observe.gaussian_entropy,
        "gaussian_fisher_information": hs.observe.gaussian_fisher_information,
        "matrix_entropy": hs.observe.matrix_entropy,
    }
    clouds = hs.Uniform(n=12, dim=4).sample(70, seed=1)
    for function in functions.values():
        alone = torch.stack([function(cloud) for cloud in clouds])
        assert torch.equal(function(clouds.reshape(7, 10, 12, 4)).flatten(), alone)
        assert function(clouds[:0]).shape == (0,)


def test_observables_of_a_recording_report_progress_too() -> None:
    shares: list[float] = []
    values = hs.observe.matrix_entropy(RECORDING, progress=shares.append)
    assert tuple(values.shape) == (7, 12)
    assert shares[-1] == 1.0
