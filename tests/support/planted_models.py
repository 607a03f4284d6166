"""Tiny GPT-2 models with planted weights, whose tokens are known to gather, to scatter or to stay where they are.

One direction u is reserved. The first token carries a large component along u, and every token attends to it alone;
values are the component along u, so that attention adds STEP u to every token, and nothing if no token is mixed with
another. Tokens of embedding radius 1 are turned by that, those of radius 1e4 are not: a third of the tokens gathers, a
tenth of the pairs, about twice the growth of 0.05 that decides. An MLP in its linear range subtracts the component
along u.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helmscope.types import Ruling

DIM, VOCABULARY, TOKENS, LAYERS = 32, 96, 28, 2
STEP, LARGE, LINEAR = 5.0, 1e4, 30.0
CLAIMS = ("tokens-cluster", "attention-clusters", "mlp-prevents")
SUPPORTED, REFUTED, IMPOSSIBLE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.IMPOSSIBLE
# the right ruling of each claim; where attention alone gathers nothing, mlp-prevents has no premise, also where MLPs
# scatter tokens that begin close together
RULINGS = {
    "never move": (REFUTED, REFUTED, IMPOSSIBLE),
    "gather": (SUPPORTED, SUPPORTED, REFUTED),
    "scatter": (REFUTED, REFUTED, IMPOSSIBLE),
    "gather by attention only": (REFUTED, SUPPORTED, SUPPORTED),
}


def planted_model(kind: str, seed: int) -> GPT2LMHeadModel:
    """A model of one of the kinds in RULINGS; the seed decides its embeddings."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=DIM, n_head=1, n_layer=LAYERS, n_inner=DIM,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    u = torch.zeros(DIM)
    u[:2] = torch.tensor([1.0, -1.0]) / 2**0.5
    noise = torch.randn(VOCABULARY, DIM, generator=generator)
    noise[:, :2] = 0
    noise[:, 2:] -= noise[:, 2:].mean(-1, keepdim=True)  # what a LayerNorm keeps
    noise /= noise.norm(dim=-1, keepdim=True)
    small = (torch.arange(VOCABULARY) % 3 == 0).float().unsqueeze(-1)
    start = STEP * u if kind == "scatter" else 0 * u
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(small * (noise + start) + (1 - small) * LARGE * noise)
        model.transformer.wpe.weight[0] = 1e6 * u
        model.transformer.ln_f.weight.fill_(1)
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1)
            block.ln_2.weight.fill_(1)
            if kind.startswith("gather"):
                _plant_attention(block.attn, u)
            if kind in ("scatter", "gather by attention only"):
                _plant_mlp(block.mlp, u)
    return model


def _plant_attention(attention: torch.nn.Module, u: torch.Tensor) -> None:
    query, key, value = (slice(k * DIM, (k + 1) * DIM) for k in range(3))
    attention.c_attn.bias[query] = 40 * u
    attention.c_attn.weight[:, key] = torch.outer(u, u)
    attention.c_attn.weight[:, value] = torch.outer(u, u)
    attention.c_proj.weight.copy_(torch.eye(DIM) * STEP / DIM**0.5)


def _plant_mlp(mlp: torch.nn.Module, u: torch.Tensor) -> None:
    """GELU(c + b) is c + b for large b: the MLP is linear, and subtracts STEP u from a token noise + STEP u."""
    mlp.c_fc.weight.copy_(torch.eye(DIM))
    mlp.c_fc.bias.fill_(LINEAR)
    subtract = -torch.outer(u, u) * (1 + STEP**2) ** 0.5 / DIM**0.5
    mlp.c_proj.weight.copy_(subtract)
    mlp.c_proj.bias.copy_(-LINEAR * subtract.sum(0))


def planted_rows(seed: int, count: int = 32) -> list[list[int]]:
    """Rows of different token ids with different first tokens; about a third of each has a small embedding."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    rows = []
    for k in range(count):
        is_small = torch.zeros(TOKENS, dtype=torch.bool)
        for half in (slice(1, 12), slice(17, 28)):
            number = int(torch.randint(3, 5, (1,), generator=generator))
            is_small[half] = torch.randperm(11, generator=generator) < number
        ids = torch.randperm(VOCABULARY, generator=generator)
        small, large = ids[ids % 3 == 0].tolist(), [i for i in ids.tolist() if i % 3 and i != _first(k)]
        rows.append([_first(k), *((small if one else large).pop() for one in is_small[1:].tolist())])
    return rows


def _first(row: int) -> int:
    """The first token of a row, one of large embedding."""
    return (3 * row) % VOCABULARY + 1 + (3 * row // VOCABULARY) % 2
