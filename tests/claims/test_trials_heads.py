"""The trial of ``heads-average``: the identity, energies of heads, and complex pairs at their equilibria."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from helmscope.claims.experiments import heads_average
from helmscope.claims.reading import entry
from helmscope.claims.trial import Trial, run_trial
from helmscope.fields.attention import SA, USA
from helmscope.fields.multihead import MultiHead
from helmscope.geometry.sphere import retract, tangent_basis
from helmscope.stats.reduce import reduce_replicates
from helmscope.types import Judgment, Ruling


@functools.cache
def trial() -> Trial:
    return run_trial("heads-average", quick=True)


def cloud(*shape: int, seed: int = 0) -> torch.Tensor:
    return retract(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def symmetric(d: int, seed: int) -> torch.Tensor:
    square = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (square + square.T) / 2


def test_the_identity_holds_and_every_control_comes_out_as_expected() -> None:
    verdict = trial().verdict
    assert verdict.ruling is Ruling.BY_CONSTRUCTION
    assert verdict.interval.estimate < 1e-13
    rulings = {control.name: control.ruling for control in verdict.controls}
    assert rulings == {
        "one head left out": Ruling.REFUTED,
        "sum of energies, USA": Ruling.BY_CONSTRUCTION,
        "sum of energies, SA": Ruling.SUPPORTED,
        "complex pairs, SA": Ruling.SUPPORTED,
        "complex pairs, USA": Ruling.SUPPORTED,
    }
    assert all(control.as_expected for control in verdict.controls)
    data = reduce_replicates(trial().data)
    assert (data.falling.sel(heads="two of USA") == 0).all()
    assert data.falling.sel(heads="two of SA", beta=8.0) > 0.02


def test_complex_pairs_exclude_a_gradient_flow_of_sa_heads_alone() -> None:
    sa, usa = (
        next(control for control in trial().verdict.controls if control.name == f"complex pairs, {kind}")
        for kind in ("SA", "USA")
    )
    assert sa.interval.low > 0.1
    assert usa.interval.estimate == 0
    assert min(sa.interval.n, usa.interval.n) > 24  # of 64 starts of Newton's method


def test_the_printed_formula_is_not_judged_by_an_energy_that_the_source_does_not_claim() -> None:
    printed = trial().verdict.printed
    assert printed.judgment is Judgment.NOT_TESTABLE
    assert printed.measured is None
    assert "energy" not in entry("heads-average").printed.reason
    assert "energy" not in entry("heads-average").statement


@pytest.mark.parametrize("kind", [SA, USA])
def test_the_tangent_jacobian_against_central_differences(kind: type[SA] | type[USA]) -> None:
    forms = torch.stack([symmetric(3, 1), symmetric(3, 2)])[None]
    x = cloud(1, 4, 3, seed=3)
    basis = tangent_basis(x)
    wide = heads_average._batched_heads(kind, 2.0, forms.repeat_interleave(8, 0))
    jacobian = heads_average.tangent_jacobian(wide, x, basis)[0].numpy()
    field = MultiHead([kind(2.0, query_key=form, value=form) for form in forms[0]])
    h, columns = 1e-6, []
    for j in range(4):
        for k in range(2):
            offset = torch.zeros_like(x)
            offset[0, j] = h * basis[0, j, :, k]
            slope = (field.velocity(x + offset) - field.velocity(x - offset)) / (2 * h)
            columns.append((basis.mT @ slope.unsqueeze(-1)).flatten().numpy())
    assert np.abs(jacobian - np.stack(columns, 1)).max() < 1e-8


def test_an_equilibrium_of_a_rotation_has_a_complex_pair() -> None:
    """With V = I + A, A antisymmetric, one token is at rest only on the axis, around which its neighbors rotate."""
    forms = torch.eye(3, dtype=torch.float64).expand(8, 2, 3, 3).clone()
    forms[:, :, 0, 1], forms[:, :, 1, 0] = 2.0, -2.0
    shares = heads_average._imaginary_shares(SA, 0.0, forms, cloud(8, 1, 3, seed=5), 1e-12)
    assert len(shares) > 0
    assert (shares > 0.5).all()


@pytest.mark.parametrize("kind", [SA, USA])
def test_the_rate_of_the_summed_energies_against_central_differences(kind: type[SA] | type[USA]) -> None:
    heads = [kind(1.5, query_key=symmetric(3, k), value=symmetric(3, k)) for k in (8, 9)]
    x = cloud(1, 4, 3, seed=10)

    def energy(points: torch.Tensor) -> float:
        pairs = [(head.query_key, a, b) for head in heads for a in points for b in points]
        return sum(math.exp(1.5 * float(a @ form @ b)) for form, a, b in pairs) / (2 * 1.5 * 16)

    velocity = sum(head(x) for head in heads)[0] / 2
    h = 1e-5
    due = (energy(x[0] + h * velocity) - energy(x[0] - h * velocity)) / (2 * h)
    rate, square, most = heads_average._energy_rates(heads, x)[:, 0].tolist()
    assert rate == pytest.approx(due, rel=1e-7)
    assert square == pytest.approx(float((velocity**2).sum()), rel=1e-13)
    assert rate <= most
    if kind is USA:
        assert rate == pytest.approx(2 / 4 * square, rel=1e-12)


class OneHeadShort(MultiHead):
    def velocity(self, x, weights=None, *, t=0.0):
        return MultiHead(self.heads[:-1], scale=self.scale).velocity(x, weights)


class Summed(MultiHead):
    def velocity(self, x, weights=None, *, t=0.0):
        return len(self.heads) * super().velocity(x, weights)


FAULTS = [
    ("MultiHead", OneHeadShort, Ruling.REFUTED),
    pytest.param("MultiHead", Summed, Ruling.REFUTED, marks=pytest.mark.slow),
    pytest.param("SA", USA, Ruling.INCONCLUSIVE, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "wrong", "ruling"), FAULTS)
def test_a_planted_fault_is_noticed(name: str, wrong: object, ruling: Ruling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_average, name, wrong)
    verdict = run_trial("heads-average", quick=True).verdict
    failed = [control.name for control in verdict.controls if not control.as_expected]
    assert verdict.conditions[0].ruling is Ruling.REFUTED if ruling is Ruling.REFUTED else failed
    assert verdict.ruling in (ruling, Ruling.INCONCLUSIVE)
