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
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.claims.entry import Entry, SubjectKind
from helmscope.claims.reading import check_claim, read_catalogue
from helmscope.models.subject import Subject
from helmscope.runs.attempt import described
from helmscope.store.manifest import hash_bytes, hash_file
from helmscope.types import HelmscopeError, check_integer, check_name, check_real, check_seed, type_with_article
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.finding import Finding


SIMULATION = Subject.simulation()
BOX_MODELS = (Subject("A"), Subject("B"), Subject("tied"))  # the bundled models


@dataclass(frozen=True)
class TrialCase(ConciseRepr):
    """The conditions of one run of an experiment: its seed, its subject, and whether it is quick (fewer replicates).

    ``subject`` is the simulation or a model, ``other`` an optional second model; ``entry`` is the catalogue entry of
    the claim, whose constants the experiment uses. Raises HelmscopeError for a seed outside 0 to 2^32 - 1 and for
    arguments of the wrong type.

    >>> TrialCase(quick=True).count(128, quick=32)
    32
    """

    seed: int = 0
    quick: bool = False
    subject: Subject = SIMULATION
    other: Subject | None = None
    entry: Entry | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, value, kind in (("subject", self.subject, Subject), ("other", self.other, Subject | None)):
            if not isinstance(value, kind):
                raise HelmscopeError(f"{name} is {type_with_article(value)}, but it must be a Subject: Subject('A')")
        if not isinstance(self.quick, bool):
            raise HelmscopeError(f"quick is {self.quick!r}, but it must be True or False")

    @property
    def subject_kind(self) -> SubjectKind:
        """Whether the subject is a simulation or a model.

        >>> TrialCase().subject_kind.value
        'simulation'
        """
        return subject_kind_of(self.subject)

    def constant(self, name: str) -> Any:
        """A constant of the catalogue entry: a number, a text or a tuple of them; raises HelmscopeError if the entry
        has none of that name.

        >>> registered_case("tokens-cluster", subject=Subject("A")).constant("level")
        0.9
        """
        constants = {} if self.entry is None else self.entry.constants
        value = constants[check_name("constant", name, constants)]
        return tuple(value) if isinstance(value, list) else value

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The subject and, if there is one, the other subject.

        >>> TrialCase(subject=Subject("A")).subjects
        (<Subject A: 128 texts>,)
        """
        return (self.subject,) if self.other is None else (self.subject, self.other)

    @property
    def names(self) -> tuple[str, ...]:
        """Short names of the subjects; if two are equal, each is followed by the first digits of its hash.

        >>> TrialCase(subject=Subject("A"), other=Subject("tied")).names
        ('A', 'tied')
        """
        names = tuple(subject.name for subject in self.subjects)
        if len(set(names)) == len(names):
            return names
        return tuple(f"{subject.name} {subject.identity[:8]}" for subject in self.subjects)

    def count(self, full: int, *, quick: int) -> int:
        """The number of replicates: ``quick`` in a quick run, else ``full``.

        >>> TrialCase().count(128, quick=32)
        128
        """
        return quick if self.quick else full

    def seed_for(self, number: int) -> int:
        """The seed of one of several independent samples of an experiment, numbered from 0.

        >>> TrialCase(seed=1).seed_for(0) == TrialCase(seed=1).seed_for(1)
        False
        """
        number = check_integer("number", number, at_least=0)
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])

    def normal(self, *shape: int, index: int) -> Tensor:
        """A sample of independent standard normal values, float64; each ``index`` has its own seed.

        >>> TrialCase(seed=1).normal(2, 3, index=0).shape
        torch.Size([2, 3])
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed_for(index))
        return torch.randn(*shape, generator=generator, dtype=torch.float64)


Experiment = Callable[[TrialCase], "Finding"]


