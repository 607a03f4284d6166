"""Points of the unit sphere S^(d-1) and their tangent vectors, over the last axis of a tensor.

Every function takes leading batch axes and broadcasts. A tangent vector v at x has <x, v> = 0. Nothing here needs the
inner product <x, y> near +-1, where it loses half of the digits: distances come from |x - y| and |x + y|.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import check_readable, every
from helmscope.types import HelmscopeError, real_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# how far a token's norm may be from 1 before it is refused: far above rounding, far below a mistake
NORM_TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-4}


def check_tokens(x: object, *, name: str = "x", normalize: bool = False) -> Float[Tensor, "*batch n d"]:
    """Tokens as they may enter: a finite float tensor (..., n, d), d >= 2, every row of norm 1.

    ``normalize=True`` divides each row by its norm first. Everything else is refused with one sentence.

    >>> check_tokens(torch.tensor([[3.0, 4.0]]), normalize=True)
    tensor([[0.6000, 0.8000]])
    """
    if not isinstance(x, torch.Tensor):
        raise HelmscopeError(f"{name} is a {type(x).__name__}, but it must be a torch tensor of shape (..., n, d)")
    check_readable(name, x)
    if x.dtype not in NORM_TOLERANCE:
        raise HelmscopeError(f"{name} has dtype {x.dtype}, but it must be torch.float64 or torch.float32")
    if x.ndim < 2 or x.shape[-2] < 1:
        raise HelmscopeError(f"{name} has shape {tuple(x.shape)}, but it must be (..., n, d) with n >= 1 tokens")
    if x.shape[-1] < 2:
        raise HelmscopeError(f"{name} has dimension d={x.shape[-1]}, but a sphere needs d >= 2")
    finite = torch.isfinite(x).all(-1)
    if not every(finite):
        raise HelmscopeError(
            f"{name} holds NaN or infinite entries ({_where(~finite)}), but every token must be finite"
        )
    directed = x.any(-1)  # not norm > 0: the square of 1e-200 is 0
    if not every(directed):
        raise HelmscopeError(f"{name} holds a zero vector ({_where(~directed)}), but every token needs a direction")
    if normalize:
        return retract(x)
    norm = torch.linalg.vector_norm(x, dim=-1)
    near = (norm - 1).abs() <= NORM_TOLERANCE[x.dtype]
    if not every(near):
        raise HelmscopeError(
            f"{name} holds a token of norm {norm[~near][0].item():.9g} ({_where(~near)}), but tokens lie on "
            "the unit sphere: divide by the norm (integrate does with normalize=True)"
        )
    return x


def _where(bad: Tensor) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0])
    return f"token {index[-1]} of system {index[:-1]}" if len(index) > 1 else f"token {index[-1]}"


def project(x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Tangential part P_x v = v - <x, v> x of an ambient vector, |x| = 1.

    >>> project(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 3.0]))
    tensor([0., 3.])
    """
    return v - (x * v).sum(-1, keepdim=True) * x


def retract(y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Nearest point of the sphere, N(y) = y / |y|. The zero vector has none and gives NaN.

    A scale is divided out first, so that neither tiny nor huge vectors lose their direction.

    >>> retract(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    scale = y.detach().abs().amax(-1, keepdim=True)
    ordinary = (scale > 1e-12) & (scale < 1e12)
    y = torch.where(ordinary, y, y / scale)
    norm: Tensor = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return y / norm


def exp(x: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Where the geodesic from x with tangent v arrives: cos|v| x + (sin|v| / |v|) v. Smooth at v = 0.

    >>> exp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, torch.pi / 2])).round(decimals=6) + 0.0
    tensor([0., 1.])
    """
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return torch.cos(length) * x + torch.sinc(length / torch.pi) * v


def angle(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Geodesic distance in [0, pi]: 2 atan2(|x - y|, |x + y|), exact to rounding at coincident and antipodal points.

    arccos<x, y> would read 5e-4 for two equal points in float32. At coincident and antipodal points, where the distance
    has a corner, the gradient is the subgradient 0.

    >>> angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])).item()
    0.0
    """
    return angle_from_chords(torch.linalg.vector_norm(x - y, dim=-1), torch.linalg.vector_norm(x + y, dim=-1))


