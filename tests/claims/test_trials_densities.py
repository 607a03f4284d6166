"""The trials with densities: verdicts, closed forms, and faults that a named condition or control must detect."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy import integrate as quadrature

from helmscope.claims.circle_functions import derivative, harmonic_sum, quantile_angles, random_harmonics
from helmscope.claims.experiments import (
    curvature_drift,
    entropy_identity,
    free_energy_descends,
    jko_step,
    mean_field_limit,
    whitening,
)
from helmscope.claims.registry import TrialCase, registered_case
from helmscope.claims.trial import Trial, run_trial
from helmscope.fields.attention import SA
from helmscope.fields.noise import DivergenceForm, IsotropicNoise, Ito, MatrixNoise, Stratonovich
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.meanfield.sphere_grid import SphereGrid
from helmscope.transport import w2
from helmscope.types import Ruling

F64 = torch.float64
EXPECTED = {
    "entropy-identity": Ruling.SUPPORTED,
    "free-energy-descends": Ruling.SUPPORTED,
    "jko-step": Ruling.SUPPORTED,
    "mean-field-limit": Ruling.SUPPORTED,
    "whitening": Ruling.REFUTED,
}


@functools.cache
def quick(claim: str) -> Trial:
    return run_trial(claim, quick=True)


def failed_controls(claim: str) -> list[str]:
    return [control.name for control in run_trial(claim, quick=True).verdict.controls if not control.as_expected]


@pytest.mark.parametrize("claim", EXPECTED)
def test_the_ruling_is_as_expected_and_every_control_holds(claim: str) -> None:
    verdict = quick(claim).verdict
    assert verdict.ruling is EXPECTED[claim], verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    assert quick(claim).data.sizes["system"] >= 2


def test_harmonic_sums_and_their_derivative_are_those_of_cosines_and_sines() -> None:
    t = torch.linspace(0, 6, 7, dtype=F64)
    coefficients = random_harmonics(TrialCase(seed=3), 4, 3, index=0)
    points = torch.stack([t.cos(), t.sin()], -1)
    k = torch.arange(1, 4)[:, None]
    cos, sin = (k * t).cos(), (k * t).sin()
    expected = coefficients[..., 0] @ cos + coefficients[..., 1] @ sin
    torch.testing.assert_close(harmonic_sum(coefficients, points), expected, atol=1e-14, rtol=0)
    slope = (k[:, 0] * coefficients[..., 1]) @ cos - (k[:, 0] * coefficients[..., 0]) @ sin
    torch.testing.assert_close(harmonic_sum(derivative(coefficients), points), slope, atol=1e-13, rtol=0)


# --- entropy-identity


def mean_second_derivative(log_density: torch.Tensor, log_sigma: torch.Tensor) -> float:
    """E[Sigma''] by SciPy's quadrature."""

    def value(coefficients: torch.Tensor, t: float) -> float:
        return harmonic_sum(coefficients, torch.tensor([[math.cos(t), math.sin(t)]], dtype=F64)).item()

    def bend(t: float) -> float:
        first, second = value(derivative(log_sigma), t), value(derivative(derivative(log_sigma)), t)
        return math.exp(value(log_density, t) + value(log_sigma, t)) * (second + first**2)

    mass = quadrature.quad(lambda t: math.exp(value(log_density, t)), 0, 2 * math.pi, epsabs=1e-12)[0]
    return quadrature.quad(bend, 0, 2 * math.pi, epsabs=1e-12)[0] / mass


def test_the_entropy_rates_differ_by_the_second_derivative_of_sigma() -> None:
    """Ito noise lacks -E[Sigma''], Stratonovich noise half of it."""
    settings = entropy_identity.random_settings(TrialCase(seed=1), 2)
    grid = CircleGrid(degree=32)
    divergence_form, ito, stratonovich = (
        entropy_identity.entropy_rates(settings, grid, process).exact
        for process in (DivergenceForm(), Ito(), Stratonovich())
    )
    for k in range(2):
        bend = mean_second_derivative(settings.log_density[k], settings.log_sigma[k])
        assert (ito - divergence_form)[k].item() == pytest.approx(-bend, abs=1e-9)
        assert (stratonovich - divergence_form)[k].item() == pytest.approx(-bend / 2, abs=1e-9)


def test_a_fisher_information_without_its_weight_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both conditions compare the rate of the solver with the two terms."""
    original = entropy_identity.entropy_rates

    def unweighted(settings, grid, process):
        rates = original(settings, grid, process)
        return rates._replace(fisher=1.2 * rates.fisher)

    monkeypatch.setattr(entropy_identity, "entropy_rates", unweighted)
    assert run_trial("entropy-identity", quick=True).verdict.conditions[1].ruling is Ruling.REFUTED


# --- free-energy-descends


def test_the_free_energies_of_the_known_flow_are_in_the_remark() -> None:
    remark = quick("free-energy-descends").verdict.sentence
    assert "F falls from -0.8866 to -1.3244" in remark
    assert "F as printed, with + int U, rises from -0.8866 to -0.0556" in remark


def test_what_is_printed_is_measured_to_be_false() -> None:
    printed = quick("free-energy-descends").verdict.printed
    assert printed.judgment.value == printed.measured.value == "false"


def test_a_solver_that_moves_with_another_drift_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control "rate of F" compares the solver with the formula."""
    original = free_energy_descends.GivenDrift
    monkeypatch.setattr(free_energy_descends, "GivenDrift", lambda values: original(-values))
    errors = free_energy_descends.rate_errors(TrialCase(), CircleGrid(degree=24), 0.5)
    assert float(errors.min()) > 1e-6


