"""Train one of the bundled models.

    python training/train.py A [--minutes 8]

AdamW with a short warm-up and a cosine schedule to 0, bfloat16 on a GPU. A job that was stopped, or whose time was up,
resumes from its last saved state; a finished one writes ``training/out/A/final`` and prints its losses. At twelve
steps, evenly spaced in their logarithm, ``measures`` are computed on the bundled texts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import validation_loss
from measures import measure
from recipe import CONTEXT, CUT, HIDDEN_SHARE, MASK, OUT, RECIPES, START, VOCABULARY, Recipe
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

SNAPSHOTS = 12
EVERY = 500  # steps between evaluations of the validation loss, and between saved states


class Trainer:
    """The state of training at one step: model, optimizer and random generator."""

    def __init__(self, recipe: Recipe, tokens: np.ndarray, folder: Path, device: str, **sizes: int) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.model = recipe.model(**sizes).to(device)
        self.tokens = torch.from_numpy(tokens).to(device)
        matrices = [value for value in self.model.parameters() if value.ndim > 1]
        vectors = [value for value in self.model.parameters() if value.ndim < 2]
        groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak, betas=(0.9, 0.95), fused=device == "cuda")
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.step = 0
        self.curve: list[tuple[int, float, float]] = []
        self.seconds = 0.0
        self.loss = torch.compile(self._loss) if device == "cuda" else self._loss

    def rate(self) -> float:
        """The learning rate of the next step."""
        recipe = self.recipe
        if self.step < recipe.warmup:
            return recipe.peak * (self.step + 1) / recipe.warmup
        done = (self.step - recipe.warmup) / (recipe.steps - recipe.warmup)
        return recipe.peak * 0.5 * (1 + math.cos(math.pi * done))

    def windows(self) -> Tensor:
        """A batch of random windows of the training tokens."""
        width = CONTEXT + 1
        starts = torch.randint(
            len(self.tokens) - width, (self.recipe.batch, 1), generator=self.generator, device=self.device
        )
        return self.tokens[starts + torch.arange(width, device=self.device)].long()

    def advance(self) -> Tensor:
        """Take one optimizer step and return its loss."""
        windows = self.windows()
        if self.recipe.tied:
            inputs, targets = self._mask_tokens(windows[:, :-1])
        else:
            inputs, targets = windows[:, :-1], windows[:, 1:].masked_fill(windows[:, 1:] == CUT, -100)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        loss = self.loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def _mask_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets: a fifth of the tokens are targets, 80 % of them masked, 10 % replaced, 10 % unchanged."""
        uniform = torch.rand(tokens.shape, generator=self.generator, device=self.device) / HIDDEN_SHARE
        replacement = torch.randint(VOCABULARY, tokens.shape, generator=self.generator, device=self.device)
        is_target = (uniform < 1) & (tokens != START) & (tokens != CUT)
        inputs = torch.where(is_target & (uniform < 0.8), MASK, tokens)
        inputs = torch.where(is_target & (uniform > 0.9), replacement, inputs)
        return inputs, tokens.masked_fill(~is_target, -100)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(input_ids=inputs, **({} if self.recipe.tied else {"use_cache": False})).logits
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    def save(self) -> None:
        """Save the state from which ``load`` resumes exactly."""
        moments = {
            f"{kind}.{name}": self.optimizer.state[value][kind]
            for name, value in self.model.named_parameters()
            for kind in ("exp_avg", "exp_avg_sq", "step")
            if value in self.optimizer.state
        }
        values = {f"value.{name}": value.detach() for name, value in self.model.named_parameters()}
        partial_file = self.folder / "state.partial"
        save_file({**values, **moments, "generator": self.generator.get_state()}, partial_file, self._metadata())
        partial_file.rename(self.folder / "state.safetensors")

    def _metadata(self) -> dict[str, str]:
        return {"step": str(self.step), "curve": json.dumps(self.curve), "seconds": str(self.seconds)}

    def load(self) -> None:
        """Load the last saved state, if there is one."""
        from safetensors import safe_open

        path = self.folder / "state.safetensors"
        if not path.exists():
            return
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        self.step, self.curve = int(metadata["step"]), [tuple(row) for row in json.loads(metadata["curve"])]
        self.seconds = float(metadata["seconds"])
        state = load_file(path, device=self.device)
        self.generator.set_state(state["generator"].cpu())
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(state[f"value.{name}"])
                self.optimizer.state[value] = {
                    kind: state[f"{kind}.{name}"] for kind in ("exp_avg", "exp_avg_sq", "step")
                }


