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
their own. A mixture of experts is refused: a gradient is not one after routing.
Cost. One replay; O(T h^2) for the inner products and O(h^3) to solve, for each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.fields.gradient_fit import GradientBasis, Moments, fit_moments, root_mean_square
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.observe.drift import unit_points
from helmscope.observe.mlp_parts import is_centered
from helmscope.observe.track import check_system, token_weights
from helmscope.runs.bar import shows_progress
from helmscope.types import Instrument, Needs, check_integer, pluralized, type_with_article
from helmscope.types.progress import check_progress

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.fields.gradient_fit import Family, FittedGradient
    from helmscope.types import MlpTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

RIDGES = (1e-8, 1e-5, 1e-2)  # relative to fields of unit length
TOLERANCE, ITERATIONS = 1e-6, 20  # of the fits; 60 iterations change no share of model A by more than 2e-5
RANK = 1e-6  # spread along a dimension, relative to the length of tokens, that is more than rounding in float32


@shows_progress("projecting MLPs on gradients")
def mlp_projection(
    system: System, *, neurons: int = 768, tokens: int = 4096, progress: ProgressOption = None
) -> xr.Dataset:
    """The share of the force of each MLP that no potential of the basis explains, cross-validated over prompts: an
    upper bound on the swirl share, one value per prompt: E|f - grad U|^2 / E|f|^2, with U fitted on the other half of
    the prompts.

    At most ``tokens`` tokens in all are used, evenly spaced in each prompt. ``swirl_share_bound`` is the share with the
    whole basis, ``swirl_share_bound_quadratic`` that with quadratic potentials alone. Both are NaN in a layer where the
    tokens of half of the prompts do not span all dimensions (fewer than d + 1 distinct ones, d after a LayerNorm, or a
    covariance of lower rank); the attribute ``undetermined`` then says so. Raises HelmscopeError for fewer than four
    prompts, and for MLPs that are mixtures of experts. ``progress`` is called with the share of the layers done.

    >>> from helmscope.solve.integrate import integrate
    >>> x = torch.nn.functional.normalize(torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    >>> still = MLP(w_in=torch.eye(3), w_out=torch.eye(3))
    >>> bool(mlp_projection(integrate(still, x, times=[0.0])).swirl_share_bound.max() < 1e-2)
    True
    """
    instrument = _Samples(check_integer("tokens", tokens, at_least=8))
    measured = check_system(system).replay(instrument, progress=False)[instrument.name]
    kept = check_integer("neurons", neurons, at_least=1)
    axes = (instrument.plan.axis, instrument.plan.replicate)
    columns: dict[str, list[np.ndarray]] = {"swirl_share_bound": [], "swirl_share_bound_quadratic": []}
    profiles, spans = set(), {}
    report = check_progress(progress)
    for done, layer in enumerate(instrument.plan.layers, 1):
        samples = instrument.samples(layer)
        shares, profile = _cross_validated(instrument.forces[layer], samples, kept)
        span = min((_Span.of(samples[half::2], instrument.centered) for half in (0, 1)), key=lambda each: each.rank)
        if span.rank < span.dimensions:
            spans[layer] = span
            shares = {name: np.full_like(value, np.nan) for name, value in shares.items()}
        profiles.add(profile)
        for name, value in shares.items():
            columns[name].append(value)
        report(done / len(instrument.plan.layers))
    measured = measured.drop_vars("sampled")
    for name, rows in columns.items():
        basis = "neurons' and quadratic potentials" if name == "swirl_share_bound" else "quadratic potentials"
        label = f"upper bound on the swirl share of the MLP: share of |f|^2 not explained by {basis}"
        measured[name] = (axes, np.stack(rows), {"long_name": label, "valid_min": 0.0})
    measured.attrs |= {"basis": f"psi, (r.x) h, quadratic; h: {', '.join(sorted(profiles))}", "neurons": kept}
    if spans:
        measured.attrs["undetermined"] = _undetermined(spans)
    return measured


def projection_refusal(system: System) -> str | None:
    """Why ``mlp_projection`` cannot be taken of a system, in one sentence; None if it can.

    >>> from helmscope.solve.integrate import integrate
    >>> projection_refusal(integrate(MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2), times=[0.0]))
    'system has fewer than four systems, but mlp_projection fits on halves of halves of them'
    """
    return system.refusal(_Samples(8))


