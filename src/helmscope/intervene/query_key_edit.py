"""Edits that change queries or keys as a whole: ``Normalize`` to one length, ``Blur`` along the tokens, and the pair of
strengths at which a change of the queries and a change of the keys move the logits equally (``match_strengths``).

An edit of strength t replaces each vector x by x + t (f(x) - x). The logits change linearly in t, so that their
variance under the attention weights, which is twice the divergence of an attention row at second order, is t^2 times
that of the full change.

At the sites of queries and keys the rotary phases, if any, have already been applied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.intervene.edit import SiteEdit
from helmscope.intervene.query_key import at_least_single, collision_gap
from helmscope.models.names import Layers
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Observer, Site
from helmscope.types import HelmscopeError, check_real, short_repr, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import EditContext
    from helmscope.models.tap import Attended, Call


class QueryKeyEdit(SiteEdit):
    """Base of edits of queries or keys with a strength: a number, or one number for every layer, text and key head.

    >>> isinstance(Blur(site=Site.QUERY), QueryKeyEdit), Blur().strength
    (True, 1.0)
    """

    allowed = (Site.QUERY, Site.KEY)
    strength: float | Float[Tensor, "layer batch kv_heads"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.strength, torch.Tensor):
            object.__setattr__(self, "strength", check_real("strength", self.strength, at_least=0))

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` unless a strength by layers has an entry for every layer, finite and >= 0."""
        super().check(anatomy)
        if isinstance(self.strength, torch.Tensor):
            count, shape = len(anatomy.layers), tuple(self.strength.shape)
            if len(shape) != 3 or shape[0] != count:
                raise HelmscopeError(f"strength is {shape}, but it must be a number or ({count}, batch, kv_heads)")
            if not bool((self.strength.isfinite() & (self.strength >= 0)).all()):
                raise HelmscopeError("strength holds a negative number or one that is not finite, but all must be >= 0")

    @abstractmethod
    def changed(self, value: Tensor, context: EditContext) -> Float[Tensor, "rows heads n r"]:
        """f(x), the vectors under the full change.

        >>> from helmscope.models.sites import EditContext
        >>> context = EditContext(site=Site.KEY, layer=0, rows=slice(0, 1), texts=1)
        >>> Blur(window=[1.0, 1.0]).changed(torch.tensor([[[[0.0], [2.0]]]]), context).flatten().tolist()
        [0.0, 1.0]
        """

    @abstractmethod
    def scaled(self, factors: Float[Tensor, "layer batch kv_heads"]) -> Self:
        """The edit with its strength multiplied by factors.

        >>> Blur(strength=0.5).scaled(torch.ones(12, 1, 6)).strength.shape
        torch.Size([12, 1, 6])
        """

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """x + t (f(x) - x)."""
        strength = self.strength
        if isinstance(strength, torch.Tensor):
            texts, heads = strength.shape[1:]
            if texts != context.texts or value.shape[1] % heads:
                raise HelmscopeError(
                    f"strength has {texts} texts and {heads} heads, but layer {context.layer} has {context.texts} "
                    f"texts and {value.shape[1]} heads"
                )
            of_heads = strength[context.layer, context.rows]
            strength = of_heads.repeat_interleave(value.shape[1] // heads, 1)[..., None, None].to(value)
        return value + strength * (self.changed(value, context) - value)


@dataclass(frozen=True, eq=False, repr=False)
class Normalize(QueryKeyEdit):
    """Give all queries or keys of a head the same length, s, about its center c:

        f(x) = c + s (x - c) / |x - c|;

    ``centers`` (layer, heads, r) and ``lengths`` (layer, heads) are c and s. ``Normalize.of`` computes them from a
    recording: s is the root mean square of |x - c| over the visible tokens of all texts, and c is 0, as in QK-norm, or
    their mean with ``centered``. Normalizing keys about their mean does not depend on a shift of all keys, which
    attention does not see.

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time", "The cat sat"])
    >>> Normalize.of(recording, site=Site.KEY, centered=True).lengths.shape
    torch.Size([12, 6])
    """

    layers: Layers | None = None
    site: Site = Site.KEY
    centers: Float[Tensor, "layer heads r"] | None = None
    lengths: Float[Tensor, "layer heads"] | None = None
    strength: float | Float[Tensor, "layer batch kv_heads"] = 1.0

    @classmethod
    def of(
        cls,
        recording: Recording,
        *,
        site: Site = Site.KEY,
        centered: bool = False,
        layers: Layers | None = None,
    ) -> Normalize:
        """The edit with the lengths of a recording, and with its mean vectors as centers if ``centered``; by one
        forward. Raises HelmscopeError for another site and for a model whose attention cannot be edited.

        >>> from helmscope import record
        >>> float(Normalize.of(record("A", ["Once upon a time"])).centers.abs().max())
        0.0
        """
        check_recording(recording)
        SiteEdit.check(cls(layers, site), recording.anatomy)
        observer = _Moments(site)
        recording.runner.forward(observer)
        centers, lengths = zip(*(observer.center_and_length(k, centered) for k in sorted(observer.sums)), strict=True)
        return cls(layers, site, torch.stack(centers), torch.stack(lengths))

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` unless there are centers and lengths for every layer."""
        super().check(anatomy)
        count = len(anatomy.layers)
        for name, value, axes in (("centers", self.centers, 3), ("lengths", self.lengths, 2)):
            if not isinstance(value, torch.Tensor) or value.ndim != axes or len(value) != count:
                shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type_with_article(value)
                raise HelmscopeError(f"{name} is {shown}, but it must be a tensor with {axes} axes and {count} layers")

    def changed(self, value: Tensor, context: EditContext) -> Float[Tensor, "rows heads n r"]:
        """c + s (x - c) / |x - c|, and c where x = c.

        >>> from helmscope.models.sites import EditContext
        >>> context = EditContext(site=Site.KEY, layer=0, rows=slice(0, 1), texts=1)
        >>> unit = Normalize(centers=torch.zeros(1, 1, 2), lengths=torch.ones(1, 1))
        >>> unit.changed(torch.tensor([[[[3.0, 4.0]]]]), context)
        tensor([[[[0.6000, 0.8000]]]])
        """
        assert self.centers is not None
        assert self.lengths is not None
        center = self.centers[context.layer].unsqueeze(-2).to(value)
        size = self.lengths[context.layer][:, None, None].to(value)
        return center + size * torch.nn.functional.normalize(value - center, dim=-1, eps=1e-30)

    def scaled(self, factors: Float[Tensor, "layer batch kv_heads"]) -> Normalize:
        """The edit with its strength multiplied by factors.

        >>> Normalize().scaled(torch.full((1, 1, 1), 0.5)).strength.item()
        0.5
        """
        return replace(self, strength=factors * self.strength)


@dataclass(frozen=True, eq=False, repr=False)
class Blur(QueryKeyEdit):
    """Average the queries or keys along the tokens, each with earlier ones only:

        f(x)_t = sum_l w_l x_{t-l} / sum_l w_l,    over the lags l = 0, 1, ... with t - l >= 0.

    ``window`` holds the weights w_0, w_1, ..., by default 1/2, 1/4 and 1/4: the kernel [1/4, 1/2, 1/4] with its later
    half moved to the past, since a token of a causal model must not see a later one.

    >>> from helmscope.models.sites import EditContext
    >>> context = EditContext(site=Site.KEY, layer=0, rows=slice(0, 1), texts=1)
    >>> Blur().changed(torch.tensor([[[[0.0], [3.0], [4.0]]]]), context).flatten().tolist()
    [0.0, 2.0, 2.75]
    """

    layers: Layers | None = None
    site: Site = Site.KEY
    window: Sequence[float] = (0.5, 0.25, 0.25)
    strength: float | Float[Tensor, "layer batch kv_heads"] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.window, str) or not isinstance(self.window, Sequence) or not self.window:
            raise HelmscopeError(
                f"window is {short_repr(self.window)}, but it must be a list such as [0.5, 0.25, 0.25]"
            )
        weights = tuple(check_real("window", weight, at_least=0) for weight in self.window)
        if weights[0] == 0:
            raise HelmscopeError("window begins with 0, but the weight of lag 0 must be > 0")
        object.__setattr__(self, "window", weights)

    def changed(self, value: Tensor, context: EditContext) -> Float[Tensor, "rows heads n r"]:
        """The averages; texts begin at their first token, padding comes after them.

        >>> from helmscope.models.sites import EditContext
        >>> context = EditContext(site=Site.KEY, layer=0, rows=slice(0, 1), texts=1)
        >>> Blur(window=[1.0]).changed(torch.ones(1, 1, 2, 1), context).flatten().tolist()
        [1.0, 1.0]
        """
        total, mass = self.window[0] * value, value.new_full((value.shape[-2], 1), self.window[0])
        for lag, weight in enumerate(self.window[1 : value.shape[-2]], start=1):
            total[..., lag:, :] += weight * value[..., :-lag, :]
            mass[lag:] += weight
        return total / mass

    def scaled(self, factors: Float[Tensor, "layer batch kv_heads"]) -> Blur:
        """The edit with its strength multiplied by factors.

        >>> Blur().scaled(torch.full((1, 1, 1), 0.5)).strength.item()
        0.5
        """
        return replace(self, strength=factors * self.strength)


Queries = TypeVar("Queries", bound=QueryKeyEdit)
Keys = TypeVar("Keys", bound=QueryKeyEdit)


def match_strengths(recording: Recording, queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    """Scale an edit of the queries and an edit of the keys so that both move the logits equally.

    With A the attention weights and dl the change of the logits of a row, V = Var_A(dl), averaged over the rows of a
    text and the query heads that share a key head, is V_Q for the queries and V_K for the keys at the strengths given.
    They are multiplied by sqrt(min(V_Q, V_K) / V_Q) and sqrt(min(V_Q, V_K) / V_K) in each layer, text and key head: the
    change that moves the logits less stays as it is. Takes one forward pass. Raises HelmscopeError for edits at other
    sites, and for a model whose attention cannot be edited or whose weights do not sum to 1.

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time", "The cat sat"])
    >>> queries, keys = match_strengths(recording, Blur(site=Site.QUERY), Blur(site=Site.KEY))
    >>> queries.strength.shape, bool((torch.maximum(queries.strength, keys.strength).max() == 1))
    (torch.Size([12, 2, 6]), True)
    """
    check_recording(recording)
    for name, edit, site in (("queries", queries, Site.QUERY), ("keys", keys, Site.KEY)):
        if not isinstance(edit, QueryKeyEdit) or edit.site is not site:
            raise HelmscopeError(f"{name} is {short_repr(edit)}, but it must be a Normalize or a Blur at {site}")
        edit.check(recording.anatomy)
    observer = _LogitVariances(len(recording.anatomy.layers), queries, keys)
    recording.runner.forward(observer)
    variances = [torch.stack([torch.cat(chunks) for chunks in side]) for side in observer.found]
    smaller = torch.minimum(*variances)
    factors = [torch.where(each > 0, (smaller / each.clamp(min=1e-300)).sqrt(), 0.0) for each in variances]
    return queries.scaled(factors[0]), keys.scaled(factors[1])


class _Moments(Observer):
    """Sums of the queries or keys and of their squared lengths over the visible tokens of all texts."""

    sees_attention = True
    needs_all_layers = True

    def __init__(self, site: Site) -> None:
        self.site = site
        self.sums: dict[int, tuple[Tensor, Tensor, float]] = {}

    def before(self, layer: int, call: Call) -> None:
        """Add those of the texts of this chunk."""
        value = (call.query if self.site is Site.QUERY else call.key).detach().double()
        visible = self.chunk.visible
        seen = value.new_ones(value.shape[0], value.shape[2]) if visible is None else visible.to(value)
        value = value * seen[:, None, :, None]
        new = value.sum((0, 2)), value.square().sum((0, 2, 3)), float(seen.sum())
        old = self.sums.get(layer)
        self.sums[layer] = new if old is None else (old[0] + new[0], old[1] + new[1], old[2] + new[2])

    def center_and_length(self, layer: int, centered: bool) -> tuple[Tensor, Tensor]:
        """The mean vector or 0, and the root mean square of the distance from it, per head."""
        total, squares, count = self.sums[layer]
        center = total / count if centered else torch.zeros_like(total)
        return center, (squares / count - center.square().sum(-1)).clamp(min=0).sqrt()


class _LogitVariances(Observer):
    """The mean variance of the change of the logits by an edit of the queries and by one of the keys, in every layer,
    over (rows, kv_heads).
    """

    sees_attention = True
    needs_all_layers = True

    def __init__(self, layers: int, queries: QueryKeyEdit, keys: QueryKeyEdit) -> None:
        self.edits = (queries, keys)
        self.found: tuple[list[list[Tensor]], ...] = ([[] for _ in range(layers)], [[] for _ in range(layers)])

    @full_precision
    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Compute and keep them for the texts of this chunk."""
        assert call is not None
        weights, query, key = (at_least_single(one) for one in (result.weights, call.query, call.key))
        collision_gap(weights)  # refuses rows that do not sum to 1
        moved = [
            edit.new(value, self.chunk.at(edit.site, layer)) - value
            for edit, value in zip(self.edits, (query, key), strict=True)
        ]
        changes = (
            moved[0] @ key.repeat_interleave(call.repeats, 1).mT,
            query @ moved[1].repeat_interleave(call.repeats, 1).mT,
        )
        visible = self.chunk.visible
        seen = query.new_ones(query.shape[0], query.shape[2]) if visible is None else visible.to(query)
        share = (seen / seen.sum(-1, keepdim=True)).unsqueeze(1)
        for side, change in zip(self.found, changes, strict=True):
            mean = (weights * change).sum(-1, keepdim=True)
            variance = (share * (weights * (change - mean).square()).sum(-1)).sum(-1)
            side[layer].append(variance.reshape(len(variance), -1, call.repeats).mean(2).double())
