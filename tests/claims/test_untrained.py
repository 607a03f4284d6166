"""Verdicts on models that look untrained say so."""

from __future__ import annotations

from helmscope.claims.untrained import untrained_notice
from helmscope.models.subject import Subject


def test_a_twin_looks_untrained_and_its_model_does_not() -> None:
    with Subject("A") as trained, Subject(next(trained.twins(1)), trained.texts[:4]) as twin:
        assert untrained_notice(trained) == ""
        assert "looks untrained: its next-token loss of" in untrained_notice(twin)


def test_a_simulation_and_an_encoder_have_no_notice() -> None:
    assert untrained_notice(Subject.simulation()) == ""
    assert untrained_notice(Subject("tied")) == ""
