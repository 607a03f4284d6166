"""The cache of models and recordings of a process; it evicts the least recently used ones first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from helmscope.models.load import LoadedModel
    from helmscope.models.recording import Recording

T = TypeVar("T")
Key = tuple[Any, ...]
MAX_BYTES = 1 << 30


class RecordingCache:
    """A cache bounded by memory. When all values together exceed ``most`` bytes, the least recently used are dropped. A
    value that exceeds the limit alone is kept until another one is made.

    >>> cache = RecordingCache(most=10)
    >>> [cache.get((key,), lambda: key.upper(), size=lambda _: 6) for key in "aba"]
    ['A', 'B', 'A']
    >>> ("b",) in cache
    False
    """

    def __init__(self, most: int = MAX_BYTES) -> None:
        self.most = most
        self._values: OrderedDict[Key, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value under ``key``, made by ``make`` if it is not in the cache; ``size`` returns its bytes."""
        if key not in self._values:
            self._evict(keep=0)  # free memory before the new value needs it
            made = make()
            self._values[key] = made, size(made)
        self._values.move_to_end(key)
        value: T = self._values[key][0]
        self._evict(keep=1)
        return value

    def _evict(self, keep: int) -> None:
        while len(self._values) > keep and sum(size for _, size in self._values.values()) > self.most:
            self._values.popitem(last=False)

    def drop(self, unwanted: Callable[[Key], bool]) -> None:
        """Remove every value for whose key ``unwanted`` is True."""
        for key in [key for key in self._values if unwanted(key)]:
            del self._values[key]


@dataclass(frozen=True, eq=False)
class ById:
    """An object as part of a cache key, compared by identity; the key keeps it alive, so that its id is not reused.

    >>> ById([]) == ById([])
    False
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def model_bytes(loaded: LoadedModel) -> int:
    """The bytes of a model's weights."""
    return sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())


def stream_bytes(recording: Recording) -> int:
    """The bytes of the recorded states, including those of an encoder. They count twice in a post-norm model, whose
    recording also holds the states without gain and bias.
    """
    stream, copies = recording.residual, 2 if recording.anatomy.post_norm else 1
    stored = (stream.direction, stream.radius, stream.mean, stream.hidden_direction)
    tensors = [tensor for tensor in stored if tensor is not None]
    total = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total if recording.encoder is None else total + stream_bytes(recording.encoder)
