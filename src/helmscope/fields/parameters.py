"""Parameters of fields: numbers, tensors that may require gradients, and tensors with batch axes, one value per system.

The parameter of one system has a fixed number of axes, 0 for beta and 2 for a matrix; all axes before them are batch
axes, which broadcast with those of the tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from helmscope.geometry.arithmetic import check_dense_values, every, is_vmapped
from helmscope.types import HelmscopeError, check_real, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Change = Callable[["Tensor", int], "Tensor"]
Holder = TypeVar("Holder")


def number_or_tensor(
    name: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf
) -> float | Tensor:
    """``value`` as a float, or unchanged if it is a tensor with batch axes or a derivative.

    Raises ``HelmscopeError``, which names the argument, unless all values are finite, >= at_least and > above.

    >>> number_or_tensor("beta", torch.tensor(4.0), at_least=0)
    4.0
    >>> number_or_tensor("beta", torch.tensor([1.0, 4.0]), at_least=0)
    tensor([1., 4.])
    """
    if not isinstance(value, torch.Tensor) or not (value.ndim or is_moving(value)):
        return check_real(name, value, at_least=at_least, above=above)
    check_dense_values(name, value)
    if not value.dtype.is_floating_point:
        raise HelmscopeError(f"{name} has dtype {value.dtype}, but it must hold floating-point numbers")
    entries = value.detach()
    good = torch.isfinite(entries) & (entries >= at_least) & (entries > above)
    if not every(good):
        bad = entries[~good].flatten()[0].item()
        bound = f"> {above:g}" if above > -math.inf else f">= {at_least:g}"
        raise HelmscopeError(f"{name} holds {bad:g}, but every number must be finite and {bound}")
    return value


def is_moving(value: Tensor) -> bool:
    """Whether a tensor is differentiated or vectorized, so that it must not be converted to a number.

    >>> is_moving(torch.ones(1)), is_moving(torch.ones(1, requires_grad=True))
    (False, True)
    """
    tangent = torch.autograd.forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return value.requires_grad or tangent is not None or wrapped or is_vmapped(value)


def over_tokens(value: float | Tensor, like: Float[Tensor, "*batch n d"]) -> float | Tensor:
    """One value per system, shaped as a factor of (*batch, n, d) tensors.

    >>> over_tokens(torch.tensor([1.0, 4.0]), torch.ones(2, 3, 3)).shape
    torch.Size([2, 1, 1])
    """
    return value.to(like)[..., None, None] if isinstance(value, torch.Tensor) else value


def copy_with(holder: Holder, values: dict[str, Any]) -> Holder:
    """A copy of a frozen dataclass with some values replaced, unchecked and without its cached properties."""
    new = copy.copy(holder)
    names = {item.name for item in fields(holder)}  # type: ignore[arg-type]
    for name in set(vars(new)) - names:
        object.__delattr__(new, name)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def flattened(batch: torch.Size) -> Change:
    """The change of parameters that expands their batch axes to ``batch`` and flattens them into one.

    >>> flattened(torch.Size([2, 3]))(torch.ones(3, 4, 4), 2).shape
    torch.Size([6, 4, 4])
    """
    return lambda value, axes: value.expand(*batch, *value.shape[value.ndim - axes :]).reshape(
        batch.numel(), *value.shape[value.ndim - axes :]
    )


def selected(which: Tensor) -> Change:
    """The change of parameters that selects systems along the only batch axis."""
    return lambda value, axes: value[which]


def shape_or_type(value: object) -> str:
    """The shape of a tensor, or the type of anything else, for error messages.

    >>> shape_or_type(torch.ones(2, 3)), shape_or_type([1.0])
    ('(2, 3)', 'a list')
    """
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type_with_article(value)


def parameter_text(value: object) -> str:
    """A short description of a parameter for error messages.

    >>> parameter_text(4.0), parameter_text(torch.ones(2, 3))
    ('4', 'a tensor of shape (2, 3)')
    """
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value:g}"
