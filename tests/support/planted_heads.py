"""Planted models of one layer for the claim operator-class: heads that mix, retrieve or transport. The seed decides
embeddings, weights and texts.

A token is two codes, of its position and of its id; the ids of first tokens are not among those of others, and lie in
directions that values do not read.

- mixing: queries and keys read the position alone, so that every text has the same kernel.
- retrieval: queries and keys read the id alone, with large logits: a token attends to the earlier one that fits best.
- transport: as mixing, without the first token; to that one a token attends by a random component of its own id, and
  finds the same value in all texts.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support.planted_attention import Planted, generator

F64 = torch.float64
TEXTS, OTHERS, TOKENS, HEADS = 40, 64, 12, 8
PER_HEAD, CODE = 10, 24  # coordinates of a head, dimensions of the ids of tokens other than the first
DIM = HEADS * PER_HEAD
SOFT, SHARP, GATE = 2.0, 40.0, 1.5  # sizes of logits


def heads_that(kind: str, seed: int = 0) -> Planted:
    """One layer of eight heads of a kind, whose MLP writes nothing."""
    draw = generator(13, seed)
    sizes = {"vocab_size": TEXTS + OTHERS, "n_embd": DIM, "n_layer": 1, "n_head": HEADS, "n_positions": TOKENS}
    torch.manual_seed(seed)
    config = GPT2Config(**sizes, n_inner=4, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).double().eval()
    spread = torch.randn(DIM, TOKENS + CODE + 10, dtype=F64, generator=draw)
    codes = torch.linalg.qr(spread - spread.mean(0)).Q.T
    places, ids, first = codes[:TOKENS], codes[TOKENS : TOKENS + CODE], codes[TOKENS + CODE :]
    block = model.transformer.h[0]
    with torch.no_grad():
        for parameter in block.mlp.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(places)
        model.transformer.wte.weight[:TEXTS] = _random_units(TEXTS, len(first), draw) @ first
        model.transformer.wte.weight[TEXTS:] = _random_units(OTHERS, CODE, draw) @ ids
        # LayerNorm multiplies a sum of two orthonormal codes by sqrt(DIM / 2), so that <code, x> is that number
        size = (DIM / 2) ** 0.5
        query, key, value = (
            part.unflatten(1, (HEADS, PER_HEAD)) for part in block.attn.c_attn.weight.split(DIM, dim=1)
        )
        for head in range(HEADS):
            value[:, head] = ids.T @ torch.randn(CODE, PER_HEAD, dtype=F64, generator=draw) / size
            read, sought = _reads(kind, places, ids, draw)
            query[:, head], key[:, head] = read * PER_HEAD**0.5 / size, sought / size
        block.attn.c_attn.bias.zero_()
        block.attn.c_proj.weight.copy_(torch.randn(DIM, DIM, dtype=F64, generator=draw) / DIM**0.5)
    rows = [[text, *(TEXTS + torch.randint(OTHERS, (TOKENS - 1,), generator=draw)).tolist()] for text in range(TEXTS)]
    return model, rows


def _reads(
    kind: str, places: torch.Tensor, ids: torch.Tensor, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The directions that queries and keys of one head read, (DIM, PER_HEAD): their product is the logit."""
    sources = ids if kind == "retrieval" else places
    read, sought = (torch.randn(len(sources), PER_HEAD, dtype=F64, generator=draw) for _ in range(2))
    scale = (SHARP if kind == "retrieval" else SOFT) / PER_HEAD**0.5
    if kind == "transport":
        # the first component is the logit of the first token, whose key has no other
        read[:, 0], sought[:, 0] = 0.0, 0.0
        sought[0] = 0.0
        sought[0, 0] = 1.0
        gate = torch.randn(CODE, dtype=F64, generator=draw)
        query = sources.T @ read * scale
        query[:, 0] = GATE * (ids.T @ gate)
        return query, sources.T @ sought
    return sources.T @ read * scale, sources.T @ sought


def _random_units(count: int, dim: int, draw: torch.Generator) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(count, dim, dtype=F64, generator=draw), dim=-1)
