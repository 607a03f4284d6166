"""``helmscope claims``: the catalogue of claims."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from helmscope.claims.entry import Entry

claims = typer.Typer(
    name="claims",
    help="The claims of the theory, and what is known of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@claims.command("list")
def list_claims(as_json: AsJson = False) -> None:
    """List all claims: id, source, how it is decided, and the statement."""
    from helmscope.claims.reading import read_catalogue

    entries = read_catalogue()
    if as_json:
        print(json.dumps({"claims": [_record(entry) for entry in entries.values()]}, indent=2))
        return
    for entry in entries.values():
        head = f"{entry.id}  (source {entry.source}, by {' and '.join(entry.decided)}, not yet tried)"
        print(f"{head}\n{_block(entry.statement)}")


@claims.command("show")
def show_claim(
    claim: Annotated[str, typer.Argument(help="The id of a claim, as helmscope claims list prints it.")],
    as_json: AsJson = False,
) -> None:
    """Show one claim: what the source prints, the corrected form, the experiment and its frozen region."""
    from helmscope.claims.reading import entry

    found = entry(claim)
    if as_json:
        print(json.dumps(_record(found), indent=2))
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
        "verdict": "not yet tried",
    }
    for name, text in parts.items():
        if text:
            print(f"{name}:\n{_block(text)}")


def _record(entry: Entry) -> dict[str, object]:
    import msgspec

    fields = msgspec.to_builtins(entry)
    assert isinstance(fields, dict)
    return {**fields, "hash": entry.hash, "verdict": "not yet tried"}


def _block(text: str) -> str:
    return textwrap.fill(text, width=100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
