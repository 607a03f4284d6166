"""Attention sums on the circle and on S^2 in O(n): the kernel e^{beta <x, y>} as a short series of products.

    S^1   e^{beta cos(a - b)}   = sum_k c_k cos k(a - b),                       c_0 = I_0(beta), c_k = 2 I_k(beta)
    S^2   e^{beta <x, y>}       = sum_m e^{i m (phi - phi')} sum_{k k'} A^m_{k k'} u_k(theta) u_k'(theta'),

u_k = cos k theta for even m, sin k theta for odd m (the sphere as a doubled torus), A^m the Fourier coefficients of
I_m(beta sin sin') e^{beta cos cos'}. All u are bounded by 1 and all A by e^beta, so that no digits are lost, and both
the moments of the tokens and the sums at the tokens are matrix products. Truncated at the degree L past which the
harmonic expansion sum_l (2 l + 1) i_l(beta) P_l, or sum_k c_k cos k, adds less than ``tol`` e^beta a pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.geometry.arithmetic import full_precision
from helmscope.geometry.harmonics import exponential_coefficients, exponential_degree, powers
from helmscope.geometry.sphere import NORM_TOLERANCE, check_tokens
from helmscope.kernels.harmonic_gpu import fits, gpu_sums
from helmscope.kernels.harmonic_matrix import MOST_MATRIX_DEGREE, matrix_sums
from helmscope.kernels.harmonic_series import circle_series, sphere_series
from helmscope.kernels.kernel import AttentionSum, Request
from helmscope.types import HelmscopeError, real_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jaxtyping import Bool, Float
    from torch import Tensor

    Harmonics = tuple[Tensor, ...]

MOST_DEGREE = 256  # a table of 256^3 numbers is 134 MB
# harmonics kept for the second pass, and tokens of a chunk: what the cache of a CPU core or the memory of a GPU holds
KEPT = {"cpu": 2**21, "cuda": 2**28}
CHUNK = {"cpu": 4_096, "cuda": 2**20}


TOL = {torch.float64: 1e-12, torch.float32: 1e-7}
ROUNDED = {torch.float64: 16 * 2.0**-52, torch.float32: 16 * 2.0**-23}  # what a length may be off 1
LONE = {torch.float64: 1e-3, torch.float32: 1e-2}  # of the total weight: what a token must see of the others


@dataclass(frozen=True)
class Harmonic:
    """The series on the circle and on S^2: unit tokens, B = c I with c >= 0, neither causal mask nor bias nor gradient.

    ``tol`` bounds the truncation of a pair in units of e^beta; where None, 1e-12 in float64 and 1e-7 in float32.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> Harmonic().sum(Request(0.0 * x, x, x, beta=0.0)).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    tol: float | None = None

    def __post_init__(self) -> None:
        if self.tol is not None and real_number("tol", self.tol, above=0) >= 1:
            raise HelmscopeError(f"tol is {self.tol:g}, but a truncation of e^beta a pair is no sum: take less than 1")

    def refuses(self, request: Request) -> str | None:
        """It knows one kernel, e^{beta <x, y>} on two spheres."""
        if (reason := self.lacks(request)) is not None:
            return reason
        x = request.key
        length = torch.linalg.vector_norm(x, dim=-1).nan_to_num(nan=1.0)  # a lost system does not choose for others
        off = float((length - 1).abs().max())
        return None if off <= NORM_TOLERANCE[x.dtype] else "the series is for unit vectors"

    def lacks(self, request: Request) -> str | None:
        """What of a request the series cannot have, without a look at the numbers: on a GPU that look waits."""
        x, beta = request.key, request.beta
        if beta is None or beta < 0 or request.causal or request.bias is not None or request.settle is not None:
            return "the series is that of e^{beta <x, y>} with beta >= 0 of all pairs, without causal mask and bias"
        if x.shape[-1] not in (2, 3):
            return f"tokens have dimension {x.shape[-1]}, and the series is for the circle and S^2, dimension 2 and 3"
        if request.needs_gradient:
            return "the series has no gradient: take Streaming()"
        if not isinstance(request.skip_self, bool):
            return "its heads must agree on whether they skip themselves"
        if self.degree(request) > MOST_DEGREE:
            return f"beta is {beta:g}, and its series has a degree above {MOST_DEGREE}"
        return None

    def degree(self, request: Request) -> int:
        """Where the series of a request is cut."""
        tol = TOL[request.key.dtype] if self.tol is None else self.tol
        assert request.beta is not None
        return _known_degree(request.beta, dim=request.key.shape[-1], tol=tol)

    def pays(self, request: Request) -> bool:
        """Whether O(n L) on the circle, O(n L^2) on S^2, is less than O(n^2): measured on a CPU core and on a GPU."""
        terms = self.degree(request) + 2
        assert request.beta is not None
        if _mean_kernel(request.beta, request.key.shape[-1]) < 2 * LONE[request.key.dtype]:
            return False
        return request.key.shape[-2] >= (3 * terms * terms if request.key.shape[-1] == 3 else 3 * terms)

    def doubts(self, request: Request, sums: AttentionSum) -> Bool[np.ndarray, "*batch"]:
        """Which systems are not to be believed: those with a token off the sphere, and those with a token whose sum
        over the others is too small beside e^beta times the total weight for 1e-9 of it to be right, 1e-5 in float32.

        One wait for the device, and the answer is on the CPU; a system that holds a NaN is lost and not doubted.
        """
        x, weights, mass = request.key, request.weights, sums.mass[..., 0]
        shortest, longest = torch.linalg.vector_norm(x, dim=-1).aminmax(dim=-1)
        if weights is None:
            others, total = mass.amin(-1), torch.tensor(float(x.shape[-2]), device="cpu")
            facts = torch.stack([others, shortest, longest]).cpu()
            others = facts[0] - 1
        else:
            facts = torch.stack([(mass - weights).amin(-1), shortest, longest]).cpu()
            others, total = facts[0], weights.sum(-1).cpu()
        return _poor(others.numpy(), (facts[1:] - 1).abs().amax(0).numpy(), total.numpy(), x.dtype)

    def sum(self, request: Request) -> AttentionSum:
        """The sums, unchecked: see ``harmonic_sum``."""
        return self._found(request)[0]

    def judged(self, request: Request) -> tuple[AttentionSum, Bool[np.ndarray, "*batch"]]:
        """The sums with their ``doubts``, on a GPU from what its kernel saw of the tokens on the way."""
        sums, facts = self._found(request)
        if facts is None:
            return sums, self.doubts(request, sums)
        least, farthest, weight = facts.cpu().numpy().swapaxes(0, 1)  # NumPy: a tenth of torch's time on few numbers
        poor = _poor(least.min(-1), farthest.max(-1), weight.sum(-1), facts.dtype)
        return sums, poor.reshape(request.key.shape[:-2])

    def _found(self, request: Request) -> tuple[AttentionSum, Tensor | None]:
        assert request.beta is not None
        skip = request.skip_self is True
        return _sums(request.key, request.beta, request.weights, skip, self.degree(request))


