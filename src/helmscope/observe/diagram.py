"""The type of phase diagrams, a Measurement with a picture of its own."""

from __future__ import annotations

from helmscope.types.dataset import Measurement


class PhaseDiagram(Measurement):  # type: ignore[no-untyped-call]
    """The result of ``phase_diagram``: a Measurement whose ``plot()`` returns a heat map of its probabilities.

    Selecting, assigning and concatenating keep the type. Files are written and read like those of any Dataset;
    ``PhaseDiagram.of`` converts a Dataset that was read from a file.

    >>> import xarray as xr
    >>> data = xr.Dataset({"probability": (("beta", "time"), [[0.0, 1.0]])}, {"beta": [1.0], "time": [0.0, 9.0]})
    >>> diagram = PhaseDiagram.of(data)
    >>> isinstance(diagram.sel(beta=1.0), PhaseDiagram), diagram.identical(data)
    (True, True)
    """

    __slots__ = ()
