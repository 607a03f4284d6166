"""A spec: what is asked for, as data. ``read`` and ``write`` keep it as TOML; ``prepare`` makes work of it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from helmscope.jobs.checks import Check
from helmscope.jobs.toml import encode_toml
from helmscope.store.atomic import as_path, explained, write_bytes
from helmscope.store.printable import printable
from helmscope.store.run_folder import SPEC
from helmscope.types import HelmscopeError, known_name, shown

if TYPE_CHECKING:
    from helmscope.jobs.cost import Estimate
    from helmscope.jobs.job import Job
    from helmscope.runs.unit import Unit

VERSION = 1
JOB = "job"


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field=JOB):
    """One thing that can be asked for. Every field has one plain form, so that equal requests are equal specs, and a
    bad value is refused when the spec is made; what depends on several of them or on this machine is refused by
    ``prepare``. ``version`` is that of the format.

    >>> from helmscope.jobs import Simulate
    >>> Simulate(beta=1, times=[0, 5]) == Simulate(beta=1.0, times=(0.0, 5.0))
    True
    >>> Simulate(beta=-1)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: beta is -1, but it must be a finite number >= 0
    """

    version: int = VERSION

    checks: ClassVar[Mapping[str, Check]] = {}
    verb: ClassVar[tuple[str, ...]] = ()  # of the command line, whose first word also begins the names of run folders

    def __post_init__(self) -> None:
        if isinstance(self.version, bool) or self.version != VERSION:
            raise HelmscopeError(
                f"version is {shown(self.version)}, but this helmscope reads version {VERSION} of the format only"
            )
        for name, check in self.checks.items():
            self._set(name, check(name, getattr(self, name)))
        self._complete()

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _complete(self) -> None:
        """Fills in what follows from other fields, and refuses fields that contradict each other."""

    @property
    def job(self) -> str:
        """The name of this kind of spec, the value of ``job`` in TOML.

        >>> from helmscope.jobs import Simulate
        >>> Simulate().job
        'simulate'
        """
        return str(self.__struct_config__.tag)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name, without ``version``.

        >>> from helmscope.jobs import Simulate
        >>> Simulate().fields["beta"]
        4.0
        """
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "version"}

    def prepare(self) -> Job:
        """The work, with everything checked that can be checked beforehand; nothing is written."""
        raise NotImplementedError

    def units(self) -> list[Unit]:
        """The units of work.

        >>> from helmscope.jobs import Simulate
        >>> [unit.name for unit in Simulate(n=4, batch=2, times=[0, 1]).units()]
        ['systems-000000', 'systems-000001']
        """
        return self.prepare().units

    def estimate(self) -> Estimate:
        """What it would cost."""
        raise NotImplementedError


def to_toml(spec: Spec) -> str:
    """The spec as TOML; fields that are None are left out.

    >>> from helmscope.jobs import Trials
    >>> print(to_toml(Trials(claims=["rate"])), end="")
    job = "trials"
    version = 1
    claims = ["rate"]
    quick = false
    truncate = false
    seed = 0
    """
    check_spec(spec)
    return encode_toml({JOB: spec.job, **msgspec.structs.asdict(spec)}, f"the {spec.job} spec")


def from_data(data: Mapping[str, Any], what: str = "the spec") -> Spec:
    """The spec that a mapping with the key ``job`` describes, such as parsed TOML or JSON. An unknown job, an unknown
    field and a bad value are each refused in one sentence; ``what`` says where it stood.

    >>> from_data({"job": "simulate", "bta": 1.0})
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown field of the spec 'bta': did you mean 'beta'? Allowed: ...
    """
    if not isinstance(data, Mapping):
        raise HelmscopeError(f"{what} is a {type(data).__name__}, but it must be a mapping from field to value")
    kinds = {str(kind.__struct_config__.tag): kind for kind in _kinds()}
    job = data.get(JOB)
    if not isinstance(job, str):
        said = "is missing" if job is None else f"is {shown(job)}"
        raise HelmscopeError(f"{JOB} of {what} {said}, but it must be one of {', '.join(sorted(kinds))}")
    kind = kinds[known_name(f"{JOB} of {what}", printable(job), kinds)]
    values = {key: value for key, value in data.items() if key != JOB}
    for key in values:
        known_name(f"field of {what}", printable(str(key)), kind.__struct_fields__)
    return kind(**values)


def from_toml(text: str, what: str = "the spec") -> Spec:
    """The spec that TOML describes; ``what`` names it where it is refused.

    >>> from_toml('job = "simulate"').beta
    4.0
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise HelmscopeError(f"{what} is not TOML: {error}") from None
    try:
        return from_data(data, what)
    except HelmscopeError as error:
        raise HelmscopeError(str(error) if what in str(error) else f"{what} is refused: {error}") from None


def read(path: str | os.PathLike[str]) -> Spec:
    """The spec in a TOML file, or the one that a run folder came from.

    >>> import tempfile
    >>> from helmscope.jobs import Simulate
    >>> with tempfile.NamedTemporaryFile(suffix=".toml") as file:
    ...     write(Simulate(beta=9.0), file.name)
    ...     read(file.name).beta
    9.0
    """
    place = as_path("path", path)
    if place.is_dir():
        place = place / SPEC
    with explained(f"read {place}"):
        data = place.read_bytes()
    try:
        return from_toml(data.decode("utf-8-sig"), str(place))
    except UnicodeDecodeError:
        raise HelmscopeError(f"{place} is not UTF-8 text, but a TOML file must be") from None


def write(spec: Spec, path: str | os.PathLike[str]) -> None:
    """Writes a spec as TOML, whole or not at all; ``read`` gives back an equal one.

    >>> write("simulate", "spec.toml")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: spec is 'simulate', but it must be a spec of helmscope.jobs, such as Simulate()
    """
    write_bytes(as_path("path", path), to_toml(spec).encode())


def check_spec(spec: object) -> None:
    """Refuses what is not a spec.

    >>> check_spec({"job": "phase"})
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: spec is {'job': 'phase'}, but it must be a spec of helmscope.jobs, ...
    """
    if not isinstance(spec, Spec) or type(spec) is Spec:
        raise HelmscopeError(f"spec is {shown(spec)}, but it must be a spec of helmscope.jobs, such as Simulate()")


def _kinds() -> list[type[Spec]]:
    """The specs that can be read, each from its own file."""
    from helmscope.jobs.phase import Phase
    from helmscope.jobs.report import Report
    from helmscope.jobs.simulate import Simulate
    from helmscope.jobs.trials import Trials

    return [Phase, Report, Simulate, Trials]
