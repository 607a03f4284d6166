"""Experiments register themselves by the id of their claim; an entry of the catalogue cannot name one."""

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
    """How an experiment is run: its seed, whether quickly, with fewer replicates, and on what: ``subject`` is the
    simulation or a model, ``other`` a second model where there is one.

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
        """The subject, and the other one where there is one.

        >>> Case(subject=Subject("A")).subjects
        (<Subject A: 128 texts>,)
        """
        return (self.subject,) if self.other is None else (self.subject, self.other)

    @property
    def names(self) -> tuple[str, ...]:
        """Short names of the subjects; where two are the same, each with the beginning of its identity.

        >>> Case(subject=Subject("A"), other=Subject("tied")).names
        ('A', 'tied')
        """
        names = tuple(each.name for each in self.subjects)
        if len(set(names)) == len(names):
            return names
        return tuple(f"{each.name} {each.identity[:8]}" for each in self.subjects)

    def count(self, full: int, *, quick: int) -> int:
        """How many replicates: ``full``, or ``quick`` where the run is."""
        return quick if self.quick else full

    def seed_for(self, number: int) -> int:
        """A seed for one of several independent draws of an experiment, told apart by ``number``.

        >>> Case(seed=1).seed_for(0) == Case(seed=1).seed_for(1)
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

        generator = torch.Generator().manual_seed(self.seed_for(stream))
        return torch.randn(*shape, generator=generator, dtype=torch.float64)


Experiment = Callable[[Case], "Finding"]


@dataclass(frozen=True)
class Registered:
    """An experiment, about how many seconds it takes, on what it can be run, and on what it is run where nobody says:
    one subject, or two.

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
        """How it is run on ``subject`` (and ``other``), or on its usual ones where None. What it cannot be run on is
        refused.

        >>> Registered("mine", lambda case: None, seconds=2.0).case(subject=Subject("A"))
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: subject of claim 'mine' is A, but this claim can be tried on a simulation only
        """
        if subject is None and other is not None:
            raise HelmscopeError("other is given, but subject is not: name the first one too")
        given = [each for each in (subject, other) if each is not None] or self.usual
        case = Case(seed, quick, *given)
        if case.other is not None and case.other == case.subject:
            raise HelmscopeError(f"other is {case.other.name}, but it must be another one than the subject")
        for name, each in zip(("subject", "other"), case.subjects, strict=False):
            if ground_of(each) not in self.subjects:
                allowed = " or ".join(f"a {ground.value}" for ground in self.subjects)
                raise HelmscopeError(
                    f"{name} of claim '{self.claim}' is {each.name}, but this claim can be tried on {allowed} only"
                )
        if case.other is not None and len(self.usual) < 2:
            raise HelmscopeError(
                f"other of claim '{self.claim}' is {case.other.name}, but this claim is tried on one subject"
            )
        return case


def ground_of(subject: Subject) -> Ground:
    """Whether a subject is a simulation or a model.

    >>> ground_of(Subject("A")).value
    'model'
    """
    return Ground.SIMULATION if subject.is_simulation else Ground.MODEL


# in the order of their decoration; two folders may hold experiments for claims of the same id
_REGISTERED: list[Registered] = []


def experiment(
    claim: str,
    *,
    seconds: float = 1.0,
    subjects: Iterable[str] = (Ground.SIMULATION,),
    usual: Iterable[Subject] = (),
) -> Callable[[Experiment], Experiment]:
    """Registers the decorated function, Case -> Finding, as the experiment of a claim. ``seconds`` is about how long
    it takes, to be said beforehand.

    ``subjects`` says what it can be run on: "simulation", "model" or both. ``usual`` is what it is run on where nobody
    says: by default the simulation, or model A where it cannot be simulated. Two of them say that it takes a second
    subject, ``case.other``.

    >>> @experiment("doctest-claim")
    ... def trial(case): ...
    >>> _REGISTERED.pop().seconds
    1.0
    """
    if not isinstance(claim, str):
        raise HelmscopeError(f"claim is a {type(claim).__name__}, but it must be an id: @experiment('my-claim')")
    seconds = real_number("seconds", seconds, above=0)
    grounds, first = _grounds(claim, subjects), _usual(claim, usual)
    if not first:
        first = (SIMULATION,) if Ground.SIMULATION in grounds else (Subject(),)

    def register(function: Experiment) -> Experiment:
        if not inspect.isfunction(function):
            raise HelmscopeError(f"experiment of '{claim}' is a {type(function).__name__}, but it must be a function")
        registered = Registered(claim, function, seconds, grounds, first)
        registered.case()
        _REGISTERED.append(registered)
        return function

    return register


def _grounds(claim: str, subjects: Iterable[str]) -> tuple[Ground, ...]:
    if isinstance(subjects, str) or not isinstance(subjects, Iterable):
        raise HelmscopeError(f"subjects of '{claim}' is {subjects!r}, but it must be a tuple such as ('model',)")
    names = [known_name(f"subject of '{claim}'", str(name), [ground.value for ground in Ground]) for name in subjects]
    if not names or len(set(names)) < len(names):
        raise HelmscopeError(f"subjects of '{claim}' is {names}, but it must hold 'simulation', 'model' or both")
    return tuple(Ground(name) for name in names)


def _usual(claim: str, usual: Iterable[Subject]) -> tuple[Subject, ...]:
    found = tuple(usual) if isinstance(usual, Iterable) else (usual,)
    if len(found) > 2 or not all(isinstance(each, Subject) for each in found):
        raise HelmscopeError(f"usual of '{claim}' is {found!r:.80}, but it must hold one Subject or two")
    return found


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
