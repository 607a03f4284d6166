"""Whether an MLP half-step projects tokens onto the token cloud: how it stretches small perturbations of a token off
the cloud and along it, and what it does when it is applied again.

With z the state of a token that the MLP reads (without its mean, where norms remove it), N(z) = z / |z|, and
T(z) = z + f(z) the half-step, a turn of the direction x = N(z) by a small tangent w becomes D w, the derivative of
x -> N(T(|z| x)). The cloud near x is that of the nearest directions of tokens of OTHER prompts at the same depth: their
differences to their mean m, projected to the tangent space at x, have principal axes b_1, ..., b_k, which span the
directions along the cloud. Random orthonormal tangents c_1, ..., c_k orthogonal to them are off the cloud, and

    growth_along^2 = mean |D b_j|^2,    growth_off^2 = mean |D c_j|^2,    growth_ratio = growth_off / growth_along,

means over the sampled tokens of a prompt. The defect of idempotence is |T(T(z)) - T(z)| / |T(z) - z|, the mean over
these tokens. Source: [Additive transport], Section 9.4, which says that the MLP is a projection.

Closed forms. T = identity: ratio 1. Moving states by a share s of the way to a fixed plane: ratio 1 - s, defect 1 - s.
A projection: ratio 0, defect 0. A constant write: defect 1.
How to read it. A ratio below 1 does not need a manifold: an MLP that stretches what it reads most, the axes along which
tokens differ, has one too. The null assigns b_1, ..., c_k at random to the two kinds.
How it fails. The nearest of a few thousand tokens in some hundred dimensions are not near (``neighbor_angle``), and
their axes describe the cloud at that scale. A token whose neighbors span fewer than k dimensions does not count.
Cost. No forward pass; derivatives along 2 k directions at each sampled token, about 2 k forward passes of its MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import angle, project, retract
from helmscope.models.names import Layers, chosen_layers
from helmscope.models.recording import Recording
from helmscope.observe.frozen_token import orthonormal
from helmscope.observe.labels import label_attributes
from helmscope.observe.mlp_entropy_change import TOLERANCE, block_unsupported
from helmscope.observe.pairs import first_tokens_alone, without_first_token
from helmscope.observe.token_choice import spaced_tokens, taken
from helmscope.observe.track import token_weights
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_progress,
    check_real,
    check_replicates,
    check_seed,
    identity_coordinates,
    pluralized,
    type_with_article,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types.progress import ProgressOption

Map = Callable[["Tensor"], "Tensor"]  # of states (tokens, d), token by token
NEIGHBORS, PRINCIPAL_AXES = 16, 8
STREAM = 23  # of random numbers, different from those of other measurements
BLOCK = 512  # tokens whose neighbors are found at a time
FLAT = 1e-6  # of the largest spread of the neighbors: a smaller one is no dimension of the cloud
LABELS = {
    "growth_ratio": "growth of perturbations off the token cloud over that of perturbations along it",
    "growth_off": "growth of perturbations off the token cloud",
    "growth_along": "growth of perturbations along the token cloud",
    "idempotence_defect": "|T(T(z)) - T(z)| over |T(z) - z| of the half-step T",
    "neighbor_angle": "mean angle of a token to its nearest neighbors in other prompts (radians)",
}


@dataclass(frozen=True, eq=False)
class LocalCloud:
    """The cloud near each of some tokens: the ``mean`` of its nearest neighbors, their orthonormal principal ``axes``
    in the tangent space of the token, the mean ``angle`` to them, and whether they span (``spans``) as many dimensions.
    """

    mean: Float[Tensor, "tokens d"]
    axes: Float[Tensor, "count tokens d"]
    angle: Float[Tensor, " tokens"]
    spans: Bool[Tensor, " tokens"]


@full_precision
def local_cloud(
    x: Float[Tensor, "tokens d"],
    cloud: Float[Tensor, "others d"],
    *,
    neighbors: int,
    principal_axes: int,
    hidden: Bool[Tensor, "tokens others"] | None = None,
) -> LocalCloud:
    """The cloud near unit vectors x: the ``principal_axes`` first principal axes of the ``neighbors`` nearest of
    ``cloud``, without those that are ``hidden`` from a token.

    >>> cloud = torch.tensor([[0.8, 0.6, 0.0], [0.8, -0.6, 0.0], [0.0, 0.0, -1.0]]).double()
    >>> local_cloud(torch.eye(3)[:1].double(), cloud, neighbors=2, principal_axes=1).axes.abs()
    tensor([[[0., 1., 0.]]], dtype=torch.float64)
    """
    near = x @ cloud.mT
    near = near if hidden is None else near.masked_fill(hidden, -math.inf)
    nearest = cloud[near.topk(neighbors, dim=-1).indices]
    inside = project(x.unsqueeze(1), nearest)
    _, sizes, axes = torch.linalg.svd(inside - inside.mean(1, keepdim=True), full_matrices=False)
    spans = sizes[:, principal_axes - 1] > FLAT * sizes[:, 0]
    along = orthonormal(project(x, axes[:, :principal_axes].transpose(0, 1)))
    return LocalCloud(nearest.mean(1), along, angle(x.unsqueeze(1), nearest).mean(1), spans)


@full_precision
def directional_growth(
    half_step: Map, z: Float[Tensor, "tokens d"], w: Float[Tensor, "count tokens d"]
) -> Float[Tensor, "count tokens"]:
    """|D w|, D the derivative of x -> N(T(|z| x)) at the direction x of each state z, along unit tangents w.

    >>> z = torch.tensor([[2.0, 0.0]]).double()
    >>> directional_growth(lambda y: y * torch.tensor([1.0, 3.0]).double(), z, torch.tensor([[[0.0, 1.0]]]).double())
    tensor([[3.]], dtype=torch.float64)
    """
    radius = torch.linalg.vector_norm(z, dim=-1, keepdim=True)

    def turned(tangent: Tensor) -> Tensor:
        y, dy = torch.func.jvp(half_step, (z,), (radius * tangent,))[:2]
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        change: Tensor = project(y / length, dy) / length
        return change

    growth: Tensor = torch.linalg.vector_norm(torch.func.vmap(turned)(w), dim=-1)
    return growth


def idempotence_defect(half_step: Map, z: Float[Tensor, "tokens d"]) -> Float[Tensor, " tokens"]:
    """|T(T(z)) - T(z)| / |T(z) - z| at each state; NaN where T(z) = z.

    >>> idempotence_defect(lambda y: y / 2, torch.ones(1, 2))
    tensor([0.5000])
    """
    once = half_step(z)
    first, second = (torch.linalg.vector_norm(each, dim=-1) for each in (once - z, half_step(once) - once))
    return torch.where(first > 0, second / torch.where(first > 0, first, 1.0), torch.nan)


@shows_progress("projection on the cloud")
def cloud_projection(
    recording: Recording,
    *,
    neighbors: int = NEIGHBORS,
    principal_axes: int = PRINCIPAL_AXES,
    sampled_tokens: int | None = 16,
    planted_share: float | None = None,
    layers: Layers | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Growth, over each MLP half-step, of small perturbations of a token off and along the local token cloud, their
    ratio, and the defect of idempotence, along (layer, prompt).

    The cloud near a token has the ``principal_axes`` first principal axes of its ``neighbors`` nearest neighbors in
    other prompts; as many random directions are off it. ``growth_ratio_null`` assigns all of them at random.
    ``sampled_tokens`` of each prompt are sampled, evenly spaced without the first; None takes all of them. With
    ``planted_share`` s the half-step is replaced by z - s (z - p), p the nearest point of the plane through the mean of
    the neighbors along these axes, whose ratio and defect are 1 - s.

    NaN where no token counts. Raises HelmscopeError for models whose MLPs do not add to the state that they read, or
    are mixtures of experts, for edited writes, and where other prompts have fewer tokens than ``neighbors``.

    >>> from helmscope import record
    >>> recording = record("A", ["Once upon a time there was a cat", "The dog ran into the garden", "Tom was sad"])
    >>> cloud_projection(recording, neighbors=4, principal_axes=2, sampled_tokens=2).growth_ratio.dims
    ('layer', 'prompt')
    """
    refused = cloud_unsupported(recording)
    if refused is not None:
        raise HelmscopeError(refused)
    count, axes = (
        check_integer("neighbors", neighbors, at_least=2),
        check_integer("principal_axes", principal_axes, at_least=1),
    )
    chosen = chosen_layers(recording, layers)
    small = cloud_too_small(recording, count, axes)
    if small is not None:
        raise HelmscopeError(small)
    share = None if planted_share is None else check_real("planted_share", planted_share, at_least=0)
    sampled = None if sampled_tokens is None else check_integer("sampled_tokens", sampled_tokens, at_least=1)
    report, seed = check_progress(progress), check_seed(seed)
    rows = []
    for done, layer in enumerate(chosen, 1):
        rows.append(_measured(_HalfStep.of(recording, layer), count, axes, sampled, share, seed))
        report(done / len(chosen))
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    data = {
        name: (("layer", "prompt"), values, {**label_attributes(LABELS[name.removesuffix("_null")]), "valid_min": 0.0})
        for name, values in stacked.items()
    }
    coords = {"layer": chosen, "prompt": np.arange(len(recording.batch))}
    attributes = {"title": "projection on the token cloud", "neighbors": count, "principal_axes": axes, "seed": seed}
    attributes |= {
        "sampled_tokens": "all" if sampled is None else sampled,
        "half_step": "MLP" if share is None else "planted",
    }
    measured = xr.Dataset(data, coords | identity_coordinates("prompt", recording.batch.identities), attributes)
    return check_replicates(measured)


