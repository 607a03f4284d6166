"""The force of the MLP on tokens: its tangential part, its potential, its swirl and the trace of its Jacobian.

For a force f = grad U + R + harmonic ([Helmholtz Transformer, no. 3]; ``helmholtz``) at unit vectors x, with Df = S + A
its symmetric and antisymmetric parts:

    tangential part P f,  radial part <x, f>,  energy V = -U,  antisymmetric share |A|_F^2 / |Df|_F^2,
    div_S(P f) = tr Df - x^T Df x - t <x, f>,  t the dimension of the tangent space.

After a LayerNorm tokens have mean 0 over their coordinates: they lie on S^(d-2), t = d - 2, P also removes the mean,
and tr Df is there the trace on this space; otherwise they lie on S^(d-1) and t = d - 1.

How to read it. grad U and R depend on the weights, not on f alone: different weights that define the same f can have
different ones, and so can the coordinates (``mlp_parts``): ``unit_sphere`` (norm folded in) or ``mlp_input``. The
antisymmetric share depends only on f; 0 is a gradient, 1 a rotation, and independent random weights give 1/2. A surface
divergence below 0 means that the force gathers tokens around x.
How it fails. An antisymmetric share near 0.5 can belong to a force that is nearly a gradient where tokens are (see
``mlp_swirl_bound``): it weighs all directions equally, also those in which no tokens differ (see ``mlp_jacobian``).
Cost. One replay; 4 d h multiplications per token for h neurons, and h^2 at each sampled token; no d x d matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry.sphere import check_tokens
from helmscope.models.experts import ClampedGatedMLP, MixtureOfExperts
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_mixture import PreparedMixture, joined, prepare
from helmscope.observe.mlp_parts import PreparedMLP, is_centered
from helmscope.observe.token_choice import spaced_tokens
from helmscope.observe.track import AT_LEAST_0, SHARE, replayed, token_mean, token_weights, with_bounds
from helmscope.types import HelmscopeError, Instrument, Needs, check_integer, type_with_article

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.observe.mlp_parts import Parts
    from helmscope.types import AttentionTensors, MlpTensors, ReplayContext, ReplayPlan, System
    from helmscope.types.progress import ProgressOption


CACHED_NUMBERS = 2**26  # of prepared weights that are kept between the chunks of a replay
NEAR_UNIT = 2e-5  # how far from the unit vectors a norm's epsilon may have put the points that the model has read
TOKENS = 32  # of a prompt, at which what is quadratic in the Jacobian is evaluated
AXES = {"unit_sphere": "norm folded in: unit sphere", "mlp_input": "norm not folded in: MLP input"}
LABELS = {
    "force_length": "length |f| of the MLP's force",
    "tangential_force_length": "length |P f| of the tangential part of the MLP's force",
    "radial_force": "radial part <x, f> of the MLP's force",
    "harmonic_length": "length of the constant part of the MLP's force: b_out and constant neurons",
    "trace": "trace of the MLP's Jacobian",
    "antisymmetric_share": "antisymmetric share |A|^2 / |Df|^2 of the MLP's Jacobian",
    "surface_divergence": "surface divergence of the tangential part of the MLP's force",
    "attention_tangential_length": "length of the tangential part of what attention writes",
}
for _coordinates, _text in AXES.items():
    LABELS |= {
        f"potential_{_coordinates}": f"potential U of the MLP ({_text})",
        f"energy_{_coordinates}": f"energy V = -U of the MLP ({_text})",
        f"gradient_length_{_coordinates}": f"length |grad U| of the MLP's gradient part ({_text})",
        f"swirl_length_{_coordinates}": f"length |R| of the MLP's algebraic swirl ({_text})",
        f"swirl_fraction_as_printed_{_coordinates}": f"sum |R|^2 / sum |f|^2, as printed ({_text})",
    }
EXPERT = {f"expert_{name}": f"{text}, by expert" for name, text in LABELS.items() if "as_printed" not in name}
LABELS |= EXPERT | {"expert_weight": "mean routing weight of an expert"}
SIGNED = ("radial_force", "trace", "surface_divergence", "potential_", "energy_")
BOUNDS = {name: AT_LEAST_0 for name in LABELS if not any(part in name for part in SIGNED)}
BOUNDS |= {"antisymmetric_share": SHARE, "expert_antisymmetric_share": SHARE}


class MlpForce(Instrument):
    """Instrument: the MLP's force in each layer (at each time of a simulation), averaged over the tokens of each system
    by their weights.

    ``force_length`` |f|, ``tangential_force_length`` |P f|, ``radial_force`` <x, f>, ``harmonic_length`` |f - grad U -
    R|, which is b_out with the constant neurons; ``antisymmetric_share`` |A|^2 / |Df|^2 in [0, 1] (none where Df = 0),
    ``trace`` tr Df and ``surface_divergence`` div_S(P f). In each of the coordinates C = unit_sphere (norm folded in)
    and mlp_input (not folded in): ``potential_C`` U, ``energy_C`` -U, ``gradient_length_C`` |grad U|,
    ``swirl_length_C`` |R|, and ``swirl_fraction_as_printed_C`` = sum |R|^2 / sum |f|^2 over the tokens of a system,
    which is not a fraction: it depends on the weights that define f and can exceed 1 [Helmholtz Transformer, no. 3].
    Where there is attention also ``attention_tangential_length`` |P a|, with a the write of attention (after a norm, if
    one follows) for a layer of step size 1.

    ``antisymmetric_share``, and the term x^T Df x of ``surface_divergence``, are means over ``sampled_tokens`` tokens
    of a prompt at most, evenly spaced among those that count (attribute ``jacobian_tokens``): |Df|^2 and tr Df^2 cost
    O(h^2) per token for h neurons, more than all the rest. The error of sampling is a part of the spread between
    prompts, hence of every interval. ``sampled_tokens=None`` takes all tokens, as do mixtures of experts and
    ``per_token``.

    With ``per_token``, also ``token_potential_C``, ``token_energy_C`` and ``token_antisymmetric_share`` along the axis
    ``token``, NaN at tokens of weight 0. A mixture of experts is measured as routed, with frozen routing weights, and
    each quantity NAME by expert as ``expert_NAME``, weighted by the routing weight, along the axis ``expert``: NaN for
    an expert that no token of a system selects. The experts of gpt-oss have clamped neurons, whose potential is not
    defined: U, grad U and R are left out. f is the MLP as a force on unit vectors, ``system.force``, evaluated at the
    input of the MLP: under ``Layer()`` the state between the halves of a sequential block. Raises HelmscopeError for a
    system without an MLP, and for points that are not finite, with their text, layer and token.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.solve.integrate import integrate
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]), activation=Identity())
    >>> run = integrate(turn, torch.eye(2).expand(3, 2, 2), times=[0.0])
    >>> run.replay(MlpForce())["mlp_force"].tangential_force_length.values.tolist()
    [[1.0, 1.0, 1.0]]
    """

    name = "mlp_force"
    needs = Needs.FORCE | Needs.ATTENTION_WRITE

    def __init__(self, *, per_token: bool = False, sampled_tokens: int | None = TOKENS) -> None:
        if not isinstance(per_token, bool):
            raise HelmscopeError(f"per_token is {per_token!r}, but it must be True or False")
        self.per_token = per_token
        self.sampled_tokens = (
            None if sampled_tokens is None or per_token else check_integer("sampled_tokens", sampled_tokens, at_least=1)
        )
        self._prepared: dict[int, PreparedMLP | PreparedMixture] = {}
        self._facts: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"MlpForce(per_token={self.per_token}, sampled_tokens={self.sampled_tokens})"

    def unsupported_reason(self, system: System) -> str | None:
        """Why a system cannot be measured: its forces must be MLPs or mixtures of them."""
        for layer in system.layers:
            force = system.force(layer=layer)
            if not isinstance(force, MLP | GatedMLP | ClampedGatedMLP | MixtureOfExperts):
                return f"system has {type_with_article(force)} as force(layer={layer}), but {self.name} needs an MLP"
        return None

    def start(self, plan: ReplayPlan) -> None:
        """Start a new replay."""
        super().start(plan)
        self._prepared, self._facts = {}, {}

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the speed of the write of attention."""
        assert tensors.write is not None
        x, write = tensors.direction, tensors.write
        write = write - write.mean(-1, keepdim=True) if context.centered else write
        speed = torch.linalg.vector_norm(write - (x * write).sum(-1, keepdim=True) * x, dim=-1)
        speed = speed if context.step is None else speed / context.step
        self.keep(
            context, {"attention_tangential_length": token_mean(speed, token_weights(tensors.state, context.weights))}
        )

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the force at the inputs of the MLP."""
        weights = token_weights(tensors.state, context.weights)
        x = unit_points(self, context, tensors.point, weights)
        prepared, centered = prepared_force(self._prepared, context, tensors, x), is_centered(tensors.norm)
        self._facts = {
            "tangent_dimension": str(x.shape[-1] - 1 - centered),
            "frame": "unit_sphere: the direction after the norm, its gain and bias folded into the weights; "
            "mlp_input: the output of the norm, which the MLP reads",
            "jacobian_tokens": "all"
            if self.sampled_tokens is None
            else f"at most {self.sampled_tokens}, evenly spaced",
        }
        if isinstance(prepared, PreparedMixture):
            self._facts["jacobian_tokens"] = "all"
            self._facts["routing_weights"] = "frozen: their derivative is not part of the Jacobian"
            parts = joined([prepared.at(cloud[None]) for cloud in x])
            self._keep_experts(context, parts, x, weights, len(prepared.experts), centered)
        else:
            every = self.sampled_tokens is None or self.sampled_tokens >= weights.shape[-1]
            sample = None if every else spaced_tokens(weights, self.sampled_tokens, include_first_token=True)[0]
            known = _reads_unit_vectors(x if tensors.point is None else tensors.point, weights)
            parts = prepared.at(
                x,
                sample,
                preactivations=tensors.preactivations if known else None,
                force=tensors.force_value if known else None,
            )
        tokens = token_quantities(parts, x, centered=centered)
        # what was not evaluated is NaN
        evaluated = weights * ~parts.radial_slope.isnan()
        means = {name: token_mean(value, weights) for name, value in tokens.items()}
        means["antisymmetric_share"] = _mean_where_defined(tokens["antisymmetric_share"], weights)
        apart = _flat_divergence(parts, tokens["radial_force"], x.shape[-1], centered)
        means["surface_divergence"] = token_mean(apart, weights) - token_mean(parts.radial_slope, evaluated)
        for name in parts.splits:
            fraction = _ratio_of_squared_sums(tokens[f"swirl_length_{name}"], tokens["force_length"], weights)
            means[f"swirl_fraction_as_printed_{name}"] = fraction
        self.keep(context, means)
        if self.per_token:
            chosen = [name for name in tokens if name.startswith("potential_") or name == "antisymmetric_share"]
            values = {f"token_{name}": torch.where(weights > 0, tokens[name], torch.nan) for name in chosen}
            self.keep(context, values, axes=("token",))

    def _keep_experts(
        self, context: ReplayContext, parts: Parts, x: Tensor, weights: Tensor, count: int, centered: bool
    ) -> None:
        """Records the quantities of every expert, weighted by its routing weight."""
        columns: dict[str, Tensor] = {"expert_weight": x.new_zeros(len(x), count)}
        for expert, (routed, own) in parts.experts.items():
            columns["expert_weight"][:, expert] = token_mean(routed, weights)
            both = weights * routed
            for name, value in token_quantities(own, x, centered=centered).items():
                column = columns.setdefault(f"expert_{name}", x.new_full((len(x), count), torch.nan))
                column[:, expert] = (_mean_where_defined if name == "antisymmetric_share" else token_mean)(value, both)
        self.keep(context, columns, axes=("expert",))

    def result(self) -> xr.Dataset:
        """The quantities of every layer and replicate."""
        self._prepared = {}
        measured = super().result()
        for name in list(measured.data_vars):
            if "potential_" in str(name):
                measured[str(name).replace("potential_", "energy_")] = -measured[name]
        for name, value in measured.data_vars.items():
            value.attrs |= label_attributes(LABELS.get(str(name).removeprefix("token_"), str(name)))
        measured.attrs |= self._facts
        return with_bounds(measured, BOUNDS)


def mlp_force(
    system: System, *, per_token: bool = False, sampled_tokens: int | None = TOKENS, progress: ProgressOption = None
) -> xr.Dataset:
    """Force, potential and swirl of a system's MLPs, with replicates: ``MlpForce`` by one replay.

    Arguments, quantities and errors are those of ``MlpForce``. ``progress`` is called with the share of the work done.

    >>> from helmscope.fields.activations import Identity
    >>> from helmscope.solve.integrate import integrate
    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]), activation=Identity())
    >>> measured = mlp_force(integrate(turn, torch.eye(2), times=[0.0, 1.0]))
    >>> measured.tangential_force_length.values.round(6).tolist(), measured.antisymmetric_share.values.round(6).tolist()
    ([[1.0], [1.0]], [[1.0], [1.0]])
    """
    instrument = MlpForce(per_token=per_token, sampled_tokens=sampled_tokens)
    return replayed(system, instrument, progress)


def token_quantities(parts: Parts, x: Tensor, *, centered: bool) -> dict[str, Tensor]:
    """The quantities of each token at its unit vector x; ``centered`` after a LayerNorm.

    >>> turn = MLP(w_in=torch.eye(2), w_out=torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> x = torch.eye(2)
    >>> token_quantities(prepare(turn).at(x), x, centered=False)["radial_force"]
    tensor([0., 0.])
    """
    f, inner = parts.force, (x * parts.force).sum(-1)
    tangential = f - inner.unsqueeze(-1) * x - (f.mean(-1, keepdim=True) if centered else 0.0)
    vectors = {"force_length": f, "tangential_force_length": tangential, "harmonic_length": parts.harmonic}
    vectors |= {f"gradient_length_{name}": split.gradient for name, split in parts.splits.items()}
    vectors |= {f"swirl_length_{name}": split.swirl for name, split in parts.splits.items()}
    return {
        **{name: torch.linalg.vector_norm(value, dim=-1) for name, value in vectors.items()},
        **{f"potential_{name}": split.potential for name, split in parts.splits.items()},
        "radial_force": inner,
        "trace": parts.jacobian.trace,
        "antisymmetric_share": parts.jacobian.antisymmetric_share,
        "surface_divergence": _flat_divergence(parts, inner, x.shape[-1], centered) - parts.radial_slope,
    }


def _mean_where_defined(values: Tensor, weights: Tensor) -> Tensor:
    """The mean over tokens at which the value is a number; NaN if it is one at none."""
    return token_mean(values, weights * ~values.isnan())


def _flat_divergence(parts: Parts, inner: Tensor, dim: int, centered: bool) -> Tensor:
    """The surface divergence without its term -x^T Df x, which is evaluated at sampled tokens only."""
    trace = parts.jacobian.trace - (parts.mean_slope if centered else 0.0)
    return trace - (dim - 1 - centered) * inner


def _reads_unit_vectors(point: Tensor, weights: Tensor) -> bool:
    """Whether the points of the tokens that count are unit vectors, but for rounding."""
    gap = torch.where(weights > 0, torch.linalg.vector_norm(point, dim=-1) - 1, 0.0)
    return float(gap.abs().max()) <= NEAR_UNIT


def prepared_force(
    cache: dict[int, PreparedMLP | PreparedMixture], context: ReplayContext, tensors: MlpTensors, x: Tensor
) -> PreparedMLP | PreparedMixture:
    """The prepared force of a layer, from the cache if an earlier chunk left it there and memory allows.

    >>> from helmscope.types import Half, MlpTensors, ReplayContext
    >>> mlp, x, cache = MLP(w_in=torch.eye(2), w_out=torch.eye(2)), torch.eye(2)[None], {}
    >>> _ = prepared_force(cache, ReplayContext(3, Half.MLP, 0.0, slice(0, 1)), MlpTensors(x, x, mlp, x), x)
    >>> list(cache)
    [3]
    """
    if context.layer not in cache:
        prepared = prepare(tensors.force, like=x, unfolded=tensors.unfolded, norm=tensors.norm)
        numbers = len(prepared.algebra.rows) ** 2 if isinstance(prepared, PreparedMLP) else CACHED_NUMBERS
        if numbers * (len(cache) + 1) > CACHED_NUMBERS:
            cache.clear()
        cache[context.layer] = prepared
    return cache[context.layer]


def unit_points(instrument: Instrument, context: ReplayContext, points: Tensor | None, weights: Tensor) -> Tensor:
    """The points at which the force is evaluated, as unit vectors. Tokens of weight 0, such as padding, may have no
    direction: they are replaced by the first basis vector.

    >>> from helmscope.types import Half, ReplayContext
    >>> context = ReplayContext(0, Half.MLP, 0.0, slice(0, 1))
    >>> unit_points(MlpForce(), context, torch.tensor([[[1.05, 0.0]]]), torch.ones(1, 1))
    tensor([[[1., 0.]]])
    """
    assert points is not None
    axis = torch.zeros_like(points)
    axis[..., 0] = 1.0
    points = torch.where((weights > 0).unsqueeze(-1), points, axis)
    length = torch.linalg.vector_norm(points, dim=-1)
    broken = ~torch.isfinite(length)
    if bool(broken.any()):
        row, token = (int(i) for i in broken.nonzero()[0])
        raise HelmscopeError(
            f"system has a state that is not finite, at {instrument.plan.replicate} {context.rows.start + row}, layer "
            f"{context.layer}, token {token}, but {instrument.name} needs finite states"
        )
    if bool(((length - 1).abs() > 0.1).any()):
        raise HelmscopeError(
            f"system has an MLP that reads points of length {float(length.min()):.3g} to {float(length.max()):.3g}, "
            "but drift on a sphere needs a norm before it"
        )
    unit: Tensor = points / length.unsqueeze(-1)
    return check_tokens(unit, name=f"points of layer {context.layer}")


def _ratio_of_squared_sums(numerator: Tensor, denominator: Tensor, weights: Tensor) -> Tensor:
    above, below = (torch.where(weights > 0, weights * value * value, 0.0) for value in (numerator, denominator))
    return above.sum(-1) / below.sum(-1)
