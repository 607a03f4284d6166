"""low-pass: attention suppresses high frequencies along the sequence, and keeps the center of mass of the tokens."""

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
from helmscope.observe.fourier_spectrum import HIGH, OF_VARIATION, SHIFT, fourier_spectrum
from helmscope.observe.kernel_lag import KernelLag
from helmscope.types import Half, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

SPHERE, STREAM = "sphere", "residual stream"


@experiment("low-pass", seconds={"model": 20})
def low_pass(case: TrialCase) -> Finding:
    """The change of the high-frequency share of the directions along the tokens over every attention half-step.

    Described: the shift of the mean token, the same shares in the residual stream, without the mean token and over the
    MLP, untrained twins, and the kernels of the heads as filters. Controls are white noise averaged and differenced.
    """
    prompts = prompts_or_finding(case, "trajectory", "on_sphere", "kernel", length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    measured = _measured(case, recording)
    own = HalfStepChanges.of(_on(measured, HIGH))
    if not own.in_halves:
        return Finding.impossible(NO_HALVES)
    shift = _on(measured, SHIFT)
    attention = shift.values[(shift.half == Half.ATTENTION.value).values]
    return Finding(
        undecided_because=prompts.alike,
        evidence={
            "high-frequency share": own.evidence(Half.ATTENTION),
            "shift of the mean": _over_half_steps(attention),
        },
        controls={
            "blocks that write nothing": _silent(case, recording),
            "white noise averaged": _planted(case, averaged=True),
            "white noise differenced": _planted(case, averaged=False),
        },
        described=_described(measured) | _filters(case, recording) | _twins(case, prompts, own),
        data=curve(
            "share",
            np.stack([_on(measured, HIGH, c).transpose("prompt", "depth").values for c in (SPHERE, STREAM)], -1),
            {"depth": measured.depth.values.tolist(), "coordinates": [SPHERE, STREAM]},
            label=f"share of the spectrum along the tokens above {case.constant('cutoff'):g}",
            over="prompt",
        ),
        remark=_remark(measured, own),
        setting=f"{measured.attrs['sphere']}, {prompts.setting}, {case.constant('tokens')} tokens each, first token "
        f"left out, frequencies above {case.constant('cutoff'):g} of the highest",
    )


def _measured(case: TrialCase, recording: Recording | Trajectory, *, include_first_token: bool = False) -> xr.Dataset:
    return fourier_spectrum(
        recording, cutoff=case.constant("cutoff"), include_first_token=include_first_token, progress=False
    )


def _on(measured: xr.Dataset, name: str, coordinates: str = SPHERE) -> xr.DataArray:
    return measured[name].sel(coordinates=coordinates).transpose("depth", "prompt")


def _over_half_steps(values: np.ndarray) -> Evidence:
    """The mean over half-steps, by prompt; that nothing moves where none does."""
    if np.isnan(values).any():
        return PremiseImpossible("some half-step moves no token, so that its mean has no relative shift")
    return Replicates(values.mean(0), "prompts")


def _described(measured: xr.Dataset) -> dict[str, Evidence]:
    """The other shares, their changes as means over blocks."""
    rows: dict[str, Evidence] = {}
    for name, long_name in ((HIGH, "share"), (OF_VARIATION, "share without the mean token")):
        for coordinates in (SPHERE, STREAM):
            changes = HalfStepChanges.of(_on(measured, name, coordinates))
            for half, values in (("attention", changes.attention), ("MLP", changes.mlp)):
                text = f"change of the {long_name} over {half}, {coordinates}, mean over blocks"
                rows[text] = Replicates(values.mean(0), "prompts")
    shift = _on(measured, SHIFT)
    rows["shift of the mean over MLP half-steps"] = _over_half_steps(shift.values[(shift.half == "mlp").values])
    return rows


def _filters(case: TrialCase, recording: Recording) -> dict[str, Evidence]:
    """The kernels of the heads as filters, means over layers and heads."""
    instrument = KernelLag(cutoff=case.constant("cutoff"))
    found = recording.replay(instrument)[instrument.name]
    over = [axis for axis in ("layer", "head") if axis in found.dims]
    rows: dict[str, Evidence] = {}
    for name in ("mean_lag", "toeplitz_share"):
        for suffix, of in (("", ""), ("_null", ", null")):
            label = f"{found[name].attrs['long_name']}{of}, mean over heads"
            rows[label] = Replicates(found[f"{name}{suffix}"].mean(over).values, "prompts")
    passed = found.white_noise_high_frequency_share.mean(over)
    for operator in passed.operator.values:
        rows[f"share above the cutoff of white noise after {operator}, mean over heads"] = Replicates(
            passed.sel(operator=operator).values, "prompts"
        )
    return rows


def _twins(case: TrialCase, prompts: ChosenPrompts, own: HalfStepChanges) -> dict[str, Evidence]:
    """The mean change over blocks of attention against that of the untrained twins, on the same prompts."""
    count = case.constant("twin_prompts_quick" if case.quick else "twin_prompts")
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts.texts[:count])
    found = [HalfStepChanges.of(_on(_measured(case, twin), HIGH)).attention.mean(0) for twin in twins]
    return TwinContrast(own.attention.mean(0), np.stack(found)).described("change of the share over attention")


