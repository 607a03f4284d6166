"""Activations and their antiderivatives against printed digits, 30-digit quadrature, closed forms and torch itself."""

from __future__ import annotations

import math
import pickle

import mpmath
import numpy as np
import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional

from helmscope.fields import activations
from helmscope.fields.activations import (
    GELU,
    Activation,
    GELUTanh,
    Identity,
    QuickGELU,
    ReLU,
    Sigmoid,
    SiLU,
    SquaredReLU,
    Tanh,
    from_name,
    sigmoid,
)
from helmscope.types import HelmscopeError

# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

F32, F64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan
SMOOTH = [Tanh(), Sigmoid(), SiLU(), GELU(), GELUTanh(), QuickGELU()]
ALL = [Identity(), ReLU(), SquaredReLU(), *SMOOTH]
every = pytest.mark.parametrize("act", ALL, ids=repr)
smooth = pytest.mark.parametrize("act", SMOOTH, ids=repr)

SIZES = [
    *(1e-9, 1e-4, 0.01, 0.124, 0.125, 0.3, 0.77, 1.0, 1.6, 2.5, 3.3, 4.4, 5.9, 8.0, 8.99, 9.01, 11.5, 14.2, 17.0),
    *(19.9, 20.1, 23.6, 27.0, 31.0, 35.5, 39.9, 40.1, 48.0, 60.0, 75.0, 1e3, 1e4),
]
PLACES = [sign * size for size in SIZES if size < 42 for sign in (-1, 1)]


def tensor(*values: float, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def chain(act):
    return [act.double_potential, act.potential, act, act.slope]


# ---- oracles

mp = mpmath.mpf


def logistic(z):
    return 1 / (1 + mpmath.exp(-z))


ORACLES = {
    Identity(): lambda z: z,
    ReLU(): lambda z: max(z, mp(0)),
    SquaredReLU(): lambda z: max(z, mp(0)) ** 2,
    Tanh(): mpmath.tanh,
    Sigmoid(): logistic,
    SiLU(): lambda z: z * logistic(z),
    GELU(): lambda z: z * mpmath.ncdf(z),
    # not (1 + tanh y)/2, which would cost the oracle its digits on the left
    GELUTanh(): lambda z: z * logistic(2 * mpmath.sqrt(2 / mpmath.pi) * (z + mp("0.044715") * z**3)),
    QuickGELU(): lambda z: z * logistic(mp("1.702") * z),
}


def integrals(s, places):
    """psi and Psi = z int_0^z s - int_0^z u s(u) du at places of one sign and rising size, piece by piece."""
    zeroth, first, start, found = mp(0), mp(0), mp(0), []
    for z in map(mp, places):
        zeroth += mpmath.quad(s, [start, z])
        first += mpmath.quad(lambda u: u * s(u), [start, z])
        found.append((zeroth, z * zeroth - first))
        start = z
    return found


def worst_error(computed, exact):
    return max(float(abs(c - e) / abs(e)) if e else abs(c) for c, e in zip(computed, exact, strict=True))


@every
def test_quadrature(act):
    """Relative to the value, at every size of z. Measured: 7.1e-16 at most for psi, 5.7e-16 for Psi."""
    for sizes in (SIZES, [-size for size in SIZES]):
        with mpmath.workdps(40):  # of which a small z costs ten
            once, twice = zip(*integrals(ORACLES[act], sizes), strict=True)
            assert worst_error(act.potential(tensor(*sizes)).tolist(), once) < 1e-15
            assert worst_error(act.double_potential(tensor(*sizes)).tolist(), twice) < 1e-15


def closed_tanh(z):
    a = abs(z)
    psi = a + mpmath.log1p(mpmath.exp(-2 * a)) - mpmath.log(2)
    double = a * a / 2 - a * mpmath.log(2) + mpmath.polylog(2, -mpmath.exp(-2 * a)) / 2 + mpmath.pi**2 / 24
    return psi, mpmath.sign(z) * double


def closed_sigmoid(z):
    psi = mpmath.log1p(mpmath.exp(z)) - mpmath.log(2)
    return psi, -mpmath.polylog(2, -mpmath.exp(z)) - mpmath.pi**2 / 12 - z * mpmath.log(2)


def closed_silu(z):
    li2, li3 = (mpmath.polylog(n, -mpmath.exp(z)) for n in (2, 3))
    psi = z * mpmath.log1p(mpmath.exp(z)) + li2 + mpmath.pi**2 / 12
    return psi, -z * li2 + 2 * li3 + mpmath.pi**2 * z / 12 + mp(3) / 2 * mpmath.zeta(3)


def closed_gelu(z):
    psi = ((z * z - 1) * mpmath.ncdf(z) + z * mpmath.npdf(z)) / 2 + mp(1) / 4
    double = ((z**3 - 3 * z) * mpmath.ncdf(z) + (z * z - 4) * mpmath.npdf(z)) / 6 + z / 4
    return psi, double + mp(2) / 3 / mpmath.sqrt(2 * mpmath.pi)


CLOSED = [(Tanh(), closed_tanh), (Sigmoid(), closed_sigmoid), (SiLU(), closed_silu), (GELU(), closed_gelu)]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("act", "closed"), CLOSED, ids=[repr(act) for act, _ in CLOSED])
def test_closed_forms(act, closed, dtype):
    """The table of theory; in float32 the result is the exact value, rounded once."""
    size = np.random.default_rng(0).uniform(-4, 1.7, 60)
    z = torch.tensor(np.where(np.arange(60) % 2, 1, -1) * 10**size, dtype=dtype)
    with mpmath.workdps(50):
        once, twice = zip(*(closed(mp(x)) for x in z.tolist()), strict=True)
        for values, exact in ((act.potential(z), once), (act.double_potential(z), twice)):
            assert values.dtype == dtype
            if dtype == F64:
                assert worst_error(values.tolist(), exact) < 1e-15
            else:
                assert torch.equal(values, torch.tensor([float(e) for e in exact], dtype=F64).float())


