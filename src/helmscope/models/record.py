"""``record``: a model on some texts, written down and certified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.models import certify
from helmscope.models.anatomy import Anatomy, find_anatomy
from helmscope.models.boxed import FIRST, box_texts
from helmscope.models.certificate import Certificate, Line
from helmscope.models.certify_cross import cross_lines
from helmscope.models.hooks import held_unwatched, watching
from helmscope.models.keep import Keep, Keeper
from helmscope.models.load import Loaded, ensure_loaded
from helmscope.models.place import PutState
from helmscope.models.probe import no_cache, output_of, run, trunk_of, vocabulary_size
from helmscope.models.recorder import Recorder
from helmscope.models.recording import Recording
from helmscope.models.runner import Runner
from helmscope.models.stacks import stacks_of
from helmscope.models.tap import share_lock
from helmscope.models.targets import prepare_inputs
from helmscope.models.texts import Batch
from helmscope.types import Progress, check_progress, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.probe import LayerProbe
    from helmscope.models.recorder import ResidualStream

PROBED_TEXTS, PROBED_TOKENS = 2, 24


def record(
    model: Any = FIRST,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
    *,
    targets: Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
    tokenizer: Any = None,
    truncate: bool = False,
    batch_size: int = 16,
    keep: Keep = Keep.NOTHING,
    progress: Progress | None = None,
    **options: Any,
) -> Recording:
    """Run a model on texts and write its residual stream down, half-layer by half-layer.

    ``model`` is one in the box ("A", "B", "tied"), a Hub id, a folder, a model in memory or a ``Loaded``; ``options``
    are those of ``load``. ``texts`` are strings, token ids (batch, n), images, or a mapping of the forward's inputs,
    such as a tokenizer gives; by default the texts in the box. Padding and, where the tokenizer is known, special
    tokens take part, but have weight 0: no statistic counts them. Padding on the left is moved to the right, and masks
    such as ``tokens=`` and ``keys=`` follow ``recording.batch``; tokens hidden inside a text stay where they are.

    Attention runs eager, to the bit; nothing of size n x n is kept unless ``keep`` asks for it. Every recording has a
    certificate, and a check that fails blocks what depends on it. Refused while an edit is attached to the model:
    ``recording.under`` records one. ``progress`` is called with the share of the texts done.

    Of an encoder-decoder model (T5, BART) the recording is the decoder's, whose layers have three sub-steps: attention,
    cross-attention, MLP; ``recording.encoder`` is that of the encoder on the texts. The decoder reads ``targets``, one
    text or row of ids for each of the texts, shifted right behind its start token as in training; without ``targets``
    it reads the texts themselves, shifted in the same way. A mapping may hold ``decoder_input_ids``, which are read as
    they are, and ``decoder_attention_mask``.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> recording.certificate.ok, recording.trajectory.states.shape
    (True, torch.Size([5, 1, 4, 8]))
    """
    whole_number("batch_size", batch_size, at_least=1)
    check_progress(progress)
    loaded = ensure_loaded(model, tokenizer=tokenizer, **options)
    stacks = stacks_of(loaded.model)
    if stacks is not None:
        share_lock(stacks.encoder, loaded.model)
    with held_unwatched(loaded.model):
        texts = box_texts() if texts is None else texts
        loaded = replace(loaded, tokenizer=tokenizer or loaded.tokenizer)
        words = loaded.tokenizer
        batch = prepare_inputs(loaded.model, texts, words, targets=targets, truncate=truncate, why=loaded.why)
        if stacks is None or batch.source is None:
            return _recorded(loaded, batch, batch_size, keep, progress)
        origin = replace(loaded.origin, family=f"{loaded.origin.family} encoder")
        part = replace(loaded, model=stacks.encoder, origin=origin)
        encoder = _recorded(part, batch.source, batch_size, keep, None)
        return _recorded(loaded, batch, batch_size, keep, progress, encoder)


@full_precision
def _recorded(
    loaded: Loaded,
    batch: Batch,
    batch_size: int,
    keep: Keep,
    progress: Progress | None,
    encoder: Recording | None = None,
) -> Recording:
    longest = _longest(batch, loaded.model)
    # before anything else: some families change themselves for good when they see a short text
    untouched = _last_states(loaded.model, longest, no_cache(loaded.model))
    anatomy, seen = find_anatomy(loaded.model, _probed(batch, loaded.model))
    with watching(anatomy, observers=[Recorder(anatomy, 1)]):
        off = certify.relative(_last_states(loaded.model, longest, anatomy.options), untouched)
    line, forces = certify.mlp_line(anatomy, seen)
    lines = [*_lines(anatomy, seen, batch, off), line]
    lines += [each for each in (_padding_line(batch, anatomy),) if each is not None]
    runner = Runner(anatomy, batch, batch_size, encoder=None if encoder is None else encoder.runner)
    recorder, keeper = Recorder(anatomy, len(batch)), Keeper(keep, anatomy)
    runner.forward(recorder, keeper, progress=progress)
    stream, errors = recorder.recorded()
    lines.append(certify.residual_line(errors, loaded.model.dtype))
    lines.append(certify.finite_line(stream.radius))
    if loaded.origin.note is not None:
        lines.append(Line("files", None, loaded.origin.note))
    certificate = Certificate(tuple(lines))
    return Recording(
        runner,
        stream,
        certificate,
        loaded.origin,
        forces,
        kept=keeper.kept,
        tokenizer=loaded.tokenizer,
        encoder=encoder,
    )


def _last_states(model: Any, inputs: Mapping[str, Tensor], options: Mapping[str, bool]) -> Tensor:
    """What the model gives before its head; of an encoder-decoder model what its decoder gives."""
    stacks = stacks_of(model)
    if stacks is None:
        states: Tensor = run(trunk_of(model), inputs, **options)[0]
        return states
    with output_of(stacks.decoder) as given:
        run(trunk_of(model), inputs, **options)
    return given[-1]


def _probed(batch: Batch, model: Any) -> dict[str, Tensor]:
    """A few tokens of the shortest and the longest text, on the model's device; images whole."""
    device = next(model.parameters()).device
    if batch.ids_name not in batch.inputs:
        return batch.rows(slice(0, PROBED_TEXTS)).to(device)
    sides = [side for side in (batch, batch.source) if side is not None]
    rows = sorted({row for side in sides for row in _extremes(side)})
    windows = {name: _window(side, rows) for side in sides for name in (side.ids_name, side.mask_name)}
    usual = windows[batch.ids_name]
    return {name: value[rows, windows.get(name, usual)].to(device) for name, value in batch.inputs.items()}


