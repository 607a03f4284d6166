"""Sample stories from a small public Llama (the teacher) at temperature 1.

    python training/data.py --teacher FOLDER [--shards 34] [--minutes 8]

Every shard has ``rows`` texts of 256 tokens of the teacher, each beginning with its start token:
``training/out/rows-000.npy`` and so on. Existing shards are skipped, so that a stopped job can be resumed. The last
shard is held out from training.
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
PARTIAL = ".partial.npy"


@torch.no_grad()
def sample_rows(model: Any, rows: int, seed: int) -> torch.Tensor:
    """Sample texts (rows, 256) from the teacher, each beginning with the start token."""
    from transformers import DynamicCache

    generator = torch.Generator(model.device).manual_seed(seed)
    cache = DynamicCache(config=model.config)
    columns = [torch.full((rows, 1), TEACHER_START, device=model.device)]
    while len(columns) < TEACHER_CONTEXT:
        logits = model(input_ids=columns[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
        columns.append(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))
    return torch.cat(columns, 1)


def main() -> None:
    """Sample one shard after another until all exist or the time is up."""
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
    started = time.monotonic()
    for shard in range(options.shards):
        path = options.out / f"rows-{shard:03d}.npy"
        if path.exists():
            continue
        if time.monotonic() - started > 60 * options.minutes:
            print(f"time is up at shard {shard} of {options.shards}: run again to resume")
            return
        rows = sample_rows(model, options.rows, seed=shard).cpu().numpy().astype(np.int16)
        partial_file = path.with_suffix(PARTIAL)
        np.save(partial_file, rows)
        partial_file.rename(path)
        print(f"shard {shard + 1} of {options.shards}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
