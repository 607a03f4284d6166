"""Trials of claims about times: metastability, encoder-decoder, and the verdict of residual-flow. Faults
that they must notice, and their statistics against SciPy and closed forms.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate as quadrature
from scipy import stats

from helmscope.claims.experiments import encoder_decoder, metastability
from helmscope.claims.finding import Finding
from helmscope.claims.judge import judge
from helmscope.claims.reading import entry
from helmscope.claims.registry import SIMULATION, TrialCase, experiments
from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import retract
from helmscope.stats.reduce import reduce_replicates
from helmscope.theory.metastable import metastable_time_asymptotic
from helmscope.types import Judgment, Ruling, Verdict
from support.trials import failures, interval, named, rulings, set_constants

SUPPORTED, REFUTED, INCONCLUSIVE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.INCONCLUSIVE
CLAIMS = {"metastability": SUPPORTED, "encoder-decoder": SUPPORTED, "residual-flow": Ruling.BY_CONSTRUCTION}
RULINGS = {
    "metastability": {
        "merge time": SUPPORTED,
        "other numbers of tokens": SUPPORTED,
        "order of magnitude": SUPPORTED,
        "exponent": SUPPORTED,
        "two-cluster ODE at beta = 0": REFUTED,
    },
    "encoder-decoder": {
        "speed": SUPPORTED,
        "shape": SUPPORTED,
        "two sets of starts, both full": SUPPORTED,
        "a bias of 0 instead of the mask": SUPPORTED,
    },
    "residual-flow": {
        "order": Ruling.BY_CONSTRUCTION,
        "without the step h": SUPPORTED,
        "order with an MLP": SUPPORTED,
        "a single layer": SUPPORTED,
    },
}
PRINTED = {"metastability": Judgment.TRUE, "encoder-decoder": Judgment.NOT_TESTABLE, "residual-flow": Judgment.TRUE}


def run(claim: str, seed: int = 0) -> Finding:
    """The finding of a quick trial in simulation."""
    registered = experiments()[claim]
    return registered.function(registered.case(seed, quick=True, subject=SIMULATION, entry=entry(claim)))


found = functools.cache(run)


def verdict(claim: str, seed: int = 0) -> Verdict:
    return judge(entry(claim), found(claim, seed))


def again(claim: str) -> Verdict:
    """The verdict after a change of the module, which is not kept."""
    return judge(entry(claim), run(claim))


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_claim_holds_and_every_control_comes_out_as_expected(claim: str) -> None:
    seen = verdict(claim)
    assert seen.ruling is CLAIMS[claim], seen.sentence
    assert rulings(seen) == RULINGS[claim]
    assert failures(seen) == set()
    assert (None if seen.printed is None else seen.printed.judgment) is PRINTED[claim]
    assert reduce_replicates(found(claim).data).attrs["n"] >= 32


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_gives_the_same_ruling(claim: str, seed: int) -> None:
    other = verdict(claim, seed)
    assert other.ruling is CLAIMS[claim], other.sentence
    assert other.interval.estimate != verdict(claim).interval.estimate


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_the_same_seed_gives_the_same_bytes(claim: str) -> None:
    once, twice = found(claim).data, run(claim).data
    assert all(once[name].values.tobytes() == twice[name].values.tobytes() for name in once.variables)


def field(velocity: Callable[[SA, torch.Tensor, torch.Tensor | None], torch.Tensor]) -> type[SA]:
    """SA with another velocity, from the right one's arguments."""
    return type("Faulty", (SA,), {"velocity": lambda self, x, weights=None, *, t=0.0: velocity(self, x, weights)})


def scaled(factor: float) -> type[SA]:
    return field(lambda self, x, weights: factor * SA.velocity(self, x, weights))


# residual-flow


def test_the_order_of_layers_is_1_at_every_start() -> None:
    """An identity: the largest distance from 1 over all starts, not the mean."""
    order = interval(verdict("residual-flow"), "order")
    assert order.n == 1_024
    assert order.estimate == order.high < 0.03


# metastability


def test_the_merge_times_are_those_of_the_two_cluster_equation() -> None:
    data = reduce_replicates(found("metastability").data)
    assert abs(data.ratio - 1).max() < 1e-3  # measured 3e-4, the square of the spread
    closed = data.life.sel(time="two-cluster ODE").values
    assert closed == pytest.approx([4.27106768030934, 10.831207009995, 466.710652910029, 279981.160099382], rel=1e-12)
    asymptotic = [math.exp(b) / (2 * b) for b in (1.0, 4.0, 9.0, 16.0)]
    assert data.life.sel(time="large beta").values == pytest.approx(asymptotic, rel=1e-12)
    seen = verdict("metastability")
    for name in ("merge time", "other numbers of tokens"):
        assert interval(seen, name).estimate == pytest.approx(1, abs=1e-3)
    assert interval(seen, "two-cluster ODE at beta = 0").low > 1.1


