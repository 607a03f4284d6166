"""Random starts: laws of n tokens on the sphere S^(d-1).

Every start is drawn in float64 on the CPU and then moved, so that a seed means the same tokens on every device and, up
to rounding, in every dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.geometry.arithmetic import check_readable, full_precision
from helmscope.geometry.sphere import NORM_TOLERANCE, project, retract
from helmscope.types import HelmscopeError, fits_memory, real_number, seed_number, whole_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# torch's CPU generator reads the low 32 bits of a seed: beyond them two seeds would give the same tokens


@runtime_checkable
class Start(Protocol):
    """A law of n tokens on S^(dim-1)."""

    @property
    def n(self) -> int:
        """How many tokens."""

    @property
    def dim(self) -> int:
        """The dimension d of the space around the sphere."""

    def sample(
        self,
        batch: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Tokens of the shape (batch, n, dim), or (n, dim) where batch is None."""


class _Drawn(ABC):
    """The public ``sample`` over an inner ``draw``."""

    n: int
    dim: int

    @abstractmethod
    def draw(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n dim"]:
        """``batch`` independent systems in float64 on the CPU, from a CPU generator."""

    def sample(
        self,
        batch: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Float[Tensor, "*batch n dim"]:
        """``batch`` independent systems (batch, n, dim), or one system (n, dim) where ``batch`` is None.

        ``seed`` lies in 0 .. 2^32 - 1 and ``dtype`` is float64 or float32. Everything else is refused.
        """
        return self._sampled(self.draw, self.dim, batch, seed, dtype, device)

    def draw_in_span(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n m"]:
        """As ``draw``, in coordinates of the span of the tokens where dim > n."""
        return in_span(self.draw(generator, batch))

    def sample_in_span(
        self,
        batch: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Float[Tensor, "*batch n m"]:
        """As ``sample``, in m = min(n, dim) coordinates: the Gram matrix has the law of that of ``sample``.

        All that a flow which commutes with rotations can do to n tokens it does in their span, so that such a start
        serves for any dim. ``Uniform`` draws it by itself, other laws turn the tokens of ``sample`` into their span.
        """
        return self._sampled(self.draw_in_span, min(self.n, self.dim), batch, seed, dtype, device)

    def _sampled(
        self,
        draw: Callable[[torch.Generator, int], Tensor],
        width: int,
        batch: int | None,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        systems = 1 if batch is None else whole_number("batch", batch, at_least=1)
        fits_memory(f"batch is {batch}, n is {self.n} and dim is {self.dim}", systems * self.n * width)
        seed = seed_number(seed)
        if dtype not in NORM_TOLERANCE:
            raise HelmscopeError(f"dtype is {dtype}, but it must be torch.float64 or torch.float32")
        try:
            place = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise HelmscopeError(f"device is {device!r}, but it must name a device that torch finds here") from error
        tokens = draw(torch.Generator("cpu").manual_seed(seed), systems)
        return (tokens[0] if batch is None else tokens).to(dtype=dtype, device=place)


def in_span(x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
    """The tokens in an orthonormal basis of their span: m = min(n, d) coordinates, the same Gram matrix to rounding.

    X^T = Q R makes X = R^T Q^T, and R^T holds the tokens in the basis Q. Tokens in d <= n stay as they are.

    >>> in_span(torch.tensor([[0.0, 0.6, 0.8, 0.0], [0.0, 1.0, 0.0, 0.0]])).shape
    torch.Size([2, 2])
    """
    n, d = x.shape[-2:]
    if d <= n:
        return x
    r: Tensor = torch.linalg.qr(x.mT, mode="r")[1]
    return retract(r.mT)


def _check_size(start: Uniform | VonMisesFisher | Orthonormal) -> None:
    object.__setattr__(start, "n", whole_number("n", start.n, at_least=1))
    object.__setattr__(start, "dim", whole_number("dim", start.dim, at_least=2))


@dataclass(frozen=True)
class Uniform(_Drawn):
    """n independent tokens, uniform on the sphere: x = g / |g|, g ~ N(0, I).

    ``sample_in_span`` costs for any dim > n what dim = n costs (Bartlett 1933): the Gaussian matrix is G = L Q with Q
    uniform and L lower triangular, all entries independent, L_ii ~ chi_{dim-i} for i = 0 .. n-1 and L_ij ~ N(0, 1)
    for j < i; the tokens are the rows of L, normalised.

    >>> Uniform(n=32, dim=3).sample(batch=16, seed=0).shape
    torch.Size([16, 32, 3])
    >>> Uniform(n=32, dim=10**6).sample_in_span(batch=16, seed=0).shape
    torch.Size([16, 32, 32])
    """

    n: int
    dim: int

    def __post_init__(self) -> None:
        _check_size(self)

    def draw(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n dim"]:
        """``batch`` independent systems in float64 on the CPU, from a CPU generator."""
        return retract(_normal((batch, self.n, self.dim), generator))

    def draw_in_span(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n m"]:
        """As ``draw``, in coordinates of the span of the tokens where dim > n, by Bartlett's decomposition."""
        if self.dim <= self.n:
            return self.draw(generator, batch)
        below = _normal((batch, self.n, self.n), generator).tril(-1)
        freedom = self.dim - torch.arange(self.n, dtype=torch.float64, device="cpu")
        # half a chi-square of k degrees is gamma of shape k/2; torch's public gamma takes no generator
        half = torch._standard_gamma((freedom / 2).expand(batch, -1), generator=generator)
        return retract(below + torch.diag_embed((2 * half).sqrt()))


@dataclass(frozen=True, eq=False)
class VonMisesFisher(_Drawn):
    """n independent tokens of density ~ e^{kappa <mean, x>}: uniform at kappa = 0, ever closer to the mean above.

    ``mean`` is a nonzero tensor (dim,) of which only the direction counts; None is the first axis. Exact for every
    dim >= 2 and kappa >= 0 (Ulrich 1984; Wood 1994): a uniform point is moved along its great circle through the mean,
    from the cosine t to the cosine 1 - e,

        e = 2 b / (q + b),   q = (1 + t)/(1 - t),   b = (d - 1)/(2 kappa + sqrt(4 kappa^2 + (d - 1)^2)),

    and kept with a probability proportional to target over proposal, which keeps 65 % of all points or more,
    whatever kappa and dim. Working with 1 - cosine saves the digits at large kappa; kappa = 0 leaves every point where
    it is.

    >>> x = VonMisesFisher(n=1000, dim=3, kappa=100.0, mean=torch.tensor([0.0, 0.0, 2.0])).sample(seed=0)
    >>> bool((x[:, 2] > 0.8).all())
    True
    """

    n: int
    dim: int
    kappa: float
    mean: Float[Tensor, " dim"] | None = None

    def __post_init__(self) -> None:
        _check_size(self)
        object.__setattr__(self, "kappa", real_number("kappa", self.kappa, at_least=0))
        mean = self.mean
        if mean is None:
            return
        if not isinstance(mean, torch.Tensor) or mean.shape != (self.dim,):
            shown = f"of shape {tuple(mean.shape)}" if isinstance(mean, torch.Tensor) else f"a {type(mean).__name__}"
            raise HelmscopeError(f"mean is {shown}, but it must be a tensor of shape ({self.dim},)")
        check_readable("mean", mean)
        if mean.is_complex() or not bool(torch.isfinite(mean).all()) or not bool(mean.any()):
            raise HelmscopeError(f"mean is {mean.tolist()}, but it must be a nonzero vector of finite real numbers")

    @property
    def direction(self) -> Float[Tensor, " dim"]:
        """The mean direction: a unit vector in float64 on the CPU.

        >>> VonMisesFisher(n=1, dim=2, kappa=1.0).direction
        tensor([1., 0.], dtype=torch.float64)
        """
        if self.mean is None:
            return torch.eye(1, self.dim, dtype=torch.float64, device="cpu")[0]
        return retract(self.mean.detach().to(device="cpu", dtype=torch.float64))

    def draw(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n dim"]:
        """``batch`` independent systems in float64 on the CPU, from a CPU generator."""
        tokens = torch.empty(batch * self.n, self.dim, dtype=torch.float64, device="cpu")
        open_rows = torch.arange(len(tokens), device="cpu")
        while len(open_rows):
            proposed, log_keep = self._propose(_normal((len(open_rows), self.dim), generator))
            keep = torch.rand(len(open_rows), dtype=torch.float64, device="cpu", generator=generator).log() <= log_keep
            tokens[open_rows[keep]] = proposed[keep]
            open_rows = open_rows[~keep]
        return tokens.view(batch, self.n, self.dim)

    @full_precision
    def _propose(self, g: Float[Tensor, "m dim"]) -> tuple[Float[Tensor, "m dim"], Float[Tensor, " m"]]:
        """The proposals made of Gaussian vectors, and the log of the probability with which each is kept."""
        mean, k = self.direction, self.dim - 1
        along = g @ mean
        side = project(mean, g)
        norm, side_norm = torch.linalg.vector_norm(g, dim=-1), torch.linalg.vector_norm(side, dim=-1)
        b = k / 2 / (self.kappa + math.hypot(self.kappa, k / 2))
        q = ((norm + along) / side_norm).square()
        e = 2 * b / (q + b)
        log_keep = 2 * (self.kappa * b) * (1 / (1 + b) - 1 / (q + b)) + k * torch.log((q + 1) * (1 + b) / (2 * (q + b)))
        e = e.unsqueeze(-1)
        return retract((1 - e) * mean + (e * (2 - e)).sqrt() * retract(side)), log_keep


@dataclass(frozen=True)
class Orthonormal(_Drawn):
    """n <= dim orthonormal tokens: the first n rows of a Haar random rotation of R^dim.

    The frame is the Q of a Gaussian matrix's QR with the diagonal of R made positive (Mezzadri 2007); a full frame
    turns its last row over where its determinant is -1.

    >>> x = Orthonormal(n=2, dim=5).sample(seed=0)
    >>> torch.allclose(x @ x.mT, torch.eye(2, dtype=torch.float64))
    True
    """

    n: int
    dim: int

    def __post_init__(self) -> None:
        _check_size(self)
        if self.n > self.dim:
            raise HelmscopeError(f"n is {self.n}, but at most dim = {self.dim} tokens can be orthonormal")

    def draw(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n dim"]:
        """``batch`` independent systems in float64 on the CPU, from a CPU generator."""
        q, r = torch.linalg.qr(_normal((batch, self.dim, self.n), generator))
        frame: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.contiguous()
        if self.n == self.dim:
            frame[:, -1] *= torch.linalg.det(frame).sign().unsqueeze(-1)
        return frame


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
