"""The repr of an object is one line of at most 200 characters, and prints no tensor."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.types.display import LONGEST_LINE
from support.model_families import inputs_of, tiny_model

SOURCE = Path(hs.__file__).parent
PLAIN = {"bool", "int", "float", "str", "None", "Path", "Head"}
RECORDING = hs.record(tiny_model("gpt2"), inputs_of("gpt2"))
RUN = hs.integrate(hs.SA(beta=2.0), hs.Uniform(n=40, dim=6).sample(3, seed=0), times=[0.0, 1.0])
CLOUD = RUN.states[0]
GRID = hs.meanfield.CircleGrid(degree=8)
SYMMETRIC = torch.eye(6, dtype=torch.float64)


def public_classes() -> dict[str, type]:
    """All classes that packages export, by name."""
    rooms = [hs, *(getattr(hs, name) for name in dir(hs) if inspect.ismodule(getattr(hs, name)))]
    named = ((name, getattr(room, name)) for room in rooms for name in dir(room))
    return {name: thing for name, thing in named if isinstance(thing, type)}


def has_generated_repr(kind: type) -> bool:
    """Whether the decorator dataclass wrote the repr, which prints all fields in full."""
    own = kind.__repr__
    return dataclasses.is_dataclass(kind) and (
        not isinstance(own, FunctionType) or SOURCE not in Path(own.__code__.co_filename).parents
    )


def long_fields(kind: Any) -> list[str]:
    """The fields of a dataclass whose values may be long: anything but numbers, short texts and such objects."""
    known = {*PLAIN, *(name for name, thing in public_classes().items() if name != "Tensor")}
    fields = [field for field in dataclasses.fields(kind) if field.repr]
    return [field.name for field in fields if not {part.strip() for part in str(field.type).split("|")} <= known]


@pytest.mark.parametrize("name", public_classes())
def test_a_generated_repr_prints_short_values_only(name: str) -> None:
    kind = public_classes()[name]
    assert not has_generated_repr(kind) or long_fields(kind) == []


def test_a_long_generated_repr_is_seen() -> None:
    @dataclasses.dataclass
    class Holder:
        size: int
        values: torch.Tensor

    @dataclasses.dataclass
    class Concise(hs.fields.Field):
        values: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(2))

    assert has_generated_repr(Holder)
    assert long_fields(Holder) == ["values"]
    assert not has_generated_repr(Concise)
    assert sum(map(has_generated_repr, public_classes().values())) > 10


OBJECTS = {
    "VMFMixture": lambda: hs.observe.vmf_mixture(CLOUD, max_components=2),
    "JacobianSpectrum": lambda: hs.observe.jacobian_spectrum(hs.SA(2.0), CLOUD),
    "Entry": lambda: hs.claims.read_catalogue()["tokens-cluster"],
    "Source": lambda: hs.claims.sources()["perspective"],
    "Manifest": lambda: RECORDING.manifest(),
    "Diagnosis": lambda: hs.models.diagnose(tiny_model("gpt2"), text_count=2, text_length=8),
    "MergeTree": lambda: hs.observe.merge_tree(CLOUD),
    "NearestNeighbors": lambda: hs.observe.NearestNeighbors.of(CLOUD[0], 3),
    "PooledClouds": lambda: hs.observe.PooledClouds.of(RECORDING.trajectory),
    "ProbeBank": lambda: hs.observe.ProbeBank.of(RECORDING),
    "HeadMatrices": lambda: hs.observe.head_matrices(RECORDING)[0],
    "StandaloneMeasurement": lambda: hs.observe.standalone_measurements()[3],
    "BrenierPotential": lambda: hs.transport.brenier_potential(CLOUD[0], CLOUD[1]),
    "Plan": lambda: hs.transport.exact_plan(CLOUD[0], CLOUD[1]),
    "HelmholtzSplit": lambda: hs.helmholtz(RECORDING.force(layer=0)),
    "FittedGradient": lambda: hs.fields.fit_gradient(hs.MLP(w_in=torch.eye(6), w_out=torch.eye(6)), CLOUD[0].float()),
    "Density": lambda: hs.meanfield.Density.uniform(GRID),
    "DensityPath": lambda: hs.meanfield.evolve(hs.SA(1.0), hs.meanfield.Density.uniform(GRID), times=[0.0, 0.1]),
    "StationaryDensity": lambda: hs.meanfield.stationary_density(hs.SA(1.0), GRID, hs.noise.IsotropicNoise(0.5)),
    "Gaussian": lambda: hs.meanfield.Gaussian(SYMMETRIC[0], SYMMETRIC),
    "Whitening": lambda: hs.meanfield.whiten(SYMMETRIC, SYMMETRIC),
    "Replicates": lambda: hs.claims.Replicates(np.random.default_rng(0).normal(size=500)),
    "Finding": lambda: hs.claims.Finding(evidence=hs.claims.Count(3, 5)),
    "Verdict": lambda: hs.run_trial("kuramoto", quick=True).verdict,
    "Trial": lambda: hs.run_trial("kuramoto", quick=True),
    "Provenance": lambda: hs.run_trial("kuramoto", quick=True).verdict.provenance,
    "Recording": lambda: RECORDING,
    "Simulation": lambda: RUN,
    "Trajectory": lambda: RECORDING.trajectory,
    "Certificate": lambda: RECORDING.certificate,
    "ModelOrigin": lambda: RECORDING.origin,
    "Estimate": lambda: hs.jobs.estimate(hs.jobs.SimulationSpec(n=4, batch=2, times=[0, 0.1])),
    "MeasurementSpec": lambda: hs.jobs.MeasurementSpec(),
    "Measurements": lambda: hs.measure(RUN, hs.observe.KernelStatistics()),
    "Arm": lambda: hs.intervene.only_one_mlp(RECORDING.layers)[0],
    "Ablate": lambda: hs.intervene.Ablate([0, 1, 2]),
    "Subject": lambda: hs.Subject("A"),
    "Unit": lambda: hs.runs.Unit("chunk-0", max, {"values": list(range(1000))}),
    "Interval": lambda: hs.two_nn(CLOUD[0]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_live_object_has_a_repr_of_one_short_line(name: str) -> None:
    shown = repr(OBJECTS[name]())
    assert "\n" not in shown
    assert len(shown) <= LONGEST_LINE
    assert "tensor(" not in shown
    assert "array(" not in shown
    assert name.removeprefix("Stationary") in shown or name in shown
