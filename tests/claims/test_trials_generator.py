"""The trials of generator, mobility and attention-diffuses: verdicts, closed forms, and faults they must detect; that
of generator on planted models too.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from helmscope.claims.experiments import attention_diffuses, generator, mobility
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import Trial, run_trial
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract, tangent_basis
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.models.subject import Subject
from helmscope.observe.diffusion import token_sampling_covariance
from helmscope.observe.generator import ambient_generator, convergence_order
from helmscope.observe.probes import ScaledStep
from helmscope.types import Ruling
from support.trials import failures, interval, named, rulings

F64 = torch.float64
EXPECTED = {
    "generator": Ruling.BY_CONSTRUCTION,
    "mobility": Ruling.REFUTED,
    "attention-diffuses": Ruling.REFUTED,
}


@functools.cache
def quick(claim: str) -> Trial:
    return run_trial(claim, quick=True)


@pytest.mark.parametrize("claim", EXPECTED)
def test_the_ruling_is_as_expected_and_every_control_holds(claim: str) -> None:
    verdict = quick(claim).verdict
    assert verdict.ruling is EXPECTED[claim], verdict.sentence
    assert all(control.as_expected for control in verdict.controls)
    assert quick(claim).data.sizes["system"] >= 2


# the example: three tokens on the plane, one query, W_V = [[1, 2], [0, 1]]
TOKENS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=F64)
WEIGHTS = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64)
VALUE = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=F64)
POINT = torch.tensor([[0.3, -0.2]], dtype=F64)
DRIFT = torch.tensor([[0.4, -0.1]], dtype=F64)


def example(x: torch.Tensor) -> torch.Tensor:
    return (x[..., 0] + 2 * x[..., 1]).sin() + x[..., 0] ** 3


def test_skewed_noise_errs_by_the_known_multiple_of_the_root_of_eps() -> None:
    values = TOKENS @ VALUE.mT
    deviation = values - WEIGHTS @ values
    sigma = (WEIGHTS[0, :, None] * deviation).mT @ deviation / 2
    limit = ambient_generator(DRIFT, sigma[None], example, POINT)
    assert limit.item() == pytest.approx(1.4502301351067006, rel=1e-12)
    eps = 1e-8
    change = generator.expected_change(example, POINT, WEIGHTS, values, DRIFT, eps, even=False)
    assert ((change / eps - limit) / math.sqrt(eps)).item() == pytest.approx(-1.22075, rel=1e-3)


def test_symmetric_noise_of_the_same_covariance_errs_by_a_multiple_of_eps() -> None:
    values = TOKENS @ VALUE.mT
    deviation = values - WEIGHTS @ values
    sigma = (WEIGHTS[0, :, None] * deviation).mT @ deviation / 2
    limit = ambient_generator(DRIFT, sigma[None], example, POINT)
    errors = [
        (generator.expected_change(example, POINT, WEIGHTS, values, DRIFT, eps, even=True) / eps - limit).item()
        for eps in (1e-3, 1e-4)
    ]
    assert errors[0] / errors[1] == pytest.approx(10, rel=1e-2)
    # D^2 phi[b, b] / 2 + E D^3 phi[b, jump, jump] / 2 + E D^4 phi[jump, jump, jump, jump] / 24
    direction, z = torch.tensor([1.0, 2.0], dtype=F64), (POINT[..., 0] + 2 * POINT[..., 1]).item()
    along, push = deviation @ direction, (DRIFT @ direction).item()
    second = -math.sin(z) * push**2 + 6 * POINT[..., 0].item() * DRIFT[..., 0].item() ** 2
    third = 2 * (-math.cos(z) * push * direction @ sigma @ direction + 6 * DRIFT[..., 0] * sigma[0, 0]).item()
    coefficient = second / 2 + third / 2 + math.sin(z) * (WEIGHTS[0] @ along**4).item() / 24
    assert coefficient == pytest.approx(1.0492456807361794, rel=1e-12)
    assert errors[1] / 1e-4 == pytest.approx(coefficient, rel=1e-3)


def test_the_order_of_a_power_with_higher_terms_is_its_limit() -> None:
    h = torch.tensor([2.0**-k for k in range(7)], dtype=F64)
    assert convergence_order(h**3 * (1 + h / 3 - h**2 / 5)).item() == pytest.approx(3, abs=1e-5)


def test_a_second_moment_that_is_twice_too_large_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sigma without the factor 1/2."""
    original = ambient_generator
    monkeypatch.setattr(generator, "ambient_generator", lambda b, sigma, phi, x: original(b, 2 * sigma, phi, x))
    conditions = {each.name: each.ruling for each in run_trial("generator", quick=True).verdict.conditions}
    assert conditions["order with the second moment"] is Ruling.REFUTED
    assert conditions["order for skewed noise"] is Ruling.REFUTED
    assert conditions["order without the second moment"] is Ruling.BY_CONSTRUCTION


