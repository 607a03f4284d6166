"""Train a sibling of model A (same recipe, another seed) and measure it during training, with and without its MLPs.

    python training/sibling.py [--minutes 8]

It needs the training tokens, ``training/out/train.npy``. At sixteen steps the measures of ``arms`` are computed on 64
of the bundled texts and on its validation windows. They are stored in the package as ``sibling.nc``; the weights are
not. Training resumes where it stopped. ``--only train`` stops before storing, which needs xarray and h5netcdf, and
``--only store`` does nothing else.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import APART, ARMS, LEVELS, measure_arms
from recipe import BUNDLED_FOLDER, CONTEXT, OUT, RECIPES
from safetensors.numpy import load_file
from torch import Tensor
from train import Trainer, finish, train

SIBLING = replace(RECIPES["A"], name="sibling", seed=4)
STEPS = (0, 50, 100, 150, 200, 300, 400, 600, 800, 1_200, 1_600, 2_400, 3_200, 4_800, 6_400, 8_000)
PROMPTS = 64

CLOUD = ("arm", "depth", "prompt")
# dimensions after "step", rounding of the stored values (small against their standard deviation over prompts), label
VARIABLES: dict[str, tuple[tuple[str, ...], float | None, str]] = {
    "aligned_pair_share": (("arm", "depth", "level", "prompt"), 2e-4, "share of inner products above a level"),
    "mean_inner_product": (CLOUD, 1e-3, "mean inner product of two tokens"),
    "participation_ratio": (CLOUD, 0.05, "effective rank of the tokens, participation ratio"),
    "effective_rank": (CLOUD, 0.5, "effective rank of the tokens, exponential of an entropy"),
    "collapse_residual_frobenius": (CLOUD, 5e-3, "distance to the mean token relative to the norm, Frobenius"),
    "validation_loss": (("arm",), None, "validation loss"),
    "antisymmetric_share": (("layer", "prompt"), 1e-3, "antisymmetric share of the MLP's Jacobian at the tokens"),
    "gate_sparsity": (("layer", "prompt"), 1e-3, "share of pre-activations below 0"),
    "closed_gate_share": (("layer", "prompt"), 1e-3, "share of pre-activations with a GELU derivative below 0.1"),
    "coherence_max": (("layer",), None, "largest |cos| of two rows of W_in"),
    "coherence_mean": (("layer",), None, "mean |cos| of two rows of W_in"),
    "neuron_alignment_mean": (("layer",), None, "mean cosine of a neuron's input and output weights"),
}
COORDINATES = (
    "theory's sphere: direction of the residual stream without its mean over coordinates (LayerNorm without gain and "
    "bias); first token left out"
)
JACOBIAN = (
    "antisymmetric_share = |J - J^T|^2 / (4 |J|^2), Frobenius norms, mean over tokens; J is the Jacobian of the MLP at "
    "its input, with the gain of its norm folded into W_in"
)


def prompt_indices(ids: list[list[int]], count: int = PROMPTS) -> list[int]:
    """Which texts to take so that they cover as many first tokens as possible: first one for each first token, then a
    second one for each, and so on.
    """
    firsts = [row[0] for row in ids]
    rank = [firsts[:k].count(first) for k, first in enumerate(firsts)]
    return sorted(sorted(range(len(ids)), key=lambda k: (rank[k], k))[:count])


def bundled_ids(bundled: Path) -> list[list[int]]:
    """The token ids of all bundled texts."""
    from tokenizers import Tokenizer

    texts = json.loads((bundled / "texts.json").read_text(encoding="utf-8"))
    return [code.ids for code in Tokenizer.from_file(str(bundled / "A" / "tokenizer.json")).encode_batch(texts)]


def prompts(bundled: Path) -> Tensor:
    """The token ids (64, n) of the texts that are measured."""
    ids = bundled_ids(bundled)
    return torch.tensor([ids[k] for k in prompt_indices(ids)])


def history(folder: Path, texts: list[int], tokens: dict[str, Any]) -> Any:
    """The snapshots over training steps as a Dataset; ``texts`` are the indices of the prompts among the bundled ones,
    ``tokens`` describes the training tokens.
    """
    import xarray as xr

    paths = sorted(folder.glob("snapshot-*.safetensors"))
    snapshots = [load_file(path) for path in paths]
    facts = json.loads((folder / "final" / "training.json").read_text())
    steps = [int(path.stem.removeprefix("snapshot-")) for path in paths]
    data = xr.Dataset(
        coords={
            "step": ("step", steps, {"long_name": "training step"}),
            "arm": list(ARMS),
            "level": list(LEVELS),
            "prompt": ("prompt", texts, {"long_name": "index among the bundled texts"}),
        }
    )
    for name, (dims, rounding, label) in VARIABLES.items():
        attributes = {"long_name": label} | ({} if rounding is None else {"rounded_to": rounding})
        attributes |= {"units": "nats per token"} if name == "validation_loss" else {}
        data[name] = (("step", *dims), np.stack([snapshot[name] for snapshot in snapshots]), attributes)
    epochs = facts["steps"] * facts["batch"] * CONTEXT / tokens["tokens"]
    data.attrs = {
        "description": "a sibling of model A (same recipe, another seed), measured during its training",
        **{key: facts[key] for key in ("seed", "steps", "batch", "peak", "warmup", "decay", "seconds")},
        "final_validation_loss": float(data.validation_loss.sel(arm="whole model")[-1]),
        "training_tokens": f"{tokens['tokens']:,} ({epochs:.2f} epochs), sha256 of train.npy {tokens['sha256']}",
        "coordinates_of_tokens": COORDINATES,
        "pairs": f"tokens of one prompt with different ids, at least {APART} positions apart",
        "arms": "attention alone: every MLP writes 0; MLP alone: attention writes 0; neither: both write 0",
        "depth_axis": "half-layers: 0 the first block's input, 2l + 1 after attention of layer l, 2l + 2 after its MLP",
        "antisymmetric_share": JACOBIAN,
        "arithmetic": "float32 forward, float64 measures; training in bfloat16 autocast",
        "torch": facts["torch"],
        "device": facts["device"],
    }
    return data


def store(data: Any, path: Path) -> None:
    """Write the Dataset in a small file. Values that are rounded are stored as integers, which xarray scales back."""
    import h5netcdf
    from xarray.backends import H5NetCDFStore

    compressed = {"zlib": True, "complevel": 9, "shuffle": True, "dtype": "int16", "_FillValue": np.int16(-32768)}
    encoding: dict[str, dict[str, Any]] = {}
    for name, (_, rounding, _) in VARIABLES.items():
        encoding[name] = {"dtype": "float32"}
        if rounding is not None:  # in one chunk, which compresses best
            encoding[name] = {**compressed, "scale_factor": np.float32(rounding), "chunksizes": data[name].shape}
    # the oldest layout of HDF5, which is the default, would add 40 kB
    with h5netcdf.File(path, "w", libver=("v110", "v110")) as file:
        data.dump_to_store(H5NetCDFStore(file), encoding=encoding)


def main() -> None:
    """Train the sibling, measure it, and store the measurements in the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", choices=["train", "store"])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--bundled", type=Path, default=BUNDLED_FOLDER)
    options = parser.parse_args()
    folder = options.out / SIBLING.name
    if options.only != "store":
        torch.set_float32_matmul_precision("high")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        valid = np.load(options.bundled / "validation.npy")
        trainer = Trainer(SIBLING, np.load(options.out / "train.npy"), folder, device)
        measures = partial(measure_arms, windows=valid)
        if not train(trainer, valid, prompts(options.bundled), options.minutes, measures=measures, snapshots=STEPS):
            print("time is up: run again to resume")
            return
        finish(trainer)
    if options.only != "train":
        tokens = json.loads((options.out / "data.json").read_text())
        tokens["sha256"] = (options.out / "train.sha256").read_text().split()[0]
        store(history(folder, prompt_indices(bundled_ids(options.bundled)), tokens), options.bundled / "sibling.nc")


if __name__ == "__main__":
    main()
