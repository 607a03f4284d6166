"""The checks behind the certificate of a decoder that reads an encoder: its cross-attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.models.certificate import Line
from helmscope.models.certify import bound, heads_gap, relative, worst_of
from helmscope.models.mlp_reading import matrix_of
from helmscope.models.probe import run, tensors_in
from helmscope.models.tap import plainly_eager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.probe import LayerProbe

BLOCKS = ("cross_kernel",)


def cross_lines(
    anatomy: Anatomy, seen: list[LayerProbe], heard: Sequence[Tensor], inputs: Mapping[str, Tensor]
) -> list[Line]:
    """What cross-attention reads is what the encoder gives by itself; its weights are the same by the probe and by an
    observer (``heard``), sum to 1 and leave hidden tokens of the encoder out; its heads add up to its write.
    """
    if not anatomy.has_cross:
        return [Line("cross", None, "no layer of the decoder attends to the encoder", blocks=BLOCKS)]
    rows = [found.cross[1].weights for found in seen if found.cross is not None]
    same = sum(a.shape == b.shape and torch.equal(a, b) for a, b in zip(rows, heard, strict=False))
    says = f"{same} cross-attention records of {len(seen)} layers, the same by two ways"
    records = Line("cross records", same == len(seen) == len(heard), says, blocks=BLOCKS)
    off = worst_of(float((each.sum(-1) - 1).abs().max()) for each in rows)
    most = 3e-2 if rows[0].dtype.itemsize < 4 else 1e-5
    sums = Line.held("cross rows", off, most, "rows of cross-attention sum to 1", BLOCKS)
    return [_encoder_line(anatomy, seen, inputs), records, sums, _mask_line(rows, inputs), _heads_line(anatomy, seen)]


def _encoder_line(anatomy: Anatomy, seen: list[LayerProbe], inputs: Mapping[str, Tensor]) -> Line:
    """The encoder as it is recorded, alone, against what every layer of the decoder reads of it."""
    own = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    with plainly_eager(anatomy.encoder):
        alone = tensors_in(run(anatomy.encoder, own))[0]
    off = worst_of(relative(alone, found.memory) for found in seen if found.memory is not None)
    says = "the decoder attends to the last states of its encoder"
    return Line.held("encoder", off, bound(alone.dtype, inside=True), says, (*BLOCKS, "trajectory"))


def _mask_line(rows: list[Tensor], inputs: Mapping[str, Tensor]) -> Line:
    """Hidden tokens of the encoder have no weight."""
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return Line("cross mask", None, "no token of the encoder is hidden, so that nothing can be asked")
    hidden = ~mask.bool()[:, None, None, :]
    most = worst_of(float((each * hidden).max()) for each in rows)
    return Line.held("cross mask", most, 0.0, "no weight on hidden tokens of the encoder", BLOCKS)


def _heads_line(anatomy: Anatomy, seen: list[LayerProbe]) -> Line:
    """sum_h A_h V_h W_O^h + b of cross-attention against what its output matrix gave, and that against its write."""
    gaps = []
    for layer, found in zip(anatomy.layers, seen, strict=True):
        wiring = layer.wiring
        assert found.cross is not None
        assert wiring.cross_matrix is not None
        assert wiring.cross is not None
        matrix = layer.part(wiring.cross_matrix)
        if matrix_of(matrix) is None:
            says = f"the output matrix of cross-attention is a {type(matrix).__name__}, of a kind that is not known"
            return Line("cross heads", None, says, blocks=BLOCKS)
        gaps.append(heads_gap(found, found.cross, wiring.cross_matrix, wiring.cross))
    says = "heads of cross-attention add up to its write"
    return Line.held("cross heads", worst_of(gaps), bound(seen[0].pre.dtype), says, BLOCKS)
