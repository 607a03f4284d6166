"""Measures of a GPT-2 with and without the writes of its attention and its MLPs, at one training step.

Four arms: the whole model; attention alone (what every MLP writes is set to 0); MLP alone (what attention writes is set
to 0); neither. On the theory's sphere, x is the direction of the residual stream without its mean over coordinates: its
LayerNorm without gain and bias, divided by sqrt(d). The first token of every text is left out.

By arm, depth (every half-layer: 0 the first block's input, 2l + 1 after the attention of layer l, 2l + 2 after its MLP)
and prompt:

    aligned_pair_share    share of the inner products <x_i, x_j> above 0.8, 0.9 and 0.99, over pairs of tokens that have
                          different ids and are at least 16 positions apart
    mean_inner_product         mean over the same pairs
    participation_ratio   (sum s^2)^2 / sum s^4, s the singular values of the matrix X of the tokens x
    effective_rank          exp(-sum p log p), p = s / sum s
    collapse_residual_frobenius   |X - 1 xbar^T| / |X| in Frobenius norms: the distance to the mean token

By arm: ``validation_loss`` in nats per token. Of the whole model, by layer and prompt (mean over tokens):

    antisymmetric_share  |J - J^T|^2 / (4 |J|^2) in Frobenius norms, J the Jacobian of the MLP with the gain of its norm
                         folded into W_in: 0 for the gradient of a potential, 1 for a rotation
    gate_sparsity        share of pre-activations below 0
    closed_gate_share    share of pre-activations where the derivative of the GELU is below 0.1

and of its weights, by layer, ``coherence_max``, ``coherence_mean`` and ``neuron_alignment_mean`` as in ``measures``.
Nothing of helmscope is used, so that its measurements can be checked against these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from evaluate import validation_loss
from measures import coherence, off_diagonal_mean, weights
from torch import Tensor

ARMS = {  # which modules of each block write nothing
    "whole model": (),
    "attention alone": ("mlp",),
    "MLP alone": ("attn",),
    "neither": ("attn", "mlp"),
}
LEVELS = (0.8, 0.9, 0.99)
APART = 16  # positions
CLOSED = 0.1
CLOUD_MEASURES = (
    "aligned_pair_share",
    "mean_inner_product",
    "participation_ratio",
    "effective_rank",
    "collapse_residual_frobenius",
)


@torch.no_grad()
def measure_arms(model: Any, ids: Tensor, windows: np.ndarray) -> dict[str, Tensor]:
    """All measures above, on texts ``ids`` (prompt, n) and, for the losses, on windows of tokens."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        arms, losses = [], []
        for silent in ARMS.values():
            with silenced(model, silent):
                states, pre_activations = record_forward(model, ids)
                losses.append(validation_loss(model, windows))
            arms.append(measure_clouds(states, ids))
            if not silent:
                values = measure_mlps(model, states, pre_activations)
    finally:
        torch.set_float32_matmul_precision(precision)
    values |= {name: torch.stack([arm[name] for arm in arms]) for name in CLOUD_MEASURES}
    values["validation_loss"] = torch.tensor(losses, dtype=torch.float64)
    return {name: value.float().cpu().contiguous() for name, value in values.items()}


@contextmanager
def silenced(model: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Context manager: within it, the modules ``names`` of every block write 0."""

    def zero(_: Any, __: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    modules = [getattr(block, name) for block in model.transformer.h for name in names]
    handles = [module.register_forward_hook(zero) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_forward(model: Any, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The residual stream (prompt, n, d) at every depth, and the pre-activations (prompt, n, neurons) by layer."""
    states: list[Tensor] = []
    pre_activations: list[Tensor] = []
    blocks = model.transformer.h
    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(lambda _, args: states.append(args[0])))
        handles.append(block.ln_2.register_forward_pre_hook(lambda _, args: states.append(args[0])))
        handles.append(block.mlp.c_fc.register_forward_hook(lambda _, __, out: pre_activations.append(out)))
    handles.append(model.transformer.ln_f.register_forward_pre_hook(lambda _, args: states.append(args[0])))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states, pre_activations


