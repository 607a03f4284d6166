"""generator: a block changes every probe by the sum of its generators, up to remainders of known order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors
from helmscope.claims.finding import Finding
from helmscope.claims.generator_shares import NOTHING_MOVES, BlockShares
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced, small_steps_premise
from helmscope.fields.attention import SA
from helmscope.fields.mlp import MLP
from helmscope.geometry.sphere import retract
from helmscope.observe.diffusion import token_sampling_covariance
from helmscope.observe.generator import ambient_generator, convergence_order, richardson_limit
from helmscope.observe.generator_test import generator_test
from helmscope.observe.probes import ProbeBank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Probe = Callable[[Tensor], Tensor]

PLOTTED = 32


class Remainders(NamedTuple):
    """Root mean squares over the tokens of a state, (probe, state, step), and what they are compared with."""

    values: Tensor
    power: float  # the order in the step by theory
    label: str

    @property
    def distance(self) -> Tensor:
        """The distance of the order from theory, for every probe and state."""
        return (convergence_order(self.values) - self.power).abs().flatten()


@experiment("generator", seconds={"simulation": 3, "model": 60})
def generator(case: TrialCase) -> Finding:
    """The remainder of phi(x + s Delta) - phi(x) after s Delta.grad phi + s^2 (Delta Delta^T / 2):Hess phi is of order
    s^3, after the drift alone of order s^2, and with Sigma_A in place of Delta Delta^T / 2 it stays of order s^2. Two
    half-steps differ from the sum of both by s^2 D Delta_M Delta_A.

    If one token is sampled, x' = x + sqrt(eps) (x_J - m) + eps b with J ~ P, then (E phi(x') - phi(x)) / eps tends to
    b.grad phi + Sigma_A:Hess phi: with an error of order sqrt(eps), (sqrt(eps) / 6) E D^3 phi[x_J - m]^3, since the
    tokens are skewed about m, and of order eps if x_J - m has a random sign.

    Attention (V = I) and MLP act on random clouds of unit vectors, and the probes are sin <a, y> + e^<b, y> with random
    a and b. Every pair of a state and a probe is one input; orders are limits, by extrapolation to step 0.

    On a model Delta is the recorded update of every block over the length of its state, the probes are those of
    ``observe.probes``, and the share of their change that the drift explains at s = 1 decides.
    """
    return generator_in_simulation(case) if case.subject.is_simulation else generator_on_model(case)


def generator_in_simulation(case: TrialCase) -> Finding:
    """The finding of generator in simulation."""
    scales = case.constant("scales")
    skewed_steps, even_steps = case.constant("skewed_epsilons"), case.constant("symmetric_epsilons")
    x = retract(case.normal(case.count(64, quick=32), case.constant("tokens"), case.constant("dim"), index=0))
    x = x.expand(case.constant("probes"), *x.shape)
    attention, mlp, phi = SA(beta=case.constant("beta")), _mlp(case), _probes(case)
    drift, second, sampled, split = taylor_remainders(attention, mlp, phi, x, scales)
    skewed = sampling_errors(attention, phi, x, skewed_steps, even=False)
    even = sampling_errors(attention, phi, x, even_steps, even=True)
    found = [
        Remainders(second, 3, "drift and second moment"),
        Remainders(drift, 2, "drift"),
        Remainders(split, 2, "splitting defect"),
        Remainders(sampled, 3, "drift and Sigma_A"),
        Remainders(skewed, 1, "one sampled token"),  # in sqrt(eps)
        Remainders(even, 2, "with a random sign"),
    ]
    with_second, without, splitting, with_sampled = (IdentityErrors(each.distance, "distance") for each in found[:4])
    mean_orders = [f"{float(convergence_order(each.values).mean()) * unit:.3f} ({each.label})"
                   for each, unit in zip(found, (1, 1, 1, 1, 0.5, 0.5), strict=True)]  # fmt: skip
    return Finding(
        evidence={
            "order with the second moment": with_second,
            "order without the second moment": without,
            "order of the splitting defect": splitting,
            "order for skewed noise": IdentityErrors(found[4].distance / 2, "distance"),
            "order for symmetric noise": IdentityErrors(found[5].distance / 2, "distance"),
        },
        controls={
            "Sigma_A as noise": with_sampled,
            "error of Sigma_A": IdentityErrors(
                excess_of_sigma_a(attention, phi, x, scales).flatten(), "relative error"
            ),
        },
        data=xr.merge(
            [
                _curve("remainder", found[:4], {"s": scales}, "remainder of phi(x + s Delta) - phi(x)"),
                _curve("skewed", found[4:5], {"epsilon": skewed_steps}, "error of L, one sampled token"),
                _curve("symmetric", found[5:], {"symmetric_epsilon": even_steps}, "error of L, with a random sign"),
            ],
            join="outer",
        ),
        remark=f"Mean orders: {', '.join(mean_orders)}.",
        setting=f"simulation: {x.shape[1]} clouds of {x.shape[2]} unit vectors in R^{x.shape[3]}, SA at beta = "
        f"{attention.beta:g} and an MLP with random weights, {len(x)} probes sin <a, x> + e^<b, x>",
    )


def generator_on_model(case: TrialCase) -> Finding:
    """The finding of generator on a model."""
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", gap=1)
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    bank = ProbeBank.of(recording, seed=case.seed_for(0), per_kind=case.constant("probes_of_a_kind"))
    options = {
        "bank": bank,
        "sampled_tokens": case.constant("sampled_tokens"),
        "seed": case.seed_for(1),
    }
    own = BlockShares(generator_test(recording, **options))
    silent = BlockShares(generator_test(silenced(recording), **options))
    if not own.blocks("explained_share"):
        return Finding.impossible(NOTHING_MOVES)
    return Finding(
        undecided_because=prompts.alike,
        evidence={"share of the drift": own.shares("explained_share"), "splitting defect": own.splitting()},
        controls={
            "order on the model": own.every_block("order_second_moment"),
            "updates permuted over tokens": own.shares("explained_share_null"),
            "blocks that write nothing": silent.shares("explained_share"),
        },
        described=own.described(),
        data=xr.merge([own.curves(), own.bank(bank)], join="outer"),
        remark=f"{own.remark(silent)} {small_steps_premise(case)}",
        setting=f"{own.measured.attrs['sphere']}, updates over its recorded length, {prompts.setting}, first token "
        f"left out; {own.measured.attrs['probes']} probes: {', '.join(map(str, own.measured.kind.values))}",
    )


def _mlp(case: TrialCase) -> MLP:
    dim = case.constant("dim")
    w_in = case.normal(4 * dim, dim, index=1) / math.sqrt(dim)
    return MLP(w_in=w_in, w_out=case.normal(dim, 4 * dim, index=2) / math.sqrt(4 * dim))


def _probes(case: TrialCase) -> Probe:
    """One probe per index of the first axis."""
    a, b = case.normal(2, case.constant("probes"), case.constant("dim"), index=3) / math.sqrt(case.constant("dim"))

    def phi(y: Tensor) -> Tensor:
        shape = (len(a), *(1,) * (y.ndim - 2), -1)
        values: Tensor = (y * a.reshape(shape)).sum(-1).sin() + (y * b.reshape(shape)).sum(-1).exp()
        return values

    return phi


def taylor_remainders(
    attention: SA, mlp: MLP, phi: Probe, x: Tensor, scales: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The remainders (..., state, scale) of a scaled block after its drift, and after drift and second moment; of its
    attention with Sigma_A as second moment; and the splitting defect of its half-steps.
    """
    write, force = attention(x), mlp.ambient(x)
    block = write + force
    slope = torch.func.grad(lambda y: phi(y).sum())(x)
    block_drift, attention_drift = ((b * slope).sum(-1) for b in (block, write))
    second = ambient_generator(block, block[..., :, None] * block[..., None, :] / 2, phi, x) - block_drift
    sampled = ambient_generator(write, sigma_a(attention, x), phi, x) - attention_drift
    rows = []
    for s in scales:
        middle = x + s * write
        whole, sequence = phi(x + s * block), phi(middle + s * mlp.ambient(middle))
        after_drift = whole - phi(x) - s * block_drift
        alone = phi(middle) - phi(x) - s * attention_drift - s**2 * sampled
        rows.append(torch.stack([after_drift, after_drift - s**2 * second, alone, sequence - whole]))
    drift, with_second, with_sampled, split = _root_mean_square(rows)
    return drift, with_second, with_sampled, split


