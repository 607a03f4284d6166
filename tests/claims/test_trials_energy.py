"""Trials of the claims about energies and measures: their verdicts, planted faults, and oracles written out."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import integrate as quadrature
from scipy.spatial.transform import Rotation

from helmscope.claims.evidence import Count
from helmscope.claims.reading import entry
from helmscope.claims.trial import Trial, run_trial
from helmscope.fields.attention import SA, USA
from helmscope.geometry.sphere import project, retract
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import Interval, Judgment, Ruling
from support.trials import failures, interval, named, rulings

Velocity = Callable[..., torch.Tensor]
HOLDS, REFUTED, SUPPORTED, OPEN = Ruling.BY_CONSTRUCTION, Ruling.REFUTED, Ruling.SUPPORTED, Ruling.INCONCLUSIVE
CLAIMS = {
    "kuramoto": HOLDS,
    "extremes": HOLDS,
    "z-metric": HOLDS,
    "measure-flow": HOLDS,
    "repulsive": REFUTED,
}


@functools.cache
def trial(claim: str) -> Trial:
    return run_trial(claim, quick=True)


def module(claim: str) -> ModuleType:
    return importlib.import_module(f"helmscope.claims.experiments.{claim.replace('-', '_')}")


def measured(claim: str, name: str) -> Interval:
    return interval(trial(claim).verdict, name)


def cloud(*shape: int, seed: int = 0) -> torch.Tensor:
    return retract(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def symmetric(d: int, seed: int) -> torch.Tensor:
    square = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (square + square.T) / 2


CONDITIONS = {
    "kuramoto": {"SA at beta = 0", "USA at beta = 2"},
    "extremes": {"crossing", "monotone energy", "uniform distribution", "point mass"},
    "z-metric": {"weighted metric", "flat metric", "Jacobian of USA"},
    "measure-flow": {"difference"},
    "repulsive": {"rate of F"},
}
CONTROLS = {
    "kuramoto": {
        "SA at beta = 1e-3 without the first-order term": REFUTED,
        "order without the first-order term": SUPPORTED,
        "order of the remainder": SUPPORTED,
    },
    "extremes": {"E_max at a lower beta": SUPPORTED},
    "z-metric": {"flow without 1/Z in the weighted metric": REFUTED, "Jacobian of SA in the flat metric": REFUTED},
    "measure-flow": {"causal mask": REFUTED, "bias by position": REFUTED},
    "repulsive": {
        "V = -I": SUPPORTED,
        "F and beta e^-beta E_sum": HOLDS,
        "smallest angle, V = +I": SUPPORTED,
        "tetrahedron": SUPPORTED,
        "octahedron": SUPPORTED,
        "icosahedron": SUPPORTED,
    },
}
PRINTED = {  # the judgment shown, and the one measured
    "kuramoto": None,
    "extremes": (Judgment.TRUE, None),
    "z-metric": (Judgment.FALSE, Judgment.FALSE),
    "measure-flow": (Judgment.FALSE, Judgment.FALSE),
    "repulsive": (Judgment.FALSE, None),
}


@pytest.mark.parametrize(("claim", "ruling"), CLAIMS.items())
def test_the_ruling_and_every_condition_and_control_come_out(claim: str, ruling: Ruling) -> None:
    verdict = trial(claim).verdict
    assert verdict.ruling is ruling
    assert rulings(verdict) == dict.fromkeys(CONDITIONS[claim], ruling) | CONTROLS[claim]
    assert all(control.as_expected for control in verdict.controls)
    printed = verdict.printed
    assert (None if printed is None else (printed.judgment, printed.measured)) == PRINTED[claim]


QUICKER = ("kuramoto", "measure-flow")
SLOWER = [pytest.param(claim, marks=pytest.mark.slow) for claim in CLAIMS if claim not in QUICKER]


@pytest.mark.parametrize("claim", [*QUICKER, *SLOWER])
def test_another_seed_rules_the_same_with_other_numbers_and_equal_seeds_give_equal_ones(claim: str) -> None:
    other, again = (run_trial(claim, seed=seed, quick=True) for seed in (11, 0))
    assert other.verdict.ruling is CLAIMS[claim]
    assert all(control.as_expected for control in other.verdict.controls)
    assert not other.data.identical(trial(claim).data)
    assert again.verdict == trial(claim).verdict
    assert again.data.identical(trial(claim).data)


@pytest.mark.slow
@pytest.mark.parametrize(("claim", "ruling"), CLAIMS.items())
def test_the_full_trial_rules_the_same(claim: str, ruling: Ruling) -> None:
    verdict = run_trial(claim).verdict
    assert verdict.ruling is ruling
    assert verdict.interval.n >= trial(claim).verdict.interval.n


def test_identities_hold_to_rounding_and_their_controls_fail_by_far() -> None:
    for claim in ("kuramoto", "extremes", "z-metric", "measure-flow"):
        for condition in trial(claim).verdict.conditions:
            assert condition.interval.estimate < 3e-14
            assert condition.interval.n >= 1000
    first_order = measured("kuramoto", "SA at beta = 1e-3 without the first-order term")
    assert 1e-4 < first_order.estimate < 1e-3  # O(beta)
    assert measured("kuramoto", "order without the first-order term").estimate == pytest.approx(1, abs=4e-3)
    assert measured("kuramoto", "order of the remainder").estimate == pytest.approx(2, abs=2e-3)
    assert measured("z-metric", "flow without 1/Z in the weighted metric").estimate > 0.9
    assert measured("z-metric", "Jacobian of SA in the flat metric").estimate > 0.5
    assert measured("measure-flow", "causal mask").low > 0.1
    assert measured("measure-flow", "bias by position").low > 0.1
    assert measured("repulsive", "F and beta e^-beta E_sum").estimate < 1e-14
    assert trial("z-metric").verdict.printed.interval.estimate > 0.9
    assert trial("measure-flow").verdict.printed.interval.low > 1


def test_most_ascents_cross_a_lower_bound() -> None:
    assert measured("extremes", "E_max at a lower beta").low > 0.8


def test_repulsion_rises_and_falls_by_the_same_rate() -> None:
    rise, fall = (measured("repulsive", name) for name in ("rate of F", "V = -I"))
    assert 0.1 < rise.low < rise.high < 0.2
    assert -0.2 < fall.low < fall.high < -0.1  # from starts of its own
    rising, falling = (module("repulsive")._log_rate(cloud(4, 12, 3), 2.0, sign) for sign in (1.0, -1.0))
    assert torch.allclose(rising, -falling, rtol=1e-12)
    for name in ("tetrahedron", "octahedron", "icosahedron"):
        assert measured("repulsive", name).estimate == 1.0
    assert measured("repulsive", "smallest angle, V = +I").high < 1e-7


def test_the_curves_show_the_claim() -> None:
    data = {claim: reduce_replicates(trial(claim).data) for claim in CLAIMS}
    place = data["extremes"].place.values
    assert place[0, 0] == place[0, 1]
    assert (np.diff(place[:, 0]) > 0).all()
    assert (np.diff(place[:, 1]) < 0).all()
    assert (data["z-metric"].error_high.sel(form="with 1/Z") < 1e-13).all()
    assert (data["z-metric"].error_low.sel(form=["without 1/Z", "as printed"]) > 0.1).all()
    assert (data["measure-flow"].difference_high[:, :2] < 1e-13).all()
    assert (data["measure-flow"].difference_low[:, 2:] > 0.1).all()
    energy = data["repulsive"].energy.values
    assert (np.diff(energy[:, 0]) > 0).all()
    assert (np.diff(energy[:, 1]) < 0).all()


# --- planted faults ---------------------------------------------------------------------------------------------------


def faulty(kind: type, rule: Velocity) -> type:
    """``kind`` with the velocity that ``rule`` makes of its own, of itself, the tokens and their weights."""

    class Faulty(kind):
        def velocity(self, x: torch.Tensor, weights: torch.Tensor | None = None, *, t: float = 0.0) -> torch.Tensor:
            return rule(super().velocity, self, x, weights)

    return Faulty


def without_z(own: Velocity, self: SA, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return x.shape[-2] * USA(self.beta, query_key=self.query_key, value=self.value).velocity(x, weights)


def louder(own: Velocity, self: USA, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The first token is a little louder than the others."""
    volume = torch.ones_like(x[..., 0]) if weights is None else weights.clone()
    volume[..., 0] *= 1 + 1e-9
    return own(x, volume)


