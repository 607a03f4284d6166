"""Observers that keep raw tensors of a forward pass: queries, keys, values, attention weights, writes and states."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Flag, auto
from typing import TYPE_CHECKING

import torch

from helmscope.models.sites import Observer, Site
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.depths import Depths
    from helmscope.models.tap import Attended, Call


class KeptTensors(Flag):
    """Raw tensors that ``record`` keeps for every layer. Weights take most memory: (batch, heads, n, n) per layer. In a
    layer with cross-attention its tensors are kept too, named "cross query", "cross kernel" and so on.

    >>> KeptTensors.KERNELS in KeptTensors.KERNELS | KeptTensors.WRITES
    True
    """

    NOTHING = 0
    QUERIES = auto()
    KEYS = auto()
    VALUES = auto()
    KERNELS = auto()
    WRITES = auto()


OF_CALL = {KeptTensors.QUERIES: "query", KeptTensors.KEYS: "key", KeptTensors.VALUES: "value"}


class Keeper(Observer):
    """Keeps raw tensors of all layers: ``kept`` maps their names to tensors (layer, batch, ...)."""

    def __init__(self, what: KeptTensors, anatomy: Anatomy) -> None:
        if not isinstance(what, KeptTensors):
            raise HelmscopeError(
                f"keep is {what!r}, but it must be a combination of KeptTensors.QUERIES, KEYS, VALUES, KERNELS and "
                "WRITES"
            )
        projections = what & (KeptTensors.QUERIES | KeptTensors.KEYS | KeptTensors.VALUES)
        if projections and not (anatomy.tapped or anatomy.captured):
            raise HelmscopeError(f"keep is {what!r}, but the model's family returns only its attention weights")
        self.what, self.layers = what, len(anatomy.layers)
        self.sees_attention = bool(what & ~KeptTensors.WRITES)
        self.sees_cross = self.sees_attention and anatomy.has_cross
        self.needs_all_layers = bool(what)  # a kept tensor has an entry for every layer
        self.sites = frozenset(anatomy.layers[0].wiring.writes) if KeptTensors.WRITES in what else frozenset()
        self._chunks: dict[str, list[list[Tensor]]] = {}

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Keep a write."""
        self._append(f"{site.value} write", layer, value.clone())

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep the inputs of attention and its weights."""
        self._keep_attention("", layer, call, result)

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """Keep the inputs of cross-attention and its weights."""
        self._keep_attention("cross ", layer, call, result)

    def _keep_attention(self, prefix: str, layer: int, call: Call | None, result: Attended) -> None:
        for flag, name in OF_CALL.items():
            if flag in self.what and call is not None:
                self._append(prefix + name, layer, getattr(call, name).clone())
        if KeptTensors.KERNELS in self.what:
            self._append(f"{prefix}kernel", layer, result.weights.clone())

    def _append(self, name: str, layer: int, value: Tensor) -> None:
        self._chunks.setdefault(name, [[] for _ in range(self.layers)])[layer].append(value)

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """The kept tensors (layer, batch, ...) by name: query, key, value, weights, attention write, mlp write; for
        cross-attention, cross query and so on.
        """
        return {name: torch.stack([torch.cat(chunks) for chunks in layers]) for name, layers in self._chunks.items()}


class KeepWeights(Observer):
    """Keeps the weights of attention, or with ``cross`` of cross-attention, in one layer, in float32 or float64: one
    tensor per chunk of texts.
    """

    def __init__(self, layer: int, *, cross: bool = False) -> None:
        self.layer = layer
        self.sees_attention, self.sees_cross = not cross, cross
        self.weights: list[Tensor] = []

    def after_cross(self, layer: int, call: Call, result: Attended) -> None:
        """Keep the weights if the layer is the chosen one."""
        self.after(layer, call, result)

    def after(self, layer: int, call: Call | None, result: Attended) -> None:
        """Keep the weights if the layer is the chosen one."""
        if layer == self.layer:
            wide = torch.float64 if result.weights.dtype == torch.float64 else torch.float32
            self.weights.append(result.weights.to(wide))


class KeepState(Observer):
    """Keeps the state at one depth, with its autograd graph: one tensor per chunk of texts."""

    def __init__(self, depth: int, depths: Depths) -> None:
        self.layer, site = depths.site(depth)
        self.sites = frozenset({site})
        self.states: list[Tensor] = []

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Keep a copy in float32 or float64: some families add to a state in place later."""
        if layer == self.layer:
            wide = torch.float64 if value.dtype == torch.float64 else torch.float32
            self.states.append(value.to(wide, copy=True))
