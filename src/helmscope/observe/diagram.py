"""The type of phase diagrams, a Dataset that can be plotted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xarray as xr

from helmscope.types import figure_of

if TYPE_CHECKING:
    from helmscope.types.display import Figure


class PhaseDiagram(xr.Dataset):  # type: ignore[no-untyped-call]
    """The result of ``phase_diagram``: an xarray Dataset whose ``plot()`` returns a heat map of its probabilities.

    Selecting, assigning and concatenating keep the type. Files are written and read like those of any Dataset;
    ``PhaseDiagram.of`` converts a Dataset that was read from a file.

    >>> data = xr.Dataset({"probability": (("beta", "time"), [[0.0, 1.0]])}, {"beta": [1.0], "time": [0.0, 9.0]})
    >>> diagram = PhaseDiagram.of(data)
    >>> isinstance(diagram.sel(beta=1.0), PhaseDiagram), diagram.identical(data)
    (True, True)
    """

    __slots__ = ()

    @classmethod
    def of(cls, data: xr.Dataset) -> PhaseDiagram:
        """The same data as a PhaseDiagram.

        >>> type(PhaseDiagram.of(xr.Dataset())).__name__
        'PhaseDiagram'
        """
        return cls(data.data_vars, data.coords, data.attrs)

    # replaces xarray's accessor, which cannot plot these heat maps
    def plot(self, **options: Any) -> Figure:  # type: ignore[override]
        """Heat maps over time and beta; options are passed to ``phase_figure``."""
        return figure_of(self, **options)
