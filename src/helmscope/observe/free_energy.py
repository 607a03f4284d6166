"""The free energy of the cloud of tokens over every half-step, with nu and U of the block frozen, beside what theory
predicts [Helmholtz Transformer, no. 4 and no. 6].

    F = -nu H - E[U / r],     Delta F = -nu Delta H - E[Delta U] / r  over a half-step of the block.

H is the Gaussian entropy of all tokens of all prompts (``gaussian_entropy``). **What nu and U are.** A block has two
half-steps and one pair (nu, U) for both. U belongs to its MLP: the potential of the exact per-neuron split, in the
coordinates of the unit sphere (norm folded in) with psi(0) = Psi(0) = 0. A direction x of radius r moves by P f / r, so
that its drift is grad_S U / r, plus the swirl over r: U is divided by the radius with which the MLP reads the token. nu
belongs to its attention: the mean over tokens of tr(P Sigma_A P) / t, summed over heads, t the dimension of the tangent
space (``attention_diffusion``): how fast a direction would diffuse if each head drew one key at random instead of
averaging. **For an attention half-step** this means: real attention is deterministic and not a map of one token, so
that it has no noise and no potential of its own. Delta F asks whether the tokens that attention leaves are lower in the
landscape of the MLP that follows it, and more spread out, with entropy weighted by nu.

The prediction. If attention were isotropic diffusion nu and the MLP the flow of its force, then to first order

    MLP         Delta H = E div_S b,     Delta F = -nu E div_S b - E<b, grad_S U> / r,     b = P f / r
    attention   Delta H = nu I,          Delta F = -nu^2 I - nu E[Lap_S U] / r

with I the surface Fisher information of the Gaussian score; for b = grad_S U / r the two add up to
-E|grad_S U|^2 - 2 nu E Lap_S U - nu^2 I. In a simulated flow both act at once, and rates are averaged over the ends of
each step. E div_S b is the rate of the entropy of the law itself; that of its Gaussian entropy is E<b, C^-1 (x - m)>,
which is the same for a normal law only. ``gaussian_predicted_...`` takes it instead, so that what the measured entropy
cannot follow and what the theory of the step gets wrong can be told apart. Attributes ``..._misfit``: root mean square
of predicted minus measured changes over that of measured ones; 1 or more says that the prediction is no better than
"nothing changes".

``free_energy_as_printed`` is nu_t Ent + E[U_t] / r with the nu and U of the block that reads the state. It jumps from
block to block by the additive constants of their potentials, which nothing fixes: only its changes within a block mean
something, and it has the sign of U that the flow does not descend.

How it fails. Changes of H from few tokens are noise: with N tokens in D dimensions keep N well above D.
Cost. One replay of attention, no further forward pass; 3 evaluations of U for each sampled token and layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.fields.field import StateSpace
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.fields.noise import IsotropicNoise
from helmscope.models.recording import Recording
from helmscope.observe.attention_diffusion import AttentionDiffusion
from helmscope.observe.depth_steps import check_finite, sphere_text, token_weights_at, with_halves
from helmscope.observe.entropy import PooledClouds, entropy_unsupported
from helmscope.observe.free_energy_steps import SampledTokens, Step, pseudo_values, step_changes
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_entropy_change import TOKENS, block_unsupported
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.token_choice import spaced_tokens, taken
from helmscope.observe.track import AT_LEAST_0, check_system, with_bounds, with_cumulative, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.solve.layer import Layer
from helmscope.solve.simulation import Simulation
from helmscope.types import Half, HelmscopeError, check_integer, check_progress, type_with_article

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

LABELS = {
    "free_energy_change": "change of the free energy F = -nu H - E[U / r] in a step",
    "entropy_term": "entropy term -nu Delta H of the change of F",
    "potential_term": "potential term -E[Delta U / r] of the change of F",
    "gaussian_entropy_change": "change of the Gaussian entropy in a step (nats)",
    "predicted_free_energy_change": "change of F predicted from nu and U",
    "predicted_entropy_change": "change of entropy predicted from nu and U (nats)",
    "gaussian_predicted_free_energy_change": "change of F predicted from nu and U with the Gaussian entropy",
    "gaussian_predicted_entropy_change": "change of the Gaussian entropy predicted from nu and U (nats)",
    "free_energy": "cumulative free energy F since the first state",
    "predicted_free_energy": "cumulative F predicted from nu and U",
    "gaussian_predicted_free_energy": "cumulative F predicted from nu and U with the Gaussian entropy",
    "gaussian_entropy": "Gaussian entropy (nats)",
    "predicted_entropy": "entropy predicted from nu and U (nats)",
    "gaussian_predicted_entropy": "Gaussian entropy predicted from nu and U (nats)",
    "free_energy_as_printed": "free energy nu Ent + E[U / r] as printed; depends on each layer's constant",
    "nu": "diffusivity nu of attention, mode A (squared radians per layer)",
}

PREDICTIONS = ("predicted", "gaussian_predicted")
MEASURED = {"entropy": "gaussian_entropy", "free_energy": "free_energy"}  # beside what is predicted


@shows_progress("free energy")
def free_energy_along_depth(
    system: System,
    *,
    sampled_tokens: int | None = TOKENS,
    include_first_token: bool = False,
    predict: bool = True,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Delta F = -nu Delta H - E[Delta U] / r of every half-step over (depth, prompt), with nu and U of its block,
    beside the changes of entropy and free energy that nu and U predict.

    Values at depth k belong to the half-step that ends there and are NaN at the first; ``gaussian_entropy``,
    ``free_energy`` (cumulative), their predicted curves and ``free_energy_as_printed`` belong to the state. All values
    are jackknife pseudo-values over prompts, whose mean is the statistic of all tokens (``entropy_along_depth``). Means
    of U and of the drift are over ``sampled_tokens`` of each prompt, evenly spaced (all if None); the entropy is that
    of all tokens, without the first unless ``include_first_token``. NaN where the entropy is undefined (attribute
    ``undefined``). Without ``predict`` predictions are left out.

    A simulation must be a flow on the sphere under an MLP alone, with isotropic noise, whose nu is then that of the
    noise. Raises HelmscopeError, as ``free_energy_unsupported`` says, for other systems and for fewer than two prompts.

    >>> from helmscope import record
    >>> texts = ["Once upon a time there was a cat", "The dog ran home to eat"]
    >>> measured = free_energy_along_depth(record("A", texts), sampled_tokens=2)
    >>> measured.nu.dims, measured.attrs["undefined"][:6]
    (('depth', 'prompt'), 'NaN at')
    """
    count = None if sampled_tokens is None else check_integer("sampled_tokens", sampled_tokens, at_least=1)
    reason = free_energy_unsupported(check_system(system))
    if reason is not None:
        raise HelmscopeError(reason)
    path = sphere_and_ids(system, None)[0]
    path = check_finite(path if include_first_token else without_first_token(path))
    report = check_progress(progress)
    chosen, counts = spaced_tokens(
        token_weights_at(path, 0), count, include_first_token=include_first_token, replicate=path.replicate
    )
    m = taken(token_weights_at(path, 0), chosen) * counts
    nus = _diffusivities(system)
    sampled = SampledTokens(system, path, PooledClouds.of(path), chosen, m, nus, _is_centered(system))
    report(0.3)
    columns, steps = [], list(_steps(system))
    for k, step in enumerate(steps):
        columns.append(step_changes(sampled, step, predict=predict))
        report(0.3 + 0.7 * (k + 1) / (len(steps) + 1))
    measurement = _as_measurement(sampled, columns, steps)
    report(1.0)
    return measurement


