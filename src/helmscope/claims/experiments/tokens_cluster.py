"""tokens-cluster: with depth the inner products of a model's tokens pile up at 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.claims.arm_statistics import (
    ATTENTION,
    MLP,
    NEGATED_WITH_MLP,
    NO_MIXING_WITH_MLP,
    SILENT,
    WHOLE,
    ArmStatistics,
    Factorial,
    depth_curves,
    ends_of,
    growth_of,
    growth_or_reason,
    over_prompts,
    token_ids,
)
from helmscope.claims.curves import curve
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import long_prompt
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.theory_flow import TheoryFlow
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.geometry.sphere import retract
from helmscope.observe.inner_products import inner_product_histogram
from helmscope.observe.pairs import PairSet, cloud_statistics, without_first_token
from helmscope.types import Attachment, HelmscopeError, Trajectory

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

LOOPED_FURTHER = (2, 4, 8)  # times the depth of a tied block, the latter two in a full run only
LOOPED_PROMPTS = 8  # described only
SHOWN, BINS = 5, 40  # depths and bins of the histograms
LITERATURE = (
    "That pure attention collapses in rank (Dong et al. 2021, arXiv:2103.03404) is proved without residual connections "
    "and MLPs, and masks and LayerNorm change it (Wu et al. 2024, arXiv:2405.18781): a model with both need not gather "
    "its tokens, and this trial does not contradict them."
)


@experiment("tokens-cluster", seconds={"model": 15})
def tokens_cluster(case: TrialCase) -> Finding:
    """The share of inner products <x_i, x_j> above 0.9 at the last depth minus that at the first, one value per prompt,
    whole model.

    Pairs have different token ids and are at least 16 positions apart, without the first token. x are the tokens on the
    theory's sphere: the direction of the residual stream or, where states are outputs of norms, the direction with gain
    and bias folded out. Described: other levels and pairs, ranks, distance to the mean token, other coordinates,
    figure 1 as printed (one prompt of 256 tokens), attention with P = I and with -V while the MLPs are on, untrained
    twins (in a full run in all arms), tied blocks looped further, and the flow of ``TheoryFlow``.
    """
    arms = Factorial.of(case)
    if arms.unsupported_reason is not None:
        return arms.unsupported_reason
    whole, silent = arms.arm(WHOLE), arms.arm(SILENT, only_described=True)
    twins = arms.twin_shares(WHOLE)
    described = _described(whole)
    described |= TwinContrast(whole.growth, np.stack([growth_of(twin) for twin in twins])).described("growth")
    described |= {label: over_prompts(growth) for label, growth in _other_coordinates(arms).items()}
    described |= {label: over_prompts(growth) for label, growth in _looped(case, arms).items()}
    for arm in (NO_MIXING_WITH_MLP, NEGATED_WITH_MLP):
        described[f"growth, {arm.label}, MLPs on"] = growth_or_reason(arms.arm_or_reason(arm, only_described=True))
    if not case.quick:
        described |= _other_arms_of_twins(arms)
    shares = {"whole model": whole.share, "attention alone": arms.arm(ATTENTION).share}
    mlp = arms.arm_or_reason(MLP)
    shares |= {"MLP alone": mlp.share} if isinstance(mlp, ArmStatistics) else {}
    shares["whole model, untrained"] = twins.mean(0)
    means = {"whole model": whole.mean}
    flow, remark = _flow(case, arms)
    if flow is not None:
        means[flow.label] = flow.mean
        described["mean inner product of the theory's flow, end"] = over_prompts(flow.end)
    figure, printed = _figure_1(case, arms)
    parts = [
        depth_curves("share", shares, label=f"share of inner products above {arms.level:g}"),
        depth_curves("mean_inner_product", means, label="mean inner product").rename(arm="path"),
        *figure,
    ]
    ends = whole.share.mean(1)
    return Finding(
        evidence={"growth of the share": over_prompts(whole.growth)},
        controls={"blocks that write nothing": over_prompts(silent.growth)},
        described=described,
        data=xr.merge(parts, join="outer", compat="no_conflicts"),
        remark=f"The share goes from {ends[0]:.4f} over at most {ends.max():.4f} to {ends[-1]:.4f}, in untrained twins "
        f"to {twins[:, -1].mean():.4f}. {printed} {remark} {LITERATURE}",
        setting=arms.setting,
        undecided_because=arms.chosen.alike,
        attachments=(Attachment(f"Certificate of {case.subject.name}", str(arms.recording().certificate)),),
    )


def _described(whole: ArmStatistics) -> dict[str, Evidence]:
    """Other levels and pairs, effective ranks, the distance to the mean token, and token identity."""
    rows: dict[str, Evidence] = {
        f"growth of the share above {level:g}": over_prompts(growth_of(whole.share_of(PairSet.DISTANT, level)))
        for level in whole.by_depth.level.values.tolist()
        if level != whole.level
    }
    rows["growth of the share, all pairs i != j"] = over_prompts(growth_of(whole.share_of(PairSet.ALL)))
    rows["growth of the mean inner product"] = over_prompts(growth_of(whole.mean))
    for label, name in (
        ("effective rank exp(entropy)", "effective_rank"),
        ("participation ratio", "participation_ratio"),
        ("distance to the mean token, Frobenius", "collapse_residual_frobenius"),
        ("distance to the mean token, norm of Dong et al.", "collapse_residual_composite"),
    ):
        values = whole.ends[name].values
        rows[f"{label}, last depth over first"] = over_prompts(values[-1] / values[0])
    if whole.identity is not None:
        rows["tokens decoded at the last depth"] = over_prompts(whole.identity[-1])
    return rows


def _other_arms_of_twins(arms: Factorial) -> dict[str, Evidence]:
    """The growth of the share in untrained twins, in those arms that have no curve."""
    return {
        f"growth, {arm.label}{', MLPs on' if arm.mlp and arm != MLP else ''}, untrained": growth
        for arm, growth in arms.other_twin_growths().items()
    }


def _other_coordinates(arms: Factorial) -> dict[str, np.ndarray]:
    """The growth of the share with the prompt's mean token subtracted, with gain and bias, and of raw states."""
    recording = arms.recording()
    growths = {"growth, mean token subtracted": _growth(arms, recording, _centered(ends_of(recording.on_sphere)))}
    if recording.anatomy.post_norm:
        growths["growth, with gain and bias"] = _growth(arms, recording, ends_of(recording.trajectory))
    raw = _raw_states(recording, (0, len(recording.trajectory.times) - 1))
    measured = cloud_statistics(
        raw, ids=token_ids(recording), levels=[arms.level], gap=arms.gap, include_first_token=True, ranks=False
    )
    for label, pairs in (("i != j", PairSet.ALL), ("with the diagonal", PairSet.AS_PRINTED)):
        share = measured.aligned_pair_share.sel(pairs=pairs.value, level=arms.level).values
        growths[f"growth, raw states, {label}"] = growth_of(share)
    return growths


