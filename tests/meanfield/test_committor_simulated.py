"""Committors by simulation: the zonal closed form, undecided paths, and noise that is missing or degenerate."""

from __future__ import annotations

import math

import pytest
import torch

import helmscope as hs
from helmscope.fields.noise import IsotropicNoise, MatrixNoise
from helmscope.meanfield import Cap, HittingCounts, simulated_committor, zonal_committor
from helmscope.solve.euler_maruyama import EulerMaruyama

UP = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
SETS = {"a": Cap(-UP, min_cosine=0.8), "b": Cap(UP, min_cosine=0.8)}
START = torch.tensor([[1.0, 0.0, 0.0], [math.sqrt(0.91), 0.0, 0.3]], dtype=torch.float64)
NOISE = IsotropicNoise(nu=0.5)


def upward(x):
    return UP.expand_as(x)


def simulate(field=upward, x=START, *, paths=600, h=0.02, horizon=20.0, **options):
    arguments = {"noise": NOISE, "stepper": EulerMaruyama(h), **SETS, **options}
    return simulated_committor(field, x, horizon=horizon, paths=paths, **arguments)


def test_the_share_of_paths_agrees_with_the_closed_form() -> None:
    shares = simulate(seed=1)
    assert int(shares.undecided.sum()) == 0
    assert (shares.reached_a + shares.reached_b == 600).all()
    expected = zonal_committor(START[:, 2], dim=3, nu=0.5, low=-0.8, high=0.8, potential=lambda s: s).tolist()
    for interval, q in zip(shares.intervals(confidence=0.999), expected, strict=True):
        assert interval.low < q < interval.high
        assert interval.n == 600
    wrong = [  # a wrong sign of U, a factor 2 in nu
        zonal_committor(START[:, 2], dim=3, nu=nu, low=-0.8, high=0.8, potential=lambda s, sign=sign: sign * s).tolist()
        for nu, sign in ((0.5, -1), (1.0, 1), (0.25, 1))
    ]
    for values in wrong:
        assert any(
            not interval.low < q < interval.high
            for interval, q in zip(shares.intervals(confidence=0.999), values, strict=True)
        )


@pytest.mark.slow
def test_many_paths_agree_with_the_closed_form_and_show_the_overshoot() -> None:
    """At h = 0.02 sets that were not enlarged would be missed by 0.58 sqrt(2 nu h) = 0.08 radians."""
    x = torch.tensor([[math.sqrt(0.75), 0.0, 0.5]], dtype=torch.float64)
    (interval,) = simulate(torch.zeros_like, x, paths=20_000).intervals(confidence=0.999)
    exact = [float(zonal_committor(0.5, dim=3, nu=1.0, low=-s, high=s)) for s in (0.8, math.cos(math.acos(0.8) - 0.08))]
    assert interval.low < exact[0] < interval.high
    assert not interval.low < exact[1] < interval.high


def test_paths_that_reach_neither_set_are_reported() -> None:
    shares = simulate(paths=50, horizon=0.3)
    assert 0 < int(shares.undecided.sum()) < 100
    for k, interval in enumerate(shares.intervals()):
        a, b, undecided = (int(part[k]) for part in (shares.reached_a, shares.reached_b, shares.undecided))
        assert a + b + undecided == 50
        assert interval.low <= b / 50 <= (b + undecided) / 50 <= interval.high
        assert interval.estimate == b / (a + b)
    with pytest.raises(hs.HelmscopeError, match="undecided is 5 of 5 paths of start 0: raise horizon"):
        HittingCounts(torch.tensor([0]), torch.tensor([0]), torch.tensor([5]), paths=5).intervals()


def test_starts_inside_a_set_are_decided_at_once() -> None:
    shares = simulate(x=torch.stack([UP, -UP]), paths=3)
    assert shares.reached_b.tolist() == [3, 0]
    assert shares.reached_a.tolist() == [0, 3]


def test_a_seed_makes_it_repeatable() -> None:
    one, same, other = (simulate(paths=40, seed=seed).reached_b.tolist() for seed in (5, 5, 6))
    assert one == same
    assert one != other


def test_anisotropic_noise_is_accepted_where_it_is_regular() -> None:
    sigma = torch.diag(torch.tensor([1.0, 0.9, 1.1], dtype=torch.float64))
    assert int(simulate(noise=MatrixNoise(sigma), paths=20).undecided.sum()) == 0


def test_an_mlp_is_a_drift() -> None:
    """f = 2 x_3 e_3, as two ReLU neurons: it points away from the equator, and q(0) = 1/2."""
    w_in = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    mlp = hs.MLP(w_in=w_in, w_out=2 * w_in.T, activation=hs.activations.ReLU())
    (interval,) = simulate(mlp, START[:1], paths=200).intervals(confidence=0.999)
    assert interval.low < 0.5 < interval.high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": None}, "noise is None, but a committor needs noise, such as IsotropicNoise"),
        ({"noise": 0.5}, "noise is 0.5, but it must be a noise"),
        ({"noise": IsotropicNoise(nu=0.0)}, "but a committor needs Sigma > 0 on the tangent space"),
        ({"noise": MatrixNoise(torch.diag(torch.tensor([1.0, 0.0, 1.0])))}, "needs Sigma > 0 on the tangent space"),
        ({"horizon": 0.0}, "horizon is 0.0, but"),
        ({"paths": 0}, "paths is 0, but it must be a whole number >= 1"),
        ({"stepper": hs.RK4(h=0.1)}, "stepper is RK4.*, but it must be a stochastic one"),
        (
            {"a": Cap(-UP, min_cosine=0.01), "b": Cap(UP, min_cosine=0.01)},
            "h=0.005, but with steps so large a and b cannot",
        ),
        ({"field": hs.SA(beta=1.0)}, "whose tokens attend to each other"),
        ({"x": START[None]}, r"x has shape \(1, 2, 3\)"),
        ({"b": Cap(-UP, min_cosine=0.9)}, "b overlaps with a by"),
    ],
)
def test_bad_input_is_refused(options: dict, message: str) -> None:
    arguments = {"field": upward, "x": START, "noise": NOISE, "horizon": 1.0, "paths": 2, **SETS, **options}
    with pytest.raises(hs.HelmscopeError, match=message):
        simulated_committor(arguments.pop("field"), arguments.pop("x"), **arguments)
