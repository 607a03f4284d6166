"""``helmscope run``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from helmscope.cli.options import AllowMixed, AsJson, Jobs, MaxMemory, OnRay, Resume, Threads
from helmscope.types import HelmscopeError


def run(
    spec: Annotated[
        str | None, typer.Argument(help="A spec in TOML, such as the spec.toml of a run folder [with --resume: that].")
    ] = None,
    threads: Threads = 1,
    jobs: Jobs = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/JOB-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would cost.")] = False,
    as_json: AsJson = False,
) -> None:
    """Carry out a spec: a simulation, a phase diagram, trials or a report, as the other verbs do."""
    from helmscope.cli.options import engine_of
    from helmscope.cli.output import carry_out
    from helmscope.jobs import read

    engine = engine_of(jobs, max_memory, threads, ray)
    place = spec if spec is not None or not resume else out
    if place is None:
        raise HelmscopeError(
            "spec is missing, but it must name a TOML file, or --out with --resume the folder of a run"
        )
    asked = read(place)
    if not estimate:
        carry_out(asked, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)
        return
    cost = asked.estimate()
    told = {"work": cost.work, "seconds": cost.seconds, "bytes": cost.bytes}
    print(json.dumps(told, indent=2) if as_json else str(cost))
