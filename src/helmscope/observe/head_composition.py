"""Composition of heads by their weights: how well later heads read what a head writes.

A head a writes W_O^a W_V^a x; a later head b reads its queries, keys and values by W_Q^b, W_K^b and W_V^b. The
composition score of the pair, for each of the three,

    |W^b W_O^a W_V^a|_F / (|W^b|_F |W_O^a W_V^a|_F),    W^b one of W_Q^b, W_K^b, W_V^b,

lies between 0 and 1 (Elhage et al., A mathematical framework for transformer circuits, 2021; there with W_O^b W_V^b for
the values). The gain of the norm before b is folded into W^b, and the mean over coordinates, which a LayerNorm removes,
is taken out of what a writes.

Null. A W^b of independent normal entries, 1 / sqrt(d), d the dimension without that mean. How to read it. Above the
null b reads more of what a writes than of a random subspace of that size. How it fails. Weights alone: whether the head
is ever read depends on attention. Layers are the replicates, and say nothing about other models. Cost: no forward pass
but a few short ones that find the matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.fields.norms import LayerNorm
from helmscope.geometry.arithmetic import full_precision
from helmscope.models.input_matrices import input_matrices
from helmscope.models.output_matrix import output_matrices, output_unsupported
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Site
from helmscope.observe.labels import label_attributes
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_replicates

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

READS = {"query": Site.QUERY, "key": Site.KEY, "value": Site.VALUE}
NAMES = {
    "composition": "composition score of a head with a later head",
    "composition_mean": "composition score of a head, mean over later heads",
}


@full_precision
def composition_score(
    reads: Float[Tensor, "*batch r d"], output: Float[Tensor, "*batch d s"], value: Float[Tensor, "*batch s d"]
) -> Float[Tensor, "*batch"]:
    """|W O V|_F / (|W|_F |O V|_F) for W = ``reads``, O = ``output`` and V = ``value``; NaN if one of them is 0.

    >>> composition_score(torch.eye(2), torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0, 3.0]]))  # 1 / sqrt 2
    tensor(0.7071)
    """
    gram = value @ value.mT
    both = ((reads @ output) @ gram * (reads @ output)).sum((-1, -2))
    written = (output.mT @ output * gram).sum((-1, -2))
    size = reads.square().sum((-1, -2)) * written
    score: Tensor = (both / torch.where(size > 0, size, torch.nan)).clamp(min=0).sqrt()
    return score


@shows_progress("composition of heads")
@full_precision
def head_composition(recording: Recording, *, progress: ProgressOption = None) -> xr.Dataset:
    """``composition`` along (layer, head, read, later_layer, later_head), NaN unless the other layer is later, and
    ``composition_mean`` along (layer, head, read), its mean over all later heads, NaN in the last layer. ``read`` is
    "query", "key" or "value" of the later head. The nulls are those of random matrices.

    Raises HelmscopeError where ``input_matrices`` does, where output matrices cannot be read, and for a single layer.

    >>> from helmscope import record
    >>> head_composition(record("A", ["Once upon a time"])).composition_mean.dims
    ('layer', 'head', 'read')
    """
    refused = composition_unsupported(recording)
    if refused is not None:
        raise HelmscopeError(refused)
    report, inputs, anatomy = check_progress(progress), input_matrices(recording), recording.anatomy
    outputs = [output_matrices(layer).double().cpu() for layer in anatomy.layers]
    if anatomy.centered:
        outputs = [each - each.mean(-2, keepdim=True) for each in outputs]
    count, heads = len(outputs), len(outputs[0])
    values = [_repeated(_folded(recording, layer, inputs[layer][Site.VALUE].weight), heads) for layer in range(count)]
    found = np.full((count, heads, len(READS), count, heads), np.nan)
    for a in range(count):
        for b in range(a + 1, count):
            for k, site in enumerate(READS.values()):
                reads = _repeated(_folded(recording, b, inputs[b][site].weight), heads)
                score = composition_score(reads.unsqueeze(0), outputs[a].unsqueeze(1), values[a].unsqueeze(1))
                found[a, :, k, b] = score.numpy()
        report((a + 1) / count)
    later = np.full(found.shape[:3], np.nan)
    later[:-1] = np.nanmean(found[:-1], axis=(-1, -2))
    null = (anatomy.dim - anatomy.centered) ** -0.5
    data = {
        "composition": (("layer", "head", "read", "later_layer", "later_head"), found, _attributes("composition")),
        "composition_null": null,
        "composition_mean": (("layer", "head", "read"), later, _attributes("composition_mean")),
        "composition_mean_null": null,
    }
    coords = {"layer": range(count), "head": range(heads), "read": list(READS), "later_layer": range(count)}
    coords |= {"later_head": range(heads)}
    return check_replicates(
        xr.Dataset(data, coords, {"title": "composition of heads", "model": recording.origin.title})
    )


def composition_unsupported(recording: object) -> str | None:
    """Why a system has no composition scores, in one sentence; None if it has them.

    >>> composition_unsupported(None)
    'recording is a NoneType, but it must be a Recording'
    """
    try:
        layers = check_recording(recording).anatomy.layers
    except HelmscopeError as error:
        return str(error)
    assert isinstance(recording, Recording)
    if len(layers) < 2:
        return "recording is of a model with 1 layer, but composition is with heads of later layers"
    for number, layer in enumerate(layers):
        reason = output_unsupported(layer)
        if reason is not None:
            return f"{reason} in layer {number}, but composition needs the matrix by which each head writes"
    if len({layer.heads for layer in layers}) > 1:
        return "recording is of a model whose layers have different numbers of heads"
    try:
        input_matrices(recording)
    except HelmscopeError as error:
        return str(error)
    return None


def _attributes(name: str) -> dict[str, object]:
    return {**label_attributes(NAMES[name]), "valid_min": 0.0, "valid_max": 1.0}


def _folded(recording: Recording, layer: int, weight: Float[Tensor, "heads r d"]) -> Float[Tensor, "heads r d"]:
    """The matrix that reads the state without its mean, with the gain of the norm before it."""
    norm = recording.anatomy.layers[layer].attention_norm
    wide = weight.detach().double().cpu()
    if norm is None:
        return wide
    wide = wide if norm.gain is None else wide * norm.gain.detach().double().cpu()
    return wide - wide.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else wide


def _repeated(weight: Tensor, heads: int) -> Tensor:
    """The matrices of shared keys and values, one for each query head."""
    return weight.repeat_interleave(heads // len(weight), 0)
