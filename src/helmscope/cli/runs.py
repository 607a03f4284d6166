"""``helmscope runs``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from helmscope.types import HelmscopeError, pluralized

if TYPE_CHECKING:
    from helmscope.runs.listing import RunSummary


def runs(
    root: Annotated[str | None, typer.Argument(help="Folder that contains the run folders [default: runs].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List earlier runs, oldest first, with their state and the command that resumes an interrupted one."""
    from helmscope.runs.listing import list_runs
    from helmscope.store.printable import printable

    # the default folder need not exist yet
    listed = list_runs(root or "runs") if root is not None or os.path.isdir("runs") else []
    if as_json:
        print(json.dumps({"runs": [_as_data(run) for run in listed]}, indent=2))
    elif not listed:
        print(f"no runs in {root or 'runs'}")
    else:
        for run in listed:
            print(*map(printable, _lines(run)), sep="\n")


def _lines(run: RunSummary) -> list[str]:
    data = _as_data(run)
    units = f"{run.done} of {pluralized(run.total, 'unit')}" if run.total else "no units"
    lines = [f"{run.name}  {run.state.value}, {units}  {run.created}"]
    lines.append(f"    {run.reason or shlex.join(run.command)}")
    if data["resume"]:
        lines.append(f"    resume with: {data['resume']}")
    elif data["resume_refused"]:
        lines.append(f"    no command to resume it is suggested, because {data['resume_refused']}")
    return lines


def _original_command(run: RunSummary) -> Sequence[str]:
    """The command that started a run. For a run started from Python, the verb that runs its spec, unless the spec runs
    a user's code, which must be visible in a line to paste.
    """
    from helmscope.cli.output import RESUMABLE
    from helmscope.jobs import read_spec
    from helmscope.store.run_folder import SPEC

    ours = run.command[:1] == ("helmscope",) and run.command[1:2] and run.command[1] in RESUMABLE
    if ours or not (run.path / SPEC).is_file():
        return run.command
    try:
        runs_code = read_spec(run.path).fields.get("claims_folder") is not None
    except HelmscopeError:
        return run.command
    return run.command if runs_code else ("helmscope", "run")


def _as_data(run: RunSummary) -> dict[str, object]:
    from helmscope.cli.output import resume_command
    from helmscope.runs.listing import RunState

    resume, refused = "", ""
    if run.state is RunState.INTERRUPTED and run.total > 0:
        try:
            resume = resume_command(_original_command(run), run.path)
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
