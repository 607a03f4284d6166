"""``StandaloneMeasurement``: a measurement with its cost, as ``measure`` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.types import System
    from helmscope.types.progress import ProgressOption


class Measure(Protocol):
    """A function that measures a system; with ``quick`` it takes smaller samples, drawn with ``seed``."""

    def __call__(self, system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
        """The Measurement, with replicates."""


@dataclass(frozen=True, eq=False)
class StandaloneMeasurement(ConciseRepr):
    """A measurement that does not share the common replay: its name, its function, the time that it takes in eager
    forward passes of a model, in full and quick, and the function that says why it cannot be taken of a system.

    ``forward_passes`` is a function of (system, quick) where the time depends on the numbers of layers and heads.

    >>> from helmscope.observe.measure import standalone_measurements
    >>> [each.forward_passes for each in standalone_measurements() if each.name == "depth_steps"]
    [(0.3, 0.3)]
    """

    name: str
    function: Measure
    forward_passes: tuple[float, float] | Callable[[System, bool], float]
    unsupported_reason: Callable[[System], str | None] | None = None

    def cost(self, system: System, *, quick: bool) -> float:
        """The time in eager forward passes of the model.

        >>> from helmscope import record
        >>> from helmscope.observe.measure import standalone_measurements
        >>> recording = record("A", ["Once upon a time"])
        >>> growth = next(each for each in standalone_measurements() if each.name == "perturbation_growth")
        >>> growth.cost(recording, quick=True)
        14
        """
        return self.forward_passes(system, quick) if callable(self.forward_passes) else self.forward_passes[int(quick)]
