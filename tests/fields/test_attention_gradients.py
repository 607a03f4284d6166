"""Derivatives of SA and USA, at generic points and where tokens, logits or rows degenerate."""

from __future__ import annotations

import pytest
import torch

from helmscope.fields.attention import USA
from helmscope.geometry.sphere import project
from support.attention_cases import (
    BOTH,
    COMBINATIONS,
    F64,
    measure,
    normal,
    parameters,
    tokens,
)

# torch itself calls it when it first differentiates forward
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def everything(kind, names, n=4, d=3):
    """The velocity as a function of all tensors that it depends on, and those tensors."""
    given, masses = parameters(names, n, d), measure(names, n).get("weights")
    tensors = {name: part for name, part in given.items() if isinstance(part, torch.Tensor) and "minus" not in names}
    fixed = {name: part for name, part in given.items() if name not in tensors}
    if masses is not None:
        tensors["weights"] = masses + 0.1

    def velocity(x, *parts):
        named = dict(zip(tensors, parts, strict=True))
        weights = named.pop("weights", None)
        return kind(1.5, **named, **fixed).velocity(x, weights)

    return velocity, tuple(tensors.values())


@BOTH
@pytest.mark.parametrize("names", [c for c in COMBINATIONS if not {"hidden", "mask"} & set(c)], ids="+".join)
def test_gradients_at_generic_points(kind, names):
    velocity, parts = everything(kind, names)
    inputs = [part.clone().requires_grad_() for part in (tokens(4, 3), *parts)]
    assert torch.autograd.gradcheck(velocity, inputs, check_forward_ad=True)


DEGENERATE = {
    "coincident": (tokens(1, 3).expand(3, 3), None),
    "pair": (tokens(2, 3)[[0, 1, 0]], None),
    "antipodal": (torch.stack([tokens(3), -tokens(3), tokens(3)]), None),
    "ties": (torch.eye(3, dtype=F64), None),
    "weight 0": (tokens(3, 3), torch.tensor([1.0, 0.0, 2.0], dtype=F64)),
    "first unseen": (tokens(3, 3), torch.tensor([0.0, 1.0, 1.0], dtype=F64)),
    "one token": (tokens(1, 3), None),
}


@BOTH
@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize("names", [[], ["minus"], ["value", "query_key"], ["causal"], ["hidden"]], ids="+".join)
@pytest.mark.parametrize("place", DEGENERATE)
def test_gradients_at_degenerate_points(kind, beta, names, place):
    """Projection divides by nothing, so the field is smooth at coincident, antipodal, tied and blind tokens too."""
    x, weights = DEGENERATE[place]
    field = kind(beta, **parameters(names, *x.shape))
    point = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: field.velocity(y, weights), point, check_undefined_grad=False)
    (gradient,) = torch.autograd.grad(field(point, weights=weights).square().sum(), point)
    assert torch.isfinite(gradient).all()


@BOTH
@pytest.mark.parametrize("beta", [40.0, 300.0])
def test_gradients_are_finite_at_large_beta(kind, beta):
    for x, weights in DEGENERATE.values():
        point = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(kind(beta)(point, weights=weights).sum(), point)
        assert torch.isfinite(gradient).all()


@BOTH
def test_gradient_of_a_weight_at_zero_is_that_of_an_absent_token(kind):
    """A token of weight 0 is not seen: only its part in M remains, and the other weights have their full gradient."""
    x, weights = tokens(4, 3), torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=F64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda m: kind(1.5).velocity(x, m), weights)
    velocity = kind(1.5)(x, weights=weights.detach())
    assert torch.allclose(jacobian[..., 1], -velocity / 3.5 if kind is USA else 0 * velocity, rtol=0, atol=1e-15)
    for j in (0, 2, 3):
        step = torch.zeros(4, dtype=F64)
        step[j] = 1e-5
        high, low = (kind(1.5).velocity(x, weights.detach() + s * step) for s in (1, -1))
        assert torch.allclose(jacobian[..., j], (high - low) / 2e-5, rtol=0, atol=1e-9)


@BOTH
def test_tangential_derivative_does_not_miss_the_own_term(kind):
    """P_x V x = 0 on the sphere alone; leaving it out must not change a derivative along the sphere."""
    x = tokens(4, 3)
    along = project(x, normal(4, 3, seed=1))
    kept = kind(2.0, value=torch.eye(3, dtype=F64).requires_grad_())  # taken for a general V
    for field in (kind(2.0), kind(2.0, value=torch.eye(3))):
        (v, dv), (w, dw) = (torch.func.jvp(f.velocity, (x,), (along,)) for f in (field, kept))
        assert (v - w).abs().max() < 1e-14
        assert (dv - dw).abs().max() < 1e-14


@BOTH
@pytest.mark.parametrize("names", [[], ["query_key", "value", "causal", "bias"]], ids="+".join)
def test_autograd_transforms(kind, names):
    field, x = kind(1.5, **parameters(names, 4, 3)), tokens(5, 4, 3)
    each = torch.func.vmap(field.velocity)(x)
    assert (each - field(x)).abs().max() < 1e-14
    backward = torch.func.vmap(torch.func.jacrev(field.velocity))(x)
    forward = torch.func.vmap(torch.func.jacfwd(field.velocity))(x)
    assert backward.shape == (5, 4, 3, 4, 3)
    assert (backward - forward).abs().max() < 1e-14
    along = normal(5, 4, 3, seed=1)
    _, change = torch.func.jvp(field.velocity, (x,), (along,))
    assert (change - torch.einsum("bnamc,bmc->bna", backward, along)).abs().max() < 1e-13


@BOTH
@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.jacfwd])
def test_derivative_with_respect_to_a_value_that_is_the_identity(kind, derivative):
    """The velocity is linear in V: its derivative does not vanish where V happens to be a multiple of I."""
    x, general = tokens(4, 3), normal(3, 3)

    def velocity(value):
        return kind(1.5, value=value).velocity(x)

    at_identity, elsewhere = derivative(velocity)(torch.eye(3, dtype=F64)), derivative(velocity)(general)
    assert (at_identity - elsewhere).abs().max() < 1e-14
    assert at_identity.abs().max() > 0.1
