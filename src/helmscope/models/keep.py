"""What a recording keeps of attention and of the writes, where it is asked to: all else streams past."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto
from typing import TYPE_CHECKING

import torch

from helmscope.models.watch import Observer, Site
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.depths import Depths
    from helmscope.models.tap import Attended, Call


class Keep(Flag):
    """Raw tensors to keep, L of each: weights are (batch, heads, n, n) a layer, which is most of what there is. Of a
    layer with cross-attention, what belongs to that is kept too, named "cross query", "cross weights" and so on.

    >>> Keep.WEIGHTS in Keep.WEIGHTS | Keep.WRITES
    True
    """

    NOTHING = 0
    QUERIES = auto()
    KEYS = auto()
    VALUES = auto()
    WEIGHTS = auto()
    WRITES = auto()


OF_CALL = {Keep.QUERIES: "query", Keep.KEYS: "key", Keep.VALUES: "value"}


class Keeper(Observer):
    """Keeps raw tensors: ``kept`` maps what was asked for to (layer, ...) lists of the parts of the batch."""

    def __init__(self, what: Keep, anatomy: Anatomy) -> None:
        if not isinstance(what, Keep):
            raise HelmscopeError(
                f"keep is {what!r}, but it must be made of Keep.QUERIES, KEYS, VALUES, WEIGHTS and WRITES"
            )
        hidden = what & (Keep.QUERIES | Keep.KEYS | Keep.VALUES)
        if hidden and not (anatomy.tapped or anatomy.overheard):
            raise HelmscopeError(f"keep is {what!r}, but the model's family shows its attention weights alone")
        self.what, self.layers = what, len(anatomy.layers)
        self.sees_attention = bool(what & ~Keep.WRITES)
        self.sees_cross = self.sees_attention and anatomy.has_cross
        self.needs_all_layers = bool(what)  # so that every layer has something to keep
        self.sites = frozenset(anatomy.layers[0].wiring.writes) if Keep.WRITES in what else frozenset()
        self._parts: dict[str, list[list[Tensor]]] = {}

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Keep a write."""
        self._take(f"{site.value} write", layer, value.clone())

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep what attention was computed from and its weights."""
        self._take_attention("", layer, call, result)

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """The same of cross-attention."""
        self._take_attention("cross ", layer, call, result)

    def _take_attention(self, prefix: str, layer: int, call: Call | None, result: Attended) -> None:
        for flag, name in OF_CALL.items():
            if flag in self.what and call is not None:
                self._take(prefix + name, layer, getattr(call, name).clone())
        if Keep.WEIGHTS in self.what:
            self._take(f"{prefix}weights", layer, result.weights.clone())

    def _take(self, name: str, layer: int, value: Tensor) -> None:
        self._parts.setdefault(name, [[] for _ in range(self.layers)])[layer].append(value)

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """query, key, value, weights, attention write, mlp write: (layer, batch, ...); of cross-attention cross query
        and so on.
        """
        return {name: torch.stack([torch.cat(parts) for parts in layers]) for name, layers in self._parts.items()}


class KeepWeights(Observer):
    """Keeps the weights of attention, or of ``cross`` attention, of one layer in float32 or float64: one tensor per
    chunk of texts.
    """

    def __init__(self, layer: int, *, cross: bool = False) -> None:
        self.layer = layer
        self.sees_attention, self.sees_cross = not cross, cross
        self.weights: list[Tensor] = []

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """Keep them where the layer is the one that is wanted."""
        self.after(layer, call, result)

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep them where the layer is the one that is wanted."""
        if layer == self.layer:
            wide = torch.float64 if result.weights.dtype == torch.float64 else torch.float32
            self.weights.append(result.weights.to(wide))


class KeepState(Observer):
    """Keeps the state at one depth as it passes, with its gradient: one tensor per chunk of texts."""

    def __init__(self, depth: int, depths: Depths) -> None:
        self.layer, site = depths.site(depth)
        self.sites = frozenset({site})
        self.states: list[Tensor] = []

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Keep it, in float32 or float64; a copy, since some families add to a state in place later."""
        if layer == self.layer:
            wide = torch.float64 if value.dtype == torch.float64 else torch.float32
            self.states.append(value.to(wide, copy=True))
