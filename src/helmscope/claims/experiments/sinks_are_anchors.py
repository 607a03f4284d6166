"""sinks-are-anchors: the value that heads retrieve from an attention sink is a constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.rank_correlation import LARGEST, LARGEST_Z, jackknife_values
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.observe.sink_damage import sink_damage, sinks_of
from helmscope.observe.sinks import AttentionSinks, TokenValues
from helmscope.stats.replicates import random_halves
from helmscope.stats.scales import FisherZScale, RemainderScale

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording
    from helmscope.stats.scales import Scale

LEARNED = 1e-3  # missing mass beyond rounding


@experiment("sinks-are-anchors", seconds={"model": 25})
def sinks_are_anchors(case: TrialCase) -> Finding:
    """The cosine of the sinks' values over pairs of prompts, and the held-out R^2 of one constant vector: means over
    the sinks, as jackknife pseudo-values over prompts.

    Described: weights, norms, cosines with bias and common mean left in, and the damage of replacing what other queries
    retrieve from the sinks. Without a sink the weight of the best head is the reason why the premise is impossible.
    """
    prompts = prompts_or_finding(
        case, "kernel", "replay", "lens", "resume", causal=True, head=True, length=case.constant("tokens")
    )
    if isinstance(prompts, Finding):
        return prompts
    ids = np.array(prompts.texts)  # rows of as many tokens each
    shared = int((ids != ids[0]).any(0).argmax())  # tokens with which all prompts begin
    rows = ids[:, shared:].tolist()
    recording = case.subject.record(rows)
    hidden = recording.unsupported_reason(TokenValues())
    if hidden is not None or not recording.anatomy.tapped:
        return Finding.impossible(hidden or f"the attention of {case.subject.name} cannot be edited")
    sinks = Sinks.of(case, recording)
    setting = f"{prompts.setting}, {len(rows[0])} tokens each" + _left_out(shared)
    described = _with_shared(case, prompts.texts) if shared else {}
    if not sinks.heads:
        return Finding.impossible(sinks.absent(case.subject.name), setting=setting, described=described)
    same = case.subject.record([[rows[0][0], *row[1:]] for row in rows])
    return Finding(
        evidence={"cosine": sinks.cosine(), "centered R^2": sinks.explained_share(case.seed_for(0))},
        controls={
            "blocks that write nothing": _own_sinks(case, silenced(recording)),
            "same first token": Sinks.of(case, same, sinks.heads).cosine(),
            "values of other tokens": sinks.cosine(position=1),
            "untrained twins": _twins(case, rows),
        },
        described=sinks.described() | _damage(case, recording, sinks) | described,
        data=_curves(sinks),
        remark=sinks.remark(),
        setting=setting,
        undecided_because=prompts.alike,
    )


def _left_out(shared: int) -> str:
    return f", without the first {'token' if shared == 1 else f'{shared} tokens'}, which all share" if shared else ""


def _with_shared(case: TrialCase, texts: tuple[object, ...]) -> dict[str, Evidence]:
    """The largest weight on the first token where all prompts begin with the same one, and the cosine of the values of
    the sinks, which is then 1 by construction.
    """
    sinks = Sinks.of(case, case.subject.record(texts))
    kept = "with the first tokens that all prompts share"
    rows: dict[str, Evidence] = {
        f"weight on the first token of the head with the largest, {kept}": Replicates(sinks.best_weights, "prompts")
    }
    return rows | ({f"cosine, {kept}: 1 by construction": sinks.cosine()} if sinks.heads else {})


@dataclass(frozen=True, eq=False)
class Sinks:
    """The sinks of a recording: ``weights`` (layer, prompt, head) and the measured values; ``heads`` are the sinks."""

    measured: xr.Dataset
    values: xr.Dataset
    heads: list[tuple[int, int]]

    @classmethod
    def of(cls, case: TrialCase, recording: Recording, heads: list[tuple[int, int]] | None = None) -> Sinks:
        """The heads whose weight on the first token reaches the constant of the entry, or the given ones."""
        sinks = AttentionSinks(first_position=case.constant("first_position"))
        values = TokenValues((0, case.constant("other_position")))
        found = recording.replay(sinks, values)
        measured = found[sinks.name]
        if heads is None:
            heads = sinks_of(measured.first_token_mass.mean("prompt"), case.constant("sink_weight"))
        return cls(measured, found[values.name], heads)

    @property
    def best_weights(self) -> np.ndarray:
        """The weight on the first token of the head whose mean is the largest, one value per prompt."""
        flat = self.of_every_head("first_token_mass")
        return np.asarray(flat[:, flat.mean(0).argmax()])

    def absent(self, name: str) -> str:
        """Why the premise is impossible."""
        missing = float(self.measured.missing_mass.mean())
        learned = (
            f"; its rows leave {missing:.3g} of the mass to a learned sink outside the tokens, which has no value"
            if missing > LEARNED
            else ""
        )
        return (
            f"{name} has no attention sink: the largest mean weight of a head on the first token is "
            f"{self.best_weights.mean():.3g}{learned}"
        )

    def cosine(self, position: int = 0) -> Evidence:
        """The mean cosine over pairs of prompts, of the values at one of the positions minus the mean value."""
        value, mean = self.values_at(position)
        return _over_pairs(value - mean)

    def explained_share(self, seed: int) -> Evidence:
        """The held-out share of the variance about the mean value that one constant vector explains, the mean over
        sinks; constant and mean value of each prompt are those of the half of the prompts without it.
        """
        value = self.values_at()[0]
        left, about = np.empty(value.shape[:2]), np.empty(value.shape[:2])
        parts = random_halves(len(value), seed=seed)
        for test, fit in (parts, parts[::-1]):
            mean = self.values_at(0, fit)[1]
            left[test] = ((value[test] - value[fit].mean(0)) ** 2).sum(-1)
            about[test] = ((value[test] - mean) ** 2).sum(-1)
        if not (about.sum(0) > 0).all():
            return PremiseImpossible("the values of a sink equal the mean value, so that there is nothing to explain")
        return _jackknife(
            lambda kept: float((1 - left[kept].sum(0) / about[kept].sum(0)).mean()), len(value), RemainderScale()
        )

    def described(self) -> dict[str, Evidence]:
        """Weights and norms of the sinks, and the cosine of their values as they are."""
        rows: dict[str, Evidence] = {
            "mean weight on the first token": Replicates(self.of_sinks("first_token_mass"), "prompts"),
            f"share of queries whose weight on the first token is above {self.measured.attrs['threshold']}": Replicates(
                self.of_sinks("sink_share"), "prompts"
            ),
            "cosine of the values as they are": _over_pairs(self.values_at()[0]),
        }
        ratio, missing = self.of_sinks("sink_value_norm_ratio"), self.of_sinks("missing_mass")
        if np.isfinite(ratio).all():
            rows["|V_sink| / |V_ctx|"] = Replicates(ratio, "prompts")
        if abs(missing).max() > LEARNED:
            rows["missing mass, the weight of a learned sink"] = Replicates(missing, "prompts")
        return rows

    def remark(self) -> str:
        """How many heads are sinks, and where."""
        layers = sorted({layer for layer, _ in self.heads})
        of = self.measured.sizes["layer"] * self.measured.sizes["head"]
        return (
            f"{len(self.heads)} of {of} heads are sinks, in layers {layers[0]} to {layers[-1]}; the largest mean "
            f"weight on the first token is {self.best_weights.mean():.3g}."
        )

    def values_at(self, position: int = 0, prompts: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """The values (prompt, sink, component) of all prompts, and the mean value (sink, component) of all tokens of
        some prompts.
        """
        layers, heads = (list(numbers) for numbers in zip(*self.heads, strict=True))
        axes = ("prompt", "layer", "head", ..., "component")
        value = self.values.value.isel(position=position).transpose(*axes).values.astype(float)[:, layers, heads]
        total = self.values.total.transpose(*axes).values.astype(float)[prompts][:, layers, heads]
        visible = self.values.visible.transpose("prompt", "layer").values.astype(float)[prompts][:, layers]
        return value, total.sum(0) / visible.sum(0)[:, None]

    def of_every_head(self, name: str) -> np.ndarray:
        """A statistic of every head, (prompt, layer x head)."""
        values = self.measured[name].transpose("prompt", "layer", "head").values
        return np.asarray(values.reshape(len(values), -1))

    def of_sinks(self, name: str) -> np.ndarray:
        """The mean over the sinks, one value per prompt."""
        layers, heads = zip(*self.heads, strict=True)
        values = self.measured[name].transpose("prompt", "layer", "head").values
        return np.asarray(values[:, list(layers), list(heads)].mean(1))


def _over_pairs(vectors: np.ndarray) -> Evidence:
    """The mean over pairs of prompts and over sinks of the cosine of vectors (prompt, sink, component)."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if not (lengths > 0).all():
        return PremiseImpossible("the value of a sink is 0, which has no direction")
    units = vectors / lengths
    cosines = np.einsum("phc,qhc->pq", units, units) / units.shape[1]

    def mean(kept: np.ndarray) -> float:
        of_kept, n = cosines[np.ix_(kept, kept)], len(kept)
        return float((of_kept.sum() - np.trace(of_kept)) / (n * (n - 1)))

    return _jackknife(mean, len(vectors), FisherZScale())


