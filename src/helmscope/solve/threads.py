"""How many threads of the CPU a run uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from helmscope.fields.block import Block
from helmscope.fields.cross import CrossAttention
from helmscope.fields.mlp import Force
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SMALL = 2**18  # entries of a matrix that one core fills in a few milliseconds, while its cache still holds them


@contextmanager
def fitting_threads(field: object, x: Float[Tensor, "*batch n d"]) -> Iterator[None]:
    """One thread inside for small systems on a CPU, else as many as the caller has set, whose number is restored
    afterwards, also after an error.

    A small system is a batch whose largest matrix has at most 2^18 entries: 256 systems of 32 tokens, or one of 512.
    Its sums take less time than it takes several threads to meet, and where other work keeps a core busy they wait for
    each other hundreds of times longer than they compute. The size alone decides, never a timing, so that a run is the
    same again; and with one thread its bits do not depend on how many the caller has.

    torch keeps the number for each Python thread: others that compute already keep theirs. A Python thread whose very
    first computation falls inside takes over the 1, and keeps it until it calls ``torch.set_num_threads``; that costs
    it time and no digits.

    >>> from helmscope.fields.attention import SA
    >>> with fitting_threads(SA(beta=1.0), torch.eye(3)):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if before == 1 or x.device.type != "cpu" or largest_matrix(field, x) > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest_matrix(field: object, x: Float[Tensor, "*batch n d"]) -> int:
    """Entries of the largest matrix that one evaluation of a field at x fills: the pairs of tokens (with those of
    a second cloud), of every head, or the neurons of every token. A field that is not ours is taken to look at pairs.

    >>> from helmscope.fields.attention import SA
    >>> largest_matrix(SA(beta=1.0), torch.ones(16, 32, 3)), largest_matrix(MultiHead([SA(1.0)] * 4), torch.ones(32, 3))
    (16384, 4096)
    """
    if isinstance(field, Block):
        return max(largest_matrix(field.attention, x), largest_matrix(field.mlp, x))
    n, d = x.shape[-2:]
    width = n
    if isinstance(field, Force):
        width = field.hidden
    elif isinstance(field, CrossAttention):
        width = field.context.shape[-2]
    elif isinstance(field, MultiHead | MultiHeadAsPrinted):
        width = len(field.heads) * n
    return x.shape[:-1].numel() * max(width, d)
