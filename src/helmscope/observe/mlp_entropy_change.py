"""The exact change of entropy over an MLP half-step, and its first order [Helmholtz Transformer, no. 6].

An MLP half-step maps each token by itself: with its direction x, its recorded radius r and the force f,

    T(x) = N(r x + f(x)),      Delta H = E log |det D_S T(x)|,

where D_S T is the derivative from the tangent space at x to that at T(x). This holds for any law of the tokens, without
an estimate of its density. With y = r x + f(x), M = r I + Df and t the dimension of the tangent spaces

    log |det D_S T| = log |det(M P + y x^T)| - (t + 1) log |y|,

since in orthonormal bases that end with x and y / |y| the matrix is block triangular, with D_S T times |y| and |y| on
its diagonal. After a LayerNorm everything happens among vectors of mean 0: t = d - 2, and f loses its mean. The first
order in f / r is the divergence of the drift b = P f / r,

    E div_S b = E[tr Df - x^T Df x - t <x, f>] / r.

A post-norm block reads and adds to the same state, the output z = sqrt(d) G c x + b of a norm with gain G and bias b, c
slightly below 1 because of its epsilon, and closes with another norm. On the sphere of directions before gain and bias

    T(x) = N(z + f(c x)),      M = sqrt(d) c G + Df,      b = P y / <x, z>,

so that gain and bias are a part of the map; r in the first order is <x, z>, the part of z along x.

How to read it. Below 0 the MLP gathers the tokens, above 0 it spreads them. Where the two differ, the half-step is too
large for the entropy identity of a flow.
How it fails. A singular map, such as one that sends a neighborhood to a point, has Delta H = -infinity: NaN, counted in
``singular_count``. An attention half-step is not a map of one token, and has no such change. The radius of each token
is kept fixed: that a cloud of states also moves in radius is left out.
Cost. One replay, and a d x d Jacobian with its LU decomposition for each sampled token, O(h d^2 + d^3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.fields.jacobian_algebra import jacobian_algebra, slopes_of
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import angle
from helmscope.models.recording import Recording
from helmscope.models.topology import Kind
from helmscope.observe.labels import label_attributes
from helmscope.observe.token_choice import spaced_tokens, taken
from helmscope.observe.track import AT_LEAST_0, check_system, token_mean, token_weights, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.solve.layer import Layer
from helmscope.solve.simulation import Simulation
from helmscope.types import HelmscopeError, Instrument, Needs, check_integer, type_with_article

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.mlp import Force
    from helmscope.fields.norms import Norm
    from helmscope.types import MlpTensors, ReplayContext, System, Trajectory
    from helmscope.types.progress import ProgressOption

TOKENS = 16  # of each prompt
ENTRIES = 2**22  # of Jacobians in memory at a time
LABELS = {
    "entropy_change": "exact change of entropy over the MLP half-step, E log |det D_S T| (nats)",
    "first_order_entropy_change": "entropy change of the MLP to first order, E div_S(P f) / r (nats)",
    "token_entropy_change": "log |det D_S T| of a token (nats)",
    "token_first_order_entropy_change": "div_S(P f) / r of a token (nats)",
    "token": "position of the sampled token",
    "singular_count": "sampled tokens at which the map is singular",
}
# largest angle between T(x) and the recorded next direction, by the dtype in which the model runs
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True, eq=False)
class SphereMap:
    """T(x) at each point: ``log_det`` = log |det D_S T|, NaN where D_S T is singular, ``divergence`` = div_S(P f) / r,
    and ``image`` = T(x).

    >>> from helmscope.fields.mlp import MLP
    >>> from helmscope.fields.activations import Identity
    >>> stretch = MLP(w_in=torch.eye(2), w_out=torch.diag(torch.tensor([1.0, 0.0])), activation=Identity())
    >>> sphere_map(stretch, torch.tensor([[1.0, 0.0]]), torch.ones(1)).log_det.exp()  # x -> N(diag(2, 1) x)
    tensor([0.5000], dtype=torch.float64)
    """

    log_det: Float[Tensor, "*batch"]
    divergence: Float[Tensor, "*batch"]
    image: Float[Tensor, "*batch d"]


@full_precision
def tangent_log_det(
    matrix: Float[Tensor, "*batch d d"], x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"], *, centered: bool
) -> Float[Tensor, "*batch"]:
    """log |det D_S T| of T = y / |y|, from the derivative M of y in R^d along the tangent vectors of the unit vector x:

        log |det(M P + y x^T)| - (t + 1) log |y|,

    with ``centered`` among vectors of mean 0. NaN where it is singular within rounding.

    >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    >>> x = torch.tensor([0.6, 0.8], dtype=torch.float64)
    >>> abs(tangent_log_det(turn, x, turn @ x, centered=False).item()) < 1e-14
    True
    """
    d = x.shape[-1]
    if centered:
        matrix = matrix - matrix.mean(-2, keepdim=True)
        matrix = matrix - matrix.mean(-1, keepdim=True)
        y = y - y.mean(-1, keepdim=True)
    along = (matrix @ x.unsqueeze(-1)).squeeze(-1)
    whole = matrix + (y - along).unsqueeze(-1) * x.unsqueeze(-2)
    if centered:
        whole = whole + 1 / d  # the identity on the multiples of (1, ..., 1)
    pivots = lu.lu_factor_ex(whole)[0].diagonal(dim1=-2, dim2=-1).abs()
    regular = pivots.amin(-1) > d * torch.finfo(x.dtype).eps * pivots.amax(-1)
    length = torch.linalg.vector_norm(y, dim=-1)
    return torch.where(regular, pivots.log().sum(-1) - (d - centered) * length.log(), torch.nan)


@full_precision
def sphere_map(
    force: Force,
    x: Float[Tensor, "*batch d"],
    radius: Float[Tensor, "*batch"],
    *,
    length: Float[Tensor, "*batch"] | None = None,
    norm: Norm | None = None,
    centered: bool = False,
) -> SphereMap:
    """The map of an MLP half-step on the sphere, T(x) = N(r x + f(c x)), at unit vectors x of radius r, in float64, a
    chunk of points at a time.

    ``length`` c is that of the point at which the force is evaluated: slightly below 1 where the epsilon of a norm
    matters, by default 1. With ``norm``, that of a post-norm block, the state sqrt(d) G c x + b of its gain and bias
    takes the place of r x. With ``centered`` x has mean 0, and y loses its mean. Raises HelmscopeError for a force that
    is neither an MLP nor a GatedMLP.

    >>> from helmscope.fields.mlp import MLP
    >>> sphere_map(MLP(w_in=torch.eye(2), w_out=torch.zeros(2, 2)), torch.eye(2), torch.ones(2)).divergence
    tensor([0., 0.], dtype=torch.float64)
    """
    if not isinstance(force, MLP | GatedMLP):
        raise HelmscopeError(f"force is {type_with_article(force)}, but it must be an MLP or a GatedMLP")
    shape, d = x.shape[:-1], x.shape[-1]
    points, r = x.reshape(-1, d).double(), radius.reshape(-1).double()
    c = torch.ones_like(r) if length is None else length.reshape(-1).double()
    algebra = jacobian_algebra(force, like=points, centered=centered)
    step, tangents, parts = max(1, ENTRIES // d**2), d - 1 - centered, []
    for i in range(0, len(points), step):
        at, c_i = points[i : i + step], c[i : i + step, None]
        carried, scale = _carried(at, r[i : i + step, None], c_i, norm)
        f = force.ambient(c_i * at)
        y = carried + f
        y = y - y.mean(-1, keepdim=True) if centered else y
        matrix = c_i.unsqueeze(-1) * algebra.matrices(slopes_of(force, c_i * at)) + torch.diag_embed(scale)
        log_det = tangent_log_det(matrix, at, y, centered=centered)
        radial = ((matrix @ at.unsqueeze(-1)).squeeze(-1) * at).sum(-1)
        trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1) - (matrix.mean((-2, -1)) * d if centered else 0.0)
        divergence = (trace - radial - tangents * (at * y).sum(-1)) / (at * carried).sum(-1)
        parts.append((log_det, divergence, y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)))
    log_det, divergence, image = (torch.cat(each) for each in zip(*parts, strict=True))
    return SphereMap(log_det.reshape(shape), divergence.reshape(shape), image.reshape(x.shape))


def _carried(x: Tensor, radius: Tensor, length: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """The state to which an MLP adds, at directions x, and its derivative by x, which is diagonal."""
    if norm is None:
        return radius * x, radius.expand_as(x)
    gain = torch.ones_like(x[0]) if norm.gain is None else norm.gain.to(x)
    scale = length * math.sqrt(x.shape[-1]) * gain
    return scale * x + (0.0 if norm.bias is None else norm.bias.to(x)), scale


class _MapEntropy(Instrument):
    """Instrument: the maps of sampled tokens, compared with the next states of ``path``, which it must reproduce;
    ``norms`` are those that post-norm blocks add to, by layer, and ``allowed`` is the largest angle between the two.
    """

    name = "mlp_entropy_change"
    needs = Needs.FORCE | Needs.MLP

    def __init__(
        self, path: Trajectory, sampled_tokens: int | None, allowed: float, norms: Mapping[int, Norm] | None = None
    ) -> None:
        self.path, self.sampled_tokens, self.allowed, self.norms = path, sampled_tokens, allowed, norms or {}
        self.singular = ""
        self.dim = 0

    def mlp(self, context: ReplayContext, tensors: MlpTensors) -> None:
        """Records the maps at the inputs of the MLP."""
        weights = token_weights(tensors.state, context.weights).double()
        start, replicate = context.rows.start, self.plan.replicate
        chosen, counts = spaced_tokens(weights, self.sampled_tokens, replicate=replicate, start=start)
        assert tensors.point is not None
        state, point = (taken(each, chosen).double() for each in (tensors.state, tensors.point))
        state = state - state.mean(-1, keepdim=True) if context.centered else state
        radius = torch.linalg.vector_norm(state, dim=-1)
        _check_directions(radius, counts, context, replicate, chosen)
        norm, length = self.norms.get(context.layer), torch.linalg.vector_norm(point, dim=-1)
        x = state / radius.unsqueeze(-1) if norm is None else point / length.unsqueeze(-1)
        step = 1.0 if context.step is None else context.step
        # h f(x) with radius r moves the direction as f(x) with radius r / h
        found = sphere_map(tensors.force, x, radius / step, length=length, norm=norm, centered=context.centered)
        self._compare(context, found, chosen, counts)
        self._keep(context, found, chosen, counts, taken(weights, chosen) * counts)
        self.dim = x.shape[-1] - 1 - context.centered

    def _keep(self, context: ReplayContext, found: SphereMap, chosen: Tensor, counts: Tensor, m: Tensor) -> None:
        tokens = {
            "token_entropy_change": found.log_det,
            "token_first_order_entropy_change": found.divergence,
            "token": chosen.double(),
        }
        tokens = {name: torch.where(counts, value, torch.nan) for name, value in tokens.items()}
        singular = found.log_det.isnan() & counts
        if bool(singular.any()) and not self.singular:
            row, k = (int(index) for index in singular.nonzero()[0])
            self.singular = (
                f"{self.plan.replicate} {context.rows.start + row}, layer {context.layer}, token {int(chosen[row, k])}"
            )
        means = {
            name: token_mean(tokens[f"token_{name}"], m) for name in ("entropy_change", "first_order_entropy_change")
        }
        self.keep(context, means | {"singular_count": singular.sum(-1).double()})
        self.keep(context, tokens, axes=("sample",))

    def _compare(self, context: ReplayContext, found: SphereMap, chosen: Tensor, counts: Tensor) -> None:
        """Raises HelmscopeError where T(x) is not the next direction; the last state has none."""
        after = context.layer + 1
        if self.plan.axis == "layer":  # of a model, whose states are counted in half-layers
            after = int(context.time - float(self.path.times[0])) + 1
        if after >= len(self.path.states):
            return
        following = taken(self.path.states[after][context.rows].to(found.image.device), chosen).double()
        error = torch.where(counts, angle(found.image, following), 0.0)
        if not bool((error <= self.allowed).all()):
            row, k = divmod(int(error.nan_to_num(nan=torch.inf).argmax()), error.shape[-1])
            form = "N(z + f(x))" if self.norms else "N(r x + f(x))"
            raise HelmscopeError(
                f"system moves token {int(chosen[row, k])} of {self.plan.replicate} {context.rows.start + row} in "
                f"layer {context.layer} by another map than {form}, {float(error[row, k]):.2g} rad from it, but "
                "mlp_entropy_change needs half-steps of the MLP alone (not edited, and stored one by one)"
            )

    def result(self) -> xr.Dataset:
        """The changes of entropy of every layer and replicate."""
        measured = super().result()
        for name, value in measured.data_vars.items():
            value.attrs |= label_attributes(LABELS[str(name)])
        singular = f"NaN, first at {self.singular}" if self.singular else "none"
        measured.attrs |= {
            "sphere": f"direction of the state that the MLP reads{', without gain and bias' if self.norms else ''}",
            "radius": "recorded radius of each token",
            "dimension": self.dim,
            "sampled_tokens": "all" if self.sampled_tokens is None else self.sampled_tokens,
            "singular_maps": singular,
        }
        return with_bounds(measured, {"singular_count": AT_LEAST_0, "token": AT_LEAST_0})


def _check_directions(radius: Tensor, counts: Tensor, context: ReplayContext, replicate: str, chosen: Tensor) -> None:
    """Raises HelmscopeError for a state that is 0 or not finite, which has no direction."""
    bad = ~(torch.isfinite(radius) & (radius > 0)) & counts
    if bool(bad.any()):
        row, k = (int(index) for index in bad.nonzero()[0])
        raise HelmscopeError(
            f"system has a state without a direction, of length {float(radius[row, k]):g}, at {replicate} "
            f"{context.rows.start + row}, layer {context.layer}, token {int(chosen[row, k])}, but "
            "mlp_entropy_change needs finite states that are not 0"
        )


@shows_progress("entropy of maps")
def mlp_entropy_change(
    system: System, *, sampled_tokens: int | None = TOKENS, progress: ProgressOption = None
) -> xr.Dataset:
    """The exact change of entropy of every MLP half-step, E log |det D_S T| with T(x) = N(r x + f(x)), and its first
    order E div_S(P f) / r, over (layer, prompt).

    Both are means over the same ``sampled_tokens`` of each prompt, evenly spaced among those that count, without the
    first (all of them if None), so that the spread between prompts contains the error of sampling;
    ``token_entropy_change`` and ``token_first_order_entropy_change`` are those of each token, along ``sample``, and
    ``token`` its position. r is the recorded radius of each token; in a post-norm block T(x) = N(z + f(x)) with the
    state z after its norm, gain and bias included. NaN where the map of a sampled token is singular (the entropy
    becomes -infinity): ``singular_count`` counts them, and the attribute ``singular_maps`` names the first. T must
    reproduce the recorded next direction.

    Raises HelmscopeError, as ``entropy_change_unsupported`` says, for flows, parallel blocks, norms after the MLP and
    mixtures of experts, and where T does not reproduce what happened: edited writes, noise, or layers that were not all
    stored.

    >>> from helmscope import record
    >>> measured = mlp_entropy_change(record("A", ["Once upon a time there was a cat"]), sampled_tokens=2)
    >>> measured.entropy_change.dims, bool((measured.entropy_change < 0).all())  # the MLPs of A gather tokens
    (('layer', 'prompt'), True)
    """
    sampled_tokens = None if sampled_tokens is None else check_integer("sampled_tokens", sampled_tokens, at_least=1)
    reason = entropy_change_unsupported(check_system(system))
    if reason is not None:
        raise HelmscopeError(reason)
    path = system.on_sphere if isinstance(system, Recording) else system.trajectory
    dtype = system.anatomy.model.dtype if isinstance(system, Recording) else path.states.dtype
    instrument = _MapEntropy(path, sampled_tokens, TOLERANCE[dtype], _norms_of(system))
    return system.replay(instrument, progress=progress)[instrument.name]


def entropy_change_unsupported(system: System) -> str | None:
    """Why the half-steps of a system's MLPs are not maps N(r x + f(x)) of a token with a known f; None if they are.

    >>> from helmscope import record
    >>> entropy_change_unsupported(record("A", ["Once upon a time"])) is None
    True
    """
    refused = system.unsupported_reason(_MapEntropy(system.trajectory, TOKENS, 0.0))
    if refused is not None:
        return refused
    if isinstance(system, Recording):
        return block_unsupported(system, "mlp_entropy_change", post_norm=True)
    if not isinstance(system, Simulation) or not isinstance(system.problem.stepper, Layer):
        return (
            "system is a flow, but mlp_entropy_change needs layers, whose MLP maps a token at once: stepper=hs.Layer()"
        )
    return None


def _norms_of(system: System) -> dict[int, Norm]:
    """The norms whose outputs the MLPs of post-norm blocks read and add to, by layer."""
    if not isinstance(system, Recording) or not system.anatomy.post_norm:
        return {}
    norms = {layer: system.anatomy.layers[layer].mlp_norm for layer in system.layers}
    return {layer: norm for layer, norm in norms.items() if norm is not None}


def block_unsupported(recording: Recording, name: str, *, post_norm: bool = False) -> str | None:
    """Why the MLPs of a recording do not add f(x), f an MLP, to the state that they read; None if they do. ``name`` is
    what needs it, and ``post_norm`` whether that state may be the output of a norm with its gain and bias.

    >>> from helmscope import record
    >>> block_unsupported(record("A", ["Once upon a time"]), "mlp_entropy_change") is None
    True
    """
    try:
        recording.certificate.require("force")
    except HelmscopeError as error:
        return str(error)
    kinds = (Kind.SEQUENTIAL, Kind.POST_NORM) if post_norm else (Kind.SEQUENTIAL,)
    for number in recording.layers:
        layer = recording.anatomy.layers[number]
        if layer.wiring.kind not in kinds or layer.wiring.sandwich:
            kind = "norms after its halves" if layer.wiring.sandwich else f"{layer.wiring.kind.value} blocks"
            return f"system has {kind}, but {name} needs MLPs that add to the state they read, with no norm after it"
        if layer.mlp_norm is None:
            return f"system has no norm before the MLP of layer {number}, but {name} needs one that reads unit vectors"
        force = recording.force(layer=number)
        if not isinstance(force, MLP | GatedMLP):
            return f"system has {type_with_article(force)} as force(layer={number}), but {name} needs an MLP"
    return None
