"""The diagnosis of a model: which checks hold on it, and what recording it would cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.load import LoadedModel, check_options, ensure_loaded
from helmscope.models.probe import vocabulary_size
from helmscope.models.record import record
from helmscope.models.recorder import Recorder
from helmscope.models.texts import Batch, context_length
from helmscope.runs.bar import progress_reporting
from helmscope.types import check_integer, pluralized
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from helmscope.models.certificate import Certificate
    from helmscope.models.load import ModelOrigin
    from helmscope.models.recording import Recording

IMAGE = 64  # pixels per side, if the configuration does not give the size
TEXTS = (
    "The lighthouse keeper counted the waves until the storm let go of the coast.",
    "Two rivers meet below the old mill, and the slower one keeps its colour for a mile.",
    "She wrote the number on the wall, closed the door, and asked whether anybody had believed it.",
)


@dataclass(frozen=True)
class Diagnosis(ConciseRepr):
    """The certificate of a model on a few sentences, and the cost of recording ``texts`` texts of ``text_length``
    tokens.

    The cost is ``seconds`` of time, and bytes of memory for the trajectory, for the weights of the model, and for the
    attention of one layer during the run (``passing_bytes``). ``asked`` is the requested length in tokens, of which
    ``text_length`` fit into the model's context; ``tried`` describes the inputs of the certificate. Prints as a report.
    """

    origin: ModelOrigin
    certificate: Certificate
    texts: int
    text_length: int
    asked: int
    tried: str
    seconds: float
    trajectory_bytes: int
    model_bytes: int
    passing_bytes: int
    encoder: Certificate | None = None  # for an encoder-decoder model

    @property
    def ok(self) -> bool:
        """Whether no check failed, including those of an encoder."""
        return self.certificate.ok and (self.encoder is None or self.encoder.ok)

    def __str__(self) -> str:
        where = f"{self.origin.name} ({self.origin.family}, {self.origin.dtype}, {self.origin.device})"
        cut = f" ({self.asked} are truncated to the model's context)" if self.asked > self.text_length else ""
        cost = (
            f"to record {pluralized(self.texts, 'text')} of {pluralized(self.text_length, 'token')}{cut}: about "
            f"{self.seconds:.3g} s and {(self.trajectory_bytes + self.passing_bytes) / 1e6:,.0f} MB plus the model's "
            f"{self.model_bytes / 1e6:,.0f} MB"
        )
        encoder = "" if self.encoder is None else f"encoder\n{self.encoder}\n"
        return f"{where}\nchecked on {self.tried}\n{self.certificate}\n{encoder}{cost}"


@progress_reporting(None, "examining a model")
def diagnose(
    model: Any,
    *,
    text_count: int = 128,
    text_length: int = 128,
    batch_size: int = 16,
    tokenizer: Any = None,
    **options: Any,
) -> Diagnosis:
    """Certify a model on a few sentences and estimate the cost of recording ``text_count`` texts of
    ``text_length`` tokens.

    The time is extrapolated from one text of that length, so it is a rough estimate for batches. A model without a
    tokenizer is run on random tokens, a vision model on random images. ``model`` is anything that ``load`` accepts, and
    ``options`` are those of ``load``. Raises ``HelmscopeError`` if the model cannot be loaded or run.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> diagnose(model, text_count=10, text_length=16).trajectory_bytes
    32000
    """
    for name, number in (("text_count", text_count), ("text_length", text_length), ("batch_size", batch_size)):
        check_integer(name, number, at_least=1)
    check_options(options, diagnose)
    loaded = ensure_loaded(model, tokenizer=tokenizer, **options)
    limit = context_length(loaded.model)
    asked, text_length = text_length, text_length if limit is None else min(text_length, limit)
    inputs, tried = _trial_inputs(loaded)
    recording = record(loaded, inputs)
    stream, encoder = recording.residual, recording.encoder
    stacks = [recording.anatomy, *([] if encoder is None else [encoder.anatomy])]
    seconds = _seconds_per_text(recording, text_length)
    size = stream.direction.element_size()
    heads = getattr(loaded.model.config, "num_attention_heads", 1) or 1
    return Diagnosis(
        origin=loaded.origin,
        certificate=recording.certificate,
        texts=text_count,
        text_length=text_length,
        asked=asked,
        tried=tried,
        seconds=seconds * text_count,
        trajectory_bytes=sum(
            (stack.depths.last + 1) * text_count * text_length * (stack.dim + 2) * size for stack in stacks
        ),
        model_bytes=sum(value.numel() * value.element_size() for value in loaded.model.parameters()),
        passing_bytes=2 * min(batch_size, text_count) * heads * text_length * text_length * size,
        encoder=None if encoder is None else encoder.certificate,
    )


def _trial_inputs(loaded: LoadedModel) -> tuple[Any, str]:
    """Sentences, random tokens or random images, with a description of which."""
    generator = torch.Generator("cpu").manual_seed(0)
    model = loaded.model
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = getattr(model.config, "image_size", None) or IMAGE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return torch.randn(
            2, model.config.num_channels, height, width, generator=generator, device="cpu"
        ), "random images"
    if loaded.tokenizer is not None:
        return list(TEXTS), f"sentences tokenized by {type(loaded.tokenizer).__name__}"
    most = min(24, context_length(model) or 24)
    reason = (
        "there is no tokenizer"
        if loaded.tokenizer_error is None
        else f"the tokenizer could not be read ({loaded.tokenizer_error})"
    )
    ids = torch.randint(vocabulary_size(model), (3, most), generator=generator, device="cpu")
    return ids, f"random tokens: {reason}"


def _seconds_per_text(recording: Recording, text_length: int) -> float:
    """The time to record one text: the faster of two forward passes."""
    inputs = recording.batch.rows(slice(0, 1)).inputs
    names = [side.ids_name for side in (recording.batch, recording.batch.source) if side is not None]
    if names[0] in inputs:
        count = vocabulary_size(recording.anatomy.model)
        generator = torch.Generator("cpu").manual_seed(0)
        inputs = {name: torch.randint(count, (1, text_length), generator=generator, device="cpu") for name in names}
    runner, durations = replace(recording.runner, batch=Batch(inputs), encoder=None), []
    for _ in range(2):
        start = time.perf_counter()
        runner.forward(Recorder(recording.anatomy, 1))
        durations.append(time.perf_counter() - start)
    return min(durations)
