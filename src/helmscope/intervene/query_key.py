"""Edits that compare noise on queries with noise on keys fairly: ``GaugeTransform``, ``ShiftKeys``,
``CenteredKeyNoise`` and ``MatchedQueryNoise``.

Attention depends on queries and keys only by the logits beta <q_i, k_j>, up to a constant per query. Two changes
therefore leave the model as it is, but not the size of its queries and keys:

    gauge:  q -> c q,  k -> k / c           shift:  k_j -> k_j + u  for all keys j of a head.

Noise of one sigma on queries and on keys, as [Additive transport] prints it, depends on the gauge: the ratio of the two
divergences grows as c^4 where they are quadratic in sigma. Two kinds of noise compare them fairly: noise relative to
keys centered over the text, which no shift changes, and query noise that moves each attention row as much as given key
noise does.

At the sites of queries and keys the rotary phases, if any, have already been applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.intervene.edit import SiteEdit
from helmscope.models.names import Layers
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Observer, Site
from helmscope.types import HelmscopeError, check_real, check_seed, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.sites import EditContext
    from helmscope.models.tap import Attended, Call

ROW_SUM = 1e-2  # deviation of the sum of a row of weights from 1 that rounding in bfloat16 explains


@dataclass(frozen=True, eq=False, repr=False)
class GaugeTransform(SiteEdit):
    """Multiply all queries by ``factor`` and divide all keys by it, q -> c q and k -> k / c.

    The logits <q, k> stay the same, bit by bit if c is a power of 2, and so does the model. Noise added after it (later
    in the list of edits) with standard deviation s is noise of s / c on the original queries and c s on the keys.

    >>> from helmscope.models.record import record
    >>> recording = record("A", ["Once upon a time"])
    >>> torch.equal(recording.under(GaugeTransform(factor=2)).logits(), recording.logits())
    True
    """

    layers: Layers | None = None
    factor: float = 1.0
    site = Site.QUERY

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", check_real("factor", self.factor, above=0))

    @property
    def sites(self) -> frozenset[Site]:
        """The sites of queries and keys."""
        return frozenset({Site.QUERY, Site.KEY})

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """c q or k / c."""
        return value * self.factor if context.site is Site.QUERY else value / self.factor


@dataclass(frozen=True, eq=False, repr=False)
class ShiftKeys(SiteEdit):
    """Add the same ``vector``, (r) or one per key head (kv_heads, r), to the keys of all tokens.

    All logits of a query change by the same constant, so that the attention weights stay the same up to rounding.

    >>> from helmscope.models.record import record
    >>> recording = record("A", ["Once upon a time"])
    >>> shifted = recording.under(ShiftKeys(vector=torch.ones(32)))
    >>> bool((shifted.kernel(layer=0) - recording.kernel(layer=0)).abs().max() < 1e-5)
    True
    """

    layers: Layers | None = None
    vector: Float[Tensor, "*kv_heads r"] | None = None
    site = Site.KEY

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` unless ``vector`` is a tensor of finite numbers."""
        super().check(anatomy)
        if not isinstance(self.vector, torch.Tensor) or not self.vector.dtype.is_floating_point:
            raise HelmscopeError(
                f"vector is {type_with_article(self.vector)}, but it must be a float tensor (r) or (kv_heads, r)"
            )
        if not bool(self.vector.isfinite().all()):
            raise HelmscopeError("vector holds a number that is not finite, but all must be finite")

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """k + u."""
        assert self.vector is not None
        heads, size = value.shape[1], value.shape[3]
        if tuple(self.vector.shape) not in ((size,), (heads, size)):
            raise HelmscopeError(
                f"vector has shape {tuple(self.vector.shape)}, but for the keys of layer {context.layer} it must be "
                f"{(size,)} or {(heads, size)}"
            )
        return value + self.vector.to(value).unsqueeze(-2)


