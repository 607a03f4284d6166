"""Phase diagrams against closed forms, a naive integrator, and the numbers of an independent program."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.integrate import solve_ivp

import helmscope as hs
from helmscope.observe import phase_sweep as module
from helmscope.observe.fused_shares import FusedShares
from helmscope.observe.half_times import half_time
from helmscope.observe.phase import phase_diagram, published_scheme_probability
from helmscope.theory.probability import initial_close_pair_probability
from support.figure_three_table import TIMES, check_table

SMALL = {"betas": [0.5, 3.0], "times": [0.0, 1.0, 2.0, 4.0], "start": hs.Uniform(n=5, dim=3), "delta": 0.1}


@pytest.mark.parametrize("dim", [2, 32, 128])
def test_the_table(dim):
    check_table(dim, samples=32, times=TIMES[:5], seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [2, 32, 128, 512])
def test_the_whole_table(dim):
    check_table(dim, samples=512, times=TIMES, seed=1)


@pytest.mark.parametrize(("dim", "delta"), [(2, 1e-3), (3, 0.1), (40, 0.7)])
def test_at_time_0_it_is_the_law_of_two_uniform_tokens(dim, delta):
    seen = phase_diagram(hs.SA, betas=[1], times=[0], start=hs.Uniform(32, dim), samples=400, delta=delta)
    p, error = float(seen.probability[0, 0]), float(seen.probability_stderr[0, 0])
    assert abs(p - initial_close_pair_probability(dim=dim, delta=delta)) < 4 * error


# A naive program ------------------------------------------------------------------------------------------------------


def velocity(x, beta, *, metric=None, value=1.0, causal=False, normalized=True):
    """Loops over tokens."""
    out = np.zeros_like(x)
    n, d = x.shape
    b = np.eye(d) if metric is None else metric
    for i in range(n):
        keys = range(i + 1) if causal else range(n)
        weights = {j: math.exp(beta * (x[i] @ b @ x[j])) for j in keys}
        total = sum(weights.values()) if normalized else n
        pull = sum((weights[j] * value * x[j] for j in keys), np.zeros(d)) / total
        out[i] = pull - (pull @ x[i]) * x[i]
    return out


def naive_probability(x, beta, times, delta, **options):
    def right(_, y):
        return velocity(y.reshape(x.shape), beta, **options).ravel()

    path = solve_ivp(right, (0, max(times)), x.ravel(), t_eval=times, rtol=1e-9, atol=1e-10).y
    n = len(x)
    pairs = [(i, j) for i in range(n) for j in range(n) if i < j]
    shares = []
    for column in path.T:
        y = column.reshape(x.shape)
        shares.append(
            np.mean([y[i] @ y[j] / np.linalg.norm(y[i]) / np.linalg.norm(y[j]) >= 1 - delta for i, j in pairs])
        )
    return np.array(shares)


METRIC = np.array([[1.0, 0.3, 0.0], [0.3, 0.5, -0.2], [0.0, -0.2, 0.7]])
FLOWS = {
    "SA": (hs.SA, {}),
    "USA": (hs.USA, {"normalized": False}),
    "causal": (lambda beta: hs.SA(beta, causal=True), {"causal": True}),
    "V = -I": (lambda beta: hs.SA(beta, value=-torch.eye(3)), {"value": -1.0}),
    "symmetric B": (lambda beta: hs.SA(beta, query_key=torch.tensor(METRIC)), {"metric": METRIC}),
}


@pytest.mark.parametrize("name", FLOWS)
def test_it_is_what_a_naive_program_finds(name):
    field, options = FLOWS[name]
    seen = phase_diagram(field, **SMALL, samples=3, seed=5)
    for k, beta in enumerate(SMALL["betas"]):
        starts = SMALL["start"].sample(3, seed=5).numpy()
        shares = np.stack([naive_probability(x, beta, SMALL["times"], SMALL["delta"], **options) for x in starts])
        assert np.abs(seen.probability[k].values - shares.mean(0)).max() < 1e-12
        assert np.abs(seen.probability_stderr[k].values - shares.std(0, ddof=1) / math.sqrt(3)).max() < 1e-12
    if name == "V = -I":
        assert float(seen.probability[0, -1]) < float(seen.probability[0, 0]) + 1e-12
    else:
        assert float(seen.probability[0, -1]) > float(seen.probability[0, 0])


def test_the_published_scheme_is_that_of_the_paper():
    """x -> N(x + 0.1 A(x) x), by loops, and linear between its steps."""
    seen = published_scheme_probability(hs.SA, **SMALL | {"times": [0.0, 0.3, 2.0, 2.05]}, samples=2, seed=5)
    starts = SMALL["start"].sample(2, seed=5).numpy()
    for k, beta in enumerate(SMALL["betas"]):
        shares = []
        for x in starts:
            states = [x]
            for _ in range(21):
                x = states[-1]
                weights = np.exp(beta * x @ x.T)
                moved = x + 0.1 * (weights / weights.sum(1, keepdims=True)) @ x
                states.append(moved / np.linalg.norm(moved, axis=1, keepdims=True))
            grams = [(y @ y.T)[np.triu_indices(5, 1)] for y in states]
            shares.append([np.mean(g >= 1 - SMALL["delta"]) for g in grams])
        mean = np.mean(shares, axis=0)
        expected = [mean[0], mean[3], mean[20], (mean[20] + mean[21]) / 2]
        assert np.abs(seen.probability_published[k].values - expected).max() < 1e-12


def test_the_published_scheme_is_late():
    """d = 8, beta = 1, t = 5: .048 against .131."""
    case = {"betas": [1.0], "times": [5.0], "start": hs.Uniform(32, 8), "samples": 384, "seed": 2}
    for seen, name, expected in (
        (phase_diagram(hs.SA, **case), "probability", 0.131),
        (published_scheme_probability(hs.SA, **case), "probability_published", 0.048),
    ):
        off = abs(float(seen[name][0, 0]) - expected)
        assert off < 4 * float(seen[f"{name}_stderr"][0, 0]) < 0.04


# Symmetry -------------------------------------------------------------------------------------------------------------

ROTATING = {
    "SA": lambda beta: hs.SA(beta),
    "USA": lambda beta: hs.USA(beta),
    "V = -I": lambda beta: hs.SA(beta, value=-torch.eye(20)),
    "causal": lambda beta: hs.SA(beta, causal=True),
}


def hidden(field):
    """The same flow as a plain function, of which nobody knows that it commutes with rotations or attracts."""
    return lambda beta: lambda x: field(beta).velocity(x)


@pytest.mark.parametrize("name", ROTATING)
def test_in_the_span_of_its_tokens_a_flow_is_the_same(name):
    """Gram matrices of the run in R^6 and in R^20: measured 1e-15."""
    field, start = ROTATING[name], hs.VonMisesFisher(n=6, dim=20, kappa=4.0)
    full, small = start.sample(4, seed=1), start.sample_in_span(4, seed=1)
    assert small.shape == (4, 6, 6)
    far = hs.integrate(hidden(field)(2.0), full, [3.0], stepper=hs.RK4(0.02)).states[-1]
    near = hs.integrate(field(2.0).restricted(6), small, [3.0], stepper=hs.RK4(0.02)).states[-1]
    assert (far @ far.mT - near @ near.mT).abs().max() < 1e-13
    case = {"betas": [2.0], "times": [1.0, 2.0, 3.0], "start": start, "samples": 4, "seed": 1, "delta": 0.1}
    mine, plain = phase_diagram(field, **case), phase_diagram(hidden(field), **case)
    assert (mine.attrs["integration_dim"], plain.attrs["integration_dim"]) == (6, 20)
    assert np.array_equal(mine.probability.values, plain.probability.values)


def test_a_million_dimensions_follow_the_curve():
    """Tokens in 2^20 dimensions are orthogonal but for 1e-3, so t_half is t*: measured to 2e-4."""
    times = np.linspace(5.1, 5.55, 91)
    case = {"times": times, "start": hs.Uniform(32, 2**20), "samples": 8}
    seen = phase_diagram(hs.SA, betas=[0.0, 2.0], **case)
    assert seen.attrs["integration_dim"] == 32
    assert seen.hitting_time.values.tolist() == [hs.hitting_time(hs.SA(beta), n=32, delta=1e-3) for beta in (0.0, 2.0)]
    found = half_time(seen)
    assert not found.censored.any()
    assert abs(found.relative_error).max() < 5e-4


def test_where_the_flow_does_not_commute_all_dimensions_are_carried():
    metric = torch.diag(torch.linspace(0.5, 1.0, 7, dtype=torch.float64))
    case = {"betas": [1.0], "times": [1.0], "start": hs.Uniform(4, 7), "samples": 2}
    assert phase_diagram(lambda beta: hs.SA(beta, query_key=metric), **case).attrs["integration_dim"] == 7
    noise = hs.noise.IsotropicNoise(0.1)
    assert phase_diagram(hs.SA, noise=noise, **case).attrs["integration_dim"] == 7
    assert phase_diagram(hs.SA, **case).attrs["integration_dim"] == 4


# How it is carried ----------------------------------------------------------------------------------------------------


def test_systems_that_have_met_end_and_it_changes_nothing(monkeypatch):
    seen_at, looked = [], []

    def spy(flow, x, times, **options):
        seen_at.append(len(times))
        return make_problem(flow, x, times, **options)

    def count(x, **options):
        looked.append(len(x))
        return close_pair_share(x, **options)

    make_problem, close_pair_share = module.make_problem, module.close_pair_share
    monkeypatch.setattr(module, "make_problem", spy)
    case = SMALL | {"betas": [0.5], "times": np.linspace(0, 12, 25), "samples": 12}
    seen = phase_diagram(hs.SA, **case)
    assert seen_at == [25]  # one integration, not one for each block of times
    monkeypatch.setattr(module, "close_pair_share", count)
    phase_diagram(hs.SA, **case)
    shorter = sum(looked)
    monkeypatch.setattr(module.Sweep, "_meeting_is_final", lambda sweep, flow: False)
    looked.clear()
    assert np.array_equal(phase_diagram(hs.SA, **case).probability.values, seen.probability.values)
    assert shorter < sum(looked)
    plain = phase_diagram(hidden(hs.SA), **case)
    assert np.array_equal(plain.probability.values, seen.probability.values)


def test_where_met_pairs_may_part_nothing_ends(monkeypatch):
    asked = []

    def spy(flow, x, times, **options):
        asked.append(options["events"])
        return make_problem(flow, x, times, **options)

    make_problem = module.make_problem
    monkeypatch.setattr(module, "make_problem", spy)
    phase_diagram(lambda beta: hs.SA(beta, value=-torch.eye(3)), **SMALL, samples=2)
    phase_diagram(hs.SA, **SMALL | {"delta": 1.5}, samples=2)
    phase_diagram(hs.SA, **SMALL, samples=2, noise=hs.noise.IsotropicNoise(0.1))
    assert asked == [[]] * 6


def test_a_flow_that_changes_with_time_sees_the_time_of_the_run():
    """Attraction of strength cos(pi t): two tokens at angle a have tan(a(t)/2) = tan(a/2) exp(-sin(pi t) / pi)."""

    def swinging(beta):
        def flow(x, *, t):
            return torch.cos(math.pi * torch.as_tensor(t)) * hs.SA(beta=0.0).velocity(x)

        return flow

    case = {"betas": [0.0], "times": np.linspace(0.2, 1.6, 8), "start": hs.Uniform(2, 2), "samples": 64, "delta": 0.1}
    seen = phase_diagram(swinging, **case).probability[0].values
    angle = hs.sphere.angle(*hs.Uniform(2, 2).sample(64).unbind(-2))
    shrunk = [(angle / 2).tan() * math.exp(-math.sin(math.pi * t) / math.pi) for t in case["times"]]
    expected = [float((torch.cos(2 * half.atan()) >= 0.9).double().mean()) for half in shrunk]
    assert max(expected) > 1.3 * min(expected)
    assert np.allclose(seen, expected, rtol=0, atol=1e-12)


def test_the_states_at_all_times_need_not_fit_the_memory(monkeypatch):
    """Only shares are kept: 100 times, where the memory holds the states of 50."""
    monkeypatch.setattr("helmscope.types.arguments.os.sysconf", lambda name: 8 * 32 if "SIZE" in name else 50)
    case = {"betas": [0.0], "start": hs.Uniform(2, 2), "samples": 8, "delta": 0.1}
    times = np.linspace(0, 1, 100)
    with pytest.raises(hs.HelmscopeError, match="times holds 100"):
        hs.integrate(hs.SA(0.0), hs.Uniform(2, 2).sample(8), times)
    few, many = (phase_diagram(hs.SA, **case, times=asked) for asked in (times[[0, -1]], times))
    assert np.array_equal(many.probability.values[:, [0, -1]], few.probability.values)


def test_the_tolerance_is_fine_enough():
    case = {"betas": [1.0, 9.0], "times": np.linspace(1, 15, 15), "start": hs.Uniform(16, 4), "samples": 16}
    coarse = phase_diagram(hs.SA, **case)
    fine = phase_diagram(hs.SA, **case, stepper=hs.DormandPrince(tol=1e-9))
    assert "tol=1e-06" in coarse.attrs["stepper"]
    assert "tol=1e-09" in fine.attrs["stepper"]
    assert np.array_equal(coarse.probability.values, fine.probability.values)


def test_noise_is_that_of_integrate_and_chunks_do_not_matter(monkeypatch):
    noise = hs.noise.IsotropicNoise(0.05)
    seen = phase_diagram(hs.SA, **SMALL, samples=5, seed=4, noise=noise)
    x = SMALL["start"].sample(5, seed=4)
    for k, beta in enumerate(SMALL["betas"]):
        run = hs.integrate(hs.SA(beta), x, SMALL["times"], noise=noise, seed=4)
        expected = hs.reduce_replicates(hs.close_pair_shares(run, delta=0.1))
        assert np.allclose(seen.probability[k].values, expected.close_pair_share.values, rtol=0, atol=1e-15)
        assert np.allclose(
            seen.probability_stderr[k].values, expected.close_pair_share_stderr.values, rtol=0, atol=1e-15
        )
    assert seen.hitting_time.isnull().all()
    monkeypatch.setattr(module, "PAIRS", {"cpu": 60})  # two systems at once
    assert phase_diagram(hs.SA, **SMALL, samples=5, seed=4, noise=noise).equals(seen)


def test_a_field_that_jumps_has_the_stepper_of_integrate():
    seen = phase_diagram(lambda beta: hs.Hardmax(), **SMALL | {"betas": [0.0]}, samples=2)
    run = hs.integrate(hs.Hardmax(), SMALL["start"].sample(2), SMALL["times"])
    expected = hs.reduce_replicates(hs.close_pair_shares(run, delta=0.1)).close_pair_share.values
    assert np.array_equal(seen.probability[0].values, expected)
    assert seen.attrs["stepper"] == "Heun(h=0.01)"


def test_merging_reaches_the_integrator():
    case = SMALL | {"samples": 6, "seed": 1}
    merged = phase_diagram(hs.SA, **case, merge=0.01)
    assert np.array_equal(merged.probability.values, phase_diagram(hs.SA, **case).probability.values)
    with pytest.raises(hs.HelmscopeError, match="merge is -1"):
        phase_diagram(hs.SA, **case, merge=-1.0)


def test_the_fused_kernel_gives_the_same():
    """Under Triton's interpreter, in float32: measured equal."""
    case = {"betas": [0.5, 1.0], "times": [0.2, 0.5], "start": hs.Uniform(4, 9), "samples": 2, "delta": 0.5}
    for field in (hs.SA, hs.USA, lambda beta: hs.SA(beta, causal=True, value=-torch.eye(9))):
        fast, slow = (phase_diagram(field, **case, dtype=dtype) for dtype in (torch.float32, torch.float64))
        assert (fast.attrs["summation"], fast.attrs["dtype"], fast.attrs["integration_dim"]) == ("Fused", "float32", 4)
        assert (slow.attrs["summation"], slow.attrs["dtype"]) == ("Dense", "float64")
        assert np.allclose(fast.probability.values, slow.probability.values, rtol=0, atol=1e-12)
        assert np.allclose(fast.probability_stderr.values, slow.probability_stderr.values, rtol=0, atol=1e-12)
    others = [
        (hs.SA, {"stepper": hs.RK4(0.1)}),
        (lambda beta: hs.SA(beta, bias=torch.zeros(4, 4)), {}),
        (lambda beta: hs.SA(beta, query_key=torch.eye(9) * torch.arange(9)), {}),
        (lambda beta: (hs.SA if beta < 1 else hs.USA)(beta), {}),
        (lambda beta: hs.SinkhornAttention(beta), {}),
    ]
    for field, options in others:
        assert phase_diagram(field, **case, dtype=torch.float32, **options).attrs["summation"] == "Dense"


