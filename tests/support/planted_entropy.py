"""Planted models for the claims about blocks as steps of a flow and about entropy and free energy; the seed decides
embeddings and texts, and random weights where there are some.

- generator: random blocks, whose updates are small or large beside the state.
- entropy-identity: MLPs that are gradients, with steps that are small beside the state, or larger than it.
- free-energy-descends: tokens with a positive coordinate along an axis, in which each MLP is k x (U = k x^2 / 2), and
  to which attention adds a constant: along it U and x grow ("uphill"), "against" it (k < 0) the write of attention
  descends U. Values are small, so that nu is.
- diffuse-then-compress: tokens with a common part along an axis, and MLPs that write a constant along it: taking it
  away spreads directions, as diffusion would, and adding it gathers them.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support.planted_attention import Planted, generator

D, LAYERS, TOKENS, WORDS = 16, 4, 12, 60
AXIS = torch.zeros(D)
AXIS[:2] = torch.tensor([0.5, -0.5]).mul(2**0.5)  # of mean 0, which LayerNorm keeps
SMALL, LARGE = 300.0, 1.0  # lengths of states whose updates are small and large
WRITES = {
    "spread, then gathered": [-1.0, -1.0, 1.5, 1.5],
    "gathered, then spread": [1.0, 1.0, -1.0, -1.0],
    "gathered": [1.0, 1.0, 1.0, 1.0],
    "silent": [0.0, 0.0, 0.0, 0.0],
}


def texts_of(seed: int) -> list[list[int]]:
    """Texts of random words that begin with different ones."""
    draw = generator(30, seed)
    return [[k, *torch.randint(WORDS, (TOKENS - 1,), generator=draw).tolist()] for k in range(40)]


def silent_blocks(seed: int = 0) -> GPT2LMHeadModel:
    """A model whose blocks write nothing."""
    sizes = {"vocab_size": 64, "n_embd": D, "n_layer": LAYERS, "n_head": 2, "n_positions": 32}
    torch.manual_seed(seed)
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)).eval()
    with torch.no_grad():
        for block in net.transformer.h:
            for part in (block.attn.c_proj, block.mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
    return net


def updates(kind: str, seed: int = 0) -> Planted:
    """Random blocks whose updates are "small" or "large"."""
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": D, "n_head": 2, "n_layer": 2, "initializer_range": 0.3}
    torch.manual_seed(seed)
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)).eval()
    radius = {"small": SMALL, "large": LARGE}[kind]
    with torch.no_grad():
        net.transformer.wte.weight.mul_(radius)
        net.transformer.wpe.weight.mul_(radius)
    return net, texts_of(seed)


def gradients(kind: str, seed: int = 0) -> Planted:
    """MLPs that are gradients, with "small" or "large" steps, or that write nothing ("silent")."""
    net, size = silent_blocks(seed), {"small": 0.001, "large": 0.2, "silent": 0.0}[kind]
    with torch.no_grad():
        for layer, block in enumerate(net.transformer.h):
            block.mlp.c_proj.weight.copy_(size * (layer - 1.5) * block.mlp.c_fc.weight.T)
    return net, texts_of(seed)


def pulled(kind: str, seed: int = 0) -> Planted:
    """Tokens that are moved "uphill" or "against" the gradient of U, or not at all ("silent")."""
    net = silent_blocks(seed)
    if kind == "silent":
        return net, texts_of(seed)
    strength = {"uphill": 0.3, "against": -0.3}[kind]
    with torch.no_grad():
        net.transformer.wte.weight.add_(1.0 * AXIS)
        for block in net.transformer.h:
            block.attn.c_proj.weight.normal_(0, 1e-3)
            block.attn.c_proj.bias.copy_(0.5 * AXIS)
            block.mlp.c_fc.weight.zero_()
            block.mlp.c_fc.bias.zero_()
            for neuron, sign in enumerate((1.0, -1.0)):  # gelu(z) - gelu(-z) = z
                block.mlp.c_fc.weight[:, neuron] = sign * AXIS
                block.mlp.c_proj.weight[neuron] = sign * strength * AXIS
    return net, texts_of(seed)


def shifted(kind: str, seed: int = 0) -> Planted:
    """A cloud of tokens that spreads and gathers in the order of the ``kind``."""
    net = silent_blocks(seed)
    with torch.no_grad():
        net.transformer.wte.weight.add_(2.0 * AXIS)
        for block, amount in zip(net.transformer.h, WRITES[kind], strict=True):
            block.mlp.c_proj.bias.copy_(amount * AXIS)
    return net, texts_of(seed)
