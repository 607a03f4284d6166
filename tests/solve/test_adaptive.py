"""The adaptive stepper: printed trajectories, independent integrators, stiff flows, outcomes, batches to the bit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import helmscope as hs
from support import oracles

F64 = torch.float64


def circle(*angles: float) -> torch.Tensor:
    theta = torch.tensor(angles, dtype=F64)
    return torch.stack([theta.cos(), theta.sin()], -1)


def angles(x: torch.Tensor) -> list[float]:
    return torch.atan2(x[..., 1], x[..., 0]).tolist()


def scipy_states(velocity, x: torch.Tensor, times, rtol: float = 1e-12) -> torch.Tensor:
    """The states by scipy's DOP853 for a numpy velocity of one system."""
    shape = tuple(x.shape)
    solution = solve_ivp(
        lambda _, y: np.asarray(velocity(y.reshape(shape))).ravel(),
        (0, times[-1]),
        x.numpy().ravel(),
        method="DOP853",
        t_eval=times,
        rtol=rtol,
        atol=rtol / 100,
    )
    return torch.from_numpy(solution.y.T.reshape(len(times), *shape))


# Printed trajectories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "printed"),
    [
        (hs.SA(beta=0.0), [0.5245058382282, 1.070676004933, 1.904818156839]),
        (hs.SA(beta=1.0), [0.3598797260381, 0.9651958658084, 2.126154885955]),
        (hs.SA(beta=4.0), [0.1468479020748, 0.8720155093718, 2.479547596036]),
        (hs.USA(beta=1.0), [0.6655597608139, 1.003350417297, 1.831089821889]),
    ],
)
def test_three_printed_particles(field, printed):
    x0 = circle(0.0, 1.0, 2.5)
    default = hs.integrate(field, x0, [1.0]).states[-1]
    assert angles(default) == pytest.approx(printed, rel=0, abs=2e-10)  # measured 1.2e-10
    tight = hs.integrate(field, x0, [1.0], stepper=hs.DormandPrince(tol=1e-13)).states[-1]
    assert angles(tight) == pytest.approx(printed, rel=0, abs=6e-13)  # the last printed digit


@pytest.mark.parametrize(
    ("beta", "printed"),
    [
        (0.0, [0.16642910110803, 0.92634005738265, 0.99854924403838]),
        (1.0, [0.15184933554388, 0.91420701165418, 0.99828424862229]),
        (2.0, [0.12209825966576, 0.8801831087793, 0.99750262442]),
        (4.0, [0.035441398374468, 0.33298670234181, 0.95277484974288]),
        (9.0, [0.00024706197464466, 0.00074837828174087, 0.0012594985645506]),
    ],
)
def test_orthonormal_start_follows_the_printed_gamma(beta, printed):
    x0 = hs.Orthonormal(n=32, dim=32).sample(seed=0)
    states = hs.integrate(hs.SA(beta=beta), x0, [1, 3, 5]).states
    pairs = (states @ states.mT)[:, ~torch.eye(32, dtype=torch.bool)]
    assert (pairs - torch.tensor(printed, dtype=F64)[:, None]).abs().max() <= 4e-10  # measured 3.8e-10 at beta = 4


@pytest.mark.parametrize("field", [hs.SA(beta=1.7), hs.USA(beta=1.7), hs.USA(beta=4.0)])
def test_rate_near_a_cluster(field):
    """1 - <x_i, x_j> decays at 2 for SA and at 2 e^beta for USA."""
    rate = 2.0 if field.normalized else 2 * math.exp(field.beta)
    x0 = hs.VonMisesFisher(n=6, dim=3, kappa=1e3).sample(seed=0)
    unit = 2 / rate
    states = hs.integrate(field, x0, [9 * unit, 10 * unit], stepper=hs.DormandPrince(tol=1e-13)).states
    gap = hs.sphere.angle(states[:, 0], states[:, 1]).square() / 2
    assert (torch.log(gap[0] / gap[1]) / unit).item() == pytest.approx(rate, rel=2e-9)  # measured 1.1e-9


@pytest.mark.parametrize("field", [hs.SA, hs.USA])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_energy_is_monotone(field, sign):
    x0 = hs.Uniform(n=8, dim=3).sample(batch=4, seed=1)
    times = np.linspace(0, 3, 16).tolist()
    states = hs.integrate(field(beta=2.0, value=sign * torch.eye(3)), x0, times).states
    assert (sign * hs.interaction_energy(states, beta=2.0).diff(dim=0) > 0).all()


