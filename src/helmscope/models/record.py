"""``record``: run a model on texts, store its residual stream, and certify the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.models import certify
from helmscope.models.anatomy import Anatomy, find_anatomy
from helmscope.models.bundled_models import FIRST
from helmscope.models.certificate import Certificate, Line
from helmscope.models.certify_cross import cross_lines
from helmscope.models.hooks import hooked, locked_unedited
from helmscope.models.keep import Keeper, KeptTensors
from helmscope.models.load import LoadedModel, check_options, ensure_loaded
from helmscope.models.paragraphs import texts_for
from helmscope.models.probe import base_model_of, no_cache, output_of, run, vocabulary_size
from helmscope.models.put_state import PutState
from helmscope.models.recorder import Recorder
from helmscope.models.recording import Recording
from helmscope.models.runner import Runner
from helmscope.models.stacks import stacks_of
from helmscope.models.tap import share_lock
from helmscope.models.targets import prepare_inputs
from helmscope.models.texts import Batch
from helmscope.runs.bar import name_phase, shows_progress
from helmscope.types import check_integer, check_progress

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.probe import LayerTrace
    from helmscope.models.recorder import ResidualStream
    from helmscope.types.progress import ProgressOption

PROBED_TEXTS, PROBED_TOKENS = 2, 24


@shows_progress("recording")
def record(
    model: Any = FIRST,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
    *,
    targets: Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
    tokenizer: Any = None,
    truncate: bool = False,
    batch_size: int = 16,
    keep: KeptTensors = KeptTensors.NOTHING,
    progress: ProgressOption = None,
    **options: Any,
) -> Recording:
    """Run a model on texts and record its residual stream, half-layer by half-layer.

    ``model`` is a bundled one ("A", "B", "tied"), a Hub id, a folder, a model in memory or a ``LoadedModel``;
    ``options`` are those of ``load``. ``texts`` are strings, token ids (batch, n), images, or a mapping of inputs of
    the model's forward pass, such as a tokenizer returns; by default ``story_texts()`` for a bundled model and
    ``paragraph_texts()`` for any other. Padding and, if the tokenizer is known, special tokens take part in the forward
    pass but have weight 0 in statistics. Padding on the left is moved to the right, and masks such as ``tokens=`` and
    ``keys=`` refer to the tokens as in ``recording.batch``; masked tokens inside a text are not moved.

    Attention is computed by the model's own eager code, bit for bit; n x n matrices are stored only on request
    (``keep``). Every recording has a certificate, and a failed check blocks what depends on it. Raises HelmscopeError
    if an edit is attached to the model: ``recording.under`` records the effect of edits. ``progress`` is called with
    the share of the texts done.

    For an encoder-decoder model (T5, BART) the result is the recording of the decoder, whose layers have three
    sub-steps: attention, cross-attention, MLP; ``recording.encoder`` is that of the encoder on the texts. The decoder
    reads ``targets``, one text or row of ids per text, shifted right after its start token as in training; by default
    they are the texts themselves. A mapping may contain ``decoder_input_ids``, which are not shifted, and
    ``decoder_attention_mask``.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> recording.certificate.ok, recording.trajectory.states.shape
    (True, torch.Size([5, 1, 4, 8]))
    """
    check_integer("batch_size", batch_size, at_least=1)
    check_progress(progress)
    check_options(options, record)
    name_phase(f"loading {model}" if isinstance(model, str) else "loading a model")
    loaded = ensure_loaded(model, tokenizer=tokenizer, **options)
    stacks = stacks_of(loaded.model)
    if stacks is not None:
        share_lock(stacks.encoder, loaded.model)
    with locked_unedited(loaded.model):
        texts = texts_for(loaded) if texts is None else texts
        loaded = replace(loaded, tokenizer=tokenizer or loaded.tokenizer)
        batch = prepare_inputs(
            loaded.model, texts, loaded.tokenizer, targets=targets, truncate=truncate, why=loaded.tokenizer_error
        )
        if stacks is None or batch.source is None:
            return _record_and_certify(loaded, batch, batch_size, keep, progress)
        origin = replace(loaded.origin, family=f"{loaded.origin.family} encoder")
        loaded_encoder = replace(loaded, model=stacks.encoder, origin=origin)
        encoder = _record_and_certify(loaded_encoder, batch.source, batch_size, keep, None)
        return _record_and_certify(loaded, batch, batch_size, keep, progress, encoder)


@full_precision
def _record_and_certify(
    loaded: LoadedModel,
    batch: Batch,
    batch_size: int,
    keep: KeptTensors,
    progress: ProgressOption,
    encoder: Recording | None = None,
) -> Recording:
    name_phase("checking")
    longest = _longest_text(batch, loaded.model)
    # before any other forward pass: some families change permanently when they read a short text
    untouched = _last_states(loaded.model, longest, no_cache(loaded.model))
    prompts, first_token = _probed_tokens(batch)
    inputs = _probe_inputs(batch, loaded.model)
    anatomy, probes = find_anatomy(loaded.model, inputs, prompts=prompts, first_token=first_token)
    with hooked(anatomy, observers=[Recorder(anatomy, 1)]):
        error = certify.relative(_last_states(loaded.model, longest, anatomy.options), untouched)
    mlp_line, forces = certify.mlp_line(anatomy, probes)
    lines = [*_probe_lines(anatomy, probes, batch, error), mlp_line]
    padding_line = _padding_line(batch, anatomy)
    lines += [] if padding_line is None else [padding_line]
    runner = Runner(anatomy, batch, batch_size, encoder=None if encoder is None else encoder.runner)
    recorder, keeper = Recorder(anatomy, len(batch)), Keeper(keep, anatomy)
    name_phase("recording")
    runner.forward(recorder, keeper, progress=progress)
    stream, errors = recorder.recorded()
    lines.append(certify.residual_line(errors, loaded.model.dtype))
    lines.append(certify.finite_line(stream.radius, anatomy.depths))
    if loaded.origin.note is not None:
        lines.append(Line("files", None, loaded.origin.note))
    certificate = Certificate(tuple(lines))
    stream.hide(batch.visible)
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
    """The states (batch, n, d) that the model, or the decoder of an encoder-decoder model, passes to its head."""
    stacks = stacks_of(model)
    if stacks is None:
        states: Tensor = run(base_model_of(model), inputs, **options)[0]
        return states
    with output_of(stacks.decoder) as outputs:
        run(base_model_of(model), inputs, **options)
    return outputs[-1]


def _probe_inputs(batch: Batch, model: Any) -> dict[str, Tensor]:
    """A few tokens of the shortest and the longest text, or two whole images, on the model's device."""
    device = next(model.parameters()).device
    if batch.ids_name not in batch.inputs:
        return batch.rows(slice(0, PROBED_TEXTS)).to(device)
    rows, _ = _probed_tokens(batch)
    sides = [side for side in (batch, batch.source) if side is not None]
    windows = {name: _probe_window(side, rows) for side in sides for name in (side.ids_name, side.mask_name)}
    default = windows[batch.ids_name]
    return {name: value[rows, windows.get(name, default)].to(device) for name, value in batch.inputs.items()}


