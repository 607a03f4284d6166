"""Layers and heads by name: what all arguments ``layer``, ``layers``, ``head`` and ``heads`` accept.

A head is named "L3H5" or "3.5", head 5 of layer 3, both counted from 0. A layer is its number, "L3", or the name of its
block in the model, such as "transformer.h.3"; ``layers`` is one layer or a list of them, and None, where it is
allowed, all layers. An edit is made without a model and does not know the names of blocks:
``recording.layer("transformer.h.3")`` is the number of one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from helmscope.types import HelmscopeError, short_repr

if TYPE_CHECKING:
    from helmscope.models.anatomy import Anatomy
    from helmscope.models.recording import Recording

Layers: TypeAlias = int | str | Sequence[int | str]


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


def layer_indices(name: str, value: object) -> tuple[int, ...]:
    """The numbers of one or several layers that are chosen without a model, by number or by a name such as "L3".

    ``name`` is the argument that an error names. Raises HelmscopeError for an empty list, and for anything else than
    whole numbers >= 0 and such names.

    >>> layer_indices("layers", 3), layer_indices("layers", "L3"), layer_indices("layers", ["L0", 2])
    ((3,), (3,), (0, 2))
    """
    several = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    numbers = tuple(map(_layer_index, several))
    if not numbers or min(numbers) < 0:
        blocks = [each for each in several if isinstance(each, str) and "." in each]
        hint = f": the number of a block is recording.layer({blocks[0]!r})" if blocks else ""
        raise HelmscopeError(
            f"{name} is {short_repr(value)}, but it must be a layer such as 3 or 'L3', or a list of layers{hint}"
        )
    return numbers


def _layer_index(value: object) -> int:
    """The number of a layer, -1 for what is not one."""
    if isinstance(value, str):
        named = re.fullmatch(r"L([0-9]{1,9})", value, re.I)
        return int(named[1]) if named else -1
    try:
        return -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def chosen_layers(recording: Recording, layers: object) -> list[int]:
    """The numbers of one or several layers of a recording, by number or name, in the order given; None means all.

    Raises HelmscopeError for a layer that the recording does not have, for one that is given twice and for an empty
    list.

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time"])
    >>> chosen_layers(recording, ["L3", "transformer.h.1"]), len(chosen_layers(recording, None))
    ([3, 1], 12)
    """
    if layers is None:
        return list(recording.layers)
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        try:
            number = recording.layer(layers if isinstance(layers, str) else operator.index(layers))  # type: ignore[arg-type]
        except TypeError:
            raise HelmscopeError(
                f"layers is {short_repr(layers)}, but it must be a layer, a list of layers, or None for all"
            ) from None
        return [number]
    numbers = [recording.layer(layer) for layer in layers]
    if not numbers:
        raise HelmscopeError("layers is empty, but it must hold at least one layer")
    for k, number in enumerate(numbers):
        if number in numbers[:k]:
            raise HelmscopeError(f"layers holds layer {number} twice, but all layers must be different")
    return numbers


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
        number, last = int(name) if re.fullmatch("[0-9]{1,9}", name) else None, len(blocks) - 1
        hint = f", or by number 0 to {last} or 'L0' to 'L{last}'"
        hint = hint if number is None else f": a number is written {number} or 'L{number}'"
        raise HelmscopeError(f"layer is {short_repr(name)}, but the layers are '{blocks[0]}' to '{blocks[-1]}'{hint}")
    return layers[0]