class _Samples(Instrument):
    """Instrument: keeps evenly spaced tokens of every prompt and the force of every layer."""

    name = "mlp_projection"
    needs = Needs.FORCE

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.forces: dict[int, Any] = {}
        self.centered = False
        self._rows: dict[int, list[tuple[int, Tensor, Tensor]]] = {}

    def refusal(self, system: System) -> str | None:
        for layer in system.layers:
            force = system.force(layer=layer)
            if not isinstance(force, MLP | GatedMLP):
                return f"system has {type_with_article(force)} as force(layer={layer}), but {self.name} needs an MLP"
        if len(system.trajectory.states[0]) < 4:
            return f"system has fewer than four {system.replicate}s, but {self.name} fits on halves of halves of them"
        return None

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        weights = token_weights(tensors.state, context.weights)
        x = unit_points(self, context, tensors.point, weights)
        step = math.ceil(x.shape[1] * self.plan.replicates / self.tokens)
        self.forces[context.layer], self.centered = tensors.force, is_centered(tensors.norm)
        rows = self._rows.setdefault(context.layer, [])
        rows += [
            (context.rows.start + k, x[k, ::step].clone(), weights[k, ::step].clone().to(x)) for k in range(len(x))
        ]
        self.keep(context, {"sampled": torch.full_like(x[:, 0, 0], float(x[0, ::step].shape[0]))})

    def samples(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and weights of every prompt, in order."""
        return [(x, w) for _, x, w in sorted(self._rows[layer], key=lambda row: row[0])]


@dataclass(frozen=True)
class _Span:
    """How many distinct tokens there are, how many dimensions their differences span, and how many there are."""

    tokens: int
    rank: int
    dimensions: int

    @staticmethod
    def of(prompts: list[tuple[Tensor, Tensor]], centered: bool) -> _Span:
        x = torch.cat([tokens[weights > 0] for tokens, weights in prompts]).double()
        spread = torch.linalg.svdvals(x - x.mean(0)) if len(x) else x.new_zeros(0)
        rank = int((spread > RANK * math.sqrt(len(x))).sum())
        return _Span(len(np.unique(x.cpu().numpy(), axis=0)), rank, x.shape[-1] - int(centered))


def _undetermined(spans: dict[int, _Span]) -> str:
    """The sentence that says in which layers the fit is not determined, with the numbers of the worst."""
    worst = min(spans.values(), key=lambda span: span.rank)
    layers = f"layer{'' if len(spans) == 1 else 's'} {', '.join(map(str, spans))}"
    return (
        f"swirl_share_bound and swirl_share_bound_quadratic are NaN in {layers}: the tokens of half of the prompts, of "
        f"which {worst.tokens} are distinct, span {worst.rank} of {pluralized(worst.dimensions, 'dimension')}, but a "
        "fit needs all of them: use more or longer prompts"
    )


def _cross_validated(mlp: Any, prompts: list[tuple[Tensor, Tensor]], kept: int) -> tuple[dict[str, np.ndarray], str]:
    """The shares of every prompt, from fits to the other half of the prompts."""
    size = root_mean_square(torch.cat([x for x, _ in prompts]), torch.cat([w for _, w in prompts]))
    basis = GradientBasis.of(_strongest(mlp, prompts, kept), size)
    quarters = [list(range(k, len(prompts), 4)) for k in range(4)]  # halves are the even and the odd prompts
    data = [_Quarter.of(mlp, basis, [prompts[k] for k in quarter]) for quarter in quarters]
    result = {name: np.full(len(prompts), np.nan) for name in ("swirl_share_bound", "swirl_share_bound_quadratic")}
    for half in (0, 1):
        first, second = data[half], data[half + 2]
        errors = [
            float(
                second.left(fit_moments(basis, first.moments, ridge, tolerance=TOLERANCE, iterations=ITERATIONS))[
                    0
                ].sum()
            )
            for ridge in RIDGES
        ]
        both = first.moments.plus(second.moments)
        fits = {"swirl_share_bound": RIDGES[int(np.argmin(errors))], "swirl_share_bound_quadratic": None}
        for name, ridge in fits.items():
            fitted = fit_moments(basis, both, ridge, tolerance=TOLERANCE, iterations=ITERATIONS)
            for quarter in (1 - half, 3 - half):
                sizes = [len(prompts[k][0]) for k in quarters[quarter]]
                above, below = (torch.split(each, sizes) for each in data[quarter].left(fitted))
                shares = [float(a.sum() / b.sum()) for a, b in zip(above, below, strict=True)]
                result[name][quarters[quarter]] = shares
    return result, basis.profile


@dataclass(frozen=True, eq=False)
class _Quarter:
    """The tokens of a quarter of the prompts, with what is needed to fit and to predict them."""

    x: Tensor
    f: Tensor
    weights: Tensor
    families: list[Family]
    moments: Moments

    @staticmethod
    def of(mlp: MLP | GatedMLP, basis: GradientBasis, prompts: list[tuple[Tensor, Tensor]]) -> _Quarter:
        x, weights = (torch.cat([prompt[i] for prompt in prompts]) for i in (0, 1))
        families, f = basis.families(x), mlp.ambient(x)
        return _Quarter(x, f, weights, families, Moments.of(families, x, f, weights))

    def left(self, fitted: FittedGradient) -> tuple[Tensor, Tensor]:
        """|f - grad U|^2 and |f|^2 of each token, times its weight."""
        rest = self.f - fitted.at(self.x, self.families)
        return self.weights * rest.square().sum(-1), self.weights * self.f.square().sum(-1)


def _strongest(mlp: MLP | GatedMLP, prompts: list[tuple[Tensor, Tensor]], kept: int) -> MLP | GatedMLP:
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
