"""The recipes of the three models, which share one dataset of stories and one tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"
BUNDLED_FOLDER = Path(__file__).parents[1] / "src" / "helmscope" / "models" / "bundled"
VOCABULARY, CONTEXT, WIDTH, HEADS = 4_096, 256, 192, 6
START, CUT, MASK = 0, 1, 2  # token ids: start of a story; cut-off story, never a target; replacement of masked tokens
IDS = {"bos_token_id": START, "eos_token_id": START, "pad_token_id": CUT}
SPECIAL = ("<|endoftext|>", "<pad>", "<mask>")
HIDDEN_SHARE = 0.2  # of the tokens, for the masked language model


@dataclass(frozen=True)
class Recipe:
    """How one model is trained. ``tied``: a masked language model with one block, applied ``layers`` times."""

    name: str
    seed: int
    tied: bool = False
    layers: int = 12
    steps: int = 8_000
    batch: int = 256
    peak: float = 1.5e-3
    warmup: int = 200
    decay: float = 0.1

    def model(self, **sizes: int) -> Any:
        """The model with random weights from the seed; ``sizes`` override those of its recipe."""
        import torch

        torch.manual_seed(self.seed)
        return _tied(self.layers, sizes) if self.tied else _causal(self.layers, sizes)


RECIPES = {
    "A": Recipe("A", seed=1),
    "B": Recipe("B", seed=2),
    "tied": Recipe("tied", seed=3, tied=True, layers=24, steps=6_000, peak=1e-3, warmup=500),
}


def _causal(layers: int, sizes: dict[str, int]) -> Any:
    """GPT-2 with the exact GELU, whose potential has a closed form."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {
        "vocab_size": VOCABULARY,
        "n_positions": CONTEXT,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_layer": layers,
        **sizes,
    }
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**config, **no_dropout, **IDS, activation_function="gelu"))


def _tied(layers: int, sizes: dict[str, int]) -> Any:
    """ALBERT: one post-norm block, applied repeatedly."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "embedding_size": WIDTH,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        **sizes,
    }
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"), 0.0)
    return AlbertForMaskedLM(AlbertConfig(**config, **no_dropout, **IDS, hidden_act="gelu", type_vocab_size=1))
