"""The result of an integration: a System."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helmscope.fields.block import Block
from helmscope.fields.field import Field, StateSpace
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.runs.bar import shows_progress
from helmscope.solve.replay import replay, unsupported_reason
from helmscope.types import HasTrajectory, Outcome, Plottable, Trajectory, html_table, one_line_repr, short_description

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.solve.problem import Problem
    from helmscope.types import Instrument
    from helmscope.types.dataset import Measurements
    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(HasTrajectory, Plottable):
    """The result of an integration: the trajectory, how it ended, and the mechanism, so that it can be resumed.

    ``states`` has shape (time, *batch, n, d). ``event_times`` holds, for each event, the first time it happened to each
    system (NaN: never). ``raw_states`` is the residual stream itself, if the field has one; the trajectory holds
    its direction and radius under the norm before attention.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2), times=[0.0, 1.0, 2.0])
    >>> run
    <Simulation of SA(beta=0): 1 system x 2 tokens on S^1; 3 times, 0 to 2; finished>
    >>> run.states.shape, run.kernel(layer=0)[0, 0].tolist(), str(run.outcome)
    (torch.Size([3, 2, 2]), [0.5, 0.5], 'finished at t=2')
    >>> run.resume(depth=1, states=run.trajectory.states[1]).times
    tensor([1., 2.], dtype=torch.float64)
    """

    trajectory: Trajectory
    problem: Problem
    event_times: tuple[Tensor, ...] = ()
    raw_states: Float[Tensor, "time batch n d"] | None = None

    @property
    def _where(self) -> str:
        """The state space, as text after its preposition."""
        dim = self.trajectory.states.shape[-1]
        names = {
            StateSpace.SPHERE: f"on S^{dim - 1}",
            StateSpace.STREAM: f"in a residual stream in R^{dim}",
            StateSpace.FLAT: f"in R^{dim}",
        }
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
        return (
            short_description(self.field)
            if noise is None
            else f"{short_description(self.field)} with {short_description(noise)}"
        )

    def __repr__(self) -> str:
        path = self.trajectory
        what = f"{path.size_text} {self._where}; {path.times_text}; {self.outcome.summary}"
        return one_line_repr(f"Simulation of {self.title}: {what}")

    def _repr_html_(self) -> str:
        path, problem = self.trajectory, self.problem
        rows = [
            ("tokens", f"{path.size_text} {self._where}"),
            ("times", path.times_text),
            ("method", short_description(problem.stepper)),
            *([] if problem.noise is None else [("noise", f"{short_description(problem.noise)}, seed {problem.seed}")]),
            ("outcome", str(self.outcome)),
            *(
                (short_description(event), f"happened to {int(times.isfinite().sum()):,} of {times.numel():,}")
                for event, times in zip(problem.events, self.event_times, strict=True)
            ),
        ]
        return html_table(f"Simulation of {self.title}", rows)

    @property
    def times(self) -> Float[Tensor, " time"]:
        """The requested times.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.times.tolist()
        [0.0, 1.0]
        """
        return self.trajectory.times

    @property
    def states(self) -> Float[Tensor, "time *batch n d"]:
        """The tokens at the requested times.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.states.shape
        torch.Size([2, 2, 2])
        """
        states = self.trajectory.states
        return states.reshape(len(states), *self.problem.batch, *states.shape[-2:])

    @property
    def outcome(self) -> Outcome:
        """How the systems ended; its text includes a remedy if one failed.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> str(run.outcome)
        'finished at t=1'
        """
        assert self.trajectory.outcome is not None
        return self.trajectory.outcome

    @property
    def field(self) -> Field:
        """The field that was integrated.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.field.beta
        0.0
        """
        return self.problem.field

    @property
    def axis(self) -> str:
        """Name of the axis of the states: time.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.axis
        'time'
        """
        return self.trajectory.axis

    @property
    def layer_axis(self) -> str:
        """Name of the axis of the mechanisms: time as well, because there is one at every stored time.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.layer_axis
        'time'
        """
        return self.axis

    @property
    def replicate(self) -> str:
        """Name of the axis of the replicates: the independent systems.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.replicate
        'system'
        """
        return self.trajectory.replicate

    @property
    def layers(self) -> range:
        """One layer per stored time: the mechanism at that time.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.layers
        range(0, 2)
        """
        return range(len(self.times))

    @property
    def visible(self) -> Bool[Tensor, "batch n"] | None:
        """The tokens of positive weight, which can be attended to; None if all can.

        >>> import torch
        >>> import helmscope as hs
        >>> weights = torch.tensor([1.0, 0.0])
        >>> hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0], weights=weights).visible
        tensor([[ True, False]])
        """
        return None if self.problem.weights is None else self.problem.weights > 0

    def kernel(self, layer: int) -> Float[Tensor, "batch *heads n n"]:
        """The attention kernel at the stored time number ``layer``.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.kernel(layer=0)
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
        """
        index = self.problem.time_index(layer, "layer")
        return self.field.kernel(
            self.residual_stream(depth=index), t=float(self.times[index]), weights=self.problem.weights
        )

    def residual_stream(self, *, depth: int) -> Float[Tensor, "batch n d"]:
        """The states at the stored time number ``depth``: the residual stream if there is one, or unit vectors.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.residual_stream(depth=0)
        tensor([[[1., 0.],
                 [0., 1.]]])
        """
        states = self.trajectory.states if self.raw_states is None else self.raw_states
        return states[self.problem.time_index(depth, "depth")]

    def force(self, layer: int) -> Field | None:
        """The MLP as a force on unit vectors: that of a block, or the field itself if it is an MLP; otherwise None.

        It is the same at every time; ``layer`` is an argument because a recorded model has one MLP per layer.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.force(layer=0) is None
        True
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

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> changed = run.resume(depth=0, states=torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
        >>> changed.states[-1]
        tensor([[1., 0.],
                [1., 0.]])
        """
        return self.problem.continued(depth, states, self.residual_stream(depth=depth), generator).run()

    def unsupported_reason(self, instrument: Instrument) -> str | None:
        """Why the instrument cannot be used on this simulation, in one sentence; None if it can.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> run.unsupported_reason(hs.observe.MlpForce())
        'system has no MLP: force(layer=0) is None, but mlp_force needs one: that of a Block, or an MLP itself'
        """
        return unsupported_reason(self, instrument)

    @shows_progress("replaying")
    def replay(
        self, *instruments: Instrument, batch_size: int | None = None, progress: ProgressOption = None
    ) -> Measurements:
        """Show the mechanism at every stored time to instruments and return their Measurements by name, with the axes
        ``time`` and ``system``.

        ``batch_size`` is the number of systems at a time; by default kernels take at most 128 MiB. A field of one head
        has no axis ``head``. Writes are velocities, and under ``Layer(h)`` increments. ``progress`` is called with the
        share of the work done.

        >>> import torch
        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0])
        >>> measured = run.replay(hs.observe.KernelStatistics())["kernel_statistics"]
        >>> measured.effective_keys.round(6).values.tolist()
        [[2.0], [2.0]]
        """
        return replay(self, instruments, batch_size=batch_size, progress=progress)
