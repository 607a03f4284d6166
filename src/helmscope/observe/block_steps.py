"""The steps of whole blocks on the sphere of directions, one layer after the other.

From depth k to the next layer's input, the state of a token moves from r x to r' x', with unit vectors x and x' and
radii r and r'; its step at the recorded radius is D = (r' x' - r x) / r, so that x' = (x + D) / |x + D|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.fields.field import StateSpace
from helmscope.geometry.sphere import retract
from helmscope.models.recording import Recording
from helmscope.observe.depth_steps import check_finite, sphere_text, token_weights_at
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.solve.layer import Layer
from helmscope.solve.simulation import Simulation
from helmscope.types import HelmscopeError, Trajectory, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import System

AT_REST = 8.0  # rounding units of the stored states: a shorter step is none


@dataclass(frozen=True, eq=False)
class BlockSteps:
    """The steps of the layers of a system: ``layers`` and their ``coordinates``, the path on the sphere, in which
    tokens that do not count have weight 0, and the number of the states before and after each layer.

    >>> import helmscope as hs
    >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(2), times=[0.0, 1.0], stepper=hs.Layer())
    >>> x, step, m = BlockSteps.of(run, include_first_token=True).at(0)
    >>> step[0, 0]  # x' = (3, 1) / sqrt 10
    tensor([-0.0513,  0.3162], dtype=torch.float64)
    """

    path: Trajectory
    layers: tuple[int, ...]
    coordinates: np.ndarray
    states: dict[int, tuple[int, int]]
    sphere: str

    @classmethod
    def of(cls, system: System, *, include_first_token: bool = False) -> BlockSteps:
        """The steps of a system that ``steps_unsupported`` does not refuse. Raises HelmscopeError for states that are
        not
        finite.

        >>> import helmscope as hs
        >>> BlockSteps.of(hs.record("A", ["Once upon a time"])).layers
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
        """
        path = sphere_and_ids(system, None)[0]
        path = check_finite(path if include_first_token else without_first_token(path))
        if isinstance(system, Recording):
            size, first = system.anatomy.depths.steps, system.first
            states = {
                layer: (size * layer - first, size * (layer + 1) - first)
                for layer in system.layers
                if size * layer >= first
            }
            coordinates = np.array(list(states))
        else:
            states = {layer: (layer, layer + 1) for layer in list(system.layers)[:-1]}
            coordinates = path.times[:-1].cpu().numpy()
        return cls(path, tuple(states), coordinates, states, sphere_text(system))

    def at(
        self, layer: int, rows: slice = slice(None)
    ) -> tuple[Float[Tensor, "rows n d"], Float[Tensor, "rows n d"], Float[Tensor, "rows n"]]:
        """The unit vectors before a layer, the steps D and the weights of the tokens, in float64. Tokens that do not
        count have no step, and a step within rounding is 0. Raises HelmscopeError for a radius of 0.
        """
        before, after = self.states[layer]
        m = token_weights_at(self.path, before)[rows]
        counts = (m > 0).unsqueeze(-1)
        axis = torch.zeros_like(self.path.states[before, rows], dtype=torch.float64)
        axis[..., 0] = 1.0
        x, end = (retract(torch.where(counts, self.path.states[k, rows].double(), axis)) for k in (before, after))
        step = end - x
        if self.path.radius is not None:
            start, length = (self.path.radius[k, rows].double() for k in (before, after))
            self._check_radius(start, m, layer, rows)
            growth = torch.where(m > 0, length / torch.where(m > 0, start, 1.0), 1.0).unsqueeze(-1)
            step = growth * end - x
        rest = AT_REST * torch.finfo(self.path.states.dtype).eps
        moves = counts & (torch.linalg.vector_norm(step, dim=-1, keepdim=True) > rest)
        return x, torch.where(moves, step, 0.0), m

    def permuted(self, layer: int, seed: int) -> Float[Tensor, "prompt n d"]:
        """The steps of a layer, permuted at random over the tokens of each prompt that count.

        >>> import helmscope as hs
        >>> run = hs.integrate(hs.SA(beta=0.0), torch.eye(3), times=[0.0, 1.0], stepper=hs.Layer())
        >>> steps = BlockSteps.of(run)
        >>> bool(torch.isclose(steps.permuted(0, 0).sum(), steps.at(0)[1].sum()))
        True
        """
        _, step, m = self.at(layer)
        moved = step.clone()
        for row, weights in enumerate(m.cpu()):
            source = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(layer, row))))
            kept = (weights > 0).nonzero()[:, 0].numpy()
            moved[row, kept] = step[row, source.permutation(kept)]
        return moved

    def _check_radius(self, radius: Tensor, m: Tensor, layer: int, rows: slice) -> None:
        lost = (m > 0) & ~(radius > 0)
        if bool(lost.any()):
            row, token = (int(index) for index in lost.nonzero()[0])
            raise HelmscopeError(
                f"state of {self.path.replicate} {(rows.start or 0) + row} has radius 0 before layer {layer}, token "
                f"{token}, but a direction needs a radius above 0"
            )


def steps_unsupported(system: System) -> str | None:
    """Why a system has no steps of single blocks, in one sentence; None if it has.

    >>> import helmscope as hs
    >>> steps_unsupported(hs.integrate(hs.SA(beta=1.0), torch.eye(2), times=[1.0], stepper=hs.Layer()))
    'system has 1 stored time, but a generator test needs the states before and after a layer'
    """
    if isinstance(system, Recording):
        return None
    if not isinstance(system, Simulation):
        return f"system is {type_with_article(system)}, but a generator test needs a Recording or a Simulation"
    stepper, field = system.problem.stepper, system.field
    if system.problem.noise is not None:
        return "system has noise, but a generator test needs deterministic layers"
    if not isinstance(stepper, Layer):
        return "system is a flow, but a generator test needs single layers: integrate with stepper=Layer()"
    if field.space not in (StateSpace.SPHERE, StateSpace.STREAM):
        return f"field moves {field.space.value}, but a generator test needs tokens on a sphere or a residual stream"
    if len(system.times) < 2:
        return "system has 1 stored time, but a generator test needs the states before and after a layer"
    gaps = system.times.diff()
    if bool(((gaps - stepper.h).abs() > 1e-9 * stepper.h).any()):
        return (
            f"times are {float(gaps.max()):g} apart, but a generator test needs every layer: times {stepper.h:g} apart"
        )
    return None
