"""The trials of energy-rises, rate, finite-time and steady-order: their verdicts, their statistics against closed forms
and SciPy, and planted faults that each must notice.
"""

from __future__ import annotations

import functools
import itertools
import math
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from helmscope.claims.experiments import energy_rises, finite_time, rate, steady_order
from helmscope.claims.registry import Case
from helmscope.claims.trial import try_claim
from helmscope.fields.attention import SA, USA
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.sphere import retract
from helmscope.observe.inner_products import mean_inner_product
from helmscope.solve.heun import Heun
from helmscope.solve.integrate import integrate
from helmscope.theory.equiangular import equiangular, hitting_time
from helmscope.theory.starts import Orthonormal, Uniform
from helmscope.types import Ruling, Verdict

SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
EXPECTED = {"energy-rises": SUPPORTED, "rate": SUPPORTED, "finite-time": REFUTED, "steady-order": SUPPORTED}


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


class Hastening(SA):
    """A flow that speeds up with the logarithm of what is left, without arriving in finite time."""

    def ambient(self, x, weights=None, *, t=0.0):
        spread = (x - x.mean(-2, keepdim=True)).square().sum((-1, -2), keepdim=True)
        return (1 - spread.clamp(1e-30, 1.0).log10() / 3) * super().ambient(x, weights)


def coarse(h: float) -> Heun:
    """A stepper of order 2 in the place of RK4."""
    return Heun(h)


def merging(*args, **options):
    """A solver that lets near tokens fall together."""
    seen = integrate(*args, **options)
    center = seen.states.mean(-2, keepdim=True)
    near = ((seen.states - center).abs() < 1e-4).all(-1).all(-1)[..., None, None]
    return SimpleNamespace(states=torch.where(near, center, seen.states))


def faulty(monkeypatch: pytest.MonkeyPatch, module: ModuleType, claim: str, **faults: object) -> Verdict:
    for name, fault in faults.items():
        monkeypatch.setattr(module, name, fault)
    return try_claim(claim, quick=True).verdict


@pytest.mark.parametrize("claim", EXPECTED)
def test_the_verdict_and_every_control_come_out_as_the_theory_says(claim: str) -> None:
    verdict = quick(claim)
    assert verdict.ruling is EXPECTED[claim], verdict.sentence
    controls = [control for control in (verdict.null, verdict.printed, *verdict.also) if control is not None]
    assert all(control.as_expected for control in controls)
    assert verdict.null.ruling is REFUTED
    assert verdict.interval.n >= 32


@pytest.mark.slow
@pytest.mark.parametrize("claim", EXPECTED)
def test_another_seed_and_more_starts_rule_alike(claim: str) -> None:
    for verdict in (try_claim(claim, seed=1).verdict, try_claim(claim, seed=2, quick=True).verdict):
        assert verdict.ruling is EXPECTED[claim], verdict.sentence


@pytest.mark.parametrize("claim", ["finite-time", "steady-order"])
def test_another_seed_rules_alike_and_the_same_seed_gives_the_same_bytes(claim: str) -> None:
    other = try_claim(claim, seed=7, quick=True)
    assert other.verdict.ruling is EXPECTED[claim]
    assert other.verdict.interval.estimate != quick(claim).interval.estimate
    again = try_claim(claim, seed=7, quick=True)
    assert again.verdict == other.verdict
    assert again.data.identical(other.data)


# energy-rises


def test_the_numbers_of_energy_rises() -> None:
    verdict = quick("energy-rises")
    assert 0.04 < verdict.interval.low < verdict.interval.high < 0.08
    assert verdict.null.interval.high < -0.05
    assert verdict.printed is not None
    assert verdict.printed.interval.low > 1  # every cloud, not one alone, is off by more than the rate itself
    shares = [control for control in verdict.also if "every half-step" in control.what]
    assert [control.interval.estimate for control in shares] == [1.0, 1.0]
    assert max(control.interval.high for control in verdict.also if "error of dE/dt" in control.what) < 2e-14
    (whole,) = [control for control in verdict.also if "whole" in control.what and "V = -I" in control.what]
    assert whole.ruling is REFUTED
    assert whole.interval.high < -0.5
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


