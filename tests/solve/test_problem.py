"""Problems: parts of a batch, noise and its seeds, continuing from changed states, and bad input."""

from __future__ import annotations

import pytest
import torch

from helmscope.fields.activations import SiLU
from helmscope.fields.attention import SA
from helmscope.fields.block import Block
from helmscope.fields.hardmax import Hardmax
from helmscope.fields.mlp import MLP
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted
from helmscope.fields.noise import IsotropicNoise, Ito, MatrixNoise, StateNoise, Stratonovich
from helmscope.fields.placement import PreNorm
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.euler_maruyama import EulerMaruyama
from helmscope.solve.events import HittingTime
from helmscope.solve.heun import Heun
from helmscope.solve.integrate import integrate, make_problem
from helmscope.solve.layer import Layer
from helmscope.solve.noisy_layer import NoisyLayer
from helmscope.solve.stochastic_heun import StochasticHeun
from helmscope.types import HelmscopeError
from support.attention_cases import measure, normal, tokens

F64 = torch.float64
X = tokens(5, 4, 3, seed=2)
NOISE = IsotropicNoise(0.3)
MLP_3 = MLP(w_in=normal(6, 3), w_out=normal(3, 6, seed=1), activation=SiLU())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stepper": Heun(0.1), "merge": 1e-3},
        {"noise": NOISE, "stepper": EulerMaruyama(0.05), "seed": 9},
        {"noise": MatrixNoise(torch.diag(torch.tensor([0.1, 0.2, 0.3])), common=True), "stepper": NoisyLayer(0.05)},
        {"noise": NOISE, "stepper": StochasticHeun(0.03)},
    ],
)
def test_a_part_of_the_batch_gives_the_bits_of_the_whole(options):
    whole = make_problem(
        SA(beta=3.0), X, [0.5, 1.0], events=[HittingTime(0.3)], **measure(["weights", "mask"], 5, 4), **options
    )
    run = whole.run()
    for first, last in ((0, 1), (1, 4), (4, 5), (0, 5)):
        part = whole.part(first, last).run()
        assert torch.equal(part.trajectory.states, run.trajectory.states[:, first:last])
        assert torch.equal(part.event_times[0].nan_to_num(-1), run.event_times[0][first:last].nan_to_num(-1))
        assert part.outcome.times == run.outcome.times[first:last]
        assert torch.equal(part.kernel(layer=-1), run.kernel(layer=-1)[first:last])


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 2), (3, 2), (0, 6), (0, 1.5), (None, 3)])
def test_a_part_that_is_not_there_is_refused(first, last):
    with pytest.raises(HelmscopeError, match=r"first is|last is|part is"):
        make_problem(SA(beta=3.0), X, [1.0]).part(first, last)


def noisy(seed, x=X, **options):
    return integrate(SA(beta=3.0), x, [0.0, 0.5, 1.0], noise=NOISE, stepper=EulerMaruyama(0.05), seed=seed, **options)


def test_the_seed_fixes_the_noise():
    assert torch.equal(noisy(1).states, noisy(1).states)
    assert (noisy(1).states[1:] - noisy(2).states[1:]).abs().max() > 0.01
    assert torch.equal(noisy(1).states[0], X)