def test_the_order_of_the_times_is_that_of_a_quadrature() -> None:
    """1/g' integrated by SciPy over log(1 - g), from g0 = 0.5, the worst of the three."""

    def time(b: float) -> float:
        def slowness(a: float) -> float:
            u = math.exp(a)
            return (math.exp(b * u) + 1) / (2 * (2 - u))

        return quadrature.quad(slowness, math.log(1e-3), math.log(0.5), epsabs=0, limit=500)[0]

    formula, slope = (interval(verdict("metastability"), name) for name in ("order of magnitude", "exponent"))
    assert formula.estimate == pytest.approx(time(16.0) / (math.exp(8.0) / (32 * 0.75)), rel=2e-3)
    assert slope.estimate == pytest.approx(math.log(16 * time(16.0) / (9 * time(9.0))) / 3.5, rel=2e-3)


def test_a_cloud_carried_by_scipy_merges_at_the_same_time() -> None:
    noise = TrialCase(0, quick=True).normal(32, 2, 16, 3, index=0)
    start = metastability._clusters(0.5, 0.01 * noise, n=16)[:2]
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
    ours, places = metastability._merge_times(4.0, start, 0.999)
    for time, g0, cloud in zip(ours.tolist(), places.tolist(), start.numpy(), strict=True):
        run = quadrature.solve_ivp(moving, (0, 20), cloud.ravel(), events=met, rtol=1e-10, atol=1e-12, method="DOP853")
        assert time == pytest.approx(run.t_events[0][0], rel=1e-6)
        assert g0 == pytest.approx(met(0.0, cloud.ravel()) + 0.999, abs=1e-14)


FAULTS = {  # with the conditions that need no large beta
    "2 % too fast": (scaled(1.02), {"merge time", "other numbers of tokens"}),
    "2 % too slow": (scaled(0.98), {"merge time", "other numbers of tokens"}),
    "1/Z dropped": (field(lambda self, x, weights: USA(beta=self.beta).velocity(x, weights)), {"merge time"}),
    "sign": (scaled(-1.0), {"merge time", "other numbers of tokens"}),
}


@pytest.mark.parametrize(("fault", "noticed"), FAULTS.values(), ids=FAULTS.keys())
def test_metastability_notices(monkeypatch: pytest.MonkeyPatch, fault: type[SA], noticed: set[str]) -> None:
    monkeypatch.setattr(metastability, "SA", fault)
    set_constants(monkeypatch, "metastability", betas=[1.0, 4.0], gammas=[0.0], sizes=[16])
    seen = again("metastability")
    assert seen.ruling is REFUTED
    assert failures(seen) >= noticed
    assert not 0.99 <= interval(seen, "merge time").estimate <= 1.01


ORDER_FAULTS = {
    "half of beta": ("SA", lambda beta: SA(beta=beta / 2), "exponent"),
    "twice the formula": (
        "metastable_time_asymptotic",
        lambda field, *, gamma0: 2 * metastable_time_asymptotic(field, gamma0=gamma0),
        "order of magnitude",
    ),
}


@pytest.mark.parametrize(("name", "fault", "noticed"), ORDER_FAULTS.values(), ids=ORDER_FAULTS.keys())
def test_metastability_notices_another_order(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: object, noticed: str
) -> None:
    """The ratio to the two-cluster ODE is right in both."""
    monkeypatch.setattr(metastability, name, fault)
    set_constants(monkeypatch, "metastability", betas=[9.0, 16.0], gammas=[0.0], sizes=[16])
    seen = again("metastability")
    assert seen.ruling is REFUTED
    assert failures(seen) == {noticed}
    assert 0.99 <= interval(seen, "merge time").estimate <= 1.01


# encoder-decoder


def test_the_causal_mask_takes_twice_the_time_for_two_tokens() -> None:
    """x_1 rests and x_2 moves as in the full flow, where both do: every time doubles, at any beta."""
    angles = torch.tensor([0.6, 1.0, 1.5, 2.0], dtype=torch.float64)
    x = torch.stack(
        [torch.eye(1, 2, dtype=torch.float64).expand(4, 2), torch.stack([angles.cos(), angles.sin()], -1)], 1
    )
    events = [encoder_decoder._MeanReached(0.9)]
    for beta in (0.0, 1.0):
        full, causal = (
            encoder_decoder.integrate(SA(beta=beta, causal=mask), x, [10.0], events=events).event_times[0]
            for mask in (False, True)
        )
        assert (causal / full).numpy() == pytest.approx([2.0] * 4, rel=1e-8)
    assert full.max() < 5


