"""The files of a checkpoint before anybody trusts them: safetensors headers read with care, pickles refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.store.manifest import hash_file
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_HEADER = 100_000_000  # bytes, the bound of the format itself
SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, eq=False)
class Files:
    """The files of weights in a model's folder: a SHA-256 for each, and dtype, shape and place of every tensor."""

    hashes: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Any]]

    @property
    def numbers(self) -> int:
        """How many numbers the tensors hold."""
        return sum(math.prod(value["shape"]) for value in self.tensors.values())


def check_folder(folder: Path) -> Files:
    """What the files of weights in a model's folder hold; what is wrong with them is one sentence."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickled:
            kind = _saved_class(folder)
            raise HelmscopeError(
                f"model folder '{folder}' has pickled weights only ('{pickled[0]}'), which can run code when they are "
                f'read: convert them where you trust them, python -c "from transformers import {kind}; '
                f"{kind}.from_pretrained('{folder}').save_pretrained('NEW_FOLDER')\""
            )
        raise HelmscopeError(f"model folder '{folder}' has no file of weights, but it must hold *.safetensors")
    tensors: dict[str, Any] = {}
    for path in files:
        if not path.is_file():
            raise HelmscopeError(f"model folder '{folder}' has '{path.name}', which is no file that can be read")
        tensors |= check_file(path)
    for path in folder.glob("*.safetensors.index.json"):
        _check_index(path, {each.name for each in files})
    return Files({path.name: hash_file(path) for path in files}, tensors)


def _saved_class(folder: Path) -> str:
    """The class that config.json says the weights were saved from, else that of language models; for a line of shell,
    and so never anything but a name.
    """
    try:
        name = json.loads((folder / "config.json").read_bytes())["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        name = None
    return name if isinstance(name, str) and name.isascii() and name.isidentifier() else "AutoModelForCausalLM"


def _check_index(path: Path, beside: set[str]) -> None:
    """The list of a model in several files names files beside it, and no others. Names are compared, never opened: a
    name may be longer than the file system can take.
    """
    try:
        parts = json.loads(path.read_bytes())["weight_map"]
        names = set(parts.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HelmscopeError(f"file '{path}' has no weight_map from tensors to files") from error
    for name in sorted(map(str, names)):
        if name not in beside:
            raise HelmscopeError(f"file '{path}' speaks of the file '{name:.80}', which is not beside it")


def check_file(path: Path) -> Mapping[str, Any]:
    """The header of a safetensors file: eight bytes of length, JSON, then the tensors without gap or overlap.

    Whatever is not so is a ``HelmscopeError`` that names the file and the tensor; nothing is allocated on the word of
    the file alone.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MOST_HEADER, size - 8):
            raise HelmscopeError(
                f"file '{path}' is cut short or no safetensors file: its header would have {length} bytes"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise HelmscopeError(
            f"file '{path}' has a header that is no JSON object: {' '.join(str(error).split())[:120]}"
        ) from error
    if not isinstance(header, dict):
        raise HelmscopeError(
            f"file '{path}' has a header that is a {type(header).__name__}, but it must be a JSON object"
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
            f"file '{path}' holds {size - 8 - length} bytes of tensors, but its header speaks of {end}"
        )
    return tensors


def _span(path: Path, name: str, value: Any) -> tuple[int, int, str]:
    """Where a tensor lies, if it is what it says."""
    what = f"file '{path}' describes the tensor '{name:.80}'"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise HelmscopeError(f"{what} without dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in SIZES if isinstance(dtype, str) else True:
        raise HelmscopeError(f"{what} with the dtype {dtype!r:.40}, which is not known")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise HelmscopeError(
            f"{what} with shape {shape!r:.60} and data_offsets {offsets!r:.60}, which must be whole numbers"
        )
    count = SIZES[dtype]
    for extent in shape:
        count *= extent
    if offsets[1] - offsets[0] != count:
        raise HelmscopeError(f"{what} as {count} bytes in a span of {offsets[1] - offsets[0]}")
    return offsets[0], offsets[1], name


def _counts(value: Any) -> bool:
    whole = isinstance(value, list) and len(value) <= 64
    return whole and all(type(each) is int and 0 <= each < 2**63 for each in value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found