def test_along_a_flow_that_descends_u_the_free_energy_rises() -> None:
    noise, grid, times = IsotropicNoise(0.5), CircleGrid(degree=24), [0.0, 3.0]
    for each in free_energy_descends.random_landscapes(TrialCase(), 4):
        (before, _), (after, _) = free_energy_descends.follow(
            each, each.log_start, each.force(sign=-1.0), grid, noise, times
        )
        assert after > before


# --- jko-step


def test_the_fixed_point_of_a_gaussian_step_and_a_fault_in_it() -> None:
    k = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=F64)
    assert jko_step.fixed_point_error(k, torch.linalg.inv(k), 0.1, 0.4) < 1e-14
    assert jko_step.fixed_point_error(k, 1.1 * torch.linalg.inv(k), 0.1, 0.4) > 1e-3


def test_quantiles_are_those_of_the_distribution_function() -> None:
    """(1 + sin(t) / 2) / 2 pi: F(t) = (t + (1 - cos t) / 2) / 2 pi."""
    density = Density.from_function(CircleGrid(16), lambda x: 1 + 0.5 * x[:, 1], normalize=True)
    for level, angle in zip((np.arange(7) + 0.5) / 7, quantile_angles(density, 7).tolist(), strict=True):
        assert (angle + (1 - math.cos(angle)) / 2) / (2 * math.pi) == pytest.approx(level, abs=1e-14)


def test_the_distance_on_the_circle_is_that_of_optimal_transport() -> None:
    """Against the exact solver on clouds of 2,000 points; a rotation by 1 is 1 at most, wherever quantiles begin."""
    grid = CircleGrid(24)
    starts = [
        Density.from_function(grid, lambda x, a=a: (a * x[:, 0] + x[:, 1] ** 2).exp(), normalize=True)
        for a in (1, -1.5)
    ]
    first, second = (quantile_angles(density, 2000) for density in starts)
    clouds = [torch.stack([angles.cos(), angles.sin()], -1) for angles in (first, second)]
    assert jko_step.circle_w2(first, second) == pytest.approx(float(w2(*clouds)), abs=2e-3)
    turned = quantile_angles(Density.von_mises_fisher(grid, kappa=2.0, center=torch.tensor([0.6, 0.8])), 512)
    straight = quantile_angles(Density.von_mises_fisher(grid, kappa=2.0), 512)
    assert 0.5 < jko_step.circle_w2(turned, straight) < math.acos(0.6)


def test_what_is_left_of_the_gap_is_of_order_tau() -> None:
    """Of the layer and of the flow, both with T, U and noise."""
    case = registered_case("jko-step")
    layer, other = jko_step.random_layers(case, 2)
    shares = [jko_step.closed_gate_shares(layer, other, tau, 0.4)["U"] for tau in (0.1, 0.05, 0.025)]
    left = 1 - np.array(shares)
    assert np.abs(np.log2(left[:-1] / left[1:]) - 1).max() < 0.15  # order 1, layer and flow


def test_the_force_of_a_block_is_the_gradient_of_its_potential() -> None:
    layer = jko_step.random_layers(registered_case("jko-step"), 1)[0]
    x = CircleGrid(4).points
    assert torch.allclose(jko_step.helmholtz(layer.mlp).gradient(x), layer.mlp(x), rtol=0, atol=1e-14)


def exchanged_signs(original, layer, other, start, tau, nu):
    """Minimizers for the wrong sign of V."""
    found = original(layer, other, start, tau, nu)
    return found | {"U": found["-U"], "-U": found["U"]}


@pytest.mark.parametrize(
    ("name", "fault", "condition", "controls"),
    [
        ("minimizers", exchanged_signs, Ruling.REFUTED, ["potential of the opposite sign"]),
        ("run_layer", lambda original, block, angles, tau: angles, Ruling.REFUTED, []),
        ("run_layer", lambda original, block, angles, tau: original(block, angles, -tau), Ruling.REFUTED, []),
    ],
    ids=["energy of the wrong sign", "a layer that writes nothing", "a layer that goes backward"],
)
def test_a_faulty_layer_is_detected(name, fault, condition, controls, monkeypatch: pytest.MonkeyPatch) -> None:
    few = jko_step.random_layers
    monkeypatch.setattr(jko_step, "random_layers", lambda case, count: few(case, 8))
    monkeypatch.setattr(jko_step, name, functools.partial(fault, getattr(jko_step, name)))
    verdict = run_trial("jko-step", quick=True).verdict
    assert verdict.conditions[0].ruling is condition
    assert [control.name for control in verdict.controls if not control.as_expected][:1] == controls[:1]


