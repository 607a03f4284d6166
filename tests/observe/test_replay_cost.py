"""What the streaming instruments cost, without a clock: the tokens that are evaluated, the products that are made, and
the largest tensor that is allocated."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import helmscope as hs
from helmscope.fields.activations import GELU, GELUTanh, QuickGELU, Sigmoid, SiLU, Tanh
from helmscope.fields.jacobian_algebra import JacobianAlgebra
from helmscope.fields.mlp import MLP, GatedMLP
from helmscope.models.record import record
from helmscope.observe.measure import streaming_instruments
from helmscope.observe.mlp_force import MlpForce, mlp_force
from helmscope.observe.mlp_parts import prepare_mlp

F32, F64 = torch.float32, torch.float64
DRAW = torch.Generator().manual_seed(11)
SMOOTH = [Tanh(), Sigmoid(), SiLU(), GELU(), GELUTanh(), QuickGELU()]
PLACES = [sign * size for size in (1e-3, 0.06, 0.1249, 0.7, 1.9, 3.4, 6.2, 8.9, 9.3, 39.0, 41.0) for sign in (-1, 1)]


def normal(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=DRAW)


# ---- psi and Psi in float32


@pytest.mark.parametrize("act", SMOOTH, ids=repr)
def test_single_precision_against_the_exact_functions(act):
    """To 1e-6 of the value; psi of GELU, a closed form that cancels at 0 and below, to 3e-7 of the value, 6e-8 |z| and
    what one unit in the last place of erf, which differs between processors, moves it by: 3e-8 z^2 / 2.
    """
    size = torch.logspace(-3, 1.7, 4001, dtype=F64).float()
    z = torch.cat([-size, size])
    slope, value, psi, double_psi = act.chain(z, double=True)
    exact = act.slope(z.double()), act(z.double()), act.potential(z.double()), act.double_potential(z.double())
    for found, right in zip((psi, double_psi), exact[2:], strict=True):
        assert found.dtype == F32
        assert ((found.double() - right).abs() / right.abs()).max() < 1e-6
    for found, right in zip((slope, value), exact[:2], strict=True):
        assert ((found.double() - right).abs() / (1 + right.abs())).max() < 1e-6
    short = act.chain(z)
    gelu = act == GELU()
    far = z.double().abs()
    bound = (3e-7 if gelu else 1e-6) * exact[2].abs() + (6e-8 * far + 1.5e-8 * far**2 if gelu else 0)
    assert ((short[2].double() - exact[2]).abs() <= bound).all()
    for found, right in zip(short[:2], exact[:2], strict=True):
        assert ((found.double() - right).abs() / (1 + right.abs())).max() < 1e-6


S = {
    GELU(): lambda u: u * mpmath.ncdf(u),
    SiLU(): lambda u: u / (1 + mpmath.exp(-u)),
    Tanh(): mpmath.tanh,
}


@pytest.mark.parametrize("act", S, ids=repr)
def test_single_precision_against_quadrature(act):
    z = torch.tensor(PLACES, dtype=F32)
    psi = act.chain(z)[2].tolist()
    for place, found in zip(z.tolist(), psi, strict=True):
        right = float(mpmath.quad(S[act], mpmath.linspace(0, place, 1 + int(abs(place)) + 1)))
        assert found == pytest.approx(right, rel=1e-6, abs=1e-7 * abs(place)), place


@pytest.mark.parametrize("act", SMOOTH, ids=repr)
def test_float64_keeps_its_digits(act):
    z = torch.linspace(-12, 12, 999, dtype=F64)
    functions = act.slope, act, act.potential, act.double_potential
    for found, function in zip(act.chain(z, double=True), functions, strict=True):
        right = function(z)
        assert ((found - right).abs() <= 1e-15 * right.abs().clamp(min=1e-300)).all()


@pytest.mark.parametrize("gated", [False, True])
def test_the_mean_potential_of_float32_has_five_digits(gated):
    """U of a recording is computed in its float32: the same MLP in float64 is the oracle."""
    d, hidden = 24, 96
    names = ("w_gate", "w_up") if gated else ("w_in",)
    parts = {name: normal(hidden, d) for name in names} | {"w_out": normal(d, hidden) / hidden}
    kind = GatedMLP if gated else MLP
    activation = SiLU() if gated else GELU()
    x = hs.sphere.retract(normal(4, 64, d))
    wide = prepare_mlp(kind(**parts, activation=activation)).at(x)
    single = kind(**{name: part.float() for name, part in parts.items()}, activation=activation)
    narrow = prepare_mlp(single).at(x.float())
    for of in (lambda p: p.splits["unit_sphere"].potential, lambda p: p.splits["unit_sphere"].swirl.norm(dim=-1)):
        right, found = of(wide).mean(-1), of(narrow).double().mean(-1)
        assert ((found - right).abs() / right.abs()).max() < 1e-5


# ---- the sample of tokens


MLP_24 = MLP(w_in=2 * normal(12, 5), w_out=normal(5, 12), b_in=normal(12), activation=Tanh())
CLOUDS = hs.sphere.retract(normal(2, 100, 5))


def test_only_what_needs_the_jacobian_is_sampled():
    """With 7 of 100 tokens, the antisymmetric share is the mean over these; the rest is that of all tokens."""
    run = hs.integrate(MLP_24, CLOUDS, times=[0.0])
    seen, whole = mlp_force(run, sampled_tokens=7), mlp_force(run, sampled_tokens=None)
    places = [round(99 * k / 6) for k in range(7)]
    for system in range(2):
        shares, radial, rest = [], [], []
        for token, x in enumerate(CLOUDS[system]):
            jacobian = torch.autograd.functional.jacobian(MLP_24.ambient, x)
            rest.append((jacobian.trace() - 4 * (x @ MLP_24.ambient(x))).item())
            if token in places:
                skew = (jacobian - jacobian.T) / 2
                shares.append((skew.square().sum() / jacobian.square().sum()).item())
                radial.append((x @ jacobian @ x).item())
        assert len(shares) == 7
        assert seen.antisymmetric_share[0, system].item() == pytest.approx(np.mean(shares), rel=1e-12)
        divergence = np.mean(rest) - np.mean(radial)
        assert seen.surface_divergence[0, system].item() == pytest.approx(divergence, rel=1e-11)
    for name in set(seen.data_vars) - {"antisymmetric_share", "surface_divergence"}:
        assert np.array_equal(seen[name], whole[name]), name
    assert (seen.antisymmetric_share != whole.antisymmetric_share).all()
    assert (seen.attrs["jacobian_tokens"], whole.attrs["jacobian_tokens"]) == ("at most 7, evenly spaced", "all")


def test_the_number_of_evaluated_tokens(monkeypatch):
    counted, own = [], JacobianAlgebra.invariants

    def counting(self, slopes):
        counted.append(slopes[..., 0].numel())
        return own(self, slopes)

    monkeypatch.setattr(JacobianAlgebra, "invariants", counting)
    run = hs.integrate(MLP_24, CLOUDS, times=[0.0])
    for options, each in (
        ({}, 32),
        ({"sampled_tokens": 9}, 9),
        ({"sampled_tokens": None}, 100),
        ({"per_token": True}, 100),
    ):
        counted.clear()
        mlp_force(run, **options)
        assert counted == [2 * each], options


def test_refused_samples():
    for bad in (0, -1, 2.5, True):
        with pytest.raises(hs.HelmscopeError, match="tokens is"):
            MlpForce(sampled_tokens=bad)


# ---- memory and products


class Watch(TorchDispatchMode):
    """The largest tensor that an operation returns, in numbers, and the multiplications of all matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.multiplications = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.multiplications += result.numel() * args[-1].shape[-2]
        return result


