"""residual-flow: layers of step h are Euler steps of a flow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Identity, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.reading import constants
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.geometry.sphere import retract
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.solve.layer import Layer

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, DIM, BETA, TIME = (constants("residual-flow")[name] for name in ("tokens", "dim", "beta", "time"))
STEPS = tuple(2.0**-k for k in range(5, 9))
STARTS = 1_024  # as many as an identity needs, also in quick runs


@experiment("residual-flow", seconds=4)
def residual_flow(case: Case) -> Finding:
    """x <- N(x + h f(x)), 1/h times, against x' = P f(x) over a unit of time: the error is C h + O(h^2).

    f is SA at beta = 2; the flow is integrated with a local error of 1e-12. The error of a start is the largest over
    its tokens, its order the slope of log error over log h. The null applies the same number of layers without their
    step, N(x + f(x)). A single layer, compared with the flow over time h, has order 2. The block is causal attention
    followed by an MLP, with random weights.
    """
    x = retract(case.normal(STARTS, TOKENS, DIM, stream=0))
    few = x[: case.count(128, quick=32)]
    attention = SA(beta=BETA)
    exact = _flow(attention, x, [TIME])[0]
    stepped = torch.stack([_largest_error(_layers(attention, x, h, [TIME])[0], exact) for h in STEPS], -1)
    counts = [TIME / h for h in STEPS]
    unstepped = torch.stack(
        [_largest_error(states, exact[: len(few)]) for states in _layers(attention, few, 1.0, counts)], -1
    )
    flow_over_h = reversed(list(_flow(attention, few, [h * TIME for h in reversed(STEPS)])))
    single = torch.stack(
        [_largest_error(_layers(attention, few, h, [h])[0], flow) for h, flow in zip(STEPS, flow_over_h, strict=True)],
        -1,
    )
    block = _block(case)
    block_flow = _flow(block, few, [TIME])[0]
    blocks = torch.stack([_largest_error(_layers(block, few, h, [TIME])[0], block_flow) for h in STEPS], -1)
    layers = ("with its step h", "without it", "one layer alone", "block with MLP")
    errors = torch.stack([stepped[: len(few)], unstepped, single, blocks], -1)
    return Finding(
        evidence={
            "order": Identity((_order(stepped) - 1).abs(), "distance of the order from 1"),
        },
        controls={
            "order with an MLP": Replicates(_order(blocks), "starts"),
            "without the step h": Replicates(_order(unstepped), "starts"),
            "a single layer": Replicates(_order(single), "starts"),
        },
        data=curve("error", errors, {"h": STEPS, "layers": layers}, label="distance of layers and flow", log=True),
        remark=f"At h = 1/{1 / STEPS[-1]:.0f} the layers are {float(stepped[:, -1].mean()):.2g} away from the flow.",
        where=(
            f"simulation on the unit sphere: n = {TOKENS}, d = {DIM}, beta = {BETA:g}, t <= {TIME:g}, layers of step "
            f"1/{1 / STEPS[0]:.0f} to 1/{1 / STEPS[-1]:.0f}"
        ),
    )


def _block(case: Case) -> Block:
    """A block with Gaussian weights, scaled so that each map preserves lengths on average."""
    query_key, value = case.normal(2, DIM, DIM, stream=1) / math.sqrt(DIM)
    w_in = case.normal(4 * DIM, DIM, stream=2) / math.sqrt(DIM)
    w_out = case.normal(DIM, 4 * DIM, stream=3) / math.sqrt(4 * DIM)
    return Block(SA(beta=BETA, query_key=query_key, value=value, causal=True), MLP(w_in=w_in, w_out=w_out))


def _flow(field: SA | Block, x: Tensor, times: list[float]) -> Tensor:
    return integrate(field, x, times, stepper=DormandPrince(tol=1e-12)).states


def _layers(field: SA | Block, x: Tensor, h: float, times: list[float]) -> Tensor:
    return integrate(field, x, times, stepper=Layer(h)).states


def _largest_error(states: Tensor, flow: Tensor) -> Tensor:
    """The largest distance over the tokens of each start."""
    lengths: Tensor = torch.linalg.vector_norm(states - flow, dim=-1)
    return lengths.amax(-1)


def _order(errors: Tensor) -> Tensor:
    """The least-squares slope of log error over log h, one per start."""
    log_h = torch.tensor(STEPS, dtype=errors.dtype).log()
    log_h = log_h - log_h.mean()
    return (errors.log() * log_h).sum(-1) / log_h.square().sum()