def test_repelled_tokens_reach_the_least_energy_of_three():
    x = hs.integrate(hs.SA(beta=1.0, value=-torch.eye(2)), circle(0.0, 1.0, 2.5), [100.0]).states[-1]
    assert hs.interaction_energy(x, beta=1.0).item() == pytest.approx(0.6552238579807187, rel=0, abs=2e-16)


# Independent integrators ----------------------------------------------------------------------------------------------


def _matrix(seed: int, size: int = 3) -> torch.Tensor:
    return torch.randn(size, size, dtype=F64, generator=torch.Generator().manual_seed(seed))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "repulsive": {"value": -torch.eye(3, dtype=F64)},
    "matrices": {"query_key": _matrix(1), "value": _matrix(2)},
    "bias": {"bias": _matrix(3, 5)},
    "all": {"query_key": _matrix(4), "value": _matrix(5), "bias": _matrix(6, 5), "causal": True},
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("field", "velocity", "beta"),
    [(hs.SA, oracles.sa_velocity, 1.0), (hs.SA, oracles.sa_velocity, 4.0), (hs.USA, oracles.usa_velocity, 1.0)],
)
def test_agrees_with_dop853_on_the_oracle(field, velocity, beta, options, weighted):
    x0 = hs.Uniform(n=5, dim=3).sample(seed=7)
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25], dtype=F64) if weighted else None
    states = hs.integrate(field(beta=beta, **options), x0, [0.4, 1.0], weights=weights).states
    listed = {name: given.tolist() if isinstance(given, torch.Tensor) else given for name, given in options.items()}
    listed["weights"] = None if weights is None else weights.tolist()
    expected = scipy_states(lambda x: velocity(x.tolist(), beta, **listed), x0, [0.4, 1.0], rtol=1e-11)
    assert (states - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-8, 1e-10, 1e-12])
def test_error_follows_the_tolerance(tol):
    x0 = hs.Uniform(n=6, dim=4).sample(seed=2)

    def velocity(x):
        kernel = np.exp(4 * x @ x.T)
        v = kernel @ x / kernel.sum(1, keepdims=True)
        return v - (x * v).sum(1, keepdims=True) * x

    expected = scipy_states(velocity, x0, [3.0], rtol=3e-14)
    error = (hs.integrate(hs.SA(beta=4.0), x0, [3.0], stepper=hs.DormandPrince(tol=tol)).states - expected).abs().max()
    assert tol / 100 <= error <= 2 * tol


# Stiff and huge rates -------------------------------------------------------------------------------------------------


def test_stiff_usa_finishes_without_help():
    """Rates of e^9 = 8,103 inside the clusters."""
    x0 = hs.Uniform(n=32, dim=3).sample(batch=2, seed=0)
    sim = hs.integrate(hs.USA(beta=9.0), x0, [0.1, 0.5])
    assert sim.outcome.ok
    assert str(sim.outcome) == "finished at t=0.5"

    def velocity(x):
        v = np.exp(9 * x @ x.T) @ x / len(x)
        return v - (x * v).sum(1, keepdims=True) * x

    for k, x in enumerate(x0):
        expected = scipy_states(velocity, x, [0.1, 0.5], rtol=1e-11)
        assert (sim.states[:, k] - expected).abs().max() <= 1e-9


@pytest.mark.parametrize(("beta", "dtype", "bound"), [(600.0, F64, 1e-9), (100.0, torch.float32, 2e-5)])
def test_usa_beyond_the_dtype_in_scaled_time(beta, dtype, bound):
    """In tau = t e^beta the flow is x' = P (1/n) sum e^{beta (<x_i, x_j> - 1)} x_j, of ordinary size."""
    x0 = hs.VonMisesFisher(n=5, dim=3, kappa=beta).sample(seed=1)

    def velocity(x):
        v = np.exp(beta * (x @ x.T - 1)) @ x / len(x)
        return v - (x * v).sum(1, keepdims=True) * x

    expected = scipy_states(velocity, x0, [0.5, 2.0])
    field = hs.USA(beta=beta)
    sim = hs.integrate(field, x0.to(dtype), [0.5 * math.exp(-beta), 2 * math.exp(-beta)], normalize=True)
    assert sim.outcome.ok
    assert (expected[0] - x0).abs().max() > 5e-3  # tokens do move
    assert (sim.states.to(F64) - expected).abs().max() <= bound


