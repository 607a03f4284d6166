"""The fused kernel, run by Triton's interpreter if there is no GPU, against ``solve`` and ``observe`` in float64, a
plain loop and closed forms; unsupported and bad input.
"""

from __future__ import annotations

import math

import pytest
import torch

from helmscope.fields.attention import SA, USA, Attention
from helmscope.geometry.sphere import retract
from helmscope.kernels import fused
from helmscope.kernels.fused import Clustering, LaunchConfig, fused_clustering, fused_refuses, launch
from helmscope.observe.inner_products import close_pair_share
from helmscope.solve.heun import Heun
from helmscope.solve.integrate import integrate
from helmscope.solve.rk4 import RK4
from helmscope.types import HelmscopeError
from support.children import run_python

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def to_cpu(result: Clustering) -> Clustering:
    states = None if result.states is None else result.states.cpu()
    return Clustering(result.met.cpu(), result.pairs, result.lost.cpu(), states)


def clustering(x0: torch.Tensor, times: list[float], **options) -> Clustering:
    """The result of the kernel on the CPU, from starts in any dtype."""
    return to_cpu(fused_clustering(x0.float().to(DEVICE), times, **options))


def cloud(samples: int, n: int, d: int, *, spread: float = math.inf, seed: int = 0) -> torch.Tensor:
    """Random tokens, uniform or within about ``spread`` of e_1: float64 values that are exact in float32."""
    noise = torch.randn(samples, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pole = torch.nn.functional.one_hot(torch.tensor(0), d).double()
    return retract(noise if spread == math.inf else pole + spread * noise).float().double()


def reference(field: Attention, x: torch.Tensor, times: list[float], steps: int, stepper: type) -> list[torch.Tensor]:
    """States at ``times`` by ``solve``, with the same number of steps in each interval."""
    states, now = [], 0.0
    for t in times:
        if t > now:
            x = integrate(field, x, times=[t - now], stepper=stepper((t - now) / steps), normalize=True).states[-1]
        states.append(x)
        now = t
    return states


def check(
    x: torch.Tensor, times: list[float], betas: list[float], steps: list[int], *, value: float = 1.0, order: int = 4,
    normalized: bool = True, causal: bool = False, delta: float = 0.3, bound: float = 3e-7,
) -> Clustering:  # fmt: skip
    """Check that states are within ``bound`` of float64 and that counts are equal."""
    result = clustering(
        x,
        times,
        betas=torch.tensor(betas),
        steps=torch.tensor(steps),
        values=torch.full((len(betas),), value),
        order=order,
        normalized=normalized,
        causal=causal,
        delta=delta,
        stop=False,
        keep_states=True,
    )
    n, d = x.shape[-2:]
    assert result.pairs == n * (n - 1) // 2
    assert result.complaint is None
    assert result.lost.tolist() == [[len(times)] * len(x)] * len(betas)
    for k, beta in enumerate(betas):
        field = (SA if normalized else USA)(beta, value=value * torch.eye(d, dtype=torch.float64), causal=causal)
        expected = reference(field, x, times, steps[k], RK4 if order == 4 else Heun)
        assert float((result.states[k] - expected[-1]).abs().max()) < bound
        if n > 1:
            share = torch.stack([close_pair_share(y, delta=delta) for y in expected], -1)
            assert result.met[k].tolist() == (share * result.pairs).round().tolist()
    return result


@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 33), (3, 8), (5, 3), (17, 17), (32, 2)])
def test_it_agrees_with_solve_and_observe(n: int, d: int) -> None:
    """Sizes that need padding. Measured: at most 1.1e-7."""
    check(cloud(1, n, d), [0.4, 1.0], [0.0, 4.0], [1, 1])


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize(
    ("value", "causal", "normalized"),
    [(1.0, True, True), (-1.0, False, True), (1.0, False, False), (-0.5, True, False)],
)
def test_every_flow(value: float, causal: bool, normalized: bool, order: int) -> None:
    """SA and USA, causal, repelling, by RK4 and Heun, with a number of steps per beta. Measured: 1.3e-7."""
    check(cloud(1, 5, 3), [0.5], [0.5, 2.0], [1, 2], value=value, causal=causal, normalized=normalized, order=order)


def test_it_agrees_with_one_call_of_integrate_for_equidistant_times() -> None:
    x, times = cloud(2, 6, 3, spread=0.7), [0.0, 1.0, 2.0, 3.0]
    result = clustering(x, times, betas=torch.ones(1), steps=torch.tensor([2]), delta=0.05)
    states = integrate(SA(1.0), x, times=times, stepper=RK4(0.5), normalize=True).states
    share = close_pair_share(states, delta=0.05).T
    assert result.met[0].tolist() == (share * 15).round().tolist()
    assert 0 < share[:, 1].max() < share[:, -1].min()
    assert result.states is None


