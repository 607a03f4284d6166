"""One base class for all fields: parameters with gradients and batch axes, time, and where states live."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

import helmscope as hs
from helmscope.fields.activations import Tanh
from helmscope.fields.field import Field, FunctionField, StateSpace, as_field
from helmscope.fields.lowrank import LowRank
from helmscope.fields.multihead import MultiHead
from helmscope.fields.placement import NoNorm
from helmscope.fields.sinkhorn import SinkhornAttention
from helmscope.geometry.sphere import project
from helmscope.solve.flow import Flow
from helmscope.solve.rest import resting_state
from helmscope.types import HelmscopeError
from support.attention_cases import normal, tokens

F64 = torch.float64
MANY = 32
BETAS = torch.linspace(0.1, 4.0, MANY, dtype=F64)
B, V = normal(MANY, 3, 3, seed=1), normal(MANY, 3, 3, seed=2)
W_IN, W_OUT, B_IN = normal(MANY, 5, 3, seed=3), normal(MANY, 3, 5, seed=4), normal(MANY, 5, seed=5)
X = tokens(MANY, 4, 3)


def mlp(k):
    return hs.MLP(w_in=W_IN[k], w_out=W_OUT[k], b_in=B_IN[k], activation=Tanh())


ALL = slice(None)
# (all systems in one field, system k alone)
FIELDS = {
    "SA": lambda k: hs.SA(BETAS[k], query_key=B[k], value=V[k]),
    "USA": lambda k: hs.USA(BETAS[k] / 4, query_key=B[k], value=V[k]),
    "causal": lambda k: hs.SA(BETAS[k], query_key=B[k], causal=True),
    "thin": lambda k: hs.SA(
        1.0, query_key=LowRank(B[k][..., :2], V[k][..., :2]), value=LowRank(V[k][..., :1], B[k][..., :1])
    ),
    "hardmax": lambda k: hs.Hardmax(query_key=B[k]),
    "sinkhorn": lambda k: SinkhornAttention(BETAS[k], query_key=B[k]),
    "heads": lambda k: MultiHead([hs.SA(BETAS[k], value=V[k]), hs.SA(2.0, query_key=B[k])]),
    "mlp": mlp,
    "block": lambda k: hs.Block(hs.SA(BETAS[k], value=V[k]), mlp(k)),
}


@pytest.mark.parametrize("name", FIELDS)
def test_32_systems_with_separate_parameters_equal_32_calls(name):
    made = FIELDS[name]
    whole = made(ALL)
    assert whole.batch == (MANY,)
    velocity = whole.velocity(X)
    for k in range(MANY):
        alone = made(k).velocity(X[k : k + 1])[0]
        assert (velocity[k] - alone).abs().max() <= 1e-12 * max(1.0, float(alone.abs().max())), k
    assert whole.velocity(X.expand(2, MANY, 4, 3)).shape == (2, MANY, 4, 3)


@pytest.mark.parametrize("name", ["SA", "heads", "block"])
@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.1)])
def test_32_systems_integrate_as_32_runs_do(name, stepper):
    """Adaptive systems end at different steps, and the field goes on with the parameters of those that are left."""
    made, times = FIELDS[name], [0.3, 1.0]
    whole = hs.integrate(made(ALL), X, times, stepper=stepper, events=[hs.solve.HittingTime(1.5)])
    for k in range(0, MANY, 5):
        alone = hs.integrate(made(k), X[k], times, stepper=stepper, events=[hs.solve.HittingTime(1.5)])
        assert (whole.states[:, k] - alone.states).abs().max() <= 1e-12
        torch.testing.assert_close(whole.event_times[0][k], alone.event_times[0], rtol=0, atol=1e-9, equal_nan=True)
    part = whole.problem.part(3, 7).run()
    assert (part.states - whole.states[:, 3:7]).abs().max() <= 1e-12


def test_parameters_of_a_grid_of_systems():
    betas = torch.tensor([[0.5], [2.0]], dtype=F64)  # (2, 1): the same for the three systems of a row
    x = tokens(2, 3, 4, 3)
    seen = hs.integrate(hs.SA(betas), x, [0.5]).states[-1]
    for i, beta in enumerate((0.5, 2.0)):
        assert (seen[i] - hs.integrate(hs.SA(beta), x[i], [0.5]).states[-1]).abs().max() <= 1e-12


@pytest.mark.parametrize("stepper", [None, hs.RK4(h=0.05), hs.Layer()])
@pytest.mark.parametrize("kind", [hs.SA, hs.USA])
def test_the_gradient_of_a_loss_of_final_states(kind, stepper):
    x, target = tokens(4, 3), normal(4, 3, seed=9)
    given = [torch.tensor(1.3, dtype=F64), normal(3, 3, seed=1) / 2, normal(3, 3, seed=2) / 2]

    def loss(beta, b, v):
        return (target * hs.integrate(kind(beta, query_key=b, value=v), x, [1.0], stepper=stepper).states[-1]).sum()

    moving = [part.clone().requires_grad_() for part in given]
    gradients = torch.autograd.grad(loss(*moving), moving)
    for which, gradient in enumerate(gradients):
        for at in [()] if which == 0 else [(0, 0), (1, 2), (2, 0)]:
            step = torch.zeros_like(given[which])
            step[at] = 1e-5
            ends = [loss(*(p + s * step if k == which else p for k, p in enumerate(given))) for s in (1, -1)]
            finite = float((ends[0] - ends[1]) / 2e-5)
            assert float(gradient[at]) == pytest.approx(finite, rel=1e-6, abs=1e-7), (which, at)


def test_a_gradient_by_the_weights_of_an_mlp_and_by_beta_of_the_energy():
    x, w = tokens(4, 3), W_OUT[0].clone().requires_grad_()
    force = hs.MLP(w_in=W_IN[0], w_out=w, activation=Tanh())
    (slope,) = torch.autograd.grad(hs.integrate(force, x, [0.5]).states[-1][0, 0], w)
    assert slope.abs().max() > 1e-3
    beta = torch.tensor(2.0, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: hs.interaction_energy(x, beta=b), beta)


# Time -----------------------------------------------------------------------------------------------------------------

ORDERS = {
    "ProjectedEuler": (hs.solve.ProjectedEuler, 1),
    "Heun": (hs.solve.Heun, 2),
    "RK4": (hs.RK4, 4),
    "GeodesicEuler": (hs.solve.GeodesicEuler, 1),
    "GeodesicHeun": (hs.solve.GeodesicHeun, 2),
    "GeodesicRK4": (hs.solve.GeodesicRK4, 4),
}


class Turning(Field):
    """x' = w(t) J x on the circle with w = 1 + cos 3t, which turns by t + sin(3t) / 3, and a pull along e_1 in R^3."""

    @property
    def autonomous(self):
        return False

    def velocity(self, x, weights=None, *, t=0.0):
        w = 1 + torch.cos(3 * torch.as_tensor(t, dtype=F64))
        return w * torch.stack([-x[..., 1], x[..., 0]], -1)


