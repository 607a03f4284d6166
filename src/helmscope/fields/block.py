"""The transformer block, attention and MLP, as a flow and as a discrete layer.

A block has two halves, each of which writes to the state: attention mixes the tokens, the MLP acts on each of them.

    sequential   y <- N_A(y + h a(y)),  then  y <- N_M(y + h m(y))
    parallel     y <- N_A(y + h (a(y) + m(y)))

with a(y) = write_A(attention(read_A y)), m(y) = write_M(mlp(read_M y)); ``read``, ``write`` and N, ``normalize_sum``,
depend on the placement of the norms (``fields/placement.py``). As a flow, h -> 0, both are y' = a(y) + m(y); they
differ by the commutator, of order h per layer [Helmholtz Transformer, no. 8]. The form that the [Mean-field notes]
print, with the MLP inside the projection of attention, is ``MultiHeadAsPrinted``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from helmscope.fields.field import Field, StateSpace
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
    [Helmholtz Transformer; Mean-field notes].

    ``placement`` is the placement of the norms: ``PostNorm()``, ``PreNorm()``, ``SandwichNorm()``, ``NGPT()`` or
    ``NoNorm()``, under which states are any points of R^d. If ``parallel``, both halves read the same state.
    ``stepper=Layer()`` runs the discrete block. With pre-norm and sandwich norm the state is the residual stream y, and
    a trajectory stores its direction and its radius. Raises ``HelmscopeError`` unless ``attention`` is an attention
    field, ``mlp`` an MLP and ``placement`` a placement.

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
            raise HelmscopeError(f"attention is {name}, but it must be an attention field such as SA(beta=4.0)")
        if not isinstance(self.mlp, MLP | GatedMLP):
            raise HelmscopeError(f"mlp is {self.mlp!r}, but it must be an MLP or a GatedMLP")
        if not isinstance(self.placement, Placement):
            raise HelmscopeError(f"placement is {self.placement!r}, but it must be a placement such as PreNorm()")
        if not isinstance(self.parallel, bool):
            raise HelmscopeError(f"parallel is {self.parallel!r}, but it must be True or False")

    @property
    def space(self) -> StateSpace:
        """Unit vectors, a residual stream, or points of R^d, depending on the placement of the norms."""
        return self.placement.space

    @property
    def attends(self) -> bool:
        """True: the field has a kernel."""
        return True

    @property
    def continuous(self) -> bool:
        """Whether the velocity is continuous, as it is for all attention fields but ``Hardmax``."""
        return self.attention.continuous

    @property
    def discrete_only(self) -> bool:
        """Whether the block is a discrete map without a flow: its norm changes the state even if nothing is added."""
        return self.placement.discrete_only

    @property
    def exchangeable(self) -> bool:
        """Whether the flow commutes with permutations of the tokens."""
        return self.attention.exchangeable

    @property
    def force(self) -> MLP | GatedMLP:
        """The MLP as a force on unit vectors, with the gain and bias of the norm before it folded in.

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> mlp = MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2))
        >>> block = Block(SA(beta=0.0), mlp)
        >>> block.force(torch.tensor([1.0, -1.0]))
        tensor([ 1.6827, -0.3173])
        """
        return self.placement.force(self.mlp)

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the tokens fit the attention, the MLP and the norms."""
        for part in (self.attention, self.mlp, self.placement):
            part.check_size(x)
        super().check_size(x)

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """a(x) + m(x), projected if states are unit vectors; unchecked."""
        total = self.ambient(x, t=t, weights=weights)
        return project(x, total) if self.space is StateSpace.SPHERE else total

    def ambient(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """a(x) + m(x), the write of the block before projection."""
        return self.write(Half.ATTENTION, x, t=t, weights=weights) + self.write(Half.MLP, x, t=t, weights=weights)

    def write(
        self, half: Half, y: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The write of one half: its increment of the state y. Raises ``HelmscopeError`` for ``Half.CROSS``.

        >>> import torch
        >>> from helmscope.fields.attention import SA
        >>> mlp = MLP(w_in=torch.eye(2), w_out=2 * torch.eye(2))
        >>> block = Block(SA(beta=0.0), mlp)
        >>> block.write(Half.ATTENTION, torch.eye(2))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
        """
        if half is Half.CROSS:
            raise HelmscopeError("half is Half.CROSS, but a simulated block has two halves: ATTENTION and MLP")
        part = self.attention if half is Half.ATTENTION else self.mlp
        return self.placement.write(half, part.ambient(self.placement.read(half, y), t=t, weights=weights), y)

    def layer(
        self, x: Float[Tensor, "*batch n d"], h: Tensor | float = 1.0, weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """The state after one discrete block, with writes scaled by h."""
        if self.parallel:
            return self.placement.normalize_sum(Half.ATTENTION, x + h * self.ambient(x, t=t, weights=weights))
        for half in (Half.ATTENTION, Half.MLP):
            x = self.placement.normalize_sum(half, x + h * self.write(half, x, t=t, weights=weights))
        return x

    def kernel(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n n"]:
        """The attention kernel at the state x."""
        return self.attention.kernel(self.placement.read(Half.ATTENTION, x), t=t, weights=weights)

    def direction(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The direction of the residual stream, as the norm before attention computes it; other states unchanged."""
        if self.space is not StateSpace.STREAM:
            return y
        return self.placement.norm(Half.ATTENTION).direction(y)

    def radius(self, y: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n"]:
        """The length of the state, for a residual stream the one that the norm before attention divides out."""
        if self.space is not StateSpace.STREAM:
            return super().radius(y)
        return self.placement.norm(Half.ATTENTION).radius(y)