def test_unequal_times_starting_at_zero() -> None:
    result = check(cloud(2, 4, 2, spread=0.5), [0.0, 0.2, 1.7], [1.0], [2], delta=0.05)
    assert result.met[0, :, 0].tolist() != result.met[0, :, 2].tolist()


def test_large_beta_does_not_overflow() -> None:
    """e^500 overflows in float32, and e^30 / n is compensated by the step size. At beta = 500 the rounding error of
    <x, y> is amplified 500 times. Measured: 4.2e-7 and 1.8e-7.
    """
    x = cloud(1, 5, 2, spread=0.05)
    check(x, [0.5], [500.0], [1], bound=1e-6, delta=2e-3)
    check(x, [0.5e-12], [30.0], [2], normalized=False, bound=5e-7, delta=2e-3)


@pytest.mark.parametrize("d", [3, 8])
def test_sums_over_coordinates_agree_with_matrix_products(d: int) -> None:
    """Measured: at most 6e-8."""
    flows = fused._checked_flows(5, [0.3, 0.6], torch.tensor([3.0]), torch.tensor([1]), None, True)
    task = fused.Task(flows, 4, normalized=True, causal=False, near=0.9, stop=False, keep_states=True)
    x = cloud(1, 5, d, spread=0.5).float()
    sums, products = (to_cpu(launch(x.to(DEVICE), task, LaunchConfig(products, warps=1))) for products in (False, True))
    assert float((sums.states - products.states).abs().max()) < 2e-7
    assert torch.equal(sums.met, products.met)
    assert float((sums.states - x).abs().max()) > 0.05


def test_it_agrees_with_a_plain_loop() -> None:
    """One Heun step of a causal USA flow with V = -1, token by token."""
    x, beta, h, n = cloud(1, 3, 2)[0].tolist(), 1.5, 0.1, 3

    def velocity(tokens: list[list[float]], i: int) -> list[float]:
        total = [0.0, 0.0]
        for j in range(i + 1):
            weight = -math.exp(beta * sum(a * b for a, b in zip(tokens[i], tokens[j], strict=True))) / n
            total = [t + weight * c for t, c in zip(total, tokens[j], strict=True)]
        along = sum(a * b for a, b in zip(tokens[i], total, strict=True))
        return [t - along * a for t, a in zip(total, tokens[i], strict=True)]

    def normalize(point: list[float]) -> list[float]:
        return [c / math.hypot(*point) for c in point]

    first = [velocity(x, i) for i in range(n)]
    y = [normalize([a + h * v for a, v in zip(x[i], first[i], strict=True)]) for i in range(n)]
    second = [velocity(y, i) for i in range(n)]
    end = [
        normalize([a + h * (v + w) / 2 for a, v, w in zip(*row, strict=True)])
        for row in zip(x, first, second, strict=True)
    ]
    result = clustering(
        torch.tensor([x]), [h], betas=torch.tensor([beta]), steps=torch.tensor([1]), values=torch.tensor([-1.0]),
        order=2, normalized=False, causal=True, keep_states=True,
    )  # fmt: skip
    assert float((result.states[0, 0] - torch.tensor(end)).abs().max()) < 2e-7


def test_it_agrees_with_the_closed_form_for_two_tokens() -> None:
    """At beta = 0, <x_1, x_2> = tanh t from a right angle, which reaches 1 - delta at artanh(1 - delta) = 0.9730."""
    result = clustering(
        torch.eye(2)[None], [0.96, 0.98], betas=torch.zeros(1), steps=torch.tensor([3]), delta=0.25, keep_states=True,
        stop=False,
    )  # fmt: skip
    assert result.met.tolist() == [[[0, 1]]]
    a, b = result.states[0, 0]
    assert float(a @ b) == pytest.approx(math.tanh(0.98), abs=2e-5)  # RK4 in three steps of 0.32, then three of 0.007


def test_a_system_stops_once_all_pairs_have_met() -> None:
    """Counts are the same with and without stopping; a stopped system keeps the states at which all pairs had met."""
    x = cloud(2, 4, 3, spread=0.25).float()
    options = {"betas": torch.tensor([1.0]), "steps": torch.tensor([1]), "delta": 0.1, "keep_states": True}
    times = [0.0, 1.0, 2.0]
    stopped, full = (clustering(x, times, stop=stop, **options) for stop in (True, False))
    assert torch.equal(stopped.met, full.met)
    assert stopped.met[0, :, 1].tolist() == [6, 6]
    assert stopped.met[0, :, 0].tolist() != [6, 6]
    early = clustering(x, times[:2], stop=False, **options)
    assert torch.equal(stopped.states, early.states)
    assert float((stopped.states - full.states).abs().max()) > 1e-2


