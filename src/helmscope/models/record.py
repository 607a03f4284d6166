"""``record``: a model on some texts, written down and certified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.models import certify
from helmscope.models.anatomy import Anatomy, dissect
from helmscope.models.boxed import FIRST, box_texts
from helmscope.models.certificate import Certificate, Line
from helmscope.models.hooks import held_unwatched, watching
from helmscope.models.keep import Keep, Keeper
from helmscope.models.load import Loaded, loaded_once
from helmscope.models.place import PutState
from helmscope.models.probe import no_cache, run, trunk_of
from helmscope.models.recorder import Recorder
from helmscope.models.recording import Recording
from helmscope.models.runner import Runner
from helmscope.models.texts import Batch, prepare
from helmscope.types import Progress, check_progress, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.probe import LayerProbe
    from helmscope.models.recorder import Stream

PROBED_TEXTS, PROBED_TOKENS = 2, 24


def record(
    model: Any = FIRST,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
    *,
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
    loaded = loaded_once(model, tokenizer=tokenizer, **options)
    with held_unwatched(loaded.model):
        return _recorded(loaded, texts, tokenizer, truncate, batch_size, keep, progress)


@full_precision
def _recorded(
    loaded: Loaded,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor] | None,
    tokenizer: Any,
    truncate: bool,
    batch_size: int,
    keep: Keep,
    progress: Progress | None,
) -> Recording:
    texts = box_texts() if texts is None else texts
    words = tokenizer or loaded.tokenizer
    batch = prepare(loaded.model, texts, words, truncate=truncate, why=loaded.why)
    longest = _longest(batch, loaded.model)
    # before anything else: some families change themselves for good when they see a short text
    trunk = trunk_of(loaded.model)
    untouched = run(trunk, longest, **no_cache(loaded.model))[0]
    anatomy, seen = dissect(loaded.model, _probed(batch, loaded.model))
    with watching(anatomy, observers=[Recorder(anatomy, 1)]):
        off = certify.relative(run(trunk, longest, **anatomy.options)[0], untouched)
    line, forces = certify.mlp_line(anatomy, seen)
    lines = [*_lines(anatomy, seen, batch, off), line]
    lines += [each for each in (_padding_line(batch, anatomy),) if each is not None]
    runner, recorder, keeper = Runner(anatomy, batch, batch_size), Recorder(anatomy, len(batch)), Keeper(keep, anatomy)
    runner.forward(recorder, keeper, progress=progress)
    stream, errors = recorder.recorded()
    lines.append(certify.residual_line(errors, loaded.model.dtype))
    lines.append(certify.finite_line(stream.radius))
    if loaded.origin.note is not None:
        lines.append(Line("files", None, loaded.origin.note))
    certificate = Certificate(tuple(lines))
    return Recording(runner, stream, certificate, loaded.origin, forces, kept=keeper.kept, tokenizer=words)


def _probed(batch: Batch, model: Any) -> dict[str, Tensor]:
    """A few tokens of the shortest and the longest text, on the model's device; images whole."""
    device = next(model.parameters()).device
    if "input_ids" not in batch.inputs:
        return batch.rows(slice(0, PROBED_TEXTS)).to(device)
    rows, begin = sorted({0, len(batch) - 1}), 0
    if batch.visible is not None:
        lengths = batch.visible.sum(-1)
        rows = sorted({int(lengths.argmin()), int(lengths.argmax())})
        n = batch.visible.shape[1]  # padding that was left on the left is passed over
        begin = min(int(batch.visible[rows].int().argmax(-1).max()), max(0, n - PROBED_TOKENS))
    window = slice(begin, begin + PROBED_TOKENS)
    return {name: value[rows, window].to(device) for name, value in batch.inputs.items()}


def _longest(batch: Batch, model: Any) -> dict[str, Tensor]:
    """The longest text, whole, on the model's device."""
    row = 0 if batch.visible is None else int(batch.visible.sum(-1).argmax())
    return batch.rows(slice(row, row + 1)).to(next(model.parameters()).device)


def _padding_line(batch: Batch, anatomy: Anatomy) -> Line | None:
    """Where padding was moved to the right, the last states of the text that had most of it against what the model
    gives for the inputs as they came.
    """
    if batch.given is None or batch.visible is None:
        return None
    model, options = trunk_of(anatomy.model), no_cache(anatomy.model)
    device = next(anatomy.model.parameters()).device
    came = batch.given["attention_mask"].bool()
    row = int(came.int().argmax(-1).argmax())
    one = slice(row, row + 1)
    given = run(model, {name: value[one].to(device) for name, value in batch.given.items()}, **options)[0]
    moved = run(model, batch.rows(one).to(device), **options)[0]
    off = certify.relative(moved[batch.visible[one]], given[came[one]])
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
    heard = list(hearer.kept.get("weights", ()))
    lines = [
        certify.topology_line(anatomy, seen),
        certify.states_line(stream, anatomy, seen),
        certify.logits_line(anatomy, inputs, recorded, off),
        *certify.attention_lines(anatomy, seen, heard, _is_causal(anatomy, inputs), _visible(inputs)),
        certify.heads_line(anatomy, seen),
        _lens_line(anatomy, stream, inputs, recorded),
    ]
    more = (
        certify.head_line(anatomy, recorded),
        certify.virtual_line(anatomy),
        certify.sphere_line(anatomy, seen),
    )
    return [*lines, *(line for line in more if line is not None)]


def _lens_line(anatomy: Anatomy, stream: Stream, inputs: dict[str, Tensor], wanted: Tensor) -> Line:
    """The last state, put back, gives the model's output."""
    depth = 2 * len(anatomy.layers)
    put = PutState(depth, stream.at(depth), anatomy)
    with watching(anatomy, [put], skip=put.skip):
        found = run(anatomy.model, inputs, **anatomy.options)[0]
    off = float((found - wanted).abs().max() / wanted.abs().max())
    says = "the last state as it was written down gives the model's output"
    return Line.held("lens", off, certify.bound(wanted.dtype, inside=True), says, ("lens", "resume"))


def _visible(inputs: dict[str, Tensor]) -> Tensor | None:
    return inputs["attention_mask"].bool() if "attention_mask" in inputs else None


def _is_causal(anatomy: Anatomy, inputs: dict[str, Tensor]) -> bool | None:
    """Whether another last token leaves the last states before it as they were, in the untouched model; None where that
    cannot be asked, or where another first token makes no difference to the later ones either. Padding is not asked.
    """
    if "input_ids" not in inputs:
        return None
    trunk, options = trunk_of(anatomy.model), no_cache(anatomy.model)
    size = int(anatomy.model.get_input_embeddings().num_embeddings)
    ids = inputs["input_ids"]
    visible, n = _visible(inputs), ids.shape[1]
    visible = torch.ones_like(ids).bool() if visible is None else visible
    first, last = visible.int().argmax(1, keepdim=True), n - 1 - visible.flip(1).int().argmax(1, keepdim=True)
    if not bool((first < last).any()):
        return None
    once: Tensor = run(trunk, inputs, **options)[0]

    def moved(at: Tensor) -> float:
        """How far the other tokens' last states go when the tokens number ``at`` are others."""
        other = ids.scatter(1, at, (ids.gather(1, at) + 1) % size)
        twice: Tensor = run(trunk, inputs | {"input_ids": other}, **options)[0]
        others = visible.scatter(1, at, False)
        return float(((once - twice).abs().amax(-1) * others).max() / once.abs().max())

    by_last, by_first = moved(last), moved(first)
    return None if max(by_last, by_first) <= 1e-6 else by_last <= 1e-4 * by_first
