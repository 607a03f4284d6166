"""``Unit``: a named function call, the smallest piece of work that an engine runs."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, reduce
from pathlib import PurePath
from typing import Any

from helmscope.store.manifest import hash_bytes
from helmscope.store.run_folder import file_name
from helmscope.store.strict_json import encode, text
from helmscope.types import HelmscopeError, type_with_article
from helmscope.types.display import ConciseRepr


@dataclass(frozen=True, eq=False)
class Unit(ConciseRepr):
    """The call ``function(**parameters)``, whose result is stored under ``name``.

    The result is an xarray Dataset, bytes, or JSON data. It must depend on the parameters only, not on the time, a
    global seed or other units, and the call must not modify the parameters. The name must be a valid file name and
    unique in a run.

    Function and parameters must be picklable, so that they can be sent to another process: no lambda, no nested
    function. Raises ``HelmscopeError`` otherwise, and for a random generator, whose state units would share: pass a
    seed.

    >>> import statistics
    >>> unit = Unit("mean", statistics.fmean, {"data": [1, 2, 4.5]})
    >>> unit.function(**unit.parameters), unit.key[:8]
    (2.5, 'a9099e1e')
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        file_name(self.name)
        if not callable(self.function):
            raise HelmscopeError(
                f"function of unit '{self.name}' is {type_with_article(self.function)}, but it must be callable"
            )
        if not isinstance(self.parameters, Mapping):
            raise HelmscopeError(
                f"parameters of unit '{self.name}' is {type_with_article(self.parameters)}, but it must be a mapping"
            )
        _ = self.key

    @cached_property
    def key(self) -> str:
        """SHA-256 of the function's name and the values of the parameters: units with equal keys have equal results, as
        long as the code of the function does not change.

        >>> Unit("beta-4.0", max, {"a": 1.0}).key == Unit("beta-4.0", max, {"a": 1.0}).key
        True
        """
        of_unit = f"of unit '{self.name}'"
        function = fingerprint(f"function {of_unit}", self.function)
        return hash_bytes(encode([function, fingerprint(f"parameters {of_unit}", self.parameters)], of_unit))


def fingerprint(name: str, value: object) -> object:
    """JSON data that identifies a value: equal for equal values, different for values that differ in content or type;
    lists and tuples count as the same type. Raises a ``HelmscopeError`` that names ``name`` for values that cannot be
    pickled.

    >>> fingerprint("beta", 4.0), fingerprint("n", 4), fingerprint("times", (1, 2))
    ({'float': '0x1.0000000000000p+2'}, 4, [1, 2])
    """
    if isinstance(value, Enum):
        return {"enum": [_import_path(type(value)) or _fingerprint_pickled(name, type(value)), value.name]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, bytes):
        return {"bytes": hash_bytes(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, list | tuple):
        return [fingerprint(f"item {i} of {name}", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {"dict": _fingerprint_items(name, {text(f"a key of {name}", key): item for key, item in value.items()})}
    if isinstance(value, set | frozenset):
        return {"set": sorted(encode(fingerprint(f"an item of {name}", item), name).decode() for item in value)}
    if isinstance(value, functools.partial):
        return {"partial": fingerprint(name, [value.func, value.args, value.keywords])}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        kind = _import_path(type(value)) or _fingerprint_pickled(name, type(value))
        return {"class": kind, "fields": _fingerprint_items(name, fields)}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return {"array": [str(value.dtype), list(value.shape), hash_bytes(_array_bytes(name, value))]}
    path = _import_path(value)
    return {"object": _fingerprint_pickled(name, value)} if path is None else {"name": path}


def _fingerprint_items(name: str, values: Mapping[str, object]) -> dict[str, object]:
    return {key: fingerprint(f"{key} of {name}", item) for key, item in values.items()}


def _array_bytes(name: str, value: Any) -> bytes:
    """The elements of a NumPy array or scalar, or of a torch tensor, as bytes in C order."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            # viewed as uint8, because NumPy has no bfloat16
            flat = value.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
            return bytes(flat.view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes") and not value.dtype.hasobject:
        return bytes(value.tobytes())
    raise HelmscopeError(
        f"{name} is {type_with_article(value)} of {value.dtype}, but it must be a dense array of plain numbers"
    )


def _import_path(value: Any) -> str | None:
    """module.qualname of a function or class that can be imported by it; None for anything else."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str):
        return None
    imported = reduce(lambda inner, part: getattr(inner, part, None), path.split("."), sys.modules.get(module))
    return f"{module}.{path}" if imported is value else None


def _fingerprint_pickled(name: str, value: Any) -> object:
    """The fingerprint of what pickle would write: class, arguments, state."""
    if type(value).__name__ in ("Generator", "RandomState", "Random"):
        raise HelmscopeError(f"{name} is a random {type(value).__name__}, whose state units would share: pass a seed")
    try:
        parts = value.__reduce_ex__(5)
    except Exception:  # the class's own code may raise anything
        parts = ""
    if isinstance(parts, str) or value is parts[0]:
        shown = getattr(value, "__qualname__", type(value).__name__)
        raise HelmscopeError(
            f"{name} is {shown}, but it must be picklable, to be sent to another process: no lambda, no nested function"
        )
    return [fingerprint(name, list(part) if isinstance(part, Iterator) else part) for part in parts]
