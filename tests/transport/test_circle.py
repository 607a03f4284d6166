"""Transport on the circle: closed forms, POT's linear program, all shifts, and certificates for long clouds."""

import math

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.transport import circle, line
from helmscope.transport.circle import LONG, circle_plan
from helmscope.transport.line import RADIX_LENGTH
from helmscope.transport.plan import with_gradient
from support.planting import Plant, outcome
from support.refusal import refused
from support.transport_oracles import central_difference, costs, on_circle, pot_cost, random_weights, unit_cloud

wasserstein = hs.transport.wasserstein


def random_problem(seed: int) -> tuple[torch.Tensor, ...]:
    """Two small clouds, with equal or random weights, some of them 0, and some points twice."""
    rng = np.random.default_rng(seed)
    n, m = rng.integers(1, 9, 2)
    m = n if seed % 3 == 0 else m
    x, y = unit_cloud(n, 2, 2 * seed), unit_cloud(m, 2, 2 * seed + 1)
    if seed % 5 == 0:
        x[-1], y[-1] = x[0], x[0]
    if seed % 2:
        return x, y, None, None
    a, b = random_weights(n, seed), random_weights(m, seed + 1)
    if seed % 4 == 0 and n > 1:
        a[0] = 0
        a /= a.sum()
    return x, y, a, b


