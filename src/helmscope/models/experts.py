"""A mixture of experts as a force: f(x) = sum_k p_k(x) f_{e_k}(x) over the experts that a router selects at x."""

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
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor, nn

    from helmscope.fields.norms import Norm
    from helmscope.models.mlp_capture import MlpModules
    from helmscope.models.probe import ModuleCall

Route = Callable[["Tensor"], tuple["Tensor", "Tensor"]]


@dataclass(frozen=True, eq=False, kw_only=True)
class ClampedGatedMLP(Force):
    """The experts of gpt-oss: f(x) = w_out [ s(min(g, limit)) * (1 + clamp(u, -limit, limit)) ] + b_out with the affine
    maps g = w_gate x + b_gate and u = w_up x + b_up.

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
        """The hidden activations, which ``w_out`` multiplies; without input checks."""
        gate = affine(x, self.w_gate, self.b_gate).clamp(max=self.limit)
        return self.activation(gate) * (1 + affine(x, self.w_up, self.b_up).clamp(-self.limit, self.limit))

    @property
    def input_rows(self) -> tuple[Float[Tensor, "hidden dim"], ...]:
        """(w_gate, w_up)."""
        return self.w_gate, self.w_up

    def neuron_slopes(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch hidden"], ...]:
        """The derivatives along both rows, 0 where a clamp is active; without input checks."""
        gate, up = affine(x, self.w_gate, self.b_gate), affine(x, self.w_up, self.b_up)
        value = self.activation(gate.clamp(max=self.limit))
        slope = torch.where(gate <= self.limit, self.activation.slope(gate), 0.0)
        return slope * (1 + up.clamp(-self.limit, self.limit)), torch.where(up.abs() <= self.limit, value, 0.0)


def folded(force: Any, norm: Norm | None, scale: float = 1.0) -> Any:
    """Fold a norm and a residual multiplier ``scale`` into a force, which then acts on x = normalized(z) / sqrt(d).

    Gain, bias and sqrt(d) of the norm go into the input weights, the multiplier into the output weights.

    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.fields.activations import Identity
    >>> plain = MLP(w_in=torch.eye(2), w_out=torch.eye(2), activation=Identity())
    >>> folded(plain, None, 0.5)(torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.0000])
    """
    if isinstance(force, MixtureOfExperts):
        return replace(force, experts=tuple(folded(expert, norm, scale) for expert in force.experts), norm=norm)
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
    """A force with the model's weights, the norm before it and the residual multiplier; ``modules`` are those of its
    block that compute it, None for a mixture.

    They are folded together only on demand, since a folded force holds a copy of the weights.
    """

    force: Force | MixtureOfExperts
    norm: Norm | None
    scale: float
    modules: MlpModules | None = None

    def folded(self) -> Any:
        """The force as a function of x = normalized(z) / sqrt(d)."""
        return folded(self.force, self.norm, self.scale)

    def unfolded(self) -> Any:
        """The force as a function of the norm's output, with the residual multiplier."""
        return folded(self.force, None, self.scale)


