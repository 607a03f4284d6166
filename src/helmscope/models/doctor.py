"""What can be measured on a model, and what it would cost, before anything is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.load import Loaded, ensure_loaded
from helmscope.models.probe import vocabulary_size
from helmscope.models.record import record
from helmscope.models.recorder import Recorder
from helmscope.models.texts import Batch, context_length
from helmscope.types import counted, whole_number

if TYPE_CHECKING:
    from helmscope.models.certificate import Certificate
    from helmscope.models.load import Origin
    from helmscope.models.recording import Recording

IMAGE = 64  # pixels a side, where the model does not say
TEXTS = (
    "The lighthouse keeper counted the waves until the storm let go of the coast.",
    "Two rivers meet below the old mill, and the slower one keeps its colour for a mile.",
    "She wrote the number on the wall, closed the door, and asked whether anybody had believed it.",
)


@dataclass(frozen=True)
class Diagnosis:
    """The certificate on a few sentences, and the cost of recording ``texts`` texts of ``tokens`` tokens: seconds, and
    bytes of the trajectory, of the weights of the model, and of one layer's attention while it passes. ``asked`` are
    the tokens that were asked for, where the context holds fewer; ``tried`` says what the certificate was made on.
    """

    origin: Origin
    certificate: Certificate
    texts: int
    tokens: int
    asked: int
    tried: str
    seconds: float
    trajectory_bytes: int
    model_bytes: int
    passing_bytes: int
    encoder: Certificate | None = None  # of an encoder-decoder model

    @property
    def ok(self) -> bool:
        """Whether no check failed, of the encoder either."""
        return self.certificate.ok and (self.encoder is None or self.encoder.ok)

    def __str__(self) -> str:
        where = f"{self.origin.name} ({self.origin.family}, {self.origin.dtype}, {self.origin.device})"
        cut = f" ({self.asked} are cut to the model's context)" if self.asked > self.tokens else ""
        cost = (
            f"to record {counted(self.texts, 'text')} of {counted(self.tokens, 'token')}{cut}: about "
            f"{self.seconds:.3g} s and {(self.trajectory_bytes + self.passing_bytes) / 1e6:,.0f} MB beside the model's "
            f"{self.model_bytes / 1e6:,.0f} MB"
        )
        encoder = "" if self.encoder is None else f"its encoder\n{self.encoder}\n"
        return f"{where}\ntried on {self.tried}\n{self.certificate}\n{encoder}{cost}"


def diagnose(
    model: Any, *, texts: int = 128, tokens: int = 128, batch_size: int = 16, tokenizer: Any = None, **options: Any
) -> Diagnosis:
    """Certify a model on a few sentences, and say what recording ``texts`` texts of ``tokens`` tokens would take.

    The time is that of one recorded forward of a text of that length, and so a guess for a batch. A model without a
    tokenizer is tried on random tokens, one that sees on random images. ``options`` are those of ``load``.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> diagnose(model, texts=10, tokens=16).trajectory_bytes
    32000
    """
    for name, number in (("texts", texts), ("tokens", tokens), ("batch_size", batch_size)):
        whole_number(name, number, at_least=1)
    loaded = ensure_loaded(model, tokenizer=tokenizer, **options)
    limit = context_length(loaded.model)
    asked, tokens = tokens, tokens if limit is None else min(tokens, limit)
    subject, tried = _subject(loaded)
    recording = record(loaded, subject)
    stream, encoder = recording.residual, recording.encoder
    stacks = [recording.anatomy, *([] if encoder is None else [encoder.anatomy])]
    seconds = _seconds(recording, tokens)
    size = stream.direction.element_size()
    heads = getattr(loaded.model.config, "num_attention_heads", 1) or 1
    return Diagnosis(
        origin=loaded.origin,
        certificate=recording.certificate,
        texts=texts,
        tokens=tokens,
        asked=asked,
        tried=tried,
        seconds=seconds * texts,
        trajectory_bytes=sum((each.depths.last + 1) * texts * tokens * (each.dim + 2) * size for each in stacks),
        model_bytes=sum(value.numel() * value.element_size() for value in loaded.model.parameters()),
        passing_bytes=2 * min(batch_size, texts) * heads * tokens * tokens * size,
        encoder=None if encoder is None else encoder.certificate,
    )


def _subject(loaded: Loaded) -> tuple[Any, str]:
    """Sentences, random tokens or random images, and which of them."""
    generator = torch.Generator("cpu").manual_seed(0)
    model = loaded.model
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = getattr(model.config, "image_size", None) or IMAGE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return torch.randn(
            2, model.config.num_channels, height, width, generator=generator, device="cpu"
        ), "random images"
    if loaded.tokenizer is not None:
        return list(TEXTS), f"sentences by {type(loaded.tokenizer).__name__}"
    most = min(24, context_length(model) or 24)
    why = "there is no tokenizer" if loaded.why is None else f"the tokenizer could not be read ({loaded.why})"
    ids = torch.randint(vocabulary_size(model), (3, most), generator=generator, device="cpu")
    return ids, f"random tokens: {why}"


def _seconds(recording: Recording, tokens: int) -> float:
    """Of one recorded text, by the faster of two forwards."""
    inputs = recording.batch.rows(slice(0, 1)).inputs
    names = [side.ids_name for side in (recording.batch, recording.batch.source) if side is not None]
    if names[0] in inputs:
        count = vocabulary_size(recording.anatomy.model)
        drawn = torch.Generator("cpu").manual_seed(0)
        inputs = {name: torch.randint(count, (1, tokens), generator=drawn, device="cpu") for name in names}
    alone, lasted = replace(recording.runner, batch=Batch(inputs), encoder=None), []
    for _ in range(2):
        begun = time.perf_counter()
        alone.forward(Recorder(recording.anatomy, 1))
        lasted.append(time.perf_counter() - begun)
    return min(lasted)
