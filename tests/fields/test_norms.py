"""The norms of transformers against 50 digits of mpmath, against torch's own, and by their geometry.

Bounds count roundings (``ulps``): eps = 2^-52 or 2^-23 times the natural size of the quantity. A number beside a bound
is the worst that was measured.
"""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.fields.norms import LayerNorm, RMSNorm, UnitNorm, layer_beta
from helmscope.geometry.sphere import retract
from helmscope.types import HelmscopeError

F64, F32 = torch.float64, torch.float32
DIGITS = mpmath.workdps(50)

# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def ulps(error, dtype, scale=1.0):
    """The greatest error, in units of rounding times ``scale``."""
    return float(torch.as_tensor(error).detach().double().abs().max()) / (torch.finfo(dtype).eps * scale)


def random(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gain(d):
    return 1 + 0.5 * random(d, seed=1000)


def bias(d):
    return random(d, seed=2000)


NORMS = {
    "unit": lambda d: UnitNorm(),
    "rms": lambda d: RMSNorm(),
    "rms gain": lambda d: RMSNorm(gain=gain(d)),
    "rms gain eps": lambda d: RMSNorm(gain=gain(d), eps=1e-1),
    "layer": lambda d: LayerNorm(),
    "layer gain bias": lambda d: LayerNorm(gain=gain(d), bias=bias(d)),
    "layer gain bias eps": lambda d: LayerNorm(gain=gain(d), bias=bias(d), eps=1e-1),
}
EVERY = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())


def exact(norm, y):
    """The norm of one vector by loops in 50 digits."""
    y = [mpmath.mpf(a) for a in y]
    d = len(y)
    if isinstance(norm, LayerNorm):
        mean = mpmath.fsum(y) / d
        y = [a - mean for a in y]
    total = mpmath.fsum(a * a for a in y)
    size = mpmath.sqrt(total if isinstance(norm, UnitNorm) else total / d + mpmath.mpf(norm.eps))
    g = [1] * d if norm.gain is None else norm.gain.tolist()
    b = [0] * d if norm.bias is None else norm.bias.tolist()
    return [mpmath.mpf(g[k]) * y[k] / size + mpmath.mpf(b[k]) for k in range(d)]


def off(value, expected):
    """value - expected, entry by entry, subtracted in 50 digits."""
    return torch.tensor([float(mpmath.mpf(a) - b) for a, b in zip(value.tolist(), expected, strict=True)])


# Values ---------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("d", [2, 3, 7, 64])
@DIGITS
def test_values_in_50_digits(norm, dtype, d):
    norm = norm(d)
    for seed in range(10):
        y = (10.0 ** (seed - 4) * (random(d, seed=seed) + 0.5)).to(dtype)
        assert ulps(off(norm(y), exact(norm, y.tolist())), dtype, 4) <= 2  # 1.7


@pytest.mark.parametrize(("dtype", "sizes"), [(F64, [1e-300, 1e-160, 1e160, 1e300]), (F32, [1e-36, 1e-22, 1e22, 1e36])])
@EVERY
@DIGITS
def test_tiny_and_huge_vectors(norm, dtype, sizes):
    norm = norm(5)
    for size in sizes:
        y = (size * random(5)).to(dtype)
        assert ulps(off(norm(y), exact(norm, y.tolist())), dtype, 4) <= 1  # 0.54


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-5])
@pytest.mark.parametrize("d", [2, 7, 64, 768])
def test_equal_to_those_of_torch(dtype, eps, d):
    y, g, b = random(4, 9, d, dtype=dtype), gain(d).to(dtype), bias(d).to(dtype)
    rms, layer = torch.nn.functional.rms_norm, torch.nn.functional.layer_norm
    assert ulps(RMSNorm(gain=g, eps=eps)(y) - rms(y, (d,), g, eps), dtype, 8) <= 1.5  # 1.0
    assert ulps(RMSNorm(eps=eps)(y) - rms(y, (d,), None, eps), dtype, 8) <= 1  # 0.5
    assert ulps(LayerNorm(gain=g, bias=b, eps=eps)(y) - layer(y, (d,), g, b, eps), dtype, 8) <= 2  # 1.5
    assert ulps(LayerNorm(eps=eps)(y) - layer(y, (d,), None, None, eps), dtype, 8) <= 3  # 2.1
    assert torch.equal(UnitNorm()(y), retract(y))


