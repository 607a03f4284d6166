"""The models and texts named by a spec, as subjects."""

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
class TrialSubjects:
    """The subjects named by a spec, None if it names none, and the command-line options that name them."""

    subject: Subject | None = None
    other: Subject | None = None
    texts: str | None = None
    options: tuple[str, ...] = ()

    def identify(self) -> None:
        """Load the subjects, so that an unusable model or text raises ``HelmscopeError`` before a folder is created."""
        for _, subject in self._subjects:
            if subject is not None:
                _ = subject.identity

    @property
    def _subjects(self) -> tuple[tuple[str, Subject | None], ...]:
        """The subjects by the field of the spec that names them."""
        return ("model", self.subject), ("other", self.other)

    def absolute_paths(self) -> dict[str, str | None]:
        """The fields of the spec that name files, as absolute paths."""
        models = {name: None if each is None else str(each.as_data()["model"]) for name, each in self._subjects}
        texts = None if self.texts is None else str(Path(self.texts).resolve())
        return {**models, "texts": texts}


def trial_subjects(spec: Trials) -> TrialSubjects:
    """The subjects named by a spec.

    >>> from helmscope.jobs.trials import Trials
    >>> trial_subjects(Trials(model="A")).subject
    <Subject A: 128 texts>
    """
    from helmscope.models.subject import Subject

    if spec.model is None:
        return TrialSubjects()
    prompts = None if spec.texts is None else read_texts(spec.texts)
    options: tuple[str, ...] = ("--model", spec.model)
    for name, value in (("texts", spec.texts), ("other", spec.other)):
        options += () if value is None else (f"--{name}", value)
    options += ("--truncate",) if spec.truncate else ()
    other = None if spec.other is None else Subject(spec.other, prompts, truncate=spec.truncate)
    return TrialSubjects(Subject(spec.model, prompts, truncate=spec.truncate), other, spec.texts, options)


def read_texts(name: str) -> list[Any]:
    """Read texts from a file: one per nonblank line or, if the name ends in .json, a list of strings or of rows of
    token ids.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise HelmscopeError(f"texts is '{name}', but it cannot be read: {reason}") from None
    if not name.endswith(".json"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HelmscopeError(f"texts is '{name}', but it is not valid JSON: {error}") from None
    if not isinstance(texts, list):
        raise HelmscopeError(f"texts is '{name}', but its JSON must be a list of strings or of rows of token ids")
    return texts
