"""qk-metric: W_Q^T W_K acts as a metric, and attention as a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.evidence import PairedDifferences, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import choose_prompts
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.models.keep import KeptTensors
from helmscope.observe.query_key_metric import head_matrices, holonomy_defect, query_key_metric, symmetric_share
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording
    from helmscope.observe.query_key_metric import HeadMatrices

NO_HEADS = "no head writes anything, so that nothing is transported"
MIN_HEADS = 2


@experiment("qk-metric", seconds={"model": 120})
def qk_metric(case: TrialCase) -> Finding:
    """Symmetric share of M = W_Q^T W_K, one value per head, with the gain of the norm folded in; heads of a layer that
    writes nothing are left out, and those of tied layers count once. Described: signature, alignment with W_O W_V, and
    the holonomy defect, one value per prompt.
    """
    if case.subject.is_simulation:
        return Finding.impossible("the claim needs a model, but the subject is a simulation")
    texts, _ = choose_prompts(
        case.count(case.constant("prompts"), quick=case.constant("prompts_quick")),
        case.subject,
        length=case.constant("tokens"),
    )
    if not texts:
        return Finding.inconclusive(f"the claim needs a text of {case.constant('tokens')} tokens")
    try:
        forms = head_matrices(case.subject.record(texts[:1]))
    except HelmscopeError as error:
        return Finding.impossible(str(error))
    recording = case.subject.record(texts)
    layers = _writing_layers(recording)
    if not layers or len(layers) * len(forms[0].queries) < MIN_HEADS:
        return Finding.impossible(NO_HEADS if not layers else "one head has no interval, and the replicates are heads")
    metric = query_key_metric(recording)
    share = _by_head(metric.symmetric_share, layers)
    same = [(form.queries, form.queries) for form in forms]
    twins = list(case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=texts[:1]))
    of_twins = np.mean([_by_head(query_key_metric(twin).symmetric_share, layers) for twin in twins], 0)
    silent = silenced(recording)
    return Finding(
        evidence={
            "symmetric share": Replicates(share, "heads"),
            "above the twins": PairedDifferences(share - of_twins, "heads"),
        },
        controls={
            "blocks that write nothing": _of_writing_heads(silent, metric),
            "random factors": PairedDifferences(_random_shares(case, forms, layers) - of_twins, "heads"),
            "keys equal to queries": Replicates(_shares(same, layers), "heads"),
        },
        described=_described(metric, layers) | _loops(case, recording, texts, layers),
        remark=_remark(metric, of_twins, layers, forms[layers[0]].dim),
        setting=f"weights of the model, {len(share)} heads; transport on {len(texts)} prompts",
    )


def _writing_layers(recording: Recording) -> list[int]:
    """The layers whose attention writes something, the last of those that share their weights."""
    writes = recording.under(keep=KeptTensors.WRITES).kept["attention write"]
    layers = recording.anatomy.layers
    last = {id(layer.block): number for number, layer in enumerate(layers)}
    return [number for number in sorted(last.values()) if bool((writes[number] != 0).any())]


def _by_head(values: xr.DataArray, layers: list[int]) -> np.ndarray:
    return np.asarray(values.sel(layer=layers).values).ravel()


def _of_writing_heads(recording: Recording, metric: xr.Dataset) -> Evidence:
    """The share of the heads that write something under the edits of a recording."""
    layers = _writing_layers(recording)
    return Replicates(_by_head(metric.symmetric_share, layers), "heads") if layers else PremiseImpossible(NO_HEADS)


def _shares(factors: list[tuple[torch.Tensor, torch.Tensor]], layers: list[int]) -> np.ndarray:
    return np.concatenate([symmetric_share(*factors[layer]).cpu().numpy() for layer in layers])


def _random_shares(case: TrialCase, forms: list[HeadMatrices], layers: list[int]) -> np.ndarray:
    """Shares of factors of the same shapes with independent normal entries, on the space that heads read."""
    factors = []
    for number, form in enumerate(forms):
        shape = (*form.queries.shape[:2], form.dim)
        factors.append((case.normal(*shape, index=2 * number), case.normal(*shape, index=2 * number + 1)))
    return _shares(factors, layers)


def _described(metric: xr.Dataset, layers: list[int]) -> dict[str, Evidence]:
    heads = metric.sel(layer=layers)
    names = {
        "share of negative eigenvalues in |S|^2": "negative_eigenvalue_share",
        "positive eigenvalues of S": "positive_eigenvalue_count",
        "negative eigenvalues of S": "negative_eigenvalue_count",
        "alignment of W_Q^T W_K with W_O W_V": "qk_ov_alignment",
    }
    described: dict[str, Evidence] = {
        label: Replicates(np.asarray(heads[name].values).ravel(), "heads") for label, name in names.items()
    }
    excess = _by_head(metric.symmetric_share - metric.symmetric_share_null, layers)
    return described | {"symmetric share minus that of random matrices": Replicates(excess, "heads")}


def _loops(case: TrialCase, recording: Recording, texts: tuple[object, ...], layers: list[int]) -> dict[str, Evidence]:
    """The holonomy defect of the model and of untrained twins, the mean over layers."""
    triangles = case.count(case.constant("triangles"), quick=case.constant("triangles_quick"))
    described: dict[str, Evidence] = {}
    twins = case.subject.twin_recordings(case.constant("loop_twins"), seed=case.seed, texts=texts)
    for name, each in {"holonomy defect": recording, "holonomy defect, untrained twin": next(iter(twins))}.items():
        found = holonomy_defect(each, triangles=triangles, layers=layers, seed=case.seed_for(0), progress=False)
        values = found.holonomy_defect.mean("layer").values
        if np.isfinite(values).sum() > 1:
            described[name] = Replicates(values[np.isfinite(values)], "prompts")
    return described


def _remark(metric: xr.Dataset, of_twins: np.ndarray, layers: list[int], dim: int) -> str:
    share, negative = (_by_head(metric[name], layers) for name in ("symmetric_share", "negative_eigenvalue_share"))
    indefinite = int(
        (
            (_by_head(metric.positive_eigenvalue_count, layers) > 0)
            & (_by_head(metric.negative_eigenvalue_count, layers) > 0)
        ).sum()
    )
    return (
        f"The symmetric share of the heads runs from {share.min():.3f} to {share.max():.3f}; that of random matrices "
        f"is {(dim + 1) / (2 * dim):.4f} on {dim} dimensions, and the twins have {of_twins.mean():.4f}. "
        f"In {indefinite} of {len(share)} heads the symmetric part has eigenvalues of both signs, so that it is no "
        f"metric; the negative ones have a share of {negative.min():.2f} to {negative.max():.2f} in its square."
    )
