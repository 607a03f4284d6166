"""How much of the nuclear norm of the tokens each half-step keeps: |X + W|_* / |X|_*.

X is the T x d matrix of the states that a half reads, W that of its writes. In a post-norm block the norm that follows
the sum is left out, so that a half that writes nothing keeps 1 exactly, in every model. Source: the retention ratio of
[Additive transport], Section 9.3, there of idealized operators.

How to read it. Above 1 the half adds to the singular values, below 1 it cancels. How it fails. Growing radii raise it,
whatever the shape of the cloud: see the ranks of ``cloud_spectrum``. Cost: two singular value decompositions of T x d
per half, layer and prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.observe.labels import label_attributes
from helmscope.observe.track import AT_LEAST_0, check_system, token_weights, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Instrument, Needs

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

NAMES = {
    "attention_nuclear_retention": "nuclear norm of the tokens after attention over before",
    "mlp_nuclear_retention": "nuclear norm of the tokens after the MLP over before",
}


class HalfStepRetention(Instrument):
    """Instrument: ``attention_nuclear_retention`` and ``mlp_nuclear_retention`` of every layer, over (layer, prompt).

    Tokens of weight 0 do not count. In a flow, whose writes are velocities, the half-step is one of length 1.

    >>> from helmscope import record
    >>> found = record("A", ["Once upon a time"]).replay(HalfStepRetention())["half_step_retention"]
    >>> found.attention_nuclear_retention.dims, bool((found.mlp_nuclear_retention > 0).all())
    (('layer', 'prompt'), True)
    """

    name = "half_step_retention"
    needs = Needs.ATTENTION | Needs.ATTENTION_WRITE | Needs.MLP | Needs.MLP_WRITE

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the retention of an attention half."""
        assert tensors.write is not None
        self.keep(context, {"attention_nuclear_retention": _retention(context, tensors.state, tensors.write)})

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the retention of an MLP half."""
        assert tensors.write is not None
        self.keep(context, {"mlp_nuclear_retention": _retention(context, tensors.state, tensors.write)})

    def result(self) -> xr.Dataset:
        """The retentions of every layer and replicate."""
        measured = with_bounds(super().result(), dict.fromkeys(NAMES, AT_LEAST_0))
        for name in measured.data_vars:
            measured[name].attrs |= label_attributes(NAMES[str(name)])
        return measured


@shows_progress("nuclear norm over half-steps")
def half_step_retention(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """The ratio of the nuclear norm after each half-step to that before, with replicates: ``HalfStepRetention``
    by one replay.

    >>> from helmscope import record
    >>> half_step_retention(record("A", ["Once upon a time"])).mlp_nuclear_retention.shape
    (12, 1)
    """
    instrument = HalfStepRetention()
    return check_system(system).replay(instrument, progress=progress)[instrument.name]


def _retention(
    context: ReplayContext, state: Float[Tensor, "rows n d"], write: Float[Tensor, "rows n d"]
) -> Float[Tensor, " rows"]:
    weights, found = token_weights(state, context.weights), []
    for x, w, m in zip(state.double(), write.double(), weights, strict=True):
        seen = m > 0
        before, after = (torch.linalg.svdvals(each[seen]).sum() for each in (x, x + w))
        if not float(before) > 0:
            raise HelmscopeError(f"layer {context.layer} reads states that are all 0, so that retention is undefined")
        found.append(after / before)
    return torch.stack(found)
