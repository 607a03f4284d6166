"""What a system must offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from helmscope.types.instrument import Instrument
from helmscope.types.trajectory import Trajectory

if TYPE_CHECKING:
    import torch
    import xarray as xr
    from jaxtyping import Bool
    from torch import Tensor


@runtime_checkable
class System(Protocol):
    """A trajectory with the mechanism that made it. Simulations and recordings are Systems; nobody asks which.

    Mechanisms are asked for by layer and states by depth. A simulation has one layer per stored time, whose index is
    the depth; a model of L layers has the depths 0 to 2 L in half-layers. The system names the axes that its
    Measurements have.
    """

    @property
    def trajectory(self) -> Trajectory:
        """What the tokens did."""

    @property
    def axis(self) -> str:
        """The axis of its states: ``time`` for a simulation, ``depth`` (in half-layers) for a recording."""

    @property
    def layer_axis(self) -> str:
        """The axis of its mechanisms: ``time`` for a simulation, ``layer`` for a recording."""

    @property
    def replicate(self) -> str:
        """The axis of its replicates: ``system`` for a simulation, ``prompt`` for a recording."""

    @property
    def layers(self) -> range:
        """The layers whose mechanism can be asked for."""

    @property
    def visible(self) -> Bool[Tensor, "batch token"] | None:
        """The tokens that attention sees, whatever statistics count; None where it sees all."""

    def kernel(self, *, layer: int) -> Tensor:
        """The attention kernel of a layer: row i holds the weights of the keys that token i attends to."""

    def force(self, *, layer: int) -> object | None:
        """The MLP of a layer as a field, or None where there is none."""

    def resume(self, *, depth: int, states: Tensor, generator: torch.Generator | None = None) -> System:
        """Continue from a depth with changed states, (batch, token, dim)."""

    def refusal(self, instrument: Instrument) -> str | None:
        """Why the instrument cannot be used on this system, in one sentence; None where it can."""

    def replay(self, *instruments: Instrument) -> dict[str, xr.Dataset]:
        """Show every layer once to all instruments, and give their Measurements, with their replicates, by name."""