@dataclass(frozen=True)
class Registered:
    """A registered experiment: its claim, function, approximate duration in seconds on each kind of subject that it can
    run on, its default subjects, and whether it compares two models.

    >>> Registered("my-claim", lambda case: None, {SubjectKind.SIMULATION: 2.0}).default_subjects
    (<Subject simulation>,)
    """

    claim: str
    function: Experiment
    seconds: Mapping[SubjectKind, float]
    default_subjects: tuple[Subject, ...] = (SIMULATION,)
    compares_models: bool = False

    @property
    def subject_kinds(self) -> tuple[SubjectKind, ...]:
        """What it can run on: a simulation, models or both."""
        return tuple(self.seconds)

    def fits(self, subject: Subject) -> bool:
        """Whether it can run on a subject.

        >>> Registered("my-claim", lambda case: None, {SubjectKind.SIMULATION: 2.0}).fits(Subject("A"))
        False
        """
        return subject_kind_of(subject) in self.subject_kinds

    def case(
        self,
        seed: int = 0,
        *,
        quick: bool = False,
        subject: Subject | None = None,
        other: Subject | None = None,
        entry: Entry | None = None,
    ) -> TrialCase:
        """The conditions of a run on ``subject`` (and ``other``), by default on the first of ``default_subjects``.

        Raises HelmscopeError for a subject that the experiment cannot run on.

        >>> Registered("mine", lambda case: None, {SubjectKind.SIMULATION: 2.0}).case(subject=Subject("A"))
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: subject of claim 'mine' is A, but this claim can be tried on a simulation only
        """
        if subject is None and other is not None:
            raise HelmscopeError("other is given, but subject is not: pass both")
        if subject is None:
            subject, *more = self.default_subjects
            other = more[0] if self.compares_models else None
        case = TrialCase(seed, quick, subject, other, entry)
        if case.other is not None and case.other == case.subject:
            raise HelmscopeError(f"other is {case.other.name}, but it must differ from subject")
        for name, tried in zip(("subject", "other"), case.subjects, strict=False):
            if not self.fits(tried):
                allowed = " or ".join(f"a {subject_kind.value}" for subject_kind in self.subject_kinds)
                raise HelmscopeError(
                    f"{name} of claim '{self.claim}' is {tried.name}, but this claim can be tried on {allowed} only"
                )
        if (case.other is not None) != self.compares_models:
            wanted = "two subjects: pass other" if self.compares_models else "one subject"
            given = "not given" if case.other is None else case.other.name
            raise HelmscopeError(f"other of claim '{self.claim}' is {given}, but this claim is tried on {wanted}")
        return case


def subject_kind_of(subject: Subject) -> SubjectKind:
    """The kind of a subject: simulation or model.

    >>> subject_kind_of(Subject("A")).value
    'model'
    """
    return SubjectKind.SIMULATION if subject.is_simulation else SubjectKind.MODEL


# in order of registration; not a dict, since two folders may hold claims with the same id
_REGISTERED: list[Registered] = []


def experiment(
    claim: str,
    *,
    seconds: float | Mapping[str, float] = 1.0,
    subjects: Iterable[str] = (),
    default_subjects: Iterable[Subject] = (),
    compares_models: bool = False,
) -> Callable[[Experiment], Experiment]:
    """Decorator that registers a function, TrialCase -> Finding, as the experiment of a claim.

    ``seconds`` is its approximate duration, shown before a run: one number, or one for each kind of subject, such as
    ``{"simulation": 2, "model": 20}``. ``subjects`` lists what it can run on: "simulation" (the default), "model" or
    both; the keys of ``seconds`` do the same. Each of ``default_subjects`` is tried on its own: by default the
    simulation, and the bundled models A, B and tied. ``compares_models`` declares that it takes a second model,
    ``case.other``; the two are then the defaults. Raises HelmscopeError for arguments that are not allowed, and unless
    the decorated object is a function.

    >>> @experiment("doctest-claim", seconds=2)
    ... def trial(case): ...
    >>> _REGISTERED.pop().seconds
    {<SubjectKind.SIMULATION: 'simulation'>: 2.0}
    """
    if not isinstance(claim, str):
        raise HelmscopeError(f"claim is {type_with_article(claim)}, but it must be an id: @experiment('my-claim')")
    durations = _durations(claim, seconds, subjects)
    chosen = _check_defaults(claim, default_subjects, durations, compares_models)

    def register(function: Experiment) -> Experiment:
        if not inspect.isfunction(function):
            raise HelmscopeError(f"experiment of '{claim}' is {type_with_article(function)}, but it must be a function")
        registered = Registered(claim, function, durations, chosen, compares_models)
        registered.case()  # raises if the default subjects do not suit
        _REGISTERED.append(registered)
        return function

    return register