def test_the_trial_of_mobility_has_the_fields_of_attention() -> None:
    x = retract(torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=F64))
    attention, i = SA(beta=2.0), torch.tensor(3)
    sigma = mobility.tangent_sigma(attention, x[3], i, x)
    p = torch.eye(4, dtype=F64) - x[3][:, None] * x[3]
    full = token_sampling_covariance(attention.kernel(x), x)[3]
    torch.testing.assert_close(sigma, p @ full @ p, atol=1e-14, rtol=0)
    field = mobility.attention_over_sigma(attention, 1e-6)(x[3], i, x, torch.zeros(4, 4))
    torch.testing.assert_close(sigma @ field, attention(x)[3], atol=1e-12, rtol=0)


def test_the_share_of_mobility_is_that_of_finite_differences() -> None:
    x = retract(torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(1), dtype=F64))
    attention, h = SA(beta=2.0), 1e-5
    field = mobility.attention_over_sigma(attention, 1e-6)
    shares = []
    for k, q in enumerate(x[0]):
        basis = tangent_basis(q)
        columns = [
            basis.mT
            @ (
                field(retract(q + h * e), torch.tensor(k), x[0], q)
                - field(retract(q - h * e), torch.tensor(k), x[0], q)
            )
            for e in basis.mT
        ]
        jacobian = torch.stack(columns, -1) / (2 * h)
        shares.append(float(((jacobian - jacobian.mT) / 2).norm() ** 2 / jacobian.norm() ** 2))
    found = mobility.mean_share(attention, x, torch.zeros(1, 3, 3, dtype=F64), field, 1e-6)
    assert found.item() == pytest.approx(sum(shares) / len(shares), rel=1e-5)


def test_a_drift_that_carries_sigma_would_support_mobility(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mobility, "attention_over_sigma", mobility.gradient_over_sigma)
    assert run_trial("mobility", quick=True).verdict.ruling is Ruling.SUPPORTED


@pytest.mark.parametrize(("beta", "value"), [(10, -0.2075526), (100, -0.21629262), (1000, -0.21713679)])
def test_the_heat_limit_at_one_point(beta: float, value: float) -> None:
    """beta X at t = 1 for rho = (1 + .3 cos t) / 2 pi tends to (log rho)' = -.2172302878."""
    grid = CircleGrid(degree=256)
    density = Density.from_function(grid, lambda x: (1 + 0.3 * x[..., 0]) / (2 * math.pi))
    velocity = ForwardEquation.of(SA(beta=float(beta)), grid).velocity(density.modes, 0.0)[:, 0]
    point = torch.tensor([[math.cos(1), math.sin(1)]], dtype=F64)
    assert beta * grid.evaluate(grid.analyze(velocity), point).item() == pytest.approx(value, abs=1e-7)


def test_the_random_densities_are_positive_and_their_slope_is_that_of_a_sum_over_tokens() -> None:
    case = registered_case("attention-diffuses", quick=True)
    grid = CircleGrid(degree=256)
    density = attention_diffuses.random_densities(case, grid, 3)[2]
    assert density.minimum >= 1 - case.constant("modulation") - 1e-12
    points, weights = density.cloud()
    turn = torch.stack([-points[:, 1], points[:, 0]], -1)
    velocity = (SA(beta=100.0)(points, weights=weights) * turn).sum(-1)
    score = grid.gradient(density.modes)[:, 0] / density.values
    slope = -100 * float((velocity * score).sum() / score.square().sum())
    equation = ForwardEquation.of(SA(beta=100.0), grid)
    assert attention_diffuses.heat_slope(density, equation, 100.0) == pytest.approx(slope, rel=1e-8)


