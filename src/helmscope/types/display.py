"""How objects are displayed: a one-line ``repr``, small HTML tables for notebooks, and ``plot``.

Everything here works on plain strings. ``figure_of`` is the only function that imports from a higher-level package, and
it does so only when called.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helmscope.plots.figure import Figure as Figure

LONGEST_LINE = 200
LONGEST_FIELD = 72
MAX_ITEMS = 3
ALWAYS_SHOWN = "always shown"  # key in the metadata of a field

# borders and padding only, so that a dark or light notebook keeps its own colors
_CELL = "padding: 0.15em 0.9em 0.15em 0; text-align: left; vertical-align: top"
_HEAD = f"{_CELL}; font-weight: bold; border-bottom: 1px solid currentColor"
_NAME = f"{_CELL}; font-weight: bold; min-width: 6em; max-width: 20em"
_TEXT = f"{_CELL}; max-width: 50em; white-space: pre-wrap; overflow-wrap: anywhere"


def figure_of(item: object, **options: Any) -> Figure:
    """The figure that ``hs.plot`` draws of an object; raises ``HelmscopeError`` for types it cannot plot.

    >>> import torch
    >>> from helmscope.types import Trajectory
    >>> len(figure_of(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))).axes)
    3
    """
    figure: Figure = importlib.import_module("helmscope.plots.draw").plot(item, **options)
    return figure


class Plottable:
    """Base class of objects that ``hs.plot`` can draw: adds the method ``plot``.

    >>> import torch
    >>> from helmscope.types import Trajectory
    >>> path = Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))
    >>> isinstance(path, Plottable), len(path.plot().axes)
    (True, 3)
    """

    __slots__ = ()

    def plot(self, **options: Any) -> Figure:
        """The figure that ``hs.plot`` draws of this object; the options are those of ``hs.plot``.

        A notebook displays it, and its method ``save("picture.pdf")`` writes PNG, SVG or PDF.

        >>> import torch
        >>> from helmscope.types.trajectory import Trajectory
        >>> type(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2)).plot()).__name__
        'Figure'
        """
        return figure_of(self, **options)


def shortened(text: str, limit: int) -> str:
    """``text`` on one line of at most ``limit`` characters, with "..." in place of what is cut off.

    >>> shortened("two\\nlines", 80), shortened("a long line", 8)
    ('two lines', 'a lon...')
    """
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def one_line_repr(text: str) -> str:
    """The ``repr`` of an object that cannot be written as code: ``text`` in angle brackets, on one line.

    >>> one_line_repr("Subject A: 1 text")
    '<Subject A: 1 text>'
    """
    return f"<{shortened(text, LONGEST_LINE - 2)}>"


def short_description(value: Any, limit: int = LONGEST_FIELD) -> str:
    """A short description of a value, with six digits: for a dataclass the fields that differ from their defaults, for
    a tensor its shape.

    >>> from helmscope.fields.attention import SA
    >>> import torch
    >>> short_description(SA(beta=4.0)), short_description(SA(beta=1.0, value=-torch.eye(3), causal=True))
    ('SA(beta=4)', 'SA(beta=1, value=<3 x 3>, causal=True)')
    """
    return shortened(_describe(value, lambda number: f"{float(number):g}"), limit)


class ConciseRepr:
    """Base class of dataclasses whose repr shows only the fields that differ from their defaults, required ones first,
    and tensors by their shape, on one line of at most 200 characters. A field with ``metadata={ALWAYS_SHOWN: True}`` is
    shown in any case.

    >>> from helmscope.fields.attention import SA
    >>> import torch
    >>> SA(beta=0.1 + 0.2, query_key=torch.eye(3))
    SA(beta=0.30000000000000004, query_key=<3 x 3>)
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in cls.__dict__:
            # the decorator dataclass replaces an inherited __repr__, but not one of the class itself
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        if not dataclasses.is_dataclass(self):
            return object.__repr__(self)
        return shortened(_describe(self, repr), LONGEST_LINE)


