"""A model from the Hub, from a folder or from memory: safetensors only, never remote code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.checkpoint import check_folder
from helmscope.types import HelmscopeError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Origin:
    """Where a model came from: its name, revision (the Hub's commit), a SHA-256 for each file of weights, and how its
    attention is computed when nobody records.

    >>> Origin("gpt2", "gpt2", None, {}, "sdpa", "float32", "cpu", "5.22.2").attention
    'sdpa'
    """

    name: str
    family: str
    revision: str | None
    hashes: Mapping[str, str]
    attention: str
    dtype: str
    device: str
    transformers: str


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in eval mode, its tokenizer where there is one, and its origin.

    >>> Loaded.__match_args__
    ('model', 'tokenizer', 'origin')
    """

    model: Any
    tokenizer: Any | None
    origin: Origin


def load(
    source: Any,
    *,
    revision: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    offline: bool = False,
) -> Loaded:
    """A model by its Hub id or folder, or one that is in memory already.

    Only safetensors are read, and no code of the repository is ever run. ``offline`` looks at local files alone.
    ``dtype``, ``device`` and ``device_map`` are those of transformers; where no dtype is given it is float32 on a CPU,
    whose half precision is slow and coarse, else that of the files. Of a model in memory nothing is changed. Refused in
    one sentence: a folder without weights, with pickled weights only, with a damaged file, with NaN or infinity in a
    tensor, of a family that transformers does not know.

    >>> load("no/such-model", offline=True)
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: model is 'no/such-model', but it could not be loaded: ...
    """
    transformers = _transformers()
    if isinstance(source, torch.nn.Module):
        if not isinstance(source, transformers.PreTrainedModel):
            raise HelmscopeError(f"model is a {type(source).__name__}, but it must be a transformers PreTrainedModel")
        _check_numbers(source)
        return Loaded(source.eval(), tokenizer, _origin(source, type(source).__name__, None, {}))
    if not isinstance(source, str | Path):
        raise HelmscopeError(f"model is a {type(source).__name__}, but it must be a name, a folder or a model")
    hashes = check_folder(Path(source)) if Path(source).is_dir() else {}
    on_cpu = device_map is None and torch.device(device or "cpu").type == "cpu"
    precision = dtype or (torch.float32 if on_cpu else "auto")
    model = _from_files(str(source), revision, precision, device_map, offline or bool(hashes))
    if device is not None:
        model = model.to(device)
    _check_numbers(model)
    words = tokenizer or _tokenizer(str(source), revision, offline or bool(hashes))
    commit = getattr(model.config, "_commit_hash", None) or revision
    return Loaded(model.eval(), words, _origin(model, str(source), commit, hashes))


def load_all(sources: Sequence[Any], *, revisions: Sequence[str | None] = (None,), **options: Any) -> Iterator[Loaded]:
    """Models one after another, such as the checkpoints of a training: every source at every revision.

    >>> [loaded.origin.name for loaded in load_all([])]
    []
    """
    for source in sources:
        for revision in revisions:
            yield load(source, revision=revision, **options)


def _from_files(name: str, revision: str | None, dtype: torch.dtype | str, device_map: Any, offline: bool) -> Any:
    transformers = _transformers()
    options: dict[str, Any] = {"revision": revision, "local_files_only": offline, "trust_remote_code": False}
    places = {} if device_map is None else {"device_map": device_map}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        options |= {"config": config, "dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        model, info = _class_of(config).from_pretrained(name, **options, **places)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise HelmscopeError(f"model is '{name}', but it could not be loaded: {_one_line(error)}") from error
    missing = sorted(set(info["missing_keys"]) - set(model.all_tied_weights_keys or ()))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise HelmscopeError(
            f"model is '{name}', but its files lack the tensor '{missing[0]}'{more}: it would be random"
        )
    return model


def _class_of(config: Any) -> Any:
    """The class that the checkpoint was saved from where transformers has it, else a language model, else the trunk."""
    transformers = _transformers()
    named = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if named is not None:
        return named
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto
    raise HelmscopeError(f"model is of the family '{config.model_type}', but transformers has no model class for it")


def _tokenizer(name: str, revision: str | None, offline: bool) -> Any | None:
    transformers = _transformers()
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            name, revision=revision, local_files_only=offline, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError, TypeError):  # a model without a tokenizer still takes token ids
        return None
    return found if found.vocab_size else None  # of a folder without its files transformers makes an empty one


def _check_numbers(model: Any) -> None:
    for name, value in model.named_parameters():
        if not value.is_meta and not bool(torch.isfinite(value.detach()).all()):
            raise HelmscopeError(f"model has NaN or infinite numbers in the tensor '{name}', but all must be finite")


def _origin(model: Any, name: str, revision: str | None, hashes: Mapping[str, str]) -> Origin:
    weight = next(model.parameters())
    return Origin(
        name=name,
        family=str(model.config.model_type),
        revision=revision,
        hashes=hashes,
        attention=str(model.config._attn_implementation),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        transformers=_transformers().__version__,
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "models") from error
    return transformers


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
