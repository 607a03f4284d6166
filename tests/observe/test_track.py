"""Quantities of every system, their means and standard errors against NumPy, and the overview, number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import helmscope as hs
from helmscope.observe.track import token_weights, with_bounds, with_replicates
from support import oracles

F64 = torch.float64
TIMES = torch.tensor([0.0, 0.5, 2.0], dtype=F64)
STATES = hs.integrate(hs.SA(3.0), hs.Uniform(5, 3).sample(4, seed=0), TIMES).states
PADDING = torch.tensor([[True] * 5, [True, False, True, True, True], [False, True, True, True, False], [True] * 5])
PLAIN = hs.Trajectory(TIMES, STATES)
PADDED = hs.Trajectory(TIMES, STATES, weights=PADDING.to(F64)[None])
SIMPLE = {
    "order_parameter": oracles.order_parameter,
    "cluster_count": lambda cloud: oracles.cluster_count(cloud, 0.3),
    "effective_rank": oracles.effective_rank,
    "interaction_energy": lambda cloud: oracles.interaction_energy(cloud, 3.0),
    "close_pair_share": lambda cloud: oracles.close_pair_share(cloud, 0.2),
    "mean_inner_product": lambda cloud: (len(cloud) * oracles.order_parameter(cloud) ** 2 - 1) / (len(cloud) - 1),
}


def by_loops(function, trajectory: hs.Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the systems of a function of the real tokens."""
    everyone = torch.ones(trajectory.states.shape[1:3], dtype=torch.bool)
    mask = everyone if trajectory.weights is None else trajectory.weights[0] > 0
    values = np.array(
        [[function(cloud[m].tolist()) for cloud, m in zip(clouds, mask, strict=True)] for clouds in trajectory.states]
    )
    return values.mean(1), values.std(1, ddof=1) / math.sqrt(values.shape[1])


# Tracking -------------------------------------------------------------------------------------------------------------


def test_track_keeps_every_system_and_reduces_to_the_mean_and_its_standard_error():
    kept = hs.track(PLAIN, first=lambda x: x[..., 0, 0], square=lambda x: x[..., 1, 2] ** 2)
    values = STATES[..., 0, 0].numpy()
    assert kept.first.dims == ("time", "system")
    assert np.array_equal(kept.first.values, values)
    assert kept.time.values.tolist() == TIMES.tolist()
    assert kept.system.values.tolist() == [0, 1, 2, 3]
    assert hs.types.check_measurement(kept) is kept
    seen = hs.reduce_replicates(kept)
    assert np.abs(seen.first.values - values.mean(1)).max() < 1e-15
    assert np.abs(seen.first_stderr.values - values.std(1, ddof=1) / 2).max() < 1e-15
    assert np.abs(seen.square.values - (STATES[..., 1, 2] ** 2).numpy().mean(1)).max() < 1e-15
    assert seen.first.dims == ("time",)
    assert seen.attrs == {"n": 4, "replicate": "system"}


def test_the_axes_are_those_that_the_trajectory_names():
    path = hs.Trajectory(TIMES, STATES, axis="depth", replicate="prompt")
    seen = hs.track(path, order=hs.order_parameter)
    assert seen.order.dims == ("depth", "prompt")
    assert hs.overview(path, beta=1.0).inner_product_histogram.dims == ("depth", "prompt", "inner_product")


def test_unit_and_identities_of_a_trajectory_become_coordinates():
    path = hs.Trajectory(TIMES, STATES, axis="depth", replicate="prompt", unit="half-layers", identities=list("abcd"))
    for measured in (hs.track(path, order=hs.order_parameter), hs.overview(path, beta=1.0)):
        assert measured.depth.attrs == {"units": "half-layers"}
        assert (measured.text.dims, measured.text.values.tolist()) == (("prompt",), ["a", "b", "c", "d"])
        assert "text" not in hs.reduce_replicates(measured).coords
    unnamed = hs.track(PLAIN, order=hs.order_parameter)
    assert set(unnamed.coords) == {"time", "system"}
    with pytest.raises(
        hs.HelmscopeError, match="identities holds 1 string, but it must hold one for each of 4 systems"
    ):
        hs.Trajectory(TIMES, STATES, identities=["a"])


