"""The damage of normalizing queries or keys to one length, or of blurring them along the tokens.

[Additive transport], section 4, holds that normalizing or blurring keys is dangerous, and doing so to queries is not.
As printed, one side is changed in full: every vector gets the root mean square length of its head, about 0, or is
averaged with earlier ones (``Normalize``, ``Blur``). The two sides then move the logits by different amounts. With
matched strengths keys are normalized about their mean, which attention does not see, and ``match_strengths`` weakens
the side that moves the logits more until their variance under the attention weights is the same:

    ratio  =  KL with all keys changed / KL with all queries changed.

Neither a gauge q -> c q, k -> k / c nor a shift of all keys changes the matched ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import xarray as xr

from helmscope.intervene.query_key_edit import Blur, Normalize, match_strengths
from helmscope.models.recording import check_recording
from helmscope.models.sites import Site
from helmscope.observe.damage import damage_under_edits
from helmscope.observe.layer_ablation_damage import chosen
from helmscope.runs.bar import shows_progress
from helmscope.types import check_progress, check_replicates

if TYPE_CHECKING:
    from helmscope.intervene.query_key_edit import QueryKeyEdit
    from helmscope.models.recording import Recording
    from helmscope.types.progress import ProgressOption

    Pair = tuple[QueryKeyEdit, QueryKeyEdit]

WINDOW = (0.5, 0.25, 0.25)
SITES = (Site.QUERY, Site.KEY)
RATIO = {"long_name": "KL with changed keys over KL with changed queries", "averaged_as": "log(x)"}


class QueryKeyEditKind(Enum):
    """What is done to all queries, or to all keys.

    >>> [kind.value for kind in QueryKeyEditKind]
    ['normalized', 'blurred']
    """

    NORMALIZED = "normalized"
    BLURRED = "blurred"


class EditStrength(Enum):
    """At which strengths queries and keys are changed; the module's docstring has both.

    >>> [strength.value for strength in EditStrength]
    ['matched', 'as printed']
    """

    MATCHED = "matched"
    AS_PRINTED = "as printed"


@shows_progress("edits of queries and keys")
def query_key_edit_damage(
    recording: Recording,
    *,
    kinds: Sequence[QueryKeyEditKind] = tuple(QueryKeyEditKind),
    strengths: Sequence[EditStrength] = tuple(EditStrength),
    window: Sequence[float] = WINDOW,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The damage (``damage_under_edits``) of changing all queries, or all keys, in all layers: ``kl``,
    ``loss_increase``, ``prediction_entropy_change`` and ``top_token_agreement`` along (kind, strength, site, prompt),
    and ``ratio``, KL of the keys over that of the queries, along (kind, strength, prompt), NaN where changed queries
    do no damage.

    ``window`` holds the weights of a blur, those of the vector itself and of the ones before it. Null values are those
    of an unchanged model, and a ratio of 1. Takes one forward pass for each change, strength and site, and at most five
    that measure lengths and strengths. Raises HelmscopeError where ``next_token_loss`` does, for a window that ``Blur``
    refuses, and for a model whose attention cannot be edited or whose weights do not sum to 1.

    >>> from helmscope import record
    >>> damage = query_key_edit_damage(record("A", ["Once upon a time", "The cat sat"]))
    >>> damage.kl.dims, damage.ratio.dims
    (('kind', 'strength', 'site', 'prompt'), ('kind', 'strength', 'prompt'))
    """
    report = check_progress(progress)
    edited, sizes = chosen("kinds", kinds, QueryKeyEditKind), chosen("strengths", strengths, EditStrength)
    edits = {
        f"{kind.value}, {strength.value}, {site.value}": edit
        for kind in edited
        for strength in sizes
        for site, edit in zip(SITES, query_key_edits(recording, kind, strength, window=window), strict=True)
    }
    damage = damage_under_edits(recording, edits, progress=report)
    axes = {
        "kind": [kind.value for kind in edited],
        "strength": [strength.value for strength in sizes],
        "site": [site.value for site in SITES],
    }
    shape = (*map(len, axes.values()), damage.sizes["prompt"])
    data = {
        name: value if name.endswith("_null") else ((*axes, "prompt"), value.values.reshape(shape), value.attrs)
        for name, value in ((str(name), value) for name, value in damage.data_vars.items())
    }
    coords = axes | {name: coord for name, coord in damage.coords.items() if coord.dims == ("prompt",)}
    measured = xr.Dataset(data, coords, {**damage.attrs, "title": "edited queries and keys"})
    query, key = (measured.kl.sel(site=site.value, drop=True) for site in SITES)
    ratio = key / query.where(query > 0)
    ratio.attrs = dict(RATIO)  # arithmetic may keep those of the divergence
    return check_replicates(measured.assign(ratio=ratio, ratio_null=1.0))


def query_key_edits(
    recording: Recording, kind: QueryKeyEditKind, strength: EditStrength, *, window: Sequence[float] = WINDOW
) -> Pair:
    """The edit of all queries and that of all keys, for the texts of a recording.

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time"])
    >>> queries, keys = query_key_edits(recording, QueryKeyEditKind.BLURRED, EditStrength.AS_PRINTED)
    >>> queries.strength, keys.site
    (1.0, <Site.KEY: 'key'>)
    """
    check_recording(recording)
    matched = strength is EditStrength.MATCHED
    pair: Pair
    if kind is QueryKeyEditKind.BLURRED:
        pair = Blur(site=Site.QUERY, window=window), Blur(site=Site.KEY, window=window)
    else:
        keys = Normalize.of(recording, site=Site.KEY, centered=matched)
        pair = Normalize.of(recording, site=Site.QUERY), keys
    return match_strengths(recording, *pair) if matched else pair
