"""Texts, token ids or images as the inputs of a model, with the mask of the tokens that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.probe import vocabulary_size
from helmscope.models.words import encode
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

WORDS_KEPT = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """What a forward gets. ``mask`` (batch, n) is False at padding and special tokens, None where all tokens count."""

    inputs: Mapping[str, Tensor]
    mask: Bool[Tensor, "batch n"] | None = None
    tokens: tuple[tuple[str, ...], ...] | None = None

    def __repr__(self) -> str:
        return f"<Batch: {', '.join(f'{name} {tuple(value.shape)}' for name, value in self.inputs.items())}>"

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def rows(self, rows: slice) -> Batch:
        """Some prompts of the batch."""
        return Batch(
            {name: value[rows] for name, value in self.inputs.items()},
            None if self.mask is None else self.mask[rows],
            None if self.tokens is None else self.tokens[rows],
        )

    def to(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on a device."""
        return {name: value.to(device) for name, value in self.inputs.items()}


def prepare(model: Any, texts: Any, tokenizer: Any = None, *, truncate: bool = False, why: str | None = None) -> Batch:
    """Texts (by the tokenizer), token ids (batch, n), pixels (batch, channels, height, width), or the named inputs of
    the model's forward, such as a tokenizer gives, as a batch.

    Texts of different lengths are padded on the right. Padding and, where the tokenizer is known, special tokens take
    part in the forward but not in what is measured. Refused, in one sentence: no texts, an empty text, a text longer
    than the model's context unless ``truncate``, an id that the model has no embedding for, a text of which no token
    counts. ``why`` says why there is no tokenizer, where one was to be had.
    """
    if isinstance(tokenizer, str):
        raise HelmscopeError(f"tokenizer is {tokenizer!r:.60}, but it must be a tokenizer, not its name")
    if isinstance(texts, Mapping):
        return _counted(_from_inputs(model, texts), tokenizer)
    if isinstance(texts, torch.Tensor):
        return _counted(_from_tensor(model, texts, truncate), tokenizer)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise HelmscopeError(f"texts is a {type(texts).__name__}, but it must be a list of strings or a tensor")
    if not texts:
        raise HelmscopeError("texts is empty, but it must hold at least one text")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise HelmscopeError(f"texts[{i}] is {text!r:.60}, but every text must be a string that is not empty")
    if tokenizer is None:
        came = "the model came without a tokenizer" if why is None else f"its tokenizer could not be read ({why})"
        raise HelmscopeError(f"texts are strings, but {came}: pass tokenizer= or token ids")
    return _counted(_from_strings(model, list(texts), tokenizer, truncate), tokenizer)


def _counted(batch: Batch, tokenizer: Any) -> Batch:
    """The batch with special tokens out of the count."""
    ids, mask = batch.inputs.get("input_ids"), batch.mask
    if ids is None:
        return batch
    if tokenizer is not None:
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}  # an unknown word is a word
        words = ~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype, device=ids.device))
        mask = mask & words if mask is not None else None if bool(words.all()) else words
    if mask is not None and not bool(mask.any(-1).all()):
        bare = int((~mask.any(-1)).nonzero()[0])
        raise HelmscopeError(f"texts[{bare}] has no token that counts, but only special tokens or padding")
    return replace(batch, mask=mask)


def _from_inputs(model: Any, given: Mapping[str, Any]) -> Batch:
    """Inputs as they are; tokens that the attention mask hides do not count."""
    try:
        inputs = {str(name): torch.as_tensor(value) for name, value in given.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise HelmscopeError("texts holds a value that is no tensor: pad the texts to one length") from error
    if "labels" in inputs:
        raise HelmscopeError("texts names labels, with which a model returns its loss first: leave them out")
    main = inputs.get("input_ids", inputs.get("pixel_values"))
    if main is None or any(len(value) != len(main) or not len(value) for value in inputs.values()):
        raise HelmscopeError(
            f"texts names {sorted(inputs)}, but it must hold input_ids or pixel_values, equally many of each"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and set(inputs) <= set(WORDS_KEPT):  # padding on the left goes to the right
        order = torch.argsort(~mask.bool(), dim=1, stable=True)
        inputs = {name: value.gather(1, order) for name, value in inputs.items()}
        main, mask = inputs["input_ids"], inputs["attention_mask"]
    plain = _from_tensor(model, main, truncate=False)
    return Batch(inputs, None if mask is None else mask.bool(), plain.tokens)


def _from_tensor(model: Any, value: Tensor, truncate: bool) -> Batch:
    if not value.is_floating_point() and value.dtype not in (torch.int64, torch.int32):
        raise HelmscopeError(f"texts is a tensor of {value.dtype}, but token ids are int64 or int32, and images floats")
    if value.is_floating_point():
        if value.ndim != 4 or not len(value):
            raise HelmscopeError(
                f"texts has shape {tuple(value.shape)}, but images are (batch, channels, rows, columns)"
            )
        return Batch({"pixel_values": value.to(model.dtype)})
    if value.ndim != 2 or 0 in value.shape:
        raise HelmscopeError(f"texts has shape {tuple(value.shape)}, but token ids are (batch, n) with n >= 1")
    _check_ids(model, value)
    if truncate and (limit := context_length(model)) is not None:
        value = value[:, :limit]
    _check_length(model, [value.shape[1]] * len(value))
    labels = tuple(tuple(str(k) for k in row) for row in value.tolist())
    return Batch({"input_ids": value}, None, labels)


def _from_strings(model: Any, texts: list[str], tokenizer: Any, truncate: bool) -> Batch:
    limit = context_length(model)
    options = {"truncation": True, "max_length": limit} if truncate and limit is not None else {}
    rows = encode(texts, tokenizer, **options)
    for i, row in enumerate(rows):
        if not row:
            raise HelmscopeError(f"texts[{i}] is {texts[i]!r:.60}, but the tokenizer makes no token of it")
    _check_length(model, [len(row) for row in rows])
    n, pad = max(len(row) for row in rows), tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    ids = torch.tensor([row + [pad or 0] * (n - len(row)) for row in rows])
    _check_ids(model, ids)
    real = torch.tensor([[True] * len(row) + [False] * (n - len(row)) for row in rows])
    labels = tuple(tuple(tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist())
    return Batch({"input_ids": ids, "attention_mask": real.long()}, real, labels)


def context_length(model: Any) -> int | None:
    """The longest text of a model, None where its positions have no end."""
    names = ("max_position_embeddings", "max_seq_len")  # the second of mpt
    most = next((value for name in names if (value := getattr(model.config, name, None)) is not None), None)
    if most is None or most < 1:
        return None
    # RoBERTa counts its positions from behind the padding index
    tables = (part for name, part in model.named_modules() if name.endswith("embeddings.position_embeddings"))
    behind = next((part.padding_idx for part in tables if getattr(part, "padding_idx", None) is not None), None)
    return int(most) if behind is None else int(most) - behind - 1


def _check_ids(model: Any, ids: Tensor) -> None:
    size = vocabulary_size(model)
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        worst = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
        raise HelmscopeError(
            f"texts give the token id {worst}, but the model has embeddings 0 to {size - 1}: another tokenizer?"
        )


def _check_length(model: Any, lengths: list[int]) -> None:
    limit = context_length(model)
    for i, length in enumerate(lengths):
        if limit is not None and length > limit:
            raise HelmscopeError(
                f"texts[{i}] has {length} tokens, but the model's context is {limit}: pass truncate=True"
            )
