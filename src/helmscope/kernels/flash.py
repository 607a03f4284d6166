"""Attention sums for one large system on a GPU: blocks of keys pass by, and no n x n is ever stored (Dao et al. 2022,
arXiv:2205.14135), to float32's accuracy at the tensor cores' speed.

A float32 number is the sum of two float16 numbers to 22 bits once its range is brought to that of float16, so that

    a b ~ a_high b_high + a_high b_low + a_low b_high,

three fast products that are summed in float32, and by a plain rounded addition from block to block: a tensor core's own
sum cuts digits off, always towards zero.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from helmscope.kernels.kernel import AttentionSum
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.kernels.kernel import Request

_WIDEST = 256
_HEADROOM = 14  # the largest terms are 2^14
# Up to here the least of all terms, e^{-2 beta} of the largest, still has 20 bits beside the last digit of float16.
_MOST_FIXED = 6.0
_MOST_SQUARED = 1 + 1e-3  # of a vector that counts as a unit vector


@dataclass(frozen=True)
class Plan:
    """How the work is cut: queries a program and keys a step (powers of two from 16 on), warps, steps under way at
    once, and whether the sums carry what rounding cost them.

    The results depend on it in their last digits, so it is chosen by the width of the vectors alone, never by timing.

    >>> Plan(queries=64, keys=64, warps=4, stages=3).compensated
    False
    """

    queries: int
    keys: int
    warps: int
    stages: int
    compensated: bool = False


# The fastest on an H200 at n = 65,536. Carrying the rounding makes the sum's part that projection leaves 3 to 5 times
# more accurate; at 256 coordinates the registers have no room for it.
_PLANS = {
    16: Plan(queries=64, keys=256, warps=4, stages=4, compensated=True),
    32: Plan(queries=64, keys=128, warps=4, stages=3, compensated=True),
    64: Plan(queries=128, keys=128, warps=8, stages=3, compensated=True),
    128: Plan(queries=128, keys=64, warps=8, stages=4, compensated=True),
    256: Plan(queries=128, keys=32, warps=8, stages=3),
}


@dataclass(frozen=True)
class Flash:
    """sum_j m_j e^{<q_i, k_j>} v_j and Z_i on a CUDA device in float32, for vectors of at most 256 coordinates.

    No gradient, no bias. Relative error of the mean for logits l up to about 4, measured at n = 65,536: 4e-7 in 16
    dimensions to 1e-6 in 256; beyond, |l| 2^-22, where rounding alone makes it |l| 2^-23 in any float32 computation. A
    NaN spreads over its own system and no other.

    >>> x = torch.eye(2)
    >>> from helmscope.kernels.kernel import Request
    >>> Flash().refuses(Request(x.double(), x.double(), x.double()))
    'it needs float32 numbers, and these are float64'
    """

    plan: Plan | None = None

    def __post_init__(self) -> None:
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise HelmscopeError(f"plan is {self.plan!r}, but it must be a Plan or None")

    def refuses(self, request: Request) -> str | None:
        """Why it cannot serve a request; None where it can.

        >>> x = torch.zeros(3, 300)
        >>> from helmscope.kernels.kernel import Request
        >>> Flash().refuses(Request(x, x, x))
        'it takes vectors of at most 256 coordinates, and these have 300'
        """
        dtypes = {part.dtype for part in request.tensors} - {torch.float32}
        width = max(request.key.shape[-1], request.value.shape[-1])
        if dtypes:
            return f"it needs float32 numbers, and these are {str(dtypes.pop()).removeprefix('torch.')}"
        if width > _WIDEST:
            return f"it takes vectors of at most {_WIDEST} coordinates, and these have {width}"
        if (request.key.shape[-2] + _WIDEST) * _width(width) > 2**31:  # with rows up to whole blocks
            return f"it takes fewer than 2^31 numbers a system, and here are {request.key.shape[-2]} tokens"
        if request.query.shape[-2] != request.key.shape[-2]:
            return "it takes queries and keys of one cloud"
        if request.bias is not None:
            return "it takes no bias"
        if request.settle is not None:
            return "it never holds the whole matrix of logits"
        if not isinstance(request.skip_self, bool):
            return "it leaves a token's own term out for all heads or for none"
        if request.needs_gradient:
            return "it has no gradient"
        return _no_device(request.key.device)

    def sum(self, request: Request) -> AttentionSum:
        """The sums, unchecked.

        ``shift`` is the greatest visible logit rounded up to a multiple of log 2, or |beta| where that bound serves.
        """
        from helmscope.kernels.flash_triton import stream

        n, d = request.value.shape[-2:]
        plan = self.plan or _PLANS[_width(max(request.key.shape[-1], d))]
        lead, shared = _lead(request), request.beta is not None or request.value is request.key
        with torch.cuda.device_of(request.key):  # type: ignore[no-untyped-call]
            key = _halves(request.key, lead, plan)
            query = key if request.beta is not None else _halves(request.query, lead, plan)
            value = key if shared else _halves(request.value, lead, plan)
            bias, heaviest = (key.largest, key.largest) if request.weights is None else _log_weights(request, lead)
            own = _own(request, lead) if request.skip_self else key.largest

            total = request.value.new_empty(*lead, n, d)
            shift, mass, mass_shift = total.new_empty(3, *lead, n, 1)
            stream[(lead.numel() * -(-n // plan.queries),)](
                *(query.numbers, key.numbers, value.numbers, bias, own),
                *(query.largest, key.largest, value.largest, heaviest, total, shift, mass, mass_shift),
                *((1.0 if request.beta is None else request.beta) * math.log2(math.e), n, key.rows, d),
                R=key.width,
                D=value.width,
                BLOCK_M=plan.queries,
                BLOCK_N=plan.keys,
                HEADROOM=_HEADROOM,
                CAUSAL=request.causal,
                SKIP_SELF=request.skip_self,
                WEIGHTED=request.weights is not None,
                RAGGED=key.rows > n and not request.causal,
                FIXED=_is_bounded(request),
                SHARED=shared,
                COMPENSATED=plan.compensated,
                num_warps=plan.warps,
                num_stages=_stages(plan, key, value, shared=shared),
            )
        return AttentionSum(total, shift, mass, mass_shift if request.skip_self else shift)


def _lead(request: Request) -> torch.Size:
    """The batch axes, which the parts of a request may share by broadcasting."""
    shapes = [part.shape[:-2] for part in (request.query, request.key, request.value)]
    weighted = [] if request.weights is None else [request.weights.shape[:-1]]
    lead: torch.Size = torch.broadcast_shapes(*shapes, *weighted)  # type: ignore[no-untyped-call]
    return lead


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _no_device(device: torch.device) -> str | None:
    if not _has_triton():
        return "triton is not installed"
    if device.type == "cuda":
        return None
    from helmscope.kernels.flash_triton import INTERPRETED

    return None if INTERPRETED and device.type == "cpu" else f"it needs a CUDA device, and the tokens are on {device}"


def _is_bounded(request: Request) -> bool:
    """Whether |beta| bounds all logits, and closely enough: it is small, and no vector is longer than a unit vector.

    A NaN is no longer than that, so that it does not decide for other systems.
    """
    if request.beta is None or abs(request.beta) > _MOST_FIXED:
        return False
    length = torch.linalg.vector_norm(request.key, dim=-1)
    return not bool((length > math.sqrt(_MOST_SQUARED)).any())


@dataclass(frozen=True, eq=False)
class _Halves:
    """One side of the matrix products, times a power of two for each system, as a sum of two float16 numbers."""

    numbers: Float[Tensor, "systems 2 rows width"]
    largest: Float[Tensor, " systems"]  # of the numbers before, in size

    @property
    def rows(self) -> int:
        return self.numbers.shape[-2]

    @property
    def width(self) -> int:
        return self.numbers.shape[-1]


def _halves(x: Tensor, lead: torch.Size, plan: Plan) -> _Halves:
    from helmscope.kernels.flash_triton import split

    n, d = x.shape[-2:]
    long, short = max(plan.queries, plan.keys), min(plan.queries, plan.keys)
    rows = -(-n // long) * long
    flat = x.expand(*lead, n, d).reshape(-1, n, d).contiguous()
    largest = torch.linalg.vector_norm(flat, torch.inf, dim=(-2, -1))
    numbers = flat.new_empty(len(flat), 2, rows, _width(d), dtype=torch.float16)
    split[(len(flat) * (rows // short),)](flat, largest, numbers, n, rows, d, WIDTH=_width(d), ROWS=short)
    return _Halves(numbers, largest)


def _width(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _log_weights(request: Request, lead: torch.Size) -> tuple[Tensor, Tensor]:
    """log2 of the weights over the heaviest, (systems n), and the heaviest, (systems 1)."""
    assert request.weights is not None
    n = request.weights.shape[-1]
    weights = request.weights.expand(*lead, n).reshape(-1, n).contiguous()
    heaviest = weights.amax(-1, keepdim=True)
    return torch.log2(weights / heaviest.clamp(min=torch.finfo(weights.dtype).tiny)), heaviest


def _own(request: Request, lead: torch.Size) -> Tensor:
    """<query_i, key_i>."""
    own = (request.query * request.key).sum(-1)
    return own.expand(*lead, own.shape[-1]).contiguous()


@lru_cache
def _shared_memory(device: torch.device) -> int:
    memory: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return memory


def _stages(plan: Plan, key: _Halves, value: _Halves, *, shared: bool) -> int:
    """The plan's, or as many as the shared memory of the device has room for; the results are the same."""
    if not key.numbers.is_cuda:
        return plan.stages
    room = (_shared_memory(key.numbers.device) - 2_048) // 4 - plan.queries * key.width  # in pairs of halves
    columns = key.width + (0 if shared else value.width)
    return max(1, min(plan.stages, room // (plan.keys * columns)))