def _poor(others: np.ndarray, off: np.ndarray, weight: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Whether a token sees too little of the others, or is too far off the sphere: a length of 1 + e costs beta e."""
    return np.asarray((off > ROUNDED[dtype]) | (others < LONE[dtype] * weight))


@lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, ""]:
    """Kept, as making it costs a launch on a GPU."""
    return torch.tensor(value, dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _mean_kernel(beta: float, dim: int) -> float:
    """The mean of e^{beta (<x, y> - 1)} over a uniform y: the coefficient of degree 0."""
    return float(exponential_coefficients(beta, 0, dim=dim)[0])


def harmonic_degree(beta: float, *, dim: int, tol: float = 1e-12) -> int:
    """The least degree L past which the series adds less than tol e^beta a pair: sum_{l > L} of its coefficients, which
    are positive, at <x, y> = 1 where all terms add up.

    >>> harmonic_degree(4.0, dim=3, tol=1e-9), harmonic_degree(4.0, dim=2, tol=1e-9)
    (15, 15)
    """
    beta, tol = real_number("beta", beta, at_least=0), real_number("tol", tol, above=0)
    if tol < 1e-16:
        raise HelmscopeError(f"tol is {tol:g}, but rounding alone is 1e-16 of e^beta: take at least 1e-16")
    if dim not in (2, 3):
        raise HelmscopeError(f"dim is {dim}, but harmonic sums are for the circle and S^2, dim 2 and 3")
    return exponential_degree(beta, dim=dim, tolerance=tol)


_known_degree = lru_cache(maxsize=256)(harmonic_degree)


def harmonic_sum(
    x: Float[Tensor, "*batch n d"],
    *,
    beta: float,
    weights: Float[Tensor, "*batch n"] | None = None,
    skip_self: bool = False,
    tol: float = 1e-12,
) -> AttentionSum:
    """Sum m_j e^{beta <x_i, x_j>} x_j and its mass Z_i over all j, for unit vectors in dimension 2 or 3, with
    ``shift`` = beta; ``skip_self`` leaves j = i out of the first sum, never out of the mass.

    The error of each sum is at most tol e^beta times the total weight, and rounding: relative to e^beta, not to a sum
    of far tokens. Costs O(n L^2) on S^2 and O(n L) on the circle, and stores no n x n. No gradient; a beta whose degree
    is above 256 is refused.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> harmonic_sum(x, beta=0.0).mean
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    check_tokens(x)
    if x.requires_grad:
        raise HelmscopeError("x requires a gradient, but harmonic sums have none: take the dense kernel")
    degree = harmonic_degree(beta, dim=x.shape[-1], tol=tol)
    if degree > MOST_DEGREE:
        raise HelmscopeError(f"beta is {beta:g}, but its series has degree {degree}, above {MOST_DEGREE}: lower beta")
    return _sums(x, float(beta), weights, skip_self, degree)[0]


def _sums(
    x: Tensor, beta: float, weights: Tensor | None, skip_self: bool, degree: int
) -> tuple[AttentionSum, Tensor | None]:
    """The sums, and the facts of ``gpu_sums`` where it made them."""
    n, d = x.shape[-2:]
    flat = x.reshape(-1, n, d)
    mass = None if weights is None else weights.expand(x.shape[:-1]).reshape(-1, n).to(x)
    facts = None
    if fits(x, degree):
        total, z, facts = gpu_sums(flat, mass, beta, degree, skip_self=skip_self)
    else:
        seen = _seen(flat, mass, beta, degree)
        total, z = seen[..., 1:], seen[..., :1]
        if skip_self:  # in units of e^beta the own term is m_i x_i exactly
            total = total - (flat if mass is None else mass.unsqueeze(-1) * flat)
    shift = _number(beta, x.dtype, x.device).expand(*x.shape[:-1], 1)
    return AttentionSum(total.reshape(x.shape), shift, z.reshape(*x.shape[:-1], 1), shift), facts


def _seen(x: Tensor, mass: Tensor | None, beta: float, degree: int) -> Float[Tensor, "batch n s"]:
    """Z and the coordinates of the sum, over e^beta."""
    if x.is_cuda and (x.shape[-1] == 2 or degree <= MOST_MATRIX_DEGREE):
        return matrix_sums(x, mass, beta, degree)
    shares = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device) if mass is None else mass
    one = _circle if x.shape[-1] == 2 else _sphere
    # system by system: the last bits of a product depend on how many there are
    return torch.cat([one(x[k : k + 1], shares[k : k + 1], beta, degree) for k in range(len(x))])


