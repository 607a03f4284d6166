"""``integrate(merge=...)``: the same trajectories in fewer steps, and the bookkeeping of merged tokens."""

from __future__ import annotations

import pytest
import torch

import helmscope as hs
from helmscope.solve import step_actions
from helmscope.solve.step_actions import StepActions
from support import oracles

F64 = torch.float64


def circle(*angles: float) -> torch.Tensor:
    theta = torch.tensor(angles, dtype=F64)
    return torch.stack([theta.cos(), theta.sin()], -1)


@pytest.fixture
def attempts(monkeypatch):
    """Counts trial steps."""
    seen = []
    attempt = hs.DormandPrince.attempt

    def counted(self, flow, x, h, t, first):
        seen.append(len(x))
        return attempt(self, flow, x, h, t, first)

    monkeypatch.setattr(hs.DormandPrince, "attempt", counted)
    return seen


@pytest.fixture
def flows(monkeypatch):
    """Records the flow after every check for tokens that have met."""
    seen = []
    merged = StepActions.merge_tokens

    def kept(self, flow, x):
        result = merged(self, flow, x)
        seen.append((result[0], result[1]))
        return result

    monkeypatch.setattr(StepActions, "merge_tokens", kept)
    return seen


# The same trajectories ------------------------------------------------------------------------------------------------


def test_sa_agrees_before_and_after_merges():
    x0 = hs.Uniform(n=16, dim=3).sample(batch=2, seed=0)
    times = [1.0, 5.0, 20.0, 40.0]
    plain = hs.integrate(hs.SA(beta=4.0), x0, times).states
    merged = hs.integrate(hs.SA(beta=4.0), x0, times, merge=1e-9).states
    assert torch.equal(merged[:2], plain[:2])  # nobody has met yet
    assert len(merged[2, 1].unique(dim=0)) < 16
    assert len(merged[3, 0].unique(dim=0)) < 16
    assert (merged - plain).abs().max() <= 1e-9  # measured 4.4e-10


def test_stiff_usa_agrees_in_a_third_of_the_steps(attempts):
    x0 = hs.Uniform(n=8, dim=3).sample(batch=2, seed=0)
    times = [0.01, 0.1, 0.5]
    plain = hs.integrate(hs.USA(beta=9.0), x0, times)
    steps = len(attempts)
    attempts.clear()
    merged = hs.integrate(hs.USA(beta=9.0), x0, times, merge=1e-9)
    assert plain.outcome.ok
    assert merged.outcome.ok
    assert (merged.states - plain.states).abs().max() <= 1e-9  # measured 1.3e-10
    assert len(merged.states[2, 0].unique(dim=0)) == 2
    assert len(attempts) < steps / 3  # measured 434 against 1,767


def test_stiff_usa_far_beyond_what_steps_alone_can_reach(attempts):
    """At beta = 16 the rate inside a cluster is 8.9 million: steps inside its stability would be some 3 million."""
    x0 = hs.Uniform(n=8, dim=3).sample(seed=3)
    sim = hs.integrate(hs.USA(beta=16.0), x0, [1e-4, 1.0], merge=1e-9)
    assert sim.outcome.ok
    assert len(attempts) < 1000  # measured 630
    assert [len(x.unique(dim=0)) for x in sim.states] == [3, 2]
    looser = hs.integrate(hs.USA(beta=16.0), x0, [1e-4, 1.0], merge=1e-7).states
    assert (looser - sim.states).abs().max() <= 1e-12  # measured 1.2e-13


@pytest.mark.parametrize("stepper", [hs.RK4(h=0.1), hs.solve.GeodesicRK4(h=0.1)])
def test_fixed_steppers_merge_too(stepper):
    x0 = hs.Uniform(n=6, dim=3).sample(batch=2, seed=1)
    plain = hs.integrate(hs.SA(beta=1.0), x0, [2.0, 30.0], stepper=stepper).states
    merged = hs.integrate(hs.SA(beta=1.0), x0, [2.0, 30.0], stepper=stepper, merge=1e-6).states
    assert torch.equal(merged[0], plain[0])
    assert len(merged[1, 0].unique(dim=0)) == 1
    assert (merged - plain).abs().max() <= 1e-10  # measured 1e-11


