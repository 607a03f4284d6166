"""Free energy along depth: its terms by autograd, simulated flows whose nu and U are known, and small models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.geometry import surface
from helmscope.observe import free_energy_along_depth
from helmscope.observe.attention_diffusion import attention_diffusion
from helmscope.observe.free_energy import free_energy_unsupported, misfit
from helmscope.observe.mlp_drift_terms import mlp_drift_terms

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def some_force(d: int, *, gated: bool) -> hs.MLP | hs.GatedMLP:
    if gated:
        return hs.GatedMLP(
            w_gate=normal(9, d, seed=1),
            w_up=normal(9, d, seed=2),
            b_gate=normal(9, seed=3),
            w_out=normal(d, 9, seed=4),
            b_out=normal(d, seed=5),
            activation=hs.activations.SiLU(),
        )
    return hs.MLP(
        w_in=normal(9, d, seed=1), b_in=normal(9, seed=3), w_out=normal(d, 9, seed=4), b_out=normal(d, seed=5)
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_the_terms_of_a_force_are_those_of_autograd(gated: bool, centered: bool) -> None:
    """After a LayerNorm everything is written in an orthonormal basis of the vectors of mean 0."""
    d, mlp = 5, some_force(5, gated=gated)
    basis = torch.linalg.qr(torch.cat([torch.ones(d, 1, dtype=F64), torch.eye(d, dtype=F64)], 1))[0][:, centered:d]
    basis = basis if centered else torch.eye(d, dtype=F64)
    z, radius = hs.sphere.retract(normal(6, basis.shape[1])), torch.linspace(0.5, 3, 6, dtype=F64)
    split = hs.helmholtz(mlp)

    def potential(point: torch.Tensor) -> torch.Tensor:
        return split.potential(point @ basis.T)

    def drift(point: torch.Tensor) -> torch.Tensor:
        return mlp.ambient(point @ basis.T) @ basis

    found = mlp_drift_terms(mlp, z @ basis.T, radius, centered=centered)
    torch.testing.assert_close(found.divergence, surface.divergence(drift, z) / radius, atol=1e-11, rtol=0)
    torch.testing.assert_close(found.laplacian, surface.laplacian(potential, z) / radius, atol=1e-11, rtol=0)
    work = (surface.gradient(potential, z) * drift(z)).sum(-1) / radius**2
    torch.testing.assert_close(found.work, work, atol=1e-11, rtol=0)


# --- a flow with known nu and U

NU, D = 0.05, 8
TIMES = [0.0, 0.05, 0.1, 0.15, 0.2]
ROWS = normal(24, D, seed=1)
UPHILL = hs.MLP(w_in=ROWS, w_out=0.15 * ROWS.T, activation=hs.activations.Tanh())  # a gradient


@pytest.fixture(scope="module")
def flow() -> hs.Simulation:
    start = hs.sphere.retract(hs.Uniform(64, D).sample(96, seed=0) + 0.35 * torch.eye(D, dtype=F64)[0])
    return hs.integrate(UPHILL, start, times=TIMES, noise=hs.noise.IsotropicNoise(NU), seed=3)


def deviation(measured, name: str) -> np.ndarray:
    """The difference of predicted and measured curve at all later times, over its standard error."""
    difference = (
        measured[name.replace("gaussian_predicted_free", "free").replace("gaussian_predicted", "gaussian")]
        - measured[name]
    )
    values = difference.transpose("time", "system").values[1:]
    return values.mean(1) / (values.std(1, ddof=1) / values.shape[1] ** 0.5)


def test_the_predicted_curves_are_the_measured_ones(flow: hs.Simulation) -> None:
    measured = free_energy_along_depth(flow, sampled_tokens=None, include_first_token=True)
    for name in ("gaussian_predicted_entropy", "gaussian_predicted_free_energy"):
        assert np.abs(deviation(measured, name)).max() < 3, name
    assert measured.attrs["gaussian_predicted_entropy_misfit"] < 0.1
    assert measured.attrs["gaussian_predicted_free_energy_misfit"] < 0.05
    assert measured.nu.values[1:] == pytest.approx(NU)
    assert bool((measured.free_energy_change[1:].mean("system") < 0).all())


def test_the_other_sign_of_the_potential_predicts_something_else(flow: hs.Simulation) -> None:
    downhill = replace(UPHILL, w_out=-UPHILL.w_out)
    wrong = replace(flow, problem=replace(flow.problem, field=downhill))
    measured = free_energy_along_depth(wrong, sampled_tokens=None, include_first_token=True)
    for name in ("gaussian_predicted_entropy", "gaussian_predicted_free_energy"):
        assert np.abs(deviation(measured, name))[-3:].min() > 10, name
    assert measured.attrs["gaussian_predicted_free_energy_misfit"] > 1
    assert bool((measured.free_energy_change[1:].mean("system") > 0).all())


def test_near_the_uniform_density_the_divergence_predicts_the_gaussian_entropy() -> None:
    """In 24 dimensions with a weak force the law stays nearly normal, and both predictions agree."""
    rows = normal(24, 24, seed=2)
    weak = hs.MLP(w_in=rows, w_out=0.02 * rows.T, activation=hs.activations.Identity())
    start = hs.sphere.retract(hs.Uniform(64, 24).sample(64, seed=1) + 0.1 * torch.eye(24, dtype=F64)[0])
    run = hs.integrate(weak, start, times=TIMES, noise=hs.noise.IsotropicNoise(0.01), seed=2)
    measured = free_energy_along_depth(run, sampled_tokens=None, include_first_token=True)
    assert measured.attrs["predicted_entropy_misfit"] < 0.15
    assert measured.attrs["predicted_free_energy_misfit"] < 0.1


def test_without_noise_the_rate_is_the_work_of_the_force() -> None:
    run = hs.integrate(UPHILL, hs.Uniform(16, D).sample(8, seed=4), times=[0.0, 1e-3])
    measured = free_energy_along_depth(run, sampled_tokens=None, include_first_token=True)
    x = run.states[0].flatten(0, 1)
    gradient = surface.gradient(hs.helmholtz(UPHILL).potential, x)
    expected = -1e-3 * float(gradient.square().sum(-1).mean())
    assert float(measured.predicted_free_energy_change[1].mean()) == pytest.approx(expected, rel=1e-2)
    assert float(measured.free_energy_change[1].mean()) == pytest.approx(expected, rel=1e-2)


def test_the_rates_of_a_gradient_add_up_to_the_formula() -> None:
    """dF/dt = -E|grad U|^2 - 2 nu E Lap U - nu^2 I, by autograd and NumPy."""
    run = hs.integrate(
        UPHILL, hs.Uniform(16, D).sample(8, seed=4), times=[0.0, 1e-9], noise=hs.noise.IsotropicNoise(NU), seed=0
    )
    measured = free_energy_along_depth(run, sampled_tokens=None, include_first_token=True)
    x = run.states[0].flatten(0, 1)
    potential = hs.helmholtz(UPHILL).potential
    slope = float(surface.gradient(potential, x).square().sum(-1).mean())
    bend = float(surface.laplacian(potential, x).mean())

    def formula(points: np.ndarray) -> float:
        c, m = np.cov(points.T, ddof=0), points.mean(0)
        return np.trace(np.linalg.inv(c)) - D**2 - m @ np.linalg.inv(c) @ m

    clouds = run.states[0].numpy()
    left = [formula(np.delete(clouds, p, 0).reshape(-1, D)) for p in range(8)]
    information = 8 * formula(clouds.reshape(-1, D)) - 7 * np.mean(left)
    expected = 1e-9 * (-slope - 2 * NU * bend - NU**2 * information)
    assert float(measured.predicted_free_energy_change[1].mean()) == pytest.approx(expected, rel=1e-4)


# --- models

TEXTS = torch.tensor([[(7 * k + 3 * i * (k + 1)) % 60 for i in range(12)] for k in range(12)])


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 10, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    return GPT2LMHeadModel(config).double().eval()


def test_a_model_is_measured_as_by_hand() -> None:
    """Delta F of one MLP and one attention half-step, with every cloud without one prompt computed again."""
    recording = hs.record(small_model(), TEXTS)
    measured = free_energy_along_depth(recording, sampled_tokens=None)
    nus = attention_diffusion(recording).total_nu_token_sampling.values
    basis = torch.linalg.qr(torch.cat([torch.ones(10, 1, dtype=F64), torch.eye(10, dtype=F64)], 1))[0][:, 1:10]

    def free_energy(depth: int, layer: int, kept: list[int]) -> float:
        x = recording.trajectory.states[depth][kept][:, 1:]
        points = (x @ basis).flatten(0, 1).numpy()
        entropy = 0.5 * np.linalg.slogdet(2 * np.pi * np.e * np.cov(points.T, ddof=0))[1]
        radius = recording.trajectory.radius[2 * layer + 1][kept][:, 1:]
        potential = hs.helmholtz(recording.force(layer=layer)).potential(x) / radius
        return -nus[layer, kept].mean() * entropy - float(potential.mean())

    for depth, layer in ((1, 0), (4, 1)):
        everyone = list(range(12))

        def change(kept: list[int], depth: int = depth, layer: int = layer) -> float:
            return free_energy(depth, layer, kept) - free_energy(depth - 1, layer, kept)

        expected = [12 * change(everyone) - 11 * change([q for q in everyone if q != p]) for p in everyone]
        assert measured.free_energy_change.values[depth] == pytest.approx(expected, abs=1e-8)
    assert measured.half.values.tolist() == ["", "attention", "mlp", "attention", "mlp"]
    assert measured.attrs["rank"] == 9
    parts = measured.entropy_term + measured.potential_term
    np.testing.assert_allclose(parts.values, measured.free_energy_change.values, atol=1e-12)
    np.testing.assert_allclose(
        measured.free_energy.values[-1], measured.free_energy_change.values[1:].sum(0), atol=1e-10
    )
    assert "constant" in measured.free_energy_as_printed.attrs["long_name"]
    assert hs.plot(measured).axes


def test_what_has_no_free_energy_is_refused() -> None:
    x = hs.Uniform(5, 3).sample(4, seed=0)
    mlp = some_force(3, gated=False)
    runs = {
        "needs an MLP alone": hs.integrate(hs.SA(1.0), x, times=[0.0, 1.0]),
        "needs a flow on the sphere": hs.integrate(mlp, x, times=[0.0, 1.0], stepper=hs.Layer()),
        "at least 2: it is that of all": hs.integrate(mlp, x[0], times=[0.0, 1.0]),
        "has one stored time": hs.integrate(mlp, x, times=[0.0]),
        "needs IsotropicNoise": hs.integrate(
            mlp, x, times=[0.0, 0.1], noise=hs.noise.MatrixNoise(torch.diag(torch.tensor([1.0, 2.0, 3.0]).double()))
        ),
        "post-norm blocks": hs.record("tied", ["Once upon a time", "The cat sat"]),
    }
    for words, run in runs.items():
        with pytest.raises(hs.HelmscopeError, match=words):
            free_energy_along_depth(run)
        assert words in str(free_energy_unsupported(run))


def test_misfit() -> None:
    assert misfit(np.array([1.0, -1.0]), np.array([1.0, 1.0])) == pytest.approx(2**0.5)
    assert np.isnan(misfit(np.zeros(3), np.ones(3)))