DIGITS = {
    Tanh(): (0.43378083048302719, 0.43378083048302719, 1.3250027473578644),
    SiLU(): (0.1705573495024382, 0.3294426504975618, 1.5624014733762555),
    GELU(): (0.12901463774042833, 0.37098536225957167, 1.7698657685909192),
    GELUTanh(): (0.12905372440366739, 0.37094627559633261, 1.7696778558027947),
    Sigmoid(): (-0.37988549304172248, 0.62011450695827752, 1.4337808304830272),
}
DOUBLE_DIGITS = {
    Tanh(): (-0.15258009379489941, 0.15258009379489941),
    SiLU(): (-0.063159433683789488, 0.10350723298287718),
    GELU(): (-0.052138757348130872, 0.11452790931853579),
}


def test_digits_of_the_theory():
    for act, digits in DIGITS.items():
        assert act.potential(tensor(-1, 1, 2)).tolist() == pytest.approx(digits, rel=5e-16, abs=0), act
    for act, digits in DOUBLE_DIGITS.items():
        assert act.double_potential(tensor(-1, 1)).tolist() == pytest.approx(digits, rel=5e-16, abs=0), act


def test_the_two_gelus_differ_by_their_bound():
    """The greatest difference on [-8, 8], at its ends: 4.1423e-4 to five digits."""
    z = torch.linspace(-8, 8, 160001, dtype=F64)
    apart = (GELU().potential(z) - GELUTanh().potential(z)).abs()
    assert apart.max().item() == pytest.approx(4.1423223157268644e-4, rel=0, abs=4e-15)
    assert apart[0].item() == pytest.approx(4.1423223157268644e-4, rel=0, abs=1e-16)


@every
def test_value_and_slope(act):
    """Relative to their values down to 1e-20, where one rounding of z weighs z^2: 1.2e-14 measured."""
    z, s = tensor(*PLACES), ORACLES[act]
    with mpmath.workdps(60):
        values = tensor(*(float(s(mp(x))) for x in PLACES))
        slopes = tensor(*(float(mpmath.diff(s, mp(x))) for x in PLACES))
    for found, exact in ((act(z), values), (act.slope(z), slopes)):
        small = exact.abs() < 1e-20
        assert ((found - exact).abs() / exact.abs())[~small].max() < 2e-14
        assert (found.abs()[small] < 1.1e-20).all()
        assert (found - exact).abs().max() < 1e-14


TORCH = {
    Tanh(): torch.tanh,
    Sigmoid(): torch.sigmoid,
    SiLU(): functional.silu,
    GELU(): functional.gelu,
    GELUTanh(): lambda z: functional.gelu(z, approximate="tanh"),
    QuickGELU(): lambda z: z * torch.sigmoid(1.702 * z),
}


@smooth
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-15), (F32, 5e-7)])
def test_torch_has_the_same_function(act, dtype, bound):
    z = torch.linspace(-6, 6, 1001, dtype=dtype)
    assert act(z).dtype == act.slope(z).dtype == dtype
    assert (act(z) - TORCH[act](z)).abs().max() < bound * 6
    assert (act.slope(z) - vmap(grad(TORCH[act]))(z.double())).abs().max() < bound * 2


# ---- ends of the line


@every
def test_zero(act):
    for dtype in (F32, F64):
        zero = tensor(0.0, -0.0, dtype=dtype)
        assert not act.potential(zero).any()
        assert not act.double_potential(zero).any()


