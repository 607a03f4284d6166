"""Attention and MLP together: the transformer block, as a flow and as the layer it is.

A block writes twice, once a half: attention mixes the tokens, the MLP moves each of them.

    sequential   y <- close_A(y + h a(y)),  then  y <- close_M(y + h m(y))
    parallel     y <- close_A(y + h (a(y) + m(y)))

with a(y) = write_A(attention(read_A y)), m(y) = write_M(mlp(read_M y)); ``read``, ``write`` and ``close`` say where the
norms stand (``fields/placement.py``). As a flow, h -> 0, both orders are y' = a(y) + m(y): what separates them is the
commutator, of order h a layer (source 000-8). The printed form of source 002, with the MLP inside the projection of
attention, is ``MultiHeadAsPrinted``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from helmscope.fields.field import Field, Space
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.fields.placement import Half, Placement, PostNorm
from helmscope.geometry.sphere import project
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True, eq=False)
class Block(Field):
    """A transformer block: x' = P (attention(x) + mlp(x)) with post-norm, y' = attention(N y) + mlp(N y) with pre-norm
    (sources 000 and 002).

    ``placement`` says where the norms stand: ``PostNorm()``, ``PreNorm()``, ``SandwichNorm()``, ``NGPT()`` or
    ``NoNorm()``, under which states are any points of R^d; with
    ``parallel`` both halves read the same state. ``stepper=Layer()`` runs the discrete block. With pre-norm and
    sandwich the state is the residual stream y, and a trajectory holds its direction and its radius.

    >>> import torch
    >>> from helmscope.fields.activations import ReLU
    >>> from helmscope.fields.attention import SA
    >>> mlp = MLP(w_in=torch.eye(2), w_out=-torch.eye(2), activation=ReLU())
    >>> Block(SA(beta=0.0), mlp)(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """

    parts: ClassVar[tuple[str, ...]] = ("attention", "mlp")

    attention: Field
    mlp: MLP | GatedMLP
    placement: Placement = field(default_factory=PostNorm, kw_only=True)
    parallel: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.attention, Field) or not self.attention.attends:
            name = getattr(self.attention, "__name__", type(self.attention).__name__)
            raise HelmscopeError(f"attention is {name}, but it must be a field that attends, such as SA(beta=4.0)")
        if not isinstance(self.mlp, MLP | GatedMLP):
            raise HelmscopeError(f"mlp is {self.mlp!r}, but it must be an MLP or a GatedMLP")
        if not isinstance(self.placement, Placement):
            raise HelmscopeError(f"placement is {self.placement!r}, but it must be a placement such as PreNorm()")
        if not isinstance(self.parallel, bool):
            raise HelmscopeError(f"parallel is {self.parallel!r}, but it must be True or False")

    @property
    def space(self) -> Space:
        """Unit vectors, a residual stream, or points of R^d where there are no norms."""
        return self.placement.space

    @property
    def attends(self) -> bool:
        """Whether the field has a kernel."""
        return True

    @property
    def continuous(self) -> bool:
        """Whether the velocity is continuous, as that of every attention but hardmax is."""
        return self.attention.continuous

    @property
    def only_layers(self) -> bool:
        """Whether the block is a map and no flow: its norm changes the state even where nothing is added."""
        return self.placement.only_layers

    @property
    def exchangeable(self) -> bool:
        """Whether tokens can be relabelled, and so merged."""
        return self.attention.exchangeable

    @property
    def force(self) -> MLP | GatedMLP:
        """The MLP as a force on unit vectors, with the gain and bias of the norm that it reads folded in."""
        return self.placement.force(self.mlp)

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Refuse tokens that do not fit the attention, the MLP or a norm."""
        for part in (self.attention, self.mlp, self.placement):
            part.check_size(x)
        super().check_size(x)

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """a(x) + m(x), tangent where the state is unit vectors; unchecked."""
        total = self.ambient(x, t=t, weights=weights)
        return project(x, total) if self.space is Space.SPHERE else total

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """a(x) + m(x), what the block writes, before projection."""
        return self.write(Half.ATTENTION, x, t=t, weights=weights) + self.write(Half.MLP, x, t=t, weights=weights)

    def write(
        self, half: Half, y: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """What one half adds to the state y."""
        if half is Half.CROSS:
            raise HelmscopeError("half is Half.CROSS, but a simulated block has two halves: ATTENTION and MLP")
        part = self.attention if half is Half.ATTENTION else self.mlp
        return self.placement.write(half, part.ambient(self.placement.read(half, y), t=t, weights=weights), y)

    def layer(
        self, x: Float[Tensor, "*batch n d"], h: Tensor | float = 1.0, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The discrete block with writes scaled by h: one layer."""
        if self.parallel:
            return self.placement.close(Half.ATTENTION, x + h * self.ambient(x, t=t, weights=weights))
        for half in (Half.ATTENTION, Half.MLP):
            x = self.placement.close(half, x + h * self.write(half, x, t=t, weights=weights))
        return x

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """The attention kernel at state x."""
        return self.attention.kernel(self.placement.read(Half.ATTENTION, x), t=t, weights=weights)

    def direction(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The state as unit vectors: what the norm before attention divides out is gone."""
        if self.space is not Space.STREAM:
            return y
        return self.placement.norm(Half.ATTENTION).direction(y)

    def radius(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
        """The length of the state that the norm before attention divides out."""
        if self.space is not Space.STREAM:
            return super().radius(y)
        return self.placement.norm(Half.ATTENTION).radius(y)
