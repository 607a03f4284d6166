"""Exact plans: POT and SciPy agree, potentials certify them, gradients are finite differences."""

import sys

import numpy as np
import ot
import pytest
import torch

import helmscope as hs
from helmscope.transport import Chordal, Euclidean, PlanStatus, exact_plan
from helmscope.transport.cost import power
from helmscope.types import MissingExtra
from support.planting import Plant, outcome
from support.refusal import refused
from support.transport_oracles import (
    central_difference,
    costs,
    linear_program_cost,
    pot_cost,
    random_weights,
    unit_cloud,
)

METRICS = {"geodesic": hs.Geodesic(), "chordal": Chordal(), "euclidean": Euclidean()}


def test_pot_agrees_on_two_hundred_random_problems() -> None:
    worst = 0.0
    for seed in range(200):
        n, m, d = np.random.default_rng(seed).integers(2, 9, 3)
        metric = tuple(METRICS)[seed % 3]
        p = (1.0, 2.0, 1.5, 3.0)[seed // 3 % 4]
        x, y, a, b = (
            unit_cloud(n, d, seed),
            unit_cloud(m, d, seed + 1000),
            random_weights(n, seed),
            random_weights(m, 1),
        )
        distance = hs.transport.wasserstein(x, y, a, b, p=p, cost=METRICS[metric])
        worst = max(worst, abs(float(distance) ** p - pot_cost(costs(x, y, p, metric), a, b)))
    assert worst < 1e-9


def test_scipy_agrees() -> None:
    for seed in range(5):
        x, y, a, b = (
            unit_cloud(5, 3, seed),
            unit_cloud(6, 3, seed + 9),
            random_weights(5, seed),
            random_weights(6, seed),
        )
        plan = exact_plan(x, y, a, b, p=1.5)
        assert float(plan.value) == pytest.approx(linear_program_cost(costs(x, y, 1.5, "geodesic"), a, b), abs=1e-9)
        f, g = plan.potentials
        assert (f[:, None] + g - torch.from_numpy(costs(x, y, 1.5, "geodesic"))).max() < 1e-12
        assert abs(plan.duality_gap) < 1e-13
        assert max(plan.marginal_errors) < 1e-14
        assert plan.status is PlanStatus.OPTIMAL
        assert "duality gap" in plan.outcome
        assert torch.allclose(plan.apply(torch.ones(6, 1, dtype=torch.float64))[:, 0], a)


def test_permutations_are_found() -> None:
    x = unit_cloud(20, 5, 0)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    near = hs.sphere.retract(x[order] + 1e-3 * unit_cloud(20, 5, 2))
    plan = exact_plan(x, near)
    assert torch.equal(plan.matrix.argmax(1), order.argsort())
    assert torch.allclose(plan.barycentric_projection, near[order.argsort()])


def test_antipodal_points_have_distances_and_plans() -> None:
    x = unit_cloud(1, 4, 0)
    assert hs.w2(x, -x) == pytest.approx(torch.pi, abs=1e-15)
    cross = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    plan = exact_plan(cross[:3], cross[3:])
    assert float(plan.value) == pytest.approx(
        (torch.pi / 2) ** 2
    )  # every point moves a quarter turn, none to its antipode
    assert plan.matrix.diagonal().tolist() == [0, 0, 0]


def test_zero_masses_do_not_matter() -> None:
    x, y = unit_cloud(4, 3, 0), unit_cloud(3, 3, 1)
    a = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    plan, kept = exact_plan(x, y, a), exact_plan(x[a > 0], y, a[a > 0])
    assert plan.value == pytest.approx(float(kept.value), abs=1e-15)
    f, g = plan.potentials
    assert (f[:, None] + g - hs.Geodesic().matrix(x, y) ** 2).max() < 1e-14
    assert abs(plan.duality_gap) < 1e-14


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("p", [1.0, 2.0])
def test_gradients_are_finite_differences(metric: str, p: float) -> None:
    y, a = unit_cloud(7, 3, 1), random_weights(5, 2)
    raw = unit_cloud(5, 3, 0)

    def distance(raw: torch.Tensor, a: torch.Tensor = a) -> torch.Tensor:
        x = hs.sphere.retract(raw)
        return hs.transport.wasserstein(x, y, a, p=p, cost=METRICS[metric])

    moving, masses = raw.clone().requires_grad_(), a.clone().requires_grad_()
    by_x, by_mass = torch.autograd.grad(distance(moving, masses), (moving, masses))
    for k in range(3):
        direction = torch.zeros_like(raw)
        direction[k, k] = 1
        assert by_x[k, k] == pytest.approx(central_difference(distance, raw, direction), abs=1e-7)
        along = central_difference(lambda a: distance(raw, a), a, direction[:5, k])
        assert by_mass[k] == pytest.approx(along, abs=1e-6)


def test_gradients_are_finite_where_points_coincide() -> None:
    x = unit_cloud(4, 3, 0).requires_grad_()
    for p in (1.0, 2.0):
        (gradient,) = torch.autograd.grad(hs.transport.wasserstein(x, x.detach().clone(), p=p), x)
        assert torch.isfinite(gradient).all()


def test_a_limit_on_pivots_is_an_outcome() -> None:
    x, y = unit_cloud(60, 3, 0), unit_cloud(60, 3, 1)
    plan = exact_plan(x, y, max_iterations=3)
    assert plan.status is PlanStatus.PIVOT_LIMIT
    assert not plan.ok
    assert "raise max_iterations" in plan.outcome
    assert "after 3 pivots" in plan.outcome
    assert max(plan.marginal_errors) > 0.1
    assert float(plan.dual) <= float(exact_plan(x, y).value)  # still a lower bound


def test_float32_is_computed_in_float64() -> None:
    x, y = unit_cloud(9, 3, 0).float(), unit_cloud(7, 3, 1).float()
    plan = exact_plan(x, y)
    assert plan.value.dtype == plan.matrix.dtype == plan.potentials[0].dtype == torch.float32
    assert plan.value == exact_plan(x.double(), y.double()).value.float()
    assert abs(plan.duality_gap) < 1e-14


def test_without_pot_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(MissingExtra, match=r"helmscope\[ot\]"):
        exact_plan(unit_cloud(2, 3, 0), unit_cloud(2, 3, 1))


FAULTS = {
    "the square root of the cost": Plant(lambda right, distance, p: right(distance, p / 2), power),
    "the sign of the cost": Plant(lambda right, *args: -right(*args), power),
    "twice the distance": Plant(lambda right, *args: 2 * right(*args), (hs.Geodesic, ["distance"])),
    "the chord": Plant(lambda right, cost, x, y: Chordal().distance(x, y), (hs.Geodesic, ["distance"])),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str) -> None:
    x, y, a, b = unit_cloud(6, 3, 0), unit_cloud(6, 3, 1), random_weights(6, 2), random_weights(6, 3)
    exact = pot_cost(costs(x, y, 2.0, "geodesic"), a, b)

    def agrees() -> bool:
        return abs(float(exact_plan(x, y, a, b).value) - exact) < 1e-9

    assert agrees()
    assert outcome(FAULTS[name], agrees) == "seen"


def test_a_transposed_plan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, a, b = unit_cloud(6, 3, 0), unit_cloud(6, 3, 1), random_weights(6, 2), random_weights(6, 3)
    right = ot.emd

    def transposed(*args: object, **options: object) -> tuple[np.ndarray, dict[str, object]]:
        plan, log = right(*args, **options)
        return plan.T.copy(), log

    monkeypatch.setattr(ot, "emd", transposed)
    plan = exact_plan(x, y, a, b)
    assert max(plan.marginal_errors) > 0.1
    assert plan.duality_gap > 0.1


def test_bad_input_is_refused() -> None:
    x = unit_cloud(3, 3, 0)
    refused(lambda: exact_plan(x[None], x[None]), "batch axes (1,)")
    refused(lambda: exact_plan(x, x, p=0.5), "p is 0.5", ">= 1")
    refused(lambda: exact_plan(x, x, cost=hs.Geodesic), "cost is <class", "Geodesic()")
    refused(lambda: exact_plan(x, x, max_iterations=0), "max_iterations is 0")
    refused(lambda: exact_plan(1e200 * x, x, p=2, cost=Euclidean()), "p is 2", "overflow")
