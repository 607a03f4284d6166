"""Perturbations of the residual stream that are limited to a band of frequencies along the tokens:
``PerturbFourierBand``, and ``ScaleLogits``, which makes attention sharper or more diffuse.

The basis along n tokens is the orthonormal real Fourier basis, with t = 0, ..., n - 1 and m = 1, 2, ... < n / 2,

    1 / sqrt n,    sqrt(2 / n) cos(2 pi m t / n),    sqrt(2 / n) sin(2 pi m t / n),    (-1)^t / sqrt n  if n is even,

and the frequency of a vector is 2 m / n, from 0 for the constant one to 1 for the alternating one. The two vectors of a
frequency have the squares 2 / n at every token, so that random perturbations of a band have the same expected norm at
all tokens; for cosines alone, as of a DCT, low frequencies would be larger at the ends of the text, and high ones
smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.intervene.edit import SiteEdit
from helmscope.models.names import Layers
from helmscope.models.sites import EDITABLE_STATES, Site
from helmscope.types import HelmscopeError, check_integer, check_real, check_seed, pluralized, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.sites import EditContext

ROUNDING = 1e-9  # by which a frequency may be outside the band


def fourier_frequencies(tokens: int) -> Float[Tensor, " tokens"]:
    """The frequencies of the real Fourier basis along a number of tokens, from 0 to at most 1, in rising order.

    >>> fourier_frequencies(4)
    tensor([0.0000, 0.5000, 0.5000, 1.0000], dtype=torch.float64)
    """
    n = check_integer("tokens", tokens, at_least=1)
    return 2 * ((torch.arange(n, device="cpu") + 1) // 2).double() / n


def fourier_basis(tokens: int) -> Float[Tensor, "tokens tokens"]:
    """The orthonormal real Fourier basis along a number of tokens: column k has the k-th of ``fourier_frequencies``.

    >>> basis = fourier_basis(4)
    >>> bool(((basis.mT @ basis - torch.eye(4)).abs() < 1e-15).all())
    True
    """
    frequencies = fourier_frequencies(tokens)
    place, k = torch.arange(tokens, device="cpu").double(), torch.arange(tokens, device="cpu")
    phase = math.pi * place.unsqueeze(-1) * frequencies
    waves = torch.where(k % 2 == 1, phase.cos(), phase.sin())
    waves[:, 0] = 1.0
    alone = (k == 0) | (frequencies == 1)
    basis: Tensor = waves * torch.where(alone, 1.0, 2.0).double().sqrt() / tokens**0.5
    return basis


@full_precision
def fourier_band_share(states: Float[Tensor, "*batch n d"], band: tuple[float, float]) -> Float[Tensor, "*batch"]:
    """The share of the squared norm of each cloud that lies in a band of frequencies along its tokens; NaN for 0.

    >>> alternating = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    >>> fourier_band_share(alternating, (0.75, 1.0)).item(), fourier_band_share(alternating, (0.0, 0.25)).item()
    (1.0, 0.0)
    """
    low, high = check_band("band", band)
    parts = (fourier_basis(states.shape[-2]).to(states.device).mT @ states.double()).square().sum(-1)
    frequencies = fourier_frequencies(states.shape[-2]).to(parts.device)
    return parts[..., _inside(frequencies, low, high)].sum(-1) / parts.sum(-1)


def check_band(name: str, band: object) -> tuple[float, float]:
    """The two ends of a band of frequencies; raises HelmscopeError unless 0 <= low <= high <= 1.

    >>> check_band("band", [0.75, 1])
    (0.75, 1.0)
    """
    if not isinstance(band, Sequence) or isinstance(band, str) or len(band) != 2:
        raise HelmscopeError(f"{name} is {short_repr(band)}, but it must be a pair of frequencies such as (0, 0.25)")
    low, high = (check_real(name, end, at_least=0) for end in band)
    if not low <= high <= 1:
        raise HelmscopeError(f"{name} is ({low:g}, {high:g}), but it must rise from a frequency >= 0 to one <= 1")
    return low, high


def check_has_frequency(name: str, band: tuple[float, float], tokens: int, text: int) -> None:
    """Raise HelmscopeError where a text is so short that none of its frequencies lies in a band.

    >>> check_has_frequency("band", (0.1, 0.2), 2, text=0)
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: band is (0.1, 0.2), but text 0 has 2 visible tokens and only the frequencies 0, 1
    """
    frequencies = fourier_frequencies(max(tokens, 1))
    if not tokens or not bool(_inside(frequencies, *band).any()):
        distinct = sorted(set(frequencies.tolist()))
        shown = ", ".join(f"{value:g}" for value in distinct[:6])
        more = ", ..." if len(distinct) > 6 else ""
        raise HelmscopeError(
            f"{name} is ({band[0]:g}, {band[1]:g}), but text {text} has {pluralized(tokens, 'visible token')} and only "
            f"the frequencies {shown}{more}"
        )


def _inside(frequencies: Tensor, low: float, high: float) -> Tensor:
    return (frequencies >= low - ROUNDING) & (frequencies <= high + ROUNDING)


@dataclass(frozen=True, eq=False, repr=False)
class PerturbFourierBand(SiteEdit):
    """Add a random perturbation to a state or write, limited to a ``band`` of frequencies along the visible tokens of
    each text (``fourier_frequencies``), of exact relative norm:

        delta = sum_k phi_k a_k,    a_k ~ N(0, I_d),    scaled to |delta|_F = relative_norm |x|_F    for each text.

    With ``per_token`` it is scaled at every token instead, |delta_t| = relative_norm |x_t|: where radii or the norms of
    the draw differ between tokens, a part of it then leaves the band (``fourier_band_share`` says how much).

    The draw depends only on ``seed``, the layer and the index of the text. Raises HelmscopeError at a text that has no
    frequency in the band, for relative_norm < 0 and for a band that is not within 0 to 1.

    >>> PerturbFourierBand([3], band=(0.75, 1.0), relative_norm=0.1, seed=1)
    PerturbFourierBand(layers=[3], band=[0.75, 1.0], relative_norm=0.1, seed=1)
    """

    allowed = EDITABLE_STATES
    layers: Layers | None = None
    band: tuple[float, float] = (0.0, 1.0)
    relative_norm: float = 0.0
    per_token: bool = False
    seed: int = 0
    site: Site = Site.INPUT

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "band", check_band("band", self.band))
        object.__setattr__(self, "relative_norm", check_real("relative_norm", self.relative_norm, at_least=0))
        object.__setattr__(self, "seed", check_seed(self.seed))

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """The value plus the perturbation."""
        changed = value.clone()
        for row in range(len(value)):
            text = context.rows.start + row
            seen = slice(None) if context.visible is None else context.visible[row].to(value.device)
            state = value[row, seen].double()
            changed[row, seen] = (state + self._draw(state, context, text)).to(value)
        return changed

    @full_precision
    def _draw(self, state: Tensor, context: EditContext, text: int) -> Tensor:
        check_has_frequency("band", self.band, len(state), text)
        waves = fourier_basis(len(state))[:, _inside(fourier_frequencies(len(state)), *self.band)]
        drawn = context.generator(self.seed, text).standard_normal((waves.shape[1], state.shape[1]))
        delta = (waves @ torch.from_numpy(drawn)).to(state.device)
        axes = (-1,) if self.per_token else (-2, -1)
        size, length = (torch.linalg.vector_norm(each, dim=axes, keepdim=True) for each in (state, delta))
        scaled: Tensor = delta * (self.relative_norm * size / length)
        return scaled


@dataclass(frozen=True, eq=False, repr=False)
class ScaleLogits(SiteEdit):
    """Multiply the logits of attention by ``factor``, q -> c q: attention is sharper for c > 1 and more diffuse for
    c < 1. Masks and other terms that are added to the logits stay as they are.

    >>> from helmscope.models.record import record
    >>> recording = record("A", ["Once upon a time there was a cat"])
    >>> sharp, plain = (each.kernel(layer=3) for each in (recording.under(ScaleLogits(factor=4.0)), recording))
    >>> bool(sharp.amax(-1).mean() > plain.amax(-1).mean())
    True
    """

    layers: Layers | None = None
    factor: float = 1.0
    site = Site.QUERY

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", check_real("factor", self.factor, above=0))

    def new(self, value: Tensor, context: EditContext) -> Tensor:
        """c q."""
        return value * self.factor
