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
    from helmscope import jobs as jobs
    from helmscope.claims.curves import curve as curve
    from helmscope.claims.entry import Entry as Entry
    from helmscope.claims.entry import Ground as Ground
    from helmscope.claims.finding import Check as Check
    from helmscope.claims.finding import Count as Count
    from helmscope.claims.finding import Described as Described
    from helmscope.claims.finding import EveryLayer as EveryLayer
    from helmscope.claims.finding import Finding as Finding
    from helmscope.claims.finding import Identity as Identity
    from helmscope.claims.finding import Impossible as Impossible
    from helmscope.claims.finding import Paired as Paired
    from helmscope.claims.finding import Replicates as Replicates
    from helmscope.claims.finding import SomeLayer as SomeLayer
    from helmscope.claims.reading import read_catalogue as read_catalogue
    from helmscope.claims.registry import Case as Case
    from helmscope.claims.registry import experiment as experiment
    from helmscope.claims.trial import Trial as Trial
    from helmscope.claims.trial import run_trials as run_trials
    from helmscope.claims.trial import try_claim as try_claim
    from helmscope.fields import activations as activations
    from helmscope.fields.alibi import alibi as alibi
    from helmscope.fields.alibi import alibi_slopes as alibi_slopes
    from helmscope.fields.attention import SA as SA
    from helmscope.fields.attention import USA as USA
    from helmscope.fields.block import Block as Block
    from helmscope.fields.cross import CrossAttention as CrossAttention
    from helmscope.fields.depthwise import Depthwise as Depthwise
    from helmscope.fields.field import Field as Field
    from helmscope.fields.field import PlainField as PlainField
    from helmscope.fields.field import ScaledVelocity as ScaledVelocity
    from helmscope.fields.field import Space as Space
    from helmscope.fields.hardmax import Hardmax as Hardmax
    from helmscope.fields.helmholtz import Split as Split
    from helmscope.fields.helmholtz import helmholtz as helmholtz
    from helmscope.fields.helmholtz import helmholtz_as_printed as helmholtz_as_printed
    from helmscope.fields.hodge_gaussian import hodge_gaussian as hodge_gaussian
    from helmscope.fields.hodge_gaussian import hodge_linear as hodge_linear
    from helmscope.fields.hodge_jacobian import jacobian_split as jacobian_split
    from helmscope.fields.hodge_sphere import hodge_sphere as hodge_sphere
    from helmscope.fields.lowrank import LowRank as LowRank
    from helmscope.fields.merge import Merged as Merged
    from helmscope.fields.merge import merge_tokens as merge_tokens
    from helmscope.fields.mlp import MLP as MLP
    from helmscope.fields.mlp import GatedMLP as GatedMLP
    from helmscope.fields.multihead import MultiHead as MultiHead
    from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted as MultiHeadAsPrinted
    from helmscope.fields.noise import DivergenceForm as DivergenceForm
    from helmscope.fields.noise import IsotropicNoise as IsotropicNoise
    from helmscope.fields.noise import Ito as Ito
    from helmscope.fields.noise import LayerNormChain as LayerNormChain
    from helmscope.fields.noise import MatrixNoise as MatrixNoise
    from helmscope.fields.noise import Noise as Noise
    from helmscope.fields.noise import Process as Process
    from helmscope.fields.noise import StateNoise as StateNoise
    from helmscope.fields.noise import Stratonovich as Stratonovich
    from helmscope.fields.norms import LayerNorm as LayerNorm
    from helmscope.fields.norms import RMSNorm as RMSNorm
    from helmscope.fields.norms import UnitNorm as UnitNorm
    from helmscope.fields.norms import effective_beta as effective_beta
    from helmscope.fields.placement import NGPT as NGPT
    from helmscope.fields.placement import Half as Half
    from helmscope.fields.placement import NoNorm as NoNorm
    from helmscope.fields.placement import PostNorm as PostNorm
    from helmscope.fields.placement import PreNorm as PreNorm
    from helmscope.fields.placement import SandwichNorm as SandwichNorm
    from helmscope.fields.positions import Additive as Additive
    from helmscope.fields.positions import Rotary as Rotary
    from helmscope.fields.sinkhorn import SinkhornAttention as SinkhornAttention
    from helmscope.geometry import harmonics as harmonics
    from helmscope.geometry import linkage as linkage
    from helmscope.geometry import retraction as retraction
    from helmscope.geometry import sphere as sphere
    from helmscope.geometry import surface as surface
    from helmscope.intervene.attention import AblateHead as AblateHead
    from helmscope.intervene.attention import MaskKeys as MaskKeys
    from helmscope.intervene.attention import Perturb as Perturb
    from helmscope.intervene.attention import Reweigh as Reweigh
    from helmscope.intervene.change import changed as changed
    from helmscope.intervene.change import with_parameters as with_parameters
    from helmscope.intervene.edit import Edit as Edit
    from helmscope.intervene.states import Ablate as Ablate
    from helmscope.intervene.states import Add as Add
    from helmscope.intervene.states import Patch as Patch
    from helmscope.intervene.states import Replace as Replace
    from helmscope.kernels.choose import using as using
    from helmscope.kernels.dense import Dense as Dense
    from helmscope.kernels.flash import Flash as Flash
    from helmscope.kernels.harmonic import Harmonic as Harmonic
    from helmscope.kernels.streaming import Streaming as Streaming
    from helmscope.models.boxed import box_folder as box_folder
    from helmscope.models.boxed import box_texts as box_texts
    from helmscope.models.boxed import training_history as training_history
    from helmscope.models.certificate import Certificate as Certificate
    from helmscope.models.doctor import doctor as doctor
    from helmscope.models.experts import Mixture as Mixture
    from helmscope.models.keep import Keep as Keep
    from helmscope.models.load import Loaded as Loaded
    from helmscope.models.load import Origin as Origin
    from helmscope.models.load import load as load
    from helmscope.models.load import load_all as load_all
    from helmscope.models.names import head as head
    from helmscope.models.record import record as record
    from helmscope.models.recording import Recording as Recording
    from helmscope.models.subject import Subject as Subject
    from helmscope.models.twin import untrained_twin as untrained_twin
    from helmscope.models.watch import Context as Context
    from helmscope.models.watch import Site as Site
    from helmscope.observe.clusters import MergeTree as MergeTree
    from helmscope.observe.clusters import cluster_count as cluster_count
    from helmscope.observe.clusters import merge_tree as merge_tree
    from helmscope.observe.diagram import PhaseDiagram as PhaseDiagram
    from helmscope.observe.diffusion import anisotropy as anisotropy
    from helmscope.observe.diffusion import context_covariance as context_covariance
    from helmscope.observe.diffusion import diffusivity as diffusivity
    from helmscope.observe.diffusion import diffusivity_as_printed as diffusivity_as_printed
    from helmscope.observe.diffusion import independent_draws_covariance as independent_draws_covariance
    from helmscope.observe.diffusion import random_value_covariance as random_value_covariance
    from helmscope.observe.diffusion import shared_draw_covariance as shared_draw_covariance
    from helmscope.observe.diffusion import token_sampling_covariance as token_sampling_covariance
    from helmscope.observe.drift import DriftAndSwirl as DriftAndSwirl
    from helmscope.observe.drift import drift_and_swirl as drift_and_swirl
    from helmscope.observe.energy import gaussian_energy_as_printed as gaussian_energy_as_printed
    from helmscope.observe.energy import interaction_energy as interaction_energy
    from helmscope.observe.energy import interaction_energy_rate as interaction_energy_rate
    from helmscope.observe.energy import interaction_energy_sum as interaction_energy_sum
    from helmscope.observe.energy import log_interaction_energy as log_interaction_energy
    from helmscope.observe.generator import ambient_generator as ambient_generator
    from helmscope.observe.generator import discrete_generator as discrete_generator
    from helmscope.observe.generator import generator as generator
    from helmscope.observe.half_time import half_time as half_time
    from helmscope.observe.hull import hull_distance as hull_distance
    from helmscope.observe.inner_products import clustering_fraction as clustering_fraction
    from helmscope.observe.inner_products import clustering_probability as clustering_probability
    from helmscope.observe.inner_products import inner_product_histogram as inner_product_histogram
    from helmscope.observe.inner_products import mean_inner_product as mean_inner_product
    from helmscope.observe.jacobian import JacobianSpectrum as JacobianSpectrum
    from helmscope.observe.jacobian import jacobian_spectrum as jacobian_spectrum
    from helmscope.observe.kernel import KernelStatistics as KernelStatistics
    from helmscope.observe.kernel import bistochastic_defect as bistochastic_defect
    from helmscope.observe.kernel import effective_keys as effective_keys
    from helmscope.observe.kernel import first_token_mass as first_token_mass
    from helmscope.observe.kernel import future_mass as future_mass
    from helmscope.observe.kernel import kernel_statistics as kernel_statistics
    from helmscope.observe.kernel import largest_weight as largest_weight
    from helmscope.observe.kernel import normalized_rows as normalized_rows
    from helmscope.observe.kernel import received_mass as received_mass
    from helmscope.observe.kernel import row_entropy as row_entropy
    from helmscope.observe.kernel import row_mass as row_mass
    from helmscope.observe.kernel import symmetry_defect as symmetry_defect
    from helmscope.observe.lens import lens_divergence as lens_divergence
    from helmscope.observe.loss import ablation_loss as ablation_loss
    from helmscope.observe.loss import loss_under as loss_under
    from helmscope.observe.loss import next_token_loss as next_token_loss
    from helmscope.observe.loss import token_loss as token_loss
    from helmscope.observe.measure import measure as measure
    from helmscope.observe.mixture import VMFMixture as VMFMixture
    from helmscope.observe.mixture import vmf_concentration as vmf_concentration
    from helmscope.observe.mixture import vmf_log_density as vmf_log_density
    from helmscope.observe.mixture import vmf_mixture as vmf_mixture
    from helmscope.observe.order import order_parameter as order_parameter
    from helmscope.observe.overview import overview as overview
    from helmscope.observe.phase import phase_diagram as phase_diagram
    from helmscope.observe.phase import published_probability as published_probability
    from helmscope.observe.rank import entropy_rank as entropy_rank
    from helmscope.observe.rank import nuclear_rank as nuclear_rank
    from helmscope.observe.rank import numerical_rank as numerical_rank
    from helmscope.observe.rank import participation_ratio as participation_ratio
    from helmscope.observe.rank import residual_composite as residual_composite
    from helmscope.observe.rank import residual_frobenius as residual_frobenius
    from helmscope.observe.rank import stable_rank as stable_rank
    from helmscope.observe.token_logits import token_logits as token_logits
    from helmscope.observe.track import track as track
    from helmscope.plots.draw import plot as plot
    from helmscope.plots.overview import overview_figure as overview_figure
    from helmscope.plots.phase import phase_figure as phase_figure
    from helmscope.plots.phase import phase_page as phase_page
    from helmscope.plots.trial import trial_figure as trial_figure
    from helmscope.runs.listing import RunSummary as RunSummary
    from helmscope.runs.listing import list_runs as list_runs
    from helmscope.runs.on_ray import Ray as Ray
    from helmscope.runs.processes import Processes as Processes
    from helmscope.runs.progress import ProgressBar as ProgressBar
    from helmscope.runs.run import RunResult as RunResult
    from helmscope.runs.run import UnitsFailed as UnitsFailed
    from helmscope.runs.run import run as run
    from helmscope.runs.serial import Serial as Serial
    from helmscope.runs.unit import Unit as Unit
    from helmscope.solve.dormand_prince import DormandPrince as DormandPrince
    from helmscope.solve.euler import ProjectedEuler as ProjectedEuler
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
    from helmscope.solve.published import PublishedEuler as PublishedEuler
    from helmscope.solve.rk4 import RK4 as RK4
    from helmscope.solve.simulation import Simulation as Simulation
    from helmscope.solve.stochastic_heun import StochasticHeun as StochasticHeun
    from helmscope.stats.paired import paired_difference as paired_difference
    from helmscope.stats.power import decisive_effect as decisive_effect
    from helmscope.stats.power import power as power
    from helmscope.stats.reduce import reduce_replicates as reduce_replicates
    from helmscope.stats.scales import Bounded as Bounded
    from helmscope.stats.scales import FisherZ as FisherZ
    from helmscope.stats.scales import Log as Log
    from helmscope.stats.scales import Plain as Plain
    from helmscope.stats.summary import summary as summary
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
    from helmscope.types import Control as Control
    from helmscope.types import Exhibit as Exhibit
    from helmscope.types import HelmscopeError as HelmscopeError
    from helmscope.types import Instrument as Instrument
    from helmscope.types import Interval as Interval
    from helmscope.types import Needs as Needs
    from helmscope.types import Outcome as Outcome
    from helmscope.types import Region as Region
    from helmscope.types import Ruling as Ruling
    from helmscope.types import Status as Status
    from helmscope.types import System as System
    from helmscope.types import Trajectory as Trajectory
    from helmscope.types import Verdict as Verdict
    from helmscope.types import check_measurement as check_measurement

