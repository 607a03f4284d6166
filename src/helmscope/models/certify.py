"""The checks behind a certificate, on a few tokens of the texts that are recorded."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from helmscope.models.certificate import Line
from helmscope.models.experts import ForceAfterNorm
from helmscope.models.mlp_reading import affine_of, matrix_of, read_mlp
from helmscope.models.probe import run
from helmscope.models.tap import head_outputs, plainly_eager
from helmscope.models.topology import Kind
from helmscope.models.watch import LEADS_TO, Site
from helmscope.types import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn

    from helmscope.models.anatomy import Anatomy, Layer
    from helmscope.models.probe import LayerProbe
    from helmscope.models.recorder import ResidualStream
    from helmscope.models.tap import Attended, Call

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
COARSE = 3e-2  # of half precision
BOTH_WAYS = "attention looks both ways"
BLOCK = 1 << 20  # entries of a tensor that are compared at a time
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


def finite_line(radius: Tensor) -> Line:
    """Whether every state that was written down is finite."""
    good = bool(torch.isfinite(radius).all())
    says = "all states are finite" if good else "some states are not finite"
    return Line("finite", good, says, blocks=("trajectory", "resume"))


def states_line(stream: ResidualStream, anatomy: Anatomy, seen: list[LayerProbe]) -> Line:
    """What a recorder wrote down of the probed tokens against what their modules showed: every depth."""
    gaps = []
    for number, (layer, found) in enumerate(zip(anatomy.layers, seen, strict=True)):
        for site, state in _states(layer, found).items():
            gaps.append(relative(stream.at(anatomy.depths.at(number, site)), state))
    says = f"{len(gaps)} states as they are written down are those that the modules show"
    return Line.held("states", worst_of(gaps), bound(seen[0].pre.dtype), says, ("trajectory", "resume"))


def _states(layer: Layer, found: LayerProbe) -> dict[Site, Tensor]:
    """All states of a layer, as its modules showed them."""
    wiring = layer.wiring
    assert found.post is not None
    states = {Site.INPUT: found.pre}
    for site, path in list(wiring.writes.items())[:-1]:
        before = list(states.values())[-1]
        given = path if wiring.kind is not Kind.POST_NORM else wiring.joints[LEADS_TO[site]]
        shown = next(call for call in found.calls if call.path == given).output
        assert shown is not None
        shown = shown.reshape(before.shape)
        states[LEADS_TO[site]] = shown if wiring.kind is Kind.POST_NORM else before + wiring.scale(site) * shown
    return states | {Site.OUTPUT: found.post}


def relative(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| over all entries, 0 where both are 0; block by block, since logits may be many."""
    off, size = [], []
    for one, other in zip(*(torch.split(part.flatten(), BLOCK) for part in (found, wanted)), strict=True):
        off.append((one.double() - other.double()).norm())
        size.append(other.double().norm())
    apart, length = float(torch.stack(off).norm()), float(torch.stack(size).norm())
    return apart / length if length > 0 else apart


def worst_of(values: Iterable[float]) -> float:
    """The largest, or NaN where one is NaN."""
    return float(torch.tensor([0.0, *values], dtype=torch.float64, device="cpu").max())


def residual_line(errors: Tensor, dtype: torch.dtype) -> Line:
    """The residual identities of every layer, over all tokens recorded."""
    worst = float(errors.max())
    layer = int(errors.argmax())
    says = f"the parts of each block add up; worst at layer {layer} of {len(errors)}"
    return Line.held("residual", worst, bound(dtype), says, ("trajectory", "resume"))


def logits_line(anatomy: Anatomy, inputs: Mapping[str, Tensor], recorded: Tensor, off: float) -> Line:
    """The output of the watched model against that of the untouched one: ``off`` is how far apart they are before the
    head on the longest text; here with the head on a few tokens, under the model's own eager attention.
    """
    model, blocks = anatomy.model, ("trajectory", "kernel", "replay", "lens")
    own = str(model.config._attn_implementation)
    with plainly_eager(model):
        eager = run(model, inputs, **anatomy.options)[0]
    apart = relative(recorded, eager)
    apart = max(apart, off) if own == "eager" else apart
    most = bound(recorded.dtype, inside=True)
    if own == "eager" or not apart:
        says = "bit-equal to the untouched model" if own == "eager" else "bit-equal to eager attention"
        says = says if not apart else "recording changes the output: the family's eager attention has a way of its own"
        if own != "eager" and off:
            says += f"; the model's own ({own}) differs"
            says += " by rounding" if off <= most else " by more: load it with attention='eager'"
        return Line.held("logits", apart if own == "eager" else off, most, says, blocks)
    return Line.held("logits", apart, most, "recording differs from eager attention", blocks)


