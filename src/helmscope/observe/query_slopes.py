"""Derivatives of attention weights by the state of the query, at a few tokens, with keys and values frozen.

    D_y P_ij = sum_c D_(q_c) P_ij  D_y q_c

for the state y of a token i and the coordinates q_c of its queries. In a model the first factor is the derivative of
the family's own attention function (scale, caps, sinks and masks included) at the sampled queries, and the second comes
from ``query_jacobian``. A simulation is differentiated along the axes of R^d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import Attention, softmax_kernel, sum_kernel
from helmscope.fields.block import Block
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.multihead import MultiHead
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry.arithmetic import full_precision
from helmscope.kernels.dense import transformed_logits
from helmscope.models.recording import Recording
from helmscope.models.replay import InstrumentFeed
from helmscope.models.sites import Chunk, Observer
from helmscope.models.tap import eager_of
from helmscope.observe.query_jacobian import query_jacobians
from helmscope.solve.replay import attention_of
from helmscope.types import Half, HelmscopeError, ReplayPlan, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.models.tap import Attended, Call
    from helmscope.solve.simulation import Simulation
    from helmscope.types import Instrument, ReplayContext, System
    from helmscope.types.progress import ProgressOption

AGREEMENT = 1e-4  # of attention weights computed for sampled queries with those of the model
MEMORY = 2**28  # bytes for the derivatives of queries


def slopes_unsupported(system: System, name: str) -> str | None:
    """Why the weights of a system cannot be differentiated by one query, in one sentence; None if they can.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> slopes_unsupported(integrate(SA(beta=0.0), torch.eye(2), times=[0.0]), "mobility_test")
    """
    if isinstance(system, Recording):
        if system.anatomy.tapped:
            return None
        return (
            f"system is a recording of {type(system.anatomy.model).__name__}, whose attention is outside the registry "
            f"of transformers, but {name} needs keys and values that can be frozen"
        )
    attention = attention_of(system.field)  # type: ignore[attr-defined]
    for head in attention.heads if isinstance(attention, MultiHead) else [attention]:
        if isinstance(head, Hardmax | SinkhornAttention):
            return f"field has heads of {type(head).__name__}, but only SA and USA attend to a frozen cloud"
    return None


@full_precision
def simulated_slopes(
    simulation: Simulation, state: Float[Tensor, "rows n d"], chosen: Int[Tensor, "rows tokens"]
) -> Float[Tensor, "rows tokens heads n d"]:
    """D_y P_ij of a simulation at its states, for chosen tokens i.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=1.0), torch.eye(2).double().expand(1, 2, 2), times=[0.0])
    >>> simulated_slopes(run, run.states[0], torch.tensor([[0]])).sum(-2).abs().max() < 1e-15  # weights sum to 1
    tensor(True)
    """
    field, weights = simulation.field, simulation.problem.weights
    attention = attention_of(field)
    assert isinstance(attention, Attention | MultiHead)

    def read(y: Tensor) -> Tensor:
        return field.placement.read(Half.ATTENTION, y) if isinstance(field, Block) else y

    key = attention.request(read(state), weights, tangent=False).key

    def kernel(y: Tensor) -> Tensor:
        request = replace(attention.request(read(y), weights, tangent=False), key=key)
        pairs = transformed_logits(request)
        found: Tensor = (softmax_kernel if attention.normalized else sum_kernel)(pairs, request.weights)
        return found if found.ndim == 4 else found.unsqueeze(1)

    columns = []
    for axis in torch.eye(state.shape[-1], dtype=state.dtype, device=state.device):
        moved = torch.func.jvp(kernel, (state,), (axis.expand_as(state).contiguous(),))[1]
        columns.append(_rows(moved, chosen))
    return torch.stack(columns, -1).transpose(1, 2).double()


class RecordedSlopes(Observer):
    """Observer: D_y P_ij of every layer of a recording at chosen tokens, in a forward pass that also feeds an
    instrument. ``choose(context, state)`` returns the tokens of some prompts (rows, tokens), and which of them count.
    """

    needs_all_layers = True
    sees_attention = True

    def __init__(self, recording: Recording, choose: Callable[[ReplayContext, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.recording, self.choose = recording, choose
        self._group = slice(0, 0)
        self._chosen = torch.empty(0, 0, dtype=torch.long, device="cpu")
        self._jacobians: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}

    def feed(self, instrument: Instrument, progress: ProgressOption) -> None:
        """Run the model, a group of prompts at a time, and pass every layer to the instrument."""
        recording, report = self.recording, check_progress(progress)
        layers, batch = recording.layers, recording.batch
        instrument.start(
            ReplayPlan(layers, recording.layer_axis, list(layers), recording.replicate, len(batch), batch.identities)
        )
        feed = InstrumentFeed(recording, [instrument], instrument.needs)
        first, begin = recording.trajectory.states[0], 0
        while begin < len(batch):
            self._group = slice(begin, min(begin + self._most(instrument), len(batch)))
            feed.chunk = Chunk(rows=self._group, texts=len(batch))
            context = feed.context(layers[0], Half.ATTENTION, first[self._group])
            self._chosen, counts = self.choose(context, first[self._group])
            self._jacobians = query_jacobians(recording, self._group, self._chosen, counts)
            recording.runner.forward(self, feed, rows=self._group, progress=False)
            begin = self._group.stop
            report(begin / len(batch))
        self._jacobians = {}

    def of(self, layer: int) -> Float[Tensor, "rows tokens heads n d"]:
        """The derivatives in a layer, of the current chunk."""
        return self._found.pop(layer)

    def _most(self, instrument: Instrument) -> int:
        """How many prompts the derivatives of all layers fit in memory for, d x d numbers for each token."""
        tokens = getattr(instrument, "sampled_tokens", 1)
        size = 4 * tokens * len(self.recording.layers) * self.recording.anatomy.dim**2
        return max(1, MEMORY // size)

    @full_precision
    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Differentiate the weights of a layer."""
        if layer not in self.recording.layers:
            return
        assert call is not None
        own = slice(self.rows.start - self._group.start, self.rows.stop - self._group.start)
        chosen = self._chosen[own]
        by_query = self._by_query(layer, call, result, chosen)  # (rows, heads, tokens, n, r)
        by_state = self._jacobians[layer][own]  # (rows, heads, tokens, r, d)
        self._found[layer] = (by_query.double() @ by_state.double()).transpose(1, 2)

    def _by_query(self, layer: int, call: Call, result: Attended, chosen: Tensor) -> Tensor:
        """D_q P of the sampled queries, by the attention function of the family."""
        inputs = [call.query, call.key, call.value]
        query, key, value = (part.detach().float() if part.dtype.itemsize < 4 else part.detach() for part in inputs)
        mask, eager = None if call.mask is None else _rows_of_mask(call.mask.detach(), chosen), eager_of(call.module)
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(query)
        # a bias by position has a row for each query, as a mask has
        rest = {
            name: _rows_of_mask(part, chosen) if _is_bias(part, query) else part for name, part in call.rest.items()
        }

        def weights(q: Tensor) -> Tensor:
            found: Tensor = eager(call.module, q, key, value, mask, **rest)[1]
            return found

        few = _rows(query, chosen)
        with torch.no_grad():
            difference = (weights(few) - _rows(result.weights.detach(), chosen)).abs().amax()
        if not float(difference) <= AGREEMENT:
            raise HelmscopeError(
                f"layer {layer} of {type(self.recording.anatomy.model).__name__} computes other attention weights for "
                "some queries alone, but the derivatives with respect to one query need the same ones"
            )
        columns = []
        for axis in torch.eye(few.shape[-1], dtype=few.dtype, device=few.device):
            columns.append(torch.func.jvp(weights, (few,), (axis.expand_as(few).contiguous(),))[1])
        return torch.stack(columns, -1).detach()


def _rows(values: Float[Tensor, "rows heads n k"], chosen: Tensor) -> Float[Tensor, "rows heads tokens k"]:
    """The rows of chosen tokens, of every head."""
    return values.gather(2, chosen[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[-1]))


def _is_bias(part: object, query: Tensor) -> bool:
    """Whether an argument of attention is added to its logits, with a row for each query."""
    return isinstance(part, torch.Tensor) and part.ndim == 4 and part.shape[-2] == query.shape[-2] > 1


def _rows_of_mask(mask: Tensor, chosen: Tensor) -> Tensor:
    """The rows of a mask for chosen queries; a mask that is the same for all of them is left as it is."""
    if mask.shape[-2] == 1:
        return mask
    whole = mask.expand(len(chosen), *mask.shape[1:])
    return _rows(whole, chosen)
