"""Surface divergence of the drift of each head at every token, with the cloud frozen.

Keys and values stay fixed and only the token's own query moves with its state y = |y| x. The drift of head h on the
sphere of directions is b_h / |y|, b_h = W_O^h sum_j P_ij v_j, and

    div_S = tr(T D_y b_h) - d_t <x, b_h> / |y|,

with T the projector to the tangent space at x and d_t its dimension [Helmholtz Transformer, no. 3]. Below 0 the head
gathers directions about x, above 0 it spreads them. For SA with Q = K = V = I it is beta tr(T Cov_P) - (d - 1) <x, m>:
the first term is the spreading of sharp attention, the second the pull to the mean.

tr(T D_y b) = E z^T J T W_O z for random signs z in the space of the head, with J = D_y of the head's output: each term
is one vector-Jacobian product by autograd, for all tokens at once, through whatever the family does to its queries
(norms, rotary phases, caps). With at least as many probes as d_head the basis takes the place of the signs, and the
trace is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.fields.attention import Attention, softmax_kernel, sum_kernel
from helmscope.fields.block import Block
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.multihead import MultiHead
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.dense import transformed_logits
from helmscope.models.recording import Recording
from helmscope.models.sites import AbstractEdit, EditContext, Observer, Site
from helmscope.observe.attention_drift import described
from helmscope.observe.head_moments import HEADS_NEED, TangentSpaces, centered_output, with_heads
from helmscope.observe.track import check_system, token_mean, token_weights
from helmscope.runs.bar import shows_progress
from helmscope.solve.replay import attention_of, head_values, select_systems
from helmscope.types import AttentionTensors, Half, HelmscopeError, Instrument, ReplayContext, check_integer

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.tap import Attended, Call
    from helmscope.solve.simulation import Simulation
    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

NAMES = {
    "surface_divergence": "surface divergence of the drift of a head, the cloud frozen (per layer)",
    "total_surface_divergence": "surface divergence of the drift of attention, the cloud frozen (per layer)",
    "token_surface_divergence": "surface divergence of the drift of a head at a token, the cloud frozen (per layer)",
}
PROBES = 4


@shows_progress("measuring divergences")
def attention_surface_divergence(
    system: System,
    *,
    random_signs: int = PROBES,
    seed: int = 0,
    per_token: bool = False,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Surface divergence of the drift of every head, with replicates: means over the tokens of a prompt.

    ``surface_divergence`` is per head; ``total_surface_divergence`` is that of the whole write, biases included. With
    ``per_token`` also ``token_surface_divergence`` of every token (NaN for those that do not count). ``random_signs``
    random signs per head estimate the trace, unbiased; with at least d_head of them it is exact, and always is for a
    simulation. Random signs depend on ``seed``, the layer and the prompt only. The attribute ``extra_forward_passes``
    counts forward passes of the model; each chunk of texts also takes ``random_signs`` backward passes through the
    queries per head.

    Raises HelmscopeError for a system without attention, for heads that write through a norm or are hidden, for
    ``Hardmax`` and ``SinkhornAttention``, whose kernels have no frozen form, and for a family outside the attention
    registry of transformers, whose keys and values cannot be frozen.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(2, dtype=torch.float64).expand(1, 2, 2), times=[0.0])
    >>> attention_surface_divergence(run).surface_divergence.item()  # -(d - 1) <x, m>
    -0.5
    """
    check_system(system)
    instrument = _Divergences(
        check_integer("random_signs", random_signs, at_least=1), check_integer("seed", seed, at_least=0), per_token
    )
    reason = system.unsupported_reason(instrument)
    if reason is not None:
        raise HelmscopeError(reason)
    if isinstance(system, Recording):
        _differentiate_recording(system, instrument, progress)
        return instrument.result().assign_attrs(extra_forward_passes=1, random_signs=random_signs)
    system.replay(instrument, progress=progress)
    return instrument.result().assign_attrs(extra_forward_passes=0, random_signs="exact")


def divergence_unsupported(system: System) -> str | None:
    """One sentence that says why a system does not support ``attention_surface_divergence``; None if it does.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> divergence_unsupported(integrate(SA(beta=0.0), torch.eye(2), times=[0.0]))
    """
    return system.unsupported_reason(_Divergences(PROBES, 0, False))


