"""Texts, token ids or images as the inputs of a model: which tokens attention sees, and which of them count."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.probe import trunk_of, vocabulary_size
from helmscope.models.tokenizer import encode
from helmscope.types import HelmscopeError, counted

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

WORDS_KEPT = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """What a forward gets. ``visible`` (batch, n) is False at tokens that attention does not see, padding and holes;
    ``counted`` is False at those and at special tokens, which statistics leave out. None where all are True.
    ``given`` holds the inputs as they came where padding was moved from the left to the right.

    Of an encoder-decoder model the tokens are those that its decoder reads, and ``source`` holds what its encoder
    reads; the inputs are those of both.
    """

    inputs: Mapping[str, Tensor]
    counted: Bool[Tensor, "batch n"] | None = None
    tokens: tuple[tuple[str, ...], ...] | None = None
    visible: Bool[Tensor, "batch n"] | None = None
    given: Mapping[str, Tensor] | None = None
    source: Batch | None = None

    def __repr__(self) -> str:
        return f"<Batch: {', '.join(f'{name} {tuple(value.shape)}' for name, value in self.inputs.items())}>"

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def rows(self, rows: slice) -> Batch:
        """Some prompts of the batch."""
        return Batch(
            {name: value[rows] for name, value in self.inputs.items()},
            None if self.counted is None else self.counted[rows],
            None if self.tokens is None else self.tokens[rows],
            None if self.visible is None else self.visible[rows],
            None if self.given is None else {name: value[rows] for name, value in self.given.items()},
            None if self.source is None else self.source.rows(rows),
        )

    @property
    def ids_name(self) -> str:
        """The input that holds the ids of these tokens."""
        return "input_ids" if self.source is None else "decoder_input_ids"

    @property
    def mask_name(self) -> str:
        """The input that says which of these tokens are seen."""
        return "attention_mask" if self.source is None else "decoder_attention_mask"

    @property
    def visible_ids(self) -> tuple[tuple[int, ...], ...]:
        """The ids of each text of ``input_ids`` without the tokens that attention cannot see."""
        ids = self.inputs["input_ids"]
        visible = torch.ones_like(ids, dtype=torch.bool) if self.visible is None else self.visible
        return tuple(tuple(row[mask].tolist()) for row, mask in zip(ids, visible, strict=True))

    def to(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on a device."""
        return {name: value.to(device) for name, value in self.inputs.items()}


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is to be read: for which model, by which name the caller gave it, and whether it may be cut."""

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
    """Texts (by the tokenizer), token ids (batch, n), pixels (batch, channels, height, width), or the named inputs of
    the model's forward, such as a tokenizer gives, as a batch.

    Texts of different lengths are padded on the right. Padding and, where the tokenizer is known, special tokens take
    part in the forward but not in what statistics count. Padding on the left is moved to the right; tokens hidden
    inside a text stay where they are. Refused, in one sentence: no texts, an empty text, a text longer
    than the model's context unless ``truncate``, an id that the model has no embedding for, a text of which no token
    counts. ``why`` says why there is no tokenizer, where one was to be had; ``name`` is what the argument is called.
    """
    if isinstance(tokenizer, str):
        raise HelmscopeError(f"tokenizer is {tokenizer!r:.60}, but it must be a tokenizer, not its name")
    asked = _Asked(model, name, truncate)
    if isinstance(texts, Mapping):
        return without_special_tokens(_from_inputs(asked, texts), tokenizer, name)
    if isinstance(texts, torch.Tensor):
        return without_special_tokens(_from_tensor(asked, texts), tokenizer, name)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise HelmscopeError(f"{name} is a {type(texts).__name__}, but it must be a list of strings or a tensor")
    if not texts:
        raise HelmscopeError(f"{name} is empty, but it must hold at least one text")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise HelmscopeError(f"{name}[{i}] is {text!r:.60}, but every text must be a string that is not empty")
    if tokenizer is None:
        came = "the model came without a tokenizer" if why is None else f"its tokenizer could not be read ({why})"
        raise HelmscopeError(f"{name} are strings, but {came}: pass tokenizer= or token ids")
    return without_special_tokens(_from_strings(asked, list(texts), tokenizer), tokenizer, name)


def without_special_tokens(batch: Batch, tokenizer: Any, name: str) -> Batch:
    """The batch with special tokens out of the count."""
    ids, seen = batch.inputs.get("input_ids"), batch.visible
    if ids is None:
        return batch
    if tokenizer is not None:
        special = torch.tensor(_special_ids(tokenizer), dtype=ids.dtype, device=ids.device)
        words = ~torch.isin(ids, special)
        seen = seen & words if seen is not None else None if bool(words.all()) else words
    if seen is not None and not bool(seen.any(-1).all()):
        bare = int((~seen.any(-1)).nonzero()[0])
        raise HelmscopeError(f"{name}[{bare}] has no token that counts, but only special tokens or padding")
    return replace(batch, counted=seen)


def _special_ids(tokenizer: Any) -> list[int]:
    """The ids of special tokens. An unknown word is a word, unless its token serves as another special one too, as
    <|endoftext|> does in GPT-2.
    """
    roles = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    others = {getattr(tokenizer, role, None) for role in roles}
    unknown = tokenizer.unk_token_id
    return sorted(set(tokenizer.all_special_ids) - ({unknown} if unknown not in others else set()))


def _from_inputs(asked: _Asked, given: Mapping[str, Any]) -> Batch:
    """Named inputs; padding on the left goes to the right where nothing but ids, mask and segments is given."""
    try:
        inputs = {str(name): torch.as_tensor(value) for name, value in given.items()}
    except (ValueError, TypeError, RuntimeError) as error:
        raise HelmscopeError(f"{asked.name} holds a value that is not a tensor: pad the texts to one length") from error
    if "labels" in inputs:
        raise HelmscopeError(f"{asked.name} names labels, with which a model returns its loss first: leave them out")
    _check_names(asked, inputs)
    main = inputs.get("input_ids", inputs.get("pixel_values"))
    lengths = {len(value) if value.ndim else 0 for value in inputs.values()}
    if main is None or len(lengths) != 1 or 0 in lengths:
        raise HelmscopeError(
            f"{asked.name} names {sorted(inputs)}, but it must hold input_ids or pixel_values, equally many of each"
        )
    if "input_ids" not in inputs:
        return Batch({**inputs, **_from_tensor(asked, main).inputs})
    _check_ids(asked, main)
    came, inputs = inputs, _padded_right(asked, inputs)
    limit, n = context_length(asked.model), main.shape[1]
    if limit is not None and n > limit:  # padding behind the last token of all texts goes, with truncate more
        seen = _visible(asked, inputs)
        needed = n if seen is None else int(seen.any(0).nonzero().max()) + 1
        cut = limit if asked.truncate else max(needed, limit)
        inputs = {name: value[:, :cut] if value.shape[1:2] == (n,) else value for name, value in inputs.items()}
        came = inputs  # as they came, they are longer than the model takes
    _check_length(asked, [inputs["input_ids"].shape[1]] * len(main))
    moved = came if came is not inputs else None
    return Batch(inputs, None, labels_of(inputs["input_ids"]), _visible(asked, inputs), moved)


def _check_names(asked: _Asked, names: Iterable[str]) -> None:
    """Refuse an input that no forward names: most families would swallow it in silence."""
    model = asked.model
    forwards = (model.forward, trunk_of(model).forward)
    taken = {each.name for forward in forwards for each in inspect.signature(forward).parameters.values()}
    for name in names:
        if name not in taken.union(WORDS_KEPT):
            near = difflib.get_close_matches(name, taken, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "leave it out"
            raise HelmscopeError(f"{asked.name} names '{name}', which a {type(model).__name__} does not take: {hint}")


def _padded_right(asked: _Asked, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What lies before the first visible token of a text is moved behind its last one, where nothing but ids, mask and
    segments is given; else the inputs as they are.
    """
    visible = _visible(asked, inputs)
    leading = None if visible is None else visible.int().argmax(1, keepdim=True)
    if leading is None or not set(inputs) <= set(WORDS_KEPT) or not bool(leading.any()):
        return inputs
    n = inputs["input_ids"].shape[1]
    order = (torch.arange(n, device=leading.device) + leading) % n
    return {name: value.gather(1, order) for name, value in inputs.items()}


