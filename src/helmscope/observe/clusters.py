"""Single-linkage clusters on the sphere: their number, and the order in which they merge as the linkage angle grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.linkage import clusters, spanning_tree
from helmscope.geometry.sphere import check_tokens
from helmscope.observe.observable import in_parts, observable
from helmscope.observe.track import counted_tokens
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_real
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from helmscope.types.progress import ProgressOption


@observable
@shows_progress("counting clusters")
def cluster_count(
    x: Float[Tensor, "*batch n d"],
    *,
    max_angle: float,
    weights: Float[Tensor, "*batch n"] | None = None,
    progress: ProgressOption = None,
) -> Int[Tensor, "*batch"]:
    """Number of single-linkage clusters among the tokens of positive weight of each cloud.

    Tokens connected by steps of at most ``max_angle`` >= 0 radians form one cluster. ``progress`` is called with
    the share of the clouds done.

    >>> cluster_count(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), max_angle=0.1)
    tensor(2)
    """
    max_angle = check_real("max_angle", max_angle, at_least=0)
    x = counted_tokens(x, weights)
    own = torch.arange(x.shape[-2], device=x.device)  # one token of a cluster has its own index as its label
    return in_parts(lambda x, _: (clusters(x, max_angle) == own).sum(-1), x, torch.ones_like(x[..., 0]), progress)


@dataclass(frozen=True, eq=False)
class MergeTree(ConciseRepr):
    """Single-linkage merges of each cloud in order of increasing distance.

    Merge k joins the clusters of the tokens ``left[k]`` and ``right[k]`` at geodesic distance ``height[k]``. Heights
    have no gradient.

    >>> merge_tree(torch.eye(2)).linkage().tolist() == [[0.0, 1.0, float(merge_tree(torch.eye(2)).height), 2.0]]
    True
    """

    height: Float[Tensor, "*batch n_minus_1"]
    left: Int[Tensor, "*batch n_minus_1"]
    right: Int[Tensor, "*batch n_minus_1"]

    def linkage(self) -> Float[Tensor, "n_minus_1 4"]:
        """The tree of one cloud as a SciPy linkage matrix: rows (cluster, cluster, height, size), new clusters numbered
        from n. Raises HelmscopeError for a batch of trees.

        >>> circle = torch.tensor([0.0, 1.0, 1.1], dtype=torch.float64)
        >>> merge_tree(torch.stack([circle.cos(), circle.sin()], -1)).linkage().round(decimals=6).tolist()
        [[1.0, 2.0, 0.1, 2.0], [0.0, 3.0, 1.0, 3.0]]
        """
        if self.height.ndim != 1:
            raise HelmscopeError(
                f"height has shape {tuple(self.height.shape)}, but linkage() needs the tree of one cloud"
            )
        n = len(self.height) + 1
        label, size, rows = list(range(n)), [1] * n, []
        for k, (height, i, j) in enumerate(
            zip(self.height.tolist(), self.left.tolist(), self.right.tolist(), strict=True)
        ):
            a, b = sorted((label[i], label[j]))
            size.append(size[a] + size[b])
            label = [n + k if current in (a, b) else current for current in label]
            rows.append([float(a), float(b), height, float(size[-1])])
        return torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(n - 1, 4)


@observable
@shows_progress("merge trees")
def merge_tree(x: Float[Tensor, "*batch n d"], *, progress: ProgressOption = None) -> MergeTree:
    """Single-linkage tree of each cloud (..., n, d) by geodesic distance; ``progress`` is called with the share of the
    tokens done.

    >>> circle = torch.tensor([0.0, 1.0, 1.1])
    >>> merge_tree(torch.stack([circle.cos(), circle.sin()], -1)).height
    tensor([0.1000, 1.0000])
    """
    tree = spanning_tree(check_tokens(x), progress or None)
    order = tree.length.sort(dim=-1, stable=True).indices
    return MergeTree(*(values.gather(-1, order) for values in (tree.length, tree.parent, tree.child)))
