"""whitening: does rescaling by Sigma^(-1/2) turn a gradient drift with constant noise into a gradient flow? On a model,
the drift of the MLP in the Sigma_A of attention.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.attention_trials import AttentionTrial, by_prompt, every_layer, layer_means
from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import small_steps_premise
from helmscope.meanfield.whitening import whiten
from helmscope.observe.layer_whitening import SHARES, LayerWhitening

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

F64 = torch.float64
HESSIAN = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=F64)  # the counterexample
SIGMA = torch.diag(torch.tensor([1.0, 4.0], dtype=F64))


@experiment("whitening", seconds={"simulation": 2, "model": 17})
def whitening(case: TrialCase) -> Finding:
    """In simulation, random drifts -grad V and matrices Sigma; on a model, the MLP of every block and its Sigma_A."""
    return _simulated(case) if case.subject.is_simulation else _on_model(case)


def _simulated(case: TrialCase) -> Finding:
    """In the coordinates Sigma^(-1/2) x the Jacobian -S of a drift is -Sigma^(-1/2) S Sigma^(1/2). For -grad V, S is
    Hess V, which is symmetric before, but not after unless it commutes with Sigma; for -Sigma grad V, S = Sigma Hess V,
    it is the other way round.

    Random Hess V and Sigma = W W^T / d with Gaussian W (Sigma also of rank d/2 for d >= 4, where whitening is on its
    range); the first draw in two dimensions is the counterexample. The share is |A|^2 / |S|^2, A the antisymmetric
    part of S.
    """
    draws = case.count(128, quick=32)
    cells = [(d, rank) for d in case.constant("dims") for rank in sorted({d, d // 2}) if rank > 1]
    names = [f"d = {d}" if rank == d else f"d = {d}, rank {rank}" for d, rank in cells]
    gradient, carried, commuting = [], [], []
    for k, (d, rank) in enumerate(cells):
        hessian = _wishart(case.normal(draws, d, d, index=2 * k))
        sigma = _wishart(case.normal(draws, d, rank, index=2 * k + 1))
        if d == 2:
            hessian[0], sigma[0] = HESSIAN, SIGMA
        gradient.append(shares(hessian, sigma))
        carried.append(shares(sigma @ hessian, sigma))
        commuting.append(shares(sigma @ sigma + sigma, sigma))
    largest = max(float(after.max()) for _, after in commuting)
    changes = [after - before for before, after in gradient]
    table = torch.stack([torch.stack(pair, -1) for pairs in (gradient, carried) for pair in pairs], 1)
    whole = table.reshape(draws, 2, len(cells), 2).transpose(1, 2).flatten(2)
    return Finding(
        evidence={"change of the share": ReplicatesInEveryCase(changes, "draws", names)},
        controls={
            "drift -Sigma grad V": ReplicatesInEveryCase([after - before for before, after in carried], "draws", names),
            "counterexample": Replicates(turned_counterexample(case, draws), "rotations of the axes"),
        },
        described={
            "share if Hess V and Sigma commute": Replicates(torch.cat([after for _, after in commuting]), "draws")
        },
        data=curve(
            "share",
            whole,
            {"case": names, "drift": ("-grad V", "-grad V, whitened", "-Sigma grad V", "-Sigma grad V, whitened")},
            label="antisymmetric share of the drift's Jacobian",
        ),
        remark=f"Where Hess V and Sigma commute the share stays below {largest:.1g}.",
        setting=f"simulation: quadratic V with random Hess V and constant random Sigma, d = "
        f"{', '.join(map(str, case.constant('dims')))}, {draws} draws each",
    )


def _on_model(case: TrialCase) -> Finding:
    """The antisymmetric share of the Jacobian of the MLP's force on the tangent space, after whitening by the mean
    Sigma_A of a few tokens of the prompt minus before, on the range of that Sigma, at every block.

    The control whitens by a matrix with the same eigenvalues and random eigenvectors in that range. Described: how much
    Sigma_A varies over the tokens, and its commutator with Hess V, beside that of random eigenvectors.
    """
    trial = AttentionTrial.of(case)
    if trial.without_ruling is not None:
        return trial.without_ruling
    tokens = case.count(case.constant("tokens"), quick=case.constant("tokens_quick"))
    instrument = LayerWhitening(sampled_tokens=tokens, seed=case.seed, tol=case.constant("rank_tolerance"))
    refused = trial.recording.unsupported_reason(instrument)
    if refused is not None:
        return Finding.impossible(refused)
    found = trial.recording.replay(instrument)[instrument.name]

    def silent(recording: Recording) -> Evidence:
        return every_layer(recording.replay(instrument)[instrument.name].antisymmetric_share_change)

    return Finding(
        undecided_because=trial.chosen.alike,
        evidence={
            "change of the share": every_layer(found.antisymmetric_share_change),
            "variation of Sigma": _over_layers(found.sigma_variation),
            "commutator": _over_layers(found.commutator),
        },
        controls={
            "random eigenvectors": every_layer(found.antisymmetric_share_change_null),
            "blocks that write nothing": trial.silent_evidence(silent, "there is no Sigma to whiten by"),
        },
        described={
            "share before, mean over layers": _over_layers(found.antisymmetric_share_before),
            "share after, mean over layers": _over_layers(found.antisymmetric_share_after),
            "commutator with random eigenvectors, mean over layers": _over_layers(found.commutator_null),
        },
        data=curve(
            "share",
            np.stack([by_prompt(found[name]) for name in SHARES], -1),
            {"layer": found.layer.values.tolist(), "drift": ("MLP", "whitened", "whitened, random eigenvectors")},
            label="antisymmetric share of the MLP's Jacobian",
            over="prompt",
        ),
        remark=f"The share runs {layer_means(found.antisymmetric_share_before)} before and "
        f"{layer_means(found.antisymmetric_share_after)} after whitening, the variation of Sigma "
        f"{layer_means(found.sigma_variation)}, the commutator "
        f"{layer_means(found.commutator)} ({layer_means(found.commutator_null)} with random eigenvectors). "
        f"{small_steps_premise(case)}",
        setting=f"{trial.setting}; {tokens} tokens of each prompt",
    )


def _over_layers(values: xr.DataArray) -> Evidence:
    """The means over the layers of a described quantity, of the prompts that have one."""
    means = values.mean("layer").values
    if np.isfinite(means).sum() < 2:
        return PremiseImpossible("the quantity is defined for no prompt")
    return Replicates(means[np.isfinite(means)], "prompts")


def shares(drift: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The antisymmetric shares |A|^2 / |S|^2 of drifts -S x before and after whitening by Sigma, one per pair."""
    pairs = [whiten(s, noise) for s, noise in zip(drift, sigma, strict=True)]
    before = torch.tensor([pair.antisymmetric_share_before for pair in pairs], dtype=F64)
    return before, torch.tensor([pair.antisymmetric_share_after for pair in pairs], dtype=F64)


def turned_counterexample(case: TrialCase, count: int) -> list[float]:
    """|S'_12 - S'_21| / 2 of the whitened counterexample in turned axes, on which it does not depend: 0.375."""
    entries = []
    for angle in (math.pi * case.normal(count, index=100)).tolist():
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=F64)
        white = whiten(turn @ HESSIAN @ turn.mT, turn @ SIGMA @ turn.mT).stiffness
        entries.append(abs(float(white[0, 1] - white[1, 0])) / 2)
    return entries


def _wishart(root: Tensor) -> Tensor:
    return root @ root.mT / root.shape[-2]
