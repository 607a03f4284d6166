"""diffuse-then-compress: along depth the entropy of the token cloud first rises and then falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import AT_REST, StepSizes, silenced, small_steps_premise
from helmscope.geometry.sphere import retract
from helmscope.observe.depth_steps import unit_states
from helmscope.observe.entropy import PooledClouds
from helmscope.observe.pairs import without_first_token
from helmscope.stats.replicates import random_halves
from helmscope.types import Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

# planted clouds: factors of the differences of tokens from their mean, from depth to depth
SHRINKING = tuple(0.8**k for k in range(6))
GROWING = SHRINKING[::-1]
JUMPING = (*(0.8 * factor for factor in SHRINKING[:-1]), 1.0)


@dataclass(frozen=True, eq=False)
class EntropyCurve:
    """The Gaussian entropy of the tokens of the prompts of each half, over depth: ``selection`` (depth,) its
    bias-corrected value on the one, ``test`` (depth, prompt) the jackknife pseudo-values on the other; ``undefined``
    says where one of them is undefined, "" if nowhere.
    """

    selection: np.ndarray
    test: np.ndarray
    undefined: str

    @classmethod
    def of(cls, path: Trajectory, seed: int) -> EntropyCurve:
        """That of a trajectory, with random halves of its prompts."""
        first, second = (_entropies(path, rows) for rows in random_halves(path.states.shape[1], seed=seed))
        text = next((each[1] for each in (first, second) if each[1]), "")
        return cls(first[0].mean(-1), second[0], text)

    @property
    def chosen(self) -> int:
        """The number of the depth at which the entropy is largest on the selection half."""
        return int(self.selection.argmax())

    @property
    def rise(self) -> np.ndarray:
        """Entropy at the chosen depth minus that at the first, on the test half."""
        return np.asarray(self.test[self.chosen] - self.test[0])

    @property
    def trend(self) -> np.ndarray:
        """The slope of the entropy over the half-steps up to the chosen depth, by least squares, on the test half."""
        place = np.arange(self.chosen + 1) - self.chosen / 2
        return np.asarray(place @ self.test[: self.chosen + 1] / max(1.0, float(place @ place)))

    @property
    def above_start(self) -> np.ndarray:
        """The mean entropy over the depths after the first, up to the chosen one, minus that at the first."""
        way = self.test[min(1, self.chosen) : self.chosen + 1]
        return np.asarray(way.mean(0) - self.test[0])

    @property
    def fall(self) -> np.ndarray:
        """Entropy at the chosen depth minus that at the last, on the test half."""
        return np.asarray(self.test[self.chosen] - self.test[-1])


@experiment("diffuse-then-compress", seconds={"model": 43})
def diffuse_then_compress(case: TrialCase) -> Finding:
    """The depth of the largest Gaussian entropy of all tokens is chosen on half of the prompts; on the other half the
    entropy there is compared with that at the first and at the last depth, and on the way there with its start and by
    its trend, each one-sided at the level of the entry.

    Controls are clouds that shrink towards their mean from depth to depth, or grow, or grow only after they have shrunk
    below their start, and blocks that write nothing.
    """
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", gap=1)
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    path, seed = _path(recording), case.seed_for(0)
    own = EntropyCurve.of(path, seed)
    if own.undefined:
        return Finding.inconclusive(f"the entropy of the tokens is not defined: {own.undefined}")
    if not (StepSizes.of(recording).medians > AT_REST).any():
        return Finding.impossible("no token moves, so that the entropy is the same at every depth")
    confidence = 1 - 2 * case.constant("level")
    shrunk, grown, jumped = (EntropyCurve.of(planted(path, each), seed) for each in (SHRINKING, GROWING, JUMPING))
    differences = {
        "a cloud that only shrinks": shrunk.rise,
        "a cloud that shrinks before it grows": jumped.trend,
        "a cloud that is below its start": jumped.above_start,
        "a cloud that only grows": grown.fall,
        "blocks that write nothing": EntropyCurve.of(_path(silenced(recording)), seed).rise,
    }
    twins = list(_twins(case, recording, seed))
    measured = {"rise": own.rise, "trend": own.trend, "above the start": own.above_start, "fall": own.fall}
    return Finding(
        undecided_because=prompts.alike,
        evidence={name: Replicates(each, "prompts", confidence=confidence) for name, each in measured.items()},
        controls={name: _evidence(each, confidence) for name, each in differences.items()},
        described=_described(twins),
        data=curve(
            "entropy",
            own.test.T,
            {"depth": path.times.tolist()},
            label="Gaussian entropy of all tokens (nats)",
            over="prompt",
        ),
        remark=_remark(own, path, twins, small_steps_premise(case)),
        setting=f"unit vectors, Gaussian entropy of all tokens: {len(own.selection)} depths, "
        f"{len(prompts) - own.test.shape[1]} prompts to choose the depth, {own.test.shape[1]} to test it, first token "
        "left out",
    )


def _path(recording: Recording) -> Trajectory:
    """The unit vectors of a recording, without the first token."""
    return without_first_token(recording.on_sphere)


def _entropies(path: Trajectory, rows: np.ndarray) -> tuple[np.ndarray, str]:
    """The pseudo-values over (depth, prompt) of the Gaussian entropy of some prompts, and where it is undefined."""
    kept = torch.as_tensor(rows, device=path.states.device)
    weights = None if path.weights is None else path.weights[:, kept]
    part = Trajectory(path.times, path.states[:, kept], weights, axis=path.axis, replicate=path.replicate)
    common = PooledClouds.of(part)
    values = [common.pseudo_values(k, lambda each: each.gaussian_entropy) for k in range(len(part.states))]
    return torch.stack(values).cpu().numpy(), common.undefined_text if common.undefined else ""


def planted(path: Trajectory, factors: Sequence[float]) -> Trajectory:
    """The last cloud of a trajectory, whose differences from its mean token are multiplied by one of ``factors`` at
    each depth and which is brought back to the sphere: it shrinks where they fall, and grows where they rise.
    """
    x = unit_states(path, -1)
    weights = torch.ones_like(x[..., 0]) if path.weights is None else path.weights[-1].to(x)
    center = (weights.unsqueeze(-1) * x).sum((0, 1)) / weights.sum()
    north = retract(center)
    states = torch.stack([retract(north + factor * (x - center)) for factor in factors])
    times = torch.arange(float(len(factors)), dtype=torch.float64)
    return Trajectory(times, states, weights[None], axis=path.axis, replicate=path.replicate)


def _evidence(differences: np.ndarray, confidence: float) -> Evidence:
    if not np.isfinite(differences).all():
        return PremiseImpossible("the entropy is not defined at every depth")
    return Replicates(differences, "prompts", confidence=confidence)


def _twins(case: TrialCase, recording: Recording, seed: int) -> Iterator[EntropyCurve]:
    """The curves of untrained twins on the same texts."""
    rows = [list(row) for row in (recording.batch.source or recording.batch).visible_ids]
    for twin in case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=rows):
        yield EntropyCurve.of(_path(twin), seed)


def _described(twins: list[EntropyCurve]) -> dict[str, Evidence]:
    if any(each.undefined for each in twins):
        return {}
    return {
        f"{name}, untrained twins, each with its own depth": Replicates(
            np.array([getattr(each, name).mean() for each in twins]), "twins"
        )
        for name in ("rise", "fall")
    }


def _remark(own: EntropyCurve, path: Trajectory, twins: list[EntropyCurve], premise: str) -> str:
    means = own.test.mean(-1)
    depth, least = float(path.times[own.chosen]), int(means[: own.chosen + 1].argmin())
    dip, depths = "", ", ".join(f"{float(path.times[each.chosen]):g}" for each in twins)
    if 0 < least < own.chosen:
        dip = f" Before that it falls to {means[least]:.1f} at depth {float(path.times[least]):g}."
    return (
        f"On the selection half the entropy is largest at depth {depth:g} of {float(path.times[-1]):g}. On the test "
        f"half it is {means[0]:.1f} nats at the first depth, {means[own.chosen]:.1f} there and {means[-1]:.1f} at the "
        f"last.{dip} In untrained twins it is largest at depth {depths}. {premise}"
    ).strip()
