"""Optimal transport between clouds of weighted points, and Schroedinger bridges.

A cost (``cost``) and two clouds (``clouds``) make a problem; a solver returns a ``Plan``; a ``Bridge`` moves one cloud
into the other by a stochastic process with the least control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.transport.barycenter import Barycenter as Barycenter
    from helmscope.transport.barycenter import free_support_barycenter as free_support_barycenter
    from helmscope.transport.barycenter_grid import fixed_support_barycenter as fixed_support_barycenter
    from helmscope.transport.brenier import BrenierPotential as BrenierPotential
    from helmscope.transport.brenier import brenier_potential as brenier_potential
    from helmscope.transport.bridge import Bridge as Bridge
    from helmscope.transport.circle import circle_plan as circle_plan
    from helmscope.transport.cloud_bridge import CloudBridge as CloudBridge
    from helmscope.transport.cloud_bridge import bridge_clouds as bridge_clouds
    from helmscope.transport.cost import Chordal as Chordal
    from helmscope.transport.cost import Cost as Cost
    from helmscope.transport.cost import Euclidean as Euclidean
    from helmscope.transport.cost import Geodesic as Geodesic
    from helmscope.transport.discrete_bridge import DiscreteBridge as DiscreteBridge
    from helmscope.transport.discrete_bridge import bridge_chain as bridge_chain
    from helmscope.transport.displacement import interpolate as interpolate
    from helmscope.transport.distance import w2 as w2
    from helmscope.transport.distance import wasserstein as wasserstein
    from helmscope.transport.divergence import SinkhornDivergence as SinkhornDivergence
    from helmscope.transport.divergence import sinkhorn_divergence as sinkhorn_divergence
    from helmscope.transport.exact import exact_plan as exact_plan
    from helmscope.transport.gaussian import gaussian_w2 as gaussian_w2
    from helmscope.transport.gaussian_bridge import GaussianBridge as GaussianBridge
    from helmscope.transport.line import line_plan as line_plan
    from helmscope.transport.mean_field import MeanFieldReference as MeanFieldReference
    from helmscope.transport.mean_field import mean_field_reference as mean_field_reference
    from helmscope.transport.particle_bridge import ParticleBridge as ParticleBridge
    from helmscope.transport.particle_bridge import bridge_particles as bridge_particles
    from helmscope.transport.plan import Plan as Plan
    from helmscope.transport.plan import PlanStatus as PlanStatus
    from helmscope.transport.sinkhorn_plan import sinkhorn as sinkhorn
    from helmscope.transport.sliced import random_frames as random_frames
    from helmscope.transport.sliced import sliced_w2 as sliced_w2
    from helmscope.transport.sliced import w2_on_great_circles as w2_on_great_circles

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