def _as_measurement(tokens: SampledTokens, columns: list[dict[str, Tensor]], steps: list[Step]) -> xr.Dataset:
    """Pseudo-values with their curves, as a Measurement."""
    path, system = tokens.path, tokens.system
    undefined = torch.full((1, path.states.shape[1]), torch.nan, dtype=torch.float64, device=tokens.m.device)
    values = {name: torch.cat([undefined, pseudo_values([column[name] for column in columns])]) for name in columns[0]}
    values["gaussian_entropy"] = pseudo_values([tokens.entropy(k) for k in range(len(path.states))])
    values["free_energy"] = _cumulative(values["free_energy_change"])
    kinds = [kind for kind in PREDICTIONS if f"{kind}_entropy_change" in values]
    for kind in kinds:
        values[f"{kind}_entropy"] = values["gaussian_entropy"][0] + _cumulative(values[f"{kind}_entropy_change"])
        values[f"{kind}_free_energy"] = _cumulative(values[f"{kind}_free_energy_change"])
    reading = [*(step.layer for step in steps), steps[-1].layer]
    values["free_energy_as_printed"] = pseudo_values(
        [-tokens.nu(layer) * tokens.entropy(k) + tokens.potential(k, layer) for k, layer in enumerate(reading)]
    )
    measurement = with_bounds(with_replicates(values, path), {"nu": AT_LEAST_0})
    curves = {f"{kind}_{name}" for kind in kinds for name in ("entropy", "free_energy")}
    # the entropy beside those predicted, which are cumulative from its first value
    measurement = with_cumulative(measurement, path.axis, {"gaussian_entropy", "free_energy", *curves})
    for name in values:
        measurement[name].attrs |= label_attributes(LABELS[name])
    misfits = {
        f"{kind}_{name}_misfit": misfit(
            mean_change(values[f"{measured}_change"]), mean_change(values[f"{kind}_{name}_change"])
        )
        for kind in kinds
        for name, measured in MEASURED.items()
    }
    return with_halves(measurement, system).assign_attrs(
        sphere=sphere_text(system),
        radius="recorded radius of each token" if isinstance(system, Recording) else "1",
        coordinates="unit_sphere: the direction after the norm, its gain and bias folded into the weights",
        rank=tokens.common.rank,
        undefined=tokens.common.undefined_text,
        replicates=f"jackknife pseudo-values, one per {path.replicate} left out",
        as_printed="depends on the additive constant of each layer's U",
        **misfits,
    )


