"""The flash kernel, run by Triton's interpreter if there is no GPU, against dense float64 sums of the same float32
numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import pytest
import torch

from helmscope.fields.attention import SA
from helmscope.kernels.choose import using_summation
from helmscope.kernels.dense import attention_sum, logits
from helmscope.kernels.flash import Flash, LaunchConfig
from helmscope.kernels.request import AttentionSum, Request, Summation
from support.children import run_python
from support.summation_cases import random_request

SIZES = (1, 64, 130)
WIDTHS = (2, 16, 17, 64, 100, 130)  # every plan
SMALL = LaunchConfig(queries=32, keys=16, warps=4, stages=2, compensated=True)  # several blocks at n = 50
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = LaunchConfig(queries=16, keys=32, warps=4, stages=2)  # key blocks are longer than query blocks


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed).double(), dim=-1).float()


def on_sphere(x: torch.Tensor, beta: float, **options) -> Request:
    return Request(beta * x, x, x, beta=beta, **options)


def moved(request: Request) -> Request:
    """The request on the device; tensors that were the same object remain so."""
    copies = {id(tensor): tensor.to(DEVICE) for tensor in request.tensors}
    named = {name: copies.get(id(getattr(request, name))) for name in ("query", "key", "value", "weights")}
    return replace(request, **named)


def flash(request: Request, plan: LaunchConfig | None = None) -> AttentionSum:
    """The sums by ``Flash``, moved to the CPU."""
    kernel, request = Flash(plan), moved(request)
    assert kernel.unsupported_reason(request) is None
    return AttentionSum(**{name: part.cpu() for name, part in vars(kernel.sum(request)).items()})


def exact(request: Request):
    query, key, value = (part.double() for part in (request.query, request.key, request.value))
    weights = None if request.weights is None else request.weights.double()
    pairs = logits(query, key, causal=request.causal, weights=weights)
    return attention_sum(pairs, value, weights=weights, skip_self=request.skip_self)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want).clamp(min=1e-300)).item()


def errors(request: Request, plan: LaunchConfig | None = None) -> tuple[float, float, float]:
    """Relative errors of mean, total and mass, the last two on the scale of the exact sums."""
    got, want = flash(request, plan), exact(request)
    assert got.total.dtype == got.mass.dtype == got.shift.dtype == torch.float32
    assert [part.shape for part in (got.total, got.shift, got.mass, got.mass_shift)] == [
        part.shape for part in (want.total, want.shift, want.mass, want.mass_shift)
    ]
    total = got.total.double() * torch.exp(got.shift.double() - want.shift)
    mass = got.mass.double() * torch.exp(got.mass_shift.double() - want.mass_shift)
    return relative_error(got.mean, want.mean), relative_error(total, want.total), relative_error(mass, want.mass)


def assert_exact(request: Request, plan: LaunchConfig | None = None, *, rel: float = 1e-6) -> None:
    assert max(errors(request, plan)) <= rel


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("d", WIDTHS)
def test_sums_on_the_sphere(n, d):
    x = unit(n, d, seed=n)
    assert_exact(on_sphere(x, 4.0, skip_self=n % 2 == 0))
    assert_exact(Request(4.0 * x, x, x, causal=True, skip_self=n % 3 == 0))


@pytest.mark.parametrize("plan", [SMALL, WIDE])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("skip_self", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_any_vectors_over_many_blocks(plan, causal, skip_self, weighted):
    weights = normal(50, seed=4).relu() if weighted else None
    assert weights is None or (weights == 0).sum() > 20
    query, key, value = normal(50, 5), normal(50, 5, seed=1), 1e-3 * normal(50, 18, seed=2)
    request = Request(query, key, value, weights=weights, causal=causal, skip_self=skip_self)
    assert_exact(request, plan)
    x = unit(50, 5)
    assert_exact(on_sphere(x, 4.0, weights=weights, causal=causal, skip_self=skip_self), plan)


@pytest.mark.parametrize(
    "start", [*range(0, 100, 25), *(pytest.param(k, marks=pytest.mark.slow) for k in range(100, 300, 25))]
)
def test_300_random_requests(start):
    """Totals and masses; means may underflow in float32. Above beta = 4 the error is that of the logits, a random walk
    over d rounded additions in the order of the machine's matrix product. Measured on two kinds of CPU: at most 3.1 and
    4.6 (d = 119) times beta 2^-24; dense sums in float32 have 3.7.
    """
    for seed in range(start, start + 25):
        request = random_request(seed, plain=True, dims=(2, 130), dtype=torch.float32)
        steps = max(4.0, math.sqrt(request.key.shape[-1]) / 2)
        rel = 1e-6 if request.beta <= 4 else steps * request.beta * 2**-24
        mean, total, mass = errors(request)
        assert max(total, mass) <= rel, seed
        assert math.isfinite(mean)


@pytest.mark.parametrize("length", [0.1, 1.0004, 3.0])
@pytest.mark.parametrize("beta", [4.0, -1.0])
def test_vectors_of_any_length(length, beta):
    """beta does not bound the lengths: longer vectors have logits above beta and entries above 1."""
    x = length * unit(70, 5)
    rel = max(1e-6, 3 * abs(beta) * length**2 * 2**-24)
    for request in (on_sphere(x, beta), on_sphere(x, beta, skip_self=True, causal=True)):
        assert_exact(request, rel=rel)
    mixed = x.clone()
    mixed[::2] /= length
    assert_exact(on_sphere(mixed, beta, skip_self=True), rel=rel)


@pytest.mark.parametrize("size", [1e-33, 1e-6, 1e6, 1e33])
def test_values_of_any_size(size):
    x = unit(40, 3)
    assert_exact(Request(x, x, size * x, skip_self=True))


def test_velocity_of_tokens_off_the_sphere():
    x = 2 * unit(70, 5)
    want = SA(2.0).ambient(x.double())
    with using_summation(Flash()) as used:
        assert relative_error(SA(2.0).ambient(x.to(DEVICE)).cpu(), want) <= 3e-6
    assert used == {"Flash"}


def test_non_contiguous_and_broadcast_tensors():
    x, weights = unit(5, 40, 3).mT, torch.rand(40, 5, generator=torch.Generator().manual_seed(1)).T
    x = torch.nn.functional.normalize(x, dim=-1)
    weights = weights[:, :3]
    assert not x.is_contiguous()
    assert not weights.is_contiguous()
    assert_exact(on_sphere(x, 4.0, weights=weights, skip_self=True))
    assert_exact(Request(x[0], x, x[:1], weights=weights[0], skip_self=True))


def test_few_operations():
    """A short call is limited by the host: 53 operations took 1.1 ms on a machine whose GPU took 0.1 ms."""
    count = 0

    class CountOperations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal count
            count += not func.is_view
            return func(*args, **(kwargs or {}))

    request = moved(on_sphere(unit(40, 5), 4.0, skip_self=True))
    Flash().sum(request)
    launches = [NoOpKernel(), NoOpKernel()]
    with pytest.MonkeyPatch.context() as patch, CountOperations():
        patch.setattr("helmscope.kernels.flash_triton.flash_kernel", launches[0])
        patch.setattr("helmscope.kernels.flash_triton.split_kernel", launches[1])
        Flash().sum(request)
    assert [launch.calls for launch in launches] == [1, 1]
    assert count <= 10  # 7, and 3 that only allocate


class NoOpKernel:
    """A Triton kernel that does nothing."""

    calls = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **options):
        self.calls += 1


def test_against_60_digits():
    x = unit(5, 3)
    got = flash(on_sphere(x, 2.0, skip_self=True))
    rows = x.tolist()
    with mpmath.workdps(60):
        for i in range(5):
            terms = [mpmath.exp(2 * mpmath.fdot(rows[i], rows[j])) for j in range(5)]
            for a in range(3):
                mean = mpmath.fsum(terms[j] * rows[j][a] for j in range(5) if j != i) / mpmath.fsum(terms)
                assert abs(got.mean[i, a].item() - mean) <= 3e-7


def test_at_beta_0_the_mean_is_the_mean_of_all_tokens():
    x = unit(100, 16)
    want = x.double().mean(0).expand(100, 16)
    assert relative_error(flash(on_sphere(x, 0.0)).mean, want) <= 1e-6
    assert relative_error(flash(Request(0 * x, x, x)).mean, want) <= 1e-6
    assert flash(on_sphere(x, 0.0)).log_mass.exp().allclose(torch.tensor(100.0), rtol=1e-6)


@pytest.mark.parametrize("beta", [5.9, 6.1, 30.0, 100.0, 500.0])
def test_large_beta_costs_only_the_rounding_of_the_logits(beta):
    x = unit(100, 8)
    for request in (on_sphere(x, beta), on_sphere(x, beta, skip_self=True), Request(beta * x, x, x, skip_self=True)):
        got = flash(request)
        assert all(part.isfinite().all() for part in (got.total, got.mass, got.shift, got.mass_shift))
        # the sum over the others keeps its digits beside a self-term that is e^500 times larger
        assert torch.linalg.vector_norm(got.total, dim=-1).min() > 1e-3
        # measured: 2.1 beta 2^-24; the dense sum in float32 has 1.6
        assert_exact(request, rel=max(1e-6, 3 * beta * 2**-24))


def test_negative_beta():
    x = unit(70, 4)
    assert_exact(on_sphere(x, -4.0, skip_self=True))


def test_the_tangential_part_keeps_its_digits():
    """The tangential part of a sum is much smaller than the sum: the error must be small even relative to it."""
    x = unit(1024, 16)
    request = on_sphere(x, 4.0, skip_self=True)
    got, want = flash(request).mean.double(), exact(request).mean
    along = x.double() / torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    tangent, tangent_want = (m - (along * m).sum(-1, keepdim=True) * along for m in (got, want))
    assert relative_error(tangent, tangent_want) <= 1e-6


def test_rounding_errors_between_blocks_are_compensated():
    """After a 1, each of 15 blocks adds 0.3 times half an ulp; then the scale of the sums grows by 2^10."""
    value = torch.full((512, 1), 0.3 * 2.0**-28)
    value[0], value[1:16], value[256:] = 1.0, 0.0, 0.0
    key = torch.full((512, 1), 10 * math.log(2))
    key[:256] = 0.0
    request = Request(torch.ones(512, 1), key, value)
    plan = LaunchConfig(queries=512, keys=16, warps=4, stages=2, compensated=True)
    compensated, plain = (
        flash(request, p).total.double()[0, 0] * 2**10 - 1 for p in (plan, replace(plan, compensated=False))
    )
    assert abs(compensated - 15 * 0.3 * 2.0**-24) <= 2.0**-24
    assert plain == 0


def test_tokens_that_attend_to_no_other_token():
    x = unit(3, 4)
    alone = flash(on_sphere(x[:1], 4.0, skip_self=True))
    assert alone.total.tolist() == [[0.0] * 4]
    assert alone.mass.item() == pytest.approx(math.exp(4 - alone.mass_shift.item()), rel=1e-6)
    tiny = flash(on_sphere(x[:1], -500.0, skip_self=True))  # e^-500 underflows in float32
    assert tiny.mean.tolist() == [[0.0] * 4]
    assert tiny.log_mass.item() == pytest.approx(-500, rel=1e-6)
    for request in (
        Request(x, x, x, weights=torch.zeros(3)),
        Request(x, x, x, weights=torch.zeros(3), skip_self=True),
        Request(x, x, x, weights=torch.tensor([0.0, 1.0, 1.0]), causal=True),
    ):
        got, want = flash(request), exact(request)
        masked = (want.mass == 0).flatten()
        assert masked[0]
        for part in (got.total, got.shift, got.mass, got.mass_shift, got.mean):
            assert (part[masked] == 0).all()
        assert (got.log_mass[masked] == -torch.inf).all()
        assert relative_error(got.mean, want.mean) <= 1e-6


def test_weights_of_any_size():
    x = unit(40, 3)
    weights = torch.logspace(-30, 5, 40)
    assert_exact(Request(8 * x, x, x, weights=weights, skip_self=True))
    # the heaviest token is far away: its term is e^-1000 times that of a light token
    far = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
    assert_exact(Request(500 * far, far, far, weights=torch.tensor([1e-8, 1.0, 1e-9])), rel=500 * 2**-24)


def test_systems_of_a_batch_are_independent():
    x, weights = unit(2, 2, 40, 5), torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(1))
    for request in (on_sphere(x, 4.0, weights=weights), Request(x, x, 100 * x, weights=weights, causal=True)):
        batched = flash(request)
        assert_exact(request)
        for a in range(2):
            for b in range(2):
                tensors = (request.query[a, b], request.key[a, b], request.value[a, b])
                alone = flash(Request(*tensors, weights=weights[a, b], beta=request.beta, causal=request.causal))
                assert torch.equal(batched.total[a, b], alone.total)
                assert torch.equal(batched.mass[a, b], alone.mass)
    assert_exact(Request(x, x[0], x[0, 0], weights=weights[:, :1]))


@pytest.mark.parametrize("beta", [4.0, None])
def test_a_nan_affects_only_its_system(beta):
    x = unit(3, 40, 5)
    with_nan = x.clone()
    with_nan[1, 7, 2] = math.nan
    clean, got = (flash(Request(4 * y, y, y, beta=beta, skip_self=True)) for y in (x, with_nan))
    assert got.mean[1].isnan().all(-1).any()
    for part in ("total", "shift", "mass", "mass_shift"):
        for system in (0, 2):
            assert torch.equal(getattr(clean, part)[system], getattr(got, part)[system])


def test_unsupported_requests(monkeypatch):
    x = unit(4, 3).to(DEVICE)
    supported = Request(x, x, x)
    kernel = Flash()
    assert isinstance(kernel, Summation)
    assert kernel.unsupported_reason(supported) is None
    wide = unit(4, 257).to(DEVICE)
    for request, reason in (
        (Request(x.double(), x, x), "it needs float32 tensors, and these are float64"),
        (Request(x, x, wide), "it takes vectors of at most 256 coordinates, and these have 257"),
        (
            Request(*[torch.empty(2**23, 256, device="meta")] * 3),
            "it takes fewer than 2^31 numbers per system, and there are 8388608 tokens",
        ),
        (replace(supported, bias=torch.zeros(4, 4)), "it takes no bias"),
        (
            replace(supported, transform_logits=lambda pairs, weights: pairs),
            "it never stores the whole matrix of logits, which this field needs",
        ),
        (
            replace(supported, skip_self=torch.tensor([[True]])),
            "it omits a token's own term for all heads or for none",
        ),
        (replace(supported, query=x.clone().requires_grad_()), "it has no gradient"),
        (Request(*[x.to("meta")] * 3), "it needs a CUDA device, and the tokens are on meta"),
    ):
        assert kernel.unsupported_reason(request) == reason
    monkeypatch.setattr("helmscope.kernels.flash_triton.INTERPRETED", False)
    assert kernel.unsupported_reason(Request(*[x.cpu()] * 3)) == "it needs a CUDA device, and the tokens are on cpu"


def test_importing_flash_does_not_import_triton():
    code = "import sys, helmscope.kernels.flash, helmscope as hs; "
    code += "hs.SA(1.0).velocity(hs.Uniform(2, 3).sample(seed=0))"
    code += "; print({'triton', 'sympy'} & set(sys.modules))"  # torch imports sympy for things that we do without
    assert run_python(code, check=True).stdout.strip() == "set()"
