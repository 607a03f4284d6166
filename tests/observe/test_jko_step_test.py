"""JKO steps of layers: the numbers of the theory, planted layers, autograd oracles of the energy, and the jackknife."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from transformers import GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.fields.activations import SiLU, Tanh
from helmscope.meanfield.gaussian import Gaussian
from helmscope.observe.attention_diffusion import attention_diffusion
from helmscope.observe.gaussian_step import CloudPair, FittedStep
from helmscope.observe.jko_step_test import LayerSteps, jko_step_test, jko_unsupported
from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy, force_sums
from helmscope.observe.step_replicates import step_replicates

F64 = torch.float64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def symmetric(dim: int, seed: int = 0) -> torch.Tensor:
    matrix = random(dim, dim, seed=seed)
    return (matrix + matrix.mT) / 2


def flat(dim: int, stiffness: torch.Tensor | None = None, nu: float = 0.0) -> QuadraticFreeEnergy:
    zero = torch.zeros(dim, dtype=F64)
    return QuadraticFreeEnergy(torch.zeros(dim, dim, dtype=F64) if stiffness is None else stiffness, zero, zero, nu)


def test_the_numbers_of_the_theory() -> None:
    """k = 1.5, nu = 0.4, tau = 0.1, m = 2, s = 1.3; the same V written about another point; the fixed point nu / k."""
    one = torch.ones(1, 1, dtype=F64)
    before = Gaussian(2 * one[0], 1.69 * one)
    for at in (0.0, -3.0):
        energy = QuadraticFreeEnergy(1.5 * one, 1.5 * at * one[0], at * one[0], 0.4)
        law = FittedStep(energy, 0.1, one).minimizer(before)
        assert law.mean.item() == pytest.approx(1.7391304347826089, rel=1e-14)
        assert law.covariance.sqrt().item() == pytest.approx(1.1604092159529602, rel=1e-14)
    rest = Gaussian(0 * one[0], 0.4 / 1.5 * one)
    law = FittedStep(flat(1, 1.5 * one, 0.4), 0.1, one).minimizer(rest)
    assert law.covariance.item() == pytest.approx(0.4 / 1.5, rel=1e-14)


def test_the_minimizer_minimizes_the_objective() -> None:
    """Against a minimization over means and Cholesky factors, for an indefinite V with a slope."""
    energy = QuadraticFreeEnergy(symmetric(2, seed=1), random(2, seed=2), random(2, seed=3), 0.3)
    root = random(2, 2, seed=4)
    before = Gaussian(random(2, seed=5), root @ root.mT + 0.1 * torch.eye(2, dtype=F64))
    step = FittedStep(energy, 0.2, torch.eye(2, dtype=F64))

    def law(parameters: np.ndarray) -> Gaussian:
        factor = np.array([[np.exp(parameters[2]), 0.0], [parameters[3], np.exp(parameters[4])]])
        return Gaussian(torch.tensor(parameters[:2]), torch.tensor(factor @ factor.T))

    found = optimize.minimize(
        lambda p: step.objective(law(p), before), np.zeros(5), method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000, "maxfev": 4000},
    )  # fmt: skip
    least = step.minimizer(before)
    assert law(found.x).mean.numpy() == pytest.approx(least.mean.numpy(), abs=1e-5)
    assert law(found.x).covariance.numpy() == pytest.approx(least.covariance.numpy(), abs=1e-5)
    assert found.fun == pytest.approx(step.objective(least, before), abs=1e-10)
    values = step.values(before, before)
    assert values[0] == pytest.approx(0, abs=1e-12)
    assert values[1] == values[2] > values[3]


def cloud(prompts: int = 12, n: int = 30, d: int = 3) -> torch.Tensor:
    return random(prompts, n, d) * torch.tensor([1.0, 0.7, 0.5], dtype=F64)[:d] + random(prompts, 1, d, seed=1) / 4


def shares(after: torch.Tensor, energy: QuadraticFreeEnergy) -> tuple[np.ndarray, FittedStep]:
    """The pseudo-values of the share on the last six prompts, with tau from the first six."""
    pair = CloudPair(cloud(), after, torch.ones(12, 30, dtype=F64))
    step = pair.fit(energy, pair.axes(3, list(range(6)), list(range(6, 12))), list(range(6)))
    return step_replicates(pair, step, energy, list(range(6)), list(range(6, 12)), parts=1).numpy()[6:, 0], step


def test_an_exact_step_closes_the_gap() -> None:
    """The optimal map of a JKO step is affine; without noise it is (1 + tau K)^-1, whatever the law."""
    stiffness = symmetric(3, seed=7)
    matrix = torch.linalg.inv(torch.eye(3, dtype=F64) + 0.25 * stiffness)
    slope = torch.tensor([0.3, -0.2, 0.5], dtype=F64)
    energy = QuadraticFreeEnergy(stiffness, slope, torch.zeros(3, dtype=F64), 0.0)
    found, step = shares((cloud() - 0.25 * slope) @ matrix, energy)
    assert step.tau == pytest.approx(0.25, rel=0.1)
    assert found.mean() > 0.9
    exact = FittedStep(step.energy, 0.25, step.axes)
    pair = CloudPair(cloud(), (cloud() - 0.25 * slope) @ matrix, torch.ones(12, 30, dtype=F64))
    before, after = pair.moments(step.axes, list(range(6, 12))).laws()
    assert exact.closed(before, after) == pytest.approx(1, abs=1e-6)


def test_an_exact_step_with_noise_closes_the_gap() -> None:
    """The map between the laws of the selected tokens, C^-1/2 (C^1/2 C' C^1/2)^1/2 C^-1/2, moves all tokens."""
    energy = flat(3, symmetric(3, seed=7) + torch.eye(3, dtype=F64), nu=0.5)
    x, eye = cloud(), torch.eye(3, dtype=F64)
    pair = CloudPair(x, x, torch.ones(12, 30, dtype=F64))
    before = pair.moments(eye, list(range(12))).laws()[0]
    law = FittedStep(energy, 0.2, eye).minimizer(before)

    def power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values**exponent) @ vectors.mT

    root, back = power(before.covariance, 0.5), power(before.covariance, -0.5)
    moving = back @ power(root @ law.covariance @ root, 0.5) @ back
    found, step = shares((x - before.mean) @ moving + law.mean, energy)
    assert found.mean() > 0.9
    assert step.tau == pytest.approx(0.2, rel=0.2)


