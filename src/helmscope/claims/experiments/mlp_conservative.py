"""mlp-conservative: the MLP of a block is nearly the gradient of a potential."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.claims.curves import curve
from helmscope.claims.evidence import Replicates, ReplicatesInEveryCase
from helmscope.claims.finding import Finding
from helmscope.claims.mlp_shares import NOTHING_WRITTEN, MlpShares, half_steps
from helmscope.claims.prompts import prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.fields.hodge_jacobian import jacobian_split
from helmscope.fields.jacobian_algebra import JacobianInvariants
from helmscope.geometry.sphere import retract
from helmscope.intervene.arms import Arm, AttentionMode
from helmscope.models.experts import MixtureOfExperts
from helmscope.observe.mlp_force import MlpForce
from helmscope.observe.mlp_jacobian import MlpJacobian, antisymmetric_share
from helmscope.observe.mlp_swirl_bound import mlp_swirl_bound, swirl_bound_unsupported
from helmscope.types import Attachment

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

TWIN_PROMPTS = 4
SYMMETRIC_TOKENS = 2  # of each prompt, whose Jacobians are stored whole


@experiment("mlp-conservative", seconds={"model": 30})
@prints_premise
def mlp_conservative(case: TrialCase) -> Finding:
    """The antisymmetric share |A|^2/|Df|^2 of every MLP, the mean over the tokens of a prompt, in the coordinates of
    the unit sphere (the norm before the MLP folded in). A gradient has 0, independent random weights 1/2.

    Described: the same weighted by the covariance of the tokens, and on the tangent space; the algebraic swirl of the
    weights as printed; the share of |f|^2 that no potential of a stated basis explains on other prompts, an upper bound
    on the swirl of the L2(rho) projection; the share of tokens at which the trace of the Jacobian is positive.
    """
    prompts = prompts_or_finding(case, "force", mlp=True, gap=1)
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    refused = recording.unsupported_reason(MlpJacobian())
    if refused is not None:
        return Finding.impossible(refused)
    own = MlpShares.of(recording)
    if not own.writes:
        return Finding.impossible(NOTHING_WRITTEN)
    silent = recording.under(*Arm(AttentionMode.OFF, mlp=False).edits(recording))
    names = half_steps(list(recording.layers))
    permuted, symmetric = _permuted(recording, case), _symmetric(recording)
    twins = _twins(case, prompts.texts)
    controls: dict[str, Evidence] = {
        "W_out permuted over neurons": ReplicatesInEveryCase(list(permuted), "prompts", names),
        "untrained twins": ReplicatesInEveryCase(list(twins.T), "twins", names),
        "symmetric part of the Jacobian": ReplicatesInEveryCase(list(symmetric), "prompts", names),
        "blocks that write nothing": MlpShares.of(silent).at_every_half_step(),
    }
    projected = _projected(recording, case)
    described, printed = _described(own, recording, projected)
    shares = own.shares("antisymmetric_share")
    curves = {"of the model": shares, "weighted by tokens": own.shares("antisymmetric_share_weighted")}
    curves |= {"W_out permuted": permuted}
    data = curve(
        "share",
        np.stack(list(curves.values()), -1).transpose(1, 0, 2),
        {"layer": list(recording.layers), "Jacobian": list(curves)},
        label="antisymmetric share of the MLP's Jacobian",
        over="prompt",
    )
    return Finding(
        undecided_because=prompts.alike,
        evidence={"antisymmetric share": own.at_every_half_step()},
        controls=controls,
        described=described,
        data=data,
        remark=_remark(own, printed, twins, projected),
        setting=f"unit sphere, norms folded in: {len(prompts)} prompts, {len(twins)} untrained twins on {TWIN_PROMPTS}",
        attachments=(Attachment(f"Certificate of {case.subject.name}", str(recording.certificate)),),
    )


def _described(
    own: MlpShares, recording: Recording, projected: xr.Dataset | None
) -> tuple[dict[str, Evidence], xr.Dataset]:
    """What is reported and not judged, and the Measurement of the split."""
    split = recording.replay(MlpForce(sampled_tokens=None))["mlp_force"]
    over = {
        "share weighted by the covariance of the tokens": own.shares("antisymmetric_share_weighted"),
        "share on the tangent space": own.shares("antisymmetric_share_tangent"),
        "tokens with a positive trace": own.shares("positive_trace_share"),
    }
    name = "swirl_fraction_as_printed_unit_sphere"
    if name in split:
        over["|R|^2/|f|^2 as printed"] = split[name].transpose("layer", "prompt").values
    if projected is not None:
        over["share that no fitted potential explains"] = projected.swirl_share_bound.values
        over["share that no quadratic potential explains"] = projected.swirl_share_bound_quadratic.values
    return {
        f"{label}, mean over layers": Replicates(values.mean(0), "prompts") for label, values in over.items()
    }, split


def _projected(recording: Recording, case: TrialCase) -> xr.Dataset | None:
    """The upper bounds on the swirl of the L2(rho) projection, of a mixture of experts as routed; None for forces that
    have none, and where the tokens are too few to determine them.
    """
    if swirl_bound_unsupported(recording) is not None:
        return None
    projected = mlp_swirl_bound(recording, neurons=case.count(768, quick=256), max_tokens=case.count(4096, quick=1024))
    return None if "undetermined" in projected.attrs else projected


def _permuted(recording: Recording, case: TrialCase) -> np.ndarray:
    """The shares over (layer, prompt) with the columns of W_out permuted over the neurons."""
    draw = torch.Generator().manual_seed(case.seed_for(0))

    def shuffled(force: Any) -> Any:
        if isinstance(force, MixtureOfExperts):
            return replace(force, experts=tuple(shuffled(expert) for expert in force.experts))
        order = torch.randperm(force.w_out.shape[1], generator=draw).to(force.w_out.device)
        return replace(force, w_out=force.w_out[:, order])

    return _over_layers(recording, lambda force, x: antisymmetric_share(shuffled(force), x))


def _symmetric(recording: Recording) -> np.ndarray:
    """The antisymmetric share, over (layer, prompt), of the symmetric part of the same Jacobians, at a few tokens."""

    def share(force: Any, x: Tensor) -> Tensor:
        whole = jacobian_split(force.ambient, x[:, -SYMMETRIC_TOKENS:])
        return JacobianInvariants.of_matrices(whole.symmetric).antisymmetric_share

    return _over_layers(recording, share)


def _over_layers(recording: Recording, share: Any) -> np.ndarray:
    """The mean over tokens of a share of force and points, over (layer, prompt)."""
    counted = recording.batch.counted
    rows = []
    for layer in recording.layers:
        x = retract(recording.force_points(layer=layer))
        values = share(recording.force(layer=layer), x).double()
        weights = torch.ones_like(values) if counted is None else counted.to(values)[:, -values.shape[1] :]
        weights = torch.where(values.isnan(), 0.0, weights)
        rows.append((torch.where(weights > 0, weights * values, 0.0).sum(-1) / weights.sum(-1)).cpu().numpy())
    return np.stack(rows)


def _twins(case: TrialCase, prompts: tuple[Any, ...]) -> np.ndarray:
    """The shares of untrained twins over (twin, layer), the mean over a few prompts."""
    recordings = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts[:TWIN_PROMPTS])
    return np.stack([MlpShares.of(each).shares("antisymmetric_share").mean(1) for each in recordings])


def _remark(own: MlpShares, split: xr.Dataset, twins: np.ndarray, projected: xr.Dataset | None) -> str:
    share, weighted = (own.shares(name).mean(1) for name in ("antisymmetric_share", "antisymmetric_share_weighted"))
    sentences = [
        f"The share runs from {share.min():.3f} in layer {share.argmin()} to {share.max():.3f} in layer "
        f"{share.argmax()}; weighted by the covariance of the tokens, from {weighted.min():.3f} to "
        f"{weighted.max():.3f}. In untrained twins it is {twins.mean():.3f}."
    ]
    name = "swirl_fraction_as_printed_unit_sphere"
    if name in split:
        printed = split[name].mean("prompt").values
        sentences.append(
            f"The algebraic swirl of the weights, |R|^2/|f|^2 as printed, runs from {printed.min():.2f} to "
            f"{printed.max():.2f}, which is not a fraction."
        )
    if projected is not None:
        bound, quadratic = (
            projected[name].mean("prompt").values for name in ("swirl_share_bound", "swirl_share_bound_quadratic")
        )
        sentences.append(
            f"Of |f|^2 on other prompts a fitted potential leaves {bound.min():.2f} to {bound.max():.2f} unexplained, "
            f"a quadratic one {quadratic.min():.2f} to {quadratic.max():.2f}: upper bounds on the swirl at tokens "
            f"(basis: {projected.attrs['basis']})."
        )
    trace = own.shares("positive_trace_share").mean(1)
    sentences.append(f"The trace of the Jacobian is positive at {trace.min():.0%} to {trace.max():.0%} of the tokens.")
    return " ".join(sentences)
