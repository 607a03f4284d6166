"""Guards that keep results independent of global torch settings: autocast, the default device, threads, and vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from helmscope.types import HelmscopeError, Trajectory, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Params = ParamSpec("Params")
Result = TypeVar("Result")

DEVICES = ("cpu", "cuda")  # the supported device types


def full_precision(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Decorator: run ``function`` with autocast disabled, so that matrix products keep the dtype of their factors.

    Autocast would silently round float32 factors to bfloat16 or float16, which have about three digits. It is disabled
    on entry and restored on exit. Every function that multiplies matrices is decorated (a test enforces this), so that
    calling one directly is as safe as calling it through ``integrate``. If autocast is already off, the check takes
    half a microsecond.

    >>> product = full_precision(torch.matmul)
    >>> third = torch.tensor([[1 / 3]])
    >>> with torch.autocast("cpu"):
    ...     product(third, third).dtype, torch.matmul(third, third).dtype
    (torch.float32, torch.bfloat16)
    """

    @functools.wraps(function)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not any(map(torch.is_autocast_enabled, DEVICES)):
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, DEVICES):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: within it, torch uses one CPU thread. The caller's number is restored afterwards, also after an
    error.

    torch stores the number per Python thread, so other threads that have already used torch keep theirs. A Python
    thread that first uses torch within the context inherits the 1, and keeps it until it calls
    ``torch.set_num_threads``; that affects its speed, not its results.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """The shape to which tensors of these shapes broadcast; raises ValueError if there is none.

    ``torch.broadcast_shapes`` does the same, but its first call imports sympy, a quarter of the time that it takes to
    import torch itself.

    >>> broadcast_shapes((2, 1), (3,))
    torch.Size([2, 3])
    """
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, start=rank - len(shape)):
            if size != 1 and result[axis] not in (1, size):
                raise ValueError(f"shapes {[tuple(shape) for shape in shapes]} do not broadcast")
            if size != 1:
                result[axis] = size
    return torch.Size(result)


def check_dense_values(name: str, tensor: Tensor) -> None:
    """Raise ``HelmscopeError`` unless ``tensor`` is dense and holds values.

    Tensors on the meta device hold none; new tensors are created there after ``torch.set_default_device("meta")``.

    >>> check_dense_values("x", torch.ones(2))
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise HelmscopeError(
            f"{name} is a tensor of layout {tensor.layout} on {tensor.device}, but it must be dense and hold values"
        )


def conversion_hint(name: str, value: object) -> str:
    """The end of an error message for an argument that must be a tensor: how to convert a NumPy array, and what to pass
    of a system or a trajectory.

    >>> import numpy as np
    >>> conversion_hint("x0", np.zeros(2)), conversion_hint("x0", [0.0])
    (': pass torch.from_numpy(x0)', '')
    """
    if type(value).__module__ == "numpy":
        return f": pass torch.from_numpy({name})"
    path = value if isinstance(value, Trajectory) else getattr(value, "trajectory", None)
    if not isinstance(path, Trajectory):
        return ""
    owner = name if path is value else f"{name}.trajectory"
    # states and weights belong together: padding has weight 0
    weights = "" if path.weights is None else f", with its weights {owner}.weights[0, 0]"
    return f": pass one cloud, such as {owner}.states[-1, 0]{weights}"


def check_points(points: object, name: str) -> Float[Tensor, "*batch n d"]:
    """The points, if they are a tensor of finite points of R^d, n >= 1; raises ``HelmscopeError`` otherwise.

    >>> check_points(torch.zeros(0, 2), "x")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: x has shape (0, 2), but it must be (..., n, d) with n >= 1 points and d >= 1
    """
    if not isinstance(points, torch.Tensor):
        raise HelmscopeError(
            f"{name} is {type_with_article(points)}, but it must be a tensor of points (..., n, d)"
            f"{conversion_hint(name, points)}"
        )
    if points.ndim < 2 or 0 in points.shape[-2:]:
        raise HelmscopeError(
            f"{name} has shape {tuple(points.shape)}, but it must be (..., n, d) with n >= 1 points and d >= 1"
        )
    check_dense_values(name, points)
    if points.dtype not in (torch.float64, torch.float32):
        raise HelmscopeError(f"{name} has dtype {points.dtype}, but it must be torch.float64 or torch.float32")
    if not every(torch.isfinite(points.detach())):
        raise HelmscopeError(f"{name} holds NaN or infinite entries, but every point must be finite")
    return points


def every(condition: Tensor) -> bool:
    """Whether a boolean tensor is True everywhere; always True under ``torch.vmap``, where values cannot be read.

    Value checks of arguments go through this function, so that functions which check their input can be vmapped.

    >>> every(torch.tensor([True, False]))
    False
    >>> torch.vmap(lambda x: x if every(x > 1) else -x)(torch.tensor([0.0, 2.0]))
    tensor([0., 2.])
    """
    return is_vmapped(condition) or bool(condition.all())


def is_vmapped(x: Tensor) -> bool:
    """Whether x is batched by ``torch.vmap`` at some level of nested transforms, so that its values cannot be read.

    >>> is_vmapped(torch.ones(2)), torch.func.grad(lambda x: x if is_vmapped(x) else 2 * x)(torch.tensor(1.0)).item()
    (False, 2.0)
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False
