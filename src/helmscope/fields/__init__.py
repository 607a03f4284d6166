"""Right-hand sides of the dynamics: a field is a callable that returns the tangent velocity of every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.fields import activations as activations
    from helmscope.fields.alibi import alibi_bias as alibi_bias
    from helmscope.fields.alibi import alibi_slopes as alibi_slopes
    from helmscope.fields.attention import SA as SA
    from helmscope.fields.attention import USA as USA
    from helmscope.fields.block import Block as Block
    from helmscope.fields.cross import CrossAttention as CrossAttention
    from helmscope.fields.field import Field as Field
    from helmscope.fields.field import FunctionField as FunctionField
    from helmscope.fields.field import StateSpace as StateSpace
    from helmscope.fields.gradient_fit import fit_gradient as fit_gradient
    from helmscope.fields.gradient_fit import gradient_residual_share as gradient_residual_share
    from helmscope.fields.hardmax import Hardmax as Hardmax
    from helmscope.fields.helmholtz import HelmholtzSplit as HelmholtzSplit
    from helmscope.fields.helmholtz import helmholtz as helmholtz
    from helmscope.fields.helmholtz import helmholtz_as_printed as helmholtz_as_printed
    from helmscope.fields.hodge_gaussian import gaussian_hodge_split as gaussian_hodge_split
    from helmscope.fields.hodge_gaussian import linear_hodge_split as linear_hodge_split
    from helmscope.fields.hodge_jacobian import jacobian_split as jacobian_split
    from helmscope.fields.hodge_sphere import sphere_hodge_split as sphere_hodge_split
    from helmscope.fields.jacobian_algebra import JacobianAlgebra as JacobianAlgebra
    from helmscope.fields.jacobian_algebra import JacobianInvariants as JacobianInvariants
    from helmscope.fields.jacobian_algebra import jacobian_algebra as jacobian_algebra
    from helmscope.fields.layerwise import LayerwiseField as LayerwiseField
    from helmscope.fields.lowrank import LowRank as LowRank
    from helmscope.fields.merge import MergedTokens as MergedTokens
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
    from helmscope.fields.norms import layer_beta as layer_beta
    from helmscope.fields.placement import NGPT as NGPT
    from helmscope.fields.placement import NoNorm as NoNorm
    from helmscope.fields.placement import PostNorm as PostNorm
    from helmscope.fields.placement import PreNorm as PreNorm
    from helmscope.fields.placement import SandwichNorm as SandwichNorm
    from helmscope.fields.positions import AdditivePositions as AdditivePositions
    from helmscope.fields.positions import Rotary as Rotary
    from helmscope.fields.scaled_velocity import ScaledVelocity as ScaledVelocity
    from helmscope.fields.sinkhorn import SinkhornAttention as SinkhornAttention

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
