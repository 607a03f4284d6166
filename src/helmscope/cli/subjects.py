"""From words on the command line to what is put on trial."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.models.subject import Subject

Model = Annotated[
    str | None,
    typer.Option(help="Try the claims on this model: A, B, tied, a folder or a Hub id [default: as each claim says]."),
]
Texts = Annotated[
    str | None,
    typer.Option(help="Texts for the model: a file with one on each line, or a JSON list [default: those in the box]."),
]
Other = Annotated[str | None, typer.Option(help="A second model, for claims that take two.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are longer than the model's context.")]


@dataclass(frozen=True)
class OnTrial:
    """The subjects that a command line names, and the words that name them again; both None where it names none."""

    subject: Subject | None = None
    other: Subject | None = None
    words: tuple[str, ...] = ()


def on_trial(model: str | None, texts: str | None, other: str | None, truncate: bool) -> OnTrial:
    """The subjects that the options name; options that need a model and have none are refused."""
    from helmscope.models.subject import Subject

    options = {"texts": texts, "other": other, "truncate": truncate or None}
    if model is None:
        for name, value in options.items():
            if value is not None:
                raise HelmscopeError(f"{name} is given, but no model: add --model A, a folder or a Hub id")
        return OnTrial()
    prompts = None if texts is None else texts_of(texts)
    words: tuple[str, ...] = ("--model", model)
    for name in ("texts", "other"):
        words += () if options[name] is None else (f"--{name}", str(options[name]))
    words += ("--truncate",) if truncate else ()
    second = None if other is None else Subject(other, prompts, truncate=truncate)
    return OnTrial(Subject(model, prompts, truncate=truncate), second, words)


def identified(on: OnTrial) -> None:
    """Load what is on trial, so that a model or texts that cannot be used are refused before a folder is made."""
    for each in (on.subject, on.other):
        if each is not None:
            _ = each.identity


def texts_of(name: str) -> list[Any]:
    """The texts in a file: one on each line that is not blank, or where the name ends in .json a list of strings or of
    rows of token ids.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise HelmscopeError(f"texts is '{name}', but it cannot be read: {why}") from None
    if not name.endswith(".json"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HelmscopeError(f"texts is '{name}', but it is not valid JSON: {error}") from None
    if not isinstance(found, list):
        raise HelmscopeError(f"texts is '{name}', but the JSON in it must be a list of strings or of rows of token ids")
    return found
