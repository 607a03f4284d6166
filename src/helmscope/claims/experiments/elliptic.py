"""elliptic: the diffusion matrix of attention, summed over heads, is not degenerate on the tangent space."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from helmscope.claims.arm_statistics import over_prompts
from helmscope.claims.attention_trials import AttentionTrial, OneHead, PlantedSigma, by_prompt, every_layer, layer_means
from helmscope.claims.curves import curve
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.observe.attention_diffusion import AttentionDiffusionSpectrum

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording


@experiment("elliptic", seconds={"model": 20})
@prints_premise
def elliptic(case: TrialCase) -> Finding:
    """The smallest tangent eigenvalue of Sigma_A summed over heads, over the mean one, at every layer; the mean over a
    few tokens of each prompt, drawn by the seed.

    A token sees i keys in a causal model, so that the rank of the sum over H heads is at most H min(i - 1, d_head):
    tokens that see enough keys are described apart. The control of a single head goes through the same measurement; so
    does a multiple of the tangent projector.
    """
    trial = AttentionTrial.of(case)
    if trial.without_ruling is not None:
        return trial.without_ruling
    tokens = case.count(4, quick=2)

    def spectrum(**options: int) -> AttentionDiffusionSpectrum:
        return AttentionDiffusionSpectrum(
            sampled_tokens=tokens, seed=case.seed, tol=case.constant("rank_tolerance"), **options
        )

    single = OneHead(sampled_tokens=1, seed=case.seed, tol=case.constant("rank_tolerance"))
    planted = PlantedSigma()
    measured = trial.recording.replay(spectrum(), planted)
    anatomy = trial.recording.anatomy
    dim = anatomy.dim - (2 if anatomy.centered else 1)
    enough = math.ceil(dim / (anatomy.layers[0].heads or 1)) + 1
    late = trial.few.replay(spectrum(first_position=enough - 1))["attention_diffusion_spectrum"].smallest_eigenvalue
    alone = trial.few.replay(single)[single.name]
    found, isotropic = measured["attention_diffusion_spectrum"], measured[planted.name]

    def silent(recording: Recording) -> Evidence:
        return every_layer(recording.replay(spectrum())["attention_diffusion_spectrum"].smallest_eigenvalue)

    rank, bound = (found[name].mean("head").mean("layer").values for name in ("sigma_rank", "sigma_rank_bound"))
    return Finding(
        undecided_because=trial.chosen.alike,
        evidence={
            "smallest eigenvalue": every_layer(found.smallest_eigenvalue),
            "rank per head": over_prompts(rank / dim),
        },
        controls={
            "a single head": every_layer(alone.smallest_eigenvalue),
            "isotropic Sigma": every_layer(isotropic.smallest_eigenvalue),
            "blocks that write nothing": trial.silent_evidence(silent, "Sigma is 0 and has no smallest eigenvalue"),
        },
        described={
            f"smallest eigenvalue, tokens from the {enough}th on, whose keys could span the space": over_prompts(
                late.mean("layer").values
            ),
            "bound of the rank per head, over the tangent dimension": over_prompts(bound / dim),
            "rank of the sum over heads, over the tangent dimension": over_prompts(
                found.total_sigma_rank.mean("layer").values / dim
            ),
            "smallest eigenvalue over the mean one on the range of Sigma": over_prompts(
                found.smallest_eigenvalue_of_range.mean("layer").values
            ),
        },
        data=curve(
            "smallest_eigenvalue",
            by_prompt(found.smallest_eigenvalue),
            {"layer": found.layer.values.tolist()},
            label="smallest tangent eigenvalue of Sigma over the mean one",
            over="prompt",
        ),
        remark=f"The smallest eigenvalue over the mean one runs {layer_means(found.smallest_eigenvalue)}, the rank of "
        f"the sum over heads {layer_means(found.total_sigma_rank)} of {dim}; a head has rank {float(rank.mean()):.1f}, "
        f"at most {float(bound.mean()):.1f}. On the range of Sigma the smallest eigenvalue over the mean one runs "
        f"{layer_means(found.smallest_eigenvalue_of_range)}.",
        setting=f"{trial.setting}; {tokens} tokens of each prompt",
    )
