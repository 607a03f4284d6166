"""Replay of a simulation for instruments, layer by layer: layer k is the mechanism at stored time k.

Both halves of a flow read state k. Under ``Layer()`` a sequential block is evaluated again at state k, and its MLP
reads the state between the halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Attention
from helmscope.fields.block import Block
from helmscope.fields.field import StateSpace
from helmscope.fields.lowrank import as_dense
from helmscope.fields.multihead import MultiHead
from helmscope.fields.norms import LayerNorm
from helmscope.fields.placement import NGPT, PreNorm, SandwichNorm
from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.dense import matrix_product
from helmscope.solve.flow import Flow
from helmscope.solve.layer import Layer
from helmscope.solve.noisy_layer import NoisyLayer
from helmscope.types import (
    AttentionTensors,
    Half,
    Instrument,
    MlpTensors,
    Needs,
    ReplayContext,
    ReplayPlan,
    check_integer,
    check_progress,
)
from helmscope.types.instrument import results, start_instruments

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.fields.field import Field
    from helmscope.solve.simulation import Simulation
    from helmscope.types.dataset import Measurements
    from helmscope.types.progress import ProgressOption

CHUNK = 1 << 24  # entries of a kernel in memory at a time: 128 MiB in float64


@full_precision
def replay(
    simulation: Simulation,
    instruments: Sequence[Instrument],
    *,
    batch_size: int | None = None,
    progress: ProgressOption = None,
) -> Measurements:
    """Replay a simulation for instruments, ``batch_size`` systems at a time; see ``Simulation.replay``.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> replay(integrate(SA(beta=0.0), torch.eye(2), times=[0.0]), [])
    <Measurements: 0: none>
    """
    systems, n = simulation.trajectory.states.shape[1:3]
    coordinates = simulation.times.cpu().numpy()
    identities = simulation.trajectory.identities
    plan = ReplayPlan(simulation.layers, simulation.layer_axis, coordinates, simulation.replicate, systems, identities)
    needs = start_instruments(simulation, instruments, plan)
    size = max(1, CHUNK // n**2) if batch_size is None else check_integer("batch_size", batch_size, at_least=1)
    report = check_progress(progress)
    with torch.no_grad():
        for begin in range(0, systems, size):
            rows = slice(begin, min(begin + size, systems))
            part = select_systems(simulation, rows)
            for layer in simulation.layers if instruments else ():
                _LayerView(part, layer, rows, needs).show_to(instruments)
                share = (simulation.layers.index(layer) + 1) / len(simulation.layers)
                report((begin + share * (rows.stop - begin)) / systems)
    return results(instruments)


def unsupported_reason(simulation: Simulation, instrument: Instrument) -> str | None:
    """Why an instrument cannot be used on this simulation, in one sentence; None if it can.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> from helmscope.types import Instrument
    >>> class Probe(Instrument):
    ...     name, needs = "probe", Needs.FORCE
    >>> unsupported_reason(integrate(SA(beta=0.0), torch.eye(2), times=[0.0]), Probe())
    'system has no MLP: force(layer=0) is None, but probe needs one: that of a Block, or an MLP itself'
    """
    field, name = simulation.field, type(simulation.field).__name__
    attention = attention_of(field)
    if Needs.KERNEL in instrument.needs and attention is None:
        return f"field is {name}, but {instrument.name} needs a kernel, which is defined for attention fields only"
    if Needs.QKV in instrument.needs and not isinstance(attention, Attention | MultiHead):
        return f"field is {name}, but {instrument.name} needs query, key and value: those of SA, MultiHead and the like"
    if Needs.OUTPUT_MATRIX in instrument.needs:
        reason = _output_unsupported(field, instrument.name)
        if reason is not None:
            return reason
    if Needs.FORCE in instrument.needs and simulation.force(layer=0) is None:
        return (
            f"system has no MLP: force(layer=0) is None, but {instrument.name} needs one: that of a Block, or an MLP "
            "itself"
        )
    if Needs.FORCE in instrument.needs and not _reads_unit_vectors(simulation):
        return f"system has an MLP that does not read unit vectors, but {instrument.name} needs one that does"
    return instrument.unsupported_reason(simulation)


def _output_unsupported(field: Field, name: str) -> str | None:
    """Why the heads of a field do not write by matrices to a state with a direction; None if they do."""
    if not isinstance(attention_of(field), Attention | MultiHead):
        return (
            f"field is {type(field).__name__}, but {name} needs heads with values: those of SA, MultiHead and the like"
        )
    if isinstance(field, Block) and isinstance(field.placement, SandwichNorm | NGPT):
        placement = type(field.placement).__name__
        return f"placement is {placement}, but {name} needs heads that write without a norm after them"
    if field.space not in (StateSpace.SPHERE, StateSpace.STREAM):
        return f"field moves {field.space.value}, but {name} needs tokens on a sphere or a residual stream"
    return None


def _is_centered(field: Field) -> bool:
    """Whether directions have mean 0, because the norm before attention removes it."""
    if not isinstance(field, Block) or field.space is not StateSpace.STREAM:
        return False
    return isinstance(field.placement.norm(Half.ATTENTION), LayerNorm)


def _reads_unit_vectors(simulation: Simulation) -> bool:
    """Whether the MLP acts on unit vectors: after a norm, or because the states are unit vectors."""
    field = simulation.field
    if isinstance(field, Block) and isinstance(field.placement, PreNorm):
        return True
    length = torch.linalg.vector_norm(simulation.residual_stream(depth=0).detach(), dim=-1)
    return not bool(((length - 1).abs() > 0.1).any())


def attention_of(field: Field) -> Field | None:
    """The attention of a field: that of a block, or the field itself; None if it has none.

    >>> from helmscope.fields.field import FunctionField
    >>> attention_of(FunctionField(torch.zeros_like)) is None
    True
    """
    if isinstance(field, Block):
        return field.attention
    return field if field.attends else None


def select_systems(simulation: Simulation, rows: slice) -> Simulation:
    """The simulation of some of its systems.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2).expand(5, 2, 2), times=[0.0])
    >>> select_systems(run, slice(1, 3)).trajectory.states.shape
    torch.Size([1, 2, 2, 2])
    """
    path = simulation.trajectory
    if rows == slice(0, path.states.shape[1]):
        return simulation
    selected = replace(
        path,
        states=path.states[:, rows],
        weights=None if path.weights is None else path.weights[:, rows],
        radius=None if path.radius is None else path.radius[:, rows],
        tokens=None,
        identities=None,
        outcome=None,
    )
    raw_states = None if simulation.raw_states is None else simulation.raw_states[:, rows]
    return replace(
        simulation,
        trajectory=selected,
        problem=simulation.problem.part(rows.start, rows.stop),
        event_times=(),
        raw_states=raw_states,
    )


@dataclass(frozen=True, eq=False)
class _LayerView:
    """One layer of some systems, ``rows`` of the whole batch, with what the instruments need of it."""

    simulation: Simulation
    layer: int
    rows: slice
    needs: Needs

    @property
    def step(self) -> float | None:
        """The step size of a layer; None for a flow."""
        stepper = self.simulation.problem.stepper
        return stepper.h if isinstance(stepper, Layer | NoisyLayer) else None

    @property
    def state(self) -> Tensor:
        return self.simulation.residual_stream(depth=self.layer).detach()

    def show_to(self, instruments: Sequence[Instrument]) -> None:
        """Pass both halves, as far as they exist, to the instruments that need them."""
        if self.needs.attention_half and attention_of(self.simulation.field) is not None:
            attention_tensors = self._attention()
            context = self._context(Half.ATTENTION, _number_of_heads(self.simulation.field, attention_tensors))
            for instrument in instruments:
                if instrument.needs.attention_half:
                    instrument.attention(context, attention_tensors)
        if self.needs.mlp_half and self.simulation.force(layer=self.layer) is not None:
            mlp_tensors = self._mlp()
            for instrument in instruments:
                if instrument.needs.mlp_half:
                    instrument.mlp(self._context(Half.MLP), mlp_tensors)

    def _context(self, half: Half, heads: int | None = None) -> ReplayContext:
        weights, time = self.simulation.trajectory.weights, float(self.simulation.times[self.layer])
        now = None if weights is None else weights[self.layer if len(weights) > 1 else 0]
        centered = _is_centered(self.simulation.field)
        visible = self.simulation.visible
        return ReplayContext(self.layer, half, time, self.rows, now, visible, self.step, heads, centered)

    def _attention(self) -> AttentionTensors:
        needs, attention, state = self.needs, attention_of(self.simulation.field), self.state
        kernel = self.simulation.kernel(layer=self.layer) if Needs.KERNEL in needs else None
        query, key, value = self._projections(attention) if Needs.QKV in needs else (None, None, None)
        write = self._write(Half.ATTENTION, state) if Needs.ATTENTION_WRITE in needs else None
        output = self._output(attention) if Needs.OUTPUT_MATRIX in needs else None
        direction = self.simulation.trajectory.states[self.layer]
        return AttentionTensors(state, direction, kernel, query, key, value, write, output)

    def _mlp(self) -> MlpTensors:
        field, state = self.simulation.field, self._read_by_mlp()
        point = force = unfolded = norm = None
        if Needs.FORCE in self.needs:
            force, point = self.simulation.force(layer=self.layer), state
            unfolded = force
            if isinstance(field, Block) and isinstance(field.placement, PreNorm):
                unfolded, norm = field.mlp, field.placement.norm(Half.MLP)
                point = norm.direction(state)
        write = self._write(Half.MLP, state) if Needs.MLP_WRITE in self.needs else None
        return MlpTensors(state, Flow(field).direction(state), force, point, write, unfolded, norm)

    def _read_by_mlp(self) -> Tensor:
        field, state = self.simulation.field, self.state
        if not isinstance(field, Block) or field.parallel or not isinstance(self.simulation.problem.stepper, Layer):
            return state
        return field.placement.normalize_sum(Half.ATTENTION, state + self._write(Half.ATTENTION, state))

    def _write(self, half: Half, state: Tensor) -> Tensor:
        """What a half adds to the state: a velocity, or under ``Layer(h)`` h times the velocity."""
        field, weights = self.simulation.field, self.simulation.problem.weights
        t = float(self.simulation.times[self.layer])
        if isinstance(field, Block):
            write = field.write(half, state, t=t, weights=weights)
        else:
            write = field.ambient(state, t=t, weights=weights)
        return write if self.step is None else self.step * write

    def _output(self, attention: Field | None) -> Tensor:
        """The matrices by which heads write: a multiple of I, since values are V x_j."""
        eye = torch.eye(self.state.shape[-1], dtype=self.state.dtype, device=self.state.device)
        scale = 1.0 if self.step is None else self.step
        if not isinstance(attention, MultiHead):
            return scale * eye
        assert attention.scale is not None
        return (scale * attention.scale * eye).expand(len(attention.heads), *eye.shape)

    def _projections(self, attention: Field | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values: logits are <query, key> plus bias, and the kernel averages the values."""
        assert isinstance(attention, Attention | MultiHead)
        field, x = self.simulation.field, self.state
        x = field.placement.read(Half.ATTENTION, x) if isinstance(field, Block) else x
        request = attention.request(x, None, tangent=False)
        if isinstance(attention, Attention):
            return request.query, request.key, head_values(attention, x)
        return request.query, request.key, torch.stack([head_values(head, x) for head in attention.heads], -3)


def _number_of_heads(field: Field, tensors: AttentionTensors) -> int | None:
    """The number of heads, from a tensor with an axis of heads or from the field; None for a field of a single head."""
    for tensor in (tensors.kernel, tensors.query):
        if tensor is not None:
            return tensor.shape[1] if tensor.ndim == 4 else None
    attention = attention_of(field)
    return len(attention.heads) if isinstance(attention, MultiHead) else None


def head_values(head: Attention, x: Tensor) -> Tensor:
    """V x_j of one head.

    >>> from helmscope.fields.attention import SA
    >>> head_values(SA(beta=1.0, value=2 * torch.eye(2)), torch.ones(1, 2))
    tensor([[2., 2.]])
    """
    if head.value_scale is not None:
        return head.value_scale * x
    return matrix_product(x, as_dense(head.value, x).mT)
