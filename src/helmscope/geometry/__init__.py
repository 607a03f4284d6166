"""Geometry of the unit sphere S^(d-1) in R^d: points and tangent vectors (``sphere``), the normalized residual step
(``retraction``), surface calculus (``surface``), spherical harmonics (``harmonics``) and single-linkage clustering
(``linkage``). ``arithmetic`` guards computations against global torch settings.
"""
