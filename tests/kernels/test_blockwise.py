"""Blockwise sums agree with dense sums in value and gradient; the dispatcher chooses the documented kernel."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import helmscope as hs
from helmscope.kernels import request as request_module
from helmscope.kernels.blockwise import Blockwise
from helmscope.kernels.choose import choose, token_sum, using_summation
from helmscope.kernels.dense import Dense
from helmscope.kernels.flash import Flash
from helmscope.kernels.harmonic import Harmonic
from helmscope.kernels.request import AttentionSum, Request, has_visible_key
from helmscope.solve.integrate import make_problem
from helmscope.types import HelmscopeError
from support.summation_cases import F64, random_request


def rescaled(sums: AttentionSum, reference: AttentionSum) -> tuple[torch.Tensor, torch.Tensor]:
    """Total and mass on the scales of ``reference``."""
    return (
        sums.total * torch.exp(sums.shift - reference.shift),
        sums.mass * torch.exp(sums.mass_shift - reference.mass_shift),
    )


def absolute_sum(request: Request) -> torch.Tensor:
    """The sum of the absolute values of the terms, on the scale of the dense total."""
    return Dense().sum(replace(request, value=request.value.abs())).total


def assert_agrees(sums: AttentionSum, request: Request, rel: float) -> None:
    dense = Dense().sum(request)
    total, mass = rescaled(sums, dense)
    assert ((total - dense.total).abs() <= rel * absolute_sum(request) + 1e-300).all()
    assert ((mass - dense.mass).abs() <= rel * dense.mass).all()
    assert torch.isfinite(sums.mean).all()


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_300_random_shapes(start):
    for seed in range(start, start + 50):
        request = random_request(seed)
        # logits of 500 have rounding errors of 500 eps
        assert_agrees(Blockwise((7 + seed % 30, 5 + seed % 41)).sum(request), request, 1e-12)


def gradients(sums: AttentionSum, request: Request, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a random combination of the mean and of log Z."""
    generator = torch.Generator().manual_seed(7)
    mean_weights = torch.randn(sums.mean.shape, dtype=F64, generator=generator)
    positive = sums.mass > 0
    mass_weights = torch.randn(sums.mass.shape, dtype=F64, generator=generator)
    log_mass = torch.where(positive, sums.mass, 1.0).log()
    total = (mean_weights * sums.mean).sum() + (mass_weights * log_mass)[positive].sum()
    return list(torch.autograd.grad(total, inputs))


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_300_random_gradients(start):
    for seed in range(start, start + 50):
        request = random_request(seed)
        names = ["query", "key", "value"] + ([] if request.weights is None else ["weights"])
        inputs = {name: getattr(request, name).clone().requires_grad_() for name in names}
        request = replace(request, **inputs)
        leaves = list(inputs.values())
        streaming = gradients(Blockwise((7 + seed % 30, 5 + seed % 41)).sum(request), request, leaves)
        dense = gradients(Dense().sum(request), request, leaves)
        for got, expected in zip(streaming, dense, strict=True):
            assert (got - expected).abs().max() <= 1e-11 * max(1.0, float(expected.abs().max())), seed


