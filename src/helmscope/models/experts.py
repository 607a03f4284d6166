"""A mixture of experts as a force: f(x) = sum_k p_k(x) f_{e_k}(x) over the experts that a router picks at x."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from helmscope.fields.activations import Activation, QuickGELU
from helmscope.fields.mlp import Force, GatedMLP, affine
from helmscope.fields.placement import folded as folded_plain
from helmscope.models.probe import equal

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm
    from helmscope.models.probe import Seen

Route = Callable[["Tensor"], tuple["Tensor", "Tensor"]]


@dataclass(frozen=True, eq=False, kw_only=True)
class ClampedGatedMLP(Force):
    """f(x) = w_out [ s(min(g, limit)) * (1 + clamp(u, -limit, limit)) ] + b_out, g and u the two affine maps of x: the
    experts of gpt-oss.

    >>> one = torch.eye(2)
    >>> ClampedGatedMLP(w_gate=one, w_up=one, w_out=one, limit=7.0)(torch.tensor([0.0, 10.0]))
    tensor([ 0.0000, 55.9996])
    """

    w_gate: Float[Tensor, "hidden dim"]
    w_up: Float[Tensor, "hidden dim"]
    w_out: Float[Tensor, "dim hidden"]
    limit: float
    b_gate: Float[Tensor, " hidden"] | None = None
    b_up: Float[Tensor, " hidden"] | None = None
    b_out: Float[Tensor, " dim"] | None = None
    activation: Activation = field(default_factory=QuickGELU)

    def neurons(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch hidden"]:
        """What ``w_out`` multiplies, unchecked."""
        gate = affine(x, self.w_gate, self.b_gate).clamp(max=self.limit)
        return self.activation(gate) * (1 + affine(x, self.w_up, self.b_up).clamp(-self.limit, self.limit))


def folded(force: Any, norm: Norm | None, scale: float = 1.0) -> Any:
    """A force behind a norm and times a residual multiplier, as a force on x = core(z) / sqrt(d): gain, bias and
    sqrt(d) go into the weights that read, the multiplier into those that write.

    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.fields.activations import Identity
    >>> plain = MLP(w_in=torch.eye(2), w_out=torch.eye(2), activation=Identity())
    >>> folded(plain, None, 0.5)(torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.0000])
    """
    if isinstance(force, MixtureOfExperts):
        return replace(force, experts=tuple(folded(each, norm, scale) for each in force.experts), norm=norm)
    if isinstance(force, ClampedGatedMLP) and norm is not None:
        root = force.dim**0.5
        (gate, b_gate), (up, b_up) = norm.fold(force.w_gate, force.b_gate), norm.fold(force.w_up, force.b_up)
        force = replace(force, w_gate=root * gate, b_gate=b_gate, w_up=root * up, b_up=b_up)
    elif norm is not None:
        force = folded_plain(force, norm)
    if scale == 1:
        return force
    return replace(force, w_out=scale * force.w_out, b_out=None if force.b_out is None else scale * force.b_out)


@dataclass(frozen=True, eq=False)
class ForceAfterNorm:
    """A force as the model has it, the norm before it and the residual multiplier: folded when it is asked for, since
    a folded one is a copy of the weights.
    """

    force: Force | MixtureOfExperts
    norm: Norm | None
    scale: float

    def folded(self) -> Any:
        """The force on x = core(z) / sqrt(d)."""
        return folded(self.force, self.norm, self.scale)


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """f(x) = sum_k p_k(x) f_{e_k}(x); ``route`` gives p and e at what it reads, which is ``norm`` of x where there is
    one.

    >>> from helmscope.fields.activations import Identity
    >>> one = GatedMLP(w_gate=torch.eye(2), w_up=torch.eye(2), w_out=torch.eye(2), activation=Identity())
    >>> always = lambda x: (torch.full((len(x), 1), 0.5), torch.zeros(len(x), 1, dtype=torch.long))
    >>> MixtureOfExperts((one,), always)(torch.tensor([[1.0, 2.0]]))
    tensor([[0.5000, 2.0000]])
    """

    experts: tuple[Force, ...]
    route: Route
    norm: Norm | None = None

    @property
    def dim(self) -> int:
        """d of the space R^d on which the force acts."""
        return self.experts[0].dim

    def picked(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
        """The weights and the numbers of the experts at x."""
        if self.norm is None:
            read = x
        else:  # x is the core over sqrt(d): what the norm's gain and bias make of it
            read = x * x.shape[-1] ** 0.5
            read = read if self.norm.gain is None else read * self.norm.gain.to(x)
            read = read if self.norm.bias is None else read + self.norm.bias.to(x)
        shares, numbers = self.route(read.reshape(-1, read.shape[-1]))
        return shares.reshape(*x.shape[:-1], -1), numbers.reshape(*x.shape[:-1], -1)

    def __call__(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The force at any points."""
        return self.ambient(x)

    def ambient(
        self, x: Float[Tensor, "*batch d"], weights: Tensor | None = None, *, t: float = 0.0
    ) -> Float[Tensor, "*batch d"]:
        """The force, unchecked."""
        shares, numbers = self.picked(x)
        total = torch.zeros_like(x)
        for number in sorted(set(numbers.flatten().tolist())):
            share = torch.where(numbers == number, shares.to(x), 0.0).sum(-1)
            at = share != 0
            total[at] += share[at].unsqueeze(-1) * self.experts[number].ambient(x[at])
        return total


