"""The generator of a flow, applied to a probe phi: the rate of change of the mean of phi(x) from a given state.

On the sphere [Helmholtz Transformer, no. 5] and in R^d (in the conventions of docs/references.md):

    L phi = <P f + beta, grad_S phi> + tr(P M P Hess_S phi)        L phi = b.grad phi + Sigma:Hess phi

with M = sigma sigma^T / 2 and beta the drift due to the noise, which depends on the process. A deterministic layer has
no second-order term: using the covariance Sigma_A of token sampling instead gives an error of exactly Sigma_A:Hess phi
[Helmholtz Transformer, no. 8]. A probe maps points (..., d) to numbers (...), each point independently; linear and
quadratic probes cannot distinguish all generators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace, as_field
from helmscope.fields.noise import Noise
from helmscope.fields.weights import check_weights
from helmscope.geometry.arithmetic import conversion_hint, full_precision
from helmscope.geometry.sphere import check_tokens
from helmscope.geometry.surface import gradient, hessian
from helmscope.types import HelmscopeError, check_real, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Probe = Callable[["Tensor"], "Tensor"]
Velocity = Callable[["Tensor"], "Tensor"]


@full_precision
def sphere_generator(
    field: Field | Callable[..., Tensor],
    probe: Probe,
    x: Float[Tensor, "*batch n d"],
    *,
    noise: Noise | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n"]:
    """Generator on the sphere at each token: L phi = <P f + beta, grad_S phi> + tr(P M P Hess_S phi) [Helmholtz
    Transformer, no. 5].

    ``noise`` defines M(x) and, through its process, the drift beta; without it the flow is deterministic and L phi is
    the rate of phi along it. Exact for smooth probes, by autograd. Raises HelmscopeError for a field on R^d, such as a
    residual stream, and for a probe that does not return one number per point.

    >>> turn = lambda x: torch.stack([-x[..., 1], x[..., 0]], -1)
    >>> sphere_generator(turn, lambda x: x[..., 1] ** 2, torch.tensor([[0.6, 0.8]]))  # 2 x_1 x_2
    tensor([0.9600])
    """
    velocity = tangent_velocity(field, x, weights)(x)
    slope = gradient(lambda y: _probe_values(probe, y), x)
    if noise is None:
        return (velocity * slope).sum(-1)
    if isinstance(noise, type) or not isinstance(noise, Noise):
        raise HelmscopeError(f"noise is {noise!r}, but it must be a noise such as IsotropicNoise(nu=0.1)")
    noise.check_size(x)
    drift = velocity + noise.process.drift(noise, x)
    # Hess_S = P Hess_S P already, so M needs no projection
    return (drift * slope).sum(-1) + (noise.diffusion_matrix(x) * hessian(probe, x)).sum((-1, -2))


@full_precision
def ambient_generator(
    drift: Float[Tensor, "*batch d"],
    diffusion: Float[Tensor, "*batch d d"],
    probe: Probe,
    x: Float[Tensor, "*batch d"],
) -> Float[Tensor, "*batch"]:
    """Generator in R^d at points x: L phi = b.grad phi + Sigma:Hess phi, Sigma = (1/2) Cov(increment) / dt.

    ``drift`` b and ``diffusion`` broadcast over the points [Helmholtz Transformer, no. 2]. The cost is d gradients of
    the probe. Raises HelmscopeError for shapes that do not fit.

    >>> point = torch.tensor([2.0, 3.0])
    >>> ambient_generator(torch.tensor([1.0, 0.0]), torch.eye(2), lambda x: x[..., 0] ** 3, point)  # 3 x^2 + 6 x
    tensor(24.)
    """
    check_points(x)
    for name, tensor, tail in (("drift", drift, x.shape[-1:]), ("diffusion", diffusion, x.shape[-1:] * 2)):
        check_points(tensor, name=name)
        wanted = (*x.shape[:-1], *tail)
        if tensor.dtype != x.dtype or not _broadcasts(tuple(tensor.shape), wanted, len(tail)):
            raise HelmscopeError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but points of shape "
                f"{tuple(x.shape)} and dtype {x.dtype} need {wanted}"
            )
    _probe_values(probe, x)
    # the probe treats points independently, so the gradient of the sum consists of the gradients at the points
    slope = torch.func.grad(lambda y: probe(y).sum())
    total: Tensor = (drift * slope(x)).sum(-1)
    points = x.contiguous()  # forward mode writes to it
    for axis in torch.eye(x.shape[-1], dtype=x.dtype, device=x.device):
        curvature = torch.func.jvp(slope, (points,), (axis.expand_as(x).contiguous(),))[1]
        total = total + ((diffusion @ axis) * curvature).sum(-1)
    return total


def discrete_generator(
    layer: Callable[[Tensor], Tensor], probe: Probe, x: Float[Tensor, "*batch d"], *, epsilon: float
) -> Float[Tensor, "*batch"]:
    """Difference quotient (phi(layer(x)) - phi(x)) / epsilon of one layer with step size epsilon > 0.

    It is the discrete counterpart of L phi. For the sphere layer N(x + epsilon f) it differs from L phi by epsilon
    [(1/2) Hess_S phi(P f, P f) - <x, f> <grad phi, P f>] + O(epsilon^2) [Helmholtz Transformer, no. 8]. Below epsilon ~
    1e-8 rounding dominates. Raises HelmscopeError unless ``layer`` preserves the shape of x.

    >>> point = torch.tensor([2.0, 3.0])
    >>> discrete_generator(lambda x: x + 0.5, lambda x: x[..., 0] ** 2, point, epsilon=0.5)
    tensor(4.5000)
    """
    epsilon = check_real("epsilon", epsilon, above=0)
    check_points(x)
    if isinstance(layer, type) or not callable(layer):
        raise HelmscopeError(f"layer is {type_with_article(layer)}, but it must be a callable (..., d) -> (..., d)")
    after = layer(x)
    if not isinstance(after, torch.Tensor) or after.shape != x.shape:
        actual = tuple(after.shape) if isinstance(after, torch.Tensor) else type(after).__name__
        raise HelmscopeError(f"layer returns {actual} for points of shape {tuple(x.shape)}, but it must keep the shape")
    return (_probe_values(probe, after) - _probe_values(probe, x)) / epsilon


def convergence_order(remainders: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """The order in a step that is halved along the last axis: the limit of log2 of the ratio of successive values.

    >>> h = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64)
    >>> round(float(convergence_order(h**3 * (1 + h / 10))), 3)
    3.0
    """
    return richardson_limit((remainders[..., :-1] / remainders[..., 1:]).log2())


def richardson_limit(values: Float[Tensor, "*batch steps"]) -> Float[Tensor, "*batch"]:
    """The limit at step 0 of a power series, from its values at h, h/2, h/4, ... (Richardson).

    >>> h = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    >>> float(richardson_limit(7 + 3 * h - h**2))
    7.0
    """
    for power in range(1, values.shape[-1]):
        values = values[..., 1:] + (values[..., 1:] - values[..., :-1]) / (2.0**power - 1)
    return values[..., 0]


def tangent_velocity(
    field: Field | Callable[..., Tensor], x: Float[Tensor, "*batch n d"], weights: Tensor | None = None
) -> Velocity:
    """The tangent velocity of a field as a function of tokens shaped like x, without further checks.

    x, the weights and the field are checked here. Raises HelmscopeError for a field on R^d, or weights that the field
    does not support.

    >>> from helmscope.fields.attention import SA
    >>> tangent_velocity(SA(beta=0.0), torch.eye(2))(torch.eye(2))
    tensor([[0.0000, 0.5000],
            [0.5000, 0.0000]])
    """
    check_tokens(x)
    field = as_field(field)
    name = field.name
    if field.space is not StateSpace.SPHERE:
        raise HelmscopeError(f"field is a {name} on {field.space.value}, but this needs a field on the sphere")
    field.check_size(x)
    if weights is not None and not field.takes_weights:
        raise HelmscopeError(f"weights is given, but the field {name} does not support token weights")
    combined = check_weights(x, weights)
    return lambda y: field.velocity(y, weights=None if combined is None else combined.expand(y.shape[:-1]))


def check_points(x: object, *, name: str = "x") -> Float[Tensor, "*batch d"]:
    """Returns x; raises HelmscopeError unless it is a finite tensor (..., d) of float64 or float32.

    >>> check_points(torch.zeros(2)).shape
    torch.Size([2])
    """
    if not isinstance(x, torch.Tensor):
        hint = conversion_hint(name, x)
        raise HelmscopeError(f"{name} is {type_with_article(x)}, but it must be a torch tensor{hint}")
    if x.dtype not in (torch.float64, torch.float32):
        raise HelmscopeError(f"{name} has dtype {x.dtype}, but it must be torch.float64 or torch.float32")
    if x.ndim < 1 or x.shape[-1] < 1:
        raise HelmscopeError(f"{name} has shape {tuple(x.shape)}, but its last axis holds the d >= 1 coordinates")
    if not bool(torch.isfinite(x).all()):
        raise HelmscopeError(f"{name} holds NaN or infinite entries, but every entry must be finite")
    return x


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...], tail: int) -> bool:
    """Whether the last ``tail`` axes agree exactly and the leading ones broadcast to those wanted."""
    if len(shape) > len(wanted) or shape[-tail:] != wanted[-tail:]:
        return False
    leading = zip(reversed(shape[:-tail]), reversed(wanted[:-tail]), strict=False)
    return all(size in (1, full) for size, full in leading)


def _probe_values(probe: Probe, x: Tensor) -> Tensor:
    """The values of the probe at x, checked."""
    if isinstance(probe, type) or not callable(probe):
        raise HelmscopeError(f"probe is {type_with_article(probe)}, but it must be a callable (..., d) -> (...)")
    value = probe(x)
    if not isinstance(value, torch.Tensor) or value.shape != x.shape[:-1]:
        actual = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type_with_article(value)
        raise HelmscopeError(
            f"probe returns {actual} at points of shape {tuple(x.shape)}, but it must return one number per point"
        )
    if not value.is_floating_point():
        raise HelmscopeError(f"probe returns {value.dtype}, but it must return floating-point numbers")
    return value