def attention_lines(
    anatomy: Anatomy, seen: list[LayerProbe], heard: list[Tensor], causal: bool | None, visible: Tensor | None = None
) -> list[Line]:
    """One record per layer, the same by the probe and by an observer; rows that sum to 1 or miss a stated mass; nothing
    of the future. Rows of padding, where ``visible`` is False, look anywhere.
    """
    rows = [_weights(layer, found) for layer, found in zip(anatomy.layers, seen, strict=True)]
    known = [each for each in rows if each is not None]
    same = sum(a is not None and a.shape == b.shape and torch.equal(a, b) for a, b in zip(rows, heard, strict=False))
    says = f"{counted(same, 'attention record')} of {counted(len(seen), 'layer')}, the same by two ways"
    count = Line("records", same == len(seen) == len(heard), says, blocks=("kernel", "replay"))
    if not known:
        return [count]
    missing = worst_of(float((1 - each.sum(-1)).max()) for each in known)
    over = worst_of(float((each.sum(-1) - 1).max()) for each in known)
    says = "rows sum to 1" if missing < 1e-2 else f"a sink outside the tokens takes up to {missing:.2f} of a row"
    sums = Line.held("rows", over, 3e-2 if known[0].dtype.itemsize < 4 else 1e-5, says, ("kernel", "replay"))
    if causal is None:
        return [count, sums, Line("causality", None, "not to be told: images, one token alone, or tokens apart")]
    asked = 1 if visible is None else visible.bool()[:, None, :, None]
    later = worst_of(float((each.triu(1).abs() * asked).max()) for each in known)
    ahead = Line.held("causality", later, 0.0, "no weight on later tokens", ("kernel", "replay"))
    return [count, sums, ahead if causal else Line("causality", None, BOTH_WAYS)]


def heads_line(anatomy: Anatomy, seen: list[LayerProbe]) -> Line:
    """sum_h A_h V_h W_O^h + b against what the output matrix gave, and that against the write."""
    gaps = []
    for layer, found in zip(anatomy.layers, seen, strict=True):
        wiring = layer.wiring
        if wiring.output_matrix is None or found.attention is None:
            return Line("heads", None, "the family hides q, k and v: no observable that needs them", blocks=("replay",))
        matrix = next(each for each in found.calls if each.path == wiring.output_matrix)
        if matrix_of(matrix.module) is None:
            says = f"the output matrix is a {type(matrix.module).__name__}, of a kind that is not known"
            return Line("heads", None, says, blocks=("replay",))
        gaps.append(heads_gap(found, found.attention, wiring.output_matrix, wiring.attention))
    says = "heads add up to the write"
    return Line.held("heads", worst_of(gaps), bound(seen[0].pre.dtype), says, ("kernel", "replay"))


def heads_gap(found: LayerProbe, attention: tuple[Call, Attended], matrix_path: str, write_path: str) -> float:
    """How far the heads of an attention are from adding up to what its output matrix gave, and that from its write."""
    call, result = attention
    matrix, write = (next(each for each in found.calls if each.path == path) for path in (matrix_path, write_path))
    weight, bias = affine_of(matrix.module)
    assert matrix.output is not None
    heads = head_outputs(call, result.weights).double()
    per_head = weight.double().view(weight.shape[0], heads.shape[1], -1)
    total = torch.einsum("bhnr,dhr->bnd", heads, per_head) + (0.0 if bias is None else bias.double())
    wanted = matrix.output.double().reshape(total.shape)
    gap = relative(total, wanted)
    if _rescales(write.module):
        return gap
    assert write.output is not None
    return worst_of((gap, relative(write.output, wanted)))


