"""The encoder and the decoder of an encoder-decoder model, which are recorded separately."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from helmscope.models.tap import can_be_tapped
from helmscope.types import HelmscopeError, type_with_article


@dataclass(frozen=True, eq=False)
class Stacks:
    """The encoder and the decoder of a model, as modules. The encoder can run alone; the decoder runs with the whole
    model, since its cross-attention reads the last states of the encoder.
    """

    encoder: Any
    decoder: Any


def stacks_of(model: Any) -> Stacks | None:
    """The stacks of an encoder-decoder model; None for other models. Raises HelmscopeError if cross-attention cannot be
    recorded, or if the encoder reads anything other than token ids.

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
    name = type_with_article(model)
    encoder_input = getattr(encoder, "main_input_name", "input_ids")
    if encoder_input != "input_ids":
        raise HelmscopeError(
            f"model is {name}, whose encoder reads {encoder_input}, but encoder-decoder models are recorded only "
            "on token ids"
        )
    if not can_be_tapped(model):
        raise HelmscopeError(
            f"model is {name}, which does not use the attention registry of transformers, but cross-attention can "
            "be recorded only there: record the encoder alone, model.get_encoder()"
        )
    return Stacks(encoder, decoder)
