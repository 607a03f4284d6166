"""Synthetic laws with known answers, on which docs/calibration.py calibrates the measurements of attention and of
contexts; those of the MLP and of depth are in ``calibration_depth_laws``.

A law draws independent prompts of a given size (tokens, contexts, ...) and measures each by the library's public
functions. ``truths`` has the population value of every quantity: the limit of large samples, or what the estimator is
meant to estimate, in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xarray as xr
from transformers import GPT2Config, GPT2LMHeadModel

import helmscope as hs
from helmscope.fields.attention import SA
from helmscope.models.record import record
from helmscope.observe.attention_diffusion import attention_diffusion, attention_diffusion_spectrum
from helmscope.observe.attention_drift import attention_drift
from helmscope.observe.attention_surface_divergence import attention_surface_divergence
from helmscope.observe.context_group import ContextGroup
from helmscope.observe.context_noise import context_group_noise
from helmscope.observe.effective_beta import effective_beta

F64 = torch.float64
PROMPTS = 32
Values = dict[str, xr.DataArray]


@dataclass(frozen=True, eq=False)
class Law:
    """One synthetic law: ``draw(size, count, generator)`` measures ``count`` independent prompts of a size, and has one
    value per prompt of every quantity. There are ``repetitions`` intervals of 32 prompts at the first size, and
    ``others`` (as many, if None) at the others.

    ``together`` means that the prompts of one interval depend on each other, so that they are drawn 32 at a time.
    """

    measurement: str
    text: str
    unit: str
    sizes: tuple[int, ...]
    draw: Callable[[int, int, torch.Generator], Values]
    truths: Callable[[int], Mapping[str, float]]
    repetitions: int = 1000
    others: int | None = None
    together: bool = False


def normals(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=F64)


def uniform(generator: torch.Generator, count: int, tokens: int, dim: int) -> torch.Tensor:
    """Independent uniform tokens on the sphere."""
    return hs.sphere.retract(normals(generator, count, tokens, dim))


def picked(measured: xr.Dataset, *names: str) -> Values:
    """Some quantities as vectors over prompts, with their attributes, on which the scale of an interval depends."""
    return {
        name: xr.DataArray(measured[name].values.ravel(), dims="prompt", attrs=measured[name].attrs) for name in names
    }


DIM = 4


def _cloud(size: int, count: int, generator: torch.Generator) -> hs.Simulation:
    return hs.integrate(SA(beta=0.0), uniform(generator, count, size, DIM), times=[0.0])


def draw_noise(size: int, count: int, generator: torch.Generator) -> Values:
    return picked(
        attention_diffusion(_cloud(size, count, generator)),
        "nu_token_sampling",
        "nu_random_values",
        "total_nu_as_printed",
    )


def noise_truths(size: int) -> dict[str, float]:
    """Cov(v) = I / d: half of it when one key is drawn, half of Cov / n for the mean of n random values."""
    return {
        "nu_token_sampling": 1 / (2 * DIM),
        "nu_random_values": 1 / (2 * DIM * size),
        "total_nu_as_printed": 1 / (2 * DIM),
    }


def draw_spectrum(size: int, count: int, generator: torch.Generator) -> Values:
    names = ("total_anisotropy", "effective_dimension_share", "smallest_eigenvalue")
    measured = attention_diffusion_spectrum(_cloud(size, count, generator), sampled_tokens=1)
    largest = measured.isel(eigenvalue=0)
    return picked(measured, *names) | picked(largest, "eigenvalue_share")


def spectrum_truths(size: int) -> dict[str, float]:
    """T Cov T is isotropic on d - 1 dimensions."""
    return {
        "total_anisotropy": 1 / (DIM - 1),
        "effective_dimension_share": 1.0,
        "smallest_eigenvalue": 1.0,
        "eigenvalue_share": 1 / (DIM - 1),
    }


def draw_drift(size: int, count: int, generator: torch.Generator) -> Values:
    return picked(attention_drift(_cloud(size, count, generator)), "drift", "drift_ratio", "norm_of_mean_drift")


def draw_divergence(size: int, count: int, generator: torch.Generator) -> Values:
    return picked(attention_surface_divergence(_cloud(size, count, generator)), "surface_divergence")


MATRIX = torch.tensor(
    [[2.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.0]], dtype=F64
)


def draw_beta(size: int, count: int, generator: torch.Generator) -> Values:
    field = SA(beta=1.5, query_key=MATRIX)
    run = hs.integrate(field, uniform(generator, count, size, DIM), times=[0.0])
    return picked(effective_beta(run), "beta", "r_squared", "beta_without_self", "r_squared_without_self")


def beta_truths(size: int) -> dict[str, float]:
    """Logits 1.5 <x, M y> of uniform x, y on <x, y>: slope 1.5 tr M / d and R^2 = (tr M)^2 / (d |M|^2)."""
    slope = 1.5 * float(MATRIX.trace()) / DIM
    share = float(MATRIX.trace() ** 2 / (DIM * MATRIX.square().sum()))
    return {"beta": slope, "r_squared": share, "beta_without_self": slope, "r_squared_without_self": share}


WORDS, POSITIONS, HEADS = 64, 6, 2


def _small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": HEADS, "n_positions": POSITIONS, "n_inner": 8}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


def draw_probes(size: int, count: int, generator: torch.Generator) -> Values:
    """The estimate with ``size`` random signs minus the trace with all four basis vectors, on the same prompts."""
    ids = torch.randint(WORDS, (count, POSITIONS), generator=generator)
    recording, seed = (
        record(_small_model(), ids, batch_size=count),
        int(torch.randint(2**31, (1,), generator=generator)),
    )
    rough, exact = (attention_surface_divergence(recording, probes=k, seed=seed) for k in (size, 8 // HEADS))
    return {
        "total_surface_divergence": xr.DataArray((rough - exact).total_surface_divergence.values.ravel(), dims="prompt")
    }


KEYS, SHARED = 5, 0.5
HEAD_COVARIANCE = torch.tensor([1.0, 0.25], dtype=F64)  # of the two coordinates of a head


def draw_contexts(size: int, count: int, generator: torch.Generator) -> Values:
    """Normal values of five keys, each of weight 1/5; half of the variance of a key is common to the two heads, which
    write to the same two dimensions.
    """
    shape = (count, size, HEADS, KEYS, 2)
    common = normals(generator, count, size, 1, KEYS, 2)
    values = (math.sqrt(1 - SHARED) * normals(generator, *shape) + math.sqrt(SHARED) * common) * HEAD_COVARIANCE.sqrt()
    outputs = values.mean(-2)
    deviation = values - outputs.unsqueeze(-2)
    sampling = torch.einsum("gchks,gchkt->gchst", deviation, deviation) / KEYS
    halves = torch.stack([sampling[:, k::2].mean(1) for k in (0, 1)], 1)
    each = values.sum(2) / KEYS  # what a key contributes, both heads together
    traces = each.var(1, unbiased=True).sum((-1, -2))
    random = (deviation / KEYS).square().sum((-1, -2, -3)).mean(1) / 2
    writes = torch.eye(2, dtype=F64).expand(HEADS, 2, 2)
    groups = [
        ContextGroup(0, 0, 2, outputs[g], writes, halves[g], float(traces[g]), float(random[g]), float(KEYS))
        for g in range(count)
    ]
    measured = context_group_noise(groups, seed=int(torch.randint(2**31, (1,), generator=generator)))
    measured["kolmogorov_distance_excess"] = measured.kolmogorov_distance - measured.kolmogorov_distance_null
    return picked(measured, *context_truths(size))


def context_truths(size: int) -> dict[str, float]:
    """Sigma_C = C (1 + shared) / n and Sigma_A = C (n - 1) / n, C the covariance of one head: proportional, so that
    R^2 = 1; keys are independent and normal.
    """
    trace = float(HEAD_COVARIANCE.sum())
    return {
        "slope": (1 + SHARED) / (KEYS - 1),
        "r_squared": 1.0,
        "r_squared_corrected": 1.0,
        "nu_context": (1 + SHARED) * trace / KEYS / 2,
        "total_nu_token_sampling": trace * (KEYS - 1) / KEYS / 2,
        "total_nu_random_values": trace / KEYS / 2,
        "cross_head_share": SHARED / (1 + SHARED),
        "cross_key_share": 0.0,
        "kolmogorov_distance": 0.0,
        "kolmogorov_distance_excess": 0.0,
    }


def zeros(*names: str) -> Callable[[int], dict[str, float]]:
    return lambda size: dict.fromkeys(names, 0.0)


UNIFORM = f"uniform tokens on S^{DIM - 1}, V = I, equal weights"
ATTENTION_LAWS = (
    Law("attention_diffusion", UNIFORM, "tokens", (8, 16, 32), draw_noise, noise_truths),
    Law("attention_diffusion_spectrum", UNIFORM, "tokens", (16, 64), draw_spectrum, spectrum_truths),
    Law("attention_drift", UNIFORM, "tokens", (8, 32), draw_drift, zeros("drift", "drift_ratio", "norm_of_mean_drift")),
    Law("attention_surface_divergence", UNIFORM, "tokens", (8, 32), draw_divergence, zeros("surface_divergence")),
    Law(
        "attention_surface_divergence",
        "a random GPT-2 with 4 dimensions per head: random signs minus all basis vectors",
        "probes",
        (1, 2),
        draw_probes,
        zeros("total_surface_divergence"),
    ),
    Law("effective_beta", "logits 1.5 <x, M y>, uniform tokens", "tokens", (8, 16, 32), draw_beta, beta_truths),
    Law(
        "context_noise",
        "normal values of 5 keys of weight 1/5, heads correlated by 1/2",
        "contexts",
        (16, 32),
        draw_contexts,
        context_truths,
        others=100,
    ),
)
