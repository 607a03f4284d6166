"""Events: hitting times and merges against closed forms, brute force over dense output, and events of one's own."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import helmscope as hs
import oracles
from helmscope.solve.integrate import pose

F64 = torch.float64
TIGHT = hs.DormandPrince(tol=1e-12)


def circle(*angles: float) -> torch.Tensor:
    theta = torch.tensor(angles, dtype=F64)
    return torch.stack([theta.cos(), theta.sin()], -1)


def rotation(x: torch.Tensor) -> torch.Tensor:
    """Every token of the circle turns at unit speed."""
    return torch.stack([-x[..., 1], x[..., 0]], -1)


# Closed forms ---------------------------------------------------------------------------------------------------------

TABLE = [
    (hs.SA(beta=0.0), 5.18626098112015614),
    (hs.SA(beta=1.0), 5.2702839075862406),
    (hs.SA(beta=4.0), 6.95350184880806874),
    (hs.SA(beta=9.0), 178.730929519039129),
    (hs.USA(beta=0.0), 5.18626098112015614),
    (hs.USA(beta=1.0), 2.89704862298957426),
    (hs.USA(beta=4.0), 1.1307703412964512),
    (hs.USA(beta=9.0), 0.68598766887729669),
]


@pytest.mark.parametrize(("field", "printed"), TABLE)
def test_hitting_time_of_an_orthonormal_start(field, printed):
    """n = 32, delta = 1e-3: the printed table and the closed form."""
    x0 = hs.Orthonormal(n=32, dim=32).sample(seed=0)
    event = hs.HittingTime(1e-3)
    default = hs.integrate(field, x0, [1.02 * printed], events=[event]).event_times[0]
    assert default.shape == ()
    assert default.item() == pytest.approx(printed, rel=5e-9)  # measured 4.5e-9 at beta = 9 for USA, else below 1.2e-9
    tight = hs.integrate(field, x0, [1.02 * printed], events=[event], stepper=TIGHT).event_times[0]
    assert tight.item() == pytest.approx(printed, rel=5e-13)
    assert tight.item() == pytest.approx(hs.hitting_time(field, n=32, delta=1e-3), rel=5e-13)


@pytest.mark.parametrize(
    ("field", "time"),
    [
        (hs.SA(beta=1.0), 4.27106768030934),
        (hs.SA(beta=4.0), 10.831207009995),
        (hs.SA(beta=9.0), 466.710652910029),
        (hs.USA(beta=4.0), None),
    ],
)
def test_two_clusters_merge_at_the_metastable_time(field, time):
    """Three tokens each, from orthogonal places to the inner product 0.999."""
    expected = hs.metastable_time(field, gamma0=0.0)
    assert time is None or expected == pytest.approx(time, rel=1e-14)
    x0 = circle(0.0, 0.0, 0.0, math.pi / 2, math.pi / 2, math.pi / 2)
    events = [hs.ClusterMerge(math.acos(0.999)), hs.HittingTime(1e-3)]
    merges, hit = hs.integrate(field, x0, [1.01 * expected], events=events).event_times
    assert merges.tolist() == [pytest.approx(expected, rel=2e-9), 0, 0, 0, 0]  # measured 1.2e-9 at beta = 9
    assert hit.item() == pytest.approx(expected, rel=2e-9)


# Brute force ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "stepper"),
    [
        (hs.SA(beta=1.0), None),
        (hs.USA(beta=2.0), None),
        (hs.SA(beta=9.0), None),
        (hs.SA(beta=1.0, causal=True), None),
        (hs.SA(beta=1.0), hs.RK4(h=0.1)),
        (hs.USA(beta=1.0), hs.GeodesicRK4(h=0.1)),
    ],
)
def test_cluster_merges_by_brute_force(field, stepper):
    """Component k is the first time at most k + 1 clusters are left: count them at 201 times."""
    radius, times = 0.4, np.linspace(0, 4, 201).tolist()
    x0 = hs.Uniform(n=6, dim=3).sample(batch=2, seed=4)
    sim = hs.integrate(field, x0, times, events=[hs.ClusterMerge(radius)], stepper=stepper)
    assert sim.event_times[0].shape == (2, 5)
    happened = 0
    for k, found in enumerate(sim.event_times[0].tolist()):
        counts = [oracles.cluster_count(x.tolist(), radius) for x in sim.states[:, k]]
        for left, time in enumerate(found, start=1):
            reached = [i for i, count in enumerate(counts) if count <= left]
            if not reached:
                assert math.isnan(time)
            elif reached[0] == 0:
                assert time == 0
            else:
                assert times[reached[0] - 1] < time <= times[reached[0]]
                happened += 1
    assert happened >= 3


def test_merge_times_are_those_of_the_tree_of_distances():
    """At a located merge the oracle's merge height is the radius itself."""
    x0 = hs.Uniform(n=5, dim=3).sample(seed=1)
    found = hs.integrate(hs.SA(beta=1.0), x0, [6.0], events=[hs.ClusterMerge(0.2)], stepper=TIGHT).event_times[0]
    assert (found.diff() < 0).all()  # the last merge first
    states = hs.integrate(hs.SA(beta=1.0), x0, found.flip(0), stepper=TIGHT).states
    for merged, x in enumerate(states):
        assert oracles.merge_heights(x.tolist())[merged] == pytest.approx(0.2, rel=0, abs=1e-11)


