"""The checks behind a certificate, on a few tokens of the texts that are recorded."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.certificate import Line
from helmscope.models.experts import folded
from helmscope.models.mlp_reading import affine_of, read_mlp
from helmscope.models.probe import no_cache
from helmscope.models.tap import head_outputs, tapped
from helmscope.models.topology import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from helmscope.models.anatomy import Anatomy, Layer
    from helmscope.models.probe import LayerProbe

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
COARSE = 3e-2  # of half precision
# a float64 model of many families has norms, softmax and positions in float32 inside
INSIDE = {torch.float64: 1e-6, torch.float32: 1e-5}


def bound(dtype: torch.dtype, *, inside: bool = False) -> float:
    """How far an identity may be off, relative, by rounding."""
    return (INSIDE if inside else BOUNDS).get(dtype, COARSE)


def topology_line(anatomy: Anatomy, seen: list[LayerProbe]) -> Line:
    """What was found, and that every block's output is the next one's input."""
    chained = all(a.post is not None and torch.equal(a.post, b.pre) for a, b in pairwise(seen))
    says = str(anatomy) if chained else "a block's output is not the next block's input"
    return Line("topology", chained, says, blocks=("trajectory", "resume"))


def residual_line(errors: Tensor, dtype: torch.dtype) -> Line:
    """The residual identities of every layer, over all tokens recorded."""
    worst = float(errors.max())
    layer = int(errors.argmax())
    says = f"the parts of each block add up; worst at layer {layer} of {len(errors)}"
    return Line.held("residual", worst, bound(dtype), says, ("trajectory", "resume"))


def logits_line(anatomy: Anatomy, inputs: Mapping[str, Tensor], recorded: Tensor) -> Line:
    """The output of the watched model against that of the untouched one."""
    model = anatomy.model
    own = str(model.config._attn_implementation)
    with torch.no_grad():
        untouched = model(**inputs, **no_cache(model))[0]
        with tapped(model, None):
            eager = model(**inputs, **anatomy.options)[0]
    off = float((recorded - untouched).abs().max() / untouched.abs().max())
    if not torch.equal(recorded, eager):
        apart = float((recorded - eager).abs().max())
        return Line("logits", False, f"recording changes the output by {apart:.1e}", off, 0.0, ("trajectory", "kernel"))
    says = f"bit-equal to eager attention; the model's own ({own}) differs by rounding" if off else "bit-equal"
    return Line.held("logits", off, 1e-3 if bound(recorded.dtype) < COARSE else 0.1, says, ("trajectory", "kernel"))


def attention_lines(anatomy: Anatomy, seen: list[LayerProbe], causal: bool) -> list[Line]:
    """One record a layer, rows that sum to 1 or miss a stated mass, nothing from the future."""
    rows = [_weights(layer, found) for layer, found in zip(anatomy.layers, seen, strict=True)]
    known = [each for each in rows if each is not None]
    count = Line(
        "records",
        len(known) == len(seen),
        f"{len(known)} attention records of {len(seen)} layers",
        blocks=("kernel", "replay"),
    )
    if not known:
        return [count]
    missing = max(float((1 - each.sum(-1)).max()) for each in known)
    over = max(float((each.sum(-1) - 1).max()) for each in known)
    says = "rows sum to 1" if missing < 1e-2 else f"a sink outside the tokens takes up to {missing:.2f} of a row"
    sums = Line.held("rows", max(over, 0.0), 3e-2 if known[0].dtype.itemsize < 4 else 1e-5, says, ("kernel",))
    later = max(float(each.triu(1).abs().max()) for each in known)
    ahead = Line.held("causality", later, 0.0, "no weight on later tokens", ("kernel",))
    both = Line("causality", None, "attention looks both ways")
    return [count, sums, ahead if causal else both]


def heads_line(anatomy: Anatomy, seen: list[LayerProbe]) -> Line:
    """sum_h A_h V_h W_O^h + b against what the output matrix gave."""
    worst = 0.0
    for layer, found in zip(anatomy.layers, seen, strict=True):
        if layer.wiring.output_matrix is None or found.attention is None:
            return Line("heads", None, "the family hides q, k and v: no observable that needs them", blocks=("replay",))
        call, result = found.attention
        matrix = next(each for each in found.calls if each.path == layer.wiring.output_matrix)
        weight, bias = affine_of(matrix.module)
        assert matrix.output is not None
        heads = head_outputs(call, result.weights).double()
        per_head = weight.double().view(weight.shape[0], heads.shape[1], -1)
        total = torch.einsum("bhnr,dhr->bnd", heads, per_head) + (0.0 if bias is None else bias.double())
        wanted = matrix.output.double().reshape(total.shape)
        worst = max(worst, float((total - wanted).norm() / wanted.norm()))
    return Line.held("heads", worst, bound(seen[0].pre.dtype), "heads add up to the write", ("replay",))


def mlp_line(anatomy: Anatomy, seen: list[LayerProbe]) -> tuple[Line, tuple[Any, ...]]:
    """The MLPs as fields, and how well they give what the modules gave."""
    forces: list[Any] = []
    worst, dtype = 0.0, seen[0].pre.dtype
    for layer, found in zip(anatomy.layers, seen, strict=True):
        read = read_mlp(found, layer.wiring)
        if read is None or (layer.wiring.mlp_norm is not None and layer.mlp_norm is None):
            forces.append(None)
            continue
        scale = layer.wiring.scales[1]
        force = folded(read.force, layer.mlp_norm, scale)
        wanted = scale * read.written.double()
        off = (force.ambient(mlp_points(layer, found, read.read)) - wanted).norm() / wanted.norm()
        worst = max(worst, float(off))
        forces.append(force)
    unread = [k for k, force in enumerate(forces) if force is None]
    if unread:
        says = f"the MLP of layer {unread[0]} is of no kind that is known: no force, no potential, no swirl"
        return Line("mlp", None, says, blocks=("force",)), tuple(forces)
    says = f"{type(forces[0]).__name__} with its norm folded in equals the module"
    return Line.held("mlp", worst, bound(dtype, inside=True), says, ("force",)), tuple(forces)


def mlp_points(layer: Layer, found: LayerProbe, read: Tensor) -> Tensor:
    """Where a folded force is to be evaluated: core(z) / sqrt(d), or what the MLP reads where no norm stands before."""
    if layer.mlp_norm is None:
        return read.double()
    z = next(call for call in found.calls if call.path == layer.wiring.mlp_norm).input
    assert z is not None
    core = layer.mlp_norm.core()(z.double().reshape(read.shape))
    return core / math.sqrt(read.shape[-1])


def _weights(layer: Layer, found: LayerProbe) -> Tensor | None:
    if found.attention is not None:
        return found.attention[1].weights
    call = next((each for each in found.calls if each.path == layer.wiring.weights), None)
    return None if call is None else next((each for each in call.outputs if each.ndim == 4), None)


def virtual_line(anatomy: Anatomy) -> Line | None:
    """Parallel blocks have no state between their halves."""
    if not any(layer.wiring.kind is Kind.PARALLEL for layer in anatomy.layers):
        return None
    return Line("mid state", None, "virtual: attention and MLP read the same state, and input + attention is shown")