@pytest.mark.parametrize("d", [2, 3, 7, 768])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_vector_without_a_direction(d, dtype):
    zero, constants = torch.zeros(d, dtype=dtype), random(100, 1, dtype=dtype).expand(100, d)
    for norm in (UnitNorm(), RMSNorm()):
        assert norm(zero).isnan().all()
        assert norm.direction(zero).isnan().all()
        assert norm.radius(zero) == 0
    assert torch.equal(RMSNorm(eps=1e-5)(zero), zero)
    assert LayerNorm()(constants).isnan().all()
    assert torch.equal(LayerNorm().radius(constants), torch.zeros(100, dtype=dtype))
    b = bias(d).to(dtype)
    assert torch.equal(LayerNorm(bias=b, eps=1e-5)(constants), b.expand(100, d))
    assert torch.equal(LayerNorm(bias=b, eps=1e-30)(1e12 * constants), b.expand(100, d))


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_entry_that_is_not_finite_spoils_its_own_vector_only(norm, bad):
    y = random(3, 4)
    clean = norm(4)(y)
    y[1, 2] = bad
    value = norm(4)(y)
    assert value[1].isnan().all()
    assert torch.equal(value[[0, 2]], clean[[0, 2]])


# Images: spheres, ellipsoids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [2, 5, 64])
def test_images(d):
    """RMSNorm fills sqrt(d) G S^(d-1), no sphere unless the gain is constant; LayerNorm sqrt(d) G S^(d-2) + bias."""
    y, g, b = random(200, d), gain(d), bias(d)
    root, x = math.sqrt(d), retract(y)
    rms = RMSNorm(gain=g)(y)
    assert ulps((rms / g).norm(dim=-1) - root, F64, root) <= 2  # 1.8
    assert rms.norm(dim=-1).std() > 1e-3
    assert ulps(RMSNorm(gain=g)(3 * x) - root * g * x, F64, root) <= 2  # every point of it is reached
    assert ulps(RMSNorm(gain=torch.full((d,), 3.0))(y).norm(dim=-1) - 3 * root, F64, 3 * root) <= 2
    layer = (LayerNorm(gain=g, bias=b)(y) - b) / g
    assert ulps(layer.norm(dim=-1) - root, F64, root) <= 2  # 1.8
    assert ulps(layer.sum(-1), F64, d) <= 1  # 0.7
    assert (RMSNorm(eps=0.1)(y).norm(dim=-1) < root).all()  # with eps the image is the open ball


@EVERY
def test_radius_and_direction_are_polar_coordinates_of_the_normalized_part(norm):
    y, norm = 3 * random(50, 6) + 1, norm(6)
    direction, radius = norm.direction(y), norm.radius(y)
    centered = y - y.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else y
    assert ulps(direction.norm(dim=-1) - 1, F64) <= 2
    assert ulps(radius.unsqueeze(-1) * direction - centered, F64, 4) <= 2
    if isinstance(norm, LayerNorm):
        assert ulps(direction.sum(-1), F64) <= 2
    if norm.eps == 0 and not isinstance(norm, UnitNorm):
        assert ulps(norm.without_affine()(y) - math.sqrt(6) * direction, F64, math.sqrt(6)) <= 2  # 1.6


# Jacobians ------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("d", [2, 7])
@DIGITS
def test_jacobians_in_50_digits(norm, d):
    """Central differences of the loops, h = 1e-18."""
    norm, h = norm(d), mpmath.mpf(10) ** -18
    for seed in range(3):
        y = 2 * random(d, seed=seed) + 0.3
        for k in range(d):
            moved = ([mpmath.mpf(a) + s * h * (j == k) for j, a in enumerate(y.tolist())] for s in (1, -1))
            column = [(high - low) / (2 * h) for high, low in zip(*(exact(norm, m) for m in moved), strict=True)]
            assert ulps(off(norm.jacobian(y)[:, k], column), F64) <= 2  # 1.4