@dataclass(frozen=True, eq=False, repr=False)
class CenteredKeyNoise(SiteEdit):
    """Add Gaussian noise to the keys whose standard deviation is ``relative_sigma`` times the root mean square of the
    keys of the head, centered over the visible tokens of the text:

        k_j -> k_j + relative s xi_j,      s^2 = mean_j |k_j - mean_j k_j|^2 / r.

    Unlike ``Perturb`` with ``relative_sigma`` it does not depend on a shift of the keys, which attention does not see.
    The noise depends on ``seed``, the layer and the index of the text, as that of ``Perturb`` does.

    >>> CenteredKeyNoise(relative_sigma=0.1, seed=1)
    CenteredKeyNoise(relative_sigma=0.1, seed=1)
    """

    layers: Layers | None = None
    relative_sigma: float = 0.0
    seed: int = 0
    site = Site.KEY

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "relative_sigma", check_real("relative_sigma", self.relative_sigma, at_least=0))
        object.__setattr__(self, "seed", check_seed(self.seed))

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The keys plus noise."""
        scale = self.relative_sigma * centered_size(value, context.visible)
        return value + scale[..., None, None].to(value) * context.normal(value, seed=self.seed)


@dataclass(frozen=True, eq=False, repr=False)
class MatchedQueryNoise(SiteEdit):
    """Add Gaussian noise to the queries that moves each attention row as much as noise on the keys does.

    At second order the expected divergences of a row A of attention weights are equal (``key_noise_kl`` and
    ``query_noise_kl``) if the noise of query i has the standard deviation

        s_Q(i) = s_K |q_i| sqrt((1 - sum_j A_ij^2) / tr Cov_A(k)),

    which ``MatchedQueryNoise.of`` computes from a recording without noise. It is 0 where tr Cov_A(k) = 0, as at the
    first token of a causal model. ``sigma`` holds it as (layer, batch, heads, n).

    >>> from helmscope.models.record import record
    >>> noise = MatchedQueryNoise.of(record("A", ["Once upon a time"]), sigma=0.1)
    >>> noise.sigma.shape[0], noise.sigma.shape[2], float(noise.sigma[..., 0].max())
    (12, 6, 0.0)
    """

    layers: Layers | None = None
    sigma: Float[Tensor, "layer batch heads n"] | None = None
    seed: int = 0
    site = Site.QUERY

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", check_seed(self.seed))

    @classmethod
    def of(
        cls,
        recording: Recording,
        *,
        sigma: float | None = None,
        relative_sigma: float | None = None,
        layers: Layers | None = None,
        seed: int = 0,
    ) -> MatchedQueryNoise:
        """The query noise that matches ``Perturb(site=Site.KEY, sigma=sigma)`` or ``CenteredKeyNoise(relative_sigma=
        relative_sigma)`` on the texts of a recording, by one forward pass. Raises HelmscopeError unless exactly one of
        the two is given, and for a model whose attention cannot be edited or whose weights do not sum to 1.

        >>> from helmscope.models.record import record
        >>> recording = record("A", ["Once upon a time"])
        >>> one, two = (MatchedQueryNoise.of(recording, sigma=sigma).sigma for sigma in (0.1, 0.2))
        >>> torch.allclose(2 * one, two)
        True
        """
        check_recording(recording)
        if (sigma is None) == (relative_sigma is None):
            raise HelmscopeError(
                f"sigma is {sigma!r} and relative_sigma is {relative_sigma!r}, but exactly one of them must be given"
            )
        name, size = ("sigma", sigma) if relative_sigma is None else ("relative_sigma", relative_sigma)
        size = check_real(name, size, at_least=0)
        SiteEdit.check(cls(layers, seed=seed), recording.anatomy)  # that of this class needs the sizes
        observer = _MatchedSizes(len(recording.anatomy.layers), size, of_centered=relative_sigma is not None)
        recording.runner.forward(observer)
        return cls(layers, torch.stack([torch.cat(chunks) for chunks in observer.sizes]), seed)

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``HelmscopeError`` unless ``sigma`` has an entry for every layer, finite and >= 0."""
        super().check(anatomy)
        count = len(anatomy.layers)
        if not isinstance(self.sigma, torch.Tensor) or self.sigma.ndim != 4 or len(self.sigma) != count:
            shown = tuple(self.sigma.shape) if isinstance(self.sigma, torch.Tensor) else type_with_article(self.sigma)
            raise HelmscopeError(f"sigma is {shown}, but it must be a tensor ({count}, batch, heads, n)")
        if not bool((self.sigma.isfinite() & (self.sigma >= 0)).all()):
            raise HelmscopeError("sigma holds a negative number or one that is not finite, but all must be >= 0")

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The queries plus noise."""
        assert self.sigma is not None
        sigma = self.sigma[context.layer]
        if tuple(sigma.shape) != (context.texts, *value.shape[1:3]):
            raise HelmscopeError(
                f"sigma has {tuple(sigma.shape)} texts, heads and tokens, but layer {context.layer} has "
                f"{(context.texts, *value.shape[1:3])}"
            )
        return value + sigma[context.rows].unsqueeze(-1).to(value) * context.normal(value, seed=self.seed)


def matching_unsupported(recording: Recording) -> str | None:
    """One sentence that says why noise on queries and on keys cannot be matched in a model, from its first text; None
    if it can.

    >>> from helmscope.models.record import record
    >>> matching_unsupported(record("A", ["Once upon a time"]))
    """
    observer = _MatchedSizes(len(recording.anatomy.layers), 1.0, of_centered=True)
    try:
        SiteEdit.check(MatchedQueryNoise(), recording.anatomy)
        recording.runner.forward(observer, rows=slice(0, 1))
    except HelmscopeError as error:
        return str(error)
    return None


class _MatchedSizes(Observer):
    """Observer that computes the standard deviations of ``MatchedQueryNoise`` in every layer."""

    sees_attention = True
    needs_all_layers = True

    def __init__(self, layers: int, size: float, *, of_centered: bool) -> None:
        self.size, self.of_centered = size, of_centered
        self.sizes: list[list[Tensor]] = [[] for _ in range(layers)]

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Compute and keep them for the texts of this chunk."""
        assert call is not None
        weights, query, key = (at_least_single(one) for one in (result.weights, call.query, call.key))
        spread = key_spread(weights, key.repeat_interleave(call.repeats, 1))
        noise = self.size * torch.ones_like(key[:, :, 0, 0])
        if self.of_centered:
            noise = noise * centered_size(key, self.chunk.visible)
        moved = collision_gap(weights) / torch.where(spread > 0, spread, torch.inf)
        sizes = torch.linalg.vector_norm(query, dim=-1) * moved.sqrt()
        self.sizes[layer].append(noise.repeat_interleave(call.repeats, 1).unsqueeze(-1) * sizes)


