"""Numerical integration: ``integrate`` turns a field and initial states into a Simulation; each stepper has a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.solve.dormand_prince import DormandPrince as DormandPrince
    from helmscope.solve.euler_maruyama import EulerMaruyama as EulerMaruyama
    from helmscope.solve.events import ClusterMerge as ClusterMerge
    from helmscope.solve.events import HittingTime as HittingTime
    from helmscope.solve.geodesic_euler import GeodesicEuler as GeodesicEuler
    from helmscope.solve.geodesic_heun import GeodesicHeun as GeodesicHeun
    from helmscope.solve.geodesic_rk4 import GeodesicRK4 as GeodesicRK4
    from helmscope.solve.heun import Heun as Heun
    from helmscope.solve.integrate import integrate as integrate
    from helmscope.solve.layer import Layer as Layer
    from helmscope.solve.noisy_layer import NoisyLayer as NoisyLayer
    from helmscope.solve.projected_euler import ProjectedEuler as ProjectedEuler
    from helmscope.solve.rk4 import RK4 as RK4
    from helmscope.solve.simulation import Simulation as Simulation
    from helmscope.solve.stochastic_heun import StochasticHeun as StochasticHeun
    from helmscope.solve.unprojected_euler import UnprojectedEuler as UnprojectedEuler

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
