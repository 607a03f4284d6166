"""The Schroedinger bridge between two Gaussians of R^d, in closed form.

The reference is dX = A X dt + sqrt(2 Sigma) dW, Brownian motion for A = 0. Over a time r it has the transition law
N(Phi_r x, Q_r), Phi_r = e^{A r}, Q_r = 2 int_0^r Phi_s Sigma Phi_s^T ds. With Q = Q_T, Phi = Phi_T,
a = Q^(-1/2) Phi C_0 Phi^T Q^(-1/2) and b = Q^(-1/2) C_T Q^(-1/2) the endpoints X_0, X_T are jointly Gaussian with the
covariance (Mallasto, Gerolin and Minh 2022; e = 2 nu T = 1 in these coordinates)

    Cov(Phi X_0, X_T) = Q^(1/2) (a^(1/2) (4 a^(1/2) b a^(1/2) + I)^(1/2) a^(-1/2) - I) Q^(1/2) / 2,

and the potential is phi_T(y) = exp(-y^T B y / 2 + l^T y), B = Cov(X_T | X_0)^-1 - Q^-1. For N(0, 1) to N(0, 1/4),
nu = 0.3 and T = 1 the covariance is 0.28309518948453 and B = 4.220634596563533.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helmscope.fields.field import Field, StateSpace
from helmscope.fields.noise import IsotropicNoise, MatrixNoise, Noise
from helmscope.geometry import lu
from helmscope.geometry.arithmetic import check_dense_values, every, full_precision
from helmscope.kernels.dense import matrix_product
from helmscope.transport.bridge import Bridge, check_time, map_systems
from helmscope.types import HelmscopeError, Interval, check_integer, check_real, short_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from helmscope.fields.field import Time


@dataclass(frozen=True, eq=False)
class LinearField(Field):
    """The drift A x on R^d.

    >>> LinearField(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))(torch.tensor([[1.0, 0.0]]))
    tensor([[0., 1.]])
    """

    matrix: Float[Tensor, "d d"]

    @property
    def space(self) -> StateSpace:
        """R^d."""
        return StateSpace.FLAT

    @property
    def takes_weights(self) -> bool:
        """False: points do not interact."""
        return False

    def velocity(
        self, x: Float[Tensor, "*batch n d"], weights: Tensor | None = None, *, t: Time = 0.0
    ) -> Float[Tensor, "*batch n d"]:
        """A x, unchecked."""
        return matrix_product(x, self.matrix.mT.to(x))


@dataclass(frozen=True, eq=False)
class GaussianBridge(Bridge):
    """The bridge from N(start_mean, start_covariance) to N(end_mean, end_covariance) of dX = ``drift`` X dt + sqrt(2
    Sigma) dW.

    The noise is either ``nu`` > 0, for Sigma = nu I, or ``diffusion``, a positive definite matrix Sigma; ``drift`` is a
    matrix A, 0 by default.
    ``end_precision`` and ``end_shift`` are B and l of the potential at the horizon, and ``cross_cov`` = Cov(X_0, X_T).
    Computed in float64. Unlike a bridge to a cloud, its potential and control are defined at the horizon as well.
    Raises ``HelmscopeError`` for shapes that do not fit, covariances that are not symmetric and positive definite,
    nu <= 0 and horizon <= 0.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> bridge = GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3)
    >>> round(float(bridge.cross_cov), 12), round(float(bridge.end_precision), 12)
    (0.283095189485, 4.220634596564)
    """

    start_mean: Float[Tensor, " d"]
    start_covariance: Float[Tensor, "d d"]
    end_mean: Float[Tensor, " d"]
    end_covariance: Float[Tensor, "d d"]
    nu: float | None = field(default=None, kw_only=True)
    diffusion: Float[Tensor, "d d"] | None = field(default=None, kw_only=True)
    horizon: float = field(default=1.0, kw_only=True)
    drift: Float[Tensor, "d d"] | None = field(default=None, kw_only=True)
    cross_cov: Float[Tensor, "d d"] = field(init=False, repr=False)
    end_precision: Float[Tensor, "d d"] = field(init=False, repr=False)
    end_shift: Float[Tensor, " d"] = field(init=False, repr=False)

    @full_precision
    def __post_init__(self) -> None:
        set_value = object.__setattr__
        set_value(self, "horizon", check_real("horizon", self.horizon, above=0))
        dim = _check_mean(self.start_mean, "start_mean", None)
        _check_mean(self.end_mean, "end_mean", dim)
        for name in ("start_mean", "end_mean"):
            set_value(self, name, getattr(self, name).to(torch.float64))
        for name in ("start_covariance", "end_covariance"):
            set_value(self, name, _check_covariance(getattr(self, name), name, dim))
        if (self.nu is None) == (self.diffusion is None):
            given = "neither" if self.nu is None else "both"
            raise HelmscopeError(f"{given} of nu and diffusion is given, but one must be: nu > 0, or a matrix Sigma")
        if self.nu is not None:
            set_value(self, "nu", check_real("nu", self.nu, above=0))
        else:
            set_value(self, "diffusion", _check_covariance(self.diffusion, "diffusion", dim))
        if self.drift is not None:
            set_value(self, "drift", _check_square(self.drift, "drift", dim))
        phi, q = self._transition(self.horizon)
        root, inverse_root = _symmetric_power(q, 0.5), _symmetric_power(q, -0.5)
        a = inverse_root @ phi @ self.start_covariance @ phi.mT @ inverse_root
        b = inverse_root @ self.end_covariance @ inverse_root
        a_root, eye = _symmetric_power(a, 0.5), torch.eye(dim).to(q)
        spread = _symmetric_power(4 * a_root @ b @ a_root + eye, 0.5)
        moved = root @ (a_root @ spread @ _symmetric_power(a, -0.5) - eye) @ root / 2  # Cov(Phi X_0, X_T)
        moved_cov = phi @ self.start_covariance @ phi.mT
        conditional = _symmetrized(self.end_covariance - moved.mT @ lu.solve(moved_cov, moved))
        precision = lu.inv(conditional)
        set_value(self, "cross_cov", lu.solve(phi, moved))
        set_value(self, "end_precision", _symmetrized(precision - lu.inv(q)))
        shift = precision @ self.end_mean - lu.solve(q, phi @ self.start_mean)
        set_value(self, "end_shift", shift)

    @property
    def space(self) -> StateSpace:
        """R^d."""
        return StateSpace.FLAT

    @property
    def noise(self) -> Noise:
        """Gaussian noise with the covariance 2 Sigma per unit of time."""
        if self.nu is not None:
            return IsotropicNoise(self.nu)
        assert self.diffusion is not None  # __post_init__ has checked it
        return MatrixNoise(self.diffusion)

    @property
    def defined_at_horizon(self) -> bool:
        """True: the target has a density."""
        return True

    @property
    def reference(self) -> Field | None:
        """The linear drift; None without one."""
        return None if self.drift is None else LinearField(self.drift)

    def check_size(self, x: Tensor) -> None:
        """Raise ``HelmscopeError`` unless the points have the dimension of the Gaussians."""
        if x.shape[-1] != len(self.start_mean):
            raise HelmscopeError(f"x has dimension {x.shape[-1]}, but the bridge has {len(self.start_mean)}")

    @property
    def _sigma(self) -> Float[Tensor, "d d"]:
        if self.diffusion is not None:
            return self.diffusion
        assert self.nu is not None  # __post_init__ has checked it
        return self.nu * torch.eye(len(self.start_mean)).to(self.start_covariance)

    def _transition(self, duration: float) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d"]]:
        """Phi_r and Q_r of the reference; by the exponential of a block matrix (Van Loan 1978)."""
        sigma = self._sigma
        dim = len(sigma)
        if self.drift is None:
            return torch.eye(dim).to(sigma), 2 * duration * sigma
        block = torch.cat([torch.cat([-self.drift, 2 * sigma], 1), torch.cat([0 * sigma, self.drift.mT], 1)])
        exponential = torch.linalg.matrix_exp(duration * block)
        phi = exponential[dim:, dim:].mT
        return phi, _symmetrized(phi @ exponential[:dim, dim:])

    @full_precision
    def _gradient_and_value(self, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """grad log phi_t and log phi_t at points x (n, d), float64."""
        phi, q = self._transition(self.horizon - t)
        b, shift = self.end_precision, self.end_shift
        moved = x @ phi.mT
        damped = torch.eye(len(b)).to(b) + b @ q
        pull = lu.solve(damped, (shift - moved @ b).mT).mT  # (I + B Q)^-1 (l - B Phi x)
        constant = shift @ q @ lu.solve(damped, shift) / 2 - lu.slogdet(damped).logabsdet / 2
        value = (moved * (pull + lu.solve(damped, shift))).sum(-1) / 2 + constant
        return pull @ phi, value

    def log_potential(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n"]:
        """log phi_t(x) for t <= horizon, with log phi_T(y) = -y^T B y / 2 + l^T y."""
        return map_systems(lambda points, time: self._gradient_and_value(points, time)[1], self, x, t, closed=True)

    def control(self, x: Float[Tensor, "*batch n d"], t: Time) -> Float[Tensor, "*batch n d"]:
        """2 Sigma grad log phi_t(x), linear in x; t <= horizon."""
        sigma = self._sigma

        def at(points: Tensor, time: float) -> Tensor:
            return 2 * matrix_product(self._gradient_and_value(points, time)[0], sigma)

        return map_systems(at, self, x, t, closed=True)

    @full_precision
    def moments(self, t: float) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        """Mean and covariance of the bridge at time t in [0, horizon].

        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> mean, cov = GaussianBridge(torch.zeros(1), one, torch.ones(1), one / 4, nu=0.3).moments(0.5)
        >>> round(float(mean), 6), round(float(cov), 6)
        (0.5, 0.604048)
        """
        t = check_time(self, t, closed=True)
        (phi_t, q_t), (phi_r, _) = self._transition(t), self._transition(self.horizon - t)
        phi, q = self._transition(self.horizon)
        # given both ends, X_t has the mean (Phi_t - K Phi) X_0 + K X_T and the covariance Q_t - K Phi_r Q_t
        gain = lu.solve(q, phi_r @ q_t).mT
        left = phi_t - gain @ phi
        mean = left @ self.start_mean + gain @ self.end_mean
        mixed = left @ self.cross_cov @ gain.mT
        cov = left @ self.start_covariance @ left.mT + gain @ self.end_covariance @ gain.mT + mixed + mixed.mT
        return mean, _symmetrized(cov + q_t - gain @ phi_r @ q_t)

    @full_precision
    def marginal(self, t: float, *, n: int, seed: int = 0) -> Float[Tensor, "n d"]:
        """n points of the Gaussian at time t in [0, horizon], float64."""
        mean, cov = self.moments(t)
        generator = torch.Generator(mean.device).manual_seed(check_integer("seed", seed, at_least=0, below=2**32))
        n = check_integer("n", n, at_least=1)
        xi = torch.randn(n, len(mean), dtype=mean.dtype, device=mean.device, generator=generator)
        return mean + xi @ _symmetric_power(cov, 0.5)

    @full_precision
    def cost(self) -> Interval:
        """E int u . Sigma^-1 u / 4 dt, the relative entropy of the law of (X_0, X_T) with respect to the reference;
        exact, so that its interval has the width 0.

        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> round(GaussianBridge(torch.zeros(1), one, torch.zeros(1), one / 4, nu=0.3).cost().estimate, 9)
        0.700827391
        """
        phi, q = self._transition(self.horizon)
        shift = self.end_mean - phi @ self.start_mean
        moved = phi @ self.cross_cov
        second = (
            self.end_covariance - moved - moved.mT + phi @ self.start_covariance @ phi.mT + torch.outer(shift, shift)
        )
        conditional = lu.inv(self.end_precision + lu.inv(q))
        logs = lu.slogdet(q).logabsdet - lu.slogdet(conditional).logabsdet
        cost = float(logs - len(q) + lu.solve(q, second).trace()) / 2
        return Interval(cost, cost, cost, n=1)


def _symmetrized(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


@full_precision
def _symmetric_power(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(_symmetrized(matrix))
    powers = torch.pow(values.clamp(min=0) if power > 0 else values, power)
    result: Tensor = (vectors * powers) @ vectors.mT
    return result


def _check_mean(mean: object, name: str, dim: int | None) -> int:
    if not isinstance(mean, torch.Tensor) or mean.ndim != 1 or not len(mean) or (dim or len(mean)) != len(mean):
        text = tuple(mean.shape) if isinstance(mean, torch.Tensor) else short_repr(mean)
        raise HelmscopeError(f"{name} is {text}, but it must be a vector{'' if dim is None else f' of length {dim}'}")
    check_dense_values(name, mean)
    if not mean.is_floating_point() or not every(torch.isfinite(mean)):
        raise HelmscopeError(f"{name} holds {mean.dtype}, but it must hold finite floating-point numbers")
    return len(mean)


def _check_square(matrix: object, name: str, dim: int) -> Tensor:
    if not isinstance(matrix, torch.Tensor) or tuple(matrix.shape) != (dim, dim):
        text = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else short_repr(matrix)
        raise HelmscopeError(f"{name} is {text}, but it must be a matrix ({dim}, {dim})")
    check_dense_values(name, matrix)
    if not matrix.is_floating_point() or not every(torch.isfinite(matrix)):
        raise HelmscopeError(f"{name} holds {matrix.dtype}, but it must hold finite floating-point numbers")
    return matrix.to(torch.float64)


def _check_covariance(matrix: object, name: str, dim: int) -> Tensor:
    checked = _check_square(matrix, name, dim)
    if not every((checked - checked.mT).abs() <= 1e-6 * checked.abs().amax()):
        raise HelmscopeError(f"{name} is not symmetric, but it must be symmetric and positive definite")
    least = float(torch.linalg.eigvalsh(checked)[0])
    if not least > 0:
        raise HelmscopeError(f"{name} has the eigenvalue {least:.6g}, but it must be symmetric and positive definite")
    return _symmetrized(checked)