def snapshot_steps(steps: int) -> list[int]:
    """0 and the steps from 1 to the last, evenly spaced in the logarithm."""
    return [0, *sorted({round(step) for step in np.geomspace(1, steps, SNAPSHOTS - 1)})]


def train(
    trainer: Trainer,
    valid: np.ndarray,
    texts: Tensor,
    minutes: float,
    *,
    measures: Callable[[Any, Tensor], dict[str, Tensor]] = measure,
    snapshots: Sequence[int] | None = None,
) -> bool:
    """Train until the last step or until the time is up; returns whether training is finished.

    At the steps ``snapshots``, by default ``snapshot_steps``, what ``measures`` returns for the model and ``texts`` is
    saved.
    """
    trainer.folder.mkdir(parents=True, exist_ok=True)
    trainer.load()
    snapshots = snapshot_steps(trainer.recipe.steps) if snapshots is None else snapshots
    started, before, losses = time.monotonic(), trainer.seconds, []
    while True:
        step = trainer.step
        snapshot = trainer.folder / f"snapshot-{step:06d}.safetensors"
        if step in snapshots and not snapshot.exists():
            trainer.model.eval()
            save_file(measures(trainer.model, texts.to(trainer.device)), snapshot)
            trainer.model.train()
        trainer.seconds = before + time.monotonic() - started
        time_is_up = bool(losses) and trainer.seconds - before > 60 * minutes
        if losses and (step % EVERY == 0 or step == trainer.recipe.steps or time_is_up):
            valid_loss = validation_loss(trainer.model, valid, autocast=trainer.device == "cuda")
            mean = float(torch.stack(losses).mean())
            trainer.curve.append((step, mean, valid_loss))
            print(f"{trainer.recipe.name} {step} {mean:.4f} {valid_loss:.4f} {trainer.seconds:.0f} s", flush=True)
            losses = []
            trainer.save()
        if step == trainer.recipe.steps or time_is_up:
            return step == trainer.recipe.steps
        losses.append(trainer.advance())


def finish(trainer: Trainer) -> None:
    """Write the weights in bfloat16, and how they were trained."""
    final = trainer.folder / "final"
    trainer.model.to(torch.bfloat16).save_pretrained(final)
    facts = {
        "seed": trainer.recipe.seed,
        "steps": trainer.recipe.steps,
        "batch": trainer.recipe.batch,
        "peak": trainer.recipe.peak,
        "warmup": trainer.recipe.warmup,
        "decay": trainer.recipe.decay,
        "seconds": round(trainer.seconds, 1),
        "curve": trainer.curve,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if trainer.device == "cuda" else "cpu",
    }
    (final / "training.json").write_text(json.dumps(facts, indent=1))


def main() -> None:
    """Train one of the bundled models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(RECIPES))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--peak", type=float)
    parser.add_argument("--folder", help="where to save its states; default: the model's name")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    recipe = RECIPES[options.model]
    recipe = replace(recipe, steps=options.steps or recipe.steps, peak=options.peak or recipe.peak)
    tokens, valid = np.load(options.out / "train.npy"), np.load(options.out / "valid.npy")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(recipe, tokens, options.out / (options.folder or recipe.name), device)
    if train(trainer, valid, bundled_text_ids(options.out), options.minutes):
        finish(trainer)
    else:
        print("time is up: run again to resume")


def bundled_text_ids(folder: Path) -> Tensor:
    """The token ids of the bundled texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor([code.ids for code in tokenizer.encode_batch(json.loads((folder / "texts.json").read_text()))])


if __name__ == "__main__":
    main()