def _probed_tokens(batch: Batch) -> tuple[list[int], int]:
    """The rows that are probed, and the first probed token of them."""
    if batch.ids_name not in batch.inputs:
        return list(range(min(PROBED_TEXTS, len(batch)))), 0
    sides = [side for side in (batch, batch.source) if side is not None]
    rows = sorted({row for side in sides for row in _shortest_and_longest(side)})
    return rows, _probe_window(batch, rows).start


def _shortest_and_longest(batch: Batch) -> tuple[int, int]:
    """The rows of the shortest and the longest text; the first and the last if all have the same length."""
    if batch.visible is None:
        return 0, len(batch) - 1
    lengths = batch.visible.sum(-1)
    return int(lengths.argmin()), int(lengths.argmax())


def _probe_window(batch: Batch, rows: list[int]) -> slice:
    """The positions of the tokens to probe, after any padding that remains on the left."""
    begin = 0
    if batch.visible is not None:
        n = batch.visible.shape[1]
        begin = min(int(batch.visible[rows].int().argmax(-1).max()), max(0, n - PROBED_TOKENS))
    return slice(begin, begin + PROBED_TOKENS)


def _longest_text(batch: Batch, model: Any) -> dict[str, Tensor]:
    """All inputs of the longest text, on the model's device."""
    masks = [side.visible for side in (batch, batch.source) if side is not None and side.visible is not None]
    row = int(torch.stack([mask.sum(-1) for mask in masks]).sum(0).argmax()) if masks else 0
    return batch.rows(slice(row, row + 1)).to(next(model.parameters()).device)