def _durations(claim: str, seconds: float | Mapping[str, float], subjects: Iterable[str]) -> dict[SubjectKind, float]:
    """The duration on each kind of subject, simulations first."""
    if isinstance(subjects, str) or not isinstance(subjects, Iterable):
        raise HelmscopeError(f"subjects of '{claim}' is {subjects!r}, but it must be a tuple such as ('model',)")
    names = list(seconds) if isinstance(seconds, Mapping) else list(subjects) or [SubjectKind.SIMULATION]
    known = [subject_kind.value for subject_kind in SubjectKind]
    subject_kinds = [check_name(f"subject of '{claim}'", str(name), known) for name in names]
    if not subject_kinds or len(set(subject_kinds)) < len(subject_kinds):
        raise HelmscopeError(
            f"subjects of '{claim}' is {subject_kinds}, but it must hold 'simulation', 'model' or both"
        )
    values = seconds if isinstance(seconds, Mapping) else dict.fromkeys(subject_kinds, seconds)
    return {
        subject_kind: check_real("seconds", values[subject_kind], above=0)
        for subject_kind in SubjectKind
        if subject_kind.value in subject_kinds
    }


def _check_defaults(
    claim: str, default_subjects: Iterable[Subject], durations: Mapping[SubjectKind, float], compares_models: bool
) -> tuple[Subject, ...]:
    subjects = tuple(default_subjects) if isinstance(default_subjects, Iterable) else (default_subjects,)
    if not all(isinstance(subject, Subject) for subject in subjects):
        raise HelmscopeError(f"default_subjects of '{claim}' is {subjects!r:.80}, but it must hold Subjects")
    if not subjects and compares_models:
        subjects = BOX_MODELS[:2]
    if not subjects:
        simulated = (SIMULATION,) if SubjectKind.SIMULATION in durations else ()
        subjects = simulated + (BOX_MODELS if SubjectKind.MODEL in durations else ())
    if compares_models and len(subjects) != 2:
        raise HelmscopeError(f"default_subjects of '{claim}' holds {len(subjects)} subjects, but a comparison needs 2")
    return subjects


def experiments(claims_folder: str | Path | None = None) -> dict[str, Registered]:
    """All experiments by claim, in sorted order: the packaged ones, or those of a user's catalogue in
    ``claims_folder``, **whose Python files are run**.

    Raises HelmscopeError for an experiment without a catalogue entry, and for two experiments of one claim.

    >>> "kuramoto" in experiments()
    True
    """
    entries = read_catalogue(claims_folder)
    if claims_folder is None:
        modules = _import_packaged()
    else:
        modules = [_run_file(path) for path in sorted(Path(claims_folder).resolve().glob("*.py"))]
    by_claim: dict[str, Registered] = {}
    for registered in _REGISTERED:
        if registered.function.__module__ in modules:
            claim = registered.claim
            if claim not in entries:
                function, names = _location(registered.function), ", ".join(entries)
                where = "" if claims_folder is None else f" in {claims_folder}, which has entries of {names}"
                raise HelmscopeError(f"{function} is the experiment of '{claim}', but there is no {claim}.toml{where}")
            if claim in by_claim:
                both = f"{_location(by_claim[claim].function)} and {_location(registered.function)}"
                raise HelmscopeError(f"claim '{claim}' has two experiments, {both}, but it must have one")
            by_claim[claim] = registered
    return dict(sorted(by_claim.items()))


def registered(claim: str, claims_folder: str | Path | None = None) -> Registered:
    """The registered experiment of a claim; raises HelmscopeError if the claim is unknown or has none.

    >>> registered("rate").claim
    'rate'
    """
    if not isinstance(claim, str):
        raise HelmscopeError(f"claim is {type_with_article(claim)}, but it must be an id, such as 'rate'")
    check_claim(claim, claims_folder)
    chosen = experiments(claims_folder).get(claim)
    if chosen is None and claims_folder is None:
        raise HelmscopeError(f"claim '{claim}' has no experiment yet: `helmscope claims list` shows which can be tried")
    if chosen is None:
        why = f"no function is decorated with @experiment('{claim}')"
        raise HelmscopeError(f"{claim}.toml in {claims_folder} has no experiment: {why}")
    return chosen


def registered_case(claim: str, seed: int = 0, *, claims_folder: str | Path | None = None, **options: Any) -> TrialCase:
    """The conditions of a run of a claim's experiment, with its catalogue entry; options are those of
    ``Registered.case``.

    >>> registered_case("rate", quick=True).entry.id
    'rate'
    """
    return registered(claim, claims_folder).case(seed, entry=read_catalogue(claims_folder)[claim], **options)


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