def _describe(value: Any, number_text: Callable[[Any], str]) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):  # torch.Size is one
        return _describe_array(value, shape, number_text)
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, Real):
        return number_text(value)
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _describe_dataclass(value, number_text)
    if isinstance(value, list | tuple):
        return f"[{_describe_items(value, number_text)}]"
    if isinstance(value, str):
        return repr(shortened(value, LONGEST_FIELD))
    if isinstance(value, Mapping):
        return f"{{{_describe_items(list(value), repr)}}}"
    return str(getattr(value, "__qualname__", type(value).__name__)).rpartition(".")[2]


def _describe_items(values: Sequence[Any], number_text: Callable[[Any], str]) -> str:
    items = [_describe(item, number_text) for item in values[:MAX_ITEMS]]
    return f"{', '.join(items)}{f', ... {len(values)} in all' if len(values) > len(items) else ''}"


def _describe_array(value: Any, shape: tuple[int, ...], number_text: Callable[[Any], str]) -> str:
    if not shape:
        with suppress(RuntimeError):  # inside torch.vmap a tensor has no value
            return number_text(value.item())
        return "<number>"
    return f"<{' x '.join(map(str, shape))}>"


def _describe_dataclass(value: Any, number_text: Callable[[Any], str]) -> str:
    fields = [field for field in dataclasses.fields(value) if field.repr]
    # required fields first, as in a call, even if a base class declares optional ones before them
    fields.sort(key=lambda field: not _is_required(field))
    pairs = [(field, getattr(value, field.name)) for field in fields]
    arguments = [
        f"{field.name}={_describe(item, number_text)}"
        for field, item in pairs
        if field.metadata.get(ALWAYS_SHOWN) or not _is_default(item, field)
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    plain = isinstance(value, bool | int | float | str | Enum)
    if field.default_factory is not dataclasses.MISSING and not plain:
        default = field.default_factory()
        return type(value) is type(default) and _describe(value, repr) == _describe(default, repr)
    return value is field.default or (plain and value == field.default)


def html_table(title: str, rows: Iterable[Sequence[object]], *, header: Sequence[str] = (), note: str = "") -> str:
    """A small HTML table without colors or scripts; all text is escaped.

    ``title`` is printed above it and ``note``, which may have several lines, below. Without a ``header`` the first
    column holds the names of the rows.

    >>> "&lt;script&gt;" in html_table("", [("label", "<script>")]), "<script>" in html_table("<script>", [])
    (True, False)
    """
    parts = []
    if title:
        parts.append(f'<div style="font-weight: bold">{html.escape(title)}</div>')
    body = [_row("th", [(_HEAD, cell) for cell in header])] if header else []
    for row in rows:
        first, *others = row
        body.append(_row("td", [(_TEXT if header else _NAME, first), *((_TEXT, cell) for cell in others)]))
    if body:
        parts.append(f'<table style="border-collapse: collapse">{"".join(body)}</table>')
    if note:
        parts.append(f"<div>{'<br>'.join(map(html.escape, note.splitlines()))}</div>")
    return f"<div>{''.join(parts)}</div>"


def _row(tag: str, cells: Iterable[tuple[str, object]]) -> str:
    inner = "".join(f'<{tag} style="{style}">{html.escape(str(text))}</{tag}>' for style, text in cells)
    return f"<tr>{inner}</tr>"


def html_listing(title: str, text: str) -> str:
    """Preformatted text below its title, closed until it is clicked; all text is escaped.

    >>> html_listing("Log", "a <b>")[:38]
    '<details><summary>Log</summary><pre st'
    """
    lines = f'<pre style="overflow-x: auto">{html.escape(text)}</pre>'
    return f"<details><summary>{html.escape(title)}</summary>{lines}</details>"


def html_stack(*parts: str) -> str:
    """Several pieces of HTML, one below the other, in one ``div``.

    >>> html_stack("<div>a</div>", "<div>b</div>")
    '<div><div>a</div><div>b</div></div>'
    """
    return f"<div>{''.join(parts)}</div>"
