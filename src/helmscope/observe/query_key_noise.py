"""The damage of noise on queries, keys and values, as [Additive transport], section 9.1, prints it and in fair forms.

    kl  =  mean over tokens of KL(p || q),    p the next-token distribution without noise, q with noise in all layers at
    once

for noise of several sizes and paired seeds: noise on queries and noise on keys of one draw have the same seed. Where kl
is quadratic in the size, K / Q, the ratio of the two, does not depend on it; under the gauge q -> c q, k -> k / c,
which leaves the model unchanged, it grows as c^4 in the forms with a fixed standard deviation (``NoiseForm``).

Besides how much, ``entropy_change``, ``top_token_agreement`` and ``top_key_agreement`` say which kind of damage it is;
compare them at equal kl (``query_key_noise_at_equal_kl``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.intervene.attention import Perturb
from helmscope.intervene.batched_edits import BatchedEdits
from helmscope.intervene.change import with_parameters
from helmscope.intervene.query_key import CenteredKeyNoise, MatchedQueryNoise
from helmscope.intervene.weight_noise import WeightNoise
from helmscope.models.names import Layers, chosen_layers
from helmscope.models.recording import check_recording
from helmscope.models.sites import Observer, Site
from helmscope.observe.damage import token_damage
from helmscope.observe.scoring import LOGITS_PER_FORWARD, Scoring
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_progress,
    check_real,
    check_replicates,
    check_seed,
    short_repr,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any

    from jaxtyping import Int
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.sites import AbstractEdit, Chunk
    from helmscope.models.tap import Attended, Call
    from helmscope.types.progress import ProgressOption

SIGMAS = (0.01, 0.05, 0.1)  # of table 1
SITES = (Site.QUERY, Site.KEY)
NAMES = {
    "kl": "KL divergence of the next-token distribution from that without noise (nats)",
    "entropy_change": "change of the entropy of the next-token distribution (nats)",
    "top_token_agreement": "share of positions whose most likely next token stays",
    "top_key_agreement": "share of attention rows whose largest weight stays at its key",
}


class NoiseForm(Enum):
    """What noise of size sigma is added to.

    - ``ACTIVATIONS``: queries, keys or values + sigma N, one reading of [Additive transport], table 1;
    - ``WEIGHTS``: W_Q, W_K or W_V + sigma N, the other reading;
    - ``RELATIVE``: activations, sigma times their root mean square in each layer and text;
    - ``RELATIVE_WEIGHTS``: weights, sigma times the root mean square of the matrix;
    - ``CENTERED``: as RELATIVE, but keys relative to the root mean square of the keys of each head minus their mean,
      which a shift of all keys, that attention does not see, leaves unchanged;
    - ``MATCHED``: keys as in CENTERED, and on queries the noise that moves each attention row as much at second order
      (``MatchedQueryNoise``): the variance of the logits under the attention weights is matched row by row;
    - ``MIXED_STATES``: W_Q (1 + sigma E) or W_K (1 + sigma E), so that W_Q^T W_K is perturbed from the left or from the
      right by the same relative norm.

    The last two depend neither on the gauge nor, the last one, on any basis inside the heads.

    >>> NoiseForm.MATCHED.value
    'matched'
    """

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"
    RELATIVE = "relative"
    RELATIVE_WEIGHTS = "relative weights"
    CENTERED = "centered"
    MATCHED = "matched"
    MIXED_STATES = "mixed states"


OF_WEIGHTS = {NoiseForm.WEIGHTS: "sigma", NoiseForm.RELATIVE_WEIGHTS: "relative", NoiseForm.MIXED_STATES: "mixing"}


@shows_progress("query and key noise")
def query_key_noise(
    recording: Recording,
    *,
    forms: Sequence[NoiseForm] = (NoiseForm.ACTIVATIONS, NoiseForm.MATCHED),
    sigmas: Sequence[float] = SIGMAS,
    draws: int = 20,
    sites: Sequence[Site] = SITES,
    layers: Layers | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage of noise, along (form, site, sigma, draw, prompt): ``kl``, ``entropy_change``, ``top_token_agreement``
    and
    ``top_key_agreement``; null values are those without noise.

    ``sigmas`` are the sizes, ``draws`` the number of draws, and ``layers`` where noise is added, by default in all at
    once. ``sites`` may also hold Site.VALUE in the forms that do not compare queries with keys. The axis ``site`` holds
    "query", "key" and "value". Takes one forward for each form, site, size and draw; draws of one chunk of texts run in
    one forward where the batch size of the recording allows. Raises HelmscopeError where ``next_token_loss`` does, for
    a layer out of range, sigma < 0 and a model whose attention or matrices cannot be edited.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> noise = query_key_noise(recording, draws=2)
    >>> dict(noise.kl.sizes)
    {'form': 2, 'site': 2, 'sigma': 3, 'draw': 2, 'prompt': 2}
    >>> noise.sel(site="key").top_key_agreement.max().item() <= 1
    True
    """
    report, count = check_progress(progress), check_integer("draws", draws, at_least=1)
    sizes = _checked_sizes(sigmas)
    chosen = None if layers is None else chosen_layers(check_recording(recording), layers)
    trial = _NoiseTrial(recording, _checked_forms(forms, sites), chosen)
    shape = (len(NAMES), len(trial.forms), len(sites), len(sizes), count, len(recording.batch))
    found = np.full(shape, np.nan)
    seeds = [check_seed(seed) + k for k in range(count)]
    chunks, done = list(trial.scoring.chunks()), 0
    for rows in chunks:
        plain = trial.plain(rows)
        for index in np.ndindex(shape[1:4]):
            form, site, size = trial.forms[index[0]], sites[index[1]], sizes[index[2]]
            for k, values in enumerate(trial.damages(plain, rows, form, site, size, seeds)):
                found[(slice(None), *index, k, rows)] = values
                done += rows.stop - rows.start
                report(done / found[0].size)
    return _measurement(found, trial, {"form": trial.forms, "site": sites, "sigma": sizes, "draw": seeds})


