"""The inputs of any model, encoder-decoder models included: their encoder reads the texts and their decoder the
targets, shifted right by one, so that each token is predicted from those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.stacks import stacks_of
from helmscope.models.texts import Batch, labels_of, prepare, without_special_tokens
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError, type_with_article

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
    """The batch of a model's inputs: ``prepare``, extended to encoder-decoder models.

    ``targets`` are the texts or ids that the decoder predicts, one per text; by default the texts themselves. Instead,
    a mapping of inputs may contain ``decoder_input_ids``, which are not shifted, and ``decoder_attention_mask``. Raises
    HelmscopeError for targets of another model, unknown inputs, and unequal numbers of texts and targets.
    """
    stacks = stacks_of(model)
    options: dict[str, Any] = {"truncate": truncate, "why": why}
    if stacks is None:
        if targets is not None:
            raise HelmscopeError(
                f"targets is passed, but model is {type_with_article(model)}, and only encoder-decoder models have any"
            )
        return prepare(model, texts, tokenizer, **options)
    decoder_inputs: dict[str, Any] = {}
    if isinstance(texts, Mapping):
        decoder_inputs = {name: value for name, value in texts.items() if name in (IDS, MASK)}
        texts = {name: value for name, value in texts.items() if name not in decoder_inputs}
        _check_names(texts, decoder_inputs, targets)
    source = prepare(stacks.encoder, texts, tokenizer, **options)
    if decoder_inputs:
        renamed = {"input_ids": IDS, "attention_mask": MASK}
        named = {name: decoder_inputs[key] for name, key in renamed.items() if key in decoder_inputs}
        decoded = prepare(stacks.decoder, named, tokenizer, name=IDS, **options)
    elif targets is None:
        strings = not isinstance(texts, torch.Tensor | Mapping)
        decoded = _shifted(model, source, tokenizer, "texts", strings=strings)
    else:
        target_batch = prepare(stacks.decoder, targets, tokenizer, name="targets", **options)
        strings = not isinstance(targets, torch.Tensor | Mapping)
        decoded = _shifted(model, target_batch, tokenizer, "targets", strings=strings)
        decoded = replace(decoded, identities=target_batch.identities)
    if len(decoded) != len(source):
        name = IDS if decoder_inputs else "targets"
        raise HelmscopeError(f"{name} holds {len(decoded)} texts, but the encoder reads {len(source)}: one for each")
    return _join_batches(source, decoded)


def _check_names(texts: Mapping[str, Any], decoder_inputs: Mapping[str, Any], targets: Any) -> None:
    """Raise HelmscopeError for inputs on which an encoder-decoder model cannot be recorded."""
    unknown = sorted(set(map(str, texts)) - set(NAMED))
    if "labels" in unknown:
        raise HelmscopeError("texts names labels, with which a model returns its loss first: pass them as targets")
    if unknown:
        raise HelmscopeError(f"texts names '{unknown[0]}', but an encoder-decoder model is recorded on {list(NAMED)}")
    if decoder_inputs and IDS not in decoder_inputs:
        raise HelmscopeError(f"texts names {MASK}, but no {IDS}")
    if MASK in decoder_inputs and (rows := len(decoder_inputs[MASK])) != len(decoder_inputs[IDS]):
        raise HelmscopeError(f"{MASK} holds {rows} rows, but {IDS} holds {len(decoder_inputs[IDS])}: one for each")
    if decoder_inputs and targets is not None:
        raise HelmscopeError(f"targets is passed, but texts names {IDS} too: the decoder reads one of them")


def _shifted(model: Any, targets: Batch, tokenizer: Any, name: str, *, strings: bool) -> Batch:
    """The decoder inputs for these targets: the targets shifted right, in the way of the family. The targets are kept
    with them, padded on the right like the inputs.
    """
    ids, rows = targets.inputs["input_ids"], targets.visible_ids
    n, pad = max(map(len, rows)), getattr(model.config, "pad_token_id", None)
    padded = torch.tensor([[*row, *[pad or 0] * (n - len(row))] for row in rows], dtype=ids.dtype, device="cpu")
    visible = torch.arange(n, device="cpu") < torch.tensor([[len(row)] for row in rows], device="cpu")
    shifted = _shift(model, padded, name).masked_fill(~visible, pad or 0)

    def batch_of(ids: Tensor) -> Batch:
        labels = labels_of(ids)
        if strings:
            labels = tuple(tuple(tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist())
        if bool(visible.all()):
            return without_special_tokens(Batch({"input_ids": ids}, None, labels), tokenizer, name)
        inputs = {"input_ids": ids, "attention_mask": visible.long()}
        return without_special_tokens(Batch(inputs, None, labels, visible), tokenizer, name)

    return replace(batch_of(shifted), targets=batch_of(padded))


def _shift(model: Any, ids: Tensor, name: str) -> Tensor:
    """Shift ids right by the family's own function if it has one: some begin with another token than
    ``decoder_start_token_id``.
    """
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    start = getattr(model.config, "decoder_start_token_id", None)
    try:
        if shift is not None:
            shifted: Tensor = shift(ids)
            return shifted
        if start is None:
            raise ValueError("its configuration has no decoder_start_token_id")
    except (ValueError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise HelmscopeError(
            f"{name} are read by the decoder shifted right, but {type(model).__name__} cannot shift them "
            f"({one_line(error)}): pass a mapping with {IDS}"
        ) from error
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)


def _join_batches(source: Batch, decoded: Batch) -> Batch:
    """The batch of the whole model, whose tokens are those of the decoder. A prompt is identified by its text and, if
    targets were passed, its target.
    """

    def both(encoder: Mapping[str, Tensor], decoder: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**encoder, **{f"decoder_{name}": value for name, value in decoder.items()}}

    as_passed = None
    if source.given is not None or decoded.given is not None:
        as_passed = both(source.given or source.inputs, decoded.given or decoded.inputs)
    inputs = both(source.inputs, decoded.inputs)
    identities = source.identities
    if identities is not None and decoded.identities is not None:
        identities = tuple(map(" -> ".join, zip(identities, decoded.identities, strict=True)))
    return Batch(
        inputs, decoded.counted, decoded.tokens, decoded.visible, as_passed, source, decoded.targets, identities
    )
