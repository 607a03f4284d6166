"""The trials of finite-time and steady-order: their verdicts, their statistics against closed forms, and planted faults
that each must detect.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from helmscope.claims.experiments import finite_time, steady_order
from helmscope.claims.reading import entry
from helmscope.claims.registry import TrialCase
from helmscope.claims.trial import Trial, run_trial
from helmscope.fields.attention import SA, USA
from helmscope.fields.field import Field
from helmscope.fields.scaled_velocity import ScaledVelocity
from helmscope.geometry.sphere import retract
from helmscope.observe.inner_products import mean_inner_product
from helmscope.solve.heun import Heun
from helmscope.solve.integrate import integrate
from helmscope.theory.equiangular import equiangular, hitting_time
from helmscope.theory.starts import Orthonormal
from helmscope.types import Control, HelmscopeError, JudgedCondition, Ruling, Verdict

F64 = torch.float64
SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
EXPECTED = {"finite-time": REFUTED, "steady-order": REFUTED}
N, DIM, EARLY, LATE = (entry("finite-time").constants[name] for name in ("tokens", "dim", "early", "late"))


@functools.cache
def quick(claim: str) -> Trial:
    return run_trial(claim, quick=True)


def named(verdict: Verdict, name: str) -> JudgedCondition | Control:
    """The condition, control or described quantity of that name."""
    (judged,) = [each for each in (*verdict.conditions, *verdict.controls, *verdict.described) if each.name == name]
    return judged


def orthonormal(starts: int, seed: int = 0) -> torch.Tensor:
    return Orthonormal(n=N, dim=DIM).sample(starts, seed=seed)


@pytest.mark.parametrize("claim", EXPECTED)
def test_the_verdict_and_every_control_come_out_as_the_theory_says(claim: str) -> None:
    verdict = quick(claim).verdict
    assert verdict.ruling is EXPECTED[claim], verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    assert {SUPPORTED, REFUTED} == {control.ruling for control in verdict.controls}  # known answers of both kinds
    assert verdict.interval.n >= 32


@pytest.mark.slow
@pytest.mark.parametrize("claim", EXPECTED)
def test_another_seed_and_more_starts_rule_alike(claim: str) -> None:
    for verdict in (run_trial(claim, seed=1).verdict, run_trial(claim, seed=2, quick=True).verdict):
        assert verdict.ruling is EXPECTED[claim], verdict.sentence
        assert verdict.interval.estimate != quick(claim).verdict.interval.estimate


@pytest.mark.parametrize("claim", EXPECTED)
def test_the_same_seed_gives_the_same_bytes(claim: str) -> None:
    again = run_trial(claim, quick=True)
    assert again.verdict == quick(claim).verdict
    assert again.data.identical(quick(claim).data)


# finite-time


class SpeedingUp(SA):
    """A flow that speeds up with the logarithm of the gap, without arriving in finite time."""

    def velocity(self, x, weights=None, *, t=0.0):
        gap = (x - x.mean(-2, keepdim=True)).square().sum((-1, -2), keepdim=True)
        return (1 - gap.clamp(1e-30, 1.0).log10() / 3) * super().velocity(x, weights)


def merging_solver(*args, **options):
    """A solver that moves all tokens to their mean once they are close."""
    states = integrate(*args, **options).states
    center = states.mean(-2, keepdim=True)
    near = ((states - center).abs() < 1e-4).all(-1).all(-1)[..., None, None]
    return SimpleNamespace(states=torch.where(near, center, states))


def stopping_solver(*args, **options):
    """A solver whose tokens stop approaching each other at a gap of about 1e-6."""
    states = integrate(*args, **options).states
    center = states.mean(-2, keepdim=True)
    deviation = states - center
    length = torch.linalg.vector_norm(deviation, dim=(-1, -2), keepdim=True)
    return SimpleNamespace(states=center + deviation * (length.clamp_min(1e-3) / length))


def test_the_numbers_of_finite_time() -> None:
    """1 - gamma = D has the rate 2 (1 - D (1 + ...)), so the ratio is 1 + O(1e-3)."""
    verdict = quick("finite-time").verdict
    assert 1.001 < verdict.interval.low < verdict.interval.high < 1.004
    assert verdict.interval.high - verdict.interval.low > 1e-4  # of replicates that differ, not of rounding
    assert named(verdict, "planted exponential decay").interval.estimate == pytest.approx(1, abs=1e-6)
    assert named(verdict, "arrival (T - t)^p").interval.low > 1e3
    merging = named(verdict, "planted merging in finite time").interval
    assert merging.estimate == pytest.approx(10 ** (9 / 10), rel=0.03)  # (T - t)^10
    assert merging.low > 7


def test_one_beta_per_start_is_the_field_of_that_beta() -> None:
    x = retract(TrialCase().normal(3, 5, 4, index=0))
    betas = torch.tensor([0.01, 1.0, 3.0], dtype=F64)
    velocities = finite_time.unit_rate_usa(betas, 4)(x)
    for beta, tokens, velocity in zip(betas.tolist(), x, velocities, strict=True):
        assert torch.allclose(velocity, math.exp(-beta) * USA(beta=beta)(tokens), rtol=0, atol=1e-15)


def test_the_planted_decay_is_exactly_exponential() -> None:
    rates, times = torch.tensor([0.75, 1.5], dtype=F64), torch.tensor([0.0, 1.0, 4.0, 8.0], dtype=F64)
    exact = (-2 * rates * times[:, None]).exp()
    # slower and for longer, which is a finer step: at step 0.2 RK4 is off where the tangent is steep, at the start
    errors = []
    for slower in (1, 4, 16):
        gap = finite_time.gaps(finite_time.ExponentialDecay(rates / slower), orthonormal(2, seed=1), slower * times)
        errors.append(float((gap / exact - 1).abs().max()))
    assert errors[0] < 2e-2
    assert errors[1] < errors[0] / 100  # order 4: 256
    assert errors[2] < 1e-6


def test_the_planted_merging_has_its_arrival_time_and_power() -> None:
    """theta' = -a sin^(4/5) theta arrives at T = int_0^theta0 sin^(-4/5) / a, and 1 - gamma falls like (T - t)^10."""
    speed, power = torch.tensor([0.2, 0.35], dtype=F64), 10.0
    theta = math.acos(N**-0.5)
    # theta = s^5 removes the singularity
    arrival = quad(lambda s: 5 * s**4 / math.sin(s**5) ** 0.8, 0, theta**0.2)[0] / speed.numpy()
    assert arrival.max() < finite_time.LENGTH
    field = finite_time.FiniteTimeMerging(speed, power)
    clock = torch.arange(0, 171, dtype=F64) * finite_time.STEP
    gap = finite_time.gaps(field, orthonormal(2), clock).numpy()
    for path, a, end in zip(gap.T, speed.tolist(), arrival, strict=True):
        remaining = end - clock.numpy()
        followed = (path > 1e-11) & (path < 1e-4)
        predicted = N / (N - 1) * (a * remaining[followed] / 5) ** power
        assert path[followed] == pytest.approx(predicted, rel=0.05)
        assert path[clock.numpy() > end].max() < 1e-13  # merged, up to what the step resolves


