"""``Recording``: a transformer run on some texts, as a ``System`` with trajectory, mechanism and certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.certificate import Line
from helmscope.models.certify import finite_line, residual_line
from helmscope.models.hooks import locked_unedited
from helmscope.models.keep import Keep, Keeper, KeepState, KeepWeights
from helmscope.models.names import layer_number
from helmscope.models.place import FrozenTokens, PutState, check_states
from helmscope.models.recorder import Recorder
from helmscope.models.recording_summary import recording_html, recording_manifest, recording_repr
from helmscope.models.replay import refusal, replay
from helmscope.models.sphere import on_sphere
from helmscope.models.topology import Kind
from helmscope.models.watch import Site
from helmscope.runs.bar import shows_progress
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
    from helmscope.types import Instrument
    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False, repr=False)
class Recording(Plottable):
    """The run of a model on some texts, made by ``record``. ``trajectory`` holds the residual stream over depth in
    half-layers: depth 0 is the first block's input, 2 l + 1 the state of layer l between attention and MLP (virtual in
    a parallel block), 2 l + 2 its output.

    The recording of an encoder-decoder model is that of its decoder, whose layers have three sub-steps: depth 3 l + 1
    is the state after attention, 3 l + 2 after cross-attention, 3 l + 3 after the MLP. ``encoder`` is the recording of
    the encoder, whose last states the cross-attention reads; None for other models.

    ``first`` is the depth at which the trajectory begins, 0 unless the recording was resumed; ``edits`` are those under
    which the model was run. Methods that need values that are not stored run the model again under the same edits
    (``runner``). ``tokenizer`` is None if none was passed or loaded with the model.

    The stored tensors have no gradients. ``logits`` and ``stream`` compute them on request by running the model again:
    with ``gradients=True``, gradients flow to the model's parameters, to the tensors that edits use and to the
    ``states`` of ``resume``.

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
        """The model and its structure: layers, norms and MLPs, as identified from a forward pass."""
        return self.runner.anatomy

    @property
    def batch(self) -> Batch:
        """The texts as inputs of the model, with their masks."""
        return self.runner.batch

    @property
    def edits(self) -> tuple[AbstractEdit, ...]:
        """The edits under which the model was run, in the order in which they are applied."""
        return self.runner.edits

    @property
    def trajectory(self) -> Trajectory:
        """The states of the tokens over depth: unit vectors (depth, batch, n, d), the radii that were divided out, and
        the weight of each token in statistics (0 for padding and special tokens).
        """
        self.certificate.require("trajectory")
        stream, counted = self.residual, self.batch.counted
        times = torch.arange(self.first, self.first + len(stream.radius), dtype=torch.float64, device="cpu")
        weights = None if counted is None else counted.to(stream.radius).unsqueeze(0)
        path = Trajectory(times, stream.direction, weights, stream.radius, self.batch.tokens)
        return replace(path, axis=self.axis, replicate=self.replicate)

    @property
    def axis(self) -> str:
        """The name of the axis of states: "depth", counted in half-layers."""
        return "depth"

    @property
    def layer_axis(self) -> str:
        """The name of the axis of mechanisms: "layer"."""
        return "layer"

    @property
    def replicate(self) -> str:
        """The name of the axis of replicates, the texts: "prompt"."""
        return "prompt"

    @cached_property
    def on_sphere(self) -> Trajectory:
        """The trajectory on the sphere of the theory: gain and bias are undone in every state that is the output of a
        norm, and radii are those of the states without gain and bias.

        It differs from ``trajectory`` only in a post-norm model, which is run once more to compute it.
        """
        path = self.trajectory
        if not self.anatomy.post_norm:
            return path
        self.certificate.require("on_sphere")
        plain = on_sphere(self)
        return replace(path, states=plain.direction, radius=plain.radius)

    @property
    def layers(self) -> range:
        """The layers whose mechanism is available: all, or in a resumed recording those from its first depth on."""
        count = len(self.anatomy.layers)
        return range(self.anatomy.depths.layer(self.first), count)

    def layer(self, name: str | int) -> int:
        """The number of a layer, from the name of its block in the model, such as "transformer.h.3", or its number."""
        return self._layer(layer_number(self.anatomy, name))

    @property
    def visible(self) -> Bool[Tensor, "batch n"] | None:
        """The tokens that attention can see, special tokens included; None if it can see all of them."""
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
        """The residual stream at a depth, with its radius and mean; with ``gradients`` recomputed differentiably.

        >>> from helmscope import record
        >>> record("A", ["Once upon a time"]).stream(depth=1).shape
        torch.Size([1, 4, 192])
        """
        self.certificate.require("trajectory")
        step = self._step(depth)
        if not gradients:
            return self.residual.at(step)
        keep = KeepState(depth, self.anatomy.depths)
        self.runner.forward(keep, gradients=True)
        return torch.cat(keep.states)

    def kernel(self, *, layer: int) -> Float[Tensor, "batch heads n n"]:
        """The attention weights of a layer: those kept by ``keep=``, or else from another run of the model.

        >>> from helmscope import record
        >>> weights = record("A", ["Once upon a time"]).kernel(layer=0)
        >>> bool(((weights.sum(-1) - 1).abs() < 1e-5).all())
        True
        """
        self.certificate.require("kernel")
        layer = self._layer(layer)
        if "weights" in self.kept:
            return self.kept["weights"][layer]
        keep = KeepWeights(layer)
        self.runner.forward(keep)
        return torch.cat(keep.weights)

    def cross_kernel(self, *, layer: int) -> Float[Tensor, "batch heads n m"]:
        """The cross-attention weights of a layer of a decoder: row i holds the weights with which token i attends to
        the m tokens of the encoder. They are those kept by ``keep=``, or else from another run of the model.
        """
        if self.encoder is None:
            raise HelmscopeError(
                f"cross_kernel needs an encoder-decoder model, but {type(self.anatomy.model).__name__} is not one"
            )
        self.certificate.require("cross_kernel")
        layer = self._layer(layer)
        if "cross weights" in self.kept:
            return self.kept["cross weights"][layer]
        keep = KeepWeights(layer, cross=True)
        self.runner.forward(keep)
        return torch.cat(keep.weights)

    def force(self, *, layer: int) -> Any:
        """The MLP of a layer as a field on unit vectors, with gain and bias of its norm folded in, times the residual
        multiplier. A norm after the MLP (sandwich) is not included.

        Its value at ``points`` is what the module computes, before any edit of what it writes.
        """
        self.certificate.require("force")
        force = self.forces[self._layer(layer)]
        assert force is not None  # else `require` would have raised
        return force.folded()

    def points(self, *, layer: int) -> Float[Tensor, "batch n d"]:
        """The points at which ``force`` of the same layer equals the output of the MLP: core(z) / sqrt(d), where z is
        the input of its norm.

        Up to the norm's epsilon, that is the direction of the state that the MLP reads; in a post-norm model, the
        direction before gain and bias; in a model without a norm before the MLP, the state itself with its radius.
        """
        self.certificate.require("force")
        structure = self.anatomy.layers[self._layer(layer)]
        kind, norm = structure.wiring.kind, structure.mlp_norm
        depth = self.anatomy.depths.at(layer, structure.wiring.reads(Half.MLP))
        if depth < self.first:
            raise HelmscopeError(f"layer is {layer}, but the recording begins after the state that its MLP reads")
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
        """Run the model again from a depth on, with other directions there; radii and means are unchanged.

        ``states`` are unit vectors. Tokens where ``frozen`` is True keep their recorded states at every later depth,
        also if the result is resumed again. The result is a Recording that begins at ``depth``.
        """
        self.certificate.require("resume")
        step = self._step(depth)
        check_states(states, self.residual.direction[step], frozen)
        radius, mean = self.residual.radius[step], self.residual.mean
        earlier = [edit.frozen for edit in self.edits if isinstance(edit, PutState)]
        held = FrozenTokens(frozen, self.residual, self.first) if frozen is not None else (earlier or [None])[-1]
        put = PutState(depth, states, self.anatomy, held, radius, None if mean is None else mean[step])
        # the state of an earlier resume is overwritten, except where a virtual mid state is put in: the MLP reads both
        edits = tuple(edit for edit in self.edits if put.skip == 0 or not isinstance(edit, PutState))
        return self._run_again(replace(self.runner, edits=(*edits, put)), first=depth)

    @shows_progress("recording")
    def under(
        self,
        *edits: AbstractEdit,
        encoder: Sequence[AbstractEdit] | Recording = (),
        keep: Keep = Keep.NOTHING,
        progress: ProgressOption = None,
    ) -> Recording:
        """Record the same texts under further edits of the forward; ``keep`` and ``progress`` as for ``record``.

        For an encoder-decoder model, ``encoder`` is a sequence of further edits of its encoder, or a recording returned
        by ``recording.encoder.under`` or ``recording.encoder.resume``, whose last states the decoder then reads.

        Only the lines of the certificate that the run itself can check are renewed; its line ``edits`` names them.

        >>> from helmscope import record
        >>> from helmscope.models.place import PutState
        >>> recording = record("A", ["Once upon a time"])
        >>> state = PutState(0, 0 * recording.stream(depth=0), recording.anatomy)
        >>> float(recording.under(state).stream(depth=0).abs().max())
        0.0
        """
        edited_encoder = self._encoder_under(encoder)
        runner = self.runner.under(*edits)
        runner = runner if edited_encoder is None else replace(runner, encoder=edited_encoder.runner)
        return replace(self._run_again(runner, first=self.first, keep=keep, progress=progress), encoder=edited_encoder)

    def _encoder_under(self, change: Sequence[AbstractEdit] | Recording) -> Recording | None:
        """The recording of the encoder under further edits, or the one that replaces it, checked."""
        if isinstance(change, Recording):
            if self.encoder is None or change.batch is not self.encoder.batch:
                raise HelmscopeError(
                    "encoder is a Recording of another model or of other texts, but it must be made from "
                    "recording.encoder by under or resume"
                )
            return change
        if change and self.encoder is None:
            raise HelmscopeError(
                f"encoder holds {counted(len(change), 'edit')}, but {type(self.anatomy.model).__name__} has no encoder "
                "beside its decoder"
            )
        return self.encoder if not change or self.encoder is None else self.encoder.under(*change)

    def _run_again(
        self, runner: Runner, *, first: int, keep: Keep = Keep.NOTHING, progress: ProgressOption = None
    ) -> Recording:
        """The recording made with another runner of the same texts, from the depth ``first`` on."""
        self.certificate.require("trajectory")
        recorder, keeper = Recorder(runner.anatomy, len(runner.batch)), Keeper(keep, runner.anatomy)
        with locked_unedited(runner.model):
            runner.forward(recorder, keeper, progress=progress)
        stream, errors = recorder.recorded()
        stream = stream.since(first)
        certificate = self._certified_again(runner, stream, errors)
        return replace(self, runner=runner, residual=stream, certificate=certificate, first=first, kept=keeper.kept)

    def _certified_again(self, runner: Runner, stream: ResidualStream, errors: Float[Tensor, " layer"]) -> Certificate:
        """The certificate with the lines that a run under edits checks again, and a line that says which those are."""
        certificate = self.certificate.with_line(finite_line(stream.radius))
        count = len(runner.edits) + (0 if runner.encoder is None else len(runner.encoder.edits))
        if not count:
            return certificate
        residual = residual_line(errors, runner.model.dtype)
        if any(Site.OUTPUT in edit.sites for edit in runner.edits):
            residual = Line("residual", None, "an edit replaces a block's output, which is then not a sum of writes")
        says = f"{count} applied: finite and residual are checks of this run, all other lines of the unedited model"
        return certificate.with_line(residual).with_line(Line("edits", None, says))

    def refusal(self, instrument: Instrument) -> str | None:
        """One sentence that says why the instrument cannot be used on this recording; None if it can."""
        return refusal(self, instrument)

    @shows_progress("replaying")
    def replay(self, *instruments: Instrument, progress: ProgressOption = None) -> dict[str, xr.Dataset]:
        """Run the model once more with all instruments attached, and return their Measurements by name, with the axes
        ``layer``, ``prompt`` and, for quantities per head, ``head``. Writes are increments of the residual stream.

        Raises HelmscopeError if an instrument needs something that the certificate blocks. ``progress`` is called with
        the share of the texts done.
        """
        return replay(self, instruments, progress)

    def logits(
        self, *, depth: int | None = None, rows: slice = slice(None), gradients: bool = False
    ) -> Float[Tensor, "batch n vocabulary"]:
        """The model's logits, or those that its head computes from the state at a depth (the logit lens), for the texts
        ``rows``; with ``gradients`` differentiably. A model without a head over a vocabulary returns its first output,
        and has no lens.

        >>> from helmscope import record
        >>> recording = record("A", ["Once upon a time"])
        >>> last = recording.anatomy.depths.last
        >>> bool((recording.logits(depth=last) - recording.logits()).abs().max() < 1e-4)
        True
        """
        self.certificate.require("lens")
        if depth is None:
            return self.runner.outputs(rows=rows, gradients=gradients)
        self.certificate.require("lens over depth")
        state = self.stream(depth=depth, gradients=gradients)
        put = PutState(self.anatomy.depths.last, state, self.anatomy)
        return self.runner.under(put).outputs(rows=rows, gradients=gradients)

    def manifest(self, *, seed: int = 0) -> Manifest:
        """The manifest to store with anything measured on this recording: files and their hashes, revision, texts, the
        model's own attention implementation, its topology, the certificate, the edits (their tensors by shape and hash)
        and the depth at which the trajectory begins.
        """
        return recording_manifest(self, seed=seed)