def angle_from_chords(apart: Float[Tensor, "*batch"], across: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The angle between x and y from |x - y| and |x + y|.

    Not torch.atan2: on a CPU its last bit depends on where an element lies in its tensor, and with it a system's result
    on the batch it is computed in. The same holds for torch.pow, exp2 and logaddexp.

    >>> angle_from_chords(torch.tensor(2.0), torch.tensor(0.0)).item() == torch.tensor(torch.pi).item()
    True
    """
    near = apart <= across
    ratio = torch.where(near, apart, across) / torch.where(near, across, apart)
    half = torch.atan(ratio)
    return 2 * torch.where(near, half, torch.pi / 2 - half)


def log(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Tangent at x whose geodesic arrives at y: exp(x, log(x, y)) = y, and |log(x, y)| = angle(x, y).

    At y = -x every direction serves; the one towards the coordinate axis least aligned with x is taken, so that the
    result is still a tangent of length pi. There the gradient is 0.

    >>> log(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 1.5708])
    """
    x, y = x + torch.zeros_like(y), y + torch.zeros_like(x)  # broadcast
    # P_x(y - x) = P_x y without the cancellation near x; from the far side P_x(y + x) = P_x y
    far = ((x * y).sum(-1, keepdim=True) < 0).detach()
    chord = torch.where(far, y + x, y - x)
    toward = project(x, project(x, chord))  # the second removes the rounding that the first leaves along x
    size, reach = (torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (toward, chord))
    # a chord along x is the rounding of the two norms, not a direction
    aligned = (size <= 4 * x.shape[-1] * torch.finfo(x.dtype).eps * reach).detach()
    safe = torch.where(aligned, torch.ones_like(size), size)
    general = torch.where(aligned, toward, toward * (angle(x, y).unsqueeze(-1) / safe))
    return torch.where(aligned & far, torch.pi * any_tangent(x.detach()), general)


def any_tangent(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """A unit tangent at x: the projected coordinate axis on which x has its smallest entry.

    >>> any_tangent(torch.tensor([1.0, 0.0]))
    tensor([0., 1.])
    """
    axis = torch.nn.functional.one_hot(x.abs().argmin(-1), x.shape[-1]).to(x.dtype)
    return retract(project(x, axis))


def transport(
    x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch d"]:
    """Parallel transport of the tangent v from x to y along the geodesic of w = log(x, y), t = |w|:

        v - <w, v> [ (1 - cos t)/t^2 w + (sin t / t) x ].

    An isometry between the tangent spaces; at y = -x it follows the geodesic that ``log`` picks.

    >>> transport(torch.tensor([1., 0.]), torch.tensor([0., 1.]), torch.tensor([0., 1.])).round(decimals=6) + 0.0
    tensor([-1.,  0.])
    """
    return _carry(x, log(x, y), v)


def _carry(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Transport of v from x along the geodesic with tangent w at x."""
    t = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    along = (w * v).sum(-1, keepdim=True)
    return v - along * (0.5 * torch.sinc(t / (2 * torch.pi)) ** 2 * w + torch.sinc(t / torch.pi) * x)


def pull_back(
    x: Float[Tensor, "*batch d"], u: Float[Tensor, "*batch d"], v: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch d"]:
    """The velocity of the normal coordinate u = log(x, y) when y = exp(x, u) moves with tangent v: (d exp_x)_u^{-1} v.

    With t = |u|, the part of v along the geodesic keeps its length, the part across it grows by t / sin t. Defined for
    t < pi, where exp is a chart.

    >>> x, u = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, torch.pi / 2, 0.0])
    >>> pull_back(x, u, torch.tensor([0.0, 0.0, 1.0]))
    tensor([0.0000, 0.0000, 1.5708])
    """
    t = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    forward = torch.cos(t) * u - t * torch.sin(t) * x  # t times the geodesic's unit tangent at y
    back = _carry(exp(x, u), -forward, v)
    safe = torch.where(t == 0, torch.ones_like(t), t)
    along = (u * back).sum(-1, keepdim=True) / safe**2 * u
    return along + (back - along) / torch.sinc(t / torch.pi)


def tangent_basis(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d d_minus_1"]:
    """Orthonormal basis of the tangent space at x, in columns: the Householder reflection that sends x to -+e_1,
    without its first column.

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
    """Tangential Gaussian sqrt(2 nu h) P_x xi, xi ~ N(0, I): the increment over time h of Brownian motion with
    generator nu Lap_S, before retraction. Its covariance is 2 nu h P_x.

    >>> x = torch.tensor([0.6, 0.8])
    >>> bool((x * brownian_increment(x, nu=0.5, duration=0.1)).sum().abs() < 1e-6)
    True
    """
    nu = real_number("nu", nu, at_least=0)
    duration = real_number("duration", duration, at_least=0)
    place = generator.device if generator is not None else x.device
    noise = torch.randn(x.shape, dtype=x.dtype, device=place, generator=generator).to(x.device)
    return math.sqrt(2 * nu * duration) * project(x, noise)
