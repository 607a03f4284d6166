"""Synthetic laws with known answers for the measurements of the MLP and of depth; see ``calibration_laws``."""

from __future__ import annotations

import math

import numpy as np
import torch
import xarray as xr
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.fields.activations import Identity, ReLU
from helmscope.fields.mlp import MLP
from helmscope.models.record import record
from helmscope.observe.arcs import arc_length
from helmscope.observe.depth_steps import depth_steps
from helmscope.observe.mlp_force import mlp_force
from helmscope.observe.mlp_jacobian import mlp_jacobian
from helmscope.observe.mlp_swirl_bound import mlp_swirl_bound
from helmscope.observe.mlp_weights import gate_sparsity, mlp_weights
from helmscope.observe.perturbation_growth import perturbation_growth
from helmscope.observe.transport_ratio import transport_ratio
from helmscope.solve.layer import Layer
from helmscope.types import Trajectory
from support.calibration_laws import F64, Law, Values, normals, picked, uniform

LINEAR = torch.tensor([[1.0, 2.0, 0.0], [-0.5, 1.0, 0.5], [0.0, 0.0, -0.5]], dtype=F64)
FORCE = MLP(w_in=torch.eye(3, dtype=F64), w_out=LINEAR, activation=Identity())


def share_of(matrix: np.ndarray) -> float:
    """|A|^2 / |J|^2 of a matrix."""
    return float(np.square(matrix - matrix.T).sum() / 4 / np.square(matrix).sum())


def draw_swirl(size: int, count: int, generator: torch.Generator) -> Values:
    run = hs.integrate(FORCE, uniform(generator, count, size, 3), times=[0.0])
    return picked(mlp_force(run), "swirl_fraction_as_printed_unit_sphere", "radial_force")


def swirl_truths(size: int) -> dict[str, float]:
    """Neurons read the axes, so that R is the part of M off its diagonal; E <x, M x> = tr M / d."""
    off = LINEAR - torch.diag(LINEAR.diagonal())
    share = float(off.square().sum() / LINEAR.square().sum())
    return {"swirl_fraction_as_printed_unit_sphere": share, "radial_force": float(LINEAR.trace()) / 3}


AXES = torch.tensor([3.0, 1.0], dtype=F64)  # of N(0, diag(9, 1)), whose directions have E x x^T = diag(3, 1) / 4
PLANE = LINEAR[:2, :2].contiguous()


def draw_weighted(size: int, count: int, generator: torch.Generator) -> Values:
    x = hs.sphere.retract(normals(generator, count, size, 2) * AXES)
    force = MLP(w_in=torch.eye(2, dtype=F64), w_out=PLANE, activation=Identity())
    return picked(mlp_jacobian(hs.integrate(force, x, times=[0.0])), "antisymmetric_share_weighted", "weighted_trace")


def weighted_truths(size: int) -> dict[str, float]:
    covariance = np.diag((AXES / AXES.sum()).numpy())
    root = np.sqrt(covariance)
    return {
        "antisymmetric_share_weighted": share_of(root @ PLANE.numpy() @ root),
        "weighted_trace": float(np.trace(PLANE.numpy() @ covariance)),
    }


def draw_projection(size: int, count: int, generator: torch.Generator) -> Values:
    run = hs.integrate(FORCE, uniform(generator, count, size, 3), times=[0.0])
    return picked(mlp_swirl_bound(run, progress=False), "swirl_share_bound", "swirl_share_bound_quadratic")


def projection_truths(size: int) -> dict[str, float]:
    """A x is tangential and free of divergence: no gradient explains any of it."""
    return dict.fromkeys(("swirl_share_bound", "swirl_share_bound_quadratic"), share_of(LINEAR.numpy()))


READ = 6


def draw_weights(size: int, count: int, generator: torch.Generator) -> Values:
    x = torch.eye(READ, dtype=F64)[None]
    rows = []
    for _ in range(count):
        force = MLP(w_in=normals(generator, size, READ), w_out=normals(generator, READ, size))
        rows.append(mlp_weights(hs.integrate(force, x, times=[0.0]), permutations=4))
    names = {name: name for name in ("coherence_mean", "neuron_alignment_mean", "neuron_alignment_absolute")}
    names["neuron_alignment_permuted"] = "neuron_alignment_absolute_null"
    return {key: xr.DataArray([row[name].item() for row in rows], dims="prompt") for key, name in names.items()}


