"""Stochastic processes on the sphere: the drift that noise adds to a flow; see ``noise`` for the table of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helmscope.geometry.sphere import project

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.noise import Noise


class Process(ABC):
    """Base class of processes: the drift beta that noise with the diffusion matrix M adds to P f in the generator
    L phi = <P f + beta, grad phi> + tr(P M P Hess phi).

    >>> from helmscope.fields.noise import IsotropicNoise
    >>> isinstance(IsotropicNoise(0.1).process, LayerNormChain)
    True
    """

    @abstractmethod
    def drift(self, noise: Noise, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The tangential drift beta at unit vectors x.

        >>> from helmscope.fields.noise import IsotropicNoise
        >>> Stratonovich().drift(IsotropicNoise(0.5), torch.eye(2)[:1])
        tensor([[0., 0.]])
        """


@dataclass(frozen=True)
class LayerNormChain(Process):
    """The limit of x' = N(x + eps f + sigma dW), which is what a layer does: beta = -2 P M(x) x, for every sigma(x).

    N shortens the tangential part of a step that points outward and lengthens that of one that points inward
    ([Helmholtz Transformer, no. 1]: -<x, d> P d). Under constant noise the uniform distribution on the circle is
    stationary.

    >>> from helmscope.fields.noise import MatrixNoise
    >>> x = torch.tensor([[0.6, 0.8]])
    >>> LayerNormChain().drift(MatrixNoise(torch.diag(torch.tensor([2.0, 1.0]))), x)
    tensor([[-0.7680,  0.5760]])
    """

    def drift(self, noise: Noise, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """-2 P M x."""
        return -2 * project(x, noise.diffusion_times_state(x))


@dataclass(frozen=True)
class Stratonovich(Process):
    """Stratonovich process: dX = P f dt + P sigma o dW, beta = (1/2) sum_k P D A_k[A_k], A_k = P sigma e_k; -P M x
    where sigma is constant.

    >>> from helmscope.fields.noise import MatrixNoise
    >>> x = torch.tensor([[0.6, 0.8]])
    >>> Stratonovich().drift(MatrixNoise(torch.diag(torch.tensor([2.0, 1.0]))), x)
    tensor([[-0.3840,  0.2880]])
    """

    def drift(self, noise: Noise, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """P [(1/2) sum_k D sigma_k[P sigma_k] - M x], because P D A_k[v] = P D sigma_k[v] - <x, sigma_k> v."""
        return project(x, noise.stratonovich_correction(x) - noise.diffusion_times_state(x))


@dataclass(frozen=True)
class Ito(Process):
    """Ito process: dX = P f dt + P sigma dW - tr(P M) X dt, whose last term keeps it on the sphere: beta = 0.

    >>> from helmscope.fields.noise import MatrixNoise
    >>> Ito().drift(MatrixNoise(torch.diag(torch.tensor([2.0, 1.0]))), torch.tensor([[0.6, 0.8]]))
    tensor([[0., 0.]])
    """

    def drift(self, noise: Noise, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """0."""
        return torch.zeros_like(x)


@dataclass(frozen=True)
class DivergenceForm(Process):
    """The process whose forward equation is d_t rho = div_S(Sigma grad_S rho) - div_S(rho P f), Sigma = P M P:
    beta = div_S Sigma, which is -d P M x where sigma is constant. The uniform distribution is stationary if P f = 0.

    >>> from helmscope.fields.noise import MatrixNoise
    >>> x = torch.tensor([[0.6, 0.8]])
    >>> DivergenceForm().drift(MatrixNoise(torch.diag(torch.tensor([2.0, 1.0]))), x)
    tensor([[-0.7680,  0.5760]])
    """

    def drift(self, noise: Noise, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """P sum_m D M[P e_m] e_m - d P M x."""
        return project(x, noise.divergence(x) - x.shape[-1] * noise.diffusion_times_state(x))
