"""From a spec to the terminal: carries it out, says how to go on after Ctrl-C, and shows the result."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.jobs import Spec
    from helmscope.runs.attempt import Engine

RESUMABLE = ("claims", "phase", "report", "run", "simulate")


def carry_out(
    spec: Spec, engine: Engine, *, out: str | None, resume: bool, allow_mixed: bool, as_json: bool = False
) -> None:
    """Runs a spec and prints what came of it."""
    from helmscope.cli.results import show
    from helmscope.jobs import Trials, run
    from helmscope.jobs.run import Interrupted
    from helmscope.jobs.trials import code_that_runs
    from helmscope.runs.progress import print_status

    if out == "":
        raise HelmscopeError("out is '', but it must name a new or an empty folder")
    notice = code_that_runs(spec) if isinstance(spec, Trials) else ""
    if notice:
        print_status(notice)
    command = ["helmscope", *sys.argv[1:]]
    options = {"resume": resume, "allow_mixed": allow_mixed}
    try:
        result = run(spec, folder=out, engine=engine, show_progress=True, command=command, **options)
    except Interrupted as error:
        print_status(_going_on(command, error.folder.path))
        raise
    for note in result.notes:
        print_status(note)
    show(result, as_json=as_json)


def _going_on(command: Sequence[str], folder: object) -> str:
    try:
        return f"go on with: {resume_line(command, folder)}"
    except HelmscopeError as error:
        return f"no command to go on with is offered, because {error}"


def resume_line(command: Sequence[str], folder: object) -> str:
    """The command that goes on with the run in a folder, quoted for a shell. Commands stand in files, which anybody may
    have written, and this line will be pasted: a ``HelmscopeError`` says why there is none.

    >>> resume_line(["helmscope", "simulate", "--n", "8"], "runs/a")
    'helmscope simulate --n 8 --out runs/a --resume'
    """
    words = list(command)
    if words[:1] != ["helmscope"] or words[1:2] not in [[verb] for verb in RESUMABLE]:
        raise HelmscopeError("it was not begun by a command that knows --resume: repeat the call that began it")
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    words = [word for word in words if word != "--resume" and not word.startswith("--out=")]
    words += ["--out", str(folder), "--resume"]
    if not all(word.isprintable() for word in words):
        raise HelmscopeError("its command line or its path holds control characters or others that do not print")
    return shlex.join(words)
