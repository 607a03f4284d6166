"""The identity of a model and its texts: hashes of weights, configuration and token ids, and prompts as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.models.premise import Simulated
from helmscope.runs.unit import fingerprint
from helmscope.stats.replicates import random_halves
from helmscope.store.manifest import hash_bytes
from helmscope.types import HelmscopeError, type_with_article
from helmscope.types.arguments import pluralized, short_repr

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | tuple[int, ...]
# settings that do not change what the model computes: where its configuration came from and how it is run
INCIDENTAL = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "_attn_implementation")


def hash_of(value: object) -> str:
    """SHA-256 of plain data as JSON with sorted keys.

    >>> hash_of({"b": 1, "a": [2]}) == hash_of({"a": [2], "b": 1})
    True
    """
    return hash_bytes(json.dumps(value, sort_keys=True, default=str).encode())


def hashed_tensors(tensors: Mapping[str, Tensor]) -> list[object]:
    """Name, dtype, shape and hash of every tensor, sorted by name.

    >>> import torch
    >>> hashed_tensors({"w": torch.zeros(2)})[0][0]
    'w'
    """
    return [[name, fingerprint(name, tensors[name])] for name in sorted(tensors)]


def wiring_of(model: Any) -> dict[str, object]:
    """Class and configuration of a transformers model, which determine how its weights are used; its origin and
    settings that have their default value are left out.
    """
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in INCIDENTAL}
    return {"class": type(model).__name__, "config": config}


def stamp_of(folder: Path, patterns: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time of the files in a folder that match one of the patterns. If it changes, so may
    the model.

    >>> stamp_of(Path("/no/such/folder"), ["*"])
    ()
    """
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    stats = [(path.name, path.stat()) for path in files if path.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def check_model_arguments(
    model: Any, *, loops: int | None, revision: str | None, device: str | None, truncate: bool
) -> None:
    """Raise HelmscopeError unless the arguments of a ``Subject`` have the right types and fit together."""
    if isinstance(model, str | Path):
        if not str(model).strip():
            raise HelmscopeError("model is '', but it must be a name, a folder or a model")
    elif not isinstance(model, Simulated):
        _check_in_memory(model, loops=loops, revision=revision, device=device)
    for name, value in (("revision", revision), ("device", device)):
        if value is not None and not isinstance(value, str):
            raise HelmscopeError(f"{name} is {short_repr(value)}, but it must be a str or None")
    if not isinstance(truncate, bool):
        raise HelmscopeError(f"truncate is {short_repr(truncate)}, but it must be True or False")


def _check_in_memory(model: Any, **options: Any) -> None:
    """Raise HelmscopeError unless ``model`` is a model, and if an option would change it: it is in memory already."""
    from helmscope.models.library import transformers_library
    from helmscope.models.load import LoadedModel

    if not isinstance(model, LoadedModel | transformers_library().PreTrainedModel):
        raise HelmscopeError(
            f"model is {type_with_article(model)}, but it must be a name, a folder, a transformers PreTrainedModel or "
            "what load returns"
        )
    for name, value in options.items():
        if value is not None:
            raise HelmscopeError(f"{name} is {value!r}, but the model is in memory already and is not changed")


def checked_prompts(texts: Any) -> tuple[Prompt, ...]:
    """Texts as a tuple of strings, or of rows of token ids of equal length; raises HelmscopeError otherwise.

    >>> checked_prompts([[1, 2], [3, 4]])
    ((1, 2), (3, 4))
    """
    rows = texts.tolist() if hasattr(texts, "tolist") else texts
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence):
        kind, hint = type_with_article(texts), ": pass [text]" if isinstance(texts, str) else ""
        raise HelmscopeError(f"texts is {kind}, but it must be a list of strings or of rows of token ids{hint}")
    if not rows:
        raise HelmscopeError("texts is empty, but it must hold at least one text")
    if all(isinstance(row, str) for row in rows):
        for i, row in enumerate(rows):
            if not row.strip():
                raise HelmscopeError(f"texts[{i}] is {short_repr(row)}, but a text must not be blank")
        return tuple(rows)
    for i, row in enumerate(rows):
        if not isinstance(row, list | tuple) or not row or not all(type(k) is int and k >= 0 for k in row):
            raise HelmscopeError(
                f"texts[{i}] is {short_repr(row)}, but texts must be all strings, or all rows of ids >= 0"
            )
        if len(row) != len(rows[0]):
            raise HelmscopeError(
                f"texts[{i}] has {pluralized(len(row), 'id')}, but texts[0] has {len(rows[0])}: lengths must be equal"
            )
    return tuple(tuple(row) for row in rows)


def as_inputs(prompts: Sequence[Prompt]) -> Any:
    """Prompts as inputs of ``record``: a list of strings, or rows of ids as a tensor."""
    import torch

    return list(prompts) if isinstance(prompts[0], str) else torch.tensor(prompts, device="cpu")


def split_prompts(
    prompts: Sequence[Prompt], token_ids: Sequence[tuple[int, ...]]
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Split prompts into two random halves; those with the same token ids as an earlier one are left out.

    The split depends only on the prompts: two models on the same texts, whose prompts are compared in pairs, have the
    same halves. Raises HelmscopeError if there are fewer than 4 different prompts.

    >>> first, second = split_prompts("abcda", [(1,), (2,), (3,), (4,), (1,)])
    >>> sorted(first + second)
    ['a', 'b', 'c', 'd']
    """
    by_ids: dict[tuple[int, ...], Prompt] = {}
    for ids, prompt in zip(token_ids, prompts, strict=True):
        by_ids.setdefault(ids, prompt)
    distinct = list(by_ids.values())
    if len(distinct) < 4:
        count = pluralized(len(distinct), "different prompt")
        raise HelmscopeError(f"texts holds {count}, but two halves need at least 4")
    first, second = random_halves(len(distinct), seed=int(hash_of(prompts)[:8], 16))
    return tuple(distinct[k] for k in first), tuple(distinct[k] for k in second)
