"""spectral: mixing collapses the spectrum of the tokens, retrieval loses rank, and transport is an isometry."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import ChosenPrompts, prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.observe.half_step_retention import NAMES as RETENTIONS
from helmscope.observe.half_step_retention import HalfStepRetention, half_step_retention
from helmscope.observe.kernel_spectrum import OPERATORS, KernelSpectrum, head_quantiles, kernel_spectrum
from helmscope.observe.loss_gradient_norms import GradientVersion, loss_gradient_norms
from helmscope.observe.operator_spectrum import operator_spectrum
from helmscope.observe.synthetic_operators import SyntheticOperator, synthetic_operators
from helmscope.observe.weight_spectrum import weight_spectrum
from helmscope.stats.quantiles import quantile_interval
from helmscope.stats.scales import LogScale
from helmscope.theory.operator_spectra import (
    averaging_retention,
    lazy_averaging_condition_number,
    lazy_averaging_retention,
    retrieval_rank_share,
    retrieval_retention,
    softmax_retention,
)
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

LOG = LogScale()
INPUTS = 1_000  # of a control of an identity, the least that decides


@experiment("spectral", seconds={"simulation": 16, "model": 55})
def spectral(case: TrialCase) -> Finding:
    """In simulation stated constructions and their closed forms; on a model the spectra of A and I + A, described."""
    return _simulated(case) if case.subject.is_simulation else _on_model(case)


def _simulated(case: TrialCase) -> Finding:
    """Averaging, lazy averaging, rotations and permutations at every size have closed forms, within rounding. Softmax
    of normal values and random one-hot rows have limits for large T, tried at the largest; seeds are the replicates.
    """
    sizes, steps = case.constant("sizes"), case.constant("applications")
    seeds = case.count(case.constant("seeds"), quick=case.constant("seeds_quick"))
    random = (SyntheticOperator.MIXING, SyntheticOperator.RETRIEVAL)
    draws = seeds, case.count(case.constant("retrieval_seeds"), quick=case.constant("retrieval_seeds_quick"))
    seed, largest = case.seed_for(0) % 2**31, max(sizes)
    mixing, retrieval = (
        synthetic_operators(
            tokens=[largest], applications=[1], operators=[each], seeds=count, seed=seed, progress=False
        ).squeeze(("operator", "tokens", "applications"))
        for each, count in zip(random, draws, strict=True)
    )
    powers = synthetic_operators(
        tokens=[min(sizes)], applications=steps, operators=random, seeds=seeds, seed=seed, progress=False
    ).squeeze("tokens")
    return Finding(
        evidence={
            "closed forms": IdentityErrors(_errors_of_closed_forms(case), "error"),
            "mixing": Replicates(mixing.nuclear_retention.values / softmax_retention(largest), "seeds", LOG),
            "rank of retrieval": Replicates(retrieval.rank_share.values / retrieval_rank_share(), "seeds", LOG),
            "rho of retrieval": Replicates(retrieval.nuclear_retention.values / retrieval_retention(), "seeds", LOG),
        },
        controls={
            "diag(1.5, 0.5)": IdentityErrors(_errors_of_isometry(_stretched(case)), "error"),
            "averaging taken for transport": IdentityErrors(_errors_of_isometry(_averaging(INPUTS)), "error"),
        },
        data=curve(
            "rho",
            powers.nuclear_retention.transpose("seed", "applications", "operator").values,
            {"applications": steps, "operator": powers.operator.values.tolist()},
            label=f"nuclear norm kept by k applications to X = I, T = {min(sizes)}",
            log=True,
            over="seed",
        ),
        remark=_simulated_remark(case, mixing, powers),
        setting=f"simulation: X = I, T = {largest} for random operators and 2 to {case.constant('largest_identity')} "
        f"for the others, k = {steps[0]} to {steps[-1]} applications, {draws[0]} seeds of mixing and {draws[1]} of "
        "retrieval",
    )


def _errors_of_closed_forms(case: TrialCase) -> np.ndarray:
    """The relative error of rho and the absolute error of 1/kappa, the larger of the two, of every operator and k."""
    steps, errors = list(case.constant("applications")), []
    for tokens in range(2, case.constant("largest_identity") + 1):
        average = torch.full((tokens, tokens), 1 / tokens, dtype=torch.float64)
        one = torch.eye(tokens, dtype=torch.float64)
        expected = {"averaging": (average, [(averaging_retention(tokens), 0.0)] * len(steps))}
        for lazy in case.constant("laziness"):
            pairs = [
                (
                    lazy_averaging_retention(tokens, lazy, applications=k),
                    1 / lazy_averaging_condition_number(lazy, applications=k),
                )
                for k in steps
            ]
            expected[f"lazy {lazy}"] = (1 - lazy) * one + lazy * average, pairs
        for each in (SyntheticOperator.ROTATION, SyntheticOperator.PERMUTATION):
            expected[each.value] = each.draw(tokens, seed=case.seed), [(1.0, 1.0)] * len(steps)
        spectrum = operator_spectrum(torch.stack([a for a, _ in expected.values()]), applications=steps)
        closed = torch.tensor([pairs for _, pairs in expected.values()], dtype=torch.float64)
        rho, inverse = closed.unbind(-1)
        relative = (spectrum["nuclear_retention"] / rho - 1).abs()
        errors.append(torch.maximum(relative, (spectrum["inverse_condition_number"] - inverse).abs()).flatten())
    return np.asarray(torch.cat(errors).numpy())


def _errors_of_isometry(operators: Tensor) -> np.ndarray:
    """The larger of |rho - 1| and |1/kappa - 1|."""
    spectrum = operator_spectrum(operators)
    off = [(spectrum[name] - 1).abs() for name in ("nuclear_retention", "inverse_condition_number")]
    return np.asarray(torch.maximum(*off).flatten().numpy())


def _stretched(case: TrialCase) -> Tensor:
    """diag(1.5, 0.5) between random rotations."""
    left, right = (torch.linalg.qr(each).Q for each in case.normal(2, INPUTS, 2, 2, index=1))
    stretched: Tensor = left @ torch.diag(torch.tensor([1.5, 0.5], dtype=torch.float64)) @ right
    return stretched


def _averaging(count: int) -> Tensor:
    return torch.full((2, 2), 0.5, dtype=torch.float64).expand(count, 2, 2)


def _simulated_remark(case: TrialCase, mixing: xr.Dataset, powers: xr.Dataset) -> str:
    median = quantile_interval(mixing.log_condition_number.values, 0.5)
    rho = powers.nuclear_retention.mean("seed").values
    return (
        f"Mixing has a rho of {float(mixing.nuclear_retention.mean()):.4f} at the largest T, with a median of log "
        f"kappa of {median.estimate:.2f} [{median.low:.2f}, {median.high:.2f}]. After "
        f"{case.constant('applications')[-1]} applications at the smallest T the rho of mixing is {rho[0, -1]:.4f}, "
        f"that of retrieval {rho[1, -1]:.3f}."
    )


def _on_model(case: TrialCase) -> Finding:
    """Quantiles over heads of rho and log kappa of A and I + A, with X = I; one value per prompt.

    Described too: what half-steps keep of the nuclear norm of the tokens, gradient norms with and without residual
    connections and norms, the stable ranks of the linear layers, and untrained twins.
    """
    prompts = prompts_or_finding(case, "kernel", "replay", length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    instruments = KernelSpectrum(), HalfStepRetention()
    measured, kept = (recording.replay(*instruments)[each.name] for each in instruments)
    quantiles = head_quantiles(measured, levels=case.constant("quantiles"))
    silent = half_step_retention(silenced(recording), progress=False)
    medians = {operator: _of_kernel(quantiles, operator, 0.5) for operator in quantiles.operator.values}
    described = _quantiles(case, quantiles) | _twins(case, prompts) | _gradients(case, prompts) | _weights(recording)
    for name, label in RETENTIONS.items():
        described[f"{label}, mean over layers"] = Replicates(kept[name].mean("layer").values, "prompts", LOG)
    alone, joined = (medians[operator] for operator in OPERATORS)
    singular = measured.numerically_singular
    return Finding(
        undecided_because=prompts.alike,
        evidence={"attention of a model": Replicates(alone["nuclear_retention"], "prompts", LOG)},
        controls={
            "blocks that write nothing": Replicates(
                np.stack([silent[name].mean("layer").values for name in RETENTIONS]).mean(0), "prompts"
            )
        },
        described=described,
        data=curve(
            "log_condition_number",
            quantiles.log_condition_number.transpose("prompt", "quantile", "operator").values,
            {"quantile": quantiles["quantile"].values.tolist(), "operator": quantiles.operator.values.tolist()},
            label="log of the condition number, quantile over heads",
            over="prompt",
        ),
        remark=(
            f"The median head keeps {alone['nuclear_retention'].mean():.3f} of the nuclear norm, and with the "
            f"residual connection {joined['nuclear_retention'].mean():.3f}; the median log kappa is "
            f"{alone['log_condition_number'].mean():.2f} and {joined['log_condition_number'].mean():.2f}. Of the "
            f"kernels {float(singular.sel(operator='kernel').mean()):.1%} are singular up to rounding, of I + A "
            f"{float(singular.sel(operator='identity + kernel').mean()):.1%}."
        ),
        setting=f"X = I, {prompts.setting}, {case.constant('tokens')} tokens each; the condition shows the median of "
        "rho of A over heads",
    )


def _of_kernel(quantiles: xr.Dataset, operator: str, level: float) -> dict[str, np.ndarray]:
    """rho and log kappa at a quantile over heads, by prompt."""
    chosen = quantiles.sel(operator=operator, quantile=level)
    return {name: np.asarray(chosen[name].values) for name in ("nuclear_retention", "log_condition_number")}


def _quantiles(case: TrialCase, quantiles: xr.Dataset) -> dict[str, Evidence]:
    rows: dict[str, Evidence] = {}
    for operator, level in product(quantiles.operator.values, case.constant("quantiles")):
        values = _of_kernel(quantiles, operator, level)
        rows[f"rho of {operator}, quantile {level:g} over heads"] = Replicates(
            values["nuclear_retention"], "prompts", LOG
        )
        rows[f"log kappa of {operator}, quantile {level:g} over heads"] = Replicates(
            values["log_condition_number"], "prompts"
        )
    return rows


def _twins(case: TrialCase, prompts: ChosenPrompts) -> dict[str, Evidence]:
    """The medians over heads of untrained twins, one value per twin."""
    count = case.constant("twin_prompts_quick" if case.quick else "twin_prompts")
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts.texts[:count])
    found = [head_quantiles(kernel_spectrum(twin, progress=False), levels=[0.5]).mean("prompt") for twin in twins]
    rows: dict[str, Evidence] = {}
    for operator, name in product(OPERATORS, ("nuclear_retention", "log_condition_number")):
        values = np.array([float(each[name].sel(operator=operator, quantile=0.5)) for each in found])
        label = "rho" if name == "nuclear_retention" else "log kappa"
        rows[f"{label} of {operator}, median over heads, untrained twins"] = Replicates(values, "twins")
    return rows


def _gradients(case: TrialCase, prompts: ChosenPrompts) -> dict[str, Evidence]:
    """The change of the log gradient norm from the last block back to the first, per block, in each version."""
    count = case.constant("gradient_prompts_quick" if case.quick else "gradient_prompts")
    recording: Recording = case.subject.record(prompts.texts[:count])
    rows: dict[str, Evidence] = {}
    for version in GradientVersion:
        try:
            found = loss_gradient_norms(recording, versions=[version], progress=False).log_loss_gradient_rms.squeeze(
                "version"
            )
        except HelmscopeError:  # no next-token loss, or residual connections or norms that cannot be changed
            continue
        slope = (found.isel(depth=0) - found.isel(depth=-1)) / (found.sizes["depth"] - 1)
        rows[f"growth of the log gradient norm per block toward the input, {version.value}"] = Replicates(
            slope.values, "prompts"
        )
    return rows


def _weights(recording: Recording) -> dict[str, Evidence]:
    """The stable rank of each kind of linear layer over that of normal matrices, one value per layer."""
    try:
        found = weight_spectrum(recording, progress=False)
    except HelmscopeError:  # a family whose matrices cannot be read
        return {}
    ratio = found.stable_rank / found.stable_rank_null
    return {
        f"stable rank of {name} over that of a normal matrix": Replicates(ratio.sel(matrix=name).values, "layers", LOG)
        for name in found["matrix"].values
    }
