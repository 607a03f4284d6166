"""``Subject``: what a claim is tried on, a model with its texts, untrained twins and two halves of its prompts, or a
simulation.

A model is loaded and recorded once per process for all claims: models, twins and recordings are held in a cache of
bounded size until ``close``. Only the arguments, as plain data, are sent to other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from helmscope.models.bundled_models import FIRST, held_out_texts, is_bundled, local_folder
from helmscope.models.cache import RecordingCache, model_bytes, stream_bytes
from helmscope.models.identity import (
    Prompt,
    as_inputs,
    check_model_arguments,
    checked_prompts,
    hash_of,
    hashed_tensors,
    split_prompts,
    wiring_of,
)
from helmscope.models.paragraphs import texts_for
from helmscope.models.premise import Premise, Simulated
from helmscope.models.subject_source import cache_key, files_changed, location_of, plain_arguments
from helmscope.runs.bar import progress_reporting
from helmscope.types import HelmscopeError, check_integer, one_line_repr, pluralized

if TYPE_CHECKING:
    from types import TracebackType

    from helmscope.models.load import LoadedModel
    from helmscope.models.recording import Recording
    from helmscope.models.texts import Batch

T = TypeVar("T")
TWINS = 5
PROBED = 2  # texts that are recorded to check the premises of a claim
_CACHE = RecordingCache()


@dataclass(frozen=True, init=False, repr=False)
class Subject:
    """A model on trial: a bundled one ("A", "B", "tied"), a folder, a Hub id, or a model in memory, which must not
    change while it is on trial. For an encoder-decoder model, its decoder is on trial, with the texts as its targets.
    ``Subject.simulation()`` is the subject of a claim that needs no model.

    ``texts`` are strings, or rows of token ids of one length; by default ``story_texts()`` for "A", "B" and "tied",
    and ``paragraph_texts()`` otherwise. ``tokenizer``, ``loops``, ``revision`` and ``device`` are those of ``load``,
    ``truncate`` that of ``record``. Making a subject loads nothing: arguments of the wrong type raise HelmscopeError at
    once, an unusable model or text only when it is first needed.

    >>> subject = Subject("A", ["Once upon a time", "The cat sat", "One day a dog", "Tom was sad"])
    >>> subject
    <Subject A: 4 texts>
    >>> sorted(subject.selection + subject.test) == sorted(subject.texts)
    True
    >>> subject.unmet_premise(full=True)
    'the claim needs attention that is bidirectional, but that of A is causal'
    """

    model: Any
    asked_texts: tuple[Prompt, ...] | None
    asked_tokenizer: Any
    loops: int | None
    revision: str | None
    device: str | None
    truncate: bool

    def __init__(
        self,
        model: Any = FIRST,
        texts: Any = None,
        *,
        tokenizer: Any = None,
        loops: int | None = None,
        revision: str | None = None,
        device: str | None = None,
        truncate: bool = False,
    ) -> None:
        check_model_arguments(model, loops=loops, revision=revision, device=device, truncate=truncate)
        fields = {
            "model": model,
            "asked_texts": None if texts is None else checked_prompts(texts),
            "asked_tokenizer": tokenizer,
            "loops": None if loops is None else check_integer("loops", loops, at_least=1),
            "revision": revision,
            "device": device,
            "truncate": truncate,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def simulation(cls) -> Subject:
        """The subject of claims that are tried on a simulation, without a model.

        >>> Subject.simulation().identity
        'simulation'
        """
        return cls(Simulated.HERE)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Subject:
        """Rebuild the subject that ``as_data`` describes.

        >>> Subject.from_data(Subject("tied", loops=3).as_data()) == Subject("tied", loops=3)
        True
        """
        return cls.simulation() if data["model"] is None else cls(**data)

    def as_data(self) -> dict[str, Any]:
        """The arguments of this subject as plain data, from which another process rebuilds it. Raises HelmscopeError if
        its model or tokenizer exists in memory only.

        >>> Subject("tied", ["Once upon a time"], loops=3).as_data()["loops"]
        3
        """
        return plain_arguments(self)

    def looped(self, loops: int) -> Subject:
        """The same subject with its one tied block called ``loops`` times.

        >>> Subject("tied").looped(48)
        <Subject tied, 48 loops: 128 texts>
        """
        options = {name: getattr(self, name) for name in ("revision", "device", "truncate")}
        return Subject(self.model, self.asked_texts, tokenizer=self.asked_tokenizer, loops=loops, **options)

    def held_out(self) -> Subject:
        """The same model on the held-out texts, on which published verdicts are based, if it is a bundled model with
        its own texts; otherwise the subject itself.

        >>> Subject("A").held_out().texts[0] in Subject("A").texts
        False
        """
        if self.asked_texts is not None or not is_bundled(self.model):
            return self
        options = {name: getattr(self, name) for name in ("loops", "revision", "device", "truncate")}
        return Subject(self.model, held_out_texts(), tokenizer=self.asked_tokenizer, **options)

    def __repr__(self) -> str:
        texts = "" if self.is_simulation else f": {pluralized(len(self.texts), 'text')}"
        return one_line_repr(f"Subject {self.name}{texts}")

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove the model, its looped variants, recordings and twins from the cache; references to them stay valid.

        >>> with Subject("A") as subject:
        ...     subject.name
        'A'
        """
        if not self.is_simulation:
            location = location_of(self.model)
            _CACHE.drop(lambda key: key[0][0] == location)

    @property
    def is_simulation(self) -> bool:
        """Whether the subject is a simulation, without a model."""
        return isinstance(self.model, Simulated)

    @property
    def picklable(self) -> bool:
        """Whether it can be sent to another process: neither model nor tokenizer exists in memory only."""
        return isinstance(self.model, str | Path | Simulated) and self.asked_tokenizer is None

    @property
    def name(self) -> str:
        """A short name: the last part of a folder's path, or the class of a model in memory."""
        if isinstance(self.model, Simulated):
            return self.model.value
        if isinstance(self.model, str | Path):
            folder = local_folder(self.model)
            name = str(self.model) if folder is None else folder.resolve().name
        else:
            name = str(self.loaded.origin.name)
        return name if self.loops is None else f"{name}, {pluralized(self.loops, 'loop')}"

    @property
    def label(self) -> str:
        """The name and the identity, as verdicts state them.

        >>> Subject.simulation().label
        'simulation'
        """
        return self.name if self.is_simulation else f"{self.name} (sha256 {self.identity})"

    @property
    def texts(self) -> tuple[Prompt, ...]:
        """The texts or rows of token ids; by default ``story_texts()`` or, for other models, ``paragraph_texts()``."""
        self._require_model("texts")
        if self.asked_texts is not None:
            return self.asked_texts
        return texts_for(self.model)

    @property
    def loaded(self) -> LoadedModel:
        """The model, its tokenizer and its origin; loaded once per process."""
        self._require_model("loaded")
        if not isinstance(self.model, str | Path):
            return self._loaded_in_memory
        from helmscope.models.load import load

        options = {name: getattr(self, name) for name in ("loops", "revision", "device")}
        key = (cache_key(self), "loaded")
        loaded = _CACHE.get(key, lambda: load(self.model, tokenizer=self.asked_tokenizer, **options), model_bytes)
        hashes = loaded.origin.hashes
        if self.__dict__.setdefault("_hashes", hashes) != hashes:  # a newer version on the Hub
            raise files_changed(self.model)
        return loaded

    @cached_property
    def _loaded_in_memory(self) -> LoadedModel:
        from helmscope.models.load import ensure_loaded

        loaded = ensure_loaded(self.model)
        return loaded if self.asked_tokenizer is None else replace(loaded, tokenizer=self.asked_tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was passed, or else loaded with the model; None if there is none."""
        return self.loaded.tokenizer

    @cached_property
    def weights(self) -> str:
        """SHA-256 of the weights, class and configuration of the model; weights enter by the hashes of their files, or
        of the tensors of a model in memory.
        """
        loaded = self.loaded
        hashes: list[Any] = sorted(loaded.origin.hashes.values())
        if not isinstance(self.model, str | Path):
            hashes = hashed_tensors(loaded.model.state_dict())
        return hash_of([hashes, wiring_of(loaded.model)])

    @cached_property
    def identity(self) -> str:
        """SHA-256 of ``weights`` and the token ids of the texts; "simulation" if there is no model. It depends neither
        on the location of the files nor on the device.
        """
        if isinstance(self.model, Simulated):
            return self.model.value
        return hash_of([self.weights, hashed_tensors(self._batch.inputs)])

    @cached_property
    def text_hash(self) -> str:
        """SHA-256 of the token ids of the texts; "" for a simulation.

        >>> len(Subject("A").text_hash), Subject.simulation().text_hash
        (64, '')
        """
        return "" if self.is_simulation else hash_of(hashed_tensors(self._batch.inputs))

    @property
    def _batch(self) -> Batch:
        from helmscope.models.targets import prepare_inputs

        loaded = self.loaded
        inputs = as_inputs(self.texts)
        return prepare_inputs(
            loaded.model, inputs, loaded.tokenizer, truncate=self.truncate, why=loaded.tokenizer_error
        )

    @cached_property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each text as the model reads them, with special tokens and without padding.

        >>> len(Subject("A", ["Once upon a time"]).token_ids[0])
        4
        """
        return (self._batch.source or self._batch).visible_ids

    @property
    def tied_loops(self) -> int | None:
        """How many times the one tied block of the model is called; None if the model has several blocks, or is in
        memory, where the number cannot be changed.

        >>> Subject("tied").tied_loops, Subject("A").tied_loops
        (24, None)
        """
        config = self.loaded.model.config
        tied = isinstance(self.model, str | Path) and getattr(config, "num_hidden_groups", None) == 1
        return int(config.num_hidden_layers) if tied else None

    @property
    def selection(self) -> tuple[Prompt, ...]:
        """The half of the prompts on which choices are made, such as a depth or a fitted parameter."""
        return self._halves[0]

    @property
    def test(self) -> tuple[Prompt, ...]:
        """The other half of the prompts, on which the choice is tested."""
        return self._halves[1]

    @cached_property
    def _halves(self) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        return split_prompts(self.texts, self.token_ids)

    @property
    def recording(self) -> Recording:
        """The recording of the model on its texts, made once per process."""
        return self.record(self.texts)

    def record(self, texts: Any) -> Recording:
        """The recording of the model on other texts, or on some of its own, made once per process.

        >>> subject = Subject("A", ["Once upon a time", "The cat sat"])
        >>> subject.record(["The cat sat"]).trajectory.states.shape
        torch.Size([25, 1, 3, 192])
        """
        return self._cached_recording((), lambda: self.loaded, checked_prompts(texts))

    def twins(self, count: int = TWINS, *, seed: int = 0) -> Iterator[LoadedModel]:
        """Iterate over untrained twins: models of the same configuration with random weights. Twin k of a seed is
        always the same model, whatever ``count`` is and in whatever order twins are made.

        >>> first, second = Subject("A").twins(2)
        >>> first.origin.title
        "A's untrained twin 2968811710 (gpt2)"
        """
        from helmscope.models.twin import twin_seeds

        for twin_seed in twin_seeds(count, seed):
            yield self._twin(twin_seed)

    def twin_recordings(self, count: int = TWINS, *, seed: int = 0, texts: Any = None) -> Iterator[Recording]:
        """Iterate over recordings of the untrained twins, on the same texts or on ``texts``.

        >>> subject = Subject("A", ["Once upon a time", "The cat sat"])
        >>> [len(recording.batch) for recording in subject.twin_recordings(1)]
        [2]
        """
        from helmscope.models.twin import twin_seeds

        prompts = self.texts if texts is None else checked_prompts(texts)
        for twin_seed in twin_seeds(count, seed):
            yield self._cached_recording((twin_seed,), partial(self._twin, twin_seed), prompts)

    def _twin(self, seed: int) -> LoadedModel:
        from helmscope.models.twin import untrained_twin

        loaded = self.loaded
        return _CACHE.get((cache_key(self), "twin", seed), lambda: untrained_twin(loaded, seed=seed), model_bytes)

    def _cached_recording(
        self, twin: tuple[int, ...], loaded: Callable[[], LoadedModel], prompts: Sequence[Prompt]
    ) -> Recording:
        """The recording of the model, or of the twin whose seed is in ``twin``; ``loaded`` is called if it is made."""
        from helmscope.models.record import record

        with progress_reporting(None, "recording") as report:  # also covers loading the model
            key = (cache_key(self), "recording", twin, hash_of(prompts), self.truncate)
            options: dict[str, Any] = {"truncate": self.truncate, "progress": report}
            return _CACHE.get(key, lambda: record(loaded(), as_inputs(prompts), **options), stream_bytes)

    def cached(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """What ``make`` returns, such as statistics of this subject that several claims use; made once per process and
        kept until ``close`` as long as there is memory. ``key`` names it and ``size`` returns its bytes.

        >>> Subject("A").cached("the answer", lambda: 42, size=lambda _: 8)
        42
        """
        return _CACHE.get((cache_key(self), "measured", self.identity, key), make, size)

    def unmet_premise(
        self, *parts: str, causal: bool = False, full: bool = False, mlp: bool = False, head: bool = False
    ) -> str | None:
        """One sentence that says which premise of a claim this subject does not meet, for ``Finding.impossible``; None
        if it meets all of them.

        Premises are ``causal`` or ``full`` attention, an ``mlp`` whose weights can be read, a ``head`` over a
        vocabulary, and ``parts`` of a recording that its certificate must not block: trajectory, on_sphere, kernel,
        replay, resume, lens, force.

        >>> Subject("A", ["Once upon a time"]).unmet_premise("kernel", causal=True, mlp=True, head=True) is None
        True
        """
        premise = Premise(parts=parts, causal=causal, full=full, mlp=mlp, head=head)
        if self.is_simulation:
            return "the claim needs a model, but the subject is a simulation"
        return premise.unmet(self.record(self.texts[:PROBED]).certificate, self.name)

    def _require_model(self, name: str) -> None:
        if self.is_simulation:
            raise HelmscopeError(f"{name} needs a model, but the subject is a simulation")
