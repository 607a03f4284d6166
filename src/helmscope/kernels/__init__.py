"""Methods that compute attention sums over tokens. Fields specify what to sum; this package alone decides how.
Statistics of attention weights, such as ``row_entropy``, are in ``hs.observe``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.kernels.blockwise import Blockwise as Blockwise
    from helmscope.kernels.choose import using_summation as using_summation
    from helmscope.kernels.dense import Dense as Dense
    from helmscope.kernels.flash import Flash as Flash
    from helmscope.kernels.harmonic import Harmonic as Harmonic

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
