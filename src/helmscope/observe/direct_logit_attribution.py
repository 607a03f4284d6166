"""Direct logit attribution: how much each head and each half-step adds to the logit of the next token, and how large
its write is.

The logits are W x + c at the direction x = y / |y| of the last state y (the gain of the final norm folded into W), and
y is the embedding plus everything that is written. At the fixed scale |y| the logit is a sum over all writes w,

    attribution(w)  =  <W_next - mean over the vocabulary of W, w> / |y|,

of the next token relative to the mean logit, which no softmax sees. The sum over embedding, attention and MLP writes is
exactly the logit of the model minus its mean, with what c adds and up to the epsilon of the norm; the sum over heads is
that of the attention write but for its bias.

    head_squared_length_share     sum_t |w_h|^2 / sum_t sum_g |w_g|^2 over the heads g of a layer
    head_relative_length  mean_t |w_h| / |x|, x the state that attention reads

How to read it. The direct path alone: what a write does through later blocks is not in it, and a head that later heads
read may have an attribution of 0. How it fails. Scales are those of the whole model: an attribution is no damage of an
ablation. Post-norm models, whose states are rescaled at every depth, and unembeddings that scale or cap logits are
refused.
Cost: one replay and two rows of the head for each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.models.head import head_on_directions
from helmscope.models.recording import Recording, check_recording
from helmscope.observe.kernel import check_kernel
from helmscope.observe.labels import label_attributes
from helmscope.observe.scoring import Scoring, scoring_unsupported
from helmscope.observe.track import token_mean, token_weights
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Instrument, Needs, check_replicates

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext
    from helmscope.types.progress import ProgressOption

NAMES = {
    "head_attribution": "contribution of a head to the logit of the next token",
    "attention_attribution": "contribution of attention to the logit of the next token",
    "mlp_attribution": "contribution of the MLP to the logit of the next token",
    "embedding_attribution": "contribution of the embedding to the logit of the next token",
    "bias_attribution": "contribution of the biases of unembedding and final norm to the logit of the next token",
    "centered_next_token_logit": "logit of the next token minus the mean logit",
    "head_squared_length_share": "share of a head in the squared norm of the writes of its layer's heads",
    "head_relative_length": "length of a head's write over that of the state",
}
SIGNED = tuple(NAMES)[:6]


@shows_progress("direct logit attribution")
def direct_logit_attribution(recording: Recording, *, progress: ProgressOption = None) -> xr.Dataset:
    """``head_attribution`` (layer, prompt, head), ``attention_attribution`` and ``mlp_attribution`` (layer, prompt),
    ``embedding_attribution``, ``bias_attribution`` and ``centered_next_token_logit`` (prompt), means over the scored
    tokens of a prompt; and ``head_squared_length_share`` and ``head_relative_length`` (layer, prompt, head). Nulls of
    attributions are 0.

    Raises HelmscopeError where ``next_token_loss`` does, for a model without a linear head after a norm, for post-norm
    models, and where attention weights, values or output matrices cannot be read.

    >>> from helmscope import record
    >>> found = direct_logit_attribution(record("A", ["Once upon a time there was a cat", "The dog ran home"]))
    >>> writes = (found.attention_attribution + found.mlp_attribution).sum("layer")
    >>> parts = writes + found.embedding_attribution + found.bias_attribution
    >>> bool((abs(parts - found.centered_next_token_logit) < 1e-5).all())
    True
    """
    refused = attribution_unsupported(recording)
    if refused is not None:
        raise HelmscopeError(refused)
    folded = head_on_directions(recording)
    assert folded is not None  # as attribution_unsupported says
    weights, offset = folded
    readers, counted, offsets = _readers(recording, weights, offset)
    instrument = _Attribution(recording, readers, counted)
    recording.replay(instrument, progress=progress)
    measured = instrument.result()
    first = _without_mean(recording.residual_stream(depth=0).double(), recording)
    last = _without_mean(recording.residual_stream(depth=recording.anatomy.depths.last).double(), recording)
    embedding, state = (token_mean((readers * each).sum(-1), counted).cpu().numpy() for each in (first, last))
    bias = token_mean(offsets, counted).cpu().numpy()
    measured["embedding_attribution"] = ("prompt", embedding)
    measured["bias_attribution"] = ("prompt", bias)
    measured["centered_next_token_logit"] = ("prompt", state + bias)
    for name in NAMES:
        measured[name].attrs |= label_attributes(NAMES[name])
        if name in SIGNED:
            measured[f"{name}_null"] = 0.0
        else:
            measured[name].attrs["valid_min"] = 0.0
    attributes = {"title": "direct logit attribution", "model": recording.origin.title}
    return check_replicates(measured.assign_attrs(attributes))


def attribution_unsupported(recording: object) -> str | None:
    """Why a system has no direct logit attribution, in one sentence; None if it has one.

    >>> attribution_unsupported(None)
    'recording is a NoneType, but it must be a Recording'
    """
    reason = scoring_unsupported(recording)
    if reason is not None:
        return reason
    assert isinstance(recording, Recording)
    if head_on_directions(check_recording(recording)) is None:
        return (
            "recording is of a model whose logits are no linear map of the direction of its last state: it is "
            "post-norm, or its head is not linear, or scales or caps logits"
        )
    return recording.unsupported_reason(_Needed())


def _readers(
    recording: Recording, weight: Float[Tensor, "vocabulary d"], offset: Float[Tensor, " vocabulary"]
) -> tuple[Float[Tensor, "batch n d"], Float[Tensor, "batch n"], Float[Tensor, "batch n"]]:
    """The vectors <., w> by which each token's state adds to the logit of the next one, at the token that predicts it,
    the weights of these tokens, and what the bias of the head adds.
    """
    scoring = Scoring(recording)
    ids, counted = scoring.ids.roll(-scoring.shift, -1), scoring.weights.roll(-scoring.shift, -1).clone()
    if scoring.shift:
        counted[:, -scoring.shift :] = 0
    weight, ids, counted = weight.double(), ids.to(weight.device), counted.to(weight.device, torch.float64)
    ids = torch.where(counted > 0, ids, 0)
    radius = recording.residual.radius[-1].double()
    readers = (weight[ids] - weight.mean(0)) / torch.where(radius > 0, radius, 1.0).unsqueeze(-1)
    return readers, counted, offset.double()[ids] - offset.double().mean()


def _without_mean(states: Tensor, recording: Recording) -> Tensor:
    return states - states.mean(-1, keepdim=True) if recording.anatomy.centered else states


class _Needed(Instrument):
    """What the attribution of heads needs."""

    name = "direct_logit_attribution"
    needs = Needs.KERNEL | Needs.QKV | Needs.OUTPUT_MATRIX | Needs.ATTENTION_WRITE | Needs.MLP_WRITE


class _Attribution(_Needed):
    """Keeps the attributions of a layer, with the vectors ``readers`` and the weights of their tokens."""

    def __init__(
        self, recording: Recording, readers: Float[Tensor, "batch n d"], counted: Float[Tensor, "batch n"]
    ) -> None:
        self.recording, self.readers, self.counted = recording, readers, counted

    @full_precision
    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the attributions and sizes of an attention half."""
        value, readers, counted = tensors.head_values, self.readers[context.rows], self.counted[context.rows]
        assert value is not None
        assert tensors.output_matrix is not None
        output = _centered_columns(tensors.output_matrix.double(), self.recording)
        retrieved = check_kernel(tensors.kernel).double() @ value.double()
        read = torch.einsum("bnd,hds,bhns->bhn", readers, output, retrieved)
        length = torch.linalg.vector_norm(torch.einsum("hrs,bhns->bhnr", torch.linalg.qr(output).R, retrieved), dim=-1)
        weights = token_weights(tensors.state, context.weights).to(length).unsqueeze(1).expand(length.shape)
        square = torch.where(weights > 0, length.square() * weights, 0.0).sum(-1)
        state = _without_mean(tensors.state.double(), self.recording)
        size = torch.linalg.vector_norm(state, dim=-1).unsqueeze(1)
        whole = square.sum(1, keepdim=True)
        found = {
            "head_attribution": token_mean(read, counted.unsqueeze(1).expand(read.shape)),
            "head_squared_length_share": square / torch.where(whole > 0, whole, torch.nan),
            "head_relative_length": token_mean(length / torch.where(size > 0, size, 1.0), weights),
        }
        self.keep(context, found, axes=("head",))
        self.keep(context, {"attention_attribution": self._write(context, tensors.write)})

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the attribution of an MLP half."""
        self.keep(context, {"mlp_attribution": self._write(context, tensors.write)})

    def _write(self, context: ReplayContext, write: Tensor | None) -> Float[Tensor, " rows"]:
        assert write is not None
        write = _without_mean(write.double(), self.recording)
        return token_mean((self.readers[context.rows] * write).sum(-1), self.counted[context.rows])


def _centered_columns(output: Float[Tensor, "heads d s"], recording: Recording) -> Float[Tensor, "heads d s"]:
    """The output matrices without what writes the mean over coordinates, which norms remove."""
    return output - output.mean(-2, keepdim=True) if recording.anatomy.centered else output
