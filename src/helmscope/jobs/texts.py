"""The models and texts that a spec names, as subjects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.jobs.trials import Trials
    from helmscope.models.subject import Subject


@dataclass(frozen=True)
class OnTrial:
    """The subjects that a spec names, None where it names none, and the words that name them on the command line."""

    subject: Subject | None = None
    other: Subject | None = None
    texts: str | None = None
    words: tuple[str, ...] = ()

    def identify(self) -> None:
        """Loads what is on trial, so that a model or texts that cannot be used are refused before a folder is made."""
        for _, each in self._subjects:
            if each is not None:
                _ = each.identity

    @property
    def _subjects(self) -> tuple[tuple[str, Subject | None], ...]:
        """By the field of a spec that names them."""
        return ("model", self.subject), ("other", self.other)

    def places(self) -> dict[str, str | None]:
        """The fields of the spec that name files, as absolute paths."""
        named = {name: None if each is None else str(each.as_data()["model"]) for name, each in self._subjects}
        texts = None if self.texts is None else str(Path(self.texts).resolve())
        return {**named, "texts": texts}


def on_trial(spec: Trials) -> OnTrial:
    """The subjects that a spec names.

    >>> from helmscope.jobs.trials import Trials
    >>> on_trial(Trials(model="A")).subject
    <Subject A: 128 texts>
    """
    from helmscope.models.subject import Subject

    if spec.model is None:
        return OnTrial()
    prompts = None if spec.texts is None else texts_in(spec.texts)
    words: tuple[str, ...] = ("--model", spec.model)
    for name, value in (("texts", spec.texts), ("other", spec.other)):
        words += () if value is None else (f"--{name}", value)
    words += ("--truncate",) if spec.truncate else ()
    other = None if spec.other is None else Subject(spec.other, prompts, truncate=spec.truncate)
    return OnTrial(Subject(spec.model, prompts, truncate=spec.truncate), other, spec.texts, words)


def texts_in(name: str) -> list[Any]:
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