def weights_truths(size: int) -> dict[str, float]:
    """The mean |cos| of independent directions in R^d is Gamma(d/2) / (sqrt(pi) Gamma((d + 1)/2))."""
    mean = math.gamma(READ / 2) / math.sqrt(math.pi) / math.gamma((READ + 1) / 2)
    return dict.fromkeys(("coherence_mean", "neuron_alignment_absolute", "neuron_alignment_permuted"), mean) | {
        "neuron_alignment_mean": 0.0
    }


def draw_gates(size: int, count: int, generator: torch.Generator) -> Values:
    force = MLP(
        w_in=torch.eye(3, dtype=F64), w_out=LINEAR, b_in=torch.tensor([0.0, 0.5, -0.9], dtype=F64), activation=ReLU()
    )
    return picked(
        gate_sparsity(hs.integrate(force, uniform(generator, count, size, 3), times=[0.0])),
        "gate_sparsity",
        "silent_share",
    )


def gate_truths(size: int) -> dict[str, float]:
    """A coordinate of a uniform token on S^2 is uniform: shares 1/2, 1/4 and 0.95, and no neuron is always off."""
    return {"gate_sparsity": (0.5 + 0.25 + 0.95) / 3, "silent_share": 0.0}


STEP = stats.gamma(2, scale=0.1)  # law of the angle of a step


def _walk(size: int, count: int, generator: torch.Generator) -> Trajectory:
    """Three states: each token turns by a random angle in an independent uniform direction, twice."""
    x = [uniform(generator, count, size, 3)]
    for _ in range(2):
        angles = 0.1 * -torch.rand(count, size, 2, generator=generator, dtype=F64).log().sum(-1, keepdim=True)
        w = hs.sphere.project(x[-1], normals(generator, count, size, 3))
        x.append(x[-1] * angles.cos() + w / w.norm(dim=-1, keepdim=True) * angles.sin())
    growth = 0.1 + normals(generator, 2, count, size)
    radius = torch.exp(torch.cat([torch.zeros_like(growth[:1]), growth.cumsum(0)]))
    return Trajectory(torch.arange(3, dtype=F64), torch.stack(x), radius=radius)


def draw_steps(size: int, count: int, generator: torch.Generator) -> Values:
    measured = depth_steps(_walk(size, count, generator), include_first_token=True, progress=False).isel(time=2)
    return picked(measured, "angle", "median_angle", "update_cosine", "radius_growth")


def steps_truths(size: int) -> dict[str, float]:
    return {"angle": STEP.mean(), "median_angle": STEP.median(), "update_cosine": 0.0, "radius_growth": 0.1}


def draw_arcs(size: int, count: int, generator: torch.Generator) -> Values:
    return picked(arc_length(_walk(size, count, generator), include_first_token=True).isel(time=2), "arc_length")


TURN, SHIFT = math.pi / 2, 1.5


def draw_transport(size: int, count: int, generator: torch.Generator) -> Values:
    """Normal tokens of R^2, turned about their mean and moved: the Euclidean ratio of states with radius."""
    y = normals(generator, count, size, 2)
    turn = torch.tensor([[math.cos(TURN), -math.sin(TURN)], [math.sin(TURN), math.cos(TURN)]], dtype=F64)
    states = torch.stack([y, y @ turn.T + torch.tensor([SHIFT, 0.0], dtype=F64)])
    radius = states.norm(dim=-1)
    path = Trajectory(torch.arange(2, dtype=F64), states / radius.unsqueeze(-1), radius=radius)
    return picked(transport_ratio(path, include_first_token=True, progress=False).isel(time=1), "euclidean_ratio")


def transport_truths(size: int) -> dict[str, float]:
    """W2 of two normal laws of covariance I is their shift; the turn costs E |(O - I) y|^2 = 2 (2 - 2 cos)."""
    return {"euclidean_ratio": SHIFT**2 / (SHIFT**2 + 2 * (2 - 2 * math.cos(TURN)))}


STRETCH = (1.5, 0.75)


def draw_flow(size: int, count: int, generator: torch.Generator) -> Values:
    """A fixed point of the layer x -> N(M x), M = diag(1, 1.5, 0.75), whose derivative is diag(1.5, 0.75)^depth."""
    matrix = torch.diag(torch.tensor([1.0, *STRETCH], dtype=F64))
    start = torch.eye(3, dtype=F64)[:1].expand(count, 2, 3)
    run = hs.integrate(lambda x: x @ matrix - x, start, times=list(range(size + 1)), stepper=Layer(1.0))
    seed = int(torch.randint(2**31, (1,), generator=generator))
    measured = perturbation_growth(run, directions=1, seed=seed, progress=False)
    last = measured.isel(time=-1)
    return (
        picked(measured, "lyapunov_exponent")
        | picked(last, "stretch")
        | picked(last.assign(square=last.stretch**2), "square")
    )


