"""The interface of a system."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from helmscope.types.instrument import Instrument
from helmscope.types.progress import ProgressOption
from helmscope.types.trajectory import Trajectory

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool
    from torch import Tensor

    from helmscope.types.dataset import Measurements


@runtime_checkable
class System(Protocol):
    """A trajectory with the mechanism that produced it. Simulations and recordings implement this interface, and
    whatever takes a System works with both.

    Mechanisms are addressed by layer and states by depth. A simulation has one layer per stored time, whose index is
    also the depth; a model of L layers has the depths 0 to 2 L in half-layers, and a decoder that reads an encoder 0 to
    3 L. The system names the axes of its Measurements.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
    >>> isinstance(run, System), run.layers, run.replicate
    (True, range(0, 2), 'system')
    """

    @property
    def trajectory(self) -> Trajectory:
        """The states of the tokens over time or depth."""

    @property
    def axis(self) -> str:
        """Name of the axis of its states: ``time`` for a simulation, ``depth`` (in half-layers) for a recording."""

    @property
    def layer_axis(self) -> str:
        """Name of the axis of its mechanisms: ``time`` for a simulation, ``layer`` for a recording."""

    @property
    def replicate(self) -> str:
        """Name of the axis of its replicates: ``system`` for a simulation, ``prompt`` for a recording."""

    @property
    def layers(self) -> range:
        """The layers that ``kernel`` and ``force`` accept."""

    @property
    def visible(self) -> Bool[Tensor, "batch token"] | None:
        """The tokens that can be attended to, whether or not statistics count them; None if all can."""

    def kernel(self, *, layer: int) -> Tensor:
        """The attention kernel of a layer: row i holds the weights of the keys that token i attends to.

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import integrate
        >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.kernel(layer=0)
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
        """

    def force(self, *, layer: int) -> object | None:
        """The MLP of a layer as a field; None if there is none.

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import integrate
        >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.force(layer=0)
        """

    def resume(self, *, depth: int, states: Tensor, generator: torch.Generator | None = None) -> System:
        """Run again from a depth with other states, (batch, token, dim).

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import integrate
        >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.resume(depth=1, states=run.trajectory.states[0]).trajectory.times
        tensor([1.], dtype=torch.float64)
        """

    def unsupported_reason(self, instrument: Instrument) -> str | None:
        """Why the instrument cannot be used on this system, in one sentence; None if it can.

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import integrate
        >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> from helmscope.observe.kernel import KernelStatistics
        >>> run.unsupported_reason(KernelStatistics())
        """

    def replay(self, *instruments: Instrument, progress: ProgressOption = None) -> Measurements:
        """Show every layer once to all instruments and return their Measurements, with replicates, by name.

        ``progress`` is called with the share of the work done.

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> from helmscope.solve.integrate import integrate
        >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> from helmscope.observe.kernel import KernelStatistics
        >>> list(run.replay(KernelStatistics()))
        ['kernel_statistics']
        """


class HasTrajectory:
    """Base class of systems: asked for an attribute that only its trajectory has, it says so.

    States are reached through the trajectory, because there they have their weights: states alone would count padding.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> integrate(SA(beta=0.0), torch.eye(2), times=[1.0]).weights
    Traceback (most recent call last):
    AttributeError: a Simulation has no attribute 'weights', but its trajectory has: use .trajectory.weights
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """Called for unknown names, and where a property raised an AttributeError."""
            known = {field.name for field in dataclasses.fields(Trajectory)}
            if name not in known or hasattr(type(self), name):
                return object.__getattribute__(self, name)
            hint = (
                "; functions of tokens such as hs.order_parameter take the whole system, and leave out its padding"
                if name == "states"
                else ""
            )
            kind = type(self).__name__
            raise AttributeError(
                f"a {kind} has no attribute '{name}', but its trajectory has: use .trajectory.{name}{hint}"
            )
