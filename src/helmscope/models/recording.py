"""A transformer on some texts as a ``System``: what its tokens did, the mechanism that did it, and a certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.certificate import Line
from helmscope.models.certify import finite_line, residual_line
from helmscope.models.hooks import held_unwatched
from helmscope.models.keep import Keep, Keeper, KeepState, KeepWeights
from helmscope.models.names import layer_number
from helmscope.models.place import FrozenTokens, PutState, check_states
from helmscope.models.recorder import Recorder
from helmscope.models.recording_summary import recording_html, recording_manifest, recording_repr
from helmscope.models.replay import refusal, replay
from helmscope.models.sphere import on_sphere
from helmscope.models.topology import Kind
from helmscope.models.watch import Site
from helmscope.types import Half, HelmscopeError, Plottable, Trajectory, counted

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.certificate import Certificate
    from helmscope.models.experts import ForceAfterNorm
    from helmscope.models.load import Origin
    from helmscope.models.recorder import ResidualStream
    from helmscope.models.runner import Runner
    from helmscope.models.texts import Batch
    from helmscope.models.watch import AbstractEdit
    from helmscope.store.manifest import Manifest
    from helmscope.types import Instrument, Progress


@dataclass(frozen=True, eq=False, repr=False)
class Recording(Plottable):
    """A model on some texts. ``trajectory`` holds the residual stream over depth in half-layers: 0 is the first block's
    input, 2 l + 1 the state of layer l between attention and MLP (virtual in a parallel block), 2 l + 2 its output.

    The recording of an encoder-decoder model is that of its decoder, whose layers have three sub-steps: depth 3 l + 1
    is behind attention, 3 l + 2 behind cross-attention, 3 l + 3 behind the MLP. ``encoder`` is the recording of its
    encoder, whose last states the cross-attention reads; None for other models.

    ``first`` is the depth at which the trajectory begins, 0 but for a resumed one; ``edits`` are those under which the
    model was run. All that needs the model again runs it again under them, by ``runner``. ``tokenizer`` is None where
    none was given or came with the model.

    What a recording holds has no gradients. ``logits`` and ``stream`` give them when asked, by running the model again:
    with ``gradients=True`` they flow to the model's parameters, to the tensors that edits use and to the ``states`` of
    ``resume``.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.models.record import record
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> recording
    <Recording of gpt2: sequential pre-norm; 2 layers, width 8; 1 text x 4 tokens (73e200e2b048); certificate ok>
    >>> recording.resume(depth=2, states=recording.trajectory.states[2]).trajectory.times
    tensor([2., 3., 4.], dtype=torch.float64)
    >>> recording.kernel(layer=0).shape
    torch.Size([1, 2, 4, 4])
    """

    runner: Runner
    residual: ResidualStream
    certificate: Certificate
    origin: Origin
    forces: tuple[ForceAfterNorm | None, ...]
    first: int = 0
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    tokenizer: Any = None
    encoder: Recording | None = None

    def __repr__(self) -> str:
        return recording_repr(self)

    def _repr_html_(self) -> str:
        return recording_html(self)

    @property
    def anatomy(self) -> Anatomy:
        """The model, and what was found in it."""
        return self.runner.anatomy

    @property
    def batch(self) -> Batch:
        """The texts as the model reads them."""
        return self.runner.batch

    @property
    def edits(self) -> tuple[AbstractEdit, ...]:
        """The edits under which the model was run, in their order."""
        return self.runner.edits

    @property
    def trajectory(self) -> Trajectory:
        """What the tokens did: directions, the radius that was divided out, the weights by which tokens count (0 for
        padding and special tokens).
        """
        self.certificate.require("trajectory")
        stream, counted = self.residual, self.batch.counted
        times = torch.arange(self.first, self.first + len(stream.radius), dtype=torch.float64, device="cpu")
        weights = None if counted is None else counted.to(stream.radius).unsqueeze(0)
        path = Trajectory(times, stream.direction, weights, stream.radius, self.batch.tokens)
        return replace(path, axis=self.axis, replicate=self.replicate)

    @property
    def axis(self) -> str:
        """The axis of the states: depth, in half-layers."""
        return "depth"

    @property
    def layer_axis(self) -> str:
        """The axis of the mechanisms."""
        return "layer"

    @property
    def replicate(self) -> str:
        """The axis of the replicates: the texts."""
        return "prompt"

    @cached_property
    def on_sphere(self) -> Trajectory:
        """The trajectory with gain and bias folded out of every state that a norm gave, which is the sphere of the
        theory; radii are those of the states without gain and bias.

        It differs from ``trajectory`` in a post-norm model only, which is run once more for it.
        """
        path = self.trajectory
        if not self.anatomy.post_norm:
            return path
        self.certificate.require("on_sphere")
        plain = on_sphere(self)
        return replace(path, states=plain.direction, radius=plain.radius)

    @property
    def layers(self) -> range:
        """The layers whose mechanism can be asked for: all, or in a resumed recording those from where it begins."""
        count = len(self.anatomy.layers)
        return range(self.anatomy.depths.layer(self.first), count)

    def layer(self, name: str | int) -> int:
        """The number of a layer, from the name of its block in the model, such as "transformer.h.3", or from itself."""
        return self._layer(layer_number(self.anatomy, name))

    @property
    def visible(self) -> Bool[Tensor, "batch n"] | None:
        """The tokens that attention sees, special ones included; None where it sees all."""
        return self.batch.visible

    def _layer(self, layer: object) -> int:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer not in self.layers:
            first, last = self.layers[0], self.layers[-1]
            raise HelmscopeError(f"layer is {layer!r}, but this recording has layers {first} to {last}")
        return layer

    def _step(self, depth: int) -> int:
        """The time index of a depth."""
        last = self.first + len(self.residual.radius) - 1
        if isinstance(depth, bool) or not isinstance(depth, int) or not self.first <= depth <= last:
            raise HelmscopeError(f"depth is {depth!r}, but this recording has depths {self.first} to {last}")
        return depth - self.first

    def stream(self, *, depth: int, gradients: bool = False) -> Float[Tensor, "batch n d"]:
        """The residual stream at a depth as it is; with ``gradients`` by another run of the model, differentiably."""
        self.certificate.require("trajectory")
        step = self._step(depth)
        if not gradients:
            return self.residual.at(step)
        keep = KeepState(depth, self.anatomy.depths)
        self.runner.forward(keep, gradients=True)
        return torch.cat(keep.states)

    def kernel(self, *, layer: int) -> Float[Tensor, "batch heads n n"]:
        """The attention weights of a layer, kept ones or by another run of the model."""
        self.certificate.require("kernel")
        layer = self._layer(layer)
        if "weights" in self.kept:
            return self.kept["weights"][layer]
        keep = KeepWeights(layer)
        self.runner.forward(keep)
        return torch.cat(keep.weights)

    def cross_kernel(self, *, layer: int) -> Float[Tensor, "batch heads n m"]:
        """The weights of cross-attention in a layer of a decoder: row i holds those of the encoder's m tokens that
        token i attends to. Kept ones or by another run of the model.
        """
        if self.encoder is None:
            raise HelmscopeError(
                f"cross_kernel is of a decoder that reads an encoder, but {type(self.anatomy.model).__name__} is none"
            )
        self.certificate.require("cross_kernel")
        layer = self._layer(layer)
        if "cross weights" in self.kept:
            return self.kept["cross weights"][layer]
        keep = KeepWeights(layer, cross=True)
        self.runner.forward(keep)
        return torch.cat(keep.weights)

    def force(self, *, layer: int) -> Any:
        """The MLP of a layer as a field on unit vectors with gain and bias of its norm folded in, times the residual
        multiplier. A norm behind the MLP (sandwich) is not part of it.

        What the module computes is its value at ``points``, whatever an edit does to what it writes.
        """
        self.certificate.require("force")
        force = self.forces[self._layer(layer)]
        assert force is not None  # or the certificate would not let us through
        return force.folded()

    def points(self, *, layer: int) -> Float[Tensor, "batch n d"]:
        """Where ``force`` of the same layer is to be evaluated to give what the MLP gave: core(z) / sqrt(d), with z
        what its norm reads.

        That is the direction of the state that the MLP reads, but for the norm's epsilon; in a post-norm model the
        direction before gain and bias; in a model without a norm before the MLP the state itself, radius and all.
        """
        self.certificate.require("force")
        own = self.anatomy.layers[self._layer(layer)]
        kind, norm = own.wiring.kind, own.mlp_norm
        depth = self.anatomy.depths.at(layer, own.wiring.reads(Half.MLP))
        if depth < self.first:
            raise HelmscopeError(f"layer is {layer}, but the recording begins behind what its MLP reads")
        if norm is None:
            return self.stream(depth=depth)
        if kind is not Kind.POST_NORM:
            return norm.core()(self.stream(depth=depth)) / math.sqrt(self.anatomy.dim)
        plain, step = self.on_sphere, self._step(depth)
        assert plain.radius is not None
        return plain.radius[step].unsqueeze(-1) * plain.states[step] / math.sqrt(self.anatomy.dim)

    def resume(
        self,
        *,
        depth: int,
        states: Float[Tensor, "batch n d"],
        generator: torch.Generator | None = None,
        frozen: Bool[Tensor, "batch n"] | None = None,
    ) -> Recording:
        """Continue from a depth with other directions; radius and mean stay as they were.

        Tokens where ``frozen`` is True keep the states they had at every later depth, in a further resume too.
        """
        self.certificate.require("resume")
        step = self._step(depth)
        check_states(states, self.residual.direction[step], frozen)
        radius, mean = self.residual.radius[step], self.residual.mean
        before = [each.frozen for each in self.edits if isinstance(each, PutState)]
        kept = FrozenTokens(frozen, self.residual, self.first) if frozen is not None else before[-1] if before else None
        put = PutState(depth, states, self.anatomy, kept, radius, None if mean is None else mean[step])
        # what an earlier resume put in lies before this one, and is still read beside a virtual mid state
        edits = tuple(each for each in self.edits if put.skip == 0 or not isinstance(each, PutState))
        return self._run_again(replace(self.runner, edits=(*edits, put)), first=depth)

    def under(
        self,
        *edits: AbstractEdit,
        encoder: Sequence[AbstractEdit] | Recording = (),
        keep: Keep = Keep.NOTHING,
        progress: Progress | None = None,
    ) -> Recording:
        """The same texts with further edits of the forward; ``keep`` and ``progress`` as for ``record``.

        ``encoder`` are further edits of the encoder of an encoder-decoder model, or what ``recording.encoder.under`` or
        ``recording.encoder.resume`` gave, which takes the encoder's place: the decoder reads what becomes of it.

        Of the certificate only what the run itself shows is taken anew; its line ``edits`` says which lines that are.
        """
        behind = self._encoder_under(encoder)
        runner = self.runner.under(*edits)
        runner = runner if behind is None else replace(runner, encoder=behind.runner)
        return replace(self._run_again(runner, first=self.first, keep=keep, progress=progress), encoder=behind)

    def _encoder_under(self, asked: Sequence[AbstractEdit] | Recording) -> Recording | None:
        """The encoder under further edits, or another recording of it."""
        if isinstance(asked, Recording):
            if self.encoder is None or asked.batch is not self.encoder.batch:
                raise HelmscopeError(
                    "encoder is a Recording of another model or of other texts, but it must be made from "
                    "recording.encoder by under or resume"
                )
            return asked
        if asked and self.encoder is None:
            raise HelmscopeError(
                f"encoder holds {counted(len(asked), 'edit')}, but {type(self.anatomy.model).__name__} has no encoder "
                "beside its decoder"
            )
        return self.encoder if not asked or self.encoder is None else self.encoder.under(*asked)

    def _run_again(
        self, runner: Runner, *, first: int, keep: Keep = Keep.NOTHING, progress: Progress | None = None
    ) -> Recording:
        """The recording that another runner of the same texts makes, from the depth ``first`` on."""
        self.certificate.require("trajectory")
        recorder, keeper = Recorder(runner.anatomy, len(runner.batch)), Keeper(keep, runner.anatomy)
        with held_unwatched(runner.model):
            runner.forward(recorder, keeper, progress=progress)
        stream, errors = recorder.recorded()
        stream = stream.since(first)
        certificate = self._certified_again(runner, stream, errors)
        return replace(self, runner=runner, residual=stream, certificate=certificate, first=first, kept=keeper.kept)

    def _certified_again(self, runner: Runner, stream: ResidualStream, errors: Float[Tensor, " layer"]) -> Certificate:
        """The certificate with what a run under edits shows anew, and a line that says which lines it leaves."""
        certificate = self.certificate.with_line(finite_line(stream.radius))
        count = len(runner.edits) + (0 if runner.encoder is None else len(runner.encoder.edits))
        if not count:
            return certificate
        residual = residual_line(errors, runner.model.dtype)
        if any(Site.OUTPUT in edit.sites for edit in runner.edits):
            residual = Line("residual", None, "a block's output is changed, which is then not the sum of its parts")
        says = f"{count} made: finite and residual are of this run, every other line of the unchanged model"
        return certificate.with_line(residual).with_line(Line("edits", None, says))

    def refusal(self, instrument: Instrument) -> str | None:
        """Why the instrument cannot be used on this recording, in one sentence; None where it can."""
        return refusal(self, instrument)

    def replay(self, *instruments: Instrument, progress: Progress | None = None) -> dict[str, xr.Dataset]:
        """Run the model once more with all instruments attached, and give their Measurements by name, with the axes
        ``layer``, ``prompt`` and, of what heads do, ``head``. Writes are increments of the residual stream.

        An instrument that needs what the certificate does not give out is refused with its sentence. ``progress`` is
        called with the share of the texts done.
        """
        return replay(self, instruments, progress)

    def logits(
        self, *, depth: int | None = None, rows: slice = slice(None), gradients: bool = False
    ) -> Float[Tensor, "batch n vocabulary"]:
        """What the model's head makes of its last state, or of the state at a depth (the lens), for the texts ``rows``;
        with ``gradients`` differentiably. Without ``depth``, of a model without such a head, what it returns first.
        """
        self.certificate.require("lens")
        if depth is None:
            return self.runner.outputs(rows=rows, gradients=gradients)
        self.certificate.require("lens over depth")
        state = self.stream(depth=depth, gradients=gradients)
        put = PutState(self.anatomy.depths.last, state, self.anatomy)
        return self.runner.under(put).outputs(rows=rows, gradients=gradients)

    def manifest(self, *, seed: int = 0) -> Manifest:
        """What is to be written beside anything measured on this recording: files and their hashes, revision, texts,
        how attention is computed when nobody records, what was found, what was checked, which edits were made (their
        tensors by shape and hash) and at which depth the trajectory begins.
        """
        return recording_manifest(self, seed=seed)
