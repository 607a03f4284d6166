"""What a half-step does to entropy and potential, measured and predicted, for all prompts and without each of them.

Statistics are vectors (1 + prompt,): the first entry is that of all tokens, the others those without one prompt, from
which ``pseudo_values`` makes replicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import retract
from helmscope.models.recording import Recording
from helmscope.observe.entropy import surface_fisher_information
from helmscope.observe.mlp_drift_terms import MlpDriftTerms, mlp_drift_terms
from helmscope.observe.token_choice import taken
from helmscope.observe.track import token_mean
from helmscope.stats import replicates

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.observe.entropy import PooledClouds
    from helmscope.types import System, Trajectory


class Step(NamedTuple):
    """A step between the depths number ``before`` and ``before`` + 1 under the mechanism of a layer, over a time, in
    which diffusion acts, or the drift, or both. ``averaged``: rates are those of both ends, of a flow.

    >>> Step(0, 0, 1.0, diffuses=True, drifts=False, averaged=False).layer
    0
    """

    before: int
    layer: int
    time: float
    diffuses: bool
    drifts: bool
    averaged: bool


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Tokens ``chosen`` of each prompt with weights ``m``, in the cloud ``common`` of all tokens, with the
    diffusivities ``nus`` of every layer and prompt; ``centered``: norms remove the mean over coordinates.
    """

    system: System
    path: Trajectory
    common: PooledClouds
    chosen: Tensor
    m: Tensor
    nus: Tensor
    centered: bool

    def pooled(self, means: Float[Tensor, "prompt ..."]) -> Float[Tensor, "one_and_prompts ..."]:
        """The mean over all tokens, and without each prompt, given those of each prompt."""
        mass = self.common.moments[0].mass.reshape(-1, *(1,) * (means.ndim - 1))
        total = (mass * means).sum(0, keepdim=True)
        return torch.cat([total / mass.sum(), (total - mass * means) / (mass.sum() - mass)])

    def mean(self, values: Float[Tensor, "prompt k"]) -> Float[Tensor, " one_and_prompts"]:
        """The mean over all sampled tokens, and without each prompt."""
        return self.pooled(token_mean(values, self.m))

    def x(self, k: int) -> Float[Tensor, "prompt k d"]:
        """The directions of the sampled tokens at the depth number k."""
        return retract(taken(self.path.states[k], self.chosen).double())

    def radius(self, layer: int) -> Float[Tensor, "prompt k"]:
        """The radii with which the MLP of a layer reads the tokens; 1 in a simulation on the sphere."""
        if not isinstance(self.system, Recording) or self.path.radius is None:
            return torch.ones_like(self.m)
        step = max(0, 2 * layer + 1 - self.system.first)
        return taken(self.path.radius[step], self.chosen).double()

    def force(self, layer: int) -> MLP | GatedMLP:
        """The MLP of a layer on unit vectors."""
        force = self.system.force(layer=layer)
        assert isinstance(force, MLP | GatedMLP)
        return force

    def potential(self, k: int, layer: int) -> Float[Tensor, " one_and_prompts"]:
        """E[U / r] at the depth number k, with U and r of a layer."""
        split = helmholtz(self.force(layer))
        return self.mean(split.potential(self.x(k)) / self.radius(layer))

    def terms(self, k: int, layer: int) -> MlpDriftTerms:
        """The means of divergence, work and Laplacian at the depth number k."""
        found = mlp_drift_terms(self.force(layer), self.x(k), self.radius(layer), centered=self.centered)
        return MlpDriftTerms(*(self.mean(each) for each in (found.divergence, found.work, found.laplacian)))

    @full_precision
    def score_drift(self, k: int, layer: int) -> Float[Tensor, " one_and_prompts"]:
        """E<b, C^-1 (x - m)>, b = P f / r: the first-order change (1/2) tr(C^-1 dC) of the Gaussian entropy along the
        drift, at the depth number k. For a normal law it is E div b.
        """
        x, r = self.x(k), self.radius(layer).unsqueeze(-1)
        f = self.force(layer).ambient(x)
        b = ((f - (x * f).sum(-1, keepdim=True) * x) / r) @ self.common.basis
        weight = (self.m / self.m.sum(-1, keepdim=True)).unsqueeze(-1)
        moments = self.common.moments[k]
        moved = x @ self.common.basis - moments.center
        products = self.pooled((weight * moved).mT @ b)
        drift = self.pooled((weight * b).sum(-2))
        mean = torch.cat([each.mean.reshape(-1, b.shape[-1]) for each in (moments.whole, moments.without_one)])
        covariance = products - (mean - moments.center).unsqueeze(-1) * drift.unsqueeze(-2)
        inverse = lu.inv(torch.cat([moments.whole.covariance[None], moments.without_one.covariance]))
        found: Tensor = (inverse * covariance.mT).sum((-2, -1))
        return found

    def entropy(self, k: int) -> Float[Tensor, " one_and_prompts"]:
        """The Gaussian entropy at the depth number k; NaN where it is undefined."""
        if k in self.common.undefined:
            return self.undefined
        moments = self.common.moments[k]
        return torch.cat([moments.whole.gaussian_entropy[None], moments.without_one.gaussian_entropy])

    def information(self, k: int) -> Float[Tensor, " one_and_prompts"]:
        """The surface Fisher information at the depth number k; NaN where it is undefined."""
        if k in self.common.undefined:
            return self.undefined
        both = self.common.moments[k].whole, self.common.moments[k].without_one
        return torch.cat([surface_fisher_information(each).reshape(-1) for each in both])

    def nu(self, layer: int) -> Float[Tensor, " one_and_prompts"]:
        """The diffusivity of a layer."""
        return self.pooled(self.nus[layer - self.system.layers[0]])

    @cached_property
    def undefined(self) -> Float[Tensor, " one_and_prompts"]:
        """NaN."""
        return torch.full((len(self.m) + 1,), torch.nan, dtype=torch.float64, device=self.m.device)