def _extremes(batch: Batch) -> tuple[int, int]:
    """Which texts are the shortest and the longest; where all have one length, the first and the last."""
    if batch.visible is None:
        return 0, len(batch) - 1
    lengths = batch.visible.sum(-1)
    return int(lengths.argmin()), int(lengths.argmax())


def _window(batch: Batch, rows: list[int]) -> slice:
    """The tokens to be probed; padding that was left on the left is passed over."""
    begin = 0
    if batch.visible is not None:
        n = batch.visible.shape[1]
        begin = min(int(batch.visible[rows].int().argmax(-1).max()), max(0, n - PROBED_TOKENS))
    return slice(begin, begin + PROBED_TOKENS)


def _longest(batch: Batch, model: Any) -> dict[str, Tensor]:
    """The longest text, whole, on the model's device."""
    masks = [side.visible for side in (batch, batch.source) if side is not None and side.visible is not None]
    row = int(torch.stack([mask.sum(-1) for mask in masks]).sum(0).argmax()) if masks else 0
    return batch.rows(slice(row, row + 1)).to(next(model.parameters()).device)


def _padding_line(batch: Batch, anatomy: Anatomy) -> Line | None:
    """Where padding was moved to the right, the last states of the text that had most of it against what the model
    gives for the inputs as they came.
    """
    if batch.given is None:
        return None
    model, options = anatomy.model, no_cache(anatomy.model)
    device = next(anatomy.model.parameters()).device
    came, ids = _visible_in(batch, batch.given), batch.inputs[batch.ids_name]
    masks = [came] + ([] if batch.source is None else [_visible_in(batch.source, batch.given)])
    row = int(torch.stack([mask.int().argmax(-1) for mask in masks]).sum(0).argmax())
    one = slice(row, row + 1)
    given = _last_states(model, {name: value[one].to(device) for name, value in batch.given.items()}, options)
    moved = _last_states(model, batch.rows(one).to(device), options)
    seen = torch.ones_like(ids, dtype=torch.bool) if batch.visible is None else batch.visible
    off = certify.relative(moved[seen[one]], given[came[one]])
    most = certify.bound(moved.dtype, inside=True)
    if off <= most:
        return Line("padding", True, "moved from the left to the right, which makes no difference", off, most)
    says = (
        f"moved from the left to the right; as the inputs came, the model counts positions from the padding on and its "
        f"states differ by {off:.1e}: pass position_ids to record that"
    )
    return Line("padding", None, says)


