"""The damage of noise on queries, keys and values, as printed in [Additive transport], section 9.1, and in variants
that compare fairly.

    kl  =  mean over tokens of KL(p || q),    p the next-token distribution without noise, q with noise in all layers at
    once

for noise of several sizes and paired seeds: noise on queries and noise on keys of one draw have the same seed. Where kl
is quadratic in the size, K / Q, the ratio of the two, does not depend on it; under the gauge q -> c q, k -> k / c,
which leaves the model unchanged, it grows as c^4 for the kinds with a fixed standard deviation (``NoiseKind``).

Besides how much, ``prediction_entropy_change``, ``top_token_agreement`` and ``top_key_agreement`` say which kind of
damage it is; compare them at equal kl (``query_key_noise_at_equal_kl``).
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
from helmscope.observe.labels import label_attributes
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
    from helmscope.types import Progress
    from helmscope.types.progress import ProgressOption

SIGMAS = (0.01, 0.05, 0.1)  # of table 1
SITES = (Site.QUERY, Site.KEY)
NAMES = {
    "kl": "KL divergence of the next-token distribution from that without noise (nats)",
    "prediction_entropy_change": "change of the entropy of the next-token distribution (nats)",
    "top_token_agreement": "share of positions whose most likely next token is unchanged",
    "top_key_agreement": "share of attention rows whose largest weight stays on the same key",
}


class NoiseKind(Enum):
    """What noise of size sigma is added to.

    - ``ACTIVATIONS``: queries, keys or values + sigma N, one interpretation of [Additive transport], table 1;
    - ``WEIGHTS``: W_Q, W_K or W_V + sigma N, the other interpretation;
    - ``RELATIVE``: activations, sigma times their root mean square in each layer and text;
    - ``RELATIVE_WEIGHTS``: weights, sigma times the root mean square of the matrix;
    - ``CENTERED``: as RELATIVE, but keys relative to the root mean square of the keys of each head minus their mean,
      which a shift of all keys, that attention does not see, leaves unchanged;
    - ``MATCHED``: keys as in CENTERED, and on queries the noise that moves each attention row as much at second order
      (``MatchedQueryNoise``): the variance of the logits under the attention weights is matched row by row;
    - ``MIXED_STATES``: W_Q (1 + sigma E) or W_K (1 + sigma E), so that W_Q^T W_K is perturbed from the left or from the
      right by the same relative norm.

    The last two depend neither on the gauge nor, the last one, on any basis inside the heads.

    >>> NoiseKind.MATCHED.value
    'matched'
    """

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"
    RELATIVE = "relative"
    RELATIVE_WEIGHTS = "relative weights"
    CENTERED = "centered"
    MATCHED = "matched"
    MIXED_STATES = "mixed states"

    def drawn_as(self, site: Site) -> NoiseKind:
        """The kind that draws the same noise at a site: a kind that differs from another one at one site only shares
        its noise at the other site.

        >>> NoiseKind.MATCHED.drawn_as(Site.KEY), NoiseKind.CENTERED.drawn_as(Site.QUERY)
        (<NoiseKind.CENTERED: 'centered'>, <NoiseKind.RELATIVE: 'relative'>)
        """
        if self is NoiseKind.MATCHED and site is Site.KEY:
            return NoiseKind.CENTERED
        if self is NoiseKind.CENTERED and site is not Site.KEY:
            return NoiseKind.RELATIVE
        return self


PAIRED = (NoiseKind.CENTERED, NoiseKind.MATCHED)  # kinds that values do not have
OF_WEIGHTS = {
    NoiseKind.WEIGHTS: "sigma",
    NoiseKind.RELATIVE_WEIGHTS: "relative_sigma",
    NoiseKind.MIXED_STATES: "mixing",
}


@shows_progress("query and key noise")
def query_key_noise(
    recording: Recording,
    *,
    kinds: Sequence[NoiseKind] = (NoiseKind.ACTIVATIONS, NoiseKind.MATCHED),
    sigmas: Sequence[float] = SIGMAS,
    draws: int = 20,
    sites: Sequence[Site] = SITES,
    layers: Layers | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage of noise, along (kind, site, sigma, draw, prompt): ``kl``, ``prediction_entropy_change``,
    ``top_token_agreement`` and ``top_key_agreement``; null values are those without noise.

    ``sigmas`` are the sizes, ``draws`` the number of draws, and ``layers`` where noise is added, by default in all at
    once. ``sites`` may also hold Site.VALUE; the kinds that compare queries with keys have none, NaN. The axis ``site``
    holds "query", "key" and "value". Takes one forward pass for each kind, site, size and draw, and one for all kinds
    that draw the same noise (``NoiseKind.drawn_as``); draws of one chunk of texts run in one forward pass where the
    batch size of the recording allows. Raises HelmscopeError where ``next_token_loss`` does, for a layer out of range,
    sigma < 0 and a model whose attention or matrices cannot be edited.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> noise = query_key_noise(recording, draws=2)
    >>> dict(noise.kl.sizes)
    {'kind': 2, 'site': 2, 'sigma': 3, 'draw': 2, 'prompt': 2}
    >>> noise.sel(site="key").top_key_agreement.max().item() <= 1
    True
    """
    seeds, sizes = _checked_seeds(seed, draws), _checked_sizes(sigmas)
    chosen = None if layers is None else chosen_layers(check_recording(recording), layers)
    trial = _NoiseTrial(recording, _checked_kinds(kinds, sites))
    found = trial.run([chosen], sites, sizes, seeds, check_progress(progress))[:, 0]
    return _measurement(found, trial, {"kind": trial.kinds, "site": sites, "sigma": sizes, "draw": seeds})


