"""The checks of a certificate, computed on a few tokens of the texts that are recorded."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from helmscope.models.certificate import Line
from helmscope.models.experts import ForceAfterNorm
from helmscope.models.mlp_reading import affine_of, matrix_of, read_mlp
from helmscope.models.output_matrix import only_rescales
from helmscope.models.probe import run
from helmscope.models.sites import LEADS_TO, Site
from helmscope.models.tap import head_outputs, plainly_eager
from helmscope.models.topology import Kind
from helmscope.types import pluralized, type_with_article

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.anatomy import Anatomy, Layer
    from helmscope.models.certificate import Certificate
    from helmscope.models.depths import Depths
    from helmscope.models.probe import LayerTrace
    from helmscope.models.recorder import ResidualStream
    from helmscope.models.runner import Runner
    from helmscope.models.tap import Attended, Call

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
COARSE = 3e-2  # in half precision
BOTH_WAYS = "attention is bidirectional"
UNTESTABLE = "not testable: images, a single token, or no effect of one token on another"
BLOCK = 1 << 20  # entries compared at a time
# in many families a float64 model computes norms, softmax and positions in float32
INSIDE = {torch.float64: 1e-6, torch.float32: 1e-5}


def bound(dtype: torch.dtype, *, inside: bool = False) -> float:
    """The largest relative error that rounding in ``dtype`` explains; ``inside``: some steps may be in float32."""
    return (INSIDE if inside else BOUNDS).get(dtype, COARSE)


def topology_line(anatomy: Anatomy, probes: list[LayerTrace]) -> Line:
    """The topology, and whether every block's output is the next block's input."""
    chained = all(a.post is not None and torch.equal(a.post, b.pre) for a, b in pairwise(probes))
    says = str(anatomy) if chained else "a block's output is not the next block's input"
    return Line("topology", chained, says, blocks=("trajectory", "resume"))


def finite_line(radius: Float[Tensor, "depth prompt token"], depths: Depths, *, first: int = 0) -> Line:
    """Whether every recorded state is finite; otherwise which one, of those at the least depth, is not, and the layer
    that wrote it. ``first`` is the depth of the first states.
    """
    lost = (~torch.isfinite(radius)).nonzero()
    says = "all states are finite"
    if len(lost):
        depth, prompt, token = lost[0].tolist()
        depth += first
        where = f"layer {(depth - 1) // depths.steps}" if depth else "input of layer 0"
        says = (
            f"states are not finite (NaN, or longer than the dtype holds): {len(lost)} of {radius.numel()}, first that "
            f"of prompt {prompt} at depth {depth} ({where}), token {token}"
        )
    return Line("finite", not len(lost), says, blocks=("trajectory", "resume"))


def states_line(stream: ResidualStream, anatomy: Anatomy, probes: list[LayerTrace]) -> Line:
    """The recorded states of the probed tokens against those computed from module outputs, at every depth."""
    gaps = []
    for number, (layer, probe) in enumerate(zip(anatomy.layers, probes, strict=True)):
        for site, state in _probed_states(layer, probe).items():
            gaps.append(relative(stream.at(anatomy.depths.at(number, site)), state))
    says = f"{len(gaps)} recorded states equal those computed from the outputs of the modules"
    return Line.held("states", worst_of(gaps), bound(probes[0].pre.dtype), says, ("trajectory", "resume"))


def _probed_states(layer: Layer, probe: LayerTrace) -> dict[Site, Tensor]:
    """All states of a layer, computed from the outputs of its modules."""
    wiring = layer.wiring
    assert probe.post is not None
    states = {Site.INPUT: probe.pre}
    for site, path in list(wiring.writes.items())[:-1]:
        before = list(states.values())[-1]
        source = path if wiring.kind is not Kind.POST_NORM else wiring.joints[LEADS_TO[site]]
        output = next(call for call in probe.calls if call.path == source).output
        assert output is not None
        output = output.reshape(before.shape)
        states[LEADS_TO[site]] = output if wiring.kind is Kind.POST_NORM else before + wiring.scale(site) * output
    return states | {Site.OUTPUT: probe.post}


def relative(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| over all entries, 0 where both are 0; in blocks, since logits can be large."""
    errors, norms = [], []
    for one, other in zip(*(torch.split(value.flatten(), BLOCK) for value in (actual, expected)), strict=True):
        errors.append((one.double() - other.double()).norm())
        norms.append(other.double().norm())
    error, norm = float(torch.stack(errors).norm()), float(torch.stack(norms).norm())
    return error / norm if norm > 0 else error


