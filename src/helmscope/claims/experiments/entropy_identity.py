"""entropy-identity: entropy changes by the mean divergence of the drift and a Sigma-weighted Fisher information."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from helmscope.claims.circle_functions import GivenDrift, derivative, harmonic_sum, random_harmonics
from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.mlp_shares import WrittenByMlp
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced, small_steps_premise
from helmscope.fields.noise import DivergenceForm, Ito, StateNoise, Stratonovich
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.forward_equation import ForwardEquation
from helmscope.observe.mlp_entropy_change import entropy_change_unsupported, mlp_entropy_change
from helmscope.types import Attachment

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.fields.noise import Process
    from helmscope.models.recording import Recording

PROCESSES: dict[str, Process] = {"divergence form": DivergenceForm(), "Ito": Ito(), "Stratonovich": Stratonovich()}
DEGREE, HARMONICS, GROUP = 32, 3, 32
IDENTITY = torch.eye(2, dtype=torch.float64)
SPREAD = 0.4  # of the coefficients of log rho and log Sigma
MIN_LAYERS = 3  # for a slope over MLP half-steps
NO_CHANGE = "the MLPs write nothing, so that both changes of entropy are 0 and have no slope"


class Settings(NamedTuple):
    """log rho (up to a constant), the drift b and log Sigma of many cases, as sums of harmonics: (case, k, 2) each, the
    coefficients of cos k t and sin k t.
    """

    log_density: Tensor
    drift: Tensor
    log_sigma: Tensor


class Rates(NamedTuple):
    """dH/dt along the forward equation of a process, and both terms of the identity: (case,) each."""

    exact: Tensor
    divergence: Tensor
    fisher: Tensor

    @property
    def errors(self) -> Tensor:
        """The errors of the identity, relative to the sum of the absolute terms."""
        return (self.exact - self.divergence - self.fisher).abs() / (self.divergence.abs() + self.fisher)

    @property
    def slopes(self) -> Tensor:
        """The least-squares slope of predicted on exact rates, one per group of 32 cases."""
        exact, predicted = (each.reshape(-1, GROUP) for each in (self.exact, self.divergence + self.fisher))
        centered = exact - exact.mean(-1, keepdim=True)
        slopes: Tensor = (centered * predicted).sum(-1) / centered.square().sum(-1)
        return slopes


@experiment("entropy-identity", seconds={"simulation": 8, "model": 42})
def entropy_identity(case: TrialCase) -> Finding:
    """The identity of the forward equation in simulation; on a model, its first order against the exact change of
    entropy of every MLP half-step.
    """
    return _simulated(case) if case.subject.is_simulation else _of_model(case)


def _simulated(case: TrialCase) -> Finding:
    """dH/dt = -int d_t rho log rho against E[div b] + E[Sigma |grad log rho|^2], on the circle, where d_t rho is that
    of the divergence form, of Ito noise or of Stratonovich noise with the same b and Sigma.

    log rho, b and log Sigma are random sums of harmonics. The terms of the identity come from their derivatives in
    closed form, d_t rho from the solver of the forward equation. For Ito noise the identity lacks -E[Sigma''], for
    Stratonovich noise half of it. The slope is that of predicted on exact rates over groups of 32 cases.
    """
    grid = CircleGrid(degree=DEGREE)
    least = -(-case.constant("inputs") // GROUP)  # groups that hold as many cases as an identity needs
    settings = random_settings(case, GROUP * case.count(2 * least, quick=least))
    rates = {name: entropy_rates(settings, grid, process) for name, process in PROCESSES.items()}
    cases = f"groups of {GROUP} cases"
    return Finding(
        evidence={
            "slope": Replicates(rates["divergence form"].slopes, cases),
            "identity": IdentityErrors(rates["divergence form"].errors, "relative error"),
        },
        controls={
            "Ito form": IdentityErrors(rates["Ito"].errors, "relative error"),
            "Stratonovich form": IdentityErrors(rates["Stratonovich"].errors, "relative error"),
        },
        described={f"slope, {name} noise": Replicates(rates[name].slopes, cases) for name in ("Ito", "Stratonovich")},
        data=curve(
            "error",
            torch.stack([each.errors for each in rates.values()], -1),
            {"form": tuple(PROCESSES)},
            label="relative error of the identity",
            log=True,
        ),
        remark="Median relative errors: "
        + ", ".join(f"{float(each.errors.median()):.2g} ({name})" for name, each in rates.items()) + ".",
        setting=f"simulation: densities, drifts and Sigma on the circle, {HARMONICS} random harmonics each; d_t rho by "
        f"the forward equation with degree {DEGREE}",
    )  # fmt: skip


def random_settings(case: TrialCase, count: int) -> Settings:
    """Random harmonics for every case."""
    log_density, drift, log_sigma = (random_harmonics(case, count, HARMONICS, index=k) for k in range(3))
    return Settings(SPREAD * log_density, drift, SPREAD * log_sigma)


def entropy_rates(settings: Settings, grid: CircleGrid, process: Process) -> Rates:
    """The rates of every case; d_t rho is that of the forward equation, the two terms come from closed forms."""
    log_density, drift, log_sigma = settings
    points = grid.points
    density, sigma = harmonic_sum(log_density, points).exp(), harmonic_sum(log_sigma, points).exp()
    density = density / grid.mean_of(density)[:, None]
    velocity = harmonic_sum(drift, points)
    x = points.expand(len(density), *points.shape)[..., None, :]  # every point is a system with one token
    noise = StateNoise(
        lambda y: (2 * harmonic_sum(log_sigma, y[..., 0, :]).exp()).sqrt()[..., None, None, None] * IDENTITY
    )
    correction = grid.components((process.drift(noise, x) - DivergenceForm().drift(noise, x))[..., 0, :])
    exact = []
    for k, values in enumerate(density):
        equation = ForwardEquation(grid, GivenDrift(velocity[k][:, None]), 0.0, correction[k], sigma[k][:, None, None])
        change = grid.synthesize(equation.rate(grid.analyze(values), 0.0))
        exact.append(-grid.mean_of(change * values.log()))
    score = harmonic_sum(derivative(log_density), points)
    divergence = grid.mean_of(density * harmonic_sum(derivative(drift), points))
    return Rates(torch.stack(exact), divergence, grid.mean_of(density * sigma * score.square()))


def _of_model(case: TrialCase) -> Finding:
    """E div_S b, b = P f / r, against E log |det D_S T| over the MLP half-steps of a model, T(x) = N(r x + f(x)) at the
    recorded radius r of each token, or N(z + f(x)) after the norm of a post-norm block: the least-squares slope over
    the half-steps, one per prompt, from the same sampled tokens of it.
    """
    prompts = prompts_or_finding(case, "trajectory", "force", mlp=True, gap=1)
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    refused = entropy_change_unsupported(recording) or _too_few_layers(recording)
    if refused is not None:
        return Finding.impossible(refused)
    if not _writes(recording):
        return Finding.impossible(NO_CHANGE)
    measured = mlp_entropy_change(recording, sampled_tokens=case.constant("tokens"))
    if bool((measured.singular_count > 0).any()):
        return Finding.impossible(f"the map of an MLP half-step is singular ({measured.attrs['singular_maps']})")
    # over (prompt, layer)
    exact, predicted = (measured[name].values.T for name in ("entropy_change", "first_order_entropy_change"))
    drawn = np.random.default_rng(case.seed_for(0))
    permuted = np.stack([drawn.permutation(row) for row in predicted])
    silent: Evidence = PremiseImpossible(NO_CHANGE)
    if _writes(quiet := silenced(recording)):
        again = mlp_entropy_change(quiet, sampled_tokens=case.constant("tokens"))
        silent = Replicates(slopes(again.first_order_entropy_change.values.T, again.entropy_change.values.T), "prompts")
    each = {"exact": exact, "predicted": predicted}
    return Finding(
        undecided_because=prompts.alike,
        evidence={"slope": Replicates(slopes(predicted, exact), "prompts")},
        controls={
            "divergences of other layers": Replicates(slopes(permuted, exact), "prompts"),
            "blocks that write nothing": silent,
        },
        described={
            **{f"{name} change of entropy, sum over layers": Replicates(each[name].sum(1), "prompts") for name in each},
            "slope without the first layer": Replicates(slopes(predicted[:, 1:], exact[:, 1:]), "prompts"),
            "slope over tokens, mean over layers": Replicates(_token_slopes(measured), "prompts"),
        },
        data=curve(
            "entropy_change",
            np.stack(list(each.values()), -1),
            {"layer": list(recording.layers), "change": ["E log |det D_S T|, exact", "E div b, first order"]},
            label="change of entropy over the MLP half-step (nats)",
            over="prompt",
        ),
        remark=_remark(exact, predicted, small_steps_premise(case)),
        setting=f"{measured.attrs['sphere']}, at the {measured.attrs['radius']}: {len(prompts)} prompts, "
        f"{case.constant('tokens')} tokens of each, {exact.shape[1]} MLP half-steps",
        attachments=(Attachment(f"Certificate of {case.subject.name}", str(recording.certificate)),),
    )


def slopes(predicted: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The least-squares slope of predicted on exact changes along the last axis."""
    centered = exact - exact.mean(-1, keepdims=True)
    return np.asarray((centered * predicted).sum(-1) / np.square(centered).sum(-1))


