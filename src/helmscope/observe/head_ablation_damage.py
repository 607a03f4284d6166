"""The damage of ablating each head, beside the rank of its kernel, and of ablating two together.

The kinds are those of ``layer_ablation_damage``: the head's output becomes 0, or its mean over the tokens of all
prompts, or noise of the relative norm r, in a random direction in the range of the head's output matrix, is added to
the state after attention. For a pair of heads,

    ratio  =  joint damage of zeroing both / sum of the damages of zeroing each

is 1 where damages add up, above 1 where either head can stand in for the other, and below 1 where the second head
matters less without the first. Since damage depends on more than the layer, a pair (a, b) of one layer is compared with
a pair (a, c) in which c is a head of another layer and does nearly the damage of b. Source: [Additive transport], the
last paragraph of Section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.intervene.attention import AblateHead
from helmscope.intervene.edit import Edit
from helmscope.models.names import Layers
from helmscope.models.output_matrix import output_matrices, output_unsupported
from helmscope.models.recording import check_recording
from helmscope.models.sites import LEADS_TO, Site
from helmscope.observe.damage import damage_under_edits
from helmscope.observe.kernel import check_kernel, effective_keys, normalized_rows
from helmscope.observe.layer_ablation_damage import (
    RELATIVE_NORM,
    AblationKind,
    chosen,
    noise_seed,
    relative_noise,
    site_means,
)
from helmscope.observe.loss import heads_to_ablate
from helmscope.observe.rank import spectral_ranks
from helmscope.observe.track import token_mean, token_weights
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    Instrument,
    Needs,
    check_integer,
    check_progress,
    check_real,
    check_replicates,
    check_seed,
    type_with_article,
)

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.recording import Recording
    from helmscope.models.sites import AbstractEdit
    from helmscope.types import AttentionTensors, ReplayContext
    from helmscope.types.progress import ProgressOption

Head = tuple[int, int]  # layer and number
ZERO_ONLY = (AblationKind.ZERO,)
TOLERANCE, SMALLEST_DAMAGE = 0.2, 1e-6
KL = {"long_name": "KL divergence of the next-token distribution from that without the ablation", "units": "nats"}
INCREASE = {"long_name": "increase of the next-token loss", "units": "nats"}
EFFECTIVE_KEYS = {"long_name": "effective number of keys, mean over queries", "valid_min": 1.0}
KERNEL_RANK = {"long_name": "effective rank of the kernel", "valid_min": 1.0}


class KernelRank(Instrument):
    """Instrument: how many keys a head mixes, and how many mixtures it tells apart, in every layer, by head.

    ``effective_keys`` is the mean over queries of 1 / sum_j P_ij^2, and ``kernel_rank`` the effective rank
    exp(-sum p log p), p = s / sum s, of the singular values s of the kernel P with normalized rows: 1 if all queries
    attend alike, n if each attends to a key of its own.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(4).expand(1, 4, 4), times=[0.0])
    >>> measured = run.replay(KernelRank())["kernel_rank"]
    >>> round(measured.effective_keys.item(), 5), round(measured.kernel_rank.item(), 5)
    (4.0, 1.0)
    """

    name = "kernel_rank"
    needs = Needs.KERNEL

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the ranks of the kernels of a layer."""
        kernel = check_kernel(tensors.kernel)
        weights = token_weights(tensors.state, context.weights).to(kernel)
        weights = weights if kernel.ndim == 3 else weights.unsqueeze(1).expand(kernel.shape[:-1])
        self.keep(
            context,
            {"effective_keys": token_mean(effective_keys(kernel), weights), "kernel_rank": _kernel_rank(kernel)},
            axes=("head",),
        )

    def result(self) -> xr.Dataset:
        """The ranks of every head (if there are several), layer and replicate."""
        measured = super().result()
        measured.effective_keys.attrs |= EFFECTIVE_KEYS
        measured.kernel_rank.attrs |= KERNEL_RANK
        return measured


@full_precision
def _kernel_rank(kernel: Tensor) -> Tensor:
    """The effective rank; queries that see no key, such as padding, are rows of zeros."""
    values = torch.linalg.svdvals(normalized_rows(kernel).nan_to_num(0.0))
    return spectral_ranks(values)["effective_rank"]


