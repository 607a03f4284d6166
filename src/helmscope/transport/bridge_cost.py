"""The cost of a bridge between the laws of which two clouds are samples, with its sampling error:

    E int u . Sigma^-1 u / 4 dt  =  E log phi_T(X_T) - E log phi_0(X_0)
                                 =  sum_j b_j (g_j - log b_j) - H - sum_i a_i log phi_0(x_i),

where e^{g_j} is the weight of y_j in phi_T, and H = -int mu_T log mu_T the entropy of the target with respect to
volume, without which a process that ends in points costs infinitely much.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from scipy import special

from helmscope.transport.nearest import nearest_neighbor_entropy
from helmscope.types import HelmscopeError, Interval, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.clouds import Clouds

_GROUPS = 8  # parts of the target, for the standard error of its entropy
_CONFIDENCE = 0.95


def cost_between_laws(
    clouds: Clouds,
    start_log_potential: Float[Tensor, " n"],
    end_log_potential: Float[Tensor, " m"],
    *,
    target_entropy: float | None,
    on_sphere: bool,
) -> Interval:
    """The cost from log phi_0 at x and g at y, with its 95 % confidence interval, if the points of both clouds are
    independent samples. To first order errors of the potentials do not matter, so the standard error is that of the two
    means. If ``target_entropy`` is None, H is estimated by nearest neighbors, and the standard error of both terms over
    y is that of eight random parts of it.

    Raises ``HelmscopeError`` for fewer than two points, and, if H is estimated, for unequal y_weights and fewer than 32
    points of y.
    """
    a, b, y = clouds.a, clouds.b, clouds.y
    for name, masses in (("x", a), ("y", b)):
        if len(masses) < 2:
            raise HelmscopeError(f"{name} has 1 point, but a sampling error of the cost needs at least two")
    end = end_log_potential - torch.log(b)
    freedom = [_effective_size(masses) - 1 for masses in (a, b)]
    variance = _variance_of_mean(start_log_potential, a)
    if target_entropy is None:
        groups, entropy = _entropy_by_groups(end, b, y, on_sphere=on_sphere)
        freedom[1] = _GROUPS - 1
        variance += float(groups.var()) / _GROUPS
    else:
        entropy = check_real("target_entropy", target_entropy)
        variance += _variance_of_mean(end, b)
    estimate = float((b * end).sum() - (a * start_log_potential).sum()) - entropy
    margin = float(special.stdtrit(min(freedom), (1 + _CONFIDENCE) / 2)) * math.sqrt(variance)
    return Interval(estimate, estimate - margin, estimate + margin, n=min(len(a), len(b)))


def _entropy_by_groups(end: Tensor, b: Tensor, y: Tensor, *, on_sphere: bool) -> tuple[Tensor, float]:
    """The mean of ``end`` minus the entropy in each of eight parts of y, and the entropy of all of y."""
    if len(b) < 4 * _GROUPS or not torch.allclose(b, torch.full_like(b, 1 / len(b)), rtol=1e-6):
        raise HelmscopeError(
            f"target_entropy is None, but it can be estimated for at least {4 * _GROUPS} points of equal y_weights "
            f"only, and y has {len(b)}: pass the entropy of the target"
        )
    # groups in a random order, because that of y may have a structure
    order = torch.randperm(len(y), generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(y.device)
    parts = [float(end[part].mean()) - nearest_neighbor_entropy(y[part], on_sphere=on_sphere)
             for part in order.chunk(_GROUPS)]  # fmt: skip
    return torch.tensor(parts, dtype=torch.float64), nearest_neighbor_entropy(y, on_sphere=on_sphere)


def _effective_size(masses: Tensor) -> float:
    """1 / sum a^2: the number of points for equal masses."""
    return 1 / float((masses * masses).sum())


def _variance_of_mean(values: Tensor, masses: Tensor) -> float:
    """The variance of sum a v for independent points: s^2 / n for equal masses."""
    size = _effective_size(masses)
    spread = float((masses * masses * (values - (masses * values).sum()).square()).sum())
    return spread * size / (size - 1)
