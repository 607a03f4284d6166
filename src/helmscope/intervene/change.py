"""Context managers that run a model under edits, or with other parameters, and restore it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.anatomy import Anatomy
from helmscope.models.hooks import hooked
from helmscope.models.recording import Recording
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.sites import AbstractEdit


@contextmanager
def edited(model: Recording | Anatomy, *edits: AbstractEdit) -> Iterator[Any]:
    """Context manager: within it, every forward pass of the model runs under the edits; the model is always restored.

    Yields the model itself, ready to be called. Recording it within the block raises ``HelmscopeError``, because the
    recording would not know of the edits: use ``recording.under`` for that.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.intervene.states import Ablate
    >>> from helmscope.models.record import record
    >>> from helmscope.models.sites import Site
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> with edited(recording, Ablate(site=Site.ATTENTION), Ablate(site=Site.MLP)) as bare:
    ...     bare(torch.tensor([[1, 2, 3, 4]])).logits.shape
    torch.Size([1, 4, 9])
    """
    anatomy = model.anatomy if isinstance(model, Recording) else model
    if not isinstance(anatomy, Anatomy):
        raise HelmscopeError(f"model is {type_with_article(model)}, but it must be a Recording or an Anatomy")
    with hooked(anatomy, edits):
        yield anatomy.model


@contextmanager
def with_parameters(model: Any, values: Mapping[str, Tensor]) -> Iterator[Any]:
    """Context manager: within it, the named parameters of a model have these values; the old values are always restored
    exactly.

    The changed model may be recorded. Methods of the recording that run the model again (``kernel``, ``force``,
    ``logits``, ``resume``, ``under``) must be called within the block too. Record the model itself, not a
    ``LoadedModel``, which refers to the hashes of the unchanged files.

    >>> line = torch.nn.Linear(1, 1, bias=False)
    >>> with with_parameters(line, {"weight": torch.tensor([[2.0]])}):
    ...     line(torch.ones(1)).tolist()
    [2.0]
    """
    if not isinstance(model, torch.nn.Module):
        raise HelmscopeError(f"model is {type_with_article(model)}, but it must be a torch.nn.Module")
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        if name not in parameters:
            raise HelmscopeError(f"values names the parameter '{name}', but the model has none of that name")
        if not isinstance(value, torch.Tensor):
            raise HelmscopeError(f"values['{name}'] is {type_with_article(value)}, but it must be a tensor")
        if parameters[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, but that of the model has {tuple(parameters[name].shape)}"
            raise HelmscopeError(f"values['{name}'] has the shape {shapes}")
    before = {name: parameters[name].detach().clone() for name in values}
    try:
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)
        yield model
    finally:
        with torch.no_grad():
            for name, value in before.items():
                parameters[name].copy_(value)
