"""Planted models for the claims about damage of ablation and writes against the loss gradient; the seed decides
embeddings and texts.

- early-fragile: layers amplify, or damp, the coordinates that the embeddings avoid, so that noise in an early layer is
  amplified, or repaired, by all later ones. Blocks are linear: an MLP in the linear range of its activation, and
  attention that writes nothing.
- heads-compete: every head writes one constant direction, of its own or one that its layer shares.
- gradient-shaped: texts count upwards, so that the next token is known. One neuron per token v reads the embedding of v
  and writes that of v + 1, which the head reads as the next token: a step down the loss.
- sharp-unstable: a token is two codes, of its position and of its id. One head attends to the token itself and one to
  the token before it; written with opposite signs, they make the difference between neighbors, which amplifies high
  frequencies. Without these codes both heads nearly average over all tokens before, which removes them.
- mlp-projects: tokens lie close to a linear subspace; a GELU far in its linear range makes the MLP linear. It moves
  tokens by a share of the way to the subspace, or away from it.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support.planted_attention import Planted, generator

F64 = torch.float64
WORDS, LINEAR = 48, 30.0
SCALED_DIM, SCALED_TOKENS, SCALED_LAYERS = 32, 8, 8
HEADS, PER_HEAD, BLOCKS, RADIUS, WRITE, SLOPE = 6, 12, 4, 20.0, 3.0, 40.0
WIDTH = HEADS * PER_HEAD
COUNTED_DIM, COUNTED_TOKENS = 64, 12
DIM, TOKENS, CODE, GAIN, LOGIT, INSIDE = 80, 12, 32, 8.0, 20.0, 9
WRITES = {"down": 1.0, "up": -1.0, "the same everywhere": 0.0}


def rows_of(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Texts of random tokens with different first tokens."""
    draw = generator(10, seed)
    return [[k % WORDS, *torch.randint(WORDS, (tokens - 1,), generator=draw).tolist()] for k in range(count)]


def layers_that_scale(rate: float, seed: int = 0) -> Planted:
    """Layers that add ``rate`` times the last half of the coordinates, in which embeddings have nothing."""
    dim = SCALED_DIM
    sizes = {"vocab_size": WORDS, "n_embd": dim, "n_layer": SCALED_LAYERS, "n_head": 1, "n_inner": dim}
    torch.manual_seed(seed)
    options = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "n_positions": SCALED_TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()
    free = torch.diag((torch.arange(dim) >= dim // 2).float())
    with torch.no_grad():
        embeddings = torch.randn(WORDS, dim) @ (torch.eye(dim) - free)
        embeddings[:, : dim // 2] -= embeddings[:, : dim // 2].mean(-1, keepdim=True)
        model.transformer.wte.weight.copy_(embeddings)
        model.transformer.wpe.weight.zero_()
        model.lm_head.weight.normal_(std=0.5)
        for block in model.transformer.h:
            block.attn.c_proj.weight.mul_(1e-2)
            block.mlp.c_fc.weight.copy_(torch.eye(dim))
            block.mlp.c_fc.bias.fill_(LINEAR)
            block.mlp.c_proj.weight.copy_(rate * free)
            block.mlp.c_proj.bias.copy_(-LINEAR * (rate * free).sum(0))
    return model, rows_of(40, SCALED_TOKENS, seed)


def heads_that_write(kind: str, seed: int = 0) -> Planted:
    """Every head writes one constant direction. Heads "alone" have a direction each, which the output layer reads. The
    heads of a layer that write "together" share one that nothing reads but a neuron of the layer, which is on only if
    all of them write: without a second head it is off already.
    """
    sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS, "n_positions": SCALED_TOKENS}
    torch.manual_seed(seed)
    options = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "n_inner": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()
    raw = torch.randn(WIDTH, WIDTH - 1)
    basis = torch.linalg.qr(raw - raw.mean(0)).Q.T  # orthonormal, of mean 0, as a LayerNorm keeps them
    count = BLOCKS * HEADS
    own, shared, rest = basis[:count].view(BLOCKS, HEADS, WIDTH), basis[count : count + BLOCKS], basis[count + BLOCKS :]
    readers = torch.randn(WORDS, count)
    orthogonal = torch.linalg.qr(readers - readers.mean(0)).Q  # with nearly equal odds, damages of heads add up
    with torch.no_grad():
        embeddings = torch.randn(WORDS, len(rest)) @ rest
        model.transformer.wte.weight.copy_(RADIUS * embeddings / embeddings.norm(dim=-1, keepdim=True))
        model.transformer.wpe.weight.zero_()
        model.lm_head.weight.copy_(orthogonal @ own.flatten(0, 1))
        for layer, block in enumerate(model.transformer.h):
            for parameter in block.mlp.parameters():
                parameter.zero_()
            block.attn.c_attn.bias[2 * WIDTH :: PER_HEAD] = 1.0
            block.attn.c_proj.weight.mul_(1e-2)
            block.attn.c_proj.weight[::PER_HEAD] = own[layer] if kind == "alone" else shared[layer]
            if kind == "together":
                length = (RADIUS**2 + (layer + 1) * HEADS**2 + layer * WRITE**2) ** 0.5  # before the MLP
                block.mlp.c_fc.weight[:, 0] = SLOPE * length / WIDTH**0.5 * shared[layer]
                block.mlp.c_fc.bias[0] = -SLOPE * (HEADS - 0.5)
                block.mlp.c_proj.weight[0] = WRITE * own[layer, 0] / (0.5 * SLOPE)
    return model, rows_of(40, SCALED_TOKENS, seed)


def writes_of(kind: str, seed: int = 0) -> Planted:
    """One block whose MLP writes "down" the loss, "up" it, or "the same everywhere"; unit embeddings are orthogonal and
    have mean 0. Attention writes next to nothing, in random directions, so that the mean over the two half-steps is
    half of the cosine of the MLP; beside constant writes it has one direction too, since random writes of one model
    have some cosine.
    """
    sizes = {"vocab_size": WORDS, "n_embd": COUNTED_DIM, "n_layer": 1, "n_head": 1, "n_positions": COUNTED_TOKENS}
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_inner=WORDS, bos_token_id=0, eos_token_id=0)).eval()
    spread = torch.randn(COUNTED_DIM, WORDS)
    embeddings = torch.linalg.qr(spread - spread.mean(0)).Q.T
    block = model.transformer.h[0]
    with torch.no_grad():
        for parameter in (*model.transformer.wpe.parameters(), *block.mlp.parameters()):
            parameter.zero_()
        block.attn.c_proj.weight.mul_(1e-2)
        model.transformer.wte.weight.copy_(embeddings)
        block.mlp.c_fc.weight.copy_(4 * embeddings.T)
        block.mlp.c_fc.bias.fill_(-4 * COUNTED_DIM**0.5 / 2)
        block.mlp.c_proj.weight.copy_(WRITES[kind] * embeddings.roll(-1, 0))
        if kind == "the same everywhere":
            block.mlp.c_proj.bias.copy_(embeddings.sum(0))
            block.attn.c_attn.bias[2 * COUNTED_DIM] = 1.0  # the first component of a value is about 1
            block.attn.c_proj.weight.zero_()
            block.attn.c_proj.weight[0] = 1e-2 * embeddings.sum(0)
    return model, [[(first + i) % WORDS for i in range(COUNTED_TOKENS)] for first in range(40)]


