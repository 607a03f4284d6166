"""Experiments register themselves by the id of their claim; an entry of the catalogue cannot name one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.reading import read_catalogue
from helmscope.runs.attempt import described
from helmscope.store.manifest import hash_bytes, hash_file
from helmscope.types import HelmscopeError, known_name, real_number, seed_number, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.finding import Finding


@dataclass(frozen=True)
class Case:
    """How an experiment is run: its seed, and whether quickly, with fewer replicates.

    >>> Case(quick=True).count(128, quick=32)
    32
    """

    seed: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        seed_number(self.seed)
        if not isinstance(self.quick, bool):
            raise HelmscopeError(f"quick is {self.quick!r}, but it must be True or False")

    def count(self, full: int, *, quick: int) -> int:
        """How many replicates: ``full``, or ``quick`` where the run is."""
        return quick if self.quick else full

    def stream(self, number: int) -> int:
        """A seed for one of several independent draws of an experiment, told apart by ``number``.

        >>> Case(seed=1).stream(0) == Case(seed=1).stream(1)
        False
        """
        number = whole_number("number", number, at_least=0)
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])

    def normal(self, *shape: int, stream: int) -> Tensor:
        """Independent standard normal numbers, float64.

        >>> Case(seed=1).normal(2, 3, stream=0).shape
        torch.Size([2, 3])
        """
        import torch

        generator = torch.Generator().manual_seed(self.stream(stream))
        return torch.randn(*shape, generator=generator, dtype=torch.float64)


Experiment = Callable[[Case], "Finding"]


@dataclass(frozen=True)
class Registered:
    """An experiment, and about how many seconds it takes.

    >>> Registered("my-claim", lambda case: None, seconds=2.0).claim
    'my-claim'
    """

    claim: str
    function: Experiment
    seconds: float


# in the order of their decoration; two folders may hold experiments for claims of the same id
_REGISTERED: list[Registered] = []


def experiment(claim: str, *, seconds: float = 1.0) -> Callable[[Experiment], Experiment]:
    """Registers the decorated function, Case -> Finding, as the experiment of a claim. ``seconds`` is about how long
    it takes, to be said beforehand.

    >>> @experiment("doctest-claim")
    ... def trial(case): ...
    >>> _REGISTERED.pop().seconds
    1.0
    """
    if not isinstance(claim, str):
        raise HelmscopeError(f"claim is a {type(claim).__name__}, but it must be an id: @experiment('my-claim')")
    seconds = real_number("seconds", seconds, above=0)

    def register(function: Experiment) -> Experiment:
        if not inspect.isfunction(function):
            raise HelmscopeError(f"experiment of '{claim}' is a {type(function).__name__}, but it must be a function")
        _REGISTERED.append(Registered(claim, function, seconds))
        return function

    return register


def experiments(folder: str | Path | None = None) -> dict[str, Registered]:
    """The experiments by claim, sorted: the packaged ones, or with ``folder`` those of a user's catalogue, **whose
    Python files are run**. One that no entry of the catalogue asks for is refused, and so are two for one claim.

    >>> "kuramoto" in experiments()
    True
    """
    entries = read_catalogue(folder)
    if folder is None:
        modules = _packaged()
    else:
        modules = [_run_file(path) for path in sorted(Path(folder).resolve().glob("*.py"))]
    found: dict[str, Registered] = {}
    for each in _REGISTERED:
        if each.function.__module__ in modules:
            known_name("claim of an experiment", each.claim, entries)
            if each.claim in found:
                places = f"{_place(found[each.claim].function)} and {_place(each.function)}"
                raise HelmscopeError(f"claim '{each.claim}' has two experiments, {places}, but it must have one")
            found[each.claim] = each
    return dict(sorted(found.items()))


def code_file(function: Experiment) -> Path:
    """The file that an experiment stands in.

    >>> code_file(experiments()["rate"].function).name
    'rate.py'
    """
    return Path(inspect.getfile(function))


def _place(function: Experiment) -> str:
    return (
        f"{function.__qualname__} ({code_file(function).name}, line {inspect.unwrap(function).__code__.co_firstlineno})"
    )


def _packaged() -> list[str]:
    """The names of the packaged experiments' modules, imported."""
    package = importlib.import_module("helmscope.claims.experiments")
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in names:
        importlib.import_module(name)
    return names


class _FromSource(SourceFileLoader):
    """Takes no bytecode that Python kept: it is told from its source by size and second, and an edit may change neither
    of them.
    """

    def path_stats(self, path: str) -> Mapping[str, float]:
        """None: the loader then compiles the source and keeps nothing."""
        raise OSError(f"{path} is to be compiled")


def _run_file(path: Path) -> str:
    """The name of the module that a user's file is run as; once in a process, and again where it has changed."""
    digest = hash_bytes(f"{path} {hash_file(path)}".encode())
    name = f"helmscope_claims_{digest[:16]}_{path.stem}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py":
        raise HelmscopeError(f"{path} cannot be run: it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))  # so that a file may import its neighbors
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, HelmscopeError):
            raise
        raise HelmscopeError(f"{path} cannot be run: {described(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    return name
