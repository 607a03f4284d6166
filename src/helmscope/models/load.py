"""Loading of models from the Hub, a folder or memory: only safetensors, never remote code."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.blueprint import check_blueprint, check_config, check_dtypes, is_quantized
from helmscope.models.bundled_models import MODELS, is_bundled, local_folder
from helmscope.models.checkpoint import check_folder
from helmscope.models.library import quiet, transformers_library
from helmscope.models.norm_reading import epsilon_of
from helmscope.models.tokenizer import read_tokenizer
from helmscope.runs.bar import progress_reporting
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError, check_integer, check_memory, check_name, pluralized, type_with_article
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from helmscope.models.checkpoint import Files

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WANTED = ("*.safetensors", "*.json", "*.txt", "*.model")  # files downloaded from a repository: no pickles, no code


@dataclass(frozen=True)
class ModelOrigin(ConciseRepr):
    """The origin of a model: its name, revision (a commit on the Hub), SHA-256 of each weight file, dtype and device.

    ``name`` is that of a bundled model or on the Hub, the name of the ``folder`` from which it was loaded, or the
    class of a model in memory; an untrained twin is named after the trained model and its seed. ``attention`` is the
    implementation used outside of recordings. ``note`` names what is missing in the files of the model that config.json
    describes; None if nothing is.

    >>> origin = ModelOrigin("my-model", "gpt2", None, {}, "sdpa", "float32", "cpu", "5.22.2")
    >>> origin.title
    'my-model (gpt2)'
    """

    name: str
    family: str
    revision: str | None
    hashes: Mapping[str, str]
    attention: str
    dtype: str
    device: str
    transformers: str
    note: str | None = None
    folder: str | None = None

    @property
    def title(self) -> str:
        """The name and the family of the model, as reprs and figures state them."""
        return f"{self.name} ({self.family})"


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """A model in eval mode, with its tokenizer (None if there is none) and its origin.

    ``tokenizer_error`` is the reason why the tokenizer in the model's folder could not be read; None if it could, or
    there is none.

    >>> LoadedModel.__match_args__
    ('model', 'tokenizer', 'origin', 'tokenizer_error')
    """

    model: Any
    tokenizer: Any | None
    origin: ModelOrigin
    tokenizer_error: str | None = None

    def __repr__(self) -> str:
        # the class of a tokenizer is one for all models
        size = getattr(self.tokenizer, "vocab_size", None)
        tokenizer = "no tokenizer" if self.tokenizer is None else "its tokenizer"
        tokenizer += f" of {size:,} tokens" if isinstance(size, int) else ""
        origin = self.origin
        return (
            f"<LoadedModel {origin.name}: {type(self.model).__name__}, {tokenizer}, {origin.dtype} on {origin.device}>"
        )


@progress_reporting(None, "loading a model")
def load(
    model: Any,
    *,
    revision: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    attention: str | None = None,
    loops: int | None = None,
    offline: bool = False,
) -> LoadedModel:
    """Load a bundled model ("A", "B", "tied"), from the Hub, from a folder, or take one that is in memory.

    Only safetensors are read, and no code from the repository is ever run. ``offline`` uses only local files.
    ``dtype``, ``device``, ``device_map`` and ``attention`` ("eager", "sdpa") are those of transformers; the default
    dtype is float32 on a CPU, where half precision is slow and coarse, else that of the files. ``loops`` is the number
    of times that the block of a tied model is called. "./A" is a folder that has the name of a bundled model. A
    model in memory is put into eval mode and otherwise not changed. If only the head that config.json names is missing
    from the files, the model is loaded without it, and ``origin.note`` says so.

    Raises ``HelmscopeError`` for a folder without weights, with only pickled weights, a damaged file, quantized
    weights, NaN or infinity in a tensor, a config.json that requests far more than the files hold, or an unknown
    family.

    >>> load("no/such-model", offline=True)
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: model is 'no/such-model', but it is neither a folder nor a bundled model (A, ...
    """
    transformers_library()  # its absence is reported before anything is downloaded
    if isinstance(model, torch.nn.Module):
        options = {
            "revision": revision,
            "dtype": dtype,
            "device": device,
            "device_map": device_map,
            "attention": attention,
            "loops": loops,
        }
        return _from_memory(model, tokenizer, options)
    if not isinstance(model, str | Path):
        raise HelmscopeError(
            f"model is {type_with_article(model)}, but it must be a name, a folder or a model; use load_all for several"
        )
    local = local_folder(model)
    if revision is not None and local is not None:
        raise HelmscopeError(
            f"revision is {revision!r}, but '{model}' is a folder or a bundled model, and only a model on the Hub has "
            "revisions: pass the folder of that checkpoint instead"
        )
    if local is None:
        _check_spelling(str(model))
    folder = _from_hub(str(model), revision, offline) if local is None else local
    files = check_folder(folder)
    on_cpu = device_map is None and str(device or "cpu").startswith("cpu")
    if on_cpu:
        check_memory(f"model is '{model}' with {files.numbers:,} weights in float32", files.numbers // 2)
    places = {"device_map": device_map, "attn_implementation": attention}
    loaded, note = _from_folder(folder, files, dtype or (torch.float32 if on_cpu else "auto"), places)
    loaded = loaded if device is None else _moved(loaded, device)
    _check_weights(loaded)
    if loops is not None:
        _set_loops(loaded, loops)
    commit = folder.name if local is None else None
    tokenizer, why = (tokenizer, None) if tokenizer is not None else read_tokenizer(folder)
    named_folder = None if local is None or is_bundled(model) else local.resolve()
    name = str(model) if named_folder is None else named_folder.name
    origin = origin_of(loaded, name, commit, files.hashes)
    origin = replace(origin, note=note, folder=None if named_folder is None else str(model))
    return LoadedModel(loaded.eval(), tokenizer, origin, why)


def _from_memory(model: torch.nn.Module, tokenizer: Any, options: Mapping[str, Any]) -> LoadedModel:
    """A model that is in memory, for which no option can be given: it is not changed."""
    if not isinstance(model, transformers_library().PreTrainedModel):
        raise HelmscopeError(f"model is {type_with_article(model)}, but it must be a transformers PreTrainedModel")
    for name, value in options.items():
        if value is not None:
            raise HelmscopeError(f"{name} is {value!r}, but the model is in memory already and is not changed")
    _check_weights(model)
    return LoadedModel(model.eval(), tokenizer, origin_of(model, type(model).__name__))


def _moved(model: Any, device: str | torch.device) -> Any:
    """The model on a device; raises ``HelmscopeError`` if torch cannot use it."""
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise HelmscopeError(f"device is '{device}', but torch cannot use it here: {one_line(error)}") from error


def _set_loops(model: Any, loops: int) -> None:
    """Set the number of times that the block of a tied model is called."""
    config = model.config
    check_integer("loops", loops, at_least=1)
    if getattr(config, "num_hidden_groups", None) != 1:
        raise HelmscopeError(f"loops is {loops}, but only a model of one tied block, such as 'tied', can be looped")
    config.num_hidden_layers = loops


def ensure_loaded(model: Any, *, tokenizer: Any = None, **options: Any) -> LoadedModel:
    """``load(model)``; a ``LoadedModel`` is returned unchanged."""
    if not isinstance(model, LoadedModel):
        return load(model, tokenizer=tokenizer, **options)
    if options:
        raise HelmscopeError(f"{sorted(options)[0]} is given, but the model is already loaded: pass it to load")
    return model


def check_options(options: Mapping[str, Any], caller: Callable[..., Any]) -> None:
    """Raise ``HelmscopeError`` for an option that neither ``caller`` nor ``load``, to which it passes them on, has."""
    parameters = [*inspect.signature(caller).parameters.values(), *inspect.signature(load).parameters.values()]
    for name in options:
        check_name("option", name, {each.name for each in parameters if each.kind is each.KEYWORD_ONLY})


def load_all(
    models: Sequence[Any], *, revisions: Sequence[str | None] = (None,), **options: Any
) -> Iterator[LoadedModel]:
    """Load several models one after another, such as training checkpoints: every model at every revision.

    Returns an iterator, so that only one model need be in memory. ``options`` are those of ``load``, whose errors are
    raised when the iterator reaches the model.

    >>> [loaded.origin.name for loaded in load_all([])]
    []
    """
    for name, several in (("models", models), ("revisions", revisions)):
        if isinstance(several, str | Path) or not isinstance(several, Iterable):
            raise HelmscopeError(f"{name} is {several!r:.80}, but it must be a list, even of one element")
    check_options(options, load_all)
    return (load(model, revision=revision, **options) for model in models for revision in revisions)


def _check_spelling(name: str) -> None:
    """Raise ``HelmscopeError`` for the name of a bundled model in the wrong case."""
    for model in MODELS:
        if name.lower() == model.lower():
            raise HelmscopeError(f"unknown model '{name}': did you mean '{model}'?")


def _from_hub(name: str, revision: str | None, offline: bool) -> Path:
    """Download a model from the Hub to the local cache; returns its folder, whose name is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = snapshot_download(name, revision=revision, local_files_only=offline, allow_patterns=list(WANTED))
    except HFValidationError as error:  # not a name that a model on the Hub can have
        raise HelmscopeError(
            f"model is '{name}', but there is no such folder, and it is neither a bundled model ({', '.join(MODELS)}) "
            "nor a Hub id such as 'owner/name'"
        ) from error
    except (OSError, ValueError) as error:
        unreachable = isinstance(error, LocalEntryNotFoundError) and not isinstance(
            error.__cause__, OfflineModeIsEnabled
        )
        if offline:
            why = "'s local cache: leave out offline to download it"
        else:
            why = " (the Hub cannot be reached)" if unreachable else f": {one_line(error)}"
        raise HelmscopeError(
            f"model is '{name}', but it is neither a folder nor a bundled model ({', '.join(MODELS)}), and could not "
            f"be loaded from the Hub{why}"
        ) from error
    return Path(str(folder))


def _from_folder(
    folder: Path, files: Files, dtype: torch.dtype | str, places: dict[str, Any]
) -> tuple[Any, str | None]:
    """Load the model of a folder; returns it with a note on a missing head, None if nothing is missing."""
    transformers = transformers_library()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    places = {name: value for name, value in places.items() if value is not None}
    check_config(folder, files)
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(folder, **options)
            kind, quantized = _class_of(config), is_quantized(config)
            check_blueprint(kind, config, folder, files, quantized=quantized)
            options |= {"config": config, "dtype": dtype, "use_safetensors": True}
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported below
            model, info = kind.from_pretrained(folder, **options, **places)
    except HelmscopeError:
        raise
    except Exception as error:  # a damaged configuration can raise anything
        raise HelmscopeError(f"model is in '{folder}', but it could not be loaded: {one_line(error)}") from error
    check_dtypes(model, info["unexpected_keys"], folder, files, quantized=quantized)
    wrong = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys") or ())
    if wrong:
        raise HelmscopeError(
            f"model is in '{folder}', but the tensor '{wrong[0]}' has a different shape than config.json requests"
        )
    _check_depth(model, info["unexpected_keys"], folder)
    missing = sorted(set(info["missing_keys"]) - set(model.all_tied_weights_keys or ()))
    return _without_head(model, missing, folder) if missing else (model, None)


def _without_head(model: Any, missing: list[str], folder: Path) -> tuple[Any, str]:
    """The model without its head or pooler, whose weights are missing, and a note on it.

    No block reads the head or the pooler. Raises ``HelmscopeError`` if any other weight is missing.
    """
    trunk, whole = model.base_model, type_with_article(model)
    prefix = f"{model.base_model_prefix}." if trunk is not model else ""
    head = [name for name in missing if prefix and not name.startswith(prefix)]
    pooler = [name for name in missing if name.startswith(f"{prefix}pooler.")]
    pooler = pooler if "add_pooling_layer" in inspect.signature(type(trunk)).parameters else []
    needed = sorted(set(missing) - {*head, *pooler})
    if needed:
        raise HelmscopeError(f"model is in '{folder}', but its files lack the tensor {_name_first(needed)}")
    if pooler:
        trunk.pooler = None  # as with add_pooling_layer=False
    note = f"config.json names {whole}, but the files lack its head, {_name_first(missing)}: "
    if not head:
        return model, f"{note}it is loaded without"
    return trunk, f"{note}only its {type(trunk).__name__} is loaded"


def _name_first(names: list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _check_depth(model: Any, unexpected: Iterable[str], folder: Path) -> None:
    """Raise ``HelmscopeError`` if the files hold more layers than the model; other unused tensors are ignored."""
    lengths = {path: len(part) for path, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)}
    trunk = f"{model.base_model_prefix}."  # a prefix that only the files of a full model have
    for name in sorted(unexpected):
        for match in re.finditer(r"\.(\d+)\.", name):
            stem = name[: match.start()]
            for path in (stem, trunk + stem, stem.removeprefix(trunk)):
                if int(match.group(1)) >= lengths.get(path, math.inf):
                    raise HelmscopeError(
                        f"model is in '{folder}', whose files hold the tensor '{name}', but by config.json '{path}' "
                        f"has {pluralized(lengths[path], 'layer')}"
                    )


def _class_of(config: Any) -> Any:
    """The class that saved the checkpoint if transformers has it, else a language model, else one without a head."""
    transformers = transformers_library()
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    autos = [transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel]
    if getattr(config, "is_encoder_decoder", False):  # else transformers would load only the decoder
        autos.insert(0, transformers.AutoModelForSeq2SeqLM)
    for auto in autos:
        if type(config) in auto._model_mapping:
            kind = auto._model_mapping[type(config)]
            return kind[0] if isinstance(kind, tuple | list) else kind
    raise HelmscopeError(f"model is of the family '{config.model_type}', but transformers has no model class for it")


def _check_weights(model: Any) -> None:
    """Raise ``HelmscopeError`` if a weight is quantized or not finite, or if the epsilon of a norm is invalid."""
    for name, value in model.named_parameters():
        if value.dtype not in DTYPES:
            kind = str(value.dtype).removeprefix("torch.")
            raise HelmscopeError(
                f"model has the tensor '{name}' in {kind}, but weights must be float64, float32, bfloat16 or float16: "
                "load a copy that is not quantized"
            )
        if not value.is_meta and not bool(torch.isfinite(value.detach()).all()):
            raise HelmscopeError(f"model has NaN or infinity in the tensor '{name}', but all weights must be finite")
    for name, module in model.named_modules():
        eps = epsilon_of(module)
        if eps is not None and not 0 <= eps < math.inf:
            raise HelmscopeError(f"model has the norm '{name}' with the epsilon {eps:g}, but it must be 0 or more")


def origin_of(
    model: Any, name: str, revision: str | None = None, hashes: Mapping[str, str] = MappingProxyType({})
) -> ModelOrigin:
    """The ``ModelOrigin`` of a loaded model."""
    weight = next(model.parameters())
    return ModelOrigin(
        name=name,
        family=str(model.config.model_type),
        revision=revision,
        hashes=hashes,
        attention=str(model.config._attn_implementation),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        transformers=transformers_library().__version__,
    )