def test_a_rotation_closes_no_gap() -> None:
    turn = torch.linalg.matrix_exp(0.3 * (random(3, 3, seed=9) - random(3, 3, seed=9).mT))
    found, _ = shares(cloud() @ turn, flat(3, torch.eye(3, dtype=F64)))
    assert found.mean() < 0.3


def test_diffusion_closes_the_gap_only_for_an_energy_with_entropy() -> None:
    """Gaussian noise of variance 2 nu tau is a step of nu Ent to first order in tau; without V and nu there is none."""
    x = cloud(12, 600)
    noisy = x + (2 * 0.4 * 0.1) ** 0.5 * random(12, 600, 3, seed=8)
    pair = CloudPair(x, noisy, torch.ones(12, 600, dtype=F64))

    def share(energy: QuadraticFreeEnergy) -> tuple[float, float]:
        step = pair.fit(energy, pair.axes(3, list(range(6)), list(range(6, 12))), list(range(6)))
        found = step_replicates(pair, step, energy, list(range(6)), list(range(6, 12)), parts=1)
        return float(found[6:, 0].mean()), step.tau

    closed, tau = share(flat(3, nu=0.4))
    assert closed > 0.8
    assert tau == pytest.approx(0.1, rel=0.2)
    assert np.isnan(share(flat(3))[0])
    assert share(flat(3, torch.eye(3, dtype=F64)))[0] < 0.1  # which contracts


