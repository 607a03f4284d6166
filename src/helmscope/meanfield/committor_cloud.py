"""Markov chains on a cloud that approximate a process on the sphere with the generator L = b . grad + nu Lap_S.

From x_i the process is near y_i = exp(x_i, h b(x_i)) after a time h, with variance 2 nu h per direction. On points that
are distributed with any density p, a local kernel (Berry and Sauer, arXiv:1407.1426) does the same:

    P_ij ~ k(y_i, x_j) / p_j,    k(y, x) = e^{-|y - x|^2 / (4 nu h)},    p_j = sum_{l != j} k(x_j, x_l),

and (P - I) / h -> L as n -> infinity, h -> 0. Division by the estimated density p is the diffusion map's alpha = 1: it
removes the density of the points from the result. The sum leaves out l = j, because that term does not measure a
density: with it, the bias of a committor on 1,500 unevenly distributed points was 0.07 instead of 0.02. The drift b may
be any field, also one that is not a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse
from scipy.spatial import cKDTree

from helmscope.fields.field import Field, StateSpace, as_field
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import check_tokens, exp
from helmscope.meanfield.committor_chain import chain_committor
from helmscope.meanfield.sphere_sets import OVERSHOOT, SphereSet, check_regions
from helmscope.types import HelmscopeError, check_memory, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

NEGLIGIBLE = 1e-12  # kernel values below this are 0
ISOLATED = 1e-3  # a density below this, in units of one neighbor at distance 0, is that of an isolated point


@full_precision  # a plain function may multiply matrices
def kernel_transition_matrix(
    field: Field | Callable[..., Tensor], x: Float[Tensor, "n d"], *, nu: float, duration: float
) -> sparse.csr_array:
    """Transition matrix over a time ``duration`` between the points of a cloud, as a sparse array (n, n).

    The length sqrt(4 nu duration) of the kernel must exceed the distance between neighboring points, and be small
    compared with the size of the sphere. ``field`` is the drift of one particle, so it may attend to a fixed cloud
    (``CrossAttention``), but not to the other points. Raises ``HelmscopeError`` for such a field, for one that depends
    on time, for nu or duration <= 0, and for points without neighbors.

    >>> import torch
    >>> from helmscope.theory.starts import Uniform
    >>> chain = kernel_transition_matrix(torch.zeros_like, Uniform(n=100, dim=2).sample(seed=0), nu=1.0, duration=0.01)
    >>> chain.shape, bool(abs(chain.sum(axis=1) - 1).max() < 1e-12)
    ((100, 100), True)
    """
    nu, duration = check_real("nu", nu, above=0), check_real("duration", duration, above=0)
    check_cloud(x)
    drift = particle_field(field, x).velocity(x.unsqueeze(-2)).squeeze(-2)
    if not bool(drift.isfinite().all()):
        raise HelmscopeError("field has a velocity that is not finite at x, but a chain needs finite drifts")
    squared_length = 4 * nu * duration
    points, ends = (part.detach().cpu().double().numpy() for part in (x, exp(x, duration * drift)))
    tree = cKDTree(points)
    density = np.asarray(_kernel(tree, tree, squared_length).sum(axis=0)).ravel() - 1.0
    alone = int((density < ISOLATED).sum())
    if alone:
        raise HelmscopeError(
            f"duration is {duration:g}, but {alone} of the {len(x)} points of x have no neighbor within about the "
            f"kernel's length {math.sqrt(squared_length):.3g}: use a longer duration or more points"
        )
    weights = _kernel(cKDTree(ends), tree, squared_length) @ sparse.diags_array(1 / density)
    total = np.asarray(weights.sum(axis=1)).ravel()
    lost = int((total < ISOLATED / len(x)).sum())
    if lost:
        raise HelmscopeError(
            f"duration is {duration:g}, but the drift leads {lost} of the {len(x)} points of x away from all others: "
            "use a shorter duration or more points"
        )
    return sparse.csr_array(sparse.diags_array(1 / total) @ weights)


def cloud_committor(
    field: Field | Callable[..., Tensor],
    x: Float[Tensor, "n d"],
    *,
    a: SphereSet,
    b: SphereSet,
    nu: float,
    duration: float,
) -> Float[Tensor, " n"]:
    """The committor q at the points of a cloud, from ``kernel_transition_matrix``: the probability that the process
    with drift ``field`` and noise nu reaches b before a.

    The chain notices a set only at its steps, so both are enlarged by 0.58 sqrt(2 nu duration), the mean overshoot;
    points in that margin get the value of the set. The error falls with more points and a shorter ``duration``. Raises
    ``HelmscopeError`` as ``kernel_transition_matrix`` and ``chain_committor`` do.

    >>> import torch
    >>> from helmscope.meanfield.sphere_sets import Cap
    >>> angles = torch.arange(200, dtype=torch.float64) * torch.pi / 100
    >>> circle = torch.stack([angles.cos(), angles.sin()], -1)
    >>> west, east = (Cap(torch.tensor([sign, 0.0]), min_cosine=0.8) for sign in (-1.0, 1.0))
    >>> q = cloud_committor(torch.zeros_like, circle, a=west, b=east, nu=1.0, duration=2e-3)
    >>> round(float(q[50]), 6)  # halfway, without drift
    0.5
    """
    check_cloud(x)
    check_regions(a, b, x)
    chain = kernel_transition_matrix(field, x, nu=nu, duration=duration)
    margin = OVERSHOOT * math.sqrt(2 * nu * duration)
    inside = [region.contains(x, margin=margin) for region in (a, b)]
    for name, mask in zip("ab", inside, strict=True):
        if not bool(mask.any()):
            raise HelmscopeError(
                f"{name} contains none of the {len(x)} points of x, but a committor needs some in both"
            )
    if bool((inside[0] & inside[1]).any()):
        raise HelmscopeError(f"duration is {duration:g}, but with so long a step a and b cannot be told apart: use a "
                             "shorter one")  # fmt: skip
    return chain_committor(chain, *inside).to(x.device)


def check_cloud(x: object) -> Float[Tensor, "n d"]:
    """The argument if it is a cloud of unit vectors (n, d); raises ``HelmscopeError`` otherwise.

    >>> import torch
    >>> check_cloud(torch.eye(2)).shape
    torch.Size([2, 2])
    """
    cloud = check_tokens(x)
    if cloud.ndim != 2:
        raise HelmscopeError(f"x has shape {tuple(cloud.shape)}, but it must be (n, d)")
    return cloud


def particle_field(field: Field | Callable[..., Tensor], x: Float[Tensor, "n d"]) -> Field:
    """The field as the drift of single particles at x, checked: on the sphere, independent of time and of other tokens.

    >>> import torch
    >>> particle_field(torch.zeros_like, torch.eye(2)).autonomous
    True
    """
    drift = as_field(field)
    if drift.space is not StateSpace.SPHERE:
        raise HelmscopeError(f"field is a {drift.name} on {drift.space.value}, but a committor needs one on the sphere")
    if not drift.autonomous:
        raise HelmscopeError(f"field is {drift.name}, which depends on time, but a committor needs one that does not")
    if drift.attends:
        raise HelmscopeError(
            f"field is {drift.name}, whose tokens attend to each other, but a committor is that of one particle: use "
            "CrossAttention to a fixed cloud"
        )
    drift.check_size(x.unsqueeze(-2))
    return drift


def _kernel(left: cKDTree, right: cKDTree, squared_length: float) -> sparse.csr_array:
    """e^{-|y - x|^2 / squared_length} of the pairs at which it is not negligible."""
    reach = math.sqrt(-squared_length * math.log(NEGLIGIBLE))
    pairs = int(left.count_neighbors(right, reach))
    check_memory(f"the kernel has {pairs:,} pairs of points", 3 * pairs)
    near = left.sparse_distance_matrix(right, reach, output_type="ndarray")
    values = np.exp(-(near["v"] ** 2) / squared_length)
    return sparse.csr_array(sparse.coo_array((values, (near["i"], near["j"])), shape=(left.n, right.n)))
