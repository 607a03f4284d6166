"""The trials of norm-confines, convex-hull, radial and curvature-drift: their verdicts, their parts computed by other
means, and planted faults that must change the verdict.

Faults are planted in smaller trials, which without a fault give the verdict of the whole ones.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from types import ModuleType

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from helmscope.claims.experiments import convex_hull, curvature_drift, norm_confines, radial
from helmscope.claims.registry import TrialCase, registered_case
from helmscope.claims.trial import Trial, run_trial
from helmscope.fields.attention import SA
from helmscope.fields.norms import LayerNorm, RMSNorm
from helmscope.observe.hull import hull_distance
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import Judgment, Ruling
from support.trials import failures, interval, rulings, set_constants

CLAIMS = ("norm-confines", "convex-hull", "radial", "curvature-drift")
SUPPORTED, REFUTED, HELD = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.BY_CONSTRUCTION


@cache
def quick(claim: str) -> Trial:
    return run_trial(claim, quick=True)


@cache
def density_errors() -> tuple[torch.Tensor, torch.Tensor]:
    """The part of curvature-drift with densities, whose faults are planted in test_trials_densities."""
    return curvature_drift.forward_errors(TrialCase()), curvature_drift.stationary_errors(TrialCase())


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    set_constants(monkeypatch, "norm-confines", depth=3)
    set_constants(monkeypatch, "curvature-drift", dims=[2, 3])
    forward, stationary = density_errors()
    monkeypatch.setattr(curvature_drift, "forward_errors", lambda case: forward)
    monkeypatch.setattr(curvature_drift, "stationary_errors", lambda case: stationary)
    monkeypatch.setattr(curvature_drift, "EVEN", 8)
    monkeypatch.setattr(curvature_drift, "STEPS", curvature_drift.STEPS[-4:])
    set_constants(monkeypatch, "convex-hull", tokens=[4, 3], dims=[2, 5])
    set_constants(monkeypatch, "radial", dims=[4, 5, 6])
    return monkeypatch


# Verdicts -------------------------------------------------------------------------------------------------------------


CONDITIONS = {
    "norm-confines": {"largest radius", "smallest radius", "output of the pre-norm"},
    "convex-hull": {"distance to the hull"},
    "radial": {"radial eigenvalue", "relative error", "orthogonal part", "tangents", "mean direction of LayerNorm"},
    "curvature-drift": {
        *("four generators", "differences", "isotropic noise"),
        *("forward equations", "stationary laws on the circle"),
    },
}
CONTROLS = {
    "norm-confines": {
        "without the norm": REFUTED,
        "pre-norm stream": REFUTED,
        "growth in the pre-norm stream": SUPPORTED,
        "growth without the norm, V = -I": REFUTED,
    },
    "convex-hull": {
        "farthest value pushed out by 1 %": REFUTED,
        "share of pushed values outside": SUPPORTED,
        "distance of the pushed value": HELD,
        "with the residual added": REFUTED,
        "sum of two heads": REFUTED,
    },
    "radial": {"the value 0": REFUTED, "mean direction of RMSNorm": REFUTED, "eps = 0": HELD},
    "curvature-drift": {
        "chain and the nearer of the two forms": REFUTED,
        "chain and Stratonovich": REFUTED,
        "chain and divergence form, d > 2": REFUTED,
        "chain and divergence form on the circle": HELD,
        "generators of the library": HELD,
        "forward equation of another process": REFUTED,
    },
}
PRINTED = {  # the judgment shown, and the one measured
    "norm-confines": (Judgment.TRUE, Judgment.TRUE),
    "convex-hull": (Judgment.TRUE, None),
    "radial": (Judgment.TRUE, Judgment.TRUE),
    "curvature-drift": (Judgment.FALSE, Judgment.FALSE),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_condition_holds_and_every_control_comes_out(claim: str) -> None:
    verdict = quick(claim).verdict
    assert verdict.ruling is HELD
    assert rulings(verdict) == dict.fromkeys(CONDITIONS[claim], HELD) | CONTROLS[claim]
    assert failures(verdict) == set()
    assert all(condition.interval.n >= 1_000 for condition in verdict.conditions)
    assert verdict.printed is not None
    assert (verdict.printed.judgment, verdict.printed.measured) == PRINTED[claim]


@pytest.mark.parametrize("claim", CLAIMS)
def test_seeds(claim: str, smaller: pytest.MonkeyPatch) -> None:
    """Another seed gives the same ruling, the same seed the same bytes."""
    one, again, other = (run_trial(claim, seed=seed, quick=True) for seed in (1, 1, 2))
    assert one.verdict.ruling is other.verdict.ruling is HELD
    assert one.verdict == again.verdict
    assert one.data.identical(again.data)
    assert not one.data.identical(other.data)


def test_numbers_of_norm_confines() -> None:
    """eps makes the radius fall short by up to 1e-6; rounding exceeds it by 2e-16."""
    verdict = quick("norm-confines").verdict
    for name in ("largest radius", "output of the pre-norm"):
        assert abs(interval(verdict, name).estimate - 1) <= 1e-14
        assert 1e-7 < 1 - interval(verdict, name).low < 2e-6
    assert interval(verdict, "smallest radius").estimate <= 1e-14
    assert interval(verdict, "without the norm").estimate > 1e9
    assert interval(verdict, "pre-norm stream").estimate > 20
    assert interval(verdict, "growth in the pre-norm stream").low > 1.04
    repelled = interval(verdict, "growth without the norm, V = -I")
    assert 0.96 < repelled.low < repelled.high < 0.99
    assert verdict.printed.interval.low > 1.5
    assert interval(verdict, "share of softmax averages longer than their longest value").estimate == 0
    assert "the largest radius ratio at 1,536 random inputs" in verdict.sentence
    assert f"{repelled.estimate:.3g} with V = -I" in verdict.sentence


def test_averages_of_unit_tokens_by_plain_loops() -> None:
    """Near 1 / sqrt n at so small a beta, and as the remark says."""
    for n in (2, 8):
        x = TrialCase(quick=True).normal(128, n, 16, index=500 + n)
        lengths = []
        for cloud in (x / x.norm(dim=-1, keepdim=True)).numpy():
            for token in cloud:
                weights = np.array([math.exp(0.25 * float(token @ other)) for other in cloud])
                lengths.append(np.linalg.norm(weights @ cloud / weights.sum()))
        assert norm_confines._unit_average_length(
            registered_case("norm-confines", quick=True), n, 128
        ) == pytest.approx(np.mean(lengths), rel=1e-12)
        assert f"{np.mean(lengths):.2g} at n = {n}," in quick("norm-confines").verdict.sentence
        assert np.mean(lengths) == pytest.approx(n**-0.5, rel=0.05)


def test_numbers_of_convex_hull() -> None:
    """The farthest value, pushed out by 1 % of its distance from the mean, is at least that far away; the largest
    measured distance of a head's output is 4e-16.
    """
    verdict = quick("convex-hull").verdict
    assert interval(verdict, "distance to the hull").estimate <= 4e-15
    pushed = interval(verdict, "farthest value pushed out by 1 %")
    assert 1e-3 < pushed.low < pushed.estimate < 0.02
    assert interval(verdict, "share of pushed values outside").estimate == 1
    assert interval(verdict, "distance of the pushed value").estimate <= 1e-13
    for name in ("with the residual added", "sum of two heads"):
        assert interval(verdict, name).estimate > 0.1
    contraction = interval(verdict, "diameter of the outputs over that of the values")
    assert 0.4 < contraction.low < contraction.high < 0.7
    data = reduce_replicates(quick("convex-hull").data)
    assert float(data.diameter.sel(beta=0.0, mask="full")) <= 1e-14
    assert bool((data.diameter <= 1 + 1e-14).all())


def test_numbers_of_radial() -> None:
    """The largest measured error is 8e-16; the curve shows 1 / (1 + s^2/eps)."""
    verdict, data = quick("radial").verdict, reduce_replicates(quick("radial").data)
    for name in ("radial eigenvalue", "orthogonal part", "tangents", "mean direction of LayerNorm", "eps = 0"):
        assert interval(verdict, name).estimate <= 1e-13
    assert interval(verdict, "relative error").estimate <= 1e-7
    for norm in ("RMSNorm", "LayerNorm"):
        plotted = data.radial.sel(norm=norm)
        np.testing.assert_allclose(plotted, 1 / (1 + plotted.s2_over_eps), rtol=1e-7)
    zero = interval(verdict, "the value 0")
    assert zero.estimate == pytest.approx(1 / (1 + 1e-4), rel=1e-12)
    assert zero.low == pytest.approx(1e-8, rel=1e-6)
    assert interval(verdict, "mean direction of RMSNorm").estimate > 0.9
    assert verdict.printed.interval == interval(verdict, "eps = 0")


def test_numbers_of_curvature_drift() -> None:
    """The largest measured relative error is 2.3e-9, for isotropic noise 2e-10."""
    verdict, data = quick("curvature-drift").verdict, reduce_replicates(quick("curvature-drift").data)
    for name in ("four generators", "differences", "chain and divergence form on the circle"):
        assert interval(verdict, name).estimate <= 2e-8
    assert interval(verdict, "isotropic noise").estimate <= 1e-9
    assert interval(verdict, "generators of the library").estimate <= 1e-12
    for name in ("chain and the nearer of the two forms", "chain and Stratonovich", "chain and divergence form, d > 2"):
        assert interval(verdict, name).estimate > 0.5
    assert verdict.printed.interval == interval(verdict, "chain and Stratonovich")
    for name, c in {"chain": 2, "Stratonovich": 1, "Ito": 0}.items():
        np.testing.assert_allclose(data.c.sel(process=name), c, atol=1e-10)
    np.testing.assert_allclose(data.c.sel(process="divergence form"), data.d, atol=1e-12)
    halved = data.miss[:-1].values / data.miss[1:].values
    np.testing.assert_allclose(halved, 2, atol=0.1)  # single steps are of first order


# By other means -------------------------------------------------------------------------------------------------------


def test_the_corner_of_theory() -> None:
    root = math.sqrt(3)
    measured = curvature_drift._at_corner().measured[0]
    assert measured.tolist() == pytest.approx([-2 / root, -root, -4 / root, -1 / root], rel=1e-10)
    for shown in (
        "chain -1.154700538",
        "Stratonovich -1.732050808",
        "Ito -2.309401077",
        "divergence form -0.577350269",
    ):
        assert shown in quick("curvature-drift").verdict.sentence


def test_single_layers_of_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theory's own numbers for eps = 1e-2, 1e-3, 1e-4."""
    monkeypatch.setattr(curvature_drift, "STEPS", (1e-2, 1e-3, 1e-4))
    chain = curvature_drift._at_corner().rates[0, :, 0]
    assert chain.tolist() == pytest.approx([-1.4492, -1.18746, -1.15801], rel=2e-5)