def _rescales(module: nn.Module) -> bool:
    """Whether a module only multiplies coordinates: a norm, or a scale of the layer."""
    own = list(module.parameters())
    return bool(own) and all(value.ndim <= 1 for value in own)


def mlp_line(anatomy: Anatomy, seen: list[LayerProbe]) -> tuple[Line, tuple[ForceAfterNorm | None, ...]]:
    """The MLPs as fields, and how well they give what the modules gave."""
    forces: list[ForceAfterNorm | None] = []
    gaps, most = [], bound(seen[0].pre.dtype)
    for layer, found in zip(anatomy.layers, seen, strict=True):
        read = read_mlp(found, layer.wiring)
        if read is None or (layer.wiring.mlp_norm is not None and layer.mlp_norm is None):
            forces.append(None)
            continue
        force = ForceAfterNorm(read.force, layer.mlp_norm, layer.wiring.scale(Site.MLP))
        wanted = force.scale * read.written.double()
        gaps.append(relative(force.folded().ambient(mlp_points(layer, found, read.read)), wanted))
        if _in_single(layer, found):
            most = bound(seen[0].pre.dtype, inside=True)
        forces.append(force)
    unread = [k for k, force in enumerate(forces) if force is None]
    if unread:
        says = f"the MLP of layer {unread[0]} is of no kind that is known: no force, no potential, no swirl"
        return Line("mlp", None, says, blocks=("force",)), tuple(forces)
    kinds = ", ".join(dict.fromkeys(type(each.force).__name__ for each in forces if each is not None))
    says = f"{kinds} with its norm folded in equals the module"
    return Line.held("mlp", worst_of(gaps), most, says, ("force",)), tuple(forces)


def _in_single(layer: Layer, found: LayerProbe) -> bool:
    """Whether the norm before the MLP stays in float32 in a model of float64."""
    if layer.mlp_norm is None or found.pre.dtype != torch.float64:
        return False
    shown = next(call for call in found.calls if call.path == layer.wiring.mlp_norm)
    assert shown.input is not None
    assert shown.output is not None
    return relative(layer.mlp_norm(shown.input), shown.output) > 1e-11


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


def head_line(anatomy: Anatomy, output: Tensor) -> Line | None:
    """A line where the model's output is not (batch, n, vocabulary). Some heads are not told to transformers; then the
    width of the output decides, and that there is something behind the trunk.
    """
    model = anatomy.model
    told = model.get_output_embeddings() is not None
    if not told and model.base_model is not model and output.ndim == 3:
        told = getattr(model.get_input_embeddings(), "num_embeddings", None) == output.shape[-1]
    if told and output.ndim == 3:
        return None
    says = f"{type(model).__name__} has no head over a vocabulary: it gives {tuple(output.shape)} for these texts"
    return Line("head", None, says, blocks=("lens over depth",))


def virtual_line(anatomy: Anatomy) -> Line | None:
    """Parallel blocks have no state between their halves."""
    if not any(layer.wiring.kind is Kind.PARALLEL for layer in anatomy.layers):
        return None
    return Line("mid state", None, "virtual: attention and MLP read the same state, and input + attention is shown")


def sphere_line(anatomy: Anatomy, seen: list[LayerProbe]) -> Line | None:
    """In a post-norm model, gain and bias of every norm against what its module gave."""
    if not anatomy.post_norm:
        return None
    gaps = []
    for number, (layer, found) in enumerate(zip(anatomy.layers, seen, strict=True)):
        for site, norm in layer.state_norms.items():
            path = layer.wiring.joints.get(site)
            if norm is None or path is None:
                says = f"a norm of layer {number} is of a kind that is not known: its gain cannot be folded out"
                return Line("sphere", None, says, blocks=("on_sphere",))
            shown = next(call for call in found.calls if call.path == path)
            assert shown.input is not None
            assert shown.output is not None
            gaps.append(relative(norm(shown.input.double()), shown.output))
    says = "norms with the gain and bias that were read give what their modules give"
    return Line.held("sphere", worst_of(gaps), bound(seen[0].pre.dtype, inside=True), says, ("on_sphere",))
