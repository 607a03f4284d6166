"""tokens-cluster: with depth the inner products of a model's tokens pile up at 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from helmscope.claims.finding import Check, Described, EveryLayer, Finding, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.models.boxed import box_texts
from helmscope.models.load import Loaded, load
from helmscope.models.record import record
from helmscope.models.twin import untrained_twin
from helmscope.observe.inner_products import inner_product_histogram
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.types import Exhibit, Region, Ruling, Trajectory

MODELS, TWINS, LEVEL, BINS = ("A", "tied"), 5, 0.9, 50
LOOPS = 24  # of the tied model as it was trained; it is looped to twice as many
BETA, FLOWS = 1.0, 16  # of the simulated flow, and how many prompts it starts from
COLUMNS = 7  # of figure 1: depths, evenly
ALIKE = Region(text="Two twins of a model, both models pooled, differ by less than 0.01.", low=-0.01, high=0.01)
DESCRIBED = Region(text="Described only.")


@experiment("tokens-cluster", seconds=120)
def tokens_cluster(case: Case) -> Finding:
    """The share of pairs i != j of one prompt with <x_i, x_j> > 0.9, at the last depth minus at the first, for the
    causal and the tied model in the box, and the same minus the mean of five untrained twins: all four must grow.

    x are the tokens on the theory's sphere: of the causal model the residual stream's direction, of the tied one, whose
    states come out of norms, the direction with gain and bias folded out; the mean over coordinates is removed, the
    first token (the sink) left out. Mean-centred: the prompt's mean token is subtracted first. As a null one twin is
    put in the model's place, against another. Beside it a flow SA of beta = 1 from the tied model's first
    states, a unit of time for a layer.
    """
    trained = {"A": load("A"), "tied": load("tied", loops=2 * LOOPS)}
    texts, firsts = _prompts(case.count(64, quick=32), trained["A"].tokenizer)
    recordings = {name: record(loaded, texts) for name, loaded in trained.items()}
    paths = {name: recording.on_sphere for name, recording in recordings.items()}
    clouds = {name: _Cloud.of(paths[name], recordings[name].batch.inputs["input_ids"]) for name in MODELS}
    twins = {name: _twins(loaded, texts, case) for name, loaded in trained.items()}
    ends = {"A": clouds["A"].depths - 1, "tied": 2 * LOOPS}
    growth = {name: _growth(clouds[name].share, ends[name]) for name in MODELS}
    null = {name: np.stack([_growth(each.share, ends[name]) for each in twins[name]]) for name in MODELS}
    pairs = [null[name][k].mean() - null[name][k + 1].mean() for name in MODELS for k in range(0, TWINS - 1, 2)]
    flow = _flow(paths["tied"])
    flowed = _Cloud.of(flow)
    tied, raw = clouds["tied"], _Cloud.of(recordings["tied"].trajectory)
    whole = _Cloud.of(paths["A"], sink=True)
    cases = {f"{name} itself": growth[name] for name in MODELS}
    cases |= {f"{name} over its untrained twins": growth[name] - null[name].mean(0) for name in MODELS}
    beside = {
        **{f"{name}, pairs of different words": _growth(clouds[name].share_distinct, ends[name]) for name in MODELS},
        **{f"{name}, mean-centred": _growth(clouds[name].share_centred, ends[name]) for name in MODELS},
        "A with the first token": _growth(whole.share, ends["A"]),
        "tied with gain and bias": _growth(raw.share, ends["tied"]),
        f"tied, from {LOOPS} to {2 * LOOPS} loops": tied.share[-1] - tied.share[2 * LOOPS],
        "simulated flow": _growth(flowed.share, flowed.depths - 1),
    }
    return Finding(
        evidence=EveryLayer(list(cases.values()), "prompts", names=list(cases)),
        null=Check("growth of one untrained twin over another's", Replicates(pairs, "pairs"), Ruling.SUPPORTED, ALIKE),
        data=_drawn(clouds, twins, flowed, _figure_one(paths["tied"], flow)),
        also=tuple(
            Check(f"growth of the share: {what}", Described(values, "prompts"), Ruling.INCONCLUSIVE, DESCRIBED)
            for what, values in (cases | beside).items()
        ),
        remark=_remark(clouds, twins, ends),
        where=(
            f"models A and tied in the box, {len(texts)} texts with {firsts} distinct first tokens; from the first "
            "block's input to the last block's output; residual direction (A), norm output with gain and bias folded "
            "out (tied), mean over coordinates removed, first token left out. Intervals are over prompts, the five "
            f"twins held fixed. Beside them an SA flow of beta = {BETA:g}, V = I, one unit of time a layer, from the "
            f"first states of tied on {FLOWS} of the texts"
        ),
        exhibits=tuple(Exhibit(f"Certificate of {name}", str(each.certificate)) for name, each in recordings.items()),
    )


@dataclass(frozen=True)
class _Cloud:
    """Inner products of the tokens of each prompt, (depth, prompt): their mean and the share above 0.9, both raw and
    without the prompt's mean token, and the share among pairs of different token ids.
    """

    mean: np.ndarray
    share: np.ndarray
    share_distinct: np.ndarray
    mean_centred: np.ndarray
    share_centred: np.ndarray

    @classmethod
    def of(cls, path: Trajectory, ids: Tensor | None = None, *, sink: bool = False) -> _Cloud:
        path = path if sink else _without_first(path)
        n = path.states.shape[2]
        real = torch.ones(path.states.shape[1:3], dtype=torch.bool) if path.weights is None else path.weights[0] > 0
        words = torch.arange(n).expand(real.shape) if ids is None else ids[:, -n:]
        i, j = torch.triu_indices(n, n, 1)
        pairs = (real[:, i] & real[:, j]).double()
        distinct = pairs * (words[:, i] != words[:, j])
        rows = []
        for x in path.states:
            mean = (x * real.unsqueeze(-1)).sum(1, keepdim=True) / real.sum(1)[:, None, None]
            inner, centred = ((y @ y.mT)[:, i, j] for y in (x, retract(x - mean)))
            parts = [(inner, pairs), (inner > LEVEL, pairs), (inner > LEVEL, distinct)]
            parts += [(centred, pairs), (centred > LEVEL, pairs)]
            rows.append(torch.stack([(value * counted).sum(1) / counted.sum(1) for value, counted in parts]))
        return cls(*torch.stack(rows, 1).numpy())

    @property
    def depths(self) -> int:
        return len(self.mean)


def _growth(share: np.ndarray, end: int) -> np.ndarray:
    """From the first depth to ``end``, by prompt."""
    return np.asarray(share[end] - share[0])


def _without_first(path: Trajectory) -> Trajectory:
    return Trajectory(path.times, path.states[:, :, 1:], None if path.weights is None else path.weights[:, :, 1:])


def _prompts(count: int, tokenizer: Any) -> tuple[list[str], int]:
    """Texts in the box, first one of each first token, then the second of each, and so on; and how many first tokens
    they have.
    """
    texts = box_texts()
    firsts = [int(ids[0]) for ids in tokenizer(texts)["input_ids"]]
    rank = [firsts[:k].count(first) for k, first in enumerate(firsts)]
    chosen = sorted(sorted(range(len(texts)), key=lambda k: (rank[k], k))[:count])
    return [texts[k] for k in chosen], len({firsts[k] for k in chosen})


def _twins(loaded: Loaded, texts: list[str], case: Case) -> list[_Cloud]:
    seeds = [case.stream(k) for k in range(TWINS)]
    return [_Cloud.of(record(untrained_twin(loaded, seed=seed), texts).on_sphere) for seed in seeds]


def _flow(path: Trajectory) -> Trajectory:
    """The flow from the first states of some prompts, at half a unit of time for a half-layer."""
    x = retract(path.states[0, :FLOWS].double())
    times = [k / 2 for k in range(2 * LOOPS + 1)]
    weights = None if path.weights is None else path.weights[0, :FLOWS]
    return integrate(SA(beta=BETA), x, times, weights=weights, stepper=DormandPrince(1e-5)).trajectory


def _drawn(
    clouds: dict[str, _Cloud], twins: dict[str, list[_Cloud]], flow: _Cloud, histograms: xr.Dataset
) -> xr.Dataset:
    """Means and shares over depth: the models, the mean of their twins, and beside the means the flow."""
    models = {}
    for name in MODELS:
        models[name] = [clouds[name]]
        models[f"{name} untrained"] = twins[name]
    subjects = {**models, f"SA flow, beta = {BETA:g} ({FLOWS} prompts)": [flow]}
    centred = "with the prompt's mean token subtracted first"
    words = {
        "mean": "mean inner product of two tokens of a prompt",
        "mean_centred": f"mean inner product {centred}, where -1/(n - 1) is the mean of any even cloud",
        "share": f"share of inner products above {LEVEL} (the flow's goes to 1)",
        "share_centred": f"share of inner products above {LEVEL}, {centred}",
    }
    n, depth = clouds[MODELS[0]].mean.shape[1], max(cloud.depths for cloud in clouds.values())
    data: dict[str, xr.Variable] = {}
    for name, long_name in words.items():
        dim, curves = ("subject", subjects) if name == "mean" else ("model", models)
        values = np.full((2, depth, len(curves)), np.nan)
        for k, several in enumerate(curves.values()):
            each = np.mean([getattr(cloud, name) for cloud in several], 0)
            values[:, : len(each), k] = each.mean(1), each.std(1, ddof=1) / each.shape[1] ** 0.5
        data[name] = xr.Variable(("half_step", dim), values[0], {"long_name": long_name, "n": n})
        data[f"{name}_stderr"] = xr.Variable(("half_step", dim), values[1])
    axes = {"half_step": np.arange(depth), "subject": list(subjects), "model": list(models)}
    found = xr.Dataset(data, axes, {"n": n})
    return xr.merge([found, histograms], combine_attrs="drop_conflicts").assign_attrs(n=n)


def _figure_one(path: Trajectory, flow: Trajectory) -> xr.Dataset:
    """Histograms at even depths (inner product, share of the depth, what): the tied model at its depth and looped to
    twice that, as the source's figure 1 has it, and the flow.
    """
    rows = {
        f"{LOOPS} loops": (path, 2 * LOOPS),
        f"{2 * LOOPS} loops": (path, 4 * LOOPS),
        f"SA flow, t to {LOOPS}": (flow, 2 * LOOPS),
    }
    found = []
    for seen, last in rows.values():
        at = [round(last * k / (COLUMNS - 1)) for k in range(COLUMNS)]
        part = _without_first(Trajectory(torch.linspace(0, 1, COLUMNS), seen.states[at], seen.weights))
        found.append(inner_product_histogram(part, bins=BINS).drop_attrs(deep=False))
    both = xr.concat(found, xr.DataArray(list(rows), dims="what", name="what"))
    both = both.rename(time="depth").assign_coords(depth=np.round(np.linspace(0, 1, COLUMNS), 2))
    both = both.transpose("inner_product", "depth", "what").rename(share="histogram", share_stderr="histogram_stderr")
    words = f"tied model: share of pairs in {BINS} bins over depth (figure 1); below, the flow ({FLOWS} prompts)"
    both.histogram.attrs = {"long_name": words, "n": path.states.shape[1]}
    return both


def _remark(clouds: dict[str, _Cloud], twins: dict[str, list[_Cloud]], ends: dict[str, int]) -> str:
    told = []
    for name in MODELS:
        own, end = clouds[name].share.mean(1), ends[name]
        others = np.mean([cloud.share.mean(1) for cloud in twins[name]], 0)
        told.append(
            f"{name}: the share above {LEVEL} goes from {own[0]:.3f} over {own[: end + 1].max():.3f} to "
            f"{own[end]:.3f}, its untrained twins' from {others[0]:.3f} to {others[end]:.3f}"
        )
    last, others = clouds["tied"].share[-1].mean(), np.mean([cloud.share[-1].mean() for cloud in twins["tied"]])
    return f"{'; '.join(told)}; looped to {2 * LOOPS}, tied has {last:.3f} and its untrained twins {others:.3f}."
