"""The factorial experiment: clustering by depth in every arm of attention x MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xarray as xr

from helmscope.intervene.arms import ARMS, Arm
from helmscope.models.recording import Recording
from helmscope.models.subject import Subject
from helmscope.observe.pairs import GAP, LEVELS, cloud_statistics
from helmscope.runs.bar import shows_progress
from helmscope.types import HelmscopeError, check_progress, check_replicates, sub_progress, type_with_article

if TYPE_CHECKING:
    from helmscope.types.progress import ProgressOption


@shows_progress("factorial of arms")
def attention_mlp_factorial(
    subject: Subject | Recording,
    *,
    texts: Any = None,
    arms: Sequence[Arm] = ARMS,
    levels: Sequence[float] = LEVELS,
    gap: int = GAP,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The statistics of ``cloud_statistics`` for every arm, with the axis ``arm`` (labels) before depth and prompt.

    ``subject`` is a Subject, recorded on ``texts`` (by default its own), or a Recording of the whole model. One arm is
    recorded after another, and only its statistics are kept. Forwards have the dtype of the model (float32 for the
    bundled models), statistics are float64. Raises HelmscopeError if an arm cannot be made: models outside the
    attention registry of transformers have only the first four, and ``radius_of_whole_model`` needs a model that is not
    post-norm. ``progress`` is called with the share of the arms done.

    >>> from helmscope.intervene.arms import ARMS
    >>> measured = attention_mlp_factorial(Subject("A", ["Once upon a time", "The cat sat"]), arms=ARMS[:2], gap=1)
    >>> measured.aligned_pair_share.dims, measured.arm.values.tolist()
    (('arm', 'depth', 'prompt', 'pairs', 'level'), ['whole model', 'attention alone'])
    """
    report = check_progress(progress)
    arms = _check_arms(arms)
    whole = _recording_of(subject, texts)
    measured = []
    for k, arm in enumerate(arms):
        edits = arm.edits(whole)
        share_done = sub_progress(report, k / len(arms), (k + 1) / len(arms))
        recording = whole.under(*edits, progress=share_done) if edits else whole
        measured.append(cloud_statistics(recording, levels=levels, gap=gap))
        del recording  # else two edited recordings would be in memory while the next arm runs
        report((k + 1) / len(arms))
    labels = xr.DataArray([arm.label for arm in arms], dims="arm", name="arm")
    return check_replicates(xr.concat(measured, labels, combine_attrs="override"))


def _recording_of(subject: object, texts: Any) -> Recording:
    if isinstance(subject, Recording):
        if texts is not None:
            raise HelmscopeError("texts is given with a Recording, but a Recording has its own: pass a Subject instead")
        return subject
    if not isinstance(subject, Subject):
        raise HelmscopeError(f"subject is {type_with_article(subject)}, but it must be a Subject or a Recording")
    return subject.recording if texts is None else subject.record(texts)


def _check_arms(arms: Sequence[Arm]) -> list[Arm]:
    listed = list(arms)
    for arm in listed:
        if not isinstance(arm, Arm):
            raise HelmscopeError(f"arms holds {type_with_article(arm)}, but each must be an Arm such as Arm(mlp=False)")
    if not listed or len({arm.label for arm in listed}) < len(listed):
        raise HelmscopeError(f"arms holds {[arm.label for arm in listed]!r:.80}, but it must hold different arms")
    return listed
