"""The one style of all static figures, and how a figure becomes a file's bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from helmscope.types import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}
COLORS = ("#1f4e79", "#c55a11", "#548235", "#7f6000", "#7030a0")


def new_figure(rows: int, columns: int, *, width: float = 9.0, height: float = 6.0) -> tuple[Figure, list[Axes]]:
    """An empty figure that needs no screen, and its panels in reading order. Draw on it inside ``styled()``.

    >>> figure, panels = new_figure(1, 2)
    >>> len(panels)
    2
    """
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


@contextmanager
def styled() -> Iterator[None]:
    """Whatever is drawn inside is drawn in our style.

    >>> with styled():
    ...     figure, panels = new_figure(1, 1)
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtra("matplotlib", "report") from None
    with mpl.rc_context(STYLE):
        yield


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, byte for byte the same for the same figure.

    >>> png(new_figure(1, 1)[0])[:4]
    b'\\x89PNG'
    """
    figure.draw_without_rendering()  # the layout settles on the first drawing: a second file must not differ
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """The figure as an SVG file with its letters as shapes, byte for byte the same for the same figure, whose layout
    stays as it is from then on.

    >>> svg(new_figure(1, 1)[0])[:5]
    b'<?xml'
    """
    import matplotlib as mpl

    figure.draw_without_rendering()
    figure.set_layout_engine(
        "none"
    )  # settled: once more would move it in the last digit, and names in the file are hashes
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "helmscope", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
