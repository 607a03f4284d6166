"""How a small turn of one token grows over depth while all other tokens keep their recorded states.

The map takes the direction x(a) of a token at the first depth, with its recorded radius, to its direction x(k) at every
later depth, the other tokens frozen. Its derivative T(k), from the tangent space at x(a) to that at x(k), is applied to
tangents w by forward derivatives, and its transpose by a backward pass; the radius is carried along, and only the
directions are compared: with dy the derivative of the state y = r x (+ mean, under LayerNorm),

    T(k) w = P_x dy / r.

A model is differentiated where it was recorded. A simulated flow x' = v(x, t) has w' = (d v_i / d x_i) w, integrated
with its states by RK4 between stored times; layers are differentiated one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

from helmscope.fields.field import StateSpace
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import project, retract
from helmscope.models.recording import Recording
from helmscope.models.sites import Observer, Site
from helmscope.models.tap import locked
from helmscope.solve.fixed import steps_in
from helmscope.solve.layer import Layer
from helmscope.solve.simulation import Simulation
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.types import System

MIN_SUBSTEPS, MAX_SUBSTEPS = 2, 1024  # of RK4 between two stored times
ACCURACY = 1e-7  # relative error of a derivative between two stored times
GRAPH_BYTES = 2**29  # of the values that a backward pass keeps, approximately
KEPT = 40  # vectors of the model's dimension that it keeps per token and layer


class FrozenToken(ABC):
    """One token of each prompt, whose number is in ``tokens``, with the others frozen."""

    tokens: Int[Tensor, " batch"]

    @property
    @abstractmethod
    def start(self) -> Float[Tensor, "batch d"]:
        """The directions of the tokens at the first depth."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """The dimension of the tangent space: d - 1, or d - 2 where norms remove the mean."""

    @abstractmethod
    def images(self, w: Float[Tensor, "batch d"]) -> Float[Tensor, "depth batch d"]:
        """T(k) w at every depth k, in float64."""

    @abstractmethod
    def transposed(self, v: Float[Tensor, "count batch d"]) -> Float[Tensor, "count batch d"] | None:
        """T^T v of several vectors, with T that of the last depth; None if it is not available."""

    def tangents(self, count: int, generator: torch.Generator) -> Float[Tensor, "count batch d"]:
        """Orthonormal random tangents at the first directions, uniformly distributed."""
        x = self.start.cpu()
        noise = torch.randn(count, *x.shape, generator=generator, dtype=torch.float64, device="cpu")
        return orthonormal(self.tangential(noise.to(self.start.device)))

    def tangential(self, v: Float[Tensor, "count batch d"]) -> Float[Tensor, "count batch d"]:
        """The part of vectors that is tangent at the first directions."""
        return project(self.start, v)


@full_precision
def orthonormal(v: Float[Tensor, "count batch d"]) -> Float[Tensor, "count batch d"]:
    """Orthonormal vectors with the same span, for every prompt, by QR.

    >>> orthonormal(torch.tensor([[[3.0, 0.0]], [[1.0, 2.0]]]).double()).abs()
    tensor([[[1., 0.]],
    <BLANKLINE>
            [[0., 1.]]], dtype=torch.float64)
    """
    q: Tensor = torch.linalg.qr(v.permute(1, 2, 0))[0]
    return q.permute(2, 0, 1)


def frozen_token(system: System, tokens: Int[Tensor, " batch"]) -> FrozenToken:
    """The derivatives of one token of every replicate of a system; raises HelmscopeError for a system that is neither a
    Recording nor a Simulation, for a simulation with noise, merging tokens or states off the sphere, for a mixture of
    experts whose kernel has no forward derivative and cannot be replaced, and for a model in half precision on a GPU.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(3).double(), times=[0.0, 1.0])
    >>> frozen_token(run, torch.tensor([0])).images(torch.tensor([[0.0, 1.0, 0.0]]).double()).shape
    torch.Size([2, 1, 3])
    """
    if isinstance(system, Recording):
        model = system.anatomy.model
        if model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16):
            raise HelmscopeError(
                f"system is a model that runs in {str(model.dtype).removeprefix('torch.')} on a GPU, where norms have "
                "no forward derivatives: record it with hs.load(..., dtype=torch.float32)"
            )
        with _differentiable(model):
            return _ModelToken(system, tokens)
    if isinstance(system, Simulation):
        return _SimulatedToken(system, tokens)
    raise HelmscopeError(f"system is {type_with_article(system)}, but it must be a Recording or a Simulation")


def flow_unsupported_reason(system: System) -> str | None:
    """Why the flow of one token of a system cannot be differentiated, in one sentence; None if it can.

    >>> flow_unsupported_reason(None)
    'system is a NoneType, but it must be a Recording or a Simulation'
    """
    try:
        frozen_token(system, torch.zeros(0, dtype=torch.long, device="cpu"))
    except HelmscopeError as error:
        return str(error)
    return None


class _Tangents(Observer):
    """Keeps the derivatives of the directions of one token of each text at every depth."""

    def __init__(self, recording: Recording, tokens: Tensor) -> None:
        self.anatomy, self.first, self.tokens = recording.anatomy, recording.first, tokens
        self.sites = frozenset({*self.anatomy.depths.states, Site.OUTPUT})
        shape = (len(recording.residual.radius), len(tokens), self.anatomy.dim)
        self.found = torch.zeros(shape, dtype=torch.float64, device=tokens.device)

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        depths = self.anatomy.depths
        depth = depths.at(layer, site) - self.first
        if depth < 0 or (site is Site.OUTPUT and layer < len(self.anatomy.layers) - 1):
            return
        state, derivative = forward_mode.unpack_dual(  # type: ignore[no-untyped-call]
            _of_token(value, self.tokens[self.rows])
        )
        if derivative is not None:
            self.found[depth, self.rows] = _of_direction(state, derivative, centered=self.anatomy.centered)


class _LastState(Observer):
    """Keeps the directions of one token of each text at the last depth, with their autograd graph."""

    def __init__(self, recording: Recording, tokens: Tensor) -> None:
        self.anatomy, self.tokens = recording.anatomy, tokens
        self.sites = frozenset({Site.OUTPUT})
        self.directions: list[Tensor] = []

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        if layer == len(self.anatomy.layers) - 1:
            y = _of_token(value, self.tokens[self.rows]).double()
            self.directions.append(retract(y - y.mean(-1, keepdim=True) if self.anatomy.centered else y))


def _of_token(value: Tensor, tokens: Tensor) -> Tensor:
    """The rows (batch, d) of one token of each text."""
    row: Tensor = value.gather(1, tokens.to(value.device).reshape(-1, 1, 1).expand(-1, 1, value.shape[-1])).squeeze(1)
    return row


def _of_direction(y: Tensor, dy: Tensor, *, centered: bool) -> Tensor:
    """The derivative P_x dy / |y| of the direction x of a state y, without its mean if ``centered``; float64."""
    y, dy = y.double(), dy.double()
    if centered:
        y, dy = (value - value.mean(-1, keepdim=True) for value in (y, dy))
    radius = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    turned: Tensor = project(y / radius, dy) / radius
    return turned


@dataclass(frozen=True, eq=False)
class _ModelToken(FrozenToken):
    recording: Recording
    tokens: Int[Tensor, " batch"]

    @property
    def start(self) -> Tensor:
        return retract(_of_token(self.recording.residual.direction[0], self.tokens).double())

    @property
    def dim(self) -> int:
        return self.recording.anatomy.dim - 1 - int(self.recording.anatomy.centered)

    def tangential(self, v: Tensor) -> Tensor:
        centered = v - v.mean(-1, keepdim=True) if self.recording.anatomy.centered else v
        return project(self.start, centered)

    @property
    def _frozen(self) -> Tensor:
        states = self.recording.residual.direction[0]
        frozen = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        return frozen.scatter(1, self.tokens.to(states.device).unsqueeze(-1), False)

    def images(self, w: Tensor) -> Tensor:
        recording, states = self.recording, self.recording.residual.direction[0]
        tangent = torch.zeros_like(states)
        rows = torch.arange(len(states), device=states.device)
        tangent[rows, self.tokens.to(states.device)] = w.to(states)
        observer = _Tangents(recording, self.tokens.to(states.device))
        with _differentiable(recording.anatomy.model), forward_mode.dual_level():
            dual = forward_mode.make_dual(states, tangent)  # type: ignore[no-untyped-call]
            recording.resumed_runner(depth=recording.first, states=dual, frozen=self._frozen).forward(observer)
        return observer.found

    def transposed(self, v: Tensor) -> Tensor:
        recording, found = self.recording, torch.zeros_like(v)
        layers, (batch, tokens, dim) = len(recording.anatomy.layers), recording.residual.direction[0].shape
        at_once = max(1, GRAPH_BYTES // (KEPT * layers * tokens * dim * 4))
        for begin in range(0, batch, at_once):
            rows = slice(begin, min(begin + at_once, batch))
            found[:, rows] = self._transposed(v[:, rows], rows)
        return self.tangential(found)

    def _transposed(self, v: Tensor, rows: slice) -> Tensor:
        states = self.recording.residual.direction[0].clone().requires_grad_()
        runner = self.recording.resumed_runner(depth=self.recording.first, states=states, frozen=self._frozen)
        observer = _LastState(self.recording, self.tokens)
        with _differentiable(self.recording.anatomy.model):
            runner.forward(observer, rows=rows, gradients=True)
            x = torch.cat(observer.directions)
            grads = [torch.autograd.grad((x * each.to(x)).sum(), states, retain_graph=True)[0] for each in v]
        return torch.stack([_of_token(grad[rows], self.tokens[rows]) for grad in grads]).to(v)


@contextmanager
def _differentiable(model: Any) -> Iterator[None]:
    """Context manager: within it, a model computes attention and experts in plain operations, since fused kernels have
    no forward derivatives.
    """
    with locked(model), sdpa_kernel(SDPBackend.MATH), _plain_experts(model):
        yield


@contextmanager
def _plain_experts(model: Any) -> Iterator[None]:
    """Context manager: within it, a mixture of experts is computed expert by expert; raises HelmscopeError where its
    kernel cannot be replaced.
    """
    choose = getattr(model, "set_experts_implementation", None)
    if choose is None:
        yield
        return
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    before = [(config, config._experts_implementation_internal) for config in configs]
    try:
        try:
            choose("eager")
        except RuntimeError as error:
            raise HelmscopeError(
                f"model is {type_with_article(model)} with experts computed by '{model.config._experts_implementation}'"
                ", which has no forward derivative, but the flow of one token needs one: load it with "
                "experts_implementation='eager'"
            ) from error
        yield
    finally:
        for config, name in before:
            config._experts_implementation_internal = name


class _SimulatedToken(FrozenToken):
    def __init__(self, simulation: Simulation, tokens: Tensor) -> None:
        problem = simulation.problem
        if problem.noise is not None or problem.merge is not None or simulation.field.space is StateSpace.FLAT:
            raise HelmscopeError(
                f"system is a simulation of {simulation.title}, but the flow of one token is differentiated only "
                "without noise and merging, for directions on the sphere"
            )
        self.simulation, self.tokens = simulation, tokens
        self._substeps = 2 * MIN_SUBSTEPS

    @property
    def start(self) -> Tensor:
        return retract(_of_token(self.simulation.trajectory.states[0], self.tokens).double())

    @property
    def dim(self) -> int:
        return self.start.shape[-1] - 1

    def transposed(self, v: Tensor) -> None:
        return None

    def images(self, w: Tensor) -> Tensor:
        run = self.simulation
        y = run.residual_stream(depth=0).double()
        dy = self._at_token(w.double() * self._radius(y).unsqueeze(-1), y)
        found, times = [self._direction(y, dy)], run.times.tolist()
        for k in range(1, len(times)):
            dy = self._carry(y, dy, times[k - 1], times[k])
            y = run.residual_stream(depth=k).double()
            found.append(self._direction(y, dy))
        return torch.stack(found)

    def _carry(self, y: Tensor, dy: Tensor, begin: float, end: float) -> Tensor:
        """The derivative at the time ``end`` of the state of the token, whose derivative is dy at ``begin``."""
        stepper: Any = self.simulation.problem.stepper
        if isinstance(stepper, Layer):
            for k in range(steps_in(end - begin, stepper)):
                y, image = self._derivative(y, dy, begin + k * stepper.h, layer=stepper.h)
                dy = self._at_token(_of_token(image, self.tokens), y)
            return dy
        count = max(MIN_SUBSTEPS, self._substeps // 2)  # half of those that the last interval needed
        coarse = self._integrated(y, dy, begin, end, count)
        while count < MAX_SUBSTEPS:
            count *= 2
            fine = self._integrated(y, dy, begin, end, count)
            error = torch.linalg.vector_norm(fine - coarse) / 15  # of a method of order 4
            coarse = fine
            if bool(error <= ACCURACY * torch.linalg.vector_norm(fine)):
                break
        self._substeps = count
        return coarse

    def _integrated(self, y: Tensor, dy: Tensor, begin: float, end: float, count: int) -> Tensor:
        """The derivative at the time ``end``, by ``count`` steps."""
        h = (end - begin) / count
        for k in range(count):
            y, dy = self._rk4(y, dy, begin + k * h, h)
        return dy

    def _rk4(self, y: Tensor, dy: Tensor, t: float, h: float) -> tuple[Tensor, Tensor]:
        """One step of the states and of the derivative of the token."""
        stages = [self._derivative(y, dy, t)]
        for share in (0.5, 0.5, 1.0):
            v, dv = stages[-1]
            stages.append(self._derivative(y + share * h * v, dy + share * h * dv, t + share * h))
        total = [sum(c * stage[part] for c, stage in zip((1, 2, 2, 1), stages, strict=True)) for part in (0, 1)]
        y, dy = y + h / 6 * total[0], dy + h / 6 * total[1]
        if self.simulation.field.space is StateSpace.SPHERE:
            y = retract(y)
            dy = project(y, dy)
        return y, dy

    def _derivative(self, y: Tensor, dy: Tensor, t: float, layer: float | None = None) -> tuple[Tensor, Tensor]:
        """The velocity, or the state after a layer, and its derivative along dy at the token; 0 at the others."""
        field, weights = self.simulation.field, self.simulation.problem.weights

        def value(x: Tensor) -> Tensor:
            if layer is None:
                return field.velocity(x, weights, t=t)
            return field.layer(x, layer, weights, t=t)

        image, derivative = torch.func.jvp(value, (y,), (dy,))[:2]
        return image, self._at_token(_of_token(derivative, self.tokens), y)

    def _at_token(self, w: Tensor, like: Tensor) -> Tensor:
        """Vectors of one token as derivatives of all, 0 at the others."""
        rows = torch.arange(len(like), device=like.device)
        whole = torch.zeros_like(like)
        whole[rows, self.tokens.to(like.device)] = w
        return whole

    def _radius(self, y: Tensor) -> Tensor:
        length = _of_token(self.simulation.field.radius(y).unsqueeze(-1), self.tokens).squeeze(-1)
        return torch.ones_like(length) if self.simulation.field.space is StateSpace.SPHERE else length

    def _direction(self, y: Tensor, dy: Tensor) -> Tensor:
        derivative = torch.func.jvp(self.simulation.field.direction, (y,), (dy,))[1]
        return _of_token(derivative, self.tokens)
