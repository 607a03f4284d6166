"""The arms of attention x MLP on one subject, measured once for all claims about the gathering of tokens.

Several experiments compare the same arms. Their statistics are kept with the subject; recordings are dropped as soon as
an arm is measured, so that memory holds the whole model and one arm at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import ChosenPrompts
from helmscope.intervene.arms import Arm, AttentionMode
from helmscope.models.recording import Recording
from helmscope.models.subject import Subject
from helmscope.observe.pairs import LEVELS, PairSet, cloud_statistics
from helmscope.observe.token_decoding import token_decoding_accuracy
from helmscope.types import HelmscopeError, Trajectory, pluralized

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.registry import TrialCase
    from helmscope.models.identity import Prompt

WHOLE, ATTENTION, MLP = Arm(), Arm(mlp=False), Arm(AttentionMode.OFF)
SILENT = Arm(AttentionMode.OFF, mlp=False)
UNTRAINED = f"{ATTENTION.label}, untrained"  # the same arm of untrained twins
SAME_PROMPTS = f"{ATTENTION.label}, prompts of the twins"  # the trained model on the prompts of its twins
NO_MIXING, NEGATED = Arm(AttentionMode.NO_MIXING, mlp=False), Arm(AttentionMode.NEGATED, mlp=False)
AT_WHOLE_RADIUS = Arm(mlp=False, radius_of_whole_model=True)
NO_MIXING_WITH_MLP, NEGATED_WITH_MLP = Arm(AttentionMode.NO_MIXING), Arm(AttentionMode.NEGATED)
OTHER_TWIN_ARMS = (MLP, NO_MIXING, NEGATED, NO_MIXING_WITH_MLP, NEGATED_WITH_MLP)  # no writes need no twins


@dataclass(frozen=True, eq=False)
class ArmStatistics:
    """The statistics of one arm: ``by_depth`` without effective ranks, ``ends`` with them at the first and last depth,
    and ``identity``, the share of tokens whose id is decoded before the first layer and after each, over (layers + 1,
    prompts of one half), None with too few prompts.

    >>> from helmscope.models.bundled_models import story_texts
    >>> from helmscope.models.record import record
    >>> attention_alone = ATTENTION.edits(record("A", story_texts()[:1]))
    >>> recording = record("A", story_texts()[:1]).under(*attention_alone)
    >>> measured = ArmStatistics.of(recording, level=0.9, gap=16)
    >>> measured.share.shape, bool(measured.growth[0] > 0.3)
    ((25, 1), True)
    """

    level: float
    by_depth: xr.Dataset
    ends: xr.Dataset
    identity: np.ndarray | None

    @classmethod
    def of(cls, recording: Recording, *, level: float, gap: int) -> ArmStatistics:
        """Measure a recording on the unit sphere.

        >>> from helmscope.models.bundled_models import story_texts
        >>> from helmscope.models.record import record
        >>> ArmStatistics.of(record("A", story_texts()[:2]), level=0.9, gap=16).growth.round(2).tolist()
        [0.0, 0.0]
        """
        path, ids = recording.on_sphere, token_ids(recording)
        levels = sorted({*LEVELS, level})
        return cls(
            level,
            cloud_statistics(path, ids=ids, gap=gap, levels=levels, ranks=False),
            cloud_statistics(ends_of(path), ids=ids, gap=gap, levels=levels),
            _identity(at_depths(path, slice(None, None, 2)), ids),
        )

    @property
    def share(self) -> np.ndarray:
        """The share above the level over (depth, prompt), for the pairs by which the claim is judged."""
        return self.share_of(PairSet.DISTANT)

    def share_of(self, pairs: PairSet, level: float | None = None) -> np.ndarray:
        """The share above a level over (depth, prompt) for one set of pairs.

        >>> from helmscope.models.bundled_models import story_texts
        >>> from helmscope.models.record import record
        >>> measured = ArmStatistics.of(record("A", story_texts()[:1]), level=0.9, gap=16)
        >>> all_pairs, distant = (measured.share_of(pairs, 0.8) for pairs in (PairSet.ALL, PairSet.DISTANT))
        >>> bool(all_pairs[1, 0] > distant[1, 0])  # neighbors are more alike
        True
        """
        chosen = self.by_depth.aligned_pair_share.sel(pairs=pairs.value, level=self.level if level is None else level)
        return np.asarray(chosen.transpose("depth", ...).values)

    @property
    def mean(self) -> np.ndarray:
        """The mean inner product over (depth, prompt), for the pairs by which the claim is judged."""
        return np.asarray(self.by_depth.mean_inner_product.sel(pairs=PairSet.DISTANT.value).values)

    @property
    def growth(self) -> np.ndarray:
        """The share at the last depth minus that at the first, one value per prompt."""
        return growth_of(self.share)

    @property
    def nbytes(self) -> int:
        """The bytes of the statistics."""
        return int(self.by_depth.nbytes + self.ends.nbytes)


@dataclass(frozen=True, eq=False)
class Factorial:
    """The arms of one subject. The ``chosen`` prompts decide; what is only described is measured on the first
    ``described_prompts`` of them, untrained twins on the first ``twin_prompts``, and those arms of twins that have no
    curve on the first ``other_twin_prompts``.

    >>> from helmscope.claims.registry import registered_case
    >>> from helmscope.models.bundled_models import story_texts
    >>> case = registered_case("attention-clusters", subject=Subject("A", story_texts()[:1]), quick=True)
    >>> factorial = Factorial.of(case)
    >>> factorial.unsupported_reason.evidence.reason[:32]
    'the claim needs 32 different tex'
    >>> bool(factorial.arm(ATTENTION).growth > factorial.arm(WHOLE).growth)
    True
    """

    subject: Subject
    seed: int
    level: float
    gap: int
    twins: int
    chosen: ChosenPrompts
    described_prompts: int
    twin_prompts: int
    other_twin_prompts: int

    @classmethod
    def of(cls, case: TrialCase) -> Factorial:
        """The factorial of a trial, with the constants of its entry.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.bundled_models import story_texts
        >>> case = registered_case("attention-clusters", subject=Subject("A", story_texts()[:1]), quick=True)
        >>> factorial = Factorial.of(case)
        >>> factorial.level, factorial.gap, len(factorial.prompts)
        (0.9, 16, 1)
        """
        level, gap, twins = (case.constant(name) for name in ("level", "gap", "twins"))
        described = case.count(case.constant("described_prompts"), quick=case.constant("described_prompts_quick"))
        untrained = case.count(case.constant("twin_prompts"), quick=case.constant("twin_prompts_quick"))
        chosen, few = ChosenPrompts.of(case, gap=gap), case.constant("other_twin_prompts")
        return cls(case.subject, case.seed, level, gap, twins, chosen, described, untrained, few)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The texts that decide."""
        return self.chosen.texts

    @cached_property
    def unsupported_reason(self) -> Finding | None:
        """The finding that the claims cannot be tried on this subject: too few different texts leave them undecided,
        and no sphere, or a half that cannot be switched off, makes their premise impossible; None if they can be tried.
        """
        if self.chosen.too_few:
            return Finding.inconclusive(self.chosen.too_few)
        missing = self.subject.unmet_premise("on_sphere")
        if missing is not None:
            return Finding.impossible(missing)
        reasons = [self.arm_or_reason(SILENT, only_described=True), self.arm_or_reason(ATTENTION)]
        reason = next((reason for reason in reasons if isinstance(reason, str)), None)
        if reason is None:
            return None
        return Finding.impossible(f"attention and MLP of {self.subject.name} cannot be switched off: {reason}")

    def recording(self, *, only_described: bool = False) -> Recording:
        """The recording of the whole model.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.bundled_models import story_texts
        >>> case = registered_case("attention-clusters", subject=Subject("A", story_texts()[:1]), quick=True)
        >>> Factorial.of(case).recording().trajectory.states.shape
        torch.Size([25, 1, 128, 192])
        """
        return self.subject.record(self.prompts[: self.described_prompts] if only_described else self.prompts)

    def arm(self, arm: Arm, *, only_described: bool = False) -> ArmStatistics:
        """The statistics of an arm; raises HelmscopeError if the arm cannot be made for this model.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.bundled_models import story_texts
        >>> case = registered_case("attention-clusters", subject=Subject("A", story_texts()[:1]), quick=True)
        >>> Factorial.of(case).arm(SILENT).growth.tolist()  # without writes nothing moves
        [0.0]
        """
        count = min(self.described_prompts, len(self.prompts)) if only_described else len(self.prompts)
        key = ("arm", arm, self.prompts[:count], self.level, self.gap)
        return self.subject.cached(
            key, lambda: self._measure(arm, only_described=only_described), lambda made: made.nbytes
        )

    def arm_or_reason(self, arm: Arm, *, only_described: bool = False) -> ArmStatistics | str:
        """The statistics of an arm, or why it cannot be made.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.bundled_models import story_texts
        >>> case = registered_case("attention-clusters", subject=Subject("A", story_texts()[:1]), quick=True)
        >>> Factorial.of(case).arm_or_reason(SILENT).growth.tolist()
        [0.0]
        """
        try:
            return self.arm(arm, only_described=only_described)
        except HelmscopeError as error:
            return str(error)

    def _measure(self, arm: Arm, *, only_described: bool) -> ArmStatistics:
        whole = self.recording(only_described=only_described)
        edits = arm.edits(whole)
        return ArmStatistics.of(whole.under(*edits) if edits else whole, level=self.level, gap=self.gap)

    def twin_shares(self, arm: Arm) -> np.ndarray:
        """The share above the level of untrained twins in the whole model or with attention alone, over (twin, depth,
        prompt).

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.bundled_models import story_texts
        >>> case = registered_case("attention-clusters", subject=Subject("A", story_texts()[:1]), quick=True)
        >>> replace(Factorial.of(case), twins=2).twin_shares(ATTENTION).shape
        (2, 25, 1)
        """
        key = ("twins", self.seed, self.twins, self.prompts[: self.twin_prompts], self.level, self.gap)
        shares = self.subject.cached(key, self._measure_twins, lambda made: sum(each.nbytes for each in made.values()))
        return shares[arm]

    def _measure_twins(self) -> dict[Arm, np.ndarray]:
        shares: dict[Arm, list[np.ndarray]] = {WHOLE: [], ATTENTION: []}
        for whole in self._twin_recordings(self.twin_prompts):
            for arm, found in shares.items():
                edits = arm.edits(whole)
                found.append(self._shares(whole.under(*edits) if edits else whole))
        return {arm: np.stack(found) for arm, found in shares.items()}

    def other_twin_growths(self) -> dict[Arm, Replicates | PremiseImpossible]:
        """The growth of the share in the arms that ``twin_shares`` leaves out, on few prompts: one value per twin, or
        why the arm cannot be made.

        >>> from helmscope.claims.registry import registered_case
        >>> from helmscope.models.bundled_models import story_texts
        >>> case = registered_case("attention-clusters", subject=Subject("A", story_texts()[:1]), quick=True)
        >>> growths = replace(Factorial.of(case), twins=2).other_twin_growths()
        >>> growths[NEGATED].values, MLP in growths
        ([0.0, 0.0], True)
        """
        found: dict[Arm, list[float]] = {arm: [] for arm in OTHER_TWIN_ARMS}
        reasons: dict[Arm, str] = {}
        for whole in self._twin_recordings(self.other_twin_prompts):
            for arm, growths in found.items():
                try:
                    growths.append(float(growth_of(self._shares(whole.under(*arm.edits(whole)))).mean()))
                except HelmscopeError as error:
                    reasons[arm] = str(error)
        return {
            arm: PremiseImpossible(reasons[arm]) if arm in reasons else Replicates(growths, "twins")
            for arm, growths in found.items()
        }

    def _twin_recordings(self, prompts: int) -> Iterator[Recording]:
        return self.subject.twin_recordings(self.twins, seed=self.seed, texts=self.prompts[:prompts])

    def _shares(self, recording: Recording) -> np.ndarray:
        path, ids = recording.on_sphere, token_ids(recording)
        measured = cloud_statistics(path, ids=ids, gap=self.gap, levels=[self.level], ranks=False)
        return np.asarray(measured.aligned_pair_share.sel(pairs=PairSet.DISTANT.value, level=self.level).values)

    @property
    def setting(self) -> str:
        """What was recorded, and in which coordinates."""
        post = self.recording(only_described=True).anatomy.post_norm
        coordinates = "norm outputs with gain and bias folded out" if post else "direction of the residual stream"
        return (
            f"model {self.subject.name}, {self.chosen.setting}; pairs of different token ids at least "
            f"{self.gap} positions apart, first token left out; {coordinates}, mean over coordinates removed where the "
            f"norms do; arms that are only described on "
            f"{pluralized(min(self.described_prompts, len(self.prompts)), 'prompt')}, "
            f"{self.twins} untrained twins on {min(self.twin_prompts, len(self.prompts))}"
        )


