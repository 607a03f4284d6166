"""Several heads: the statements of the [Mean-field notes] on gradient flows, and its printed form with the MLP
inside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import support.attention_family_oracles as family
from helmscope.fields.activations import Identity
from helmscope.fields.attention import SA, USA
from helmscope.fields.mlp import MLP
from helmscope.fields.multihead import MultiHead
from helmscope.fields.multihead_as_printed import MultiHeadAsPrinted
from helmscope.fields.weights import check_weights
from helmscope.geometry.sphere import project, retract
from helmscope.types import HelmscopeError
from support import oracles
from support.attention_cases import F32, F64, listed, measure, normal, tokens
from support.attention_family_cases import KINDS, force, heads_of, tensor

# ---- gradient flow or not [Mean-field notes]


def states(seed, count=3000, n=3, d=3):
    """Uniform tokens and, for two heads, B_h = V_h = (G + G^T) / 2 with G of standard normal entries."""
    x, b = tokens(count, n, d, seed=seed), normal(count, 2, d, d, seed=seed + 1)
    return x, (b + b.mT) / 2


def energy_slope(x, b, beta=1.0):
    """n^2 times the surface gradient of sum_h E_h = sum_h 1/(2 beta n^2) sum_ij e^{beta x_i^T B_h x_j}."""
    terms = torch.exp(beta * torch.einsum("sia,shab,sjb->shij", x, b, x))
    return project(x, torch.einsum("shij,shab,sjb->sia", terms, b, x))


def rates(kind, x, b):
    """d/dt sum_h E_h of each state: a chain rule with the velocity of the field, one field a state."""
    velocity = torch.stack(
        [MultiHead([kind(1.0, query_key=m, value=m) for m in b[s]]).velocity(x[s]) for s in range(len(x))]
    )
    return (energy_slope(x, b) * velocity).sum((-1, -2)) / x.shape[-2] ** 2, velocity


def test_heads_of_usa_are_a_gradient_flow():
    """d/dt sum_h E_h = (K / n) sum_i |x_i'|^2 >= 0 with scale 1/K, in all of 3,000 states."""
    x, b = states(0)
    rate, velocity = rates(USA, x, b)
    assert (rate >= 0).all()
    expected = 2 / 3 * velocity.square().sum((-1, -2))
    assert ((rate - expected).abs() / expected).max() < 1e-12


def test_heads_of_sa_are_not():
    """Each head has its own Z: sum_h E_h falls in 11 of 3,000 states here (0.4 %), n = d = 3, beta = 1, two heads."""
    x, b = states(0)
    rate, _ = rates(SA, x, b)
    assert 0.001 < (rate < 0).double().mean() < 0.01
    cloud, matrices = x[rate.argmin()].tolist(), b[rate.argmin()].tolist()
    velocity = family.multihead_velocity(
        "SA", cloud, [{"beta": 1.0, "query_key": m, "value": m} for m in matrices], 0.5
    )
    loop = sum(oracles.interaction_energy_rate(cloud, velocity, 1.0, m) for m in matrices)
    assert loop < -0.3
    assert rate.min().item() == pytest.approx(loop, rel=1e-12)
    one = torch.stack([SA(1.0, query_key=b[s, 0], value=b[s, 0]).velocity(x[s]) for s in range(300)])
    assert ((energy_slope(x[:300], b[:300, :1]) * one).sum((-1, -2)) >= 0).all()  # one head has one metric