def test_tokens_that_have_merged_are_at_rest() -> None:
    x = torch.eye(1, 3, dtype=F64).expand(4, 3)[None]
    field = finite_time.FiniteTimeMerging(torch.ones(1, dtype=F64), 10.0)
    assert field(x).tolist() == torch.zeros(1, 4, 3).tolist()


@pytest.mark.parametrize("name", finite_time.FLOWS)
def test_the_gap_follows_the_closed_form_down_to_1e_24(name: str) -> None:
    field = finite_time.FLOWS[name]
    x = torch.eye(N, DIM, dtype=F64)[None]
    unit = 1.0 if field.normalized else math.exp(-field.beta)
    early = torch.tensor([unit * t for t in (1.0, 2.0, 3.0)], dtype=F64)
    gamma = 1 - finite_time.gaps(field, x, early, unit)[:, 0]
    assert gamma.tolist() == pytest.approx(equiangular(field, n=N, times=early).tolist(), abs=2e-5)
    levels = (1e-3, 1e-6, 1e-12, 1e-24)
    times = torch.tensor([hitting_time(field, n=N, delta=delta) for delta in levels], dtype=F64)
    # a relative error of the rate of h^4/120 = 1.3e-5 over 2 t = 60
    assert finite_time.gaps(field, x, times, unit)[:, 0].tolist() == pytest.approx(levels, rel=1e-3)


def test_the_gap_is_the_mean_over_pairs() -> None:
    x = retract(TrialCase().normal(1, 5, 4, index=0))
    pairs = [1 - float(x[0, i] @ x[0, j]) for i in range(5) for j in range(5) if i != j]
    start = torch.zeros(1, dtype=F64)
    assert finite_time.gaps(SA(beta=1.0), x, start).item() == pytest.approx(np.mean(pairs), abs=1e-14)
    assert steady_order.disorder(SA(beta=1.0), x, start).item() == pytest.approx(np.mean(pairs), abs=1e-14)
    assert 1 - mean_inner_product(x).item() == pytest.approx(np.mean(pairs), abs=1e-14)