def worst_of(values: Iterable[float]) -> float:
    """The largest value, at least 0; NaN if any is NaN."""
    return float(torch.tensor([0.0, *values], dtype=torch.float64, device="cpu").max())


def residual_line(errors: Tensor, dtype: torch.dtype) -> Line:
    """The residual identity of every layer, over all recorded tokens."""
    worst = float(errors.max())
    layer = int(errors.argmax())
    says = f"each block's output follows from its input and writes; largest error at layer {layer} of {len(errors)}"
    return Line.held("residual", worst, bound(dtype), says, ("trajectory", "resume"))


def certified_again(
    certificate: Certificate, runner: Runner, stream: ResidualStream, errors: Float[Tensor, " layer"], *, first: int
) -> Certificate:
    """The certificate of a further run of a recorded model, from the depth ``first`` on, which checks only some of the
    lines again.
    """
    finite = finite_line(stream.radius, runner.anatomy.depths, first=first)
    count = len(runner.edits) + (0 if runner.encoder is None else len(runner.encoder.edits))
    if not count:
        return certificate.with_line(finite)
    residual = residual_line(errors, runner.model.dtype)
    if any(Site.OUTPUT in edit.sites for edit in runner.edits):
        residual = Line("residual", None, "an edit replaces a block's output, which is then not a sum of writes")
    edits = Line("edits", None, f"{count} applied: only finite and residual are checked again")
    return certificate.under_edits(finite, residual, edits)


def logits_line(anatomy: Anatomy, inputs: Mapping[str, Tensor], recorded: Tensor, off: float) -> Line:
    """The output of the model while it is recorded against its output without hooks.

    ``off`` is their relative difference before the head on the longest text; here the logits of a few tokens are
    compared too, under the family's eager attention.
    """
    model, blocks = anatomy.model, ("trajectory", "kernel", "replay", "lens")
    own = str(model.config._attn_implementation)
    with plainly_eager(model):
        eager = run(model, inputs, **anatomy.options)[0]
    error = relative(recorded, eager)
    error = max(error, off) if own == "eager" else error
    most = bound(recorded.dtype, inside=True)
    if own == "eager" or not error:
        says = "bit-identical to the model without hooks" if own == "eager" else "bit-identical to eager attention"
        if error:
            says = "recording changes the output: the family's eager attention is not the standard one"
        if own != "eager" and off:
            says += f"; the model's default attention ({own}) differs"
            says += " by rounding" if off <= most else " by more than rounding: load it with attention='eager'"
        return Line.held("logits", error if own == "eager" else off, most, says, blocks)
    return Line.held("logits", error, most, "the recorded output differs from that of eager attention", blocks)