# When and where -------------------------------------------------------------------------------------------------------


def test_true_at_the_start_is_time_zero_and_never_is_nan():
    x0 = torch.stack([circle(0.0, 0.01), circle(0.0, 2.0)])
    events = [hs.HittingTime(0.1), hs.ClusterMerge(0.1)]
    hit, merged = hs.integrate(hs.SA(beta=1.0, value=-torch.eye(2)), x0, [5.0], events=events).event_times
    torch.testing.assert_close(hit, torch.tensor([0.0, math.nan], dtype=F64), equal_nan=True)
    torch.testing.assert_close(merged, torch.tensor([[0.0], [math.nan]], dtype=F64), equal_nan=True)


def test_events_before_the_first_and_after_the_last_asked_time():
    x0 = circle(0.0, 1.0)
    time = hs.hitting_time(hs.SA(beta=1.0), n=2, delta=0.1, gamma0=math.cos(1.0))
    for times, expected in (([2 * time], time), ([time / 3, 0.99 * time], math.nan), ([0, time / 2, 2 * time], time)):
        found = hs.integrate(hs.SA(beta=1.0), x0, times, events=[hs.HittingTime(0.1)]).event_times[0]
        assert found.item() == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_one_token_has_nothing_to_merge():
    hit, merged = hs.integrate(
        hs.SA(beta=1.0), circle(0.3), [1.0], events=[hs.HittingTime(0.1), hs.ClusterMerge(0.1)]
    ).event_times
    assert hit.item() == 0
    assert merged.shape == (0,)


def test_events_have_the_axes_of_the_batch():
    x0 = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0).reshape(2, 3, 4, 3)
    hit, merged = hs.integrate(
        hs.SA(beta=1.0), x0, [9.0], events=[hs.HittingTime(0.1), hs.ClusterMerge(0.3)]
    ).event_times
    assert hit.shape == (2, 3)
    assert merged.shape == (2, 3, 3)
    flat = hs.integrate(hs.SA(beta=1.0), x0[1, 2], [9.0], events=[hs.HittingTime(0.1)]).event_times[0]
    assert torch.equal(hit[1, 2], flat)


def test_events_do_not_change_the_states():
    x0 = hs.Uniform(n=4, dim=3).sample(batch=3, seed=0)
    events = [hs.HittingTime(0.1), hs.ClusterMerge(0.3), hs.HittingTime(1e-4)]
    watched = hs.integrate(hs.USA(beta=2.0), x0, [0.5, 2.0], events=events)
    assert torch.equal(watched.states, hs.integrate(hs.USA(beta=2.0), x0, [0.5, 2.0]).states)


def test_padding_is_no_token_to_an_event():
    x0 = hs.Uniform(n=4, dim=3).sample(seed=0)
    events = [hs.HittingTime(1e-2), hs.ClusterMerge(0.1)]
    for mask in ([True, True, True, False], [False, True, True, True]):
        real = torch.tensor(mask)
        hit, merged = hs.integrate(hs.SA(beta=1.0), x0[real], [20.0], events=events).event_times
        padded = hs.integrate(hs.SA(beta=1.0), x0, [20.0], mask=real, events=events).event_times
        assert padded[0].item() == pytest.approx(hit.item(), rel=1e-8)
        assert padded[1].tolist() == [*(pytest.approx(time, rel=1e-8) for time in merged.tolist()), 0]


