"""``helmscope runs``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from helmscope.types import HelmscopeError, counted

if TYPE_CHECKING:
    from helmscope.runs.listing import RunSummary


def runs(
    root: Annotated[str | None, typer.Argument(help="The folder that holds the run folders [default: runs].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List earlier runs, oldest first: how each ended, and how to go on with one that was interrupted."""
    from helmscope.runs.listing import list_runs
    from helmscope.store.printable import printable

    # without a word about where, a folder that no run has made yet is no mistake
    found = list_runs(root or "runs") if root is not None or os.path.isdir("runs") else []
    if as_json:
        print(json.dumps({"runs": [_record(run) for run in found]}, indent=2))
    elif not found:
        print(f"no runs in {root or 'runs'}")
    else:
        for run in found:
            print(*map(printable, _lines(run)), sep="\n")


def _lines(run: RunSummary) -> list[str]:
    record = _record(run)
    units = f"{run.done} of {counted(run.total, 'unit')}" if run.total else "no units"
    lines = [f"{run.name}  {run.state.value}, {units}  {run.created}"]
    lines.append(f"    {run.reason or shlex.join(run.command)}")
    if record["resume"]:
        lines.append(f"    go on with: {record['resume']}")
    elif record["resume_refused"]:
        lines.append(f"    no command to go on with is offered, because {record['resume_refused']}")
    return lines


def _command(run: RunSummary) -> Sequence[str]:
    """What began a run; of one that Python began, the verb that carries out its spec, unless that runs a user's code,
    which a pasted line is to show.
    """
    from helmscope.cli.output import RESUMABLE
    from helmscope.jobs import read
    from helmscope.store.run_folder import SPEC

    ours = run.command[:1] == ("helmscope",) and run.command[1:2] and run.command[1] in RESUMABLE
    if ours or not (run.path / SPEC).is_file():
        return run.command
    try:
        runs_code = read(run.path).fields.get("folder") is not None
    except HelmscopeError:
        return run.command
    return run.command if runs_code else ("helmscope", "run")


def _record(run: RunSummary) -> dict[str, object]:
    from helmscope.cli.output import resume_line
    from helmscope.runs.listing import State

    resume, refused = "", ""
    if run.state is State.INTERRUPTED and run.total > 0:
        try:
            resume = resume_line(_command(run), run.path)
        except HelmscopeError as error:
            refused = str(error)
    return {
        "name": run.name,
        "folder": str(run.path),
        "state": run.state.value,
        "created": run.created,
        "command": list(run.command),
        "done": run.done,
        "total": run.total,
        "reason": run.reason,
        "resume": resume,
        "resume_refused": refused,
    }
