"""The dispatcher: the one place that chooses the method for an attention sum. The first rule that applies decides.

    n <= 2,048, or a field that needs the whole matrix of logits      Dense
    on the circle or S^2, if the harmonic series is short             Harmonic (inaccurate systems: as below)
    float32 on a CUDA device, no gradient, no bias                    Flash
    everything else                                                   Blockwise

The choice depends on device, n, d, dtype, gradient and, where a harmonic series is too inaccurate, on the system
itself; never on timings, so that it is the same in every run. ``using_summation``
pins one method for all sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from helmscope.kernels.blockwise import Blockwise
from helmscope.kernels.dense import Dense
from helmscope.kernels.flash import Flash
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.request import MAX_DENSE_TOKENS, AttentionSum, Summation
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.kernels.request import Request

_DENSE, _BLOCKWISE, _HARMONIC, _FLASH = Dense(), Blockwise(), Harmonic(), Flash()
_pinned: ContextVar[Summation | None] = ContextVar("pinned", default=None)
_used: ContextVar[set[str] | None] = ContextVar("used", default=None)


def token_sum(request: Request) -> AttentionSum:
    """Compute the sums of a request with the pinned method, or with the best one if none is pinned.

    >>> import torch
    >>> from helmscope.kernels.request import Request
    >>> x = torch.eye(2)
    >>> token_sum(Request(0.0 * x, x, x)).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    method = choose(request)
    return _harmonic_with_fallback(request) if method is _HARMONIC else method.sum(request)


def pinned() -> Summation | None:
    """The method pinned by ``using_summation``; None if there is none.

    >>> pinned() is None
    True
    """
    return _pinned.get()


def _harmonic_with_fallback(request: Request) -> AttentionSum:
    """Sum by harmonic series, and system by system with a pairwise method where the series is not accurate enough.

    The errors of the series are relative to e^beta times the total weight, and it assumes unit vectors. The fallback is
    for systems with a token off the sphere, or with one so far from the others that such an error would cost it digits.
    """
    sums, inaccurate = _HARMONIC.checked_sum(request)
    if not inaccurate.any():
        return sums
    pairwise = _pairwise_method(request)
    if (used := _used.get()) is not None:
        used.add(type(pairwise).__name__)
    parts = (sums.total, sums.shift, sums.mass, sums.mass_shift)
    flat = [part.reshape(-1, *part.shape[-2:]).clone() for part in parts]
    batch = sums.total.shape[:-2]
    for k in inaccurate.reshape(-1).nonzero()[0].tolist():
        system = pairwise.sum(request.system(batch, k))
        for part, new in zip(flat, (system.total, system.shift, system.mass, system.mass_shift), strict=True):
            part[k] = new
    return AttentionSum(*(part.reshape(*batch, *part.shape[-2:]) for part in flat))


def choose(request: Request) -> Summation:
    """The method for a request: the pinned one, or the best one if none is pinned.

    Raises ``HelmscopeError`` if the pinned method does not support the request.

    >>> import torch
    >>> from helmscope.kernels.request import Request
    >>> x = torch.nn.functional.normalize(torch.randn(4096, 3), dim=-1)
    >>> choose(Request(4 * x, x, x, beta=4.0)), choose(Request(4 * x, x, x, causal=True))
    (Harmonic(tol=None), Blockwise())
    """
    method = _pinned.get()
    if method is None:
        method = _best_method(request)
    elif (reason := method.unsupported_reason(request)) is not None:
        raise HelmscopeError(f"summation is {method!r}, but {reason}")
    used = _used.get()
    if used is not None:
        used.add(type(method).__name__)
    return method


def _best_method(request: Request) -> Summation:
    if request.tokens <= MAX_DENSE_TOKENS or request.transform_logits is not None:
        return _DENSE
    if _HARMONIC.unsupported_without_values(request) is None and _HARMONIC.is_faster(request):
        return _HARMONIC
    return _pairwise_method(request)


def _pairwise_method(request: Request) -> Summation:
    return _FLASH if request.key.is_cuda and _FLASH.unsupported_reason(request) is None else _BLOCKWISE


@contextmanager
def using_summation(method: Summation | None = None) -> Iterator[set[str]]:
    """Context manager: within it, every attention sum is computed by ``method``, and the yielded set collects the names
    of the methods used.

    With None, a method pinned by an outer call stays pinned; otherwise the best method is chosen for each sum.

    >>> import torch
    >>> from helmscope.kernels.request import Request
    >>> x = torch.eye(2)
    >>> with using_summation(Blockwise()) as names:
    ...     _ = token_sum(Request(x, x, x))
    >>> names
    {'Blockwise'}
    """
    if method is not None and (isinstance(method, type) or not isinstance(method, Summation)):
        raise HelmscopeError(
            f"summation is {method!r}, but it must be a method such as Dense(), Blockwise(), Harmonic() or Flash()"
        )
    used: set[str] = set()
    outer = _used.get()
    pinned_token, used_token = _pinned.set(_pinned.get() if method is None else method), _used.set(used)
    try:
        yield used
    finally:
        _pinned.reset(pinned_token)
        _used.reset(used_token)
        if outer is not None:
            outer |= used
