"""n < d tokens whose flow commutes with rotations are integrated in R^n, with the same results."""

from __future__ import annotations

import pytest
import torch

import helmscope as hs
from helmscope.solve.integrate import make_problem
from helmscope.solve.symmetry import in_span

F64 = torch.float64
N, D = 5, 12
EYE = torch.eye(D, dtype=F64)
FIELDS = {
    "SA": hs.SA(beta=3.0),
    "USA": hs.USA(beta=1.0),
    "repulsive": hs.SA(beta=3.0, value=-EYE),
    "scaled": hs.USA(beta=1.0, query_key=0.5 * EYE, value=2 * EYE),
    "keys repel": hs.SA(beta=2.0, query_key=-EYE),
    "causal": hs.SA(beta=3.0, causal=True),
    "bias": hs.SA(beta=3.0, bias=hs.fields.alibi_bias(N, 0.3)),
    "bistochastic": hs.SinkhornAttention(beta=2.0),
    "hardmax": hs.Hardmax(query_key=-EYE),
    "heads": hs.MultiHead([hs.SA(beta=1.0), hs.SA(beta=4.0, value=-0.5 * EYE)]),
}


def start(batch: int = 3, n: int = N, d: int = D) -> torch.Tensor:
    return hs.Uniform(n=n, dim=d).sample(batch, seed=0)


def both(monkeypatch, *args, **options):
    """The run in the span of its start, and the same in all dimensions."""
    problem = make_problem(*args, **options)
    assert in_span(problem) is not None
    ours = problem.run()
    monkeypatch.setattr("helmscope.solve.problem.in_span", lambda problem: None)
    full = problem.run()
    monkeypatch.undo()
    return ours, full


def differ(ours, full) -> float:
    return float((ours.states - full.states).abs().max())


@pytest.mark.parametrize("name", FIELDS)
def test_every_field(name, monkeypatch):
    ours, full = both(monkeypatch, FIELDS[name], start(), [0.0, 0.5, 3.0])
    assert differ(ours, full) < 1e-10
    assert torch.equal(ours.states[0], start())
    assert ours.states.shape == (3, 3, N, D)
    assert ((ours.states.norm(dim=-1) - 1).abs() < 1e-14).all()


@pytest.mark.parametrize(
    "stepper",
    [
        hs.DormandPrince(),
        hs.solve.Heun(0.1),
        hs.RK4(0.1),
        hs.solve.GeodesicRK4(0.1),
        hs.solve.UnprojectedEuler(0.1),
        hs.Layer(0.1),
    ],
    ids=lambda stepper: type(stepper).__name__,
)
def test_every_kind_of_stepper(stepper, monkeypatch):
    ours, full = both(monkeypatch, hs.SA(beta=4.0), start(), [1.0, 2.0], stepper=stepper)
    assert differ(ours, full) < 1e-12


def test_weights_mask_merging_and_events(monkeypatch):
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0, 1.0], dtype=F64)
    mask = torch.tensor([True, True, True, True, False])
    events = [hs.solve.HittingTime(1e-3), hs.solve.ClusterMerge(0.1)]
    ours, full = both(
        monkeypatch, hs.SA(beta=2.0), start(), [0.0, 30.0], weights=weights, mask=mask, merge=1e-3, events=events
    )
    assert differ(ours, full) < 1e-10
    for found, wanted in zip(ours.event_times, full.event_times, strict=True):
        assert torch.isfinite(wanted).all()
        assert (found - wanted).abs().max() < 1e-8


def test_starts_that_span_less(monkeypatch):
    """Tokens that coincide, are opposite, or lie in a plane."""
    x = start(batch=1)[0]
    x[1] = x[0]
    x[2] = -x[0]
    plane = torch.zeros(4, D, dtype=F64)
    plane[:, :2] = hs.Uniform(n=4, dim=2).sample(seed=3)
    for tokens in (x, plane, EYE[:3]):
        ours, full = both(monkeypatch, hs.SA(beta=2.0), tokens, [0.0, 2.0])
        assert differ(ours, full) < 1e-10


def test_equal_tokens_stay_equal_where_they_repel():
    x = start(batch=1, n=6, d=20)
    x[:, 1] = x[:, 0]
    field = hs.SA(beta=4.0, value=-torch.eye(20, dtype=F64))
    assert in_span(make_problem(field, x, [1.0])) is not None
    late = hs.integrate(field, x, [60.0]).states[-1, 0]
    assert torch.equal(late[0], late[1])
    assert (late[0] - late[2]).norm() > 0.1


