"""Run a model of one's own under edits, or with other parameters, and have it back as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.anatomy import Anatomy
from helmscope.models.hooks import watching
from helmscope.models.recording import Recording
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.watch import AbstractEdit


@contextmanager
def changed(model: Recording | Anatomy, *edits: AbstractEdit) -> Iterator[Any]:
    """Inside, every forward of the model runs under the edits; afterwards it is as it was, whatever happened.

    Gives the model itself, to be called. No recording is made inside, which would not know of the edits:
    ``recording.under`` makes it.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.intervene.states import Ablate
    >>> from helmscope.models.record import record
    >>> from helmscope.models.watch import Site
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> with changed(recording, Ablate(site=Site.ATTENTION), Ablate(site=Site.MLP)) as bare:
    ...     bare(torch.tensor([[1, 2, 3, 4]])).logits.shape
    torch.Size([1, 4, 9])
    """
    anatomy = model.anatomy if isinstance(model, Recording) else model
    if not isinstance(anatomy, Anatomy):
        raise HelmscopeError(f"model is a {type(model).__name__}, but edits are made under a Recording of it")
    with watching(anatomy, edits):
        yield anatomy.model


@contextmanager
def with_parameters(model: Any, values: Mapping[str, Tensor]) -> Iterator[Any]:
    """Inside, the named parameters of a model are these; afterwards they are what they were, to the bit.

    That is a model of its own, and may be recorded; what asks it again (``kernel``, ``force``, ``logits``, ``resume``,
    ``under``) is to be called inside as well. Record the model itself: a ``Loaded`` names the hashes of its files.

    >>> line = torch.nn.Linear(1, 1, bias=False)
    >>> with with_parameters(line, {"weight": torch.tensor([[2.0]])}):
    ...     line(torch.ones(1)).tolist()
    [2.0]
    """
    if not isinstance(model, torch.nn.Module):
        raise HelmscopeError(f"model is a {type(model).__name__}, but parameters are those of a module")
    known = dict(model.named_parameters())
    for name, value in values.items():
        if name not in known:
            raise HelmscopeError(f"values names the parameter '{name}', but the model has none of that name")
        if not isinstance(value, torch.Tensor):
            raise HelmscopeError(f"values gives '{name}' a {type(value).__name__}, but it must be a tensor")
        if known[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, but the model's has {tuple(known[name].shape)}"
            raise HelmscopeError(f"values gives '{name}' the shape {shapes}")
    before = {name: known[name].detach().clone() for name in values}
    try:
        with torch.no_grad():
            for name, value in values.items():
                known[name].copy_(value)
        yield model
    finally:
        with torch.no_grad():
            for name, value in before.items():
                known[name].copy_(value)
