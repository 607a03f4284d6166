"""Geometry of the unit sphere S^(d-1) in R^d: points and tangent vectors (``sphere``), the normalized residual step
(``retraction``), surface calculus (``surface``), spherical harmonics (``harmonics``), the heat kernel
(``heat_kernel``), single-linkage clustering (``linkage``), and landscapes: a ``potential``, its tangent Hessian
(``hessian``) and its ``critical_points``. ``arithmetic`` guards computations against global torch settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helmscope.types.lazy import lazy_exports

if TYPE_CHECKING:
    from helmscope.geometry import critical_points as critical_points
    from helmscope.geometry import harmonics as harmonics
    from helmscope.geometry import heat_kernel as heat_kernel
    from helmscope.geometry import hessian as hessian
    from helmscope.geometry import linkage as linkage
    from helmscope.geometry import potential as potential
    from helmscope.geometry import retraction as retraction
    from helmscope.geometry import sphere as sphere
    from helmscope.geometry import surface as surface

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