def cloud_unsupported(recording: object) -> str | None:
    """One sentence that says why a system does not support ``cloud_projection``; None if it does.

    >>> cloud_unsupported(None)
    'recording is a NoneType, but it must be a Recording'
    """
    if not isinstance(recording, Recording):
        return f"recording is {type_with_article(recording)}, but it must be a Recording"
    if len(recording.batch) < 2:
        return "recording has 1 prompt, but the token cloud is that of other prompts"
    return block_unsupported(recording, "cloud_projection") or first_tokens_alone(recording, "cloud_projection")


def cloud_too_small(
    recording: Recording, neighbors: int = NEIGHBORS, principal_axes: int = PRINCIPAL_AXES
) -> str | None:
    """One sentence that says why the tokens of a recording have no local clouds of this size: its directions have too
    few dimensions, or the other prompts of a prompt too few tokens; None if they have.

    >>> from helmscope import record
    >>> cloud_too_small(record("A", ["Once upon a time", "The dog"]), 2, 1)
    'neighbors is 2, but the prompts other than one have only 1 token that count, without their first'
    """
    room = recording.anatomy.dim - 1 - recording.anatomy.centered
    if principal_axes >= neighbors or 2 * principal_axes > room:
        return (
            f"principal_axes is {principal_axes}, but it must be below neighbors, {neighbors}, and at most half of the "
            f"dimension of the directions, {room}"
        )
    counted = without_first_token(recording.trajectory).weights
    assert counted is not None
    counts = (counted[0] > 0).sum(-1)
    others = int(counts.sum() - counts.max())
    if others >= neighbors:
        return None
    return (
        f"neighbors is {neighbors}, but the prompts other than one have only {pluralized(others, 'token')} that count, "
        "without their first"
    )


