"""The share of an MLP's force that no potential of a stated basis explains at the tokens: an upper bound on the swirl.

The potential U is fitted by least squares in the basis of ``gradient_fit`` (psi(z) and (r.x) h(z) of every neuron, or
if gated psi(z) t and Psi(z), and all quadratics) to the tokens of one half of the prompts, and the share of |f|^2 that
is left on the other half is measured, both ways round, so that every prompt has one value [Helmholtz Transformer, no.
3]:

    swirl_share_bound = sum_t |f - grad U|^2 / sum_t |f|^2  >=  the swirl share, in expectation; tokens t of a prompt.

The ridge is the one of ``RIDGES`` that predicts one quarter of the prompts best from another, both in the fitted half.

How to read it. 0: f is a gradient where the tokens are. For one ReLU neuron with w across v under N(0, I) it is 3/8,
and 1/2 for a linear one.
How it fails. It is an upper bound: a richer basis may explain more, and with few tokens the fit is poor (values above 1
are possible, and are not clipped). Where the tokens of a half do not span all dimensions, d, or d - 1 after a
LayerNorm, because they are too few or too alike, the fit is not determined: the shares of that layer are NaN, and the
attribute ``undetermined`` says so. At most ``neurons`` neurons, those with the largest E|w s|^2, have potentials of
their own.
In a mixture of experts f = sum_k p_k f_k, every expert k has a potential U_k of its own, fitted to f_k at the tokens
that select it, by token weight times p_k; ``expert_NAME`` is its share there, with the same weights. As routed, with
the routing weights frozen as in ``mlp_force``, the share is sum_t |f - sum_k p_k grad U_k|^2 / sum_t |f|^2;
potentials fitted to the sum, not to each expert, would leave less. sum_k p_k grad U_k is not a gradient where p varies.
An expert needs tokens that span all dimensions too, in four prompts or more; else it has no share (NaN), and the layer
none as routed.
Cost. One replay; O(T h^2) for the inner products and O(h^3) to solve, for each layer (expert).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.fields.gradient_basis import GradientBasis
from helmscope.fields.gradient_fit import Moments, fit_moments, root_mean_square
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.models.experts import MixtureOfExperts
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_force import unit_points
from helmscope.observe.mlp_parts import is_centered
from helmscope.observe.token_choice import spaced_tokens, taken
from helmscope.observe.track import check_system, token_weights
from helmscope.runs.bar import shows_progress
from helmscope.types import Instrument, Needs, check_integer, pluralized, type_with_article
from helmscope.types.progress import check_progress

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.fields.gradient_basis import Family
    from helmscope.fields.gradient_fit import FittedGradient
    from helmscope.types import MlpTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

    Sample = tuple[Tensor, Tensor]  # tokens of a prompt and their weights

RIDGES = (1e-8, 1e-5, 1e-2)  # relative to fields of unit length
TOLERANCE, ITERATIONS = 1e-6, 20  # of the fits; 60 iterations change no share of model A by more than 2e-5
SELECTING = 8  # iterations of the fits that choose a ridge
SHARES = {
    "swirl_share_bound": "neurons' and quadratic potentials",
    "swirl_share_bound_quadratic": "quadratic potentials",
}
RANK = 1e-6  # spread along a dimension, relative to the length of tokens, that is more than rounding in float32


@shows_progress("projecting MLPs on gradients")
def mlp_swirl_bound(
    system: System, *, neurons: int = 768, max_tokens: int = 4096, progress: ProgressOption = None
) -> xr.Dataset:
    """The share of the force of each MLP that no potential of the basis explains, cross-validated over prompts: an
    upper bound on the swirl share, one value per prompt: E|f - grad U|^2 / E|f|^2, with U fitted on the other half of
    the prompts.

    At most ``max_tokens`` tokens in all are used, evenly spaced in each prompt. ``swirl_share_bound`` is the share with
    the whole basis, ``swirl_share_bound_quadratic`` that with quadratic potentials alone. Both are NaN in a layer where
    the tokens of half of the prompts do not span all dimensions (fewer than d + 1 distinct ones, d after a LayerNorm,
    or a covariance of lower rank); the attribute ``undetermined`` then says so. A mixture of experts is taken as
    routed, its weights frozen, and ``expert_NAME`` and ``expert_weight`` have the axis ``expert``: NaN for an expert
    that no token of a prompt selects. Raises HelmscopeError for fewer than four prompts, and for experts with clamped
    neurons, which have no potential. ``progress`` is called with the share of the layers done.

    >>> from helmscope.solve.integrate import integrate
    >>> x = torch.nn.functional.normalize(torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    >>> still = MLP(w_in=torch.eye(3), w_out=torch.eye(3))
    >>> bool(mlp_swirl_bound(integrate(still, x, times=[0.0])).swirl_share_bound.max() < 1e-2)
    True
    """
    instrument = _Samples(check_integer("max_tokens", max_tokens, at_least=8))
    measured = check_system(system).replay(instrument, progress=False)[instrument.name].drop_vars("sampled")
    kept = check_integer("neurons", neurons, at_least=1)
    report, layers = check_progress(progress), []
    for done, layer in enumerate(instrument.plan.layers, 1):
        force, prompts = system.force(layer=layer), instrument.samples(layer)
        of = _mixture_projection if isinstance(force, MixtureOfExperts) else _projection
        layers.append(of(force, prompts, kept, instrument.centered))
        report(done / len(instrument.plan.layers))
    axes = (instrument.plan.axis, instrument.plan.replicate)
    for name in SHARES:
        measured[name] = (axes, np.stack([layer.shares[name] for layer in layers]), _described(name))
    experts = max(layer.weight.shape[1] for layer in layers)
    if experts:
        columns = {"expert_weight": [layer.weight for layer in layers]}
        columns |= {f"expert_{name}": [layer.experts[name] for layer in layers] for name in SHARES}
        for name, rows in columns.items():
            wide = [np.pad(row, ((0, 0), (0, experts - row.shape[1])), constant_values=np.nan) for row in rows]
            measured[name] = ((*axes, "expert"), np.stack(wide), _described(name))
        measured.attrs["routing_weights"] = "frozen: their derivative is not part of the gradient"
    profiles = sorted(set().union(*(layer.profiles for layer in layers)))
    measured.attrs |= {"basis": f"psi, (r.x) h, quadratic; h: {', '.join(profiles) or 'none'}", "neurons": kept}
    spans = {k: layer.span for k, layer in zip(instrument.plan.layers, layers, strict=True) if layer.span is not None}
    if spans:
        measured.attrs["undetermined"] = _undetermined(spans)
    return measured


def swirl_bound_unsupported(system: System) -> str | None:
    """One sentence that says why a system does not support ``mlp_swirl_bound``; None if it does.

    >>> from helmscope.solve.integrate import integrate
    >>> swirl_bound_unsupported(integrate(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2), times=[0.0]))
    'system has fewer than four systems, but mlp_swirl_bound fits on halves of halves of them'
    """
    return system.unsupported_reason(_Samples(8))


class _Samples(Instrument):
    """Instrument: keeps evenly spaced tokens of every prompt and the force of every layer."""

    name = "mlp_swirl_bound"
    needs = Needs.FORCE

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.centered = False
        self._rows: dict[int, list[tuple[int, Tensor, Tensor]]] = {}

    def unsupported_reason(self, system: System) -> str | None:
        for layer in system.layers:
            force = system.force(layer=layer)
            for each in force.experts if isinstance(force, MixtureOfExperts) else (force,):
                if not isinstance(each, MLP | GatedMLP):
                    of = "force" if each is force else "an expert of force"
                    return f"system has {type_with_article(each)} as {of}(layer={layer}), but {self.name} needs an MLP"
        if len(system.trajectory.states[0]) < 4:
            return f"system has fewer than four {system.replicate}s, but {self.name} fits on halves of halves of them"
        return None

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        weights = token_weights(tensors.state, context.weights)
        x = unit_points(self, context, tensors.point, weights)
        chosen, counts = spaced_tokens(
            weights, max(1, self.max_tokens // self.plan.replicates), include_first_token=True
        )
        x, weights = taken(x, chosen), taken(weights, chosen) * counts
        self.centered = is_centered(tensors.norm)
        rows = self._rows.setdefault(context.layer, [])
        rows += [(context.rows.start + k, x[k], weights[k].to(x)) for k in range(len(x))]
        self.keep(context, {"sampled": counts.sum(-1)})

    def samples(self, layer: int) -> list[Sample]:
        """Tokens and weights of every prompt, in order."""
        return [(x, w) for _, x, w in sorted(self._rows[layer], key=lambda row: row[0])]


@dataclass(frozen=True)
class _Span:
    """How many distinct tokens the half of the prompts with the lower rank has, how many dimensions their differences
    span, how many there are, and whether there are enough prompts; of an expert, those that select it.
    """

    tokens: int
    rank: int
    dimensions: int
    enough_prompts: bool
    expert: int | None = None

    @staticmethod
    def of(prompts: list[Sample], centered: bool, expert: int | None = None) -> _Span:
        found = []
        for half in (prompts[::2], prompts[1::2]):
            x = torch.cat([prompts[0][0][:0], *(tokens[weights > 0] for tokens, weights in half)]).double()
            spread = torch.linalg.svdvals(x - x.mean(0)) if len(x) else x.new_zeros(0)
            rank = int((spread > RANK * math.sqrt(len(x))).sum())
            distinct = len(np.unique(x.cpu().numpy(), axis=0))
            found.append(_Span(distinct, rank, x.shape[-1] - int(centered), len(prompts) >= 4, expert))
        return min(found, key=lambda each: each.rank)

    @property
    def determines(self) -> bool:
        """Whether a fit to these tokens is determined."""
        return self.rank >= self.dimensions and self.enough_prompts


def _undetermined(spans: dict[int, _Span]) -> str:
    """The sentence that says in which layers the fit is not determined, with the numbers of the worst."""
    layer, worst = min(spans.items(), key=lambda item: item[1].rank)
    layers = f"layer{'' if len(spans) == 1 else 's'} {', '.join(map(str, spans))}"
    names, that, prompts = "swirl_share_bound and swirl_share_bound_quadratic", "", ""
    if worst.expert is not None:
        names += ", also of single experts,"
        that, prompts = f" that select expert {worst.expert} of layer {layer}", ", in four prompts or more"
    return (
        f"{names} are NaN in {layers}: the tokens of half of the prompts{that}, of which {worst.tokens} are distinct, "
        f"span {worst.rank} of {pluralized(worst.dimensions, 'dimension')}, but a fit needs all of them{prompts}: use "
        "more or longer prompts"
    )


def _described(name: str) -> dict[str, Any]:
    """The attributes of a variable."""
    if name == "expert_weight":
        return {"long_name": "mean routing weight of an expert", "valid_min": 0.0}
    basis, by = SHARES[name.removeprefix("expert_")], ", by expert" if name.startswith("expert_") else ""
    label = f"upper bound on the swirl share of the MLP: share of |f|^2 not explained by {basis}{by}"
    return {**label_attributes(label), "valid_min": 0.0}


@dataclass(frozen=True, eq=False)
class _Projection:
    """The shares of a layer for every prompt, also by expert (prompt, expert) with their mean routing weights, and if
    they are not determined, why.
    """

    shares: dict[str, np.ndarray]
    experts: dict[str, np.ndarray]
    weight: np.ndarray
    profiles: set[str]
    span: _Span | None


def _projection(mlp: Any, prompts: list[Sample], kept: int, centered: bool) -> _Projection:
    """The shares of an MLP."""
    span, nothing = _Span.of(prompts, centered), np.zeros((len(prompts), 0))
    if not span.determines:
        unknown = {name: np.full(len(prompts), np.nan) for name in SHARES}
        return _Projection(unknown, {}, nothing, set(), span)
    found = _CrossValidated.of(mlp, prompts, kept)
    weights = [w for _, w in prompts]
    return _Projection(_shares(found.rests, found.forces, weights), {}, nothing, {found.profile}, None)


def _mixture_projection(mixture: Any, prompts: list[Sample], kept: int, centered: bool) -> _Projection:
    """The shares of a mixture of experts as routed, its weights frozen, and of each expert where it is selected."""
    count, shape = len(prompts), (len(prompts), len(mixture.experts))
    routing = [mixture.routing_weights(x) for x, _ in prompts]
    weight, experts = np.zeros(shape), {name: np.full(shape, np.nan) for name in SHARES}
    forces = [torch.zeros_like(x) for x, _ in prompts]
    rests = {name: [torch.zeros_like(x) for x, _ in prompts] for name in SHARES}
    profiles, undetermined = set(), list[_Span]()
    for expert, mlp in enumerate(mixture.experts):
        own = {k: routing[k][expert] for k in range(count) if expert in routing[k]}
        active = {k: (share != 0) & (prompts[k][1] > 0) for k, share in own.items()}
        places = [k for k in own if bool(active[k].any())]
        for k in places:
            weight[k, expert] = float((prompts[k][1] * own[k]).sum() / prompts[k][1].sum())
        read = [(prompts[k][0][active[k]], (prompts[k][1] * own[k])[active[k]]) for k in places]
        if not read:
            continue
        span = _Span.of(read, centered, expert)
        if not span.determines:
            undetermined.append(span)
            continue
        found = _CrossValidated.of(mlp, read, kept)
        profiles.add(found.profile)
        for name, values in _shares(found.rests, found.forces, [w for _, w in read]).items():
            experts[name][places, expert] = values
        for place, k in enumerate(places):
            share = own[k][active[k]].unsqueeze(-1)
            forces[k][active[k]] += share * found.forces[place]
            for name in SHARES:
                rests[name][k][active[k]] += share * found.rests[name][place]
    shares = _shares(rests, forces, [w for _, w in prompts])
    if undetermined:
        shares = {name: np.full(count, np.nan) for name in SHARES}
    worst = min(undetermined, key=lambda each: each.rank) if undetermined else None
    return _Projection(shares, experts, weight, profiles, worst)


def _shares(rests: dict[str, list[Tensor]], forces: list[Tensor], weights: list[Tensor]) -> dict[str, np.ndarray]:
    """sum w |rest|^2 / sum w |f|^2 of every prompt."""

    def size(vectors: list[Tensor]) -> np.ndarray:
        return np.array([float((w * v.square().sum(-1)).sum()) for v, w in zip(vectors, weights, strict=True)])

    with np.errstate(invalid="ignore", divide="ignore"):  # NaN for a force of 0
        return {name: size(rest) / size(forces) for name, rest in rests.items()}


@dataclass(frozen=True, eq=False)
class _CrossValidated:
    """The force at the tokens of every prompt, and what is left of it by potentials that are fitted to the other half
    of the prompts.
    """

    forces: list[Tensor]
    rests: dict[str, list[Tensor]]
    profile: str

    @staticmethod
    def of(mlp: MLP | GatedMLP, prompts: list[Sample], kept: int) -> _CrossValidated:
        size = root_mean_square(torch.cat([x for x, _ in prompts]), torch.cat([w for _, w in prompts]))
        basis = GradientBasis.of(_strongest(mlp, prompts, kept), size)
        data = [_Quarter.of(mlp, basis, prompts, k) for k in range(4)]  # halves are the even and the odd prompts
        rests: dict[str, dict[int, Tensor]] = {name: {} for name in SHARES}
        for half in (0, 1):
            first, second = data[half], data[half + 2]
            fits = [_fit(basis, first.moments, ridge, SELECTING) for ridge in RIDGES]
            errors = [float((second.weights * second.rest(fit).square().sum(-1)).sum()) for fit in fits]
            both, best = first.moments.plus(second.moments), RIDGES[int(np.argmin(errors))]
            for name, ridge in zip(SHARES, (best, None), strict=True):
                fitted = _fit(basis, both, ridge)
                for quarter in (data[1 - half], data[3 - half]):
                    rests[name] |= quarter.by_prompt(quarter.rest(fitted))
        forces = {k: f for quarter in data for k, f in quarter.by_prompt(quarter.f).items()}
        places = range(len(prompts))
        ordered = {name: [rest[k] for k in places] for name, rest in rests.items()}
        return _CrossValidated([forces[k] for k in places], ordered, basis.profile)


def _fit(basis: GradientBasis, moments: Moments, ridge: float | None, iterations: int = ITERATIONS) -> FittedGradient:
    return fit_moments(basis, moments, ridge, tol=TOLERANCE, iterations=iterations)


@dataclass(frozen=True, eq=False)
class _Quarter:
    """The tokens of a quarter of the prompts, with what is needed to fit and to predict them."""

    sizes: dict[int, int]  # the number of tokens by prompt
    x: Tensor
    f: Tensor
    weights: Tensor
    families: list[Family]
    moments: Moments

    @staticmethod
    def of(mlp: MLP | GatedMLP, basis: GradientBasis, prompts: list[Sample], number: int) -> _Quarter:
        sizes = {k: len(prompts[k][0]) for k in range(number, len(prompts), 4)}
        x, weights = (torch.cat([prompts[k][i] for k in sizes]) for i in (0, 1))
        families, f = basis.families(x), mlp.ambient(x)
        return _Quarter(sizes, x, f, weights, families, Moments.of(families, x, f, weights))

    def by_prompt(self, values: Tensor) -> dict[int, Tensor]:
        """Values of all tokens, by prompt."""
        return dict(zip(self.sizes, torch.split(values, list(self.sizes.values())), strict=True))

    def rest(self, fitted: FittedGradient) -> Tensor:
        """f - grad U at each token."""
        return self.f - fitted.at(self.x, self.families)


def _strongest(mlp: MLP | GatedMLP, prompts: list[Sample], kept: int) -> MLP | GatedMLP:
    """The MLP of the neurons with the largest E|w s|^2, at most ``kept``: those with potentials of their own."""
    if mlp.hidden <= kept:
        return mlp
    energy = sum((weights[:, None] * mlp.neurons(x).square()).sum(0) for x, weights in prompts)
    energy = energy * mlp.w_out.to(prompts[0][0]).square().sum(0)
    best = energy.topk(kept).indices.sort().values
    changes: dict[str, Any] = {"w_out": mlp.w_out[:, best]}
    for name in ("w_in", "b_in", "w_gate", "b_gate", "w_up", "b_up"):
        value = getattr(mlp, name, None)
        if value is not None:
            changes[name] = value[best]
    return replace(mlp, **changes)
