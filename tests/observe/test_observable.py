"""Functions of tokens take a system or a trajectory, with its weights: padding is never counted."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch

import helmscope as hs
from helmscope.observe.observable import observable
from helmscope.types import HelmscopeError
from support.refusal import refused

TEXTS = ["Once upon a time there was a little girl named Lily", "The dog ran", "A big red ball was on the grass"]
GENERATOR = torch.Generator().manual_seed(0)
STATES = torch.nn.functional.normalize(torch.randn(2, 3, 9, 4, generator=GENERATOR, dtype=torch.float64), dim=-1)
COUNTS = (9, 5, 7)  # of tokens that count; those after them are padding

OBSERVABLES: dict[str, Callable[..., Any]] = {
    "order_parameter": hs.order_parameter,
    "mean_inner_product": hs.mean_inner_product,
    "close_pair_share": partial(hs.observe.close_pair_share, delta=0.5),
    "cluster_count": partial(hs.cluster_count, max_angle=0.7),
    "effective_rank": hs.rank.effective_rank,
    "participation_ratio": hs.rank.participation_ratio,
    "stable_rank": hs.rank.stable_rank,
    "nuclear_rank": hs.rank.nuclear_rank,
    "numerical_rank": partial(hs.rank.numerical_rank, tol=0.5),
    "collapse_residual_frobenius": hs.rank.collapse_residual_frobenius,
    "collapse_residual_composite": partial(hs.rank.collapse_residual_composite, relative=True),
    "interaction_energy": partial(hs.interaction_energy, beta=2.0),
    "log_interaction_energy": partial(hs.observe.log_interaction_energy, beta=2.0),
    "interaction_energy_sum": partial(hs.observe.interaction_energy_sum, beta=2.0),
    "interaction_energy_rate": partial(hs.observe.interaction_energy_rate, field=hs.SA(beta=2.0)),
    "gaussian_energy_as_printed": partial(hs.observe.gaussian_energy_as_printed, beta=2.0),
    "gaussian_entropy": hs.observe.gaussian_entropy,
    "gaussian_fisher_information": hs.observe.gaussian_fisher_information,
    "matrix_entropy": partial(hs.observe.matrix_entropy, centered=True),
    "neighbor_entropy": partial(hs.observe.neighbor_entropy, principal_axes=1, neighbors=1),
}
WITHOUT_WEIGHTS: dict[str, Callable[..., Any]] = {
    "merge_tree": hs.observe.merge_tree,
    "vmf_mixture": partial(hs.observe.vmf_mixture, max_components=1),
}


def padded(fill: float) -> hs.Trajectory:
    """Three systems with padding, whose states are ``fill``."""
    weights = torch.stack([torch.arange(9) < count for count in COUNTS]).double()[None]
    states = torch.where(weights.unsqueeze(-1) > 0, STATES, torch.tensor(fill, dtype=torch.float64))
    return hs.Trajectory(torch.arange(2.0), states, weights)


def test_the_list_holds_every_function_of_clouds() -> None:
    found = set()
    for name in dir(hs.observe):
        function = getattr(hs.observe, name)
        if inspect.isfunction(function):
            first, *_ = [*inspect.signature(function).parameters.values(), None]
            takes_clouds = first is not None and "*batch n d" in str(first.annotation) and first.name == "x"
            kept = "*batch n'" in str(inspect.signature(function).return_annotation)  # one value per token
            if takes_clouds and not kept:
                found.add(name)
    assert found - {"anisotropy", "diffusivity"} == OBSERVABLES.keys() | WITHOUT_WEIGHTS.keys()


@pytest.mark.parametrize("fill", [0.0, float("nan")])
@pytest.mark.parametrize("name", OBSERVABLES)
def test_padding_does_not_count(name: str, fill: float) -> None:
    function, path = OBSERVABLES[name], padded(fill)
    alone = [[function(STATES[k, i, : COUNTS[i]]) for i in range(3)] for k in range(2)]
    expected = torch.stack([torch.stack(row) for row in alone])
    assert function(path).shape == (2, 3)
    torch.testing.assert_close(function(path), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(function(path), function(path.states, weights=path.weights))


@pytest.mark.parametrize("name", ["order_parameter", "effective_rank", "interaction_energy", "matrix_entropy"])
def test_a_recording_counts_its_own_tokens(name: str) -> None:
    function, recording = OBSERVABLES[name], hs.record("A", TEXTS)
    alone = torch.cat([function(hs.record("A", [text])) for text in TEXTS], dim=1)
    torch.testing.assert_close(function(recording), alone, rtol=1e-4, atol=1e-4)
    tracked = hs.track(recording, value=function).value.values
    assert torch.equal(function(recording).double(), torch.from_numpy(tracked))


@pytest.mark.parametrize("name", [*OBSERVABLES, *WITHOUT_WEIGHTS])
def test_a_simulation_has_equal_weights(name: str) -> None:
    function = {**OBSERVABLES, **WITHOUT_WEIGHTS}[name]
    run = hs.integrate(hs.SA(beta=1.0), STATES[0], times=[0.0, 1.0])
    found, expected = function(run), function(run.states)
    parts = [list(vars(each).values()) if name in WITHOUT_WEIGHTS else [each] for each in (found, expected)]
    assert all(torch.equal(one, other) for one, other in zip(*parts, strict=True))


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_what_has_no_weights_refuses_padding(name: str) -> None:
    message = refused(lambda: WITHOUT_WEIGHTS[name](padded(0.0)))
    assert message.startswith("x is a Trajectory whose tokens have weights (padding has weight 0), but ")
    assert f"{name} counts all tokens equally: pass the tokens that count" in message


def test_weights_of_a_system_are_its_own() -> None:
    message = refused(lambda: hs.order_parameter(padded(0.0), weights=torch.ones(9)))
    assert message == "weights are given, but x is a Trajectory whose tokens have their own: omit weights"


def test_a_system_without_states_is_refused() -> None:
    class Empty:
        trajectory = None

    with pytest.raises(HelmscopeError, match="system is a"):
        hs.order_parameter(Empty())  # type: ignore[arg-type]


def test_the_docstring_says_so() -> None:
    assert "``x`` may also be a Trajectory or a System" in str(hs.order_parameter.__doc__)
    assert observable(lambda x, weights=None: x)(torch.eye(2)).tolist() == torch.eye(2).tolist()


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda run: hs.w2(run, run), "pass one cloud, such as x.trajectory.states[-1, 0]"),
        (lambda run: hs.w2(cast(Any, padded(0.0)), run), "such as x.states[-1, 0], with its weights x.weights[0, 0]"),
        (lambda run: hs.two_nn(run), "for a system use hs.observe.token_dimension(system)"),
        (lambda run: hs.two_nn(cast(Any, [1.0])), "points is a list, but it must be a tensor of points (n, d)"),
        (lambda run: hs.kernel.row_entropy(run), "for a system use hs.kernel_statistics(system)"),
        (lambda run: hs.observe.hull_distance(run, run), "such as points.trajectory.states[-1, 0]"),
    ],
)
def test_what_takes_one_cloud_names_the_remedy(call: Callable[..., Any], remedy: str) -> None:
    run = hs.integrate(hs.SA(beta=1.0), STATES[0], times=[0.0])
    assert remedy in refused(lambda: call(run))


def test_rows_of_padding_are_zero_and_their_entropy_nan() -> None:
    recording = hs.record("A", TEXTS)
    kernel = recording.kernel(layer=2)
    assert recording.visible is not None
    padding = ~recording.visible[:, None].expand(kernel.shape[:-1])
    entropy, statistics = hs.kernel.row_entropy(kernel), hs.kernel_statistics(recording)
    assert bool((kernel[padding] == 0).all())
    assert torch.equal(entropy.isnan(), padding)
    mean = torch.nanmean(entropy, -1)
    torch.testing.assert_close(mean.double(), torch.tensor(statistics.row_entropy.values[2]), rtol=1e-5, atol=1e-6)
    for name in ("bistochastic_defect", "column_sum_deviation_rms", "symmetry_defect"):
        whole = getattr(hs.kernel, name)(kernel).double()
        torch.testing.assert_close(whole, torch.tensor(statistics[name].values[2]), rtol=1e-5, atol=1e-6)


def test_a_token_that_attends_to_none_and_is_attended_by_none_is_padding() -> None:
    kernel = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.25, 0.75], [0.0, 0.5, 0.5]])
    assert hs.kernel.first_token_mass(kernel).tolist()[1:] == [0.25, 0.5]
    assert float(hs.kernel.bistochastic_defect(kernel)) == 0.25
    torch.testing.assert_close(hs.kernel.column_sum_deviation_rms(kernel), torch.tensor(0.25))
    balanced = hs.observe.balanced_kernel(kernel)[1:, 1:]
    torch.testing.assert_close(balanced, hs.observe.balanced_kernel(kernel[1:, 1:]), rtol=1e-9, atol=1e-12)
