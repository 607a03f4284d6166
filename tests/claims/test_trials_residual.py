"""The trial of ``residual-flow``: layers are Euler steps of order 1, and a wrong layer or flow is noticed; on a model
the defect of half-steps taken in halves.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from helmscope.claims.experiments import residual_flow
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import run_trial
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.models.subject import Subject
from helmscope.solve.heun import Heun
from helmscope.solve.layer import Layer
from helmscope.types import Ruling


def test_orders_of_layer_null_block_and_single_layer() -> None:
    verdict = run_trial("residual-flow", quick=True).verdict
    assert verdict.ruling is Ruling.BY_CONSTRUCTION
    assert verdict.interval.high < 0.05  # distance of the order from 1
    orders = {control.name: control.interval.estimate for control in verdict.controls}
    assert orders == pytest.approx({"order with an MLP": 1, "without the step h": 0, "a single layer": 2}, abs=0.03)
    assert all(control.as_expected for control in verdict.controls)


def test_the_order_of_a_start_by_plain_loops_and_scipy() -> None:
    case = registered_case("residual-flow", quick=True)
    n, dim = case.constant("tokens"), case.constant("dim")
    x = retract(case.normal(residual_flow.STARTS, n, dim, index=0))[0].numpy()

    def pull(y: np.ndarray) -> np.ndarray:
        weight = np.exp(2.0 * y @ y.T)
        return weight @ y / weight.sum(1, keepdims=True)

    def moving(_: float, flat: np.ndarray) -> np.ndarray:
        y = flat.reshape(x.shape)
        return (pull(y) - (y * pull(y)).sum(1, keepdims=True) * y).ravel()

    run = solve_ivp(moving, (0, 1), x.ravel(), rtol=1e-12, atol=1e-13, method="DOP853")
    exact, errors = run.y[:, -1].reshape(x.shape), []
    steps = case.constant("steps")
    for h in steps:
        y = x
        for _ in range(round(1 / h)):
            y = y + h * pull(y)
            y = y / np.linalg.norm(y, axis=1, keepdims=True)
        errors.append(np.linalg.norm(y - exact, axis=1).max())
    order = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    finding = residual_flow.residual_flow(case)
    assert float(finding.evidence["order"].errors[0]) == pytest.approx(abs(order - 1), abs=1e-7)


class Fast(SA):
    def velocity(self, x, weights=None, *, t=0.0):
        return 1.01 * super().velocity(x, weights)


class LongerLayer(Layer):
    def step(self, flow, x, h, t):
        return super().step(flow, x, 1.01 * h, t)


@pytest.mark.parametrize("fault", [LongerLayer, Heun])
def test_residual_flow_notices_a_wrong_layer(monkeypatch: pytest.MonkeyPatch, fault: type[Layer]) -> None:
    monkeypatch.setattr(residual_flow, "Layer", fault)
    monkeypatch.setattr(residual_flow, "_block", lambda *_: SA(beta=1.0))
    verdict = run_trial("residual-flow", quick=True).verdict
    assert verdict.conditions[0].ruling is Ruling.REFUTED
    assert verdict.ruling is not Ruling.BY_CONSTRUCTION


class ShortLayer(Layer):
    def step(self, flow, x, h, t):
        return super().step(flow, x, h.clamp(max=1 / 32), t)


def test_residual_flow_notices_a_null_that_has_a_step_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_flow, "Layer", ShortLayer)
    monkeypatch.setattr(residual_flow, "_block", lambda *_: SA(beta=1.0))
    verdict = run_trial("residual-flow", quick=True).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert [control.name for control in verdict.controls if not control.as_expected] == ["without the step h"]


def test_residual_flow_notices_a_field_that_is_not_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_flow, "SA", Fast)  # the flow moves by velocity, the layer adds ambient
    assert run_trial("residual-flow", quick=True).verdict.conditions[0].ruling is Ruling.REFUTED


# on a model


def test_the_defect_is_that_of_the_modules_themselves() -> None:
    """f(x + f(x)/2) by calling the norm and the half of the block directly."""
    recording = Subject("A").record([row[:8] for row in Subject("A").token_ids[:3]])
    block = recording.anatomy.model.transformer.h[2]
    mask = torch.full((8, 8), -torch.inf).triu(1)[None, None]

    def attention(y: torch.Tensor) -> torch.Tensor:
        return block.attn(block.ln_1(y), attention_mask=mask)[0]

    def mlp(y: torch.Tensor) -> torch.Tensor:
        return block.mlp(block.ln_2(y))

    with torch.no_grad():
        for depth, half in ((4, attention), (5, mlp)):
            x = recording.residual_stream(depth=depth)
            whole = half(x)
            change = torch.linalg.vector_norm(half(x + whole / 2) - whole, dim=-1)
            due = (change / (2 * torch.linalg.vector_norm(whole, dim=-1))).mean(-1)
            measured = residual_flow._defect(recording, depth, 0.5)
            assert measured.numpy() == pytest.approx(due.numpy(), rel=1e-3)
            assert (residual_flow._defect(recording, depth, 0.0) < 1e-5).all()


def test_layers_of_a_model_are_not_small_steps() -> None:
    verdict = run_trial("residual-flow", quick=True, subject=Subject("A")).verdict
    assert verdict.ruling is Ruling.REFUTED
    assert verdict.interval.low > 0.5  # at the first half-step
    assert [control.ruling for control in verdict.controls] == [Ruling.IMPOSSIBLE, Ruling.SUPPORTED]


def test_a_post_norm_model_cannot_be_taken_in_halves() -> None:
    verdict = run_trial("residual-flow", quick=True, subject=Subject("tied")).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE
