"""Kernels where their tensors lie: every one gives there what the dense one gives in float64 on the CPU.

A machine with a GPU runs the GPU's own kernels too, compiled instead of interpreted, and the whole table of figure 3.
"""

import pytest
import torch

import helmscope as hs
from helmscope.kernels.choose import choose, token_sum, using_summation
from helmscope.kernels.fused import fused_clustering
from helmscope.kernels.request import AttentionSum, Request
from support.figure_three_table import TIMES, check_table
from support.summation_cases import random_request

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = (torch.float64, torch.float32)
COMPILED = DEVICES[-1:]  # Triton's kernels run on the GPU, or where there is none under the interpreter


def moved(request: Request, device: str, dtype: torch.dtype) -> Request:
    parts = {name: getattr(request, name) for name in ("query", "key", "value", "weights", "bias")}
    rest = {name: getattr(request, name) for name in ("causal", "skip_self", "beta")}
    return Request(**{k: None if v is None else v.to(device, dtype) for k, v in parts.items()}, **rest)


def error(sums: AttentionSum, request: Request) -> float:
    """The largest error of the mean and of log Z, against the dense sums of the same numbers in float64."""
    wanted = hs.kernels.Dense().sum(moved(request, "cpu", torch.float64))
    seen = (wanted.mass > 0).squeeze(-1)
    mean = (sums.mean.cpu().double() - wanted.mean).abs().max()
    log_mass = (sums.log_mass.cpu().double() - wanted.log_mass)[seen].abs()
    return max(float(mean), float(log_mass.max()) if len(log_mass) else 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_streaming(device, dtype):
    for seed in range(40):
        request = moved(random_request(seed), device, dtype)
        largest = float(request.query.norm(dim=-1).max()) + 4
        rounding = 8 * largest * torch.finfo(dtype).eps + 30 * torch.finfo(dtype).eps
        for kernel in (hs.kernels.Blockwise((64, 32)), hs.kernels.Blockwise()):
            found = kernel.sum(request)
            assert found.total.device.type == device
            assert error(found, request) <= rounding * max(1.0, float(request.value.abs().max())), (seed, kernel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [2, 3])
def test_harmonic(d, device, dtype):
    bound = 1e-11 if dtype == torch.float64 else 5e-6
    x = hs.Uniform(n=700, dim=d).sample(batch=2, seed=0, dtype=dtype, device=device)
    weights = torch.linspace(0, 1, 700, dtype=dtype, device=device)
    for beta in (0.0, 4.0, 20.0):
        for skip_self in (False, True):
            request = Request(beta * x, x, x, weights=weights, beta=beta, skip_self=skip_self)
            assert error(hs.kernels.Harmonic().sum(request), request) <= bound * max(1.0, beta)


@pytest.mark.parametrize("device", COMPILED)
def test_flash(device):
    for seed in range(40 if device == "cuda" else 3):
        request = moved(random_request(seed, plain=True), device, torch.float32)
        assert hs.kernels.Flash().unsupported_reason(request) is None
        # |l| 2^-22 for logits l, beside what float32 costs where every pair is stored
        logit = float(request.query.norm(dim=-1).max())
        rounding = error(hs.kernels.Dense().sum(request), request)
        assert error(hs.kernels.Flash().sum(request), request) <= logit * 2**-22 + 2 * rounding + 2e-6, seed


@pytest.mark.parametrize("device", COMPILED)
@pytest.mark.parametrize(
    ("normalized", "causal", "value"), [(True, False, 1.0), (False, False, -1.0), (True, True, -1.0)]
)
def test_fused_is_solve_and_observe(device, normalized, causal, value):
    times, beta = [0.0, 0.5, 1.0], 1.5
    for n, d in ((2, 2), (3, 5), (17, 3), (32, 32), (64, 40)) if device == "cuda" else ((3, 5),):
        x = hs.Uniform(n=n, dim=d).sample(batch=6, seed=n, dtype=torch.float32)
        field = (hs.SA if normalized else hs.USA)(beta, value=value * torch.eye(d), causal=causal)
        run = hs.integrate(field, torch.nn.functional.normalize(x.double(), dim=-1), times, stepper=hs.RK4(0.1))
        found = fused_clustering(
            x.to(device),
            times,
            betas=torch.tensor([beta]),
            values=torch.tensor([value]),
            steps=torch.tensor([5]),
            normalized=normalized,
            causal=causal,
            delta=0.1,
            stop=False,
            keep_states=True,
        )
        assert (found.states[0].cpu().double() - run.states[-1]).abs().max() < 2e-5
        share = hs.observe.close_pair_share(run.states, delta=0.1).mT
        assert (found.met[0].cpu().double() / found.pairs - share).abs().max() <= 1 / found.pairs


if torch.cuda.is_available():

    def test_the_choice_on_a_gpu():
        def name(n, d, dtype, **options):
            x = hs.Uniform(n=n, dim=d).sample(seed=0, dtype=dtype, device="cuda")
            return type(choose(Request(4 * x, x, x, **options))).__name__

        assert name(2048, 16, torch.float32) == "Dense"
        assert name(2049, 16, torch.float32) == "Flash"
        assert name(2049, 16, torch.float64) == "Blockwise"
        assert name(2049, 300, torch.float32) == "Blockwise"
        assert name(4096, 3, torch.float32, beta=4.0) == "Harmonic"
        assert name(4096, 3, torch.float32, causal=True) == "Flash"
        x = hs.Uniform(n=3000, dim=16).sample(seed=0, dtype=torch.float32, device="cuda")
        assert (hs.SA(4.0)(x).cpu().double() - hs.SA(4.0)(x.cpu().double())).abs().max() < 2e-6

    @pytest.mark.parametrize("d", [2, 3])
    @pytest.mark.parametrize("n", [65_536, 1_000_003])
    def test_harmonic_sums_of_large_clouds_on_a_gpu(n, d):
        x = hs.Uniform(n=n, dim=d).sample(seed=0, dtype=torch.float32, device="cuda")
        request = Request(4 * x, x, x, beta=4.0)
        with using_summation() as names:
            mean = token_sum(request).mean
        assert names == {"Harmonic"}
        assert torch.equal(token_sum(request).mean, mean)
        wanted = hs.kernels.Harmonic().sum(moved(request, "cpu", torch.float64)).mean
        assert (mean.cpu().double() - wanted).norm() <= 5e-7 * wanted.norm()

    @pytest.mark.parametrize("dim", [2, 32, 128, 512])
    def test_the_whole_table_on_a_gpu(dim):
        """8,192 samples by the fused kernel, against the table's own standard errors and ours."""
        check_table(dim, samples=8192, times=TIMES, seed=1, device="cuda")