@dataclass(frozen=True, eq=False)
class _HalfStep:
    """One MLP half-step: the states (batch, n, d) before and after it, which tokens count, and its map of states."""

    layer: int
    states: Tensor
    following: Tensor
    weights: Tensor
    map: Map
    allowed: float
    centered: bool

    @classmethod
    def of(cls, recording: Recording, layer: int) -> _HalfStep:
        anatomy, counted = recording.anatomy, recording.batch.counted
        force, centered = recording.force(layer=layer), anatomy.centered
        norm = anatomy.layers[layer].mlp_norm
        assert norm is not None  # as block_unsupported says
        plain = norm.without_affine()

        def half_step(z: Tensor) -> Tensor:
            return z + _without_mean(force.ambient(plain(z) / math.sqrt(z.shape[-1])), centered)

        after = anatomy.depths.steps * (layer + 1)
        states, following = (
            _without_mean(recording.residual_stream(depth=k).double(), centered) for k in (after - 1, after)
        )
        weights = token_weights(states, None if counted is None else counted.to(states.device))
        allowed = TOLERANCE[anatomy.model.dtype]
        return cls(layer, states, following, weights, half_step, allowed, centered)

    def check(self, z: Tensor, following: Tensor) -> None:
        """Raise HelmscopeError unless the map takes the directions of states to the recorded next ones."""
        error = angle(retract(self.map(z)), retract(following))
        if not bool((error <= self.allowed).all()):
            raise HelmscopeError(
                f"recording moves a token in layer {self.layer} by another map than z + f(z), "
                f"{float(error.nan_to_num(nan=torch.inf).max()):.2g} rad from it, but cloud_projection needs MLPs that "
                "are not edited"
            )


