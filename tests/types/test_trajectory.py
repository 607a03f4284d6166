"""Trajectories and outcomes: shapes that fit, and sentences that name the remedy."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

import helmscope as hs
from support.refusal import refused

STATES = torch.eye(3).expand(2, 4, 3, 3)  # time, batch, token, dim
TIMES = torch.tensor([0.0, 1.0])


def test_outcome_names_the_first_failure_and_its_remedy():
    done, limit, small, lost = (
        hs.types.Status.FINISHED,
        hs.types.Status.STEP_LIMIT,
        hs.types.Status.STEP_TOO_SMALL,
        hs.types.Status.NOT_FINITE,
    )
    good = hs.types.Outcome((done, done), (10.0, 10.0))
    assert good.ok
    assert str(good) == "finished at t=10"
    bad = hs.types.Outcome((done, small, lost, limit), (10.0, 0.123456789, 2.0, 3.0))
    assert not bad.ok
    assert str(bad) == (
        "system 1 (of 0 to 3): step size fell below rounding at t=0.123457: use float64, loosen tol, lower beta or "
        "pass merge= (and 2 more systems)"
    )
    assert "max_steps" in str(hs.types.Outcome((limit,), (1.0,)))
    assert str(hs.types.Outcome((lost,), (2.0,))) == ("velocity is not finite at t=2: lower beta or use float64")
    assert [status for status in hs.types.Status if status.ok] == [done, hs.types.Status.AT_REST]
    assert all("{time" in status.value for status in hs.types.Status)


def test_one_more_failed_system_is_not_many():
    text = str(hs.types.Outcome((hs.types.Status.NOT_FINITE,) * 2, (1.0, 1.0)))
    assert "1 more system)" in text


def test_no_systems_is_an_outcome():
    assert hs.types.Outcome((), ()).ok
    assert str(hs.types.Outcome((), ())) == "no systems"


def test_trajectory_takes_everything_that_fits():
    whole = hs.Trajectory(
        TIMES,
        STATES,
        weights=torch.ones(1, 4, 3),
        radius=torch.ones(2, 4, 3),
        tokens=[["a", "b", "c"]] * 4,
        outcome=hs.types.Outcome((), ()),
    )
    assert whole.states is STATES
    with pytest.raises(FrozenInstanceError):
        whole.states = STATES


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"states": torch.eye(3)}, "states has shape (3, 3), but it must be (time, batch, token, dim)"),
        ({"times": torch.zeros(3)}, "times has shape (3,), but to match states it must be (2,)"),
        ({"times": torch.zeros(2, 1)}, "times has shape (2, 1)"),
        ({"weights": torch.ones(4, 3)}, "weights has shape (4, 3), but to match states it must be (2, 4, 3)"),
        ({"weights": torch.ones(1, 3, 4)}, "weights has shape (1, 3, 4), but to match states it must be (1, 4, 3)"),
        ({"weights": -torch.ones(1, 4, 3)}, "weights holds a number below 0"),
        ({"radius": torch.ones(4, 3)}, "radius has shape (4, 3), but to match states it must be (2, 4, 3)"),
        ({"tokens": [["a", "b", "c"]] * 3}, "tokens must hold 3 labels for each of 4 systems"),
        ({"tokens": [["a", "b"]] * 4}, "tokens must hold 3 labels for each of 4 systems"),
        ({"times": None}, "times is None"),
        ({"times": [0.0, 1.0]}, "times is"),
        ({"states": STATES.tolist()}, "states is"),
    ],
)
def test_trajectory_refuses(given, said):
    refused(lambda: hs.Trajectory(**{"times": TIMES, "states": STATES, **given}), said)


def test_a_simulation_is_a_system_and_a_trajectory_is_not():
    simulation = hs.integrate(hs.SA(1.0), torch.eye(2, dtype=torch.float64), [1.0])
    assert isinstance(simulation, hs.types.System)
    assert (simulation.axis, simulation.layer_axis, simulation.replicate) == ("time", "time", "system")
    assert not isinstance(simulation.trajectory, hs.types.System)
    assert not isinstance(simulation, hs.Instrument)


def test_an_end_that_was_asked_for_is_not_ok_and_not_a_failure():
    done, stopped, limit = hs.types.Status.FINISHED, hs.types.Status.STOPPED, hs.types.Status.STEP_LIMIT
    ended = hs.types.Outcome((done, stopped, stopped), (9.0, 2.5, 3.0))
    assert not ended.ok
    assert not ended.failed
    assert str(ended) == (
        "system 1 (of 0 to 2): ended by a terminal event at t=2.5, later states are NaN: leave out terminal=True to "
        "go on (and 1 more system)"
    )
    broken = hs.types.Outcome((stopped, limit), (2.5, 3.0))
    assert broken.failed
    assert str(broken).startswith("system 1 (of 0 to 1): step limit reached at t=3")


def test_the_replicates_have_a_known_name():
    states = torch.eye(3).expand(1, 2, 3, 3)
    assert hs.Trajectory(torch.zeros(1), states).replicate == "system"
    with pytest.raises(hs.HelmscopeError, match=r"replicate of a trajectory 'promt': did you mean 'prompt'\?"):
        hs.Trajectory(torch.zeros(1), states, replicate="promt")