def _silent(case: TrialCase, recording: Recording) -> Evidence:
    """The changes over attention where blocks write nothing; norms alone can move the tokens of a post-norm model."""
    changes = HalfStepChanges.of(_on(_measured(case, silenced(recording)), HIGH))
    if not changes.attention.any():
        return PremiseImpossible("blocks that write nothing: the share is the same at every depth")
    return changes.evidence(Half.ATTENTION)


def _planted(case: TrialCase, *, averaged: bool) -> Evidence:
    """The change of the share of tokens of white noise, by the same function, when each becomes the mean of a window of
    tokens up to itself, or loses the token before it.
    """
    prompts, tokens = case.constant("least_prompts"), case.constant("tokens")
    noise = case.normal(prompts, tokens, case.constant("planted_dim"), index=1 + averaged)
    after = moving_average(noise, case.constant("window")) if averaged else noise - noise.roll(1, -2)
    states = torch.nn.functional.normalize(torch.stack([noise, after]), dim=-1)
    path = Trajectory(torch.arange(2.0), states, axis="depth", replicate="prompt")
    measured = _measured(case, path)
    change = _on(measured, HIGH).diff("depth").values
    return ReplicatesInEveryCase(list(change), "prompts", ["planted"])


def moving_average(x: Tensor, window: int) -> Tensor:
    """Every token becomes the mean of the last ``window`` tokens up to itself, of fewer at the beginning.

    >>> moving_average(torch.tensor([[1.0], [3.0], [5.0]]), 2).flatten()
    tensor([1., 2., 4.])
    """
    sums = x.cumsum(-2)
    earlier = torch.zeros_like(sums)
    earlier[..., window:, :] = sums[..., :-window, :]
    count = torch.arange(1, x.shape[-2] + 1).clamp(max=window).to(x).unsqueeze(-1)
    return (sums - earlier) / count


def _remark(measured: xr.Dataset, own: HalfStepChanges) -> str:
    share = _on(measured, HIGH).mean("prompt").values
    attention, mlp = own.attention.mean(1), own.mlp.mean(1)
    null = float(_on(measured, f"{HIGH}_null").mean())
    return (
        f"The share runs from {share[0]:.3f} at the first depth to {share[-1]:.3f} at the last, with a minimum of "
        f"{share.min():.3f}; for tokens in random order it would be {null:.3f}. Over attention it falls in "
        f"{int((attention < 0).sum())} of {len(attention)} blocks, by a mean of {-attention.mean():.2g}; over the MLP "
        f"it changes by a mean of {mlp.mean():.2g} and falls in {int((mlp < 0).sum())}."
    )
