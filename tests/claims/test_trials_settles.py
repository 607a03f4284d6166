"""The trial of ``settles``: displacement and exponent in simulation and on a looped model."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from helmscope.claims.experiments import settles
from helmscope.claims.registry import registered_case
from helmscope.claims.trial import Trial, run_trial
from helmscope.geometry.sphere import retract
from helmscope.models.subject import Subject
from helmscope.types import Ruling
from support.trials import named


@functools.cache
def trial() -> Trial:
    return run_trial("settles", quick=True)


def test_the_simulated_flow_settles_at_one_point() -> None:
    verdict = trial().verdict
    assert verdict.ruling is Ruling.SUPPORTED, verdict.sentence
    assert [condition.name for condition in verdict.conditions] == ["exponent", "displacement"]
    assert all(condition.interval.high < 0 for condition in verdict.conditions)
    assert all(control.as_expected for control in verdict.controls)
    attracted, repelled = verdict.described
    assert attracted.interval.high < 1e-6  # "stay apart" fails for V = +I
    assert repelled.interval.low > 0.5
    assert verdict.printed.judgment.value == "false"


def test_the_exponent_near_a_cluster_is_minus_its_weight() -> None:
    """All others at one point p: y' = w P_y p, w = (n-1) / n at y = p, so that the exponent is -(n-1)/n."""
    others = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).expand(4, 11, 3)
    y = retract(torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    direction = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exponent = settles._exponent(settles._frozen_step(others, 2.0), y, direction, 20.0, settles.STEP)
    assert exponent.numpy() == pytest.approx([-11 / 12] * 4, rel=1e-4)


def test_the_exponent_of_angle_doubling_is_log_2() -> None:
    z = retract(torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    exponent = settles._exponent(settles._double_angle, z, z.flip(-1), 16, 1.0)
    assert exponent.numpy() == pytest.approx([math.log(2)] * 4, rel=1e-9)


def test_the_slope_is_that_of_the_second_half() -> None:
    moved = torch.tensor([5.0, 1.0, 9.0, 2.0, *(3 * math.exp(-0.3 * k) for k in range(4))])[:, None]
    assert settles._log_slope(moved).tolist() == pytest.approx([-0.3], rel=1e-6)
    assert settles._log_slope(torch.zeros(8, 2)).tolist() == [0.0, 0.0]  # what does not move does not settle


def test_a_chaotic_token_refutes_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token whose azimuth doubles at every step has a positive exponent."""
    monkeypatch.setattr(settles, "_frozen_step", lambda others, beta: _expand)
    verdict = run_trial("settles", quick=True).verdict
    assert verdict.conditions[0].ruling is Ruling.REFUTED
    assert verdict.ruling is Ruling.REFUTED


def _expand(y: torch.Tensor) -> torch.Tensor:
    """Double the azimuth, which expands the direction around the axis."""
    a, b, c = y.unbind(-1)
    radius = (a * a + b * b).sqrt()
    return torch.stack([(a * a - b * b) / radius, 2 * a * b / radius, c], -1)


def test_a_model_that_is_not_tied_cannot_be_looped_on() -> None:
    verdict = run_trial("settles", quick=True, subject=Subject("A")).verdict
    assert verdict.ruling is Ruling.IMPOSSIBLE


def test_a_looped_model_against_plain_angles() -> None:
    case = registered_case("settles", quick=True, subject=Subject("tied"))
    recording = Subject("tied").looped(4).record([row[:6] for row in Subject("tied").token_ids[:3]])
    states = recording.trajectory.states.double().numpy()
    moved = settles._moved_per_loop(recording)
    first, second = states[2, 1], states[4, 1]
    assert moved[1, 1].item() == pytest.approx(np.arccos((first * second).sum(-1)).mean(), rel=1e-4)
    noise = case.normal(3, states.shape[-1], index=0)
    exponents = settles._loop_exponents(recording, 4, noise, 1e-3)
    assert exponents.shape == (3,)
    assert exponents.isfinite().all()


@pytest.mark.slow
def test_on_the_tied_model_blocks_that_write_nothing_settle_too() -> None:
    """Post-norm blocks apply their norms even if they write nothing, so that the trial decides nothing there."""
    verdict = run_trial("settles", quick=True, subject=Subject("tied")).verdict
    assert verdict.ruling is Ruling.INCONCLUSIVE
    assert all(condition.ruling is Ruling.SUPPORTED for condition in verdict.conditions)
    (control,) = verdict.controls
    assert not control.as_expected
    exponent, slope = (
        named(verdict, f"{name} minus that of blocks that write nothing") for name in ("exponent", "slope")
    )
    assert (exponent.interval.n, slope.interval.n) == (32, 32)
    assert "paired" in exponent.basis
    assert "it is not shown that attention and MLP make them settle" in verdict.sentence


def test_the_remark_on_norms_that_settle_tokens_needs_both_signs() -> None:
    below, above = torch.tensor([-0.2, -0.1]), torch.tensor([-0.1, 0.2])
    assert settles._norms_remark(below, below).startswith(" So tokens settle under the norms alone")
    assert settles._norms_remark(below, above) == settles._norms_remark(above, below) == ""
