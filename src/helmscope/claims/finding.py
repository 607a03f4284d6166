"""The result of an experiment: the evidence for its claim, the controls, and the data to plot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from helmscope.claims.evidence import Evidence, Inconclusive, PremiseImpossible
from helmscope.types import Attachment, HelmscopeError, type_with_article
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    import xarray as xr


def _empty_measurement() -> xr.Dataset:
    import xarray as xr

    return xr.Dataset(attrs={"n": 0})


@dataclass(frozen=True, eq=False, kw_only=True)
class Finding(ConciseRepr):
    """The result of one experiment: the evidence for its claim, the controls, and the data to plot.

    ``evidence`` holds one Evidence per condition of the catalogue entry, by name; for a claim with one condition it may
    be that Evidence itself. ``controls`` holds one Evidence per control of the entry, by name: their regions and the
    expected rulings are in the entry, not here. ``described`` quantities are reported and not judged. ``printed`` tests
    what the source prints, where the entry gives it a region. ``data`` is an optional Measurement, such as
    ``claims.curves.curve`` returns; it is plotted below the intervals of the verdict. ``remark`` is a sentence with
    further measured values; ``setting`` describes what was simulated or recorded, and in which coordinates.
    ``undecided_because`` says what the replicates lack, such as distinct first tokens: what was measured is then
    reported, and the ruling is inconclusive. ``attachments`` are reported verbatim. A field of the wrong type raises
    HelmscopeError.

    >>> from helmscope.claims.evidence import Count
    >>> finding = Finding(evidence=Count(32, 32), controls={"V = -I": Count(0, 32)})
    >>> list(finding.controls)
    ['V = -I']
    """

    evidence: Evidence | Mapping[str, Evidence]
    data: xr.Dataset = field(default_factory=_empty_measurement)
    controls: Mapping[str, Evidence] = field(default_factory=dict)
    described: Mapping[str, Evidence] = field(default_factory=dict)
    printed: Evidence | None = None
    remark: str = ""
    setting: str = ""
    undecided_because: str = ""
    attachments: tuple[Attachment, ...] = ()

    @classmethod
    def impossible(cls, reason: str, *, setting: str = "", described: Mapping[str, Evidence] | None = None) -> Finding:
        """The finding that the claim's premise cannot hold for this subject, for the given ``reason``; ``described``
        quantities are reported anyway.

        >>> Finding.impossible("only the identity is causal and bistochastic").evidence.reason
        'only the identity is causal and bistochastic'
        """
        return cls(evidence=PremiseImpossible(reason), setting=setting, described=described or {})

    @classmethod
    def inconclusive(cls, reason: str, *, setting: str = "") -> Finding:
        """The finding that nothing was measured because the subject has too little, such as too few different texts;
        the ruling is inconclusive.

        >>> Finding.inconclusive("the claim needs 32 different texts").evidence.reason
        'the claim needs 32 different texts'
        """
        return cls(evidence=Inconclusive(reason), setting=setting)

    def __post_init__(self) -> None:
        is_class = isinstance(self.evidence, type)
        if is_class or not isinstance(self.evidence, Evidence | Mapping):
            shown = (
                f"the class {getattr(self.evidence, '__name__', None)}"
                if is_class
                else type_with_article(self.evidence)
            )
            raise HelmscopeError(
                f"evidence is {shown}, but it must be evidence such as Count(...), or a mapping of names to evidence"
            )
        _check_field_types(self, controls=Mapping, described=Mapping)
        _check_field_types(
            self, printed=Evidence | None, remark=str, setting=str, undecided_because=str, attachments=tuple
        )
        for name in ("evidence", "controls", "described"):
            values = getattr(self, name)
            if isinstance(values, Mapping):
                _check_evidence(name, values)
        for value in self.attachments:
            if not isinstance(value, Attachment):
                raise HelmscopeError(f"attachments holds {type_with_article(value)}, but it must hold only Attachments")


def _check_evidence(name: str, values: Mapping[Any, Any]) -> None:
    """Raise HelmscopeError unless the mapping has texts as keys and Evidence as values."""
    for key, value in values.items():
        if not isinstance(key, str):
            raise HelmscopeError(f"{name} has the key {key!r}, but its keys must be names")
        if isinstance(value, type) or not isinstance(value, Evidence):
            raise HelmscopeError(
                f"{name}['{key}'] is {type_with_article(value)}, but it must be evidence, such as Replicates"
            )


def _check_field_types(instance: object, **allowed: Any) -> None:
    """Raise HelmscopeError unless each named field has the allowed type."""
    for name, kind in allowed.items():
        value = getattr(instance, name)
        if isinstance(value, type) or not isinstance(value, kind):
            expected = getattr(kind, "__name__", re.sub(r"\w+\.", "", str(kind)))  # a union, without its modules
            actual = value.__name__ if isinstance(value, type) else type(value).__name__
            articles = ["an" if word[0] in "AEIOUaeiou" else "a" for word in (actual, expected)]
            raise HelmscopeError(f"{name} is {articles[0]} {actual}, but it must be {articles[1]} {expected}")
