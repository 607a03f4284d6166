"""Points of the unit sphere S^(d-1) and their tangent vectors, over the last axis of a tensor.

Every function takes leading batch axes and broadcasts. A tangent vector v at x has <x, v> = 0. Distances are computed
from |x - y| and |x + y|, never from <x, y>, which loses half of the digits near +-1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import check_dense_values, conversion_hint, every
from helmscope.types import HelmscopeError, check_real, type_with_article
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = [
    "angle",
    "angle_from_chords",
    "arbitrary_tangent",
    "brownian_increment",
    "check_tokens",
    "exp",
    "log",
    "parallel_transport",
    "project",
    "pull_back",
    "retract",
    "tangent_basis",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__, "angle")

# the largest accepted | |x| - 1 |: far above rounding errors, far below a forgotten normalization
NORM_TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-4}


def check_tokens(
    x: object, *, name: str = "x", normalize: bool = False, remedy: str = ""
) -> Float[Tensor, "*batch n d"]:
    """Check tokens and return them: a finite float tensor (..., n, d), d >= 2, whose rows all have norm 1.

    With ``normalize=True`` rows of any nonzero norm are accepted and returned normalized. Raises ``HelmscopeError`` for
    anything else; for tokens of another norm with the caller's ``remedy``.

    >>> check_tokens(torch.tensor([[3.0, 4.0]]), normalize=True)
    tensor([[0.6000, 0.8000]])
    """
    if not isinstance(x, torch.Tensor):
        hint = conversion_hint(name, x)
        raise HelmscopeError(
            f"{name} is {type_with_article(x)}, but it must be a torch tensor of shape (..., n, d){hint}"
        )
    check_dense_values(name, x)
    if x.dtype not in NORM_TOLERANCE:
        raise HelmscopeError(f"{name} has dtype {x.dtype}, but it must be torch.float64 or torch.float32")
    if x.ndim < 2 or x.shape[-2] < 1:
        raise HelmscopeError(f"{name} has shape {tuple(x.shape)}, but it must be (..., n, d) with n >= 1 tokens")
    if x.shape[-1] < 2:
        raise HelmscopeError(f"{name} has dimension d={x.shape[-1]}, but a sphere needs d >= 2")
    if not normalize and every(_is_unit(x)):  # then they are finite and nonzero too, which takes far longer to check
        return x
    finite = torch.isfinite(x).all(-1)
    if not every(finite):
        raise HelmscopeError(
            f"{name} holds NaN or infinite entries ({_first_index(~finite)}), but every token must be finite"
        )
    nonzero = x.any(-1)  # not norm > 0: the square of 1e-200 is 0
    if not every(nonzero):
        raise HelmscopeError(
            f"{name} holds a zero vector ({_first_index(~nonzero)}), but every token must be nonzero: if it is the "
            "padding of a recording, pass the weights of its trajectory too"
        )
    if normalize:
        return retract(x)
    unit = _is_unit(x)
    norm = torch.linalg.vector_norm(x[~unit][0])
    raise HelmscopeError(
        f"{name} holds a token of norm {norm.item():.9g} ({_first_index(~unit)}), but tokens must be on the unit "
        f"sphere: divide by its norm{remedy}"
    )


def _is_unit(x: Tensor) -> Tensor:
    """Which tokens have norm 1; False for those with NaN or infinite entries."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return (norm - 1).abs() <= NORM_TOLERANCE[x.dtype]


def _first_index(bad: Tensor) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0])
    if len(index) == 1:
        return f"token {index[0]}"
    return f"token {index[-1]} of system {index[0] if len(index) == 2 else index[:-1]}"


def project(x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Tangential part P_x v = v - <x, v> x of an ambient vector, |x| = 1.

    >>> project(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 3.0]))
    tensor([0., 3.])
    """
    return v - (x * v).sum(-1, keepdim=True) * x


def retract(y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Nearest point of the sphere, N(y) = y / |y|; NaN for the zero vector, which has none.

    Tiny and huge vectors are rescaled first, so that their squares neither underflow nor overflow.

    >>> retract(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    scale = y.detach().abs().amax(-1, keepdim=True)
    ordinary = (scale > 1e-12) & (scale < 1e12)
    y = torch.where(ordinary, y, y / scale)
    norm: Tensor = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return y / norm


def exp(x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Exponential map, the end of the geodesic from x with tangent v: cos|v| x + (sin|v| / |v|) v. Smooth at v = 0.

    >>> exp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, torch.pi / 2])).round(decimals=6) + 0.0
    tensor([0., 1.])
    """
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return torch.cos(length) * x + torch.sinc(length / torch.pi) * v


def angle(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Geodesic distance in [0, pi]: 2 atan2(|x - y|, |x + y|), accurate to rounding near 0 and pi as well.

    arccos<x, y> would be up to 5e-4 for two equal points in float32. At coincident and antipodal points, where the
    distance is not differentiable, the gradient is the subgradient 0.

    >>> angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])).item()
    0.0
    """
    return angle_from_chords(torch.linalg.vector_norm(x - y, dim=-1), torch.linalg.vector_norm(x + y, dim=-1))


def angle_from_chords(
    chord: Float[Tensor, "*batch"], antipodal_chord: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Angle between unit vectors x and y, given ``chord`` = |x - y| and ``antipodal_chord`` = |x + y|.

    It does not use torch.atan2, whose last bit on a CPU depends on the position of an element in its tensor, so that
    the result of a system would depend on its batch. The same holds for torch.pow, exp2 and logaddexp.

    >>> angle_from_chords(torch.tensor(2.0), torch.tensor(0.0)).item() == torch.tensor(torch.pi).item()
    True
    """
    acute = chord <= antipodal_chord
    ratio = torch.where(acute, chord, antipodal_chord) / torch.where(acute, antipodal_chord, chord)
    half_angle = torch.atan(ratio)
    return 2 * torch.where(acute, half_angle, torch.pi / 2 - half_angle)


