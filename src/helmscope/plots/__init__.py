"""Figures of objects and Measurements, in one style. ``hs.plot(item)`` selects the figure by the type of its argument.
Needs the extra ``report``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.plots.bifurcation import bifurcation_figure as bifurcation_figure
    from helmscope.plots.density import density_figure as density_figure
    from helmscope.plots.density import density_path_figure as density_path_figure
    from helmscope.plots.depth import depth_figure as depth_figure
    from helmscope.plots.draw import plot as plot
    from helmscope.plots.free_energy import free_energy_figure as free_energy_figure
    from helmscope.plots.measurement import measurement_figure as measurement_figure
    from helmscope.plots.overview import overview_figure as overview_figure
    from helmscope.plots.phase import phase_figure as phase_figure
    from helmscope.plots.phase import phase_page as phase_page
    from helmscope.plots.probes import probe_bank_figure as probe_bank_figure
    from helmscope.plots.tokens import tokens_figure as tokens_figure
    from helmscope.plots.transport import barycenter_figure as barycenter_figure
    from helmscope.plots.transport import bridge_figure as bridge_figure
    from helmscope.plots.transport import plan_figure as plan_figure
    from helmscope.plots.trial import trial_figure as trial_figure

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
