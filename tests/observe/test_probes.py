"""Probes against plain formulas, autograd in R^d, finite differences, digits of [Helmholtz Transformer, no. 8], and the
logits of models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
)
from transformers import LlamaForCausalLM as Llama

import helmscope as hs
from helmscope.geometry.sphere import project, retract
from helmscope.observe.probes import Cosine, Exponential, LensLogits, Pole, ProbeBank, ProbeKind, Tanh, lens_probes

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
DIM = 5
X = retract(torch.randn(6, DIM, dtype=F64, generator=DRAW))
STEP = 0.7 * torch.randn(6, DIM, dtype=F64, generator=DRAW)
ROWS, OFFSET = torch.randn(4, DIM, dtype=F64, generator=DRAW), torch.randn(4, dtype=F64, generator=DRAW)
SMALL = ROWS / (2 * ROWS.norm(dim=-1, keepdim=True))  # so that a pole stays away
KINDS = {
    "exponential": Exponential(ROWS, OFFSET),
    "pole": Pole(SMALL, 0 * OFFSET),
    "cosine": Cosine(ROWS, OFFSET),
    "tanh": Tanh(ROWS, OFFSET),
    "lens": LensLogits(ROWS, OFFSET, torch.tensor([2, 0])),
}


def plain(name: str, x: list[float], p: int) -> float:
    """One probe at one point, by the formula of its kind."""
    rows = (SMALL if name == "pole" else ROWS).tolist()
    z = [sum(w * c for w, c in zip(row, x, strict=True)) for row in rows]
    if name == "pole":
        return 1 / (1.25 - z[p])
    z = [value + shift for value, shift in zip(z, OFFSET.tolist(), strict=True)]
    if name == "lens":
        return z[[2, 0][p]] - math.log(sum(math.exp(value) for value in z))
    return {"exponential": math.exp, "cosine": math.cos, "tanh": math.tanh}[name](z[p])


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_formula(name: str) -> None:
    kind = KINDS[name]
    wanted = [[plain(name, x, p) for p in range(kind.count)] for x in X.tolist()]
    np.testing.assert_allclose(kind(X).numpy(), wanted, rtol=1e-13)
    assert kind.name == name


@pytest.mark.parametrize("name", KINDS)
def test_drift_and_second_moment_are_the_derivatives_of_the_extended_probe(name: str) -> None:
    """grad phi . D and D^T Hess phi D / 2 of y -> phi(y / |y|), whole matrices by autograd."""
    kind = KINDS[name]
    path = kind.along(X, STEP)
    for i in range(len(X)):
        for p in range(kind.count):

            def extended(y: torch.Tensor, p: int = p) -> torch.Tensor:
                return kind(y / y.norm())[p]

            gradient = torch.autograd.functional.jacobian(extended, X[i])
            hessian = torch.autograd.functional.hessian(extended, X[i])
            assert path.drift[i, p].item() == pytest.approx((gradient @ STEP[i]).item(), rel=1e-11, abs=1e-12)
            second = (STEP[i] @ hessian @ STEP[i]).item() / 2
            assert path.second[i, p].item() == pytest.approx(second, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_changes_are_differences_of_values_at_the_scaled_step(name: str) -> None:
    kind = KINDS[name]
    path = kind.along(X, STEP)
    for s in (1.0, 0.25):
        after = X + s * STEP
        wanted = kind(after / after.norm(dim=-1, keepdim=True)) - kind(X)
        torch.testing.assert_close(path.change(s), wanted, rtol=1e-12, atol=1e-13)
    h = 1e-4
    slope = (path.change(h) - path.change(-h)) / (2 * h)
    bend = (path.change(h) + path.change(-h)) / (2 * h * h)
    torch.testing.assert_close(path.drift, slope, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(path.second, bend, rtol=1e-5, atol=1e-5)
    each = torch.tensor([[1.0], [0.5]] * 3, dtype=F64)
    torch.testing.assert_close(path.change(each)[1], path.change(0.5)[1])


@pytest.mark.parametrize("name", KINDS)
def test_a_covariance_enters_by_the_tangent_hessian(name: str) -> None:
    """Sigma:Hess_S phi is Sigma:Hess of the extended probe for a tangent Sigma."""
    kind = KINDS[name]
    root = project(X.unsqueeze(-2), torch.randn(6, 3, DIM, dtype=F64, generator=DRAW))
    sigma = root.mT @ root

    def form(w: torch.Tensor) -> torch.Tensor:
        w = w.expand(6, *w.shape[-2:])
        return torch.einsum("bkd,bde,bke->bk", w, sigma, w)

    ours = kind.under(X, form, sigma.diagonal(dim1=-2, dim2=-1).sum(-1))
    for i in range(len(X)):
        for p in range(kind.count):
            hessian = torch.autograd.functional.hessian(lambda y, p=p: kind(y / y.norm())[p], X[i])
            assert ours[i, p].item() == pytest.approx((sigma[i] * hessian).sum().item(), rel=1e-10, abs=1e-11)


@dataclass(frozen=True, eq=False)
class _OfDigits(ProbeKind):
    """x0 x1 + sin x2, with x0 x1 = ((x0 + x1)^2 - (x0 - x1)^2) / 4."""

    def outer(self, z):
        return ((z[..., 0] ** 2 - z[..., 1] ** 2) / 4 + z[..., 2].sin()).unsqueeze(-1)

    def slope(self, z, dz):
        slope = (z[..., 0] * dz[..., 0] - z[..., 1] * dz[..., 1]) / 2 + z[..., 2].cos() * dz[..., 2]
        return slope.unsqueeze(-1)

    def curvature(self, z, dz):
        return ((dz[..., 0] ** 2 - dz[..., 1] ** 2) / 2 - z[..., 2].sin() * dz[..., 2] ** 2).unsqueeze(-1)

    def curvature_under(self, z, form):
        raise NotImplementedError


def test_digits_of_the_error_of_a_deterministic_layer() -> None:
    rows = torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
    x = torch.tensor([1.0, 2.0, 2.0], dtype=F64) / 3
    path = _OfDigits(rows, torch.zeros(3, dtype=F64)).along(x, torch.tensor([0.3, -0.5, 0.7], dtype=F64))
    assert path.second.item() == pytest.approx(-0.6962566498755095, rel=1e-13)


def test_a_bank_has_32_probes_that_are_no_polynomials_and_depend_on_the_seed() -> None:
    """On a great circle a polynomial of degree k has Fourier modes up to k."""
    points = hs.Uniform(40, 16).sample(seed=1)
    bank = ProbeBank.around(points, seed=3)
    assert len(bank) == 32
    assert len(bank.kind_of) == 32
    turn = torch.arange(64, dtype=F64) * 2 * math.pi / 64
    circle = turn.cos()[:, None] * points[0] + turn.sin()[:, None] * retract(project(points[0], points[1]))
    modes = torch.fft.rfft(bank(circle), dim=0).abs()
    assert bool((modes[5:16].amax(0) > 1e-6 * modes[1:].amax(0)).all())
    torch.testing.assert_close(ProbeBank.around(points, seed=3)(circle), bank(circle), rtol=0, atol=0)
    assert not torch.equal(ProbeBank.around(points, seed=4)(circle), bank(circle))
    single = torch.stack([probe(circle) for probe in bank], -1)
    torch.testing.assert_close(single, bank(circle), rtol=1e-13, atol=1e-13)
    rate = hs.observe.sphere_generator(hs.SA(1.0), list(bank)[20], points)
    assert rate.shape == (40,)


def gpt2(**options) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=0, initializer_range=0.3, **options)).eval()


def llama() -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return Llama(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.3)).eval()


IDS = torch.arange(24).reshape(2, 12) + 3


@pytest.mark.parametrize("model", [gpt2, llama])
def test_the_lens_is_the_head_of_the_model(model) -> None:
    recording = hs.record(model(), IDS)
    lens = lens_probes(recording, seed=5, vocabulary=40)
    assert lens is not None
    assert lens.rows.shape == (40, 16)
    head = recording.anatomy.model.get_output_embeddings().weight
    for depth in (0, 3, 4):
        logits = recording.logits(depth=depth).log_softmax(-1)
        found = lens(recording.trajectory.states[depth].double())
        assert found.shape == (2, 12, 8)
        distances = (found[0, :, :, None] - logits[0, :, None, :].double()).abs().amax(0)
        nearest = distances.min(-1)
        assert float(nearest.values.max()) < 5e-4  # the epsilon of the norm
        assert set(nearest.indices.tolist()) <= set(IDS.flatten().tolist())
    assert head.shape == (40, 16)


def test_models_whose_logits_are_no_function_of_the_direction_have_no_lens() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    scaled = CohereForCausalLM(CohereConfig(**sizes, num_attention_heads=2, logit_scale=0.1, pad_token_id=0)).eval()
    assert lens_probes(hs.record(scaled, IDS)) is None
    bert = BertModel(BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)).eval()
    for headless in (bert, gpt2().transformer):
        recording = hs.record(headless, IDS)
        assert lens_probes(recording) is None
        assert ProbeBank.of(recording).names == ("exponential", "pole", "cosine", "tanh")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ProbeBank.around(torch.zeros(0, 3)), r"points is \(0, 3\), but it must be a tensor of unit vectors"),
        (lambda: ProbeBank.around([[1.0, 0.0]]), "points is list, but"),
        (lambda: ProbeBank.around(torch.eye(3), per_kind=1), "per_kind is 1"),
        (lambda: ProbeBank.around(torch.eye(3), seed=-1), "seed is -1"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said) -> None:
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
