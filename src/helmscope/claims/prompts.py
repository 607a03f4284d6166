"""The prompts of a trial on a model, its replicates: different texts that begin with different tokens, and enough of
them.

Every experiment on a model chooses its prompts here, so that the rule is the same for all: copies of a text are not
replicates, prompts that begin alike are not independent, and too few prompts decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helmscope.claims.finding import Finding
from helmscope.types import pluralized
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from helmscope.claims.registry import TrialCase
    from helmscope.models.identity import Prompt
    from helmscope.models.subject import Subject

JOINED = 64  # texts that are joined to a long prompt, more than enough


@dataclass(frozen=True)
class ChosenPrompts(ConciseRepr):
    """The prompts of a trial. ``texts`` are texts of the subject, or rows of token ids cut to a length;
    ``first_tokens`` is their number of distinct first tokens. ``too_few`` says in a sentence why so few prompts decide
    nothing, and ``alike`` why prompts that begin alike do not; both are "" if the prompts suffice.

    >>> from helmscope.claims.registry import registered_case
    >>> from helmscope.models.subject import Subject
    >>> chosen = ChosenPrompts.of(registered_case("residual-flow", quick=True, subject=Subject("A")), length=32)
    >>> len(chosen.texts), chosen.first_tokens, chosen.too_few
    (32, 32, '')
    """

    texts: tuple[Prompt, ...]
    first_tokens: int
    too_few: str = ""
    alike: str = ""

    @classmethod
    def of(cls, case: TrialCase, *, length: int | None = None, gap: int | None = None) -> ChosenPrompts:
        """The prompts of a trial, as many as the constants ``prompts`` and ``prompts_quick`` of its entry say; its
        constant ``least_prompts`` is the least number of prompts, and of distinct first tokens, that decide.

        With ``length`` the prompts are the first tokens of the texts that have as many; with ``gap``, texts that have
        two different tokens at least that many positions apart after the first one.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.subject import Subject
        >>> subject = Subject("A", ["Once upon a time there was a cat."] * 40)
        >>> ChosenPrompts.of(registered_case("residual-flow", subject=subject), length=4).too_few
        'the claim needs 32 different texts of at least 4 tokens, but A has 1 among its 40 texts'
        """
        subject, least = case.subject, case.constant("least_prompts")
        chosen = choose_prompts(
            case.count(case.constant("prompts"), quick=case.constant("prompts_quick")), subject, length=length, gap=gap
        )
        texts, firsts = chosen
        too_few = alike = ""
        if len(texts) < least:
            wanted = "" if length is None else f" of at least {pluralized(length, 'token')}"
            wanted += (
                ""
                if gap is None
                else f", each with two different tokens at least {gap} positions apart after its first"
            )
            too_few = (
                f"the claim needs {least} different texts{wanted}, but {subject.name} has {len(texts)} among its "
                f"{pluralized(len(subject.texts), 'text')}"
            )
        elif firsts < least:
            alike = (
                f"the {len(texts)} prompts have only {pluralized(firsts, 'distinct first token')}, and prompts that "
                f"begin alike are not independent: the claim needs {least}"
            )
        return cls(texts, firsts, too_few, alike)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def setting(self) -> str:
        """How many prompts there are, with how many first tokens.

        >>> ChosenPrompts(("Once upon a time", "Once more"), 1).setting
        '2 prompts with 1 distinct first token'
        """
        return f"{pluralized(len(self.texts), 'prompt')} with {pluralized(self.first_tokens, 'distinct first token')}"


def prompts_or_finding(
    case: TrialCase,
    *parts: str,
    causal: bool = False,
    mlp: bool = False,
    head: bool = False,
    length: int | None = None,
    gap: int | None = None,
) -> ChosenPrompts | Finding:
    """The prompts of a trial on a model, or its Finding if there can be no evidence: an impossible premise if the model
    lacks what the claim needs, inconclusive if it has too few different texts.

    ``parts``, ``causal``, ``mlp`` and ``head`` are those of ``Subject.unmet_premise``, ``length`` and ``gap`` those of
    ``ChosenPrompts.of``. An experiment starts with it and returns the Finding, if it is one; later it passes
    ``undecided_because=prompts.alike`` to its own. Raises HelmscopeError for an unknown part.

    >>> from helmscope.claims.registry import registered_case
    >>> from helmscope.models.subject import Subject
    >>> case = registered_case("small-steps", quick=True, subject=Subject("A"))
    >>> len(prompts_or_finding(case, "trajectory", mlp=True, gap=1))
    32
    >>> case = registered_case("small-steps", subject=Subject("A", ["Once upon a time there was a cat."]))
    >>> prompts_or_finding(case, "trajectory", gap=1).evidence.reason
    'the claim needs 32 different texts, each with two different tokens ..., but A has 1 among its 1 text'
    """
    unmet = case.subject.unmet_premise(*parts, causal=causal, mlp=mlp, head=head)
    if unmet is not None:
        return Finding.impossible(unmet)
    prompts = ChosenPrompts.of(case, length=length, gap=gap)
    return Finding.inconclusive(prompts.too_few) if prompts.too_few else prompts


def choose_prompts(
    count: int, subject: Subject, *, length: int | None = None, gap: int | None = None
) -> tuple[tuple[Prompt, ...], int]:
    """At most ``count`` different prompts of a subject that cover as many first tokens as possible, and their number of
    distinct first tokens: first one text for each first token, then a second one for each, and so on.

    ``length`` and ``gap`` are those of ``ChosenPrompts.of``. A text with the same token ids as an earlier one is left
    out. Tokens with which all texts begin, such as a token that marks the beginning, do not count as first.

    >>> from helmscope.models.subject import Subject
    >>> texts, first_tokens = choose_prompts(32, Subject("A"), gap=16)
    >>> len(texts), first_tokens
    (32, 32)
    """
    rows = subject.token_ids if length is None else tuple(row[:length] for row in subject.token_ids)
    earliest = {row: k for k, row in reversed(list(enumerate(rows)))}
    usable = [
        k
        for k, row in enumerate(rows)
        if earliest[row] == k and (length is None or len(row) == length) and (gap is None or _has_pair(row, gap))
    ]
    most = min((len(rows[k]) for k in usable), default=0) - 1
    shared = 0
    while len(usable) > 1 and shared < most and len({rows[k][shared] for k in usable}) == 1:
        shared += 1
    firsts = {k: int(rows[k][shared]) for k in usable}
    seen: dict[int, int] = {}
    rank = {}
    for k, first in firsts.items():
        rank[k] = seen[first] = seen.get(first, -1) + 1
    chosen = sorted(sorted(usable, key=lambda k: (rank[k], k))[:count])
    texts = tuple(subject.texts[k] if length is None else rows[k] for k in chosen)
    return texts, len({firsts[k] for k in chosen})


def long_prompt(subject: Subject, length: int) -> tuple[int, ...]:
    """The token ids of one prompt of ``length`` tokens, or as many as the model's context and its texts have: texts of
    the subject, joined.

    >>> from helmscope.models.subject import Subject
    >>> len(long_prompt(Subject("A"), 256)), len(long_prompt(Subject("A"), 9_999))
    (256, 256)
    """
    from helmscope.models.texts import context_length  # deferred, since listing claims needs no models
    from helmscope.models.tokenizer import encode

    if isinstance(subject.texts[0], str) and subject.tokenizer is not None:
        ids = encode([" ".join(map(str, subject.texts[:JOINED]))], subject.tokenizer)[0]
    else:
        ids = [token for row in subject.token_ids[:JOINED] for token in row]
    limit = context_length(subject.loaded.model)
    return tuple(ids[: length if limit is None else min(length, limit)])


def _has_pair(ids: Sequence[int], gap: int) -> bool:
    return any(ids[i] != other for i in range(1, len(ids) - gap) for other in ids[i + gap :])