def growth_of(share: np.ndarray) -> np.ndarray:
    """The growth from the first to the last depth of shares over (depth, ...).

    >>> growth_of(np.array([[0.1, 0.2], [0.5, 0.2]])).tolist()
    [0.4, 0.0]
    """
    return np.asarray(share[-1] - share[0])


def over_prompts(values: np.ndarray) -> Replicates:
    """Evidence of one value per prompt.

    >>> over_prompts(np.array([0.1, 0.2])).of
    'prompts'
    """
    return Replicates(values, "prompts")


def growth_or_reason(measured: ArmStatistics | str) -> Replicates | PremiseImpossible:
    """Evidence of the growth in an arm, or why the arm cannot be made.

    >>> growth_or_reason("its attention is not in the registry").reason
    'its attention is not in the registry'
    """
    return PremiseImpossible(measured) if isinstance(measured, str) else over_prompts(measured.growth)


def share_at_end(arm: str) -> str:
    """The name of the described share of inner products at the last depth of an arm.

    >>> share_at_end("MLP alone")
    'share at the last depth, MLP alone'
    """
    return f"share at the last depth, {arm}"


def depth_curves(name: str, by_label: Mapping[str, np.ndarray], *, label: str) -> xr.Dataset:
    """Curves over depth with prompts as replicates, one for each label, from arrays (depth, prompt); curves may have
    fewer prompts or depths than others.

    >>> depth_curves("share", {"whole model": np.zeros((3, 2))}, label="share").share.dims
    ('prompt', 'depth', 'arm')
    """
    depths, prompts = (max(values.shape[axis] for values in by_label.values()) for axis in (0, 1))
    padded = np.full((prompts, depths, len(by_label)), np.nan)
    for k, values in enumerate(by_label.values()):
        padded[: values.shape[1], : len(values), k] = values.T
    return curve(name, padded, {"depth": range(depths), "arm": list(by_label)}, label=label, over="prompt")