@pytest.mark.parametrize("power", [1.0, 2.0, 5.0])
def test_an_arrival_speeds_up_as_its_power_says(power: float) -> None:
    remaining = 10 ** -torch.arange(0, 13, 0.02, dtype=F64)
    ratio = finite_time.speed_up(-remaining, remaining[:, None] ** power, EARLY, LATE).item()
    assert ratio == pytest.approx(10 ** (9 / power), rel=0.05)


def test_a_path_that_never_passes_a_level_has_not_sped_up() -> None:
    times = torch.arange(40, dtype=F64)
    rates = torch.tensor([2.0, 3.0], dtype=F64)
    gap = (-rates * times[:, None]).exp()
    assert finite_time.decay_rate(times, gap, 1e-2).tolist() == pytest.approx(rates.tolist(), rel=1e-14)
    slow = (-0.01 * times[:, None]).exp()
    assert finite_time.decay_rate(times, slow, 1e-2).isnan().all()
    stopped = gap.clamp_min(1e-6)
    for path in (gap, slow, stopped):
        assert finite_time.speed_up(times, path, EARLY, LATE).tolist() == pytest.approx([1.0] * path.shape[1])


def test_a_solver_that_fails_is_an_error_and_not_a_path_without_speed_up() -> None:
    class Broken(Field):
        def velocity(self, x, weights=None, *, t=0.0):
            return torch.where(x[..., :1, :1] > 0.5, torch.stack([-x[..., 1], x[..., 0]], -1), torch.nan)

    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=F64)
    with pytest.raises(HelmscopeError, match="the path of Broken is not finite"):
        finite_time.gaps(Broken(), x, torch.tensor([0.0, 5.0], dtype=F64))


@pytest.mark.parametrize(
    ("fault", "ruling", "failed"),
    [
        ({"integrate": merging_solver}, INCONCLUSIVE, {"planted exponential decay"}),
        ({"integrate": stopping_solver}, INCONCLUSIVE, {"planted merging in finite time"}),
        ({"SA": SpeedingUp}, SUPPORTED, set()),
    ],
)
def test_finite_time_detects_faults(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], ruling: Ruling, failed: set[str]
) -> None:
    """A solver that lets tokens meet lets those of the exponential decay meet, and one that keeps them apart those of
    the field that merges; a flow that speeds up is recognized.
    """
    monkeypatch.setattr(finite_time, "FLOWS", {"SA, beta = 1": SA(beta=1.0)})
    for name, replacement in fault.items():
        monkeypatch.setattr(finite_time, name, replacement)
    verdict = run_trial("finite-time", quick=True).verdict
    assert verdict.ruling is ruling
    assert {control.name for control in verdict.controls if not control.as_expected} == failed


# steady-order


class Fast(SA):
    """Too fast by a relative 1e-5."""

    def velocity(self, x, weights=None, *, t=0.0):
        return (1 + 1e-5) * super().velocity(x, weights)


class WithoutSelf(USA):
    """1/(n-1) instead of 1/n."""

    def scaled_velocity(self, x, weights=None, *, t=0.0):
        velocity, n = super().scaled_velocity(x, weights), x.shape[-2]
        return ScaledVelocity(velocity.direction * (n / (n - 1)), velocity.log_scale)


class Steady(SA):
    """A flow with the pace 2 from orthonormal tokens to the cluster, at any beta: SA(beta=0) over (1 + (n-1) m) / n."""

    def velocity(self, x, weights=None, *, t=0.0):
        scale = 1.0 if self.value is None else self.value[..., :1, :1]
        return scale * finite_time.ExponentialDecay(torch.ones(x.shape[:-2], dtype=F64)).velocity(x)


def test_the_pace_is_steady_in_the_tail_only() -> None:
    verdict = quick("steady-order").verdict
    tail, path = verdict.conditions
    assert (tail.name, tail.ruling, path.name, path.ruling) == ("tail", SUPPORTED, "whole path", REFUTED)
    assert abs(tail.interval.estimate - 1) < 7e-8  # RK4 with h = 0.05: h^4/120 = 5.2e-8
    assert named(verdict, "planted pace that grows with time").interval.estimate == pytest.approx(7 / 3, rel=1e-12)
    assert named(verdict, "SA made faster by 1e-5").interval.estimate == pytest.approx(1.00001, abs=7e-8)
    assert named(verdict, "planted steady pace").interval.estimate == pytest.approx(1, abs=1e-9)
    # the pace rises from 2 / (e^beta + n - 1), and from 2 / n, with n = 32 and beta in [0, 4]
    assert 32 < named(verdict, "largest over smallest pace, SA").interval.low < math.exp(4) + 31
    assert 32 < named(verdict, "largest over smallest pace, USA").interval.low < 32 * math.exp(4)
    assert "rises from 0.0234 to 2:" in verdict.sentence
    assert (verdict.printed.judgment.value, verdict.printed.measured) == ("not testable", None)