# What is lost, said and refused ---------------------------------------------------------------------------------------


def test_what_the_fused_kernel_is_asked_for():
    """Steps for the rates of each flow, B = 2 I as beta, V with its size; nothing that would take for ever."""
    x = hs.Uniform(4, 3).sample(2, seed=0, dtype=torch.float32)
    eye = torch.eye(3)

    def of(*flows, times=(0.32, 0.64)):
        return FusedShares.of(list(flows), x, list(times), 1e-3)

    assert of(hs.SA(1.0), hs.SA(9.0), hs.SA(40.0)).steps.tolist() == [2, 2, 8]
    assert of(hs.SA(1.0, value=-3 * eye)).steps.tolist() == [6]
    assert of(hs.SA(1.0, value=-3 * eye)).values.tolist() == [-3.0]
    assert of(hs.SA(3.0, query_key=2 * eye)).betas.tolist() == [6.0]
    assert of(hs.USA(2.0)).steps.tolist() == [math.ceil(0.32 * math.exp(2) / 0.25)]
    assert of(hs.SA(1.0), times=(0.1, 2.1)).steps.tolist() == [13]  # the longest interval
    assert of(hs.USA(20.0)) is None
    assert of(hs.SA(1.0, query_key=-eye)) is None
    assert of(hs.SA(1.0), hs.USA(1.0)) is None
    with hs.kernels.using_summation(hs.kernels.Dense()):
        start = hs.Uniform(4, 3)
        seen = phase_diagram(hs.SA, betas=[1], times=[1], start=start, samples=2, dtype=torch.float32)
    assert seen.attrs["summation"] == "Dense"
    broken = replace(of(hs.SA(1.0)), x0=torch.cat([x[:1], x[:1] * torch.nan]))
    (share,) = broken.shares(lambda done: None)
    assert share.isnan().all(-1).tolist() == [[False, True]]


