"""The function ``plot``, which selects the figure by the type of its argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import xarray as xr

from helmscope.models.recording import Recording
from helmscope.observe.diagram import PhaseDiagram
from helmscope.plots.depth import depth_figure
from helmscope.plots.measurement import measurement_figure
from helmscope.plots.phase import phase_figure
from helmscope.plots.tokens import tokens_figure
from helmscope.solve.simulation import Simulation
from helmscope.types import HelmscopeError, Plottable, Trajectory, known_name, type_with_article

if TYPE_CHECKING:
    from helmscope.plots.figure import Figure


@singledispatch
def plot(shown: object, **options: Any) -> Figure:
    """Figure of an object, displayed automatically in a notebook; its ``save("x.pdf")`` writes PNG, SVG or PDF.

    - a ``Simulation`` or a ``Trajectory``: its tokens at a few times (``tokens_figure``: ``system``, ``panels``,
      ``view``, ``title``);
    - a ``Recording``: clustering, rank and radius over depth (``depth_figure``: ``title``);
    - a Measurement, such as ``track`` or ``overview`` returns, or a dict of several by label: curves with intervals
      over depth, layer or time, and maps over heads (``measurement_figure``: ``variables``, ``log``, ``title``);
    - a ``PhaseDiagram``: heat maps (``phase_figure``: ``title``);
    - a ``Trial``: its statistic with its region, and the measured variables (``trial_figure``).

    All but Measurements also have a method ``plot``. Raises HelmscopeError for any other object, and for an option that
    the figure does not have.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=4.0), torch.eye(2), times=[0.0, 1.0])
    >>> [panel.get_title() for panel in plot(run, system=0).axes[:2]]
    ['t = 0', 't = 1']
    """
    raise HelmscopeError(
        f"object to plot is {type_with_article(shown)}, but it must be a Simulation, a Trajectory, a Recording, a "
        "Measurement, a dict of Measurements, a PhaseDiagram or a Trial"
    )


def _draw(figure: Callable[..., Figure], shown: object, options: Mapping[str, Any]) -> Figure:
    """Calls the function of a figure; raises HelmscopeError for an option that it does not have."""
    parameters = inspect.signature(figure).parameters.values()
    allowed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        known_name("option of plot", name, allowed)
    return figure(shown, **options)


@plot.register(Plottable)
def _plottable(shown: Plottable, **options: Any) -> Figure:
    """Types in rooms below this one, which this module cannot import, override ``plot``."""
    if type(shown).plot is Plottable.plot:
        raise HelmscopeError(f"object to plot is {type_with_article(shown)}, but no figure is defined for it")
    return shown.plot(**options)


@plot.register(Trajectory)
def _trajectory(shown: Trajectory, **options: Any) -> Figure:
    return _draw(tokens_figure, shown, options)


@plot.register(Simulation)
def _simulation(shown: Simulation, **options: Any) -> Figure:
    return _draw(tokens_figure, shown.trajectory, {"title": shown.title, **options})


@plot.register(Recording)
def _recording(shown: Recording, **options: Any) -> Figure:
    return _draw(depth_figure, shown.trajectory, {"title": f"{shown.origin.title}: {shown.anatomy}", **options})


@plot.register(PhaseDiagram)
def _phase_diagram(shown: PhaseDiagram, **options: Any) -> Figure:
    return _draw(phase_figure, shown, options)


@plot.register(xr.Dataset)
def _measurement(shown: xr.Dataset, **options: Any) -> Figure:
    # a phase diagram that was read from a file is a plain Dataset
    is_phase_diagram = {"beta", "time"} <= set(shown.dims) and "probability" in shown
    return _draw(phase_figure if is_phase_diagram else measurement_figure, shown, options)


@plot.register(xr.DataArray)
def _variable(shown: xr.DataArray, **options: Any) -> Figure:
    name = "value" if shown.name is None else str(shown.name)
    return _draw(measurement_figure, shown.to_dataset(name=name), options)


@plot.register(Mapping)
def _measurements(shown: Mapping[str, xr.Dataset], **options: Any) -> Figure:
    return _draw(measurement_figure, shown, options)