# where each name lives; a test keeps it equal to the list above, which is for type checkers and readers
_HOME = {
    "helmscope": "jobs",
    "helmscope.claims.curves": "curve",
    "helmscope.claims.entry": "Entry Ground",
    "helmscope.claims.finding": (
        "Check Count Described EveryLayer Finding Identity Impossible Paired Replicates SomeLayer"
    ),
    "helmscope.claims.reading": "read_catalogue",
    "helmscope.claims.registry": "Case experiment",
    "helmscope.claims.trial": "Trial run_trials try_claim",
    "helmscope.fields": "activations",
    "helmscope.fields.alibi": "alibi alibi_slopes",
    "helmscope.fields.attention": "SA USA",
    "helmscope.fields.block": "Block",
    "helmscope.fields.cross": "CrossAttention",
    "helmscope.fields.depthwise": "Depthwise",
    "helmscope.fields.field": "Field PlainField ScaledVelocity Space",
    "helmscope.fields.hardmax": "Hardmax",
    "helmscope.fields.helmholtz": "Split helmholtz helmholtz_as_printed",
    "helmscope.fields.hodge_gaussian": "hodge_gaussian hodge_linear",
    "helmscope.fields.hodge_jacobian": "jacobian_split",
    "helmscope.fields.hodge_sphere": "hodge_sphere",
    "helmscope.fields.lowrank": "LowRank",
    "helmscope.fields.merge": "Merged merge_tokens",
    "helmscope.fields.mlp": "GatedMLP MLP",
    "helmscope.fields.multihead": "MultiHead",
    "helmscope.fields.multihead_as_printed": "MultiHeadAsPrinted",
    "helmscope.fields.noise": (
        "DivergenceForm IsotropicNoise Ito LayerNormChain MatrixNoise Noise Process StateNoise Stratonovich"
    ),
    "helmscope.fields.norms": "LayerNorm RMSNorm UnitNorm effective_beta",
    "helmscope.fields.placement": "Half NGPT NoNorm PostNorm PreNorm SandwichNorm",
    "helmscope.fields.positions": "Additive Rotary",
    "helmscope.fields.sinkhorn": "SinkhornAttention",
    "helmscope.geometry": "harmonics linkage retraction sphere surface",
    "helmscope.intervene.attention": "AblateHead MaskKeys Perturb Reweigh",
    "helmscope.intervene.change": "changed with_parameters",
    "helmscope.intervene.edit": "Edit",
    "helmscope.intervene.states": "Ablate Add Patch Replace",
    "helmscope.kernels.choose": "using",
    "helmscope.kernels.dense": "Dense",
    "helmscope.kernels.flash": "Flash",
    "helmscope.kernels.harmonic": "Harmonic",
    "helmscope.kernels.streaming": "Streaming",
    "helmscope.models.boxed": "box_folder box_texts training_history",
    "helmscope.models.certificate": "Certificate",
    "helmscope.models.doctor": "doctor",
    "helmscope.models.experts": "Mixture",
    "helmscope.models.keep": "Keep",
    "helmscope.models.load": "Loaded Origin load load_all",
    "helmscope.models.names": "head",
    "helmscope.models.record": "record",
    "helmscope.models.recording": "Recording",
    "helmscope.models.subject": "Subject",
    "helmscope.models.twin": "untrained_twin",
    "helmscope.models.watch": "Context Site",
    "helmscope.observe.clusters": "MergeTree cluster_count merge_tree",
    "helmscope.observe.diffusion": (
        "anisotropy context_covariance diffusivity diffusivity_as_printed independent_draws_covariance "
        "random_value_covariance shared_draw_covariance token_sampling_covariance"
    ),
    "helmscope.observe.diagram": "PhaseDiagram",
    "helmscope.observe.drift": "DriftAndSwirl drift_and_swirl",
    "helmscope.observe.energy": (
        "gaussian_energy_as_printed interaction_energy interaction_energy_rate interaction_energy_sum "
        "log_interaction_energy"
    ),
    "helmscope.observe.generator": "ambient_generator discrete_generator generator",
    "helmscope.observe.half_time": "half_time",
    "helmscope.observe.hull": "hull_distance",
    "helmscope.observe.inner_products": (
        "clustering_fraction clustering_probability inner_product_histogram mean_inner_product"
    ),
    "helmscope.observe.jacobian": "JacobianSpectrum jacobian_spectrum",
    "helmscope.observe.kernel": (
        "KernelStatistics bistochastic_defect effective_keys first_token_mass future_mass kernel_statistics "
        "largest_weight normalized_rows received_mass row_entropy row_mass symmetry_defect"
    ),
    "helmscope.observe.lens": "lens_divergence",
    "helmscope.observe.loss": "ablation_loss loss_under next_token_loss token_loss",
    "helmscope.observe.measure": "measure",
    "helmscope.observe.mixture": "VMFMixture vmf_concentration vmf_log_density vmf_mixture",
    "helmscope.observe.order": "order_parameter",
    "helmscope.observe.overview": "overview",
    "helmscope.observe.phase": "phase_diagram published_probability",
    "helmscope.observe.rank": (
        "entropy_rank nuclear_rank numerical_rank participation_ratio residual_composite residual_frobenius stable_rank"
    ),
    "helmscope.observe.token_logits": "token_logits",
    "helmscope.observe.track": "track",
    "helmscope.plots.draw": "plot",
    "helmscope.plots.overview": "overview_figure",
    "helmscope.plots.phase": "phase_figure phase_page",
    "helmscope.plots.trial": "trial_figure",
    "helmscope.runs.listing": "RunSummary list_runs",
    "helmscope.runs.on_ray": "Ray",
    "helmscope.runs.processes": "Processes",
    "helmscope.runs.progress": "ProgressBar",
    "helmscope.runs.run": "RunResult UnitsFailed run",
    "helmscope.runs.serial": "Serial",
    "helmscope.runs.unit": "Unit",
    "helmscope.solve.dormand_prince": "DormandPrince",
    "helmscope.solve.euler": "ProjectedEuler",
    "helmscope.solve.euler_maruyama": "EulerMaruyama",
    "helmscope.solve.events": "ClusterMerge HittingTime",
    "helmscope.solve.geodesic_euler": "GeodesicEuler",
    "helmscope.solve.geodesic_heun": "GeodesicHeun",
    "helmscope.solve.geodesic_rk4": "GeodesicRK4",
    "helmscope.solve.heun": "Heun",
    "helmscope.solve.integrate": "integrate",
    "helmscope.solve.layer": "Layer",
    "helmscope.solve.noisy_layer": "NoisyLayer",
    "helmscope.solve.published": "PublishedEuler",
    "helmscope.solve.rk4": "RK4",
    "helmscope.solve.simulation": "Simulation",
    "helmscope.solve.stochastic_heun": "StochasticHeun",
    "helmscope.stats.power": "decisive_effect power",
    "helmscope.stats.paired": "paired_difference",
    "helmscope.stats.reduce": "reduce_replicates",
    "helmscope.stats.scales": "Bounded FisherZ Log Plain",
    "helmscope.stats.summary": "summary",
    "helmscope.store.manifest": "Manifest",
    "helmscope.store.run_folder": "RunFolder",
    "helmscope.theory.energy": "energy_max energy_min equiangular_energy",
    "helmscope.theory.equiangular": "equiangular equiangular_rate hitting_time",
    "helmscope.theory.metastable": "metastable_time metastable_time_asymptotic",
    "helmscope.theory.probability": "initial_clustering_probability wendel_probability",
    "helmscope.theory.starts": "Orthonormal Uniform VonMisesFisher",
    "helmscope.types": (
        "Control Exhibit HelmscopeError Instrument Interval Needs Outcome Region Ruling Status System Trajectory "
        "Verdict check_measurement"
    ),
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
    if home in ("helmscope", "helmscope.fields", "helmscope.geometry"):  # a module
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