def _measured(
    step: _HalfStep, neighbors: int, principal_axes: int, sampled_tokens: int | None, share: float | None, seed: int
) -> dict[str, np.ndarray]:
    """The values of every prompt at one half-step."""
    chosen, counts = spaced_tokens(step.weights, sampled_tokens)
    prompts = torch.arange(len(chosen), device=chosen.device).unsqueeze(-1).expand(chosen.shape)[counts]
    z, following = (taken(each, chosen)[counts] for each in (step.states, step.following))
    step.check(z, following)
    members = step.weights > 0
    members[:, 0] = False
    owner = members.nonzero()[:, 0]
    draw = np.random.default_rng([seed, STREAM, step.layer])
    cloud, parts = retract(step.states[members]), []
    for part in torch.split(torch.arange(len(z), device=z.device), BLOCK):
        hidden = prompts[part].unsqueeze(-1) == owner
        near = local_cloud(retract(z[part]), cloud, neighbors=neighbors, principal_axes=principal_axes, hidden=hidden)
        parts.append(_of_tokens(step if share is None else _toward(step, near, z[part], share), near, z[part], draw))
    along, off, null_along, null_off, defect, nearness, spans = (torch.cat(each) for each in zip(*parts, strict=True))
    used = [(prompts == prompt) & (spans > 0) for prompt in range(len(chosen))]

    def root_mean(squares: Tensor) -> np.ndarray:
        return np.array([float(squares[each].mean().sqrt()) for each in used])

    return {
        "growth_ratio": root_mean(off) / root_mean(along),
        "growth_ratio_null": root_mean(null_off) / root_mean(null_along),
        "growth_off": root_mean(off),
        "growth_along": root_mean(along),
        "idempotence_defect": np.array([float(defect[each].nanmean()) for each in used]),
        "neighbor_angle": np.array([float(nearness[each].mean()) for each in used]),
    }


def _of_tokens(step: _HalfStep, near: LocalCloud, z: Tensor, draw: np.random.Generator) -> tuple[Tensor, ...]:
    """Mean squared growths along and off the cloud, the same with directions assigned at random, the defect, the angle
    to the neighbors and whether they span enough dimensions, of each token.
    """
    x, principal_axes = retract(z), len(near.axes)
    noise = project(x, _without_mean(torch.from_numpy(draw.standard_normal(near.axes.shape)).to(z), step.centered))
    off = orthonormal(torch.cat([near.axes, noise]))[principal_axes:]
    squares = directional_growth(step.map, z, torch.cat([near.axes, off])).square()
    shuffled = torch.from_numpy(draw.permuted(squares.cpu().numpy(), axis=0)).to(squares)
    means = [each.mean(0) for both in (squares, shuffled) for each in (both[:principal_axes], both[principal_axes:])]
    return (*means, idempotence_defect(step.map, z), near.angle, near.spans.double())


def _toward(step: _HalfStep, near: LocalCloud, z: Tensor, share: float) -> _HalfStep:
    """The half-step replaced by z -> z - s (z - p), p the nearest point of the plane through the mean of the neighbors,
    at the radius of the token, along their axes.
    """
    center = torch.linalg.vector_norm(z, dim=-1, keepdim=True) * near.mean

    def half_step(state: Tensor) -> Tensor:
        moved = state - center
        inside = ((moved * near.axes).sum(-1, keepdim=True) * near.axes).sum(0)
        planted: Tensor = state - share * (moved - inside)
        return planted

    return replace(step, map=half_step)


def _without_mean(value: Tensor, centered: bool) -> Tensor:
    return value - value.mean(-1, keepdim=True) if centered else value
