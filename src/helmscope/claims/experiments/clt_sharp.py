"""clt-sharp: no single weight dominates a row of attention, as a central limit theorem requires."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from helmscope.claims.arm_statistics import over_prompts
from helmscope.claims.attention_trials import TWIN_PROMPTS, AttentionTrial, by_prompt, contexts_of, layer_means
from helmscope.claims.curves import curve
from helmscope.claims.evidence import PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import prints_premise
from helmscope.claims.twin_contrast import TwinContrast
from helmscope.observe.context_noise import context_group_noise, context_groups
from helmscope.observe.kernel import normalized_rows
from helmscope.types import HelmscopeError, Instrument, Needs

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording
    from helmscope.types import AttentionTensors, ReplayContext

EPSILON = 0.5  # of the Lindeberg share: terms above this many standard deviations of the sum


@experiment("clt-sharp", seconds={"model": 20})
@prints_premise
def clt_sharp(case: TrialCase) -> Finding:
    """The share of attention rows i >= 10, counted from 1, whose largest weight is at most 0.1, over all heads and
    layers; one value per prompt.

    Described: the share over all rows; the Lindeberg share, which of the variance sum_j P_ij^2 |v_j - m_i|^2 of a sum
    of independent values comes from terms above half of its standard deviation; untrained twins.
    """
    trial = AttentionTrial.of(case)
    if trial.without_ruling is not None:
        return trial.without_ruling
    rows = RowShares(largest_weight=case.constant("largest_weight"), first_row=case.constant("first_row"))
    measured = trial.recording.replay(rows)[rows.name]
    if bool(measured.share.isnull().all()):
        return Finding.impossible(
            f"the texts of {case.subject.name} have fewer than {rows.first_row} tokens, but rows from there on count"
        )
    share = over_layers(measured.share)
    twins = np.stack(
        [
            over_layers(recording.replay(rows)[rows.name].share)
            for recording in case.subject.twin_recordings(
                case.constant("twins"), seed=case.seed, texts=trial.prompts[:TWIN_PROMPTS]
            )
        ]
    )
    lengths = [len(row) for row in trial.recording.batch.visible_ids]

    def silent(recording: Recording) -> Evidence:
        return over_prompts(over_layers(recording.replay(rows)[rows.name].share))

    return Finding(
        undecided_because=trial.chosen.alike,
        evidence={"share of rows": over_prompts(share)},
        controls={
            "causal-uniform kernel": over_prompts(rows.of_kernels([causal_uniform(n) for n in lengths])),
            "one-hot kernel": over_prompts(rows.of_kernels([torch.eye(n, device="cpu") for n in lengths])),
            "blocks that write nothing": trial.silent_evidence(silent, "there are no increments to add up"),
        },
        described={
            "share of all rows": over_prompts(over_layers(measured.share_of_all)),
            "share of all rows, causal-uniform kernel": over_prompts(
                rows.of_kernels([causal_uniform(n) for n in lengths], first_row=1)
            ),
            f"Lindeberg share, terms above {EPSILON:g} standard deviations": over_prompts(
                over_layers(measured.lindeberg_share)
            ),
            **TwinContrast(share, twins).described("share of rows"),
            **_over_contexts(case, trial),
        },
        data=curve(
            "share_of_rows",
            by_prompt(measured.share.mean("head")),
            {"layer": measured.layer.values.tolist()},
            label=f"share of rows whose largest weight is at most {rows.largest_weight:g}",
            over="prompt",
        ),
        remark=f"The share runs {layer_means(measured.share.mean('head'))} over the layers; in untrained twins it is "
        f"{twins.mean():.3f}. The share of the variance of a sum of independent values that single large terms "
        f"contribute runs {layer_means(measured.lindeberg_share.mean('head'))}.",
        setting=trial.setting,
    )  # fmt: skip


def _over_contexts(case: TrialCase, trial: AttentionTrial) -> dict[str, Evidence]:
    """How far increments of layer 0 over contexts are from normal, and how much of their covariance is between heads;
    why not, if no word occurs often enough at the same position.
    """
    name = "distance from normal of increments over contexts"
    try:
        contexts, _ = contexts_of(case.subject)
        groups = context_groups(trial.few, contexts, groups=case.count(256, quick=32), seed=case.seed)
    except HelmscopeError as error:
        return {name: PremiseImpossible(str(error))}
    measured = context_group_noise(groups, seed=case.seed)
    excess = measured.kolmogorov_distance - measured.kolmogorov_distance_null
    few_keys = measured.effective_keys <= measured.effective_keys.median()
    rows = {
        name: measured.kolmogorov_distance,
        "the same of normal samples of the same size": measured.kolmogorov_distance_null,
        "distance above that of normal samples, half of the groups with fewer effective keys": excess[few_keys],
        "distance above that of normal samples, half of the groups with more effective keys": excess[~few_keys],
        "share of covariance over contexts between heads": measured.cross_head_share,
        "share of covariance over contexts between keys": measured.cross_key_share,
    }
    finite = {label: values.values[np.isfinite(values.values)] for label, values in rows.items()}
    return {label: Replicates(values, "groups") for label, values in finite.items() if len(values) > 1}


class RowShares(Instrument):
    """Instrument: the share of rows of attention whose largest weight is at most ``largest_weight``.

    ``share`` counts rows from ``first_row`` on, counted from 1 among the tokens that can be seen; ``share_of_all``
    counts all; ``lindeberg_share`` is the mean over the same rows as ``share`` of the Lindeberg share.

    >>> from helmscope.models.record import record
    >>> rows = RowShares(largest_weight=0.1, first_row=2)
    >>> measured = record("A", ["Once upon a time"]).replay(rows)["row_shares"]
    >>> measured.share.dims, float(measured.share.max())  # four keys cannot have weights of at most 0.1
    (('layer', 'prompt', 'head'), 0.0)
    """

    name = "row_shares"
    needs = Needs.KERNEL | Needs.QKV

    def __init__(self, *, largest_weight: float, first_row: int) -> None:
        self.largest_weight, self.first_row = largest_weight, first_row

    def attention(self, context: ReplayContext, tensors: AttentionTensors) -> None:
        """Records the shares of a layer."""
        kernel, value = tensors.kernel, tensors.head_values
        assert kernel is not None
        assert value is not None
        p = normalized_rows(kernel)
        seen = torch.ones_like(tensors.state[..., 0]) if context.visible is None else context.visible.to(tensors.state)
        counted = seen if context.weights is None else context.weights
        number = seen.cumsum(-1)
        later = (counted > 0) & (number >= self.first_row)
        small = (p.amax(-1) <= self.largest_weight).to(p)
        self.keep(
            context,
            {
                "share": _share(small, later.unsqueeze(1)),
                "share_of_all": _share(small, (counted > 0).unsqueeze(1)),
                "lindeberg_share": _share(lindeberg_share(p, value.to(p), EPSILON), later.unsqueeze(1)),
            },
            axes=("head",),
        )

    def of_kernels(self, kernels: list[Tensor], first_row: int | None = None) -> np.ndarray:
        """The share of rows from ``first_row`` on of kernels (n, n), one value each.

        >>> RowShares(largest_weight=0.1, first_row=10).of_kernels([causal_uniform(12)]).tolist()
        [1.0]
        """
        first = (self.first_row if first_row is None else first_row) - 1
        if any(len(kernel) <= first for kernel in kernels):
            raise HelmscopeError(f"kernels have fewer than {first + 1} tokens, but rows from there on count")
        return np.array([float((kernel[first:].amax(-1) <= self.largest_weight).double().mean()) for kernel in kernels])


def causal_uniform(n: int) -> Tensor:
    """The causal kernel with equal weights, 1/i in row i; in float64, so that 1/10 is not above 0.1.

    >>> causal_uniform(2)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    ones = torch.ones(n, n, dtype=torch.float64, device="cpu").tril()
    return ones / ones.sum(-1, keepdim=True)


