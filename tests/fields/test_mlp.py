"""MLP and GatedMLP against 30-digit loops and torch's own modules; batches, derivatives and refusals, of splits too."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import support.mlp_oracles as oracles
from helmscope.fields import activations
from helmscope.fields.activations import GELU, Activation, GELUTanh, Identity, ReLU, SiLU, SquaredReLU, Tanh
from helmscope.fields.field import Field
from helmscope.fields.helmholtz import helmholtz, helmholtz_as_printed
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.geometry.sphere import retract
from helmscope.types import HelmscopeError

F32, F64 = torch.float32, torch.float64
NAMES = pytest.mark.parametrize("name", oracles.ACTIVATIONS)
MODULE = torch.nn.Sequential(torch.nn.GELU(), torch.nn.ReLU())
PARTS = ("potential", "gradient", "swirl", "harmonic")
GATED = pytest.mark.parametrize("gated", [False, True])
SPLITS = pytest.mark.parametrize("make", [helmholtz, helmholtz_as_printed])


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def tensors(hidden, dim, gated, seed=0, **options):
    given = oracles.parameters(hidden, dim, gated=gated, seed=seed, **options)
    return {name: torch.tensor(part, dtype=F64) for name, part in given.items()}


def build(given, activation=None):
    return (GatedMLP if "w_gate" in given else MLP)(**given, activation=activation or GELU())


def drawn(hidden, dim, gated, seed=0, activation=None, **options):
    return build(tensors(hidden, dim, gated, seed, **options), activation)


def size(values):
    return float(values.detach().abs().max())


# ---- values


@NAMES
@GATED
@pytest.mark.parametrize("biases", [False, True])
def test_loop_oracle(name, gated, biases):
    """Measured 3.4e-13, for a force in the hundreds."""
    for seed, (hidden, dim) in enumerate([(1, 1), (1, 2), (5, 2), (3, 4), (7, 3), (40, 16)]):
        given = oracles.parameters(hidden, dim, gated=gated, seed=seed, biases=biases)
        mlp = drawn(hidden, dim, gated, seed, getattr(activations, name)(), biases=biases)
        assert (mlp.hidden, mlp.dim) == (hidden, dim)
        x = normal(3, dim, seed=seed)
        expected = torch.tensor([[float(a) for a in oracles.force(given, name, x_i)] for x_i in x.tolist()], dtype=F64)
        assert (mlp(x) - expected).abs().max() <= 1e-12
        assert torch.equal(mlp(x), mlp.ambient(x))


def test_torch_modules_agree():
    given, x = tensors(9, 4, gated=False), normal(5, 4)
    for mine, theirs in ((GELU(), torch.nn.GELU()), (GELUTanh(), torch.nn.GELU("tanh")), (SiLU(), torch.nn.SiLU())):
        inner = torch.nn.functional.linear(x, given["w_in"], given["b_in"])
        expected = torch.nn.functional.linear(theirs(inner), given["w_out"], given["b_out"])
        assert (MLP(**given, activation=mine)(x) - expected).abs().max() < 2e-14


def test_defaults_and_own_activation():
    given, gated, x = tensors(5, 3, gated=False), tensors(5, 3, gated=True), normal(3)
    assert torch.equal(MLP(**given)(x), MLP(**given, activation=GELU())(x))
    assert torch.equal(GatedMLP(**gated)(x), GatedMLP(**gated, activation=SiLU())(x))

    class Cube(Activation):
        def __call__(self, z):
            return z * z * z

    expected = (given["w_in"] @ x + given["b_in"]) ** 3
    force = MLP(**given, activation=Cube())(x)
    assert (force - given["w_out"] @ expected - given["b_out"]).abs().max() < 1e-13


def test_velocity_is_the_tangential_part():
    for gated in (False, True):
        mlp, x = drawn(9, 4, gated), retract(normal(2, 5, 4))
        force = mlp(x)
        radial = (force * x).sum(-1, keepdim=True)
        assert radial.abs().max() > 1e-2
        assert (mlp.velocity(x) - (force - radial * x)).abs().max() < 1e-14
        weights = normal(2, 5).abs()
        assert torch.equal(mlp.velocity(x, weights), mlp.velocity(x))
        assert torch.equal(mlp.ambient(x, weights), force)


def test_protocols():
    mlp = drawn(4, 3, gated=True)
    assert isinstance(mlp, Field)
    assert not mlp.attends
    assert mlp.exchangeable
    assert mlp.exchangeable
    with pytest.raises(AttributeError):
        mlp.w_out = torch.ones(3, 4)


@GATED
def test_any_leading_axes(gated):
    mlp, x = drawn(6, 3, gated), normal(2, 4, 5, 3)
    force = mlp(x)
    for at in product(range(2), range(4), range(5)):
        assert (mlp(x[at]) - force[at]).abs().max() < 1e-13
    assert mlp(torch.empty(0, 5, 3)).shape == (0, 5, 3)
    assert mlp(torch.empty(0, 3)).shape == (0, 3)
    assert drawn(1, 1, gated)(torch.ones(1)).shape == (1,)


@GATED
def test_zero_rows(gated):
    given, x = tensors(4, 3, gated), normal(5, 3)
    for part in ("w_gate", "w_up", "w_in"):
        if part in given:
            given[part][1] = 0
    full = (GatedMLP if gated else MLP)(**given, activation=GELU())
    constant = GELU()(given["b_gate" if gated else "b_in"][1]) * (given["b_up"][1] if gated else 1)
    kept = [0, 2, 3]
    rest = {name: part[:, kept] if name == "w_out" else part[kept] for name, part in given.items() if name != "b_out"}
    others = type(full)(**rest, b_out=given["b_out"], activation=GELU())
    assert (full(x) - others(x) - constant * given["w_out"][:, 1]).abs().max() < 1e-14


# ---- dtypes and bits


@GATED
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32])
def test_parameters_are_cast_to_the_points(gated, dtype):
    given = {name: part.to(dtype) for name, part in tensors(8, 4, gated).items()}
    kind, x = (GatedMLP if gated else MLP), normal(6, 4)
    exact = kind(**{name: part.double() for name, part in given.items()})(x)
    assert torch.equal(kind(**given)(x), exact)  # nothing is rounded twice
    single = kind(**given)(x.float())
    assert single.dtype == F32
    assert (single - exact).abs().max() < 1e-5


@GATED
@NAMES
@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_system_does_not_depend_on_its_batch_to_the_bit(gated, name, dtype):
    for n, d, hidden in [(1, 2, 1), (1, 3, 64), (64, 16, 1), (3, 8, 5), (5, 16, 33), (32, 64, 96), (64, 3, 200)]:
        mlp = drawn(hidden, d, gated, activation=getattr(activations, name)())
        x = normal(4, n, d).to(dtype)
        together = mlp(x)
        for b in range(4):
            assert torch.equal(together[b], mlp(x[b : b + 1])[0]), (n, d, hidden)
            assert torch.equal(together[b], mlp(x[[3, b]])[1]), (n, d, hidden)


# ---- derivatives


@GATED
def test_gradcheck_in_points_and_parameters(gated):
    given = tensors(4, 3, gated)
    kind = GatedMLP if gated else MLP
    inputs = [part.requires_grad_() for part in (normal(2, 3), *given.values())]

    def force(x, *parts):
        return kind(**dict(zip(given, parts, strict=True)))(x)

    assert torch.autograd.gradcheck(force, inputs)


@GATED
def test_torch_func(gated):
    mlp, x, v = drawn(5, 3, gated), normal(4, 3), normal(4, 3, seed=1)
    jacobian = torch.func.vmap(torch.func.jacrev(mlp.ambient))(x)
    assert (torch.func.vmap(mlp.ambient)(x) - mlp(x)).abs().max() < 1e-14
    _, change = torch.func.jvp(mlp.ambient, (x,), (v,))
    assert (change - (jacobian @ v[..., None])[..., 0]).abs().max() < 1e-13
    h = 1e-5
    slope = (mlp(x + h * v) - mlp(x - h * v)) / (2 * h)
    assert (change - slope).abs().max() < 1e-8


# ---- refusals


def unsupported_reason(call):
    with pytest.raises(HelmscopeError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("gated", "name", "value", "words"),
    [
        (False, "w_in", torch.ones(3), ("(3,)", "(hidden, dim)")),
        (False, "w_in", torch.ones(0, 3), ("(0, 3)", ">= 1")),
        (False, "w_in", [[1.0]], ("list", "tensor")),
        (False, "w_in", torch.ones(4, 5), ("w_out", "(3, 4)", "(5, 4)")),
        (False, "w_out", torch.ones(4, 3), ("(4, 3)", "w_in of shape (4, 3)", "(3, 4)")),
        (False, "w_out", None, ("NoneType", "(3, 4)")),
        (False, "b_in", torch.ones(3), ("(3,)", "(4,)")),
        (False, "b_in", torch.ones(4, 1), ("(4, 1)", "(4,)")),
        (False, "b_in", 0.0, ("float", "(4,)")),
        (False, "b_out", torch.ones(4), ("(4,)", "(3,)")),
        (False, "w_in", torch.ones(4, 3, dtype=torch.int64), ("torch.int64", "torch.float32")),
        (False, "w_out", torch.ones(3, 4, dtype=torch.complex64), ("torch.complex64", "torch.float32")),
        (False, "w_in", torch.full((4, 3), math.nan), ("nan", "finite")),
        (False, "b_out", torch.tensor([0.0, math.inf, 0.0]), ("inf", "finite")),
        (False, "w_in", torch.ones(4, 3).to_sparse(), ("sparse", "dense")),
        (False, "w_in", torch.ones(4, 3, device="meta"), ("meta", "values")),
        (True, "w_gate", torch.ones(4, 3, 1), ("w_up", "(4, 3)", "(3, 1)")),
        (False, "w_in", torch.ones(2, 4, 3, 0), ("(2, 4, 3, 0)", "(hidden, dim)")),
        (True, "w_up", torch.ones(5, 3), ("(5, 3)", "w_gate of shape (4, 3)", "(4, 3)")),
        (True, "w_out", torch.ones(4, 3), ("(4, 3)", "(3, 4)")),
        (True, "b_gate", torch.ones(3), ("(3,)", "(4,)")),
        (True, "b_up", torch.ones(3), ("(3,)", "(4,)")),
        (True, "b_out", torch.ones(4), ("(4,)", "(3,)")),
        (True, "w_up", torch.full((4, 3), -math.inf), ("-inf", "finite")),
        (True, "b_up", torch.ones(4, dtype=torch.bool), ("torch.bool", "torch.float32")),
    ],
)
def test_bad_parameters(gated, name, value, words):
    message = unsupported_reason(lambda: (GatedMLP if gated else MLP)(**{**tensors(4, 3, gated), name: value}))
    assert all(word in message for word in (name, *words)), message


@GATED
@pytest.mark.parametrize("activation", [torch.relu, torch.nn.GELU(), GELU, "gelu", None, math.sin, MODULE])
def test_bad_activation(gated, activation):
    message = unsupported_reason(lambda: (GatedMLP if gated else MLP)(**tensors(4, 3, gated), activation=activation))
    shown = getattr(activation, "__name__", " ".join(repr(activation).split()))
    names = [*oracles.ACTIVATIONS, "subclass of Activation"]
    assert all(word in message for word in (f"activation is {shown}", *names)), message


def test_an_object_as_activation_is_named_by_its_class():
    class Wave:
        pass

    assert "activation is a Wave, but" in unsupported_reason(lambda: MLP(**tensors(4, 3, False), activation=Wave()))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1.0, 2.0, 3.0], ("list", "(..., 3)")),
        (torch.ones(2, 4), ("(2, 4)", "(..., 3)")),
        (torch.tensor(1.0), ("()", "(..., 3)")),
        (torch.ones(3, dtype=torch.int64), ("torch.int64", "torch.float64")),
        (torch.ones(3, dtype=torch.float16), ("torch.float16", "torch.float64")),
        (torch.tensor([1.0, math.nan, 0.0]), ("NaN", "finite")),
        (torch.tensor([1.0, math.inf, 0.0]), ("infinite", "finite")),
    ],
)
@GATED
def test_bad_points(gated, x, words):
    message = unsupported_reason(lambda: drawn(4, 3, gated)(x))
    assert all(word in message for word in ("x ", *words)), message


def test_bad_size_for_the_solver():
    message = unsupported_reason(lambda: drawn(4, 3, gated=False).check_size(torch.ones(2, 5, 4)))
    assert "(2, 5, 4)" in message
    assert "(..., 3)" in message


def test_a_force_that_overflows_is_refused():
    mlp = MLP(w_in=torch.eye(2), w_out=torch.eye(2), activation=SquaredReLU())
    message = unsupported_reason(lambda: mlp(torch.tensor([1e30, 0.0])))
    assert "1e+30" in message
    assert "torch.float32" in message
    assert torch.equal(mlp(torch.tensor([2.0**100, 0.0], dtype=F64)), torch.tensor([2.0**200, 0.0], dtype=F64))


def test_keywords_only():
    with pytest.raises(TypeError):
        MLP(torch.eye(2), torch.eye(2))
    x = torch.tensor([3.0, -1.0])
    assert torch.equal(MLP(w_in=torch.eye(2), w_out=torch.eye(2), activation=Identity())(x), x)
    assert torch.equal(MLP(w_in=torch.eye(2), w_out=torch.eye(2), activation=ReLU())(x), torch.tensor([3.0, 0.0]))


# ---- splits: the same questions of points, bits and derivatives (what they compute: test_helmholtz.py)


@GATED
@SPLITS
def test_a_split_does_not_depend_on_its_batch_to_the_bit(gated, make):
    for name in oracles.ACTIVATIONS:
        for n, d, hidden in [(1, 2, 1), (1, 3, 70), (64, 16, 1), (3, 8, 5), (5, 16, 33), (33, 12, 96)]:
            split = make(build(tensors(hidden, d, gated), getattr(activations, name)()))
            x = normal(4, n, d)
            for part in PARTS:
                together = getattr(split, part)(x)
                for b in range(4):
                    assert torch.equal(together[b], getattr(split, part)(x[b : b + 1])[0]), (name, part, n, d, hidden)


@GATED
@SPLITS
def test_shapes_and_dtypes_of_a_split(gated, make):
    given = tensors(5, 3, gated)
    split = make(build({name: part.bfloat16() for name, part in given.items()}))
    exact = make(build({name: part.bfloat16().double() for name, part in given.items()}))
    x = normal(2, 4, 3)
    for part in PARTS:
        call, tail = getattr(split, part), () if part == "potential" else (3,)
        assert call(x).shape == (2, 4, *tail)
        assert call(x[0]).shape == (4, *tail)
        assert call(x[0, 0]).shape == tail
        assert call(x[:0]).shape == (0, 4, *tail)
        assert (call(x).dtype, call(x.float()).dtype) == (F64, F32)
        assert torch.equal(call(x), getattr(exact, part)(x))
        assert size(call(x.float()) - call(x)) < 1e-5
        assert size(torch.func.vmap(torch.func.vmap(call))(x) - call(x)) < 1e-13
        _, change = torch.func.jvp(call, (x,), (torch.ones_like(x),))
        slope = (call(x + 1e-5) - call(x - 1e-5)) / 2e-5
        assert size(change - slope) < 1e-7


@GATED
def test_parameters_can_be_trained_through_a_split(gated):
    given, x = tensors(3, 2, gated), normal(2, 2)
    given["w_gate" if gated else "w_in"][1] = 0  # no NaN from a zero row
    inputs = [part.requires_grad_() for part in given.values()]

    def parts(*values):
        split = helmholtz(build(dict(zip(given, values, strict=True)), Tanh()))
        return split.potential(x), split.gradient(x), split.swirl(x), split.harmonic(x)

    for value in parts(*inputs):
        for slope in torch.autograd.grad(value.sum(), inputs, retain_graph=True, allow_unused=True):
            assert slope is None or bool(torch.isfinite(slope).all())
    live = [part.detach().clone().requires_grad_() for part in tensors(3, 2, gated).values()]
    assert torch.autograd.gradcheck(parts, live)


@GATED
@pytest.mark.parametrize("part", PARTS)
@SPLITS
def test_bad_points_of_a_split(gated, part, make):
    call = getattr(make(build(tensors(3, 2, gated), SquaredReLU())), part)
    for x, words in (
        (torch.ones(2, 3), r"x has shape \(2, 3\), but the parameters need \(..., 2\)"),
        ([1.0, 2.0], "x is a list"),
        (torch.ones(2, dtype=torch.int64), "x has dtype torch.int64"),
    ):
        with pytest.raises(HelmscopeError, match=words):
            call(x)


class Sine(Activation):
    def __call__(self, z):
        return torch.sin(z)


class HalfKnown(Sine):
    def potential(self, z):
        return 1 - torch.cos(z)


@GATED
def test_an_activation_without_table_is_refused_at_once(gated):
    for make in (helmholtz, helmholtz_as_printed):
        with pytest.raises(HelmscopeError, match=r"^activation Sine has no table of its potential[^\n]*$"):
            make(build(tensors(3, 2, gated), Sine()))


def test_the_ungated_split_needs_only_the_first_antiderivative():
    mlp, x = build(tensors(3, 2, gated=False), HalfKnown()), normal(4, 2)
    split = helmholtz(mlp)
    slope = torch.func.vmap(torch.func.grad(split.potential))(x)
    assert size(split.gradient(x) - slope) < 1e-14
    gated = build(tensors(3, 2, gated=True), HalfKnown())
    with pytest.raises(HelmscopeError, match="activation HalfKnown has no table of its double_potential"):
        helmholtz(gated)
    assert size(helmholtz_as_printed(gated).potential(x)) > 0


@SPLITS
@pytest.mark.parametrize(
    "mlp", [None, torch.nn.Linear(2, 2), torch.eye(2), MLP, GELU()], ids=lambda m: type(m).__name__
)
def test_only_mlps_are_split(make, mlp):
    with pytest.raises(
        HelmscopeError, match=rf"^mlp is an? {type(mlp).__name__}, but it must be an MLP or a GatedMLP$"
    ):
        make(mlp)
