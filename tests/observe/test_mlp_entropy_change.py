"""The exact change of entropy over an MLP half-step: closed forms, autograd, and known densities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate as quadrature
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

import helmscope as hs
from helmscope.meanfield import CircleGrid, Density, SphereGrid
from helmscope.observe.mlp_entropy_change import (
    entropy_change_unsupported,
    mlp_entropy_change,
    sphere_map,
    tangent_log_det,
)
from helmscope.observe.token_choice import spaced_tokens, taken

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=DRAW)


def linear(matrix: torch.Tensor) -> hs.MLP:
    """f(x) = (A - I) x, so that T(x) = N(A x) at radius 1."""
    d = len(matrix)
    return hs.MLP(
        w_in=torch.eye(d, dtype=F64), w_out=matrix - torch.eye(d, dtype=F64), activation=hs.activations.Identity()
    )


def force(d: int, *, gated: bool) -> hs.MLP | hs.GatedMLP:
    rows = {"w_out": 0.3 * normal(d, 9), "b_out": 0.1 * normal(d)}
    if gated:
        return hs.GatedMLP(
            w_gate=normal(9, d), w_up=normal(9, d), b_gate=normal(9), activation=hs.activations.SiLU(), **rows
        )
    return hs.MLP(w_in=normal(9, d), b_in=normal(9), activation=hs.activations.GELU(), **rows)


def by_singular_values(f, x: torch.Tensor, r: float, *, centered: bool) -> float:
    """log of the product of the singular values of the Jacobian of x -> N(r x + f(x)) by autograd, restricted to
    orthonormal bases of both tangent spaces by QR."""

    def step(point: torch.Tensor) -> torch.Tensor:
        y = r * point + f(point)
        y = y - y.mean() if centered else y
        return y / y.norm()

    def tangents(point: torch.Tensor) -> torch.Tensor:
        normals = [point, torch.ones_like(point)] if centered else [point]
        whole = torch.cat([torch.stack(normals, 1), torch.eye(len(point), dtype=F64)], 1)
        return torch.linalg.qr(whole)[0][:, len(normals) :]

    jacobian = torch.autograd.functional.jacobian(step, x)
    restricted = tangents(step(x)).T @ jacobian @ tangents(x)
    return float(torch.linalg.svdvals(restricted).log().sum())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_the_log_determinant_is_that_of_autograd(gated: bool, centered: bool) -> None:
    mlp = force(6, gated=gated)
    x = normal(5, 6)
    x = hs.sphere.retract(x - x.mean(-1, keepdim=True) if centered else x)
    radius = torch.tensor([0.7, 1.0, 2.0, 5.0, 0.3], dtype=F64)
    found = sphere_map(mlp, x, radius, centered=centered)
    for k in range(5):
        expected = by_singular_values(mlp.ambient, x[k], float(radius[k]), centered=centered)
        assert float(found.log_det[k]) == pytest.approx(expected, abs=1e-10)
        y = radius[k] * x[k] + mlp.ambient(x[k])
        y = y - y.mean() if centered else y
        torch.testing.assert_close(found.image[k], y / y.norm(), atol=1e-14, rtol=0)
    if not centered:
        divergence = hs.geometry.surface.divergence(mlp.ambient, x) / radius
        torch.testing.assert_close(found.divergence, divergence, atol=1e-12, rtol=0)


@pytest.mark.parametrize("centered", [False, True])
def test_the_divergence_is_the_first_order(centered: bool) -> None:
    """With a large radius the step is small; the difference falls as 1 / r^2."""
    mlp, x = force(5, gated=True), normal(4, 5)
    x = hs.sphere.retract(x - x.mean(-1, keepdim=True) if centered else x)
    errors = []
    for r in (1e3, 2e3):
        found = sphere_map(mlp, x, torch.full((4,), r, dtype=F64), centered=centered)
        errors.append((found.log_det - found.divergence).abs().max())
    assert float(errors[0] / errors[1]) == pytest.approx(4, rel=0.02)


def test_linear_maps_have_their_closed_form_and_rotations_change_nothing() -> None:
    a, x = normal(4, 4), hs.sphere.retract(normal(20, 4))
    found = sphere_map(linear(a), x, torch.ones(20, dtype=F64)).log_det
    expected = torch.linalg.slogdet(a)[1] - 4 * (x @ a.T).norm(dim=-1).log()
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    turn = torch.linalg.qr(a)[0]
    assert float(sphere_map(linear(turn), x, torch.ones(20, dtype=F64)).log_det.abs().max()) < 1e-13


def test_uniform_tokens_lose_exactly_the_entropy_of_the_pushed_density() -> None:
    """Uniform on S^2 pushed by N(A x) has the angular Gaussian density 1/(4 pi) |A|^-1 (y^T (A A^T)^-1 y)^(-3/2), whose
    entropy is computed on a grid."""
    a = torch.diag(torch.tensor([1.5, 1.0, 0.8], dtype=F64))
    inverse = torch.linalg.inv(a @ a.T)
    grid = SphereGrid(degree=48)
    pushed = Density.from_function(
        grid, lambda y: torch.einsum("...i,ij,...j->...", y, inverse, y) ** -1.5 / torch.linalg.det(a), normalize=True
    )
    x = grid.points
    change = grid.mean_of(sphere_map(linear(a), x, torch.ones(len(x), dtype=F64)).log_det)
    assert float(change) == pytest.approx(pushed.entropy - Density.uniform(grid).entropy, abs=1e-9)


def test_a_von_mises_density_changes_its_entropy_by_the_mean_of_the_log_determinant() -> None:
    """On the circle T moves theta to atan2(b sin, a cos): the pushed density rho / T' is integrated by SciPy."""
    a = torch.diag(torch.tensor([1.4, 0.9], dtype=F64))
    grid = CircleGrid(degree=48)
    density = Density.von_mises_fisher(grid, kappa=1.2)
    x = grid.points
    change = grid.mean_of(density.values * sphere_map(linear(a), x, torch.ones(len(x), dtype=F64)).log_det)

    def entropy_after() -> float:
        weight = 2 * math.pi * float(torch.special.i0(torch.tensor(1.2, dtype=F64)))

        def integrand(phi: float) -> float:
            theta = math.atan2(math.sin(phi) / 0.9, math.cos(phi) / 1.4)
            slope = 1.4 * 0.9 / ((1.4 * math.cos(theta)) ** 2 + (0.9 * math.sin(theta)) ** 2)
            value = math.exp(1.2 * math.cos(theta)) / weight / slope
            return -value * math.log(value)

        return float(quadrature.quad(integrand, 0, 2 * math.pi, epsabs=1e-12)[0])

    assert float(change) == pytest.approx(entropy_after() - density.entropy, abs=1e-9)


