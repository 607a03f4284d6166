"""``helmscope report``."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from helmscope.cli.subjects import Model, Other, Texts, Truncate
from helmscope.cli.trials import AllowMixed, From, Jobs, MaxMemory, OnRay, Quick, Resume, Seed, Threads


def report(
    quick: Quick = False,
    folder: From = None,
    model: Model = None,
    texts: Texts = None,
    other: Other = None,
    truncate: Truncate = False,
    seed: Seed = 0,
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
    from helmscope.claims.reading import read_catalogue
    from helmscope.cli.options import engine_of
    from helmscope.cli.output import run_folder
    from helmscope.cli.subjects import identified, on_trial
    from helmscope.cli.trials import asked_claims, carry_out, plain_verdicts
    from helmscope.plots.style import styled
    from helmscope.report.page import page

    engine = engine_of(jobs, max_memory, threads, ray)
    on = on_trial(model, texts, other, truncate)
    claims = asked_claims([], folder, seed=seed, on=on)
    entries = read_catalogue(folder)
    with styled():  # what drawing and writing need is missed now, not after the work
        page(entries, [], seed=seed, quick=quick, folder=folder, options=on.words)
    identified(on)
    run = run_folder("report", out, resume=resume, allow_mixed=allow_mixed)
    trials, failed = carry_out(
        claims, run, engine, folder=folder, seed=seed, quick=quick, allow_mixed=allow_mixed, on=on
    )
    text = page(entries, trials, seed=seed, quick=quick, folder=folder, options=on.words)
    run.write_bytes("report.html", text.encode())
    counts = Counter(trial.verdict.ruling.value for trial in trials)
    path = str(run.path / "report.html")
    if as_json:
        told = {"report": path, "folder": str(run.path), "seed": seed, "quick": quick, "rulings": counts}
        print(json.dumps({**told, "verdicts": plain_verdicts(trials)}, indent=2))
    else:
        print(", ".join(f"{count} {ruling}" for ruling, count in sorted(counts.items())))
        print(f"report: {path}")
    if failed is not None:
        raise failed
