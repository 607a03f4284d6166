"""``record``: a model on some texts, written down and certified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from helmscope.models import certify
from helmscope.models.anatomy import Anatomy, dissect
from helmscope.models.boxed import FIRST, box_texts
from helmscope.models.certificate import Certificate, Line
from helmscope.models.keep import Keep, Keeper
from helmscope.models.load import Loaded, loaded_once
from helmscope.models.place import Place
from helmscope.models.probe import no_cache, run, trunk_of
from helmscope.models.recorder import Recorder
from helmscope.models.recording import Recording
from helmscope.models.texts import Batch, prepare
from helmscope.models.watch import held_unwatched, watching
from helmscope.types import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.probe import LayerProbe

PROBED_TEXTS, PROBED_TOKENS = 2, 24


def record(
    model: Any = FIRST,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
    *,
    tokenizer: Any = None,
    truncate: bool = False,
    batch_size: int = 16,
    keep: Keep = Keep.NOTHING,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Recording:
    """Run a model on texts and write its residual stream down, half-layer by half-layer.

    ``model`` is one in the box ("A", "B", "tied"), a Hub id, a folder, a model in memory or a ``Loaded``; ``options``
    are those of ``load``. ``texts`` are strings, token ids (batch, n), images, or a mapping of the forward's inputs,
    such as a tokenizer gives; by default the texts in the box. Padding and, where the tokenizer is known, special
    tokens are masked: they take part, but no observable counts them. Padding on the left is moved to the right, and
    masks such as ``tokens=`` and ``keys=`` follow ``recording.batch``.

    Attention runs eager, to the bit; nothing of size n x n is kept unless ``keep`` asks for it. Every recording has a
    certificate, and a check that fails blocks what depends on it. Refused while a change is attached to the model:
    ``recording.under`` records one.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4]]))
    >>> recording.certificate.ok, recording.trajectory.states.shape
    (True, torch.Size([5, 1, 4, 8]))
    """
    whole_number("batch_size", batch_size, at_least=1)
    loaded = loaded_once(model, tokenizer=tokenizer, **options)
    with held_unwatched(loaded.model):
        return _recorded(loaded, texts, tokenizer, truncate, batch_size, keep, progress)


def _recorded(
    loaded: Loaded,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor] | None,
    tokenizer: Any,
    truncate: bool,
    batch_size: int,
    keep: Keep,
    progress: Callable[[int, int], None] | None,
) -> Recording:
    texts = box_texts() if texts is None else texts
    batch = prepare(loaded.model, texts, tokenizer or loaded.tokenizer, truncate=truncate, why=loaded.why)
    longest = _longest(batch, loaded.model)
    # before anything else: some families change themselves for good when they see a short text
    trunk = trunk_of(loaded.model)
    untouched = run(trunk, longest, **no_cache(loaded.model))[0]
    anatomy, seen = dissect(loaded.model, _probed(batch, loaded.model))
    with watching(anatomy, Recorder(anatomy, 1)):
        off = certify.relative(run(trunk, longest, **anatomy.options)[0], untouched)
    line, forces = certify.mlp_line(anatomy, seen)
    recorder = Recorder(anatomy, len(batch))
    blank = Recording(anatomy, batch, None, Certificate(()), loaded.origin, forces, batch_size)  # type: ignore[arg-type]
    keeper = Keeper(keep, anatomy)
    blank.forward(recorder, keeper, progress=progress)
    assert recorder.stream is not None
    assert recorder.errors is not None
    lines = [
        *_lines(anatomy, seen, batch, off),
        certify.residual_line(recorder.errors, loaded.model.dtype),
        certify.finite_line(recorder.stream.radius),
        line,
    ]
    if loaded.origin.note is not None:
        lines.append(Line("files", None, loaded.origin.note))
    return replace(blank, stream_=recorder.stream, certificate=Certificate(tuple(lines)), kept=keeper.kept)


def _probed(batch: Batch, model: Any) -> dict[str, Tensor]:
    """A few tokens of the shortest and the longest text, on the model's device; images whole."""
    device = next(model.parameters()).device
    if "input_ids" not in batch.inputs:
        return batch.rows(slice(0, PROBED_TEXTS)).to(device)
    if "attention_mask" in batch.inputs:
        lengths = batch.inputs["attention_mask"].sum(-1)
        rows = sorted({int(lengths.argmin()), int(lengths.argmax())})
    else:
        rows = sorted({0, len(batch) - 1})
    return {name: value[rows, :PROBED_TOKENS].to(device) for name, value in batch.inputs.items()}


