"""Planted models of one or two layers for the claims about queries, keys and sinks; the seed decides embeddings, values
and texts.

Attention writes the mean of the values v_j along one direction, which the head reads. At second order the damage of a
change dl of the logits is Cov_A(dl, v)^2, and so depends on whether values go along with what moves the logits:

- probe-metric: keys +-a in pairs of tokens with one value. Noise on the query moves all logits along the key, where the
  values of a pair cancel; independent noise on the keys does not cancel. Where the value is the key, noise on the query
  moves what is read, and noise on the keys averages out.
- key-norm: queries are (rho_i, 0) and keys (x_j, y_j) with y in {-2, 0, 2}. A change of the length of a query, by
  normalizing or blurring, moves the logits along x_j. Values x_j h_j, h = -1 where y = 0 and else 1, are uncorrelated
  with x, but not with x_j / |k_j| and, as h_j = x_j x_{j-1}, not with x_{j-1}, which blur adds. Values x_j are the
  opposite.
- sinks-are-anchors: the first position is marked by its position embedding. The MLP of the first layer turns the mark
  into a large component along u, and the second layer attends to it. Values there read u, or everything but u.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

Planted = tuple[GPT2LMHeadModel, list[list[int]]]  # a model and its texts
DIM, PAIR_TOKENS, ROWS = 64, 24, 40
SINK_WORDS, SINK_DIM, SINK_TOKENS = 48, 32, 14
MARK, LARGE = 8.0, 30.0


def generator(*numbers: int) -> torch.Generator:
    """A generator whose seed depends on all numbers, the last of which is that of the model."""
    mixed = 0
    for number in numbers:
        mixed = 1_000_003 * mixed + number
    return torch.Generator().manual_seed(mixed % 2**63)


def directions(count: int, seed: int) -> torch.Tensor:
    """Orthonormal directions whose coordinates sum to 0, so that LayerNorm only rescales equally long sums of them."""
    spread = torch.randn(DIM, count, generator=generator(1, seed))
    return torch.linalg.qr(spread - spread.mean(0)).Q.T


def one_head(
    embeddings: torch.Tensor,
    output: torch.Tensor,
    query: list[float],
    keys: list[torch.Tensor],
    value: torch.Tensor,
    seed: int,
    *,
    rho: torch.Tensor | None = None,
) -> GPT2LMHeadModel:
    """One head with the key coordinates <keys_c, x>, the value <value, x> written along ``output``, and the query
    ``query`` (a constant), plus <rho, x> along the first key coordinate.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(embeddings), "n_embd": DIM, "n_layer": 1, "n_head": 1, "n_positions": PAIR_TOKENS}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).eval()
    block = model.transformer.h[0]
    scale = float(embeddings[0].norm()) / DIM**0.5  # what LayerNorm divides by
    weight = torch.zeros(DIM, 3 * DIM)
    for c, key in enumerate(keys):
        weight[:, DIM + c] = scale * key
    weight[:, 2 * DIM] = scale * value
    if rho is not None:
        weight[:, 0] = scale * rho
    with torch.no_grad():
        for parameter in (*model.transformer.wpe.parameters(), *block.mlp.parameters(), *block.attn.parameters()):
            parameter.zero_()
        model.transformer.wte.weight.copy_(embeddings)
        block.attn.c_attn.weight.copy_(weight)
        block.attn.c_attn.bias[: len(query)] = torch.tensor(query)
        block.attn.c_proj.weight[0].copy_(2 * output)
        model.lm_head.weight.copy_(torch.randn(len(embeddings), 1, generator=generator(2, seed)) * output)
    return model