def measure_clouds(states: list[Tensor], ids: Tensor) -> dict[str, Tensor]:
    """The measures by depth and prompt; ``aligned_pair_share`` by level, too."""
    positions, words = torch.arange(1, ids.shape[1], device=ids.device), ids[:, 1:]
    pairs = (positions - positions.unsqueeze(-1) >= APART) & (words.unsqueeze(-1) != words.unsqueeze(-2))
    rows: list[dict[str, Tensor]] = []
    for depth, state in enumerate(states):
        unchanged = depth > 0 and torch.equal(state, states[depth - 1])  # after a module that wrote nothing
        rows.append(rows[-1] if unchanged else _measure_cloud(on_sphere(state[:, 1:]), pairs))
    return {name: torch.stack([row[name] for row in rows]) for name in CLOUD_MEASURES}


def on_sphere(state: Tensor) -> Tensor:
    """The directions of tokens without their mean over coordinates, in float64."""
    state = state.double()
    return torch.nn.functional.normalize(state - state.mean(-1, keepdim=True), dim=-1)


def _measure_cloud(x: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """The measures of clouds (prompt, n, d), of which ``pairs`` (prompt, n, n) are counted."""
    gram, count = x @ x.mT, pairs.sum((-1, -2))
    eigenvalues = torch.linalg.eigvalsh(gram).clamp(min=0)
    singular = eigenvalues.sqrt()
    p = singular / singular.sum(-1, keepdim=True)
    return {
        "aligned_pair_share": torch.stack([((gram > level) & pairs).sum((-1, -2)) / count for level in LEVELS]),
        "mean_inner_product": (gram * pairs).sum((-1, -2)) / count,
        "participation_ratio": eigenvalues.sum(-1) ** 2 / (eigenvalues**2).sum(-1),
        "effective_rank": torch.exp(torch.special.entr(p).sum(-1)),
        "collapse_residual_frobenius": torch.linalg.vector_norm(x - x.mean(1, keepdim=True), dim=(-1, -2))
        / math.sqrt(x.shape[1]),
    }


def measure_mlps(model: Any, states: list[Tensor], pre_activations: list[Tensor]) -> dict[str, Tensor]:
    """The measures of the MLPs at the tokens of the whole model, and of their weights."""
    rows = []
    for block, z in zip(model.transformer.h, pre_activations, strict=True):
        z, (w_in, w_out) = z[:, 1:], weights(block)
        slope = gelu_slope(z)
        rows.append(
            {
                "antisymmetric_share": antisymmetric_share(w_in * block.ln_2.weight, w_out, slope).mean(1),
                "gate_sparsity": (z < 0).double().mean((1, 2)),
                "closed_gate_share": (slope < CLOSED).double().mean((1, 2)),
                "coherence_max": coherence(w_in).amax(),
                "coherence_mean": off_diagonal_mean(coherence(w_in)),
                "neuron_alignment_mean": torch.cosine_similarity(w_in, w_out, dim=-1).mean(),
            }
        )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def gelu_slope(z: Tensor) -> Tensor:
    """The derivative of the exact GELU, Phi(z) + z phi(z)."""
    return torch.special.ndtr(z) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def antisymmetric_share(w_in: Tensor, w_out: Tensor, slope: Tensor) -> Tensor:
    """|J - J^T|^2 / (4 |J|^2) for J = sum_j v_j s_j w_j^T, with s = ``slope`` (..., neurons) and the rows w_j, v_j of
    ``w_in`` and ``w_out`` (neurons, d).

    It is (1 - tr(J J) / |J|^2) / 2, and both terms are quadratic forms in s: no J is built.
    """
    w_in, w_out, slope = w_in.double(), w_out.double(), slope.double()
    across = w_in @ w_out.T
    square = (slope @ ((w_in @ w_in.T) * (w_out @ w_out.T)) * slope).sum(-1)
    return (1 - (slope @ (across * across.T) * slope).sum(-1) / square) / 2
