"""The picture of one trial: the statistic on its region, then what was measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.plots.grid import draw_grid, grid_height, is_grid
from helmscope.plots.measured import draw_variable, heading, plain, variables
from helmscope.plots.style import COLORS, blank_figure, styled
from helmscope.stats.reduce import reduced
from helmscope.types import (
    HelmscopeError,
    Interval,
    Region,
    Verdict,
    interval_text,
    region_text,
)

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

MOST_PANELS = 5
WIDTH, ROW, PANEL, LINE = 8.0, 0.5, 2.1, 0.18  # inches
LETTERS = 72  # of a row's label: its numbers stand on the same line
DECADES_BELOW = 20  # a log axis ends there, so many below the bound
GREEN, GRAY = COLORS[2], "#595959"


@dataclass(frozen=True)
class _Row:
    """One interval of the first panel."""

    label: str
    color: str
    interval: Interval | None


@dataclass(frozen=True)
class Linear:
    """Numbers as they are.

    >>> Linear().place(0.5)
    0.5
    """

    def place(self, number: float) -> float:
        """Where a number is drawn."""
        return number

    def dress(self, panel: Axes) -> None:
        """Scale and label of the axis."""
        panel.set_xscale("linear")
        panel.ticklabel_format(axis="x", useOffset=False)
        panel.set_xlabel("statistic")


@dataclass(frozen=True)
class Log:
    """A log axis for numbers that are not negative; what lies below ``floor``, 0 too, is drawn on it.

    >>> Log(1e-17, clips=True).place(0.0)
    1e-17
    """

    floor: float
    clips: bool

    def place(self, number: float) -> float:
        """Where a number is drawn."""
        return max(number, self.floor)

    def dress(self, panel: Axes) -> None:
        """Scale and label of the axis."""
        panel.set_xscale("log")
        below = f"; 0, and all below {tick(self.floor)}, is drawn at {tick(self.floor)}" if self.clips else ""
        panel.set_xlabel(f"statistic (log axis{below})")


@dataclass(frozen=True)
class Around:
    """The deviation from ``center``, linear up to ``threshold`` and a log axis on either side beyond.

    >>> Around(1.0, threshold=1e-9).place(1.5)
    0.5
    """

    center: float
    threshold: float

    def place(self, number: float) -> float:
        """Where a number is drawn."""
        return number - self.center

    def dress(self, panel: Axes) -> None:
        """Scale and label of the axis."""
        panel.set_xscale("symlog", linthresh=self.threshold)
        name = "statistic" if self.center == 0 else f"deviation of the statistic from {self.center:.12g}"
        panel.set_xlabel(f"{name} (log axis on both sides, linear within {tick(self.threshold)})")

    def ticks(self, extent: float) -> list[float]:
        """0 and powers of ten, at most four a side."""
        first, last = math.ceil(math.log10(self.threshold)), math.floor(math.log10(extent))
        powers = [10.0**exponent for exponent in range(first, last + 1)] or [self.threshold]
        kept = powers[:: -max(1, math.ceil(len(powers) / 4))]
        return [*(-power for power in kept), 0.0, *reversed(kept)]


Axis = Linear | Log | Around


def trial_figure(verdict: Verdict, data: xr.Dataset) -> Figure:
    """The statistic on its region, and the first five variables of the trial's Measurement.

    On top: the intervals of the statistic and of all controls that are judged by the same region (the null, what the
    source prints, further parts), on that region, shaded, with their numbers. The axis follows from the region: a log
    axis for an error bounded from above, the deviation from the center for a narrow two-sided region, symmetric log
    where numbers around 0 span decades, else linear. An end at infinity is an arrow at the edge.

    Below: each variable over its first axis, further axes as a family of curves (one over three axes as a grid of small
    panels), with bands (NAME_low to NAME_high, else two standard errors) and NAME_null dotted; replicates are reduced
    first. The attribute scale = "log" asks for a log axis, long_name is the label. Refuses what is no Verdict or no
    Measurement.

    >>> import xarray as xr
    >>> from helmscope.types import Ruling
    >>> region = Region(text="within .1", low=0.9, high=1.1)
    >>> verdict = Verdict("rate", Ruling.SUPPORTED, Interval(1.0, 0.99, 1.01, n=20), region, "", "")
    >>> data = xr.Dataset({"slope": ("beta", [1.0, 1.0]), "slope_stderr": ("beta", [0.1, 0.1])}, attrs={"n": 20})
    >>> len(trial_figure(verdict, data).axes)
    2
    """
    if not isinstance(verdict, Verdict):
        raise HelmscopeError(f"verdict is a {type(verdict).__name__}, but it must be a Verdict")
    data = reduced(data)
    with styled():
        return _drawn(verdict, data)


def tick(number: float) -> str:
    """A short number for an axis.

    >>> tick(1e-6), tick(0.1)
    ('1e-6', '0.1')
    """
    return f"{number:.3g}".replace("e-0", "e-").replace("e+0", "e+")


def _drawn(verdict: Verdict, data: xr.Dataset) -> Figure:
    rows, names = _rows(verdict), variables(data)
    shown = names[:MOST_PANELS]
    heights = [ROW * len(rows) + 0.7, *(_height(data, name) for name in shown)]
    figure = blank_figure(WIDTH, sum(heights) + 0.4)
    more = f"   ({len(names) - len(shown)} more measured, not drawn)" if len(names) > len(shown) else ""
    figure.suptitle(plain(f"{verdict.claim}: {verdict.ruling.value}{more}"), fontsize=10, fontweight="bold")
    # each panel is a figure of its own: a color scale beside one narrows no other
    top, *others = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _statistic(top.subplots(), verdict, rows)
    for place, name in zip(others, shown, strict=True):
        if is_grid(data[name]):
            draw_grid(place, data, name)
        else:
            draw_variable(place.subplots(), data, name)
    return figure


def _height(data: xr.Dataset, name: str) -> float:
    """The inches of a panel with its heading."""
    value = data[name]
    return (grid_height(value) if is_grid(value) else PANEL) + LINE * len(heading(data, name))


def _rows(verdict: Verdict) -> list[_Row]:
    rows = [_Row("the claim", COLORS[0], verdict.interval)]
    named = [("null", GRAY, verdict.null), ("as printed", COLORS[1], verdict.printed)]
    named += [("also", COLORS[4], control) for control in verdict.also]
    for name, color, control in named:
        if control is not None and control.region.ends == verdict.region.ends:
            rows.append(_Row(f"{name}: {control.what}", color, control.interval))
    return rows


def _statistic(panel: Axes, verdict: Verdict, rows: Sequence[_Row]) -> None:
    region = verdict.region
    seen = [row.interval for row in rows if row.interval is not None]
    axis = choose_axis(region, seen)
    axis.dress(panel)
    edges = left, right = _limits(panel, axis, region, seen)
    if isinstance(axis, Around):
        places = [place for place in axis.ticks(max(abs(left), abs(right))) if left <= place <= right]
        panel.set_xticks(places, [tick(place) for place in places])
        panel.minorticks_off()
    if region.bounded:
        panel.axvspan(*(_at(axis, end, edges) for end in region.ends), color=GREEN, alpha=0.15, linewidth=0)
    for end in filter(math.isfinite, region.ends):
        panel.axvline(axis.place(end), color=GREEN, linewidth=0.8, label="_region")
    for index, row in enumerate(rows):
        _row(panel, axis, row, float(-index), edges)
    panel.set(xlim=edges, ylim=(0.5 - len(rows), 0.5))
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    controls = [control for control in (verdict.null, verdict.printed, *verdict.also) if control is not None]
    apart = len(controls) + 1 - len(rows)
    note = f"; {apart} control{'s' if apart > 1 else ''} with another region not drawn" if apart else ""
    bound = "shaded: " if region.bounded else ""
    text = f"the statistic on its region ({bound}{region_text(region)}{note})"
    panel.set_title(text, loc="left", fontsize=9)


def _row(panel: Axes, axis: Axis, row: _Row, y: float, edges: tuple[float, float]) -> None:
    """The interval as a line, the estimate as a dot, label and numbers above them."""
    seen, line = row.interval, y - 0.2
    if seen is not None:
        ends = [_at(axis, end, edges) for end in (seen.low, seen.high)]
        panel.plot(ends, [line, line], color=row.color, linewidth=3, alpha=0.55, label=plain(row.label))
        for end, place in zip((seen.low, seen.high), ends, strict=True):
            _dot(panel, end, place, line, row.color, "|")
        _dot(panel, seen.estimate, axis.place(seen.estimate), line, row.color, "o")
    across = panel.get_yaxis_transform()
    label = textwrap.shorten(row.label, LETTERS, placeholder=" ...")
    numbers = interval_text(seen) + ("" if seen is None else f", n = {seen.n:,}")
    panel.text(0.01, y + 0.2, plain(label), transform=across, va="center", color=row.color, fontsize=8.5)
    panel.text(0.99, y + 0.2, numbers, transform=across, va="center", ha="right", fontsize=8.5)


def _dot(panel: Axes, number: float, place: float, y: float, color: str, marker: str) -> None:
    shape = marker if math.isfinite(number) else ("<" if number < 0 else ">")
    panel.plot([place], [y], marker=shape, markersize=7, color=color, linestyle="none", clip_on=False, label="_dot")


def _at(axis: Axis, number: float, edges: tuple[float, float]) -> float:
    return axis.place(number) if math.isfinite(number) else edges[number > 0]


def choose_axis(region: Region, seen: Sequence[Interval]) -> Axis:
    """The axis on which a region and the intervals on it can be read.

    >>> choose_axis(Region(text="1 within 1e-6", low=0.999999, high=1.000001), [])
    Around(center=1.0, threshold=1e-07)
    >>> choose_axis(Region(text="at most 1e-12", high=1e-12), [])
    Log(floor=1e-13, clips=False)
    """
    low, high = region.ends
    bounds = [bound for bound in (low, high) if math.isfinite(bound)]
    if not bounds:
        return Linear()
    estimates = [each.estimate for each in seen]
    numbers = estimates + [end for each in seen for end in (each.low, each.high) if math.isfinite(end)]
    center = sum(bounds) / 2 if len(bounds) == 2 else 0.0
    near = numbers if len(bounds) == 2 else estimates  # the end of an interval may come as near to 0 as chance will
    sizes = [abs(number - center) for number in [*near, *bounds] if number != center]
    smallest = min(sizes, default=1.0)
    largest = max([abs(number - center) for number in numbers] + sizes, default=1.0)
    if len(bounds) == 2:
        half = (high - low) / 2
        if half >= 1e-3 * abs(center) and largest <= 20 * half:
            return Linear()
        return Around(center, _power_below(min(max(smallest, 1e-6 * half), half) or smallest))
    positive = [number for number in [*numbers, *bounds] if number > 0]
    if min([*numbers, *bounds]) >= 0 and bounds[0] > 0 and (high < math.inf or largest > 100 * smallest):
        least = max(min(positive), bounds[0] * 10.0**-DECADES_BELOW)
        floor = _power_below(least, less=1)
        return Log(floor, clips=min([*numbers, *bounds]) < floor)
    return Linear() if largest <= 100 * smallest else Around(0.0, _power_below(max(smallest, 1e-12 * largest)))


def _power_below(number: float, *, less: int = 0) -> float:
    return 10.0 ** (math.floor(math.log10(number)) - less)


def _limits(panel: Axes, axis: Axis, region: Region, seen: Sequence[Interval]) -> tuple[float, float]:
    """Every finite number and bound with room beside them, even on the axis' own scale."""
    ends = [*region.ends, *(end for each in seen for end in (each.estimate, each.low, each.high))]
    places = [axis.place(end) for end in ends if math.isfinite(end)] or [0.0, 1.0]
    scale = panel.xaxis.get_transform()
    low, high = (float(scale.transform(np.array([end]))[0]) for end in (min(places), max(places)))
    least = 1.0 if isinstance(axis, Log) else 0.2 * max(abs(low), abs(high), 1e-12)
    room = max(0.12 * (high - low), (least - (high - low)) / 2)
    left, right = (float(scale.inverted().transform(np.array([end]))[0]) for end in (low - room, high + room))
    return left, right
