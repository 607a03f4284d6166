"""Systems say where their states are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import helmscope as hs
from helmscope.types import HasTrajectory
from support.model_families import inputs_of, tiny_model

SYSTEMS = {
    "Recording": hs.record(tiny_model("gpt2"), inputs_of("gpt2")),
    "Simulation": hs.integrate(hs.SA(beta=1.0), torch.eye(3), times=[0.0, 1.0]),
}


@pytest.mark.parametrize("kind", SYSTEMS)
def test_what_only_the_trajectory_has_is_found_there(kind: str) -> None:
    system, known = SYSTEMS[kind], {"Recording": ["states", "times", "outcome"], "Simulation": []}[kind]
    for name in (*known, "weights", "radius", "tokens"):
        with pytest.raises(AttributeError, match=f"a {kind} has no attribute '{name}', .* use .trajectory.{name}"):
            getattr(system, name)
        assert not hasattr(system, name)
        getattr(system.trajectory, name)


def test_the_states_of_a_recording_come_with_a_word_about_padding() -> None:
    with pytest.raises(AttributeError, match="take the whole system, and leave out its padding"):
        _ = SYSTEMS["Recording"].states


@pytest.mark.parametrize("kind", SYSTEMS)
def test_other_unknown_attributes_are_refused_as_ever(kind: str) -> None:
    with pytest.raises(AttributeError, match=f"'{kind}' object has no attribute 'stats'"):
        _ = SYSTEMS[kind].stats  # type: ignore[attr-defined]


def test_an_error_within_a_property_is_not_hidden() -> None:
    class Broken(HasTrajectory):
        @property
        def radius(self) -> float:
            return float(torch.ones(()).missing)  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'missing'"):
        _ = Broken().radius


def test_copies_are_made_as_ever() -> None:
    run = SYSTEMS["Simulation"]
    for again in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert torch.equal(again.states, run.states)
