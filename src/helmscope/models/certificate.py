"""The certificate of a recording: one line per identity that was checked, with the error found and its bound.

A failed check blocks the parts of the recording that depend on it: access raises an error with the line's text.
"""

from __future__ import annotations

from dataclasses import dataclass

from helmscope.types import HelmscopeError, html_table, one_line_repr, pluralized


@dataclass(frozen=True)
class Line:
    """One check of a certificate.

    ``statement`` is the identity that was checked. ``ok`` is None if the check does not apply to this model or was not
    made, and ``statement`` then gives the reason. ``value`` is the error found and ``bound`` the largest that is
    allowed. ``blocks`` are the parts of a recording that are unavailable unless the line has ``passed``. ``unedited``:
    the check holds for the model without edits, and was not repeated under the edits of this recording.
    """

    name: str
    ok: bool | None
    statement: str
    value: float | None = None
    bound: float | None = None
    blocks: tuple[str, ...] = ()
    unedited: bool = False

    @property
    def passed(self) -> bool:
        """Whether the check holds, for this recording or for the model without its edits."""
        return self.ok is True or self.unedited

    @property
    def result(self) -> str:
        """The result as one word: ok, FAIL or -."""
        return {True: "ok", False: "FAIL", None: "-"}[self.ok]

    @property
    def value_text(self) -> str:
        """The value and its bound as text, such as "1.0e-07 <= 1.0e-05"; empty if there is no value."""
        if self.value is None:
            return ""
        return f"{self.value:.1e}" + ("" if self.bound is None else f" {'<=' if self.ok else '>'} {self.bound:.1e}")

    def not_repeated(self) -> Line:
        """The line as it is under edits, where the check is not repeated; unchanged unless it held before."""
        if self.ok is not True:
            return self
        number = f" ({self.value_text})" if self.value_text else ""
        says = f"not checked under edits; ok without them{number}: {self.statement}"
        return Line(self.name, None, says, blocks=self.blocks, unedited=True)

    @classmethod
    def held(cls, name: str, value: float, bound: float, statement: str, blocks: tuple[str, ...]) -> Line:
        """A check that ``value`` is at most ``bound``; NaN fails."""
        return cls(name, bool(value <= bound), statement, value, bound, blocks)


@dataclass(frozen=True, repr=False)
class Certificate:
    """The checks behind a recording; prints as a table with one line per check.

    ``certificate["residual"]`` is the line of that name, ``certificate.ok`` whether no check failed.

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
        """A copy with ``new`` appended, replacing a line of the same name.

        >>> Certificate((Line("finite", True, "all states are finite"),)).with_line(Line("lens", False, "differs"))
        <Certificate: 2 checks, fails: lens>
        """
        return Certificate((*(line for line in self.lines if line.name != new.name), new))

    def under_edits(self, *checked: Line) -> Certificate:
        """The certificate of a run under edits, in which only the lines ``checked`` were checked again.

        >>> plain = Certificate((Line.held("rows", 1e-7, 1e-5, "rows sum to 1", ("kernel",)),))
        >>> print(plain.under_edits(Line("finite", True, "all states are finite")))
        -     rows                        not checked under edits; ok without them (1.0e-07 <= 1.0e-05): rows sum to 1
        ok    finite                      all states are finite
        """
        names = {line.name for line in checked}
        return Certificate((*(line.not_repeated() for line in self.lines if line.name not in names), *checked))

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    @property
    def summary(self) -> str:
        """A summary: "ok", or the names of the failed checks."""
        failed = [line.name for line in self.lines if line.ok is False]
        return f"fails: {', '.join(failed)}" if failed else "ok"

    def __repr__(self) -> str:
        return one_line_repr(f"Certificate: {pluralized(len(self.lines), 'check')}, {self.summary}")

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        return "\n".join(
            f"{line.result:<4}  {line.name:<{width}}  {line.value_text:>18}  {line.statement}" for line in self.lines
        )

    def _repr_html_(self) -> str:
        rows = [(line.result, line.name, line.value_text, line.statement) for line in self.lines]
        return html_table(
            f"Certificate: {self.summary}", rows, header=("", "check", "value and bound", "what was checked")
        )

    def require(self, part: str) -> None:
        """Raise ``HelmscopeError`` if a part of the recording depends on a check that failed or does not apply; states
        that are not finite come first, since they fail other checks too.

        >>> Certificate((Line("finite", False, "some states are not finite", blocks=("resume",)),)).require("resume")
        Traceback (most recent call last):
        helmscope.types.HelmscopeError: resume is not available, because the check 'finite' failed: some states are ...
        """
        for line in sorted(self.lines, key=lambda line: line.name != "finite"):
            if part in line.blocks and not line.passed:
                verb = "failed" if line.ok is False else "does not apply to this model"
                raise HelmscopeError(
                    f"{part} is not available, because the check '{line.name}' {verb}: {line.statement}"
                )
