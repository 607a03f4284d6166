"""jko-step: the flow over a time tau closes most of the gap to the minimizer of one minimizing-movement step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import EverySample, IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.meanfield.jko_gaussian import gaussian_jko_step
from helmscope.transport.gaussian import gaussian_w2

if TYPE_CHECKING:
    from torch import Tensor

DIM = 3
SOFTEST, STIFFEST = 0.5, 3.0  # eigenvalues of Hess V; below 1/tau, so that the opposite potential has a minimizer too
PLOTTED_TAUS = (0.2, 0.1, 0.05, 0.02, 0.01)


class Start(NamedTuple):
    """A Gaussian law N(mean, covariance) and the Hessian of V(x) = <x, K x> / 2."""

    mean: Tensor
    covariance: Tensor
    stiffness: Tensor


@experiment("jko-step", seconds=4)
def jko_step(case: TrialCase) -> Finding:
    """The exact flow d_t rho = div(rho grad V) + nu Lap rho of N(m, C) for V = <x, K x> / 2 over the time tau,

        m(tau) = e^(-K tau) m,    C(tau) = nu K^-1 + e^(-K tau) (C - nu K^-1) e^(-K tau),

    against the minimizer of nu Ent + int V + W2^2(., rho) / (2 tau) in closed form. K and C are random and do not
    commute. The opposite potential has the minimizer for -K; the fixed point of the step is N(0, nu K^-1).
    """
    nu, taus = case.constant("nu"), case.constant("taus")
    starts = random_starts(case, case.count(256, quick=64), stream=0)
    closed = [torch.tensor([share_closed(start, tau, nu) for start in starts]) for tau in taus]
    opposite = [torch.tensor([share_closed(start, tau, nu, sign=-1.0) for start in starts]) for tau in taus]
    shown = torch.tensor([[share_closed(start, tau, nu) for tau in PLOTTED_TAUS] for start in starts[:32]])
    resting = random_starts(case, case.constant("inputs"), stream=1)
    names = [f"tau = {tau:g}" for tau in taus]
    missed = [f"{1 - float(each.mean()):.3g} of the gap at {name}" for each, name in zip(closed, names, strict=True)]
    return Finding(
        evidence={"share of the gap closed": EverySample(closed, "starts", names)},
        controls={
            "potential of the opposite sign": EverySample(opposite, "starts", names),
            "fixed point": IdentityErrors(
                [fixed_point_error(start, taus[-1], nu) for start in resting], "relative error"
            ),
        },
        data=curve(
            "share", shown, {"tau": PLOTTED_TAUS}, label="share of the gap to the minimizer that the flow closes"
        ),
        remark=f"The flow misses the minimizer by {', '.join(missed)}: one step is consistent to first order in tau.",
        setting=f"simulation: Gaussian laws on R^{DIM}, V quadratic with eigenvalues {SOFTEST:g} to {STIFFEST:g}, nu = "
        f"{nu:g}, exact flow over tau",
    )


def random_starts(case: TrialCase, count: int, *, stream: int) -> list[Start]:
    """Random means, covariances W W^T / d + I / 10, and stiffnesses with uniform eigenvalues and random axes."""
    means = 2 * case.normal(count, DIM, stream=3 * stream)
    roots = case.normal(count, DIM, DIM, stream=3 * stream + 1)
    covariances = roots @ roots.mT / DIM + torch.eye(DIM, dtype=roots.dtype) / 10
    sample = case.normal(count, DIM, DIM + 1, stream=3 * stream + 2)
    axes = torch.linalg.qr(sample[..., :DIM]).Q
    values = SOFTEST + (STIFFEST - SOFTEST) * torch.special.ndtr(sample[..., DIM])
    stiffnesses = (axes * values[..., None, :]) @ axes.mT
    stiffnesses = (stiffnesses + stiffnesses.mT) / 2
    return [Start(*each) for each in zip(means, covariances, stiffnesses, strict=True)]


def share_closed(start: Start, tau: float, nu: float, *, sign: float = 1.0) -> float:
    """1 - W2(flow, minimizer) / W2(start, minimizer), with the minimizer for the potential ``sign`` V."""
    step = gaussian_jko_step(start.mean, start.covariance, stiffness=sign * start.stiffness, nu=nu, tau=tau)
    remaining = gaussian_w2(*exact_flow(start, tau, nu), step.mean, step.covariance)
    return 1 - float(remaining) / step.distance


def exact_flow(start: Start, tau: float, nu: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance after the time tau."""
    decay = torch.linalg.matrix_exp(-tau * start.stiffness)
    rest = nu * torch.linalg.inv(start.stiffness)
    covariance = rest + decay @ (start.covariance - rest) @ decay
    return decay @ start.mean, (covariance + covariance.mT) / 2


def fixed_point_error(start: Start, tau: float, nu: float) -> float:
    """How far a step moves the covariance nu K^-1, relative to it."""
    rest = nu * torch.linalg.inv(start.stiffness)
    step = gaussian_jko_step(
        torch.zeros_like(start.mean), (rest + rest.mT) / 2, stiffness=start.stiffness, nu=nu, tau=tau
    )
    return float((step.covariance - rest).norm() / rest.norm())
