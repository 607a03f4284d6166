"""key-norm: normalizing or blurring keys is dangerous, and doing the same to queries is permissible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.intervene.query_key import GaugeTransform
from helmscope.observe.query_key_edit_damage import (
    EditStrength,
    QueryKeyEditKind,
    query_key_edit_damage,
    query_key_edits,
)
from helmscope.stats.scales import LogScale
from helmscope.types import HelmscopeError

if TYPE_CHECKING:
    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

NO_DAMAGE = "the change of the queries does no damage, so that there is no ratio"
SILENT_PROMPTS = 2
CHANGES = tuple(QueryKeyEditKind)
NORMALIZED = (QueryKeyEditKind.NORMALIZED,)


@experiment("key-norm", seconds={"model": 45})
def key_norm(case: TrialCase) -> Finding:
    """KL of the next-token distribution with all keys changed over that with all queries changed, at strengths at which
    both move the logits equally; one ratio per prompt. The full changes of both sides are described as printed.
    """
    prompts = prompts_or_finding(case, "lens", causal=True, head=True, length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    few = case.subject.record(prompts.texts[:SILENT_PROMPTS])
    try:
        query_key_edits(few, QueryKeyEditKind.NORMALIZED, EditStrength.MATCHED)
    except HelmscopeError as error:
        return Finding.impossible(str(error))
    recording = case.subject.record(prompts.texts)
    ratios = _ratios(case, recording)
    if not all(np.isfinite(ratio).all() for ratio in ratios.values()):
        return Finding.impossible(NO_DAMAGE)
    contrasts = _twins(case, prompts.texts, ratios)
    draw = np.random.default_rng(case.seed_for(0))
    swapped = ratios["normalized"] ** draw.choice([-1, 1], len(ratios["normalized"]))
    described: dict[str, Evidence] = {}
    for name, contrast in contrasts.items():
        described |= contrast.described(f"log ratio, {name}")
    return Finding(
        evidence={name: Replicates(ratio, "prompts", LogScale()) for name, ratio in ratios.items()},
        controls={
            "blocks that write nothing": _silent(case, few),
            "sides swapped at random": Replicates(swapped, "prompts", LogScale()),
            "gauge": _gauge(case, prompts.texts[: case.constant("gauge_prompts")]),
        },
        described=described | _as_printed(case, recording),
        remark=_remark(case, contrasts),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each",
        undecided_because=prompts.alike,
    )


def _ratios(
    case: TrialCase,
    recording: Recording,
    strength: EditStrength = EditStrength.MATCHED,
    changes: tuple[QueryKeyEditKind, ...] = CHANGES,
) -> dict[str, np.ndarray]:
    """KL of the changed keys over that of the changed queries, by name and prompt; NaN where the latter is 0."""
    window = case.constant("kernel")
    damage = query_key_edit_damage(recording, kinds=changes, strengths=[strength], window=window, progress=False)
    return {change.value: damage.ratio.sel(kind=change.value).isel(strength=0).values for change in changes}


def _silent(case: TrialCase, recording: Recording) -> Evidence:
    """The ratio where blocks write nothing."""
    ratio = _ratios(case, silenced(recording), changes=NORMALIZED)["normalized"]
    return Replicates(ratio, "prompts", LogScale()) if np.isfinite(ratio).all() else PremiseImpossible(NO_DAMAGE)


def _gauge(case: TrialCase, texts: tuple[object, ...]) -> Evidence:
    """The ratios of normalized sides after the gauge over those before it, on some of the prompts."""
    recording = case.subject.record(texts)
    gauged = recording.under(GaugeTransform(factor=case.constant("gauge")))
    after, before = (_ratios(case, each, changes=NORMALIZED)["normalized"] for each in (gauged, recording))
    return Replicates(after / before, "prompts")


def _twins(case: TrialCase, texts: tuple[object, ...], ratios: dict[str, np.ndarray]) -> dict[str, TwinContrast]:
    """The logarithms of the ratios beside those of the untrained twins."""
    some = texts[: case.count(case.constant("twin_prompts"), quick=case.constant("twin_prompts_quick"))]
    twins = case.count(case.constant("twins"), quick=case.constant("twins_quick"))
    found = [_ratios(case, twin) for twin in case.subject.twin_recordings(twins, seed=case.seed, texts=some)]
    return {
        name: TwinContrast(np.log(ratio), np.log(np.stack([each[name] for each in found])))
        for name, ratio in ratios.items()
    }


def _as_printed(case: TrialCase, recording: Recording) -> dict[str, Evidence]:
    """The ratios of the full changes, with the lengths of queries and keys taken from 0."""
    if case.quick:
        return {}
    ratios = _ratios(case, recording, EditStrength.AS_PRINTED)
    return {f"ratio, {name}, as printed": Replicates(ratio, "prompts", LogScale()) for name, ratio in ratios.items()}


def _remark(case: TrialCase, contrasts: dict[str, TwinContrast]) -> str:
    twins = ", ".join(f"{name} {np.exp(each.twins.mean()):.2f}" for name, each in contrasts.items())
    left_out = " The full changes, as printed: not tried in quick." if case.quick else ""
    return f"Untrained twins have the ratios {twins}.{left_out}"