Fast = faulty(SA, lambda own, self, x, weights: (1 + 1e-5) * own(x, weights))
Backward = faulty(SA, lambda own, self, x, weights: -own(x, weights))
BackwardUSA = faulty(USA, lambda own, self, x, weights: -own(x, weights))
Still = faulty(SA, lambda own, self, x, weights: torch.zeros_like(x))
Unweighted = faulty(SA, lambda own, self, x, weights: own(x, None))
WithoutZ = faulty(SA, without_z)
Placed = faulty(USA, louder)


def attractive(beta: float, **_: object) -> SA:
    return SA(beta)


def without_mask(beta: float, *, causal: bool = False, **options: torch.Tensor) -> SA:
    return SA(beta, **options)


def times(factor: float, function: Velocity) -> Velocity:
    return lambda *given, **named: factor * function(*given, **named)


def fault(claim: str, name: str, wrong: object, ruling: Ruling, failure: str, *, slow: bool = False) -> object:
    return pytest.param(claim, name, wrong, ruling, failure, marks=[pytest.mark.slow] if slow else [])


FAULTS = [  # and a condition or control that must notice each
    fault("kuramoto", "SA", Fast, OPEN, "SA at beta = 0"),
    fault("kuramoto", "SA", Backward, OPEN, "SA at beta = 0"),
    fault("kuramoto", "SA", lambda beta: SA(0.0), OPEN, "order without the first-order term"),
    fault("kuramoto", "USA", BackwardUSA, REFUTED, "USA at beta = 2"),
    fault("extremes", "interaction_energy", 1 + 1e-9, REFUTED, "point mass", slow=True),
    fault("extremes", "min_energy", 0.5, REFUTED, "uniform distribution"),
    fault("extremes", "max_energy", 1.005, REFUTED, "point mass"),
    fault("extremes", "min_energy", 1 + 1e-4, REFUTED, "crossing", slow=True),
    fault("extremes", "max_energy", 1 - 1e-9, REFUTED, "crossing", slow=True),
    fault("extremes", "SA", Backward, OPEN, "monotone energy", slow=True),
    fault("extremes", "SA", attractive, REFUTED, "monotone energy", slow=True),
    fault("extremes", "SA", Still, OPEN, "E_max at a lower beta", slow=True),
    fault("z-metric", "SA", Fast, REFUTED, "weighted metric"),
    fault("z-metric", "SA", WithoutZ, OPEN, "weighted metric"),
    fault("z-metric", "USA", SA, REFUTED, "Jacobian of USA", slow=True),
    fault("z-metric", "interaction_energy", 1 + 1e-9, REFUTED, "weighted metric", slow=True),
    fault("measure-flow", "SA", Unweighted, REFUTED, "difference"),
    fault("measure-flow", "USA", Placed, REFUTED, "difference"),
    fault("measure-flow", "SA", without_mask, OPEN, "causal mask"),
    fault("repulsive", "SA", Backward, OPEN, "V = -I"),
    fault("repulsive", "SA", attractive, OPEN, "V = -I"),
    fault("repulsive", "gaussian_energy_as_printed", 1 + 1e-9, OPEN, "F and beta e^-beta E_sum"),
]


