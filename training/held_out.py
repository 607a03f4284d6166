"""Select the held-out texts from the bundled validation windows: 128 texts of 128 tokens.

Published verdicts use these texts; development uses ``texts.json``, so that no region was chosen by looking at them.
Each text begins at a sentence start within one story, and no first token occurs more than four times.

    python training/held_out.py
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from recipe import BUNDLED_FOLDER, CUT, START
from tokenizers import Tokenizer

TEXTS, LENGTH, ALIKE, SEED = 128, 128, 4, 7


def held_out(windows: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The texts: one for each chosen window, in random order; first tokens that are rare so far are preferred."""
    rng = np.random.default_rng(SEED)
    first_tokens: Counter[int] = Counter()
    chosen: list[str] = []
    for k in rng.permutation(len(windows)):
        candidates = [(first_tokens[ids[0]], text, ids[0]) for text, ids in crops(windows[k], tokenizer)]
        rare = [candidate for candidate in candidates if candidate[0] < ALIKE]
        if rare:
            least = min(count for count, _, _ in rare)
            rarest = [candidate for candidate in rare if candidate[0] == least]
            _, text, first = rarest[int(rng.integers(len(rarest)))]
            first_tokens[first] += 1
            chosen.append(text)
        if len(chosen) == TEXTS:
            return chosen
    raise SystemExit(f"only {len(chosen)} of {TEXTS} texts were found")


def crops(window: np.ndarray, tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Pieces of 128 tokens that begin after the end of a sentence, stay within one story and survive encoding."""
    pieces = []
    for start in range(1, len(window) - LENGTH):
        ids = window[start : start + LENGTH].tolist()
        before = tokenizer.decode([int(window[start - 1])]).strip()
        if START in ids or CUT in ids or not before.endswith((".", "!", "?", '."')):
            continue
        text = tokenizer.decode(ids).strip()
        encoded = tokenizer.encode(text).ids
        if len(encoded) == LENGTH and text[:1].isupper():
            pieces.append((text, encoded))
    return pieces


def main() -> None:
    """Write held_out.json into the package."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_FOLDER / "A" / "tokenizer.json"))
    texts = held_out(np.load(BUNDLED_FOLDER / "validation.npy"), tokenizer)
    for half in (texts[:64], texts[64:]):
        distinct = len({tokenizer.encode(text).ids[0] for text in half})
        assert distinct >= 32, f"a half has {distinct} distinct first tokens, 32 are needed"
    (BUNDLED_FOLDER / "held_out.json").write_text(json.dumps(texts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