def test_gradient_of_the_bias():
    request = random_request(1)
    n = request.query.shape[-2]
    bias = torch.randn(n, n, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    request = replace(request, bias=bias, beta=None)
    (got,) = gradients(Blockwise((7, 5)).sum(request), request, [bias])
    (expected,) = gradients(Dense().sum(request), request, [bias])
    assert (got - expected).abs().max() <= 1e-12


def test_forward_mode_and_functorch_derivatives():
    x = hs.Uniform(n=6, dim=3).sample(seed=0)

    def mean(kernel, x):
        return kernel.sum(Request(4 * x, x, x, skip_self=True)).mean

    expected = torch.func.jacfwd(lambda x: mean(Dense(), x))(x)
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        got = transform(lambda x: mean(Blockwise((4, 5)), x))(x)
        assert (got - expected).abs().max() < 1e-14


@pytest.mark.parametrize("skip_self", [False, True])
def test_against_a_plain_loop(skip_self):
    """Plain Python, so that an error common to dense and streaming sums is noticed."""
    import math

    x = hs.Uniform(n=5, dim=3).sample(seed=1)
    m = [1.0, 0.0, 2.0, 0.5, 1.0]
    sums = Blockwise((2, 3)).sum(Request(3 * x, x, x, weights=torch.tensor(m, dtype=F64), skip_self=skip_self))
    for i in range(5):
        terms = [m[j] * math.exp(3 * float(x[i] @ x[j])) for j in range(5)]
        z = sum(terms)
        assert abs(float(sums.log_mass[i]) - math.log(z)) < 1e-14
        for a in range(3):
            mean = sum(terms[j] * float(x[j, a]) for j in range(5) if j != i or not skip_self) / z
            assert abs(float(sums.mean[i, a]) - mean) < 1e-15


def test_no_n_x_n_matrix_is_stored():
    """The largest intermediate tensor is a block, not n x n."""
    largest = 0

    class RecordLargest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    n, d = 5_000, 16
    x = hs.Uniform(n=n, dim=d).sample(seed=0)
    with RecordLargest():
        hs.SA(beta=4.0).velocity(x)
        hs.USA(beta=4.0, causal=True).velocity(x)
        hs.interaction_energy(x, beta=4.0)
    assert largest <= max(256 * 512, n * (d + 2))
    sphere, degree = hs.Uniform(n=n, dim=3).sample(seed=0), 20
    largest = 0
    with RecordLargest():
        hs.SA(beta=4.0).velocity(sphere)
    assert largest <= 4 * n * (degree + 2)  # four sums for each token and order


# ---- the dispatcher


def tokens(n: int, d: int, dtype=F64) -> torch.Tensor:
    return hs.Uniform(n=n, dim=d).sample(seed=0, dtype=dtype)


@pytest.mark.parametrize(
    ("field", "n", "d", "name"),
    [
        (hs.SA(beta=4.0), 2_048, 3, "Dense"),
        (hs.SA(beta=4.0), 2_049, 3, "Harmonic"),
        (hs.SA(beta=4.0), 2_049, 2, "Harmonic"),
        (hs.USA(beta=4.0), 2_049, 3, "Harmonic"),
        (hs.SA(beta=400.0), 2_049, 2, "Harmonic"),
        (hs.SA(beta=400.0), 2_049, 3, "Blockwise"),  # a long series
        (hs.SA(beta=4.0, causal=True), 2_049, 3, "Blockwise"),
        (hs.SA(beta=4.0), 2_049, 16, "Blockwise"),
        (hs.SA(beta=4.0, value=-torch.eye(3)), 2_049, 3, "Harmonic"),
        (hs.SA(beta=4.0, query_key=torch.diag(torch.tensor([1.0, 2.0, 3.0]))), 2_049, 3, "Blockwise"),
        (hs.MultiHead([hs.SA(beta=4.0), hs.SA(beta=1.0)]), 2_049, 3, "Blockwise"),
        (hs.Hardmax(), 2_049, 3, "Dense"),
    ],
)
def test_the_dispatcher_chooses_the_documented_kernel(field, n, d, name):
    assert make_problem(field, tokens(n, d), [1.0]).summations() == [name]


def test_a_gradient_changes_the_choice():
    x = tokens(2_049, 3)
    assert isinstance(choose(Request(4 * x, x, x, beta=4.0)), Harmonic)
    y = x.clone().requires_grad_()
    request = Request(4 * y, y, y, beta=4.0)
    assert isinstance(choose(request), Blockwise)
    with torch.no_grad():
        assert isinstance(choose(request), Harmonic)


@pytest.mark.parametrize("field", [hs.SA, hs.USA])
@pytest.mark.parametrize("d", [2, 3, 16])
def test_fields_agree_with_dense_sums_beyond_the_dense_limit(field, d, monkeypatch):
    x = tokens(2_100, d)
    got = field(beta=3.0)(x)
    monkeypatch.setattr(request_module, "MAX_DENSE_TOKENS", 10**9)
    monkeypatch.setattr("helmscope.kernels.choose.MAX_DENSE_TOKENS", 10**9)
    expected = field(beta=3.0)(x)
    assert make_problem(field(beta=3.0), x, [1.0]).summations() == ["Dense"]
    assert (got - expected).abs().max() <= 1e-12 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("beta", [0.0, 500.0, 1e4])
@pytest.mark.parametrize("n", [1, 2, 3, 40])
def test_sa_and_usa_at_any_beta(n, beta):
    """Neither SA nor USA, which returns its scale as a logarithm, overflows, and both agree with the dense sums."""
    x = tokens(n, 5)
    sa, usa = hs.SA(beta), hs.USA(beta, causal=True)
    dense_sa, dense_usa = sa.velocity(x), usa.scaled_velocity(x)
    with using_summation(Blockwise((16, 8))):
        streaming_sa, streaming_usa = sa.velocity(x), usa.scaled_velocity(x)
    assert torch.isfinite(streaming_sa).all()
    assert (streaming_sa - dense_sa).abs().max() <= 1e-12 * (1 + beta)
    direction = streaming_usa.direction * torch.exp(streaming_usa.log_scale - dense_usa.log_scale)
    assert torch.isfinite(streaming_usa.direction).all()
    assert (direction - dense_usa.direction).abs().max() <= 1e-12 * (1 + beta)


def test_a_pinned_kernel_is_used_and_reported():
    x = tokens(20, 3)
    field = hs.SA(beta=2.0)
    runs = {}
    for kernel in (None, Dense(), Blockwise(), Harmonic()):
        run = hs.integrate(field, x, [1.0], summation=kernel)
        assert run.problem.summation is kernel
        runs[type(kernel).__name__] = run.states
    for states in runs.values():
        assert (states - runs["NoneType"]).abs().max() < 1e-9
    assert torch.equal(runs["Dense"], runs["NoneType"])
    assert not torch.equal(runs["Harmonic"], runs["NoneType"])
    with using_summation(Blockwise()) as outer:
        hs.integrate(field, x, [0.1])  # summation=None keeps the outer pinned kernel
        with using_summation(Dense()) as inner:
            field(x)
    assert (outer, inner) == ({"Blockwise", "Dense"}, {"Dense"})


@pytest.mark.parametrize(
    ("kernel", "field", "n", "d", "message"),
    [
        (Dense(), hs.SA(beta=1.0), 2_049, 4, "summation is Dense(), but n is 2049"),
        (Harmonic(), hs.SA(beta=1.0), 4, 4, "but tokens have dimension 4"),
        (Harmonic(), hs.SA(beta=1.0, causal=True), 4, 3, "without causal mask and bias"),
        (Harmonic(), hs.SA(beta=1e4), 4, 3, "degree above 256"),
        (Blockwise(), hs.Hardmax(), 4, 3, "never stores the whole matrix of logits"),
        (Flash(), hs.SA(beta=1.0), 4, 3, "summation is Flash("),
        ("dense", hs.SA(beta=1.0), 4, 3, "summation is 'dense', but it must be a method such as Dense()"),
        (Dense, hs.SA(beta=1.0), 4, 3, "it must be a method such as Dense()"),
        (Dense(), lambda x: 0 * x, 4, 3, "does not sum over tokens"),
    ],
)
def test_integrate_raises_if_the_kernel_does_not_support_the_field(kernel, field, n, d, message):
    with pytest.raises(HelmscopeError) as caught:
        hs.integrate(field, tokens(n, d), [1.0], summation=kernel)
    assert message in str(caught.value)


@pytest.mark.parametrize("block", [(0, 1), (1,), 5, (2, 1.5)])
def test_bad_blocks_raise(block):
    with pytest.raises(HelmscopeError, match="block"):
        Blockwise(block)


def test_a_nan_affects_only_its_system():
    x = hs.Uniform(n=40, dim=4).sample(batch=3, seed=0)
    with_nan = x.clone()
    with_nan[1, 7, 2] = torch.nan
    for kernel in (Dense(), Blockwise((16, 16))):
        clean, got = (kernel.sum(Request(4 * y, y, y, skip_self=True)).mean for y in (x, with_nan))
        assert torch.equal(clean[[0, 2]], got[[0, 2]])
        assert got[1].isnan().all(-1).all()
    on_sphere = x[..., :3] / x[..., :3].norm(dim=-1, keepdim=True)
    factor = torch.where(torch.arange(3) == 1, torch.nan, 0.0).to(F64)[:, None, None]
    run = hs.integrate(lambda y: factor * y, on_sphere, [1.0], stepper=hs.RK4(0.5))
    assert [status.name for status in run.outcome.statuses] == ["FINISHED", "NOT_FINITE", "FINISHED"]
    assert "system 1 (of 0 to 2)" in str(run.outcome)


def cluster_and_two_isolated_tokens(n: int, d: int, dtype=F64) -> torch.Tensor:
    """A cluster, and two tokens far from it and from each other."""
    x = torch.zeros(n, d, dtype=F64)
    x[:, 0] = 1.0
    x = x + 0.01 * torch.randn(n, d, dtype=F64, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1, 1] = -4.0, 5.0
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("beta", [4.0, 9.0, 40.0])
def test_isolated_tokens_keep_their_digits(beta, d, dtype):
    """The error of a harmonic series is relative to e^beta, so it is not used if a token is far from all others."""
    x = cluster_and_two_isolated_tokens(2_100, d, dtype)
    mask = torch.arange(2_100) > 0
    bound = 1e-9 if dtype == F64 else 2e-5 * beta
    for field, options in ((hs.SA(beta), {}), (hs.SA(beta), {"mask": mask}), (hs.USA(beta), {})):
        got = field(x, **options).double()
        with using_summation(Blockwise()):
            expected = field(x.double(), **options)
        assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1))[:2].max() < bound
    mixed = torch.stack([x, hs.Uniform(2_100, d).sample(seed=0, dtype=dtype)])
    with using_summation() as names:
        batched = hs.SA(4.0).velocity(mixed)
    assert names == {"Harmonic", "Blockwise"}
    assert torch.equal(batched[0], hs.SA(4.0).velocity(mixed[:1])[0])
    assert torch.equal(batched[1], hs.SA(4.0).velocity(mixed[1:])[0])


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_harmonic_sums_do_not_depend_on_the_batch(d, dtype):
    x = hs.Uniform(n=2_100, dim=d).sample(batch=3, seed=0, dtype=dtype)
    batched = hs.SA(4.0).velocity(x)
    for k in range(3):
        assert torch.equal(hs.SA(4.0).velocity(x[k : k + 1])[0], batched[k])
    with_nan = x.clone()
    with_nan[1, 7, 1] = torch.nan
    got = hs.SA(4.0).velocity(with_nan)
    assert torch.equal(got[[0, 2]], batched[[0, 2]])
    assert got[1].isnan().any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [2, 3])
