"""Edits of a model's forward pass, which leave the model itself unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.intervene.arm_edits import FreezeRadius as FreezeRadius
    from helmscope.intervene.arm_edits import NegateValues as NegateValues
    from helmscope.intervene.arms import Arm as Arm
    from helmscope.intervene.arms import AttentionMode as AttentionMode
    from helmscope.intervene.arms import only_one_mlp as only_one_mlp
    from helmscope.intervene.arms import without_one_mlp as without_one_mlp
    from helmscope.intervene.attention import AblateHead as AblateHead
    from helmscope.intervene.attention import MaskKeys as MaskKeys
    from helmscope.intervene.attention import Perturb as Perturb
    from helmscope.intervene.attention import ReplaceKernel as ReplaceKernel
    from helmscope.intervene.batched_edits import BatchedEdits as BatchedEdits
    from helmscope.intervene.change import edited as edited
    from helmscope.intervene.change import with_parameters as with_parameters
    from helmscope.intervene.edit import Edit as Edit
    from helmscope.intervene.query_key import CenteredKeyNoise as CenteredKeyNoise
    from helmscope.intervene.query_key import GaugeTransform as GaugeTransform
    from helmscope.intervene.query_key import MatchedQueryNoise as MatchedQueryNoise
    from helmscope.intervene.query_key import ShiftKeys as ShiftKeys
    from helmscope.intervene.query_key_edit import Blur as Blur
    from helmscope.intervene.query_key_edit import Normalize as Normalize
    from helmscope.intervene.query_key_edit import QueryKeyEdit as QueryKeyEdit
    from helmscope.intervene.query_key_edit import match_strengths as match_strengths
    from helmscope.intervene.states import Ablate as Ablate
    from helmscope.intervene.states import Add as Add
    from helmscope.intervene.states import Patch as Patch
    from helmscope.intervene.states import Replace as Replace
    from helmscope.intervene.token_bands import PerturbFourierBand as PerturbFourierBand
    from helmscope.intervene.token_bands import ScaleLogits as ScaleLogits
    from helmscope.intervene.token_bands import fourier_band_share as fourier_band_share
    from helmscope.intervene.token_bands import fourier_basis as fourier_basis
    from helmscope.intervene.token_bands import fourier_frequencies as fourier_frequencies
    from helmscope.intervene.weight_noise import WeightNoise as WeightNoise

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
