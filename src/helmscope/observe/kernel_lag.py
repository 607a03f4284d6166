"""How a head's kernel acts along the tokens: how far back it looks, how much of it depends on the lag alone, and which
frequencies of white noise it lets pass.

With normalized rows P_ij, queries i and keys j in the order of the tokens,

    mean_lag               mean over queries of sum_j P_ij |i - j|
    toeplitz_share         sum_d n_d mean(P_ij : i - j = d)^2 / sum_ij P_ij^2,  the diagonal d having n_d entries
    white_noise_high_frequency_share sum_{f > c} |(F A)_f|^2 / sum_f |(F A)_f|^2

F is the orthonormal real Fourier basis along the queries (``intervene.fourier_basis``), f its frequencies, 1 the
highest, and c the cutoff; for tokens that are white noise X, the last one is the expected share of the power of A X
above the cutoff. Beside the kernel A it is taken of I + A.

Nulls. Mean lag: equal weights on the visible keys. Toeplitz share: the mean over all permutations of each row among its
visible keys, in closed form. White noise: the share of the identity, which is that of white noise itself.
How to read it. A kernel of the lag alone is a filter: a moving average has a Toeplitz share of 1 (up to the first rows,
where rows of a causal kernel are cut and normalized) and a high share below its null; one that attends to a single
earlier token shifts and passes all frequencies; differences need weights of both signs, which only a residual
connection with negative values has.
How it fails. A causal kernel is no circular filter, and its first rows differ. Cost: n^2 log n per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.intervene.token_bands import fourier_frequencies
from helmscope.observe.bistochasticity import is_causal
from helmscope.observe.kernel import check_kernel, normalized_rows, visible_tokens
from helmscope.observe.kernel_spectrum import OPERATORS
from helmscope.observe.labels import label_attributes
from helmscope.observe.track import AT_LEAST_0, SHARE, check_system, token_mean, token_weights, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, Instrument, Needs, check_real

if TYPE_CHECKING:
    import xarray as xr
    from jaxtyping import Bool, Float
    from torch import Tensor

    from helmscope.types import AttentionTensors, ReplayContext, System
    from helmscope.types.progress import ProgressOption

CUTOFF = 0.5
NAMES = {
    "mean_lag": "mean distance to the key",
    "toeplitz_share": "share of the squared kernel that depends on the lag alone",
    "white_noise_high_frequency_share": "share of the power above the cutoff in white noise after the operator",
}
BOUNDS = {"mean_lag": AT_LEAST_0, "toeplitz_share": SHARE, "white_noise_high_frequency_share": SHARE}
TIE = 1e-9  # by which a frequency may be above the cutoff and yet equal it


class KernelLag(Instrument):
    """Instrument: ``mean_lag``, ``toeplitz_share`` and ``white_noise_high_frequency_share`` with their nulls, in every
    layer (at every time of a simulation), by head; the last one along ``operator``, "kernel" (A) and "identity +
    kernel" (I + A).

    Queries count by the weights of the trajectory in the mean lag; tokens that attention does not see are left out.

    >>> from helmscope.fields.attention import SA
    >>> from helmscope.solve.integrate import integrate
    >>> run = integrate(SA(beta=0.0), torch.eye(4).expand(1, 4, 4), times=[0.0])
    >>> found = run.replay(KernelLag())["kernel_lag"]
    >>> round(found.mean_lag.item(), 9), round(found.toeplitz_share.item(), 9)
    (1.25, 1.0)
    """

    name = "kernel_lag"
    needs = Needs.KERNEL

    def __init__(self, *, cutoff: float = CUTOFF) -> None:
        self.cutoff = check_cutoff(cutoff)

    @full_precision
    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the kernels of a layer."""
        kernel = normalized_rows(check_kernel(tensors.kernel).double())
        single = kernel.ndim == 3
        kernel = kernel.unsqueeze(1) if single else kernel
        visible = visible_tokens(kernel[:, 0], context.visible)
        weights = token_weights(tensors.state, context.weights).to(kernel)
        rows: list[dict[str, Tensor]] = []
        for each, seen, m in zip(kernel, visible, weights, strict=True):
            a = each[:, seen][:, :, seen]
            lag, equal = mean_lag(a)
            share, null = toeplitz_share(a)
            one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
            passed = white_noise_high_frequency_share(torch.stack([a, one + a], 1), self.cutoff)
            flat = white_noise_high_frequency_share(one, self.cutoff).expand_as(passed)
            m = m[seen].expand(lag.shape)
            rows.append(
                {
                    "mean_lag": token_mean(lag, m),
                    "mean_lag_null": token_mean(equal, m),
                    "toeplitz_share": share,
                    "toeplitz_share_null": null,
                    "white_noise_high_frequency_share": passed,
                    "white_noise_high_frequency_share_null": flat,
                }
            )
        for name in rows[0]:
            values = torch.stack([row[name] for row in rows])
            axes = ("head", "operator") if values.ndim == 3 else ("head",)
            self.keep(context, {name: values[:, 0] if single else values}, axes=axes[1:] if single else axes)

    def result(self) -> xr.Dataset:
        """The values of every head (if there are several), layer and replicate."""
        measured = with_bounds(super().result(), BOUNDS)
        for name, long_name in NAMES.items():
            measured[name].attrs |= label_attributes(long_name)
            measured[f"{name}_null"].attrs |= label_attributes(f"{long_name}, null")
        measured.mean_lag.attrs["units"] = measured.mean_lag_null.attrs["units"] = "tokens"
        return measured.assign_coords(operator=list(OPERATORS)).assign_attrs(cutoff=self.cutoff)