def test_energy_rises_notices_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SA is too fast E still rises, but the identity is off by 1e-5; without 1/Z a step of 0.1 overshoots."""
    for fault, ruling in ((Fast, INCONCLUSIVE), (Backward, REFUTED), (WithoutZ, REFUTED)):
        verdict = faulty(monkeypatch, energy_rises, "energy-rises", SA=fault)
        assert verdict.ruling is ruling
        assert {control.what for control in verdict.also if not control.as_expected} >= {
            "relative error of dE/dt, SA, V = +I"
        }
        assert verdict.interval.low > 0 if fault is Fast else verdict.interval.high < 0


# rate


def test_the_numbers_of_rate() -> None:
    verdict = quick("rate")
    assert abs(verdict.interval.estimate - 1) < 3e-8  # RK4 with h = 0.04: h^4/120 = 2.1e-8
    assert verdict.printed is not None
    assert verdict.printed.interval.estimate == pytest.approx(math.e, rel=1e-7)
    assert verdict.null.interval.estimate == pytest.approx(1 / math.e, rel=1e-7)
    assert [control.interval.estimate for control in verdict.also] == pytest.approx([1.0, 1.0, 1.00001], abs=4e-8)


def test_two_tokens_without_temperature_decay_as_in_closed_form() -> None:
    """theta' = -sin theta for the angle between them, so tan(theta/2) falls as e^-t; |x_i - x*| = 2 sin(theta/4)."""
    theta = 2e-5
    x = torch.zeros(1, 2, rate.DIM, dtype=torch.float64)
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


def test_a_printed_rate_that_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were SA as slow as printed, the claim would be refuted where it is tried, and the printed form not."""
    monkeypatch.setattr(rate, "BETAS", (0.0, 1.0))
    monkeypatch.setattr(rate, "SA", AsSlowAsPrinted)
    verdict = try_claim("rate", quick=True).verdict
    assert verdict.ruling is INCONCLUSIVE
    assert verdict.printed is not None
    assert verdict.printed.ruling is SUPPORTED
    assert verdict.interval.estimate == pytest.approx(1 / math.e, rel=1e-6)


@pytest.mark.parametrize("fault", [{"SA": Fast}, {"USA": LeftOutSelf}, {"RK4": coarse}])
def test_rate_notices_faults(monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]) -> None:
    monkeypatch.setattr(rate, "BETAS", (0.0, 1.0))
    verdict = faulty(monkeypatch, rate, "rate", **fault)
    assert verdict.ruling is REFUTED
    assert not verdict.interval.low <= 1 <= verdict.interval.high
    assert abs(verdict.interval.estimate - 1) > 5e-6


# finite-time


def test_the_numbers_of_finite_time() -> None:
    """1 - gamma = D has the rate 2 (1 - D (1 + ...)), so the ratio is 1 + O(1e-3)."""
    verdict = quick("finite-time")
    assert 1.001 < verdict.interval.low < verdict.interval.high < 1.004
    assert verdict.interval.high - verdict.interval.low > 1e-4  # of replicates that differ, not of rounding
    assert verdict.null.interval.estimate == pytest.approx(1, abs=1e-6)
    assert verdict.also[0].interval.low > 1e3


@pytest.mark.parametrize("kind", [SA, USA])
def test_a_beta_of_its_own_for_each_start_is_that_field(kind: type[SA] | type[USA]) -> None:
    x = retract(Case().normal(3, 5, 4, stream=0))
    betas = torch.tensor([0.01, 1.0, 3.0], dtype=torch.float64)
    seen = finite_time.BetaPerStart(kind, betas)(x)
    for beta, tokens, velocity in zip(betas.tolist(), x, seen, strict=True):
        field = kind(beta=beta)
        unit = 1.0 if field.normalized else math.exp(-beta)
        assert torch.allclose(velocity, unit * field(tokens), rtol=0, atol=1e-15)


def test_the_planted_decay_is_exactly_exponential() -> None:
    x = Orthonormal(n=finite_time.TOKENS, dim=finite_time.DIM).sample(2, seed=1)
    pace, times = torch.tensor([0.75, 1.5], dtype=torch.float64), torch.tensor([0.0, 1.0, 4.0, 8.0])
    exact = (-2 * pace * times[:, None]).exp()
    # slower and for longer, which is a finer step: at step 0.2 RK4 is off where the tangent is steep, at the start
    errors = []
    for slower in (1, 4, 16):
        seen = finite_time.gaps(finite_time.ExponentialDecay(pace / slower), x, slower * times.double())
        errors.append(float((seen / exact - 1).abs().max()))
    assert errors[0] < 2e-2
    assert errors[1] < errors[0] / 100  # order 4: 256
    assert errors[2] < 1e-6


@pytest.mark.parametrize("name", finite_time.FLOWS)
def test_the_gap_follows_the_closed_form_down_to_1e_24(name: str) -> None:
    field, n = finite_time.FLOWS[name], finite_time.TOKENS
    x = torch.eye(finite_time.TOKENS, finite_time.DIM, dtype=torch.float64)[None]
    unit = 1.0 if field.normalized else math.exp(-field.beta)
    early = torch.tensor([unit * t for t in (1.0, 2.0, 3.0)], dtype=torch.float64)
    seen = 1 - finite_time.gaps(field, x, early, unit)[:, 0]
    assert seen.tolist() == pytest.approx(equiangular(field, n=n, times=early).tolist(), abs=2e-5)
    levels = (1e-3, 1e-6, 1e-12, 1e-24)
    times = torch.tensor([hitting_time(field, n=n, delta=delta) for delta in levels], dtype=torch.float64)
    # a relative error of the rate of h^4/120 = 1.3e-5 over 2 t = 60
    assert finite_time.gaps(field, x, times, unit)[:, 0].tolist() == pytest.approx(levels, rel=1e-3)


def test_the_gap_is_the_mean_over_pairs() -> None:
    x = retract(Case().normal(1, 5, 4, stream=0))
    pairs = [1 - float(x[0, i] @ x[0, j]) for i in range(5) for j in range(5) if i != j]
    start = torch.zeros(1, dtype=torch.float64)
    assert finite_time.gaps(SA(beta=1.0), x, start).item() == pytest.approx(np.mean(pairs), abs=1e-14)
    assert steady_order.disorder(SA(beta=1.0), x, start).item() == pytest.approx(np.mean(pairs), abs=1e-14)
    assert 1 - mean_inner_product(x).item() == pytest.approx(np.mean(pairs), abs=1e-14)


@pytest.mark.parametrize("power", [1.0, 2.0, 5.0])
def test_an_arrival_speeds_up_as_its_power_says(power: float) -> None:
    left = 10 ** -torch.arange(0, 13, 0.02, dtype=torch.float64)
    assert finite_time.speed_up(-left, left[:, None] ** power).item() == pytest.approx(10 ** (9 / power), rel=0.05)


def test_a_gap_that_never_passes_the_level_has_no_rate() -> None:
    times = torch.arange(4, dtype=torch.float64)
    paces = torch.tensor([2.0, 3.0], dtype=torch.float64)
    rates = finite_time.decay_rate(times, (-paces * times[:, None]).exp(), 1e-2)
    assert rates.tolist() == pytest.approx(paces.tolist(), rel=1e-14)
    assert finite_time.decay_rate(times, (-0.1 * times[:, None]).exp(), 1e-2).isnan().all()


@pytest.mark.parametrize(("fault", "ruling"), [({"integrate": merging}, INCONCLUSIVE), ({"SA": Hastening}, SUPPORTED)])
def test_finite_time_notices_faults(monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], ruling: Ruling) -> None:
    """A solver that lets tokens meet lets the null's meet too; a flow that speeds up is found."""
    monkeypatch.setattr(finite_time, "FLOWS", {"SA, beta = 1": SA(beta=1.0)})
    verdict = faulty(monkeypatch, finite_time, "finite-time", **fault)
    assert verdict.ruling is ruling
    assert verdict.interval.low > 2