def pairs(kind: str, seed: int = 0) -> Planted:
    """A token is a content p and a sign; a text shows each content with both signs, one after the other. ``kind`` is
    "values cancel" or "values are keys".
    """
    contents = 24
    own = directions(contents + 3, seed)
    tokens = torch.arange(2 * contents)
    content, sign = tokens % contents, 1.0 - 2 * (tokens // contents)
    worth = torch.randn(contents, generator=generator(3, seed)).clamp(-1.5, 1.5)
    values = worth[content]
    rest = (2.5 - values.square()).sqrt()
    embeddings = own[content] * rest[:, None] + sign[:, None] * own[-1] + values[:, None] * own[-2]
    value = own[-1] + 0.2 * own[-2] if kind == "values are keys" else own[-2]
    model = one_head(embeddings, own[-3], [0.0, 8.0], [own[-1]], value, seed)
    texts = []
    for first in range(ROWS):
        draw = torch.randperm(contents, generator=generator(4, first, seed)).tolist()[: PAIR_TOKENS // 2]
        draw[0] = first % contents
        flip = first // contents
        texts.append([p + contents * ((k + flip) % 2) for p in draw for k in range(2)])
    return model, texts


def shaped(kind: str, seed: int = 0) -> Planted:
    """A token is a sign x, h in {-1, 1}, a sign of y and a length of its query. ``kind`` is "values of the shape" or
    "values are keys".
    """
    own = directions(8 + 8, seed)
    bits = torch.tensor([[(k >> b) & 1 for b in range(7)] for k in range(128)]).float()
    x, h, s, long = (1 - 2 * bits[:, b] for b in range(4))
    y = s * (1 + h)
    rest = torch.where(h > 0, 0.0, 2.0)  # y^2 + rest^2 is 4 in both cases
    content = bits[:, 4:] @ torch.tensor([1.0, 2.0, 4.0])
    columns = ((x, 0), (y, 1), (rest, 2), (x * h, 3), (long, 4))
    embeddings = sum(column[:, None] * own[place] for column, place in columns) + own[8 + content.long()]
    value = own[0] if kind == "values are keys" else own[3]
    model = one_head(embeddings, own[5], [4.0], [own[0], own[1]], value, seed, rho=2 * own[4])
    texts = []
    for first in range(ROWS):
        flips = torch.rand(PAIR_TOKENS, 7, generator=generator(5, first, seed)).lt(0.5).long()
        signs = flips[:, 0]
        previous = torch.cat([signs[:1], signs[:-1]])
        flips[:, 1] = (signs + previous) % 2  # h = x times the previous x
        tokens = (flips * 2 ** torch.arange(7)).sum(-1)
        tokens[0] = 3 * first
        texts.append(tokens.tolist())
    return model, texts


def with_keys(kind: str, seed: int = 0) -> Planted:
    """Two layers of four heads with W_K = W_Q ("equal"), W_K = R W_Q with R a turn by 90 degrees ("turned"), or
    independent keys ("independent").
    """
    torch.manual_seed(seed + 3)
    sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    turn = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * 16)
    with torch.no_grad():
        for block in model.transformer.h:
            queries = block.attn.c_attn.weight[:, :32]
            if kind != "independent":
                block.attn.c_attn.weight[:, 32:64] = queries if kind == "equal" else queries @ turn.T
    return model, [[k, *range(1, 8)] for k in range(ROWS)]


def first_token_sink(kind: str, seed: int = 0) -> Planted:
    """Two layers of one head, of which the first writes the sink's state and the second attends to it: "constant", a
    sink with one value; "its token", a sink with the value of its token; or "none".
    """
    sizes = {"vocab_size": SINK_WORDS, "n_embd": SINK_DIM, "n_layer": 2, "n_head": 1, "n_inner": 4}
    torch.manual_seed(seed)
    options = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "n_positions": SINK_TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()
    raw = torch.randn(SINK_DIM, SINK_DIM - 1)
    basis = torch.linalg.qr(raw - raw.mean(0)).Q.T  # orthonormal, of mean 0, as a LayerNorm keeps them
    mark, u, rest = basis[0], basis[1], basis[2:]
    first, second = model.transformer.h
    key, value = slice(SINK_DIM, 2 * SINK_DIM), slice(2 * SINK_DIM, 3 * SINK_DIM)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.randn(SINK_WORDS, SINK_DIM - 3) @ rest)
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[0] = MARK * mark
        for parameter in (*first.mlp.parameters(), *second.mlp.parameters()):
            parameter.zero_()
        first.attn.c_proj.weight.mul_(1e-2)
        first.mlp.c_fc.weight[:, 0] = 10 * mark
        first.mlp.c_fc.bias[0] = -20.0
        first.mlp.c_proj.weight[0] = LARGE * u / 20 if kind != "none" else 0 * u
        second.attn.c_attn.bias[:SINK_DIM] = 8.0 * basis[2]
        second.attn.c_attn.weight[:, key] = torch.outer(u, basis[2])
        if kind == "its token":
            # the norm divides by the length of the sink's state; other tokens are longer by that factor
            second.attn.c_attn.weight[:, value] = rest.T @ rest
        second.attn.c_proj.weight.normal_(std=0.3)
        model.lm_head.weight.normal_(std=0.3)
    return model, sink_rows(seed)


def sink_rows(seed: int = 0) -> list[list[int]]:
    """Texts with different first tokens."""
    shift = torch.randint(SINK_WORDS, (40,), generator=generator(6, seed)).tolist() if seed else [0] * 40
    return [
        [first, *((first + shift[first] + i * (1 + first % 5)) % SINK_WORDS for i in range(1, SINK_TOKENS))]
        for first in range(40)
    ]
