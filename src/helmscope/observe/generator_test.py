"""The generator test of every block: how much of the change of test functions the drift of a block explains.

A block moves a state y by D y. In the coordinates of the direction x = y/|y| (mean removed first where norms remove it)
its scaled step is x(s) = (x + s D) / |x + s D| with D = (y' - y) / |y|, at the recorded radius |y| of each token; x(1)
is the recorded next direction. A real layer has no eps that could go to 0, so the test is the Taylor remainder in s
[Helmholtz Transformer, no. 8]: for a probe phi (``probes``), with its non-centered second moment D D^T,

    phi(x(s)) - phi(x) = s <grad phi, D> + s^2 (D D^T / 2):Hess phi + O(s^3).

Blocks are deterministic, and the expectation given x of a change C = phi(x') - phi(x) is C itself. With E the mean over
the tokens of a prompt, a prediction T of C explains the share

    1 - mean_p E (C_p - T_p)^2 / E C_p^2

of the changes of the probes p, each of which counts the same, whatever its scale: 1 where the prediction is exact, 0
where 0 predicts as well, below 0 where it is worse. The first token, the usual attention sink, is left out.

    explained_share        T = <grad phi, D>, the drift at s = 1. With the suffix
        _by_kind           by kind of probe
        _null              with the steps D permuted over the tokens of a prompt
        _second_moment     drift and second moment
        _of_mean           1 - sum_p (E C_p - E T_p)^2 w_p / sum_p (E C_p)^2 w_p, w_p = 1 / E C_p^2: of the change of
                           the mean of a probe over the cloud, in which what tokens do in different directions cancels
        _first_state       T the drifts of both halves at the first state: the MLP's write is evaluated there
        _sigma             T the drift and Sigma_A:Hess phi in place of the second moment, with Sigma_A = (1/2) Cov_P of
                           the values, as if attention sampled one token
        _second_moment_and_sigma
                           Sigma_A:Hess phi beside the second moment: it errs by exactly this term more
    splitting_defect       root of mean_p E (C_p - C_p^0)^2 / E C_p^2, with C^0 the change by the sum of both updates at
                           the first state instead of the half-steps in sequence
    sigma_term_ratio       mean_p E (Sigma_A:Hess phi_p)^2 / E C_p^2, the size of that error
    remainder              root mean square over tokens and probes of a kind of the remainder after the drift at each s,
                           over that of the change at s = 1; remainder_second_moment after both terms
    order                  its order in s over all probes, the limit for s to 0: 2, and order_second_moment 3, by
                           construction; order_sigma, with Sigma_A in place of the second moment, stays 2. They are
                           extrapolated from steps of which the longest is 1/4, and their halves

How to read it. A share near 1 at s = 1 makes "to first order" a statement about the model; orders of 2 and 3 do not,
they hold for every smooth probe and check the instrument. Second-order terms that improve the share say that steps are
moderate; if they worsen it, the series does not describe the step at all. explained_share_sigma above
explained_share is no evidence of noise: on a sphere of many dimensions every tangent second moment shortens <a, x> by
half its trace, that of the step as well as Sigma_A. explained_share_second_moment_and_sigma below
explained_share_second_moment, and an order of 2, are the test of Sigma_A.

How it fails. A probe that is nearly linear on the scale of a step is explained by any drift; those here are not.
NaN where no token of a prompt moves. ``explained_share_first_state`` and ``splitting_defect`` need MLPs that add to
the state which attention reads, and are left out for post-norm models, norms after the MLP and cross-attention; the
values of Sigma_A need heads that write by matrices. The attribute ``left_out`` says why.

Cost. Products of the tokens with the rows of the probes, one replay, one more evaluation of every MLP, and for Sigma_A
the covariance of the values at ``sampled_tokens`` tokens of each prompt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from helmscope.observe.block_steps import BlockSteps, steps_unsupported
from helmscope.observe.generator import convergence_order
from helmscope.observe.generator_terms import SCALES, SamplingTerms, SplittingTerms, missed, over_tokens, short_scales
from helmscope.observe.labels import label_attributes
from helmscope.observe.probes import ProbeBank, ScaledStep
from helmscope.observe.track import AT_LEAST_0, check_system, with_bounds
from helmscope.runs.bar import shows_progress
from helmscope.types import (
    HelmscopeError,
    check_integer,
    check_progress,
    check_replicates,
    check_seed,
    identity_coordinates,
    type_with_article,
)

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.types import Instrument, System
    from helmscope.types.progress import ProgressOption

TOKENS = 16  # of each prompt, at which Sigma_A is computed
BELOW_1 = (-math.inf, 1.0)
LABELS = {
    "explained_share": "share of phi(x') - phi(x) that the drift explains",
    "explained_share_by_kind": "share that the drift explains, by kind of probe",
    "explained_share_second_moment": "share that drift and second moment explain",
    "explained_share_of_mean": "share of the change of the mean over tokens that the drift explains",
    "explained_share_first_state": "share that the drifts of both halves at the first state explain",
    "explained_share_sigma": "share that the drift explains with Sigma_A in place of the second moment",
    "explained_share_second_moment_and_sigma": "share that drift, second moment and Sigma_A explain",
    "sigma_term_ratio": "mean square of Sigma_A:Hess phi over that of the change",
    "splitting_defect": "relative difference between the half-steps in sequence and their sum at the first state",
    "remainder": "remainder after the drift, relative to the change at s = 1",
    "remainder_second_moment": "remainder after drift and second moment, relative",
    "order": "order of the remainder after the drift",
    "order_second_moment": "order of the remainder after drift and second moment",
    "order_sigma": "order of the remainder with Sigma_A in place of the second moment",
}
BOUNDS = {
    **dict.fromkeys((name for name in LABELS if "explained_share" in name), BELOW_1),
    **dict.fromkeys(("sigma_term_ratio", "splitting_defect", "remainder", "remainder_second_moment"), AT_LEAST_0),
}


@shows_progress("generator test")
def generator_test(
    system: System,
    *,
    bank: ProbeBank | None = None,
    sampled_tokens: int = TOKENS,
    include_first_token: bool = False,
    seed: int = 0,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """The generator test of every block of a recording, or of every layer of a simulation under ``Layer()``: shares
    over (layer, prompt), ``explained_share_by_kind`` over (layer, prompt, kind), remainders over (layer, prompt, scale,
    kind).

    ``bank`` holds the probes, by default ``ProbeBank.of(system, seed=seed)``. Everything but Sigma_A is a mean over all
    tokens that count, without the first unless ``include_first_token``; Sigma_A is computed at ``sampled_tokens``
    tokens of each prompt, drawn by ``seed``. The last state of a simulation has no step and no entry. Raises
    HelmscopeError for a simulation that is no sequence of single layers without noise, for states that are not finite,
    and for a radius of 0, with prompt, layer and token.

    >>> import helmscope as hs
    >>> turn = hs.MLP(w_in=torch.eye(2), w_out=0.01 * torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> x = hs.Uniform(4, 2).sample(3, seed=0)
    >>> measured = generator_test(hs.integrate(turn, x, times=[0.0, 1.0], stepper=hs.Layer()))
    >>> bool((measured.explained_share > 0.99).all()), measured.remainder.dims
    (True, ('time', 'system', 'scale', 'kind'))
    """
    sampled_tokens, seed = check_integer("sampled_tokens", sampled_tokens, at_least=1), check_seed(seed)
    reason = steps_unsupported(check_system(system))
    if reason is not None:
        raise HelmscopeError(reason)
    if bank is not None and not isinstance(bank, ProbeBank):
        raise HelmscopeError(f"bank is {type_with_article(bank)}, but it must be a ProbeBank: ProbeBank.of(system)")
    steps = BlockSteps.of(system, include_first_token=include_first_token)
    bank = ProbeBank.of(system, seed=seed) if bank is None else bank
    report = check_progress(progress)
    columns = []
    for done, layer in enumerate(steps.layers, 1):
        columns.append(block_values(bank, *steps.at(layer), steps.permuted(layer, seed)))
        report(0.5 * done / len(steps.layers))
    values = {name: torch.stack([column[name] for column in columns]).cpu().numpy() for name in columns[0]}
    terms, left_out = _replayed(system, steps, bank, sampled_tokens, seed, lambda share: report(0.5 + 0.5 * share))
    return _measurement(values | terms, system, steps, bank, left_out)


def block_values(bank: ProbeBank, x: Tensor, step: Tensor, m: Tensor, permuted: Tensor) -> dict[str, Tensor]:
    """The values of steps at unit vectors x (prompt, token, d) of tokens with weights m, (prompt, ...) each;
    ``permuted`` holds the same steps in another order.

    >>> x, m = torch.eye(3).double()[None], torch.ones(1, 3).double()
    >>> values = block_values(ProbeBank.around(x[0]), x, 1e-3 * x.roll(1, -1), m, 0 * x)
    >>> bool(values["explained_share"] > 0.999), values["explained_share_null"].item(), round(values["order"].item(), 3)
    (True, 0.0, 2.0)
    """
    kinds = [_kind_values(kind.along(x, step), kind.along(x, permuted), m) for kind in bank.kinds]
    joined = {name: torch.cat([kind[name] for kind in kinds], -1) for name in kinds[0]}
    orders = [
        convergence_order((joined[name] * joined["weight"]).nansum(-1).sqrt().movedim(0, -1))
        for name in ("left", "left_both")
    ]
    moved = joined["weight"].isfinite().any(-1)
    by_kind = {
        new: torch.stack([kind[name].nanmean(-1).sqrt() for kind in kinds], -1).movedim(0, 1)  # (prompt, scale, kind)
        for new, name in (("remainder", "after_drift"), ("remainder_second_moment", "after_both"))
    }
    weighted = [(joined["weight"] * joined[name] ** 2).nansum(-1) for name in ("mean_left", "mean_change")]
    return {
        "explained_share": 1 - joined["after_drift"][0].nanmean(-1),
        "explained_share_null": 1 - joined["null"].nanmean(-1),
        "explained_share_second_moment": 1 - joined["after_both"][0].nanmean(-1),
        "explained_share_of_mean": 1 - weighted[0] / torch.where(weighted[1] > 0, weighted[1], torch.nan),
        "explained_share_by_kind": torch.stack([1 - kind["after_drift"][0].nanmean(-1) for kind in kinds], -1),
        **by_kind,
        "order": torch.where(moved, orders[0], torch.nan),
        "order_second_moment": torch.where(moved, orders[1], torch.nan),
    }


def _kind_values(path: ScaledStep, permuted: ScaledStep, m: Tensor) -> dict[str, Tensor]:
    """Means over tokens for the probes of a kind, (prompt, p) each or (scale, prompt, p): what the drift, and both
    terms, miss of the change at each s, relative to that at s = 1; the same for short steps, as mean squares.
    """
    whole = path.change(1.0)
    size = over_tokens(whole**2, m)
    weight = 1 / torch.where(size > 0, size, torch.nan)

    def left(scale: float | Tensor) -> tuple[Tensor, Tensor]:
        rest = path.change(scale) - scale * path.drift
        return over_tokens(rest**2, m), over_tokens((rest - scale**2 * path.second) ** 2, m)

    long = [left(s) for s in SCALES]
    short = [left(s) for s in short_scales(path, m)]
    return {
        "weight": weight,
        "after_drift": weight * torch.stack([each[0] for each in long]),
        "after_both": weight * torch.stack([each[1] for each in long]),
        "left": torch.stack([each[0] for each in short]),
        "left_both": torch.stack([each[1] for each in short]),
        "null": missed(whole, permuted.drift, m),
        "mean_change": over_tokens(whole, m),
        "mean_left": over_tokens(whole - path.drift, m),
    }


def _replayed(
    system: System, steps: BlockSteps, bank: ProbeBank, sampled_tokens: int, seed: int, progress: ProgressOption
) -> tuple[dict[str, np.ndarray], str]:
    """The values that need the mechanism, over (layer, prompt), and why others are left out."""
    instruments: list[Instrument] = []
    reasons = []
    for instrument in (
        SplittingTerms(steps, bank),
        SamplingTerms(steps, bank, sampled_tokens=sampled_tokens, seed=seed),
    ):
        reason = system.unsupported_reason(instrument)
        if reason is None:
            instruments.append(instrument)
        else:
            reasons.append(reason)
    found: dict[str, np.ndarray] = {}
    for measured in system.replay(*instruments, progress=progress).values() if instruments else ():
        kept = measured.isel({system.layer_axis: [system.layers.index(layer) for layer in steps.layers]})
        found |= {str(name): kept[name].values for name in kept.data_vars}
    return found, "; ".join(dict.fromkeys(reasons))


def _measurement(
    values: dict[str, np.ndarray], system: System, steps: BlockSteps, bank: ProbeBank, left_out: str
) -> xr.Dataset:
    axes = (system.layer_axis, system.replicate)
    further = {
        "explained_share_by_kind": ("kind",),
        "remainder": ("scale", "kind"),
        "remainder_second_moment": ("scale", "kind"),
    }
    data = {name: ((*axes, *further.get(name, ())), value) for name, value in values.items()}
    coords: dict[str, Any] = {axes[0]: steps.coordinates, axes[1]: np.arange(values["explained_share"].shape[1])}
    coords |= {"scale": np.array(SCALES), "kind": list(bank.names)}
    coords |= identity_coordinates(axes[1], steps.path.identities)
    measured = with_bounds(xr.Dataset(data, coords), BOUNDS)
    for name in measured.data_vars:
        measured[name].attrs |= label_attributes(LABELS[str(name).removesuffix("_null")])
    for name in ("remainder", "remainder_second_moment"):
        measured[name].attrs |= {"scale": "log", "summary": "range"}
    facts = {"sphere": steps.sphere, "radius": "recorded radius of each token", "probes": len(bank)}
    return check_replicates(measured.assign_attrs(facts | ({"left_out": left_out} if left_out else {})))