def test_the_chain_with_gaussian_noise() -> None:
    """The mean over xi ~ N(0, 2M) by Gauss-Hermite rules instead of 2 d points: other steps, the same limit."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    grid = np.array(list(itertools.product(nodes, repeat=3)))
    mass = np.array([math.prod(each) for each in itertools.product(weights / weights.sum(), repeat=3)])
    rates = []
    for eps in (1e-3, 5e-4, 2.5e-4, 1.25e-4, 6.25e-5):
        y = 3**-0.5 + np.sqrt(2 * eps * np.array([1.0, 2.0, 3.0])) * grid
        rates.append((mass @ (y[:, 0] / np.linalg.norm(y, axis=-1)) - 3**-0.5) / eps)
    assert rates[0] == pytest.approx(-1.1696511, abs=1e-7)
    for order in range(1, 5):
        rates = [b + (b - a) / (2**order - 1) for a, b in itertools.pairwise(rates)]
    assert rates[0] == pytest.approx(float(curvature_drift._at_corner().measured[0, 0]), rel=1e-9)


def test_richardsons_rule_on_a_known_series() -> None:
    h = torch.tensor(curvature_drift.STEPS, dtype=torch.float64)
    assert float(curvature_drift._richardson(torch.exp(7 * h))) == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_radial_eigenvalues_in_30_digits(eps: float) -> None:
    """<x, J x> = d/dr <x, N(r x)> at r = |y|, x the direction that the norm keeps."""
    y = TrialCase(7).normal(6, index=0)
    with mpmath.workdps(30):
        vector = [mpmath.mpf(float(each)) for each in y]
        for norm, part in ((RMSNorm(eps=eps), vector), (LayerNorm(eps=eps), [v - sum(vector) / 6 for v in vector])):
            size = mpmath.sqrt(sum(v * v for v in part))
            slope = mpmath.diff(lambda r: r / mpmath.sqrt(r * r / 6 + mpmath.mpf(eps)), size)
            x = torch.tensor([float(v / size) for v in part], dtype=torch.float64)
            found = float(x @ torch.func.jacrev(norm)(y) @ x)
            assert found == pytest.approx(float(slope), rel=1e-6, abs=1e-14)


def test_outputs_are_the_sums_that_a_linear_program_finds_weights_for() -> None:
    """A causal head by plain loops, and every output among the convex combinations of the values that it sees."""
    case = TrialCase(3)
    (head, value), x = convex_hull._random_head(case, 1, 4.0, True, 3, low_rank=False), case.normal(7, 3, index=0)
    x = x / x.norm(dim=-1, keepdim=True)
    out, values, form = head.ambient(x), (x @ value.mT).numpy(), case.normal(2, 3, 3, index=1)[0]
    for i in range(7):
        weights = np.array([math.exp(4.0 * float(x[i] @ form @ x[j])) for j in range(i + 1)])
        looped = weights @ values[: i + 1] / weights.sum()
        np.testing.assert_allclose(out[i], looped, rtol=1e-12, atol=1e-13)
        program = np.vstack([values[: i + 1].T, np.ones(i + 1)])
        assert linprog(np.zeros(i + 1), A_eq=program, b_eq=np.append(out[i], 1.0)).status == 0


def test_radii_by_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm with a gain and random V: three layers after the norm, without it and before it, in NumPy."""
    set_constants(monkeypatch, "norm-confines", depth=3)
    case = registered_case("norm-confines", 11)
    norm = norm_confines._norms(case)[1]
    gain, d, hidden = norm.gain.numpy(), case.constant("dim"), case.constant("hidden")
    seen = norm_confines._run(case, norm, 12, None, 2)
    start = case.normal(2, 8, d, index=312)[1].numpy()

    def normed(y: np.ndarray) -> np.ndarray:
        return gain * y / np.sqrt((y**2).mean(-1, keepdims=True))

    def attended(y: np.ndarray, v: np.ndarray) -> np.ndarray:
        p = np.exp(y @ y.T / math.sqrt(d))
        return p / p.sum(-1, keepdims=True) @ y @ v.T / math.sqrt(d)

    def pushed(y: np.ndarray, w_in: np.ndarray, w_out: np.ndarray) -> np.ndarray:
        z = y @ w_in.T / math.sqrt(d)
        return z * np.vectorize(lambda a: 0.5 * math.erfc(-a / math.sqrt(2)))(z) @ w_out / math.sqrt(hidden)

    after, bare = normed(start), normed(start) / gain
    stream = bare
    for layer, weights in enumerate(case.normal(3, d + 2 * hidden, d, index=12).numpy()):
        v, w_in, w_out = weights[:d], weights[d : d + hidden], weights[d + hidden :]
        after = normed(after + attended(after, v))
        after = normed(after + pushed(after, w_in, w_out))
        bare = bare + attended(bare, v)
        bare = bare + pushed(bare, w_in, w_out)
        stream = stream + attended(normed(stream), v)
        stream = stream + pushed(normed(stream), w_in, w_out)
        looped = [np.linalg.norm(y, axis=-1).max() / math.sqrt(d) for y in (after / gain, bare, stream)]
        np.testing.assert_allclose(seen.largest[1, layer + 1, :3], looped, rtol=1e-10)


