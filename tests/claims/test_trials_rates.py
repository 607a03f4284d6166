"""The trials of energy-rises and rate: their verdicts, their statistics against closed forms and SciPy, and planted
faults that each must detect.
"""

from __future__ import annotations

import functools
import itertools
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from helmscope.claims.experiments import energy_rises, rate
from helmscope.claims.registry import Case
from helmscope.claims.trial import try_claim
from helmscope.fields.attention import SA, USA
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.sphere import retract
from helmscope.solve.heun import Heun
from helmscope.solve.integrate import integrate
from helmscope.theory.starts import Uniform
from helmscope.types import Judgment, Ruling, Verdict

SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
HOLDS = Ruling.BY_CONSTRUCTION
EXPECTED = {"energy-rises": HOLDS, "rate": SUPPORTED}


@functools.cache
def quick(claim: str) -> Verdict:
    return try_claim(claim, quick=True).verdict


class Fast(SA):
    """Too fast by a hundred-thousandth."""

    def velocity(self, x, weights=None, *, t=0.0):
        return (1 + 1e-5) * super().velocity(x, weights)


class AsSlowAsPrinted(SA):
    """SA at the rate e^-beta."""

    def velocity(self, x, weights=None, *, t=0.0):
        return math.exp(-self.beta) * super().velocity(x, weights)


class SlowerThanPrinted(SA):
    """SA at half the rate e^-beta."""

    def velocity(self, x, weights=None, *, t=0.0):
        return math.exp(-self.beta) / 2 * super().velocity(x, weights)


class Backward(SA):
    """The sign turned."""

    def velocity(self, x, weights=None, *, t=0.0):
        return -super().velocity(x, weights)


class WithoutZ(SA):
    """SA that forgets 1/Z."""

    def velocity(self, x, weights=None, *, t=0.0):
        field = USA(beta=self.beta, query_key=self.query_key, value=self.value)
        return field.velocity(x, weights)


class LeftOutSelf(USA):
    """1/(n-1) where 1/n is due."""

    def scaled_velocity(self, x, weights=None, *, t=0.0):
        right, n = super().scaled_velocity(x, weights), x.shape[-2]
        return ScaledVelocity(right.direction * (n / (n - 1)), right.log_scale)


def coarse(h: float) -> Heun:
    """A stepper of order 2 in the place of RK4."""
    return Heun(h)


def faulty(monkeypatch: pytest.MonkeyPatch, module: ModuleType, claim: str, **faults: object) -> Verdict:
    for name, fault in faults.items():
        monkeypatch.setattr(module, name, fault)
    return try_claim(claim, quick=True).verdict


@pytest.mark.parametrize("claim", EXPECTED)
def test_the_verdict_and_every_control_come_out_as_the_theory_says(claim: str) -> None:
    verdict = quick(claim)
    assert verdict.ruling is EXPECTED[claim], verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    assert {control.ruling for control in verdict.controls} == {SUPPORTED, REFUTED}  # known answers of both kinds
    assert verdict.interval.n >= 32


@pytest.mark.slow
@pytest.mark.parametrize("claim", EXPECTED)
def test_another_seed_and_more_starts_rule_alike(claim: str) -> None:
    for verdict in (try_claim(claim, seed=1).verdict, try_claim(claim, seed=2, quick=True).verdict):
        assert verdict.ruling is EXPECTED[claim], verdict.sentence


# energy-rises


def test_the_numbers_of_energy_rises() -> None:
    verdict = quick("energy-rises")
    identity, against = verdict.conditions
    assert identity.interval.high < 2e-14
    assert against.interval.high == 0
    intervals = {control.name: control.interval for control in verdict.controls}
    assert intervals["unrelated Q^T K and V"].high < -0.05
    assert intervals["V = +-Q^T K symmetric"].low > 0.03
    assert intervals["whole layers, V = -I"].high < -0.5
    assert verdict.printed.judgment.value == "true"
    assert verdict.printed.interval.high < 2e-14
    assert "steps of 0.1 of the flow" in verdict.where


def test_one_layer_changes_the_energy_as_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8]], dtype=torch.float64)
    seen = energy_rises.through_layers(SA(beta=1.0), x)
    assert seen[:2].tolist() == pytest.approx([0.872419478586118, 0.9486713872291129], abs=1e-14)


def test_the_path_of_the_energy_is_scipys() -> None:
    x = Case().normal(3, 3, stream=0)
    x = retract(x)
    beta = 4.0

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        y = flat.reshape(3, 3)
        out = np.zeros_like(y)
        for i in range(3):
            weights = [math.exp(beta * y[i] @ y[j]) for j in range(3)]
            mean = sum(w * y[j] for j, w in enumerate(weights)) / sum(weights)
            out[i] = mean - (y[i] @ mean) * y[i]
        return out.ravel()

    times = [0.1 * k for k in range(11)]
    way = solve_ivp(velocity, (0, 1.0), x.numpy().ravel(), "DOP853", times, rtol=1e-12, atol=1e-14).y.T.reshape(
        11, 3, 3
    )
    energies = [sum(math.exp(beta * a @ b) for a in y for b in y) / (2 * beta * 9) for y in way]
    seen = energy_rises.path(SA(beta=beta), x)
    assert seen.tolist() == pytest.approx(energies, rel=1e-5)
    changes = [b - a for a, b in itertools.pairwise(energies)]
    expected = min(changes) / (max(energies) - min(energies))
    assert energy_rises.smallest(seen).item() == pytest.approx(expected, rel=1e-4)