@shows_progress("lags of kernels")
def kernel_lag(system: System, *, cutoff: float = CUTOFF, progress: ProgressOption = None) -> xr.Dataset:
    """Mean lag, Toeplitz share and passed frequencies of each head, with replicates: ``KernelLag`` by one replay.

    >>> from helmscope import record
    >>> kernel_lag(record("A", ["Once upon a time there was a cat"])).toeplitz_share.dims
    ('layer', 'prompt', 'head')
    """
    instrument = KernelLag(cutoff=cutoff)
    return check_system(system).replay(instrument, progress=progress)[instrument.name]


def check_cutoff(cutoff: object) -> float:
    """The cutoff as a number; raises HelmscopeError unless it is at least 0 and below 1, the highest frequency.

    >>> check_cutoff(0.5)
    0.5
    """
    value = check_real("cutoff", cutoff, at_least=0)
    if value >= 1:
        raise HelmscopeError(f"cutoff is {value:g}, but it must be below 1, the highest frequency")
    return value


def mean_lag(kernel: Float[Tensor, "*batch n n"]) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n"]]:
    """sum_j P_ij |i - j| of each query, and the same for equal weights on its visible keys: those up to itself if the
    kernel is causal, else all.

    >>> [each.tolist() for each in mean_lag(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))]
    [[0.0, 1.0], [0.0, 0.5]]
    """
    place = torch.arange(kernel.shape[-1], device=kernel.device)
    distance = (place.unsqueeze(-1) - place).abs().to(kernel)
    keys = _keys(kernel).to(kernel)
    return (kernel * distance).sum(-1), (keys * distance).sum(-1) / keys.sum(-1)


@full_precision
def toeplitz_share(kernel: Float[Tensor, "*batch n n"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """The share of sum_ij P_ij^2 in the nearest Toeplitz matrix, whose diagonals are the means of those of the kernel,
    and its mean over all permutations of each row among its visible keys:

        E (sum_i a_i)^2 = (sum_i mu_i)^2 - sum_i mu_i^2 + sum_i q_i    on a diagonal,

    with mu_i and q_i the means of P_ij and of P_ij^2 over the visible keys of row i. NaN for a kernel of zeros.

    >>> toeplitz_share(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))[0]
    tensor(0.7500)
    """
    n = kernel.shape[-1]
    keys = _keys(kernel).to(kernel)
    count = keys.sum(-1, keepdim=True).clamp(min=1)
    mean, square = (keys * (each.sum(-1, keepdim=True) / count) for each in (kernel, kernel.square()))
    place = torch.arange(n, device=kernel.device)
    lag = (place.unsqueeze(-1) - place + n - 1).flatten()

    def diagonal_sums(matrix: Tensor) -> Tensor:
        flat = matrix.flatten(-2)
        return flat.new_zeros(*flat.shape[:-1], 2 * n - 1).index_add_(-1, lag, flat)

    length = (n - (torch.arange(2 * n - 1, device=kernel.device) - (n - 1)).abs()).to(kernel)
    whole = kernel.square().sum((-1, -2))
    own = diagonal_sums(kernel).square() / length
    permuted = (diagonal_sums(mean).square() + diagonal_sums(square - mean.square())) / length
    return own.sum(-1) / whole, permuted.sum(-1) / whole


@full_precision
def white_noise_high_frequency_share(
    operator: Float[Tensor, "*batch n n"], cutoff: float = CUTOFF
) -> Float[Tensor, "*batch"]:
    """The share of |A|_F^2 above the cutoff in the frequency along the queries: that of A X for white noise X.

    Of the frequencies 0, 1/2, 1/2 and 1 of four tokens one is above the default cutoff:

    >>> white_noise_high_frequency_share(torch.eye(4))
    tensor(0.2500)
    """
    power = frequency_power(operator).sum(-1)
    high = fourier_line(operator.shape[-2], power.device) > check_cutoff(cutoff) + TIE
    return power[..., high].sum(-1) / power.sum(-1)


def frequency_power(x: Float[Tensor, "*batch n c"]) -> Float[Tensor, "*batch f c"]:
    """The squared length of each column at each of the frequencies 0, 2/n, 4/n, ... along the rows: the sum over the
    two vectors of the real Fourier basis of a frequency, so that all of them sum to the squared length.

    >>> frequency_power(torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])).flatten().round(decimals=6).tolist()
    [0.0, 0.0, 4.0]
    """
    n = x.shape[-2]
    power = torch.fft.rfft(x, dim=-2, norm="ortho").abs().square()
    twice = torch.full((n // 2 + 1,), 2.0, dtype=power.dtype, device=power.device)
    twice[0] = 1.0
    if n % 2 == 0:
        twice[-1] = 1.0
    doubled: Tensor = power * twice.unsqueeze(-1)
    return doubled


def fourier_line(tokens: int, device: torch.device) -> Float[Tensor, " f"]:
    """The different frequencies of ``fourier_frequencies``, in rising order.

    >>> fourier_line(4, torch.device("cpu")).tolist()
    [0.0, 0.5, 1.0]
    """
    frequencies = fourier_frequencies(tokens)  # 0, then two of each, and 1 alone if their number is even
    return torch.cat([frequencies[:1], frequencies[1::2]]).to(device)


def _keys(kernel: Tensor) -> Bool[Tensor, "*batch n n"]:
    """Which keys each query can see: those up to itself if the kernel is causal, else all."""
    n = kernel.shape[-1]
    full = torch.ones(n, n, dtype=torch.bool, device=kernel.device)
    return torch.where(is_causal(kernel)[..., None, None], full.tril(), full)
