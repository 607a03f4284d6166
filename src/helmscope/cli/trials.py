"""What ``helmscope claims test`` and ``helmscope report`` share: trials in a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from helmscope.types import HelmscopeError, known_name

if TYPE_CHECKING:
    from helmscope.claims.registry import Registered
    from helmscope.claims.trial import Trial
    from helmscope.cli.subjects import OnTrial
    from helmscope.runs.attempt import Engine
    from helmscope.store.run_folder import RunFolder

Seed = Annotated[int, typer.Option(help="Seed of every trial.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer replicates, though never under 32.")]
From = Annotated[
    str | None,
    typer.Option("--from", help="A folder with your own claims: ID.toml each, and Python files, WHICH ARE RUN."),
]
Threads = Annotated[int, typer.Option(help="Threads of one trial.")]
Jobs = Annotated[int, typer.Option(help="Trials at a time, each in a process of its own.")]
MaxMemory = Annotated[str | None, typer.Option(help="Memory for all jobs together, such as 4GB.")]
OnRay = Annotated[str | None, typer.Option("--ray", help="Run on Ray: local, or the address of a cluster.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in --out.")]
AllowMixed = Annotated[bool, typer.Option("--allow-mixed", help="Resume under other versions, threads or CPU.")]


def asked_claims(claims: list[str], folder: str | None, *, seed: int, on: OnTrial) -> list[str]:
    """The claims to try, each once: those named, or all that can be tried on what is on trial. Says whose code is about
    to run. A claim that is named and cannot be tried on it is refused.
    """
    from helmscope.claims.reading import read_catalogue
    from helmscope.claims.registry import Case, experiments
    from helmscope.claims.trial import registered
    from helmscope.runs.progress import say

    Case(seed)
    entries = read_catalogue(folder)
    for claim in claims:  # before anybody's code runs
        known_name("claim", claim, entries)
    if folder is not None:
        files = ", ".join(path.name for path in sorted(Path(folder).glob("*.py"))) or "no Python file"
        say(f"running the code in {folder}: {files}")
    named = [registered(claim, folder).claim for claim in dict.fromkeys(claims)]
    known = experiments(folder)
    if not known:
        raise HelmscopeError(f"folder is '{folder}', but no function in it is decorated with experiment(ID)")
    asked = named or [claim for claim, each in known.items() if _fits(each, on)]
    if not asked:
        raise HelmscopeError(f"model is '{on.words[1]}', but no claim here can be tried with {' '.join(on.words)}")
    for claim in asked:
        known[claim].case(seed, subject=on.subject, other=on.other)
    return asked


def _fits(tried: Registered, on: OnTrial) -> bool:
    """Whether an experiment can be run on what is on trial."""
    from helmscope.claims.registry import ground_of

    subjects = [each for each in (on.subject, on.other) if each is not None]
    return len(subjects) <= len(tried.usual) and all(ground_of(each) in tried.subjects for each in subjects)


def carry_out(
    claims: list[str],
    run: RunFolder,
    engine: Engine,
    *,
    folder: str | None,
    seed: int,
    quick: bool,
    allow_mixed: bool,
    on: OnTrial,
) -> tuple[list[Trial], HelmscopeError | None]:
    """Run the trials; say beforehand what they cost, and after Ctrl-C how to go on. Where experiments failed, the
    others, and what is to be raised once they are shown.
    """
    from helmscope.claims.registry import experiments
    from helmscope.claims.trial import TrialsFailed, run_trials, sources
    from helmscope.cli.output import manifest_of, resumable
    from helmscope.runs.progress import say

    known = experiments(folder)
    seconds = sum(known[claim].seconds for claim in claims) / engine.jobs
    cost = "a few seconds" if seconds < 8 else f"about {round(seconds, -1):.0f} seconds{' or less' if quick else ''}"
    say(f"{len(claims)} trial{'s' if len(claims) > 1 else ''}, {cost}")
    subjects = {name: each for name, each in (("subject", on.subject), ("other", on.other)) if each is not None}
    parameters = {"claims": sorted(claims), "quick": quick, "from": folder and str(Path(folder).resolve())}
    inputs = {name: digest for claim in claims for name, digest in sources(claim, folder).items()}
    manifest = manifest_of(
        seed=seed,
        dtype="float64",
        device="cpu",
        threads=engine.threads,
        inputs=inputs | {name: each.identity for name, each in subjects.items()},
        # in whichever order and by whichever path they are asked for, the run is the same
        parameters=parameters | {name: each.name for name, each in subjects.items()},
    )
    try:
        with resumable(manifest, run):
            trials = run_trials(
                claims,
                run,
                seed=seed,
                quick=quick,
                folder=folder,
                subject=on.subject,
                other=on.other,
                manifest=manifest,
                engine=engine,
                heading="trying claims",
                allow_mixed=allow_mixed,
            )
    except TrialsFailed as error:
        return error.trials, error
    return trials, None


def plain_verdicts(trials: list[Trial]) -> object:
    """The verdicts as JSON holds them."""
    from helmscope.store.verdicts import encode_verdicts

    return json.loads(encode_verdicts([trial.verdict for trial in trials]))