def test_sentences_name_the_statistic_and_what_the_trial_shows() -> None:
    assert quick("jko-step").verdict.sentence.startswith("Supported (share of the gap closed): ")
    assert quick("whitening").verdict.sentence.startswith("Refuted (change of the share): ")
    sentence = quick("free-energy-descends").verdict.sentence
    assert "With the swirl R = 3 from the Gibbs density, F rises from -1.3309 to " in sentence


# --- whitening


def test_the_shares_of_the_counterexample() -> None:
    """[[1, 1], [.25, 2]]: |A|^2 = 2 .375^2 of |S'|^2 = 1 + 1 + 1/16 + 4."""
    before, after = whitening.shares(whitening.HESSIAN[None], whitening.SIGMA[None])
    assert before.item() == 0
    assert after.item() == pytest.approx(2 * 0.375**2 / 6.0625, rel=1e-12)


def test_whitening_by_the_wrong_power_fails_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    original = whitening.whiten
    monkeypatch.setattr(whitening, "whiten", lambda drift, sigma: original(drift, sigma @ sigma))
    assert set(failed_controls("whitening")) == {"drift -Sigma grad V", "counterexample"}


# --- mean-field-limit


def test_quantiles_of_a_known_density() -> None:
    """(1 + sin(t) / 2) / 2 pi: t + (1 - cos t) / 2 = 2 pi level."""
    density = Density.from_function(CircleGrid(degree=8), lambda x: (1 + 0.5 * x[..., 1]) / (2 * math.pi))
    levels = torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=F64)
    points = mean_field_limit.quantile_points(density, levels)
    t = torch.atan2(points[:, 1], points[:, 0]) % (2 * math.pi)
    torch.testing.assert_close((t + (1 - t.cos()) / 2) / (2 * math.pi), levels, atol=1e-9, rtol=0)


def test_zonal_samples_have_the_mean_of_their_density() -> None:
    density = Density.von_mises_fisher(SphereGrid(degree=16), kappa=2.0)
    x = mean_field_limit.zonal_samples(density, 1, 100_000, seed=0)[0]
    assert x[:, 0].mean().item() == pytest.approx(1 / math.tanh(2) - 0.5, abs=4 * 0.5 / math.sqrt(1e5))
    assert x[:, 1:].mean(0).abs().max().item() < 0.01


def test_tokens_of_another_beta_do_not_approach_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The condition is refuted, and the plateau is missed: these tokens approach the density of the other beta."""
    original = mean_field_limit.integrate
    monkeypatch.setattr(
        mean_field_limit, "integrate", lambda field, x, times, **options: original(SA(beta=6.0), x, times, **options)
    )
    case = registered_case("mean-field-limit", quick=True)
    circle, sizes = mean_field_limit._on_circle(case), case.constant("sizes")
    assert float(mean_field_limit.log_slope(sizes, circle.tokens).mean()) > -0.25
    assert float(mean_field_limit.log_slope(sizes, circle.other_beta).mean()) == pytest.approx(-0.5, abs=0.1)
    assert float((circle.other_beta[:, -1] / circle.between).mean()) < 0.5


# --- curvature-drift in densities


def test_the_stationary_law_of_stratonovich_noise_is_the_known_one() -> None:
    """sigma = diag(2, 1): E cos 2t = .16912003679316695; uniform for the chain and the divergence form."""
    grid = CircleGrid(degree=64)
    m = torch.diag(torch.tensor([2.0, 0.5], dtype=F64))
    cosine = grid.points[:, 0] ** 2 - grid.points[:, 1] ** 2
    means = {}
    for name, process in curvature_drift.PROCESSES.items():
        values = curvature_drift.stationary_values(ForwardEquation.of(None, grid, MatrixNoise(m, process=process)))
        means[name] = grid.mean_of(values * cosine).item()
    assert means["Stratonovich"] == pytest.approx(0.16912003679316695, abs=1e-12)
    assert means["Ito"] == pytest.approx((1 - math.sqrt(1 - 0.36)) / 0.6, abs=1e-12)  # r = (2 - .5) / (2 + .5) = .6
    assert abs(means["chain"]) < 1e-13
    assert abs(means["divergence form"]) < 1e-13


def test_a_forward_equation_with_another_drift_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain solved with the forward equation of Stratonovich noise."""
    monkeypatch.setitem(curvature_drift.PROCESSES, "chain", Stratonovich())
    monkeypatch.setattr(curvature_drift, "NOISES", 4)
    assert float(curvature_drift.forward_errors(TrialCase())[:, 0].max()) > 1e-2
    monkeypatch.setattr(curvature_drift, "LAWS", 4)
    assert float(curvature_drift.stationary_errors(TrialCase()).max()) > 1e-2
