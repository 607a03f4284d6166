"""``integrate`` as a whole: shapes, times, the System it returns, progress, gradients, padding, weights, bad input."""

from __future__ import annotations

import logging
import math
import time

import pytest
import torch

import helmscope as hs
from support import oracles

F64 = torch.float64
X0 = hs.Uniform(n=4, dim=3).sample(seed=0)
BATCH = hs.Uniform(n=4, dim=3).sample(batch=6, seed=1)
STEPPERS = [
    None,
    hs.RK4(h=0.1),
    hs.solve.Heun(h=0.1),
    hs.solve.ProjectedEuler(h=0.1),
    hs.solve.GeodesicEuler(h=0.1),
    hs.solve.GeodesicHeun(h=0.1),
    hs.solve.GeodesicRK4(h=0.1),
    hs.Layer(h=0.1),
    hs.solve.UnprojectedEuler(h=0.1),
]


# Shapes and times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("batch", [(), (6,), (2, 3), (1, 1, 1)])
def test_states_have_the_axes_of_the_start(batch, stepper):
    x0 = BATCH[: math.prod(batch)].reshape(*batch, 4, 3)
    kept = x0.clone()
    sim = hs.integrate(hs.SA(beta=1.0), x0, [0, 0.5, 1.0], stepper=stepper)
    assert sim.states.shape == (3, *batch, 4, 3)
    assert sim.states.dtype == F64
    assert torch.equal(sim.times, torch.tensor([0, 0.5, 1.0], dtype=F64))
    assert sim.trajectory.states.shape == (3, math.prod(batch), 4, 3)
    assert torch.equal(sim.states[0], kept)  # the start, to the bit
    assert torch.equal(x0, kept)
    assert sim.outcome.ok
    assert len(sim.outcome.statuses) == math.prod(batch)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.1)])
def test_a_batch_may_be_empty(stepper):
    sim = hs.integrate(hs.SA(beta=1.0), X0.expand(0, 4, 3), [0.5, 1.0], stepper=stepper)
    assert sim.states.shape == (2, 0, 4, 3)


@pytest.mark.parametrize("stepper", STEPPERS)
def test_time_zero_alone(stepper):
    sim = hs.integrate(hs.SA(beta=1.0), X0, [0], stepper=stepper)
    assert torch.equal(sim.states[0], X0)
    assert sim.outcome.ok


@pytest.mark.parametrize("field", [hs.SA(beta=4.0), hs.USA(beta=2.0)])
def test_other_requested_times_do_not_matter(field):
    alone = hs.integrate(field, BATCH, [2.0]).states[-1]
    for others in ([0, 1.0], [0.3, 0.30001, 1.999999], [k / 10 for k in range(20)]):
        among = hs.integrate(field, BATCH, [*others, 2.0, 2.5]).states[-2]
        assert (among - alone).abs().max() <= 2e-9  # measured 5e-10


def test_times_may_be_any_sequence_of_numbers():
    expected = hs.integrate(hs.SA(beta=1.0), X0, [1.0, 2.0]).states
    for times in ((1, 2), range(1, 3), torch.tensor([1, 2]), torch.tensor([1.0, 2.0], dtype=F64).numpy()):
        assert torch.equal(hs.integrate(hs.SA(beta=1.0), X0, times).states, expected)


def test_a_single_token_does_not_move():
    sim = hs.integrate(hs.USA(beta=9.0), X0[:1], [1.0, 1e6])
    assert sim.outcome.ok
    torch.testing.assert_close(sim.states, X0[:1].expand(2, 1, 3), rtol=0, atol=2e-16)


# A System -------------------------------------------------------------------------------------------------------------


def test_a_simulation_is_a_system():
    sim = hs.integrate(hs.SA(beta=2.0), BATCH, [0, 1.0])
    assert isinstance(sim, hs.types.System)
    assert isinstance(sim, hs.Simulation)
    assert isinstance(sim.trajectory, hs.Trajectory)
    assert sim.force(layer=0) is None


