"""What a model reads. An encoder-decoder model reads two things: the texts in its encoder, and in its decoder the
targets, shifted right by one so that each token is still to be predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.stacks import stacks_of
from helmscope.models.texts import Batch, labels_of, prepare, without_special_tokens
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

IDS, MASK = "decoder_input_ids", "decoder_attention_mask"
NAMED = ("input_ids", "attention_mask", IDS, MASK)


def prepare_inputs(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    targets: Any = None,
    truncate: bool = False,
    why: str | None = None,
) -> Batch:
    """``prepare``, for an encoder-decoder model too: ``targets`` are what its decoder is to write, texts or ids as many
    as there are texts; by default the texts themselves. A mapping may hold ``decoder_input_ids`` instead, which are
    read as they are, and ``decoder_attention_mask``.
    """
    stacks = stacks_of(model)
    options: dict[str, Any] = {"truncate": truncate, "why": why}
    if stacks is None:
        if targets is not None:
            raise HelmscopeError(
                f"targets is given, but model is a {type(model).__name__}, and only an encoder-decoder model reads them"
            )
        return prepare(model, texts, tokenizer, **options)
    own: dict[str, Any] = {}
    if isinstance(texts, Mapping):
        own = {name: value for name, value in texts.items() if name in (IDS, MASK)}
        texts = {name: value for name, value in texts.items() if name not in own}
        _check_names(texts, own, targets)
    source = prepare(stacks.encoder, texts, tokenizer, **options)
    if own:
        named = {"input_ids": own[IDS]} | ({"attention_mask": own[MASK]} if MASK in own else {})
        read = prepare(stacks.decoder, named, tokenizer, name=IDS, **options)
    elif targets is None:
        strings = not isinstance(texts, torch.Tensor | Mapping)
        read = _shifted(model, source, tokenizer, "texts", strings=strings)
    else:
        wanted = prepare(stacks.decoder, targets, tokenizer, name="targets", **options)
        strings = not isinstance(targets, torch.Tensor | Mapping)
        read = _shifted(model, wanted, tokenizer, "targets", strings=strings)
    if len(read) != len(source):
        name = IDS if own else "targets"
        raise HelmscopeError(f"{name} holds {len(read)} texts, but the encoder reads {len(source)}: one for each")
    return _joined(source, read)


def _check_names(texts: Mapping[str, Any], own: Mapping[str, Any], targets: Any) -> None:
    """Refuse inputs that an encoder-decoder model cannot be recorded from."""
    unknown = sorted(set(map(str, texts)) - set(NAMED))
    if "labels" in unknown:
        raise HelmscopeError("texts names labels, with which a model returns its loss first: pass them as targets")
    if unknown:
        raise HelmscopeError(f"texts names '{unknown[0]}', but an encoder-decoder model is recorded on {list(NAMED)}")
    if own and IDS not in own:
        raise HelmscopeError(f"texts names {MASK}, but no {IDS}")
    if MASK in own and len(own[MASK]) != len(own[IDS]):
        raise HelmscopeError(f"{MASK} holds {len(own[MASK])} rows, but {IDS} holds {len(own[IDS])}: one for each")
    if own and targets is not None:
        raise HelmscopeError(f"targets is given, but texts names {IDS} too: the decoder reads one of them")


def _shifted(model: Any, wanted: Batch, tokenizer: Any, name: str, *, strings: bool) -> Batch:
    """What a decoder reads that is to write these tokens: those before each, in the way of the family."""
    ids, seen = wanted.inputs["input_ids"], wanted.visible
    seen = torch.ones_like(ids, dtype=torch.bool) if seen is None else seen
    rows = [row[mask].tolist() for row, mask in zip(ids, seen, strict=True)]
    n, pad = max(map(len, rows)), getattr(model.config, "pad_token_id", None)
    padded = torch.tensor([row + [pad or 0] * (n - len(row)) for row in rows], dtype=ids.dtype, device="cpu")
    visible = torch.arange(n, device="cpu") < torch.tensor([[len(row)] for row in rows], device="cpu")
    shifted = _shift(model, padded, name).masked_fill(~visible, pad or 0)
    labels = labels_of(shifted)
    if strings:
        labels = tuple(tuple(tokenizer.convert_ids_to_tokens(row)) for row in shifted.tolist())
    if bool(visible.all()):
        return without_special_tokens(Batch({"input_ids": shifted}, None, labels), tokenizer, name)
    inputs = {"input_ids": shifted, "attention_mask": visible.long()}
    return without_special_tokens(Batch(inputs, None, labels, visible), tokenizer, name)


def _shift(model: Any, ids: Tensor, name: str) -> Tensor:
    """By the family's own function where it has one: some begin with another token than ``decoder_start_token_id``."""
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    start = getattr(model.config, "decoder_start_token_id", None)
    try:
        if own is not None:
            shifted: Tensor = own(ids)
            return shifted
        if start is None:
            raise ValueError("its configuration has no decoder_start_token_id")
    except (ValueError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise HelmscopeError(
            f"{name} are read by the decoder shifted right, but {type(model).__name__} cannot shift them "
            f"({one_line(error)}): pass a mapping with {IDS}"
        ) from error
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)


def _joined(source: Batch, read: Batch) -> Batch:
    """The inputs of the whole model, with the decoder's tokens as those that are looked at."""

    def both(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**first, **{f"decoder_{name}": value for name, value in second.items()}}

    came = None
    if source.given is not None or read.given is not None:
        came = both(source.given or source.inputs, read.given or read.inputs)
    inputs = both(source.inputs, read.inputs)
    return Batch(inputs, read.counted, read.tokens, read.visible, came, source)