def test_merge_zero_joins_coinciding_tokens_only(flows):
    x0 = circle(0.0, 1.0, 0.0, 2.5, 1.0)
    times = [0.5, 1.0, 3.0]
    merged = hs.integrate(hs.SA(beta=2.0), x0, times, merge=0.0).states
    assert flows[-1][0].weights.tolist() == [[2.0, 2.0, 0.0, 1.0, 0.0]]
    plain = hs.integrate(hs.SA(beta=2.0), x0, times).states
    assert (merged - plain).abs().max() <= 1e-9
    copies = torch.tensor([0, 1, 0, 2, 1])
    weights = torch.tensor([2.0, 2.0, 1.0], dtype=F64)
    weighted = hs.integrate(hs.SA(beta=2.0), x0[[0, 1, 3]], times, weights=weights).states
    assert (merged - weighted[:, copies]).abs().max() <= 1e-14


def test_events_are_those_of_the_unmerged_flow():
    """Two clusters form at once and meet late; each has been one token for long by then."""
    x0 = circle(0.0, 0.1, 0.2, 2.0, 2.1, 2.2)
    events = [hs.solve.HittingTime(0.5), hs.solve.ClusterMerge(0.5)]
    plain = hs.integrate(hs.SA(beta=4.0), x0, [16.0, 45.0], events=events)
    merged = hs.integrate(hs.SA(beta=4.0), x0, [16.0, 45.0], events=events, merge=1e-6)
    assert len(merged.states[0].unique(dim=0)) == 2
    assert 30 < plain.event_times[0] < 45
    assert plain.event_times[1][0] > plain.event_times[0]
    for one, other in zip(plain.event_times, merged.event_times, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-8)  # measured 8e-9


def test_padding_is_not_merged():
    """A padded token within the tolerance of a real one neither moves it nor lends it weight."""
    x0 = circle(0.0, 1.0, 2.5, 1.0, 0.005)
    mask = torch.tensor([True, True, True, False, False])
    padded = hs.integrate(hs.SA(beta=2.0), x0, [0.5, 2.0], mask=mask, merge=0.01).states
    bare = hs.integrate(hs.SA(beta=2.0), x0[:3], [0.5, 2.0], merge=0.01).states
    assert (padded[:, :3] - bare).abs().max() <= 1e-9


def test_gradient_passes_through_a_merge():
    x0 = hs.Uniform(n=5, dim=3).sample(seed=2)
    towards = torch.tensor([1.0, -2.0, 0.5], dtype=F64)

    def gradient(merge):
        x = x0.clone().requires_grad_()
        states = hs.integrate(hs.SA(beta=1.0), x, [12.0], merge=merge).states[0]
        assert (len(states.unique(dim=0)) < 5) == (merge is not None)
        return torch.autograd.grad((states[3] * towards).sum(), x)[0]

    torch.testing.assert_close(gradient(1e-4), gradient(None), rtol=0, atol=1e-4)


# Who follows whom -----------------------------------------------------------------------------------------------------


def test_followers_equal_their_leader_and_weights_are_conserved(flows):
    x0 = hs.Uniform(n=12, dim=3).sample(batch=3, seed=5)
    weights = torch.arange(1.0, 13.0, dtype=F64)
    sim = hs.integrate(hs.SA(beta=4.0), x0, [2.0, 30.0], weights=weights, merge=1e-3)
    assert sim.outcome.ok
    assert flows[-1][0].leader is not None
    for flow, x in flows:
        assert torch.equal(flow.weights.sum(-1), torch.full((len(x),), 78.0, dtype=F64))
        if flow.leader is None:
            continue
        assert torch.equal(flow.leader.gather(-1, flow.leader), flow.leader)
        assert torch.equal(x, x.gather(-2, flow.leader.unsqueeze(-1).expand_as(x)))
        carried = torch.zeros_like(flow.weights).scatter_add(-1, flow.leader, weights.expand(len(x), 12))
        assert torch.equal(carried, flow.weights)
    for x in sim.states[-1]:
        labels = oracles.cluster_labels(x.tolist(), 1e-3)
        assert torch.equal(x, x[labels])  # to the bit
        assert len(set(labels)) < 12


