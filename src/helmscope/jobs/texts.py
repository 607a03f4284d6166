"""The models and texts named by a spec, as subjects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.claims.judge import FEW_REPLICATES
from helmscope.types import HelmscopeError, check_memory, pluralized
from helmscope.types.arguments import short_repr

if TYPE_CHECKING:
    from helmscope.jobs.trials import TrialsSpec
    from helmscope.models.subject import Subject

MIN_TOKENS = 2  # of a text: a claim about tokens needs a pair


@dataclass(frozen=True)
class TrialSubjects:
    """The subjects named by a spec, empty if it names none; ``models`` are their names as the user wrote them, and
    ``options`` the command-line options about their texts and the second model.
    """

    subjects: tuple[Subject, ...] = ()
    other: Subject | None = None
    texts: str | None = None
    models: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def identify(self) -> None:
        """Load the subjects, so that an unusable model or text, or one too large for the memory of this machine, raises
        ``HelmscopeError`` before a folder is created.
        """
        from helmscope.jobs.cost import subject_size

        for subject in self.named:
            _check_tokenizer(subject)
            _ = subject.identity
            short = next((i for i, ids in enumerate(subject.token_ids) if len(ids) < MIN_TOKENS), None)
            if short is not None:
                raise HelmscopeError(
                    f"texts[{short}] is {short_repr(subject.texts[short])}, which has "
                    f"{pluralized(len(subject.token_ids[short]), 'token')} for model {subject.name}, but a trial needs "
                    f"at least {MIN_TOKENS} in each"
                )
            size = subject_size(subject)
            amounts = f"{size.parameters:,} parameters on {size.tokens:,} tokens"
            check_memory(f"model is '{subject.model}' with {amounts}", size.bytes // 8)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the number of texts of each subject does not allow to decide, as sentences."""
        return tuple(
            f"{subject.name} has {pluralized(len(subject.texts), 'text')}: with fewer than {FEW_REPLICATES} "
            "different ones, or distinct first tokens, claims about models remain inconclusive"
            for subject in self.named
            if len(set(subject.texts)) < FEW_REPLICATES
        )

    @property
    def named(self) -> tuple[Subject, ...]:
        """All subjects, the second model of a comparison last."""
        return self.subjects if self.other is None else (*self.subjects, self.other)

    def absolute_paths(self) -> dict[str, Any]:
        """The fields of the spec that name files, as absolute paths."""
        models = tuple(str(subject.as_data()["model"]) for subject in self.subjects)
        other = None if self.other is None else str(self.other.as_data()["model"])
        return {"models": models, "other": other, "texts": self.texts and str(Path(self.texts).resolve())}


def _check_tokenizer(subject: Subject) -> None:
    """Raise HelmscopeError, with what can be done in a spec or on the command line, if texts cannot be tokenized."""
    if subject.tokenizer is None and isinstance(subject.texts[0], str):
        why = subject.loaded.tokenizer_error
        has = "has no tokenizer" if why is None else f"has a tokenizer that cannot be read ({why})"
        raise HelmscopeError(
            f"model is '{subject.model}', which {has}, but the texts are strings: put its tokenizer into that folder, "
            "or set texts to a .json file with rows of token ids of one length, on the command line --texts IDS.json"
        )


def trial_subjects(spec: TrialsSpec) -> TrialSubjects:
    """The subjects named by a spec.

    >>> from helmscope.jobs.trials import TrialsSpec
    >>> trial_subjects(TrialsSpec(models=["A", "tied"])).subjects
    (<Subject A: 128 texts>, <Subject tied: 128 texts>)
    """
    from helmscope.models.subject import Subject

    if not spec.models:
        return TrialSubjects()
    prompts = None if spec.texts is None else read_texts(spec.texts)

    def subject(model: str) -> Subject:
        named = Subject(model, prompts, truncate=spec.truncate)
        return named.held_out() if spec.held_out else named

    options: tuple[str, ...] = ()
    for name, value in (("texts", spec.texts), ("other", spec.other)):
        options += () if value is None else (f"--{name}", value)
    options += ("--truncate",) if spec.truncate else ()
    other = None if spec.other is None else subject(spec.other)
    return TrialSubjects(tuple(subject(model) for model in spec.models), other, spec.texts, spec.models, options)


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
