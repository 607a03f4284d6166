"""Figures of transport: a plan between two clouds, a barycenter of several, and the marginals of a bridge over time."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.geometry import sphere
from helmscope.plots.canvas import GRAY, Canvas, are_unit_vectors
from helmscope.plots.projection import facing
from helmscope.plots.style import COLORS, blank_figure, styled
from helmscope.plots.variable_panel import plain
from helmscope.types import check_integer, pluralized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from helmscope.plots.figure import Figure
    from helmscope.transport.barycenter import Barycenter
    from helmscope.transport.bridge import Bridge
    from helmscope.transport.discrete_bridge import DiscreteBridge
    from helmscope.transport.plan import Plan

    Floats = NDArray[np.float64]

MAX_POINTS = 2_000  # plotted of one cloud
MAX_LINES = 400  # plotted of a plan, the heaviest
STORED_PAIRS = 2**22  # up to so many pairs an implicit plan is formed as a matrix
PANEL = 2.6  # inches
SMOOTH = 49  # points along a line of a plan
BINS = 48  # of a histogram of a marginal, around the circle or along the line
RING = 0.75  # the length of the highest bar around the circle, in radii
LETTERS = 80  # of a title across one panel


def plan_figure(plan: Plan, *, lines: int = MAX_LINES, title: str = "") -> Figure:
    """Figure of a plan: both clouds, and lines between points that exchange mass, as wide as their mass.

    Unit vectors are drawn on the circle, with circular arcs inside of it that meet it at right angles, or on a globe,
    with lines along great circles; more dimensions are projected on two principal directions. The heaviest ``lines``
    entries are drawn; a plan between so many points that it cannot be stored is drawn by its images, x_i to
    sum_j pi_ij y_j / a_i.

    >>> from helmscope.transport.circle import circle_plan
    >>> figure = plan_figure(circle_plan(torch.eye(2), -torch.eye(2)))
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['x: 2 points', 'y: 2 points']
    """
    count = check_integer("lines", lines, at_least=0)
    x, y = _points(plan.clouds.x), _points(plan.clouds.y)
    starts, ends, masses, what = _heaviest(plan, count)
    if x.shape[-1] == 1:  # on two levels, or points and lines would hide each other
        height = float(np.ptp(np.concatenate([x, y]))) / 2 or 1.0
        x, y, starts, ends = (
            np.concatenate([points, np.full_like(points, level)], -1)
            for points, level in ((x, height), (y, 0.0), (starts, height), (ends, 0.0))
        )
        what += "; x above, y below"
    with styled():
        figure = blank_figure(5.2, 5.4)
        panel = figure.subplots()
        canvas = _canvas(np.concatenate([x, y])) if plan.clouds.x.shape[-1] > 1 else Canvas.on_two_levels(x, y)
        canvas.prepare(panel)
        _draw_lines(panel, canvas, starts, ends, masses)
        _draw_clouds(panel, canvas, [("x", x, plan.clouds.a), ("y", y, plan.clouds.b)], COLORS)
        _finish(figure, panel, title or _plan_title(plan), what, canvas.description)
        return figure


def barycenter_figure(barycenter: Barycenter, *, title: str = "") -> Figure:
    """Figure of a barycenter and of the clouds whose barycenter it is; the area of a point grows with its weight.

    >>> from helmscope.transport.barycenter import free_support_barycenter
    >>> from helmscope.transport.cost import Euclidean
    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> figure = barycenter_figure(free_support_barycenter(x, [x, x + 2], cost=Euclidean()))
    >>> len(figure.axes[0].get_legend().get_texts())
    3
    """
    clouds = [_points(points) for points in barycenter.clouds]
    points = _points(barycenter.points)
    with styled():
        figure = blank_figure(5.2, 5.4)
        panel = figure.subplots()
        canvas = _canvas(np.concatenate([points, *clouds]))
        canvas.prepare(panel)
        shown = [(f"cloud {k}", cloud, None) for k, cloud in enumerate(clouds)]
        _draw_clouds(panel, canvas, shown, [*COLORS[1:], GRAY])
        _draw_clouds(panel, canvas, [("barycenter", points, barycenter.weights)], COLORS)
        _finish(figure, panel, title or f"barycenter: {barycenter.outcome}", canvas.description)
        return figure


def bridge_figure(bridge: Bridge, *, n: int = 400, panels: int = 5, seed: int = 0, title: str = "") -> Figure:
    """Figure of the marginals of a bridge: a sample of ``n`` points of its law at ``panels`` times, evenly from 0 to
    the horizon, from the color of the start to that of the target. On the circle and on the line, where points would
    hide each other, it is a histogram: bars around the circle, of a length proportional to the density, or a curve.

    >>> from helmscope.transport.cloud_bridge import bridge_clouds
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> figure = bridge_figure(bridge_clouds(x, -x, nu=0.5), n=20, panels=3)
    >>> [panel.get_title() for panel in figure.axes]
    ['t = 0', 't = 0.5', 't = 1']
    """
    from matplotlib.colors import LinearSegmentedColormap

    size, count = check_integer("n", n, at_least=1), check_integer("panels", panels, at_least=2)
    times = np.linspace(0, bridge.horizon, count)
    samples = np.stack([_points(bridge.marginal(float(t), n=size, seed=seed)) for t in times])
    with styled():
        figure = blank_figure(PANEL * count, PANEL + 0.7)
        axes = list(figure.subplots(1, count, squeeze=False).flat)
        canvas = _canvas(samples.reshape(-1, samples.shape[-1]))
        tints = LinearSegmentedColormap.from_list("bridge", COLORS[:2])(np.linspace(0, 1, count))
        for panel, t, sample, tint in zip(axes, times, samples, tints, strict=True):
            if canvas.dim == 1:
                _histogram(panel, sample[:, 0], samples, tint)
            else:
                canvas.prepare(panel)
                on_circle = canvas.dim == 2 and canvas.limits is None
                (_ring if on_circle else _scatter_law)(panel, canvas, sample, tint)
            panel.set_title(f"t = {t:g}", fontsize=9)
        heading = title or f"marginals of a bridge, {pluralized(size, 'point')} each"
        figure.suptitle(plain(f"{heading}\n{canvas.description}"), fontsize=9)
        return figure


def discrete_bridge_figure(bridge: DiscreteBridge, *, title: str = "") -> Figure:
    """Figure of the bridge of a Markov chain: the probability of every state at every step, as a map.

    >>> from helmscope.transport.discrete_bridge import bridge_chain
    >>> lazy = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    >>> figure = discrete_bridge_figure(bridge_chain([lazy] * 3, torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])))
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
    ('step', 'state')
    """
    from matplotlib.ticker import MaxNLocator

    law = bridge.marginals.detach().cpu().numpy().T
    states, count = law.shape
    with styled():
        figure = blank_figure(5.6, 3.6)
        panel = figure.subplots()
        extent = (-0.5, count - 0.5, -0.5, states - 0.5)
        image = panel.imshow(law, origin="lower", aspect="auto", extent=extent, cmap="viridis", vmin=0)
        panel.set(xlabel="step", ylabel="state")
        panel.grid(visible=False)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=panel, label="probability")
        figure.suptitle(plain(title or f"bridge of a chain: {bridge.outcome}"), fontsize=9)
        return figure


def _points(points: torch.Tensor) -> Floats:
    """Points as an array, thinned where there are too many to see."""
    array: Floats = points.detach().cpu().double().numpy()
    return array[:: -(-len(array) // MAX_POINTS)]


def _canvas(points: Floats) -> Canvas:
    unit = are_unit_vectors(points)
    return Canvas.of(points, on_sphere=unit, view=facing(points) if unit and points.shape[-1] == 3 else None)


def _heaviest(plan: Plan, count: int) -> tuple[Floats, Floats, Floats, str]:
    """The ends and masses of the heaviest entries of a plan, and what is drawn."""
    x, y = (points.detach().cpu().double() for points in (plan.clouds.x, plan.clouds.y))
    if plan.entries is None and len(x) * len(y) > STORED_PAIRS:
        kept = torch.arange(len(x))[:: max(1, -(-len(x) // max(count, 1)))][:count]
        images = plan.barycentric_projection.detach().cpu().double()[kept]
        return x[kept].numpy(), images.numpy(), np.ones(len(kept)), "lines to the mean image of a point"
    if plan.entries is None:
        matrix = plan.matrix.detach().cpu().double()
        i, j = (matrix > 0).nonzero(as_tuple=True)
        mass = matrix[i, j]
    else:
        i, j, mass = (part.detach().cpu() for part in plan.entries)
        mass = mass.double()
    heaviest = mass.argsort(descending=True)[:count]
    share = float(mass[heaviest].sum() / mass.sum())
    what = f"{pluralized(len(heaviest), 'line')} with {share:.0%} of the mass"
    return x[i[heaviest]].numpy(), y[j[heaviest]].numpy(), mass[heaviest].numpy(), what


def _draw_lines(panel: Axes, canvas: Canvas, starts: Floats, ends: Floats, masses: Floats) -> None:
    """Straight lines, or great circles between unit vectors; those on the far side of a globe are paler, and those on
    the circle are the arcs inside of it that meet it at right angles, so that they can be told apart.
    """
    from matplotlib.collections import LineCollection

    if not len(starts):
        return
    along = torch.linspace(0, 1, SMOOTH, dtype=torch.float64)[:, None, None]
    x, y = torch.from_numpy(starts), torch.from_numpy(ends)
    on_sphere = canvas.limits is None and are_unit_vectors(starts) and are_unit_vectors(ends)
    path = sphere.exp(x, along * sphere.log(x, y)) if on_sphere else (1 - along) * x + along * y
    if on_sphere and x.shape[-1] == 2:
        path = _orthogonal_arcs(x, y, along)
    places, front = canvas.place(path.numpy())
    widths = 0.25 + 1.6 * masses / masses.max()
    for near, alpha in ((True, 0.45), (False, 0.12)):
        kept = front[SMOOTH // 2] == near  # by the middle of the line
        lines = LineCollection(list(places[:, kept].swapaxes(0, 1)), linewidths=widths[kept], colors=GRAY, alpha=alpha)
        panel.add_collection(lines)


def _orthogonal_arcs(x: torch.Tensor, y: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    """The geodesics of the hyperbolic disk from x_i to y_i on the unit circle, (points, lines, 2).

    With the angle 2 a between them and the middle direction m, it is the arc around m / cos a of the radius tan a, seen
    from there within the angle pi/2 - a of -m; for antipodal points a diameter.
    """
    half = sphere.angle(x, y)[:, None] / 2
    middle = torch.nn.functional.normalize(x + y, dim=-1)
    across = torch.nn.functional.normalize(y - x, dim=-1)
    straight = half > torch.pi / 2 - 1e-3
    safe = torch.where(straight, torch.pi / 4, half)
    turn = (2 * along - 1) * (torch.pi / 2 - safe)
    arc = middle / torch.cos(safe) + torch.tan(safe) * (torch.sin(turn) * across - torch.cos(turn) * middle)
    return torch.where(straight, (1 - along) * x + along * y, arc)


def _histogram(panel: Axes, values: Floats, samples: Floats, color: object) -> None:
    """The density of points of the line, with the same axes in all panels."""
    edges = np.linspace(samples.min(), samples.max() + 1e-9, BINS + 1)
    highest = max(np.histogram(each, edges, density=True)[0].max() for each in samples[..., 0])
    density = np.histogram(values, edges, density=True)[0]
    panel.stairs(density, edges, fill=True, color=color, alpha=0.35)
    panel.stairs(density, edges, color=color, linewidth=1.2)
    panel.set(xlim=(edges[0], edges[-1]), ylim=(0, 1.05 * highest), xlabel="x")
    panel.set_ylabel("density")
    panel.label_outer()


def _ring(panel: Axes, canvas: Canvas, sample: Floats, color: object) -> None:
    """Bars inwards from the circle, as long as the density of angles is high, relative to the highest."""
    from matplotlib.patches import Wedge

    angles = np.rad2deg(np.arctan2(sample[:, 1], sample[:, 0]))
    counts, edges = np.histogram(angles, np.linspace(-180, 180, BINS + 1))
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            length = RING * count / counts.max()
            panel.add_patch(
                Wedge((0, 0), 1, low, high, width=length, facecolor=color, edgecolor="white", linewidth=0.3)
            )


def _scatter_law(panel: Axes, canvas: Canvas, sample: Floats, color: object) -> None:
    _scatter(panel, canvas, sample, None, color, "")


def _plan_title(plan: Plan) -> str:
    """W_p of an exact plan, the transport cost and epsilon of an entropic one."""
    if plan.epsilon is None and plan.ok:
        return f"optimal plan: W_{plan.p:g} = {float(plan.distance.detach()):.4g}"
    cost = f"transport cost {float(plan.value.detach()):.4g} (dist^{plan.p:g})"
    kind = "plan that is not optimal" if plan.epsilon is None else f"entropic plan, epsilon = {plan.epsilon:g}"
    return f"{kind}: {cost}"


def _draw_clouds(
    panel: Axes,
    canvas: Canvas,
    clouds: Sequence[tuple[str, Floats, torch.Tensor | None]],
    colors: Sequence[str],
) -> None:
    for k, (label, points, weights) in enumerate(clouds):
        entry = f"{label}: {pluralized(len(points), 'point')}"
        _scatter(panel, canvas, points, weights, colors[k % len(colors)], entry)


def _scatter(
    panel: Axes, canvas: Canvas, points: Floats, weights: torch.Tensor | None, color: object, label: str
) -> None:
    """Points, hollow on the far side of a globe; the area grows with the weight."""
    places, front = canvas.place(points)
    standard = 26.0 if len(points) <= 64 else 12.0 if len(points) <= 400 else 5.0
    sizes = np.full(len(points), standard)
    if weights is not None and len(weights) == len(points):
        mass = weights.detach().cpu().double().numpy()
        sizes = np.where(mass > 0, standard * np.clip(mass / mass[mass > 0].mean(), 0.2, 5.0), 0.0)
    many = len(points) > 500  # vector files with so many markers open slowly
    near: dict[str, Any] = {"facecolors": [color], "linewidths": 0.0, "alpha": 0.85, "zorder": 3, "label": label}
    far: dict[str, Any] = {"facecolors": "none", "edgecolors": [color], "linewidths": 0.7, "alpha": 0.6, "zorder": 2}
    for mask, style in ((~front, far), (front, near)):
        panel.scatter(places[mask, 0], places[mask, 1], s=sizes[mask], rasterized=many, **style)


def _finish(figure: Figure, panel: Axes, title: str, *notes: str) -> None:
    below = -0.07 if panel.axison else 0.0  # below the numbers of an axis
    panel.legend(
        loc="upper center", bbox_to_anchor=(0.5, below), ncols=3, fontsize=8.5, columnspacing=1.2, handletextpad=0.1
    )
    lines = [line for text in (title, *notes) for line in textwrap.wrap(text, LETTERS)]
    figure.suptitle(plain("\n".join(lines)), fontsize=9)
