"""Limits of a vertical axis that a few outlying points do not flatten: arrows at its edge, with their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.style import plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST = 8  # points from which quantiles say what is usual
TAIL, REACH = 0.15, 1.5  # usual points: from this quantile to its opposite, and this multiple of their distance beyond
FLATTENED = 5.0  # the whole range over that of the usual points, above which the axis is cut
MARGIN, AROUND = 0.08, 0.75  # of the range shown, beyond the usual points; beyond a curve that sets the axis
FEW, SHARE = 2, 1 / 8  # points of a curve, and share of them, that may be left out; otherwise they are no outliers
NAMED = 3  # neighboring outlying points that are all named; of more, the farthest
LINE, LETTER, ARROW = 9.0, 4.2, 5.0  # points: the height of a line of text, the width of a letter, an arrow
MOST = 1 / 3  # of the height of a panel may be texts at an edge; the arrows of others have none
ROUNDING = 100 * 2.0**-23  # of the size of the numbers: a smaller range is that of rounding in single precision


@dataclass(frozen=True, eq=False)
class DrawnCurve:
    """A curve as it was drawn: places, values, color and the edges of its band, if it has one.

    >>> DrawnCurve(np.arange(2.0), np.zeros(2), "black").values
    array([0., 0.])
    """

    places: Any
    values: Any
    color: Any
    low: Any = None
    high: Any = None


def usual_range(values: Any) -> tuple[float, float] | None:
    """The range of the points between the 15 % and 85 % quantiles, extended by 1.5 times their distance on each side;
    None where the whole range is at most 5 times as large, and for fewer than 8 points.

    >>> usual_range([-86.0, *np.linspace(0.7, 0.8, 11)])
    (0.7, 0.8)
    >>> usual_range(np.linspace(0.0, 1.0, 12)) is None
    True
    """
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    if numbers.size < FEWEST:
        return None
    low, high = np.quantile(numbers, [TAIL, 1 - TAIL])
    reach = REACH * (high - low)
    usual = numbers[(numbers >= low - reach) & (numbers <= high + reach)]
    least, most = float(usual.min()), float(usual.max())
    if not most > least or np.ptp(numbers) <= FLATTENED * (most - least):
        return None
    return least, most


def tidy_axis(panel: Axes) -> None:
    """Writes the numbers at a linear vertical axis without an offset or a power of ten apart from them. An axis whose
    range is that of rounding in single precision, at most 1.2e-5 of the size of its numbers, gets the range of 5 % on
    both sides that constant numbers have.

    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> _ = panel.plot([2.0, 2.0 + 2e-7])
    >>> tidy_axis(panel)
    >>> [round(float(end), 3) for end in panel.get_ylim()]
    [1.9, 2.1]
    """
    if panel.get_yscale() != "linear":
        return
    plain_ticks(panel.yaxis)
    low, high = sorted(panel.get_ylim())
    size = max(abs(low), abs(high))
    if high - low <= ROUNDING * size:
        panel.set_ylim((low + high) / 2 - 0.05 * size, (low + high) / 2 + 0.05 * size)


def cut_outlying(panel: Axes, curves: Sequence[DrawnCurve], *, leading: DrawnCurve | None = None) -> None:
    """Limits a linear vertical axis to the usual range of its curves, or to that of a ``leading`` one and its
    surroundings, if others leave it far behind. Points beyond it are arrows at the edge with their values, beyond all
    other points; of more than three neighbors only the farthest. The axis is as it was where no point is far out, or
    more than two and an eighth of the points of a curve.

    >>> from helmscope.plots.style import new_figure
    >>> _, (panel,) = new_figure(1, 1)
    >>> values = np.array([-86.0, *np.linspace(0.7, 0.8, 11)])
    >>> cut_outlying(panel, [DrawnCurve(np.arange(12.0), values, "black")])
    >>> [text.get_text() for text in panel.texts], bool(panel.get_ylim()[0] > 0.6)
    (['-86'], True)
    """
    limits = _limits(curves, leading)
    if limits is None:
        return
    values = np.concatenate([curve.values for curve in curves])
    for _ in range(len(values)):
        bottom, top, sides = _with_texts(panel, curves, *limits)
        covered = values[((values > limits[1]) & (values <= top)) | ((values < limits[0]) & (values >= bottom))]
        if not covered.size:
            break
        # points that would be in the strip of the texts become usual ones
        reach = MARGIN * (limits[1] - limits[0])
        low, high = (covered[covered < limits[0]], covered[covered > limits[1]])
        limits = (
            float(low.min(initial=limits[0] + reach)) - reach,
            float(high.max(initial=limits[1] - reach)) + reach,
        )
    for above, side in sides.items():
        side.draw(panel, top if above else bottom)


def _with_texts(
    panel: Axes, curves: Sequence[DrawnCurve], low: float, high: float
) -> tuple[float, float, dict[bool, _Labels]]:
    """Limits the axis to low and high and, beyond them, a strip for what is written at the edge, in which no point is
    covered; the limits and the texts, by whether they are above.
    """
    panel.set_ylim(low, high)
    sides = {above: _Labels.of(panel, curves, high if above else low, above=above) for above in (False, True)}
    room = sum(side.height for side in sides.values())
    line = (high - low) / max(panel.bbox.height * 72 / panel.figure.dpi - room, LINE)  # one point of the axis
    bottom, top = low - sides[False].height * line, high + sides[True].height * line
    panel.set_ylim(bottom, top)
    return bottom, top, sides


@dataclass(frozen=True, eq=False)
class _Mark:
    """Neighboring outlying points of a curve: their places and values, and the line in which they are named."""

    places: Any
    values: Any
    color: Any
    line: int | None  # None where there is no room for a text
    at_right: bool  # whether the text ends at the left of its arrow

    @property
    def text(self) -> str:
        return ", ".join(f"{value:.3g}" for value in self.values)


@dataclass(frozen=True, eq=False)
class _Labels:
    """What is written at the upper or lower edge of a panel."""

    above: bool
    marks: Sequence[_Mark]

    @classmethod
    def of(cls, panel: Axes, curves: Sequence[DrawnCurve], edge: float, *, above: bool) -> _Labels:
        marks: list[_Mark] = []
        points = 72 / panel.figure.dpi
        most = max(1, int(MOST * panel.bbox.height * points / LINE))
        taken: list[tuple[int, float, float]] = []  # the line and the ends of every text and arrow
        for curve in curves:
            for run in _runs(curve.values > edge if above else curve.values < edge):
                farthest = int((np.argmax if above else np.argmin)(curve.values[run]))
                chosen = run if len(run) <= NAMED else run[[farthest]]
                places, values = curve.places[chosen], curve.values[chosen]
                ends = [float(panel.transData.transform((place, edge))[0] - panel.bbox.x0) * points for place in places]
                width = LETTER * len(", ".join(f"{value:.3g}" for value in values)) + 4
                at_right = ends[-1] + ARROW + width > panel.bbox.width * points
                left = ends[0] - ARROW - width if at_right else ends[-1] + ARROW
                span = (left, left + width)
                free = (k for k in range(most) if not any(_meets(k, span, other) for other in taken))
                line = next(free, None)
                taken += [] if line is None else [(line, *span)]
                taken += [(0, end - ARROW, end + ARROW) for end in ends]
                marks.append(_Mark(places, values, curve.color, line, at_right))
        return cls(above, marks)

    @property
    def height(self) -> float:
        """The height of the texts in points."""
        lines = [0 if mark.line is None else mark.line for mark in self.marks]
        return LINE * (1 + max(lines)) if lines else 0.0

    def draw(self, panel: Axes, edge: float) -> None:
        """Draws arrows at the edge of the panel with the values beside them."""
        for mark in self.marks:
            style: Any = {"color": mark.color, "markersize": 5, "linestyle": "none", "clip_on": False}
            marker = "^" if self.above else "v"
            panel.plot(mark.places, [edge] * len(mark.places), marker=marker, label="_outlying", **style)
            if mark.line is None:
                continue
            panel.annotate(
                mark.text,
                (float(mark.places[0 if mark.at_right else -1]), edge),
                xytext=(-6 if mark.at_right else 6, (-1 if self.above else 1) * (4 + LINE * mark.line)),
                textcoords="offset points",
                ha="right" if mark.at_right else "left",
                va="center",
                fontsize=7,
                color=mark.color,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4},
            )


def _meets(line: int, span: tuple[float, float], other: tuple[int, float, float]) -> bool:
    return other[0] == line and span[0] < other[2] and other[1] < span[1]


def _limits(curves: Sequence[DrawnCurve], leading: DrawnCurve | None) -> tuple[float, float] | None:
    """The limits of the axis; None where it need not be cut."""
    everything = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    if not everything.size:
        return None
    if leading is None:
        usual, around = usual_range(everything), MARGIN
    else:
        own = leading.values[np.isfinite(leading.values)]
        usual = usual_range(own) or ((float(own.min()), float(own.max())) if own.size else None)
        around = AROUND if len(curves) > 1 else MARGIN
    if usual is None or usual[0] == usual[1]:
        return None
    usual = _with_bands(curves if leading is None else [leading], *usual)
    size = usual[1] - usual[0]
    if np.ptp(everything) <= FLATTENED * size:
        return None
    low, high = usual[0] - around * size, usual[1] + around * size
    if leading is None and any(_lost(curve, low, high) > max(FEW, SHARE * len(curve.values)) for curve in curves):
        return None
    least = min(usual[0], float(everything.min())) - MARGIN * size
    most = max(usual[1], float(everything.max())) + MARGIN * size
    return max(low, least), min(high, most)


def _with_bands(curves: Sequence[DrawnCurve], low: float, high: float) -> tuple[float, float]:
    """The range with the bands of its points, each at most as far beyond it as it is wide."""
    bottom, top = low, high
    for curve in curves:
        if curve.low is None or curve.high is None:
            continue
        inside = (curve.values >= low) & (curve.values <= high) & np.isfinite(curve.low + curve.high)
        bottom = min(bottom, float(curve.low[inside].min(initial=low)))
        top = max(top, float(curve.high[inside].max(initial=high)))
    return max(bottom, 2 * low - high), min(top, 2 * high - low)


def _lost(curve: DrawnCurve, low: float, high: float) -> int:
    """The number of points of a curve beyond these limits."""
    return int(((curve.values < low) | (curve.values > high)).sum())


def _runs(chosen: Any) -> list[Any]:
    """The indices of neighboring points that are chosen."""
    indices = np.flatnonzero(chosen)
    return [run for run in np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1) if len(run)]