def lindeberg_share(p: Tensor, value: Tensor, epsilon: float) -> Tensor:
    """The share of sum_j P_ij^2 |v_j - m_i|^2 that comes from terms P_ij |v_j - m_i| above epsilon times its root, for
    every row; 0 in the limit of a central limit theorem, NaN where there is no variance.

    >>> lindeberg_share(torch.full((4, 4), 0.25), torch.eye(4), 0.6).tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    mean = p @ value
    squares = (value**2).sum(-1).unsqueeze(-2) - 2 * mean @ value.mT + (mean**2).sum(-1, keepdim=True)
    terms = p * p * squares.clamp(min=0)
    total = terms.sum(-1, keepdim=True)
    large = torch.where(terms > epsilon**2 * total, terms, 0.0).sum(-1)
    return large / torch.where(total > 0, total, torch.nan).squeeze(-1)


def over_layers(values: xr.DataArray) -> np.ndarray:
    """The mean over layers and heads, one value per prompt.

    >>> import xarray as xr
    >>> over_layers(xr.DataArray([[[1.0, 0.0]]], dims=("layer", "prompt", "head"))).tolist()
    [0.5]
    """
    return np.asarray(values.mean([axis for axis in values.dims if axis != "prompt"]).values)


def _share(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of a mask, of the values that are defined; NaN if there are none."""
    usable = mask & torch.isfinite(values)
    return torch.where(usable, values, 0.0).sum(-1) / usable.sum(-1)
