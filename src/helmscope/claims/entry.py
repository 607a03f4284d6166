"""A claim as data: its statement and source, how it is tried, and the regions that decide."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from helmscope.claims.entry_errors import type_error_sentence
from helmscope.types import (
    HelmscopeError,
    Judgment,
    Region,
    Ruling,
    check_integer,
    check_name,
    one_line_repr,
    region_text,
)

Constant = float | int | str | list[float | int | str]
OWN_WORK = "own work"  # the source of an entry that states none


class SubjectKind(StrEnum):
    """What a claim is tried on: a simulation, or a recorded model.

    >>> SubjectKind("model").name
    'MODEL'
    """

    SIMULATION = "simulation"
    MODEL = "model"


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A region in words and its bounds: ``low`` and ``high`` belong to it, ``above`` and ``below`` do not."""

    text: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def region(self) -> Region:
        """The region as the rest of the package uses it."""
        return Region(text=self.text, low=self.low, high=self.high, above=self.above, below=self.below)


class Condition(Bounds, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A quantity and the region in which it must be. A claim holds if all its conditions do; ``on`` restricts a
    condition to simulations or to models. A condition without bounds is described and not judged. If one that is a
    ``premise`` does not hold, the claim is not refuted: its premise is impossible for that subject.

    ``parse_entry`` derives the ``text`` from the bounds if there is none, and the ``name`` of the only condition of a
    claim from the id; ``statistic`` says what is measured and may be empty.

    >>> Condition(name="slope", statistic="a slope", text="0.5 to 2", low=0.5, high=2.0).region.ends
    (0.5, 2.0)
    """

    name: str = ""
    statistic: str = ""
    on: SubjectKind | None = None
    premise: bool = False


class ControlCase(Bounds, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A case with a known answer. Its bounds are by default those of the condition named ``of``, by default the first.

    ``expected`` lists the rulings that it may get; with any other one the trial proves nothing.

    >>> ControlCase(name="V = -I").expected
    ('refuted',)
    """

    name: str
    expected: tuple[str, ...] = (Ruling.REFUTED.value,)
    on: SubjectKind | None = None
    of: str | None = None


class PrintedForm(Bounds, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What the source prints, quoted or in our words (``text``), its ``place`` in the source, the ``judgment`` by
    theory and its ``reason``. Bounds are for a trial that computes it.

    >>> PrintedForm(text="R = O(e^-beta)", place="slide 9", judgment="true, not sharp", reason="1 > e^-beta").judgment
    'true, not sharp'
    """

    place: str
    judgment: str
    reason: str


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A line of an entry's history: what changed with ``version``, why, and the verdict ``before``; or a ``look`` at
    the held-out texts, whose verdicts were published.

    >>> Change(version=2, change="the bound is exclusive", reason="0 supported it", before="supported").look
    ''
    """

    version: int
    change: str = ""
    reason: str = ""
    before: str = ""
    look: str = ""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One claim of the catalogue. An entry is pure data and cannot refer to code.

    A file must state ``statement`` and ``conditions``; ``parse_entry`` completes the rest. ``source`` is a key of
    ``claims.sources`` (or free text in a user's catalogue) and ``place`` where the source makes the claim. ``decided``
    is empty if the experiment alone determines what the claim is tried on. ``printed`` judges what the source prints,
    ``corrected`` is the form that holds if that is wrong or incomplete. ``constants`` are the numbers that a trial
    depends on, such as levels.

    >>> from helmscope.claims.reading import entry
    >>> entry("rate").conditions[0].high
    1.000001
    """

    id: str
    version: int
    statement: str
    source: str
    conditions: tuple[Condition, ...]
    decided: tuple[SubjectKind, ...] = ()
    experiment: str = ""
    null: str = ""
    place: str = ""
    corrected: str = ""
    printed: PrintedForm | None = None
    controls: tuple[ControlCase, ...] = ()
    constants: dict[str, Constant] = msgspec.field(default_factory=dict)
    history: tuple[Change, ...] = ()

    def __repr__(self) -> str:
        return one_line_repr(f"Entry {self.id}, version {self.version}: {self.statement}")

    @property
    def hash(self) -> str:
        """SHA-256 of what decides: ``content`` without its history, as JSON with sorted keys. It is independent of
        comments, layout and the order of keys.

        >>> from helmscope.claims.reading import entry
        >>> len(entry("rate").hash)
        64
        """
        content = {name: value for name, value in self.content.items() if name != "history"}
        return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()

    @property
    def content(self) -> dict[str, Any]:
        """The entry as plain data, ready for JSON; what is not set is left out.

        >>> from helmscope.claims.reading import entry
        >>> entry("rate").content["version"] >= 1
        True
        """
        builtins: dict[str, Any] = msgspec.to_builtins(self)
        return builtins

    def conditions_on(self, subject_kind: SubjectKind) -> tuple[Condition, ...]:
        """The conditions that decide on a simulation, or on a model.

        >>> from helmscope.claims.reading import entry
        >>> [condition.name for condition in entry("rate").conditions_on(SubjectKind.SIMULATION)]
        ['rate', 'rate of pairs']
        """
        return tuple(condition for condition in self.conditions if condition.on in (None, subject_kind))

    def controls_on(self, subject_kind: SubjectKind) -> tuple[ControlCase, ...]:
        """The controls of a trial on a simulation, or on a model.

        >>> from helmscope.claims.reading import entry
        >>> all(control.on in (None, "simulation") for control in entry("rate").controls_on(SubjectKind.SIMULATION))
        True
        """
        return tuple(control for control in self.controls if control.on in (None, subject_kind))


def parse_entry(text: str, name: str) -> Entry:
    """Parse the TOML ``text`` of the file ``name``, ID.toml, into an entry.

    What the file leaves out is completed: ``id`` is the file's name, ``version`` 1, ``source`` "own work", the name of
    an only condition the words of the id, and the text of a condition its bounds. An entry that states these defaults
    has the same hash. Raises HelmscopeError for invalid TOML, for an unknown or missing key, for a value of the wrong
    type, for bounds that contradict each other, and for an id that differs from the file name.

    >>> entry = parse_entry('statement = "Tokens meet."\\nconditions = [{ low = 0.8 }]', "tokens-meet.toml")
    >>> entry.id, entry.conditions[0].name, entry.conditions[0].text
    ('tokens-meet', 'tokens meet', 'At least 0.8.')
    >>> parse_entry('id = "rate"', "rate.toml")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: rate.toml has no statement, but it must have one, such as statement = "Tokens meet."
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HelmscopeError(f"{name} is not TOML: {error}") from None
    _check_keys(raw, name)
    try:
        stated = msgspec.convert({"id": name.removesuffix(".toml"), "version": 1, "source": OWN_WORK} | raw, Entry)
    except msgspec.ValidationError as error:
        raise HelmscopeError(type_error_sentence(str(error), raw, name)) from None
    _check_stated(stated, raw, name)
    _check_bounds(stated, name)
    conditions = tuple(_complete_condition(case, stated.id) for case in stated.conditions)
    entry = msgspec.structs.replace(stated, conditions=conditions)
    _check_values(entry, name)
    return entry


def _complete_condition(condition: Condition, id: str) -> Condition:
    """A condition with the words that its entry leaves out."""
    words = region_text(condition.region) if condition.region.bounded else "described, not judged"
    return msgspec.structs.replace(
        condition,
        name=condition.name or id.replace("-", " "),
        text=condition.text or f"{words[0].upper()}{words[1:]}.",
    )


def _check_stated(entry: Entry, raw: Mapping[str, Any], name: str) -> None:
    """Raise HelmscopeError for a text that is stated but empty, and for what only a claim with one condition may leave
    out.
    """
    for key in ("statement", "source", "experiment", "null"):
        if key in raw and not raw[key].strip():
            raise HelmscopeError(f"{key} of {name} is empty, but it must be a text")
    for key in ("conditions", "controls"):
        for row in raw.get(key, ()):
            for part in ("name", "statistic", "text"):
                if part in row and not row[part].strip():
                    case = row.get("name") or f"one of the {key}"
                    raise HelmscopeError(f"{part} of {case} in {name} is empty, but it must be a text")
    if entry.printed is not None and not entry.printed.text.strip():
        raise HelmscopeError(f"text of printed in {name} is empty, but it must be a text")
    if "decided" in raw and not entry.decided:
        raise HelmscopeError(f"decided of {name} is [], but it must hold 'simulation', 'model' or both, once each")
    if not entry.conditions:
        raise HelmscopeError(f"conditions of {name} is [], but it must hold at least one, such as [{{ low = 0.8 }}]")
    if len(entry.conditions) > 1 and not all(condition.name for condition in entry.conditions):
        raise HelmscopeError(f"a condition of {name} has no name, but each of several conditions must have one")


def _check_keys(raw: Mapping[str, Any], name: str) -> None:
    """Raise HelmscopeError, with the nearest allowed key, for an unknown key or kind of subject."""
    tables: list[tuple[str, type[msgspec.Struct], Any]] = [
        ("", Entry, [raw]),
        ("printed of ", PrintedForm, [raw.get("printed")]),
    ]
    kinds: dict[str, type[msgspec.Struct]] = {"conditions": Condition, "controls": ControlCase, "history": Change}
    tables += [(f"{key} of ", kind, raw.get(key)) for key, kind in kinds.items()]
    for where, kind, rows in tables:
        for row in rows if isinstance(rows, list) else ():
            for key in row if isinstance(row, dict) else ():
                check_name(f"key of {where}{name}", key, kind.__struct_fields__)
    subject_kinds = [raw.get("decided")] + [
        [row.get("on")] for row in raw.get("conditions", []) if isinstance(row, dict)
    ]
    for values in subject_kinds:
        for subject_kind in values if isinstance(values, list) else ():
            if isinstance(subject_kind, str):
                check_name(f"kind of subject in {name}", subject_kind, [known.value for known in SubjectKind])


def _check_bounds(entry: Entry, name: str) -> None:
    """Raise HelmscopeError for bounds that are infinite or contradict each other."""
    cases: list[Bounds] = [*entry.conditions, *entry.controls, *([entry.printed] if entry.printed else [])]
    for case in cases:
        try:
            _ = case.region
        except HelmscopeError as error:
            raise HelmscopeError(f"{name} is not a valid entry: {error}") from None


def _check_values(entry: Entry, name: str) -> None:
    """Raise HelmscopeError for values that have the right type but are not allowed."""
    if name != f"{entry.id}.toml":
        raise HelmscopeError(f"id of {name} is '{entry.id}', but it must be the file's name without .toml")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.id):
        raise HelmscopeError(f"id of {name} must be lower-case words and digits joined by hyphens, such as my-claim")
    if len(set(entry.decided)) < len(entry.decided):
        names = [subject_kind.value for subject_kind in entry.decided]
        raise HelmscopeError(f"decided of {name} is {names}, but it must hold 'simulation', 'model' or both, once each")
    check_integer(f"version of {name}", entry.version, at_least=1)
    for subject_kind in entry.decided:
        if not entry.conditions_on(subject_kind):
            raise HelmscopeError(f"{name} is decided by a {subject_kind.value}, but none of its conditions is on one")
    for subject_kind in entry.decided or SubjectKind:
        _check_distinct(
            f"conditions on a {subject_kind.value} of {name}", [case.name for case in entry.conditions_on(subject_kind)]
        )
        _check_distinct(
            f"controls on a {subject_kind.value} of {name}", [case.name for case in entry.controls_on(subject_kind)]
        )
    conditions = [condition.name for condition in entry.conditions]
    for control in entry.controls:
        for ruling in control.expected:
            check_name(f"expected ruling of {control.name} in {name}", ruling, [known.value for known in Ruling])
        if control.of is not None:
            check_name(f"condition of {control.name} in {name}", control.of, conditions)
    if entry.printed is not None:
        check_name(f"judgment of {name}", entry.printed.judgment, [known.value for known in Judgment])
    versions = [change.version for change in entry.history]
    if versions != sorted(versions) or (versions and versions[-1] > entry.version):
        raise HelmscopeError(
            f"history of {name} has versions {versions}, but they must rise to at most {entry.version}"
        )


def _check_distinct(what: str, names: Iterable[str]) -> None:
    listed = list(names)
    repeated = next((name for name in listed if listed.count(name) > 1), None)
    if repeated is not None:
        raise HelmscopeError(f"{what} hold '{repeated}' twice, but their names must differ")
