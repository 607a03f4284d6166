"""Figures of densities: a single one, and one over time, on the circle, on a globe, and zonal in any dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import NEGATIVE_MASS
from helmscope.meanfield.sphere_grid import SphereGrid
from helmscope.plots.canvas import GRAY, draw_outline
from helmscope.plots.globe import draw_globe, values_on_disc
from helmscope.plots.projection import ELEVATION
from helmscope.plots.style import COLORS, blank_figure, spans_decades, styled, use_log_scale
from helmscope.plots.variable_panel import plain
from helmscope.types import HelmscopeError, check_integer, check_real
from helmscope.types.display import short_description

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from numpy.typing import NDArray

    from helmscope.meanfield.density import Density
    from helmscope.meanfield.evolve import DensityPath
    from helmscope.meanfield.grid import Grid
    from helmscope.plots.figure import Figure

    Floats = NDArray[np.float64]

ANGLES = 721  # at which a density on the circle or a zonal density is drawn
MAX_MAP_TIMES = 400  # columns of a map over time
GLOBES, PROFILES = 5, 6  # most times at which a density is drawn
PANEL, CURVES = 2.05, 2.2  # inches
RELATIVE = "density / uniform density"
SHOWN_NEGATIVE = 1e-6  # negative mass that the title mentions
STEEPEST = 60.0  # elevation of the default view of a globe, in degrees
UNIFORM_TINT = 0.3  # place of the uniform density on the color scale, if the largest value is far above it
ROUNDING = 1e-9  # an order parameter below this is 0


def density_figure(density: Density, *, view: tuple[float, float] | None = None, title: str = "") -> Figure:
    """Figure of a density. On the circle: a curve around it, and over the angle; on S^2: a globe seen from ``view``,
    (azimuth, elevation) in degrees, and from the opposite side; a zonal one: the distribution of the angle to the axis.

    By default the mean of the density is in front. Values are relative to the uniform density, which is gray. Raises
    HelmscopeError for a ``view`` of a density that is not on a globe.

    >>> from helmscope.meanfield import Density, SphereGrid
    >>> figure = density_figure(Density.von_mises_fisher(SphereGrid(degree=16), kappa=2.0))
    >>> [panel.get_title() for panel in figure.axes[:2]]
    ['azimuth 0°, elevation 20°', 'azimuth 180°, elevation -20°']
    """
    grid = density.grid
    seen = _check_view(view, grid, density.mean.numpy())
    mean = float(density.mean.norm())
    words = [title or f"density on S^{grid.dim - 1}", f"|mean| {round(mean, 12):.3g}"]
    words += [f"entropy {density.entropy:.4g}"] if density.negative_mass <= NEGATIVE_MASS else []
    heading = "\n".join([words[0], ", ".join([*words[1:], *_negative(density.negative_mass)])])
    with styled():
        if isinstance(grid, SphereGrid):
            figure = blank_figure(6.4, 3.6)
            opposite = ((seen[0] + 180) % 360, -seen[1])
            sides = (seen, opposite)
            _draw_globes(figure, [(density, side) for side in sides], [_view_title(side) for side in sides])
        elif isinstance(grid, CircleGrid):
            figure = blank_figure(7.6, 3.4)
            ring, panel = figure.subplots(1, 2, width_ratios=[1, 1.5])
            profiles = Profiles.of([density])
            _draw_ring(ring, profiles)
            _draw_profiles(panel, profiles, [0.0])
        else:
            figure = blank_figure(5.0, 3.4)
            _draw_profiles(figure.subplots(), Profiles.of([density]), [0.0])
        figure.suptitle(plain(heading), fontsize=9)
        return figure


def density_path_figure(
    path: DensityPath, *, panels: int | None = None, view: tuple[float, float] | None = None, title: str = ""
) -> Figure:
    """Figure of a density over time: on S^2 globes at up to ``panels`` evenly chosen times, seen from ``view``; on the
    circle and for zonal densities a map over time and angle, and curves at these times. Below are the order parameter
    |mean| and the entropy relative to that of the uniform density, over time.

    Values are relative to the uniform density; a zonal density is drawn as the distribution of the angle to its axis.
    The title says if the run ended early, and how much negative mass there was. Raises HelmscopeError for a path
    without times, and for a ``view`` of a density that is not on a globe.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.meanfield import CircleGrid, Density, evolve
    >>> start = Density.von_mises_fisher(CircleGrid(degree=32), kappa=0.1)
    >>> figure = density_path_figure(evolve(SA(beta=1.0), start, times=[0, 1, 2]))
    >>> [panel.get_xlabel() for panel in figure.axes[:2]]
    ['time', 'angle']
    """
    if len(path) == 0:
        raise HelmscopeError(f"path has no times to draw, because {path.outcome}")
    globe = isinstance(path.grid, SphereGrid)
    count = check_integer("panels", (GLOBES if globe else PROFILES) if panels is None else panels, at_least=1)
    seen = _check_view(view, path.grid, path[-1].mean.numpy())
    steps = [round(k) for k in np.linspace(0, len(path) - 1, min(count, len(path)))]
    with styled():
        above = PANEL + 0.5 if globe else 3.1
        figure = blank_figure(max(7.6, PANEL * len(steps) + 0.9 if globe else 8.6), above + CURVES)
        top, bottom = figure.subfigures(2, 1, height_ratios=[above, CURVES], squeeze=False)[:, 0]
        if globe:
            times = [f"t = {float(path.times[k]):.4g}" for k in steps]
            _draw_globes(top, [(path[k], seen) for k in steps], times)
        else:
            _draw_over_time(top, path, steps)
        top.suptitle(plain(_heading(path, seen if globe else None, title)), fontsize=9)
        _draw_curves(bottom, path, [float(path.times[k]) for k in steps])
        return figure


def equation_title(path: DensityPath) -> str:
    """The field and the noise of a path in words.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.meanfield import CircleGrid, Density, evolve
    >>> equation_title(evolve(SA(beta=1.0), Density.uniform(CircleGrid(degree=16)), times=[0]))
    'SA(beta=1), no noise'
    """
    field = "no drift" if path.field is None else short_description(path.field)
    noise = "no noise" if path.noise is None else short_description(path.noise)
    return (
        f"{field}, isotropic noise nu = {path.noise.nu:g}"
        if isinstance(path.noise, IsotropicNoise)
        else f"{field}, {noise}"
    )


@dataclass(frozen=True, eq=False)
class Profiles:
    """Curves over an angle, (curve, angle): the density relative to the uniform one around a circle, or the
    distribution of the angle to the axis of zonal densities; and the same of the uniform density.
    """

    degrees: Floats
    values: Floats
    uniform: Floats
    label: str
    quantity: str

    @classmethod
    def of(cls, densities: Sequence[Density]) -> Profiles:
        """The profiles of densities on one grid.

        >>> from helmscope.meanfield import Density, ZonalGrid
        >>> profiles = Profiles.of([Density.uniform(ZonalGrid(dim=3, degree=4))])
        >>> profiles.values.shape, profiles.values[0, 360].round(9).tolist()  # sin(t) / 2 at 90 degrees
        ((1, 721), 0.5)
        """
        grid = densities[0].grid
        if isinstance(grid, CircleGrid):
            angle = torch.linspace(-math.pi, math.pi, ANGLES, dtype=torch.float64)
            points = torch.stack([angle.cos(), angle.sin()], -1)
            uniform, label, quantity = np.ones(ANGLES), "angle", RELATIVE
        else:
            angle = torch.linspace(0, math.pi, ANGLES, dtype=torch.float64)
            points = torch.zeros(ANGLES, grid.dim, dtype=torch.float64)
            points[:, 0], points[:, 1] = angle.cos(), angle.sin()
            log_share = math.lgamma(grid.dim / 2) - math.lgamma((grid.dim - 1) / 2) - math.log(math.pi) / 2
            uniform = np.exp(log_share) * angle.sin().numpy() ** (grid.dim - 2)
            label, quantity = "angle to the axis", "density of the angle (1/rad)"
        relative = _relative_values(densities, points)
        return cls(np.rad2deg(angle.numpy()), relative * uniform, uniform, label, quantity)


def _relative_values(densities: Sequence[Density], x: torch.Tensor) -> Floats:
    """The values (density, n) relative to the uniform density at points x, all by one table of harmonics."""
    grid, logs = densities[0].grid, [density.log_modes for density in densities]
    known = [log for log in logs if log is not None]
    if len(known) == len(logs):
        return np.asarray(grid.evaluate(torch.stack(known), x).exp().numpy())
    return np.asarray(grid.evaluate(torch.stack([density.modes for density in densities]), x).numpy())


def _check_view(view: tuple[float, float] | None, grid: Grid, mean: Floats) -> tuple[float, float]:
    """``view``, or one with the mean in front."""
    if view is None:
        if grid.dim != 3 or np.linalg.norm(mean) < 1e-6:
            return 0.0, ELEVATION
        azimuth, latitude = np.rad2deg([np.arctan2(mean[1], mean[0]), np.arcsin(mean[2] / np.linalg.norm(mean))])
        elevation = np.clip(abs(latitude), ELEVATION, STEEPEST) * (-1 if np.round(latitude) < 0 else 1)
        return float(np.round(azimuth)) + 0.0, float(np.round(elevation))
    if not isinstance(grid, SphereGrid):
        raise HelmscopeError(f"view is {view!r}, but only densities on a SphereGrid are drawn on a globe: omit it")
    if not isinstance(view, tuple | list) or len(view) != 2:
        raise HelmscopeError(f"view is {view!r}, but it must be (azimuth, elevation) in degrees")
    azimuth, elevation = (check_real(f"view[{i}]", angle) for i, angle in enumerate(view))
    return azimuth, elevation


def _view_title(view: tuple[float, float]) -> str:
    return f"azimuth {view[0]:g}°, elevation {view[1]:g}°"


def _negative(mass: float) -> list[str]:
    return [f"negative mass {mass:.1g}"] if mass > SHOWN_NEGATIVE else []


def _heading(path: DensityPath, view: tuple[float, float] | None, title: str) -> str:
    parts = [f"density on S^{path.grid.dim - 1}, degree {path.grid.degree}"]
    parts += [] if view is None else [f"seen from {_view_title(view)}"]
    parts += _negative(float(path.negative_mass.max()))
    parts += [] if path.outcome.ok else [f"{path.outcome.summary} at t = {path.outcome.times[0]:.4g}"]
    return f"{title or equation_title(path)}\n{'; '.join(parts)}"


def _color_scale(values: Floats) -> dict[str, Any]:
    """Colors from 0, or from a clearly negative value, to the largest value. If that is far above 1, the uniform
    density, a power of the values is shown, so that 1 can be told from 0.
    """
    from matplotlib.colors import Normalize, PowerNorm

    high = max(float(values.max()), 1e-12)
    low = float(values.min()) if values.min() < -0.01 * high else 0.0
    if low < 0 or UNIFORM_TINT * high <= 1:
        return {"cmap": "magma", "norm": Normalize(low, high)}
    return {"cmap": "magma", "norm": PowerNorm(math.log(UNIFORM_TINT) / -math.log(high), 0, high, clip=True)}


def _draw_color_bar(place: Figure | SubFigure, image: Any, panels: Any, **options: Any) -> None:
    """The color scale; on a scale of powers, with ticks at 0, 1, 2, 5, 10, ..., but not too close to each other."""
    norm = image.norm
    if hasattr(norm, "gamma"):
        decades = range(math.ceil(math.log10(norm.vmax)) + 1)
        ticks: list[float] = [0.0]
        for tick in (digit * 10.0**decade for decade in decades for digit in (1, 2, 5)):
            if tick <= norm.vmax and norm(tick) - norm(ticks[-1]) > 0.06:
                ticks.append(tick)
        options |= {"ticks": ticks, "format": "%g"}
    bar = place.colorbar(image, ax=panels, **options)
    bar.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.grid(False)


def _draw_globes(
    place: Figure | SubFigure, shown: list[tuple[Density, tuple[float, float]]], titles: list[str]
) -> None:
    def disc_of(density: Density, view: tuple[float, float]) -> Floats:
        return values_on_disc(lambda x: _relative_values([density], torch.from_numpy(x))[0], view)

    discs = [disc_of(*each) for each in shown]
    colors = _color_scale(np.stack(discs))
    axes = place.subplots(1, len(shown), squeeze=False)[0]
    for panel, disc, (_, view), title in zip(axes, discs, shown, titles, strict=True):
        image = draw_globe(panel, disc, view, colors)
        panel.set_title(title, fontsize=9)
    _draw_color_bar(place, image, list(axes), label=RELATIVE, shrink=0.8, pad=0.02)


def _draw_over_time(top: SubFigure, path: DensityPath, steps: list[int]) -> None:
    """A map over time and angle, and curves at a few times; the curves alone for a single time."""
    profiles = Profiles.of([path[k] for k in steps])
    if len(path) == 1:
        _draw_profiles(top.subplots(), profiles, path.times[steps].tolist())
        return
    left, right = top.subplots(1, 2)
    _draw_map(top, left, path)
    _draw_profiles(right, profiles, path.times[steps].tolist())


def _draw_map(top: SubFigure, panel: Axes, path: DensityPath) -> None:
    columns = np.unique(np.linspace(0, len(path) - 1, min(len(path), MAX_MAP_TIMES)).round().astype(int))
    profiles = Profiles.of([path[int(k)] for k in columns])
    times = path.times[columns].numpy()
    image = panel.pcolormesh(
        times, profiles.degrees, profiles.values.T, shading="gouraud", rasterized=True, **_color_scale(profiles.values)
    )
    _draw_color_bar(top, image, panel)
    panel.grid(False)
    panel.set_title(profiles.quantity, loc="left", fontsize=9)
    panel.set(xlabel="time", ylabel=profiles.label, xlim=(times[0], times[-1]))
    _degree_ticks(panel.yaxis, profiles)


def _draw_profiles(panel: Axes, profiles: Profiles, times: list[float]) -> None:
    """Curves over the angle, colored by time."""
    from matplotlib import colormaps

    tints = colormaps["viridis"](np.linspace(0, 0.88, len(times))) if len(times) > 1 else [COLORS[0]]
    panel.plot(profiles.degrees, profiles.uniform, color=GRAY, linewidth=1.0, linestyle="--", label="uniform")
    for values, t, tint in zip(profiles.values, times, tints, strict=True):
        label = f"t = {t:.4g}" if len(times) > 1 else "density"
        panel.plot(profiles.degrees, values, color=tint, label=label, linewidth=1.5)
    panel.set_title(profiles.quantity, loc="left", fontsize=9)
    panel.set(xlabel=profiles.label, xlim=(profiles.degrees[0], profiles.degrees[-1]))
    panel.set_ylim(bottom=min(0.0, 1.05 * float(profiles.values.min())))
    _degree_ticks(panel.xaxis, profiles)
    panel.legend(fontsize=8, loc="best", handlelength=1.4)


def _degree_ticks(axis: Any, profiles: Profiles) -> None:
    step = 90 if profiles.degrees[0] < 0 else 45
    ticks = np.arange(profiles.degrees[0], profiles.degrees[-1] + 1, step)
    axis.set_ticks(ticks, labels=[f"{tick:.0f}°" for tick in ticks])


def _draw_ring(panel: Axes, profiles: Profiles) -> None:
    """The density around the circle: the distance from the circle grows with its value; the uniform one is dashed."""
    angle, values = np.deg2rad(profiles.degrees), profiles.values[0].clip(min=0)
    scale = 0.8 / max(float(values.max()), 1.0)
    radius = 1 + scale * values
    draw_outline(panel, None)
    panel.fill(
        np.concatenate([radius * np.cos(angle), np.cos(angle)[::-1]]),
        np.concatenate([radius * np.sin(angle), np.sin(angle)[::-1]]),
        color=COLORS[0],
        alpha=0.25,
        linewidth=0,
    )
    panel.plot(radius * np.cos(angle), radius * np.sin(angle), color=COLORS[0])
    panel.plot((1 + scale) * np.cos(angle), (1 + scale) * np.sin(angle), color=GRAY, linestyle="--", linewidth=1.0)
    panel.set(xlim=(-1.85, 1.85), ylim=(-1.85, 1.85), aspect="equal")
    panel.set_axis_off()


def _draw_curves(bottom: SubFigure, path: DensityPath, marks: list[float]) -> None:
    """The order parameter and the relative entropy over time, with the drawn times marked."""
    order = np.array([float(density.mean.norm()) for density in path])
    known = [density.negative_mass <= NEGATIVE_MASS for density in path]
    lost = np.array([path.grid.log_area - path[k].entropy if known[k] else np.nan for k in range(len(path))])
    left, right = bottom.subplots(1, 2)
    contents = (
        ("order parameter |mean x|", order, COLORS[0]),
        ("relative entropy to the uniform density", lost, COLORS[1]),
    )
    for panel, (title, values, color) in zip((left, right), contents, strict=True):
        for mark in marks:
            panel.axvline(mark, color="#c3c7cd", linewidth=0.7, zorder=0, label="_mark")
        panel.plot(path.times.numpy(), values, color=color, marker="o" if len(values) <= 12 else "", markersize=3)
        panel.set_title(title, loc="left", fontsize=9)
        panel.set(xlabel="time")
        if values.min() > ROUNDING and spans_decades(values):
            use_log_scale(panel)
        else:
            panel.set_ylim(bottom=0.0, top=1.0 if values.max() < ROUNDING else 1.05 * values.max())
