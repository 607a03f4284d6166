"""Other runs of the model of a recording: under further edits, and from other states at a depth on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from helmscope.models.certify import certified_again
from helmscope.models.hooks import locked_unedited
from helmscope.models.keep import Keeper, KeepWeights, KeptTensors
from helmscope.models.put_state import FrozenTokens, PutState, check_states
from helmscope.models.recorder import Recorder
from helmscope.models.sites import AbstractEdit
from helmscope.types import HelmscopeError, pluralized, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.runner import Runner
    from helmscope.types.progress import ProgressOption


def run_again(
    recording: Recording,
    runner: Runner,
    *,
    first: int,
    keep: KeptTensors = KeptTensors.NOTHING,
    progress: ProgressOption = None,
) -> Recording:
    """The recording made with another runner of the same texts, from the depth ``first`` on."""
    recording.certificate.require("trajectory")
    recorder, keeper = Recorder(runner.anatomy, len(runner.batch)), Keeper(keep, runner.anatomy)
    with locked_unedited(runner.model):
        runner.forward(recorder, keeper, progress=progress)
    stream, errors = recorder.recorded()
    stream = stream.since(first)
    certificate = certified_again(recording.certificate, runner, stream, errors, first=first)
    stream.hide(recording.visible)
    return replace(recording, runner=runner, residual=stream, certificate=certificate, first=first, kept=keeper.kept)


def resumed_runner(
    recording: Recording, depth: int, states: Float[Tensor, "batch n d"], frozen: Bool[Tensor, "batch n"] | None
) -> Runner:
    """The runner that puts other directions in at a depth; see ``Recording.resumed_runner``."""
    recording.certificate.require("resume")
    residual, step = recording.residual, recording.step(depth)
    check_states(states, residual.direction[step], frozen, residual.hidden)
    states = residual.with_hidden(step, states)
    radius, mean = residual.radius[step], residual.mean
    earlier = [edit.frozen for edit in recording.edits if isinstance(edit, PutState)]
    held = FrozenTokens(frozen, residual, recording.first) if frozen is not None else (earlier or [None])[-1]
    put = PutState(depth, states, recording.anatomy, held, radius, None if mean is None else mean[step])
    # the state of an earlier resume is overwritten, except where a virtual middle state is put in: MLPs read both
    edits = tuple(edit for edit in recording.edits if put.skip == 0 or not isinstance(edit, PutState))
    return replace(recording.runner, edits=(*edits, put))


def encoder_under(recording: Recording, change: AbstractEdit | Sequence[AbstractEdit] | Recording) -> Recording | None:
    """The recording of the encoder under further edits, or the one that replaces it, checked."""
    encoder = recording.encoder
    if isinstance(change, type(recording)):
        if encoder is None or change.batch is not encoder.batch:
            raise HelmscopeError(
                "encoder is a Recording of another model or of other texts, but it must be made from "
                "recording.encoder by under or resume"
            )
        return change
    edits = (change,) if isinstance(change, AbstractEdit) else change
    if isinstance(edits, str) or not isinstance(edits, Sequence):
        raise HelmscopeError(
            f"encoder is {type_with_article(edits)}, but it must be an edit, a list of edits or a Recording"
        )
    if edits and encoder is None:
        raise HelmscopeError(
            f"encoder holds {pluralized(len(edits), 'edit')}, but {type(recording.anatomy.model).__name__} has no "
            "separate encoder"
        )
    return encoder if not edits or encoder is None else encoder.under(*edits)


def attention_weights(recording: Recording, layer: int, *, cross: bool = False) -> Tensor:
    """The attention or cross-attention weights of a layer, kept or from another run; the rows of padding are 0."""
    kept = recording.kept.get("cross kernel" if cross else "kernel")
    if kept is not None:
        weights = kept[layer]
    else:
        keep = KeepWeights(layer, cross=cross)
        recording.runner.forward(keep)
        weights = torch.cat(keep.weights)
    if recording.visible is None:
        return weights
    queries = recording.visible.to(weights.device)[:, None, :, None]
    return torch.where(queries, weights, torch.zeros((), dtype=weights.dtype, device=weights.device))


def logits_at(recording: Recording, depth: int | None, rows: slice, *, gradients: bool) -> Tensor:
    """The logits of the model, or of its head at a depth; see ``Recording.logits``."""
    recording.certificate.require("lens")
    if depth is None:
        return recording.runner.outputs(rows=rows, gradients=gradients)
    recording.certificate.require("lens over depth")
    state = recording.residual_stream(depth=depth, gradients=gradients)
    put = PutState(recording.anatomy.depths.last, state, recording.anatomy)
    return recording.runner.under(put).outputs(rows=rows, gradients=gradients)
