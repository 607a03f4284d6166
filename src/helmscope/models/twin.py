"""Untrained twins: the null of every claim about training."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from helmscope.models.load import Loaded, loaded_once, origin_of
from helmscope.types import seed_number


def untrained_twin(model: Any, *, seed: int) -> Loaded:
    """The twin of a model (whatever ``load`` takes): the same configuration with random weights, as its family draws
    them. Tokenizer, dtype and device are those of the trained one, and the global random numbers stay as they were.

    >>> from helmscope.models.load import load
    >>> twin = untrained_twin(load("tied"), seed=1)
    >>> twin.origin.name, twin.model.config.num_hidden_layers
    ('untrained twin of tied, seed 1', 24)
    """
    seed = seed_number(seed)
    loaded = loaded_once(model)
    trained = loaded.model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        twin = type(trained)(copy.deepcopy(trained.config))
    twin = twin.to(device=trained.device, dtype=trained.dtype).eval()
    return replace(loaded, model=twin, origin=origin_of(twin, f"untrained twin of {loaded.origin.name}, seed {seed}"))
