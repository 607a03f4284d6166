"""The states of a post-norm model on the sphere: without the gain and bias of the norms that compute them.

A post-norm state is y = G c + b, where c = normalized(z) is the norm of its input z without gain and bias. The sphere
of the theory is that of c. Trained gains have entries near 1e-33, where dividing y - b by the gain would turn rounding
errors into coordinates; so c is computed from z while the model runs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.norm_reading import read_norm
from helmscope.models.probe import equal, no_cache, run
from helmscope.models.recorder import ResidualStream
from helmscope.models.sites import READ_AT, Observer, Site
from helmscope.models.tap import locked
from helmscope.models.topology import Kind
from helmscope.types import Half, HelmscopeError, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm
    from helmscope.models.anatomy import Anatomy
    from helmscope.models.recording import Recording

# a state whose relative distance to the output of its norm exceeds this was set by an edit
EDITED = {torch.float64: 1e-6, torch.float32: 1e-4}


def embedding_norm(
    model: Any, blocks: list[nn.Module], inputs: Mapping[str, Tensor], first: Float[Tensor, "batch n d"]
) -> tuple[nn.Module, Norm] | None:
    """The norm outside the blocks that computes ``first``, the input of the first block, with its module; None if that
    input is not the output of a norm.
    """
    inside = {id(part) for block in blocks for part in block.modules()}
    candidates: list[nn.Module] = []

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and equal(output, first):
            candidates.append(module)

    outside = [part for part in model.modules() if id(part) not in inside and not list(part.children())]
    handles = [part.register_forward_hook(compare) for part in outside]
    try:
        run(model, inputs, **no_cache(model))
    finally:
        for handle in handles:
            handle.remove()
    for module in candidates:
        norm = read_norm(module, first)
        if norm is not None:
            return module, norm
    return None


def recorded_trajectory(recording: Recording) -> Trajectory:
    """The states of a recording over depth; see ``Recording.trajectory``."""
    recording.certificate.require("trajectory")
    stream, batch, first = recording.residual, recording.batch, recording.first
    times = torch.arange(first, first + len(stream.radius), dtype=torch.float64, device="cpu")
    weights = None if batch.counted is None else batch.counted.to(stream.radius).unsqueeze(0)
    path = Trajectory(times, stream.direction, weights, stream.radius, batch.tokens)
    unit = "half-layers" if recording.anatomy.depths.steps == 2 else "thirds of a layer"
    axis, replicate = recording.axis, recording.replicate
    return replace(path, axis=axis, replicate=replicate, unit=unit, identities=batch.identities)


def stream_on_sphere(recording: Recording) -> ResidualStream:
    """The stored states on the sphere of theory; see ``Recording.stream_on_sphere``."""
    if not recording.anatomy.post_norm:
        return recording.residual
    recording.certificate.require("on_sphere")
    plain = on_sphere(recording)
    plain.hide(recording.visible)
    return plain


def on_sphere(recording: Recording) -> ResidualStream:
    """The states of a post-norm recording without gains and biases, from one more run of the model.

    A state set by an edit is not the output of its norm. Its coordinates are (y - b) / gain where the gain is not
    negligible, and those of c elsewhere.
    """
    anatomy = recording.anatomy
    cores = _Cores(anatomy, len(recording.batch))
    with locked(anatomy.model):
        before = anatomy.embedding_norm
        handle = None if before is None else before[0].register_forward_pre_hook(cores.embedded, with_kwargs=True)
        try:
            recording.runner.forward(cores)
        finally:
            if handle is not None:
                handle.remove()
    assert cores.stream is not None
    return cores.stream.since(recording.first)


class _Cores(Observer):
    """Observer that stores normalized(z) for every state, with z the input of its norm."""

    needs_all_layers = True

    def __init__(self, anatomy: Anatomy, batch: int) -> None:
        self.anatomy, self.batch = anatomy, batch
        states = {*anatomy.depths.states, Site.OUTPUT}
        self.sites = frozenset(states | {read for state, read in READ_AT.items() if state in states})
        self.stream: ResidualStream | None = None
        self._normalized: Tensor | None = None

    def embedded(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the embedding norm: normalize its input without gain and bias."""
        assert self.anatomy.embedding_norm is not None
        read = args[0] if args else next(iter(kwargs.values()))
        self._normalized = self.anatomy.embedding_norm[1].without_affine()(wide(read))

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Normalize the input of a norm without gain and bias, or store that of the state it outputs."""
        own, depths = self.anatomy.layers[layer], self.anatomy.depths
        if self.stream is None:
            self.stream = ResidualStream.empty(self.anatomy, self.batch, value.shape[1], value)
        if site in READ_AT.values():
            norm = next(own.state_norms[state] for state, read in READ_AT.items() if read is site)
            post_norm = own.wiring.kind is Kind.POST_NORM
            self._normalized = norm.without_affine()(wide(value)) if post_norm and norm is not None else None
        elif site is Site.INPUT:
            opening = self.anatomy.embedding_norm
            before = opening[1] if opening is not None else None
            self._put(depths.at(layer, site), value, self.anatomy.layers[layer - 1].close_norm if layer else before)
        elif site is not Site.OUTPUT or layer == len(self.anatomy.layers) - 1:
            self._put(depths.at(layer, site), value, own.state_norms[site])

    def _put(self, depth: int, state: Tensor, norm: Norm | None) -> None:
        assert self.stream is not None
        normalized, self._normalized = self._normalized, None
        if normalized is not None and norm is not None:
            state = unfolded(state, normalized, norm)
        self.stream.put(depth, self.rows, state)


def unfolded(state: Tensor, normalized: Tensor, norm: Norm) -> Tensor:
    """The normalized state c if the state is G c + b; else (state - b) / G where the gain is not negligible, and c
    elsewhere.
    """
    tol, state = EDITED.get(state.dtype, 3e-2), wide(state)
    gain = torch.ones_like(normalized[0, 0]) if norm.gain is None else norm.gain.to(normalized)
    bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.to(normalized)
    off = torch.linalg.vector_norm(state - (gain * normalized + bias), dim=-1, keepdim=True)
    size = torch.linalg.vector_norm(state, dim=-1, keepdim=True)
    edited = off > tol * size
    if not bool(edited.any()):
        return normalized
    negligible = gain.abs() <= 1e-3 * gain.abs().max()
    divided = torch.where(negligible, normalized, (state - bias) / torch.where(negligible, 1.0, gain))
    return torch.where(edited, divided, normalized)


def wide(value: Tensor) -> Tensor:
    """A tensor of half precision as float32; any other unchanged."""
    return value.float() if value.dtype.itemsize < 4 else value


def mlp_points(recording: Recording, layer: int) -> Float[Tensor, "batch n d"]:
    """The points at which the force of a layer is evaluated; see ``Recording.force_points``."""
    anatomy = recording.anatomy
    structure = anatomy.layers[layer]
    kind, norm = structure.wiring.kind, structure.mlp_norm
    depth = anatomy.depths.at(layer, structure.wiring.reads(Half.MLP))
    if depth < recording.first:
        raise HelmscopeError(f"layer is {layer}, but the recording begins after the state that its MLP reads")
    if norm is None:
        return recording.residual_stream(depth=depth)
    if kind is not Kind.POST_NORM:
        return norm.without_affine()(recording.residual_stream(depth=depth)) / math.sqrt(anatomy.dim)
    plain, step = recording.stream_on_sphere, depth - recording.first
    directions = plain.with_hidden(step, plain.direction[step])
    return plain.radius[step].unsqueeze(-1) * directions / math.sqrt(anatomy.dim)
