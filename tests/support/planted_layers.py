"""Planted models for the claims about layers as gradient flows; the seed decides directions and texts.

Attention is even: queries and keys are 0, and a head writes W times the mean of what its tokens read. MLPs are linear,
M z: a GELU far in its linear range, or two neurons for each coordinate, gelu(z) - gelu(-z) = z.

- whitening, mobility: the words are the eigenvectors of W and their opposites, and every text holds all of them, so
  that Sigma is nearly constant and W W^T in the directions that are tangent to a word. "gradient": M = -H with a
  symmetric H; "carried": M = -W W^T H, a drift with the mobility of attention's noise.
- jko-step: words lie close to a direction n, evenly to all sides. A layer that "steps" removes a share k of half of the
  other directions, (I + tau K)^-1 with K = k on them and tau = 1 / (1 - k): an exact step. One that "spreads" removes a
  part of n, so that all directions spread evenly, as a normal law does by diffusion; one that "gathers" adds to n, and
  with it a layer has the noise nu > 0 of one that spreads. One that "turns" turns that half towards the
  other, and removes little of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from support.planted_attention import Planted, generator

DIM, TIMES, LINEAR, SIZE = 18, 6, 40.0, 0.002  # of the drifts
AROUND, OFFSET, SHARE, ALONG, ACROSS, ANGLE, LITTLE = 34, 0.02, 0.5, 0.6, 0.4, 0.3, 0.02  # of the steps


def even_texts(words: int, seed: int, times: int) -> list[list[int]]:
    """32 texts that begin with different words, and then hold all words, ``times`` times."""
    draw = generator(20, seed)
    return [
        [k, *(int(word) for _ in range(times) for word in torch.randperm(words, generator=draw))] for k in range(32)
    ]


def drifts(kind: str, seed: int = 0) -> Planted:
    """Two layers with even noise and the drift of a ``kind``."""
    draw = generator(21, seed)
    basis = directions(DIM, draw)
    words = DIM**0.5 * torch.cat([basis, -basis], 1).mT
    texts = even_texts(len(words), seed, times=TIMES)
    model = even_model(DIM, words, len(texts[0]), layers=2, neurons=DIM, seed=seed)
    inner = torch.randn(DIM - 1, DIM - 1, generator=draw)
    hessian = basis @ (inner + inner.mT) @ basis.mT
    write = basis @ torch.diag(torch.linspace(0.3, 2.0, DIM - 1)) @ basis.mT
    matrix = SIZE * {"gradient": -hessian, "carried": -write @ write @ hessian}[kind]
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_proj.weight.copy_(0.01 * write.mT)
            block.mlp.c_fc.weight.copy_(torch.eye(DIM))
            block.mlp.c_fc.bias.fill_(LINEAR)
            block.mlp.c_proj.weight.copy_(matrix.mT)
            block.mlp.c_proj.bias.copy_(-LINEAR * matrix.sum(1))
    return model, texts


def steps(*kinds: str, seed: int = 0) -> Planted:
    """A layer of each of the ``kinds``."""
    basis = directions(AROUND, generator(22, seed))
    north, others = basis[:, :1], basis[:, 1:]
    words = AROUND**0.5 * torch.cat([north + OFFSET * others, north - OFFSET * others], 1).mT
    texts = even_texts(len(words), seed, times=1)
    model = even_model(AROUND, words, len(texts[0]), layers=len(kinds), neurons=2 * AROUND, seed=seed)
    half = others.shape[1] // 2
    one, two = others[:, :half], others[:, half : 2 * half]
    noise = ACROSS * others @ others.mT
    along = ALONG * north @ north.mT
    attention = {"spreads": -along - noise, "gathers": along - noise}
    mlps = {"steps": -SHARE * one @ one.mT, "turns": ANGLE * (one @ two.mT - two @ one.mT) - LITTLE * one @ one.mT}
    with torch.no_grad():
        eye = torch.eye(AROUND)
        for block, kind in zip(model.transformer.h, kinds, strict=True):
            block.attn.c_proj.weight.copy_(attention.get(kind, 0 * eye).mT)
            block.mlp.c_fc.weight.copy_(torch.cat([eye, -eye], 1))
            matrix = mlps.get(kind, 0 * eye)
            block.mlp.c_proj.weight.copy_(torch.cat([matrix, -matrix], 1).mT)
    return model, texts


def directions(dim: int, draw: torch.Generator) -> Tensor:
    """An orthonormal basis (dim, dim - 1) of the vectors of mean 0, which a LayerNorm keeps."""
    return torch.linalg.qr(torch.cat([torch.ones(dim, 1), torch.randn(dim, dim - 1, generator=draw)], 1)).Q[:, 1:]


def even_model(dim: int, words: Tensor, tokens: int, *, layers: int, neurons: int, seed: int) -> GPT2LMHeadModel:
    """A model that embeds ``words``, whose heads read what a norm leaves of them and write nothing yet."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(words), n_positions=tokens, n_embd=dim, n_head=1, n_layer=layers, n_inner=neurons,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("lm_head"):
                parameter.zero_()
        model.transformer.wte.weight.copy_(words)
        model.transformer.ln_f.weight.fill_(1)
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1)
            block.ln_2.weight.fill_(1)
            block.attn.c_attn.weight[:, 2 * dim :] = torch.eye(dim)
    return model
