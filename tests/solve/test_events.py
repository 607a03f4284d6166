"""Events: hitting times and merges against closed forms, brute force over dense output, and user-defined events."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import helmscope as hs
from support import oracles

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
    event = hs.solve.HittingTime(1e-3)
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
    expected = hs.theory.metastable_time(field, gamma0=0.0)
    assert time is None or expected == pytest.approx(time, rel=1e-14)
    x0 = circle(0.0, 0.0, 0.0, math.pi / 2, math.pi / 2, math.pi / 2)
    events = [hs.solve.ClusterMerge(math.acos(0.999)), hs.solve.HittingTime(1e-3)]
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
        (hs.USA(beta=1.0), hs.solve.GeodesicRK4(h=0.1)),
    ],
)
def test_cluster_merges_by_brute_force(field, stepper):
    """Component k is the first time at most k + 1 clusters are left: count them at 201 times."""
    max_angle, times = 0.4, np.linspace(0, 4, 201).tolist()
    x0 = hs.Uniform(n=6, dim=3).sample(batch=2, seed=4)
    sim = hs.integrate(field, x0, times, events=[hs.solve.ClusterMerge(max_angle)], stepper=stepper)
    assert sim.event_times[0].shape == (2, 5)
    happened = 0
    for k, found in enumerate(sim.event_times[0].tolist()):
        counts = [oracles.cluster_count(x.tolist(), max_angle) for x in sim.states[:, k]]
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
    found = hs.integrate(hs.SA(beta=1.0), x0, [6.0], events=[hs.solve.ClusterMerge(0.2)], stepper=TIGHT).event_times[0]
    assert (found.diff() < 0).all()  # the last merge first
    states = hs.integrate(hs.SA(beta=1.0), x0, found.flip(0), stepper=TIGHT).states
    for merged, x in enumerate(states):
        assert oracles.merge_heights(x.tolist())[merged] == pytest.approx(0.2, rel=0, abs=1e-11)


# When and where -------------------------------------------------------------------------------------------------------


def test_true_at_the_start_is_time_zero_and_never_is_nan():
    x0 = torch.stack([circle(0.0, 0.01), circle(0.0, 2.0)])
    events = [hs.solve.HittingTime(0.1), hs.solve.ClusterMerge(0.1)]
    hit, merged = hs.integrate(hs.SA(beta=1.0, value=-torch.eye(2)), x0, [5.0], events=events).event_times
    torch.testing.assert_close(hit, torch.tensor([0.0, math.nan], dtype=F64), equal_nan=True)
    torch.testing.assert_close(merged, torch.tensor([[0.0], [math.nan]], dtype=F64), equal_nan=True)


def test_events_before_the_first_and_after_the_last_requested_time():
    x0 = circle(0.0, 1.0)
    time = hs.hitting_time(hs.SA(beta=1.0), n=2, delta=0.1, gamma0=math.cos(1.0))
    for times, expected in (([2 * time], time), ([time / 3, 0.99 * time], math.nan), ([0, time / 2, 2 * time], time)):
        found = hs.integrate(hs.SA(beta=1.0), x0, times, events=[hs.solve.HittingTime(0.1)]).event_times[0]
        assert found.item() == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_one_token_has_nothing_to_merge():
    hit, merged = hs.integrate(
        hs.SA(beta=1.0), circle(0.3), [1.0], events=[hs.solve.HittingTime(0.1), hs.solve.ClusterMerge(0.1)]
    ).event_times
    assert hit.item() == 0
    assert merged.shape == (0,)


def test_events_have_the_axes_of_the_batch():
    x0 = hs.Uniform(n=4, dim=3).sample(batch=6, seed=0).reshape(2, 3, 4, 3)
    hit, merged = hs.integrate(
        hs.SA(beta=1.0), x0, [9.0], events=[hs.solve.HittingTime(0.1), hs.solve.ClusterMerge(0.3)]
    ).event_times
    assert hit.shape == (2, 3)
    assert merged.shape == (2, 3, 3)
    flat = hs.integrate(hs.SA(beta=1.0), x0[1, 2], [9.0], events=[hs.solve.HittingTime(0.1)]).event_times[0]
    assert torch.equal(hit[1, 2], flat)


def test_events_do_not_change_the_states():
    x0 = hs.Uniform(n=4, dim=3).sample(batch=3, seed=0)
    events = [hs.solve.HittingTime(0.1), hs.solve.ClusterMerge(0.3), hs.solve.HittingTime(1e-4)]
    watched = hs.integrate(hs.USA(beta=2.0), x0, [0.5, 2.0], events=events)
    assert torch.equal(watched.states, hs.integrate(hs.USA(beta=2.0), x0, [0.5, 2.0]).states)


def test_events_ignore_padding():
    x0 = hs.Uniform(n=4, dim=3).sample(seed=0)
    events = [hs.solve.HittingTime(1e-2), hs.solve.ClusterMerge(0.1)]
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
        (hs.solve.ProjectedEuler(h=0.01), 1e-2),
        (hs.solve.GeodesicEuler(h=0.01), 1e-2),
        (hs.solve.Heun(h=0.01), 1e-4),
        (hs.solve.GeodesicHeun(h=0.01), 1e-4),
        (hs.RK4(h=0.05), 1e-7),
        (hs.solve.GeodesicRK4(h=0.05), 1e-7),
    ],
)
def test_fixed_steppers_locate_an_event_inside_their_step(stepper, error):
    x0 = hs.Orthonormal(n=4, dim=4).sample(seed=0)
    expected = hs.hitting_time(hs.SA(beta=1.0), n=4, delta=0.03)
    found = hs.integrate(hs.SA(beta=1.0), x0, [5.0], events=[hs.solve.HittingTime(0.03)], stepper=stepper).event_times[
        0
    ]
    assert error / 1000 < abs(found.item() - expected) < error


@pytest.mark.parametrize("stepper", [hs.Layer(), hs.Layer(h=0.5), hs.solve.UnprojectedEuler(h=0.5)])
def test_an_event_of_a_map_happens_at_the_end_of_its_step(stepper):
    x0 = hs.Uniform(n=4, dim=3).sample(seed=0)
    times = torch.arange(31) * stepper.h
    event = hs.solve.HittingTime(1e-2)
    sim = hs.integrate(hs.SA(beta=1.0), x0, times, stepper=stepper, events=[event])
    reached = event.signal(sim.states) >= 0
    assert reached.any()
    assert sim.event_times[0].item() == times[reached][0]


# Events of one's own --------------------------------------------------------------------------------------------------


class Heights:
    """The second coordinate of every token rises to 0.5 (first row) and to -0.5 (second row)."""

    def signal(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[..., 1] - 0.5, x[..., 1] + 0.5], -2)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.01), hs.solve.GeodesicRK4(h=0.1)])
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
        return torch.where(hs.solve.HittingTime(1e-2).signal(x) >= 0, 0.0, -1.0)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.5)])
def test_an_event_whose_signal_jumps(stepper):
    x0 = hs.Uniform(n=4, dim=3).sample(batch=3, seed=0)
    events = [Met(), hs.solve.HittingTime(1e-2)]
    jump, smooth = hs.integrate(hs.SA(beta=1.0), x0, [20.0], events=events, stepper=stepper).event_times
    torch.testing.assert_close(jump, smooth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [hs.solve.HittingTime, hs.solve.ClusterMerge])
@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf, "near"])
def test_bad_thresholds_are_refused(make, value):
    name = "delta" if make is hs.solve.HittingTime else "max_angle"
    with pytest.raises(hs.HelmscopeError, match=rf"^{name} is .*, but it must be a finite number > 0$"):
        make(value)


@pytest.mark.parametrize("event", [1e-3, "merge", lambda x: x, hs.solve.HittingTime])
def test_invalid_events_raise(event):
    with pytest.raises(hs.HelmscopeError, match=r"^events holds .*, but an event has a signal\(x\)"):
        hs.integrate(hs.SA(beta=1.0), circle(0.0, 1.0), [1.0], events=[event])
