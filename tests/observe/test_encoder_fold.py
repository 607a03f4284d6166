"""A post-norm encoder with gains of realistic spread: the potential of its MLPs with the norm folded in and without,
each against its own closed form and autograd.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import BertConfig, BertModel

import helmscope as hs

F64 = torch.float64
D = 32
IDS = torch.randint(1, 64, (6, 10), generator=torch.Generator().manual_seed(0))


def encoder(spread):
    """A random BERT with lognormal gains: the standard deviation of their logs is ``spread``."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4 * D,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
        initializer_range=0.2, layer_norm_eps=0.0,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval().double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm.weight" in name:
                parameter.copy_(torch.exp(spread * torch.randn(D, generator=draw)))
            if "LayerNorm.bias" in name:
                parameter.copy_(0.1 * torch.randn(D, generator=draw))
    return model


def psi(z):
    """The integral of z Phi(z) from 0."""
    cumulative, density = torch.special.ndtr(z), torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return (z * z * cumulative + z * density - cumulative) / 2 + 0.25


def potential_and_slope(rows, bias, written, point):
    """U = sum_j (w_j.v_j / |v_j|^2) psi(v_j.x + c_j), and |grad U| by autograd."""
    x = point.detach().requires_grad_(True)
    coefficient = (written * rows).sum(-1) / (rows * rows).sum(-1)
    potential = (coefficient * psi(x @ rows.T + bias)).sum(-1)
    (gradient,) = torch.autograd.grad(potential.sum(), x)
    return potential.detach(), gradient.norm(dim=-1)


def by_hand(model, layer):
    """U and |grad U| of every token, in both coordinates, from the weights of the modules alone."""
    block, kept = model.encoder.layer[layer], []
    handle = block.intermediate.register_forward_hook(lambda module, given, output: kept.append(given[0]))
    with torch.no_grad():
        model(input_ids=IDS)
    handle.remove()
    norm, read, bias = block.attention.output.LayerNorm, block.intermediate.dense.weight, block.intermediate.dense.bias
    written, z = block.output.dense.weight.T, kept[0]
    x = (z - norm.bias) / norm.weight / math.sqrt(D)
    assert (x.norm(dim=-1) - 1).abs().max() < 1e-12
    folded = potential_and_slope(math.sqrt(D) * read * norm.weight, bias + read @ norm.bias, written, x)
    return {"unit_sphere": folded, "mlp_input": potential_and_slope(read, bias, written, z)}


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_both_coordinates_are_their_own_closed_forms(spread):
    model = encoder(spread)
    seen = hs.mlp_force(hs.record(model, IDS))
    for layer in range(2):
        for name, (potential, slope) in by_hand(model, layer).items():
            assert seen[f"potential_{name}"][layer].values == pytest.approx(potential.mean(-1).numpy(), rel=1e-9)
            assert seen[f"gradient_length_{name}"][layer].values == pytest.approx(slope.mean(-1).numpy(), rel=1e-9)


def changes(model):
    """How far folding moves |grad U|, a mean over the tokens of a prompt, and U of every token, in every layer."""
    seen = hs.mlp_force(hs.record(model, IDS), per_token=True)
    found = []
    for quantity, axes in (("gradient_length", ["prompt"]), ("token_potential", ["prompt", "token"])):
        folded, plain = (seen[f"{quantity}_{name}"] for name in ("unit_sphere", "mlp_input"))
        found.append((abs(folded - plain).mean(axes) / abs(plain).mean(axes)).values)
    return found


def test_the_fold_moves_the_potential_far_more_than_its_gradient():
    """Gains of 1 change the unit of x alone: U by 1 - 1/sqrt(d) and grad U not at all. Gains whose logs have a standard
    deviation of 0.5 move |grad U| by about a tenth.
    """
    slope, potential = changes(encoder(0.0))
    assert slope == pytest.approx(0, abs=1e-9)
    assert potential == pytest.approx(1 - 1 / math.sqrt(D), rel=1e-9)
    slope, potential = changes(encoder(0.5))
    assert ((slope > 0.05) & (slope < 0.2)).all(), slope
    assert ((potential > 0.75) & (potential < 1)).all(), potential
