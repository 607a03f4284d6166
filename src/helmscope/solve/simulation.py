"""The result of an integration: a System."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helmscope.fields.block import Block
from helmscope.fields.field import Field, Space
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.solve.replay import refusal, replay
from helmscope.types import Outcome, Plottable, Trajectory, brief, one_line_repr, table

if TYPE_CHECKING:
    import torch
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.solve.problem import Problem
    from helmscope.types import Instrument, Progress


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(Plottable):
    """The result of an integration: the trajectory, how it ended, and the mechanism, so that it can be resumed.

    ``states`` has shape (time, *batch, n, d). ``event_times`` holds, for each event, the first time it happened to each
    system (NaN: never). ``streams`` is the residual stream itself, if the field has one; the trajectory holds its
    direction and radius under the norm before attention.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0, 2.0])
    >>> run
    <Simulation of SA(beta=0): 1 system x 2 tokens in S^1; 3 times, 0 to 2; finished>
    >>> run.states.shape, run.kernel(layer=0)[0, 0].tolist(), str(run.outcome)
    (torch.Size([3, 2, 2]), [0.5, 0.5], 'finished at t=2')
    >>> run.resume(depth=1, states=run.trajectory.states[1]).times
    tensor([1., 2.], dtype=torch.float64)
    """

    trajectory: Trajectory
    problem: Problem
    event_times: tuple[Tensor, ...] = ()
    streams: Float[Tensor, "time batch n d"] | None = None

    @property
    def _where(self) -> str:
        """The state space, as text."""
        dim = self.trajectory.states.shape[-1]
        names = {Space.SPHERE: f"S^{dim - 1}", Space.STREAM: f"a residual stream in R^{dim}", Space.FLAT: f"R^{dim}"}
        return names[self.field.space]

    @property
    def title(self) -> str:
        """The field and, if there is one, the noise, as text.

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> from helmscope.fields.noise import IsotropicNoise
        >>> from helmscope.solve.integrate import integrate
        >>> integrate(SA(beta=4.0), torch.eye(2), times=[0.1], noise=IsotropicNoise(nu=0.1)).title
        'SA(beta=4) with IsotropicNoise(nu=0.1)'
        """
        noise = self.problem.noise
        return brief(self.field) if noise is None else f"{brief(self.field)} with {brief(noise)}"

    def __repr__(self) -> str:
        path = self.trajectory
        what = f"{path.who} in {self._where}; {path.when}; {self.outcome.short}"
        return one_line_repr(f"Simulation of {self.title}: {what}")

    def _repr_html_(self) -> str:
        path, problem = self.trajectory, self.problem
        rows = [
            ("tokens", f"{path.who} in {self._where}"),
            ("times", path.when),
            ("method", brief(problem.stepper)),
            *([] if problem.noise is None else [("noise", f"{brief(problem.noise)}, seed {problem.seed}")]),
            ("outcome", str(self.outcome)),
            *(
                (brief(event), f"happened to {int(times.isfinite().sum()):,} of {times.numel():,}")
                for event, times in zip(problem.events, self.event_times, strict=True)
            ),
        ]
        return table(f"Simulation of {self.title}", rows)

    @property
    def times(self) -> Float[Tensor, " time"]:
        """The requested times."""
        return self.trajectory.times

    @property
    def states(self) -> Float[Tensor, "time *batch n d"]:
        """The tokens at the requested times."""
        states = self.trajectory.states
        return states.reshape(len(states), *self.problem.batch, *states.shape[-2:])

    @property
    def outcome(self) -> Outcome:
        """How the systems ended; its text includes a remedy if one failed."""
        assert self.trajectory.outcome is not None
        return self.trajectory.outcome

    @property
    def field(self) -> Field:
        """The field that was integrated."""
        return self.problem.field

    @property
    def axis(self) -> str:
        """Name of the axis of the states: time."""
        return self.trajectory.axis

    @property
    def layer_axis(self) -> str:
        """Name of the axis of the mechanisms: time as well, because there is one at every stored time."""
        return self.axis

    @property
    def replicate(self) -> str:
        """Name of the axis of the replicates: the independent systems."""
        return self.trajectory.replicate

    @property
    def layers(self) -> range:
        """One layer per stored time: the mechanism at that time."""
        return range(len(self.times))

    @property
    def visible(self) -> Bool[Tensor, "batch n"] | None:
        """The tokens of positive weight, which can be attended to; None if all can."""
        return None if self.problem.weights is None else self.problem.weights > 0

    def kernel(self, *, layer: int) -> Float[Tensor, "batch *heads n n"]:
        """The attention kernel at the stored time number ``layer``."""
        index = self.problem.time_index(layer, "layer")
        return self.field.kernel(self.stream(depth=index), t=float(self.times[index]), weights=self.problem.weights)

    def stream(self, *, depth: int) -> Float[Tensor, "batch n d"]:
        """The states at the stored time number ``depth``: the residual stream if there is one, or unit vectors."""
        states = self.trajectory.states if self.streams is None else self.streams
        return states[self.problem.time_index(depth, "depth")]

    def force(self, *, layer: int) -> Field | None:
        """The MLP as a force on unit vectors: that of a block, or the field itself if it is an MLP; otherwise None.

        It is the same at every time; ``layer`` is an argument because a recorded model has one MLP per layer.
        """
        self.problem.time_index(layer, "layer")
        if isinstance(self.field, MLP | GatedMLP):
            return self.field
        return self.field.force if isinstance(self.field, Block) else None

    def resume(
        self, *, depth: int, states: Float[Tensor, "batch n d"], generator: torch.Generator | None = None
    ) -> Simulation:
        """Integrate again from the stored time number ``depth`` with other states; the times remain those of the whole
        run.

        For a residual stream only the direction is replaced. Under noise the increments are new: sampled from
        ``generator`` if given, otherwise determined by the seed of the run and ``depth``.
        """
        return self.problem.continued(depth, states, self.stream(depth=depth), generator).run()

    def refusal(self, instrument: Instrument) -> str | None:
        """Why the instrument cannot be used on this simulation, in one sentence; None if it can."""
        return refusal(self, instrument)

    def replay(
        self, *instruments: Instrument, batch_size: int | None = None, progress: Progress | None = None
    ) -> dict[str, xr.Dataset]:
        """Show the mechanism at every stored time to instruments and return their Measurements by name, with the axes
        ``time`` and ``system``.

        ``batch_size`` is the number of systems at a time; by default kernels take at most 128 MiB. A field of one head
        has no axis ``head``. Writes are velocities, and under ``Layer(h)`` increments. ``progress`` is called with the
        share of the work done.
        """
        return replay(self, instruments, batch_size=batch_size, progress=progress)
