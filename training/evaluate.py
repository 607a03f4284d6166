"""Print the validation loss of a bundled model and samples from it, as on its card.

    python training/evaluate.py A [--samples 20]

The loss is over 512 windows of held-out stories: of every next token, or for the tied model of a fixed fifth of the
tokens, all of them masked. Samples are stories generated from <|endoftext|> at temperature 0.8, or for the tied model
the bundled texts with its most probable tokens in place of the masked ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe import BUNDLED_FOLDER, CONTEXT, CUT, HIDDEN_SHARE, MASK, RECIPES, START
from torch import Tensor
from torch.nn.functional import cross_entropy

ROWS = 32  # windows per batch
TEMPERATURE, LONGEST = 0.8, 160


def hidden(windows: np.ndarray, seed: int = 0) -> np.ndarray:
    """Which tokens are masked for evaluation: a fifth of them, always the same."""
    chosen = np.random.default_rng(seed).random(windows.shape) < HIDDEN_SHARE
    return chosen & (windows != START) & (windows != CUT)


@torch.no_grad()
def validation_loss(model: Any, windows: np.ndarray, *, autocast: bool = False) -> float:
    """Mean loss in nats per token, over all targets."""
    device, tied = model.device, not hasattr(model, "transformer")
    total, count = 0.0, 0
    gaps = hidden(windows[:, :-1])
    for begin in range(0, len(windows), ROWS):
        rows = torch.from_numpy(windows[begin : begin + ROWS]).long().to(device)
        if tied:
            is_target = torch.from_numpy(gaps[begin : begin + ROWS]).to(device)
            inputs, targets = rows[:, :-1].masked_fill(is_target, MASK), rows[:, :-1].masked_fill(~is_target, -100)
        else:
            inputs, targets = rows[:, :-1], rows[:, 1:].masked_fill(rows[:, 1:] == CUT, -100)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits: Tensor = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
        total += float(cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


@torch.no_grad()
def stories(model: Any, tokenizer: Any, count: int, seed: int = 0) -> list[str]:
    """Generate stories with a causal model, each up to the next <|endoftext|> or 160 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((count, 1), START)
    while ids.shape[1] <= min(LONGEST, CONTEXT - 1):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1].float()
        logits[:, [CUT, MASK]] = -torch.inf
        ids = torch.cat([ids, torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1, generator=generator)], 1)
    rows = [row[1:] for row in ids.tolist()]
    return [tokenizer.decode(row[: row.index(START)] if START in row else row) for row in rows]


@torch.no_grad()
def fillings(model: Any, tokenizer: Any, texts: list[str], seed: int = 0) -> list[str]:
    """Texts in which the model predicts a fifth of the tokens: [predicted], or [predicted for true] if it is wrong."""
    ids = np.array([tokenizer(text)["input_ids"] for text in texts])
    gaps, rows = hidden(ids, seed), torch.from_numpy(ids)
    inputs = rows.masked_fill(torch.from_numpy(gaps), MASK)
    guesses = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits.argmax(-1).numpy()
    filled = []
    for row, row_gaps, row_guesses in zip(ids, gaps, guesses, strict=True):
        words = []
        for token, is_gap, guess in zip(row, row_gaps, row_guesses, strict=True):
            true, predicted = (str(tokenizer.decode([int(one)])) for one in (token, guess))
            shown = f"[{predicted}]" if predicted == true else f"[{predicted} for {true}]"
            words.append(shown if is_gap else true)
        filled.append("".join(words))
    return filled


def load(folder: Path) -> tuple[Any, Any]:
    """Load a bundled model in float32, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    kind = AutoModelForMaskedLM if AutoConfig.from_pretrained(folder).model_type == "albert" else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def samples(name: str, model: Any, tokenizer: Any, bundled: Path, count: int) -> list[str]:
    """Generated stories of a causal model, or fillings of the tied one."""
    if not RECIPES[name].tied:
        return stories(model, tokenizer, count)
    return fillings(model, tokenizer, json.loads((bundled / "texts.json").read_text())[:count])


def main() -> None:
    """Load a model, print its loss and samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(RECIPES))
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--bundled", type=Path, default=BUNDLED_FOLDER)
    options = parser.parse_args()
    model, tokenizer = load(options.bundled / options.model)
    print(f"{options.model}: {validation_loss(model, np.load(options.bundled / 'validation.npy')):.4f} nats per token")
    for text in samples(options.model, model, tokenizer, options.bundled, options.samples) if options.samples else ():
        print(f"\n{text}")


if __name__ == "__main__":
    main()
