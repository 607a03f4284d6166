"""The structure of a model: its layers in call order, the modules behind each tensor, and the sphere of its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from helmscope.fields.norms import LayerNorm
from helmscope.models.depths import Depths
from helmscope.models.norm_reading import read_norm
from helmscope.models.overflow import check_finite
from helmscope.models.probe import LayerTrace, no_cache, probe
from helmscope.models.sites import Site
from helmscope.models.sphere import embedding_norm
from helmscope.models.stacks import stacks_of
from helmscope.models.tap import can_be_tapped
from helmscope.models.topology import Kind, Wiring, find_wiring
from helmscope.types import HelmscopeError, pluralized, type_with_article

if TYPE_CHECKING:
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """One call of a block; tied layers are calls of the same module. ``plain``: the block returns a single tensor."""

    block: nn.Module
    wiring: Wiring
    plain: bool
    attention_norm: Norm | None
    mlp_norm: Norm | None
    close_norm: Norm | None = None  # in a post-norm block, the norm that computes its output
    heads: int | None = None  # None if attention cannot be observed
    cross_norm: Norm | None = None
    cross_heads: int | None = None

    def __repr__(self) -> str:
        return f"<Layer of {type(self.block).__name__}: {self.wiring}>"

    def part(self, path: str) -> nn.Module:
        """The submodule of the block at a path."""
        return self.block.get_submodule(path)

    @property
    def state_norms(self) -> dict[Site, Norm | None]:
        """In a post-norm block, the norm that computes each state, through which the next half reads it."""
        between = {} if self.wiring.cross is None else {Site.CROSS_MIDDLE: self.mlp_norm}
        after_attention = self.mlp_norm if self.wiring.cross is None else self.cross_norm
        return {Site.MIDDLE: after_attention, **between, Site.OUTPUT: self.close_norm}


@dataclass(frozen=True, eq=False, repr=False)
class Anatomy:
    """The layers of a model and its width.

    For an encoder-decoder model these are the layers of the decoder, which read the states of ``encoder``, a model with
    a separate anatomy. ``centered``: the norms subtract the mean over coordinates, so that the sphere is S^(d-2).
    ``embedding_norm``: in a post-norm model, the norm that computes the input of the first block, with its module.

    ``tapped``: the family is in the attention registry of transformers, so that q, k, v and the weights can be recorded
    and edited; ``captured``: it is not, but they can still be recorded.
    """

    model: Any
    layers: tuple[Layer, ...]
    dim: int
    centered: bool
    tapped: bool
    captured: bool = False
    embedding_norm: tuple[nn.Module, Norm] | None = None
    encoder: nn.Module | None = None

    @property
    def depths(self) -> Depths:
        """The depth of every state."""
        return Depths(len(self.layers), cross=self.has_cross)

    @property
    def has_cross(self) -> bool:
        """Whether its layers have cross-attention."""
        return self.layers[0].wiring.cross is not None

    @property
    def post_norm(self) -> bool:
        """Whether the states of some layer are outputs of norms."""
        return any(layer.wiring.kind is Kind.POST_NORM for layer in self.layers)

    @property
    def blocks(self) -> list[nn.Module]:
        """The distinct modules among the blocks."""
        return list({id(layer.block): layer.block for layer in self.layers}.values())

    @property
    def can_skip(self) -> bool:
        """Whether a layer can be skipped in a forward pass: blocks return a single tensor and are not tied."""
        return all(layer.plain for layer in self.layers) and len(self.blocks) == len(self.layers)

    @property
    def options(self) -> dict[str, bool]:
        """Keyword arguments of the forward pass besides its inputs."""
        return no_cache(self.model) | ({} if self.tapped else {"output_attentions": True})

    def __repr__(self) -> str:
        return f"<Anatomy of {type(self.model).__name__}: {self}>"

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(str(layer.wiring) for layer in self.layers))
        tied = "" if len(self.blocks) == len(self.layers) else f" of {pluralized(len(self.blocks), 'tied block')}"
        return f"{', '.join(kinds)}; {pluralized(len(self.layers), 'layer')}{tied}, width {self.dim}"


def find_anatomy(
    model: Any, inputs: Mapping[str, Tensor], *, prompts: Sequence[int] = (0, 1), first_token: int = 0
) -> tuple[Anatomy, list[LayerTrace]]:
    """Find the anatomy of a model from one forward pass over a few tokens; returns it with the probe of every layer.

    ``prompts`` and ``first_token`` say where these tokens come from. Raises ``HelmscopeError`` if states overflow, if a
    block has no known residual topology, or if only some of the layers have cross-attention.
    """
    probes = probe(model, inputs)
    check_finite(model, inputs, probes, prompts, first_token)
    layers = tuple(_find_layer(layer, number) for number, layer in enumerate(probes))
    crossing = [layer.wiring.cross is not None for layer in layers]
    if len(set(crossing)) > 1:
        raise HelmscopeError(
            f"model is {type_with_article(model)} with cross-attention in layer {crossing.index(True)} and none in "
            f"layer {crossing.index(False)}, but all layers of a recording must have the same sub-steps"
        )
    norms = [
        norm
        for layer in layers
        for norm in (layer.attention_norm, layer.cross_norm, layer.mlp_norm)
        if norm is not None
    ]
    if not norms and layers[0].wiring.sandwich:  # the norms come after the halves
        after = read_norm(layers[0].part(layers[0].wiring.attention), probes[0].pre)
        norms = [] if after is None else [after]
    centered = any(isinstance(norm, LayerNorm) for norm in norms)
    captured = all(layer.captured for layer in probes)
    stacks = stacks_of(model)
    anatomy = Anatomy(model, layers, probes[0].pre.shape[-1], centered, can_be_tapped(model), captured)
    anatomy = anatomy if stacks is None else replace(anatomy, encoder=stacks.encoder)
    if anatomy.post_norm:
        anatomy = replace(anatomy, embedding_norm=embedding_norm(model, anatomy.blocks, inputs, probes[0].pre))
    return anatomy, probes


def _find_layer(layer: LayerTrace, number: int) -> Layer:
    wiring = find_wiring(layer, number)
    attention, cross, mlp, close = (
        None if path is None else read_norm(layer.block.get_submodule(path), layer.pre)
        for path in (wiring.attention_norm, wiring.cross_norm, wiring.mlp_norm, wiring.close)
    )
    heads, cross_heads = (None if pair is None else pair[0].query.shape[1] for pair in (layer.attention, layer.cross))
    return Layer(layer.block, wiring, layer.plain, attention, mlp, close, heads, cross, cross_heads)
