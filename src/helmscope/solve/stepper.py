"""Base classes of steppers: fixed step size, adaptive step size, and stochastic flows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from helmscope.types import check_integer, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.noise import Noise
    from helmscope.solve.flow import Flow

# The step size of EulerMaruyama where none is chosen: by integrate, phase_diagram and the jobs. Its error is of weak
# order 1. Measured on 8 tokens on S^2 up to t = 2 (USA with beta = 4: t = 1), nu = 0.05 and 0.3, against steps of
# 0.00125 along the same Brownian paths: the mean inner product is off by at most 0.004 under SA with beta 0 and 4, by
# 0.005 under USA with beta = 1 and by 0.008 +- 0.004 with beta = 4; the share of pairs with <x, y> >= 0.9 by 0.001,
# 0.007 and 0.017 +- 0.005. With steps of 0.05 these errors are 2.5 times as large, the last one 0.14: an explicit step
# is unstable there. Hence the step of 0.02, for flows no faster than USA with beta = 4.
NOISY_STEP = 0.02


@dataclass(frozen=True)
class FixedStepper(ABC):
    """A one-step method of step size ``h`` and order ``order``: global error O(h^order).

    If ``divisible`` is False the method is a map rather than a discretization: its step cannot be shortened to reach a
    requested time, so times must be multiples of h. If ``geodesic`` is True it follows great circles, and so needs
    states on the sphere. ``reads_end`` is whether a step evaluates the field at its end.
    """

    h: float
    order: ClassVar[int]
    divisible: ClassVar[bool] = True
    geodesic: ClassVar[bool] = False
    reads_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("h", self.h, above=0)

    @abstractmethod
    def step(self, flow: Flow, x: Tensor, h: Float[Tensor, "batch 1 1"], t: Float[Tensor, "batch 1 1"]) -> Tensor:
        """The states after one step of size h from time t."""


class Attempt(NamedTuple):
    """One trial step: the new states, the displacement there, and an estimate of the error."""

    states: Float[Tensor, "batch n d"]
    last: Float[Tensor, "batch n d"]
    error: Float[Tensor, "batch n d"]


@dataclass(frozen=True)
class AdaptiveStepper(ABC):
    """An embedded pair of order ``order``, with a separate step size for every system of a batch.

    ``tol`` bounds the local error of every token in each step (None: 1e-9 in float64, 1e-5 in float32); ``max_steps``
    the trial steps of one system.
    """

    tol: float | None = None
    max_steps: int = 200_000
    order: ClassVar[int]
    reads_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tol is not None:
            check_real("tol", self.tol, above=0)
        check_integer("max_steps", self.max_steps, at_least=1)

    @abstractmethod
    def attempt(self, flow: Flow, x: Tensor, h: Float[Tensor, "batch 1 1"], t: Tensor, first: Tensor) -> Attempt:
        """One trial step of size h from time t; ``first`` is the displacement h f(x, t) at its start."""


@dataclass(frozen=True)
class NoisyStepper(ABC):
    """A one-step method of step size ``h`` for a stochastic flow.

    ``weak_order`` is the order of the error of expectations, ``strong_order`` that of the mean distance between paths
    driven by the same Brownian motion (0: the method is not driven by it). ``divisible`` and ``reads_end`` as in
    ``FixedStepper``.
    """

    h: float
    weak_order: ClassVar[float]
    strong_order: ClassVar[float]
    divisible: ClassVar[bool] = True
    reads_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("h", self.h, above=0)

    def check(self, noise: Noise) -> None:  # noqa: B027  most methods simulate every noise
        """Raise ``HelmscopeError`` if this method does not simulate the noise."""

    @abstractmethod
    def step(self, flow: Flow, noise: Noise, x: Tensor, h: Tensor, t: Tensor, dw: Tensor) -> Tensor:
        """The states after one step; ``dw`` (batch, n, k) holds the Brownian increments over h, N(0, h)."""


Stepper = FixedStepper | AdaptiveStepper | NoisyStepper
