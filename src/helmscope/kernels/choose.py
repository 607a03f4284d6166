"""The one place that decides how a sum over tokens is computed.

    n <= 2,048, or a field that needs the whole matrix of logits      Dense
    beyond, on the circle or S^2 where the series is short            Harmonic (systems it doubts: as below)
    beyond, float32 on a CUDA device, no gradient, no bias            Flash
    all else                                                          Streaming

By device, n, d, dtype, gradient and, where a series is doubted, the system itself; never by a timing, so that it is the
same in every run. A caller pins a kernel with ``using``, and then gets that one alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from helmscope.kernels.dense import Dense
from helmscope.kernels.flash import Flash
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.kernel import MOST_STORED, AttentionSum, Kernel
from helmscope.kernels.streaming import Streaming
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.kernels.kernel import Request

_DENSE, _STREAMING, _HARMONIC, _FLASH = Dense(), Streaming(), Harmonic(), Flash()
_pinned: ContextVar[Kernel | None] = ContextVar("pinned", default=None)
_taken: ContextVar[set[str] | None] = ContextVar("taken", default=None)


def token_sum(request: Request) -> AttentionSum:
    """The sums of a request by the kernel that serves it best, or by the pinned one.

    >>> import torch
    >>> from helmscope.kernels.kernel import Request
    >>> x = torch.eye(2)
    >>> token_sum(Request(0.0 * x, x, x)).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    kernel = choose(request)
    return _trusted(request) if kernel is _HARMONIC else kernel.sum(request)


def pinned() -> Kernel | None:
    """The kernel that a caller has pinned.

    >>> pinned() is None
    True
    """
    return _pinned.get()


def _trusted(request: Request) -> AttentionSum:
    """By the series, whose errors are relative to e^beta times the total weight, and which is that of unit vectors: a
    system with a token that sees so little of the others that this would cost it digits, or with one off the sphere, is
    summed pair by pair.
    """
    sums, poor = _HARMONIC.judged(request)
    if not poor.any():
        return sums
    pairwise = _pairwise(request)
    if (taken := _taken.get()) is not None:
        taken.add(type(pairwise).__name__)
    parts = (sums.total, sums.shift, sums.mass, sums.mass_shift)
    flat = [part.reshape(-1, *part.shape[-2:]).clone() for part in parts]
    lead = sums.total.shape[:-2]
    for k in poor.reshape(-1).nonzero()[0].tolist():
        better = pairwise.sum(request.system(lead, k))
        for part, new in zip(flat, (better.total, better.shift, better.mass, better.mass_shift), strict=True):
            part[k] = new
    return AttentionSum(*(part.reshape(*lead, *part.shape[-2:]) for part in flat))


def choose(request: Request) -> Kernel:
    """The kernel for a request: the pinned one, refused in one sentence where it cannot serve, or the best.

    >>> import torch
    >>> from helmscope.kernels.kernel import Request
    >>> x = torch.nn.functional.normalize(torch.randn(4096, 3), dim=-1)
    >>> choose(Request(4 * x, x, x, beta=4.0)), choose(Request(4 * x, x, x, causal=True))
    (Harmonic(tol=None), Streaming(block=None))
    """
    kernel = _pinned.get()
    if kernel is None:
        kernel = _best(request)
    elif (reason := kernel.refuses(request)) is not None:
        raise HelmscopeError(f"kernel is {kernel!r}, but {reason}")
    taken = _taken.get()
    if taken is not None:
        taken.add(type(kernel).__name__)
    return kernel


def _best(request: Request) -> Kernel:
    if request.tokens <= MOST_STORED or request.settle is not None:
        return _DENSE
    if _HARMONIC.lacks(request) is None and _HARMONIC.pays(request):
        return _HARMONIC
    return _pairwise(request)


def _pairwise(request: Request) -> Kernel:
    return _FLASH if request.key.is_cuda and _FLASH.refuses(request) is None else _STREAMING


@contextmanager
def using(kernel: Kernel | None = None) -> Iterator[set[str]]:
    """Inside, every sum is computed by this kernel (None: by the one that was pinned outside, or the best), and the set
    given holds the names of those that were used.

    >>> import torch
    >>> from helmscope.kernels.kernel import Request
    >>> x = torch.eye(2)
    >>> with using(Streaming()) as names:
    ...     _ = token_sum(Request(x, x, x))
    >>> names
    {'Streaming'}
    """
    if kernel is not None and (isinstance(kernel, type) or not isinstance(kernel, Kernel)):
        raise HelmscopeError(
            f"kernel is {kernel!r}, but it must be a kernel such as Dense(), Streaming(), Harmonic() or Flash()"
        )
    taken: set[str] = set()
    outside = _taken.get()
    pin, note = _pinned.set(_pinned.get() if kernel is None else kernel), _taken.set(taken)
    try:
        yield taken
    finally:
        _pinned.reset(pin)
        _taken.reset(note)
        if outside is not None:
            outside |= taken
