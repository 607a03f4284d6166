"""Results that are expensive to make and shared inside a process: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from helmscope.models.load import Loaded
    from helmscope.models.recording import Recording

T = TypeVar("T")
Key = tuple[Any, ...]
MOST_BYTES = 1 << 30


class RecordingCache:
    """A bounded cache. When all values together exceed ``most`` bytes, those that were asked for least recently are
    dropped. One that is larger by itself is kept until another one is to be made.

    >>> shelf = RecordingCache(most=10)
    >>> [shelf.get((key,), lambda: key.upper(), size=lambda _: 6) for key in "aba"]
    ['A', 'B', 'A']
    >>> ("b",) in shelf
    False
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self._held: OrderedDict[Key, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def get(self, key: Key, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value under ``key``, made where it is not there."""
        if key not in self._held:
            self._shrink(least=0)  # before the new value needs memory
            made = make()
            self._held[key] = made, size(made)
        self._held.move_to_end(key)
        value: T = self._held[key][0]
        self._shrink(least=1)
        return value

    def _shrink(self, least: int) -> None:
        while len(self._held) > least and sum(size for _, size in self._held.values()) > self.most:
            self._held.popitem(last=False)

    def drop(self, unwanted: Callable[[Key], bool]) -> None:
        """Forget every value whose key is unwanted."""
        for key in [key for key in self._held if unwanted(key)]:
            del self._held[key]


@dataclass(frozen=True, eq=False)
class ById:
    """Something in memory as part of a key: the key holds it, so that its id cannot become that of another.

    >>> ById([]) == ById([])
    False
    """

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def model_bytes(loaded: Loaded) -> int:
    """The memory of a model's weights."""
    return sum(value.numel() * value.element_size() for value in loaded.model.parameters())


def stream_bytes(recording: Recording) -> int:
    """The memory of recorded states, those of an encoder included: twice in a post-norm model, which also keeps them
    without gain and bias.
    """
    stream, copies = recording.residual, 2 if recording.anatomy.post_norm else 1
    parts = [each for each in (stream.direction, stream.radius, stream.mean) if each is not None]
    own = copies * sum(each.numel() * each.element_size() for each in parts)
    return own if recording.encoder is None else own + stream_bytes(recording.encoder)
