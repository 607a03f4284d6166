"""The trial of ``residual-flow``: layers are Euler steps of order 1, and a wrong layer or flow is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from helmscope.claims.experiments import residual_flow
from helmscope.claims.registry import Case
from helmscope.claims.trial import try_claim
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.solve.heun import Heun
from helmscope.solve.layer import Layer
from helmscope.types import Ruling


def test_orders_of_layer_null_block_and_single_layer() -> None:
    seen = try_claim("residual-flow", quick=True).verdict
    assert seen.interval.estimate == pytest.approx(1, abs=0.02)
    assert seen.null.ruling is Ruling.SUPPORTED
    # measured 1.2e-4: 16 layers are not yet all the way
    assert seen.null.interval.estimate == pytest.approx(0, abs=1e-3)
    assert seen.also[0].interval.estimate == pytest.approx(1, abs=0.02)
    assert seen.also[1].interval.estimate == pytest.approx(2, abs=0.02)


def test_the_order_of_a_start_by_plain_loops_and_scipy() -> None:
    x = retract(Case(0, quick=True).normal(32, 12, 8, stream=0))[0].numpy()

    def pull(y: np.ndarray) -> np.ndarray:
        weight = np.exp(2.0 * y @ y.T)
        return weight @ y / weight.sum(1, keepdims=True)

    def moving(_: float, flat: np.ndarray) -> np.ndarray:
        y = flat.reshape(x.shape)
        return (pull(y) - (y * pull(y)).sum(1, keepdims=True) * y).ravel()

    run = solve_ivp(moving, (0, 1), x.ravel(), rtol=1e-12, atol=1e-13, method="DOP853")
    exact, errors = run.y[:, -1].reshape(x.shape), []
    steps = [2.0**-k for k in range(4, 10)]
    for h in steps:
        y = x
        for _ in range(round(1 / h)):
            y = y + h * pull(y)
            y = y / np.linalg.norm(y, axis=1, keepdims=True)
        errors.append(np.linalg.norm(y - exact, axis=1).max())
    order = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert float(residual_flow.residual_flow(Case(0, quick=True)).evidence.values[0]) == pytest.approx(order, abs=1e-7)


class Fast(SA):
    def velocity(self, x, weights=None, *, t=0.0):
        return 1.01 * super().velocity(x, weights)


class LongerLayer(Layer):
    def step(self, flow, x, h, t):
        return super().step(flow, x, 1.01 * h, t)


@pytest.mark.parametrize("fault", [LongerLayer, Heun])
def test_residual_flow_notices_a_wrong_layer(monkeypatch: pytest.MonkeyPatch, fault: type[Layer]) -> None:
    monkeypatch.setattr(residual_flow, "Layer", fault)
    monkeypatch.setattr(residual_flow, "_block", lambda case: SA(beta=1.0))
    seen = try_claim("residual-flow", quick=True).verdict
    assert seen.ruling is Ruling.REFUTED
    assert not 0.9 <= seen.interval.estimate <= 1.1


class ShortLayer(Layer):
    def step(self, flow, x, h, t):
        return super().step(flow, x, h.clamp(max=1 / 16), t)


def test_residual_flow_notices_a_null_that_has_a_step_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_flow, "Layer", ShortLayer)
    monkeypatch.setattr(residual_flow, "_block", lambda case: SA(beta=1.0))
    seen = try_claim("residual-flow", quick=True).verdict
    assert (seen.ruling, seen.null.ruling) == (Ruling.INCONCLUSIVE, Ruling.REFUTED)
    assert all(control.as_expected for control in seen.also)


def test_residual_flow_notices_a_field_that_is_not_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_flow, "SA", Fast)  # the flow moves by velocity, the layer adds ambient
    assert try_claim("residual-flow", quick=True).verdict.ruling is Ruling.REFUTED
