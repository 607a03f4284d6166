"""The function ``plot``, which selects the figure by the type of its argument."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

from helmscope.models.recording import Recording
from helmscope.observe.diagram import PhaseDiagram
from helmscope.plots.depth import depth_figure
from helmscope.plots.phase import phase_figure
from helmscope.plots.tokens import tokens_figure
from helmscope.solve.simulation import Simulation
from helmscope.types import HelmscopeError, Plottable, Trajectory

if TYPE_CHECKING:
    from helmscope.plots.figure import Figure


@singledispatch
def plot(shown: object, **options: Any) -> Figure:
    """Figure of an object, displayed automatically in a notebook; its ``save("x.pdf")`` writes PNG, SVG or PDF.

    - a ``Simulation`` or a ``Trajectory``: its tokens at a few times (``tokens_figure``: ``system``, ``panels``,
      ``view``, ``title``);
    - a ``Recording``: clustering, rank and radius over depth (``depth_figure``: ``title``);
    - a ``PhaseDiagram``: heat maps (``phase_figure``: ``title``);
    - a ``Trial``: its statistic with its region, and the measured variables (``trial_figure``).

    These types also have a method ``plot``. Raises HelmscopeError for any other object.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=4.0), torch.eye(2), times=[0.0, 1.0])
    >>> [panel.get_title() for panel in plot(run, system=0).axes[:2]]
    ['t = 0', 't = 1']
    """
    raise HelmscopeError(
        f"object to plot is a {type(shown).__name__}, but it must be a Simulation, a Trajectory, a Recording, a "
        "PhaseDiagram or a Trial"
    )


@plot.register(Plottable)
def _plottable(shown: Plottable, **options: Any) -> Figure:
    """Types in rooms below this one, which this module cannot import, override ``plot``."""
    if type(shown).plot is Plottable.plot:
        raise HelmscopeError(f"object to plot is a {type(shown).__name__}, but no figure is defined for it")
    return shown.plot(**options)


@plot.register(Trajectory)
def _trajectory(shown: Trajectory, **options: Any) -> Figure:
    return tokens_figure(shown, **options)


@plot.register(Simulation)
def _simulation(shown: Simulation, **options: Any) -> Figure:
    return tokens_figure(shown.trajectory, **{"title": shown.title, **options})


@plot.register(Recording)
def _recording(shown: Recording, **options: Any) -> Figure:
    return depth_figure(shown.trajectory, **{"title": f"{shown.origin.name}: {shown.anatomy}", **options})


@plot.register(PhaseDiagram)
def _phase_diagram(shown: PhaseDiagram, **options: Any) -> Figure:
    return phase_figure(shown, **options)