# Planted faults -------------------------------------------------------------------------------------------------------


def stretched(kind: type, factor: float) -> type:
    """A norm whose outputs are too long by ``factor``."""

    class Stretched(kind):
        def __call__(self, y: torch.Tensor) -> torch.Tensor:
            return super().__call__(y) * factor

    return Stretched


class Absent(norm_confines.PostNorm):
    def normalize_sum(self, half: object, y: torch.Tensor) -> torch.Tensor:
        return y


class Still(norm_confines.Block):
    def write(
        self, half: object, y: torch.Tensor, weights: torch.Tensor | None = None, *, t: float = 0.0
    ) -> torch.Tensor:
        return torch.zeros_like(y)


class Summed(SA):
    def ambient(self, x: torch.Tensor, weights: torch.Tensor | None = None, *, t: float = 0.0) -> torch.Tensor:
        return x.shape[-2] * super().ambient(x, weights)


class Heavy(SA):
    def ambient(self, x: torch.Tensor, weights: torch.Tensor | None = None, *, t: float = 0.0) -> torch.Tensor:
        return (1 + 1e-5) * super().ambient(x, weights)


def looking_ahead(beta: float, *, causal: bool, **rest: object) -> SA:
    return SA(beta, **rest)  # type: ignore[arg-type]


