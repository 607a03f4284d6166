"""What the ablation of each layer does to a model's predictions, and how much of it later layers repair.

A half-step writes w and leads from the state x to y = x + w (in a post-norm block, to the norm of that sum). Kinds
of ablation:

    zero    w becomes 0
    mean    w becomes its mean over the tokens of all prompts
    noise   y becomes y + r |y| g, with r the same in every layer and g a random direction, uniform on the unit sphere

The first two remove different amounts in different layers: early writes are large compared with the state. Noise has
the same norm relative to the state in every layer, and the same directions g there, so that two layers differ only by
what comes after them. Later layers have repaired the share

    1 - e_L / e_l,    e_k the mean over tokens of |change of the state after layer k| / |state after layer k|

of the change after the ablated layer l; it is below 0 where they amplify the change. For linear blocks x -> (1 + a) x
on a subspace that the state avoids, the share is 1 - (1 + a)^(L - l). Source: [Additive transport], Section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.intervene.edit import Edit
from helmscope.intervene.states import Ablate, Replace
from helmscope.models.names import Layers, chosen_layers
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import LEADS_TO, Site
from helmscope.observe.damage import damage_under_edits
from helmscope.observe.track import token_mean
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
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.sites import AbstractEdit, EditContext
    from helmscope.types.progress import ProgressOption

RELATIVE_NORM = 0.1
NAMES = {
    "kl": "KL divergence of the next-token distribution from that without the ablation",
    "loss_increase": "increase of the next-token loss",
    "relative_change": "relative change of the state after the ablated layer",
    "last_relative_change": "relative change of the state after the last layer",
    "repaired_share": "share of the change that later layers repair",
}
IN_NATS = ("kl", "loss_increase")


class AblationKind(Enum):
    """How a part of a model is ablated; the module's docstring has the formulas.

    >>> [kind.value for kind in AblationKind]
    ['zero', 'mean', 'noise']
    """

    ZERO = "zero"
    MEAN = "mean"
    NOISE = "noise"


class LayerPart(Enum):
    """A layer, or one of its half-steps.

    >>> [part.value for part in LayerPart]
    ['layer', 'attention', 'mlp']
    """

    LAYER = "layer"
    ATTENTION = "attention"
    MLP = "mlp"

    def sites(self, recording: Recording) -> tuple[Site, ...]:
        """The sites of the writes of this part.

        >>> from helmscope import record
        >>> LayerPart.LAYER.sites(record("A", ["Once upon a time"]))
        (<Site.ATTENTION: 'attention'>, <Site.MLP: 'mlp'>)
        """
        written = tuple(recording.anatomy.layers[0].wiring.writes)
        return written if self is LayerPart.LAYER else (Site(self.value),)


KINDS = tuple(AblationKind)
WHOLE = (LayerPart.LAYER,)


@shows_progress("damage of ablation")
def layer_ablation_damage(
    recording: Recording,
    *,
    kinds: Sequence[AblationKind] = KINDS,
    parts: Sequence[LayerPart] = WHOLE,
    layers: Layers | None = None,
    relative_norm: float = RELATIVE_NORM,
    draws: int = 1,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage of ablating each layer, or a half-step of it, by each of ``kinds``: along (part, kind, layer,
    prompt)

    - ``kl`` and ``loss_increase``: the KL divergence of the next-token distribution and the increase of the loss, nats;
    - ``relative_change`` and ``last_relative_change``: e_l and e_L, the relative change of the state after the ablated
      layer and after the last one; ``repaired_share`` is 1 - e_L / e_l, NaN where nothing changes and 0 for the last
      layer.

    Noise has the relative norm ``relative_norm`` after each half-step of the part, and the damage is its mean over
    ``draws``. Null values are 0: nothing changes, or later layers pass the change on. Each ablation takes one forward
    pass from its layer on. Raises HelmscopeError where ``next_token_loss`` does, and for a layer out of range.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> measured = layer_ablation_damage(record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])))
    >>> dict(measured.kl.sizes), measured.repaired_share.sel(layer=1, kind="zero").values.tolist()
    ({'part': 1, 'kind': 3, 'layer': 2, 'prompt': 2}, [[0.0, 0.0]])
    """
    report, seed = check_progress(progress), check_seed(seed)
    size, draws = check_real("relative_norm", relative_norm, above=0), check_integer("draws", draws, at_least=1)
    chosen_kinds, chosen_parts = chosen("kinds", kinds, AblationKind), chosen("parts", parts, LayerPart)
    check_recording(recording)
    numbers = chosen_layers(recording, layers)
    sites = tuple(recording.anatomy.layers[0].wiring.writes)
    means = site_means(recording, sites) if AblationKind.MEAN in chosen_kinds else {}
    lists: dict[tuple[int, int, int, int], list[AbstractEdit]] = {}
    for p, part in enumerate(chosen_parts):
        for f, kind in enumerate(chosen_kinds):
            for k, layer in enumerate(numbers):
                for draw in range(draws if kind is AblationKind.NOISE else 1):
                    lists[p, f, k, draw] = [
                        _ablation(kind, layer, site, means, size, noise_seed(seed, draw, sites.index(site)))
                        for site in part.sites(recording)
                    ]
    changes = _Changes(recording, len(lists))
    edits = {
        str(place): [*ablations, *changes.readings(number, numbers[place[2]])]
        for number, (place, ablations) in enumerate(lists.items())
    }
    damage = damage_under_edits(recording, edits, progress=report)
    axes = {
        "part": [part.value for part in chosen_parts],
        "kind": [kind.value for kind in chosen_kinds],
        "layer": numbers,
    }
    measured = {name: damage[name].values for name in IN_NATS} | changes.values
    return _over_draws(measured, list(lists), axes, damage)