def angle_at(t: float) -> float:
    return t + math.sin(3 * t) / 3


@pytest.mark.parametrize("name", ORDERS)
def test_a_field_that_depends_on_time_meets_the_order_of_its_stepper(name):
    """Geodesic methods of order 1 and 2 follow a turn exactly in space, so that only the stage times are tried."""
    stepper, order = ORDERS[name]
    starts = torch.linspace(0.0, 6.0, 20, dtype=F64)
    x = torch.stack([starts.cos(), starts.sin()], -1)[:, None]
    exact = starts + angle_at(1.0)
    errors, counts = [], (16, 32, 64)
    for count in counts:
        end = hs.integrate(Turning(), x, [1.0], stepper=stepper(h=1 / count)).states[-1][:, 0]
        off = torch.atan2(end[:, 1], end[:, 0]) - exact
        errors.append(float(torch.sin(off / 2).abs().max()))
    slopes = [math.log2(a / b) for a, b in pairwise(errors)]
    assert slopes[-1] == pytest.approx(order, abs=0.1)


def test_adaptive_steps_use_the_time_of_every_system():
    x = tokens(3, 1, 2)
    seen = hs.integrate(Turning(), x, [0.4, 2.0]).states
    first = torch.atan2(x[:, 0, 1], x[:, 0, 0])
    for state, t in zip(seen, (0.4, 2.0), strict=True):
        wanted = first + angle_at(t)
        assert (state[:, 0] - torch.stack([wanted.cos(), wanted.sin()], -1)).abs().max() < 1e-8


def test_a_resumed_run_continues_in_time():
    whole = hs.integrate(Turning(), tokens(2, 1, 2), [0.5, 1.5, 2.0])
    rest = whole.resume(depth=1, states=whole.trajectory.states[1])
    assert (rest.states[-1] - whole.states[-1]).abs().max() < 1e-8


def test_a_plain_function_may_depend_on_time():
    x = tokens(2, 3, 2)
    by_class = hs.integrate(Turning(), x, [1.0]).states
    by_function = hs.integrate(lambda x, t: Turning().velocity(x, t=t), x, [1.0]).states
    assert (by_class - by_function).abs().max() < 1e-12
    assert not FunctionField(lambda x, t: x).autonomous
    assert FunctionField(lambda x: x).autonomous