def silent_model(dim: int, heads: int, seed: int = 0) -> GPT2LMHeadModel:
    """One block whose attention and MLP write nothing."""
    sizes = {"vocab_size": WORDS, "n_embd": dim, "n_layer": 1, "n_head": heads, "n_positions": TOKENS, "n_inner": dim}
    torch.manual_seed(seed)
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for part in (*model.transformer.h[0].attn.parameters(), *model.transformer.h[0].mlp.parameters()):
            part.zero_()
        model.lm_head.weight.normal_()
    return model


def neighbors(kind: str, seed: int = 0) -> Planted:
    """Attention that writes the "difference" of neighbors, or the "average" of all tokens so far."""
    model = silent_model(DIM, heads=2, seed=seed)
    spread = torch.randn(DIM, TOKENS + 1 + CODE, dtype=F64, generator=generator(11, seed))
    codes = torch.linalg.qr(spread - spread.mean(0)).Q.T
    places, ids = codes[: TOKENS + 1], codes[TOKENS + 1 :]
    size = DIM // 2  # of a head
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(places[:TOKENS])
        words = torch.nn.functional.normalize(torch.randn(WORDS, CODE, dtype=F64), dim=-1)
        model.transformer.wte.weight.copy_(words @ ids)
        attention, scale = model.transformer.h[0].attn, (LOGIT * size**0.5 * 2 / DIM) ** 0.5
        query, key, value = attention.c_attn.weight.split(DIM, dim=1)
        for head, shift in enumerate((0, 1)):
            own = slice(head * size, head * size + TOKENS + 1)
            query += 0.01 * torch.randn(query.shape)
            key += 0.01 * torch.randn(key.shape)
            if kind == "difference":
                query[:, own] = scale * places.T
                key[:, own] = scale * places.roll(shift, 0).T  # the key of place j is the query of place j + shift
            reads = slice(head * size, head * size + CODE)
            value[:, reads] = ids.T
            sign = -1.0 if kind == "difference" and head == 1 else 1.0
            attention.c_proj.weight[reads] = sign * GAIN * ids
    return model, rows_of(40, TOKENS, seed)


def subspace(share: float, seed: int = 0) -> Planted:
    """Tokens near a subspace of ``INSIDE`` dimensions, and an MLP that moves them by a share of the way to it."""
    dim = 32
    model, draw = silent_model(dim, heads=1, seed=seed), generator(12, seed)
    spread = torch.randn(dim, INSIDE, dtype=F64, generator=draw)
    inside = torch.linalg.qr(spread - spread.mean(0)).Q
    off = torch.eye(dim) - 1 / dim - inside @ inside.T
    with torch.no_grad():
        for table, size in ((model.transformer.wte.weight, 1.0), (model.transformer.wpe.weight, 0.05)):
            near = torch.randn(len(table), INSIDE, dtype=F64, generator=draw)
            points = torch.nn.functional.normalize(near, dim=-1) @ inside.T
            noise = torch.randn(len(table), dim, dtype=F64, generator=draw) @ off
            table.copy_(size * (points + 0.002 * noise))
        mlp = model.transformer.h[0].mlp
        mlp.c_fc.weight.copy_(torch.eye(dim))
        mlp.c_fc.bias.fill_(LINEAR)  # GELU(c + 30) = c + 30
        mlp.c_proj.weight.copy_(-share * off / dim**0.5)
        mlp.c_proj.bias.copy_(share * LINEAR * off.sum(0) / dim**0.5)
    return model, rows_of(40, TOKENS, seed)
