"""The spectrum of the tokens of each prompt along depth: ranks, condition, roughness along the tokens and collapse, in
two coordinates, with and without the mean token.

The quantities are those of ``matrix_spectrum`` for the T x d matrix X of the tokens of a prompt, and

    nuclear_retention  =  |X_k|_* / |X_{k-1}|_*    over the half-step that ends at depth k.

Coordinates. "sphere": unit vectors, in a post-norm model those without gain and bias; "residual stream": the states
with their radii, gain and bias. The mean over coordinates, which a LayerNorm removes, is left out of both. Mean token:
"kept", X itself, or "removed", X - 1 xbar^T: a cloud far from the origin has one large singular value, and ranks near
1, whatever its shape.
How to read it. A half-step at which attention averages lowers the ranks; the sign of a change may differ between the
four clouds, so that a statement about rank names its cloud. A change of a rank says nothing about the dimension of the
cloud (``token_dimension``), which counts directions near each token.
How it fails. The condition number depends on the least of all directions, and on the number of tokens: compare equal
texts, and take quantiles over prompts. Cost: four singular value decompositions of T x d per depth and prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.models.recording import Recording
from helmscope.observe.depth_steps import check_finite, sphere_text, token_weights_at, with_halves
from helmscope.observe.labels import label_attributes
from helmscope.observe.matrix_spectrum import MATRIX_NAMES, matrix_spectrum
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.track import AT_LEAST_0, trajectory_of, with_bounds, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Trajectory, check_progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

COORDINATES, MEANS = ("sphere", "residual stream"), ("kept", "removed")
RETENTION = "nuclear_retention"
NAMES = MATRIX_NAMES | {RETENTION: "nuclear norm of the tokens over that before the half-step"}
FEWEST = 3


@shows_progress("spectrum of the tokens")
def cloud_spectrum(
    system: Trajectory | System, *, include_first_token: bool = False, progress: ProgressOption = None
) -> xr.Dataset:
    """The quantities of ``matrix_spectrum`` and ``nuclear_retention`` over (depth, prompt, coordinates, token_mean),
    the last two with the values "sphere" and "residual stream", "kept" and "removed".

    Retention is NaN at the first depth. Without radii, as in a simulation on the sphere, the two coordinates agree.
    Tokens of weight 0, and the first token unless ``include_first_token``, do not count. Raises HelmscopeError for a
    prompt of fewer than 3 tokens that count, and for states that are not finite.

    >>> from helmscope import record
    >>> measured = cloud_spectrum(record("A", ["Once upon a time there was a cat"]))
    >>> measured.effective_rank.dims, bool((measured.stable_rank <= measured.effective_rank).all())
    (('depth', 'prompt', 'coordinates', 'token_mean'), True)
    """
    report, columns = check_progress(progress), []
    path = sphere_and_ids(system, None)[0]
    for k, prompts in enumerate(clouds_along_depth(system, include_first_token)):
        columns.append([_both_means(cloud, _centered(system)) for cloud in prompts])
        report((k + 1) / len(path.states))
    names = list(columns[0][0])
    values = {name: torch.stack([torch.stack([each[name] for each in column]) for column in columns]) for name in names}
    norm = values["nuclear_norm"]
    values[RETENTION] = torch.cat([torch.full_like(norm[:1], torch.nan), norm[1:] / norm[:-1]])
    measured = with_replicates(values, path, {"coordinates": list(COORDINATES), "token_mean": list(MEANS)})
    measured = with_bounds(measured, dict.fromkeys(NAMES, AT_LEAST_0))
    for name, long_name in NAMES.items():
        measured[name].attrs |= label_attributes(long_name)
    attributes = {"sphere": sphere_text(system), "include_first_token": int(include_first_token)}
    return with_halves(measured, system).assign_attrs(attributes)


def clouds_along_depth(
    system: Trajectory | System, include_first_token: bool = False, *, fewest: int = FEWEST
) -> Iterator[list[Float[Tensor, "2 tokens d"]]]:
    """The tokens of each prompt that count, in float64, in both coordinates: depth by depth.

    Raises HelmscopeError for a prompt with fewer than ``fewest`` tokens and for states that are not finite.

    >>> path = Trajectory(torch.zeros(1), torch.eye(4).expand(1, 1, 4, 4))
    >>> [cloud.shape for cloud in next(clouds_along_depth(path))]
    [torch.Size([2, 3, 4])]
    """
    path, raw = sphere_and_ids(system, None)[0], trajectory_of(system)
    path = check_finite(path if include_first_token else without_first_token(path))
    for k, states in enumerate(path.states):
        weights, clouds = token_weights_at(path, k), []
        for i, m in enumerate(weights):
            seen = m > 0
            if int(seen.sum()) < fewest:
                raise HelmscopeError(
                    f"{path.replicate} {i} has {int(seen.sum())} tokens that count, but its spectrum needs at least "
                    f"{fewest}"
                )
            stream = raw.states[k, i, seen].double()
            if raw.radius is not None:
                stream = stream * raw.radius[k, i, seen].double().unsqueeze(-1)
            clouds.append(torch.stack([states[i, seen].double(), stream]))
        yield clouds


def _centered(system: object) -> bool:
    return isinstance(system, Recording) and system.anatomy.centered


def _both_means(clouds: Float[Tensor, "2 tokens d"], centered: bool) -> dict[str, Float[Tensor, "2 2"]]:
    """The quantities of the clouds with and without their mean token, over (coordinates, token_mean)."""
    tokens, dim = clouds.shape[-2:]
    room = dim - centered
    removed = clouds - clouds.mean(-2, keepdim=True)
    own = matrix_spectrum(clouds, rank=min(tokens, room)), matrix_spectrum(removed, rank=min(tokens - 1, room))
    return {name: torch.stack([each[name] for each in own], -1) for name in own[0]}
