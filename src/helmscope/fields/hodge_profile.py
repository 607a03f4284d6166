"""Neurons along one coordinate: its law, and the profiles h of the Hodge splits on the sphere and in Gauss space.

A neuron w phi(z), z = e.x, has w = alpha e + r with r perpendicular to e. For x ~ N(0, I) its best potential is
U = alpha int phi + (r.x) h(z) with h'' - z h' - h = -phi (source 000-3 (d) 2). N(0, I) is the limit k -> 0 of the
sphere of radius sqrt d and curvature k = 1/d, where U has another h (source 000-3 (d) 3, z = sqrt d s):

    p h'' - (1 + k) z h' - (1 - k) h = -(k z phi' + (1 - k) phi),    p = 1 - k z^2

Both sides are derivatives, so one order can be taken off, which makes it Stein's equation of D for the law of z; and h'
solves one of the same kind:

    p h' - (1 - k) z h = -D,    D = k z phi + (1 - 2k) int phi, less its mean
    p (h')' - (1 + k) z h' = -(k z phi' + (1 - k) (phi - h))

They are solved by Chebyshev collocation, panel by panel from far outside towards 0: on that way errors die out. Panels
meet at the corner of phi and shrink towards it, so kinks cost no digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.polynomial import chebyshev, legendre

from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry.arithmetic import full_precision
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.fields.activations import Activation

NODES = 16  # of collocation in a panel; a series there has one term more
RESOLVED = 1e-9  # the last terms of a series, relative to its profile, up to which a panel counts as resolved


def check_ungated(mlp: object) -> MLP:
    """``mlp`` if it is an MLP; a gated one is refused.

    >>> check_ungated(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).dim
    2
    """
    if isinstance(mlp, GatedMLP):
        raise HelmscopeError(
            "mlp is a GatedMLP, but it must be an MLP: a gated neuron is quadratic across its gate, and its potential "
            "needs profiles of second order, which are not tabulated"
        )
    if not isinstance(mlp, MLP):
        raise HelmscopeError(f"mlp is a {type(mlp).__name__}, but it must be an MLP")
    if mlp.batch:
        raise HelmscopeError(f"mlp has the batch axes {tuple(mlp.batch)}, but one MLP is split at a time")
    return mlp


@dataclass(frozen=True)
class Law:
    """The law of z = e.x, x uniform on the sphere of radius sqrt d, by its curvature k = 1/d <= 1/2; N(0, 1) for k = 0.

    Its density is proportional to (1 - k z^2)^((1/k - 3)/2), which tends to e^(-z^2/2).

    >>> z, mass = Law(1 / 3).quadrature(torch.tensor([[-2.0, 0.0, 2.0]], dtype=torch.float64))
    >>> round((mass * z**4).sum().item(), 12)  # 9 E s^4, s uniform on [-1, 1]
    1.8
    """

    curvature: float

    @property
    def reach(self) -> float:
        """|z| up to which profiles are tabulated: sqrt d, or 1024."""
        return 1 / math.sqrt(self.curvature) if self.curvature else 1024.0

    def quadrature(self, edges: Float[Tensor, "hidden e"], degree: int = 0) -> tuple[Tensor, Tensor]:
        """Nodes and weights (hidden, points) for E g(z): g smooth between the edges, times a polynomial of the degree.

        Gauss rules in the angle arcsin(z / sqrt d), in which the density is smooth up to its ends.
        """
        root, reach = math.sqrt(self.curvature), min(self.reach, 38.0)  # where a normal density underflows
        angles = edges.clamp(-reach, reach)
        angles = torch.asin((root * angles).clamp(-1, 1)) if root else angles
        middle, half = (angles[:, 1:] + angles[:, :-1]) / 2, (angles[:, 1:] - angles[:, :-1]) / 2
        wide = half.amax(0) > 0
        waves = degree * half.max().item() if root else math.sqrt(degree) / 2  # there panels that matter have width 1
        node, part = (torch.from_numpy(a) for a in legendre.leggauss(24 + math.ceil(waves)))
        angles = (middle[:, wide, None] + half[:, wide, None] * node).flatten(1)
        log_density = (1 / self.curvature - 2) * torch.log(torch.cos(angles)) if root else -angles * angles / 2
        mass = torch.exp(log_density) * (half[:, wide, None] * part).flatten(1)
        return (torch.sin(angles) / root if root else angles), mass / mass.sum(-1, keepdim=True)

    def jacobi(self, n: int) -> float:
        """b_n of the orthonormal polynomials: z p_n = b_(n+1) p_(n+1) + b_n p_(n-1)."""
        k = self.curvature
        return float(n) if n < 2 else math.sqrt(n * (1 + (n - 3) * k) / ((1 + (2 * n - 2) * k) * (1 + (2 * n - 4) * k)))


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of an MLP, in float64 and without gradients. One with v = 0 is part of ``constant`` and has w = 0.

    >>> Neurons.of(MLP(w_in=torch.tensor([[0.0, 3.0]]), w_out=torch.tensor([[4.0], [5.0]])), radius=1.0).across
    tensor([[4., 0.]], dtype=torch.float64)
    """

    activation: Activation
    direction: Float[Tensor, "hidden d"]  # e
    length: Float[Tensor, " hidden"]  # |v| / radius: phi(z) = s(length z + c) at z = radius e.x
    offset: Float[Tensor, " hidden"]  # c
    out: Float[Tensor, "hidden d"]  # w
    along: Float[Tensor, " hidden"]  # alpha
    across: Float[Tensor, "hidden d"]  # r
    constant: Float[Tensor, " d"]

    @staticmethod
    @full_precision
    def of(mlp: MLP, *, radius: float) -> Neurons:
        """The neurons of an MLP at points scaled by ``radius``."""
        rows, out = mlp.w_in.detach().cpu().double(), mlp.w_out.detach().cpu().double().mT
        offset, constant = (
            torch.zeros(size, dtype=torch.float64, device="cpu") if bias is None else bias.detach().cpu().double()
            for bias, size in ((mlp.b_in, mlp.hidden), (mlp.b_out, mlp.dim))
        )
        dead = ~rows.any(-1)
        constant = constant + mlp.activation(offset[dead]) @ out[dead]
        out = out.masked_fill(dead[:, None], 0.0)
        rows = torch.where(dead[:, None], torch.eye(1, mlp.dim, dtype=rows.dtype, device=rows.device), rows)
        scale = rows.abs().amax(-1, keepdim=True)  # divided out first: the square of 1e-160 is 0
        norm = torch.linalg.vector_norm(rows / scale, dim=-1, keepdim=True)
        direction, length = rows / scale / norm, (norm * scale / radius)[:, 0]
        along = (out * direction).sum(-1)
        across = out - along[:, None] * direction
        return Neurons(mlp.activation, direction, length, offset, out, along, across, constant)

    def phi(self, z: Float[Tensor, "chosen points"], chosen: Int[Tensor, " chosen"]) -> Float[Tensor, "chosen points"]:
        """phi of each chosen neuron along its row of z."""
        return self.activation(self.length[chosen, None] * z + self.offset[chosen, None])

    def to(self, like: Tensor) -> Neurons:
        """The same where ``like`` is, in its dtype."""
        moved = {f.name: getattr(self, f.name).to(like) for f in fields(self) if f.name != "activation"}
        return replace(self, **moved)

    def coefficients(self, law: Law, edges: Float[Tensor, "hidden e"], degree: int) -> Iterator[tuple[Tensor, Tensor]]:
        """c_n of phi = sum_n c_n p_n, n = 0..degree, by quadrature between the edges; each with what is left after it,
        sqrt(sum_(m > n) c_m^2), as a difference known to rounding only.
        """
        z, mass = law.quadrature(edges, degree)
        phi = self.phi(z, torch.arange(len(z), device=z.device))
        left = square = (mass * phi * phi).sum(-1)
        last, polynomial = torch.zeros_like(z), torch.ones_like(z)
        for n in range(degree + 1):
            c = (mass * phi * polynomial).sum(-1)
            left = left - c * c
            yield c, torch.maximum(left, 1e-15 * square).sqrt()
            last, polynomial = polynomial, (z * polynomial - law.jacobi(n) * last) / law.jacobi(n + 1)


