"""The residual topology of a block, found from identities between the inputs and outputs of its modules.

    additive    post = pre + s_a a + s_m m     with s = 1, or the residual multipliers by least squares
                sequential where some module reads the middle state pre + s_a a, parallel where none does;
                sandwich where a and m are outputs of norms
    post-norm   mid = N(pre + a), post = N(mid + m)

and with cross-attention, which writes c between the two,

    sequential  post = pre + a + c + m, where modules read pre + a and pre + a + c
    post-norm   mid = N(pre + a), second = N(mid + c), post = N(second + m)

a is computed from attention: the output projection of the heads, followed by dropouts and norms; c is computed from
cross-attention in the same way. Where several modules output the same tensor (a dropout is the identity in eval mode),
the least nested one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING

import torch

from helmscope.models.qkv_capture import find_weights
from helmscope.models.sites import Site
from helmscope.types import Half, HelmscopeError, type_with_article

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor, nn

    from helmscope.models.probe import LayerTrace, ModuleCall
    from helmscope.models.tap import Attended, Call

    Write = tuple[ModuleCall, Tensor]  # the call of a module, and its output in the shape of a state


class Kind(Enum):
    """How a block adds to its residual stream.

    >>> Kind.PARALLEL.value
    'parallel'
    """

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    POST_NORM = "post-norm"


@dataclass(frozen=True)
class Wiring:
    """The role of each module in the residual topology of a block, as module paths.

    ``attention`` and ``mlp`` output the writes; ``middle`` reads the middle state (sequential) or is the norm that
    computes it (post-norm); ``close`` is the norm that computes the block's output (post-norm). ``scales`` multiply
    the writes, in order. With cross-attention, ``cross`` outputs its write, ``cross_module`` is the attention module,
    and ``cross_middle`` is to the state after it what ``middle`` is to the middle state.
    """

    kind: Kind
    attention: str
    mlp: str
    middle: str | None = None
    close: str | None = None
    scales: tuple[float, ...] = (1.0, 1.0)
    sandwich: bool = False
    attention_norm: str | None = None
    mlp_norm: str | None = None
    output_matrix: str | None = None  # the output projection of attention, which reads the concatenated heads
    weights: str | None = None  # the module that returns attention weights, in a family outside the registry
    cross: str | None = None
    cross_module: str | None = None
    cross_middle: str | None = None
    cross_norm: str | None = None
    cross_matrix: str | None = None  # the output projection of cross-attention

    def __str__(self) -> str:
        added = "" if self.cross is None else " with cross-attention"
        if self.kind is Kind.POST_NORM:
            return f"post-norm{added}"
        norms = "sandwich" if self.sandwich else "pre-norm"
        sizes = " and ".join(f"{scale:.4g}" for scale in self.scales)
        scaled = f", writes scaled by {sizes}" if set(self.scales) != {1.0} else ""
        return f"{self.kind.value} {norms}{added}{scaled}"

    @property
    def writes(self) -> dict[Site, str]:
        """The modules that output the writes, in order."""
        between = {} if self.cross is None else {Site.CROSS: self.cross}
        return {Site.ATTENTION: self.attention, **between, Site.MLP: self.mlp}

    @property
    def joints(self) -> dict[Site, str]:
        """The modules that read the states between the writes; in a post-norm block, the norms that compute them."""
        paths = {Site.MIDDLE: self.middle, Site.CROSS_MIDDLE: self.cross_middle, Site.OUTPUT: self.close}
        return {site: path for site, path in paths.items() if path is not None}

    def scale(self, site: Site) -> float:
        """The factor by which a write is multiplied before it is added."""
        return self.scales[list(self.writes).index(site)]

    def reads(self, half: Half) -> Site:
        """The state that a half reads."""
        if half is Half.ATTENTION or self.kind is Kind.PARALLEL:
            return Site.INPUT
        return Site.CROSS_MIDDLE if half is Half.MLP and self.cross is not None else Site.MIDDLE


def find_wiring(layer: LayerTrace, number: int = 0) -> Wiring:
    """The topology of one block; raises ``HelmscopeError`` if no identity holds.

    ``number`` is the layer that the error names.
    """
    identities = _BlockIdentities(layer)
    if not identities.from_attention:
        raise HelmscopeError(
            f"model has {type_with_article(layer.block)} at layer {number} without observable attention, "
            "neither in the attention registry of transformers nor by output_attentions: transformers can return its "
            "hidden states, which can be measured as a Trajectory, but there are no half-layers, kernels or forces"
        )
    wiring = identities.additive() or identities.post_norm() or identities.scaled()
    if wiring is None:
        raise HelmscopeError(
            f"model has {type_with_article(layer.block)} at layer {number} whose output is neither the sum of its "
            f"input and {'three' if layer.cross else 'two'} writes nor the norm of such a sum: its residual topology "
            "is unknown"
        )
    return identities.with_norms(wiring)


class _BlockIdentities:
    """Search for identities between the tensors of one block."""

    def __init__(self, layer: LayerTrace) -> None:
        assert layer.post is not None
        self.layer, self.pre, self.post = layer, layer.pre, layer.post
        # in half precision a write may be hardly larger than the rounding of a sum, so the tolerance is tight
        self.tol = 3e-6 if self.pre.dtype.itemsize > 2 else 1.5 * torch.finfo(self.pre.dtype).eps
        self.calls = [call for call in layer.calls if call.path]
        self.writes = [(call, out) for call in self.calls if (out := self.like_state(call.output)) is not None]
        self.heads, self.cross_heads = self.output_matrix(layer.attention), self.output_matrix(layer.cross)
        self.from_attention = self.computed_from(self.heads)
        after_cross = [] if self.cross_heads is None else self.computed_from(self.cross_heads)
        cross = [] if layer.cross is None else [after_cross]
        assigned = {id(call) for group in (self.from_attention, *cross) for call, _ in group}
        # the candidates for each write, in order
        self.groups = [self.from_attention, *cross, [write for write in self.writes if id(write[0]) not in assigned]]

    def like_state(self, value: Tensor | None) -> Tensor | None:
        """A tensor reshaped to (batch, n, d); None if it has another size."""
        fits = value is not None and value.numel() == self.pre.numel() and value.shape[-1] == self.pre.shape[-1]
        return value.reshape(self.pre.shape) if fits and value is not None else None

    def same(self, a: Tensor | None, b: Tensor | None) -> bool:
        """Whether two tensors are equal up to rounding, for every token relative to the larger norm."""
        a, b = self.like_state(a), self.like_state(b)
        if a is None or b is None:
            return False
        a, b = a.double(), b.double()
        size = torch.maximum(a.norm(dim=-1), b.norm(dim=-1))
        return bool(((a - b).norm(dim=-1) <= self.tol * size).all())

    def output_matrix(self, attention: tuple[Call, Attended] | None) -> ModuleCall | None:
        """The call that reads the concatenated heads; None for a family that is not in the registry."""
        if attention is None:
            return None
        heads = attention[1].output
        for call in self.calls:
            value = call.input
            if value is not None and value.numel() == heads.numel() and torch.equal(value.reshape(heads.shape), heads):
                return call
        return None

    def computed_from(self, heads: ModuleCall | None) -> list[Write]:
        """The tensors in the shape of a state that are computed from attention without the residual stream."""
        if heads is not None:
            known = [heads]
        else:  # the module that returns attention weights, and its submodules
            known = [call for call in self.calls if self.returns_weights(call)][:1]
            known += [call for call in self.calls if known and call.path.startswith(known[0].path + ".")]
        for call in self.calls:
            # a tensor of zeros equals any other one, and so identifies nothing
            nonzero = [source.output for source in known if source.output is not None and bool(source.output.any())]
            if call not in known and any(self.same(value, out) for value in call.inputs for out in nonzero):
                known.append(call)
        # the attention module itself returns the output of its last submodule
        outs = [source.output for source in known]
        within = known[0].path if known else ""
        for call in self.calls:
            if call not in known and any(self.same(call.output, out) for out in outs):
                zero = call.output is None or not bool(call.output.any())
                if not zero or within.startswith(call.path + "."):
                    known.append(call)
        ordered = [call for call in self.calls if call in known]
        return [(call, out) for call in ordered if (out := self.like_state(call.output)) is not None]

    def returns_weights(self, call: ModuleCall) -> bool:
        """Whether a module returns attention weights besides a state."""
        rows = find_weights(call.outputs, self.pre.shape[-2])
        return rows is not None and self.like_state(call.output) is not None

    def shallowest(self, choices: list[tuple[ModuleCall, ...]]) -> tuple[ModuleCall, ...] | None:
        """The least nested choice; the earliest of several."""
        order = {id(call): k for k, call in enumerate(self.calls)}

        def rank(calls: tuple[ModuleCall, ...]) -> tuple[int, ...]:
            return sum(call.depth for call in calls), *(order[id(call)] for call in calls)

        return min(choices, key=rank, default=None)

    def additive(self) -> Wiring | None:
        """post = pre + a + m, or pre + a + c + m."""
        choices = []
        for writes in product(*self.groups):
            calls, outs = zip(*writes, strict=True)
            choices.append((self.gap((self.pre, *outs)), calls))
        return self.placed(self.best(choices), (1.0,) * len(self.groups))

    def gap(self, parts: tuple[Tensor, ...]) -> float:
        """The error of the sum of the parts as the output: the maximum over tokens, relative to the largest part."""
        wide = [part.double() for part in parts]
        size = torch.stack([part.norm(dim=-1) for part in wide]).amax(0).clamp(min=1e-300)
        return float(((self.post.double() - sum(wide[1:], wide[0])).norm(dim=-1) / size).max())

    def best(self, choices: list[tuple[float, tuple[ModuleCall, ...]]]) -> tuple[ModuleCall, ...] | None:
        """The shallowest of the choices whose error is close to the smallest; None if that exceeds the tolerance."""
        least = min((gap for gap, _ in choices), default=math.inf)
        if least > self.tol:
            return None
        return self.shallowest([calls for gap, calls in choices if gap <= max(1.2 * least, 1e-6)])

    def scaled(self) -> Wiring | None:
        """post - pre = s_a a + s_m m by least squares."""
        target = (self.post - self.pre).double().flatten()
        fitted: dict[tuple[int, ...], tuple[float, ...]] = {}
        choices: list[tuple[float, tuple[ModuleCall, ...]]] = []
        for writes in product(*self.groups):
            calls, outs = zip(*writes, strict=True)
            design = torch.stack([out.double().flatten() for out in outs], 1)
            # on the CPU: no GPU solver handles columns that may coincide
            solution = torch.linalg.lstsq(design.cpu(), target[:, None].cpu(), driver="gelsd").solution[:, 0]
            digits = 6 if self.pre.dtype.itemsize > 2 else 2
            scales = tuple(float(f"{value:.{digits}g}") for value in solution.tolist())
            if min(map(abs, scales)) > 1e-3:
                fitted[tuple(map(id, calls))] = scales
                parts = (scale * out for scale, out in zip(scales, outs, strict=True))
                choices.append((self.gap((self.pre, *parts)), calls))
        best = self.best(choices)
        return None if best is None else self.placed(best, fitted[tuple(map(id, best))])

    def placed(self, calls: tuple[ModuleCall, ...] | None, scales: tuple[float, ...]) -> Wiring | None:
        """The wiring for given writes: sequential if modules read the states between them, parallel if none does."""
        if calls is None:
            return None
        state, readers = self.pre, list[str | None]()
        for call, scale in zip(calls[:-1], scales[:-1], strict=True):
            state = state + scale * self.state_of(call)
            reading = [other for other in self.calls if other is not call and self.same(other.input, state)]
            reader = min(reading, key=lambda other: other.depth, default=None)
            readers.append(None if reader is None else reader.path)
        if None in readers and len(calls) > 2:
            return None  # cross-attention in parallel with another half is not supported
        kind = Kind.PARALLEL if None in readers else Kind.SEQUENTIAL
        return self.wiring(kind, calls, readers, scales)

    def post_norm(self) -> Wiring | None:
        """mid = N(pre + a), post = N'(mid + m); with cross-attention there is one more state between them."""
        norms: dict[tuple[int, ...], tuple[str, ...]] = {}
        choices = []
        for calls, paths in self.norm_chains(self.pre, self.groups):
            choices.append(calls)
            norms.setdefault(tuple(map(id, calls)), paths)
        best = self.shallowest(choices)
        if best is None:
            return None
        *joints, close = norms[tuple(map(id, best))]
        return replace(self.wiring(Kind.POST_NORM, best, joints, (1.0,) * len(best)), close=close)

    def norm_chains(
        self, state: Tensor, groups: Sequence[list[Write]]
    ) -> Iterator[tuple[tuple[ModuleCall, ...], tuple[str, ...]]]:
        """Choices of one write per group, with the norms that lead from the state through them to the output."""
        group, *later = groups
        for call, out in group:
            for norm in self.reading(state + out):
                if later:
                    for calls, paths in self.norm_chains(self.state_of(norm), later):
                        yield (call, *calls), (norm.path, *paths)
                elif self.same(norm.output, self.post):
                    yield (call,), (norm.path,)

    def wiring(
        self, kind: Kind, calls: tuple[ModuleCall, ...], joints: Sequence[str | None], scales: tuple[float, ...]
    ) -> Wiring:
        """A ``Wiring`` with the paths of the given calls."""
        plain = Wiring(kind, calls[0].path, calls[-1].path, middle=joints[0], scales=scales)
        if self.layer.cross is None:
            return plain
        module = next(call.path for call in self.calls if call.module is self.layer.cross[0].module)
        assert self.cross_heads is not None
        matrix = self.cross_heads.path
        return replace(plain, cross=calls[1].path, cross_module=module, cross_middle=joints[1], cross_matrix=matrix)

    def reading(self, value: Tensor) -> list[ModuleCall]:
        """The calls whose input is this state."""
        return [call for call, _ in self.writes if self.same(call.input, value)]

    def state_of(self, call: ModuleCall) -> Float[Tensor, "batch n d"]:
        state = self.like_state(call.output)
        assert state is not None
        return state

    def call_at(self, path: str) -> ModuleCall:
        return next(call for call in self.calls if call.path == path)

    def with_norms(self, wiring: Wiring) -> Wiring:
        """Add the norms through which the halves read, and whether the writes are outputs of norms."""
        heads = None if self.heads is None else self.heads.path
        if heads is None or self.layer.captured:
            weights = next((call.path for call in self.calls if self.returns_weights(call)), None)
            wiring = replace(wiring, weights=weights)
        if wiring.kind is Kind.POST_NORM:
            if wiring.cross is None:
                return replace(wiring, mlp_norm=wiring.middle, output_matrix=heads)
            return replace(wiring, cross_norm=wiring.middle, mlp_norm=wiring.cross_middle, output_matrix=heads)
        states = [self.pre]
        for scale, path in zip(wiring.scales[:-1], list(wiring.writes.values())[:-1], strict=True):
            states.append(states[-1] + scale * self.state_of(self.call_at(path)))
        norms = {call.path for call in self.calls if self.is_norm(call)}

        def readers(state: Tensor) -> list[str]:
            return [call.path for call in self.reading(state) if call.path in norms]

        # if two norms read the same state (parallel blocks), the first is that of attention
        first, last = readers(self.pre), readers(self.pre if wiring.kind is Kind.PARALLEL else states[-1])
        cross_readers = [] if wiring.cross is None else readers(states[1])
        return replace(
            wiring,
            sandwich=wiring.attention in norms and wiring.mlp in norms,
            attention_norm=first[0] if first else None,
            cross_norm=cross_readers[0] if cross_readers else None,
            mlp_norm=last[-1] if last else None,
            output_matrix=heads,
        )

    def is_norm(self, call: ModuleCall) -> bool:
        """Whether the module is a norm: doubling its input does not change its output."""
        x = self.like_state(call.input)
        if x is None or len(call.inputs) > 1 or self.like_state(call.output) is None or list(call.module.children()):
            return False
        return _is_scale_invariant(call.module, x)


def _is_scale_invariant(module: nn.Module, x: Tensor) -> bool:
    unit = torch.nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5
    with torch.no_grad():
        once, twice = module(unit), module(2 * unit)
    if not isinstance(once, torch.Tensor) or once.shape != x.shape:
        return False
    return bool((once - twice).norm() <= 1e-2 * once.norm())
