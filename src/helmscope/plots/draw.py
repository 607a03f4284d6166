"""The function ``plot``, which selects the figure by the type of its argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import xarray as xr

from helmscope.meanfield.density import Density
from helmscope.meanfield.evolve import DensityPath
from helmscope.models.recording import Recording
from helmscope.observe.diagram import PhaseDiagram
from helmscope.observe.interventions import INTERVENTIONS
from helmscope.observe.measure import measurement_names
from helmscope.observe.probes import ProbeBank
from helmscope.plots.bifurcation import bifurcation_figure
from helmscope.plots.density import density_figure, density_path_figure
from helmscope.plots.depth import depth_figure
from helmscope.plots.free_energy import free_energy_figure
from helmscope.plots.measurement import measurement_figure
from helmscope.plots.measurements import measurements_figure
from helmscope.plots.overview import is_overview, overview_figure
from helmscope.plots.phase import phase_figure
from helmscope.plots.probes import probe_bank_figure
from helmscope.plots.tokens import tokens_figure
from helmscope.plots.transport import barycenter_figure, bridge_figure, discrete_bridge_figure, plan_figure
from helmscope.solve.simulation import Simulation
from helmscope.transport.barycenter import Barycenter
from helmscope.transport.bridge import Bridge
from helmscope.transport.discrete_bridge import DiscreteBridge
from helmscope.transport.plan import Plan
from helmscope.types import HelmscopeError, Plottable, Trajectory, check_name, type_with_article

if TYPE_CHECKING:
    from helmscope.plots.figure import Figure


@singledispatch
def plot(item: object, **options: Any) -> Figure:
    """Figure of an object, displayed automatically in a notebook; its ``save("x.pdf")`` writes PNG, SVG or PDF.

    - a ``Simulation`` or a ``Trajectory``: its tokens at a few times (``tokens_figure``: ``system``, ``panels``,
      ``view``, ``title``);
    - a ``Recording``: clustering, rank and radius over depth (``depth_figure``: ``title``);
    - a Measurement, such as ``track`` or ``overview`` returns, or a dict of several by label: curves with intervals
      over depth, layer or time, and maps over heads (``measurement_figure``: ``variables``, ``log``, ``title``);
    - all measurements of a system, the dict that ``measure`` returns: panels over depth, and maps over heads
      (``measurements_figure``: ``title``), or single ``variables`` of them;
    - an ``overview``, or a dict of several by label (``overview_figure``: ``title``), or single ``variables`` of them;
    - a ``PhaseDiagram``: heat maps (``phase_figure``: ``title``);
    - a transport ``Plan`` (``plan_figure``: ``lines``, ``title``) or ``Barycenter`` (``barycenter_figure``: ``title``);
    - a ``Bridge``: its marginals over time (``bridge_figure``: ``n``, ``panels``, ``seed``, ``title``), or a
      ``DiscreteBridge``: the probabilities of its states (``discrete_bridge_figure``: ``title``);
    - a ``Density`` (``density_figure``: ``view``, ``title``), or a ``DensityPath``: a density over time
      (``density_path_figure``: ``panels``, ``view``, ``title``);
    - a ``density_overview`` with a free energy: it and its rate (``free_energy_figure``: ``title``), or single
      ``variables`` as curves;
    - a ``bifurcation_diagram``: the order parameter over nu (``bifurcation_figure``: ``title``);
    - a ``ProbeBank``: its probes over the angle from their axes (``probe_bank_figure``: ``title``);
    - a ``Trial``: its statistic with its region, and the measured variables (``trial_figure``).

    All but Measurements and probe banks also have a method ``plot``. Raises HelmscopeError for any other object, and
    for an option that the figure does not have.

    >>> import torch
    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=4.0), torch.eye(2), times=[0.0, 1.0])
    >>> [panel.get_title() for panel in plot(run, system=0).axes[:2]]
    ['t = 0', 't = 1']
    """
    raise HelmscopeError(
        f"object to plot is {type_with_article(item)}, but it must be a Simulation, a Trajectory, a Recording, a "
        "Measurement, a dict of Measurements, a PhaseDiagram, a Plan, a Barycenter, a Bridge, a Density, a "
        "DensityPath, a ProbeBank or a Trial"
    )


def _draw(figure: Callable[..., Figure], item: object, options: Mapping[str, Any]) -> Figure:
    """Calls the function of a figure; raises HelmscopeError for an option that it does not have."""
    parameters = inspect.signature(figure).parameters.values()
    allowed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        check_name("option of plot", name, allowed)
    return figure(item, **options)


@plot.register(Plottable)
def _plottable(item: Plottable, **options: Any) -> Figure:
    """Types in packages below this one, which this module cannot import, override ``plot``."""
    if type(item).plot is Plottable.plot:
        raise HelmscopeError(f"object to plot is {type_with_article(item)}, but no figure is defined for it")
    return item.plot(**options)


@plot.register(Trajectory)
def _trajectory(item: Trajectory, **options: Any) -> Figure:
    return _draw(tokens_figure, item, options)


@plot.register(Simulation)
def _simulation(item: Simulation, **options: Any) -> Figure:
    return _draw(tokens_figure, item.trajectory, {"title": item.title, **options})


@plot.register(Recording)
def _recording(item: Recording, **options: Any) -> Figure:
    return _draw(depth_figure, item.trajectory, {"title": f"{item.origin.title}: {item.anatomy}", **options})


@plot.register(PhaseDiagram)
def _phase_diagram(item: PhaseDiagram, **options: Any) -> Figure:
    return _draw(phase_figure, item, options)


@plot.register(Plan)
def _plan(item: Plan, **options: Any) -> Figure:
    return _draw(plan_figure, item, options)


@plot.register(Barycenter)
def _barycenter(item: Barycenter, **options: Any) -> Figure:
    return _draw(barycenter_figure, item, options)


@plot.register(Bridge)
def _bridge(item: Bridge, **options: Any) -> Figure:
    return _draw(bridge_figure, item, options)


@plot.register(DiscreteBridge)
def _discrete_bridge(item: DiscreteBridge, **options: Any) -> Figure:
    return _draw(discrete_bridge_figure, item, options)


@plot.register(ProbeBank)
def _probe_bank(item: ProbeBank, **options: Any) -> Figure:
    return _draw(probe_bank_figure, item, options)


@plot.register(Density)
def _density(item: Density, **options: Any) -> Figure:
    return _draw(density_figure, item, options)


@plot.register(DensityPath)
def _density_path(item: DensityPath, **options: Any) -> Figure:
    return _draw(density_path_figure, item, options)


@plot.register(xr.Dataset)
def _measurement(item: xr.Dataset, **options: Any) -> Figure:
    # a phase diagram that was read from a file is a plain Dataset
    if {"beta", "time"} <= set(item.dims) and "probability" in item:
        return _draw(phase_figure, item, options)
    if {"beta", "nu"} <= set(item.dims) and "critical_nu" in item:
        return _draw(bifurcation_figure, item, options)
    chosen = {"variables", "log"} & set(options)
    if {"free_energy", "free_energy_rate"} <= set(item) and not chosen:
        return _draw(free_energy_figure, item, options)
    if is_overview(item) and not chosen:
        return _draw(overview_figure, item, options)
    return _draw(measurement_figure, item, options)


@plot.register(xr.DataArray)
def _variable(item: xr.DataArray, **options: Any) -> Figure:
    name = "value" if item.name is None else str(item.name)
    return _draw(measurement_figure, item.to_dataset(name=name), options)


@plot.register(Mapping)
def _measurements(item: Mapping[str, xr.Dataset], **options: Any) -> Figure:
    if item and set(item) <= {*measurement_names(), *INTERVENTIONS} and not {"variables", "log"} & set(options):
        return _draw(measurements_figure, item, options)
    if item and all(map(is_overview, item.values())) and not {"variables", "log"} & set(options):
        return _draw(overview_figure, item, options)
    return _draw(measurement_figure, item, options)