def test_a_sample_that_cannot_be_carried_is_counted_named_and_left_out(caplog):
    start = SMALL["start"].sample(6, seed=2)
    bad = float(start[:, 0, 0].max())

    def broken(beta):
        def flow(x):
            v = hs.SA(beta).velocity(x)
            mark = (x[..., :1, :1] > bad - 1e-9) & (beta > 1)
            return torch.where(mark, torch.nan, v)

        return flow

    with caplog.at_level(logging.WARNING, logger="helmscope.observe.phase"):
        seen = phase_diagram(broken, **SMALL, samples=6, seed=2)
    which = int(start[:, 0, 0].argmax())
    assert seen.lost_samples.values.tolist() == [0, 1]
    assert f"beta = 3: 1 of 6 samples are lost: [{which}]" in caplog.text
    rest = torch.tensor([i for i in range(6) if i != which])
    run = hs.integrate(hs.SA(3.0), start[rest], SMALL["times"])
    expected = hs.reduce_replicates(hs.close_pair_shares(run, delta=0.1))
    assert np.allclose(seen.probability[1].values, expected.close_pair_share.values, rtol=0, atol=1e-12)
    assert np.allclose(seen.probability_stderr[1].values, expected.close_pair_share_stderr.values, rtol=0, atol=1e-12)


