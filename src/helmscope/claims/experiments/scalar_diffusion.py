"""scalar-diffusion: the diffusion matrix of attention is close to a multiple of the identity on the tangent space."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.arm_statistics import over_prompts
from helmscope.claims.attention_trials import AttentionTrial, PlantedSigma, by_prompt, every_layer, layer_means
from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.observe.attention_diffusion import AttentionDiffusion, AttentionDiffusionSpectrum

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording


@experiment("scalar-diffusion", seconds={"model": 20})
@prints_premise
def scalar_diffusion(case: TrialCase) -> Finding:
    """The effective share of directions, 1 / (anisotropy d_t), of Sigma_A summed over heads on the tangent space, at
    every layer; the mean over a few tokens of each prompt, drawn by the seed.

    Described: the same for random covariances with as many heads of the same rank and as many tokens, and 1 /
    (anisotropy rank), the share of the directions in the range of Sigma, whose rank may be below d_t; the diffusivity
    as printed, tr Sigma / d, and on the tangent space, tr(T Sigma T) / d_t.
    """
    trial = AttentionTrial.of(case)
    if trial.without_ruling is not None:
        return trial.without_ruling
    tokens = case.count(4, quick=2)
    spectrum, planted = AttentionDiffusionSpectrum(sampled_tokens=tokens, seed=case.seed), PlantedSigma()
    measured = trial.recording.replay(spectrum, planted, AttentionDiffusion())
    found, noise = measured[spectrum.name], measured["attention_diffusion"]
    anatomy = trial.recording.anatomy
    dim = anatomy.dim - (2 if anatomy.centered else 1)
    heads = anatomy.layers[0].heads or 1
    keys = round(float(found["key_count"].mean()))
    random = random_shares(case, dim=dim, heads=heads, rank=anatomy.dim // heads, tokens=max(2, keys))

    def silent(recording: Recording) -> Evidence:
        return every_layer(recording.replay(spectrum)[spectrum.name].effective_dimension_share)

    return Finding(
        undecided_because=trial.chosen.alike,
        evidence={
            "effective share of directions": every_layer(found.effective_dimension_share),
            "effective share at random": Replicates(random, "random covariances"),
        },
        controls={
            "isotropic Sigma": every_layer(measured[planted.name].effective_dimension_share),
            "one direction": every_layer(measured[planted.name].one_direction),
            "blocks that write nothing": trial.silent_evidence(silent, "Sigma is 0 and has no anisotropy"),
        },
        described={
            "effective share of the range of Sigma": over_prompts(
                found.effective_dimension_share_of_range.mean("layer").values
            ),
            "nu = tr(T Sigma T) / d_t": over_prompts(noise.total_nu_token_sampling.mean("layer").values),
            "nu = tr Sigma / d as printed": over_prompts(noise.total_nu_as_printed.mean("layer").values),
        },
        data=curve(
            "effective_dimension_share",
            by_prompt(found.effective_dimension_share),
            {"layer": found.layer.values.tolist()},
            label="effective share 1 / (anisotropy d_t) of the tangent directions",
            over="prompt",
        ),
        remark=f"The effective share runs {layer_means(found.effective_dimension_share)}, that of random covariances "
        f"of as many heads and keys is {random.mean():.2f}, and that of the range of Sigma "
        f"runs {layer_means(found.effective_dimension_share_of_range)}; nu runs "
        f"{layer_means(noise.total_nu_token_sampling)}, as printed {layer_means(noise.total_nu_as_printed)}.",
        setting=f"{trial.setting}; {tokens} tokens of each prompt",
    )


def random_shares(case: TrialCase, *, dim: int, heads: int, rank: int, tokens: int) -> np.ndarray:
    """Effective shares of sum_h A_h Cov(z) A_h^T, with Gaussian matrices A_h (dim x rank) and ``tokens`` Gaussian
    values z.

    >>> from helmscope.claims.registry import registered_case
    >>> from helmscope.models.subject import Subject
    >>> case = registered_case("scalar-diffusion", subject=Subject("A"))
    >>> shares = random_shares(case, dim=20, heads=2, rank=10, tokens=40)
    >>> len(shares), bool(0.2 < shares.mean() < 0.8)
    (32, True)
    """
    count = case.constant("random_covariances")
    matrices = case.normal(count, heads, dim, rank, index=11)
    values = case.normal(count, heads, rank, tokens, index=12)
    spread = matrices @ (values - values.mean(-1, keepdim=True)) / tokens**0.5
    sigma = (spread @ spread.mT).sum(1)
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)
    return np.asarray((trace**2 / (sigma * sigma).sum((-1, -2)) / dim).numpy())
