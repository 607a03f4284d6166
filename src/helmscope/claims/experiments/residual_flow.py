"""residual-flow: layers of step h are Euler steps of a flow, and how far a real layer, h = 1, is from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import IdentityErrors, PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.mlp import MLP
from helmscope.geometry.sphere import retract
from helmscope.intervene.arms import Arm, AttentionMode
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.solve.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from helmscope.models.recording import Recording

STARTS = 1_024  # as many as an identity needs, also in quick runs


@experiment("residual-flow", seconds={"simulation": 4, "model": 15})
def residual_flow(case: TrialCase) -> Finding:
    """In simulation layers of step h converge to a flow; a model has h = 1, and its half-steps are taken in halves."""
    return _simulated(case) if case.subject.is_simulation else _on_model(case)


def _simulated(case: TrialCase) -> Finding:
    """x <- N(x + h f(x)), 1/h times, against x' = P f(x) over a unit of time: the error is C h + O(h^2).

    f is SA at beta = 2; the flow is integrated with a local error of 1e-12. The error of a start is the largest over
    its tokens, its order the slope of log error over log h. The null applies the same number of layers without their
    step, N(x + f(x)). A single layer, compared with the flow over time h, has order 2. The block is causal attention
    followed by an MLP, with random weights.
    """
    n, dim, beta, time, steps = (case.constant(name) for name in ("tokens", "dim", "beta", "time", "steps"))
    x = retract(case.normal(STARTS, n, dim, index=0))
    few = x[: case.count(128, quick=32)]
    attention = SA(beta=beta)
    exact = _flow(attention, x, [time])[0]
    stepped = torch.stack([_largest_error(_layers(attention, x, h, [time])[0], exact) for h in steps], -1)
    counts = [time / h for h in steps]
    unstepped = torch.stack(
        [_largest_error(states, exact[: len(few)]) for states in _layers(attention, few, 1.0, counts)], -1
    )
    flow_over_h = reversed(list(_flow(attention, few, [h * time for h in reversed(steps)])))
    single = torch.stack(
        [_largest_error(_layers(attention, few, h, [h])[0], flow) for h, flow in zip(steps, flow_over_h, strict=True)],
        -1,
    )
    block = _block(case, dim, beta)
    block_flow = _flow(block, few, [time])[0]
    blocks = torch.stack([_largest_error(_layers(block, few, h, [time])[0], block_flow) for h in steps], -1)
    layers = ("with its step h", "without it", "one layer alone", "block with MLP")
    errors = torch.stack([stepped[: len(few)], unstepped, single, blocks], -1)
    return Finding(
        evidence={
            "order": IdentityErrors((_order(stepped, steps) - 1).abs(), "distance of the order from 1"),
        },
        controls={
            "order with an MLP": Replicates(_order(blocks, steps), "starts"),
            "without the step h": Replicates(_order(unstepped, steps), "starts"),
            "a single layer": Replicates(_order(single, steps), "starts"),
        },
        data=curve("error", errors, {"h": steps, "layers": layers}, label="distance of layers and flow", log=True),
        remark=f"At h = 1/{1 / steps[-1]:.0f} the layers are {float(stepped[:, -1].mean()):.2g} away from the flow.",
        setting=(
            f"simulation on the unit sphere: n = {n}, d = {dim}, beta = {beta:g}, t <= {time:g}, layers of step "
            f"1/{1 / steps[0]:.0f} to 1/{1 / steps[-1]:.0f}"
        ),
    )


def _block(case: TrialCase, dim: int, beta: float) -> Block:
    """A block with Gaussian weights, scaled so that each map preserves lengths on average."""
    query_key, value = case.normal(2, dim, dim, index=1) / math.sqrt(dim)
    w_in = case.normal(4 * dim, dim, index=2) / math.sqrt(dim)
    w_out = case.normal(dim, 4 * dim, index=3) / math.sqrt(4 * dim)
    return Block(SA(beta=beta, query_key=query_key, value=value, causal=True), MLP(w_in=w_in, w_out=w_out))


def _flow(field: SA | Block, x: Tensor, times: list[float]) -> Tensor:
    return integrate(field, x, times, stepper=DormandPrince(tol=1e-12)).states


def _layers(field: SA | Block, x: Tensor, h: float, times: list[float]) -> Tensor:
    return integrate(field, x, times, stepper=Layer(h)).states


def _largest_error(states: Tensor, flow: Tensor) -> Tensor:
    """The largest distance over the tokens of each start."""
    lengths: Tensor = torch.linalg.vector_norm(states - flow, dim=-1)
    return lengths.amax(-1)


def _order(errors: Tensor, steps: Sequence[float]) -> Tensor:
    """The least-squares slope of log error over log h, one per start."""
    log_h = torch.tensor(steps, dtype=errors.dtype).log()
    log_h = log_h - log_h.mean()
    return (errors.log() * log_h).sum(-1) / log_h.square().sum()


def _on_model(case: TrialCase) -> Finding:
    """Each half-step of a pre-norm model, x + f(x), against two halves: m = x + f(x)/2, then m + f(m)/2. They differ by
    (f(m) - f(x)) / 2; the defect is the length of this over that of f(x), the mean over the tokens of a prompt.

    In a pre-norm model f reads only the direction of x, so that f(m) is what the model writes when it is resumed with
    the direction of m. A control resumes it with the direction of x: f is unchanged and the defect is rounding.
    """
    prompts = prompts_or_finding(case, length=case.constant("length"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    if any(layer.wiring.kind.value != "sequential" for layer in recording.anatomy.layers):
        return Finding.impossible(
            "only blocks that normalize before each half, and add one after the other, can be taken in halves"
        )
    silent = recording.under(*Arm(AttentionMode.OFF, mlp=False).edits(recording))
    halves = range(recording.trajectory.states.shape[0] - 1)
    names = [f"half-step {depth}" for depth in halves]
    defects = [_defect(recording, depth, 0.5) for depth in halves]
    return Finding(
        evidence={"defect": ReplicatesInEveryCase(defects, "prompts", names)},
        controls={
            "blocks that write nothing": _defects_or_reason(silent, names),
            "a force that does not change": ReplicatesInEveryCase(
                [_defect(recording, depth, 0.0) for depth in halves], "prompts", names
            ),
        },
        data=curve(
            "defect",
            torch.stack(defects, -1),
            {"half-step": halves},
            label="relative defect of a half-step taken in two halves",
            over="prompt",
        ),
        remark=f"The mean defect runs from {min(float(each.mean()) for each in defects):.2g} to "
        f"{max(float(each.mean()) for each in defects):.2g} over {len(defects)} half-steps.",
        setting=f"raw residual stream, {prompts.setting}, {case.constant('length')} tokens each",
        undecided_because=prompts.alike,
    )


def _defect(recording: Recording, depth: int, share: float) -> Tensor:
    """|f(x + share f(x)) - f(x)| / (2 |f(x)|) of the half-step from ``depth``, the mean over the tokens of a prompt."""
    x = recording.residual_stream(depth=depth).double()
    write = recording.residual_stream(depth=depth + 1).double() - x
    moved = x + share * write
    centered = moved - moved.mean(-1, keepdim=True) if recording.residual.mean is not None else moved
    resumed = recording.resume(depth=depth, states=retract(centered).to(recording.trajectory.states))
    second = resumed.residual_stream(depth=depth + 1).double() - resumed.residual_stream(depth=depth).double()
    lengths = [torch.linalg.vector_norm(each, dim=-1) for each in (second - write, write)]
    ratio: Tensor = lengths[0] / (2 * lengths[1])
    return ratio.mean(-1)


def _defects_or_reason(recording: Recording, names: list[str]) -> ReplicatesInEveryCase | PremiseImpossible:
    """The defects of all half-steps, or why there are none."""
    states = [recording.residual_stream(depth=depth) for depth in range(len(names) + 1)]
    if all(torch.equal(a, b) for a, b in zip(states[1:], states[:-1], strict=True)):
        return PremiseImpossible("half-steps of length 0 have no relative defect")
    return ReplicatesInEveryCase([_defect(recording, depth, 0.5) for depth in range(len(names))], "prompts", names)
