"""How objects show themselves: one line for ``repr``, small HTML tables for notebooks, and ``plot`` for pictures.

Everything here works on plain strings. ``picture`` is the one place in the package that reaches for a room below its
own, and it does so only when somebody asks for a picture.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
from collections.abc import Iterable, Sequence
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helmscope.plots.figure import Figure as Figure

LONGEST_LINE = 200
LONGEST_FIELD = 72
MOST_ITEMS = 3

# Only borders and padding: the colors are the notebook's own, whether it is dark or light.
_CELL = "padding: 0.15em 0.9em 0.15em 0; text-align: left; vertical-align: top"
_HEAD = f"{_CELL}; font-weight: bold; border-bottom: 1px solid currentColor"
_NAME = f"{_CELL}; font-weight: bold; white-space: nowrap"
_TEXT = f"{_CELL}; max-width: 50em; white-space: pre-wrap; overflow-wrap: anywhere"


def picture(shown: object, **options: Any) -> Figure:
    """What ``hs.plot`` draws of an object.

    >>> import torch
    >>> from helmscope.types import Trajectory
    >>> len(picture(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))).axes)
    3
    """
    figure: Figure = importlib.import_module("helmscope.plots.draw").plot(shown, **options)
    return figure


class Plottable:
    """An object that ``hs.plot`` can draw."""

    __slots__ = ()

    def plot(self, **options: Any) -> Figure:
        """The picture of this object, as ``hs.plot`` gives it; the options are those listed there.

        It shows itself in a notebook, and ``save("picture.pdf")`` writes it as PNG, SVG or PDF.
        """
        return picture(self, **options)


def shortened(text: str, limit: int) -> str:
    """``text`` on one line of at most ``limit`` characters; what is cut off is told by dots.

    >>> shortened("two\\nlines", 80), shortened("a long line", 8)
    ('two lines', 'a lon...')
    """
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def one_line_repr(text: str) -> str:
    """What ``repr`` gives of an object that cannot be written as code.

    >>> one_line_repr("Subject A: 1 text")
    '<Subject A: 1 text>'
    """
    return f"<{shortened(text, LONGEST_LINE - 2)}>"


def brief(value: Any, limit: int = LONGEST_FIELD) -> str:
    """A value in a few words: of a dataclass what differs from its defaults, of a tensor its shape.

    >>> from helmscope.fields.attention import SA
    >>> import torch
    >>> brief(SA(beta=4.0)), brief(SA(beta=1.0, value=-torch.eye(3), causal=True))
    ('SA(beta=4)', 'SA(beta=1, value=<3 x 3>, causal=True)')
    """
    return shortened(_brief(value), limit)


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):  # torch.Size is one
        return f"{float(value):g}" if not shape else f"<{' x '.join(map(str, shape))}>"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, Real):
        return f"{float(value):g}"
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _brief_dataclass(value)
    if isinstance(value, list | tuple):
        few = [_brief(each) for each in value[:MOST_ITEMS]]
        return f"[{', '.join(few)}{f', ... {len(value)} in all' if len(value) > len(few) else ''}]"
    if isinstance(value, str):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__name__)).rpartition(".")[2]


def _brief_dataclass(value: Any) -> str:
    shown = [each for each in dataclasses.fields(value) if each.repr]
    # a field without a default comes first, as it does in a call: what an object is, before what is special about it
    shown.sort(key=lambda each: each.default is not dataclasses.MISSING)
    pairs = [(each, getattr(value, each.name)) for each in shown]
    told = [f"{each.name}={_brief(given)}" for each, given in pairs if not _is_default(given, each)]
    return f"{type(value).__name__}({', '.join(told)})"


def _is_default(given: Any, field: dataclasses.Field[Any]) -> bool:
    plain = isinstance(given, bool | int | float | str | Enum)
    if field.default_factory is not dataclasses.MISSING and not plain:
        return type(given) is type(field.default_factory()) and _brief(given) == _brief(field.default_factory())
    return given is field.default or (plain and given == field.default)


def table(title: str, rows: Iterable[Sequence[object]], *, head: Sequence[str] = (), note: str = "") -> str:
    """Rows of text as a small HTML table without colors or scripts; everything in it is escaped.

    ``title`` stands above it and ``note`` below. Where there is no ``head``, the first column holds names.

    >>> "&lt;script&gt;" in table("", [("label", "<script>")]), "<script>" in table("<script>", [])
    (True, False)
    """
    parts = []
    if title:
        parts.append(f'<div style="font-weight: bold">{html.escape(title)}</div>')
    body = [_row("th", [(_HEAD, each) for each in head])] if head else []
    for row in rows:
        first, *others = row
        body.append(_row("td", [(_TEXT if head else _NAME, first), *((_TEXT, each) for each in others)]))
    if body:
        parts.append(f'<table style="border-collapse: collapse">{"".join(body)}</table>')
    if note:
        parts.append(f"<div>{html.escape(note)}</div>")
    return f"<div>{''.join(parts)}</div>"


def _row(tag: str, cells: Iterable[tuple[str, object]]) -> str:
    inner = "".join(f'<{tag} style="{style}">{html.escape(str(text))}</{tag}>' for style, text in cells)
    return f"<tr>{inner}</tr>"


def joined(*parts: str) -> str:
    """Several pieces of HTML below one another.

    >>> joined("<div>a</div>", "<div>b</div>")
    '<div><div>a</div><div>b</div></div>'
    """
    return f"<div>{''.join(parts)}</div>"
