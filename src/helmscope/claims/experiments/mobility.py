"""mobility: is the drift of self-attention, or of a block of a model, its Sigma_A times the gradient of a potential?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.func import jacfwd, vmap

from helmscope.claims.attention_trials import AttentionTrial, by_prompt, every_layer, layer_means
from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import small_steps_premise
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import project, retract
from helmscope.observe.mobility_test import mobility_test as block_mobility
from helmscope.observe.mobility_test import mobility_unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

    # a tangent vector at the state q of token i in a cloud (n, d); a random matrix (d, d) of the start is passed too
    TokenField = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TOKENS, DIM = 16, 8


@experiment("mobility", seconds={"simulation": 2, "model": 75})
def mobility(case: TrialCase) -> Finding:
    """In simulation, the velocity of self-attention at random clouds; on a model, the drift of every block."""
    return _simulated(case) if case.subject.is_simulation else _on_model(case)


def _simulated(case: TrialCase) -> Finding:
    """The antisymmetric share |A|^2 / |J|^2 of the Jacobian J of Sigma^-1 b, as a function of one token's state with
    the other tokens fixed, on the tangent space and there on the range of Sigma: 0 iff b = Sigma grad V near the state.

    b is the velocity of self-attention and Sigma its Sigma_A, projected to the tangent space. The controls replace b
    by Sigma times the gradient of a random V, and Sigma^-1 b by a random linear field, whose share is about
    (k - 1) / (2 k) on k dimensions.
    """
    betas, tol = case.constant("betas"), case.constant("rank_tolerance")
    x = retract(case.normal(case.count(128, quick=32), TOKENS, DIM, index=0))
    matrices = case.normal(len(x), DIM, DIM, index=1)
    names = [f"beta = {beta:g}" for beta in betas]
    shares: list[Tensor] = []
    carried: list[Tensor] = []
    random: list[Tensor] = []
    for beta in betas:
        attention = SA(beta=beta)
        fields = (attention_over_sigma(attention, tol), gradient_over_sigma(attention, tol), linear_field)
        for found, field in zip((shares, carried, random), fields, strict=True):
            found.append(mean_share(attention, x, matrices, field, tol))
    table = torch.stack([torch.stack(each) for each in (shares, carried, random)]).permute(2, 1, 0)
    return Finding(
        evidence={"antisymmetric share": ReplicatesInEveryCase(shares, "starts", names)},
        controls={
            "b = Sigma grad V": ReplicatesInEveryCase(carried, "starts", names),
            "random field": ReplicatesInEveryCase(random, "starts", names),
        },
        data=curve(
            "share",
            table,
            {"beta": betas, "drift": ("self-attention", "Sigma grad V", "random field")},
            label="antisymmetric share of the Jacobian of Sigma^-1 b",
        ),
        remark="The mean share is "
        + ", ".join(f"{float(share.mean()):.3g} at {name}" for share, name in zip(shares, names, strict=True)) + ".",
        setting=f"simulation on the unit sphere: SA and its Sigma_A at {len(x)} random clouds, n = {TOKENS}, d = {DIM}",
    )  # fmt: skip


def _on_model(case: TrialCase) -> Finding:
    """The antisymmetric share of the Jacobian of Sigma^-1 b at a few tokens of each prompt, with b what the block
    writes to the token and Sigma the Sigma_A of its attention, keys and values fixed, at every block.

    The control is a random Jacobian on the range of the same Sigma. Described: the share of attention's drift alone,
    how much of the drift is outside the range of Sigma, and untrained twins on the first prompts.
    """
    trial = AttentionTrial.of(case)
    if trial.without_ruling is not None:
        return trial.without_ruling
    refused = mobility_unsupported(trial.recording)
    if refused is not None:
        return Finding.impossible(refused)
    tokens = case.count(case.constant("tokens"), quick=case.constant("tokens_quick"))

    def measured(recording: Recording) -> xr.Dataset:
        return block_mobility(recording, sampled_tokens=tokens, seed=case.seed, tol=case.constant("rank_tolerance"))

    def silent(recording: Recording) -> Evidence:
        return every_layer(measured(recording).antisymmetric_share)

    found = measured(trial.recording)
    rows = [list(row) for row in trial.recording.batch.visible_ids][: case.constant("twin_prompts")]
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=rows)
    contrast = TwinContrast(
        found.antisymmetric_share.mean("layer").values,
        np.stack([measured(twin).antisymmetric_share.mean("layer").values for twin in twins]),
    )
    return Finding(
        undecided_because=trial.chosen.alike,
        evidence={"antisymmetric share": every_layer(found.antisymmetric_share)},
        controls={
            "random field": every_layer(found.antisymmetric_share_null),
            "blocks that write nothing": trial.silent_evidence(silent, "Sigma is 0 and has no inverse"),
        },
        described={
            "share of attention alone, mean over layers": Replicates(
                found.antisymmetric_share_attention.mean("layer").values, "prompts"
            ),
            "share of the squared drift outside the range of Sigma": Replicates(
                found.outside_range.mean("layer").values, "prompts"
            ),
            **contrast.described("share, mean over layers"),
        },
        data=curve(
            "share",
            np.stack(
                [
                    by_prompt(found[name])
                    for name in ("antisymmetric_share", "antisymmetric_share_attention", "antisymmetric_share_null")
                ],
                -1,
            ),
            {"layer": found.layer.values.tolist(), "drift": ("block", "attention", "random field")},
            label="antisymmetric share of the Jacobian of Sigma^-1 b",
            over="prompt",
        ),
        remark=f"The share runs {layer_means(found.antisymmetric_share)}, that of attention alone "
        f"{layer_means(found.antisymmetric_share_attention)}, and the share of the squared drift outside the range of "
        f"Sigma {layer_means(found.outside_range)}. {small_steps_premise(case)}",
        setting=f"{trial.setting}; {tokens} tokens of each prompt, keys and values fixed",
    )


def mean_share(attention: SA, x: Tensor, matrices: Tensor, field: TokenField, tol: float) -> Tensor:
    """The antisymmetric share of a tangent field's Jacobian at every token, on the range of Sigma; its mean over the
    tokens of each start.
    """

    def share(i: Tensor, cloud: Tensor, matrix: Tensor) -> Tensor:
        q = cloud[i]
        jacobian = jacfwd(lambda y: field(retract(y), i, cloud, matrix))(q)
        onto = range_projection(tangent_sigma(attention, q, i, cloud), tol)
        on_range = onto @ jacobian @ onto
        ratio: Tensor = (on_range - on_range.mT).square().sum() / 4 / on_range.square().sum()
        return ratio

    tokens = torch.arange(x.shape[-2])
    shares: Tensor = vmap(vmap(share, in_dims=(0, None, None)), in_dims=(None, 0, 0))(tokens, x, matrices)
    return shares.mean(-1)


def attention_over_sigma(attention: SA, tol: float) -> TokenField:
    """Sigma^-1 b for the velocity b of self-attention."""

    def field(q: Tensor, i: Tensor, cloud: Tensor, matrix: Tensor) -> Tensor:
        tokens, p = _moved(attention, q, i, cloud)
        return inverse_on_range(tangent_sigma(attention, q, i, cloud), tol) @ project(q, p @ tokens)

    return field


def gradient_over_sigma(attention: SA, tol: float) -> TokenField:
    """Sigma^-1 b for b = Sigma grad_S V, V(q) = sin <a, q> + e^<c, q> with rows a and c of the matrix."""

    def field(q: Tensor, i: Tensor, cloud: Tensor, matrix: Tensor) -> Tensor:
        a, c = matrix[0], matrix[1]
        sigma = tangent_sigma(attention, q, i, cloud)
        drift = sigma @ project(q, a * (a @ q).cos() + c * (c @ q).exp())
        return inverse_on_range(sigma, tol) @ drift

    return field


def linear_field(q: Tensor, i: Tensor, cloud: Tensor, matrix: Tensor) -> Tensor:
    """P M (q - x_i), whose Jacobian at the token is P M P."""
    return project(q, matrix @ (q - cloud[i]))


def tangent_sigma(attention: SA, q: Tensor, i: Tensor, cloud: Tensor) -> Tensor:
    """P Sigma_A P at a state q of token i, (1/2) sum_j P_ij (x_j - m)(x_j - m)^T projected to the tangent space."""
    tokens, p = _moved(attention, q, i, cloud)
    deviation = project(q, tokens - p @ tokens)
    return (p[:, None] * deviation).mT @ deviation / 2


def _moved(attention: SA, q: Tensor, i: Tensor, cloud: Tensor) -> tuple[Tensor, Tensor]:
    """The cloud with token i at q, and its attention weights."""
    tokens = torch.where((torch.arange(len(cloud)) == i)[:, None], q, cloud)
    return tokens, (attention.beta * (tokens @ q)).softmax(-1)


def inverse_on_range(sigma: Tensor, tol: float) -> Tensor:
    """The pseudo-inverse; eigenvalues up to ``tol`` of the largest count as 0."""
    inverse: Tensor = torch.linalg.pinv(sigma, rtol=tol, hermitian=True)
    return inverse


def range_projection(sigma: Tensor, tol: float) -> Tensor:
    """The orthogonal projection to the range of Sigma."""
    return sigma @ inverse_on_range(sigma, tol)
