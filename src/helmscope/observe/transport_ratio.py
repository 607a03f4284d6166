"""Whether a layer moves the cloud of tokens as cheaply as any map could: the transport ratio.

For the tokens x_i of a prompt before a step and T(x_i) = y_i after it, with weights m_i,

    ratio = W2^2(cloud before, cloud after) / sum_i m_i dist(x_i, y_i)^2 / sum_i m_i   in [0, 1],

where W2^2 is the least mean squared distance over all plans that carry the one cloud to the other, found by exact
assignment. It is 1 exactly where the step itself is an optimal plan, as the gradient of a convex potential is (Brenier;
on the sphere McCann); outputs permuted over the tokens reach the same cloud at a ratio below 1. ``ratio`` has the
geodesic distance on the unit sphere; ``euclidean_ratio`` the distance of the states in R^d with their radii, where a
trajectory has them.

How to read it. Any step that is small compared with the distances between tokens is optimal, so that a ratio
of 1 says little about them: ``relative_step``, the root mean squared displacement over the mean distance to the nearest
other token, says whether that is so. A ratio well below 1 means that tokens exchange places.

How it fails. NaN where nothing moves. Identical tokens can be exchanged at no cost, which changes nothing. Cost: no
forward (one for a post-norm model) and one assignment of n tokens, O(n^3), for each prompt, step and distance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.sphere import angle, angle_from_chords, retract
from helmscope.observe.depth_steps import check_finite, sphere_text, with_halves
from helmscope.observe.labels import label_attributes
from helmscope.observe.pairs import sphere_and_ids, without_first_token
from helmscope.observe.track import AT_LEAST_0, SHARE, with_bounds, with_cumulative, with_replicates
from helmscope.runs.bar import shows_progress
from helmscope.transport.clouds import Clouds
from helmscope.transport.cost import Euclidean, Geodesic
from helmscope.transport.exact import exact_cost
from helmscope.types import HelmscopeError, Trajectory, check_progress

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.transport.cost import Cost
    from helmscope.types import System
    from helmscope.types.progress import ProgressOption

NOTHING = 1e-24  # a mean squared displacement below is rounding: 1e-12 radians
CLOSE = 1e-5  # of |x|^2 + |y|^2: beyond it, 11 digits of a squared distance are left
LABELS = {
    "ratio": "W2^2 over mean squared displacement, geodesic",
    "euclidean_ratio": "W2^2 over mean squared displacement, in R^d with radius",
    "ratio_from_start": "W2^2 over mean squared displacement since the first state, geodesic",
    "relative_step": "root mean squared angle moved over the mean angle to the nearest token",
}
BOUNDS = {"ratio": SHARE, "euclidean_ratio": SHARE, "ratio_from_start": SHARE, "relative_step": AT_LEAST_0}


@shows_progress("transport ratios")
def transport_ratio(
    system: Trajectory | System,
    *,
    include_first_token: bool = False,
    euclidean: bool = True,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The transport ratio of every step over (depth, prompt): W2^2 between the clouds of a prompt before and after it
    over the mean squared displacement of its tokens. Values at depth k describe the step that ends there.

    ``ratio`` is that of angles on the unit sphere and ``relative_step`` the size of the step relative to the distances
    between tokens; ``ratio_from_start`` compares each depth with the first one, so that its last value is that of the
    whole depth. ``euclidean_ratio``, that of the states in R^d with their radii, is included where there are radii,
    unless ``euclidean`` is False. All are NaN at the first depth and where nothing moves.

    A Recording is measured on the unit sphere (``on_sphere``). Tokens of weight 0 are left out; other weights are
    masses. The first token, the usual attention sink, is left out unless ``include_first_token``. Raises
    HelmscopeError for states that are not finite and for weights that change over time.

    >>> before = torch.tensor([[1.0, 0.0], [0.8, 0.6]]).double()
    >>> swapped = torch.stack([before, before.flip(0), before.flip(0)])[:, None]
    >>> transport_ratio(Trajectory(torch.arange(3.0), swapped), include_first_token=True).ratio.values.ravel().tolist()
    [nan, 0.0, nan]
    """
    path = sphere_and_ids(system, None)[0]
    path = check_finite(path if include_first_token else without_first_token(path))
    steps, prompts = path.states.shape[:2]
    names = ["ratio", "ratio_from_start", "relative_step"]
    names += ["euclidean_ratio"] if euclidean and path.radius is not None else []
    values = {name: torch.full((steps, prompts), torch.nan, dtype=torch.float64, device="cpu") for name in names}
    report = check_progress(progress)
    for prompt in range(prompts):
        cloud = _Cloud(path, prompt)
        for k in range(1, steps):
            for name, value in cloud.step(k, names).items():
                values[name][k, prompt] = value
        report((prompt + 1) / prompts)
    measurement = with_bounds(with_replicates(values, path), BOUNDS)
    measurement = with_cumulative(measurement, path.axis, {"ratio_from_start"})
    for name in names:
        measurement[name].attrs |= label_attributes(LABELS[name])
    return with_halves(measurement, system).assign_attrs(
        sphere=sphere_text(system), include_first_token=int(include_first_token)
    )