def chosen(name: str, values: object, kind: type[Enum]) -> tuple[Any, ...]:
    """The members of an enumeration that an argument lists; raises HelmscopeError unless there is one and all differ.

    >>> chosen("kinds", [AblationKind.ZERO], AblationKind)
    (<AblationKind.ZERO: 'zero'>,)
    """
    members = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else ()
    if not members or not all(isinstance(each, kind) for each in members) or len(set(members)) < len(members):
        allowed = ", ".join(str(each) for each in kind)
        raise HelmscopeError(f"{name} is {short_repr(values)}, but it must be a list of different ones of {allowed}")
    return members


def noise_seed(seed: int, draw: int, number: int) -> int:
    """The seed of one draw of noise, for the ``number``-th site of a layer.

    >>> noise_seed(0, 0, 0) == noise_seed(0, 0, 1)
    False
    """
    return int(np.random.SeedSequence([seed, draw, number]).generate_state(1)[0])


def site_means(recording: Recording, sites: Iterable[Site]) -> dict[tuple[Site, int], Tensor]:
    """The mean over the tokens of all prompts, by their weights, of the value at each site, (rows, n, ...), of each
    layer; by one forward pass.

    >>> from helmscope import record
    >>> site_means(record("A", ["Once upon a time"]), [Site.MLP])[Site.MLP, 3].shape
    torch.Size([192])
    """
    totals: dict[tuple[Site, int], Tensor] = {}
    weights = counted_tokens(recording)

    @full_precision
    def add(value: Tensor, context: EditContext) -> None:
        share = (weights[context.rows] / weights.sum()).to(value.device, value.dtype)
        part = torch.einsum("bn,bn...->...", share, value.detach())
        place = context.site, context.layer
        totals[place] = totals[place] + part if place in totals else part

    recording.runner.under(*(Edit(site, None, add) for site in sites)).forward()
    return totals


