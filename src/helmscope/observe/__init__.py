"""Observables of tokens and instruments for systems, one file per quantity.

Functions of tokens take (*batch, n, d) and reduce the last two axes; ``track`` turns them into Measurements over time,
and ``overview`` tracks a fixed set of them. Instruments look at attention weights and MLPs instead of states:
``system.replay`` runs some of them, ``measure`` takes all measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.observe.arcs import arc_length as arc_length
    from helmscope.observe.arcs import matched_flow_times as matched_flow_times
    from helmscope.observe.attention_diffusion import AttentionDiffusion as AttentionDiffusion
    from helmscope.observe.attention_diffusion import AttentionDiffusionSpectrum as AttentionDiffusionSpectrum
    from helmscope.observe.attention_diffusion import attention_diffusion as attention_diffusion
    from helmscope.observe.attention_diffusion import attention_diffusion_spectrum as attention_diffusion_spectrum
    from helmscope.observe.attention_drift import AttentionDrift as AttentionDrift
    from helmscope.observe.attention_drift import attention_drift as attention_drift
    from helmscope.observe.attention_kl import key_noise_kl as key_noise_kl
    from helmscope.observe.attention_kl import query_noise_kl as query_noise_kl
    from helmscope.observe.attention_mlp_factorial import attention_mlp_factorial as attention_mlp_factorial
    from helmscope.observe.attention_surface_divergence import (
        attention_surface_divergence as attention_surface_divergence,
    )
    from helmscope.observe.attention_temperature_damage import (
        attention_temperature_damage as attention_temperature_damage,
    )
    from helmscope.observe.bistochasticity import Bistochasticity as Bistochasticity
    from helmscope.observe.bistochasticity import balance_kl as balance_kl
    from helmscope.observe.bistochasticity import balanced_kernel as balanced_kernel
    from helmscope.observe.bistochasticity import bistochasticity as bistochasticity
    from helmscope.observe.bistochasticity import causal_uniform_column_sums as causal_uniform_column_sums
    from helmscope.observe.cloud_projection import cloud_projection as cloud_projection
    from helmscope.observe.clusters import MergeTree as MergeTree
    from helmscope.observe.clusters import cluster_count as cluster_count
    from helmscope.observe.clusters import merge_tree as merge_tree
    from helmscope.observe.context_group import ContextGroup as ContextGroup
    from helmscope.observe.context_noise import context_group_noise as context_group_noise
    from helmscope.observe.context_noise import context_groups as context_groups
    from helmscope.observe.context_noise import context_noise as context_noise
    from helmscope.observe.context_statistics import covariance_regression as covariance_regression
    from helmscope.observe.damage import damage_under_edits as damage_under_edits
    from helmscope.observe.density_overview import density_overview as density_overview
    from helmscope.observe.depth_steps import depth_steps as depth_steps
    from helmscope.observe.diagram import PhaseDiagram as PhaseDiagram
    from helmscope.observe.diffusion import anisotropy as anisotropy
    from helmscope.observe.diffusion import context_covariance as context_covariance
    from helmscope.observe.diffusion import diffusivity as diffusivity
    from helmscope.observe.diffusion import diffusivity_as_printed as diffusivity_as_printed
    from helmscope.observe.diffusion import independent_draws_covariance as independent_draws_covariance
    from helmscope.observe.diffusion import random_value_covariance as random_value_covariance
    from helmscope.observe.diffusion import shared_draw_covariance as shared_draw_covariance
    from helmscope.observe.diffusion import token_sampling_covariance as token_sampling_covariance
    from helmscope.observe.dimension import HighDimensionWarning as HighDimensionWarning
    from helmscope.observe.dimension import dimension_by_scale as dimension_by_scale
    from helmscope.observe.dimension import dimension_by_size as dimension_by_size
    from helmscope.observe.dimension import gride as gride
    from helmscope.observe.dimension import two_nn as two_nn
    from helmscope.observe.dimension import two_nn_fit as two_nn_fit
    from helmscope.observe.dimension import two_nn_mle as two_nn_mle
    from helmscope.observe.effective_beta import EffectiveBeta as EffectiveBeta
    from helmscope.observe.effective_beta import effective_beta as effective_beta
    from helmscope.observe.energy import gaussian_energy_as_printed as gaussian_energy_as_printed
    from helmscope.observe.energy import interaction_energy as interaction_energy
    from helmscope.observe.energy import interaction_energy_rate as interaction_energy_rate
    from helmscope.observe.energy import interaction_energy_sum as interaction_energy_sum
    from helmscope.observe.energy import log_interaction_energy as log_interaction_energy
    from helmscope.observe.entropy import PooledClouds as PooledClouds
    from helmscope.observe.entropy import entropy_along_depth as entropy_along_depth
    from helmscope.observe.entropy import gaussian_entropy as gaussian_entropy
    from helmscope.observe.entropy import gaussian_fisher_information as gaussian_fisher_information
    from helmscope.observe.entropy import matrix_entropy as matrix_entropy
    from helmscope.observe.equilibria import Equilibria as Equilibria
    from helmscope.observe.equilibria import find_equilibria as find_equilibria
    from helmscope.observe.fourier_band_damage import fourier_band_damage as fourier_band_damage
    from helmscope.observe.free_energy import free_energy_along_depth as free_energy_along_depth
    from helmscope.observe.generator import ambient_generator as ambient_generator
    from helmscope.observe.generator import convergence_order as convergence_order
    from helmscope.observe.generator import discrete_generator as discrete_generator
    from helmscope.observe.generator import richardson_limit as richardson_limit
    from helmscope.observe.generator import sphere_generator as sphere_generator
    from helmscope.observe.generator_test import generator_test as generator_test
    from helmscope.observe.half_times import half_time as half_time
    from helmscope.observe.head_ablation_damage import KernelRank as KernelRank
    from helmscope.observe.head_ablation_damage import MatchedPairs as MatchedPairs
    from helmscope.observe.head_ablation_damage import head_ablation_damage as head_ablation_damage
    from helmscope.observe.head_ablation_damage import head_interaction as head_interaction
    from helmscope.observe.head_ablation_damage import matched_pairs as matched_pairs
    from helmscope.observe.hull import hull_distance as hull_distance
    from helmscope.observe.inner_products import close_pair_share as close_pair_share
    from helmscope.observe.inner_products import close_pair_shares as close_pair_shares
    from helmscope.observe.inner_products import inner_product_histogram as inner_product_histogram
    from helmscope.observe.inner_products import inner_product_quantiles as inner_product_quantiles
    from helmscope.observe.inner_products import mean_inner_product as mean_inner_product
    from helmscope.observe.interventions import intervention_measurements as intervention_measurements
    from helmscope.observe.interventions import intervention_names as intervention_names
    from helmscope.observe.jacobian import JacobianSpectrum as JacobianSpectrum
    from helmscope.observe.jacobian import jacobian_spectrum as jacobian_spectrum
    from helmscope.observe.jko_step_test import jko_step_test as jko_step_test
    from helmscope.observe.kernel import KernelStatistics as KernelStatistics
    from helmscope.observe.kernel import bistochastic_defect as bistochastic_defect
    from helmscope.observe.kernel import column_sum_deviation_rms as column_sum_deviation_rms
    from helmscope.observe.kernel import effective_keys as effective_keys
    from helmscope.observe.kernel import first_token_mass as first_token_mass
    from helmscope.observe.kernel import future_mass as future_mass
    from helmscope.observe.kernel import kernel_statistics as kernel_statistics
    from helmscope.observe.kernel import largest_weight as largest_weight
    from helmscope.observe.kernel import received_mass as received_mass
    from helmscope.observe.kernel import row_entropy as row_entropy
    from helmscope.observe.kernel import row_mass as row_mass
    from helmscope.observe.kernel import symmetry_defect as symmetry_defect
    from helmscope.observe.layer_ablation_damage import AblationKind as AblationKind
    from helmscope.observe.layer_ablation_damage import LayerPart as LayerPart
    from helmscope.observe.layer_ablation_damage import layer_ablation_damage as layer_ablation_damage
    from helmscope.observe.layer_whitening import LayerWhitening as LayerWhitening
    from helmscope.observe.layer_whitening import layer_whitening as layer_whitening
    from helmscope.observe.lens import logit_lens_kl as logit_lens_kl
    from helmscope.observe.loss import head_ablation_loss as head_ablation_loss
    from helmscope.observe.loss import loss_under_edits as loss_under_edits
    from helmscope.observe.loss import next_token_loss as next_token_loss
    from helmscope.observe.loss import token_loss as token_loss
    from helmscope.observe.loss_gradient_cosine import loss_gradient as loss_gradient
    from helmscope.observe.loss_gradient_cosine import loss_gradient_cosine as loss_gradient_cosine
    from helmscope.observe.measure import measure as measure
    from helmscope.observe.measure import measurement_names as measurement_names
    from helmscope.observe.measure import standalone_measurements as standalone_measurements
    from helmscope.observe.measure import unsupported_measurements as unsupported_measurements
    from helmscope.observe.mixture import VMFMixture as VMFMixture
    from helmscope.observe.mixture import vmf_concentration as vmf_concentration
    from helmscope.observe.mixture import vmf_log_density as vmf_log_density
    from helmscope.observe.mixture import vmf_mixture as vmf_mixture
    from helmscope.observe.mlp_entropy_change import mlp_entropy_change as mlp_entropy_change
    from helmscope.observe.mlp_force import MlpForce as MlpForce
    from helmscope.observe.mlp_force import mlp_force as mlp_force
    from helmscope.observe.mlp_jacobian import MlpJacobian as MlpJacobian
    from helmscope.observe.mlp_jacobian import mlp_jacobian as mlp_jacobian
    from helmscope.observe.mlp_swirl_bound import mlp_swirl_bound as mlp_swirl_bound
    from helmscope.observe.mlp_weights import GateSparsity as GateSparsity
    from helmscope.observe.mlp_weights import gate_sparsity as gate_sparsity
    from helmscope.observe.mlp_weights import gaussian_coherence as gaussian_coherence
    from helmscope.observe.mlp_weights import mlp_weights as mlp_weights
    from helmscope.observe.mlp_weights import neuron_alignment as neuron_alignment
    from helmscope.observe.mlp_weights import neuron_coherence as neuron_coherence
    from helmscope.observe.mlp_weights import permuted_alignment as permuted_alignment
    from helmscope.observe.mlp_weights import row_coherence as row_coherence
    from helmscope.observe.mlp_weights import welch_bound as welch_bound
    from helmscope.observe.mobility_test import mobility_test as mobility_test
    from helmscope.observe.nearest import NearestNeighbors as NearestNeighbors
    from helmscope.observe.neighbor_entropy import neighbor_entropy as neighbor_entropy
    from helmscope.observe.noise_ratio import noise_table_as_printed as noise_table_as_printed
    from helmscope.observe.noise_ratio import query_key_noise_at_equal_kl as query_key_noise_at_equal_kl
    from helmscope.observe.noise_ratio import query_key_noise_ratio as query_key_noise_ratio
    from helmscope.observe.noise_ratio import query_key_noise_slope as query_key_noise_slope
    from helmscope.observe.noise_ratio import query_key_noise_summary as query_key_noise_summary
    from helmscope.observe.noise_ratio import query_key_noise_table as query_key_noise_table
    from helmscope.observe.order import order_parameter as order_parameter
    from helmscope.observe.overview import overview as overview
    from helmscope.observe.pairs import PairSet as PairSet
    from helmscope.observe.pairs import cloud_statistics as cloud_statistics
    from helmscope.observe.pairs import without_first_token as without_first_token
    from helmscope.observe.perturbation_growth import perturbation_growth as perturbation_growth
    from helmscope.observe.phase import phase_diagram as phase_diagram
    from helmscope.observe.phase import published_scheme_probability as published_scheme_probability
    from helmscope.observe.probes import ProbeBank as ProbeBank
    from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy as QuadraticFreeEnergy
    from helmscope.observe.query_key_change_damage import ChangeStrength as ChangeStrength
    from helmscope.observe.query_key_change_damage import QueryKeyChange as QueryKeyChange
    from helmscope.observe.query_key_change_damage import query_key_change as query_key_change
    from helmscope.observe.query_key_change_damage import query_key_change_damage as query_key_change_damage
    from helmscope.observe.query_key_metric import HeadMatrices as HeadMatrices
    from helmscope.observe.query_key_metric import head_matrices as head_matrices
    from helmscope.observe.query_key_metric import holonomy_defect as holonomy_defect
    from helmscope.observe.query_key_metric import qk_ov_alignment as qk_ov_alignment
    from helmscope.observe.query_key_metric import query_key_metric as query_key_metric
    from helmscope.observe.query_key_metric import symmetric_eigenvalues as symmetric_eigenvalues
    from helmscope.observe.query_key_metric import symmetric_share as symmetric_share
    from helmscope.observe.query_key_metric import triangle_holonomy_defect as triangle_holonomy_defect
    from helmscope.observe.query_key_noise import NoiseKind as NoiseKind
    from helmscope.observe.query_key_noise import query_key_noise as query_key_noise
    from helmscope.observe.query_key_noise import query_key_noise_by_layer as query_key_noise_by_layer
    from helmscope.observe.rank import collapse_residual_composite as collapse_residual_composite
    from helmscope.observe.rank import collapse_residual_frobenius as collapse_residual_frobenius
    from helmscope.observe.rank import effective_rank as effective_rank
    from helmscope.observe.rank import nuclear_rank as nuclear_rank
    from helmscope.observe.rank import numerical_rank as numerical_rank
    from helmscope.observe.rank import participation_ratio as participation_ratio
    from helmscope.observe.rank import stable_rank as stable_rank
    from helmscope.observe.sink_damage import sink_damage as sink_damage
    from helmscope.observe.sinks import AttentionSinks as AttentionSinks
    from helmscope.observe.sinks import SinkDecomposition as SinkDecomposition
    from helmscope.observe.sinks import TokenValues as TokenValues
    from helmscope.observe.sinks import attention_sinks as attention_sinks
    from helmscope.observe.sinks import sink_constancy as sink_constancy
    from helmscope.observe.sinks import sink_decomposition as sink_decomposition
    from helmscope.observe.standalone import StandaloneMeasurement as StandaloneMeasurement
    from helmscope.observe.token_decoding import token_decoding_accuracy as token_decoding_accuracy
    from helmscope.observe.token_dimension import position_dimension as position_dimension
    from helmscope.observe.token_dimension import token_dimension as token_dimension
    from helmscope.observe.track import track as track
    from helmscope.observe.transport_ratio import transport_ratio as transport_ratio
    from helmscope.types.dataset import Measurement as Measurement
    from helmscope.types.dataset import Measurements as Measurements

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