def test_derivatives_of_what_is_not_the_start(monkeypatch):
    """Weights and bias under a gradient; a transform or a dual number keeps all dimensions."""
    x = start()
    weights = torch.ones(N, dtype=F64).requires_grad_()
    bias = torch.zeros(N, N, dtype=F64).requires_grad_()
    found = []
    for reduce in (True, False):
        if not reduce:
            monkeypatch.setattr("helmscope.solve.problem.in_span", lambda problem: None)
        run = hs.integrate(hs.SA(1.0, bias=bias), x, [1.0], weights=weights, stepper=hs.RK4(0.2))
        found.append(torch.autograd.grad(run.states.square().cumsum(-1).sum(), (weights, bias)))
    for ours, full in zip(*found, strict=True):
        assert (ours - full).abs().max() < 1e-10
    monkeypatch.undo()

    def final(y):
        return hs.integrate(hs.SA(1.0), y, [1.0], stepper=hs.RK4(0.2)).states

    along = hs.sphere.project(x, x.flip(-1))
    _, moved = torch.func.jvp(final, (x,), (along,))
    near = (final(hs.sphere.retract(x + 1e-6 * along)) - final(x)) / 1e-6
    assert (moved - near).abs().max() < 1e-5


def test_float32(monkeypatch):
    ours, full = both(monkeypatch, hs.SA(beta=2.0), start().float(), [2.0])
    assert ours.states.dtype == torch.float32
    assert differ(ours, full) < 1e-4


def test_a_million_dimensions_meet_the_closed_form():
    small, large = (hs.integrate(hs.SA(beta=4.0), start(2, 4, d), [0.0, 5.0]) for d in (4, 10**6))
    assert large.states.shape == (2, 2, 4, 10**6)
    gram = large.states @ large.states.mT
    # from nearly orthogonal tokens: the closed form within the size of their inner products, 1/sqrt(d)
    gamma = float(hs.equiangular(hs.SA(beta=4.0), n=4, times=[5.0])[0])
    assert (gram[1] - gamma - (1 - gamma) * torch.eye(4, dtype=F64)).abs().max() < 0.01
    assert small.states.shape == (2, 2, 4, 4)


def test_bits_do_not_depend_on_the_batch():
    problem = make_problem(hs.SA(beta=4.0), start(7), [0.5, 2.0])
    whole = problem.run().states
    for first, last in ((0, 1), (2, 5), (6, 7)):
        assert torch.equal(problem.part(first, last).run().states, whole[:, first:last])


def test_a_run_goes_on_from_its_states(monkeypatch):
    run = hs.integrate(hs.SA(beta=2.0), start(), [1.0, 2.0, 3.0])
    again = run.resume(depth=1, states=run.trajectory.states[1])
    assert (again.states[-1] - run.states[-1]).abs().max() < 1e-8


class Height:
    """When a token first has a first coordinate of 0.9: not to be read off inner products."""

    def signal(self, x):
        return x[..., 0].amax(-1) - 0.9


@pytest.mark.parametrize(
    ("field", "options"),
    [
        (hs.SA(beta=1.0, query_key=torch.diag(torch.arange(1.0, D + 1))), {}),
        (hs.SA(beta=1.0, value=torch.diag(torch.arange(1.0, D + 1))), {}),
        (hs.SA(beta=1.0), {"events": [Height()]}),
        (hs.SA(beta=1.0), {"noise": hs.noise.IsotropicNoise(0.1), "stepper": hs.solve.EulerMaruyama(0.1)}),
        (lambda x: 0 * x, {}),
    ],
    ids=["B", "V", "event", "noise", "plain"],
)
def test_left_in_all_dimensions(field, options):
    assert in_span(make_problem(field, start(), [1.0], **options)) is None


def test_a_gradient_stays_in_all_dimensions():
    x = start().requires_grad_()
    assert in_span(make_problem(hs.SA(beta=1.0), x, [1.0])) is None
    hs.integrate(hs.SA(beta=1.0), x, [1.0]).states.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert in_span(make_problem(hs.SA(beta=1.0), start(n=D), [1.0])) is None
    assert in_span(make_problem(hs.SA(beta=1.0), start(n=1), [1.0])) is None
