"""value-roles: value vectors assemble the output, signal to later layers and move the state, all at once."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from helmscope.claims.curves import curve
from helmscope.claims.evidence import AbsoluteDifference, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import ChosenPrompts, prompts_or_finding
from helmscope.claims.rank_correlation import mean_spearman
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.observe.direct_logit_attribution import attribution_unsupported, direct_logit_attribution
from helmscope.observe.head_composition import composition_unsupported, head_composition

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

ROLES = ("assembly", "relevance", "transport")
PAIRS = tuple(combinations(range(len(ROLES)), 2))


class Roles(NamedTuple):
    """The three roles of every head, each over (prompt, layer, head): direct logit attribution, composition with later
    heads (NaN in the last layer), and share of the squared norm of the writes of the layer's heads.
    """

    assembly: np.ndarray
    relevance: np.ndarray
    transport: np.ndarray

    @classmethod
    def of(cls, recording: Recording) -> Roles:
        """Those of a recording."""
        attributed = direct_logit_attribution(recording, progress=False)
        axes = ("prompt", "layer", "head")
        assembly, transport = (
            attributed[name].transpose(*axes).values for name in ("head_attribution", "head_squared_length_share")
        )
        composition = (
            head_composition(recording, progress=False).composition_mean.mean("read").transpose("layer", "head").values
        )
        return cls(assembly, np.broadcast_to(composition, assembly.shape), transport)

    def correlations(self, permuted: np.random.Generator | None = None) -> np.ndarray:
        """The rank correlation over the heads of a layer, mean over layers, of each pair of roles, over (pair, prompt);
        with the second role of each pair ``permuted`` over the heads of a layer, apart for each layer and prompt.
        """
        found = np.empty((len(PAIRS), len(self.assembly)))
        for number, (first, second) in enumerate(PAIRS):
            for prompt in range(len(self.assembly)):
                other = self[second][prompt]
                other = other if permuted is None else permuted.permuted(other, axis=1)
                one = self[first][prompt]
                used = np.isfinite(one).all(1) & np.isfinite(other).all(1)
                found[number, prompt] = mean_spearman(one[used].T, other[used].T)
        return found


@experiment("value-roles", seconds={"model": 15})
def value_roles(case: TrialCase) -> Finding:
    """One quantity for each role of a head, and how they trade off over the heads of a layer. Nothing is judged;
    controls are blocks that write nothing and roles permuted over heads.
    """
    prompts = prompts_or_finding(case, "kernel", "replay", "lens", head=True, length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    refused = attribution_unsupported(recording) or composition_unsupported(recording)
    if refused is not None:
        return Finding.impossible(refused)
    roles = Roles.of(recording)
    if roles.assembly.shape[-1] < 2:
        return Finding.impossible(f"{case.subject.name} has one head in each layer, and roles are compared over heads")
    found = roles.correlations()
    permuted = roles.correlations(np.random.default_rng([case.seed, 1]))
    return Finding(
        undecided_because=prompts.alike,
        evidence={_name(pair): _evidence(values) for pair, values in zip(PAIRS, found, strict=True)},
        controls={
            "blocks that write nothing": _silent(recording),
            "roles permuted over heads": AbsoluteDifference(permuted[np.abs(permuted.mean(1)).argmax()], "prompts"),
        },
        described=_described(roles) | _twins(case, prompts, found),
        data=_curves(roles),
        remark=_remark(roles, found),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each; next-token logit at the final norm's "
        f"scale, composition over all later heads, {roles.assembly.shape[-1]} heads in each of "
        f"{roles.assembly.shape[1]} layers",
    )


def _name(pair: tuple[int, int]) -> str:
    return f"{ROLES[pair[0]]} and {ROLES[pair[1]]}"


def _evidence(values: np.ndarray) -> Evidence:
    if not np.isfinite(values).all():
        return PremiseImpossible("one of the roles is the same for all heads of every layer")
    return Replicates(values, "prompts")


def _silent(recording: Recording) -> Evidence:
    """The largest attribution of a half-step, by prompt, where blocks write nothing."""
    found = direct_logit_attribution(silenced(recording), progress=False)
    parts = [np.abs(found[name].transpose("prompt", "layer").values) for name in HALVES]
    return Replicates(np.concatenate(parts, 1).max(1), "prompts")


HALVES = ("attention_attribution", "mlp_attribution")


def _described(roles: Roles) -> dict[str, Evidence]:
    """The roles themselves, and the correlations over all heads with a later layer."""
    labels = ("addition of a head to the next token's logit", "composition with later heads", "share of the norm")
    rows: dict[str, Evidence] = {}
    for label, role in zip(labels, roles, strict=True):
        if label != labels[1]:
            rows[f"{label}, largest over heads"] = Replicates(role.max((1, 2)), "prompts")
    rows[f"{labels[0]}, sum over heads"] = Replicates(roles.assembly.sum((1, 2)), "prompts")
    for first, second in PAIRS:
        pairs = [
            mean_spearman(one[:-1].reshape(-1, 1), other[:-1].reshape(-1, 1))
            for one, other in zip(roles[first], roles[second], strict=True)
        ]
        rows[f"{_name((first, second))}, over all heads but those of the last layer"] = Replicates(
            np.array(pairs), "prompts"
        )
    return rows


def _twins(case: TrialCase, prompts: ChosenPrompts, found: np.ndarray) -> dict[str, Evidence]:
    """The correlations of the untrained twins."""
    count = case.constant("twin_prompts_quick" if case.quick else "twin_prompts")
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts.texts[:count])
    each = np.stack([Roles.of(twin).correlations() for twin in twins])  # (twin, pair, prompt)
    rows: dict[str, Evidence] = {}
    for number, pair in enumerate(PAIRS):
        if np.isfinite(each[:, number]).all() and np.isfinite(found[number]).all():
            rows |= TwinContrast(found[number], each[:, number]).described(_name(pair))
    return rows


def _curves(roles: Roles) -> xr.Dataset:
    """The attribution of the heads by layer."""
    layers, heads = (range(size) for size in roles.assembly.shape[1:])
    return curve(
        "attribution",
        roles.assembly,
        {"layer": list(layers), "head": list(heads)},
        label="addition of a head to the logit of the next token",
        over="prompt",
    )


def _remark(roles: Roles, found: np.ndarray) -> str:
    mean = roles.assembly.mean(0)
    layer, head = (int(index) for index in np.unravel_index(mean.argmax(), mean.shape))
    parts = ", ".join(f"{_name(pair)} {values.mean():.2f}" for pair, values in zip(PAIRS, found, strict=True))
    return (
        f"Head {head} of layer {layer} adds most to the next token's logit, {mean.max():.3f}; {(mean < 0).mean():.0%} "
        f"of the heads lower it. Rank correlations over the heads of a layer: {parts}."
    )
