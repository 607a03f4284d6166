"""Specs: descriptions of jobs as data. ``read_spec`` and ``write_spec`` convert them from and to TOML."""

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
from helmscope.types import HelmscopeError, check_name, html_table, short_repr, type_with_article
from helmscope.types.display import LONGEST_LINE, shortened

if TYPE_CHECKING:
    from helmscope.jobs.cost import Estimate
    from helmscope.jobs.job import Job
    from helmscope.runs.unit import Unit

VERSION = 1
JOB = "job"
GIVEN = "_fields_given"  # in the __dict__ of a spec


class _NamedFields(msgspec.StructMeta):
    """Metaclass that explains wrong arguments of a spec, for which msgspec raises a TypeError without a suggestion."""

    def __call__(cls, *args: object, **fields: object) -> Any:
        if args:
            raise HelmscopeError(
                f"{cls.__name__} is given {short_repr(args[0])} without a name, but its fields must be named, such as "
                f"{cls.__name__}(seed=0)"
            )
        for name in fields:
            check_name(f"keyword of {cls.__name__}", name, cls.__struct_fields__)
        spec = super().__call__(**fields)
        spec.__dict__[GIVEN] = frozenset(fields)
        return spec


class Spec(
    msgspec.Struct,
    metaclass=_NamedFields,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field=JOB,
    dict=True,  # for the names of the fields that were given, which are no part of the value
):
    """The description of a job, the base class of ``SimulationSpec``, ``DensitySpec``, ``PhaseSpec``,
    ``MeasurementSpec``, ``TrialsSpec`` and ``ReportSpec``.

    Every field has one canonical form, so that equal jobs have equal specs. A bad value raises a ``HelmscopeError``
    when the spec is constructed; what depends on the files or the hardware of this machine is checked by ``prepare``.
    ``version`` is the version of the format.

    >>> from helmscope.jobs import SimulationSpec
    >>> SimulationSpec(beta=1, times=[0, 5]) == SimulationSpec(beta=1.0, times=(0.0, 5.0))
    True
    >>> SimulationSpec(beta=4, nu=0.1)  # shows what was given or differs from the defaults
    SimulationSpec(beta=4.0, nu=0.1, step=0.02)
    >>> SimulationSpec(beta=-1)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: beta is -1, but it must be a finite number >= 0
    >>> SimulationSpec(feild="sa")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown keyword of SimulationSpec 'feild': did you mean 'field'?
    """

    version: int = VERSION

    checks: ClassVar[Mapping[str, Check]] = {}
    main_fields: ClassVar[tuple[str, ...]] = ()  # what is computed, and of how much: a notebook always shows them
    samples_cost: ClassVar[bool] = False  # whether ``run`` estimates the cost from a sample, which takes seconds
    verb: ClassVar[tuple[str, ...]] = ()  # on the command line; its first word also starts the names of run folders

    def __post_init__(self) -> None:
        if isinstance(self.version, bool) or self.version != VERSION:
            raise HelmscopeError(
                f"version is {short_repr(self.version)}, but this helmscope reads only version {VERSION} of the format"
            )
        for name, check in self.checks.items():
            self._set(name, check(name, getattr(self, name)))
        self._complete()

    def __repr__(self) -> str:
        fields, given = self.fields, self._given
        shown = (f"{name}={value!r}" for name, value in fields.items() if name in given)
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.rows)

    @property
    def rows(self) -> list[tuple[str, object]]:
        """The main fields and all that were given or differ from the defaults, with their values, for a table.

        >>> from helmscope.jobs import TrialsSpec
        >>> TrialsSpec(claims=["rate"], seed=7).rows
        [('claims', 'rate'), ('models', 'default'), ('quick', False), ('seed', 7)]
        """
        names = dict.fromkeys((*self.main_fields, *(name for name in self.fields if name in self._given)))
        return [(name, self._cell(name)) for name in names]

    def _cell(self, name: str) -> object:
        value = getattr(self, name)
        return shortened(", ".join(map(str, value)) or "default", LONGEST_LINE) if isinstance(value, tuple) else value

    @property
    def _given(self) -> set[str]:
        """The fields that were given or differ from the defaults; of a spec with every field given, such as one from a
        file that ``write_spec`` wrote, the main fields and those that differ.
        """
        default, fields = type(self)(), self.fields
        given = self.__dict__.get(GIVEN, frozenset())  # a copy has none
        if all(name in given for name in fields if getattr(default, name) is not None):
            given = frozenset(name for name in self.main_fields if fields[name] is not None)
        return {name for name, value in fields.items() if name in given or value != getattr(default, name)}

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _complete(self) -> None:
        """Fill in defaults that depend on other fields; raises ``HelmscopeError`` if fields contradict each other."""

    @property
    def job(self) -> str:
        """The name of this kind of spec, the value of ``job`` in TOML.

        >>> from helmscope.jobs import SimulationSpec
        >>> SimulationSpec().job
        'simulate'
        """
        return str(self.__struct_config__.tag)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name, without ``version``.

        >>> from helmscope.jobs import SimulationSpec
        >>> SimulationSpec().fields["beta"]
        4.0
        """
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "version"}

    def prepare(self) -> Job:
        """Check everything that can be checked in advance and return the job. Writes nothing.

        >>> from helmscope.jobs import SimulationSpec
        >>> len(SimulationSpec(n=4, batch=2, times=[0, 1]).prepare().units)
        2
        """
        raise NotImplementedError

    def units(self) -> list[Unit]:
        """The units of work of the job.

        >>> from helmscope.jobs import SimulationSpec
        >>> [unit.name for unit in SimulationSpec(n=4, batch=2, times=[0, 1]).units()]
        ['systems-000000', 'systems-000001']
        """
        return self.prepare().units

    def estimate(self) -> Estimate:
        """Estimate the cost of the job.

        >>> from helmscope.jobs import TrialsSpec
        >>> str(TrialsSpec(claims=["kuramoto"]).estimate())
        '1 trial: roughly 1 s on one core, 450 MB'
        """
        raise NotImplementedError


def spec_to_toml(spec: Spec) -> str:
    """Encode a spec as TOML; fields that are None are omitted.

    >>> from helmscope.jobs import TrialsSpec
    >>> print(spec_to_toml(TrialsSpec(claims=["rate"])), end="")
    job = "trials"
    version = 1
    claims = ["rate"]
    quick = false
    models = []
    truncate = false
    held_out = false
    seed = 0
    """
    check_spec(spec)
    return encode_toml({JOB: spec.job, **msgspec.structs.asdict(spec)}, f"the {spec.job} spec")


def spec_from_dict(data: Mapping[str, Any], what: str = "the spec") -> Spec:
    """Build a spec from a mapping with the key ``job``, such as parsed TOML or JSON. An unknown job, unknown key or
    bad value raises a ``HelmscopeError``, in which ``what`` names the origin of the data.

    >>> spec_from_dict({"job": "simulate", "beta": 1}).beta
    1.0
    >>> spec_from_dict({"job": "simulate", "bta": 1.0})
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown key of the spec 'bta': did you mean 'beta'?
    """
    if not isinstance(data, Mapping):
        raise HelmscopeError(f"{what} is {type_with_article(data)}, but it must be a mapping from key to value")
    kinds = {str(kind.__struct_config__.tag): kind for kind in _spec_classes()}
    job = data.get(JOB)
    if not isinstance(job, str):
        problem = "is missing" if job is None else f"is {short_repr(job)}"
        raise HelmscopeError(f"{JOB} of {what} {problem}, but it must be one of {', '.join(sorted(kinds))}")
    kind = kinds[check_name(f"{JOB} of {what}", printable(job), kinds)]
    values = {key: value for key, value in data.items() if key != JOB}
    for key in values:
        check_name(f"key of {what}", printable(str(key)), kind.__struct_fields__)
    return kind(**values)


def spec_from_toml(text: str, what: str = "the spec") -> Spec:
    """Parse a spec from TOML; ``what`` names the text in error messages.

    >>> spec_from_toml('job = "simulate"').beta
    4.0
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise HelmscopeError(f"{what} is not TOML: {error}") from None
    try:
        return spec_from_dict(data, what)
    except HelmscopeError as error:
        raise HelmscopeError(str(error) if what in str(error) else f"{what} is not valid: {error}") from None