def test_merges_of_merges(flows):
    """Tokens 1 and 2 meet first, then 0 joins them, then 3."""
    x0 = circle(0.0, 0.4, 0.5, 1.5)
    sim = hs.integrate(hs.SA(beta=1.0), x0, [0, 8.0], merge=0.02)
    assert torch.equal(sim.states[0], x0)
    history = [flow.weights[0].tolist() for flow, _ in flows if flow.weights is not None]
    steps = [row for k, row in enumerate(history) if k == 0 or row != history[k - 1]]
    assert steps == [[1, 2, 0, 1], [3, 0, 0, 1], [4, 0, 0, 0]]
    leaders = [flow.leader[0].tolist() for flow, _ in flows if flow.leader is not None]
    assert leaders[0] == [0, 1, 1, 3]
    assert [0, 0, 0, 3] in leaders
    assert leaders[-1] == [0, 0, 0, 0]
    assert torch.equal(sim.states[1], sim.states[1, :1].expand(4, 2))
    plain = hs.integrate(hs.SA(beta=1.0), x0, [8.0]).states[0]
    assert (sim.states[1] - plain).abs().max() <= 0.02


def test_a_chain_at_the_start_becomes_its_weighted_mean():
    x0 = circle(0.0, 0.009, 0.018, 2.0, 0.027)
    weights = torch.tensor([1.0, 2.0, 3.0, 1.0, 4.0], dtype=F64)
    start = hs.integrate(hs.SA(beta=1.0), x0, [0, 1.0], weights=weights, merge=0.01).states[0]
    (first, _), (second, _) = oracles.merge(x0.tolist(), weights.tolist(), 0.01)
    expected = torch.tensor([first, first, first, second, first], dtype=F64)
    torch.testing.assert_close(start, expected, rtol=0, atol=3e-16)
    assert len(start.unique(dim=0)) == 2


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "name"),
    [
        (hs.SA(beta=1.0, causal=True), "SA"),
        (hs.USA(beta=1.0, causal=True), "USA"),
        (hs.SA(beta=1.0, bias=torch.zeros(2, 2)), "SA"),
        (lambda x: x, "function"),
    ],
)
def test_tokens_that_cannot_be_exchanged_are_not_merged(field, name):
    with pytest.raises(hs.HelmscopeError, match=rf"^merge is 1e-09, but .*causal mask and bias.* {name}$"):
        hs.integrate(field, circle(0.0, 1.0), [1.0], merge=1e-9)


@pytest.mark.parametrize("merge", [-1e-9, float("nan"), float("inf"), "close"])
def test_bad_tolerance_is_refused(merge):
    with pytest.raises(hs.HelmscopeError, match=r"^merge is .*, but it must be a finite number >= 0$"):
        hs.integrate(hs.SA(beta=1.0), circle(0.0, 1.0), [1.0], merge=merge)


def test_tokens_are_merged_only_when_some_have_met(monkeypatch):
    """Looking for pairs in every step is cheap; merging is not."""
    calls = []
    merge = step_actions.merge_close
    monkeypatch.setattr(
        step_actions, "merge_close", lambda *arguments: calls.append(len(arguments[0])) or merge(*arguments)
    )
    hs.integrate(hs.SA(beta=1.0), circle(0.0, 0.5), [0, 1], merge=1e-3)
    assert calls == []
    hs.integrate(hs.SA(beta=1.0), circle(0.0, 0.5), [0, 20], merge=1e-3)
    assert calls == [1]
