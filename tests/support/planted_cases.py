"""The planted cases of the claims about transport: what is planted, which ruling is right, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from helmscope.claims import reading
from helmscope.claims.trial import run_trial
from helmscope.models.subject import Subject
from helmscope.types import Ruling, Verdict
from support import planted_attention as attention
from support import planted_updates as updates
from support.planted_attention import Planted

S, R, IMPOSSIBLE = Ruling.SUPPORTED, Ruling.REFUTED, Ruling.IMPOSSIBLE


@dataclass(frozen=True, eq=False)
class PlantedCase:
    """A claim on models of one kind: ``build(seed=...)`` makes one with its texts, and ``constants`` replace those of
    the entry, whose prompts have more tokens than these texts. ``right`` is the ruling that all should get, or
    REFUTED where nothing is planted, and it may also be inconclusive.
    """

    claim: str
    kind: str
    right: Ruling
    build: Callable[..., Planted]
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.claim} | {self.kind}"

    def verdict(self, seed: int) -> Verdict:
        """The verdict of a quick trial."""
        model, rows = self.build(seed=seed)
        with other_constants(self.claim, self.constants), Subject(model, rows) as subject:
            return run_trial(self.claim, seed=seed, quick=True, subject=subject).verdict


@contextmanager
def other_constants(claim: str, constants: Mapping[str, Any]) -> Iterator[None]:
    """Replaces constants of a packaged entry for a while."""
    entries, entry = reading._packaged_entries(), reading.entry(claim)
    assert constants.keys() <= entry.constants.keys()
    entries[claim] = msgspec.structs.replace(entry, constants=entry.constants | dict(constants))
    try:
        yield
    finally:
        entries[claim] = entry


PAIRS = {"tokens": attention.PAIR_TOKENS, "twin_prompts_quick": 4}
SINKS = {"tokens": attention.SINK_TOKENS, "other_position": 6, "first_position": 2, "twins": 2}
SHORT = {"tokens": updates.TOKENS, "twins": 2}
CASES = (
    PlantedCase("probe-metric", "values cancel", S, partial(attention.pairs, "values cancel"), PAIRS),
    PlantedCase("probe-metric", "values are keys", R, partial(attention.pairs, "values are keys"), PAIRS),
    PlantedCase("key-norm", "values of the shape", S, partial(attention.shaped, "values of the shape"), PAIRS),
    PlantedCase("key-norm", "values are keys", R, partial(attention.shaped, "values are keys"), PAIRS),
    PlantedCase("qk-metric", "equal", S, partial(attention.with_keys, "equal"), {"tokens": 8, "twins": 2}),
    PlantedCase("qk-metric", "turned", R, partial(attention.with_keys, "turned"), {"tokens": 8, "twins": 2}),
    PlantedCase("qk-metric", "independent", R, partial(attention.with_keys, "independent"), {"tokens": 8, "twins": 2}),
    PlantedCase("sinks-are-anchors", "constant", S, partial(attention.first_token_sink, "constant"), SINKS),
    PlantedCase("sinks-are-anchors", "its token", R, partial(attention.first_token_sink, "its token"), SINKS),
    PlantedCase("sinks-are-anchors", "none", IMPOSSIBLE, partial(attention.first_token_sink, "none"), SINKS),
    PlantedCase("early-fragile", "amplifying", S, partial(updates.layers_that_scale, 0.4), {"tokens": 8}),
    PlantedCase("early-fragile", "damping", R, partial(updates.layers_that_scale, -0.4), {"tokens": 8}),
    PlantedCase(
        "heads-compete", "together", S, partial(updates.heads_that_write, "together"), {"tokens": 8, "tolerance": 1.0}
    ),
    PlantedCase(
        "heads-compete", "alone", R, partial(updates.heads_that_write, "alone"), {"tokens": 8, "tolerance": 1.0}
    ),
    PlantedCase("gradient-shaped", "down", S, partial(updates.writes_of, "down"), SHORT),
    PlantedCase("gradient-shaped", "up", R, partial(updates.writes_of, "up"), SHORT),
    PlantedCase("gradient-shaped", "the same everywhere", R, partial(updates.writes_of, "the same everywhere"), SHORT),
    PlantedCase("sharp-unstable", "difference", S, partial(updates.neighbors, "difference"), SHORT),
    PlantedCase("sharp-unstable", "average", R, partial(updates.neighbors, "average"), SHORT),
    PlantedCase("mlp-projects", "projection", S, partial(updates.subspace, 0.95), SHORT),
    PlantedCase("mlp-projects", "expansion", R, partial(updates.subspace, -0.5), SHORT),
)


def case(claim: str, kind: str) -> PlantedCase:
    """The case of a claim and a kind."""
    (found,) = [each for each in CASES if (each.claim, each.kind) == (claim, kind)]
    return found
