"""Events that end a system, and events evaluated only at the requested times: closed forms, SciPy and batches."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import helmscope as hs
from helmscope.solve.integrate import make_problem
from support import oracles

F64 = torch.float64


def circle(*angles: float) -> torch.Tensor:
    theta = torch.tensor(angles, dtype=F64)
    return torch.stack([theta.cos(), theta.sin()], -1)


# Events that end a system ---------------------------------------------------------------------------------------------

QUICK = hs.DormandPrince(tol=1e-6)
NOISE = hs.noise.IsotropicNoise(0.05)
ENDING = {
    "adaptive": {"stepper": QUICK},
    "fixed": {"stepper": hs.RK4(h=0.1)},
    "map": {"stepper": hs.Layer(h=0.5)},
    "noisy": {"stepper": hs.solve.EulerMaruyama(h=0.05), "noise": NOISE, "seed": 3},
    "merging": {"stepper": QUICK, "merge": 1e-2},
    "weighted": {"stepper": QUICK, "mask": torch.tensor([True, True, True, False])},
}


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.05), hs.solve.GeodesicRK4(h=0.05)])
def test_a_terminal_event_ends_a_system_at_the_closed_form(stepper):
    x0, times = hs.Orthonormal(n=4, dim=4).sample(seed=0), [0.0, 1.0, 2.0, 3.0, 6.0]
    expected = hs.hitting_time(hs.SA(beta=1.0), n=4, delta=0.03)
    assert 2 < expected < 3
    event = hs.solve.HittingTime(0.03, terminal=True)
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, events=[event], stepper=stepper)
    free = hs.integrate(hs.SA(beta=1.0), x0, times, events=[hs.solve.HittingTime(0.03)], stepper=stepper)
    assert sim.event_times[0].item() == pytest.approx(expected, rel=5e-9 if stepper is None else 1e-7)
    assert torch.equal(sim.event_times[0], free.event_times[0])
    assert torch.equal(sim.states[:3], free.states[:3])
    assert sim.states[3:].isnan().all()
    assert sim.outcome.statuses == (hs.types.Status.STOPPED,)
    assert sim.outcome.times == (sim.event_times[0].item(),)
    assert not sim.outcome.ok
    assert not sim.outcome.failed
    assert str(sim.outcome).startswith(f"ended by a terminal event at t={expected:.6g}")


def test_terminal_events_of_another_program():
    """SciPy, with an event of its own and a velocity in loops; measured 3e-9."""
    x0 = hs.Uniform(n=5, dim=3).sample(batch=4, seed=2)

    def velocity(_, flat):
        return np.array(oracles.sa_velocity(flat.reshape(5, 3).tolist(), beta=2.0)).ravel()

    def met(_, flat):
        x = flat.reshape(5, 3)
        return (x @ x.T).min() - 0.9

    met.terminal = True
    sim = hs.integrate(hs.SA(beta=2.0), x0, [4.0, 30.0], events=[hs.solve.HittingTime(0.1, terminal=True)])
    for found, start in zip(sim.event_times[0].tolist(), x0, strict=True):
        seen = solve_ivp(velocity, (0, 30), start.numpy().ravel(), rtol=1e-11, atol=1e-12, events=met)
        assert found == pytest.approx(seen.t_events[0][0], rel=0, abs=1e-8)


@pytest.mark.parametrize("name", ENDING)
def test_a_system_that_ends_is_the_same_alone_and_in_a_batch(name):
    x0, times = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0), torch.arange(13) * 0.5
    options = {"events": [hs.solve.HittingTime(0.4, terminal=True), hs.solve.ClusterMerge(0.6)], **ENDING[name]}
    whole = hs.integrate(hs.SA(beta=2.0), x0, times, **options)
    assert {hs.types.Status.STOPPED, hs.types.Status.FINISHED} == set(whole.outcome.statuses)
    for k in (0, 1, 4):
        alone = make_problem(hs.SA(beta=2.0), x0, times, **options).part(k, k + 1).run()
        assert torch.equal(alone.states[:, 0].nan_to_num(), whole.states[:, k].nan_to_num())
        assert alone.outcome.statuses == whole.outcome.statuses[k : k + 1]
        for mine, its in zip(alone.event_times, whole.event_times, strict=True):
            assert torch.equal(mine[0].nan_to_num(), its[k].nan_to_num())


@pytest.mark.parametrize("name", ENDING)
def test_up_to_its_end_a_system_is_what_it_is_without_one(name):
    x0, times = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0), torch.arange(13) * 0.5
    sim = hs.integrate(hs.SA(beta=2.0), x0, times, events=[hs.solve.HittingTime(0.4, terminal=True)], **ENDING[name])
    free = hs.integrate(hs.SA(beta=2.0), x0, times, events=[hs.solve.HittingTime(0.4)], **ENDING[name])
    assert torch.equal(sim.event_times[0].nan_to_num(), free.event_times[0].nan_to_num())
    for k, (end, status) in enumerate(zip(sim.event_times[0], sim.outcome.statuses, strict=True)):
        known = times <= end if status is hs.types.Status.STOPPED else torch.ones_like(times, dtype=torch.bool)
        assert torch.equal(sim.states[known, k], free.states[known, k])
        assert sim.states[~known, k].isnan().all()
        assert status is (hs.types.Status.STOPPED if (~known).any() else hs.types.Status.FINISHED)


@pytest.mark.parametrize("name", ["adaptive", "fixed", "map", "noisy"])
def test_a_system_that_has_ended_is_not_computed(name):
    rows = []

    def flow(x):
        rows.append(len(x))
        return hs.SA(beta=1.0).velocity(x)

    x0 = torch.stack([circle(0.0, 0.5), circle(0.0, 3.0)])
    hs.integrate(flow, x0, [6.0], events=[hs.solve.HittingTime(0.1, terminal=True)], **ENDING[name])
    assert rows[0] == 2
    assert rows[-1] == 1


@pytest.mark.parametrize("name", ["adaptive", "fixed", "noisy"])
@pytest.mark.parametrize("times", [[1.0, 2.0], [0.0, 1.0]])
def test_what_holds_at_the_start_ends_there(name, times):
    x0 = torch.stack([circle(0.0, 0.01), circle(0.0, 0.02)])
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, events=[hs.solve.HittingTime(0.1, terminal=True)], **ENDING[name])
    assert sim.event_times[0].tolist() == [0.0, 0.0]
    assert sim.outcome.statuses == (hs.types.Status.STOPPED,) * 2
    assert sim.outcome.times == (0.0, 0.0)
    assert sim.states.isnan().all(-1).all(-1).any(-1).tolist() == [time > 0 for time in times]


def test_an_end_at_the_last_requested_time_finishes_the_run():
    x0, event = hs.Uniform(n=4, dim=3).sample(seed=0), hs.solve.HittingTime(1e-2, terminal=True)
    stepper = hs.Layer()
    end = hs.integrate(hs.SA(beta=1.0), x0, [30.0], events=[event], stepper=stepper).event_times[0].item()
    sim = hs.integrate(hs.SA(beta=1.0), x0, [1.0, end], events=[event], stepper=stepper)
    assert sim.outcome.statuses == (hs.types.Status.FINISHED,)
    assert sim.states.isfinite().all()


def test_events_after_the_end_do_not_count_though_they_fall_in_the_same_step():
    """One step of RK4 brings three events: before the end, the end, and after it."""
    events = [hs.solve.HittingTime(0.11), hs.solve.HittingTime(0.1, terminal=True), hs.solve.HittingTime(0.09)]
    for stepper in (None, hs.RK4(h=0.5)):
        x0 = circle(0.0, 0.5)
        free = [hs.solve.HittingTime(event.delta) for event in events]
        before, end, after = hs.integrate(hs.SA(beta=1.0), x0, [3.0], events=free, stepper=stepper).event_times
        assert before < end < after < before + 0.5
        found = hs.integrate(hs.SA(beta=1.0), x0, [3.0], events=events, stepper=stepper).event_times
        assert torch.equal(torch.stack(found[:2]), torch.stack([before, end]))
        assert found[2].isnan()


def test_of_two_terminal_events_the_first_ends():
    x0 = circle(0.0, 0.5)
    events = [hs.solve.HittingTime(0.05, terminal=True), hs.solve.HittingTime(0.1, terminal=True)]
    late, early = hs.integrate(hs.SA(beta=1.0), x0, [9.0], events=events).event_times
    assert late.isnan()
    assert early > 0


def test_a_terminal_merge_is_the_last_one():
    x0 = hs.Uniform(n=5, dim=3).sample(seed=1)
    free = hs.integrate(hs.SA(beta=1.0), x0, [9.0], events=[hs.solve.ClusterMerge(0.2)]).event_times[0]
    sim = hs.integrate(hs.SA(beta=1.0), x0, [9.0], events=[hs.solve.ClusterMerge(0.2, terminal=True)])
    assert torch.equal(sim.event_times[0], free)
    assert sim.outcome.times == (free[0].item(),)
    alone = hs.integrate(hs.SA(beta=1.0), circle(0.3), [1.0], events=[hs.solve.ClusterMerge(0.1, terminal=True)])
    assert alone.outcome.statuses == (
        hs.types.Status.FINISHED,
    )  # one token has nothing to merge, and so nothing ends it


def test_a_terminal_event_does_not_warn(caplog):
    hs.integrate(hs.SA(beta=1.0), circle(0.0, 0.5), [9.0], events=[hs.solve.HittingTime(0.1, terminal=True)])
    assert not caplog.records


def test_a_gradient_passes_states_before_the_end():
    x0 = hs.Uniform(n=3, dim=3).sample(batch=2, seed=0).requires_grad_()
    for options in ({}, {"stepper": hs.RK4(h=0.1)}):
        free = hs.integrate(hs.SA(beta=1.0), x0, [0.2, 5.0], **options).states[0]
        events = [hs.solve.HittingTime(0.5, terminal=True)]
        states = hs.integrate(hs.SA(beta=1.0), x0, [0.2, 5.0], events=events, **options).states
        assert states[1].isnan().all()
        (mine,), (plain,) = (torch.autograd.grad(each.square().mul(each).sum(), x0) for each in (states[0], free))
        assert torch.equal(mine, plain)


# Events looked at only at the asked times -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDING)
def test_a_sampled_event_happens_at_a_requested_time(name):
    x0, times = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0), 0.5 + torch.arange(12, dtype=F64) * 0.5
    free = hs.integrate(hs.SA(beta=2.0), x0, times, events=[hs.solve.HittingTime(0.4, sampled=True)], **ENDING[name])
    tokens = slice(0, 3 if name == "weighted" else 4)
    reached = hs.solve.HittingTime(0.4).signal(free.states[..., tokens, :].flatten(0, 1)).reshape(12, 6) >= 0
    expected = [times[row.int().argmax()].item() if row.any() else math.nan for row in reached.mT]
    assert free.event_times[0].tolist() == pytest.approx(expected, nan_ok=True)
    event = hs.solve.HittingTime(0.4, terminal=True, sampled=True)
    sim = hs.integrate(hs.SA(beta=2.0), x0, times, events=[event], **ENDING[name])
    assert torch.equal(sim.event_times[0].nan_to_num(), free.event_times[0].nan_to_num())
    for k, end in enumerate(expected):
        known = ~(times > end)
        assert torch.equal(sim.states[known, k], free.states[known, k])
        assert sim.states[~known, k].isnan().all()


def test_a_sampled_event_is_evaluated_once_per_time():
    calls = []

    class Counted:
        sampled = True

        def signal(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return x[:, 0, 0] - 2

    hs.integrate(torch.zeros_like, circle(0.0, 1.0), [1.0, 2.0, 3.0], events=[Counted()])
    assert calls == [1] * 4  # the start is looked at for the shape of the signal


def test_a_sampled_event_that_holds_at_a_start_that_was_not_requested():
    x0, event = circle(0.0, 0.01), hs.solve.HittingTime(0.1, terminal=True, sampled=True)
    sim = hs.integrate(hs.SA(beta=1.0), x0, [1.0, 2.0], events=[event])
    assert sim.event_times[0].item() == 1.0
    assert sim.outcome.times == (1.0,)
    assert hs.integrate(hs.SA(beta=1.0), x0, [0.0, 2.0], events=[event]).event_times[0].item() == 0.0


@pytest.mark.parametrize(("delta", "status"), [(1e-18, hs.types.Status.STOPPED), (1e-36, hs.types.Status.AT_REST)])
def test_a_state_at_rest_answers_a_sampled_event(delta, status):
    """Tokens come within 1e-9 of each other and rest there: met at 1e-18, or never."""
    x0, times = hs.Uniform(n=3, dim=3).sample(seed=0), [1e5, 2e5, 3e5]
    event = hs.solve.HittingTime(delta, terminal=True, sampled=True)
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, events=[event])
    assert sim.outcome.statuses == (status,)
    stopped = status is hs.types.Status.STOPPED
    assert sim.event_times[0].item() == pytest.approx(1e5 if stopped else math.nan, nan_ok=True)
    assert sim.states.isnan().flatten(1).any(1).tolist() == [False, stopped, stopped]


@pytest.mark.parametrize("make", [partial(hs.solve.HittingTime, 0.1), partial(hs.solve.ClusterMerge, 0.1)])
@pytest.mark.parametrize("option", ["terminal", "sampled"])
def test_options_that_are_neither_true_nor_false_are_refused(make, option):
    with pytest.raises(hs.HelmscopeError, match=rf"^{option} is 1, but it must be True or False$"):
        make(**{option: 1})


def test_an_event_of_ones_own_with_a_bad_option_is_refused():
    class Bad:
        terminal = "yes"

        def signal(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, 0, 0]

    with pytest.raises(hs.HelmscopeError, match=r"^terminal is 'yes', but it must be True or False$"):
        hs.integrate(hs.SA(beta=1.0), circle(0.0, 1.0), [1.0], events=[Bad()])