def attention_lines(
    anatomy: Anatomy,
    probes: list[LayerTrace],
    observed: list[Tensor],
    causal: bool | None,
    visible: Tensor | None = None,
) -> list[Line]:
    """Checks of attention weights: the probe and an observer (``observed``) record the same for every layer; rows sum
    to 1, up to the mass of a sink; a causal model has no weight on later tokens.

    Rows of padding, where ``visible`` is False, are exempt from the last one.
    """
    rows = [_attention_weights(layer, probe) for layer, probe in zip(anatomy.layers, probes, strict=True)]
    known = [weights for weights in rows if weights is not None]
    same = sum(a is not None and a.shape == b.shape and torch.equal(a, b) for a, b in zip(rows, observed, strict=False))
    says = f"probe and observer record the same attention weights in {same} of {pluralized(len(probes), 'layer')}"
    count = Line("records", same == len(probes) == len(observed), says, blocks=("kernel", "replay"))
    if not known:
        return [count]
    missing = worst_of(float((1 - weights.sum(-1)).max()) for weights in known)
    over = worst_of(float((weights.sum(-1) - 1).max()) for weights in known)
    says = "rows sum to 1" if missing < 1e-2 else f"rows sum to 1 with a sink, which takes up to {missing:.2f} of a row"
    sums = Line.held("rows", over, 3e-2 if known[0].dtype.itemsize < 4 else 1e-5, says, ("kernel", "replay"))
    if causal is None:
        return [count, sums, Line("causality", None, UNTESTABLE)]
    counted_rows = 1 if visible is None else visible.bool()[:, None, :, None]
    later = worst_of(float((weights.triu(1).abs() * counted_rows).max()) for weights in known)
    ahead = Line.held("causality", later, 0.0, "no weight on later tokens", ("kernel", "replay"))
    return [count, sums, ahead if causal else Line("causality", None, BOTH_WAYS)]


def heads_line(anatomy: Anatomy, probes: list[LayerTrace]) -> Line:
    """sum_h A_h V_h W_O^h + b against the output of the output projection, and that against the write."""
    gaps = []
    for layer, probe in zip(anatomy.layers, probes, strict=True):
        wiring = layer.wiring
        if wiring.output_matrix is None or probe.attention is None:
            says = "the family hides q, k and v: nothing that needs them can be measured"
            return Line("heads", None, says, blocks=("replay",))
        matrix = next(call for call in probe.calls if call.path == wiring.output_matrix)
        if matrix_of(matrix.module) is None:
            says = f"the output projection is {type_with_article(matrix.module)}, whose matrix cannot be read"
            return Line("heads", None, says, blocks=("replay",))
        gaps.append(heads_gap(probe, probe.attention, wiring.output_matrix, wiring.attention))
    says = "the outputs of the heads sum to the write of attention"
    return Line.held("heads", worst_of(gaps), bound(probes[0].pre.dtype), says, ("kernel", "replay"))


def heads_gap(probe: LayerTrace, attention: tuple[Call, Attended], matrix_path: str, write_path: str) -> float:
    """The error of sum_h A_h V_h W_O^h + b as the output of the projection, and of that as the write of attention."""
    call, result = attention
    calls = {made.path: made for made in reversed(probe.calls)}  # the first call of each path
    matrix, write = calls[matrix_path], calls[write_path]
    weight, bias = affine_of(matrix.module)
    assert matrix.output is not None
    heads = head_outputs(call, result.weights).double()
    per_head = weight.double().view(weight.shape[0], heads.shape[1], -1)
    total = torch.einsum("bhnr,dhr->bnd", heads, per_head) + (0.0 if bias is None else bias.double())
    expected = matrix.output.double().reshape(total.shape)
    gap = relative(total, expected)
    if only_rescales(write.module):
        return gap
    assert write.output is not None
    return worst_of((gap, relative(write.output, expected)))


def mlp_line(anatomy: Anatomy, probes: list[LayerTrace]) -> tuple[Line, tuple[ForceAfterNorm | None, ...]]:
    """The MLPs as fields, and a check that they reproduce the outputs of the modules."""
    forces: list[ForceAfterNorm | None] = []
    gaps, most = [], bound(probes[0].pre.dtype)
    for layer, probe in zip(anatomy.layers, probes, strict=True):
        read = read_mlp(probe, layer.wiring)
        if read is None or (layer.wiring.mlp_norm is not None and layer.mlp_norm is None):
            forces.append(None)
            continue
        force = ForceAfterNorm(read.force, layer.mlp_norm, layer.wiring.scale(Site.MLP), read.modules)
        expected = force.scale * read.written.double()
        gaps.append(relative(force.folded().ambient(mlp_points(layer, probe, read.read)), expected))
        if _norm_in_float32(layer, probe):
            most = bound(probes[0].pre.dtype, inside=True)
        forces.append(force)
    unread = [k for k, force in enumerate(forces) if force is None]
    if unread:
        says = f"the MLP of layer {unread[0]} is of an unknown kind: it has no force, potential or swirl"
        return Line("mlp", None, says, blocks=("force",)), tuple(forces)
    kinds = ", ".join(dict.fromkeys(type(force.force).__name__ for force in forces if force is not None))
    says = f"{kinds} with its norm folded in reproduces the output of the module"
    return Line.held("mlp", worst_of(gaps), most, says, ("force",)), tuple(forces)


