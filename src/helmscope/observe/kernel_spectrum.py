"""The spectrum of each head's kernel A, and of I + A, which the residual connection makes of it.

Of A, with normalized rows, and of I + A, as operators on X = I (``operator_spectrum``, ``matrix_spectrum``): the ratio
of the nuclear norm after to before, condition number, effective ranks, Dirichlet energy and distance of the rows from
their mean. [Additive transport], Section 9.3, takes the residual connection for what keeps A from collapsing.

How to read it. The identity has retention 1, condition number 1 and collapse residual sqrt(1 - 1/n); averaging over all
n tokens 1/n, infinity and 0. Causal averaging has the condition number of a triangular matrix. X = I stands for tokens
that are all different; values W_V X and the heads' sum are not in it, so that it is a property of the kernel, not of
the write.
How it fails. Condition numbers of heads have a heavy tail: quantiles over heads (``head_quantiles``), never a mean of
kappa. Cost: two singular value decompositions of n x n per head, layer and prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.geometry.arithmetic import full_precision
from helmscope.observe.kernel import check_kernel, normalized_rows, visible_tokens
from helmscope.observe.labels import label_attributes
from helmscope.observe.matrix_spectrum import MATRIX_NAMES, matrix_spectrum
from helmscope.observe.track import AT_LEAST_0, check_system, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Instrument, Needs, check_real, check_replicates, replicate_axis

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

OPERATORS = ("kernel", "identity + kernel")
NAMES = {"nuclear_retention": "nuclear norm of the operator over that of the identity"} | {
    name: long_name for name, long_name in MATRIX_NAMES.items() if name != "nuclear_norm"
}
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class KernelSpectrum(Instrument):
    """Instrument: the spectra of the kernels A and I + A in every layer (at every time of a simulation), by head.

    The variables are those of ``matrix_spectrum`` for X = I, with ``nuclear_retention`` |A|_* / n for the nuclear norm;
    the axis ``operator`` has "kernel" (A) and "identity + kernel" (I + A). Rows are normalized; tokens that attention
    does not see are left out. Raises HelmscopeError for a system without attention.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(4).expand(1, 4, 4), times=[0.0])
    >>> found = run.replay(KernelSpectrum())["kernel_spectrum"]
    >>> found.nuclear_retention.squeeze().values.round(6).tolist()  # averaging: 1/n, and 1 + 1/n
    [0.25, 1.25]
    """

    name = "kernel_spectrum"
    needs = Needs.KERNEL

    @full_precision
    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the spectra of a layer."""
        kernel = normalized_rows(check_kernel(tensors.kernel).double())
        single = kernel.ndim == 3
        kernel = kernel.unsqueeze(1) if single else kernel
        visible = visible_tokens(kernel[:, 0], context.visible)
        found: dict[str, list[Tensor]] = {name: [] for name in NAMES}
        for each, seen in zip(kernel, visible, strict=True):
            a = each[:, seen][:, :, seen]
            one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
            spectrum = matrix_spectrum(torch.stack([a, one + a], 1))
            spectrum["nuclear_retention"] = spectrum.pop("nuclear_norm") / a.shape[-1]
            for name, values in spectrum.items():
                found[name].append(values)
        stacked = {name: torch.stack(values) for name, values in found.items()}
        if single:
            self.keep(context, {name: each[:, 0] for name, each in stacked.items()}, axes=("operator",))
        else:
            self.keep(context, stacked, axes=("head", "operator"))

    def result(self) -> xr.Dataset:
        """The spectra of every head (if there are several), layer and replicate."""
        measured = with_bounds(super().result(), dict.fromkeys(NAMES, AT_LEAST_0))
        for name, long_name in NAMES.items():
            measured[name].attrs |= label_attributes(long_name)
        return measured.assign_coords(operator=list(OPERATORS))


@shows_progress("spectra of kernels")
def kernel_spectrum(system: System, *, progress: ProgressOption = None) -> xr.Dataset:
    """The spectra of the kernels A and I + A, with replicates: ``KernelSpectrum`` by one replay.

    >>> from helmscope import record
    >>> kernel_spectrum(record("A", ["Once upon a time there was a cat"])).log_condition_number.dims
    ('layer', 'prompt', 'head', 'operator')
    """
    instrument = KernelSpectrum()
    return check_system(system).replay(instrument, progress=progress)[instrument.name]


def head_quantiles(measurement: xr.Dataset, *, levels: Sequence[float] = QUANTILES) -> xr.Dataset:
    """The quantiles at ``levels`` over all layers and heads, for each replicate: the axes ``layer`` and ``head`` become
    ``quantile``. Quantiles are values that occur, so that infinite ones do no harm.

    >>> from helmscope import record
    >>> found = head_quantiles(kernel_spectrum(record("A", ["Once upon a time there was a cat"])), levels=[0.5])
    >>> found.log_condition_number.dims
    ('quantile', 'prompt', 'operator')
    """
    wanted = [check_real("levels", level, at_least=0) for level in levels]
    if not wanted or max(wanted) > 1:
        raise HelmscopeError(f"levels is {list(levels)}, but it must hold numbers between 0 and 1")
    over = [axis for axis in ("layer", "time", "head") if axis in measurement.dims]
    if not over:
        raise HelmscopeError(
            f"measurement has the axes {list(measurement.dims)}, but quantiles are over layers and heads"
        )
    kept = measurement.drop_vars([name for name in measurement.data_vars if str(name).endswith("_null")])
    found = kept.quantile(wanted, dim=over, method="inverted_cdf", keep_attrs=True)
    axis = replicate_axis(measurement)
    return check_replicates(found.assign_coords(quantile=np.array(wanted)), axis)
