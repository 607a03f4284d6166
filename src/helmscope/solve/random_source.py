"""Random numbers for a batch of systems, with one random stream per system."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.types import HelmscopeError, check_integer

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# numbers to generate at a time: for the whole batch, and at most for one system
_BATCH, _SYSTEM = 2**22, 2**12


class RandomSource:
    """Standard normal numbers, with an independent random stream per system, keyed by (``seed``, the system's number).

    A system's numbers depend on nothing else: not on its batch or position there, on how many are generated at a time,
    on the dtype or the device. They come from NumPy's Philox generator in float64 on the CPU. ``systems`` holds the
    numbers of the systems, so that part of a batch can be run alone. Raises ``HelmscopeError`` if the seed or a
    system's number is not a nonnegative integer.

    >>> whole, part = RandomSource(7, range(3)), RandomSource(7, [2])
    >>> bool((whole.normal(4, 2)[2] == part.normal(4, 2)[0]).all())
    True
    """

    def __init__(self, seed: int, systems: Iterable[int]) -> None:
        seed = check_integer("seed", seed, at_least=0, below=2**128)
        try:
            numbers = list(systems)
        except TypeError:
            raise HelmscopeError(
                f"systems is {systems!r}, but it must hold the systems' numbers, such as range(8)"
            ) from None
        keys = [check_integer("systems", number, at_least=0) for number in numbers]
        sources = [np.random.SeedSequence(seed, spawn_key=(key,)) for key in keys]
        self._streams = [np.random.Generator(np.random.Philox(source)) for source in sources]
        self._places = list(range(len(keys)))
        self._ahead = torch.empty(len(keys), 0, dtype=torch.float64, device="cpu")

    def __len__(self) -> int:
        return len(self._streams)

    def keep(self, places: Iterable[int]) -> None:
        """Continue with some of the systems, given by their positions in ``systems``.

        >>> whole, part = RandomSource(7, [4, 5, 6]), RandomSource(7, [6])
        >>> whole.keep([2])
        >>> len(whole), bool((whole.normal(4, 2) == part.normal(4, 2)).all())
        (1, True)
        """
        row_of = {place: row for row, place in enumerate(self._places)}
        rows = [row_of[place] for place in places]
        self._places = [self._places[row] for row in rows]
        self._streams = [self._streams[row] for row in rows]
        self._ahead = self._ahead[rows]

    def normal(self, n: int, k: int) -> Float[Tensor, "systems n k"]:
        """The next n k numbers of every system, in float64 on the CPU."""
        count = n * k
        if self._ahead.shape[1] < count:
            self._ahead = torch.cat([self._ahead, self._draw(count)], 1)
        taken, self._ahead = self._ahead[:, :count], self._ahead[:, count:]
        return taken.reshape(len(self), n, k)

    def _draw(self, least: int) -> Tensor:
        """At least ``least`` numbers per system, more if that is few: a call costs as much as 100 numbers."""
        size = max(least, min(_SYSTEM, _BATCH // max(len(self), 1)))
        fresh = np.empty((len(self), size))
        for stream, row in zip(self._streams, fresh, strict=True):
            stream.standard_normal(out=row)
        return torch.from_numpy(fresh)

    @staticmethod
    def continuation_seed(seed: int, index: int, generator: torch.Generator | None) -> int:
        """A seed for a run that continues from time index ``index`` with new random numbers: sampled from
        ``generator`` if given, otherwise determined by ``seed`` and ``index``.

        >>> seeds = [RandomSource.continuation_seed(0, index, None) for index in (3, 3, 4)]
        >>> seeds[0] == seeds[1] != seeds[2]
        True
        """
        if generator is not None:
            return int(torch.randint(2**62, (), generator=generator, device=generator.device))
        # a key of two words, because the keys of systems have one: no stream is used twice
        return int(np.random.SeedSequence(seed, spawn_key=(index, 1)).generate_state(1, np.uint64)[0])
