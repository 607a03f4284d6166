"""The figure of a bifurcation diagram: where attention with noise keeps clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from helmscope.plots.canvas import GRAY
from helmscope.plots.style import COLORS, blank_figure, styled
from helmscope.plots.variable_panel import plain
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from helmscope.plots.figure import Figure

    Floats = NDArray[np.float64]

NEEDED = ("order_parameter", "critical_nu", "fold_nu", "fold_order_parameter", "continuous")
MAX_CURVES = 8
SMOOTH = 200  # points of a curve
PADDING = 0.06  # of the plane to the left and right, in units of its width


def bifurcation_figure(diagram: xr.Dataset, *, title: str = "") -> Figure:
    """Figure of a ``bifurcation_diagram``. Left: the order parameter |E x| of the stable clustered state over nu, small
    dots joined by a curve for each of up to eight betas, with a large dot at nu_c. Where the transition is
    discontinuous, the curve ends at the fold with a dashed jump to 0, a dotted curve leads back from it to nu_c along
    the unstable branch, and the values of nu at which both states are stable are shaded. Right, for several betas:
    which states are stable in the plane of beta and nu, with the fold, which is nu_c where the transition is
    continuous; both are stable between them. Lines between the betas are straight.

    Between the computed values, to which the fold belongs, curves are interpolated as functions of the square root of
    the distance from the fold, or from nu_c, in which they are smooth. Raises HelmscopeError unless ``diagram`` is a
    result of ``bifurcation_diagram``.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.meanfield.bifurcation import bifurcation_diagram
    >>> figure = bifurcation_figure(bifurcation_diagram(SA, betas=[0.0, 4.0], nus=[0.1, 0.3], dim=3))
    >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    ['beta = 0', 'beta = 4']
    """
    missing = [name for name in NEEDED if name not in getattr(diagram, "data_vars", {})]
    if missing:
        raise HelmscopeError(f"diagram lacks {missing[0]}, but it must be a result of bifurcation_diagram()")
    several = diagram.sizes["beta"] > 1
    with styled():
        figure = blank_figure(8.6 if several else 5.2, 3.8)
        panels = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
        _draw_orders(panels[0], diagram)
        if several:
            _draw_plane(panels[1], diagram)
        name = diagram.attrs.get("field", "attention")
        heading = title or f"{name} with noise on S^{diagram.attrs['dim'] - 1}: stationary densities"
        figure.suptitle(plain(heading), fontsize=9)
        return figure


def _draw_orders(panel: Axes, diagram: xr.Dataset) -> None:
    betas = diagram.beta.values
    shown = np.unique(np.linspace(0, len(betas) - 1, min(len(betas), MAX_CURVES)).round().astype(int))
    panel.axhline(0, color=GRAY, linewidth=1.0, zorder=1, label="_uniform")
    for k, color in zip(shown, _colors(len(shown)), strict=True):
        row = diagram.isel(beta=int(k))
        critical, fold, continuous = float(row.critical_nu), float(row.fold_nu), bool(row.continuous)
        end = float(row.fold_order_parameter)
        panel.plot(
            *stable_branch(row.nu.values, row.order_parameter.values, fold, end),
            color=color,
            label=f"beta = {betas[k]:g}",
        )
        computed = row.order_parameter.values > 0
        panel.plot(row.nu.values[computed], row.order_parameter.values[computed], ".", color=color, label="_computed")
        if critical > 0:
            panel.plot([critical], [0], "o", color=color, markersize=5, clip_on=False, zorder=4, label="_critical")
        if not continuous:
            panel.axvspan(critical, fold, color=color, alpha=0.15, linewidth=0, label="_both")
            jump: Any = {"color": color, "linestyle": "--", "linewidth": 1.0, "label": "_jump"}
            panel.plot([fold, fold], [end, 0.0], **jump)
            if "unstable_nu" in row:
                unstable: Any = {"color": color, "linestyle": ":", "linewidth": 1.5, "label": "_unstable"}
                panel.plot(row.unstable_nu.values, row.unstable_order_parameter.values, **unstable)
    right = max(1.15 * float(diagram.fold_nu.max()), float(diagram.nu[0]))
    panel.set(xlabel="nu, the strength of the noise", xlim=(0, right), ylim=(-0.02, 1.02))
    panel.set_title("order |E x| (dashed: jump; dotted: unstable)", loc="left", fontsize=9)
    panel.legend(fontsize=8, loc="best", frameon=True, framealpha=0.85, edgecolor="none")


def stable_branch(nu: Floats, order: Floats, end: float, end_order: float) -> tuple[Floats, Floats]:
    """A curve through the order parameters > 0 up to the ``end`` of the branch, the fold or nu_c, where it is
    ``end_order``, and smooth in sqrt(end - nu).

    >>> nu = np.array([0.0, 0.75, 2.0])
    >>> curve = stable_branch(nu, np.sqrt(np.clip(1 - nu, 0, None)), 1.0, 0.0)
    >>> np.abs(curve[1] - np.sqrt(1 - curve[0])).max() < 1e-12
    np.True_
    """
    from scipy.interpolate import PchipInterpolator

    clustered = (order > 0) & (nu < end)
    if not clustered.any():
        return np.zeros(0), np.zeros(0)
    root = np.append(0.0, np.sqrt(end - nu[clustered])[::-1])
    fine = np.linspace(root[-1], 0.0, SMOOTH)
    return end - fine**2, PchipInterpolator(root, np.append(end_order, order[clustered][::-1]))(fine)


def _draw_plane(panel: Axes, diagram: xr.Dataset) -> None:
    """Which states are stable over beta and nu: below nu_c clusters, above the fold the uniform one, between both."""
    betas, critical, fold = (diagram[name].values for name in ("beta", "critical_nu", "fold_nu"))
    jumps = ~diagram.continuous.values
    top = 1.25 * float(fold.max())
    mark = "o" if len(betas) <= 12 else ""
    panel.fill_between(betas, 0, critical, color=COLORS[0], alpha=0.22, linewidth=0, label="clusters stable")
    panel.plot(betas, critical, color=COLORS[0], marker=mark, markersize=3, label="nu_c")
    if jumps.any():
        panel.fill_between(betas, critical, fold, color=COLORS[1], alpha=0.3, linewidth=0, label="both stable")
        panel.vlines(betas[jumps], critical[jumps], fold[jumps], color=COLORS[1], alpha=0.5)
        upper: Any = {"linestyle": "--", "marker": mark, "markersize": 3, "label": "fold"}
        panel.plot(betas, fold, color=COLORS[1], zorder=1.9, **upper)  # under nu_c where they are the same
    pad = PADDING * (betas[-1] - betas[0])
    panel.set(xlabel="beta", ylabel="nu", xlim=(betas[0] - pad, betas[-1] + pad), ylim=(0, top))
    panel.set_title("stable states (white: uniform)", loc="left", fontsize=9)
    panel.legend(fontsize=8, loc="best", frameon=True, framealpha=0.85, edgecolor="none")


def _colors(count: int) -> Any:
    from matplotlib import colormaps

    return COLORS[:count] if count <= len(COLORS) else colormaps["viridis"](np.linspace(0, 0.9, count))
