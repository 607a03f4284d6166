"""The figure of one trial: the statistic with its region, then the measured variables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.plots.grid import draw_grid, grid_height, is_grid
from helmscope.plots.style import COLORS, LOG_FACTOR, blank_figure, styled
from helmscope.plots.variable_panel import draw_variable, heading, letters_across, plain
from helmscope.plots.variable_panel import variables as variable_names
from helmscope.stats.reduce import reduced
from helmscope.types import (
    HelmscopeError,
    Interval,
    Region,
    Verdict,
    check_name,
    check_real,
    interval_text,
    pluralized,
    region_text,
    type_with_article,
)

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

    from helmscope.plots.figure import Figure

MAX_PANELS = 5
LONGEST_NAME = 72  # of the statistic, in letters, as the label of its axis
WIDTH, PANEL, LINE = 8.0, 2.1, 0.18  # inches
NARROW = 3.9  # inches: the width of a figure whose text is legible on a phone
NOTHING = 1e-3  # of a bound: a smaller deviation from 0 needs no scale of its own
DECADES_BELOW = 20  # a log axis extends at most this far below the bound
GREEN, GRAY = COLORS[2], "#595959"


@dataclass(frozen=True)
class _Row:
    """One interval of the first panel."""

    label: str
    color: str
    interval: Interval | None


@dataclass(frozen=True)
class _Layout:
    """What depends on the width of the figure in inches: in a narrow one, the numbers of a row are below its label."""

    width: float

    @property
    def is_narrow(self) -> bool:
        return self.width < 6.0

    def statistic_height(self, rows: int) -> float:
        """The height of the first panel in inches; in a narrow figure its title and label have more lines."""
        return 0.68 * rows + 1.2 if self.is_narrow else 0.5 * rows + 0.7

    @property
    def letters(self) -> int:
        return letters_across(self.width)

    @property
    def label_letters(self) -> int:
        """The longest label of a row, which does not overlap the numbers on the same line."""
        return self.letters if self.is_narrow else round(0.72 * self.letters)

    @property
    def heights(self) -> tuple[float, float, float]:
        """The places of label, numbers and interval in a row, whose height is 1."""
        return (0.34, 0.07, -0.24) if self.is_narrow else (0.2, 0.2, -0.2)

    def wrap(self, text: str) -> str:
        return textwrap.fill(text, self.letters)


@dataclass(frozen=True)
class LinearAxis:
    """A linear axis.

    >>> LinearAxis().place(0.5)
    0.5
    """

    def place(self, number: float) -> float:
        """The coordinate at which a number is plotted."""
        return number

    def configure(self, panel: Axes, name: str) -> None:
        """Sets the scale of the axis, and its label, which begins with the name of what is plotted."""
        panel.set_xscale("linear")
        panel.ticklabel_format(axis="x", useOffset=False)
        panel.set_xlabel(name)


@dataclass(frozen=True)
class LogAxis:
    """A log axis for numbers >= 0; numbers below ``floor``, including 0, are plotted at ``floor``.

    >>> LogAxis(1e-17, clips=True).place(0.0)
    1e-17
    """

    floor: float
    clips: bool

    def place(self, number: float) -> float:
        """The coordinate at which a number is plotted."""
        return max(number, self.floor)

    def configure(self, panel: Axes, name: str) -> None:
        """Sets the scale of the axis, and its label, which begins with the name of what is plotted."""
        panel.set_xscale("log")
        below = f"; values below {tick(self.floor)} are plotted at {tick(self.floor)}" if self.clips else ""
        panel.set_xlabel(f"{name} (log axis{below})")


@dataclass(frozen=True)
class SymmetricLogAxis:
    """The deviation from ``center`` on a symmetric log axis, linear within ``threshold``.

    >>> SymmetricLogAxis(1.0, threshold=1e-9).place(1.5)
    0.5
    """

    center: float
    threshold: float

    def place(self, number: float) -> float:
        """The coordinate at which a number is plotted."""
        return number - self.center

    def configure(self, panel: Axes, name: str) -> None:
        """Sets the scale of the axis, and its label, which begins with the name of what is plotted."""
        panel.set_xscale("symlog", linthresh=self.threshold)
        shown = name if self.center == 0 else f"deviation of {name} from {self.center:.12g}"
        panel.set_xlabel(f"{shown} (log axis on both sides, linear within {tick(self.threshold)})")

    def ticks(self, extent: float, most: int = 4) -> list[float]:
        """0 and powers of ten, at most ``most`` on each side."""
        first, last = math.ceil(math.log10(self.threshold)), math.floor(math.log10(extent))
        powers = [10.0**exponent for exponent in range(first, last + 1)] or [self.threshold]
        kept = powers[:: -max(1, math.ceil(len(powers) / most))]
        return [*(-power for power in kept), 0.0, *reversed(kept)]


Axis = LinearAxis | LogAxis | SymmetricLogAxis


def trial_figure(
    verdict: Verdict, data: xr.Dataset, *, variables: str | Sequence[str] | None = None, width: float = WIDTH
) -> Figure:
    """Figure of a trial: the statistic with its region, and the first five variables of the trial's Measurement, or
    those named by ``variables``.

    The top panel shows the intervals of the statistic and of all controls that are judged by the same region (the null,
    the value printed in the source, further parts) with their numbers; the region is shaded. The axis depends on the
    region: a log axis for an error bounded from above whose numbers span more than a factor of 30, the deviation from
    the center for a narrow two-sided region, symmetric log where numbers around 0 span decades, else linear. An
    infinite end is an arrow at the edge.

    The panels below show each variable over its first axis, with one curve for each combination of the further axes (a
    grid of small panels for a variable with three axes), bands (NAME_low to NAME_high, else two standard errors) and
    NAME_null as a dotted line; replicates are reduced first. The attribute scale = "log" selects a log axis for values
    that span more than a factor of 30, long_name is the label. ``width`` is in inches; below 6, text is wrapped as a
    phone needs it. Raises HelmscopeError for anything but a Verdict and a Measurement, for a variable that the
    Measurement does not have, and for a width below 3.

    >>> import xarray as xr
    >>> from helmscope.types import JudgedCondition, Ruling
    >>> region = Region(text="within .1", low=0.9, high=1.1)
    >>> rate = JudgedCondition("rate", region, Interval(1.0, 0.99, 1.01, n=20), Ruling.SUPPORTED)
    >>> verdict = Verdict(claim="rate", ruling=Ruling.SUPPORTED, conditions=(rate,))
    >>> data = xr.Dataset({"slope": ("beta", [1.0, 1.0]), "slope_stderr": ("beta", [0.1, 0.1])}, attrs={"n": 20})
    >>> len(trial_figure(verdict, data).axes)
    2
    """
    if not isinstance(verdict, Verdict):
        raise HelmscopeError(f"verdict is {type_with_article(verdict)}, but it must be a Verdict")
    check_real("width", width, at_least=3.0)
    data = reduced(data)
    names = variable_names(data)
    shown = names[:MAX_PANELS] if variables is None else _check_variables(variables, names)
    with styled():
        return _draw_figure(verdict, data, shown, _Layout(width))


def tick(number: float) -> str:
    """Formats a number briefly for an axis.

    >>> tick(1e-6), tick(0.1)
    ('1e-6', '0.1')
    """
    return f"{number:.3g}".replace("e-0", "e-").replace("e+0", "e+")


def _check_variables(chosen: str | Sequence[str], names: Sequence[str]) -> list[str]:
    """The chosen variables; raises HelmscopeError for one that was not measured."""
    listed = [chosen] if isinstance(chosen, str) else list(chosen)
    if listed and not names:
        raise HelmscopeError(f"variables is {listed}, but the experiment returned no data: call plot() without it")
    return [check_name("variable of the trial", str(name), names) for name in listed]


def _draw_figure(verdict: Verdict, data: xr.Dataset, shown: Sequence[str], layout: _Layout) -> Figure:
    rows, omitted = _rows(verdict), len(variable_names(data)) - len(shown)
    heights = [layout.statistic_height(len(rows)), *(_panel_height(data, name, layout) for name in shown)]
    figure = blank_figure(layout.width, sum(heights) + 0.4)
    more = f"   ({pluralized(omitted, 'variable')} not shown)" if omitted > 0 else ""
    title = layout.wrap(plain(f"{verdict.claim}: {verdict.ruling.value}{more}"))
    figure.suptitle(title, fontsize=10, fontweight="bold")
    # each panel has its own subfigure, so that the color scale of one does not narrow the others
    top, *others = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_statistic(top.subplots(), verdict, rows, layout)
    for place, name in zip(others, shown, strict=True):
        if is_grid(data[name]):
            draw_grid(place, data, name, letters=layout.letters)
        else:
            draw_variable(place.subplots(), data, name, letters=layout.letters)
    return figure


def _panel_height(data: xr.Dataset, name: str, layout: _Layout) -> float:
    """The height of a panel with its heading, in inches."""
    value = data[name]
    return (grid_height(value) if is_grid(value) else PANEL) + LINE * len(heading(data, name, letters=layout.letters))


def _region(verdict: Verdict) -> Region:
    """The region of the deciding condition; one without bounds if nothing was measured."""
    return verdict.region or Region(text="nothing was measured")


def _statistic_name(verdict: Verdict) -> str:
    """The names of the conditions on the axis; "value" if they are too long for its label."""
    ends = _region(verdict).ends
    names = " and ".join(case.name for case in verdict.conditions if case.region.ends == ends)
    return names if 0 < len(names) <= LONGEST_NAME else "value"


def _rows(verdict: Verdict) -> list[_Row]:
    """The conditions of the claim, its controls and the printed form, where they are judged by the same region."""
    ends = _region(verdict).ends
    several = len(verdict.conditions) > 1
    cases = [(f"condition: {case.name}" if several else "the claim", COLORS[0], case) for case in verdict.conditions]
    cases += [(f"control: {case.name}", GRAY, case) for case in verdict.controls]
    rows = [_Row(label, color, case.interval) for label, color, case in cases if case.region.ends == ends]
    printed = verdict.printed
    if printed is not None and printed.region is not None and printed.region.ends == ends:
        rows.append(_Row(f"as printed: {printed.text}", COLORS[1], printed.interval))
    return rows or [_Row("the claim", COLORS[0], None)]


def _draw_statistic(panel: Axes, verdict: Verdict, rows: Sequence[_Row], layout: _Layout) -> None:
    region = _region(verdict)
    intervals = [row.interval for row in rows if row.interval is not None]
    axis = choose_axis(region, intervals)
    axis.configure(panel, plain(_statistic_name(verdict)))
    panel.set_xlabel(layout.wrap(panel.get_xlabel()))
    edges = left, right = _limits(panel, axis, region, intervals)
    if isinstance(axis, SymmetricLogAxis):
        most = 2 if layout.is_narrow else 4
        places = [place for place in axis.ticks(max(abs(left), abs(right)), most) if left <= place <= right]
        panel.set_xticks(places, [tick(place) for place in places])
        panel.minorticks_off()
    if region.bounded:
        panel.axvspan(*(_place_or_edge(axis, end, edges) for end in region.ends), color=GREEN, alpha=0.15, linewidth=0)
    for end in filter(math.isfinite, region.ends):
        panel.axvline(axis.place(end), color=GREEN, linewidth=0.8, label="_region")
    for index, row in enumerate(rows):
        _draw_row(panel, axis, row, float(-index), edges, layout)
    panel.set(xlim=edges, ylim=(0.5 - len(rows), 0.5))
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    measured = verdict.printed is not None and verdict.printed.region is not None
    omitted = len(verdict.conditions) + len(verdict.controls) + measured - len(rows)
    note = f"; {pluralized(omitted, 'interval')} with another region not shown" if omitted > 0 else ""
    bound = "shaded: " if region.bounded else ""
    text = f"the statistic and its region ({bound}{region_text(region)}{note})"
    panel.set_title(layout.wrap(text), loc="left", fontsize=9)


def _draw_row(panel: Axes, axis: Axis, row: _Row, y: float, edges: tuple[float, float], layout: _Layout) -> None:
    """Draws the interval as a line and the estimate as a dot, with label and numbers above them."""
    label_y, numbers_y, line = (y + height for height in layout.heights)
    interval = row.interval
    if interval is not None:
        ends = [_place_or_edge(axis, end, edges) for end in (interval.low, interval.high)]
        panel.plot(ends, [line, line], color=row.color, linewidth=3, alpha=0.55, label=plain(row.label))
        for end, place in zip((interval.low, interval.high), ends, strict=True):
            _draw_marker(panel, end, place, line, row.color, "|")
        _draw_marker(panel, interval.estimate, axis.place(interval.estimate), line, row.color, "o")
    across = panel.get_yaxis_transform()
    label = textwrap.shorten(row.label, layout.label_letters, placeholder=" ...")
    numbers = interval_text(interval) + ("" if interval is None else f", n = {interval.n:,}")
    panel.text(0.01, label_y, plain(label), transform=across, va="center", color=row.color, fontsize=8.5)
    size = 8.5 * min(1.0, layout.letters / len(numbers))  # the line must fit, since half a number is misleading
    panel.text(0.99, numbers_y, numbers, transform=across, va="center", ha="right", fontsize=size)


def _draw_marker(panel: Axes, number: float, place: float, y: float, color: str, marker: str) -> None:
    shape = marker if math.isfinite(number) else ("<" if number < 0 else ">")
    panel.plot([place], [y], marker=shape, markersize=7, color=color, linestyle="none", clip_on=False, label="_marker")


def _place_or_edge(axis: Axis, number: float, edges: tuple[float, float]) -> float:
    return axis.place(number) if math.isfinite(number) else edges[number > 0]


def choose_axis(region: Region, intervals: Sequence[Interval]) -> Axis:
    """Chooses an axis on which a region and the intervals are legible.

    >>> choose_axis(Region(text="1 within 1e-6", low=0.999999, high=1.000001), [])
    SymmetricLogAxis(center=1.0, threshold=1e-07)
    >>> choose_axis(Region(text="at most 1e-12", high=1e-12), [Interval(1e-15, 1e-16, 1e-14, n=9)])
    LogAxis(floor=1e-17, clips=False)
    >>> choose_axis(Region(text="at most 1", high=1.0), [Interval(0.4, 0.2, 0.6, n=9)])
    LinearAxis()
    >>> choose_axis(Region(text="at least 0.5", low=0.5), [Interval(0.1, 0, 0.2, n=9), Interval(-1e-7, -1e-7, 0, n=9)])
    LinearAxis()
    """
    low, high = region.ends
    bounds = [bound for bound in (low, high) if math.isfinite(bound)]
    if not bounds:
        return LinearAxis()
    estimates = [interval.estimate for interval in intervals]
    ends = [end for interval in intervals for end in (interval.low, interval.high) if math.isfinite(end)]
    numbers = estimates + ends
    center = sum(bounds) / 2 if len(bounds) == 2 else 0.0
    scaling = numbers if len(bounds) == 2 else estimates  # an end of an interval may be close to 0 by chance
    # next to a bound other than 0, what is less than a thousandth of it is 0, as the rounding of a control is
    least = NOTHING * abs(bounds[0]) if len(bounds) == 1 and min([*numbers, *bounds]) < 0 else 0.0
    sizes = [abs(number - center) for number in [*scaling, *bounds] if abs(number - center) > least]
    smallest = min(sizes, default=1.0)
    largest = max([abs(number - center) for number in numbers] + sizes, default=1.0)
    if len(bounds) == 2:
        half_width = (high - low) / 2
        if half_width >= 1e-3 * abs(center) and largest <= 20 * half_width:
            return LinearAxis()
        return SymmetricLogAxis(center, _power_below(min(max(smallest, 1e-6 * half_width), half_width) or smallest))
    positive = [number for number in [*numbers, *bounds] if number > 0]
    if min([*numbers, *bounds]) >= 0 and bounds[0] > 0 and largest > LOG_FACTOR * smallest:
        lowest = max(min(positive), bounds[0] * 10.0**-DECADES_BELOW)
        floor = _power_below(lowest, less=1)
        return LogAxis(floor, clips=min([*numbers, *bounds]) < floor)
    return (
        LinearAxis()
        if largest <= 100 * smallest
        else SymmetricLogAxis(0.0, _power_below(max(smallest, 1e-12 * largest)))
    )


def _power_below(number: float, *, less: int = 0) -> float:
    return 10.0 ** (math.floor(math.log10(number)) - less)


def _limits(panel: Axes, axis: Axis, region: Region, intervals: Sequence[Interval]) -> tuple[float, float]:
    """Limits that include all finite numbers and bounds, with equal margins on the scale of the axis."""
    numbers = [
        *region.ends,
        *(end for interval in intervals for end in (interval.estimate, interval.low, interval.high)),
    ]
    places = [axis.place(number) for number in numbers if math.isfinite(number)] or [0.0, 1.0]
    scale = panel.xaxis.get_transform()
    low, high = (float(scale.transform(np.array([end]))[0]) for end in (min(places), max(places)))
    least = 1.0 if isinstance(axis, LogAxis) else 0.2 * max(abs(low), abs(high), 1e-12)
    margin = max(0.12 * (high - low), (least - (high - low)) / 2)
    left, right = (float(scale.inverted().transform(np.array([end]))[0]) for end in (low - margin, high + margin))
    return left, right
