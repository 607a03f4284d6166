"""mlp-projects: the MLP projects tokens back onto the token cloud that attention has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PairedDifferences, PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.mlp_shares import WrittenByMlp, half_steps
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.observe.cloud_projection import cloud_projection, cloud_unsupported
from helmscope.stats.scales import LogScale

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

LOG = LogScale()
NO_GROWTH = "the MLPs write nothing, so that no perturbation grows or shrinks and no half-step has a defect"


@experiment("mlp-projects", seconds={"model": 100})
def mlp_projects(case: TrialCase) -> Finding:
    """The growth of small perturbations of the direction of a token off the local token cloud over that of
    perturbations along it, over the MLP half-steps, their geometric mean; one value per prompt. The defect of
    idempotence is described, and tested at every half-step as the source prints it.
    """
    prompts = prompts_or_finding(case, "trajectory", "force", mlp=True, length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    refused = cloud_unsupported(recording)
    if refused is not None:
        return Finding.impossible(refused)
    if not _writes(recording):
        return Finding.impossible(NO_GROWTH)
    measured = _measured(recording, case)
    ratio, random = (_over_layers(measured[name]) for name in ("growth_ratio", "growth_ratio_null"))
    planted = _over_layers(_measured(recording, case, planted_share=case.constant("planted_share")).growth_ratio)
    defect = measured.idempotence_defect.transpose("layer", "prompt").values
    contrast = TwinContrast(ratio, _twins(case, prompts.texts[: _twin_prompts(case)]))
    return Finding(
        evidence={
            "growth ratio": _evidence(ratio),
            "idempotence defect": Replicates(defect.mean(0), "prompts"),
        },
        controls={
            "blocks that write nothing": _silent(silenced(recording), case),
            "planted projection": _evidence(planted),
            "random directions": _evidence(random),
        },
        described=contrast.described("growth ratio")
        | {
            "log of the growth ratio": PairedDifferences(np.log(ratio), "prompts"),
            "growth off the cloud": _evidence(_over_layers(measured.growth_off)),
            "growth along the cloud": _evidence(_over_layers(measured.growth_along)),
        },
        printed=ReplicatesInEveryCase(list(defect), "prompts", half_steps(list(recording.layers))),
        data=_curves(measured),
        remark=_remark(measured, contrast),
        setting=f"{prompts.setting}, {measured.attrs['tokens']} of the {case.constant('tokens')} tokens of each; "
        f"{measured.attrs['principal_axes']} axes of the {measured.attrs['neighbors']} nearest tokens of other "
        f"prompts; twins on {contrast.twins.shape[1]} of the prompts",
        undecided_because=prompts.alike,
    )


def _measured(recording: Recording, case: TrialCase, *, planted_share: float | None = None) -> xr.Dataset:
    return cloud_projection(
        recording,
        neighbors=case.constant("neighbors"),
        principal_axes=case.constant("tangent_dims"),
        sampled_tokens=case.count(case.constant("samples"), quick=case.constant("samples_quick")),
        planted_share=planted_share,
        seed=case.seed_for(0),
        progress=False,
    )


def _over_layers(values: xr.DataArray) -> np.ndarray:
    """The geometric mean over half-steps, by prompt."""
    logs = np.log(values.transpose("layer", ...).values)
    return np.asarray(np.exp(logs.mean(0)))


def _evidence(values: np.ndarray) -> Evidence:
    return Replicates(values, "prompts", scale=LOG)


def _writes(recording: Recording) -> bool:
    return bool((recording.replay(WrittenByMlp())["written_by_mlp"].largest > 0).any())


def _silent(recording: Recording, case: TrialCase) -> Evidence:
    """The growth ratio where blocks write nothing."""
    if not _writes(recording):
        return PremiseImpossible(NO_GROWTH)
    return _evidence(_over_layers(_measured(recording, case).growth_ratio))


def _twin_prompts(case: TrialCase) -> int:
    return int(case.constant("twin_prompts_quick" if case.quick else "twin_prompts"))


def _twins(case: TrialCase, texts: tuple[object, ...]) -> np.ndarray:
    """Growth ratios of the untrained twins, over (twin, prompt)."""
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=texts)
    return np.stack([_over_layers(_measured(each, case).growth_ratio) for each in twins])


def _curves(measured: xr.Dataset) -> xr.Dataset:
    """The growth by layer, off and along the cloud."""
    values = np.stack(
        [measured[name].transpose("prompt", "layer").values for name in ("growth_off", "growth_along")], -1
    )
    axes = {"layer": measured.layer.values.tolist(), "perturbation": ["off the cloud", "along the cloud"]}
    return curve("growth", values, axes, label="growth of a perturbation over the MLP half-step", over="prompt")


def _remark(measured: xr.Dataset, contrast: TwinContrast) -> str:
    ratio, defect, near = (
        measured[name].mean("prompt").values for name in ("growth_ratio", "idempotence_defect", "neighbor_angle")
    )
    return (
        f"Over half-steps the ratio runs from {ratio.min():.3f} to {ratio.max():.3f}, and the defect of idempotence "
        f"from {defect.min():.2f} to {defect.max():.2f}; untrained twins have a ratio of {contrast.twins.mean():.3f}. "
        f"Neighbors in other prompts are {near.min():.2f} to {near.max():.2f} rad away."
    )