def _token_slopes(measured: xr.Dataset) -> np.ndarray:
    """The slope over the sampled tokens of each prompt, the mean over layers."""
    exact, predicted = (measured[f"token_{name}"].values for name in ("entropy_change", "first_order_entropy_change"))
    kept = np.isfinite(exact)
    center = np.where(kept, exact, 0.0).sum(-1, keepdims=True) / kept.sum(-1, keepdims=True)
    moved = np.where(kept, exact - center, 0.0)
    found = (moved * np.where(kept, predicted, 0.0)).sum(-1) / np.square(moved).sum(-1)
    return np.asarray(found.mean(0))


def _writes(recording: Recording) -> bool:
    return bool((recording.replay(WrittenByMlp())["written_by_mlp"].largest > 0).any())


def _too_few_layers(recording: Recording) -> str | None:
    count = len(recording.layers)
    return (
        None if count >= MIN_LAYERS else f"the claim needs at least {MIN_LAYERS} MLP half-steps, but there are {count}"
    )


def _remark(exact: np.ndarray, predicted: np.ndarray, premise: str) -> str:
    first, second = exact.mean(0), predicted.mean(0)
    worst = int(np.abs(first - second).argmax())
    return (
        f"The exact change of a half-step runs from {first.min():.3g} to {first.max():.3g} nats, its first order from "
        f"{second.min():.3g} to {second.max():.3g}; they differ most in layer {worst}, {first[worst]:.3g} against "
        f"{second[worst]:.3g}. {premise}"
    ).strip()