def test_a_single_fall_makes_the_smallest_change_negative() -> None:
    energy = torch.tensor([[0.0, 0.0], [2.0, 1.0], [1.0, 3.0], [5.0, 4.0]])
    assert energy_rises.smallest(energy).tolist() == pytest.approx([-0.2, 0.25])


def test_each_start_has_its_pair_of_matrices_in_one_integration(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Uniform(n=16, dim=4).sample(4, seed=0)
    b, v = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    calls = []

    def spy(*given, **options):
        calls.append(given)
        return integrate(*given, **options)

    monkeypatch.setattr(energy_rises, "integrate", spy)
    seen = energy_rises._energies(x, b, v)
    assert len(calls) == 1
    for k in range(3):
        alone = energy_rises.path(SA(beta=energy_rises.MIDDLE, query_key=b[k], value=v[k]), x[k])
        assert torch.allclose(seen[:, k], alone, rtol=1e-13, atol=0)


@pytest.mark.parametrize("fault", [Fast, Backward, WithoutZ])
def test_energy_rises_detects_faults(monkeypatch: pytest.MonkeyPatch, fault: type[SA]) -> None:
    """If SA is too fast E still rises, but the identity is violated; without 1/Z a step of 0.1 overshoots."""
    identity, against = faulty(monkeypatch, energy_rises, "energy-rises", SA=fault).conditions
    assert identity.ruling is REFUTED
    assert identity.interval.estimate > 9e-6
    assert (against.ruling is REFUTED) == (fault is not Fast)


# rate


def test_the_numbers_of_rate() -> None:
    verdict = quick("rate")
    for condition in verdict.conditions:
        assert abs(condition.interval.estimate - 1) < 3e-8  # RK4 with h = 0.04: h^4/120 = 2.1e-8
    assert verdict.printed.judgment.value == "true, not sharp"
    assert verdict.printed.interval.estimate == pytest.approx(1, abs=1e-7)  # at beta = 0, where the bound is sharp
    estimates = {control.name: control.interval.estimate for control in verdict.controls}
    assert estimates["planted flow with rate e^-beta"] == pytest.approx(1 / math.e, rel=1e-7)
    assert estimates["planted flow, over e^-beta"] == pytest.approx(1, abs=4e-8)
    assert estimates["SA made faster by 1e-5"] == pytest.approx(1.00001, abs=4e-8)


def test_two_tokens_without_temperature_decay_as_in_closed_form() -> None:
    """theta' = -sin theta for the angle between them, so tan(theta/2) falls as e^-t; |x_i - x*| = 2 sin(theta/4)."""
    theta = 2e-5
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    x[0, :, 0], x[0, :, 1] = math.cos(theta / 2), torch.tensor([1.0, -1.0]) * math.sin(theta / 2)
    tokens, pairs = rate.slopes(SA(beta=0.0), x, 1.0)
    end = 2 * math.atan(math.tan(theta / 2) * math.exp(-rate.LENGTH))
    expected = math.log(math.sin(theta / 4) / math.sin(end / 4)) / rate.LENGTH
    assert tokens[0].tolist() == pytest.approx([expected] * 2, abs=4e-8)
    assert pairs.item() == pytest.approx(2 * expected, abs=8e-8)


@pytest.mark.parametrize("field", [SA(beta=2.0), USA(beta=2.0)])
def test_the_rate_is_that_of_the_linearized_flow(field: SA | USA) -> None:
    """All eigenvalues of the Jacobian at the cluster, on tangent displacements of zero mean, are minus the rate."""
    n, d = 4, 3
    x = torch.eye(1, d, dtype=torch.float64).expand(n, d).clone()
    jacobian = torch.autograd.functional.jacobian(field.velocity, x)[:, 1:, :, 1:].reshape(n * (d - 1), n * (d - 1))
    eigenvalues = np.sort(np.linalg.eigvals(jacobian.numpy()).real)
    assert eigenvalues[: (n - 1) * (d - 1)] == pytest.approx(-rate.corrected(field), rel=1e-9)
    assert eigenvalues[(n - 1) * (d - 1) :] == pytest.approx(0, abs=1e-9)


def test_the_farthest_ratio_may_lie_on_either_side() -> None:
    assert rate.farthest(torch.tensor([[1.0, 0.9, 1.05], [1.2, 0.9, 1.0]])).tolist() == pytest.approx([0.9, 1.2])


@pytest.fixture
def few_betas(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Case.constant
    replaced = {"betas": (0.0, 1.0)}
    monkeypatch.setattr(Case, "constant", lambda case, name: replaced.get(name, original(case, name)))


@pytest.mark.usefixtures("few_betas")
def test_a_flow_slower_than_the_printed_bound_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow with the rate e^-beta meets the printed bound, and one of half that rate does not."""
    verdict = faulty(monkeypatch, rate, "rate", SA=AsSlowAsPrinted)
    assert verdict.printed.measured is Judgment.TRUE
    assert verdict.conditions[0].interval.estimate == pytest.approx(1 / math.e, rel=1e-6)
    verdict = faulty(monkeypatch, rate, "rate", SA=SlowerThanPrinted)
    assert verdict.printed.measured is Judgment.FALSE


@pytest.mark.usefixtures("few_betas")
@pytest.mark.parametrize("fault", [{"SA": Fast}, {"USA": LeftOutSelf}, {"RK4": coarse}])
def test_rate_detects_faults(monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]) -> None:
    for condition in faulty(monkeypatch, rate, "rate", **fault).conditions:
        assert condition.ruling is REFUTED
        assert abs(condition.interval.estimate - 1) > 5e-6
