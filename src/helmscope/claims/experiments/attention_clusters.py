"""attention-clusters: attention alone, with all MLPs off, gathers the tokens of a trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.evidence import Impossible, Replicates
from helmscope.claims.factorial import (
    AT_WHOLE_RADIUS,
    ATTENTION,
    NEGATED,
    NO_MIXING,
    SILENT,
    ArmStatistics,
    Factorial,
    depth_curves,
    growth_of,
    over_prompts,
)
from helmscope.claims.finding import Finding
from helmscope.claims.registry import Case, experiment
from helmscope.types import Exhibit

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.intervene.arms import Arm

GATHERED = 0.05  # mean growth of the share from which an arm is said to gather, in the remark
LITERATURE = (
    "Without residual connections and MLPs attention collapses to rank one (Dong et al. 2021, arXiv:2103.03404); masks "
    "and LayerNorm change how far (Wu et al. 2024, arXiv:2405.18781). Here residual connections are on, which are "
    "said to prevent a collapse by themselves (Cirrincione 2026, arXiv:2604.23681): that tokens gather in this sense "
    "is not a collapse to rank one, and the limit at infinite depth is not tested."
)


@experiment("attention-clusters", seconds={"model": 15})
def attention_clusters(case: Case) -> Finding:
    """The share of inner products above 0.9 at the last depth minus that at the first, with all MLPs off: y' = y + A(y)
    in every layer.

    Pairs are those of tokens-cluster. Controls: blocks that write nothing, attention weights P = I (values are written
    and nothing is mixed), and untrained twins, one value per twin. Described: -V in place of V, and attention alone at
    the radius that each token has in the whole model, where its writes turn the tokens by no more than there.
    """
    arms = Factorial.of(case)
    if arms.unmet is not None:
        return Finding.impossible(arms.unmet)
    alone, silent = arms.arm(ATTENTION), arms.arm(SILENT, few=True)
    not_mixed = arms.arm_or_reason(NO_MIXING)
    others = {arm: arms.arm_or_reason(arm, few=True) for arm in (NEGATED, AT_WHOLE_RADIUS)}
    twins = arms.twin_shares(ATTENTION)
    twin_growth = np.array([growth_of(twin).mean() for twin in twins])
    measured = {arm.label: found for arm, found in others.items() if isinstance(found, ArmStatistics)}
    described: dict[str, Evidence] = {f"growth, {label}": over_prompts(each.growth) for label, each in measured.items()}
    if isinstance(not_mixed, ArmStatistics):
        described["growth beyond P = I, paired"] = over_prompts(alone.growth - not_mixed.growth)
    described |= _described(alone)
    curves = {"attention alone": alone, "no mixing (P = I)": not_mixed, "values negated": others[NEGATED]}
    curves["at the whole model's radius"] = others[AT_WHOLE_RADIUS]
    shares = {label: each.share for label, each in curves.items() if isinstance(each, ArmStatistics)}
    shares["attention alone, untrained"] = twins.mean(0)
    return Finding(
        evidence={"growth of the share": over_prompts(alone.growth)},
        controls={
            "blocks that write nothing": over_prompts(silent.growth),
            "no mixing (P = I)": Impossible(not_mixed)
            if isinstance(not_mixed, str)
            else over_prompts(not_mixed.growth),
            "untrained twins": Replicates(twin_growth, "twins"),
        },
        described=described,
        data=depth_curves("share", shares, label=f"share of inner products above {arms.level:g}, MLPs off"),
        remark=_remark(alone, others, twin_growth) + arms.caveat,
        where=arms.where,
        exhibits=(Exhibit(f"Certificate of {case.subject.name}", str(arms.recording().certificate)),),
    )


def _growth_or_reason(found: ArmStatistics | str) -> Evidence:
    return Impossible(found) if isinstance(found, str) else over_prompts(found.growth)


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


def _remark(alone: ArmStatistics, others: dict[Arm, ArmStatistics | str], twins: np.ndarray) -> str:
    sentences = [f"The share goes to {alone.share[-1].mean():.3f}, in untrained twins it grows by {twins.mean():.3f}."]
    negated, held = others[NEGATED], others[AT_WHOLE_RADIUS]
    if isinstance(negated, ArmStatistics):
        needless = ": an attraction by V = +I is not needed" if _gathers(negated) else ""
        sentences.append(f"With -V in place of V it goes to {negated.share[-1].mean():.3f}{needless}.")
    else:
        sentences.append(f"-V could not be tried: {negated}.")
    if isinstance(held, ArmStatistics):
        sentences.append(f"At the radius of the whole model it goes to {held.share[-1].mean():.3f}.")
        if _gathers(alone) and not _gathers(held):
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
    return arm.ends.entropy_rank.values, arm.ends.residual.values


def _gathers(arm: ArmStatistics) -> bool:
    return bool(arm.growth.mean() >= GATHERED)