@shows_progress("damage of ablating heads")
def head_ablation_damage(
    recording: Recording,
    *,
    kinds: Sequence[AblationKind] = ZERO_ONLY,
    layers: Layers | None = None,
    heads: str | Sequence[str] | None = None,
    relative_norm: float = RELATIVE_NORM,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage of ablating each head by each of ``kinds``: ``kl`` and ``loss_increase``, in nats, along (kind, layer,
    head, prompt), beside ``effective_keys`` and ``kernel_rank`` of its kernel (``KernelRank``), along (layer, head,
    prompt).

    ``layers`` and ``heads`` choose heads as in ``head_ablation_loss``; entries of others are NaN. Null values of the
    damage are 0. Takes one forward pass from its layer on for each head and kind, and one for the kernels. Raises
    HelmscopeError where ``head_ablation_loss`` does, and for noise in a layer whose output matrix cannot be read.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> measured = head_ablation_damage(record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])), heads="L1H0")
    >>> dict(measured.kl.sizes), dict(measured.kernel_rank.sizes)
    ({'kind': 1, 'layer': 1, 'head': 1, 'prompt': 2}, {'layer': 1, 'head': 1, 'prompt': 2})
    """
    report, seed = check_progress(progress), check_seed(seed)
    size, chosen_kinds = check_real("relative_norm", relative_norm, above=0), chosen("kinds", kinds, AblationKind)
    check_recording(recording)
    places = heads_to_ablate(recording, layers, heads)
    noisy = noise_seed(seed, 0, 0)
    ablations = _Ablations(recording, places, size, noisy, with_means=AblationKind.MEAN in chosen_kinds)
    edits = {f"{kind.value} {place}": [ablations.of(kind, place)] for kind in chosen_kinds for place in places}
    damage = damage_under_edits(recording, edits, progress=report)
    kernels = recording.replay(KernelRank())[KernelRank.name]
    axes = {"layer": sorted({layer for layer, _ in places}), "head": sorted({head for _, head in places})}
    shape = (len(chosen_kinds), *map(len, axes.values()), damage.sizes["prompt"])
    variables: dict[str, Any] = {}
    for name, attributes in (("kl", KL), ("loss_increase", INCREASE)):
        values, numbers = np.full(shape, np.nan), iter(damage[name].values)
        for kind in range(len(chosen_kinds)):
            for layer, head in places:
                values[kind, axes["layer"].index(layer), axes["head"].index(head)] = next(numbers)
        variables |= {name: (("kind", *axes, "prompt"), values, attributes), f"{name}_null": 0.0}
    for name in ("effective_keys", "kernel_rank"):
        variables[name] = kernels[name].sel(axes).transpose("layer", "head", "prompt").variable
    coords = {"kind": [kind.value for kind in chosen_kinds], **axes, **_prompts(damage)}
    return check_replicates(xr.Dataset(variables, coords, {**damage.attrs, "title": "damage of ablating heads"}))


def _prompts(damage: xr.Dataset) -> Mapping[Any, Any]:
    return {name: damage[name] for name in damage.coords if name != "edit"}


class _Ablations:
    """The edits that ablate heads."""

    def __init__(
        self, recording: Recording, places: Iterable[Head], relative: float, seed: int, *, with_means: bool
    ) -> None:
        self.layers, self.relative, self.seed = recording.anatomy.layers, relative, seed
        for layer, head in places:  # raises for a head that cannot be edited, before anything runs
            AblateHead(layer=layer, head=head).check(recording.anatomy)
        self.means = site_means(recording, [Site.HEADS]) if with_means else {}

    def of(self, kind: AblationKind, place: Head) -> AbstractEdit:
        """The edit that ablates a head."""
        layer, head = place
        if kind is AblationKind.ZERO:
            return AblateHead(layer=layer, head=head)
        if kind is AblationKind.MEAN:
            return Edit(Site.HEADS, [layer], self._put_mean(place))
        reason = output_unsupported(self.layers[layer])
        if reason is not None:
            raise HelmscopeError(f"{reason} in layer {layer}, but noise needs the matrix by which each head writes")
        matrix = output_matrices(self.layers[layer])[head].detach()
        return Edit(LEADS_TO[Site.ATTENTION], [layer], relative_noise(self.relative, self.seed, matrix))

    def _put_mean(self, place: Head) -> Any:
        layer, head = place
        mean = self.means[Site.HEADS, layer][head]

        def replaced(outputs: Tensor) -> Tensor:
            changed = outputs.clone()
            changed[:, :, head] = mean.to(outputs)
            return changed

        return replaced


@dataclass(frozen=True)
class MatchedPairs:
    """A pair of heads (``shared``, ``same_layer``) of one layer and a pair (``shared``, ``other_layer``) across layers.

    >>> MatchedPairs((0, 1), (0, 2), (3, 1)).pairs
    (((0, 1), (0, 2)), ((0, 1), (3, 1)))
    """

    shared: Head
    same_layer: Head
    other_layer: Head

    @property
    def pairs(self) -> tuple[tuple[Head, Head], tuple[Head, Head]]:
        """The pair of one layer, and the pair across layers."""
        return (self.shared, self.same_layer), (self.shared, self.other_layer)


def matched_pairs(
    damage: Mapping[Head, float], count: int, *, tol: float = TOLERANCE, seed: int = 0
) -> list[MatchedPairs]:
    """At most ``count`` random matched pairs: ``same_layer`` and ``other_layer`` do damages that differ by a factor of
    at most exp(tol). Every head is in at most one pair of one layer, and is at most once ``other_layer``; the layers of
    the pairs take turns. Heads that do no damage should be left out of ``damage``.

    >>> matched_pairs({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 2.1, (2, 0): 9.0}, 4)
    [MatchedPairs(shared=(0, 0), same_layer=(0, 1), other_layer=(1, 0))]
    """
    count, tol = check_integer("count", count, at_least=1), check_real("tol", tol, above=0)
    draw = np.random.default_rng(check_seed(seed))
    heads: dict[int, list[Head]] = {}
    for place in damage:
        heads.setdefault(place[0], []).append(place)
    for row in heads.values():
        draw.shuffle(row)
    found: list[MatchedPairs] = []
    others: set[Head] = set()
    while len(found) < count and any(len(row) > 1 for row in heads.values()):
        for layer in draw.permutation(sorted(heads)).tolist():
            if len(heads[layer]) < 2 or len(found) == count:
                continue
            pair = heads[layer].pop(), heads[layer].pop()
            best = min(
                (
                    (abs(np.log(damage[other] / damage[same])), shared, same, other)
                    for shared, same in (pair, pair[::-1])
                    for other in damage
                    if other[0] != layer and other not in others
                ),
                default=None,
            )
            if best is not None and best[0] <= tol:
                found.append(MatchedPairs(*best[1:]))
                others.add(best[3])
    return found


@shows_progress("interaction of heads")
def head_interaction(
    recording: Recording,
    *,
    pairs: int = 24,
    tol: float = TOLERANCE,
    min_damage: float = SMALLEST_DAMAGE,
    alone: xr.DataArray | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The joint damage of ablating two heads, for random pairs of one layer and pairs across layers that match them
    (``matched_pairs``): ``joint_damage`` and ``summed_damage`` along (pair_kind, pair, prompt), divergences in nats.

    Coordinates ``first`` and ``second`` (pair_kind, pair) name the heads; ``kl`` along (layer, head, prompt) is the
    damage of each head alone. Heads whose mean damage is below ``min_damage`` are in no pair. There may be fewer pairs
    than asked for, also none. ``alone`` is the damage of zeroing single heads, (layer, head, prompt), if it is known,
    ``head_ablation_damage(recording).kl.sel(kind="zero")``: pairs are then of these heads. Takes one forward pass from
    its layer on for each pair, and for each head unless ``alone`` is given. Raises HelmscopeError where
    ``head_ablation_loss`` does, and for an ``alone`` of other prompts.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from helmscope.models.record import record
    >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    >>> recording = record(model, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    >>> measured = head_interaction(recording, pairs=1, tol=9.0, min_damage=1e-12)
    >>> dict(measured.joint_damage.sizes), measured.pair_kind.values.tolist()
    ({'pair_kind': 2, 'pair': 1, 'prompt': 2}, ['one layer', 'across layers'])
    """
    report, seed = check_progress(progress), check_seed(seed)
    count = check_integer("pairs", pairs, at_least=1)
    smallest = check_real("min_damage", min_damage, above=0)
    heads = len(heads_to_ablate(check_recording(recording), None, None))
    share = heads / (heads + 2 * count) if alone is None else 0.0
    if alone is None:
        alone = _alone(recording, lambda done: report(share * done))
    single = _by_head(recording, alone)
    mean = {place: float(kl.mean()) for place, kl in single.items()}
    matched = matched_pairs({place: kl for place, kl in mean.items() if kl >= smallest}, count, tol=tol, seed=seed)
    order = [each.pairs[pair_kind] for pair_kind in range(2) for each in matched]
    shape = (2, len(matched), len(recording.batch))
    joint = np.zeros(shape)
    if matched:
        joint[:] = _zeroed(recording, order, lambda done: report(share + (1 - share) * done)).kl.values.reshape(shape)
    report(1.0)
    summed = np.array([single[first] + single[second] for first, second in order]).reshape(shape)
    names = np.array([[f"L{layer}H{head}" for layer, head in pair] for pair in order], dtype=str).reshape(
        2, len(matched), 2
    )
    dims = ("pair_kind", "pair", "prompt")
    variables: dict[str, Any] = {
        "joint_damage": (dims, joint, {**KL, "long_name": "damage of ablating both heads"}),
        "summed_damage": (dims, summed, {**KL, "long_name": "sum of the damages of ablating each head"}),
        "kl": alone.drop_vars("kind", errors="ignore"),
    }
    coords = {
        "pair_kind": ["one layer", "across layers"],
        "pair": np.arange(len(matched)),
        "first": (("pair_kind", "pair"), names[..., 0]),
        "second": (("pair_kind", "pair"), names[..., 1]),
    }
    nulls = {"joint_damage_null": 0.0, "summed_damage_null": 0.0, "kl_null": 0.0}
    attributes = {"model": recording.origin.title, "title": "interaction of heads"}
    return check_replicates(xr.Dataset(variables | nulls, coords, attributes))


