"""What is put on trial: a model with its texts, its untrained twins and the two halves of its prompts; or a simulation.

A model is loaded and recorded once in a process, and all claims on it share that: models, twins and recordings lie on a
shelf of bounded size until ``close``. Between processes only the arguments travel, as plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.models.boxed import FIRST, box_texts, is_boxed, local_folder
from helmscope.models.cache import ById, RecordingCache, model_bytes, stream_bytes
from helmscope.models.identity import (
    Prompt,
    as_inputs,
    check_model_arguments,
    checked_prompts,
    first_of_each,
    hash_of,
    hashed_tensors,
    stamp_of,
    wiring_of,
)
from helmscope.models.premise import Premise, Simulated
from helmscope.stats.replicates import halves
from helmscope.types import HelmscopeError, counted, one_line_repr, whole_number

if TYPE_CHECKING:
    from types import TracebackType

    from helmscope.models.load import Loaded
    from helmscope.models.recording import Recording
    from helmscope.models.texts import Batch

TWINS = 5
PROBED = 2  # texts on which the certificate is asked what the model can do
_SHELF = RecordingCache()


@dataclass(frozen=True, init=False, repr=False)
class Subject:
    """A model on trial: one in the box ("A", "B", "tied"), a folder, a Hub id, or a model in memory, which must not
    change while it is on trial; of an encoder-decoder model its decoder, which is to write the texts again.
    ``Subject.simulation()`` is the subject of a claim that needs no model.

    ``texts`` are strings, or rows of token ids of one length; by default those in the box. ``tokenizer``, ``loops``,
    ``revision`` and ``device`` are those of ``load``, ``truncate`` that of ``record``. Making a subject loads nothing:
    arguments of the wrong type are refused at once, a model or texts that cannot be used when they are first needed.

    >>> subject = Subject("A", ["Once upon a time", "The cat sat", "One day a dog", "Tom was sad"])
    >>> subject
    <Subject A: 4 texts>
    >>> sorted(subject.selection + subject.test) == sorted(subject.texts)
    True
    >>> subject.needs(full=True)
    'the claim needs attention that looks both ways, but that of A is causal'
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
            "loops": None if loops is None else whole_number("loops", loops, at_least=1),
            "revision": revision,
            "device": device,
            "truncate": truncate,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def simulation(cls) -> Subject:
        """What is simulated rather than recorded.

        >>> Subject.simulation().identity
        'simulation'
        """
        return cls(Simulated.HERE)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Subject:
        """The subject that ``as_data`` describes.

        >>> Subject.from_data(Subject("tied", loops=3).as_data()) == Subject("tied", loops=3)
        True
        """
        return cls.simulation() if data["model"] is None else cls(**data)

    def as_data(self) -> dict[str, Any]:
        """The arguments that make this subject again, as plain data for another process. What is in memory only is
        refused.
        """
        if self.is_simulation:
            return {"model": None}
        if not self.travels:
            what = "tokenizer" if isinstance(self.model, str | Path) else "model"
            raise HelmscopeError(
                f"{what} of subject '{self.name}' is in memory, where no other process can reach it: save it into a "
                "folder with save_pretrained, and name that folder"
            )
        return {
            "model": str(self._place),
            "texts": None if self.asked_texts is None else list(self.asked_texts),
            **{name: getattr(self, name) for name in ("loops", "revision", "device", "truncate")},
        }

    def looped(self, loops: int) -> Subject:
        """The same subject with its one tied block called so many times.

        >>> Subject("tied").looped(48)
        <Subject tied, 48 loops: 128 texts>
        """
        options = {name: getattr(self, name) for name in ("revision", "device", "truncate")}
        return Subject(self.model, self.asked_texts, tokenizer=self.asked_tokenizer, loops=loops, **options)

    def __repr__(self) -> str:
        texts = "" if self.is_simulation else f": {counted(len(self.texts), 'text')}"
        return one_line_repr(f"Subject {self.name}{texts}")

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Forget the loaded model, looped or not, its recordings and its twins; whoever holds one keeps it.

        >>> with Subject("A") as subject:
        ...     subject.name
        'A'
        """
        if not self.is_simulation:
            place = self._place
            _SHELF.drop(lambda key: key[0][0] == place)

    @property
    def is_simulation(self) -> bool:
        """Whether there is no model."""
        return isinstance(self.model, Simulated)

    @property
    def travels(self) -> bool:
        """Whether it can be tried in another process: neither model nor tokenizer is in memory only."""
        return isinstance(self.model, str | Path | Simulated) and self.asked_tokenizer is None

    @property
    def name(self) -> str:
        """A short name: of a folder its last part, of a model in memory its class."""
        if isinstance(self.model, Simulated):
            return self.model.value
        if isinstance(self.model, str | Path):
            folder = local_folder(self.model)
            name = str(self.model) if folder is None else folder.resolve().name
        else:
            name = str(self.loaded.origin.name)
        return name if self.loops is None else f"{name}, {counted(self.loops, 'loop')}"

    @property
    def label(self) -> str:
        """The name and the identity, as a verdict carries them.

        >>> Subject.simulation().label
        'simulation'
        """
        return self.name if self.is_simulation else f"{self.name} (sha256 {self.identity})"

    @property
    def texts(self) -> tuple[Prompt, ...]:
        """The texts or rows of token ids; those in the box where none were given."""
        self._need_model("texts")
        return tuple(box_texts()) if self.asked_texts is None else self.asked_texts

    @property
    def loaded(self) -> Loaded:
        """The model, its tokenizer and its origin; loaded once in a process."""
        self._need_model("loaded")
        if not isinstance(self.model, str | Path):
            return self._held
        from helmscope.models.load import load

        options = {name: getattr(self, name) for name in ("loops", "revision", "device")}
        key = (self._owner, "loaded")
        found = _SHELF.get(key, lambda: load(self.model, tokenizer=self.asked_tokenizer, **options), model_bytes)
        if self.__dict__.setdefault("_hashes", found.origin.hashes) != found.origin.hashes:  # a newer one on the Hub
            raise self._changed
        return found

    @cached_property
    def _held(self) -> Loaded:
        """A model that is in memory already."""
        from helmscope.models.load import ensure_loaded

        loaded = ensure_loaded(self.model)
        return loaded if self.asked_tokenizer is None else replace(loaded, tokenizer=self.asked_tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given, or lies beside the model; None where there is none."""
        return self.loaded.tokenizer

    @property
    def _place(self) -> Hashable:
        """Where the model is to be found: its name, its folder, or itself."""
        if not isinstance(self.model, str | Path):
            return ById(self.model)
        folder = local_folder(self.model)
        return str(self.model) if folder is None or is_boxed(self.model) else folder.resolve()

    @property
    def _owner(self) -> tuple[Hashable, ...]:
        """Under what the shelf keeps what is made of this model. The files of a folder are looked at every time: a
        subject whose weights changed under it would answer for another model than its identity says.
        """
        tokenizer = ById(self.asked_tokenizer)
        if not isinstance(self.model, str | Path):
            return (self._place, tokenizer, self.weights)
        from helmscope.models.load import WANTED

        folder = local_folder(self.model)
        stamp = () if folder is None else stamp_of(folder, WANTED)
        if self.__dict__.setdefault("_stamp", stamp) != stamp:
            raise self._changed
        return (self._place, tokenizer, self.loops, self.revision, self.device, stamp)

    @property
    def _changed(self) -> HelmscopeError:
        says = "but its files have changed since this subject was first used: make a new one"
        return HelmscopeError(f"model is '{self.model}', {says}")

    @cached_property
    def weights(self) -> str:
        """SHA-256 over the hashes of the weights (of the files; of a model in memory, of its tensors) and over class
        and configuration, which say how the weights are used.
        """
        loaded = self.loaded
        hashes: list[Any] = sorted(loaded.origin.hashes.values())
        if not isinstance(self.model, str | Path):
            hashes = hashed_tensors(loaded.model.state_dict())
        return hash_of([hashes, wiring_of(loaded.model)])

    @cached_property
    def identity(self) -> str:
        """SHA-256 over ``weights`` and the token ids of the texts; "simulation" where there is no model. Where the
        files lie and on which device they are run does not change it.
        """
        if isinstance(self.model, Simulated):
            return self.model.value
        return hash_of([self.weights, hashed_tensors(self._batch.inputs)])

    @property
    def _batch(self) -> Batch:
        from helmscope.models.targets import prepare_inputs

        loaded = self.loaded
        inputs = as_inputs(self.texts)
        return prepare_inputs(loaded.model, inputs, loaded.tokenizer, truncate=self.truncate, why=loaded.why)

    @cached_property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The token ids of each text as the model reads them, special tokens included and padding left out.

        >>> len(Subject("A", ["Once upon a time"]).token_ids[0])
        4
        """
        batch = self._batch.source or self._batch
        ids = batch.inputs["input_ids"].tolist()
        if batch.visible is None:
            return tuple(map(tuple, ids))
        return tuple(
            tuple(token for token, seen in zip(row, mask, strict=True) if seen)
            for row, mask in zip(ids, batch.visible.tolist(), strict=True)
        )

    @property
    def tied_loops(self) -> int | None:
        """How often the one tied block of the model is called; None where it has several, or is in memory, where
        nothing can be changed.

        >>> Subject("tied").tied_loops, Subject("A").tied_loops
        (24, None)
        """
        config = self.loaded.model.config
        tied = isinstance(self.model, str | Path) and getattr(config, "num_hidden_groups", None) == 1
        return int(config.num_hidden_layers) if tied else None

    @property
    def selection(self) -> tuple[Prompt, ...]:
        """The half of the prompts on which something may be chosen: a depth, a fitted number."""
        return self._halves[0]

    @property
    def test(self) -> tuple[Prompt, ...]:
        """The other half, on which the choice is tested."""
        return self._halves[1]

    @cached_property
    def _halves(self) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        """Drawn by the hash of the texts alone: two models on the same texts, whose prompts are compared in pairs, have
        the same halves. A prompt that the model reads as the same ids as an earlier one is left out.
        """
        once = first_of_each(self.token_ids)
        if len(once) < 4:
            held = counted(len(once), "different prompt")
            raise HelmscopeError(f"texts holds {held}, but two halves need at least 4")
        texts = self.texts
        first, second = halves(len(once), seed=int(hash_of(texts)[:8], 16))
        return tuple(texts[once[k]] for k in first), tuple(texts[once[k]] for k in second)

    @property
    def recording(self) -> Recording:
        """The model on its texts, recorded once in a process."""
        return self.recording_of(self.texts)

    def recording_of(self, texts: Any) -> Recording:
        """The model on other texts or on some of its own, recorded once in a process."""
        return self._recorded((), lambda: self.loaded, checked_prompts(texts))

    def twins(self, count: int = TWINS, *, seed: int = 0) -> Iterator[Loaded]:
        """Untrained twins, one after another: the same configuration with random weights. Equal seeds give equal twins,
        in whatever order and number they are asked for.
        """
        from helmscope.models.twin import twin_seeds

        for each in twin_seeds(count, seed):
            yield self._twin(each)

    def twin_recordings(self, count: int = TWINS, *, seed: int = 0, texts: Any = None) -> Iterator[Recording]:
        """Recordings of the untrained twins on the same texts, or on ``texts``, one after another."""
        from helmscope.models.twin import twin_seeds

        prompts = self.texts if texts is None else checked_prompts(texts)
        for each in twin_seeds(count, seed):
            yield self._recorded((each,), partial(self._twin, each), prompts)

    def _twin(self, seed: int) -> Loaded:
        from helmscope.models.twin import untrained_twin

        loaded = self.loaded
        return _SHELF.get((self._owner, "twin", seed), lambda: untrained_twin(loaded, seed=seed), model_bytes)

    def _recorded(self, which: tuple[int, ...], loaded: Callable[[], Loaded], prompts: Sequence[Prompt]) -> Recording:
        """Of the model itself, or of the twin with the seed in ``which``."""
        from helmscope.models.record import record

        key = (self._owner, "recording", which, hash_of(prompts), self.truncate)
        return _SHELF.get(key, lambda: record(loaded(), as_inputs(prompts), truncate=self.truncate), stream_bytes)

    def needs(
        self, *parts: str, causal: bool = False, full: bool = False, mlp: bool = False, head: bool = False
    ) -> str | None:
        """None, or the sentence why a claim's premise is impossible here: for ``Finding.impossible``.

        ``causal`` or ``full`` attention, an ``mlp`` that can be read, a ``head`` over a vocabulary, and ``parts`` of a
        recording that its certificate must give out: trajectory, on_sphere, kernel, replay, resume, lens, force.

        >>> Subject("A", ["Once upon a time"]).needs("kernel", causal=True, mlp=True, head=True) is None
        True
        """
        premise = Premise(parts=parts, causal=causal, full=full, mlp=mlp, head=head)
        if self.is_simulation:
            return "the claim needs a model, but the subject is a simulation"
        return premise.unmet(self.recording_of(self.texts[:PROBED]).certificate, self.name)

    def _need_model(self, name: str) -> None:
        if self.is_simulation:
            raise HelmscopeError(f"{name} is of a model, but the subject is a simulation")
