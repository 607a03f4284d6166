"""Replay of a recording: one more forward pass of the model, in chunks of prompts, with all instruments attached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.mlp_capture import MlpCapture
from helmscope.models.output_matrix import output_matrices, output_unsupported
from helmscope.models.recorder import ResidualStream
from helmscope.models.sites import READ_AT, Observer, Site
from helmscope.models.sphere import unfolded, wide
from helmscope.models.topology import Kind
from helmscope.types import (
    AttentionTensors,
    CrossAttentionTensors,
    Half,
    HelmscopeError,
    Instrument,
    MlpTensors,
    Needs,
    ReplayContext,
    ReplayPlan,
)
from helmscope.types.instrument import results, start_instruments

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.tap import Attended, Call
    from helmscope.types.dataset import Measurements
    from helmscope.types.progress import ProgressOption


def replay(recording: Recording, instruments: Sequence[Instrument], progress: ProgressOption = None) -> Measurements:
    """Run the model of a recording once with instruments attached; see ``Recording.replay``."""
    layers = recording.layers
    batch = recording.batch
    plan = ReplayPlan(layers, recording.layer_axis, list(layers), recording.replicate, len(batch), batch.identities)
    needs = start_instruments(recording, instruments, plan)
    if instruments:
        try:
            feed = InstrumentFeed(recording, instruments, needs)
            with feed.capture.attached():
                recording.runner.forward(feed, progress=progress)
        except _InstrumentFailed as failed:
            raise failed.error from None
    return results(instruments)


def unsupported_reason(recording: Recording, instrument: Instrument) -> str | None:
    """One sentence that says why an instrument cannot be used on this recording; None if it can."""
    needs, parts = instrument.needs, ["trajectory"]
    parts += ["kernel"] if needs & (Needs.KERNEL | Needs.QKV) else []
    parts += ["replay"] if needs & (Needs.QKV | Needs.OUTPUT_MATRIX) else []
    parts += ["force"] if Needs.FORCE in needs else []
    parts += ["cross_kernel"] if needs.cross_half and recording.anatomy.has_cross else []
    try:
        for part in parts:
            recording.certificate.require(part)
    except HelmscopeError as error:
        return str(error)
    if Needs.OUTPUT_MATRIX in needs:
        for number in recording.layers:
            reason = output_unsupported(recording.anatomy.layers[number])
            if reason is not None:
                return f"{reason} in layer {number}, but {instrument.name} needs the matrix by which each head writes"
    if Needs.FORCE in needs:
        for number in recording.layers:
            if recording.anatomy.layers[number].mlp_norm is None:
                return (
                    f"system has an MLP without a norm before it in layer {number}, but {instrument.name} needs MLPs "
                    "that read unit vectors"
                )
    return instrument.unsupported_reason(recording)


class _InstrumentFailed(Exception):
    """Wraps an exception of an instrument, so that it is not reported as a failure of the model's forward pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class InstrumentFeed(Observer):
    """Collects the values of each half of a layer, and passes them to the instruments as soon as they are complete.

    The order in which these values arrive differs between families. Tensors that wait for others are copied, since some
    families add to them in place.
    """

    needs_all_layers = True  # attention before a middle state that is put in reads the output of the earlier layers

    def __init__(self, recording: Recording, instruments: Sequence[Instrument], needs: Needs) -> None:
        self.recording, self.instruments, self.needs = recording, instruments, needs
        self.anatomy, self.layers = recording.anatomy, recording.layers
        self.sees_attention = bool(needs & (Needs.KERNEL | Needs.QKV))
        self.feeds_cross = needs.cross_half and self.anatomy.has_cross
        self.sees_cross = self.feeds_cross
        self.sites = frozenset({Site.INPUT})
        self.sites |= {Site.ATTENTION} if needs.attention_half else set()
        self.sites |= {Site.MIDDLE, Site.CROSS} if self.feeds_cross else set()
        # the state that the MLP reads, and in a post-norm block what its norm reads
        self._before_mlp = Site.CROSS_MIDDLE if self.anatomy.has_cross else Site.MIDDLE
        self.sites |= {self._before_mlp, READ_AT[self._before_mlp], Site.MLP} if needs.mlp_half else set()
        needs_force = Needs.FORCE in needs
        self.capture = MlpCapture(*(self.anatomy.layers, recording.forces) if needs_force else ((), ()))
        self._attention: dict[str, Any] = {}
        self._cross: dict[str, Any] = {}
        self._mlp: dict[str, Any] = {}
        self._norm_input: Tensor | None = None  # of the norm before the MLP, in a post-norm block

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Collect a state or a write."""
        if layer not in self.layers:
            return
        kind = self.anatomy.layers[layer].wiring.kind
        if site is Site.INPUT:
            self.capture.begin()
            self._attention, self._cross, self._mlp, self._norm_input = {"state": value.clone()}, {}, {}, None
            if kind is Kind.PARALLEL:
                self._mlp["state"] = self._attention["state"]
        elif site is Site.ATTENTION:
            self._attention["write"] = value.clone()
            self._feed_attention(layer)
        elif site is Site.CROSS:
            self._cross["write"] = value.clone()
            self._feed_cross(layer)
        elif site is READ_AT[self._before_mlp] and kind is Kind.POST_NORM:
            self._norm_input = value.clone()
        elif site is self._before_mlp and kind is not Kind.PARALLEL:
            self._mlp["state"] = value.clone()
        elif site is Site.MIDDLE and self.feeds_cross:
            self._cross["state"] = value.clone()
        elif site is Site.MLP:
            self._feed_mlp(layer, value)

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Collect the inputs and the weights of attention."""
        if layer in self.layers:
            self._attention["kernel"] = wide(result.weights)
            if call is not None and Needs.QKV in self.needs:
                self._attention |= _projections(call)
            self._feed_attention(layer)

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """Collect the inputs and the weights of cross-attention."""
        if layer in self.layers:
            self._cross["kernel"] = wide(result.weights)
            if Needs.CROSS_QKV in self.needs:
                self._cross |= _projections(call)
            self._feed_cross(layer)

    def _feed_attention(self, layer: int) -> None:
        parts = self._attention
        if not self.needs.attention_half or "write" not in parts or (self.sees_attention and "kernel" not in parts):
            return
        state = wide(parts["state"])
        tensors = AttentionTensors(
            state,
            self.direction(state),
            kernel=parts.get("kernel") if Needs.KERNEL in self.needs else None,
            query=parts.get("query"),
            key=parts.get("key"),
            value=parts.get("value"),
            write=wide(parts["write"]) if Needs.ATTENTION_WRITE in self.needs else None,
            output_matrix=self.output_matrices(layer, state) if Needs.OUTPUT_MATRIX in self.needs else None,
        )
        context = self.context(layer, Half.ATTENTION, state)
        for instrument in self.instruments:
            if instrument.needs.attention_half:
                self._call(instrument.attention, context, tensors)

    def output_matrices(self, layer: int, like: Tensor) -> Tensor:
        """The matrices by which the heads of a layer write, in the dtype of ``like``."""
        return output_matrices(self.anatomy.layers[layer]).to(like)

    def _feed_cross(self, layer: int) -> None:
        parts = self._cross
        if not self.feeds_cross or "write" not in parts or "kernel" not in parts:
            return
        state, source = wide(parts["state"]), self.recording.batch.source
        assert source is not None
        tensors = CrossAttentionTensors(
            state,
            self.direction(state),
            wide(self.memory),
            memory_weights=self._mask_rows(source.counted, state),
            memory_visible=self._mask_rows(source.visible, state, boolean=True),
            kernel=parts["kernel"] if Needs.CROSS_KERNEL in self.needs else None,
            query=parts.get("query"),
            key=parts.get("key"),
            value=parts.get("value"),
            write=wide(parts["write"]) if Needs.CROSS_WRITE in self.needs else None,
        )
        context = self.context(layer, Half.CROSS, state)
        for instrument in self.instruments:
            if instrument.needs.cross_half:
                self._call(instrument.cross, context, tensors)

    def _feed_mlp(self, layer: int, write: Tensor) -> None:
        if not self.needs.mlp_half:
            return
        state, needs_force = wide(self._mlp["state"]), Needs.FORCE in self.needs
        own = self.recording.forces[layer] if needs_force else None
        preactivations, value = self.capture.take(layer, own, *state.shape[:2])
        tensors = MlpTensors(
            state,
            self.direction(state),
            self.recording.force(layer=layer) if needs_force else None,
            self._points(layer, self._mlp["state"]) if needs_force else None,
            wide(write) if Needs.MLP_WRITE in self.needs else None,
            unfolded=None if own is None else own.unfolded(),
            norm=None if own is None else own.norm,
            preactivations=preactivations,
            force_value=value,
        )
        context = self.context(layer, Half.MLP, state)
        for instrument in self.instruments:
            if instrument.needs.mlp_half:
                self._call(instrument.mlp, context, tensors)

    def _call(self, method: Callable[[ReplayContext, Any], None], context: ReplayContext, tensors: Any) -> None:
        try:
            method(context, tensors)
        except HelmscopeError:
            raise
        except Exception as error:
            raise _InstrumentFailed(error) from error

    def context(self, layer: int, half: Half, state: Tensor) -> ReplayContext:
        """Where the current chunk is in the replay."""
        depth = self.anatomy.depths.at(layer, self.anatomy.layers[layer].wiring.reads(half))
        batch = self.recording.batch
        counted, visible = self._mask_rows(batch.counted, state), self._mask_rows(batch.visible, state, boolean=True)
        structure = self.anatomy.layers[layer]
        heads = {Half.ATTENTION: structure.heads, Half.CROSS: structure.cross_heads}.get(half)
        return ReplayContext(layer, half, float(depth), self.rows, counted, visible, 1.0, heads, self.anatomy.centered)

    def _mask_rows(self, mask: Tensor | None, like: Tensor, *, boolean: bool = False) -> Tensor | None:
        """The rows of a mask for the current chunk, on the device of ``like``, as bool or in its dtype."""
        if mask is None:
            return None
        return mask[self.rows].to(like.device) if boolean else mask[self.rows].to(like)

    def direction(self, state: Tensor) -> Tensor:
        """The unit vectors of a state, computed as those of the trajectory."""
        radius = torch.empty_like(state[..., 0]).unsqueeze(0)
        mean = torch.empty_like(radius) if self.anatomy.centered else None
        stream = ResidualStream(torch.empty_like(state).unsqueeze(0), radius, mean)
        stream.put(0, slice(None), state)
        return stream.direction[0]

    def _points(self, layer: int, state: Tensor) -> Tensor:
        """The points at which the folded force equals the output of the MLP; see ``Recording.force_points``."""
        structure = self.anatomy.layers[layer]
        norm = structure.mlp_norm
        assert norm is not None  # else `unsupported_reason` returns a sentence
        if structure.wiring.kind is not Kind.POST_NORM:
            normalized = norm.without_affine()(wide(state))
        else:
            assert self._norm_input is not None
            normalized = unfolded(state, norm.without_affine()(wide(self._norm_input)), norm)
        return normalized / math.sqrt(self.anatomy.dim)


def _projections(call: Call) -> dict[str, Tensor]:
    return {name: wide(getattr(call, name)) for name in ("query", "key", "value")}