@EVERY
@pytest.mark.parametrize("d", [2, 7, 33])
def test_jacobians_against_autograd_and_finite_differences(norm, d):
    norm, y = norm(d), random(5, d) + 0.3
    jacobian = norm.jacobian(y)
    assert jacobian.shape == (5, d, d)
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        assert ulps(jacobian - torch.func.vmap(derivative(norm))(y), F64, 4) <= 1  # 0.75
    h = 1e-5 * torch.eye(d, dtype=F64)
    differences = (norm(y.unsqueeze(1) + h) - norm(y.unsqueeze(1) - h)) / 2e-5
    assert (jacobian - differences.mT).abs().max() < 1e-9  # 5.9e-10


@pytest.mark.parametrize(
    ("norm", "rank"),
    [
        (UnitNorm(), 6),
        (RMSNorm(), 6),
        (RMSNorm(gain=gain(7)), 6),
        (RMSNorm(eps=0.1), 7),
        (LayerNorm(), 5),
        (LayerNorm(gain=gain(7), bias=bias(7)), 5),
        (LayerNorm(gain=gain(7), eps=0.1), 6),
    ],
)
def test_ranks_at_d_7(norm, rank):
    """d - 2 for LayerNorm: neither the mean nor the length is seen; eps > 0 lets the length through."""
    values = torch.linalg.svdvals(norm.jacobian(random(20, 7)))
    assert (values[:, :rank] > 1e-3).all()
    assert ulps(values[:, rank:].sum(-1), F64) <= 4  # 2.7


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("d", [3, 7])
def test_eigenvalues(eps, d):
    """(s^2 + eps)^(-1/2) across, eps / (s^2 + eps)^(3/2) along y, and 0 along 1 for LayerNorm."""
    for y in random(10, d):
        for norm, part, lost in ((RMSNorm(eps=eps), y, 0), (LayerNorm(eps=eps), y - y.mean(), 1)):
            s2 = float(part @ part) / d
            radial, across = eps / (s2 + eps) ** 1.5, (s2 + eps) ** -0.5
            jacobian = norm.jacobian(y)
            expected = torch.tensor(sorted([0.0] * lost + [radial] + [across] * (d - 1 - lost)), dtype=F64)
            assert ulps(torch.linalg.eigvalsh(jacobian) - expected, F64, across) <= 16  # LAPACK's: 6.9, 9.3
            assert ulps(jacobian @ part - radial * part, F64, float(part.norm()) * across) <= 3  # 1.9
            assert lost == 0 or ulps(jacobian.sum(-1), F64, across) <= 2  # 1.4
        assert ulps(UnitNorm().jacobian(y) @ y, F64) <= 1  # 0.88


def test_jacobian_at_vectors_without_direction_and_at_huge_ones():
    """At C y = 0 it is G C / sqrt(eps); it scales as 1 / |y| where the squares of y leave the dtype."""
    g, y = gain(4), torch.full((4,), 0.1, dtype=F64)
    center = torch.eye(4, dtype=F64) - 0.25
    assert ulps(LayerNorm(gain=g, eps=0.25).jacobian(y) - 2 * g[:, None] * center, F64) <= 1
    assert LayerNorm().jacobian(y).isnan().all()
    assert UnitNorm().jacobian(0 * y).isnan().all()
    y = random(4)
    for norm in (UnitNorm(), RMSNorm(gain=g), LayerNorm(gain=g)):
        for far in (2.0**700, 2.0**-700):
            assert ulps(far * torch.func.jacrev(norm)(far * y) - norm.jacobian(y), F64) <= 1.5  # 1.0
            assert ulps(far * norm.jacobian(far * y) - norm.jacobian(y), F64) <= 1  # 0.88


# Folding --------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("shape", [(5, 64), (3, 5, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_gain_and_bias_fold_into_the_weights_that_follow(norm, shape, biased):
    norm, y, w = norm(64), random(20, 64), random(*shape, seed=1) / 8
    b = random(*shape[:-1], seed=2) if biased else None
    (folded, shift), core = norm.fold(w, b), norm.without_affine()
    assert shift.shape == shape[:-1]
    assert (core.gain, core.bias, core.eps) == (None, None, norm.eps)
    expected = torch.einsum("...kd,nd->...kn", w, norm(y)) + (0 if b is None else b.unsqueeze(-1))
    assert (
        torch.einsum("...kd,nd->...kn", folded, core(y)) + shift.unsqueeze(-1) - expected
    ).abs().max() < 1e-14  # 2.4e-15


