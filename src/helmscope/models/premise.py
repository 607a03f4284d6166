"""The premises of a claim about a model, checked against the certificate of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError, check_name

if TYPE_CHECKING:
    from helmscope.models.certificate import Certificate

CROSS = "cross_kernel"
PARTS = ("trajectory", "resume", "kernel", CROSS, "replay", "lens", "lens over depth", "force", "on_sphere")
CAUSAL, FULL = "is causal", "is bidirectional"


class Simulated(Enum):
    """The model of a subject that has none."""

    HERE = "simulation"


@dataclass(frozen=True, kw_only=True)
class Premise:
    """What a claim needs: causal or full attention, an MLP whose weights can be read, a head over a vocabulary, and
    parts of a recording that its certificate must not block. Raises HelmscopeError for an unknown part.

    >>> Premise(parts=("kernels",))
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: unknown part of a recording 'kernels': did you mean 'kernel'? ...
    """

    parts: Sequence[str] = ()
    causal: bool = False
    full: bool = False
    mlp: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        for part in self.parts:
            check_name("part of a recording", part, PARTS)
        if self.causal and self.full:
            raise HelmscopeError("causal and full are both True, but attention is one or the other")

    def unmet(self, certificate: Certificate, name: str, asker: str = "the claim") -> str | None:
        """One sentence on the first need of ``asker`` that the model ``name`` does not meet; None if it meets all."""
        attention = attention_of(certificate)
        for needed, kind in ((self.causal, CAUSAL), (self.full, FULL)):
            if needed and attention != kind:
                return f"{asker} needs attention that {kind}, but that of {name} {attention}"
        wanted = [("an MLP whose weights can be read", "force")] if self.mlp else []
        wanted += [("a head over a vocabulary", "lens over depth")] if self.head else []
        wanted += [(f"'{part}' of a recording", part) for part in self.parts]
        for what, part in wanted:
            if part == CROSS and not any(CROSS in line.blocks for line in certificate.lines):
                return f"{asker} needs {what}, but {name} has no cross-attention"
            for line in certificate.lines:
                if part in line.blocks and not line.passed:
                    return f"{asker} needs {what}, but {name} does not have it: {line.statement}"
        return None


def attention_of(certificate: Certificate) -> str:
    """What a certificate says about attention: that it is causal, that it is bidirectional, or why neither is known."""
    from helmscope.models.certify import BOTH_WAYS

    line = next((line for line in certificate.lines if line.name == "causality"), None)
    if line is None:
        return "is not recorded"
    if line.passed:
        return CAUSAL
    if line.ok is None:
        return FULL if line.statement == BOTH_WAYS else f"may be either: {line.statement}"
    return f"fails its certificate: {line.statement}"