def _alone(recording: Recording, progress: Any) -> xr.DataArray:
    """The damage of zeroing each head, along (layer, head, prompt)."""
    places = heads_to_ablate(recording, None, None)
    damage = _zeroed(recording, [(place,) for place in places], progress)
    axes = {"layer": sorted({layer for layer, _ in places}), "head": sorted({head for _, head in places})}
    values = np.full((*map(len, axes.values()), damage.sizes["prompt"]), np.nan)
    for (layer, head), kl in zip(places, damage.kl.values, strict=True):
        values[axes["layer"].index(layer), axes["head"].index(head)] = kl
    return xr.DataArray(values, {**axes, **_prompts(damage)}, (*axes, "prompt"), attrs=KL)


def _by_head(recording: Recording, alone: xr.DataArray) -> dict[Head, np.ndarray]:
    """The damages of single heads over prompts; raises HelmscopeError unless they are of the recording's prompts."""
    axes, prompts = ("layer", "head", "prompt"), len(recording.batch)
    if not isinstance(alone, xr.DataArray) or set(alone.dims) != set(axes) or alone.sizes["prompt"] != prompts:
        shown = dict(alone.sizes) if isinstance(alone, xr.DataArray) else type_with_article(alone)
        raise HelmscopeError(
            f"alone is {shown}, but it must be a DataArray along (layer, head, prompt) with the {prompts} prompts of "
            "the recording"
        )
    values = alone.transpose(*axes)
    found = {
        (int(layer), int(head)): kl
        for layer, of_layer in zip(values.layer.values, values.values, strict=True)
        for head, kl in zip(values["head"].values, of_layer, strict=True)
    }
    return {place: kl for place, kl in found.items() if not np.isnan(kl).all()}


def _zeroed(recording: Recording, groups: Sequence[Sequence[Head]], progress: Any) -> xr.Dataset:
    """The damage of zeroing each group of heads together."""
    edits = {f"{k}": [AblateHead(layer=layer, head=head) for layer, head in group] for k, group in enumerate(groups)}
    return damage_under_edits(recording, edits, progress=progress)
