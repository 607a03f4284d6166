"""Why a recording can be believed: one line for each identity that was checked, with its number and its bound.

A line that fails blocks what depends on it: whoever asks for it gets the line's own sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from helmscope.types import HelmscopeError, counted, one_line_repr, table


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

    @property
    def word(self) -> str:
        """The result in one word."""
        return {True: "ok", False: "FAIL", None: "-"}[self.ok]

    @property
    def number(self) -> str:
        """The number beside its bound."""
        if self.value is None:
            return ""
        return f"{self.value:.1e}" + ("" if self.bound is None else f" {'<=' if self.ok else '>'} {self.bound:.1e}")

    @classmethod
    def held(cls, name: str, value: float, bound: float, says: str, blocks: tuple[str, ...]) -> Line:
        """A number that must not exceed its bound; NaN does."""
        return cls(name, bool(value <= bound), says, value, bound, blocks)


@dataclass(frozen=True, repr=False)
class Certificate:
    """All lines; prints as a table.

    >>> Certificate((Line.held("residual", 1e-7, 1e-5, "pre + a + m = post", ("trajectory",)),))
    <Certificate: 1 check, ok>

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

    @property
    def short(self) -> str:
        """Whether all is well, or which checks failed."""
        failed = [line.name for line in self.lines if line.ok is False]
        return f"fails: {', '.join(failed)}" if failed else "ok"

    def __repr__(self) -> str:
        return one_line_repr(f"Certificate: {counted(len(self.lines), 'check')}, {self.short}")

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        return "\n".join(f"{line.word:<4}  {line.name:<{width}}  {line.number:>18}  {line.says}" for line in self.lines)

    def _repr_html_(self) -> str:
        rows = [(line.word, line.name, line.number, line.says) for line in self.lines]
        return table(f"Certificate: {self.short}", rows, head=("", "check", "number", "what was checked"))

    def require(self, part: str) -> None:
        """Refuse a part of the recording that a failed or impossible check stands for."""
        for line in self.lines:
            if part in line.blocks and line.ok is not True:
                verb = "failed" if line.ok is False else "is not possible on this model"
                raise HelmscopeError(f"{part} is not given out, because the check '{line.name}' {verb}: {line.says}")