def read_spec(path: str | os.PathLike[str]) -> Spec:
    """Read a spec from a TOML file, or the spec of the run in a run folder.

    A file that cannot be read, is not UTF-8 or TOML, or has an unknown key or a bad value raises a
    ``HelmscopeError``.

    >>> import tempfile
    >>> from helmscope.jobs import SimulationSpec
    >>> with tempfile.NamedTemporaryFile(suffix=".toml") as file:
    ...     write_spec(SimulationSpec(beta=9.0), file.name)
    ...     read_spec(file.name).beta
    9.0
    """
    place = as_path("path", path)
    if place.is_dir():
        place = place / SPEC
    with explained(f"read {place}"):
        data = place.read_bytes()
    try:
        return spec_from_toml(data.decode("utf-8-sig"), str(place))
    except UnicodeDecodeError:
        raise HelmscopeError(f"{place} is not UTF-8 text, but a TOML file must be") from None


def write_spec(spec: Spec, path: str | os.PathLike[str]) -> None:
    """Write a spec to a TOML file atomically; ``read_spec`` returns an equal spec.

    >>> import tempfile
    >>> from helmscope.jobs import PhaseSpec
    >>> with tempfile.TemporaryDirectory() as root:
    ...     write_spec(PhaseSpec(n=8), f"{root}/spec.toml")
    ...     read_spec(f"{root}/spec.toml") == PhaseSpec(n=8)
    True

    >>> write_spec("simulate", "spec.toml")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: spec is 'simulate', but it must be a spec of hs.jobs, such as PhaseSpec()
    """
    write_bytes(as_path("path", path), spec_to_toml(spec).encode())


def check_spec(spec: object) -> None:
    """Raise ``HelmscopeError`` unless ``spec`` is a spec.

    >>> check_spec({"job": "phase"})
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: spec is {'job': 'phase'}, but it must be a spec of hs.jobs, ...
    """
    if not isinstance(spec, Spec) or type(spec) is Spec:
        is_file = isinstance(spec, os.PathLike) or (isinstance(spec, str) and spec.endswith(".toml"))
        read = f": read a file with hs.jobs.read_spec({str(spec)!r})" if is_file else ""
        raise HelmscopeError(f"spec is {short_repr(spec)}, but it must be a spec of hs.jobs, such as PhaseSpec(){read}")


def _spec_classes() -> list[type[Spec]]:
    """The kinds of spec that can be read. Imported late, since their files import this one."""
    from helmscope.jobs.density import DensitySpec
    from helmscope.jobs.measure import MeasurementSpec
    from helmscope.jobs.phase import PhaseSpec
    from helmscope.jobs.report import ReportSpec
    from helmscope.jobs.simulate import SimulationSpec
    from helmscope.jobs.trials import TrialsSpec

    return [DensitySpec, MeasurementSpec, PhaseSpec, ReportSpec, SimulationSpec, TrialsSpec]
