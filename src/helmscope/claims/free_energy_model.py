"""free-energy-descends on a model: the change of F over every half-step, with nu and U of its block frozen."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import EverySample, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import ChosenPrompts
from helmscope.claims.small_steps import silenced, small_steps_premise
from helmscope.observe.free_energy import free_energy_along_depth, free_energy_refusal
from helmscope.types import Attachment

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.claims.registry import TrialCase

TWIN_PROMPTS = 16
CURVES = {"measured": "", "predicted": "predicted_", "predicted, Gaussian": "gaussian_predicted_"}


def free_energy_of_model(case: TrialCase) -> Finding:
    """Delta F = -nu Delta H - E[Delta U] / r over every half-step of a model, nu and U those of its block, with the
    Gaussian entropy of all tokens of all prompts; jackknife pseudo-values over prompts.

    Real attention is deterministic: nu is how fast directions would diffuse if each head drew one key, and an attention
    half-step is judged in the landscape U of the MLP that follows it.

    >>> from helmscope.claims.registry import registered_case
    >>> from helmscope.models.subject import Subject
    >>> few = registered_case("free-energy-descends", subject=Subject("A", ["Once upon a time", "The cat sat"]))
    >>> free_energy_of_model(few).evidence.reason[:39]
    'the claim needs 32 different texts, eac'
    """
    unmet = case.subject.unmet_premise("trajectory", "on_sphere", "kernel", "replay", "force", mlp=True)
    if unmet is not None:
        return Finding.impossible(unmet)
    prompts = ChosenPrompts.of(case, gap=1)
    if prompts.too_few:
        return Finding.undecided(prompts.too_few)
    recording = case.subject.recording_of(prompts.texts)
    refused = free_energy_refusal(recording)
    if refused is not None:
        return Finding.impossible(refused)
    tokens = case.constant("tokens")
    measured = free_energy_along_depth(recording, tokens=tokens)
    if measured.attrs["undefined"] != "none":
        return Finding.undecided(f"the entropy of the tokens is not defined: {measured.attrs['undefined']}")
    silent = free_energy_along_depth(silenced(recording), tokens=tokens, predict=False)
    twins = _twins(case, prompts.texts)
    return Finding(
        shortage=prompts.alike,
        evidence={"change of F": _changes(measured)},
        controls={"blocks that write nothing": _changes(silent)},
        described=_described(measured, twins),
        printed=_changes(measured, printed=True),
        data=_curves(measured),
        remark=_remark(measured, small_steps_premise(case)),
        setting=f"{measured.attrs['sphere']}, U in the coordinates of the unit sphere over the "
        f"{measured.attrs['radius']}, Gaussian entropy in {measured.attrs['rank']} dimensions, {len(prompts)} prompts, "
        f"{tokens} tokens of each for U, first token left out",
        attachments=(Attachment(f"Certificate of {case.subject.name}", str(recording.certificate)),),
    )


def _changes(measured: xr.Dataset, *, printed: bool = False) -> EverySample:
    """The change of F over every half-step, or that of nu Ent + E[U] as printed."""
    values = measured.free_energy_change
    if printed:
        values = measured.entropy_term - measured.potential_term
    rows = values.transpose("depth", "prompt").values[1:]
    return EverySample(list(rows), "prompts", _names(measured))


def _names(measured: xr.Dataset) -> list[str]:
    depths, halves = measured.depth.values[1:], measured.half.values[1:]
    return [f"half-step {int(depth)} ({half})" for depth, half in zip(depths, halves, strict=True)]


def _twins(case: TrialCase, texts: tuple[Any, ...]) -> np.ndarray:
    """The share of half-steps at which the mean of F falls, of each untrained twin; NaN where it is undefined."""
    count = case.constant("twins")
    recordings = case.subject.twin_recordings(count, seed=case.seed, texts=texts[:TWIN_PROMPTS])
    tokens = case.constant("tokens")
    found = (free_energy_along_depth(each, tokens=tokens, predict=False) for each in islice(recordings, count))
    return np.array([_falling(each) for each in found])


def _falling(measured: xr.Dataset) -> float:
    means = measured.free_energy_change.mean("prompt").values[1:]
    return float((means < 0).mean()) if np.isfinite(means).all() else float("nan")


def _described(measured: xr.Dataset, twins: np.ndarray) -> dict[str, Evidence]:
    over = {
        f"change of F over all {half} half-steps": measured.free_energy_change.where(measured.half == half).sum("depth")
        for half in ("attention", "mlp")
    }
    over["change of the Gaussian entropy over all half-steps"] = measured.entropy_change.sum("depth")
    described: dict[str, Evidence] = {name: Replicates(values.values, "prompts") for name, values in over.items()}
    if np.isfinite(twins).all():
        described["share of half-steps at which F falls, untrained twins"] = Replicates(twins, "twins")
    return described


def _curves(measured: xr.Dataset) -> xr.Dataset:
    """F and entropy over depth, measured and predicted, and F as printed."""
    depths = measured.depth.values.tolist()
    families = [
        curve(
            name,
            np.stack([measured[f"{kind}{name}"].transpose("prompt", "depth").values for kind in CURVES.values()], -1),
            {"depth": depths, "curve": list(CURVES)},
            label=label,
            over="prompt",
        )
        for name, label in (("free_energy", "free energy F since depth 0"), ("entropy", "Gaussian entropy (nats)"))
    ]
    printed = curve(
        "free_energy_as_printed",
        measured.free_energy_as_printed.transpose("prompt", "depth").values,
        {"depth": depths},
        label="nu Ent + E[U]/r as printed; depends on each layer's constant",
        over="prompt",
    )
    return xr.merge([*families, printed], join="outer")


def _remark(measured: xr.Dataset, premise: str) -> str:
    means = measured.free_energy_change.mean("prompt").values[1:]
    names, attrs = _names(measured), measured.attrs
    return (
        f"The mean of F falls at {int((means < 0).sum())} of {len(means)} half-steps, most at {names[means.argmin()]} "
        f"({means.min():.3g}); it changes by {means.max():.3g} at {names[means.argmax()]}. What nu and U predict "
        f"differs from the measured changes by {attrs['predicted_free_energy_misfit']:.2g} times their size for F and "
        f"{attrs['predicted_entropy_misfit']:.2g} times for the entropy (with the Gaussian entropy "
        f"{attrs['gaussian_predicted_free_energy_misfit']:.2g} and {attrs['gaussian_predicted_entropy_misfit']:.2g}). "
        f"{premise}"
    ).strip()
