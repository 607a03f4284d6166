"""The spectra of the linear layers of a model: effective ranks and condition of what heads and MLPs read and write.

The matrices of a layer are those of queries, keys and values, with the gain of their norm folded in, that by which the
heads write, and what the MLP reads and writes, its norm folded in too; of a gated MLP the gate and the other input.
[Additive transport], Section 8.1, calls linear layers filters that reshape the spectrum of what they act on.

Null. A matrix of m x n independent normal entries, to leading order in its size (Geman 1980; Silverstein 1985):

    stable_rank = m n / (sqrt m + sqrt n)^2,    log_condition_number = log((sqrt m + sqrt n) / |sqrt m - sqrt n|),

which for m = n is infinite: there the median log(2 n / (sqrt(1 + 2 log 2) - 1)) (Edelman 1988).

How to read it. A stable rank below the null is a filter that a few directions dominate. How it fails. Layers are the
replicates; a matrix acts on states that are far from isotropic, so that its own spectrum is not that of what it writes.
Cost: a few short forward passes that find the matrices, and one singular value decomposition of each.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.fields.norms import LayerNorm
from helmscope.models.input_matrices import input_matrices
from helmscope.models.output_matrix import output_matrices, output_unsupported
from helmscope.models.recording import Recording, check_recording
from helmscope.models.sites import Site
from helmscope.observe.matrix_spectrum import MATRIX_NAMES, matrix_spectrum
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_replicates

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.models.anatomy import Layer
    from helmscope.types.progress import ProgressOption

READS = {"W_Q": Site.QUERY, "W_K": Site.KEY, "W_V": Site.VALUE}
QUANTITIES = tuple(name for name in MATRIX_NAMES if name not in ("dirichlet_energy", "collapse_residual_frobenius"))


@shows_progress("spectra of linear layers")
def weight_spectrum(recording: Recording, *, progress: ProgressOption = None) -> xr.Dataset:
    """Ranks, condition and nuclear norm of ``matrix_spectrum`` along (layer, matrix), with the nulls of the stable rank
    and of the log of the condition number: "W_Q", "W_K", "W_V", "W_O", and "W_in", or "W_gate" and "W_up", and "W_out".

    Raises HelmscopeError where ``input_matrices`` does, where output matrices cannot be read, and for MLPs that are not
    one or two matrices and an output matrix, such as mixtures of experts.

    >>> from helmscope import record
    >>> weight_spectrum(record("A", ["Once upon a time"])).stable_rank.dims
    ('layer', 'matrix')
    """
    report, inputs = check_progress(progress), input_matrices(check_recording(recording))
    anatomy = recording.anatomy
    rows: list[dict[str, tuple[Tensor, int]]] = []
    for number, layer in enumerate(anatomy.layers):
        refused = output_unsupported(layer)
        if refused is not None:
            raise HelmscopeError(f"{refused} in layer {number}, but its spectrum needs the matrix")
        row = {name: _read(layer, inputs[number][site].weight) for name, site in READS.items()}
        written = output_matrices(layer).transpose(0, 1).flatten(1)
        row["W_O"] = written, min(written.shape)
        rows.append(row | _mlp(recording, number))
    names = list(rows[0])
    found = {name: np.full((len(rows), len(names)), np.nan) for name in QUANTITIES}
    nulls = {name: np.full((len(rows), len(names)), np.nan) for name in ("stable_rank", "log_condition_number")}
    for (k, row), (j, name) in ((a, b) for a in enumerate(rows) for b in enumerate(names)):
        matrix, rank = row[name]
        spectrum = matrix_spectrum(matrix.detach().double().cpu(), rank=rank)
        for quantity in QUANTITIES:
            found[quantity][k, j] = float(spectrum[quantity])
        nulls["stable_rank"][k, j], nulls["log_condition_number"][k, j] = gaussian_matrix_spectrum(*matrix.shape)
        report((k + (j + 1) / len(names)) / len(rows))
    axes = ("layer", "matrix")
    data = {name: (axes, values, {"long_name": MATRIX_NAMES[name], "valid_min": 0.0}) for name, values in found.items()}
    data |= {
        f"{name}_null": (axes, values, {"long_name": f"{MATRIX_NAMES[name]}, null"}) for name, values in nulls.items()
    }
    attributes = {"title": "spectra of linear layers", "model": recording.origin.title}
    return check_replicates(xr.Dataset(data, {"layer": range(len(rows)), "matrix": names}, attributes))


def gaussian_matrix_spectrum(m: int, n: int) -> tuple[float, float]:
    """The stable rank and the log of the condition number of an m x n matrix of independent normal entries, to leading
    order; the second is a median for m = n.

    >>> stable, condition = gaussian_matrix_spectrum(400, 100)
    >>> round(stable, 3), round(condition, 3)
    (44.444, 1.099)
    """
    large, small = math.sqrt(max(m, n)), math.sqrt(min(m, n))
    median = math.sqrt(1 + 2 * math.log(2)) - 1  # of sqrt n times the smallest singular value
    condition = math.log(2 * n / median) if m == n else math.log((large + small) / (large - small))
    return m * n / (large + small) ** 2, condition


def _read(layer: Layer, weight: Float[Tensor, "heads r d"]) -> tuple[Tensor, int]:
    """What reads the state without its mean, with the gain of the norm before it, and its largest rank."""
    norm, wide = layer.attention_norm, weight.detach().double().flatten(0, 1)
    if norm is not None and norm.gain is not None:
        wide = wide * norm.gain.detach().to(wide)
    centered = isinstance(norm, LayerNorm)
    wide = wide - wide.mean(-1, keepdim=True) if centered else wide
    return wide, min(wide.shape[0], wide.shape[1] - centered)


def _mlp(recording: Recording, layer: int) -> dict[str, tuple[Tensor, int]]:
    """The matrices of the MLP as a field on unit vectors, what it reads without the mean that its norm removes."""
    force = recording.force(layer=layer)
    rows, written = getattr(force, "input_rows", None), getattr(force, "w_out", None)
    if not isinstance(rows, tuple) or len(rows) > 2 or not isinstance(written, torch.Tensor):
        raise HelmscopeError(f"layer {layer} has an MLP of type {type(force).__name__}, whose matrices are not known")
    names = ("W_in",) if len(rows) == 1 else ("W_gate", "W_up")
    centered = isinstance(recording.anatomy.layers[layer].mlp_norm, LayerNorm)
    found = {
        name: (matrix - matrix.mean(-1, keepdim=True) * centered, min(matrix.shape[0], matrix.shape[1] - centered))
        for name, matrix in zip(names, rows, strict=True)
    }
    return {**found, "W_out": (written, min(written.shape))}
