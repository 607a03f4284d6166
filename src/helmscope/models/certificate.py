"""Why a recording can be believed: one line for each identity that was checked, with its number and its bound.

A line that fails blocks what depends on it: whoever asks for it gets the line's own sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from helmscope.types import HelmscopeError


@dataclass(frozen=True)
class Line:
    """One check: ``ok`` is None for what cannot be measured on this model, and ``says`` why.

    ``blocks`` are the parts of a recording that are not given out where the check failed.
    """

    name: str
    ok: bool | None
    says: str
    value: float | None = None
    bound: float | None = None
    blocks: tuple[str, ...] = ()

    @classmethod
    def held(cls, name: str, value: float, bound: float, says: str, blocks: tuple[str, ...]) -> Line:
        """A number that must not exceed its bound; NaN does."""
        return cls(name, bool(value <= bound), says, value, bound, blocks)


@dataclass(frozen=True)
class Certificate:
    """All lines; prints as a table.

    >>> print(Certificate((Line.held("residual", 1e-7, 1e-5, "pre + a + m = post", ("trajectory",)),)))
    ok    residual  1.0e-07 <= 1.0e-05  pre + a + m = post
    """

    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(line.ok is not False for line in self.lines)

    def with_line(self, new: Line) -> Certificate:
        """With one line more, in place of an older one of its name."""
        return Certificate((*(line for line in self.lines if line.name != new.name), new))

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        words = {True: "ok", False: "FAIL", None: "-"}
        rows = []
        for line in self.lines:
            number = "" if line.value is None else f"{line.value:.1e}"
            number += (
                "" if line.bound is None or line.value is None else f" {'<=' if line.ok else '>'} {line.bound:.1e}"
            )
            rows.append(f"{words[line.ok]:<4}  {line.name:<{width}}  {number:>18}  {line.says}")
        return "\n".join(rows)

    def require(self, part: str) -> None:
        """Refuse a part of the recording that a failed or impossible check stands for."""
        for line in self.lines:
            if part in line.blocks and line.ok is not True:
                verb = "failed" if line.ok is False else "is not possible on this model"
                raise HelmscopeError(f"{part} is not given out, because the check '{line.name}' {verb}: {line.says}")