def test_a_moebius_map_of_the_sphere_is_conformal() -> None:
    """y -> ((1 - |c|^2)(x - c)/|x - c|^2 - c) maps the sphere to itself, by (1 - |c|^2)/|x - c|^2 in all directions."""
    c = torch.tensor([0.3, -0.2, 0.1, 0.25], dtype=F64)

    def moebius(x: torch.Tensor) -> torch.Tensor:
        return (1 - c @ c) * (x - c) / ((x - c) @ (x - c)) - c

    for x in hs.sphere.retract(normal(5, 4)):
        matrix = torch.autograd.functional.jacobian(moebius, x)
        scale = (1 - c @ c) / ((x - c) @ (x - c))
        found = tangent_log_det(matrix, x, moebius(x), centered=False)
        assert float(found) == pytest.approx(3 * math.log(scale), abs=1e-12)


def test_a_singular_map_is_not_a_number() -> None:
    collapse = torch.zeros(3, 3, dtype=F64)
    collapse[0] = torch.tensor([1.0, 1.0, 1.0])
    found = sphere_map(linear(collapse), hs.sphere.retract(torch.ones(1, 3, dtype=F64)), torch.ones(1, dtype=F64))
    assert bool(found.log_det.isnan())


# --- systems


def layers(mlp: hs.MLP, count: int = 3) -> hs.Simulation:
    x = hs.Uniform(7, 4).sample(3, seed=1)
    return hs.integrate(mlp, x, times=[0.5 * k for k in range(count)], stepper=hs.Layer(0.5))


def test_layers_of_a_simulation_are_measured_token_by_token() -> None:
    mlp = force(4, gated=False)
    run = layers(mlp)
    measured = mlp_entropy_change(run, sampled_tokens=3)
    chosen = measured.token.values[0].astype(int)
    assert chosen.tolist() == [[1, 3, 6]] * 3
    for k in range(3):
        for system in range(3):
            values = [
                by_singular_values(lambda p: 0.5 * mlp.ambient(p), run.states[k, system, token], 1.0, centered=False)
                for token in chosen[system]
            ]
            assert measured.token_entropy_change.values[k, system] == pytest.approx(values, abs=1e-10)
            assert float(measured.entropy_change[k, system]) == pytest.approx(np.mean(values), abs=1e-10)
    every = mlp_entropy_change(run, sampled_tokens=None)
    assert every.sizes["sample"] == 6
    assert every.attrs["dimension"] == 3