def test_a_state_at_rest_now_may_be_moved_later():
    """Two tokens that repel each other rest at opposite points; under a field that takes the time nothing is sure."""
    repulsive = hs.SA(beta=1.0, value=-torch.eye(2, dtype=F64))
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=F64)
    fields = FunctionField(lambda x: repulsive.velocity(x)), FunctionField(lambda x, t: repulsive.velocity(x))
    still, timed = (resting_state(Flow(field), x, 1.0, duration=1e4, tol=1e-6) for field in fields)
    assert torch.equal(still, x)
    assert timed is None


# Where states live ----------------------------------------------------------------------------------------------------


def test_states_of_a_block_without_norms_are_points_of_r_d():
    """y' = mean of the tokens + M y has a closed form: beta = 0, and the MLP is linear."""
    from scipy.linalg import expm

    matrix = normal(3, 3, seed=7) / 3
    force = hs.MLP(w_in=torch.eye(3, dtype=F64), w_out=matrix, activation=hs.activations.Identity())
    block = hs.Block(hs.SA(beta=0.0), force, placement=NoNorm())
    assert block.space is StateSpace.FLAT
    y = 3 * normal(4, 3, seed=8)
    y[0] = 0
    run = hs.integrate(block, y, [1.0])
    mean, rest = y.mean(0), y - y.mean(0)
    grown = torch.tensor(expm((matrix + torch.eye(3, dtype=F64)).numpy())) @ mean
    wanted = rest @ torch.tensor(expm(matrix.numpy())).mT + grown
    assert (run.states[-1] - wanted).abs().max() < 1e-7
    assert run.trajectory.radius is None
    assert torch.equal(hs.integrate(block, y, [1.0], stepper=hs.Layer()).states[-1], block.layer(y[None])[0])
    again = run.resume(depth=0, states=run.trajectory.states[0])
    assert torch.equal(again.states[-1], run.states[-1])
    with pytest.raises(HelmscopeError, match=r"x0 has shape \(3,\), but it must be \(..., n, d\) with n >= 1 points"):
        hs.integrate(block, y[0], [1.0])
    with pytest.raises(HelmscopeError, match="follows great circles, but the states of this field are points of R"):
        hs.integrate(block, y, [1.0], stepper=hs.solve.GeodesicRK4(0.1))


def test_a_field_that_is_not_callable_is_refused():
    for bad in (3, hs.SA, None):
        with pytest.raises(HelmscopeError, match=r"^field is .*, but it must be a field such as SA"):
            hs.integrate(bad, tokens(2, 2), [1.0])


@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_time_of_a_plain_function_is_always_a_tensor(batch):
    times = []

    def turning(x, t):
        times.append(t)
        return torch.cos(t) * x.flip(-1)

    hs.integrate(turning, tokens(*batch, 2, 3), times=[0.0, 0.5])
    assert all(isinstance(t, torch.Tensor) and t.dtype == F64 for t in times)
    assert as_field(turning)(tokens(2, 3), t=2.0).shape == (2, 3)


class Declared(Field):
    parameters = ("rate",)

    def velocity(self, x, weights=None, *, t=0.0):
        return torch.zeros_like(x)


class NotADataclass(Declared):
    parameters = {"rate": 0}  # noqa: RUF012
    rate = torch.ones(2)


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        (Declared(), r"parameters of Declared is \('rate',\), but it must map the names"),
        (NotADataclass(), "field NotADataclass declares parameters, but its class is not a frozen dataclass"),
    ],
)
def test_parameters_that_are_declared_wrongly_are_refused(field, sentence):
    with pytest.raises(HelmscopeError, match=sentence):
        hs.integrate(field, tokens(2, 2, 3), times=[0.0, 1.0])


def test_a_velocity_without_weights_is_rejected_before_any_work():
    class Short(Field):
        def velocity(self, x, t=0.0):
            return torch.zeros_like(x)

    words = r"velocity of Short has the arguments \(x, t=0.0\), but it must accept \(x, weights=None, \*, t=0.0\)"
    for use in (lambda x: hs.integrate(Short(), x, [1.0]), Short()):
        with pytest.raises(hs.HelmscopeError, match=words):
            use(torch.eye(3))


@dataclass(frozen=True, eq=False)
class Undeclared(Field):
    rate: torch.Tensor

    def velocity(self, x, weights=None, *, t=0.0):
        return self.rate * project(x, torch.ones_like(x))


def test_an_undeclared_parameter_per_system_is_rejected_before_any_work():
    x = hs.Uniform(4, 3).sample(3)
    words = r"rate of Undeclared has shape \(3, 1, 1\), one value per system, .* parameters = {'rate': 2}"
    with pytest.raises(hs.HelmscopeError, match=words):
        hs.integrate(Undeclared(torch.ones(3, 1, 1)), x, [1.0])
    for rate in (torch.ones(()), torch.ones(3)):  # the second has the shape of the batch, but is one value per axis
        assert hs.integrate(Undeclared(rate), x, [0.1]).outcome.ok
