"""The two stacks of an encoder-decoder model, which are recorded one by one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from helmscope.models.tap import can_be_tapped
from helmscope.types import HelmscopeError


@dataclass(frozen=True, eq=False)
class Stacks:
    """The encoder and the decoder of a model, as modules. The encoder is a model of its own; the decoder runs with the
    whole model, whose cross-attention reads what the encoder gives.
    """

    encoder: Any
    decoder: Any


def stacks_of(model: Any) -> Stacks | None:
    """The stacks of an encoder-decoder model; None for a model of one stack. Refused is an encoder-decoder model whose
    cross-attention cannot be heard, or whose encoder reads something else than token ids.

    >>> from transformers import GPT2Config, GPT2Model, T5Config, T5Model
    >>> stacks_of(GPT2Model(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))) is None
    True
    >>> sizes = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    >>> type(stacks_of(T5Model(T5Config(**sizes))).encoder).__name__
    'T5Stack'
    """
    if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        return None
    encoder, decoder = model.get_encoder(), model.get_decoder()
    if encoder is None or decoder is None or encoder is decoder:
        return None
    name = type(model).__name__
    takes = getattr(encoder, "main_input_name", "input_ids")
    if takes != "input_ids":
        raise HelmscopeError(
            f"model is a {name}, whose encoder reads {takes}, but an encoder-decoder model is recorded on token ids "
            "alone"
        )
    if not can_be_tapped(model):
        raise HelmscopeError(
            f"model is a {name}, an encoder-decoder model that does not look its attention up in the registry of "
            "transformers, but only there can cross-attention be heard: record its encoder alone, model.get_encoder()"
        )
    return Stacks(encoder, decoder)
