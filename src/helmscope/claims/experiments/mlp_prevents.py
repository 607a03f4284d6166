"""mlp-prevents: the MLPs undo the gathering of the tokens by attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Paired
from helmscope.claims.factorial import (
    ATTENTION,
    MLP,
    SILENT,
    WHOLE,
    ArmStatistics,
    Factorial,
    depth_curves,
    over_prompts,
)
from helmscope.claims.finding import Finding
from helmscope.claims.registry import Case, experiment
from helmscope.intervene.arms import leave_one_in, leave_one_out
from helmscope.models.boxed import sibling_history
from helmscope.types import Exhibit

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence

GATHERED = 0.05  # growth of the share below which attention alone is said not to gather
LAYER_PROMPTS = 8
TRAINED_AGAIN = ("whole model", "attention alone", "MLP alone")


@experiment("mlp-prevents", seconds={"model": 15})
def mlp_prevents(case: Case) -> Finding:
    """The share of inner products above 0.9 at the last depth, whole model minus attention alone, paired by prompt.

    Pairs are those of tokens-cluster. Described: MLPs alone; untrained twins; over training, the same arms of a sibling
    of A at sixteen steps; in a full run each MLP left out of the whole model, or as the only one with all attention.
    """
    arms = Factorial.of(case)
    if arms.unmet is not None:
        return Finding.impossible(arms.unmet)
    whole, alone, silent = arms.arm(WHOLE), arms.arm(ATTENTION), arms.arm(SILENT, few=True)
    mlp = arms.arm_or_reason(MLP, few=True)
    twins = {arm: arms.twin_shares(arm) for arm in (WHOLE, ATTENTION)}
    untrained = (twins[WHOLE] - twins[ATTENTION])[:, -1].mean(0)
    shares = {"whole model": whole.share, "attention alone": alone.share}
    described: dict[str, Evidence] = {
        "difference in untrained twins": Paired(untrained, "prompts"),
        "difference of mean inner products": Paired(whole.mean[-1] - alone.mean[-1], "prompts"),
    }
    if isinstance(mlp, ArmStatistics):
        shares["MLP alone"] = mlp.share
        described["share at the last depth, MLP alone"] = over_prompts(mlp.share[-1])
    shares["attention alone, untrained"] = twins[ATTENTION].mean(0)
    described |= _identities({arm.label: arms.arm_or_reason(arm, few=True) for arm in (WHOLE, ATTENTION, MLP)})
    parts = [depth_curves("share", shares, label=f"share of inner products above {arms.level:g}")]
    remark = _remark(arms, shares) + (
        "" if isinstance(mlp, ArmStatistics) else f" MLP alone could not be tried: {mlp}."
    )
    if case.subject.model == "A":
        parts.append(_over_training(arms.level))
        remark += _training_remark(parts[-1])
    if not case.quick and case.subject.tied_loops is None:
        parts.append(_by_layer(arms))
        remark += _layer_remark(parts[-1])
    return Finding(
        evidence={"whole minus attention alone": _difference(whole, alone)},
        controls={"blocks that write nothing": _difference(silent, silent)},
        described=described,
        data=xr.merge(parts, join="outer", compat="no_conflicts"),
        remark=remark + arms.caveat,
        where=arms.where,
        exhibits=(Exhibit(f"Certificate of {case.subject.name}", str(arms.recording().certificate)),),
    )


def _difference(whole: ArmStatistics, alone: ArmStatistics) -> Paired:
    """The share at the last depth, whole model minus attention alone. If blocks write nothing, both arms are the same
    forward.
    """
    return Paired(whole.share[-1] - alone.share[-1], "prompts")


def _identities(arms: dict[str, ArmStatistics | str]) -> dict[str, Evidence]:
    """How many tokens can be decoded at the last depth of each arm."""
    return {
        f"tokens decoded at the last depth, {label}": over_prompts(each.identity[-1])
        for label, each in arms.items()
        if isinstance(each, ArmStatistics) and each.identity is not None
    }


def _over_training(level: float) -> xr.Dataset:
    """The share at the last depth of a sibling of A during training, for three arms; step 0 is left out, since steps
    are on a log axis.
    """
    history = sibling_history().share.sel(level=level, arm=list(TRAINED_AGAIN)).isel(depth=-1)
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
    """The share at the last depth with one MLP left in, or one left out."""
    arms = replace(arms, few=LAYER_PROMPTS)  # two arms per layer take long
    layers = range(len(arms.recording(few=True).anatomy.layers))
    kinds = {"the only MLP": leave_one_in(layers)}
    if len(layers) > 1:
        kinds["the MLP left out"] = leave_one_out(layers)
    values = [[arms.arm(arm, few=True).share[-1] for arm in kind] for kind in kinds.values()]
    axes: dict[str, list[Any]] = {"layer": list(layers), "layer_is": list(kinds)}
    label = f"share above {arms.level:g} at the last depth, by layer"
    return curve("by_layer", np.array(values).transpose(2, 1, 0), axes, label=label, over="prompt")


def _layer_remark(by_layer: xr.Dataset) -> str:
    means = by_layer.by_layer.mean("prompt")
    only = means.sel(layer_is="the only MLP").values
    remark = f" With a single MLP on, the share is smallest, {only.min():.3f}, for that of layer {np.argmin(only)}."
    if "the MLP left out" in means.layer_is.values:
        out = means.sel(layer_is="the MLP left out").values
        remark += f" With a single MLP off, it is largest, {out.max():.3f}, without that of layer {np.argmax(out)}."
    return remark


def _remark(arms: Factorial, shares: dict[str, np.ndarray]) -> str:
    ends = ", ".join(f"{label} {values[-1].mean():.3f}" for label, values in shares.items())
    sentences = [f"Share at the last depth: {ends}."]
    if arms.arm(ATTENTION).growth.mean() < GATHERED:
        sentences.append("Attention alone does not gather the tokens of this model, so that there is nothing to undo.")
    if not arms.recording(few=True).anatomy.post_norm:
        sentences.append(
            "MLPs can act in two ways that this difference does not separate: they turn tokens apart, and they enlarge "
            "the stream, so that later writes of attention turn tokens less."
        )
    return " ".join(sentences)