@pytest.mark.parametrize("field", [hs.SA(beta=4.0), hs.USA(beta=2.0)])
def test_float32(field):
    x0 = hs.Uniform(n=8, dim=3).sample(batch=3, seed=5)
    single = hs.integrate(field, x0.to(torch.float32), [1.0, 4.0], normalize=True)
    assert single.states.dtype == torch.float32
    assert single.outcome.ok
    double = hs.integrate(field, x0, [1.0, 4.0]).states
    assert (single.states.to(F64) - double).abs().max() <= 1e-4


# Every system has its own step ----------------------------------------------------------------------------------------


class Counted:
    """USA at beta = 9 as a plain callable that counts how often each kind of system is asked for."""

    def __init__(self) -> None:
        self.clustered = self.spread = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        near = (x[:, 0] * x[:, 1]).sum(-1) > 0.5
        self.clustered += int(near.sum())
        self.spread += int((~near).sum())
        return hs.USA(beta=9.0).velocity(x)


def test_relaxed_systems_do_not_wait_for_the_stiff_one():
    stiff, relaxed = circle(0.0, 0.1), circle(0.0, 2.0)
    alone, together = Counted(), Counted()
    hs.integrate(alone, relaxed, [0.02])
    hs.integrate(together, torch.stack([relaxed, stiff, relaxed]), [0.02])
    assert alone.clustered == 0
    assert together.spread == 2 * alone.spread  # as many evaluations as when nobody else is there
    assert together.clustered > 10 * alone.spread


# Outcomes -------------------------------------------------------------------------------------------------------------


def test_step_limit_names_the_remedy():
    x0 = torch.stack([circle(0.0, 2.0), circle(0.0, 1.0)])
    sim = hs.integrate(hs.USA(beta=6.0), x0, [1e-4, 0.5, 1.0], stepper=hs.DormandPrince(max_steps=30))
    done, stopped = sim.outcome.statuses
    assert (done, stopped) == (hs.types.Status.FINISHED, hs.types.Status.STEP_LIMIT)
    assert not sim.outcome.ok
    assert 1e-4 < sim.outcome.times[1] < 0.5
    text = str(sim.outcome)
    assert text.startswith(f"system 1 (of 0 to 1): step limit reached at t={sim.outcome.times[1]:.6g}: raise max_steps")
    assert sim.states[:, 0].isfinite().all()
    assert sim.states[0, 1].isfinite().all()
    assert sim.states[1:, 1].isnan().all()
    enough = hs.integrate(hs.USA(beta=6.0), x0, [1e-4, 0.5, 1.0], stepper=hs.DormandPrince(max_steps=30_000))
    assert enough.outcome.ok
    assert torch.equal(enough.states[0], sim.states[0])


def test_velocity_that_is_not_finite():
    def bad(x):  # NaN for systems whose first token points up
        return torch.where(x[:, :1, 1:] > 0.5, torch.nan, 1.0) * x.flip(-1)

    sim = hs.integrate(bad, torch.stack([circle(0.0, 1.0), circle(1.0, 2.0)]), [0.0, 0.1])
    assert sim.outcome.statuses == (hs.types.Status.FINISHED, hs.types.Status.NOT_FINITE)
    assert str(sim.outcome).startswith("system 1 (of 0 to 1): velocity is not finite at t=0: lower beta")
    assert sim.states[1, 0].isfinite().all()
    assert sim.states[1, 1].isnan().all()


def test_velocity_that_blows_up_in_finite_time():
    """theta' = 1 / (2 (1 - theta)) reaches theta = 1 with infinite speed at t = 1."""

    def bad(x):
        theta = torch.atan2(x[..., 1:], x[..., :1])
        return torch.cat([-x[..., 1:], x[..., :1]], -1) / (2 * (1 - theta))

    sim = hs.integrate(bad, circle(0.0), [0.75, 2.0])
    assert sim.outcome.statuses == (hs.types.Status.STEP_TOO_SMALL,)
    assert sim.outcome.times[0] == pytest.approx(1.0, abs=1e-8)
    assert str(sim.outcome).startswith("step size fell below rounding at t=1: use float64, loosen tol")
    assert angles(sim.states[0]) == pytest.approx([0.5], rel=0, abs=1e-9)
    assert sim.states[1].isnan().all()


