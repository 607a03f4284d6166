"""``helmscope report``."""

from __future__ import annotations

from typing import Annotated

import typer

from helmscope.cli.options import (
    AllowMixed,
    From,
    MaxMemory,
    NamedModels,
    OnRay,
    Other,
    Quick,
    Resume,
    Texts,
    Threads,
    TrialSeed,
    Truncate,
    Workers,
)


def report(
    model: Annotated[
        list[str] | None,
        typer.Argument(help="Models to test the claims on: A, B, tied, folders or Hub ids [default: A, B and tied]."),
    ] = None,
    named: NamedModels = None,
    quick: Quick = False,
    claims_folder: From = None,
    texts: Texts = None,
    other: Other = None,
    truncate: Truncate = False,
    seed: TrialSeed = 0,
    threads: Threads = 1,
    workers: Workers = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/report-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Test every claim that has an experiment, on each model, and write report.html, one self-contained page."""
    options = locals()
    from helmscope.cli.options import chosen_models, make_engine, make_spec
    from helmscope.cli.output import run_and_show
    from helmscope.jobs import ReportSpec

    engine = make_engine(workers, max_memory, threads, ray)
    spec = make_spec(ReportSpec, options | {"models": chosen_models(model or [], named)})
    run_and_show(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)
