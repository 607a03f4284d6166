"""sharp-unstable: perturbations of high frequency along the tokens do more damage than those of low frequency."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Inconclusive, PairedDifferences, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced, spaced_layers
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.observe.attention_temperature_damage import attention_temperature_damage
from helmscope.observe.fourier_band_damage import fourier_band_damage
from helmscope.stats.scales import LogScale

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

LOG = LogScale()


@experiment("sharp-unstable", seconds={"model": 150})
def sharp_unstable(case: TrialCase) -> Finding:
    """The ratio of the damage of high-frequency perturbations to that of low-frequency ones of equal norm per prompt,
    at the input of several layers; its geometric mean over them, one value per prompt. Described: the same with equal
    norms at every token, and the damage of sharper over that of more diffuse attention.
    """
    prompts = prompts_or_finding(
        case, "lens", "resume", "kernel", causal=True, head=True, length=case.constant("tokens")
    )
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    layers = spaced_layers(recording, case.count(case.constant("layers"), quick=case.constant("layers_quick")))
    damage = _damage(recording, case, layers, "low", "high", "high again")
    ratio = _ratio(damage, "high", "low")
    silent = _damage(silenced(recording), case, layers[-1:], "low", "high")
    contrast = TwinContrast(ratio, _twins(case, prompts.texts[: _twin_prompts(case)], layers))
    described = contrast.described("damage ratio")
    described["log of the damage ratio"] = PairedDifferences(np.log(ratio), "prompts")
    if not case.quick:
        matched = _damage(recording, case, layers, "low", "high", per_token=True)
        described["damage ratio, norms equal at every token"] = _evidence(_ratio(matched, "high", "low"))
    temperature = _temperature(recording, case.constant("temperature_factor"))
    return Finding(
        evidence={"damage ratio": _evidence(ratio), "temperature": temperature},
        controls={
            "blocks that write nothing": _evidence(_ratio(silent, "high", "low")),
            "high against high": _evidence(_ratio(damage, "high again", "high")),
        },
        described=described,
        data=_curves(damage),
        remark=_remark(damage, contrast, quick=case.quick),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each; perturbed at the input of layers "
        f"{', '.join(map(str, layers))}, {damage.attrs['draws']} draws each; twins on {contrast.twins.shape[1]} of the "
        "prompts",
        undecided_because=prompts.alike,
    )


def _damage(
    recording: Recording, case: TrialCase, layers: list[int], *names: str, per_token: bool = False
) -> xr.Dataset:
    """The damage of perturbations of the low band, the high band, and of independent draws of it."""
    bands = {name: case.constant("low_band" if name == "low" else "high_band") for name in names}
    return fourier_band_damage(
        recording,
        bands=bands,
        relative_norm=case.constant("relative_norm"),
        layers=layers,
        draws=case.count(case.constant("seeds"), quick=case.constant("seeds_quick")),
        per_token=per_token,
        seed=case.seed_for(0),
        progress=False,
    )


def _ratio(damage: xr.Dataset, over: str, under: str) -> np.ndarray:
    """The ratio of the damages of two bands, the geometric mean over layers, by prompt."""
    logs = np.log(damage.kl.sel(band=over).values) - np.log(damage.kl.sel(band=under).values)
    return np.asarray(np.exp(logs.mean(0)))


def _evidence(values: np.ndarray) -> Evidence:
    return Replicates(values, "prompts", scale=LOG)


def _twin_prompts(case: TrialCase) -> int:
    return int(case.constant("twin_prompts_quick" if case.quick else "twin_prompts"))


def _twins(case: TrialCase, texts: tuple[object, ...], layers: list[int]) -> np.ndarray:
    """Damage ratios of the untrained twins, over (twin, prompt)."""
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=texts)
    return np.stack([_ratio(_damage(each, case, layers, "low", "high"), "high", "low") for each in twins])


def _temperature(recording: Recording, factor: float) -> Evidence:
    """The damage with the logits of attention in all layers times ``factor``, over that with them divided by it."""
    temperatures = [1 / factor, factor]
    sharper, diffuse = attention_temperature_damage(recording, temperatures=temperatures, progress=False).kl.values
    if not ((sharper > 0) & (diffuse > 0)).all():
        return Inconclusive("there are prompts on which the scale of the logits of attention changes no prediction")
    return _evidence(sharper / diffuse)


def _curves(damage: xr.Dataset) -> xr.Dataset:
    """The damage by layer and band."""
    bands = ["low", "high"]
    values = damage.kl.sel(band=bands).transpose("prompt", "layer", "band").values
    label = "KL divergence of the next-token distribution (nats)"
    return curve("kl", values, {"layer": damage.layer.values.tolist(), "band": bands}, label=label, over="prompt")


def _remark(damage: xr.Dataset, contrast: TwinContrast, *, quick: bool) -> str:
    low, high = (damage.kl.sel(band=band).mean("prompt").values for band in ("low", "high"))
    ratios = high / low
    twins = float(np.exp(np.log(contrast.twins).mean()))
    left_out = " Norms equal at every token: not tried in quick." if quick else ""
    return (
        f"Damage at low frequency is {low.min():.3g} to {low.max():.3g} nats over layers, and that at high frequency "
        f"{ratios.min():.2f} to {ratios.max():.2f} times as large. In untrained twins it is {twins:.2f} times as "
        f"large.{left_out}"
    )