@pytest.mark.parametrize("tol", [0.0, -1e-9, math.nan, math.inf, "x"])
def test_bad_tolerance_is_refused(tol):
    with pytest.raises(hs.HelmscopeError, match=r"^tol is .*, but it must be a finite number > 0$"):
        hs.DormandPrince(tol=tol)


@pytest.mark.parametrize("max_steps", [0, -1, 2.5, math.nan, None])
def test_bad_step_limit_is_refused(max_steps):
    with pytest.raises(hs.HelmscopeError, match=r"^max_steps is .*, but it must be a whole number >= 1$"):
        hs.DormandPrince(max_steps=max_steps)


# To the bit -----------------------------------------------------------------------------------------------------------

FIELDS = {
    "SA": hs.SA(beta=4.0),
    "USA": hs.USA(beta=1.0),
    "causal": hs.SA(beta=1.0, causal=True),
    "matrices": hs.SA(beta=1.0, query_key=_matrix(1), value=_matrix(2)),
}
ADAPTIVE, FIXED = hs.DormandPrince(), [hs.RK4(h=0.2), hs.solve.GeodesicHeun(h=0.2), hs.solve.GeodesicRK4(h=0.2)]
CASES = [
    *itertools.product(["SA", "USA", "causal"], [2, 5, 32], [2, 3, 17], [ADAPTIVE], [None]),
    *itertools.product(["SA", "USA", "causal"], [5, 32], [3, 17], FIXED, [None]),
    *itertools.product(["matrices"], [2, 5, 32], [3], [ADAPTIVE, *FIXED], [None]),
    *itertools.product(["SA", "USA"], [5, 32], [2, 3], [ADAPTIVE, hs.RK4(h=0.2)], [0.2]),
]


def run(field, x, stepper, merge):
    """States with the batch in front, and event times."""
    events = [hs.solve.HittingTime(1.0), *([hs.solve.ClusterMerge(0.5)] if x.shape[-2] <= 5 else [])]
    sim = hs.integrate(FIELDS[field], x, [0.2, 0.5], stepper=stepper, events=events, merge=merge)
    return [sim.states.movedim(0, -3), *sim.event_times]


def same(given, expected):
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("field", "n", "dim", "stepper", "merge"), CASES)
def test_a_system_does_not_depend_on_its_batch(field, n, dim, stepper, merge):
    x0 = hs.Uniform(n=n, dim=dim).sample(batch=16, seed=n * dim)
    whole = run(field, x0, stepper, merge)
    assert whole[0].isfinite().all()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    same(run(field, x0[order], stepper, merge), [part[order] for part in whole])
    for k in (0, 5, 10, 15):
        same(run(field, x0[k : k + 1], stepper, merge), [part[k : k + 1] for part in whole])
    same(run(field, x0[3], stepper, merge), [part[3] for part in whole])


@pytest.mark.parametrize("field", FIELDS)
def test_a_batch_of_16_is_16_batches_of_one(field):
    x0 = hs.Uniform(n=5, dim=3).sample(batch=16, seed=0)
    alone = [run(field, x[None], ADAPTIVE, None) for x in x0]
    same([torch.cat(parts) for parts in zip(*alone, strict=True)], run(field, x0, ADAPTIVE, None))


def test_a_field_that_is_lost_midway_is_not_finite():
    """Beyond a latitude the velocity is NaN: the steps shrink in front of it, and the outcome says why."""
    x0 = torch.tensor([[1.0, 0.0]], dtype=torch.float64)

    def rising(x: torch.Tensor) -> torch.Tensor:
        velocity = torch.stack([-x[..., 1], x[..., 0]], -1)
        return torch.where(x[..., 1:] > 0.5, torch.nan, velocity)

    sim = hs.integrate(rising, x0, [0.1, 1.0])
    assert "not finite" in str(sim.outcome)
    assert sim.outcome.times[0] == pytest.approx(math.pi / 6, abs=1e-6)
    assert torch.isfinite(sim.states[0]).all()
    assert sim.states[1].isnan().all()