def test_pseudo_values_are_those_of_leaving_prompts_out() -> None:
    x = cloud()
    pair = CloudPair(x, 0.9 * x + 0.05 * x.square(), torch.ones(12, 30, dtype=F64))
    axes = pair.axes(2, list(range(6)), list(range(6, 12)))
    energy, test = flat(3, torch.eye(3, dtype=F64), nu=0.01), list(range(6, 12))
    step = pair.fit(energy, axes, list(range(6)))

    def share(prompts: list[int]) -> float:
        z = (torch.cat([pair.before[k] for k in prompts]) @ axes).numpy()
        w = (torch.cat([pair.after[k] for k in prompts]) @ axes).numpy()
        law = [Gaussian(torch.tensor(a.mean(0)), torch.tensor(np.cov(a.T, ddof=0))) for a in (z, w)]
        least = step.minimizer(law[0])
        return 1 - law[1].w2(least) / law[0].w2(least)

    expected = [6 * share(test) - 5 * share([j for j in test if j != k]) for k in test]
    found = step_replicates(pair, step, energy, list(range(6)), test).numpy()
    assert found[6:, 0] == pytest.approx(expected, abs=1e-9)
    assert np.isnan(found[:6]).all()  # what the first half contributed to the energy is not known


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_sums_of_forces_are_those_of_autograd(gated: bool, centered: bool) -> None:
    d, h = 5, 7
    if gated:
        mlp = hs.GatedMLP(
            w_gate=random(h, d, seed=1), w_up=random(h, d, seed=2), w_out=random(d, h, seed=3), activation=SiLU()
        )
    else:
        mlp = hs.MLP(w_in=random(h, d, seed=1), w_out=random(d, h, seed=3), b_in=random(h, seed=4), activation=Tanh())
    x = random(6, d, seed=5)
    x = torch.nn.functional.normalize(x - x.mean(-1, keepdim=True) if centered else x, dim=-1)
    m, radius = torch.arange(1.0, 7.0, dtype=F64), torch.linspace(1, 3, 6, dtype=F64)
    found = force_sums(mlp, x, m, radius, centered=centered)
    force, jacobian = torch.zeros(d, dtype=F64), torch.zeros(d, d, dtype=F64)
    for point, mass, length in zip(x, m, radius, strict=True):

        def onto(z: torch.Tensor) -> torch.Tensor:
            return torch.eye(d, dtype=F64) - torch.outer(z, z) / (z @ z) - (1 / d if centered else 0)

        def tangential(z: torch.Tensor) -> torch.Tensor:
            return onto(z) @ mlp(z[None] / z.norm())[0]

        slopes = torch.autograd.functional.jacobian(tangential, point)
        force += mass / length * tangential(point)
        jacobian += mass / length * onto(point) @ slopes @ onto(point)
    assert found["force"].numpy() == pytest.approx(force.numpy(), abs=1e-12)
    assert found["jacobian"].numpy() == pytest.approx(jacobian.numpy(), abs=1e-11)
    assert found["point"].numpy() == pytest.approx((m[:, None] * x).sum(0).numpy(), abs=1e-12)
    assert float(found["mass"]) == 21


def small_model(layers: int = 2) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=8, n_head=2, n_layer=layers, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


IDS = torch.randint(1, 64, (10, 12), generator=torch.Generator().manual_seed(1))


def test_the_energy_of_a_small_model() -> None:
    recording = hs.record(small_model(), IDS)
    steps = LayerSteps.of(recording, seed=2)
    energy, selected = steps.energies[1], steps.selection.tolist()
    states, force = recording.residual_stream(depth=3), recording.force(layer=1)
    x = recording.force_points(layer=1)[selected][:, 1:].flatten(0, 1)
    x = x / x.norm(dim=-1, keepdim=True)
    radius = (states - states.mean(-1, keepdim=True)).norm(dim=-1)[selected][:, 1:].flatten()
    slope, at = torch.zeros(8, dtype=F64), x.mean(0)
    for point, length in zip(x, radius, strict=True):
        value = force.ambient(point[None])[0]
        slope -= (value - value.mean() - (point @ value) * point) / length / len(x)
    assert energy.slope.numpy() == pytest.approx(slope.numpy(), abs=1e-9)
    assert energy.at.numpy() == pytest.approx(at.numpy(), abs=1e-9)
    plain = [list(IDS[k].tolist()) for k in selected]
    nu = attention_diffusion(hs.record(small_model(), torch.tensor(plain)))
    assert (
        0 < energy.nu < 12 / 11 * float(nu.total_nu_token_sampling[1].mean()) * (1 + 1e-9)
    )  # the first token has a nu of 0
    assert energy.nu == pytest.approx(12 / 11 * float(nu.total_nu_token_sampling[1].mean()), rel=1e-6)


