"""gradient-shaped: what a layer writes points down the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PairedDifferences, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced, spaced_layers
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.intervene.edit import Edit
from helmscope.models.sites import Site
from helmscope.observe.loss_gradient_cosine import loss_gradient, loss_gradient_cosine

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

FULL_WRITE = 1.0
NO_WRITES = "its half-steps write nothing at any token, so that no write has a direction"


@experiment("gradient-shaped", seconds={"model": 115})
def gradient_shaped(case: TrialCase) -> Finding:
    """The cosine of every write with minus the loss gradient at the state to which it is added (s = 0), the mean over
    tokens and half-steps; one value per prompt. Described: the cosine at the other scales of the write.

    The gradient is that of the summed loss of the prompt, through all later layers and positions.
    """
    prompts = prompts_or_finding(case, "lens", "resume", causal=True, head=True, length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    deciding = float(case.constant("deciding_scale"))
    scales = [deciding, FULL_WRITE] if case.quick else case.constant("scales")
    recording = case.subject.record(prompts.texts)
    layers = spaced_layers(recording, case.constant("layers_quick")) if case.quick else list(recording.layers)
    shape = loss_gradient_cosine(recording, scales=scales, layers=layers, seed=case.seed_for(0), progress=False)
    at_start = shape.sel(scale=deciding)
    cosine = _by_prompt(at_start.cosine)
    if not np.isfinite(cosine).all():
        return Finding.impossible(NO_WRITES)
    few = prompts.texts[: _twin_prompts(case)]
    contrast = TwinContrast(cosine, _twins(case, few, layers, deciding))
    first, second = (_by_prompt(at_start.cosine_permuted.isel(draw=k)) for k in (0, 1))
    on_few = case.subject.record(few)
    return Finding(
        evidence={
            "cosine": Replicates(cosine, "prompts"),
            "above permuted writes": PairedDifferences(cosine - _by_prompt(at_start.cosine_null), "prompts"),
            "above the twins": PairedDifferences(contrast.differences.mean(0), "prompts"),
        },
        controls={
            "blocks that write nothing": _silent(silenced(on_few), deciding),
            "a step down the gradient": Replicates(_down_the_gradient(on_few, deciding), "prompts"),
            "one permutation against another": PairedDifferences(first - second, "prompts"),
        },
        described=contrast.described("cosine") | _other_scales(shape, deciding),
        data=_curves(shape, deciding),
        remark=_remark(shape, contrast, deciding, quick=case.quick),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each; twins and two controls on "
        f"{len(few)} of them",
        undecided_because=prompts.alike,
    )


def _by_prompt(cosine: xr.DataArray) -> np.ndarray:
    """The mean over layers and half-steps; half-steps that write nothing do not count."""
    return np.asarray(cosine.mean(("layer", "half")).values)


def _twin_prompts(case: TrialCase) -> int:
    return int(case.constant("twin_prompts_quick" if case.quick else "twin_prompts"))


def _twins(case: TrialCase, texts: tuple[object, ...], layers: list[int], scale: float) -> np.ndarray:
    """Cosines of the untrained twins, over (twin, prompt)."""
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=texts)
    shapes = (loss_gradient_cosine(each, scales=[scale], layers=layers, progress=False) for each in twins)
    return np.stack([_by_prompt(shape.cosine.sel(scale=scale)) for shape in shapes])


def _silent(recording: Recording, scale: float) -> Evidence:
    """The cosine where blocks write nothing, which has no direction."""
    layers = [recording.layers[-1]]
    shape = loss_gradient_cosine(recording, scales=[scale], layers=layers, progress=False)
    cosine = _by_prompt(shape.cosine.sel(scale=scale))
    return Replicates(cosine, "prompts") if np.isfinite(cosine).all() else PremiseImpossible(NO_WRITES)


def _down_the_gradient(recording: Recording, scale: float) -> np.ndarray:
    """The cosine of the last layer's MLP write, replaced by minus the loss gradient."""
    last = recording.layers[-1]
    down = -loss_gradient(recording, layer=last, site=Site.MLP, scale=scale)
    edit = Edit(Site.MLP, [last], lambda write, context: down[context.rows].to(write))
    planted = loss_gradient_cosine(recording.under(edit), scales=[scale], layers=[last], progress=False)
    return np.asarray(planted.cosine.sel(half=Site.MLP.value).isel(layer=0, scale=0).values)


def _other_scales(shape: xr.Dataset, deciding: float) -> dict[str, Evidence]:
    scales = [scale for scale in shape.scale.values.tolist() if scale != deciding]
    return {f"cosine at s = {s:g}": Replicates(_by_prompt(shape.cosine.sel(scale=s)), "prompts") for s in scales}


def _curves(shape: xr.Dataset, deciding: float) -> xr.Dataset:
    """The cosine by layer and half-step, beside that of permuted writes."""
    steps = shape.half.values.tolist()
    measured = shape.sel(scale=deciding).transpose("prompt", "layer", "half", ...)
    values = np.concatenate([measured.cosine.values, measured.cosine_null.values], -1)
    families = [*steps, *(f"{step}, permuted writes" for step in steps)]
    label = f"cosine of write and minus the loss gradient, s = {deciding:g}"
    return curve(
        "cosine", values, {"layer": shape.layer.values.tolist(), "write": families}, label=label, over="prompt"
    )


def _remark(shape: xr.Dataset, contrast: TwinContrast, deciding: float, *, quick: bool) -> str:
    by_step = shape.cosine.sel(scale=deciding).mean("prompt")
    null = shape.cosine_null.sel(scale=deciding).mean("prompt")
    full = shape.cosine.sel(scale=FULL_WRITE).mean("prompt")
    left_out = " Other layers and the scales between 0 and 1: not tried in quick." if quick else ""
    return (
        f"Over half-steps the mean cosine runs from {float(by_step.min()):.3f} to {float(by_step.max()):.3f}, that of "
        f"permuted writes from {float(null.min()):.3f} to {float(null.max()):.3f}; untrained twins have "
        f"{contrast.twins.mean():.4f}. At the full write, s = 1, where training pulls it to 0, it runs from "
        f"{float(full.min()):.3f} to {float(full.max()):.3f}.{left_out}"
    )
