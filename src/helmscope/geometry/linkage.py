"""Pairwise geodesic distances and single-linkage clustering of batched point clouds.

The single-linkage tree of a cloud is its minimum spanning tree: at scale r the clusters are the components left when
all tree edges longer than r are cut. Sorted by length, the edges give the order in which clusters merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.geometry.sphere import angle_from_chords

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class SpanningTree(NamedTuple):
    """Minimum spanning tree in Prim's order: edge k joins token ``child[k]`` to ``parent[k]``, already in the tree."""

    length: Float[Tensor, "*batch n_minus_1"]
    child: Int[Tensor, "*batch n_minus_1"]
    parent: Int[Tensor, "*batch n_minus_1"]


def pairwise_angles(x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n n"]:
    """Geodesic distances between all pairs of tokens of each cloud, accurate to rounding at any distance.

    >>> pairwise_angles(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[0.0000, 1.5708],
            [1.5708, 0.0000]])
    """
    exact = "donot_use_mm_for_euclid_dist"  # the matrix-product form of cdist cannot resolve distances below 1e-8
    chord, antipodal_chord = torch.cdist(x, x, compute_mode=exact), torch.cdist(x, -x, compute_mode=exact)
    return angle_from_chords(chord, antipodal_chord)


def spanning_tree(x: Float[Tensor, "*batch n d"]) -> SpanningTree:
    """Minimum spanning tree of each cloud by geodesic distance: Prim's algorithm from token 0, ties to the lower index.

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
    for _ in range(n - 1):
        child = nearest.masked_fill(~outside, torch.inf).argmin(-1, keepdim=True)
        lengths.append(nearest.gather(-1, child))
        children.append(child)
        parents.append(source.gather(-1, child))
        outside.scatter_(-1, child, False)
        reach = distance.gather(-2, child.unsqueeze(-1).expand(*batch, 1, n)).squeeze(-2)
        closer = reach < nearest
        nearest = torch.where(closer, reach, nearest)
        source = torch.where(closer, child, source)
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
    while True:
        lower = torch.where(linked, label.unsqueeze(-2), n).amin(-1)
        lower = lower.gather(-1, lower)  # pointer jumping: a chain of m nodes takes about log m rounds instead of m
        if torch.equal(lower, label):
            return label.contiguous()
        label = lower


def clusters(x: Float[Tensor, "*batch n d"], radius: float) -> Int[Tensor, "*batch n"]:
    """Single-linkage cluster labels: tokens joined by a chain of steps of at most ``radius`` (radians) share a label,
    the smallest token index in the cluster.

    >>> clusters(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), radius=0.1)
    tensor([0, 1, 0])
    """
    return components(pairwise_angles(x.detach()) <= radius)


def without_padding(x: Float[Tensor, "*batch n d"], real: Bool[Tensor, "*batch n"]) -> Float[Tensor, "*batch n d"]:
    """Clouds with padding tokens moved onto the first real token, where they add no cluster and no tree length.

    ``real`` is False for padding tokens.

    >>> without_padding(torch.eye(2), torch.tensor([True, False]))
    tensor([[1., 0.],
            [1., 0.]])
    """
    first = real.to(torch.uint8).argmax(-1, keepdim=True).unsqueeze(-1).expand_as(x[..., :1, :])
    return torch.where(real.unsqueeze(-1), x, x.gather(-2, first))
