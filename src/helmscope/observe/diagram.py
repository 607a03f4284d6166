"""The type of a phase diagram."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xarray as xr

from helmscope.types import picture

if TYPE_CHECKING:
    from helmscope.types.display import Figure


class PhaseDiagram(xr.Dataset):  # type: ignore[no-untyped-call]
    """What ``phase_diagram`` gives: an xarray Dataset whose ``plot()`` is the heat map of its probabilities.

    Selecting, assigning and concatenating keep the type, and files are written and read as those of any Dataset; what
    was read from one is a PhaseDiagram again by ``PhaseDiagram.of``.

    >>> made = xr.Dataset({"probability": (("beta", "time"), [[0.0, 1.0]])}, {"beta": [1.0], "time": [0.0, 9.0]})
    >>> diagram = PhaseDiagram.of(made)
    >>> isinstance(diagram.sel(beta=1.0), PhaseDiagram), diagram.identical(made)
    (True, True)
    """

    __slots__ = ()

    @classmethod
    def of(cls, data: xr.Dataset) -> PhaseDiagram:
        """The same data as a PhaseDiagram."""
        return cls(data.data_vars, data.coords, data.attrs)

    # in the place of xarray's accessor, which cannot draw these heat maps
    def plot(self, **options: Any) -> Figure:  # type: ignore[override]
        """Heat maps over time and beta; the options are those of ``phase_figure``."""
        return picture(self, **options)
