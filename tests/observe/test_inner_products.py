"""Inner products, the close-pair probability and the order parameter against loops and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import helmscope as hs
from support import oracles

F64 = torch.float64
SIZES = [(2, 2), (5, 3), (4, 8), (9, 2)]
E = torch.eye(3, dtype=F64)


def real(cloud: torch.Tensor, mask: torch.Tensor) -> list:
    return cloud[mask].tolist()


def trajectory(states: torch.Tensor, mask: torch.Tensor | None = None) -> hs.Trajectory:
    return hs.Trajectory(
        torch.arange(len(states), dtype=F64), states, weights=None if mask is None else mask.to(F64)[None]
    )


def random_mask(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    """At least two real tokens a system."""
    mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:, -2:] = True
    return mask


# Mean and share of close pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_quantiles_are_those_of_numpy(n, d):
    x, mask = hs.Uniform(n, d).sample(8, seed=n), random_mask(8, n)
    levels = [0.0, 0.05, 0.5, 0.95, 1.0]
    for weights in (None, mask, torch.rand(8, n, generator=torch.Generator().manual_seed(1), dtype=F64)):
        m = torch.ones(8, n, dtype=F64) if weights is None else weights.to(F64)
        path = hs.Trajectory(torch.zeros(1, dtype=F64), x[None], None if weights is None else m[None])
        measured = hs.observe.inner_product_quantiles(path, quantiles=levels)
        assert measured.inner_product_quantile.dims == ("time", "system", "quantile")
        for cloud, mass, found in zip(x, m, measured.inner_product_quantile.values[0], strict=True):
            pairs = [(float(cloud[i] @ cloud[j]), float(mass[i] * mass[j])) for i in range(n) for j in range(i)]
            products, masses = np.array([pair for pair in pairs if pair[1] > 0]).T
            expected = np.quantile(products, levels, method="inverted_cdf", weights=masses)
            assert found == pytest.approx(expected, abs=1e-15)


def test_quantiles_without_a_pair_and_with_wrong_levels():
    one = hs.Trajectory(torch.zeros(1), E[:1].expand(1, 2, 1, 3))
    alone = hs.Trajectory(
        torch.zeros(1), E.expand(1, 2, 3, 3), torch.tensor([1.0, 0.0, 0.0], dtype=F64).expand(1, 2, 3)
    )
    for path in (one, alone):
        assert np.isnan(hs.observe.inner_product_quantiles(path).inner_product_quantile).all()
    for levels in ([], [0.5, 0.1], [0.5, 1.5]):
        with pytest.raises(hs.HelmscopeError, match=r"quantiles is \["):
            hs.observe.inner_product_quantiles(one, quantiles=levels)


def test_shares_of_close_pairs_of_a_recording_are_no_flat_zero():
    """Of A and of its untrained twin; tokens that have met, as in a simulation, there are none."""
    texts = hs.models.story_texts()[:2]
    for model in ("A", hs.models.untrained_twin(hs.load("A"), seed=1)):
        recording = hs.record(model, texts)
        share = hs.close_pair_shares(recording).close_pair_share
        assert (share > 0).all()
        assert float(share.max() - share.min()) > 1e-3
        assert hs.close_pair_shares(recording, delta=1e-3).close_pair_share.median() == 0
    assert share.attrs["long_name"] == "share of pairs with an inner product >= 0.5"


def mean_by_loops(cloud: list) -> float:
    products = [sum(a * b for a, b in zip(x, y, strict=True)) for i, x in enumerate(cloud) for y in cloud[:i]]
    return math.fsum(products) / len(products)


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_mean_inner_product_is_the_loop(n, d):
    x, mask = hs.Uniform(n, d).sample(8, seed=n), random_mask(8, n)
    loops = [mean_by_loops(cloud) for cloud in x.tolist()]
    assert hs.mean_inner_product(x).tolist() == pytest.approx(loops, rel=0, abs=1e-15)
    loops = [mean_by_loops(real(*pair)) for pair in zip(x, mask, strict=True)]
    assert hs.mean_inner_product(x, weights=mask).tolist() == pytest.approx(loops, rel=0, abs=1e-15)


def test_mean_inner_product_of_one_token_is_undefined():
    assert hs.mean_inner_product(E[:1]).isnan()
    assert hs.mean_inner_product(E, weights=torch.tensor([True, False, False])).isnan()


def test_mean_inner_product_of_an_equiangular_cloud():
    gamma = hs.equiangular(hs.SA(2.0), n=5, times=[0.5])[0]
    states = hs.integrate(hs.SA(2.0), hs.Orthonormal(5, 6).sample(3, seed=0), [0.5]).states[0]
    assert (hs.mean_inner_product(states) - gamma).abs().max() < 1e-9  # the local error of the integration


@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.3, 1.7, 2.0])
def test_clustering_fraction_is_the_loop(n, d, delta):
    x, mask = hs.Uniform(n, d).sample(8, seed=n), random_mask(8, n)
    x[:, 1] = x[:, 0]
    loops = [oracles.close_pair_share(cloud, delta) for cloud in x.tolist()]
    if delta > 0:  # the loop's inner product of two equal tokens may round below 1
        assert hs.observe.close_pair_share(x, delta=delta).tolist() == pytest.approx(loops, rel=1e-15, abs=0)
        loops = [oracles.close_pair_share(real(*pair), delta) for pair in zip(x, mask, strict=True)]
        assert hs.observe.close_pair_share(x, delta=delta, weights=mask).tolist() == pytest.approx(
            loops, rel=1e-15, abs=0
        )
    else:
        assert hs.observe.close_pair_share(x, delta=delta).tolist() == pytest.approx([2 / (n * n - n)] * 8, rel=1e-15)


def test_clustering_fraction_sees_pairs_that_an_inner_product_cannot():
    # 1 - cos(1e-9) = 5e-19 is far below the rounding of 1
    angles = torch.tensor([0.0, 1e-9, 3e-9], dtype=F64)
    x = torch.stack([angles.cos(), angles.sin()], -1)
    assert hs.observe.close_pair_share(x, delta=6e-19).item() == pytest.approx(1 / 3)
    assert hs.observe.close_pair_share(x, delta=1e-20).item() == 0


@pytest.mark.parametrize(
    ("x", "delta", "share"),
    [
        (E, 1.0, 1.0),
        (torch.stack([E[0], -E[0]]), 2.0, 1.0),
        (E[[0, 0]], 0.0, 1.0),
        (torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=F64), 0.5, 1.0),
    ],
)
def test_a_pair_exactly_at_the_threshold_has_met(x, delta, share):
    assert oracles.close_pair_share(x.tolist(), delta) == share
    assert hs.observe.close_pair_share(x, delta=delta).item() == share


# The close-pair probability -------------------------------------------------------------------------------------------


def test_clustering_probability_of_the_start_is_the_closed_form():
    """4,096 systems: 0.014300 +- 0.000083 against (1/2) I_{1-(1-delta)^2}(1/2, 1/2) = 0.014236."""
    expected = hs.theory.initial_close_pair_probability(dim=2, delta=1e-3)
    assert expected == pytest.approx(0.014236437406239559, rel=1e-12)
    kept = hs.close_pair_shares(trajectory(hs.Uniform(32, 2).sample(4096, seed=0)[None]))
    seen = hs.reduce_replicates(kept)
    value, error = seen.close_pair_share.item(), seen.close_pair_share_stderr.item()
    assert error < 0.02 * expected
    assert abs(value - expected) < 4 * error
    assert seen.attrs == {"n": 4096, "replicate": "system", "delta": 1e-3}


def test_the_stated_error_is_the_spread_of_repetitions():
    """400 experiments of 32 systems whose pairs hang together, so that counting pairs as independent would not do."""
    x = hs.VonMisesFisher(32, 2, kappa=2.0).sample(400 * 32, seed=1).reshape(400, 32, 32, 2)
    seen = hs.reduce_replicates(hs.close_pair_shares(trajectory(x), delta=1e-2))
    values, stated = seen.close_pair_share.values, seen.close_pair_share_stderr.values
    spread = values.std(ddof=1)
    # a standard deviation of 400 values has a relative error of 1 / sqrt(800) = 3.5 %
    assert math.sqrt((stated**2).mean()) == pytest.approx(spread, rel=4 * 0.036)
    pairs = 32 * 32 * 31 / 2
    assert spread > 1.3 * math.sqrt(values.mean() * (1 - values.mean()) / pairs)
    hits = np.abs(values - values.mean()) < 2 * stated
    assert abs(hits.mean() - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400)


def test_clustering_probability_honours_the_mask():
    x, mask = hs.Uniform(6, 2).sample(5, seed=2), random_mask(5, 6)
    seen = hs.reduce_replicates(hs.close_pair_shares(trajectory(x[None].expand(2, 5, 6, 2), mask), delta=0.5))
    loops = [oracles.close_pair_share(real(*pair), 0.5) for pair in zip(x, mask, strict=True)]
    assert seen.close_pair_share.values == pytest.approx([np.mean(loops)] * 2, rel=1e-14, abs=0)
    assert seen.close_pair_share_stderr.values == pytest.approx(
        [np.std(loops, ddof=1) / math.sqrt(5)] * 2, rel=1e-14, abs=0
    )


# The histogram --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 2, 7, 50, 100])
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_histogram_is_the_loop(n, d, bins):
    states = hs.Uniform(n, d).sample(6, seed=n).reshape(2, 3, n, d)
    seen = hs.reduce_replicates(hs.observe.inner_product_histogram(trajectory(states), bins=bins))
    edges = np.linspace(-1, 1, bins + 1).tolist()
    loops = np.array([[oracles.histogram(cloud, edges) for cloud in row] for row in states.tolist()])
    assert seen.inner_product_histogram.dims == ("time", "inner_product")
    assert np.abs(seen.inner_product_histogram.values - loops.mean(1)).max() < 1e-15
    assert np.abs(seen.inner_product_histogram_stderr.values - loops.std(1, ddof=1) / math.sqrt(3)).max() < 1e-15
    assert np.abs(seen.inner_product_histogram.values.sum(-1) - 1).max() < 1e-15
    assert np.abs(seen.inner_product.values - (np.arange(bins) + 0.5) * 2 / bins + 1).max() < 1e-15


def test_histogram_honours_the_mask():
    x, mask = hs.Uniform(6, 3).sample(4, seed=2), random_mask(4, 6)
    seen = hs.reduce_replicates(hs.observe.inner_product_histogram(trajectory(x[None], mask), bins=10))
    edges = np.linspace(-1, 1, 11).tolist()
    loops = np.array([oracles.histogram(real(*pair), edges) for pair in zip(x, mask, strict=True)])
    assert np.abs(seen.inner_product_histogram.values[0] - loops.mean(0)).max() < 1e-15


@pytest.mark.parametrize("bins", [1, 2, 4, 6, 10, 50, 100])
def test_inner_products_of_minus_one_zero_and_one_fall_where_they_belong(bins):
    """Bins are closed on the left, so 0 opens the upper half; the last bin holds 1."""
    x = torch.stack([E[0], E[0], -E[0], E[1]])  # ordered pairs: +1 twice, -1 four times, 0 six times
    seen = hs.observe.inner_product_histogram(trajectory(x[None, None]), bins=bins)
    share = seen.inner_product_histogram.values[0, 0]
    expected = np.zeros(bins)
    expected[0] += 4 / 12
    expected[bins // 2] += 6 / 12
    expected[-1] += 2 / 12
    assert share == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("bins", [8, 10, 50, 64, 100])
def test_an_inner_product_at_an_edge_opens_the_upper_bin(bins):
    """<x, y> is each stated edge in turn, to the bit, and so belongs to the bin that is closed there."""
    edges = np.linspace(-1, 1, bins + 1)
    height = torch.tensor(edges[1:-1])
    first = torch.tensor([1.0, 0.0], dtype=F64).expand(bins - 1, 2)
    x = torch.stack([first, torch.stack([height, (1 - height**2).sqrt()], -1)], -2)
    assert torch.equal((x[:, 0] * x[:, 1]).sum(-1), height)
    share = hs.observe.inner_product_histogram(trajectory(x[:, None]), bins=bins).inner_product_histogram.values[:, 0]
    loops = [oracles.histogram(cloud, edges.tolist()) for cloud in x.tolist()]
    assert np.array_equal(share.argmax(-1), np.argmax(loops, -1))


# The order parameter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(1, 2), *SIZES])
def test_order_parameter_is_the_loop(n, d):
    x = hs.Uniform(n, d).sample(8, seed=n)
    weights = torch.rand(8, n, generator=torch.Generator().manual_seed(1), dtype=F64)
    mask = random_mask(8, n)
    loops = [oracles.order_parameter(cloud) for cloud in x.tolist()]
    assert hs.order_parameter(x).tolist() == pytest.approx(loops, rel=0, abs=1e-15)
    loops = [oracles.order_parameter(*pair) for pair in zip(x.tolist(), weights.tolist(), strict=True)]
    assert hs.order_parameter(x, weights=weights).tolist() == pytest.approx(loops, rel=0, abs=1e-15)
    loops = [oracles.order_parameter(*pair) for pair in zip(x.tolist(), (weights * mask).tolist(), strict=True)]
    assert hs.order_parameter(x, weights=weights * mask).tolist() == pytest.approx(loops, rel=0, abs=1e-15)


def test_order_parameter_at_its_ends():
    thirds = torch.arange(3, dtype=F64) * (2 * math.pi / 3)
    assert hs.order_parameter(torch.stack([thirds.cos(), thirds.sin()], -1)).item() < 1e-15
    assert hs.order_parameter(E[[1, 1, 1]]).item() == 1


def test_pairs_count_by_the_product_of_their_weights():
    """Loops over pairs i != j of one cloud; scaling all weights changes nothing."""
    x, m = hs.Uniform(5, 3).sample(seed=4), [0.5, 2.0, 0.0, 1.0, 3.0]
    pairs = [(m[i] * m[j], float(x[i] @ x[j])) for i in range(5) for j in range(5) if i != j]
    whole = math.fsum(w for w, _ in pairs)
    weights = torch.tensor(m, dtype=F64)
    mean = math.fsum(w * inner for w, inner in pairs) / whole
    close = math.fsum(w for w, inner in pairs if inner >= 0.3) / whole
    below = math.fsum(w for w, inner in pairs if inner < 0) / whole
    for scale in (1.0, 7.0):
        assert hs.mean_inner_product(x, weights=scale * weights).item() == pytest.approx(mean, rel=1e-14)
        assert hs.observe.close_pair_share(x, delta=0.7, weights=scale * weights).item() == pytest.approx(
            close, rel=1e-14
        )
    path = hs.Trajectory(
        torch.zeros(2), x.expand(2, 1, 5, 3), torch.stack([weights, torch.ones(5, dtype=F64)])[:, None]
    )
    seen = hs.observe.inner_product_histogram(path, bins=2).inner_product_histogram[:, 0, 0].values
    assert seen[0] == pytest.approx(below, rel=1e-14)
    assert seen[1] == pytest.approx(oracles.histogram(x.tolist(), [-1.0, 0.0, 1.0])[0], rel=1e-14)


# Gradients and refusals -----------------------------------------------------------------------------------------------

X = hs.Uniform(4, 3).sample(2, seed=0)


@pytest.mark.parametrize("function", [hs.mean_inner_product, hs.order_parameter])
def test_gradients(function):
    mask = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(function, X.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda x: function(x, weights=mask), X.clone().requires_grad_())
    for cloud in (E[[0, 0, 0]], torch.stack([E[0], -E[0]])):  # coincident; balanced, where R has a corner
        x = cloud.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hs.observe.close_pair_share(X, delta=-1e-3), r"delta is -0\.001.*>= 0"),
        (lambda: hs.observe.close_pair_share(X, delta=math.nan), "delta is nan.*finite"),
        (lambda: hs.close_pair_shares(trajectory(X[None]), delta=-1.0), r"delta is -1\.0.*>= 0"),
        (lambda: hs.observe.inner_product_histogram(trajectory(X[None]), bins=0), "bins is 0.*>= 1"),
        (lambda: hs.observe.inner_product_histogram(trajectory(X[None]), bins=2.5), r"bins is 2\.5.*whole"),
        (lambda: hs.mean_inner_product(3 * X), "x holds a token of norm 3.*unit sphere"),
        (lambda: hs.order_parameter(3 * X), "x holds a token of norm 3.*unit sphere"),
        (lambda: hs.mean_inner_product(X, weights=-torch.ones(4)), "weights holds the entry -1.*>= 0"),
        (lambda: hs.mean_inner_product(X, weights=torch.ones(3, dtype=torch.bool)), r"weights .*\(3,\).*\(2, 4\)"),
        (lambda: hs.observe.close_pair_share(X, delta=0.1, weights=[True] * 4), "weights .*list.*tensor"),
        (lambda: hs.order_parameter(X, weights=torch.ones(2, 3)), r"weights is \(2, 3\).*\(2, 4\)"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(call, said):
    with pytest.raises(hs.HelmscopeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
