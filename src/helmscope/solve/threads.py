"""The number of CPU threads of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from helmscope.fields.block import Block
from helmscope.fields.cross import CrossAttention
from helmscope.fields.mlp import Force
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted
from helmscope.geometry.arithmetic import one_thread

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SMALL = 2**18  # entries of a matrix that fits in the cache of one core and takes it a few milliseconds


@contextmanager
def fitting_threads(field: object, x: Float[Tensor, "*batch n d"]) -> Iterator[None]:
    """Context manager: within it, torch uses one thread for small batches on a CPU, and otherwise as many as the caller
    has set (``one_thread``).

    A batch is small if its largest matrix has at most 2^18 entries: 256 systems of 32 tokens, or one of 512. Its sums
    take less time than the synchronization of several threads; if other work keeps a core busy, threads wait for each
    other hundreds of times longer than they compute. Only the size decides, never a timing, so that runs are
    repeatable; and with one thread the rounding does not depend on the caller's number of threads.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> with fitting_threads(SA(beta=1.0), torch.eye(3)):
    ...     torch.get_num_threads()
    1
    """
    small = x.device.type == "cpu" and largest_matrix(field, x) <= SMALL
    with one_thread() if small else nullcontext():
        yield


def largest_matrix(field: object, x: Float[Tensor, "*batch n d"]) -> int:
    """The number of entries of the largest matrix in one evaluation of a field at x: pairs of tokens (or of tokens with
    those of a second cloud) for every head, or hidden units for every token. Unknown fields are assumed to use pairs.

    >>> import torch
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
        width = field.memory.shape[-2]
    elif isinstance(field, MultiHead | MultiHeadAsPrinted):
        width = len(field.heads) * n
    return x.shape[:-1].numel() * max(width, d)
