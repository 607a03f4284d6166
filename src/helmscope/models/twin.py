"""Untrained twins: the null of every claim about training."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from helmscope.models.load import Loaded, origin_of
from helmscope.types import whole_number


def untrained_twin(loaded: Loaded, *, seed: int) -> Loaded:
    """A model of the same configuration with random weights, as its family draws them; tokenizer, dtype and device are
    those of the trained one, and the global random numbers stay as they were.

    >>> from helmscope.models.load import load
    >>> twin = untrained_twin(load("tied"), seed=1)
    >>> twin.origin.name, twin.model.config.num_hidden_layers
    ('untrained twin of tied, seed 1', 24)
    """
    seed = whole_number("seed", seed, at_least=0)
    trained = loaded.model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = type(trained)(copy.deepcopy(trained.config))
    model = model.to(device=trained.device, dtype=trained.dtype).eval()
    return replace(loaded, model=model, origin=origin_of(model, f"untrained twin of {loaded.origin.name}, seed {seed}"))
