"""Attention sums on the circle and on S^2 in O(n), by a short separable series of the kernel e^{beta <x, y>}.

    S^1   e^{beta cos(a - b)}   = sum_k c_k cos k(a - b),                       c_0 = I_0(beta), c_k = 2 I_k(beta)
    S^2   e^{beta <x, y>}       = sum_m e^{i m (phi - phi')} sum_{k k'} A^m_{k k'} u_k(theta) u_k'(theta'),

u_k = cos k theta for even m, sin k theta for odd m (the sphere as a doubled torus), A^m the Fourier coefficients of
I_m(beta sin sin') e^{beta cos cos'}. All u are bounded by 1 and all A by e^beta, so that no digits are lost, and both
the moments of the tokens and the sums at the tokens are matrix products. The series is truncated at the degree L beyond
which the harmonic expansion sum_l (2 l + 1) i_l(beta) P_l, or sum_k c_k cos k, adds less than ``tol`` e^beta per pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import exponential_coefficients, exponential_degree, powers
from helmscope.geometry.sphere import NORM_TOLERANCE, check_tokens
from helmscope.kernels.harmonic_gpu import fits, gpu_sums
from helmscope.kernels.harmonic_matrix import MAX_MATRIX_DEGREE, matrix_sums
from helmscope.kernels.harmonic_series import circle_series, sphere_series
from helmscope.kernels.request import AttentionSum, Request
from helmscope.types import HelmscopeError, check_real

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Bool, Float
    from torch import Tensor

    Harmonics = tuple[Tensor, ...]

MAX_DEGREE = 256  # a table of 256^3 numbers is 134 MB
# number of harmonics cached for the second pass, and tokens per chunk: limited by a CPU's cache or a GPU's memory
MAX_CACHED = {"cpu": 2**21, "cuda": 2**28}
CHUNK = {"cpu": 4_096, "cuda": 2**20}
DEFAULT_TOL = {torch.float64: 1e-12, torch.float32: 1e-7}
MAX_NORM_ERROR = {torch.float64: 16 * 2.0**-52, torch.float32: 16 * 2.0**-23}  # the largest | |x| - 1 |
MIN_OTHER_MASS = {torch.float64: 1e-3, torch.float32: 1e-2}  # received by each token, relative to the total weight


@dataclass(frozen=True)
class Harmonic:
    """Method for unit vectors on the circle and on S^2, by a harmonic series: query-key matrix c I with c >= 0, no
    causal mask, no bias, no gradient.

    ``tol`` bounds the truncation error per pair in units of e^beta; None stands for 1e-12 in float64 and 1e-7 in
    float32.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> Harmonic().sum(Request(0.0 * x, x, x, beta=0.0)).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    tol: float | None = None

    def __post_init__(self) -> None:
        if self.tol is not None and check_real("tol", self.tol, above=0) >= 1:
            raise HelmscopeError(f"tol is {self.tol:g}, but it must be below 1, the size of a term in units of e^beta")

    def unsupported_reason(self, request: Request) -> str | None:
        """Why it does not support a request; None if it does.

        >>> x = torch.eye(2)
        >>> Harmonic().unsupported_reason(Request(x, x, x, beta=1.0, causal=True))
        'the series is for e^{beta <x, y>} with beta >= 0 over all pairs, without causal mask and bias'
        """
        if (reason := self.unsupported_without_values(request)) is not None:
            return reason
        x = request.key
        norm = torch.linalg.vector_norm(x, dim=-1).nan_to_num(nan=1.0)  # a NaN must not decide for other systems
        deviation = float((norm - 1).abs().max())
        return None if deviation <= NORM_TOLERANCE[x.dtype] else "the series is for unit vectors"

    def unsupported_without_values(self, request: Request) -> str | None:
        """Like ``unsupported_reason``, but without reading tensor values, for which a GPU would have to synchronize.

        >>> x = torch.eye(2)
        >>> Harmonic().unsupported_without_values(Request(x, x, x, beta=1.0))
        """
        x, beta = request.key, request.beta
        if (
            beta is None
            or beta < 0
            or request.causal
            or request.bias is not None
            or request.transform_logits is not None
        ):
            return "the series is for e^{beta <x, y>} with beta >= 0 over all pairs, without causal mask and bias"
        if x.shape[-1] not in (2, 3):
            return f"tokens have dimension {x.shape[-1]}, and the series is for the circle and S^2, dimension 2 and 3"
        if request.needs_gradient:
            return "the series has no gradient: use Blockwise()"
        if not isinstance(request.skip_self, bool):
            return "it omits a token's own term for all heads or for none"
        if self._is_too_sharp(request) or self.degree(request) > MAX_DEGREE:
            return f"beta is {beta:g}, and its series has a degree above {MAX_DEGREE}"
        return None

    def degree(self, request: Request) -> int:
        """The degree at which the series of a request is truncated.

        >>> x = torch.eye(2)
        >>> Harmonic().degree(Request(4 * x, x, x, beta=4.0))
        12
        """
        tol = DEFAULT_TOL[request.key.dtype] if self.tol is None else self.tol
        assert request.beta is not None
        return _cached_degree(request.beta, dim=request.key.shape[-1], tol=tol)

    def _is_too_sharp(self, request: Request) -> bool:
        """Whether beta is so large that the degree exceeds ``MAX_DEGREE`` in any case.

        The time and memory to compute a degree grow with beta. No coefficient of a harmonic exceeds that of degree 0,
        so the harmonics up to ``MAX_DEGREE`` contain at most their number times that coefficient.
        """
        assert request.beta is not None
        tol = DEFAULT_TOL[request.key.dtype] if self.tol is None else self.tol
        if request.key.shape[-1] == 3:
            harmonics, coefficient = (MAX_DEGREE + 1) ** 2, 1 / (2 * max(request.beta, 1.0))
        else:  # e^{-beta} I_0(beta) <= 0.47 / sqrt(beta)
            harmonics, coefficient = 2 * MAX_DEGREE + 1, 0.47 / math.sqrt(max(request.beta, 1.0))
        return harmonics * coefficient < 1 - tol

    def is_faster(self, request: Request) -> bool:
        """Whether the series, O(n L) on the circle and O(n L^2) on S^2, is faster than O(n^2) pairwise sums.

        The thresholds were measured on a CPU core and on a GPU.

        >>> x = torch.eye(2)
        >>> Harmonic().is_faster(Request(x, x, x, beta=1.0))
        False
        """
        terms = self.degree(request) + 2
        assert request.beta is not None
        if _mean_kernel(request.beta, request.key.shape[-1]) < 2 * MIN_OTHER_MASS[request.key.dtype]:
            return False
        return request.key.shape[-2] >= (3 * terms * terms if request.key.shape[-1] == 3 else 3 * terms)

    def inaccurate_systems(self, request: Request, sums: AttentionSum) -> Bool[np.ndarray, "*batch"]:
        """Which systems the series does not sum accurately: those with a token off the sphere, and those with a token
        whose sum over the others is so small, compared with e^beta times the total weight, that its relative error
        could exceed 1e-9 (1e-5 in float32).

        It synchronizes with the device once and returns a mask on the CPU. Systems that contain a NaN are not included.

        >>> x = torch.eye(2)[None]
        >>> request = Request(x, x, x, beta=1.0)
        >>> Harmonic().inaccurate_systems(request, Harmonic().sum(request))
        array([False])
        """
        x, weights, mass = request.key, request.weights, sums.mass[..., 0]
        shortest, longest = torch.linalg.vector_norm(x, dim=-1).aminmax(dim=-1)
        if weights is None:
            others, total = mass.amin(-1), torch.tensor(float(x.shape[-2]), device="cpu")
            extremes = torch.stack([others, shortest, longest]).cpu()
            others = extremes[0] - 1
        else:
            extremes = torch.stack([(mass - weights).amin(-1), shortest, longest]).cpu()
            others, total = extremes[0], weights.sum(-1).cpu()
        return _is_inaccurate(others.numpy(), (extremes[1:] - 1).abs().amax(0).numpy(), total.numpy(), x.dtype)

    def sum(self, request: Request) -> AttentionSum:
        """Compute the sums as ``harmonic_sum`` does; the request is not checked.

        >>> x = torch.eye(2)
        >>> Harmonic().sum(Request(x, x, x, beta=1.0)).mean
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
        """
        return self._sum_with_diagnostics(request)[0]

    def checked_sum(self, request: Request) -> tuple[AttentionSum, Bool[np.ndarray, "*batch"]]:
        """The sums and a mask of the ``inaccurate_systems``, on a GPU from the diagnostics of its kernel.

        >>> x = torch.eye(2)[None]
        >>> sums, inaccurate = Harmonic().checked_sum(Request(x, x, x, beta=1.0))
        >>> inaccurate
        array([False])
        """
        sums, diagnostics = self._sum_with_diagnostics(request)
        if diagnostics is None:
            return sums, self.inaccurate_systems(request, sums)
        # NumPy takes a tenth of torch's time for few numbers
        smallest_mass, deviation, weight = diagnostics.cpu().numpy().swapaxes(0, 1)
        inaccurate = _is_inaccurate(smallest_mass.min(-1), deviation.max(-1), weight.sum(-1), diagnostics.dtype)
        return sums, inaccurate.reshape(request.key.shape[:-2])

    def _sum_with_diagnostics(self, request: Request) -> tuple[AttentionSum, Tensor | None]:
        assert request.beta is not None
        skip_self = request.skip_self is True
        return _harmonic_sums(request.key, request.beta, request.weights, skip_self, self.degree(request))


