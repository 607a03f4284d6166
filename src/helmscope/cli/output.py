"""Where results go: the run folder, standard output, a picture."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from helmscope.types import HelmscopeError, MissingExtra

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.store.manifest import Manifest
    from helmscope.store.run_folder import RunFolder

RESUMABLE = ("claims", "phase", "report", "simulate")


def run_folder(what: str, out: str | None, *, resume: bool, allow_mixed: bool) -> RunFolder:
    """A new folder, or with ``resume`` that of an earlier run."""
    from helmscope.store.run_folder import MANIFEST, RunFolder

    if allow_mixed and not resume:
        raise HelmscopeError("allow_mixed is given, but it is for a run that is resumed: add --resume, or leave it out")
    if out == "":
        raise HelmscopeError("out is '', but it must name a new or an empty folder")
    if resume:
        if out is None:
            raise HelmscopeError("resume is given, but not which run: add --out FOLDER (helmscope runs lists them)")
        return RunFolder.open(out)
    if out is not None and os.path.isfile(os.path.join(out, MANIFEST)):
        raise HelmscopeError(f"{out} holds an earlier run: add --resume to go on with it, or name a new folder")
    return RunFolder.new("runs", what) if out is None else RunFolder.create(out)


def manifest_of(**details: Any) -> Manifest:
    """The manifest of this command line."""
    from helmscope.store.manifest import Manifest

    return Manifest.collect(command=["helmscope", *sys.argv[1:]], **details)


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


@contextmanager
def resumable(manifest: Manifest, folder: RunFolder) -> Iterator[None]:
    """After Ctrl-C says the command that goes on."""
    from helmscope.runs.progress import say

    try:
        yield
    except KeyboardInterrupt:
        try:
            say(f"go on with: {resume_line(manifest.command, folder.path)}")
        except HelmscopeError as error:
            say(f"no command to go on with is offered, because {error}")
        raise


def picture(report: dict[str, Any], run: Any, measured: xr.Dataset, title: str) -> None:
    """A picture beside the numbers. Without the extra that draws it the numbers still stand, and the reason is said."""
    from helmscope.plots.overview import overview_figure
    from helmscope.plots.style import png
    from helmscope.runs import progress

    try:
        run.write_bytes("overview.png", png(overview_figure(measured, title=title)))
        report["picture"] = str(run.path / "overview.png")
    except MissingExtra as error:
        progress.say(f"no picture: {error}")


def say(report: dict[str, Any], as_json: bool) -> None:
    """Print the report; a run that did not finish leaves with exit code 1."""
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _say_plainly(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _say_plainly(report: dict[str, Any]) -> None:
    print(report["outcome"])
    for name, rows in report.get("measured", {}).items():
        last, error = rows["value"][-1], rows["stderr"][-1]
        value = "undefined" if last is None else f"{last:.6g}"
        print(f"{name:>20} at the end: {value}" + ("" if error is None else f" +- {error:.2g}"))
    for key in ("picture", "folder"):
        if key in report:
            print(f"{key}: {report[key]}")


def listed(measured: xr.Dataset) -> dict[str, Any]:
    """Curves over time, reduced over the systems, as plain lists; JSON has neither NaN nor infinity, so what is not a
    number is null.
    """
    from helmscope.stats.reduce import reduced

    measured = reduced(measured)

    def plain(name: str) -> list[float | None]:
        return [v if math.isfinite(v) else None for v in measured[name].values.tolist()]

    curves = [str(name) for name in measured.data_vars if measured[name].dims == ("time",)]
    names = [name for name in curves if f"{name}_stderr" in curves]
    rows = {name: {"value": plain(name), "stderr": plain(f"{name}_stderr")} for name in names}
    return {"systems": measured.attrs["n"], "times": measured.time.values.tolist(), "measured": rows}
