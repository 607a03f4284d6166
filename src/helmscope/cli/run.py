"""``helmscope run``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from helmscope.cli.options import AllowMixed, AsJson, MaxMemory, OnRay, Resume, Threads, Workers
from helmscope.types import HelmscopeError


def run(
    spec: Annotated[
        str | None,
        typer.Argument(help="TOML file with a spec, or a run folder [default with --resume: --out]."),
    ] = None,
    threads: Threads = 1,
    workers: Workers = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/JOB-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only print the estimated cost.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a spec: a simulation, a density, a phase diagram, measurements, trials or a report, as the other verbs do."""
    from helmscope.cli.options import make_engine
    from helmscope.cli.output import run_and_show
    from helmscope.jobs import read_spec
    from helmscope.runs.progress import print_status

    engine = make_engine(workers, max_memory, threads, ray)
    source = spec if spec is not None or not resume else out
    if source is None:
        raise HelmscopeError("spec is missing, but it must be a TOML file; with --resume, --out FOLDER suffices")
    job_spec = read_spec(source)
    if not estimate:
        run_and_show(job_spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)
        return
    print_status("estimating ...")
    cost = job_spec.estimate()
    data = {"work": cost.work, "seconds": cost.seconds, "bytes": cost.bytes, "warning": cost.warning}
    print(json.dumps(data, indent=2) if as_json else str(cost))