@dataclass(frozen=True, eq=False)
class Profiles:
    """h and h' of each neuron as Chebyshev series on panels, for z >= 0 and then for z <= 0: there they are those of
    phi(-z), mirrored. NaN beyond ``law.reach``.

    >>> from helmscope.fields.activations import Identity
    >>> linear = MLP(w_in=torch.eye(1, 2), w_out=torch.eye(2, 1), activation=Identity())
    >>> profiles = Profiles.solve(Law(0.0), Neurons.of(linear, radius=1.0))
    >>> profiles(torch.tensor([3.0], dtype=torch.float64), torch.tensor([0]))  # h = z/2
    (tensor([1.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """

    law: Law
    edges: Float[Tensor, "two_hidden e"]  # of |z|
    series: Float[Tensor, "terms both two_hidden_panels"]

    @property
    def line(self) -> Float[Tensor, "hidden two_e"]:
        """The edges on both sides of 0."""
        right, left = self.edges.chunk(2)
        return torch.cat([-left.flip(-1), right], -1)

    @staticmethod
    @full_precision
    def solve(law: Law, neurons: Neurons) -> Profiles:
        """For D and for 1 at once: the mean of D is what makes h continuous at 0. What is not resolved is refused."""
        k = law.curvature
        length, offset = torch.cat([neurons.length, -neurons.length]), neurons.offset.repeat(2)
        edges = _edges(law, length, offset)
        node, powers, _, integral = _chebyshev()
        half, middle = (edges[:, 1:] - edges[:, :-1]) / 2, (edges[:, 1:] + edges[:, :-1]) / 2
        z = middle[..., None] + half[..., None] * node
        argument = length[:, None, None] * z + offset[:, None, None]
        phi, phi_slope = neurons.activation(argument), neurons.activation.slope(argument) * length[:, None, None]
        rise = half[..., None] * (phi @ integral.mT)  # int phi from the left edge to the nodes and to the right edge
        start = rise[..., -1].cumsum(-1) - rise[..., -1]
        flux = k * z * phi + (1 - 2 * k) * (start[..., None] + rise[..., :-1])
        p, drag = 1 - k * z * z, half[..., None] * z
        parts = _march(p, (1 - k) * drag, half[..., None, None] * torch.stack([flux, torch.ones_like(z)], -1))
        right, left = _left_end(parts[:, 0]).chunk(2)
        mean = (right[:, 0] - left[:, 0]) / (2 * right[:, 1])
        value = parts[..., 0] - torch.cat([mean, -mean])[:, None, None] * parts[..., 1]
        source = k * z * phi_slope + (1 - k) * (phi - value @ powers.mT)
        slope = _march(p, (1 + k) * drag, (half[..., None] * source)[..., None])[..., 0]
        both = torch.stack([value, slope])
        _check_resolved(both, edges, neurons)
        return Profiles(law, edges, both.flatten(1, 2).permute(2, 0, 1).contiguous())

    def __call__(self, z: Float[Tensor, "*shape"], neuron: Int[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
        """h(z) and h'(z) of the neurons with these numbers."""
        edges, series = self.edges.to(z.device), self.series.to(z.device)
        lines, count = edges.shape
        left = z.detach() < 0
        away, line = torch.where(left, -z, z), neuron + torch.where(left, lines // 2, 0)
        panel = torch.zeros_like(line)
        for bit in reversed(range((count - 2).bit_length())):  # bisection: the last edge not above, but the outermost
            trial = (panel + (1 << bit)).clamp(max=count - 2)
            panel = torch.where(edges.flatten()[line * count + trial] <= away.detach(), trial, panel)
        low, high = (edges.flatten()[line * count + panel + end] for end in (0, 1))
        t = torch.where(away <= self.law.reach, (2 * away - low - high) / (high - low), torch.nan)
        *lower, now = (row[:, line * (count - 1) + panel] for row in series)
        before = torch.zeros_like(t)
        for row in lower[:0:-1]:
            now, before = row + (2 * t * now - before), now
        value, slope = lower[0] + (t * now - before)
        return value, torch.where(left, -slope, slope)


def _edges(law: Law, length: Tensor, offset: Tensor) -> Float[Tensor, "lines e"]:
    """From 0 on: a grid that resolves the law, the corner of phi, and steps that double away from the corner. The first
    is the width of the corner, or the distance within which a change of h there dies out.

    In Gauss space the last panel, where the march begins, reaches beyond and is wide beside 1/z, without a corner.
    """
    reach, corner = law.reach, -(offset / length)[:, None]
    grid = [0.0, *(g for g in (*map(float, range(1, 13)), *(2.0**i for i in range(4, 50))) if g < reach)]
    beyond = torch.where((corner > reach) & (corner < 2 * reach), corner, 2 * reach)
    ends = torch.full_like(corner, reach) if law.curvature else torch.cat([beyond / 2, beyond], -1)
    layer = (1 - law.curvature * corner * corner) / (1 + corner.abs())
    width = torch.where(
        corner.abs() < reach, torch.minimum(layer, 1 / length.abs()[:, None]), 1 / length.abs()[:, None]
    )
    width = (width / 2).clamp(1e-6, reach)
    doublings = math.ceil(math.log2(2 * reach / width.min().item())) + 1
    steps = width * 2.0 ** torch.arange(doublings, device=width.device)
    points = torch.cat([corner - steps, corner, corner + steps], -1)
    points = torch.where((points > 0) & (points < ends[:, :1]), points, 0.0)
    edges = torch.cat([corner.new_tensor(grid).expand(len(corner), -1), points, ends], -1).sort(-1).values
    return edges[:, int((edges == 0).all(0).sum()) - 1 :]


def _chebyshev() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The nodes t; T_n(t) and T_n'(t); and the matrix from values there to int_-1^t, its last row int_-1^1."""
    node = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    lower = chebyshev.chebvander(node, NODES - 1)
    slopes = lower @ chebyshev.chebder(np.eye(NODES + 1))
    rises = chebyshev.chebvander(np.append(node, 1.0), NODES) @ chebyshev.chebint(np.linalg.inv(lower), lbnd=-1)
    parts = (node, chebyshev.chebvander(node, NODES), slopes, rises)
    return tuple(torch.from_numpy(part) for part in parts)  # type: ignore[return-value]


def _march(p: Tensor, drag: Tensor, source: Tensor) -> Float[Tensor, "lines panels terms sources"]:
    """Series y with p y' - drag y = -source at the nodes, continuous, from the outermost panel inwards. There the last
    term is 0 instead: p vanishes at the end, or is small beside z, and only one solution does not explode.
    """
    _, powers, slopes, _ = _chebyshev()
    edge = torch.eye(NODES + 1, dtype=p.dtype, device=p.device)[-1].expand(len(p), 1, -1)
    given, found = torch.zeros_like(source[:, 0, :1]), []
    for i in reversed(range(p.shape[1])):
        rows = p[:, i, :, None] * slopes - drag[:, i, :, None] * powers
        found.append(torch.linalg.solve(torch.cat([rows, edge], 1), torch.cat([-source[:, i], given], 1)))
        edge, given = torch.ones_like(edge), _left_end(found[-1]).unsqueeze(1)
    return torch.stack(found[::-1], 1)


def _left_end(series: Float[Tensor, "lines terms sources"]) -> Float[Tensor, "lines sources"]:
    """sum_n a_n T_n(-1)"""
    return series[:, ::2].sum(1) - series[:, 1::2].sum(1)


@full_precision
def _check_resolved(both: Float[Tensor, "both lines panels terms"], edges: Tensor, neurons: Neurons) -> None:
    """Series must end, and that of h' be the derivative of that of h, relative to the largest terms at hand and to the
    argument of phi near 0.
    """
    _, powers, slopes, _ = _chebyshev()
    largest = both.abs().amax(-1)
    largest = largest + torch.where(edges[:, 1:] <= 12, largest, 0.0).amax(-1, keepdim=True)
    scale = largest.sum(0) + (neurons.length + neurons.offset.abs()).repeat(2)[:, None]
    half = (edges[:, 1:] - edges[:, :-1]) / 2
    gap = (both[0] @ slopes.mT - half[..., None] * (both[1] @ powers.mT)).abs().amax(-1)
    worst = (torch.maximum(both[..., -2:].abs().amax((0, -1)), gap) / scale).amax(-1)
    if not bool((worst <= RESOLVED).all()):  # NaN is no good either
        at = int(worst.nan_to_num(torch.inf).argmax()) % len(neurons.length)
        raise HelmscopeError(
            f"activation is {type(neurons.activation).__name__}, but it must be smooth apart from a corner at 0 and "
            f"not oscillate: the profile of neuron {at} is known to {float(worst.max()):.0e} only"
        )
