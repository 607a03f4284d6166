"""Run a spec from the command line: show the result, or after Ctrl-C how to resume."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from pathlib import Path

    from helmscope.jobs import Spec
    from helmscope.jobs.job import Result
    from helmscope.plots.figure import Figure
    from helmscope.runs.attempt import Engine

RESUMABLE = ("claims", "density", "measure", "phase", "report", "run", "simulate")


def run_and_show(
    spec: Spec,
    engine: Engine,
    *,
    out: str | None,
    resume: bool,
    allow_mixed: bool,
    as_json: bool = False,
    draw: Callable[[Any], Figure | None] | None = None,
    plot: Path | None = None,
) -> Result:
    """Run a spec, print the result and return it.

    With ``plot`` the picture that ``draw`` makes of the result is also written there, and that path is printed instead
    of the picture's in the run folder.
    """
    from helmscope.cli.results import show
    from helmscope.jobs import TrialsSpec, run
    from helmscope.jobs.run import FolderInUse, Interrupted
    from helmscope.jobs.trials import code_notice
    from helmscope.runs.progress import import_announced, print_status

    _check_folder_options(out, resume=resume, allow_mixed=allow_mixed)
    notice = code_notice(spec) if isinstance(spec, TrialsSpec) else ""
    if notice:
        print_status(notice)
    import_announced("torch")
    command = ["helmscope", *sys.argv[1:]]
    options = {"resume": resume, "allow_mixed": allow_mixed}
    try:
        result = run(spec, folder=out, engine=engine, show_progress=True, command=command, **options)
    except Interrupted as error:
        print_status(_resume_hint(command, error.folder.path))
        raise
    except FolderInUse as error:
        raise FolderInUse(error.folder, remedy="add --resume") from None
    for note in result.notes:
        print_status(note)
    if draw is not None and plot is not None:
        figure = draw(result)
        if figure is None:
            print_status(f"--plot: {plot} is not written, because an incomplete run has no picture")
        else:
            figure.save(plot)
            result = replace(result, picture=plot)  # type: ignore[call-arg]  # the result of a job that has a picture
    show(result, as_json=as_json)
    return result


def _check_folder_options(out: str | None, *, resume: bool, allow_mixed: bool) -> None:
    """Raise ``HelmscopeError`` for options that contradict each other; ``run`` would name its arguments instead."""
    if out == "":
        raise HelmscopeError("--out is '', but it must be a new or empty folder")
    if allow_mixed and not resume:
        raise HelmscopeError("--allow-mixed is given, but it applies only to a resumed run: add --resume or omit it")
    if resume and out is None:
        raise HelmscopeError(
            "--resume is given, but the folder of the run is not: add --out FOLDER (helmscope runs lists the folders)"
        )


def _resume_hint(command: Sequence[str], folder: object) -> str:
    try:
        return f"resume with: {resume_command(command, folder)}"
    except HelmscopeError as error:
        return f"no command to resume it is suggested, because {error}"


def resume_command(command: Sequence[str], folder: object) -> str:
    """The command that resumes the run in a folder, quoted for a shell. The original command comes from a file of
    unknown origin and this line will be pasted into a shell, so an unsafe one raises a ``HelmscopeError``.

    >>> resume_command(["helmscope", "simulate", "--n", "8"], "runs/a")
    'helmscope simulate --n 8 --out runs/a --resume'
    """
    words = list(command)
    if words[:1] != ["helmscope"] or words[1:2] not in [[verb] for verb in RESUMABLE]:
        raise HelmscopeError("it was not started by a command with the option --resume: repeat the original call")
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    words = [word for word in words if word != "--resume" and not word.startswith("--out=")]
    words += ["--out", str(folder), "--resume"]
    if not all(word.isprintable() for word in words):
        raise HelmscopeError("its command line or path contains control characters or other non-printable characters")
    return shlex.join(words)