@shows_progress("query and key noise by layer")
def query_key_noise_by_layer(
    recording: Recording,
    *,
    form: NoiseForm = NoiseForm.MATCHED,
    sigma: float = 0.05,
    draws: int = 4,
    sites: Sequence[Site] = SITES,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """As ``query_key_noise``, with noise of one form and size in one layer at a time: along (layer, site, draw,
    prompt). Takes one forward for each layer, site and draw.

    >>> from helmscope import record
    >>> noise = query_key_noise_by_layer(record("A", ["Once upon a time", "The cat sat"]), draws=1)
    >>> noise.kl.dims, noise.sizes["layer"]
    (('layer', 'site', 'draw', 'prompt'), 12)
    """
    report = check_progress(progress)
    found: list[xr.Dataset] = []
    for layer in recording.layers:
        begin = len(found) / len(recording.layers)
        one = query_key_noise(
            recording,
            forms=[form],
            sigmas=[sigma],
            draws=draws,
            sites=sites,
            layers=layer,
            seed=seed,
            progress=lambda share, begin=begin: report(begin + share / len(recording.layers)),
        )
        found.append(one.isel(form=0, sigma=0, drop=True).expand_dims(layer=[layer]))
    joined = xr.concat(found, "layer", data_vars="minimal", coords="minimal", compat="override")
    return check_replicates(joined.assign_attrs(form=form.value, sigma=sigma))


class _TopKeys(Observer):
    """Keeps the key of the largest weight of every attention row, over (layer, rows, heads, n)."""

    sees_attention = True
    needs_all_layers = True

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def begin(self, chunk: Chunk) -> None:
        """Forget those of an earlier chunk."""
        super().begin(chunk)
        self.keys = []

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep those of a layer."""
        self.keys.append(result.weights.argmax(-1))

    @property
    def table(self) -> Int[Tensor, "layer rows heads n"]:
        """Those of all layers."""
        return torch.stack(self.keys)


class _NoiseTrial:
    """Runs a recording with and without noise and compares the outcomes."""

    def __init__(self, recording: Recording, forms: Sequence[NoiseForm], layers: int | Sequence[int] | None) -> None:
        self.recording, self.forms, self.layers = recording, list(forms), layers
        self.scoring = Scoring(recording)
        recording.runner.under(Perturb(layers, sigma=0.0))  # raises for layers out of range and hidden attention
        self.weights = WeightNoise.of(recording) if set(forms) & set(OF_WEIGHTS) else None
        self.matched = MatchedQueryNoise.of(recording, relative=1.0) if NoiseForm.MATCHED in forms else None

    def plain(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Logits and top keys without noise."""
        observer = _TopKeys()
        return self.scoring.logits(self.recording.runner, rows, observer), observer.table

    def damages(
        self,
        plain: tuple[Tensor, Tensor],
        rows: slice,
        form: NoiseForm,
        site: Site,
        sigma: float,
        seeds: Sequence[int],
    ) -> list[np.ndarray]:
        """The damage of each draw of noise, as many draws in one forward as the batch size allows."""
        runner, found = self.recording.runner, list[np.ndarray]()
        count = rows.stop - rows.start
        together = max(1, runner.batch_size // count)
        together = max(1, min(together, LOGITS_PER_FORWARD // plain[0].numel()))
        if form in OF_WEIGHTS or runner.encoder is not None:
            together = 1
        for first in range(0, len(seeds), together):
            chunk = seeds[first : first + together]
            lists = [self._edits(form, site, sigma, each) for each in chunk]
            observer = _TopKeys()
            with self._changed_weights(form, site, sigma, chunk[0]):
                logits = BatchedEdits.runner(runner, rows, lists).outputs(observer)
            for part, keys in zip(logits.chunk(len(chunk)), observer.table.chunk(len(chunk), 1), strict=True):
                found.append(self._compare(rows, plain[0], part, keys == plain[1]))
        return found

    def _compare(self, rows: slice, plain: Tensor, noisy: Tensor, same_key: Tensor) -> np.ndarray:
        """The values of NAMES, over (kind, rows)."""
        kl, _, entropy_change, top_token_agreement = self.scoring.of_tokens(token_damage, rows, noisy, plain)
        # scored tokens are never the first, whose row has one key only
        kinds = torch.stack([kl, entropy_change, top_token_agreement, same_key.double().mean((0, 2)).cpu()])
        return self.scoring.means(kinds, rows)

    def _changed_weights(self, form: NoiseForm, site: Site, sigma: float, seed: int) -> AbstractContextManager[Any]:
        if form not in OF_WEIGHTS:
            return nullcontext()
        assert self.weights is not None
        size = {OF_WEIGHTS[form]: sigma}
        values = self.weights.values(site, layers=self.layers, seed=seed, **size)
        return with_parameters(self.weights.model, values)

    def _edits(self, form: NoiseForm, site: Site, sigma: float, seed: int) -> list[AbstractEdit]:
        if form in OF_WEIGHTS:
            return []
        if form is NoiseForm.ACTIVATIONS:
            return [Perturb(self.layers, site=site, sigma=sigma, seed=seed)]
        if site is Site.KEY and form in (NoiseForm.CENTERED, NoiseForm.MATCHED):
            return [CenteredKeyNoise(self.layers, relative=sigma, seed=seed)]
        if form is NoiseForm.MATCHED:
            assert self.matched is not None
            assert self.matched.sigma is not None
            return [MatchedQueryNoise(self.layers, sigma * self.matched.sigma, seed)]
        return [Perturb(self.layers, site=site, relative=sigma, seed=seed)]


def _checked_forms(forms: Sequence[NoiseForm], sites: Sequence[Site]) -> list[NoiseForm]:
    if not isinstance(forms, Sequence) or not forms or not all(isinstance(form, NoiseForm) for form in forms):
        allowed = ", ".join(map(str, NoiseForm))
        raise HelmscopeError(f"forms is {short_repr(forms)}, but it must be a list of members of {allowed}")
    allowed_sites = (*SITES, Site.VALUE)
    if not isinstance(sites, Sequence) or not sites or not all(site in allowed_sites for site in sites):
        allowed = ", ".join(map(str, allowed_sites))
        raise HelmscopeError(f"sites is {short_repr(sites)}, but it must be a list of some of {allowed}")
    paired = [form for form in forms if form in (NoiseForm.CENTERED, NoiseForm.MATCHED)]
    if Site.VALUE in sites and paired:
        raise HelmscopeError(f"sites holds {Site.VALUE}, but {paired[0]} compares queries with keys only")
    return list(forms)


def _checked_sizes(sigmas: Sequence[float]) -> list[float]:
    if isinstance(sigmas, str) or not isinstance(sigmas, Sequence) or not sigmas:
        raise HelmscopeError(f"sigmas is {short_repr(sigmas)}, but it must be a list of numbers such as [0.01, 0.05]")
    return [check_real("sigmas", sigma, at_least=0) for sigma in sigmas]


def _measurement(found: np.ndarray, trial: _NoiseTrial, coords: dict[str, Sequence[Any]]) -> xr.Dataset:
    """The Measurement of values over (kind, form, site, sigma, draw, prompt)."""
    axes = (*coords, "prompt")
    shares = {"valid_min": 0.0, "valid_max": 1.0}
    bounds: dict[str, dict[str, float]] = {"kl": {"valid_min": 0.0}, "entropy_change": {}}
    data = {
        name: (axes, found[k], {"long_name": text, **bounds.get(name, shares)})
        for k, (name, text) in enumerate(NAMES.items())
    }
    nulls = {"kl_null": 0.0, "entropy_change_null": 0.0, "top_token_agreement_null": 1.0, "top_key_agreement_null": 1.0}
    named = {name: [getattr(tick, "value", tick) for tick in ticks] for name, ticks in coords.items()}
    attributes = {**trial.scoring.attributes, "title": "query and key noise"}
    return check_replicates(xr.Dataset(data | nulls, {**named, **trial.scoring.coords}, attributes))