# ---- the printed form


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", ["plain", "dense", "thin", "all"])
def test_printed_form_against_loops(kind, make):
    """MLPs of different sizes inside the projection."""
    n, d = 4, 3
    pairs = [force(d, hidden, seed=30 * hidden) for hidden in (2, 5, 7)]
    field = MultiHeadAsPrinted(heads_of(kind, make, n, d), [mlp for mlp, _ in pairs])
    x, given = tokens(n, d), measure(["weights", "mask"], n)
    lists, name = x.tolist(), type(field.heads[0]).__name__
    heads, loops = [family.head(head) for head in field.heads], [loop for _, loop in pairs]
    ambient = family.printed_ambient(name, lists, heads, loops, **listed(given))
    combined = check_weights(x, given["weights"], given["mask"])
    assert (field.ambient(x, combined) - tensor(ambient)).abs().max() < 1e-12
    assert (field(x, **given) - tensor(family.tangent(lists, ambient))).abs().max() < 1e-12
    kernel = tensor([family.kernel(name, lists, head, **listed(given)) for head in heads])
    assert (field.kernel(x, combined) - kernel).abs().max() < 1e-12 * kernel.max().clamp(min=1)


@pytest.mark.parametrize("make", ["plain", "dense", "thin"])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_system_of_the_printed_form_does_not_depend_on_its_batch_to_the_bit(make, dtype):
    for n, d in ((1, 3), (5, 128), (32, 3)):
        mlps = [force(d, hidden, seed=hidden)[0] for hidden in (1, 5, 16)]
        x, field = tokens(4, n, d).to(dtype), MultiHeadAsPrinted(heads_of("sa", make, n, d), mlps)
        together = field(x)
        for b in range(4):
            assert torch.equal(together[b], field(x[b : b + 1])[0]), (n, d)


def test_linear_mlps_inside_are_values():
    """MLP_h(v) = A_h v makes the printed form that of V_h -> A_h V_h."""
    x, heads = tokens(5, 3), heads_of("sa", "dense", 5, 3)
    maps = [normal(3, 3, seed=h) for h in range(3)]
    eye = torch.eye(3, dtype=F64)
    printed = MultiHeadAsPrinted(heads, [MLP(w_in=eye, w_out=a, activation=Identity()) for a in maps])
    plain = MultiHead([replace(head, value=a @ head.value) for a, head in zip(maps, heads, strict=True)])
    assert (printed(x) - plain(x)).abs().max() < 1e-14


def test_the_mlp_inside_destroys_the_gradient_flow():
    """Heads of USA with V_h = B_h symmetric, each within the same MLP: sum_h E_h falls in 52 % of 1,000 states."""
    x, b = states(0, count=1000)
    mlp, _ = force(3, 8, seed=5)
    fields = (MultiHeadAsPrinted([USA(1.0, query_key=m, value=m) for m in pair], [mlp, mlp]) for pair in b)
    velocity = torch.stack([field.velocity(x[s]) for s, field in enumerate(fields)])
    falls = (energy_slope(x, b) * velocity).sum((-1, -2)) < 0
    assert 0.3 < falls.double().mean() < 0.7


@pytest.mark.parametrize(
    ("mlps", "words"),
    [
        ([], ["mlps", "0", "2 heads"]),
        ([force(3, 2, 0)[0]], ["mlps", "1", "2 heads"]),
        (None, ["mlps", "None"]),
        ([1, 2], ["mlps", "[int, int]"]),
    ],
)
def test_mlps_that_do_not_match(mlps, words):
    with pytest.raises(HelmscopeError) as caught:
        MultiHeadAsPrinted([SA(1.0), SA(2.0)], mlps)
    assert all(word in str(caught.value) for word in words), caught.value


def test_sizes_of_the_printed_form():
    field = MultiHeadAsPrinted([SA(1.0)], [force(4, 2, 0)[0]])
    with pytest.raises(HelmscopeError, match=r"\(\.\.\., 4\)"):
        field(tokens(5, 3))
    assert field.exchangeable
    huge = MLP(w_in=torch.eye(3, dtype=F64), w_out=torch.full((3, 3), 1e308, dtype=F64), activation=Identity())
    with pytest.raises(HelmscopeError, match="mlps hold such large entries"):
        MultiHeadAsPrinted([SA(0.0, value=torch.full((3, 3), 5.0))], [huge])(retract(tokens(3, 3).abs()))
