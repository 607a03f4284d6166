"""Every stepper: its order over 20 seeds, one step by hand, the printed layer, the rates near a cluster, its grid."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import RK45, solve_ivp

import helmscope as hs
from helmscope.fields.field import as_field
from helmscope.solve.flow import Flow
from support import oracles

F64 = torch.float64
AT_0 = torch.zeros(1, 1, 1, dtype=F64)
MAPS = [hs.Layer, hs.solve.UnprojectedEuler]
DIVISIBLE = [
    hs.solve.ProjectedEuler,
    hs.solve.Heun,
    hs.RK4,
    hs.solve.GeodesicEuler,
    hs.solve.GeodesicHeun,
    hs.solve.GeodesicRK4,
]
FIXED = DIVISIBLE + MAPS
ORDERS = {
    hs.solve.ProjectedEuler: 1,
    hs.solve.GeodesicEuler: 1,
    hs.Layer: 1,
    hs.solve.UnprojectedEuler: 1,
    hs.solve.Heun: 2,
    hs.solve.GeodesicHeun: 2,
    hs.RK4: 4,
    hs.solve.GeodesicRK4: 4,
    hs.DormandPrince: 5,
}
# steps over t = 1: few enough that the error stands above rounding, many enough that its leading term rules
# in the asymptotic regime, and above rounding
STEPS = {1: (128, 256), 2: (64, 128), 4: (24, 48), 5: (40, 80)}


def circle(*angles: float) -> torch.Tensor:
    theta = torch.tensor(angles, dtype=F64)
    return torch.stack([theta.cos(), theta.sin()], -1)


def advance(stepper, field, x: torch.Tensor, h: float) -> torch.Tensor:
    return stepper(h=h).step(Flow(as_field(field)), x[None], torch.full((1, 1, 1), h, dtype=F64), AT_0)[0]


# Order ----------------------------------------------------------------------------------------------------------------


@functools.cache
def seeds() -> torch.Tensor:
    return torch.stack([hs.Uniform(n=16, dim=8).sample(seed=seed) for seed in range(20)])


@functools.cache
def reference(beta: float, normalized: bool) -> torch.Tensor:
    """The states of every seed at t = 1 by scipy's DOP853, on the field written in numpy."""

    def velocity(_, flat):
        x = flat.reshape(16, 8)
        kernel = np.exp(beta * x @ x.T)
        v = kernel @ x / (kernel.sum(1, keepdims=True) if normalized else len(x))
        return (v - (x * v).sum(1, keepdims=True) * x).ravel()

    ends = [
        solve_ivp(velocity, (0, 1), x.numpy().ravel(), method="DOP853", rtol=2.3e-14, atol=1e-17).y[:, -1]
        for x in seeds()
    ]
    return torch.tensor(np.stack(ends)).reshape(20, 16, 8)


def at_one(stepper, field, steps: int) -> torch.Tensor:
    """All seeds at t = 1 after so many equal steps."""
    x = seeds()
    if stepper is not hs.DormandPrince:
        return hs.integrate(field, x, [1.0], stepper=stepper(h=1 / steps)).states[-1]
    flow, h = Flow(as_field(field)), torch.full((20, 1, 1), 1 / steps, dtype=F64)
    first = flow.displacement(x, h, 0 * h)
    for k in range(steps):
        x, first, _ = hs.DormandPrince().attempt(flow, x, h, k * h, first)
    return x


@pytest.mark.parametrize("field", [hs.SA(beta=4.0), hs.USA(beta=1.0)], ids=["SA", "USA"])
@pytest.mark.parametrize("stepper", ORDERS)
def test_order_over_20_seeds(stepper, field):
    assert stepper.order == ORDERS[stepper]
    exact = reference(field.beta, field.normalized)
    coarse, fine = (24, 48) if (stepper, field.normalized) == (hs.DormandPrince, True) else STEPS[stepper.order]
    errors = [torch.linalg.vector_norm(at_one(stepper, field, k) - exact, dim=(-2, -1)) for k in (coarse, fine)]
    slopes = torch.log(errors[0] / errors[1]) / math.log(fine / coarse)
    assert abs(slopes.mean() - stepper.order) <= 0.1  # measured 0.068 for DormandPrince, 0.013 for the others
    # every seed; measured 0.152 for DormandPrince, 0.020 for the others
    assert (slopes - stepper.order).abs().max() <= (0.2 if stepper is hs.DormandPrince else 0.1)


# One step by hand -----------------------------------------------------------------------------------------------------

TURN = np.array([[0.3, -0.9, 0.2], [0.5, 0.1, -0.7], [-0.4, 0.8, 0.6]])
START = hs.Uniform(n=4, dim=3).sample(seed=3)
H = 0.3


