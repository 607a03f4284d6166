"""Plans: couplings, images, outcomes."""

import pytest
import torch

from helmscope.transport import Euclidean, PlanStatus, line_plan, sinkhorn
from helmscope.transport.clouds import check_clouds
from helmscope.transport.plan import Plan, sparse_plan
from support.refusal import refused


@pytest.fixture
def plan() -> Plan:
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [2.0], [10.0]])
    return line_plan(x, y, torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.25, 0.5]))


def test_couplings_and_images(plan: Plan) -> None:
    assert plan.matrix.tolist() == [[0.25, 0.25, 0], [0, 0, 0.5]]
    assert plan.barycentric_projection[:, 0].tolist() == [2.5, 10]
    assert plan.apply(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])).tolist() == [[0.5, 0.25], [0, 1]]
    assert plan.value == pytest.approx(0.25 * 9 + 0.25 * 4 + 0.5 * 81)
    i, j, mass = plan.entries
    assert (i.tolist(), j.tolist(), mass.tolist()) == ([0, 0, 1], [1, 0, 2], [0.25, 0.25, 0.5])


def test_outcomes(plan: Plan) -> None:
    assert plan.ok
    assert plan.outcome.startswith("optimal: an exact plan with duality gap")
    assert repr(plan).startswith("<Plan of 2 x 3 points: W_2 6.61438, optimal")
    assert not PlanStatus.PIVOT_LIMIT.ok


def test_power_entropy_and_distance() -> None:
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.5], [3.0]])
    for p in (1.0, 2.0, 3.0):
        plan = line_plan(x, y, p=p)
        assert (plan.p, plan.epsilon) == (p, None)
        assert float(plan.distance) == pytest.approx(((0.5**p + 2.0**p) / 2) ** (1 / p), rel=1e-6)
    blurred = sinkhorn(x, y, epsilon=0.5, p=3, cost=Euclidean())
    assert (blurred.p, blurred.epsilon) == (3.0, 0.5)
    assert blurred.distance == pytest.approx(float(blurred.value) ** (1 / 3), rel=1e-6)
    assert "cost 4.0625" in repr(blurred)
    assert "epsilon 0.5" in repr(blurred)


def test_matrices_that_do_not_fit_are_refused() -> None:
    x = torch.linspace(0, 1, 2**14 + 1)[:, None]
    plan = line_plan(x, x + 1)
    refused(lambda: plan.matrix, "16385 x 16385", "use apply")
    assert plan.barycentric_projection.allclose(x + 1)


def test_a_wrong_plan_shows_in_its_errors() -> None:
    """Entries at the wrong place, potentials that are too small: marginal errors and duality gap are not 0."""
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    clouds = check_clouds(x, x + 3, torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.4]), cost=Euclidean())
    right = line_plan(x, x + 3, torch.tensor([0.3, 0.7]), torch.tensor([0.6, 0.4]), p=1)
    i, j, mass = (part.numpy() for part in right.entries)
    f, g = (part.numpy() for part in right.potentials)
    wrong = {
        "swapped axes": ((j, i, mass), (f, g)),
        "half the mass": ((i, j, mass / 2), (f, g)),
        "half the potential": ((i, j, mass), (f, g / 2)),
    }
    for name, (entries, potentials) in wrong.items():
        plan = sparse_plan(clouds, entries, potentials, cost=Euclidean(), p=1, status=PlanStatus.OPTIMAL)
        assert max(plan.marginal_errors) > 0.1 or abs(plan.duality_gap) > 0.1, name
    assert max(right.marginal_errors) + abs(right.duality_gap) < 1e-7  # the weights are float32
