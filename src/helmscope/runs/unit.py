"""A unit of work: a function, its parameters and a name. It knows nothing of the engine that runs it."""

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
from helmscope.types import HelmscopeError


@dataclass(frozen=True, eq=False)
class Unit:
    """``function(**parameters)``, whose result is kept under ``name``.

    The result is an xarray Dataset, bytes, or what JSON can hold, and it depends on the parameters alone, not on the
    time, a global seed or other units; the parameters stay as they are. The name is that of a file, and stands once in
    a run.

    Function and parameters are anything that can be pickled, to reach another process: no lambda, no function inside a
    function. A generator of random numbers is refused too, because units would share its state: pass a seed.

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
                f"function of unit '{self.name}' is a {type(self.function).__name__}, but it must be callable"
            )
        if not isinstance(self.parameters, Mapping):
            raise HelmscopeError(
                f"parameters of unit '{self.name}' is a {type(self.parameters).__name__}, but it must be a mapping"
            )
        _ = self.key

    @cached_property
    def key(self) -> str:
        """SHA-256 of the function's name and the parameters' values: equal keys ask for equal results. The code behind
        the name is not looked at.
        """
        of = f"of unit '{self.name}'"
        function = fingerprint(f"function {of}", self.function)
        return hash_bytes(encode([function, fingerprint(f"parameters {of}", self.parameters)], of))


def fingerprint(name: str, value: object) -> object:
    """JSON data that is the same for equal values, and another for values that differ in content or type; a list and a
    tuple count as one type, as they do in JSON. ``name`` stands in the sentence that refuses other types.

    >>> fingerprint("beta", 4.0), fingerprint("n", 4), fingerprint("times", (1, 2))
    ({'float': '0x1.0000000000000p+2'}, 4, [1, 2])
    """
    if isinstance(value, Enum):
        return {"enum": [_address(type(value)) or _reduced(name, type(value)), value.name]}
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
        return {"dict": _named(name, {text(f"a key of {name}", key): item for key, item in value.items()})}
    if isinstance(value, set | frozenset):
        return {"set": sorted(encode(fingerprint(f"an item of {name}", item), name).decode() for item in value)}
    if isinstance(value, functools.partial):
        return {"partial": fingerprint(name, [value.func, value.args, value.keywords])}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        return {"class": _address(type(value)) or _reduced(name, type(value)), "fields": _named(name, fields)}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return {"array": [str(value.dtype), list(value.shape), hash_bytes(_numbers(name, value))]}
    address = _address(value)
    return {"object": _reduced(name, value)} if address is None else {"name": address}


def _named(name: str, values: Mapping[str, object]) -> dict[str, object]:
    return {key: fingerprint(f"{key} of {name}", item) for key, item in values.items()}


def _numbers(name: str, value: Any) -> bytes:
    """The memory of a NumPy array or scalar, or of a torch tensor, in C order."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            # by way of bytes, because NumPy does not know bfloat16
            flat = value.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
            return bytes(flat.view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes") and not value.dtype.hasobject:
        return bytes(value.tobytes())
    raise HelmscopeError(f"{name} is a {type(value).__name__} of {value.dtype}, but it must hold plain numbers densely")


def _address(thing: Any) -> str | None:
    """module.qualname of a function or class that is found under it; None for anything else."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str):
        return None
    found = reduce(lambda inner, part: getattr(inner, part, None), path.split("."), sys.modules.get(module))
    return f"{module}.{path}" if found is thing else None


def _reduced(name: str, thing: Any) -> object:
    """What ``thing`` is taken apart into on its way to another process: class, arguments, state."""
    if type(thing).__name__ in ("Generator", "RandomState", "Random"):
        raise HelmscopeError(f"{name} is a random {type(thing).__name__}, whose state units would share: pass a seed")
    try:
        parts = thing.__reduce_ex__(5)
    except Exception:  # whatever a class's own code raises
        parts = ""
    if isinstance(parts, str) or thing is parts[0]:
        shown = getattr(thing, "__qualname__", type(thing).__name__)
        raise HelmscopeError(
            f"{name} is {shown}, but it must be something that can be pickled, to reach another process: no lambda, no "
            "function inside a function"
        )
    return [fingerprint(name, list(part) if isinstance(part, Iterator) else part) for part in parts]
