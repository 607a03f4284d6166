"""``helmscope report``."""

from __future__ import annotations

from typing import Annotated

import typer

from helmscope.cli.options import (
    AllowMixed,
    From,
    Jobs,
    MaxMemory,
    Model,
    OnRay,
    Other,
    Quick,
    Resume,
    Texts,
    Threads,
    TrialSeed,
    Truncate,
)


def report(
    quick: Quick = False,
    folder: From = None,
    model: Model = None,
    texts: Texts = None,
    other: Other = None,
    truncate: Truncate = False,
    seed: TrialSeed = 0,
    threads: Threads = 1,
    jobs: Jobs = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New folder for it [default: runs/report-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Try every claim that has an experiment and write report.html, one file that needs nothing else."""
    given = locals()
    from helmscope.cli.options import engine_of, spec_of
    from helmscope.cli.output import carry_out
    from helmscope.jobs import Report

    engine = engine_of(jobs, max_memory, threads, ray)
    spec = spec_of(Report, given)
    carry_out(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)
