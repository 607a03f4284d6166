"""The sphere of a post-norm model: its states without the gain and bias of the norms that gave them.

A post-norm state is y = G c + b, where c = core(z) is the norm without gain and bias of what the norm reads. It is c
that lies on the sphere of the theory. Trained gains have entries near 1e-33, where dividing y - b by the gain would
read rounding as coordinates; so c is computed from z while the model runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from helmscope.models.norm_reading import read_norm
from helmscope.models.probe import equal, no_cache, run
from helmscope.models.recorder import ResidualStream
from helmscope.models.tap import locked
from helmscope.models.topology import Kind
from helmscope.models.watch import READ_AT, Observer, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm
    from helmscope.models.anatomy import Anatomy
    from helmscope.models.recording import Recording

# a state this far from what its norm gives, relative to its length, was put there by an edit
EDITED = {torch.float64: 1e-6, torch.float32: 1e-4}


def embedding_norm(
    model: Any, blocks: list[nn.Module], inputs: Mapping[str, Tensor], first: Float[Tensor, "batch n d"]
) -> tuple[nn.Module, Norm] | None:
    """The norm outside the blocks whose output, ``first``, is the input of the first block, and its module; None where
    something else gives that input.
    """
    inside = {id(part) for block in blocks for part in block.modules()}
    found: list[nn.Module] = []

    def compare(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and equal(output, first):
            found.append(module)

    outside = [part for part in model.modules() if id(part) not in inside and not list(part.children())]
    handles = [part.register_forward_hook(compare) for part in outside]
    try:
        run(model, inputs, **no_cache(model))
    finally:
        for handle in handles:
            handle.remove()
    for module in found:
        norm = read_norm(module, first)
        if norm is not None:
            return module, norm
    return None


def on_sphere(recording: Recording) -> ResidualStream:
    """The states of a post-norm recording without gains and biases, by one more run of the model.

    A state that an edit put in is not what its norm gave: there y - b is divided by the gain, coordinate by
    coordinate, where the gain is not lost in rounding, and the others are those of c.
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
    """Writes down core(z) for every state, with z what its norm reads."""

    needs_all_layers = True

    def __init__(self, anatomy: Anatomy, batch: int) -> None:
        self.anatomy, self.batch = anatomy, batch
        states = {*anatomy.depths.states, Site.OUTPUT}
        self.sites = frozenset(states | {read for state, read in READ_AT.items() if state in states})
        self.stream: ResidualStream | None = None
        self._core: Tensor | None = None

    def embedded(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in what the norm of the embedding reads."""
        assert self.anatomy.embedding_norm is not None
        read = args[0] if args else next(iter(kwargs.values()))
        self._core = self.anatomy.embedding_norm[1].core()(wide(read))

    def state(self, site: Site, layer: int, value: Tensor) -> None:
        """Take in what a norm reads, or write down the state that it gave."""
        own, depths = self.anatomy.layers[layer], self.anatomy.depths
        if self.stream is None:
            self.stream = ResidualStream.empty(self.anatomy, self.batch, value.shape[1], value)
        if site in READ_AT.values():
            norm = next(own.state_norms[state] for state, read in READ_AT.items() if read is site)
            post_norm = own.wiring.kind is Kind.POST_NORM
            self._core = norm.core()(wide(value)) if post_norm and norm is not None else None
        elif site is Site.INPUT:
            opening = self.anatomy.embedding_norm
            before = opening[1] if opening is not None else None
            self._put(depths.at(layer, site), value, self.anatomy.layers[layer - 1].close_norm if layer else before)
        elif site is not Site.OUTPUT or layer == len(self.anatomy.layers) - 1:
            self._put(depths.at(layer, site), value, own.state_norms[site])

    def _put(self, depth: int, state: Tensor, norm: Norm | None) -> None:
        assert self.stream is not None
        core, self._core = self._core, None
        self.stream.put(depth, self.rows, state if core is None or norm is None else unfolded(state, core, norm))


def unfolded(state: Tensor, core: Tensor, norm: Norm) -> Tensor:
    """c where the state is G c + b, else (state - b) / G where the gain can be divided out."""
    tolerance, state = EDITED.get(state.dtype, 3e-2), wide(state)
    gain = torch.ones_like(core[0, 0]) if norm.gain is None else norm.gain.to(core)
    bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.to(core)
    off = torch.linalg.vector_norm(state - (gain * core + bias), dim=-1, keepdim=True)
    size = torch.linalg.vector_norm(state, dim=-1, keepdim=True)
    edited = off > tolerance * size
    if not bool(edited.any()):
        return core
    lost = gain.abs() <= 1e-3 * gain.abs().max()
    divided = torch.where(lost, core, (state - bias) / torch.where(lost, 1.0, gain))
    return torch.where(edited, divided, core)


def wide(value: Tensor) -> Tensor:
    """A tensor of half precision as float32, any other as it is."""
    return value.float() if value.dtype.itemsize < 4 else value