class _Divergences(Instrument):
    """Keeps the divergences of a chunk; a replay shows it a simulation, and ``_differentiate_recording`` a model."""

    name = "attention_surface_divergence"
    needs = HEADS_NEED

    def __init__(self, random_signs: int, seed: int, per_token: bool) -> None:
        self.random_signs, self.seed, self.per_token = random_signs, seed, per_token
        self.system: System | None = None

    def unsupported_reason(self, system: System) -> str | None:
        """Why a system cannot be differentiated with its cloud frozen."""
        self.system = system
        if isinstance(system, Recording):
            if not system.anatomy.tapped:
                return (
                    f"system is a recording of {type(system.anatomy.model).__name__}, whose attention is outside the "
                    "registry of transformers, but its keys and values must be frozen"
                )
            return None
        attention = attention_of(system.field)  # type: ignore[attr-defined]
        heads = attention.heads if isinstance(attention, MultiHead) else [attention]
        for head in heads:
            if isinstance(head, Hardmax | SinkhornAttention):
                return f"field has heads of {type(head).__name__}, but only SA and USA attend to a frozen cloud"
        return None

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Differentiates the heads of a simulation at one stored time."""
        spaces = TangentSpaces.of(context, tensors)
        frozen = _frozen_heads(select_systems(self.system, context.rows))  # type: ignore[arg-type]
        _, _, output = with_heads(tensors)
        with torch.enable_grad():
            y = tensors.state.detach().requires_grad_(True)
            heads = frozen(y, tensors.state)
            heads = heads if heads.ndim == 4 else heads.unsqueeze(1)
            self.process(context, tensors, spaces, y, heads, output, exact=True)

    @full_precision
    def process(
        self,
        context: ReplayContext,
        tensors: AttentionTensors,
        spaces: TangentSpaces,
        y: Tensor,
        heads: Float[Tensor, "rows heads n s"],
        output: Float[Tensor, "heads d s"],
        *,
        exact: bool = False,
    ) -> None:
        """Keeps the divergences of one layer, from the outputs of its heads as a function of its states y."""
        output = centered_output(output, centered=context.centered).to(heads.dtype)
        count = output.shape[-1] if exact else self.random_signs
        traces = torch.stack(
            [self._trace(context, spaces, y, heads[:, h], output[h], h, count) for h in range(len(output))], 1
        )
        with torch.no_grad():
            written = torch.einsum("bhns,hds->bhnd", heads.detach(), output)
            along = (spaces.x.unsqueeze(1) * written).sum(-1) / spaces.radius.unsqueeze(1)
            divergence = traces - spaces.dim * along
            assert tensors.write is not None
            pull = spaces.dim * (spaces.x * tensors.write).sum(-1) / spaces.radius
            self._keep(context, tensors, divergence, traces.sum(1) - pull)

    def _trace(
        self,
        context: ReplayContext,
        spaces: TangentSpaces,
        y: Tensor,
        head: Float[Tensor, "rows n s"],
        output: Float[Tensor, "d s"],
        number: int,
        count: int,
    ) -> Float[Tensor, "rows n"]:
        """tr(T D_y b) of one head: exact with s probes, the mean over random signs with fewer."""
        s = head.shape[-1]
        total = torch.zeros_like(spaces.radius)
        if not head.requires_grad:
            return total
        for k in range(min(count, s)):
            z = _basis(head, k) if count >= s else self._signs(context, head, number, k)
            (gradient,) = torch.autograd.grad(head, y, z, retain_graph=True, allow_unused=True)
            if gradient is not None:
                total = total + (gradient * spaces.project(_times(z, output))).sum(-1)
        return total if count >= s else total / count

    def _signs(self, context: ReplayContext, head: Tensor, number: int, probe: int) -> Tensor:
        """Random signs that depend on the seed, the layer, the head and the prompt, not on the chunk."""
        rows = []
        for row in range(context.rows.start, context.rows.stop):
            key = (context.layer, number, probe, row)
            source = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)))
            rows.append(2 * source.integers(0, 2, tuple(head.shape[1:])) - 1)
        return torch.from_numpy(np.stack(rows)).to(head)

    def _keep(self, context: ReplayContext, tensors: AttentionTensors, per_head: Tensor, total: Tensor) -> None:
        weights = token_weights(tensors.state, context.weights)
        has_heads = context.heads is not None
        means = token_mean(per_head, weights.unsqueeze(1).expand(per_head.shape))
        self.keep(
            context,
            {"surface_divergence": means if has_heads else means.squeeze(1)},
            axes=("head",) if has_heads else (),
        )
        self.keep(context, {"total_surface_divergence": token_mean(total, weights)})
        if self.per_token:
            each = torch.where(weights.unsqueeze(1) > 0, per_head, torch.nan)
            axes = ("head", "token") if has_heads else ("token",)
            self.keep(context, {"token_surface_divergence": each if has_heads else each.squeeze(1)}, axes=axes)

    def result(self) -> xr.Dataset:
        """The divergences of every head (if there are several), layer and replicate."""
        return described(super().result(), NAMES)


def _basis(head: Tensor, k: int) -> Tensor:
    z = torch.zeros_like(head)
    z[..., k] = 1.0
    return z


@full_precision
def _times(z: Tensor, output: Tensor) -> Tensor:
    return z @ output.mT


def _frozen_heads(simulation: Simulation) -> Callable[[Tensor, Tensor], Tensor]:
    """The outputs of the heads as a function of the states that give the queries and those that give keys and
    values.
    """
    field, weights = simulation.field, simulation.problem.weights
    attention = attention_of(field)
    assert isinstance(attention, Attention | MultiHead)

    def read(y: Tensor) -> Tensor:
        return field.placement.read(Half.ATTENTION, y) if isinstance(field, Block) else y

    @full_precision
    def outputs(moving: Tensor, frozen: Tensor) -> Tensor:
        request = attention.request(read(moving), weights, tangent=False)
        other = attention.request(read(frozen), weights, tangent=False)
        pairs = transformed_logits(replace(request, key=other.key))
        kernel = (softmax_kernel if attention.normalized else sum_kernel)(pairs, request.weights)
        x = read(frozen)
        heads = attention.heads if isinstance(attention, MultiHead) else [attention]
        values = torch.stack([head_values(head, x) for head in heads], -3)
        return kernel @ (values if isinstance(attention, MultiHead) else values.squeeze(-3))

    return outputs


@full_precision
@dataclass(frozen=True, eq=False)
class FrozenCloud(AbstractEdit):
    """Makes the input of every layer a leaf of the graph, and keys and values constants."""

    leaves: dict[int, Tensor] = field(repr=False)

    @property
    def sites(self) -> frozenset[Site]:
        """The input of a layer, its keys and its values."""
        return frozenset({Site.INPUT, Site.KEY, Site.VALUE})

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """A constant, or a copy of the new leaf, since some families add to a state in place."""
        if context.site is not Site.INPUT:
            return value.detach()
        self.leaves.clear()
        self.leaves[context.layer] = value.detach().requires_grad_(True)
        return self.leaves[context.layer].clone()


class _Differentiator(Observer):
    """Passes every layer to the instrument as soon as its write is known."""

    needs_all_layers = True
    sees_attention = True
    sites = frozenset({Site.ATTENTION})

    def __init__(self, recording: Recording, instrument: _Divergences, leaves: dict[int, Tensor]) -> None:
        from helmscope.models.replay import InstrumentFeed

        self.recording, self.instrument, self.leaves = recording, instrument, leaves
        self.feed = InstrumentFeed(recording, [], HEADS_NEED)
        self.heads: Tensor | None = None

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep the outputs of the heads."""
        self.heads = result.output.transpose(1, 2)

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Differentiate the heads of a layer."""
        if layer not in self.recording.layers:
            return
        assert self.heads is not None
        self.feed.chunk = self.chunk
        y = self.leaves[layer]
        state = y.detach()
        tensors = AttentionTensors(state, self.feed.direction(state), write=value.detach())
        context = self.feed.context(layer, Half.ATTENTION, state)
        output = self.feed.output_matrices(layer, state)
        spaces = TangentSpaces.of(context, tensors)
        self.instrument.process(context, tensors, spaces, y, self.heads, output)
        self.heads = None


def _differentiate_recording(recording: Recording, instrument: _Divergences, progress: ProgressOption) -> None:
    from helmscope.types import ReplayPlan

    layers, batch, leaves = recording.layers, recording.batch, dict[int, "Tensor"]()
    instrument.start(
        ReplayPlan(layers, recording.layer_axis, list(layers), recording.replicate, len(batch), batch.identities)
    )
    runner = recording.runner.under(FrozenCloud(leaves))
    runner.forward(_Differentiator(recording, instrument, leaves), gradients=True, progress=progress)
