"""Layers and heads by name: "L3H5" for head 5 of layer 3, "transformer.h.3" for a block of a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from helmscope.types import HelmscopeError, shown

if TYPE_CHECKING:
    from helmscope.models.anatomy import Anatomy


def parse_head(name: str) -> dict[str, int]:
    """Layer and head of a name such as "L3H5" or "3.5", both counted from 0: to select one head from a Measurement,
    ``seen.sel(**parse_head("L3H5"))``, or to ablate it, ``AblateHead(**parse_head("L3H5"))``.

    >>> parse_head("L3H5")
    {'layer': 3, 'head': 5}
    >>> parse_head("3.5") == parse_head("l3h5") == parse_head("L3H5")
    True
    >>> parse_head("H5")
    Traceback (most recent call last):
    helmscope.types.HelmscopeError: name is 'H5', but a head is named by layer and head, such as 'L3H5' or '3.5'
    """
    found = (
        re.fullmatch(r"L([0-9]{1,9})H([0-9]{1,9})|([0-9]{1,9})\.([0-9]{1,9})", name, re.I)
        if isinstance(name, str)
        else None
    )
    if found is None:
        raise HelmscopeError(f"name is {shown(name)}, but a head is named by layer and head, such as 'L3H5' or '3.5'")
    layer, number = (int(group) for group in found.groups() if group is not None)
    return {"layer": layer, "head": number}


def layer_number(anatomy: Anatomy, name: object) -> object:
    """The number of the layer whose block has this name in the model, or without its trunk ("h.3"). What is not a
    string is returned as it is. Refused: an unknown name, and that of a tied block, which is many layers.
    """
    if not isinstance(name, str):
        return name
    trunk = f"{anatomy.model.base_model_prefix}."
    paths = {id(module): path for path, module in anatomy.model.named_modules()}
    blocks = [paths[id(layer.block)] for layer in anatomy.layers]
    found = [k for k, path in enumerate(blocks) if name in (path, path.removeprefix(trunk))]
    if len(found) > 1:
        raise HelmscopeError(f"layer is '{name}', but that block is called {len(found)} times: give the layer's number")
    if not found:
        raise HelmscopeError(f"layer is {shown(name)}, but the layers are '{blocks[0]}' to '{blocks[-1]}'")
    return found[0]