def _rates(tokens: SampledTokens, k: int, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """The rates of H, of the Gaussian entropy and of E[U / r] at the depth number k under the mechanism of a step."""
    nu, terms = tokens.nu(step.layer), tokens.terms(k, step.layer)
    entropy = gaussian = potential = torch.zeros_like(nu)
    if step.drifts:
        gaussian = tokens.undefined if k in tokens.common.undefined else tokens.score_drift(k, step.layer)
        entropy, potential = terms.divergence, terms.work
    if step.diffuses:
        spread = nu * tokens.information(k)
        entropy, gaussian, potential = entropy + spread, gaussian + spread, potential + nu * terms.laplacian
    return entropy, gaussian, potential


def step_changes(
    tokens: SampledTokens, step: Step, *, predict: bool = True
) -> dict[str, Float[Tensor, " one_and_prompts"]]:
    """What a step does to entropy and free energy, measured and, if ``predict``, predicted; see ``free_energy``."""
    k, nu = step.before, tokens.nu(step.layer)
    entropy = tokens.entropy(k + 1) - tokens.entropy(k)
    potential = tokens.potential(k + 1, step.layer) - tokens.potential(k, step.layer)
    measured = {
        "free_energy_change": -nu * entropy - potential,
        "entropy_term": -nu * entropy,
        "potential_term": -potential,
        "gaussian_entropy_change": entropy,
        "nu": nu,
    }
    if not predict:
        return measured
    ends = [_rates(tokens, end, step) for end in ((k, k + 1) if step.averaged else (k,))]
    grown, gaussian, lifted = (step.time * torch.stack(each).mean(0) for each in zip(*ends, strict=True))
    return measured | {
        "predicted_free_energy_change": -nu * grown - lifted,
        "predicted_entropy_change": grown,
        "gaussian_predicted_free_energy_change": -nu * gaussian - lifted,
        "gaussian_predicted_entropy_change": gaussian,
    }


def pseudo_values(statistics: list[Float[Tensor, " one_and_prompts"]]) -> Float[Tensor, "step prompt"]:
    """The jackknife pseudo-values of statistics.

    >>> pseudo_values([torch.tensor([2.0, 3.0, 1.0])])  # the mean of 1 and 3, without 1, without 3
    tensor([[1., 3.]])
    """
    stacked = torch.stack(statistics)
    return replicates.pseudo_values(stacked[:, :1], stacked[:, 1:], stacked.shape[1] - 1)
