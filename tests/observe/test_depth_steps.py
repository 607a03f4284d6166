"""Steps over depth against closed forms, and against loops with the exponential map and parallel transport."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.geometry.sphere import exp, log, parallel_transport, project, retract
from helmscope.models.record import record
from helmscope.observe import arc_length, depth_steps
from helmscope.observe.depth_steps import token_median
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError, Trajectory
from support.model_families import inputs_of, tiny_model

F64 = torch.float64


def random_path(steps=5, systems=2, tokens=4, dim=6, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    states = retract(torch.randn(steps, systems, tokens, dim, generator=generator, dtype=F64))
    return Trajectory(torch.arange(steps, dtype=F64), states, **options)


def circle(angles):
    """A single token on the circle at the given angles."""
    angles = torch.as_tensor(angles, dtype=F64).reshape(-1, 1, 1)
    return Trajectory(torch.arange(len(angles), dtype=F64), torch.stack([angles.cos(), angles.sin()], -1))


def oracle(path, tokens):
    """All values by loops over prompts, depths and tokens, with log and parallel transport."""
    steps, systems = path.states.shape[:2]
    names = ("angle", "median_angle", "net_angle", "update_cosine", "ambient_cosine")
    found = {name: np.full((steps, systems), np.nan) for name in names}
    for k in range(steps):
        for b in range(systems):
            x = path.states[:, b]
            found["net_angle"][k, b] = np.mean([math.acos(float(x[0, i] @ x[k, i])) if k else 0.0 for i in tokens])
            if k > 0:
                moved = [math.acos(float(x[k - 1, i] @ x[k, i])) for i in tokens]
                found["angle"][k, b], found["median_angle"][k, b] = np.mean(moved), np.median(moved)
            if k > 1:
                cosines = []
                for i in tokens:
                    first = parallel_transport(x[k - 2, i], x[k - 1, i], log(x[k - 2, i], x[k - 1, i]))
                    second = log(x[k - 1, i], x[k, i])
                    cosines.append(float(first @ second / (first.norm() * second.norm())))
                found["update_cosine"][k, b] = np.mean(cosines)
                chords = [(x[k - 1, i] - x[k - 2, i], x[k, i] - x[k - 1, i]) for i in tokens]
                found["ambient_cosine"][k, b] = np.mean([float(p @ q / (p.norm() * q.norm())) for p, q in chords])
    return found


def test_all_values_agree_with_loops():
    path = random_path()
    for include_first_token, tokens in ((False, (1, 2, 3)), (True, (0, 1, 2, 3))):
        measured = depth_steps(path, include_first_token=include_first_token)
        for name, values in oracle(path, tokens).items():
            assert measured[name].values == pytest.approx(values, abs=1e-12, nan_ok=True), name


def test_steps_of_a_circle_and_of_a_zigzag():
    h = 0.3
    on = depth_steps(circle([0, h, 2 * h, 3 * h]), include_first_token=True)
    assert on.update_cosine.values[2:].ravel() == pytest.approx([1, 1], abs=1e-14)
    assert on.ambient_cosine.values[2:].ravel() == pytest.approx([math.cos(h)] * 2, abs=1e-14)
    assert on.arc_length.values.ravel() == pytest.approx([0, h, 2 * h, 3 * h], abs=1e-14)
    back = depth_steps(circle([0, h, 0, h]), include_first_token=True)
    assert back.update_cosine.values[2:].ravel() == pytest.approx([-1, -1], abs=1e-14)
    assert back.net_angle.values.ravel() == pytest.approx([0, h, 0, h], abs=1e-14)


def test_a_right_turn_of_two_geodesics():
    x = torch.tensor([1.0, 0, 0], dtype=F64)
    u = torch.tensor([0, 0.5, 0], dtype=F64)
    y = exp(x, u)
    z = exp(y, torch.tensor([0, 0, 0.2], dtype=F64))
    steps = depth_steps(
        Trajectory(torch.arange(3.0), torch.stack([x, y, z]).reshape(3, 1, 1, 3)), include_first_token=True
    )
    assert float(steps.update_cosine[2, 0]) == pytest.approx(0, abs=1e-14)
    assert steps.angle.values.ravel()[1:] == pytest.approx([0.5, 0.2], abs=1e-14)


def test_radius_and_its_growth():
    radius = torch.tensor([1.0, 2.0, 1.0], dtype=F64).reshape(3, 1, 1).expand(3, 2, 4)
    steps = depth_steps(random_path(3, radius=radius))
    assert steps.radius.values[:, 0] == pytest.approx([1, 2, 1])
    assert steps.radius_growth.values[:, 0] == pytest.approx([np.nan, math.log(2), -math.log(2)], nan_ok=True)
    assert "radius" not in depth_steps(random_path())


def test_tokens_of_weight_zero_do_not_count_and_weights_do():
    path = random_path()
    weights = torch.tensor([[[1.0, 1, 1, 0]]], dtype=F64).expand(1, 2, 4)
    spoiled = path.states.clone()
    spoiled[:, :, 3] = torch.nan
    measured = depth_steps(Trajectory(path.times, spoiled, weights))
    for name, values in oracle(path, (1, 2)).items():
        assert measured[name].values == pytest.approx(values, abs=1e-12, nan_ok=True), name
    twice = torch.cat([path.states, path.states[:, :, 3:]], 2)
    weighted = Trajectory(path.times, path.states, torch.tensor([[[1.0, 1, 1, 2]]], dtype=F64).expand(1, 2, 4))
    repeated = depth_steps(Trajectory(path.times, twice))
    for name, values in depth_steps(weighted).items():
        assert values.values == pytest.approx(repeated[name].values, abs=1e-12, nan_ok=True), name


def test_weighted_median():
    generator = torch.Generator().manual_seed(3)
    for n in (1, 4, 7):
        value = torch.rand(n, generator=generator, dtype=F64)
        assert float(token_median(value, torch.ones(n, dtype=F64))) == pytest.approx(float(np.median(value)))
    assert torch.isnan(token_median(torch.ones(2), torch.zeros(2)))


def test_tokens_at_rest_and_identical_tokens_have_no_cosine():
    still = Trajectory(torch.arange(3.0), torch.eye(3, dtype=F64).expand(3, 2, 3, 3))
    steps = depth_steps(still)
    assert (steps.angle.values[1:] == 0).all()
    assert np.isnan(steps.update_cosine.values).all()
    assert np.isnan(steps.ambient_cosine.values).all()
    x = random_path(3, systems=1, tokens=1).states  # a cluster: every token is the same
    merged = depth_steps(Trajectory(torch.arange(3.0), x.expand(3, 1, 4, 6)))
    alone = depth_steps(Trajectory(torch.arange(3.0), x), include_first_token=True)
    assert float(merged.update_cosine[2, 0]) == pytest.approx(float(alone.update_cosine[2, 0]), abs=1e-14)


def test_one_moving_token_decides_the_cosine():
    states = circle([0, 0.1, 0.2]).states
    moving = torch.cat([states, states[:1].expand(3, 1, 1, 2)], 2)
    assert float(depth_steps(Trajectory(torch.arange(3.0), moving), include_first_token=True).update_cosine[2, 0]) == 1


def test_states_that_are_not_finite_are_named():
    path = random_path()
    path.states[2, 1, 3] = torch.nan
    with pytest.raises(HelmscopeError, match=r"states of system 1 .* at time 2, token 3"):
        depth_steps(path)


@pytest.mark.parametrize(("family", "halves"), [("gpt2", 2), ("bert", 2), ("t5-relu", 3)])
def test_recordings_name_their_halves(family, halves):
    recording = record(tiny_model(family), inputs_of(family, batch=2))
    measured = depth_steps(recording)
    names = ["attention", "mlp"] if halves == 2 else ["attention", "cross", "mlp"]
    count = len(recording.anatomy.layers)
    assert measured.half.values.tolist() == ["", *names * count]
    assert measured.arc_length.values == pytest.approx(arc_length(recording).arc_length.values, abs=1e-12)
    path = recording.on_sphere
    tokens = [i for i in range(path.states.shape[2]) if i > 0 and (path.weights is None or path.weights[0, 0, i] > 0)]
    whole = Trajectory(path.times, retract(path.states.double()))
    assert measured.angle.values[:, 0] == pytest.approx(oracle(whole, tokens)["angle"][:, 0], abs=1e-6, nan_ok=True)


def test_a_resumed_recording_keeps_the_names_of_its_halves():
    recording = record(tiny_model("gpt2"), inputs_of("gpt2", batch=2))
    later = recording.resume(depth=1, states=recording.trajectory.states[1])
    assert depth_steps(later).half.values.tolist()[:3] == ["", "mlp", "attention"]


def test_a_simulated_flow_moves_at_the_speed_of_its_field():
    start = random_path(1).states[0]
    field, h = SA(beta=2.0), 1e-3
    steps = depth_steps(integrate(field, start, times=[0.0, h, 2 * h]), include_first_token=True)
    speed = torch.linalg.vector_norm(project(start, field.velocity(start)), dim=-1).mean(-1)
    assert steps.angle.values[1] / h == pytest.approx(speed.numpy(), rel=1e-2)
    assert (steps.update_cosine.values[2] > 0.999).all()
    assert "half" not in steps.coords


def test_a_prompt_of_its_first_token_alone_has_no_length():
    """The first token is left out, and nothing is known of how far no token has moved."""
    rows = torch.tensor([[1, 2, 3], [4, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    recording = record(tiny_model("gpt2"), {"input_ids": rows, "attention_mask": mask})
    measured = depth_steps(recording)
    assert measured.arc_length[1:, 1].isnull().all()
    assert measured.arc_length[:, 0].notnull().all()
    assert float(measured.arc_length[0, 0]) == 0.0
