"""A transformer on some texts as a ``System``: what its tokens did, the mechanism that did it, and a certificate."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.certificate import Line
from helmscope.models.certify import finite_line, residual_line
from helmscope.models.keep import Keep, Keeper
from helmscope.models.place import Frozen, Place
from helmscope.models.probe import run, trunk_of
from helmscope.models.recorder import Recorder
from helmscope.models.replay import refusal, replay
from helmscope.models.sphere import on_sphere
from helmscope.models.topology import Kind
from helmscope.models.watch import Site, Watcher, bytes_of, check_watchers, held_unwatched, watching
from helmscope.store.manifest import Manifest, hash_bytes
from helmscope.types import HelmscopeError, Trajectory

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.certificate import Certificate
    from helmscope.models.experts import Behind
    from helmscope.models.load import Origin
    from helmscope.models.recorder import Stream
    from helmscope.models.tap import Attended, Call
    from helmscope.models.texts import Batch
    from helmscope.types import Instrument


@dataclass(frozen=True, eq=False, repr=False)
class Recording:
    """A model on some texts. ``trajectory`` holds the residual stream over depth in half-layers: 0 is the first block's
    input, 2 l + 1 the state of layer l between attention and MLP (virtual in a parallel block), 2 l + 2 its output.

    ``first`` is the depth at which the trajectory begins, 0 but for a resumed one; ``watchers`` are the changes under
    which the model was run. All that needs the model again runs it again under them.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> from helmscope.models.record import record
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> recording
    <Recording of gpt2: sequential pre-norm; 2 layers, width 8; 1 texts x 4 tokens (73e200e2b048); certificate ok>
    >>> recording.resume(depth=2, states=recording.trajectory.states[2]).trajectory.times
    tensor([2., 3., 4.], dtype=torch.float64)
    >>> recording.kernel(layer=0).shape
    torch.Size([1, 2, 4, 4])
    """

    anatomy: Anatomy
    batch: Batch
    stream_: Stream
    certificate: Certificate
    origin: Origin
    forces: tuple[Behind | None, ...]
    size: int
    watchers: tuple[Watcher, ...] = ()
    first: int = 0
    kept: Mapping[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        failed = [line.name for line in self.certificate.lines if line.ok is False]
        texts = f"{len(self.batch)} texts x {self.stream_.radius.shape[-1]} tokens ({self._texts_hash()[:12]})"
        parts = [str(self.anatomy), texts, f"certificate fails: {', '.join(failed)}" if failed else "certificate ok"]
        parts += [f"from depth {self.first}"] if self.first else []
        parts += [f"under {', '.join(map(repr, self.watchers))}"] if self.watchers else []
        return f"<Recording of {self.origin.family}: {'; '.join(parts)}>"

    def _texts_hash(self) -> str:
        return hash_bytes(b"".join(map(bytes_of, self.batch.inputs.values())))

    @property
    def trajectory(self) -> Trajectory:
        """What the tokens did: directions, the radius that was divided out, the weights by which tokens count (0 for
        padding and special tokens).
        """
        self.certificate.require("trajectory")
        stream, counted = self.stream_, self.batch.counted
        times = torch.arange(self.first, self.first + len(stream.radius), dtype=torch.float64)
        weights = None if counted is None else counted.to(stream.radius).unsqueeze(0)
        return Trajectory(times, stream.direction, weights, stream.radius, self.batch.tokens, axis="depth")

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
        return range(min(self.first // 2, count - 1), count)

    @property
    def visible(self) -> Bool[Tensor, "batch n"] | None:
        """The tokens that attention sees, special ones included; None where it sees all."""
        return self.batch.visible

    def _layer(self, layer: int) -> int:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer not in self.layers:
            first, last = self.layers[0], self.layers[-1]
            raise HelmscopeError(f"layer is {layer!r}, but this recording has layers {first} to {last}")
        return layer

    def _step(self, depth: int) -> int:
        """The time index of a depth."""
        last = self.first + len(self.stream_.radius) - 1
        if isinstance(depth, bool) or not isinstance(depth, int) or not self.first <= depth <= last:
            raise HelmscopeError(f"depth is {depth!r}, but this recording has depths {self.first} to {last}")
        return depth - self.first

    def stream(self, *, depth: int) -> Float[Tensor, "batch n d"]:
        """The residual stream at a depth as it is."""
        self.certificate.require("trajectory")
        return self.stream_.at(self._step(depth))

    def kernel(self, *, layer: int) -> Float[Tensor, "batch heads n n"]:
        """The attention weights of a layer, kept ones or by another run of the model."""
        self.certificate.require("kernel")
        layer = self._layer(layer)
        if "weights" in self.kept:
            return self.kept["weights"][layer]
        keep = _KeepWeights(layer)
        self.forward(keep)
        return torch.cat(keep.weights)

    def force(self, *, layer: int) -> Any:
        """The MLP of a layer as a field on unit vectors with gain and bias of its norm folded in, times the residual
        multiplier. A norm behind the MLP (sandwich) is not part of it.

        What the module computes is its value at ``points``, whatever a change does to what it writes.
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
        depth = 2 * layer + (kind is not Kind.PARALLEL)
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
        radius = self.stream_.radius[step].unsqueeze(-1)
        _check_states(states, self.stream_.direction[step], frozen)
        raw = radius * states.to(radius)
        raw = raw if self.stream_.mean is None else raw + self.stream_.mean[step].unsqueeze(-1)
        before = [each.frozen for each in self.watchers if isinstance(each, Place)]
        kept = Frozen(frozen, self.stream_, self.first) if frozen is not None else before[-1] if before else None
        place = Place(depth, raw, self.anatomy, kept)
        # what an earlier resume put in lies before this one, and is still read beside a virtual mid state
        changes = tuple(each for each in self.watchers if place.skip == 0 or not isinstance(each, Place))
        return replace(self, watchers=changes).under(place, first=place.depth)

    def under(self, *watchers: Watcher, keep: Keep = Keep.NOTHING, first: int | None = None) -> Recording:
        """The same texts with further changes to the forward; ``keep`` as for ``record``.

        Of the certificate only what the run itself shows is taken anew; its line ``changes`` says which lines that are.
        """
        self.certificate.require("trajectory")
        begin = self.first if first is None else first
        changed = replace(self, watchers=(*self.watchers, *watchers))
        recorder, keeper = Recorder(self.anatomy, len(self.batch)), Keeper(keep, self.anatomy)
        with held_unwatched(self.anatomy.model):
            changed.forward(recorder, keeper)
        assert recorder.stream is not None
        stream = recorder.stream.since(begin)
        certificate = changed._certified(recorder, stream)
        return replace(changed, stream_=stream, first=begin, kept=keeper.kept, certificate=certificate)

    def _certified(self, recorder: Recorder, stream: Stream) -> Certificate:
        """The certificate with what a run under changes shows anew, and a line that says which lines it leaves."""
        certificate = self.certificate.with_line(finite_line(stream.radius))
        if not self.watchers:
            return certificate
        assert recorder.errors is not None
        residual = residual_line(recorder.errors, self.anatomy.model.dtype)
        if any(Site.OUTPUT in watcher.sites for watcher in self.watchers):
            residual = Line("residual", None, "a block's output is changed, which is then not the sum of its parts")
        says = (
            f"{len(self.watchers)} made: finite and residual are of this run, every other line of the unchanged model"
        )
        return certificate.with_line(residual).with_line(Line("changes", None, says))

    def refusal(self, instrument: Instrument) -> str | None:
        """Why the instrument cannot be used on this recording, in one sentence; None where it can."""
        return refusal(self, instrument)

    def replay(self, *instruments: Instrument) -> dict[str, xr.Dataset]:
        """Run the model once more with all instruments attached, and give their Measurements by name, with the axes
        ``layer``, ``prompt`` and, of what heads do, ``head``. Writes are increments of the residual stream.

        An instrument that needs what the certificate does not give out is refused with its sentence.
        """
        return replay(self, instruments)

    def logits(self, *, depth: int | None = None, rows: slice = slice(None)) -> Float[Tensor, "batch n vocabulary"]:
        """What the model's head makes of its last state, or of the state at a depth (the lens), for the texts ``rows``.
        Without ``depth``, of a model without such a head, what it returns first.
        """
        self.certificate.require("lens")
        if depth is None:
            return self.forward(whole=True, only=rows)
        self.certificate.require("lens over depth")
        state = self.stream_.at(self._step(depth))
        return self.forward(Place(2 * len(self.anatomy.layers), state, self.anatomy), whole=True, only=rows)

    def manifest(self, *, seed: int = 0) -> Manifest:
        """What is to be written beside anything measured on this recording: files and their hashes, revision, texts,
        how attention is computed when nobody records, what was found, what was checked, which changes were made (their
        tensors by shape and hash) and at which depth the trajectory begins.
        """
        origin = self.origin
        return Manifest.collect(
            seed=seed,
            dtype=origin.dtype,
            device=origin.device,
            threads=torch.get_num_threads(),
            command=sys.argv,
            inputs={**origin.hashes, "texts": self._texts_hash()},
            parameters={
                "model": origin.name,
                "family": origin.family,
                "revision": origin.revision,
                "attention": origin.attention,
                "topology": str(self.anatomy),
                "changes": [repr(watcher) for watcher in self.watchers],
                "first": self.first,
                "certificate": {line.name: line.ok for line in self.certificate.lines},
            },
        )

    def forward(
        self,
        *watchers: Watcher,
        whole: bool = False,
        only: slice = slice(None),
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Run the model on the texts (those of ``only``), some at a time, under all changes; with ``whole`` to its
        head, which is given.
        """
        model, found = self.anatomy.model, []
        model_run = model if whole else trunk_of(model)
        device = next(model.parameters()).device
        everyone = (*self.watchers, *watchers)
        check_watchers(self.anatomy, *everyone)
        if model.training:
            raise HelmscopeError("the model is in training mode, where every forward is another: call model.eval()")
        # whoever hears attention hears that of the layer in which a mid state is put, which reads the layers before
        heard = any(each.hears or each.every_layer or (isinstance(each, Keeper) and each.what) for each in everyone)
        skip = 0 if heard else max((each.skip for each in everyone if isinstance(each, Place)), default=0)
        with watching(self.anatomy, *everyone, skip=skip), _rows_forgotten(everyone):
            start, stop, _ = only.indices(len(self.batch))
            for begin in range(start, stop, self.size):
                rows = slice(begin, min(begin + self.size, stop))
                for watcher in everyone:
                    watcher.rows, watcher.texts = rows, len(self.batch)
                out = run(model_run, self.batch.rows(rows).to(device), **self.anatomy.options)
                if whole:
                    found.append(out[0])
                if progress is not None:
                    progress(rows.stop, len(self.batch))
        return torch.cat(found) if whole else torch.empty(0)


@contextmanager
def _rows_forgotten(watchers: tuple[Watcher, ...]) -> Iterator[None]:
    """Afterwards every watcher looks at whole batches again."""
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.rows, watcher.texts = slice(None), None


def _check_states(states: Tensor, like: Tensor, frozen: Tensor | None) -> None:
    """Directions to go on from, and tokens to hold: of the shape of those that are there."""
    if not isinstance(states, torch.Tensor) or states.shape != like.shape:
        shown = tuple(states.shape) if isinstance(states, torch.Tensor) else type(states).__name__
        raise HelmscopeError(f"states is {shown}, but it must be a tensor of shape {tuple(like.shape)}")
    length = torch.linalg.vector_norm(states.double(), dim=-1)
    if not bool(((length - 1).abs() <= 1e-3).all()):
        raise HelmscopeError(f"states has lengths up to {float(length.max()):g}, but directions are unit vectors")
    if frozen is not None and (not isinstance(frozen, torch.Tensor) or frozen.shape != like.shape[:2]):
        shown = tuple(frozen.shape) if isinstance(frozen, torch.Tensor) else type(frozen).__name__
        raise HelmscopeError(f"frozen is {shown}, but it must be a tensor of bool of shape {tuple(like.shape[:2])}")


class _KeepWeights(Watcher):
    hears = True

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.weights: list[Tensor] = []

    def after(self, layer: int, call: Call | None, result: Attended) -> Attended:
        if layer == self.layer:
            wide = torch.float64 if result.weights.dtype == torch.float64 else torch.float32
            self.weights.append(result.weights.to(wide))
        return result
