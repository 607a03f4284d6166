"""``helmscope claims``: the catalogue of claims, and their trials."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from helmscope.cli.trials import AllowMixed, From, Jobs, MaxMemory, OnRay, Quick, Resume, Seed, Threads

if TYPE_CHECKING:
    from helmscope.claims.entry import Entry
    from helmscope.types import Verdict

claims = typer.Typer(
    name="claims",
    help="The claims of the theory, and what is known of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
NOT_YET = "not yet tried"


@claims.command("list")
def list_claims(as_json: AsJson = False) -> None:
    """List all claims: id, source, how it is decided, whether it can be tried, and the statement."""
    from helmscope.claims.reading import read_catalogue

    entries, tried = read_catalogue(), _tried()
    if as_json:
        print(json.dumps({"claims": [_record(entry, tried) for entry in entries.values()]}, indent=2))
        return
    for entry in entries.values():
        state = "helmscope claims test" if entry.id in tried else NOT_YET
        print(f"{entry.id}  (source {entry.source}, by {' and '.join(entry.decided)}; {state})")
        print(_block(entry.statement))


@claims.command("show")
def show_claim(
    claim: Annotated[str, typer.Argument(help="The id of a claim, as helmscope claims list prints it.")],
    as_json: AsJson = False,
) -> None:
    """Show one claim: what the source prints, the corrected form, the experiment and its frozen region."""
    from helmscope.claims.reading import entry

    found, tried = entry(claim), _tried()
    if as_json:
        print(json.dumps(_record(found, tried), indent=2))
        return
    print(f"{found.id}, version {found.version}, entry {found.hash[:12]}")
    parts = {
        "statement": found.statement,
        "source": found.source,
        "as printed": found.printed,
        "corrected": found.corrected,
        "decided by": " and ".join(found.decided),
        "experiment": found.experiment,
        "statistic": found.statistic,
        "null": found.null,
        "region": found.region.text,
        "verdict": _record(found, tried)["verdict"],
    }
    for name, text in parts.items():
        if text:
            print(f"{name}:\n{_block(str(text))}")


@claims.command("test")
def try_claims(
    claim: Annotated[list[str] | None, typer.Argument(help="Ids of claims [default: all that can be tried].")] = None,
    folder: From = None,
    quick: Quick = False,
    seed: Seed = 0,
    threads: Threads = 1,
    jobs: Jobs = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/claims-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: AsJson = False,
) -> None:
    """Put claims on trial: run their experiments and judge what they find by the frozen regions."""
    from helmscope.cli.options import engine_of
    from helmscope.cli.output import run_folder
    from helmscope.cli.trials import asked_claims, carry_out
    from helmscope.runs.progress import say

    engine = engine_of(jobs, max_memory, threads, ray)
    asked = asked_claims(claim or [], folder, seed=seed)
    run = run_folder("claims", out, resume=resume)
    trials = carry_out(asked, run, engine, folder=folder, seed=seed, quick=quick, allow_mixed=allow_mixed)
    verdicts = [trial.verdict for trial in trials]
    if as_json:
        print(_as_json(verdicts, seed=seed, quick=quick))
    else:
        for verdict in verdicts:
            print(f"{verdict.claim}: {verdict.ruling.value}\n{_block(verdict.sentence)}")
    say(f"folder: {run.path}")


def _as_json(verdicts: list[Verdict], *, seed: int, quick: bool) -> str:
    """Nothing in it depends on time or place: the same seed gives the same bytes."""
    from helmscope.store.verdicts import encode_verdicts

    return json.dumps({"seed": seed, "quick": quick, "verdicts": json.loads(encode_verdicts(verdicts))}, indent=2)


def _tried() -> set[str]:
    from helmscope.claims.registry import experiments

    return set(experiments())


def _record(entry: Entry, tried: set[str]) -> dict[str, object]:
    import msgspec

    fields = msgspec.to_builtins(entry)
    assert isinstance(fields, dict)
    verdict = f"helmscope claims test {entry.id}" if entry.id in tried else NOT_YET
    return {**fields, "hash": entry.hash, "verdict": verdict}


def _block(text: str) -> str:
    return textwrap.fill(text, width=100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
