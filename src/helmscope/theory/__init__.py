"""Closed-form theory: random initial states (``starts``), the equiangular flow and its hitting times (``equiangular``),
the lifetime of two clusters (``metastable``), the extreme energies (``energy``) and probabilities for random initial
states (``probability``), from [Geshkovski et al. 2023], and a bound on how fast two flows separate (``stability``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.theory.energy import equiangular_energy as equiangular_energy
    from helmscope.theory.energy import max_energy as max_energy
    from helmscope.theory.energy import min_energy as min_energy
    from helmscope.theory.equiangular import equiangular as equiangular
    from helmscope.theory.equiangular import equiangular_rate as equiangular_rate
    from helmscope.theory.equiangular import hitting_time as hitting_time
    from helmscope.theory.metastable import metastable_time as metastable_time
    from helmscope.theory.metastable import metastable_time_asymptotic as metastable_time_asymptotic
    from helmscope.theory.operator_spectra import averaging_retention as averaging_retention
    from helmscope.theory.operator_spectra import lazy_averaging_condition_number as lazy_averaging_condition_number
    from helmscope.theory.operator_spectra import lazy_averaging_retention as lazy_averaging_retention
    from helmscope.theory.operator_spectra import retrieval_rank_share as retrieval_rank_share
    from helmscope.theory.operator_spectra import retrieval_retention as retrieval_retention
    from helmscope.theory.operator_spectra import softmax_condition_number_quantile as softmax_condition_number_quantile
    from helmscope.theory.operator_spectra import softmax_retention as softmax_retention
    from helmscope.theory.probability import initial_close_pair_probability as initial_close_pair_probability
    from helmscope.theory.probability import wendel_probability as wendel_probability
    from helmscope.theory.stability import w2_growth_bound as w2_growth_bound
    from helmscope.theory.starts import Orthonormal as Orthonormal
    from helmscope.theory.starts import Uniform as Uniform
    from helmscope.theory.starts import VonMisesFisher as VonMisesFisher

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