def _is_inaccurate(others: np.ndarray, deviation: np.ndarray, weight: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Whether a token receives too little mass from the others, or is too far off the sphere: a norm of 1 + e causes a
    relative error of beta e.
    """
    return np.asarray((deviation > MAX_NORM_ERROR[dtype]) | (others < MIN_OTHER_MASS[dtype] * weight))


@lru_cache(maxsize=64)
def _cached_scalar(value: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, ""]:
    """A scalar tensor, cached because creating one costs a launch on a GPU."""
    return torch.tensor(value, dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _mean_kernel(beta: float, dim: int) -> float:
    """Mean of e^{beta (<x, y> - 1)} over a uniform y: the coefficient of degree 0."""
    return float(exponential_coefficients(beta, 0, dim=dim)[0])


def harmonic_degree(beta: float, *, dim: int, tol: float = 1e-12) -> int:
    """Smallest degree L beyond which the series adds less than tol e^beta per pair: at most sum_{l > L} of its
    coefficients, which are positive, attained at <x, y> = 1.

    >>> harmonic_degree(4.0, dim=3, tol=1e-9), harmonic_degree(4.0, dim=2, tol=1e-9)
    (15, 15)
    """
    beta, tol = check_real("beta", beta, at_least=0), check_real("tol", tol, above=0)
    if tol < 1e-16:
        raise HelmscopeError(f"tol is {tol:g}, but it must be at least 1e-16, the size of rounding errors")
    if dim not in (2, 3):
        raise HelmscopeError(f"dim is {dim}, but it must be 2 (the circle) or 3 (S^2) for harmonic sums")
    return exponential_degree(beta, dim=dim, tol=tol)


_cached_degree = lru_cache(maxsize=256)(harmonic_degree)


def harmonic_sum(
    x: Float[Tensor, "*batch n d"],
    *,
    beta: float,
    weights: Float[Tensor, "*batch n"] | None = None,
    skip_self: bool = False,
    tol: float = 1e-12,
) -> AttentionSum:
    """Sums of m_j e^{beta <x_i, x_j>} x_j and their masses Z_i over all j, for unit vectors in dimension 2 or 3, with
    ``shift`` = beta; ``skip_self`` omits j = i from the first sum, never from the mass.

    The error of each sum is at most tol e^beta times the total weight, plus rounding: it is relative to e^beta, not to
    the sum, which is smaller for a token far from the others. The cost is O(n L^2) on S^2 and O(n L) on the circle, and
    no n x n matrix is stored. There is no gradient. Raises ``HelmscopeError`` if beta needs a degree above 256.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> harmonic_sum(x, beta=0.0).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    check_tokens(x)
    if x.requires_grad:
        raise HelmscopeError("x requires a gradient, but harmonic sums have none: use Dense()")
    degree = harmonic_degree(beta, dim=x.shape[-1], tol=tol)
    if degree > MAX_DEGREE:
        raise HelmscopeError(f"beta is {beta:g}, but its series has degree {degree}, above {MAX_DEGREE}: lower beta")
    return _harmonic_sums(x, float(beta), weights, skip_self, degree)[0]


def _harmonic_sums(
    x: Tensor, beta: float, weights: Tensor | None, skip_self: bool, degree: int
) -> tuple[AttentionSum, Tensor | None]:
    """The sums, and the diagnostics of ``gpu_sums``; None if it was not used."""
    n, d = x.shape[-2:]
    flat = x.reshape(-1, n, d)
    mass = None if weights is None else weights.expand(x.shape[:-1]).reshape(-1, n).to(x)
    diagnostics = None
    if fits(x, degree):
        total, z, diagnostics = gpu_sums(flat, mass, beta, degree, skip_self=skip_self)
    else:
        sums = _scaled_sums(flat, mass, beta, degree)
        total, z = sums[..., 1:], sums[..., :1]
        if skip_self:  # in units of e^beta the self-term is exactly m_i x_i
            total = total - (flat if mass is None else mass.unsqueeze(-1) * flat)
    shift = _cached_scalar(beta, x.dtype, x.device).expand(*x.shape[:-1], 1)
    return AttentionSum(total.reshape(x.shape), shift, z.reshape(*x.shape[:-1], 1), shift), diagnostics


def _scaled_sums(x: Tensor, mass: Tensor | None, beta: float, degree: int) -> Float[Tensor, "batch n s"]:
    """Z and the coordinates of the sum, divided by e^beta."""
    if x.is_cuda and (x.shape[-1] == 2 or degree <= MAX_MATRIX_DEGREE):
        return matrix_sums(x, mass, beta, degree)
    weights = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device) if mass is None else mass
    sum_system = _circle_sums if x.shape[-1] == 2 else _sphere_sums
    # system by system: the rounding of a batched product would depend on the size of the batch
    return torch.cat([sum_system(x[k : k + 1], weights[k : k + 1], beta, degree) for k in range(len(x))])


