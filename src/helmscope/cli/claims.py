"""``helmscope claims``: the catalogue of claims and their trials."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from helmscope.cli.options import (
    AllowMixed,
    From,
    HeldOut,
    MaxMemory,
    Models,
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
from helmscope.cli.results import indented

if TYPE_CHECKING:
    from helmscope.claims.entry import Change, Condition, ControlCase, Entry
    from helmscope.claims.registry import Registered

claims = typer.Typer(
    name="claims",
    help="List, show and test the claims of the theory.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
EntryFolder = Annotated[
    str | None, typer.Option("--from", help="Folder with your own claims; only their entries are read.")
]
NO_EXPERIMENT = "no experiment yet"


@claims.command("list")
def list_claims(folder: EntryFolder = None, as_json: AsJson = False) -> None:
    """List all claims with their sources and statements."""
    from helmscope.claims.reading import read_catalogue
    from helmscope.claims.sources import sources
    from helmscope.store.printable import printable

    entries, experiments = read_catalogue(folder), _experiments(folder)
    if as_json:
        claims = [_as_data(entry, experiments, folder) for entry in entries.values()]
        print(json.dumps({"claims": claims}, indent=2))
        return
    cited = [key for key in dict.fromkeys(entry.source for entry in entries.values()) if key in sources()]
    if cited:
        print("Sources:")
    for key in cited:
        print(indented(f"{key}: {_cite(key)}"))
    for entry in entries.values():
        decided = f", by {' and '.join(entry.decided)}" if entry.decided else ""
        # whether a user's claim can be tried is not known before their code runs
        state = "" if folder else "; can be tried" if entry.id in experiments else f"; {NO_EXPERIMENT}"
        print(f"{entry.id}  ({printable(entry.source)}{decided}{state})")
        print(indented(entry.statement))


@claims.command("show")
def show_claim(
    claim: Annotated[str, typer.Argument(help="Id of a claim, as printed by helmscope claims list.")],
    folder: EntryFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show everything that the entry of one claim states."""
    from helmscope.claims.reading import LISTED_BY, read_catalogue
    from helmscope.types import check_name

    entries = read_catalogue(folder)
    entry = entries[check_name("claim", claim, entries, listed_by=LISTED_BY if folder is None else "")]
    data = _as_data(entry, _experiments(folder), folder)
    if as_json:
        print(json.dumps(data, indent=2))
        return
    print(f"{entry.id}, version {entry.version}, entry {entry.hash[:12]}")
    printed = entry.printed
    sections = {
        "statement": entry.statement,
        "source": ", ".join(filter(None, (_cite(entry.source), entry.place))),
        "as printed": ""
        if printed is None
        else f"{printed.text} ({printed.place}): {printed.judgment}. {printed.reason}",
        "corrected": entry.corrected,
        "decided by": " and ".join(entry.decided),
        "experiment": entry.experiment,
        "null": entry.null,
        **{
            f"{'premise' if case.premise else 'condition'} {case.name}{_on(case)}": _condition_text(case)
            for case in entry.conditions
        },
        **{
            f"control {case.name}{_on(case)}": f"{case.text} Expected: {' or '.join(case.expected)}.".lstrip()
            for case in entry.controls
        },
        "constants": ", ".join(f"{name} = {value}" for name, value in entry.constants.items()),
        "history": _history_text(entry.history),
        "can be tried on": data["subjects"],
        "trial": data["trial"],
    }
    for name, text in sections.items():
        if text:
            print(f"{name}:\n{indented(str(text))}")


def _cite(key: str) -> str:
    """The citation of a source with its link; the key itself for a source of a user's catalogue."""
    from helmscope.claims.sources import citation, sources

    link = sources()[key].link if key in sources() else ""
    return f"{citation(key)}, {link}" if link else citation(key)


def _history_text(history: Iterable[Change]) -> str:
    """The history as one paragraph, in which all lines of a version share one heading."""
    sentences = []
    for version, lines in groupby(history, key=lambda line: line.version):
        sentences.append(f"Version {version}:")
        for line in lines:
            before = f"Before: {line.before}." if line.before else ""
            sentences += filter(None, (line.change, line.look, line.reason, before))
    return " ".join(sentences)


def _on(case: Condition | ControlCase) -> str:
    return "" if case.on is None else f" on a {case.on.value}"


def _condition_text(case: Condition) -> str:
    from helmscope.types import region_text

    region = f"{case.text} ({region_text(case.region)})." if case.region.comment else case.text
    return f"{case.statistic} {region}".lstrip()


@claims.command("test")
def run_claims(
    claim: Annotated[list[str] | None, typer.Argument(help="Ids of claims [default: all that can be tried].")] = None,
    claims_folder: From = None,
    model: Models = None,
    texts: Texts = None,
    other: Other = None,
    truncate: Truncate = False,
    held_out: HeldOut = False,
    quick: Quick = False,
    seed: TrialSeed = 0,
    threads: Threads = 1,
    workers: Workers = 1,
    max_memory: MaxMemory = None,
    ray: OnRay = None,
    out: Annotated[str | None, typer.Option(help="New run folder [default: runs/claims-DATE-TIME].")] = None,
    resume: Resume = False,
    allow_mixed: AllowMixed = False,
    as_json: AsJson = False,
) -> None:
    """Run the experiments of claims and print their verdicts."""
    options = locals()
    from helmscope.cli.options import make_engine, make_spec
    from helmscope.cli.output import run_and_show
    from helmscope.jobs import TrialsSpec

    engine = make_engine(workers, max_memory, threads, ray)
    spec = make_spec(TrialsSpec, options | {"claims": claim or [], "models": model or []})
    run_and_show(spec, engine, out=out, resume=resume, allow_mixed=allow_mixed, as_json=as_json)


def _experiments(folder: str | None) -> dict[str, Registered]:
    """The experiments by claim; none for a user's folder, whose code would have to be run to find them."""
    from helmscope.claims.registry import experiments

    return experiments() if folder is None else {}


def _as_data(entry: Entry, experiments: dict[str, Registered], folder: str | None) -> dict[str, object]:
    import shlex

    import msgspec

    from helmscope.claims.sources import sources

    experiment, source = experiments.get(entry.id), sources().get(entry.source)
    data = {**entry.content, "hash": entry.hash, "cited": None if source is None else msgspec.to_builtins(source)}
    if folder is not None:
        return {**data, "trial": f"helmscope claims test {entry.id} --from {shlex.quote(folder)}", "subjects": ""}
    if experiment is None:
        return {**data, "trial": NO_EXPERIMENT, "subjects": ""}
    names = ", ".join(subject.name for subject in experiment.default_subjects)
    subjects = f"a {' or a '.join(experiment.subject_kinds)} (by default {names})"
    return {**data, "trial": f"helmscope claims test {entry.id}", "subjects": subjects}
