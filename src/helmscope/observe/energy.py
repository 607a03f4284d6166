"""The interaction energy of [Geshkovski et al. 2023] and its rate along a field.

    E(x) = 1/(2 beta M^2) sum_ij m_i m_j e^{beta x_i^T B x_j},     M = sum_i m_i

with m = 1 and B = I by default: the energy of the empirical measure. SA and USA with V = B symmetric increase it, with
V = -B they decrease it; for unrelated B and V it is not monotone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.fields.attention import SA, USA
from helmscope.fields.lowrank import LowRank, as_dense, query_and_key
from helmscope.fields.parameters import number_or_tensor, over_tokens
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.fields.weights import check_weights
from helmscope.kernels.choose import token_sum
from helmscope.kernels.dense import matrix_product
from helmscope.kernels.request import Request
from helmscope.observe.observable import in_parts, observable
from helmscope.observe.track import counted_tokens, token_weights
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_real

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption


FieldWithBeta = SA | USA | SinkhornAttention


class _ScaledSum(NamedTuple):
    """sum_ij m_i m_j e^{l_ij} / M^2 = e^{log_scale} mantissa."""

    mantissa: Float[Tensor, "*batch"]
    log_scale: Float[Tensor, "*batch"]


@observable
def interaction_energy(
    x: Float[Tensor, "*batch n d"],
    *,
    beta: float | Float[Tensor, "*batch"],
    query_key: Float[Tensor, "d d"] | LowRank | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Interaction energy E_beta of each cloud, with the factor 1/n^2, beta > 0.

    On the sphere it is between ``min_energy`` and ``max_energy``. Infinite where e^beta overflows the dtype: use
    ``log_interaction_energy`` there. Raises HelmscopeError for beta <= 0 and for x that is not on the sphere.

    >>> interaction_energy(torch.eye(2), beta=1.0)  # (e + 1) / 4
    tensor(0.9296)
    """
    beta = number_or_tensor("beta", beta, above=0)
    x = counted_tokens(x, weights)
    scaled = _scaled_sum(x, SA(beta, query_key=query_key), check_weights(x, weights))
    return torch.exp(scaled.log_scale) * scaled.mantissa / (2 * beta)


