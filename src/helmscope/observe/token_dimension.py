"""Intrinsic dimension of the tokens along depth: of the tokens of one prompt, and of the k-th tokens of all prompts.

The two clouds answer different questions. The tokens of one prompt share their context; the k-th tokens of all prompts
share their position, and only what the contexts do to them moves them apart. Both are compared along depth at equal
numbers of points: the estimators read high dimensions too low, and the more so the fewer points there are, but the same
at every depth. A smooth map of single tokens, such as the MLP half of a layer, cannot raise the dimension of a cloud;
attention, through the context, can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.observe.depth_steps import check_finite, sphere_text, token_weights_at, with_halves
from helmscope.observe.dimension import MIN_POINTS, gride_of_ratios, two_nn_of_ratios
from helmscope.observe.labels import label_attributes
from helmscope.observe.nearest import NearestNeighbors
from helmscope.observe.neighbor_entropy import distinct
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.track import AT_LEAST_0, with_bounds, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.stats.replicates import pseudo_values
from helmscope.types import HelmscopeError, Trajectory, check_integer, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

NEIGHBORS = (2, 4)
NAMES = {
    "two_nn": "Two-NN dimension of the tokens of a prompt",
    "gride": "GRIDE dimension of the tokens of a prompt",
    "position_two_nn": "Two-NN dimension of the k-th tokens of all prompts",
}


@shows_progress("dimension of the tokens")
def token_dimension(
    system: Trajectory | System,
    *,
    neighbors: Sequence[int] = NEIGHBORS,
    include_first_token: bool = False,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Two-NN dimension (without bias) of the tokens of each prompt over (depth, prompt), and at larger scales their
    GRIDE dimension, over a further axis ``neighbor``: that of r_2k / r_k for each k of ``neighbors``.

    Every cloud has the same number of points, the attribute ``points``: the tokens that are copies of another one at
    some depth are left out at all depths (all but one), and of prompts with more tokens the last ones are left out.
    Unit vectors of a Recording are those of ``on_sphere``; tokens of weight 0, and the first token unless
    ``include_first_token``, do not count. Estimates above about 15 depend on the number of points
    (``dimension_by_size``). Raises HelmscopeError for a prompt with fewer than 8 different tokens, or 2k + 1, and for
    states that are not finite.

    >>> from helmscope.models.record import record
    >>> recording = record("A", ["Once upon a time there was a little cat who liked to play in the sun."])
    >>> token_dimension(recording).gride.dims
    ('depth', 'prompt', 'neighbor')
    """
    scales = [check_integer("neighbors", k, at_least=2) for k in neighbors]
    path, report = _counted_path(system, include_first_token), check_progress(progress)
    least = max([MIN_POINTS, *(2 * k + 1 for k in scales)])
    tokens = [_different_tokens(path, i, least) for i in range(path.states.shape[1])]
    points = min(map(len, tokens))
    most, depths = max([1, *scales]), len(path.states)
    found = torch.empty(1 + len(scales), depths, len(tokens), dtype=torch.float64, device="cpu")
    for i, chosen in enumerate(tokens):
        for k in range(depths):
            distances = (
                NearestNeighbors.of(path.states[k, i, chosen[:points]].double(), 2 * most).distances.cpu().numpy()
            )
            found[0, k, i] = two_nn_of_ratios(distances[:, 1] / distances[:, 0]).estimate
            for j, scale in enumerate(scales):
                ratios = distances[:, 2 * scale - 1] / distances[:, scale - 1]
                found[1 + j, k, i] = gride_of_ratios(ratios, scale).estimate
        report((i + 1) / len(tokens))
    parts = [with_replicates({"two_nn": found[0]}, path)]
    if scales:
        parts.append(with_replicates({"gride": found[1:].movedim(0, -1)}, path, {"neighbor": scales}))
    return _described(xr.merge(parts, compat="override", join="override"), system, points, include_first_token)