@shows_progress("query and key noise by layer")
def query_key_noise_by_layer(
    recording: Recording,
    *,
    kind: NoiseKind = NoiseKind.MATCHED,
    sigma: float = 0.05,
    draws: int = 4,
    sites: Sequence[Site] = SITES,
    layers: Layers | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """As ``query_key_noise``, with noise of one kind and size in one layer at a time, each of ``layers``, by default of
    all: along (layer, site, draw, prompt). Takes one forward pass for each layer, site and draw.

    >>> from helmscope import record
    >>> noise = query_key_noise_by_layer(record("A", ["Once upon a time", "The cat sat"]), draws=1)
    >>> noise.kl.dims, noise.sizes["layer"]
    (('layer', 'site', 'draw', 'prompt'), 12)
    """
    seeds, (size,) = _checked_seeds(seed, draws), [check_real("sigma", sigma, at_least=0)]
    numbers = chosen_layers(check_recording(recording), layers)
    trial = _NoiseTrial(recording, _checked_kinds([kind], sites))
    found = trial.run([[layer] for layer in numbers], sites, [size], seeds, check_progress(progress))
    measured = _measurement(found[:, :, 0, :, 0], trial, {"layer": numbers, "site": sites, "draw": seeds})
    return measured.assign_attrs(kind=kind.value, sigma=size)


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

    def __init__(self, recording: Recording, kinds: Sequence[NoiseKind]) -> None:
        self.recording, self.kinds = recording, list(kinds)
        self.scoring = Scoring(recording)
        self.weights = WeightNoise.of(recording) if set(kinds) & set(OF_WEIGHTS) else None
        self.matched = MatchedQueryNoise.of(recording, relative_sigma=1.0) if NoiseKind.MATCHED in kinds else None

    def run(
        self,
        layer_sets: Sequence[list[int] | None],
        sites: Sequence[Site],
        sizes: Sequence[float],
        seeds: Sequence[int],
        report: Progress,
    ) -> np.ndarray:
        """The damage of noise in each of several sets of layers: over (effect, set, kind, site, size, draw, prompt)."""
        for layers in layer_sets:  # raises for layers out of range and hidden attention, before anything is run
            self.recording.runner.under(Perturb(layers, sigma=0.0))
        shape = (len(NAMES), len(layer_sets), len(self.kinds), len(sites), len(sizes), len(seeds))
        found = np.full((*shape, len(self.recording.batch)), np.nan)
        done = 0
        for rows in self.scoring.chunks():
            plain, known = self.plain(rows), dict[tuple[object, ...], list[np.ndarray]]()
            for index in np.ndindex(shape[1:5]):
                layers, kind = layer_sets[index[0]], self.kinds[index[1]]
                noise = kind.drawn_as(sites[index[2]]), sites[index[2]], sizes[index[3]]
                place = (index[0], *noise)
                if noise[1] is Site.VALUE and kind in PAIRED:
                    continue
                if place not in known:
                    known[place] = self.damages(plain, rows, layers, *noise, seeds)
                for k, values in enumerate(known[place]):
                    found[(slice(None), *index, k, rows)] = values
                done += len(seeds) * (rows.stop - rows.start)
                report(done / found[0].size)
        return found

    def plain(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Logits and top keys without noise."""
        observer = _TopKeys()
        return self.scoring.logits(self.recording.runner, rows, observer), observer.table

    def damages(
        self,
        plain: tuple[Tensor, Tensor],
        rows: slice,
        layers: list[int] | None,
        kind: NoiseKind,
        site: Site,
        sigma: float,
        seeds: Sequence[int],
    ) -> list[np.ndarray]:
        """The damage of each draw of noise, as many draws in one forward pass as the batch size allows."""
        runner, found = self.recording.runner, list[np.ndarray]()
        count = rows.stop - rows.start
        together = max(1, runner.batch_size // count)
        together = max(1, min(together, LOGITS_PER_FORWARD // plain[0].numel()))
        if kind in OF_WEIGHTS or runner.encoder is not None:
            together = 1
        for first in range(0, len(seeds), together):
            chunk = seeds[first : first + together]
            lists = [self._edits(layers, kind, site, sigma, each) for each in chunk]
            observer = _TopKeys()
            with self._changed_weights(layers, kind, site, sigma, chunk[0]):
                logits = BatchedEdits.runner(runner, rows, lists).outputs(observer)
            for part, keys in zip(logits.chunk(len(chunk)), observer.table.chunk(len(chunk), 1), strict=True):
                found.append(self._compare(rows, plain[0], part, keys == plain[1]))
        return found

    def _compare(self, rows: slice, plain: Tensor, noisy: Tensor, same_key: Tensor) -> np.ndarray:
        """The values of NAMES, over (effect, rows)."""
        kl, _, prediction_entropy_change, top_token_agreement = self.scoring.of_tokens(token_damage, rows, noisy, plain)
        # scored tokens are never the first, whose row has one key only
        effects = torch.stack(
            [kl, prediction_entropy_change, top_token_agreement, same_key.double().mean((0, 2)).cpu()]
        )
        return self.scoring.means(effects, rows)

    def _changed_weights(
        self, layers: list[int] | None, kind: NoiseKind, site: Site, sigma: float, seed: int
    ) -> AbstractContextManager[Any]:
        if kind not in OF_WEIGHTS:
            return nullcontext()
        assert self.weights is not None
        size = {OF_WEIGHTS[kind]: sigma}
        values = self.weights.values(site, layers=layers, seed=seed, **size)
        return with_parameters(self.weights.model, values)

    def _edits(
        self, layers: list[int] | None, kind: NoiseKind, site: Site, sigma: float, seed: int
    ) -> list[AbstractEdit]:
        if kind in OF_WEIGHTS:
            return []
        if kind is NoiseKind.ACTIVATIONS:
            return [Perturb(layers, site=site, sigma=sigma, seed=seed)]
        if kind is NoiseKind.RELATIVE:
            return [Perturb(layers, site=site, relative_sigma=sigma, seed=seed)]
        if site is Site.KEY:
            return [CenteredKeyNoise(layers, relative_sigma=sigma, seed=seed)]
        assert self.matched is not None
        assert self.matched.sigma is not None
        return [MatchedQueryNoise(layers, sigma * self.matched.sigma, seed)]


def _checked_seeds(seed: int, draws: int) -> list[int]:
    return [check_seed(seed) + k for k in range(check_integer("draws", draws, at_least=1))]


def _checked_kinds(kinds: Sequence[NoiseKind], sites: Sequence[Site]) -> list[NoiseKind]:
    if not isinstance(kinds, Sequence) or not kinds or not all(isinstance(kind, NoiseKind) for kind in kinds):
        allowed = ", ".join(map(str, NoiseKind))
        raise HelmscopeError(f"kinds is {short_repr(kinds)}, but it must be a list of members of {allowed}")
    allowed_sites = (*SITES, Site.VALUE)
    if not isinstance(sites, Sequence) or not sites or not all(site in allowed_sites for site in sites):
        allowed = ", ".join(map(str, allowed_sites))
        raise HelmscopeError(f"sites is {short_repr(sites)}, but it must be a list of some of {allowed}")
    if Site.VALUE in sites and set(kinds) <= set(PAIRED):
        raise HelmscopeError(f"sites holds {Site.VALUE}, but {kinds[0]} compares queries with keys only")
    return list(kinds)


def _checked_sizes(sigmas: Sequence[float]) -> list[float]:
    if isinstance(sigmas, str) or not isinstance(sigmas, Sequence) or not sigmas:
        raise HelmscopeError(f"sigmas is {short_repr(sigmas)}, but it must be a list of numbers such as [0.01, 0.05]")
    return [check_real("sigmas", sigma, at_least=0) for sigma in sigmas]


def _measurement(found: np.ndarray, trial: _NoiseTrial, coords: dict[str, Sequence[Any]]) -> xr.Dataset:
    """The Measurement of values over (effect, kind, site, sigma, draw, prompt)."""
    axes = (*coords, "prompt")
    shares = {"valid_min": 0.0, "valid_max": 1.0}
    bounds: dict[str, dict[str, float]] = {"kl": {"valid_min": 0.0}, "prediction_entropy_change": {}}
    data = {
        name: (axes, found[k], {**label_attributes(text), **bounds.get(name, shares)})
        for k, (name, text) in enumerate(NAMES.items())
    }
    nulls = {
        "kl_null": 0.0,
        "prediction_entropy_change_null": 0.0,
        "top_token_agreement_null": 1.0,
        "top_key_agreement_null": 1.0,
    }
    named = {name: [getattr(tick, "value", tick) for tick in ticks] for name, ticks in coords.items()}
    attributes = {**trial.scoring.attributes, "title": "query and key noise"}
    return check_replicates(xr.Dataset(data | nulls, {**named, **trial.scoring.coords}, attributes))