def test_attention_of_the_opposite_sign_fails_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention_diffuses._attention
    monkeypatch.setattr(attention_diffuses, "_attention", lambda beta, sign: original(beta, -sign))
    verdict = run_trial("attention-diffuses", quick=True).verdict
    assert verdict.conditions[0].ruling is Ruling.SUPPORTED
    assert [control.name for control in verdict.controls if not control.as_expected] == ["V = -I"]


def test_sentences_name_the_statistic_and_both_signs_of_v() -> None:
    sentence = run_trial("attention-diffuses", quick=True).verdict.sentence
    assert sentence.startswith("Refuted (sign of the heat limit): -0.99")
    assert "For V = +I the slope is -0.7" in sentence
    assert "For V = -I it is 0.7" in sentence
    assert run_trial("mobility", quick=True).verdict.sentence.startswith("Refuted (antisymmetric share): 0.13")


TEXTS = [
    [first, *row]
    for first, row in enumerate(torch.randint(40, (40, 12), generator=torch.Generator().manual_seed(7)).tolist())
]
NAME = "share of the drift"


@functools.cache
def model_trial(radius: float, size: float = 0.3, texts: int = 40) -> Trial:
    """The trial on a model whose embeddings have about this radius; its blocks write about 1 if ``size`` is 0.3."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_head=2, n_layer=2, bos_token_id=0, eos_token_id=0,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "wte" in name or "wpe" in name:
                parameter.mul_(radius)
            elif "c_proj" in name:
                parameter.mul_(size / 0.3)
    return run_trial("generator", quick=True, subject=Subject(model, TEXTS[:texts]))


def test_small_updates_are_explained_by_their_drift() -> None:
    verdict = model_trial(300.0).verdict
    assert verdict.ruling is Ruling.SUPPORTED, verdict.sentence
    assert not failures(verdict)
    assert interval(verdict, NAME).low > 0.95
    assert interval(verdict, "order on the model").estimate == pytest.approx(3, abs=0.01)
    assert interval(verdict, "updates permuted over tokens").high < 0.5
    assert rulings(verdict)["blocks that write nothing"] is Ruling.IMPOSSIBLE
    assert rulings(verdict)["splitting defect"] is Ruling.DESCRIBED
    assert interval(verdict, "splitting defect").high < 0.2
    assert "Premise: small-steps is" in verdict.sentence


def test_large_updates_are_not() -> None:
    trial = model_trial(1.0)
    verdict = trial.verdict
    assert verdict.ruling is Ruling.REFUTED, verdict.sentence
    assert failures(verdict) == {NAME}
    assert interval(verdict, NAME).high < 0.8
    assert "with the second moment from" in verdict.sentence
    assert trial.data.remainder.dims == ("prompt", "halvings of s", "kind")
    assert trial.data.missed.sizes["block"] == 2
    assert set(trial.data.kind.values) == {"exponential", "pole", "cosine", "tanh", "lens"}
    slopes = np.log2(trial.data.remainder[:, :-1].values / trial.data.remainder[:, 1:].values)
    np.testing.assert_allclose(slopes[:, -1], 2, atol=0.1)
    assert trial.plot().axes


def test_blocks_that_write_nothing_and_few_texts_have_no_ruling() -> None:
    silent = model_trial(300.0, 0.0).verdict
    assert silent.ruling is Ruling.IMPOSSIBLE
    assert silent.sentence.startswith("No token moves")
    few = model_trial(300.0, texts=8).verdict
    assert few.ruling is Ruling.INCONCLUSIVE
    assert "needs 32 different texts" in few.sentence


def test_a_post_norm_model_has_a_share_and_no_splitting_defect() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2, initializer_range=0.5)).eval()
    verdict = run_trial("generator", quick=True, subject=Subject(model, TEXTS)).verdict
    assert verdict.ruling is Ruling.REFUTED, verdict.sentence
    assert named(verdict, "splitting defect").basis.startswith("there is no splitting defect")
    assert "gain and bias of its norm undone" in verdict.setting


def test_half_of_the_second_moment_fails_the_control_of_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ScaledStep.second.func
    monkeypatch.setattr(ScaledStep, "second", property(lambda self: whole(self) / 2))
    verdict = model_trial.__wrapped__(300.0).verdict
    assert failures(verdict) == {"order on the model"}
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert interval(verdict, "order on the model").estimate == pytest.approx(2, abs=0.1)