def test_folding_needs_the_bias():
    w, y = random(3, 8), random(8)
    norm = LayerNorm(gain=gain(8), bias=bias(8))
    folded, shift = norm.fold(w)
    assert torch.equal(folded, w * norm.gain)
    assert ulps(shift - torch.stack([sum(row[k] * norm.bias[k] for k in range(8)) for row in w]), F64, 4) <= 1  # 0.5
    assert (folded @ norm.without_affine()(y) - w @ norm(y)).abs().max() > 0.1


# Derivatives, transforms and batches ----------------------------------------------------------------------------------


def with_parameters(kind, **fixed):
    """The norm as a function of y, gain and, for LayerNorm, bias."""
    names = ("gain", "bias") if kind is LayerNorm else ("gain",)
    return lambda y, *parts: kind(**dict(zip(names, parts, strict=False)), **fixed)(y)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_gradients_in_y_gain_and_bias(kind, eps):
    inputs = [part.requires_grad_() for part in (random(3, 4), gain(4), bias(4))[: 3 if kind is LayerNorm else 2]]
    function = with_parameters(kind, eps=eps)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, atol=1e-7, rtol=1e-7)
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-6, rtol=1e-6)
    plain = kind(eps=eps)
    for method in (plain.jacobian, plain.radius, plain.direction, UnitNorm(), UnitNorm().jacobian):
        assert torch.autograd.gradcheck(method, inputs[:1], check_forward_ad=True, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_gradients_at_vectors_without_direction_match_the_closed_form(kind):
    y = torch.full((4,), 0.3 if kind is LayerNorm else 0.0, dtype=F64)
    norm = kind(gain=gain(4), eps=1e-2)
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        assert ulps(derivative(norm)(y) - norm.jacobian(y), F64, 10) <= 1


@EVERY
def test_autograd_transforms(norm):
    norm, y, v = norm(5), random(6, 3, 5), random(6, 3, 5, seed=1)
    assert torch.equal(torch.func.vmap(norm)(y), norm(y))
    assert torch.equal(torch.func.vmap(norm.jacobian)(y), norm.jacobian(y))
    _, along = torch.func.jvp(norm, (y,), (v,))
    assert ulps(along - (norm.jacobian(y) @ v.unsqueeze(-1)).squeeze(-1), F64, 8) <= 1.5  # 1.0
    _, pull = torch.func.vjp(norm, y)
    assert ulps(pull(v)[0] - (norm.jacobian(y).mT @ v.unsqueeze(-1)).squeeze(-1), F64, 8) <= 1.5  # 1.0


@EVERY
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("d", [2, 3, 8, 33, 257])
def test_a_system_does_not_depend_on_its_batch_to_the_bit(norm, dtype, d):
    norm, y = norm(d), random(11, 5, d, dtype=dtype) + 1
    for method in (norm, norm.radius, norm.direction, norm.jacobian):
        together = method(y)
        assert all(torch.equal(together[i], method(y[i])) for i in range(11))
        assert torch.equal(together[7, 3], method(y[7, 3]))
        assert torch.equal(together[3:5], method(y[3:5]))


@pytest.mark.parametrize(("y", "parameters"), [(F32, F64), (F64, F32)])
def test_parameters_take_the_dtype_of_y(y, parameters):
    norm = LayerNorm(gain=gain(4).to(parameters), bias=bias(4).to(parameters), eps=1e-5)
    point = random(2, 4).to(y)
    assert norm(point).dtype == norm.jacobian(point).dtype == y
    assert all(part.dtype == y for part in norm.fold(random(3, 4).to(y)))


# The temperature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "head_dim", "scale"), [(6, 6, 1.0), (6, 2, 1.0), (6, 3, 0.7)])
def test_layer_beta_makes_attention_on_the_unit_sphere_that_of_the_layer(d, head_dim, scale):
    y, query, key = random(9, d), random(head_dim, d, seed=1), random(head_dim, d, seed=2)
    tokens = RMSNorm()(y)
    logits = (tokens @ query.T) @ (tokens @ key.T).T / math.sqrt(head_dim)
    beta = layer_beta(d, head_dim, scale=scale)
    kernel = SA(beta, query_key=query.T @ key / scale).kernel(retract(y))
    assert ulps(kernel - torch.softmax(logits, -1), F64) <= 3  # 2.0


def test_layer_beta_of_the_identity_is_the_root_of_d():
    assert [layer_beta(d, d) for d in (4, 64, 2)] == [2.0, 8.0, 2 / math.sqrt(2)]
    assert layer_beta(768, 64, scale=0.5) == 48.0


# Refusals -------------------------------------------------------------------------------------------------------------

ONES, FLAT = torch.ones(3, dtype=F64), torch.ones(4)
VECTOR, FLOATS = "but it must be a torch tensor of shape (d,)", "but it must be a torch tensor of float64 or float32"
THREE = "of shape (3,) requires (..., 3)"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: RMSNorm(eps=-1e-5), "eps is -1e-05, but it must be a finite number >= 0"),
        (lambda: LayerNorm(eps=math.nan), "eps is nan, but it must be a finite number >= 0"),
        (lambda: RMSNorm(gain=torch.ones(2, 3)), f"gain is of shape (2, 3), {VECTOR}"),
        (lambda: LayerNorm(bias=torch.ones(0)), f"bias is of shape (0,), {VECTOR}"),
        (lambda: RMSNorm(gain=[1.0]), f"gain is a list, {VECTOR}"),
        (lambda: RMSNorm(gain=ONES.long()), "gain has dtype torch.int64, but it must hold floating-point numbers"),
        (lambda: RMSNorm(gain=ONES / 0), "gain holds the entry inf, but every entry must be finite"),
        (lambda: LayerNorm(bias=ONES * math.nan), "bias holds the entry nan, but every entry must be finite"),
        (lambda: LayerNorm(gain=ONES, bias=FLAT), "bias has shape (4,), but gain has (3,)"),
        (lambda: RMSNorm()([1.0]), f"y is a list, {FLOATS}"),
        (lambda: UnitNorm()(FLAT.half()), f"y is a tensor of torch.float16, {FLOATS}"),
        (lambda: UnitNorm().jacobian(FLAT[0]), "y has shape (), but it must be (..., d) with d >= 1"),
        (lambda: RMSNorm().radius(torch.ones(2, 0)), "y has shape (2, 0), but it must be (..., d) with d >= 1"),
        (lambda: RMSNorm(gain=ONES)(FLAT), f"y has shape (4,), but gain {THREE}"),
        (lambda: RMSNorm(gain=ONES).direction(torch.ones(2, 1)), f"y has shape (2, 1), but gain {THREE}"),
        (lambda: LayerNorm(bias=ONES).jacobian(FLAT), f"y has shape (4,), but bias {THREE}"),
        (lambda: RMSNorm(gain=ONES).fold(torch.ones(2, 4)), f"w has shape (2, 4), but gain {THREE}"),
        (lambda: UnitNorm().fold(FLAT), "w has shape (4,), but it must be (..., k, d) with d >= 1"),
        (lambda: UnitNorm().fold(torch.ones(2, 4), ONES), "b is (3,), but w of shape (2, 4) requires (2,)"),
        (lambda: UnitNorm().fold(torch.ones(2, 4), 1.0), "b is a float, but w of shape (2, 4) requires (2,)"),
        (lambda: layer_beta(0, 4), "dim is 0, but it must be a whole number >= 1"),
        (lambda: layer_beta(4, 2.5), "head_dim is 2.5, but it must be a whole number >= 1"),
        (lambda: layer_beta(4, 4, scale=-1.0), "scale is -1.0, but it must be a finite number >= 0"),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises(HelmscopeError) as refusal:
        call()
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("call", [lambda: LayerNorm(ONES), lambda: RMSNorm(bias=ONES), lambda: UnitNorm(eps=0.1)])
def test_options_are_keyword_only_and_differ_by_norm(call):
    with pytest.raises(TypeError):
        call()
