"""The matrices by which the heads of attention write to the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.models.mlp_reading import affine_of, matrix_of
from helmscope.models.sites import Site
from helmscope.types import type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor, nn

    from helmscope.models.anatomy import Layer


def output_unsupported(layer: Layer) -> str | None:
    """Why the outputs of the heads are not written by a matrix that can be read, as the beginning of a sentence; None
    if they are.
    """
    wiring = layer.wiring
    if wiring.output_matrix is None or layer.heads is None:
        return "the family hides the outputs of its heads"
    matrix = layer.part(wiring.output_matrix)
    if matrix_of(matrix) is None:
        return f"the output projection of attention is {type_with_article(matrix)}, whose matrix cannot be read,"
    write = layer.part(wiring.attention)
    if wiring.sandwich or (write is not matrix and only_rescales(write)):
        return f"{type_with_article(write)} follows the output projection of attention"
    return None


def output_matrices(layer: Layer) -> Float[Tensor, "heads d s"]:
    """W_O of each head times the residual multiplier; the layer must have no ``output_unsupported``."""
    wiring = layer.wiring
    assert wiring.output_matrix is not None
    assert layer.heads is not None
    weight, _ = affine_of(layer.part(wiring.output_matrix))
    per_head = weight.reshape(len(weight), layer.heads, -1).transpose(0, 1)
    return wiring.scale(Site.ATTENTION) * per_head


def only_rescales(module: nn.Module) -> bool:
    """Whether a module only rescales coordinates: a norm, or a layer scale."""
    parameters = list(module.parameters())
    return bool(parameters) and all(value.ndim <= 1 for value in parameters)
