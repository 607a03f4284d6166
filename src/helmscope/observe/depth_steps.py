"""Depth as time: the steps by which tokens move on the sphere from each stored state to the next.

For the unit directions x_i(k) of the tokens of a prompt at depth k, with weights m_i,

    angle            mean_i angle(x_i(k - 1), x_i(k)); median_angle is the median over tokens
    arc_length       sum_{l <= k} angle(l); net_angle is mean_i angle(x_i(0), x_i(k)) <= arc_length
    update_cosine    mean_i cos(T u_i(k - 1), u_i(k)) with u_i(k) = log(x_i(k - 1), x_i(k)), the step as a tangent,
                     and T the parallel transport of the step before it to the point x_i(k - 1) where both meet
    ambient_cosine   mean_i cos(x_i(k - 1) - x_i(k - 2), x_i(k) - x_i(k - 1)), of the chords in R^d
    radius           mean_i r_i(k), and radius_growth = mean_i log(r_i(k) / r_i(k - 1))

How to read it. Continuous time needs small angles: the relative error of a step of size h is of order h. update_cosine
near 1 is a smooth path, near 0 a random walk, and near -1 halves of a layer that undo each other; a circle traversed in
equal steps has exactly 1. The chords of the same circle turn by the angle of a step, so that ambient_cosine = cos(h):
it mixes the curvature of the sphere with that of the path. A growing radius slows the direction down, since a write f
moves it by P f / r.

How it fails. Where a token does not move its step has no direction: it is left out of the cosines, which are NaN where
no token moves. Between antipodal points there is no unique step. Cost: no forward pass (one for a post-norm model), and
one pass over the stored states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.linkage import collapse_padding
from helmscope.geometry.sphere import angle, retract
from helmscope.models.recording import Recording
from helmscope.observe.labels import label_attributes
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.track import AT_LEAST_0, token_mean, with_bounds, with_cumulative, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.types import Half, HelmscopeError, Trajectory, check_progress

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

LABELS = {
    "angle": "mean angle moved in a step (radians)",
    "median_angle": "median angle moved in a step (radians)",
    "arc_length": "cumulative mean angle moved (radians)",
    "net_angle": "mean angle from the first state (radians)",
    "update_cosine": "cosine of a step and the one before it, transported",
    "ambient_cosine": "cosine of successive chords in R^d",
    "radius": "mean radius",
    "radius_growth": "mean logarithmic growth of the radius in a step",
}
BOUNDS = {
    **dict.fromkeys(("angle", "median_angle", "arc_length", "net_angle", "radius"), AT_LEAST_0),
    **dict.fromkeys(("update_cosine", "ambient_cosine"), (-1.0, 1.0)),
}
CUMULATIVE = ("arc_length", "net_angle")  # since the first state
HALVES = {2: (Half.ATTENTION, Half.MLP), 3: (Half.ATTENTION, Half.CROSS, Half.MLP)}


@shows_progress("steps over depth")
def depth_steps(
    system: Trajectory | System, *, include_first_token: bool = False, progress: ProgressOption = None
) -> xr.Dataset:
    """The steps of the tokens of each prompt over (depth, prompt): angles moved, cumulative and net, cosines of
    successive steps, radius and its growth. Values at depth k describe the step that ends there.

    Those of steps are NaN at the first depth, and the cosines also at the second; ``arc_length`` and ``net_angle`` are
    0 at the first depth. The radius is included where the states have one. The coordinate ``half`` of a recording says
    which half of a layer made the step: attention, cross or mlp. A Recording is measured on the unit sphere
    (``on_sphere``): of the directions of the residual stream, in a post-norm model of the states without gain and bias.
    Tokens count by their weights; the first token, the usual attention sink, is left out unless
    ``include_first_token``. The times of a simulation must be dense enough for the polygon through its states to follow
    the flow. Raises HelmscopeError for states that are not finite. Everything is computed in float64, one depth at a
    time.

    >>> eighth_turns = torch.tensor([0.0, 0.25, 0.5]).double() * torch.pi
    >>> states = torch.stack([eighth_turns.cos(), eighth_turns.sin()], -1).reshape(3, 1, 1, 2)
    >>> steps = depth_steps(Trajectory(torch.arange(3.0), states), include_first_token=True)
    >>> [round(float(steps[name][2, 0]), 4) for name in ("angle", "arc_length", "update_cosine", "ambient_cosine")]
    [0.7854, 1.5708, 1.0, 0.7071]
    """
    path = sphere_and_ids(system, None)[0]
    path = check_finite(path if include_first_token else without_first_token(path))
    report, walk, columns = check_progress(progress), _Walk(path), []
    for k in range(len(path.states)):
        columns.append(walk.step(k))
        report((k + 1) / len(path.states))
    values = {name: torch.stack([column[name] for column in columns]) for name in columns[0]}
    # no step ends at the first state; where a prompt has no token that counts, there is no length
    first = 0.0 * values["net_angle"][:1]
    values["arc_length"] = torch.cat([first, values["angle"][1:]]).cumsum(0)
    measurement = with_cumulative(with_bounds(with_replicates(values, path), BOUNDS), path.axis, CUMULATIVE)
    for name in measurement.data_vars:
        measurement[name].attrs |= label_attributes(LABELS[str(name)])
    return with_halves(measurement, system).assign_attrs(
        sphere=sphere_text(system), include_first_token=int(include_first_token)
    )


class _Walk:
    """The values of one depth after the other, with the last state and the chord that led to it."""

    def __init__(self, path: Trajectory) -> None:
        self.path = path
        self.start = self.before = retract(path.states[0].double())
        self.chord: Tensor | None = None

    def step(self, k: int) -> dict[str, Float[Tensor, " batch"]]:
        """The values at the depth number k, one per prompt; the depths must be visited in order."""
        path, m = self.path, token_weights_at(self.path, k)
        undefined = torch.full_like(m[..., 0], torch.nan)
        names = ("angle", "median_angle", "update_cosine", "ambient_cosine")
        values = dict.fromkeys(names, undefined) | {"net_angle": torch.zeros_like(undefined)}
        if path.radius is not None:
            radius = path.radius[k].double()
            values["radius"] = token_mean(radius, m)
            values["radius_growth"] = (
                token_mean((radius / path.radius[k - 1].double()).log(), m) if k > 0 else undefined
            )
        if k == 0:
            return values
        x = retract(path.states[k].double())
        moved, chord = angle(self.before, x), x - self.before
        values |= {"angle": token_mean(moved, m), "median_angle": token_median(moved, m)}
        values["net_angle"] = token_mean(angle(self.start, x), m)
        if self.chord is not None:
            values |= _cosines(self.chord, chord, m)
        self.before, self.chord = x, chord
        return values


def _cosines(p: Tensor, q: Tensor, m: Tensor) -> dict[str, Tensor]:
    """The mean cosines of two successive steps with chords p = b - a and q = c - b, over tokens that move in both.

    The transported first step points along P_b p and the second along P_b q, and <b, p> = |p|^2/2, <b, q> = -|q|^2/2,
    so that <P_b p, P_b q> = <p, q> + |p|^2 |q|^2 / 4 and |P_b p|^2 = |p|^2 (1 - |p|^2 / 4).
    """
    inner, pp, qq = (p * q).sum(-1), p.square().sum(-1), q.square().sum(-1)
    tangential = (1 - pp / 4) * (1 - qq / 4)  # 0 if one step leads to the antipode, where its direction is lost
    squares = {"update_cosine": pp * qq * tangential, "ambient_cosine": pp * qq}
    products = {"update_cosine": inner + pp * qq / 4, "ambient_cosine": inner}
    cosines = {}
    for name, square in squares.items():
        defined = square > 0
        cosine = (products[name] / torch.where(defined, square, 1.0).sqrt()).clamp(-1, 1)
        cosines[name] = token_mean(cosine, torch.where(defined, m, 0.0))
    return cosines


def token_weights_at(path: Trajectory, k: int) -> Float[Tensor, "batch n"]:
    """The weights of the tokens at the depth number k, in float64; 1 where the trajectory has none.

    >>> token_weights_at(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2)), 0)
    tensor([[1., 1.]], dtype=torch.float64)
    """
    if path.weights is None:
        return torch.ones_like(path.states[0, ..., 0], dtype=torch.float64)
    return path.weights[k if len(path.weights) > 1 else 0].double()


def unit_states(path: Trajectory, k: int) -> Float[Tensor, "batch n d"]:
    """The states at the depth number k as unit vectors in float64; padding, which has none, is at the first token that
    counts.

    >>> padded = Trajectory(torch.zeros(1), torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]]), torch.tensor([[[1.0, 0.0]]]))
    >>> unit_states(padded, 0).tolist()
    [[[0.0, 1.0], [0.0, 1.0]]]
    """
    x = path.states[k].double()
    return retract(collapse_padding(x, (token_weights_at(path, k) > 0) | x.any(-1)))


def token_median(value: Float[Tensor, "*batch n"], weights: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Weighted median over tokens: the middle of the values at which the cumulative weight passes one half, which for
    equal weights is the usual median. Tokens of weight 0 do not count; NaN where no token does.

    >>> token_median(torch.tensor([4.0, 1.0, 2.0, 9.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    tensor(2.)
    """
    ordered, order = torch.where(weights > 0, value, torch.inf).sort(-1)
    cumulative = weights.gather(-1, order).cumsum(-1)
    half = cumulative[..., -1:] / 2
    ends = [passed.to(torch.int8).argmax(-1, keepdim=True) for passed in (cumulative >= half, cumulative > half)]
    lower, upper = (ordered.gather(-1, end).squeeze(-1) for end in ends)
    return torch.where(half.squeeze(-1) > 0, (lower + upper) / 2, torch.nan)


