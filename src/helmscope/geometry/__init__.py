"""The unit sphere S^(d-1) in R^d: points and tangent vectors (``sphere``), calculus on it (``surface``), its harmonic
functions (``harmonics``) and which points lie close together (``linkage``).
"""