def _cumulative(changes: Float[Tensor, "depth prompt"]) -> Tensor:
    """The sum of changes up to each depth, 0 at the first, where there is none."""
    return torch.cat([torch.zeros_like(changes[:1]), changes[1:]]).cumsum(0)


def mean_change(changes: Float[Tensor, "depth prompt"]) -> np.ndarray:
    """The mean over prompts of the changes of all steps.

    >>> mean_change(torch.tensor([[torch.nan, torch.nan], [1.0, 3.0]]))
    array([2.], dtype=float32)
    """
    return changes[1:].mean(-1).cpu().numpy()


def misfit(measured: np.ndarray, predicted: np.ndarray) -> float:
    """The root mean square of predicted minus measured changes over that of the measured ones; NaN where nothing
    changes, or where one is undefined.

    >>> misfit(np.array([3.0, 4.0]), np.array([3.0, 9.0]))
    1.0
    """
    size = float(np.sqrt(np.mean(np.square(measured))))
    return float(np.sqrt(np.mean(np.square(predicted - measured)))) / size if size > 0 else float("nan")


def _steps(system: System) -> Iterator[Step]:
    """The half-steps of a recording, or the steps between the stored times of a flow."""
    if isinstance(system, Recording):
        for layer in system.layers:
            for half in (Half.ATTENTION, Half.MLP):
                before = 2 * layer + (half is Half.MLP) - system.first
                if before >= 0:
                    yield Step(before, layer, 1.0, half is Half.ATTENTION, half is Half.MLP, averaged=False)
        return
    times = system.trajectory.times
    for k in range(len(times) - 1):
        yield Step(k, k, float(times[k + 1] - times[k]), diffuses=True, drifts=True, averaged=True)


def _diffusivities(system: System) -> Float[Tensor, "layer prompt"]:
    """nu of every layer and prompt: that of attention in mode A, or of the noise of a simulation."""
    device = system.trajectory.states.device
    if isinstance(system, Recording):
        measured = system.replay(AttentionDiffusion())["attention_diffusion"].total_nu_token_sampling
        return torch.as_tensor(measured.transpose("layer", "prompt").values, dtype=torch.float64, device=device)
    assert isinstance(system, Simulation)
    noise = system.problem.noise
    nu = noise.nu if isinstance(noise, IsotropicNoise) else 0.0
    return torch.full((len(system.layers), system.trajectory.states.shape[1]), nu, dtype=torch.float64, device=device)


def _is_centered(system: System) -> bool:
    return isinstance(system, Recording) and system.anatomy.centered


def free_energy_unsupported(system: System) -> str | None:
    """Why a system has no free energy of this kind, in one sentence; None if it has one.

    >>> from helmscope import record
    >>> free_energy_unsupported(record("A", ["Once upon a time", "The cat sat"])) is None
    True
    """
    refused = entropy_unsupported(system)
    if refused is not None:
        return refused.replace("entropy_along_depth", "free_energy_along_depth")
    if isinstance(system, Recording):
        if system.anatomy.depths.steps != 2:
            return "system has cross-attention, but free_energy_along_depth needs blocks of attention and an MLP alone"
        return block_unsupported(system, "free_energy_along_depth") or system.unsupported_reason(AttentionDiffusion())
    if not isinstance(system, Simulation) or not isinstance(system.field, MLP | GatedMLP):
        field = type_with_article(getattr(system, "field", system))
        return f"system has {field} as its field, but free_energy_along_depth of a simulation needs an MLP alone"
    if system.field.space is not StateSpace.SPHERE or isinstance(system.problem.stepper, Layer):
        return "system takes layers, but free_energy_along_depth of a simulation needs a flow on the sphere"
    if system.problem.noise is not None and not isinstance(system.problem.noise, IsotropicNoise):
        noise = type_with_article(system.problem.noise)
        return f"system has {noise}, but free_energy_along_depth of a simulation needs IsotropicNoise, or none"
    if len(system.trajectory.times) < 2:
        return "system has one stored time, but free_energy_along_depth of a simulation needs at least 2"
    return None
