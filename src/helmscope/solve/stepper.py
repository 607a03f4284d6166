"""What a stepper is to ``integrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.solve.flow import Flow


@runtime_checkable
class FixedStepper(Protocol):
    """A one-step method of fixed step size ``h`` and order ``order``: global error O(h^order).

    A method with ``divisible = False`` is a map, not a discretisation: its step cannot be shortened to meet an asked
    time, so times must be multiples of h.
    """

    order: ClassVar[int]
    divisible: ClassVar[bool]

    @property
    def h(self) -> float:
        """The step size."""

    def step(self, flow: Flow, x: Float[Tensor, "batch n d"], h: Float[Tensor, "batch 1 1"]) -> Tensor:
        """The states one step later."""


class Attempt(NamedTuple):
    """One trial step: where it leads, the displacement at its end, and an estimate of its error."""

    states: Float[Tensor, "batch n d"]
    last: Float[Tensor, "batch n d"]
    error: Float[Tensor, "batch n d"]


@runtime_checkable
class AdaptiveStepper(Protocol):
    """An embedded pair: the step of order ``order`` with an error estimate, to be kept below ``tol`` in each step."""

    order: ClassVar[int]

    @property
    def tol(self) -> float | None:
        """Largest local error of a token; None: 1e-9 in float64, 1e-5 in float32."""

    @property
    def max_steps(self) -> int:
        """Most trial steps a system may take."""

    def attempt(self, flow: Flow, x: Tensor, h: Float[Tensor, "batch 1 1"], first: Tensor) -> Attempt:
        """One trial step of size h; ``first`` is the displacement h f(x) at its start."""


Stepper = FixedStepper | AdaptiveStepper