# Fixed steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stepper", "error"),
    [
        (hs.ProjectedEuler(h=0.01), 1e-2),
        (hs.GeodesicEuler(h=0.01), 1e-2),
        (hs.Heun(h=0.01), 1e-4),
        (hs.GeodesicHeun(h=0.01), 1e-4),
        (hs.RK4(h=0.05), 1e-7),
        (hs.GeodesicRK4(h=0.05), 1e-7),
    ],
)
def test_fixed_steppers_locate_an_event_inside_their_step(stepper, error):
    x0 = hs.Orthonormal(n=4, dim=4).sample(seed=0)
    expected = hs.hitting_time(hs.SA(beta=1.0), n=4, delta=0.03)
    found = hs.integrate(hs.SA(beta=1.0), x0, [5.0], events=[hs.HittingTime(0.03)], stepper=stepper).event_times[0]
    assert error / 1000 < abs(found.item() - expected) < error


@pytest.mark.parametrize("stepper", [hs.Layer(), hs.Layer(h=0.5), hs.PublishedEuler(h=0.5)])
def test_an_event_of_a_map_happens_at_the_end_of_its_step(stepper):
    x0 = hs.Uniform(n=4, dim=3).sample(seed=0)
    times = torch.arange(31) * stepper.h
    event = hs.HittingTime(1e-2)
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, stepper=stepper, events=[event])
    reached = event.signal(sim.states) >= 0
    assert reached.any()
    assert sim.event_times[0].item() == times[reached][0]


# Events of one's own --------------------------------------------------------------------------------------------------


class Heights:
    """The second coordinate of every token rises to 0.5 (first row) and to -0.5 (second row)."""

    def signal(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[..., 1] - 0.5, x[..., 1] + 0.5], -2)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.01), hs.GeodesicRK4(h=0.1)])
def test_an_event_of_ones_own(stepper):
    x0 = torch.stack([circle(0.0, -1.0, 3.0), circle(1.0, -2.0, 3.0)])
    sim = hs.integrate(rotation, x0, [4.0], events=[Heights()], stepper=stepper)
    third = math.pi / 6
    once_round = 2 * math.pi + third - 3
    expected = [
        [[third, 1 + third, once_round], [0.0, 1 - third, 0.0]],
        [[0.0, 2 + third, once_round], [0.0, 2 - third, 0.0]],
    ]
    torch.testing.assert_close(sim.event_times[0], torch.tensor(expected, dtype=F64), rtol=0, atol=1e-9)


class Met:
    """0 where all tokens are within delta of each other, else -1: a signal that jumps."""

    def signal(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(hs.HittingTime(1e-2).signal(x) >= 0, 0.0, -1.0)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.5)])
def test_an_event_whose_signal_jumps(stepper):
    x0 = hs.Uniform(n=4, dim=3).sample(batch=3, seed=0)
    events = [Met(), hs.HittingTime(1e-2)]
    jump, smooth = hs.integrate(hs.SA(beta=1.0), x0, [20.0], events=events, stepper=stepper).event_times
    torch.testing.assert_close(jump, smooth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [hs.HittingTime, hs.ClusterMerge])
@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf, "near"])
def test_bad_thresholds_are_refused(make, value):
    name = "delta" if make is hs.HittingTime else "radius"
    with pytest.raises(hs.HelmscopeError, match=rf"^{name} is .*, but it must be a finite number > 0$"):
        make(value)


@pytest.mark.parametrize("event", [1e-3, "merge", lambda x: x, hs.HittingTime])
def test_what_is_no_event_is_refused(event):
    with pytest.raises(hs.HelmscopeError, match=r"^events holds .*, but an event has a signal\(x\)"):
        hs.integrate(hs.SA(beta=1.0), circle(0.0, 1.0), [1.0], events=[event])


# Events that end a system ---------------------------------------------------------------------------------------------

