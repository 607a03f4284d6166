"""The interaction energy of source 001 and its rate along a field.

    E(x) = 1/(2 beta M^2) sum_ij m_i m_j e^{beta x_i^T B x_j},     M = sum_i m_i

with m = 1 and B = I unless said otherwise: the energy of the empirical measure. SA and USA with V = B symmetric climb
it, with V = -B they descend; for unrelated B and V it is not monotone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.fields.attention import SA, USA
from helmscope.fields.field import check_weights
from helmscope.fields.lowrank import LowRank, as_dense, query_and_key
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry.sphere import check_tokens
from helmscope.kernels.dense import logits, matrix_product
from helmscope.types import HelmscopeError, real_number

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


Tempered = SA | USA | SinkhornAttention  # fields with a beta


class _Pairs(NamedTuple):
    """m_i m_j e^{l_ij} / M^2 = e^{top} share_ij."""

    share: Float[Tensor, "*batch n n"]
    top: Float[Tensor, "*batch"]


def interaction_energy(
    x: Float[Tensor, "*batch n d"],
    *,
    beta: float,
    query_key: Float[Tensor, "d d"] | LowRank | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"]:
    """E_beta with 1/n^2, beta > 0. On the sphere it lies between ``energy_min`` and ``energy_max``.

    Infinite where e^beta leaves the dtype: use ``log_interaction_energy`` there.

    >>> interaction_energy(torch.eye(2), beta=1.0)  # (e + 1) / 4
    tensor(0.9296)
    """
    beta = real_number("beta", beta, above=0)
    pairs = _pairs(x, SA(beta, query_key=query_key), check_weights(check_tokens(x), weights, mask))
    return torch.exp(pairs.top) * pairs.share.sum((-1, -2)) / (2 * beta)


def log_interaction_energy(
    x: Float[Tensor, "*batch n d"],
    *,
    beta: float,
    query_key: Float[Tensor, "d d"] | LowRank | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"]:
    """log E_beta, finite for every beta > 0.

    >>> log_interaction_energy(torch.eye(2), beta=1000.0)  # log (e^1000 / 4000)
    tensor(991.7059)
    """
    beta = real_number("beta", beta, above=0)
    pairs = _pairs(x, SA(beta, query_key=query_key), check_weights(check_tokens(x), weights, mask))
    return pairs.top + torch.log(pairs.share.sum((-1, -2)) / (2 * beta))


def interaction_energy_sum(x: Float[Tensor, "*batch n d"], *, beta: float) -> Float[Tensor, "*batch"]:
    """E_sum = 1/(2 beta) sum_ij e^{beta <x_i, x_j>} = n^2 E: the energy of points instead of their measure.

    >>> interaction_energy_sum(torch.eye(2), beta=1.0)  # e + 1
    tensor(3.7183)
    """
    return check_tokens(x).shape[-2] ** 2 * interaction_energy(x, beta=beta)


def gaussian_energy_as_printed(x: Float[Tensor, "*batch n d"], *, beta: float) -> Float[Tensor, "*batch"]:
    """F = 1/2 sum_ij e^{-(beta/2) |x_i - x_j|^2}, which source 002 prints as a *repulsive* energy.

    On the unit sphere F = beta e^{-beta} E_sum, so the flow with V = +I climbs it: it attracts. Repulsion is V = -I.

    >>> gaussian_energy_as_printed(torch.eye(2), beta=1.0)  # 1 + e^-1
    tensor(1.3679)
    """
    beta = real_number("beta", beta, at_least=0)
    check_tokens(x)
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(-(beta / 2) * distance**2).sum((-1, -2)) / 2


def interaction_energy_rate(
    x: Float[Tensor, "*batch n d"],
    field: Tempered,
    *,
    weights: Float[Tensor, "*batch n"] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"]:
    """dE/dt along an attention field, E with the field's own beta and B:

        dE/dt = 1/(2 M^2) sum_ij m_i m_j e^{beta x_i^T B x_j} (x_i'^T B x_j + x_i^T B x_j').

    For V = B = I it equals (1/n) sum_i (Z_i / n) |x_i'|^2 under SA and (1/n) sum_i |x_i'|^2 under USA; for V = -I,
    minus that. Mask and bias of the field act on the velocities alone: E has neither. Not finite where e^beta leaves
    the dtype.

    >>> from helmscope.fields.attention import USA
    >>> interaction_energy_rate(torch.eye(2), USA(beta=1.0))
    tensor(0.2500)
    """
    if not isinstance(field, Tempered):
        raise HelmscopeError(
            f"field is {type(field).__name__}, but the energy's rate needs an attention field with a beta, SA, USA or "
            "SinkhornAttention"
        )
    real_number("beta", field.beta, above=0)
    combined = check_weights(check_tokens(x), weights, mask)
    pairs = _pairs(x, field, combined)
    velocity = field.velocity(x, combined)
    b = as_dense(field.query_key, x)
    change = matrix_product(velocity, b) @ x.mT + matrix_product(x, b) @ velocity.mT
    return torch.exp(pairs.top) * (pairs.share * change).sum((-1, -2)) / 2


def _pairs(x: Tensor, field: Tempered, weights: Tensor | None) -> _Pairs:
    """The terms of E for the beta and B of a field; its mask, bias and value play no part."""
    field.check_size(x)
    query, key = query_and_key(x, field.query_key)
    levels = logits(field.beta * query, key, weights=weights)
    if weights is not None:  # nor may a token of weight 0 set the scale as a query
        levels = levels.masked_fill((weights == 0).unsqueeze(-1), -torch.inf)
    top = levels.detach().amax((-1, -2))
    share = torch.exp(levels - top[..., None, None])
    if weights is None:
        return _Pairs(share / x.shape[-2] ** 2, top)
    shares = weights / weights.sum(-1, keepdim=True)
    return _Pairs(shares.unsqueeze(-1) * share * shares.unsqueeze(-2), top)
