"""Trials of claims about times: one-cluster, metastability, encoder-decoder, residual-flow. Their verdicts, faults that
they must notice, and their statistics against SciPy and closed forms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate as quadrature

from helmscope.claims.experiments import encoder_decoder, metastability, one_cluster, residual_flow
from helmscope.claims.finding import Finding
from helmscope.claims.judge import judge
from helmscope.claims.reading import entry
from helmscope.claims.registry import Case, experiments
from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import retract
from helmscope.solve.heun import Heun
from helmscope.solve.layer import Layer
from helmscope.types import Ruling, Verdict

SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
CLAIMS = ("one-cluster", "metastability", "encoder-decoder", "residual-flow")


@functools.cache
def found(claim: str, seed: int = 0) -> Finding:
    return experiments()[claim].function(Case(seed, quick=True))


def verdict(claim: str, seed: int = 0) -> Verdict:
    return judge(entry(claim), found(claim, seed))


def again(claim: str) -> Verdict:
    """The verdict of a module in which something was replaced."""
    return judge(entry(claim), experiments()[claim].function(Case(0, quick=True)))


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_claim_is_supported_and_every_control_comes_out_as_it_must(claim: str) -> None:
    seen = verdict(claim)
    assert seen.ruling is SUPPORTED, seen.sentence
    assert seen.null is not None
    assert all(control.as_expected for control in (seen.null, *seen.also))
    assert found(claim).data.attrs["n"] >= 32


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_gives_the_same_ruling(claim: str, seed: int) -> None:
    other = verdict(claim, seed)
    assert other.ruling is SUPPORTED, other.sentence
    assert claim == "one-cluster" or other.statistic != verdict(claim).statistic


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_the_same_seed_gives_the_same_bytes(claim: str) -> None:
    once, twice = found(claim).data, experiments()[claim].function(Case(0, quick=True)).data
    assert all(once[name].values.tobytes() == twice[name].values.tobytes() for name in once.variables)


def field(velocity: Callable[[SA, torch.Tensor, torch.Tensor | None], torch.Tensor]) -> type[SA]:
    """SA with another velocity, from the right one's arguments."""
    return type("Faulty", (SA,), {"velocity": lambda self, x, weights=None: velocity(self, x, weights)})


def scaled(factor: float) -> type[SA]:
    return field(lambda self, x, weights: factor * SA.velocity(self, x, weights))


# one-cluster


def test_every_start_of_every_regime_ends_in_one_cluster() -> None:
    seen = verdict("one-cluster")
    assert (seen.statistic, seen.n, seen.null.statistic) == (1.0, 160, 0.0)
    assert seen.low == pytest.approx(0.025 ** (1 / 160), rel=1e-12)  # Clopper and Pearson, all successes
    assert [control.statistic for control in seen.also] == [1.0] * 4
    assert all(control.low > 0.9 for control in seen.also)
    paths = found("one-cluster").data.clusters.values
    assert (np.diff(paths, axis=0) <= 0).all()  # what has met stays together
    assert paths[-1].tolist() == [1.0] * 4


def test_the_horizon_is_ten_times_the_quadrature() -> None:
    for regime in one_cluster.REGIMES:
        b = regime.beta

        def slowness(a: float, b: float = b) -> float:  # of 1 - g = e^a, minus its logarithm
            u = math.exp(a)
            return (math.exp(b * u) + 1) / (2 * (2 - u))

        knots = np.linspace(math.log(1e-9), math.log(1.99), 60)
        time = sum(quadrature.quad(slowness, low, high)[0] for low, high in pairwise(knots))
        assert regime.horizon == pytest.approx(10 * time, rel=1e-6)


def test_angles_carried_by_scipy_end_in_one_cluster_too() -> None:
    regime = one_cluster.REGIMES[1]
    x = retract(Case(0, quick=True).normal(64, regime.n, regime.dim, stream=1))[:3]

    def turning(_: float, theta: np.ndarray) -> np.ndarray:
        apart = theta[None, :] - theta[:, None]
        weight = np.exp(regime.beta * np.cos(apart))
        return (weight * np.sin(apart)).sum(1) / weight.sum(1)

    seen = one_cluster._clusters(SA(beta=regime.beta), x, [1.0, regime.horizon], merge=1e-9)
    assert seen.tolist() == [[regime.n] * 3, [1] * 3]
    for cloud in x:
        start = torch.atan2(cloud[:, 1], cloud[:, 0]).numpy()
        end = quadrature.solve_ivp(turning, (0, regime.horizon), start, rtol=1e-9, atol=1e-12).y[:, -1]
        assert abs(np.exp(1j * end).mean()) > 1 - 1e-12


