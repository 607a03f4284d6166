"""Untrained twins of a model: the null for claims about the effect of training."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from helmscope.models.load import LoadedModel, ensure_loaded, origin_of
from helmscope.runs.bar import progress_reporting
from helmscope.types import check_integer, check_seed


@progress_reporting(None, "making an untrained twin")
def untrained_twin(model: Any, *, seed: int) -> LoadedModel:
    """The untrained twin of a model: the same configuration with randomly initialized weights.

    ``model`` is anything that ``load`` accepts. The weights are initialized as the family does it, from ``seed``;
    tokenizer, dtype and device are those of the trained model, and the global random state is not changed. The twin is
    named after the trained model and the seed. Raises ``HelmscopeError`` if the model cannot be loaded or ``seed`` is
    not a whole number.

    >>> from helmscope.models.load import load
    >>> twin = untrained_twin(load("tied"), seed=1)
    >>> twin.origin.name, twin.model.config.num_hidden_layers
    ("tied's untrained twin 1", 24)
    """
    seed = check_seed(seed)
    loaded = ensure_loaded(model)
    trained = loaded.model
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        twin = type(trained)(copy.deepcopy(trained.config))
    twin = twin.to(device=trained.device, dtype=trained.dtype).eval()
    return replace(loaded, model=twin, origin=origin_of(twin, f"{loaded.origin.name}'s untrained twin {seed}"))


def twin_seeds(count: int, seed: int) -> list[int]:
    """The seeds of ``count`` twins, the same as those of ``TrialCase.seed_for``; a larger count only appends seeds.

    >>> twin_seeds(3, seed=0)[:2] == twin_seeds(2, seed=0)
    True
    """
    count, seed = check_integer("count", count, at_least=1), check_seed(seed)
    return [int(np.random.SeedSequence([seed, k]).generate_state(1)[0]) for k in range(count)]
