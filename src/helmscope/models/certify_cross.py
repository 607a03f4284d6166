"""The checks of a certificate for a decoder that reads an encoder: its cross-attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.models.certificate import Line
from helmscope.models.certify import bound, heads_gap, relative, worst_of
from helmscope.models.mlp_reading import matrix_of
from helmscope.models.probe import run, tensors_in
from helmscope.models.tap import plainly_eager
from helmscope.types import pluralized, type_with_article

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from helmscope.models.anatomy import Anatomy
    from helmscope.models.probe import LayerTrace

BLOCKS = ("cross_kernel",)


def cross_lines(
    anatomy: Anatomy, probes: list[LayerTrace], observed: Sequence[Tensor], inputs: Mapping[str, Tensor]
) -> list[Line]:
    """Checks of cross-attention: it reads the output of the encoder; the probe and an observer (``observed``) record
    the same weights; these sum to 1 and are 0 on masked tokens; the outputs of the heads sum to the write.
    """
    if not anatomy.has_cross:
        return [Line("cross", None, "no layer of the decoder attends to the encoder", blocks=BLOCKS)]
    rows = [probe.cross[1].weights for probe in probes if probe.cross is not None]
    same = sum(a.shape == b.shape and torch.equal(a, b) for a, b in zip(rows, observed, strict=False))
    says = f"probe and observer record the same cross-attention weights in {same} of {pluralized(len(probes), 'layer')}"
    records = Line("cross records", same == len(probes) == len(observed), says, blocks=BLOCKS)
    off = worst_of(float((weights.sum(-1) - 1).abs().max()) for weights in rows)
    most = 3e-2 if rows[0].dtype.itemsize < 4 else 1e-5
    sums = Line.held("cross rows", off, most, "rows of cross-attention sum to 1", BLOCKS)
    encoder, mask = _encoder_line(anatomy, probes, inputs), _mask_line(rows, inputs)
    return [encoder, records, sums, mask, _heads_line(anatomy, probes)]


def _encoder_line(anatomy: Anatomy, probes: list[LayerTrace], inputs: Mapping[str, Tensor]) -> Line:
    """The output of the encoder run alone, as it is recorded, against what every layer of the decoder reads."""
    encoder_inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    with plainly_eager(anatomy.encoder):
        alone = tensors_in(run(anatomy.encoder, encoder_inputs))[0]
    off = worst_of(relative(alone, probe.memory) for probe in probes if probe.memory is not None)
    says = "the decoder attends to the last states of its encoder"
    return Line.held("encoder", off, bound(alone.dtype, inside=True), says, (*BLOCKS, "trajectory"))


def _mask_line(rows: list[Tensor], inputs: Mapping[str, Tensor]) -> Line:
    """Masked tokens of the encoder have no weight."""
    mask = inputs.get("attention_mask")
    if mask is None or bool(mask.all()):
        return Line("cross mask", None, "not testable: no token of the encoder is masked")
    masked = ~mask.bool()[:, None, None, :]
    most = worst_of(float((weights * masked).max()) for weights in rows)
    return Line.held("cross mask", most, 0.0, "no weight on masked tokens of the encoder", BLOCKS)


def _heads_line(anatomy: Anatomy, probes: list[LayerTrace]) -> Line:
    """sum_h A_h V_h W_O^h + b of cross-attention against the output of its projection, and that against its write."""
    gaps = []
    for layer, probe in zip(anatomy.layers, probes, strict=True):
        wiring = layer.wiring
        assert probe.cross is not None
        assert wiring.cross_matrix is not None
        assert wiring.cross is not None
        matrix = layer.part(wiring.cross_matrix)
        if matrix_of(matrix) is None:
            says = (
                f"the output projection of cross-attention is {type_with_article(matrix)}, whose matrix cannot be read"
            )
            return Line("cross heads", None, says, blocks=BLOCKS)
        gaps.append(heads_gap(probe, probe.cross, wiring.cross_matrix, wiring.cross))
    says = "the outputs of the heads sum to the write of cross-attention"
    return Line.held("cross heads", worst_of(gaps), bound(probes[0].pre.dtype), says, BLOCKS)
