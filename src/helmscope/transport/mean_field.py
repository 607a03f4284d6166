"""An interacting field as the drift of single points: a tagged token in the mean field of the others.

Tokens that attend to each other have no reference process of independent points. But among infinitely many of them that
start from the law mu_0, one token moves by

    dX = b(X, t) dt + sqrt(2 Sigma) dW,       b(x, t) = the velocity of a token at x among tokens with the law mu_t,

where mu_t is the law of X_t itself (McKean-Vlasov), and different tokens are independent (propagation of chaos). Here
mu_t is the cloud of finitely many tokens, integrated once without control and then held fixed: a control of the tagged
token does not act on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.attention import SA
from helmscope.fields.cross import CrossAttention
from helmscope.fields.field import Field, StateSpace, as_field
from helmscope.solve.integrate import integrate
from helmscope.transport.clouds import check_clouds
from helmscope.transport.cost import Euclidean, Geodesic
from helmscope.types import HelmscopeError, check_integer, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time
    from helmscope.fields.noise import Noise


@dataclass(frozen=True, eq=False)
class MeanFieldReference(Field):
    """Drift b(x, t), the velocity of a token at x in the mean field mu_t of an interacting field; from
    ``mean_field_reference``.

    ``path`` (steps + 1, N, d) holds the cloud mu_t at equally spaced times from 0 to ``horizon``, and
    ``path_weights`` (N,) its masses; between two of them b is interpolated linearly. Tokens do not interact.

    >>> from helmscope.fields.attention import SA
    >>> reference = mean_field_reference(SA(beta=0.0), torch.eye(2, dtype=torch.float64), horizon=1.0)
    >>> x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    >>> reference(x, t=0.0)  # the mean of both tokens, projected
    tensor([[0.0000, 0.5000]], dtype=torch.float64)
    """

    field: Field
    path: Float[Tensor, "steps_plus_1 N d"]
    path_weights: Float[Tensor, " N"]
    horizon: float

    def __repr__(self) -> str:
        steps, count, _ = self.path.shape
        return f"MeanFieldReference({self.field!r}, {count} tokens, {steps - 1} steps, horizon={self.horizon!r})"

    @property
    def space(self) -> StateSpace:
        """The space of the field."""
        return self.field.space

    @property
    def autonomous(self) -> bool:
        """False: the mean field changes with time."""
        return False

    @property
    def exchangeable(self) -> bool:
        """True: points do not interact."""
        return True

    @property
    def takes_weights(self) -> bool:
        """False: points do not interact."""
        return False

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the points have the dimension of the mean field."""
        super().check_size(x)
        if x.shape[-1] != self.path.shape[-1]:
            raise HelmscopeError(f"x has dimension {x.shape[-1]}, but the mean field has {self.path.shape[-1]}")

    def check_times(self, times: Sequence[float], *, reads_end: bool) -> None:
        """Raise ``HelmscopeError`` for times beyond the horizon."""
        if times[-1] > self.horizon * (1 + 1e-9):
            raise HelmscopeError(
                f"times holds {times[-1]:g}, but the mean field is known up to its horizon {self.horizon:g}"
            )

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """b(x, t), unchecked: the points x are tokens without mass among those of the mean field."""
        position = torch.as_tensor(t, dtype=torch.float64, device=x.device) * ((len(self.path) - 1) / self.horizon)
        position = position.reshape(position.shape[:-2] if position.ndim > 1 else position.shape)
        before = position.floor().clamp(0, len(self.path) - 2).long()
        share = (position - before).clamp(0, 1).reshape(*position.shape, 1, 1).to(x.dtype)
        others = torch.stack([
            self.path[index].to(x).expand(*x.shape[:-2], *self.path.shape[1:]) for index in (before, before + 1)
        ])  # fmt: skip
        low, high = self._among(x.expand(2, *x.shape), others, t).unbind(0)
        velocity: Tensor = low + share * (high - low)
        return velocity

    def _among(self, x: Tensor, others: Tensor, t: Time) -> Tensor:
        """The velocity of tokens x without mass among others (*batch, N, d)."""
        masses = self.path_weights.to(x)
        if type(self.field) is SA:  # needs no attention among the others
            matrices = {"query_key": self.field.query_key, "value": self.field.value}
            return CrossAttention(self.field.beta, others, memory_weights=masses, **matrices).velocity(x)
        n = x.shape[-2]
        tokens = torch.cat([x, others], -2)
        weights = torch.cat([x.new_zeros(n), masses]).expand(tokens.shape[:-1])
        velocity: Tensor = self.field.velocity(tokens, weights=weights, t=t)[..., :n, :]
        return velocity


def mean_field_reference(
    field: Field,
    x: Float[Tensor, "n d"],
    x_weights: Float[Tensor, " n"] | None = None,
    *,
    noise: Noise | None = None,
    horizon: float = 1.0,
    particles: int = 512,
    steps: int = 64,
    seed: int = 0,
) -> MeanFieldReference:
    """The drift of one token among infinitely many that start from the law of x and follow ``field`` with ``noise``.

    The mean field is a cloud of max(1, ``particles`` // n) copies of each point of x, n at least, integrated once with
    the random numbers of ``seed`` and stored at ``steps`` + 1 times; without noise copies stay together, and there is
    one of each. Its error is that of sampling, of the order N^(-1/2) for N tokens with noise, and of the order
    ``steps``^-2 for the interpolation in time. An evaluation at m points costs as much as the field does for N + m
    tokens, and for SA as attention of m tokens to N.

    Raises ``HelmscopeError`` for a field whose tokens have an order (a causal mask, positions, a bias) or no weights,
    because it has no mean field, and for points that are not in its space.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.fields.noise import IsotropicNoise
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> mean_field_reference(SA(beta=1.0), x, noise=IsotropicNoise(0.1))
    MeanFieldReference(SA(beta=1.0), 510 tokens, 64 steps, horizon=1.0)
    """
    field = as_field(field)
    if not (field.exchangeable and field.takes_weights):
        raise HelmscopeError(
            f"reference is {field.name}, whose velocity at a point depends on the other points, but not through their "
            "law alone: a mean field needs exchangeable tokens with weights, without causal mask, bias and positions"
        )
    if field.space not in (StateSpace.SPHERE, StateSpace.FLAT):
        raise HelmscopeError(f"reference is {field.name}, a field of {field.space.value}, but it must be one of the "
                             "sphere or of R^d")  # fmt: skip
    horizon = check_real("horizon", horizon, above=0)
    cost = Geodesic() if field.space is StateSpace.SPHERE else Euclidean()
    clouds = check_clouds(x, x, x_weights, x_weights, cost=cost)
    if clouds.x.ndim != 2:
        raise HelmscopeError(f"x has shape {tuple(clouds.x.shape)}, but a mean field is that of one cloud (n, d)")
    copies = max(1, check_integer("particles", particles, at_least=1) // len(clouds.x)) if noise is not None else 1
    count = check_integer("steps", steps, at_least=1)
    start = clouds.x.detach().double().repeat(copies, 1)
    masses = (clouds.a.detach().double() / copies).repeat(copies)
    times = [horizon * k / count for k in range(count + 1)]
    run = integrate(field, start, times, weights=masses, noise=noise, seed=seed)
    if not run.outcome.ok:
        raise HelmscopeError(f"reference is {field.name}, whose mean field cannot be integrated: {run.outcome}")
    return MeanFieldReference(field, run.states.detach(), masses, horizon)
