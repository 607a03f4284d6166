"""Checks of config.json against the weight files, before anything of the requested size is allocated.

A few bytes of configuration can request any number of layers and weights of any size. So the number of layers is
compared with a bound before transformers reads it, and the model is built once on the meta device, where tensors have
a shape but no memory; the build stops as soon as it has more weights than the files could fill.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as registration

from helmscope.models.library import transformers_library
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor, nn

    from helmscope.models.checkpoint import Files

# Configuration keys that transformers turns into a loop, and the largest value allowed for each. The bound is not the
# number of layers in the files, since a tied block may be called far more often.
MOST = (
    (re.compile(r"(^|_)(layers|depths?|blocks|groups|stages)(_|$)|(^|_)(n|num)_layer$"), 10_000),
    (re.compile(r"(^|_)labels$"), 2_000_000),
)
# How many times larger than its files a model may be. During the build every weight counts, though several may later
# share one tensor of the files; once they are tied only a head can be missing. Eight 4-bit codes are packed into one
# stored number.
GROWING, GROWN, PACKED = 4, 2, 8
MORE_NUMBERS = 2**27
TENSORS_PER_TENSOR, MORE_TENSORS = 16, 1_000

FLOATS = ("F64", "F32", "F16", "BF16")
SCALE = re.compile(r"(^|[._])(weight_scale(_inv)?|weight_zero_point|SCB|scales|qzeros)$")


def check_config(folder: Path, files: Files) -> None:
    """Raise ``HelmscopeError`` if config.json requests an implausible number of layers or labels."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # transformers reports it in more detail
    for name, value in _whole_numbers(config):
        for key, most in MOST:
            if key.search(name) and value > most:
                raise HelmscopeError(
                    f"model is in '{folder}', whose config.json has {name} = {value}, but it may be at most {most:,}, "
                    f"and the files hold {len(files.tensors):,} tensors"
                )


def _whole_numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _whole_numbers(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _whole_numbers(part, name)


def check_blueprint(kind: Any, config: Any, folder: Path, files: Files, *, quantized: bool) -> None:
    """Raise ``HelmscopeError`` if the configuration requests far more weights than the files hold."""
    stored = files.numbers * (PACKED if quantized else 1)
    most_tensors = TENSORS_PER_TENSOR * len(files.tensors) + MORE_TENSORS
    try:
        with torch.device("meta"), _limit_size(GROWING * stored + MORE_NUMBERS, most_tensors):
            model = kind(copy.deepcopy(config))
        if sum(value.numel() for value in model.parameters()) > GROWN * stored + MORE_NUMBERS:
            raise _TooLargeError(f"{GROWN * stored + MORE_NUMBERS:,} numbers")
    except _TooLargeError as error:
        raise HelmscopeError(
            f"model is in '{folder}', whose config.json asks for more than {error}, but its files hold "
            f"{files.numbers:,} numbers in {len(files.tensors):,} tensors"
        ) from error
    except Exception:  # loading the model raises it again and reports it
        return


class _TooLargeError(Exception):
    pass


@contextmanager
def _limit_size(most_numbers: int, most_tensors: int) -> Iterator[None]:
    """Context manager: within it, this thread raises ``_TooLargeError`` once the modules it builds exceed a limit."""
    numbers, tensors, thread = 0, 0, threading.get_ident()

    def count(module: nn.Module, name: str, value: Tensor | nn.Module | None) -> None:
        nonlocal numbers, tensors
        if value is None or threading.get_ident() != thread:
            return
        tensors += 1
        if isinstance(value, torch.Tensor):  # count in units of float32: a boolean mask takes a quarter
            numbers += value.numel() * value.element_size() // 4 if value.element_size() < 4 else value.numel()
        if numbers > most_numbers:
            raise _TooLargeError(f"{most_numbers:,} numbers")
        if tensors > most_tensors:
            raise _TooLargeError(f"{most_tensors:,} tensors and modules")

    handles = [
        registration.register_module_parameter_registration_hook(count),
        registration.register_module_buffer_registration_hook(count),
        registration.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_quantized(config: Any) -> bool:
    """Whether transformers has a quantizer for the weights, which applies their scales."""
    method = getattr(config, "quantization_config", None)
    return method is not None and bool(transformers_library().quantizers.AutoHfQuantizer.supports_quant_method(method))


def check_dtypes(model: Any, unexpected: Iterable[str], folder: Path, files: Files, *, quantized: bool) -> None:
    """Raise ``HelmscopeError`` if weights are stored as integers or in 8 bits, or if a scale was not applied to them.

    The dtype is not checked where a quantizer of transformers has read the weights, as long as it used all scales.
    """
    trunk = f"{model.base_model_prefix}."  # a prefix that only the files of a full model have
    parameters = {name for name, _ in model.named_parameters()}
    for name, value in sorted(files.tensors.items()):
        is_weight = name.endswith("weight") or not parameters.isdisjoint((name, trunk + name, name.removeprefix(trunk)))
        if is_weight and value["dtype"] not in FLOATS and not quantized:
            raise HelmscopeError(
                f"model is in '{folder}', whose files hold the tensor '{name}' as {value['dtype']}, but weights must "
                "be F64, F32, F16 or BF16: load a copy that is not quantized"
            )
    scale = next((name for name in sorted(unexpected) if SCALE.search(name)), None)
    if scale is not None:
        raise HelmscopeError(
            f"model is in '{folder}', whose files hold the scale '{scale}', but {type(model).__name__} does not apply "
            "it to its weights: load a copy that is not quantized"
        )