def test_resume_draws_new_noise_that_the_seed_fixes():
    run = noisy(1)
    same = run.trajectory.states[1]
    one, two = run.resume(depth=1, states=same), run.resume(depth=1, states=same)
    assert one.times.tolist() == [0.5, 1.0]
    assert torch.equal(one.states, two.states)
    # other numbers than those of the first half second, and than those that the run itself drew here
    start = integrate(SA(beta=3.0), same, [0.0, 0.5], noise=NOISE, stepper=EulerMaruyama(0.05), seed=1)
    assert (one.states[-1] - start.states[-1]).abs().max() > 0.01
    assert (one.states[-1] - run.states[-1]).abs().max() > 0.01
    drawn = [run.resume(depth=1, states=same, generator=torch.Generator().manual_seed(k)).states for k in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert (drawn[0] - drawn[2]).abs().max() > 0.01


@pytest.mark.parametrize("matrix", [-torch.eye(3, dtype=F64), normal(3, 3, seed=8)])
def test_a_discontinuous_field_is_integrated_with_fixed_steps(matrix):
    """The farthest attracts, or some other: tokens slide along jumps, where SA of large beta goes too, to O(h)."""
    hard = Hardmax(query_key=matrix)
    for field in (hard, MultiHead([hard, hard]), Block(hard, MLP_3), MultiHeadAsPrinted([hard], [MLP_3])):
        assert make_problem(field, X, [1.0]).stepper == Heun(0.01)
    assert isinstance(make_problem(SA(beta=1.0), X, [1.0]).stepper, DormandPrince)
    assert isinstance(make_problem(hard, X, [1.0], stepper=DormandPrince()).stepper, DormandPrince)
    run = integrate(hard, X, [1.0])
    assert run.outcome.ok
    near = integrate(SA(beta=2000.0, query_key=matrix), X, [1.0], stepper=Heun(0.001)).states
    assert (run.states - near).abs().max() < 0.05


def test_noise_of_strength_0_changes_nothing():
    still = integrate(SA(beta=3.0), X, [1.0], noise=IsotropicNoise(0.0), stepper=StochasticHeun(0.05)).states
    assert (still - integrate(SA(beta=3.0), X, [1.0], stepper=Heun(0.05)).states).abs().max() < 1e-15


def test_a_noisy_stream_keeps_direction_and_radius():
    """On a stream without forces noise is a random walk in R^d: E|y_t|^2 = |y_0|^2 + 2 nu d t."""
    still = MLP(w_in=torch.zeros(1, 3), w_out=torch.zeros(3, 1), activation=SiLU())
    block = Block(SA(beta=0.0, value=torch.zeros(3, 3, dtype=F64)), still, placement=PreNorm())
    y = 2 * tokens(4000, 1, 3, seed=5)
    run = integrate(block, y, [1.0], noise=IsotropicNoise(0.2), stepper=EulerMaruyama(0.25))
    squares = run.trajectory.radius[0].square()
    error = float(squares.std() / len(y) ** 0.5)
    assert abs(float(squares.mean()) - (4 + 2 * 0.2 * 3)) < 4 * error
    assert (torch.linalg.vector_norm(run.states, dim=-1) - 1).abs().max() < 1e-14


PRE = Block(SA(beta=1.0), MLP_3, placement=PreNorm())


@pytest.mark.parametrize(
    ("field", "options", "sentence"),
    [
        (SA(beta=1.0), {"noise": NOISE, "stepper": DormandPrince()}, "noise needs a stochastic stepper"),
        (SA(beta=1.0), {"noise": NOISE, "stepper": Layer()}, "noise needs a stochastic stepper"),
        (SA(beta=1.0), {"stepper": EulerMaruyama(0.1)}, "EulerMaruyama needs noise=, such as"),
        (SA(beta=1.0), {"noise": 0.3, "stepper": EulerMaruyama(0.1)}, "noise is 0.3, but it must be a noise such as"),
        (SA(beta=1.0), {"noise": NOISE, "stepper": EulerMaruyama(0.1), "merge": 0.1}, "merge is 0.1, but under noise"),
        (SA(beta=1.0), {"noise": NOISE, "stepper": EulerMaruyama(0.1), "seed": -1}, "seed is -1"),
        (SA(beta=1.0), {"noise": NOISE, "stepper": EulerMaruyama(0.1), "seed": 0.5}, "seed is 0.5"),
        (
            SA(beta=1.0),
            {"noise": NOISE, "stepper": EulerMaruyama(1e-300)},
            "h is 1e-300, but reaching t=1 takes 1e.300",
        ),
        (SA(beta=1.0), {"stepper": Heun(1e-12)}, "h is 1e-12, but reaching t=1 takes 1e.12 steps"),
        (SA(beta=1.0), {"noise": NOISE, "stepper": NoisyLayer(0.3)}, "times holds 1, but NoisyLayer is a map"),
        (
            SA(beta=1.0),
            {"noise": IsotropicNoise(0.1, process=Stratonovich()), "stepper": NoisyLayer(0.5)},
            "process is Stratonovich.*NoisyLayer simulates the layer-norm chain only",
        ),
        (PRE, {"noise": IsotropicNoise(0.1, process=Ito()), "stepper": EulerMaruyama(0.5)}, r"process is Ito\(\), but"),
        (SA(beta=1.0), {"noise": MatrixNoise(torch.eye(2)), "stepper": EulerMaruyama(0.5)}, "diffusion has shape"),
        (SA(beta=1.0), {"noise": StateNoise(lambda x: x), "stepper": EulerMaruyama(0.5)}, "sigma"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_step(field, options, sentence):
    with pytest.raises(HelmscopeError, match=sentence):
        make_problem(field, X, [1.0], **options)
