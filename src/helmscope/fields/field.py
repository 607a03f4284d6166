"""What a field is to the rest of the house."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.geometry.arithmetic import check_readable, every
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@runtime_checkable
class Field(Protocol):
    """Tokens in, velocities out: (*batch, n, d) -> (*batch, n, d), tangent to the sphere at each token."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """The velocity of every token."""


@runtime_checkable
class TokenField(Protocol):
    """A field whose tokens carry weights: the measure sum_j m_j delta_{x_j} instead of a list of points."""

    @property
    def exchangeable(self) -> bool:
        """Whether tokens can be relabelled, and so merged."""

    def velocity(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The tangent velocity, unchecked."""

    def ambient(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The velocity before projection, unchecked."""


@runtime_checkable
class KernelField(Protocol):
    """A field that attends: it knows how much each token sees of each other."""

    def kernel(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The weight of key j for query i: (*batch, n, n), for several heads (*batch, heads, n, n)."""


@runtime_checkable
class Sized(Protocol):
    """A field with parameters that fit some tokens only."""

    def check_size(self, x: Tensor) -> None:
        """Refuse tokens that do not fit."""


@runtime_checkable
class LayeredField(Protocol):
    """A field that is also a discrete layer with an order of its own, such as a block: attention, then MLP."""

    def layer(self, x: Tensor, h: Tensor, weights: Tensor | None = None) -> Tensor:
        """The state one layer of size h later."""


@runtime_checkable
class StreamField(Protocol):
    """A field whose state may be a residual stream y in R^d, seen through a norm, instead of unit vectors."""

    @property
    def on_sphere(self) -> bool:
        """Whether states are unit vectors."""

    def direction(self, y: Tensor) -> Tensor:
        """The unit vector that the norm makes of y."""

    def radius(self, y: Tensor) -> Tensor:
        """The length that the norm divides out, without the last axis."""


def is_continuous(field: object) -> bool:
    """Whether the velocity of a field is continuous: so it is, unless the field says otherwise, as ``Hardmax`` does.

    >>> is_continuous(torch.zeros_like)
    True
    """
    return bool(getattr(field, "continuous", True))


def lives_on_sphere(field: object) -> bool:
    """Whether the states of a field are unit vectors: so it is, unless the field says otherwise.

    >>> lives_on_sphere(torch.zeros_like)
    True
    """
    return not isinstance(field, StreamField) or field.on_sphere


@dataclass(frozen=True, eq=False)
class ScaledVelocity:
    """A velocity too large for its dtype: e^{log_scale} times ``direction``, one log scale a token.

    >>> ScaledVelocity(torch.ones(1, 2), torch.full((1, 1), 100.0)).over(1e-43)
    tensor([[2.6881, 2.6881]])
    """

    direction: Float[Tensor, "*batch n d"]
    log_scale: Float[Tensor, "*batch n 1"]

    def over(self, duration: Tensor | float) -> Float[Tensor, "*batch n d"]:
        """The displacement ``duration`` >= 0 times velocity, finite where the product is, though the velocity is not.

        >>> ScaledVelocity(torch.ones(1, 2), torch.full((1, 1), 1000.0)).over(0.0)
        tensor([[0., 0.]])
        """
        duration = torch.as_tensor(duration, dtype=torch.float64, device=self.direction.device)
        factor = torch.exp(torch.log(duration) + self.log_scale.to(torch.float64))
        return (factor * self.direction.to(torch.float64)).to(self.direction.dtype)


@runtime_checkable
class ScaledField(Protocol):
    """A field whose velocity can leave the dtype and then comes with a log scale."""

    def scaled(self, x: Tensor, weights: Tensor | None = None) -> ScaledVelocity:
        """The velocity as direction and log scale, unchecked."""


def check_weights(
    x: Float[Tensor, "*batch n d"],
    weights: Float[Tensor, "*batch n"] | None,
    mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n"] | None:
    """Token weights and key padding as one: the weight of a padded token is 0. None where every weight is 1.

    >>> check_weights(torch.eye(2), None, torch.tensor([True, False]))
    tensor([1., 0.])
    """
    for name, given in (("weights", weights), ("mask", mask)):
        if given is not None and (not isinstance(given, torch.Tensor) or not _fits(given.shape, x.shape[:-1])):
            shown = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise HelmscopeError(
                f"{name} is {shown}, but it must be a tensor of shape {tuple(x.shape[:-1])} or ({x.shape[-2]},)"
            )
        if given is not None:
            check_readable(name, given)
    if mask is not None and mask.dtype != torch.bool:
        raise HelmscopeError(f"mask has dtype {mask.dtype}, but it must be torch.bool, True at real tokens")
    if weights is None and mask is None:
        return None
    combined = torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device) if weights is None else weights.to(x)
    good = (combined == 0) | ((combined >= 1e-30) & (combined <= 1e30))  # far from where sums leave float32
    if not every(good):
        bad = combined[~good][0].item()
        raise HelmscopeError(
            f"weights holds the entry {bad:g}, but every weight must be finite and >= 0 (0, or 1e-30 to 1e30)"
        )
    combined = combined if mask is None else combined * mask.to(x)
    if not every(combined.sum(-1) > 0):
        raise HelmscopeError("weights and mask leave a system without any token of positive weight")
    return combined.expand(x.shape[:-1])


def _fits(shape: torch.Size, tokens: torch.Size) -> bool:
    """One entry per token: of every system, or the same along the leading axes, which are missing or of length 1."""
    if not 0 < len(shape) <= len(tokens) or shape[-1] != tokens[-1]:
        return False
    return all(own in (1, wanted) for own, wanted in zip(reversed(shape), reversed(tokens), strict=False))
