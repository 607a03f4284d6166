"""Stories, sampled from a small public Llama at temperature 1.

    python training/data.py --teacher FOLDER [--shards 34] [--minutes 8]

Every shard is ``rows`` texts of 256 tokens of the teacher, each begun with its start token:
``training/out/rows-000.npy`` and so on. Shards that exist are left alone, so that a job that was stopped goes on where
it was. The last shard is never trained on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipe import OUT

TEACHER_START, TEACHER_CONTEXT = 1, 256


@torch.no_grad()
def sampled(model: Any, rows: int, seed: int) -> torch.Tensor:
    """Texts (rows, 256) from the start token on: each next token as the teacher's softmax has it."""
    from transformers import DynamicCache

    generator = torch.Generator(model.device).manual_seed(seed)
    cache = DynamicCache(config=model.config)
    found = [torch.full((rows, 1), TEACHER_START, device=model.device)]
    while len(found) < TEACHER_CONTEXT:
        scores = model(input_ids=found[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
        found.append(torch.multinomial(torch.softmax(scores, -1), 1, generator=generator))
    return torch.cat(found, 1)


def main() -> None:
    """One shard after another, until all are there or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=34)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    from transformers import LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = LlamaForCausalLM.from_pretrained(options.teacher, dtype=dtype).to(device).eval()
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    for shard in range(options.shards):
        path = options.out / f"rows-{shard:03d}.npy"
        if path.exists():
            continue
        if time.monotonic() - begun > 60 * options.minutes:
            print(f"time is up at shard {shard} of {options.shards}: run again to go on")
            return
        rows = sampled(model, options.rows, seed=shard).cpu().numpy().astype(np.int16)
        half = path.with_suffix(".half.npy")
        np.save(half, rows)
        half.rename(path)
        print(f"shard {shard + 1} of {options.shards}, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
