"""small-steps: every half-step of a model moves a token by a small angle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import StepSizes, silenced
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.geometry.sphere import exp, project, retract
from helmscope.observe.depth_steps import unit_states
from helmscope.types import Trajectory

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

SPREAD = 0.1  # of the logarithm of planted angles over tokens


@experiment("small-steps", seconds={"model": 25})
def small_steps(case: TrialCase) -> Finding:
    """The median over tokens of the angle that each half-step moves them by on the unit sphere; one value per prompt.

    The first token, the usual attention sink, is left out. The same tokens, moved by planted angles in random
    directions from the model's first states, are the controls, and so is the model whose blocks write nothing. The
    arc length, which maps depth to time, the cosine of successive steps after parallel transport, and untrained twins
    are described.
    """
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", gap=1)
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    sizes = StepSizes.of(recording)
    silent = StepSizes.of(silenced(recording))
    planted = {size: StepSizes.of(_planted(case, recording, size)) for size in case.constant("planted_angles")}
    twins = [StepSizes.of(twin) for twin in _twins(case, recording)]
    worst = int(sizes.medians.mean(1).argmax())
    contrast = TwinContrast(sizes.medians.max(0), np.stack([twin.medians.max(0) for twin in twins]))
    return Finding(
        undecided_because=prompts.alike,
        evidence={"median angle": sizes.evidence},
        controls={
            **{f"steps of {size:g} rad": measured.evidence for size, measured in planted.items()},
            "blocks that write nothing": silent.evidence,
        },
        described=_described(sizes) | contrast.described("largest median angle"),
        data=curve(
            "median_angle",
            np.stack([sizes.medians, np.mean([twin.medians for twin in twins], 0)], -1).transpose(1, 0, 2),
            {"half-step": range(1, len(sizes.medians) + 1), "model": [case.subject.name, "untrained twins"]},
            label="median angle moved in a half-step (rad)",
            over="prompt",
        ),
        remark=_remark(sizes, silent, worst),
        setting=f"{sizes.measured.attrs['sphere']}, {len(recording.batch)} prompts, first token left out",
    )


def _twins(case: TrialCase, recording: Recording) -> list[Recording]:
    prompts = [list(row) for row in (recording.batch.source or recording.batch).visible_ids]
    return list(case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts))


def _planted(case: TrialCase, recording: Recording, size: float) -> Trajectory:
    """Tokens that move from the model's first states by angles around ``size`` in random directions."""
    path = recording.on_sphere
    x = unit_states(path, 0).cpu()
    states = [x]
    for k in range(1, len(path.times)):
        direction = retract(project(x, case.normal(*x.shape, index=2 * k)))
        angles = size * (SPREAD * case.normal(*x.shape[:-1], index=2 * k + 1)).exp()
        x = retract(exp(x, angles.unsqueeze(-1) * direction))
        states.append(x)
    weights = None if path.weights is None else path.weights.cpu()
    return Trajectory(path.times.cpu(), torch.stack(states), weights, axis=path.axis, replicate=path.replicate)


def _described(sizes: StepSizes) -> dict[str, Evidence]:
    measured = sizes.measured
    rows: dict[str, Evidence] = {
        "median angle, mean over half-steps": Replicates(sizes.medians.mean(0), "prompts"),
        "arc length at the last depth (rad)": Replicates(measured.arc_length.values[-1], "prompts"),
        "angle from the first to the last depth (rad)": Replicates(measured.net_angle.values[-1], "prompts"),
    }
    cosines = measured.update_cosine.values[2:]
    if np.isfinite(cosines).all() and len(cosines):
        rows["cosine of successive steps, mean over depth"] = Replicates(cosines.mean(0), "prompts")
    if "radius" in measured:
        growth = measured.radius.values[-1] / measured.radius.values[0]
        rows["radius at the last depth over that at the first"] = Replicates(growth, "prompts")
    return rows


def _remark(sizes: StepSizes, silent: StepSizes, worst: int) -> str:
    means = sizes.medians.mean(1)
    arc = sizes.measured.arc_length.values[-1].mean()
    net = sizes.measured.net_angle.values[-1].mean()
    moved = silent.medians.mean(1).max()
    norms = f" Where blocks write nothing, norms alone move it by up to {moved:.2g} rad." if moved > 1e-6 else ""
    return (
        f"The median angle runs from {means.min():.2g} to {means[worst]:.2g} rad, the largest at {sizes.names[worst]}; "
        f"over all half-steps a token moves by {arc:.2g} rad and ends {net:.2g} rad from its start.{norms}"
    )
