"""Random starts: distributions of n initial tokens on the sphere S^(d-1).

Tokens are sampled in float64 on the CPU and then converted, so that a seed yields the same tokens on every device and,
up to rounding, in every dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from helmscope.geometry import lu
from helmscope.geometry.arithmetic import check_dense_values, full_precision
from helmscope.geometry.sphere import NORM_TOLERANCE, project, retract
from helmscope.types import (
    ConciseRepr,
    HelmscopeError,
    check_integer,
    check_memory,
    check_real,
    check_seed,
    type_with_article,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@runtime_checkable
class Start(Protocol):
    """A distribution of n tokens on S^(dim-1)."""

    @property
    def n(self) -> int:
        """Number of tokens."""

    @property
    def dim(self) -> int:
        """Dimension d of the ambient space R^d."""

    def sample(
        self,
        batch: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Sample tokens of shape (batch, n, dim), or (n, dim) if ``batch`` is None."""


class _Sampler(ConciseRepr, ABC):
    """Base class: the public ``sample`` and ``sample_in_span`` in terms of ``draw``."""

    n: int
    dim: int

    @abstractmethod
    def draw(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n dim"]:
        """Sample ``batch`` independent systems in float64 on the CPU, with a CPU generator."""

    def sample(
        self,
        batch: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Float[Tensor, "*batch n dim"]:
        """Sample ``batch`` independent systems (batch, n, dim), or one system (n, dim) if ``batch`` is None.

        Raises ``HelmscopeError`` unless ``seed`` is in 0 .. 2^32 - 1 and ``dtype`` is float64 or float32. torch's CPU
        generator reads only the low 32 bits of a seed, so larger seeds would repeat the tokens of smaller ones.

        >>> Uniform(n=4, dim=3).sample(2, seed=1).shape
        torch.Size([2, 4, 3])
        """
        return self._sample(self.draw, self.dim, batch, seed, dtype, device)

    def draw_in_span(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n m"]:
        """Like ``draw``, but in coordinates of the span of the tokens if dim > n."""
        return in_span(self.draw(generator, batch))

    def sample_in_span(
        self,
        batch: int | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Float[Tensor, "*batch n m"]:
        """Like ``sample``, but in m = min(n, dim) coordinates, with the same distribution of the Gram matrix.

        A flow that commutes with rotations keeps n tokens in their span, so that m coordinates suffice to simulate it
        in any dimension. ``Uniform`` samples the coordinates directly; other distributions rotate the tokens of
        ``sample`` into their span.

        >>> Uniform(n=4, dim=10**6).sample_in_span(2).shape
        torch.Size([2, 4, 4])
        """
        return self._sample(self.draw_in_span, min(self.n, self.dim), batch, seed, dtype, device)

    def _sample(
        self,
        draw: Callable[[torch.Generator, int], Tensor],
        width: int,
        batch: int | None,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        systems = 1 if batch is None else check_integer("batch", batch, at_least=1)
        check_memory(f"batch is {batch}, n is {self.n} and dim is {self.dim}", systems * self.n * width)
        seed = check_seed(seed)
        if dtype not in NORM_TOLERANCE:
            raise HelmscopeError(f"dtype is {dtype}, but it must be torch.float64 or torch.float32")
        try:
            target = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            raise HelmscopeError(f"device is {device!r}, but it must name a device available to torch") from error
        tokens = draw(torch.Generator("cpu").manual_seed(seed), systems)
        return (tokens[0] if batch is None else tokens).to(dtype=dtype, device=target)


def in_span(x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"]:
    """Tokens in an orthonormal basis of their span: m = min(n, d) coordinates, the same Gram matrix up to rounding.

    From X^T = Q R follows X = R^T Q^T, so the rows of R^T are the tokens in the basis Q. If d <= n, x is returned
    unchanged.

    >>> in_span(torch.tensor([[0.0, 0.6, 0.8, 0.0], [0.0, 1.0, 0.0, 0.0]])).shape
    torch.Size([2, 2])
    """
    n, d = x.shape[-2:]
    if d <= n:
        return x
    r: Tensor = torch.linalg.qr(x.mT, mode="r")[1]
    return retract(r.mT)


def _check_size(start: Uniform | VonMisesFisher | Orthonormal) -> None:
    object.__setattr__(start, "n", check_integer("n", start.n, at_least=1))
    object.__setattr__(start, "dim", check_integer("dim", start.dim, at_least=2))


@dataclass(frozen=True)
class Uniform(_Sampler):
    """n independent tokens, uniform on the sphere: x = g / |g|, g ~ N(0, I).

    For any dim > n, ``sample_in_span`` costs no more than for dim = n, by Bartlett's decomposition (Bartlett 1933): the
    Gaussian matrix is G = L Q with Q uniform and L lower triangular, all entries independent, L_ii ~ chi_{dim-i} for
    i = 0 .. n-1 and L_ij ~ N(0, 1) for j < i; the tokens are the normalized rows of L.

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
        """Sample ``batch`` independent systems in float64 on the CPU, with a CPU generator."""
        return retract(_normal((batch, self.n, self.dim), generator))

    def draw_in_span(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n m"]:
        """Like ``draw``, but in coordinates of the span of the tokens if dim > n, by Bartlett's decomposition."""
        if self.dim <= self.n:
            return self.draw(generator, batch)
        lower = _normal((batch, self.n, self.n), generator).tril(-1)
        degrees_of_freedom = self.dim - torch.arange(self.n, dtype=torch.float64, device="cpu")
        # a chi-squared variable with k degrees of freedom is twice a gamma variable of shape k/2; torch's public gamma
        # distribution takes no generator
        gamma = torch._standard_gamma((degrees_of_freedom / 2).expand(batch, -1), generator=generator)
        return retract(lower + torch.diag_embed((2 * gamma).sqrt()))


@dataclass(frozen=True, eq=False)
class VonMisesFisher(_Sampler):
    """n independent tokens with density ~ e^{kappa <mean, x>}: uniform at kappa = 0, concentrated at the mean as kappa
    grows.

    ``mean`` is a nonzero tensor (dim,) of which only the direction matters; None stands for the first axis. Sampling is
    exact for every dim >= 2 and kappa >= 0 (Ulrich 1984; Wood 1994): a uniform point is moved along its great circle
    through the mean, from the cosine t to the cosine 1 - e,

        e = 2 b / (q + b),   q = (1 + t)/(1 - t),   b = (d - 1)/(2 kappa + sqrt(4 kappa^2 + (d - 1)^2)),

    and accepted with a probability proportional to the ratio of target and proposal density. At least 65 % of all
    points are accepted for any kappa and dim. Computing with e = 1 - cosine avoids cancellation at large kappa; at
    kappa = 0 no point is moved.

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
        object.__setattr__(self, "kappa", check_real("kappa", self.kappa, at_least=0))
        mean = self.mean
        if mean is None:
            return
        if not isinstance(mean, torch.Tensor) or mean.shape != (self.dim,):
            is_tensor = isinstance(mean, torch.Tensor)
            description = f"of shape {tuple(mean.shape)}" if is_tensor else type_with_article(mean)
            raise HelmscopeError(f"mean is {description}, but it must be a tensor of shape ({self.dim},)")
        check_dense_values("mean", mean)
        if mean.is_complex() or not bool(torch.isfinite(mean).all()) or not bool(mean.any()):
            raise HelmscopeError(f"mean is {mean.tolist()}, but it must be a nonzero vector of finite real numbers")

    @property
    def direction(self) -> Float[Tensor, " dim"]:
        """Mean direction, a unit vector in float64 on the CPU.

        >>> VonMisesFisher(n=1, dim=2, kappa=1.0).direction
        tensor([1., 0.], dtype=torch.float64)
        """
        if self.mean is None:
            return torch.eye(1, self.dim, dtype=torch.float64, device="cpu")[0]
        return retract(self.mean.detach().to(device="cpu", dtype=torch.float64))

    def draw(self, generator: torch.Generator, batch: int) -> Float[Tensor, "batch n dim"]:
        """Sample ``batch`` independent systems in float64 on the CPU, with a CPU generator."""
        tokens = torch.empty(batch * self.n, self.dim, dtype=torch.float64, device="cpu")
        pending = torch.arange(len(tokens), device="cpu")
        while len(pending):
            proposals, log_acceptance = self._propose(_normal((len(pending), self.dim), generator))
            uniform = torch.rand(len(pending), dtype=torch.float64, device="cpu", generator=generator)
            accepted = uniform.log() <= log_acceptance
            tokens[pending[accepted]] = proposals[accepted]
            pending = pending[~accepted]
        return tokens.view(batch, self.n, self.dim)

    @full_precision
    def _propose(self, g: Float[Tensor, "m dim"]) -> tuple[Float[Tensor, "m dim"], Float[Tensor, " m"]]:
        """Proposals computed from Gaussian vectors, and the log of the acceptance probability of each."""
        mean, k = self.direction, self.dim - 1
        along = g @ mean
        tangent = project(mean, g)
        norm, tangent_norm = torch.linalg.vector_norm(g, dim=-1), torch.linalg.vector_norm(tangent, dim=-1)
        b = k / 2 / (self.kappa + math.hypot(self.kappa, k / 2))
        q = ((norm + along) / tangent_norm).square()
        e = 2 * b / (q + b)
        log_tilt = 2 * (self.kappa * b) * (1 / (1 + b) - 1 / (q + b))
        log_acceptance = log_tilt + k * torch.log((q + 1) * (1 + b) / (2 * (q + b)))
        e = e.unsqueeze(-1)
        return retract((1 - e) * mean + (e * (2 - e)).sqrt() * retract(tangent)), log_acceptance


@dataclass(frozen=True)
class Orthonormal(_Sampler):
    """n <= dim orthonormal tokens: the first n rows of a Haar-distributed random rotation of R^dim.

    The frame is Q from the QR decomposition of a Gaussian matrix, with the diagonal of R made positive (Mezzadri 2007);
    if n = dim and the determinant is -1, the last row is negated.

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
        """Sample ``batch`` independent systems in float64 on the CPU, with a CPU generator."""
        q, r = torch.linalg.qr(_normal((batch, self.dim, self.n), generator))
        frame: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.contiguous()
        if self.n == self.dim:
            frame[:, -1] *= lu.det(frame).sign().unsqueeze(-1)
        return frame


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