@pytest.mark.parametrize("act", [Identity(), *SMOOTH], ids=repr)
def test_tiny(act):
    """psi = s(0) z + s'(0) z^2/2 and no more: nothing cancels on the way there."""
    z, value, slope = tensor(-1e-60, 1e-60), act(tensor(0.0)), act.slope(tensor(0.0))
    psi, double = value * z + slope * z * z / 2, value * z * z / 2 + slope * z * z * z / 6
    assert ((act.potential(z) - psi) / psi).abs().max() < 4e-16
    assert ((act.double_potential(z) - double) / double).abs().max() < 4e-16


def test_limits():
    """psi levels off on the left, and Psi becomes a line."""
    silu, gelu = (math.pi**2 / 12, 1.5 * float(mpmath.zeta(3))), (0.25, 2 / 3 / math.sqrt(2 * math.pi))
    quick = silu[0] / 1.702**2, silu[1] / 1.702**3
    far = tensor(-INF, -1e300, -1e4, -50)
    for act, (level, offset) in ((SiLU(), silu), (GELU(), gelu), (QuickGELU(), quick)):
        assert act.potential(far).tolist() == pytest.approx([level] * 4, rel=5e-16, abs=0)
        line = [-INF, -1e300 * level, *(z * level + offset for z in (-1e4, -50))]
        assert act.double_potential(far).tolist() == pytest.approx(line, rel=5e-16, abs=0)
    assert Sigmoid().potential(far).tolist() == pytest.approx([-math.log(2)] * 4, rel=5e-16, abs=0)


@smooth
def test_infinite_and_nan(act):
    assert act.potential(tensor(INF, 1e300)).tolist() == ([INF, 1e300] if act in (Tanh(), Sigmoid()) else [INF, INF])
    assert act.double_potential(tensor(INF, 1e300)).tolist() == [INF, INF]
    assert abs(act.double_potential(tensor(-INF)).item()) == INF
    for function in chain(act):
        assert function(tensor(NAN)).isnan().all()
        assert function(tensor(NAN, dtype=F32)).isnan().all()
    for dtype in (F32, F64):
        huge = tensor(-1e30, 1e30, dtype=dtype)
        assert (act.slope(huge) == (0 if act in (Tanh(), Sigmoid()) else tensor(0, 1))).all()
        assert (act(huge).abs() == (tensor(act == Tanh(), 1) if act in (Tanh(), Sigmoid()) else huge.relu())).all()


@smooth
def test_seams_of_the_table(act):
    """From one panel to the next and past the cut-off: no jump above rounding."""
    scale = 1.702 if act == QuickGELU() else 1.0
    edges = torch.arange(1, 8 * 41, dtype=F64) / 8 / scale
    for edge in (edges, -edges):
        below, above = torch.nextafter(edge, 0 * edge), torch.nextafter(edge, INF * edge)
        for function in (act.potential, act.double_potential):
            assert ((function(above) - function(below)) / function(edge)).abs().max() < 4e-15


def test_shapes():
    for z in (torch.ones(()), torch.ones(2, 0, 3), torch.ones(3, 1).expand(3, 4), torch.ones(4, dtype=torch.bfloat16)):
        for function in chain(SiLU()):
            assert (function(z).shape, function(z).dtype) == (z.shape, z.dtype)


@every
@pytest.mark.parametrize("dtype", [F32, F64])
def test_bits_do_not_depend_on_the_position(act, dtype):
    z = torch.randn(71, dtype=dtype, generator=torch.Generator().manual_seed(0))
    z = z * torch.tensor([0.1, 1.0, 8.0], dtype=dtype).repeat(24)[:71]
    beside = torch.stack([z, -z], 1)[:, 0]
    for function in chain(act):
        alone = torch.stack([function(x) for x in z])
        for n in range(1, 71):
            assert torch.equal(function(z[-n:]), alone[-n:])
        for n in (3, 20, 71):
            assert torch.equal(function(beside[:n]), alone[:n])
        assert torch.equal(function(z[:70].reshape(7, 10).T), alone[:70].reshape(7, 10).T)


# ---- derivatives

GENERIC = [-45.0, -3.0, -1.2, -0.3, 0.4, 1.7, 9.3, 50.0]


def slope_of(f):
    return lambda z: jvp(f, (z,), (torch.ones_like(z),))[1]