def with_halves(measurement: xr.Dataset, system: object) -> xr.Dataset:
    """The Measurement over depth with the coordinate ``half``: which half of a layer leads to each depth of a
    recording, "" at its first depth; unchanged if the system is not a recording.

    >>> import xarray as xr
    >>> with_halves(xr.Dataset(), None).coords
    Coordinates:
        *empty*
    """
    if not isinstance(system, Recording):
        return measurement
    halves = HALVES[system.anatomy.depths.steps]
    depths = measurement[system.axis].values
    names = [halves[(int(depth) - 1) % len(halves)].value if depth > system.first else "" for depth in depths]
    return measurement.assign_coords(half=(system.axis, names))


def sphere_text(system: object) -> str:
    """What the unit vectors are, for the attribute ``sphere`` of a Measurement.

    >>> sphere_text(None)
    'states of the trajectory'
    """
    if not isinstance(system, Recording):
        return "states of the trajectory"
    if system.anatomy.post_norm:
        return "direction of the state, gain and bias of its norm undone"
    return "direction of the residual stream"


def check_finite(path: Trajectory) -> Trajectory:
    """The trajectory, if the states of all tokens that count are finite; raises HelmscopeError that names the first
    prompt, depth and token where one is not.

    >>> len(check_finite(Trajectory(torch.zeros(1), torch.eye(2).expand(1, 1, 2, 2))).times)
    1
    """
    for k, states in enumerate(path.states):
        bad = ~torch.isfinite(states).all(-1) & (token_weights_at(path, k) > 0)
        if bool(bad.any()):
            prompt, token = (int(index) for index in bad.nonzero()[0])
            raise HelmscopeError(
                f"states of {path.replicate} {prompt} hold NaN or infinite entries at {path.axis} "
                f"{float(path.times[k]):g}, token {token}, but every token must be finite"
            )
    return path
