"""The damage of another temperature of attention: A = softmax(l / c) in all layers instead of softmax(l).

c < 1 makes attention sharper, c > 1 more diffuse; c = 1 is the model. Source: [Additive transport], Section 5, which
holds sharp updates for unstable and diffuse ones not.

How it fails. Attention at c and at 1 / c does not move by equal amounts: a row that is already on one key hardly
changes at c < 1. Read the two beside perturbations of equal norm (``fourier_band_damage``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from helmscope.intervene.token_bands import ScaleLogits
from helmscope.observe.damage import damage_under_edits
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_real, check_replicates, short_repr

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.models.recording import Recording
    from helmscope.types.progress import ProgressOption

TEMPERATURES = (0.5, 2.0)


@shows_progress("damage by temperature")
def attention_temperature_damage(
    recording: Recording,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    layers: int | Sequence[int] | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage (``damage_under_edits``) of dividing the logits of attention by each of ``temperatures``, in all
    layers at once or in ``layers``: ``kl``, ``loss_increase``, ``prediction_entropy_change`` and
    ``top_token_agreement`` along (temperature, prompt).

    Takes one forward pass for each temperature. Raises HelmscopeError where ``next_token_loss`` does, for a temperature
    <= 0, a layer out of range, and a model whose attention cannot be edited.

    >>> from helmscope import record
    >>> damage = attention_temperature_damage(record("A", ["Once upon a time"]), temperatures=[1.0, 2.0])
    >>> damage.kl.dims, float(damage.kl.sel(temperature=1.0).max())
    (('temperature', 'prompt'), 0.0)
    """
    if isinstance(temperatures, str) or not isinstance(temperatures, Sequence) or not temperatures:
        raise HelmscopeError(
            f"temperatures is {short_repr(temperatures)}, but it must be a list of numbers such as [0.5, 2]"
        )
    values = [check_real("temperatures", value, above=0) for value in temperatures]
    edits = {f"{k}": ScaleLogits(layers, factor=1 / value) for k, value in enumerate(values)}
    damage = damage_under_edits(recording, edits, progress=check_progress(progress))
    renamed = damage.drop_vars("edit").rename({"edit": "temperature"}).assign_coords(temperature=values)
    return check_replicates(renamed.assign_attrs(title="damage by temperature of attention"))
