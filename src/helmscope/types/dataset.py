"""The types of Measurements, an xarray Dataset that can be plotted, and of several of them by name.

This module imports xarray, and is therefore imported only where a Measurement is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import xarray as xr

from helmscope.types.arguments import pluralized
from helmscope.types.display import figure_of, html_table, one_line_repr
from helmscope.types.measurement import COMPANIONS, keeps_replicates, replicate_axis

if TYPE_CHECKING:
    from helmscope.types.display import Figure


class MeasurementPlot(xr.Dataset.plot):  # type: ignore[valid-type,misc]
    """The attribute ``plot`` of a Measurement: called, it returns the figure of ``hs.plot``; ``plot.scatter`` and the
    others of xarray are as for any Dataset.

    >>> measured = Measurement({"rank": (("time", "system"), [[1.0, 2.0], [2.0, 3.0]])}, {"time": [0.0, 1.0]})
    >>> measured.plot().axes[0].get_xlabel(), hasattr(measured.plot, "scatter")
    ('time', True)
    """

    __slots__ = ()

    def __call__(self, **options: Any) -> Figure:
        """The figure of ``hs.plot``, with its options."""
        return figure_of(self._ds, **options)


class Measurement(xr.Dataset):  # type: ignore[no-untyped-call]
    """A Measurement: an xarray Dataset, with its replicates or reduced over them, whose ``plot()`` is that of
    ``hs.plot``.

    Selecting, averaging, assigning, masking and concatenating keep the type; arithmetic and ``xr.merge`` return a plain
    Dataset, which ``Measurement.of`` converts, as it does one that was read from a file.

    >>> data = xr.Dataset({"rank": (("time", "system"), [[1.0, 2.0], [2.0, 3.0]])}, {"time": [0.0, 1.0]})
    >>> measured = Measurement.of(data)
    >>> type(measured.sel(time=1.0)).__name__, type(measured.mean("system")).__name__, measured.identical(data)
    ('Measurement', 'Measurement', True)
    """

    __slots__ = ()

    @classmethod
    def of(cls, data: xr.Dataset) -> Self:
        """The same data with this type; unchanged if they have it.

        >>> type(Measurement.of(xr.Dataset())).__name__
        'Measurement'
        """
        return data if isinstance(data, cls) else cls(data.data_vars, data.coords, data.attrs)

    @property
    def plot(self) -> MeasurementPlot:  # type: ignore[override]
        """Called, the figure of ``hs.plot`` with its options; ``plot.scatter`` and others are those of xarray."""
        return MeasurementPlot(self)

    def where(self, *args: Any, **kwargs: Any) -> Self:
        """``Dataset.where``, returned as a Measurement.

        >>> measured = Measurement({"rank": ("system", [1.0, 2.0])})
        >>> type(measured.where(measured["rank"] > 1)).__name__
        'Measurement'
        """
        return self.of(super().where(*args, **kwargs))

    def fillna(self, value: Any) -> Self:
        """``Dataset.fillna``, returned as a Measurement.

        >>> type(Measurement({"rank": ("system", [1.0, float("nan")])}).fillna(0.0)).__name__
        'Measurement'
        """
        return self.of(super().fillna(value))


class Measurements(dict[str, xr.Dataset]):
    """Measurements of one system by name, as ``hs.measure`` and ``system.replay`` return them: a dict with a short
    display and ``plot()``.

    >>> rank = Measurement({"rank": ("prompt", [1.0, 2.0])}, attrs={"model": "A"})
    >>> Measurements(ranks=rank)
    <Measurements: 1 of A over 2 prompts: ranks>
    >>> list(Measurements(ranks=rank)), Measurements(ranks=rank)["ranks"] is rank
    (['ranks'], True)
    """

    __slots__ = ()

    def plot(self, **options: Any) -> Figure:
        """The figure of ``hs.plot``: all of them on one page, or single ``variables``.

        >>> angle = Measurement({"angle": (("depth", "prompt"), [[0.1, 0.2], [0.2, 0.2]])}, {"depth": [1, 2]})
        >>> [panel.get_title(loc="left") for panel in Measurements(depth_steps=angle).plot().axes]
        ['depth steps: angle']
        """
        return figure_of(self, **options)

    def __repr__(self) -> str:
        model, replicates = _origin(self)
        whose = f" of {model}" if model else ""
        over = f" over {' or '.join(replicates)}" if replicates else ""
        return one_line_repr(f"Measurements: {len(self)}{whose}{over}: {', '.join(self) or 'none'}")

    def _repr_html_(self) -> str:
        model, replicates = _origin(self)
        title = f"{pluralized(len(self), 'measurement')}{f' of {model}' if model else ''}"
        rows = [(name, ", ".join(_variables(data)), _axes(data)) for name, data in self.items()]
        note = f"over {' or '.join(replicates)}; .plot() draws them" if replicates else ".plot() draws them"
        return html_table(title, rows, header=("name", "variables", "axes"), note=note)


def _origin(measured: Mapping[str, xr.Dataset]) -> tuple[str, list[str]]:
    """The name of the model or simulation, empty if it is unknown, and the numbers of replicates in words."""
    names = (str(data.attrs[key]) for data in measured.values() for key in ("model", "system") if data.attrs.get(key))
    model = next(names, "")
    counts = dict.fromkeys(
        pluralized(data.sizes[axis], axis)
        for data in measured.values()
        if keeps_replicates(data)
        for axis in (replicate_axis(data),)
    )
    return model, list(counts)


def _variables(data: xr.Dataset) -> list[str]:
    return [str(name) for name in data.data_vars if not str(name).endswith(COMPANIONS)]


def _axes(data: xr.Dataset) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in data.sizes.items())