@pytest.mark.parametrize(("field", "kernel"), [(hs.SA, oracles.sa_kernel), (hs.USA, oracles.usa_kernel)])
def test_kernel_is_that_of_the_field(field, kernel):
    weights = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64)
    mask = torch.tensor([True, True, False, True])
    sim = hs.integrate(field(beta=2.0), BATCH, [0, 1.0], weights=weights, mask=mask)
    for step in (0, 1, -1):
        states = sim.states[step]
        given = sim.kernel(layer=step)
        assert torch.equal(given, field(beta=2.0).kernel(states, (weights * mask).expand(6, 4)))
        expected = [kernel(x.tolist(), 2.0, weights=weights.tolist(), mask=mask.tolist()) for x in states]
        torch.testing.assert_close(given, torch.tensor(expected, dtype=F64), rtol=1e-14, atol=1e-15)


def test_a_plain_callable_has_no_kernel():
    sim = hs.integrate(lambda x: x.flip(-1), X0, [1.0])
    with pytest.raises(hs.HelmscopeError, match=r"^field is function, but a kernel is defined for attention"):
        sim.kernel(layer=0)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.1)])
@pytest.mark.parametrize("x0", [X0, BATCH, BATCH.reshape(2, 3, 4, 3)])
def test_resume_gives_the_rest(x0, stepper):
    weights = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64)
    sim = hs.integrate(hs.SA(beta=4.0), x0, [0, 1.0, 2.0, 3.0], weights=weights, stepper=stepper)
    for step in (0, 1, 3):
        rest = sim.resume(depth=step, states=sim.trajectory.states[step])
        assert torch.equal(rest.times, sim.times[step:])
        assert torch.equal(rest.states[0], sim.states[step])
        assert (rest.states - sim.states[step:]).abs().max() <= 1e-9  # measured 3e-10
    again = sim.resume(depth=1, states=sim.trajectory.states[1]).resume(depth=2, states=sim.trajectory.states[3])
    assert torch.equal(again.states, sim.states[3:])


def test_resume_from_changed_states():
    sim = hs.integrate(hs.SA(beta=4.0), BATCH, [0.5, 1.0, 2.0], events=[hs.solve.HittingTime(0.5)])
    changed = BATCH.flip(0)
    rest = sim.resume(depth=1, states=changed)
    fresh = hs.integrate(hs.SA(beta=4.0), changed, [0.0, 1.0], events=[hs.solve.HittingTime(0.5)])
    assert torch.equal(rest.states, fresh.states)
    torch.testing.assert_close(rest.event_times[0], 1.0 + fresh.event_times[0], rtol=0, atol=1e-15, equal_nan=True)


def test_resume_tells_the_time_of_the_whole_run():
    """The outcome's times are those of the run, as ``times`` and ``event_times`` are."""
    sim = hs.integrate(hs.USA(beta=6.0), X0[:2], [1e-3, 1.0], stepper=hs.DormandPrince(max_steps=30))
    assert not sim.outcome.ok
    whole = hs.integrate(hs.SA(beta=1.0), X0, [1.0, 2.0])
    assert whole.resume(depth=0, states=whole.trajectory.states[0]).outcome.times == (2.0,)
    late = sim.resume(depth=0, states=sim.trajectory.states[0]).outcome
    assert late.times[0] > 1e-3


@pytest.mark.parametrize(
    "states", [2 * X0, X0 * torch.nan, X0[:3], X0.expand(2, 4, 3), X0[..., :2], X0[0], X0.tolist()]
)
def test_resume_refuses_bad_states(states):
    sim = hs.integrate(hs.SA(beta=1.0), X0, [0, 1.0])
    with pytest.raises(hs.HelmscopeError, match=r"^states "):
        sim.resume(depth=0, states=states)


