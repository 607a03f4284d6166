"""The evolution of Gaussians N(m, C) on R^d by their moments.

Linear drift: dX = (A X + a) dt + sqrt(2 M) dW has

    m' = A m + a,   C' = A C + C A^T + 2 M,

solved by matrix exponentials (Van Loan 1978) and doubling; where A is stable, m and C converge to the solution of
A m = -a, A C + C A^T = -2 M.

Attention without projection, x' = V int e^{beta <x, y>} y rho(dy) / Z(x), is linear on a Gaussian, since tilting
N(m, C) by e^{beta <x, y>} moves its mean to m + beta C x. So Gaussians stay Gaussian, with

    m' = V (m + beta C m),   C' = beta (V C C + C C V^T) + 2 M.

For V = I and M = 0 this is C(t)^{-1} = C(0)^{-1} - 2 beta t: without the projection tokens run away from the origin,
and the covariance becomes infinite at t = 1 / (2 beta |C(0)|).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import solve_continuous_lyapunov

from helmscope.geometry import lu
from helmscope.geometry.arithmetic import full_precision
from helmscope.meanfield.gaussian import Gaussian, check_diffusion, check_gaussian, check_square, check_vector
from helmscope.types import HelmscopeError, Outcome, Status, check_real, check_times, pluralized
from helmscope.types.display import one_line_repr

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPath:
    """A Gaussian over time: ``path[k]`` is the law at ``times[k]``. Laws after the end of a run that stopped early are
    missing.

    >>> evolve_gaussian(Gaussian(torch.zeros(1), torch.eye(1)), drift=-torch.eye(1), times=[0, 1])
    <GaussianPath on R^1: 2 times, 0 to 1; finished>
    """

    times: Float[Tensor, " time"]
    means: Float[Tensor, "time d"]
    covariances: Float[Tensor, "time d d"]
    outcome: Outcome

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int) -> Gaussian:
        return Gaussian(self.means[index], self.covariances[index])

    def __iter__(self) -> Iterator[Gaussian]:
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        ends = f"{float(self.times[0]):g} to {float(self.times[-1]):g}" if len(self) else "none"
        return one_line_repr(
            f"GaussianPath on R^{self.means.shape[-1]}: {pluralized(len(self), 'time')}, {ends}; {self.outcome.summary}"
        )


@full_precision
def evolve_gaussian(
    start: Gaussian,
    *,
    drift: Float[Tensor, "d d"],
    times: Sequence[float],
    offset: Float[Tensor, " d"] | None = None,
    diffusion: float | Float[Tensor, "d d"] = 0.0,
) -> GaussianPath:
    """The law of dX = (A X + a) dt + sqrt(2 M) dW at the ``times``, to rounding: N(m, C) with

        m' = A m + a,   C' = A C + C A^T + 2 M.

    ``drift`` is A, ``offset`` a, and ``diffusion`` M, or nu for nu I. Raises ``HelmscopeError`` for shapes that do not
    fit and if M is not symmetric and positive semi-definite.

    >>> start = Gaussian(torch.tensor([2.0]), torch.eye(1))
    >>> path = evolve_gaussian(start, drift=-torch.eye(1), diffusion=0.5, times=[1.0])
    >>> path[0].mean, path[0].covariance  # 2 / e and (1 + e^-2) / 2
    (tensor([0.7358], dtype=torch.float64), tensor([[0.5677]], dtype=torch.float64))
    """
    start, wanted = check_gaussian("start", start), check_times(times)
    matrix, spread = check_square("drift", drift, start.dim), check_diffusion(diffusion, start.dim)
    push = torch.zeros_like(start.mean) if offset is None else check_vector("offset", offset, start.dim)
    means, covariances = [], []
    mean, covariance, now = start.mean, start.covariance, 0.0
    for t in wanted:
        phi, shift, noise = _transition(matrix, push, spread, t - now)
        mean, covariance, now = phi @ mean + shift, _symmetrized(phi @ covariance @ phi.mT + noise), t
        means.append(mean)
        covariances.append(covariance)
    times_reached = torch.tensor(wanted, dtype=torch.float64, device="cpu")
    outcome = Outcome((Status.FINISHED,), (wanted[-1],))
    return GaussianPath(times_reached, torch.stack(means), torch.stack(covariances), outcome)


@full_precision
def stationary_gaussian(
    *, drift: Float[Tensor, "d d"], diffusion: float | Float[Tensor, "d d"], offset: Float[Tensor, " d"] | None = None
) -> Gaussian:
    """The stationary law of dX = (A X + a) dt + sqrt(2 M) dW: A m = -a and A C + C A^T = -2 M.

    Raises ``HelmscopeError`` unless all eigenvalues of A have negative real parts, and if the noise does not reach all
    directions.

    >>> stationary_gaussian(drift=-2 * torch.eye(1), diffusion=0.5).covariance  # nu / k
    tensor([[0.2500]], dtype=torch.float64)
    """
    dim = len(drift) if isinstance(drift, torch.Tensor) and drift.ndim else 1
    matrix, spread = check_square("drift", drift, dim), check_diffusion(diffusion, dim)
    push = torch.zeros(dim, dtype=torch.float64, device="cpu")
    if offset is not None:
        push = check_vector("offset", offset, dim)
    highest = float(torch.linalg.eigvals(matrix).real.max())
    if not highest < 0:
        raise HelmscopeError(
            f"drift has an eigenvalue with real part {highest:.6g}, but a stationary law needs all of them below 0"
        )
    covariance = torch.from_numpy(solve_continuous_lyapunov(matrix.numpy(), -2 * spread.numpy()))
    return Gaussian(lu.solve(matrix, -push), _symmetrized(covariance))


@full_precision
def evolve_attention_gaussian(
    start: Gaussian,
    *,
    beta: float,
    times: Sequence[float],
    value: Float[Tensor, "d d"] | None = None,
    diffusion: float | Float[Tensor, "d d"] = 0.0,
    tol: float = 1e-10,
) -> GaussianPath:
    """The law under attention on R^d without projection, x' = V int e^{beta <x, y>} y rho(dy) / Z(x), with noise M:
    a Gaussian N(m, C) stays one, with

        m' = V (m + beta C m),   C' = beta (V C C + C C V^T) + 2 M.

    ``value`` is V, I by default.

    Integrated with an error of about ``tol`` relative to the moments (Dormand and Prince, order 8). Where the
    covariance becomes infinite the run ends, with the status NOT_FINITE and the time reached in ``outcome``. Raises
    ``HelmscopeError`` for bad input.

    >>> start = Gaussian(torch.zeros(1), torch.eye(1))
    >>> path = evolve_attention_gaussian(start, beta=1.0, times=[0.25, 1.0])
    >>> path.covariances.flatten(), round(path.outcome.times[0], 6)  # 1 / (1 - 2 t), infinite at 1/2
    (tensor([2.0000], dtype=torch.float64), 0.5)
    """
    start, wanted = check_gaussian("start", start), check_times(times)
    beta, tol, dim = check_real("beta", beta, at_least=0), check_real("tol", tol, above=0), start.dim
    matrix = torch.eye(dim, dtype=torch.float64, device="cpu") if value is None else check_square("value", value, dim)
    v, spread = matrix.numpy(), check_diffusion(diffusion, dim).numpy()

    def rate(_: float, y: np.ndarray) -> np.ndarray:
        m, c = y[:dim], y[dim:].reshape(dim, dim)
        turned = v @ c @ c
        return np.concatenate([v @ (m + beta * c @ m), (beta * (turned + turned.T) + 2 * spread).ravel()])

    y, now, states = np.concatenate([start.mean.numpy(), start.covariance.numpy().ravel()]), 0.0, []
    status = Status.FINISHED
    for t in wanted:
        if t > now:
            with np.errstate(over="ignore", invalid="ignore"):
                solution = solve_ivp(rate, (now, t), y, "DOP853", rtol=max(tol, 1e-13), atol=1e-3 * tol)
            y, now = solution.y[:, -1], float(solution.t[-1])
            if solution.status != 0:
                status = Status.NOT_FINITE
                break
        states.append(y)
    moments = torch.from_numpy(np.array(states).reshape(len(states), dim + dim * dim))
    covariances = _symmetrized(moments[:, dim:].reshape(-1, dim, dim))
    reached = torch.tensor(wanted[: len(states)], dtype=torch.float64, device="cpu")
    return GaussianPath(reached, moments[:, :dim], covariances, Outcome((status,), (now,)))


def attention_blow_up_time(start: Gaussian, *, beta: float) -> float:
    """Blow-up time 1 / (2 beta |C|), the time at which the covariance becomes infinite under attention on R^d with V =
    I and without noise; infinity for beta = 0.

    >>> attention_blow_up_time(Gaussian(torch.zeros(1), torch.eye(1)), beta=1.0)
    0.5
    """
    start, beta = check_gaussian("start", start), check_real("beta", beta, at_least=0)
    largest = float(torch.linalg.eigvalsh(start.covariance)[-1])
    return 1 / (2 * beta * largest) if beta > 0 else math.inf


@full_precision
def _transition(a: Tensor, push: Tensor, spread: Tensor, duration: float) -> tuple[Tensor, Tensor, Tensor]:
    """Phi = e^{A t}, int_0^t Phi_s a ds and 2 int_0^t Phi_s M Phi_s^T ds: over a short time by the exponential of block
    matrices, then doubled, so that nothing overflows where A is stable.
    """
    dim = len(a)
    doublings = max(0, math.ceil(math.log2(max(1e-300, 2 * float(torch.linalg.matrix_norm(a, 2)) * duration))))
    h = duration / 2**doublings
    affine = torch.nn.functional.pad(torch.cat([a, push[:, None]], 1), (0, 0, 0, 1))
    exponential = torch.linalg.matrix_exp(h * affine)
    phi, shift = exponential[:dim, :dim], exponential[:dim, dim]
    block = torch.cat([torch.cat([-a, 2 * spread], 1), torch.cat([torch.zeros_like(a), a.mT], 1)])
    noise = _symmetrized(phi @ torch.linalg.matrix_exp(h * block)[:dim, dim:])
    for _ in range(doublings):
        shift, noise = phi @ shift + shift, _symmetrized(phi @ noise @ phi.mT + noise)
        phi = phi @ phi
    return phi, shift, noise


def _symmetrized(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
