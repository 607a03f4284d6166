"""Noise on tokens, and the stochastic processes on the sphere that it defines together with a flow [Helmholtz
Transformer, no. 5].

A token x is driven by k Brownian motions W through sigma(x), d x k. With M = sigma sigma^T / 2 and P = I - x x^T,
every process here has, for each token, the generator

    L phi = <P f + beta, grad_S phi> + tr(P M P Hess_S phi),

and the processes differ only in the tangential drift beta. For constant sigma, with Sigma = P M P, f = 0, beta and the
forward equation d_t rho = div_S(Sigma grad_S rho) - c div_S(rho P M x) are

    process                                                       beta        c
    LayerNormChain   x' = N(x + eps f + sigma dW), eps -> 0       -2 P M x    d - 2
    Stratonovich     dX = P f dt + P sigma o dW                   -P M x      d - 1
    Ito              dX = P f dt + P sigma dW - tr(P M) X dt      0           d
    DivergenceForm   defined by c = 0                             -d P M x    0

For M = nu I all of them are Brownian motion with the generator nu Lap_S. The [Helmholtz Transformer] prints the
Stratonovich equation with the forward equation of the divergence form; a layer with noise is neither.

On a residual stream in R^d there is nothing to project: dY = f dt + sigma dW, and the direction of Y is the layer-norm
chain with f / |Y| and M / |Y|^2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.func import jvp

from helmscope.fields.parameters import shape_or_type
from helmscope.fields.process import DivergenceForm, Ito, LayerNormChain, Process, Stratonovich
from helmscope.geometry.arithmetic import check_dense_values, full_precision
from helmscope.geometry.sphere import project
from helmscope.kernels.dense import matrix_product
from helmscope.types import ConciseRepr, HelmscopeError, check_real, type_with_article
from helmscope.types.lazy import listed_exports

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = [
    "DivergenceForm",
    "IsotropicNoise",
    "Ito",
    "LayerNormChain",
    "MatrixNoise",
    "Noise",
    "Process",
    "StateNoise",
    "Stratonovich",
]
if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = listed_exports(__name__, __all__, "IsotropicNoise")


@dataclass(frozen=True, eq=False)
class Noise(ConciseRepr, ABC):
    """Base class of noises: sigma(x) for every token, and the process that it drives.

    With ``common`` all tokens of a system share one Brownian motion instead of having independent ones. ``process``
    defines the drift that the noise adds.

    >>> noise = IsotropicNoise(0.1, common=True, process=Ito())
    >>> noise.common, noise.process
    (True, Ito())
    """

    common: bool = field(default=False, kw_only=True)
    process: Process = field(default=LayerNormChain(), kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.common, bool):
            raise HelmscopeError(f"common is {self.common!r}, but it must be True or False")
        if not isinstance(self.process, Process):
            raise HelmscopeError(f"process is {self.process!r}, but it must be a process such as LayerNormChain()")

    @abstractmethod
    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the shape of the tokens fits this noise.

        >>> IsotropicNoise(0.1).check_size(torch.eye(3))
        """

    @abstractmethod
    def brownian_dim(self, x: Float[Tensor, "*batch n d"]) -> int:
        """The number k of Brownian motions that drive a token.

        >>> IsotropicNoise(0.1).brownian_dim(torch.eye(3))
        3
        """

    @abstractmethod
    def increment(self, x: Float[Tensor, "*batch n d"], dw: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n d"]:
        """sigma(x) dw, before projection.

        >>> IsotropicNoise(0.5).increment(torch.eye(2)[:1], torch.tensor([[0.1, 0.2]]))
        tensor([[0.1000, 0.2000]])
        """

    @abstractmethod
    def diffusion_matrix(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d d"]:
        """The diffusion matrix M(x) = sigma sigma^T / 2: an increment over dt has covariance 2 M dt.

        >>> IsotropicNoise(0.5).diffusion_matrix(torch.eye(2)[:1])
        tensor([[[0.5000, 0.0000],
                 [0.0000, 0.5000]]])
        """

    @abstractmethod
    def diffusion_times_state(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """M(x) x.

        >>> IsotropicNoise(0.5).diffusion_times_state(torch.eye(2)[:1])
        tensor([[0.5000, 0.0000]])
        """

    def stratonovich_correction(
        self, x: Float[Tensor, "*batch n d"], *, on_sphere: bool = True
    ) -> Float[Tensor, "*batch n d"]:
        """(1/2) sum_k D sigma_k[P sigma_k], without P unless ``on_sphere``. 0 if sigma is constant.

        >>> IsotropicNoise(0.5).stratonovich_correction(torch.eye(2)[:1])
        tensor([[0., 0.]])
        """
        return torch.zeros_like(x)

    def divergence(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """sum_m D M[P e_m] e_m, the tangential divergence of the rows of M. 0 if sigma is constant.

        >>> IsotropicNoise(0.5).divergence(torch.eye(2)[:1])
        tensor([[0., 0.]])
        """
        return torch.zeros_like(x)


@dataclass(frozen=True)
class IsotropicNoise(Noise):
    """Isotropic noise: M = nu I, sigma = sqrt(2 nu) I, nu >= 0, Brownian motion with the generator nu Lap_S, under
    every process.

    Without a field E<a, X_t> = e^{-nu (d-1) t} <a, x0>, and harmonics of degree k decay as e^{-nu k (k+d-2) t}. Raises
    ``HelmscopeError`` unless nu is finite and >= 0.

    >>> IsotropicNoise(0.5).increment(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.1, 0.2]]))
    tensor([[0.1000, 0.2000]])
    """

    nu: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "nu", check_real("nu", self.nu, at_least=0))

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Accept tokens of any shape."""

    def brownian_dim(self, x: Float[Tensor, "*batch n d"]) -> int:
        """d."""
        return x.shape[-1]

    def increment(self, x: Float[Tensor, "*batch n d"], dw: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """sqrt(2 nu) dw."""
        return math.sqrt(2 * self.nu) * dw

    def diffusion_matrix(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d d"]:
        """nu I."""
        return (self.nu * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)).expand(*x.shape, x.shape[-1])

    def diffusion_times_state(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """nu x."""
        return self.nu * x


@dataclass(frozen=True, eq=False)
class MatrixNoise(Noise):
    """Noise with a constant matrix M = ``diffusion`` (d, d), symmetric and positive semi-definite: an increment over dt
    has covariance 2 M dt.

    sigma is the symmetric square root of 2 M. No gradients are propagated to the matrix. Raises ``HelmscopeError`` if M
    is not square, finite, symmetric and positive semi-definite up to rounding.

    >>> noise = MatrixNoise(torch.diag(torch.tensor([2.0, 0.5])))
    >>> noise.increment(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.1, 0.1]]))
    tensor([[0.2000, 0.1000]])
    """

    diffusion: Float[Tensor, "d d"]
    root: Float[Tensor, "d d"] = field(init=False, repr=False)

    @full_precision
    def __post_init__(self) -> None:
        super().__post_init__()
        m = _check_symmetric(self.diffusion)
        values, vectors = torch.linalg.eigh(m)
        low, high = float(values[0]), float(values.abs().amax())
        allowed = -_rounding_tolerance(self.diffusion) * high
        if low < allowed:
            raise HelmscopeError(
                f"diffusion has the eigenvalue {low:.6g}, but it must be positive semi-definite: next to the largest, "
                f"{high:.6g}, only {allowed:.2g} and above counts as rounding error in {self.diffusion.dtype}"
            )
        object.__setattr__(self, "diffusion", m)
        object.__setattr__(self, "root", vectors * (2 * values.clamp(min=0)).sqrt() @ vectors.mT)

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless the tokens have the dimension of M."""
        if x.shape[-1] != len(self.diffusion):
            given, wanted = tuple(self.diffusion.shape), (x.shape[-1],) * 2
            raise HelmscopeError(f"diffusion has shape {given}, but tokens of shape {tuple(x.shape)} need {wanted}")

    def brownian_dim(self, x: Float[Tensor, "*batch n d"]) -> int:
        """d."""
        return x.shape[-1]

    def increment(self, x: Float[Tensor, "*batch n d"], dw: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """(2 M)^(1/2) dw."""
        return matrix_product(dw, self.root.to(x))

    def diffusion_matrix(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d d"]:
        """M."""
        return self.diffusion.to(x).expand(*x.shape, x.shape[-1])

    def diffusion_times_state(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """M x."""
        return matrix_product(x, self.diffusion.to(x))


@dataclass(frozen=True, eq=False)
class StateNoise(Noise):
    """State-dependent noise: sigma(x) as a callable (*batch, n, d) -> (*batch, n, d, k), for any leading axes.

    The noise of a token may depend on its position and on the other tokens.

    If the process needs derivatives of sigma, they are exact, by ``torch.func``, and along the sphere only: with
    respect to each token itself under independent noise, and with respect to all tokens for Stratonovich under
    ``common`` noise, which moves all of them at once. They cost k (Stratonovich) or d (DivergenceForm) calls of sigma
    on n copies of the systems. Raises ``HelmscopeError`` if sigma is not callable, and when it is used if it returns
    another shape or entries that are not finite.

    >>> noise = StateNoise(lambda x: x[..., :1, None] * torch.eye(2))  # x_1 I
    >>> noise.diffusion_matrix(torch.tensor([[0.6, 0.8]]))
    tensor([[[0.1800, 0.0000],
             [0.0000, 0.1800]]])
    """

    sigma: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.sigma, type) or not callable(self.sigma):
            raise HelmscopeError(
                f"sigma is {self.sigma!r}, but it must be a callable (..., n, d) -> (..., n, d, k): for constant noise "
                "use MatrixNoise or IsotropicNoise"
            )

    def check_size(self, x: Float[Tensor, "*batch n d"]) -> None:
        """Raise ``HelmscopeError`` unless sigma(x) is a finite tensor (..., n, d, k)."""
        with torch.no_grad():
            value = self.sigma(x)
        if not isinstance(value, torch.Tensor) or value.shape[:-1] != x.shape or not value.shape[-1:].numel():
            wanted = f"({', '.join(str(size) for size in x.shape)}, k)"
            raise HelmscopeError(
                f"sigma returns {shape_or_type(value)} for tokens of shape {tuple(x.shape)}, but it must be {wanted}"
            )
        bad = value[~torch.isfinite(value)]
        if len(bad):
            raise HelmscopeError(f"sigma returns the entry {bad[0].item()}, but every entry must be finite")

    def brownian_dim(self, x: Float[Tensor, "*batch n d"]) -> int:
        """The length of the last axis of sigma(x)."""
        with torch.no_grad():
            return self.sigma(x).shape[-1]

    def increment(self, x: Float[Tensor, "*batch n d"], dw: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n d"]:
        """sigma(x) dw."""
        return (self._sigma_at(x) * dw.unsqueeze(-2)).sum(-1)

    @full_precision
    def diffusion_matrix(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d d"]:
        """sigma sigma^T / 2."""
        sigma = self._sigma_at(x)
        return sigma @ sigma.mT / 2

    def diffusion_times_state(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """sigma (sigma^T x) / 2."""
        sigma = self._sigma_at(x)
        return (sigma * (sigma * x.unsqueeze(-1)).sum(-2, keepdim=True)).sum(-1) / 2

    def stratonovich_correction(
        self, x: Float[Tensor, "*batch n d"], *, on_sphere: bool = True
    ) -> Float[Tensor, "*batch n d"]:
        """(1/2) sum_k D sigma_k[P sigma_k], without P unless ``on_sphere``."""
        columns = self._sigma_at(x).movedim(-1, 0)
        columns = project(x, columns) if on_sphere else columns
        derivative = self._joint_derivative if self.common else self._own_derivative
        terms = [derivative(self._sigma_at, x, v)[..., k] for k, v in enumerate(columns)]
        return torch.stack(terms).sum(0) / 2

    def divergence(self, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """sum_m D M[P e_m] e_m."""
        axes = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        tangents = [project(x, axis.expand_as(x)) for axis in axes]
        terms = [self._own_derivative(self.diffusion_matrix, x, v)[..., m] for m, v in enumerate(tangents)]
        return torch.stack(terms).sum(0)

    def _sigma_at(self, x: Tensor) -> Tensor:
        return self.sigma(x).to(x)

    @staticmethod
    def _joint_derivative(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
        """Df[v]: the derivative of every token's value as all tokens move along v."""
        derivative: Tensor = jvp(f, (x,), (v,))[1]
        return derivative

    @staticmethod
    def _own_derivative(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
        """D_i f_i[v_i]: the derivative of each token's value as only that token moves; one copy of x per token."""
        n = x.shape[-2]
        moving = torch.eye(n, dtype=x.dtype, device=x.device).reshape(n, *(1,) * (x.ndim - 2), n, 1)
        derivative: Tensor = jvp(f, (x.expand(n, *x.shape).clone(),), (moving * v,))[1]
        return derivative.diagonal(dim1=0, dim2=x.ndim - 1).movedim(-1, x.ndim - 2)


def _check_symmetric(m: object) -> Float[Tensor, "d d"]:
    """The matrix in float64, exactly symmetric; ``HelmscopeError`` if it is not symmetric up to rounding."""
    if not isinstance(m, torch.Tensor) or m.ndim != 2 or not m.shape[0] == m.shape[1] > 0:
        given = f"a tensor of shape {tuple(m.shape)}" if isinstance(m, torch.Tensor) else type_with_article(m)
        raise HelmscopeError(f"diffusion is {given}, but it must be a square matrix as a torch tensor")
    if not m.dtype.is_floating_point:
        raise HelmscopeError(f"diffusion has dtype {m.dtype}, but it must hold floating-point numbers")
    check_dense_values("diffusion", m)
    entries = m.detach().to(torch.float64)
    bad = entries[~torch.isfinite(entries)]
    if len(bad):
        raise HelmscopeError(f"diffusion holds the entry {bad[0].item()}, but every entry must be finite")
    asymmetry = (entries - entries.mT).abs()
    if bool((asymmetry > _rounding_tolerance(m) * entries.abs().amax()).any()):
        i, j = divmod(int(asymmetry.argmax()), len(m))
        raise HelmscopeError(
            f"diffusion differs from its transpose by {asymmetry.amax().item():.6g} at ({i}, {j}), but it must be "
            "symmetric"
        )
    return (entries + entries.mT) / 2


def _rounding_tolerance(m: Tensor) -> float:
    """The relative deviation from symmetric and semi-definite that rounding may cause in a product such as A A^T."""
    # capped, because in float16 and bfloat16 it would reach 1, and a matrix of any signs would pass
    return min(16 * len(m) * torch.finfo(m.dtype).eps, 1 / 64)