def _lines(anatomy: Anatomy, seen: list[LayerProbe], batch: Batch, off: float) -> list[Line]:
    """All checks on the probed tokens."""
    inputs = _probed(batch, anatomy.model)
    recorder = Recorder(anatomy, len(seen[0].pre))
    hearer = Keeper(Keep.WEIGHTS, anatomy)
    with watching(anatomy, observers=[recorder, hearer]):
        recorded = run(anatomy.model, inputs, **anatomy.options)[0]
    stream, _ = recorder.recorded()
    heard, crossing = (list(hearer.kept.get(name, ())) for name in ("weights", "cross weights"))
    lines = [
        certify.topology_line(anatomy, seen),
        certify.states_line(stream, anatomy, seen),
        certify.logits_line(anatomy, inputs, recorded, off),
        *certify.attention_lines(anatomy, seen, heard, _is_causal(anatomy, batch, inputs), inputs.get(batch.mask_name)),
        certify.heads_line(anatomy, seen),
        *([] if batch.source is None else cross_lines(anatomy, seen, crossing, inputs)),
        _lens_line(anatomy, stream, inputs, recorded),
    ]
    more = (
        certify.head_line(anatomy, recorded),
        certify.virtual_line(anatomy),
        certify.sphere_line(anatomy, seen),
    )
    return [*lines, *(line for line in more if line is not None)]


def _lens_line(anatomy: Anatomy, stream: ResidualStream, inputs: dict[str, Tensor], wanted: Tensor) -> Line:
    """The last state, put back, gives the model's output."""
    depth = anatomy.depths.last
    put = PutState(depth, stream.at(depth), anatomy)
    with watching(anatomy, [put], skip=put.skip):
        found = run(anatomy.model, inputs, **anatomy.options)[0]
    off = float((found - wanted).abs().max() / wanted.abs().max())
    says = "the last state as it was written down gives the model's output"
    return Line.held("lens", off, certify.bound(wanted.dtype, inside=True), says, ("lens", "resume"))


def _visible_in(batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
    """Which tokens of a batch are seen by inputs that have its names."""
    mask = inputs.get(batch.mask_name)
    return torch.ones_like(inputs[batch.ids_name], dtype=torch.bool) if mask is None else mask.bool()


def _is_causal(anatomy: Anatomy, batch: Batch, inputs: dict[str, Tensor]) -> bool | None:
    """Whether another last token leaves the last states before it as they were, in the untouched model; None where that
    cannot be asked, or where another first token makes no difference to the later ones either. Padding is not asked.
    """
    if batch.ids_name not in inputs:
        return None
    stacks = stacks_of(anatomy.model)
    options = no_cache(anatomy.model)
    size = vocabulary_size(anatomy.model if stacks is None else stacks.decoder)
    ids, visible = inputs[batch.ids_name], _visible_in(batch, inputs)
    n = ids.shape[1]
    first, last = visible.int().argmax(1, keepdim=True), n - 1 - visible.flip(1).int().argmax(1, keepdim=True)
    if not bool((first < last).any()):
        return None
    once = _last_states(anatomy.model, inputs, options)

    def moved(at: Tensor) -> float:
        """How far the other tokens' last states go when the tokens number ``at`` are others."""
        other = ids.scatter(1, at, (ids.gather(1, at) + 1) % size)
        twice = _last_states(anatomy.model, inputs | {batch.ids_name: other}, options)
        others = visible.scatter(1, at, False)
        return float(((once - twice).abs().amax(-1) * others).max() / once.abs().max())

    by_last, by_first = moved(last), moved(first)
    return None if max(by_last, by_first) <= 1e-6 else by_last <= 1e-4 * by_first
