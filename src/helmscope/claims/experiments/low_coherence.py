"""low-coherence: W_in has rows of low coherence, W_out aligns with them, and aligned MLPs are more conservative."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.mlp_shares import MlpShares
from helmscope.claims.prompts import choose_prompts
from helmscope.claims.rank_correlation import mean_spearman, rank_correlation, spearman
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.intervene.arms import Arm, AttentionMode
from helmscope.models.bundled_models import ablated_training_history, is_bundled, training_history
from helmscope.observe.mlp_jacobian import MlpJacobian
from helmscope.observe.mlp_weights import gate_sparsity, mlp_weights
from helmscope.stats.scales import BoundedScale

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

PERMUTED = 100  # permutations of the shares over layers
MIN_LAYERS = 3
CORRELATION = BoundedScale((-1.0, 1.0))
ONE_BLOCK = "all layers share the weights of one block, and one layer has no interval"


@experiment("low-coherence", seconds={"model": 15})
@prints_premise
def low_coherence(case: TrialCase) -> Finding:
    """Replicates are layers. Alignment: mean |cos(w_j, v_j)| minus its mean over permuted pairs. Rank correlation: over
    the layers, of alignment with 1 minus the antisymmetric share of the MLP's Jacobian; for A its mean over the
    training snapshots of its sibling. Both grow during training, so that a correlation pooled over snapshots would be
    found also where layers have nothing to do with each other. Weights are those of the model, norms not folded in.
    """
    unmet = case.subject.unmet_premise("force", mlp=True)
    if unmet is not None:
        return Finding.impossible(unmet)
    prompts, _ = choose_prompts(case.count(32, quick=8), case.subject, gap=1)
    recording = case.subject.record(prompts)
    refused = recording.unsupported_reason(MlpJacobian())
    if refused is not None:
        return Finding.impossible(refused)
    weights = _weights(recording, case)
    shares = MlpShares.of(recording)
    if not shares.writes:
        return Finding.impossible("the MLPs write nothing, so that there is nothing for their rows to align with")
    excess = _excess(weights)
    ratio = _over_layers(weights.coherence_max / weights.coherence_gaussian)
    if len(excess) < MIN_LAYERS:
        return Finding.impossible(f"the replicates are layers, of which it needs {MIN_LAYERS}, and has {len(excess)}")
    if len({tuple(row) for row in np.stack([excess, ratio], -1).tolist()}) < 2:
        return Finding.impossible(
            f"{ONE_BLOCK}: alignment minus null {excess[0]:.3f}, coherence {ratio[0]:.2f} times Gaussian"
        )
    aligned, conservative, source = _alignment_and_share(case, weights, shares)
    sparsity, coherence = _sparsity_and_coherence(case, weights, recording)
    silent = recording.under(*Arm(AttentionMode.OFF, mlp=False).edits(recording))
    return Finding(
        evidence={
            "alignment": Replicates(excess, "layers"),
            "rank correlation": rank_correlation(aligned, conservative),
            "coherence": Replicates(ratio, "layers"),
            "sparsity and coherence": rank_correlation(sparsity, coherence),
        },
        controls={
            "untrained twins": _twins(case, prompts),
            "shares of other layers": _permuted(case, aligned, conservative),
            "blocks that write nothing": _alignment_or_reason(silent, case),
        },
        described=_described(weights, aligned, conservative),
        data=_curves(weights, shares),
        remark=_remark(weights, source),
        setting=f"weights of the model, {len(excess)} layers; Jacobians at the tokens of {len(prompts)} prompts",
    )


def _weights(recording: Recording, case: TrialCase) -> xr.Dataset:
    return mlp_weights(recording, permutations=case.constant("permutations"), seed=case.seed_for(0))


def _over_layers(values: xr.DataArray) -> np.ndarray:
    """One value per layer; that of a mixture is the mean over its experts."""
    return np.asarray((values.mean("expert") if "expert" in values.dims else values).values)


def _excess(weights: xr.Dataset) -> np.ndarray:
    return _over_layers(weights.neuron_alignment_absolute - weights.neuron_alignment_absolute_null)


def _alignment_and_share(case: TrialCase, weights: xr.Dataset, shares: MlpShares) -> tuple[np.ndarray, np.ndarray, str]:
    """Alignment and conservative share over (layer, snapshot), and where they come from."""
    if case.subject.model == "A":
        history = ablated_training_history()
        share = 1 - history.antisymmetric_share.mean("prompt")
        tables = [
            np.asarray(each.transpose("layer", "step").values) for each in (abs(history.neuron_alignment_mean), share)
        ]
        return tables[0], tables[1], f"{history.sizes['step']} snapshots of a sibling of A"
    share_now = 1 - shares.shares("antisymmetric_share").mean(1)
    return (
        _over_layers(weights.neuron_alignment_absolute)[:, None],
        share_now[:, None],
        "the layers of the trained model",
    )


def _sparsity_and_coherence(
    case: TrialCase, weights: xr.Dataset, recording: Recording
) -> tuple[np.ndarray, np.ndarray]:
    """Gate sparsity and coherence of W_in over (layer, snapshot)."""
    if is_bundled(case.subject.model):
        history = training_history(case.subject.model)
        if "block" not in history.sizes:  # the axis of model tied, whose layers share one block
            coherence = history.coherence_max.transpose("layer", "step").values
            return np.asarray(history.gate_sparsity.transpose("layer", "step").values), np.asarray(coherence)
    now = gate_sparsity(recording).gate_sparsity.mean("prompt").values
    return np.asarray(now)[:, None], _over_layers(weights.coherence_max)[:, None]


def _permuted(case: TrialCase, aligned: np.ndarray, share: np.ndarray) -> Replicates | PremiseImpossible:
    """The rank correlation of each layer's alignment with the share of another layer, the same one in all snapshots;
    one value per permutation of the layers.
    """
    draw = np.random.default_rng(case.seed_for(1))
    values = [mean_spearman(aligned, draw.permutation(share)) for _ in range(PERMUTED)]
    return Replicates(values, "permutations") if np.isfinite(values).all() else PremiseImpossible("shares do not vary")


def _twins(case: TrialCase, prompts: tuple[object, ...]) -> Replicates:
    """The alignment of untrained twins minus its null: one value per twin, the mean over its layers."""
    recordings = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts[:1])
    return Replicates([_excess(_weights(each, case)).mean() for each in recordings], "twins")


def _alignment_or_reason(recording: Recording, case: TrialCase) -> Replicates | PremiseImpossible:
    """The alignment of MLPs that write something."""
    if not MlpShares.of(recording).writes:
        return PremiseImpossible("MLPs that write nothing align with nothing")
    return Replicates(_excess(_weights(recording, case)), "layers")


def _described(weights: xr.Dataset, aligned: np.ndarray, share: np.ndarray) -> dict[str, Evidence]:
    by_layer: dict[str, Evidence] = {
        "mean cosine of a neuron's input and output weights": Replicates(
            _over_layers(weights.neuron_alignment_mean), "layers"
        ),
        "coherence over the Welch bound": Replicates(
            _over_layers(weights.coherence_max / weights.welch_bound), "layers"
        ),
    }
    if aligned.shape[1] > 2:
        within = [spearman(a, s) for a, s in zip(aligned, share, strict=True)]
        by_layer["rank correlation over training, layer by layer"] = Replicates(within, "layers", CORRELATION)
        last = rank_correlation(aligned[:, -1:], share[:, -1:])
        by_layer["rank correlation over layers at the last snapshot"] = last
    return by_layer


def _curves(weights: xr.Dataset, shares: MlpShares) -> xr.Dataset:
    """Conservative share by layer; the replicates are prompts."""
    values = 1 - shares.shares("antisymmetric_share")
    label = "conservative share of the MLP's Jacobian"
    return curve("conservative_share", values.T, {"layer": weights.layer.values.tolist()}, label=label, over="prompt")


def _remark(weights: xr.Dataset, source: str) -> str:
    largest, gaussian, welch = (
        _over_layers(weights[name]) for name in ("coherence_max", "coherence_gaussian", "welch_bound")
    )
    cosine, null = _over_layers(weights.neuron_alignment_absolute), _over_layers(weights.neuron_alignment_absolute_null)
    return (
        f"The largest |cos| of two rows of W_in runs from {largest.min():.2f} to {largest.max():.2f}, against "
        f"{gaussian.mean():.2f} for Gaussian rows and {welch.mean():.3f}, the Welch bound. The mean |cos(w, v)| runs "
        f"from {cosine.min():.3f} to {cosine.max():.3f}, against {null.mean():.3f} for permuted pairs. The rank "
        f"correlation is that of {source}."
    )
