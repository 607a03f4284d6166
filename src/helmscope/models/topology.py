"""The residual topology of a block, found by algebra between what its modules read and wrote.

    additive    post = pre + s_a a + s_m m     with s = 1, or the residual multipliers by least squares
                sequential where some module reads the mid state pre + s_a a, parallel where none does;
                sandwich where a and m come out of a norm
    post-norm   mid = N(pre + a), post = N(mid + m)

a is a tensor that follows from attention: what the output matrix made of the heads, through dropouts and norms. Where
several modules show the same tensor (a dropout is the identity in eval mode), the shallowest path is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch

from helmscope.models.overhear import rows_of_weights
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor, nn

    from helmscope.models.probe import LayerProbe, Seen


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
    """Where in a block its tensors pass, as paths of modules.

    ``attention`` and ``mlp`` give the writes; ``middle`` reads the mid state (sequential) or is the norm that gives it
    (post-norm), ``close`` is the norm that gives the block's output (post-norm). ``scales`` multiply the writes.
    """

    kind: Kind
    attention: str
    mlp: str
    middle: str | None = None
    close: str | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    sandwich: bool = False
    attention_norm: str | None = None
    mlp_norm: str | None = None
    output_matrix: str | None = None  # of attention: reads the heads side by side
    weights: str | None = None  # where a family outside the registry returns its attention weights

    def __str__(self) -> str:
        if self.kind is Kind.POST_NORM:
            return "post-norm"
        norms = "sandwich" if self.sandwich else "pre-norm"
        scaled = ", writes scaled by {:.4g} and {:.4g}".format(*self.scales) if self.scales != (1.0, 1.0) else ""
        return f"{self.kind.value} {norms}{scaled}"


def find_wiring(layer: LayerProbe, number: int = 0) -> Wiring:
    """The topology of one block; a ``HelmscopeError`` where no identity holds."""
    algebra = _Algebra(layer)
    if not algebra.from_attention:
        raise HelmscopeError(
            f"model has a {type(layer.block).__name__} at layer {number} without attention that can be heard, by the "
            "registry of transformers or by output_attentions: its hidden states can be had from transformers and "
            "measured as a Trajectory, but there are no half-layers, kernels or forces"
        )
    found = algebra.additive() or algebra.post_norm() or algebra.scaled()
    if found is None:
        raise HelmscopeError(
            f"model has a {type(layer.block).__name__} at layer {number} whose output is neither the sum of its input "
            "and two writes nor the norm of such a sum: its residual topology is not known"
        )
    return algebra.with_norms(found)


class _Algebra:
    """Identities between the tensors of one block."""

    def __init__(self, layer: LayerProbe) -> None:
        assert layer.post is not None
        self.layer, self.pre, self.post = layer, layer.pre, layer.post
        # in half precision a write may be hardly more than the rounding of a sum, so little is granted there
        self.tolerance = 3e-6 if self.pre.dtype.itemsize > 2 else 1.5 * torch.finfo(self.pre.dtype).eps
        self.calls = [call for call in layer.calls if call.path]
        self.writes = [(call, out) for call in self.calls if (out := self.like_state(call.output)) is not None]
        self.heads = self.output_matrix()
        self.from_attention = self.follow_attention()

    def like_state(self, value: Tensor | None) -> Tensor | None:
        """A tensor as (batch, n, d), or None where it is none."""
        fits = value is not None and value.numel() == self.pre.numel() and value.shape[-1] == self.pre.shape[-1]
        return value.reshape(self.pre.shape) if fits and value is not None else None

    def same(self, a: Tensor | None, b: Tensor | None) -> bool:
        """Equal up to rounding, token by token, in units of the larger one."""
        a, b = self.like_state(a), self.like_state(b)
        if a is None or b is None:
            return False
        a, b = a.double(), b.double()
        size = torch.maximum(a.norm(dim=-1), b.norm(dim=-1))
        return bool(((a - b).norm(dim=-1) <= self.tolerance * size).all())

    def output_matrix(self) -> Seen | None:
        """The module that reads the heads side by side; None for a family that is not in the registry."""
        if self.layer.attention is None:
            return None
        heads = self.layer.attention[1].output
        for call in self.calls:
            seen = call.input
            if seen is not None and seen.numel() == heads.numel() and torch.equal(seen.reshape(heads.shape), heads):
                return call
        return None

    def follow_attention(self) -> list[tuple[Seen, Tensor]]:
        """Tensors of the state's shape that follow from attention without the residual stream."""
        if self.heads is not None:
            known = [self.heads]
        else:  # whatever lies in the module that returns rows of weights
            known = [call for call in self.calls if self.gives_weights(call)][:1]
            known += [call for call in self.calls if known and call.path.startswith(known[0].path + ".")]
        for call in self.calls:
            # what is 0 throughout follows from nothing
            given = [each.output for each in known if each.output is not None and bool(each.output.any())]
            if call not in known and any(self.same(seen, out) for seen in call.inputs for out in given):
                known.append(call)
        # the attention module itself returns what its last part gave
        outs = [each.output for each in known]
        within = known[0].path if known else ""
        for call in self.calls:
            if call not in known and any(self.same(call.output, out) for out in outs):
                zero = call.output is None or not bool(call.output.any())
                if not zero or within.startswith(call.path + "."):
                    known.append(call)
        ordered = [call for call in self.calls if call in known]
        return [(call, out) for call in ordered if (out := self.like_state(call.output)) is not None]

    def gives_weights(self, call: Seen) -> bool:
        """Whether a module returns rows of attention weights beside a state."""
        rows = rows_of_weights(call.outputs, self.pre.shape[-2])
        return rows is not None and self.like_state(call.output) is not None

    def shallowest(self, pairs: list[tuple[Seen, Seen]]) -> tuple[Seen, Seen] | None:
        order = {id(call): k for k, call in enumerate(self.calls)}
        return min(pairs, key=lambda p: (p[0].depth + p[1].depth, order[id(p[0])], order[id(p[1])]), default=None)

    def others(self) -> list[tuple[Seen, Tensor]]:
        mine = {id(call) for call, _ in self.from_attention}
        return [(call, out) for call, out in self.writes if id(call) not in mine]

    def additive(self) -> Wiring | None:
        """post = pre + a + m."""
        pairs = [
            (self.gap((self.pre, a, m)), first, second)
            for first, a in self.from_attention
            for second, m in self.others()
        ]
        return self.placed(self.best(pairs), (1.0, 1.0))

    def gap(self, parts: tuple[Tensor, ...]) -> float:
        """How far the parts are from adding up to the output: the worst token, in units of its largest part."""
        wide = [part.double() for part in parts]
        size = torch.stack([part.norm(dim=-1) for part in wide]).amax(0).clamp(min=1e-300)
        return float(((self.post.double() - sum(wide[1:], wide[0])).norm(dim=-1) / size).max())

    def best(self, pairs: list[tuple[float, Seen, Seen]]) -> tuple[Seen, Seen] | None:
        """The shallowest of the pairs that add up about as well as any."""
        least = min((gap for gap, _, _ in pairs), default=math.inf)
        if least > self.tolerance:
            return None
        return self.shallowest([(a, m) for gap, a, m in pairs if gap <= max(1.2 * least, 1e-6)])

    def scaled(self) -> Wiring | None:
        """post - pre = s_a a + s_m m by least squares."""
        target = (self.post - self.pre).double().flatten()
        found: dict[tuple[int, int], tuple[float, float]] = {}
        pairs: list[tuple[float, Seen, Seen]] = []
        for first, a in self.from_attention:
            for second, m in self.others():
                design = torch.stack([a.double().flatten(), m.double().flatten()], 1)
                # on the CPU: a GPU has no solver for columns that may be the same
                solution = torch.linalg.lstsq(design.cpu(), target[:, None].cpu(), driver="gelsd").solution[:, 0]
                digits = 6 if self.pre.dtype.itemsize > 2 else 2
                s_a, s_m = (float(f"{value:.{digits}g}") for value in solution.tolist())
                if min(abs(s_a), abs(s_m)) > 1e-3:
                    found[id(first), id(second)] = (s_a, s_m)
                    pairs.append((self.gap((self.pre, s_a * a, s_m * m)), first, second))
        best = self.best(pairs)
        return None if best is None else self.placed(best, found[id(best[0]), id(best[1])])

    def placed(self, pair: tuple[Seen, Seen] | None, scales: tuple[float, float]) -> Wiring | None:
        """Sequential where a module reads the mid state, parallel where none does."""
        if pair is None:
            return None
        mid = self.pre + scales[0] * self.state_of(pair[0])
        readers = [call for call in self.calls if call is not pair[0] and self.same(call.input, mid)]
        reader = min(readers, key=lambda call: call.depth, default=None)
        kind = Kind.PARALLEL if reader is None else Kind.SEQUENTIAL
        middle = None if reader is None else reader.path
        return Wiring(kind, pair[0].path, pair[1].path, middle=middle, scales=scales)

    def post_norm(self) -> Wiring | None:
        """mid = N(pre + a), post = N'(mid + m)."""
        pairs, norms = [], {}
        for first, a in self.from_attention:
            for n1 in self.reading(self.pre + a):
                mid = self.state_of(n1)
                for second, m in self.others():
                    close = next((n for n in self.reading(mid + m) if self.same(n.output, self.post)), None)
                    if close is not None:
                        pairs.append((first, second))
                        norms[id(first), id(second)] = (n1.path, close.path)
        best = self.shallowest(pairs)
        if best is None:
            return None
        middle, close_path = norms[id(best[0]), id(best[1])]
        return Wiring(Kind.POST_NORM, best[0].path, best[1].path, middle=middle, close=close_path)

    def reading(self, value: Tensor) -> list[Seen]:
        """The modules whose input is this state."""
        return [call for call, _ in self.writes if self.same(call.input, value)]

    def state_of(self, call: Seen) -> Float[Tensor, "batch n d"]:
        state = self.like_state(call.output)
        assert state is not None
        return state

    def at(self, path: str) -> Seen:
        return next(call for call in self.calls if call.path == path)

    def with_norms(self, found: Wiring) -> Wiring:
        """The norms that attention and MLP read through, and whether the writes come out of one."""
        mid = self.pre + found.scales[0] * self.state_of(self.at(found.attention))
        heads = None if self.heads is None else self.heads.path
        if heads is None or self.layer.overheard:
            found = replace(found, weights=next((call.path for call in self.calls if self.gives_weights(call)), None))
        if found.kind is Kind.POST_NORM:
            return replace(found, mlp_norm=found.middle, output_matrix=heads)
        read_by_mlp = self.pre if found.kind is Kind.PARALLEL else mid
        norms = {call.path for call in self.calls if self.is_norm(call)}
        # of two norms of the same state (parallel blocks) attention's comes first
        readers = [call.path for call in self.reading(self.pre) if call.path in norms]
        mlp_readers = [call.path for call in self.reading(read_by_mlp) if call.path in norms]
        return replace(
            found,
            sandwich=found.attention in norms and found.mlp in norms,
            attention_norm=readers[0] if readers else None,
            mlp_norm=mlp_readers[-1] if mlp_readers else None,
            output_matrix=heads,
        )

    def is_norm(self, call: Seen) -> bool:
        """Whether twice the input gives the same output."""
        x = self.like_state(call.input)
        if x is None or len(call.inputs) > 1 or self.like_state(call.output) is None or list(call.module.children()):
            return False
        return _scale_free(call.module, x)


def _scale_free(module: nn.Module, x: Tensor) -> bool:
    unit = torch.nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5
    with torch.no_grad():
        once, twice = module(unit), module(2 * unit)
    if not isinstance(once, torch.Tensor) or once.shape != x.shape:
        return False
    return bool((once - twice).norm() <= 1e-2 * once.norm())
