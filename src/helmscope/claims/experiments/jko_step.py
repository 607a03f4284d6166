"""jko-step: does a block of attention and MLP with noise do what one minimizing-movement step with T_# does? On a
model, does a layer map the law of its tokens to the minimizer?
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from helmscope.claims.attention_trials import AttentionTrial
from helmscope.claims.circle_functions import circle_w2, harmonic_sum, quantile_angles, random_harmonics
from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced, small_steps_premise
from helmscope.fields.activations import Tanh
from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.helmholtz import helmholtz
from helmscope.fields.mlp import MLP
from helmscope.fields.noise import IsotropicNoise
from helmscope.geometry.sphere import retract
from helmscope.meanfield.circle_grid import CircleGrid
from helmscope.meanfield.density import Density
from helmscope.meanfield.evolve import evolve
from helmscope.meanfield.gaussian import Gaussian
from helmscope.meanfield.jko import jko_step as minimizing_step
from helmscope.meanfield.jko_gaussian import gaussian_jko_step
from helmscope.observe.jko_step_test import LayerSteps, jko_unsupported
from helmscope.observe.pairs import without_first_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.observe.quadratic_free_energy import QuadraticFreeEnergy

DEGREE, TOKENS, NEURONS, TOLERANCE = 48, 512, 4, 1e-7
SPREAD = 0.5  # size of the coefficients of log rho
HARMONICS = 2
DIM = 3  # of the Gaussian laws
SOFTEST, STIFFEST = 0.5, 3.0  # eigenvalues of their Hess V


class Layer(NamedTuple):
    """A block on the circle, its attention and MLP, and the logarithm of a start, up to a constant."""

    block: Block
    log_start: Tensor

    @property
    def mlp(self) -> MLP:
        """The MLP, whose force is the gradient of its potential U."""
        assert isinstance(self.block.mlp, MLP)
        return self.block.mlp


@experiment("jko-step", seconds={"simulation": 8, "model": 80})
def jko_step(case: TrialCase) -> Finding:
    """In simulation, random blocks with noise on the circle; on a model, the law of the tokens at every layer."""
    return _simulated(case) if case.subject.is_simulation else _on_model(case)


def _simulated(case: TrialCase) -> Finding:
    """A block of self-attention and an MLP whose force is grad U, with noise nu, against the minimizer of
    nu Ent + int V + W2^2(., T_# rho) / (2 tau), V = -U, with T the flow of the attention for the time tau.

    The law is a density on the circle. The layer is the discrete block with steps of size tau, run on 512 tokens at
    the quantiles of the law after the noise; the flow is that of the block with noise for the time tau, by ``evolve``.
    U is that of the exact split of the MLP. The nulls are the minimizers for -U and for the U of another block;
    described are those without T, and with attention counted twice. The fixed point of a step between Gaussians is
    N(0, nu K^-1) in closed form.
    """
    nu, taus = case.constant("nu"), case.constant("taus")
    layers = random_layers(case, case.count(64, quick=32))
    others = layers[1:] + layers[:1]
    names = [f"{kind}, tau = {tau:g}" for tau in taus for kind in KINDS]
    shares = {name: torch.empty(len(layers), len(names), dtype=torch.float64) for name in MINIMIZERS}
    for i, (layer, other) in enumerate(zip(layers, others, strict=True)):
        found = [closed_gate_shares(layer, other, tau, nu) for tau in taus]
        for name in MINIMIZERS:
            shares[name][i] = torch.tensor([share for each in found for share in each[name]])
    columns = {name: ReplicatesInEveryCase(list(each.T), "starts", names) for name, each in shares.items()}
    table = torch.stack([shares[name].reshape(len(layers), len(taus), len(KINDS)) for name in MINIMIZERS], 1)
    missed = [f"{1 - float(each.mean()):.2g} ({name})" for each, name in zip(shares[RIGHT].T, names, strict=True)]
    return Finding(
        evidence={"share of the gap closed": columns[RIGHT]},
        controls={
            "potential of the opposite sign": columns["-U"],
            "potential of another block": columns["U of another block"],
            "fixed point": IdentityErrors(fixed_point_errors(case, taus[-1], nu), "relative error"),
        },
        described={
            f"share of the gap closed, minimizer {label}, {names[0]}": Replicates(shares[name][:, 0], "starts")
            for name, label in (("without T", "without T"), ("attention twice", "with attention counted twice"))
        },
        data=curve(
            "share",
            table.permute(0, 2, 1, 3)[..., 0],
            {"tau": taus, "minimizer": tuple(MINIMIZERS)},
            label="share of the gap to the minimizer that a layer closes",
        ),
        remark=f"Of the gap {', '.join(missed)} is left: a step is consistent with the layer to first order in tau.",
        setting=f"simulation: densities on the circle, blocks of SA (beta = {case.constant('beta'):g}) and {NEURONS} "
        f"random neurons, noise nu = {nu:g}, {len(layers)} random blocks and starts",
    )


def _on_model(case: TrialCase) -> Finding:
    """1 - W2(output, minimizer) / W2(input, minimizer) between Gaussian laws of all tokens before and after a layer, on
    the half of the prompts on which nothing was fitted; one pseudo-value for each prompt of a jackknife of both halves
    (``observe.jko_step_test``).

    Controls take the potential of the next layer, with a tau of its own, and the states of a model whose blocks write
    nothing. Described: the shares in the leading principal axes and of the MLP half-step alone, with attention as the
    map T and nu = 0, and untrained twins.
    """
    trial = AttentionTrial.of(case)
    if trial.without_ruling is not None:
        return trial.without_ruling
    refused = jko_unsupported(trial.recording)
    if refused is not None:
        return Finding.impossible(refused)
    steps = LayerSteps.of(trial.recording, seed=case.seed)
    components = case.constant("components")
    found = steps.measurement([steps.measured(layer, principal_axes=components) for layer in steps.layers])
    evidence = _every(list(found.gap_closed_share.values), steps.layers)
    if isinstance(evidence, PremiseImpossible):
        return Finding.impossible(evidence.reason)
    others = _exchanged(steps.energies, steps.layers)
    silent = replace(steps, path=without_first_token(silenced(trial.recording).on_sphere))
    means = found.gap_closed_share.mean("prompt").values
    least, most = int(np.nanargmin(means)), int(np.nanargmax(means))
    lowest = {name: row for name in SHARES if (row := _least(found[name].values)) is not None}
    return Finding(
        undecided_because=trial.chosen.alike,
        evidence={"share of the gap closed": evidence},
        controls={
            "potential of another layer": _every(_shares(steps, others), steps.layers),
            "blocks that write nothing": _every(_shares(silent, steps.energies), steps.layers),
        },
        described={f"{SHARES[name]}, least over layers": Replicates(values, "prompts")
                   for name, values in lowest.items()}
        | {"share of the gap closed by untrained twins, mean over layers": _twins(case, trial)},
        data=curve(
            "share",
            found.gap_closed_share.values.T,
            {"layer": steps.layers},
            label="share of the gap to the minimizer that a layer closes (pseudo-values)",
            over="prompt",
        ),
        remark=f"The share runs from {means[least]:.3g} (layer {steps.layers[least]}) to "
        f"{means[most]:.3g} (layer {steps.layers[most]}), with tau from {float(found.tau.min()):.2g} to "
        f"{float(found.tau.max()):.2g} layers; of the fall of the objective from input to minimizer the output has "
        f"{_fallen(found)}. {small_steps_premise(case)}",
        setting=f"{trial.setting}; Gaussian laws of all tokens but the first of each prompt, fitted on "
        f"{len(steps.selection)} prompts and tested on {len(steps.test)}",
    )  # fmt: skip


SHARES = {
    "gap_closed_share_projected": "share of the gap closed in leading principal axes",
    "gap_closed_share_mlp": "share of the gap closed by the MLP half-step with nu = 0",
}


def _every(rows: list[np.ndarray], layers: list[int]) -> Evidence:
    """The shares of all layers that have a gap, or that there are none."""
    usable = [k for k, row in enumerate(rows) if np.isfinite(row).all()]
    if not usable:
        return PremiseImpossible("no layer has a minimizer other than its input")
    return ReplicatesInEveryCase([rows[k] for k in usable], "prompts", [f"layer {layers[k]}" for k in usable])


def _least(rows: np.ndarray) -> np.ndarray | None:
    """The row of the layer with the smallest mean among those that have a gap; None if there are none."""
    usable = rows[np.isfinite(rows).all(-1)]
    return usable[usable.mean(-1).argmin()] if len(usable) else None


def _shares(steps: LayerSteps, energies: Mapping[int, QuadraticFreeEnergy]) -> list[np.ndarray]:
    """The pseudo-values of the share of every layer, for given energies."""
    found = []
    for layer in steps.layers:
        step = steps.fitted(layer, energy=energies[layer])
        found.append(steps.shares(layer, step, energies[layer]))
    return found


def _exchanged(energies: Mapping[int, QuadraticFreeEnergy], layers: list[int]) -> dict[int, QuadraticFreeEnergy]:
    """The energy of each layer with the potential of the next one; the last has that of the first."""
    following = dict(zip(layers, [*layers[1:], layers[0]], strict=True))
    return {layer: energies[following[layer]].with_noise_of(energies[layer]) for layer in layers}


def _fallen(found: xr.Dataset) -> str:
    """The least and the largest share, over the layers, of the fall of the objective that the output has."""
    start, end, least = (found[f"objective_{name}"].mean("prompt") for name in ("input", "output", "minimizer"))
    shares = ((start - end) / (start - least)).values
    return f"{np.nanmin(shares):.2g} to {np.nanmax(shares):.2g}"


def _twins(case: TrialCase, trial: AttentionTrial) -> Evidence:
    """The share of untrained twins at three layers, without a jackknife: one value per twin."""
    rows = [list(row) for row in trial.few.batch.visible_ids]
    values = []
    for twin in case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=rows):
        steps = LayerSteps.of(twin, seed=case.seed)
        some = steps.layers[:: max(1, len(steps.layers) // 3)]
        values.append(np.mean([steps.share(layer, steps.fitted(layer)) for layer in some]))
    return Replicates(np.array(values), "twins")


KINDS = ("layer", "flow")
RIGHT = "U"
MINIMIZERS = (RIGHT, "-U", "U of another block", "without T", "attention twice")


def random_layers(case: TrialCase, count: int) -> list[Layer]:
    """Blocks with random neurons, f = sum_j v_j tanh(<v_j, x> + c_j) with |v_j| = 1, and random starts."""
    attention = SA(beta=case.constant("beta"))
    starts = SPREAD * random_harmonics(case, count, HARMONICS, index=0)
    neurons, biases = retract(case.normal(count, NEURONS, 2, index=1)), case.normal(count, NEURONS, index=2)
    mlps = [MLP(w_in=v, w_out=v.mT, b_in=c, activation=Tanh()) for v, c in zip(neurons, biases, strict=True)]
    return [Layer(Block(attention, mlp), start) for mlp, start in zip(mlps, starts, strict=True)]


def closed_gate_shares(layer: Layer, other: Layer, tau: float, nu: float) -> dict[str, list[float]]:
    """1 - W2(output, minimizer) / W2(input, minimizer), of the layer and of the flow, for every minimizer."""
    grid, noise = CircleGrid(degree=DEGREE), IsotropicNoise(nu)
    start = Density.from_function(grid, lambda x: harmonic_sum(layer.log_start, x).exp(), normalize=True)
    spread = evolve(None, start, times=[tau], noise=noise)[0]
    outputs = {
        "layer": run_layer(layer.block, quantile_angles(spread, TOKENS), tau),
        "flow": quantile_angles(evolve(layer.block, start, times=[tau], noise=noise, tol=TOLERANCE)[0], TOKENS),
    }
    before, shares = quantile_angles(start, TOKENS), {}
    for name, density in minimizers(layer, other, start, tau, nu).items():
        target = quantile_angles(density, TOKENS)
        gap = circle_w2(before, target)
        shares[name] = [1 - circle_w2(outputs[kind], target) / gap for kind in KINDS]
    return shares


def run_layer(block: Block, angles: Tensor, tau: float) -> Tensor:
    """The angles of tokens after one discrete layer with steps of size tau."""
    before = torch.stack([angles.cos(), angles.sin()], -1)
    after = block.layer(before, tau)
    cosine, sine = (before * after).sum(-1), before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0]
    return angles + torch.atan2(sine, cosine)


def minimizers(layer: Layer, other: Layer, start: Density, tau: float, nu: float) -> dict[str, Density]:
    """The density after a minimizing step, for the right and for the wrong energies and transports."""
    attention = layer.block.attention
    moved, twice = evolve(attention, start, times=[tau, 2 * tau], tol=TOLERANCE)
    own, foreign = helmholtz(layer.mlp), helmholtz(other.mlp)
    problems = {
        RIGHT: (lambda x: -own.potential(x), moved),
        "-U": (own.potential, moved),
        "U of another block": (lambda x: -foreign.potential(x), moved),
        "without T": (lambda x: -own.potential(x), start),
        "attention twice": (lambda x: -own.potential(x), twice),
    }
    return {
        name: minimizing_step(start, energy, noise=nu, tau=tau, transported=moved_to).density
        for name, (energy, moved_to) in problems.items()
    }


def fixed_point_errors(case: TrialCase, tau: float, nu: float) -> list[float]:
    """How far a step moves the covariance nu K^-1 of a Gaussian, relative to it, for random K."""
    sample = case.normal(case.constant("inputs"), DIM, DIM + 1, index=3)
    axes = torch.linalg.qr(sample[..., :DIM]).Q
    values = SOFTEST + (STIFFEST - SOFTEST) * torch.special.ndtr(sample[..., DIM])
    return [fixed_point_error((q * k) @ q.mT, (q / k) @ q.mT, tau, nu) for q, k in zip(axes, values, strict=True)]


def fixed_point_error(stiffness: Tensor, inverse: Tensor, tau: float, nu: float) -> float:
    """How far a step with this stiffness moves nu K^-1, relative to it."""
    rest = Gaussian(torch.zeros(len(inverse), dtype=inverse.dtype), nu * (inverse + inverse.mT) / 2)
    step = gaussian_jko_step(rest, stiffness=(stiffness + stiffness.mT) / 2, nu=nu, tau=tau)
    return float((step.gaussian.covariance - rest.covariance).norm() / rest.covariance.norm())
