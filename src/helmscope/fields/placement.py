"""The placement of the norms in a block. Each half (attention, MLP) has three functions:

    placement   read        write             normalize_sum   state
    post        y           f                 N               unit vectors (no flow where N has gain or bias)
    pre         N y         f                 y               residual stream y in R^d: its radius is a state
    sandwich    N_in y      N_out f           y               residual stream (peri-norm)
    nGPT        y           rate (N f - y)    y / |y|         unit vectors
    none        y           f                 y               points of R^d

so that a half maps y to normalize_sum(y + h write(f(read y), y)). Sources: post-norm as in [Geshkovski et al. 2023];
for pre-norm the direction x = y/|y| satisfies x' = P f / |y| and the radius |y|' = <x, f> [Helmholtz Transformer, no.
1]; sandwich and peri-norm arXiv:2105.13290, arXiv:2502.02732; nGPT arXiv:2410.01131.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import StateSpace
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.fields.norms import Norm, UnitNorm
from helmscope.geometry.sphere import retract
from helmscope.types import ConciseRepr, HelmscopeError, check_real
from helmscope.types import Half as Half

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Placement(ConciseRepr, ABC):
    """Base class of placements; ``attention_norm`` and ``mlp_norm`` default to y/|y|, which returns unit vectors."""

    attention_norm: Norm = field(default_factory=UnitNorm, kw_only=True)
    mlp_norm: Norm = field(default_factory=UnitNorm, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("attention_norm", "mlp_norm"):
            _check_norm(name, getattr(self, name))

    @property
    def discrete_only(self) -> bool:
        """Whether the block is a discrete map without a flow."""
        return False

    @property
    @abstractmethod
    def space(self) -> StateSpace:
        """The space of the state."""

    def norm(self, half: Half) -> Norm:
        """The norm of one half.

        >>> PreNorm(mlp_norm=UnitNorm()).norm(Half.MLP)
        UnitNorm()
        """
        return self.attention_norm if half is Half.ATTENTION else self.mlp_norm

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the tokens fit the gain and bias of the norms."""
        for half in (Half.ATTENTION, Half.MLP):
            self.norm(half).check_size(x, name=f"x at {half.value}_norm")

    def read(self, half: Half, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The input of the half, given the state.

        >>> PreNorm().read(Half.MLP, torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
        """
        return y

    def write(
        self, half: Half, out: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch n d"]
    ) -> Float[Tensor, "*batch n d"]:
        """The increment of the state, given the output of the half.

        >>> SandwichNorm().write(Half.MLP, torch.tensor([[3.0, 4.0]]), torch.ones(1, 2))
        tensor([[0.6000, 0.8000]])
        """
        return out

    def normalize_sum(self, half: Half, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The new state, given the sum of the state and the increment.

        >>> PostNorm().normalize_sum(Half.MLP, torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
        """
        return y

    def force(self, mlp: MLP | GatedMLP) -> MLP | GatedMLP:
        """The MLP as a force on unit vectors."""
        return mlp


@dataclass(frozen=True, eq=False)
class PostNorm(Placement):
    """Post-norm, x <- N(x + h f(x)), as in [Geshkovski et al. 2023] and in the first transformers.

    With y/|y| states are unit vectors and the flow is x' = P f(x). A norm with gain, bias or epsilon changes the state
    even if f = 0: then the block is a discrete map, which only the stepper ``Layer`` runs. Raises ``HelmscopeError``
    for norms of another type.

    >>> PostNorm().space.value
    'unit vectors'
    """

    @property
    def space(self) -> StateSpace:
        """Unit vectors if both norms are y/|y|, else a residual stream."""
        return StateSpace.STREAM if self.discrete_only else StateSpace.SPHERE

    @property
    def discrete_only(self) -> bool:
        """Whether one of the norms is not y/|y|."""
        return not all(isinstance(self.norm(half), UnitNorm) for half in (Half.ATTENTION, Half.MLP))

    def normalize_sum(self, half: Half, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The normalized sum."""
        return self.norm(half)(y)


@dataclass(frozen=True, eq=False)
class PreNorm(Placement):
    """Pre-norm, y <- y + h f(N y), as in GPT-2 and later models.

    The radius |y| is part of the state: the direction moves at a speed proportional to 1 / |y|.

    >>> PreNorm().space.value
    'a residual stream'
    """

    @property
    def space(self) -> StateSpace:
        """A residual stream."""
        return StateSpace.STREAM

    def read(self, half: Half, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The normalized residual stream."""
        return self.norm(half)(y)

    def force(self, mlp: MLP | GatedMLP) -> MLP | GatedMLP:
        """The MLP with gain and bias of its norm folded in; exact if the norm has no epsilon."""
        return folded(mlp, self.mlp_norm)


@dataclass(frozen=True, eq=False)
class SandwichNorm(PreNorm):
    """Sandwich norm or peri-norm, y <- y + h N_out f(N_in y): a norm before and after each half, so that all increments
    have the same size.

    >>> SandwichNorm().attention_out_norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    attention_out_norm: Norm = field(default_factory=UnitNorm, kw_only=True)
    mlp_out_norm: Norm = field(default_factory=UnitNorm, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention_out_norm", "mlp_out_norm"):
            _check_norm(name, getattr(self, name))

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the tokens fit all four norms."""
        super().check_size(x)
        self.attention_out_norm.check_size(x, name="x at attention_out_norm")
        self.mlp_out_norm.check_size(x, name="x at mlp_out_norm")

    def write(
        self, half: Half, out: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch n d"]
    ) -> Float[Tensor, "*batch n d"]:
        """The normalized output."""
        return (self.attention_out_norm if half is Half.ATTENTION else self.mlp_out_norm)(out)


@dataclass(frozen=True, eq=False)
class NoNorm(Placement):
    """No norms, y <- y + h f(y): the residual stream of the [Mean-field notes], in R^d. Norms that are passed are not
    used.

    >>> NoNorm().space.value
    'points of R^d'
    """

    @property
    def space(self) -> StateSpace:
        """All of R^d."""
        return StateSpace.FLAT


@dataclass(frozen=True, eq=False)
class NGPT(Placement):
    """The placement of nGPT, x <- N(x + h rate (N f(x) - x)): steps on the sphere towards the normalized output.

    ``attention_rate`` and ``mlp_rate`` are numbers >= 0, or tensors (d,) with one rate per dimension. As a flow,
    x' = P [rate (N f(x) - x)]. Raises ``HelmscopeError`` for norms other than y/|y| and for negative rates.

    >>> NGPT(attention_rate=0.5).space.value
    'unit vectors'
    """

    attention_rate: float | Tensor = field(default=1.0, kw_only=True)
    mlp_rate: float | Tensor = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention_norm", "mlp_norm"):
            if not isinstance(getattr(self, name), UnitNorm):
                raise HelmscopeError(f"{name} is {getattr(self, name)!r}, but for nGPT it must be UnitNorm()")
        for name in ("attention_rate", "mlp_rate"):
            _check_rate(name, getattr(self, name))

    @property
    def space(self) -> StateSpace:
        """Unit vectors."""
        return StateSpace.SPHERE

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the tokens fit the rates."""
        for name in ("attention_rate", "mlp_rate"):
            rate = getattr(self, name)
            if isinstance(rate, torch.Tensor) and rate.ndim and rate.shape != x.shape[-1:]:
                raise HelmscopeError(f"{name} has shape {tuple(rate.shape)}, but tokens need ({x.shape[-1]},)")

    def write(
        self, half: Half, out: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch n d"]
    ) -> Float[Tensor, "*batch n d"]:
        """The step from the state towards the normalized output."""
        rate = self.attention_rate if half is Half.ATTENTION else self.mlp_rate
        return (rate.to(y) if isinstance(rate, torch.Tensor) else rate) * (retract(out) - y)

    def normalize_sum(self, half: Half, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The sum, normalized to the sphere."""
        return retract(y)


def folded(mlp: MLP | GatedMLP, norm: Norm) -> MLP | GatedMLP:
    """The MLP g with g(x) = mlp(norm(x)) at unit vectors x (in the subspace 1-perp for LayerNorm): gain, bias and the
    factor sqrt(d) of the norm are folded into the input weights. Exact if the norm has no epsilon.

    >>> from helmscope.fields.norms import RMSNorm
    >>> mlp = MLP(w_in=torch.eye(2), w_out=torch.eye(2))
    >>> norm, x = RMSNorm(gain=torch.tensor([1.0, 2.0])), torch.tensor([0.6, 0.8])
    >>> bool((folded(mlp, norm)(x) - mlp(norm(x))).abs().max() < 1e-6)
    True
    """
    if isinstance(norm, UnitNorm):
        return mlp
    root = mlp.dim**0.5
    if isinstance(mlp, MLP):
        w_in, b_in = norm.fold(mlp.w_in, mlp.b_in)
        return replace(mlp, w_in=root * w_in, b_in=b_in)
    w_gate, b_gate = norm.fold(mlp.w_gate, mlp.b_gate)
    w_up, b_up = norm.fold(mlp.w_up, mlp.b_up)
    return replace(mlp, w_gate=root * w_gate, b_gate=b_gate, w_up=root * w_up, b_up=b_up)


def _check_norm(name: str, norm: object) -> None:
    if isinstance(norm, type) or not isinstance(norm, Norm):
        raise HelmscopeError(f"{name} is {norm!r}, but it must be a norm: UnitNorm(), RMSNorm() or LayerNorm()")


def _check_rate(name: str, rate: object) -> None:
    if isinstance(rate, torch.Tensor) and rate.ndim == 1:
        for entry in rate.detach().tolist():
            check_real(f"an entry of {name}", entry, at_least=0)
    else:
        check_real(name, rate, at_least=0)
