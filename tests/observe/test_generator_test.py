"""The generator test against closed forms on the circle, plain loops, explicit matrices and the modules of a model;
with planted layers, and the coverage of its intervals.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.special import i0, i1
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

import helmscope as hs
from helmscope.geometry.sphere import retract
from helmscope.observe import generator_test
from helmscope.observe.block_steps import BlockSteps, steps_unsupported
from helmscope.observe.diffusion import token_sampling_covariance
from helmscope.observe.generator_test import block_values
from helmscope.observe.measure import unsupported_measurements
from helmscope.observe.probes import Exponential, ProbeBank
from helmscope.stats.intervals import mean_interval
from helmscope.stats.scales import RemainderScale

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=DRAW)


def mlp(dim: int, size: float = 1.0) -> hs.MLP:
    return hs.MLP(w_in=normal(2 * dim, dim), w_out=size * normal(dim, 2 * dim) / dim, activation=hs.activations.Tanh())


def layers(field: hs.fields.Field, x: torch.Tensor, steps: int = 1, h: float = 1.0) -> hs.Simulation:
    return hs.integrate(field, x, times=[h * k for k in range(steps + 1)], stepper=hs.Layer(h))


@pytest.mark.parametrize("angle", [0.05, 0.8, 2.0])
def test_a_rotation_of_the_circle_misses_a_quotient_of_bessel_functions(angle: float) -> None:
    """phi = e^(kappa cos t), x' turned by a: E C^2 = 2 I0(2k) - 2 I0(2k c) with c = cos(a/2), E C T = k sin a sin(a/2)
    I1(2k c) and E T^2 = k sin^2 a I1(2k) / 2.
    """
    kappa, turn = 1.7, torch.arange(64, dtype=F64) * 2 * math.pi / 64
    x = torch.stack([turn.cos(), turn.sin()], -1)[None]
    quarter = torch.stack([-turn.sin(), turn.cos()], -1)[None]
    step = math.cos(angle) * x + math.sin(angle) * quarter - x
    bank = ProbeBank((Exponential(kappa * torch.tensor([[1.0, 0.0]], dtype=F64), torch.zeros(1, dtype=F64)),))
    values = block_values(bank, x, step, torch.ones(1, 64, dtype=F64), step)
    half = math.cos(angle / 2)
    size = 2 * i0(2 * kappa) - 2 * i0(2 * kappa * half)
    product_ = kappa * math.sin(angle) * math.sin(angle / 2) * i1(2 * kappa * half)
    missed = (size - 2 * product_ + kappa * math.sin(angle) ** 2 * i1(2 * kappa) / 2) / size
    assert values["explained_share"].item() == pytest.approx(1 - missed, rel=1e-11)
    assert values["remainder"][0, 0, 0].item() ** 2 == pytest.approx(missed, rel=1e-10, abs=1e-12)
    assert values["order"].item() == pytest.approx(2, abs=1e-3)
    assert values["order_second_moment"].item() == pytest.approx(3, abs=1e-3)


def test_values_are_those_of_plain_loops() -> None:
    """Tokens with weights, one of them the first, on S^3 under two layers of a block."""
    x = hs.Uniform(5, 4).sample(2, seed=3)
    weights = torch.tensor([[1.0, 1.0, 2.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]], dtype=F64)
    run = hs.integrate(hs.Block(hs.SA(2.0), mlp(4)), x, times=[0.0, 1.0, 2.0], stepper=hs.Layer(), weights=weights)
    bank = ProbeBank.of(run, seed=1)
    found = generator_test(run, bank=bank)
    assert found.explained_share.dims == ("time", "system")
    assert found.time.values.tolist() == [0.0, 1.0]
    for k, system in product(range(2), range(2)):
        before, after = run.trajectory.states[k, system], run.trajectory.states[k + 1, system]
        missed, of_kind, means = [], {}, [0.0, 0.0]
        for phi, kind in zip(bank, bank.kind_of, strict=True):
            change, rest, total = [], [], 0.0
            for i in range(1, 5):
                m = weights[system, i].item()
                c = (phi(after[i]) - phi(before[i])).item()
                gradient = torch.autograd.functional.jacobian(lambda y, phi=phi: phi(y / y.norm()), before[i])
                t = (gradient @ (after[i] - before[i])).item()
                change.append((m, c))
                rest.append((m, c - t))
                total += m
            size = sum(m * c * c for m, c in change) / total
            missed.append(sum(m * c * c for m, c in rest) / total / size)
            of_kind.setdefault(kind, []).append(missed[-1])
            means[0] += (sum(m * c for m, c in rest) / total) ** 2 / size
            means[1] += (sum(m * c for m, c in change) / total) ** 2 / size
        at = {"time": k, "system": system}
        assert found.explained_share[at].item() == pytest.approx(1 - np.mean(missed), rel=1e-10)
        assert found.explained_share_of_mean[at].item() == pytest.approx(1 - means[0] / means[1], rel=1e-10)
        for kind, values in of_kind.items():
            assert found.explained_share_by_kind[at].sel(kind=kind).item() == pytest.approx(
                1 - np.mean(values), rel=1e-10
            )


def test_short_steps_are_explained_long_ones_are_not_and_those_of_other_tokens_never() -> None:
    x = hs.Uniform(12, 6).sample(8, seed=0)
    shares = {}
    for size in (1e-6, 0.05, 30.0):
        found = generator_test(layers(mlp(6, size), x))
        shares[size] = found.explained_share.mean().item()
        assert float(found.explained_share_null.max()) < 0.5
        np.testing.assert_allclose(found.order.values, 2, atol=0.02)
        np.testing.assert_allclose(found.order_second_moment.values, 3, atol=0.02)
    assert shares[1e-6] > 1 - 1e-9
    assert shares[0.05] > 0.99
    assert shares[30.0] < 0.5
    second = generator_test(layers(mlp(6, 0.3), x))
    assert bool((second.explained_share_second_moment > second.explained_share).all())


def test_steps_that_are_common_to_all_tokens_are_no_better_than_permuted_ones() -> None:
    x, m = hs.Uniform(9, 3).sample(2, seed=2), torch.ones(2, 9, dtype=F64)
    step = 0.05 * normal(2, 1, 3).expand(2, 9, 3)
    values = block_values(ProbeBank.around(x[0]), x, step, m, step.roll(1, 1))
    torch.testing.assert_close(values["explained_share"], values["explained_share_null"])


@pytest.mark.parametrize("h", [1.0, 0.1])
@pytest.mark.parametrize("placement", [hs.fields.PostNorm(), hs.fields.PreNorm()])
def test_the_splitting_defect_is_that_of_both_writes_at_the_first_state(h: float, placement) -> None:
    block = hs.Block(hs.SA(2.0), mlp(4), placement=placement)
    x = (2.0 if isinstance(placement, hs.fields.PreNorm) else 1.0) * hs.Uniform(6, 4).sample(3, seed=5)
    run = layers(block, x, h=h)
    bank = ProbeBank.of(run)
    found = generator_test(run, bank=bank, include_first_token=True)
    unit = retract(x)
    length = x.norm(dim=-1, keepdim=True)
    writes = hs.SA(2.0).ambient(unit) + block.mlp.ambient(unit)
    after, first = run.trajectory.states[1], retract(x + h * writes)
    change = bank(after) - bank(unit)
    defect = ((change - (bank(first) - bank(unit))).square().mean(1) / change.square().mean(1)).mean(-1).sqrt()
    np.testing.assert_allclose(found.splitting_defect.values[0], defect.numpy(), rtol=1e-10)
    step = h * writes / length
    drift = torch.stack(
        [torch.func.jvp(lambda y: bank(retract(y)), (unit,), (step,))[1]]  # all tokens at once, each on its own
    )[0]
    share = 1 - ((change - drift).square().mean(1) / change.square().mean(1)).mean(-1)
    np.testing.assert_allclose(found.explained_share_first_state.values[0], share.numpy(), rtol=1e-9, atol=1e-12)


def test_the_splitting_defect_is_of_first_order_and_0_in_a_parallel_block() -> None:
    x, force = hs.Uniform(6, 4).sample(3, seed=5), mlp(4)
    defects = [
        generator_test(layers(hs.Block(hs.SA(2.0), force), x, h=h)).splitting_defect.values for h in (0.01, 0.005)
    ]
    np.testing.assert_allclose(defects[0] / defects[1], 2, rtol=0.03)
    parallel = generator_test(layers(hs.Block(hs.SA(2.0), force, parallel=True), x))
    np.testing.assert_allclose(parallel.splitting_defect.values, 0, atol=1e-7)


def test_sigma_a_errs_by_its_contraction_with_the_hessian() -> None:
    """With the whole matrix Sigma_A and whole Hessians, at every token."""
    x, bank = hs.Uniform(5, 4).sample(2, seed=8), ProbeBank.around(hs.Uniform(9, 4).sample(seed=9), per_kind=2)
    field, value = hs.SA(3.0, value=normal(4, 4)), None
    run = layers(field, x, h=0.5)
    found = generator_test(run, bank=bank, include_first_token=True, sampled_tokens=99)
    value = x @ field.value.mT
    sigma = 0.25 * token_sampling_covariance(field.kernel(x), value)
    tangent = torch.eye(4, dtype=F64) - x.unsqueeze(-1) * x.unsqueeze(-2)
    sigma = tangent @ sigma @ tangent
    noise = torch.zeros(2, 5, len(bank), dtype=F64)
    second = torch.zeros_like(noise)
    step = run.trajectory.states[1] - x
    for (p, phi), s, i in product(enumerate(bank), range(2), range(5)):
        hessian = torch.autograd.functional.hessian(lambda y, phi=phi: phi(y / y.norm()), x[s, i])
        noise[s, i, p] = (hessian * sigma[s, i]).sum()
        second[s, i, p] = step[s, i] @ hessian @ step[s, i] / 2
    change = bank(run.trajectory.states[1]) - bank(x)
    error = (noise.square().mean(1) / change.square().mean(1)).mean(-1)
    np.testing.assert_allclose(found.sigma_term_ratio.values[0], error.numpy(), rtol=1e-9)
    drift = torch.func.jvp(lambda y: bank(retract(y)), (x,), (step,))[1]
    for name, predicted in (
        ("explained_share_sigma", drift + noise),
        ("explained_share_second_moment_and_sigma", drift + second + noise),
    ):
        share = 1 - ((change - predicted).square().mean(1) / change.square().mean(1)).mean(-1)
        np.testing.assert_allclose(found[name].values[0], share.numpy(), rtol=1e-9)
    np.testing.assert_allclose(found.order_sigma.values, 2, atol=0.05)
    assert bool((found.explained_share_second_moment_and_sigma < found.explained_share_second_moment).all())


def gpt2(layers: int = 2) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=layers, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        initializer_range=0.4,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().eval()


IDS = torch.arange(36).reshape(3, 12) + 3


def test_a_model_against_its_own_modules() -> None:
    model = gpt2()
    recording = hs.record(model, IDS)
    bank = ProbeBank.of(recording)
    assert len(bank) == 40
    found = generator_test(recording, bank=bank)
    assert found.explained_share.dims == ("layer", "prompt")
    for layer, block in enumerate(model.transformer.h):
        y, end = recording.residual_stream(depth=2 * layer), recording.residual_stream(depth=2 * layer + 2)
        with torch.no_grad():
            writes = recording.residual_stream(depth=2 * layer + 1) - y + block.mlp(block.ln_2(y))
        x, after, first = (retract(each - each.mean(-1, keepdim=True))[:, 1:] for each in (y, end, y + writes))
        change = bank(after) - bank(x)
        weight = 1 / change.square().mean(1)
        missed = (change - bank(first) + bank(x)).square().mean(1) * weight
        np.testing.assert_allclose(found.splitting_defect.values[layer], missed.mean(-1).sqrt().numpy(), rtol=1e-6)
        centered = (y - y.mean(-1, keepdim=True))[:, 1:]
        step = ((end - end.mean(-1, keepdim=True))[:, 1:] - centered) / centered.norm(dim=-1, keepdim=True)
        drift = torch.func.jvp(lambda z: bank(retract(z)), (x,), (step,))[1]
        share = 1 - ((change - drift).square().mean(1) * weight).mean(-1)
        np.testing.assert_allclose(found.explained_share.values[layer], share.numpy(), rtol=1e-8)
    assert found.attrs["radius"] == "recorded radius of each token"
    assert "left_out" not in found.attrs
    assert hs.plot(found).axes


def test_padding_and_chunks_do_not_change_values() -> None:
    model, rows = gpt2(), [list(range(3, 15)), list(range(20, 27))]
    ids, mask = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long)
    for k, row in enumerate(rows):
        ids[k, : len(row)], mask[k, : len(row)] = torch.tensor(row), 1
    both = hs.record(model, {"input_ids": ids, "attention_mask": mask})
    bank = ProbeBank.of(both)
    found = generator_test(both, bank=bank, sampled_tokens=99)
    for k, row in enumerate(rows):
        alone = generator_test(hs.record(model, torch.tensor([row])), bank=bank, sampled_tokens=99)
        for name in (
            "explained_share",
            "explained_share_of_mean",
            "splitting_defect",
            "sigma_term_ratio",
            "order_second_moment",
        ):
            np.testing.assert_allclose(found[name].values[:, k], alone[name].values[:, 0], rtol=1e-6)


def test_families_without_two_halves_that_add_leave_out_what_needs_them() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    bert = BertModel(BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)).eval()
    found = generator_test(hs.record(bert, IDS))
    assert "splitting_defect" not in found
    assert "explained_share_sigma" not in found
    assert "post-norm model" in found.attrs["left_out"]
    assert bool(np.isfinite(found.explained_share).all())
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2, use_parallel_residual=True)).eval()
    parallel = generator_test(hs.record(neox, IDS))
    np.testing.assert_allclose(parallel.splitting_defect.values, 0, atol=1e-4)
    attention = generator_test(layers(hs.SA(1.0), hs.Uniform(4, 3).sample(2, seed=0)))
    assert "splitting_defect" not in attention
    assert "sigma_term_ratio" in attention


def test_nothing_that_moves_has_no_share_and_equal_tokens_have_one() -> None:
    x = hs.Uniform(4, 3).sample(2, seed=0)
    found = generator_test(layers(mlp(3, 0.0), x))
    for name in (
        "explained_share",
        "explained_share_null",
        "explained_share_of_mean",
        "order",
        "explained_share_by_kind",
        "remainder",
    ):
        assert bool(np.isnan(found[name]).all())
    equal = x[:, :1].expand(2, 4, 3)
    assert bool(np.isfinite(generator_test(layers(mlp(3, 0.3), equal)).explained_share).all())


def test_a_resumed_recording_has_the_blocks_after_its_first_depth() -> None:
    recording = hs.record(gpt2(3), IDS)
    whole = generator_test(recording, bank=ProbeBank.of(recording))
    later = recording.resume(depth=3, states=recording.trajectory.states[3])
    found = generator_test(later, bank=ProbeBank.of(recording))
    assert found.layer.values.tolist() == [2]
    np.testing.assert_allclose(found.explained_share.values[0], whole.explained_share.values[2], rtol=1e-6)


def test_the_interval_over_32_prompts_covers_the_expectation_of_the_share() -> None:
    """Prompts of a few random tokens under one random layer: 320 trials of 32 prompts on the scale of the trial,
    against the mean of all prompts.
    """
    x, scale = hs.Uniform(8, 16).sample(32 * 320, seed=4), RemainderScale()
    shares = generator_test(layers(mlp(16, 0.6), x)).explained_share.values[0]
    assert float(np.std(shares)) > 0.05
    truth = scale.inverse(scale.forward(shares).mean())
    intervals = [mean_interval(trial, scale=scale) for trial in shares.reshape(320, 32)]
    covered = sum(each.low <= truth <= each.high for each in intervals)
    assert 0.925 <= covered / 320 <= 0.975


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: generator_test(hs.integrate(hs.SA(1.0), torch.eye(3), times=[0.0, 1.0])), "system is a flow, but"),
        (
            lambda: generator_test(layers(hs.SA(1.0), torch.eye(3)), bank=[]),
            "bank is a list, but it must be a ProbeBank",
        ),
        (lambda: generator_test(layers(hs.SA(1.0), torch.eye(3)), sampled_tokens=0), "sampled_tokens is 0"),
        (lambda: generator_test(hs.Uniform(3, 3)), "system is a Uniform"),
        (
            lambda: generator_test(hs.integrate(hs.SA(1.0), torch.eye(3), times=[0.0, 2.0], stepper=hs.Layer())),
            "times are 2 apart, but a generator test needs every layer: times 1 apart",
        ),
        (
            lambda: generator_test(hs.integrate(hs.SA(1.0), torch.eye(3), times=[1.0], stepper=hs.Layer())),
            "1 stored time",
        ),
        (
            lambda: generator_test(
                layers(hs.Block(hs.SA(1.0), mlp(3), placement=hs.fields.NoNorm()), torch.eye(3).double())
            ),
            "needs tokens on a sphere or a residual stream",
        ),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said) -> None:
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_lost_direction_is_named() -> None:
    recording = hs.record(gpt2(), IDS)
    recording.residual.radius[2, 1, 4] = 0
    with pytest.raises(hs.HelmscopeError, match="state of prompt 1 has radius 0 before layer 1, token 4"):
        BlockSteps.of(recording).at(1)


def test_hs_measure_includes_it_where_there_are_layers() -> None:
    x = hs.Uniform(4, 3).sample(2, seed=0)
    assert steps_unsupported(layers(hs.SA(1.0), x)) is None
    assert "stepper=Layer()" in str(
        unsupported_measurements(hs.integrate(hs.SA(1.0), x, times=[0.0, 1.0]))["generator_test"]
    )
    shares: list[float] = []
    measured = hs.measure(layers(hs.SA(1.0), x), only=["generator_test"], progress=shares.append)
    assert "explained_share" in measured["generator_test"]
    assert shares[-1] == pytest.approx(1)