def test_singular_maps_are_counted_and_named() -> None:
    collapse = torch.zeros(4, 4, dtype=F64)
    collapse[0] = 1.0
    mlp = hs.MLP(
        w_in=torch.eye(4, dtype=F64),
        w_out=2 * (collapse - torch.eye(4, dtype=F64)),
        activation=hs.activations.Identity(),
    )
    measured = mlp_entropy_change(layers(mlp), sampled_tokens=2)
    assert float(measured.singular_count.sum()) == 3 * 3 * 2
    assert bool(measured.entropy_change.isnull().all())
    assert measured.attrs["singular_maps"] == "NaN, first at system 0, layer 0, token 1"


def test_what_is_not_a_map_of_one_token_is_refused() -> None:
    mlp = force(4, gated=False)
    x = hs.Uniform(5, 4).sample(2, seed=0)
    flow = hs.integrate(mlp, x, times=[0.0, 1.0])
    with pytest.raises(
        hs.HelmscopeError, match=r"is a flow, but mlp_entropy_change needs layers.*stepper=hs.Layer\(\)"
    ):
        mlp_entropy_change(flow)
    with pytest.raises(hs.HelmscopeError, match="has no MLP"):
        mlp_entropy_change(hs.integrate(hs.SA(1.0), x, times=[0.0, 1.0], stepper=hs.Layer()))
    sparse = hs.integrate(mlp, x, times=[0.0, 2.0], stepper=hs.Layer(1.0))
    with pytest.raises(hs.HelmscopeError, match=r"system 0 in layer 0 by another map .* stored one by one"):
        mlp_entropy_change(sparse)
    with pytest.raises(hs.HelmscopeError, match="sampled_tokens is 0"):
        mlp_entropy_change(layers(mlp), sampled_tokens=0)
    with pytest.raises(hs.HelmscopeError, match="system 0 has no token that counts besides the first"):
        mlp_entropy_change(hs.integrate(mlp, x[:, :1], times=[0.0, 1.0], stepper=hs.Layer()))


SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
ROWS = torch.tensor([[(5 * i + 3 * k) % 50 for i in range(8)] for k in range(3)])


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(**SIZES, n_embd=12, n_layer=2, n_head=2, n_positions=16, initializer_range=0.3)
    return GPT2LMHeadModel(config).double().eval().requires_grad_(False)


def test_a_model_under_layer_norm_is_differentiated_by_its_own_modules() -> None:
    """T as the model itself computes it, with norm, gain and epsilon, differentiated by autograd at fixed radius and
    mean of the state."""
    model = gpt2()
    recording = hs.record(model, ROWS)
    measured = mlp_entropy_change(recording, sampled_tokens=2)
    for layer, block in enumerate(model.transformer.h):
        y = recording.residual_stream(depth=2 * layer + 1)
        for prompt in range(3):
            token = int(measured.token[layer, prompt, 1])
            state = y[prompt, token]
            mean = state.mean()
            r, x = (state - mean).norm(), (state - mean) / (state - mean).norm()

            def write(point: torch.Tensor, block=block, r=r, mean=mean) -> torch.Tensor:
                return block.mlp(block.ln_2(r * point + mean))

            expected = by_singular_values(write, x, float(r), centered=True)
            assert float(measured.token_entropy_change[layer, prompt, 1]) == pytest.approx(expected, abs=1e-8)
    assert measured.attrs["dimension"] == 10
    assert measured.attrs["radius"] == "recorded radius of each token"


