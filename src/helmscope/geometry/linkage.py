"""Pairwise geodesic distances and single-linkage clustering of batched point clouds.

The single-linkage tree of a cloud is its minimum spanning tree: at scale r the clusters are the components left when
all tree edges longer than r are cut. Sorted by length, the edges give the order in which clusters merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.geometry.arithmetic import full_precision, is_vmapped
from helmscope.geometry.sphere import angle_from_chords
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from helmscope.types import Progress

__all__ = [
    "SpanningTree",
    "clusters",
    "collapse_padding",
    "components",
    "pairs_within",
    "pairs_within_chord",
    "pairwise_angles",
    "spanning_tree",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__)

EXACT = "donot_use_mm_for_euclid_dist"  # the matrix-product form of cdist cannot see below 1e-8
PASSING = 1 << 22  # coordinates of pairs that are looked at one by one, at a time


class SpanningTree(NamedTuple):
    """Minimum spanning tree in Prim's order: edge k joins token ``child[k]`` to ``parent[k]``, already in the tree.

    >>> circle = torch.tensor([0.0, 1.0, 0.1])
    >>> tree = spanning_tree(torch.stack([circle.cos(), circle.sin()], -1))
    >>> tree.child.tolist(), tree.parent.tolist()
    ([2, 1], [0, 2])
    """

    length: Float[Tensor, "*batch n_minus_1"]
    child: Int[Tensor, "*batch n_minus_1"]
    parent: Int[Tensor, "*batch n_minus_1"]


def pairwise_angles(x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n n"]:
    """Geodesic distances between all pairs of tokens of each cloud, accurate to rounding at any distance.

    >>> pairwise_angles(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[0.0000, 1.5708],
            [1.5708, 0.0000]])
    """
    return _angles(x, x)


def pairs_within(x: Float[Tensor, "*batch n d"], max_angle: float) -> Bool[Tensor, "*batch n n"]:
    """Which tokens are at most ``max_angle`` radians apart: pairwise_angles(x) <= max_angle, faster.

    >>> pairs_within(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 1.5)
    tensor([[ True, False],
            [False,  True]])
    """
    return _decided(x.detach(), 2 * math.sin(min(max_angle, math.pi) / 2), lambda a, b: _angles(a, b) <= max_angle)


def pairs_within_chord(x: Float[Tensor, "*batch n d"], chord: float) -> Bool[Tensor, "*batch n n"]:
    """Which tokens have |x_i - x_j| <= ``chord``.

    >>> pairs_within_chord(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 1.5)
    tensor([[True, True],
            [True, True]])
    """
    return _decided(x.detach(), chord, lambda a, b: torch.cdist(a, b, compute_mode=EXACT) <= chord)


def _angles(x: Tensor, y: Tensor) -> Tensor:
    return angle_from_chords(torch.cdist(x, y, compute_mode=EXACT), torch.cdist(x, -y, compute_mode=EXACT))


@full_precision
def _decided(x: Tensor, chord: float, exact: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """exact(x, x), a condition |x_i - x_j| <= chord whose rounding is that of the dtype of x: read off inner products,
    which are fast, wherever rounding cannot change the answer, and asked for at the other pairs alone.
    """
    if is_vmapped(x):
        return exact(x, x)
    clouds = x.reshape(-1, *x.shape[-2:])
    wide = clouds.to(torch.float64)  # no setting of torch makes these products coarser
    size = wide.square().sum(-1)
    beyond = torch.baddbmm(size.unsqueeze(-1) + size.unsqueeze(-2), wide, wide.mT, alpha=-2).sub_(chord**2)
    # |x - y|^2 of the condition and of this sum are rounded to (4 d + 16) eps; norms that are not 1 move an angle
    off = float((size - 1).abs().amax()) if size.numel() else 0.0
    doubt = 8 * (x.shape[-1] + 2) * torch.finfo(x.dtype).eps + 2 * off * chord**2
    near, unsure = beyond <= 0, (beyond.abs_() <= doubt).nonzero()
    if len(unsure) > near.numel() // 8:
        return exact(x, x)
    for cloud, i, j in (part.unbind(-1) for part in torch.split(unsure, max(1, PASSING // x.shape[-1]))):
        near[cloud, i, j] = exact(clouds[cloud, i].unsqueeze(-2), clouds[cloud, j].unsqueeze(-2))[:, 0, 0]
    return near.view(*x.shape[:-1], x.shape[-2])


def spanning_tree(x: Float[Tensor, "*batch n d"], progress: Progress | None = None) -> SpanningTree:
    """Minimum spanning tree of each cloud by geodesic distance: Prim's algorithm from token 0, ties to the lower index.
    ``progress`` is called with the share of the tokens done.

    >>> circle = torch.tensor([0.0, 0.1, 1.0])
    >>> spanning_tree(torch.stack([circle.cos(), circle.sin()], -1)).length
    tensor([0.1000, 0.9000])
    """
    distance = pairwise_angles(x.detach())
    *batch, n, _ = distance.shape
    nearest = distance[..., 0, :].clone()
    source = torch.zeros(*batch, n, dtype=torch.long, device=x.device)
    outside = torch.ones(*batch, n, dtype=torch.bool, device=x.device)
    outside[..., 0] = False
    lengths, children, parents = [], [], []
    for done in range(1, n):
        child = nearest.masked_fill(~outside, torch.inf).argmin(-1, keepdim=True)
        lengths.append(nearest.gather(-1, child))
        children.append(child)
        parents.append(source.gather(-1, child))
        outside.scatter_(-1, child, False)
        reach = distance.gather(-2, child.unsqueeze(-1).expand(*batch, 1, n)).squeeze(-2)
        closer = reach < nearest
        nearest = torch.where(closer, reach, nearest)
        source = torch.where(closer, child, source)
        if progress is not None:
            progress(done / (n - 1))
    if not lengths:
        empty = source[..., :0]
        return SpanningTree(nearest[..., :0], empty, empty)
    return SpanningTree(torch.cat(lengths, -1), torch.cat(children, -1), torch.cat(parents, -1))


def components(adjacent: Tensor) -> Int[Tensor, "*batch n"]:
    """Connected components of each graph: every node is labelled by the smallest index in its component.

    ``adjacent`` is a boolean adjacency matrix (..., n, n); an edge may be given in one direction only.

    >>> components(torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool))
    tensor([0, 0, 2])
    """
    n = adjacent.shape[-1]
    index = torch.arange(n, device=adjacent.device)
    linked = adjacent | adjacent.mT | torch.eye(n, dtype=torch.bool, device=adjacent.device)
    label = index.expand(adjacent.shape[:-1])
    for _ in range(n):
        lower = torch.where(linked, label.unsqueeze(-2), n).amin(-1)
        lower = lower.gather(-1, lower)  # a chain of m nodes takes about log m rounds instead of m
        if not is_vmapped(lower) and torch.equal(lower, label):
            break
        label = lower
    return label.contiguous()


def clusters(x: Float[Tensor, "*batch n d"], max_angle: float) -> Int[Tensor, "*batch n"]:
    """Single-linkage cluster labels: tokens joined by a chain of steps of at most ``max_angle`` (radians) share a
    label, the smallest token index in the cluster.

    >>> clusters(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), max_angle=0.1)
    tensor([0, 1, 0])
    """
    return components(pairs_within(x, max_angle))


def collapse_padding(x: Float[Tensor, "*batch n d"], real: Bool[Tensor, "*batch n"]) -> Float[Tensor, "*batch n d"]:
    """Clouds with padding tokens moved onto the first real token, where they add no cluster and no tree length.

    ``real`` is False for padding tokens.

    >>> collapse_padding(torch.eye(2), torch.tensor([True, False]))
    tensor([[1., 0.],
            [1., 0.]])
    """
    first = real.to(torch.uint8).argmax(-1, keepdim=True).unsqueeze(-1).expand_as(x[..., :1, :])
    return torch.where(real.unsqueeze(-1), x, x.gather(-2, first))