def small_model(tokens, scale=1.0):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, activation_function="gelu", bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():  # long states, for which the epsilon of a norm does not matter
        model.transformer.wte.weight *= scale
    return record(model, torch.randint(50, (3, tokens)))


def test_the_largest_tensor_of_a_replay():
    """No instrument holds a d x d matrix per token, nor one over pairs and coordinates: at most the weights of all
    heads, the neurons of all tokens, what f and two gradients write, or a block of the forms of h x 2 * 128."""
    texts, n, d, heads, hidden = 3, 96, 48, 4, 192
    recording = small_model(n)
    with Watch() as watch:
        recording.replay(*streaming_instruments())
    bound = max(texts * heads * n * n, texts * n * hidden, texts * n * 3 * d, hidden * 256)
    assert watch.largest <= bound


@pytest.mark.parametrize("reused", [False, True])
def test_the_products_of_a_replay(reused):
    """The multiplications of the streaming instruments in matrix products, for each layer: 2 d h for two gradients at
    each token, and 2 d h for z and f unless those of the model serve; the forms of h x h, of which a triangle of blocks
    of 64 is made once and used at 32 tokens of a text, with d h each for W^T x; W_O once, Gram matrices of heads twice,
    and the weights of a head with its values three times. A tenth is left for the rest.
    """
    texts, n, d, heads, hidden, sampled = 3, 96, 48, 4, 192, 3 * 32
    recording = small_model(n, scale=500.0 if reused else 1.0)
    with Watch() as plain:
        recording.runner.forward()
    with Watch() as measured:
        recording.replay(*streaming_instruments())
    tokens, triangle, s = texts * n, 64 * 64 * (1 + 2 + 3), d // heads
    split = tokens * (2 if reused else 4) * d * hidden + sampled * (2 * triangle + d * hidden) + 4 * d * triangle
    attention = tokens * (d * d + n * heads * (3 * s + 8) + 2 * d * s)
    more = measured.multiplications - plain.multiplications
    assert plain.multiplications == 2 * tokens * (12 * d * d + 2 * n * d)
    assert 0.9 < more / (2 * (split + attention)) < 1.1