def counted_tokens(recording: Recording) -> Float[Tensor, "batch n"]:
    """The weights of the tokens of a recording in statistics.

    >>> from helmscope import record
    >>> counted_tokens(record("A", ["Once upon a time"])).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    counted = recording.batch.counted
    if counted is not None:
        return counted.cpu().double()
    shape = recording.residual_stream(depth=recording.first).shape[:2]
    return torch.ones(shape, dtype=torch.float64, device="cpu")


def relative_noise(
    relative: float, seed: int, matrix: Float[Tensor, "d s"] | None = None
) -> Callable[[Tensor, EditContext], Tensor]:
    """The function of an edit that adds r |y| g to each state y, with the same draws in every layer; with a matrix W
    the directions are g = W u / |W u|, u normal.

    >>> from helmscope.models.sites import Chunk
    >>> state = torch.tensor([[[3.0, 4.0]]])
    >>> noisy = relative_noise(0.1, 0)(state, Chunk.whole(1).at(Site.OUTPUT, layer=3))
    >>> round(float((noisy - state).norm()), 6)
    0.5
    """

    @full_precision
    def noisy(state: Tensor, context: EditContext) -> Tensor:
        like = state if matrix is None else state[..., :1].expand(*state.shape[:-1], matrix.shape[1])
        draw = replace(context, layer=0).normal(like, seed=seed)
        return state + relative * lengths_of(state) * unit(draw if matrix is None else draw @ matrix.T.to(draw))

    return noisy


def lengths_of(vectors: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
    """The Euclidean norm along the last axis, which is kept.

    >>> lengths_of(torch.tensor([3.0, 4.0]))
    tensor([5.])
    """
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return lengths


def unit(vectors: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Vectors divided by their length.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return vectors / lengths_of(vectors)


def _ablation(
    kind: AblationKind,
    layer: int,
    site: Site,
    means: Mapping[tuple[Site, int], Tensor],
    relative: float,
    seed: int,
) -> AbstractEdit:
    """The edit that ablates the write at a site."""
    if kind is AblationKind.ZERO:
        return Ablate([layer], site=site)
    if kind is AblationKind.MEAN:
        return Replace([layer], site=site, value=means[site, layer])
    return Edit(LEADS_TO[site], [layer], relative_noise(relative, seed))


class _Changes:
    """Relative changes of the states of a recording, read in the forward passes of edits: ``values`` (edit, prompt)."""

    def __init__(self, recording: Recording, count: int) -> None:
        self.recording, self.weights = recording, counted_tokens(recording)
        shape = (count, len(recording.batch))
        self.values = {name: np.full(shape, np.nan) for name in ("relative_change", "last_relative_change")}

    def readings(self, number: int, layer: int) -> list[AbstractEdit]:
        """Edits that change nothing, to be applied after those of an ablation, by its number, in a layer."""
        last = self.recording.layers[-1]
        return [
            self._reading(layer, self.values["relative_change"][number]),
            self._reading(last, self.values["last_relative_change"][number]),
        ]

    def _reading(self, layer: int, found: np.ndarray) -> AbstractEdit:
        depth = self.recording.anatomy.depths.at(layer, Site.OUTPUT)

        def read(state: Tensor, context: EditContext) -> None:
            plain = self.recording.residual_stream(depth=depth)[context.rows].to(state.device, torch.float64)
            size = lengths_of(plain)
            change = lengths_of(state.detach().double() - plain) / torch.where(size > 0, size, 1.0)
            found[context.rows] = token_mean(change.squeeze(-1).cpu(), self.weights[context.rows]).numpy()

        return Edit(Site.OUTPUT, [layer], read)


def _over_draws(
    measured: Mapping[str, np.ndarray],
    places: Sequence[tuple[int, ...]],
    axes: Mapping[str, list[Any]],
    damage: xr.Dataset,
) -> xr.Dataset:
    """The Measurement: means over the draws at each place (part, kind, layer, draw)."""
    shape, data = (*map(len, axes.values()), damage.sizes["prompt"]), {}
    indices = tuple(np.array([place[k] for place in places]) for k in range(len(axes)))
    counts = np.zeros(shape[:-1])
    np.add.at(counts, indices, 1)
    for name, values in measured.items():
        total = np.zeros(shape)
        np.add.at(total, indices, values)
        data[name] = total / counts[..., None]
    first = np.where(data["relative_change"] > 0, data["relative_change"], np.nan)
    data["repaired_share"] = 1 - data["last_relative_change"] / first
    dims = (*axes, "prompt")
    variables: dict[str, Any] = {}
    for name, values in data.items():
        attributes = {"long_name": NAMES[name]} | ({"units": "nats"} if name in IN_NATS else {})
        variables |= {name: (dims, values, attributes), f"{name}_null": ((), 0.0, attributes)}
    coords: dict[Any, Any] = {**axes, **{name: damage[name] for name in damage.coords if name != "edit"}}
    return check_replicates(xr.Dataset(variables, coords, {**damage.attrs, "title": "damage of ablation"}))