def halved(x: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return hull_distance(x, v, mask=mask) / 2


class OutsideEps(RMSNorm):
    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return self.gain * y / (y.square().mean(-1, keepdim=True).sqrt() + math.sqrt(self.eps))


class Uncentered(LayerNorm):
    def normalized_part(self, y: torch.Tensor) -> torch.Tensor:
        return y


class LoudNoise(curvature_drift.MatrixNoise):
    def increment(self, x: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
        return (1 + 1e-5) * super().increment(x, dw)


def without_second_end(noise: curvature_drift.MatrixNoise, dw: torch.Tensor, h: float, x: torch.Tensor) -> torch.Tensor:
    return curvature_drift.sphere.retract(x + curvature_drift.sphere.project(x, noise.increment(x, dw)))


def without_trace(noise: curvature_drift.MatrixNoise, dw: torch.Tensor, h: float, x: torch.Tensor) -> torch.Tensor:
    return x + curvature_drift.sphere.project(x, noise.increment(x, dw))


class Flipped(curvature_drift.LayerNormChain):
    def drift(self, noise: curvature_drift.MatrixNoise, x: torch.Tensor) -> torch.Tensor:
        return -super().drift(noise, x)


OPEN = Ruling.INCONCLUSIVE
FAULTS: list[tuple[str, ModuleType, str, object, Ruling, str]] = [
    ("norm-confines", norm_confines, "RMSNorm", stretched(RMSNorm, 1 + 1e-8), REFUTED, "largest radius"),
    ("norm-confines", norm_confines, "RMSNorm", stretched(RMSNorm, 1 - 1e-8), REFUTED, "smallest radius"),
    ("norm-confines", norm_confines, "PostNorm", Absent, REFUTED, "largest radius"),
    ("norm-confines", norm_confines, "Block", Still, OPEN, "without the norm"),
    ("norm-confines", norm_confines, "SA", Summed, OPEN, "growth without the norm, V = -I"),
    ("convex-hull", convex_hull, "SA", Heavy, REFUTED, "distance to the hull"),
    ("convex-hull", convex_hull, "SA", looking_ahead, REFUTED, "distance to the hull"),
    ("convex-hull", convex_hull, "hull_distance", lambda x, v, mask=None: 0 * x[..., 0], OPEN, "sum of two heads"),
    ("convex-hull", convex_hull, "hull_distance", halved, OPEN, "distance of the pushed value"),
    ("radial", radial, "RMSNorm", OutsideEps, REFUTED, "radial eigenvalue"),
    ("radial", radial, "LayerNorm", Uncentered, OPEN, "mean direction of LayerNorm"),
    ("radial", radial, "LayerNorm", stretched(LayerNorm, 1 + 1e-5), REFUTED, "tangents"),
    ("curvature-drift", curvature_drift, "MatrixNoise", LoudNoise, OPEN, "four generators"),
    ("curvature-drift", curvature_drift, "_heun", without_second_end, REFUTED, "differences"),  # Ito's drift
    ("curvature-drift", curvature_drift, "_euler", without_trace, REFUTED, "four generators"),
    ("curvature-drift", curvature_drift, "LayerNormChain", Flipped, OPEN, "generators of the library"),
]


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: f"{planted[0]}-{planted[2]}-{planted[5]}")
def test_a_planted_fault_changes_the_verdict(
    planted: tuple[str, ModuleType, str, object, Ruling, str], smaller: pytest.MonkeyPatch
) -> None:
    claim, module, name, fault, expected, failure = planted
    smaller.setattr(module, name, fault)
    if fault is Flipped:
        smaller.setitem(curvature_drift.PROCESSES, "chain", Flipped())
    verdict = run_trial(claim, quick=True).verdict
    assert verdict.ruling is expected
    assert failure in failures(verdict)
