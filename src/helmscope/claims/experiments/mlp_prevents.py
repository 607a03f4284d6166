"""mlp-prevents: with its MLPs on, a model does not gather the tokens that its attention alone gathers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from helmscope.claims.arm_statistics import (
    AT_WHOLE_RADIUS,
    ATTENTION,
    MLP,
    NO_MIXING,
    SAME_PROMPTS,
    SILENT,
    UNTRAINED,
    WHOLE,
    ArmStatistics,
    Factorial,
    depth_curves,
    over_prompts,
    share_at_end,
)
from helmscope.claims.curves import curve
from helmscope.claims.evidence import PairedDifferences, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.intervene.arms import only_one_mlp, without_one_mlp
from helmscope.models.bundled_models import ablated_training_history
from helmscope.types import Attachment

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence

LAYER_PROMPTS, LAYER_FORWARDS = 8, 96  # prompts with a single MLP on or off, and prompts times layers at most
TRAINED_AGAIN = ("whole model", "attention alone", "MLP alone")


@experiment("mlp-prevents", seconds={"model": 15})
def mlp_prevents(case: TrialCase) -> Finding:
    """The share of inner products above 0.9 at the last depth, whole model minus attention alone, paired by prompt;
    and, as the premise, the growth of the share with attention alone.

    Pairs are those of tokens-cluster. If blocks write nothing, attention alone gathers nothing: the control measures
    that growth. The difference does not say how the MLPs act: they also enlarge the stream. Described: MLPs alone;
    attention without mixing, and at the radius of the whole model; how many token ids can be decoded from the states of
    each arm, by layer; untrained twins; over training, the same arms of a sibling of A at sixteen steps; in a full run
    each MLP left out of the whole model, or as the only one with all attention.
    """
    arms = Factorial.of(case)
    if arms.unsupported_reason is not None:
        return arms.unsupported_reason
    whole, alone, silent = arms.arm(WHOLE), arms.arm(ATTENTION), arms.arm(SILENT, only_described=True)
    mlp = arms.arm_or_reason(MLP)
    twins = {arm: arms.twin_shares(arm) for arm in (WHOLE, ATTENTION)}
    untrained = (twins[WHOLE] - twins[ATTENTION])[:, -1]
    difference = whole.share[-1] - alone.share[-1]
    described = TwinContrast(difference, untrained).described("difference")
    described["difference of mean inner products"] = PairedDifferences(whole.mean[-1] - alone.mean[-1], "prompts")
    measured = {WHOLE.label: whole, ATTENTION.label: alone}
    measured |= {MLP.label: mlp} if isinstance(mlp, ArmStatistics) else {}
    shares = {label: arm.share for label, arm in measured.items()}
    described |= {share_at_end(label): over_prompts(arm.share[-1]) for label, arm in measured.items()}
    shares[UNTRAINED] = twins[ATTENTION].mean(0)
    described[share_at_end(SAME_PROMPTS)] = over_prompts(alone.share[-1][: arms.twin_prompts])
    described[share_at_end(UNTRAINED)] = Replicates(twins[ATTENTION][:, -1].mean(1), "twins")
    described |= _identities(measured)
    others = {
        "no mixing (P = I)": arms.arm_or_reason(NO_MIXING),
        "at the whole model's radius": arms.arm_or_reason(AT_WHOLE_RADIUS, only_described=True),
    }
    for label, found in others.items():
        if isinstance(found, ArmStatistics):
            described[share_at_end(f"{label}, MLPs off")] = over_prompts(found.share[-1])
            shares[label] = found.share
    remark = _remark(arms, shares, others, case.constant("gathers")) + (
        "" if isinstance(mlp, ArmStatistics) else f" MLP alone could not be tried: {mlp}."
    )
    parts = [depth_curves("share", shares, label=f"share of inner products above {arms.level:g}")]
    parts += _decoded_by_layer(measured)
    if case.subject.model == "A":
        parts.append(_over_training(arms.level))
        remark += _training_remark(parts[-1])
    if not case.quick:
        parts.append(_by_layer(arms))
        remark += _layer_remark(parts[-1], case.constant("gathers"))
    return Finding(
        evidence={
            "growth of attention alone": over_prompts(alone.growth),
            "whole minus attention alone": PairedDifferences(difference, "prompts"),
        },
        controls={"blocks that write nothing": over_prompts(silent.growth)},
        described=described,
        data=xr.merge(parts, join="outer", compat="no_conflicts"),
        remark=remark,
        setting=arms.setting,
        undecided_because=arms.chosen.alike,
        attachments=(Attachment(f"Certificate of {case.subject.name}", str(arms.recording().certificate)),),
    )


def _identities(arms: dict[str, ArmStatistics]) -> dict[str, Evidence]:
    """How many tokens can be decoded at the last depth of each arm."""
    return {
        f"tokens decoded at the last depth, {label}": over_prompts(arm.identity[-1])
        for label, arm in arms.items()
        if arm.identity is not None
    }


def _decoded_by_layer(arms: dict[str, ArmStatistics]) -> list[xr.Dataset]:
    """How many tokens can be decoded after each layer of each arm; nothing with too few prompts."""
    decoded = {label: arm.identity for label, arm in arms.items() if arm.identity is not None}
    if not decoded:
        return []
    curves = depth_curves("tokens_decoded", decoded, label="share of tokens whose id is decoded from their state")
    return [curves.rename(depth="after_layer", arm="decoded_in")]


def _over_training(level: float) -> xr.Dataset:
    """The share at the last depth of a sibling of A during training, for three arms; step 0 is left out, since steps
    are on a log axis.
    """
    history = ablated_training_history().aligned_pair_share.sel(level=level, arm=list(TRAINED_AGAIN)).isel(depth=-1)
    history = history.sel(step=history.step > 0).transpose("prompt", "step", "arm")
    axes = {"step": history.step.values.tolist(), "trained_arm": list(TRAINED_AGAIN)}
    label = f"share above {level:g} at the last depth of a sibling of A, by training step"
    return curve("over_training", history.values, axes, label=label, over="prompt")


def _training_remark(history: xr.Dataset) -> str:
    means = history.over_training.mean("prompt")
    alone, whole = (means.sel(trained_arm=arm).values for arm in ("attention alone", "whole model"))
    steps, peak = means.step.values, int(np.argmax(alone))
    low = peak + int(np.argmin(alone[peak:]))
    return (
        " In a sibling of A, trained again with another seed, the share of attention alone peaks at "
        f"{alone[peak]:.2f} at step {steps[peak]:,}, falls to {alone[low]:.3f} at step {steps[low]:,} and ends at "
        f"{alone[-1]:.2f}; that of the whole model is {whole[0]:.2f} at step {steps[0]:,} and at most "
        f"{whole[1:].max():.4f} later."
    )


def _by_layer(arms: Factorial) -> xr.Dataset:
    """The share at the last depth with one MLP left in, or one left out; the layers of a tied block are its loops."""
    layers = range(len(arms.recording(only_described=True).anatomy.layers))
    # two arms per layer take long, and every layer of a deep model makes all of them longer
    arms = replace(arms, described_prompts=max(4, min(LAYER_PROMPTS, LAYER_FORWARDS // len(layers))))
    kinds = {"the only MLP": only_one_mlp(layers)}
    if len(layers) > 1:
        kinds["the MLP left out"] = without_one_mlp(layers)
    values = [[arms.arm(arm, only_described=True).share[-1] for arm in kind] for kind in kinds.values()]
    axes: dict[str, list[Any]] = {"layer": list(layers), "layer_is": list(kinds)}
    label = f"share above {arms.level:g} at the last depth, by layer"
    return curve("by_layer", np.array(values).transpose(2, 1, 0), axes, label=label, over="prompt")


def _layer_remark(by_layer: xr.Dataset, gathers: float) -> str:
    means = by_layer.by_layer.mean("prompt")
    only = means.sel(layer_is="the only MLP").values
    remark = f" With a single MLP on, the share is smallest, {only.min():.3f}, for that of layer {np.argmin(only)}."
    if "the MLP left out" in means.layer_is.values:
        out = means.sel(layer_is="the MLP left out").values
        if out.max() < gathers:
            return f"{remark} With any single MLP off, it is at most {out.max():.3f}."
        remark += f" With a single MLP off, it is largest, {out.max():.3f}, without that of layer {np.argmax(out)}."
    return remark


def _remark(
    arms: Factorial, shares: dict[str, np.ndarray], others: dict[str, ArmStatistics | str], gathers: float
) -> str:
    ends = ", ".join(f"{label} {values[-1].mean():.3f}" for label, values in shares.items())
    sentences = [f"Share at the last depth: {ends}."]
    not_mixed, held = others.values()
    if arms.arm(ATTENTION).growth.mean() < gathers:
        sentences.append("Attention alone does not gather the tokens of this model.")
    elif isinstance(not_mixed, ArmStatistics) and not_mixed.growth.mean() >= gathers:
        sentences.append(
            f"If every token attends only to itself, the share still goes to {not_mixed.share[-1].mean():.3f}: not all "
            "of what attention alone shows is done by mixing."
        )
    if not arms.recording(only_described=True).anatomy.post_norm:
        radius = (
            f": held at the radius of the whole model, attention alone goes to {held.share[-1].mean():.3f}"
            if isinstance(held, ArmStatistics)
            else ""
        )
        sentences.append(
            "The difference shows that the whole model's share is lower, and not how the MLPs lower it: they turn "
            f"tokens apart, and they enlarge the stream, so that later writes of attention turn tokens less{radius}."
        )
    return " ".join(sentences)