@full_precision
def _circle_sums(x: Tensor, mass: Tensor, beta: float, degree: int) -> Float[Tensor, "batch n 3"]:
    """Z and the two coordinates of the sum, divided by e^beta."""
    moments = x.new_zeros(len(x), degree + 2, dtype=_complex_dtype(x))
    passes = _chunked_harmonics(x, degree, lambda y: (powers(torch.complex(y[..., 0], y[..., 1]), degree + 1),))
    for chunk, (phases,) in passes():
        moments += torch.complex(phases.real @ mass[:, chunk, None], -phases.imag @ mass[:, chunk, None]).squeeze(-1)
    series = circle_series(moments, beta, degree)
    out = x.new_empty(*x.shape[:2], 3)
    for chunk, (phases,) in passes():
        used = phases[:, :-1]  # the series has one degree less than the moments
        out[:, chunk] = used.real.mT @ series.real - used.imag.mT @ series.imag
    return out


@full_precision
def _sphere_sums(x: Tensor, mass: Tensor, beta: float, degree: int) -> Float[Tensor, "batch n 4"]:
    """Z and the three coordinates of the sum, divided by e^beta."""
    size = degree + 2
    moments = x.new_zeros(len(x), size, size, dtype=_complex_dtype(x))
    passes = _chunked_harmonics(x, degree, lambda y: _harmonics(y, degree + 1))
    for chunk, (cosines, sines, phases) in passes():
        weighted = phases.conj() * mass[:, None, chunk]
        for parity, u in ((0, cosines), (1, sines)):
            w = weighted[:, parity::2]
            moments[:, parity::2] += torch.complex(w.real @ u.mT, w.imag @ u.mT)
    series = sphere_series(moments, beta, degree)
    out = x.new_zeros(*x.shape[:2], 4)
    for chunk, (cosines, sines, phases) in passes():
        for parity, u in ((0, cosines), (1, sines)):
            rows, f = u[:, :-1].mT, series[:, parity::2].transpose(1, 2).flatten(2)
            real, imag = ((rows @ part).reshape(*rows.shape[:2], -1, 4) for part in (f.real, f.imag))
            p = phases[:, :-1][:, parity::2].transpose(1, 2).unsqueeze(-1)
            out[:, chunk] += (real * p.real - imag * p.imag).sum(-2)
    return out