NOISE = hs.IsotropicNoise(0.05)
ENDING = {
    "adaptive": {},
    "fixed": {"stepper": hs.RK4(h=0.1)},
    "map": {"stepper": hs.Layer(h=0.5)},
    "noisy": {"stepper": hs.EulerMaruyama(h=0.05), "noise": NOISE, "seed": 3},
    "merging": {"merge": 1e-2},
    "weighted": {"mask": torch.tensor([True, True, True, False])},
}


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.05), hs.GeodesicRK4(h=0.05)])
def test_a_terminal_event_ends_a_system_at_the_closed_form(stepper):
    x0, times = hs.Orthonormal(n=4, dim=4).sample(seed=0), [0.0, 1.0, 2.0, 3.0, 6.0]
    expected = hs.hitting_time(hs.SA(beta=1.0), n=4, delta=0.03)
    assert 2 < expected < 3
    event = hs.HittingTime(0.03, terminal=True)
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, events=[event], stepper=stepper)
    free = hs.integrate(hs.SA(beta=1.0), x0, times, events=[hs.HittingTime(0.03)], stepper=stepper)
    assert sim.event_times[0].item() == pytest.approx(expected, rel=5e-9 if stepper is None else 1e-7)
    assert torch.equal(sim.event_times[0], free.event_times[0])
    assert torch.equal(sim.states[:3], free.states[:3])
    assert sim.states[3:].isnan().all()
    assert sim.outcome.statuses == (hs.Status.STOPPED,)
    assert sim.outcome.times == (sim.event_times[0].item(),)
    assert not sim.outcome.ok
    assert not sim.outcome.failed
    assert str(sim.outcome).startswith(f"system 0 of 1: ended by a terminal event at t={expected:.6g}")


def test_terminal_events_of_another_program():
    """SciPy, with an event of its own and a velocity in loops; measured 3e-9."""
    x0 = hs.Uniform(n=5, dim=3).sample(batch=4, seed=2)

    def velocity(_, flat):
        return np.array(oracles.sa_velocity(flat.reshape(5, 3).tolist(), beta=2.0)).ravel()

    def met(_, flat):
        x = flat.reshape(5, 3)
        return (x @ x.T).min() - 0.9

    met.terminal = True
    sim = hs.integrate(hs.SA(beta=2.0), x0, [4.0, 30.0], events=[hs.HittingTime(0.1, terminal=True)])
    for found, start in zip(sim.event_times[0].tolist(), x0, strict=True):
        seen = solve_ivp(velocity, (0, 30), start.numpy().ravel(), rtol=1e-11, atol=1e-12, events=met)
        assert found == pytest.approx(seen.t_events[0][0], rel=0, abs=1e-8)


@pytest.mark.parametrize("name", ENDING)
def test_a_system_that_ends_is_the_same_alone_and_in_a_batch(name):
    x0, times = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0), torch.arange(13) * 0.5
    options = {"events": [hs.HittingTime(0.4, terminal=True), hs.ClusterMerge(0.6)], **ENDING[name]}
    whole = hs.integrate(hs.SA(beta=2.0), x0, times, **options)
    assert {hs.Status.STOPPED, hs.Status.FINISHED} == set(whole.outcome.statuses)
    for k in range(6):
        alone = pose(hs.SA(beta=2.0), x0, times, **options).part(k, k + 1).run()
        assert torch.equal(alone.states[:, 0].nan_to_num(), whole.states[:, k].nan_to_num())
        assert alone.outcome.statuses == whole.outcome.statuses[k : k + 1]
        for mine, its in zip(alone.event_times, whole.event_times, strict=True):
            assert torch.equal(mine[0].nan_to_num(), its[k].nan_to_num())


@pytest.mark.parametrize("name", ENDING)
def test_up_to_its_end_a_system_is_what_it_is_without_one(name):
    x0, times = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0), torch.arange(13) * 0.5
    sim = hs.integrate(hs.SA(beta=2.0), x0, times, events=[hs.HittingTime(0.4, terminal=True)], **ENDING[name])
    free = hs.integrate(hs.SA(beta=2.0), x0, times, events=[hs.HittingTime(0.4)], **ENDING[name])
    assert torch.equal(sim.event_times[0].nan_to_num(), free.event_times[0].nan_to_num())
    for k, (end, status) in enumerate(zip(sim.event_times[0], sim.outcome.statuses, strict=True)):
        known = times <= end if status is hs.Status.STOPPED else torch.ones_like(times, dtype=torch.bool)
        assert torch.equal(sim.states[known, k], free.states[known, k])
        assert sim.states[~known, k].isnan().all()
        assert status is (hs.Status.STOPPED if (~known).any() else hs.Status.FINISHED)


