"""The standard set of observables of a density over time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xarray as xr

from helmscope.fields.attention import USA
from helmscope.fields.noise import IsotropicNoise
from helmscope.meanfield.axis_force import AxisForce
from helmscope.meanfield.density import NEGATIVE_MASS, Density
from helmscope.meanfield.evolve import DensityPath
from helmscope.meanfield.free_energy import density_interaction_energy, free_energy, free_energy_rate
from helmscope.observe.labels import label_attributes
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_replicates, type_with_article
from helmscope.types.progress import ProgressOption

LONG_NAMES = {
    "mass": "total mass",
    "order_parameter": "order parameter |mean x|",
    "entropy": "entropy",
    "relative_entropy": "relative entropy to the uniform density",
    "minimum": "smallest density / uniform density",
    "negative_mass": "negative mass",
    "interaction_energy": "interaction energy",
    "free_energy": "free energy F",
    "free_energy_rate": "dF/dt by its formula",
}

LOGARITHMIC = ("entropy", "relative_entropy", "free_energy", "free_energy_rate")  # NaN where a density is negative

Quantity = Callable[[Density], float]


@shows_progress("measuring")
def density_overview(path: DensityPath, *, progress: ProgressOption = None) -> xr.Dataset:
    """Mass, order parameter |mean x|, entropy H, relative entropy log |S| - H, smallest value, negative mass, energy
    and free energy of a density over time.

    The result is a Measurement with the axes (time, system) and one system. ``interaction_energy`` is taken at the
    beta of the field, for attention with logits beta <x, y>, beta > 0. ``free_energy`` F and ``free_energy_rate``,
    dF/dt by its formula, exist for USA, for ``AxisForce`` and without drift, under isotropic noise or none; SA has no
    free energy. What needs log rho is NaN where the negative mass exceeds 1e-4. ``hs.plot`` draws F with its rate.
    Raises ``HelmscopeError`` unless ``path`` is a DensityPath.

    >>> from helmscope.meanfield import CircleGrid, evolve
    >>> start = Density.von_mises_fisher(CircleGrid(degree=32), kappa=0.5)
    >>> measured = density_overview(evolve(USA(beta=1.0), start, times=[0, 1]))
    >>> measured.order_parameter.dims, bool((measured.free_energy_rate < 0).all())
    (('time', 'system'), True)
    """
    if not isinstance(path, DensityPath):
        raise HelmscopeError(f"path is {type_with_article(path)}, but it must be a DensityPath, the result of evolve()")
    report = check_progress(progress)
    quantities = {**_SHAPE, **_energy(path), **_free_energy(path)}
    values: dict[str, list[float]] = {name: [] for name in quantities}
    for k, density in enumerate(path):
        for name, quantity in quantities.items():
            defined = name not in LOGARITHMIC or density.negative_mass <= NEGATIVE_MASS
            values[name].append(quantity(density) if defined else math.nan)
        report((k + 1) / len(path))
    variables = {
        name: (("time", "system"), np.array(column)[:, None], label_attributes(LONG_NAMES[name]))
        for name, column in values.items()
    }
    return check_replicates(xr.Dataset(variables, {"time": path.times.numpy(), "system": [0]}))


_SHAPE: dict[str, Quantity] = {
    "mass": lambda density: float(density.grid.mean_of(density.values)),
    "order_parameter": lambda density: float(density.mean.norm()),
    "entropy": lambda density: density.entropy,
    "relative_entropy": lambda density: density.grid.log_area - density.entropy,
    "minimum": lambda density: density.minimum,
    "negative_mass": lambda density: density.negative_mass,
}


def _energy(path: DensityPath) -> dict[str, Quantity]:
    beta = getattr(path.field, "unit_beta", None)
    if beta is None or not beta > 0:
        return {}
    return {"interaction_energy": lambda density: density_interaction_energy(density, beta=beta)}


def _free_energy(path: DensityPath) -> dict[str, Quantity]:
    noise = IsotropicNoise(0.0) if path.noise is None else path.noise
    if not isinstance(noise, IsotropicNoise):
        return {}
    if path.field is None:
        return {
            "free_energy": lambda density: free_energy(density, noise=noise, potential=_flat),
            "free_energy_rate": lambda density: free_energy_rate(density, noise=noise, potential=_flat).total,
        }
    field = path.field
    if isinstance(field, AxisForce):
        options: dict[str, Any] = {"noise": noise, "potential": field.potential}
        return {
            "free_energy": lambda density: free_energy(density, **options),
            "free_energy_rate": lambda density: free_energy_rate(density, field=field, **options).total,
        }
    if not isinstance(field, USA) or field.unit_beta is None or field.value_scale is None:
        return {}
    return {
        "free_energy": lambda density: free_energy(density, noise=noise, field=field),
        "free_energy_rate": lambda density: free_energy_rate(density, noise=noise, field=field).total,
    }


def _flat(x: torch.Tensor) -> torch.Tensor:
    return 0 * x[..., 0]