@pytest.mark.parametrize(
    ("step", "said"), [(2, "2"), (-3, "-3"), (10**5000, "a whole number of 16610 bits")], ids=["2", "-3", "huge"]
)
def test_resume_refuses_a_time_index_outside_the_run(step, said):
    sim = hs.integrate(hs.SA(beta=1.0), X0, [0, 1.0])
    with pytest.raises(hs.HelmscopeError, match=rf"^depth is {said}, "):
        sim.resume(depth=step, states=X0)


# Progress and warnings ------------------------------------------------------------------------------------------------


def test_progress_rises_to_one():
    shares = []

    def listen(share):
        shares.append(share)
        time.sleep(0.11)  # longer than the pause between two reports

    hs.integrate(hs.SA(beta=1.0), X0, [0.5, 1.0], stepper=hs.RK4(h=0.25), progress=listen)
    assert shares == [0.25, 0.5, 0.75, 1.0, 1.0]
    shares.clear()
    hs.integrate(hs.SA(beta=1.0), BATCH, [0.5, 1.0], stepper=hs.DormandPrince(tol=1e-5), progress=listen)
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.5
    assert shares[-1] == 1
    assert len(shares) >= 4


def test_progress_is_reported_at_a_limited_rate():
    shares = []
    start = time.monotonic()
    hs.integrate(hs.SA(beta=1.0), X0, [1.0], stepper=hs.solve.ProjectedEuler(h=1e-3), progress=shares.append)
    assert 2 <= len(shares) <= 4 + 10 * (time.monotonic() - start)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.1)])
def test_progress_may_stop_the_run(stepper):
    class EnoughError(Exception):
        pass

    def stop(share):
        raise EnoughError

    with pytest.raises(EnoughError):
        hs.integrate(hs.SA(beta=1.0), X0, [1.0], stepper=stepper, progress=stop)


def test_an_early_stop_is_logged(caplog):
    with caplog.at_level(logging.WARNING, logger="helmscope"):
        hs.integrate(hs.SA(beta=1.0), X0, [1.0])
        assert not caplog.records
        sim = hs.integrate(hs.SA(beta=1.0), X0, [1.0], stepper=hs.DormandPrince(max_steps=2))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(sim.outcome) in caplog.text
    assert "raise max_steps" in caplog.text


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [hs.SA(beta=2.0), hs.USA(beta=1.0), lambda x: x @ torch.ones(3, 3, dtype=F64).triu()])
@pytest.mark.parametrize("stepper", [hs.RK4(h=0.1), hs.solve.GeodesicRK4(h=0.1), hs.DormandPrince(tol=1e-13)])
def test_gradient_with_respect_to_the_start(field, stepper):
    """d/ds L(x(1)) from N(x0 + s v) at s = 0: autograd against a difference of fourth order."""
    generator = torch.Generator().manual_seed(0)
    loss_weights = torch.randn(2, 4, 3, dtype=F64, generator=generator)
    v = hs.sphere.project(X0, torch.randn(4, 3, dtype=F64, generator=generator))

    def loss(x):
        events = [hs.solve.HittingTime(0.5), hs.solve.ClusterMerge(0.5)]
        return (loss_weights * hs.integrate(field, x, [0.4, 1.0], stepper=stepper, events=events).states).sum()

    x0 = X0.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x0), x0)
    h = 1e-3
    at = {k: loss(hs.sphere.retract(X0 + k * h * v)).item() for k in (-2, -1, 1, 2)}
    expected = (at[-2] - 8 * at[-1] + 8 * at[1] - at[2]) / (12 * h)
    assert (gradient * v).sum().item() == pytest.approx(expected, rel=0, abs=1e-9)


