"""What config.json asks for against what the files hold, before anything of that size is built.

A configuration is a few bytes that can ask for any number of layers and for weights of any size. So its depth is
compared with a bound before transformers reads it, and the model is built once on the meta device, where tensors have
a shape and no memory, until it has more weights than the files could ever fill.
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

# The words of a configuration for what transformers makes in a loop, and the most that is allowed of each. A tied block
# may be called far more often than the files have layers.
MOST = (
    (re.compile(r"(^|_)(layers|depths?|blocks|groups|stages)(_|$)|(^|_)(n|num)_layer$"), 10_000),
    (re.compile(r"(^|_)labels$"), 2_000_000),
)
# How much larger than its files a model may be. While it is built every weight counts, though several may come to share
# one tensor of the files; once they are tied only a head can be missing. Codes of 4 bits lie eight to a number.
GROWING, GROWN, PACKED = 4, 2, 8
MORE_NUMBERS = 2**27
TENSORS_PER_TENSOR, MORE_TENSORS = 16, 1_000

FLOATS = ("F64", "F32", "F16", "BF16")
SCALE = re.compile(r"(^|[._])(weight_scale(_inv)?|weight_zero_point|SCB|scales|qzeros)$")


def check_config(folder: Path, files: Files) -> None:
    """Refuse a config.json that asks for more layers than anybody builds."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # which transformers says better
    for name, value in _whole_numbers(config):
        for words, most in MOST:
            if words.search(name) and value > most:
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
    """Refuse a configuration that asks for far more weights than the files hold."""
    held = files.numbers * (PACKED if quantized else 1)
    most_tensors = TENSORS_PER_TENSOR * len(files.tensors) + MORE_TENSORS
    try:
        with torch.device("meta"), _counted(GROWING * held + MORE_NUMBERS, most_tensors):
            model = kind(copy.deepcopy(config))
        if sum(value.numel() for value in model.parameters()) > GROWN * held + MORE_NUMBERS:
            raise _TooLargeError(f"{GROWN * held + MORE_NUMBERS:,} numbers")
    except _TooLargeError as error:
        raise HelmscopeError(
            f"model is in '{folder}', whose config.json asks for more than {error}, but its files hold "
            f"{files.numbers:,} numbers in {len(files.tensors):,} tensors"
        ) from error
    except Exception:  # the load itself meets it again, and says what it is
        return


class _TooLargeError(Exception):
    pass


@contextmanager
def _counted(most_numbers: int, most_tensors: int) -> Iterator[None]:
    """Inside, this thread builds no module with more weights than that."""
    numbers, tensors, thread = 0, 0, threading.get_ident()

    def count(module: nn.Module, name: str, value: Tensor | nn.Module | None) -> None:
        nonlocal numbers, tensors
        if value is None or threading.get_ident() != thread:
            return
        tensors += 1
        if isinstance(value, torch.Tensor):  # a mask of bits is a quarter of as many numbers
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
    told = getattr(config, "quantization_config", None)
    return told is not None and bool(transformers_library().quantizers.AutoHfQuantizer.supports_quant_method(told))


def check_dtypes(model: Any, unexpected: Iterable[str], folder: Path, files: Files, *, quantized: bool) -> None:
    """Refuse weights that are stored as whole numbers or in 8 bits, and a scale of weights that nobody applied.

    What a quantizer of transformers has read is left to it, as long as it took all scales.
    """
    trunk = f"{model.base_model_prefix}."  # which the files of a trunk leave out, and those of a whole model have
    own = {name for name, _ in model.named_parameters()}
    for name, value in sorted(files.tensors.items()):
        taken = name.endswith("weight") or not own.isdisjoint((name, trunk + name, name.removeprefix(trunk)))
        if taken and value["dtype"] not in FLOATS and not quantized:
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
