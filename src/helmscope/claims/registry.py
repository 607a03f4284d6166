"""The registry of experiments: each registers itself under the id of its claim, with ``@experiment``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.entry import Ground
from helmscope.claims.reading import read_catalogue
from helmscope.models.subject import Subject
from helmscope.runs.attempt import described
from helmscope.store.manifest import hash_bytes, hash_file
from helmscope.types import HelmscopeError, known_name, real_number, seed_number, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.finding import Finding


SIMULATION = Subject.simulation()


@dataclass(frozen=True)
class Case:
    """The conditions of one run of an experiment: its seed, its subject, and whether it is quick (fewer replicates).

    ``subject`` is the simulation or a model, ``other`` an optional second model. Raises HelmscopeError for a seed
    outside 0 to 2^32 - 1 and for arguments of the wrong type.

    >>> Case(quick=True).count(128, quick=32)
    32
    """

    seed: int = 0
    quick: bool = False
    subject: Subject = SIMULATION
    other: Subject | None = None

    def __post_init__(self) -> None:
        seed_number(self.seed)
        for name, value, kind in (("subject", self.subject, Subject), ("other", self.other, Subject | None)):
            if not isinstance(value, kind):
                raise HelmscopeError(f"{name} is a {type(value).__name__}, but it must be a Subject: Subject('A')")
        if not isinstance(self.quick, bool):
            raise HelmscopeError(f"quick is {self.quick!r}, but it must be True or False")

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The subject and, if there is one, the other subject.

        >>> Case(subject=Subject("A")).subjects
        (<Subject A: 128 texts>,)
        """
        return (self.subject,) if self.other is None else (self.subject, self.other)

    @property
    def names(self) -> tuple[str, ...]:
        """Short names of the subjects; if two are equal, each is followed by the first digits of its hash.

        >>> Case(subject=Subject("A"), other=Subject("tied")).names
        ('A', 'tied')
        """
        names = tuple(subject.name for subject in self.subjects)
        if len(set(names)) == len(names):
            return names
        return tuple(f"{subject.name} {subject.identity[:8]}" for subject in self.subjects)

    def count(self, full: int, *, quick: int) -> int:
        """The number of replicates: ``quick`` in a quick run, else ``full``.

        >>> Case().count(128, quick=32)
        128
        """
        return quick if self.quick else full

    def seed_for(self, number: int) -> int:
        """The seed of one of several independent samples of an experiment, numbered from 0.

        >>> Case(seed=1).seed_for(0) == Case(seed=1).seed_for(1)
        False
        """
        number = whole_number("number", number, at_least=0)
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])

    def normal(self, *shape: int, stream: int) -> Tensor:
        """A sample of independent standard normal values, float64; each ``stream`` has its own seed.

        >>> Case(seed=1).normal(2, 3, stream=0).shape
        torch.Size([2, 3])
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed_for(stream))
        return torch.randn(*shape, generator=generator, dtype=torch.float64)


Experiment = Callable[[Case], "Finding"]


@dataclass(frozen=True)
class Registered:
    """A registered experiment: its claim, function, approximate duration in seconds, the kinds of subject that it can
    run on, and its one or two default subjects, ``usual``.

    >>> Registered("my-claim", lambda case: None, seconds=2.0).usual
    (<Subject simulation>,)
    """

    claim: str
    function: Experiment
    seconds: float
    subjects: tuple[Ground, ...] = (Ground.SIMULATION,)
    usual: tuple[Subject, ...] = (SIMULATION,)

    def case(
        self, seed: int = 0, *, quick: bool = False, subject: Subject | None = None, other: Subject | None = None
    ) -> Case:
        """The conditions of a run on ``subject`` (and ``other``), by default on the ``usual`` ones.

        Raises HelmscopeError for a subject that the experiment cannot run on.

        >>> Registered("mine", lambda case: None, seconds=2.0).case(subject=Subject("A"))
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: subject of claim 'mine' is A, but this claim can be tried on a simulation only
        """
        if subject is None and other is not None:
            raise HelmscopeError("other is given, but subject is not: pass both")
        chosen = [one for one in (subject, other) if one is not None] or self.usual
        case = Case(seed, quick, *chosen)
        if case.other is not None and case.other == case.subject:
            raise HelmscopeError(f"other is {case.other.name}, but it must differ from subject")
        for name, tried in zip(("subject", "other"), case.subjects, strict=False):
            if ground_of(tried) not in self.subjects:
                allowed = " or ".join(f"a {ground.value}" for ground in self.subjects)
                raise HelmscopeError(
                    f"{name} of claim '{self.claim}' is {tried.name}, but this claim can be tried on {allowed} only"
                )
        if case.other is not None and len(self.usual) < 2:
            raise HelmscopeError(
                f"other of claim '{self.claim}' is {case.other.name}, but this claim is tried on one subject"
            )
        return case


def ground_of(subject: Subject) -> Ground:
    """The ground of a subject: simulation or model.

    >>> ground_of(Subject("A")).value
    'model'
    """
    return Ground.SIMULATION if subject.is_simulation else Ground.MODEL


# in order of registration; not a dict, since two folders may hold claims with the same id
_REGISTERED: list[Registered] = []


def experiment(
    claim: str,
    *,
    seconds: float = 1.0,
    subjects: Iterable[str] = (Ground.SIMULATION,),
    usual: Iterable[Subject] = (),
) -> Callable[[Experiment], Experiment]:
    """Decorator that registers a function, Case -> Finding, as the experiment of a claim.

    ``seconds`` is its approximate duration, shown before a run. ``subjects`` lists what it can run on: "simulation",
    "model" or both. ``usual`` holds its default subject: the simulation or, if it runs on models only, model A. Two
    subjects in ``usual`` declare that it takes a second one, ``case.other``. Raises HelmscopeError for arguments that
    are not allowed, and unless the decorated object is a function.

    >>> @experiment("doctest-claim")
    ... def trial(case): ...
    >>> _REGISTERED.pop().seconds
    1.0
    """
    if not isinstance(claim, str):
        raise HelmscopeError(f"claim is a {type(claim).__name__}, but it must be an id: @experiment('my-claim')")
    seconds = real_number("seconds", seconds, above=0)
    grounds, defaults = _check_grounds(claim, subjects), _check_usual(claim, usual)
    if not defaults:
        defaults = (SIMULATION,) if Ground.SIMULATION in grounds else (Subject(),)

    def register(function: Experiment) -> Experiment:
        if not inspect.isfunction(function):
            raise HelmscopeError(f"experiment of '{claim}' is a {type(function).__name__}, but it must be a function")
        registered = Registered(claim, function, seconds, grounds, defaults)
        registered.case()  # raises if the default subjects do not suit
        _REGISTERED.append(registered)
        return function

    return register


def _check_grounds(claim: str, subjects: Iterable[str]) -> tuple[Ground, ...]:
    if isinstance(subjects, str) or not isinstance(subjects, Iterable):
        raise HelmscopeError(f"subjects of '{claim}' is {subjects!r}, but it must be a tuple such as ('model',)")
    names = [known_name(f"subject of '{claim}'", str(name), [ground.value for ground in Ground]) for name in subjects]
    if not names or len(set(names)) < len(names):
        raise HelmscopeError(f"subjects of '{claim}' is {names}, but it must hold 'simulation', 'model' or both")
    return tuple(Ground(name) for name in names)


def _check_usual(claim: str, usual: Iterable[Subject]) -> tuple[Subject, ...]:
    subjects = tuple(usual) if isinstance(usual, Iterable) else (usual,)
    if len(subjects) > 2 or not all(isinstance(subject, Subject) for subject in subjects):
        raise HelmscopeError(f"usual of '{claim}' is {subjects!r:.80}, but it must hold one Subject or two")
    return subjects


def experiments(folder: str | Path | None = None) -> dict[str, Registered]:
    """All experiments by claim, in sorted order: the packaged ones, or those of a user's catalogue in ``folder``,
    **whose Python files are run**.

    Raises HelmscopeError for an experiment without a catalogue entry, and for two experiments of one claim.

    >>> "kuramoto" in experiments()
    True
    """
    entries = read_catalogue(folder)
    if folder is None:
        modules = _import_packaged()
    else:
        modules = [_run_file(path) for path in sorted(Path(folder).resolve().glob("*.py"))]
    by_claim: dict[str, Registered] = {}
    for registered in _REGISTERED:
        if registered.function.__module__ in modules:
            claim = known_name("claim of an experiment", registered.claim, entries)
            if claim in by_claim:
                both = f"{_location(by_claim[claim].function)} and {_location(registered.function)}"
                raise HelmscopeError(f"claim '{claim}' has two experiments, {both}, but it must have one")
            by_claim[claim] = registered
    return dict(sorted(by_claim.items()))


def code_file(function: Experiment) -> Path:
    """The source file of an experiment.

    >>> code_file(experiments()["rate"].function).name
    'rate.py'
    """
    return Path(inspect.getfile(function))


def _location(function: Experiment) -> str:
    return (
        f"{function.__qualname__} ({code_file(function).name}, line {inspect.unwrap(function).__code__.co_firstlineno})"
    )


def _import_packaged() -> list[str]:
    """Import the modules of the packaged experiments and return their names."""
    package = importlib.import_module("helmscope.claims.experiments")
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in names:
        importlib.import_module(name)
    return names


class _UncachedLoader(SourceFileLoader):
    """Ignores cached bytecode: Python validates it by the size and the modification time in seconds of its source, and
    an edit may change neither.
    """

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Raise OSError, so that the loader compiles the source and writes no cache."""
        raise OSError(f"{path} has no cached bytecode")


def _run_file(path: Path) -> str:
    """Run a user's file as a module and return its name; once per process, and again if the file has changed."""
    digest = hash_bytes(f"{path} {hash_file(path)}".encode())
    name = f"helmscope_claims_{digest[:16]}_{path.stem}"
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, path, loader=_UncachedLoader(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py":
        raise HelmscopeError(f"{path} cannot be run: it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))  # so that the file can import its neighbors
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
