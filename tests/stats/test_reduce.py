"""From replicates to a Measurement: each entry is the interval of its own replicates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr

from helmscope.stats.intervals import mean_interval
from helmscope.stats.reduce import reduce_replicates, reduced
from helmscope.stats.scales import BoundedScale, FisherZScale, LinearScale, LogScale, RestScale
from helmscope.types import HelmscopeError, check_measurement
from support.refusal import refused

NAN = math.nan


def measured(*, missing: bool = False) -> xr.Dataset:
    """Numbers in (0, 1) with the replicates in the middle, a null, and coordinates of every kind."""
    rng = np.random.default_rng(0)
    share = rng.uniform(0.05, 0.95, (3, 8, 4))
    if missing:
        share[rng.random(share.shape) < 0.3] = NAN
        assert (~np.isnan(share)).sum(1).min() >= 2
    dims = ("layer", "prompt", "head")
    return xr.Dataset(
        {
            "share": (dims, share, {"long_name": "share of mass", "scale": "log"}),
            "share_null": (dims[:2], rng.uniform(0.1, 0.9, (3, 8)), {"long_name": "of the twins"}),
            "mass": ("prompt", rng.uniform(0.1, 0.9, 8)),
            "mass_null": ((), 0.25),
        },
        {"layer": [0, 6, 12], "first_token": ("prompt", list("abcdefgh")), "beta": 2.0, "kind": ("head", list("wxyz"))},
        {"model": "A"},
    )


@pytest.mark.parametrize("confidence", [0.95, 0.5])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    "scale", [LinearScale(), LogScale(), FisherZScale(), RestScale()], ids=lambda scale: type(scale).__name__
)
def test_every_entry_is_the_interval_of_its_replicates(scale, missing, confidence):
    data = measured(missing=missing)
    seen = reduce_replicates(data, scale=scale, confidence=confidence)
    assert check_measurement(seen) is seen
    assert seen.share.dims == seen.share_low.dims == ("layer", "head")
    for layer in range(3):
        for head in range(4):
            values = data.share.values[layer, :, head]
            one = mean_interval(values[~np.isnan(values)], scale=scale, confidence=confidence)
            at = {"layer": layer, "head": head}
            ours = [float(seen[f"share{end}"].isel(at)) for end in ("", "_low", "_high")]
            assert ours == pytest.approx([one.estimate, one.low, one.high], rel=1e-12, abs=1e-12)
    null = [mean_interval(row, scale=scale).estimate for row in data.share_null.values]
    assert seen.share_null.values == pytest.approx(np.array(null), rel=1e-12)
    assert seen.attrs["n"] == 8
    counts = (~np.isnan(data.share.values)).sum(1)
    assert seen.share.attrs["n"] == (counts.min() if missing else 8)
    assert (counts.min() < 8) == missing


def test_the_standard_error_is_in_units_of_the_quantity():
    data = measured()
    plain = reduce_replicates(data)
    assert plain.share_stderr.values == pytest.approx(data.share.std("prompt", ddof=1).values / 8**0.5, rel=1e-13)
    # to first order the half-width is t standard errors, on every scale
    narrow = data[["share"]] * 1e-4 + 0.5
    for scale in (LinearScale(), LogScale(), FisherZScale(), RestScale()):
        seen = reduce_replicates(narrow, scale=scale)
        half = (seen.share_high - seen.share_low) / 2
        assert half.values == pytest.approx(2.3646242510102993 * seen.share_stderr.values, rel=1e-4)


def test_labels_and_coordinates_are_kept_and_the_replicates_are_gone():
    data = measured()
    before = data.copy(deep=True)
    seen = reduce_replicates(data)
    assert data.identical(before)
    assert seen.attrs == {"model": "A", "n": 8, "replicate": "prompt"}
    assert seen.share.attrs == {"long_name": "share of mass", "scale": "log", "n": 8, "band": "95 % interval"}
    assert seen.share_null.attrs == {"long_name": "of the twins"}
    assert set(seen.coords) == {"layer", "beta", "kind"}
    assert seen.layer.values.tolist() == [0, 6, 12]
    assert seen.mass.dims == seen.mass_null.dims == ()
    assert float(seen.mass_null) == 0.25
    assert list(seen.dims) == ["layer", "head"]


def test_one_value_has_no_spread_and_none_has_no_mean():
    values = np.array([[1.0, 4.0, NAN, 7.0], [NAN, 5.0, NAN, 7.0], [NAN, 9.0, NAN, 7.0]])
    seen = reduce_replicates(xr.Dataset({"a": (("seed", "layer"), values)}), scale=LogScale())
    assert np.array_equal(np.isnan(seen.a), [False, False, True, False])
    assert float(seen.a[0]) == 1.0
    for end in ("_stderr", "_low", "_high"):
        assert np.isnan(seen[f"a{end}"]).values.tolist() == [True, False, True, False]
    assert [float(seen[f"a{end}"][3]) for end in ("", "_low", "_high", "_stderr")] == [7.0, 7.0, 7.0, 0.0]
    assert (seen.attrs["n"], seen.a.attrs["n"]) == (3, 1)
    alone = reduce_replicates(xr.Dataset({"a": ("seed", [2.5])}))
    assert (float(alone.a), alone.attrs["n"]) == (2.5, 1)
    assert np.isnan(alone.a_stderr)


def test_a_quantity_without_any_value_has_neither_a_mean_nor_an_interval():
    seen = reduce_replicates(xr.Dataset({"a": ("seed", [NAN, NAN]), "b": ("seed", [1.0, 2.0])}))
    assert all(np.isnan(seen[f"a{end}"]) for end in ("", "_low", "_high", "_stderr"))
    assert (seen.attrs["n"], seen.a.attrs["n"], seen.b.attrs["n"]) == (2, 0, 2)
    assert check_measurement(seen) is seen


def test_the_axis_may_be_chosen_and_whole_numbers_are_numbers():
    data = xr.Dataset({"count": (("prompt", "layer"), [[1, 2], [3, 6]])})
    assert reduce_replicates(data)["count"].values.tolist() == [2.0, 4.0]
    seen = reduce_replicates(data, over="layer")
    assert seen["count"].dims == ("prompt",)
    assert seen["count"].values.tolist() == [1.5, 4.5]


def test_many_entries_are_reduced_at_once():
    """Column sums, not a loop over entries: a loop over these 200,000 would take some ten seconds."""
    values = np.random.default_rng(1).normal(size=(8, 200_000))
    seen = reduce_replicates(xr.Dataset({"a": (("prompt", "token"), values)}))
    assert np.abs(seen.a.values - values.mean(0)).max() < 1e-14


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: reduce_replicates(xr.Dataset({"a": ("time", [1.0])})), "its replicate axis must be one of prompt"),
        (lambda: reduce_replicates(xr.Dataset({"a": ("seed", np.zeros(0))})), "0 replicates along 'seed'"),
        (lambda: reduce_replicates(xr.Dataset({"a": ("seed", [1.0, math.inf])})), "'a' is inf at seed 1, but it must"),
        (
            lambda: reduce_replicates(xr.Dataset({"a": (("layer", "seed"), [[1.0, 0.0]])}), scale=LogScale()),
            "'a' is 0 at seed 1, layer 0, but it must be a finite number in (0, inf), or NaN where there is no value",
        ),
        (lambda: reduce_replicates(xr.Dataset({"a": ("seed", [1.0])}), scale="log"), "scale is 'log', but it must be"),
        (lambda: reduce_replicates(xr.Dataset({"a": ("seed", [1.0])}), confidence=1), "confidence is 1, but it must"),
        (lambda: reduce_replicates(xr.Dataset({"a": ("seed", [True])})), "it must hold real numbers only"),
        (lambda: reduce_replicates(xr.Dataset({"a": ("seed", [-1e308, 1e308])}) * 1.7), "range must not overflow"),
    ],
)
def test_refusals_are_one_sentence(make, said):
    refused(make, said)


def test_a_null_outside_the_scale_is_refused_by_its_own_name():
    data = xr.Dataset({"a": ("seed", [1.0, 2.0]), "a_null": ("seed", [0.0, 1.0])})
    with pytest.raises(HelmscopeError, match="'a_null' is 0 at seed 0"):
        reduce_replicates(data, scale=LogScale())


# Bounds, ranges, and either form --------------------------------------------------------------------------------------


def test_the_interval_of_a_share_stays_in_0_to_1_and_nothing_else_changes():
    values = np.array([[0.0, 0.2, 1.0, 0.5], [0.1, 0.3, 0.9, 0.5], [0.9, 0.4, 0.2, 0.5]])
    plain = xr.Dataset({"share": (("seed", "layer"), values)})
    seen = reduce_replicates(plain.assign(share=plain.share.assign_attrs(valid_min=0.0, valid_max=1.0)))
    before = reduce_replicates(plain)
    assert before.share_low[0] < 0
    assert before.share_high[2] > 1
    for end in ("", "_stderr"):
        assert np.array_equal(seen[f"share{end}"], before[f"share{end}"])
    assert np.array_equal(seen.share_low, np.clip(before.share_low, 0, 1))
    assert np.array_equal(seen.share_high, np.clip(before.share_high, 0, 1))
    one = mean_interval(values[:, 0], scale=BoundedScale((0.0, 1.0)))
    assert (one.low, one.high) == (0.0, 1.0)
    assert one.estimate == mean_interval(values[:, 0]).estimate


def test_equal_shares_have_an_interval_of_width_0_also_at_a_bound_as_in_mean_interval():
    values = np.broadcast_to([0.0, 1.0, 0.5], (4, 3))
    attributes = {"valid_min": 0.0, "valid_max": 1.0}
    seen = reduce_replicates(xr.Dataset({"share": (("seed", "layer"), values, attributes)}))
    one = mean_interval(values[:, 1], scale=BoundedScale((0.0, 1.0)))
    assert (one.low, one.high) == (1.0, 1.0)
    for end in ("", "_low", "_high"):
        assert seen[f"share{end}"].values.tolist() == [0.0, 1.0, 0.5]
    assert seen.share_stderr.values.tolist() == [0.0, 0.0, 0.0]


def test_the_interval_of_a_share_does_not_jump_where_all_systems_reach_a_bound():
    """Shares that shrink to 0, as pairs that meet do towards time 0: the interval shrinks with them."""
    size = np.array([1e-2, 1e-4, 1e-8, 0.0])
    values = np.array([0.0, 0.5, 1.0, 2.0])[:, None] * size
    seen = reduce_replicates(xr.Dataset({"a": (("system", "time"), values, {"valid_min": 0.0, "valid_max": 1.0})}))
    assert (seen.a_high.values <= 3 * size).all()
    above = reduce_replicates(xr.Dataset({"a": (("system", "time"), 1 - values, seen.a.attrs)}))
    assert (above.a_low.values >= 1 - 3 * size).all()


def test_one_bound_is_enough_and_a_scale_that_is_given_comes_before_it():
    data = xr.Dataset({"rank": ("seed", [1.0, 1.1, 3.0], {"valid_min": 1.0})})
    assert float(reduce_replicates(data).rank_low) == 1.0
    assert float(reduce_replicates(data, scale=LinearScale()).rank_low) < 1.0


def test_a_share_may_leave_its_bounds_by_rounding_alone():
    barely = xr.Dataset({"order": ("seed", [1.0000001, 0.9999], {"valid_max": 1.0})})
    assert float(reduce_replicates(barely).order) == pytest.approx(0.99995005, rel=1e-14)
    above = xr.Dataset({"order": ("seed", [1.5, 0.5], {"valid_min": 0.0, "valid_max": 1.0})})
    refused(lambda: reduce_replicates(above), "'order' is 1.5 at seed 0, but it must be a finite number in [0, 1], or")


def test_a_bounded_interval_covers_as_often_as_the_whole_one():
    """Of uniform shares at n = 3, whose whole intervals often leave [0, 1]."""
    draws = np.random.default_rng(0).uniform(0, 1, (3, 4000))
    seen = reduce_replicates(xr.Dataset({"share": (("seed", "draw"), draws)}))
    cut = reduce_replicates(xr.Dataset({"share": (("seed", "draw"), draws, {"valid_min": 0.0, "valid_max": 1.0})}))
    covers = [((each.share_low <= 0.5) & (each.share_high >= 0.5)).values for each in (seen, cut)]
    assert np.array_equal(*covers)
    assert (seen.share_low < 0).mean() > 0.2


def test_a_summary_by_the_range_is_the_median_with_the_smallest_and_the_largest():
    values = np.array([[1e-9, 0.0], [1.0, NAN], [1e-3, 4.0], [1e3, 2.0]])
    data = xr.Dataset({"error": (("seed", "h"), values, {"summary": "range", "long_name": "error"})})
    seen = reduce_replicates(data)
    assert set(seen.data_vars) == {"error", "error_low", "error_high"}
    assert seen.error.values.tolist() == [(1.0 + 1e-3) / 2, 2.0]
    assert seen.error_low.values.tolist() == [1e-9, 0.0]
    assert seen.error_high.values.tolist() == [1e3, 4.0]
    assert seen.error.attrs == {"summary": "range", "long_name": "error", "n": 3, "band": "range about the median"}
    data.error.attrs["summary"] = "rnge"
    refused(lambda: reduce_replicates(data), "'rnge'")


def test_what_is_reduced_stays_as_it_is_and_what_is_not_becomes_so():
    data = measured()
    seen = reduced(data)
    assert seen.identical(reduce_replicates(data))
    assert reduced(seen) is seen
    refused(lambda: reduced(xr.Dataset({"a": 1.0}, attrs={"n": 2})), "'a' has neither 'a_stderr'")
