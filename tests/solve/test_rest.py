"""A run whose state has stopped moving ends at once; one that is merely slow does not."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.field import as_field
from helmscope.solve import adaptive
from helmscope.solve.flow import Flow
from helmscope.solve.rest import MAX_COORDINATES, resting_state

F64 = torch.float64
AT_0 = torch.zeros(1, 1, 1, dtype=F64)
I3 = torch.eye(3, dtype=F64)
STOPPED, FINISHED = hs.types.Status.AT_REST, hs.types.Status.FINISHED


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def start(n: int = 8, dim: int = 3) -> torch.Tensor:
    return hs.Uniform(n=n, dim=dim).sample(seed=0)


def two_clusters(gamma: float, size: int = 4) -> torch.Tensor:
    """Two clusters of ``size`` equal tokens with the inner product gamma."""
    pair = torch.tensor([[1.0, 0.0, 0.0], [gamma, math.sqrt(1 - gamma**2), 0.0]], dtype=F64)
    return pair.repeat_interleave(size, 0)


MLP = hs.MLP(w_in=normal(16, 3), w_out=normal(3, 16, seed=1), b_in=normal(16, seed=2))
FIELDS = {
    "SA": hs.SA(beta=4.0),
    "USA": hs.USA(beta=2.0),
    "causal": hs.SA(beta=1.0, causal=True),
    "repulsive": hs.SA(beta=1.0, value=-I3),
    "repulsive, causal": hs.SA(beta=1.0, causal=True, value=-I3),
    "matrices": hs.SA(beta=1.0, query_key=normal(3, 3), value=normal(3, 3, seed=1)),
    "heads": hs.MultiHead([hs.SA(beta=1.0), hs.SA(beta=4.0)]),
    "MLP": MLP,
    "block": hs.Block(hs.SA(beta=1.0), hs.MLP(w_in=MLP.w_in, w_out=0.1 * MLP.w_out, b_in=MLP.b_in)),
    "callable": lambda x: torch.tensor([1.0, 0.0, 0.0], dtype=x.dtype).expand_as(x),
}


def test_a_cluster_ends_its_run_at_once():
    """At rate 1 an explicit stepper would take 300,000 steps to t = 10^6."""
    asked = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return hs.SA(beta=4.0).velocity(x)

    sim = hs.integrate(counted, start(), [1.0, 1e3, 1e6])
    assert sim.outcome.statuses == (STOPPED,)
    assert sim.outcome.ok
    assert sum(asked) < 3_000
    assert str(sim.outcome).startswith(f"the state has stopped moving at t={sim.outcome.times[0]:.6g}, and is held")
    assert sim.outcome.times[0] < 1e3
    assert torch.equal(sim.states[1], sim.states[2])
    assert hs.geometry.linkage.pairwise_angles(sim.states[2]).max() <= 1e-15


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
def test_the_state_that_is_held_is_where_the_flow_ends(field, dtype, monkeypatch):
    x0 = start(4).to(dtype)
    sim = hs.integrate(field, x0, [1e5], normalize=True)
    assert sim.outcome.statuses == (STOPPED,)
    x = sim.states[-1].to(F64)
    moved = Flow(as_field(field)).displacement(x[None], torch.ones(1, 1, 1, dtype=F64), AT_0)[0]
    speed = hs.sphere.project(x, moved).norm(dim=-1).max()
    assert speed <= (1e-14 if dtype == F64 else 1e-6)
    monkeypatch.setattr(adaptive, "FIRST_REST_CHECK", -1)  # never
    worked = hs.integrate(field, x0, [sim.outcome.times[0] + 40.0], normalize=True)
    assert worked.outcome.statuses == (FINISHED,)
    assert (worked.states[-1] - sim.states[-1]).abs().max() <= (2e-9 if dtype == F64 else 2e-5)


def test_without_rest_results_are_bitwise_unchanged(monkeypatch):
    x0, times = hs.Uniform(n=8, dim=3).sample(batch=3, seed=0), [1.0, 30.0, 600.0]
    looked = hs.integrate(hs.SA(beta=4.0), x0, times)
    assert set(looked.outcome.statuses) == {FINISHED}
    monkeypatch.setattr(adaptive, "FIRST_REST_CHECK", -1)  # never
    assert torch.equal(looked.states, hs.integrate(hs.SA(beta=4.0), x0, times).states)


def test_systems_rest_one_by_one():
    """Each at its own time, as if alone; the saddle goes on to its last time."""
    x0 = torch.stack([start(2), torch.stack([I3[0], -I3[0]]), hs.Uniform(n=2, dim=3).sample(seed=1)])
    sim = hs.integrate(hs.SA(beta=1.0), x0, [2.0, 1e5])
    assert sim.outcome.statuses == (STOPPED, FINISHED, STOPPED)
    assert torch.equal(sim.states[1, 1], x0[1])
    for k in (0, 2):
        alone = hs.integrate(hs.SA(beta=1.0), x0[k], [2.0, 1e5])
        assert alone.outcome.times[0] == pytest.approx(sim.outcome.times[k], rel=1e-9)
        assert (alone.states - sim.states[:, k]).abs().max() <= 1e-14


# Slow is not at rest --------------------------------------------------------------------------------------------------


def rests(field: object, x: torch.Tensor, duration: float, *, h: float = 1.0, tol: float = 1e-9) -> bool:
    return resting_state(Flow(as_field(field)), x[None], h, duration=duration, tol=tol) is not None


@pytest.mark.parametrize("beta", [9.0, 16.0, 25.0])
@pytest.mark.parametrize("gamma", [-0.5, 0.0, 0.5])
def test_metastable_clusters_are_not_at_rest(beta, gamma):
    """They move by e^{beta (gamma - 1)} in a unit of time, and within each cluster everything contracts at rate 1."""
    time = hs.theory.metastable_time(hs.SA(beta=beta), gamma0=gamma)
    assert not rests(hs.SA(beta=beta), two_clusters(gamma), time)
    assert not rests(hs.SA(beta=beta), two_clusters(gamma), time / 1e3)


def test_how_long_clusters_rest_depends_on_how_long_one_waits():
    """At beta = 30 they move by e^-30 = 9e-14 in a unit of time, at beta = 60 by 9e-27."""
    assert rests(hs.SA(beta=30.0), two_clusters(0.0), 1e3)
    assert not rests(hs.SA(beta=30.0), two_clusters(0.0), 1e5)
    assert rests(hs.SA(beta=60.0), two_clusters(0.0), 1e5)
    assert not rests(hs.SA(beta=60.0), two_clusters(0.0), 1e19)


@pytest.mark.parametrize("off", [0.0, 1e-14, 1e-10])
def test_a_saddle_is_not_a_place_to_rest(off):
    """Two antipodal clusters part from it at the rate e^{-2 beta} or so."""
    x = two_clusters(-1.0)
    x[4:] = hs.sphere.retract(x[4:] + off * I3[2])
    assert not rests(hs.SA(beta=2.0), x, 1e4)
    assert rests(hs.SA(beta=2.0, value=-I3), x[[0, 4]], 1e5)


def test_a_start_beside_a_saddle_gets_away():
    x0 = torch.stack([I3[0], hs.sphere.retract(-I3[0] + 1e-9 * I3[1])])
    sim = hs.integrate(hs.SA(beta=3.0), x0, [100.0, 1e5])
    assert sim.outcome.statuses == (STOPPED,)
    assert hs.sphere.angle(sim.states[0, 0], sim.states[0, 1]) > 3
    assert hs.sphere.angle(sim.states[1, 0], sim.states[1, 1]) <= 1e-15


def test_an_algebraic_decay_is_not_at_rest_before_its_time():
    """theta' = -theta^3: at theta = 0.001 it moves by 1e-9 a unit of time, and contracts at 3e-6."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        return -(x[..., 1:] ** 3) * torch.stack([-x[..., 1], x[..., 0]], -1)

    def at(theta: float) -> torch.Tensor:
        return torch.tensor([[math.cos(theta), math.sin(theta)]], dtype=F64)

    assert not rests(slow, at(1e-3), 1e3)
    assert rests(slow, at(1e-8), 1e6)


