"""``helmscope claims``: the catalogue of claims, and their trials."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

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
from helmscope.cli.results import block

if TYPE_CHECKING:
    from helmscope.claims.entry import Entry
    from helmscope.claims.registry import Registered

claims = typer.Typer(
    name="claims",
    help="The claims of the theory, and what is known of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
Listed = Annotated[str | None, typer.Option("--from", help="A folder with your own claims, whose entries are read.")]
NOT_YET = "not yet tried"


@claims.command("list")
def list_claims(folder: Listed = None, as_json: AsJson = False) -> None:
    """List all claims: id, source, how it is decided, whether it can be tried, and the statement."""
    from helmscope.claims.reading import read_catalogue
    from helmscope.store.printable import printable

    entries, tried = read_catalogue(folder), _tried(folder)
    if as_json:
        print(json.dumps({"claims": [_record(entry, tried) for entry in entries.values()]}, indent=2))
        return
    for entry in entries.values():
        state = "helmscope claims test" if entry.id in tried else NOT_YET
        print(f"{entry.id}  (source {printable(entry.source)}, by {' and '.join(entry.decided)}; {state})")
        print(block(entry.statement))


@claims.command("show")
def show_claim(
    claim: Annotated[str, typer.Argument(help="The id of a claim, as helmscope claims list prints it.")],
    folder: Listed = None,
    as_json: AsJson = False,
) -> None:
    """Show one claim: what the source prints, the corrected form, the experiment and its frozen region."""
    from helmscope.claims.reading import read_catalogue
    from helmscope.types import known_name

    entries = read_catalogue(folder)
    found, tried = entries[known_name("claim", claim, entries)], _tried(folder)
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
        "can be tried on": _record(found, tried)["subjects"],
        "trial": _record(found, tried)["trial"],
    }
    for name, text in parts.items():
        if text:
            print(f"{name}:\n{block(str(text))}")


@claims.command("test")
def try_claims(
    claim: Annotated[list[str] | None, typer.Argument(help="Ids of claims [default: all that can be tried].")] = None,
    folder: From = None,
    model: Model = None,
    texts: Texts = None,
    other: Other = None,
    truncate: Truncate = False,
    quick: Quick = False,
    seed: TrialSeed = 0,
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
    given = locals()
    from helmscope.cli.options import engine_of, spec_of
    from helmscope.cli.output import carry_out
    from helmscope.jobs import Trials

    engine = engine_of(jobs, max_memory, threads, ray)
    spec = spec_of(Trials, given | {"claims": claim or []})
    carry_out(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)


def _tried(folder: str | None) -> dict[str, Registered]:
    """The claims that have an experiment; of a user's folder that is not known without running its code."""
    from helmscope.claims.registry import experiments

    return experiments() if folder is None else {}


def _record(entry: Entry, tried: dict[str, Registered]) -> dict[str, object]:
    found = tried.get(entry.id)
    if found is None:
        return {**entry.content, "hash": entry.hash, "trial": NOT_YET, "subjects": ""}
    usual = " and ".join(each.name for each in found.usual)
    subjects = f"{' or '.join(found.subjects)} (usually {usual})"
    return {**entry.content, "hash": entry.hash, "trial": f"helmscope claims test {entry.id}", "subjects": subjects}
