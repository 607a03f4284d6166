"""tokens-cluster: with depth the inner products of a model's tokens pile up at 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from helmscope.claims.curves import curve
from helmscope.claims.finding import Check, Described, EveryLayer, Finding, Replicates
from helmscope.claims.registry import Case, experiment
from helmscope.fields.attention import SA
from helmscope.geometry.sphere import retract
from helmscope.models.subject import Subject
from helmscope.observe.inner_products import inner_product_histogram
from helmscope.solve.dormand_prince import DormandPrince
from helmscope.solve.integrate import integrate
from helmscope.types import Exhibit, HelmscopeError, Region, Ruling, Trajectory

if TYPE_CHECKING:
    from helmscope.models.recording import Recording

TWINS, LEVEL, BINS = 5, 0.9, 50
BETA, FLOWS = 1.0, 16  # of the simulated flow, and how many prompts it starts from
LEAST_TOKENS = 3  # in a text: a pair beside the first
COLUMNS = 7  # of figure 1: depths, evenly
ALIKE = Region(text="Two twins of a model, both models pooled, differ by less than 0.01.", low=-0.01, high=0.01)
NEAR = Region(text="A twin differs from the mean of the others by less than 0.01.", low=-0.01, high=0.01)
DESCRIBED = Region(text="Described only.")


@experiment("tokens-cluster", seconds=120, subjects=("model",), usual=(Subject("A"), Subject("tied")))
def tokens_cluster(case: Case) -> Finding:
    """The share of pairs i != j of one prompt with <x_i, x_j> > 0.9, at the last depth minus at the first, for each
    subject (the causal and the tied model in the box where nobody names one), and the same minus the mean of five
    untrained twins: all must grow.

    x are the tokens on the theory's sphere: the residual stream's direction, or where states come out of norms, as in
    the tied model, the direction with gain and bias folded out; the mean over coordinates is removed, the first token
    (the sink) left out. Mean-centred: the prompt's mean token is subtracted first. As a null one twin is put in the
    model's place, against others. A model of one tied block is looped to twice its depth. Beside it a flow SA of
    beta = 1 from the first states of the last subject, a unit of time for a layer.
    """
    missing = next((why for each in case.subjects if (why := each.needs("on_sphere")) is not None), None)
    if missing is not None:
        return Finding.impossible(missing)
    runs = [_Run.of(name, subject, case) for name, subject in zip(case.names, case.subjects, strict=True)]
    shown = runs[-1]
    flow = _flow(shown.path, shown.end)
    flowed = _Cloud.of(flow)
    cases = {f"{run.name} itself": run.growth for run in runs}
    cases |= {f"{run.name} over its untrained twins": run.growth - run.null.mean(0) for run in runs}
    beside = {
        **{f"{run.name}, pairs of different words": _growth(run.cloud.share_distinct, run.end) for run in runs},
        **{f"{run.name}, mean-centred": _growth(run.cloud.share_centred, run.end) for run in runs},
        **{what: growth for run in runs for what, growth in run.other_coordinates().items()},
        "simulated flow": _growth(flowed.share, flowed.depths - 1),
    }
    texts = " and ".join(dict.fromkeys(f"{run.prompts} texts with {run.firsts} distinct first tokens" for run in runs))
    spheres = ", ".join(f"{run.coordinates} ({run.name})" for run in runs)
    return Finding(
        evidence=EveryLayer(list(cases.values()), "prompts", names=list(cases)),
        null=_null(runs),
        data=_drawn(runs, flowed, _figure_one(shown, flow)),
        also=tuple(
            Check(f"growth of the share: {what}", Described(values, "prompts"), Ruling.INCONCLUSIVE, DESCRIBED)
            for what, values in (cases | beside).items()
        ),
        remark=_remark(runs),
        where=(
            f"model{'s' if len(runs) > 1 else ''} {' and '.join(run.name for run in runs)}, {texts}; from the first "
            f"block's input to the last block's output; {spheres}, mean over coordinates removed, first token left "
            "out. Intervals are over prompts, the five twins held fixed. Beside them an SA flow of beta = "
            f"{BETA:g}, V = I, one unit of time a layer, from the first states of {shown.name} on {FLOWS} of the texts"
        ),
        exhibits=tuple(Exhibit(f"Certificate of {run.name}", str(run.recording.certificate)) for run in runs),
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """One subject and its twins on some prompts: ``end`` is the depth of the model as it was trained, behind which a
    tied block is looped on.
    """

    name: str
    recording: Recording
    twins: list[_Cloud]
    cloud: _Cloud
    end: int
    prompts: int
    firsts: int

    @classmethod
    def of(cls, name: str, subject: Subject, case: Case) -> _Run:
        texts, firsts = _prompts(case.count(64, quick=32), subject)
        loops = subject.tied_loops
        deep = subject if loops is None else subject.looped(2 * loops)
        recording = deep.recording_of(texts)
        cloud = _Cloud.of(recording.on_sphere, recording.batch.inputs["input_ids"])
        # map holds no recording while the next one is made
        twins = list(map(_Cloud.of_recording, deep.twin_recordings(TWINS, seed=case.seed, texts=texts)))
        end = cloud.depths - 1 if loops is None else 2 * loops
        return cls(name, recording, twins, cloud, end, len(texts), firsts)

    @property
    def path(self) -> Trajectory:
        return self.recording.on_sphere

    @property
    def growth(self) -> np.ndarray:
        return _growth(self.cloud.share, self.end)

    @property
    def null(self) -> np.ndarray:
        """The growth of each twin."""
        return np.stack([_growth(each.share, self.end) for each in self.twins])

    @property
    def is_looped(self) -> bool:
        return self.end < self.cloud.depths - 1

    @property
    def coordinates(self) -> str:
        post = self.recording.anatomy.post_norm
        return "norm output with gain and bias folded out" if post else "residual direction"

    def other_coordinates(self) -> dict[str, np.ndarray]:
        """The growth with the first token, or with gain and bias, and while a tied block is looped on."""
        if not self.recording.anatomy.post_norm:
            return {f"{self.name} with the first token": _growth(_Cloud.of(self.path, sink=True).share, self.end)}
        found = {f"{self.name} with gain and bias": _growth(_Cloud.of(self.recording.trajectory).share, self.end)}
        if self.is_looped:
            loops = self.end // 2
            what = f"{self.name}, from {loops} to {2 * loops} loops"
            found[what] = self.cloud.share[-1] - self.cloud.share[self.end]
        return found


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

    @classmethod
    def of_recording(cls, recording: Recording) -> _Cloud:
        return cls.of(recording.on_sphere)

    @property
    def depths(self) -> int:
        return len(self.mean)


def _null(runs: list[_Run]) -> Check:
    """A twin in the model's place, which must not differ: twin against twin, pooled over two models; of one model each
    twin against the mean of the others, since two pairs would be too few for an interval.
    """
    means = [run.null.mean(1) for run in runs]
    if len(runs) == 1:
        apart = [each - np.delete(means[0], k).mean() for k, each in enumerate(means[0])]
        what = "growth of one untrained twin over the mean of the others"
        return Check(what, Replicates(apart, "twins"), Ruling.SUPPORTED, NEAR)
    pairs = [each[k] - each[k + 1] for each in means for k in range(0, TWINS - 1, 2)]
    what = "growth of one untrained twin over another's"
    return Check(what, Replicates(pairs, "pairs"), Ruling.SUPPORTED, ALIKE)


def _growth(share: np.ndarray, end: int) -> np.ndarray:
    """From the first depth to ``end``, by prompt."""
    return np.asarray(share[end] - share[0])


def _without_first(path: Trajectory) -> Trajectory:
    return Trajectory(path.times, path.states[:, :, 1:], None if path.weights is None else path.weights[:, :, 1:])


def _prompts(count: int, subject: Subject) -> tuple[list[str | tuple[int, ...]], int]:
    """Texts of a subject, first one of each first token, then the second of each, and so on; and how many first tokens
    they have.
    """
    texts = subject.texts
    for k, row in enumerate(subject.token_ids):
        if len(row) < LEAST_TOKENS:
            raise HelmscopeError(
                f"texts[{k}] has {len(row)} tokens, but the claim needs {LEAST_TOKENS} or more in each"
            )
    firsts = [int(row[0]) for row in subject.token_ids]
    rank = [firsts[:k].count(first) for k, first in enumerate(firsts)]
    chosen = sorted(sorted(range(len(texts)), key=lambda k: (rank[k], k))[:count])
    return [texts[k] for k in chosen], len({firsts[k] for k in chosen})


def _flow(path: Trajectory, end: int) -> Trajectory:
    """The flow from the first states of some prompts, at half a unit of time for a half-layer."""
    x = retract(path.states[0, :FLOWS].double())
    times = [k / 2 for k in range(end + 1)]
    weights = None if path.weights is None else path.weights[0, :FLOWS]
    return integrate(SA(beta=BETA), x, times, weights=weights, stepper=DormandPrince(1e-5)).trajectory


def _drawn(runs: list[_Run], flow: _Cloud, histograms: xr.Dataset) -> xr.Dataset:
    """Means and shares of each prompt over depth: the models, the mean of their twins, and beside the means the flow,
    which has some of the prompts."""
    models = {}
    for run in runs:
        models[run.name] = [run.cloud]
        models[f"{run.name} untrained"] = run.twins
    subjects = {**models, f"SA flow, beta = {BETA:g} ({FLOWS} prompts)": [flow]}
    centred = "with the prompt's mean token subtracted first"
    words = {
        "mean": "mean inner product of two tokens of a prompt",
        "mean_centred": f"mean inner product {centred}, where -1/(n - 1) is the mean of any even cloud",
        "share": f"share of inner products above {LEVEL} (the flow's goes to 1)",
        "share_centred": f"share of inner products above {LEVEL}, {centred}",
    }
    prompts, depth = max(run.prompts for run in runs), max(run.cloud.depths for run in runs)
    found = [histograms]
    for name, long_name in words.items():
        dim, curves = ("subject", subjects) if name == "mean" else ("model", models)
        values = np.full((prompts, depth, len(curves)), np.nan)
        for k, several in enumerate(curves.values()):
            each = np.mean([getattr(cloud, name) for cloud in several], 0)
            values[: each.shape[1], : len(each), k] = each.T
        axes: dict[str, list[Any]] = {"half_step": list(range(depth)), dim: list(curves)}
        found.append(curve(name, values, axes, label=long_name, over="prompt"))
    return xr.merge([*found[1:], found[0]], join="outer")


def _figure_one(run: _Run, flow: Trajectory) -> xr.Dataset:
    """Histograms at even depths (inner product, share of the depth, what): the model at its depth and, where it is one
    tied block, looped to twice that, as the source's figure 1 has it, and the flow.
    """
    path, end = run.path, run.end
    layers, unit = end // 2, "loops" if run.is_looped else "layers"
    rows = {f"{layers} {unit}": (path, end)}
    rows |= {f"{2 * layers} loops": (path, 2 * end)} if run.is_looped else {}
    rows[f"SA flow, t to {layers}"] = (flow, end)
    found = []
    for seen, last in rows.values():
        at = [round(last * k / (COLUMNS - 1)) for k in range(COLUMNS)]
        part = _without_first(Trajectory(torch.linspace(0, 1, COLUMNS), seen.states[at], seen.weights))
        found.append(inner_product_histogram(replace(part, replicate="prompt"), bins=BINS))
    both = xr.concat(found, xr.DataArray(list(rows), dims="what", name="what"), join="outer")
    both = both.rename(time="depth", share="histogram")
    both = both.assign_coords(depth=np.round(np.linspace(0, 1, COLUMNS), 2))
    words = f"{run.name} model: share of pairs in {BINS} bins over depth (figure 1); below, the flow ({FLOWS} prompts)"
    both.histogram.attrs |= {"long_name": words}
    return both.transpose("prompt", "inner_product", "depth", "what")


def _remark(runs: list[_Run]) -> str:
    told, looped = [], []
    for run in runs:
        own, end = run.cloud.share.mean(1), run.end
        others = np.mean([cloud.share.mean(1) for cloud in run.twins], 0)
        told.append(
            f"{run.name}: the share above {LEVEL} goes from {own[0]:.3f} over {own[: end + 1].max():.3f} to "
            f"{own[end]:.3f}, its untrained twins' from {others[0]:.3f} to {others[end]:.3f}"
        )
        if run.is_looped:
            looped.append(f"looped to {end}, {run.name} has {own[-1]:.3f} and its untrained twins {others[-1]:.3f}")
    return f"{'; '.join(told + looped)}."