def test_track_takes_whole_numbers_single_precision_and_gradients():
    states = STATES.float().requires_grad_()
    seen = hs.track(
        hs.Trajectory(TIMES, states), count=lambda x: hs.cluster_count(x, max_angle=0.3), order=hs.order_parameter
    )
    assert seen["count"].dtype == seen.order.dtype == np.float64
    seen = hs.reduce_replicates(seen)
    loops, errors = by_loops(SIMPLE["cluster_count"], PLAIN)
    assert np.abs(seen["count"].values - loops).max() < 1e-15
    assert np.abs(seen.count_stderr.values - errors).max() < 1e-15


def test_a_weighted_simulation_is_tracked_and_looked_over_by_its_weights():
    weights = torch.tensor([3.0, 1.0, 0.0, 0.5, 1.0], dtype=F64)
    run = hs.integrate(hs.SA(2.0), STATES[0], times=[0.0, 0.4], weights=weights)
    wanted = [
        np.mean([oracles.order_parameter(cloud, weights.tolist()) for cloud in clouds.tolist()])
        for clouds in run.trajectory.states
    ]
    assert hs.track(run, order=hs.order_parameter).order.mean("system").values == pytest.approx(wanted, rel=1e-14)
    assert hs.overview(run, beta=2.0).order_parameter.mean("system").values == pytest.approx(wanted, rel=1e-14)
    plain = hs.overview(hs.Trajectory(run.times, run.trajectory.states), beta=2.0)
    assert abs(float(plain.order_parameter[0].mean()) - wanted[0]) > 0.05


def test_one_system_has_no_standard_error():
    seen = hs.reduce_replicates(hs.track(hs.Trajectory(TIMES, STATES[:, :1]), order=hs.order_parameter))
    assert np.isfinite(seen.order.values).all()
    assert np.isnan(seen.order_stderr.values).all()
    assert seen.attrs["n"] == 1


