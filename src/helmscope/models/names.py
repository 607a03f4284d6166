"""Layers and heads by name.

A head is named "L3H5" or "3.5", head 5 of layer 3, both counted from 0: in ``parse_head``, for Measurements, in
``AblateHead(head="L3H5")``, and in ``head_ablation_loss(heads=...)``. A layer is its number, "L3", or the name of its
block in the model, such as "transformer.h.3": in ``recording.kernel(layer=...)``, ``cross_kernel``, ``force`` and
``force_points``, and in ``head_ablation_loss(layers=...)``. An edit is made without a model and takes numbers only,
such as ``recording.layer("transformer.h.3")``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError, short_repr

if TYPE_CHECKING:
    from helmscope.models.anatomy import Anatomy


def parse_head(name: str) -> dict[str, int]:
    """Parse a name such as "L3H5" or "3.5" into layer and head, both counted from 0.

    For example, ``measurement.sel(**parse_head("L3H5"))`` selects one head of a Measurement, and
    ``AblateHead(head="L3H5")`` ablates it. Raises HelmscopeError for any other name.

    >>> parse_head("L3H5")
    {'layer': 3, 'head': 5}
    >>> parse_head("3.5") == parse_head("l3h5") == parse_head("L3H5")
    True
    >>> parse_head("H5")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: name is 'H5', but a head is named by layer and head, such as 'L3H5' or '3.5'
    """
    match = (
        re.fullmatch(r"L([0-9]{1,9})H([0-9]{1,9})|([0-9]{1,9})\.([0-9]{1,9})", name, re.I)
        if isinstance(name, str)
        else None
    )
    if match is None:
        raise HelmscopeError(
            f"name is {short_repr(name)}, but a head is named by layer and head, such as 'L3H5' or '3.5'"
        )
    layer, head = (int(group) for group in match.groups() if group is not None)
    return {"layer": layer, "head": head}


def layer_number(anatomy: Anatomy, name: object) -> object:
    """The number of a layer, from a name such as "L3", or from that of its block in the model, with or without the
    prefix of its base model ("transformer.h.3", "h.3"). A value that is not a string is returned unchanged. Raises
    HelmscopeError for an unknown name, and for that of a tied block, which is several layers.
    """
    if not isinstance(name, str):
        return name
    if numbered := re.fullmatch(r"L([0-9]{1,9})", name, re.I):
        return int(numbered[1])
    prefix = f"{anatomy.model.base_model_prefix}."
    paths = {id(module): path for path, module in anatomy.model.named_modules()}
    blocks = [paths[id(layer.block)] for layer in anatomy.layers]
    layers = [k for k, path in enumerate(blocks) if name in (path, path.removeprefix(prefix))]
    if len(layers) > 1:
        raise HelmscopeError(f"layer is '{name}', but that block is called {len(layers)} times: pass its number")
    if not layers:
        hint = f": a number is written {int(name)} or 'L{int(name)}'" if re.fullmatch("[0-9]{1,9}", name) else ""
        raise HelmscopeError(f"layer is {short_repr(name)}, but the layers are '{blocks[0]}' to '{blocks[-1]}'{hint}")
    return layers[0]