def plain(x: torch.Tensor) -> torch.Tensor:
    """A field with no symmetry to hide behind, and defined off the sphere as well as on it."""
    return x @ torch.from_numpy(TURN).mT + x.mean(-2, keepdim=True)


def speed(x: np.ndarray) -> np.ndarray:
    v = x @ TURN.T + x.mean(0)
    return v - (x * v).sum(1, keepdims=True) * x


def unit(y: np.ndarray) -> np.ndarray:
    return y / np.sqrt((y * y).sum(1, keepdims=True))


def along(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    t = np.sqrt((u * u).sum(1, keepdims=True))
    return np.cos(t) * x + np.sin(t) / t * u


def chart_speed(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """w with d/ds exp_x(u + s w) = velocity at exp_x(u): a linear system for each token, in the tangent plane at x."""
    v = speed(along(x, u))
    result = []
    for x_i, u_i, v_i in zip(x, u, v, strict=True):
        t = math.sqrt(u_i @ u_i)
        turn = -math.sin(t) * x_i + (math.cos(t) / t - math.sin(t) / t**2) * u_i
        differential = np.outer(turn, u_i / t) + math.sin(t) / t * np.eye(3)
        result.append(np.linalg.lstsq(np.vstack([differential, x_i]), np.append(v_i, 0.0), rcond=None)[0])
    return np.array(result)


def euler(x):
    return unit(x + H * speed(x))


def heun(x):
    k1 = speed(x)
    return unit(x + H / 2 * (k1 + speed(unit(x + H * k1))))


def rk4(x):
    k1 = speed(x)
    k2 = speed(unit(x + H / 2 * k1))
    k3 = speed(unit(x + H / 2 * k2))
    return unit(x + H / 6 * (k1 + 2 * k2 + 2 * k3 + speed(unit(x + H * k3))))


def geodesic_euler(x):
    return along(x, H * speed(x))


def geodesic_heun(x):
    k1 = speed(x)
    return along(x, H / 2 * (k1 + chart_speed(x, H * k1)))


def geodesic_rk4(x):
    k1 = speed(x)
    k2 = chart_speed(x, H / 2 * k1)
    k3 = chart_speed(x, H / 2 * k2)
    return along(x, H / 6 * (k1 + 2 * k2 + 2 * k3 + chart_speed(x, H * k3)))


@pytest.mark.parametrize(
    ("stepper", "by_hand"),
    [
        (hs.solve.ProjectedEuler, euler),
        (hs.solve.Heun, heun),
        (hs.RK4, rk4),
        (hs.solve.GeodesicEuler, geodesic_euler),
        (hs.solve.GeodesicHeun, geodesic_heun),
        (hs.solve.GeodesicRK4, geodesic_rk4),
    ],
)
def test_one_step_by_hand(stepper, by_hand):
    expected = torch.from_numpy(by_hand(START.numpy()))
    torch.testing.assert_close(advance(stepper, plain, START, H), expected, rtol=0, atol=2e-15)


def test_dormand_prince_attempt_by_the_tableau_of_scipy():
    x = START.numpy()
    k = [speed(x)]
    for row in RK45.A[1:]:
        k.append(speed(unit(x + H * np.tensordot(row[: len(k)], k, 1))))
    states = unit(x + H * np.tensordot(RK45.B, k, 1))
    k.append(speed(states))
    h = torch.full((1, 1, 1), H, dtype=F64)
    trial = hs.DormandPrince().attempt(Flow(as_field(plain)), START[None], h, AT_0, H * torch.from_numpy(k[0])[None])
    torch.testing.assert_close(trial.states[0], torch.from_numpy(states), rtol=0, atol=1e-15)
    torch.testing.assert_close(trial.last[0], torch.from_numpy(H * k[-1]), rtol=0, atol=1e-15)
    error = torch.from_numpy(-H * np.tensordot(RK45.E, k, 1))  # scipy takes the orders in the other order
    torch.testing.assert_close(trial.error[0], error, rtol=0, atol=1e-16)


@pytest.mark.parametrize("stepper", MAPS)
@pytest.mark.parametrize(
    ("field", "ambient"), [(hs.SA(beta=2.0), oracles.sa_ambient), (hs.USA(beta=2.0), oracles.usa_ambient)]
)
def test_maps_add_the_unprojected_sum(stepper, field, ambient):
    x = START.numpy()
    expected = torch.from_numpy(unit(x + H * np.array(ambient(x.tolist(), 2.0))))
    torch.testing.assert_close(advance(stepper, field, START, H), expected, rtol=0, atol=1e-15)


def test_the_printed_layer_and_its_energies():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8]], dtype=F64)
    sim = hs.integrate(hs.SA(beta=1.0), x, [0, 1], stepper=hs.Layer())
    printed = [
        [0.977417347820763, 0.211318073479352],
        [-0.032094863198758, 0.999484827176608],
        [-0.445633128164676, 0.895215680761997],
    ]
    torch.testing.assert_close(sim.states[1], torch.tensor(printed, dtype=F64), rtol=0, atol=1e-15)
    energies = hs.interaction_energy(sim.states, beta=1.0).tolist()
    assert energies == pytest.approx([0.872419478586118, 0.9486713872291129], rel=0, abs=1e-15)