@observable
def log_interaction_energy(
    x: Float[Tensor, "*batch n d"],
    *,
    beta: float | Float[Tensor, "*batch"],
    query_key: Float[Tensor, "d d"] | LowRank | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Logarithm of the interaction energy E_beta of each cloud, finite for every beta > 0.

    >>> log_interaction_energy(torch.eye(2), beta=1000.0)  # log (e^1000 / 4000)
    tensor(991.7059)
    """
    beta = number_or_tensor("beta", beta, above=0)
    x = counted_tokens(x, weights)
    scaled = _scaled_sum(x, SA(beta, query_key=query_key), check_weights(x, weights))
    return scaled.log_scale + torch.log(scaled.mantissa / (2 * beta))


@observable
def interaction_energy_sum(
    x: Float[Tensor, "*batch n d"], *, beta: float, weights: Float[Tensor, "*batch n"] | None = None
) -> Float[Tensor, "*batch"]:
    """Interaction energy without the factor 1/M^2: E_sum = 1/(2 beta) sum_ij m_i m_j e^{beta <x_i, x_j>} = M^2 E.

    >>> interaction_energy_sum(torch.eye(2), beta=1.0)  # e + 1
    tensor(3.7183)
    """
    x = counted_tokens(x, weights)
    m = token_weights(x, weights)
    return m.sum(-1).square() * interaction_energy(x, beta=beta, weights=weights)


@observable
@shows_progress("Gaussian energy")
def gaussian_energy_as_printed(
    x: Float[Tensor, "*batch n d"],
    *,
    beta: float,
    weights: Float[Tensor, "*batch n"] | None = None,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """Gaussian energy F = 1/2 sum_ij m_i m_j e^{-(beta/2) |x_i - x_j|^2}, which the [Mean-field notes] print as a
    *repulsive* energy.

    On the unit sphere F = beta e^{-beta} E_sum, so the flow with V = +I increases it: it is attractive. The repulsive
    flow has V = -I. ``progress`` is called with the share of the clouds done.

    >>> gaussian_energy_as_printed(torch.eye(2), beta=1.0)  # 1 + e^-1
    tensor(1.3679)
    """
    beta = check_real("beta", beta, at_least=0)
    x = counted_tokens(x, weights)

    def energy(x: Tensor, m: Tensor) -> Tensor:
        distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        pairs = m.unsqueeze(-1) * m.unsqueeze(-2)
        return (pairs * torch.exp(-(beta / 2) * distance**2)).sum((-1, -2)) / 2

    return in_parts(energy, x, token_weights(x, weights), progress)


@observable
@shows_progress("rate of the energy")
def interaction_energy_rate(
    x: Float[Tensor, "*batch n d"],
    field: FieldWithBeta,
    *,
    weights: Float[Tensor, "*batch n"] | None = None,
    progress: ProgressOption = None,
) -> Float[Tensor, "*batch"]:
    """Rate dE/dt of the interaction energy along an attention field, with the beta and B of the field:

        dE/dt = 1/(2 M^2) sum_ij m_i m_j e^{beta x_i^T B x_j} (x_i'^T B x_j + x_i^T B x_j').

    For V = B = I it equals (1/n) sum_i (Z_i / n) |x_i'|^2 under SA and (1/n) sum_i |x_i'|^2 under USA; for V = -I, the
    negative of these. Mask and bias of the field affect only the velocities, not E. Not finite where e^beta overflows
    the dtype. Raises HelmscopeError unless ``field`` is SA, USA or SinkhornAttention. ``progress`` is called with the
    share of the work done.

    >>> from helmscope.fields.attention import USA
    >>> interaction_energy_rate(torch.eye(2), USA(beta=1.0))
    tensor(0.2500)
    """
    if not isinstance(field, FieldWithBeta):
        raise HelmscopeError(
            f"field is {type(field).__name__}, but it must be an attention field with a beta: SA, USA or "
            "SinkhornAttention"
        )
    number_or_tensor("beta", field.beta, above=0)
    x = counted_tokens(x, weights)
    combined = check_weights(x, weights)
    field.check_size(x)
    velocity = field.velocity(x, weights=combined)
    b = as_dense(field.query_key, x)
    query, key = query_and_key(x, field.query_key)
    query = over_tokens(field.beta, x) * query
    shares = _relative_weights(x, combined)
    beta = field.unit_beta
    report = check_progress(progress)
    along = token_sum(Request(query, key, x, weights=combined, beta=beta))  # sum_j m_j e^{l_ij} x_j
    report(0.5)
    back = along if beta is not None else token_sum(Request(key, query, x, weights=combined))  # sum_i m_i e^{l_ij} x_i
    rates = (
        matrix_product(velocity, b) * (torch.exp(along.shift) * along.total)
        + matrix_product(velocity, b.mT) * (torch.exp(back.shift) * back.total)
    ).sum(-1)
    report(1.0)
    return (shares * rates).sum(-1) / (2 * (x.shape[-2] if combined is None else combined.sum(-1)))


def _relative_weights(x: Tensor, weights: Tensor | None) -> Tensor:
    """m_i / M."""
    return torch.full_like(x[..., 0], 1 / x.shape[-2]) if weights is None else weights / weights.sum(-1, keepdim=True)


def _scaled_sum(x: Tensor, field: FieldWithBeta, weights: Tensor | None) -> _ScaledSum:
    """The sum in E for the beta and B of a field; its mask, bias and value are not used."""
    field.check_size(x)
    query, key = query_and_key(x, field.query_key)
    sums = token_sum(
        Request(
            over_tokens(field.beta, x) * query,
            key,
            x,
            weights=weights,
            beta=field.unit_beta,
        )
    )
    shares = _relative_weights(x, weights)
    # tokens of weight 0 must not determine the scale
    log_scales = torch.where(shares > 0, sums.mass_shift.squeeze(-1), -torch.inf)
    largest = log_scales.amax(-1, keepdim=True)
    mass = sums.mass.squeeze(-1) * torch.exp(log_scales - largest)
    mantissa = (shares * mass).sum(-1) / (x.shape[-2] if weights is None else weights.sum(-1))
    return _ScaledSum(mantissa, largest.squeeze(-1))
