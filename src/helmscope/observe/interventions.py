"""The measurements that run a model under many edits, as ``measure(interventions=True)`` takes them, with the sizes of
a full and of a quick run, their cost, and what a quick run leaves out.

They take hundreds of forward passes, and so are measured only when they are asked for. With ``quick`` the same
quantities are measured in fewer layers, forms and draws; the attribute ``not_tried`` of each Measurement says what is
missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from helmscope.intervene.attention import Perturb
from helmscope.intervene.query_key import matching_unsupported
from helmscope.intervene.weight_noise import WeightNoise
from helmscope.models.recording import Recording
from helmscope.models.sites import Site
from helmscope.observe.attention_temperature_damage import attention_temperature_damage
from helmscope.observe.cloud_projection import cloud_projection, cloud_too_small, cloud_unsupported
from helmscope.observe.fourier_band_damage import BANDS, check_texts, fourier_band_damage
from helmscope.observe.head_ablation_damage import head_ablation_damage, head_interaction
from helmscope.observe.layer_ablation_damage import AblationKind, LayerPart, layer_ablation_damage
from helmscope.observe.loss import heads_to_ablate
from helmscope.observe.loss_gradient_cosine import SCALES, loss_gradient_cosine
from helmscope.observe.noise_ratio import query_key_noise_ratio, query_key_noise_summary
from helmscope.observe.query_key_edit_damage import EditStrength, query_key_edit_damage
from helmscope.observe.query_key_metric import (
    head_matrices,
    holonomy_defect,
    query_key_metric,
    triangles_unsupported,
)
from helmscope.observe.query_key_noise import OF_WEIGHTS, PAIRED, NoiseKind, query_key_noise, query_key_noise_by_layer
from helmscope.observe.scoring import scoring_unsupported
from helmscope.observe.sink_damage import prompts_unsupported, sink_damage
from helmscope.observe.sinks import AttentionSinks, TokenValues, attention_sinks, sink_constancy
from helmscope.observe.standalone import StandaloneMeasurement
from helmscope.types import HelmscopeError, check_progress, pluralized, sub_progress, type_with_article

if TYPE_CHECKING:
    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

INTERVENTIONS = (
    "query_key_noise",
    "query_key_noise_by_layer",
    "query_key_edit_damage",
    "query_key_metric",
    "holonomy_defect",
    "attention_sinks",
    "sink_constancy",
    "sink_damage",
    "layer_ablation_damage",
    "head_ablation_damage",
    "fourier_band_damage",
    "attention_temperature_damage",
    "loss_gradient_cosine",
    "cloud_projection",
)
NOT_TRIED = "not_tried"  # the attribute that says what a quick run leaves out
QUICK_FORMS = (NoiseKind.ACTIVATIONS, NoiseKind.WEIGHTS, NoiseKind.MATCHED)
QUICK_LAYERS = 3
DRAWS, QUICK_DRAWS = 20, 2  # of noise on queries and keys, which table 1 of [Additive transport] needs
PAIRS, QUICK_PAIRS = 36, 8
FIRST_POSITION = 10  # earlier queries see few keys, and give the first one a large weight without any sink
# time in eager forward passes of model A with 32 texts of 64 tokens: of an edited forward pass with its comparison,
# from the first layer on and from each layer in turn
WHOLE, FROM_LAYER = 1.8, 1.3


def intervention_names() -> tuple[str, ...]:
    """The names of the measurements of ``measure(interventions=True)``, in the order of its result.

    >>> intervention_names()[:2]
    ('query_key_noise', 'query_key_noise_by_layer')
    """
    return INTERVENTIONS


def intervention_measurements() -> tuple[StandaloneMeasurement, ...]:
    """The measurements of ``measure(interventions=True)``: noise on queries and keys, sinks, damage of ablation, and
    writes against the loss gradient.

    >>> tuple(each.name for each in intervention_measurements()) == intervention_names()
    True
    """
    return (
        StandaloneMeasurement("query_key_noise", _query_key_noise, _noise_forwards, _attention_unsupported),
        StandaloneMeasurement("query_key_noise_by_layer", _noise_by_layer, _layer_noise_forwards, _match_unsupported),
        StandaloneMeasurement("query_key_edit_damage", _query_key_edits, (20, 12), _match_unsupported),
        StandaloneMeasurement("query_key_metric", _query_key_metric, (1, 1), _matrices_unsupported),
        StandaloneMeasurement("holonomy_defect", _holonomy_defect, _holonomy_forwards, _holonomy_unsupported),
        StandaloneMeasurement("attention_sinks", _attention_sinks, (1.4, 1.4), _sinks_unsupported),
        StandaloneMeasurement("sink_constancy", _sink_constancy, (1.4, 1.4), _constancy_unsupported),
        StandaloneMeasurement("sink_damage", _sink_damage, (8, 8), _sink_damage_unsupported),
        StandaloneMeasurement("layer_ablation_damage", _layer_ablation, _layer_forwards, _loss_unsupported),
        StandaloneMeasurement("head_ablation_damage", _head_ablation, _head_forwards, _heads_unsupported),
        StandaloneMeasurement("fourier_band_damage", _fourier_band, _band_forwards, _bands_unsupported),
        StandaloneMeasurement("attention_temperature_damage", _temperature, (5, 5), _attention_unsupported),
        StandaloneMeasurement("loss_gradient_cosine", _loss_gradient, _gradient_forwards, _loss_unsupported),
        StandaloneMeasurement("cloud_projection", _cloud_projection, (12, 5), _cloud_unsupported),
    )


def _query_key_noise(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    recording, left_out = _recording(system), []
    forms = list(QUICK_FORMS if quick else NoiseKind)
    if quick:
        others = ", ".join(form.value for form in NoiseKind if form not in QUICK_FORMS)
        left_out = [
            f"noise on values, the kinds {others} and {DRAWS - QUICK_DRAWS} of {DRAWS} draws: not tried in quick"
        ]
    why = _refusal(lambda: WeightNoise.of(recording))
    if why is not None:
        forms = [form for form in forms if form not in OF_WEIGHTS]
        left_out.append(f"noise on weights: {why}")
    why = matching_unsupported(recording)
    if why is not None:
        forms = [form for form in forms if form not in PAIRED]
        left_out.append(f"matched noise: {why}")
    noise = query_key_noise(
        recording,
        kinds=forms,
        sites=(Site.QUERY, Site.KEY) if quick else (Site.QUERY, Site.KEY, Site.VALUE),
        draws=QUICK_DRAWS if quick else DRAWS,
        seed=seed,
        progress=progress,
    )
    return _without(query_key_noise_summary(noise), left_out)


def _noise_by_layer(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    recording, draws = _recording(system), 1 if quick else 4
    noise = query_key_noise_by_layer(
        recording, draws=draws, layers=_layers(recording, quick), seed=seed, progress=progress
    )
    mean = noise.mean("draw", keep_attrs=True).assign(ratio=query_key_noise_ratio(noise), ratio_null=1.0)
    return _without(mean, _quick(quick, "other layers and more than one draw"))


def _query_key_edits(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    strengths = (EditStrength.MATCHED,) if quick else tuple(EditStrength)
    damage = query_key_edit_damage(_recording(system), strengths=strengths, progress=progress)
    return _without(damage, _quick(quick, "the full changes, as printed"))


def _query_key_metric(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return query_key_metric(_recording(system))


def _holonomy_defect(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    recording, triangles = _recording(system), 1 if quick else 4
    found = holonomy_defect(
        recording, triangles=triangles, layers=_layers(recording, quick), seed=seed, progress=progress
    )
    return _without(found, _quick(quick, "other layers and more than one triangle of each prompt"))


def _attention_sinks(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return attention_sinks(system, first_position=FIRST_POSITION)


def _sink_constancy(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return sink_constancy(system)


def _sink_damage(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return sink_damage(_recording(system), first_position=FIRST_POSITION, seed=seed, progress=progress)


def _layer_ablation(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    forms = (AblationKind.ZERO, AblationKind.NOISE) if quick else tuple(AblationKind)
    parts, draws = ((LayerPart.LAYER,), 1) if quick else (tuple(LayerPart), 4)
    damage = layer_ablation_damage(
        _recording(system), kinds=forms, parts=parts, draws=draws, seed=seed, progress=progress
    )
    return _without(damage, _quick(quick, "mean ablation, half-layers and more than one draw of noise"))


def _head_ablation(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    """Single heads, and pairs of them, which share what zeroing single heads does."""
    recording, forms = _recording(system), (AblationKind.ZERO,) if quick else tuple(AblationKind)
    pairs = QUICK_PAIRS if quick else PAIRS
    layers = _layers(recording, quick)
    share = len(forms) / (len(forms) + 1)
    first, second = (sub_progress(check_progress(progress), *ends) for ends in ((0.0, share), (share, 1.0)))
    damage = head_ablation_damage(recording, kinds=forms, layers=layers, seed=seed, progress=first)
    alone = damage.kl.sel(kind=AblationKind.ZERO.value)
    pairs_of = head_interaction(recording, pairs=pairs, alone=alone, seed=seed, progress=second)
    joined = damage.merge(pairs_of.drop_vars(["kl", "kl_null"]), combine_attrs="override")
    text = f"other layers, mean ablation and noise, and more than {pluralized(QUICK_PAIRS, 'pair')} of heads"
    return _without(joined, _quick(quick, text))


def _fourier_band(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    recording, draws = _recording(system), 1 if quick else 4
    damage = fourier_band_damage(recording, layers=_layers(recording, quick), draws=draws, seed=seed, progress=progress)
    return _without(damage, _quick(quick, "other layers and more than one draw"))


def _temperature(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    return attention_temperature_damage(_recording(system), progress=progress)


def _loss_gradient(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    recording, scales = _recording(system), (0.0, 1.0) if quick else SCALES
    shape = loss_gradient_cosine(
        recording, scales=scales, layers=_layers(recording, quick), seed=seed, progress=progress
    )
    return _without(shape, _quick(quick, "other layers and the scales between 0 and 1"))


def _cloud_projection(system: System, *, quick: bool, seed: int, progress: ProgressOption) -> xr.Dataset:
    found = cloud_projection(_recording(system), sampled_tokens=4 if quick else 16, seed=seed, progress=progress)
    return _without(found, _quick(quick, "more than 4 tokens of each prompt"))


def _recording(system: System) -> Recording:
    assert isinstance(system, Recording)  # as unsupported_reason says
    return system


def _layers(recording: Recording, quick: bool) -> list[int] | None:
    """None for all layers; in quick the first, the last and one between."""
    numbers = list(recording.layers)
    if not quick or len(numbers) <= QUICK_LAYERS:
        return numbers if quick else None
    places = np.linspace(0, len(numbers) - 1, QUICK_LAYERS).round().astype(int)
    return [numbers[place] for place in places]


def _quick(quick: bool, left_out: str) -> list[str]:
    return [f"{left_out}: not tried in quick"] if quick else []


def _without(measured: xr.Dataset, left_out: list[str]) -> xr.Dataset:
    return measured.assign_attrs({NOT_TRIED: "; ".join(left_out)}) if left_out else measured


def _counts(system: System) -> tuple[int, int]:
    """The numbers of layers and of heads."""
    assert isinstance(system, Recording)
    return len(system.layers), sum(system.anatomy.layers[layer].heads or 0 for layer in system.layers)


def _noise_forwards(system: System, quick: bool) -> float:
    runs = len(QUICK_FORMS) * 2 * QUICK_DRAWS * 3 if quick else (5 * 3 + 2) * DRAWS * 3
    return 3 + WHOLE * runs


def _layer_noise_forwards(system: System, quick: bool) -> float:
    return 3 + WHOLE * 2 * (QUICK_LAYERS if quick else 4 * _counts(system)[0])


def _holonomy_forwards(system: System, quick: bool) -> float:
    return 1 + 1.7 * (QUICK_LAYERS if quick else 4 * _counts(system)[0])


def _layer_forwards(system: System, quick: bool) -> float:
    return 2 + FROM_LAYER * _counts(system)[0] * (2 if quick else 3 * (2 + 4))


def _head_forwards(system: System, quick: bool) -> float:
    layers, heads = _counts(system)
    runs = heads * QUICK_LAYERS / layers + 2 * QUICK_PAIRS if quick else 3 * heads + 2 * PAIRS
    return 4 + FROM_LAYER * runs


def _band_forwards(system: System, quick: bool) -> float:
    return 2 + FROM_LAYER * 2 * (QUICK_LAYERS if quick else 4 * _counts(system)[0])


def _gradient_forwards(system: System, quick: bool) -> float:
    layers = _counts(system)[0]
    return 6 + 1.8 * 2 * (QUICK_LAYERS if quick else 4 * layers)


def _refusal(attempt: Callable[[], Any]) -> str | None:
    """Why something cannot be done, None if it can."""
    try:
        attempt()
    except HelmscopeError as error:
        return str(error)
    return None


def _loss_unsupported(system: System) -> str | None:
    return scoring_unsupported(system)


def _attention_unsupported(system: System) -> str | None:
    """Needs a loss, and queries and keys that can be edited."""
    reason = scoring_unsupported(system)
    return reason or _refusal(lambda: _recording(system).runner.under(Perturb(sigma=0.0)))


def _match_unsupported(system: System) -> str | None:
    """Also needs rows of attention weights that sum to 1."""
    return _attention_unsupported(system) or matching_unsupported(_recording(system))


def _matrices_unsupported(system: System) -> str | None:
    if not isinstance(system, Recording):
        return f"system is {type_with_article(system)}, but matrices of heads are those of a Recording"
    return _refusal(lambda: head_matrices(system))


def _holonomy_unsupported(system: System) -> str | None:
    return _matrices_unsupported(system) or triangles_unsupported(_recording(system))


def _sink_damage_unsupported(system: System) -> str | None:
    return _attention_unsupported(system) or prompts_unsupported(_recording(system))


def _cloud_unsupported(system: System) -> str | None:
    return cloud_unsupported(system) or cloud_too_small(_recording(system))


def _sinks_unsupported(system: System) -> str | None:
    return system.unsupported_reason(AttentionSinks(first_position=FIRST_POSITION))


def _constancy_unsupported(system: System) -> str | None:
    prompts = system.trajectory.states.shape[1]
    few = f"system has {prompts} replicate, but constancy over them needs at least 2" if prompts < 2 else None
    return system.unsupported_reason(TokenValues()) or few


def _heads_unsupported(system: System) -> str | None:
    return scoring_unsupported(system) or _refusal(lambda: heads_to_ablate(_recording(system), None, None))


def _bands_unsupported(system: System) -> str | None:
    reason = scoring_unsupported(system)
    if reason is not None:
        return reason
    recording = _recording(system)
    for name, band in BANDS.items():
        try:
            check_texts(recording, f"band '{name}'", band)
        except HelmscopeError as error:
            return str(error)
    return None
