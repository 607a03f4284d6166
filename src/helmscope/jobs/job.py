"""A job: the checked work of a spec, divided into units, and what it needs to run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.runs.progress import print_status
from helmscope.runs.run_units import RunResult, run_units
from helmscope.store.manifest import Manifest
from helmscope.store.printable import printable
from helmscope.store.run_folder import RunFolder
from helmscope.types import MissingExtra, html_stack, html_table, one_line_repr

if TYPE_CHECKING:
    from helmscope.jobs.cost import Estimate
    from helmscope.jobs.spec import Spec
    from helmscope.runs.attempt import Engine
    from helmscope.runs.unit import Unit


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Result:
    """The result of a job, the base class of ``SimulationResult``, ``DensityResult``, ``PhaseResult``,
    ``MeasurementResult``, ``TrialsResult`` and ``ReportResult``.

    ``spec`` is the spec that was run, ``folder`` the run folder with all files, and ``notes`` has one sentence for each
    output that could not be produced, such as a picture when matplotlib is not installed. A notebook shows a table.

    >>> import tempfile
    >>> from helmscope.jobs import SimulationSpec, run
    >>> with tempfile.TemporaryDirectory() as root:
    ...     result = run(SimulationSpec(n=4, batch=2, times=[0, 1]), folder=f"{root}/run")
    >>> isinstance(result, Result), result.ok, result.folder.path.name, result.notes
    (True, True, 'run', ())
    >>> result
    <SimulationResult: 2 systems x 4 tokens, dimension 3; 2 times, 0 to 1; finished; in ...run>
    """

    spec: Spec
    folder: RunFolder
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the job was completed; what that means depends on the kind of job."""
        return True

    @property
    def summary(self) -> str:
        """What was computed and how it ended, in a few words."""
        return "complete" if self.ok else "incomplete"

    def _tables(self) -> list[str]:
        """What was computed, as HTML tables below that of the job."""
        return []

    def __repr__(self) -> str:
        return one_line_repr(f"{type(self).__name__}: {self.summary}; in {printable(str(self.folder.path))}")

    def _repr_html_(self) -> str:
        paths = [(name, getattr(self, name, None)) for name in ("picture", "page")]
        rows: list[tuple[str, object]] = [
            ("spec", repr(self.spec)),
            *self.spec.rows,
            ("result", self.summary),
            ("folder", self.folder.path),
            *((name, path) for name, path in paths if path is not None),
            *(("note", note) for note in self.notes),
        ]
        return html_stack(html_table(type(self).__name__, rows), *self._tables())


@dataclass(frozen=True, kw_only=True)
class Work:
    """Where and how a job is executed."""

    folder: RunFolder
    manifest: Manifest
    engine: Engine
    show_progress: bool = False
    allow_mixed: bool = False
    costs: Mapping[str, float] | None = None  # the estimated seconds of each unit by name, if they are known


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(ABC):
    """A spec that has passed all checks, with its units of work and the contents of the manifest."""

    spec: Spec
    units: list[Unit]
    dtype: str = "float64"
    device: str = "cpu"
    inputs: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    # ``run`` prints the estimate before it starts, if it shows progress: always, or else if it is above two seconds
    prints_cost: ClassVar[bool] = False
    weights_units: ClassVar[bool] = False  # whether the estimate has the seconds of each unit

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences that ``run`` prints before it starts, if it shows progress."""
        return ()

    def cost(self) -> Estimate:
        """The estimated cost."""
        return self.spec.estimate()

    def check_limits(self, engine: Engine) -> None:  # noqa: B027 - most jobs know nothing
        """Raise ``HelmscopeError`` if the job is known not to fit into the limits of the engine, before a folder is
        created; by default nothing is known, and a unit that does not fit fails.
        """

    def manifest(self, engine: Engine, command: Sequence[str]) -> Manifest:
        """The manifest of a run that starts now."""
        return Manifest.collect(
            command=command,
            seed=self.spec.fields.get("seed", 0),  # a density has none: nothing in it is random
            dtype=self.dtype,
            device=self.device,
            threads=engine.threads,
            inputs=self.inputs,
            parameters=self.parameters,
        )

    @abstractmethod
    def execute(self, work: Work) -> Result:
        """Run the units and combine their results into one."""

    def run_units(self, work: Work, heading: str) -> RunResult:
        """Run the units; ``heading`` starts the lines of progress."""
        return run_units(
            self.units,
            work.folder,
            manifest=work.manifest,
            engine=work.engine,
            heading=heading if work.show_progress else None,
            allow_mixed=work.allow_mixed,
            costs=work.costs,
        )


@dataclass
class PictureWriter:
    """Writes the pictures of a run. One that needs a missing package becomes a note, and the numbers are kept."""

    folder: RunFolder
    show_progress: bool
    notes: list[str] = field(default_factory=list)

    def write(self, what: str, name: str, draw: Callable[[], bytes]) -> Path | None:
        """Write a picture and return its path, or None if it could not be drawn."""
        if self.show_progress:
            print_status(f"drawing the {what} ...")
        try:
            self.folder.write_bytes(name, draw())
        except MissingExtra as error:
            self.notes.append(f"no {what}: {error}")
            return None
        return self.folder.path / name