@pytest.mark.parametrize(("claim", "name", "wrong", "ruling", "failure"), FAULTS)
def test_a_planted_fault_changes_the_verdict(
    claim: str, name: str, wrong: object, ruling: Ruling, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = module(claim)
    monkeypatch.setattr(where, name, times(wrong, getattr(where, name)) if isinstance(wrong, float) else wrong)
    if claim == "repulsive":  # the polyhedra need long runs, and these faults are to be noticed without them
        monkeypatch.setattr(where, "_reaches_polyhedron", lambda *_: Count(32, 32))
    verdict = run_trial(claim, quick=True).verdict
    assert verdict.ruling is ruling
    assert failure in failures(verdict)


def test_a_run_that_stops_early_reaches_no_icosahedron(monkeypatch: pytest.MonkeyPatch) -> None:
    where = module("repulsive")
    short = [(name, n, beta, end / 20, exact) for name, n, beta, end, exact in where.SHARP]
    monkeypatch.setattr(where, "SHARP", short)
    verdict = run_trial("repulsive", quick=True).verdict
    assert verdict.ruling is OPEN
    assert "icosahedron" in failures(verdict)
    assert named(verdict, "rate of F").ruling is REFUTED


# --- oracles ----------------------------------------------------------------------------------------------------------


def test_angular_is_the_sum_written_out() -> None:
    theta = 3 * torch.randn(1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    angles = theta[0].tolist()
    for beta in (0.0, 1.7):
        for field in (SA(beta), USA(beta)):
            seen = module("kuramoto").angular(field, theta)[0].tolist()
            for a, velocity in zip(angles, seen, strict=True):
                total = [math.exp(beta * math.cos(b - a)) for b in angles]
                norm = sum(total) if isinstance(field, SA) else 5
                due = sum(t * math.sin(b - a) for t, b in zip(total, angles, strict=True)) / norm
                assert velocity == pytest.approx(due, abs=1e-14)


def test_crossing_by_hand() -> None:
    energy = torch.tensor([[[1.0, 2.0]], [[0.9, 2.0]], [[1.5, 2.5]]], dtype=torch.float64)
    assert module("extremes").crossing(energy, 1.0, 2.0).tolist() == pytest.approx([0.0, 0.1, 0.25], abs=1e-15)


def test_the_closed_forms_of_extremes_are_those_of_an_integral() -> None:
    where = module("extremes")
    bounds = entry("extremes").constants
    for dim in bounds["dims"][1:]:
        for beta in bounds["betas"]:
            density = [
                quadrature.quad(lambda t, b=b, d=dim: math.exp(b * t) * (1 - t * t) ** ((d - 3) / 2), -1, 1)[0]
                for b in (beta, 0.0)
            ]
            due = density[0] / density[1] / (2 * beta)
            assert where.min_energy(beta=beta, dim=dim) == pytest.approx(due, rel=1e-10)
            assert where.max_energy(beta=beta) == pytest.approx(math.exp(beta) / (2 * beta), rel=1e-15)


def test_derivative_and_weighted_product_against_central_differences() -> None:
    where, beta, v = module("z-metric"), 1.3, symmetric(4, 1)
    x = cloud(1, 6, 4, seed=2)
    w = project(x, cloud(1, 6, 4, seed=3))

    def energy(points: torch.Tensor) -> float:
        return sum(math.exp(beta * float(a @ v @ b)) for a in points for b in points) / (2 * beta)

    h = 1e-5
    due = (energy(x[0] + h * w[0]) - energy(x[0] - h * w[0])) / (2 * h)
    assert float(where._derivative(x, v, beta, w)) == pytest.approx(due, rel=1e-8)
    product = 0.0
    for a, direction in zip(x[0], w[0], strict=True):
        terms = [math.exp(beta * float(a @ v @ b)) for b in x[0]]
        pull = sum(t * (v @ b) for t, b in zip(terms, x[0], strict=True)) / sum(terms)
        product += sum(terms) * float((pull - (a @ pull) * a) @ direction)
    assert product == pytest.approx(due, rel=1e-8)


def test_asymmetry_on_the_circle_is_that_of_the_angular_jacobian() -> None:
    theta = torch.tensor([0.0, 1.0, 2.5, 4.0], dtype=torch.float64)
    x = torch.stack([theta.cos(), theta.sin()], -1)[None]

    def velocity(angles: np.ndarray) -> np.ndarray:
        apart = angles[None, :] - angles[:, None]
        kernel = np.exp(2.0 * np.cos(apart))
        return (kernel * np.sin(apart)).sum(1) / kernel.sum(1)

    h = 1e-5
    steps = [velocity(theta.numpy() + h * e) - velocity(theta.numpy() - h * e) for e in np.eye(4)]
    jacobian = np.stack(steps, 1) / (2 * h)
    due = np.linalg.norm(jacobian - jacobian.T) / np.linalg.norm(jacobian)
    assert float(module("z-metric").asymmetry(SA(2.0), x)) == pytest.approx(due, rel=1e-7)
    assert float(module("z-metric").asymmetry(USA(2.0), x)) < 1e-15


def test_weights_and_repetition_are_told_apart_from_plain_tokens() -> None:
    where = module("measure-flow")
    x, counts = cloud(3, 4, 3), torch.tensor([1, 3, 2, 1])
    field = SA(2.0, query_key=symmetric(3, 5), value=symmetric(3, 6))
    assert (where._repetition_error(field, x, counts) < 1e-14).all()
    plain = where._difference(field(x, weights=counts.double()), field(x))
    assert (plain > 1e-2).all()  # so equality above is not for want of an effect
    order = torch.tensor([2, 0, 3, 1])
    assert (where._permutation_error(field, x, order) < 1e-14).all()
    assert (where._difference(field(x), field(x[:, order])) > 1e-2).all()  # not put back


def test_the_rate_of_f_is_the_z_weighted_speed() -> None:
    where = module("repulsive")
    x, beta = cloud(2, 5, 3, seed=7), 2.0
    for system, seen in zip(x, where._log_rate(x, beta, 1.0).tolist(), strict=True):
        rows = [[float(a @ b) for b in system] for a in system]
        f = sum(math.exp(beta * (c - 1)) for row in rows for c in row) / 2
        rise = 0.0
        for a, row in zip(system, rows, strict=True):
            z = sum(math.exp(beta * c) for c in row)
            pull = sum(math.exp(beta * c) * b for c, b in zip(row, system, strict=True)) / z
            rise += z * float(((pull - (a @ pull) * a) ** 2).sum())
        assert seen == pytest.approx(beta * math.exp(-beta) * rise / f, rel=1e-12)


def test_the_sharp_configurations_are_the_polyhedra() -> None:
    golden = (1 + math.sqrt(5)) / 2
    solids = {
        "tetrahedron": [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)],
        "octahedron": [tuple(s * e) for e in np.eye(3) for s in (1, -1)],
        "icosahedron": [
            tuple(np.roll((0, a, b * golden), shift)) for shift in range(3) for a in (1, -1) for b in (1, -1)
        ],
    }
    for name, n, _, _, exact in module("repulsive").SHARP:
        points = np.array(solids[name]) / np.linalg.norm(solids[name], axis=1, keepdims=True)
        points = Rotation.random(rng=1).apply(points)
        seen = np.sort((points @ points.T)[np.triu_indices(n, 1)])
        assert seen == pytest.approx(exact, abs=1e-14)
        assert SA(2.0, value=-torch.eye(3))(torch.from_numpy(points)).abs().max() < 1e-14  # at rest
