"""Colors, line styles and legends of families of curves: a color for each Measurement, a style for each entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.style import COLORS
from helmscope.plots.variable_panel import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)))  # dotted is the null
MARKERS = ("o", "s", "^", "D")
GRAY, FONT, LETTER, HANDLE, ROW = (
    "#5f6670",
    7.0,
    4.0,
    30.0,
    10.5,
)  # points: a letter, a line with its gaps, a line of text
PANEL = 195.0  # points across a panel


@dataclass(frozen=True)
class CurveStyle:
    """How one curve is drawn: the line style and marker number ``line``.

    >>> CurveStyle("black", 1).style
    '--'
    """

    color: Any
    line: int = 0

    @property
    def style(self) -> Any:
        """The line style, dashed for all but the first."""
        return LINES[self.line % len(LINES)]

    @property
    def marker(self) -> str:
        """The marker on a categorical axis."""
        return MARKERS[self.line % len(MARKERS)]


@dataclass(frozen=True)
class Family:
    """The curves of one panel: entries of an axis, the same for each of several Measurements.

    With several Measurements each has its color and each entry its line style. Where there are more entries than
    styles, and for a single Measurement, entries have colors. Quantiles have one color, and the median is solid.

    >>> both = Family(("distant", "all"), ("A", "twin"))
    >>> [style.line for style in both.styles[0]], len({style.color for style in both.styles[0]})
    ([0, 1], 1)
    >>> len({style.color for style in Family(("she", "he"), ("",)).styles[0]})
    2
    """

    entries: tuple[str, ...]
    labels: tuple[str, ...]
    quantiles: tuple[float, ...] = ()

    @property
    def colored_by_label(self) -> bool:
        """Whether a color stands for a Measurement, rather than for an entry."""
        return len(self.entries) <= len(LINES) and (len(self.labels) > 1 or bool(self.quantiles))

    @property
    def styles(self) -> list[list[CurveStyle]]:
        """The style of each entry of each Measurement."""
        colors, count = label_colors(len(self.labels)), range(len(self.entries))
        if self.colored_by_label:
            return [[CurveStyle(color, self._line(k)) for k in count] for color in colors]
        several = len(self.labels) > 1
        return [
            [CurveStyle(COLORS[k % len(COLORS)], m if several else k // len(COLORS)) for k in count]
            for m in range(len(self.labels))
        ]

    def _line(self, k: int) -> int:
        """The line style of an entry; the median comes first among quantiles."""
        if not self.quantiles:
            return k
        order = sorted(range(len(self.quantiles)), key=lambda place: abs(self.quantiles[place] - 0.5))
        return order.index(k)

    def draw_legend(self, panel: Axes, title: str, *, categorical: bool = False) -> None:
        """Writes the title and, if there are several entries, a legend of them between it and the panel, where it
        covers no curve.

        >>> from helmscope.plots.style import new_figure
        >>> _, (panel,) = new_figure(1, 1)
        >>> Family(("distant", "all"), ("A", "twin")).draw_legend(panel, "mean inner product")
        >>> [text.get_text() for text in panel.get_legend().get_texts()]
        ['distant', 'all']
        """
        if len(self.entries) < 2:
            panel.set_title(plain(title), loc="left", fontsize=9)
            return
        curves = [(style, entry) for style, entry in zip(self.styles[0], self.entries, strict=True)]
        if self.colored_by_label and len(self.labels) > 1:
            curves = [(CurveStyle(GRAY, style.line), entry) for style, entry in curves]
        elif len(self.labels) > 1:
            curves = [
                (style, ", ".join(filter(None, (label, entry))))
                for label, styles in zip(self.labels, self.styles, strict=True)
                for style, entry in zip(styles, self.entries, strict=True)
            ]
        handles = legend_handles([style for style, _ in curves], [name for _, name in curves], categorical=categorical)
        title_and_legend(panel, title, handles)


def title_and_legend(
    panel: Axes, title: str, handles: Sequence[Any], *, size: float = 9.0, wide: float = PANEL
) -> None:
    """Writes a title of some font size, and between it and a panel of a width in points the legend of some lines.

    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> title_and_legend(panel, "order", legend_handles([CurveStyle("black")], ["A"]))
    >>> panel.get_title(loc="left"), len(panel.get_legend().get_texts())
    ('order', 1)
    """
    names = [str(handle.get_label()) for handle in handles]
    columns = _columns(names, wide)
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
    spacing: Any = {"handlelength": 2.0, "columnspacing": 1.0, "labelspacing": 0.3}
    panel.legend(handles=handles, ncols=columns, fontsize=FONT, **spacing, **place)
    panel.set_title(plain(title), loc="left", fontsize=size, pad=6 + ROW * -(-len(names) // columns))


def _columns(names: Sequence[str], wide: float) -> int:
    """The columns of a legend that fit across a panel."""
    if LETTER * sum(map(len, names)) + HANDLE * len(names) <= wide:
        return len(names)
    return int(max(1, wide // (LETTER * max(map(len, names)) + HANDLE)))


def legend_handles(styles: Sequence[CurveStyle], names: Sequence[str], *, categorical: bool = False) -> list[Any]:
    """The lines, or the points on a categorical axis, that a legend shows.

    >>> [line.get_label() for line in legend_handles([CurveStyle("black")], ["A"])]
    ['A']
    """
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [],
            [],
            color=style.color,
            linestyle="none" if categorical else style.style,
            marker=style.marker if categorical else "",
            label=plain(name),
        )
        for style, name in zip(styles, names, strict=True)
    ]


def label_colors(count: int) -> list[Any]:
    """A color for each of several Measurements.

    >>> label_colors(2)
    ['#1f4e79', '#c55a11']
    """
    if count <= len(COLORS):
        return list(COLORS[:count])
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.85, count)))  # without the yellow end, pale on white