def test_a_kink_is_not_differentiated():
    """theta' = |theta| at theta = 0: the mean of both slopes is 0, and yet a token above leaves."""

    def bent(x: torch.Tensor) -> torch.Tensor:
        return x[..., 1:].abs() * torch.stack([-x[..., 1], x[..., 0]], -1)

    assert not rests(bent, torch.tensor([[1.0, 0.0]], dtype=F64), 1e3)


def test_a_turning_state_is_not_at_rest():
    """V = I + small turn: the cluster drifts by 1e-12 a unit of time."""
    turn = torch.zeros(3, 3, dtype=F64)
    turn[0, 1], turn[1, 0] = 1e-12, -1e-12
    x = two_clusters(0.0)[:4]
    assert rests(hs.SA(beta=1.0, value=I3), x, 1e5)
    assert not rests(hs.SA(beta=1.0, value=I3 + turn), x, 1e5)


# Where the derivative is not formed -----------------------------------------------------------------------------------


def test_attracting_tokens_stay_in_their_hull_however_many_and_however_long():
    n = MAX_COORDINATES
    x = hs.VonMisesFisher(n=n, dim=3, kappa=1e20).sample(seed=0)
    field = hs.SA(beta=4.0)
    assert torch.equal(resting_state(Flow(as_field(field)), x[None], 1.0, duration=1e12, tol=1e-8)[0], x)
    assert not rests(field, x, 1e12, tol=1e-11)
    assert not rests(hs.SA(beta=4.0, value=-I3), x, 1e12, tol=1e-8)
    assert not rests(hs.SA(beta=4.0, value=normal(3, 3)), x, 1e12, tol=1e-8)