def _harmonics(x: Tensor, degree: int) -> Harmonics:
    """cos k theta, sin k theta and e^{i k phi} for k = 0..degree, each (batch, k, token); at a pole phi is 0."""
    radius = torch.linalg.vector_norm(x[..., :2], dim=-1)
    at_pole = radius == 0
    phase = torch.complex(x[..., 0] + at_pole, x[..., 1]) / (radius + at_pole)
    theta_powers = powers(torch.complex(x[..., 2], radius), degree)
    return theta_powers.real.contiguous(), theta_powers.imag.contiguous(), powers(phase, degree)


def _chunked_harmonics(
    x: Tensor, degree: int, compute: Callable[[Tensor], Harmonics]
) -> Callable[[], Iterator[tuple[slice, Harmonics]]]:
    """A function that iterates over the harmonics of x in chunks; each call starts again. They are cached if there are
    few enough of them, and recomputed otherwise.
    """
    device = "cuda" if x.is_cuda else "cpu"
    size = CHUNK[device]
    chunks = [slice(first, first + size) for first in range(0, x.shape[1], size)]
    if x.shape[0] * x.shape[1] * (degree + 2) <= MAX_CACHED[device]:
        cached = [(chunk, compute(x[:, chunk])) for chunk in chunks]
        return lambda: iter(cached)
    return lambda: ((chunk, compute(x[:, chunk])) for chunk in chunks)


def _complex_dtype(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.dtype == torch.float64 else torch.complex64