@pytest.mark.parametrize(("kind", "first", "last"), [(SA, 1 / (math.exp(4) + 31), 1.0), (USA, 1 / 32, math.exp(4))])
def test_the_pace_runs_from_the_orthogonal_start_to_that_of_the_cluster(kind, first, last) -> None:
    x = torch.eye(32, dtype=F64)[None]
    pace = steady_order.path_pace(kind, torch.tensor([4.0], dtype=F64), x, 1e-3)[:, 0]
    assert pace[0].item() == pytest.approx(2 * first, rel=1e-12)
    assert pace[-1].item() == pytest.approx(2 * last, rel=0.006)  # to order 1e-3 beta
    assert pace.diff().min() > 0


def test_the_pace_along_the_path_is_the_slope_of_the_log() -> None:
    """The pace from velocities against the difference quotient of log(1 - m) of a fine run."""
    x = retract(TrialCase().normal(1, 6, 6, index=0) + 0.3)
    pace = steady_order._pace_over_unit_time(SA(beta=2.0), x)[:, 0]
    h = 1e-3
    for fraction, expected in zip(steady_order.FRACTIONS[1:], pace[1:].tolist(), strict=True):
        before, after = integrate(SA(beta=2.0), x, [fraction - h, fraction + h]).states
        quotient = math.log((1 - mean_inner_product(before)) / (1 - mean_inner_product(after))) / (2 * h)
        assert quotient == pytest.approx(expected, rel=1e-5)


def test_the_pace_of_two_tokens_is_that_of_the_closed_form() -> None:
    """1 - cos theta with tan(theta/2) = tan(theta0/2) e^-t, also far from the cluster."""
    theta = 1.0
    x = torch.tensor([[[1.0, 0.0], [math.cos(theta), math.sin(theta)]]], dtype=F64)
    clock = steady_order.WINDOW * torch.arange(5, dtype=F64)
    angles = 2 * torch.atan(math.tan(theta / 2) * (-clock).exp())
    gap = steady_order.disorder(SA(beta=0.0), x, clock)
    assert gap[:, 0].tolist() == pytest.approx((1 - angles.cos()).tolist(), rel=1e-6)
    slopes = (1 - angles.cos()).log().diff() / steady_order.WINDOW
    assert steady_order.tail_pace(gap)[:, 0].tolist() == pytest.approx((slopes / -2).tolist(), rel=1e-6)


@pytest.fixture
def few_betas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values of beta in the tail, and short paths of few tokens."""
    original = TrialCase.constant
    replaced = {"betas": (0.0, 4.0), "path_tokens": 8, "largest_beta": 1.0}
    monkeypatch.setattr(TrialCase, "constant", lambda case, name: replaced.get(name, original(case, name)))


@pytest.mark.usefixtures("few_betas")
@pytest.mark.parametrize(("name", "fault"), [("SA", Fast), ("USA", WithoutSelf), ("RK4", Heun)])
def test_steady_order_detects_faults(monkeypatch: pytest.MonkeyPatch, name: str, fault: type) -> None:
    """In the tail; a wrong field also differs from the equiangular ODE."""
    monkeypatch.setattr(steady_order, name, fault)
    monkeypatch.setattr(steady_order, "KINDS", (steady_order.SA, steady_order.USA))
    verdict = run_trial("steady-order", quick=True).verdict
    tail = verdict.conditions[0]
    assert named(verdict, "pace of the equiangular ODE").as_expected == (fault is Heun)
    assert tail.ruling is REFUTED
    assert abs(tail.interval.estimate - 1) > 5e-6


@pytest.mark.usefixtures("few_betas")
def test_a_flow_that_is_steady_supports_the_claim_but_not_the_equiangular_ode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_order, "KINDS", (Steady,))
    verdict = run_trial("steady-order", quick=True).verdict
    assert [condition.ruling for condition in verdict.conditions] == [SUPPORTED, SUPPORTED]
    assert named(verdict, "whole path").interval.estimate == pytest.approx(1, abs=1e-6)
    assert [control.name for control in verdict.controls if not control.as_expected] == ["pace of the equiangular ODE"]
    assert verdict.ruling is INCONCLUSIVE
