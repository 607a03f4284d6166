"""States over time or depth: simulations and recorded transformers both produce a Trajectory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from helmscope.types.arguments import check_name, pluralized, short_repr
from helmscope.types.display import Plottable, one_line_repr
from helmscope.types.errors import HelmscopeError
from helmscope.types.measurement import REPLICATES

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Status(Enum):
    """How the integration of one system ended; the value is the message, with a remedy.

    >>> Status.FINISHED.value.format(time=10.0)
    'finished at t=10'
    """

    FINISHED = "finished at t={time:.6g}"
    AT_REST = "the state has stopped moving at t={time:.6g}, and is held to the last time"
    STOPPED = "ended by a terminal event at t={time:.6g}, later states are NaN: leave out terminal=True to go on"
    STEP_LIMIT = (
        "step limit reached at t={time:.6g}: raise max_steps, loosen tol, lower beta, pass merge= to integrate, or "
        "take a stepper of fixed size"
    )
    STEP_TOO_SMALL = "step size fell below rounding at t={time:.6g}: use float64, loosen tol, lower beta or pass merge="
    NO_RADIUS = (
        "radius of a residual stream fell to 0 at t={time:.6g}, where its direction is lost: start with a larger "
        "radius, or take layers, stepper=Layer()"
    )
    NOT_FINITE = "velocity is not finite at t={time:.6g}: lower beta or use float64"
    UNRESOLVED = "the grid no longer resolves the density at t={time:.6g}: raise degree or add noise"

    @property
    def ok(self) -> bool:
        """Whether the states at all requested times are known.

        >>> Status.AT_REST.ok
        True
        """
        return self in (Status.FINISHED, Status.AT_REST)

    @property
    def failed(self) -> bool:
        """Whether the integration failed: states are missing, and not because of a terminal event.

        >>> Status.STOPPED.ok, Status.STOPPED.failed
        (False, False)
        """
        return not self.ok and self is not Status.STOPPED


@dataclass(frozen=True, repr=False)
class Outcome:
    """How the integration of a batch ended: one status and one final time per system.

    >>> str(Outcome((Status.FINISHED, Status.STEP_LIMIT), (10.0, 3.2)))
    'system 1 (of 0 to 1): step limit reached at t=3.2: raise max_steps, loosen tol, lower beta, ...'
    >>> Outcome((Status.FINISHED, Status.STEP_LIMIT), (10.0, 3.2))
    <Outcome of 2 systems: 1 finished, 1 step limit>
    """

    statuses: tuple[Status, ...]
    times: tuple[float, ...]

    @property
    def ok(self) -> bool:
        """Whether the states of every system at all requested times are known.

        >>> Outcome((Status.FINISHED, Status.STOPPED), (10.0, 3.2)).ok
        False
        """
        return all(status.ok for status in self.statuses)

    @property
    def failed(self) -> bool:
        """Whether the integration of some system failed.

        >>> Outcome((Status.FINISHED, Status.STEP_LIMIT), (10.0, 3.2)).failed
        True
        """
        return any(status.failed for status in self.statuses)

    @property
    def summary(self) -> str:
        """How the systems ended, in a few words and without a remedy.

        >>> Outcome((Status.FINISHED, Status.FINISHED), (10.0, 10.0)).summary
        'finished'
        """
        ends = Counter(status.name.lower().replace("_", " ") for status in self.statuses)
        if len(ends) == 1:
            return next(iter(ends))
        return ", ".join(f"{number:,} {end}" for end, number in ends.items()) or "no systems"

    def __repr__(self) -> str:
        return one_line_repr(f"Outcome of {pluralized(len(self.statuses), 'system')}: {self.summary}")

    def __str__(self) -> str:
        unfinished = [i for i, status in enumerate(self.statuses) if (status.failed if self.failed else not status.ok)]
        first = unfinished[0] if unfinished else 0
        text = self.statuses[first].value.format(time=self.times[first]) if self.statuses else "no systems"
        if not unfinished:
            return text
        others = len(unfinished) - 1
        more = f" (and {others} more system{'s' if others > 1 else ''})" if others else ""
        last = len(self.statuses) - 1
        return f"system {first} (of 0 to {last}): {text}{more}" if last else text


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory(Plottable):
    """States on the sphere over time: (time, batch, token, dim), each state a unit vector.

    For a simulation, time is the time of the flow and the batch holds independent systems. For a model, time is the
    depth in half-layers (after attention, after MLP), the batch holds prompts, and ``radius`` is the norm that was
    divided out. ``weights`` >= 0 are the weights of the tokens in statistics, (1, batch, token), or (time, batch,
    token) if they change: 0 for padding and for tokens left out; None means equal weights. ``tokens`` optionally holds
    a label per token. In Measurements ``axis`` names the first axis, time, or depth for a model, and ``replicate`` the
    second, system, or prompt for a model; ``unit`` is the unit of the times, such as half-layers. ``identities``
    optionally holds one string per system that identifies what it started from, such as a hash of its text, by which
    ``paired_difference`` recognizes pairs. Raises ``HelmscopeError`` if shapes do not match or a weight is negative.

    >>> import torch
    >>> Trajectory(torch.zeros(1), torch.eye(3).expand(1, 2, 3, 3)).states.shape
    torch.Size([1, 2, 3, 3])
    >>> Trajectory(torch.arange(5.0), torch.eye(3).expand(5, 2, 3, 3), axis="depth", replicate="prompt")
    <Trajectory: 2 prompts x 3 tokens, dimension 3; 5 depths, 0 to 4>
    """

    times: Float[Tensor, " time"]
    states: Float[Tensor, "time batch token dim"]
    weights: Float[Tensor, "#time batch token"] | None = None
    radius: Float[Tensor, "time batch token"] | None = None
    tokens: Sequence[Sequence[str]] | None = None
    outcome: Outcome | None = None
    axis: str = "time"
    replicate: str = "system"
    unit: str = ""
    identities: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("times", "states"):
            if not hasattr(getattr(self, name), "shape"):
                raise HelmscopeError(f"{name} is {short_repr(getattr(self, name))}, but it must be a tensor")
        check_name("replicate of a trajectory", self.replicate, REPLICATES)
        shape = tuple(self.states.shape)
        if len(shape) != 4:
            raise HelmscopeError(f"states has shape {shape}, but it must be (time, batch, token, dim)")
        constant = self.weights is not None and tuple(self.weights.shape)[:1] == (1,)
        expected = {
            "times": shape[:1],
            "weights": (1, *shape[1:3]) if constant else shape[:3],
            "radius": shape[:3],
        }
        for name, wanted in expected.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != wanted:
                raise HelmscopeError(f"{name} has shape {tuple(value.shape)}, but to match states it must be {wanted}")
        if self.weights is not None and not bool((self.weights >= 0).all()):
            raise HelmscopeError("weights holds a number below 0 or NaN, but every weight must be >= 0")
        if self.tokens is not None and [len(row) for row in self.tokens] != [shape[2]] * shape[1]:
            raise HelmscopeError(
                f"tokens must hold {pluralized(shape[2], 'label')} for each of {pluralized(shape[1], 'system')}"
            )
        if self.identities is not None and len(self.identities) != shape[1]:
            raise HelmscopeError(
                f"identities holds {pluralized(len(self.identities), 'string')}, but it must hold one for each of "
                f"{pluralized(shape[1], self.replicate)}"
            )

    @property
    def times_text(self) -> str:
        """The number and range of the stored times or depths, as text.

        >>> import torch
        >>> Trajectory(torch.tensor([0.0, 10.0]), torch.eye(3).expand(2, 1, 3, 3)).times_text
        '2 times, 0 to 10'
        """
        number = len(self.times)
        ends = dict.fromkeys(f"{float(self.times[k]):g}" for k in ((0, -1) if number else ()))
        return ", ".join(filter(None, (pluralized(number, self.axis), " to ".join(ends))))

    @property
    def size_text(self) -> str:
        """The number of systems or prompts and of their tokens, as text.

        >>> import torch
        >>> Trajectory(torch.zeros(1), torch.eye(3).expand(1, 1, 3, 3)).size_text
        '1 system x 3 tokens'
        """
        _, batch, tokens, _ = self.states.shape
        return f"{pluralized(batch, self.replicate)} x {pluralized(tokens, 'token')}"

    def __repr__(self) -> str:
        return one_line_repr(f"Trajectory: {self.size_text}, dimension {self.states.shape[-1]}; {self.times_text}")
