"""The spectrum of the states along the tokens of a prompt: how much of it lies in high frequencies, at every depth, and
how far a half-step moves the mean token.

With x_t the tokens of a prompt in their order, X_f their coefficients in the orthonormal real Fourier basis along
t (``intervene.fourier_basis``), and f = 0, 2/T, ... <= 1 its frequencies, 1 the highest,

    high_frequency_share              sum_{f > c} |X_f|^2 / sum_f |X_f|^2,      c the cutoff
    high_frequency_share_of_variation the same without f = 0, the mean token
    band_power_share                  the share of each of several bands of equal width; the first contains f = 0
    mean_token_shift                  |mean_t D_t| / sqrt(mean_t |D_t|^2),  D_t = x_t after - before

Source: [Additive transport], Sections 5 and 5.1, which says that mixing suppresses high-frequency distinctions and
preserves the center of mass; along which axis is not said.

Nulls. Tokens in random order: the share of f > 0 is spread evenly over T - 1 basis vectors. Changes of random signs
have a mean shift of 1 / sqrt(T). How to read it. A change of the share mixes what a half-step removes at high
frequencies with what it adds at low ones, such as one constant vector written to all tokens; the share of the variation
leaves that constant out. A half-step that keeps the mean token has a shift of 0, one that moves all tokens alike 1. How
it fails. Position embeddings and sinks put power at low frequencies; the first token is left out by default. A text is
no period: its ends meet in the basis, which adds high frequencies where they differ, to the variation of a linear trend
a share of 6 / (pi T) above 1/2. Cost: T log T d per depth and prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xarray as xr

from helmscope.observe.cloud_spectrum import COORDINATES, clouds_along_depth
from helmscope.observe.depth_steps import sphere_text, with_halves
from helmscope.observe.kernel_lag import CUTOFF, TIE, check_cutoff, fourier_line, frequency_power
from helmscope.observe.labels import label_attributes
from helmscope.observe.pairs import sphere_and_ids
from helmscope.observe.track import SHARE, with_bounds, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Trajectory, check_integer, check_progress

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

BANDS = 8
HIGH, OF_VARIATION, SHIFT, POWER = (
    "high_frequency_share",
    "high_frequency_share_of_variation",
    "mean_token_shift",
    "band_power_share",
)
NAMES = {
    HIGH: "share of the spectrum along the tokens above the cutoff",
    OF_VARIATION: "share of the variation along the tokens above the cutoff",
    SHIFT: "change of the mean token over the RMS change of the tokens",
    POWER: "share of the spectrum along the tokens in a band",
}


@shows_progress("spectrum along the tokens")
def fourier_spectrum(
    system: Trajectory | System,
    *,
    cutoff: float = CUTOFF,
    bands: int = BANDS,
    include_first_token: bool = False,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """``high_frequency_share``, ``high_frequency_share_of_variation`` and ``mean_token_shift`` over (depth, prompt,
    coordinates), each with its null, and ``band_power_share`` along a further axis ``band``, the upper end of each
    band.

    The shift at depth k is that of the half-step that ends there: NaN at the first depth, and where no token moves.
    Coordinates, tokens and the first token are as for ``cloud_spectrum``. Raises HelmscopeError for a cutoff outside
    0 to 1, and a prompt so short that it has no frequency above it.

    >>> alternating = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(3, 1)
    >>> path = Trajectory(torch.zeros(1), alternating.expand(1, 1, 6, 2))
    >>> float(fourier_spectrum(path, include_first_token=True).high_frequency_share[0, 0, 0])
    1.0
    """
    report, cutoff = check_progress(progress), check_cutoff(cutoff)
    count = check_integer("bands", bands, at_least=1)
    path, columns = sphere_and_ids(system, None)[0], []
    before: list[Tensor | None] = [None] * path.states.shape[1]
    for k, prompts in enumerate(clouds_along_depth(system, include_first_token)):
        column = []
        for i, cloud in enumerate(prompts):
            column.append(_shares(cloud, cutoff, count, path.replicate, i) | _shift(cloud, before[i]))
            before[i] = cloud
        columns.append({name: torch.stack([each[name] for each in column]) for name in column[0]})
        report((k + 1) / len(path.states))
    values = {name: torch.stack([column[name] for column in columns]) for name in columns[0]}
    power = {POWER: values.pop(POWER)}
    axes = {"coordinates": list(COORDINATES)}
    upper = [(band + 1) / count for band in range(count)]
    parts = [with_replicates(values, path, axes), with_replicates(power, path, axes | {"band": upper})]
    measured = xr.merge(parts, compat="override", join="override")
    measured = with_bounds(measured, dict.fromkeys(NAMES, SHARE))
    for name, long_name in NAMES.items():
        measured[name].attrs |= label_attributes(long_name)
    attributes = {"cutoff": cutoff, "sphere": sphere_text(system), "include_first_token": int(include_first_token)}
    return with_halves(measured, system).assign_attrs(attributes)


def _shares(
    cloud: Float[Tensor, "2 tokens d"], cutoff: float, bands: int, replicate: str, prompt: int
) -> dict[str, Tensor]:
    """The shares of one prompt, over coordinates; those of bands also over bands."""
    power = frequency_power(cloud).sum(-1)
    line = fourier_line(cloud.shape[-2], cloud.device)
    high = line > cutoff + TIE
    if not bool(high.any()):
        raise HelmscopeError(
            f"{replicate} {prompt} has {cloud.shape[-2]} tokens that count, and no frequency above the cutoff of "
            f"{cutoff:g}"
        )
    whole, varying, above = power.sum(-1), power[:, 1:].sum(-1), power[:, high].sum(-1)
    # the frequencies 0 and, for an even number of tokens, 1 have one basis vector, all others two
    vectors = torch.full_like(line, 2.0)
    vectors[0] = 1.0
    vectors[-1] = 2.0 if cloud.shape[-2] % 2 else 1.0
    even = vectors[high].sum() / vectors[1:].sum()
    band = ((line * bands - TIE).ceil().long() - 1).clamp(min=0)
    by_band = power.new_zeros(len(power), bands).index_add_(1, band, power)
    return {
        HIGH: above / whole,
        f"{HIGH}_null": even * varying / whole,
        OF_VARIATION: above / torch.where(varying > 0, varying, torch.nan),
        f"{OF_VARIATION}_null": even.expand_as(whole),
        POWER: by_band / whole.unsqueeze(-1),
    }


def _shift(cloud: Tensor, before: Tensor | None) -> dict[str, Tensor]:
    """The mean shift of one prompt, over coordinates."""
    null = cloud.new_full((len(cloud),), cloud.shape[-2] ** -0.5)
    if before is None:
        return {SHIFT: torch.full_like(null, torch.nan), f"{SHIFT}_null": null}
    change = cloud - before
    size = change.square().sum(-1).mean(-1).sqrt()
    mean = torch.linalg.vector_norm(change.mean(-2), dim=-1)
    return {SHIFT: mean / torch.where(size > 0, size, torch.nan), f"{SHIFT}_null": null}
