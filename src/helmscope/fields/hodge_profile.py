"""Neurons as functions of one coordinate: its distribution, and the profiles h of the Hodge splits on the sphere and in
Gauss space.

A neuron w phi(z), z = e.x, has w = alpha e + r with r perpendicular to e. For x ~ N(0, I) its best potential is U =
alpha int phi + (r.x) h(z) with h'' - z h' - h = -phi [Helmholtz Transformer, no. 3]. N(0, I) is the limit k -> 0 of the
sphere of radius sqrt d and curvature k = 1/d, where h satisfies ([Helmholtz Transformer, no. 3], z = sqrt d s)

    p h'' - (1 + k) z h' - (1 - k) h = -(k z phi' + (1 - k) phi),    p = 1 - k z^2

Both sides are derivatives. Integrated once, it is Stein's equation of D for the distribution of z, and h' satisfies an
equation of the same form:

    p h' - (1 - k) z h = -D,    D = k z phi + (1 - 2k) int phi, minus its mean
    p (h')' - (1 + k) z h' = -(k z phi' + (1 - k) (phi - h))

They are solved by Chebyshev collocation, panel by panel from large |z| towards 0, the direction in which errors decay.
Panels meet at the corner of phi and shrink towards it, so that a corner does not reduce the accuracy.
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
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.types import HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.fields.activations import Activation

NODES = 16  # collocation nodes per panel; the series there has one more term
RESOLVED = 1e-9  # a panel is resolved if the last terms of its series, relative to the profile, are below this


def check_ungated(mlp: object) -> MLP:
    """Return ``mlp`` if it is an ungated MLP without batch axes, else raise ``HelmscopeError``.

    >>> check_ungated(MLP(w_in=torch.eye(2), w_out=torch.eye(2))).dim
    2
    """
    if isinstance(mlp, GatedMLP):
        raise HelmscopeError(
            "mlp is a GatedMLP, but it must be an MLP: a gated neuron is quadratic across its gate, and its potential "
            "needs profiles of second order, which are not tabulated"
        )
    if not isinstance(mlp, MLP):
        raise HelmscopeError(f"mlp is {type_with_article(mlp)}, but it must be an MLP")
    if mlp.batch:
        raise HelmscopeError(f"mlp has the batch axes {tuple(mlp.batch)}, but only one MLP can be split at a time")
    return mlp


@dataclass(frozen=True)
class Law:
    """The distribution of z = e.x for x uniform on the sphere of radius sqrt d, whose curvature is k = 1/d <= 1/2; for
    k = 0 the normal distribution N(0, 1).

    Its density is proportional to (1 - k z^2)^((1/k - 3)/2), which tends to e^(-z^2/2).

    >>> z, mass = Law(1 / 3).quadrature(torch.tensor([[-2.0, 0.0, 2.0]], dtype=torch.float64))
    >>> round((mass * z**4).sum().item(), 12)  # 9 E s^4, s uniform on [-1, 1]
    1.8
    """

    curvature: float

    @property
    def reach(self) -> float:
        """The largest |z| at which profiles are tabulated: sqrt d, or 1024 if k = 0."""
        return 1 / math.sqrt(self.curvature) if self.curvature else 1024.0

    def quadrature(self, edges: Float[Tensor, "hidden e"], degree: int = 0) -> tuple[Tensor, Tensor]:
        """Nodes and weights (hidden, points) of a quadrature of E g(z), where g is smooth between the edges, times a
        polynomial of degree ``degree``.

        Gauss rules in the angle arcsin(z / sqrt d), in which the density is smooth up to its ends.
        """
        root, reach = math.sqrt(self.curvature), min(self.reach, 38.0)  # where the normal density underflows
        angles = edges.clamp(-reach, reach)
        angles = torch.asin((root * angles).clamp(-1, 1)) if root else angles
        middle, half = (angles[:, 1:] + angles[:, :-1]) / 2, (angles[:, 1:] - angles[:, :-1]) / 2
        wide = half.amax(0) > 0
        waves = (
            degree * half.max().item() if root else math.sqrt(degree) / 2
        )  # in Gauss space the panels that matter have width 1
        node, node_weight = (torch.from_numpy(a) for a in legendre.leggauss(24 + math.ceil(waves)))
        angles = (middle[:, wide, None] + half[:, wide, None] * node).flatten(1)
        log_density = (1 / self.curvature - 2) * torch.log(torch.cos(angles)) if root else -angles * angles / 2
        mass = torch.exp(log_density) * (half[:, wide, None] * node_weight).flatten(1)
        return (torch.sin(angles) / root if root else angles), mass / mass.sum(-1, keepdim=True)

    def jacobi(self, n: int) -> float:
        """The recurrence coefficient b_n of the orthonormal polynomials: z p_n = b_(n+1) p_(n+1) + b_n p_(n-1)."""
        k = self.curvature
        return float(n) if n < 2 else math.sqrt(n * (1 + (n - 3) * k) / ((1 + (2 * n - 2) * k) * (1 + (2 * n - 4) * k)))


@dataclass(frozen=True, eq=False)
class Neurons:
    """The neurons of an MLP, in float64 and without gradients. If v = 0, they are part of ``constant`` and have w = 0.

    >>> Neurons.from_mlp(MLP(w_in=torch.tensor([[0.0, 3.0]]), w_out=torch.tensor([[4.0], [5.0]])), radius=1.0).across
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
    def from_mlp(mlp: MLP, *, radius: float) -> Neurons:
        """The neurons of an MLP, as functions of points multiplied by ``radius``."""
        rows, out = mlp.w_in.detach().cpu().double(), mlp.w_out.detach().cpu().double().mT
        offset, constant = (
            torch.zeros(size, dtype=torch.float64, device="cpu") if bias is None else bias.detach().cpu().double()
            for bias, size in ((mlp.b_in, mlp.hidden), (mlp.b_out, mlp.dim))
        )
        dead = ~rows.any(-1)
        constant = constant + mlp.activation(offset[dead]) @ out[dead]
        out = out.masked_fill(dead[:, None], 0.0)
        rows = torch.where(dead[:, None], torch.eye(1, mlp.dim, dtype=rows.dtype, device=rows.device), rows)
        scale = rows.abs().amax(-1, keepdim=True)  # divided out first, because the square of 1e-160 is 0
        norm = torch.linalg.vector_norm(rows / scale, dim=-1, keepdim=True)
        direction, length = rows / scale / norm, (norm * scale / radius)[:, 0]
        along = (out * direction).sum(-1)
        across = out - along[:, None] * direction
        return Neurons(mlp.activation, direction, length, offset, out, along, across, constant)

    def phi(self, z: Float[Tensor, "chosen points"], chosen: Int[Tensor, " chosen"]) -> Float[Tensor, "chosen points"]:
        """phi of each chosen neuron at its row of z."""
        return self.activation(self.length[chosen, None] * z + self.offset[chosen, None])

    def to(self, like: Tensor) -> Neurons:
        """The neurons with the dtype and device of ``like``."""
        moved = {f.name: getattr(self, f.name).to(like) for f in fields(self) if f.name != "activation"}
        return replace(self, **moved)

    def coefficients(self, law: Law, edges: Float[Tensor, "hidden e"], degree: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The coefficients c_n of phi = sum_n c_n p_n, n = 0..degree, by quadrature between the edges; each with the
        remainder sqrt(sum_(m > n) c_m^2), which is computed as a difference and therefore only accurate to rounding.
        """
        z, mass = law.quadrature(edges, degree)
        phi = self.phi(z, torch.arange(len(z), device=z.device))
        remainder = square = (mass * phi * phi).sum(-1)
        previous, polynomial = torch.zeros_like(z), torch.ones_like(z)
        for n in range(degree + 1):
            c = (mass * phi * polynomial).sum(-1)
            remainder = remainder - c * c
            yield c, torch.maximum(remainder, 1e-15 * square).sqrt()
            previous, polynomial = polynomial, (z * polynomial - law.jacobi(n) * previous) / law.jacobi(n + 1)


@dataclass(frozen=True, eq=False)
class Profiles:
    """h and h' of each neuron as Chebyshev series on panels, NaN beyond ``law.reach``.

    The first half of the lines is for z >= 0, the second for z <= 0, where they are those of phi(-z), mirrored.

    >>> from helmscope.fields.activations import Identity
    >>> linear = MLP(w_in=torch.eye(1, 2), w_out=torch.eye(2, 1), activation=Identity())
    >>> profiles = Profiles.solve(Law(0.0), Neurons.from_mlp(linear, radius=1.0))
    >>> profiles(torch.tensor([3.0], dtype=torch.float64), torch.tensor([0]))  # h = z/2
    (tensor([1.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """

    law: Law
    edges: Float[Tensor, "two_hidden e"]  # of the panels in |z|
    series: Float[Tensor, "terms both two_hidden_panels"]

    @property
    def line(self) -> Float[Tensor, "hidden two_e"]:
        """The edges on both sides of 0."""
        right, left = self.edges.chunk(2)
        return torch.cat([-left.flip(-1), right], -1)

    @staticmethod
    @full_precision
    def solve(law: Law, neurons: Neurons) -> Profiles:
        """Solve the equations for D and for 1 at once; the mean of D is the one for which h is continuous at 0.

        Raises ``HelmscopeError`` if the panels do not resolve a profile.
        """
        k = law.curvature
        length, offset = torch.cat([neurons.length, -neurons.length]), neurons.offset.repeat(2)
        edges = _panel_edges(law, length, offset)
        node, powers, _, integral = _chebyshev()
        half, middle = (edges[:, 1:] - edges[:, :-1]) / 2, (edges[:, 1:] + edges[:, :-1]) / 2
        z = middle[..., None] + half[..., None] * node
        argument = length[:, None, None] * z + offset[:, None, None]
        phi, phi_slope = neurons.activation(argument), neurons.activation.slope(argument) * length[:, None, None]
        rise = half[..., None] * (phi @ integral.mT)  # int phi from the left edge to the nodes and to the right edge
        start = rise[..., -1].cumsum(-1) - rise[..., -1]
        flux = k * z * phi + (1 - 2 * k) * (start[..., None] + rise[..., :-1])
        p, drag = 1 - k * z * z, half[..., None] * z
        solutions = _march(p, (1 - k) * drag, half[..., None, None] * torch.stack([flux, torch.ones_like(z)], -1))
        right, left = _left_end(solutions[:, 0]).chunk(2)
        mean = (right[:, 0] - left[:, 0]) / (2 * right[:, 1])
        value = solutions[..., 0] - torch.cat([mean, -mean])[:, None, None] * solutions[..., 1]
        source = k * z * phi_slope + (1 - k) * (phi - value @ powers.mT)
        slope = _march(p, (1 + k) * drag, (half[..., None] * source)[..., None])[..., 0]
        both = torch.stack([value, slope])
        _check_resolved(both, edges, neurons)
        return Profiles(law, edges, both.flatten(1, 2).permute(2, 0, 1).contiguous())

    def __call__(self, z: Float[Tensor, "*shape"], neuron: Int[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
        """h(z) and h'(z) of the neurons with these indices."""
        edges, series = self.edges.to(z.device), self.series.to(z.device)
        lines, count = edges.shape
        negative = z.detach() < 0
        distance, line = torch.where(negative, -z, z), neuron + torch.where(negative, lines // 2, 0)
        panel = torch.zeros_like(line)
        for bit in reversed(
            range((count - 2).bit_length())
        ):  # bisection for the last edge <= |z|, except the outermost
            trial = (panel + (1 << bit)).clamp(max=count - 2)
            panel = torch.where(edges.flatten()[line * count + trial] <= distance.detach(), trial, panel)
        low, high = (edges.flatten()[line * count + panel + end] for end in (0, 1))
        t = torch.where(distance <= self.law.reach, (2 * distance - low - high) / (high - low), torch.nan)
        *lower, current = (row[:, line * (count - 1) + panel] for row in series)
        previous = torch.zeros_like(t)
        for row in lower[:0:-1]:  # Clenshaw's recurrence
            current, previous = row + (2 * t * current - previous), current
        value, slope = lower[0] + (t * current - previous)
        return value, torch.where(negative, -slope, slope)


def _panel_edges(law: Law, length: Tensor, offset: Tensor) -> Float[Tensor, "lines e"]:
    """Panel edges from 0 outwards: a grid that resolves the distribution, the corner of phi, and steps that double away
    from the corner. The first step is the width of the corner, or the distance over which a change of h there decays.

    In Gauss space the last panel, where the march begins, extends beyond ``law.reach``; it is wide compared with 1/z
    and has no corner.
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
    """The nodes t; T_n(t) and T_n'(t); and the matrix that maps values at the nodes to int_-1^t, in its last row to
    int_-1^1.
    """
    node = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    lower = chebyshev.chebvander(node, NODES - 1)
    slopes = lower @ chebyshev.chebder(np.eye(NODES + 1))
    rises = chebyshev.chebvander(np.append(node, 1.0), NODES) @ chebyshev.chebint(np.linalg.inv(lower), lbnd=-1)
    arrays = (node, chebyshev.chebvander(node, NODES), slopes, rises)
    return tuple(torch.from_numpy(array) for array in arrays)  # type: ignore[return-value]


def _march(p: Tensor, drag: Tensor, source: Tensor) -> Float[Tensor, "lines panels terms sources"]:
    """Series y with p y' - drag y = -source at the nodes and continuous, solved from the outermost panel inwards.

    On the outermost panel continuity is replaced by a last term of 0: there p vanishes at the end, or is small compared
    with z, and only one solution stays bounded.
    """
    _, powers, slopes, _ = _chebyshev()
    edge = torch.eye(NODES + 1, dtype=p.dtype, device=p.device)[-1].expand(len(p), 1, -1)
    edge_value, panels = torch.zeros_like(source[:, 0, :1]), []
    for i in reversed(range(p.shape[1])):
        rows = p[:, i, :, None] * slopes - drag[:, i, :, None] * powers
        panels.append(lu.solve(torch.cat([rows, edge], 1), torch.cat([-source[:, i], edge_value], 1)))
        edge, edge_value = torch.ones_like(edge), _left_end(panels[-1]).unsqueeze(1)
    return torch.stack(panels[::-1], 1)


def _left_end(series: Float[Tensor, "lines terms sources"]) -> Float[Tensor, "lines sources"]:
    """The value at the left end of a panel, sum_n a_n T_n(-1)."""
    return series[:, ::2].sum(1) - series[:, 1::2].sum(1)


@full_precision
def _check_resolved(both: Float[Tensor, "both lines panels terms"], edges: Tensor, neurons: Neurons) -> None:
    """Raise ``HelmscopeError`` unless the series have converged and that of h' is the derivative of that of h, relative
    to their largest terms and to the argument of phi near 0.
    """
    _, powers, slopes, _ = _chebyshev()
    largest = both.abs().amax(-1)
    largest = largest + torch.where(edges[:, 1:] <= 12, largest, 0.0).amax(-1, keepdim=True)
    scale = largest.sum(0) + (neurons.length + neurons.offset.abs()).repeat(2)[:, None]
    half = (edges[:, 1:] - edges[:, :-1]) / 2
    gap = (both[0] @ slopes.mT - half[..., None] * (both[1] @ powers.mT)).abs().amax(-1)
    worst = (torch.maximum(both[..., -2:].abs().amax((0, -1)), gap) / scale).amax(-1)
    if not bool((worst <= RESOLVED).all()):  # also false for NaN
        neuron = int(worst.nan_to_num(torch.inf).argmax()) % len(neurons.length)
        raise HelmscopeError(
            f"activation is {type(neurons.activation).__name__}, but it must be smooth apart from a corner at 0 and "
            f"not oscillate: the profile of neuron {neuron} is only accurate to {float(worst.max()):.0e}"
        )
