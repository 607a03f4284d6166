"""breathing: in every block attention raises the intrinsic dimension of the tokens, and the MLP lowers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.half_step_changes import NO_HALVES, HalfStepChanges
from helmscope.claims.prompts import ChosenPrompts, prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.observe.token_dimension import position_dimension, token_dimension
from helmscope.types import Half, Trajectory

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording


@dataclass(frozen=True, eq=False)
class Changes(HalfStepChanges):
    """The changes of a dimension."""

    @property
    def chain(self) -> ReplicatesInEveryCase:
        """The smaller of dim(Attn) - dim(X) and dim(X) - dim(MLP(Attn)) at every block, as printed."""
        both = np.minimum(self.attention, -(self.attention + self.mlp))
        return ReplicatesInEveryCase(list(both), "prompts", [f"block {k}" for k in range(len(both))])


@experiment("breathing", seconds={"model": 60})
def breathing(case: TrialCase) -> Finding:
    """The change of the Two-NN dimension of a prompt's tokens over every half-step, at equal numbers of points without
    copies. Described: GRIDE at larger scales, the k-th tokens of all prompts, and untrained twins.

    Controls are planted clouds of the same number of points and blocks that write nothing.
    """
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    neighbors = case.constant("neighbors")
    measured = token_dimension(recording, neighbors=neighbors, progress=False)
    own = Changes.of(measured.two_nn)
    if not own.in_halves:
        return Finding.impossible(NO_HALVES)
    positions = Changes.of(position_dimension(recording, progress=False).position_two_nn)
    contrasts = _twins(case, prompts, own)
    described: dict[str, Evidence] = {}
    for half, contrast in contrasts.items():
        described |= contrast.described(f"change over {half.value}, mean over blocks")
    for k in neighbors:
        described |= _means(f"GRIDE at r_{2 * k} / r_{k}", Changes.of(measured.gride.sel(neighbor=k)))
    return Finding(
        undecided_because=prompts.alike,
        evidence={
            "attention": own.evidence(Half.ATTENTION),
            "MLP": own.evidence(Half.MLP),
            "k-th token": Replicates(positions.attention.mean(0), "prompts"),
        },
        controls={
            "blocks that write nothing": _silent(recording),
            "planted rise": _planted(case, measured.attrs["points"], rising=True),
            "planted fall": _planted(case, measured.attrs["points"], rising=False),
        },
        described=described | _means("k-th token", positions),
        printed=own.chain,
        data=curve(
            "dimension",
            measured.two_nn.transpose("prompt", "depth").values,
            {"depth": measured.depth.values.tolist()},
            label=f"Two-NN dimension of {measured.attrs['points']} tokens of a prompt",
            over="prompt",
        ),
        remark=_remark(measured, own),
        setting=f"{measured.attrs['sphere']}, {prompts.setting}, {measured.attrs['points']} different tokens of each, "
        "first token left out",
    )


def _means(name: str, changes: Changes) -> dict[str, Evidence]:
    return {
        f"{name}, change over attention, mean over blocks": Replicates(changes.attention.mean(0), "prompts"),
        f"{name}, change over MLP, mean over blocks": Replicates(changes.mlp.mean(0), "prompts"),
    }


def _twins(case: TrialCase, prompts: ChosenPrompts, own: Changes) -> dict[Half, TwinContrast]:
    """The mean change over blocks against that of the untrained twins, on the same prompts."""
    count = case.constant("twin_prompts_quick" if case.quick else "twin_prompts")
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts.texts[:count])
    found = [Changes.of(token_dimension(twin, neighbors=(), progress=False).two_nn) for twin in twins]
    return {
        Half.ATTENTION: TwinContrast(own.attention.mean(0), np.stack([each.attention.mean(0) for each in found])),
        Half.MLP: TwinContrast(own.mlp.mean(0), np.stack([each.mlp.mean(0) for each in found])),
    }


def _silent(recording: Recording) -> Evidence:
    """The changes over attention where blocks write nothing; norms alone can move the tokens of a post-norm model."""
    changes = Changes.of(token_dimension(silenced(recording), neighbors=(), progress=False).two_nn)
    if not changes.attention.any():
        return PremiseImpossible("blocks that write nothing: the dimension is the same at every depth")
    return changes.evidence(Half.ATTENTION)


def _planted(case: TrialCase, points: int, *, rising: bool) -> Evidence:
    """The change between a normal cloud of few dimensions and one of more, both on a sphere, by the same function."""
    few, many = sorted(case.constant("planted_dims"))
    y = case.normal(case.constant("least_prompts"), points, many, index=1 + rising)
    flat = y.clone()
    flat[..., few:] = 0
    clouds = torch.stack([flat, y] if rising else [y, flat])
    # the graph of 1 over the cloud, seen from 0: points of the sphere with the dimension of the cloud
    states = torch.nn.functional.normalize(torch.cat([clouds, torch.ones_like(clouds[..., :1])], -1), dim=-1)
    path = Trajectory(torch.arange(2.0), states, axis="depth", replicate="prompt")
    change = token_dimension(path, neighbors=(), include_first_token=True, progress=False).two_nn.diff("depth").values
    return ReplicatesInEveryCase(list(change), "prompts", ["planted clouds"])


def _remark(measured: xr.Dataset, own: Changes) -> str:
    means = measured.two_nn.mean("prompt").values
    attention, mlp = own.attention.mean(1), own.mlp.mean(1)
    return (
        f"The dimension runs from {means[0]:.3g} at the first depth to {means[-1]:.3g} at the last, with a maximum of "
        f"{means.max():.3g}; its mean change over attention runs from {attention.min():.2g} to {attention.max():.2g} "
        f"over blocks and is above 0 in {int((attention > 0).sum())} of {len(attention)}, that over the MLP from "
        f"{mlp.min():.2g} to {mlp.max():.2g}, below 0 in {int((mlp < 0).sum())}."
    )
