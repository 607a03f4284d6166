"""What a system and an instrument that watches it must offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

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
    the depth; a model of L layers has the depths 0 to 2 L in half-layers.
    """

    @property
    def trajectory(self) -> Trajectory:
        """What the tokens did."""

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


@runtime_checkable
class Reducer(Protocol):
    """Sees query, key, value and weights of one layer as they pass, and keeps a small result."""

    def update(self, layer: int, query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> None:
        """Take in one layer; the tensors are not kept."""

    def result(self) -> xr.Dataset:
        """The Measurement gathered so far."""
