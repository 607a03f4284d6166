"""Statistics of replicates: intervals, scales, paired tests, jackknife, Holm's correction, rulings, power; no torch.

Replicates are prompts or seeds, never the tokens of one prompt. An interval is computed on the scale on which
replicates are closest to normal (``LogScale`` for positive quantities, ``FisherZScale`` for cosines,
``RemainderScale`` for a held-out R^2) and mapped back, so it covers the mean on that scale: the geometric mean under
``LogScale``, tanh E artanh c under ``FisherZScale``. ``BoundedScale`` clips the interval of a quantity with known
bounds, such as a share. Student's t is the default; ``bootstrap_t`` is for skewed replicates that no scale makes
symmetric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.stats.change_point import change_point_errors as change_point_errors
    from helmscope.stats.paired import paired_difference as paired_difference
    from helmscope.stats.power import detection_power as detection_power
    from helmscope.stats.power import minimum_detectable_effect as minimum_detectable_effect
    from helmscope.stats.quantiles import quantile_interval as quantile_interval
    from helmscope.stats.reduce import reduce_replicates as reduce_replicates
    from helmscope.stats.replicates import random_halves as random_halves
    from helmscope.stats.scales import BoundedScale as BoundedScale
    from helmscope.stats.scales import FisherZScale as FisherZScale
    from helmscope.stats.scales import LinearScale as LinearScale
    from helmscope.stats.scales import LogScale as LogScale
    from helmscope.stats.scales import RemainderScale as RemainderScale
    from helmscope.stats.scales import Scale as Scale
    from helmscope.stats.summary import summary as summary

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