def token_ids(recording: Recording) -> Tensor | None:
    """The token ids of a recording; None if it was made from embeddings.

    >>> from helmscope.models.record import record
    >>> token_ids(record("A", ["Once upon a time"])).shape
    torch.Size([1, 4])
    """
    ids: Tensor | None = recording.batch.inputs.get(recording.batch.ids_name)
    return ids


def ends_of(path: Trajectory) -> Trajectory:
    """The first and the last depth of a trajectory.

    >>> import torch
    >>> ends_of(Trajectory(torch.arange(5.0), torch.eye(3).expand(5, 2, 3, 3))).times.tolist()
    [0.0, 4.0]
    """
    return at_depths(path, [0, -1])


def at_depths(path: Trajectory, depths: Sequence[int] | slice) -> Trajectory:
    """A trajectory at some of its depths.

    >>> import torch
    >>> at_depths(Trajectory(torch.arange(5.0), torch.eye(3).expand(5, 2, 3, 3)), slice(None, None, 2)).times.tolist()
    [0.0, 2.0, 4.0]
    """
    weights = path.weights if path.weights is None or len(path.weights) == 1 else path.weights[depths]
    radius = None if path.radius is None else path.radius[depths]
    return replace(path, times=path.times[depths], states=path.states[depths], weights=weights, radius=radius)


def _identity(path: Trajectory, ids: Tensor | None) -> np.ndarray | None:
    """The share of tokens of every second prompt whose id is decoded from class means of the other prompts."""
    if ids is None or path.states.shape[1] < 4:
        return None
    known, asked = (_some_prompts(path, slice(k, None, 2)) for k in (0, 1))
    try:
        measured = token_decoding_accuracy(known, asked, reference_ids=ids[::2], test_ids=ids[1::2])
    except HelmscopeError:  # the two halves have no token in common
        return None
    return np.asarray(measured.accuracy.values)


def _some_prompts(path: Trajectory, prompts: slice) -> Trajectory:
    weights, radius, names = path.weights, path.radius, path.identities
    return replace(
        path,
        states=path.states[:, prompts],
        weights=None if weights is None else weights[:, prompts],
        radius=None if radius is None else radius[:, prompts],
        tokens=None,
        identities=None if names is None else names[prompts],
    )