def _longest(batch: Batch, model: Any) -> dict[str, Tensor]:
    """The longest text, whole, on the model's device."""
    row = int(batch.inputs["attention_mask"].sum(-1).argmax()) if "attention_mask" in batch.inputs else 0
    return batch.rows(slice(row, row + 1)).to(next(model.parameters()).device)


def _lines(anatomy: Anatomy, seen: list[LayerProbe], batch: Batch, off: float) -> list[Line]:
    """All checks on the probed tokens."""
    inputs = _probed(batch, anatomy.model)
    recorder = Recorder(anatomy, len(seen[0].pre))
    hearer = Keeper(Keep.WEIGHTS, anatomy)
    with watching(anatomy, recorder, hearer):
        recorded = run(anatomy.model, inputs, **anatomy.options)[0]
    assert recorder.stream is not None
    heard = list(hearer.kept.get("weights", ()))
    lines = [
        certify.topology_line(anatomy, seen),
        certify.states_line(recorder.stream, anatomy, seen),
        certify.logits_line(anatomy, inputs, recorded, off),
        *certify.attention_lines(anatomy, seen, heard, _is_causal(anatomy, inputs)),
        certify.heads_line(anatomy, seen),
        _lens_line(anatomy, recorder, inputs, recorded),
    ]
    more = (certify.head_line(anatomy, recorded), certify.virtual_line(anatomy))
    return [*lines, *(line for line in more if line is not None)]


def _lens_line(anatomy: Anatomy, recorder: Recorder, inputs: dict[str, Tensor], wanted: Tensor) -> Line:
    """The last state, put back, gives the model's output."""
    assert recorder.stream is not None
    depth = 2 * len(anatomy.layers)
    place = Place(depth, recorder.stream.at(depth), anatomy)
    with watching(anatomy, place, skip=place.skip):
        found = run(anatomy.model, inputs, **anatomy.options)[0]
    off = float((found - wanted).abs().max() / wanted.abs().max())
    says = "the last state as it was written down gives the model's output"
    return Line.held("lens", off, certify.bound(wanted.dtype, inside=True), says, ("lens", "resume"))


def _is_causal(anatomy: Anatomy, inputs: dict[str, Tensor]) -> bool | None:
    """Whether another last token leaves the last states before it as they were, in the untouched model; None where that
    cannot be asked, or where another first token makes no difference to the later ones either.
    """
    if "input_ids" not in inputs or inputs["input_ids"].shape[1] < 2:
        return None
    trunk, options = trunk_of(anatomy.model), no_cache(anatomy.model)
    size = int(anatomy.model.get_input_embeddings().num_embeddings)

    once: Tensor = run(trunk, inputs, **options)[0]

    def moved(at: int) -> Tensor:
        """How far the last states go when one token is another."""
        other = inputs["input_ids"].clone()
        other[:, at] = (other[:, at] + 1) % size
        twice: Tensor = run(trunk, inputs | {"input_ids": other}, **options)[0]
        return (once - twice).abs().amax((0, 2)) / once.abs().max()

    last, first = float(moved(-1)[:-1].max()), float(moved(0)[1:].max())
    return None if max(last, first) <= 1e-6 else last <= 1e-4 * first
