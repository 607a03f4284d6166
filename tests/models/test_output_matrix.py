"""The matrices by which heads write: with weights and values they reproduce the write of attention."""

from __future__ import annotations

import pytest
import torch

import helmscope as hs
from helmscope.fields.attention import SA, USA
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.fields.multihead import MultiHead
from helmscope.fields.norms import LayerNorm
from helmscope.fields.placement import NGPT, NoNorm, PreNorm, SandwichNorm
from helmscope.geometry.sphere import retract
from helmscope.models.record import record
from helmscope.solve.integrate import integrate
from helmscope.solve.layer import Layer
from helmscope.types import HelmscopeError, Needs
from support.model_families import inputs_of, tiny_model

F64 = torch.float64


class Seen(hs.Instrument):
    """Keeps the tensors of every layer."""

    name = "seen"
    needs = Needs.KERNEL | Needs.QKV | Needs.OUTPUT_MATRIX | Needs.ATTENTION_WRITE

    def __init__(self) -> None:
        self.layers = []

    def attention(self, context, tensors):
        self.layers.append((context, tensors))
        self.keep(context, {"length": tensors.radius.mean(-1)})


def written(tensors):
    """sum_h W_O^h sum_j P^h_ij v^h_j with plain loops over prompts, heads, queries and keys."""
    kernel, value, output = tensors.kernel, tensors.head_values, tensors.output_matrix
    if kernel.ndim == 3:
        kernel, value, output = kernel[:, None], value[:, None], output[None]
    total = torch.zeros_like(tensors.write)
    for b in range(kernel.shape[0]):
        for h in range(kernel.shape[1]):
            for i in range(kernel.shape[2]):
                mean = sum(kernel[b, h, i, j] * value[b, h, j] for j in range(kernel.shape[3]))
                total[b, i] += output[h] @ mean
    return total


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "granite", "gpt_neox", "qwen3", "albert"])
def test_heads_and_their_matrices_are_the_write(family):
    """The write minus the sum over heads is one bias, the same for all tokens; llama has grouped keys and values."""
    recording, seen = record(tiny_model(family, dtype=F64), inputs_of(family, batch=2, n=5)), Seen()
    recording.replay(seen)
    assert len(seen.layers) == 3
    for context, tensors in seen.layers:
        bias = tensors.write - written(tensors)
        assert bool((bias - bias[:1, :1]).abs().max() < 1e-10 * tensors.write.abs().max() + 1e-13)
        layer = recording.anatomy.layers[context.layer]
        own = layer.part(layer.wiring.output_matrix).bias
        if own is None:
            assert float(bias.abs().max()) < 1e-10
        else:
            torch.testing.assert_close(bias[0, 0], layer.wiring.scales[0] * own.detach(), rtol=0, atol=1e-10)
        y = tensors.state - tensors.state.mean(-1, keepdim=True) * context.centered
        torch.testing.assert_close(tensors.radius, y.norm(dim=-1), rtol=1e-12, atol=0)


def x_of(*shape):
    return retract(torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=F64))


def heads():
    g = torch.Generator().manual_seed(1)
    return MultiHead([SA(beta=b, value=torch.randn(3, 3, generator=g, dtype=F64)) for b in (1.0, 4.0)], scale=0.7)


NORM = LayerNorm(gain=torch.tensor([1.0, 2.0, 3.0], dtype=F64))
MLP3 = MLP(w_in=torch.eye(3, dtype=F64), w_out=torch.eye(3, dtype=F64))


@pytest.mark.parametrize("layer", [None, 0.3])
@pytest.mark.parametrize(
    "field",
    [
        heads(),
        SA(beta=2.0, value=2 * torch.eye(3, dtype=F64)),
        USA(beta=1.0),
        Block(heads(), MLP3, placement=PreNorm(attention_norm=NORM)),
    ],
    ids=["MultiHead", "SA", "USA", "pre-norm block"],
)
def test_the_same_holds_for_simulated_heads(field, layer):
    options = {} if layer is None else {"stepper": Layer(layer)}
    times = [0.0, 0.01 if layer is None else layer]
    seen = Seen()
    integrate(field, x_of(2, 4, 3), times, **options).replay(seen)
    assert len(seen.layers) == 2
    for context, tensors in seen.layers:
        torch.testing.assert_close(written(tensors), tensors.write, rtol=0, atol=1e-12)
        assert context.centered is isinstance(field, Block)
        if not isinstance(field, Block):
            torch.testing.assert_close(tensors.radius, torch.ones_like(tensors.radius), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "reason"), [("gemma2", "follows the output projection of attention in layer 0"), ("t5", None)]
)
def test_norms_after_the_heads_are_refused(family, reason):
    recording = record(tiny_model(family, dtype=F64), inputs_of(family, batch=1, n=5))
    if reason is None:
        recording.replay(Seen())
    else:
        with pytest.raises(HelmscopeError, match=reason):
            recording.replay(Seen())


@pytest.mark.parametrize("placement", [SandwichNorm(), NGPT(attention_rate=0.1, mlp_rate=0.1), NoNorm()])
def test_simulated_norms_after_the_heads_are_refused(placement):
    stepper = {"stepper": Layer()} if isinstance(placement, NGPT) else {}
    run = integrate(Block(SA(beta=1.0), MLP3, placement=placement), x_of(1, 4, 3), [0.0], **stepper)
    with pytest.raises(HelmscopeError, match="but seen needs"):
        run.replay(Seen())
