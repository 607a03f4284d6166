"""Where the model of a subject comes from: its location, the key of what is cached of it, and its plain arguments."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helmscope.models.bundled_models import is_bundled, local_folder
from helmscope.models.cache import ById
from helmscope.models.identity import stamp_of
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.models.subject import Subject


def location_of(model: Any) -> Hashable:
    """Where a model is: its name, its folder, or the model object itself.

    >>> location_of("A")
    'A'
    """
    if not isinstance(model, str | Path):
        return ById(model)
    folder = local_folder(model)
    return str(model) if folder is None or is_bundled(model) else folder.resolve()


def cache_key(subject: Subject) -> tuple[Hashable, ...]:
    """The first part of all cache keys of the model of a subject. The files of a folder are checked every time: if the
    weights changed, results would belong to another model than the identity of the subject says.
    """
    model, tokenizer = subject.model, ById(subject.asked_tokenizer)
    if not isinstance(model, str | Path):
        return (location_of(model), tokenizer, subject.weights)
    from helmscope.models.load import WANTED

    folder = local_folder(model)
    stamp = () if folder is None else stamp_of(folder, WANTED)
    if subject.__dict__.setdefault("_stamp", stamp) != stamp:
        raise files_changed(model)
    return (location_of(model), tokenizer, subject.loops, subject.revision, subject.device, stamp)


def files_changed(model: object) -> HelmscopeError:
    """The error for a model whose files are not those that the subject was first used with.

    >>> files_changed("A")
    HelmscopeError("model is 'A', but its files have changed since this subject was first used: make a new one")
    """
    reason = "but its files have changed since this subject was first used: make a new one"
    return HelmscopeError(f"model is '{model}', {reason}")


def plain_arguments(subject: Subject) -> dict[str, Any]:
    """The arguments of a subject as plain data; see ``Subject.as_data``."""
    if subject.is_simulation:
        return {"model": None}
    if not subject.picklable:
        what = "tokenizer" if isinstance(subject.model, str | Path) else "model"
        raise HelmscopeError(
            f"{what} of subject '{subject.name}' is in memory, where no other process can reach it: save it into a "
            "folder with save_pretrained, and name that folder"
        )
    return {
        "model": str(location_of(subject.model)),
        "texts": None if subject.asked_texts is None else list(subject.asked_texts),
        **{name: getattr(subject, name) for name in ("loops", "revision", "device", "truncate")},
    }