def test_repelling_systems_are_not_stopped() -> None:
    result = clustering(
        cloud(1, 3, 2, spread=0.05).float(), [0.0, 4.0], betas=torch.ones(1), steps=torch.tensor([6]),
        values=torch.tensor([-1.0]), delta=0.05,
    )  # fmt: skip
    assert result.met.tolist() == [[[3, 0]]]


def test_a_lost_system_does_not_affect_others() -> None:
    x = cloud(3, 4, 3, spread=0.3).float()
    options = {"betas": torch.tensor([1.0, 3.0]), "steps": torch.tensor([1, 1]), "delta": 0.1, "keep_states": True}
    clean = clustering(x, [0.0, 0.5], **options)
    with_nan = x.clone()
    with_nan[1, 2, 0] = math.nan
    result = clustering(with_nan, [0.0, 0.5], **options)
    assert result.lost.tolist() == [[2, 0, 2]] * 2
    assert result.met[:, 1].tolist() == [[0, 0]] * 2
    assert result.complaint == (
        "system 1 of beta 0 is not finite from time 0 on (and 1 more system): use more steps or smaller values"
    )
    for part in ("met", "states"):
        assert torch.equal(getattr(result, part)[:, ::2], getattr(clean, part)[:, ::2])
    assert int(clean.met[:, ::2].min()) > 0


def test_unsupported_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = cloud(1, 3, 2).float()
    assert fused_refuses(x.to(DEVICE)) is None
    assert "float64" in fused_refuses(x.double())
    assert "delta is 1e-05" in fused_refuses(x, delta=1e-5)
    assert "n=65 tokens" in fused_refuses(torch.ones(1, 65, 2))
    assert "d=129" in fused_refuses(torch.ones(1, 3, 129))
    assert "gradient" in fused_refuses(x.clone().requires_grad_())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert fused_refuses(x) == "x0 is on cpu, and it needs a CUDA device"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert fused_refuses(x) == "triton is not installed"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x0": torch.eye(2)}, r"x0 is of shape \(2, 2\), but it must be a tensor of shape \(sample, n, d\)"),
        ({"x0": [1.0]}, "x0 is a list"),
        ({"x0": 2 * torch.eye(2)[None]}, "x0 holds a token of norm 2, but tokens must be on the unit sphere"),
        ({"x0": torch.eye(2).double()[None]}, "the fused kernel is not applicable: x0 has dtype torch.float64"),
        ({"times": [1.0, 1.0]}, r"times\[1\] is 1 after 1"),
        ({"betas": torch.ones(1, 1)}, r"betas is of shape \(1, 1\), but it must be a one-dimensional tensor"),
        ({"betas": torch.tensor([])}, "betas is .*, but it must hold at least one number"),
        ({"betas": torch.tensor([-1.0])}, "betas holds -1, but every beta must be >= 0"),
        ({"steps": torch.tensor([1, 2])}, r"steps is of shape \(2,\), but it must be a tensor of shape \(1,\)"),
        ({"steps": torch.tensor([0])}, r"steps is \[0.0\], but it must hold whole numbers"),
        ({"steps": torch.tensor([1.5])}, r"steps is \[1.5\]"),
        ({"values": torch.tensor([math.nan])}, r"values is \[nan\], but it must hold .* all finite"),
        ({"order": 3}, r"order is 3, but it must be 2 \(Heun\) or 4 \(RK4\)"),
        ({"delta": 1.0}, "delta is 1, but it must be below 1"),
        ({"delta": 0.0}, "delta is 0.0, but it must be a finite number > 0"),
        ({"betas": torch.tensor([60.0]), "normalized": False}, "steps allow tokens to move by 6e.25 in one step"),
        ({"betas": torch.tensor([1e3]), "normalized": False}, "steps allow tokens to move by inf in one step"),
    ],
)
def test_bad_input_raises(changed: dict[str, object], message: str) -> None:
    start = torch.eye(2, device=DEVICE)[None]
    arguments = {"x0": start, "times": [1.0], "betas": torch.ones(1), "steps": torch.ones(1).int()} | changed
    with pytest.raises(HelmscopeError, match=message):
        fused_clustering(**arguments)


def test_importing_fused_does_not_import_triton() -> None:
    code = "import sys, helmscope.kernels.fused; assert 'helmscope.kernels.fused_triton' not in sys.modules"
    code += "; assert 'triton' not in sys.modules"
    run_python(code, check=True)