def test_a_discontinuous_field_has_no_derivative():
    x = two_clusters(0.0)
    assert not rests(hs.Hardmax(query_key=-I3), x, 1e3)


# What must not be cut short -------------------------------------------------------------------------------------------


def test_events_to_come_keep_a_run_going(monkeypatch):
    monkeypatch.setattr(adaptive, "MIN_STEPS_SAVED", 50)
    x0, late = start(4), hs.solve.HittingTime(1e-30)
    field, times = hs.SA(beta=1.0), [400.0]
    assert hs.integrate(field, x0, times, events=[hs.solve.HittingTime(1e-3)]).outcome.statuses == (STOPPED,)
    assert hs.integrate(field, x0, times, events=[hs.solve.HittingTime(1e-3), late]).outcome.statuses == (FINISHED,)


def test_a_gradient_goes_through_all_steps(monkeypatch):
    """A start beside an equilibrium rests, what a shift of it does is still to come: e^{-t}."""
    monkeypatch.setattr(adaptive, "FIRST_REST_CHECK", 1)
    monkeypatch.setattr(adaptive, "MIN_STEPS_SAVED", 0)

    def down(x: torch.Tensor) -> torch.Tensor:
        return -x[..., 1:] * torch.stack([-x[..., 1], x[..., 0]], -1)

    x = torch.tensor([[1.0, 1e-12]], dtype=F64)
    assert hs.integrate(down, x, [10.0]).outcome.statuses == (STOPPED,)
    x.requires_grad_(True)
    sim = hs.integrate(down, x, [1.0])
    assert sim.outcome.statuses == (FINISHED,)
    (slope,) = torch.autograd.grad(sim.states[-1, 0, 1], x)
    assert slope[0, 1].item() == pytest.approx(math.exp(-1.0), rel=1e-2)


def test_noise_never_rests():
    noise = hs.noise.IsotropicNoise(nu=1e-12)
    sim = hs.integrate(hs.SA(beta=1.0), start(2), [2e3], noise=noise, stepper=hs.solve.EulerMaruyama(1.0))
    assert sim.outcome.statuses == (FINISHED,)


def test_a_resumed_run_and_a_phase_diagram_take_rest_for_an_end():
    sim = hs.integrate(hs.SA(beta=1.0), start(4), [1.0, 1e5])
    again = sim.resume(depth=1, states=sim.trajectory.states[1])
    assert again.outcome.ok
    seen = hs.phase_diagram(hs.SA, betas=[1], times=[1e5], start=hs.Uniform(n=4, dim=3), samples=4)
    assert seen.probability.item() == 1
    assert seen.lost_samples.item() == 0