def test_several_layers_are_the_layer_repeated():
    x = hs.Uniform(n=5, dim=3).sample(seed=1)
    sim = hs.integrate(hs.SA(beta=2.0), x, [1, 2, 3], stepper=hs.Layer())
    expected = x.tolist()
    for state in sim.states:
        expected = oracles.layer(expected, 2.0)
        torch.testing.assert_close(state, torch.tensor(expected, dtype=F64), rtol=0, atol=2e-15)


# Near a cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stepper", "rate", "printed"),
    [
        (hs.solve.UnprojectedEuler, math.log(1.1) / 0.1, 0.953),
        (hs.Layer, math.log(1.1) / 0.1, 0.953),
        (hs.solve.ProjectedEuler, -math.log(0.9) / 0.1, 1.054),
        (hs.RK4, -math.log(1 - 0.1 + 0.1**2 / 2 - 0.1**3 / 6 + 0.1**4 / 24) / 0.1, 1.000),
    ],
)
def test_contraction_of_a_cluster_per_unit_of_time(stepper, rate, printed):
    """The flow of SA contracts at rate 1; the scheme of the published pictures at 0.953 with its step 0.1."""
    x = circle(0.0, 1e-5, 3e-5, -2e-5)
    sim = hs.integrate(hs.SA(beta=4.0), x, [0, 1], stepper=stepper(h=0.1))
    apart = hs.sphere.angle(sim.states[:, 0], sim.states[:, 2])
    measured = torch.log(apart[0] / apart[1]).item()
    assert measured == pytest.approx(rate, rel=0, abs=1e-8)
    assert round(measured, 3) == printed


# The sphere and the grid ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepper", FIXED)
@pytest.mark.parametrize("field", [hs.SA(beta=4.0), hs.USA(beta=2.0)])
def test_tokens_stay_on_the_sphere(stepper, field):
    sim = hs.integrate(field, hs.Uniform(n=8, dim=5).sample(batch=3, seed=2), [1, 5], stepper=stepper(h=0.25))
    assert sim.outcome.ok
    assert (
        torch.linalg.vector_norm(sim.states, dim=-1) - 1
    ).abs().max() <= 4.5e-16  # two units in the last place; measured 3.4e-16


@pytest.mark.parametrize("stepper", MAPS)
def test_a_map_refuses_times_off_its_grid(stepper):
    x = circle(0.0, 1.0)
    assert hs.integrate(hs.SA(beta=1.0), x, [0, 0.1, 0.3, 10], stepper=stepper(h=0.1)).outcome.ok
    for times in ([0.25], [0.1, 0.35], [0.05, 0.1]):
        with pytest.raises(hs.HelmscopeError, match=r"^times holds 0\.[0-3]5, .*multiples of .*h=0\.1$"):
            hs.integrate(hs.SA(beta=1.0), x, times, stepper=stepper(h=0.1))


@pytest.mark.parametrize("stepper", DIVISIBLE)
def test_an_interval_is_cut_into_equal_steps_of_at_most_h(stepper):
    x = hs.Uniform(n=4, dim=3).sample(seed=0)
    given = hs.integrate(hs.SA(beta=1.0), x, [1.0, 1.2, 1.45], stepper=stepper(h=0.3)).states
    first = hs.integrate(hs.SA(beta=1.0), x, [1.0], stepper=stepper(h=0.25)).states[0]
    assert torch.equal(given[0], first)
    assert torch.equal(given[1], advance(stepper, hs.SA(beta=1.0), first, 1.2 - 1.0))
    assert torch.equal(given[2], advance(stepper, hs.SA(beta=1.0), given[1], 1.45 - 1.2))


@pytest.mark.parametrize("stepper", FIXED)
@pytest.mark.parametrize("h", [0.0, -0.1, math.nan, math.inf, "0.1x", None])
def test_bad_step_size_is_refused(stepper, h):
    with pytest.raises(hs.HelmscopeError, match=r"^h is .*, but it must be a finite number > 0$"):
        stepper(h=h)


@pytest.mark.parametrize("stepper", MAPS)
def test_a_map_adds_a_plain_function_as_it_is(stepper):
    x, push = circle(0.0, 1.0), torch.tensor([0.3, 0.4], dtype=F64)
    after = hs.integrate(lambda x: push.expand_as(x), x, [0.5], stepper=stepper(h=0.5)).states[-1]
    torch.testing.assert_close(after, torch.nn.functional.normalize(x + 0.5 * push, dim=-1), rtol=0, atol=1e-15)
