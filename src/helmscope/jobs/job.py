"""Between a spec and its result: the work, checked and cut into units, and where it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from helmscope.runs.run import RunResult, run
from helmscope.store.manifest import Manifest
from helmscope.store.run_folder import RunFolder
from helmscope.types import MissingExtra

if TYPE_CHECKING:
    from helmscope.jobs.cost import Estimate
    from helmscope.jobs.spec import Spec
    from helmscope.runs.attempt import Engine
    from helmscope.runs.unit import Unit


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What came of a job: the spec that was carried out, the run folder that holds everything, and ``notes``, one
    sentence for each thing that could not be done, such as a picture without the package that draws it.
    """

    spec: Spec
    folder: RunFolder
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all of it was done."""
        return True


@dataclass(frozen=True, kw_only=True)
class Work:
    """Where and how a job is carried out."""

    folder: RunFolder
    manifest: Manifest
    engine: Engine
    show_progress: bool = False
    allow_mixed: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """A spec that has passed all checks: its units of work, and what the manifest of its run says of it."""

    spec: Spec
    units: list[Unit]
    dtype: str = "float64"
    device: str = "cpu"
    inputs: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    says_cost: ClassVar[bool] = False  # before the work begins, where progress is shown

    def cost(self) -> Estimate:
        """What it will cost."""
        return self.spec.estimate()

    def manifest(self, engine: Engine, command: Sequence[str]) -> Manifest:
        """The manifest of a run that starts now."""
        return Manifest.collect(
            command=command,
            seed=self.spec.fields["seed"],
            dtype=self.dtype,
            device=self.device,
            threads=engine.threads,
            inputs=self.inputs,
            parameters=self.parameters,
        )

    def carry_out(self, work: Work) -> Result:
        """Runs the units and makes one result of theirs."""
        raise NotImplementedError

    def run_units(self, work: Work, heading: str) -> RunResult:
        """The results of the units; ``heading`` stands before the lines of progress."""
        return run(
            self.units,
            work.folder,
            manifest=work.manifest,
            engine=work.engine,
            heading=heading if work.show_progress else None,
            allow_mixed=work.allow_mixed,
        )


@dataclass
class Drawings:
    """The pictures of a run. One that needs a package which is not there becomes a note: the numbers still stand."""

    folder: RunFolder
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, name: str, draw: Callable[[], bytes]) -> Path | None:
        """The path of the picture, None where it could not be drawn."""
        try:
            self.folder.write_bytes(name, draw())
        except MissingExtra as error:
            self.notes.append(f"no {what}: {error}")
            return None
        return self.folder.path / name