def test_an_axis_behind_the_systems():
    seen = hs.reduce_replicates(with_replicates({"x": STATES[:, :, 0]}, PLAIN, {"axis": [10.0, 20.0, 30.0]}))
    assert seen.x.dims == seen.x_stderr.dims == ("time", "axis")
    assert seen.axis.values.tolist() == [10.0, 20.0, 30.0]
    assert np.abs(seen.x.values - STATES[:, :, 0].numpy().mean(1)).max() < 1e-15
    assert np.abs(seen.x_stderr.values - STATES[:, :, 0].numpy().std(1, ddof=1) / 2).max() < 1e-15


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: hs.track(PLAIN, a=lambda x: x[:, 0, 0, 0]),
            r"a has shape \(3,\).*axes \(time, system\) of sizes \(3, 4\)",
        ),
        (lambda: hs.track(PLAIN, a=lambda x: x[..., 0]), r"a has shape \(3, 4, 5\).*\(time, system\)"),
        (lambda: hs.track(PLAIN, a=lambda x: x.mean()), r"a has shape \(\).*\(time, system\)"),
        (lambda: hs.track(PLAIN, a_stderr=lambda x: x[..., 0, 0]), "'a_stderr' but no 'a'"),
        (
            lambda: with_replicates({"a": STATES[:, :, 0]}, PLAIN, {"axis": np.zeros(2)}),
            r"a has shape \(3, 4, 3\).*\(time, system, axis\) of sizes \(3, 4, 2\)",
        ),
        (lambda: hs.track(PADDED, a=lambda x: x[..., 0, 0]), "a is a function that takes no weights.*padding"),
        (lambda: token_weights(STATES, PADDING[:3]), r"weights .*\(3, 5\).*\(3, 4, 5\)"),
        (lambda: token_weights(STATES, PADDING.tolist()), "weights .*list.*tensor"),
        (lambda: hs.overview(hs.Trajectory(TIMES, STATES[:, :0]), beta=1.0), "batch of 0 systems"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_states_of_a_system_that_stopped_are_refused():
    states = STATES.clone()
    states[2, 1] = math.nan
    with pytest.raises(hs.HelmscopeError, match="x holds NaN"):
        hs.track(hs.Trajectory(TIMES, states), order=hs.order_parameter)


# The overview ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trajectory", [PLAIN, PADDED], ids=["plain", "padded"])
def test_overview_number_by_number(trajectory):
    kept = hs.overview(trajectory, beta=3.0, delta=0.2, max_angle=0.3, bins=7)
    assert set(kept.data_vars) == {*SIMPLE, "inner_product_histogram"}
    assert all(kept[name].dims[:2] == ("time", "system") for name in kept.data_vars)
    assert hs.types.check_measurement(kept) is kept
    seen = hs.reduce_replicates(kept)
    for name, function in SIMPLE.items():
        means, errors = by_loops(function, trajectory)
        assert seen[name].values == pytest.approx(means, rel=1e-13, abs=1e-14), name
        assert seen[f"{name}_stderr"].values == pytest.approx(errors, rel=1e-12, abs=1e-14), name
    edges = np.linspace(-1, 1, 8).tolist()
    for k in range(7):
        means, errors = by_loops(lambda cloud, k=k: oracles.histogram(cloud, edges)[k], trajectory)
        assert seen.inner_product_histogram.values[:, k] == pytest.approx(means, rel=1e-13, abs=1e-15)
        assert seen.inner_product_histogram_stderr.values[:, k] == pytest.approx(errors, rel=1e-12, abs=1e-15)
    options = {"beta": 3.0, "delta": 0.2, "max_angle": 0.3}
    assert seen.attrs == {"n": 4, "replicate": "system", "token_stride": 1, **options}


def test_overview_keeps_the_times_and_leaves_out_an_infinite_energy():
    seen = hs.overview(PLAIN, beta=0.0)
    assert seen.time.values.tolist() == TIMES.tolist()
    assert set(SIMPLE) - {"interaction_energy"} <= set(seen.data_vars)
    assert "interaction_energy" not in seen
    assert seen.sizes == {"time": 3, "system": 4, "inner_product": 50}


def test_the_overview_of_a_recording_has_quantiles_and_clusters_per_token():
    of_flow = hs.overview(PLAIN, beta=1.0)
    path = hs.Trajectory(TIMES, STATES, axis="depth", replicate="prompt")
    of_model = hs.overview(path, beta=1.0)
    assert (of_flow.delta, of_flow.max_angle) == (1e-3, 0.1)
    assert of_model.max_angle == pytest.approx(math.acos(0.5))
    assert "delta" not in of_model.attrs
    assert not {"close_pair_share", "cluster_count"} & set(of_model)
    assert not {"inner_product_quantile", "clusters_per_token"} & set(of_flow)
    same = hs.overview(PLAIN, beta=1.0, max_angle=math.pi / 3)
    assert of_model.clusters_per_token.values == pytest.approx(same.cluster_count.values / STATES.shape[2])
    chosen, same = hs.overview(path, delta=0.1), hs.overview(PLAIN, delta=0.1)
    assert (chosen.close_pair_share.values == same.close_pair_share.values).all()
    assert same.close_pair_share.attrs["long_name"] == "share of pairs with an inner product >= 0.9"
    assert of_flow.close_pair_share.attrs["long_name"] == "share of pairs that have met"


def test_overview_of_one_system():
    seen = hs.reduce_replicates(hs.overview(hs.Trajectory(TIMES, STATES[:, :1]), beta=1.0))
    ends = ("_stderr", "_low", "_high")
    assert all(np.isnan(seen[name].values).all() == name.endswith(ends) for name in seen.data_vars)


def test_intervals_of_the_overview_stay_where_the_quantities_are():
    """Three clouds, orthogonal, in one point, and in between: the whole intervals leave the bounds."""
    axes = torch.eye(3, dtype=F64)
    clouds = torch.stack([axes, axes[0].expand(3, 3), STATES[-1, 0, :3]])
    kept = hs.overview(hs.Trajectory(TIMES[:1], clouds[None]), beta=1.0)
    cut, whole = hs.reduce_replicates(kept), hs.reduce_replicates(kept, scale=hs.stats.LinearScale())
    bounds = dict.fromkeys(("close_pair_share", "inner_product_histogram", "order_parameter"), (0.0, 1.0)) | {
        "mean_inner_product": (-1.0, 1.0)
    }
    bounds |= {
        "cluster_count": (1.0, math.inf),
        "effective_rank": (1.0, math.inf),
        "interaction_energy": (0.0, math.inf),
    }
    assert set(bounds) == set(kept.data_vars)
    assert float(whole.close_pair_share_low.squeeze()) < 0
    assert float(whole.close_pair_share_high.squeeze()) > 1
    for name, (low, high) in bounds.items():
        assert (cut[f"{name}_low"] >= low).all(), name
        assert (cut[f"{name}_high"] <= high).all(), name
        assert np.array_equal(cut[name], whole[name])


def test_bounds_that_a_measurement_lacks_are_passed_over():
    seen = with_bounds(hs.track(PLAIN, order=hs.order_parameter), {"order": (0.0, math.inf), "rank": (1.0, 2.0)})
    assert seen.order.attrs == {"valid_min": 0.0, "long_name": "order parameter"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": -1.0}, r"beta is -1\.0.*>= 0"),
        ({"beta": math.nan}, "beta is nan.*finite"),
        ({"beta": "warm"}, "beta is 'warm'.*number"),
        ({"beta": 1.0, "delta": -1.0}, r"delta is -1\.0.*>= 0"),
        ({"beta": 1.0, "max_angle": -1.0}, r"max_angle is -1\.0.*>= 0"),
        ({"beta": 1.0, "bins": 0}, "bins is 0.*>= 1"),
    ],
)
def test_overview_refuses_with_one_sentence(options, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        hs.overview(PLAIN, **options)
    assert "\n" not in str(caught.value)


def test_a_simulation_serves_where_a_trajectory_does_and_nothing_else():
    run = hs.integrate(hs.SA(beta=1.0), hs.Uniform(n=4, dim=3).sample(batch=3, seed=0), [0.0, 1.0])
    for observe in (
        lambda seen: hs.overview(seen, beta=1.0),
        lambda seen: hs.close_pair_shares(seen, delta=0.1),
        lambda seen: hs.observe.inner_product_histogram(seen),
        lambda seen: hs.track(seen, order=hs.order_parameter),
    ):
        of_run = observe(run)
        assert of_run.attrs.pop("system", "SA(beta=1)") == "SA(beta=1)"  # what bare states do not know
        assert of_run.identical(observe(run.trajectory))
        with pytest.raises(hs.HelmscopeError, match=r"^system is a Tensor, but it must be"):
            observe(run.states)


def test_what_is_no_function_is_refused():
    says = r"order is 'str', but it must be a function of tokens f\(x, weights=...\)"
    with pytest.raises(hs.HelmscopeError, match=says):
        hs.track(PLAIN, order="str")


def test_a_function_without_a_name_is_refused():
    says = (
        "quantities is given order_parameter without a name, but track needs at least one function .* by its name, such"
    )
    with pytest.raises(hs.HelmscopeError, match=says):
        hs.track(PLAIN, hs.order_parameter)
    with pytest.raises(hs.HelmscopeError, match="system is a function, but it must be a System"):
        hs.measure(hs.order_parameter)


def test_nothing_to_track_is_refused():
    with pytest.raises(hs.HelmscopeError, match="quantities is empty, but track needs at least one function"):
        hs.track(PLAIN)