def _norm_in_float32(layer: Layer, probe: LayerTrace) -> bool:
    """Whether the norm before the MLP of a float64 model computes in float32."""
    if layer.mlp_norm is None or probe.pre.dtype != torch.float64:
        return False
    call = next(call for call in probe.calls if call.path == layer.wiring.mlp_norm)
    assert call.input is not None
    assert call.output is not None
    return relative(layer.mlp_norm(call.input), call.output) > 1e-11


def mlp_points(layer: Layer, probe: LayerTrace, read: Tensor) -> Tensor:
    """Where a folded force is evaluated: at normalized(z) / sqrt(d), or at the input of an MLP without a norm."""
    if layer.mlp_norm is None:
        return read.double()
    z = next(call for call in probe.calls if call.path == layer.wiring.mlp_norm).input
    assert z is not None
    normalized = layer.mlp_norm.without_affine()(z.double().reshape(read.shape))
    return normalized / math.sqrt(read.shape[-1])


def _attention_weights(layer: Layer, probe: LayerTrace) -> Tensor | None:
    if probe.attention is not None:
        return probe.attention[1].weights
    call = next((call for call in probe.calls if call.path == layer.wiring.weights), None)
    return None if call is None else next((output for output in call.outputs if output.ndim == 4), None)


def head_line(anatomy: Anatomy, output: Tensor) -> Line | None:
    """A line if the model's output is not (batch, n, vocabulary), else None.

    Some heads are not registered as output embeddings in transformers: then a model counts as one with a head if it is
    more than its trunk and its output is as wide as the vocabulary.
    """
    model = anatomy.model
    has_head = model.get_output_embeddings() is not None
    if not has_head and model.base_model is not model and output.ndim == 3:
        has_head = getattr(model.get_input_embeddings(), "num_embeddings", None) == output.shape[-1]
    if has_head and output.ndim == 3:
        return None
    says = f"{type(model).__name__} has no head over a vocabulary: its output has shape {tuple(output.shape)}"
    return Line("head", None, says, blocks=("lens over depth",))


def virtual_line(anatomy: Anatomy) -> Line | None:
    """A line if the model has parallel blocks, which compute no state between their halves."""
    if not any(layer.wiring.kind is Kind.PARALLEL for layer in anatomy.layers):
        return None
    return Line("middle state", None, "virtual: attention and MLP read the same state; input + attention is reported")


def sphere_line(anatomy: Anatomy, probes: list[LayerTrace]) -> Line | None:
    """In a post-norm model, every norm as read (gain, bias, epsilon) against the output of its module; else None."""
    if not anatomy.post_norm:
        return None
    gaps = []
    for number, (layer, probe) in enumerate(zip(anatomy.layers, probes, strict=True)):
        for site, norm in layer.state_norms.items():
            path = layer.wiring.joints.get(site)
            if norm is None or path is None:
                says = f"a norm of layer {number} is of an unknown kind: its gain cannot be divided out"
                return Line("sphere", None, says, blocks=("on_sphere",))
            call = next(call for call in probe.calls if call.path == path)
            assert call.input is not None
            assert call.output is not None
            gaps.append(relative(norm(call.input.double()), call.output))
    says = "norms with the gain and bias read from the model reproduce the outputs of their modules"
    return Line.held("sphere", worst_of(gaps), bound(probes[0].pre.dtype, inside=True), says, ("on_sphere",))
