"""early-fragile: early layers are fragile and late layers robust to ablation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.rank_correlation import SpearmanCorrelation, jackknife_values, spearman
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.observe.layer_ablation_damage import AblationKind, LayerPart, layer_ablation_damage
from helmscope.stats.change_point import change_point_errors
from helmscope.stats.scales import BoundedScale, LogScale

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

NOISE = AblationKind.NOISE
CORRELATION = BoundedScale((-1.0, 1.0))
NO_RANGE = "noise does the same damage in every layer, so that there is no correlation with depth"


@experiment("early-fragile", seconds={"model": 130})
def early_fragile(case: TrialCase) -> Finding:
    """Spearman's correlation, over the layers without the skipped ones, of depth and of the divergence of the
    next-token distribution under noise of matched relative norm; the mean over prompts and draws of noise. Its interval
    is that of independent layers (``spearman_interval``).

    Described: zero and mean ablation, half-layers, the loss, what later layers repair, the first prompts' values of
    untrained twins, and the held-out error of a change-point in the logarithm of the damage over that of a trend.
    """
    prompts = prompts_or_finding(
        case, "lens", "resume", "trajectory", causal=True, head=True, length=case.constant("tokens")
    )
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    layers = _layers(case, recording)
    if len(layers) < case.constant("least_layers"):
        least = case.constant("least_layers")
        return Finding.impossible(f"the replicates are layers, of which it needs {least}, and has {len(layers)}")
    kinds = [AblationKind.ZERO, NOISE] if case.quick else list(AblationKind)
    parts = [LayerPart.LAYER] if case.quick else list(LayerPart)
    measured = _fragility(case, recording, kinds=kinds, parts=parts)
    whole = measured.sel(part=LayerPart.LAYER.value)
    damage = _damage(whole, layers)
    depth = np.array(layers, dtype=float)
    few = case.subject.record(prompts.texts[: _few(case)])
    return Finding(
        evidence={
            "matched correlation": _correlation(case, damage, depth),
            "change-point": _change_point(damage, depth),
        },
        controls={
            "blocks that write nothing": _correlation(case, _noise(case, silenced(few), layers), depth),
            "depth permuted over layers": _permuted(case, damage, depth),
            "planted fall": _planted(case, depth),
        },
        described=_described(case, measured, layers) | _twins(case, prompts.texts[: _few(case)], layers),
        data=_curves(whole),
        remark=_remark(case, whole, damage, layers),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each; blocks that write nothing and untrained "
        f"twins on {_few(case)} of them",
        undecided_because=prompts.alike,
    )


def _few(case: TrialCase) -> int:
    return int(case.constant("few_prompts_quick" if case.quick else "few_prompts"))


def _layers(case: TrialCase, recording: Recording) -> list[int]:
    return [layer for layer in recording.layers if layer not in case.constant("skipped_layers")]


def _fragility(
    case: TrialCase,
    recording: Recording,
    *,
    kinds: list[AblationKind],
    parts: list[LayerPart],
    draws: int | None = None,
) -> xr.Dataset:
    return layer_ablation_damage(
        recording,
        kinds=kinds,
        parts=parts,
        relative_norm=case.constant("relative_norm"),
        draws=draws or case.count(case.constant("draws"), quick=case.constant("draws_quick")),
        seed=case.seed_for(0),
        progress=False,
    )


def _damage(whole: xr.Dataset, layers: list[int], kind: AblationKind = NOISE, name: str = "kl") -> np.ndarray:
    """The mean over prompts, by layer."""
    return np.asarray(whole[name].sel(kind=kind.value, layer=layers).mean("prompt").values)


def _noise(case: TrialCase, recording: Recording, layers: list[int]) -> np.ndarray:
    """The damage of one draw of noise, by layer."""
    measured = _fragility(case, recording, kinds=[NOISE], parts=[LayerPart.LAYER], draws=1)
    return _damage(measured.sel(part=LayerPart.LAYER.value), layers)


def _varies(case: TrialCase, damage: np.ndarray) -> bool:
    return bool(np.ptp(damage) > case.constant("smallest_range") * abs(damage).max())


def _correlation(case: TrialCase, damage: np.ndarray, depth: np.ndarray) -> Evidence:
    """The rank correlation with depth of damage that varies over layers."""
    if not _varies(case, damage):
        return PremiseImpossible(NO_RANGE)
    return SpearmanCorrelation(damage, depth)


def _change_point(damage: np.ndarray, depth: np.ndarray) -> Evidence:
    """The held-out error of a change-point over that of a trend, as jackknife pseudo-values of its logarithm over the
    layers whose errors are summed.
    """
    if not (damage > 0).all():
        return PremiseImpossible("some layer does no damage when ablated, so that its logarithm is not defined")
    trend, step = change_point_errors(depth, np.log(damage))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = jackknife_values(lambda kept: float(np.log(step[kept].sum() / trend[kept].sum())), len(damage))
    if not np.isfinite(ratios).all():
        return PremiseImpossible("a trend or a change-point fits the damage without error, so that there is no ratio")
    return Replicates(np.exp(ratios), "layers", LogScale())


def _permuted(case: TrialCase, damage: np.ndarray, depth: np.ndarray) -> Evidence:
    """The correlation with depth permuted over layers, one value per permutation."""
    draw = np.random.default_rng(case.seed_for(1))
    values = [spearman(damage, draw.permutation(depth)) for _ in range(case.constant("permutations"))]
    return Replicates(values, "permutations") if np.isfinite(values).all() else PremiseImpossible(NO_RANGE)


def _planted(case: TrialCase, depth: np.ndarray) -> Evidence:
    """The correlation of a planted damage that falls from 1 to 0 over the layers, with noise."""
    noise = case.constant("planted_noise") * case.normal(len(depth), index=2).numpy()
    fall = np.linspace(1.0, 0.0, len(depth)) + noise
    return SpearmanCorrelation(fall, depth)


def _described(case: TrialCase, measured: xr.Dataset, layers: list[int]) -> dict[str, Evidence]:
    """Other forms, parts and measures, and the share of the change of the state that later layers repair."""
    depth, rows = np.array(layers, dtype=float), {}
    for part in measured.part.values.tolist():
        for kind in AblationKind:
            if kind.value not in measured.kind.values or (part == LayerPart.LAYER.value and kind is NOISE):
                continue
            damage = _damage(measured.sel(part=part), layers, kind)
            rows[f"correlation, {kind.value} ablation of {part}"] = _correlation(case, damage, depth)
    whole = measured.sel(part=LayerPart.LAYER.value)
    loss = _damage(whole, layers, NOISE, "loss_increase")
    rows["correlation of the increase of the loss, noise"] = _correlation(case, loss, depth)
    by_prompt = whole.kl.sel(kind=NOISE.value, layer=layers).transpose("prompt", "layer").values
    each = [spearman(values, depth) for values in by_prompt]
    if np.isfinite(each).all():
        rows["correlation, noise, prompt by prompt"] = Replicates(each, "prompts", CORRELATION)
    for kind in measured.kind.values.tolist():
        share = whole.repaired_share.sel(kind=kind, layer=layers[:-1]).mean("layer", skipna=False).values
        if np.isfinite(share).all():
            rows[f"share of the change that later layers repair, {kind}"] = Replicates(share, "prompts")
    return rows


def _twins(case: TrialCase, texts: tuple[object, ...], layers: list[int]) -> dict[str, Evidence]:
    """The correlation of untrained twins, under one draw of noise; one value per twin."""
    count = case.count(case.constant("twins"), quick=case.constant("twins_quick"))
    recordings = case.subject.twin_recordings(count, seed=case.seed, texts=texts)
    values = [spearman(_noise(case, each, layers), np.array(layers)) for each in recordings]
    if not np.isfinite(values).all():
        return {}
    return {"correlation, noise, untrained twins": Replicates(values, "twins", CORRELATION)}


def _curves(whole: xr.Dataset) -> xr.Dataset:
    values = whole.kl.transpose("prompt", "layer", "kind").values
    axes = {"layer": whole.layer.values.tolist(), "ablation": whole.kind.values.tolist()}
    return curve(
        "damage", values, axes, label="KL divergence of the next-token distribution (nats)", log=True, over="prompt"
    )


def _remark(case: TrialCase, whole: xr.Dataset, damage: np.ndarray, layers: list[int]) -> str:
    first = float(whole.kl.sel(kind=NOISE.value).isel(layer=0).mean())
    zero = _damage(whole, layers, AblationKind.ZERO)
    repaired = whole.repaired_share.sel(kind=NOISE.value, layer=layers[:-1]).mean("prompt")
    left_out = " Mean ablation, half-layers and more than one draw of noise: not tried in quick." if case.quick else ""
    return (
        f"Without layer {', '.join(map(str, case.constant('skipped_layers')))} the damage of noise runs from "
        f"{damage.min():.3g} nats (layer {layers[int(damage.argmin())]}) to {damage.max():.3g} (layer "
        f"{layers[int(damage.argmax())]}), that of the first layer is {first:.3g}; zero ablation does from "
        f"{zero.min():.3g} to {zero.max():.3g}. Of the change of the state under noise later layers repair a share "
        f"from {float(repaired.min()):.2f} to {float(repaired.max()):.2f}.{left_out}"
    )
