"""How clustered the tokens of each prompt are: statistics of their pairs, effective ranks, distance to the mean token.

The inner products <x_i, x_j> of pairs of tokens on the sphere are averaged over three sets of pairs, with weights
m_i m_j:

    distant       i and j are at least ``gap`` positions apart and have different token ids: neighbors have similar
                  position embeddings, and repeated words the same token embedding
    all           all i != j
    as printed    all i, j, with the diagonal, whose inner products are 1 [Geshkovski et al. 2023, figure 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.linkage import collapse_padding
from helmscope.geometry.sphere import retract
from helmscope.models.recording import Recording
from helmscope.observe.labels import label_attributes
from helmscope.observe.rank import collapse_residual_composite, collapse_residual_frobenius, spectral_ranks
from helmscope.observe.track import (
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE,
    token_mean,
    token_weights,
    trajectory_of,
    with_bounds,
    with_replicates,
)
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    System,
    Trajectory,
    check_integer,
    check_progress,
    check_real,
    sub_progress,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.typing import ArrayLike
    from torch import Tensor

    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

LEVELS, GAP = (0.8, 0.9, 0.99), 16
CHUNK = 1 << 22  # inner products in memory at a time

LABELS = {
    "aligned_pair_share": "share of inner products above the level",
    "mean_inner_product": "mean inner product",
    "effective_rank": "effective rank exp(entropy of the singular values)",
    "participation_ratio": "participation ratio",
    "stable_rank": "stable rank",
    "nuclear_rank": "nuclear rank",
    "collapse_residual_frobenius": "distance to the mean token, relative, Frobenius norm",
    "collapse_residual_composite": "distance to the mean token, relative, norm of Dong et al.",
    "radius": "mean radius",
}
BOUNDS = {
    "aligned_pair_share": SHARE,
    "mean_inner_product": (-1.0, 1.0),
    **dict.fromkeys(("effective_rank", "participation_ratio", "stable_rank", "nuclear_rank"), AT_LEAST_1),
    **dict.fromkeys(("collapse_residual_frobenius", "collapse_residual_composite", "radius"), AT_LEAST_0),
}


class PairSet(Enum):
    """The sets of pairs of ``cloud_statistics``; the values are the coordinates of its axis ``pairs``.

    >>> [pairs.value for pairs in PairSet]
    ['distant', 'all', 'as printed']
    """

    DISTANT = "distant"
    ALL = "all"
    AS_PRINTED = "as printed"


@shows_progress("statistics of clouds")
@full_precision
def cloud_statistics(
    system: Trajectory | System,
    *,
    ids: Int[Tensor, "batch n"] | None = None,
    levels: Sequence[float] = LEVELS,
    gap: int = GAP,
    include_first_token: bool = False,
    ranks: bool = True,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Statistics over (depth, prompt) of the tokens of each prompt on the unit sphere.

    ``mean_inner_product`` is the mean inner product of each of the three sets of pairs (axis ``pairs``, see
    ``PairSet``); ``aligned_pair_share`` is the share of inner products above each of ``levels`` (axis ``level``).
    ``effective_rank``, ``participation_ratio``, ``stable_rank`` and ``nuclear_rank`` are the effective ranks of the
    cloud, and ``collapse_residual_frobenius`` and ``collapse_residual_composite`` its distance to the mean token,
    relative to its size (the functions of these names with ``relative=True``). ``radius`` is the mean norm that was
    divided out, if there is one. With ``ranks=False`` effective ranks and distances to the mean token, which take most
    of the time, are left out.

    ``system`` is a Recording, whose states are those of ``on_sphere`` and whose token ids are known, another System, or
    a Trajectory. ``ids`` are the token ids; without them no two tokens have the same id. Tokens count by their weights,
    which are 0 for padding and special tokens; the first token, the usual attention sink, is left out unless
    ``include_first_token``. A statistic of no pairs is NaN. Everything is computed in float64, one depth at a time.
    ``progress`` is called with the share of the work done.

    >>> tokens = torch.eye(3).expand(1, 2, 3, 3)
    >>> measured = cloud_statistics(Trajectory(torch.zeros(1), tokens), gap=1, levels=[0.9], include_first_token=True)
    >>> measured.aligned_pair_share.dims, measured.aligned_pair_share.sel(pairs="distant", level=0.9).values.tolist()
    (('time', 'system', 'pairs', 'level'), [[0.0, 0.0]])
    """
    levels = check_levels(levels)
    gap = check_integer("gap", gap, at_least=1)
    path, ids = sphere_and_ids(system, ids)
    path = path if include_first_token else without_first_token(path)
    rows_at_once = max(1, CHUNK // path.states.shape[2] ** 2)
    report, texts, chunks = check_progress(progress), path.states.shape[1], []
    for begin in range(0, texts, rows_at_once):
        rows = slice(begin, min(begin + rows_at_once, texts))
        part = sub_progress(report, begin / texts, rows.stop / texts)
        chunks.append(_chunk_statistics(path, rows, None if ids is None else ids[rows], gap, levels, ranks, part))
    values = {name: torch.cat([chunk[name] for chunk in chunks], 1) for name in chunks[0]}
    if path.radius is not None:
        weights = torch.ones_like(path.radius[:1]) if path.weights is None else path.weights
        values["radius"] = token_mean(path.radius.double(), weights.double())
    return _as_measurement(values, path, levels).assign_attrs(gap=gap)


def _as_measurement(values: dict[str, Tensor], path: Trajectory, levels: list[float]) -> xr.Dataset:
    sets = [pairs.value for pairs in PairSet]
    axes: dict[str, dict[str, ArrayLike]] = {
        "aligned_pair_share": {"pairs": sets, "level": levels},
        "mean_inner_product": {"pairs": sets},
    }
    parts = [with_replicates({name: values[name]}, path, further) for name, further in axes.items()]
    plain = {name: value for name, value in values.items() if name not in axes}
    parts += [with_replicates(plain, path)] if plain else []
    measurement = with_bounds(xr.merge(parts, compat="override", join="override"), BOUNDS)
    for name in values:
        measurement[name].attrs |= label_attributes(LABELS[name])
    return measurement


def check_levels(levels: Sequence[float]) -> list[float]:
    """The levels as a list of numbers; raises HelmscopeError unless there is one, and all are between -1 and 1.

    >>> check_levels((0.5, 0.9))
    [0.5, 0.9]
    """
    numbers = [check_real("a level", level, at_least=-1) for level in levels]
    if not numbers or max(numbers) > 1 or len(set(numbers)) < len(numbers):
        raise HelmscopeError(f"levels is {levels!r:.60}, but it must hold different numbers between -1 and 1")
    return numbers


def sphere_and_ids(system: object, ids: Tensor | None) -> tuple[Trajectory, Tensor | None]:
    """The trajectory of a system on the unit sphere, and the ids of its tokens: ``ids`` or, if it is None,
    those of a recording. Raises HelmscopeError for ids of another shape.

    >>> path, ids = sphere_and_ids(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2)), None)
    >>> ids is None
    True
    """
    if isinstance(system, Recording):
        path = system.on_sphere
        ids = system.batch.inputs.get(system.batch.ids_name) if ids is None else ids
    else:
        path = trajectory_of(system)
    if ids is None:
        return path, None
    shape = tuple(path.states.shape[1:3])
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or tuple(ids.shape) != shape:
        shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise HelmscopeError(f"ids is {shown}, but it must be a tensor of whole numbers of shape {shape}")
    return path, ids.to(path.states.device)


def without_first_token(path: Trajectory) -> Trajectory:
    """The same trajectory with weight 0 for the first token of every prompt, the usual attention sink.

    >>> without_first_token(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))).weights
    tensor([[[0., 1.]]])
    """
    weights = torch.ones_like(path.states[:1, ..., 0]) if path.weights is None else path.weights.clone()
    weights[..., 0] = 0
    return replace(path, weights=weights)


@dataclass(frozen=True, eq=False)
class _PairWeights:
    """The weights of all pairs in each set, (rows, set, n^2), and their sums (rows, set)."""

    weights: Float[Tensor, "rows sets pairs"]
    total: Float[Tensor, "rows sets"]

    @classmethod
    def of(cls, m: Float[Tensor, "rows n"], ids: Int[Tensor, "rows n"] | None, gap: int) -> _PairWeights:
        position = torch.arange(m.shape[1], device=m.device)
        distance = (position.unsqueeze(-1) - position).abs()
        distant = (distance >= gap).expand(len(m), -1, -1)
        if ids is not None:
            distant = distant & (ids.unsqueeze(-1) != ids.unsqueeze(-2))
        sets = torch.stack([distant, (distance > 0).expand_as(distant), torch.ones_like(distant)], 1)
        weights = (sets * (m.unsqueeze(-1) * m.unsqueeze(-2)).unsqueeze(1)).flatten(-2)
        return cls(weights, weights.sum(-1))


def _chunk_statistics(
    path: Trajectory,
    rows: slice,
    ids: Tensor | None,
    gap: int,
    levels: list[float],
    ranks: bool,
    report: Progress,
) -> dict[str, Tensor]:
    """The statistics of some prompts at all depths, (depth, rows, ...) each."""
    by_depth = []
    for depth, states in enumerate(path.states):
        x = states[rows].double()
        if depth == 0 or (path.weights is not None and len(path.weights) > 1):
            m = token_weights(x, None if path.weights is None else path.weights[depth, rows].double())
            pairs = _PairWeights.of(m, ids, gap)
        x = retract(collapse_padding(x, m > 0))
        by_depth.append(_cloud_statistics(x, m, pairs, levels, ranks))
        report(len(by_depth) / len(path.states))
    return {name: torch.stack([one[name] for one in by_depth]) for name in by_depth[0]}


@full_precision
def _cloud_statistics(x: Tensor, m: Tensor, pairs: _PairWeights, levels: list[float], ranks: bool) -> dict[str, Tensor]:
    """The statistics of some clouds x (rows, n, d) with weights m, in float64."""
    gram = x @ x.mT
    flat = gram.flatten(-2)
    summands = torch.stack([flat, *((flat > level).to(flat) for level in levels)], 1)
    means = (pairs.weights @ summands.mT) / pairs.total.unsqueeze(-1)
    of_pairs = {"aligned_pair_share": means[..., 1:], "mean_inner_product": means[..., 0]}
    if not ranks:
        return of_pairs
    # the eigenvalues of the Gram matrix are s^2, at a third of the cost of singular values of x
    root = m.sqrt()
    power = torch.linalg.eigvalsh(root.unsqueeze(-1) * gram * root.unsqueeze(-2)).clamp(min=0)
    return {
        **of_pairs,
        **spectral_ranks(power.sqrt()),
        "collapse_residual_frobenius": collapse_residual_frobenius(x, relative=True, weights=m),
        "collapse_residual_composite": collapse_residual_composite(x, relative=True, weights=m),
    }