class _Cloud:
    """The tokens of one prompt that count, over depth, on the CPU in float64."""

    def __init__(self, path: Trajectory, prompt: int) -> None:
        weights = torch.ones_like(path.states[:1, prompt, :, 0]) if path.weights is None else path.weights[:, prompt]
        if not bool((weights == weights[0]).all()):
            raise HelmscopeError("weights of the trajectory change over time, but a transport ratio needs fixed ones")
        kept = (weights[0] > 0).cpu()
        self.m = weights[0].double().cpu()[kept]
        self.x = retract(path.states[:, prompt].cpu()[:, kept].double())
        self.y = None
        if path.radius is not None:
            self.y = path.radius[:, prompt].cpu()[:, kept].double().unsqueeze(-1) * self.x

    def step(self, k: int, names: list[str]) -> dict[str, float]:
        """The values of the step to the depth number k."""
        if not len(self.m):
            return {}
        before, after = self.x[k - 1], self.x[k]
        values = {"ratio": self._ratio(before, after, Geodesic())}
        values["ratio_from_start"] = values["ratio"] if k == 1 else self._ratio(self.x[0], after, Geodesic())
        if "euclidean_ratio" in names and self.y is not None:
            values["euclidean_ratio"] = self._ratio(self.y[k - 1], self.y[k], Euclidean())
        if len(self.m) > 1:
            moved = self._mean(angle(before, after).square()).sqrt()
            chords = squared_distances(before, before).fill_diagonal_(torch.inf).amin(-1).sqrt()
            nearest = self._mean(angle_from_chords(chords, (4 - chords.square()).clamp(min=0).sqrt()))
            values["relative_step"] = float(moved / nearest) if float(nearest) > 0 else float("nan")
        return values

    def _mean(self, value: Tensor) -> Tensor:
        return (self.m * value).sum() / self.m.sum()

    def _ratio(self, x: Tensor, y: Tensor, cost: Cost) -> float:
        displacement = float(self._mean(cost.distance(x, y).square()))
        if not displacement > NOTHING * float(x.square().sum(-1).mean()):
            return float("nan")
        if not bool((self.m == self.m[0]).all()):
            shares = self.m / self.m.sum()
            return min(1.0, float(exact_cost(Clouds(x, y, shares, shares), cost, 2.0)) / displacement)
        costs = squared_distances(x, y)
        if isinstance(cost, Geodesic):
            costs = angle_from_chords(costs.sqrt(), squared_distances(x, -y).sqrt()).square()
        partner = torch.from_numpy(linear_sum_assignment(costs.numpy())[1])
        least = float(cost.distance(x, y[partner]).square().mean())
        return min(1.0, least / displacement)  # the tokens' own assignment may seem cheaper by rounding


@full_precision
def squared_distances(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """|x_i - y_j|^2 of all pairs by their inner products, and for close pairs, where these lose digits, by their
    differences.

    >>> squared_distances(torch.eye(2), torch.eye(2))
    tensor([[0., 2.],
            [2., 0.]])
    """
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1)
    found = squares - 2 * (x @ y.mT)
    i, j = (found < CLOSE * squares).nonzero().unbind(-1)
    found[i, j] = (x[i] - y[j]).square().sum(-1)
    return found