def halves(self: SA, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Tokens that see their own half alone."""
    masses = (None, None) if weights is None else weights.chunk(2, -1)
    return torch.cat([SA.velocity(self, y, m) for y, m in zip(x.chunk(2, -2), masses, strict=True)], -2)


@pytest.mark.parametrize("fault", [scaled(-1.0), scaled(0.0), field(halves)], ids=["sign", "nothing moves", "halves"])
def test_one_cluster_notices(monkeypatch: pytest.MonkeyPatch, fault: type[SA]) -> None:
    monkeypatch.setattr(one_cluster, "SA", fault)
    monkeypatch.setattr(one_cluster, "REGIMES", one_cluster.REGIMES[:1])
    monkeypatch.setattr(one_cluster, "TRIES", 100)
    seen = again("one-cluster")
    assert seen.ruling is INCONCLUSIVE
    assert seen.also[0].statistic < 0.1


def test_a_run_that_is_too_short_refutes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_cluster, "REGIMES", one_cluster.REGIMES[:1])
    monkeypatch.setattr(one_cluster, "metastable_time", lambda *_, **__: 0.5)
    seen = again("one-cluster")
    assert (seen.ruling, seen.null.as_expected) == (INCONCLUSIVE, True)
    assert seen.statistic < 0.1


# metastability


def test_the_merge_times_are_those_of_the_two_cluster_equation() -> None:
    data = found("metastability").data
    assert abs(data.ratio - 1).max() < 1e-3  # measured 3e-4, the square of the spread
    closed = data.life.sel(time="two-cluster ODE").values
    assert closed == pytest.approx([4.27106768030934, 10.831207009995, 466.710652910029], rel=1e-12)
    asymptotic = [math.exp(b) / (2 * b) for b in (1.0, 4.0, 9.0)]
    assert data.life.sel(time="large beta").values == pytest.approx(asymptotic, rel=1e-12)
    assert verdict("metastability").null.low > 1.1


def test_a_cloud_carried_by_scipy_merges_at_the_same_time() -> None:
    noise = Case(0, quick=True).normal(32, 2, 16, 3, stream=0)
    start = metastability._clusters(0.5, noise, n=16)[:2]
    assert start[:, :8] == pytest.approx(retract(torch.tensor([1.0, 0, 0]) + 0.01 * noise[:2, 0, :8]), abs=1e-15)

    def moving(_: float, flat: np.ndarray) -> np.ndarray:
        x = flat.reshape(16, 3)
        weight = np.exp(4.0 * x @ x.T)
        pull = weight @ x / weight.sum(1, keepdims=True)
        return (pull - (x * pull).sum(1, keepdims=True) * x).ravel()

    def met(_: float, flat: np.ndarray) -> float:
        a, b = flat.reshape(2, 8, 3).sum(1)
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b) - 0.999

    met.terminal = True
    ours, places = metastability._merging(4.0, start)
    for time, g0, cloud in zip(ours.tolist(), places.tolist(), start.numpy(), strict=True):
        run = quadrature.solve_ivp(moving, (0, 20), cloud.ravel(), events=met, rtol=1e-10, atol=1e-12, method="DOP853")
        assert time == pytest.approx(run.t_events[0][0], rel=1e-6)
        assert g0 == pytest.approx(met(0.0, cloud.ravel()) + 0.999, abs=1e-14)


FAULTS = {
    "2 % too fast": scaled(1.02),
    "2 % too slow": scaled(0.98),
    "1/Z dropped": field(lambda self, x, weights: USA(beta=self.beta).velocity(x, weights)),
    "sign": scaled(-1.0),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_metastability_notices(monkeypatch: pytest.MonkeyPatch, fault: type[SA]) -> None:
    monkeypatch.setattr(metastability, "SA", fault)
    monkeypatch.setattr(metastability, "BETAS", (4.0,))
    monkeypatch.setattr(metastability, "GAMMAS", (0.0,))
    monkeypatch.setattr(metastability, "SIZES", (16,))
    seen = again("metastability")
    assert seen.ruling is not SUPPORTED
    assert not 0.99 <= seen.statistic <= 1.01


# encoder-decoder


def test_the_causal_mask_takes_twice_the_time_for_two_tokens() -> None:
    """x_1 rests and x_2 moves as in the full flow, where both do: every time doubles, at any beta."""
    angles = torch.tensor([0.6, 1.0, 1.5, 2.0], dtype=torch.float64)
    x = torch.stack(
        [torch.eye(1, 2, dtype=torch.float64).expand(4, 2), torch.stack([angles.cos(), angles.sin()], -1)], 1
    )
    events = [encoder_decoder._Reaches()]
    for beta in (0.0, 1.0):
        full, causal = (
            encoder_decoder.integrate(SA(beta=beta, causal=mask), x, [10.0], events=events).event_times[0]
            for mask in (False, True)
        )
        assert (causal / full).numpy() == pytest.approx([2.0] * 4, rel=1e-8)
    assert full.max() < 5


def test_times_means_and_spread_by_plain_loops() -> None:
    x = retract(Case(0, quick=True).normal(32, 16, 16, stream=0))[:2]
    run = encoder_decoder._Run.of(SA(beta=1.0, causal=True), x)

    def moving(_: float, flat: np.ndarray) -> np.ndarray:
        y = flat.reshape(16, 16)
        out = np.zeros_like(y)
        for i in range(16):
            weight = np.exp([y[i] @ y[j] for j in range(i + 1)])
            pull = weight @ y[: i + 1] / weight.sum()
            out[i] = pull - (y[i] @ pull) * y[i]
        return out.ravel()

    def products(flat: np.ndarray) -> list[float]:
        y = flat.reshape(16, 16)
        return [y[i] @ y[j] for i in range(16) for j in range(i)]

    def reached(_: float, flat: np.ndarray) -> float:
        return float(np.mean(products(flat))) - 0.9

    for k, cloud in enumerate(x.numpy()):
        end = quadrature.solve_ivp(moving, (0, 10), cloud.ravel(), events=reached, rtol=1e-8, atol=1e-10)
        assert float(run.time[k]) == pytest.approx(end.t_events[0][0], rel=1e-5)
        # read off between two times a quarter apart
        assert float(run.spread[k]) == pytest.approx(np.std(products(end.y_events[0][0]), ddof=1), rel=0.02)


def test_the_histograms_hold_all_pairs_at_the_stated_mean() -> None:
    data = found("encoder-decoder").data
    assert data.share.dims == ("inner_product", "mask")
    assert data.share.sum("inner_product").values == pytest.approx([1.0, 1.0], abs=1e-12)
    means = (data.share * data.inner_product).sum("inner_product").values
    assert ((means > 0.88) & (means < 0.95)).all()
    assert verdict("encoder-decoder").also[0].statistic == 0.0


def loose(self: SA, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """No mask."""
    return SA.velocity(replace(self, causal=False), x, weights)


MASK_FAULTS = {
    "no mask": field(loose),
    "slower instead of masked": field(lambda self, x, weights: (0.7 if self.causal else 1.0) * loose(self, x, weights)),
    "a bias changes the speed": field(
        lambda self, x, weights: (0.95 if self.bias is not None else 1.0) * SA.velocity(self, x, weights)
    ),
}


@pytest.mark.parametrize("fault", MASK_FAULTS.values(), ids=MASK_FAULTS.keys())
def test_encoder_decoder_notices(monkeypatch: pytest.MonkeyPatch, fault: type[SA]) -> None:
    monkeypatch.setattr(encoder_decoder, "SA", fault)
    monkeypatch.setattr(encoder_decoder, "TOKENS", 8)
    assert again("encoder-decoder").ruling is INCONCLUSIVE


# residual-flow


def test_orders_of_layer_null_block_and_single_layer() -> None:
    seen = verdict("residual-flow")
    assert seen.statistic == pytest.approx(1, abs=0.02)
    assert seen.null.ruling is REFUTED
    assert seen.null.statistic == pytest.approx(0, abs=1e-3)  # measured 1.2e-4: 16 layers are not yet all the way
    assert seen.also[0].statistic == pytest.approx(1, abs=0.02)
    assert seen.also[1].statistic == pytest.approx(2, abs=0.02)


def test_the_order_of_a_start_by_plain_loops_and_scipy() -> None:
    x = retract(Case(0, quick=True).normal(32, 12, 8, stream=0))[0].numpy()

    def pull(y: np.ndarray) -> np.ndarray:
        weight = np.exp(2.0 * y @ y.T)
        return weight @ y / weight.sum(1, keepdims=True)

    def moving(_: float, flat: np.ndarray) -> np.ndarray:
        y = flat.reshape(x.shape)
        return (pull(y) - (y * pull(y)).sum(1, keepdims=True) * y).ravel()

    run = quadrature.solve_ivp(moving, (0, 1), x.ravel(), rtol=1e-12, atol=1e-13, method="DOP853")
    exact, errors = run.y[:, -1].reshape(x.shape), []
    steps = [2.0**-k for k in range(4, 10)]
    for h in steps:
        y = x
        for _ in range(round(1 / h)):
            y = y + h * pull(y)
            y = y / np.linalg.norm(y, axis=1, keepdims=True)
        errors.append(np.linalg.norm(y - exact, axis=1).max())
    order = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert float(found("residual-flow").evidence.values[0]) == pytest.approx(order, abs=1e-7)


class LongerLayer(Layer):
    def step(self, flow, x, h):
        return super().step(flow, x, 1.01 * h)


@pytest.mark.parametrize("fault", [LongerLayer, Heun])
def test_residual_flow_notices_a_wrong_layer(monkeypatch: pytest.MonkeyPatch, fault: type[Layer]) -> None:
    monkeypatch.setattr(residual_flow, "Layer", fault)
    monkeypatch.setattr(residual_flow, "_block", lambda case: SA(beta=1.0))
    seen = again("residual-flow")
    assert seen.ruling is not SUPPORTED
    assert not 0.9 <= seen.statistic <= 1.1


def test_residual_flow_notices_a_field_that_is_not_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_flow, "SA", scaled(1.01))  # the flow moves by velocity, the layer adds ambient
    assert again("residual-flow").ruling is not SUPPORTED
