"""Put what was trained into the box: weights, tokenizer, cards, texts, validation windows, the history of training.

    python training/gather.py

Every card holds numbers that were measured on the weights as they are shipped, on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from evaluate import loaded, samples, validation_loss
from recipe import BOX, CONTEXT, OUT, RECIPES, SPECIAL, Recipe
from safetensors.numpy import load_file

DIMS = {
    "coherence_max": ("block", "largest |cos| of two rows of W_in"),
    "coherence_mean": ("block", "mean |cos| of two rows of W_in"),
    "alignment": ("block", "mean cos of what a neuron reads and writes"),
    "gate_sparsity": ("layer", "share of pre-activations below 0"),
    "radius": ("depth", "mean length of the residual stream without its mean"),
    "entropy": ("layer", "head", "entropy of attention rows, nats"),
    "inner_product": ("depth", "mean inner product of two tokens"),
    "share_above": ("depth", "share of inner products above 0.9"),
}
SAMPLES = 20


def history(folder: Path) -> xr.Dataset:
    """The snapshots of one model over training steps, and its losses."""
    paths = sorted(folder.glob("snapshot-*.safetensors"))
    steps = [int(path.stem.removeprefix("snapshot-")) for path in paths]
    parts = [load_file(path) for path in paths]
    found = xr.Dataset(coords={"step": ("step", steps, {"long_name": "training step"})})
    for name, (*dims, label) in DIMS.items():
        found[name] = (("step", *dims), np.stack([part[name] for part in parts]), {"long_name": label})
    curve = json.loads((folder / "final" / "training.json").read_text())["curve"]
    found["training_loss"] = ("looked", [row[1] for row in curve], {"long_name": "mean loss since the last look, nats"})
    found["validation_loss"] = ("looked", [row[2] for row in curve], {"long_name": "validation loss, nats"})
    return found.assign_coords(looked=("looked", [row[0] for row in curve], {"long_name": "training step"}))


def write_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer as transformers reads it."""
    shutil.copy(source, folder / "tokenizer.json")
    start, cut, mask = SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        **dict.fromkeys(("bos_token", "eos_token"), start),
        "pad_token": cut,
        "mask_token": mask,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def card(recipe: Recipe, facts: dict[str, Any], told: list[str], digest: str, data: dict[str, Any]) -> str:
    """The model card."""
    kind = (
        f"ALBERT: one post-norm block called {recipe.layers} times, both directions, masked-language-model head"
        if recipe.tied
        else f"GPT-2: {recipe.layers} layers, causal"
    )
    what = "a fifth of the tokens hidden" if recipe.tied else "every next token"
    lines = [
        f"# {recipe.name}",
        "",
        f"{kind}; width 192, 6 heads, exact (erf) GELU, context 256, byte-level BPE of 4,096 tokens. "
        f"{facts['parameters']:,} parameters, bfloat16.",
        "",
        "| | |",
        "|---|---|",
        f"| validation loss | {facts['loss']:.4f} nats a token ({what}; 512 windows of 256 tokens, float32 on a CPU) |",
        f"| training | {recipe.steps:,} steps of {recipe.batch} x 256 tokens, seed {recipe.seed}; AdamW (0.9, 0.95), "
        f"decay {recipe.decay}, peak {recipe.peak:g}, warm-up {recipe.warmup}, cosine to 0, clip 1; "
        f"{facts['device']}, torch {facts['torch']}, {facts['seconds']:.0f} s beside two others |",
        f"| model.safetensors | sha256 {digest} |",
        f"| data | {data['tokens']:,} tokens, {data['stories']:,} short stories ({data['cut']:,} of them cut off at "
        f"256 tokens of the teacher), sha256 of train.npy, which holds them, {data['sha256']} |",
        "",
        "The stories were sampled at temperature 1 from stories15M of llama2.c (MIT), a Llama of 15 million parameters",
        "trained on TinyStories (Eldan and Li 2023, arXiv:2305.07759). They are simple English of a small vocabulary,",
        "often incoherent, and all that this model knows. It is made for looking into, not for use. MIT, as helmscope.",
        "",
        f"`python training/evaluate.py {recipe.name} --samples {SAMPLES}` gives the loss and what follows:",
        "",
    ]
    lines += [f"{k}. {' '.join(text.split())}" for k, text in enumerate(told, 1)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fill the box."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--box", type=Path, default=BOX)
    options = parser.parse_args()
    out, box = options.out, options.box
    box.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "texts.json", box / "texts.json")
    shutil.copy(out / "valid.npy", box / "validation.npy")
    data = json.loads((out / "data.json").read_text())
    data["sha256"] = (out / "train.sha256").read_text().split()[0]
    for name, recipe in RECIPES.items():
        folder = box / name
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(out / name / "final" / file, folder / file)
        write_tokenizer(out / "tokenizer.json", folder)
        model, tokenizer = loaded(folder)
        facts = json.loads((out / name / "final" / "training.json").read_text())
        facts["loss"] = validation_loss(model, np.load(box / "validation.npy"))
        facts["parameters"] = sum(value.numel() for value in model.parameters())
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        told = samples(name, model, tokenizer, box, SAMPLES)
        (folder / "README.md").write_text(card(recipe, facts, told, digest, data))
        print(name, facts["loss"], digest)
    tree = xr.DataTree.from_dict({name: history(out / name) for name in RECIPES})
    tree.to_netcdf(box / "training.nc", engine="h5netcdf")


if __name__ == "__main__":
    main()
