"""Surface divergence of attention's drift with the cloud frozen: closed forms, finite differences, and estimates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.fields.attention import SA, USA
from helmscope.fields.block import Block
from helmscope.fields.cross import CrossAttention
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.mlp import MLP
from helmscope.fields.multihead import MultiHead
from helmscope.fields.norms import LayerNorm
from helmscope.fields.placement import PreNorm
from helmscope.geometry.sphere import retract
from helmscope.geometry.surface import divergence
from helmscope.intervene.edit import Edit
from helmscope.models.record import record
from helmscope.models.sites import Observer, Site
from helmscope.observe.attention_surface_divergence import attention_surface_divergence
from helmscope.observe.head_moments import HEADS_NEED
from helmscope.solve.integrate import integrate
from helmscope.types import HelmscopeError
from support.model_families import inputs_of, tiny_model

F64 = torch.float64
EXACT = 1000
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [3, 4, 5, 6, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
}


def x_of(*shape, seed=0):
    return retract(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64))


def test_closed_form_for_identity_matrices():
    """div = beta tr(P_x Cov_P) - (d - 1) <x, m>."""
    beta, x = 3.0, x_of(1, 5, 4)
    measured = attention_surface_divergence(integrate(SA(beta=beta), x, [0.0]), per_token=True)
    cloud = x[0].numpy()
    for i, point in enumerate(cloud):
        weights = np.exp(beta * cloud @ point)
        weights /= weights.sum()
        mean = sum(p * v for p, v in zip(weights, cloud, strict=True))
        cov = sum(p * np.outer(v - mean, v - mean) for p, v in zip(weights, cloud, strict=True))
        expected = beta * (np.trace(cov) - point @ cov @ point) - 3 * point @ mean
        assert measured.token_surface_divergence.values[0, 0, i] == pytest.approx(expected, abs=1e-12)
    assert measured.surface_divergence.item() == pytest.approx(
        measured.token_surface_divergence.mean().item(), abs=1e-13
    )
    assert measured.attrs["extra_forward_passes"] == 0


def test_simulated_heads_are_cross_attention_to_a_frozen_cloud():
    matrices = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    x = x_of(2, 5, 3)
    heads = [SA(beta=2.0, query_key=matrices[k], value=matrices[k + 2]) for k in (0, 1)]
    measured = attention_surface_divergence(integrate(MultiHead(heads, scale=0.7), x, [0.0, 0.1]), per_token=True)
    assert measured.token_surface_divergence.dims == ("time", "system", "head", "token")
    for b in range(2):
        total = 0.0
        for h, head in enumerate(heads):
            frozen = CrossAttention(beta=2.0, memory=x[b], query_key=head.query_key, value=head.value)
            expected = 0.7 * divergence(lambda y, field=frozen: field.ambient(y[None])[0], x[b])
            np.testing.assert_allclose(measured.token_surface_divergence.values[0, b, h], expected.numpy(), atol=1e-11)
            total = total + expected.mean()
        assert measured.total_surface_divergence.values[0, b] == pytest.approx(float(total), abs=1e-11)


@pytest.mark.parametrize(
    "field",
    [
        Block(
            SA(beta=2.0, causal=True),
            MLP(w_in=torch.eye(4, dtype=F64), w_out=torch.eye(4, dtype=F64)),
            placement=PreNorm(attention_norm=LayerNorm(gain=torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64))),
        ),
        USA(beta=1.0),
    ],
    ids=["pre-norm block", "USA"],
)
def test_other_simulations_against_finite_differences(field):
    y, h = 2 * x_of(1, 4, 4) if isinstance(field, Block) else x_of(1, 4, 4), 1e-6
    measured = attention_surface_divergence(integrate(field, y, [0.0]), per_token=True)
    read = (lambda z: field.placement.read(hs.types.Half.ATTENTION, z)) if isinstance(field, Block) else (lambda z: z)
    centered = isinstance(field, Block)
    for i in range(4):

        def drift(z, i=i):
            changed = y.clone()
            changed[0, i] = z
            # only the row of the moving query changes, but so do its key and value: undo them by the frozen logits
            attention = field.attention if isinstance(field, Block) else field
            query, key = read(changed)[0, i], read(y)[0]
            visible = key[: i + 1] if attention.causal else key
            weights = torch.exp(attention.beta * visible @ query)
            weights = weights / (weights.sum() if attention.normalized else len(visible))
            return weights @ visible

        state = y[0, i]
        jacobian = torch.stack(
            [(drift(state + h * e) - drift(state - h * e)) / (2 * h) for e in torch.eye(4, dtype=F64)], -1
        )
        mean = state.mean() if centered else 0.0
        radius = (state - mean).norm()
        x = (state - mean) / radius
        t = torch.eye(4, dtype=F64) - torch.outer(x, x) - (torch.full((4, 4), 0.25, dtype=F64) if centered else 0)
        expected = torch.trace(t @ jacobian) - (2 if centered else 3) * x @ drift(state) / radius
        assert measured.token_surface_divergence.values[0, 0, i] == pytest.approx(float(expected), abs=1e-7)


class Heads(Observer):
    """Collects the outputs of the heads, and keys and values."""

    sees_attention = True
    sites = frozenset({Site.INPUT, Site.ATTENTION})

    def __init__(self):
        self.outputs, self.keys, self.values, self.inputs, self.writes = {}, {}, {}, {}, {}

    def after(self, layer, call, result):
        self.outputs[layer] = result.output.detach().clone()
        self.keys[layer], self.values[layer] = call.key.detach().clone(), call.value.detach().clone()

    def state(self, site, layer, value):
        (self.inputs if site is Site.INPUT else self.writes)[layer] = value.detach().clone()


def frozen_outputs(recording, known, shift):
    """The outputs of the heads when every token of every layer moves by ``shift`` and its cloud does not."""

    def replacement(table):
        return lambda value, context: table[context.layer]

    moved = {layer: value + shift for layer, value in known.inputs.items()}
    edits = [
        Edit(Site.INPUT, None, replacement(moved)),
        Edit(Site.KEY, None, replacement(known.keys)),
        Edit(Site.VALUE, None, replacement(known.values)),
    ]
    seen = Heads()
    recording.runner.under(*edits).forward(seen)
    return seen.outputs


class Outputs(hs.Instrument):
    name, needs = "outputs", HEADS_NEED

    def __init__(self):
        self.matrices = {}

    def attention(self, context, tensors):
        self.matrices[context.layer] = tensors.output_matrix
        self.keep(context, {"length": tensors.radius.mean(-1)})


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "bert"])
def test_models_against_finite_differences(family):
    """LayerNorm, rotary phases with grouped keys, norms of the queries, and post-norm."""
    recording = record(tiny_model(family, dtype=F64), inputs_of(family, batch=2, n=4))
    measured = attention_surface_divergence(recording, random_signs=EXACT, per_token=True)
    known, matrices, h = Heads(), Outputs(), 1e-4
    recording.runner.forward(known)
    recording.replay(matrices)
    d, centered = recording.anatomy.dim, recording.anatomy.centered
    jacobian = {layer: [] for layer in recording.layers}
    for e in torch.eye(d, dtype=F64):
        up, down = (frozen_outputs(recording, known, sign * h * e) for sign in (1, -1))
        for layer in recording.layers:
            jacobian[layer].append((up[layer] - down[layer]) / (2 * h))
    for layer in recording.layers:
        moved, state = torch.stack(jacobian[layer], -1), known.inputs[layer]  # (b, n, heads, s, d)
        mean = state.mean(-1, keepdim=True) if centered else 0 * state[..., :1]
        for b in range(2):
            for i in range(4):
                y = (state - mean)[b, i]
                x = y / y.norm()
                t = torch.eye(d, dtype=F64) - torch.outer(x, x) - (torch.ones(d, d, dtype=F64) / d if centered else 0)
                dim, traces = d - (2 if centered else 1), 0.0
                for head, w in enumerate(matrices.matrices[layer]):
                    trace = torch.trace(t @ w @ moved[b, i, head])
                    written = w @ known.outputs[layer][b, i, head]
                    expected = float(trace - dim * x @ written / y.norm())
                    actual = measured.token_surface_divergence.values[layer, b, head, i]
                    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-4)
                    traces = traces + trace
    total = measured.token_surface_divergence.sum("head").mean("token").values
    bias_free = family in ("llama", "qwen3")
    assert np.allclose(measured.total_surface_divergence.values, total, atol=1e-10) == bias_free


def test_estimates_are_unbiased_and_do_not_depend_on_chunks():
    model = tiny_model("gpt2", dtype=F64)
    exact = attention_surface_divergence(record(model, PADDED), random_signs=EXACT)
    whole = attention_surface_divergence(record(model, PADDED), random_signs=2, seed=1)
    small = attention_surface_divergence(record(model, PADDED, batch_size=1), random_signs=2, seed=1)
    np.testing.assert_allclose(whole.surface_divergence.values, small.surface_divergence.values, atol=1e-12)
    draws = np.stack(
        [
            attention_surface_divergence(record(model, PADDED), random_signs=2, seed=k).surface_divergence
            for k in range(40)
        ]
    )
    error = (draws.mean(0) - exact.surface_divergence.values) / (draws.std(0) / np.sqrt(40) + 1e-12)
    assert np.abs(error).max() < 4.5
    assert draws.std(0).max() > 0
    assert exact.attrs["extra_forward_passes"] == 1


def test_padding_changes_nothing():
    model = tiny_model("bert", dtype=F64)
    together = attention_surface_divergence(record(model, PADDED), random_signs=EXACT, per_token=True)
    alone = attention_surface_divergence(record(model, PADDED["input_ids"][:1, :3]), random_signs=EXACT)
    np.testing.assert_allclose(
        together.surface_divergence.values[:, 0], alone.surface_divergence.values[:, 0], rtol=1e-5, atol=1e-7
    )
    assert np.isnan(together.token_surface_divergence.values[:, 0, :, 3:]).all()


def test_refusals():
    with pytest.raises(HelmscopeError, match="heads of Hardmax"):
        attention_surface_divergence(integrate(Hardmax(), x_of(1, 3, 3), [0.0]))
    with pytest.raises(HelmscopeError, match="follows the output projection"):
        attention_surface_divergence(record(tiny_model("gemma2", dtype=F64), inputs_of("gemma2", batch=1, n=4)))
    with pytest.raises(HelmscopeError, match="random_signs"):
        attention_surface_divergence(integrate(SA(beta=1.0), x_of(1, 3, 3), [0.0]), random_signs=0)
