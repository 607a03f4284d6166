"""attention-diffuses: for large beta attention moves a density along the heat equation, backward for V = +I. On a
model, the covariance of attention's increments over contexts is compared with Sigma_A.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.arm_statistics import SILENT, over_prompts
from helmscope.claims.attention_trials import contexts_of, writes_nothing
from helmscope.claims.curves import curve
from helmscope.claims.evidence import PairedDifferences, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import choose_prompts
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.fields.attention import SA
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.observe.context_group import ContextGroup
from helmscope.observe.context_noise import context_group_noise, context_groups
from helmscope.observe.context_statistics import covariance_regression
from helmscope.stats.scales import LinearScale, RemainderScale
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

HARMONICS = 3
LINEAR, REMAINDER = LinearScale(), RemainderScale()
DEGREE = 256  # resolves e^(beta cos) up to beta = 1000


@experiment("attention-diffuses", seconds={"simulation": 1, "model": 60})
@prints_premise
def attention_diffuses(case: TrialCase) -> Finding:
    """In simulation, the sign of the heat limit; on a model, the covariance of increments over contexts."""
    return _simulated(case) if case.subject.is_simulation else _on_model(case)


def _simulated(case: TrialCase) -> Finding:
    """X[rho] = (1 / beta) grad log int e^(beta <x, y>) rho(dy) tends to +(1 / beta) grad log rho for V = +I, so that
    d_t rho = -div(rho X) tends to -(1 / beta) Lap rho, the backward heat equation, and to the forward one for V = -I.

    Random densities on the circle, (1 + a sum_k (p_k cos k t + q_k sin k t)) / 2 pi with a random direction of (p, q);
    the slope is that of beta X on -grad log rho by least squares over the circle. The rate of the entropy, beta dH/dt
    over the Fisher information, has the same limits.
    """
    betas = case.constant("betas")
    grid = CircleGrid(degree=DEGREE)
    densities = random_densities(case, grid, case.count(128, quick=32))
    equations = [[ForwardEquation.of(_attention(beta, sign), grid) for beta in betas] for sign in (1.0, -1.0)]
    table = torch.tensor(
        [
            [[heat_slope(density, each, beta) for each, beta in zip(row, betas, strict=True)] for row in equations]
            for density in densities
        ]
    )
    attracted, repelled = table[:, 0, -1], table[:, 1, -1]
    rates = [[entropy_rate(density, row[-1], betas[-1]) for density in densities] for row in equations]
    means = [
        ", ".join(f"{float(s):.5f} at beta = {beta:g}" for s, beta in zip(row, betas, strict=True))
        for row in table.mean(0)
    ]
    return Finding(
        evidence={"sign of the heat limit": Replicates(attracted, "densities")},
        controls={
            "V = -I": Replicates(repelled, "densities"),
            "size of the heat limit": Replicates(attracted.abs(), "densities"),
        },
        described={
            f"beta dH/dt over the Fisher information, V = {name}": Replicates(rate, "densities")
            for name, rate in zip(("+I", "-I"), rates, strict=True)
        },
        data=curve(
            "slope",
            table.transpose(1, 2),
            {"beta": betas, "V": ("+I", "-I")},
            label="slope of beta X on -grad log rho",
        ),
        remark=f"For V = +I the slope is {means[0]}: attention gathers the law as backward heat does. For V = -I it is "
        f"{means[1]}: forward heat, which spreads the law.",
        setting=f"simulation: densities on the circle with {HARMONICS} random harmonics and a modulation of "
        f"{case.constant('modulation'):g}, the exact field of SA",
    )  # fmt: skip


def random_densities(case: TrialCase, grid: CircleGrid, count: int) -> list[Density]:
    """Densities 1 + a sum_k (p_k cos k t + q_k sin k t), relative to the uniform one, with sum_k |(p_k, q_k)| = 1."""
    sample = case.normal(count, HARMONICS, 2, index=0)
    sample = sample / sample.norm(dim=-1).sum(-1)[:, None, None]
    modes = torch.zeros(count, len(grid.degrees), dtype=torch.float64)
    modes[:, 0] = 1
    modes[:, 1 : 1 + 2 * HARMONICS] = case.constant("modulation") * sample.flatten(1) / math.sqrt(2)
    return [Density(grid, each) for each in modes]


def _attention(beta: float, sign: float) -> SA:
    return SA(beta=beta, value=sign * torch.eye(2, dtype=torch.float64))


def heat_slope(density: Density, equation: ForwardEquation, beta: float) -> float:
    """The least-squares slope of beta X on -grad log rho: 1 for forward heat, -1 for backward heat."""
    velocity, score = equation.velocity(density.modes, 0.0)[:, 0], _score(density)
    return -beta * float((velocity * score).mean() / score.square().mean())


def entropy_rate(density: Density, equation: ForwardEquation, beta: float) -> float:
    """beta dH/dt over E |grad log rho|^2 along the continuity equation, dH/dt = E div X = -E X . grad log rho."""
    velocity, score, rho = equation.velocity(density.modes, 0.0)[:, 0], _score(density), density.values
    return -beta * float((rho * velocity * score).mean() / (rho * score.square()).mean())


def _score(density: Density) -> Tensor:
    """grad log rho at the points of the grid."""
    return density.grid.gradient(density.modes)[:, 0] / density.values


def _on_model(case: TrialCase) -> Finding:
    """Half the covariance over contexts of what attention of layer 0 adds to a word at a position, regressed on Sigma_A
    of the same contexts; the replicates are the groups of the same word at the same position.

    Contexts are the validation windows of the bundled models, or the texts of another subject. Described: R^2 corrected
    for the number of contexts, the diffusivities in modes A, B and C, shares of covariance between heads and keys, the
    distance from normal increments, untrained twins, and the change of the cloud's variance over attention half-steps.
    """
    prompts, _ = choose_prompts(case.count(64, quick=16), case.subject, gap=1)
    missing = case.subject.unmet_premise("kernel", "replay")
    if missing is not None:
        return Finding.impossible(missing)
    recording = case.subject.record(prompts)
    contexts, where = contexts_of(case.subject)
    count = case.count(256, quick=64)
    groups = _groups(case, recording, contexts, where, count)
    if isinstance(groups, Finding):
        return groups
    measured = context_group_noise(groups, seed=case.seed)
    if bool(measured.slope.isnull().all()):
        return Finding.impossible("Sigma_A of layer 0 is 0: all values are the same")
    sampled = np.array([_one_context(case, group, number) for number, group in enumerate(groups)])
    twins = np.stack(
        [
            context_group_noise(context_groups(twin, contexts, groups=count, seed=case.seed)).slope.values
            for twin in case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts[:2])
        ]
    )
    described = _described(measured, sampled, twins)
    described["variance of the cloud after attention over that before"] = over_prompts(_growth(recording))
    data = curve(
        "diffusivity",
        np.stack(
            [measured[name].values for name in ("total_nu_token_sampling", "total_nu_random_values", "nu_context")], -1
        )[:, None],
        {"layer": [0], "mode": ["A: one sampled key", "B: random values", "C: over contexts"]},
        label="diffusivity nu, one value per group",
        log=True,
        over="group",
    )
    return Finding(
        evidence={
            "slope": _over_groups(measured.slope.values),
            "R^2": _over_groups(measured.r_squared.values, REMAINDER),
        },
        controls={
            "one sampled token": _over_groups(sampled[:, 0]),
            "Sigma_A of other groups": _over_groups(_of_others(case, groups), REMAINDER),
            "blocks that write nothing": _silent(recording),
        },
        described=described,
        data=data,
        remark=_remark(measured),
        setting=f"model {case.subject.name}, layer 0, {len(groups)} groups of the same word at the same position with "
        f"{float(measured.context_count.mean()):.0f} contexts on average, from {where}; tangent space of the state, "
        "writes over its length",
    )


def _groups(
    case: TrialCase, recording: Recording, contexts: np.ndarray, where: str, count: int
) -> list[ContextGroup] | Finding:
    """The groups of equal word and position, or that the contexts have none, or too few."""
    try:
        groups = context_groups(recording, contexts, groups=count, seed=case.seed)
    except HelmscopeError as error:
        return Finding.impossible(str(error))
    least = case.constant("least_groups")
    if len(groups) < least:
        return Finding.impossible(
            f"the claim needs {least} groups of the same word at the same position, but {where} have {len(groups)}"
        )
    return groups


def _remark(measured: xr.Dataset) -> str:
    means = {name: float(values.mean()) for name, values in measured.data_vars.items()}
    return (
        f"The diffusivity over contexts is {means['nu_context']:.2g}, that of sampling one key "
        f"{means['total_nu_token_sampling']:.2g} and that of random values {means['total_nu_random_values']:.2g}, with "
        f"{means['effective_keys']:.1f} effective keys; {means['cross_head_share']:.0%} of the covariance is between "
        f"heads and {means['cross_key_share']:.0%} between keys; increments are {means['kolmogorov_distance']:.3f} "
        f"from normal on random directions, normal samples {means['kolmogorov_distance_null']:.3f}."
    )


def _over_groups(values: np.ndarray, scale: LinearScale | RemainderScale = LINEAR) -> Replicates:
    return Replicates(values[np.isfinite(values)], "groups", scale)


def _described(measured: xr.Dataset, sampled: np.ndarray, twins: np.ndarray) -> dict[str, Evidence]:
    """What is reported and not judged: the other quantities of mode C, and untrained twins."""
    described: dict[str, Evidence] = {
        str(measured[name].attrs["long_name"]): _over_groups(measured[name].values)
        for name in measured.data_vars
        if name not in ("slope", "r_squared", "context_count")
    }
    described["R^2 if the increments are single sampled tokens"] = _over_groups(sampled[:, 1], REMAINDER)
    described["slope, untrained twins"] = Replicates(twins.mean(1), "twins")
    described["slope minus that of untrained twins"] = PairedDifferences(
        measured.slope.values - twins.mean(0), "groups"
    )
    return described


def _one_context(case: TrialCase, group: ContextGroup, number: int) -> tuple[float, float]:
    """Slope and R^2 if the increments are values of single tokens of the first context, sampled by its weights, one per
    head and increment; there are as many increments as contexts.
    """
    assert group.first is not None
    rows, values = group.first
    generator = torch.Generator().manual_seed(case.seed_for(1000 + number))
    drawn = torch.multinomial(rows, len(group.outputs), replacement=True, generator=generator)  # (heads, contexts)
    outputs = torch.stack([value[index] for value, index in zip(values, drawn, strict=True)], 1)
    mean = torch.einsum("hn,hns->hs", rows, values)
    deviation = values - mean.unsqueeze(1)
    sampling = group.sigma_sampling((rows.unsqueeze(-1) * deviation).mT @ deviation)
    halves = [group.sigma_of(outputs[k::2]) for k in (0, 1)]
    slope, r_squared, _ = covariance_regression((halves[0], sampling), halves[1])
    return slope, r_squared


def _of_others(case: TrialCase, groups: list[ContextGroup]) -> np.ndarray:
    """The held-out R^2 with the Sigma_A of another group in place of each one's own."""
    order = np.random.default_rng(case.seed_for(999)).permutation(len(groups))
    found = []
    for k, group in enumerate(groups):
        other = groups[order[k] if order[k] != k else (k + 1) % len(groups)]
        halves = [group.sigma_of(group.outputs[half::2]) for half in (0, 1)]
        sampling = other.sigma_sampling(other.covariances.mean(0))
        found.append(covariance_regression((halves[0], sampling), halves[1])[1])
    return np.array(found)


def _silent(recording: Recording) -> Evidence:
    """That increments have no covariance if blocks write nothing."""
    try:
        silent = recording.under(*SILENT.edits(recording))
    except HelmscopeError as error:
        return PremiseImpossible(str(error))
    if not writes_nothing(silent):
        raise HelmscopeError("attention still writes when it is switched off, but then it must not")
    return PremiseImpossible("blocks that write nothing: the increments have no covariance, and there is no slope")


def _growth(recording: Recording) -> np.ndarray:
    """1 - |mean token|^2 after attention over that before, the mean over the layers; one value per prompt."""
    path, depths = recording.trajectory, recording.anatomy.depths
    x = path.states.double()
    weights = torch.ones_like(x[0, ..., 0]) if path.weights is None else path.weights[0].double()
    mean = (weights.unsqueeze(-1) * x).sum(-2) / weights.sum(-1)[:, None]
    variance = 1 - mean.square().sum(-1)
    ratios = variance[1 :: depths.steps] / variance[: -1 : depths.steps][: len(recording.layers)]
    return np.asarray(ratios.mean(0).numpy())
