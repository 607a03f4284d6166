"""Densities, the law of infinitely many tokens: grids (``CircleGrid``, ``SphereGrid``, ``ZonalGrid``), ``Density``,
its evolution under a field with noise (``evolve``), states at rest (``stationary_density``, ``bifurcation_diagram``),
free energy and entropy, Wasserstein gradients, JKO steps, and Gaussians on R^d.

Landscapes under noise: which basin a point ascends to (``basins``), and committors, the probability of reaching one set
before another, in closed form (``zonal_committor``), for any drift (``circle_committor``, ``sphere_committor``), on a
cloud (``cloud_committor``) and by simulation (``simulated_committor``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.meanfield.attention_potential import attention_potential as attention_potential
    from helmscope.meanfield.axis_force import AxisForce as AxisForce
    from helmscope.meanfield.basins import SaddleConnection as SaddleConnection
    from helmscope.meanfield.basins import label_basins as label_basins
    from helmscope.meanfield.basins import saddle_connections as saddle_connections
    from helmscope.meanfield.bifurcation import Branch as Branch
    from helmscope.meanfield.bifurcation import bifurcation_diagram as bifurcation_diagram
    from helmscope.meanfield.bifurcation import clustered_branch as clustered_branch
    from helmscope.meanfield.circle_grid import CircleGrid as CircleGrid
    from helmscope.meanfield.committor_chain import chain_committor as chain_committor
    from helmscope.meanfield.committor_chain import estimate_transition_matrix as estimate_transition_matrix
    from helmscope.meanfield.committor_circle import circle_committor as circle_committor
    from helmscope.meanfield.committor_cloud import cloud_committor as cloud_committor
    from helmscope.meanfield.committor_cloud import kernel_transition_matrix as kernel_transition_matrix
    from helmscope.meanfield.committor_simulated import HittingCounts as HittingCounts
    from helmscope.meanfield.committor_simulated import simulated_committor as simulated_committor
    from helmscope.meanfield.committor_sphere import sphere_committor as sphere_committor
    from helmscope.meanfield.committor_zonal import zonal_committor as zonal_committor
    from helmscope.meanfield.density import Density as Density
    from helmscope.meanfield.entropy_rate import EntropyRate as EntropyRate
    from helmscope.meanfield.entropy_rate import entropy_rate as entropy_rate
    from helmscope.meanfield.entropy_rate import fisher_information as fisher_information
    from helmscope.meanfield.evolve import DensityPath as DensityPath
    from helmscope.meanfield.evolve import evolve as evolve
    from helmscope.meanfield.forward_equation import ForwardEquation as ForwardEquation
    from helmscope.meanfield.free_energy import FreeEnergyRate as FreeEnergyRate
    from helmscope.meanfield.free_energy import density_interaction_energy as density_interaction_energy
    from helmscope.meanfield.free_energy import free_energy as free_energy
    from helmscope.meanfield.free_energy import free_energy_as_printed as free_energy_as_printed
    from helmscope.meanfield.free_energy import free_energy_rate as free_energy_rate
    from helmscope.meanfield.gaussian import Gaussian as Gaussian
    from helmscope.meanfield.gaussian import gaussian_entropy_rate as gaussian_entropy_rate
    from helmscope.meanfield.gaussian import gaussian_free_energy as gaussian_free_energy
    from helmscope.meanfield.gaussian import gaussian_free_energy_rate as gaussian_free_energy_rate
    from helmscope.meanfield.gaussian_flow import GaussianPath as GaussianPath
    from helmscope.meanfield.gaussian_flow import attention_blow_up_time as attention_blow_up_time
    from helmscope.meanfield.gaussian_flow import evolve_attention_gaussian as evolve_attention_gaussian
    from helmscope.meanfield.gaussian_flow import evolve_gaussian as evolve_gaussian
    from helmscope.meanfield.gaussian_flow import stationary_gaussian as stationary_gaussian
    from helmscope.meanfield.grid import Grid as Grid
    from helmscope.meanfield.growth import critical_nu as critical_nu
    from helmscope.meanfield.growth import growth_rates as growth_rates
    from helmscope.meanfield.jko import JkoStep as JkoStep
    from helmscope.meanfield.jko import jko_step as jko_step
    from helmscope.meanfield.jko_gaussian import GaussianStep as GaussianStep
    from helmscope.meanfield.jko_gaussian import gaussian_jko_step as gaussian_jko_step
    from helmscope.meanfield.jko_particles import ParticleStep as ParticleStep
    from helmscope.meanfield.jko_particles import particle_jko_step as particle_jko_step
    from helmscope.meanfield.sphere_grid import SphereGrid as SphereGrid
    from helmscope.meanfield.sphere_sets import Cap as Cap
    from helmscope.meanfield.sphere_sets import SphereSet as SphereSet
    from helmscope.meanfield.stationary import StationaryDensity as StationaryDensity
    from helmscope.meanfield.stationary import StationaryStatus as StationaryStatus
    from helmscope.meanfield.stationary import stationary_density as stationary_density
    from helmscope.meanfield.wasserstein import benamou_brenier_energy as benamou_brenier_energy
    from helmscope.meanfield.wasserstein import continuity_potential as continuity_potential
    from helmscope.meanfield.wasserstein import descent_velocity as descent_velocity
    from helmscope.meanfield.wasserstein import descent_velocity_as_printed as descent_velocity_as_printed
    from helmscope.meanfield.wasserstein import functional_rate as functional_rate
    from helmscope.meanfield.wasserstein import internal_energy_gradient as internal_energy_gradient
    from helmscope.meanfield.wasserstein import wasserstein_gradient as wasserstein_gradient
    from helmscope.meanfield.wasserstein import wasserstein_inner_product as wasserstein_inner_product
    from helmscope.meanfield.whitening import Whitening as Whitening
    from helmscope.meanfield.whitening import is_gradient_flow as is_gradient_flow
    from helmscope.meanfield.whitening import scalar_diffusion_error as scalar_diffusion_error
    from helmscope.meanfield.whitening import stationary_current as stationary_current
    from helmscope.meanfield.whitening import whiten as whiten
    from helmscope.meanfield.zonal_grid import ZonalGrid as ZonalGrid

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
