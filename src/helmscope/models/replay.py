"""A recording shown to instruments: one more forward of the model, in chunks of prompts, with all of them attached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.recorder import ResidualStream
from helmscope.models.sphere import unfolded, wide
from helmscope.models.topology import Kind
from helmscope.models.watch import READ_AT, Observer, Site
from helmscope.types import (
    AttentionPass,
    CrossPass,
    Half,
    HelmscopeError,
    Instrument,
    MlpPass,
    Moment,
    Needs,
    Progress,
    ReplayPlan,
)
from helmscope.types.instrument import results, start_instruments

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.tap import Attended, Call


def replay(
    recording: Recording, instruments: Sequence[Instrument], progress: Progress | None = None
) -> dict[str, xr.Dataset]:
    """Show a recording to instruments by one forward of its model; see ``Recording.replay``."""
    layers = recording.layers
    plan = ReplayPlan(layers, recording.layer_axis, list(layers), recording.replicate, len(recording.batch))
    needs = start_instruments(recording, instruments, plan)
    if instruments:
        try:
            recording.runner.forward(_Showing(recording, instruments, needs), progress=progress)
        except _InstrumentFailed as failed:
            raise failed.error from None
    return results(instruments)


def refusal(recording: Recording, instrument: Instrument) -> str | None:
    """Why an instrument cannot be used on this recording: what its certificate says; None where it can."""
    needs, parts = instrument.needs, ["trajectory"]
    parts += ["kernel"] if needs & (Needs.KERNEL | Needs.QKV) else []
    parts += ["replay"] if Needs.QKV in needs else []
    parts += ["force"] if Needs.FORCE in needs else []
    parts += ["cross_kernel"] if needs.cross_half and recording.anatomy.has_cross else []
    try:
        for part in parts:
            recording.certificate.require(part)
    except HelmscopeError as error:
        return str(error)
    if Needs.FORCE in needs:
        for number in recording.layers:
            if recording.anatomy.layers[number].mlp_norm is None:
                return (
                    f"system has in layer {number} an MLP without a norm before it, but {instrument.name} needs one "
                    "that reads unit vectors"
                )
    return instrument.refusal(recording)


class _InstrumentFailed(Exception):
    """Carries an exception of an instrument through the model's forward, which would be blamed for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Showing(Observer):
    """Gathers what passes through each half of a layer, and shows it to the instruments as soon as it is complete.

    The order in which the parts of a half arrive differs between families. Tensors that have to wait for another part
    are copied: some families add to them in place.
    """

    needs_all_layers = True  # the attention before a mid state that was put in reads the layers before it

    def __init__(self, recording: Recording, instruments: Sequence[Instrument], needs: Needs) -> None:
        self.recording, self.instruments, self.needs = recording, instruments, needs
        self.anatomy, self.layers = recording.anatomy, recording.layers
        self.sees_attention = bool(needs & (Needs.KERNEL | Needs.QKV))
        self.crosses = needs.cross_half and self.anatomy.has_cross
        self.sees_cross = self.crosses
        self.sites = frozenset({Site.INPUT})
        self.sites |= {Site.ATTENTION} if needs.attention_half else set()
        self.sites |= {Site.MIDDLE, Site.CROSS} if self.crosses else set()
        # the state that the MLP reads, and in a post-norm block what its norm reads
        self._before_mlp = Site.CROSS_MIDDLE if self.anatomy.has_cross else Site.MIDDLE
        self.sites |= {self._before_mlp, READ_AT[self._before_mlp], Site.MLP} if needs.mlp_half else set()
        self._attention: dict[str, Any] = {}
        self._cross: dict[str, Any] = {}
        self._mlp: dict[str, Any] = {}
        self._read: Tensor | None = None

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Take in a state or a write."""
        if layer not in self.layers:
            return
        kind = self.anatomy.layers[layer].wiring.kind
        if site is Site.INPUT:
            self._attention, self._cross, self._mlp, self._read = {"state": value.clone()}, {}, {}, None
            if kind is Kind.PARALLEL:
                self._mlp["state"] = self._attention["state"]
        elif site is Site.ATTENTION:
            self._attention["write"] = value.clone()
            self._show_attention(layer)
        elif site is Site.CROSS:
            self._cross["write"] = value.clone()
            self._show_cross(layer)
        elif site is READ_AT[self._before_mlp] and kind is Kind.POST_NORM:
            self._read = value.clone()
        elif site is self._before_mlp and kind is not Kind.PARALLEL:
            self._mlp["state"] = value.clone()
        elif site is Site.MIDDLE and self.crosses:
            self._cross["state"] = value.clone()
        elif site is Site.MLP:
            self._show_mlp(layer, value)

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Take in what attention computed from and its weights."""
        if layer in self.layers:
            self._attention["kernel"] = wide(result.weights)
            if call is not None and Needs.QKV in self.needs:
                self._attention |= _projections(call)
            self._show_attention(layer)

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """The same of cross-attention."""
        if layer in self.layers:
            self._cross["kernel"] = wide(result.weights)
            if Needs.CROSS_QKV in self.needs:
                self._cross |= _projections(call)
            self._show_cross(layer)

    def _show_attention(self, layer: int) -> None:
        parts = self._attention
        if not self.needs.attention_half or "write" not in parts or (self.sees_attention and "kernel" not in parts):
            return
        state = wide(parts["state"])
        passed = AttentionPass(
            state,
            self._direction(state),
            kernel=parts.get("kernel") if Needs.KERNEL in self.needs else None,
            query=parts.get("query"),
            key=parts.get("key"),
            value=parts.get("value"),
            write=wide(parts["write"]) if Needs.ATTENTION_WRITE in self.needs else None,
        )
        moment = self._moment(layer, Half.ATTENTION, state)
        for each in self.instruments:
            if each.needs.attention_half:
                self._tell(each.attention, moment, passed)

    def _show_cross(self, layer: int) -> None:
        parts = self._cross
        if not self.crosses or "write" not in parts or "kernel" not in parts:
            return
        state, source = wide(parts["state"]), self.recording.batch.source
        assert source is not None
        passed = CrossPass(
            state,
            self._direction(state),
            wide(self.memory),
            memory_weights=self._of_rows(source.counted, state),
            memory_visible=self._of_rows(source.visible, state, boolean=True),
            kernel=parts["kernel"] if Needs.CROSS_KERNEL in self.needs else None,
            query=parts.get("query"),
            key=parts.get("key"),
            value=parts.get("value"),
            write=wide(parts["write"]) if Needs.CROSS_WRITE in self.needs else None,
        )
        moment = self._moment(layer, Half.CROSS, state)
        for each in self.instruments:
            if each.needs.cross_half:
                self._tell(each.cross, moment, passed)

    def _show_mlp(self, layer: int, write: Tensor) -> None:
        if not self.needs.mlp_half:
            return
        state, forced = wide(self._mlp["state"]), Needs.FORCE in self.needs
        passed = MlpPass(
            state,
            self._direction(state),
            self.recording.force(layer=layer) if forced else None,
            self._point(layer, self._mlp["state"]) if forced else None,
            wide(write) if Needs.MLP_WRITE in self.needs else None,
        )
        moment = self._moment(layer, Half.MLP, state)
        for each in self.instruments:
            if each.needs.mlp_half:
                self._tell(each.mlp, moment, passed)

    def _tell(self, method: Callable[[Moment, Any], None], moment: Moment, passed: Any) -> None:
        try:
            method(moment, passed)
        except HelmscopeError:
            raise
        except Exception as error:
            raise _InstrumentFailed(error) from error

    def _moment(self, layer: int, half: Half, state: Tensor) -> Moment:
        depth = self.anatomy.depths.at(layer, self.anatomy.layers[layer].wiring.reads(half))
        batch = self.recording.batch
        counted, visible = self._of_rows(batch.counted, state), self._of_rows(batch.visible, state, boolean=True)
        return Moment(layer, half, float(depth), self.rows, counted, visible, step=1.0)

    def _of_rows(self, mask: Tensor | None, like: Tensor, *, boolean: bool = False) -> Tensor | None:
        """A mask for the texts under way, where the state is, as numbers of its dtype or as it is."""
        if mask is None:
            return None
        return mask[self.rows].to(like.device) if boolean else mask[self.rows].to(like)

    def _direction(self, state: Tensor) -> Tensor:
        """The unit vectors of a state, as the trajectory has them."""
        radius = torch.empty_like(state[..., 0]).unsqueeze(0)
        mean = torch.empty_like(radius) if self.anatomy.centered else None
        room = ResidualStream(torch.empty_like(state).unsqueeze(0), radius, mean)
        room.put(0, slice(None), state)
        return room.direction[0]

    def _point(self, layer: int, state: Tensor) -> Tensor:
        """Where the folded force gives what the MLP gave, as ``Recording.points`` has it."""
        own = self.anatomy.layers[layer]
        norm = own.mlp_norm
        assert norm is not None  # or the instrument was refused
        if own.wiring.kind is not Kind.POST_NORM:
            core = norm.core()(wide(state))
        else:
            assert self._read is not None
            core = unfolded(state, norm.core()(wide(self._read)), norm)
        return core / math.sqrt(self.anatomy.dim)


def _projections(call: Call) -> dict[str, Tensor]:
    return {name: wide(getattr(call, name)) for name in ("query", "key", "value")}
