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
from helmscope.claims.reading import entry
from helmscope.claims.registry import TrialCase
from helmscope.claims.trial import run_trial
from helmscope.fields.attention import SA, USA
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.sphere import retract
from helmscope.solve.heun import Heun
from helmscope.solve.integrate import integrate
from helmscope.theory.starts import Uniform
from helmscope.types import Judgment, Ruling, Verdict
from support.trials import failures, interval, rulings, set_constants

SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
HOLDS = Ruling.BY_CONSTRUCTION
EXPECTED = {"energy-rises": HOLDS, "rate": SUPPORTED}


@functools.cache
def quick(claim: str) -> Verdict:
    return run_trial(claim, quick=True).verdict


class Fast(SA):
    """Too fast by a hundred-thousandth."""

    def velocity(self, x, weights=None, *, t=0.0):
        return (1 + 1e-5) * super().velocity(x, weights)


class AsSlowAsPrinted(SA):
    """SA at the rate e^-beta."""

    @property
    def factor(self) -> float:
        return math.exp(-self.beta)

    def velocity(self, x, weights=None, *, t=0.0):
        return self.factor * super().velocity(x, weights)


class Slower(AsSlowAsPrinted):
    """SA at the rate e^(-2 beta), below the printed bound."""

    @property
    def factor(self) -> float:
        return math.exp(-2 * self.beta)


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
    return run_trial(claim, quick=True).verdict


RULINGS = {
    "energy-rises": {
        "identity of dE/dt": HOLDS,
        "change against the sign": HOLDS,
        "unrelated Q^T K and V": REFUTED,
        "V = +-Q^T K symmetric": SUPPORTED,
        "whole layers, V = +I": SUPPORTED,
        "whole layers, V = -I": REFUTED,
    },
    "rate": {
        "rate": SUPPORTED,
        "rate of pairs": SUPPORTED,
        "planted flow with rate e^-beta": REFUTED,
        "planted flow, over e^-beta": SUPPORTED,
        "SA made faster by 1e-5": REFUTED,
    },
}
PRINTED = {"energy-rises": Judgment.TRUE, "rate": Judgment.NOT_SHARP}


@pytest.mark.parametrize("claim", EXPECTED)
def test_the_verdict_and_every_control_come_out_as_the_theory_says(claim: str) -> None:
    verdict = quick(claim)
    assert verdict.ruling is EXPECTED[claim], verdict.sentence
    assert rulings(verdict) == RULINGS[claim]
    assert failures(verdict) == set()
    assert verdict.printed is not None
    assert (verdict.printed.judgment, verdict.printed.measured) == (PRINTED[claim], Judgment.TRUE)
    assert all(condition.interval.n >= 32 for condition in verdict.conditions)


@pytest.mark.slow
@pytest.mark.parametrize("claim", EXPECTED)
def test_another_seed_and_more_starts_rule_alike(claim: str) -> None:
    for verdict in (run_trial(claim, seed=1).verdict, run_trial(claim, seed=2, quick=True).verdict):
        assert verdict.ruling is EXPECTED[claim], verdict.sentence


# energy-rises


def test_the_numbers_of_energy_rises() -> None:
    verdict = quick("energy-rises")
    assert interval(verdict, "identity of dE/dt").estimate < 2e-14
    assert interval(verdict, "change against the sign").estimate == 0.0  # at no half-step of any start
    assert interval(verdict, "change against the sign").n == 96 * 12  # starts; SA and USA, 3 betas, 2 signs
    assert interval(verdict, "identity of dE/dt").n == 1_024
    assert interval(verdict, "unrelated Q^T K and V").high < -0.05
    for name in ("V = +-Q^T K symmetric", "whole layers, V = +I"):
        assert 0.04 < interval(verdict, name).low < interval(verdict, name).high < 0.08
    assert interval(verdict, "whole layers, V = -I").high < -0.5
    assert verdict.printed.interval.estimate < 2e-14
    assert "steps of 0.1 of the flow" in verdict.setting