@pytest.mark.parametrize("name", ["adaptive", "fixed", "map", "noisy"])
def test_a_system_that_has_ended_is_not_computed(name):
    rows = []

    def flow(x):
        rows.append(len(x))
        return hs.SA(beta=1.0).velocity(x)

    x0 = torch.stack([circle(0.0, 0.5), circle(0.0, 3.0)])
    hs.integrate(flow, x0, [6.0], events=[hs.HittingTime(0.1, terminal=True)], **ENDING[name])
    assert rows[0] == 2
    assert rows[-1] == 1


@pytest.mark.parametrize("name", ["adaptive", "fixed", "noisy"])
@pytest.mark.parametrize("times", [[1.0, 2.0], [0.0, 1.0]])
def test_what_holds_at_the_start_ends_there(name, times):
    x0 = torch.stack([circle(0.0, 0.01), circle(0.0, 0.02)])
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, events=[hs.HittingTime(0.1, terminal=True)], **ENDING[name])
    assert sim.event_times[0].tolist() == [0.0, 0.0]
    assert sim.outcome.statuses == (hs.Status.STOPPED,) * 2
    assert sim.outcome.times == (0.0, 0.0)
    assert sim.states.isnan().all(-1).all(-1).any(-1).tolist() == [time > 0 for time in times]


def test_an_end_at_the_last_asked_time_is_the_end_of_the_run():
    x0, event = hs.Uniform(n=4, dim=3).sample(seed=0), hs.HittingTime(1e-2, terminal=True)
    stepper = hs.Layer()
    end = hs.integrate(hs.SA(beta=1.0), x0, [30.0], events=[event], stepper=stepper).event_times[0].item()
    sim = hs.integrate(hs.SA(beta=1.0), x0, [1.0, end], events=[event], stepper=stepper)
    assert sim.outcome.statuses == (hs.Status.FINISHED,)
    assert sim.states.isfinite().all()


def test_events_after_the_end_do_not_count_though_they_fall_in_the_same_step():
    """One step of RK4 brings three events: before the end, the end, and after it."""
    events = [hs.HittingTime(0.11), hs.HittingTime(0.1, terminal=True), hs.HittingTime(0.09)]
    for stepper in (None, hs.RK4(h=0.5)):
        x0 = circle(0.0, 0.5)
        free = [hs.HittingTime(event.delta) for event in events]
        before, end, after = hs.integrate(hs.SA(beta=1.0), x0, [3.0], events=free, stepper=stepper).event_times
        assert before < end < after < before + 0.5
        found = hs.integrate(hs.SA(beta=1.0), x0, [3.0], events=events, stepper=stepper).event_times
        assert torch.equal(torch.stack(found[:2]), torch.stack([before, end]))
        assert found[2].isnan()


def test_of_two_terminal_events_the_first_ends():
    x0 = circle(0.0, 0.5)
    events = [hs.HittingTime(0.05, terminal=True), hs.HittingTime(0.1, terminal=True)]
    late, early = hs.integrate(hs.SA(beta=1.0), x0, [9.0], events=events).event_times
    assert late.isnan()
    assert early > 0


def test_a_terminal_merge_is_the_last_one():
    x0 = hs.Uniform(n=5, dim=3).sample(seed=1)
    free = hs.integrate(hs.SA(beta=1.0), x0, [9.0], events=[hs.ClusterMerge(0.2)]).event_times[0]
    sim = hs.integrate(hs.SA(beta=1.0), x0, [9.0], events=[hs.ClusterMerge(0.2, terminal=True)])
    assert torch.equal(sim.event_times[0], free)
    assert sim.outcome.times == (free[0].item(),)
    alone = hs.integrate(hs.SA(beta=1.0), circle(0.3), [1.0], events=[hs.ClusterMerge(0.1, terminal=True)])
    assert alone.outcome.statuses == (hs.Status.FINISHED,)  # one token has nothing to merge, and so nothing ends it


def test_an_end_that_was_asked_for_is_no_warning(caplog):
    hs.integrate(hs.SA(beta=1.0), circle(0.0, 0.5), [9.0], events=[hs.HittingTime(0.1, terminal=True)])
    assert not caplog.records