# Fields, padding, weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.05), hs.solve.GeodesicRK4(h=0.05)])
def test_a_plain_callable_is_projected(stepper):
    """x' = P_x a turns a token towards a: tan(theta / 2) falls like e^{-t}."""
    a = torch.tensor([0.0, 0.6, 0.8], dtype=F64)
    states = hs.integrate(lambda x: a.expand_as(x), BATCH, [1.0, 2.0], stepper=stepper).states
    before = torch.tan(hs.sphere.angle(BATCH, a) / 2)
    for t, x in zip((1.0, 2.0), states, strict=True):
        ratio = torch.tan(hs.sphere.angle(x, a) / 2) / before
        torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(-t)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("field", [hs.SA(beta=4.0), hs.USA(beta=2.0), hs.SA(beta=1.0, causal=True)])
@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.1), hs.Layer(h=0.25)])
def test_padding_changes_nothing(field, stepper):
    x0 = hs.Uniform(n=6, dim=3).sample(batch=3, seed=2)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:] = mask[1, 2] = False
    padded = hs.integrate(field, x0, [0.5, 2.0], mask=mask, stepper=stepper)
    assert torch.equal(padded.trajectory.weights, mask.to(F64)[None])
    for k in range(3):
        bare = hs.integrate(field, x0[k, mask[k]], [0.5, 2.0], stepper=stepper).states
        assert (padded.states[:, k, mask[k]] - bare).abs().max() <= 1e-9
    zero = hs.integrate(field, x0, [0.5, 2.0], weights=mask.to(F64), stepper=stepper)
    assert torch.equal(zero.states, padded.states)


@pytest.mark.parametrize("field", [hs.SA(beta=4.0), hs.USA(beta=2.0)])
@pytest.mark.parametrize(
    ("stepper", "bound"),
    [(None, 1e-12), *((make(h=0.25), 1e-13) for make in (hs.solve.Heun, hs.RK4, hs.solve.GeodesicRK4, hs.Layer))],
)
def test_weight_two_is_two_tokens(field, stepper, bound):
    weights = torch.tensor([1.0, 2.0, 1.0, 3.0], dtype=F64)
    copies = torch.tensor([0, 1, 1, 2, 3, 3, 3])
    times = [0.25, 0.5, 1.0, 4.0]
    weighted = hs.integrate(field, BATCH, times, weights=weights, stepper=stepper).states
    repeated = hs.integrate(field, BATCH[:, copies], times, stepper=stepper).states
    assert (weighted[:, :, copies] - repeated).abs().max() <= bound


def test_weights_of_each_system():
    weights = torch.rand(2, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(0)) + 0.1
    states = hs.integrate(hs.SA(beta=1.0), BATCH.reshape(2, 3, 4, 3), [1.0], weights=weights).states[0]
    one = hs.integrate(hs.SA(beta=1.0), BATCH[4], [1.0], weights=weights[1, 1]).states[0]
    assert torch.equal(states[1, 1], one)


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.5), hs.solve.GeodesicRK4(h=0.5)])
def test_a_callable_may_call_a_field_that_checks_its_tokens(stepper):
    mixed = hs.integrate(lambda x: hs.USA(beta=2.0)(x) / 2, X0, [4.0], stepper=stepper).states
    plain = hs.integrate(lambda x: hs.USA(beta=2.0).velocity(x) / 2, X0, [4.0], stepper=stepper).states
    assert torch.equal(mixed, plain)


@pytest.mark.parametrize("progress", ["bar", 3])
def test_progress_must_be_callable(progress):
    with pytest.raises(hs.HelmscopeError, match=r"^progress is .*, but it must be a callable"):
        hs.integrate(hs.SA(beta=1.0), X0, [1.0], progress=progress)


def test_tokens_just_off_the_sphere_are_put_back_and_others_keep_their_bits():
    near = hs.integrate(hs.SA(beta=1.0), X0 * (1 + 1e-6), [0, 1.0]).states
    assert (torch.linalg.vector_norm(near[0], dim=-1) - 1).abs().max() <= 1e-15
    exact = hs.integrate(hs.SA(beta=1.0), X0, [0, 1.0]).states
    assert torch.equal(exact[0], X0)
    assert (near - exact).abs().max() <= 1e-9


