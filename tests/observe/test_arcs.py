"""Arc lengths against closed forms and loops, and the times of a flow with the same arc length."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.models.record import record
from helmscope.observe import arc_length, matched_flow_times
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError, Trajectory
from support.model_families import inputs_of, tiny_model

F64 = torch.float64


def turning(angles):
    """Tokens on the circle at the given angles, (time, system, token)."""
    angles = torch.as_tensor(angles, dtype=F64)
    return Trajectory(torch.arange(len(angles), dtype=F64), torch.stack([angles.cos(), angles.sin()], -1))


def test_arc_length_of_known_angles():
    # the second token moves by 0.1 and back by 0.3, the third by 0.2 and 0.2
    path = turning([[[0.0, 0.0, 1.0]], [[2.0, 0.1, 1.2]], [[2.0, -0.2, 1.4]]])
    assert arc_length(path).arc_length.values.ravel() == pytest.approx([0, 0.15, 0.4], abs=1e-14)
    with_first = arc_length(path, include_first_token=True).arc_length.values.ravel()
    assert with_first == pytest.approx([0, 2.3 / 3, 2.3 / 3 + 0.5 / 3], abs=1e-14)


def test_arc_length_of_a_recording_agrees_with_loops():
    recording = record(tiny_model("bert"), inputs_of("bert", batch=2))
    found = arc_length(recording).arc_length
    states = recording.on_sphere.states.double()
    total = 0.0
    for depth in range(1, len(states)):
        angles = []
        for token in range(1, states.shape[2]):
            x, y = (states[k, 1, token] / states[k, 1, token].norm() for k in (depth - 1, depth))
            angles.append(math.acos(min(1.0, float(x @ y))))
        total += sum(angles) / len(angles)
        assert float(found[depth, 1]) == pytest.approx(total, abs=1e-6)
    assert found.dims == ("depth", "prompt")


def test_tokens_of_weight_zero_do_not_move_the_arc():
    path = turning([[[0.0, 0.0, 1.0]], [[2.0, 0.1, 3.0]]])
    weighted = Trajectory(path.times, path.states, torch.tensor([[[1.0, 2.0, 0.0]]], dtype=F64))
    assert arc_length(weighted).arc_length.values.ravel() == pytest.approx([0, 0.1], abs=1e-14)


def test_a_flow_gives_back_its_own_times():
    start = retract(torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=F64))
    fine = integrate(SA(beta=2.0), start, times=np.linspace(0, 3, 61).tolist())
    coarse = Trajectory(fine.times[::10], fine.states[::10])
    found = matched_flow_times(coarse, fine)
    # chords of the coarse polygon are shorter, by a term of second order in its step
    assert np.abs(found.flow_time.values - coarse.times.numpy()[:, None]).max() < 5e-3
    assert (found.reached == 1).all()


def test_speed_does_not_matter_and_what_is_not_reached_is_nan():
    path = turning([[[0.0, 0.0]], [[0.0, 0.2]], [[0.0, 0.5]], [[0.0, 1.1]]])
    flow = turning([[[0.0, 0.1 * k]] for k in range(9)] + [[[0.0, 0.8]]])  # at rest at the end
    found = matched_flow_times(path, flow)
    assert found.flow_time.values.ravel()[:3] == pytest.approx([0, 2, 5], abs=1e-12)
    assert np.isnan(found.flow_time.values[3, 0])
    assert found.reached.values.ravel().tolist() == [1, 1, 1, 0]
    at_rest = turning([[[0.0, 0.0]], [[0.0, 0.8]]])
    assert float(matched_flow_times(at_rest, flow).flow_time[1, 0]) == pytest.approx(8, abs=1e-12)


def test_bad_arguments():
    path = turning([[[0.0, 0.0]], [[0.0, 0.2]]])
    with pytest.raises(HelmscopeError, match="flow has states"):
        matched_flow_times(path, turning([[[0.0, 0.0, 1.0]]]))
    with pytest.raises(HelmscopeError, match=r"flow starts up to 0\.1 radians"):
        matched_flow_times(path, turning([[[0.0, 0.1]]]))
    with pytest.raises(HelmscopeError, match="system is a str"):
        arc_length("A")
