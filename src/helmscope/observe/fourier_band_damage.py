"""The damage of perturbations of the residual stream by their frequency along the tokens.

The input of a layer is perturbed by a random delta that is limited to a band of frequencies along the tokens
(``intervene.PerturbFourierBand``), with the same relative norm in every band, and the damage is the divergence of the
next-token distribution from that of the unperturbed model (``damage_under_edits``). Source: [Additive transport],
Section 5, which says that sharp, high-frequency updates are unstable; it gives neither as a quantity.

Equal norms. By default |delta|_F = relative_norm |x|_F over all tokens of the prompt. A draw then spreads its norm
unevenly over the tokens, by chance, and tokens of small radius are turned more than those of large radius; both are the
same for all bands in expectation. With ``per_token`` |delta_t| = relative_norm |x_t| at every token, so that every
token is turned alike, at the price of a part of delta outside its band.

How to read it. Where blocks write nothing each token is on its own, and bands do not differ. Attention that averages
over tokens removes high frequencies, and attention that compares neighbors amplifies them.
How it fails. Damage grows with the size of a perturbation, as its square while it is small: compare bands only at equal
norms. A text whose frequencies 0, 2/n, ..., 1 miss a band is refused.
Cost. One forward pass from the perturbed layer on for each band, layer and draw, and one without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.intervene.token_bands import PerturbFourierBand, check_band, check_has_frequency
from helmscope.models.names import Layers, chosen_layers
from helmscope.models.recording import Recording, check_recording
from helmscope.observe.damage import damage_under_edits
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_real,
    check_replicates,
    check_seed,
    short_repr,
)

if TYPE_CHECKING:
    from helmscope.types.progress import ProgressOption

Band = tuple[float, float]
BANDS: Mapping[str, Band] = {"low": (0.0, 0.25), "high": (0.75, 1.0)}


@shows_progress("damage by frequency")
def fourier_band_damage(
    recording: Recording,
    *,
    bands: Mapping[str, Band] = BANDS,
    relative_norm: float = 0.1,
    layers: Layers | None = None,
    draws: int = 1,
    per_token: bool = False,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage of perturbations of each of several ``bands`` of frequencies at the input of each layer, along (band,
    layer, prompt): ``kl``, ``loss_increase``, ``prediction_entropy_change`` and ``top_token_agreement`` as in
    ``damage_under_edits``, means over ``draws`` random perturbations of norm ``relative_norm`` times that of the state.

    Bands are pairs of frequencies, 1 the highest; equal bands under different names have independent draws. ``layers``
    are all by default, and ``per_token`` makes the relative norm the same at every token. Raises HelmscopeError where
    ``damage_under_edits`` does, for a layer out of range, relative_norm < 0, and a prompt without a frequency in a
    band.

    >>> from helmscope import record
    >>> measured = fourier_band_damage(record("A", ["Once upon a time there was a cat"]), layers=[0, 6])
    >>> measured.kl.dims, measured.band.values.tolist(), bool((measured.kl > 0).all())
    (('band', 'layer', 'prompt'), ['low', 'high'], True)
    """
    check_recording(recording)
    wanted = _checked_bands(bands)
    relative_norm, seed = check_real("relative_norm", relative_norm, at_least=0), check_seed(seed)
    count = check_integer("draws", draws, at_least=1)
    chosen = chosen_layers(recording, layers)
    for name, band in wanted.items():
        check_texts(recording, f"band '{name}'", band)
    edits = {
        f"{name}, layer {layer}, draw {draw}": PerturbFourierBand(
            [layer], band=band, relative_norm=relative_norm, per_token=per_token, seed=_seed(seed, number, draw)
        )
        for number, (name, band) in enumerate(wanted.items())
        for layer in chosen
        for draw in range(count)
    }
    damage = damage_under_edits(recording, edits, progress=progress)
    axes, shape = ("band", "layer", "prompt"), (len(wanted), len(chosen), count, -1)
    data = {
        name: damage[name] if str(name).endswith("_null") else _mean_over_draws(damage[name], axes, shape)
        for name in damage.data_vars
    }
    coords = {"band": list(wanted), "layer": chosen} | {name: damage.coords[name] for name in _of_prompts(damage)}
    norm = "of each token" if per_token else "of each prompt"
    attributes = {
        **damage.attrs,
        "title": "damage by frequency",
        "relative_norm": relative_norm,
        "norm": norm,
        "draws": count,
    }
    return check_replicates(xr.Dataset(data, coords, attributes | {"seed": seed}))


def _mean_over_draws(
    values: xr.DataArray, axes: tuple[str, ...], shape: tuple[int, ...]
) -> tuple[tuple[str, ...], np.ndarray, dict[str, object]]:
    return axes, values.values.reshape(shape).mean(2), values.attrs


def _of_prompts(damage: xr.Dataset) -> list[str]:
    return [str(name) for name, coordinate in damage.coords.items() if coordinate.dims == ("prompt",)]


def _checked_bands(bands: object) -> dict[str, Band]:
    if not isinstance(bands, Mapping) or not bands:
        raise HelmscopeError(
            f"bands is {short_repr(bands)}, but it must be a mapping of names to bands such as {{'low': (0, 0.25)}}"
        )
    return {str(name): check_band(f"band '{name}'", band) for name, band in bands.items()}


def check_texts(recording: Recording, name: str, band: Band) -> None:
    """Raise HelmscopeError for a text without a frequency in a band, before anything is run.

    >>> from helmscope import record
    >>> check_texts(record("A", ["Once upon a time"]), "band", (0.75, 1.0))
    """
    for text, ids in enumerate(recording.batch.visible_ids):
        check_has_frequency(name, band, len(ids), text)


def _seed(seed: int, band: int, draw: int) -> int:
    return int(np.random.SeedSequence([seed, band, draw]).generate_state(1)[0])