def at_least_single(value: Tensor) -> Tensor:
    """A copy without gradient in float32, or in float64 if it is already."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def centered_size(
    key: Float[Tensor, "rows kv_heads n r"], visible: Bool[Tensor, "rows n"] | None
) -> Float[Tensor, "rows kv_heads"]:
    """The root mean square over visible tokens and coordinates of the keys minus their mean over visible tokens."""
    key = at_least_single(key)
    seen = key.new_ones(key.shape[0], key.shape[2]) if visible is None else visible.to(key)
    share = (seen / seen.sum(-1, keepdim=True).clamp(min=1))[:, None, :, None]
    centered = key - (share * key).sum(2, keepdim=True)
    return (share * centered.square()).sum(2).mean(-1).sqrt()


def collision_gap(weights: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n"]:
    """1 - sum_j A_ij^2 of rows that sum to 1, as sum_j A_ij (1 - A_ij), which keeps its digits near 0.

    Raises HelmscopeError if a row does not sum to 1, as with learned attention sinks.
    """
    off = float((weights.sum(-1) - 1).abs().max())
    if not off <= ROW_SUM:
        raise HelmscopeError(f"weights have a row whose sum differs from 1 by {off:.2g}, but every row must sum to 1")
    return (weights * (1 - weights)).sum(-1)


@full_precision
def key_spread(weights: Float[Tensor, "*batch n m"], keys: Float[Tensor, "*batch m r"]) -> Float[Tensor, "*batch n"]:
    """tr Cov_A(k) = sum_j A_ij |k_j - m_i|^2 with m_i = sum_j A_ij k_j, for every query i."""
    # by differences: |k|^2 - |m|^2 would lose the digits of a peaked row
    distances = torch.cdist(weights @ keys, keys, compute_mode="donot_use_mm_for_euclid_dist")
    return (weights * distances.square()).sum(-1)