def sampling_errors(attention: SA, phi: Probe, x: Tensor, epsilons: Sequence[float], *, even: bool) -> Tensor:
    """(E phi(x') - phi(x)) / eps - L phi (..., state, eps) if one token is sampled, b = m."""
    p = attention.kernel(x)
    mean = p @ x
    limit = ambient_generator(mean, sigma_a(attention, x), phi, x)
    return _root_mean_square([expected_change(phi, x, p, x, mean, eps, even=even) / eps - limit for eps in epsilons])


def expected_change(
    phi: Probe, x: Tensor, p: Tensor, values: Tensor, drift: Tensor, eps: float, *, even: bool
) -> Tensor:
    """E phi(x') - phi(x) at each token, x' = x + sqrt(eps) (v_J - m) + eps b with J ~ P and m = E v_J, a sum over all
    tokens; the sign of v_J - m is random if ``even``.
    """
    jump = math.sqrt(eps) * (values[..., None, :, :] - (p @ values)[..., :, None, :])  # (query, key, d)
    center = (x + eps * drift)[..., :, None, :]
    after = (phi(center + jump) + phi(center - jump)) / 2 if even else phi(center + jump)
    return (p * (after - phi(x)[..., None])).sum(-1)


def sigma_a(attention: SA, x: Tensor) -> Tensor:
    """(1/2) Cov_P of the tokens, the covariance of sampling one of them."""
    return token_sampling_covariance(attention.kernel(x), x)


def excess_of_sigma_a(attention: SA, phi: Probe, x: Tensor, scales: Sequence[float]) -> Tensor:
    """By how much the generator with Sigma_A exceeds the limit of (phi(x + s Delta) - phi(x)) / s for deterministic
    attention, less Sigma_A:Hess phi, relative to that: root mean squares over the tokens.
    """
    write, sigma = attention(x), sigma_a(attention, x)
    limit = richardson_limit(torch.stack([(phi(x + s * write) - phi(x)) / s for s in scales], -1))
    spread = ambient_generator(torch.zeros_like(x), sigma, phi, x)
    excess = ambient_generator(write, sigma, phi, x) - limit
    return (excess - spread).square().mean(-1).sqrt() / spread.square().mean(-1).sqrt()


def _root_mean_square(rows: list[Tensor]) -> Tensor:
    """(..., state, step), over the tokens."""
    return torch.stack(rows, -1).square().mean(-2).sqrt()


def _curve(name: str, found: list[Remainders], axis: dict[str, tuple[float, ...]], label: str) -> xr.Dataset:
    values = torch.stack([each.values.flatten(0, 1)[:PLOTTED] for each in found], -1)
    family = {"after": tuple(each.label for each in found)} if len(found) > 1 else {}
    return curve(name, values if family else values[..., 0], {**axis, **family}, label=label, log=True)
