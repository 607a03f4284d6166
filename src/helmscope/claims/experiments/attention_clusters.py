"""attention-clusters: attention alone, with all MLPs off, gathers the tokens of a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.arm_statistics import (
    AT_WHOLE_RADIUS,
    ATTENTION,
    NEGATED,
    NO_MIXING,
    SILENT,
    UNTRAINED,
    ArmStatistics,
    Factorial,
    depth_curves,
    growth_of,
    growth_or_reason,
    over_prompts,
)
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.types import Attachment

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.intervene.arms import Arm

LITERATURE = (
    "Without residual connections and MLPs attention collapses to rank one (Dong et al. 2021, arXiv:2103.03404); masks "
    "and LayerNorm change how far (Wu et al. 2024, arXiv:2405.18781). Here residual connections are on, which are "
    "said to prevent a collapse by themselves (Cirrincione 2026, arXiv:2604.23681): that tokens gather in this sense "
    "is not a collapse to rank one, and the limit at infinite depth is not tested."
)


@experiment("attention-clusters", seconds={"model": 15})
def attention_clusters(case: TrialCase) -> Finding:
    """The share of inner products above 0.9 at the last depth minus that at the first, with all MLPs off: y' = y + A(y)
    in every layer.

    Pairs are those of tokens-cluster. Controls: blocks that write nothing, and attention weights P = I (values are
    written and nothing is mixed). Described: untrained twins, -V in place of V, and attention alone at the radius that
    each token has in the whole model, where its writes turn the tokens by no more than there. Twins are no control: in
    some architectures attention gathers tokens for random weights too, which the verdict says where it is measured.
    """
    arms = Factorial.of(case)
    if arms.unsupported_reason is not None:
        return arms.unsupported_reason
    alone, silent = arms.arm(ATTENTION), arms.arm(SILENT, only_described=True)
    not_mixed = arms.arm_or_reason(NO_MIXING)
    others = {arm: arms.arm_or_reason(arm, only_described=True) for arm in (NEGATED, AT_WHOLE_RADIUS)}
    twins = arms.twin_shares(ATTENTION)
    contrast = TwinContrast(alone.growth, np.stack([growth_of(twin) for twin in twins]))
    measured = {arm.label: found for arm, found in others.items() if isinstance(found, ArmStatistics)}
    described: dict[str, Evidence] = contrast.described("growth")
    described |= {f"growth, {label}": over_prompts(each.growth) for label, each in measured.items()}
    if isinstance(not_mixed, ArmStatistics):
        described["growth beyond P = I, paired"] = over_prompts(alone.growth - not_mixed.growth)
    described |= _described(alone)
    curves = {"attention alone": alone, "no mixing (P = I)": not_mixed, "values negated": others[NEGATED]}
    curves["at the whole model's radius"] = others[AT_WHOLE_RADIUS]
    shares = {label: each.share for label, each in curves.items() if isinstance(each, ArmStatistics)}
    shares[UNTRAINED] = twins.mean(0)
    return Finding(
        evidence={"growth of the share": over_prompts(alone.growth)},
        controls={
            "blocks that write nothing": over_prompts(silent.growth),
            "no mixing (P = I)": growth_or_reason(not_mixed),
        },
        described=described,
        data=depth_curves("share", shares, label=f"share of inner products above {arms.level:g}, MLPs off"),
        remark=_remark(alone, others, contrast, case.constant("gathers")),
        setting=arms.setting,
        undecided_because=arms.chosen.alike,
        attachments=(Attachment(f"Certificate of {case.subject.name}", str(arms.recording().certificate)),),
    )


def _described(alone: ArmStatistics) -> dict[str, Evidence]:
    """Effective rank, distance to the mean token and token identity of attention alone."""
    ranks, distances = _sizes(alone)
    rows: dict[str, Evidence] = {
        "effective rank, last depth over first": over_prompts(ranks[-1] / ranks[0]),
        "distance to the mean token, last depth over first": over_prompts(distances[-1] / distances[0]),
        "mean inner product, growth": over_prompts(growth_of(alone.mean)),
    }
    if alone.identity is not None:
        rows["tokens decoded at the last depth"] = over_prompts(alone.identity[-1])
    return rows


def _training(contrast: TwinContrast, gathers: float) -> str:
    """What the contrast with untrained twins shows of training."""
    effect = {1: "training raises it", -1: "training lowers it", 0: "it is not shown that training changes it"}
    twins = contrast.twins.mean()
    needless = ", and random weights gather tokens as well" if twins >= gathers else ""
    return (
        f"In untrained twins the share grows by {twins:.3f}, in the model by {contrast.trained_on_same.mean():.3f} on "
        f"the same {len(contrast.trained_on_same)} prompts: {effect[contrast.sign]} (difference "
        f"{contrast.differences.mean():+.3f}){needless}."
    )


def _remark(
    alone: ArmStatistics, others: dict[Arm, ArmStatistics | str], contrast: TwinContrast, gathers: float
) -> str:
    sentences = [f"The share goes to {alone.share[-1].mean():.3f}.", _training(contrast, gathers)]
    negated, held = others[NEGATED], others[AT_WHOLE_RADIUS]
    if isinstance(negated, ArmStatistics):
        needless = ": an attraction by V = +I is not needed" if _gathers(negated, gathers) else ""
        sentences.append(f"With -V in place of V it goes to {negated.share[-1].mean():.3f}{needless}.")
    else:
        sentences.append(f"-V could not be tried: {negated}.")
    if isinstance(held, ArmStatistics):
        sentences.append(f"At the radius of the whole model it goes to {held.share[-1].mean():.3f}.")
        if _gathers(alone, gathers) and not _gathers(held, gathers):
            sentences.append(
                "So attention gathers tokens on a stream that only attention writes to, and it is not shown that it "
                "would at the radius that the MLPs give the stream."
            )
    else:
        sentences.append(f"The radius could not be held: {held}.")
    rank, distance = (values[-1].mean() / values[0].mean() for values in _sizes(alone))
    sentences.append(
        f"The effective rank of the cloud goes to {rank:.2f} and its distance to the mean token to {distance:.2f} of "
        "the first values."
    )
    return " ".join([*sentences, LITERATURE])


def _sizes(arm: ArmStatistics) -> tuple[np.ndarray, np.ndarray]:
    """Effective rank and distance to the mean token at the first and last depth, (2, prompt) each."""
    return arm.ends.effective_rank.values, arm.ends.collapse_residual_frobenius.values


def _gathers(arm: ArmStatistics, least: float) -> bool:
    return bool(arm.growth.mean() >= least)