def _jackknife(statistic: Callable[[np.ndarray], float], n: int, scale: Scale) -> Evidence:
    """Pseudo-values of a statistic of prompts on a scale."""

    def on_scale(kept: np.ndarray) -> float:
        return float(scale.forward(np.array([min(statistic(kept), LARGEST)]))[0])

    values = jackknife_values(on_scale, n).clip(-LARGEST_Z, LARGEST_Z)
    return Replicates(scale.inverse_array(values), "prompts", scale)


def _own_sinks(case: TrialCase, recording: Recording) -> Evidence:
    """The cosine of the sinks of another recording, if it has any."""
    sinks = Sinks.of(case, recording)
    return sinks.cosine() if sinks.heads else PremiseImpossible(sinks.absent("it"))


def _twins(case: TrialCase, rows: list[list[int]]) -> Evidence:
    """The cosine of the sinks of untrained twins on some prompts, that of the first twin that has any."""
    few = rows[: case.count(case.constant("twin_prompts"), quick=case.constant("twin_prompts_quick"))]
    recordings = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=few)
    found = [_own_sinks(case, each) for each in recordings]
    with_sinks = [each for each in found if not isinstance(each, PremiseImpossible)]
    return (with_sinks or found)[0]


def _damage(case: TrialCase, recording: Recording, sinks: Sinks) -> dict[str, Evidence]:
    """The damage of replacing what other queries retrieve from the sinks."""
    names = [f"L{layer}H{head}" for layer, head in sinks.heads]
    damage = sink_damage(recording, heads=names, seed=case.seed_for(0), progress=False)
    return {
        f"damage, {quantity}, sinks {edit}": Replicates(damage[name].sel(edit=edit).values, "prompts")
        for name, quantity in (
            ("kl", "KL divergence of the next-token distribution"),
            ("loss_increase", "increase of the loss"),
        )
        for edit in damage.edit.values.tolist()
    }


def _curves(sinks: Sinks) -> xr.Dataset:
    """The weight on the first token, by layer and head."""
    weights = sinks.measured.first_token_mass.transpose("prompt", "layer", "head")
    axes = {"layer": weights.layer.values.tolist(), "head": list(range(weights.sizes["head"]))}
    return curve("sink_weight", weights.values, axes, label="mean weight on the first token", over="prompt")