def test_pot_agrees_on_two_hundred_random_problems() -> None:
    worst = 0.0
    for seed in range(200):
        x, y, a, b = random_problem(seed)
        p = (1.0, 1.5, 2.0, 3.0)[seed // 3 % 4]
        exact = pot_cost(costs(x, y, p, "geodesic"), a, b)
        worst = max(worst, abs(float(wasserstein(x, y, a, b, p=p)) ** p - exact))
    assert worst < 1e-9


def test_plans_are_certified_by_their_potentials() -> None:
    for seed in range(40):
        x, y, a, b = random_problem(seed)
        p = (1.0, 1.5, 2.0, 3.0)[seed % 4]
        plan = circle_plan(x, y, a, b, p=p)
        f, g = plan.potentials
        c = torch.from_numpy(costs(x, y, p, "geodesic"))
        assert (f[:, None] + g - c).max() < 1e-7, seed  # arccos loses half of the digits at coincident points
        assert abs(plan.duality_gap) < 1e-12
        assert max(plan.marginal_errors) < 1e-14 * (len(x) + len(y))
        assert plan.ok
        assert len(plan.entries[0]) <= len(x) + len(y)
        assert abs(float((plan.matrix * c).sum() - plan.value)) < 1e-7
        assert torch.allclose(plan.matrix.sum(1), plan.clouds.a, atol=1e-14)


def test_equal_masses_agree_with_all_shifts() -> None:
    for seed in range(20):
        x, y = unit_cloud(11, 2, seed), unit_cloud(11, 2, seed + 100)
        s, t = (np.sort(np.arctan2(points[:, 1], points[:, 0])) for points in (x.numpy(), y.numpy()))
        lifted = np.concatenate([t - 2 * np.pi, t, t + 2 * np.pi])
        for p in (1.0, 2.0, 2.5):
            best = min((np.abs(s - lifted[k : k + 11]) ** p).mean() for k in range(23))
            assert abs(float(wasserstein(x, y, p=p)) ** p - best) < 1e-13


def test_w1_is_the_integral_around_the_level_median() -> None:
    """W_1 = int |F - G - c| dt with the weighted median c of F - G [Hundrieser, Klatt and Munk 2022]."""
    for seed in range(20):
        x, y, a, b = unit_cloud(7, 2, seed), unit_cloud(5, 2, 50 + seed), random_weights(7, seed), random_weights(5, 9)
        t = torch.atan2(torch.cat([x, y])[:, 1], torch.cat([x, y])[:, 0])
        t, order = t.sort()
        height = torch.cat([a, -b])[order].cumsum(0)
        length = torch.diff(t, append=t[:1] + 2 * math.pi)
        integrals = [float((length * (height - c).abs()).sum()) for c in height]
        assert abs(float(wasserstein(x, y, a, b, p=1)) - min(integrals)) < 1e-12


@pytest.mark.parametrize("p", [1.0, 1.7, 2.0, 4.0])
def test_closed_forms(p: float) -> None:
    points = on_circle(torch.tensor([0.3, 1.5, 0.3 + math.pi], dtype=torch.float64))
    assert wasserstein(points[:1], points[1:2], p=p) == pytest.approx(1.2, abs=1e-15)
    assert wasserstein(points[:1], points[2:], p=p) == pytest.approx(math.pi, abs=1e-15)  # antipodal
    n = 10
    even = on_circle(2 * math.pi * torch.arange(n, dtype=torch.float64) / n)
    turned = on_circle(2 * math.pi * torch.arange(n, dtype=torch.float64) / n + 0.2)
    assert wasserstein(even, turned, p=p) == pytest.approx(0.2, abs=1e-14)
    arc = torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 2.5  # across the cut at pi
    assert wasserstein(on_circle(arc), on_circle(arc + 0.9), p=p) == pytest.approx(0.9, abs=1e-13)


def test_distance_of_even_points_to_one_point() -> None:
    n = 1000
    even = on_circle((2 * torch.arange(n, dtype=torch.float64) + 1 - n) * math.pi / n)
    pole = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert hs.w2(even, pole) == pytest.approx(math.sqrt(math.pi**2 / 3 * (1 - 1 / n**2)), rel=1e-14)
    assert wasserstein(even, pole, p=1) == pytest.approx(math.pi / 2, rel=1e-14)


def test_a_cloud_has_distance_zero_to_itself() -> None:
    x, a = unit_cloud(50, 2, 0), random_weights(50, 0)
    shuffle = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert hs.w2(x, x[shuffle]) == 0
    assert hs.w2(x, x[shuffle], a, a[shuffle]) < 1e-15  # the rounding of angles beyond one turn
    assert hs.w2(x, torch.cat([x, x])) < 1e-8  # half of every mass: the levels differ by rounding


@pytest.mark.parametrize("weighted", [False, True])
def test_tiny_distances_keep_their_digits(weighted: bool) -> None:
    angles = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    move = 1e-7 * torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a = random_weights(40, 0) if weighted else torch.full((40,), 1 / 40, dtype=torch.float64)
    distance = hs.w2(on_circle(angles), on_circle(angles + move), a, a)
    assert distance == pytest.approx(float((a * move**2).sum().sqrt()), rel=1e-8)


def test_batches_are_bitwise_the_same_systems() -> None:
    x, y = unit_cloud(60, 2, 0).reshape(3, 20, 2), unit_cloud(12, 2, 1)
    weights = torch.stack([random_weights(12, seed) for seed in range(3)])
    for p in (2.0, 1.5):
        together = wasserstein(x, y, None, weights, p=p)
        assert together.shape == (3,)
        for k in range(3):
            assert torch.equal(together[k], wasserstein(x[k], y, None, weights[k], p=p))
    equal = hs.w2(x, x.flip(0))
    assert all(torch.equal(equal[k], hs.w2(x[k], x[2 - k])) for k in range(3))


def test_float32_is_computed_in_float64() -> None:
    x, y, a = unit_cloud(30, 2, 0).float(), unit_cloud(20, 2, 1).float(), random_weights(30, 0).float()
    single = hs.w2(x, y, a)
    assert single.dtype == torch.float32
    assert single == hs.w2(x.double(), y.double(), a.double()).float()
    assert abs(circle_plan(x, y, a).duality_gap) < 1e-12


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_finite_differences(p: float, weighted: bool) -> None:
    n, m = (6, 9) if weighted else (8, 8)
    angles, other = (torch.rand(k, generator=torch.Generator().manual_seed(k), dtype=torch.float64) * 6 for k in (n, m))
    a, b = (random_weights(n, 0), random_weights(m, 1)) if weighted else (None, None)

    def distance(s: torch.Tensor, t: torch.Tensor = other, a: torch.Tensor | None = a) -> torch.Tensor:
        return wasserstein(on_circle(s), on_circle(t), a, b, p=p)

    s, t = angles.clone().requires_grad_(), other.clone().requires_grad_()
    by_x, by_y = torch.autograd.grad(distance(s, t), (s, t))
    for k in range(3):
        assert by_x[k] == pytest.approx(central_difference(distance, angles, torch.eye(n)[k]), abs=1e-7)
        along = central_difference(lambda t: distance(angles, t), other, torch.eye(m)[k])
        assert by_y[k] == pytest.approx(along, abs=1e-7)
    masses = (random_weights(n, 0) if weighted else torch.full((n,), 1 / n, dtype=torch.float64)).requires_grad_()
    (by_mass,) = torch.autograd.grad(distance(angles, a=masses), masses)
    direction = torch.zeros(n, dtype=torch.float64)
    direction[0], direction[3] = 1.0, -1.0
    if weighted:  # the masses have a common scale, which does not matter
        along = central_difference(lambda a: distance(angles, a=a), masses.detach(), direction)
        assert by_mass @ direction == pytest.approx(along, abs=1e-6)
        assert float(by_mass @ masses.detach()) == pytest.approx(0, abs=1e-12)
    else:  # equal masses are a kink: the gradient is between both one-sided derivatives
        h = 1e-7
        here = distance(angles, a=masses.detach())
        right, left = ((distance(angles, a=masses.detach() + k * h * direction) - here) / (k * h) for k in (1, -1))
        assert left - 1e-5 <= by_mass @ direction <= right + 1e-5 or right - 1e-5 <= by_mass @ direction <= left + 1e-5


def test_gradients_are_finite_where_points_coincide() -> None:
    x = unit_cloud(5, 2, 0).requires_grad_()
    for p in (1.0, 1.5, 2.0):
        (gradient,) = torch.autograd.grad(wasserstein(x, x.detach().clone(), p=p), x)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("size", [LONG, RADIX_LENGTH])
@pytest.mark.parametrize("p", [1.5, 2.0])
def test_long_clouds_are_certified(size: int, p: float) -> None:
    """Clouds that are located by their quantiles and sorted by keys; three clusters, so that quantiles jump."""
    rng = torch.Generator().manual_seed(0)
    center = torch.tensor([0.0, 2.0, 2.1])[torch.randint(3, (size,), generator=rng)]
    x = on_circle((center + 0.01 * torch.randn(size, generator=rng)).double())
    y = on_circle(torch.rand(size + 7, generator=rng, dtype=torch.float64) ** 2 * 6)
    plan = circle_plan(x, y, random_weights(size, 0), p=p)
    assert -1e-12 < plan.duality_gap < 1e-10 * float(plan.value)
    assert float(wasserstein(x, y, random_weights(size, 0), p=p)) ** p == pytest.approx(float(plan.value), rel=1e-12)
    f, g = (part[:: size // 50] for part in plan.potentials)
    pairs = hs.Geodesic().matrix(x[:: size // 50], y[:: size // 50]) ** p
    assert (f[:, None] + g - pairs).max() < 1e-9
    equal = circle_plan(x, y[:size], p=p)
    assert -1e-12 < equal.duality_gap < 1e-10 * float(equal.value)


def test_rotated_long_cloud() -> None:
    angles = torch.rand(RADIX_LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert hs.w2(on_circle(angles), on_circle(angles + 1)) == pytest.approx(1, abs=1e-13)


FAULTS = {
    "half the angle": Plant(lambda right, points: right(points) / 2, circle._angles),
    "a turn of pi": Plant(lambda right, points: right(points) % math.pi, circle._angles),
    "another power": Plant(lambda right, distance, p: right(distance, p + 1), line.power_of),
    "masses of x and y swapped": Plant(
        lambda right, x, y, first: line.staircase(~(path := right(x, y, first)).is_y, path.mass, first),
        line.merge_levels,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str) -> None:
    x, y, a, b = unit_cloud(6, 2, 0), unit_cloud(6, 2, 1), random_weights(6, 2), random_weights(6, 3)
    exact = pot_cost(costs(x, y, 2.0, "geodesic"), a, b) ** 0.5

    def agrees() -> bool:
        return abs(float(hs.w2(x, y, a, b)) - exact) < 1e-9

    assert agrees()
    assert outcome(FAULTS[name], agrees) == "seen"


@pytest.mark.parametrize("sign", [-1.0, 2.0])
def test_planted_gradients_are_seen(sign: float) -> None:
    angles = torch.tensor([0.1, 1.0, 2.5], dtype=torch.float64)
    y, masses = on_circle(angles + 0.7), random_weights(3, 0)

    def agrees() -> bool:
        a = masses.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(hs.w2(on_circle(angles), y, a, masses.flip(0)), a)
        direction = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
        along = central_difference(lambda a: hs.w2(on_circle(angles), y, a, masses.flip(0)), masses, direction)
        return abs(float(gradient @ direction) - along) < 1e-6

    assert agrees()
    wrong = Plant(
        lambda right, value, transport, clouds, pair: right(value, transport, clouds, tuple(sign * f for f in pair)),
        with_gradient,
    )
    assert outcome(wrong, agrees) == "seen"


def test_bad_input_is_refused() -> None:
    x = unit_cloud(3, 2, 0)
    refused(lambda: circle_plan(unit_cloud(3, 3, 0), unit_cloud(3, 3, 1)), "x has dimension 3", "2")
    refused(lambda: circle_plan(x[None], x[None]), "batch axes (1,)")
    refused(lambda: circle_plan(x, x, p=0.9), "p is 0.9", ">= 1")
    refused(lambda: wasserstein(x, x, p=500), "p is 500", "175")
