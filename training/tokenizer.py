"""Train the tokenizer of the bundled models, and tokenize the stories.

    python training/tokenizer.py --teacher FOLDER

A byte-level BPE of 4,096 tokens is trained on the first shards; then every shard is encoded as one sequence of tokens,
with <|endoftext|> before every story and <pad> where one was cut off. The last shard is held out: it provides the
validation windows (``valid.npy``) and the bundled texts (``texts.json``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from data import PARTIAL, TEACHER_START
from recipe import CONTEXT, CUT, OUT, SPECIAL, START, VOCABULARY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS, TEXT_TOKENS, ALIKE, WINDOWS = 128, 128, 4, 512
SHORTEST = 16  # in tokens of the teacher; shorter pieces are dropped
SENTENCE = re.compile(r'(?:^|(?<=[.!?] )|(?<=[.!?]" )|(?<=\n))(?=["A-Z])')


def stories(rows: np.ndarray, teacher: Tokenizer) -> list[tuple[str, bool]]:
    """The stories in rows of the teacher's tokens, each with whether it was cut off by the end of its row."""
    pieces, cuts = [], []
    for row in rows:
        starts = [*np.flatnonzero((row == TEACHER_START) | (row == TEACHER_START + 1)), len(row)]
        for begin, end in pairwise(starts):
            if end - begin > SHORTEST:
                pieces.append(row[begin + 1 : end].tolist())
                cuts.append(end == len(row))
    texts = teacher.decode_batch(pieces)
    return [(text.strip(), cut) for text, cut in zip(texts, cuts, strict=True) if "\ufffd" not in text]


def train_tokenizer(texts: list[str], size: int = VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE, which encodes and decodes every string without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def concatenate(texts: list[tuple[str, bool]], tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of all stories in one sequence: <|endoftext|> before each, and <pad> after one that was cut off."""
    codes = tokenizer.encode_batch_fast([text for text, _ in texts])
    parts = [[START, *code.ids, *([CUT] if cut else [])] for code, (_, cut) in zip(codes, texts, strict=True)]
    return np.concatenate([np.asarray(part, dtype=np.int16) for part in parts])


def crops(texts: list[tuple[str, bool]], tokenizer: Tokenizer, seed: int = 0) -> list[str]:
    """Texts of 128 tokens, each from a random sentence start of a different story; at most four share a first token."""
    rng, chosen, first_tokens = np.random.default_rng(seed), [], Counter()
    for k in rng.permutation(len(texts)):
        text = texts[k][0]
        starts = [match.start() for match in SENTENCE.finditer(text)]
        begin = starts[rng.integers(len(starts))] if starts else 0
        ids = tokenizer.encode(text[begin:]).ids[:TEXT_TOKENS]
        crop = tokenizer.decode(ids)
        if len(ids) == TEXT_TOKENS and first_tokens[ids[0]] < ALIKE and tokenizer.encode(crop).ids == ids:
            first_tokens[ids[0]] += 1
            chosen.append(crop)
        if len(chosen) == TEXTS:
            break
    assert len(chosen) == TEXTS, f"{len(chosen)} texts are long enough, {TEXTS} are needed"
    assert len(first_tokens) >= TEXTS // ALIKE, f"the texts have {len(first_tokens)} distinct first tokens"
    return chosen


def _encode_shard(path: Path, teacher: Path, tokenizer: Path) -> np.ndarray:
    texts = stories(np.load(path), Tokenizer.from_file(str(teacher / "tokenizer.json")))
    return concatenate(texts, Tokenizer.from_file(str(tokenizer)))


def main() -> None:
    """Train the tokenizer, encode the training shards, and prepare the held-out one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--learn-from", type=int, default=3, help="number of shards to train the tokenizer on")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    teacher = Tokenizer.from_file(str(options.teacher / "tokenizer.json"))
    *shards, held_out = sorted(path for path in options.out.glob("rows-*.npy") if not path.name.endswith(PARTIAL))
    path = options.out / "tokenizer.json"
    if not path.exists():
        texts = [text for shard in shards[: options.learn_from] for text, _ in stories(np.load(shard), teacher)]
        train_tokenizer(texts).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        encoded = list(pool.map(partial(_encode_shard, teacher=options.teacher, tokenizer=path), shards))
    tokens = np.concatenate(encoded)
    np.save(options.out / "train.npy", tokens)
    digest = hashlib.sha256((options.out / "train.npy").read_bytes()).hexdigest()
    (options.out / "train.sha256").write_text(f"{digest}  train.npy\n")
    unseen = stories(np.load(held_out), teacher)
    half = len(unseen) // 2
    windows = concatenate(unseen[:half], tokenizer)[: WINDOWS * (CONTEXT + 1)].reshape(WINDOWS, CONTEXT + 1)
    np.save(options.out / "valid.npy", windows)
    (options.out / "texts.json").write_text(json.dumps(crops(unseen[half:], tokenizer), indent=1))
    facts = {"tokens": len(tokens), "stories": int((tokens == START).sum()), "cut": int((tokens == CUT).sum())}
    (options.out / "data.json").write_text(json.dumps(facts | {"shards": len(shards)}, indent=1))
    print(facts)


if __name__ == "__main__":
    main()
