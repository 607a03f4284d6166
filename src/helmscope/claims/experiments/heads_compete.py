"""heads-compete: the heads of a layer compete, because they share the output map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import AbsoluteDifference, Inconclusive, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.rank_correlation import rank_correlation
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.observe.head_ablation_damage import KernelRank, head_ablation_damage, head_interaction
from helmscope.stats.scales import LogScale
from helmscope.types import pluralized

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

NO_DAMAGE = "no head does damage when ablated, so that there is no ratio"


@experiment("heads-compete", seconds={"model": 130})
def heads_compete(case: TrialCase) -> Finding:
    """log(joint / summed damage) of a pair of heads of one layer minus that of its matched pair across layers; damages
    are means over prompts, and the replicates are matched pairs. Described: both ratios, untrained twins, and the rank
    correlation over heads of the damage with the rank of the kernel.
    """
    prompts = prompts_or_finding(
        case, "kernel", "replay", "lens", "resume", causal=True, head=True, length=case.constant("tokens")
    )
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    hidden = [layer for layer in recording.layers if recording.anatomy.layers[layer].heads is None]
    if hidden or not recording.anatomy.tapped:
        return Finding.impossible(f"the family of {case.subject.name} hides its heads, so that none can be ablated")
    if len(recording.layers) < 2:
        return Finding.impossible("it has one layer, so that there are no pairs of heads across layers")
    measured = _interaction(case, recording)
    differences = _differences(measured)
    undecided = _too_few_pairs(case, measured)
    return Finding(
        evidence={"interaction": undecided or AbsoluteDifference(differences, "matched pairs")},
        controls={
            "blocks that write nothing": _silent(case, silenced(recording)),
            "kinds of pairs permuted": undecided or AbsoluteDifference(_permuted(case, differences), "matched pairs"),
        },
        described=_ratios(measured) | _ranks(case, recording, measured) | _twins(case, prompts.texts),
        data=_curves(measured),
        remark=_remark(case, measured),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each; "
        f"{pluralized(len(differences), 'matched pair')} of heads",
        undecided_because=prompts.alike,
    )


def _interaction(case: TrialCase, recording: Recording) -> xr.Dataset:
    return head_interaction(
        recording,
        pairs=case.count(case.constant("pairs"), quick=case.constant("pairs_quick")),
        tol=case.constant("tolerance"),
        min_damage=case.constant("smallest_damage"),
        seed=case.seed_for(0),
        progress=False,
    )


def _logs(measured: xr.Dataset) -> np.ndarray:
    """log(joint / summed) over (pair_kind, pair); damages are means over prompts."""
    means = measured.mean("prompt")
    return np.asarray(np.log(means.joint_damage / means.summed_damage).values)


def _differences(measured: xr.Dataset) -> np.ndarray:
    one_layer, across = _logs(measured)
    return np.asarray(one_layer - across)


def _too_few_pairs(case: TrialCase, measured: xr.Dataset) -> Evidence | None:
    """Why there is no ratio, or why so few matched pairs decide nothing."""
    damage = measured.kl.mean("prompt")
    if not bool((damage >= case.constant("smallest_damage")).any()):
        return PremiseImpossible(NO_DAMAGE)
    least, found = case.constant("least_pairs"), measured.sizes["pair"]
    if found < least:
        return Inconclusive(f"the claim needs {least} matched pairs of heads, but there are {found}")
    return None


def _silent(case: TrialCase, recording: Recording) -> Evidence:
    """The interaction where blocks write nothing, if ablating a head of the first layer does anything."""
    first = head_ablation_damage(recording, layers=recording.layers[0], progress=False)
    if not bool((first.kl.mean("prompt") >= case.constant("smallest_damage")).any()):
        return PremiseImpossible(NO_DAMAGE)
    measured = _interaction(case, recording)
    return _too_few_pairs(case, measured) or AbsoluteDifference(_differences(measured), "matched pairs")


def _permuted(case: TrialCase, differences: np.ndarray) -> np.ndarray:
    """The differences with the two kinds exchanged in half of the matched pairs."""
    signs = np.where(np.arange(len(differences)) % 2, 1.0, -1.0)
    return np.asarray(np.random.default_rng(case.seed_for(1)).permutation(signs) * differences)


def _ratios(measured: xr.Dataset) -> dict[str, Evidence]:
    if measured.sizes["pair"] < 2:
        return {}
    logs = _logs(measured)
    kinds = measured.pair_kind.values.tolist()
    return {
        f"joint over summed damage, {kind}": Replicates(np.exp(values), "pairs", LogScale())
        for kind, values in zip(kinds, logs, strict=True)
    }


def _ranks(case: TrialCase, recording: Recording, measured: xr.Dataset) -> dict[str, Evidence]:
    """The rank correlation over heads of the damage of zeroing a head with the rank of its kernel."""
    kernels = recording.replay(KernelRank())[KernelRank.name].mean("prompt").transpose("layer", "head")
    damage = measured.kl.mean("prompt").transpose("layer", "head").values.reshape(-1, 1)
    usable = np.isfinite(damage[:, 0])
    names = {"effective_keys": "effective number of keys", "kernel_rank": "effective rank of the kernel"}
    return {
        f"rank correlation of damage and {text}": rank_correlation(
            damage[usable], kernels[name].values.reshape(-1, 1)[usable], "heads"
        )
        for name, text in names.items()
    }


def _twins(case: TrialCase, texts: tuple[object, ...]) -> dict[str, Evidence]:
    """The mean difference of untrained twins, one value per twin."""
    if case.quick:
        return {}
    recordings = case.subject.twin_recordings(
        case.constant("twins"), seed=case.seed, texts=texts[: case.constant("twin_prompts")]
    )
    found = [_interaction(case, each) for each in recordings]
    values = [_differences(each).mean() for each in found if each.sizes["pair"]]
    return {"difference of the logarithms, untrained twins": Replicates(values, "twins")} if len(values) > 1 else {}


def _curves(measured: xr.Dataset) -> xr.Dataset:
    """The damage of zeroing each head, by layer."""
    values = measured.kl.transpose("prompt", "layer", "head").values
    axes = {"layer": measured.layer.values.tolist(), "head": measured["head"].values.tolist()}
    return curve(
        "damage", values, axes, label="KL divergence of the next-token distribution (nats)", log=True, over="prompt"
    )


def _remark(case: TrialCase, measured: xr.Dataset) -> str:
    damage = measured.kl.mean("prompt")
    left_out = " Untrained twins: not tried in quick." if case.quick else ""
    pairs = ""
    if measured.sizes["pair"]:
        ratios = np.exp(_logs(measured))
        spread = [f"from {each.min():.2f} to {each.max():.2f}" for each in ratios]
        pairs = f" The ratio runs {spread[0]} for pairs of one layer, and {spread[1]} across layers."
    return (
        f"Ablating one head does a damage from {float(damage.min()):.2g} to {float(damage.max()):.2g} nats, the median "
        f"is {float(damage.median()):.2g}.{pairs}{left_out}"
    )