def log(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Logarithmic map, the tangent at x whose geodesic ends at y: exp(x, log(x, y)) = y, |log(x, y)| = angle(x, y).

    At y = -x every direction is valid; the one towards the coordinate axis least aligned with x is chosen, so that the
    result is still a tangent of length pi. There the gradient is 0.

    >>> log(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 1.5708])
    """
    x, y = x + torch.zeros_like(y), y + torch.zeros_like(x)  # broadcast
    # P_x(y - x) = P_x(y + x) = P_x y: the shorter chord avoids the cancellation near x and near -x
    obtuse = ((x * y).sum(-1, keepdim=True) < 0).detach()
    chord = torch.where(obtuse, y + x, y - x)
    tangent = project(x, project(x, chord))  # the second projection removes the rounding that the first leaves along x
    tangent_norm, chord_norm = (torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (tangent, chord))
    # a chord parallel to x is only the rounding of the two norms and has no direction
    parallel = (tangent_norm <= 4 * x.shape[-1] * torch.finfo(x.dtype).eps * chord_norm).detach()
    divisor = torch.where(parallel, torch.ones_like(tangent_norm), tangent_norm)
    general = torch.where(parallel, tangent, tangent * (angle(x, y).unsqueeze(-1) / divisor))
    return torch.where(parallel & obtuse, torch.pi * arbitrary_tangent(x.detach()), general)


def arbitrary_tangent(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """A unit tangent at x: the normalized projection of the coordinate axis along which x has its smallest entry.

    >>> arbitrary_tangent(torch.tensor([1.0, 0.0]))
    tensor([0., 1.])
    """
    axis = torch.nn.functional.one_hot(x.abs().argmin(-1), x.shape[-1]).to(x.dtype)
    return retract(project(x, axis))


def parallel_transport(
    x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch d"]:
    """Parallel transport of the tangent v from x to y along the geodesic of w = log(x, y), t = |w|:

        v - <w, v> [ (1 - cos t)/t^2 w + (sin t / t) x ].

    An isometry between the tangent spaces; at y = -x it follows the geodesic that ``log`` chooses.

    >>> x, y = torch.eye(2)
    >>> parallel_transport(x, y, y).round(decimals=6) + 0.0
    tensor([-1.,  0.])
    """
    return _transport_along(x, log(x, y), v)


def _transport_along(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Parallel transport of v from x to exp(x, w) along the geodesic with tangent w at x."""
    t = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    along = (w * v).sum(-1, keepdim=True)
    return v - along * (0.5 * torch.sinc(t / (2 * torch.pi)) ** 2 * w + torch.sinc(t / torch.pi) * x)


def pull_back(
    x: Float[Tensor, "*batch d"], u: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch d"]:
    """Velocity of the normal coordinate u = log(x, y) when y = exp(x, u) moves with velocity v: (d exp_x)_u^{-1} v.

    With t = |u|, the component of v along the geodesic keeps its length, the orthogonal one grows by t / sin t. Defined
    for t < pi, where exp_x is a chart.

    >>> x, u = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, torch.pi / 2, 0.0])
    >>> pull_back(x, u, torch.tensor([0.0, 0.0, 1.0]))
    tensor([0.0000, 0.0000, 1.5708])
    """
    t = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    forward = torch.cos(t) * u - t * torch.sin(t) * x  # t times the geodesic's unit tangent at y
    at_x = _transport_along(exp(x, u), -forward, v)
    divisor = torch.where(t == 0, torch.ones_like(t), t)
    along = (u * at_x).sum(-1, keepdim=True) / divisor**2 * u
    return along + (at_x - along) / torch.sinc(t / torch.pi)


def tangent_basis(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d_minus_1"]:
    """Orthonormal basis of the tangent space at x, as columns: the Householder reflection that maps x to -+e_1, without
    its first column.

    >>> tangent_basis(torch.tensor([1.0, 0.0, 0.0])).T
    tensor([[0., 1., 0.],
            [0., 0., 1.]])
    """
    d = x.shape[-1]
    first = torch.zeros_like(x)
    first[..., 0] = torch.where(x[..., 0] < 0, -1.0, 1.0)
    u = retract(x + first)  # |x + e| >= sqrt 2: no cancellation
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    return (eye - 2 * u.unsqueeze(-1) * u.unsqueeze(-2))[..., 1:]


def brownian_increment(
    x: Float[Tensor, "*batch d"], *, nu: float, duration: float, generator: torch.Generator | None = None
) -> Float[Tensor, "*batch d"]:
    """Increment over time h = ``duration`` of Brownian motion with generator nu Lap_S, before retraction.

    It is the tangential Gaussian sqrt(2 nu h) P_x xi, xi ~ N(0, I), with covariance 2 nu h P_x. Without a ``generator``
    torch's global one is used.

    >>> x = torch.tensor([0.6, 0.8])
    >>> bool((x * brownian_increment(x, nu=0.5, duration=0.1)).sum().abs() < 1e-6)
    True
    """
    nu = check_real("nu", nu, at_least=0)
    duration = check_real("duration", duration, at_least=0)
    device = generator.device if generator is not None else x.device
    noise = torch.randn(x.shape, dtype=x.dtype, device=device, generator=generator).to(x.device)
    return math.sqrt(2 * nu * duration) * project(x, noise)