def _visible(asked: _Asked, inputs: Mapping[str, Tensor]) -> Bool[Tensor, "batch n"] | None:
    """The attention mask as booleans, checked; None where all tokens are seen."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is None:
        return None
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise HelmscopeError(
            f"attention_mask of shape {tuple(mask.shape)} must hold 0 or 1, and nothing else, for each of the "
            f"{tuple(ids.shape)} ids"
        )
    visible = mask.bool()
    if not bool(visible.any(-1).all()):
        bare = int((~visible.any(-1)).nonzero()[0])
        raise HelmscopeError(f"{asked.name}[{bare}] has no token that counts: its attention_mask is 0 throughout")
    return visible


def _from_tensor(asked: _Asked, value: Tensor) -> Batch:
    if not value.is_floating_point() and value.dtype not in (torch.int64, torch.int32):
        raise _wrong_dtype(asked, value)
    if value.is_floating_point():
        if value.ndim != 4 or not len(value):
            raise HelmscopeError(
                f"{asked.name} has shape {tuple(value.shape)}, but images are (batch, channels, rows, columns)"
            )
        return Batch({"pixel_values": value.to(asked.model.dtype)})
    _check_ids(asked, value)
    if asked.truncate and (limit := context_length(asked.model)) is not None:
        value = value[:, :limit]
    _check_length(asked, [value.shape[1]] * len(value))
    return Batch({"input_ids": value}, None, labels_of(value))


def _wrong_dtype(asked: _Asked, value: Tensor) -> HelmscopeError:
    wanted = "but token ids are int64 or int32, and images floats"
    return HelmscopeError(f"{asked.name} is a tensor of {value.dtype}, {wanted}")


def labels_of(ids: Tensor) -> tuple[tuple[str, ...], ...]:
    """What stands for tokens of which no more is known."""
    return tuple(tuple(str(k) for k in row) for row in ids.tolist())


def _from_strings(asked: _Asked, texts: list[str], tokenizer: Any) -> Batch:
    limit = context_length(asked.model)
    options = {"truncation": True, "max_length": limit} if asked.truncate and limit is not None else {}
    rows = encode(texts, tokenizer, as_targets=asked.name == "targets", **options)
    for i, row in enumerate(rows):
        if not row:
            raise HelmscopeError(f"{asked.name}[{i}] is {texts[i]!r:.60}, but the tokenizer makes no token of it")
    _check_length(asked, [len(row) for row in rows])
    n, pad = max(len(row) for row in rows), tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    ids = torch.tensor([row + [pad or 0] * (n - len(row)) for row in rows], device="cpu")
    _check_ids(asked, ids)
    real = torch.tensor([[True] * len(row) + [False] * (n - len(row)) for row in rows], device="cpu")
    labels = tuple(tuple(tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist())
    return Batch({"input_ids": ids, "attention_mask": real.long()}, None, labels, real)


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


def _check_ids(asked: _Asked, ids: Tensor) -> None:
    if ids.is_floating_point() or ids.dtype not in (torch.int64, torch.int32):
        raise _wrong_dtype(asked, ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise HelmscopeError(f"{asked.name} has shape {tuple(ids.shape)}, but token ids are (batch, n) with n >= 1")
    size = vocabulary_size(asked.model)
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        worst = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
        raise HelmscopeError(
            f"{asked.name} give the token id {worst}, but the model has embeddings 0 to {size - 1}: another tokenizer?"
        )


def _check_length(asked: _Asked, lengths: list[int]) -> None:
    limit = context_length(asked.model)
    for i, length in enumerate(lengths):
        if limit is not None and length > limit:
            raise HelmscopeError(
                f"{asked.name}[{i}] has {counted(length, 'token')}, but the model's context is {limit}: pass "
                "truncate=True"
            )