def test_events_may_come_from_a_generator():
    seen = hs.integrate(hs.SA(beta=0.0), X0, [30.0], events=(hs.solve.HittingTime(d) for d in (1e-1, 1e-3))).event_times
    assert 0 < seen[0] < seen[1] < 30


class NoSignal:
    def signal(self, x):
        return 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"events": hs.solve.HittingTime(1e-3)}, "events is HittingTime.*list"),
        ({"events": None}, "events is None.*list"),
        ({"events": [NoSignal()]}, "NoSignal whose signal is 1.0"),
        ({"merge": 0.6}, "merge is 0.6.*0.5"),
        ({"normalize": "no"}, "normalize is 'no'"),
        ({"field": lambda x: x.sum()}, r"field returns \(\) for tokens of shape \(4, 3\)"),
        ({"field": lambda x: None}, "field returns a NoneType"),
        ({"x0": X0.to_sparse()}, "layout torch.sparse_coo"),
        ({"x0": X0.to("meta")}, "on meta"),
        ({"x0": X0.expand(10**6, 4, 3), "times": range(10**5)}, r"times holds 100000 and x0 has shape .*9.6e\+03 GB"),
        ({"seed": 10**400}, "seed is 10{70}"),
        ({"weights": torch.full((4,), 1e308, dtype=F64)}, r"weights holds the entry 1e\+308"),
    ],
)
def test_what_a_new_user_tried_is_refused_with_one_sentence(options, words):
    given = {"field": hs.SA(beta=1.0), "x0": X0, "times": [1.0]} | options
    with pytest.raises(hs.HelmscopeError, match=words):
        hs.integrate(given.pop("field"), given.pop("x0"), given.pop("times"), **given)


@pytest.mark.parametrize("step", [0.5, "a", 2, -3, True])
def test_time_indices_are_checked(step):
    run = hs.integrate(hs.SA(beta=1.0), X0, [0.5, 1.0])
    for ask in (lambda k: run.kernel(layer=k), lambda k: run.resume(depth=k, states=X0)):
        with pytest.raises(hs.HelmscopeError, match=r"^(layer|depth) is .*stored times are numbered 0 to 1"):
            ask(step)


# Bad input ------------------------------------------------------------------------------------------------------------


def _with(value: float) -> torch.Tensor:
    x = X0.clone()
    x[2, 1] = value
    return x