def test_a_single_start_that_falls_refutes_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over the starts would hide it: 95 of 96 rise."""
    right = energy_rises.path

    def one_falls(field: SA | USA, x: torch.Tensor, times: list[float], unit: float = 1.0) -> torch.Tensor:
        energy = right(field, x, times, unit)
        energy[5, 0] = energy[4, 0] * (1 - 1e-6) if field.query_key is None else energy[5, 0]
        return energy

    monkeypatch.setattr(energy_rises, "path", one_falls)
    verdict = run_trial("energy-rises", quick=True).verdict
    assert verdict.ruling is REFUTED
    assert failures(verdict) == {"change against the sign"}


def test_one_layer_changes_the_energy_as_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8]], dtype=torch.float64)
    seen = energy_rises.through_layers(SA(beta=1.0), x, 1)
    assert seen[:2].tolist() == pytest.approx([0.872419478586118, 0.9486713872291129], abs=1e-14)


def test_the_path_of_the_energy_is_scipys() -> None:
    x = TrialCase().normal(3, 3, index=0)
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
    seen = energy_rises.path(SA(beta=beta), x, times)
    assert seen.tolist() == pytest.approx(energies, rel=1e-5)
    changes = [b - a for a, b in itertools.pairwise(energies)]
    expected = min(changes) / (max(energies) - min(energies))
    assert energy_rises.smallest(seen).item() == pytest.approx(expected, rel=1e-4)


def test_a_single_fall_makes_the_smallest_change_negative() -> None:
    energy = torch.tensor([[0.0, 0.0], [2.0, 1.0], [1.0, 3.0], [5.0, 4.0]])
    assert energy_rises.smallest(energy).tolist() == pytest.approx([-0.2, 0.25])


def test_each_start_has_its_pair_of_matrices_in_one_integration(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Uniform(n=16, dim=4).sample(4, seed=0)
    times = [0.1 * k for k in range(11)]
    b, v = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    calls = []

    def spy(*given, **options):
        calls.append(given)
        return integrate(*given, **options)

    monkeypatch.setattr(energy_rises, "integrate", spy)
    seen = energy_rises._energies(2.0, x, times, b, v)
    assert len(calls) == 1
    for k in range(3):
        alone = energy_rises.path(SA(beta=2.0, query_key=b[k], value=v[k]), x[k], times)
        assert torch.allclose(seen[:, k], alone, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("fault", "ruling", "noticed"),
    [
        (Fast, REFUTED, {"identity of dE/dt"}),  # E rises all the same, and the identity is off by 1e-5
        (Backward, INCONCLUSIVE, {"identity of dE/dt", "change against the sign", "V = +-Q^T K symmetric"}),
        (WithoutZ, INCONCLUSIVE, {"identity of dE/dt", "change against the sign"}),  # a step of 0.1 overshoots
    ],
)
def test_energy_rises_notices_faults(
    monkeypatch: pytest.MonkeyPatch, fault: type[SA], ruling: Ruling, noticed: set[str]
) -> None:
    verdict = faulty(monkeypatch, energy_rises, "energy-rises", SA=fault)
    assert verdict.ruling is ruling
    assert failures(verdict) >= noticed
    assert interval(verdict, "identity of dE/dt").estimate > 9e-6
    assert (interval(verdict, "change against the sign").estimate > 0) is (fault is not Fast)


# rate


def test_the_numbers_of_rate() -> None:
    verdict = quick("rate")
    for name in ("rate", "rate of pairs"):
        assert abs(interval(verdict, name).estimate - 1) < 3e-8  # RK4 with h = 0.04: h^4/120 = 2.1e-8
    assert interval(verdict, "planted flow with rate e^-beta").estimate == pytest.approx(1 / math.e, rel=1e-7)
    assert interval(verdict, "planted flow, over e^-beta").estimate == pytest.approx(1, abs=4e-8)
    assert interval(verdict, "SA made faster by 1e-5").estimate == pytest.approx(1.00001, abs=4e-8)
    # the bound is attained at beta = 0, where the rate is e^-0 = 1
    assert verdict.printed.interval.estimate == pytest.approx(1, abs=4e-8)


def test_two_tokens_without_temperature_decay_as_in_closed_form() -> None:
    """theta' = -sin theta for the angle between them, so tan(theta/2) falls as e^-t; |x_i - x*| = 2 sin(theta/4)."""
    theta = 2e-5
    x = torch.zeros(1, 2, entry("rate").constants["dim"], dtype=torch.float64)
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


@pytest.mark.parametrize(("fault", "judgment"), [(AsSlowAsPrinted, Judgment.TRUE), (Slower, Judgment.FALSE)])
def test_the_printed_bound_is_measured_apart(
    monkeypatch: pytest.MonkeyPatch, fault: type[SA], judgment: Judgment
) -> None:
    """At the rate e^-beta the bound would be attained and the claim fail; a slower flow would violate both."""
    set_constants(monkeypatch, "rate", betas=[0.0, 1.0])
    verdict = faulty(monkeypatch, rate, "rate", SA=fault)
    assert verdict.ruling is INCONCLUSIVE
    assert failures(verdict) >= {"rate", "rate of pairs", "planted flow, over e^-beta"}
    slow = fault(beta=1.0).factor
    assert interval(verdict, "rate").estimate == pytest.approx(slow, rel=1e-6)
    assert verdict.printed is not None
    assert verdict.printed.measured is judgment
    assert verdict.printed.judgment is (Judgment.NOT_SHARP if judgment is Judgment.TRUE else Judgment.FALSE)
    assert verdict.printed.interval.estimate == pytest.approx(min(1.0, slow * math.e), rel=1e-6)


@pytest.mark.parametrize(
    ("fault", "ruling"),
    [({"SA": Fast}, INCONCLUSIVE), ({"USA": LeftOutSelf}, REFUTED), ({"RK4": coarse}, INCONCLUSIVE)],
)
def test_rate_notices_faults(monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], ruling: Ruling) -> None:
    """The planted flow is made of SA and integrated by RK4: its control notices faults of these, too."""
    set_constants(monkeypatch, "rate", betas=[0.0, 1.0])
    verdict = faulty(monkeypatch, rate, "rate", **fault)
    assert verdict.ruling is ruling
    assert failures(verdict) >= {"rate", "rate of pairs"}
    assert ("planted flow, over e^-beta" in failures(verdict)) is (ruling is INCONCLUSIVE)
    measured = interval(verdict, "rate")
    assert not measured.low <= 1 <= measured.high
    assert abs(measured.estimate - 1) > 5e-6
