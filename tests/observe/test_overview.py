"""The overview of a trajectory: equal however many times are computed at once."""

from __future__ import annotations

import sys

import pytest
import torch

import helmscope as hs
from support.model_families import letters, tiny_model
from support.refusal import refused

STATES = hs.Uniform(n=6, dim=4).sample(15, seed=0).reshape(5, 3, 6, 4)
TIMES = torch.arange(5.0)


@pytest.mark.parametrize("weights", [None, (1, 3, 6), (5, 3, 6)])
def test_the_number_of_times_at_once_changes_nothing(monkeypatch, weights):
    generator = torch.Generator().manual_seed(1)
    drawn = None if weights is None else torch.rand(weights, generator=generator, dtype=torch.float64)
    path = hs.Trajectory(TIMES, STATES, drawn, axis="depth", replicate="prompt")
    whole, shares = hs.overview(path, beta=2.0), []
    monkeypatch.setattr(sys.modules["helmscope.observe.overview"], "PAIRS_AT_ONCE", 2 * 3 * 7**2)
    parts = hs.overview(path, beta=2.0, progress=shares.append)
    assert parts.identical(whole)
    assert parts.order_parameter.dims == ("depth", "prompt")
    assert len(shares) == 18  # six observables of three parts, the last of which is shorter
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_beta_of_a_simulation_is_that_of_its_field():
    start = hs.Uniform(n=4, dim=3).sample(2, seed=0)
    for field in (hs.SA(beta=3.0), hs.USA(beta=torch.full((2,), 3.0))):
        run = hs.integrate(field, start, times=[0.0, 0.1])
        assert hs.overview(run).identical(hs.overview(run, beta=3.0))
        assert hs.overview(run, beta=1.0).attrs["beta"] == 1.0  # another one on request
    several = hs.integrate(hs.SA(beta=torch.tensor([1.0, 2.0])), start, times=[0.0])
    refused(lambda: hs.overview(several), "beta is missing", "have several")


def test_without_beta_the_energy_is_left_out():
    path = hs.Trajectory(TIMES, STATES, axis="depth", replicate="prompt")
    run = hs.integrate(lambda x: 0 * x, torch.eye(3), times=[0.0])
    for system in (path, hs.Trajectory(TIMES, STATES), run):
        seen, full = hs.overview(system), hs.overview(system, beta=2.0)
        assert set(full) - set(seen) == {"interaction_energy"}
        assert seen.identical(full.drop_vars("interaction_energy").drop_attrs(deep=False).assign_attrs(seen.attrs))
        assert set(full.attrs) - set(seen.attrs) == {"beta"}


def test_clusters_per_token_are_those_of_a_hand_count():
    """Five tokens on a circle at 0, 50, 100, 200 and 300 degrees, the last two of which are padding in one text."""
    angles = torch.deg2rad(torch.tensor([0.0, 50.0, 100.0, 200.0, 300.0], dtype=torch.float64))
    cloud = torch.stack([angles.cos(), angles.sin()], -1).expand(1, 2, 5, 2)
    weights = torch.tensor([[[1.0] * 5, [1.0, 1.0, 1.0, 0.0, 0.0]]], dtype=torch.float64)
    path = hs.Trajectory(torch.zeros(1), cloud, weights, axis="depth", replicate="prompt")
    # within 57 degrees 0, 50 and 100 are one cluster; within 63 also 300; within 29 every token is alone
    assert hs.overview(path, max_angle=1.0).clusters_per_token.values.tolist() == [[3 / 5, 1 / 3]]
    assert hs.overview(path, max_angle=1.1).clusters_per_token.values.tolist() == [[2 / 5, 1 / 3]]
    assert hs.overview(path, max_angle=0.5).clusters_per_token.values.tolist() == [[1.0, 1.0]]


def test_longer_texts_have_more_clusters_but_no_more_of_them_per_token():
    recording = hs.record(
        "A", ["Once upon a time there was a cat.", "One day, a big dog ran to the red house. It sat."]
    )
    seen, tokens = hs.overview(recording), recording.trajectory.weights[0].sum(-1).numpy()
    count = hs.track(recording, n=lambda x, weights: hs.cluster_count(x, max_angle=seen.max_angle, weights=weights)).n
    assert seen.clusters_per_token.values == pytest.approx(count.values / tokens)
    assert tokens[1] > 1.5 * tokens[0]


def test_texts_without_pairs_are_named_by_a_warning():
    model, words = tiny_model("gpt2"), letters(framed=False)
    with pytest.warns(UserWarning, match=r"pairs are undefined \(NaN\) for texts\[0\] and 1 more, .* leave them out"):
        seen = hs.overview(hs.record(model, ["a", "b c", "d"], tokenizer=words), beta=1.0)
    assert seen.mean_inner_product.isnull().all("depth").values.tolist() == [True, False, True]
    with pytest.warns(UserWarning, match=r"for texts\[0\], of which too few tokens count: means leave it out"):
        hs.overview(hs.record(model, ["a"], tokenizer=words), beta=1.0)


def test_measurements_say_what_they_are_of():
    simulation = hs.integrate(hs.SA(beta=4.0), torch.eye(3), times=[0.0, 1.0], noise=hs.fields.IsotropicNoise(nu=0.1))
    told = {"system": "SA(beta=4) with IsotropicNoise(nu=0.1)"}
    assert told.items() <= hs.overview(simulation).attrs.items()
    assert told.items() <= hs.measure(simulation, only=["depth_steps", "arc_length"])["depth_steps"].attrs.items()
    assert hs.plot(hs.overview(simulation)).get_suptitle().startswith(told["system"] + "\n")
