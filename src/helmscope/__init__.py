"""helmscope: a laboratory for the dynamics of transformers.

Simulate tokens as interacting particles on the sphere, measure real transformers with the same instruments, and judge
claims with tests that can fail. Names below are imported on first use.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from helmscope.fields.attention import SA as SA
    from helmscope.fields.attention import USA as USA
    from helmscope.fields.field import ScaledVelocity as ScaledVelocity
    from helmscope.fields.merge import Merged as Merged
    from helmscope.fields.merge import merge_tokens as merge_tokens
    from helmscope.geometry import harmonics as harmonics
    from helmscope.geometry import linkage as linkage
    from helmscope.geometry import sphere as sphere
    from helmscope.geometry import surface as surface
    from helmscope.observe.clusters import MergeTree as MergeTree
    from helmscope.observe.clusters import cluster_count as cluster_count
    from helmscope.observe.clusters import merge_tree as merge_tree
    from helmscope.observe.energy import gaussian_energy_as_printed as gaussian_energy_as_printed
    from helmscope.observe.energy import interaction_energy as interaction_energy
    from helmscope.observe.energy import interaction_energy_rate as interaction_energy_rate
    from helmscope.observe.energy import interaction_energy_sum as interaction_energy_sum
    from helmscope.observe.energy import log_interaction_energy as log_interaction_energy
    from helmscope.observe.inner_products import clustering_fraction as clustering_fraction
    from helmscope.observe.inner_products import clustering_probability as clustering_probability
    from helmscope.observe.inner_products import inner_product_histogram as inner_product_histogram
    from helmscope.observe.inner_products import mean_inner_product as mean_inner_product
    from helmscope.observe.order import order_parameter as order_parameter
    from helmscope.observe.overview import overview as overview
    from helmscope.observe.rank import entropy_rank as entropy_rank
    from helmscope.observe.rank import nuclear_rank as nuclear_rank
    from helmscope.observe.rank import numerical_rank as numerical_rank
    from helmscope.observe.rank import participation_ratio as participation_ratio
    from helmscope.observe.rank import residual_composite as residual_composite
    from helmscope.observe.rank import residual_frobenius as residual_frobenius
    from helmscope.observe.rank import stable_rank as stable_rank
    from helmscope.observe.track import track as track
    from helmscope.plots.overview import overview_figure as overview_figure
    from helmscope.solve.dormand_prince import DormandPrince as DormandPrince
    from helmscope.solve.euler import ProjectedEuler as ProjectedEuler
    from helmscope.solve.events import ClusterMerge as ClusterMerge
    from helmscope.solve.events import HittingTime as HittingTime
    from helmscope.solve.geodesic_euler import GeodesicEuler as GeodesicEuler
    from helmscope.solve.geodesic_heun import GeodesicHeun as GeodesicHeun
    from helmscope.solve.geodesic_rk4 import GeodesicRK4 as GeodesicRK4
    from helmscope.solve.heun import Heun as Heun
    from helmscope.solve.integrate import integrate as integrate
    from helmscope.solve.layer import Layer as Layer
    from helmscope.solve.published import PublishedEuler as PublishedEuler
    from helmscope.solve.rk4 import RK4 as RK4
    from helmscope.solve.simulation import Simulation as Simulation
    from helmscope.store.manifest import Manifest as Manifest
    from helmscope.store.run_folder import RunFolder as RunFolder
    from helmscope.theory.energy import energy_max as energy_max
    from helmscope.theory.energy import energy_min as energy_min
    from helmscope.theory.energy import equiangular_energy as equiangular_energy
    from helmscope.theory.equiangular import equiangular as equiangular
    from helmscope.theory.equiangular import equiangular_rate as equiangular_rate
    from helmscope.theory.equiangular import hitting_time as hitting_time
    from helmscope.theory.metastable import metastable_time as metastable_time
    from helmscope.theory.metastable import metastable_time_asymptotic as metastable_time_asymptotic
    from helmscope.theory.probability import initial_clustering_probability as initial_clustering_probability
    from helmscope.theory.probability import wendel_probability as wendel_probability
    from helmscope.theory.starts import Orthonormal as Orthonormal
    from helmscope.theory.starts import Uniform as Uniform
    from helmscope.theory.starts import VonMisesFisher as VonMisesFisher
    from helmscope.types import HelmscopeError as HelmscopeError
    from helmscope.types import Outcome as Outcome
    from helmscope.types import Reducer as Reducer
    from helmscope.types import Ruling as Ruling
    from helmscope.types import Status as Status
    from helmscope.types import System as System
    from helmscope.types import Trajectory as Trajectory
    from helmscope.types import Verdict as Verdict
    from helmscope.types import check_measurement as check_measurement

# where each name lives; a test keeps it equal to the list above, which is for type checkers and readers
_HOME = {
    "helmscope.fields.attention": "SA USA",
    "helmscope.fields.field": "ScaledVelocity",
    "helmscope.fields.merge": "Merged merge_tokens",
    "helmscope.geometry": "harmonics linkage sphere surface",
    "helmscope.observe.clusters": "MergeTree cluster_count merge_tree",
    "helmscope.observe.energy": "gaussian_energy_as_printed interaction_energy interaction_energy_rate "
    "interaction_energy_sum log_interaction_energy",
    "helmscope.observe.inner_products": "clustering_fraction clustering_probability inner_product_histogram "
    "mean_inner_product",
    "helmscope.observe.order": "order_parameter",
    "helmscope.observe.overview": "overview",
    "helmscope.observe.rank": "entropy_rank nuclear_rank numerical_rank participation_ratio residual_composite "
    "residual_frobenius stable_rank",
    "helmscope.observe.track": "track",
    "helmscope.plots.overview": "overview_figure",
    "helmscope.solve.dormand_prince": "DormandPrince",
    "helmscope.solve.euler": "ProjectedEuler",
    "helmscope.solve.events": "ClusterMerge HittingTime",
    "helmscope.solve.geodesic_euler": "GeodesicEuler",
    "helmscope.solve.geodesic_heun": "GeodesicHeun",
    "helmscope.solve.geodesic_rk4": "GeodesicRK4",
    "helmscope.solve.heun": "Heun",
    "helmscope.solve.integrate": "integrate",
    "helmscope.solve.layer": "Layer",
    "helmscope.solve.published": "PublishedEuler",
    "helmscope.solve.rk4": "RK4",
    "helmscope.solve.simulation": "Simulation",
    "helmscope.store.manifest": "Manifest",
    "helmscope.store.run_folder": "RunFolder",
    "helmscope.theory.energy": "energy_max energy_min equiangular_energy",
    "helmscope.theory.equiangular": "equiangular equiangular_rate hitting_time",
    "helmscope.theory.metastable": "metastable_time metastable_time_asymptotic",
    "helmscope.theory.probability": "initial_clustering_probability wendel_probability",
    "helmscope.theory.starts": "Orthonormal Uniform VonMisesFisher",
    "helmscope.types": "HelmscopeError Outcome Reducer Ruling Status System Trajectory Verdict check_measurement",
}
_EXPORTS = {name: home for home, names in _HOME.items() for name in names.split()}
__all__ = ["__version__", *sorted(_EXPORTS)]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    home = _EXPORTS.get(name)
    if home is None:
        near = difflib.get_close_matches(name, _EXPORTS, n=1)
        hint = f": did you mean '{near[0]}'?" if near else ""
        raise AttributeError(f"module 'helmscope' has no attribute '{name}'{hint}")
    if home == "helmscope.geometry":
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