def bert() -> BertForMaskedLM:
    """A post-norm model whose gains and biases are not those of a new one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForMaskedLM(BertConfig(vocab_size=64, **sizes, max_position_embeddings=16, initializer_range=0.3))
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval().requires_grad_(False)


def test_a_post_norm_half_step_is_differentiated_by_its_own_modules() -> None:
    """T on the directions before gain and bias, as the modules compute it: middle norm, MLP and closing norm."""
    model = bert()
    recording = hs.record(model, ROWS)
    measured = mlp_entropy_change(recording, sampled_tokens=2)
    path = recording.on_sphere
    for layer, block in enumerate(model.bert.encoder.layer):
        middle = block.attention.output.LayerNorm
        for prompt in range(3):
            token = int(measured.token[layer, prompt, 1])
            x = path.states[2 * layer + 1, prompt, token]
            # the length of c x is that of the norm of the input, with its epsilon
            length = recording.force_points(layer=layer)[prompt, token].norm()

            def write(point: torch.Tensor, block=block, middle=middle, length=length) -> torch.Tensor:
                state = 12**0.5 * length * point * middle.weight + middle.bias
                return block.output.dense(block.intermediate(state)) + state

            expected = by_singular_values(write, x, 0.0, centered=True)
            assert float(measured.token_entropy_change[layer, prompt, 1]) == pytest.approx(expected, abs=1e-8)
    assert measured.attrs["sphere"] == "direction of the state that the MLP reads, without gain and bias"


def test_the_post_norm_divergence_is_that_of_the_tangential_field() -> None:
    """The trace of the covariant derivative of P y over <x, z>, by autograd on the tangent space."""
    f, gain, bias = force(6, gated=False), 1 + 0.2 * normal(6), 0.2 * normal(6)
    x = hs.sphere.retract(normal(6) - 0.0)
    x = hs.sphere.retract(x - x.mean())
    found = sphere_map(f, x, torch.ones((), dtype=F64), norm=hs.fields.LayerNorm(gain=gain, bias=bias), centered=True)

    def tangential(point: torch.Tensor) -> torch.Tensor:
        y = 6**0.5 * gain * point + bias + f.ambient(point)
        y = y - y.mean()
        return y - point * (point @ y)

    normals = torch.stack([x, torch.ones(6, dtype=F64)], 1)
    tangents = torch.linalg.qr(torch.cat([normals, torch.eye(6, dtype=F64)], 1))[0][:, 2:]
    jacobian = torch.autograd.functional.jacobian(tangential, x)
    along = float(x @ (6**0.5 * gain * x + bias))
    assert float(found.divergence) == pytest.approx(
        float((tangents.T @ jacobian @ tangents).trace()) / along, abs=1e-12
    )


def test_a_post_norm_map_of_the_rest_of_the_block_is_seen() -> None:
    """A gain that is forgotten gives another map than the recorded one, which is refused."""
    recording = hs.record(bert(), ROWS)
    doubled = recording.under(hs.Edit(hs.Site.MLP, None, lambda value: 2 * value))
    with pytest.raises(hs.HelmscopeError, match=r"another map than N\(z \+ f\(x\)\)"):
        mlp_entropy_change(doubled)


def test_edited_writes_and_parallel_blocks_are_refused() -> None:
    recording = hs.record(gpt2(), ROWS)
    doubled = recording.under(hs.Edit(hs.Site.MLP, None, lambda value: 2 * value))
    with pytest.raises(hs.HelmscopeError, match="of prompt 1 in layer 0 by another map than"):
        mlp_entropy_change(doubled)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    parallel = GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **sizes, max_position_embeddings=16)).eval()
    assert "has parallel blocks, but mlp_entropy_change needs MLPs" in str(
        entropy_change_unsupported(hs.record(parallel, ROWS))
    )


def test_padding_and_chunks_change_nothing() -> None:
    texts = ["Once upon a time there was a cat", "The dog ran"]
    both = mlp_entropy_change(hs.record("A", texts), sampled_tokens=None)
    alone = mlp_entropy_change(hs.record("A", texts[1:]), sampled_tokens=None)
    assert both.entropy_change.values[:, 1] == pytest.approx(alone.entropy_change.values[:, 0], rel=1e-4)
    assert int(both.token_first_order_entropy_change[0, 1].notnull().sum()) == alone.sizes["sample"]


def test_spaced_tokens() -> None:
    weights = torch.ones(2, 9)
    weights[1, 5:] = 0
    chosen, counts = spaced_tokens(weights, 5)
    assert chosen.tolist() == [[1, 3, 5, 6, 8], [1, 2, 3, 4, 0]]
    assert counts.tolist() == [[True] * 5, [True] * 4 + [False]]
    assert spaced_tokens(weights, None)[0].shape == (2, 8)
    assert spaced_tokens(weights, 1)[0].tolist() == [[1], [1]]
    assert spaced_tokens(weights[:, :1], None, include_first_token=True)[0].tolist() == [[0], [0]]
    values = torch.arange(18.0).reshape(2, 9)
    assert taken(values, chosen)[1].tolist() == [10, 11, 12, 13, 9]
    with pytest.raises(hs.HelmscopeError, match="prompt 4 has no token that counts besides the first"):
        spaced_tokens(torch.tensor([[1.0, 0.0]]), 2, start=4)


def test_a_model_in_half_precision_is_measured() -> None:
    """Its recorded states are rounded to three digits, which is no other map; the change is that of float32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    ids = torch.randint(1, 30, (3, 12), generator=torch.Generator().manual_seed(1))
    single = mlp_entropy_change(hs.record(model, ids)).entropy_change
    half = mlp_entropy_change(hs.record(model.to(torch.bfloat16), ids)).entropy_change
    assert float(abs(half - single).max()) < 0.02 * float(abs(single).max())