BAD = {
    "NaN token": ({"x0": _with(math.nan)}, r"x0 holds NaN or infinite entries \(token 2\)"),
    "infinite token": ({"x0": _with(math.inf)}, r"x0 holds NaN or infinite entries \(token 2\)"),
    "NaN in a batch": ({"x0": torch.stack([X0, _with(math.nan)])}, r"x0 holds NaN .*\(token 2 of system 1\)"),
    "zero vector": ({"x0": X0 * torch.tensor([[1.0], [0], [1], [1]])}, r"x0 holds a zero vector \(token 1\)"),
    "off the sphere": ({"x0": 2 * X0}, r"x0 holds a token of norm 2 \(token 0\).*normalize=True"),
    "zero normalized": ({"x0": 0 * X0, "normalize": True}, r"x0 holds a zero vector"),
    "NaN normalized": ({"x0": _with(math.nan), "normalize": True}, r"x0 holds NaN"),
    "one axis": ({"x0": X0[0]}, r"x0 has shape \(3,\)"),
    "no tokens": ({"x0": X0[:0]}, r"x0 has shape \(0, 3\)"),
    "d = 1": ({"x0": torch.ones(4, 1, dtype=F64)}, r"x0 has dimension d=1"),
    "a list": ({"x0": X0.tolist()}, r"x0 is a list"),
    "integers": ({"x0": torch.eye(3, dtype=torch.long)}, r"x0 has dtype torch.int64"),
    "times fall": ({"times": [2.0, 1.0]}, r"times\[1\] is 1 after 2"),
    "times repeat": ({"times": [1.0, 1.0]}, r"times\[1\] is 1 after 1"),
    "negative time": ({"times": [-1.0, 1.0]}, r"times\[0\] is -1\.0"),
    "NaN time": ({"times": [1.0, math.nan]}, r"times\[1\] is nan"),
    "infinite time": ({"times": [math.inf]}, r"times\[0\] is inf"),
    "no times": ({"times": []}, r"times is \[\]"),
    "bare time": ({"times": 1.0}, r"times is 1\.0"),
    "text time": ({"times": "12"}, r"times is '12'"),
    "query_key size": ({"field": hs.SA(beta=1.0, query_key=torch.eye(2))}, r"query_key has shape \(2, 2\).*\(3, 3\)"),
    "value size": ({"field": hs.USA(beta=1.0, value=torch.eye(4))}, r"value has shape \(4, 4\).*\(3, 3\)"),
    "bias size": ({"field": hs.SA(beta=1.0, bias=torch.zeros(3, 3))}, r"bias has shape \(3, 3\).*\(4, 4\)"),
    "no field": ({"field": 3.0}, r"field is 3\.0"),
    "field class SA": ({"field": hs.SA}, r"field is "),
    "field class USA": ({"field": hs.USA}, r"field is "),
    "stepper text": ({"stepper": "rk4"}, r"stepper is 'rk4'"),
    "stepper class": ({"stepper": hs.RK4}, r"stepper is "),
    "adaptive class": ({"stepper": hs.DormandPrince}, r"stepper is "),
    "layer class": ({"stepper": hs.Layer}, r"stepper is "),
    "weights size": ({"weights": torch.ones(3)}, r"weights is \(3,\)"),
    "weights sign": ({"weights": torch.tensor([1.0, -1, 1, 1])}, r"weights holds the entry -1,"),
    "weights NaN": ({"weights": torch.tensor([1.0, math.nan, 1, 1])}, r"weights holds the entry nan,"),
    "weights zero": ({"weights": torch.zeros(4)}, r"weights and mask leave a system without"),
    "mask size": ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask is \(2, 4\)"),
    "mask dtype": ({"mask": torch.ones(4)}, r"mask has dtype torch.float32"),
    "mask empty": ({"mask": torch.zeros(4, dtype=torch.bool)}, r"weights and mask leave a system without"),
    "weightless field": ({"field": torch.sin, "weights": torch.ones(4)}, r"weights or mask is given"),
    "negative merge": ({"merge": -1e-9}, r"merge is -1e-09"),
}


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_one_sentence(given, sentence):
    options = {"field": hs.SA(beta=1.0), "x0": X0, "times": [1.0], **given}
    with pytest.raises(hs.HelmscopeError, match=f"^{sentence}") as caught:
        hs.integrate(options.pop("field"), options.pop("x0"), options.pop("times"), **options)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("field", [hs.SA, hs.USA])
@pytest.mark.parametrize("beta", [-1.0, math.nan, math.inf, "warm", None])
def test_bad_beta_is_refused(field, beta):
    with pytest.raises(hs.HelmscopeError, match=r"^beta is .*, but it must be a finite number >= 0$"):
        field(beta=beta)


@pytest.mark.parametrize("name", ["query_key", "value", "bias"])
@pytest.mark.parametrize("matrix", [torch.ones(2, 3), torch.ones(3), torch.full((3, 3), math.nan), [[1.0]]])
def test_bad_matrices_are_refused(name, matrix):
    with pytest.raises(hs.HelmscopeError, match=rf"^{name} (is|holds) "):
        hs.SA(beta=1.0, **{name: matrix})


def test_normalize_puts_tokens_on_the_sphere():
    scale = torch.tensor([[0.1], [2.0], [30.0], [1.0]], dtype=F64)
    given = hs.integrate(hs.SA(beta=1.0), scale * X0, [0, 1.0], normalize=True).states
    torch.testing.assert_close(given, hs.integrate(hs.SA(beta=1.0), X0, [0, 1.0]).states, rtol=0, atol=1e-14)
