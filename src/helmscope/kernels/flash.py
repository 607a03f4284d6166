"""Attention sums for large systems on a GPU, block by block without an n x n matrix (FlashAttention, Dao et al. 2022,
arXiv:2205.14135), with float32 accuracy on float16 tensor cores.

A float32 number, rescaled to the range of float16, is the sum of two float16 numbers to 22 bits, so that

    a b ~ a_high b_high + a_high b_low + a_low b_high,

three fast products. They are accumulated in float32, and from block to block by ordinary rounded additions, because the
accumulators of tensor cores truncate towards zero.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.arithmetic import broadcast_shapes
from helmscope.kernels.request import AttentionSum
from helmscope.types import HelmscopeError
from helmscope.types.display import ConciseRepr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.kernels.request import Request

_MAX_WIDTH = 256
_TERM_EXPONENT = 14  # the largest terms are scaled to 2^14
# Up to this beta the smallest possible term, e^{-2 beta} of the largest, still has 20 bits in its two float16 halves.
_MAX_BOUNDED_BETA = 6.0
_MAX_SQUARED_NORM = 1 + 1e-3  # the largest |x|^2 of a vector that counts as a unit vector


@dataclass(frozen=True)
class LaunchConfig:
    """Launch configuration: queries per program and keys per step (powers of two >= 16), warps, pipeline stages, and
    whether sums are compensated for rounding errors (Kahan).

    The last digits of the results depend on it, so it is chosen by the width of the vectors alone, never by timing.

    >>> LaunchConfig(queries=64, keys=64, warps=4, stages=3).compensated
    False
    """

    queries: int
    keys: int
    warps: int
    stages: int
    compensated: bool = False


# The fastest on an H200 at n = 65,536. Compensation makes the tangential part of a sum, which projection keeps, 3 to 5
# times more accurate; at width 256 there are not enough registers for it.
_CONFIGS = {
    16: LaunchConfig(queries=64, keys=256, warps=4, stages=4, compensated=True),
    32: LaunchConfig(queries=64, keys=128, warps=4, stages=3, compensated=True),
    64: LaunchConfig(queries=128, keys=128, warps=8, stages=3, compensated=True),
    128: LaunchConfig(queries=128, keys=64, warps=8, stages=4, compensated=True),
    256: LaunchConfig(queries=128, keys=32, warps=8, stages=3),
}


@dataclass(frozen=True)
class Flash(ConciseRepr):
    """Method for large systems in float32 on a CUDA device, for vectors of at most 256 coordinates.

    It computes no gradient and takes no bias. The relative error of the mean, measured at n = 65,536 for logits l up to
    about 4, is 4e-7 in 16 dimensions to 1e-6 in 256; for larger logits it is |l| 2^-22, where rounding alone costs
    |l| 2^-23 in any float32 computation. A NaN affects only its own system.

    >>> x = torch.eye(2)
    >>> from helmscope.kernels.request import Request
    >>> Flash().unsupported_reason(Request(x.double(), x.double(), x.double()))
    'it needs float32 tensors, and these are float64'
    """

    plan: LaunchConfig | None = None

    def __post_init__(self) -> None:
        if self.plan is not None and not isinstance(self.plan, LaunchConfig):
            raise HelmscopeError(f"plan is {self.plan!r}, but it must be a LaunchConfig or None")

    def unsupported_reason(self, request: Request) -> str | None:
        """Why it does not support a request; None if it does.

        >>> x = torch.zeros(3, 300)
        >>> from helmscope.kernels.request import Request
        >>> Flash().unsupported_reason(Request(x, x, x))
        'it takes vectors of at most 256 coordinates, and these have 300'
        """
        dtypes = {tensor.dtype for tensor in request.tensors} - {torch.float32}
        width = max(request.key.shape[-1], request.value.shape[-1])
        if dtypes:
            return f"it needs float32 tensors, and these are {str(dtypes.pop()).removeprefix('torch.')}"
        if width > _MAX_WIDTH:
            return f"it takes vectors of at most {_MAX_WIDTH} coordinates, and these have {width}"
        if (request.key.shape[-2] + _MAX_WIDTH) * _padded_width(width) > 2**31:  # with rows padded to whole blocks
            return f"it takes fewer than 2^31 numbers per system, and there are {request.key.shape[-2]} tokens"
        if request.query.shape[-2] != request.key.shape[-2]:
            return "it takes queries and keys of one cloud"
        if request.bias is not None:
            return "it takes no bias"
        if request.transform_logits is not None:
            return "it never stores the whole matrix of logits, which this field needs"
        if not isinstance(request.skip_self, bool):
            return "it omits a token's own term for all heads or for none"
        if request.needs_gradient:
            return "it has no gradient"
        return _device_reason(request.key.device)

    def sum(self, request: Request) -> AttentionSum:
        """Compute the sums; the request is not checked.

        ``shift`` is the largest visible logit rounded up to a multiple of log 2, or |beta| where that bound is close
        enough.

        >>> x = torch.eye(2, device="cuda")  # doctest: +SKIP
        >>> Flash().sum(Request(x, x, x)).mean.device.type  # doctest: +SKIP
        'cuda'
        """
        from helmscope.kernels.flash_triton import flash_kernel

        n, d = request.value.shape[-2:]
        plan = self.plan or _CONFIGS[_padded_width(max(request.key.shape[-1], d))]
        batch, shared = _batch_shape(request), request.beta is not None or request.value is request.key
        with torch.cuda.device_of(request.key):  # type: ignore[no-untyped-call]
            key = _split(request.key, batch, plan)
            query = key if request.beta is not None else _split(request.query, batch, plan)
            value = key if shared else _split(request.value, batch, plan)
            # arguments that the kernel does not read are filled with any tensor
            bias, heaviest = (key.largest, key.largest) if request.weights is None else _log_weights(request, batch)
            self_products = _self_products(request, batch) if request.skip_self else key.largest

            total = request.value.new_empty(*batch, n, d)
            shift, mass, mass_shift = total.new_empty(3, *batch, n, 1)
            flash_kernel[(batch.numel() * -(-n // plan.queries),)](
                *(query.halves, key.halves, value.halves, bias, self_products),
                *(query.largest, key.largest, value.largest, heaviest, total, shift, mass, mass_shift),
                *((1.0 if request.beta is None else request.beta) * math.log2(math.e), n, key.rows, d),
                R=key.width,
                D=value.width,
                BLOCK_M=plan.queries,
                BLOCK_N=plan.keys,
                TERM_EXPONENT=_TERM_EXPONENT,
                CAUSAL=request.causal,
                SKIP_SELF=request.skip_self,
                WEIGHTED=request.weights is not None,
                RAGGED=key.rows > n and not request.causal,
                BOUNDED=_is_bounded(request),
                SHARED=shared,
                COMPENSATED=plan.compensated,
                num_warps=plan.warps,
                num_stages=_pipeline_stages(plan, key, value, shared=shared),
            )
        return AttentionSum(total, shift, mass, mass_shift if request.skip_self else shift)


def _batch_shape(request: Request) -> torch.Size:
    """The broadcast batch axes of the tensors of a request."""
    shapes = [tensor.shape[:-2] for tensor in (request.query, request.key, request.value)]
    weights_shape = [] if request.weights is None else [request.weights.shape[:-1]]
    return broadcast_shapes(*shapes, *weights_shape)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _device_reason(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device; None if it can."""
    if not _has_triton():
        return "triton is not installed"
    if device.type == "cuda":
        return None
    from helmscope.kernels.flash_triton import INTERPRETED

    return None if INTERPRETED and device.type == "cpu" else f"it needs a CUDA device, and the tokens are on {device}"