# steady-order


def test_the_numbers_of_steady_order() -> None:
    verdict = quick("steady-order")
    assert abs(verdict.interval.estimate - 1) < 7e-8  # RK4 with h = 0.05: h^4/120 = 5.2e-8
    assert verdict.null.interval.estimate == pytest.approx(7 / 3, rel=1e-12)
    assert verdict.printed is None
    assert "undefined M and is not computed" in verdict.sentence
    assert [control.interval.estimate for control in verdict.also] == pytest.approx([1 / 7, 1.0, 1.00001], abs=7e-8)


def test_the_pace_of_two_tokens_is_that_of_the_closed_form() -> None:
    """1 - cos theta with tan(theta/2) = tan(theta0/2) e^-t, far from the cluster too."""
    theta = 1.0
    x = torch.tensor([[[1.0, 0.0], [math.cos(theta), math.sin(theta)]]], dtype=torch.float64)
    clock = steady_order.WINDOW * torch.arange(5, dtype=torch.float64)
    angles = 2 * torch.atan(math.tan(theta / 2) * (-clock).exp())
    gap = steady_order.disorder(SA(beta=0.0), x, clock)
    assert gap[:, 0].tolist() == pytest.approx((1 - angles.cos()).tolist(), rel=1e-6)
    slopes = (1 - angles.cos()).log().diff() / steady_order.WINDOW
    assert steady_order.pace(gap)[:, 0].tolist() == pytest.approx((slopes / -2).tolist(), rel=1e-6)


def test_the_pace_far_from_the_cluster_is_not_the_one_near_it() -> None:
    x = retract(Case().normal(4, steady_order.TOKENS, steady_order.DIM, stream=0))
    clock = steady_order.WINDOW * torch.arange(5, dtype=torch.float64)
    far = steady_order.farthest(steady_order.pace(steady_order.disorder(SA(beta=1.0), x, clock)))
    assert bool(((far - 1).abs() > 0.1).all())


@pytest.mark.parametrize("fault", [{"SA": Fast}, {"USA": LeftOutSelf}, {"RK4": coarse}])
def test_steady_order_notices_faults(monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]) -> None:
    monkeypatch.setattr(steady_order, "BETAS", (0.0, 4.0))
    verdict = faulty(monkeypatch, steady_order, "steady-order", **fault)
    assert verdict.ruling is REFUTED
    assert abs(verdict.interval.estimate - 1) > 5e-6