@dataclass(frozen=True, eq=False)
class MixtureOfExperts(ConciseRepr):
    """The force f(x) = sum_k p_k(x) f_{e_k}(x) of a mixture of experts.

    ``route`` maps states (n, d) to the weights p and the indices e of the selected experts, both (n, k). With a
    ``norm``, x is normalized(z) / sqrt(d), and ``route`` is evaluated at the norm of z.

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

    def select(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
        """The weights and the indices of the experts that the router selects at x.

        >>> always = lambda x: (torch.ones(len(x), 1), torch.full((len(x), 1), 3))
        >>> MixtureOfExperts((), always).select(torch.zeros(2, 5))[1].tolist()
        [[3], [3]]
        """
        with torch.no_grad():
            return self._routed(x)

    def routing_weights(self, x: Float[Tensor, "*batch d"]) -> dict[int, Float[Tensor, "*batch"]]:
        """The weight at each token of every expert that the router selects at some x, 0 where it does not, by expert.

        >>> always = lambda x: (torch.full((len(x), 1), 0.5), torch.full((len(x), 1), 3))
        >>> MixtureOfExperts((), always).routing_weights(torch.zeros(2, 5))
        {3: tensor([0.5000, 0.5000])}
        """
        shares, indices = self.select(x)
        return {
            e: torch.where(indices == e, shares.to(x), 0.0).sum(-1) for e in sorted(set(indices.flatten().tolist()))
        }

    def select_with_gradients(
        self, x: Float[Tensor, "tokens d"]
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"], Float[Tensor, "tokens k d"]]:
        """The same with the gradients of the weights in x by autograd, where the selection of experts does not change;
        0 for a router without a derivative.

        >>> halved = lambda x: (x[:, :1] / 2, torch.zeros(len(x), 1, dtype=torch.long))
        >>> MixtureOfExperts((), halved).select_with_gradients(torch.ones(1, 2))[2]
        tensor([[[0.5000, 0.0000]]])
        """
        with torch.enable_grad():
            points = x.detach().requires_grad_()
            weights, experts = self._routed(points)
            slopes = [
                torch.autograd.grad(weight.sum(), points, retain_graph=True)[0]
                if weight.requires_grad
                else torch.zeros_like(points)
                for weight in weights.unbind(-1)
            ]
        return weights.detach(), experts, torch.stack(slopes, -2)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.norm is None:
            read = x
        else:  # undo x = normalized(z) / sqrt(d), and apply the norm's gain and bias
            read = x * x.shape[-1] ** 0.5
            read = read if self.norm.gain is None else read * self.norm.gain.detach().to(x)
            read = read if self.norm.bias is None else read + self.norm.bias.detach().to(x)
        weights, experts = self.route(read.reshape(-1, read.shape[-1]))
        return weights.reshape(*x.shape[:-1], -1), experts.reshape(*x.shape[:-1], -1)

    def __call__(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """The force at points x of shape (..., d)."""
        return self.ambient(x)

    def ambient(
        self, x: Float[Tensor, "*batch d"], weights: Tensor | None = None, *, t: float = 0.0
    ) -> Float[Tensor, "*batch d"]:
        """The force at x, without input checks; ``weights`` and ``t`` are ignored.

        >>> from helmscope.fields.activations import Identity
        >>> one = GatedMLP(w_gate=torch.eye(2), w_up=torch.eye(2), w_out=torch.eye(2), activation=Identity())
        >>> always = lambda x: (torch.full((len(x), 1), 0.5), torch.zeros(len(x), 1, dtype=torch.long))
        >>> MixtureOfExperts((one,), always).ambient(torch.tensor([[1.0, 2.0]]))
        tensor([[0.5000, 2.0000]])
        """
        total = torch.zeros_like(x)
        for index, share in self.routing_weights(x).items():
            active = share != 0
            total[active] += share[active].unsqueeze(-1) * self.experts[index].ambient(x[active])
        return total


def read_experts(
    calls: list[ModuleCall], written: ModuleCall, known: list[Activation]
) -> tuple[MixtureOfExperts, Tensor, Tensor] | None:
    """The mixture of experts that computes a write, with its input and output; None if there is none.

    It is recognized by a module with two stacks of matrices, one matrix per expert, and a router with the same input
    that returns weights and indices of experts.
    """
    for call in calls:
        stacks = [p.detach() for p in call.module.parameters(recurse=False) if p.ndim == 3]
        if len(stacks) == 2 and call.input is not None and equal(call.output, written.output):
            route = _find_router(calls, call.input)
            mixture = None if route is None else _fit_experts(call, written, route, known)
            return None if mixture is None or written.output is None else (mixture, call.input, written.output)
    return None


def _find_router(calls: list[ModuleCall], x: Tensor) -> Route | None:
    """The router that returns weights and indices of experts at x; None if there is none."""
    for call in calls:
        looks_like_router = len(call.outputs) == 2 and len(call.inputs) == 1 and equal(call.input, x)
        with torch.no_grad():
            found = looks_like_router and _call_router(call.module, x) is not None
        if found:
            return lambda y, module=call.module: _route_in_own_dtype(module, y)  # type: ignore[misc]
    return None


def _route_in_own_dtype(module: nn.Module, y: Tensor) -> tuple[Tensor, Tensor]:
    parameter = next(module.parameters())
    routed = _call_router(module, y.to(parameter.dtype))
    assert routed is not None
    return routed


def _call_router(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Weights and indices among the outputs of a module at x; None if it does not return both."""
    out = module(x)
    indices = [value for value in out if isinstance(value, torch.Tensor) and not value.is_floating_point()]
    if not indices:
        return None
    weights = [value for value in out if value.is_floating_point() and value.shape == indices[0].shape]
    return (weights[0], indices[0]) if weights else None


def _fit_experts(
    call: ModuleCall, written: ModuleCall, route: Route, known: list[Activation]
) -> MixtureOfExperts | None:
    """The layout of the stacked matrices for which the mixture reproduces the module's output on one token."""
    assert call.input is not None
    assert written.output is not None
    d = call.input.shape[-1]
    x, expected = call.input.reshape(-1, d)[:1], written.output.reshape(-1, d)[:1].double()
    for experts in _expert_layouts(call.module, known):
        output = MixtureOfExperts(experts, route).ambient(x.double())
        if float((output - expected).norm()) <= 1e-5 * float(expected.norm()):
            return MixtureOfExperts(experts, route)
    return None


def _expert_layouts(module: nn.Module, known: list[Activation]) -> Iterator[tuple[Force, ...]]:
    """All interpretations of two stacks of matrices as gated experts: which axis belongs to the state, whether the rows
    of gate and up are consecutive or interleaved, with or without clamping.
    """
    stacks = [p.detach() for p in module.parameters(recurse=False) if p.ndim == 3]
    biases = [p.detach() for p in module.parameters(recurse=False) if p.ndim == 2]
    first, last = sorted(stacks, key=lambda p: -p.numel())
    limit = getattr(module, "limit", None)
    for transposed, interleaved, clamped in product((False, True), repeat=3):
        w_in, w_out = (p.mT if transposed else p for p in (first, last))  # (expert, 2 hidden, d), (expert, d, hidden)
        if w_in.shape[1] != 2 * w_out.shape[2] or w_in.shape[2] != w_out.shape[1] or (clamped and limit is None):
            continue
        b_in = next((b for b in biases if b.shape[1] == w_in.shape[1]), None)
        b_out = next((b for b in biases if b.shape[1] == w_out.shape[1] and b is not b_in), None)
        half = w_out.shape[2]
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
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