@every
def test_every_function_is_the_derivative_of_the_one_before(act):
    z = tensor(*GENERIC).requires_grad_()
    for f, derivative in zip(chain(act), chain(act)[1:], strict=False):
        expected = derivative(z)
        assert torch.equal(torch.autograd.grad(f(z).sum(), z)[0], expected)
        assert torch.equal(vmap(grad(f))(z), expected)
        assert torch.equal(slope_of(f)(z), expected)
        assert torch.equal(jacrev(f)(z), expected.diag())
        assert torch.equal(jacfwd(f)(z), expected.diag())
    for f, curvature in zip(chain(act), chain(act)[2:], strict=False):
        for twice in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacfwd(f))):
            assert torch.equal(vmap(twice(f))(z), curvature(z))
    for once in (grad, slope_of):
        assert torch.equal(vmap(once(once(once(act.double_potential))))(z), act.slope(z))


@every
def test_gradcheck(act):
    z = tensor(*GENERIC).requires_grad_()
    for f in chain(act):
        assert torch.autograd.gradcheck(f, z, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(f, z, check_fwd_over_rev=True)


@smooth
def test_derivatives_at_zero(act):
    """|z| stands in the formulas, and must not show."""
    z = torch.zeros((), dtype=F64)
    with mpmath.workdps(30):
        exact = [float(mpmath.diff(ORACLES[act], 0, n)) for n in range(3)]
    found = act.double_potential
    assert [f(z).item() for f in (grad(grad(found)), grad(grad(grad(found))))] == pytest.approx(exact[:2], abs=1e-16)
    assert grad(act.slope)(z).item() == pytest.approx(exact[2], abs=1e-16)


@every
def test_vmap_over_any_axis(act):
    z = torch.randn(3, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    for f in chain(act):
        assert torch.equal(vmap(vmap(f, in_dims=1), in_dims=2)(z), f(z).permute(2, 1, 0))
    for f, derivative in zip(chain(act), chain(act)[1:], strict=False):
        assert torch.equal(vmap(grad(lambda x, f=f: f(x).sum()), in_dims=1, out_dims=1)(z), derivative(z))


def test_sigmoid_far_out():
    """1 / (1 + e^(-z)) as it stands would differentiate to NaN."""
    for function in (grad(sigmoid), grad(grad(sigmoid))):
        assert not vmap(function)(tensor(800, -800, 3e4, -3e4)).any()


def test_tables_first_computed_in_inference_mode():
    activations._tail_integrals.cache_clear()
    with torch.inference_mode():
        SiLU().potential(torch.ones(1))
    z = tensor(1.0).requires_grad_()
    SiLU().potential(z).backward()
    assert torch.equal(z.grad, SiLU()(z))
    activations._tail_integrals.cache_clear()
    assert vmap(grad(SiLU().potential))(tensor(1.0)) == SiLU()(tensor(1.0))


# ---- your own, and names


class Softplus(Activation):
    def __call__(self, z):
        return torch.log1p(torch.exp(z))


def test_a_custom_activation():
    act, z = Softplus(), tensor(-1.0, 0.5).requires_grad_()
    assert (act.slope(z) - torch.sigmoid(z)).abs().max() < 2e-16
    (curvature,) = torch.autograd.grad(act.slope(z).sum(), z)
    assert (curvature - Sigmoid().slope(z)).abs().max() < 2e-16
    assert (vmap(grad(act.slope))(z) - curvature).abs().max() < 2e-16
    for method in ("potential", "double_potential"):
        with pytest.raises(HelmscopeError, match=f"^activation Softplus has no table of its {method}: [^.\n]*$"):
            getattr(act, method)(z)
    with pytest.raises(TypeError, match="abstract"):
        Activation()


@every
def test_bad_input(act):
    for z, word in ((torch.ones(2, dtype=torch.int64), "int64"), (torch.ones(1) * 1j, "complex64"), (1.0, "float")):
        for function in (act, act.potential, act.double_potential):
            with pytest.raises(HelmscopeError, match=f"^z is of type .*{word}"):
                function(z)


def test_named():
    plain = {"relu": ReLU(), "tanh": Tanh(), "sigmoid": Sigmoid(), "silu": SiLU(), "swish": SiLU(), "gelu": GELU()}
    tanh = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), GELUTanh())
    names = {**plain, **tanh, "relu2": SquaredReLU(), "quick_gelu": QuickGELU(), "linear": Identity()}
    for name, act in names.items():
        assert from_name(name) == act
    with pytest.raises(HelmscopeError, match="unknown activation 'gelu_nw': did you mean 'gelu_new'"):
        from_name("gelu_nw")
    with pytest.raises(HelmscopeError, match="unknown activation 'None'"):
        from_name(None)


@every
def test_a_value_object(act):
    assert pickle.loads(pickle.dumps(act)) == act
    assert [other for other in ALL if other == act] == [act]
    assert repr(act) == f"{type(act).__name__}()"
