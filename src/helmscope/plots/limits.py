"""Limits of a vertical axis that a few outlying points do not flatten: arrows at its edge, with their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST = 8  # points from which quantiles say what is usual
TAIL, REACH = 0.15, 1.5  # usual points: from this quantile to its opposite, and this multiple of their distance beyond
FLATTENED = 3.0  # the whole range over that of the usual points, above which the axis is cut
NEARBY = 0.25  # of the width of the axis: the values of arrows that are nearer are written one above the other
MARGIN, AROUND = 0.08, 0.75  # of the range shown, beyond the usual points; beyond a curve that sets the axis


@dataclass(frozen=True, eq=False)
class DrawnCurve:
    """A curve as it was drawn: places, values and color.

    >>> DrawnCurve(np.arange(2.0), np.zeros(2), "black").values
    array([0., 0.])
    """

    places: Any
    values: Any
    color: Any


def usual_range(values: Any) -> tuple[float, float] | None:
    """The range of the points between the 15 % and 85 % quantiles, extended by 1.5 times their distance on each side;
    None where the whole range is at most 3 times as large, and for fewer than 8 points.

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


def cut_outlying(panel: Axes, curves: Sequence[DrawnCurve], *, leading: DrawnCurve | None = None) -> None:
    """Limits a linear vertical axis to the usual range of its curves, or to that of a ``leading`` one and its
    surroundings, if others leave it far behind. Of neighboring points beyond it the farthest is an arrow at the edge
    with its value; the axis is as it was where no point is far out.

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
    low, high = limits
    panel.set_ylim(low, high)
    nearby = NEARBY * float(np.ptp(panel.get_xlim()))
    marked: list[tuple[float, bool]] = []
    for curve in curves:
        for above in (False, True):
            for run in _runs(curve.values > high if above else curve.values < low):
                index = run[int(np.argmax(curve.values[run]) if above else np.argmin(curve.values[run]))]
                place = float(curve.places[index])
                level = sum(side == above and abs(other - place) < nearby for other, side in marked)
                marked.append((place, above))
                _mark(panel, place, high if above else low, float(curve.values[index]), curve.color, level)


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
    if usual is None or np.ptp(everything) <= FLATTENED * (usual[1] - usual[0]) or usual[0] == usual[1]:
        return None
    size = usual[1] - usual[0]
    least, most = float(everything.min()) - MARGIN * size, float(everything.max()) + MARGIN * size
    return max(usual[0] - around * size, least), min(usual[1] + around * size, most)


def _runs(chosen: Any) -> list[Any]:
    """The indices of neighboring points that are chosen."""
    indices = np.flatnonzero(chosen)
    return [run for run in np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1) if len(run)]


def _mark(panel: Axes, place: float, edge: float, value: float, color: Any, level: int) -> None:
    """An arrow at the edge of the panel with a value beside it, ``level`` lines from the edge."""
    above = value > edge
    style: Any = {"color": color, "markersize": 5, "linestyle": "none", "clip_on": False, "label": "_outlying"}
    panel.plot([place], [edge], marker="^" if above else "v", **style)
    at_right = place > sum(panel.get_xlim()) / 2
    panel.annotate(
        f"{value:.3g}",
        (place, edge),
        xytext=(-6 if at_right else 6, (-1 if above else 1) * (5 + 9 * level)),
        textcoords="offset points",
        ha="right" if at_right else "left",
        va="center",
        fontsize=7,
        color=color,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4},
    )