def _is_bounded(request: Request) -> bool:
    """Whether |beta| is a close bound on all logits: it is small, and no vector is longer than a unit vector.

    NaN compares as not longer, so that a NaN in one system does not change how other systems are computed.
    """
    if request.beta is None or abs(request.beta) > _MAX_BOUNDED_BETA:
        return False
    length = torch.linalg.vector_norm(request.key, dim=-1)
    return not bool((length > math.sqrt(_MAX_SQUARED_NORM)).any())


@dataclass(frozen=True, eq=False)
class _Split:
    """A factor of the matrix products, scaled by a power of two per system and split into two float16 halves."""

    halves: Float[Tensor, "systems 2 rows width"]
    largest: Float[Tensor, " systems"]  # the largest absolute value before scaling

    @property
    def rows(self) -> int:
        return self.halves.shape[-2]

    @property
    def width(self) -> int:
        return self.halves.shape[-1]


def _split(x: Tensor, batch: torch.Size, plan: LaunchConfig) -> _Split:
    from helmscope.kernels.flash_triton import split_kernel

    n, d = x.shape[-2:]
    long, short = max(plan.queries, plan.keys), min(plan.queries, plan.keys)
    rows = -(-n // long) * long
    flat = x.expand(*batch, n, d).reshape(-1, n, d).contiguous()
    largest = torch.linalg.vector_norm(flat, torch.inf, dim=(-2, -1))
    halves = flat.new_empty(len(flat), 2, rows, _padded_width(d), dtype=torch.float16)
    split_kernel[(len(flat) * (rows // short),)](flat, largest, halves, n, rows, d, WIDTH=_padded_width(d), ROWS=short)
    return _Split(halves, largest)


def _padded_width(d: int) -> int:
    """The power of two >= 16 to which d coordinates are padded."""
    return max(16, 1 << (d - 1).bit_length())


def _log_weights(request: Request, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """log2 of the weights relative to the heaviest, (systems, n), and the heaviest, (systems, 1)."""
    assert request.weights is not None
    n = request.weights.shape[-1]
    weights = request.weights.expand(*batch, n).reshape(-1, n).contiguous()
    heaviest = weights.amax(-1, keepdim=True)
    return torch.log2(weights / heaviest.clamp(min=torch.finfo(weights.dtype).tiny)), heaviest


def _self_products(request: Request, batch: torch.Size) -> Tensor:
    """<query_i, key_i>."""
    products = (request.query * request.key).sum(-1)
    return products.expand(*batch, products.shape[-1]).contiguous()


@lru_cache
def _shared_memory(device: torch.device) -> int:
    memory: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return memory


def _pipeline_stages(plan: LaunchConfig, key: _Split, value: _Split, *, shared: bool) -> int:
    """The pipeline stages of the plan, or as many as fit in the device's shared memory; results do not depend on it."""
    if not key.halves.is_cuda:
        return plan.stages
    # in pairs of halves, which take 4 bytes
    available = (_shared_memory(key.halves.device) - 2_048) // 4 - plan.queries * key.width
    columns = key.width + (0 if shared else value.width)
    return max(1, min(plan.stages, available // (plan.keys * columns)))