@shows_progress("dimension by position")
def position_dimension(
    system: Trajectory | System, *, include_first_token: bool = False, progress: ProgressOption = None
) -> xr.Dataset:
    """Two-NN dimension of the k-th tokens of all prompts, ``position_two_nn`` over (depth, prompt): one estimate from
    the ratios of the clouds of all positions k, M / sum log(r_2 / r_1) with M their number, as jackknife pseudo-values
    of the prompts. Without a prompt the neighbors are those among the others.

    A position counts where at least 8 prompts have a token there, of which all but one of several copies at some depth
    are left out. The attribute ``positions`` is the number of clouds and ``points`` the mean number of points of one.
    Unit vectors, weights and the first token are as for ``token_dimension``. Raises HelmscopeError if no position
    counts.

    >>> x = torch.randn(1, 12, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> position_dimension(Trajectory(torch.zeros(1), x)).attrs["positions"]  # the first one is left out
    2
    """
    path, report = _counted_path(system, include_first_token), check_progress(progress)
    prompts, depths = path.states.shape[1], len(path.states)
    clouds = [_different(path, (slice(None), k)) for k in range(path.states.shape[2])]
    chosen = {k: members for k, members in enumerate(clouds) if len(members) > MIN_POINTS}
    if not chosen:
        raise HelmscopeError(
            f"system has {prompts} {path.replicate}s, but the dimension of the tokens at one position needs at least "
            f"{MIN_POINTS + 1} that differ there at every {path.axis}"
        )
    values = torch.empty(depths, prompts, dtype=torch.float64, device="cpu")
    for depth in range(depths):
        total = torch.zeros(1 + prompts, dtype=torch.float64, device="cpu")
        count = torch.zeros_like(total)
        for k, members in chosen.items():
            sums = _sums_without_one(path.states[depth, members, k].double()).cpu()
            total += sums[0]
            count += len(members)
            total[1 + members.cpu()] += sums[1:] - sums[0]
            count[1 + members.cpu()] -= 1
        values[depth] = pseudo_values(count[0] / total[0], count[1:] / total[1:], n=prompts)
        report((depth + 1) / depths)
    mean = sum(map(len, chosen.values())) / len(chosen)
    measured = _described(with_replicates({"position_two_nn": values}, path), system, mean, include_first_token)
    return measured.assign_attrs(positions=len(chosen))


def _sums_without_one(points: Float[Tensor, "n d"]) -> Float[Tensor, " one_and_n"]:
    """sum log(r_2 / r_1) over all points, and without each of them, with the neighbors among the others."""
    nearest = NearestNeighbors.of(points, 3)
    first, second, third = nearest.distances.log().unbind(-1)
    own = second - first
    changed = own.new_zeros(len(points))
    changed.index_add_(0, nearest.indices[:, 0], (third - second) - own)
    changed.index_add_(0, nearest.indices[:, 1], (third - first) - own)
    return torch.cat([own.sum()[None], own.sum() - own + changed])


def _counted_path(system: Trajectory | System, include_first_token: bool) -> Trajectory:
    path = sphere_and_ids(system, None)[0]
    return check_finite(path if include_first_token else without_first_token(path))


def _different_tokens(path: Trajectory, prompt: int, least: int) -> Tensor:
    """The indices of the tokens of a prompt that count and are copies of no earlier one at any depth."""
    members = _different(path, (prompt, slice(None)))
    if len(members) < least:
        raise HelmscopeError(
            f"{path.replicate} {prompt} has {len(members)} different tokens that count, but a dimension needs at least "
            f"{least}: take longer texts, or smaller neighbors"
        )
    return members


def _different(path: Trajectory, place: tuple[int | slice, int | slice]) -> Tensor:
    """The indices of the members of a cloud (a prompt, or a position) that count and are no copies at any depth."""
    counted = torch.stack([token_weights_at(path, k)[place] > 0 for k in range(len(path.states))]).all(0)
    members = counted.nonzero()[:, 0]
    for states in path.states:
        members = members[distinct(states[place][members].double())]
    return members


def _described(measured: xr.Dataset, system: object, points: float, include_first_token: bool) -> xr.Dataset:
    names = [str(name) for name in measured.data_vars]
    measured = with_bounds(measured, dict.fromkeys(names, AT_LEAST_0))
    for name in names:
        measured[name].attrs |= label_attributes(NAMES[name])
    attributes = {"points": points, "sphere": sphere_text(system), "include_first_token": int(include_first_token)}
    return with_halves(measured, system).assign_attrs(attributes)
