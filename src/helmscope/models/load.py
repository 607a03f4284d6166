"""A model from the Hub, from a folder or from memory: safetensors only, never remote code."""

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
from helmscope.models.boxed import MODELS, local_folder
from helmscope.models.checkpoint import check_folder
from helmscope.models.library import quiet, transformers_library
from helmscope.models.norm_reading import epsilon_of
from helmscope.models.tokenizer import read_tokenizer
from helmscope.store.atomic import one_line
from helmscope.types import HelmscopeError, counted, known_name, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from helmscope.models.checkpoint import Files

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WANTED = ("*.safetensors", "*.json", "*.txt", "*.model")  # of a repository: no pickles, no code


@dataclass(frozen=True)
class Origin:
    """Where a model came from: its name, revision (the Hub's commit), a SHA-256 for each file of weights, and how its
    attention is computed when nobody records. ``note`` says what the files lack of the model that config.json names.

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
    note: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """A model in eval mode, its tokenizer where there is one, and its origin; ``why`` a tokenizer that lies beside the
    model could not be read.

    >>> Loaded.__match_args__
    ('model', 'tokenizer', 'origin', 'why')
    """

    model: Any
    tokenizer: Any | None
    origin: Origin
    why: str | None = None

    def __repr__(self) -> str:
        words = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        origin = self.origin
        return f"<Loaded {origin.name}: {type(self.model).__name__}, {words}, {origin.dtype} on {origin.device}>"


def load(
    source: Any,
    *,
    revision: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    attention: str | None = None,
    loops: int | None = None,
    offline: bool = False,
) -> Loaded:
    """A model in the box ("A", "B", "tied"), by its Hub id or folder, or one that is in memory already.

    Only safetensors are read, and no code of the repository is ever run. ``offline`` looks at local files alone.
    ``dtype``, ``device``, ``device_map`` and ``attention`` ("eager", "sdpa") are those of transformers; where no dtype
    is given it is float32 on a CPU, whose half precision is slow and coarse, else that of the files. ``loops`` calls
    the one block of a tied model so many times. A folder that is named as a model in the box is meant by "./A". A model
    in memory is put into eval mode, else nothing of it is changed. Where the files lack nothing but the head that
    config.json names, the model without its head is loaded, and ``origin.note`` says so. Refused in one sentence: a
    folder without weights, with pickled weights only, with a damaged file, with quantized weights, with NaN or infinity
    in a tensor, with a config.json that asks for far more than the files hold, of a family that transformers does not
    know.

    >>> load("no/such-model", offline=True)
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: model is 'no/such-model', but it is neither a folder nor in the box (A, ...
    """
    transformers = transformers_library()
    if isinstance(source, torch.nn.Module):
        if not isinstance(source, transformers.PreTrainedModel):
            raise HelmscopeError(f"model is a {type(source).__name__}, but it must be a transformers PreTrainedModel")
        given = {
            "revision": revision,
            "dtype": dtype,
            "device": device,
            "device_map": device_map,
            "attention": attention,
            "loops": loops,
        }
        for name, value in given.items():
            if value is not None:
                raise HelmscopeError(
                    f"{name} is {value!r}, but the model is in memory already, where nothing is changed"
                )
        _check_numbers(source)
        return Loaded(source.eval(), tokenizer, origin_of(source, type(source).__name__))
    if not isinstance(source, str | Path):
        raise HelmscopeError(
            f"model is a {type(source).__name__}, but it must be a name, a folder or a model; of several take load_all"
        )
    local = local_folder(source)
    if revision is not None and local is not None:
        raise HelmscopeError(
            f"revision is {revision!r}, but '{source}' is a folder or in the box, and only a model on the Hub has "
            "revisions: give the folder of that checkpoint, and no revision"
        )
    folder = _from_hub(str(source), revision, offline) if local is None else local
    files = check_folder(folder)
    on_cpu = device_map is None and str(device or "cpu").startswith("cpu")
    places = {"device_map": device_map, "attn_implementation": attention}
    model, note = _from_folder(folder, files, dtype or (torch.float32 if on_cpu else "auto"), places)
    if device is not None:
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise HelmscopeError(f"device is '{device}', but torch cannot use it here: {one_line(error)}") from error
    _check_numbers(model)
    if loops is not None:
        _loop(model, loops)
    commit = folder.name if local is None else None
    words, why = (tokenizer, None) if tokenizer is not None else read_tokenizer(folder)
    origin = replace(origin_of(model, str(source), commit, files.hashes), note=note)
    return Loaded(model.eval(), words, origin, why)


def _loop(model: Any, loops: int) -> None:
    """Have a tied block called another number of times."""
    config = model.config
    whole_number("loops", loops, at_least=1)
    if getattr(config, "num_hidden_groups", None) != 1:
        raise HelmscopeError(f"loops is {loops}, but only a model of one tied block, such as 'tied', can be looped")
    config.num_hidden_layers = loops


def ensure_loaded(model: Any, *, tokenizer: Any = None, **options: Any) -> Loaded:
    """``load``, but for a model that is ``Loaded`` already."""
    _check_options(options)
    if not isinstance(model, Loaded):
        return load(model, tokenizer=tokenizer, **options)
    if options:
        raise HelmscopeError(f"{sorted(options)[0]} is given, but the model is loaded already: pass it to load")
    return model


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        known_name("option", name, set(inspect.signature(load).parameters) - {"source"})


def load_all(sources: Sequence[Any], *, revisions: Sequence[str | None] = (None,), **options: Any) -> Iterator[Loaded]:
    """Models one after another, such as the checkpoints of a training: every source at every revision.

    >>> [loaded.origin.name for loaded in load_all([])]
    []
    """
    for name, several in (("sources", sources), ("revisions", revisions)):
        if isinstance(several, str | Path) or not isinstance(several, Iterable):
            raise HelmscopeError(f"{name} is {several!r:.80}, but it must be a list of them, even for one alone")
    _check_options(options)
    return (load(source, revision=revision, **options) for source in sources for revision in revisions)


def _from_hub(name: str, revision: str | None, offline: bool) -> Path:
    """The files of a model on the Hub in the local cache, in a folder that is named by the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        found = snapshot_download(name, revision=revision, local_files_only=offline, allow_patterns=list(WANTED))
    except (OSError, ValueError, HFValidationError) as error:
        absent = offline and not isinstance(error, HFValidationError)
        why = "'s local cache alone: leave out offline to ask the Hub itself" if absent else f": {one_line(error)}"
        raise HelmscopeError(
            f"model is '{name}', but it is neither a folder nor in the box ({', '.join(MODELS)}), and could not be had "
            f"from the Hub{why}"
        ) from error
    return Path(str(found))


def _from_folder(
    folder: Path, files: Files, dtype: torch.dtype | str, places: dict[str, Any]
) -> tuple[Any, str | None]:
    """The model, and what its files lack where it can do without."""
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
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # which are named below
            model, info = kind.from_pretrained(folder, **options, **places)
    except HelmscopeError:
        raise
    except Exception as error:  # whatever a damaged configuration makes transformers stumble over
        raise HelmscopeError(f"model is in '{folder}', but it could not be loaded: {one_line(error)}") from error
    check_dtypes(model, info["unexpected_keys"], folder, files, quantized=quantized)
    wrong = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys") or ())
    if wrong:
        raise HelmscopeError(
            f"model is in '{folder}', but the tensor '{wrong[0]}' has another shape than config.json asks"
        )
    _check_depth(model, info["unexpected_keys"], folder)
    missing = sorted(set(info["missing_keys"]) - set(model.all_tied_weights_keys or ()))
    return _without_head(model, missing, folder) if missing else (model, None)


def _without_head(model: Any, missing: list[str], folder: Path) -> tuple[Any, str]:
    """The part of a model that its files hold, and a sentence on the rest, where nothing but a head is missing: what
    lies behind the trunk, or the trunk's own pooler. No block reads either.
    """
    trunk, whole = model.base_model, type(model).__name__
    prefix = f"{model.base_model_prefix}." if trunk is not model else ""
    behind = [name for name in missing if prefix and not name.startswith(prefix)]
    pooler = [name for name in missing if name.startswith(f"{prefix}pooler.")]
    pooler = pooler if "add_pooling_layer" in inspect.signature(type(trunk)).parameters else []
    needed = sorted(set(missing) - {*behind, *pooler})
    if needed:
        raise HelmscopeError(f"model is in '{folder}', but its files lack the tensor {_first_of(needed)}")
    if pooler:
        trunk.pooler = None  # as add_pooling_layer=False leaves it
    says = f"config.json names a {whole}, but the files lack its head, {_first_of(missing)}: "
    if not behind:
        return model, f"{says}it is read without"
    return trunk, f"{says}its {type(trunk).__name__} alone is read"


def _first_of(names: list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _check_depth(model: Any, unexpected: Iterable[str], folder: Path) -> None:
    """Refuse files that hold more layers than the model has; other tensors that nobody asked for are let be."""
    lengths = {path: len(part) for path, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)}
    trunk = f"{model.base_model_prefix}."  # which the files of a trunk leave out, and those of a whole model have
    for name in sorted(unexpected):
        for found in re.finditer(r"\.(\d+)\.", name):
            stem = name[: found.start()]
            for path in (stem, trunk + stem, stem.removeprefix(trunk)):
                if int(found.group(1)) >= lengths.get(path, math.inf):
                    raise HelmscopeError(
                        f"model is in '{folder}', whose files hold the tensor '{name}', but by config.json '{path}' "
                        f"has {counted(lengths[path], 'layer')}"
                    )


def _class_of(config: Any) -> Any:
    """The class that the checkpoint was saved from where transformers has it, else a language model, else the trunk."""
    transformers = transformers_library()
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    autos = [transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM, transformers.AutoModel]
    if getattr(config, "is_encoder_decoder", False):  # else transformers would take the decoder for a model
        autos.insert(0, transformers.AutoModelForSeq2SeqLM)
    for auto in autos:
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple | list) else found
    raise HelmscopeError(f"model is of the family '{config.model_type}', but transformers has no model class for it")


def _check_numbers(model: Any) -> None:
    for name, value in model.named_parameters():
        if value.dtype not in DTYPES:
            kind = str(value.dtype).removeprefix("torch.")
            raise HelmscopeError(
                f"model has the tensor '{name}' in {kind}, but weights must be float64, float32, bfloat16 or float16: "
                "load a copy that is not quantized"
            )
        if not value.is_meta and not bool(torch.isfinite(value.detach()).all()):
            raise HelmscopeError(f"model has NaN or infinite numbers in the tensor '{name}', but all must be finite")
    for name, module in model.named_modules():
        eps = epsilon_of(module)
        if eps is not None and not 0 <= eps < math.inf:
            raise HelmscopeError(f"model has the norm '{name}' with the epsilon {eps:g}, but it must be 0 or more")


def origin_of(
    model: Any, name: str, revision: str | None = None, hashes: Mapping[str, str] = MappingProxyType({})
) -> Origin:
    """What a manifest says of a model."""
    weight = next(model.parameters())
    return Origin(
        name=name,
        family=str(model.config.model_type),
        revision=revision,
        hashes=hashes,
        attention=str(model.config._attn_implementation),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        transformers=transformers_library().__version__,
    )