def read_experts(
    calls: list[Seen], written: Seen, known: list[Activation]
) -> tuple[MixtureOfExperts, Tensor, Tensor] | None:
    """The experts behind a write: a module with one matrix an expert, stacked, beside a router that returns weights and
    numbers; with what they read and wrote. None where there is no such thing.
    """
    for call in calls:
        stacks = [p.detach() for p in call.module.parameters(recurse=False) if p.ndim == 3]
        if len(stacks) == 2 and call.input is not None and equal(call.output, written.output):
            route = _router(calls, call.input)
            mixture = None if route is None else _fitting(call, written, route, known)
            return None if mixture is None or written.output is None else (mixture, call.input, written.output)
    return None


def _router(calls: list[Seen], x: Tensor) -> Route | None:
    """The module that gives weights and numbers of experts at x."""
    for call in calls:
        if len(call.outputs) == 2 and len(call.inputs) == 1 and equal(call.input, x):
            found = _routed(call.module, x)
            if found is not None:
                return lambda y, module=call.module: _at_own_precision(module, y)  # type: ignore[misc]
    return None


def _at_own_precision(module: nn.Module, y: Tensor) -> tuple[Tensor, Tensor]:
    own = next(module.parameters())
    found = _routed(module, y.to(own.dtype))
    assert found is not None
    return found


def _routed(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    with torch.no_grad():
        out = module(x)
    whole = [each for each in out if isinstance(each, torch.Tensor) and not each.is_floating_point()]
    if not whole:
        return None
    shares = [each for each in out if each.is_floating_point() and each.shape == whole[0].shape]
    return (shares[0], whole[0]) if shares else None


def _fitting(call: Seen, written: Seen, route: Route, known: list[Activation]) -> MixtureOfExperts | None:
    """The reading of the stacked matrices under which one token's mixture is what the module wrote for it."""
    assert call.input is not None
    assert written.output is not None
    d = call.input.shape[-1]
    x, wanted = call.input.reshape(-1, d)[:1], written.output.reshape(-1, d)[:1].double()
    for experts in _readings(call.module, known):
        found = MixtureOfExperts(experts, route).ambient(x.double())
        if float((found - wanted).norm()) <= 1e-5 * float(wanted.norm()):
            return MixtureOfExperts(experts, route)
    return None


def _readings(module: nn.Module, known: list[Activation]) -> Iterator[tuple[Force, ...]]:
    """Every way to read two stacks of matrices as gated experts: which axis is the state's, whether gate and up stand
    side by side or take turns, with or without bounds.
    """
    stacks = [p.detach() for p in module.parameters(recurse=False) if p.ndim == 3]
    biases = [p.detach() for p in module.parameters(recurse=False) if p.ndim == 2]
    first, last = sorted(stacks, key=lambda p: -p.numel())
    limit = getattr(module, "limit", None)
    for transposed, turns, clamped in product((False, True), repeat=3):
        w_in, w_out = (p.mT if transposed else p for p in (first, last))  # (expert, 2 hidden, d), (expert, d, hidden)
        if w_in.shape[1] != 2 * w_out.shape[2] or w_in.shape[2] != w_out.shape[1] or (clamped and limit is None):
            continue
        b_in = next((b for b in biases if b.shape[1] == w_in.shape[1]), None)
        b_out = next((b for b in biases if b.shape[1] == w_out.shape[1] and b is not b_in), None)
        half = w_out.shape[2]
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if turns else (slice(half), slice(half, None))
        bounds = {"limit": float(limit)} if clamped and limit is not None else {}
        for activation in [QuickGELU()] if clamped else known:
            kind: Any = ClampedGatedMLP if clamped else GatedMLP
            yield tuple(
                kind(
                    w_gate=w_in[e, gate],
                    w_up=w_in[e, up],
                    w_out=w_out[e],
                    b_gate=None if b_in is None else b_in[e, gate],
                    b_up=None if b_in is None else b_in[e, up],
                    b_out=None if b_out is None else b_out[e],
                    activation=activation,
                    **bounds,
                )
                for e in range(len(w_in))
            )
