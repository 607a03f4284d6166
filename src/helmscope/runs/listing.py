"""``list_runs``: the runs in a folder and their states."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from helmscope.runs.plan import RESULTS, read_parts
from helmscope.runs.results import result_files
from helmscope.store.atomic import as_path, explained
from helmscope.store.lock import is_locked
from helmscope.store.run_folder import MANIFEST, VERDICTS, RunFolder
from helmscope.types import HelmscopeError
from helmscope.types.display import ConciseRepr


class RunState(Enum):
    """The state of a run.

    >>> RunState("complete").name
    'COMPLETE'
    """

    COMPLETE = "complete"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class RunSummary(ConciseRepr):
    """One run folder: its path and state, when (UTC in ISO 8601) and by which command it was created, and how many of
    its units have a result (0 of 0 if it has no units); ``reason`` says what is damaged.

    >>> RunSummary(Path("runs/phase-20250131-120000"), RunState.INTERRUPTED, done=3, total=8).name
    'phase-20250131-120000'
    """

    path: Path
    state: RunState
    created: str = ""
    command: tuple[str, ...] = ()
    done: int = 0
    total: int = 0
    reason: str = ""

    @property
    def name(self) -> str:
        """The name of the folder.

        >>> RunSummary(Path("runs/phase-20250131-120000"), RunState.COMPLETE).name
        'phase-20250131-120000'
        """
        return self.path.name


def list_runs(root: str | os.PathLike[str]) -> list[RunSummary]:
    """The run folders in ``root``, or ``root`` itself if it is one, oldest first. Folders without a manifest are
    skipped; a run whose files cannot be read or contradict each other is listed as damaged, with the reason.

    A run with units is complete when every unit has a result; a run without units, when it has any result. A run is
    running while a process holds its lock.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     list_runs(root)
    []
    """
    path = as_path("root", root)
    with explained(f"read {path}"):
        folders = [entry for entry in (path, *path.iterdir()) if (entry / MANIFEST).is_file()]
    return sorted(map(_summarize, folders), key=lambda run: (run.created, run.name))


def _summarize(path: Path) -> RunSummary:
    folder = RunFolder(path)
    try:
        with explained(f"read {path}"):
            running = is_locked(path)
        manifest, plan = read_parts(folder)
        if manifest is None:
            manifest = folder.read_manifest()
        units = {} if plan is None else plan.units
        done = sum(bool(result_files(path / RESULTS, name)) for name in units)
        finished = done == len(units) if units else bool(folder.results()) or (path / VERDICTS).is_file()
    except HelmscopeError as error:
        return RunSummary(path, RunState.DAMAGED, reason=str(error))
    state = RunState.RUNNING if running else RunState.COMPLETE if finished else RunState.INTERRUPTED
    return RunSummary(path, state, manifest.created, tuple(manifest.command), done, len(units))