def test_times_means_and_spread_by_plain_loops() -> None:
    x = retract(TrialCase(0, quick=True).normal(32, 16, 16, index=0))[:2]
    field = SA(beta=1.0, causal=True)
    run = encoder_decoder._Run.of(field, x, 0.9, 10.0)
    path = encoder_decoder._Path.of(field, x, run.time)
    spread = encoder_decoder._spread(path.states)

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
        assert float(spread[k]) == pytest.approx(np.std(products(end.y_events[0][0]), ddof=1), rel=1e-4)
        assert np.mean(products(path.states[k].numpy())) == pytest.approx(0.9, abs=1e-6)


def test_the_histograms_hold_all_pairs_at_the_stated_mean() -> None:
    data = reduce_replicates(found("encoder-decoder").data)
    assert data.inner_product_histogram.dims == ("inner_product", "mask")
    assert data.inner_product_histogram.sum("inner_product").values == pytest.approx([1.0, 1.0], abs=1e-12)
    means = (data.inner_product_histogram * data.inner_product).sum("inner_product").values
    assert means == pytest.approx([0.9, 0.9], abs=0.01)  # of bins 0.05 wide


def test_the_mask_changes_speed_and_shape_by_more_than_matters() -> None:
    seen = verdict("encoder-decoder")
    for name in ("speed", "shape"):
        assert interval(seen, name).low > 0.15
    assert "beta = 0" in named(seen, "speed").basis  # the smallest difference of the three betas
    assert interval(seen, "a bias of 0 instead of the mask").estimate == 0.0
    assert abs(interval(seen, "two sets of starts, both full").estimate) < 0.05


def test_two_sets_of_starts_differ_by_chance_less_than_once_in_ten_thousand() -> None:
    """The control fails only if the whole interval is beyond 0.1: how many standard errors is that?"""
    values = found("encoder-decoder").controls["two sets of starts, both full"].values.numpy()
    error = values.std(ddof=1) / math.sqrt(len(values))
    margin = (0.1 + stats.t.ppf(0.975, len(values) - 1) * error) / error
    assert len(values) == 32
    assert 2 * stats.norm.sf(margin) < 1e-10


def test_other_starts_break_a_control_of_encoder_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    monkeypatch.setattr(encoder_decoder, "retract", lambda y: retract(y + next(calls)))  # the second set is gathered
    set_constants(monkeypatch, "encoder-decoder", tokens=8)
    seen = again("encoder-decoder")
    assert seen.ruling is INCONCLUSIVE
    assert failures(seen) == {"two sets of starts, both full"}


def test_runs_that_the_horizon_cuts_off_are_counted() -> None:
    x = retract(TrialCase(0, quick=True).normal(32, 16, 16, index=0))
    times = encoder_decoder._Run.of(SA(beta=2.0, causal=True), x, 0.9, 40.0).time
    middle = float(times.median()) + 0.01
    cut = encoder_decoder._Run.of(SA(beta=2.0, causal=True), x, 0.9, middle)
    assert cut.censored == int((times > middle).sum()) > 0
    assert cut.time.numpy() == pytest.approx(times.clamp(max=middle).numpy(), rel=1e-5)


def loose(self: SA, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """No mask."""
    return SA.velocity(replace(self, causal=False), x, weights)


MASK_FAULTS = {
    "no mask": (field(loose), REFUTED, {"speed", "shape"}),
    "slower instead of masked": (
        field(lambda self, x, weights: (0.7 if self.causal else 1.0) * loose(self, x, weights)),
        REFUTED,
        {"shape"},
    ),
    "a bias changes the speed": (
        field(lambda self, x, weights: (0.99 if self.bias is not None else 1.0) * SA.velocity(self, x, weights)),
        INCONCLUSIVE,
        {"a bias of 0 instead of the mask"},
    ),
}


@pytest.mark.parametrize(("fault", "ruling", "noticed"), MASK_FAULTS.values(), ids=MASK_FAULTS.keys())
def test_encoder_decoder_notices(
    monkeypatch: pytest.MonkeyPatch, fault: type[SA], ruling: Ruling, noticed: set[str]
) -> None:
    monkeypatch.setattr(encoder_decoder, "SA", fault)
    set_constants(monkeypatch, "encoder-decoder", tokens=8)
    seen = again("encoder-decoder")
    assert seen.ruling is ruling
    assert failures(seen) == noticed