def test_the_measurement_of_a_small_model() -> None:
    recording = hs.record(small_model(), IDS)
    measured = jko_step_test(recording, principal_axes=2, seed=2)
    assert measured.gap_closed_share.dims == ("layer", "prompt")
    assert measured.prompt.values.tolist() == list(range(10))
    assert measured.attrs["fitted_on"] == LayerSteps.of(recording, seed=2).selection.tolist()
    assert {"gap_closed_share", "gap_closed_share_projected", "gap_closed_share_mlp"} <= set(measured.data_vars)
    means = measured.mean("prompt")
    assert (means.objective_minimizer < means.objective_input).all()
    assert (means.objective_minimizer < means.objective_output).all()
    assert (measured.tau > 0).all()
    again = jko_step_test(hs.record(small_model(), IDS, batch_size=3), principal_axes=2, seed=2)
    assert measured.gap_closed_share.values == pytest.approx(again.gap_closed_share.values, rel=1e-5)
    assert hs.stats.reduce_replicates(measured).attrs["n"] == 10


def test_the_step_of_the_whole_layer_alone() -> None:
    recording = hs.record(small_model(), IDS)
    alone, full = jko_step_test(recording, whole_layer_only=True), jko_step_test(recording, principal_axes=2)
    assert set(full.data_vars) - set(alone.data_vars) == {"gap_closed_share_projected", "gap_closed_share_mlp"}
    assert alone.identical(full[list(alone.data_vars)].assign_attrs(left_out=alone.left_out))
    quick = hs.measure(recording, only=["jko_step_test"], quick=True)["jko_step_test"]
    assert quick.left_out.startswith("gap_closed_share_projected and gap_closed_share_mlp")
    assert "left_out" not in full.attrs
    with pytest.raises(hs.HelmscopeError, match="whole_layer_only is 1, but it must be True or False"):
        jko_step_test(recording, whole_layer_only=1)


def test_a_layer_that_descends_its_energy_closes_the_gap_and_one_that_turns_does_not() -> None:
    """A block on the sphere with attention that writes nothing and a linear force -K x, or a rotation."""
    x = torch.nn.functional.normalize(random(12, 40, 3), dim=-1)
    still = hs.SA(beta=1.0, value=torch.zeros(3, 3, dtype=F64))
    stiffness, turn = torch.diag(torch.tensor([2.0, 0.0, -1.0], dtype=F64)), random(3, 3, seed=9)

    def share(matrix: torch.Tensor) -> float:
        mlp = hs.MLP(w_in=torch.eye(3, dtype=F64), w_out=matrix, activation=hs.activations.Identity())
        run = hs.integrate(hs.Block(still, mlp), x, times=[0.0, 0.05])
        return float(jko_step_test(run, principal_axes=2).gap_closed_share.mean())

    assert share(-stiffness) > 0.8
    rotation = share(turn - turn.mT)
    assert np.isnan(rotation) or rotation < 0.3


def test_refusals_are_sentences() -> None:
    few = hs.record(small_model(), IDS[:3])
    assert (
        jko_unsupported(few) == "system has 3 prompts, but jko_step_test fits on one half of them and needs at least 4"
    )
    with pytest.raises(hs.HelmscopeError, match="needs at least 4"):
        jko_step_test(few)
    run = hs.integrate(hs.SA(beta=1.0), torch.eye(3).expand(4, 3, 3), times=[0.0])
    assert jko_unsupported(run) == "system has 1 stored time, but jko_step_test compares two"
    pair = CloudPair(cloud(), cloud(), torch.ones(12, 30, dtype=F64))
    flattened = CloudPair(cloud(), cloud() * torch.tensor([1.0, 1.0, 0.0], dtype=F64), pair.weights)
    with pytest.raises(hs.HelmscopeError, match="spans 2 of 3 directions"):
        flattened.moments(torch.eye(3, dtype=F64), [0, 1]).laws()
    assert flattened.axes(3, [0, 1], [2, 3]).shape == (3, 2)
    assert pair.axes(3, [0, 1], [2, 3]).shape == (3, 3)


def test_a_text_of_one_token_is_named() -> None:
    assert jko_unsupported(hs.record(small_model(1), IDS[:, :1])) == (
        "prompt 0 has no token that counts besides the first, but jko_step_test needs one"
    )


def test_copies_of_a_text_span_few_directions_and_identical_tokens_none() -> None:
    copies = jko_step_test(hs.record(small_model(1), torch.full((6, 5), 3)))  # 4 positions span 3 directions
    assert np.isfinite(copies.gap_closed_share.values).all()
    with pytest.raises(hs.HelmscopeError, match="all tokens of the cloud are the same"):
        jko_step_test(hs.record(small_model(1), torch.full((6, 2), 3)))