def test_a_gradient_passes_states_before_the_end():
    x0 = hs.Uniform(n=3, dim=3).sample(batch=2, seed=0).requires_grad_()
    for options in ({}, {"stepper": hs.RK4(h=0.1)}):
        free = hs.integrate(hs.SA(beta=1.0), x0, [0.2, 5.0], **options).states[0]
        events = [hs.HittingTime(0.5, terminal=True)]
        states = hs.integrate(hs.SA(beta=1.0), x0, [0.2, 5.0], events=events, **options).states
        assert states[1].isnan().all()
        (mine,), (plain,) = (torch.autograd.grad(each.square().mul(each).sum(), x0) for each in (states[0], free))
        assert torch.equal(mine, plain)


# Events looked at only at the asked times -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDING)
def test_a_sampled_event_happens_at_an_asked_time(name):
    x0, times = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0), 0.5 + torch.arange(12, dtype=F64) * 0.5
    free = hs.integrate(hs.SA(beta=2.0), x0, times, events=[hs.HittingTime(0.4, sampled=True)], **ENDING[name])
    tokens = slice(0, 3 if name == "weighted" else 4)
    reached = hs.HittingTime(0.4).signal(free.states[..., tokens, :].flatten(0, 1)).reshape(12, 6) >= 0
    expected = [times[row.int().argmax()].item() if row.any() else math.nan for row in reached.mT]
    assert free.event_times[0].tolist() == pytest.approx(expected, nan_ok=True)
    event = hs.HittingTime(0.4, terminal=True, sampled=True)
    sim = hs.integrate(hs.SA(beta=2.0), x0, times, events=[event], **ENDING[name])
    assert torch.equal(sim.event_times[0].nan_to_num(), free.event_times[0].nan_to_num())
    for k, end in enumerate(expected):
        known = ~(times > end)
        assert torch.equal(sim.states[known, k], free.states[known, k])
        assert sim.states[~known, k].isnan().all()


def test_a_sampled_event_is_asked_once_a_time():
    calls = []

    class Counted:
        sampled = True

        def signal(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return x[:, 0, 0] - 2

    hs.integrate(rotation, circle(0.0, 1.0), [1.0, 2.0, 3.0], events=[Counted()])
    assert calls == [1] * 4  # the start is looked at for the shape of the signal


def test_a_sampled_event_that_holds_at_a_start_nobody_asked_for():
    x0, event = circle(0.0, 0.01), hs.HittingTime(0.1, terminal=True, sampled=True)
    sim = hs.integrate(hs.SA(beta=1.0), x0, [1.0, 2.0], events=[event])
    assert sim.event_times[0].item() == 1.0
    assert sim.outcome.times == (1.0,)
    assert hs.integrate(hs.SA(beta=1.0), x0, [0.0, 2.0], events=[event]).event_times[0].item() == 0.0


@pytest.mark.parametrize(("delta", "status"), [(1e-18, hs.Status.STOPPED), (1e-36, hs.Status.AT_REST)])
def test_a_state_at_rest_answers_a_sampled_event(delta, status):
    """Tokens come within 1e-9 of each other and rest there: met at 1e-18, or never."""
    x0, times = hs.Uniform(n=3, dim=3).sample(seed=0), [1e5, 2e5, 3e5]
    event = hs.HittingTime(delta, terminal=True, sampled=True)
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, events=[event])
    assert sim.outcome.statuses == (status,)
    stopped = status is hs.Status.STOPPED
    assert sim.event_times[0].item() == pytest.approx(1e5 if stopped else math.nan, nan_ok=True)
    assert sim.states.isnan().flatten(1).any(1).tolist() == [False, stopped, stopped]


@pytest.mark.parametrize("make", [partial(hs.HittingTime, 0.1), partial(hs.ClusterMerge, 0.1)])
@pytest.mark.parametrize("option", ["terminal", "sampled"])
def test_options_that_are_neither_true_nor_false_are_refused(make, option):
    with pytest.raises(hs.HelmscopeError, match=rf"^{option} is 1, but it must be True or False$"):
        make(**{option: 1})


def test_an_event_of_ones_own_with_a_bad_option_is_refused():
    class Bad(Met):
        terminal = "yes"

    with pytest.raises(hs.HelmscopeError, match=r"^terminal is 'yes', but it must be True or False$"):
        hs.integrate(hs.SA(beta=1.0), circle(0.0, 1.0), [1.0], events=[Bad()])
