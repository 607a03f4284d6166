"""``Recording``: a transformer run on some texts, as a ``System`` with trajectory, mechanism and certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.keep import KeepState, KeptTensors
from helmscope.models.names import layer_number
from helmscope.models.recording_summary import recording_html, recording_manifest, recording_repr
from helmscope.models.replay import replay, unsupported_reason
from helmscope.models.run_again import attention_weights, encoder_under, logits_at, resumed_runner, run_again
from helmscope.models.sites import AbstractEdit
from helmscope.models.sphere import mlp_points, recorded_trajectory, stream_on_sphere
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HasTrajectory,
    HelmscopeError,
    Plottable,
    Trajectory,
    record_first,
    short_repr,
    type_with_article,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.certificate import Certificate
    from helmscope.models.experts import ForceAfterNorm
    from helmscope.models.load import ModelOrigin
    from helmscope.models.recorder import ResidualStream
    from helmscope.models.runner import Runner
    from helmscope.models.texts import Batch
    from helmscope.store.manifest import Manifest
    from helmscope.types import Instrument
    from helmscope.types.dataset import Measurements
    from helmscope.types.progress import ProgressOption


@dataclass(frozen=True, eq=False, repr=False)
class Recording(HasTrajectory, Plottable):
    """The run of a model on some texts, made by ``record``. ``trajectory`` holds the residual stream over depth in
    half-layers: depth 0 is the first block's input, 2 l + 1 the state of layer l between attention and MLP (virtual in
    a parallel block), 2 l + 2 its output.

    The recording of an encoder-decoder model is that of its decoder, whose layers have three sub-steps: depth 3 l + 1
    is the state after attention, 3 l + 2 after cross-attention, 3 l + 3 after the MLP. ``encoder`` is the recording of
    the encoder, whose last states the cross-attention reads; None for other models.

    ``first`` is the depth at which the trajectory begins, 0 unless the recording was resumed; ``edits`` are those under
    which the model was run. Methods that need values that are not stored run the model again under the same edits
    (``runner``). ``tokenizer`` is None if none was passed or loaded with the model.

    The stored tensors have no gradients. ``logits`` and ``residual_stream`` compute them on request by running the
    model again: with ``gradients=True``, gradients flow to the model's parameters, to the tensors that edits use and to
    the ``states`` of ``resume``.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.models.record import record
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> recording
    <Recording of GPT2LMHeadModel (gpt2): certificate ok; 1 text x 4 tokens (73e200e2b048); sequential ...>
    >>> recording.trajectory.times
    tensor([0., 1., 2., 3., 4.], dtype=torch.float64)
    """

    runner: Runner
    residual: ResidualStream
    certificate: Certificate
    origin: ModelOrigin
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
        the weight of each token in statistics (0 for padding and special tokens). The states of padding are zero
        vectors, which functions of tokens refuse where they are called without weights.
        """
        return recorded_trajectory(self)

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
        """The trajectory on the sphere of theory: gain and bias are undone in every state that is the output of a
        norm, and radii are those of the states without gain and bias.

        It differs from ``trajectory`` only in a post-norm model, which is run once more to compute it.
        """
        path = self.trajectory
        if not self.anatomy.post_norm:
            return path
        return replace(path, states=self.stream_on_sphere.direction, radius=self.stream_on_sphere.radius)

    @cached_property
    def stream_on_sphere(self) -> ResidualStream:
        """The stored states of ``on_sphere``, those of padding included; in a model that is not post-norm, those of the
        residual stream.
        """
        return stream_on_sphere(self)

    @property
    def layers(self) -> range:
        """The layers whose mechanism is available: all, or in a resumed recording those from its first depth on."""
        count = len(self.anatomy.layers)
        return range(self.anatomy.depths.layer(self.first), count)

    def layer(self, name: str | int) -> int:
        """The number of a layer: from "L3", from the name of its block in the model, such as "transformer.h.3", or from
        the number itself. All methods that take a layer accept all three.

        >>> from helmscope import record
        >>> recording = record("A", ["Once upon a time"])
        >>> recording.layer("L3"), recording.layer("transformer.h.3")
        (3, 3)
        """
        number = layer_number(self.anatomy, name)
        if isinstance(number, bool) or not isinstance(number, int) or number not in self.layers:
            first, last = self.layers[0], self.layers[-1]
            raise HelmscopeError(f"layer is {short_repr(name)}, but this recording has layers {first} to {last}")
        return number

    @property
    def visible(self) -> Bool[Tensor, "batch n"] | None:
        """The tokens that attention can see, special tokens included; None if it can see all of them."""
        return self.batch.visible

    def step(self, depth: int) -> int:
        """The index of a depth among the stored states. Raises HelmscopeError for a depth that is not stored.

        >>> from helmscope import record
        >>> record("A", ["Once upon a time"]).step(3)
        3
        """
        last = self.first + len(self.residual.radius) - 1
        if isinstance(depth, bool) or not isinstance(depth, int) or not self.first <= depth <= last:
            raise HelmscopeError(f"depth is {depth!r}, but this recording has depths {self.first} to {last}")
        return depth - self.first

    def residual_stream(self, *, depth: int, gradients: bool = False) -> Float[Tensor, "batch n d"]:
        """The residual stream at a depth, with its radius and mean; with ``gradients`` recomputed differentiably.

        >>> from helmscope import record
        >>> record("A", ["Once upon a time"]).residual_stream(depth=1).shape
        torch.Size([1, 4, 192])
        """
        self.certificate.require("trajectory")
        step = self.step(depth)
        if not gradients:
            return self.residual.at(step)
        keep = KeepState(depth, self.anatomy.depths)
        self.runner.forward(keep, gradients=True)
        return torch.cat(keep.states)

    def kernel(self, layer: int | str) -> Float[Tensor, "batch heads n n"]:
        """The attention weights of a layer: those kept by ``keep=``, or else from another run of the model. The rows of
        padding are 0, so that functions of rows, such as ``hs.kernel.row_entropy``, are NaN there.

        >>> from helmscope import record
        >>> weights = record("A", ["Once upon a time"]).kernel(layer=0)
        >>> bool(((weights.sum(-1) - 1).abs() < 1e-5).all())
        True
        """
        self.certificate.require("kernel")
        return attention_weights(self, self.layer(layer))

    def cross_kernel(self, layer: int | str) -> Float[Tensor, "batch heads n m"]:
        """The cross-attention weights of a layer of a decoder: row i holds the weights with which token i attends to
        the m tokens of the encoder. They are those kept by ``keep=``, or else from another run of the model. The rows
        of padding are 0.

        >>> from transformers import T5Config, T5Model
        >>> sizes = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        >>> from helmscope import record
        >>> texts, targets = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7]])
        >>> recording = record(T5Model(T5Config(**sizes, decoder_start_token_id=0)), texts, targets=targets)
        >>> recording.cross_kernel(layer=0).shape
        torch.Size([1, 2, 3, 4])
        """
        if self.encoder is None:
            raise HelmscopeError(
                f"cross_kernel needs an encoder-decoder model, but {type(self.anatomy.model).__name__} is not one"
            )
        self.certificate.require("cross_kernel")
        return attention_weights(self, self.layer(layer), cross=True)

    def force(self, layer: int | str) -> Any:
        """The MLP of a layer as a field on unit vectors, with gain and bias of its norm folded in, times the residual
        multiplier. A norm after the MLP (sandwich) is not included.

        Its value at ``force_points`` is what the module computes, before any edit of what it writes.

        >>> from helmscope import record
        >>> recording = record("A", ["Once upon a time", "The cat sat"])
        >>> force = recording.force(layer=4)
        >>> type(force).__name__, force.ambient(recording.force_points(layer=4)).shape
        ('MLP', torch.Size([2, 4, 192]))
        """
        self.certificate.require("force")
        force = self.forces[self.layer(layer)]
        assert force is not None  # else `require` would have raised
        return force.folded()

    def force_points(self, layer: int | str) -> Float[Tensor, "batch n d"]:
        """The points at which ``force`` of the same layer equals the output of the MLP: normalized(z) / sqrt(d), where
        z is the input of its norm.

        Up to the norm's epsilon, that is the direction of the state that the MLP reads; in a post-norm model, the
        direction before gain and bias; in a model without a norm before the MLP, the state itself with its radius.

        >>> from helmscope import record
        >>> recording = record("A", ["Once upon a time", "The cat sat"])
        >>> recording.force_points(layer=4).norm(dim=-1).allclose(torch.ones(2, 4))
        True
        """
        self.certificate.require("force")
        return mlp_points(self, self.layer(layer))

    def resume(
        self,
        *,
        depth: int,
        states: Float[Tensor, "batch n d"],
        generator: torch.Generator | None = None,
        frozen: Bool[Tensor, "batch n"] | None = None,
    ) -> Recording:
        """Run the model again from a depth on, with other directions there; radii and means are unchanged.

        ``states`` are unit vectors; padding may also be zero vectors, as in ``trajectory``, and then keeps its recorded
        directions. Tokens where ``frozen`` is True keep their recorded states at every later depth,
        also if the result is resumed again. The result is a Recording that begins at ``depth``.

        >>> from helmscope import record
        >>> recording = record("A", ["Once upon a time", "The cat sat down"])
        >>> swapped = recording.trajectory.states[8].roll(1, dims=0)  # of the other text, with as many tokens
        >>> later = recording.resume(depth=8, states=swapped)
        >>> later.first, later.layers
        (8, range(4, 12))
        """
        return run_again(self, self.resumed_runner(depth=depth, states=states, frozen=frozen), first=depth)

    def resumed_runner(
        self, *, depth: int, states: Float[Tensor, "batch n d"], frozen: Bool[Tensor, "batch n"] | None = None
    ) -> Runner:
        """The runner with which ``resume`` runs the model, for own observers and for derivatives with respect to
        ``states``.

        >>> from helmscope import record
        >>> recording = record("A", ["Once upon a time"])
        >>> recording.resumed_runner(depth=8, states=recording.trajectory.states[8])
        <Runner of GPT2LMHeadModel: 1 text, 16 at a time; 1 edit>
        """
        return resumed_runner(self, depth, states, frozen)

    @shows_progress("recording")
    def under(
        self,
        *edits: AbstractEdit,
        encoder: AbstractEdit | Sequence[AbstractEdit] | Recording = (),
        keep: KeptTensors = KeptTensors.NOTHING,
        progress: ProgressOption = None,
    ) -> Recording:
        """Record the same texts under further edits of the forward pass; ``keep`` and ``progress`` as for ``record``.

        For an encoder-decoder model, ``encoder`` is a further edit of its encoder, a list of them, or a recording made
        by ``recording.encoder.under`` or ``recording.encoder.resume``, whose last states the decoder then reads.

        Only the lines of the certificate that the run itself can check are renewed; its line ``edits`` names them.

        >>> from helmscope import record
        >>> from helmscope.models.put_state import PutState
        >>> recording = record("A", ["Once upon a time"])
        >>> state = PutState(0, 0 * recording.residual_stream(depth=0), recording.anatomy)
        >>> float(recording.under(state).residual_stream(depth=0).abs().max())
        0.0
        """
        edited_encoder = encoder_under(self, encoder)
        runner = self.runner.under(*edits)
        runner = runner if edited_encoder is None else replace(runner, encoder=edited_encoder.runner)
        again = run_again(self, runner, first=self.first, keep=keep, progress=progress)
        return replace(again, encoder=edited_encoder)

    def unsupported_reason(self, instrument: Instrument) -> str | None:
        """One sentence that says why the instrument cannot be used on this recording; None if it can.

        >>> from helmscope import record
        >>> from helmscope.observe import KernelStatistics
        >>> record("A", ["Once upon a time"]).unsupported_reason(KernelStatistics()) is None
        True
        """
        return unsupported_reason(self, instrument)

    @shows_progress("replaying")
    def replay(self, *instruments: Instrument, progress: ProgressOption = None) -> Measurements:
        """Run the model once more with all instruments attached, and return their Measurements by name, with the axes
        ``layer``, ``prompt`` and, for quantities per head, ``head``. Writes are increments of the residual stream.

        Raises HelmscopeError if an instrument needs something that the certificate blocks. ``progress`` is called with
        the share of the texts done.

        >>> from helmscope.observe import KernelStatistics
        >>> from helmscope import record
        >>> recording = record("A", ["Once upon a time", "The cat sat"])
        >>> measured = recording.replay(KernelStatistics())["kernel_statistics"]
        >>> dict(measured.row_entropy.sizes)
        {'layer': 12, 'prompt': 2, 'head': 6}
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
        return logits_at(self, depth, rows, gradients=gradients)

    def manifest(self, *, seed: int = 0) -> Manifest:
        """The manifest to store with anything measured on this recording: files and their hashes, revision, texts, the
        model's own attention implementation, its topology, the certificate, the edits (their tensors by shape and hash)
        and the depth at which the trajectory begins.

        >>> from helmscope import record
        >>> manifest = record("A", ["Once upon a time"]).manifest()
        >>> manifest.parameters["model"], manifest.parameters["edits"], sorted(manifest.inputs)
        ('A', [], ['model.safetensors', 'texts'])
        """
        return recording_manifest(self, seed=seed)


def check_recording(recording: object) -> Recording:
    """Returns the Recording; raises HelmscopeError for anything else.

    >>> check_recording("A")
    Traceback (most recent call last):
      ...
    helmscope.types.HelmscopeError: recording is a str, but it must be a Recording: record a model first, hs.record('A')
    """
    if not isinstance(recording, Recording):
        raise HelmscopeError(
            f"recording is {type_with_article(recording)}, but it must be a Recording{record_first(recording)}"
        )
    return recording
