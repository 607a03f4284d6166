"""mlp-reconditions: the MLP restores the rank of the token cloud that mixing by attention removes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.half_step_changes import NO_HALVES, HalfStepChanges
from helmscope.claims.prompts import ChosenPrompts, prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.observe.cloud_spectrum import cloud_spectrum, clouds_along_depth
from helmscope.observe.depth_steps import with_halves
from helmscope.observe.matrix_spectrum import matrix_spectrum
from helmscope.observe.track import with_replicates
from helmscope.types import Half, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

SPHERE, STREAM = "sphere", "residual stream"
QUANTITIES = ("effective_rank", "effective_rank_of_squares", "participation_ratio", "stable_rank", "nuclear_rank")


@experiment("mlp-reconditions", seconds={"model": 30})
def mlp_reconditions(case: TrialCase) -> Finding:
    """The change of the log effective rank of a prompt's tokens over every MLP half-step.

    Described: the same over attention, in the residual stream and with the mean token removed, the other definitions of
    a rank, the condition number, the collapse residual and the Dirichlet energy, and untrained twins. Controls are a
    cloud whitened by half and one averaged along the tokens.
    """
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    measured = cloud_spectrum(recording, progress=False)
    own = _changes(measured, "effective_rank")
    if not own.in_halves:
        return Finding.impossible(NO_HALVES)
    return Finding(
        undecided_because=prompts.alike,
        evidence={
            "effective rank": own.evidence(Half.MLP),
            "attention half-steps": Replicates(own.attention.mean(0), "prompts"),
        },
        controls={
            "blocks that write nothing": _silent(recording),
            "planted whitening": _planted(case, recording, whitened=True),
            "planted averaging": _planted(case, recording, whitened=False),
        },
        described=_described(measured) | _twins(case, prompts, own),
        data=curve(
            "effective_rank",
            np.stack([_on(measured, "effective_rank", c).T for c in (SPHERE, STREAM)], -1),
            {"depth": measured.depth.values.tolist(), "coordinates": [SPHERE, STREAM]},
            label="effective rank of the tokens of a prompt",
            over="prompt",
        ),
        remark=_remark(measured, own),
        setting=f"{measured.attrs['sphere']}, {prompts.setting}, {case.constant('tokens')} tokens each, first token "
        "left out, mean token kept",
    )


def _on(measured: xr.Dataset, name: str, coordinates: str = SPHERE, mean: str = "kept") -> np.ndarray:
    """A quantity over (depth, prompt)."""
    values = measured[name].sel(coordinates=coordinates, token_mean=mean)
    return np.asarray(values.transpose("depth", "prompt").values)


def _changes(measured: xr.Dataset, name: str, coordinates: str = SPHERE, mean: str = "kept") -> HalfStepChanges:
    """The changes of the logarithm of a quantity, or of itself if it is one."""
    values = measured[name].sel(coordinates=coordinates, token_mean=mean)
    logs: xr.DataArray = values if name.startswith("log_") else xr.apply_ufunc(np.log, values)
    return HalfStepChanges.of(logs)


def _rank_changes(recording: Recording) -> HalfStepChanges:
    """The changes of the log effective rank in the cloud that decides, without the other clouds."""
    ranks = [
        torch.stack([matrix_spectrum(each[0])["effective_rank"].log() for each in clouds])
        for clouds in clouds_along_depth(recording)
    ]
    measured = with_halves(with_replicates({"log_rank": torch.stack(ranks)}, recording.on_sphere), recording)
    return HalfStepChanges.of(measured.log_rank)


def _described(measured: xr.Dataset) -> dict[str, Evidence]:
    """The changes in other clouds and of other quantities, means over blocks."""
    clouds = [(SPHERE, "removed"), (STREAM, "kept"), (STREAM, "removed")]
    wanted = [("effective_rank", *cloud) for cloud in clouds]
    wanted += [
        (name, SPHERE, "kept") for name in (*QUANTITIES[1:], "log_condition_number", "collapse_residual_frobenius")
    ]
    wanted += [("dirichlet_energy", SPHERE, "kept")]
    rows: dict[str, Evidence] = {}
    for name, coordinates, mean in wanted:
        changes = _changes(measured, name, coordinates, mean)
        for half, values in (("MLP", changes.mlp), ("attention", changes.attention)):
            label = name.removeprefix("log_").replace("_", " ")
            cloud = f"{coordinates}, mean token {mean}"
            rows[f"change of log {label} over {half}, {cloud}, mean over blocks"] = Replicates(
                values.mean(0), "prompts"
            )
    return rows


def _twins(case: TrialCase, prompts: ChosenPrompts, own: HalfStepChanges) -> dict[str, Evidence]:
    """The mean change over blocks of the MLP against that of the untrained twins, on the same prompts."""
    count = case.constant("twin_prompts_quick" if case.quick else "twin_prompts")
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts.texts[:count])
    found = [_rank_changes(twin).mlp.mean(0) for twin in twins]
    return TwinContrast(own.mlp.mean(0), np.stack(found)).described("change of log effective rank over MLP")


def _silent(recording: Recording) -> Evidence:
    """The changes over the MLP where blocks write nothing; norms alone can move the tokens of a post-norm model."""
    changes = _rank_changes(silenced(recording))
    if not changes.mlp.any():
        return PremiseImpossible("blocks that write nothing: the effective rank is the same at every depth")
    return changes.evidence(Half.MLP)


def _planted(case: TrialCase, recording: Recording, *, whitened: bool) -> Evidence:
    """The change of the log effective rank, by the same function, when the tokens after the attention of the middle
    block are whitened by half, or move toward the mean of the tokens before them.
    """
    middle = 1 + recording.anatomy.depths.steps * (len(recording.layers) // 2)
    clouds = [each[0] for each in _at(recording, middle)]
    share = case.constant("averaged_share")
    moved = [whiten_by_half(x) if whitened else average_earlier(x, share) for x in clouds]
    states = torch.stack([torch.stack(clouds), torch.nn.functional.normalize(torch.stack(moved), dim=-1)])
    path = Trajectory(torch.arange(2.0), states, axis="depth", replicate="prompt")
    found = cloud_spectrum(path, include_first_token=True, progress=False)
    change = np.diff(np.log(_on(found, "effective_rank")), axis=0)
    return ReplicatesInEveryCase(list(change), "prompts", ["planted"])


def _at(recording: Recording, depth: int) -> list[Tensor]:
    """The clouds of all prompts at a depth."""
    for k, clouds in enumerate(clouds_along_depth(recording)):
        if k == depth:
            return clouds
    raise AssertionError(f"depth is {depth}, beyond the last one")


def whiten_by_half(x: Tensor) -> Tensor:
    """The matrix with the same singular vectors and the square roots of the singular values.

    >>> whiten_by_half(torch.diag(torch.tensor([4.0, 1.0])))
    tensor([[2., 0.],
            [0., 1.]])
    """
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    whitened: Tensor = (u * s.sqrt()) @ vh
    return whitened


def average_earlier(x: Tensor, share: float) -> Tensor:
    """Every token moves by a share of the way to the mean of the tokens before it; the first one stays.

    >>> average_earlier(torch.tensor([[0.0], [4.0], [8.0]]), 0.5).flatten()
    tensor([0., 2., 5.])
    """
    count = torch.arange(len(x)).clamp(min=1).to(x).unsqueeze(-1)
    before = torch.cat([x[:1], x.cumsum(0)[:-1]]) / count
    return x + share * (before - x)


def _remark(measured: xr.Dataset, own: HalfStepChanges) -> str:
    rank, condition = (_on(measured, name).mean(1) for name in ("effective_rank", "log_condition_number"))
    attention, mlp = own.attention.mean(1), own.mlp.mean(1)
    return (
        f"The effective rank runs from {rank[0]:.3g} at the first depth to {rank[-1]:.3g} at the last, with a minimum "
        f"of {rank.min():.3g}, and the log of the condition number from {condition[0]:.2f} to {condition[-1]:.2f}. "
        f"Over the MLP the rank rises in {int((mlp > 0).sum())} of {len(mlp)} blocks, over attention in "
        f"{int((attention > 0).sum())}. The claim breathing says of the same half-steps that the MLP lowers the "
        "dimension."
    )