@full_precision
def _circle(x: Tensor, mass: Tensor, beta: float, degree: int) -> Float[Tensor, "batch n 3"]:
    """Z and the two coordinates of the sum, over e^beta."""
    moments = x.new_zeros(len(x), degree + 2, dtype=_complex(x))
    passes = _twice(x, degree, lambda y: (powers(torch.complex(y[..., 0], y[..., 1]), degree + 1),))
    for part, (phases,) in passes():
        moments += torch.complex(phases.real @ mass[:, part, None], -phases.imag @ mass[:, part, None]).squeeze(-1)
    series = circle_series(moments, beta, degree)
    out = x.new_empty(*x.shape[:2], 3)
    for part, (phases,) in passes():
        known = phases[:, :-1]
        out[:, part] = known.real.mT @ series.real - known.imag.mT @ series.imag
    return out


@full_precision
def _sphere(x: Tensor, mass: Tensor, beta: float, degree: int) -> Float[Tensor, "batch n 4"]:
    """Z and the three coordinates of the sum, over e^beta."""
    size = degree + 2
    moments = x.new_zeros(len(x), size, size, dtype=_complex(x))
    passes = _twice(x, degree, lambda y: _harmonics(y, degree + 1))
    for part, (cosines, sines, phases) in passes():
        weighted = phases.conj() * mass[:, None, part]
        for parity, u in ((0, cosines), (1, sines)):
            w = weighted[:, parity::2]
            moments[:, parity::2] += torch.complex(w.real @ u.mT, w.imag @ u.mT)
    series = sphere_series(moments, beta, degree)
    out = x.new_zeros(*x.shape[:2], 4)
    for part, (cosines, sines, phases) in passes():
        for parity, u in ((0, cosines), (1, sines)):
            rows, f = u[:, :-1].mT, series[:, parity::2].transpose(1, 2).flatten(2)
            real, imag = ((rows @ piece).reshape(*rows.shape[:2], -1, 4) for piece in (f.real, f.imag))
            p = phases[:, :-1][:, parity::2].transpose(1, 2).unsqueeze(-1)
            out[:, part] += (real * p.real - imag * p.imag).sum(-2)
    return out


def _harmonics(x: Tensor, degree: int) -> Harmonics:
    """cos k theta, sin k theta and e^{i k phi} for k = 0..degree, (batch, k, token); at a pole phi is 0."""
    radius = torch.linalg.vector_norm(x[..., :2], dim=-1)
    at_pole = radius == 0
    phase = torch.complex(x[..., 0] + at_pole, x[..., 1]) / (radius + at_pole)
    turns = powers(torch.complex(x[..., 2], radius), degree)
    return turns.real.contiguous(), turns.imag.contiguous(), powers(phase, degree)


def _twice(
    x: Tensor, degree: int, make: Callable[[Tensor], Harmonics]
) -> Callable[[], Iterator[tuple[slice, Harmonics]]]:
    """The harmonics of x in chunks, to be gone through more than once: kept where they are few, else made again."""
    place = "cuda" if x.is_cuda else "cpu"
    size = CHUNK[place]
    parts = [slice(first, first + size) for first in range(0, x.shape[1], size)]
    if x.shape[0] * x.shape[1] * (degree + 2) <= KEPT[place]:
        made = [(part, make(x[:, part])) for part in parts]
        return lambda: iter(made)
    return lambda: ((part, make(x[:, part])) for part in parts)


def _complex(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.dtype == torch.float64 else torch.complex64