def _padding_line(batch: Batch, anatomy: Anatomy) -> Line | None:
    """If padding was moved to the right, compare the last states of the text that had most of it with those for the
    inputs as passed.
    """
    if batch.given is None:
        return None
    model, options = anatomy.model, no_cache(anatomy.model)
    device = next(anatomy.model.parameters()).device
    visible_as_passed, ids = _visible_in(batch, batch.given), batch.inputs[batch.ids_name]
    masks = [visible_as_passed] + ([] if batch.source is None else [_visible_in(batch.source, batch.given)])
    row = int(torch.stack([mask.int().argmax(-1) for mask in masks]).sum(0).argmax())
    text = slice(row, row + 1)
    as_passed = _last_states(model, {name: value[text].to(device) for name, value in batch.given.items()}, options)
    moved = _last_states(model, batch.rows(text).to(device), options)
    visible = torch.ones_like(ids, dtype=torch.bool) if batch.visible is None else batch.visible
    error = certify.relative(moved[visible[text]], as_passed[visible_as_passed[text]])
    bound = certify.bound(moved.dtype, inside=True)
    if error <= bound:
        return Line("padding", True, "moved from the left to the right, which makes no difference", error, bound)
    says = (
        "moved from the left to the right; for the inputs as passed, the model counts positions from the padding on "
        f"and its states differ by {error:.1e}: pass position_ids to record that"
    )
    return Line("padding", None, says)


def _probe_lines(anatomy: Anatomy, probes: list[LayerTrace], batch: Batch, error: float) -> list[Line]:
    """The lines of all checks on the probed tokens; ``error`` is that of a recorded forward pass of the longest
    text.
    """
    inputs = _probe_inputs(batch, anatomy.model)
    recorder = Recorder(anatomy, len(probes[0].pre))
    keeper = Keeper(KeptTensors.KERNELS, anatomy)
    with hooked(anatomy, observers=[recorder, keeper]):
        outputs = run(anatomy.model, inputs, **anatomy.options)[0]
    stream, _ = recorder.recorded()
    weights, cross_weights = (list(keeper.kept.get(name, ())) for name in ("kernel", "cross kernel"))
    causal, mask = _is_causal(anatomy, batch, inputs), inputs.get(batch.mask_name)
    lines = [
        certify.topology_line(anatomy, probes),
        certify.states_line(stream, anatomy, probes),
        certify.logits_line(anatomy, inputs, outputs, error),
        *certify.attention_lines(anatomy, probes, weights, causal, mask),
        certify.heads_line(anatomy, probes),
        *([] if batch.source is None else cross_lines(anatomy, probes, cross_weights, inputs)),
        _lens_line(anatomy, stream, inputs, outputs),
    ]
    optional = (
        certify.head_line(anatomy, outputs),
        certify.virtual_line(anatomy),
        certify.sphere_line(anatomy, probes),
    )
    return [*lines, *(line for line in optional if line is not None)]


def _lens_line(anatomy: Anatomy, stream: ResidualStream, inputs: dict[str, Tensor], outputs: Tensor) -> Line:
    """Check that the recorded last state, put back into a forward pass, reproduces the model's output."""
    depth = anatomy.depths.last
    put = PutState(depth, stream.at(depth), anatomy)
    with hooked(anatomy, [put], skip=put.skip):
        reproduced = run(anatomy.model, inputs, **anatomy.options)[0]
    error = float((reproduced - outputs).abs().max() / outputs.abs().max())
    says = "the recorded last state reproduces the model's output"
    return Line.held("lens", error, certify.bound(outputs.dtype, inside=True), says, ("lens", "resume"))


def _visible_in(batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
    """The tokens that are visible according to the mask in ``inputs``, which are named as those of the batch."""
    mask = inputs.get(batch.mask_name)
    return torch.ones_like(inputs[batch.ids_name], dtype=torch.bool) if mask is None else mask.bool()


def _is_causal(anatomy: Anatomy, batch: Batch, inputs: dict[str, Tensor]) -> bool | None:
    """Whether attention is causal in the unmodified model: changing the last token leaves the last states before it
    unchanged. None if that cannot be tested, or if changing the first token has no effect on the others either. Padding
    is ignored.
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
    unchanged = _last_states(anatomy.model, inputs, options)

    def effect(positions: Tensor) -> float:
        """The largest relative change of the other tokens' last states when the tokens at ``positions`` change."""
        changed_ids = ids.scatter(1, positions, (ids.gather(1, positions) + 1) % size)
        changed = _last_states(anatomy.model, inputs | {batch.ids_name: changed_ids}, options)
        others = visible.scatter(1, positions, False)
        return float(((unchanged - changed).abs().amax(-1) * others).max() / unchanged.abs().max())

    by_last, by_first = effect(last), effect(first)
    return None if max(by_last, by_first) <= 1e-6 else by_last <= 1e-4 * by_first