def _growth(arms: Factorial, recording: Recording, path: Trajectory) -> np.ndarray:
    measured = cloud_statistics(path, ids=token_ids(recording), levels=[arms.level], gap=arms.gap, ranks=False)
    return growth_of(measured.aligned_pair_share.sel(pairs=PairSet.DISTANT.value, level=arms.level).values)


def _centered(path: Trajectory) -> Trajectory:
    """The directions of the tokens after subtracting the mean token of their prompt, without the first token."""
    weights = without_first_token(path).weights
    assert weights is not None
    m = weights[:1].unsqueeze(-1).double()
    x = path.states.double()
    mean = (m * x).sum(2, keepdim=True) / m.sum(2, keepdim=True)
    return Trajectory(path.times, retract(x - mean), path.weights, axis=path.axis, replicate=path.replicate)


def _raw_states(recording: Recording, depths: Sequence[int]) -> Trajectory:
    """The hidden states at some depths as they are, scaled to length 1."""
    path = recording.trajectory
    states = torch.stack([retract(recording.residual_stream(depth=depth).double()) for depth in depths])
    return Trajectory(path.times[list(depths)], states, path.weights, axis=path.axis, replicate=path.replicate)


def _figure_1(case: TrialCase, arms: Factorial) -> tuple[list[xr.Dataset], str]:
    """Figure 1 as printed: histograms of the inner products of raw states of one prompt at some layers, without the
    pairs i = i, as its caption says, and with them, as its code has it; and a sentence about the mass near 1.
    """
    ids = long_prompt(case.subject, case.constant("figure_1_tokens"))
    try:
        recording = case.subject.record([ids])
    except HelmscopeError as error:
        return [], f"Figure 1 as printed was not computed: {error}."
    last = len(recording.trajectory.times) - 1
    depths = sorted({2 * round(k * last / 2 / (SHOWN - 1)) for k in range(SHOWN)})  # ends of whole layers
    raw = _raw_states(recording, depths)
    histogram = inner_product_histogram(raw, bins=BINS).inner_product_histogram.transpose(
        raw.replicate, "inner_product", raw.axis
    )
    without = histogram.values
    sizes = torch.ones_like(raw.states[0, ..., 0]) if raw.weights is None else raw.weights[0]
    n = sizes.sum(-1).double().cpu().numpy()[:, None, None]
    diagonal = (np.arange(BINS) == BINS - 1)[:, None]
    both = np.stack([without, ((n - 1) * without + diagonal) / n], -1)
    axes = {"inner_product_of_raw_states": histogram.inner_product.values.tolist()}
    axes |= {"at_depth": depths, "pairs": ["i != j", "with the diagonal"]}
    near = both[0, histogram.inner_product.values > arms.level].sum(0)[[0, -1]]  # (first or last depth, pairs)
    sentence = (
        f"Figure 1 as printed, one prompt of {len(ids)} tokens, raw states: the share above {arms.level:g} goes from "
        f"{near[0, 0]:.4f} to {near[1, 0]:.4f} for i != j, and from {near[0, 1]:.4f} to {near[1, 1]:.4f} with the "
        "diagonal, which adds the same mass at 1 at every depth."
    )
    label = f"figure 1 as printed, one prompt of {len(ids)} tokens: share of inner products in a bin"
    alone = np.concatenate([both, np.full_like(both, np.nan)])  # one prompt has no interval
    return [curve("figure_1", alone, axes, label=label, over="prompt")], sentence


def _looped(case: TrialCase, arms: Factorial) -> dict[str, np.ndarray]:
    """The growth of a model of one tied block when it is looped further."""
    loops = case.subject.tied_loops
    if loops is None:
        return {}
    growths = {}
    for factor in LOOPED_FURTHER[:1] if case.quick else LOOPED_FURTHER:
        deep = case.subject.looped(factor * loops).record(arms.prompts[:LOOPED_PROMPTS])
        growths[f"growth when looped to {factor * loops}"] = _growth(arms, deep, ends_of(deep.on_sphere))
    return growths


def _flow(case: TrialCase, arms: Factorial) -> tuple[TheoryFlow | None, str]:
    """The theory's flow from the first states, and a sentence about it."""
    missing = case.subject.unmet_premise("kernel")
    if missing is not None:
        return None, f"The theory's flow was not simulated: {missing}."
    try:
        flow = TheoryFlow.of(arms.recording(only_described=True), prompts=case.count(16, quick=4), gap=arms.gap)
    except HelmscopeError as error:
        return None, f"The theory's flow was not simulated: {error}."
    return flow, flow.sentence