def test_a_system_off_the_sphere_is_summed_pair_by_pair(d, weighted):
    x = hs.Uniform(n=2_100, dim=d).sample(batch=3, seed=0)
    x[1, 7] *= 1 + 1e-6  # one token, by more than rounding
    x[2, 5] = torch.nan
    weights = torch.linspace(0.5, 1, 2_100, dtype=F64) if weighted else None
    request = Request(2 * x, x, x, weights=weights, beta=2.0)
    with using_summation() as names:
        sums = token_sum(request)
    assert names == {"Harmonic", "Blockwise"}
    for k in range(2):
        system = AttentionSum(*(getattr(sums, part.name)[k] for part in fields(sums)))
        assert_agrees(system, request.system(torch.Size([3]), k), 1e-11)
    assert sums.mean[2].isnan().all()


def test_sees_somebody_agrees_with_dense_sums():
    for seed in range(60):
        request = random_request(seed)
        counting = replace(request, query=0 * request.query, key=0 * request.key, value=torch.ones_like(request.value))
        assert torch.equal(has_visible_key(request), Dense().sum(counting).total[..., :1] > 0), seed


def test_the_tensors_of_a_request():
    x = torch.eye(2)
    assert [tensor.shape for tensor in Request(x, x, x).tensors] == [(2, 2)] * 3
    assert {field.name for field in fields(Request)} >= {"query", "key", "value", "weights", "bias"}
    assert torch.equal(token_sum(Request(x, x, x)).log_mass, Dense().sum(Request(x, x, x)).log_mass)
