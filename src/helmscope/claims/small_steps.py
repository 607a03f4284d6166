"""The angles by which half-steps of a model move tokens: the evidence of small-steps, and the premise of claims that
take depth for continuous time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.entry import SubjectKind
from helmscope.claims.evidence import PremiseImpossible, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import ChosenPrompts
from helmscope.claims.reading import entry
from helmscope.claims.registry import registered_case
from helmscope.intervene.arms import Arm, AttentionMode
from helmscope.observe.depth_steps import depth_steps
from helmscope.types import Ruling

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.claims.registry import TrialCase
    from helmscope.models.recording import Recording
    from helmscope.types import System, Trajectory

CLAIM, SILENT = "small-steps", "blocks that write nothing"
AT_REST = 1e-6  # radians: rounding of states in float32


@dataclass(frozen=True, eq=False)
class StepSizes:
    """The steps of a recording, a system or a trajectory over (depth, prompt), as ``depth_steps`` measures them.

    >>> import torch
    >>> from helmscope.types import Trajectory
    >>> states = torch.eye(3).expand(2, 4, 3, 3)
    >>> StepSizes.of(Trajectory(torch.arange(2.0), states)).evidence
    PremiseImpossible(reason='no token moves, and an angle of 0 is not evidence of small steps')
    """

    measured: xr.Dataset

    @classmethod
    def of(cls, source: Trajectory | System) -> StepSizes:
        """The steps of a source.

        >>> import torch
        >>> from helmscope.types import Trajectory
        >>> StepSizes.of(Trajectory(torch.arange(2.0), torch.eye(3).expand(2, 4, 3, 3))).medians.shape
        (1, 4)
        """
        return cls(depth_steps(source))

    @property
    def medians(self) -> np.ndarray:
        """The median angle of each half-step over (half-step, prompt)."""
        values: np.ndarray = self.measured.median_angle.values[1:]
        return values

    @property
    def names(self) -> list[str]:
        """The name of each half-step, such as "half-step 3 (attention)"."""
        halves = [f" ({half})" for half in self.measured.half.values[1:]] if "half" in self.measured.coords else None
        return [f"half-step {k + 1}{halves[k] if halves else ''}" for k in range(len(self.medians))]

    @property
    def evidence(self) -> Evidence:
        """The median angles of all half-steps, or that there are no steps."""
        if not (self.medians > AT_REST).any():
            return PremiseImpossible("no token moves, and an angle of 0 is not evidence of small steps")
        return ReplicatesInEveryCase(list(self.medians), "prompts", self.names)


def small_steps_premise(case: TrialCase) -> str:
    """The ruling of small-steps on the subject of a case, as a sentence for the remark of a claim whose premise it is;
    "" for a simulation. It is measured once per subject and process.

    >>> from helmscope.claims.registry import TrialCase
    >>> from helmscope.models.subject import Subject
    >>> small_steps_premise(TrialCase(quick=True, subject=Subject("A")))
    'Premise: small-steps is refuted here (0.91 rad at half-step 2 (mlp)).'
    """
    if case.subject.is_simulation:
        return ""
    return case.subject.cached(("small-steps premise", case.quick), lambda: _premise(case), len)


def prints_premise(function: Callable[[TrialCase], Finding]) -> Callable[[TrialCase], Finding]:
    """Decorator of an experiment: the ruling of small-steps on the model is the last sentence of its remark.

    >>> from helmscope.claims.registry import TrialCase
    >>> from helmscope.models.subject import Subject
    >>> tried = prints_premise(lambda case: Finding(evidence=PremiseImpossible("no MLP")))
    >>> tried(TrialCase(subject=Subject.simulation())).remark
    ''
    """

    @wraps(function)
    def tried(case: TrialCase) -> Finding:
        finding = function(case)
        measured = isinstance(finding.evidence, Mapping)
        if case.subject.is_simulation or not measured:
            return finding
        return replace(finding, remark=f"{finding.remark} {small_steps_premise(case)}".strip())

    return tried


def _premise(case: TrialCase) -> str:
    (condition,) = entry(CLAIM).conditions_on(SubjectKind.MODEL)
    unmet = case.subject.unmet_premise("trajectory", "on_sphere")
    if unmet is not None:
        return f"Premise: small-steps cannot be tried here, since {unmet}."
    prompts = ChosenPrompts.of(registered_case(CLAIM, case.seed, quick=case.quick, subject=case.subject), gap=1)
    if prompts.too_few:
        return f"Premise: small-steps has no ruling here, since {prompts.too_few}."
    recording = case.subject.record(prompts.texts)
    sizes = StepSizes.of(recording)
    assessment = sizes.evidence.weigh(condition.region)
    if assessment.interval is None or assessment.ruling is Ruling.IMPOSSIBLE:
        return f"Premise: small-steps has no ruling here, since {assessment.basis}."
    means = sizes.medians.mean(1)
    largest = int(means.argmax())
    angle = f"{means[largest]:.2g} rad at {sizes.names[largest]}"
    (control,) = (each for each in entry(CLAIM).controls if each.name == SILENT)
    without = StepSizes.of(silenced(recording)).evidence.weigh(condition.region).ruling
    if prompts.alike:
        return f"Premise: small-steps has no ruling here, since {prompts.alike} ({angle})."
    if without.value not in control.expected:
        return f"Premise: small-steps is inconclusive here ({angle}; its control without writes fails)."
    return f"Premise: small-steps is {assessment.ruling.value} here ({angle})."


def silenced(recording: Recording) -> Recording:
    """The same recording with blocks that write nothing.

    >>> from helmscope.models.record import record
    >>> silent = silenced(record("A", ["Once upon a time"]))
    >>> bool((silent.residual_stream(depth=1) == silent.residual_stream(depth=0)).all())
    True
    """
    return recording.under(*Arm(AttentionMode.OFF, mlp=False).edits(recording))


def spaced_layers(recording: Recording, count: int) -> list[int]:
    """``count`` layers of a recording, evenly spaced from the first to the last; all of them if there are fewer.

    >>> from helmscope.models.record import record
    >>> spaced_layers(record("A", ["Once upon a time"]), 4)
    [0, 4, 7, 11]
    """
    numbers = list(recording.layers)
    places = np.linspace(0, len(numbers) - 1, min(count, len(numbers))).round().astype(int)
    return [numbers[place] for place in places]
