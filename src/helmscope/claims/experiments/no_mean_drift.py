"""no-mean-drift: attention with a nearly doubly stochastic kernel moves tokens without mean drift."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.claims.arm_statistics import over_prompts
from helmscope.claims.attention_trials import AttentionTrial, RatioOfKernel, by_prompt, every_layer, layer_means
from helmscope.claims.curves import curve
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.observe.attention_drift import AttentionDrift
from helmscope.observe.bistochasticity import Bistochasticity, balanced_kernel
from helmscope.observe.kernel import KernelStatistics

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

BALANCED_PROMPTS = 8  # balancing takes a linear system for every head, layer and prompt


@experiment("no-mean-drift", seconds={"model": 40})
@prints_premise
def no_mean_drift(case: TrialCase) -> Finding:
    """|T m| / sqrt(tr T Sigma_A T) of the whole write of attention, the mean over the tokens, at every layer.

    Described: the column sums, the divergence from the Sinkhorn-balanced kernel of the same logits, and the ratio with
    that kernel in place of the model's, on a few prompts. The control replaces the weights by the uniform kernel, which
    is doubly stochastic. A causal kernel is never doubly stochastic unless it is the identity: there the column sums
    are shown beside those of the causal-uniform kernel.
    """
    trial = AttentionTrial.of(case)
    if trial.without_ruling is not None:
        return trial.without_ruling
    if trial.causal:
        return _causal(case, trial)
    drift, statistics = AttentionDrift(), KernelStatistics()
    uniform = RatioOfKernel("uniform", _uniform)
    measured = trial.recording.replay(drift, statistics, uniform)
    few = case.subject.record(trial.prompts[: case.count(2 * BALANCED_PROMPTS, quick=BALANCED_PROMPTS)])
    tol = case.constant("sinkhorn_tolerance")
    balance = Bistochasticity(tol=tol)
    balanced = RatioOfKernel("balanced", lambda p, visible: balanced_kernel(p, visible=visible, tol=tol))
    described = few.replay(balance, balanced)
    ratio = measured[drift.name].total_drift_ratio
    columns = measured[statistics.name].column_sum_deviation_rms.mean("head")
    divergence = described[balance.name].balance_kl.mean("head")

    def silent(recording: Recording) -> Evidence:
        return every_layer(recording.replay(drift)[drift.name].total_drift_ratio)

    return Finding(
        undecided_because=trial.chosen.alike,
        evidence={
            "drift ratio": every_layer(ratio),
            "column sums": over_prompts(columns.mean("layer").values),
            "divergence from the balanced kernel": over_prompts(divergence.mean("layer").values),
            "drift ratio of the balanced kernel": over_prompts(described["balanced"].ratio.mean("layer").values),
        },
        controls={
            "uniform kernel": every_layer(measured["uniform"].ratio),
            "blocks that write nothing": trial.silent_evidence(silent, "drift and Sigma are 0 and have no ratio"),
        },
        data=curve(
            "drift_ratio",
            by_prompt(ratio),
            {"layer": ratio.layer.values.tolist()},
            label="mean drift over the square root of tr Sigma_A",
            over="prompt",
        ),
        remark=f"The ratio runs {layer_means(ratio)}, with the balanced kernel "
        f"{layer_means(described['balanced'].ratio)} and with the uniform one "
        f"{layer_means(measured['uniform'].ratio)}. The root mean square deviation of the column sums "
        f"from 1 runs {layer_means(columns)}, the divergence from the balanced kernel {layer_means(divergence)} "
        f"nats.",
        setting=f"{trial.setting}; the balanced kernel on {len(few.batch)} of them",
    )  # fmt: skip


def _uniform(weights: Tensor, visible: Tensor | None) -> Tensor:
    """The kernel with equal weights on all visible tokens."""
    mask = torch.ones_like(weights) if visible is None else visible.unsqueeze(-2).expand(weights.shape).to(weights)
    return mask / mask.sum(-1, keepdim=True)


def _causal(case: TrialCase, trial: AttentionTrial) -> Finding:
    """Why a causal model has no such kernel, with its column sums beside those of the causal-uniform kernel."""
    statistics, balance, drift = KernelStatistics(), Bistochasticity(), AttentionDrift()
    measured = trial.recording.replay(statistics, balance, drift)
    columns: xr.DataArray = measured[statistics.name].column_sum_deviation_rms.mean("head")
    reference = measured[balance.name].column_sum_deviation_causal_uniform.mean("layer")
    return Finding.impossible(
        f"the attention of {case.subject.name} is causal, and the only causal kernel that is doubly stochastic is the "
        f"identity (column sums are off by {float(columns.mean()):.3g}, root mean square, those of the causal-uniform "
        f"kernel by {float(reference.mean()):.3g})",
        setting=trial.setting,
        described={
            "column sums": over_prompts(columns.mean("layer").values),
            "column sums of the causal-uniform kernel": over_prompts(reference.values),
            "drift ratio, the mean over the layers": over_prompts(
                measured[drift.name].total_drift_ratio.mean("layer").values
            ),
        },
    )
