"""operator-class: attention heads transport coordinates rather than mix features or retrieve single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from helmscope.claims.attention_trials import writes_nothing
from helmscope.claims.curves import curve
from helmscope.claims.evidence import Count, PairedDifferences, PremiseImpossible, Replicates
from helmscope.claims.finding import Finding
from helmscope.claims.prompts import ChosenPrompts, prompts_or_finding
from helmscope.claims.registry import TrialCase, experiment
from helmscope.claims.small_steps import silenced
from helmscope.observe.head_write_models import R_SQUARED, WriteModel, head_write_models, head_write_r_squared
from helmscope.stats.replicates import random_halves
from helmscope.stats.scales import RemainderScale
from helmscope.types import HelmscopeError, Region, Ruling

if TYPE_CHECKING:
    from torch import Tensor

    from helmscope.claims.evidence import Evidence
    from helmscope.models.recording import Recording

MIXING, RETRIEVAL, TRANSPORT = (each.value for each in WriteModel)
REMAINDER = RemainderScale()
ABOVE = Region(text="above 0", above=0.0)
NO_VARIANCE = "blocks that write nothing: no head writes anything whose variance a model could explain"


@experiment("operator-class", seconds={"model": 37})
def operator_class(case: TrialCase) -> Finding:
    """The share of the heads of a model whose writes transport predicts better than mixing, and than retrieval, on the
    half of the prompts on which nothing was fitted.

    Described: the R^2 of the three models over prompts, the share of heads with a difference beyond its interval, and
    untrained twins. Controls are heads of synthetic kernels: constant, of single tokens, and gated.
    """
    prompts = prompts_or_finding(case, "kernel", "replay", head=True, length=case.constant("tokens"))
    if isinstance(prompts, Finding):
        return prompts
    recording = case.subject.record(prompts.texts)
    try:
        measured = head_write_models(recording, seed=case.seed, progress=False)
    except HelmscopeError as error:  # a family that hides the outputs of its heads
        return Finding.impossible(str(error))
    above = {other: _above(measured, other) for other in (MIXING, RETRIEVAL)}
    if not above[MIXING][1]:
        return Finding.impossible(NO_VARIANCE)
    by_model = measured[R_SQUARED].mean(("layer", "head")).transpose("prompt", "write_model")
    return Finding(
        undecided_because=prompts.alike,
        evidence={
            "transport above mixing": Count(*above[MIXING], "heads"),
            "transport above retrieval": Count(*above[RETRIEVAL], "heads"),
            "R^2 of the three models": _mean(by_model, TRANSPORT),
        },
        controls={
            "blocks that write nothing": _silent(case, recording),
            "planted mixing": _planted(case, MIXING, above=MIXING),
            "planted retrieval": _planted(case, RETRIEVAL, above=RETRIEVAL),
            "planted transport": _planted(case, TRANSPORT, above=MIXING),
        },
        described=_described(measured, by_model) | _twins(case, prompts),
        data=curve(
            "r_squared",
            measured[R_SQUARED].mean("head").transpose("prompt", "layer", "write_model").values.clip(min=-1),
            {"layer": measured.layer.values.tolist(), "write_model": [MIXING, RETRIEVAL, TRANSPORT]},
            label="held-out R^2 of a head's write, mean over heads, at least -1",
            over="prompt",
        ),
        remark=_remark(measured),
        setting=f"{prompts.setting}, {case.constant('tokens')} tokens each, fitted on {measured.attrs['fitted']} of "
        f"them and tested on the other {measured.sizes['prompt']}; writes in the residual stream, first query left out",
    )


def _per_head(measured: xr.Dataset) -> xr.DataArray:
    """The held-out R^2 of each head with writes that vary, over (heads, write_model)."""
    flat = measured[R_SQUARED].mean("prompt").stack(heads=("layer", "head")).transpose("heads", "write_model")
    return flat[flat.notnull().all("write_model")]


def _above(measured: xr.Dataset, other: str = MIXING) -> tuple[int, int]:
    """How many heads transport predicts better than another model does, of how many."""
    heads = _per_head(measured)
    better = heads.sel(write_model=TRANSPORT) > heads.sel(write_model=other)
    return int(better.sum()), len(heads)


def _mean(by_model: xr.DataArray, model: str) -> Evidence:
    return Replicates(by_model.sel(write_model=model).values, "prompts", REMAINDER)


def _described(measured: xr.Dataset, by_model: xr.DataArray) -> dict[str, Evidence]:
    """The mean R^2 of each model, and the heads with a clear difference, or a clear winner."""
    rows: dict[str, Evidence] = {
        f"R^2 of {name}, mean over heads": _mean(by_model, name) for name in (MIXING, RETRIEVAL, TRANSPORT)
    }
    values = measured[R_SQUARED].stack(heads=("layer", "head"))
    difference = values.sel(write_model=TRANSPORT) - values.sel(write_model=MIXING)
    tried = [each for each in difference.transpose("heads", "prompt").values if np.isfinite(each).all()]
    for text, sign in (("transport above mixing", 1), ("mixing above transport", -1)):
        rulings = [PairedDifferences(sign * each, "prompts").weigh(ABOVE).ruling for each in tried]
        count = rulings.count(Ruling.SUPPORTED)
        rows[f"share of heads with {text} beyond its interval"] = Count(count, len(tried), "heads")
    heads = _per_head(measured)
    best = heads.argmax("write_model").values
    for number, name in enumerate((MIXING, RETRIEVAL, TRANSPORT)):
        rows[f"share of heads that {name} predicts best"] = Count(int((best == number).sum()), len(heads), "heads")
    return rows


def _twins(case: TrialCase, prompts: ChosenPrompts) -> dict[str, Evidence]:
    """The share of heads of untrained twins, one value per twin."""
    count = case.constant("twin_prompts_quick" if case.quick else "twin_prompts")
    twins = case.subject.twin_recordings(case.constant("twins"), seed=case.seed, texts=prompts.texts[:count])
    found = [_above(head_write_models(twin, seed=case.seed, progress=False)) for twin in twins]
    shares = np.array([above / heads if heads else np.nan for above, heads in found])
    return {"share of heads with transport above mixing, untrained twins": Replicates(shares, "twins")}


def _silent(case: TrialCase, recording: Recording) -> Evidence:
    """The same where attention writes nothing: there is no write to predict."""
    silent = silenced(recording)
    if writes_nothing(silent):
        return PremiseImpossible(NO_VARIANCE)
    return Count(*_above(head_write_models(silent, seed=case.seed, progress=False)), "heads")


def _planted(case: TrialCase, kind: str, *, above: str) -> Evidence:
    """The count of synthetic heads of a kind that transport predicts better than the model ``above``."""
    prompts, heads, tokens = (case.constant(name) for name in ("least_prompts", "planted_heads", "tokens"))
    shape = prompts, heads, tokens, case.constant("planted_dim")
    kernel, values = planted_heads(case, kind, shape)
    fitted, tested = random_halves(prompts, seed=case.seed)
    found = head_write_r_squared(kernel, values, fitted=fitted.tolist(), tested=tested.tolist()).mean(0)
    order = [each.value for each in WriteModel]
    better = found[:, order.index(TRANSPORT)] > found[:, order.index(above)]
    return Count(int(better.sum()), heads, "heads")


def planted_heads(case: TrialCase, kind: str, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Causal kernels (prompts, heads, tokens, tokens) and random values, with the prompts, heads, tokens and dimensions
    of ``shape``: the same kernel in all prompts, or one random key of each query, or weights (1 - l) on a constant
    kernel and l on the first token, whose value is constant, with random l for every token and prompt.
    """
    prompts, heads, tokens, dim = shape
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    values = case.normal(prompts, heads, tokens, dim, index=20)
    if kind == RETRIEVAL:
        keys = case.normal(prompts, heads, tokens, tokens, index=21).masked_fill(~causal, -torch.inf).argmax(-1)
        return torch.eye(tokens, dtype=values.dtype)[keys], values
    logits = case.normal(heads, tokens, tokens, index=22)
    if kind == MIXING:
        return logits.masked_fill(~causal, -torch.inf).softmax(-1).expand(prompts, heads, tokens, tokens), values
    causal[1:, 0] = False
    gate = case.normal(prompts, heads, tokens, index=23).sigmoid()
    gate[..., 0] = 1.0
    kernel = (1 - gate).unsqueeze(-1) * logits.masked_fill(~causal, -torch.inf).softmax(-1)
    kernel[..., 0] = gate
    values[:, :, 0] = values[0, :, 0]
    return kernel, values


def _remark(measured: xr.Dataset) -> str:
    heads = _per_head(measured)
    mixing, retrieval, transport = (heads.sel(write_model=name).values for name in (MIXING, RETRIEVAL, TRANSPORT))
    gain = transport - mixing
    return (
        f"Over heads the median R^2 is {np.median(mixing):.3f} for mixing, {np.median(retrieval):.3f} for retrieval "
        f"and {np.median(transport):.3f} for transport; transport minus mixing runs from {gain.min():.3f} to "
        f"{gain.max():.3f}, with a median of {np.median(gain):.4f}."
    )
