"""Kernels that compute attention sums over tokens. Fields specify what to sum; this package alone decides how."""
