"""Arithmetic that does not depend on what a caller has switched on in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

Given = ParamSpec("Given")
Result = TypeVar("Result")

DEVICES = ("cpu", "cuda")  # where tokens may live


def full_precision(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """``function`` with its matrix products in the dtype of their factors, inside ``torch.autocast`` too.

    Autocast would round float32 factors to bfloat16 or float16, three digits, without a word. It is switched off on
    the way in and is as it was on the way out. Every function that multiplies matrices is decorated (a test looks), so
    that one called by itself is as safe as one that ``integrate`` calls. Off, the check takes half a microsecond.

    >>> product = full_precision(torch.matmul)
    >>> third = torch.tensor([[1 / 3]])
    >>> with torch.autocast("cpu"):
    ...     product(third, third).dtype, torch.matmul(third, third).dtype
    (torch.float32, torch.bfloat16)
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not any(map(torch.is_autocast_enabled, DEVICES)):
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, DEVICES):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


def check_readable(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds no values to read: one that is sparse, or on the device meta, where new tensors lie
    after ``torch.set_default_device("meta")``.

    >>> check_readable("x", torch.ones(2))
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        raise HelmscopeError(
            f"{name} is a tensor of layout {tensor.layout} on {tensor.device}, but it must be dense and hold values"
        )


def every(condition: Tensor) -> bool:
    """Whether a condition on values holds everywhere; True where torch does not let anybody look, which is within
    ``torch.vmap``. Checks of input go through here, so that a checked call can be vectorized.

    >>> every(torch.tensor([True, False]))
    False
    >>> torch.vmap(lambda x: x if every(x > 1) else -x)(torch.tensor([0.0, 2.0]))
    tensor([0., 2.])
    """
    return vectorized(condition) or bool(condition.all())


def vectorized(x: Tensor) -> bool:
    """Whether x stands for many tensors, at some level of nested transforms: ``torch.vmap`` is at work, and no value of
    x can be read.

    >>> vectorized(torch.ones(2)), torch.func.grad(lambda x: x if vectorized(x) else 2 * x)(torch.tensor(1.0)).item()
    (False, 2.0)
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False
