"""Copy what was trained into the bundled files: weights, tokenizer, cards, texts, validation windows, training history.

    python training/gather.py

The numbers on every card are measured on the shipped weights, on this machine.
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
from evaluate import load, samples, validation_loss
from recipe import BUNDLED_FOLDER, CONTEXT, OUT, RECIPES, SPECIAL, Recipe
from safetensors.numpy import load_file

DIMS = {  # a block is a layer, except in the model with one block that all layers call
    "coherence_max": ("block", "largest |cos| of two rows of W_in"),
    "coherence_mean": ("block", "mean |cos| of two rows of W_in"),
    "neuron_alignment_mean": ("block", "mean cosine of a neuron's input and output weights"),
    "gate_sparsity": ("layer", "share of pre-activations below 0"),
    "radius": ("depth", "mean length of the residual stream without its mean"),
    "row_entropy": ("layer", "head", "entropy of attention rows"),
    "mean_inner_product": ("depth", "mean inner product of two tokens"),
    "aligned_pair_share": ("depth", "share of inner products above 0.9"),
}
IN_NATS = {"row_entropy", "training_loss", "validation_loss"}
SAMPLES = 20


def history(folder: Path) -> xr.Dataset:
    """The snapshots of one model over training steps, and its loss curves."""
    paths = sorted(folder.glob("snapshot-*.safetensors"))
    steps = [int(path.stem.removeprefix("snapshot-")) for path in paths]
    snapshots = [load_file(path) for path in paths]
    data = xr.Dataset(coords={"step": ("step", steps, {"long_name": "training step"})})
    for name, (*dims, label) in DIMS.items():
        values = np.stack([snapshot[name] for snapshot in snapshots])
        whole = dims == ["block"] and values.shape[1] == len(snapshots[0]["gate_sparsity"])
        data[name] = (("step", *(["layer"] if whole else dims)), values, {"long_name": label})
    curve = json.loads((folder / "final" / "training.json").read_text())["curve"]
    data["training_loss"] = (
        "evaluation_step",
        [row[1] for row in curve],
        {"long_name": "mean training loss since the previous evaluation"},
    )
    data["validation_loss"] = ("evaluation_step", [row[2] for row in curve], {"long_name": "validation loss"})
    for name in IN_NATS:
        data[name].attrs["units"] = "nats"
    if "block" in data.sizes:
        data["block"] = ("block", np.arange(data.sizes["block"]), {"long_name": "block that all layers call"})
    return data.assign_coords(
        evaluation_step=("evaluation_step", [row[0] for row in curve], {"long_name": "training step"})
    )


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer in the format that transformers loads."""
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


def card(recipe: Recipe, facts: dict[str, Any], texts: list[str], digest: str, data: dict[str, Any]) -> str:
    """The model card, with ``texts`` as samples."""
    kind = (
        f"ALBERT: one post-norm block called {recipe.layers} times, both directions, masked-language-model head"
        if recipe.tied
        else f"GPT-2: {recipe.layers} layers, causal"
    )
    targets = "a fifth of the tokens hidden" if recipe.tied else "every next token"
    lines = [
        f"# {recipe.name}",
        "",
        f"{kind}; width 192, 6 heads, exact (erf) GELU, context 256, byte-level BPE of 4,096 tokens. "
        f"{facts['parameters']:,} parameters, bfloat16.",
        "",
        "| | |",
        "|---|---|",
        f"| validation loss | {facts['loss']:.4f} nats per token ({targets}; 512 windows of 256 tokens, float32 on a "
        "CPU) |",
        f"| training | {recipe.steps:,} steps of {recipe.batch} x 256 tokens, seed {recipe.seed}; AdamW (0.9, 0.95), "
        f"decay {recipe.decay}, peak {recipe.peak:g}, warm-up {recipe.warmup}, cosine to 0, clip 1; "
        f"{facts['device']}, torch {facts['torch']}, {facts['seconds']:.0f} s, in parallel with two others |",
        f"| model.safetensors | sha256 {digest} |",
        f"| data | {data['tokens']:,} tokens, {data['stories']:,} short stories ({data['cut']:,} of them cut off at "
        f"256 tokens of the teacher), sha256 of train.npy {data['sha256']} |",
        "",
        "The stories were sampled at temperature 1 from stories15M of llama2.c (MIT), a Llama of 15 million parameters",
        "trained on TinyStories (Eldan and Li 2023, arXiv:2305.07759). They use simple English and a small vocabulary,",
        "are often incoherent, and are the only training data. The model is for study, not for use. MIT, as helmscope.",
        "",
        f"`python training/evaluate.py {recipe.name} --samples {SAMPLES}` prints the loss and these samples:",
        "",
    ]
    lines += [f"{k}. {' '.join(text.split())}" for k, text in enumerate(texts, 1)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Copy everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--bundled", type=Path, default=BUNDLED_FOLDER)
    options = parser.parse_args()
    out, bundled = options.out, options.bundled
    bundled.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "texts.json", bundled / "texts.json")
    shutil.copy(out / "valid.npy", bundled / "validation.npy")
    data = json.loads((out / "data.json").read_text())
    data["sha256"] = (out / "train.sha256").read_text().split()[0]
    for name, recipe in RECIPES.items():
        folder = bundled / name
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(out / name / "final" / file, folder / file)
        write_tokenizer(out / "tokenizer.json", folder)
        model, tokenizer = load(folder)
        facts = json.loads((out / name / "final" / "training.json").read_text())
        facts["loss"] = validation_loss(model, np.load(bundled / "validation.npy"))
        facts["parameters"] = sum(value.numel() for value in model.parameters())
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        texts = samples(name, model, tokenizer, bundled, SAMPLES)
        (folder / "README.md").write_text(card(recipe, facts, texts, digest, data))
        print(name, facts["loss"], digest)
    tree = xr.DataTree.from_dict({name: history(out / name) for name in RECIPES})
    tree.to_netcdf(bundled / "training.nc", engine="h5netcdf")


if __name__ == "__main__":
    main()
