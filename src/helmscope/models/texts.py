"""``prepare``: texts, token ids or images as a batch of model inputs, with the masks of visible and counted tokens."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.probe import base_model_of, vocabulary_size
from helmscope.models.sites import bytes_of
from helmscope.models.tokenizer import encode
from helmscope.store.manifest import hash_bytes
from helmscope.types import HelmscopeError, pluralized, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """The inputs of a forward pass. ``visible`` (batch, n) is False at tokens that attention cannot see: padding and
    masked tokens; ``counted`` is False at those and at special tokens, which statistics leave out. Each is None if it
    is True everywhere. ``given`` holds the inputs as passed, if padding was moved from the left to the right.

    For an encoder-decoder model the tokens are those of the decoder, ``source`` is the batch of the encoder, and the
    inputs are those of both. ``targets`` holds the tokens that the decoder predicts, one for each that it reads; it is
    None if ``decoder_input_ids`` were passed, from which the last target is not known.

    ``identities`` holds one string per prompt, a short hash of its text as passed, or of its token ids or pixels if
    these were passed: two models read the same texts if and only if they are equal, whatever their tokenizers.
    """

    inputs: Mapping[str, Tensor]
    counted: Bool[Tensor, "batch n"] | None = None
    tokens: tuple[tuple[str, ...], ...] | None = None
    visible: Bool[Tensor, "batch n"] | None = None
    given: Mapping[str, Tensor] | None = None
    source: Batch | None = None
    targets: Batch | None = None
    identities: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"<Batch: {', '.join(f'{name} {tuple(value.shape)}' for name, value in self.inputs.items())}>"

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def rows(self, rows: slice) -> Batch:
        """The batch restricted to some prompts."""
        return Batch(
            {name: value[rows] for name, value in self.inputs.items()},
            None if self.counted is None else self.counted[rows],
            None if self.tokens is None else self.tokens[rows],
            None if self.visible is None else self.visible[rows],
            None if self.given is None else {name: value[rows] for name, value in self.given.items()},
            None if self.source is None else self.source.rows(rows),
            None if self.targets is None else self.targets.rows(rows),
            None if self.identities is None else self.identities[rows],
        )

    def repeated(self, count: int) -> Batch:
        """The batch ``count`` times, one copy after the other."""
        if count == 1:
            return self
        inputs = {name: torch.cat([value] * count) for name, value in self.inputs.items()}
        masks = (None if mask is None else torch.cat([mask] * count) for mask in (self.counted, self.visible))
        counted, visible = masks
        return Batch(inputs, counted, visible=visible)

    @property
    def ids_name(self) -> str:
        """The name of the input with the ids of these tokens."""
        return "input_ids" if self.source is None else "decoder_input_ids"

    @property
    def mask_name(self) -> str:
        """The name of the input with the mask of these tokens."""
        return "attention_mask" if self.source is None else "decoder_attention_mask"

    @property
    def visible_ids(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each text without the tokens that attention cannot see."""
        ids = self.inputs[self.ids_name]
        visible = torch.ones_like(ids, dtype=torch.bool) if self.visible is None else self.visible
        return tuple(tuple(row[mask].tolist()) for row, mask in zip(ids, visible, strict=True))

    def to(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on a device."""
        return {name: value.to(device) for name, value in self.inputs.items()}


@dataclass(frozen=True, eq=False)
class _Request:
    """The model that reads the texts, the name of the argument with the texts, and whether they may be truncated."""

    model: Any
    name: str
    truncate: bool


def prepare(
    model: Any,
    texts: Any,
    tokenizer: Any = None,
    *,
    truncate: bool = False,
    why: str | None = None,
    name: str = "texts",
) -> Batch:
    """The batch of strings (with a tokenizer), token ids (batch, n), images (batch, channels, height, width), or a
    mapping of inputs of the model's forward pass, such as a tokenizer returns.

    Texts of different lengths are padded on the right. Padding and, if the tokenizer is known, special tokens take part
    in the forward pass but are not counted in statistics. Padding on the left is moved to the right; masked tokens
    inside a text are not moved. Raises HelmscopeError for no texts, an empty text, a text longer than the model's
    context unless ``truncate``, an id without embedding, and a text without counted tokens. ``why`` is the reason why
    the model's tokenizer could not be read, if there is one; ``name`` is the name of the argument in error messages.
    """
    if isinstance(tokenizer, str):
        raise HelmscopeError(f"tokenizer is {tokenizer!r:.60}, but it must be a tokenizer, not its name")
    request = _Request(model, name, truncate)
    if isinstance(texts, Mapping):
        return _identified(without_special_tokens(_from_inputs(request, texts), tokenizer, name))
    if isinstance(texts, torch.Tensor):
        return _identified(without_special_tokens(_from_tensor(request, texts), tokenizer, name))
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        hint = ": pass [text]" if isinstance(texts, str) else ""
        raise HelmscopeError(
            f"{name} is {type_with_article(texts)}, but it must be a list of strings or a tensor{hint}"
        )
    if not texts:
        raise HelmscopeError(f"{name} is empty, but it must hold at least one text")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise HelmscopeError(
                f"{name}[{i}] is {text!r:.60}, but every text must be a string that is not empty; token ids are passed "
                "as a tensor (batch, n)"
            )
        if not _is_unicode(text):
            raise HelmscopeError(f"{name}[{i}] is {text!r:.60}, but it must be Unicode without single surrogates")
    if tokenizer is None:
        reason = "the model came without a tokenizer" if why is None else f"its tokenizer could not be read ({why})"
        raise HelmscopeError(f"{name} are strings, but {reason}: pass tokenizer= or token ids")
    batch = without_special_tokens(_from_strings(request, list(texts), tokenizer), tokenizer, name)
    return replace(batch, identities=tuple(_identity("text", text.encode()) for text in texts))


def _identified(batch: Batch) -> Batch:
    """The batch with the identities of prompts that were passed as token ids or as images."""
    if "input_ids" in batch.inputs:
        rows, kind = [str(ids).encode() for ids in batch.visible_ids], "ids"
    else:  # in float32, so that a float64 model agrees with a float32 one
        rows, kind = [bytes_of(image.float()) for image in batch.inputs["pixel_values"]], "image"
    return replace(batch, identities=tuple(_identity(kind, row) for row in rows))


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded; a single surrogate, as in a broken emoji, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _identity(kind: str, content: bytes) -> str:
    return f"{kind} {hash_bytes(content)[:12]}"


def without_special_tokens(batch: Batch, tokenizer: Any, name: str) -> Batch:
    """The batch with special tokens not counted; raises HelmscopeError if a text has no counted token left."""
    ids, counted_tokens = batch.inputs.get("input_ids"), batch.visible
    if ids is None:
        return batch
    if tokenizer is not None:
        special = torch.tensor(_special_ids(tokenizer), dtype=ids.dtype, device=ids.device)
        words = ~torch.isin(ids, special)
        if counted_tokens is not None:
            counted_tokens = counted_tokens & words
        elif not bool(words.all()):
            counted_tokens = words
    if counted_tokens is not None and not bool(counted_tokens.any(-1).all()):
        empty = int((~counted_tokens.any(-1)).nonzero()[0])
        raise HelmscopeError(f"{name}[{empty}] has no token that counts, but only special tokens or padding")
    return replace(batch, counted=counted_tokens)


def _special_ids(tokenizer: Any) -> list[int]:
    """The ids of special tokens. That of unknown words is not among them, unless it also has another role, as
    <|endoftext|> has in GPT-2.
    """
    roles = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    others = {getattr(tokenizer, role, None) for role in roles}
    unknown = tokenizer.unk_token_id
    return sorted(set(tokenizer.all_special_ids) - ({unknown} if unknown not in others else set()))


def _from_inputs(request: _Request, mapping: Mapping[str, Any]) -> Batch:
    """The batch of named inputs; padding on the left is moved if there is nothing but ids, mask and segments."""
    try:
        inputs = {str(name): torch.as_tensor(value) for name, value in mapping.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise HelmscopeError(f"{request.name} holds a value that is not a tensor: pad the texts") from error
    if "labels" in inputs:
        raise HelmscopeError(f"{request.name} names labels, with which a model returns its loss first: leave them out")
    _check_names(request, inputs)
    main = inputs.get("input_ids", inputs.get("pixel_values"))
    lengths = {len(value) if value.ndim else 0 for value in inputs.values()}
    if main is None or len(lengths) != 1 or 0 in lengths:
        raise HelmscopeError(
            f"{request.name} names {sorted(inputs)}, but it must hold input_ids or pixel_values, equally many of each"
        )
    if "input_ids" not in inputs:
        return Batch({**inputs, **_from_tensor(request, main).inputs})
    _check_ids(request, main)
    as_passed, inputs = inputs, _pad_right(request, inputs)
    limit, n = context_length(request.model), main.shape[1]
    if limit is not None and n > limit:  # cut padding after the last token of all texts, with truncate more
        visible = _visible_tokens(request, inputs)
        needed = n if visible is None else int(visible.any(0).nonzero().max()) + 1
        cut = limit if request.truncate else max(needed, limit)
        inputs = {name: value[:, :cut] if value.shape[1:2] == (n,) else value for name, value in inputs.items()}
        as_passed = inputs  # the inputs as passed are too long for the model
    _check_length(request, [inputs["input_ids"].shape[1]] * len(main))
    moved = as_passed if as_passed is not inputs else None
    return Batch(inputs, None, labels_of(inputs["input_ids"]), _visible_tokens(request, inputs), moved)


def _check_names(request: _Request, names: Iterable[str]) -> None:
    """Raise HelmscopeError for an input that no forward pass has: most families would ignore it silently."""
    model = request.model
    forwards = (model.forward, base_model_of(model).forward)
    known = {name for forward in forwards for name in inspect.signature(forward).parameters}
    for name in names:
        if name not in known.union(TEXT_INPUTS):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "leave it out"
            raise HelmscopeError(
                f"{request.name} names '{name}', which {type_with_article(model)} does not take: {hint}"
            )


def _pad_right(request: _Request, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with the tokens before the first visible one of each text moved to its end, if there is nothing but
    ids, mask and segments; else the inputs unchanged.
    """
    visible = _visible_tokens(request, inputs)
    leading = None if visible is None else visible.int().argmax(1, keepdim=True)
    if leading is None or not set(inputs) <= set(TEXT_INPUTS) or not bool(leading.any()):
        return inputs
    n = inputs["input_ids"].shape[1]
    order = (torch.arange(n, device=leading.device) + leading) % n
    return {name: value.gather(1, order) for name, value in inputs.items()}


def _visible_tokens(request: _Request, inputs: Mapping[str, Tensor]) -> Bool[Tensor, "batch n"] | None:
    """The attention mask as booleans, checked; None if there is no mask."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is None:
        return None
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise HelmscopeError(
            f"attention_mask of shape {tuple(mask.shape)} must hold 0 or 1 for each of the {tuple(ids.shape)} ids"
        )
    visible = mask.bool()
    if not bool(visible.any(-1).all()):
        empty = int((~visible.any(-1)).nonzero()[0])
        raise HelmscopeError(f"{request.name}[{empty}] has no token that counts: its attention_mask is 0 throughout")
    return visible


def _from_tensor(request: _Request, value: Tensor) -> Batch:
    if not value.is_floating_point() and value.dtype not in (torch.int64, torch.int32):
        raise _wrong_dtype(request, value)
    if value.is_floating_point():
        if value.ndim != 4 or not len(value):
            raise HelmscopeError(
                f"{request.name} is a tensor of {value.dtype} of shape {tuple(value.shape)}, but token ids must be "
                "integers, and images have the shape (batch, channels, rows, columns)"
            )
        return Batch({"pixel_values": value.to(request.model.dtype)})
    _check_ids(request, value)
    if request.truncate and (limit := context_length(request.model)) is not None:
        value = value[:, :limit]
    _check_length(request, [value.shape[1]] * len(value))
    return Batch({"input_ids": value}, None, labels_of(value))


def _wrong_dtype(request: _Request, value: Tensor) -> HelmscopeError:
    allowed = "but token ids are int64 or int32, and images floats"
    return HelmscopeError(f"{request.name} is a tensor of {value.dtype}, {allowed}")


def labels_of(ids: Tensor) -> tuple[tuple[str, ...], ...]:
    """Labels of tokens whose strings are unknown: their ids."""
    return tuple(tuple(str(k) for k in row) for row in ids.tolist())


def _from_strings(request: _Request, texts: list[str], tokenizer: Any) -> Batch:
    limit = context_length(request.model)
    options = {"truncation": True, "max_length": limit} if request.truncate and limit is not None else {}
    rows = encode(texts, tokenizer, as_targets=request.name == "targets", **options)
    for i, row in enumerate(rows):
        if not row:
            raise HelmscopeError(f"{request.name}[{i}] is {texts[i]!r:.60}, but the tokenizer returns no token for it")
    _check_length(request, [len(row) for row in rows])
    n, pad = max(len(row) for row in rows), tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    ids = torch.tensor([row + [pad or 0] * (n - len(row)) for row in rows], device="cpu")
    _check_ids(request, ids)
    real = torch.tensor([[True] * len(row) + [False] * (n - len(row)) for row in rows], device="cpu")
    labels = tuple(tuple(tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist())
    return Batch({"input_ids": ids, "attention_mask": real.long()}, None, labels, real)


def context_length(model: Any) -> int | None:
    """The largest number of tokens of a text, None if positions are not limited."""
    names = ("max_position_embeddings", "max_seq_len")  # the second in mpt
    limit = next((value for name in names if (value := getattr(model.config, name, None)) is not None), None)
    if limit is None or limit < 1:
        return None
    # RoBERTa counts positions from the padding index + 1 on
    tables = (part for name, part in model.named_modules() if name.endswith("embeddings.position_embeddings"))
    padding_index = next((part.padding_idx for part in tables if getattr(part, "padding_idx", None) is not None), None)
    return int(limit) if padding_index is None else int(limit) - padding_index - 1


def _check_ids(request: _Request, ids: Tensor) -> None:
    if ids.is_floating_point() or ids.dtype not in (torch.int64, torch.int32):
        raise _wrong_dtype(request, ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise HelmscopeError(f"{request.name} has shape {tuple(ids.shape)}, but token ids are (batch, n) with n >= 1")
    size = vocabulary_size(request.model)
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        invalid = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
        raise HelmscopeError(
            f"{request.name} contain the token id {invalid}, but the model has embeddings 0 to {size - 1}: is it from "
            "another tokenizer?"
        )


def _check_length(request: _Request, lengths: list[int]) -> None:
    limit = context_length(request.model)
    for i, length in enumerate(lengths):
        if limit is not None and length > limit:
            raise HelmscopeError(
                f"{request.name}[{i}] has {pluralized(length, 'token')}, but the model's context is {limit}: pass "
                "truncate=True"
            )
