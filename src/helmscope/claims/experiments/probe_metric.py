"""probe-metric: noise on keys does more damage than equally strong noise on queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PairedDifferences, PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.intervene.query_key import GaugeTransform, MatchedQueryNoise
from helmscope.intervene.weight_noise import WeightNoise
from helmscope.observe.noise_ratio import query_key_noise_at_equal_kl, query_key_noise_ratio, query_key_noise_slope
from helmscope.observe.query_key_noise import NoiseKind, query_key_noise, query_key_noise_by_layer
from helmscope.stats.scales import LogScale
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

NO_DAMAGE = "noise on the queries does no damage, so that there is no ratio"
SILENT_PROMPTS = 2
OTHER_KINDS = (NoiseKind.RELATIVE, NoiseKind.WEIGHTS, NoiseKind.RELATIVE_WEIGHTS, NoiseKind.MIXED_STATES)
OF_WEIGHTS = OTHER_KINDS[1:]


@experiment("probe-metric", seconds={"model": 600})
def probe_metric(case: TrialCase) -> Finding:
    """KL of the next-token distribution under noise on the keys over that under noise on the queries, in all layers at
    once: the ratio of the means over draws, one per prompt. The matched form decides; the others are described.
    """
    prompts = prompts_or_finding(case, "lens", causal=True, head=True, length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    refused = _unsupported(case.subject.record(prompts.texts[:SILENT_PROMPTS]))
    if refused is not None:
        return Finding.impossible(refused)
    recording = case.subject.record(prompts.texts)
    matched, printed = _matched(case, recording), _as_printed(case, recording)
    deciding = matched.sel(sigma=case.constant("deciding_sigma"))
    ratio = query_key_noise_ratio(deciding).values
    if not np.isfinite(ratio).all():
        return Finding.impossible(NO_DAMAGE)
    others, left_out = _other_forms(case, recording)
    contrast = _twins(case, prompts.texts, ratio)
    by_draw = query_key_noise_ratio(deciding, over="prompt").values
    printed_ratio = query_key_noise_ratio(printed)
    return Finding(
        evidence={"matched ratio": Replicates(ratio, "prompts", LogScale())},
        controls={
            "blocks that write nothing": _silent(case, case.subject.record(prompts.texts[:SILENT_PROMPTS])),
            "query noise against query noise": Replicates(_same_side(deciding), "prompts", LogScale()),
            **_gauge(case, recording, matched, printed),
            "slope of damage": _slopes(case, matched),
        },
        described={
            "matched ratio, over draws": Replicates(by_draw, "draws", LogScale()),
            **_at_every_size("matched", matched),
            **_at_every_size("as printed, activations", printed),
            **_described_forms(others, matched),
            **_kinds(matched),
            **contrast.described("log ratio, matched"),
        },
        printed=ReplicatesInEveryCase(
            [printed_ratio.sel(sigma=sigma).values for sigma in case.constant("sigmas")],
            "prompts",
            [f"sigma = {sigma:g}" for sigma in case.constant("sigmas")],
            LogScale(),
        ),
        data=_curves(printed),
        remark=_remark(case, printed, contrast, recording, left_out),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each; {deciding.sizes['draw']} paired draws",
        undecided_because=prompts.alike,
    )


def _unsupported(recording: Recording) -> str | None:
    """Why noise on queries and keys cannot be matched in this model."""
    try:
        MatchedQueryNoise.of(recording, relative_sigma=1.0)
    except HelmscopeError as error:
        return str(error)
    return None


def _matched(case: TrialCase, recording: Recording) -> xr.Dataset:
    sigmas = case.constant("slope_sigmas") if case.quick else case.constant("sigmas")
    count = case.count(case.constant("seeds"), quick=case.constant("seeds_quick"))
    return _noise(case, recording, [NoiseKind.MATCHED], sigmas, count).sel(kind=NoiseKind.MATCHED.value)


def _as_printed(case: TrialCase, recording: Recording) -> xr.Dataset:
    count = case.count(case.constant("seeds"), quick=case.constant("printed_seeds_quick"))
    noise = _noise(case, recording, [NoiseKind.ACTIVATIONS], case.constant("sigmas"), count)
    return noise.sel(kind=NoiseKind.ACTIVATIONS.value)


def _noise(
    case: TrialCase, recording: Recording, kinds: list[NoiseKind], sigmas: tuple[float, ...], seeds: int
) -> xr.Dataset:
    """All calls have the same seeds, so that draws are paired between forms and with the gauge."""
    first = case.seed_for(0)
    return query_key_noise(recording, kinds=kinds, sigmas=sigmas, draws=seeds, seed=first, progress=False)


def _same_side(noise: xr.Dataset) -> np.ndarray:
    """The damage of noise on queries in one half of the draws over that in the other half."""
    kl, half = noise.kl.sel(site="query"), noise.sizes["draw"] // 2
    first, second = (kl.isel(draw=part).mean("draw") for part in (slice(half), slice(half, 2 * half)))
    return np.asarray((first / second).values)


def _gauge(case: TrialCase, recording: Recording, matched: xr.Dataset, printed: xr.Dataset) -> dict[str, Evidence]:
    """The ratios after the gauge over those before it, at the smallest size, on the same draws."""
    count = case.count(case.constant("gauge_seeds"), quick=case.constant("gauge_seeds_quick"))
    smallest = min(case.constant("sigmas"))
    gauged = recording.under(GaugeTransform(factor=case.constant("gauge")))
    after = _noise(case, gauged, [NoiseKind.MATCHED, NoiseKind.ACTIVATIONS], (smallest,), count)
    before = (noise.sel(sigma=smallest).isel(draw=slice(count)) for noise in (matched, printed))
    ratios = [
        (query_key_noise_ratio(after.sel(kind=kind, sigma=smallest)) / query_key_noise_ratio(noise)).values
        for kind, noise in zip(after.kind.values, before, strict=True)
    ]
    return {
        "gauge, matched form": Replicates(ratios[0], "prompts"),
        "gauge, printed form": Replicates(ratios[1], "prompts", LogScale()),
    }


def _slopes(case: TrialCase, matched: xr.Dataset) -> Evidence:
    slope = query_key_noise_slope(matched.sel(sigma=list(case.constant("slope_sigmas"))))
    sites = ("query", "key")
    return ReplicatesInEveryCase(
        [slope.sel(site=site).values for site in sites], "prompts", [f"{site} noise" for site in sites]
    )


def _silent(case: TrialCase, recording: Recording) -> Evidence:
    """The ratio where blocks write nothing."""
    silent = silenced(recording)
    sigma = (case.constant("deciding_sigma"),)
    ratio = query_key_noise_ratio(_noise(case, silent, [NoiseKind.MATCHED], sigma, 1)).values.ravel()
    return Replicates(ratio, "prompts", LogScale()) if np.isfinite(ratio).all() else PremiseImpossible(NO_DAMAGE)


def _twins(case: TrialCase, texts: tuple[object, ...], ratio: np.ndarray) -> TwinContrast:
    """The logarithm of the ratio beside that of the untrained twins."""
    some = texts[: case.count(case.constant("twin_prompts"), quick=case.constant("twin_prompts_quick"))]
    count = case.count(case.constant("twin_seeds"), quick=case.constant("twin_seeds_quick"))
    twins = case.count(case.constant("twins"), quick=case.constant("twins_quick"))
    sigma = (case.constant("deciding_sigma"),)
    found = [
        query_key_noise_ratio(_noise(case, twin, [NoiseKind.MATCHED], sigma, count)).values.ravel()
        for twin in case.subject.twin_recordings(twins, seed=case.seed, texts=some)
    ]
    return TwinContrast(np.log(ratio), np.log(np.stack(found)))


def _other_forms(case: TrialCase, recording: Recording) -> tuple[xr.Dataset | None, str]:
    """Noise in the other forms, and what is left out; forms of weights only where the matrices can be read."""
    if case.quick:
        return None, "Noise on weights, relative noise, single layers and the largest matched size: not tried in quick."
    kinds, left_out = list(OTHER_KINDS), ""
    try:
        WeightNoise.of(recording)
    except HelmscopeError as error:
        kinds, left_out = [NoiseKind.RELATIVE], f"Noise on weights is left out: {error}."
    return _noise(case, recording, kinds, case.constant("sigmas"), case.constant("seeds")), left_out


def _at_every_size(name: str, noise: xr.Dataset) -> dict[str, Evidence]:
    ratio = query_key_noise_ratio(noise)
    return {
        f"ratio, {name}, sigma = {sigma:g}": Replicates(ratio.sel(sigma=sigma).values, "prompts", LogScale())
        for sigma in noise.sigma.values.tolist()
    }


def _described_forms(others: xr.Dataset | None, matched: xr.Dataset) -> dict[str, Evidence]:
    """The ratios in the other forms; noise on centered keys is that of the matched form, against relative noise on the
    queries.
    """
    if others is None:
        return {}
    found: dict[str, Evidence] = {}
    for kind in others.kind.values.tolist():
        name = "as printed, weights" if kind == NoiseKind.WEIGHTS.value else kind
        found |= _at_every_size(name, others.sel(kind=kind))
    pair = [others.sel(kind=NoiseKind.RELATIVE.value, site="query", drop=True), matched.sel(site="key", drop=True)]
    centered = xr.concat([each[["kl"]] for each in pair], "site", coords="minimal", compat="override")
    return found | _at_every_size(NoiseKind.CENTERED.value, centered.assign_coords(site=["query", "key"]))


def _kinds(matched: xr.Dataset) -> dict[str, Evidence]:
    """What noise on keys does minus what noise on queries does, at equal KL."""
    equal = query_key_noise_at_equal_kl(matched)
    kinds = [str(name) for name in equal.data_vars if name != "equal_kl"]
    differences = {kind: equal[kind].sel(site="key") - equal[kind].sel(site="query") for kind in kinds}
    return {
        f"{kind.replace('_', ' ')} at equal KL, keys minus queries": PairedDifferences(found.values, "prompts")
        for kind, found in ((kind, values.dropna("prompt")) for kind, values in differences.items())
        if found.size > 1
    }


def _curves(printed: xr.Dataset) -> xr.Dataset:
    """KL against sigma, as printed."""
    values = printed.kl.mean("draw").transpose("prompt", "sigma", "site").values
    axes = {"sigma": printed.sigma.values.tolist(), "noise on": printed.site.values.tolist()}
    return curve(
        "kl", values, axes, label="KL of the next-token distribution, as printed (nats)", log=True, over="prompt"
    )


def _remark(case: TrialCase, printed: xr.Dataset, contrast: TwinContrast, recording: Recording, left_out: str) -> str:
    kl, cells = printed.kl.mean(("draw", "prompt")), []
    for sigma in printed.sigma.values.tolist():
        query, key = (float(kl.sel(sigma=sigma, site=site)) for site in ("query", "key"))
        cells.append(f"{query:.2g} and {key:.2g} at {sigma:g}")
    layers = ""
    if not case.quick:
        sigma, count = case.constant("deciding_sigma"), case.constant("layer_seeds")
        one = query_key_noise_by_layer(recording, sigma=sigma, draws=count, seed=case.seed_for(0), progress=False)
        by_layer = np.exp(np.log(query_key_noise_ratio(one).values).mean(-1))
        layers = f" In single layers the matched ratio runs from {by_layer.min():.2f} to {by_layer.max():.2f}."
    return (
        f"As printed, noise on queries and on keys has the mean KL {', '.join(cells)}. Untrained twins have the "
        f"matched ratio {np.exp(contrast.twins.mean()):.2f}.{layers} {left_out}"
    ).strip()