def flow_truths(size: int) -> dict[str, float]:
    square = sum(each ** (2 * size) for each in STRETCH) / 2
    return {"lyapunov_exponent": math.log(STRETCH[0]), "square": square, "stretch": math.sqrt(square)}


EIGENVALUES = (1.0, 0.6, 0.3, -0.2, -0.4)
INVERSE_RADII = torch.linspace(0.5, 1.5, 64, dtype=F64)  # of the embeddings of the words


def linear_model() -> GPT2LMHeadModel:
    """A GPT-2 without attention whose MLP is linear on the mean-free space, with words that it does not move."""
    dim = len(EIGENVALUES) + 3
    config = GPT2Config(
        vocab_size=len(INVERSE_RADII), n_positions=8, n_embd=dim, n_head=1, n_layer=1, n_inner=dim,
        activation_function="linear",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval().double()
    basis = torch.linalg.qr(torch.cat([torch.ones(dim, 1, dtype=F64), torch.eye(dim, dtype=F64)[:, 1:]], 1))[0][:, 1:]
    values = torch.tensor([0.0, *EIGENVALUES, 0.0], dtype=F64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(basis[:, 0] / INVERSE_RADII[:, None])
        model.transformer.ln_f.weight.fill_(1)
        model.lm_head.weight.copy_(normals(torch.Generator().manual_seed(0), len(INVERSE_RADII), dim))
        block = model.transformer.h[0]
        block.ln_1.weight.fill_(1)
        block.ln_2.weight.fill_(1)
        block.mlp.c_fc.weight.copy_(basis @ torch.diag(values) @ basis.T / math.sqrt(dim))
        block.mlp.c_proj.weight.copy_(torch.eye(dim))
    return model


def draw_singular(size: int, count: int, generator: torch.Generator) -> Values:
    ids = torch.randint(len(INVERSE_RADII), (count, 1), generator=generator).expand(count, 2)
    recording = record(linear_model(), ids, batch_size=count)
    seed = int(torch.randint(2**31, (1,), generator=generator))
    measured = perturbation_growth(recording, directions=2, iterations=size, seed=seed, progress=False)
    return picked(measured.isel(direction=0), "singular_value")


def singular_truths(size: int) -> dict[str, float]:
    """At a fixed point y the derivative is I + M / |y|; words of different length are equally likely."""
    return {"singular_value": 1 + max(EIGENVALUES) * float(INVERSE_RADII.mean())}


LINEAR_FORCE = "f = M x, uniform tokens on S^2"
MLP_LAWS = (
    Law("mlp_force", LINEAR_FORCE, "tokens", (4, 16), draw_swirl, swirl_truths),
    Law(
        "mlp_jacobian",
        "f = M x, directions of N(0, diag(9, 1)) in R^2",
        "tokens",
        (8, 32),
        draw_weighted,
        weighted_truths,
        others=100,
    ),
    Law(
        "mlp_swirl_bound",
        LINEAR_FORCE,
        "tokens",
        (8, 32),
        draw_projection,
        projection_truths,
        others=100,
        together=True,
    ),
    Law(
        "mlp_weights",
        "independent normal rows and columns in R^6",
        "neurons",
        (8, 32),
        draw_weights,
        weights_truths,
        repetitions=400,
        others=50,
    ),
    Law("gate_sparsity", "coordinates of uniform tokens on S^2", "tokens", (8, 32), draw_gates, gate_truths),
)
DEPTH_LAWS = (
    Law(
        "depth_steps",
        "angles of Gamma(2, 0.1) in independent directions, growth of log radius of N(0.1, 1)",
        "tokens",
        (8, 32),
        draw_steps,
        steps_truths,
    ),
    Law(
        "arc_length",
        "angles of Gamma(2, 0.1), two steps",
        "tokens",
        (8, 32),
        draw_arcs,
        lambda size: {"arc_length": 2 * STEP.mean()},
    ),
    Law(
        "transport_ratio",
        "N(0, I) in R^2, turned by a right angle and moved by 1.5",
        "tokens",
        (8, 32, 128),
        draw_transport,
        transport_truths,
        others=25,
    ),
    Law(
        "perturbation_growth",
        "a fixed point with the derivative diag(1.5, 0.75) per layer",
        "layers",
        (1, 4, 16),
        draw_flow,
        flow_truths,
    ),
    Law(
        "perturbation_growth",
        "a linear GPT-2 at fixed points y, singular values 1 + 1/|y|, 1 + 0.6/|y|, ...",
        "iterations",
        (1, 2, 4),
        draw_singular,
        singular_truths,
    ),
)
