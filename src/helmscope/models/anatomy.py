"""A model and what was found in it: its layers in the order of their calls, where their tensors pass, which sphere its
tokens live on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from helmscope.fields.norms import LayerNorm
from helmscope.models.depths import Depths
from helmscope.models.norm_reading import read_norm
from helmscope.models.overflow import check_finite
from helmscope.models.probe import LayerProbe, no_cache, probe
from helmscope.models.sphere import embedding_norm
from helmscope.models.stacks import stacks_of
from helmscope.models.tap import can_be_tapped
from helmscope.models.topology import Kind, Wiring, find_wiring
from helmscope.models.watch import Site
from helmscope.types import HelmscopeError, counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """One call of a block; tied layers are calls of one module. ``plain``: the block returns a tensor alone."""

    block: nn.Module
    wiring: Wiring
    plain: bool
    attention_norm: Norm | None
    mlp_norm: Norm | None
    close_norm: Norm | None = None  # of a post-norm block, that which gives its output
    heads: int | None = None  # None where attention cannot be heard
    cross_norm: Norm | None = None
    cross_heads: int | None = None

    def __repr__(self) -> str:
        return f"<Layer of {type(self.block).__name__}: {self.wiring}>"

    def part(self, path: str) -> nn.Module:
        """A module of the block by its path."""
        return self.block.get_submodule(path)

    @property
    def state_norms(self) -> dict[Site, Norm | None]:
        """In a post-norm block, the norms that give its states: each is the norm that the next half reads through."""
        between = {} if self.wiring.cross is None else {Site.CROSS_MIDDLE: self.mlp_norm}
        behind_attention = self.mlp_norm if self.wiring.cross is None else self.cross_norm
        return {Site.MIDDLE: behind_attention, **between, Site.OUTPUT: self.close_norm}


@dataclass(frozen=True, eq=False, repr=False)
class Anatomy:
    """The layers of a model; of an encoder-decoder model those of its decoder, which read the states of ``encoder``,
    a model with an anatomy of its own. ``centered``: its norms remove the token mean, so that its sphere is S^(d-2).
    ``embedding_norm`` of a post-norm model is the norm that gives the first block's input, with its module.

    ``tapped``: its family is in the registry of attention, so that q, k, v and weights can be seen and changed;
    ``overheard``: it is not, but they can be seen.
    """

    model: Any
    layers: tuple[Layer, ...]
    dim: int
    centered: bool
    tapped: bool
    overheard: bool = False
    embedding_norm: tuple[nn.Module, Norm] | None = None
    encoder: nn.Module | None = None

    @property
    def depths(self) -> Depths:
        """Which state lies at which depth."""
        return Depths(len(self.layers), cross=self.has_cross)

    @property
    def has_cross(self) -> bool:
        """Whether its layers have cross-attention."""
        return self.layers[0].wiring.cross is not None

    @property
    def post_norm(self) -> bool:
        """Whether states are what norms gave."""
        return any(layer.wiring.kind is Kind.POST_NORM for layer in self.layers)

    @property
    def blocks(self) -> list[nn.Module]:
        """The distinct modules among the blocks."""
        return list({id(layer.block): layer.block for layer in self.layers}.values())

    @property
    def can_skip(self) -> bool:
        """Whether a layer can be left out of a forward: blocks that return their state alone, and are not tied."""
        return all(layer.plain for layer in self.layers) and len(self.blocks) == len(self.layers)

    @property
    def options(self) -> dict[str, bool]:
        """What a forward is told beside its inputs."""
        return no_cache(self.model) | ({} if self.tapped else {"output_attentions": True})

    def __repr__(self) -> str:
        return f"<Anatomy of {type(self.model).__name__}: {self}>"

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(str(layer.wiring) for layer in self.layers))
        tied = "" if len(self.blocks) == len(self.layers) else f" of {counted(len(self.blocks), 'tied block')}"
        return f"{', '.join(kinds)}; {counted(len(self.layers), 'layer')}{tied}, width {self.dim}"


def find_anatomy(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Anatomy, list[LayerProbe]]:
    """Find the anatomy of a model from one forward of a few tokens, and give what was seen on the way."""
    seen = probe(model, inputs)
    check_finite(model, inputs, seen)
    layers = tuple(_layer(layer, number) for number, layer in enumerate(seen))
    crossing = [layer.wiring.cross is not None for layer in layers]
    if len(set(crossing)) > 1:
        raise HelmscopeError(
            f"model is a {type(model).__name__} with cross-attention in layer {crossing.index(True)} and none in layer "
            f"{crossing.index(False)}, but all layers of a recording must have the same sub-steps"
        )
    norms = [
        norm
        for layer in layers
        for norm in (layer.attention_norm, layer.cross_norm, layer.mlp_norm)
        if norm is not None
    ]
    if not norms and layers[0].wiring.sandwich:  # no norm before the halves, but one behind each
        behind = read_norm(layers[0].part(layers[0].wiring.attention), seen[0].pre)
        norms = [] if behind is None else [behind]
    centered = any(isinstance(norm, LayerNorm) for norm in norms)
    overheard = all(layer.overheard for layer in seen)
    stacks = stacks_of(model)
    anatomy = Anatomy(model, layers, seen[0].pre.shape[-1], centered, can_be_tapped(model), overheard)
    anatomy = anatomy if stacks is None else replace(anatomy, encoder=stacks.encoder)
    if anatomy.post_norm:
        anatomy = replace(anatomy, embedding_norm=embedding_norm(model, anatomy.blocks, inputs, seen[0].pre))
    return anatomy, seen


def _layer(seen: LayerProbe, number: int) -> Layer:
    wiring = find_wiring(seen, number)
    attention, cross, mlp, close = (
        None if path is None else read_norm(seen.block.get_submodule(path), seen.pre)
        for path in (wiring.attention_norm, wiring.cross_norm, wiring.mlp_norm, wiring.close)
    )
    heads, cross_heads = (None if each is None else each[0].query.shape[1] for each in (seen.attention, seen.cross))
    return Layer(seen.block, wiring, seen.plain, attention, mlp, close, heads, cross, cross_heads)