def test_where_all_are_lost_there_is_no_number():
    seen = phase_diagram(hs.USA, **SMALL | {"betas": [1.0, 800.0]}, samples=2)
    assert seen.lost_samples.values.tolist() == [0, 2]
    assert np.isnan(seen.probability[1]).all()
    assert np.isfinite(seen.probability[0]).all()


def test_seeds_repeat_and_differ():
    first = phase_diagram(hs.SA, **SMALL, samples=4, seed=1)
    assert first.identical(phase_diagram(hs.SA, **SMALL, samples=4, seed=1))
    other = phase_diagram(hs.SA, **SMALL, samples=4, seed=2)
    assert not np.array_equal(first.probability.values, other.probability.values)


def test_what_it_says_of_itself(tmp_path):
    shares = []
    seen = phase_diagram(hs.SA, **SMALL, samples=4, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    expected = {
        "n": 4,
        "replicate": "sample",
        "tokens": 5,
        "dim": 3,
        "delta": 0.1,
        "flow": "SA",
        "seed": 0,
        "summation": "Dense",
        "dtype": "float64",
    }
    assert expected.items() <= seen.attrs.items()
    assert seen.probability.dims == ("beta", "time")
    run = hs.store.RunFolder.create(tmp_path / "run")
    run.write_results("phase", seen)
    assert run.read_results("phase").identical(seen)
    value = phase_diagram(lambda beta: hs.USA(beta, causal=True, value=-2 * torch.eye(3)), **SMALL, samples=1)
    assert value.attrs["flow"] == "USA, causal, V = -2 I"
    assert np.isnan(value.probability_stderr).all()
    assert value.hitting_time.isnull().all()


REFUSED = [
    ({"field": 4.0}, "field is a float"),
    ({"field": hs.SA(1.0)}, r"field is SA.*, but it must be a callable beta -> field: pass SA, not SA\(\.\.\.\)"),
    ({"field": lambda beta: 3}, "field returns 3 at beta = 0.5"),
    ({"betas": []}, "betas is"),
    ({"betas": 3.0}, "betas is 3.0"),
    ({"betas": [1, -1]}, r"betas\[1\] is -1"),
    ({"betas": [2, 1]}, r"betas\[1\] is 1 after 2"),
    ({"betas": [math.nan]}, r"betas\[0\] is nan"),
    ({"times": [2, 1]}, r"times\[1\] is 1 after 2"),
    ({"start": hs.Uniform}, "start is"),
    ({"start": hs.Uniform(1, 3)}, "n of start is 1, but a pair needs two tokens"),
    ({"samples": 0}, "samples is 0"),
    ({"samples": 10**400}, "samples is 10{70}"),
    ({"samples": 10**12}, "samples is 10{12}, n of start is .*, but that makes"),
    ({"delta": -1}, "delta is -1"),
    ({"seed": -1}, "seed is -1"),
    ({"device": "nosuch"}, "device is 'nosuch'"),
    ({"dtype": torch.float16}, "dtype is torch.float16"),
    ({"field": lambda beta: hs.SA(beta, value=torch.eye(2))}, "value has shape"),
    ({"field": lambda beta: hs.SA(beta, value=torch.eye(2)), "dtype": torch.float32}, "value has shape"),
    ({"stepper": 3}, "stepper is 3"),
    ({"stepper": hs.solve.EulerMaruyama(0.1)}, "EulerMaruyama needs noise"),
    ({"noise": 0.1}, "noise is 0.1"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_refusals(change, said):
    given = {"field": hs.SA, **SMALL, "samples": 2} | change
    with pytest.raises(hs.HelmscopeError, match=said):
        phase_diagram(given.pop("field"), **given)


# Half of the pairs ----------------------------------------------------------------------------------------------------


def made(rows, times, *, errors=0.0, curve=None):
    """A diagram with these probabilities."""
    p = np.array(rows, dtype=float)
    axes = ("beta", "time")
    coords = {"beta": np.arange(len(p), dtype=float), "time": times}
    if curve is not None:
        coords["hitting_time"] = ("beta", curve)
    error = np.broadcast_to(np.array(errors, dtype=float), p.shape).copy()
    return xr.Dataset({"probability": (axes, p), "probability_stderr": (axes, error)}, coords, {"n": 7})


def test_half_times_and_their_intervals():
    times = np.linspace(0, 10, 101)
    rise = 1 / (1 + np.exp(-(times - 4.33)))  # reaches 1/2 at 4.33, 1/2 -+ 0.1 at 4.33 -+ 0.405
    found = half_time(made([rise], times, errors=0.05, curve=[4.0]))
    assert abs(float(found.half_time[0]) - 4.33) < 1e-4  # linear between times: measured 5e-6
    assert float(found.half_time_low[0]) == pytest.approx(3.9)  # the looks around 3.92 and 4.74
    assert float(found.half_time_high[0]) == pytest.approx(4.8)
    assert abs(float(found.relative_error[0]) - (4.33 / 4 - 1)) < 1e-4
    assert float(found.relative_error_low[0]) < float(found.relative_error[0]) < float(found.relative_error_high[0])
    assert (found.attrs["n"], bool(found.censored[0])) == (7, False)


def test_half_times_that_were_not_seen_are_censored():
    times = [1.0, 2.0, 3.0]
    rows = [[0.0, 0.1, 0.49], [0.6, 0.9, 1.0], [0.0, 0.4, 0.52], [0.0, 0.6, 0.3], [np.nan] * 3, [0.0, 0.0, 0.5]]
    found = half_time(made(rows, times, errors=0.02))
    assert found.censored.values.tolist() == [True, True, False, False, True, False]
    ends = np.stack([found[f"half_time{side}"].values for side in ("_low", "", "_high")], axis=-1)
    expected = [
        [2.0, np.nan, np.inf],  # the upper band reaches 1/2 after the second look
        [0.0, np.nan, 1.0],  # before the first time; the lower band, at .56, too
        [2.0, 2 + 0.1 / 0.12, np.inf],  # the lower band stops at .48
        [1.0, 1 + 0.5 / 0.6, 2.0],  # the first time counts
        [np.nan] * 3,
        [2.0, 3.0, np.inf],
    ]
    np.testing.assert_allclose(ends, expected, rtol=0, atol=1e-12)
    assert "relative_error" not in found
    never = half_time(made([[0.0, 0.0, 0.1]], times))
    assert (float(never.half_time_low[0]), float(never.half_time_high[0])) == (3.0, np.inf)


def test_half_times_at_the_start_and_of_one_sample():
    found = half_time(made([[0.7, 0.9]], [0.0, 1.0]))
    assert (float(found.half_time[0]), bool(found.censored[0])) == (0.0, False)
    alone = half_time(made([[0.0, 1.0]], [0.0, 1.0], errors=np.nan))
    assert float(alone.half_time[0]) == 0.5
    assert np.isnan(alone.half_time_low[0])
    assert np.isnan(alone.half_time_high[0])


def test_half_times_of_several_dimensions():
    one, two = made([[0.0, 1.0]], [0.0, 1.0]), made([[0.0, 0.8]], [0.0, 1.0])
    both = xr.concat([one, two], dim="dim")
    assert half_time(both).half_time.values.tolist() == [[0.5], [0.625]]
    with pytest.raises(hs.HelmscopeError, match="diagram has no 'probability' over time"):
        half_time(one.isel(time=0, drop=True))


def test_a_dimension_beyond_all_tensors_costs_what_n_costs():
    seen = hs.phase_diagram(hs.SA, betas=[1], times=[9], start=hs.Uniform(n=4, dim=10**18), samples=2)
    assert seen.probability.item() == 1


@pytest.mark.parametrize("size", [5, 20])
def test_a_value_of_another_size_is_refused_in_the_span_too(size):
    field = partial(hs.SA, value=2 * torch.eye(size, dtype=torch.float64))
    with pytest.raises(hs.HelmscopeError, match=rf"value has shape \({size}, {size}\), but tokens of shape \(6, 8\)"):
        hs.phase_diagram(field, betas=[1], times=[1], start=hs.Uniform(n=6, dim=8), samples=2)
    for fits in (6, 8):
        field = partial(hs.SA, value=2 * torch.eye(fits, dtype=torch.float64))
        hs.phase_diagram(field, betas=[1], times=[1], start=hs.Uniform(n=6, dim=8), samples=2)


def test_the_interval_of_a_diagram_is_that_of_the_same_systems_reduced():
    """Also where all pairs of all systems have met."""
    start, times = hs.Uniform(n=4, dim=3), [0.0, 2.0, 40.0]
    diagram = phase_diagram(hs.SA, betas=[1.0], times=times, start=start, samples=4, stepper=hs.DormandPrince())
    simulation = hs.integrate(hs.SA(1.0), start.sample(4, seed=0, dtype=torch.float64), times)
    reduced = hs.reduce_replicates(hs.observe.close_pair_shares(simulation, delta=1e-3))
    for end in ("", "_stderr"):
        here = reduced[f"close_pair_share{end}"].values
        assert diagram[f"probability{end}"].values[0] == pytest.approx(here, abs=1e-12)
    last = reduced.isel(time=-1)
    assert (float(diagram.probability[0, -1]), float(last.close_pair_share_low)) == (1.0, 1.0)
