"""The common style of all static figures, and their encoding as PNG, SVG and PDF."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.types import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Base
    from numpy.typing import ArrayLike

    from helmscope.plots.figure import Figure

STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}
LOG_FACTOR = 30.0  # a log axis is legible only where values span more than this factor
COLORS = ("#1f4e79", "#c55a11", "#548235", "#7f6000", "#7030a0")


def spans_decades(*values: ArrayLike) -> bool:
    """Whether the positive numbers among the values span more than a factor of 30, so that a log axis helps.

    >>> spans_decades([0.2, 1.0]), spans_decades([0.0, 1e-3], [1.0])
    (False, True)
    """
    numbers = np.concatenate([np.asarray(value, dtype=np.float64).ravel() for value in values])
    positive = numbers[(numbers > 0) & np.isfinite(numbers)]
    return bool(positive.size and positive.max() > LOG_FACTOR * positive.min())


def use_log_scale(panel: Axes) -> None:
    """A log scale of y, after the curves are drawn: with labels at powers of 10, and below two decades at 2 and 5 times
    them too, so that labels do not overlap.

    >>> panel = blank_figure(3.0, 2.0).subplots()
    >>> _ = panel.plot([0.02, 0.9])
    >>> use_log_scale(panel)
    >>> [round(float(tick), 3) for tick in panel.get_yticks() if 0.03 < tick < 0.9]
    [0.05, 0.1, 0.2, 0.5]
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panel.set_yscale("log")
    panel.yaxis.set_minor_formatter(NullFormatter())
    low, high = panel.get_ylim()
    if high < 100 * low:
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def plain_ticks(axis: Axis) -> None:
    """Labels a linear axis with whole numbers or decimals, or each tick in scientific notation, so that no power of ten
    stands apart from them, where it would cover a title.

    >>> panel = blank_figure(3.0, 2.0).subplots()
    >>> plain_ticks(panel.yaxis)
    >>> panel.yaxis.get_major_formatter().format_ticks([0.0, 1e5, 2e5]), tick_texts([1.0, 1.5])
    (['0', '1e5', '2e5'], ['1.0', '1.5'])
    """
    from matplotlib.ticker import FuncFormatter

    class Ticks(FuncFormatter):
        def format_ticks(self, values: Any) -> list[str]:
            return [self.fix_minus(text) for text in tick_texts(values)]

    axis.set_major_formatter(Ticks(lambda value, _: f"{value:g}"))


def tick_texts(values: Any) -> list[str]:
    """The numbers at the ticks of an axis, with the digits that tell them apart.

    >>> tick_texts([-250000.0, 0.0]), tick_texts([0.9997, 0.9998])
    (['-2.5e5', '0'], ['0.9997', '0.9998'])
    """
    numbers = np.asarray(values, dtype=np.float64)
    size, steps = np.abs(numbers).max(initial=0.0), np.diff(np.unique(numbers))
    if not size or not np.isfinite(size):
        return [f"{number:g}" for number in numbers]
    whole = [math.floor(math.log10(number) + 1e-9) for number in (size, steps.min() if len(steps) else size)]
    # a step such as 0.25 needs a digit more than its first
    step = steps.min() if len(steps) else size
    more = int(not math.isclose(step / 10.0 ** whole[1], round(step / 10.0 ** whole[1]), abs_tol=1e-6))
    digits = max(0, whole[0] - whole[1] + more)
    if size >= 1e5 or (size < 1e-3 and more - whole[1] > 4):
        texts = [f"{number:.{digits}e}" for number in numbers]
        return ["0" if not number else short_exponent(text) for number, text in zip(numbers, texts, strict=True)]
    return [f"{number:.{max(0, more - whole[1])}f}" for number in numbers + 0.0]


def short_exponent(text: str) -> str:
    """A number in scientific notation without the zeros and the plus of its exponent.

    >>> short_exponent("3.1e-04"), short_exponent("1e+12")
    ('3.1e-4', '1e12')
    """
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else text


def blank_figure(width: float, height: float) -> Figure:
    """A figure without panels, of a size in inches, that needs no display. Draw on it within ``styled()``.

    >>> blank_figure(4.0, 3.0).axes
    []
    """
    with styled():
        from helmscope.plots.figure import Figure

        return Figure(figsize=(width, height), layout="constrained")


def new_figure(rows: int, columns: int, *, width: float = 9.0, height: float = 6.0) -> tuple[Figure, list[Axes]]:
    """An empty figure that needs no display, and its panels in reading order. Draw on it within ``styled()``.

    >>> figure, panels = new_figure(1, 2)
    >>> len(panels)
    2
    """
    with styled():
        figure = blank_figure(width, height)
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


@contextmanager
def styled() -> Iterator[None]:
    """Context manager: within it, matplotlib uses the style of helmscope. Raises MissingExtra without matplotlib.

    >>> with styled():
    ...     figure, panels = new_figure(1, 1)
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtra("matplotlib", "report") from None
    with mpl.rc_context(STYLE):
        yield


def png(figure: Base) -> bytes:
    """Encodes the figure as PNG; equal figures give equal bytes.

    >>> png(new_figure(1, 1)[0])[:4]
    b'\\x89PNG'
    """
    figure.draw_without_rendering()  # the layout changes in the first pass: without this, a second file would differ
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Base) -> bytes:
    """Encodes the figure as SVG with text as paths; equal figures give equal bytes. Freezes the layout of the figure.

    >>> svg(new_figure(1, 1)[0])[:5]
    b'<?xml'
    """
    import matplotlib as mpl

    freeze_layout(figure)
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "helmscope", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def pdf(figure: Base) -> bytes:
    """Encodes the figure as PDF with embedded fonts; equal figures give equal bytes. Freezes the layout of the figure.

    >>> pdf(new_figure(1, 1)[0])[:5]
    b'%PDF-'
    """
    import matplotlib as mpl

    freeze_layout(figure)
    buffer = io.BytesIO()
    with mpl.rc_context({"pdf.fonttype": 42}):  # TrueType, whose text can be selected and edited
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return buffer.getvalue()


def freeze_layout(figure: Base) -> None:
    """Fixes the layout: another pass would change the last digits of positions, which a vector file contains.

    >>> freeze_layout(new_figure(1, 1)[0])
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")
