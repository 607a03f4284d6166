"""Validation of checkpoint files before they are loaded: safetensors headers are checked, pickles rejected."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.store.manifest import hash_file
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_HEADER = 100_000_000  # bytes, the limit of the format itself
SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, eq=False)
class Files:
    """The weight files in a model's folder, with dtype, shape and offsets of every tensor."""

    paths: Sequence[Path]
    tensors: Mapping[str, Mapping[str, Any]]

    @cached_property
    def hashes(self) -> Mapping[str, str]:
        """The SHA-256 of each file, computed when it is first asked for: a model that is too large for the memory is
        refused before all of it is read.
        """
        return {path.name: hash_file(path) for path in self.paths}

    @property
    def numbers(self) -> int:
        """The total number of entries of all tensors."""
        return sum(math.prod(value["shape"]) for value in self.tensors.values())


def check_folder(folder: Path) -> Files:
    """Check the weight files in a model's folder and list their tensors; an invalid one raises ``HelmscopeError``."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickled:
            kind = _saved_class(folder)
            raise HelmscopeError(
                f"model folder '{folder}' has only pickled weights ('{pickled[0]}'), which can run code when "
                f'loaded: if you trust them, convert them by python -c "from transformers import {kind}; '
                f"{kind}.from_pretrained('{folder}').save_pretrained('NEW_FOLDER')\""
            )
        raise HelmscopeError(f"model folder '{folder}' has no weight files, but it must contain *.safetensors")
    tensors: dict[str, Any] = {}
    for path in files:
        if not path.is_file():
            raise HelmscopeError(f"model folder '{folder}' has '{path.name}', which is not a readable file")
        tensors |= check_file(path)
    for path in folder.glob("*.safetensors.index.json"):
        _check_index(path, {file.name for file in files})
    return Files(files, tensors)


def _saved_class(folder: Path) -> str:
    """The class that config.json names as that of the saved weights, else AutoModelForCausalLM.

    It goes into a shell command that the user may copy, so it is always a plain identifier.
    """
    try:
        name = json.loads((folder / "config.json").read_bytes())["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        name = None
    return name if isinstance(name, str) and name.isascii() and name.isidentifier() else "AutoModelForCausalLM"


def _check_index(path: Path, present: set[str]) -> None:
    """Raise ``HelmscopeError`` if the index of a sharded model lists a file that is not ``present`` in its folder.

    Names are compared, not opened: a name may be longer than the file system allows.
    """
    try:
        names = set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HelmscopeError(f"file '{path}' has no weight_map from tensors to files") from error
    for name in sorted(map(str, names)):
        if name not in present:
            raise HelmscopeError(f"file '{path}' lists the file '{name:.80}', which is not in its folder")


def check_file(path: Path) -> Mapping[str, Any]:
    """Check the header of a safetensors file and return its tensors: dtype, shape and data_offsets by name.

    The format is eight bytes of length, JSON, then the tensors without gap or overlap. Anything else raises
    ``HelmscopeError``, which names the file and the tensor. No memory is allocated by a size that only the file claims.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise HelmscopeError(
                f"file '{path}' is cut short or not a safetensors file: its header would have {length} bytes"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise HelmscopeError(
            f"file '{path}' has a header that is not a JSON object: {' '.join(str(error).split())[:120]}"
        ) from error
    if not isinstance(header, dict):
        raise HelmscopeError(
            f"file '{path}' has a header that is {type_with_article(header)}, but it must be a JSON object"
        )
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    spans = sorted(_span(path, name, value) for name, value in tensors.items())
    end = 0
    for begin, stop, name in spans:
        if begin != end:
            raise HelmscopeError(f"file '{path}' has a gap or an overlap before the tensor '{name:.80}'")
        end = stop
    if end != size - 8 - length:
        raise HelmscopeError(
            f"file '{path}' holds {size - 8 - length} bytes of tensors, but its header describes {end}"
        )
    return tensors


def _span(path: Path, name: str, value: Any) -> tuple[int, int, str]:
    """The bytes of a tensor, (begin, end, name), after a check of its description."""
    description = f"file '{path}' describes the tensor '{name:.80}'"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise HelmscopeError(f"{description} without dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in SIZES if isinstance(dtype, str) else True:
        raise HelmscopeError(f"{description} with the dtype {dtype!r:.40}, which is unknown")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise HelmscopeError(
            f"{description} with shape {shape!r:.60} and data_offsets {offsets!r:.60}, which must be whole numbers"
        )
    count = SIZES[dtype]
    for extent in shape:
        count *= extent
    if offsets[1] - offsets[0] != count:
        raise HelmscopeError(f"{description} as {count} bytes in a span of {offsets[1] - offsets[0]}")
    return offsets[0], offsets[1], name


def _is_sizes(value: Any) -> bool:
    """Whether a value is a short list of non-negative 64-bit integers."""
    is_short_list = isinstance(value, list) and len(value) <= 64
    return is_short_list and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a name occurs twice")
    return unique
