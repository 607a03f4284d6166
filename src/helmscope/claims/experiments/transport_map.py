"""transport-map: whether attention half-steps move the cloud of tokens as an optimal transport map would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced, small_steps_premise
from helmscope.geometry.sphere import retract
from helmscope.observe.depth_steps import unit_states
from helmscope.observe.pairs import without_first_token
from helmscope.observe.transport_ratio import transport_ratio
from helmscope.stats.scales import BoundedScale
from helmscope.transport.brenier import brenier_potential
from helmscope.types import Half, Trajectory

if TYPE_CHECKING:
    import xarray as xr

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

SHARE = BoundedScale((0.0, 1.0))
INDETERMINACY = "indeterminacy of Brenier's potential: what the tokens leave open, over its range"
STRETCH = 0.5  # of the planted positive definite matrix: I + STRETCH times one of norm about 1


@experiment("transport-map", seconds={"model": 60})
def transport_map(case: TrialCase) -> Finding:
    """W2^2 between the clouds of a prompt before and after each attention half-step, by exact assignment with the
    geodesic distance, over the mean squared displacement of its tokens; one value per prompt. The first token is left
    out.

    Controls assign the outputs of each attention half-step to the tokens at random, move the tokens by a positive
    definite matrix, the gradient of a convex potential, in R^d, and silence all blocks. A step that is small against
    the distances between tokens is optimal whatever it is, so the size of steps relative to them is described, too,
    and where the ratio is 1, how far the tokens leave Brenier's potential undetermined.
    """
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", gap=1)
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    measured = transport_ratio(recording, euclidean=False)
    attention = measured.half.values == Half.ATTENTION.value
    names = [f"half-step {int(depth)}" for depth in measured.depth.values[attention]]
    silent = transport_ratio(silenced(recording), euclidean=False)
    rows = [list(row) for row in (recording.batch.source or recording.batch).visible_ids]
    recordings = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=rows)
    twins = np.stack([transport_ratio(twin, euclidean=False).ratio.values[attention] for twin in recordings])
    ratios, potentials = measured.ratio.values[attention], _brenier(recording, attention)
    return Finding(
        undecided_because=prompts.alike,
        evidence={
            "cost ratio": _evidence(ratios, names),
            "whole depth": _or_nothing(measured.ratio_from_start.values[-1]),
            "untrained twins": Replicates(twins.mean(-1).min(-1), "twins"),
        },
        controls={
            "outputs assigned at random": _evidence(_permuted(case, recording, attention), names),
            "gradient of a convex potential": _evidence(_convex(case, recording)[None], ["a planted step"]),
            "blocks that write nothing": _evidence(silent.ratio.values[attention], names),
        },
        described=_described(measured, attention) | potentials,
        data=curve(
            "cost_ratio",
            np.stack([ratios, twins.mean(0)], -1).transpose(1, 0, 2),
            {"half-step": measured.depth.values[attention].tolist(), "model": [case.subject.name, "untrained twins"]},
            label="W2^2 over mean squared displacement",
            over="prompt",
        ),
        remark=_remark(measured, attention, silent, small_steps_premise(case), potentials),
        setting=f"{measured.attrs['sphere']}, geodesic distance, {len(recording.batch)} prompts, first token left out",
    )


def _evidence(ratios: np.ndarray, names: list[str]) -> Evidence:
    """The ratios of all half-steps over (half-step, prompt), or that there are none."""
    if not np.isfinite(ratios).any():
        return PremiseImpossible("no token is displaced, so that there is no ratio")
    return ReplicatesInEveryCase(
        [row[np.isfinite(row)] for row in ratios if np.isfinite(row).sum() > 1], "prompts", names, SHARE
    )


def _or_nothing(ratios: np.ndarray) -> Evidence:
    if not np.isfinite(ratios).any():
        return PremiseImpossible("no token is displaced, so that there is no ratio")
    return Replicates(ratios[np.isfinite(ratios)], "prompts", SHARE)


def _permuted(case: TrialCase, recording: Recording, attention: np.ndarray) -> np.ndarray:
    """The ratios with the outputs of each attention half-step assigned at random to the tokens that count."""
    path, ratios = recording.on_sphere, []
    generator = torch.Generator().manual_seed(case.seed_for(0))
    for k in np.flatnonzero(attention):
        before, after = path.states[k - 1].cpu(), path.states[k].cpu().clone()
        for prompt in range(len(after)):
            weights = None if path.weights is None else path.weights[0, prompt].cpu()
            kept = torch.arange(len(after[prompt])) if weights is None else weights.nonzero()[:, 0]
            kept = kept[kept > 0]
            after[prompt, kept] = after[prompt, kept[torch.randperm(len(kept), generator=generator)]]
        weights = None if path.weights is None else path.weights.cpu()
        moved = Trajectory(torch.arange(2.0), torch.stack([before, after]), weights, axis="depth", replicate="prompt")
        ratios.append(transport_ratio(moved).ratio.values[1])
    return np.stack(ratios)


def _convex(case: TrialCase, recording: Recording) -> np.ndarray:
    """The ratios of a step in R^d by a positive definite matrix, from the first states with radius 1."""
    path = recording.on_sphere
    x = unit_states(path, 0).cpu()
    dim = x.shape[-1]
    root = case.normal(dim, dim, index=1) / dim**0.5
    y = x + STRETCH * (x @ (root @ root.T))
    states, radius = torch.stack([x, retract(y)]), torch.stack([torch.linalg.vector_norm(z, dim=-1) for z in (x, y)])
    weights = None if path.weights is None else path.weights.cpu()
    moved = Trajectory(torch.arange(2.0), states, weights, radius, axis="depth", replicate="prompt")
    return np.asarray(transport_ratio(moved).euclidean_ratio.values[1])


def _described(measured: xr.Dataset, attention: np.ndarray) -> dict[str, Evidence]:
    mlp = measured.half.values == Half.MLP.value
    rows = {
        "ratio at the MLP half-steps, least": measured.ratio.values[mlp],
        "size of attention half-steps over the distance to the nearest token": measured.relative_step.values[attention],
    }
    means = {name: values[np.isfinite(values).all(1)] for name, values in rows.items()}
    chosen = {name: values[values.mean(1).argmin()] for name, values in means.items() if len(values)}
    return {name: Replicates(values, "prompts") for name, values in chosen.items()}


def _brenier(recording: Recording, attention: np.ndarray) -> dict[str, Evidence]:
    """Brenier's potential of the attention half-steps, for the chordal distance of unit vectors: the share of the
    half-steps of a prompt that have one, and the mean indeterminacy of those.
    """
    path = without_first_token(recording.on_sphere)
    shares, widths = [], []
    for prompt in range(path.states.shape[1]):
        kept = slice(None) if path.weights is None else path.weights[0, prompt] > 0
        x = retract(path.states[:, prompt][:, kept].double())
        ends = torch.from_numpy(np.flatnonzero(attention)).to(x.device)
        width = brenier_potential(x[ends - 1], x[ends]).indeterminacy
        shares.append(float(width.isfinite().double().mean()))
        widths.append(float(width.nanmean()))
    found = np.isfinite(widths)
    described: dict[str, Evidence] = {
        "attention half-steps with a Brenier potential": Replicates(shares, "prompts", SHARE)
    }
    if found.sum() > 1:
        described[INDETERMINACY] = Replicates(np.array(widths)[found], "prompts")
    return described


def _undetermined(potentials: dict[str, Evidence]) -> str:
    """What a ratio of 1 is worth, by the indeterminacy of Brenier's potential."""
    found = potentials.get(INDETERMINACY)
    if not isinstance(found, Replicates):
        return ""
    width = float(np.mean(np.asarray(found.values)))
    worth = "so that a ratio of 1 says little about the map" if width > 1 else "so that the map is tested by the ratio"
    return f" What the tokens leave open of Brenier's potential is {width:.2g} times its range, {worth}."


def _remark(
    measured: xr.Dataset, attention: np.ndarray, silent: xr.Dataset, premise: str, potentials: dict[str, Evidence]
) -> str:
    ratios, sizes = measured.ratio.values[attention].mean(1), measured.relative_step.values[attention].mean(1)
    whole = measured.ratio_from_start.values[-1].mean()
    norms = ""
    if np.isfinite(silent.ratio.values[attention]).any():
        norms = (
            " Blocks that write nothing are moved by their norms, whose ratio is "
            f"{np.nanmean(silent.ratio.values[attention]):.3g}: a ratio near 1 is then not about attention."
        )
    return (
        f"The ratio of attention half-steps runs from {ratios.min():.4g} to {ratios.max():.4g}, and their size from "
        f"{sizes.min():.2g} to {sizes.max():.2g} of the distance to the nearest token; over the whole depth the ratio "
        f"is {whole:.3g}.{norms}{_undetermined(potentials)} {premise}"
    )
